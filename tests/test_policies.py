"""policies/: every file plays, and does about what its row of the table states."""

import dataclasses
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import policies
import rac_sac

FOLDER = ROOT / "policies"
NUMBER = r"(-?[\d,]+(?:\.\d+)?)"
ROW = rf"^\| (?P<env_id>\S+) \| (?P<run>\S+) \| {NUMBER} \| {NUMBER} \| {NUMBER} ± {NUMBER} \| {NUMBER} \| {NUMBER} \|"


def rows() -> dict[str, list[float]]:
    """Environment -> step, beta*, return, its std, forward distance in m, seconds of an episode."""
    found = re.finditer(ROW, (FOLDER / "README.md").read_text(), re.MULTILINE)
    return {match["env_id"]: [float(cell.replace(",", "")) for cell in match.groups()[2:]] for match in found}


def test_every_policy_is_in_the_table():
    assert rows().keys() == {path.stem for path in FOLDER.glob("*.pt")}
    assert all(path.stat().st_size < 1_000_000 for path in FOLDER.glob("*.pt"))


@pytest.mark.parametrize("env_id", rows())
def test_a_policy_does_what_its_row_states(env_id):
    """Forward, and with over 0.6 of the return, in three other episodes; standing still is not walking.

    Not more, for on another processor, which rounds differently, a few of Walker2d's episodes end early.
    """
    path = FOLDER / f"{env_id}.pt"
    step, beta, score, _, distance, _ = rows()[env_id]
    file = rac_sac.load_policy_file(path)
    assert (file.evaluation["step"], round(file.evaluation["best_beta"], 2)) == (step, beta)
    played = policies.play(file, [101, 102, 103])
    assert played.returns.mean() > 0.6 * score
    assert played.distances.mean() > 0.5 * distance > 0


def test_a_run_is_copied_and_its_row_printed(tmp_path, monkeypatch, capsys):
    """With two episodes in place of ten; the row can be read as those of the table are."""
    run = ROOT / "benchmark/results/to_100000/Walker2d-v4__rac_sac__4"
    monkeypatch.setattr(policies, "EPISODES", 2)
    monkeypatch.setattr(sys, "argv", ["policies.py", str(run), "--out", str(tmp_path)])
    policies.main()
    printed = re.match(ROW, capsys.readouterr().out)
    assert printed["env_id"] == "Walker2d-v4"
    assert printed["run"] == run.name
    assert (tmp_path / "Walker2d-v4.pt").read_bytes() == (run / "best_policy.pt").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["Walker2d-v4.pt"]


@pytest.mark.parametrize("separator", "/:")
def test_an_environment_of_a_namespace_is_copied(tmp_path, monkeypatch, capsys, separator):
    """The name of its file has no separators, as that of a run directory."""
    file = policies.load_policy_file(FOLDER / "Hopper-v4.pt")
    file = file._replace(args=dataclasses.replace(file.args, env_id=f"mine{separator}Hopper-v4"))
    monkeypatch.setattr(policies, "load_policy_file", lambda path: file)
    monkeypatch.setattr(policies, "row", lambda run, file: "a row")
    run = ROOT / "benchmark/results/default_biases/Hopper-v4__rac_sac__4"
    monkeypatch.setattr(sys, "argv", ["policies.py", str(run), "--out", str(tmp_path)])
    policies.main()
    assert [path.name for path in tmp_path.iterdir()] == ["mine_Hopper-v4.pt"]


def test_of_each_environment_one_policy(tmp_path, monkeypatch):
    """A second one would take the first one's place: nothing is copied."""
    results = ROOT / "benchmark/results"
    two = [str(results / folder / "Walker2d-v4__rac_sac__4") for folder in ("to_100000", "default_biases")]
    monkeypatch.setattr(sys, "argv", ["policies.py", *two, "--out", str(tmp_path)])
    with pytest.raises(rac_sac.UserError, match="are both of Walker2d-v4; give one run of each"):
        policies.main()
    assert not list(tmp_path.iterdir())


def test_what_has_no_row():
    """A directory that is no run, and an environment without a distance."""
    with pytest.raises(rac_sac.UserError, match=r"no config\.json"):
        policies.origin_of(FOLDER)
    with pytest.raises(rac_sac.UserError, match="not one of MuJoCo's"):
        policies.play(rac_sac.load_policy_file(ROOT / "tests/run/data/policy_of_format_3.pt"), [1])
