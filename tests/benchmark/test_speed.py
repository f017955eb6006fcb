"""benchmark/speed.py: turns of eager scripts, and how much work an environment step is."""

import json

import pytest
from conftest import ROOT

pytestmark = pytest.mark.benchmark
TINY = "--env-id Hopper-v4 --utd 2 --num-critics 3 --batch-size 16 --hidden-dim 8"


@pytest.fixture
def speed(monkeypatch, tmp_path):
    """Its main() with some arguments, in a folder of its own; returns the content of the JSON file."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    monkeypatch.chdir(tmp_path)
    import speed

    def run(arguments: str) -> dict:
        speed.main(f"--cuda False --modes eager --block-seconds 0.01 --repeats 1 --out speed.json {arguments}".split())
        return json.loads((tmp_path / "speed.json").read_text())

    return run


@pytest.mark.parametrize(
    ("arguments", "flop", "moved"),
    [
        ("", 2 * 256 * 61_499_392, 20 * 9 * 4 * 755_210),
        (TINY, 2 * 16 * 6_192, 2 * 9 * 4 * 627),
        (f"{TINY} --scripts rac_td3", 2 * 16 * 5_864, 2 * 9 * 4 * 627),
        (f"{TINY} --network simba", 2 * 16 * 22_320, 2 * 9 * 4 * 2_067),
    ],
)
def test_work_of_an_environment_step(speed, monkeypatch, arguments, flop, moved):
    """By hand, two FLOP for each multiply-add, and nine passes of Adam and Polyak over the critics' parameters of four bytes.

    Ant-v4, 256 samples: ten critics of 36 * 256 + 256 * 256 + 256 = 75,008 weights, 9,216 of them in the first layer; the actor
    has 28 * 256 + 256 * 256 + 256 * 16 = 76,800, 7,168 in the first. 20 updates of the critics, one of actor and temperature:
    20 * (10 * (4 * 75,008 - 9,216) + 76,800) + 2 * 750,080 + 3 * 76,800 - 7,168 + 76,800 = 61,499,392, which is 31.5 GFLOP.
    Adam and Polyak: 27.2 MB an update.

    Hopper-v4, 16 samples: three critics of 15 * 8 + 8 * 8 + 8 = 192 weights, 120 in the first layer, 627 parameters in all; the
    actor has 12 * 8 + 8 * 8 + 8 * 6 = 208, 96 in the first: 2 * (3 * (4 * 192 - 120) + 208) + 2 * 576 + 3 * 208 - 96 + 208.
    TD3's actor has 184, and there is no temperature: 2 * (3 * (4 * 192 - 120) + 184) + 2 * 576 + 3 * 184 - 96.
    simba: a critic has 15 * 8 + 2 * 8 * 32 + 8 = 640 weights and 49 biases, the actor 12 * 8 + 2 * 8 * 32 + 8 * 6 = 656:
    2 * (3 * (4 * 640 - 120) + 656) + 2 * 1,920 + 3 * 656 - 96 + 656.
    """
    monkeypatch.setattr("speed.seconds_of", lambda *_, **tensors: 1.0)  # of the floor, which test_copies_take_turns times
    found = speed(arguments)
    assert (found["flop"], found["bytes"]) == (flop, moved)


def test_copies_take_turns(speed, tmp_path, capsys):
    """Two scripts of one name are two programs, and the slower one is told from the first."""
    update = "    def update(self, step: int) -> None:\n"
    source = (ROOT / "rac_sac.py").read_text()
    (tmp_path / "rac_sac.py").write_text(source)
    (tmp_path / "new").mkdir()
    assert update in source
    (tmp_path / "new/rac_sac.py").write_text(source.replace(update, f"{update}        time.sleep(0.3)\n"))
    turns = speed(f"{TINY} --scripts rac_sac.py new/rac_sac.py --loop-steps 2")["turns"]
    assert [turn["program"] for turn in turns] == ["rac_sac.py eager auto", "new/rac_sac.py eager auto", "floor"]
    old, new, _ = turns
    for measured in ("updates", "loop"):
        assert old[measured] < 0.3 <= new[measured]
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "new/" in line]
    _script, _mode, _precision, _median, _min, _max, ratio, *_ = row.split()
    assert float(ratio) == pytest.approx(new["updates"] / old["updates"], abs=1e-3)


@pytest.mark.parametrize("mistake", ["--scripts rac_sca", "--env-id Hoper-v4", "--batch-size 0"])
def test_mistakes(speed, mistake):
    with pytest.raises(SystemExit, match="error: "):
        speed(mistake)
