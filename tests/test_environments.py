"""Episodes, bounds and spaces."""

import re
import warnings

import numpy as np
import pytest
import torch
from conftest import ROOT, messages, without_wall_clock

import rac_sac


def replay_of(cli, env_id):
    run_dir = cli.train("run", "--total-timesteps", "210", env_id=env_id)
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)["replay"].numpy()


@pytest.mark.parametrize("env_id,terminated_at_end", [("toy_envs:Truncating-v0", 0.0), ("toy_envs:Terminating-v0", 1.0)])
def test_end_of_episode(cli, env_id, terminated_at_end):
    """Rows (obs, action, reward, terminated, next_obs): an episode's last row holds its own last observation, 7, not the
    next episode's first; only termination stops the bootstrap."""
    obs, _, reward, terminated, next_obs = replay_of(cli, env_id).T
    np.testing.assert_array_equal(obs, np.arange(210) % 7)
    np.testing.assert_array_equal(next_obs, np.arange(210) % 7 + 1)
    np.testing.assert_array_equal(terminated, np.where(np.arange(210) % 7 == 6, terminated_at_end, 0.0))
    assert (reward == 1).all()


def seen_by(env, monkeypatch) -> list[np.ndarray]:
    """The actions that arrive at the environment itself."""
    seen, inner = [], env.unwrapped
    step = inner.step
    monkeypatch.setattr(inner, "step", lambda action: (seen.append(np.array(action)), step(action))[1])
    return seen


@pytest.mark.parametrize("env_id,low,high", [("Humanoid-v4", -0.4, 0.4), ("Pendulum-v1", -2, 2), ("Ant-v5", -1, 1)])
def test_actions_are_rescaled(env_id, low, high, monkeypatch):
    env = rac_sac.FlatEnv(env_id)
    seen = seen_by(env, monkeypatch)
    env.reset(seed=0)
    for action in (-1.0, 0.0, 0.5, 1.0):
        env.step(np.full(env.action_dim, action, np.float32))
        assert env.unwrapped.action_space.contains(seen[-1])
    for got, wanted in zip(seen, (low, (low + high) / 2, low + 0.75 * (high - low), high), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_asymmetric_bounds(monkeypatch):
    env = rac_sac.FlatEnv("toy_envs:Truncating-v0")
    seen = seen_by(env, monkeypatch)
    env.reset(seed=0)
    for action, wanted in ((-1.0, -2.0), (1.0, 4.0), (0.0, 1.0), (0.5, 2.5)):
        env.step(np.array([action], np.float32))
        np.testing.assert_allclose(seen[-1], [wanted], rtol=1e-6)


@pytest.mark.parametrize("env_id", ["Hopper-v4", "Ant-v4", "Humanoid-v4", "Walker2d-v5", "Pendulum-v1"])
def test_replay_of_an_episode_is_exact(env_id):
    """An episode's seed and actions give its observations, whatever the environment has played before."""
    env, again = rac_sac.FlatEnv(env_id), rac_sac.FlatEnv(env_id)
    rng, observations = np.random.default_rng(0), []
    env.reset(seed=5)
    for environment in (env, again):
        observations.append([environment.reset(seed=7)[0]])
        rng = np.random.default_rng(1)
        for _ in range(30):
            observations[-1].append(environment.step(rng.uniform(-1, 1, env.action_dim).astype(np.float32))[0])
    np.testing.assert_array_equal(observations[0], observations[1])


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = rac_sac.FlatEnv("Ant-v4")
        obs, _ = env.reset(seed=0)
        env.step(np.zeros(8, np.float32))
    assert env.obs_dim == 27 and obs.dtype == np.float32 and obs.shape == (27,)


def test_dict_observations_are_flattened(cli):
    run_dir = cli.train("run", "--total-timesteps", "210", env_id="toy_envs:DictObs-v0")
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["replay"].shape == (210, 2 * 3 + 1 + 2)


def test_an_image_gets_a_sentence(cli):
    result = cli.call("--env-id", "toy_envs:Image-v0", "--run-name", "run", *cli.tiny, "--total-timesteps", "210")
    assert [line for line in messages(result.stderr) if "learned as a flat vector of 12 numbers" in line]


def test_an_environment_of_the_old_interface_is_named(cli):
    result = cli.run("--env-id", "toy_envs:OldInterface-v0", *cli.tiny, code=1)
    assert "old step API" in result.stderr and "Traceback" in result.stderr


def test_an_environment_that_raises(cli, whole):
    """Its traceback, the directory and the way to resume, after a checkpoint of the last whole step, from which it goes on."""
    cli.env["FAIL_AT"] = "260"
    result = cli.run("--env-id", "toy_envs:Hopper-v0", "--run-name", "run", *cli.tiny, code=1)
    assert "Traceback" in result.stderr and result.stderr.strip().endswith("RuntimeError: the simulator is unstable")
    match = re.search(r"stopped at step 259.*last good checkpoint is of step 259.*--resume (runs/run)", result.stderr)
    assert match
    cli.env.pop("FAIL_AT")
    cli.run("--resume", match[1])
    eval_csv = cli.folder / "runs/run/eval.csv"
    assert without_wall_clock(eval_csv) == without_wall_clock(whole[0] / "eval.csv")


@pytest.mark.parametrize("failure,error", [
    ("reset", "RuntimeError: the simulator is unstable"),
    pytest.param("socket", "BrokenPipeError: the simulator is gone", marks=pytest.mark.slow)])  # fmt: skip
def test_an_environment_that_raises_elsewhere(cli, whole, failure, error):
    """At a reset, after the update of the step before; and with an error of the system, which is not one of our files'."""
    cli.env["FAIL"] = failure
    result = cli.run("--env-id", "toy_envs:Hopper-v0", "--run-name", "run", *cli.tiny, "--eval-workers", "1", code=1)
    assert "Traceback" in result.stderr and result.stderr.strip().endswith(error)
    match = re.search(r"stopped at step (\d+).*last good checkpoint is of step (\d+)", result.stderr)
    assert match and match[1] == match[2] and int(match[1]) > 300
    cli.env.pop("FAIL")
    cli.run("--resume", "runs/run")
    checkpoints = [torch.load(path / "checkpoint.pt", weights_only=True) for path in (whole[0], cli.folder / "runs/run")]
    first, second = (checkpoint["tensors"] for checkpoint in checkpoints)
    assert all(torch.equal(first[name], second[name]) for name in first if name != "metrics")
    assert without_wall_clock(cli.folder / "runs/run/train.csv") == without_wall_clock(whole[0] / "train.csv")


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_an_error_in_an_evaluation_shows_its_traceback(cli, whole, workers):
    """A fork's mistake is found where it is, also in a worker process; mended, the run goes on as if it had not been."""
    fork = (ROOT / "rac_sac.py").read_text().replace("    returns, running = np.zeros(len(envs)), np.ones(len(envs), bool)\n",
                                                     "    returns, running = np.zeros(len(environments)), 1\n", 1)  # fmt: skip
    cli.script = cli.folder / "rac_sac.py"
    cli.script.write_text(fork)
    result = cli.run("--env-id", "Hopper-v4", "--run-name", "run", *cli.tiny, "--eval-workers", workers, code=1)
    assert "in play_returns" in result.stderr and "name 'environments' is not defined" in result.stderr
    assert re.search(r"last good checkpoint is of step [2-5]\d\d; go on with: python rac_sac.py --resume runs/run", result.stderr)
    cli.script.write_text((ROOT / "rac_sac.py").read_text())
    cli.run("--resume", "runs/run")
    checkpoints = [torch.load(path / "checkpoint.pt", weights_only=True) for path in (whole[0], cli.folder / "runs/run")]
    first, second = (checkpoint["tensors"] for checkpoint in checkpoints)
    assert all(torch.equal(first[name], second[name]) for name in first if name != "metrics")
    assert without_wall_clock(cli.folder / "runs/run/eval.csv") == without_wall_clock(whole[0] / "eval.csv")


class ByHand:
    """Replaces networks: a policy that plays 0 with log_prob -0.5, and a Q of 10."""

    @staticmethod
    def policy(actor, obs, condition, noise=None):
        return np.zeros((len(obs), 1), np.float32), np.full(len(obs), -0.5)

    @staticmethod
    def mean_q(critic, obs, action, condition):
        return np.full(len(obs), 10.0)


@pytest.fixture
def by_hand(monkeypatch):
    import toy_envs

    monkeypatch.setattr(rac_sac, "policy", ByHand.policy)
    monkeypatch.setattr(rac_sac, "mean_q", ByHand.mean_q)
    monkeypatch.setattr(rac_sac.gym, "make", lambda *arguments, **options: toy_envs.Counter(ends="termination"))


def soft_return(steps):
    """Reward 1 in each step, gamma 0.9, alpha 0.2, log_prob -0.5 and so a bonus of 0.1 from the second step on."""
    return sum(0.9**t * (1 + (0.1 if t else 0)) for t in range(steps))


def test_monte_carlo_return(by_hand):
    """Episodes of 7 steps; two lead to the pair, so that the pair's own step and four after it remain."""
    envs, rng = [rac_sac.FlatEnv("x") for _ in range(4)], np.random.default_rng(0)
    actions = list(np.zeros((3, 1), np.float32))
    value = rac_sac.monte_carlo_return(rac_sac.Args(gamma=0.9), envs, None, 0.1, 0.2, 3, actions, rng)
    assert value == pytest.approx(soft_return(5))


def test_value_bias(by_hand):
    """Pairs are steps 1 to 7 of episodes in turn: with Q = 10 everywhere, mean and std follow from the chosen ones."""
    envs = [rac_sac.FlatEnv("x") for _ in range(2)]
    mean, std = rac_sac.measure_bias(rac_sac.Args(gamma=0.9), rac_sac.FlatEnv("x"), envs, None, None, 0.1, 0.2, 11)
    chosen = np.random.default_rng(11)
    chosen.standard_normal((100, 1), np.float32)  # one noise for each pair
    returns = np.array([soft_return(7 - i % 7) for i in chosen.choice(100, 20, replace=False)])
    bias = (10 - returns) / abs(returns.mean())
    assert (mean, std) == (pytest.approx(bias.mean()), pytest.approx(bias.std()))
