"""Tiny runs that are whole, stopped or held, what they leave, and whether two are the same."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import torch
from conftest import CommandLine, wait_until, without_wall_clock
from toy_envs import Point


def checkpoint_of(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def assert_same_run(one: Path, other: Path, files: tuple[str, ...] = ("train.csv", "eval.csv")) -> None:
    """Rows but for wall-clock times, networks, Adam's state, noise and replay."""
    for name in files:
        assert without_wall_clock(one / name) == without_wall_clock(other / name)
    for part in ("learner", "replay"):
        torch.testing.assert_close(checkpoint_of(one)[part], checkpoint_of(other)[part], rtol=0, atol=0)


def stopped_run(cli, name: str, step: int, *arguments, number: int = signal.SIGTERM, **options) -> tuple[Path, str]:
    """A run that gets a signal in the middle of a step: its directory, and its stdout."""
    cli.monkeypatch.setattr(Point, "events", {step: lambda: os.kill(os.getpid(), number)})
    out, _ = cli.call(*cli.tiny_run(name, *arguments, **options), code=128 + number)
    run_dir = cli.folder / "runs" / name
    assert checkpoint_of(run_dir)["progress"]["step"] == step
    return run_dir, out


@contextlib.contextmanager
def held_run(cli, name: str, *arguments, **options):
    """A run in a process of its own that waits in training's step 103; it yields the process and the run directory."""
    process = cli.start(*cli.tiny_run(name, *arguments, env_id="toy_envs:Held-v0"), **options)
    try:
        wait_until((cli.folder / f"held.{process.pid}").exists)
        yield process, cli.folder / "runs" / name
    finally:
        process.kill()
        process.communicate()


# Made once ---
KEPT: dict[tuple, Path] = {}  # run directories as they were made, which nobody changes


def kept(make, cli, name: str, *arguments) -> Path:
    """The directory that make(cli, name, *arguments) leaves: made for the first test that asks, a copy of it for others."""
    run_dir, key = cli.folder / "runs" / name, (make, cli.path, arguments)
    if key in KEPT:
        shutil.copytree(KEPT[key], run_dir)
    else:
        make(cli, name, *arguments)
        KEPT[key] = shutil.copytree(run_dir, cli.folder.parent / f"kept {name}")
    return run_dir


def whole_run(cli, *arguments) -> Path:
    """runs/whole: a run that was not stopped."""
    return kept(CommandLine.train, cli, "whole", *arguments)


def cut_run(cli, *arguments) -> Path:
    """runs/cut: one that was stopped at step 102, the fourth of an episode, with a wrapped replay."""
    return kept(stopped_run, cli, "cut", 102, *arguments)
