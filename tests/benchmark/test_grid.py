"""benchmark/run.py as users meet it: real Ray, real scripts, real kills."""

import dataclasses
import hashlib
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, environment, last_step, wait_until, without_wall_clock

sys.path.insert(0, str(ROOT / "benchmark"))
import experiments
import identity
import job
import run as grid


def needs_ray(test):
    return pytest.mark.benchmark(pytest.mark.usefixtures("ray_is_installed")(test))


ONE = "--experiment smoke --env-ids InvertedPendulum-v4 --variants smoke_rac_sac".split()
NAME = "InvertedPendulum-v4__smoke_rac_sac__{}"
LONG = "--total-timesteps 2000 -- --checkpoint-seconds 0.3 --snapshot-frequency 0".split()


@pytest.fixture
def ray_is_installed():
    pytest.importorskip("ray", reason="benchmark/requirements.txt is not installed")


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    env = environment(HOME=str(folder))
    env.pop("OMP_NUM_THREADS", None)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, str(ROOT / "benchmark/run.py"), *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, text=True, start_new_session=True, **pipes)


def run(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=500)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


@pytest.fixture
def call(monkeypatch, capsys):
    """run.py's main() in this process: call(folder, *arguments, code=0) -> stdout, stderr."""

    def caller(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["run.py", *arguments])
            ended = 0
            try:
                grid.main()
            except SystemExit as error:
                ended = error.code or 0
        out, err = capsys.readouterr()
        assert ended == code, f"exit code {ended}\n{out}\n{err}"
        return out, err

    return caller


def living(wanted) -> list[int]:
    """Process numbers for which wanted(command line, environment) is true, zombies aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = ((path / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ"))
            if wanted(command.replace("\0", " "), environment.split("\0")) and ") Z " not in (path / "stat").read_text():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def processes_of(folder: Path) -> list[int]:
    """Everything that a driver of this folder has started, and itself: Ray, scripts and their workers inherit HOME."""
    return living(lambda command, environment: f"HOME={folder}" in environment)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def scripts_of(folder: Path, seed: int) -> list[int]:
    name = NAME.format(seed)
    return living(lambda command, environment: "rac_sac.py" in command and name in command and f"HOME={folder}" in environment)


def reference(folder: Path, *arguments: str) -> Path:
    """The run of the first line of --dry-run's output, in a folder of its own and never disturbed."""
    end = arguments.index("--")
    out, _ = run(folder, *arguments[:end], "--dry-run", "--run-root", "undisturbed", *arguments[end:])
    python, *command = shlex.split(out.splitlines()[0])
    assert python == "python"
    subprocess.run([sys.executable, *command], cwd=folder, env=environment(OMP_NUM_THREADS="1"), check=True, capture_output=True)
    return folder / "undisturbed" / NAME.format(1)


SWEEPS = {  # spelled out once more, from the paper's list of sweeps
    "utd": ("rac_sac", "utd", [1, 5, 10, 20]),
    "ensemble": ("rac_sac", "num_critics", [2, 3, 5, 8, 10]),
    "training": ("rac_sac", "train_beta_max", [0.4, 0.6, 0.8, 1.0, 1.2]),
    "exploration": ("rac_sac", "explore_beta_max", [0.2, 0.3, 0.4, 0.6, 0.8]),
    "capacity": ("rac_sac", "buffer_size", [50_000, 100_000, 200_000, 300_000, 1_000_000]),
    "temperature": ("rac_sac", "initial_log_alpha", [-5, -2, 0]),
    "temperature_network": ("rac_sac", "temperature_network", [True, False]),
    "warmup": ("rac_sac", "q_lr_init", [3e-5, 3e-4]),
    "vanilla_beta": ("vanilla_rac", "beta", [0.2, 0.3, 0.4, 0.6, 0.8]),
    "itm_training": ("rac_itm", "train_k_max", [2, 2.5, 3, 4]),
    "itm_exploration": ("rac_itm", "explore_k_max", [1.25, 1.5, 1.75, 2]),
}
REDQ = {"target_rule": "in-target-min", "q_lr_init": 3e-4, "initial_log_alpha": 0}  # and min_size 2, the default
BASELINES = {"td3": {"algorithm": "td3"}, "tqc": {"algorithm": "tqc"}, "tqc20": {"algorithm": "tqc20", "utd": 20}}
MBPO = {"algorithm": "mbpo", "utd": 20}
ENTROPY = {"Humanoid-v4": -2, "Ant-v4": -4, "Walker2d-v4": -3, "Hopper-v4": -1}


@pytest.mark.benchmark
def test_every_experiment_is_what_the_paper_ran(tmp_path, monkeypatch, capsys):
    """Every command is read by the script itself; its settings are the defaults but for what the experiment varies."""
    pytest.importorskip("sb3_contrib", reason="benchmark/requirements.txt is not installed")
    everything = {}
    for experiment in experiments.EXPERIMENTS:
        monkeypatch.setattr(
            sys, "argv", ["run.py", "--experiment", experiment, "--seeds", "2", "--dry-run", "--run-root", str(tmp_path)]
        )
        with pytest.raises(SystemExit, match="0"):
            grid.main()
        changed = {}
        for line in capsys.readouterr().out.splitlines():
            words = shlex.split(line)
            module = importlib.import_module(Path(words[1]).stem)
            args = module.tyro.cli(module.Args, args=words[2:])
            assert everything.setdefault(args.run_name, line) == line, "one name, two commands"
            assert args.run_name == f"{args.env_id}__{args.exp_name}__{args.seed}" and args.seed in (1, 2)
            plain = module.check_args(module.Args(env_id=args.env_id))
            args, harmless = module.check_args(args), {"eval_workers", "snapshot_frequency", "cuda", *experiments.HOUSEKEEPING}
            settings = {key: value for key, value in vars(args).items() if key not in harmless and value != vars(plain)[key]}
            changed.setdefault((module.SCRIPT, args.env_id), []).append((args.exp_name, settings, args))
            # The name alone says the settings, which reports and repeated grids rely on.
            saved = {**vars(args), "target_entropy": getattr(args, "target_entropy", 0)}
            assert identity.deviations(saved, module.SCRIPT, args.exp_name, args.env_id) in ({}, {"target_entropy": None})
            if experiment != "smoke":
                assert args.total_timesteps == (1_000_000 if "Humanoid" in args.env_id else 300_000)
        if experiment in SWEEPS:
            script, field, values = SWEEPS[experiment]
            assert {key for key in changed} == {(script, env_id) for env_id in ("Walker2d-v4", "Humanoid-v4")}
            for runs in changed.values():
                assert sorted(getattr(args, field) for _, _, args in runs) == sorted(values * 2)
                assert all(
                    set(settings) <= {field} | ({"eval_beta_max"} if field == "train_beta_max" else {"eval_k_max"})
                    for _, settings, _ in runs
                )
        elif experiment in ("main", "variants"):
            assert {env_id for _, env_id in changed} == set(ENTROPY)
            for (script, env_id), runs in changed.items():
                for name, settings, _ in runs:
                    wanted = {"target_entropy": ENTROPY[env_id]} if experiment == "main" and script == "vanilla_rac" else {}
                    own = {"redq": REDQ, **BASELINES, "mbpo": {**MBPO, "termination": env_id.split("-")[0]}}
                    assert settings == {**wanted, **own.get(name, {})}
            names = {name for runs in changed.values() for name, *_ in runs}
            assert len(names) == (10 if experiment == "main" else 3)
            assert all(args.min_size == 2 for runs in changed.values() for name, _, args in runs if name == "redq")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--variants", "smoke_rac_sac", "sac"), "smoke has no variant sac; it has smoke_mbpo, smoke_rac_itm"),
        (("--gpus-per-run", "1.5"), "must be at most 1 or a whole number"),
        (("--", "--seed", "3"), "use --seeds and --first-seed"),
        (("--", "--track", "--total-timesteps=7"), "use --total-timesteps before --"),
        (("--", "track"), "'track' after -- belongs to no argument"),
        (("--run-root", "gpu"), "was made with cuda True, and this grid wants False"),
        (("--cpus-per-run", "0"), "cpus_per_run is 0; it must be at least 1"),
        (("--first-seed", "-3"), "first_seed is -3; it must be at least 0"),
        (("--gpus-per-run", "nan"), "gpus_per_run is nan; it must be at least 0"),
        (("--env-ids", "Hoper-v4"), "there is no environment 'Hoper-v4': "),
        (("--env-ids",), "env_ids was given without a value"),
        (("--variants",), "variants was given without a value"),
        (("--env-ids", ""), "there is no environment ''"),
        (("--", "--utd"), "utd after -- has no value"),
        (("--total-timesteps", "0"), "total_timesteps is 0"),
        (("--experiment", "utd", "--", "--utd", "5"), "utd after -- is what the runs of utd differ in"),
        (("--run-root", "other"), "was made with utd 7, and this grid wants 1"),
        (("--run-root", "file"), "run_root file is not a folder"),
        (("--run-root", "broken"), "has no readable config.json"),
        (("--", "--target-entropy", "1" * 200), "has more than 200 characters"),
        (("--scripts", "missing.py"), "missing.py cannot be read as a Python script: No such file or directory"),
        (("--scripts", "file"), "has no argument cuda, env_id, evaluate, resume, run_name, run_root, seed, total_timesteps"),
        (("--scripts", "broken.py"), "broken.py cannot be read as a Python script: expected ':'"),
    ],
)
def test_wrong_arguments(tmp_path, call, arguments, sentence):
    for root, content in (
        ("other", json.dumps({"script": "rac_sac", "args": {"utd": 7, "num_critics": 3}})),
        ("gpu", json.dumps({"script": "rac_sac", "args": {"cuda": True}})),
        ("broken", ""),
    ):
        (tmp_path / root / NAME.format(1)).mkdir(parents=True)
        (tmp_path / root / NAME.format(1) / "config.json").write_text(content)
        (tmp_path / root / NAME.format(1) / "checkpoint.pt").touch()
    (tmp_path / "file").touch()
    (tmp_path / "broken.py").write_text("class Args\n")
    out, err = call(tmp_path, *ONE, "--seeds", "1", *arguments, code=2)
    assert out == "" and err.startswith("error: ") and sentence in err and err.count("\n") == 1


def test_wrong_command_line(tmp_path):
    out, err = run(tmp_path, *ONE, "--total-timesteps", "0", code=2)
    assert out == "" and err.startswith("error: total_timesteps is 0") and err.count("\n") == 1


def test_names_and_warnings_of_a_dry_run(tmp_path, call):
    (tmp_path / "runs" / NAME.format(1)).mkdir(parents=True)
    config = {"script": "rac_sac", "args": {"total_timesteps": 9000}}
    (tmp_path / "runs" / NAME.format(1) / "config.json").write_text(json.dumps(config))
    (tmp_path / "runs" / NAME.format(1) / "checkpoint.pt").touch()
    out, err = call(tmp_path, *ONE, "--seeds", "1", "--dry-run")
    assert err.startswith("warning: ") and "keeps the total_timesteps (9,000) that it began with" in err
    assert out.endswith("--total-timesteps 9000\n")
    flags = [("--utd", "2"), ("--gamma", "1e+0"), ("--wandb-project-name", "my project")]
    outs = {call(tmp_path, *ONE, "--seeds", "1", "--dry-run", "--", *sum(order, ()))[0] for order in (flags, flags[::-1])}
    names = {word for out in outs for word in shlex.split(out) if word.startswith("InvertedPendulum-v4__")}
    assert names == {"InvertedPendulum-v4__smoke_rac_sac+gamma_1.0+utd_2__1"}  # the same settings, the same runs
    assert all("--wandb-project-name 'my project'" in out for out in outs)
    assert identity.deviations({"gamma": 1.0, "utd": 2}, "rac_sac", "smoke_rac_sac+gamma_1e+0+utd_2", "Ant-v4") == {}
    assert identity.label("smoke_rac_sac+gamma_1e+0") == "RAC-SAC (tiny, gamma 1e+0)"


def test_an_id_without_a_version_goes_on_with_its_run(tmp_path, call):
    """A script adds the newest version to it, and keeps that in config.json."""
    for env_id, code in (("InvertedPendulum-v5", 0), ("InvertedDoublePendulum-v5", 2)):
        run_dir = tmp_path / "runs" / NAME.format(1).replace("-v4", "")
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps({"script": "rac_sac", "args": {"env_id": env_id}}))
        arguments = (*ONE, "--env-ids", "InvertedPendulum", "--seeds", "1", "--dry-run")
        assert (f"with env_id {env_id}" in call(tmp_path, *arguments, code=code)[1]) == bool(code)


def test_evaluation_workers(tmp_path, call):
    """Half of a run's cores, or with a GPU all but one; at least one."""
    for flags, workers in ((("1",), 1), (("4",), 2), (("4", "--gpus-per-run", "0.25"), 3), (("1", "--gpus-per-run", "1"), 1)):
        out, _ = call(tmp_path, "--experiment", "main", "--seeds", "1", "--dry-run", "--cpus-per-run", *flags)
        assert f"--eval-workers {workers}\n" in out or f"--eval-workers {workers} " in out
        assert out.count("--eval-workers") == out.count(f"--eval-workers {workers}") > 0


def test_a_run_stays_on_its_device(tmp_path, call):
    """And on its threads, which are named where the grid has others; a finished run may be of any."""
    run_dir = tmp_path / "runs" / NAME.format(1)
    run_dir.mkdir(parents=True)
    for device, gpus, cpus, sentence in (
        ("x86_64, threads: 1", "1", "1", "was made with cuda False, and this grid wants True"),
        ("NVIDIA H200", "0", "1", "was made with cuda True, and this grid wants False"),
        ("NVIDIA H200", "0.5", "4", ""),
        ("x86_64, threads: 1", "0", "4", "keeps the 1 threads that it began with"),
        ("x86_64, threads: 4", "0", "4", ""),
    ):
        config = {"script": "rac_sac", "args": {"cuda": None}, "device": device}
        (run_dir / "config.json").write_text(json.dumps(config))
        arguments = (*ONE, "--seeds", "1", "--dry-run", "--gpus-per-run", gpus, "--cpus-per-run", cpus)
        _, err = call(tmp_path, *arguments, code=2 if "cuda" in sentence else 0)
        assert sentence in err and bool(err) == bool(sentence)
    for name in ("eval.csv", "evaluate.csv"):
        (run_dir / name).write_text("global_step\n500\n")
    (run_dir / "config.json").write_text(json.dumps({"script": "rac_sac", "args": {"cuda": True}, "device": "NVIDIA H200"}))
    assert call(tmp_path, *ONE, "--seeds", "1", "--dry-run") == ("# finished\n", "")


def test_evaluation_keeps_to_the_cores_of_its_run(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(job, "run_process", lambda command, job: commands.append(command) or 0)
    for settings in ({"eval_workers": "1"}, {}):
        job.run_programs(job.Job("run", str(tmp_path), "my_rac.py", [], settings, steps=1, cpus=3))
    evaluations = [command[2:] for command in commands if "--evaluate" in command]
    assert evaluations == [["--evaluate", str(tmp_path), "--eval-workers", "3"], ["--evaluate", str(tmp_path)]]


def test_a_run_without_snapshots_is_named(tmp_path, call):
    """Also where it is finished: nothing is left to measure its value bias from."""
    run_dir = tmp_path / "runs" / NAME.format(1)
    run_dir.mkdir(parents=True)
    for snapshots, warning in ((300, ""), (0, f"warning: {run_dir} was begun without snapshots")):
        (run_dir / "config.json").write_text(json.dumps({"script": "rac_sac", "args": {"snapshot_frequency": snapshots}}))
        for name in ("eval.csv", "evaluate.csv"):
            (run_dir / name).write_text("global_step\n500\n")
        out, err = call(tmp_path, *ONE, "--seeds", "1", "--dry-run")
        assert out == "# finished\n"
        assert err.startswith(warning) and bool(err) == bool(warning)


def test_programs_of_a_run_find_the_modules_beside_its_script(tmp_path):
    """The one that measures the value bias too, which lies elsewhere; and those of the project's folder."""
    (tmp_path / "my_networks.py").touch()
    wanted = job.Job("run", str(tmp_path / "run"), str(tmp_path / "my_rac.py"), [], {}, 1, 1)
    find = "import sys, importlib.util as util; sys.exit(not all(map(util.find_spec, ['my_networks', 'rac_sac'])))"
    assert job.run_process([sys.executable, "-P", "-c", find], wanted) == 0


def own_copy(path: Path, old: str, new: str) -> str:
    """An edited copy of rac_sac.py; returns its SHA-256."""
    source = (ROOT / "rac_sac.py").read_text()
    assert source.count(old) == 1
    path.parent.mkdir(exist_ok=True)
    path.write_text(source.replace(old, new))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_names_of_own_scripts(tmp_path, call):
    """The exp_name of the script, with its hash where another file has the same; beside an experiment or alone."""
    other = own_copy(tmp_path / "a/my_rac.py", "gamma: Share = 0.99", "gamma: Share = 0.9")
    own = own_copy(tmp_path / "my_rac.py", "total_timesteps: PositiveInt | None = None", "total_timesteps: PositiveInt = 7000")
    own_copy(tmp_path / "named.py", "exp_name: str = Path(__file__).stem", 'exp_name: str = "mine"')
    own_copy(tmp_path / "simple.py", "    capture_video: bool = False", "    video: bool = False")
    edited = own_copy(tmp_path / "rac_sac.py", "tau: Share = 0.005", "tau: Share = 0.01")

    def names(*arguments: str) -> dict[str, list[str]]:
        out, _ = call(tmp_path, "--seeds", "1", "--dry-run", *arguments)
        commands = [shlex.split(line) for line in out.splitlines()]
        return {words[words.index("--run-name") + 1]: words for words in commands}

    assert list(names("--scripts", "my_rac.py", "named.py")) == ["Hopper-v4__my_rac__1", "Hopper-v4__mine__1"]
    own_copy(tmp_path / "ant.py", 'env_id: str = "Hopper-v4"', 'env_id: str = "Ant-v4"')
    each = names("--scripts", "my_rac.py", "ant.py", "--", "--buffer-size=50_000", "--q-lr", "3e-4")  # in its own environment
    suffix = "+buffer_size_50000+q_lr_0.0003__1"  # however a number is written
    assert list(each) == [f"Hopper-v4__my_rac{suffix}", f"Ant-v4__ant{suffix}"]
    two = names("--scripts", "my_rac.py", "a/my_rac.py", "my_rac.py", "--env-ids", "Humanoid-v4", "--", "--utd", "5")
    assert list(two) == [f"Humanoid-v4__my_rac-{digest[:8]}+utd_5__1" for digest in (own, other)]
    steps = [words[words.index("--total-timesteps") + 1] for words in two.values()]
    assert steps == ["7000", "1000000"] and all(words[words.index("--utd") + 1] == "5" for words in two.values())
    beside = names(
        "--experiment",
        "variants",
        "--variants",
        "rac_sac",
        "--scripts",
        str(ROOT / "rac_sac.py"),
        "rac_sac.py",
        "--env-ids",
        "Hopper-v4",
    )
    assert list(beside) == ["Hopper-v4__rac_sac__1", f"Hopper-v4__rac_sac-{edited[:8]}__1"]  # the repository's own is the variant
    assert all(words[words.index("--snapshot-frequency") + 1] == "10000" for words in beside.values())
    alone = (
        "--experiment",
        "variants",
        "--variants",
        "vanilla_rac",
        "--scripts",
        str(ROOT / "rac_sac.py"),
        "--env-ids",
        "Ant-v4",
    )
    assert list(names(*alone)) == ["Ant-v4__vanilla_rac__1", "Ant-v4__rac_sac__1"]  # a variant's script that is not chosen
    simple = names("--scripts", "simple.py", "named.py", "--", "--capture-video")  # says how a run is done: not for all scripts
    assert ["--capture-video" in words for words in simple.values()] == [False, True]
    assert "give --experiment, which --variants belong to, or --scripts" in call(tmp_path, code=2)[1]


def test_an_argument_whose_default_is_an_expression(tmp_path, call):
    """It is one of the script's like any other: an experiment sets it, and so does what follows --."""
    own_copy(tmp_path / "my_rac.py", "batch_size: PositiveInt = 256", "batch_size: PositiveInt = 2**8")
    beside = ("--env-ids", "Hopper-v4", "--seeds", "1", "--dry-run", "--scripts", "my_rac.py")
    smoke = call(tmp_path, "--experiment", "smoke", "--variants", "smoke_rac_sac", *beside)[0].splitlines()
    assert [line.count("--batch-size 32") for line in smoke] == [1, 1]
    assert "--batch-size 64" in call(tmp_path, *beside, "--", "--batch-size", "64")[0]


def test_a_reader_that_has_read_enough(tmp_path):
    """`--dry-run | head` ends without a traceback."""
    process = start(tmp_path, "--experiment", "main", "--seeds", "200", "--dry-run")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(100) == 0 and process.stderr.read() == ""


@pytest.mark.parametrize(
    "body, stays_wrong, message",
    [
        ("print('error: no such thing'); sys.exit(2)", True, "exit code 2: error: no such thing"),
        (
            "run_dir.mkdir(); (run_dir / 'checkpoint.pt').touch(); print('error: it exists already'); sys.exit(2)",
            False,
            "it exists already",
        ),  # made by a dying process
        ("print('error: x is in use by another process.'); sys.exit(2)", False, "in use by another process"),
        ("raise ValueError('so it is')", False, "exit code 1: ValueError: so it is"),
        ("os.kill(os.getpid(), 9)", False, "killed by signal 9"),
        ("pass", False, "exit code 0, but the run is not finished"),
    ],
)
def test_how_an_attempt_ends(tmp_path, body, stays_wrong, message):
    """An attempt always ends, and says how; old messages in the log are not its own."""
    pytest.importorskip("filelock")
    run_dir, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(f"import os, pathlib, sys\nrun_dir = pathlib.Path({str(run_dir)!r})\n{body}\n")
    (tmp_path / "run.log").write_text("error: of an earlier attempt\n")
    wanted = job.Job(
        name="run",
        run_dir=str(run_dir),
        script=str(script),
        arguments=[],
        settings={},
        steps=5,
        cpus=1,
        sha256=hashlib.sha256(script.read_bytes()).hexdigest(),
        stop_file=str(tmp_path / "stop"),
    )
    if stays_wrong:
        assert job.run_job(wanted) == message
        changed = dataclasses.replace(wanted, sha256="another")
        assert "script.py has changed since this grid was started" in job.run_job(changed)
    else:  # what another attempt may mend is raised, and the driver hands it in again
        with pytest.raises(RuntimeError, match=message):
            job.run_job(wanted)


@needs_ray
def test_a_grid_of_tiny_runs(tmp_path):
    """Two runs to their end, each evaluated; the same command again does nothing; the report shows them."""
    command = (*ONE, "--seeds", "2", "--", "--snapshot-frequency", "0")
    out, _ = run(tmp_path, *command)
    assert all(f"done: {NAME.format(seed)}" in out for seed in (1, 2))
    assert "done 2 · running 0 · waiting 0 · failed 0 of 2 · 100.0%" in out
    assert not processes_of(tmp_path)
    folders = [tmp_path / "runs" / NAME.format(seed) for seed in (1, 2)]
    assert all((folder / "evaluate.csv").exists() for folder in folders)
    before = {path: path.stat().st_mtime_ns for folder in folders for path in folder.iterdir()}
    out, err = run(tmp_path, *command)
    assert "2 of 2 runs are finished already" in out and "done: " not in out and err == ""
    assert before == {path: path.stat().st_mtime_ns for folder in folders for path in folder.iterdir()}
    report = [sys.executable, str(ROOT / "benchmark/report.py"), "runs", "--bootstrap", "20"]
    result = subprocess.run(report, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "2 runs, 0 warnings" in result.stdout and "RAC-SAC (tiny)" in (tmp_path / "report/report.md").read_text()


@needs_ray
def test_a_grid_of_an_own_script(tmp_path):
    """Its runs are its own, finished ones are left alone, and another version of the file does not go on with them."""
    digest = own_copy(tmp_path / "my_rac.py", "gamma: Share = 0.99", "gamma: Share = 0.9")
    flags = experiments.TINY.replace("--total-timesteps 500 ", "").split()
    command = (
        "--scripts",
        "my_rac.py",
        "--env-ids",
        "InvertedPendulum-v4",
        "--seeds",
        "1",
        "--total-timesteps",
        "500",
        "--",
        *flags,
    )
    out, _ = run(tmp_path, *command)
    (run_dir,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert run_dir.name.startswith("InvertedPendulum-v4__my_rac+") and f"done: {run_dir.name}" in out
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["script"], config["script_sha256"], config["args"]["gamma"]) == ("my_rac", digest, 0.9)
    assert config["args"]["exp_name"] in run_dir.name and (run_dir / "evaluate.csv").exists()
    assert "1 of 1 runs are finished already" in run(tmp_path, *command)[0]
    own_copy(tmp_path / "my_rac.py", "gamma: Share = 0.99", "gamma: Share = 0.8")
    out, err = run(tmp_path, *command, code=2)
    assert out == "" and "was made with another my_rac.py than" in err and err.count("\n") == 1


@needs_ray
def test_impossible_resources(tmp_path):
    _, err = run(tmp_path, *ONE, "--seeds", "1", "--cpus-per-run", "4000", code=2)
    assert err.startswith("error: a run wants 4000 cores and 0 GPUs, and no node has them") and err.count("\n") == 1


@pytest.mark.slow
@needs_ray
def test_killed_script_and_killed_ray_worker_are_retried(tmp_path):
    """Both go on from their checkpoints, to the same numbers as an undisturbed run; the script dies with its worker."""
    process = start(tmp_path, *ONE, "--seeds", "2", *LONG)
    scripts = {
        seed: wait_until(
            lambda s=seed: last_step(tmp_path / "runs" / NAME.format(s) / "train.csv") > 300 and scripts_of(tmp_path, s)
        )
        for seed in (1, 2)
    }
    os.kill(scripts[1][0], signal.SIGKILL)
    os.kill(parent(scripts[2][0]), signal.SIGKILL)  # the Ray worker
    wait_until(lambda: not Path(f"/proc/{scripts[2][0]}").exists(), 60)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert re.search(rf"retry 1 of 3: {NAME.format(1)}: killed by signal 9", out)
    assert re.search(rf"retry 1 of 3: {NAME.format(2)}: .*Ray worker or node died", out)
    assert out.count("done: ") == 2 and "done 2 · running 0 · waiting 0 · failed 0 of 2 · 100.0%" in out
    undisturbed = reference(tmp_path, *ONE, "--seeds", "2", *LONG)
    for file in ("eval.csv", "train.csv"):
        assert without_wall_clock(tmp_path / "runs" / NAME.format(1) / file) == without_wall_clock(undisturbed / file)
    wait_until(lambda: not processes_of(tmp_path), 10)


@pytest.mark.slow
@needs_ray
def test_stopped_and_killed_driver_goes_on(tmp_path):
    """Ctrl-C and SIGKILL of the driver leave no process; the same command goes on, and does nothing when all is done."""
    command, run_dir = [*ONE, "--seeds", "1", *LONG], tmp_path / "runs" / NAME.format(1)
    process = start(tmp_path, *command)
    wait_until(lambda: last_step(run_dir / "train.csv") > 300)
    living = processes_of(tmp_path)
    assert len(living) > 5  # driver, Ray, script, evaluation worker
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130 and "stopping; every run writes its checkpoint" in out
    assert "interrupted; the same command again goes on" in err and "Traceback" not in err
    assert not processes_of(tmp_path)
    log = Path(f"{run_dir}.log").read_text()
    stopped = int(re.search(r"stopped at step (\d+); go on with", log)[1])  # the script's own last words

    process = start(tmp_path, *command)
    wait_until(lambda: last_step(run_dir / "train.csv") > stopped)
    process.kill()
    process.communicate()
    wait_until(lambda: not scripts_of(tmp_path, 1), 60)
    wait_until(lambda: not processes_of(tmp_path), 150)  # Ray's own agent sometimes waits a minute for its connections to end
    assert len(re.findall(r"stopped at step \d+; go on with", Path(f"{run_dir}.log").read_text())) == 2

    out, _ = run(tmp_path, *command)
    assert f"done: {NAME.format(1)}" in out
    before = {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    out, err = run(tmp_path, *command)
    assert "1 of 1 runs are finished already" in out and "done: " not in out and err == ""
    assert before == {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    assert (run_dir / "evaluate.csv").read_text().startswith("global_step,beta,return,return_std,best_in_training\n2000,")
    undisturbed = reference(tmp_path, *command)
    assert without_wall_clock(run_dir / "eval.csv") == without_wall_clock(undisturbed / "eval.csv")

    before = (run_dir / "evaluate.csv").read_text()
    (run_dir / "evaluate.csv").unlink()  # killed between training and evaluation
    run(tmp_path, *command)
    assert (run_dir / "evaluate.csv").read_text() == before
    report = [sys.executable, str(ROOT / "benchmark/report.py"), "runs", "--bootstrap", "20"]
    result = subprocess.run(report, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "1 run, 0 warnings" in result.stdout and "RAC-SAC (tiny)" in (tmp_path / "report/report.md").read_text()


@pytest.mark.slow
@needs_ray
def test_a_run_that_keeps_dying_is_given_up_and_the_others_go_on(tmp_path):
    choice = "--variants smoke_vanilla_rac --env-ids toy_envs:Deadly-v0 Pendulum-v1 toy_envs:Unknown-v0 --seeds 1 --retries 1"
    out, err = run(tmp_path, "--experiment", "smoke", *choice.split(), "--", "--snapshot-frequency", "0", code=1)
    assert "done: Pendulum-v1__smoke_vanilla_rac__1" in out and "failed 2 of 3" in out
    assert out.count("retry 1 of 1: toy_envs_Deadly-v0") == 1 and "retry 1 of 1: toy_envs_Unknown" not in out  # it stays wrong
    assert "failed: toy_envs_Deadly-v0__smoke_vanilla_rac__1: killed by signal 9" in err
    assert re.search(r"failed: toy_envs_Unknown-v0__smoke_vanilla_rac__1: exit code 2: error: .*Unknown", err)


@pytest.mark.slow
@needs_ray
def test_existing_cluster(tmp_path):
    """--address reaches a cluster that was started before, and leaves it running."""
    cheap = ("--", "--snapshot-frequency", "0")
    ray, port = str(Path(sys.executable).with_name("ray")), 20_000 + os.getpid() % 2_900  # Ray itself takes 23,000 to 24,000
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}  # Ray keeps its token in the home folder
    head = subprocess.Popen(
        [
            ray,
            "start",
            "--head",
            "--block",
            f"--port={port}",
            "--ray-client-server-port",
            str(port + 1),
            "--include-dashboard=false",
            "--num-cpus=2",
        ],
        env=env,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        for address, *more in ((f"127.0.0.1:{port}",), (f"ray://127.0.0.1:{port + 1}", "--total-timesteps", "600")):
            deadline = time.time() + 120
            while True:  # not started yet, or Ray's server for clients hangs in a fork, as it sometimes does under load
                process = start(tmp_path, *ONE, "--seeds", "1", "--address", address, *more, *cheap)
                out, err = process.communicate(timeout=300)
                if process.returncode == 0 or time.time() > deadline:
                    break
                assert "no Ray cluster answers" in err and "Traceback" not in err
            assert process.returncode == 0 and f"done: {NAME.format(1)}" in out, out + err
        assert head.poll() is None
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)
