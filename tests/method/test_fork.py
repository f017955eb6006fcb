"""What `pytest tests/method --script my_rac.py` says of a fork that changes a layer; the fork of docs/details.md."""

import re
import subprocess
import sys

import access
import numpy as np
import pytest
import test_method
import torch
from conftest import ROOT, SCRIPTS, load_script

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


@pytest.mark.parametrize("name", SCRIPTS)
def test_three_step_returns(tmp_path, name):
    """The fork of docs/details.md: of an episode that terminates, one that is truncated, and where the replay begins anew."""
    lines = re.search(r"3-step returns\n.*?```python\n(.*?)```", (ROOT / "docs/details.md").read_text(), re.S)[1]
    text = (ROOT / f"{name}.py").read_text()
    (line,) = re.findall(r".*= self\.sample\(.*\n", text)
    path = tmp_path / f"my_{name}.py"
    path.write_text(text.replace(line, line + lines))
    script = load_script(path)
    sizes = {"buffer_size": 64, "total_timesteps": 64, "learning_starts": 10, "batch_size": 64, "q_lr_warmup_end": 20, "utd": 1}
    args = script.check_args(script.Args(env_id="Pendulum-v1", num_critics=2, hidden_dim=8, compile=False, **sizes), 1)
    learner = script.Learner(args, 1, 1, torch.device("cpu"))
    learner.warm_up()  # before there is a row

    rewards = np.random.default_rng(0).normal(size=90)
    steps = [(episode, step, 4 + episode % 2) for episode in range(20) for step in range(4 + episode % 2)][:90]
    for t, (episode, step, length) in enumerate(steps):  # those of 5 steps terminate, those of 4 are truncated
        obs = [100 * episode + step]
        terminated = length == 5 and step == 4
        learner.store(t, np.array(obs), np.zeros(1), rewards[t], terminated, np.array(obs) + 1)
    taken = []

    class Taken(Exception):
        """Ends the update, of which only the rows are looked at."""

    def take(rows, *_):
        taken.extend(rows.tolist())
        raise Taken

    learner._update_critics = take
    with pytest.raises(Taken):
        learner._update()

    assert len(taken) == 64
    for obs, _, reward, terminated, next_obs in taken:
        t = steps.index((obs // 100, obs % 100, 4 + obs // 100 % 2))
        last = min(t + 2, t + steps[t][2] - 1 - steps[t][1], 89)
        assert reward == pytest.approx(sum(args.gamma ** (i - t) * rewards[i] for i in range(t, last + 1)), abs=1e-5)
        ends = steps[last][2] == 5 and steps[last][1] == 4
        assert 1 - terminated == pytest.approx(0 if ends else args.gamma ** (last - t))
        assert next_obs == 100 * steps[last][0] + steps[last][1] + 1


@pytest.mark.slow
def test_a_changed_layer_fails_once(tmp_path):
    path, _ = make_fork(tmp_path, "layer normalisation")
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests/method/test_method.py"), "--script", str(path), "-n", "0"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "the critic has parameters that the tests do not know: 1.weight (24,)" in run.stdout
    assert "= 1 failed, " in run.stdout, run.stdout
