"""benchmark/animate.py: members of a family side by side."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

Image = pytest.importorskip("PIL.Image")


def animate(*arguments):
    command = [sys.executable, str(ROOT / "benchmark/animate.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.benchmark
def test_three_betas(cli, tmp_path):
    run_dir = cli.train("run")
    out = tmp_path / "family.webp"
    result = animate(run_dir, "--out", out, "--seconds", "0.5", "--width", "120", "--height", "90")
    assert result.returncode == 0, result.stderr
    assert "wrote" in result.stdout
    assert result.stdout.count("\nbeta ") == 3
    with Image.open(out) as picture:
        assert picture.size == (360, 90)
        assert 2 <= picture.n_frames <= 10
    with Image.open(out.with_suffix(".png")) as still:
        assert still.size == (360, 90)


@pytest.mark.parametrize("frames_per_second", [5, 20, 40])
@pytest.mark.parametrize("end", [None, "terminated", "truncated"])
def test_a_film_takes_as_long_as_what_it_shows(monkeypatch, frames_per_second, end):
    """Also with more than a frame, or less than one, for each step of the simulator; its last picture is of the last step."""
    monkeypatch.setenv("MUJOCO_GL", "egl")  # which the program would set, and for other tests too
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import animate

    class Env:
        dt = 0.05
        steps = 0
        unwrapped = property(lambda self: self)

        def reset(self, seed):
            return 0, {}

        def step(self, action):
            self.steps += 1
            over = self.steps == 27
            return 0, 1.0, over and end == "terminated", over and end == "truncated", {}

        def render(self):
            return self.steps

    env = Env()
    options = animate.Options(Path(), seconds=2.0, frames_per_second=frames_per_second)
    frames, returns, terminated, truncated = animate.play(env, lambda obs, beta: 0, 0.1, options)
    assert (terminated, truncated) == (end == "terminated", end == "truncated")
    assert returns == frames  # a reward of 1 in each step
    if end:
        assert frames[-1] == 27
        assert len(frames) <= 27 * env.dt * frames_per_second + 2
        return
    assert len(frames) == len(returns) == 2 * frames_per_second
    shown_at = [number / frames_per_second for number in range(len(frames))]
    assert all(abs(steps * env.dt - at) <= env.dt for steps, at in zip(frames, shown_at, strict=True))


def test_what_has_ended_says_how(monkeypatch):
    """One that fell in grey, one at its time limit in its colours, one that goes on without a word."""
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import animate

    white = [np.full((60, 90, 3), 200, np.uint8)] * 3
    returns = [0.0, 1.0, 2.0]
    ends = [(True, False), (False, True), (False, False)]
    said = []
    monkeypatch.setattr(animate, "labelled", lambda frame, lines, brightness: said.append((lines[1], brightness)) or frame)
    animate.animation([animate.Episode(white, returns, *end) for end in ends], [0.1, 0.2, 0.3])
    assert said[-3:] == [("return 2, fell", 0.45), ("return 2, time limit", 1.0), ("return 2", 1.0)]
    assert {brightness for _, brightness in said[:-3]} == {1.0}


@pytest.mark.slow
@pytest.mark.benchmark
def test_what_cannot_be_animated(cli, toy, tmp_path):
    for path, said in ((tmp_path / "none.pt", "does not exist"), (ROOT / "README.md", "is damaged")):
        result = animate(path, "--out", tmp_path / "family.webp")
        assert result.returncode == 2
        (line,) = (line for line in result.stderr.splitlines() if line.startswith("error:"))
        assert said in line
        assert "Traceback" not in result.stderr
    for option, value in (("--frames-per-second", "0"), ("--seconds", "nan"), ("--quality", "101"), ("--out", "family.png")):
        result = animate(ROOT / "policies/Ant-v4.pt", option, value)
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: {option[2:].replace('-', '_')} is {value}; it must ")
