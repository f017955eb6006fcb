"""benchmark/animate.py: members of a family side by side."""

import subprocess
import sys

import pytest
from conftest import ROOT

Image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.slow, pytest.mark.benchmark]


def animate(*arguments):
    command = [sys.executable, str(ROOT / "benchmark/animate.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


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


def test_what_cannot_be_animated(cli, toy, tmp_path):
    for path, said in ((tmp_path / "none.pt", "does not exist"), (ROOT / "README.md", "is damaged")):
        result = animate(path, "--out", tmp_path / "family.webp")
        assert result.returncode == 2
        (line,) = (line for line in result.stderr.splitlines() if line.startswith("error:"))
        assert said in line
        assert "Traceback" not in result.stderr
