"""How a run ends before its last step: signals, failures of environments, disks and workers, and what is left then."""

import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    assert_same_run,
    checkpoint_of,
    children,
    kill,
    messages,
    rows_of,
    sentence_of,
    wait_until,
)
from toy_envs import Counter, does, raises, since

import rac_sac

SLOW_SIGNALS = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP)]


def resume_line(text: str) -> str:
    """The run directory that a message names to go on with."""
    return re.search(r"go on with: python \S+\.py --resume (\S+)", text)[1]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# ---------------------------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGINT, *SLOW_SIGNALS])
def test_signals_write_a_checkpoint(cli, whole, number):
    """After the step; workers end too, and the last line says how to go on."""
    with cli.held("cut", "--eval-workers", "1", at=260) as (process, cut):
        cli.holding(process)
        workers = children(process.pid)
        process.send_signal(number)
        cli.release()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    assert checkpoint_of(cut)["state"]["step"] == 260
    assert "stopped at step 260" in messages(err)[-1]
    assert workers
    assert all(gone(pid) for pid in workers)
    cli.call("--resume", resume_line(err))
    assert_same_run(whole[0], cut)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_second_ctrl_c_ends_at_once(cli, number):
    """An episode without end is evaluated in this process, which the first signal does not interrupt."""
    process = cli.start("--env-id", "toy_envs:Endless-v0", *cli.brief)
    wait_until((cli.folder / "endless").exists)
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert checkpoint_of(cli.run_dir)["state"]["step"] == 0


def test_a_second_sigterm_does_no_harm(cli, toy):
    """As when a Ray worker ends its script and is then killed itself."""

    def terminate(env):
        if env.number == 0 and env.total == 45:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)

    result = cli.call("--env-id", toy(change=terminate), *cli.brief, code=128 + signal.SIGTERM)
    assert "stopped at step 45" in messages(result.stderr)[-1]
    assert checkpoint_of(cli.run_dir)["state"]["step"] == 45


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_evaluation_on_its_own_can_be_stopped(cli, number):
    run_dir = cli.train("run", "--total-timesteps", "210", env_id="toy_envs:Hopper-v0")
    with cli.held("run", "--evaluate", run_dir, "--eval-workers", "1") as (process, _):
        (worker,) = cli.holding(process)
        out, err = kill(process, number)
        assert process.returncode in (128 + number, -number)
        assert out == ""
        assert "Traceback" not in err
        wait_until(lambda: gone(worker))


def test_what_waits_is_kept(cli, toy):
    """Evaluations that do not end: the bar says that training waits; what is pending is in the checkpoint."""

    def never(evaluator, seconds=0.0):
        if seconds:  # that are waited for
            os.kill(os.getpid(), signal.SIGINT)

    cli.monkeypatch.setattr(rac_sac.Evaluator, "oldest", never)
    result = cli.call("--env-id", toy(), *cli.brief, "--max-pending-evaluations", "1", code=128 + signal.SIGINT)
    assert "training waits for evaluations" in result.stderr
    assert [step for step, *_ in checkpoint_of(cli.run_dir)["pending"]] == [40, 50]
    assert rows_of(cli.run_dir / "eval.csv") == 0


# ---------------------------------------------------------------------------------------------------------------- workers
def test_workers_die_with_a_killed_run(cli):
    """In the middle of their work: they wait in an environment's step."""
    with cli.held("cut", "--eval-workers", "1") as (process, _):
        workers = cli.holding(process)
        assert children(process.pid) == workers
        kill(process)
        wait_until(lambda: all(gone(pid) for pid in workers))


def test_a_dead_worker_is_named_and_its_evaluation_repeated(cli, whole):
    with cli.held("cut", "--eval-workers", "1") as (process, cut):
        (worker,) = cli.holding(process)
        assert children(process.pid) == [worker]
        os.kill(worker, signal.SIGKILL)
        cli.release()
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (line,) = messages(err)
    assert "worker died" in line
    assert_same_run(whole[0], cut)


def test_a_dead_worker_in_an_evaluation_on_its_own(cli):
    run_dir = cli.train("run", "--total-timesteps", "210", env_id="toy_envs:Hopper-v0")
    with cli.held("run", "--evaluate", run_dir, "--eval-workers", "1") as (process, _):
        (worker,) = cli.holding(process)
        os.kill(worker, signal.SIGKILL)
        cli.release()
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "worker died" in err
    assert out == cli.call("--evaluate", run_dir).stdout


@pytest.mark.parametrize(
    "env_id,said",
    [
        ("TwoArguments-v0", "TwoArguments: a fault in the simulator"),
        pytest.param("Exits-v0", "step() raised SystemExit(3)", marks=pytest.mark.slow),
        pytest.param("Interrupts-v0", "step() raised KeyboardInterrupt", marks=pytest.mark.slow),
    ],
)
def test_an_error_in_a_worker_is_shown(cli, env_id, said):
    """With its traceback and the way to go on, also where the exception cannot be sent to another process; in seconds."""
    start = time.time()
    result = cli.run("--env-id", f"toy_envs:{env_id}", *cli.brief, "--eval-workers", "1", code=1)
    assert "worker died" not in result.stderr
    assert "Traceback" in result.stderr
    assert said in result.stderr
    assert "toy_envs.py" in result.stderr
    assert resume_line(result.stderr) == "runs/run"
    assert result.stdout == ""
    assert time.time() - start < 200  # no worker is started again and again; most of it is importing torch twice


# ----------------------------------------------------------------------------------------------- errors of an environment
def fails_once(error: BaseException, step: int):
    """Raises in training at a step, the first time that it is reached."""
    errors = [error]

    def fail(env):
        if env.number == 0 and env.total == step and errors:
            raise errors.pop()

    return fail


@pytest.mark.parametrize("error", [RuntimeError("unstable"), BrokenPipeError("gone"), TypeError("odd"), AssertionError("no")])
def test_an_error_in_training(cli, toy, error):
    """Its traceback, the last timed checkpoint and how to go on from it; mended, the run is as if it had not been."""
    env_id = toy(change=fails_once(error, step=47))
    result = cli.call("--env-id", env_id, *cli.brief, code=1)
    (line,) = [line for line in messages(result.stderr) if "stopped at step" in line]
    assert "step 46" in line
    assert "of step 0;" in line
    assert resume_line(line) == "runs/run"
    assert "Traceback" in result.stderr
    assert messages(result.stderr)[-1] == f"{type(error).__name__}: {error}"
    assert result.stdout == ""
    assert checkpoint_of(cli.run_dir)["state"]["step"] == 0
    cli.call("--resume", cli.run_dir)
    cli.call("--env-id", env_id, *cli.brief, "--run-name", "whole")
    assert_same_run(cli.folder / "runs/whole", cli.run_dir)


def test_the_last_timed_checkpoint_stays(cli, toy):
    result = cli.call("--env-id", toy(change=fails_once(ValueError(), 47)), *cli.brief, "--checkpoint-seconds", "0", code=1)
    assert "of step 46;" in result.stderr
    assert checkpoint_of(cli.run_dir)["state"]["step"] == 46


def test_an_error_at_a_reset(cli, toy):
    class Unstable(Counter):
        def reset(self, seed=None, options=None):
            if self.total > 45 and self.number == 0:
                raise RuntimeError("the simulator is unstable")
            return super().reset(seed=seed)

    result = cli.call("--env-id", toy(Unstable), *cli.brief, code=1)
    assert "stopped at step 49" in result.stderr
    assert resume_line(result.stderr) == "runs/run"


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_mistake_of_a_fork_in_an_evaluation(cli, workers):
    """Its traceback shows where it is, also in a worker process; mended, the run goes on."""
    good = cli.script.read_text()
    cli.script = cli.folder / "my_rac.py"
    cli.script.write_text(good.replace("    returns = np.zeros(len(envs))\n", "    returns = np.zeros(len(environments))\n", 1))
    train = cli.run if workers == "1" else cli.call
    result = train("--env-id", "toy_envs:Truncating-v0", *cli.brief, "--eval-workers", workers, code=1)
    assert "in play_episodes" in result.stderr
    assert "'environments' is not defined" in result.stderr
    cli.script.write_text(good)
    sys.modules.pop("my_rac", None)
    cli.call("--resume", resume_line(result.stderr), "--eval-workers", "0")
    assert rows_of(cli.run_dir / "eval.csv") == 3


ENDS = [
    (SystemExit(), "SystemExit(None)"),
    (SystemExit(0), "SystemExit(0)"),
    (SystemExit(3), "SystemExit(3)"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
]


@pytest.mark.parametrize("error,said", ENDS, ids=[said for _, said in ENDS])
@pytest.mark.parametrize("number", [0, 1], ids=["training", "evaluation"])
def test_an_environment_that_ends_the_process(cli, toy, error, said, number):
    """It is an error like any other: which call, and how to go on."""
    change = does(lambda: raises(error), step=3)
    env_id = toy(change=lambda env: change(env) if env.number == number else None)
    result = cli.call("--env-id", env_id, *cli.brief, code=1)
    assert f"{env_id}: step() raised {said}" in result.stderr
    assert resume_line(result.stderr) == "runs/run"
    assert result.stdout == ""


def test_an_environment_that_ends_the_process_at_a_reset(cli, toy):
    class Exits(Counter):
        def reset(self, seed=None, options=None):
            sys.exit(4)

    result = cli.call("--env-id", toy(Exits), *cli.brief, code=1)
    assert "reset() raised SystemExit(4)" in result.stderr


def test_an_environment_that_ends_the_process_when_it_is_made(cli, toy):
    """Nothing is written."""

    class Exits(Counter):
        def __init__(self):
            sys.exit(5)

    result = cli.call("--env-id", toy(Exits), *cli.brief, code=1)
    assert "__init__() raised SystemExit(5)" in result.stderr
    assert list(cli.folder.iterdir()) == []


def test_a_keyboard_interrupt_of_a_program_is_its_own(cli, toy):
    """Where train() is called from Python, Ctrl-C goes through it as it is."""
    cli.monkeypatch.chdir(cli.folder)
    args = rac_sac.tyro.cli(rac_sac.Args, args=["--env-id", toy(change=does(lambda: raises(KeyboardInterrupt()))), *cli.brief])
    cli.monkeypatch.setattr(rac_sac.signal, "getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        rac_sac.train(args)
    assert checkpoint_of(cli.run_dir)["state"]["step"] == 0


# --------------------------------------------------------------------------------------------------------------- numbers
def test_a_non_finite_loss(cli, toy):
    """One sentence; the last checkpoint is of before, and has no such number."""
    env_id = toy(change=since(45, reward=1e30))  # finite itself, but its square is not in float32
    line = sentence_of(cli.call("--env-id", env_id, *cli.brief, "--checkpoint-seconds", "0", code=1))
    assert "qf_loss" in line
    assert "non-finite" in line
    checkpoint = checkpoint_of(cli.run_dir)
    step, saved = re.search(r"stopped at step (\d+).*checkpoint is of step (\d+)", line).groups()
    assert 40 < checkpoint["state"]["step"] == int(saved) < int(step) <= 60
    assert all(torch.isfinite(tensor).all() for tensor in [*checkpoint["tensors"].values(), checkpoint["replay"]])


# ---------------------------------------------------------------------------------------------------------------- threads
@pytest.mark.parametrize("env_id,workers", [("Closing-v0", "0"), ("LeftBehind-v0", "1")])
def test_a_thread_of_an_environment(cli, env_id, workers):
    """One that close() stops, and one that nothing stops: the process ends, here after one second in place of ten."""
    source = cli.script.read_text()
    waits = "threading.Timer(10.0, os._exit, (code,))"
    assert source.count(waits) == 1
    cli.script = cli.folder / cli.script.name
    cli.script.write_text(source.replace(waits, waits.replace("10.0", "1.0")))
    result = cli.run("--env-id", f"toy_envs:{env_id}", *cli.brief, "--eval-workers", workers)
    assert result.stdout.startswith("finished")
    assert rows_of(cli.run_dir / "eval.csv") == 3


@pytest.mark.parametrize("env_id,closed", [("Simulator-v0", 2), pytest.param("StuckSimulator-v0", 1, marks=pytest.mark.slow)])
def test_workers_close_their_environments(cli, env_id, closed):
    """A worker has two. Where close() of the first never returns, the second is left; the run ends all the same."""
    result = cli.run("--env-id", f"toy_envs:{env_id}", *cli.brief, "--eval-workers", "1")
    assert result.stdout.startswith("finished")
    assert len(list(cli.folder.glob("closed.*"))) == 1 + closed  # that of training too


def test_a_worker_that_breaks_ends(cli):
    """It does not wait for its thread; here it cannot read what it is to do, again and again."""
    program = """
import rac_sac
if __name__ == "__main__":
    def only_here(item): return item
    with rac_sac.Evaluator(rac_sac.Args(eval_workers=1), [0]) as evaluator:
        evaluator.deaths = 10
        evaluator.map(only_here, [1])
"""
    cli.script = cli.folder / "program.py"
    cli.script.write_text(program)
    cli.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), cli.env.get("PYTHONPATH", "")])
    assert "evaluation workers died again and again" in cli.run(code=1).stderr


def test_a_thread_of_an_environment_that_fails(cli, toy):
    """It is closed too."""
    closed = threading.Event()

    class Threaded(Counter):
        def close(self):
            closed.set()

    cli.call("--env-id", toy(Threaded, change=does(lambda: raises(ValueError("odd")))), *cli.brief, code=1)
    assert closed.is_set()


@pytest.mark.parametrize("error", [RuntimeError("the simulator is gone"), SystemExit(6)], ids=repr)
def test_an_environment_that_fails_in_closing(cli, toy, error):
    """It does not end a good run, nor an evaluation."""

    class Stuck(Counter):
        def close(self):
            raise error

    for arguments in (("--env-id", toy(Stuck), *cli.brief), ("--evaluate", "runs/run")):
        result = cli.call(*arguments)
        assert result.stdout
        assert repr(error) in result.stderr


# ------------------------------------------------------------------------------------------------------------------ disks
def limited(size: int):
    """No file may grow beyond a size, as if the disk were full."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_no_room_for_the_first_checkpoint(cli):
    """It ends at step 0, where nothing is lost."""
    arguments = ("--hidden-dim", "200")  # networks of megabytes
    result = cli.run("--env-id", "toy_envs:Truncating-v0", *cli.brief, *arguments, code=1, preexec_fn=limited(500_000))
    line = sentence_of(result)
    assert "stopped at step 0" in line
    assert "checkpoint.pt" in line
    assert "File too large" in line
    assert not list(cli.run_dir.glob("checkpoint.pt*"))


def test_no_room_for_a_later_checkpoint(cli):
    """The replay outgrows the disk in the middle of the run: it goes on, and fails in the end; the last checkpoint stays."""
    arguments = ("--env-id", "toy_envs:Wide-v0", *cli.brief, "--checkpoint-seconds", "0")
    result = cli.run(*arguments, code=1, preexec_fn=limited(215_000))
    assert "Traceback" not in result.stderr
    *early, last = messages(result.stderr)
    assert "at step" in early[0]
    assert "File too large" in early[0]
    assert last.startswith("error: stopped at step 60")
    saved = int(re.search(r"checkpoint is of step (\d+)", last)[1])
    assert 20 < checkpoint_of(cli.run_dir)["state"]["step"] == saved < 60
    assert not list(cli.run_dir.glob("*.tmp"))
    cli.call("--resume", cli.run_dir)  # with space again, it goes on
    assert checkpoint_of(cli.run_dir)["state"]["step"] == 60
    assert np.isfinite(checkpoint_of(cli.run_dir)["replay"].numpy()).all()


def test_a_folder_where_a_checkpoint_is_to_be_written(cli, toy):
    """At the start: one sentence."""
    (cli.run_dir / "checkpoint.pt.tmp").mkdir(parents=True)
    line = sentence_of(cli.call("--env-id", toy(), *cli.brief, code=1))
    assert "stopped at step 0" in line
    assert "checkpoint.pt" in line
    assert "irectory" in line


def test_a_folder_where_the_last_checkpoint_is_to_be_written(cli, toy):
    """In the middle: the run goes on, says so, and fails in the end."""

    def make(env):
        if env.number == 0 and env.total == 50:
            (cli.run_dir / "checkpoint.pt.tmp").mkdir()

    line = cli.call("--env-id", toy(change=make), *cli.brief, code=1).stderr.splitlines()[-1]
    assert "error: stopped at step 60" in line
    assert "of step 0;" in line
    (cli.run_dir / "checkpoint.pt.tmp").rmdir()
    cli.call("--resume", resume_line(line))
