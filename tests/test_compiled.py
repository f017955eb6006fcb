"""Compiled updates: those of eager PyTorch, reproducible, resumable; and runs that go on where compiling fails."""

import re

import numpy as np
import pytest
import torch
from conftest import child_environ, every_script, known_arguments
from tiny_runs import assert_same_run, stopped_run, whole_run
from torch.utils._python_dispatch import TorchDispatchMode

OBS, ACTIONS, ROWS = 5, 2, 60


def warm_learner(script, device: str, **arguments):
    """A small learner that is warmed up, with a full replay and rates that change over its steps.

    Arguments that a script does not have are left out.
    """
    sizes = {"batch_size": 32, "hidden_dim": 16, "utd": 3, "num_critics": 4, "buffer_size": ROWS, "learning_starts": 0}
    rates = {"q_lr_init": 3e-5, "q_lr_warmup_end": 100}
    known = known_arguments(script, sizes | rates | arguments)
    args = script.completed(script.Args(**known), script.Env("toy_envs:Point-v0"))
    learner = script.Learner(args, OBS, ACTIONS, torch.device(device))
    learner.agent.eval()  # for a fork with dropout
    learner.warm_up()
    rng = np.random.default_rng(0)
    for step in range(1, ROWS + 1):
        obs, next_obs = rng.normal(size=(2, OBS))
        row = learner.store(step, obs, rng.uniform(-1, 1, ACTIONS), rng.normal(), step % 9 == 0, next_obs)
        learner.agent.observe(step, row, None, learner.generator)
    return learner


def assert_alike(learner, wanted, error: float) -> None:
    """All that training changes: each part to a relative error, Adam's counts exactly."""
    got, expected = learner.state()["agent"], wanted.state()["agent"]
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        allowed = 0 if name.endswith("count") else error * tensor.double().norm()
        assert (got[name].double() - tensor.double()).norm() <= allowed, name


def assert_learns_alike(fast, eager, steps: int) -> None:
    """Nothing is left of the warm-up; after a step gradients, as Adam keeps them, and metrics are alike, then parameters too.

    Between the steps an observation moves the statistics, where the networks have some: it is far from all before.
    """
    assert_alike(fast, eager, 0)
    for step in range(1, steps + 1):
        np.testing.assert_allclose(fast.act(np.full(OBS, step)), eager.act(np.full(OBS, step)), atol=1e-4)
        for learner in (fast, eager):
            learner.agent.observe(step, torch.full_like(learner.replay[0], 3 * step), None, learner.generator)
            learner.update(step)
        if step == 1:
            assert_alike(fast, eager, 1e-5)
    assert_alike(fast, eager, 1e-3)
    for name, adam in fast.agent.adam.items():
        updates = fast.args.utd if name == "critic" else 1
        assert int(adam.count) == steps * updates, name


@pytest.mark.slow
def test_compiled_is_eager(script, network):
    compiled = warm_learner(script, "cpu", network=network, compile=True)
    eager = warm_learner(script, "cpu", network=network, compile=False)
    assert_learns_alike(compiled, eager, steps=20)


@pytest.mark.slow
@every_script
def test_a_compiled_run_resumes_exactly(cli):
    """And is the same twice; also where a worker evaluates it."""
    undisturbed = cli.train("whole", "--compile")
    run_dir, _ = stopped_run(cli, "cut", 101, "--compile")
    _, err = cli.call("--resume", run_dir, "--eval-workers", "1")
    assert "do not work here" not in err
    assert_same_run(undisturbed, run_dir)


@pytest.mark.slow
def test_a_broken_compiler(cli):
    """And nothing that was compiled before."""
    no_compiler = child_environ(CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR=str(cli.folder / "empty"))
    _, err = cli.call_process(*cli.tiny_run("fails", "--compile"), env=no_compiler)
    assert "the run goes on with --no-compile, slower: " in err
    assert_same_run(whole_run(cli), cli.folder / "runs/fails")


@pytest.mark.slow
def test_a_graph_break(cli):
    """In a fork, half way: before the first step one line has the reason and the line of the script; the run is as without."""
    fork = cli.fork("    torch._foreach_lerp_(first", "    print(scales)\n    torch._foreach_lerp_(first")
    _, err = fork.call(*fork.tiny_run("fails", "--compile"))
    number = fork.path.read_text().splitlines().index("    print(scales)") + 1
    reason = rf"slower: .*builtin operator `print`.* \.\.\. at line {number}, in adam_step print\(scales\)"
    assert re.search(rf"^updates with --compile do not work here, .*, {reason}\nrun directory", err, re.M)
    assert_same_run(fork.train("eager"), cli.folder / "runs/fails")


@pytest.mark.parametrize("fails, left_out", [("cudagraphs", ["cudagraphs"]), ("compile", ["cudagraphs", "compile"])])
def test_a_gpu_where_something_fails(cli, fails, left_out):
    """It is tried without CUDA graphs first, then without compiling; a line each says what is left out."""

    class Learner:
        def __init__(self, args, *_):
            self.args = args

        def warm_up(self):
            if getattr(self.args, fails):
                raise RuntimeError(f"no {fails} here")
            return self

    cli.monkeypatch.setattr(cli.script, "Learner", Learner)
    learner = cli.script.make_learner(cli.script.Args(), cli.script.Env("Hopper-v4"), torch.device("cuda"))
    assert learner.args.compile == ("compile" not in left_out)
    assert re.findall(r"do not work here, .* with --no-(\w+), slower: ", cli.capsys.readouterr().err) == left_out


@pytest.mark.parametrize("way, times", [("--compile", 2), ("--no-compile", 1)])
def test_an_exception_of_the_algorithm(cli, way, times):
    """Is raised, and not told as a compiler's; where nothing is compiled, at once."""
    calls = []

    def wrong(*arguments):
        calls.append(arguments)
        raise ZeroDivisionError("mine")

    cli.monkeypatch.setattr(cli.script.Agent, "draw", wrong)
    with pytest.raises(ZeroDivisionError, match="mine"):
        cli.train("run", way)
    assert len(calls) == times
    assert "do not work here" not in cli.capsys.readouterr().err


def test_a_step_reads_nothing_back(script, network):
    """Observing, acting and learning on a device that has no numbers: none is read, and no tensor is made elsewhere."""

    class OnlyOnMeta(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            made = function(*arguments, **(options or {}))
            for tensor in made if isinstance(made, tuple | list) else [made]:
                assert tensor is None or tensor.device.type == "meta", function
            return made

    agent = warm_learner(script, "cpu", network=network, compile=False).agent.to("meta")
    replay = torch.empty(ROWS, 2 * OBS + ACTIONS + 2, device="meta")
    stored, q_lr = torch.zeros((), dtype=torch.float64, device="meta"), torch.zeros((), device="meta")
    with torch.no_grad(), OnlyOnMeta():
        agent.observe(1, replay[0], None, None)
        agent.explore(replay[:1, :OBS], None)
        agent.learn(agent.draw(replay, stored, None), q_lr)
