"""benchmark/run.py: what the paper's experiments are, and what a grid does on a real Ray with real scripts when things die."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, child_environ, last_step, load_script, wait_until

sys.path.insert(0, str(ROOT / "benchmark"))
import run as grid

pytestmark = pytest.mark.benchmark
ONE_VARIANT = ["--experiment", "smoke", "--env-ids", "InvertedPendulum-v4", "--variants", "smoke_rac_sac"]
RUN_NAME = "InvertedPendulum-v4__smoke_rac_sac__{}"


@pytest.fixture
def run_grid(tmp_path, monkeypatch, capsys):
    """run.py in this process: run_grid(*arguments) -> exit code or sentence, stdout."""

    def caller(*arguments: str) -> tuple[int | str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        code = 0
        try:
            grid.main()
        except SystemExit as end:
            code = end.code  # the sentence of a mistake
        return code, capsys.readouterr().out

    return caller


# What is run ------------------------------------------------------------------------------------------------------------------
def parsed(run_grid, *arguments: str) -> list:
    """The arguments of each command that --dry-run prints, as the script itself reads them."""
    code, out = run_grid("--dry-run", *arguments)
    assert code == 0
    commands = [shlex.split(line) for line in out.splitlines()]
    scripts = [load_script(Path(words[1])) for words in commands]
    return [script.tyro.cli(script.Args, args=words[2:]) for script, words in zip(scripts, commands, strict=True)]


@pytest.mark.parametrize(
    ("sweep", "variant", "argument", "values"),
    [  # of the paper
        ("utd", "rac_sac", "utd", [1, 5, 10, 20]),
        ("ensemble", "rac_sac", "num_critics", [2, 3, 5, 8, 10]),
        ("training", "rac_sac", "train_beta_max", [0.4, 0.6, 0.8, 1.0, 1.2]),
        ("exploration", "rac_sac", "explore_beta_max", [0.2, 0.3, 0.4, 0.6, 0.8]),
        ("capacity", "rac_sac", "buffer_size", [50_000, 100_000, 200_000, 300_000, 1_000_000]),
        ("temperature", "rac_sac", "initial_log_alpha", [-5, -2, 0]),
        ("temperature_network", "rac_sac", "temperature_network", [False, True]),
        ("warmup", "rac_sac", "q_lr_init", [3e-5, 3e-4]),
        ("vanilla_beta", "vanilla_rac", "beta", [0.2, 0.3, 0.4, 0.6, 0.8]),
        ("itm_training", "rac_itm", "train_k_max", [2, 2.5, 3, 4]),
        ("itm_exploration", "rac_itm", "explore_k_max", [1.25, 1.5, 1.75, 2]),
    ],
)
def test_a_sweep_varies_one_argument(run_grid, sweep, variant, argument, values):
    runs = parsed(run_grid, "--experiment", sweep, "--seeds", "2")
    assert len({args.run_name for args in runs}) == len(runs) == 4 * len(values)
    for env_id in ("Walker2d-v4", "Humanoid-v4"):
        here = [args for args in runs if args.env_id == env_id and args.seed == 1]
        assert sorted(getattr(args, argument) for args in here) == values
        assert sum(args.exp_name == variant for args in here) == 1  # shared with main


def test_main_is_the_comparison_of_the_paper(run_grid):
    runs = {args.run_name: args for args in parsed(run_grid, "--experiment", "main")}
    assert len(runs) == 320
    redq = runs["Ant-v4__redq__3"]
    assert (redq.target_rule, redq.min_size, redq.q_lr_init, redq.initial_log_alpha) == ("in-target-min", 2, 3e-4, 0)
    entropies = [runs[f"{name}-v4__redq__1"].target_entropy for name in ("Hopper", "Walker2d", "Ant", "Humanoid")]
    assert entropies == [-1, -3, -4, -2]
    assert runs["Hopper-v4__rac_sac__1"].snapshot_frequency == 50_000
    assert runs["Humanoid-v4__tqc20__8"].total_timesteps == 1_000_000


def test_simba(run_grid):
    """RAC-SAC and REDQ with the same networks at the same cost, to 100,000 steps."""
    runs = {args.run_name: args for args in parsed(run_grid, *"--experiment simba --seeds 1 --first-seed 2".split())}
    environments = ("Hopper-v4", "Walker2d-v4", "Ant-v4", "Humanoid-v4")
    assert {*runs} == {f"{env_id}__simba_{name}__2" for env_id in environments for name in ("rac_sac", "redq")}
    for args in runs.values():
        assert (args.network, args.utd, args.num_critics) == ("simba", 5, 5)
        assert (args.eval_frequency, args.total_timesteps) == (5000, 100_000)
    redq = runs["Walker2d-v4__simba_redq__2"]
    assert (redq.target_rule, redq.target_entropy, redq.initial_log_alpha) == ("in-target-min", -3, 0)


def test_own_scripts_and_what_follows_a_lone_dash(run_grid, tmp_path):
    """Arguments that change what is learned are in the name; of a run's cores half evaluate."""
    (tmp_path / "my_rac.py").write_text((ROOT / "rac_sac.py").read_text())
    arguments = "--scripts my_rac.py --env-ids Hopper-v4 Ant-v5 --seeds 1 --first-seed 4 --cpus-per-run 4 -- --utd 5 --track"
    hopper, ant = parsed(run_grid, *arguments.split())
    assert (hopper.run_name, ant.run_name) == ("Hopper-v4__my_rac+utd_5__4", "Ant-v5__my_rac+utd_5__4")
    assert (ant.utd, ant.track, ant.eval_workers) == (5, True, 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--scripts missing.py", "give --experiment, or --scripts with --env-ids"),
        ("--scripts missing.py --env-ids Hopper-v4", "there is no script missing.py"),
        ("--experiment smoke --variants sac", "smoke has no variant sac; it has smoke_rac_sac, "),
        ("--experiment smoke -- --seed 3", "every run has its own seed; what sets it is given before --"),
        ("--experiment smoke --seeds 1 --run-root other", "was made with utd 7, not 1; choose another --run-root"),
    ],
)
def test_mistakes(run_grid, tmp_path, arguments, sentence):
    run_dir = tmp_path / "other" / RUN_NAME.format(1)
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps({"args": {"utd": 7}}))
    error, _ = run_grid(*arguments.split())
    assert error.startswith("error: ")
    assert sentence in error


def test_the_published_quick_runs_are_those_that_are_planned(run_grid):
    """They differ in nothing, where 0.0003 is 3e-4, and only what is missing is due."""
    results = f"{ROOT}/benchmark/results/quick"
    plan = "--experiment quick --seeds 3 --dry-run".split()
    _, planned = run_grid(*plan)
    assert planned.count("--utd 5 --num-critics 5 --eval-frequency 5000") == 18
    code, due = run_grid(*plan, "--run-root", results)
    assert code == 0
    assert due.count("\n") == 18 - len(os.listdir(results))


# A real Ray ---------------------------------------------------------------------------------------------------------------------
def start(folder: Path, *arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "benchmark/run.py"), *arguments]
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=child_environ(HOME=str(folder)), start_new_session=True, **options)


def finish(folder: Path, *arguments: str, code: int = 0) -> str:
    process = start(folder, *arguments)
    _, err = process.communicate(timeout=500)
    assert process.returncode == code, err
    return err


def processes_of(folder: Path, *words: str) -> list[int]:
    """The living processes that a driver of this folder has started, whose command line has all words."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, variables, stat = ((path / name).read_text(errors="replace") for name in ("cmdline", "environ", "stat"))
        except OSError:
            continue
        if f"HOME={folder}\0" in variables and all(word in command for word in words) and ") Z " not in stat:
            found.append(int(path.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


TWO_LONG_RUNS = ["--seeds", "2", "--total-timesteps", "2000", "--", "--checkpoint-seconds", "0.3", "--snapshot-frequency", "0"]


@pytest.mark.slow
def test_what_dies_goes_on_and_what_is_stopped_too(tmp_path):
    """A killed script and a killed Ray worker are retried, Ctrl-C leaves checkpoints and no process, the same command goes on."""
    process = start(tmp_path, *ONE_VARIANT, *TWO_LONG_RUNS)

    def kill_and_see_it_go_on(seed: int) -> Path:
        run_dir = tmp_path / "runs" / RUN_NAME.format(seed)
        wait_until(lambda: last_step(run_dir / "train.csv") > 300)
        script = min(processes_of(tmp_path, "rac_sac.py", run_dir.name, "run-name"))
        os.kill(script if seed == 1 else parent(script), signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{script}").exists(), 60)
        wait_until(lambda: processes_of(tmp_path, "rac_sac.py", "--resume", run_dir.name))
        return run_dir

    run_dirs = [kill_and_see_it_go_on(seed) for seed in (1, 2)]
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "the same command goes on" in err
    wait_until(lambda: not processes_of(tmp_path), 60)
    assert all(last_step(run_dir / "eval.csv") < 2000 for run_dir in run_dirs)

    finish(tmp_path, *ONE_VARIANT, *TWO_LONG_RUNS)
    assert all(last_step(run_dir / "evaluate.csv") == 2000 for run_dir in run_dirs)
    err = finish(tmp_path, *ONE_VARIANT, *TWO_LONG_RUNS)
    assert err == ""  # nothing is left to do


@pytest.mark.slow
def test_a_finished_grid_is_prolonged_and_wrong_arguments_are_not_retried(tmp_path):
    rest = ["--seeds", "1", "--", "--snapshot-frequency", "0"]
    finish(tmp_path, *ONE_VARIANT, *rest)
    run_dir = tmp_path / "runs" / RUN_NAME.format(1)
    assert last_step(run_dir / "eval.csv") == 500
    assert last_step(run_dir / "evaluate.csv") == 500
    finish(tmp_path, *ONE_VARIANT, "--total-timesteps", "700", *rest)
    assert last_step(run_dir / "eval.csv") == 700
    assert last_step(run_dir / "evaluate.csv") == 700
    err = finish(tmp_path, *ONE_VARIANT, *rest, "--gamma", "-1", code=1)
    log = tmp_path / "runs/InvertedPendulum-v4__smoke_rac_sac+gamma_-1__1.log"
    assert "exit code 2" in err
    assert str(log) in err
    assert log.read_text().count("$ python") == 1


@pytest.mark.slow
def test_sigterm(tmp_path):
    # In a shell's background, where SIGINT is ignored
    process = start(tmp_path, *ONE_VARIANT, *TWO_LONG_RUNS, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    wait_until(lambda: last_step(tmp_path / "runs" / RUN_NAME.format(1) / "train.csv") > 300)
    process.terminate()
    process.communicate(timeout=200)
    assert process.returncode == 130
    assert "stopped at step" in (tmp_path / f"runs/{RUN_NAME.format(1)}.log").read_text()
    wait_until(lambda: not processes_of(tmp_path), 60)
