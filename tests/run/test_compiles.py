"""torch.compile: before the first step, where it fails, interrupted, and exact all the same."""

import contextlib
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    assert_same_networks,
    assert_same_run,
    checkpoint_of,
    every_script,
    load_script,
    messages,
    sentence_of,
    slow_but,
    wait_until,
)
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


# ------------------------------------------------------------------------------------------------ what fails is turned off
class FakeGraphs:
    """Stands in for streams and graphs of torch.cuda; a graph that is launched runs what was captured, acting or updating.

    That of the updates raises `error` at the "begin" of its capture, in its "body" (and, as CUDA does, another one at its end),
    at its "end", or when it is "launched".
    """

    def __init__(self, patch, script, fails: str = "", error: Exception | None = None):
        self.fails = fails
        self.error = error
        self.graphs = 0
        self.launches = 0
        self.learner = None
        self.capturing = False
        patch.setattr(script.Learner, "captures", property(self.captures))
        patch.setattr(torch.cuda, "Stream", lambda: self)
        patch.setattr(torch.cuda, "current_stream", lambda: self)
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        patch.setattr(torch.cuda, "CUDAGraph", self.graph)
        patch.setattr(torch.cuda, "graph", self.capture)

    def captures(self, learner):
        self.learner = learner
        return learner.args.cudagraphs

    def graph(self):
        self.graphs += 1
        return SimpleNamespace(register_generator_state=lambda generator: None, replay=partial(self.launch, self.graphs))

    def wait_stream(self, stream):
        pass

    @contextlib.contextmanager
    def capture(self, graph, stream):
        assert stream is self
        if self.graphs == 2 and self.fails == "begin":
            raise self.error
        self.capturing = True
        try:
            yield
        except RuntimeError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904 (as CUDA's)
        finally:
            self.capturing = False
        if self.graphs == 2 and self.fails == "end":
            raise self.error

    def launch(self, number):
        self.launches += 1
        if number == 2 and self.fails == "launched":
            raise self.error
        if number == 1:
            self.learner._act()
        else:
            self.learner._update()

    def raising_within(self, function):
        """A function of an update that cannot be captured."""

        def call(*arguments):
            if self.capturing and self.fails == "body" and function.__name__ == "update_actor":
                raise self.error
            return function(*arguments)

        return call


def raising(at):
    """A compiler whose function of the name `at` raises."""

    def wrap(function):
        def call(*arguments):
            if function.__name__ != at:
                return function(*arguments)
            try:
                raise OSError("g++: error: no such compiler")
            except OSError as error:
                raise RuntimeError("backend failed:\nlong explanation\n") from error

        return call

    return wrap


@every_script
@pytest.mark.parametrize("at", ["sample", "update_actor"])
def test_a_failing_compiler(cli, toy, at):
    """Before anything has changed, or after the critics have: the run goes on as if it had been turned off, and says so once."""
    env_id = toy(Start)
    cli.call("--env-id", env_id, *cli.brief, "--run-name", "eager")
    fake_compiler(cli.monkeypatch, raising(at))
    (line,) = messages(cli.call("--env-id", env_id, *compiled(cli.brief)).stderr)
    assert "(g++: error: no such compiler; --no-compile turns this off)" in line
    assert_same_run(cli.folder / "runs/eager", cli.run_dir)
    check_modes(cli, compile=False, cudagraphs=True)


def test_a_failing_compiler_on_resuming(cli, toy):
    """Where a run goes on other than it was, compiled or not, a line says so; a run without a step left keeps what it was."""
    failure = "torch.compile does not work here"
    inexact = "compiled and eager updates round differently"

    def resumed(*arguments, works: bool) -> tuple[list[str], bool]:
        """How its messages begin, and whether the run is compiled afterwards."""
        with cli.monkeypatch.context() as patch:
            fake_compiler(patch, (lambda function: function) if works else raising("sample"))
            lines = messages(cli.call("--resume", cli.run_dir, *arguments).stderr)
        return [line[:20] for line in lines], checkpoint_of(cli.run_dir)["args"]["compile"]

    with cli.monkeypatch.context() as patch:
        fake_compiler(patch, lambda function: function)
        cli.call("--env-id", toy(Start), *compiled(cli.brief))
    assert resumed("--total-timesteps", "70", works=False) == ([failure[:20], inexact[:20]], False)
    assert resumed("--total-timesteps", "80", works=True) == ([], False)
    assert resumed("--total-timesteps", "90", "--compile", works=False) == ([failure[:20]], False)
    assert resumed("--compile", works=True) == ([], False)
    assert resumed("--total-timesteps", "100", "--compile", works=True) == ([inexact[:20]], True)
    assert resumed("--total-timesteps", "110", "--no-compile", works=True) == ([inexact[:20]], False)


@every_script
def test_captured(cli, toy):
    """Both graphs are launched before the first step, and then in every step."""
    env_id = toy(Start)
    cli.call("--env-id", env_id, *cli.brief, "--run-name", "eager")
    graphs = FakeGraphs(cli.monkeypatch, load_script(cli.script))
    assert messages(cli.call("--env-id", env_id, *cli.brief).stderr) == []
    assert_same_run(cli.folder / "runs/eager", cli.run_dir)
    checkpoint = checkpoint_of(cli.run_dir)
    assert checkpoint["args"]["cudagraphs"] is True
    steps = checkpoint["state"]["step"] - checkpoint["args"]["learning_starts"]
    assert steps > 0
    assert graphs.launches == 2 + 2 * steps


@slow_but("rac_sac")
@pytest.mark.parametrize("fails", ["begin", "body", "end", "launched"])
def test_a_failing_capture(cli, toy, fails):
    """In its body the parameters have changed already. What is compiled stays so."""
    env_id = toy(Start)
    cli.call("--env-id", env_id, *cli.brief, "--run-name", "eager")
    with cli.monkeypatch.context() as patch:
        graphs = FakeGraphs(patch, load_script(cli.script), fails, RuntimeError("CUDA error: not permitted"))
        fake_compiler(patch, graphs.raising_within)
        (line,) = messages(cli.call("--env-id", env_id, *compiled(cli.brief)).stderr)
        assert line.startswith("CUDA graphs do not work here (CUDA error: not permitted; --no-cudagraphs turns this off)")
        assert_same_run(cli.folder / "runs/eager", cli.run_dir)
        check_modes(cli, compile=True, cudagraphs=False)


def test_nothing_works(cli, toy):
    """Neither compiling nor capturing: a sentence for each, and eager is left."""
    env_id = toy(Start)
    cli.call("--env-id", env_id, *cli.brief, "--run-name", "eager")
    FakeGraphs(cli.monkeypatch, rac_sac, "begin", RuntimeError("no graphs"))
    fake_compiler(cli.monkeypatch, raising("add_metrics"))
    first, second = messages(cli.call("--env-id", env_id, *compiled(cli.brief)).stderr)
    assert first.startswith("torch.compile does not work here")
    assert second.startswith("CUDA graphs do not work here (no graphs;")
    assert_same_run(cli.folder / "runs/eager", cli.run_dir)
    check_modes(cli, compile=False, cudagraphs=False)


def check_modes(cli, **modes):
    """What was reached stands in config.json and in the checkpoint, and a run that is resumed begins with it."""
    saved = [json.loads((cli.run_dir / "config.json").read_text()), checkpoint_of(cli.run_dir)]
    assert [{name: file["args"][name] for name in modes} for file in saved] == [modes, modes]
    assert messages(cli.call("--resume", cli.run_dir, "--total-timesteps", "70").stderr) == []
    assert {name: checkpoint_of(cli.run_dir)["args"][name] for name in modes} == modes


def test_a_mistake_in_a_fork_is_shown_at_once(cli, toy):
    """It fails compiled and as it is: in its own words, before the first step."""

    def mistaken(*_):
        raise TypeError("unsupported operand: my own loss")

    cli.monkeypatch.setattr(rac_sac, "actor_loss", mistaken)
    fake_compiler(cli.monkeypatch, lambda function: function)
    for arguments in (compiled(cli.brief), [*cli.brief, "--run-name", "eager"]):
        result = cli.call("--env-id", toy(Start), *arguments, code=1)
        assert "stopped at step 0 by the error below" in result.stderr
        assert 'raise TypeError("unsupported operand: my own loss")' in result.stderr


def behind(error: Exception, shown: Exception) -> Exception:
    """An exception that was raised while another one was handled."""
    shown.__context__ = error
    return shown


OUT_OF_MEMORY = {
    "PyTorch's": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
    "CUDA's": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    "cuBLAS's": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "the CPU's": RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    "Python's": MemoryError("Unable to allocate 2 GiB"),
    "behind another": behind(torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("operation failed during capture")),
}


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_out_of_memory_in_a_capture(cli, toy, kind):
    """Nothing smaller is tried: the run ends."""
    error = OUT_OF_MEMORY[kind]
    FakeGraphs(cli.monkeypatch, rac_sac, "begin", error)
    line = sentence_of(cli.call("--env-id", toy(Start), *cli.brief, code=1))
    said = str(error.__context__ or error).splitlines()[0]
    assert f"stopped at step 0: {said}; the last checkpoint is of step 0" in line


def test_out_of_memory_that_was_dealt_with(cli, toy):
    """It is not what made the capture fail, though a traceback of everything would have it."""
    error = behind(torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no graphs"))
    error.__suppress_context__ = True  # raise ... from None
    FakeGraphs(cli.monkeypatch, rac_sac, "begin", error)
    (line,) = messages(cli.call("--env-id", toy(Start), *cli.brief).stderr)
    assert line.startswith("CUDA graphs do not work here (no graphs;")


def device_that_fails(patch):
    """A device of no use any more: it says so when it is waited for."""

    def gone():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    patch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=gone))


def test_a_device_that_is_of_no_use_any_more(cli, toy):
    """What a failure has changed cannot be put back: both reasons, and the flag with which the run can go on."""
    with cli.monkeypatch.context() as patch:
        FakeGraphs(patch, rac_sac, "begin", RuntimeError("no graphs"))
        device_that_fails(patch)
        line = sentence_of(cli.call("--env-id", toy(Start), *cli.brief, code=1))
    assert "CUDA graphs do not work here (no graphs; --no-cudagraphs turns this off)" in line
    assert "; and after that cpu fails: CUDA error: an illegal memory access was encountered; the last checkpoint" in line
    cli.call("--resume", cli.run_dir)


def test_a_device_that_fails_with_all_done(cli, toy):
    device_that_fails(cli.monkeypatch)
    line = sentence_of(cli.call("--env-id", toy(Start), *cli.brief, code=1))
    assert "stopped at step 0: after the first update cpu fails: CUDA error: an illegal memory access was encountered;" in line


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
