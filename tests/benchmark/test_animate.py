"""benchmark/animate.py: members of a family side by side."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

pytestmark = pytest.mark.benchmark


def animate(folder, *arguments):
    """The program in a process of its own, in which MuJoCo can be told how to render."""
    command = [sys.executable, str(ROOT / "benchmark/animate.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_three_betas(cli, tmp_path, monkeypatch):
    """A panel for each beta, and a still beside the film."""
    monkeypatch.setenv("MUJOCO_GL", "egl")
    result = animate(tmp_path, cli.train("run", *cli.policies(3), env_id="Hopper-v4"), "--seconds", "0.5")
    assert result.returncode == 0, result.stderr
    with Image.open(tmp_path / "family.webp") as film, Image.open(tmp_path / "family.png") as still:
        assert film.n_frames > 1
        assert film.size == still.size == (840, 210)
        left, middle, right = np.split(np.asarray(still.convert("RGB")), 3, 1)
    assert not np.array_equal(left, middle)
    assert not np.array_equal(middle, right)


def test_what_is_no_policy(tmp_path):
    result = animate(tmp_path, "missing.pt")
    assert result.returncode == 1
    assert result.stderr == "error: missing.pt holds no policy of one of the scripts; give a policy file or a run directory.\n"
