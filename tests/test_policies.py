"""policies/: every file plays, and does about what its row of the table states."""

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
    """Three episodes that its row is not of: over 0.8 of the return, and forward; standing still is not walking."""
    path = FOLDER / f"{env_id}.pt"
    step, beta, score, _, distance, _ = rows()[env_id]
    evaluation = rac_sac.load_policy_file(path).evaluation
    assert (evaluation["step"], round(evaluation["best_beta"], 2)) == (step, beta)
    played = policies.play(path, [101, 102, 103])
    assert played.returns.mean() > 0.8 * score
    assert played.distances.mean() > 0.5 * distance > 0
