"""On a GPU: captured updates, runs that are stopped and resumed, and policies where there is none."""

import math
import re

import pytest
import torch
from conftest import every_script, needs_gpu, read_rows
from test_compiled import check_fast_way, make_learner
from test_resume import assert_same_run, brief, call, checkpoint_of, stop

pytestmark = [*needs_gpu, pytest.mark.slow]
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
    eager = make_learner(script, "cuda", **WAYS[way] | {"compile": False, "cudagraphs": False})
    check_fast_way(script, make_learner(script, "cuda", **WAYS[way]), eager, steps=50)


@every_script
def test_stopped_resumed_and_evaluated(cli):
    """SIGTERM among the updates; a resumed run ends, and its policy plays the same where no GPU is seen."""
    stop(cli, "run", 115, "--compile", "--cuda", "True")
    run_dir = cli.folder / "runs/run"
    assert checkpoint_of(run_dir)["device"] == "cuda"
    _, err = cli.call("--resume", run_dir)
    assert "do not work here" not in err
    checkpoint = checkpoint_of(run_dir)
    assert (checkpoint["device"], checkpoint["progress"]["step"]) == ("cuda", 120)
    assert [row["global_step"] for row in read_rows(run_dir / "eval.csv")] == "100 110 120".split()
    losses = [float(cell) for name, cell in read_rows(run_dir / "train.csv")[-1].items() if name.startswith("losses/")]
    assert all(math.isfinite(loss) and loss != 0 for loss in losses)
    policy = torch.load(run_dir / "policy.pt", weights_only=True)
    assert {tensor.device.type for tensor in policy["actor"].values()} == {"cpu"}
    with_gpu, _ = cli.call("--evaluate", run_dir)
    process = cli.start("--evaluate", run_dir)
    assert process.communicate(timeout=300)[0] == with_gpu
    assert with_gpu.startswith(cli.script.CONDITION)


def test_a_capture_that_fails(cli):
    """What waits for the device cannot be captured: one line, and the run goes on compiled, equal to --no-cudagraphs."""
    whole = brief(cli, "whole", "--cuda", "True", "--compile", "--no-cudagraphs")
    draw = cli.script.Agent.draw

    def waits(*arguments):
        torch.cuda.synchronize()
        return draw(*arguments)

    cli.monkeypatch.setattr(cli.script.Agent, "draw", waits)
    _, err = call(cli, "fails", "--cuda", "True", "--compile")
    assert re.findall("do not work here, .* with --no-(.*), slower: .* capturing", err) == ["cudagraphs"]
    assert_same_run(whole, cli.folder / "runs/fails")
