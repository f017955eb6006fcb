"""--track: what Weights & Biases gets, by a stand-in for its module, and by itself without a network."""

import subprocess
import sys
from unittest.mock import Mock

import pytest
from conftest import child_environ, every_script, last_step, read_rows, wait_until
from tiny_runs import assert_same_run, held_run, whole_run


@pytest.fixture
def wandb(monkeypatch) -> Mock:
    """A stand-in that notes what it is called with."""
    module = Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@every_script
def test_rows(cli, wandb):
    """Those of both files, once each and without empty cells, under CleanRL's names, over the environment step."""
    run_dir = cli.train("run", "--track", "--total-timesteps", "102")
    run = wandb.init.return_value
    logged = [logged_call.args[0] for logged_call in run.log.call_args_list]
    rows = read_rows(run_dir / "eval.csv") + read_rows(run_dir / "train.csv")
    assert len(logged) == len(rows)
    for row in rows:
        assert {column: float(cell) for column, cell in row.items() if cell} in logged
    names = set().union(*logged)
    assert names >= {"global_step", "charts/SPS", "charts/episodic_return", "charts/episodic_length"}
    assert names >= {"losses/qf_loss", "losses/qf_values", "losses/actor_loss", f"eval/best_{cli.script.CONDITION}"}
    run.define_metric.assert_called_once_with("*", step_metric="global_step")
    run.finish.assert_called_once_with()


def test_a_resumed_run_is_the_same_one(cli, wandb):
    run_dir = cli.train("run", "--track", "--total-timesteps", "1")
    cli.call("--resume", run_dir, "--total-timesteps", "2")
    cli.train("run", "--track", "--total-timesteps", "1", "--run-root", "elsewhere")
    first, second, other = (init_call.kwargs for init_call in wandb.init.call_args_list)
    assert first["id"] == second["id"] != other["id"]
    assert first["name"] == second["name"] == other["name"] == "run"
    assert second["resume"] == "allow"
    assert first["config"]["utd"] == 1
    wandb.init.side_effect = RuntimeError("no network")
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "3")
    assert err.count("cannot track this run: RuntimeError('no network')") == 1


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_tracker_that_fails(cli, wandb, method):
    """It is told once; the run trains on, and its files are those of a run without."""
    getattr(wandb.init.return_value, method).side_effect = ConnectionResetError("Connection lost")
    _, err = cli.call(*cli.tiny_run("run", "--track"))
    assert err.count("Weights & Biases fails, and the run goes on without it") == err.count("Connection lost") == 1
    assert_same_run(whole_run(cli), cli.folder / "runs/run")


@pytest.mark.slow
def test_its_process_is_killed(cli):
    """The real one's, in the middle of a run in a process of its own: nothing fails when that ends, either."""
    with held_run(cli, "run", "--track", env=child_environ(WANDB_MODE="offline")) as (process, run_dir):
        subprocess.run(["pkill", "-9", "-P", str(process.pid), "wandb-core"], check=True)
        (cli.folder / "go").touch()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0
    assert last_step(run_dir / "train.csv") == 110
    assert err.count("Weights & Biases fails, and the run goes on without it") == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_video(cli, wandb):
    """The one of --capture-video is sent, too."""
    cli.monkeypatch.setenv("MUJOCO_GL", "egl")
    run_dir = cli.train("run", "--track", "--capture-video", env_id="Hopper-v4")
    (film,) = run_dir.glob("videos/*.mp4")
    wandb.Video.assert_called_once_with(str(film))
    sent = wandb.init.return_value.log.call_args.args[0]
    assert sent["videos"] == wandb.Video.return_value
    assert sent["global_step"] == cli.script.load_policy(run_dir / "best_policy.pt").step


def test_offline(cli):
    """The real one: its files lie in the run directory, and resuming adds one of the same run, whatever its name."""
    run_dir = cli.train("a=b,c#d':;?", "--track", "--total-timesteps", "1")
    cli.call("--resume", run_dir, "--total-timesteps", "2")
    files = list(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    wait_until(lambda: all(file.stat().st_size > 1000 for file in files), 60)  # their process may write for longer than the run
    assert [path.name for path in cli.folder.iterdir()] == ["runs"]
