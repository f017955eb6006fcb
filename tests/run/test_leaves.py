"""What a run leaves behind: its directory, its rows, what it says, and that all of it follows from the seed."""

import hashlib
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    CONDITIONS,
    ROOT,
    assert_same_run,
    checkpoint_of,
    every_script,
    messages,
    read_rows,
    slow_but,
    without_wall_clock,
)
from toy_envs import Start

import rac_sac

EVALUATED = {
    "rac_sac": ("0.266667", "0.533333", "0.8"),
    "rac_td3": ("0.266667", "0.533333", "0.8"),
    "vanilla_rac": ("0.3",),
    "rac_itm": ("1.33333", "1.66667", "2"),
}


def copy_of_script(cli, name: str) -> Path:
    """The script as a fork in a folder of its own, which the command line then calls."""
    cli.script = cli.folder / "fork" / name
    cli.script.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "rac_sac.py", cli.script)
    return cli.script


@pytest.fixture
def finished(cli, toy):
    """(run directory, stdout, stderr) of a brief run, in which policies have different returns."""
    env_id = toy(low=(-1, -1), high=(1, 1), change=lambda env: {"reward": float(env.action[0])})
    result = cli.call("--env-id", env_id, *cli.brief)
    return cli.run_dir, result.stdout, result.stderr


# ---------------------------------------------------------------------------------------------------------- the directory
def test_the_default_name(whole):
    """Environment, script, seed, time."""
    assert re.fullmatch(r"Hopper-v4__rac_sac__1__\d{10}", whole[0].name)


@every_script
def test_files(cli, finished):
    run_dir, _, _ = finished
    files = {"config.json", "eval.csv", "train.csv", "checkpoint.pt", "policy.pt", "best_policy.pt", f"{cli.name}.py"}
    assert {path.name for path in run_dir.iterdir()} - {".lock"} == files


@every_script
def test_config(cli, finished):
    """All arguments with the defaults of the environment, the versions, and the script that lies beside it."""
    run_dir, _, _ = finished
    module = importlib.import_module(cli.name)
    config = json.loads((run_dir / "config.json").read_text())
    assert config["args"].keys() == {field.name for field in module.dataclasses.fields(module.Args)}
    assert config["args"]["env_id"] == "Toy0-v0"
    assert config["args"].get("target_entropy", -2) == -2
    assert config["versions"]["torch"] == torch.__version__
    assert config["script"] == cli.name
    kept = (run_dir / f"{cli.name}.py").read_bytes()
    assert kept == (ROOT / f"{cli.name}.py").read_bytes()
    assert config["script_sha256"] == hashlib.sha256(kept).hexdigest()


def test_the_commit_of_a_fork(cli, toy):
    """A copy that is not committed is in no commit; once it is, that commit is named, and its changes are."""
    script = copy_of_script(cli, "my_rac.py")
    options = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    git = ["git", "-C", str(script.parent), *options]

    def commit_in_config(name: str) -> str | None:
        cli.call("--env-id", toy(), *cli.brief, "--run-name", name)
        return json.loads((cli.folder / "runs" / name / "config.json").read_text())["git_commit"]

    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "without the copy"], check=True)
    assert commit_in_config("uncommitted") is None
    subprocess.run([*git, "add", script.name], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "with the copy"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert commit_in_config("committed") == head
    script.write_text(script.read_text() + "\n# changed\n")
    assert commit_in_config("changed") == f"{head}-dirty"


@pytest.mark.parametrize("every,steps", [("10", [40, 50, 60]), ("20", [40, 60]), ("0", [])])
def test_snapshots(cli, toy, every, steps):
    """Written when they are due, with what the value bias is measured from."""
    cli.call("--env-id", toy(), *cli.brief, "--snapshot-frequency", every)
    snapshots = {path.name: torch.load(path, weights_only=True) for path in (cli.run_dir / "snapshots").glob("*")}
    assert snapshots.keys() == {f"step-{step}.pt" for step in steps}
    rows = {int(row["global_step"]): row for row in read_rows(cli.run_dir / "eval.csv")}
    for step in steps:
        content = snapshots[f"step-{step}.pt"]
        assert content["step"] == step
        assert content["alphas"] == [float(rows[step][f"eval/alpha_{beta}"]) for beta in EVALUATED["rac_sac"]]
        for name in ("actor", "critic"):
            network = rac_sac.make_network(name, rac_sac.Args(**content["args"]), content["obs_dim"], 1)
            network.load_state_dict(content[name])
    if steps:
        policy = torch.load(cli.run_dir / "policy.pt", weights_only=True)
        assert all(torch.equal(value, snapshots["step-60.pt"]["actor"][name]) for name, value in policy["actor"].items())


@every_script
def test_snapshots_of_every_script(cli, toy):
    cli.call("--env-id", toy(), *cli.brief, "--snapshot-frequency", "20")
    content = torch.load(cli.run_dir / "snapshots" / "step-60.pt", weights_only=True)
    assert len(content["alphas"]) == (0 if cli.name == "rac_td3" else len(EVALUATED[cli.name]))
    assert content.keys() >= {"script", "format", "args", "bounds", "step", "actor", "critic"}


# --------------------------------------------------------------------------------------------------------------- the rows
@every_script
def test_rows_of_evaluations(cli, finished):
    """From the end of the random start on; the best policy's return is the performance."""
    run_dir, _, _ = finished
    rows = read_rows(run_dir / "eval.csv")
    assert [int(row["global_step"]) for row in rows] == [40, 50, 60]
    for row in rows:
        returns = {name.removeprefix("eval/return_"): float(row[name]) for name in row if name.startswith("eval/return_")}
        assert tuple(returns) == EVALUATED[cli.name]
        best = max(returns, key=returns.get)
        assert float(row["eval/best_return"]) == returns[best]
        assert float(row["eval/best_return_std"]) >= 0
        assert float(row[f"eval/best_{CONDITIONS[cli.name]}"]) == pytest.approx(float(best), rel=1e-5)
        alphas = [float(row[name]) for name in row if name.startswith("eval/alpha_")]
        assert len(alphas) == (0 if cli.name == "rac_td3" else len(returns))
        assert all(alpha > 0 for alpha in alphas)


@every_script
def test_rows_of_training(cli, finished):
    """At the end of every episode and of the run; losses once learning has begun."""
    module = importlib.import_module(cli.name)
    run_dir, _, _ = finished
    rows = read_rows(run_dir / "train.csv")
    assert int(rows[-1]["global_step"]) == 60
    for row in rows:
        losses = [row[f"losses/{name}"] for name in module.METRICS]
        learned = int(row["global_step"]) > 40
        assert all(np.isfinite(float(loss)) if learned else loss == "" for loss in losses)
        assert float(row["charts/SPS"]) > 0
    ended = [row for row in rows if row["charts/episodic_length"]]
    assert [int(row["global_step"]) for row in ended] == [*range(7, 60, 7)]
    assert {row["charts/episodic_length"] for row in ended} == {"7"}
    rewards = checkpoint_of(run_dir)["replay"][:, 1 + 2].numpy()  # after observation and action
    returns = [rewards[step - 7 : step].sum() for step in range(7, 60, 7)]
    np.testing.assert_allclose([float(row["charts/episodic_return"]) for row in ended], returns, rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.3, 0.0])
def test_a_fixed_temperature(cli, toy, alpha):
    """A row of train.csv has averages over its environment steps: that of a constant is the constant."""
    cli.call("--env-id", toy(), *cli.brief, "--no-autotune", "--alpha", str(alpha))
    learned = [row for row in read_rows(cli.run_dir / "train.csv") if row["losses/alpha"]]
    assert len(learned) > 1
    assert all(float(row["losses/alpha"]) == pytest.approx(alpha, rel=1e-5, abs=1e-30) for row in learned)
    last = read_rows(cli.run_dir / "eval.csv")[-1]
    assert all(float(last[name]) == pytest.approx(alpha, rel=1e-5, abs=1e-30) for name in last if name.startswith("eval/alpha_"))


def test_a_temperature_without_a_network(cli, toy):
    """One scalar, the same for all betas, which has learned."""
    cli.call("--env-id", toy(), *cli.brief, "--no-temperature-network", "--initial-log-alpha", "-2")
    last = read_rows(cli.run_dir / "eval.csv")[-1]
    (alpha,) = {float(last[name]) for name in last if name.startswith("eval/alpha_")}
    assert 0 < abs(np.log(alpha) + 2) < 0.1


def test_a_row_every_thousand_steps(cli, toy):
    """Of an episode that does not end; and a last one."""
    steps = (
        "--total-timesteps 1010 --learning-starts 1005 --q-lr-warmup-end 1005 --buffer-size 1010 --eval-frequency 1000".split()
    )
    few = ("--num-eval-policies", "1", "--eval-episodes", "1")
    cli.call("--env-id", toy(length=1100), *cli.brief, *steps, *few)
    assert [row["global_step"] for row in read_rows(cli.run_dir / "train.csv")] == ["1000", "1010"]


def test_times(cli, toy):
    """Wall seconds go on where a run is resumed, without the time between; SPS is steps by seconds."""
    now = [1000.0]
    cli.monkeypatch.setattr(rac_sac.time, "time", lambda: now[0])

    def clock(env):
        if env.number in (0, 3):  # a step of training, before and after resuming, takes half a second
            now[0] += 0.5

    cli.call("--env-id", toy(change=clock), *cli.brief)
    now[0] += 500
    cli.call("--resume", cli.run_dir, "--total-timesteps", "70")
    for row in (*read_rows(cli.run_dir / "eval.csv"), *read_rows(cli.run_dir / "train.csv")):
        step = int(row["global_step"])
        repeated = 60 % 7 if step > 60 else 0  # steps of the episode that was cut
        assert float(row["charts/wall_seconds"]) == pytest.approx((step + repeated) / 2)
    assert [row["charts/SPS"] for row in read_rows(cli.run_dir / "train.csv")][:9] == ["2.0"] * 9


def test_line_ends(finished):
    run_dir, _, _ = finished
    for name in ("eval.csv", "train.csv"):
        assert b"\r" not in (run_dir / name).read_bytes()


def test_returns_are_those_of_the_seeds(cli, toy):
    """Every policy plays from the same initial states, which follow from the seed."""
    cli.call("--env-id", toy(Start), *cli.brief, "--seed", "5")
    expected = starts_of(rac_sac.seeds_for(5, 0, 0, 2)).mean()
    for row in read_rows(cli.run_dir / "eval.csv"):
        for beta in EVALUATED["rac_sac"]:
            assert float(row[f"eval/return_{beta}"]) == pytest.approx(expected)


class Scaled(Start):
    """Rewards the action, times what the reset has drawn from its seed."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward * float(action[0]), *rest


def starts_of(seeds: list[int]) -> np.ndarray:
    return np.array([np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).random() for seed in seeds])


def test_mean_and_std_over_episodes(cli, toy):
    """Of the best policy in eval.csv, of every policy in evaluate.csv, which plays others; the population's std."""
    cli.call("--env-id", toy(Scaled), *cli.brief, "--eval-episodes", "4")
    cli.call("--evaluate", cli.run_dir)
    policy = rac_sac.load_policy(cli.run_dir)
    last = read_rows(cli.run_dir / "eval.csv")[-1]
    actions = np.array([float(policy(np.zeros(1), beta)[0]) for beta in policy.betas])
    best = actions.argmax()
    assert np.ptp(actions) > 1e-3
    assert best > 0  # the first one would be found by chance
    returns = starts_of(rac_sac.seeds_for(1, 0, 0, 4)) * actions[best]
    assert float(last["eval/best_return"]) == pytest.approx(returns.mean(), rel=1e-5)
    assert float(last["eval/best_return_std"]) == pytest.approx(returns.std(), rel=1e-5)
    fresh = starts_of(rac_sac.seeds_for(1, 1, 0, 4))
    for row, action in zip(read_rows(cli.run_dir / "evaluate.csv"), actions, strict=True):
        assert float(row["return"]) == pytest.approx(fresh.mean() * action, rel=1e-5)
        assert float(row["return_std"]) == pytest.approx(fresh.std() * abs(action), rel=1e-5)


# -------------------------------------------------------------------------------------------------------- what it says
@every_script
def test_the_screen(cli, finished):
    """Of a good run only the bar, and at its end what it has come to."""
    run_dir, stdout, stderr = finished
    assert messages(stderr) == []
    rows = read_rows(run_dir / "eval.csv")
    best = max(rows, key=lambda row: float(row["eval/best_return"]))
    first, *lines, play_last, play_best = stdout.splitlines()
    assert f"{Path('runs', run_dir.name)}, 60 steps" in first
    for title, row, line in zip(("last", "best"), (rows[-1], best), lines, strict=True):
        mean, std = float(row["eval/best_return"]), float(row["eval/best_return_std"])
        assert line.startswith(f"{title} evaluation: return {mean:.1f} ± {std:.1f} at {CONDITIONS[cli.name]}")
        assert line.endswith(f"step {row['global_step']}")
    assert re.search(rf"python \S*{cli.name}.py --evaluate runs/{run_dir.name}$", play_last)
    assert play_best.endswith(f"{play_last.split(': ')[1]}/best_policy.pt")


def test_the_bar(whole):
    """Steps, steps per second, evaluation and time left; in the random start no time left, of which random steps say nothing."""
    run_dir, _, stderr = whole
    assert stderr.count(f"run directory: runs/{run_dir.name}\n") == 1
    bars = [part for part in stderr.replace("\r", "\n").splitlines() if "step/s" in part]
    assert "500/500" in bars[-1]
    assert "evaluated" in bars[-1]
    assert "<" in bars[-1]
    assert not any("<" in bar for bar in bars if re.search(r"\b(\d|1?\d\d)/500", bar))
    assert stderr.endswith("\n")


@every_script
def test_help_explains_every_argument(cli):
    cli.monkeypatch.setenv("COLUMNS", "120")
    module = importlib.import_module(cli.name)
    text = cli.call("--help").stdout
    fields = module.dataclasses.fields(module.Args)
    source = (ROOT / f"{cli.name}.py").read_text()
    arguments = source[source.index("class Args") : source.index("# The method")]
    comments = re.findall(r"^    \w+: .+  # (.+)$", arguments, re.M)
    assert len(comments) == len(fields)
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    for field, comment in zip(fields, comments, strict=True):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert " ".join(comment.split()) in shown


# ------------------------------------------------------------------------------------------------------------- as a module
@pytest.mark.parametrize(
    "env_id,steps,capacity",
    [
        ("Humanoid-v5", 1_000_000, 300_000),
        ("Walker2d-v4", 300_000, 100_000),
        ("Ant-v5", 300_000, 200_000),
        ("some.module:Hopper-v4", 300_000, 1_000_000),
        ("Pendulum-v1", 300_000, 1_000_000),
    ],
)
def test_defaults_depend_on_the_environment(env_id, steps, capacity):
    args = rac_sac.check_args(rac_sac.Args(env_id=env_id))
    assert (args.total_timesteps, args.buffer_size) == (steps, capacity)
    given = rac_sac.check_args(rac_sac.Args(env_id=env_id, total_timesteps=7000, buffer_size=6000))
    assert (given.total_timesteps, given.buffer_size) == (7000, 6000)


@pytest.mark.parametrize("cores, workers, most", [(1, 1, 4), (8, 4, 32), (64, 12, 256)])
def test_number_of_evaluation_workers(monkeypatch, cores, workers, most):
    """Half the cores, up to 12; what is asked for, up to 4 a core."""
    monkeypatch.setattr(rac_sac.os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    assert rac_sac.check_args(rac_sac.Args()).eval_workers == workers
    assert rac_sac.check_args(rac_sac.Args(eval_workers=1000)).eval_workers == most
    assert rac_sac.check_args(rac_sac.Args(eval_workers=0)).eval_workers == 0


def test_settings_of_torch_follow_the_arguments(cli, toy):
    for arguments, precision, deterministic in (
        (("--matmul-precision", "high"), "high", True),
        (("--matmul-precision", "highest", "--no-torch-deterministic"), "highest", False),
    ):
        cli.call("--env-id", toy(), *cli.brief, *arguments, "--run-name", precision)
        assert torch.get_float32_matmul_precision() == precision
        assert torch.are_deterministic_algorithms_enabled() == deterministic


@pytest.mark.parametrize("exact,precision", [(True, "medium"), (False, "highest")])
def test_the_automatic_precision_is_exact(monkeypatch, capsys, exact, precision):
    """Medium is taken where it is float32, on CPUs without AMX; elsewhere a line says what it would be."""
    if not exact:
        monkeypatch.setattr(torch, "bmm", lambda a, b: (a.bfloat16().double() @ b.bfloat16().double()).float())
    else:
        monkeypatch.setattr(torch, "bmm", lambda a, b: (a.double() @ b.double()).float())
    rac_sac.set_up_torch(rac_sac.check_args(rac_sac.Args()), torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == precision
    assert ("--matmul-precision medium would be" in capsys.readouterr().err) == (not exact)


def test_the_warm_up_counts_the_steps_of_the_run(cli, toy):
    """After 60 environment steps it is half-way from step 40 to step 80."""
    cli.call("--env-id", toy(), *cli.brief, "--q-lr-warmup-end", "80")
    assert checkpoint_of(cli.run_dir)["tensors"]["q_lr"].item() == pytest.approx((3e-5 + 3e-4) / 2)


PROGRAM = """
import rac_sac
import numpy as np

if __name__ == "__main__":
    summary = rac_sac.train(rac_sac.tyro.cli(rac_sac.Args))
    policy = rac_sac.load_policy(summary["run_dir"])
    print(summary["completed"], summary["global_step"], summary["last"]["best_beta"] > 0)
    print(summary["resume"].split()[-2:], summary["evaluate"].split()[-2:])
    print(policy(np.ones(1)).shape, policy(np.zeros((5, 1)), beta=0.2).shape)
"""


def test_train_is_a_function_for_other_programs(cli):
    """Its workers import the program too; importing a script says and does nothing."""
    (cli.folder / "program.py").write_text(PROGRAM)
    env = {**cli.env, "PYTHONPATH": f"{ROOT}:{cli.env['PYTHONPATH']}"}
    command = [sys.executable, "program.py", "--env-id", "toy_envs:Truncating-v0", *cli.brief, "--eval-workers", "1"]
    result = subprocess.run(command, cwd=cli.folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert messages(result.stderr) == []
    done, commands, shapes = result.stdout.splitlines()
    assert done == "True 60 True"
    assert commands == "['--resume', 'runs/run'] ['--evaluate', 'runs/run']"
    assert shapes == "(1,) (5, 1)"


# ------------------------------------------------------------------------------------------------------------- the seed
@slow_but("rac_sac")
def test_the_same_seed_gives_the_same_run(cli, toy):
    env_id = toy(Start)
    runs = {}
    for name, seed in (("one", "1"), ("same", "1"), ("other", "2")):
        cli.call("--env-id", env_id, *cli.brief, "--run-name", name, "--seed", seed)
        runs[name] = cli.folder / "runs" / name
    assert_same_run(runs["one"], runs["same"])
    assert without_wall_clock(runs["one"] / "eval.csv") != without_wall_clock(runs["other"] / "eval.csv")
    assert not torch.equal(checkpoint_of(runs["one"])["replay"], checkpoint_of(runs["other"])["replay"])


@slow_but("rac_sac")
def test_workers_do_not_matter(cli):
    """Nor does the bar: two workers without one, or this process, give the same run."""
    arguments = ("--env-id", "Hopper-v4", *cli.brief, "--snapshot-frequency", "20")
    cli.call(*arguments)
    cli.env["TQDM_DISABLE"] = "1"
    cli.run(*arguments, "--run-name", "two", "--eval-workers", "2")
    assert_same_run(cli.run_dir, cli.folder / "runs/two")


def test_evaluation_in_this_process_starts_no_other(cli, toy):
    """--eval-workers 0 is for debuggers and for machines where processes are unwelcome."""
    cli.monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda self: pytest.fail("a process was started"))
    cli.call("--env-id", toy(), *cli.brief)
    cli.call("--evaluate", cli.run_dir)
