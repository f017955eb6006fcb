"""What a run shows and leaves, and its evaluation in processes beside training."""

import io
import json
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import every_script, networks_of, of_the_four, read_rows, wait_until, with_network
from tiny_runs import assert_same_run, checkpoint_of, held_run, whole_run
from toy_envs import EPISODE_LENGTH, EVALUATION, Point, first_seed


# What it shows ---
def test_the_bar_and_the_last_line(cli):
    """Speed, time left and the last evaluation; the speed is that of learning, before which this environment is slow."""
    cli.monkeypatch.setattr(Point, "events", {1: partial(time.sleep, 4)})
    out, err = cli.call(*cli.tiny_run("run", "--learning-starts", "60", "--eval-frequency", "25"))
    last = read_rows(cli.folder / "runs/run/eval.csv")[-1]
    value = float(last["eval/best_return"])
    bar = re.search(rf"110/110 \[00:00 left, +([\d.]+)step/s, return {value:.0f} at ", err)  # the rest is cut at 80 columns
    assert float(bar[1]) > 50 / (float(last["charts/wall_seconds"]) - 3)
    assert re.fullmatch(rf"return {value:.1f} at the end, at best -?\d\.\d at step (60|85|110)\n", out)


def test_a_bar_that_cannot_be_written(cli):
    """No terminal, or one that has gone away: the run goes on."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    for name, stderr in (("none", None), ("gone", Gone())):
        cli.monkeypatch.setattr(sys, "stderr", stderr)
        cli.train(name, "--total-timesteps", "97")


# What it leaves ---
@every_script
def test_files(cli):
    """The default name, and what lies under it."""
    cli.monkeypatch.setattr(time, "time", lambda: 1_700_000_000)
    cli.call(*cli.tiny, "--env-id", "toy_envs:Point-v0", "--snapshot-frequency", "7")
    run_dir = cli.folder / f"runs/toy_envs_Point-v0__{cli.name}__1__1700000000"
    files = {
        "config.json",
        f"{cli.name}.py",
        "eval.csv",
        "train.csv",
        "checkpoint.pt",
        "policy.pt",
        "best_policy.pt",
        "snapshots",
    }
    assert {path.name for path in run_dir.iterdir()} == files
    assert {path.name for path in (run_dir / "snapshots").iterdir()} == {"step-96.pt", "step-103.pt", "step-110.pt"}
    assert (run_dir / f"{cli.name}.py").read_bytes() == cli.path.read_bytes()
    config = json.loads((run_dir / "config.json").read_text())
    assert config["args"] == checkpoint_of(run_dir)["args"]
    with_defaults = cli.script.completed(cli.script.Args(**config["args"]), cli.script.Env("toy_envs:Point-v0"))
    assert config["args"] == vars(with_defaults)
    rows = read_rows(run_dir / "eval.csv")
    best = max(rows, key=lambda row: float(row["eval/best_return"]))
    for name, row in (("policy.pt", rows[-1]), ("best_policy.pt", best)):
        assert cli.script.load_policy(run_dir / name).step == int(row["global_step"])


def test_two_runs_that_start_in_the_same_second(cli):
    cli.monkeypatch.setattr(time, "time", lambda: 1_700_000_000)
    for _ in range(2):
        cli.call(*cli.tiny, "--total-timesteps", "1")
    assert len(list((cli.folder / "runs").iterdir())) == 2


def test_rows_of_training(cli):
    """One for each episode, and one at the end; losses once learning has begun."""
    rows = read_rows(whole_run(cli) / "train.csv")
    *episodes, end = rows
    assert [int(row["global_step"]) for row in rows] == [*range(EPISODE_LENGTH, 110, EPISODE_LENGTH), 110]
    assert {row["charts/episodic_length"] for row in episodes} == {str(EPISODE_LENGTH)}
    assert end["charts/episodic_length"] == ""
    losses = ["qf_loss", "qf_values", "qf_std", "actor_loss"]
    if hasattr(cli.script.Args, "alpha_lr"):
        losses += ["alpha", "entropy", "alpha_loss"]
    for row in rows:
        has_learned = int(row["global_step"]) > 96
        assert [bool(row[f"losses/{name}"]) for name in losses] == [has_learned] * len(losses)


# Evaluation ---
def test_an_evaluation(cli):
    """H policies play E episodes from the same consecutive seeds; their means, the best one and its std over episodes."""
    run_dir = cli.train("run", "--eval-episodes", "3", *cli.policies(3), env_id="toy_envs:ReturnsItsStart-v0")
    seed = first_seed(EVALUATION)
    starts = [np.random.default_rng(seed + episode).random() for episode in range(3)]
    rows = read_rows(run_dir / "eval.csv")
    assert [row["global_step"] for row in rows] == ["96", "103", "110"]
    conditions = cli.script.eval_conditions(cli.script.Args(**checkpoint_of(run_dir)["args"]))
    columns = [name for name in rows[0] if name.startswith("eval/return_")]
    np.testing.assert_allclose([float(name.removeprefix("eval/return_")) for name in columns], conditions, rtol=1e-5)
    for row in rows:
        np.testing.assert_allclose([float(row[name]) for name in columns], np.mean(starts), rtol=1e-5)
        np.testing.assert_allclose(float(row["eval/best_return_std"]), np.std(starts), rtol=1e-5)


@of_the_four
def test_a_return_that_is_no_number(cli):
    """It is never the best while there is another: not among policies, nor among evaluations."""
    returns = iter([np.nan, np.nan, np.nan, np.nan, 2.0, 1.0, np.nan, np.nan, np.nan])  # of three evaluations
    cli.monkeypatch.setattr(cli.script, "play", lambda *_: np.full(2, next(returns)))
    run_dir = cli.train("run", *cli.policies(3))
    assert [row["eval/best_return"] for row in read_rows(run_dir / "eval.csv")] == ["nan", "2.0", "nan"]
    assert cli.script.load_policy(run_dir / "best_policy.pt").step == 103
    assert cli.script.load_policy(run_dir / "policy.pt").step == 110


def test_the_same_seed_gives_the_same_run(cli):
    """To the bit, however many processes evaluate, which need no /dev/shm; another seed gives another one.

    Statistics of networks travel, too.
    """
    options = with_network(networks_of(cli.script)[-1])  # that with statistics
    one = cli.train("one", *options)
    with cli.monkeypatch.context() as patch:
        patch.setattr("_multiprocessing.SemLock", Mock(side_effect=OSError))  # as where it is read-only
        two = cli.train("two", "--eval-workers", "2", *options)
    assert_same_run(one, two)
    first, other = (cli.train(f"seed {seed}", "--seed", seed, "--total-timesteps", "1") for seed in (1, 2))
    assert not torch.equal(checkpoint_of(first)["replay"], checkpoint_of(other)["replay"])


@pytest.mark.slow
def test_a_dead_worker_is_replaced(cli):
    """Its work is repeated."""
    run_dir = cli.train("run", "--eval-workers", "1", env_id="toy_envs:DiesOnce-v0")
    assert len(list(cli.folder.glob("died.*"))) == 1
    assert_same_run(whole_run(cli), run_dir)


@pytest.mark.slow
def test_workers_that_die_again_and_again(cli):
    """Three times; the run goes on without workers."""
    _, err = cli.call(*cli.tiny_run("run", "--eval-workers", "1", env_id="toy_envs:Dies-v0"), code=1)
    assert re.search(r"^error: evaluation workers die .*__main__.*--eval-workers 0.*$", err, re.M)
    assert len(list(cli.folder.glob("died.*"))) == 3
    cli.call("--resume", "runs/run", "--eval-workers", "0")
    assert_same_run(whole_run(cli), cli.folder / "runs/run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_workers_end_with_their_parent(cli, number):
    """In the middle of an evaluation that would never end; it pends, and is played when the run goes on."""
    with held_run(cli, "cut", "--eval-workers", "2") as (process, cut):
        wait_until(lambda: len(list(cli.folder.glob("held.*"))) == 3)
        process.send_signal(number)
        (cli.folder / "go").touch()
        assert process.wait(120) == (-number if number == signal.SIGKILL else 128 + number)
        pids = [path.suffix[1:] for path in cli.folder.glob("held.*")]
        wait_until(lambda: not any(Path("/proc", pid).exists() for pid in pids), 60)
    if number != signal.SIGKILL:
        assert checkpoint_of(cut)["progress"]["step"] == 103
        assert [row["global_step"] for row, _ in checkpoint_of(cut)["pending"]] == [96, 103]
    cli.call("--resume", cut, "--eval-workers", "0")
    assert_same_run(whole_run(cli), cut)


@pytest.mark.slow
def test_a_program_without_a_guard(cli):
    """Workers import the program, which would start workers again; one sentence says so, and there is one run."""
    args = "env_id='toy_envs:Point-v0', compile=False, learning_starts=1, eval_workers=1"
    _, err = cli.call_program(f"import {cli.name} as script\nscript.train(script.Args({args}))", code=1)
    assert "UserError: evaluation workers die again and again; a program that calls train() needs `if __name__ ==" in err
    assert list((cli.folder / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_program_has_the_settings_of_the_command_line(cli):
    """Where it has not imported torch before: threads that wait leave their cores to others."""
    for first, value in (("os", "1000"), ("torch", "None")):
        out, _ = cli.call_program(f"import os, {first}, {cli.name}; print(os.environ.get('GOMP_SPINCOUNT'))")
        assert out == f"{value}\n"
