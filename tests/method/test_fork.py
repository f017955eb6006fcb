"""What `pytest tests/method --script my_rac.py` says of a fork that changes a layer."""

import subprocess
import sys

import access
import pytest
import test_method
from conftest import ROOT, load_script

CHANGES = {  # the text of rac_sac.py, what a fork makes of it, and what the tests say
    "layer normalisation": (
        "super().__init__(first, nn.ReLU(), second,",
        "super().__init__(first, nn.LayerNorm(hidden_dim), nn.ReLU(), second,",
        r"the critic has parameters that the tests do not know: 1\.weight \(24,\), 1\.bias \(24,\), 3\.weight",
    ),
    "another width": (
        "self.mean = nn.Linear(hidden_dim, action_dim)",
        "self.mean = nn.Linear(hidden_dim, 2 * action_dim)",
        r"the actor has parameters that the tests do not know: mean\.weight \(6, 24\), mean\.bias \(6,\)",
    ),
    "a layer less": (
        "nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))",
        "nn.Linear(1, 1))",
        r"the temperature lacks parameters that the tests know: .*network\.2\.weight \(1, 64\)",
    ),
}


def make_fork(folder, change):
    """A copy of rac_sac.py with one change: its path, and what the tests say."""
    old, new, said = CHANGES[change]
    text = (ROOT / "rac_sac.py").read_text()
    assert text.count(old) == 1
    path = folder / f"my_{change.replace(' ', '_')}.py"
    path.write_text(text.replace(old, new))
    return path, said


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_is_named(tmp_path, change):
    """By one test, which fails; the others that need the parameters are skipped."""
    path, said = make_fork(tmp_path, change)
    method = access.method_of(load_script(path))
    with pytest.raises(pytest.fail.Exception, match=said):
        test_method.test_networks_are_known(method)
    with pytest.raises(pytest.skip.Exception, match="test_networks_are_known"):
        method.exact(method.learner())


@pytest.mark.slow
def test_a_changed_layer_fails_once(tmp_path):
    path, _ = make_fork(tmp_path, "layer normalisation")
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests/method/test_method.py"), "--script", str(path), "-n", "0"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "the critic has parameters that the tests do not know: 1.weight (24,)" in run.stdout
    assert "= 1 failed, " in run.stdout, run.stdout
