"""Which environments can be trained in, what is learned from them, and what happens when they fail."""

import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, STOP_SIGNALS, environment, read_rows, wait_until
from test_resume import BRIEF, assert_same_run, brief, call, checkpoint_of, stop, whole
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

    The last row of an episode has its own last observation, not the first one of the next. The newest 105 transitions stand in
    place of the oldest.
    """
    replay = replay_of(brief(cli, "run", "--learning-starts", "120", env_id=f"toy_envs:{env_id}"))
    counts = np.roll(np.arange(15, 120), 15) % LENGTH
    assert replay["obs"][:, 1].tolist() == counts.tolist()
    assert replay["next_obs"][:, 1].tolist() == (counts + 1).tolist()
    np.testing.assert_allclose(replay["reward"][:, 0], -abs(replay["next_obs"][:, 0] - 1), atol=1e-5)
    ends = (counts == LENGTH - 1) & (env_id == "Terminating-v0")
    assert replay["terminated"][:, 0].tolist() == ends.tolist()


def test_random_start(cli):
    """Actions before learning starts are uniform: Kolmogorov's test."""
    actions = replay_of(brief(cli, "run", *"--total-timesteps 200 --learning-starts 200 --buffer-size 200".split()))["action"]
    np.testing.assert_allclose(np.sort(actions[:, 0]), np.linspace(-1, 1, 200), atol=2 * 1.95 / np.sqrt(200))


def test_what_an_agent_observes(cli):
    """Each transition once, after it is stored, with the return where an episode has ended."""
    rows, returns = [], {}

    def observe(agent, step, row, episodic_return, generator):
        rows.append(row.tolist())
        returns[str(step)] = str(episodic_return or "")

    cli.monkeypatch.setattr(cli.script.Agent, "observe", observe)
    run_dir = brief(cli, "run", "--learning-starts", "120", "--buffer-size", "120")
    assert rows == checkpoint_of(run_dir)["replay"].tolist()
    logged = {row["global_step"]: row["charts/episodic_return"] for row in read_rows(run_dir / "train.csv")}
    assert returns == dict.fromkeys(map(str, range(1, 121)), "") | logged


def test_observations_of_several_parts(cli):
    """An integer, one-hot, an image and a number."""
    replay = replay_of(brief(cli, "run", "--learning-starts", "120", "--buffer-size", "120", env_id="toy_envs:Nested-v0"))
    for step in (0, 6, 9, 119):
        count = step % LENGTH
        assert replay["obs"][step].tolist() == [*np.eye(8)[count], count, 1, 2, 255, 0.5]


@pytest.mark.parametrize("cli", ["rac_td3.py"], indirect=True)
@pytest.mark.parametrize("env_id", ["toy_envs:Far-v0", "toy_envs:Matrix-v0", "toy_envs:Scalar-v0"])
def test_actions_within_their_bounds(cli, env_id):
    """Learned in [-1, 1]; the environment, which refuses others, gets them in its own bounds, shape and type."""
    cli.monkeypatch.setattr(Point, "actions", [])
    run_dir = brief(cli, "run", "--buffer-size", "120", "--exploration-noise", "1", env_id=env_id)
    space = gym.make(env_id).action_space
    learned = replay_of(run_dir, space.low.size)["action"]
    assert (learned.min(), learned.max()) == (-1, 1)
    assert {action.dtype for action in Point.actions} == {space.dtype}
    expected = space.low + (learned.reshape(-1, *space.shape).astype(float) + 1) / 2 * (space.high - space.low)
    np.testing.assert_allclose(Point.actions, expected, rtol=1e-5, atol=1e-3)


def test_rewards_of_one_number(cli):
    """In an array they are learned from as numbers."""
    assert_same_run(whole(cli), brief(cli, "array", env_id="toy_envs:RewardArray-v0"))


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Ant-v5"])
def test_environments_of_gymnasium(cli, env_id):
    run_dir = brief(cli, "run", "--eval-frequency", "20", "--eval-episodes", "1", *cli.one_policy, env_id=env_id)
    assert np.isfinite([float(row["eval/best_return"]) for row in read_rows(run_dir / "eval.csv")]).all()


def test_an_environment_without_a_time_limit(cli):
    """It is said that its evaluations may never end; of others nothing is."""
    for env_id, told in (("toy_envs:Endless-v0", True), ("toy_envs:Point-v0", False)):
        _, err = call(cli, env_id, "--total-timesteps", "1", env_id=env_id)
        assert ("max_episode_steps" in err) == told


def test_an_environment_s_own_exception(cli):
    """It is not caught, so that it shows its traceback; a line says how to go on; mended, the run is as if it had not been."""
    cli.monkeypatch.setattr(Point, "events", {115: fail})
    with pytest.raises(ZeroDivisionError, match="unstable"):
        brief(cli, "cut")
    assert f"go on from it with: --resume {cli.folder}/runs/cut\n" in cli.capsys.readouterr().err
    assert checkpoint_of(cli.folder / "runs/cut")["progress"]["step"] == 0
    cli.call("--resume", "runs/cut")
    assert_same_run(whole(cli), cli.folder / "runs/cut")


@pytest.mark.slow
@pytest.mark.parametrize("name, runs", [("Unstable", ["run"]), ("UnstableInit", [])])
def test_an_exception_in_a_worker(cli, name, runs):
    """Whatever it is, its traceback and text are shown; where an environment cannot be made, before the first step."""
    with pytest.raises(RuntimeError, match=r"(?s)--eval-workers 0 .*toy_envs.py.*OfTwo: joint 3 at 90"):
        brief(cli, "run", "--eval-workers", "2", env_id=f"toy_envs:{name}-v0")
    assert ("--resume" in cli.capsys.readouterr().err) == bool(runs)
    assert [path.name for path in cli.folder.glob("runs/*")] == runs


def test_an_environment_that_ends_the_program(cli):
    """One sentence, and how to go on."""
    cli.monkeypatch.setattr(Point, "events", {115: lambda: sys.exit("no licence")})
    _, err = call(cli, "cut", code=1)
    assert f"--resume {cli.folder}/runs/cut\nerror: the environment ended the program, by sys.exit('no licence')\n" in err
    cli.call("--resume", "runs/cut")
    assert_same_run(whole(cli), cli.folder / "runs/cut")


@pytest.mark.slow
def test_an_environment_that_ends_a_worker(cli):
    """Ends the run in the same way."""
    _, err = call(cli, "run", "--eval-workers", "1", env_id="toy_envs:Exits-v0", code=1)
    assert f"--resume {cli.folder}/runs/run\nerror: the environment ended the program, by sys.exit(None)\n" in err


# Processes of their own ---
def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def made(folder: Path) -> int:
    """How many processes a test's environments have made."""
    return len(list(Path(folder, "pids").iterdir()))


def alive(folder: Path) -> list[int]:
    """The processes of a test's environments that still run."""
    return [pid for pid in (int(path.name) for path in Path(folder, "pids").iterdir()) if runs(pid)]


@pytest.mark.parametrize("name", ["Program", "Fork"])
def test_environments_are_closed(cli, name):
    """After a run, also one that stops or fails, and after --evaluate; another run makes new ones."""
    for run, code, event in (("whole", 0, int), ("cut", 143, lambda: signal.raise_signal(signal.SIGTERM)), ("bad", 1, sys.exit)):
        cli.monkeypatch.setattr(Point, "events", {115: event})
        call(cli, run, env_id=f"toy_envs:{name}-v0", code=code)
        assert made(cli.folder) == 3  # one trains, two evaluate
        assert alive(cli.folder) == []
        shutil.rmtree(cli.folder / "pids")
    cli.call("--evaluate", "runs/whole")
    assert (made(cli.folder), alive(cli.folder)) == (2, [])


def test_an_environment_that_is_refused_is_closed(cli):
    call(cli, "run", env_id="toy_envs:UnfitProgram-v0", code=2)
    assert alive(cli.folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name, left", [("Program", 0), ("LateFork", 0), ("FailingClose", 0), ("HangingClose", 2)])
def test_workers_are_gone_within_five_seconds(cli, name, left, number):
    """When a run is stopped or killed. What they leave is behind a close() that hangs; that of a killed trainer is its own."""
    options = (*cli.tiny, *BRIEF, "--env-id", f"toy_envs:{name}-v0", "--run-name", "run", "--eval-workers", "2")
    process = cli.start(*options, "--total-timesteps", "1000000")
    wait_until((cli.folder / "runs/run/eval.csv").exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    process.send_signal(number)
    wait_until(lambda: not any(map(runs, workers)), 5)
    process.wait(60)
    assert len(alive(cli.folder)) == left + (number == signal.SIGKILL)
    for pid in alive(cli.folder):
        os.kill(pid, signal.SIGKILL)
    assert process.communicate(timeout=5)


def test_evaluate_where_closing_fails(cli):
    """What has been played is written before."""
    with pytest.raises(ZeroDivisionError):
        brief(cli, "run", env_id="toy_envs:FailingCloseHere-v0")
    with pytest.raises(ZeroDivisionError):
        cli.call("--evaluate", "runs/run")
    policy = cli.script.load_policy(cli.folder / "runs/run")
    assert len(read_rows(cli.folder / "runs/run/evaluate.csv")) == len(cli.script.eval_conditions(policy.args))


@pytest.mark.slow
def test_processes_that_are_forked_late(cli):
    """They hold pipes of workers open: one that dies is replaced all the same, and the run ends."""
    run_dir = brief(cli, "run", "--eval-workers", "2", env_id="toy_envs:Forks-v0")
    assert len(list(cli.folder.glob("died.*"))) >= 1
    for pid in alive(cli.folder):  # those of the worker that was killed
        os.kill(pid, signal.SIGKILL)
    assert_same_run(whole(cli), run_dir)


def test_workers_that_cannot_be_started(cli):
    """Those that have started end."""
    real, count = multiprocessing.get_context("spawn").Process.start, iter([True, False])

    def start(process):
        if not next(count):
            raise BlockingIOError("Resource temporarily unavailable")
        return real(process)

    cli.monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", start)
    with pytest.raises(BlockingIOError):
        brief(cli, "run", "--eval-workers", "2")
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_workers_make_the_environment_that_is_registered(cli, workers):
    """Not what the one of training has left of its arguments; wrappers in the entry point do no harm."""
    run_dir = brief(cli, "run", "--eval-workers", workers, env_id="toy_envs:Consuming-v0")
    assert {float(row["eval/best_return"]) for row in read_rows(run_dir / "eval.csv")} == {100.0}
    assert len(read_rows(brief(cli, "wrapped", "--eval-workers", workers, env_id="toy_envs:Wrapped-v0") / "eval.csv")) == 3


# What is global ---
def test_random_numbers_of_nobody(cli):
    """Draws from NumPy's and Python's own generators follow from the seed, also when a run is resumed; evaluations leave them."""
    undisturbed = brief(cli, "whole", env_id="toy_envs:Random-v0")
    stop(cli, "cut", 116, env_id="toy_envs:Random-v0")
    cli.call("--resume", "runs/cut")
    assert_same_run(undisturbed, cli.folder / "runs/cut")
    never = brief(cli, "never", "--eval-frequency", "20", env_id="toy_envs:Random-v0")
    assert_same_run(undisturbed, never, ("train.csv",))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_random_numbers_of_nobody_in_workers(cli, workers):
    """They are those of a run without workers."""
    np.random.seed(int(workers))
    one = brief(cli, "one", "--eval-workers", workers, env_id="toy_envs:Random-v0")
    assert_same_run(one, brief(cli, "other", env_id="toy_envs:Random-v0"))


@pytest.mark.parametrize("name", ["MovingInit", "MovingReset", "MovingStep"])
def test_another_working_directory(cli, name):
    """The files are where the run began, and what is printed of it holds anywhere."""
    env_id = f"toy_envs:{name}-v0"
    out = stop(cli, "cut", 115, env_id=env_id)
    assert f"--resume {cli.folder}/runs/cut" in out
    cli.call("--resume", "runs/cut")
    assert_same_run(whole(cli), cli.folder / "runs/cut")
    assert checkpoint_of(cli.folder / "runs/cut")["args"]["run_root"] == "runs"
    cli.call("--evaluate", "runs/cut")
    assert (cli.folder / "runs/cut/evaluate.csv").exists()


def test_the_home_folder(cli):
    """A path that the shell has left alone, as in --run-root=~/x."""
    cli.monkeypatch.setenv("HOME", str(cli.folder))
    brief(cli, "run", "--run-root=~/x", "--total-timesteps", "1")
    cli.call("--resume=~/x/run", "--total-timesteps", "2")
    cli.call("--evaluate=~/x/run")
    assert cli.script.load_policy("~/x/run").step == 2
    assert [path.name for path in cli.folder.iterdir()] == ["x"]


@pytest.mark.slow
@pytest.mark.parametrize("register", ["'Mine-v0', Mine, kwargs={'low': [-3.0]}", "'Mine-v0', lambda lock=lock: Mine([-3.0])"])
def test_an_environment_of_the_calling_program(cli, register):
    """Registered in its main part, with keyword arguments; what cannot be carried to workers is there by its id, if it is."""
    guard = "if __name__ == '__main__':"
    cli.path = cli.folder / "program.py"
    cli.path.write_text(
        f"""import threading
import gymnasium, rac_sac
from toy_envs import Point
lock = threading.Lock()
class Mine(Point):
    pass
{"if True:" if "lock" in register else guard}
    gymnasium.register({register}, max_episode_steps=50)
{guard}
    args = {{"run_name": "run", "compile": False, "learning_starts": 100, "eval_workers": 1, "eval_frequency": 50, "utd": 1}}
    args |= {{"num_critics": 2, "hidden_dim": 8, "total_timesteps": 150}}
    rac_sac.train(rac_sac.Args(env_id="Mine-v0", **args))
"""
    )
    process = cli.start(env=environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")])))
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert len(read_rows(cli.folder / "runs/run/eval.csv")) == 2


@pytest.mark.slow
def test_schedulers_signal_every_process(cli):
    """Of the group: workers leave it to training, which stops in order."""
    for number in STOP_SIGNALS:
        name = number.name
        options = (*cli.tiny, *BRIEF, "--env-id", "toy_envs:Fork-v0", "--run-name", name, "--eval-workers", "1")
        process = cli.start(*options, "--total-timesteps", "1000000", start_new_session=True)
        wait_until((cli.folder / "runs" / name / "eval.csv").exists)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, alive(cli.folder)) == (128 + number, []), err
        assert f"--resume {cli.folder}/runs/{name}" in out
