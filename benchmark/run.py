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
# By environment, "" for all others:
STEPS = {"Humanoid": 1_000_000, "": 300_000}
CAPACITY = {"Humanoid": 300_000, "Walker2d": 100_000, "Ant": 200_000, "": 1_000_000}
VANILLA_BETA = {"Humanoid": 0.2, "Ant": 0.2, "Hopper": 0.2, "": 0.3}
REDQ_ENTROPY = {"Hopper": -1, "Walker2d": -3, "HalfCheetah": -3, "Ant": -4, "Humanoid": -2, "": None}

# Experiment name -> script and flags. {redq_entropy}: the target entropy of REDQ's authors where they have one.
BASELINES = {name: f"benchmark/baselines.py --algorithm {name}" for name in ("sac", "td3", "tqc", "tqc20", "mbpo")}
VARIANTS = {
    "rac_sac": "rac_sac.py",
    "rac_td3": "rac_td3.py",
    "vanilla_rac": "vanilla_rac.py",
    "rac_itm": "rac_itm.py",
    "redq": "vanilla_rac.py --target-rule in-target-min --min-size 2 --q-lr-init 3e-4 --initial-log-alpha 0 {redq_entropy}",
    "vanilla_rac-redq_entropy": "vanilla_rac.py {redq_entropy}",  # compared with REDQ
    **BASELINES,
}


class Sweep(NamedTuple):
    """One argument of a variant over several values."""

    variant: str
    argument: str
    values: tuple
    default: Any  # the value that is the variant itself, by environment where it differs


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

    variants: tuple[str, ...]  # a sweep has its own
    env_ids: tuple[str, ...]
    flags: str = ""  # of all runs
    script_flags: str = "--snapshot-frequency 50000"  # of all but the baselines; from snapshots the value bias is measured
    steps: Any = STEPS  # of a run; by environment where it differs
    prefix: str = ""  # of the experiment names


TINY = "--learning-starts 200 --batch-size 32 --hidden-dim 8 --utd 1 --buffer-size 500 --eval-frequency 100 --eval-episodes 2"
EXPERIMENTS = {
    None: Experiment((), ()),  # of --scripts alone
    "main": Experiment(("rac_sac", "rac_td3", "vanilla_rac-redq_entropy", "rac_itm", "redq", *BASELINES), PAPER_ENVS),
    "variants": Experiment(("rac_sac", "vanilla_rac", "rac_itm"), PAPER_ENVS),
    **{name: Experiment((), ABLATION_ENVS) for name in SWEEPS},
    "quick": Experiment(  # a seventh of the main experiment's time for a step
        ("rac_sac", "redq"), PAPER_ENVS[1:], "--utd 5 --num-critics 5 --eval-frequency 5000", "", 100_000, "quick_"
    ),
    "simba": Experiment(
        ("rac_sac", "redq"), PAPER_ENVS, "--utd 5 --num-critics 5 --network simba --eval-frequency 5000", "", 100_000, "simba_"
    ),
    "smoke": Experiment(  # all algorithms with tiny networks, in minutes
        ("rac_sac", "rac_td3", "vanilla_rac", "rac_itm", "redq", *BASELINES),
        ("Hopper-v4", "InvertedPendulum-v4"),
        TINY,
        "--no-compile --q-lr-warmup-end 300 --num-critics 3 --snapshot-frequency 300",
        500,
        "smoke_",
    ),
}
# Arguments that change how a run is done, not what it learns: they are not in its name.
HARMLESS = ("track", "wandb", "compile", "cudagraphs", "checkpoint", "snapshot", "eval_workers", "capture_video")
RESERVED = ("env_id", "seed", "exp_name", "total_timesteps", "run_root", "run_name", "cuda", "resume", "evaluate")


@dataclass
class Options:
    experiment: Literal[tuple(EXPERIMENTS)] = None  # what to run
    scripts: tuple[Path, ...] = ()  # files with the scripts' command line, beside the experiment or alone
    seeds: int = 8  # runs of each variant in each environment
    first_seed: int = 1
    env_ids: tuple[str, ...] = ()  # in place of the experiment's
    variants: tuple[str, ...] = ()  # only these of the experiment, by experiment name
    run_root: Path = Path("runs")  # on a cluster, storage that all nodes share under this path
    total_timesteps: int | None = None  # steps of a run; default: Humanoid 1e6, others 3e5, in quick and simba 1e5
    address: str | None = None  # an existing Ray cluster: auto, or host:port; by default a Ray of its own on this machine
    cpus_per_run: int = 1  # cores of each run
    gpus_per_run: float = 0.0  # share of a GPU of each run; 0 trains on the CPU
    dry_run: bool = False  # print the commands of the runs that are not finished


@dataclass
class Run:
    """A run of the grid."""

    directory: Path
    script: Path
    arguments: list[str]  # of a fresh start
    steps: int

    @property
    def unmeasured(self) -> bool:
        """Whether there are snapshots whose value bias has not been measured."""
        snapshots = [int(path.stem.removeprefix("step-")) for path in self.directory.glob("snapshots/step-*.pt")]
        return last_step(self.directory / "bias.csv") < max(snapshots, default=0)

    @property
    def is_done(self) -> bool:
        """Trained as far as asked, evaluated, played on fresh episodes, its value bias measured."""
        steps = min(last_step(self.directory / name) for name in ("eval.csv", "evaluate.csv"))
        return steps >= self.steps and not self.unmeasured


class WrongArguments(Exception):
    """What another try would not mend."""


def last_step(path: Path) -> int:
    """The step in the last whole row of a run's CSV file, 0 before there is one."""
    rows = path.read_text().split("\n")[1:-1] if path.exists() else []
    return int(float(rows[-1].split(",")[0])) if rows else 0


def of_environment(values: Any, env_id: str) -> Any:
    """A value that may depend on the environment."""
    return values.get(env_id.split("-v")[0], values[""]) if isinstance(values, dict) else values


def settings_of(words: list[str]) -> dict[str, str]:
    """The arguments of a command line by field name: --utd 5 is {"utd": "5"}, --no-compile is {"compile": "False"}."""
    settings = {}
    for argument in re.split(r"(?:^|\s)--", " ".join(words))[1:]:
        flag, value = re.fullmatch(r"([^\s=]*)[\s=]?(.*)", argument).groups()
        name = flag.replace("-", "_")
        settings[name.removeprefix("no_")] = value or str(not name.startswith("no_"))
    return settings


def commands(options: Options, env_id: str) -> dict[str, str]:
    """Experiment name -> script and flags of what is run in an environment."""
    names, _, flags, script_flags, _, prefix = EXPERIMENTS[options.experiment]
    found = {prefix + name: VARIANTS[name] for name in names}
    if options.experiment in SWEEPS:
        variant, argument, values, default = SWEEPS[options.experiment]
        for value in values:
            name = variant if value == of_environment(default, env_id) else f"{variant}-{argument}_{value}"
            flag = ("no-" if value is False else "") + argument.replace("_", "-")
            found[name] = f"{VARIANTS[variant]} --{flag} {'' if isinstance(value, bool) else value}"
    entropy = of_environment(REDQ_ENTROPY, env_id)
    for name, command in found.items():
        own = flags if "baselines.py" in command else f"{flags} {script_flags}"
        found[name] = f"{command} {own}".format(redq_entropy=f"--target-entropy {entropy}" if entropy else "")
    if missing := set(options.variants) - found.keys():
        sys.exit(f"error: {options.experiment} has no variant {', '.join(missing)}; it has {', '.join(found)}.")
    found = {name: found[name] for name in options.variants or found}
    return found | {path.stem: shlex.quote(str(path.resolve())) for path in options.scripts}


def make_runs(options: Options, extra: list[str]) -> list[Run]:
    """Every run of the grid, seeds outermost. extra: the words after --."""
    changed = settings_of(extra)
    if reserved := changed.keys() & set(RESERVED):
        sys.exit(f"error: every run has its own {', '.join(reserved)}; what sets it is given before --, see --help.")
    changed = {name: value for name, value in changed.items() if not name.startswith(HARMLESS)}
    suffix = "".join(f"+{name}_{value.replace(' ', '_')}" for name, value in sorted(changed.items()))
    experiment = EXPERIMENTS[options.experiment]
    workers = max(1, options.cpus_per_run - 1 if options.gpus_per_run else options.cpus_per_run // 2)
    runs = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for env_id in options.env_ids or experiment.env_ids:
            for name, command in commands(options, env_id).items():
                script, *flags = shlex.split(command)
                directory = options.run_root.resolve() / re.sub("[/:]", "_", f"{env_id}__{name}{suffix}__{seed}")
                steps = options.total_timesteps or of_environment(experiment.steps, env_id)
                workers_flags = [] if "baselines.py" in script else ["--eval-workers", str(workers)]
                own = {
                    "--env-id": env_id,
                    "--seed": seed,
                    "--exp-name": name + suffix,
                    "--total-timesteps": steps,
                    "--run-root": directory.parent,
                    "--run-name": directory.name,
                    "--cuda": options.gpus_per_run > 0,
                }
                arguments = [*flags, *workers_flags, *extra, *(str(part) for pair in own.items() for part in pair)]
                runs.append(Run(directory, ROOT / script, arguments, steps))
    return runs


def same(saved: Any, given: str) -> bool:
    """Whether an argument of config.json is that of a command line: 0.0003 is 3e-4."""
    try:
        return float(saved) == float(given)
    except (TypeError, ValueError):
        return str(saved) == given


def check_same(run: Run) -> None:
    """End with a sentence where a run directory was made with other arguments; a run may always be prolonged."""
    path = run.directory / "config.json"
    saved = json.loads(path.read_text())["args"] if path.exists() else {}
    for name, given in settings_of(run.arguments).items():
        may_differ = name in ("total_timesteps", "run_root") or name.startswith(HARMLESS)
        if name in saved and not may_differ and not same(saved[name], given):
            sys.exit(f"error: {run.directory} was made with {name} {saved[name]}, not {given}; choose another --run-root.")


def execute(run: Run, cpus: int) -> None:
    """In a Ray worker: train, or go on from the checkpoint; play the policies on fresh episodes; measure the value bias.

    Raises WrongArguments for exit code 2, RuntimeError for any other that is not 0.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ray.cancel() needs it, and a shell's background job ignores it
    begun = (run.directory / "checkpoint.pt").exists()
    if not begun and not list(run.directory.glob("*.csv")):
        shutil.rmtree(run.directory, ignore_errors=True)  # what a start leaves that is killed before its first checkpoint
    train = ["--resume", str(run.directory), "--total-timesteps", str(run.steps)] if begun else run.arguments
    execute_program([str(run.script), *train], run, cpus)
    execute_program([str(run.script), "--evaluate", str(run.directory)], run, cpus)
    if run.unmeasured:
        execute_program([str(ROOT / "benchmark/value_bias.py"), str(run.directory)], run, cpus)


def execute_program(command: list[str], run: Run, cpus: int) -> None:
    """A Python program with its output appended to the run's log; it gets SIGTERM when this task is cancelled."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # for baselines of an environment beside the scripts
    environment = {**os.environ, "OMP_NUM_THREADS": str(cpus), "PYTHONPATH": path}
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
            process.terminate()  # nothing, if it has ended
            try:
                code = process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    if code:
        raise (WrongArguments if code == 2 else RuntimeError)(f"exit code {code} of {shlex.join(command)}; see {log}")


def run_grid(options: Options, runs: list[Run], due: list[Run]) -> int:
    """Bring what is due to its end on Ray; returns the exit code."""
    # Or else Ray, where uv runs this program, sends the whole folder to its workers; they see it anyway.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray

    ray.init(options.address or "local", log_to_driver=False, logging_level="ERROR")
    there = ray.cluster_resources()
    if there.get("CPU", 0) < options.cpus_per_run or there.get("GPU", 0) < options.gpus_per_run:
        sys.exit(f"error: a run wants {options.cpus_per_run} cores and {options.gpus_per_run:g} GPUs, which are not there.")
    resources = {"num_cpus": options.cpus_per_run, "num_gpus": options.gpus_per_run}
    remote = ray.remote(max_retries=3, retry_exceptions=[RuntimeError], **resources)(execute)
    running = {remote.options(name=run.directory.name).remote(run, options.cpus_per_run): run for run in due}
    failed = []
    for name in ("SIGTERM", "SIGUSR1", "SIGXCPU"):  # which a cluster's scheduler sends
        signal.signal(getattr(signal, name, signal.SIGTERM), signal.default_int_handler)  # Windows has not all
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
                    bar.write(f"failed: {run.directory.name}: {str(error).splitlines()[-1]}", file=sys.stderr)
            bar.set_postfix_str(f"{len(running)} runs to go, {len(failed)} failed", refresh=False)
            bar.update(sum(min(last_step(run.directory / "eval.csv"), run.steps) for run in runs) - bar.n)
    except KeyboardInterrupt:
        bar.write("stopping: every run writes its checkpoint, and the same command goes on", file=sys.stderr)
        for task in running:
            ray.cancel(task)
        ray.wait(list(running), num_returns=len(running), timeout=150)
        return 130
    finally:
        bar.close()
    return int(bool(failed))


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = tyro.cli(Options, args=words[:end], description=__doc__)
    if not options.experiment and not (options.scripts and options.env_ids):
        sys.exit("error: give --experiment, or --scripts with --env-ids.")
    if missing := [str(path) for path in options.scripts if not path.is_file()]:
        sys.exit(f"error: there is no script {missing[0]}.")
    runs = make_runs(options, words[end + 1 :])
    for run in runs:
        check_same(run)
    due = [run for run in runs if not run.is_done]
    if options.dry_run:
        for run in due:
            print(shlex.join(["python", str(run.script), *run.arguments]))
        return
    sys.exit(run_grid(options, runs, due) if due else 0)


if __name__ == "__main__":
    main()
