"""What --track gives Weights & Biases, by a fake of its module, and by itself without a network."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from conftest import CONDITIONS, assert_same_run, every_script, messages, read_rows, rows_of, sentence_of
from toy_envs import Counter, Start, does, since

FAKE = Path(__file__).parent / "fake"


class Calls:
    """What the fake has been called with."""

    def __init__(self, path: Path):
        self.path = path

    def of(self, name: str) -> list[dict]:
        calls = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [call for call in calls if call["call"] == name]


@pytest.fixture
def wandb(cli, monkeypatch, tmp_path):
    """The fake in place of the module, online."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("WANDB_CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("WANDB_MODE")
    yield Calls(tmp_path / "calls")
    sys.modules.pop("wandb", None)


@every_script
def test_rows_are_logged(cli, toy, wandb):
    """Those of both files, without empty cells, against global_step; once each."""
    result = cli.call("--env-id", toy(), *cli.brief, "--track")
    assert messages(result.stderr) == []
    logged = [call["row"] for call in wandb.of("log")]
    for name in ("eval.csv", "train.csv"):
        for row in read_rows(cli.run_dir / name):
            filled = {column: float(value) for column, value in row.items() if value}
            assert logged.count(filled) == 1
    assert len(logged) == rows_of(cli.run_dir / "eval.csv") + rows_of(cli.run_dir / "train.csv")
    names = set().union(*logged)
    assert names >= {"charts/SPS", "charts/episodic_return", "charts/episodic_length", "losses/qf_loss", "losses/actor_loss"}
    assert f"eval/best_{CONDITIONS[cli.name]}" in names
    metrics = {call["name"]: call["step_metric"] for call in wandb.of("define_metric")}
    assert metrics == {"global_step": None, "*": "global_step"}


def test_project_arguments_and_code(cli, toy, wandb):
    cli.call("--env-id", toy(), *cli.brief, "--track", "--wandb-project-name", "p", "--wandb-entity", "e")
    (start,) = wandb.of("init")
    assert (start["project"], start["entity"], start["name"]) == ("p", "e", "run")
    assert start["config"]["utd"] == 1
    assert Path(start["dir"]) == cli.run_dir
    assert [call["files"] for call in wandb.of("log_code")] == [["rac_sac.py"]]


def test_a_resumed_run_is_the_same_one(cli, toy, wandb):
    cli.call("--env-id", toy(), *cli.brief, "--track")
    cli.call("--resume", cli.run_dir, "--total-timesteps", "70")
    first, second = wandb.of("init")
    assert first["id"] == second["id"] == (cli.run_dir / "wandb_id").read_text()
    assert [call["exit_code"] for call in wandb.of("finish")] == [0, 0]


def test_without_a_flag_it_is_not_imported(cli, toy, wandb):
    cli.call("--env-id", toy(), *cli.brief)
    assert "wandb" not in sys.modules
    assert not wandb.path.exists()


def stop(env):
    if env.number == 0 and env.total == 50:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "change,code,tracked",
    [(since(50, reward=float("inf")), 1, 1), (does(lambda: 1 / 0, step=50), 1, 1), (stop, 128 + signal.SIGTERM, 255)],
    ids=["fails", "raises", "is stopped"],
)
def test_the_end_of_a_run_that_is_not_finished(cli, toy, wandb, change, code, tracked):
    """Exit code 1 where training fails, 255 where it is stopped."""
    cli.call("--env-id", toy(change=change), *cli.brief, "--track", code=code)
    assert [call["exit_code"] for call in wandb.of("finish")] == [tracked]


@pytest.mark.parametrize("fails", ["no key", "online"])
def test_offline_where_it_has_to_be(cli, toy, wandb, fails):
    """No key, or no network: one line, with the reason and how to upload later."""
    cli.monkeypatch.setenv("WANDB_FAILS", fails)
    (line,) = messages(cli.call("--env-id", toy(), *cli.brief, "--track").stderr)
    assert "is offline" in line
    assert f"wandb sync {cli.run_dir}/wandb/offline-run-*" in line
    assert wandb.of("init")[-1]["mode"] == "offline"
    assert wandb.of("log")


def test_offline_where_it_is_asked_for(cli, toy, wandb):
    cli.monkeypatch.setenv("WANDB_MODE", "offline")
    (line,) = messages(cli.call("--env-id", toy(), *cli.brief, "--track").stderr)
    assert f"wandb sync {cli.run_dir}/wandb/offline-run-*" in line
    assert len(wandb.of("init")) == 1


@pytest.mark.parametrize("fails", ["init", "define_metric", "log_code", "log", "finish"])
def test_a_tracked_run_outlives_the_service(cli, toy, wandb, fails):
    """It says once that it goes on without it, and is the same run."""
    env_id = toy(Start)
    cli.call("--env-id", env_id, *cli.brief, "--run-name", "whole")
    cli.monkeypatch.setenv("WANDB_FAILS", fails)
    said = messages(cli.call("--env-id", env_id, *cli.brief, "--track").stderr)
    assert len([line for line in said if "goes on without it" in line]) == (fails != "finish")
    assert_same_run(cli.folder / "runs/whole", cli.run_dir)


def test_where_it_is_not_installed(cli, toy):
    cli.monkeypatch.setitem(sys.modules, "wandb", None)
    (line,) = messages(cli.call("--env-id", toy(), *cli.brief, "--track").stderr)
    assert "goes on without it" in line
    assert "wandb" in line
    assert rows_of(cli.run_dir / "eval.csv") == 3


def test_a_failed_start_is_not_tracked(cli, toy, wandb):
    """The environment has raised before: there is nothing to track."""

    class Broken(Counter):
        def __init__(self):
            raise ValueError("no simulator here")

    assert "no simulator here" in sentence_of(cli.call("--env-id", toy(Broken), *cli.brief, "--track", code=2))
    assert not wandb.path.exists()


# ----------------------------------------------------------------------------------------------------------- the real one
def offline_files(run_dir: Path) -> list[Path]:
    return list((run_dir / "wandb").glob("offline-run-*/*.wandb"))


def test_the_real_one_offline(cli):
    cli.env["WANDB_MODE"] = "offline"
    result = cli.run("--env-id", "toy_envs:Truncating-v0", *cli.brief, "--track")
    (line,) = messages(result.stderr)
    assert "wandb sync" in line
    (file,) = offline_files(cli.run_dir)
    assert file.stat().st_size > 1000
    assert [path.name for path in cli.folder.iterdir()] == ["runs"]


@pytest.mark.slow
def test_the_real_one_without_network(cli):
    """A key, but no way to the server."""
    cli.env.update(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    result = cli.run("--env-id", "toy_envs:Truncating-v0", *cli.brief, "--track")
    (line,) = messages(result.stderr)
    assert "offline" in line
    assert offline_files(cli.run_dir)


@pytest.mark.slow
def test_the_real_service_is_killed(cli):
    with cli.held("run", "--track", at=260) as (process, run_dir):
        cli.holding(process)
        services = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if is_service_of(path, process.pid)]
        assert services
        for service in services:
            os.kill(service, signal.SIGKILL)
        cli.release()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "goes on without it" in err
    assert rows_of(run_dir / "eval.csv") == 4


def is_service_of(cmdline: Path, pid: int) -> bool:
    try:
        words = cmdline.read_text().split("\0")
    except OSError:
        return False
    return "wandb-core" in words[0] and str(pid) in words
