"""A run on a GPU from end to end; the same on the CPU, compiled, shows that the tests themselves work."""

import math
import signal

import pytest
import torch
from conftest import checkpoint_of, every_script, kill, last_step, messages, needs_gpu, read_rows, rows_of, wait_until

pytestmark = pytest.mark.slow
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", marks=needs_gpu, id="cuda")]


@pytest.fixture
def machine(cli, request):
    """The device of the run, and its arguments after cli.tiny: 300 steps, half of them with updates, with all that is fast."""
    device = request.param
    if device == "cuda":
        del cli.env["CUDA_VISIBLE_DEVICES"]
    return device, ("--compile", "--cuda", str(device == "cuda"), "--total-timesteps", "300", "--learning-starts", "150")


on_each_device = pytest.mark.parametrize("machine", DEVICES, indirect=True)


def check_device(run_dir, device):
    """It was trained there with compiled and, on a GPU, captured functions, and said nothing of what does not work."""
    checkpoint = checkpoint_of(run_dir)
    assert checkpoint["device"] == device
    assert checkpoint["args"]["compile"] is True
    assert checkpoint["args"]["cudagraphs"] is True


@every_script
@on_each_device
def test_stopped_resumed_and_evaluated(cli, machine):
    """SIGTERM among the updates, resumed to the end, evaluated; the policy plays the same where no GPU is seen."""
    device, arguments = machine
    with cli.held("run", *arguments, at=220) as (process, run_dir):
        cli.holding(process)
        process.send_signal(signal.SIGTERM)
        cli.release()
        _, err = process.communicate(timeout=500)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "do not work here" not in err
    assert "does not work here" not in err
    check_device(run_dir, device)
    assert checkpoint_of(run_dir)["state"]["step"] == 220
    result = cli.run("--resume", run_dir)
    assert messages(result.stderr) == []
    check_device(run_dir, device)
    assert [int(row["global_step"]) for row in read_rows(run_dir / "eval.csv")] == [150, 250, 300]
    last = read_rows(run_dir / "train.csv")[-1]
    losses = {name: float(value) for name, value in last.items() if name.startswith("losses/")}
    assert all(math.isfinite(value) and value != 0 for value in losses.values()), losses
    with_gpu = cli.run("--evaluate", run_dir).stdout
    cli.env["CUDA_VISIBLE_DEVICES"] = ""
    assert cli.run("--evaluate", run_dir / "policy.pt").stdout == with_gpu != ""


@on_each_device
def test_pending_evaluations_are_played_without_a_gpu(cli, machine):
    device, arguments = machine
    with cli.held("run", *arguments, "--eval-workers", "1", "--max-pending-evaluations", "9") as (process, run_dir):
        wait_until(lambda: process.poll() is not None or last_step(run_dir / "train.csv") == 300)
        kill(process, signal.SIGINT)
    check_device(run_dir, device)
    assert len(checkpoint_of(run_dir)["pending"]) == 3
    cli.env["CUDA_VISIBLE_DEVICES"] = ""
    assert cli.run("--resume", run_dir).stdout.startswith("finished")
    assert rows_of(run_dir / "eval.csv") == 3
    check_device(run_dir, device)


@on_each_device
def test_a_capture_that_fails_leaves_a_run_that_goes_on(cli, machine):
    """An operation that waits for the device cannot be captured: the run goes on compiled, or here on the CPU as before.

    In a process of its own: memory of a capture that has failed stays reserved.
    """
    device, arguments = machine
    last = "        self.add_metrics(self.metrics, all_q"
    text = cli.script.read_text()
    assert text.count(last) == 1
    cli.script = cli.folder / "waits.py"
    cli.script.write_text(text.replace(last, f"        self.metrics.sum().item()\n{last}"))
    lines = messages(cli.run("--env-id", "Hopper-v4", *cli.tiny, *arguments, "--run-name", "run").stderr)
    assert [line.startswith("CUDA graphs do not work here") for line in lines] == [True] * (device == "cuda")
    args = checkpoint_of(cli.run_dir)["args"]
    assert (args["compile"], args["cudagraphs"]) == (True, device == "cpu")
    assert torch.isfinite(checkpoint_of(cli.run_dir)["tensors"]["metrics"]).all()
