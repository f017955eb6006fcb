"""MBPO (Janner, Fu, Zhang, Levine 2019): SAC of Stable-Baselines3 on short rollouts of a learned model.

Here are the dynamics ensemble, its training with early stopping, the rollouts, the environments' termination functions and the
mixing of real and model transitions; constants are those of the authors' program. `baselines.py --algorithm mbpo` runs it.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from stable_baselines3 import SAC
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn

NETWORKS = 7
ELITES = 5  # the networks with the lowest held-out error: rollouts use these
DECAYS = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)  # weight decay by layer
HELD_OUT = 0.2  # of the real transitions, at most MOST_HELD_OUT
MOST_HELD_OUT = 5000
FEWEST = 5  # transitions of which one is held out
PATIENCE = 5  # epochs of training without an improvement of any network by more than IMPROVEMENT
IMPROVEMENT = 0.01
MODEL_BATCH = 256
ROLLOUTS = 100_000  # each time the model has been trained
REAL_SHARE = 0.05  # of a minibatch
EPOCH = 1000  # environment steps, of the rollout schedule


# Which next observations (B, O) end an episode -> (B,) bool; by environment, as their version 4 has it
TERMINATIONS: dict[str, Callable] = {
    "Hopper": lambda obs: (
        ~(obs.isfinite().all(1) & (obs[:, 1:].abs() < 100).all(1) & (obs[:, 0] > 0.7) & (obs[:, 1].abs() < 0.2))
    ),
    "Walker2d": lambda obs: ~((obs[:, 0] > 0.8) & (obs[:, 0] < 2) & (obs[:, 1].abs() < 1)),
    "Ant": lambda obs: ~(obs.isfinite().all(1) & (obs[:, 0] >= 0.2) & (obs[:, 0] <= 1)),
    "Humanoid": lambda obs: (obs[:, 0] < 1) | (obs[:, 0] > 2),
    "InvertedPendulum": lambda obs: obs[:, 1].abs() > 0.2,
    "HalfCheetah": lambda obs: torch.zeros(len(obs), dtype=torch.bool, device=obs.device),
    "never": lambda obs: torch.zeros(len(obs), dtype=torch.bool, device=obs.device),
}


# Settings by environment -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Settings:
    schedule: tuple[int, int, int, int] = (20, 150, 1, 1)  # of the rollout length: first and last epoch, first and last length
    target_entropy: float | None = None  # None: minus the action dimension
    frequency: int = 250  # environment steps between two trainings of the model
    retain: int = 1  # for how many epochs the model replay keeps transitions
    width: int = 200  # of the model's hidden layers
    obs_dim: int | None = None  # how many numbers of the observation model and policy see; None: all


SETTINGS = {
    "Hopper": Settings((20, 150, 1, 15), -1),
    "Walker2d": Settings((20, 150, 1, 1), -3),
    "HalfCheetah": Settings((20, 150, 1, 1), -3),
    "Ant": Settings((20, 100, 1, 25), -4, obs_dim=27),  # all of version 4; behind them version 5 has contact forces
    "Humanoid": Settings((20, 300, 1, 25), -2, frequency=1000, retain=5, width=400, obs_dim=45),
    "": Settings(),
}


def rollout_length(schedule: tuple[int, int, int, int], epoch: float) -> int:
    """Linear between the first and the last epoch, constant outside, rounded down."""
    first_epoch, last_epoch, first, last = schedule
    share = min(max((epoch - first_epoch) / (last_epoch - first_epoch), 0.0), 1.0)
    return int(first + share * (last - first))


# The model ---------------------------------------------------------------------------------------------------------------------
def model_loss(mean, log_var, target):
    """Sum over the networks of the Gaussian's negative log-likelihood (without constants), all (N, B, D) -> scalar."""
    return ((mean - target).square() * (-log_var).exp() + log_var).mean((1, 2)).sum()


class Ensemble(nn.Module):
    """NETWORKS probabilistic networks of four hidden layers, every layer one batched product.

    inputs: obs and action; outputs: mean and log-variance of the reward and the change of obs.
    """

    def __init__(self, inputs: int, outputs: int, width: int):
        super().__init__()
        sizes = [inputs, *[width] * 4, 2 * outputs]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for before, after in itertools.pairwise(sizes):
            std = 1 / (2 * math.sqrt(before))
            self.weights.append(nn.init.trunc_normal_(torch.empty(NETWORKS, before, after), std=std, a=-2 * std, b=2 * std))
            self.biases.append(torch.zeros(NETWORKS, 1, after))
        self.min_log_var = nn.Parameter(torch.full((outputs,), -10.0))
        self.max_log_var = nn.Parameter(torch.full((outputs,), 0.5))
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("std", torch.ones(inputs))
        self.register_buffer("elites", torch.arange(ELITES))

    def forward(self, x: torch.Tensor, networks=slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """x (N, B, I), one input per network, or (B, I) for all -> mean, log-variance (N, B, D)."""
        x = (x - self.mean) / self.std
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = F.silu(x @ weight[networks] + bias[networks])
        mean, log_var = (x @ self.weights[-1][networks] + self.biases[-1][networks]).chunk(2, -1)
        log_var = self.max_log_var - F.softplus(self.max_log_var - log_var)
        log_var = self.min_log_var + F.softplus(log_var - self.min_log_var)
        return mean, log_var

    def loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What training minimises: x (N, B, I), target (N, B, D) -> scalar."""
        decay = sum(factor * weight.square().sum() / 2 for factor, weight in zip(DECAYS, self.weights, strict=True))
        bounds = 0.01 * (self.max_log_var.sum() - self.min_log_var.sum())
        return model_loss(*self(x), target) + bounds + decay

    @torch.no_grad()
    def errors(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean squared error of each network on the same B samples: (B, I), (B, D) -> (N,)."""
        return (self(x)[0] - target).square().mean((1, 2))

    @torch.no_grad()
    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """A sample of the outputs for each row of x (B, I), from a random elite -> (B, D).

        Rows are dealt out evenly in random order, so that each goes through one network and all through one batched product.
        """
        share = math.ceil(len(x) / ELITES)
        order = torch.randperm(len(x), device=x.device)
        places = torch.arange(ELITES * share, device=x.device) % len(x)  # some twice where they do not come out even
        dealt = order[places].view(ELITES, share)
        mean, log_var = self(x[dealt], self.elites)
        drawn = mean + (log_var / 2).exp() * torch.randn_like(mean)
        result = drawn.new_empty(len(x), mean.shape[2])
        result[dealt.flatten()] = drawn.flatten(0, 1)
        return result


def fit(ensemble: Ensemble, optimizer: torch.optim.Optimizer, x: torch.Tensor, target: torch.Tensor) -> float:
    """Train on inputs x (M, I) and targets (M, D) until no network improves on held-out samples; each keeps its best weights.

    Chooses the elites; returns their mean squared error on the held-out samples.
    """
    order = torch.randperm(len(x), device=x.device)
    held_out = min(int(HELD_OUT * len(x)), MOST_HELD_OUT)
    test_x, test_target = x[order[:held_out]], target[order[:held_out]]
    x, target = x[order[held_out:]], target[order[held_out:]]
    std = x.std(0, correction=0)
    ensemble.mean.copy_(x.mean(0))
    ensemble.std.copy_(torch.where(std < 1e-12, 1.0, std))
    drawn = torch.randint(len(x), (NETWORKS, len(x)), device=x.device)  # a bootstrap sample for each network
    best_errors = torch.full((NETWORKS,), torch.inf, device=x.device)
    parameters = [*ensemble.weights, *ensemble.biases]
    best_parameters = [parameter.detach().clone() for parameter in parameters]
    waited = 0
    while waited <= PATIENCE:
        drawn = drawn.gather(1, torch.rand(drawn.shape, device=x.device).argsort(1))
        for rows in drawn.split(MODEL_BATCH, 1):
            optimizer.zero_grad()
            ensemble.loss(x[rows], target[rows]).backward()
            optimizer.step()
        errors = ensemble.errors(test_x, test_target)
        improved = errors < (1 - IMPROVEMENT) * best_errors
        best_errors = torch.where(improved, errors, best_errors)
        for best, parameter in zip(best_parameters, parameters, strict=True):
            best[improved] = parameter.detach()[improved]
        waited = 0 if improved.any() else waited + 1
    for best, parameter in zip(best_parameters, parameters, strict=True):
        parameter.data.copy_(best)
    elites = best_errors.argsort()[:ELITES]
    ensemble.elites.copy_(elites)
    return best_errors[elites].mean().item()


# Model transitions, and both kinds mixed ---------------------------------------------------------------------------------------
class ModelReplay:
    """The newest transitions of rollouts, at most `capacity`, as rows (obs, action, next_obs, terminated, reward)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        self.sizes = [obs_dim, action_dim, obs_dim, 1, 1]
        self.rows = torch.empty(0, sum(self.sizes), device=device)
        self.filled = 0
        self.position = 0

    def resize(self, capacity: int) -> None:
        """Keep the newest rows that fit. Old and new rows are in memory together, and nothing else of their size."""
        if capacity == len(self.rows):
            return
        kept = min(self.filled, capacity)
        begin = (self.position - kept) % max(len(self.rows), 1)  # where the oldest row lies that is kept
        rows = torch.empty(capacity, self.rows.shape[1], device=self.rows.device)
        before_the_seam = self.rows[begin : begin + kept]
        rows[: len(before_the_seam)] = before_the_seam
        rows[len(before_the_seam) : kept] = self.rows[: kept - len(before_the_seam)]
        self.rows = rows
        self.filled = kept
        self.position = kept % capacity

    def add(self, *parts: torch.Tensor) -> None:
        """(B, ...) of each part, over the oldest rows."""
        rows = torch.cat([part.view(len(part), -1) for part in parts], 1)[-len(self.rows) :]
        places = (self.position + torch.arange(len(rows), device=rows.device)) % len(self.rows)
        self.rows[places] = rows
        self.position = (self.position + len(rows)) % len(self.rows)
        self.filled = min(self.filled + len(rows), len(self.rows))

    def sample(self, count: int) -> ReplayBufferSamples:
        rows = self.rows[torch.randint(self.filled, (count,), device=self.rows.device)]
        return ReplayBufferSamples(*rows.split(self.sizes, 1))


class MixedReplay:
    """Minibatches of which REAL_SHARE is real, in the place of a replay buffer of Stable-Baselines3."""

    def __init__(self, real, model: ModelReplay):
        self.real = real
        self.model = model

    def sample(self, batch_size: int, env=None) -> ReplayBufferSamples:
        real = int(REAL_SHARE * batch_size)
        parts = zip(self.real.sample(real, env)[:5], self.model.sample(batch_size - real)[:5], strict=True)
        return ReplayBufferSamples(*(torch.cat(pair) for pair in parts))


class MBPO(SAC):
    """SAC that learns from short rollouts of a model, which is trained every `settings.frequency` environment steps.

    The model replay is not in a checkpoint: rollouts fill it again.
    """

    def __init__(self, policy, env, *, settings: Settings, terminated: Callable, **options):
        entropy = "auto" if settings.target_entropy is None else float(settings.target_entropy)
        super().__init__(policy, env, target_entropy=entropy, **options)
        self.settings = settings
        self.terminated = terminated
        obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
        self.ensemble = Ensemble(obs_dim + action_dim, 1 + obs_dim, settings.width).to(self.device)
        self.ensemble_optimizer = torch.optim.Adam(self.ensemble.parameters(), lr=1e-3)
        self.model_replay = ModelReplay(obs_dim, action_dim, self.device)
        self.fitted_step = -math.inf  # when the model was last trained in this process
        self.model_metrics = {"model/holdout_error": None, "model/rollout_length": None, "model/train_seconds": None}

    def _get_torch_save_params(self):
        modules, tensors = super()._get_torch_save_params()
        return [*modules, "ensemble", "ensemble_optimizer"], tensors

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """The updates of an environment step, after those of the model where it is time for them."""
        if self.num_timesteps - self.fitted_step >= self.settings.frequency:
            self.fitted_step = self.num_timesteps
            self.train_model()
            self.roll_out()
        real = self.replay_buffer
        self.replay_buffer = MixedReplay(real, self.model_replay)
        try:
            super().train(gradient_steps, batch_size)
        finally:
            self.replay_buffer = real

    def real_transitions(self, name: str) -> torch.Tensor:
        """A column of the real replay, (M, ...)."""
        return torch.as_tensor(getattr(self.replay_buffer, name)[: self.replay_buffer.size(), 0], device=self.device)

    def train_model(self) -> None:
        began = time.time()
        obs = self.real_transitions("observations")
        x = torch.cat([obs, self.real_transitions("actions")], 1)
        change = self.real_transitions("next_observations") - obs
        target = torch.cat([self.real_transitions("rewards")[:, None], change], 1)
        self.model_metrics["model/holdout_error"] = fit(self.ensemble, self.ensemble_optimizer, x, target)
        self.model_metrics["model/train_seconds"] = time.time() - began

    @torch.no_grad()
    def roll_out(self) -> None:
        """Fill the model replay from ROLLOUTS real states on, by the current policy."""
        settings = self.settings
        length = rollout_length(settings.schedule, (self.num_timesteps - self.learning_starts) // EPOCH)
        self.model_metrics["model/rollout_length"] = length
        self.model_replay.resize(settings.retain * length * ROLLOUTS * EPOCH // settings.frequency)
        states = self.real_transitions("observations")
        obs = states[torch.randint(len(states), (ROLLOUTS,), device=self.device)]
        for _ in range(length):
            action = self.actor(obs)
            drawn = self.ensemble.sample(torch.cat([obs, action], 1))
            reward, next_obs = drawn[:, 0], obs + drawn[:, 1:]
            terminated = self.terminated(next_obs)
            self.model_replay.add(obs, action, next_obs, terminated.float(), reward)
            obs = next_obs[~terminated]
            if len(obs) == 0:
                return
