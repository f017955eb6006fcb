"""Compiled updates: those of eager PyTorch, reproducible, resumable; and runs that go on where compiling fails."""

import os
import signal

import numpy as np
import pytest
import torch
from conftest import TINY, environment, every_script
from test_resume import BRIEF, assert_same_run, brief, call
from torch.utils._python_dispatch import TorchDispatchMode
from toy_envs import Point

OBS, ACTIONS, ROWS = 5, 2, 60


def make_learner(script, device: str, **arguments):
    """A small learner that is warmed up, with a full replay and rates that change over its steps."""
    sizes = {"batch_size": 32, "hidden_dim": 16, "utd": 3, "num_critics": 4, "buffer_size": ROWS, "learning_starts": 0}
    args = script.completed(script.Args(**sizes, q_lr_warmup_end=100, **arguments), script.Env("toy_envs:Point-v0"))
    learner = script.Learner(args, OBS, ACTIONS, torch.device(device))
    rng = np.random.default_rng(0)
    for step in range(ROWS):
        obs, next_obs = rng.normal(size=(2, OBS))
        learner.store(step, obs, rng.uniform(-1, 1, ACTIONS), rng.normal(), step % 9 == 0, next_obs)
    learner.warm_up()
    return learner


def assert_alike(learner, wanted, error: float) -> None:
    """All that training changes: each part to a relative error, Adam's counts exactly."""
    state, wanted = (each.state()["agent"] for each in (learner, wanted))
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        difference = (state[name] - tensor).norm()
        assert difference <= (0 if name.endswith("count") else error) * tensor.norm(), name


def check_fast_way(script, fast, eager, steps: int) -> None:
    """Nothing is left of the warm-up; after a step gradients, as Adam keeps them, and metrics are alike, then parameters too."""
    assert_alike(fast, eager, 0)
    for step in range(1, steps + 1):
        np.testing.assert_allclose(fast.act(np.full(OBS, step)), eager.act(np.full(OBS, step)), atol=1e-4)
        fast.update(step)
        eager.update(step)
        if step == 1:
            assert_alike(fast, eager, 1e-5)
    assert_alike(fast, eager, 1e-3)
    counts = {name: int(adam.count) for name, adam in fast.agent.adam.items()}
    assert counts == {name: steps * (3 if name == "critic" else 1) for name in counts}


@pytest.mark.slow
def test_compiled_is_eager(script):
    learners = [make_learner(script, "cpu", compile=compile) for compile in (True, False)]
    check_fast_way(script, *learners, steps=20)


def stop(cli, name: str, *arguments) -> None:
    """A brief run that gets SIGTERM in the middle of step 157."""
    cli.monkeypatch.setattr(Point, "events", {157: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    call(cli, name, *arguments, code=128 + signal.SIGTERM)


@pytest.mark.slow
@every_script
def test_a_compiled_run_resumes_exactly(cli):
    """And is the same twice."""
    whole = brief(cli, "whole", "--compile")
    stop(cli, "cut", "--compile")
    _, err = cli.call("--resume", "runs/cut")
    assert "do not work here" not in err
    assert_same_run(whole, cli.folder / "runs/cut")


def test_compiling_that_fails_half_way(cli):
    """Before the first step, but with critics that have learned: one line, and the run is as without."""
    calls = []

    def half_working(function, **_):
        def run(*arguments):
            calls.append(function)
            if len(calls) == 7:
                raise RuntimeError("\nthere is no compiler\nlong explanation")
            return function(*arguments)

        return run

    cli.monkeypatch.setattr(torch, "compile", half_working)
    _, err = call(cli, "fails", "--compile")
    said = "do not work here, and the run goes on without, slower: there is no compiler long explanation\n"
    assert err.count(said) == 1
    assert err.index(said) < err.index("run directory: ")
    assert_same_run(brief(cli, "eager"), cli.folder / "runs/fails")


@pytest.mark.slow
def test_a_broken_compiler(cli):
    """And nothing that was compiled before."""
    without = environment(CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR=str(cli.folder / "empty"))
    arguments = (*TINY, *BRIEF, "--env-id", "toy_envs:Point-v0", "--run-name", "fails", "--compile")
    process = cli.start(*arguments, env=without)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "the run goes on without, slower: " in err
    assert_same_run(brief(cli, "eager"), cli.folder / "runs/fails")


def test_learning_reads_nothing_back(script):
    """An environment step's updates on a device that has no numbers: none is read, and no tensor is made elsewhere."""

    class OnlyOnMeta(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            made = function(*arguments, **(options or {}))
            for tensor in made if isinstance(made, tuple | list) else [made]:
                assert tensor is None or tensor.device.type == "meta", function
            return made

    args = script.completed(script.Args(buffer_size=ROWS), script.Env("toy_envs:Point-v0"))
    agent = script.Agent(args, OBS, ACTIONS).to("meta")
    replay = torch.empty(ROWS, 2 * OBS + ACTIONS + 2, device="meta")
    filled, q_lr = torch.zeros((), dtype=torch.float64, device="meta"), torch.zeros((), device="meta")
    with torch.no_grad(), OnlyOnMeta():
        agent.explore(replay[:1, :OBS], None)
        agent.learn(agent.draw(replay, filled, None), q_lr)
