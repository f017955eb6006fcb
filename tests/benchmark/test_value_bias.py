"""The normalised value bias: in closed form, and from the snapshots of a run through the command line."""

import csv
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy_envs
from conftest import ROOT, environment

import rac_sac

sys.path.insert(0, str(ROOT / "benchmark"))
import job
import value_bias

GAMMA, ALPHA, LOG_PROB, Q = 0.9, 0.2, -0.5, 10.0
PAPER = {"pairs": 100, "chosen": 20, "continuations": 20, "max_steps": 1500}  # sizes, by the paper


class ByHand:
    """A policy that plays 0 with a known log-probability, and a Q that is the same everywhere."""

    alpha = ALPHA
    args = SimpleNamespace(gamma=GAMMA)

    def act(self, obs, noise, continuing):
        return np.zeros((len(obs), 1), np.float32), np.full(len(obs), LOG_PROB)

    def mean_q(self, obs, action):
        return np.full(len(obs), Q)


def soft_return(steps: int) -> float:
    """Reward 1 in each step, and from the second on -alpha * log_prob."""
    return sum(GAMMA**t * (1 - (ALPHA * LOG_PROB if t else 0)) for t in range(steps))


@pytest.fixture(params=["termination", "truncation"])
def make_env(request, monkeypatch):
    """Environments with episodes of 7 steps, which end themselves in either way and refuse a step after their end."""

    class Strict(toy_envs.Counter):
        def step(self, action):
            assert self.count < self.length, "stepped past the end"
            return super().step(action)

    def make(*arguments, **options):
        env = Strict(ends=request.param)
        env.spec = SimpleNamespace(id="Counter-v0")
        return env

    monkeypatch.setattr(rac_sac.gym, "make", make)
    return lambda: rac_sac.FlatEnv("Counter-v0")


def test_monte_carlo_return(make_env):
    """Two steps lead to the pair, so that the pair's own step and four after it remain of an episode."""
    actions = list(np.zeros((3, 1), np.float32))
    envs = [make_env() for _ in range(4)]
    envs[0].reset(seed=3)
    for action in actions[:-1]:
        obs, *_ = envs[0].step(action)
    value = value_bias.monte_carlo_return(ByHand(), envs, 3, actions, obs, 1500, np.random.default_rng(0))
    assert value == pytest.approx(soft_return(5))
    value = value_bias.monte_carlo_return(ByHand(), envs, 3, actions, obs, 2, np.random.default_rng(0))
    assert value == pytest.approx(soft_return(2))
    with pytest.raises(job.UserError, match="does not repeat an episode"):
        value_bias.monte_carlo_return(ByHand(), envs, 3, actions, obs + 1, 1500, np.random.default_rng(0))


@pytest.mark.parametrize("gamma,max_steps,said", [(0.99, 1500, ""), (0.999, 1500, "22%.*--max-steps 4603"), (1.0, 9, "100%")])
def test_a_return_that_is_cut_is_named(capsys, gamma, max_steps, said):
    value_bias.warn_of_gamma(gamma, max_steps)
    err = capsys.readouterr().err
    assert re.search(said, err) if said else err == ""


def test_value_bias(make_env):
    """Pairs are steps 1 to 7 of episodes in turn: mean and population std follow from the chosen ones."""
    sizes = value_bias.Sizes()
    mean, std = value_bias.measure(ByHand(), make_env(), [make_env() for _ in range(2)], sizes, seed=11)
    rng = np.random.default_rng(11)
    rng.standard_normal((100, 1), np.float32)  # one noise for each pair
    returns = np.array([soft_return(7 - i % 7) for i in rng.choice(100, 20, replace=False)])
    bias = (Q - returns) / abs(returns.mean())
    assert mean == pytest.approx(bias.mean())
    assert std == pytest.approx(bias.std())


def test_no_value_bias_relative_to_a_mean_return_of_0(make_env, monkeypatch):
    monkeypatch.setattr(value_bias, "monte_carlo_return", lambda *arguments: 0.0)
    bias = value_bias.measure(ByHand(), make_env(), [make_env()], value_bias.Sizes(), seed=11)
    assert np.isnan(bias).all()


def snapshot_of(module, **changes) -> dict:
    """A snapshot of untrained networks, as a run writes it."""
    args = module.check_args(module.Args(num_critics=3, hidden_dim=8, **changes), 3)
    learner = module.Learner(args, 11, 3, torch.device("cpu"))
    return {
        "args": vars(args),
        "obs_dim": 11,
        "bounds": torch.tensor([[-1.0] * 3, [1.0] * 3]),
        "alphas": module.alphas(learner, module.eval_conditions(args)),
        "actor": learner.copy_of("actor"),
        "critic": learner.copy_of("critic"),
    }


@pytest.mark.parametrize("name", ["rac_sac", "rac_td3", "vanilla_rac", "rac_itm"])
def test_what_is_measured_is_the_script_s_own(name):
    """Actions, log-probabilities and Q of a snapshot, against the networks themselves in float64."""
    module = value_bias.load_script(ROOT / f"{name}.py")
    subject = value_bias.Subject(module, snapshot_of(module), index=0)
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((5, 11), np.float32)
    noise = rng.standard_normal((5, 3), np.float32)
    action, log_prob = subject.act(obs, noise, continuing=False)
    continued, _ = subject.act(obs, noise, continuing=True)
    seen = [] if name == "vanilla_rac" else [torch.full((5, 1), np.log(subject.condition), dtype=torch.float64)]
    with torch.no_grad():
        output = subject.actor.double()(torch.tensor(obs).double(), *seen)
        inputs = torch.cat([torch.tensor(obs).double(), torch.tensor(action).double(), *seen], 1)
        q = subject.critic.double()(inputs).mean(0).numpy()
    if name == "rac_td3":
        np.testing.assert_allclose(action, np.clip(output.numpy() + 0.1 * noise, -1, 1), atol=1e-5)
        np.testing.assert_allclose(continued, output.numpy(), atol=1e-5)
        assert subject.alpha == 0
    else:
        mean, log_std = (part.numpy() for part in output)
        u = mean + np.exp(log_std) * noise
        density = -0.5 * noise.astype(float) ** 2 - log_std - 0.5 * np.log(2 * np.pi) - np.log1p(-(np.tanh(u) ** 2))
        np.testing.assert_allclose(action, np.tanh(u), atol=1e-5)
        np.testing.assert_allclose(continued, action)
        np.testing.assert_allclose(log_prob, density.sum(1), rtol=1e-4, atol=1e-4)
        assert subject.alpha > 0
    subject.actor.float(), subject.critic.float()
    np.testing.assert_allclose(subject.mean_q(obs, action), q, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ the command line
SMALL = ("--pairs", "6", "--chosen", "3", "--continuations", "2", "--max-steps", "30")


def rows_of(run) -> list[dict[str, str]]:
    """The rows of bias.csv."""
    path = run / "bias.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def measure_apart(folder, run, *arguments, code=0):
    """value_bias.py in a process of its own, with a worker: its output and the rows of bias.csv."""
    command = [sys.executable, str(ROOT / "benchmark/value_bias.py"), str(run), "--workers", "1", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr, rows_of(run)


@pytest.fixture
def measure(monkeypatch, capsys):
    """measure(run, *arguments): the same in this process, without a worker."""

    def run(path, *arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["value_bias.py", str(path), *arguments])
        monkeypatch.setattr(value_bias, "ProcessPoolExecutor", lambda *arguments: rac_sac.InThisProcess())
        capsys.readouterr()
        try:
            value_bias.main()
            ended = 0
        except SystemExit as error:
            ended = error.code
        out, err = capsys.readouterr()
        assert ended == code, err
        return out + err, rows_of(path)

    return run


def test_bias_of_a_run(cli, measure, tmp_path):
    """A row for each snapshot with an evaluation; the same command measures only what is new, other sizes begin anew."""
    run = cli.train("run", "--total-timesteps", "300", "--snapshot-frequency", "100")
    _, rows = measure_apart(tmp_path, run, *SMALL)
    assert [row["global_step"] for row in rows] == ["200", "300"]
    assert all(np.isfinite(float(row[name])) for row in rows for name in ("eval/bias_mean", "eval/bias_std"))
    assert [row["max_steps"] for row in rows] == ["30", "30"]
    assert job.unmeasured(run) == {200, 300}  # a grid measures at the paper's sizes
    text = (run / "bias.csv").read_text()
    (run / "bias.csv").write_text(text.replace(",6,3,2,30\n", ",100,20,20,1500\n", 1))
    assert job.unmeasured(run) == {300}
    (run / "bias.csv").write_text(text)
    with open(run / "eval.csv") as file:
        assert [row["eval/best_beta"] for row in csv.DictReader(file)] == [row["eval/best_beta"] for row in rows]
    lines = (run / "bias.csv").read_text().splitlines(keepends=True)
    (run / "bias.csv").write_text("".join(lines[:2]).replace(rows[0]["eval/bias_mean"], "7.5"))
    _, again = measure(run, *SMALL)
    assert again[0]["eval/bias_mean"] == "7.5" and again[1] == rows[1]
    (run / "snapshots/step-300.pt").unlink()
    _, others = measure(run, *SMALL[:-1], "29")
    assert [row["global_step"] for row in others] == ["200"] and others[0]["max_steps"] == "29"


def test_what_cannot_be_measured_does_not_stop_the_rest(cli, measure, monkeypatch):
    """It is named, and measured once it is mended."""
    run = cli.train("run", "--total-timesteps", "300", "--snapshot-frequency", "100")
    broken = run / "snapshots/step-200.pt"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:1000])
    said, rows = measure(run, *SMALL, code=2)
    assert [row["global_step"] for row in rows] == ["300"]
    assert f"error: {broken} cannot be measured: {broken} is damaged" in said
    assert "step      300: bias" in said
    broken.write_bytes(whole)

    def refuse(*arguments):
        raise ValueError("no such environment")

    with monkeypatch.context() as patch:
        patch.setattr(value_bias, "measure", refuse)
        said, rows_now = measure(run, *SMALL[:-1], "29", code=2)
    first = run / "snapshots/step-200.pt"
    assert said.splitlines()[-1] == f"error: {first} and 1 more cannot be measured: no such environment"
    assert rows_now == []
    next(run.glob("bias-before-*.csv")).rename(run / "bias.csv")
    _, again = measure(run, *SMALL)
    assert [row["global_step"] for row in again] == ["200", "300"]
    assert again[1] == rows[0]


def test_modules_of_the_kept_script(cli, measure, tmp_path):
    """They may lie beside the project's scripts; one that is nowhere is named."""
    run = cli.train("run", "--total-timesteps", "205", "--snapshot-frequency", "200")
    kept = run / "rac_sac.py"
    source = kept.read_text()
    kept.write_text(source.replace("import tyro\n", "import rac_td3\nimport tyro\n", 1))
    assert len(measure_apart(tmp_path, run, *SMALL)[1]) == 1
    kept.write_text(source.replace("import tyro\n", "import my_networks\nimport tyro\n", 1))
    (run / "bias.csv").unlink()
    value_bias.load_script.cache_clear()
    error, _ = measure(run, *SMALL, code=2)
    assert error == f"error: {kept} cannot be loaded: No module named 'my_networks'.\n"


def test_continuations_have_no_time_limit(cli, monkeypatch):
    """Pendulum-v1 is cut off after 200 steps, of which its physics knows nothing."""
    run = cli.train("run", "--snapshot-frequency", "100", "--eval-episodes", "1", env_id="Pendulum-v1")
    measured_in = []
    monkeypatch.setattr(value_bias, "measure", lambda *arguments, **options: measured_in.append(arguments) or (0.0, 0.0))
    row = value_bias.measure_snapshot(ROOT / "rac_sac.py", run / "snapshots/step-500.pt", 0.8, value_bias.Sizes())
    assert {name: row[name] for name in job.BIAS_SIZES} == PAPER
    ((_, env, endless_envs, *_),) = measured_in
    assert len(endless_envs) == 20
    for limited, played in ((True, env), (False, endless_envs[0])):
        played.reset(seed=0)
        cut = [played.step(np.zeros(1, np.float32))[3] for _ in range(200)]
        assert cut == [False] * 199 + [limited]


def test_what_cannot_be_measured(cli, measure, tmp_path):
    run = cli.train("run", "--total-timesteps", "205")
    assert "has no snapshots" in measure(run, code=2)[0]
    assert "has no readable config.json" in measure(tmp_path, code=2)[0]
    assert "chosen is 9" in measure(run, "--pairs", "6", "--chosen", "9", code=2)[0]
    assert "workers is -1" in measure(run, "--workers", "-1", code=2)[0]
    assert "max_steps is 0" in measure(run, "--max-steps", "0", code=2)[0]
