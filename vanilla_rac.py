# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[mujoco]==1.4.0", "mujoco==4.0.0", "numpy==2.4.6", "tyro==1.0.17", "wandb==0.31.0",
#     "tqdm==4.70.1", "moviepy==2.2.1"]
# ///
"""Vanilla Realistic Actor-Critic, in one file: SAC with uncertainty punished Q-learning (UPQ) at one constant beta.

"Balancing Value Underestimation and Overestimation with Realistic Actor-Critic" (Sicen Li, Gang Wang, Qinyun Tang, Liquan Wang,
2021), https://arxiv.org/abs/2110.09712.
The target comes from an ensemble of N critics (equation 6 of the paper):

    y = r + gamma (1 - terminated) (mean_i Q_i(s', a') - beta std_i Q_i(s', a') - alpha log pi(a'|s'))

Nothing is conditioned on beta, and there is one policy. With --target-rule in-target-min --min-size 2 it is REDQ (the README has
its whole command).

    python vanilla_rac.py --env-id Ant-v4 --utd 20

The method ends at the line "from here on the same in all four scripts".
"""

import atexit
import copy
import csv
import ctypes
import gc
import json
import math
import multiprocessing
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

if "torch" not in sys.modules:  # OpenMP reads this when torch loads it: threads that wait leave their cores to evaluation
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if __name__ == "__mp_main__":  # an evaluation worker
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import cloudpickle  # Gymnasium requires it
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.func import functional_call, grad, grad_and_value
from tqdm import tqdm


@dataclass
class Args:
    # Experiment
    exp_name: str = Path(__file__).stem  # the name of this experiment
    seed: int = 1  # networks, noise, environments and evaluation all follow from it
    torch_deterministic: bool = True  # use only PyTorch operations that give the same bits every time
    cuda: bool | None = None  # --cuda True or False: whether to train on the GPU; by default, when there is one
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"  # auto: the fastest that is exact float32 here
    compile: bool = True  # compile the update functions
    cudagraphs: bool = True  # on a GPU, capture all updates of an environment step in one CUDA graph
    track: bool = False  # log to Weights & Biases
    wandb_project_name: str = "realistic-actor-critic"  # the Weights & Biases project
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases project
    capture_video: bool = False  # record an episode of the best policy, at the end of training or with --evaluate

    # Run directory
    run_root: str = "runs"  # the folder in which run directories are made
    run_name: str | None = None  # the run directory's name; by default <env_id>__<exp_name>__<seed>__<time>
    checkpoint_seconds: float = 300.0  # seconds between two checkpoints
    resume: str | None = None  # a run directory to go on with
    evaluate: str | None = None  # a run directory or policy file to play on fresh episodes

    # Environment and replay
    env_id: str = "Hopper-v4"  # the id of the Gymnasium environment
    total_timesteps: int | None = None  # environment steps of the run; by default 1e6 for Humanoid, 3e5 for others
    learning_starts: int = 5000  # environment steps with uniformly random actions before learning starts
    buffer_size: int = 1_000_000  # replay capacity
    batch_size: int = 256  # the batch size sampled from the replay

    # Realistic Actor-Critic
    utd: int = 20  # update-to-data ratio G: critic updates per environment step
    num_critics: int = 10  # ensemble size N
    beta: float | None = None  # pessimism of upq; default: Humanoid, Ant and Hopper 0.2, Walker2d and others 0.3
    target_rule: Literal["upq", "in-target-min"] = "upq"  # mean - beta * std, or the minimum over a random subset (REDQ)
    min_size: float = 2.0  # subset size of in-target-min; 1.5 is 1 or 2 with equal probability, drawn for each update

    # Actor-critic
    gamma: float = 0.99  # the discount factor
    tau: float = 0.005  # Polyak weight of the online critics in the target critics
    network: Literal["mlp", "simba"] = "mlp"  # mlp: the paper's; simba: a residual block on normalised observations
    hidden_dim: int | None = None  # width of actor and critics; by default mlp 256, simba 128
    policy_lr: float = 3e-4  # the learning rate of the actor
    q_lr: float = 3e-4  # the learning rate of the critics after the warm-up
    q_lr_init: float | None = None  # the critics' learning rate at learning_starts; by default mlp 3e-5, simba q_lr: no warm-up
    q_lr_warmup_end: int = 10000  # environment step at which it has reached q_lr; equal to learning_starts: no warm-up
    weight_decay: float | None = None  # of actor and critics, as in AdamW; by default mlp 0, simba 0.01

    # Temperature
    autotune: bool = True  # learn the temperature; otherwise it is fixed at alpha
    alpha: float = 0.2  # the temperature when autotune is off
    alpha_lr: float = 3e-4  # the learning rate of the temperature
    initial_log_alpha: float = -3.0  # logarithm of the temperature that learning begins with
    target_entropy: float | None = None  # target entropy of the policy; by default minus the action dimension

    # Evaluation
    eval_frequency: int = 1000  # environment steps between evaluations
    eval_episodes: int = 10  # episodes per evaluation, from the same initial states in all of them
    eval_workers: int | None = None  # processes that evaluate beside training; default half the cores, up to 12; 0: none
    snapshot_frequency: int = 0  # environment steps between snapshots (benchmark/value_bias.py); 0: none


BETA = {"Humanoid": 0.2, "Ant": 0.2, "Hopper": 0.2}  # others 0.3


def fill_own_defaults(args: Args, env_name: str, action_dim: int) -> None:
    """Fill in this algorithm's defaults; env_name: without version."""
    by_network = {
        "mlp": {"hidden_dim": 256, "q_lr_init": 3e-5, "weight_decay": 0.0},
        "simba": {"hidden_dim": 128, "q_lr_init": args.q_lr, "weight_decay": 0.01},  # without warm-up
    }
    defaults = {
        "target_entropy": -float(action_dim),
        "beta": BETA.get(env_name, 0.3),
        **by_network[args.network],
    }
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def own_checks(args: Args) -> list[tuple]:
    """What must hold of this algorithm's arguments: (argument, does it, what the argument must be)."""
    return [
        ("tau", 0 < args.tau <= 1, "above 0 and at most 1"),
        ("weight_decay", 0 <= args.weight_decay < math.inf, "at least 0 and finite"),
        ("beta", 0 <= args.beta < math.inf, "at least 0 and finite"),
        ("min_size", 1 <= args.min_size <= args.num_critics, "at least 1 and at most num_critics"),
    ]


# The method: targets and losses -------------------------------------------------------------------------------------------------
# An environment step, in train(): Agent.explore(), env.step(), Learner.store(), Agent.observe(), Agent.draw(), Agent.learn().
# Shapes: N critics, B batch, O observation, A action, C condition, I = O + A + C; G critic updates, S = G*B samples for them.
# A row of the replay has R = 2*O + A + 2 numbers: obs, action, reward, terminated (0 or 1), next_obs.
def upq_target(q_next, beta, reward, terminated, gamma, entropy_bonus):
    """The target of uncertainty punished Q-learning (equation 6; equation 3's minus is a misprint).

    q_next (N, B): target critics at the next state and action; beta a number; reward, terminated (0 or 1), entropy_bonus (B,),
    with entropy_bonus = -alpha * log_prob of the next action. Returns y (B,). The standard deviation divides by N - 1
    (equation 8).
    """
    value = q_next.mean(0) - beta * q_next.std(0, correction=1) + entropy_bonus
    return reward + gamma * (1 - terminated) * value


def min_over_random_subset(q, size, keys):
    """The minimum over a uniformly random subset of distinct members, of each sample's own size: (N, B) -> (B,).

    q (N, B); size (B,) whole numbers from 1 to N; keys (N, B) uniform random numbers: the subset are the `size` members with the
    smallest keys. With size (1,) and keys (N, 1) all samples share one subset. Ranks come from comparing all pairs of keys (of
    equal keys the earlier member is smaller), so that every subset has exactly its size and no sample needs a loop.
    """
    members = torch.arange(len(q), device=q.device)
    # [i, j]: whether member j comes before member i in the order of the keys, and of equal keys in the ensemble's.
    earlier = (members[:, None] > members)[:, :, None]  # (N, N, 1)
    before = (keys < keys[:, None]) | ((keys == keys[:, None]) & earlier)  # (N, N, B)
    rank = before.sum(1)  # (N, B), from 0
    return torch.where(rank < size, q, torch.inf).amin(0)


def in_target_min(q_next, size, keys, reward, terminated, gamma, entropy_bonus):
    """The target of in-target minimisation (REDQ): q_next (N, B), size (1,), keys (N, 1), the rest (B,) -> y (B,)."""
    value = min_over_random_subset(q_next, size, keys) + entropy_bonus
    return reward + gamma * (1 - terminated) * value


def critic_loss(q, y):
    """Equation 2, summed over the members: q (N, B), y (B,) -> scalar."""
    return (q - y).square().mean(1).sum()


def actor_loss(q, alpha, log_prob):
    """Equation 30: q (N, B), alpha (1,), log_prob (B,) -> scalar. The actor sees the ensemble's mean."""
    return (alpha * log_prob - q.mean(0)).mean()


def temperature_loss(log_alpha, log_prob, target_entropy):
    """Equation 5: log_alpha (1,), log_prob (B,) -> scalar."""
    return (-log_alpha.exp() * (log_prob + target_entropy)).mean()


def squashed_gaussian(mean, log_std, noise):
    """Reparameterised sample of tanh(N(mean, std)) (equation 24) and its log-probability; all (B, A) -> (B, A), (B,).

    log(1 - tanh(u)^2) is computed as 2 (log 2 - u - softplus(-2u)), which is exact for large |u| too.
    """
    u = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)  # of u
    log_prob = log_prob - 2 * (math.log(2) - u - F.softplus(-2 * u))  # of tanh(u)
    return u.tanh(), log_prob.sum(1)


# The condition: nothing, a tensor (B, 0); there is one policy, labelled by its constant beta ------------------------------------
CONDITION = "beta"
CONDITION_DIM = 0


def empty_condition(rows):
    """No condition for each row of a tensor, on its device: (B, anything) -> (B, 0)."""
    return rows[:, :CONDITION_DIM]


def played_condition(beta, rows):
    """What the networks are conditioned on: (rows, 0)."""
    return torch.empty(rows, CONDITION_DIM)


def features(condition):
    """What the networks see of a condition: (B, 0) -> (B, 0)."""
    return condition


def eval_conditions(args: Args) -> list[float]:
    """The one policy's label."""
    return [args.beta]


# Networks -----------------------------------------------------------------------------------------------------------------------
class EnsembleLinear(nn.Module):
    """N independent linear layers as one batched product: weights (N, in, out), biases (N, 1, out).

    Each member has PyTorch's default weights for its own fan-in, U(+-1/sqrt(in)), and zero biases. A layer that is put between
    two of these sees (N, B, out); parameters of its own, as nn.LayerNorm has, would be shared by all members.
    """

    def __init__(self, num_members: int, in_features: int, out_features: int):
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(num_members, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_members, 1, out_features))

    def forward(self, x):
        """x (B, in), shared by all members, or (N, B, in), one input per member -> (N, B, out)."""
        x = x.expand(self.weight.shape[0], -1, -1)
        # The bias is added outside the product: the compiler fuses it with the ReLU after it into one pass.
        if self.weight.shape[2] == 1:
            # The product as a sum: fused with its neighbours it saves three kernels of a critic update on a GPU, and is no
            # slower on a CPU.
            return (x * self.weight.mT).sum(2, keepdim=True) + self.bias
        return torch.einsum("nbi,nio->nbo", x, self.weight) + self.bias


class RSNorm(nn.Module):
    """Running statistics normalisation: centres and scales the first O columns, the observation, by all that were observed."""

    def __init__(self, obs_dim: int):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(obs_dim, dtype=torch.float64))
        self.register_buffer("var", torch.zeros(obs_dim, dtype=torch.float64))  # of the population

    def observe(self, obs):
        """One more observation (O,), by Welford's formulas."""
        self.count += 1
        distance = obs - self.mean
        self.mean += distance / self.count
        self.var += (distance * (obs - self.mean) - self.var) / self.count

    def forward(self, x):
        """x (B, O + ...), the observation first -> the same shape."""
        obs, others = x.tensor_split([len(self.mean)], 1)
        mean, var = self.mean.to(x.dtype), self.var.to(x.dtype)
        obs = ((obs - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)
        return torch.cat([obs, others], 1)


class Residual(nn.Sequential):
    """x + layers(x)."""

    def forward(self, x):
        return x + super().forward(x)


def hidden_layers(args: Args, obs_dim: int, input_dim: int, linear) -> list[nn.Module]:
    """All layers but the last: (B, input_dim), the observation first -> hidden_dim features.

    linear(in, out) makes a linear layer, of one network or of the ensemble. mlp: the paper's two hidden layers. simba: SimBa's
    (https://arxiv.org/abs/2410.09754) normalised observations and residual block, whose norms have no scale and shift: a linear
    layer follows each one and can hold both.
    """
    width = args.hidden_dim
    if args.network == "mlp":
        return [linear(input_dim, width), nn.ReLU(), linear(width, width), nn.ReLU()]
    block = Residual(
        nn.LayerNorm(width, elementwise_affine=False),
        linear(width, 4 * width),
        nn.ReLU(),
        linear(4 * width, width),
    )
    return [RSNorm(obs_dim), linear(input_dim, width), block, nn.LayerNorm(width, elementwise_affine=False)]


def critic_inputs(obs, action, condition):
    """obs (B, O), action (B, A), condition (B, C) -> (B, O + A + C)."""
    return torch.cat([obs, action, features(condition)], 1)


class Critic(nn.Sequential):
    """An ensemble of N critics Q_i."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int):
        linear = partial(EnsembleLinear, args.num_critics)
        hidden = hidden_layers(args, obs_dim, obs_dim + action_dim + CONDITION_DIM, linear)
        super().__init__(*hidden, linear(args.hidden_dim, 1))

    def forward(self, inputs):
        """inputs (B, I) of critic_inputs() -> (N, B)."""
        return super().forward(inputs).squeeze(2)


class Actor(nn.Module):
    """The stochastic policy: a Gaussian that tanh squashes into [-1, 1]."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int):
        super().__init__()
        hidden = hidden_layers(args, obs_dim, obs_dim + CONDITION_DIM, nn.Linear)
        self.body = nn.Sequential(*hidden)
        self.mean = nn.Linear(args.hidden_dim, action_dim)
        self.log_std = nn.Linear(args.hidden_dim, action_dim)

    def forward(self, obs, condition):
        """obs (B, O), condition (B, C) -> mean (B, A), log_std (B, A) clamped to [-10, 2]."""
        x = self.body(torch.cat([obs, features(condition)], 1))
        return self.mean(x), self.log_std(x).clamp(-10, 2)


class Temperature(nn.Module):
    """log alpha: one learned scalar, or a constant."""

    def __init__(self, args: Args):
        super().__init__()
        if args.autotune:
            self.log_alpha = nn.Parameter(torch.tensor([float(args.initial_log_alpha)]))
        else:
            self.log_alpha = math.log(max(args.alpha, 1e-45))  # a constant; finite for an alpha of 0, too

    def forward(self, condition):
        """log alpha (1,); of the condition (B, 0) only the device matters."""
        return condition.new_zeros(1) + self.log_alpha


# One update of each network, in place; compiled ---------------------------------------------------------------------------------
class AdamState(nn.Module):
    """State of Adam, with torch.optim.Adam's defaults, for one network: both moments, and the number of updates done.

    By hand because, compiled into an update, it is one pass over the parameters; torch's own between compiled gradients took
    1.12 times as long a step. weight_decay is decoupled, as in torch.optim.AdamW.
    """

    def __init__(self, network: nn.Module, weight_decay: float = 0.0):
        super().__init__()
        self.weight_decay = weight_decay
        self.first = copy.deepcopy(network)
        self.second = copy.deepcopy(network)
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))  # not (): torch.compile loses changes of a 0-d tensor
        for parameter in self.parameters():
            parameter.data.zero_()


def adam_scales(count, lr, updates):
    """Count the next updates, in place in count (1,), and return what adam_step() needs for each: (updates, 4).

    Columns: step size, root of the second moment's bias correction, learning rate, number of the update. In float64, for in
    float32 1 - 0.999 has only four digits. With four columns every row begins at a multiple of 16 bytes: Inductor's GPU code
    copies inputs that do not.
    """
    number = count + torch.arange(1, updates + 1, device=count.device)  # of each update; the first one's is 1
    count.add_(updates)
    step_size = lr / (1 - 0.9**number)
    correction = (1 - 0.999**number).sqrt()
    same_lr = lr + 0 * number  # once for each update
    return torch.stack([step_size, correction, same_lr, number], 1).float()


def adam_step(network, grads, adam, scales):
    """One update in place; grads: by parameter name; scales: a row of adam_scales().

    parameter -= step_size * first / (sqrt(second) / correction + 1e-8) + lr * weight_decay * parameter, as in AdamW. Over
    lists of tensors: on a GPU it is one kernel then.
    """
    parameters = list(network.parameters())
    first = list(adam.first.parameters())
    second = list(adam.second.parameters())
    grads = list(grads.values())
    torch._foreach_lerp_(first, grads, 0.1)
    torch._foreach_mul_(second, 0.999)
    torch._foreach_addcmul_(second, grads, grads, 0.001)
    change = torch._foreach_mul(first, scales[0])
    denominator = torch._foreach_div(torch._foreach_sqrt(second), scales[1])
    denominator = torch._foreach_add(denominator, 1e-8)
    change = torch._foreach_div(change, denominator)
    if adam.weight_decay:
        decay = torch._foreach_mul(parameters, scales[2] * adam.weight_decay)
        change = torch._foreach_add(change, decay)
    torch._foreach_sub_(parameters, change)


class Drawn(NamedTuple):
    """All that is random in the updates of an environment step: S samples for the critics, then B for actor and temperature."""

    rows: torch.Tensor  # (S + B, R) of the replay
    noise: torch.Tensor  # (S + 2*B, A) standard normal, of the next actions, the actor's, the temperature's
    size: torch.Tensor  # (G, 1) of the subset of each minibatch, for in-target-min
    keys: torch.Tensor  # (G, N, 1) uniform in [0, 1), which tell the subsets


def sample(replay, stored, position):
    """Rows of the filled part of the replay: position (S + B,) uniform in [0, 1) -> (S + B, R).

    position is float64, for a uniform number in float32 has 24 bits, too few to index a million rows evenly.
    """
    filled = stored.clamp(max=len(replay))
    index = (position * filled).long()
    return replay[index]


class CriticBatch(NamedTuple):
    """What one critic update learns from, or with S in place of B all G of them."""

    inputs: torch.Tensor  # (B, I) of the critics
    next_inputs: torch.Tensor  # (B, I) of the target critics, with an action of the policy
    reward: torch.Tensor  # (B,)
    terminated: torch.Tensor  # (B,) 0 or 1
    entropy_bonus: torch.Tensor  # (B,) -alpha * log_prob of the next action


def make_critic_batch(actor, temperature, rows, noise) -> CriticBatch:
    """What all G critic updates learn from, in one pass: actor and temperature do not change meanwhile.

    rows (S, R), noise (S, A).
    """
    action_dim = noise.shape[1]
    obs_dim = (rows.shape[1] - action_dim - 2) // 2
    obs, action, reward, terminated, next_obs = rows.split([obs_dim, action_dim, 1, 1, obs_dim], 1)
    condition = empty_condition(rows)
    mean, log_std = actor(next_obs, condition)
    next_action, log_prob = squashed_gaussian(mean, log_std, noise)
    return CriticBatch(
        inputs=critic_inputs(obs, action, condition),
        next_inputs=critic_inputs(next_obs, next_action, condition),
        reward=reward[:, 0],
        terminated=terminated[:, 0],
        entropy_bonus=-temperature(condition).exp() * log_prob,
    )


def update_critics(critic, target_critic, adam, scales, batch, size, keys, target_rule, beta, gamma, tau):
    """One critic (target: equation 6, or REDQ's with size (1,), keys (N, 1)) and Polyak step; returns q (N, B), y (B,)."""
    q_next = target_critic(batch.next_inputs)  # (N, B)
    # Without gradient: grad() differentiates by the critics' parameters, of which y is no function.
    if target_rule == "upq":
        y = upq_target(q_next, beta, batch.reward, batch.terminated, gamma, batch.entropy_bonus)
    else:
        y = in_target_min(q_next, size, keys, batch.reward, batch.terminated, gamma, batch.entropy_bonus)

    def loss_function(parameters):
        q = functional_call(critic, parameters, (batch.inputs,))  # (N, B), of the critics with these parameters
        return critic_loss(q, y), q

    parameters = dict(critic.named_parameters())
    grads, q = grad(loss_function, has_aux=True)(parameters)
    adam_step(critic, grads, adam, scales)
    torch._foreach_lerp_(list(target_critic.parameters()), list(critic.parameters()), tau)
    return q, y


def update_actor(actor, critic, temperature, adam, scales, obs, noise) -> dict:
    """One actor step (equation 30): obs (B, O), noise (B, A) -> metrics."""
    condition = empty_condition(obs)
    alpha = temperature(condition).exp()

    def loss_function(parameters):
        mean, log_std = functional_call(actor, parameters, (obs, condition))
        action, log_prob = squashed_gaussian(mean, log_std, noise)
        q = critic(critic_inputs(obs, action, condition))  # (N, B)
        return actor_loss(q, alpha, log_prob), log_prob

    parameters = dict(actor.named_parameters())
    grads, (loss, log_prob) = grad_and_value(loss_function, has_aux=True)(parameters)
    adam_step(actor, grads, adam, scales)
    return {"actor_loss": loss, "alpha": alpha.mean(), "entropy": -log_prob.mean()}


def update_temperature(actor, temperature, adam, scales, obs, noise, target_entropy) -> dict:
    """One temperature step (equation 5), with fresh actions of the updated actor -> metrics."""
    condition = empty_condition(obs)
    mean, log_std = actor(obs, condition)
    _, log_prob = squashed_gaussian(mean, log_std, noise)

    def loss_function(parameters):
        log_alpha = functional_call(temperature, parameters, (condition,))
        return temperature_loss(log_alpha, log_prob, target_entropy)

    parameters = dict(temperature.named_parameters())
    grads, loss = grad_and_value(loss_function)(parameters)
    adam_step(temperature, grads, adam, scales)
    return {"alpha_loss": loss}


# Columns of train.csv, behind losses/
METRICS = ("qf_loss", "qf_values", "qf_std", "actor_loss", "alpha", "entropy", "alpha_loss")


def add_metrics(metrics, all_q, all_y, averages: dict) -> None:
    """Add the averages of an environment step to `metrics`, and 1 to its last entry, the number of steps.

    all_q: G of (N, B); all_y: G of (B,); averages: the others. Once for all G critic updates: on a GPU every sum is a kernel.
    """
    q = torch.stack(all_q)  # (G, N, B)
    loss = torch.vmap(critic_loss)(q, torch.stack(all_y)) / q.shape[1]  # (G,), per critic
    averages = {"qf_loss": loss.mean(), "qf_values": q.mean(), "qf_std": q.std(1).mean(), **averages}
    values = [averages[name] for name in METRICS]
    values.append(torch.ones_like(values[0]))
    metrics += torch.stack(values)


COMPILED = (sample, make_critic_batch, adam_scales, update_critics, update_actor, update_temperature, add_metrics)
COMPILER_OPTIONS = {  # of Inductor, by device
    # Without it loops are fused that share only their ranges, and one of them reads memory against its order.
    "cpu": {"cpp.max_horizontal_fusion_size": 1},
    # Without them kernels are chosen by timing: not the same bits twice.
    "cuda": {"shape_padding": False, "dynamic_scale_rblock": False},
}


# The algorithm ------------------------------------------------------------------------------------------------------------------
class Agent(nn.Module):
    """Networks, Adam's state, and what an environment step draws and learns.

    What changes over a run is a parameter or a buffer of it.
    """

    def __init__(self, args: Args, obs_dim: int, action_dim: int):
        super().__init__()
        self.args = args
        self.obs_dim = obs_dim
        self.action_dim = action_dim
        self.actor = Actor(args, obs_dim, action_dim)
        self.critic = Critic(args, obs_dim, action_dim)
        self.temperature = Temperature(args)
        self.target = copy.deepcopy(self.critic)
        self.obs_norm = None
        if args.network == "simba":  # the first layer of all networks, so that there is one set of statistics
            self.obs_norm = self.actor.body[0]
            self.critic[0] = self.obs_norm
            self.target[0] = self.obs_norm
        self.adam = nn.ModuleDict(
            {
                "critic": AdamState(self.critic, args.weight_decay),
                "actor": AdamState(self.actor, args.weight_decay),
                "temperature": AdamState(self.temperature),
            }
        )
        self.register_buffer("metrics", torch.zeros(len(METRICS) + 1))  # sums since they were last read, then of how many steps
        self.requires_grad_(False)  # gradients are taken by torch.func
        # As they stand above; with --compile Learner puts compiled ones in their place
        self.functions = SimpleNamespace(**{function.__name__: function for function in COMPILED})

    def observe(self, step, row, episodic_return, generator):
        """Called once an environment step, when it has been stored. A fork may use what is not used here.

        step counts from 1; row (R,) of the replay; episodic_return where the episode has ended, else None. Called
        outside compiled functions and CUDA graphs. What it changes are parameters and buffers of this module, in place.
        """
        if self.obs_norm:
            self.obs_norm.observe(row[: self.obs_dim])

    def explore(self, obs, generator):
        """A stochastic action in [-1, 1]: obs (1, O) -> (1, A)."""
        noise = torch.randn(1, self.action_dim, generator=generator, device=obs.device)
        mean, log_std = self.actor(obs, empty_condition(obs))
        action, _ = squashed_gaussian(mean, log_std, noise)
        return action

    def draw(self, replay, stored, generator) -> Drawn:
        """All that is random in the updates of an environment step; stored (), float64: transitions so far."""
        args = self.args
        options = {"generator": generator, "device": replay.device}
        samples = (args.utd + 1) * args.batch_size
        position = torch.rand(samples, dtype=torch.float64, **options)
        noise = torch.randn(samples + args.batch_size, self.action_dim, **options)
        # One random subset for each minibatch; a size of 1.5 is 1 or 2 with equal probability.
        one_more = torch.rand(args.utd, 1, **options) < args.min_size % 1
        size = math.floor(args.min_size) + one_more.float()
        keys = torch.rand(args.utd, args.num_critics, 1, **options)
        rows = self.functions.sample(replay, stored, position)
        # Padded, so that those of a minibatch begin at multiples of 16 bytes: Inductor's GPU code copies inputs that do not.
        size = F.pad(size, (0, 3))[:, :1]
        keys = F.pad(keys, (0, 3))[:, :, :1]
        return Drawn(rows, noise, size, keys)

    def learn(self, drawn: Drawn, q_lr) -> None:
        """G updates of the critics, one of the actor, one of the temperature; a function of the networks and of its arguments."""
        args = self.args
        adam = self.adam
        functions = self.functions
        sizes = [args.utd * args.batch_size, args.batch_size]
        critic_rows, actor_rows = drawn.rows.split(sizes)
        critic_noise, actor_noise, temperature_noise = drawn.noise.split([*sizes, args.batch_size])

        prepared = functions.make_critic_batch(self.actor, self.temperature, critic_rows, critic_noise)
        parts = [part.split(args.batch_size) for part in prepared]  # each part in G minibatches
        all_scales = functions.adam_scales(adam["critic"].count, q_lr, args.utd)
        all_q = []
        all_y = []
        for update, scales in enumerate(all_scales):
            batch = CriticBatch(*(part[update] for part in parts))
            q, y = functions.update_critics(
                self.critic,
                self.target,
                adam["critic"],
                scales,
                batch,
                drawn.size[update],
                drawn.keys[update],
                args.target_rule,
                args.beta,
                args.gamma,
                args.tau,
            )
            all_q.append(q)
            all_y.append(y)

        obs = actor_rows[:, : self.obs_dim]
        scales = functions.adam_scales(adam["actor"].count, args.policy_lr, 1)[0]
        averages = functions.update_actor(self.actor, self.critic, self.temperature, adam["actor"], scales, obs, actor_noise)
        if args.autotune:
            scales = functions.adam_scales(adam["temperature"].count, args.alpha_lr, 1)[0]
            averages |= functions.update_temperature(
                self.actor, self.temperature, adam["temperature"], scales, obs, temperature_noise, args.target_entropy
            )
        else:
            averages["alpha_loss"] = torch.zeros_like(averages["alpha"])
        functions.add_metrics(self.metrics, all_q, all_y, averages)

    def extra_columns(self, betas: list[float]) -> dict:
        """Columns of eval.csv beside the returns: alpha."""
        condition = played_condition(betas, len(betas)).to(self.metrics.device)
        alphas = self.temperature(condition).exp().tolist()
        return {f"eval/alpha_{beta:.6g}": alpha for beta, alpha in zip(betas, alphas, strict=True)}


@torch.inference_mode()
def deterministic_action(actor: Actor, obs, beta):
    """The action that is evaluated, tanh(mean): obs (B, O) -> (B, A) in [-1, 1]; beta changes nothing."""
    condition = played_condition(beta, len(obs))
    mean, _ = actor(torch.from_numpy(obs), condition)
    return mean.tanh().numpy()


# ------------------------------------------ from here on the same in all four scripts -------------------------------------------
SCRIPT = Path(__file__).stem


class UserError(Exception):
    """A mistake in the arguments or files given by the user: shown as one sentence."""

    exit_code = 2


class TrainingError(Exception):
    """Training cannot go on: shown as one sentence."""

    exit_code = 1


def absolute(path: str | Path) -> Path:
    """The full path, which holds wherever an environment moves the working directory later; ~ is the home folder."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def copied_state(network: nn.Module) -> dict:
    """A copy of its state_dict(), on the CPU."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in network.state_dict().items()}


class Learner:
    """An agent on its device: replay, noise, compiled functions, CUDA graphs.

    The replay is a float32 matrix with a row (obs, action, reward, terminated, next_obs) for each transition; `stored` () counts
    all that were ever stored. All noise comes from `generator`, outside the compiled functions: theirs would differ from eager
    ones. What changes over a run is a tensor, for a captured graph does not notice when a number of Python changes.
    """

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        self.args, self.device = args, device
        torch.manual_seed(args.seed)  # networks are made on the CPU: alike on every device
        self.agent = Agent(args, obs_dim, action_dim).to(device)
        try:
            self.replay = torch.empty(args.buffer_size, 2 * obs_dim + action_dim + 2, device=device)
        except RuntimeError:  # which is what allocators raise
            raise UserError(f"buffer_size is {args.buffer_size}; that many transitions do not fit on {device}.") from None
        self.stored = torch.zeros((), dtype=torch.float64, device=device)
        self.q_lr = torch.zeros((), device=device)
        # What act_once() reads and writes: always the same memory, which a captured graph has the addresses of
        self.host_obs = torch.empty(1, obs_dim, pin_memory=device.type == "cuda")
        self.obs = torch.zeros(1, obs_dim, device=device)
        self.action = torch.zeros(1, action_dim, device=device)
        noise_seed = np.random.SeedSequence(args.seed).generate_state(1, np.uint64)  # apart from that of the weights
        self.generator = torch.Generator(device).manual_seed(int(noise_seed[0]))
        # What a checkpoint holds: also torch's own, from which layers draw, such as nn.Dropout
        self.generators = [self.generator, torch.default_generator]
        if device.type == "cuda":
            self.generators += torch.cuda.default_generators
        # What act() and update() call: these functions, or CUDA graphs of them
        self.run_act, self.run_update = self.act_once, self.update_once
        if args.compile:
            options = COMPILER_OPTIONS[device.type]
            for function in COMPILED:
                compiled = torch.compile(function, fullgraph=True, dynamic=False, options=options)
                setattr(self.agent.functions, function.__name__, compiled)

    def store(self, step: int, obs, action, reward, terminated, next_obs) -> torch.Tensor:
        """Write the transition of environment step `step`, counted from 1, over the oldest one, and return its row of the replay;
        TrainingError if it is not finite."""
        row = np.concatenate((obs, action, (reward, terminated), next_obs), dtype=np.float32)
        if not np.isfinite(row).all():
            raise TrainingError(f"not finite in float32: the environment's reward, {reward}, or an observation")
        self.stored.fill_(step)
        place = self.replay[(step - 1) % len(self.replay)]
        place.copy_(torch.from_numpy(row))
        return place

    def random_action(self):
        """A uniformly random action in [-1, 1], (A,)."""
        return (torch.rand(self.action.shape[1], generator=self.generator, device=self.device) * 2 - 1).cpu().numpy()

    def act(self, obs):
        """The exploring policy's action for obs (O,), in [-1, 1], (A,); TrainingError where it is not finite."""
        self.host_obs.numpy()[0] = obs
        self.obs.copy_(self.host_obs, non_blocking=True)
        self.run_act()
        # Waits for the device and all updates before; a copy, for on a CPU the next action comes into the same memory
        action = self.action[0].cpu().numpy().copy()
        if not np.isfinite(action).all():
            self.check_finite()
            raise TrainingError(f"the policy's action is not finite for the observation {obs}")
        return action

    def update(self, step: int) -> None:
        """All updates of environment step `step`, with the critics' learning rate warmed up linearly (equation 23)."""
        args = self.args
        # Past q_lr_warmup_end np.interp gives q_lr, also where learning starts at that step or later
        self.q_lr.fill_(np.interp(step, (args.learning_starts, args.q_lr_warmup_end), (args.q_lr_init, args.q_lr)))
        self.run_update()

    @torch.no_grad()
    def act_once(self) -> None:
        """From self.obs to self.action, without waiting for the device: what the CUDA graph of acting holds."""
        self.action.copy_(self.agent.explore(self.obs, self.generator))

    @torch.no_grad()
    def update_once(self) -> None:
        """What the CUDA graph of an environment step's updates holds."""
        self.agent.learn(self.agent.draw(self.replay, self.stored, self.generator), self.q_lr)

    def warm_up(self) -> "Learner":
        """Act and update once, which compiles; on a GPU capture both as CUDA graphs. Nothing of it stays in agent or generators.

        Before anything is stored: what it learns from is a transition of zeros.
        """
        before = self.state()
        self.replay[0].zero_()
        self.stored.fill_(1)
        self.act_once()
        self.update_once()
        if self.args.cudagraphs and self.device.type == "cuda":
            # On a stream of its own: cuBLAS keeps a workspace for each stream and frees it with the first graph captured there.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # lets the libraries allocate what they must not allocate while capturing
                    self.act_once()
                    self.update_once()
                self.run_act = self.captured(self.act_once, stream)
                self.run_update = self.captured(self.update_once, stream)
            torch.cuda.current_stream().wait_stream(stream)
        self.load_state(before)
        self.stored.zero_()
        return self

    def captured(self, function, stream):
        """function() as a CUDA graph: what launches it."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        gc.collect()  # the graph of another learner must not be destroyed in the middle of a capture
        with torch.cuda.graph(graph, stream=stream):
            function()
        return graph.replay

    def state(self) -> dict:
        """All that training changes but the replay, copied to the CPU."""
        return {"agent": copied_state(self.agent), "generators": [generator.get_state() for generator in self.generators]}

    def load_state(self, saved: dict) -> None:
        """Put back what state() gave."""
        self.agent.load_state_dict(saved["agent"])  # in place: captured graphs keep their addresses
        for generator, state in zip(self.generators, saved["generators"], strict=False):  # other GPUs may come and go
            generator.set_state(state)

    def check_finite(self) -> None:
        """TrainingError where a loss since the last row of train.csv or a parameter is not finite; store() checks the replay."""
        sums = self.agent.metrics[:-1]  # the last entry is their number
        tensors = dict(zip(METRICS, sums, strict=True)) | self.agent.state_dict()
        bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if bad:
            raise TrainingError(f"not finite any more: {', '.join(bad[:5])}")

    def read_metrics(self) -> dict:
        """Averages over the updates since they were last read, None without any."""
        *sums, count = self.agent.metrics.tolist()
        self.agent.metrics.zero_()
        averages = [value / count if count else None for value in sums]
        return {f"losses/{name}": average for name, average in zip(METRICS, averages, strict=True)}


def make_learner(args: Args, env: "Env", device: torch.device) -> Learner:
    """A learner that is ready. Where capturing or compiling fails, a new one without CUDA graphs, then one that is eager, too.

    What fails without both is an exception of the algorithm itself; only then is nothing told.
    """
    failures = []
    learner = None
    while learner is None:
        try:
            learner = Learner(args, env.obs_dim, env.action_dim, device).warm_up()
        except Exception as error:  # keeps the learner that has failed, and its memory, until this block ends
            if args.cudagraphs and device.type == "cuda":
                flag, args = "cudagraphs", replace(args, cudagraphs=False)
            elif args.compile:
                flag, args = "compile", replace(args, compile=False)
            else:
                raise
            reason = reason_of(error)
            failures.append(f"updates with --{flag} do not work here, and the run goes on with --no-{flag}, slower: {reason}")
    for failure in failures:
        tell(failure)
    return learner


def reason_of(error: Exception) -> str:
    """In one line: how the text begins, and the place in this file that it names last, such as: line 100, in function."""
    # Of two errors the first: when something fails in a capture, its end fails, too, and says nothing of it
    text = str(error.__context__ or error)
    text = text.partition("Set TORCHDYNAMO_VERBOSE")[0].replace("^", "")
    text = " ".join(text.split())
    beginning, *places = text.split(f'"{__file__}", ')
    reason = beginning[:300]
    if places:
        reason += f" ... at {places[-1]}"
    return reason


TRAINING_ENDED = threading.Event()  # set in an evaluation worker only, see run_worker()


@contextmanager
def in_environment():
    """Around what an environment does: that it ends the program is an error, or else a scheduler would book the run as done.

    In an evaluation worker nothing is begun any more once training has ended, which is how it stops after the current step.
    """
    if TRAINING_ENDED.is_set():
        raise TrainingError("training has ended")
    try:
        yield
    except SystemExit as error:
        raise TrainingError(f"the environment ended the program, by sys.exit({error.code!r})") from error


def seed_globals(seed: int) -> None:
    """Python's and NumPy's own generators, from which some environments draw."""
    random.seed(seed)
    np.random.seed(seed)


class Env(gym.Wrapper):
    """An environment as this file sees it: observations (O,) float32, actions (A,) in [-1, 1]; UserError for another kind.

    spec: the environment's id, or its specification. seed: of Python's and NumPy's own generators while it is made; reset() has
    one, too.
    """

    @in_environment()
    def __init__(self, spec: str | gym.envs.registration.EnvSpec, seed: int = 0, **options):
        gym.logger.min_level = gym.logger.ERROR  # every -v4 announces -v5
        seed_globals(seed)
        made = None
        try:
            made = gym.make(spec, **options)
            super().__init__(made)
            self.obs_dim = gym.spaces.flatdim(made.observation_space)
            space = made.action_space
            if not isinstance(space, gym.spaces.Box) or space.dtype.kind != "f" or not space.is_bounded():
                raise ValueError(f"it has actions of type {space}; only a continuous, bounded Box is supported")
        except (gym.error.Error, ImportError, NotImplementedError, ValueError) as error:
            if made is not None:
                made.close()
            env_id = spec if isinstance(spec, str) else spec.id
            raise UserError(f"cannot use the environment {env_id!r}: {error}") from None
        self.low, self.high = space.low, space.high
        self.action_dim = space.low.size

    @in_environment()
    def reset(self, *, seed: int | None = None, **options):
        if seed is not None:
            seed_globals(seed)
        obs, info = self.env.reset(seed=seed, **options)
        return self.flattened(obs), info

    @in_environment()
    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(to_bounds(action, self.low, self.high))
        if terminated not in (0, 1):
            raise TrainingError(f"the environment returned terminated {terminated!r}; it must be True or False")
        if hasattr(reward, "item"):  # of NumPy or torch, and of the shape () or (1,), which float() alone refuses
            reward = reward.item()
        return self.flattened(obs), float(reward), bool(terminated), bool(truncated), info

    def flattened(self, obs) -> np.ndarray:
        """An observation as (O,) float32; a copy, for an environment may use its array again."""
        flat = gym.spaces.flatten(self.env.observation_space, obs).astype(np.float32)
        if flat.size != self.obs_dim:
            raise TrainingError(f"the environment returned an observation of {flat.size} numbers; its space has {self.obs_dim}")
        return flat


def to_bounds(action, low, high):
    """Actions (..., A) in [-1, 1] -> (..., *A), of the bounds' shape and type, and within them: rounding could leave them."""
    action = action.reshape((*action.shape[:-1], *low.shape))
    center, half = low / 2.0 + high / 2.0, high / 2.0 - low / 2.0
    return np.asarray(np.clip((center + half * action).astype(low.dtype), low, high))  # of the shape () it is a scalar before


EVALUATION, FRESH_EPISODES, TRAINING = 0, 1, 3  # the purposes of environment seeds; 2 is not in use


def first_seed(args: Args, purpose: int) -> int:
    """The first of consecutive environment seeds, below 2^31 as some simulators want them."""
    return int(np.random.SeedSequence([args.seed, purpose]).generate_state(1)[0] >> 2)


# Training -----------------------------------------------------------------------------------------------------------------------
@dataclass
class Progress:
    """Where a run stands, beside its learner."""

    step: int = 0  # environment steps done
    episode: int = 0  # episodes ended
    actions: list = field(default_factory=list)  # of the current episode, as lists: a resumed run repeats them
    episodic_return: float = 0.0  # of the current episode
    seconds: float = 0.0  # wall time of the run, over all of its processes
    last: dict = field(default_factory=dict)  # row of eval.csv
    best: dict = field(default_factory=dict)  # row of eval.csv


def train(args: Args, stopped_by: list | tuple = (), defaults: Args | None = None) -> dict:
    """Train to the end, or until `stopped_by` holds a signal; returns run_dir and where the run stands (Progress).

    With args.resume a run goes on with its own arguments, but for those of `args` that differ from `defaults`: Args(), or from
    the command line the run's own. Raises UserError, TrainingError, and what an environment raises; the last checkpoint stays.
    """
    with ExitStack() as stack:
        if args.resume:
            args = resumed(args, defaults or Args())
        run_root = absolute(args.run_root)  # before an environment can move the working directory
        env = stack.enter_context(Env(args.env_id, args.seed % 2**32))  # NumPy's seeds are below 2^32
        args = completed(args, env)
        device = set_up_torch(args)
        run_dir = Path(args.resume) if args.resume else new_run_dir(args, run_root, device)
        # A new run that fails before its first checkpoint leaves no directory; the log, which writes there, is closed before
        undo = stack.enter_context(ExitStack())
        if not args.resume:
            undo.callback(shutil.rmtree, run_dir, ignore_errors=True)
        log = stack.enter_context(closing(Log(args, run_dir)))  # before what takes long, for it may refuse
        evaluator = stack.enter_context(closing(Evaluator(args, env)))
        evaluator.start()  # its workers, while the learner compiles
        learner = make_learner(args, env, device)
        agent = learner.agent
        evaluator.ready()
        progress = load_checkpoint(run_dir, learner, evaluator) if args.resume else Progress()
        save_checkpoint(run_dir, learner, progress, evaluator)
        undo.pop_all()  # from now on the run directory stays, and one can go on from it
        stack.enter_context(telling_how_to_resume(run_dir))
        tell(f"run directory: {run_dir}")
        bar = stack.enter_context(progress_bar(args, progress))
        saved_at = time.monotonic()
        start = saved_at - progress.seconds  # as if the run had been one process
        logged_at = (progress.step, progress.seconds)  # of the last row of train.csv

        def collect(seconds: float = 0.0) -> None:
            """Log the evaluations that have ended, and keep their policies."""
            for row, actor_state in evaluator.finished(seconds):
                log.add("eval.csv", row)
                progress.last = row
                save_policy(run_dir / "policy.pt", args, env, row, actor=actor_state)
                score = row["eval/best_return"]
                best = progress.best.get("eval/best_return")
                if best is None or not (math.isnan(score) or score < best):  # any number is better than NaN; the later of equals
                    progress.best = row
                    save_policy(run_dir / "best_policy.pt", args, env, row, actor=actor_state)
                bar.set_postfix_str(f"return {score:.0f} at step {row['global_step']}", refresh=False)

        def next_episode():
            """Begin the next episode; its first observation."""
            progress.episode += 1
            progress.actions, progress.episodic_return = [], 0.0
            return env.reset(seed=first_seed(args, TRAINING) + progress.episode)[0]

        obs, _ = env.reset(seed=first_seed(args, TRAINING) + progress.episode)  # of the current one, where a run is resumed
        try:
            for action in progress.actions:  # of a run that is resumed
                obs, _, terminated, truncated, _ = env.step(np.array(action, np.float32))
                if terminated or truncated:
                    raise TrainingError("it ends earlier")
        except Exception as error:
            tell(f"an episode does not follow from its seed and actions; the run goes on with the next one: {error!r:.150}")
            obs = next_episode()

        while progress.step < args.total_timesteps and not stopped_by:
            # Act
            action = learner.act(obs) if progress.step >= args.learning_starts else learner.random_action()
            next_obs, reward, terminated, truncated, _ = env.step(action)

            # Store
            progress.step += 1
            transition = learner.store(progress.step, obs, action, reward, terminated, next_obs)
            progress.actions.append(action.tolist())
            progress.episodic_return += reward
            episode_over = terminated or truncated
            agent.observe(progress.step, transition, progress.episodic_return if episode_over else None, learner.generator)

            # Learn
            if progress.step > args.learning_starts:
                learner.update(progress.step)

            # Once in a while
            progress.seconds = time.monotonic() - start
            learned = progress.step - args.learning_starts  # environment steps with updates
            is_last = progress.step == args.total_timesteps
            if learned == 0:
                bar.initial = progress.step  # random steps say nothing of the time that is left
                bar.start_t = bar.last_print_t = time.time()
            bar.update()
            if is_last or (learned >= 0 and learned % args.eval_frequency == 0):
                evaluator.submit(row_before_evaluation(args, agent, progress), copied_state(agent.actor))
            if args.snapshot_frequency and learned >= 0 and learned % args.snapshot_frequency == 0:
                path = run_dir / "snapshots" / f"step-{progress.step}.pt"
                row = row_before_evaluation(args, agent, progress)
                save_policy(path, args, env, row, actor=copied_state(agent.actor), critic=copied_state(agent.critic))
            if is_last or episode_over or progress.step % 1000 == 0:
                log.add("train.csv", training_row(learner, progress, logged_at, episode_over))
                logged_at = (progress.step, progress.seconds)
                collect()
            obs = next_episode() if episode_over else next_obs  # before a checkpoint, which an episode that is over is not for
            if time.monotonic() - saved_at >= args.checkpoint_seconds:
                save_checkpoint(run_dir, learner, progress, evaluator)
                saved_at = time.monotonic()

        save_checkpoint(run_dir, learner, progress, evaluator)  # before waiting for what pends, which may take minutes
        while evaluator.pending and not stopped_by:
            bar.set_description_str("the last evaluations")
            collect(seconds=1.0)
        if not stopped_by:
            save_checkpoint(run_dir, learner, progress, evaluator)  # with what has come
        if args.capture_video and progress.best and not stopped_by:
            record_episode(args, load_policy(run_dir / "best_policy.pt"), run_dir, log)
    return {"run_dir": str(run_dir), **vars(progress)}


def training_row(learner: Learner, progress: Progress, logged_at: tuple[int, float], episode_over: bool) -> dict:
    """A row of train.csv: averages since the last one, of that step and second, and the episode, if it has ended."""
    last_step, last_seconds = logged_at
    steps, seconds = progress.step - last_step, progress.seconds - last_seconds
    return {
        "global_step": progress.step,
        "charts/wall_seconds": round(progress.seconds, 1),
        "charts/SPS": round(steps / max(seconds, 1e-9), 2),
        **learner.read_metrics(),
        "charts/episodic_return": progress.episodic_return if episode_over else None,
        "charts/episodic_length": len(progress.actions) if episode_over else None,
    }


# Evaluation, in worker processes ------------------------------------------------------------------------------------------------
def play(envs: list[Env], actor: nn.Module, condition: float, seed: int) -> np.ndarray:
    """Undiscounted returns (E,) of one deterministic episode in each environment, all in step, from seed, seed + 1, ..."""
    returns = np.zeros(len(envs))
    obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])
    running = set(range(len(envs)))
    while running:
        actions = deterministic_action(actor, obs, condition)  # of all: another batch size would change the last bits
        for i in list(running):
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += reward
            if terminated or truncated:
                running.remove(i)
    return returns


@contextmanager
def alike_in_every_process():
    """Inside, one thread and full precision; afterwards training's settings and everybody's random numbers are put back."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


class Player(ExitStack):
    """Plays policies in environments that it makes once; as an ExitStack it closes all of them, also where closing one fails.

    spec: what they are made of, an id or a specification.
    """

    def __init__(self, args: Args, spec: str | gym.envs.registration.EnvSpec):
        super().__init__()
        self.args, self.spec = args, spec
        self.envs: list[Env] = []

    def make_envs(self) -> None:
        """Those that are missing."""
        seed = first_seed(self.args, EVALUATION)
        for i in range(len(self.envs), self.args.eval_episodes):
            env = Env(self.spec, seed + i)
            self.envs.append(self.enter_context(env))

    @alike_in_every_process()
    def play(self, actor_state: dict, condition: float, purpose: int = EVALUATION) -> np.ndarray:
        """Returns (E,) of an actor with this state_dict() under a condition."""
        self.make_envs()
        actor = Actor(self.args, self.envs[0].obs_dim, self.envs[0].action_dim).eval()
        actor.load_state_dict(actor_state)
        return play(self.envs, actor, condition, first_seed(self.args, purpose))


def run_worker(lifeline, connection, args: Args, pickled_spec: bytes) -> None:
    """A worker: answers requests, arguments of Player.play() or none, with returns or an exception.

    When `lifeline` has something, or training is gone, it stops after the current step and closes its environments, for which it
    has three seconds.
    """
    on_stop_signals(lambda number: None)  # leaves them to training
    # Registered first, so called last, after what environments register; taking torch down takes long on a busy machine
    atexit.register(os._exit, 0)
    if hasattr(os, "nice"):
        os.nice(10)  # it yields to training

    def end_with_training() -> None:
        parent = multiprocessing.parent_process().pid
        told = False
        while not told and os.getppid() == parent:  # its death alone may not show: an environment's fork may hold the pipe open
            told = lifeline.poll(1)
        TRAINING_ENDED.set()
        time.sleep(3)
        os._exit(1)

    threading.Thread(target=end_with_training, daemon=True).start()
    where = "in an evaluation worker, which --eval-workers 0 does without"
    with Player(args, cloudpickle.loads(pickled_spec)) as player:
        while not TRAINING_ENDED.is_set():
            try:
                if not connection.poll(0.1):
                    continue
                request = connection.recv()
            except (EOFError, OSError):  # training is gone
                break
            try:
                if request:
                    answer = player.play(*request)
                else:
                    answer = player.make_envs()
            except UserError as error:
                answer = UserError(f"{where}: {error}")
            except TrainingError as error:
                answer = error
            except BaseException:  # as text, for it need not unpickle
                answer = RuntimeError(f"{where}:\n{traceback.format_exc()}")
            with suppress(OSError):  # training may have died
                connection.send(answer)


class Evaluator:
    """Plays the policies of a family in processes beside training, or in this one; hands rows back in their order.

    For each worker there is a thread in this process, which sends it requests and waits for its answers.
    """

    def __init__(self, args: Args, env: Env):
        self.args = args
        self.num_workers = args.eval_workers
        if self.num_workers is None:
            self.num_workers = max(1, min(torch.get_num_threads() // 2, 12))
        self.pending: list[tuple] = []  # what a row begins with, the actor's state, condition -> Future of its returns
        self.player = Player(args, args.env_id)  # plays where there are no workers
        try:  # as it is registered: the environment may have changed its own keyword arguments
            self.pickled_spec = cloudpickle.dumps(gym.spec(env.spec.id))  # brings its class, where that is the program's own
        except Exception:
            self.pickled_spec = cloudpickle.dumps(args.env_id)
        self.spawn = multiprocessing.get_context("spawn")
        self.processes = []
        self.idle = []  # workers without a request: process, connection
        self.ending = False
        self.lifeline, self.end_of_lifeline = self.spawn.Pipe(duplex=False)  # workers hold the first; what is sent ends them
        self.threads = ThreadPoolExecutor(max(1, self.num_workers))

    def start(self) -> None:
        """Start the workers, which make their environments; apart from __init__, so that close() ends those that have started."""
        self.idle += [self.start_worker() for _ in range(self.num_workers)]
        self.starting = [self.threads.submit(self.ask) for _ in range(self.num_workers)]

    def start_worker(self) -> tuple:
        """Start a worker; its process, and the connection to it."""
        connection, its_end = self.spawn.Pipe()
        process = self.spawn.Process(target=run_worker, args=(self.lifeline, its_end, self.args, self.pickled_spec))
        process.start()
        its_end.close()  # or else its death would go unnoticed
        self.processes.append(process)
        return process, connection

    def ready(self) -> None:
        """Wait until all workers have made their environments; raises what that has raised."""
        for future in self.starting:
            future.result()

    def ask(self, *request):
        """What a worker answers; one that dies is replaced, and the new one is asked; the third death ends all workers."""
        process, connection = self.idle.pop()
        deaths = 0
        while not self.ending:
            try:
                answer = answer_of(process, connection, request)
            except (EOFError, OSError):
                deaths += 1
                if deaths == 3:
                    self.end_workers()
                elif not self.ending:
                    process, connection = self.start_worker()
                continue
            if not self.ending:
                self.idle.append((process, connection))
                if isinstance(answer, Exception):
                    raise answer
                return answer
        # Also after the third death of another one; where training stops nobody reads this
        guard = 'a program that calls train() needs `if __name__ == "__main__":` before it'
        kind = TrainingError if request else UserError  # without a request the run has not begun
        raise kind(f"evaluation workers die again and again; {guard}, and --eval-workers 0 does without workers")

    def submit(self, row: dict, actor_state: dict) -> None:
        """Have an actor with this state evaluated; row: what the evaluation's row begins with."""
        futures = {}
        for condition in eval_conditions(self.args):
            if self.num_workers:
                futures[condition] = self.threads.submit(self.ask, actor_state, condition)
            else:
                futures[condition] = Future()
                futures[condition].set_result(self.player.play(actor_state, condition))
        self.pending.append((row, actor_state, futures))

    def finished(self, seconds: float):
        """Whole rows and the actors' states, the oldest first; waits up to `seconds` for each."""
        while self.pending:
            row, actor_state, futures = self.pending[0]
            if wait(futures.values(), seconds).not_done:
                return
            returns = {condition: future.result() for condition, future in futures.items()}
            del self.pending[0]
            yield row | row_of_returns(returns), actor_state

    def end_workers(self) -> None:
        self.ending = True
        self.end_of_lifeline.send(None)  # no worker takes it out, so that each one sees it

    def close(self) -> None:
        self.end_workers()
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.join()
        self.end_of_lifeline.close()
        self.player.close()


def answer_of(process, connection, request: tuple):
    """What a worker answers to a request; EOFError or OSError where it dies.

    It is asked whether it lives, for what an environment has forked may hold its end of the connection open.
    """
    if not process.is_alive():
        raise EOFError
    connection.send_bytes(cloudpickle.dumps(request))  # send() would put tensors into shared memory
    while not connection.poll(1):
        if not process.is_alive():
            raise EOFError
    return connection.recv()


def row_before_evaluation(args: Args, agent: Agent, progress: Progress) -> dict:
    """A row of eval.csv as far as it is known before the evaluation has been played; also what a snapshot says of itself."""
    seconds = round(progress.seconds, 1)
    return {"global_step": progress.step, "charts/wall_seconds": seconds, **agent.extra_columns(eval_conditions(args))}


def row_of_returns(returns: dict) -> dict:
    """The part of a row of eval.csv that has been played: condition -> returns (E,)."""
    means = {condition: float(values.mean()) for condition, values in returns.items()}
    numbers = {condition: mean for condition, mean in means.items() if not math.isnan(mean)}
    best = max(numbers or means, key=means.get)  # NaN is the best only where there is nothing else
    row = {"eval/best_return": means[best], "eval/best_return_std": float(returns[best].std()), f"eval/best_{CONDITION}": best}
    return row | {f"eval/return_{condition:.6g}": mean for condition, mean in means.items()}


# Run directory ------------------------------------------------------------------------------------------------------------------
def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers of a run; MuJoCo's only where it is used."""
    return {name: sys.modules[name].__version__ for name in ("torch", "gymnasium", "mujoco", "numpy") if name in sys.modules}


def tell_other_versions(run_dir: Path) -> None:
    """Where a run goes on with others than it began with."""
    config = run_dir / "config.json"
    if not config.exists():
        return
    before = json.loads(config.read_text())
    changed = []
    for name, version in versions().items():
        if before.get(name, version) != version:
            changed.append(f"{name} {before[name]}, now {version}")
    if changed:
        tell(f"the run goes on with other versions, which may change its numbers: {'; '.join(changed)}")


def new_run_dir(args: Args, run_root: Path, device: torch.device) -> Path:
    """Make a run directory, with this script and what it runs with; UserError where that is not possible."""
    if args.run_name:
        run_dir = run_root / args.run_name
    else:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        run_dir = run_root / name.replace("/", "_").replace(":", "_")
        while run_dir.exists():
            run_dir = run_dir.with_name(f"{run_dir.name}_")  # the other was started in the same second
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"no run directory can be made: {error}") from None
    shutil.copy(__file__, run_dir)
    commit = None
    with suppress(OSError):  # no git here
        git = "git describe --always --dirty --abbrev=40 --exclude=*".split()
        commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    config = {
        "script": SCRIPT,
        "args": vars(args),
        "git_commit": commit,
        **versions(),
        "device": str(device),
        "wandb_id": os.urandom(8).hex(),  # for names need not be unique
    }
    (run_dir / "config.json").write_text(json.dumps(config, indent=2))
    return run_dir


@contextmanager
def telling_how_to_resume(run_dir: Path):
    """Say how to go on after an exception, an environment's for example, or Ctrl-C in a program that calls train()."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        tell(f"the last checkpoint stays; go on from it with: --resume {shlex.quote(str(run_dir))}")
        raise


@contextmanager
def open_whole(path: Path):
    """A file to write bytes into; at every moment `path` is the old one or the new one, whole. TrainingError where that fails."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or else a loss of power could leave the new name without its content
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises a RuntimeError on a full disk
        with suppress(OSError):
            temporary.unlink()
        raise TrainingError(f"{path} cannot be written: {error}") from None


def save(path: Path, content: dict) -> None:
    """Write a file that load() can read."""
    with open_whole(path) as file:
        torch.save({"script": SCRIPT, **content}, file)


def load(path: Path, part: str, **options) -> dict:
    """A file of this script that has this part; only tensors and plain Python are accepted: a stranger's file runs no code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, **options)
        script = content["script"]
        if part not in content:
            raise KeyError(part)
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error!r:.150}") from None
    if script != SCRIPT:
        raise UserError(f"{path} was written by {script}.py; use that script.")
    return content


def save_checkpoint(run_dir: Path, learner: Learner, progress: Progress, evaluator: Evaluator) -> None:
    """All that a run goes on from; TrainingError rather than numbers that are not finite."""
    learner.check_finite()
    content = {
        "args": vars(evaluator.args),  # as asked for; the learner's may be without compile or cudagraphs
        "device": learner.device.type,
        "threads": torch.get_num_threads(),
        "progress": vars(progress),
        "pending": [(row, actor_state) for row, actor_state, _ in evaluator.pending],
        "learner": learner.state(),
        # torch.save writes whole storages; by way of NumPy there is one of these rows alone, on a CPU without a copy
        "replay": torch.from_numpy(learner.replay[: progress.step].cpu().numpy()),
    }
    save(run_dir / "checkpoint.pt", content)


def open_checkpoint(run_dir: Path) -> dict:
    """What save_checkpoint() has written; tensors stay in the file until they are used."""
    return load(run_dir / "checkpoint.pt", "replay", mmap=True)


def load_checkpoint(run_dir: Path, learner: Learner, evaluator: Evaluator) -> Progress:
    """Put back what a checkpoint holds, and return its progress; rows of CSV files after it will come again and are dropped."""
    saved = open_checkpoint(run_dir)
    tell_other_versions(run_dir)
    learner.load_state(saved["learner"])
    progress = Progress(**saved["progress"])
    learner.replay[: progress.step] = saved["replay"]
    learner.stored.fill_(progress.step)
    for row, actor_state in saved["pending"]:
        evaluator.submit(row, copy.deepcopy(actor_state))  # saved's tensors are the memory of a file that will be replaced
    drop_rows(run_dir / "train.csv", progress.step)
    drop_rows(run_dir / "eval.csv", progress.last.get("global_step", 0))
    return progress


def drop_rows(path: Path, last_step: int) -> None:
    """Keep the header and the whole rows of a CSV file up to a step."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        kept = lines[:1]
        for line in lines[1:]:
            if line.endswith("\n") and int(line.split(",")[0]) <= last_step:
                kept.append(line)
        with open_whole(path) as file:
            file.write("".join(kept).encode())


def save_policy(path: Path, args: Args, env: Env, row: dict, **networks: dict) -> None:
    """What load_policy() reads: the state of networks, what they are made from, and a row of eval.csv; or a snapshot."""
    bounds = [torch.from_numpy(env.low), torch.from_numpy(env.high)]
    save(path, {"args": vars(args), "obs_dim": env.obs_dim, "bounds": bounds, "evaluation": row, **networks})


class Policy:
    """The trained family of a run: action = policy(obs) or policy(obs, beta=0.1), deterministic.

    obs (O,) or (B, O) -> action within the bounds of the environment, (*A,) or (B, *A). The condition (beta above 0, or k): a
    number, or one for each row; without it `best`, that of the best return. More attributes: actor, args, step.
    """

    def __init__(self, path: str | Path):
        path = absolute(path)
        saved = load(path / "policy.pt" if path.is_dir() else path, "evaluation")
        self.args = Args(**saved["args"])
        self.obs_dim = saved["obs_dim"]
        self.low, self.high = (bound.numpy() for bound in saved["bounds"])
        self.actor = Actor(self.args, self.obs_dim, self.low.size).eval()
        self.actor.load_state_dict(saved["actor"])
        self.step = saved["evaluation"]["global_step"]
        self.best = saved["evaluation"].get(f"eval/best_{CONDITION}")  # None in a snapshot

    def __call__(self, obs: np.ndarray, **condition) -> np.ndarray:
        wanted = f"obs must be an observation of the shape ({self.obs_dim},), or a batch (B, {self.obs_dim})"
        try:
            obs = np.array(obs, np.float32)
        except (TypeError, ValueError):
            if hasattr(obs, "shape"):  # a tensor on a GPU, for example: torch says what to do
                raise
            raise ValueError(wanted) from None  # a tuple (obs, info), for example
        if obs.ndim not in (1, 2) or obs.shape[-1] != self.obs_dim:
            raise ValueError(wanted)
        condition = {CONDITION: self.best} | condition  # a name that deterministic_action() does not know is a TypeError
        action = deterministic_action(self.actor, np.atleast_2d(obs), **condition)
        return to_bounds(action.reshape(*obs.shape[:-1], self.low.size), self.low, self.high)


load_policy = Policy  # of a run directory (as last evaluated), a policy.pt or a best_policy.pt; needs no environment


class Log:
    """The rows of a run: appended to CSV files and, with --track, sent to Weights & Biases; UserError if it refuses a new run."""

    def __init__(self, args: Args, run_dir: Path):
        self.run_dir = run_dir
        self.wandb = None
        if args.track:
            import wandb  # slow to import

            config = json.loads((run_dir / "config.json").read_text())
            try:
                self.wandb = wandb.init(
                    project=args.wandb_project_name,
                    entity=args.wandb_entity,
                    name=run_dir.name,
                    id=config.get("wandb_id", run_dir.name),
                    resume="allow",
                    dir=run_dir,
                    config=vars(args),
                    save_code=True,
                )
                self.wandb.define_metric("*", step_metric="global_step")  # evaluations come later than their step
            except Exception as error:
                refused = f"Weights & Biases cannot track this run: {error!r:.300}"
                if not args.resume:
                    raise UserError(refused) from None
                tell(refused)  # an outage must not end a run that has begun

    def add(self, name: str, row: dict) -> None:
        """A row to the file of this name; the first one has the columns."""
        with open(self.run_dir / name, "a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        self.send("log", {key: value for key, value in row.items() if value is not None})

    def send(self, method: str, *values) -> None:
        """Call a method of the Weights & Biases run; that it fails is told once, and this run goes on."""
        if self.wandb:
            try:
                getattr(self.wandb, method)(*values)
            except Exception as error:
                self.wandb = None
                with suppress(Exception, SystemExit):  # or else it fails again when the process ends
                    import wandb

                    wandb.teardown()
                tell(f"Weights & Biases fails, and the run goes on without it; the CSV files have all rows: {error!r:.150}")

    def close(self) -> None:
        self.send("finish")


def record_episode(args: Args, policy: Policy, folder: Path, log: Log | None = None) -> None:
    """One episode of the best policy into folder/videos, and to where the run is tracked; rendered off screen."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        name = f"step-{policy.step}"
        with Env(args.env_id, render_mode="rgb_array") as env:
            film = gym.wrappers.RecordVideo(env, str(folder / "videos"), name_prefix=name, disable_logger=True)
            play([film], policy.actor, policy.best, first_seed(args, FRESH_EPISODES))
            film.stop_recording()
        if log and log.wandb:
            import wandb

            video = wandb.Video(str(folder / "videos" / f"{name}-episode-0.mp4"))
            log.send("log", {"global_step": policy.step, "videos": video})
    except Exception as error:  # drivers, codecs and renderers fail in their own ways
        tell(f"no video could be recorded: {error!r}")


# Set-up -------------------------------------------------------------------------------------------------------------------------
AT_LEAST = {
    "total_timesteps": 1,
    "buffer_size": 1,
    "batch_size": 1,
    "utd": 1,
    "num_critics": 2,
    "hidden_dim": 1,
    "eval_frequency": 1,
    "eval_episodes": 1,
    "seed": 0,
    "learning_starts": 0,
    "snapshot_frequency": 0,
    "eval_workers": 0,
}


def completed(args: Args, env: Env) -> Args:
    """A copy with the defaults that depend on the environment; UserError for values that make no sense."""
    args = Args(**json.loads(json.dumps(vars(args))))  # plain Python: load() would refuse a float of NumPy's
    env_name = env.spec.name  # without namespace and version
    if args.total_timesteps is None:
        args.total_timesteps = 1_000_000 if env_name == "Humanoid" else 300_000
    fill_own_defaults(args, env_name, env.action_dim)
    checks = []
    for name, least in AT_LEAST.items():
        value = getattr(args, name)
        if value is None:  # eval_workers, by default
            value = 0
        checks.append((name, value >= least, f"at least {least}"))
    checks.append(("gamma", 0 < args.gamma <= 1, "above 0 and at most 1"))
    checks.append(("cuda", not args.cuda or torch.cuda.is_available(), "False, for PyTorch finds no CUDA device here"))
    for name, is_right, wanted in checks + own_checks(args):
        if not is_right:
            raise UserError(f"{name} is {getattr(args, name)}; it must be {wanted}.")
    if env.spec.max_episode_steps is None:
        tell(f"{args.env_id} is registered without max_episode_steps: an evaluation waits until each of its episodes ends")
    return args


RESUME_MAY_CHANGE = (
    "total_timesteps",
    "eval_workers",
    "checkpoint_seconds",
    "capture_video",
    "track",
    "wandb_project_name",
    "wandb_entity",
)
EVALUATE_MAY_CHANGE = ("eval_episodes", "seed", "capture_video")


def check_unchanged(args: Args, saved: Args, may_change: tuple[str, ...]) -> None:
    """UserError where other arguments are given than a run was made with."""
    changed = [name for name, value in vars(args).items() if value != getattr(saved, name)]
    wrong = [name for name in changed if name not in (*may_change, "resume", "evaluate")]  # these two name the run itself
    if wrong:
        raise UserError(f"{', '.join(wrong)} cannot change any more; only {', '.join(may_change)} can be given.")


def resumed(args: Args, defaults: Args) -> Args:
    """The arguments that the run args.resume goes on with: its own, but for what is given now, which differs from `defaults`."""
    run_dir = absolute(args.resume)
    saved = open_checkpoint(run_dir)
    given = {name: value for name, value in vars(args).items() if value != getattr(defaults, name)}
    own = Args(**saved["args"])
    args = replace(own, **given)
    check_unchanged(args, own, RESUME_MAY_CHANGE)
    kept = run_dir / f"{SCRIPT}.py"
    if kept.exists() and kept.read_bytes() != Path(__file__).read_bytes():
        tell("the run goes on with a script that is not the one it began with, which its directory keeps")
    torch.set_num_threads(saved["threads"])  # which set_up_torch() may lower; before compiling, which is for their number
    if saved["threads"] > cores():
        tell(f"the run began with {saved['threads']} threads and goes on with {cores()}, all that it has here; bits may differ")
    return replace(args, resume=str(run_dir), cuda=saved["device"] == "cuda")


def cores() -> int:
    """Processor cores of this process; a container's quota counts, of its cgroup or one above it, rounded up."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with suppress(OSError):  # there are no cgroups here
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":  # version 2
                root = "/sys/fs/cgroup"
            elif "cpu" in controllers.split(","):  # version 1
                root = "/sys/fs/cgroup/cpu"
            else:
                continue
            for above in (group, *Path(group).parents):
                number = min(number, quota_of(Path(f"{root}{above}")))
    return number


def quota_of(group: Path) -> float:
    """How many cores the folder of a cgroup allows: in one file in version 2, in two in version 1."""
    files = [group / "cpu.max"]
    if not files[0].exists():
        files = [group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"]
    words = " ".join(file.read_text() for file in files if file.exists()).split()
    if len(words) < 2 or not words[0].isdigit():  # no files, or a quota of "max" or -1
        return math.inf
    quota, period = (int(word) for word in words)
    return math.ceil(quota / period)


def set_up_torch(args: Args) -> torch.device:
    """Process-wide settings: threads, determinism, memory allocation, precision. Returns the device to train on."""
    torch.set_num_threads(min(torch.get_num_threads(), cores()))
    cuda = torch.cuda.is_available() if args.cuda is None else args.cuda
    device = torch.device("cuda" if cuda else "cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.compiler.reset()  # what earlier runs of this process compiled would count against the limit of recompilations
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a pass over every new tensor, finds only bugs
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        # Keep freed memory: by default every 2.6 MB temporary goes back to the system and page-faults on its next use.
        ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    precision = args.matmul_precision
    if precision == "auto":
        precision = "medium" if device.type == "cpu" and medium_is_exact() else "highest"
    torch.set_float32_matmul_precision(precision)
    return device


def medium_is_exact() -> bool:
    """Whether "medium" is float32 here: it lets oneDNN do batched products, which is faster, and exact without AMX. Measured."""
    a, b = torch.randn(2, 2, 256, 256, generator=torch.Generator().manual_seed(0))  # each (2, 256, 256)
    exact = a.double() @ b.double()
    torch.set_float32_matmul_precision("medium")  # set_up_torch() sets it again
    return float((torch.bmm(a, b) - exact).norm() / exact.norm()) < 1e-6


class Screen:
    """sys.stdout or sys.stderr; what cannot be written there is dropped, for a reader that goes away must not end a run."""

    def __init__(self, name: str):
        self.name = name

    def write(self, text: str) -> None:
        stream = getattr(sys, self.name)
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            setattr(sys, self.name, None)  # or else it would fail again, with an exit code, when the process ends
        except (OSError, ValueError, AttributeError):
            pass


STDOUT, STDERR = Screen("stdout"), Screen("stderr")  # one for all: tqdm.write() clears the bars on the same file


def tell(text: str) -> None:
    """A line on stderr, above the bar."""
    tqdm.write(text, file=STDERR)


def progress_bar(args: Args, progress: Progress) -> tqdm:
    return tqdm(
        total=args.total_timesteps,
        initial=progress.step,
        desc=args.env_id[:20],
        unit="step",
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{remaining} left, {rate_fmt}{postfix}]",  # also at 80 columns
        smoothing=0,  # the average speed since learning began, or since resuming
        file=STDERR,
        ncols=shutil.get_terminal_size().columns,
        mininterval=0.5 if sys.stderr and sys.stderr.isatty() else 30,  # a file need not see every step
    )


# Command line -------------------------------------------------------------------------------------------------------------------
def evaluate(args: Args, policy: Policy) -> None:
    """Print the return of each condition on fresh episodes; write evaluate.csv where args.evaluate is a run directory."""
    check_unchanged(args, policy.args, EVALUATE_MAY_CHANGE)
    path = absolute(args.evaluate)
    rows = [f"global_step,{CONDITION},return,return_std,best_in_training\n"]
    with Player(args, args.env_id) as player:
        for condition in eval_conditions(args):
            returns = player.play(policy.actor.state_dict(), condition, FRESH_EPISODES)
            mean, std = returns.mean(), returns.std()
            is_best = condition == policy.best
            rows.append(f"{policy.step},{condition:.6g},{mean},{std},{int(is_best)}\n")
            mark = "  best in training" if is_best else ""
            print(f"{CONDITION} {condition:.4f}: {mean:.1f} +- {std:.1f}{mark}", file=STDOUT)
        if path.is_dir():  # before the environments are closed, which may fail
            with open_whole(path / "evaluate.csv") as file:
                file.write("".join(rows).encode())
    if args.capture_video:
        record_episode(args, policy, path if path.is_dir() else path.parent)


# What Ctrl-C, terminals and schedulers send; Windows has not all of them
STOP_SIGNALS = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")]


def on_stop_signals(handle) -> None:
    """Have handle(number) called in this process, but for signals that it was started to ignore, as nohup has SIGHUP."""
    owner = os.getpid()

    def on_signal(number, frame) -> None:
        if os.getpid() == owner:
            handle(number)
        elif number == signal.SIGTERM:  # in a process that an environment has forked, which its close() ends in this way
            os._exit(128 + number)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, on_signal)


def main() -> int:
    args = tyro.cli(Args, description=__doc__)
    defaults = Args()
    stopped_by: list[int] = []

    def stop(number: int) -> None:
        if stopped_by and number == signal.SIGINT:
            os._exit(128 + number)  # the last checkpoint is whole
        stopped_by.append(number)

    try:
        if args.evaluate:
            policy = load_policy(args.evaluate)
            args = tyro.cli(Args, default=policy.args)  # read again: the rest are the arguments of its run
            evaluate(args, policy)
            return 0
        if args.resume:  # read again, so that a default's value counts as given where the run has another
            defaults = Args(**open_checkpoint(absolute(args.resume))["args"])
            args = tyro.cli(Args, default=defaults)
        on_stop_signals(stop)
        summary = train(args, stopped_by, defaults)
    except (UserError, TrainingError) as error:
        print(f"error: {error}", file=STDERR)
        return error.exit_code
    if stopped_by:
        command = shlex.join(["python", sys.argv[0], "--resume", summary["run_dir"]])
        print(f"stopped at step {summary['step']}; go on with: {command}", file=STDOUT)
        return 128 + stopped_by[0]
    last, best = summary["last"], summary["best"]
    if last:
        at_the_end, at_best = last["eval/best_return"], best["eval/best_return"]
        print(f"return {at_the_end:.1f} at the end, at best {at_best:.1f} at step {best['global_step']}", file=STDOUT)
    else:
        print("nothing was evaluated", file=STDOUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
