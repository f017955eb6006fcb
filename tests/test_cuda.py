"""On a GPU: captured updates, runs that are stopped and resumed, and policies where there is none."""

import math
import re

import pytest
import torch
from conftest import every_script, read_rows
from test_compiled import assert_learns_alike, warm_learner
from tiny_runs import assert_same_run, checkpoint_of, stopped_run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a GPU"),
    pytest.mark.slow,
]
WAYS = {
    "compile": {"compile": True, "cudagraphs": False},
    "cudagraphs": {"compile": False, "cudagraphs": True},
    "compile+cudagraphs": {"compile": True, "cudagraphs": True},
    "compile+cudagraphs, simba": {"compile": True, "cudagraphs": True, "network": "simba"},
}


@pytest.mark.parametrize("way", WAYS)
def test_compiled_and_captured_are_eager(script, way):
    """On the same noise and transitions, over 50 steps with a learning rate and statistics that a graph must see change."""
    script.set_up_torch(script.Args(cuda=True))  # deterministic kernels, as in a run
    options = WAYS[way]
    eager_options = options | {"compile": False, "cudagraphs": False}
    eager = warm_learner(script, "cuda", **eager_options)
    assert_learns_alike(warm_learner(script, "cuda", **options), eager, steps=50)


@every_script
def test_stopped_resumed_and_evaluated(cli):
    """SIGTERM among the updates; a resumed run ends, and its policy plays the same where no GPU is seen."""
    run_dir, _ = stopped_run(cli, "run", 101, "--compile", "--cuda", "True")
    assert checkpoint_of(run_dir)["device"] == "cuda"
    _, err = cli.call("--resume", run_dir)
    assert "do not work here" not in err
    checkpoint = checkpoint_of(run_dir)
    assert (checkpoint["device"], checkpoint["progress"]["step"]) == ("cuda", 110)
    assert [row["global_step"] for row in read_rows(run_dir / "eval.csv")] == "96 103 110".split()
    losses = [float(cell) for name, cell in read_rows(run_dir / "train.csv")[-1].items() if name.startswith("losses/")]
    assert all(math.isfinite(loss) and loss != 0 for loss in losses)

    # Where there is no GPU
    policy = torch.load(run_dir / "policy.pt", weights_only=True)
    assert {tensor.device.type for tensor in policy["actor"].values()} == {"cpu"}
    with_gpu, _ = cli.call("--evaluate", run_dir)
    without_gpu, _ = cli.call_process("--evaluate", run_dir)
    assert without_gpu == with_gpu
    assert with_gpu.startswith(cli.script.CONDITION)


def test_a_capture_that_fails(cli):
    """What waits for the device cannot be captured: one line, and the run goes on compiled, equal to --no-cudagraphs."""
    not_captured = cli.train("whole", "--cuda", "True", "--compile", "--no-cudagraphs")
    draw = cli.script.Agent.draw

    def waits(*arguments):
        torch.cuda.synchronize()
        return draw(*arguments)

    cli.monkeypatch.setattr(cli.script.Agent, "draw", waits)
    _, err = cli.call(*cli.tiny_run("fails", "--cuda", "True", "--compile"))
    assert re.findall("do not work here, .* with --no-(.*), slower: .* capturing", err) == ["cudagraphs"]
    assert_same_run(not_captured, cli.folder / "runs/fails")
