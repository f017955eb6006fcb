"""Which environments can be trained in, what is learned from them, and what happens when they fail."""

import multiprocessing
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import STOP_SIGNALS, is_running, of_the_four, processes_made, processes_running, read_rows, wait_until
from tiny_runs import assert_same_run, checkpoint_of, stopped_run, whole_run
from toy_envs import EPISODE_LENGTH, Point, fail


def replay_of(run_dir: Path, action_dim: int = 1) -> dict:
    """The columns of a run's replay by name."""
    rows = checkpoint_of(run_dir)["replay"].numpy()
    obs_dim = (rows.shape[1] - action_dim - 2) // 2
    columns = np.split(rows, np.cumsum([obs_dim, action_dim, 1, 1]), axis=1)
    return dict(zip(("obs", "action", "reward", "terminated", "next_obs"), columns, strict=True))


@pytest.mark.parametrize("env_id", ["Point-v0", "SameArray-v0", "Terminating-v0"])
def test_what_is_learned_from(cli, env_id):
    """An observation is followed by the next one, also where one array holds both; only termination stops the bootstrap.

    The last row of an episode has its own last observation, not the first one of the next. The newest 95 transitions stand in
    place of the oldest.
    """
    replay = replay_of(cli.train("run", env_id=f"toy_envs:{env_id}"))
    steps = np.r_[95:110, 15:95]  # of the 95 rows
    counts = steps % EPISODE_LENGTH
    assert replay["obs"][:, 1].tolist() == counts.tolist()
    assert replay["next_obs"][:, 1].tolist() == (counts + 1).tolist()
    np.testing.assert_allclose(replay["reward"][:, 0], -abs(replay["next_obs"][:, 0] - 1), atol=1e-5)
    ends = (counts == EPISODE_LENGTH - 1) & (env_id == "Terminating-v0")
    assert replay["terminated"][:, 0].tolist() == ends.tolist()


def test_random_start(cli):
    """Actions before learning starts are uniform: Kolmogorov's test."""
    run_dir = cli.train("run", *"--total-timesteps 200 --learning-starts 200 --buffer-size 200".split())
    actions = replay_of(run_dir)["action"][:, 0]
    np.testing.assert_allclose(np.sort(actions), np.linspace(-1, 1, 200), atol=2 * 1.95 / np.sqrt(200))


def test_what_an_agent_observes(cli):
    """Each transition once, after it is stored, with the return where an episode has ended."""
    steps, rows, returns = [], [], {}

    def observe(agent, step, row, episodic_return, generator):
        steps.append(step)
        rows.append(row.tolist())
        if episodic_return is not None:
            returns[step] = episodic_return

    cli.monkeypatch.setattr(cli.script.Agent, "observe", observe)
    run_dir = cli.train("run", "--buffer-size", "110")
    assert steps == list(range(1, 111))
    assert rows == checkpoint_of(run_dir)["replay"].tolist()
    logged = read_rows(run_dir / "train.csv")[:-1]  # the last one ends no episode
    assert returns == {int(row["global_step"]): float(row["charts/episodic_return"]) for row in logged}


def test_observations_of_several_parts(cli):
    """An integer, one-hot, an image and a number."""
    replay = replay_of(cli.train("run", "--buffer-size", "110", env_id="toy_envs:Nested-v0"))
    for step in (0, 6, 9, 109):
        count = step % EPISODE_LENGTH
        assert replay["obs"][step].tolist() == [*np.eye(8)[count], count, 1, 2, 255, 0.5]


@of_the_four
@pytest.mark.parametrize("cli", ["rac_td3.py"], indirect=True)
@pytest.mark.parametrize("env_id", ["toy_envs:Far-v0", "toy_envs:Matrix-v0", "toy_envs:Scalar-v0"])
def test_actions_within_their_bounds(cli, env_id):
    """Learned in [-1, 1], whose ends TD3's noise reaches; the environment gets them in its own bounds, shape and type."""
    cli.monkeypatch.setattr(Point, "actions", [])
    run_dir = cli.train("run", "--total-timesteps", "120", "--buffer-size", "120", "--exploration-noise", "1", env_id=env_id)
    space = gym.make(env_id).action_space
    learned = replay_of(run_dir, space.low.size)["action"]
    assert (learned.min(), learned.max()) == (-1, 1)
    assert {action.dtype for action in Point.actions} == {space.dtype}
    share = (learned.astype(float) + 1) / 2
    expected = space.low + share.reshape(-1, *space.shape) * (space.high - space.low)
    np.testing.assert_allclose(Point.actions, expected, rtol=1e-5, atol=1e-3)


def test_rewards_of_one_number(cli):
    """In an array they are learned from as numbers."""
    assert_same_run(whole_run(cli), cli.train("array", env_id="toy_envs:RewardArray-v0"))


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Ant-v5"])
def test_environments_of_gymnasium(cli, env_id):
    """Pendulum ends after 200 steps, by Gymnasium's wrapper."""
    options = "--total-timesteps 201 --learning-starts 190 --eval-frequency 20".split()
    run_dir = cli.train("run", *options, *cli.policies(1), env_id=env_id)
    returns = [float(row["eval/best_return"]) for row in read_rows(run_dir / "eval.csv")]
    assert len(returns) == 2
    assert np.isfinite(returns).all()
    lengths = {row["charts/episodic_length"] for row in read_rows(run_dir / "train.csv")}
    assert "200" in lengths or env_id == "Ant-v5"


def test_an_environment_without_a_time_limit(cli):
    """It is said that its evaluations may never end; of others nothing is."""
    _, err = cli.call(*cli.tiny_run("endless", "--total-timesteps", "1", env_id="toy_envs:Endless-v0"))
    assert "max_episode_steps" in err
    _, err = cli.call(*cli.tiny_run("limited", "--total-timesteps", "1"))
    assert "max_episode_steps" not in err


def test_an_environment_s_own_exception(cli):
    """It is not caught, so that it shows its traceback; a line says how to go on; mended, the run is as if it had not been."""
    cli.monkeypatch.setattr(Point, "events", {101: fail})
    with pytest.raises(ZeroDivisionError, match="unstable"):
        cli.train("cut")
    run_dir = cli.folder / "runs/cut"
    assert f"go on from it with: --resume {run_dir}\n" in cli.capsys.readouterr().err
    assert checkpoint_of(run_dir)["progress"]["step"] == 0
    cli.call("--resume", run_dir)
    assert_same_run(whole_run(cli), run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("name, run_dirs, resumable", [("Unstable", ["run"], True), ("UnstableInit", [], False)])
def test_an_exception_in_a_worker(cli, name, run_dirs, resumable):
    """Whatever it is, its traceback and text are shown; where an environment cannot be made, before the first step."""
    with pytest.raises(RuntimeError, match=r"(?s)--eval-workers 0 .*toy_envs.py.*Unpicklable: joint 3 at 90"):
        cli.train("run", "--eval-workers", "2", env_id=f"toy_envs:{name}-v0")
    assert ("--resume" in cli.capsys.readouterr().err) == resumable
    assert [path.name for path in cli.folder.glob("runs/*")] == run_dirs


def test_an_environment_that_ends_the_program(cli):
    """One sentence, and how to go on."""
    cli.monkeypatch.setattr(Point, "events", {101: lambda: sys.exit("no licence")})
    _, err = cli.call(*cli.tiny_run("cut"), code=1)
    run_dir = cli.folder / "runs/cut"
    assert f"--resume {run_dir}\nerror: the environment ended the program, by sys.exit('no licence')\n" in err
    cli.call("--resume", run_dir)
    assert_same_run(whole_run(cli), run_dir)


@pytest.mark.slow
def test_an_environment_that_ends_a_worker(cli):
    """Ends the run in the same way."""
    _, err = cli.call(*cli.tiny_run("run", "--eval-workers", "1", env_id="toy_envs:Exits-v0"), code=1)
    assert f"--resume {cli.folder}/runs/run\nerror: the environment ended the program, by sys.exit(None)\n" in err


# Processes of their own ---
@pytest.mark.parametrize("name", ["Program", "Fork"])
def test_environments_are_closed(cli, name):
    """After a run, also one that stops or fails, and after --evaluate; another run makes new ones."""
    ends = (
        ("whole", {}, 0),
        ("cut", {101: partial(signal.raise_signal, signal.SIGTERM)}, 143),
        ("bad", {101: sys.exit}, 1),
    )
    for run, events, code in ends:
        cli.monkeypatch.setattr(Point, "events", events)
        cli.call(*cli.tiny_run(run, env_id=f"toy_envs:{name}-v0"), code=code)
        assert len(processes_made(cli.folder)) == 3  # one trains, two evaluate
        assert processes_running(cli.folder) == []
        shutil.rmtree(cli.folder / "pids")
    cli.call("--evaluate", "runs/whole")
    assert len(processes_made(cli.folder)) == 2
    assert processes_running(cli.folder) == []


def test_an_environment_that_is_refused_is_closed(cli):
    cli.call(*cli.tiny_run("run", env_id="toy_envs:UnfitProgram-v0"), code=2)
    assert processes_running(cli.folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("number, left_by_training", [(signal.SIGTERM, 0), (signal.SIGKILL, 1)])
@pytest.mark.parametrize("name, left", [("Program", 0), ("LateFork", 0), ("FailingClose", 0), ("HangingClose", 2)])
def test_workers_are_gone_within_five_seconds(cli, name, left, number, left_by_training):
    """When a run is stopped or killed. What they leave is behind a close() that hangs; that of a killed trainer is its own."""
    options = "--eval-workers 2 --total-timesteps 1000000".split()
    process = cli.start(*cli.tiny_run("run", *options, env_id=f"toy_envs:{name}-v0"))
    wait_until((cli.folder / "runs/run/eval.csv").exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    process.send_signal(number)
    wait_until(lambda: not any(map(is_running, workers)), 5)
    process.wait(60)
    assert len(processes_running(cli.folder)) == left + left_by_training
    for pid in processes_running(cli.folder):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=5)  # nothing holds its output open


def test_evaluate_where_closing_fails(cli):
    """What has been played is written before."""
    with pytest.raises(ZeroDivisionError):
        cli.train("run", env_id="toy_envs:FailingCloseHere-v0")
    with pytest.raises(ZeroDivisionError):
        cli.call("--evaluate", "runs/run")
    policy = cli.script.load_policy(cli.folder / "runs/run")
    rows = read_rows(cli.folder / "runs/run/evaluate.csv")
    assert len(rows) == len(cli.script.eval_conditions(policy.args))


@pytest.mark.slow
def test_processes_that_are_forked_late(cli):
    """They hold pipes of workers open: one that dies is replaced all the same, and the run ends."""
    run_dir = cli.train("run", "--eval-workers", "2", env_id="toy_envs:LateForkDiesOnce-v0")
    assert len(list(cli.folder.glob("died.*"))) >= 1
    for pid in processes_running(cli.folder):  # those of the worker that was killed
        os.kill(pid, signal.SIGKILL)
    assert_same_run(whole_run(cli), run_dir)


def test_workers_that_cannot_be_started(cli):
    """Those that have started end."""
    spawned = multiprocessing.get_context("spawn").Process
    real_start, started = spawned.start, []

    def start(process):
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(process)
        real_start(process)

    cli.monkeypatch.setattr(spawned, "start", start)
    with pytest.raises(BlockingIOError):
        cli.train("run", "--eval-workers", "2")
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_workers_make_the_environment_that_is_registered(cli, workers):
    """Not what the one of training has left of its arguments; wrappers in the entry point do no harm."""
    run_dir = cli.train("run", "--eval-workers", workers, env_id="toy_envs:Consuming-v0")
    assert {float(row["eval/best_return"]) for row in read_rows(run_dir / "eval.csv")} == {100.0}
    wrapped = cli.train("wrapped", "--eval-workers", workers, env_id="toy_envs:Wrapped-v0")
    assert len(read_rows(wrapped / "eval.csv")) == 3


# Global random numbers ---
def test_global_random_numbers(cli):
    """Draws from NumPy's and Python's own generators follow from the seed, also when a run is resumed; evaluations leave them."""
    undisturbed = cli.train("whole", env_id="toy_envs:DrawsFromGlobals-v0")
    run_dir, _ = stopped_run(cli, "cut", 102, env_id="toy_envs:DrawsFromGlobals-v0")
    cli.call("--resume", run_dir)
    assert_same_run(undisturbed, run_dir)
    seldom = cli.train("seldom", "--eval-frequency", "20", env_id="toy_envs:DrawsFromGlobals-v0")
    assert_same_run(undisturbed, seldom, ("train.csv",))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_global_random_numbers_in_workers(cli, workers):
    """They are those of a run without workers."""
    np.random.seed(int(workers))  # what the program has drawn before must not matter
    one = cli.train("one", "--eval-workers", workers, env_id="toy_envs:DrawsFromGlobals-v0")
    assert_same_run(one, cli.train("other", env_id="toy_envs:DrawsFromGlobals-v0"))


# Around the run ---
@pytest.mark.parametrize("name", ["ChangesFolderInit", "ChangesFolderReset", "ChangesFolderStep"])
def test_another_working_directory(cli, name):
    """The files are where the run began, and what is printed of it holds anywhere."""
    run_dir, out = stopped_run(cli, "cut", 101, env_id=f"toy_envs:{name}-v0")
    assert f"--resume {run_dir}" in out
    cli.call("--resume", "runs/cut")
    assert_same_run(whole_run(cli), run_dir)
    assert checkpoint_of(run_dir)["args"]["run_root"] == "runs"
    cli.call("--evaluate", "runs/cut")
    assert (run_dir / "evaluate.csv").exists()


def test_the_home_folder(cli):
    """A path that the shell has left alone, as in --run-root=~/x."""
    cli.monkeypatch.setenv("HOME", str(cli.folder))
    cli.train("run", "--run-root=~/x", "--total-timesteps", "1")
    cli.call("--resume=~/x/run", "--total-timesteps", "2")
    cli.call("--evaluate=~/x/run")
    assert cli.script.load_policy("~/x/run").step == 2
    assert [path.name for path in cli.folder.iterdir()] == ["x"]


UNGUARDED = """
import threading
lock = threading.Lock()
gymnasium.register("Mine-v0", lambda lock=lock: Mine([-3.0]), max_episode_steps=50)
if __name__ == "__main__":
    train()
"""
GUARDED = """
if __name__ == "__main__":
    gymnasium.register("Mine-v0", Mine, kwargs={"low": [-3.0]}, max_episode_steps=50)
    train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("registration", [GUARDED, UNGUARDED], ids=["guarded", "unguarded"])
def test_an_environment_of_the_calling_program(cli, registration):
    """Registered in its main part, with keyword arguments; what cannot be carried to workers is there by its id, if it is."""
    args = {"env_id": "Mine-v0", "run_name": "run", "compile": False, "utd": 1, "num_critics": 2, "hidden_dim": 8}
    args |= {"total_timesteps": 150, "learning_starts": 100, "eval_workers": 1, "eval_frequency": 50}
    cli.call_program(
        f"""
import gymnasium
import {cli.name} as script
from toy_envs import Point
class Mine(Point):
    pass
def train():
    script.train(script.Args(**{args}))
{registration}"""
    )
    assert len(read_rows(cli.folder / "runs/run/eval.csv")) == 2


@pytest.mark.slow
def test_schedulers_signal_every_process(cli):
    """Of the group: workers leave it to training, which stops in order."""
    options = "--eval-workers 1 --total-timesteps 1000000".split()
    for number in STOP_SIGNALS:
        run_dir = cli.folder / "runs" / number.name
        process = cli.start(*cli.tiny_run(number.name, *options, env_id="toy_envs:Fork-v0"), start_new_session=True)
        wait_until((run_dir / "eval.csv").exists)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number, err
        assert processes_running(cli.folder) == []
        assert f"--resume {run_dir}" in out
