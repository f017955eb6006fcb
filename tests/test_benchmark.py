"""The measurements of benchmark/ run from the command line and say what they measured."""

import itertools
import json
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS

SIZES = "--env-id Hopper-v4 --no-compile --hidden-dim 8 --num-critics 2 --batch-size 8 --utd 2 --repeats 1".split()


def run(program, *arguments, folder):
    result = subprocess.run([sys.executable, str(ROOT / "benchmark" / program), *arguments], cwd=folder, capture_output=True,
                            text=True, timeout=300)  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_throughput_of_all_scripts(tmp_path):
    out = run("throughput.py", *SIZES, "--scripts", *SCRIPTS, "--json", "out.json", folder=tmp_path)
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result["blocks"]) == set(SCRIPTS) and "matrix floor" in out
    for name, measured in result["blocks"].items():
        parts = measured["split_seconds"]
        assert name in out and measured["over_floor"] > 1 and len(measured["seconds"]) == 1
        assert all(seconds > 0 for seconds in parts.values()) and parts["critic updates"] > parts["storing"]
        assert 0 < measured["host_seconds"] < 1
    # 2 * batch * (utd * (4 * critic - first layer + actor) + actor update + fresh actions), by hand for Hopper and RAC-SAC
    critic, actor = 2 * (15 * 8 + 8 * 8 + 8), 12 * 8 + 8 * 8 + 2 * 8 * 3
    flop = 2 * 8 * (2 * (4 * critic - 2 * 15 * 8 + actor) + 2 * critic + 3 * actor - 12 * 8 + actor)
    assert result["floor_seconds"][0] * result["matrix_flop_per_second"][0] == pytest.approx(flop)


@pytest.mark.slow
@pytest.mark.benchmark
def test_sweep_draws_its_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="benchmark/requirements.txt is not installed")
    out = run("throughput.py", *SIZES, "--sweep", "--json", "out.json", "--plot", "cost.png", folder=tmp_path)
    rows = json.loads((tmp_path / "out.json").read_text())["sweep"]
    assert [(r["varied"], r["value"]) for r in rows] == [
        *(("utd", v) for v in (1, 5, 10, 20)), *(("num_critics", v) for v in (2, 5, 10, 20)),
        *(("batch_size", v) for v in (256, 512, 1024))]  # fmt: skip
    assert all(a["gflop"] < b["gflop"] for a, b in itertools.pairwise(rows) if a["varied"] == b["varied"])
    assert "x the given sizes" in out and (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
