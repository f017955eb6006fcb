"""Run variants x environments x seeds of the paper's experiments on Ray, from one core to a cluster.

    python benchmark/run.py --experiment main --seeds 8
    python benchmark/run.py --experiment main --seeds 8 --gpus-per-run 0.25 --cpus-per-run 4
    python benchmark/run.py --experiment main --seeds 8 --address auto --run-root /shared/runs
    python benchmark/run.py --scripts rac_sac.py my_rac.py --env-ids Hopper-v4 --seeds 4 -- --utd 5

Every run is a script in a process of its own, in <run root>/<env_id>__<exp_name>__<seed>, with its output in the .log beside it.
The same command again goes on: finished runs are left alone, others resume from their checkpoints. A run whose script, worker or
node dies is retried from its checkpoint. Ctrl-C and SIGTERM end all runs with a checkpoint. What follows a lone -- goes to every
script; what changes the training becomes part of the experiment name (rac_sac+utd_5).
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PAPER_ENVS = ("Humanoid-v4", "Ant-v4", "Walker2d-v4", "Hopper-v4")
ABLATION_ENVS = ("Walker2d-v4", "Humanoid-v4")  # the paper does not name its own
# By environment:
STEPS = {"Humanoid": 1_000_000, "others": 300_000}
CAPACITY = {"Humanoid": 300_000, "Walker2d": 100_000, "Ant": 200_000, "others": 1_000_000}
VANILLA_BETA = {"Humanoid": 0.2, "Ant": 0.2, "Hopper": 0.2, "others": 0.3}
REDQ_ENTROPY = {"Hopper": -1, "Walker2d": -3, "HalfCheetah": -3, "Ant": -4, "Humanoid": -2, "others": None}

BASELINES = ("sac", "td3", "tqc", "tqc20", "mbpo")
# Variant -> script and flags. commands() puts the target entropy of REDQ's authors, where they have one, for {redq_entropy}.
VARIANTS = {
    "rac_sac": "rac_sac.py",
    "rac_td3": "rac_td3.py",
    "vanilla_rac": "vanilla_rac.py",
    "rac_itm": "rac_itm.py",
    "redq": "vanilla_rac.py --target-rule in-target-min --min-size 2 --q-lr-init 3e-4 --initial-log-alpha 0 {redq_entropy}",
    "vanilla_rac-redq_entropy": "vanilla_rac.py {redq_entropy}",  # compared with REDQ
    **{name: f"benchmark/baselines.py --algorithm {name}" for name in BASELINES},
}


class Sweep(NamedTuple):
    """One argument of a variant over several values. Its runs are named VARIANT-ARGUMENT_VALUE, or VARIANT with the default."""

    variant: str
    argument: str
    values: tuple
    default: Any  # the value that VARIANTS has, by environment where it differs

    @property
    def prefix(self) -> str:
        return f"{self.variant}-{self.argument}_"


SWEEPS = {
    "utd": Sweep("rac_sac", "utd", (1, 5, 10, 20), 20),
    "ensemble": Sweep("rac_sac", "num_critics", (2, 3, 5, 8, 10), 10),
    "training": Sweep("rac_sac", "train_beta_max", (0.4, 0.6, 0.8, 1.0, 1.2), 0.8),
    "exploration": Sweep("rac_sac", "explore_beta_max", (0.2, 0.3, 0.4, 0.6, 0.8), 0.3),
    "capacity": Sweep("rac_sac", "buffer_size", (50_000, 100_000, 200_000, 300_000, 1_000_000), CAPACITY),
    "temperature": Sweep("rac_sac", "initial_log_alpha", (-5, -2, 0), -5),
    "temperature_network": Sweep("rac_sac", "temperature_network", (True, False), True),
    "warmup": Sweep("rac_sac", "q_lr_init", (3e-5, 3e-4), 3e-5),
    "vanilla_beta": Sweep("vanilla_rac", "beta", (0.2, 0.3, 0.4, 0.6, 0.8), VANILLA_BETA),
    "itm_training": Sweep("rac_itm", "train_k_max", (2, 2.5, 3, 4), 2),
    "itm_exploration": Sweep("rac_itm", "explore_k_max", (1.25, 1.5, 1.75, 2), 1.5),
}


class Experiment(NamedTuple):
    """What is run together."""

    env_ids: tuple[str, ...]
    variants: tuple[str, ...] = ()  # none in an experiment of SWEEPS
    flags: str = ""  # of all runs
    rac_flags: str = "--snapshot-frequency 50000"  # of all runs but the baselines'; from snapshots the value bias is measured
    steps: int | dict[str, int] = STEPS  # of a run
    prefix: str = ""  # of every exp_name


EXPERIMENTS = {
    "main": Experiment(PAPER_ENVS, ("rac_sac", "rac_td3", "vanilla_rac-redq_entropy", "rac_itm", "redq", *BASELINES)),
    "variants": Experiment(PAPER_ENVS, ("rac_sac", "vanilla_rac", "rac_itm")),
    **{name: Experiment(ABLATION_ENVS) for name in SWEEPS},
    "quick": Experiment(  # a seventh of the main experiment's time for a step
        env_ids=("Ant-v4", "Walker2d-v4", "Hopper-v4"),
        variants=("rac_sac", "redq"),
        flags="--utd 5 --num-critics 5 --eval-frequency 5000",
        rac_flags="",
        steps=100_000,
        prefix="quick_",
    ),
    "simba": Experiment(
        env_ids=PAPER_ENVS,
        variants=("rac_sac", "redq"),
        flags="--utd 5 --num-critics 5 --network simba --eval-frequency 5000",
        rac_flags="",
        steps=100_000,
        prefix="simba_",
    ),
    "smoke": Experiment(  # all algorithms with tiny networks, in minutes
        env_ids=("Hopper-v4", "InvertedPendulum-v4"),
        variants=("rac_sac", "rac_td3", "vanilla_rac", "rac_itm", "redq", *BASELINES),
        flags="--learning-starts 200 --batch-size 32 --hidden-dim 8 --utd 1 --buffer-size 500 --eval-frequency 100 "
        "--eval-episodes 2",
        rac_flags="--no-compile --q-lr-warmup-end 300 --num-critics 3 --snapshot-frequency 300",
        steps=500,
        prefix="smoke_",
    ),
}
ONLY_SCRIPTS = Experiment(env_ids=())  # where no experiment is asked for
# Arguments that are the grid's to set
RESERVED = ("env_id", "seed", "exp_name", "total_timesteps", "run_root", "run_name", "cuda", "resume", "evaluate")
# Arguments that begin so change how a run is done, not what it learns: they are not in its name
HARMLESS = ("track", "wandb", "compile", "cudagraphs", "checkpoint", "snapshot", "eval_workers", "capture_video")


@dataclass
class Options:
    experiment: Literal[(None, *EXPERIMENTS)] = None  # what to run
    scripts: tuple[Path, ...] = ()  # files with the scripts' command line, beside the experiment or alone
    seeds: int = 8  # runs of each variant in each environment
    first_seed: int = 1
    env_ids: tuple[str, ...] = ()  # in place of the experiment's
    variants: tuple[str, ...] = ()  # only these of the experiment, by exp_name
    run_root: Path = Path("runs")  # on a cluster, storage that all nodes share under this path
    total_timesteps: int | None = None  # of a run; by default 1e6 for Humanoid, 3e5 for others, in quick and simba 1e5
    address: str | None = None  # an existing Ray cluster: auto, or host:port; by default a Ray of its own on this machine
    cpus_per_run: int = 1  # cores of each run
    gpus_per_run: float = 0.0  # share of a GPU of each run; 0 trains on the CPU
    dry_run: bool = False  # print the commands of the runs that are not finished


def last_step(path: Path) -> int:
    """The step in the last whole row of a run's CSV file, 0 before there is one."""
    if not path.exists():
        return 0
    lines = path.read_text().split("\n")
    rows = lines[1:-1]  # without the header and what follows the last line end: nothing, or the beginning of a row
    if not rows:
        return 0
    step = rows[-1].split(",")[0]
    return int(float(step))


@dataclass
class Run:
    """A run of the grid."""

    directory: Path
    script: Path
    arguments: list[str]  # of a fresh start
    steps: int

    @property
    def has_unmeasured_snapshots(self) -> bool:
        """Whether there are snapshots whose value bias has not been measured."""
        snapshots = [int(path.stem.removeprefix("step-")) for path in self.directory.glob("snapshots/step-*.pt")]
        return max(snapshots, default=0) > last_step(self.directory / "bias.csv")

    @property
    def is_done(self) -> bool:
        """Trained as far as asked, played on fresh episodes, its value bias measured."""
        is_trained = last_step(self.directory / "eval.csv") >= self.steps
        is_played = last_step(self.directory / "evaluate.csv") >= self.steps
        return is_trained and is_played and not self.has_unmeasured_snapshots


class WrongArguments(Exception):
    """A program has ended with exit code 2: another try would end so, too."""


def of_environment(value: Any, env_id: str) -> Any:
    """A value, or the entry of this environment where it is a dictionary."""
    if not isinstance(value, dict):
        return value
    name = env_id.rsplit("-v", 1)[0]
    return value.get(name, value["others"])


def parse_flags(words: list[str]) -> dict[str, str]:
    """The arguments of a command line by field name: --utd 5 is {"utd": "5"}, --no-compile is {"compile": "False"}."""
    arguments = []  # a list for each: the flag, then its values
    for word in words:
        if word.startswith("--"):
            arguments.append(word.removeprefix("--").split("=", 1))
        elif arguments:
            arguments[-1].append(word)
    parsed = {}
    for flag, *values in arguments:
        name = flag.replace("-", "_")
        value = " ".join(values)
        if not value:
            value = str(not name.startswith("no_"))
        parsed[name.removeprefix("no_")] = value
    return parsed


def commands(options: Options, experiment: Experiment, env_id: str) -> dict[str, str]:
    """exp_name -> script and flags of what is run in an environment."""
    templates = {experiment.prefix + variant: VARIANTS[variant] for variant in experiment.variants}
    if options.experiment in SWEEPS:
        sweep = SWEEPS[options.experiment]
        for value in sweep.values:
            name = f"{sweep.prefix}{value}"
            if value == of_environment(sweep.default, env_id):
                name = sweep.variant  # the run that other experiments have, too
            flag = sweep.argument.replace("_", "-")
            if value is True:
                setting = f"--{flag}"
            elif value is False:
                setting = f"--no-{flag}"
            else:
                setting = f"--{flag} {value}"
            templates[name] = f"{VARIANTS[sweep.variant]} {setting}"
    entropy = of_environment(REDQ_ENTROPY, env_id)
    redq_entropy = f"--target-entropy {entropy}" if entropy else ""
    found = {}
    for name, template in templates.items():
        command = f"{template} {experiment.flags}"
        if "baselines.py" not in template:
            command = f"{command} {experiment.rac_flags}"
        found[name] = command.format(redq_entropy=redq_entropy)
    missing = set(options.variants) - found.keys()
    if missing:
        sys.exit(f"error: {options.experiment} has no variant {', '.join(missing)}; it has {', '.join(found)}.")
    if options.variants:
        found = {name: found[name] for name in options.variants}
    for path in options.scripts:
        found[path.stem] = shlex.quote(str(path.resolve()))
    return found


def make_runs(options: Options, extra: list[str]) -> list[Run]:
    """Every run of the grid, seeds outermost. extra: the words after --."""
    settings = parse_flags(extra)
    reserved = settings.keys() & set(RESERVED)
    if reserved:
        sys.exit(f"error: every run has its own {', '.join(reserved)}; what sets it is given before --, see --help.")
    suffix = ""
    for name, value in sorted(settings.items()):
        if not name.startswith(HARMLESS):
            suffix += f"+{name}_{value.replace(' ', '_')}"
    if options.gpus_per_run:
        workers = options.cpus_per_run - 1
    else:
        workers = options.cpus_per_run // 2
    experiment = ONLY_SCRIPTS
    if options.experiment:
        experiment = EXPERIMENTS[options.experiment]
    runs = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for env_id in options.env_ids or experiment.env_ids:
            steps = options.total_timesteps or of_environment(experiment.steps, env_id)
            for name, command in commands(options, experiment, env_id).items():
                exp_name = name + suffix
                directory = options.run_root.resolve() / re.sub("[/:]", "_", f"{env_id}__{exp_name}__{seed}")
                script, *arguments = shlex.split(command)
                if "baselines.py" not in script:
                    arguments += ["--eval-workers", str(max(1, workers))]
                arguments += extra  # behind it, for it may have another number of workers
                arguments += ["--env-id", env_id, "--seed", str(seed), "--exp-name", exp_name]
                arguments += ["--total-timesteps", str(steps)]
                arguments += ["--run-root", str(directory.parent), "--run-name", directory.name]
                arguments += ["--cuda", str(options.gpus_per_run > 0)]
                runs.append(Run(directory, ROOT / script, arguments, steps))
    return runs


def is_same_value(saved: Any, given: str) -> bool:
    """Whether an argument of config.json is that of a command line: 0.0003 is 3e-4."""
    try:
        return float(saved) == float(given)
    except (TypeError, ValueError):
        return str(saved) == given


def check_arguments(run: Run) -> None:
    """End with a sentence where a run directory was made with other arguments; a run may always be prolonged."""
    path = run.directory / "config.json"
    if not path.exists():
        return
    saved = json.loads(path.read_text())["args"]
    for name, given in parse_flags(run.arguments).items():
        may_differ = name in ("total_timesteps", "run_root") or name.startswith(HARMLESS)
        if name in saved and not may_differ and not is_same_value(saved[name], given):
            sys.exit(f"error: {run.directory} was made with {name} {saved[name]}, not {given}; choose another --run-root.")


def execute(run: Run, cpus: int) -> None:
    """In a Ray worker: train, or go on from the checkpoint; play the policies on fresh episodes; measure the value bias.

    Raises WrongArguments for exit code 2, RuntimeError for any other that is not 0.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ray.cancel() sends it; in a shell's background it is ignored
    if (run.directory / "checkpoint.pt").exists():
        arguments = ["--resume", str(run.directory), "--total-timesteps", str(run.steps)]
    else:
        arguments = run.arguments
        if not list(run.directory.glob("*.csv")):  # or else they are results of a run that had no checkpoint with it
            shutil.rmtree(run.directory, ignore_errors=True)  # left by a start that was killed before its first checkpoint
    execute_program([str(run.script), *arguments], run, cpus)
    execute_program([str(run.script), "--evaluate", str(run.directory)], run, cpus)
    if run.has_unmeasured_snapshots:
        execute_program([str(ROOT / "benchmark/value_bias.py"), str(run.directory)], run, cpus)


def execute_program(command: list[str], run: Run, cpus: int) -> None:
    """A Python program with its output appended to the run's log; it gets SIGTERM when this task is cancelled."""
    # The project's folder, for baselines.py and value_bias.py to find the module of an environment that lies beside the scripts
    python_path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": str(cpus), "PYTHONPATH": python_path}
    log = Path(f"{run.directory}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        output.write(f"\n$ {shlex.join(['python', *command])}\n".encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:  # process.wait() would not notice the KeyboardInterrupt of ray.cancel()
                time.sleep(0.2)
        finally:
            process.terminate()  # does nothing where it has ended
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    sentence = f"exit code {process.returncode} of {shlex.join(command)}; see {log}"
    if process.returncode == 2:
        raise WrongArguments(sentence)
    if process.returncode != 0:
        raise RuntimeError(sentence)


def run_grid(options: Options, runs: list[Run], due: list[Run]) -> int:
    """Execute the runs that are due on Ray; returns the exit code. runs: all of the grid, for the bar."""
    # Or else Ray, where uv runs this program, sends the whole folder to its workers; they see it anyway.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray

    ray.init(options.address or "local", log_to_driver=False, logging_level="ERROR")
    available = ray.cluster_resources()
    if available.get("CPU", 0) < options.cpus_per_run or available.get("GPU", 0) < options.gpus_per_run:
        sys.exit(f"error: a run wants {options.cpus_per_run} cores and {options.gpus_per_run:g} GPUs, which are not there.")
    remote_execute = ray.remote(
        num_cpus=options.cpus_per_run, num_gpus=options.gpus_per_run, max_retries=3, retry_exceptions=[RuntimeError]
    )(execute)
    running = {}  # by Ray's task
    for run in due:
        task = remote_execute.options(name=run.directory.name).remote(run, options.cpus_per_run)
        running[task] = run
    failed = []
    for name in ("SIGTERM", "SIGUSR1", "SIGXCPU"):  # a cluster's scheduler sends them; they are as Ctrl-C
        if hasattr(signal, name):  # Windows has not all
            signal.signal(getattr(signal, name), signal.default_int_handler)
    bar = tqdm(total=sum(run.steps for run in runs), unit="step", mininterval=1 if sys.stderr.isatty() else 60)
    try:
        while running:
            ended, _ = ray.wait(list(running), timeout=5)
            for task in ended:
                run = running.pop(task)
                try:
                    ray.get(task)
                except ray.exceptions.RayError as error:
                    failed.append(run)
                    reason = str(error).splitlines()[-1]
                    bar.write(f"failed: {run.directory.name}: {reason}", file=sys.stderr)
            bar.set_postfix_str(f"{len(running)} runs to go, {len(failed)} failed", refresh=False)
            steps = sum(min(last_step(run.directory / "eval.csv"), run.steps) for run in runs)
            bar.update(steps - bar.n)
    except KeyboardInterrupt:
        bar.write("stopping: every run writes its checkpoint, and the same command goes on", file=sys.stderr)
        for task in running:
            ray.cancel(task)
        ray.wait(list(running), num_returns=len(running), timeout=150)
        return 130
    finally:
        bar.close()
    return 1 if failed else 0


def main() -> None:
    words = sys.argv[1:]
    extra = []
    if "--" in words:
        end = words.index("--")
        words, extra = words[:end], words[end + 1 :]
    options = tyro.cli(Options, args=words, description=__doc__)
    if not options.experiment and not (options.scripts and options.env_ids):
        sys.exit("error: give --experiment, or --scripts with --env-ids.")
    for script in options.scripts:
        if not script.is_file():
            sys.exit(f"error: there is no script {script}.")
    runs = make_runs(options, extra)
    for run in runs:
        check_arguments(run)
    due = [run for run in runs if not run.is_done]
    if options.dry_run:
        for run in due:
            print(shlex.join(["python", str(run.script), *run.arguments]))
    elif due:
        sys.exit(run_grid(options, runs, due))


if __name__ == "__main__":
    main()
