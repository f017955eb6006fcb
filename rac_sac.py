# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "gymnasium[mujoco]==1.4.0",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "tyro==1.0.17",
#     "wandb==0.31.0",
#     "tqdm==4.70.1",
#     "filelock==4.2.11",
#     "moviepy==2.2.1",
# ]
# ///
"""Realistic Actor-Critic on top of SAC (RAC-SAC), in one file.

One actor and an ensemble of N critics, conditioned on beta, learn a family of policies from optimistic (small beta) to
pessimistic (large beta): the target is mean - beta * std of the critics (uncertainty punished Q-learning; section 3 and
appendix B of the paper). Evaluation tries twelve betas and takes the best.

    python rac_sac.py --env-id Ant-v4 --utd 20

240 ms per environment step (20 critic updates, N = 10, Ant-v4) on 2 cores of an AMD EPYC with AVX2, 1.4 times the time of
its matrix products alone. Hopper-v4 passed a return of 1000 at 10 000 steps and of 2000 at 17 000 (one seed).
"""

# --- shared: imports ---
import contextlib
import copy
import csv
import ctypes
import dataclasses
import difflib
import functools
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import queue
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_connections
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    # Before torch loads OpenMP: a thread that waits for another spins briefly, then sleeps and leaves its core to the
    # evaluation workers. benchmark/SPEED.md: a longer spin wastes their core, a shorter one slows training alone.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import filelock
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.func import functional_call, grad_and_value
from tqdm import tqdm

# --- end shared ---

CONDITION = "beta"  # what the policies of the family are told apart by
BETA_MIN = 1e-7  # lower end of U1 and U2; log(beta) must stay finite


class UserError(Exception):
    """A mistake in the arguments or files given by the user: shown as one sentence, exit code 2."""


class TrainingError(Exception):
    """Training cannot go on (a non-finite number, a full disk): shown as one sentence, exit code 1."""


@dataclass
class Args:
    # Experiment
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment: networks, noise, environments and evaluation all follow from it"""
    torch_deterministic: bool = True
    """use only PyTorch operations that give the same bits every time"""
    cuda: bool | None = None
    """whether to train on the GPU; by default, when one is present"""
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"
    """torch.set_float32_matmul_precision; auto takes the fastest setting that is exact float32 on this machine"""
    compile: bool = True
    """compile the update functions with torch.compile (falls back to eager where there is no compiler)"""
    cudagraphs: bool = True
    """on a GPU, capture all updates of an environment step in one CUDA graph"""
    track: bool = False
    """log to Weights & Biases (goes on offline when there is no key or no network)"""
    wandb_project_name: str = "realistic-actor-critic"
    """the Weights & Biases project"""
    wandb_entity: str | None = None
    """the entity (team) of the Weights & Biases project"""
    capture_video: bool = False
    """record an episode of the best policy into videos/, at the end of training or with --evaluate"""

    # Run directory
    run_root: str = "runs"
    """the folder in which run directories are made"""
    run_name: str | None = None
    """the run directory's name; by default <env_id>__<exp_name>__<seed>__<time>"""
    checkpoint_seconds: float = 300.0
    """seconds between two checkpoints"""
    resume: str | None = None
    """a run directory to go on with; its saved arguments win, only total_timesteps may grow"""
    evaluate: str | None = None
    """a run directory whose policies are evaluated on fresh episodes, without training; its saved arguments win"""

    # Environment and replay
    env_id: str = "Hopper-v4"
    """the id of the Gymnasium environment"""
    total_timesteps: int | None = None
    """environment steps of the run; by default 1e6 for Humanoid, 3e5 for others"""
    learning_starts: int = 5000
    """environment steps with uniformly random actions before learning starts"""
    buffer_size: int | None = None
    """replay capacity; by default 3e5 for Humanoid, 1e5 for Walker2d, 2e5 for Ant, 1e6 for others"""
    batch_size: int = 256
    """the batch size sampled from the replay"""

    # Realistic Actor-Critic
    utd: int = 20
    """update-to-data ratio G: critic updates per environment step"""
    num_critics: int = 10
    """ensemble size N"""
    train_beta_max: float = 0.8
    """a of U1 = U[1e-7, a], from which every training sample draws its beta"""
    explore_beta_max: float = 0.3
    """b of U2 = U[1e-7, b], from which every environment step draws its beta"""

    # Actor-critic
    gamma: float = 0.99
    """the discount factor"""
    tau: float = 0.005
    """Polyak weight of the online critics in the target critics"""
    hidden_dim: int = 256
    """width of the two hidden layers of actor and critics"""
    policy_lr: float = 3e-4
    """the learning rate of the actor"""
    q_lr: float = 3e-4
    """the learning rate of the critics after the warm-up"""
    q_lr_init: float = 3e-5
    """the learning rate of the critics at learning_starts, where their warm-up begins; equal to q_lr: no warm-up"""
    q_lr_warmup_end: int = 10000
    """environment step at which the linear warm-up of the critics' learning rate reaches q_lr; learning_starts: no warm-up"""

    # Temperature
    autotune: bool = True
    """learn the temperature; otherwise it is fixed at alpha"""
    alpha: float = 0.2
    """the temperature when autotune is off"""
    alpha_lr: float = 3e-4
    """the learning rate of the temperature"""
    temperature_network: bool = True
    """condition the temperature on beta by a network; otherwise one scalar is learned"""
    initial_log_alpha: float = -5.0
    """xi: the constant added to the temperature network's output, or the scalar's initial value"""
    target_entropy: float | None = None
    """target entropy of the policy; by default minus the action dimension"""

    # Evaluation
    eval_frequency: int = 1000
    """environment steps between evaluations"""
    num_eval_policies: int = 12
    """H: how many betas are evaluated; the best one's return is the performance"""
    eval_episodes: int = 10
    """episodes per evaluated beta, from the same initial states for all betas and evaluations"""
    eval_beta_max: float | None = None
    """largest evaluated beta; by default train_beta_max (the paper's text says explore_beta_max)"""
    eval_workers: int | None = None
    """evaluation processes; by default half the cores, at most 12; 0: evaluate in this process; results do not depend on it"""
    bias_frequency: int = 0
    """environment steps between measurements of the normalised value bias, a multiple of eval_frequency; 0: never"""


STEPS = {"Humanoid": 1_000_000}  # others 300 000
REPLAY_CAPACITY = {"Humanoid": 300_000, "Walker2d": 100_000, "Ant": 200_000, "Hopper": 1_000_000}  # others 1 000 000


def usable_cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Training threads: OMP_NUM_THREADS where it is a number, else all cores."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(first) if first.isdigit() and int(first) > 0 else usable_cores()


def check_args(args: Args) -> Args:
    """Return `args` with the per-environment defaults filled in; raise UserError for a value that makes no sense."""

    def check(ok: bool, sentence: str) -> None:
        if not ok:
            raise UserError(sentence)

    name = args.env_id.split("/")[-1].split(":")[-1].rsplit("-v", 1)[0]
    args = copy.copy(args)
    args.total_timesteps = STEPS.get(name, 300_000) if args.total_timesteps is None else args.total_timesteps
    args.buffer_size = REPLAY_CAPACITY.get(name, 1_000_000) if args.buffer_size is None else args.buffer_size
    args.eval_beta_max = args.train_beta_max if args.eval_beta_max is None else args.eval_beta_max
    args.eval_workers = max(1, min(12, usable_cores() // 2)) if args.eval_workers is None else args.eval_workers
    for field in ("train_beta_max", "explore_beta_max", "eval_beta_max"):
        value = getattr(args, field)
        check(math.isfinite(value) and value >= BETA_MIN, f"{field} is {value}; it must be finite and at least {BETA_MIN}.")
    check(args.explore_beta_max <= args.train_beta_max,
          f"explore_beta_max is {args.explore_beta_max}; it must not exceed train_beta_max, {args.train_beta_max}.")
    check(args.num_critics >= 2, f"num_critics is {args.num_critics}; a standard deviation needs at least 2.")
    check(math.isfinite(args.alpha) and args.alpha >= 0, f"alpha is {args.alpha}; it must be finite and not negative.")
    # --- shared: argument checks ---
    has = [field.name for field in dataclasses.fields(args)]
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.type in (float, float | None) and value is not None:
            setattr(args, field.name, float(value))  # a program may have given an integer
    counts = ("utd", "batch_size", "hidden_dim", "num_eval_policies", "eval_episodes", "eval_frequency")
    for field in [name for name in counts if name in has]:
        check(getattr(args, field) >= 1, f"{field} is {getattr(args, field)}; it must be at least 1.")
    for field in ("gamma", "tau"):
        check(0 < getattr(args, field) <= 1, f"{field} is {getattr(args, field)}; it must be in (0, 1].")
    for field in ("learning_starts", "bias_frequency", "seed", "checkpoint_seconds", "eval_workers"):
        check(getattr(args, field) >= 0, f"{field} is {getattr(args, field)}; it must not be negative.")
    for field in [name for name in has if name.endswith(("_lr", "_lr_init", "_noise", "_clip"))]:
        value = getattr(args, field)
        check(math.isfinite(value) and value >= 0, f"{field} is {value}; it must be finite and not negative.")
    check(args.seed < 2**63, f"seed is {args.seed}; it must be below 2**63.")
    for field in [name for name in ("initial_log_alpha", "target_entropy") if name in has]:
        value = getattr(args, field)
        check(value is None or math.isfinite(value), f"{field} is {value}; it must be finite.")
    smallest = max(args.learning_starts, args.batch_size)
    for field in ("buffer_size", "total_timesteps"):
        check(getattr(args, field) >= smallest, f"{field} is {getattr(args, field)}; it must be at least {smallest}, "
              "the larger of learning_starts and batch_size.")
    check(args.q_lr_warmup_end >= args.learning_starts or args.q_lr_init == args.q_lr,
          f"q_lr_warmup_end is {args.q_lr_warmup_end}; it must be at least learning_starts, {args.learning_starts}, "
          "unless q_lr_init equals q_lr (no warm-up).")
    check(args.bias_frequency % args.eval_frequency == 0,
          f"bias_frequency is {args.bias_frequency}; it must be a multiple of eval_frequency, {args.eval_frequency}.")
    check(args.run_name is None or (Path(args.run_name).name == args.run_name and len(args.run_name) <= 200),
          f"run_name is {args.run_name!r}; it must be a plain folder name of at most 200 characters.")
    check(not args.cuda or torch.cuda.is_available(), "cuda was asked for, but PyTorch finds no CUDA device here.")
    return args
    # --- end shared ---


# ----------------------------------------------------------------------------------------------------------------------
# Networks
# ----------------------------------------------------------------------------------------------------------------------
# --- shared: critics ---
class EnsembleLinear(nn.Module):
    """N independent linear layers as one batched product.

    Weights (N, in, out) and biases (N, 1, out). Each member is initialised as U(+-1/sqrt(in)) (Kaiming uniform with
    a = sqrt(5) over the fan-in of one member, PyTorch's default), biases zero.
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


class Critic(nn.Module):
    """An ensemble of N critics Q_i with two hidden layers each."""

    def __init__(self, num_critics: int, obs_dim: int, action_dim: int, hidden_dim: int, condition_dim: int = 1):
        super().__init__()
        self.layer1 = EnsembleLinear(num_critics, obs_dim + action_dim + condition_dim, hidden_dim)
        self.layer2 = EnsembleLinear(num_critics, hidden_dim, hidden_dim)
        self.layer3 = EnsembleLinear(num_critics, hidden_dim, 1)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """obs (B, O), action (B, A) and the logarithm of the condition (B, 1), where there is one -> (N, B)."""
        x = F.relu(self.layer1(torch.cat(inputs, 1)))  # (N, B, hidden)
        x = F.relu(self.layer2(x))  # (N, B, hidden)
        return self.layer3(x).squeeze(2)  # (N, B)


def linear(in_features: int, out_features: int) -> nn.Linear:
    """A linear layer with PyTorch's default weights, U(+-1/sqrt(in)), and zero bias."""
    layer = nn.Linear(in_features, out_features)
    nn.init.zeros_(layer.bias)
    return layer
# --- end shared ---


class Actor(nn.Module):
    """The policy pi(a | s, beta): mean and log standard deviation of a Gaussian that tanh squashes into [-1, 1]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_dim: int):
        super().__init__()
        self.layer1 = linear(obs_dim + 1, hidden_dim)
        self.layer2 = linear(hidden_dim, hidden_dim)
        self.mean = linear(hidden_dim, action_dim)
        self.log_std = linear(hidden_dim, action_dim)

    def forward(self, obs: torch.Tensor, log_beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs (B, O), log_beta (B, 1) -> mean (B, A), log_std (B, A) clamped to [-10, 2]."""
        x = F.relu(self.layer1(torch.cat([obs, log_beta], 1)))
        x = F.relu(self.layer2(x))
        return self.mean(x), self.log_std(x).clamp(-10, 2)


class Temperature(nn.Module):
    """log alpha(beta): a network plus xi (equation 25), or one learned scalar, or a constant."""

    def __init__(self, network: bool, autotune: bool, initial_log_alpha: float, alpha: float):
        super().__init__()
        self.network = None
        if not autotune:
            self.log_alpha = math.log(alpha) if alpha > 0 else -math.inf
        elif network:
            self.log_alpha = initial_log_alpha
            # PyTorch's default biases, not zeros: with log beta < 0 half of the units would never be active.
            self.network = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))
        else:
            self.log_alpha = nn.Parameter(torch.tensor([initial_log_alpha]))

    def forward(self, log_beta: torch.Tensor) -> torch.Tensor:
        """log_beta (B, 1) -> log alpha (B,)."""
        if self.network is not None:
            return self.network(log_beta).squeeze(1) + self.log_alpha
        return torch.zeros_like(log_beta[:, 0]) + self.log_alpha


# ----------------------------------------------------------------------------------------------------------------------
# The method
# ----------------------------------------------------------------------------------------------------------------------
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


# --- shared: learning rate and optimiser ---
def critic_learning_rate(args: Args, step: int) -> float:
    """Linear warm-up from q_lr_init at learning_starts to q_lr at q_lr_warmup_end (equation 23)."""
    if args.q_lr_warmup_end <= args.learning_starts:
        return args.q_lr
    p = min(max((step - args.learning_starts) / (args.q_lr_warmup_end - args.learning_starts), 0.0), 1.0)
    return args.q_lr_init * (1 - p) + p * args.q_lr


def adam_scales(count: torch.Tensor, lr, updates: int) -> torch.Tensor:
    """Step size and root of the second moment's bias correction of the next Adam updates; count (1,) float64 moves on.

    Returns (updates, 4), a row for each update; the last two columns only keep rows 16 bytes apart. Computed for all G
    updates at once and outside the compiled code, which would repeat both powers for every vector of parameters; in
    float64, for 1 - 0.999 has only four digits in float32.
    """
    counts = count + torch.arange(1, updates + 1, device=count.device)
    count.add_(updates)
    return F.pad(torch.stack([lr / (1 - 0.9**counts), (1 - 0.999**counts).sqrt()], 1), (0, 2)).float()


def adam_(params, grad, exp_avg, exp_avg_sq, scales):
    """One Adam step (betas 0.9 and 0.999, eps 1e-8) in place on flat vectors (P,); scales: a row of adam_scales."""
    exp_avg.lerp_(grad, 0.1)
    exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
    params.sub_(scales[0] * exp_avg / (exp_avg_sq.sqrt() / scales[1] + 1e-8))


class FlatNetwork:
    """A module whose parameters live in one flat vector, so that Adam and Polyak are one pass over it.

    Gradients are taken with respect to the per-layer views and packed once: differentiating through the views
    themselves would build a full-size zero-padded gradient for each.
    """

    def __init__(self, module: nn.Module):
        self.module = module.requires_grad_(False)  # gradients are taken by torch.func
        self.layout = []  # (name, offset, shape); offsets are multiples of 16 floats, that is 64 bytes
        self.size = 0
        for name, parameter in module.named_parameters():
            self.layout.append((name, self.size, parameter.shape))
            self.size += -(-parameter.numel() // 16) * 16

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters, by name, as views of the flat vector (P,)."""
        return {name: flat[offset : offset + shape.numel()].view(shape) for name, offset, shape in self.layout}

    def pack(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The flat vector (P,) of parameters or gradients given by name; gaps are zero."""
        padded = [F.pad(tensors[name].reshape(-1), (0, -shape.numel() % 16)) for name, _, shape in self.layout]
        return torch.cat(padded) if padded else torch.zeros(0)

    def bind(self, flat: torch.Tensor) -> nn.Module:
        """The module with its parameters in the flat vector (P,): for many calls with the same ones."""
        for name, view in self.views(flat).items():
            self.module.get_parameter(name).data = view
        return self.module

    def __call__(self, parameters: dict[str, torch.Tensor], *inputs: torch.Tensor):
        return functional_call(self.module, parameters, inputs)
# --- end shared ---


def prepare_targets(networks, state, rows, beta, noise):
    """Everything of the targets that the critics do not change, for all G minibatches at once.

    rows (G*B, 2*O + A + 2), beta (G*B,), noise (G*B, A) -> next_action (G*B, A), entropy_bonus (G*B,).
    Actor and temperature do not move during the G critic updates, so one pass equals G passes.
    """
    actor, temperature = networks["actor"], networks["temperature"]
    next_obs, log_beta = rows[:, -networks["obs_dim"] :], beta.log()[:, None]
    mean, log_std = actor(actor.views(state["actor"]), next_obs, log_beta)
    next_action, log_prob = squashed_gaussian(mean, log_std, noise)
    alpha = temperature(temperature.views(state["temperature"]), log_beta).exp()
    return next_action, -alpha * log_prob


def update_critics(networks, state, rows, beta, next_action, entropy_bonus, scales, gamma, tau):
    """One critic step (equations 17 and 18) and one Polyak step of the targets, in place on `state`.

    rows (B, 2*O + A + 2), beta (B,), next_action (B, A), entropy_bonus (B,), scales: a row of adam_scales.
    """
    critic, obs_dim, action_dim = networks["critic"], networks["obs_dim"], networks["action_dim"]
    obs, action, reward, terminated, next_obs = rows.split([obs_dim, action_dim, 1, 1, obs_dim], 1)
    log_beta = beta.log()[:, None]
    q_next = critic(critic.views(state["target"]), next_obs, next_action, log_beta)  # (N, B)
    target = upq_target(q_next, beta, reward[:, 0], terminated[:, 0], gamma, entropy_bonus)  # (B,), no gradient

    def loss_function(parameters):
        q = critic(parameters, obs, action, log_beta)  # (N, B)
        return critic_loss(q, target), q

    grads, (loss, q) = grad_and_value(loss_function, has_aux=True)(critic.views(state["critic"]))
    adam_(state["critic"], critic.pack(grads), state["critic_m"], state["critic_v"], scales)
    state["target"].lerp_(state["critic"], tau)
    state["metrics"][:3] += torch.stack([loss, q.mean(), q.std(0).mean()])


def update_actor(networks, state, rows, beta, noise, scales):
    """One actor step (equation 19) in place on `state`: rows (B, 2*O + A + 2), beta (B,), noise (B, A)."""
    actor, critic, temperature = networks["actor"], networks["critic"], networks["temperature"]
    obs, log_beta = rows[:, : networks["obs_dim"]], beta.log()[:, None]
    alpha = temperature(temperature.views(state["temperature"]), log_beta).exp()
    critic_parameters = critic.views(state["critic"])

    def loss_function(parameters):
        action, log_prob = squashed_gaussian(*actor(parameters, obs, log_beta), noise)
        q = critic(critic_parameters, obs, action, log_beta)
        return actor_loss(q, alpha, log_prob), log_prob

    grads, (loss, log_prob) = grad_and_value(loss_function, has_aux=True)(actor.views(state["actor"]))
    adam_(state["actor"], actor.pack(grads), state["actor_m"], state["actor_v"], scales)
    state["metrics"][3:7] += torch.stack([torch.ones_like(loss), loss, alpha.mean(), -log_prob.mean()])


def update_temperature(networks, state, rows, beta, noise, scales, target_entropy):
    """One temperature step (equation 16) in place on `state`, with fresh actions of the updated actor."""
    actor, temperature = networks["actor"], networks["temperature"]
    obs, log_beta = rows[:, : networks["obs_dim"]], beta.log()[:, None]
    _, log_prob = squashed_gaussian(*actor(actor.views(state["actor"]), obs, log_beta), noise)

    def loss_function(parameters):
        return temperature_loss(temperature(parameters, log_beta), log_prob, target_entropy)

    grads, loss = grad_and_value(loss_function)(temperature.views(state["temperature"]))
    adam_(state["temperature"], temperature.pack(grads), state["temperature_m"], state["temperature_v"], scales)
    state["metrics"][7:8] += loss


METRICS = ("qf_loss", "qf_values", "qf_std", "updates", "actor_loss", "alpha", "entropy", "alpha_loss")
COMPILED = (prepare_targets, update_critics, update_actor, update_temperature)
PER_POLICY = ("return", "alpha")  # what eval.csv holds of every evaluated policy


def build_networks(args: Args, obs_dim: int, action_dim: int) -> dict:
    """The networks as args.seed initialises them, alike on every device, and the sizes that rows are split by."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        temperature = Temperature(args.temperature_network, args.autotune, args.initial_log_alpha, args.alpha)
        return {
            "actor": FlatNetwork(Actor(obs_dim, action_dim, args.hidden_dim)),
            "critic": FlatNetwork(Critic(args.num_critics, obs_dim, action_dim, args.hidden_dim)),
            "temperature": FlatNetwork(temperature),
            "obs_dim": obs_dim,
            "action_dim": action_dim,
        }


# ----------------------------------------------------------------------------------------------------------------------
# Learner: replay, acting and the update loop
# ----------------------------------------------------------------------------------------------------------------------
class Learner:
    """Everything that training changes, in the dict of tensors `state`, and what changes it: store, act and update.

    All randomness comes from `generator`, and noise is drawn outside the compiled functions. The replay is one float32
    matrix with a row (obs, action, reward, terminated, next_obs) per transition, on the training device.
    """

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        self.args, self.device, self.obs_dim, self.action_dim = args, device, obs_dim, action_dim
        self.networks = build_networks(args, obs_dim, action_dim)
        self.state = {"q_lr": torch.tensor(args.q_lr), "metrics": torch.zeros(len(METRICS))}
        for name in ("actor", "critic", "temperature"):
            network = self.networks[name]
            flat = network.pack(dict(network.module.named_parameters()))
            self.state[name] = flat
            self.state[f"{name}_m"], self.state[f"{name}_v"] = torch.zeros_like(flat), torch.zeros_like(flat)
            self.state[f"{name}_count"] = torch.zeros(1, dtype=torch.float64)
        self.state["target"] = self.state["critic"].clone()
        # --- shared: learner ---
        self.state["size"] = torch.zeros((), dtype=torch.float64)  # a tensor: a captured graph must see it grow
        self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
        width = 2 * obs_dim + action_dim + 2
        size, there = args.buffer_size * width * 4, memory_of(device)
        try:
            if size > there:  # the system promises memory that it does not have, and kills the run when it is used
                raise MemoryError
            self.replay = torch.empty(args.buffer_size, width, device=device)
        except (RuntimeError, MemoryError):
            raise UserError(f"a replay of {size / 2**30:.1f} GiB (buffer_size {args.buffer_size}) does not fit on {device}, "
                            f"which has {there / 2**30:.1f} GiB; choose a smaller buffer_size.") from None
        cuda = device.type == "cuda"
        self.row, self.row_sent = torch.empty(width, pin_memory=cuda), torch.cuda.Event() if cuda else None
        self.host_obs = torch.empty(1, obs_dim, pin_memory=cuda)
        self.obs = torch.zeros(1, obs_dim, device=device)
        self.action = torch.zeros(action_dim + 1, device=device)
        stream = np.random.SeedSequence(args.seed).generate_state(1, np.uint64)  # apart from that of the weights
        self.generator = torch.Generator(device).manual_seed(int(stream[0]))
        # Without this option the CPU compiler fuses loops that share nothing but their ranges: where the batch size equals
        # hidden_dim, the last layer's weight gradient then walks its input against the grain.
        options = {"cpp.max_horizontal_fusion_size": 1}
        compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False, options=options)
        wrap = compiled if args.compile else (lambda f: f)
        for function in COMPILED:
            setattr(self, function.__name__, wrap(function))
        self.use_graphs = cuda and args.cudagraphs
        self.act_graph = self.update_graph = None

    def store(self, step, obs, action, reward, terminated, next_obs):
        """Write the transition of environment step `step` (counted from 0) over the oldest one."""
        row, obs_dim, action_dim = self.row.numpy(), self.obs_dim, self.action_dim
        if self.row_sent:
            self.row_sent.synchronize()  # the copy of the row before; in training it has long been done
        row[:obs_dim], row[obs_dim : obs_dim + action_dim], row[-obs_dim:] = obs, action, next_obs
        row[obs_dim + action_dim], row[obs_dim + action_dim + 1] = reward, terminated
        self.replay[step % len(self.replay)].copy_(self.row, non_blocking=True)
        if self.row_sent:
            self.row_sent.record()
        self.state["size"].fill_(min(step + 1, len(self.replay)))

    def random_action(self) -> np.ndarray:
        """A uniformly random action in [-1, 1], (A,)."""
        return (torch.rand(self.action_dim, generator=self.generator, device=self.device) * 2 - 1).cpu().numpy()

    def act(self, obs: np.ndarray) -> np.ndarray:
        """The exploring policy's action for obs (O,), in [-1, 1], (A,); raises TrainingError after a non-finite loss."""
        self.host_obs.numpy()[0] = obs
        self.obs.copy_(self.host_obs, non_blocking=True)
        if self.act_graph is not None:
            self.act_graph.replay()
        else:
            self._act()
        action = self.action.cpu().numpy()  # the only synchronisation with the device of an environment step
        if not np.isfinite(action).all():
            self.check_finite()
            raise TrainingError("the policy's action became non-finite")
        return action[:-1].copy()

    def update(self, step: int) -> None:
        """All updates of environment step `step`: G critic steps, one actor step and, where it is learned, the temperature's."""
        self.state["q_lr"].fill_(critic_learning_rate(self.args, step))
        if self.use_graphs and self.update_graph is None:
            self.capture()
        if self.update_graph is not None:
            self.update_graph.replay()
        else:
            self._update()

    def capture(self) -> None:
        """Capture acting and updating as CUDA graphs, without any effect on training."""
        saved, random_state = {k: v.clone() for k, v in self.state.items()}, self.generator.get_state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and lets the libraries allocate what they must not allocate while capturing
                self._act()
                self._update()
        torch.cuda.current_stream().wait_stream(stream)
        graphs = []
        for body in (self._act, self._update):
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].register_generator_state(self.generator)
            with torch.cuda.graph(graphs[-1]):
                body()
        for name, tensor in saved.items():
            self.state[name].copy_(tensor)
        self.generator.set_state(random_state)
        self.act_graph, self.update_graph = graphs

    def copy_of(self, name: str) -> torch.Tensor:
        """A network's parameters (P,), copied to the CPU."""
        return self.state[name].to("cpu", copy=True)

    def content(self, step: int) -> dict:
        """What a checkpoint holds of the learner."""
        filled, replay = min(step, len(self.replay)), self.replay
        return {
            "device": self.device.type, "generator": self.generator.get_state(),
            "state": {name: tensor.cpu() for name, tensor in self.state.items()},
            "replay": replay.cpu() if filled == len(replay) else replay[:filled].cpu().clone(),  # a view would save all
        }  # fmt: skip

    def load(self, checkpoint: dict) -> None:
        """Take over the state of a checkpoint, in place: captured graphs stay valid."""
        for name, tensor in checkpoint["state"].items():
            self.state[name].copy_(tensor)
        self.generator.set_state(checkpoint["generator"])
        self.replay[: len(checkpoint["replay"])].copy_(checkpoint["replay"])

    def check_finite(self) -> None:
        """Raises TrainingError if a loss was, or a parameter is, not finite."""
        sums = dict(zip(METRICS, self.state["metrics"].tolist(), strict=True))
        bad = [name for name, value in sums.items() if not math.isfinite(value)]
        bad += [name for name, tensor in self.state.items() if name != "metrics" and not bool(torch.isfinite(tensor).all())]
        if bad:
            raise TrainingError(f"{', '.join(bad)} became non-finite")

    def read_metrics(self) -> dict[str, float]:
        """The averages of METRICS since the last call (empty before the first update); TrainingError if not finite."""
        sums = dict(zip(METRICS, self.state["metrics"].tolist(), strict=True))
        if not all(map(math.isfinite, sums.values())):
            self.check_finite()
        self.state["metrics"].zero_()
        updates = sums.pop("updates")
        if updates == 0:
            return {}
        return {k: v / (updates * self.args.utd if k.startswith("qf") else updates) for k, v in sums.items()}
        # --- end shared ---

    @torch.no_grad()
    def _act(self):
        """Action with a fresh beta ~ U2 and, behind it, the metrics' sum, which is non-finite once a loss was."""
        uniform = torch.rand(1, 1, generator=self.generator, device=self.device)
        noise = torch.randn(1, self.action_dim, generator=self.generator, device=self.device)
        log_beta = (BETA_MIN + (self.args.explore_beta_max - BETA_MIN) * uniform).log()
        actor = self.networks["actor"]
        action, _ = squashed_gaussian(*actor(actor.views(self.state["actor"]), self.obs, log_beta), noise)
        torch.cat([action[0], self.state["metrics"].sum()[None]], out=self.action)

    @torch.no_grad()
    def _update(self):
        args, state, networks, utd, batch = self.args, self.state, self.networks, self.args.utd, self.args.batch_size
        count, options = (utd + 1) * batch, {"generator": self.generator, "device": self.device}
        # float64: a float32 uniform has 24 bits, too few to index a million rows evenly
        indices = (torch.rand(count, dtype=torch.float64, **options) * state["size"]).long()
        beta = BETA_MIN + (args.train_beta_max - BETA_MIN) * torch.rand(count, **options)
        noise = torch.randn(count + batch, self.action_dim, **options)
        rows = self.replay[indices]
        n = utd * batch
        next_action, entropy_bonus = self.prepare_targets(networks, state, rows[:n], beta[:n], noise[:n])
        scales = adam_scales(state["critic_count"], state["q_lr"], utd)
        for i in range(utd):
            j = slice(i * batch, (i + 1) * batch)
            self.update_critics(
                networks, state, rows[j], beta[j], next_action[j], entropy_bonus[j], scales[i], args.gamma, args.tau)
        (scales,) = adam_scales(state["actor_count"], args.policy_lr, 1)
        self.update_actor(networks, state, rows[n:], beta[n:], noise[n:count], scales)
        if args.autotune:
            (scales,) = adam_scales(state["temperature_count"], args.alpha_lr, 1)
            self.update_temperature(networks, state, rows[n:], beta[n:], noise[count:], scales, args.target_entropy)


# ----------------------------------------------------------------------------------------------------------------------
# Environments
# ----------------------------------------------------------------------------------------------------------------------
# --- shared: environments ---
def make_env(env_id: str, **options) -> gym.Env:
    """gym.make without its warnings; raises UserError unless observations are a Box and actions a bounded Box."""
    with contextlib.suppress(ImportError):
        import mujoco

        mujoco.set_mju_user_warning(lambda message: None)  # else MuJoCo writes to the screen and to ./MUJOCO_LOG.TXT
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # every -v4 announces -v5
            env = gym.make(env_id, disable_env_checker=True, **options)
    except (gym.error.Error, ImportError, ValueError) as error:
        near = difflib.get_close_matches(env_id, list(gym.registry), n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near and env_id not in near else ""
        raise UserError(f"cannot make the environment {env_id!r}: {first_line(error)}{hint}") from None
    if not isinstance(env.observation_space, gym.spaces.Box):
        raise UserError(f"{env_id} has observations of type {env.observation_space}; only a Box is supported.")
    space = env.action_space
    if not isinstance(space, gym.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UserError(f"{env_id} has actions of type {space}; only a continuous Box is supported.")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UserError(f"{env_id} has unbounded actions, {space}; only a bounded Box is supported.")
    return env


def first_line(error: BaseException) -> str:
    """What an error says, in one line; of a failed write, what the system said of it."""
    while not isinstance(error, OSError | UserError | TrainingError) and isinstance(error.__context__, OSError):
        error = error.__context__
    return (str(error).splitlines() or [repr(error)])[0]


def flatten(obs) -> np.ndarray:
    """Any Box observation as float32 (O,); raises TrainingError if it is not finite."""
    obs = np.array(obs, dtype=np.float32).reshape(-1)  # a copy: environments may reuse their array
    if not np.isfinite(obs).all():
        raise TrainingError("the environment returned a non-finite observation")
    return obs


def rescale_action(action: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Actions (..., A) in [-1, 1] -> the environment's bounds low, high (A,)."""
    return np.clip(low + (action + 1) * 0.5 * (high - low), low, high)


FLOAT32_MAX = float(np.finfo(np.float32).max)  # rewards are stored as float32


class FlatEnv:
    """An environment as this file sees it: observations (O,) float32, actions (A,) in [-1, 1]."""

    def __init__(self, env_id: str, **options):
        self.env = make_env(env_id, **options)
        space = self.env.action_space
        self.low, self.high, self.shape = space.low.reshape(-1), space.high.reshape(-1), space.shape
        self.obs_dim, self.action_dim = int(np.prod(self.env.observation_space.shape)), len(self.low)

    def reset(self, **options) -> np.ndarray:
        return flatten(self.env.reset(**options)[0])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        action = rescale_action(action, self.low, self.high).astype(self.env.action_space.dtype).reshape(self.shape)
        obs, reward, terminated, truncated, _ = self.env.step(action)
        if not abs(reward) < FLOAT32_MAX:
            raise TrainingError(f"the environment returned a non-finite reward ({reward})")
        return flatten(obs), float(reward), bool(terminated), bool(truncated)

    def random_state(self) -> str:
        """The state of the environment's random numbers, as JSON."""
        return json.dumps(self.env.unwrapped.np_random.bit_generator.state)

    def replay_episode(self, random_state: str, actions: list[np.ndarray]) -> np.ndarray:
        """Reset from a saved random state and repeat an episode's actions: exact for a deterministic environment."""
        self.env.reset(seed=0)  # makes the generator that gets the saved state
        self.env.unwrapped.np_random.bit_generator.state = json.loads(random_state)
        obs = self.reset()
        for action in actions:
            obs = self.step(action)[0]
        return obs
# --- end shared ---


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation and value bias, in worker processes
# ----------------------------------------------------------------------------------------------------------------------
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


@torch.inference_mode()
def mean_q(critic: nn.Module, obs: np.ndarray, action: np.ndarray, beta: float) -> np.ndarray:
    """The ensemble's mean: obs (B, O), action (B, A) -> (B,)."""
    log_beta = torch.full((len(obs), 1), math.log(beta))
    return critic(torch.from_numpy(obs), torch.from_numpy(action), log_beta).mean(0).numpy()


def measured_policy(args: Args, actor: nn.Module, obs: np.ndarray, beta: float, noise: np.ndarray, continuing: bool):
    """The policy of which the value bias is measured, while collecting pairs and in their continuations: stochastic."""
    return policy(actor, obs, beta, noise)


@torch.no_grad()
def alphas(learner: Learner, conditions: list[float]) -> list[float]:
    """alpha(beta_i) of the evaluated betas."""
    temperature, log_beta = learner.networks["temperature"], torch.tensor(conditions).log()[:, None]
    return temperature(temperature.views(learner.copy_of("temperature")), log_beta).exp().tolist()


# --- shared: evaluation ---
WORKER_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
BIAS_PAIRS, BIAS_CHOSEN, BIAS_CONTINUATIONS, BIAS_STEPS = 100, 20, 20, 1500


def seeds_for(seed: int, purpose: int, count: int) -> list[int]:
    """`count` environment seeds of a run; purpose 0: evaluation, 1: fresh episodes, 2 and up: value bias."""
    return [int(s) for s in np.random.SeedSequence([seed, purpose]).generate_state(count)]


def play_returns(envs, actor, condition, seeds) -> np.ndarray:
    """Undiscounted returns (E,) of one deterministic episode from each seed, all E in step.

    The batch keeps its size when episodes end: another batch size would change the last bits of the actions.
    """
    obs = np.stack([env.reset(seed=seed) for env, seed in zip(envs, seeds, strict=True)])
    returns, running = np.zeros(len(envs)), np.ones(len(envs), bool)
    while running.any():
        actions, _ = policy(actor, obs, condition)
        for i in np.flatnonzero(running):
            obs[i], reward, terminated, truncated = envs[i].step(actions[i])
            returns[i] += reward
            running[i] = not (terminated or truncated)
    return returns


def measure_bias(args, env, endless_envs, actor, critic, condition, alpha, seed) -> tuple[float, float]:
    """Mean and std over pairs of the normalised value bias (equation 22) of the policy `condition`.

    `env` has its time limit, `endless_envs` (one for each continuation) have none; alpha is the policy's temperature.
    """
    rng, pairs, episode = np.random.default_rng(seed), [], 0
    while len(pairs) < BIAS_PAIRS:
        episode, actions, done = episode + 1, [], False
        obs = env.reset(seed=seed + episode)
        while not done and len(pairs) < BIAS_PAIRS:
            noise = rng.standard_normal((1, env.action_dim), np.float32)
            action, _ = measured_policy(args, actor, obs[None], condition, noise, continuing=False)
            actions = [*actions, action[0]]
            pairs.append((seed + episode, actions, mean_q(critic, obs[None], action, condition)[0]))
            obs, _, terminated, truncated = env.step(action[0])
            done = terminated or truncated
    chosen = [pairs[i] for i in rng.choice(BIAS_PAIRS, BIAS_CHOSEN, replace=False)]
    returns = np.array([monte_carlo_return(args, endless_envs, actor, condition, alpha, episode_seed, actions, rng)
                        for episode_seed, actions, _ in chosen])  # fmt: skip
    bias = (np.array([float(q) for _, _, q in chosen]) - returns) / abs(returns.mean())
    return float(bias.mean()), float(bias.std())


def monte_carlo_return(args, envs, actor, condition, alpha, episode_seed, actions, rng) -> float:
    """Mean discounted return of len(envs) continuations of a state-action pair, reached by repeating its episode.

    From the second step on a continuation's return includes -alpha log pi, which is what a soft Q predicts (alpha is 0
    where Q is not soft).
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
            obs[i], reward, terminated, _ = envs[i].step(batch[i])
            returns[i] += discount * (reward - alpha * log_prob[i])
            running[i] = not terminated
        if not running.any():
            break
        discount *= args.gamma
        noise = rng.standard_normal((len(envs), len(actions[0])), np.float32)
        batch, log_prob = measured_policy(args, actor, obs, condition, noise, continuing=True)
    return float(returns.mean())


def record_episode(args: Args, actor, condition, run_dir: Path, name: str) -> None:
    """One deterministic episode into run_dir/videos, rendered off screen; raises UserError if it cannot be."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        env = FlatEnv(args.env_id, render_mode="rgb_array")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            name = f"{name}-{CONDITION}-{condition:.4g}"
            env.env = gym.wrappers.RecordVideo(env.env, str(run_dir / "videos"), name_prefix=name, disable_logger=True)
            play_returns([env], actor, condition, seeds_for(args.seed, 0, 1))
            env.env.close()
    except Exception as error:  # drivers, codecs and renderers fail in their own ways
        raise UserError(f"no video could be recorded: {first_line(error)}.") from None


class Player:
    """Plays the tasks of evaluations, with the same numbers in a worker process and in the training process."""

    def __init__(self, args: Args, seeds: list[int]):
        self.args, self.seeds, self.conditions, self.envs, self.endless_envs = args, seeds, eval_conditions(args), [], []

    def play(self, step: int, kind: str, i: int, actor: torch.Tensor, critic: torch.Tensor | None, alpha: float):
        """The returns (E,) of policy i with the parameters actor (P,), or, where kind is bias, its value bias (mean, std)."""
        args, threads, precision = self.args, torch.get_num_threads(), torch.get_float32_matmul_precision()
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        try:
            if not self.envs:
                self.envs = [FlatEnv(args.env_id) for _ in range(args.eval_episodes)]
                self.networks = build_networks(args, self.envs[0].obs_dim, self.envs[0].action_dim)
            actor = self.networks["actor"].bind(actor)
            if kind == "returns":
                return play_returns(self.envs, actor, self.conditions[i], self.seeds)
            if not self.endless_envs:
                self.endless_envs = [FlatEnv(args.env_id, max_episode_steps=-1) for _ in range(BIAS_CONTINUATIONS)]
            critic, seed = self.networks["critic"].bind(critic), seeds_for(args.seed, 2 + step, 1)[0]
            return measure_bias(args, self.envs[0], self.endless_envs, actor, critic, self.conditions[i], alpha, seed)
        except Exception as error:
            raise TrainingError(f"the evaluation of step {step} failed: {first_line(error)}") from error
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)


def work(connection, args: Args, seeds: list[int]) -> None:
    """A worker process: plays the tasks that come through the pipe, one at a time, until the pipe closes."""
    if hasattr(os, "nice"):
        os.nice(10)  # training goes first: its threads wait for each other; at 19 the workers would starve
    tasks, player = queue.SimpleQueue(), Player(args, seeds)

    def receive() -> None:
        try:
            while True:  # always empties the pipe: weights do not fit into it, and training must not wait to send them
                tasks.put(connection.recv())
        finally:
            os._exit(0)  # training has ended, or was killed

    threading.Thread(target=receive, daemon=True).start()
    connection.send((None, None))  # ready
    while True:
        task, actor, critic, alpha = tasks.get()
        try:
            result = player.play(*task, torch.from_numpy(actor), None if critic is None else torch.from_numpy(critic), alpha)
        except TrainingError as error:
            result = str(error)
        connection.send((task, result))


class Evaluator:
    """Plays evaluations in args.eval_workers processes beside training and hands them back whole, in step order.

    Without workers, poll() plays one policy at a time in this process.

    An evaluation is a dict: step, wall_seconds, actor (P,), alphas [H] (empty without temperature) and critic (P,), or None
    where no bias is due.
    The smallest unit of work is a policy with all its episodes, so results do not depend on the number of workers.
    """

    def __init__(self, args: Args, seeds: list[int], say):
        self.args, self.seeds, self.say, self.conditions = args, seeds, say, eval_conditions(args)
        self.pending, self.tasks, self.deaths, self.workers, self.player = [], deque(), 0, [], Player(args, seeds)

    def __enter__(self):
        self.workers = [self._start_worker() for _ in range(self.args.eval_workers)]
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker["connection"].close()
            worker["process"].kill()
            worker["process"].join()

    def submit(self, evaluation: dict) -> None:
        """Queue an evaluation; steps must grow from call to call."""
        self.pending.append({**evaluation, "returns": {}, "bias": None})
        self.tasks.extend((evaluation["step"], "returns", i) for i in range(len(self.conditions)))
        self._dispatch()

    def poll(self, seconds: float = 0.0) -> list[dict]:
        """Wait up to `seconds` for results; return the evaluations that are complete, in step order."""
        if not self.workers and self.tasks:
            task = self.tasks.popleft()
            self._accept(*task, self.player.play(*task, *self._inputs(*task)))
        by_connection = {worker["connection"]: worker for worker in self.workers}
        for connection in wait_for_connections(list(by_connection), seconds) if by_connection else ():
            worker = by_connection[connection]
            try:
                task, result = connection.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            worker["tasks"].remove(task)
            if isinstance(result, str):
                raise TrainingError(result)
            if task:
                self.deaths = 0
                self._accept(*task, result)
        self._dispatch()
        finished = []
        while self.pending and len(self.pending[0]["returns"]) == len(self.conditions) and (
            self.pending[0]["critic"] is None or self.pending[0]["bias"]
        ):
            finished.append(self.pending.pop(0))
        return finished

    def _start_worker(self) -> dict:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, self.args, self.seeds), daemon=True)
        saved, can_mask = {name: os.environ.get(name) for name in WORKER_ENVIRONMENT}, hasattr(signal, "pthread_sigmask")
        os.environ.update(WORKER_ENVIRONMENT)
        if can_mask:  # inherited by the worker: Ctrl-C in a terminal is for training alone
            resource_tracker.ensure_running()  # its start would unblock the signals
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            process.start()
        finally:
            for name, value in saved.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            if can_mask:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return {"process": process, "connection": ours, "tasks": [None]}  # None: it has not said yet that it is ready

    def _inputs(self, step: int, kind: str, i: int) -> tuple:
        """Actor (P,), critic (P,) or None, and temperature of a task."""
        evaluation = next(e for e in self.pending if e["step"] == step)
        alpha = evaluation["alphas"][i] if evaluation["alphas"] else 0.0
        return evaluation["actor"], evaluation["critic"] if kind == "bias" else None, alpha

    def _accept(self, step: int, kind: str, i: int, result) -> None:
        evaluation = next(e for e in self.pending if e["step"] == step)
        if kind == "bias":
            evaluation["bias"] = result
            return
        evaluation["returns"][i] = result
        if evaluation["critic"] is not None and len(evaluation["returns"]) == len(self.conditions):
            self.tasks.append((step, "bias", best_policy(evaluation)))

    def _dispatch(self) -> None:
        for depth in (1, 2):  # a second task waits at the worker, so that no worker waits for the next poll
            for worker in list(self.workers):
                if self.tasks and len(worker["tasks"]) < depth and None not in worker["tasks"]:
                    task = self.tasks.popleft()
                    worker["tasks"].append(task)
                    actor, critic, alpha = self._inputs(*task)
                    try:
                        worker["connection"].send((task, actor.numpy(), None if critic is None else critic.numpy(), alpha))
                    except OSError:
                        self._replace(worker)

    def _replace(self, worker: dict) -> None:
        index, self.deaths = self.workers.index(worker), self.deaths + 1
        worker["process"].join(1)
        worker["process"].kill()
        worker["process"].join()
        name = f"evaluation worker {index} (process {worker['process'].pid}) died with exit code {worker['process'].exitcode}"
        if self.deaths > 3 * self.args.eval_workers:
            raise TrainingError(f"{name}, after {self.deaths - 1} other deaths of evaluation workers")
        self.say(f"{name}; its evaluation is repeated")
        self.tasks.extendleft(reversed([task for task in worker["tasks"] if task]))
        worker["connection"].close()
        self.workers[index] = self._start_worker()


def best_policy(evaluation: dict) -> int:
    """The index of the policy with the highest average return."""
    return int(np.argmax([evaluation["returns"][i].mean() for i in range(len(evaluation["returns"]))]))


def eval_columns(conditions: list[float]) -> list[str]:
    """The columns of eval.csv."""
    per_policy = [f"{what}_{c:.6g}" for what in PER_POLICY for c in conditions]
    best = ["best_return", "best_return_std", f"best_{CONDITION}"]
    return ["step", "wall_seconds", *best, "bias_mean", "bias_std", *per_policy]


def eval_row(evaluation: dict, conditions: list[float]) -> dict:
    """A finished evaluation as a row of eval.csv; the std over the best policy's episodes is the population one."""
    returns, best = evaluation["returns"], best_policy(evaluation)
    row = [evaluation["step"], round(evaluation["wall_seconds"], 1), float(returns[best].mean()), float(returns[best].std()),
           conditions[best], *(evaluation["bias"] or (None, None)),
           *(float(returns[i].mean()) for i in range(len(conditions))), *evaluation["alphas"]]  # fmt: skip
    return dict(zip(eval_columns(conditions), row, strict=True))
# --- end shared ---


# ----------------------------------------------------------------------------------------------------------------------
# Run directory, logging and checkpoint
# ----------------------------------------------------------------------------------------------------------------------
# --- shared: run directory ---
LOSSES = tuple(name for name in METRICS if name != "updates")
TRAIN_COLUMNS = ("step", "wall_seconds", "sps", *LOSSES, "episodic_return", "episodic_length")
SCRIPT = Path(__file__).stem


def write_whole(path: Path, write) -> None:
    """Write a file so that at every moment `path` is the old or the new one, whole: temporary name, fsync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_config(run_dir: Path, args: Args, device: torch.device) -> None:
    """config.json: all arguments, versions, git commit (with -dirty where files differ from it) and device."""
    versions, commit = {"python": platform.python_version()}, None
    for package in ("torch", "gymnasium", "mujoco", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    processor = f"{platform.processor() or platform.machine()}, {usable_cores()} cores"
    config = {"script": SCRIPT, "args": dataclasses.asdict(args), "versions": versions, "git_commit": commit,
              "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor}  # fmt: skip
    write_whole(run_dir / "config.json", lambda file: file.write(json.dumps(config, indent=2).encode()))


def create_run_dir(args: Args, device: torch.device) -> Path:
    """Make the run directory with its config.json in one rename; raises UserError if it exists or cannot be made."""
    name = args.run_name or f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_").replace(":", "_")
    run_dir = Path(args.run_root) / name
    temporary = run_dir.with_name(f".{name}.{os.getpid()}")
    try:
        if os.path.exists(run_dir):  # Path.exists raises where it may not look
            raise FileExistsError
        temporary.mkdir(parents=True)
        write_config(temporary, args, device)
        temporary.rename(run_dir)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if os.path.exists(run_dir):
            raise UserError(f"{run_dir} exists already; go on with --resume {run_dir}, or choose another run_name.") from None
        raise UserError(f"run_root {args.run_root!r} cannot be written: {error.strerror}.") from None
    return run_dir


def lock(run_dir: Path) -> filelock.FileLock:
    """Hold the run directory for this process; raises UserError when another process has it."""
    held = filelock.FileLock(run_dir / ".lock")
    try:
        held.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"{run_dir} is in use by another process.") from None
    except OSError as error:
        raise UserError(f"{run_dir} cannot be written: {error.strerror}.") from None
    return held


def append_row(path: Path, columns, row: dict) -> None:
    """Append one row to a CSV file, with the header where the file is new."""
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def saved_args(path: Path, content: dict) -> Args:
    """The arguments in a config or checkpoint; raises UserError if they are another script's or version's."""
    if content["script"] != SCRIPT:
        raise UserError(f"{path} was written by {content['script']}.py; use that script instead of {SCRIPT}.py.")
    if set(content["args"]) != {field.name for field in dataclasses.fields(Args)}:
        raise UserError(f"{path} was written by another version of {SCRIPT}.py: its arguments differ.")
    return Args(**content["args"])


def load_config(run_dir: Path) -> Args:
    """The arguments in config.json; raises UserError if it is missing, damaged or another script's."""
    path = run_dir / "config.json"
    try:
        return saved_args(path, json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is missing or damaged; give the directory of a run.") from None


def tell_unused(given: Args, saved: dict, used: tuple[str, ...]) -> None:
    """Say which of the given arguments have no effect, because those that a run was saved with win."""
    names = [f.name for f in dataclasses.fields(given) if f.name not in used]
    names = [name for name in names if getattr(given, name) not in (getattr(Args, name, None), saved.get(name))]
    if names:
        print(f"not used, because the arguments that the run was saved with win: {', '.join(names)}", file=sys.stderr)


def load_checkpoint(run_dir: str | Path) -> dict:
    """The checkpoint of a run directory, on the CPU; raises UserError if it is missing, damaged or another script's.

    Only tensors and plain Python are accepted (weights_only), so a stranger's checkpoint cannot run code.
    """
    path = Path(run_dir) / "checkpoint.pt"
    if not os.path.exists(path):
        raise UserError(f"{path} does not exist; give the directory of a run that has written a checkpoint.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        args = saved_args(path, checkpoint)
        state = Learner(dataclasses.replace(args, buffer_size=1, compile=False), checkpoint["obs_dim"],
                        checkpoint["action_dim"], torch.device("cpu")).state  # fmt: skip
        shapes = {name: tensor.shape for name, tensor in checkpoint["state"].items()}
    except UserError:
        raise
    except Exception:
        raise UserError(f"{path} is damaged or not a checkpoint of this project.") from None
    if shapes != {name: tensor.shape for name, tensor in state.items()}:
        raise UserError(f"{path} is damaged: its networks do not have the shapes that its arguments say.")
    return checkpoint


def load_policy(run_dir: str | Path):
    """The trained family of a run as a function for deployment: action = act(obs, condition).

    obs (O,) or (B, O) -> action (A,) or (B, A), deterministic and within the environment's bounds. Without condition it
    plays the best one of the last evaluation. Needs no environment. Raises UserError without a readable checkpoint.
    """
    checkpoint = load_checkpoint(run_dir)
    networks = build_networks(Args(**checkpoint["args"]), checkpoint["obs_dim"], checkpoint["action_dim"])
    actor = networks["actor"].bind(checkpoint["state"]["actor"].clone())
    best = checkpoint["last_evaluation"].get(f"best_{CONDITION}")
    low, high = checkpoint["action_low"].numpy().copy(), checkpoint["action_high"].numpy().copy()

    def act(obs: np.ndarray, condition: float | None = best) -> np.ndarray:
        if condition is None:
            raise UserError(f"this run has not finished an evaluation yet; name the {CONDITION} to play.")
        obs = np.asarray(obs, np.float32)
        action = rescale_action(policy(actor, np.atleast_2d(obs), condition)[0], low, high)
        return action[0] if obs.ndim == 1 else action

    return act


def start_tracking(args: Args, run_dir: Path, say):
    """A Weights & Biases run that a resumed run continues; offline when there is no key or no network."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb  # slow to import, and only needed here

    identity, offline = run_dir / "wandb_id", None
    if not identity.exists():
        write_whole(identity, lambda file: file.write(secrets.token_hex(4).encode()))
    settings = wandb.Settings(silent=True, console="off", init_timeout=20)
    options = {
        "project": args.wandb_project_name, "entity": args.wandb_entity, "config": dataclasses.asdict(args),
        "name": run_dir.name, "id": identity.read_text(), "resume": "allow", "dir": str(run_dir), "settings": settings,
    }  # fmt: skip
    try:
        if os.environ.get("WANDB_MODE", "online") == "online":
            try:
                offline = None if wandb.login(prompt=False, verify=False) else "no API key"
                run = None if offline else wandb.init(**options)
            except wandb.errors.CommError as error:
                offline = first_line(error)
        else:
            run = wandb.init(**options)
        if offline:
            say(f"Weights & Biases is offline ({offline}); upload later with: wandb sync {run_dir}/wandb/offline-run-*")
            wandb.teardown()  # or else the failed start holds the run's id
            run = wandb.init(mode="offline", **options)
        elif run.url:
            say(f"Weights & Biases: {run.url}")
    except Exception as error:  # a wrong project name, a service that does not start: not worth losing the run
        say(f"Weights & Biases does not start, and the run goes on without it: {first_line(error)}")
        return None
    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")  # evaluations come later than their step
    run.log_code(str(Path(__file__).parent), include_fn=lambda path: Path(path).name == Path(__file__).name)
    return run


def wandb_names(row: dict) -> dict:
    """A row of train.csv or eval.csv under CleanRL's metric names, without its empty cells."""
    charts = {"sps": "charts/SPS", "episodic_return": "charts/episodic_return", "episodic_length": "charts/episodic_length"}
    prefix = "eval/" if "best_return" in row else "losses/"
    named = {charts.get(k, prefix + k): v for k, v in row.items() if v is not None and k not in ("step", "wall_seconds")}
    return {"global_step": row["step"], "charts/wall_seconds": row["wall_seconds"], **named}


def memory_of(device: torch.device) -> float:
    """Bytes of memory that the device has; infinity where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


def compiler_works(device: torch.device) -> bool:
    """Whether torch.compile can build a function here: it needs a C++ compiler on the CPU, Triton on a GPU."""
    try:
        torch.compile(lambda x: (x + 1).relu())(torch.ones(16, device=device))
        return True
    except Exception:
        return False


def set_up_torch(args: Args, device: torch.device) -> None:
    """Process-wide settings: determinism, memory allocation, precision."""
    if args.compile:
        from torch._inductor import config  # takes a second, which evaluation workers and --no-compile need not spend

        torch.compiler.reset()  # what earlier runs of this process compiled would count against the limit of recompilations
        config.shape_padding = False  # this and the next choose kernels by timing them: not the same bits twice
        config.dynamic_scale_rblock = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a pass over every new tensor, finds only bugs
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        # Keep freed memory: by default every 2.6 MB temporary goes back to the system and page-faults on its next use.
        ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    precision = args.matmul_precision
    if precision == "auto":
        precision = "highest"
        if device.type == "cpu":
            # "medium" lets oneDNN do batched products: faster, and exact float32 unless the processor has AMX. Measured.
            a, b = torch.randn(2, 2, 256, 256, generator=torch.Generator().manual_seed(0))
            torch.set_float32_matmul_precision("medium")
            exact = a.double() @ b.double()
            if float((torch.bmm(a, b) - exact).norm() / exact.norm()) < 1e-6:
                precision = "medium"
    torch.set_float32_matmul_precision(precision)
# --- end shared ---


# ----------------------------------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------------------------------
# --- shared: training ---
def train(args: Args) -> dict:
    """Train, or go on with args.resume; return a summary: run_dir, global_step, completed, best_return and others.

    Raises UserError for arguments or files that cannot be used, before anything is written, and TrainingError when
    training cannot go on.
    """
    with contextlib.ExitStack() as stack:
        stopped_by = stack.enter_context(caught_signals())
        run_dir, checkpoint, asked = None, None, args.total_timesteps
        if args.resume is not None:
            run_dir = Path(args.resume)
            load_config(run_dir)  # a run directory at all? then it may be held, and read again
            stack.enter_context(lock(run_dir))
            given, args = args, load_config(run_dir)
            tell_unused(given, dataclasses.asdict(args), ("resume", "total_timesteps"))
            if asked is not None and asked < args.total_timesteps:
                raise UserError(f"total_timesteps is {asked}; on resuming it may only grow, from {args.total_timesteps}.")
            args.total_timesteps = asked or args.total_timesteps
            if any((run_dir / name).exists() for name in ("checkpoint.pt", "eval.csv", "train.csv")):
                checkpoint = load_checkpoint(run_dir)
                may_differ = ("total_timesteps", "compile", "eval_workers", "checkpoint_seconds", "track")
                for name, value in checkpoint["args"].items():
                    if name not in may_differ and value != getattr(args, name):
                        raise UserError(f"{run_dir}/checkpoint.pt and config.json are of different runs: {name} differs.")
        args = check_args(args)
        device = torch.device("cuda" if args.cuda is not False and torch.cuda.is_available() else "cpu")
        env = FlatEnv(args.env_id)
        if checkpoint and (checkpoint["obs_dim"], checkpoint["action_dim"]) != (env.obs_dim, env.action_dim):
            raise UserError(f"{run_dir}/checkpoint.pt does not have the shapes of {args.env_id}.")
        if checkpoint and checkpoint["device"] != device.type:
            raise UserError(f"{run_dir} was trained on {checkpoint['device']}; it cannot go on exactly on {device.type}.")
        if getattr(args, "target_entropy", 0.0) is None:
            args.target_entropy = -float(env.action_dim)
        set_up_torch(args, device)
        torch.set_num_threads(checkpoint["threads"] if checkpoint else default_threads())
        if args.compile and not compiler_works(device):
            warnings.warn("torch.compile does not work here (no compiler?): going on without it, slower.", stacklevel=1)
            args.compile = False
        learner = Learner(args, env.obs_dim, env.action_dim, device)
        if run_dir is None:
            run_dir = create_run_dir(args, device)
            stack.enter_context(lock(run_dir))
        try:
            write_config(run_dir, args, device)
            return run_training(args, run_dir, checkpoint, env, learner, stopped_by)
        except OSError as error:
            raise TrainingError(f"{run_dir} cannot be written: {first_line(error)}; its last checkpoint is kept.") from None


@contextlib.contextmanager
def caught_signals():
    """A list to which SIGINT and SIGTERM are appended instead of ending the program (in its main thread)."""
    caught = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda number, frame: caught.append(number)) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def run_training(args, run_dir: Path, checkpoint: dict | None, env: FlatEnv, learner: Learner, stopped_by: list) -> dict:
    """The training loop, in a run directory held by this process."""
    eval_csv, train_csv, conditions = run_dir / "eval.csv", run_dir / "train.csv", eval_conditions(args)
    step, elapsed, last, tracker, saved_step, saved_time, is_saved = 0, 0.0, {}, None, None, time.time(), False
    episode = {"random_state": "", "actions": [], "return": 0.0}
    pending, outcome = [], 1
    if checkpoint:
        step, elapsed, last, pending = (checkpoint[k] for k in ("global_step", "wall_seconds", "last_evaluation", "pending"))
        episode, saved_step = {**checkpoint["episode"], "actions": list(checkpoint["episode"]["actions"].clone().numpy())}, step
        for path, size in ((eval_csv, checkpoint["eval_bytes"]), (train_csv, checkpoint["train_bytes"])):
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)  # what came after the checkpoint will come again
        learner.load(checkpoint)
        pending = [{k: v.clone() if torch.is_tensor(v) else v for k, v in e.items()} for e in pending]
    start = time.time() - elapsed
    bar = tqdm(total=args.total_timesteps, initial=step, unit="step", dynamic_ncols=True, smoothing=0.05,
               desc=run_dir.name[:40], mininterval=0.5 if sys.stderr.isatty() else 30)  # fmt: skip

    def say(message: str) -> None:
        tqdm.write(message, file=sys.stderr)

    def last_good() -> str:
        return "there is no checkpoint" if saved_step is None else f"the last good checkpoint is of step {saved_step}"

    def finish(evaluations: list[dict]) -> None:
        for evaluation in evaluations:
            row = eval_row(evaluation, conditions)
            append_row(eval_csv, eval_columns(conditions), row)
            last.update({k: row[k] for k in ("step", "best_return", "best_return_std", f"best_{CONDITION}")})
            if tracker:
                tracker.log(wandb_names(row))
        if last:
            best = f"{CONDITION} {last[f'best_{CONDITION}']:.3g}"
            text = f"evaluated {last['best_return']:.1f} at {best}, step {last['step']}"
            bar.set_postfix_str(text, refresh=False)

    def save() -> None:
        nonlocal saved_step, saved_time, is_saved
        learner.check_finite()
        actions = np.array(episode["actions"], np.float32).reshape(-1, env.action_dim)
        content = {
            "script": SCRIPT, "args": dataclasses.asdict(args), "global_step": step, "wall_seconds": time.time() - start,
            "obs_dim": env.obs_dim, "action_dim": env.action_dim, "action_low": torch.from_numpy(env.low.copy()),
            "action_high": torch.from_numpy(env.high.copy()), "threads": torch.get_num_threads(),
            "episode": {**episode, "actions": torch.from_numpy(actions)}, "obs": torch.from_numpy(obs),
            "eval_bytes": eval_csv.stat().st_size if eval_csv.exists() else 0,
            "train_bytes": train_csv.stat().st_size if train_csv.exists() else 0, "last_evaluation": dict(last),
            "pending": [{k: e[k] for k in ("step", "wall_seconds", "alphas", "actor", "critic")} for e in evaluator.pending],
            **learner.content(step),
        }  # fmt: skip
        try:
            is_saved = False
            write_whole(run_dir / "checkpoint.pt", lambda file: torch.save(content, file))
            saved_step, is_saved = step, True
        except (OSError, RuntimeError) as error:
            say(f"no checkpoint could be written at step {step} ({first_line(error)}); {last_good()}")
        saved_time = time.time()

    try:
        if args.track:
            tracker = start_tracking(args, run_dir, say)
        with Evaluator(args, seeds_for(args.seed, 0, args.eval_episodes), say) as evaluator:
            for evaluation in pending:
                evaluator.submit(evaluation)
            finish([])
            if checkpoint:
                obs = env.replay_episode(episode["random_state"], episode["actions"])
                if not np.array_equal(obs, checkpoint["obs"].numpy()):
                    say(f"{args.env_id} is not deterministic: the run goes on, but not exactly as it would have")
                checkpoint.clear()  # lets go of the file, which the next checkpoint replaces
            else:
                env.reset(seed=args.seed)
                episode["random_state"] = env.random_state()
                obs = env.reset()
                save()  # so that a run that has rows has a checkpoint
            row_step, row_time = step, time.time()
            while step < args.total_timesteps and not stopped_by:
                action = learner.random_action() if step < args.learning_starts else learner.act(obs)
                next_obs, reward, terminated, truncated = env.step(action)
                learner.store(step, obs, action, reward, terminated, next_obs)
                episode["actions"].append(action)
                episode["return"] += reward
                obs, step, done = next_obs, step + 1, terminated or truncated
                if step > args.learning_starts:
                    learner.update(step)
                bar.update()
                if done or step % 1000 == 0 or step == args.total_timesteps:
                    row = dict.fromkeys(TRAIN_COLUMNS)
                    row.update(step=step, wall_seconds=round(time.time() - start, 1), **learner.read_metrics())
                    row["sps"] = round((step - row_step) / max(time.time() - row_time, 1e-9), 2)
                    if done:
                        row.update(episodic_return=episode["return"], episodic_length=len(episode["actions"]))
                    append_row(train_csv, TRAIN_COLUMNS, row)
                    if tracker:
                        tracker.log(wandb_names(row))
                    row_step, row_time = step, time.time()
                if done:
                    episode = {"random_state": env.random_state(), "actions": [], "return": 0.0}
                    obs = env.reset()  # never stored as a next_obs: the row above holds the episode's own last observation
                learned = step - args.learning_starts
                if (learned >= 0 and learned % args.eval_frequency == 0) or step == args.total_timesteps:
                    bias_due = args.bias_frequency and learned % args.bias_frequency == 0
                    evaluator.submit({
                        "step": step, "wall_seconds": time.time() - start, "actor": learner.copy_of("actor"),
                        "alphas": alphas(learner, conditions),
                        "critic": learner.copy_of("critic") if bias_due else None,
                    })  # fmt: skip
                finish(evaluator.poll())
                if len(evaluator.pending) > 2 * args.eval_workers:
                    bar.set_description_str("training waits for evaluations")
                    while len(evaluator.pending) > 2 * args.eval_workers and not stopped_by:
                        finish(evaluator.poll(1.0))
                    bar.set_description_str(run_dir.name[:40], refresh=False)
                if time.time() - saved_time >= args.checkpoint_seconds:
                    save()
            if not stopped_by:
                save()
            if evaluator.pending:
                bar.set_description_str("collecting the last evaluations")
            while evaluator.pending and not stopped_by:
                finish(evaluator.poll(1.0))
            save()
            completed = step == args.total_timesteps and not evaluator.pending
        if not is_saved:
            raise TrainingError("the final checkpoint could not be written")
        if completed and args.capture_video:
            try:
                actor = learner.networks["actor"].bind(learner.copy_of("actor"))
                record_episode(args, actor, last[f"best_{CONDITION}"], run_dir, f"step-{step}")
            except UserError as error:
                say(str(error))
        outcome = 0 if completed else 255  # wandb's own exit code of an interrupted run
    except Exception as error:
        known = isinstance(error, TrainingError | OSError | torch.OutOfMemoryError)
        if not known and not stopped_by:
            raise
        # Ctrl-C in a terminal also ends the compiler that torch has started: that step is not whole and cannot be saved.
        what = first_line(error) if known else f"interrupted in the middle of a step ({first_line(error)})"
        raise TrainingError(f"stopped at step {step}: {what}; {last_good()} in {run_dir}.") from None
    finally:
        bar.close()
        if tracker:
            tracker.finish(exit_code=outcome)
    return {"run_dir": str(run_dir), "global_step": step, "completed": completed, "wall_seconds": time.time() - start,
            "signal": stopped_by[0] if stopped_by else None, **{k: v for k, v in last.items() if k != "step"}}  # fmt: skip


def evaluate_run(asked: Args) -> None:
    """Print condition -> return +- std of the policies in asked.evaluate on fresh episodes, and write it into evaluate.csv.

    The policy that was best in training is marked: its return here is free of the maximum's upward bias.
    """
    run_dir, checkpoint = asked.evaluate, load_checkpoint(asked.evaluate)
    tell_unused(asked, checkpoint["args"], ("evaluate", "capture_video"))
    args, state, step = Args(**checkpoint["args"]), checkpoint["state"], checkpoint["global_step"]
    FlatEnv(args.env_id).env.close()  # a missing environment is the user's to mend, not a worker's to die of
    conditions, finished = eval_conditions(args), []
    with Evaluator(args, seeds_for(args.seed, 1, args.eval_episodes), print) as evaluator:
        evaluator.submit({"step": step, "actor": state["actor"], "critic": None, "alphas": conditions})
        while not finished:
            finished = evaluator.poll(1.0)
    best = checkpoint["last_evaluation"].get(f"best_{CONDITION}", conditions[best_policy(finished[0])])
    print(f"{args.env_id}, step {step}, {args.eval_episodes} fresh episodes per {CONDITION}")
    print(f"{CONDITION:>10} {'return':>10} {'std':>9}")
    lines = [f"step,{CONDITION},return,return_std,best_in_training"]
    for i, condition in enumerate(conditions):
        returns, mark = finished[0]["returns"][i], "  <- best in training" if condition == best else ""
        print(f"{condition:10.4f} {returns.mean():10.1f} {returns.std():9.1f}{mark}")
        lines.append(f"{step},{condition:.6g},{returns.mean()},{returns.std()},{int(condition == best)}")
    try:
        write_whole(Path(run_dir) / "evaluate.csv", lambda file: file.write("\n".join([*lines, ""]).encode()))
    except OSError as error:
        print(f"evaluate.csv could not be written: {first_line(error)}", file=sys.stderr)
    if asked.capture_video:
        networks = build_networks(args, checkpoint["obs_dim"], checkpoint["action_dim"])
        record_episode(args, networks["actor"].bind(state["actor"]), best, Path(run_dir), f"evaluate-step-{step}")
        print(f"recorded {CONDITION} {best:.4g} in {Path(run_dir) / 'videos'}")


def main() -> None:
    """The command line: errors of the user are one sentence and exit code 2, failures of training exit code 1."""
    args = tyro.cli(Args, description=__doc__)
    try:
        if args.evaluate is not None and args.resume is not None:
            raise UserError("evaluate and resume were both given; choose one of them.")
        if args.evaluate is not None:
            evaluate_run(args)
            return
        summary = train(args)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (UserError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    if not summary["completed"]:
        command = shlex.join(["python", sys.argv[0], "--resume", summary["run_dir"]])
        print(f"stopped at step {summary['global_step']}; go on with: {command}", file=sys.stderr)
        sys.exit(128 + summary["signal"])
# --- end shared ---


if __name__ == "__main__":
    main()
