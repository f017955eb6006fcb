"""Which environments can be trained in, what is learned from them, and what happens when they fail."""

import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import TINY, read_rows
from test_resume import assert_same_run, brief, call, checkpoint_of
from toy_envs import LENGTH, Point, fail


def replay_of(run_dir: Path, action_dim: int = 1) -> dict:
    """The columns of a run's replay by name."""
    rows = checkpoint_of(run_dir)["replay"].numpy()
    obs_dim = (rows.shape[1] - action_dim - 2) // 2
    ends = np.cumsum([obs_dim, action_dim, 1, 1])
    return dict(zip(("obs", "action", "reward", "terminated", "next_obs"), np.split(rows, ends, axis=1), strict=True))


@pytest.mark.parametrize("env_id", ["Point-v0", "SameArray-v0", "Terminating-v0"])
def test_what_is_learned_from(cli, env_id):
    """An observation is followed by the next one, also where one array holds both; only termination stops the bootstrap.

    The last row of an episode has its own last observation, not the first one of the next. The newest 120 transitions stand in
    place of the oldest.
    """
    replay = replay_of(brief(cli, "run", env_id=f"toy_envs:{env_id}"))
    counts = np.roll(np.arange(80, 200), 80) % LENGTH
    assert replay["obs"][:, 1].tolist() == counts.tolist()
    assert replay["next_obs"][:, 1].tolist() == (counts + 1).tolist()
    np.testing.assert_allclose(replay["reward"][:, 0], -abs(replay["next_obs"][:, 0] - 1), atol=1e-5)
    ends = (counts == LENGTH - 1) & (env_id == "Terminating-v0")
    assert replay["terminated"][:, 0].tolist() == ends.tolist()


def test_random_start(cli):
    """Actions before learning starts are uniform: Kolmogorov's test."""
    actions = replay_of(brief(cli, "run", "--learning-starts", "200", "--buffer-size", "200"))["action"]
    np.testing.assert_allclose(np.sort(actions[:, 0]), np.linspace(-1, 1, 200), atol=2 * 1.95 / np.sqrt(200))


def test_what_an_agent_observes(cli):
    """Each transition once, after it is stored, with the return where an episode has ended."""
    rows, returns = [], {}

    def observe(agent, step, row, episodic_return, generator):
        rows.append(row.tolist())
        returns[str(step)] = str(episodic_return or "")

    cli.monkeypatch.setattr(cli.script.Agent, "observe", observe)
    run_dir = brief(cli, "run", "--buffer-size", "200")
    assert rows == checkpoint_of(run_dir)["replay"].tolist()
    logged = {row["global_step"]: row["charts/episodic_return"] for row in read_rows(run_dir / "train.csv")}
    assert returns == dict.fromkeys(map(str, range(1, 201)), "") | logged


def test_observations_of_several_parts(cli):
    """An integer, one-hot, an image and a number."""
    replay = replay_of(brief(cli, "run", "--buffer-size", "200", env_id="toy_envs:Nested-v0"))
    for step in (0, 6, 9, 199):
        count = step % LENGTH
        assert replay["obs"][step].tolist() == [*np.eye(8)[count], count, 1, 2, 255, 0.5]


@pytest.mark.parametrize("cli", ["rac_td3.py"], indirect=True)
@pytest.mark.parametrize("env_id", ["toy_envs:Far-v0", "toy_envs:Matrix-v0", "toy_envs:Scalar-v0"])
def test_actions_within_their_bounds(cli, env_id):
    """Learned in [-1, 1]; the environment, which refuses others, gets them in its own bounds, shape and type."""
    cli.monkeypatch.setattr(Point, "actions", [])
    run_dir = brief(cli, "run", "--buffer-size", "200", "--exploration-noise", "1", env_id=env_id)
    space = gym.make(env_id).action_space
    learned = replay_of(run_dir, space.low.size)["action"]
    assert (learned.min(), learned.max()) == (-1, 1)
    assert {action.dtype for action in Point.actions} == {space.dtype}
    expected = space.low + (learned.reshape(-1, *space.shape).astype(float) + 1) / 2 * (space.high - space.low)
    np.testing.assert_allclose(Point.actions, expected, rtol=1e-5, atol=1e-3)


def test_rewards_of_one_number(cli):
    """In an array they are learned from as numbers."""
    assert_same_run(brief(cli, "number"), brief(cli, "array", env_id="toy_envs:RewardArray-v0"))


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Ant-v5"])
def test_environments_of_gymnasium(cli, env_id):
    run_dir = brief(cli, "run", "--eval-frequency", "200", *cli.one_policy, env_id=env_id)
    assert np.isfinite([float(row["eval/best_return"]) for row in read_rows(run_dir / "eval.csv")]).all()


def test_an_environment_without_a_time_limit(cli):
    """It is said that its evaluations may never end; of others nothing is."""
    assert "max_episode_steps" in call(cli, "endless", env_id="toy_envs:Endless-v0")[1]
    assert "max_episode_steps" not in call(cli, "point")[1]


def test_an_environment_s_own_exception(cli):
    """It is not caught, so that it shows its traceback; a line says how to go on; mended, the run is as if it had not been."""
    whole = brief(cli, "whole")
    cli.monkeypatch.setattr(Point, "events", {157: fail})
    with pytest.raises(ZeroDivisionError, match="unstable"):
        brief(cli, "cut")
    assert "go on from it with: --resume runs/cut\n" in cli.capsys.readouterr().err
    assert checkpoint_of(cli.folder / "runs/cut")["progress"]["step"] == 0
    cli.call("--resume", "runs/cut")
    assert_same_run(whole, cli.folder / "runs/cut")


@pytest.mark.slow
def test_an_exception_in_a_worker(cli):
    """Its traceback shows where it was raised; the process ends, with exit code 1."""
    process = cli.start(*TINY, "--env-id", "toy_envs:Unstable-v0", "--run-name", "run", "--eval-workers", "1")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert re.search(r"toy_envs.py.*ZeroDivisionError: the simulator is unstable", err, re.S)
