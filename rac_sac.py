# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[mujoco]==1.4.0", "mujoco==4.0.0", "numpy==2.4.6", "tyro==1.0.17",
#     "pydantic==2.14.3", "wandb==0.31.0", "tqdm==4.70.1", "filelock==4.2.11", "moviepy==2.2.1"]
# ///
"""Realistic Actor-Critic on top of SAC (RAC-SAC), in one file.

"Balancing Value Underestimation and Overestimation with Realistic Actor-Critic" (Sicen Li, Gang Wang, Qinyun Tang, Liquan Wang,
2021), https://arxiv.org/abs/2110.09712.
One actor and N critics, conditioned on beta, learn a family of policies from optimistic (small beta) to pessimistic (large beta)
by uncertainty punished Q-learning (equation 18 of the paper):

    y = r + gamma (1 - terminated) (mean_i Q_i(s', a', beta) - beta std_i Q_i(s', a', beta) - alpha(beta) log pi(a'|s', beta))

Every environment step draws a beta to explore, uniformly from U2 = [1e-7, 0.3], every training sample one from U1 = [1e-7, 0.8].
Evaluation plays H = 12 betas and takes the best.

    python rac_sac.py --env-id Ant-v4 --utd 20

An environment step with 20 critic updates takes 114 to 253 ms on two cores (Ant-v4), 3.4 ms on an NVIDIA H200 (Hopper-v4). Return
after 33,000 steps, five seeds: Hopper-v4 2,540 ± 1,108, Walker2d-v4 1,008 ± 318, Ant-v4 1,076 ± 237. All runs and machines are in
benchmark/RESULTS.md.
"""

import contextlib
import copy
import csv
import ctypes
import dataclasses
import errno
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing.connection
import multiprocessing.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zipfile
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

# Before torch loads OpenMP: a waiting thread spins briefly, then leaves its core to the evaluation workers (benchmark/SPEED.md).
if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if __name__ == "__mp_main__":  # an evaluation worker
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import filelock
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch.func import functional_call, grad, grad_and_value
from tqdm import tqdm

CONDITION = "beta"  # what the policies of the family are told apart by
Beta = Annotated[float, Field(ge=1e-30)]  # its logarithm, an input of the networks, must stay finite in float32
Share = Annotated[float, Field(gt=0, le=1)]


@dataclasses.dataclass
class Args:
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    # Experiment
    exp_name: str = Path(__file__).stem  # the name of this experiment
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1  # networks, noise, environments and evaluation all follow from it
    torch_deterministic: bool = True  # use only PyTorch operations that give the same bits every time
    cuda: bool | None = None  # whether to train on the GPU; by default, when one is present
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"  # auto: the fastest that is exact float32 here
    compile: bool = True  # compile the update functions (falls back to eager where there is no compiler)
    cudagraphs: bool = True  # on a GPU, capture all updates of an environment step in one CUDA graph
    track: bool = False  # log to Weights & Biases (goes on offline when there is no key or no network)
    wandb_project_name: str = "realistic-actor-critic"  # the Weights & Biases project
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases project
    capture_video: bool = False  # record an episode of the best policy, at the end of training or with --evaluate

    # Run directory
    run_root: str = "runs"  # the folder in which run directories are made
    run_name: str | None = None  # the run directory's name; by default <env_id>__<exp_name>__<seed>__<time>
    checkpoint_seconds: NonNegativeFloat = 300.0  # seconds between two checkpoints
    resume: str | None = None  # a run directory; total_timesteps, eval_workers, max_pending_*, capture_video, compile may change
    evaluate: str | None = None  # a run directory or policy file; eval_episodes, eval_workers, seed, capture_video may be given

    # Environment and replay
    env_id: str = "Hopper-v4"  # the id of the Gymnasium environment
    total_timesteps: PositiveInt | None = None  # environment steps of the run; by default 1e6 for Humanoid, 3e5 for others
    learning_starts: NonNegativeInt = 5000  # environment steps with uniformly random actions before learning starts
    buffer_size: PositiveInt | None = None  # replay capacity; default: Humanoid 3e5, Walker2d 1e5, Ant 2e5, others 1e6
    batch_size: PositiveInt = 256  # the batch size sampled from the replay

    # Realistic Actor-Critic
    utd: PositiveInt = 20  # update-to-data ratio G: critic updates per environment step
    num_critics: Annotated[int, Field(ge=2)] = 10  # ensemble size N
    beta_min: Beta = 1e-7  # lower end of U1 and U2
    train_beta_max: Beta = 0.8  # a of U1 = U[beta_min, a], from which every training sample draws its beta
    explore_beta_max: Beta = 0.3  # b of U2 = U[beta_min, b], from which every environment step draws its beta

    # Actor-critic
    gamma: Share = 0.99  # the discount factor
    tau: Share = 0.005  # Polyak weight of the online critics in the target critics
    hidden_dim: PositiveInt = 256  # width of the two hidden layers of actor and critics
    policy_lr: NonNegativeFloat = 3e-4  # the learning rate of the actor
    q_lr: NonNegativeFloat = 3e-4  # the learning rate of the critics after the warm-up
    q_lr_init: NonNegativeFloat = 3e-5  # that of the critics at learning_starts, where their warm-up begins; q_lr: no warm-up
    q_lr_warmup_end: NonNegativeInt = 10000  # environment step at which it reaches q_lr; learning_starts: no warm-up

    # Temperature
    autotune: bool = True  # learn the temperature; otherwise it is fixed at alpha
    alpha: NonNegativeFloat = 0.2  # the temperature when autotune is off
    alpha_lr: NonNegativeFloat = 3e-4  # the learning rate of the temperature
    temperature_network: bool = True  # condition the temperature on beta by a network; otherwise one scalar is learned
    initial_log_alpha: float = -5.0  # xi: added to the temperature network's output, or the scalar's initial value
    target_entropy: float | None = None  # target entropy of the policy; by default minus the action dimension

    # Evaluation
    eval_frequency: PositiveInt = 1000  # environment steps between evaluations
    num_eval_policies: PositiveInt = 12  # H: how many betas are evaluated; the best one's return is the performance
    eval_episodes: PositiveInt = 10  # episodes per evaluated beta, from the same initial states for all
    eval_beta_max: Beta | None = None  # largest evaluated beta; default train_beta_max (the paper's text: explore_beta_max)
    eval_workers: NonNegativeInt | None = None  # processes, at most 4 a core; default half the cores, up to 12; 0: in this one
    max_pending_evaluations: NonNegativeInt | None = None  # how many may wait before training does; default twice eval_workers
    snapshot_frequency: NonNegativeInt = 0  # environment steps between snapshots (benchmark/value_bias.py); 0: none


# The method: targets and losses -------------------------------------------------------------------------------------------------
def upq_target(q_next, beta, reward, terminated, gamma, entropy_bonus):
    """The target of uncertainty punished Q-learning (equation 18; equation 3's minus is a misprint).

    q_next (N, B): target critics at the next state and action; beta, reward, terminated (0 or 1), entropy_bonus (B,),
    with entropy_bonus = -alpha(beta) * log_prob of the next action. Returns y (B,). The standard deviation divides by
    N - 1 (equation 8).
    """
    value = q_next.mean(0) - beta * q_next.std(0, correction=1) + entropy_bonus
    return reward + gamma * (1 - terminated) * value


def critic_loss(q, target):
    """Equation 17, summed over the members: q (N, B), target (B,) -> scalar."""
    return (q - target).square().mean(1).sum()


def actor_loss(q, alpha, log_prob):
    """Equation 19: q (N, B), alpha (B,), log_prob (B,) -> scalar. The actor sees the ensemble's mean."""
    return (alpha * log_prob - q.mean(0)).mean()


def temperature_loss(log_alpha, log_prob, target_entropy):
    """Equation 16: log_alpha (B,), log_prob (B,) -> scalar."""
    return (-log_alpha.exp() * (log_prob + target_entropy)).mean()


def squashed_gaussian(mean, log_std, noise):
    """Reparameterised sample of tanh(N(mean, std)) (equation 24) and its log-probability; all (B, A) -> (B, A), (B,).

    log(1 - tanh(u)^2) is computed as 2 (log 2 - u - softplus(-2u)), which is exact for large |u| too.
    """
    u = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - u - F.softplus(-2 * u))
    return u.tanh(), log_prob.sum(1)


# Networks -----------------------------------------------------------------------------------------------------------------------
class EnsembleLinear(nn.Module):
    """N independent linear layers as one batched product: weights (N, in, out), biases (N, 1, out).

    Each member has PyTorch's default weights for its own fan-in, U(+-1/sqrt(in)), and zero biases.
    """

    def __init__(self, num_members: int, in_features: int, out_features: int):
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(num_members, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_members, 1, out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, in), shared by all members, or (N, B, in), one input per member -> (N, B, out)."""
        x = x.expand(self.weight.shape[0], -1, -1)
        # Bias outside the product: the compiler fuses it with the ReLU after it into one pass. A product of width 1 as a sum:
        # fused with its neighbours it is three kernels of a critic update less on a GPU, and not slower on a CPU.
        if self.weight.shape[2] == 1:
            return (x * self.weight.mT).sum(2, keepdim=True) + self.bias
        return torch.einsum("nbi,nio->nbo", x, self.weight) + self.bias


class Critic(nn.Sequential):
    """An ensemble of N critics Q_i with two hidden layers each."""

    def __init__(self, num_critics: int, obs_dim: int, action_dim: int, hidden_dim: int, condition_dim: int = 1):
        first = EnsembleLinear(num_critics, obs_dim + action_dim + condition_dim, hidden_dim)
        second = EnsembleLinear(num_critics, hidden_dim, hidden_dim)
        last = EnsembleLinear(num_critics, hidden_dim, 1)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs (B, O + A + 1): obs, action and log beta beside each other -> (N, B)."""
        return super().forward(inputs).squeeze(2)


class Actor(nn.Module):
    """The policy pi(a | s, beta): mean and log standard deviation of a Gaussian that tanh squashes into [-1, 1].

    Its biases begin as PyTorch's default, as in the authors' code; the paper's text says zero.
    """

    def __init__(self, obs_dim: int, action_dim: int, hidden_dim: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim + 1, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim), nn.ReLU())
        self.mean = nn.Linear(hidden_dim, action_dim)
        self.log_std = nn.Linear(hidden_dim, action_dim)

    def forward(self, obs: torch.Tensor, log_beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs (B, O), log_beta (B, 1) -> mean (B, A), log_std (B, A) clamped to [-10, 2]."""
        x = self.body(torch.cat([obs, log_beta], 1))
        return self.mean(x), self.log_std(x).clamp(-10, 2)


class Temperature(nn.Module):
    """log alpha(beta): a network plus xi (equation 25), or one learned scalar, or a constant."""

    def __init__(self, args: Args):
        super().__init__()
        self.network = None
        self.log_alpha = math.log(max(args.alpha, 1e-45))  # fixed
        if args.autotune and args.temperature_network:
            self.log_alpha = args.initial_log_alpha
            self.network = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))
        elif args.autotune:
            self.log_alpha = nn.Parameter(torch.tensor(args.initial_log_alpha))

    def forward(self, log_beta: torch.Tensor) -> torch.Tensor:
        """log_beta (B, 1) -> log alpha (B,)."""
        output = self.network(log_beta) if self.network else torch.zeros_like(log_beta)
        return output.squeeze(1) + self.log_alpha


# One update of each network, in place; compiled --------------------------------------------------------------------------------
class Transitions(NamedTuple):
    """Rows of the replay by their parts."""

    obs: torch.Tensor  # (B, O)
    action: torch.Tensor  # (B, A)
    reward: torch.Tensor  # (B,)
    terminated: torch.Tensor  # (B,) 0 or 1
    next_obs: torch.Tensor  # (B, O)


class CriticBatch(NamedTuple):
    """What one critic update learns from."""

    inputs: torch.Tensor  # (B, O + A + 1) of the critics: obs, action, log beta
    next_inputs: torch.Tensor  # (B, O + A + 1) of the target critics: next obs, next action, log beta
    reward: torch.Tensor  # (B,)
    terminated: torch.Tensor  # (B,) 0 or 1
    beta: torch.Tensor  # (B,)
    entropy_bonus: torch.Tensor  # (B,) -alpha(beta) * log_prob of the next action


class ActorBatch(NamedTuple):
    """What one actor or temperature update learns from."""

    obs: torch.Tensor  # (B, O)
    beta: torch.Tensor  # (B,)
    noise: torch.Tensor  # (B, A) of the actions


class CriticMetrics(NamedTuple):
    """Averages over the updates of an environment step, samples and members."""

    qf_loss: torch.Tensor
    qf_values: torch.Tensor
    qf_std: torch.Tensor  # of the ensemble


class ActorMetrics(NamedTuple):
    """Averages over a minibatch."""

    actor_loss: torch.Tensor
    alpha: torch.Tensor
    entropy: torch.Tensor


class TemperatureMetrics(NamedTuple):
    """Averages over a minibatch."""

    alpha_loss: torch.Tensor


METRICS = (*CriticMetrics._fields, *ActorMetrics._fields, *TemperatureMetrics._fields)


def sample(replay, filled, position, uniform, low, high):
    """Rows of the filled part of the replay, and a beta from [low, high] for each; position, uniform: (S,) uniform in [0, 1).

    Position is float64: a float32 uniform has 24 bits, too few to index a million rows evenly. -> (S, 2*O + A + 2), (S,).
    """
    return replay[(position * filled).long()], low + (high - low) * uniform


def split_rows(rows: torch.Tensor, action_dim: int) -> Transitions:
    """Rows of the replay (B, 2*O + A + 2) as views of their parts."""
    obs_dim = (rows.shape[1] - action_dim - 2) // 2
    obs, action, reward, terminated, next_obs = rows.split([obs_dim, action_dim, 1, 1, obs_dim], 1)
    return Transitions(obs, action, reward[:, 0], terminated[:, 0], next_obs)


def adam_scales(count: torch.Tensor, lr, updates: int) -> torch.Tensor:
    """Step size and root of the second moment's bias correction of the next Adam updates, by row; count () float64 moves on.

    In float64, for 1 - 0.999 has only four digits in float32. Two columns of padding let every row begin at a multiple of 16
    bytes: Inductor's GPU code copies inputs that do not.
    """
    t = count + torch.arange(1, updates + 1, device=count.device)
    count.add_(updates)
    step_size = lr / (1 - 0.9**t)
    root = (1 - 0.999**t).sqrt()
    return torch.stack([step_size, root, t, t], 1).float()  # (updates, 4)


def adam_step(network, grads, moments, scales):
    """Adam with torch.optim.Adam's defaults; compiled into an update it is one pass over the parameters, which fused Adam is not.

    grads: by parameter name; moments: the first and the second, networks like it; scales: a row of adam_scales.
    """
    first_moments, second_moments = (moment.parameters() for moment in moments)
    for (name, parameter), first, second in zip(network.named_parameters(), first_moments, second_moments, strict=True):
        first.lerp_(grads[name], 0.1)
        second.mul_(0.999).addcmul_(grads[name], grads[name], value=0.001)
        parameter.sub_(scales[0] * first / (second.sqrt() / scales[1] + 1e-8))


def prepare_critics(actor, temperature, rows, beta, noise) -> CriticBatch:
    """All that the critics learn from and do not change, for all G minibatches at once: with actor and temperature frozen during
    the G critic updates, one pass equals G.

    rows (G*B, 2*O + A + 2), beta (G*B,), noise (G*B, A).
    """
    data = split_rows(rows, noise.shape[1])
    log_beta = beta.log()[:, None]
    mean, log_std = actor(data.next_obs, log_beta)
    next_action, log_prob = squashed_gaussian(mean, log_std, noise)
    return CriticBatch(
        inputs=torch.cat([data.obs, data.action, log_beta], 1),
        next_inputs=torch.cat([data.next_obs, next_action, log_beta], 1),
        reward=data.reward,
        terminated=data.terminated,
        beta=beta,
        entropy_bonus=-temperature(log_beta).exp() * log_prob,
    )


def update_critics(critic, target_critic, moments, scales, batch: CriticBatch, gamma, tau):
    """One critic (equations 17, 18) and Polyak step; returns q (N, B) and target (B,), for the metrics."""
    q_next = target_critic(batch.next_inputs)  # (N, B)
    target = upq_target(q_next, batch.beta, batch.reward, batch.terminated, gamma, batch.entropy_bonus)  # (B,), no gradient

    def loss_function(parameters):
        q = functional_call(critic, parameters, (batch.inputs,))  # (N, B)
        return critic_loss(q, target), q

    grads, q = grad(loss_function, has_aux=True)(dict(critic.named_parameters()))
    adam_step(critic, grads, moments, scales)
    for slow, fast in zip(target_critic.parameters(), critic.parameters(), strict=True):
        slow.lerp_(fast, tau)
    return q, target


def update_actor(actor, critic, temperature, moments, scales, batch: ActorBatch) -> ActorMetrics:
    """One actor step (equation 19)."""
    log_beta = batch.beta.log()[:, None]
    alpha = temperature(log_beta).exp()

    def loss_function(parameters):
        mean, log_std = functional_call(actor, parameters, (batch.obs, log_beta))
        action, log_prob = squashed_gaussian(mean, log_std, batch.noise)
        q = critic(torch.cat([batch.obs, action, log_beta], 1))  # (N, B)
        return actor_loss(q, alpha, log_prob), log_prob

    grads, (loss, log_prob) = grad_and_value(loss_function, has_aux=True)(dict(actor.named_parameters()))
    adam_step(actor, grads, moments, scales)
    return ActorMetrics(actor_loss=loss, alpha=alpha.mean(), entropy=-log_prob.mean())


def update_temperature(actor, temperature, moments, scales, batch: ActorBatch, target_entropy) -> TemperatureMetrics:
    """One temperature step (equation 16), with fresh actions of the updated actor."""
    log_beta = batch.beta.log()[:, None]
    mean, log_std = actor(batch.obs, log_beta)
    _, log_prob = squashed_gaussian(mean, log_std, batch.noise)

    def loss_function(parameters):
        return temperature_loss(functional_call(temperature, parameters, (log_beta,)), log_prob, target_entropy)

    grads, loss = grad_and_value(loss_function)(dict(temperature.named_parameters()))
    adam_step(temperature, grads, moments, scales)
    return TemperatureMetrics(alpha_loss=loss)


def add_metrics(metrics, all_q, all_targets, actor_metrics, temperature_metrics) -> None:
    """Add the averages of an environment step to the sums, in the order of METRICS; all_q: G of (N, B), all_targets: G of (B,).

    Once for all G critic updates: on a GPU every sum is a kernel.
    """
    q = torch.stack(all_q)  # (G, N, B)
    loss = torch.vmap(critic_loss)(q, torch.stack(all_targets)) / q.shape[1]  # (G,)
    critic_metrics = CriticMetrics(qf_loss=loss.mean(), qf_values=q.mean(), qf_std=q.std(1).mean())
    metrics += torch.stack([*critic_metrics, *actor_metrics, *temperature_metrics])


COMPILED = (sample, prepare_critics, adam_scales, update_critics, update_actor, update_temperature, add_metrics)
COMPILER_OPTIONS = {  # of Inductor, by device
    # Or else the compiler fuses loops that share nothing but their ranges, against the grain of one of them.
    "cpu": {"cpp.max_horizontal_fusion_size": 1},
    # Or else it chooses kernels by timing them: not the same bits twice.
    "cuda": {"shape_padding": False, "dynamic_scale_rblock": False},
}


# The family of policies ---------------------------------------------------------------------------------------------------------
REPLAY_CAPACITY = {"Humanoid": 300_000, "Walker2d": 100_000, "Ant": 200_000}  # others 1_000_000


def check_own_args(args: Args, name: str, action_dim: int) -> None:
    """Fill in this algorithm's defaults and check its arguments against each other.

    name: the environment's, without version; action_dim: the size of its actions, 0 where it is not known yet.
    """
    if args.target_entropy is None and action_dim:
        args.target_entropy = -float(action_dim)
    if args.eval_beta_max is None:
        args.eval_beta_max = args.train_beta_max
    if args.explore_beta_max > args.train_beta_max:
        raise UserError(f"explore_beta_max is {args.explore_beta_max}; it must not exceed train_beta_max, {args.train_beta_max}.")
    if args.beta_min > args.explore_beta_max:
        raise UserError(f"beta_min is {args.beta_min}; it must not exceed explore_beta_max, {args.explore_beta_max}.")


def condition_range(args: Args) -> tuple[float, float]:
    """The smallest and the largest beta that the policies are trained, or evaluated, for."""
    evaluated = eval_conditions(args)
    return min(args.beta_min, *evaluated), max(args.train_beta_max, *evaluated)


def eval_conditions(args: Args) -> list[float]:
    """The evaluated betas, beta_i = eval_beta_max / H * i (equation 20)."""
    return [args.eval_beta_max * (i / args.num_eval_policies) for i in range(1, args.num_eval_policies + 1)]


def network_inputs(obs: np.ndarray, beta) -> tuple[torch.Tensor, ...]:
    """What the actor sees: obs (B, O) and beta, a number or (B,) -> obs (B, O), log beta (B, 1)."""
    log_beta = np.log(np.broadcast_to(np.asarray(beta, np.float64), len(obs)))
    return torch.from_numpy(obs), torch.from_numpy(log_beta).float()[:, None]


@torch.inference_mode()
def deterministic_action(actor: nn.Module, obs: np.ndarray, beta) -> np.ndarray:
    """The action that is evaluated, tanh(mean): obs (B, O), beta a number or (B,) -> (B, A) in [-1, 1]."""
    mean, _ = actor(*network_inputs(obs, beta))
    return mean.tanh().numpy()


@torch.no_grad()
def alphas(learner, conditions: list[float]) -> list[float]:
    """alpha(beta_i) of the evaluated betas."""
    return learner.temperature(torch.tensor(conditions, device=learner.device).log()[:, None]).exp().tolist()


def make_network(name: str, args: Args, obs_dim: int, action_dim: int) -> nn.Module:
    """The actor or the critic as a run with these arguments has it."""
    if name == "actor":
        return Actor(obs_dim, action_dim, args.hidden_dim)
    return Critic(args.num_critics, obs_dim, action_dim, args.hidden_dim)


# Learner: replay, acting and the update loop ------------------------------------------------------------------------------------
class Learner(nn.Module):
    """Everything that training changes (networks, optimisers, replay, random numbers), and what changes it.

    The replay is one float32 matrix with a row (obs, action, reward, terminated, next_obs) per transition, on the training
    device. All noise is drawn from `generator`, outside the compiled functions. What changes over a run, beside these two, is a
    parameter or a registered buffer: only then does it come back on resuming. UserError where it does not fit in memory.
    """

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.args = args
        self.device = device
        self.obs_dim = obs_dim
        self.action_dim = action_dim
        with must_fit(f"{args.num_critics} critics with hidden_dim {args.hidden_dim}", "smaller networks", device):
            self._make_networks()
        width = 2 * obs_dim + action_dim + 2
        size = f"a replay of {args.buffer_size * width * 4 / 2**30:.1f} GiB (buffer_size {args.buffer_size})"
        with must_fit(size, "a smaller buffer_size", device):
            self.replay = torch.empty(args.buffer_size, width, device=device)
        on_cuda = device.type == "cuda"
        self.host_row = torch.empty(width, pin_memory=on_cuda)
        self.host_obs = torch.empty(1, obs_dim, pin_memory=on_cuda)
        self.obs = torch.zeros(1, obs_dim, device=device)
        self.action = torch.zeros(action_dim + 1, device=device)
        noise_seed = np.random.SeedSequence(args.seed).generate_state(1, np.uint64)  # apart from that of the weights
        self.generator = torch.Generator(device).manual_seed(int(noise_seed[0]))
        self.stream = None  # of its own, for capturing
        self.act_graph = None
        self.update_graph = None
        self.use_functions(compiled=args.compile)

    def _make_networks(self) -> None:
        """Networks, optimisers and the small tensors that go with them."""
        torch.manual_seed(self.args.seed)  # networks are made on the CPU: alike on every device
        self.actor = make_network("actor", self.args, self.obs_dim, self.action_dim)
        self.critic = make_network("critic", self.args, self.obs_dim, self.action_dim)
        self.temperature = Temperature(self.args)
        self.target = copy.deepcopy(self.critic)
        self.register_buffer("metrics", torch.zeros(len(METRICS)))  # sums over environment steps since they were last read
        self.register_buffer("filled", torch.zeros((), dtype=torch.float64))  # a tensor: a captured graph must see it grow
        self.register_buffer("q_lr", torch.tensor(float(self.args.q_lr)))
        self.moments = nn.ModuleDict()  # of Adam, by network: first and second
        self.counts = nn.ParameterDict()  # of Adam, by network: updates done
        for name in ("critic", "actor", "temperature"):
            self.moments[name] = nn.ModuleList(copy.deepcopy(getattr(self, name)) for _ in range(2))
            self.counts[name] = torch.zeros((), dtype=torch.float64)
        self.to(self.device).requires_grad_(False)  # gradients are taken by torch.func
        for parameter in self.moments.parameters():
            parameter.zero_()

    def use_functions(self, compiled: bool) -> None:
        """Take the functions of COMPILED as torch.compile makes them, or as they are."""
        options = COMPILER_OPTIONS.get(self.device.type, {})
        for function in COMPILED:
            fast = torch.compile(function, fullgraph=True, dynamic=False, options=options) if compiled else function
            setattr(self, function.__name__, fast)

    def store(self, step: int, obs, action, reward, terminated, next_obs) -> None:
        """Write the transition of environment step `step` (counted from 0) over the oldest one.

        A row does not say that its episode was truncated: `terminated` is 0. The episode goes on in the next row where `next_obs`
        is that row's `obs`.
        """
        np.concatenate((obs, action, (reward, terminated), next_obs), out=self.host_row.numpy(), casting="unsafe")
        self.replay[step % len(self.replay)].copy_(self.host_row)  # waits for the copy: the next row must not overtake it
        self.filled.fill_(min(step + 1, len(self.replay)))

    def random_action(self) -> np.ndarray:
        """A uniformly random action in [-1, 1], (A,)."""
        return (torch.rand(self.action_dim, generator=self.generator, device=self.device) * 2 - 1).cpu().numpy()

    def act(self, obs: np.ndarray) -> np.ndarray:
        """The exploring policy's action for obs (O,), in [-1, 1], (A,); TrainingError after a non-finite loss."""
        self.host_obs.numpy()[0] = obs
        self.obs.copy_(self.host_obs, non_blocking=True)
        if self.act_graph:
            self.act_graph.replay()
        else:
            self._act()
        action = self.action.cpu().numpy()  # waits for the device and all updates before, as store() does for its copy
        if not np.isfinite(action).all():
            self.check_finite()
            raise TrainingError("the policy's action became non-finite")
        return action[:-1].copy()

    def update(self, step: int) -> None:
        """All updates of environment step `step`: G of the critics, one of the actor and, where learned, of the temperature."""
        start, end = self.args.learning_starts, self.args.q_lr_warmup_end
        if start < end:  # the critics' learning rate is warmed up linearly (equation 23)
            self.q_lr.fill_(np.interp(step, (start, end), (self.args.q_lr_init, self.args.q_lr)))
        else:
            self.q_lr.fill_(self.args.q_lr)
        if self.update_graph:
            self.update_graph.replay()
        else:
            self._update()

    @property
    def captures(self) -> bool:
        """Whether acting and updating shall be CUDA graphs."""
        return self.args.cudagraphs and self.device.type == "cuda"

    def warm_up(self) -> None:
        """Do once what an environment step does, compiled and, on a GPU, captured; what this changes is put back.

        Raises DoesNotWork where compiling or capturing fails, what a step without them raises, and TrainingError where memory
        does not suffice or the device is of no use after a failure. Memory of a capture that has failed stays reserved.
        """
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.state_dict().items()}
        random_state = self.generator.get_state()
        tried = "compile"
        failure = None
        try:
            self._act()
            self._update()
            self.action.cpu()  # waits for the device, whose errors come late
            if self.captures:
                tried = "cudagraphs"
                self.capture()
        except Exception as error:
            if short_of_memory := out_of_memory(error):
                raise TrainingError(first_line(short_of_memory)) from None
            if not getattr(self.args, tried):  # neither compiled nor captured
                raise
            failure = DoesNotWork(tried, error)
        try:
            torch.get_device_module(self.device).synchronize()  # what a broken capture has left on its stream
            if failure:
                self.generator = torch.Generator(self.device)  # the other one may believe that it is still captured
            for name, tensor in self.state_dict().items():
                tensor.copy_(tensors[name])
            self.generator.set_state(random_state)
        except RuntimeError as error:
            before = f"{failure}; and after that" if failure else "after the first update"
            raise TrainingError(f"{before} {self.device} fails: {reason_of(error)}") from None
        if failure:
            raise failure

    def do_without(self, flag: str) -> None:
        """Turn off what does not work: "compile" or "cudagraphs"."""
        setattr(self.args, flag, False)
        if not self.args.compile:
            self.use_functions(compiled=False)

    def capture(self) -> None:
        """Capture acting and updating as CUDA graphs; the bodies run, and change what they change.

        On a stream of the learner's own: cuBLAS keeps a workspace for each stream and frees it with the first graph captured
        there, and a capture that fails is left only with its stream.
        """
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        graphs = []
        with torch.cuda.stream(self.stream):
            for _ in range(3):  # lets the libraries allocate what they must not allocate while capturing
                self._act()
                self._update()
            for body in (self._act, self._update):
                graph = torch.cuda.CUDAGraph()
                graph.register_generator_state(self.generator)
                gc.collect()  # the graph of another learner must not be destroyed in the middle of a capture
                with torch.cuda.graph(graph, stream=self.stream):
                    body()
                graphs.append(graph)
        torch.cuda.current_stream().wait_stream(self.stream)
        for graph in graphs:  # what cannot be launched shows now
            graph.replay()
        self.action.cpu()
        self.act_graph, self.update_graph = graphs

    def copy_of(self, name: str) -> dict[str, torch.Tensor]:
        """A network's parameters by name, copied to the CPU."""
        return {key: tensor.to("cpu", copy=True) for key, tensor in getattr(self, name).state_dict().items()}

    def check_finite(self) -> None:
        """TrainingError if a loss was, or a parameter is, not finite."""
        bad = [name for name, value in zip(METRICS, self.metrics.tolist(), strict=True) if not math.isfinite(value)]
        bad += [name for name, tensor in self.state_dict().items() if name != "metrics" and not torch.isfinite(tensor).all()]
        if bad:
            raise TrainingError(f"{', '.join(bad[:5])} became non-finite")

    def read_metrics(self, steps: int) -> dict[str, float | None]:
        """The averages of METRICS over the last `steps` environment steps with updates, None without any."""
        sums = self.metrics.tolist()
        self.metrics.zero_()
        return {f"losses/{name}": value / steps if steps > 0 else None for name, value in zip(METRICS, sums, strict=True)}

    @torch.no_grad()
    def _act(self) -> None:
        """Action with a fresh beta ~ U2 and, behind it, the metrics' sum, which is non-finite once a loss was."""
        uniform = torch.rand(1, 1, generator=self.generator, device=self.device)
        noise = torch.randn(1, self.action_dim, generator=self.generator, device=self.device)
        low, high = self.args.beta_min, self.args.explore_beta_max
        log_beta = (low + (high - low) * uniform).log()
        mean, log_std = self.actor(self.obs, log_beta)
        action = (mean + log_std.exp() * noise).tanh()  # that of squashed_gaussian
        torch.cat([action[0], self.metrics.sum()[None]], out=self.action)

    @torch.no_grad()
    def _update(self) -> None:
        """What update() does once the learning rate is set.

        Numbers are constants of compiled code and of a captured graph: one that changes over a run is a buffer, as q_lr is.
        """
        args = self.args
        for_critics = args.utd * args.batch_size  # samples; behind them those of the actor and the temperature
        samples = for_critics + args.batch_size
        options = {"generator": self.generator, "device": self.device}
        position = torch.rand(samples, dtype=torch.float64, **options)
        uniform = torch.rand(samples, **options)
        noise = torch.randn(samples + args.batch_size, self.action_dim, **options)
        rows, beta = self.sample(self.replay, self.filled, position, uniform, args.beta_min, args.train_beta_max)

        all_q, all_targets = self._update_critics(rows[:for_critics], beta[:for_critics], noise[:for_critics])

        batch = ActorBatch(rows[for_critics:, : self.obs_dim], beta[for_critics:], noise[for_critics:samples])
        scales = self.adam_scales(self.counts["actor"], args.policy_lr, 1)[0]
        actor_metrics = self.update_actor(self.actor, self.critic, self.temperature, self.moments["actor"], scales, batch)

        if args.autotune:
            batch = batch._replace(noise=noise[samples:])
            scales = self.adam_scales(self.counts["temperature"], args.alpha_lr, 1)[0]
            temperature_metrics = self.update_temperature(
                self.actor, self.temperature, self.moments["temperature"], scales, batch, args.target_entropy
            )
        else:
            temperature_metrics = TemperatureMetrics(alpha_loss=torch.zeros((), device=self.device))
        self.add_metrics(self.metrics, all_q, all_targets, actor_metrics, temperature_metrics)

    def _update_critics(self, rows, beta, noise) -> tuple[list, list]:
        """The G critic updates of an environment step: rows (G*B, 2*O + A + 2), beta (G*B,), noise (G*B, A).

        Returns q (N, B) and target (B,) of each.
        """
        args = self.args
        whole = self.prepare_critics(self.actor, self.temperature, rows, beta, noise)
        minibatches = zip(*(part.split(args.batch_size) for part in whole), strict=True)
        all_scales = self.adam_scales(self.counts["critic"], self.q_lr, args.utd)
        all_q, all_targets = [], []
        for scales, minibatch in zip(all_scales, minibatches, strict=True):
            batch = CriticBatch(*minibatch)
            q, target = self.update_critics(self.critic, self.target, self.moments["critic"], scales, batch, args.gamma, args.tau)
            all_q.append(q)
            all_targets.append(target)
        return all_q, all_targets


# Training: from here on the same in all four scripts ----------------------------------------------------------------------------
class UserError(ValueError):
    """A mistake in the arguments or files given by the user: shown as one sentence, exit code 2."""


class TrainingError(RuntimeError):
    """Training cannot go on (a non-finite loss, a full disk): shown as one sentence, exit code 1."""


class DoesNotWork(RuntimeError):
    """What makes updates fast fails here: `flag` is the argument, "compile" or "cudagraphs", that turns it off."""

    def __init__(self, flag: str, error: Exception):
        self.flag = flag
        what = {"compile": "torch.compile does", "cudagraphs": "CUDA graphs do"}[flag]
        # A capture that is broken off raises once more at its end.
        reason = reason_of(error if flag == "compile" else chain_of(error)[-1])
        super().__init__(f"{what} not work here ({reason}; --no-{flag} turns this off)")


class EnvironmentFault(TrainingError):
    """What an environment returned cannot be used."""


def train(args: Args, stopped_by: list[int] | tuple = ()) -> dict:
    """Train, or go on with args.resume, to the end or until `stopped_by` holds a signal's number; returns a summary.

    With args.resume the arguments of the run win; of `args` count those that may differ, see resumed(), and are no defaults.
    Raises UserError for arguments or files that cannot be used, TrainingError when training cannot go on, and what an environment
    or an evaluation raises; the last checkpoint stays.
    """
    if args.resume is not None:
        saved, device = load_arguments(Path(args.resume, "checkpoint.pt"))
        args = resumed(args, saved, Args(), device)
    return train_with(args, stopped_by)


def train_with(args: Args, stopped_by: list[int] | tuple = ()) -> dict:
    """As train(), with the final arguments also of a run that is resumed."""
    with Run(args, stopped_by) as run:
        if run.learner:
            run_loop(run, stopped_by)
        run.finish()
    return run.summary()


def run_loop(run: "Run", stopped_by) -> None:
    """Every environment step, and what happens when."""
    args, env, learner, state = run.args, run.env, run.learner, run.state
    if args.resume is None:
        run.begin_episode()
    else:
        run.repeat_episode()
    run.save()
    run.prepare()
    while state.step < args.total_timesteps and not stopped_by:
        if state.step < args.learning_starts:
            action = learner.random_action()
        else:
            action = learner.act(run.obs)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        learner.store(state.step, run.obs, action, reward, terminated, next_obs)
        run.count_step(action, reward, next_obs)
        if state.step > args.learning_starts:
            learner.update(state.step)

        learned = state.step - args.learning_starts  # environment steps with updates
        episode_over = terminated or truncated
        last = state.step == args.total_timesteps
        if learned == 0:
            run.show_time_left()
        if last or (learned >= 0 and learned % args.eval_frequency == 0):
            run.evaluate()
        if args.snapshot_frequency and learned >= 0 and learned % args.snapshot_frequency == 0:
            run.write_snapshot()
        if last or episode_over or state.step % 1000 == 0:
            run.log_training(episode_over)
        if episode_over:
            run.begin_next_episode()
        if episode_over or state.step % 10 == 0:
            run.collect()
        if len(run.evaluator.pending) > run.max_pending:
            run.wait_for_evaluations("training waits for evaluations", run.max_pending)
        if time.time() - run.saved_time >= args.checkpoint_seconds:
            run.save()


LONG_EPISODE = 10_000  # environment steps; evaluations of an environment without a time limit never end


@dataclasses.dataclass
class State:
    """Where a run stands, beside its tensors."""

    step: NonNegativeInt  # environment steps done
    episode: NonNegativeInt  # episodes ended
    episodic_return: float  # of the current episode so far
    logged_step: NonNegativeInt  # where the last row of train.csv was written
    logged_seconds: float
    scripts: list[str]  # SHA-256 of all versions of this file that have trained it
    last_evaluation: dict[str, int | float]
    best_evaluation: dict[str, int | float]


class Run:
    """A run as a context: its directory, environment, learner, evaluator and tracker, its rows, checkpoints and messages.

    A run that is resumed with all its steps done has no learner: what pends is played on any machine, and its checkpoint keeps
    the networks as they are.
    """

    def __init__(self, args: Args, stopped_by: list[int] | tuple = ()):
        self.args = args
        self.stopped_by = stopped_by
        self.resources = contextlib.ExitStack()  # closed when the run ends, however it ends
        self.folder = Path.cwd()  # an environment may change the current one
        self.run_dir = Path()  # absolute
        self.shown_dir = ""  # as the user gave it
        self.resume_command = ""
        self.evaluate_command = ""
        self.device = torch.device("cpu")
        self.env: FlatEnv | None = None
        self.learner: Learner | None = None
        self.evaluator: Evaluator | None = None
        self.tracker: Any = None
        self.bar: tqdm | None = None
        self.checkpoint: Checkpoint | None = None  # that the run goes on from; kept where there is no learner
        self.was_compiled: bool | None = None  # whether the run that is resumed was, when it was stopped
        self.saved_pending: list[Evaluation] = []
        self.state = State(
            step=0,
            episode=0,
            episodic_return=0.0,
            logged_step=0,
            logged_seconds=0.0,
            scripts=[],
            last_evaluation={},
            best_evaluation={},
        )
        self.obs = np.zeros(0, np.float32)
        self.actions: list[np.ndarray] = []  # of the current episode: a resumed run repeats them
        self.start = time.time()
        self.saved_time = 0.0
        self.saved_step: int | None = None
        self.max_pending = 0
        self.mujoco_warnings = 0
        self.tracker_exit_code = 1

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.resources = stack
            if self.args.resume is not None:
                self.reopen_directory()
            self.open_environment()
            if self.state.step < self.args.total_timesteps:
                self.make_learner()
            else:
                self.args.compile = self.was_compiled  # no update is left: what later ones differ from is still this
            if self.checkpoint:
                self.take_over_pending()
            if self.args.resume is None:
                self.make_directory()
            if self.learner:
                self.keep_script()
            self.evaluator = stack.enter_context(Evaluator(self.args, seeds_for(self.args.seed, 0, 0, self.args.eval_episodes)))
            self.evaluator.pending = self.saved_pending
            self.max_pending = self.args.max_pending_evaluations
            if self.max_pending is None:
                self.max_pending = 2 * self.args.eval_workers
            self.start_bar()
            if self.args.track:
                self.tracker = start_tracking(self.args, self.run_dir)
                stack.callback(self.finish_tracking)
            self.resources = stack.pop_all()
        return self

    def name_directory(self, directory: Path) -> None:
        self.shown_dir = str(directory)
        self.run_dir = self.folder / directory
        self.resume_command = command("resume", directory, self.folder)
        self.evaluate_command = command("evaluate", directory, self.folder)

    def reopen_directory(self) -> None:
        """Hold the directory of a run for this process, and read its checkpoint."""
        self.name_directory(Path(self.args.resume))
        self.resources.enter_context(hold(self.run_dir))
        self.checkpoint = load_checkpoint(self.run_dir / "checkpoint.pt")
        self.state = self.checkpoint.state
        self.was_compiled = self.checkpoint.args.compile
        self.actions = list(self.checkpoint.actions.numpy().copy())
        self.obs = self.checkpoint.obs.numpy().copy()
        self.start -= self.checkpoint.seconds
        self.saved_step = self.state.step

    def take_over_pending(self) -> None:
        """What pends, and the rows up to it; with a learner, let go of the file, which the next checkpoint replaces."""
        for evaluation in self.checkpoint.pending:
            # UserError for a damaged one: now, not in a worker
            load_network(self.args, "actor", evaluation.actor, self.env.obs_dim, self.env.action_dim)
            actor = {name: tensor.clone() for name, tensor in evaluation.actor.items()}
            self.saved_pending.append(evaluation._replace(actor=actor))
        if self.state.last_evaluation and not (self.run_dir / "eval.csv").exists():
            tell(f"{self.shown_dir}/eval.csv is not there any more: it begins anew")
        before = [evaluation.step - 1 for evaluation in self.saved_pending]
        drop_rows(self.run_dir / "train.csv", self.state.step)
        drop_rows(self.run_dir / "eval.csv", min([self.state.step, *before]))
        if self.learner:
            self.checkpoint = None

    def make_directory(self) -> None:
        """Make a new run's directory and hold it."""
        args = self.args
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_").replace(":", "_")
        self.name_directory(Path(args.run_root, args.run_name or name))
        self.resources.enter_context(hold(self.run_dir, new=True, shown=self.shown_dir))

    def keep_script(self) -> None:
        self.state.scripts = keep_script(self.run_dir, self.identity()["args"], self.device, self.state.scripts)

    def open_environment(self) -> None:
        """Make the environment and complete the arguments; UserError where it is not the one that a run was saved with."""
        self.env = FlatEnv(self.args.env_id, disable_env_checker=None)
        self.resources.callback(close_quietly, self.env)
        self.args = check_args(self.args, self.env.action_dim)
        if self.env.full_id != self.args.env_id:
            tell(f"--env-id {self.args.env_id} is taken as {self.env.full_id}")
            self.args.env_id = self.env.full_id
        if self.checkpoint:
            check_same_environment(self.checkpoint, self.env, self.shown_dir)
        elif self.env.has_matrices:
            tell(f"{self.args.env_id} observes images or matrices, learned as a flat vector of {self.env.obs_dim} numbers")

    def make_learner(self) -> None:
        """The learner on its device, as far as the checkpoint has brought it."""
        saved = self.checkpoint
        self.device = choose_device(self.args, saved.device if saved else None)
        if saved:
            torch.set_num_threads(saved.threads)
        set_up_torch(self.args, self.device)
        self.learner = Learner(self.args, self.env.obs_dim, self.env.action_dim, self.device)
        if saved:
            restore(self.learner, saved, self.run_dir)

    @property
    def bar_name(self) -> str:
        """What the bar begins with; short, or else the last evaluation would not fit into 80 columns."""
        return self.args.env_id[:20]

    def start_bar(self) -> None:
        """The progress bar. In the random start it shows no time left, of which random steps say nothing."""
        tell(f"run directory: {self.shown_dir}")
        self.bar = tqdm(
            total=self.args.total_timesteps,
            initial=self.state.step,
            unit="step",
            dynamic_ncols=True,
            smoothing=0,  # the average speed since learning began, or since resuming
            desc=self.bar_name,
            mininterval=0.5 if sys.stderr.isatty() else 30,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]",
        )
        self.resources.callback(self.bar.close)
        if self.state.step >= self.args.learning_starts:
            self.show_time_left()

    def show_time_left(self) -> None:
        """From here on the bar measures speed and time left."""
        self.bar.bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
        self.bar.initial = self.state.step
        self.bar.start_t = self.bar.last_print_t = time.time()

    def prepare(self) -> None:
        """Compile and capture before the first step; what fails is turned off, and what is left is tried."""
        ready = False
        while not ready and not self.stopped_by:
            self.bar.set_description_str("compiling the updates (10 to 60 s)" if self.args.compile else self.bar_name)
            try:
                self.learner.warm_up()
                ready = True
            except DoesNotWork as failure:
                if not self.stopped_by:  # Ctrl-C in a terminal also ends the compiler, which then is there all the same
                    tell(f"{failure}; the run goes on without, slower; --resume with --{failure.flag} tries again")
                    self.learner.do_without(failure.flag)
                    self.keep_script()
            finally:
                self.bar.set_description_str(self.bar_name)
        if ready and self.device.type == "cpu" and self.was_compiled not in (None, self.args.compile):
            tell("compiled and eager updates round differently: the run goes on, but not exactly as it would have")

    def begin_episode(self) -> None:
        """Reset with a seed of the episode's own."""
        self.obs, _ = self.env.reset(seed=seeds_for(self.args.seed, 3, self.state.episode)[0])

    def repeat_episode(self) -> None:
        """Repeat the actions of the episode that a resumed run is in; where it comes to an end already, begin the next one."""
        saved_obs, episodic_return, over = self.obs, 0.0, False
        self.begin_episode()
        for action in self.actions:
            self.obs, reward, terminated, truncated, _ = self.env.step(action)
            episodic_return += reward
            over = terminated or truncated
            if over:
                break
        if over or episodic_return != self.state.episodic_return or not np.array_equal(self.obs, saved_obs):
            why = "it is not deterministic, or keeps something from earlier episodes"
            tell(f"{self.args.env_id} does not repeat its episode ({why}): the run goes on, but not exactly as it would have")
        self.state.episodic_return = episodic_return
        if over:
            self.begin_next_episode()

    def begin_next_episode(self) -> None:
        self.state.episode += 1
        self.state.episodic_return = 0.0
        self.actions.clear()
        self.begin_episode()

    def count_step(self, action: np.ndarray, reward: float, next_obs: np.ndarray) -> None:
        """Take note of an environment step."""
        self.state.step += 1
        self.state.episodic_return += reward
        self.actions.append(action)
        self.obs = next_obs
        self.bar.update()
        if self.state.episode == 0 and len(self.actions) == LONG_EPISODE:
            tell(f"the first episode has lasted {LONG_EPISODE:,} steps; an evaluation waits until each of its episodes ends")

    def seconds(self) -> float:
        """Wall seconds of the run, over all of its processes."""
        return time.time() - self.start

    def evaluate(self) -> None:
        """Hand the actor as it is now to the evaluator."""
        seconds = round(self.seconds(), 1)
        temperatures = alphas(self.learner, eval_conditions(self.args))
        self.evaluator.pending.append(Evaluation(self.state.step, seconds, temperatures, self.learner.copy_of("actor")))

    def write_snapshot(self) -> None:
        """Write what the value bias is measured from: actor, critic and the temperatures of the evaluated policies."""
        folder = self.run_dir / "snapshots"
        with contextlib.suppress(OSError):  # write_whole() says what is wrong
            folder.mkdir(exist_ok=True)
        content = {
            **self.identity(),
            "step": self.state.step,
            "alphas": alphas(self.learner, eval_conditions(self.args)),
            "actor": self.learner.copy_of("actor"),
            "critic": self.learner.copy_of("critic"),
        }
        write_whole(folder / f"step-{self.state.step}.pt", functools.partial(torch.save, content))

    def log(self, name: str, row: dict) -> None:
        """Append a row to a CSV file of the run, and to Weights & Biases."""
        append_row(self.run_dir / name, row)
        if self.tracker is None:
            return
        try:
            self.tracker.log({key: value for key, value in row.items() if value is not None})
        except Exception as error:  # its service has died
            tell(f"Weights & Biases has failed, and the run goes on without it: {first_line(error)}")
            self.tracker = None

    def log_training(self, episode_over: bool) -> None:
        """A row of train.csv: averages since the last one, and the episode that has ended, if one has."""
        state, seconds = self.state, self.seconds()
        steps = state.step - state.logged_step
        metrics = self.learner.read_metrics(min(steps, state.step - self.args.learning_starts))
        row = {
            "global_step": state.step,
            "charts/wall_seconds": round(seconds, 1),
            "charts/SPS": round(steps / max(seconds - state.logged_seconds, 1e-9), 2),
            **metrics,
            "charts/episodic_return": state.episodic_return if episode_over else None,
            "charts/episodic_length": len(self.actions) if episode_over else None,
        }
        self.log("train.csv", row)
        state.logged_step = state.step
        state.logged_seconds = seconds
        self.note_mujoco_warnings(take_mujoco_warnings(), "training")

    def note_mujoco_warnings(self, warnings: list[str], where: str) -> None:
        """Say the first warning of the simulator; the others are counted."""
        if warnings and not self.mujoco_warnings:
            tell(
                f"MuJoCo warns in {where}, others are counted: {warnings[0]} (an unstable simulation is reset within its episode)"
            )
        self.mujoco_warnings += len(warnings)

    def collect(self, seconds: float = 0.0) -> None:
        """Log the evaluations that have ended and keep their policies; wait up to `seconds` for the oldest."""
        while (played := self.evaluator.oldest(seconds)) is not None:
            self.log("eval.csv", played.row)
            self.keep_policy(played, self.evaluator.pending[0].actor)
            for text in played.warnings:
                tell(text)
            self.note_mujoco_warnings(played.mujoco_warnings, "an evaluation")
            self.evaluator.drop_oldest()  # only now: it pends until its row is written
            seconds = 0.0

    def keep_policy(self, played: "PlayedFamily", actor: dict) -> None:
        """Write policy.pt and, where it is the best so far, best_policy.pt. `rank` says which is."""
        names = ("best_return", "best_return_std", f"best_{CONDITION}")
        evaluation = {"step": played.row["global_step"], **{name: played.row[f"eval/{name}"] for name in names}}
        if played.cut_short:
            evaluation["cut_short"] = True
        self.state.last_evaluation = evaluation
        content = {**self.identity(), "actor": actor, "evaluation": evaluation}
        write_whole(self.run_dir / "policy.pt", functools.partial(torch.save, content))
        if not self.state.best_evaluation or rank(evaluation) >= rank(self.state.best_evaluation):
            self.state.best_evaluation = evaluation
            write_whole(self.run_dir / "best_policy.pt", functools.partial(torch.save, content))
        best = f"{evaluation['best_return']:z.1f} at {CONDITION} {evaluation[f'best_{CONDITION}']:.3g}"
        self.bar.set_postfix_str(f"evaluated {best}, step {evaluation['step']}", refresh=False)

    def wait_for_evaluations(self, text: str, at_most: int = 0) -> None:
        """Collect until at most so many evaluations pend; the bar shows `text` meanwhile."""
        while len(self.evaluator.pending) > at_most and not self.stopped_by:
            self.bar.set_description_str(text)
            self.collect(1.0)
        self.bar.set_description_str(self.bar_name, refresh=False)

    def identity(self) -> dict:
        """What every file of the run says of it."""
        return {
            "script": SCRIPT,
            "format": FORMAT,
            "obs_dim": self.env.obs_dim,
            "action_shape": list(self.env.action_shape),
            "bounds": torch.from_numpy(np.stack([self.env.low, self.env.high])),
            # plain Python, also of a fork's enums and paths, for files are read with weights_only
            "args": TypeAdapter(Args).dump_python(dataclasses.replace(self.args, resume=None), mode="json"),
        }

    def save(self, final: bool = False) -> None:
        """Write the checkpoint. TrainingError if it is the run's first or final one and cannot be written."""
        if self.learner:
            self.learner.check_finite()
        content = {
            **self.identity(),
            "state": vars(self.state),
            "seconds": self.seconds(),
            "pending": [tuple(evaluation) for evaluation in self.evaluator.pending],
            "obs": torch.from_numpy(self.obs.copy()),
            "actions": torch.from_numpy(np.array(self.actions, np.float32)),
            **(content_of(self.learner, self.state.step) if self.learner else self.checkpoint.learner_parts()),
        }
        try:
            write_whole(self.run_dir / "checkpoint.pt", functools.partial(torch.save, content))
            self.saved_step = self.state.step
        except TrainingError as error:
            if final or self.saved_step is None:
                raise
            tell(f"no checkpoint could be written at step {self.state.step}: {error}")
        self.saved_time = time.time()

    def finish(self) -> None:
        """Play what pends, write the last checkpoint, film the best policy where asked."""
        if not self.stopped_by and self.evaluator.pending:
            self.save()
        self.wait_for_evaluations("collecting the last evaluations")
        self.save(final=True)
        completed = self.summary()["completed"]
        self.tracker_exit_code = 0 if completed else 255  # wandb's own exit code of an interrupted run
        if completed and self.args.capture_video:
            try:
                record_episode(self.args, load_policy_file(self.run_dir / "policy.pt"), self.run_dir)
            except UserError as error:
                tell(str(error))

    def finish_tracking(self) -> None:
        if self.tracker is not None:
            with contextlib.suppress(Exception):  # a service that has died: the files are there
                self.tracker.finish(exit_code=self.tracker_exit_code)

    def summary(self) -> dict:
        """What train() returns."""
        return {
            "run_dir": self.shown_dir,
            "completed": self.state.step == self.args.total_timesteps and not self.evaluator.pending,
            "global_step": self.state.step,
            "last": self.state.last_evaluation,
            "best": self.state.best_evaluation,
            "resume": self.resume_command,
            "evaluate": self.evaluate_command,
        }

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        """Close everything; of a run that has failed say what is left of it and how to go on."""
        self.resources.close()
        if self.mujoco_warnings > 1:
            tell(f"MuJoCo warned {self.mujoco_warnings} times")
        if not isinstance(error, Exception):
            return
        left = "there is no checkpoint"
        if self.saved_step is not None:
            left = f"the last checkpoint is of step {self.saved_step}; go on with: {self.resume_command}"
        if isinstance(error, TrainingError | torch.OutOfMemoryError):
            raise TrainingError(f"stopped at step {self.state.step}: {first_line(error)}; {left}") from None
        tell(f"stopped at step {self.state.step} by the error below; {left}")


# Evaluation, in worker processes ------------------------------------------------------------------------------------------------
class Evaluation(NamedTuple):
    """An evaluation that pends: the actor of a step, and what its row of eval.csv says beside the returns."""

    step: int
    seconds: float  # wall seconds of the run at that step
    alphas: list[float]  # temperatures of the evaluated policies; none where there is no temperature
    actor: dict[str, Any]  # parameters by name, tensors on the CPU or arrays


class PlayedPolicy(NamedTuple):
    """What one policy of an evaluation has played."""

    returns: np.ndarray  # (E,)
    warnings: list[str]  # to be shown; of episodes that were cut short
    mujoco_warnings: list[str]  # to be counted


class PlayedFamily(NamedTuple):
    """What all policies of an evaluation have played."""

    row: dict[str, Any]  # of eval.csv
    cut_short: bool  # whether an episode of the best policy was, and so of every other policy too
    warnings: list[str]
    mujoco_warnings: list[str]


def seeds_for(seed: int, purpose: int, index: int = 0, count: int = 1) -> list[int]:
    """Environment seeds of a run; purpose 0: evaluation, 1: fresh episodes, 2: value bias at step `index`, 3: episode `index`."""
    return [int(s) for s in np.random.SeedSequence([seed, purpose, index]).generate_state(count)]


ENVIRONMENTS: dict[tuple[str, int], list["FlatEnv"]] = {}  # for evaluation in this process, by id and count


def make_envs(env_id: str, count: int) -> list["FlatEnv"]:
    """`count` environments for evaluation, made once in a process."""
    if (env_id, count) not in ENVIRONMENTS:
        ENVIRONMENTS[env_id, count] = [FlatEnv(env_id) for _ in range(count)]
    return ENVIRONMENTS[env_id, count]


def close_envs() -> None:
    """Close the environments for evaluation of this process."""
    while ENVIRONMENTS:
        for env in ENVIRONMENTS.popitem()[1]:
            close_quietly(env)


def load_network(args: Args, name: str, parameters: dict, obs_dim: int, action_dim: int) -> nn.Module:
    """The actor or the critic of a run with a copy of the parameters given by name, as arrays or tensors."""
    network = make_network(name, args, obs_dim, action_dim)
    try:
        network.load_state_dict({key: torch.as_tensor(value) for key, value in parameters.items()})
    except (RuntimeError, TypeError, AttributeError):
        raise UserError(f"the saved {name} does not have the shapes that its arguments give.") from None
    return network.requires_grad_(False)


def play_episodes(envs, actor: nn.Module, condition: float, seeds: list[int]) -> tuple[np.ndarray, list[str]]:
    """Undiscounted returns (E,) of one deterministic episode from each seed, all E in step, and what went wrong.

    The batch keeps its size when episodes end: another batch size would change the last bits of the actions. An episode with
    a non-finite number ends there.
    """
    obs = np.zeros((len(envs), envs[0].get_wrapper_attr("obs_dim")), np.float32)
    returns = np.zeros(len(envs))
    running = np.ones(len(envs), bool)
    faults = []
    for i, seed in enumerate(seeds):
        try:
            obs[i], _ = envs[i].reset(seed=seed)
        except NonFinite as fault:
            running[i] = False
            faults.append(f"episode {i + 1}: {fault}")
    while running.any():
        actions = deterministic_action(actor, obs, condition)
        for i in np.flatnonzero(running):
            try:
                obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            except NonFinite as fault:
                running[i] = False
                faults.append(f"episode {i + 1}: {fault}")
                continue
            returns[i] += reward
            running[i] = not (terminated or truncated)
    return returns, faults


def play_policy(args: Args, seeds: list[int], actor: dict, condition: float) -> PlayedPolicy:
    """The returns (E,) of one policy of a run."""
    envs = make_envs(args.env_id, len(seeds))
    network = load_network(args, "actor", actor, envs[0].obs_dim, envs[0].action_dim)
    returns, faults = play_episodes(envs, network, condition, seeds)
    warnings = [f"{CONDITION} {condition:.4g}, {fault}; the episode counts as far as it went" for fault in faults]
    return PlayedPolicy(returns, warnings, take_mujoco_warnings())


def rank(evaluation: dict[str, int | float]) -> tuple[bool, float]:
    """By which the best evaluation is chosen: an episode that was cut short may have been spared what the rest would cost."""
    return not evaluation.get("cut_short"), evaluation["best_return"]


def evaluate_family(args: Args, seeds: list[int], evaluation: Evaluation) -> PlayedFamily:
    """All policies of an evaluation, as a row of eval.csv. The std over the best policy's episodes is the population one.

    A policy whose episodes were not all played to their end is the best only where there is no other: what costs something in
    each step costs less in an episode that was cut short.
    """
    conditions = eval_conditions(args)
    played = [play_policy(args, seeds, evaluation.actor, condition) for condition in conditions]
    means = [float(policy.returns.mean()) for policy in played]
    whole = [i for i, policy in enumerate(played) if not policy.warnings] or range(len(played))
    best = max(whole, key=means.__getitem__)
    row = {
        "global_step": evaluation.step,
        "charts/wall_seconds": evaluation.seconds,
        "eval/best_return": means[best],
        "eval/best_return_std": float(played[best].returns.std()),
        f"eval/best_{CONDITION}": conditions[best],
    }
    row |= {f"eval/return_{condition:.6g}": mean for condition, mean in zip(conditions, means, strict=True)}
    row |= {f"eval/alpha_{c:.6g}": alpha for c, alpha in zip(conditions, evaluation.alphas, strict=False)}
    warnings = [f"evaluation of step {evaluation.step}, {text}" for policy in played for text in policy.warnings]
    mujoco_warnings = [text for policy in played for text in policy.mujoco_warnings]
    return PlayedFamily(row, bool(played[best].warnings), warnings, mujoco_warnings)


def start_worker(lifeline) -> None:
    """In a worker: yield to training (at nice 19 workers would starve), and end when the other end of the pipe is closed."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for training alone
    if hasattr(os, "nice"):
        os.nice(10)
    multiprocessing.util.Finalize(None, close_in_time, exitpriority=100)  # at a worker's end; atexit is not called there
    threading.Thread(target=end_with_pipe, args=(lifeline,), daemon=True).start()


CLOSING = threading.Lock()


def close_in_time() -> None:
    """Close the environments, which may have started processes of their own; end this worker where that takes too long."""
    with CLOSING:
        timer = threading.Timer(5.0, os._exit, (0,))
        timer.daemon = True
        timer.start()
        close_envs()


def end_with_pipe(lifeline) -> None:
    multiprocessing.connection.wait([lifeline])
    time.sleep(0.5)  # a worker that has nothing to do ends by itself, and closes its environments in the thread that made them
    close_in_time()
    os._exit(0)


def result_or_traceback(function, *arguments):
    """(result, None), or in a worker (None, traceback): not every exception can be sent to another process and raised there."""
    if multiprocessing.parent_process() is None:  # an error shows where it is, also to a debugger
        return function(*arguments), None
    try:
        return function(*arguments), None
    except BaseException as error:  # sys.exit() in an environment too
        return None, "".join(traceback.format_exception(error))


class InThisProcess(Executor):
    """What is submitted is done at once, with one thread and in full precision: as in a worker, to the last bit."""

    def submit(self, function, *arguments) -> Future:
        future = Future()
        threads = torch.get_num_threads()
        precision = torch.get_float32_matmul_precision()
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        try:
            future.set_result(function(*arguments))
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
        return future


class Evaluator:
    """Plays evaluations in args.eval_workers processes beside training, or in this one, and hands them back in step order.

    Each evaluation is the work of one process, so results do not depend on the number of workers. `pending`: those that have
    not been dropped, oldest first; `futures`: of the oldest ones, those that have been started.
    """

    def __init__(self, args: Args, seeds: list[int]):
        self.args = args
        self.seeds = seeds
        self.pending: list[Evaluation] = []
        self.futures: list[Future] = []
        self.deaths = 0
        self.pool: Executor = InThisProcess()
        self.lifeline = None

    def __enter__(self):
        """Start the workers. They end when this process closes its end of the pipe, or dies, be it by SIGKILL."""
        if not self.args.eval_workers:
            return self
        context = multiprocessing.get_context("spawn")
        reader, self.lifeline = context.Pipe(duplex=False)
        self.pool = ProcessPoolExecutor(self.args.eval_workers, context, start_worker, (reader,))
        can_mask = hasattr(signal, "pthread_sigmask")
        if can_mask:  # inherited by the workers, for their first moments
            resource_tracker.ensure_running()  # its start would unblock the signal
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            with contextlib.suppress(BrokenExecutor):  # oldest() and map() will meet it again
                for _ in range(self.args.eval_workers):
                    self.pool.submit(os.getpid)  # spawns one
        finally:
            if can_mask:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def __exit__(self, *_):
        if self.lifeline is None:
            close_envs()
        else:
            self.lifeline.close()
        self.pool.shutdown(cancel_futures=True)

    def mend(self) -> None:
        """New workers in place of a pool in which one has died; what was not finished is started again."""
        self.deaths += 1
        self.futures = []
        if self.deaths > 10:
            raise TrainingError("evaluation workers died again and again") from None
        tell("an evaluation worker died; what it had not finished is evaluated again")
        self.__exit__()
        self.__enter__()

    def map(self, function, items) -> list:
        """[function(item) for item in items], in the workers."""
        while True:
            try:
                futures = [self.pool.submit(result_or_traceback, function, item) for item in items]
                return [result_of(future) for future in futures]
            except BrokenExecutor:
                self.mend()

    def oldest(self, seconds: float = 0.0) -> PlayedFamily | None:
        """Start what pends; the oldest evaluation where it ends within `seconds`, else None."""
        try:
            for evaluation in self.pending[len(self.futures) : 2 * self.args.eval_workers + 1]:
                arrays = evaluation._replace(actor={key: tensor.numpy() for key, tensor in evaluation.actor.items()})
                self.futures.append(self.pool.submit(result_or_traceback, evaluate_family, self.args, self.seeds, arrays))
            wait(self.futures[:1], seconds)
            if not self.futures or not self.futures[0].done():
                return None
            played = result_of(self.futures[0])
        except BrokenExecutor:
            self.mend()
            return None
        self.deaths = 0
        return played

    def drop_oldest(self) -> None:
        """Forget the oldest evaluation, whose row has been written."""
        del self.futures[0], self.pending[0]


def result_of(future: Future):
    """What result_or_traceback() has returned; RuntimeError with the traceback of what it raised."""
    result, error = future.result()
    if error is not None:
        raise RuntimeError(f"an evaluation failed in its worker:\n\n{error}")
    return result


# Arguments, environment, PyTorch ------------------------------------------------------------------------------------------------
def check_args(args: Args, action_dim: int = 0) -> Args:
    """`args` with the defaults of the environment filled in; UserError for values that make no sense."""
    try:
        args = TypeAdapter(Args).validate_python(dataclasses.asdict(args))
    except ValidationError as error:
        raise UserError(f"{what_is_wrong(error)}.") from None
    name = args.env_id.split("/")[-1].split(":")[-1].rsplit("-v", 1)[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if args.total_timesteps is None:
        args.total_timesteps = 1_000_000 if name == "Humanoid" else 300_000
    if args.buffer_size is None:
        args.buffer_size = REPLAY_CAPACITY.get(name, 1_000_000)
    if args.eval_workers is None:
        args.eval_workers = max(1, min(12, cores // 2))
    args.eval_workers = min(args.eval_workers, 4 * cores)
    check_own_args(args, name, action_dim)
    check_sizes(args)
    return args


def check_sizes(args: Args) -> None:
    """UserError for values that do not go together."""
    smallest = max(args.learning_starts, args.batch_size)
    enough = f"at least {smallest}, the larger of learning_starts and batch_size"
    warm_up = f"at least learning_starts, {args.learning_starts}, unless q_lr_init equals q_lr"
    multiple = f"a multiple of eval_frequency, {args.eval_frequency}"
    folder = "a plain folder name of at most 200 characters"
    is_folder = args.run_name is None or (Path(args.run_name).name == args.run_name != ".." and len(args.run_name) <= 200)
    for name, ok, wanted in (
        ("buffer_size", args.buffer_size >= smallest, enough),
        ("total_timesteps", args.total_timesteps >= smallest, enough),
        ("q_lr_warmup_end", args.q_lr_warmup_end >= args.learning_starts or args.q_lr_init == args.q_lr, warm_up),
        ("snapshot_frequency", args.snapshot_frequency % args.eval_frequency == 0, multiple),
        ("run_name", is_folder, folder),
    ):
        if not ok:
            raise UserError(f"{name} is {getattr(args, name)!r}; it must be {wanted}.")


def what_is_wrong(error: ValidationError) -> str:
    """The first of pydantic's findings as one sentence without its full stop."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place} is {first['input']}; {first['msg'].replace('Input should', 'it must')}"


def choose_device(args: Args, saved: str | None) -> torch.device:
    """The device that a new run trains on, or on which a saved one goes on, which is that of its checkpoint."""
    available = torch.cuda.is_available()
    if saved is not None:
        if saved == "cuda" and not available:
            raise UserError("the run was trained on a CUDA device and goes on on one; here PyTorch finds only the CPU.")
        return torch.device(saved)
    if args.cuda and not available:
        raise UserError("cuda was asked for, but PyTorch finds no CUDA device here.")
    return torch.device("cuda" if args.cuda is not False and available else "cpu")


def set_up_torch(args: Args, device: torch.device) -> None:
    """Process-wide settings: determinism, memory allocation, precision."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a pass over every new tensor, finds only bugs
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        # Keep freed memory: by default every 2.6 MB temporary goes back to the system and page-faults on its next use.
        ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    precision = args.matmul_precision
    if precision == "auto":
        precision = "medium" if device.type == "cpu" and medium_is_exact() else "highest"
        if device.type == "cpu" and precision == "highest":
            tell("--matmul-precision medium would be up to twice as fast here, with bfloat16 products (docs/details.md)")
    torch.set_float32_matmul_precision(precision)
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # exact float32 is on purpose
    torch.compiler.reset()  # what earlier runs of this process compiled would count against the limit of recompilations


def medium_is_exact() -> bool:
    """Whether "medium" is float32 here: it lets oneDNN do batched products, which is faster, and exact without AMX. Measured."""
    a, b = torch.randn(2, 2, 256, 256, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    torch.set_float32_matmul_precision("medium")
    return float((torch.bmm(a, b) - exact).norm() / exact.norm()) < 1e-6


@contextlib.contextmanager
def must_fit(what: str, instead: str, device: torch.device):
    """UserError where memory for `what` cannot be had."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error).lower() for word in ("memory", "alloc", "overflow")):
            raise
        verb = "does" if what.startswith("a ") else "do"
        raise UserError(f"{what} {verb} not fit on {device}; choose {instead}.") from None


class NonFinite(EnvironmentFault):
    """An environment returned a number that is not finite."""


class FlatEnv(gym.Wrapper):
    """An environment as this file sees it: observations (O,) float32, actions (A,) in [-1, 1], all numbers finite.

    full_id: its id with module and version; low, high (A,): the bounds of its own actions, in their type; action_shape: their
    shape. UserError where it cannot be made or used; EnvironmentFault for what it returns.
    """

    def __init__(self, env_id: str, disable_env_checker: bool | None = True, **options):
        super().__init__(make_env(env_id, disable_env_checker, options))
        count_mujoco_warnings()
        module, separator, _ = env_id.rpartition(":")
        # not self.env.spec: a wrapper keeps what it saw first, the inner environment's where that has been looked at before
        self.full_id = f"{module}{separator}{self.env.unwrapped.spec.id}"
        self.original_space = getattr(self.env, "observation_space", None)
        self.observation_space = flat_space(env_id, self.original_space)
        space = getattr(self.env, "action_space", None)
        if not isinstance(space, gym.spaces.Box) or not np.issubdtype(space.dtype, np.floating) or not space.is_bounded():
            raise UserError(f"{env_id} has actions of type {space}; only a continuous, bounded Box is supported.")
        self.action_shape = space.shape
        self.low = space.low.ravel()
        self.high = space.high.ravel()
        self.obs_dim = self.observation_space.shape[0]
        self.action_dim = len(self.low)
        if not self.obs_dim or not self.action_dim:
            raise UserError(f"{env_id} has {self.obs_dim} observations and {self.action_dim} actions; it must have some of both.")
        self.action_space = gym.spaces.Box(-1.0, 1.0, (self.action_dim,))
        parts = self.original_space.spaces.values() if isinstance(self.original_space, gym.spaces.Dict) else ()
        self.has_matrices = any(len(part.shape or ()) > 1 for part in (self.original_space, *parts))

    def reset(self, **options) -> tuple[np.ndarray, dict]:
        with errors_of(self.full_id, "reset"):
            obs, info = self.env.reset(**options)
        return self.flat_observation(obs), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        own_action = to_bounds(action, self.low, self.high).reshape(self.action_shape)
        with errors_of(self.full_id, "step"):
            obs, reward, terminated, truncated, info = self.env.step(own_action)
        ends = truth("terminated", terminated), truth("truncated", truncated)
        return self.flat_observation(obs), finite_reward(reward), *ends, info

    def flat_observation(self, obs) -> np.ndarray:
        """An observation as (O,) float32; of a Box as it is, for flatten() would cut floats to a Box's integers."""
        if not isinstance(self.original_space, gym.spaces.Box):
            obs = gym.spaces.flatten(self.original_space, obs)
        flat = np.asarray(obs, np.float32).flatten()  # a copy: an environment may use its array again
        if flat.shape != (self.obs_dim,):
            declared = self.original_space.shape or (self.obs_dim,)
            raise EnvironmentFault(f"the environment returned an observation of shape {np.shape(obs)}; it declares {declared}")
        if not np.isfinite(flat).all():
            raise NonFinite(f"the environment returned a non-finite observation: {obs}")
        return flat


def make_env(env_id: str, disable_env_checker: bool | None, options: dict) -> gym.Env:
    """gym.make; UserError where it fails. disable_env_checker: None is as the environment is registered."""
    try:
        with errors_of(env_id, "__init__"), only_errors_of_gymnasium():  # every -v4 announces -v5
            return gym.make(env_id, disable_env_checker=disable_env_checker, **options)
    except (gym.error.Error, ImportError, NotImplementedError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = first_line(error)
        if isinstance(error, ModuleNotFoundError):
            reason = f"{reason.rstrip('.')}; install it, or set PYTHONPATH to its folder."
        elif place := place_of(error):
            reason = f"{reason} ({place})"
        raise UserError(f"cannot make the environment {env_id!r}: {reason}") from None


@contextlib.contextmanager
def only_errors_of_gymnasium():
    """Gymnasium's own warnings are not shown meanwhile."""
    level = gym.logger.min_level
    gym.logger.min_level = gym.logger.ERROR
    try:
        yield
    finally:
        gym.logger.min_level = level


def place_of(error: BaseException) -> str:
    """Where an error was raised, if in a file that is neither Gymnasium's nor this one; a user then looks for it there."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename)
    known = path == Path(__file__) or Path(gym.__file__).parent in path.parents or not path.exists()
    return "" if known else f"{path}, line {frame.lineno}"


def flat_space(env_id: str, space: gym.Space) -> gym.spaces.Box:
    """The space of flattened observations, float32; UserError where there is none."""
    try:
        flat = gym.spaces.flatten_space(space)
    except NotImplementedError:
        flat = None
    if not isinstance(flat, gym.spaces.Box):
        raise UserError(f"{env_id} has observations of type {space}, which cannot be flattened.")
    return gym.spaces.Box(-np.inf, np.inf, flat.shape, np.float32)


def to_bounds(action: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Actions (..., A) in [-1, 1] within the bounds (A,), in their type; clipped, for rounding may leave them."""
    low_half, high_half = low.astype(np.float64) / 2, high.astype(np.float64) / 2  # the widest bounds' difference would overflow
    center = high_half + low_half
    half = high_half - low_half
    return np.clip((center + half * action).astype(low.dtype), low, high)


def finite_reward(value) -> float:
    """A reward that an environment returned, rounded to float32; an array of one number is one too. EnvironmentFault if not."""
    try:
        with np.errstate(over="ignore"):
            number = np.asarray(value, np.float32).item()
    except (TypeError, ValueError):
        raise EnvironmentFault(f"the environment returned reward = {value!r}; it must be a number") from None
    if not math.isfinite(number):
        raise NonFinite(f"the environment returned a non-finite reward: {value}")
    return number


def truth(name: str, value) -> bool:
    """A truth value that an environment returned; EnvironmentFault for what equals neither 0 nor 1."""
    with contextlib.suppress(Exception):  # of types that cannot be compared
        if value == 0 or value == 1:
            return bool(value)
    raise EnvironmentFault(f"the environment returned {name} = {value!r}; it must be True or False")


@contextlib.contextmanager
def errors_of(env_id: str, call: str):
    """sys.exit() and KeyboardInterrupt of an environment are errors like any other.

    Where Python's own handler is in place, as in a program that calls train(), a KeyboardInterrupt is the user's.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{env_id}: {call}() raised SystemExit({error.code!r})") from error
    except KeyboardInterrupt as error:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        raise RuntimeError(f"{env_id}: {call}() raised KeyboardInterrupt") from error


MUJOCO_WARNINGS: list[str] = []  # of this process, since they were last taken; at most 1000


def count_mujoco_warnings() -> None:
    """Where MuJoCo has been imported: it would write its warnings to the screen and to ./MUJOCO_LOG.TXT."""
    if "mujoco" in sys.modules:
        sys.modules["mujoco"].set_mju_user_warning(note_mujoco_warning)


def note_mujoco_warning(message: str) -> None:
    if len(MUJOCO_WARNINGS) < 1000:
        MUJOCO_WARNINGS.append(str(message))


def take_mujoco_warnings() -> list[str]:
    """The warnings of MuJoCo in this process since they were last taken."""
    taken = MUJOCO_WARNINGS.copy()
    MUJOCO_WARNINGS.clear()
    return taken


def close_quietly(env: gym.Env) -> None:
    """Close an environment that is not needed any more; a simulator that fails in closing must not end a good run."""
    try:
        env.close()
    except (Exception, SystemExit) as error:
        tell(f"closing the environment failed: {error!r}")


# Run directory: checkpoint, logs, policies, tracking ----------------------------------------------------------------------------
SCRIPT = Path(__file__).stem
FORMAT = 4  # of checkpoints
POLICY_FORMATS = (3, 4)  # of policy files that can be read


def tell(message: str) -> None:
    """A line for the user, beside the progress bar."""
    tqdm.write(message, file=sys.stderr)


def command(option: str, path: Path, folder: Path) -> str:
    """What a user types in `folder` to resume or evaluate a run."""
    return shlex.join(["python", os.path.relpath(__file__, folder), f"--{option}", str(path)])


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


def chain_of(error: BaseException) -> list[BaseException]:
    """An exception and those before it that a traceback shows, the earliest last."""
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


# What PyTorch and the libraries below it say, beside torch.OutOfMemoryError
NO_MEMORY = ("out of memory", "not enough memory", "allocate memory", "alloc_failed")


def out_of_memory(error: BaseException) -> BaseException | None:
    """The earliest exception behind an error that says that memory does not suffice, if one does."""
    for link in reversed(chain_of(error)):
        if isinstance(link, MemoryError | torch.OutOfMemoryError) or any(words in str(link).lower() for words in NO_MEMORY):
            return link
    return None


def reason_of(error: BaseException) -> str:
    """The line of a compiler's error that says what is wrong, of at most 200 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    telling = [line for line in lines if "rror" in line and not line.endswith(":")] or lines
    return telling[0][:200]


def write_whole(path: Path, write) -> None:
    """Write a file so that at every moment `path` is the old or the new one, whole: temporary name, fsync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises a RuntimeError where the system said what is wrong
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise TrainingError(f"{path} cannot be written: {first_line(cause)}") from None


def append_row(path: Path, row: dict) -> None:
    """Append a row to a CSV file, with the header where the file is new; TrainingError where that cannot be done."""
    try:
        with open(path, "a+", newline="") as file:
            file.seek(0)
            header = file.readline()
            writer = csv.DictWriter(file, row, lineterminator="\n")
            if not header:
                writer.writeheader()
            elif header.strip() != ",".join(row):
                raise TrainingError(f"{path} has other columns than are written now; move it away to go on")
            writer.writerow(row)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {first_line(error)}") from None


def drop_rows(path: Path, last: int) -> None:
    """Take from a CSV file the rows after step `last`, which will come again; UserError for a file that cannot be read.

    Lines of an editor's making stay or are mended: comments stay, empty lines go, line ends become LF.
    """
    try:
        header, *lines = [line for line in path.read_text().splitlines() if line.strip()] or [""]
        if lines and lines[-1].count(",") < header.count(",") and not lines[-1].startswith("#"):
            lines.pop()  # cut off by a kill
        rows = [line for line in lines if line.startswith("#") or int(line.split(",")[0]) <= last]
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        raise UserError(f"{path} cannot be read as the rows of a run; mend it, or move it away.") from None
    if not lines and not path.read_text().endswith("\n"):  # a header that a kill has cut
        header = ""
    text = "".join(f"{line}\n" for line in (header, *rows) if line)
    write_whole(path, lambda file: file.write(text.encode()))


def hold(run_dir: Path, new: bool = False, shown: str = ""):
    """Hold a run directory for this process, a new one after making it; UserError if it is in use, or new and holds a run.

    shown: how messages call the directory.
    """
    shown = shown or str(run_dir)
    try:
        if new:
            run_dir.mkdir(parents=True, exist_ok=True)
            if any(path.suffix in (".pt", ".csv") for path in run_dir.iterdir()):
                raise UserError(f"{shown} exists already; go on with --resume {shown}, or choose another run_name.")
        elif not (run_dir / "checkpoint.pt").exists():  # what is no run is not held
            raise UserError(f"{shown}/checkpoint.pt does not exist; give the directory of a run.")
        return filelock.FileLock(run_dir / ".lock", timeout=0).acquire()
    except filelock.Timeout:
        raise UserError(f"{shown} is in use by another process.") from None
    except OSError as error:
        raise UserError(f"{shown} cannot be written: {error.strerror}.") from None


def keep_script(run_dir: Path, args: dict, device: torch.device, scripts: list[str]) -> list[str]:
    """Keep this file in the run directory and write config.json; returns the SHA-256 of all that have trained this run."""
    source = Path(__file__).read_bytes()
    kept = run_dir / f"{SCRIPT}.py"
    digest = hashlib.sha256(source).hexdigest()
    failed_start = not scripts and (run_dir / "config.json").exists()
    if failed_start or not kept.exists():
        write_whole(kept, lambda file: file.write(source))
    if scripts and digest not in scripts:
        tell(f"{SCRIPT}.py has changed since this run began; it goes on as the file is now, and {kept} is what it began with")
    if digest not in scripts:
        scripts = [*scripts, digest]
    packages = [name for name in ("torch", "gymnasium", "mujoco", "numpy") if importlib.util.find_spec(name)]
    device_name = f"{platform.processor() or platform.machine()}, threads: {torch.get_num_threads()}"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    config = {
        "script": SCRIPT,
        "script_sha256": "+".join(scripts),
        "args": args,
        "git_commit": git_commit(Path(__file__)),
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}},
        "device": device_name,
    }
    write_whole(run_dir / "config.json", lambda file: file.write(json.dumps(config, indent=2).encode()))
    return scripts


def git_commit(file: Path) -> str | None:
    """The commit that a file is under, with -dirty behind it where its repository has changes; None where it is under none."""
    if not shutil.which("git"):
        return None
    git = ["git", "-C", str(file.resolve().parent)]
    if subprocess.run([*git, "ls-files", "--error-unmatch", file.name], capture_output=True).returncode:
        return None  # a copy that is not committed is in no commit
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip() or None


@dataclasses.dataclass
class Checkpoint:
    """What a run goes on from, as it lies in checkpoint.pt; pydantic checks the parts."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    args: Args
    obs_dim: int
    action_shape: list[int]
    bounds: torch.Tensor  # (2, A)
    state: State
    seconds: float
    pending: list[Evaluation]
    obs: torch.Tensor  # (O,), the newest observation
    actions: torch.Tensor  # (T, A), of the current episode
    device: Literal["cpu", "cuda"]
    threads: PositiveInt
    generator: torch.Tensor
    tensors: dict[str, torch.Tensor]  # of the learner, by name
    replay: torch.Tensor  # (filled, 2*O + A + 2)

    def learner_parts(self) -> dict:
        """What content_of() gives of a learner."""
        return {name: getattr(self, name) for name in ("device", "threads", "generator", "tensors", "replay")}


def content_of(learner: Learner, step: int) -> dict:
    """The parts of a checkpoint that are a learner's, on the CPU."""
    filled = learner.replay[:step].cpu()
    return {
        "device": learner.device.type,
        "threads": torch.get_num_threads(),
        "generator": learner.generator.get_state(),
        "tensors": {name: tensor.cpu() for name, tensor in learner.state_dict().items()},
        "replay": filled if len(filled) == len(learner.replay) else filled.clone(),  # a view would save all of it
    }


def restore(learner: Learner, saved: Checkpoint, run_dir: Path) -> None:
    """Take over a checkpoint; UserError if it does not fit."""
    try:
        saved.obs.reshape(learner.obs_dim)
        saved.actions.reshape(len(saved.actions), learner.action_dim)
        learner.load_state_dict(saved.tensors)
        learner.replay[: len(saved.replay)].copy_(saved.replay)
        learner.generator.set_state(saved.generator)
    except (RuntimeError, TypeError) as error:
        lines = str(error).splitlines() or [repr(error)]
        reason = lines[min(1, len(lines) - 1)].strip().rstrip(" .")  # the second, for PyTorch's first one is a title
        wanted = f"its arguments, {learner.args.env_id} and this {SCRIPT}.py"
        raise UserError(f"{run_dir}/checkpoint.pt does not fit {wanted}: {reason}.") from None


def check_same_environment(saved: Checkpoint, env: "FlatEnv", shown: str) -> None:
    """UserError where an environment is not the one that a run was saved with."""
    own = {
        "id": (saved.args.env_id, env.full_id),
        "observation size": (saved.obs_dim, env.obs_dim),
        "shape of actions": (tuple(saved.action_shape), tuple(env.action_shape)),
        "bounds of actions": (saved.bounds.tolist(), np.stack([env.low, env.high]).tolist()),
    }
    for what, (then, now) in own.items():
        if then != now:
            raise UserError(f"{shown} was saved with {env.full_id} of {what} {then}; here it has {now}.")


def read_file(path: Path, formats: tuple[int, ...], mmap: bool = False) -> dict:
    """The content of a file of this script on the CPU; UserError if it is missing, damaged, or another script's.

    Only tensors and plain Python are accepted (weights_only), so a stranger's file cannot run code.
    """
    damaged = UserError(f"{path} is damaged or not a file of {SCRIPT}.py.")
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # torch.load does not look at the checksums
                raise damaged
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        script, file_format = content["script"], content["format"]
        if not (isinstance(script, str) and isinstance(file_format, int) and isinstance(content["args"], dict)):
            raise damaged
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist; give the directory of a run, or to --evaluate a policy file.") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is zipfile's, of an offset that makes no sense
            raise UserError(f"{path} cannot be read: {error.strerror or first_line(error)}.") from None
        raise damaged from None
    if script != SCRIPT:
        raise UserError(f"{path} was written by {script}.py; use that script instead of {SCRIPT}.py.")
    if file_format not in formats:
        raise UserError(f"{path} was written by another version of {SCRIPT}.py, whose files this one cannot read.")
    return content


def load_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint whose parts are all there; the large ones stay in the file until they are used."""
    content = read_file(path, (FORMAT,), mmap=True)
    content["args"] = arguments_of(path, content["args"])
    try:
        checkpoint = TypeAdapter(Checkpoint).validate_python(content)
    except ValidationError as error:
        part = ".".join(str(name) for name in error.errors()[0]["loc"])
        raise UserError(f"{path} is damaged: its part {part} is missing, or of another type.") from None
    args, step = checkpoint.args, checkpoint.state.step
    if step > args.total_timesteps or len(checkpoint.replay) != min(step, args.buffer_size):
        raise UserError(f"{path} is damaged: its arguments, its step {step} and its replay do not go together.")
    return checkpoint


def load_arguments(path: Path) -> tuple[Args, str]:
    """The arguments of a checkpoint, and the device that it was trained on."""
    content = read_file(path, (FORMAT,), mmap=True)
    return check_args(arguments_of(path, content["args"], quiet=True)), content.get("device", "")


def arguments_of(path: Path, saved: dict, quiet: bool = False) -> Args:
    """Saved arguments; says which ones a fork has gained since. UserError for arguments that this script does not have."""
    known = {field.name for field in dataclasses.fields(Args)}
    if saved.keys() - known:
        raise UserError(f"{path} has arguments that this {SCRIPT}.py does not have: {', '.join(sorted(saved.keys() - known))}.")
    if known - saved.keys() and not quiet:
        tell(f"{path} was written without {', '.join(sorted(known - saved.keys()))}: the defaults are taken")
    return Args(**saved)


class PolicyFile(NamedTuple):
    """The content of a policy file, independent of the file."""

    args: Args
    obs_dim: int
    action_shape: tuple[int, ...]
    low: np.ndarray  # (A,)
    high: np.ndarray  # (A,)
    actor: nn.Module
    evaluation: dict[str, float]  # that of the actor: step, best_return, best_return_std and the best condition


def load_policy_file(path: str | Path) -> PolicyFile:
    """A policy file, or the policy.pt of a run directory. Arguments that this script does not have are ignored."""
    path = Path(path)
    if path.is_dir():
        if (path / "checkpoint.pt").exists() and not (path / "policy.pt").exists():
            raise UserError(f"{path} has no policy yet; its first evaluation writes one.")
        path = path / "policy.pt"
    content = read_file(path, POLICY_FORMATS)
    if "evaluation" not in content:
        raise UserError(f"{path} holds no policy; give a run directory, a policy.pt or a best_policy.pt.")
    known = {field.name for field in dataclasses.fields(Args)}
    try:
        low, high = content["bounds"].numpy()
        action_shape = tuple(content.get("action_shape", low.shape))
        args = check_args(Args(**{name: value for name, value in content["args"].items() if name in known}))
        evaluation = {**content["evaluation"]}
        evaluation = {name: evaluation[name] for name in ("step", "best_return", "best_return_std", f"best_{CONDITION}")}
        obs_dim = int(content["obs_dim"])
        actor = load_network(args, "actor", content["actor"], obs_dim, len(low))
        return PolicyFile(args, obs_dim, action_shape, low, high, actor, evaluation)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        raise UserError(f"{path} is damaged or not a policy of {SCRIPT}.py.") from None


class Policy:
    """The trained family of a run, for deployment: action = policy(obs) or policy(obs, <condition>=...), deterministic.

    obs (O,) or (B, O) -> action in the environment's shape, or (B, *shape), within its bounds. A condition (beta, or k) is a
    number, or an array (B,) with one for each row; without one the best of its evaluation plays. Attributes: actor, the network;
    betas and best_beta, or ks and best_k. UserError for an observation of another shape or with non-finite numbers, and for a
    condition outside the range that was trained or evaluated.
    """

    def __init__(self, path: str | Path):
        file = load_policy_file(path)
        self.obs_dim = file.obs_dim
        self.action_shape = file.action_shape
        self.low = file.low
        self.high = file.high
        self.range = condition_range(file.args)
        self.best = file.evaluation[f"best_{CONDITION}"]
        self.actor = file.actor
        setattr(self, f"{CONDITION}s", eval_conditions(file.args))
        setattr(self, f"best_{CONDITION}", self.best)

    def __call__(self, obs: np.ndarray, condition: float | np.ndarray | None = None, **named) -> np.ndarray:
        if named and (condition is not None or set(named) != {CONDITION}):
            raise UserError(f"{', '.join(named)} was given; a policy takes one condition, {CONDITION}, once.")
        value = named.get(CONDITION, condition)
        try:
            obs = np.array(obs, np.float32, order="C")
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"obs is of type {type(obs).__name__}; it must be an array, as gymnasium.spaces.flatten makes it."
            ) from None
        if obs.ndim not in (1, 2) or obs.shape[-1] != self.obs_dim or not np.isfinite(obs).all():
            raise UserError(f"obs has shape {obs.shape}; it must be ({self.obs_dim},) or (B, {self.obs_dim}) and finite.")
        rows = np.atleast_2d(obs)
        action = deterministic_action(self.actor, rows, self.checked(self.best if value is None else value, len(rows)))
        return to_bounds(action, self.low, self.high).reshape(*obs.shape[:-1], *self.action_shape)

    def checked(self, value, rows: int) -> np.ndarray:
        """A condition as a number or (B,), in the trained range."""
        low, high = self.range
        try:
            condition = np.asarray(value)
            ok = condition.dtype.kind in "iuf" and condition.shape in ((), (rows,))
            ok = ok and bool(((low <= condition) & (condition <= high)).all())
        except (TypeError, ValueError):
            ok = False
        if not ok:
            raise UserError(f"{CONDITION} is {value!r}; {CONDITION} must be from {low} to {high}, a number or one for each row.")
        return condition


def load_policy(path: str | Path) -> Policy:
    """The policies of a run directory as last evaluated, or those of a policy.pt or best_policy.pt; needs no environment."""
    return Policy(path)


def start_tracking(args: Args, run_dir: Path, sources: tuple = (__file__,)):
    """A Weights & Biases run that a resumed run continues, offline where there is no key or no network; None if it fails.

    sources: the files that it shows as the run's code.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    identity = run_dir / "wandb_id"
    if not identity.exists():
        write_whole(identity, lambda file: file.write(os.urandom(4).hex().encode()))
    try:
        import wandb  # slow to import, and only needed here

        start = functools.partial(
            wandb.init,
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            config=dataclasses.asdict(args),
            resume="allow",
            name=run_dir.name,
            id=identity.read_text(),
            dir=str(run_dir),
            settings=wandb.Settings(silent=True, console="off", init_timeout=20),
        )
        run = start_on_or_offline(wandb, start, run_dir)
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")  # evaluations come later than their step
        with tempfile.TemporaryDirectory() as folder:  # log_code would search all that lies below and beside the script
            for source in sources:
                shutil.copy(source, folder)
            run.log_code(folder)
    except Exception as error:  # a wrong project name, a service that does not start: not worth losing the run
        tell(f"Weights & Biases does not start, and the run goes on without it: {first_line(error)}")
        return None
    if run.url:
        tell(f"Weights & Biases: {run.url}")
    return run


def start_on_or_offline(wandb, start, run_dir: Path):
    """The run of wandb.init(); offline with a line that says so where it is asked for, or where it has to be."""
    upload_later = f"upload later: wandb sync {run_dir}/wandb/offline-run-*"
    mode = os.environ.get("WANDB_MODE", "online")
    try:
        if mode == "offline":
            tell(f"Weights & Biases is offline (WANDB_MODE); {upload_later}")
        elif mode == "online" and not wandb.login(prompt=False, verify=False):
            raise wandb.errors.CommError("no API key")
        return start()
    except wandb.errors.CommError as error:
        tell(f"Weights & Biases is offline ({first_line(error)}); {upload_later}")
        wandb.teardown()  # or else the failed start holds the run's id
        return start(mode="offline")


def record_episode(args: Args, file: PolicyFile, folder: Path, name: str = "") -> None:
    """One deterministic episode of a file's best policy into folder/videos, rendered off screen; UserError if it cannot be."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    best = file.evaluation[f"best_{CONDITION}"]
    name = f"{name}step-{file.evaluation['step']}-{CONDITION}-{best:.4g}"
    try:
        env = FlatEnv(args.env_id, render_mode="rgb_array")
        follow_the_body(env)
        with only_errors_of_gymnasium():  # RecordVideo warns of a folder that exists
            film = gym.wrappers.RecordVideo(env, str(folder / "videos"), name_prefix=name, disable_logger=True)
            play_episodes([film], file.actor, best, seeds_for(args.seed, 0))
            film.close()
    except Exception as error:  # drivers, codecs and renderers fail in their own ways
        reason = f"{args.env_id} does not render images" if isinstance(error, NotImplementedError) else first_line(error)
        raise UserError(f"no video could be recorded: {reason}.") from None


def follow_the_body(env: gym.Env) -> None:
    """Film with the camera "track" of a MuJoCo model, where it has one; the one that Gymnasium 1.4 takes is soon left behind."""
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer is not None and renderer.camera_id == -1:  # the environment names no camera of its own
        cameras = [renderer.model.camera(number).name for number in range(renderer.model.ncam)]
        if "track" in cameras:
            renderer.camera_id = cameras.index("track")


# Command line -------------------------------------------------------------------------------------------------------------------
MAY_DIFFER = ("total_timesteps", "eval_workers", "max_pending_evaluations", "capture_video", "compile")  # on resuming
MAY_DIFFER_ON_CUDA = ("cudagraphs",)
MAY_DIFFER_IN_EVALUATION = ("eval_episodes", "seed", "eval_workers", "capture_video")


def resumed(asked: Args, saved: Args, unset: Args, device: str = "cpu") -> Args:
    """The arguments of a checkpoint with those of MAY_DIFFER that were asked for; says what has no effect.

    unset: the values of arguments that were not given; device: that of the checkpoint.
    """
    may_differ = MAY_DIFFER + (MAY_DIFFER_ON_CUDA if device == "cuda" else ())
    args = merged(asked, saved, unset, may_differ)
    if args.total_timesteps < saved.total_timesteps:
        raise UserError(f"total_timesteps is {args.total_timesteps}; on resuming it may only grow, from {saved.total_timesteps}.")
    return args


def merged(asked: Args, saved: Args, unset: Args, may_differ: tuple[str, ...]) -> Args:
    """`saved` with the fields of may_differ that were asked for; names in a line what was asked for in vain."""
    own = {"resume": asked.resume, "evaluate": asked.evaluate}
    given = [name for name in vars(asked) if name not in own and getattr(asked, name) != getattr(unset, name)]
    in_vain = [name for name in given if name not in may_differ and getattr(asked, name) != getattr(saved, name)]
    if in_vain:
        tell(f"not used: {', '.join(sorted(in_vain))}; the run keeps what it was saved with")
    return dataclasses.replace(saved, **own, **{name: getattr(asked, name) for name in given if name in may_differ})


def print_evaluation(path: Path) -> None:
    """Print condition -> return +- std of a policy file, or of a run's last evaluation, on fresh episodes; write evaluate.csv.

    The policy that was best in training is marked: its return here is free of the maximum's upward bias. evaluate.csv is
    written beside the policy of a run directory, not beside a file that is given by itself.
    """
    shown = path if path.is_dir() else path.parent
    path = path.absolute()  # an environment may change the current directory
    file = load_policy_file(path)
    saved = file.args
    if saved.eval_workers:  # as many as fit this machine, not the one that trained
        saved = dataclasses.replace(saved, eval_workers=None)
    asked = tyro.cli(Args, default=dataclasses.replace(saved, evaluate=str(path)))
    args = check_args(merged(asked, saved, saved, MAY_DIFFER_IN_EVALUATION))
    conditions = eval_conditions(args)
    step = file.evaluation["step"]
    best = file.evaluation[f"best_{CONDITION}"]
    check_plays_in(file, FlatEnv(args.env_id), path)  # the user's to mend, not a worker's to die of
    actor = {key: tensor.numpy() for key, tensor in file.actor.state_dict().items()}
    with Evaluator(args, seeds_for(args.seed, 1, 0, args.eval_episodes)) as evaluator:
        played = evaluator.map(functools.partial(play_policy, args, evaluator.seeds, actor), conditions)
    lines = [f"global_step,{CONDITION},return,return_std,best_in_training"]
    table = [f"{args.env_id}, step {step}, fresh episodes per {CONDITION}: {args.eval_episodes}"]
    table.append(f"{CONDITION:>10} {'return':>10} {'std':>9}")
    for condition, policy in zip(conditions, played, strict=True):
        mean, std = policy.returns.mean(), policy.returns.std()
        lines.append(f"{step},{condition:.6g},{mean},{std},{int(condition == best)}")
        table.append(f"{condition:10.4f} {mean:z10.1f} {std:9.1f}{'  <- best in training' if condition == best else ''}")
        for warning in policy.warnings:
            tell(warning)
    if path.is_dir():
        try:
            write_whole(path / "evaluate.csv", lambda file: file.write("\n".join([*lines, ""]).encode()))
        except TrainingError as error:
            tell(str(error))
    print_lines(*table)
    if args.capture_video:
        folder = path if path.is_dir() else path.parent
        record_episode(args, file, folder, "evaluate-")
        print_lines(f"recorded {CONDITION} {best:.4g} in {shown / 'videos'}")


def check_plays_in(file: PolicyFile, env: FlatEnv, path: Path) -> None:
    """UserError where an environment does not have the sizes of a policy, or the bounds of its actions."""
    then, now = (file.obs_dim, len(file.low)), (env.obs_dim, env.action_dim)
    bounds, bounds_here = ((part.low.tolist(), part.high.tolist()) for part in (file, env))
    close_quietly(env)
    if then != now:
        raise UserError(f"{path} has {then[0]} observations and {then[1]} actions; {env.full_id} has {now[0]} and {now[1]} here.")
    if bounds != bounds_here:
        raise UserError(f"{path} has actions within {bounds}; {env.full_id} has them within {bounds_here} here.")


def print_lines(*lines: str) -> None:
    """Print results; where a `| head` has read enough, end well."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        os._exit(0)


def print_summary(summary: dict) -> None:
    """What a run that is finished has come to."""
    lines = [f"finished: {summary['run_dir']}, {summary['global_step']} steps"]
    for title in ("last", "best"):
        evaluation = summary[title]
        best = f"{evaluation['best_return']:z.1f} ± {evaluation['best_return_std']:.1f} at {CONDITION}"
        lines.append(f"{title} evaluation: return {best} {evaluation[f'best_{CONDITION}']:.4g}, step {evaluation['step']}")
    play = summary["evaluate"]
    print_lines(*lines, f"to play the last policy on fresh episodes: {play}", f"to play the best: {play}/best_policy.pt")


def note_signal(stopped_by: list[int], number: int, frame) -> None:
    """The first signal stops a run after its step; Ctrl-C behind it ends the process at once.

    No other signal does: a supervisor that ends may send SIGTERM once more, while the checkpoint is written.
    """
    if stopped_by and number == signal.SIGINT:
        os._exit(128 + number)
    stopped_by.append(number)


def catch_signals() -> list[int]:
    """From now on signals that stop a run are noted in the list that is returned."""
    stopped_by = []
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:
        if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(getattr(signal, name), functools.partial(note_signal, stopped_by))
    return stopped_by


def run_command_line() -> int:
    """Do what the command line asks for; returns the exit code."""
    args = tyro.cli(Args, description=__doc__)
    if args.evaluate is not None and args.resume is not None:
        raise UserError("evaluate and resume were both given; choose one of them.")
    if args.evaluate is not None:
        print_evaluation(Path(args.evaluate))
        return 0
    if args.resume is not None:  # read once more, from what the run was saved with
        saved, device = load_arguments(Path(args.resume, "checkpoint.pt"))
        asked = tyro.cli(Args, default=dataclasses.replace(saved, resume=args.resume))
        args = resumed(asked, saved, saved, device)
    stopped_by = catch_signals()
    summary = train_with(args, stopped_by)
    if summary["completed"]:
        print_summary(summary)
        return 0
    tell(f"stopped at step {summary['global_step']}; go on with: {summary['resume']}")
    return 128 + stopped_by[0]


def main() -> int:
    """The command line: errors of the user are one sentence and exit code 2, failures of training exit code 1."""
    try:
        return run_command_line()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (UserError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except Exception:
        traceback.print_exc()
        return 1


def leave(code: int) -> None:
    """End the process, in ten seconds at the latest: Python waits for threads, and an environment may have left one for ever."""
    timer = threading.Timer(10.0, os._exit, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
