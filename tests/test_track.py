"""--track: what Weights & Biases gets, by a stand-in for its module, and by itself without a network."""

import sys
from unittest.mock import Mock

import pytest
from conftest import CONDITIONS, every_script, read_rows
from test_resume import brief


@pytest.fixture
def wandb(monkeypatch) -> Mock:
    """A stand-in that notes what it is called with."""
    module = Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@every_script
def test_rows(cli, wandb):
    """Those of both files, once each and without empty cells, under CleanRL's names, over the environment step."""
    run_dir = brief(cli, "run", "--track")
    run = wandb.init.return_value
    logged = [call.args[0] for call in run.log.call_args_list]
    rows = read_rows(run_dir / "eval.csv") + read_rows(run_dir / "train.csv")
    assert len(logged) == len(rows)
    for row in rows:
        assert {column: float(cell) for column, cell in row.items() if cell} in logged
    names = set().union(*logged)
    assert names >= {"global_step", "charts/SPS", "charts/episodic_return", "charts/episodic_length"}
    assert names >= {"losses/qf_loss", "losses/qf_values", "losses/actor_loss", f"eval/best_{CONDITIONS[cli.name]}"}
    run.define_metric.assert_called_once_with("*", step_metric="global_step")
    run.finish.assert_called_once_with()


def test_a_resumed_run_is_the_same_one(cli, wandb):
    run_dir = brief(cli, "run", "--track")
    cli.call("--resume", run_dir, "--total-timesteps", "210")
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first["id"] == second["id"] == first["name"] == "run"
    assert second["resume"] == "allow"
    assert first["config"]["utd"] == 1


def test_offline(cli):
    """The real one: its files lie in the run directory, and resuming adds one of the same run."""
    run_dir = brief(cli, "run", "--track", "--total-timesteps", "1")
    cli.call("--resume", run_dir, "--total-timesteps", "2")
    files = list(run_dir.glob("wandb/offline-run-*-run/run-run.wandb"))
    assert files and all(file.stat().st_size > 1000 for file in files)
    assert [path.name for path in cli.folder.iterdir()] == ["runs"]
