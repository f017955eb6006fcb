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

Every environment step draws its beta from U2 to explore, every training sample one from U1. Evaluation takes the best of H betas.

    python rac_sac.py --env-id Ant-v4 --utd 20

114 ms per environment step (20 critic updates, N = 10, Ant-v4) on 2 cores of an AMD EPYC with AVX-512, 1.75 times the time of its
matrix products alone. Return after 33 000 steps: Walker2d-v4 936 ± 412, Hopper-v4 2504 ± 1465 (3 seeds; benchmark/RESULTS.md).
"""

import contextlib
import copy
import csv
import ctypes
import dataclasses
import functools
import gc
import hashlib
import json
import math
import multiprocessing.connection
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
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

# Before torch loads OpenMP: a waiting thread spins briefly, then leaves its core to the evaluation workers (benchmark/SPEED.md).
if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if __name__ == "__mp_main__":  # an evaluation worker
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import filelock
import gymnasium as gym
import mujoco
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch.func import functional_call, grad, grad_and_value
from tqdm import tqdm

CONDITION = "beta"  # what the policies of the family are told apart by
BETA_MIN = 1e-7  # lower end of U1 and U2; log(beta) must stay finite
Beta = Annotated[float, Field(ge=BETA_MIN)]
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
    resume: str | None = None  # a run directory to go on with; its arguments win, total_timesteps may grow, eval_workers change
    evaluate: str | None = None  # a run directory to evaluate; its arguments win, eval_episodes, eval_workers and seed aside

    # Environment and replay
    env_id: str = "Hopper-v4"  # the id of the Gymnasium environment
    total_timesteps: PositiveInt | None = None  # environment steps of the run; by default 1e6 for Humanoid, 3e5 for others
    learning_starts: NonNegativeInt = 5000  # environment steps with uniformly random actions before learning starts
    buffer_size: PositiveInt | None = None  # replay capacity; default: Humanoid 3e5, Walker2d 1e5, Ant 2e5, others 1e6
    batch_size: PositiveInt = 256  # the batch size sampled from the replay

    # Realistic Actor-Critic
    utd: PositiveInt = 20  # update-to-data ratio G: critic updates per environment step
    num_critics: Annotated[int, Field(ge=2)] = 10  # ensemble size N
    train_beta_max: Beta = 0.8  # a of U1 = U[1e-7, a], from which every training sample draws its beta
    explore_beta_max: Beta = 0.3  # b of U2 = U[1e-7, b], from which every environment step draws its beta

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
    bias_frequency: NonNegativeInt = 0  # environment steps between measurements of the normalised value bias; 0: never


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
        if self.weight.shape[2] == 1:
            # A product with one column is a dot product: multiply and sum fuses with the ReLU before it, bmm does not.
            return (x * self.weight.transpose(1, 2)).sum(2, keepdim=True) + self.bias
        # Bias outside bmm rather than in baddbmm: the compiler fuses it with the ReLU after it into one pass.
        return torch.bmm(x.expand(self.weight.shape[0], -1, -1), self.weight) + self.bias


class Critic(nn.Sequential):
    """An ensemble of N critics Q_i with two hidden layers each."""

    def __init__(self, num_critics: int, obs_dim: int, action_dim: int, hidden_dim: int, condition_dim: int = 1):
        first = EnsembleLinear(num_critics, obs_dim + action_dim + condition_dim, hidden_dim)
        second, last = EnsembleLinear(num_critics, hidden_dim, hidden_dim), EnsembleLinear(num_critics, hidden_dim, 1)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), last)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """obs (B, O), action (B, A) and the logarithm of the condition (B, 1), where there is one -> (N, B)."""
        return super().forward(torch.cat(inputs, 1)).squeeze(2)


def linear(in_features: int, out_features: int) -> nn.Linear:
    """A linear layer with PyTorch's default weights, U(+-1/sqrt(in)), and zero bias."""
    layer = nn.Linear(in_features, out_features)
    nn.init.zeros_(layer.bias)
    return layer


class Actor(nn.Module):
    """The policy pi(a | s, beta): mean and log standard deviation of a Gaussian that tanh squashes into [-1, 1]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_dim: int):
        super().__init__()
        self.body = nn.Sequential(linear(obs_dim + 1, hidden_dim), nn.ReLU(), linear(hidden_dim, hidden_dim), nn.ReLU())
        self.mean = linear(hidden_dim, action_dim)
        self.log_std = linear(hidden_dim, action_dim)

    def forward(self, obs: torch.Tensor, log_beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs (B, O), log_beta (B, 1) -> mean (B, A), log_std (B, A) clamped to [-10, 2]."""
        x = self.body(torch.cat([obs, log_beta], 1))
        return self.mean(x), self.log_std(x).clamp(-10, 2)


class Temperature(nn.Module):
    """log alpha(beta): a network plus xi (equation 25), or one learned scalar, or a constant."""

    def __init__(self, args: Args):
        super().__init__()
        self.network, self.log_alpha = None, math.log(max(args.alpha, 1e-45))
        if args.autotune and args.temperature_network:
            self.log_alpha = args.initial_log_alpha
            # PyTorch's default biases, not zeros: with log beta < 0 half of the units would never be active.
            self.network = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))
        elif args.autotune:
            self.log_alpha = nn.Parameter(torch.tensor(args.initial_log_alpha))

    def forward(self, log_beta: torch.Tensor) -> torch.Tensor:
        """log_beta (B, 1) -> log alpha (B,)."""
        network = self.network(log_beta) if self.network else torch.zeros_like(log_beta)
        return network.squeeze(1) + self.log_alpha


# One update of each network, in place; compiled --------------------------------------------------------------------------------
def adam_scales(count: torch.Tensor, lr, updates: int) -> torch.Tensor:
    """Step size and root of the second moment's bias correction of the next Adam updates, by row; count () float64 moves on.

    In float64, for 1 - 0.999 has only four digits in float32. The last two columns only keep rows 16 bytes apart.
    """
    t = count + torch.arange(1, updates + 1, device=count.device)
    count.add_(updates)
    return torch.stack([lr / (1 - 0.9**t), (1 - 0.999**t).sqrt(), t, t], 1).float()  # (updates, 4)


def adam_step(network, grads, moments, scales):
    """Adam with torch.optim.Adam's defaults; compiled into an update it is one pass over the parameters, which fused Adam is not.
    grads: by parameter name; moments: the first and the second, networks like it; scales: a row of adam_scales."""
    moments = [moment.parameters() for moment in moments]
    for (name, parameter), first, second in zip(network.named_parameters(), *moments, strict=True):
        first.lerp_(grads[name], 0.1)
        second.mul_(0.999).addcmul_(grads[name], grads[name], value=0.001)
        parameter.sub_(scales[0] * first / (second.sqrt() / scales[1] + 1e-8))


def prepare_targets(actor, temperature, next_obs, beta, noise):
    """Everything of the targets that the critics do not change, for all G minibatches at once: with actor and temperature frozen
    during the G critic updates, one pass equals G. (G*B, O), (G*B,), (G*B, A) -> next_action (G*B, A), entropy_bonus (G*B,)."""
    log_beta = beta.log()[:, None]
    next_action, log_prob = squashed_gaussian(*actor(next_obs, log_beta), noise)
    return next_action, -temperature(log_beta).exp() * log_prob


def update_critics(critic, target_critic, moments, sizes, gamma, tau, scales, rows, beta, next_action, entropy_bonus):
    """One critic (equations 17, 18) and Polyak step: rows (B, 2*O + A + 2), beta, entropy_bonus (B,), next_action (B, A)."""
    obs, action, reward, terminated, next_obs = rows.split(sizes, 1)
    log_beta = beta.log()[:, None]
    q_next = target_critic(next_obs, next_action, log_beta)  # (N, B)
    target = upq_target(q_next, beta, reward[:, 0], terminated[:, 0], gamma, entropy_bonus)  # (B,), no gradient

    def loss_function(parameters):
        q = functional_call(critic, parameters, (obs, action, log_beta))  # (N, B)
        return critic_loss(q, target), q

    grads, q = grad(loss_function, has_aux=True)(dict(critic.named_parameters()))
    adam_step(critic, grads, moments, scales)
    for slow, fast in zip(target_critic.parameters(), critic.parameters(), strict=True):
        slow.lerp_(fast, tau)
    return q, target  # (N, B) and (B,), for the metrics


def update_actor(actor, critic, temperature, moments, metrics, scales, obs, beta, noise):
    """One actor step (equation 19): obs (B, O), beta (B,), noise (B, A)."""
    log_beta = beta.log()[:, None]
    alpha = temperature(log_beta).exp()

    def loss_function(parameters):
        action, log_prob = squashed_gaussian(*functional_call(actor, parameters, (obs, log_beta)), noise)
        return actor_loss(critic(obs, action, log_beta), alpha, log_prob), log_prob

    grads, (loss, log_prob) = grad_and_value(loss_function, has_aux=True)(dict(actor.named_parameters()))
    adam_step(actor, grads, moments, scales)
    metrics[3:6] += torch.stack([loss, alpha.mean(), -log_prob.mean()])


def update_temperature(actor, temperature, moments, metrics, scales, target_entropy, obs, beta, noise):
    """One temperature step (equation 16), with fresh actions of the updated actor: obs (B, O), beta (B,), noise (B, A)."""
    log_beta = beta.log()[:, None]
    _, log_prob = squashed_gaussian(*actor(obs, log_beta), noise)

    def loss_function(parameters):
        return temperature_loss(functional_call(temperature, parameters, (log_beta,)), log_prob, target_entropy)

    grads, loss = grad_and_value(loss_function)(dict(temperature.named_parameters()))
    adam_step(temperature, grads, moments, scales)
    metrics[6:] += loss


METRICS = ("qf_loss", "qf_values", "qf_std", "actor_loss", "alpha", "entropy", "alpha_loss")  # qf_: over G updates, loss of one
COMPILED = (prepare_targets, update_critics, update_actor, update_temperature)


# The family of policies ---------------------------------------------------------------------------------------------------------
REPLAY_CAPACITY = {"Humanoid": 300_000, "Walker2d": 100_000, "Ant": 200_000}  # others 1 000 000


def check_own_args(args: Args, name: str) -> None:
    """Fill in this algorithm's defaults in the environment `name`, without version; check its arguments against each other."""
    args.eval_beta_max = args.train_beta_max if args.eval_beta_max is None else args.eval_beta_max
    if args.explore_beta_max > args.train_beta_max:
        raise UserError(f"explore_beta_max is {args.explore_beta_max}; it must not exceed train_beta_max, {args.train_beta_max}.")


def condition_range(args: Args) -> tuple[float, float]:
    """The smallest and the largest beta that the policies are trained, or evaluated, for."""
    return BETA_MIN, max(args.train_beta_max, args.eval_beta_max)


def eval_conditions(args: Args) -> list[float]:
    """The evaluated betas, beta_i = eval_beta_max / H * i (equation 20)."""
    return [args.eval_beta_max * (i / args.num_eval_policies) for i in range(1, args.num_eval_policies + 1)]


@torch.inference_mode()
def policy(actor: nn.Module, obs: np.ndarray, beta: float, noise: np.ndarray | None = None):
    """The policy of one beta: obs (B, O) -> action (B, A) in [-1, 1], log_prob (B,), as numpy.

    With noise (B, A) it is stochastic; without, it plays tanh(mean) and log_prob is None.
    """
    mean, log_std = actor(torch.from_numpy(obs), torch.full((len(obs), 1), math.log(beta)))
    if noise is None:
        return mean.tanh().numpy(), None
    action, log_prob = squashed_gaussian(mean, log_std, torch.from_numpy(noise))
    return action.numpy(), log_prob.numpy()


def measured_policy(args: Args, actor: nn.Module, obs: np.ndarray, beta: float, noise: np.ndarray, continuing: bool):
    """The policy of which the value bias is measured, while collecting pairs and in their continuations: stochastic."""
    return policy(actor, obs, beta, noise)


@torch.inference_mode()
def mean_q(critic: nn.Module, obs: np.ndarray, action: np.ndarray, beta: float) -> np.ndarray:
    """The ensemble's mean: obs (B, O), action (B, A) -> (B,)."""
    log_beta = torch.full((len(obs), 1), math.log(beta))
    return critic(torch.from_numpy(obs), torch.from_numpy(action), log_beta).mean(0).numpy()


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
    device. All noise is drawn from `generator`, outside the compiled functions.
    """

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.args, self.device, self.action_dim = args, device, action_dim
        self.sizes = [obs_dim, action_dim, 1, 1, obs_dim]  # of a row's parts
        torch.manual_seed(args.seed)  # networks are made on the CPU: alike on every device
        self.actor, self.critic = (make_network(name, args, obs_dim, action_dim) for name in ("actor", "critic"))
        self.temperature = Temperature(args)
        self.target = copy.deepcopy(self.critic)
        self.register_buffer("metrics", torch.zeros(len(METRICS)))  # sums since they were last read
        self.register_buffer("filled", torch.zeros((), dtype=torch.float64))  # a tensor: a captured graph must see it grow
        self.register_buffer("q_lr", torch.tensor(float(args.q_lr)))
        self.moments, self.counts = nn.ModuleDict(), nn.ParameterDict()  # of Adam, by network: first and second; updates done
        for name in ("critic", "actor", "temperature"):
            self.moments[name] = nn.ModuleList(copy.deepcopy(getattr(self, name)) for _ in range(2))
            self.counts[name] = torch.zeros((), dtype=torch.float64)
        self.to(device).requires_grad_(False)  # gradients are taken by torch.func
        for parameter in self.moments.parameters():
            parameter.zero_()
        width, cuda = sum(self.sizes), device.type == "cuda"
        self.replay, self.row = allocate_replay(args, width, device), torch.empty(width, pin_memory=cuda)
        self.host_obs, self.obs = torch.empty(1, obs_dim, pin_memory=cuda), torch.zeros(1, obs_dim, device=device)
        self.action = torch.zeros(action_dim + 1, device=device)
        stream = np.random.SeedSequence(args.seed).generate_state(1, np.uint64)  # apart from that of the weights
        self.generator = torch.Generator(device).manual_seed(int(stream[0]))
        # The first option: the CPU compiler fuses loops that share nothing but their ranges, against the grain of one of them.
        # The others choose kernels by timing them: not the same bits twice.
        options = {"cpp.max_horizontal_fusion_size": 1, "shape_padding": False, "dynamic_scale_rblock": False}
        for function in COMPILED:
            fast = torch.compile(function, fullgraph=True, dynamic=False, options=options) if args.compile else function
            setattr(self, function.__name__, fast)
        self.act_graph = self.update_graph = None

    def store(self, step: int, obs, action, reward, terminated, next_obs) -> None:
        """Write the transition of environment step `step` (counted from 0) over the oldest one."""
        np.concatenate((obs, action, (reward, terminated), next_obs), out=self.row.numpy(), casting="unsafe")
        self.replay[step % len(self.replay)].copy_(self.row)  # waits for the copy: the next row must not overtake it
        self.filled.fill_(min(step + 1, len(self.replay)))

    def random_action(self) -> np.ndarray:
        """A uniformly random action in [-1, 1], (A,)."""
        return (torch.rand(self.action_dim, generator=self.generator, device=self.device) * 2 - 1).cpu().numpy()

    def act(self, obs: np.ndarray) -> np.ndarray:
        """The exploring policy's action for obs (O,), in [-1, 1], (A,); TrainingError after a non-finite loss."""
        self.host_obs.numpy()[0] = obs
        self.obs.copy_(self.host_obs, non_blocking=True)
        self.act_graph.replay() if self.act_graph else self._act()
        action = self.action.cpu().numpy()  # the only synchronisation with the device of an environment step
        if not np.isfinite(action).all():
            self.check_finite()
            raise TrainingError("the policy's action became non-finite")
        return action[:-1].copy()

    def update(self, step: int) -> None:
        """All updates of environment step `step`: G of the critics, one of the actor and, where learned, of the temperature."""
        args = self.args
        warm_up = (args.learning_starts, args.q_lr_warmup_end)  # of the critics' learning rate, linear (equation 23)
        self.q_lr.fill_(np.interp(step, warm_up, (args.q_lr_init, args.q_lr)) if warm_up[0] < warm_up[1] else args.q_lr)
        if self.device.type == "cuda" and args.cudagraphs and not self.update_graph:
            self.capture()
        self.update_graph.replay() if self.update_graph else self._update()

    def capture(self) -> None:
        """Capture acting and updating as CUDA graphs, without any effect on training."""
        saved, random_state = copy.deepcopy(self.state_dict()), self.generator.get_state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and lets the libraries allocate what they must not allocate while capturing
                self._act()
                self._update()
        torch.cuda.current_stream().wait_stream(stream)
        gc.collect()  # the graph of another learner must not be destroyed in the middle of a capture
        graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        for graph, body in zip(graphs, (self._act, self._update), strict=True):
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph):
                body()
        self.load_state_dict(saved)
        self.generator.set_state(random_state)
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

    def read_metrics(self, updates: int) -> dict[str, float | None]:
        """The averages of METRICS over the last `updates` environment steps, None without any."""
        sums = dict(zip(METRICS, self.metrics.tolist(), strict=True))
        self.metrics.zero_()
        counts = {name: max(updates, 0) * (self.args.utd if name.startswith("qf") else 1) for name in METRICS}
        return {f"losses/{name}": value / counts[name] if counts[name] else None for name, value in sums.items()}

    @torch.no_grad()
    def _act(self) -> None:
        """Action with a fresh beta ~ U2 and, behind it, the metrics' sum, which is non-finite once a loss was."""
        uniform = torch.rand(1, 1, generator=self.generator, device=self.device)
        noise = torch.randn(1, self.action_dim, generator=self.generator, device=self.device)
        log_beta = (BETA_MIN + (self.args.explore_beta_max - BETA_MIN) * uniform).log()
        mean, log_std = self.actor(self.obs, log_beta)
        action = (mean + log_std.exp() * noise).tanh()  # that of squashed_gaussian
        torch.cat([action[0], self.metrics.sum()[None]], out=self.action)

    @torch.no_grad()
    def _update(self) -> None:
        args, n, count = self.args, self.args.utd * self.args.batch_size, (self.args.utd + 1) * self.args.batch_size
        options = {"generator": self.generator, "device": self.device}
        # float64: a float32 uniform has 24 bits, too few to index a million rows evenly
        indices = (torch.rand(count, dtype=torch.float64, **options) * self.filled).long()
        beta = BETA_MIN + (args.train_beta_max - BETA_MIN) * torch.rand(count, **options)
        noise = torch.randn(count + args.batch_size, self.action_dim, **options)
        rows = self.replay[indices]
        next_obs = rows[:n, -self.sizes[0] :]
        next_action, bonus = self.prepare_targets(self.actor, self.temperature, next_obs, beta[:n], noise[:n])
        scales = adam_scales(self.counts["critic"], self.q_lr, args.utd)
        constants = (self.critic, self.target, self.moments["critic"], self.sizes, args.gamma, args.tau)
        minibatches = (x[:n].split(args.batch_size) for x in (rows, beta, next_action, bonus))
        made = [self.update_critics(*constants, *inputs) for inputs in zip(scales, *minibatches, strict=True)]
        # Once for all updates: on a GPU every sum is a kernel.
        q, target = (torch.stack(parts) for parts in zip(*made, strict=True))  # (G, N, B), (G, B)
        loss = torch.vmap(critic_loss)(q, target) / args.num_critics
        self.metrics[:3] += torch.stack([loss.sum(), q.mean((1, 2)).sum(), q.std(1).mean(1).sum()])
        obs, beta = rows[n:, : self.sizes[0]], beta[n:]
        (scales,) = adam_scales(self.counts["actor"], args.policy_lr, 1)
        networks, adam = (self.actor, self.critic, self.temperature), (self.moments["actor"], self.metrics, scales)
        self.update_actor(*networks, *adam, obs, beta, noise[n:count])
        if args.autotune:
            (scales,) = adam_scales(self.counts["temperature"], args.alpha_lr, 1)
            networks, adam = (self.actor, self.temperature), (self.moments["temperature"], self.metrics, scales)
            self.update_temperature(*networks, *adam, args.target_entropy, obs, beta, noise[count:])


# Training: from here on the same in all four scripts ----------------------------------------------------------------------------
class UserError(ValueError):
    """A mistake in the arguments or files given by the user: shown as one sentence, exit code 2."""


class TrainingError(RuntimeError):
    """Training cannot go on (a non-finite number, a full disk): shown as one sentence, exit code 1."""


def train(args: Args, stopped_by: list[int] | tuple = ()) -> dict:
    """Train, or go on with args.resume, to the end or until `stopped_by` holds a signal's number; returns a summary.

    Raises UserError for arguments or files that cannot be used, TrainingError when training cannot go on, and what an environment
    or an evaluation raises, after a checkpoint of the last whole step.
    """
    with contextlib.ExitStack() as stack:
        return train_within(stack, args, stopped_by)


def train_within(stack: contextlib.ExitStack, args: Args, stopped_by) -> dict:
    """See train(); `stack` closes what must be closed however training ends."""
    saved, path = {}, Path(args.resume or "", "checkpoint.pt")
    if args.resume is not None:
        if os.path.exists(path):  # what is no run is not held
            stack.enter_context(hold(path.parent))
        saved = load_file(path)
        args = resumed(args, saved, Args())
        if saved["state"]["step"] == args.total_timesteps:  # what is left can be done without a GPU
            args.cuda = args.cuda and torch.cuda.is_available()
    env = FlatEnv(args.env_id, disable_env_checker=False)
    args = check_args(args, env.action_dim)
    if env.has_images:
        tell(f"{args.env_id} observes images; they are learned as a flat vector of {env.obs_dim} numbers")
    device, wanted = torch.device("cuda" if args.cuda is not False and torch.cuda.is_available() else "cpu"), args.compile
    torch.set_num_threads(saved.get("threads", torch.get_num_threads()))
    set_up_torch(args, device)
    args.compile |= bool(stopped_by and wanted)  # Ctrl-C also ends a compiler, which then is there all the same
    learner = Learner(args, env.obs_dim, env.action_dim, device)
    # What a checkpoint keeps beside tensors; last, best: evaluations.
    run = SimpleNamespace(step=0, episode=0, episodic_return=0.0, row_step=0, row_seconds=0.0, scripts=[], last={}, best={})
    if saved:
        run_dir, run = path.parent, SimpleNamespace(**saved["state"])
        restore(saved, run_dir, learner)
    else:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_").replace(":", "_")
        run_dir = Path(args.run_root, args.run_name or name)
        stack.enter_context(hold(run_dir, new=True))
    # A finished run may be resumed on another device, to play its last evaluations; its checkpoint stays one of the first.
    elsewhere = {}
    if saved.get("device", device.type) != device.type:
        elsewhere = copy.deepcopy({name: saved[name] for name in ("device", "threads", "generator", "obs")})
        elsewhere["args"] = dataclasses.asdict(saved["args"])
    start, saved_time, saved_step = time.time() - saved.get("seconds", 0.0), time.time(), run.step if saved else None
    identity = {"script": SCRIPT, "format": FORMAT, "obs_dim": env.obs_dim, "bounds": torch.from_numpy(env.bounds),
                "args": dataclasses.asdict(dataclasses.replace(args, resume=None))}  # fmt: skip
    evaluator = stack.enter_context(Evaluator(args, seeds_for(args.seed, 0, 0, args.eval_episodes)))
    evaluator.pending += copy.deepcopy(saved.get("pending", []))
    most = 2 * args.eval_workers if args.max_pending_evaluations is None else args.max_pending_evaluations
    tracker, outcome = start_tracking(args, run_dir) if args.track else None, 1
    bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    new_bar = functools.partial(tqdm, total=args.total_timesteps, unit="step", dynamic_ncols=True, smoothing=0.05,
                                desc=run_dir.name[:40], mininterval=0.5 if sys.stderr.isatty() else 30)  # fmt: skip
    bar = new_bar(initial=run.step, bar_format=bar_format.replace("<{remaining}", ""))

    def log(name: str, row: dict) -> None:
        """Append a row to a CSV file, with the header where the file is new, and to Weights & Biases."""
        nonlocal tracker
        try:
            with open(run_dir / name, "a+", newline="") as file:
                file.seek(0)
                writer, header = csv.DictWriter(file, row), file.readline()
                if not header:
                    writer.writeheader()
                elif header.strip() != ",".join(row):
                    raise TrainingError(f"{run_dir / name} has other columns than {SCRIPT}.py writes now; move it away to go on")
                writer.writerow(row)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TrainingError(f"{run_dir / name} cannot be written: {first_line(error)}") from None
        try:
            if tracker:
                tracker.log({key: value for key, value in row.items() if value is not None})
        except Exception as error:  # its service has died
            tracker = tell(f"Weights & Biases has failed, and the run goes on without it: {first_line(error)}")

    def log_training() -> None:
        steps, seconds = run.step - run.row_step, time.time() - start
        row = {"global_step": run.step, "charts/wall_seconds": round(seconds, 1)}
        row |= {"charts/SPS": round(steps / max(seconds - run.row_seconds, 1e-9), 2)}
        row |= learner.read_metrics(min(steps, learning))
        row |= {"charts/episodic_return": run.episodic_return if done else None}
        log("train.csv", row | {"charts/episodic_length": len(actions) if done else None})
        run.row_step, run.row_seconds = run.step, seconds

    def collect(seconds: float = 0.0, text: str | None = None) -> None:
        """Log the evaluations that have ended and keep their policies; wait up to `seconds` for one, and say `text` meanwhile."""
        bar.set_description_str(text or run_dir.name[:40], refresh=bool(text))
        for row, actor in evaluator.poll(seconds):
            log("eval.csv", row)
            names = ("best_return", "best_return_std", f"best_{CONDITION}")
            run.last = {"step": row["global_step"], **{name: row[f"eval/{name}"] for name in names}}
            better = run.last["best_return"] >= run.best.get("best_return", -math.inf)
            run.best = run.last if better else run.best
            for name in ("policy.pt", "best_policy.pt")[: 1 + better]:
                write_whole(run_dir / name, functools.partial(torch.save, {**identity, "actor": actor, "evaluation": run.last}))
            best = f"{run.last['best_return']:.1f} at {CONDITION} {run.last[f'best_{CONDITION}']:.3g}"
            bar.set_postfix_str(f"evaluated {best}, step {run.last['step']}", refresh=False)

    def save(final: bool = False) -> None:
        """Write the checkpoint; where that fails, say so and go on, but not with the final one."""
        nonlocal saved_time, saved_step
        learner.check_finite()
        filled = learner.replay[: run.step].cpu()
        content = {
            **identity, "device": device.type, "threads": torch.get_num_threads(), "seconds": time.time() - start,
            "state": vars(run), "pending": evaluator.pending, "obs": torch.from_numpy(obs.copy()),
            "actions": torch.from_numpy(np.array(actions, np.float32)), "generator": learner.generator.get_state(),
            "tensors": {name: tensor.cpu() for name, tensor in learner.state_dict().items()},
            "replay": filled if len(filled) == len(learner.replay) else filled.clone(),  # a view would save all of it
            **elsewhere,
        }  # fmt: skip
        try:
            write_whole(run_dir / "checkpoint.pt", functools.partial(torch.save, content))
            saved_step = run.step
        except TrainingError as error:
            tell(f"no checkpoint could be written at step {run.step}: {error}")
            if final:
                raise TrainingError("the final checkpoint could not be written") from None
        saved_time = time.time()

    def begin_episode() -> np.ndarray:
        """Reset with a seed of the episode's own, and repeat the actions of one that is resumed; returns the observation."""
        obs, _ = env.reset(seed=seeds_for(args.seed, 3, run.episode)[0])
        for action in actions:
            obs, *_ = env.step(action)
        return obs

    try:
        first, random_state, actions = True, None, list(saved["actions"].numpy().copy()) if saved else []
        obs = begin_episode()
        if actions and not elsewhere and not np.array_equal(obs, saved["obs"].numpy()):
            tell(f"{args.env_id} is not deterministic: the run goes on, but not exactly as it would have")
        saved.clear()  # lets go of the file, which the next checkpoint replaces
        if not elsewhere:
            run.scripts = keep_script(run_dir, identity["args"], device, run.scripts)
        save()
        random_state = learner.generator.get_state()
        while run.step < args.total_timesteps and not stopped_by:
            action = learner.random_action() if run.step < args.learning_starts else learner.act(obs)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            random_state = None  # from here to where it is set again no checkpoint can be written
            learner.store(run.step, obs, action, reward, terminated, next_obs)
            learning = run.step + 1 - args.learning_starts  # environment steps since learning started, this one included
            if learning > 0:
                if first and args.compile:
                    bar.set_description_str("compiling the update (10 to 60 s)")
                learner.update(run.step + 1)
                if first:  # the time left counts from here: random steps and compiling say nothing of it
                    bar.leave = False
                    bar.close()
                    bar, first = new_bar(initial=run.step, bar_format=bar_format), False
            run.step, run.episodic_return, obs = run.step + 1, run.episodic_return + reward, next_obs
            actions.append(action)
            bar.update()
            done, last = terminated or truncated, run.step == args.total_timesteps
            if (learning >= 0 and learning % args.eval_frequency == 0) or last:
                critic = learner.copy_of("critic") if args.bias_frequency and learning % args.bias_frequency == 0 else None
                inputs = [round(time.time() - start, 1), alphas(learner, eval_conditions(args)), learner.copy_of("actor"), critic]
                evaluator.pending.append([run.step, *inputs])
            if done or run.step % 1000 == 0 or last:
                log_training()
            if done:
                run.episode, run.episodic_return, actions = run.episode + 1, 0.0, []
            random_state = learner.generator.get_state()
            if done:
                obs = begin_episode()
            if run.step % 10 == 0 or done:
                collect()
            while len(evaluator.pending) > most and not stopped_by:
                collect(1.0, "training waits for evaluations")
            if time.time() - saved_time >= args.checkpoint_seconds:
                save()
        if not stopped_by:
            save()
        while evaluator.pending and not stopped_by:
            collect(1.0, "collecting the last evaluations")
        random_state = None  # one try is enough
        save(final=True)
        completed = run.step == args.total_timesteps and not evaluator.pending
        outcome = 0 if completed else 255  # wandb's own exit code of an interrupted run
        bar.set_description_str(run_dir.name[:40])
        if completed and args.capture_video:
            try:
                record_episode(args, learner.copy_of("actor"), run.last[f"best_{CONDITION}"], run_dir, f"step-{run.step}")
            except UserError as error:
                tell(str(error))
    except Exception as error:
        known = isinstance(error, TrainingError | torch.OutOfMemoryError)
        if random_state is not None:  # the environment, an evaluation, or a file of one that cannot be written
            learner.generator.set_state(random_state)  # all that the step has changed
            with contextlib.suppress(TrainingError, torch.OutOfMemoryError):
                save()
        good = "there is no checkpoint" if saved_step is None else f"the last good checkpoint is of step {saved_step}"
        if known or stopped_by:  # Ctrl-C in a terminal also ends the compiler
            what = first_line(error) if known else f"interrupted in the middle of a step ({first_line(error)})"
            raise TrainingError(f"stopped at step {run.step}: {what}; {good} in {run_dir}.") from None
        go_on = "" if saved_step is None else f"; go on with: {command('resume', run_dir)}"
        tell(f"stopped at step {run.step} by the error below; {good}{go_on}")
        raise
    finally:
        bar.close()
        with contextlib.suppress(Exception):  # a service that has died: the files are there
            if tracker:
                tracker.finish(exit_code=outcome)
    return {"run_dir": str(run_dir), "completed": completed, "global_step": run.step, "last": run.last, "best": run.best}


# Evaluation and value bias, in worker processes ---------------------------------------------------------------------------------
BIAS_PAIRS, BIAS_CHOSEN, BIAS_CONTINUATIONS, BIAS_STEPS = 100, 20, 20, 1500


def seeds_for(seed: int, purpose: int, index: int = 0, count: int = 1) -> list[int]:
    """Environment seeds of a run; purpose 0: evaluation, 1: fresh episodes, 2: bias at step `index`, 3: episode `index`."""
    return [int(s) for s in np.random.SeedSequence([seed, purpose, index]).generate_state(count)]


def play_returns(envs, actor, condition, seeds) -> np.ndarray:
    """Undiscounted returns (E,) of one deterministic episode from each seed, all E in step.

    The batch keeps its size when episodes end: another batch size would change the last bits of the actions.
    """
    obs = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
    returns, running = np.zeros(len(envs)), np.ones(len(envs), bool)
    while running.any():
        actions, _ = policy(actor, obs, condition)
        for i in np.flatnonzero(running):
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += reward
            running[i] = not (terminated or truncated)
    return returns


def measure_bias(args, env, endless_envs, actor, critic, condition, alpha, seed) -> tuple[float, float]:
    """Mean and std over pairs of the normalised value bias (equation 22) of the policy `condition`.

    `env` has its time limit, `endless_envs` (one for each continuation) have none; alpha is the policy's temperature.
    """
    rng, pairs, episode, done = np.random.default_rng(seed), [], seed, True
    while len(pairs) < BIAS_PAIRS:
        if done:
            episode, actions = episode + 1, []
            obs, _ = env.reset(seed=episode)
        noise = rng.standard_normal((1, env.action_dim), np.float32)
        action, _ = measured_policy(args, actor, obs[None], condition, noise, continuing=False)
        actions = [*actions, action[0]]
        pairs.append((episode, actions, mean_q(critic, obs[None], action, condition)[0]))
        obs, _, terminated, truncated, _ = env.step(action[0])
        done = terminated or truncated
    chosen = [pairs[i] for i in rng.choice(BIAS_PAIRS, BIAS_CHOSEN, replace=False)]
    returns = np.array([monte_carlo_return(args, endless_envs, actor, condition, alpha, *pair[:2], rng) for pair in chosen])
    bias = (np.array([float(q) for _, _, q in chosen]) - returns) / abs(returns.mean())
    return float(bias.mean()), float(bias.std())


def monte_carlo_return(args, envs, actor, condition, alpha, episode_seed, actions, rng) -> float:
    """Mean discounted return of len(envs) continuations of a state-action pair, reached by repeating its episode.

    From the second step on a continuation's return includes -alpha log pi, which is what a soft Q predicts (alpha is 0 where Q is
    not soft).
    """
    returns, running, discount = np.zeros(len(envs)), np.ones(len(envs), bool), 1.0
    for env in envs:
        env.reset(seed=episode_seed)
        for action in actions[:-1]:
            env.step(action)
    obs = np.zeros((len(envs), envs[0].obs_dim), np.float32)
    batch, log_prob = [actions[-1]] * len(envs), np.zeros(len(envs))
    for _ in range(BIAS_STEPS):
        for i in np.flatnonzero(running):
            obs[i], reward, terminated, _, _ = envs[i].step(batch[i])
            returns[i] += discount * (reward - alpha * log_prob[i])
            running[i] = not terminated
        if not running.any():
            break
        discount *= args.gamma
        noise = rng.standard_normal((len(envs), len(actions[0])), np.float32)
        batch, log_prob = measured_policy(args, actor, obs, condition, noise, continuing=True)
    return float(returns.mean())


@functools.cache
def make_envs(env_id: str, count: int, **options) -> list["FlatEnv"]:
    """`count` environments for evaluation, made once in a process."""
    return [FlatEnv(env_id, **options) for _ in range(count)]


def load_network(args: Args, name: str, parameters: dict, obs_dim: int, action_dim: int) -> nn.Module:
    """The actor or the critic of a run with the parameters given by name, as arrays or tensors."""
    network = make_network(name, args, obs_dim, action_dim)
    try:
        network.load_state_dict({key: torch.as_tensor(value) for key, value in parameters.items()})
    except RuntimeError:
        raise UserError(f"the saved {name} does not have the shapes that its arguments give.") from None
    return network.requires_grad_(False)


def evaluate_one(args: Args, seeds: list[int], actor: dict, condition: float) -> np.ndarray:
    """The returns (E,) of one policy."""
    envs = make_envs(args.env_id, len(seeds))
    return play_returns(envs, load_network(args, "actor", actor, envs[0].obs_dim, envs[0].action_dim), condition, seeds)


def evaluate(args: Args, seeds: list[int], step: int, seconds: float, alphas: list[float], actor: dict, critic=None) -> dict:
    """An evaluation as a row of eval.csv; with the value bias of the best policy where a critic is given.

    actor, critic: parameters by name. The std over the best policy's episodes is the population one.
    """
    conditions = eval_conditions(args)
    returns = [evaluate_one(args, seeds, actor, condition) for condition in conditions]
    best = int(np.argmax([r.mean() for r in returns]))
    row = {"best_return": returns[best].mean(), "best_return_std": returns[best].std(), f"best_{CONDITION}": conditions[best]}
    row |= {"bias_mean": None, "bias_std": None} | {f"return_{c:.6g}": r.mean() for c, r in zip(conditions, returns, strict=True)}
    row |= {f"alpha_{c:.6g}": alpha for c, alpha in zip(conditions, alphas, strict=False)}
    if critic is not None:
        (env, *_), endless = make_envs(args.env_id, len(seeds)), make_envs(args.env_id, BIAS_CONTINUATIONS, max_episode_steps=-1)
        networks = [load_network(args, *item, env.obs_dim, env.action_dim) for item in (("actor", actor), ("critic", critic))]
        alpha, (seed,) = alphas[best] if alphas else 0.0, seeds_for(args.seed, 2, step)
        row["bias_mean"], row["bias_std"] = measure_bias(args, env, endless, *networks, conditions[best], alpha, seed)
    row = {f"eval/{name}": value if value is None else float(value) for name, value in row.items()}
    return {"global_step": step, "charts/wall_seconds": seconds, **row}


def start_worker(lifeline) -> None:
    """In a worker: yield to training (at nice 19 workers would starve), and end when the other end of the pipe is closed."""
    torch.set_num_threads(1)
    if hasattr(os, "nice"):
        os.nice(10)

    def wait_for_the_end() -> None:
        multiprocessing.connection.wait([lifeline])
        os._exit(0)

    threading.Thread(target=wait_for_the_end, daemon=True).start()


class InThisProcess(Executor):
    """What is submitted is done at once, with one thread and in full precision: as in a worker, to the last bit."""

    def submit(self, function, *arguments) -> Future:
        future, threads, precision = Future(), torch.get_num_threads(), torch.get_float32_matmul_precision()
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        try:
            future.set_result(function(*arguments))
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
        return future


class Evaluator:
    """Plays evaluations in args.eval_workers processes beside training, or in this one, and hands their rows back in step order.

    Each evaluation is the work of one process, so results do not depend on the number of workers. `pending`: those that have not
    been handed back, each [step, wall seconds, alphas (H,), actor, critic or None], with the networks' parameters by name.
    """

    def __init__(self, args: Args, seeds: list[int]):
        self.args, self.seeds, self.pending, self.futures, self.deaths = args, seeds, [], [], 0

    def __enter__(self):
        """Start the workers. They end when this process closes its end of the pipe, or dies, be it by SIGKILL."""
        context, can_mask = multiprocessing.get_context("spawn"), hasattr(signal, "pthread_sigmask")
        reader, self.lifeline = context.Pipe(duplex=False)
        self.pool = InThisProcess()
        if self.args.eval_workers:
            self.pool = ProcessPoolExecutor(self.args.eval_workers, context, start_worker, (reader,))
            if can_mask:  # inherited by the workers: Ctrl-C is for training alone
                resource_tracker.ensure_running()  # its start would unblock the signal
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
            with contextlib.suppress(BrokenExecutor):  # poll() and map() will meet it again
                for _ in range(self.args.eval_workers):
                    self.pool.submit(os.getpid)  # spawns one
            if can_mask:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def __exit__(self, *_):
        self.lifeline.close()
        self.pool.shutdown(cancel_futures=True)

    def mend(self) -> None:
        """New workers in place of a pool in which one has died; what was not finished is started again."""
        self.deaths, self.futures = self.deaths + 1, []
        if self.deaths > 10:
            raise TrainingError("evaluation workers died again and again") from None
        tell("an evaluation worker died; what it had not finished is evaluated again")
        self.__exit__()
        self.__enter__()

    def map(self, function, items) -> list:
        """[function(item) for item in items], in the workers."""
        while True:
            try:
                return list(self.pool.map(function, items))
            except BrokenExecutor:
                self.mend()

    def poll(self, seconds: float = 0.0):
        """Start what is pending, wait up to `seconds` for the oldest; yields (row of eval.csv, actor) of what has ended."""
        try:
            for inputs in self.pending[len(self.futures) : 2 * self.args.eval_workers + 1]:
                arrays = [{key: tensor.numpy() for key, tensor in x.items()} if isinstance(x, dict) else x for x in inputs]
                self.futures.append(self.pool.submit(evaluate, self.args, self.seeds, *arrays))
            wait(self.futures[:1], seconds)
            while self.futures and self.futures[0].done():
                row, self.deaths = self.futures[0].result(), 0
                yield row, self.pending[0][3]
                del self.futures[0], self.pending[0]  # only now: it is pending until its row is written
        except BrokenExecutor:
            self.mend()


# Arguments, environment, PyTorch ------------------------------------------------------------------------------------------------
def check_args(args: Args, action_dim: int = 0) -> Args:
    """`args` with the defaults of the environment filled in; UserError for values that make no sense."""
    try:
        args = TypeAdapter(Args).validate_python(dataclasses.asdict(args))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{first['loc'][0]} is {first['input']}; {first['msg'].replace('Input should', 'it must')}.") from None
    name = args.env_id.split("/")[-1].split(":")[-1].rsplit("-v", 1)[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    args.total_timesteps = args.total_timesteps or {"Humanoid": 1_000_000}.get(name, 300_000)
    args.buffer_size = args.buffer_size or REPLAY_CAPACITY.get(name, 1_000_000)
    args.eval_workers = max(1, min(12, cores // 2)) if args.eval_workers is None else min(args.eval_workers, 4 * cores)
    if action_dim and getattr(args, "target_entropy", 0.0) is None:
        args.target_entropy = -float(action_dim)
    check_own_args(args, name)
    smallest = max(args.learning_starts, args.batch_size)
    enough = f"at least {smallest}, the larger of learning_starts and batch_size"
    for name, ok, wanted in (
        ("buffer_size", args.buffer_size >= smallest, enough),
        ("total_timesteps", args.total_timesteps >= smallest, enough),
        ("q_lr_warmup_end", args.q_lr_warmup_end >= args.learning_starts or args.q_lr_init == args.q_lr,
         f"at least learning_starts, {args.learning_starts}, unless q_lr_init equals q_lr"),
        ("bias_frequency", not args.bias_frequency % args.eval_frequency, f"a multiple of eval_frequency, {args.eval_frequency}"),
        ("run_name", args.run_name is None or (Path(args.run_name).name == args.run_name != ".." and len(args.run_name) <= 200),
         "a plain folder name of at most 200 characters"),
    ):  # fmt: skip
        if not ok:
            raise UserError(f"{name} is {getattr(args, name)!r}; it must be {wanted}.")
    if args.cuda and not torch.cuda.is_available():
        raise UserError("cuda was asked for, but PyTorch finds no CUDA device here.")
    return args


def set_up_torch(args: Args, device: torch.device) -> None:
    """Process-wide settings: determinism, memory allocation, precision; without a compiler args.compile becomes False."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a pass over every new tensor, finds only bugs
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        # Keep freed memory: by default every 2.6 MB temporary goes back to the system and page-faults on its next use.
        ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    precision = "highest" if args.matmul_precision == "auto" else args.matmul_precision
    if args.matmul_precision == "auto" and device.type == "cpu":
        # "medium" lets oneDNN do batched products: faster, and exact float32 unless the processor has AMX. Measured.
        a, b = torch.randn(2, 2, 256, 256, generator=torch.Generator().manual_seed(0))
        torch.set_float32_matmul_precision("medium")
        exact = a.double() @ b.double()
        precision = "medium" if float((torch.bmm(a, b) - exact).norm() / exact.norm()) < 1e-6 else "highest"
        if precision == "highest":
            tell("--matmul-precision medium would be up to twice as fast here, with bfloat16 products (README, Precision)")
    torch.set_float32_matmul_precision(precision)
    if args.compile:
        torch.compiler.reset()  # what earlier runs of this process compiled would count against the limit of recompilations
        try:
            torch.compile(torch.relu)(torch.ones(16, device=device))
        except Exception:
            tell("torch.compile does not work here (no compiler?): going on without it, slower.")
            args.compile = False


def allocate_replay(args: Args, width: int, device: torch.device) -> torch.Tensor:
    """The replay (buffer_size, width), uninitialised; UserError if it does not fit."""
    try:
        return torch.empty(args.buffer_size, width, device=device)
    except RuntimeError:
        size = f"{args.buffer_size * width * 4 / 2**30:.1f} GiB (buffer_size {args.buffer_size})"
        raise UserError(f"a replay of {size} does not fit on {device}; choose a smaller buffer_size.") from None


class FlatEnv(gym.Wrapper):
    """An environment as this file sees it: observations (O,) float32, actions (A,) in [-1, 1], all numbers finite."""

    def __init__(self, env_id: str, disable_env_checker: bool = True, **options):
        mujoco.set_mju_user_warning(lambda message: None)  # else MuJoCo writes to the screen and to ./MUJOCO_LOG.TXT
        level, gym.logger.min_level = gym.logger.min_level, gym.logger.ERROR  # every -v4 announces -v5
        try:
            env = gym.make(env_id, disable_env_checker=disable_env_checker, **options)
            space = env.action_space
            if not isinstance(space, gym.spaces.Box) or not np.issubdtype(space.dtype, np.floating) or not space.is_bounded():
                raise UserError(f"{env_id} has actions of type {space}; only a continuous, bounded Box is supported.")
            spaces = env.observation_space.spaces.values() if isinstance(env.observation_space, gym.spaces.Dict) else ()
            self.has_images = any(len(part.shape or ()) > 1 for part in (env.observation_space, *spaces))
            flat = gym.wrappers.DtypeObservation(gym.wrappers.FlattenObservation(env), np.float32)
            super().__init__(gym.wrappers.RescaleAction(flat, np.float32(-1), np.float32(1)))
        except UserError:
            raise
        except (gym.error.Error, ImportError, NotImplementedError, TypeError, ValueError) as error:
            raise UserError(f"cannot make the environment {env_id!r}: {first_line(error)}") from None
        finally:
            gym.logger.min_level = level
        self.bounds = np.stack([space.low.ravel(), space.high.ravel()])  # (2, A)
        self.obs_dim, self.action_dim = self.env.observation_space.shape[0], self.bounds.shape[1]

    def reset(self, **options) -> tuple[np.ndarray, dict]:
        obs, info = self.env.reset(**options)
        return self.finite("observation", obs), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, reward, *rest = self.env.step(action.reshape(self.env.action_space.shape))
        return self.finite("observation", obs), float(self.finite("reward", np.float32(reward))), *rest

    def finite(self, what: str, value):
        if not np.isfinite(value).all():
            raise ValueError(f"the environment returned a non-finite {what}: {value}")
        return value


# Run directory: checkpoint, logs, tracking --------------------------------------------------------------------------------------
SCRIPT, FORMAT = Path(__file__).stem, 3


def tell(message: str) -> None:
    tqdm.write(message, file=sys.stderr)


def command(option: str, run_dir) -> str:
    """What a user types to resume or evaluate a run."""
    return shlex.join(["python", os.path.relpath(__file__), f"--{option}", str(run_dir)])


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


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
        raise TrainingError(f"{path} cannot be written: {first_line(cause)}") from None
    finally:
        temporary.unlink(missing_ok=True)


def hold(run_dir: Path, new: bool = False):
    """Hold a run directory for this process, a new one after making it; UserError if it is in use, or new and holds a run."""
    try:
        if new:
            run_dir.mkdir(parents=True, exist_ok=True)
            if any(path.suffix in (".pt", ".csv") for path in run_dir.iterdir()):
                raise UserError(f"{run_dir} exists already; go on with --resume {run_dir}, or choose another run_name.")
        return filelock.FileLock(run_dir / ".lock", timeout=0).acquire()
    except filelock.Timeout:
        raise UserError(f"{run_dir} is in use by another process.") from None
    except OSError as error:
        raise UserError(f"{run_dir} cannot be written: {error.strerror}.") from None


def keep_script(run_dir: Path, args: dict, device: torch.device, scripts: list[str]) -> list[str]:
    """Keep this file in the run directory and write config.json; returns the SHA-256 of all that have trained this run."""
    source, kept = Path(__file__).read_bytes(), run_dir / f"{SCRIPT}.py"
    digest = hashlib.sha256(source).hexdigest()
    if not kept.exists():
        write_whole(kept, lambda file: file.write(source))
    if scripts and digest not in scripts:
        tell(f"{SCRIPT}.py has changed since it began this run, as {kept}")
    scripts = [*scripts, *{digest}.difference(scripts)]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else None
    cpu = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    config = {
        "script": SCRIPT, "script_sha256": "+".join(scripts), "args": args, "git_commit": commit or None,
        "versions": {"python": platform.python_version(), **{m.__name__: m.__version__ for m in (torch, gym, mujoco, np)}},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
    }  # fmt: skip
    write_whole(run_dir / "config.json", lambda file: file.write(json.dumps(config, indent=2).encode()))
    return scripts


def drop_rows(path: Path, last: int) -> None:
    """Take from a CSV file the rows after step `last`, which will come again; UserError for a file that cannot be read."""
    try:
        with open(path, newline="") as file:  # line ends stay as they are
            header, *lines = file.readlines() or [""]
        if lines and lines[-1].count(",") < header.count(",") and not lines[-1].startswith("#"):
            lines.pop()  # cut off by a kill
        rows = [line for line in lines if line.startswith("#") or not line.strip() or int(line.split(",")[0]) <= last]
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        raise UserError(f"{path} cannot be read as the rows of a run; mend it, or move it away.") from None
    text = "".join([header, *rows]) if header.endswith(("\n", "\r")) else ""  # of a header that a kill has cut nothing
    write_whole(path, lambda file: file.write((text if text[-1:] in ("\n", "\r", "") else f"{text}\n").encode()))


def load_file(path: Path) -> dict:
    """A checkpoint or policy file, on the CPU, with `args` as Args; says which arguments a fork has gained since.

    UserError if it is missing, damaged, or another script's. Only tensors and plain Python are accepted (weights_only), so a
    stranger's file cannot run code.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        script, saved, known = content["script"], content["args"], {field.name for field in dataclasses.fields(Args)}
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist; give the directory of a run.") from None
    except Exception:
        raise UserError(f"{path} is damaged or not a file of {SCRIPT}.py.") from None
    if script != SCRIPT:
        raise UserError(f"{path} was written by {script}.py; use that script instead of {SCRIPT}.py.")
    if content.get("format") != FORMAT:
        raise UserError(f"{path} was written by an older version of {SCRIPT}.py, whose runs this one cannot read.")
    if saved.keys() - known:
        raise UserError(f"{path} has arguments that this {SCRIPT}.py does not have: {', '.join(sorted(saved.keys() - known))}.")
    if known - saved.keys():
        tell(f"{path} was written without {', '.join(sorted(known - saved.keys()))}: the defaults are taken")
    return {**content, "args": Args(**saved)}


def restore(saved: dict, run_dir: Path, learner: Learner) -> None:
    """Take over a checkpoint; UserError if a run cannot go on exactly from it here."""
    same_device = saved["device"] == learner.device.type
    if not same_device and saved["state"]["step"] < learner.args.total_timesteps:
        raise UserError(f"{run_dir} was trained on {saved['device']}; it cannot go on exactly on {learner.device.type}.")
    try:
        learner.load_state_dict(saved["tensors"])
        learner.replay[: len(saved["replay"])].copy_(saved["replay"])
    except RuntimeError:
        shapes = f"the shapes that its arguments and {learner.args.env_id} give"
        raise UserError(f"{run_dir}/checkpoint.pt does not have {shapes}.") from None
    if same_device:
        learner.generator.set_state(saved["generator"])
    drop_rows(run_dir / "train.csv", saved["state"]["step"])
    drop_rows(run_dir / "eval.csv", min([saved["state"]["step"], *(inputs[0] - 1 for inputs in saved["pending"])]))


class Policy:
    """The trained family of a run, for deployment: action = policy(obs) or policy(obs, <condition>=...), deterministic.

    obs (O,) or (B, O) -> action (A,) or (B, A) within the environment's bounds. Without a condition (beta, or k) it plays the
    best one of its evaluation. Attributes: actor, the network; betas and best_beta, or ks and best_k. UserError for an
    observation of another shape or with non-finite numbers, and for a condition outside the trained range.
    """

    def __init__(self, path: str | Path):
        content = load_file(Path(path, "policy.pt") if Path(path).is_dir() else Path(path))
        if "evaluation" not in content:
            raise UserError(f"{path} holds no policy; give a run directory, a policy.pt or a best_policy.pt.")
        args, self.obs_dim, (self.low, self.high) = content["args"], content["obs_dim"], content["bounds"].numpy()
        self.range, self.best = condition_range(args), content["evaluation"][f"best_{CONDITION}"]
        self.actor = load_network(args, "actor", content["actor"], self.obs_dim, len(self.low))
        vars(self).update({f"{CONDITION}s": eval_conditions(args), f"best_{CONDITION}": self.best})

    def __call__(self, obs: np.ndarray, condition: float | None = None, **named: float) -> np.ndarray:
        value = named.pop(CONDITION, condition)
        obs, value = np.asarray(obs, np.float32), self.best if value is None else value
        if obs.ndim not in (1, 2) or obs.shape[-1] != self.obs_dim or not np.isfinite(obs).all():
            raise UserError(f"obs has shape {obs.shape}; it must be ({self.obs_dim},) or (B, {self.obs_dim}) and finite.")
        if named or not self.range[0] <= value <= self.range[1]:
            raise UserError(f"{named or value} was given; {CONDITION} must be from {self.range[0]} to {self.range[1]}.")
        action = self.low + (policy(self.actor, np.atleast_2d(obs), value)[0] + 1) * 0.5 * (self.high - self.low)
        return np.clip(action, self.low, self.high).reshape(*obs.shape[:-1], -1)


def load_policy(path: str | Path) -> Policy:
    """The policies of a run directory as last evaluated, or those of a policy.pt or best_policy.pt; needs no environment."""
    return Policy(path)


def start_tracking(args: Args, run_dir: Path):
    """A Weights & Biases run that a resumed run continues; offline when there is no key or no network."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb  # slow to import, and only needed here

    identity = run_dir / "wandb_id"
    if not identity.exists():
        write_whole(identity, lambda file: file.write(os.urandom(4).hex().encode()))
    settings = wandb.Settings(silent=True, console="off", init_timeout=20)
    start = functools.partial(
        wandb.init, project=args.wandb_project_name, entity=args.wandb_entity, config=dataclasses.asdict(args), resume="allow",
        name=run_dir.name, id=identity.read_text(), dir=str(run_dir), settings=settings)  # fmt: skip
    try:
        try:
            if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False, verify=False):
                raise wandb.errors.CommError("no API key")
            run = start()
        except wandb.errors.CommError as error:
            tell(f"Weights & Biases is offline ({first_line(error)}); upload later: wandb sync {run_dir}/wandb/offline-run-*")
            wandb.teardown()  # or else the failed start holds the run's id
            run = start(mode="offline")
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")  # evaluations come later than their step
        with tempfile.TemporaryDirectory() as folder:  # log_code would search all that lies below and beside the script
            run.log_code(Path(shutil.copy(__file__, folder)).parent)
    except Exception as error:  # a wrong project name, a service that does not start: not worth losing the run
        return tell(f"Weights & Biases does not start, and the run goes on without it: {first_line(error)}")
    if run.url:
        tell(f"Weights & Biases: {run.url}")
    return run


def record_episode(args: Args, actor: dict, condition: float, run_dir: Path, name: str) -> None:
    """One deterministic episode into run_dir/videos, rendered off screen; UserError if it cannot be."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    gym.logger.min_level = gym.logger.ERROR  # RecordVideo warns of a folder that exists
    try:
        env, folder = FlatEnv(args.env_id, render_mode="rgb_array"), str(run_dir / "videos")
        film = gym.wrappers.RecordVideo(env, folder, name_prefix=f"{name}-{CONDITION}-{condition:.4g}", disable_logger=True)
        play_returns([film], load_network(args, "actor", actor, env.obs_dim, env.action_dim), condition, seeds_for(args.seed, 0))
        film.close()
    except Exception as error:  # drivers, codecs and renderers fail in their own ways
        raise UserError(f"no video could be recorded: {first_line(error)}.") from None


# Command line -------------------------------------------------------------------------------------------------------------------
MAY_DIFFER = ("total_timesteps", "eval_workers", "max_pending_evaluations", "capture_video")  # on resuming


def resumed(asked: Args, saved: dict, unset: Args, may_differ=MAY_DIFFER) -> Args:
    """The arguments of a checkpoint with those of `may_differ` that were asked for; says what has no effect.

    unset: the values of arguments that were not given.
    """
    args, own = saved["args"], {"resume": asked.resume, "evaluate": asked.evaluate}
    names = vars(asked).keys() - own.keys()
    changed = {name for name in names if getattr(asked, name) not in (getattr(args, name), getattr(unset, name))}
    if changed - {*may_differ}:
        tell(f"not used, because the arguments that the run was saved with win: {', '.join(sorted(changed - {*may_differ}))}")
    if "total_timesteps" in changed and asked.total_timesteps < args.total_timesteps:
        raise UserError(f"total_timesteps is {asked.total_timesteps}; on resuming it may only grow, from {args.total_timesteps}.")
    return dataclasses.replace(args, **own, **{name: getattr(asked, name) for name in changed & {*may_differ}})


def evaluate_run(args: Args, checkpoint: dict) -> None:
    """Print condition -> return +- std of the policies of a run on fresh episodes, and write it into evaluate.csv.

    The policy that was best in training is marked: its return here is free of the maximum's upward bias.
    """
    run_dir, args, conditions = Path(args.evaluate), check_args(dataclasses.replace(args, cuda=None)), eval_conditions(args)
    step, best = checkpoint["state"]["step"], checkpoint["state"]["last"].get(f"best_{CONDITION}")
    tensors = checkpoint["tensors"]
    actor = {key.removeprefix("actor."): tensor.numpy() for key, tensor in tensors.items() if key.startswith("actor.")}
    FlatEnv(args.env_id).close()  # a missing environment is the user's to mend, not a worker's to die of
    with Evaluator(args, seeds_for(args.seed, 1, 0, args.eval_episodes)) as evaluator:
        returns = evaluator.map(functools.partial(evaluate_one, args, evaluator.seeds, actor), conditions)
    lines = [f"global_step,{CONDITION},return,return_std,best_in_training"]
    table = [f"{args.env_id}, step {step}, {args.eval_episodes} fresh episodes per {CONDITION}"]
    table += [f"{CONDITION:>10} {'return':>10} {'std':>9}"]
    for condition, r in zip(conditions, returns, strict=True):
        lines += [f"{step},{condition:.6g},{r.mean()},{r.std()},{int(condition == best)}"]
        table += [f"{condition:10.4f} {r.mean():10.1f} {r.std():9.1f}{'  <- best in training' if condition == best else ''}"]
    try:
        write_whole(run_dir / "evaluate.csv", lambda file: file.write("\n".join([*lines, ""]).encode()))
    except TrainingError as error:
        tell(str(error))
    say(*table)
    if args.capture_video:
        best = conditions[int(np.argmax([r.mean() for r in returns]))] if best is None else best
        record_episode(args, actor, best, run_dir, f"evaluate-step-{step}")
        say(f"recorded {CONDITION} {best:.4g} in {run_dir / 'videos'}")


def say(*lines: str) -> None:
    """Print results; where a `| head` has read enough, end well."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        os._exit(0)


def main() -> None:
    """The command line: errors of the user are one sentence and exit code 2, failures of training exit code 1."""
    args, stopped_by = tyro.cli(Args, description=__doc__), []
    try:
        if args.evaluate is not None and args.resume is not None:
            raise UserError("evaluate and resume were both given; choose one of them.")
        if args.evaluate is not None:  # read once more, from what the run was saved with
            saved = load_file(Path(args.evaluate, "checkpoint.pt"))
            asked = tyro.cli(Args, default=dataclasses.replace(saved["args"], evaluate=args.evaluate))
            may_differ = ("eval_episodes", "seed", "eval_workers", "capture_video")
            return evaluate_run(resumed(asked, saved, saved["args"], may_differ), saved)
        for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:
            if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(getattr(signal, name), lambda number, frame: stopped_by.append(number))
        summary = train(args, stopped_by)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    if not summary["completed"]:
        tell(f"stopped at step {summary['global_step']}; go on with: {command('resume', summary['run_dir'])}")
        sys.exit(128 + stopped_by[0])
    lines = [f"finished: {summary['run_dir']}, {summary['global_step']} steps"]
    for title, evaluation in (("last evaluation", summary["last"]), ("best evaluation", summary["best"])):
        best = f"{evaluation['best_return']:.1f} ± {evaluation['best_return_std']:.1f} at {CONDITION}"
        lines += [f"{title}: return {best} {evaluation[f'best_{CONDITION}']:.4g}, step {evaluation['step']}"]
    say(*lines, f"evaluate it on fresh episodes: {command('evaluate', summary['run_dir'])}")


if __name__ == "__main__":
    main()
