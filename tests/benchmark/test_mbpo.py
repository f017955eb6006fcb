"""MBPO's parts: the model against its formulas in float64, its training, its rollouts, the termination functions."""

import math
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
pytest.importorskip("sb3_contrib", reason="benchmark/requirements.txt is not installed")
pytestmark = pytest.mark.benchmark

import mbpo  # noqa: E402

INPUTS, OUTPUTS, WIDTH = 5, 4, 6


@pytest.fixture
def ensemble():
    torch.manual_seed(0)
    ensemble = mbpo.Ensemble(INPUTS, OUTPUTS, WIDTH).double()
    ensemble.mean += 0.3
    ensemble.std *= 1.7
    for bias in ensemble.biases:
        bias.data.normal_()
    return ensemble


def exact_outputs(ensemble, network, x):
    """Mean and log-variance (B, D) of one network: swish layers, then the log-variance softly bounded."""
    h = (x - 0.3) / 1.7
    for layer in range(5):
        h = h @ ensemble.weights[layer][network] + ensemble.biases[layer][network]
        if layer < 4:
            h = h / (1 + torch.exp(-h))
    low, high = ensemble.min_log_var, ensemble.max_log_var
    log_var = high - torch.log(1 + torch.exp(high - h[:, OUTPUTS:]))
    return h[:, :OUTPUTS], low + torch.log(1 + torch.exp(log_var - low))


def test_loss_and_gradient(ensemble):
    """Against the formula, one network after the other."""
    x = torch.randn(mbpo.NETWORKS, 32, INPUTS).double()
    target = torch.randn(mbpo.NETWORKS, 32, OUTPUTS).double()
    expected = 0.01 * (ensemble.max_log_var.sum() - ensemble.min_log_var.sum())
    for network in range(mbpo.NETWORKS):
        mean, log_var = exact_outputs(ensemble, network, x[network])
        expected = expected + ((mean - target[network]) ** 2 / torch.exp(log_var) + log_var).sum() / (32 * OUTPUTS)
        for factor, weight in zip((2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4), ensemble.weights, strict=True):
            expected = expected + factor * (weight[network] ** 2).sum() / 2
    got = ensemble.loss(x, target)
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    parameters = list(ensemble.parameters())
    assert len(parameters) == 12
    gradients = zip(torch.autograd.grad(got, parameters), torch.autograd.grad(expected, parameters), strict=True)
    for one, other in gradients:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_initial_weights():
    """Truncated normal with std 1 / (2 sqrt(fan_in)), cut at two of them; zero biases."""
    ensemble = mbpo.Ensemble(100, 10, 200)
    for weight, bias in zip(ensemble.weights, ensemble.biases, strict=True):
        std = 1 / (2 * math.sqrt(weight.shape[1]))
        assert weight.abs().max() <= 2 * std
        assert weight.std().item() == pytest.approx(0.88 * std, rel=0.02)  # what is left of the normal's
        assert not bias.any()


def test_samples_are_of_random_elites(ensemble):
    """Each row gets one draw of one elite's Gaussian, and all elites are used."""
    ensemble.elites.copy_(torch.tensor([6, 1, 2, 4, 0]))
    ensemble.min_log_var.data.fill_(-40.0)  # hardly any noise: a draw tells its network
    ensemble.max_log_var.data.fill_(-30.0)
    x = torch.randn(203, INPUTS).double()
    drawn = ensemble.sample(x)
    means = torch.stack([exact_outputs(ensemble, network, x)[0] for network in range(mbpo.NETWORKS)])
    distances, networks = (means - drawn).abs().amax(2).min(0)
    assert distances.max() < 1e-5
    counts = networks.bincount(minlength=mbpo.NETWORKS)
    assert counts[[3, 5]].sum() == 0
    assert (counts[[6, 1, 2, 4, 0]] >= 39).all()
    assert not torch.equal(networks, (means - ensemble.sample(x)).abs().amax(2).min(0)[1])


@pytest.mark.parametrize("rows", range(1, 13))
def test_few_rows_are_sampled_too(ensemble, rows):
    """As when almost all rollouts have ended."""
    ensemble.min_log_var.data.fill_(-40.0)
    ensemble.max_log_var.data.fill_(-30.0)
    x = torch.randn(rows, INPUTS).double()
    drawn = ensemble.sample(x)
    means = torch.stack([exact_outputs(ensemble, network, x)[0] for network in ensemble.elites.tolist()])
    assert (means - drawn).abs().amax(2).amin(0).max() < 1e-5


def test_samples_have_the_models_variance(ensemble):
    x = torch.randn(1, INPUTS).double().expand(50_000, -1)
    ensemble.elites.fill_(3)
    drawn = ensemble.sample(x)
    mean, log_var = exact_outputs(ensemble, 3, x[:1])
    std = (log_var / 2).exp()
    torch.testing.assert_close(drawn.mean(0), mean[0], rtol=0, atol=0.02 * std.max().item())
    torch.testing.assert_close(drawn.std(0), std[0], rtol=0.02, atol=0)


def test_a_linear_system_is_learned():
    """The held-out error falls below 1e-3; inputs are normalised."""
    torch.manual_seed(0)
    x = torch.randn(4000, 4)
    target = x @ torch.randn(4, 3) / 2 + 0.5
    ensemble = mbpo.Ensemble(4, 3, 64)
    error = mbpo.fit(ensemble, torch.optim.Adam(ensemble.parameters(), lr=1e-3), x, target)
    assert error < 1e-3
    torch.testing.assert_close(ensemble.mean, torch.zeros(4), rtol=0, atol=0.1)
    torch.testing.assert_close(ensemble.std, torch.ones(4), rtol=0, atol=0.1)


def test_early_stopping(monkeypatch):
    """After six epochs in which no network improved by more than 1 %; each has its best weights, and elites are the best."""
    torch.manual_seed(0)
    x = torch.randn(500, 4)
    ensemble = mbpo.Ensemble(4, 2, 32)
    seen = []

    def errors(self, x, target, original=mbpo.Ensemble.errors):
        seen.append((x, target, original(self, x, target)))
        return seen[-1][2]

    with monkeypatch.context() as patch:
        patch.setattr(mbpo.Ensemble, "errors", errors)
        error = mbpo.fit(ensemble, torch.optim.Adam(ensemble.parameters(), lr=1e-2), x, torch.sin(3 * x[:, :2]))
    best = torch.full((mbpo.NETWORKS,), torch.inf)
    improved = []
    for _, _, found in seen:
        better = found < 0.99 * best
        best = torch.where(better, found, best)
        improved.append(bool(better.any()))
    assert improved[-6:] == [False] * 6
    assert improved[-7]
    assert all(any(improved[i : i + 6]) for i in range(len(improved) - 6))  # it did not stop too late
    held_out, target, _ = seen[0]
    assert len(held_out) == 100
    torch.testing.assert_close(ensemble.errors(held_out, target), best)
    assert ensemble.elites.tolist() == best.argsort()[:5].tolist()
    assert error == pytest.approx(best.sort()[0][:5].mean().item())


# ------------------------------------------------------------------------------------------------------------ termination
TERMINATING = ("Hopper-v4", "Walker2d-v4", "Ant-v4", "Humanoid-v4", "InvertedPendulum-v4")


@pytest.mark.parametrize("env_id", [*TERMINATING, "HalfCheetah-v4", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"])
def test_termination_is_the_environments(env_id, tmp_path, monkeypatch):
    """Over transitions from random states, of which many end an episode."""
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings there
    env = gym.make(env_id, disable_env_checker=True).unwrapped
    rng = np.random.default_rng(0)
    env.action_space.seed(0)
    env.reset(seed=0)
    found, wanted = [], []
    for _ in range(600):
        qpos = env.init_qpos + rng.normal(0, 0.3, env.model.nq)
        env.set_state(qpos, env.init_qvel + rng.normal(0, 1, env.model.nv))
        obs, _, terminated, _, _ = env.step(env.action_space.sample())
        wanted.append(terminated)
        found.append(obs)
    terminated = mbpo.TERMINATIONS[env_id.split("-")[0]](torch.tensor(np.array(found), dtype=torch.float32))
    assert terminated.tolist() == wanted
    if env_id != "HalfCheetah-v4":
        assert 20 <= sum(wanted) <= 580
    env.close()


def test_termination_of_what_is_not_finite():
    obs = torch.tensor([[1.0, 0.0, torch.nan], [1.0, 0.0, torch.inf], [0.9, 0.0, 1.0]])
    assert mbpo.TERMINATIONS["Hopper"](obs).tolist() == [True, True, False]
    assert mbpo.TERMINATIONS["Ant"](obs).tolist() == [True, True, False]


# -------------------------------------------------------------------------------------------------- rollouts and replays
def test_rollout_length():
    """Linear between two epochs, constant outside."""
    schedule = mbpo.SETTINGS["Hopper"].schedule
    assert [mbpo.rollout_length(schedule, epoch) for epoch in (0, 20, 29, 30, 85, 150, 300)] == [1, 1, 1, 2, 8, 15, 15]
    assert {mbpo.rollout_length(mbpo.SETTINGS["Walker2d"].schedule, epoch) for epoch in (0, 50, 300)} == {1}


def rows_of(replay) -> list[float]:
    return sorted(replay.rows[: replay.filled, 0].tolist())


def add(replay, first, count):
    obs = torch.arange(first, first + count).float()[:, None]
    replay.add(obs, obs + 0.1, obs + 0.2, torch.zeros(count), obs[:, 0] + 0.3)


@pytest.mark.parametrize("capacity", [1, 6, 9, 10, 11, 25])
@pytest.mark.parametrize("added", [0, 4, 10, 13, 20, 27])
def test_a_resized_replay_keeps_the_newest_in_order(added, capacity):
    replay = mbpo.ModelReplay(1, 1, torch.device("cpu"))
    replay.resize(10)
    for first in range(added):
        add(replay, first, 1)
    replay.resize(capacity)
    for first in range(added, added + 3):
        add(replay, first, 1)
    newest = range(max(0, added - 10), added)[-capacity:]
    assert rows_of(replay) == [*newest, *range(added, added + 3)][-capacity:]


def test_model_replay_keeps_the_newest():
    """Over the oldest, also when it grows or shrinks; parts stay together."""
    replay = mbpo.ModelReplay(1, 1, torch.device("cpu"))
    replay.resize(10)
    add(replay, 0, 7)
    assert rows_of(replay) == [*range(7)]
    add(replay, 7, 7)
    assert rows_of(replay) == [*range(4, 14)]
    replay.resize(12)
    add(replay, 14, 4)
    assert rows_of(replay) == [*range(6, 18)]
    replay.resize(5)
    assert rows_of(replay) == [*range(13, 18)]
    add(replay, 18, 9)
    assert rows_of(replay) == [*range(22, 27)]
    drawn = replay.sample(100)
    assert set(drawn.observations[:, 0].tolist()) == {*range(22, 27)}
    for part, offset in ((drawn.actions, 0.1), (drawn.next_observations, 0.2), (drawn.rewards, 0.3)):
        torch.testing.assert_close(part, drawn.observations + offset)


def test_minibatches_are_mixed():
    """5 % real, rounded down."""
    real, model = mbpo.ModelReplay(1, 1, torch.device("cpu")), mbpo.ModelReplay(1, 1, torch.device("cpu"))
    for replay, first in ((real, 0), (model, 1000)):
        replay.resize(50)
        add(replay, first, 50)
    real.sample = lambda count, env, sample=real.sample: sample(count)
    drawn = mbpo.MixedReplay(real, model).sample(256)
    assert [len(part) for part in drawn[:5]] == [256] * 5
    assert (drawn.observations < 1000).sum() == 12


def test_rollouts(monkeypatch):
    """From real states by the policy and the model; they end where the model's state is terminal."""
    import baselines

    monkeypatch.setattr(mbpo, "ROLLOUTS", 64)
    args = baselines.check_args(baselines.Args("mbpo", env_id="Hopper-v4"))
    model = baselines.make_model(args, baselines.make_env(args))
    states = np.random.default_rng(0).normal(size=(50, 11)).astype(np.float32)
    model.replay_buffer.observations[:50, 0] = states
    model.replay_buffer.pos = 50
    model.num_timesteps = args.learning_starts + 43_000  # rollouts of three steps
    model.terminated = lambda obs: obs[:, 0] > 0
    model.roll_out()
    replay = model.model_replay
    assert model.model_metrics["model/rollout_length"] == 3
    assert len(replay.rows) == 3 * 64 * 1000 // 250
    obs, action, next_obs, terminated, _ = replay.rows[: replay.filled].split(replay.sizes, 1)
    assert {tuple(row) for row in obs[:64].tolist()} <= {tuple(row) for row in states.tolist()}
    assert torch.equal(terminated[:, 0].bool(), next_obs[:, 0] > 0)
    going_on = next_obs[:64][~terminated[:64, 0].bool()]
    assert 0 < len(going_on) < 64
    assert torch.equal(obs[64 : 64 + len(going_on)], going_on)
    assert action.abs().max() <= 1
    assert replay.filled < 3 * 64


@pytest.mark.parametrize("env_id,seen,actions,width,entropy", [("Humanoid-v4", 45, 17, 400, -2), ("Ant-v5", 27, 8, 200, -4)])
def test_observations_are_cut(env_id, seen, actions, width, entropy):
    """Model and policy see the first numbers, as in the authors' program."""
    import baselines

    args = baselines.check_args(baselines.Args("mbpo", env_id=env_id, buffer_size=6000))
    env = baselines.make_env(args)
    assert env.reset(seed=0)[0].shape == (seen,)
    model = baselines.make_model(args, env)
    assert model.ensemble.weights[0].shape == (mbpo.NETWORKS, seen + actions, width)
    assert model.target_entropy == entropy
    assert args.utd == 20


def test_ant_v5_begins_with_what_v4_observes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    for env_id in ("Ant-v4", "Ant-v5"):
        env = gym.make(env_id, disable_env_checker=True).unwrapped
        env.reset(seed=0)
        env.set_state(env.init_qpos + 0.1, env.init_qvel - 0.2)
        seen.append(env._get_obs()[:27])
        env.close()
    np.testing.assert_allclose(*seen)


def test_the_settings_of_a_name_are_gymnasiums_own():
    """Somebody's own Hopper is another one."""
    import baselines

    for table in (mbpo.SETTINGS, baselines.QUANTILES_TO_DROP):
        assert baselines.of_gymnasium(table, "Hopper-v5") == table["Hopper"]
        assert (
            baselines.of_gymnasium(table, "my_module:Hopper-v0") == baselines.of_gymnasium(table, "mine/Hopper-v0") == table[""]
        )
    for env_id, utd in (("HalfCheetah-v4", 40), ("mine/HalfCheetah-v4", 20)):
        assert baselines.check_args(baselines.Args("mbpo", env_id=env_id, termination="never")).utd == utd
