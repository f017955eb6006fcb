"""Run variants x environments x seeds as Ray tasks, from one core to a cluster: an experiment of experiments.py, own scripts.

    python benchmark/run.py --experiment main --seeds 8
    python benchmark/run.py --experiment main --seeds 8 --gpus-per-run 0.25 --cpus-per-run 4 -- --max-pending-evaluations 1000000
    python benchmark/run.py --experiment main --seeds 8 --address auto --run-root /shared/runs
    python benchmark/run.py --scripts rac_sac.py my_rac.py --env-ids Hopper-v4 --seeds 4 -- --utd 5

Each run is the script itself, in a process of its own, under a run name that follows from variant, environment and seed. The
same command again goes on: finished runs are left alone, others are resumed from their checkpoints. A run whose worker or
node dies is retried from its checkpoint; when it has failed for good the others go on. Ctrl-C stops all with a checkpoint.

What follows a lone -- goes to every script: `-- --track --utd 5`. Flags that change what is learned become part of the runs'
names, so that they are never mixed up with runs of the experiment's own settings.
"""

import hashlib
import math
import os
import re
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from experiments import EXPERIMENTS, HARMLESS, ROOT, SMOKE, STEPS, SWEEPS, VARIANTS, Member, members, of_environment
from flags import canonical, differs, given, script_arguments, script_defaults, split_words
from grid import run_grid
from identity import expected
from job import Job, UserError, is_done, read_config, training_command

# What run.py sets for each run itself, and how to choose it.
RESERVED = {
    "env_id": "use --env-ids",
    "seed": "use --seeds and --first-seed",
    "total_timesteps": "use --total-timesteps before --",
    "run_root": "use --run-root before --",
    "run_name": "it follows from variant, environment and seed",
    "exp_name": "it is the variant's name",
    "cuda": "use --gpus-per-run",
    "resume": "the same command again goes on",
    "evaluate": "every run is evaluated at its end",
    "help": "ask the script",
}
NEEDED = {*RESERVED} - {"exp_name", "help"}  # arguments of an own script; exp_name, whose default is code, aside


@dataclass
class Options:
    experiment: Literal[tuple(EXPERIMENTS)] | None = None  # what to run; benchmark/experiments.py lists them
    scripts: tuple[Path, ...] | None = None  # own scripts, beside the experiment's variants or alone, with their command line
    seeds: int = 8  # runs of each variant in each environment, with the seeds first_seed, first_seed + 1, ...
    first_seed: int = 1  # the first seed
    run_root: Path = Path("runs")  # the folder of the run directories; on a cluster, storage that all nodes share under this path
    env_ids: tuple[str, ...] | None = None  # these environments instead of the experiment's or own script's
    variants: tuple[str, ...] | None = None  # only these variants of the experiment, by experiment name
    total_timesteps: int | None = None  # environment steps of each run instead of the experiment's or own script's
    address: str | None = None  # an existing Ray cluster: auto, or ray://host:port; by default a Ray of its own on this machine
    cpus_per_run: int = 1  # cores of each run: its training threads; half of them, at least one, are also its evaluation workers
    gpus_per_run: float = 0.0  # share of a GPU for each run; 0 trains on the CPU
    retries: int = 3  # how often a run that died is retried from its checkpoint
    dry_run: bool = False  # print the commands and do nothing


def flags_for_all(words: list[str]) -> dict[str, str]:
    """The arguments after the lone -- by field name; raises UserError for one that run.py sets itself, or a stray word."""
    words = split_words(words)
    for before, word in zip(["", *words], words, strict=False):
        if not word.startswith("--") and not before.startswith("--"):
            raise UserError(f"{word!r} after -- belongs to no argument; give arguments of the scripts such as --track.")
    found = given(words)
    for name in found:
        if name in RESERVED:
            raise UserError(f"{name} after -- is not accepted, because each run has its own; {RESERVED[name]}.")
    return found


def lacks_value(name: str, value: str, defaults: dict) -> bool:
    """Whether an argument that is no switch of a script was given like one."""
    return value in ("True", "False") and not isinstance(defaults.get(name, True), bool)


def sha256(script: str | Path) -> str:
    return hashlib.sha256((ROOT / script).read_bytes()).hexdigest()


def own_scripts(options: Options) -> list[Member]:
    """The files of --scripts; UserError for one that cannot be run as one of the scripts here.

    Their name is the script's own exp_name, by default its file's stem, with a part of the file's hash where a variant of
    experiments.py or another file of this grid has the same name.
    """
    found = {}  # exp_name, sha256 -> path; the same file twice is one
    for path in (path.resolve() for path in options.scripts or ()):
        try:
            defaults = script_defaults(str(path))
        except (OSError, SyntaxError, ValueError) as error:
            raise UserError(f"{path} cannot be read as a Python script: {getattr(error, 'strerror', None) or error}.") from None
        if missing := sorted(NEEDED - defaults.keys()):
            lacking = f"{path} has no argument {', '.join(missing)} with a plain value in a class Args"
            raise UserError(f"{lacking}; start from a copy of a script here.")
        found[defaults.get("exp_name") or path.stem, sha256(path)] = str(path)
    names = [name for name, _ in found]
    prefix = SMOKE if options.experiment == "smoke" else ""
    own = []
    for (name, digest), path in found.items():
        if name in VARIANTS:  # its name only for the very script, at its defaults
            unique = not VARIANTS[name].flags and digest == sha256(VARIANTS[name].script)
        else:
            unique = names.count(name) == 1
        own.append(Member(prefix + (name if unique else f"{name}-{digest[:8]}"), path, flags=""))
    return own


def members_of_grid(options: Options) -> list[tuple[str, Member]]:
    """(environment, variant or own script) of every run of the grid but for its seeds; UserError for what is not there."""
    if not options.experiment and (options.variants or not options.scripts):
        raise UserError("give --experiment, which --variants belong to, or --scripts.")
    own = own_scripts(options)
    env_ids = options.env_ids or (EXPERIMENTS[options.experiment].env_ids if options.experiment else ())
    if not env_ids:
        return [(script_defaults(member.script)["env_id"], member) for member in own]
    grid = {env_id: members(options.experiment, env_id) if options.experiment else [] for env_id in env_ids}
    known = sorted({member.exp_name for found in grid.values() for member in found})
    if unknown := [name for name in options.variants or () if name not in known]:
        raise UserError(f"{options.experiment} has no variant {unknown[0]}; it has {', '.join(known)}.")
    chosen = options.variants or known
    own = [member for member in own if member.exp_name not in chosen]  # else it is the same file as the variant's
    pairs = []
    for env_id, found in grid.items():
        pairs += [(env_id, member) for member in found if member.exp_name in chosen]
        pairs += [(env_id, member) for member in own]
    return pairs


def check_flags(for_all: dict[str, str], script: str) -> None:
    """UserError where a script does not have an argument after --, or it was given no value."""
    defaults, arguments = script_defaults(script), script_arguments(script)
    for name, value in for_all.items():
        if lacks_value(name, value, defaults):
            raise UserError(f"{name} after -- has no value; give one, as in -- --utd 5.")
        if name not in arguments and name not in HARMLESS:
            raise UserError(f"{script} has no argument {name}; what follows -- goes to all, --variants chooses some.")


def settings_of(options: Options, for_all: dict[str, str], env_id: str, member: Member) -> dict[str, str]:
    """The arguments that one member of a grid is given in an environment, by field name.

    A script may lack what an experiment sets for all of its runs, or what only says how a run is done.
    """
    defaults, arguments = script_defaults(member.script), script_arguments(member.script)
    common = given(EXPERIMENTS[options.experiment].flags) if options.experiment else {}
    settings = {name: value for name, value in common.items() if name in arguments}
    settings |= given(member.flags)
    settings |= {name: value for name, value in for_all.items() if name in arguments}
    steps = options.total_timesteps or settings.get("total_timesteps") or defaults.get("total_timesteps")
    settings["total_timesteps"] = str(int(steps or of_environment(STEPS, env_id)))
    settings["env_id"] = env_id
    settings["cuda"] = str(options.gpus_per_run > 0)
    if "eval_workers" in arguments:
        busy = 1 if options.gpus_per_run else math.ceil(options.cpus_per_run / 2)  # cores that training keeps busy
        settings.setdefault("eval_workers", str(max(1, options.cpus_per_run - busy)))
    return settings


def as_words(settings: dict[str, str]) -> list[str]:
    """Settings as words of a command line."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value not in ("True", "False") or name == "cuda":  # which may be None, so it takes a value
            words += [f"--{flag}", value]
        else:
            words.append(f"--{flag}" if value == "True" else f"--no-{flag}")
    return words


def make_jobs(options: Options, for_all: dict[str, str]) -> list[Job]:
    """A job for each run of the grid, seeds outermost."""
    if options.experiment in SWEEPS and SWEEPS[options.experiment].argument in for_all:
        raise UserError(f"{SWEEPS[options.experiment].argument} after -- is what the runs of {options.experiment} differ in.")
    grid = members_of_grid(options)
    for script in dict.fromkeys(member.script for _, member in grid):
        check_flags(for_all, script)
        for_all = {name: canonical(value, script_defaults(script).get(name, "")) for name, value in for_all.items()}
    suffix = "".join(f"+{name}_{value}" for name, value in sorted(for_all.items()) if name not in HARMLESS)
    jobs = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for env_id, member in grid:
            name = f"{env_id}__{member.exp_name}{suffix}__{seed}".replace("/", "_").replace(":", "_")
            if len(name) > 200:
                raise UserError(f"the run name {name} has more than 200 characters; give fewer arguments after --.")
            settings = settings_of(options, for_all, env_id, member)
            settings |= {"seed": str(seed), "exp_name": member.exp_name + suffix}
            run_dir = options.run_root.resolve() / name
            jobs.append(
                Job(
                    name=name,
                    run_dir=str(run_dir),
                    script=str(ROOT / member.script),
                    arguments=["--run-root", str(run_dir.parent), "--run-name", name, *as_words(settings)],
                    settings=settings,
                    steps=int(settings["total_timesteps"]),
                    cpus=options.cpus_per_run,
                    sha256=sha256(member.script),
                    own=Path(member.script).is_absolute(),
                    value_bias=str(ROOT / "benchmark/value_bias.py"),
                )
            )
    return jobs


def check_device(job: Job, saved: dict) -> None:
    """UserError where an unfinished run was trained on another kind of device than the grid wants: it cannot move."""
    on_gpu = saved.get("cuda")
    if on_gpu is None and saved["device"]:  # a CPU with its threads, or a GPU's name alone
        on_gpu = ", threads: " not in saved["device"]
    wanted = job.settings["cuda"] == "True"
    if on_gpu is not None and on_gpu != wanted:
        raise UserError(
            f"{job.run_dir} was made with cuda {on_gpu}, and this grid wants {wanted}: --gpus-per-run decides; "
            "move it away or choose another --run-root."
        )


def check_existing(job: Job, for_all: dict[str, str]) -> None:
    """Raise UserError if the job's run directory is of other settings or another own script, or is something else.

    A run that was begun for more steps goes on to them; a warning says what else a run keeps that it began with.
    """
    run_dir = Path(job.run_dir)
    settings = job.settings
    saved = read_config(job.run_dir)
    away = "move it away or choose another --run-root."
    if saved is None and (run_dir / "checkpoint.pt").exists():
        raise UserError(f"{run_dir} is there but has no readable config.json; {away}")
    if saved is None:
        return
    if job.own and job.sha256 not in saved["script_sha256"]:
        raise UserError(f"{run_dir} was made with another {saved['script']}.py than {job.script}; {away}")
    done = is_done(job)
    if not done:
        check_device(job, saved)
    for name, value in {**(expected(settings["exp_name"], settings["env_id"]) or {}), **settings}.items():
        other = name in saved and differs(saved[name], value)
        if name == "env_id" and other:  # to an id without a version a script adds the newest
            other = not re.fullmatch(rf"{re.escape(value)}-v\d+", saved[name])
        if other and name not in (*HARMLESS, "total_timesteps"):
            raise UserError(f"{run_dir} was made with {name} {saved[name]}, and this grid wants {value}; {away}")
    kept = []
    if not done:
        threads = saved["device"].partition(", threads: ")[2]
        kept += [f"{threads} threads"] if threads and threads != str(job.cpus) else []
        kept += [name for name in for_all if name in HARMLESS and name in settings and differs(saved.get(name), settings[name])]
        if saved.get("total_timesteps", 0) > job.steps:
            job.steps = saved["total_timesteps"]
            kept.append(f"total_timesteps ({job.steps:,})")
    if kept:
        print(f"warning: {run_dir} keeps the {', '.join(kept)} that it began with.", file=sys.stderr)
    if saved.get("snapshot_frequency") == 0 and float(settings.get("snapshot_frequency", 0)) > 0:
        print(f"warning: {run_dir} was begun without snapshots, so that its value bias cannot be measured.", file=sys.stderr)


def check_options(options: Options) -> None:
    """UserError for values that make no sense."""
    for name, least in (("seeds", 1), ("cpus_per_run", 1), ("first_seed", 0), ("gpus_per_run", 0), ("retries", 0)):
        value = getattr(options, name)
        if not least <= value < math.inf:
            raise UserError(f"{name} is {value}; it must be at least {least}.")
    for name in ("scripts", "env_ids", "variants"):
        if getattr(options, name) == ():
            raise UserError(f"{name} was given without a value; give one, or leave it out.")
    if options.total_timesteps is not None and options.total_timesteps < 1:
        raise UserError(f"total_timesteps is {options.total_timesteps}; it must be at least 1.")
    if options.gpus_per_run > 1 and options.gpus_per_run % 1:
        raise UserError(f"gpus_per_run is {options.gpus_per_run}; it must be at most 1 or a whole number.")
    if options.run_root.exists() and not options.run_root.is_dir():
        raise UserError(f"run_root {options.run_root} is not a folder.")
    if not options.scripts:
        check_environments(options.env_ids or ())


def check_environments(env_ids: tuple[str, ...]) -> None:
    """UserError for an id that Gymnasium does not know; what a module of one's own registers is known only to its runs."""
    import gymnasium as gym

    without_version = {name.rsplit("-v", 1)[0] for name in gym.registry}
    for env_id in env_ids:
        try:
            if ":" not in env_id and env_id not in without_version:
                gym.spec(env_id)
        except gym.error.Error as error:
            raise UserError(f"there is no environment {env_id!r}: {error}") from None


def run(options: Options, for_all: list[str]) -> int:
    """Check everything, then run the grid or print its commands; returns the exit code. Raises UserError."""
    check_options(options)
    for_all = flags_for_all(for_all)
    jobs = make_jobs(options, for_all)
    for job in jobs:
        check_existing(job, for_all)
    if not options.dry_run:
        return run_grid(options, jobs)
    for job in jobs:
        print("# finished" if is_done(job) else shlex.join(training_command(job)), flush=True)
    return 0


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = tyro.cli(Options, args=words[:end], description=__doc__)
    try:
        sys.exit(run(options, words[end + 1 :]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `| head` has read enough
        os._exit(0)
    except KeyboardInterrupt as stop:
        print(f"interrupted; the same command again goes on: {shlex.join(['python', *sys.argv])}", file=sys.stderr)
        sys.exit(128 + (stop.args or (signal.SIGINT,))[0])


if __name__ == "__main__":
    main()
