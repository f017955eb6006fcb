"""MBPO's parts: the model's training and samples, rollouts, minibatches, where episodes end."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import baselines
import mbpo

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def model():
    """After the first update on Hopper-v4, before which the ensemble is trained with 301 random transitions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mbpo, "ROLLOUTS", 64)
        model = baselines.make_model(baselines.Args("mbpo", learning_starts=300, buffer_size=301, utd=1, cuda=False))
        model.learn(301, log_interval=None)
    return model


def test_the_model_is_trained(model):
    replay = model.replay_buffer
    changes = replay.next_observations - replay.observations
    assert model.logger.name_to_value["model/holdout_error"] < 0.5 * np.square(changes).mean()


def test_rollouts(model, monkeypatch):
    """They begin in real states and have three steps in the 44th epoch, fewer where a state of the model ends the episode."""
    monkeypatch.setattr(mbpo, "ROLLOUTS", 64)
    model.num_timesteps = 43_300
    replay = model.replay_buffer
    replay.model_rows = None
    states = torch.tensor(replay.observations[:, 0])
    model.roll_out(states)
    obs, _, next_obs, terminated, _ = replay.model_rows.split([11, 3, 11, 1, 1], 1)
    healthy = mbpo.SETTINGS["Hopper"].healthy(next_obs)
    assert 128 < len(obs) < 192
    assert (obs[:64, None] == states).all(2).any(1).all()
    assert torch.equal(obs[64:], next_obs[healthy][: len(obs) - 64])
    assert torch.equal(terminated[:, 0] == 0, healthy)


def test_minibatches(model):
    """The newest rows of the model stay. 5 % of a minibatch are real, rounded down; the columns of both go together."""
    replay = model.replay_buffer
    replay.model_rows = None
    row = torch.arange(27.0)
    for sign in (1, -1):
        replay.add_model_rows([sign * row.expand(40, -1)], 60)
    assert replay.model_rows[:, 26].sum() == -520  # 20 times 26, 40 times -26
    batch = replay.sample(256)
    assert (batch.rewards.abs() == 26).sum() == 244
    assert torch.equal(torch.cat([part[-1].abs() for part in batch[:5]]), row)


@pytest.mark.parametrize("count", [1, 2, 200])
def test_samples_are_of_elites(count):
    """Also where hardly any rollout is left. With hardly any noise a draw is the elite's mean."""
    ensemble = mbpo.Ensemble(5, 4, 6)
    ensemble.elites.fill_(3)
    for bound in (ensemble.min_log_var, ensemble.max_log_var):
        bound.data -= 30
    x = torch.randn(count, 5)
    torch.testing.assert_close(ensemble.sample(x), ensemble(x)[0][3])


def test_best_weights_come_back():
    """One of two transitions is held out: after training the elites have the error on it that was the lowest."""
    torch.manual_seed(0)
    ensemble = mbpo.Ensemble(2, 2, 8)
    x, target = torch.randn(2, 2, 2)
    error = mbpo.fit(ensemble, torch.optim.Adam(ensemble.parameters(), lr=0.01), x, target)
    errors = (ensemble(x)[0] - target).square().mean(2)[ensemble.elites].mean(0)
    assert torch.isclose(errors, torch.tensor(error)).any()


@pytest.mark.parametrize("version", ["v4", "v5"])
@pytest.mark.parametrize("name, settings", mbpo.SETTINGS.items())
def test_episodes_end_where_the_environments_do(name, settings, version):
    """After a step from random states."""
    env = gym.make(f"{name}-{version}").unwrapped
    env.reset(seed=0)
    ends = 0
    for _ in range(400):
        env.set_state(env.init_qpos + env.np_random.normal(0, 0.5, env.model.nq), env.init_qvel)
        obs, _, terminated, _, _ = env.step(env.action_space.low)
        healthy = settings.healthy(torch.tensor(obs[None, : settings.obs_dim]))
        assert healthy.item() != terminated
        ends += terminated
    assert 20 < ends < 380 or name == "HalfCheetah"


def test_rollout_length():
    """Linear between two epochs, constant outside."""
    assert [mbpo.rollout_length((20, 150, 1, 15), epoch) for epoch in (0, 29, 30, 85, 150, 300)] == [1, 1, 2, 8, 15, 15]
