"""MBPO (Janner, Fu, Zhang, Levine 2019, arXiv 1906.08253): SAC of Stable-Baselines3 on short rollouts of a learned model.

    python benchmark/baselines.py --algorithm mbpo --env-id Hopper-v4

This file adds what Stable-Baselines3 lacks: the dynamics ensemble, its training with early stopping, the rollouts, and the
minibatches of real and model transitions. Constants are those of the authors' program, github.com/jannerm/mbpo. The transitions
of the model are not in a checkpoint: a resumed run first trains the model and makes new ones.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn

NETWORKS = 7
ELITES = 5  # the networks with the lowest held-out error: rollouts use these
DECAYS = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)  # weight decay by layer
HELD_OUT = 0.2  # of the real transitions, at most MOST_HELD_OUT
MOST_HELD_OUT = 5000
PATIENCE = 5  # epochs of training without an improvement of any network by more than IMPROVEMENT
IMPROVEMENT = 0.01
MODEL_BATCH = 256
ROLLOUTS = 100_000  # each time the model has been trained
REAL_SHARE = 0.05  # of a minibatch
EPOCH = 1000  # environment steps


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the authors set by environment, and its rule for the end of an episode."""

    healthy: Callable  # next observations (B, O) -> (B,) bool: whether the episode goes on
    target_entropy: float
    schedule: tuple[int, int, int, int] = (20, 150, 1, 1)  # of the rollout length: first and last epoch, first and last length
    steps_between_fits: int = 250  # environment steps between two trainings of the model
    epochs_kept: int = 1  # for how long transitions of the model are kept
    width: int = 200  # of the model's hidden layers
    obs_dim: int | None = None  # how many numbers of the observation model and policy see; None: all


def hopper_is_healthy(obs: torch.Tensor) -> torch.Tensor:
    finite = obs.isfinite().all(1) & (obs[:, 1:].abs() < 100).all(1)
    return finite & (obs[:, 0] > 0.7) & (obs[:, 1].abs() < 0.2)


def walker_is_healthy(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, 0] > 0.8) & (obs[:, 0] < 2) & (obs[:, 1].abs() < 1)


def always_healthy(obs: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(obs), dtype=torch.bool, device=obs.device)


def ant_is_healthy(obs: torch.Tensor) -> torch.Tensor:
    return obs.isfinite().all(1) & (obs[:, 0] >= 0.2) & (obs[:, 0] <= 1)


def humanoid_is_healthy(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, 0] > 1) & (obs[:, 0] < 2)


def pendulum_is_healthy(obs: torch.Tensor) -> torch.Tensor:
    return obs.isfinite().all(1) & (obs[:, 1].abs() <= 0.2)


SETTINGS = {
    "Hopper": Settings(hopper_is_healthy, target_entropy=-1, schedule=(20, 150, 1, 15)),
    "Walker2d": Settings(walker_is_healthy, target_entropy=-3),
    "HalfCheetah": Settings(always_healthy, target_entropy=-3),
    "Ant": Settings(
        ant_is_healthy,
        target_entropy=-4,
        schedule=(20, 100, 1, 25),
        obs_dim=27,  # all of version 4; behind them version 5 has contact forces
    ),
    "Humanoid": Settings(
        humanoid_is_healthy,
        target_entropy=-2,
        schedule=(20, 300, 1, 25),
        steps_between_fits=1000,
        epochs_kept=5,
        width=400,
        obs_dim=45,
    ),
    "InvertedPendulum": Settings(pendulum_is_healthy, target_entropy=-1),
}


def mbpo_settings(env_id: str) -> Settings:
    """Those of Gymnasium's environments, of any version; ValueError for another one."""
    name = env_id.rsplit("-v", 1)[0]  # a module or namespace stays in it
    if name not in SETTINGS:
        raise ValueError(f"mbpo does not know when an episode of {env_id} ends, only that of {', '.join(SETTINGS)}.")
    return SETTINGS[name]


def rollout_length(schedule: tuple[int, int, int, int], epoch: float) -> int:
    """Linear between the first and the last epoch, constant outside, rounded down."""
    first_epoch, last_epoch, first, last = schedule
    share = min(max((epoch - first_epoch) / (last_epoch - first_epoch), 0.0), 1.0)
    return int(first + share * (last - first))


class Ensemble(nn.Module):
    """NETWORKS probabilistic networks of four hidden layers, every layer one batched product.

    Inputs: observation and action. Outputs: mean and log-variance of the reward and the change of the observation.
    """

    def __init__(self, inputs: int, outputs: int, width: int):
        super().__init__()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for before, after in itertools.pairwise([inputs, *[width] * 4, 2 * outputs]):
            std = 1 / (2 * math.sqrt(before))
            self.weights.append(nn.init.trunc_normal_(torch.empty(NETWORKS, before, after), std=std, a=-2 * std, b=2 * std))
            self.biases.append(torch.zeros(NETWORKS, 1, after))
        self.min_log_var = nn.Parameter(torch.full((outputs,), -10.0))
        self.max_log_var = nn.Parameter(torch.full((outputs,), 0.5))
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("std", torch.ones(inputs))
        self.register_buffer("elites", torch.arange(ELITES))

    def forward(self, x: torch.Tensor, networks=slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """x (N, B, I), one input per network, or (B, I) for all -> mean, log-variance (N, B, D); networks: which, as an index."""
        x = (x - self.mean) / self.std
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = F.silu(x @ weight[networks] + bias[networks])
        mean, log_var = (x @ self.weights[-1][networks] + self.biases[-1][networks]).chunk(2, -1)
        log_var = self.max_log_var - F.softplus(self.max_log_var - log_var)
        log_var = self.min_log_var + F.softplus(log_var - self.min_log_var)
        return mean, log_var

    def loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What training minimises, summed over the networks: x (N, B, I), target (N, B, D) -> scalar."""
        mean, log_var = self(x)
        likelihood = ((mean - target).square() * (-log_var).exp() + log_var).mean((1, 2)).sum()
        bounds = 0.01 * (self.max_log_var.sum() - self.min_log_var.sum())
        decay = sum(factor * weight.square().sum() / 2 for factor, weight in zip(DECAYS, self.weights, strict=True))
        return likelihood + bounds + decay

    @torch.no_grad()
    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """A draw of the outputs for each row of x (B, I), from a random elite each -> (B, D)."""
        chosen = self.elites[torch.randint(ELITES, (len(x),), device=x.device)]
        drawn = x.new_empty(len(x), len(self.min_log_var))
        for network in self.elites.tolist():
            rows = chosen == network
            mean, log_var = self(x[rows], networks=[network])  # N is 1
            drawn[rows] = (mean + (log_var / 2).exp() * torch.randn_like(mean))[0]
        return drawn


def fit(ensemble: Ensemble, optimizer: torch.optim.Optimizer, x: torch.Tensor, target: torch.Tensor) -> float:
    """Train on inputs x (M, I) and targets (M, D), M > 1, until no network improves on held-out rows.

    Each network keeps its best weights. Chooses the elites; returns their mean squared error on the held-out rows.
    """
    shuffled = torch.randperm(len(x), device=x.device)
    held_out = min(max(int(HELD_OUT * len(x)), 1), MOST_HELD_OUT)
    test_rows = shuffled[:held_out]
    train_rows = shuffled[held_out:]
    test_x, test_target = x[test_rows], target[test_rows]
    train_x, train_target = x[train_rows], target[train_rows]
    std = train_x.std(0, correction=0)
    ensemble.mean.copy_(train_x.mean(0))
    ensemble.std.copy_(torch.where(std < 1e-12, 1.0, std))
    samples = torch.randint(len(train_x), (NETWORKS, len(train_x)), device=x.device)  # a bootstrap sample for each network
    parameters = [*ensemble.weights, *ensemble.biases]
    best_parameters = [parameter.detach().clone() for parameter in parameters]
    best_errors = torch.full((NETWORKS,), torch.inf, device=x.device)
    waited = 0
    while waited <= PATIENCE:
        order = torch.rand(samples.shape, device=x.device).argsort(1)  # another one for each network
        samples = samples.gather(1, order)
        for rows in samples.split(MODEL_BATCH, 1):
            optimizer.zero_grad()
            ensemble.loss(train_x[rows], train_target[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            errors = (ensemble(test_x)[0] - test_target).square().mean((1, 2))
        improved = errors < (1 - IMPROVEMENT) * best_errors
        best_errors = torch.where(improved, errors, best_errors)
        for best, parameter in zip(best_parameters, parameters, strict=True):
            best[improved] = parameter.detach()[improved]
        waited = 0 if improved.any() else waited + 1
    for best, parameter in zip(best_parameters, parameters, strict=True):
        parameter.data.copy_(best)
    ensemble.elites.copy_(best_errors.argsort()[:ELITES])
    return best_errors[ensemble.elites].mean().item()


class MixedReplay(ReplayBuffer):
    """Real transitions, as in Stable-Baselines3; minibatches are REAL_SHARE of them and model transitions for the rest."""

    model_rows: torch.Tensor | None = None  # (M, ...): obs, action, next_obs, terminated, reward; the newest last

    def add_model_rows(self, rows: list[torch.Tensor], capacity: int) -> None:
        """Append rows, at most `capacity`; of the earlier ones the newest stay. For a moment both are in memory."""
        if self.model_rows is not None:
            too_many = len(self.model_rows) + sum(len(part) for part in rows) - capacity
            rows = [self.model_rows[max(too_many, 0) :], *rows]
        self.model_rows = torch.cat(rows)

    def sample(self, batch_size: int, env=None) -> ReplayBufferSamples:
        """A minibatch, its real transitions first."""
        number_of_real = int(REAL_SHARE * batch_size)
        chosen = torch.randint(len(self.model_rows), (batch_size - number_of_real,), device=self.device)
        obs_dim = self.obs_shape[0]
        obs, action, next_obs, terminated, reward = self.model_rows[chosen].split([obs_dim, self.action_dim, obs_dim, 1, 1], 1)
        real = super().sample(number_of_real, env)
        return ReplayBufferSamples(
            observations=torch.cat([real.observations, obs]),
            actions=torch.cat([real.actions, action]),
            next_observations=torch.cat([real.next_observations, next_obs]),
            dones=torch.cat([real.dones, terminated]),
            rewards=torch.cat([real.rewards, reward]),
        )


class MBPO(SAC):
    """SAC that learns from short rollouts of a model, which is trained every few environment steps.

    Metrics for the logger: model/holdout_error, model/rollout_length.
    """

    def __init__(self, *arguments, env_id: str = "Hopper-v4", **options):
        self.env_id = env_id  # load() makes the object without it, then sets all attributes that were saved, this one as well
        entropy = mbpo_settings(env_id).target_entropy
        super().__init__(*arguments, target_entropy=entropy, replay_buffer_class=MixedReplay, **options)

    def _setup_model(self) -> None:
        super()._setup_model()
        obs_dim = self.observation_space.shape[0]
        action_dim = self.action_space.shape[0]
        self.ensemble = Ensemble(obs_dim + action_dim, 1 + obs_dim, mbpo_settings(self.env_id).width).to(self.device)
        self.ensemble_optimizer = torch.optim.Adam(self.ensemble.parameters(), lr=1e-3)

    def _get_torch_save_params(self):
        modules, tensors = super()._get_torch_save_params()
        return [*modules, "ensemble", "ensemble_optimizer"], tensors

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """The updates of an environment step, after those of the model where it is time for them."""
        steps_learned = self.num_timesteps - self.learning_starts - 1  # 0 in the first step with updates
        is_due = steps_learned % mbpo_settings(self.env_id).steps_between_fits == 0
        if is_due or self.replay_buffer.model_rows is None:
            obs = self.real("observations")
            inputs = torch.cat([obs, self.real("actions")], 1)
            targets = torch.cat([self.real("rewards"), self.real("next_observations") - obs], 1)
            error = fit(self.ensemble, self.ensemble_optimizer, inputs, targets)
            self.logger.record("model/holdout_error", error)
            self.roll_out(obs)
        super().train(gradient_steps, batch_size)

    def real(self, name: str) -> torch.Tensor:
        """What the replay has of an array of real transitions: (M, ...)."""
        rows = getattr(self.replay_buffer, name)[: self.replay_buffer.size()]
        return torch.as_tensor(rows, device=self.device).flatten(1)

    @torch.no_grad()
    def roll_out(self, states: torch.Tensor) -> None:
        """Add model transitions: ROLLOUTS rollouts by the current policy from states drawn from (M, O)."""
        settings = mbpo_settings(self.env_id)
        epoch = (self.num_timesteps - self.learning_starts) // EPOCH
        length = rollout_length(settings.schedule, epoch)
        self.logger.record("model/rollout_length", length)
        obs = states[torch.randint(len(states), (ROLLOUTS,), device=self.device)]
        rows = []
        for _ in range(length):
            action = self.actor(obs)
            outputs = self.ensemble.sample(torch.cat([obs, action], 1))
            reward = outputs[:, :1]
            next_obs = obs + outputs[:, 1:]
            healthy = settings.healthy(next_obs)
            rows.append(torch.cat([obs, action, next_obs, ~healthy[:, None], reward], 1))
            obs = next_obs[healthy]
        capacity = settings.epochs_kept * length * ROLLOUTS * EPOCH // settings.steps_between_fits
        self.replay_buffer.add_model_rows(rows, capacity)
