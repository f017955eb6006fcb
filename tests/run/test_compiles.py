"""torch.compile: before the first step, where it fails, interrupted, and exact all the same."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import assert_same_networks, assert_same_run, checkpoint_of, every_script, messages, wait_until
from toy_envs import Start

import rac_sac


def compiled(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument != "--no-compile"]


def fake_compiler(monkeypatch, wrap):
    """What torch.compile makes of a function is wrap(function)."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: wrap(function))


def test_compiled_before_the_first_step(cli, toy):
    """And what this changes is put back: the run is the same."""
    order = []

    def compile_function(function):
        def call(*arguments):
            order.append(function.__name__)
            return function(*arguments)

        return call

    env_id = toy(Start, change=lambda env: order.append("step"))
    cli.call("--env-id", env_id, *cli.brief, "--run-name", "eager")
    order.clear()
    fake_compiler(cli.monkeypatch, compile_function)
    cli.call("--env-id", env_id, *compiled(cli.brief))
    assert {*order[: order.index("step")]} == {function.__name__ for function in rac_sac.COMPILED}
    assert_same_run(cli.folder / "runs/eager", cli.run_dir)


def failing(function):
    def call(*arguments):
        try:
            raise OSError("g++: error: no such compiler")
        except OSError as error:
            raise RuntimeError("backend failed:\nlong explanation\n") from error

    return call


def test_a_failing_compiler(cli, toy):
    """It says the reason and the flag; the run goes on as if that had been given."""
    env_id = toy(Start)
    cli.call("--env-id", env_id, *cli.brief, "--run-name", "eager")
    fake_compiler(cli.monkeypatch, failing)
    result = cli.call("--env-id", env_id, *compiled(cli.brief))
    said = " ".join(messages(result.stderr))
    assert "g++: error: no such compiler" in said
    assert "--no-compile" in said
    assert "long explanation" not in said
    assert_same_run(cli.folder / "runs/eager", cli.run_dir)
    assert json.loads((cli.run_dir / "config.json").read_text())["args"]["compile"] is False
    assert checkpoint_of(cli.run_dir)["args"]["compile"] is False
    assert messages(cli.call("--resume", cli.run_dir, "--total-timesteps", "70").stderr) == []


def test_a_signal_while_compiling(cli, toy):
    """Ctrl-C in a terminal also ends the compiler: the run stops at step 0, and still has it when it is resumed."""

    def interrupted(function):
        def call(*arguments):
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError("the compiler was killed")

        return call

    with cli.monkeypatch.context() as patch:
        fake_compiler(patch, interrupted)
        result = cli.call("--env-id", toy(Start), *compiled(cli.brief), code=128 + signal.SIGINT)
    (line,) = messages(result.stderr)
    assert "stopped at step 0" in line
    assert checkpoint_of(cli.run_dir)["args"]["compile"] is True
    fake_compiler(cli.monkeypatch, lambda function: function)
    cli.call("--resume", cli.run_dir)
    assert checkpoint_of(cli.run_dir)["args"]["compile"] is True


@pytest.mark.slow
def test_no_compiler(cli):
    cli.env.update(CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=str(cli.folder.parent / "empty"))
    result = cli.run("--env-id", "toy_envs:Truncating-v0", *compiled(cli.brief))
    said = " ".join(messages(result.stderr))
    assert "no-such-compiler" in said
    assert "--no-compile" in said
    assert "Traceback" not in said
    assert json.loads((cli.run_dir / "config.json").read_text())["args"]["compile"] is False


@pytest.mark.slow
def test_interrupted_while_compiling(cli):
    """Ctrl-C in a terminal goes to the compiler too."""
    cli.env.update(TORCHINDUCTOR_CACHE_DIR=str(cli.folder.parent / "empty"))
    process = cli.start("--env-id", "toy_envs:Truncating-v0", *compiled(cli.brief), start_new_session=True)

    def compiling():
        return (cli.run_dir / "checkpoint.pt").exists() and any(is_compiler_of(path, process.pid) for path in processes())

    wait_until(compiling)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert "stopped at step 0" in err
    checkpoint = checkpoint_of(cli.run_dir)
    assert checkpoint["state"]["step"] == 0
    assert checkpoint["args"]["compile"] is True


def processes() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*/stat"))


def is_compiler_of(stat: Path, session: int) -> bool:
    try:
        name, fields = stat.read_text().rsplit(")", 1)
    except OSError:
        return False
    return name.endswith("(cc1plus") and int(fields.split()[3]) == session


@pytest.mark.slow
@every_script
def test_compiled_run_resumes_exactly(cli):
    """With the default deterministic settings, across processes."""
    arguments = ("--env-id", "toy_envs:Start-v0", *compiled(cli.brief))
    cli.run(*arguments, "--run-name", "whole")
    cli.run(*arguments, "--run-name", "grown", "--total-timesteps", "55")
    result = cli.run("--resume", "runs/grown", "--total-timesteps", "60")
    assert_same_networks(cli.folder / "runs/whole", cli.folder / "runs/grown")
    assert "compiling" in result.stderr
    assert "compiling" not in result.stderr.replace("\r", "\n").splitlines()[-1]
    shutil.rmtree(cli.folder / "runs")
