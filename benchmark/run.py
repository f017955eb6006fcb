"""Run an experiment of experiments.py (variants x environments x seeds) as Ray tasks, from one core to a cluster.

    python benchmark/run.py --experiment main --seeds 8
    python benchmark/run.py --experiment main --seeds 8 --gpus-per-run 0.25 --cpus-per-run 4
    python benchmark/run.py --experiment main --seeds 8 --address auto --run-root /shared/runs

Each run is the script itself, in a process of its own, under a run name that follows from variant, environment and seed. The
same command again goes on: finished runs are left alone, others are resumed from their checkpoints. A run whose worker or
node dies is retried from its checkpoint; when it has failed for good the others go on. Ctrl-C stops all with a checkpoint.

What follows a lone -- goes to every script: `-- --track --utd 5`. Flags that change what is learned become part of the runs'
names, so that they are never mixed up with runs of the experiment's own settings.
"""

import contextlib
import csv
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from experiments import (
    EXPERIMENTS,
    HARMLESS,
    ROOT,
    STEPS,
    SWEEPS,
    differs,
    expected,
    given,
    members,
    of_environment,
    of_script,
    script_defaults,
)

# What run.py sets for each run itself, and how to choose it.
RESERVED = {
    "env_id": "use --env-ids", "seed": "use --seeds and --first-seed", "total_timesteps": "use --total-timesteps before --",
    "run_root": "use --run-root before --", "run_name": "it follows from variant, environment and seed",
    "exp_name": "it is the variant's name", "cuda": "use --gpus-per-run", "resume": "the same command again goes on",
    "evaluate": "every run is evaluated at its end", "help": "ask the script",
}  # fmt: skip
# The child dies with its parent: Linux sends it SIGTERM, on which a script writes its checkpoint. Then it becomes the script.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("its Ray worker died")
os.execv(sys.argv[2], sys.argv[2:])
"""


class UserError(Exception):
    """A mistake of the user: shown as one sentence, exit code 2."""


@dataclass
class Options:
    experiment: Literal[tuple(EXPERIMENTS)]
    """what to run; benchmark/experiments.py lists them"""
    seeds: int = 8
    """runs of each variant in each environment, with the seeds first_seed, first_seed + 1, ..."""
    first_seed: int = 1
    """the first seed"""
    run_root: Path = Path("runs")
    """the folder of the run directories; on a cluster, storage that all nodes share under this path"""
    env_ids: tuple[str, ...] = ()
    """these environments instead of the experiment's"""
    variants: tuple[str, ...] = ()
    """only these variants, by experiment name"""
    total_timesteps: int | None = None
    """environment steps of each run instead of the experiment's"""
    address: str | None = None
    """an existing Ray cluster: auto, or ray://host:port; by default a Ray of its own on this machine"""
    cpus_per_run: int = 1
    """cores of each run: its training threads; half of them, at least one, are also its number of evaluation workers"""
    gpus_per_run: float = 0.0
    """share of a GPU for each run; 0 trains on the CPU"""
    retries: int = 3
    """how often a run that died is retried from its checkpoint"""
    dry_run: bool = False
    """print the commands and do nothing"""


def flags_for_all(words: list[str]) -> dict[str, str]:
    """The arguments after the lone -- by field name; raises UserError for one that run.py sets itself, or a stray word."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for before, word in zip(["", *words], words, strict=False):
        if not word.startswith("--") and not before.startswith("--"):
            raise UserError(f"{word!r} after -- belongs to no argument; give arguments of the scripts such as --track.")
    found = given(words)
    for name in found:
        if name in RESERVED:
            raise UserError(f"{name} after -- is not accepted, because each run has its own; {RESERVED[name]}.")
    return found


def make_jobs(options: Options, for_all: dict[str, str]) -> list[dict]:
    """One dict for each run of the grid: name, run_dir, steps, script, arguments of a fresh start; seeds outermost."""
    suffix = "".join(f"+{name}_{value}" for name, value in sorted(for_all.items()) if name not in HARMLESS)
    if options.experiment in SWEEPS and SWEEPS[options.experiment][1] in for_all:
        raise UserError(f"{SWEEPS[options.experiment][1]} after -- is what the runs of {options.experiment} differ in.")
    _, _, env_ids, common = EXPERIMENTS[options.experiment]
    env_ids = dict.fromkeys(options.env_ids or env_ids)
    known = {name for env_id in env_ids for name, *_ in members(options.experiment, env_id)}
    unknown = [name for name in options.variants if name not in known]
    if unknown:
        raise UserError(f"{options.experiment} has no variant {unknown[0]}; it has {', '.join(sorted(known))}.")
    jobs = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for env_id in env_ids:
            for variant, script, flags in members(options.experiment, env_id):
                if options.variants and variant not in options.variants:
                    continue
                steps = given(common).get("total_timesteps") or of_environment(STEPS, env_id)
                steps = steps if options.total_timesteps is None else options.total_timesteps
                name = f"{env_id}__{variant}{suffix}__{seed}".replace("/", "_").replace(":", "_")
                # The baselines have no beta, compiler or workers: what says how a run is done is for the scripts that have it.
                mine = {key: value for key, value in for_all.items() if key not in HARMLESS or key in script_defaults(script)}
                settings = {**of_script(given(common), script), **given(flags), **mine, "total_timesteps": str(steps)}
                settings |= {"env_id": env_id, "seed": str(seed), "exp_name": variant + suffix}
                settings["cuda"] = str(options.gpus_per_run > 0)
                if "eval_workers" in script_defaults(script):
                    settings.setdefault("eval_workers", str(max(1, options.cpus_per_run // 2)))
                run_dir = options.run_root.resolve() / name
                arguments = ["--run-root", str(run_dir.parent), "--run-name", name]
                for field, value in settings.items():
                    flag, switch = field.replace("_", "-"), value in ("True", "False") and field != "cuda"  # cuda may be None
                    arguments += [f"--{flag}" if value == "True" else f"--no-{flag}"] if switch else [f"--{flag}", value]
                jobs.append({"name": name, "run_dir": str(run_dir), "script": str(ROOT / script), "steps": int(steps),
                             "arguments": arguments, "settings": settings, "cpus": options.cpus_per_run, "attempt": 0,
                             "learning_starts": int(settings.get("learning_starts", 5000))})  # fmt: skip
    return jobs


def last_row(path: Path) -> dict:
    """The last whole row of a CSV file that is being written, {} before there is one."""
    try:
        with open(path, "rb") as file:
            header = file.readline().decode().strip().split(",")
            file.seek(max(file.tell(), os.path.getsize(path) - 65536))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is not whole
        return dict(zip(header, next(csv.reader([lines[-1].decode()])), strict=True)) if lines and lines[-1] else {}
    except (OSError, ValueError):
        return {}


def last_step(run_dir: str, name: str) -> int:
    """The step in the last whole row of a run's CSV file, 0 before there is one."""
    try:
        return int(last_row(Path(run_dir) / name).get("global_step", 0))
    except ValueError:
        return 0


def read_config(run_dir: Path) -> dict | None:
    """The arguments in a run directory's config.json; None where there is no readable one."""
    try:
        config = json.loads((run_dir / "config.json").read_text())
        return {**config["args"], "script": config["script"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_existing(job: dict, for_all: dict[str, str]) -> str | None:
    """Raise UserError if the job's run directory is of other settings, or is something else.

    Returns a sentence about what a resumed run keeps of its own, which the grid would have otherwise; None if nothing.
    """
    run_dir, settings = Path(job["run_dir"]), job["settings"]
    if not run_dir.exists():
        return None
    saved = read_config(run_dir)
    if saved is None and not (run_dir / "checkpoint.pt").exists():
        return None
    if saved is None:
        raise UserError(f"{run_dir} is there but has no readable config.json; move it away or choose another --run-root.")
    for name, value in {**(expected(settings["exp_name"], settings["env_id"]) or {}), **settings}.items():
        other = name in saved and differs(saved[name], value)
        if other and (name not in (*HARMLESS, "total_timesteps") or (name == "cuda" and saved["cuda"] is not None)):
            raise UserError(f"{run_dir} was made with {name} {saved[name]}, and this grid wants {value}; "
                            "move it away or choose another --run-root.")  # fmt: skip
    late = [name for name in for_all if name in HARMLESS and name in settings and differs(saved.get(name), for_all[name])]
    if saved.get("total_timesteps", 0) > job["steps"] and last_step(job["run_dir"], "eval.csv") < saved["total_timesteps"]:
        late.append(f"total_timesteps ({saved['total_timesteps']:,})")
    return f"{run_dir} keeps the {', '.join(late)} that it began with." if late and not is_done(job) else None


def is_done(job: dict) -> bool:
    """Trained as far as the grid asks, and its final policies evaluated on fresh episodes."""
    return all(last_step(job["run_dir"], name) >= job["steps"] for name in ("eval.csv", "evaluate.csv"))


def training_command(job: dict, python: str = "python") -> list[str]:
    """A fresh start, or going on from the checkpoint where there is one."""
    saved = read_config(Path(job["run_dir"]))
    if saved is None or not (Path(job["run_dir"]) / "checkpoint.pt").exists():
        return [python, job["script"], *job["arguments"]]
    steps = max(job["steps"], saved.get("total_timesteps") or 0)
    return [python, job["script"], "--resume", job["run_dir"], "--total-timesteps", str(steps)]


def run_job(job: dict) -> dict:
    """In a Ray worker: train (or go on), then evaluate on fresh episodes; returns code, 0 when done, and a message.

    The script's process gets SIGTERM, and writes its checkpoint, when the driver's stop file appears or this worker dies.
    """
    import filelock

    run_dir, log = Path(job["run_dir"]), Path(job["run_dir"] + ".log")
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:  # also tells the driver that this job has left the queue
        file.write(f"--- attempt {job['attempt'] + 1} on {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        began = file.tell()
    if run_dir.exists():  # its process of before may still be writing its checkpoint
        try:
            with filelock.FileLock(run_dir / ".lock").acquire(timeout=120):
                pass
        except filelock.Timeout:
            return {"code": 1, "message": "the run directory is in use by another process"}
    fresh, stop_file = not (run_dir / "checkpoint.pt").exists(), Path(job["stop_file"])
    # A run that was trained to its end is resumed too: it ends at once, with the checkpoint that is then evaluated.
    for command in (training_command(job, sys.executable), [sys.executable, job["script"], "--evaluate", job["run_dir"]]):
        code = 1 if stop_file.exists() else run_process(command, log, job["cpus"], stop_file)
        if code:
            break
    if stop_file.exists():
        return {"code": 1, "message": "stopped"}
    with open(log, "rb") as file:
        file.seek(began)
        lines = [line.strip("│ ") for line in file.read().decode(errors="replace").replace("\r", "\n").splitlines()]
    if code < 0:
        return {"code": 1, "message": f"killed by signal {-code}"}
    if code:
        lines = [line for line in lines if any(c.isalnum() for c in line)] or ["it said nothing"]
        said = [line for line in lines if line.startswith(("error:", "Unrecognized"))] or lines
        # Arguments stay wrong, but a directory that a dying process of this run has made or holds is fit for the next attempt.
        passing = code == 2 and ((fresh and (run_dir / "checkpoint.pt").exists()) or "in use by another process" in said[-1])
        return {"code": 1 if passing else code, "message": f"exit code {code}: {said[-1]}"}
    return {"code": 0, "message": ""} if is_done(job) else {"code": 1, "message": "exit code 0, but the run is not finished"}


def run_process(command: list[str], log: Path, threads: int, stop_file: Path) -> int:
    """Run a command with its output appended to `log`; returns its exit code, minus the signal's number if it was killed.

    It gets SIGTERM when stop_file appears: a file on the shared storage reaches every node, and unlike an exception that is
    raised in the middle of other code it cannot be lost.
    """
    if sys.platform == "linux":
        command = [sys.executable, "-c", DIE_WITH_PARENT, str(os.getpid()), *command]
    with open(log, "ab") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                                   env={**os.environ, "OMP_NUM_THREADS": str(threads)})  # fmt: skip
    try:
        while process.poll() is None and not stop_file.exists():
            time.sleep(0.3)
    finally:  # Ray may also end a task by an exception
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
    return process.wait()


def as_float(text: str | None, otherwise: float | None = 0.0) -> float | None:
    """A cell of a CSV file that may be empty or missing."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return otherwise


class Driver:
    """Submits the jobs, retries those that die, and shows how they stand."""

    def __init__(self, options: Options, jobs: list[dict], ray):
        self.options, self.jobs, self.ray = options, jobs, ray
        self.task = ray.remote(num_cpus=options.cpus_per_run, num_gpus=options.gpus_per_run, max_retries=0)(run_job)
        self.done = [job for job in jobs if is_done(job)]
        self.stop_file = options.run_root.resolve() / f".stop-{socket.gethostname()}-{os.getpid()}"
        with contextlib.suppress(OSError):
            self.stop_file.unlink()  # of a driver that was killed while it stopped, in a container like this one
        self.failed, self.running = [], {}  # running: task -> job, waiting for a free place included

    def submit(self, job: dict) -> None:
        job["stop_file"] = str(self.stop_file)
        job["submitted"], job["step"] = time.time(), last_step(job["run_dir"], "train.csv")
        self.running[self.task.options(name=job["name"]).remote(job)] = job

    def poll(self, say) -> None:
        """Wait up to two seconds for tasks to end; retry or give up those that failed."""
        ended, _ = self.ray.wait(list(self.running), num_returns=1, timeout=2.0)
        for task in ended:
            job = self.running.pop(task)
            try:
                result = self.ray.get(task)
            except self.ray.exceptions.RayTaskError as error:  # run_job itself failed: a full disk, a missing package
                result = {"code": 1, "message": (str(error.cause or error).strip() or repr(error.cause)).splitlines()[-1]}
            except self.ray.exceptions.RayError as error:
                result = {"code": 1, "message": f"its Ray worker or node died ({type(error).__name__})"}
            if result["code"] == 0:
                self.done.append(job)
                say(f"done: {job['name']}")
            elif result["code"] == 2 or job["attempt"] == self.options.retries:  # 2: wrong arguments stay wrong
                self.failed.append({**job, "message": result["message"]})
                say(f"failed: {job['name']}: {result['message']} (log: {job['run_dir']}.log)")
            else:
                job["attempt"] += 1
                say(f"retry {job['attempt']} of {self.options.retries}: {job['name']}: {result['message']}")
                self.submit(job)

    def stop(self, say) -> None:
        """Let every script write its checkpoint and end; take back what still waits."""
        say("stopping; every run writes its checkpoint")
        if not self.running:
            return
        self.stop_file.parent.mkdir(parents=True, exist_ok=True)
        self.stop_file.touch()
        try:
            begun = {row["name"] for row in self.progress()}
            for task, job in self.running.items():
                if job["name"] not in begun:
                    self.ray.cancel(task)
            self.ray.wait(list(self.running), num_returns=len(self.running), timeout=150)
        finally:
            self.stop_file.unlink(missing_ok=True)

    def progress(self) -> list[dict]:
        """Name, step, steps, sps and last best return of every run that a worker has taken and not ended."""
        rows = []
        for job in self.running.values():
            log = Path(job["run_dir"] + ".log")
            if log.exists() and log.stat().st_mtime >= job["submitted"]:
                train, evaluation = (last_row(Path(job["run_dir"]) / f"{name}.csv") for name in ("train", "eval"))
                job["step"] = last_step(job["run_dir"], "train.csv")
                rows.append({"name": job["name"], "step": job["step"], "steps": job["steps"],
                             "sps": as_float(train.get("charts/SPS")),
                             "best": as_float(evaluation.get("eval/best_return"), None)})  # fmt: skip
        return rows

    def seconds_left(self, rows: list[dict]) -> float | None:
        """Learned steps that are left over the steps per second of all that learn now, and no less than any run's own rest."""
        if not self.running:
            return 0.0
        jobs = {job["name"]: job for job in self.running.values()}
        left = {name: max(0, job["steps"] - max(job["step"], job["learning_starts"])) for name, job in jobs.items()}
        rates = {row["name"]: row["sps"] for row in rows if row["step"] > jobs[row["name"]]["learning_starts"] and row["sps"] > 0}
        if not rates:
            return None
        return max(sum(left.values()) / sum(rates.values()), *(left[name] / rate for name, rate in rates.items()))

    def line(self, rows: list[dict]) -> str:
        left = self.seconds_left(rows)
        eta = "?" if left is None else f"{int(left // 3600)} h {int(left % 3600 // 60):02d} min"
        steps = sum(min(job["step"], job["steps"]) for job in self.running.values()) + sum(job["steps"] for job in self.done)
        total = sum(job["steps"] for job in self.jobs)
        waiting = len(self.running) - len(rows)
        return (f"done {len(self.done)} · running {len(rows)} · waiting {waiting} · failed {len(self.failed)} of {len(self.jobs)}"
                f" · {steps / total:.1%} of the steps · ETA {eta}")  # fmt: skip


def show(driver: Driver, stopped: list[int]) -> None:
    """Submit what is not done and poll until nothing runs any more, or until a signal's number is in `stopped`.

    A live table in a terminal, else a line whenever something happens and every minute.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def picture() -> Group:
        rows = driver.progress()
        table = Table(box=None, header_style="bold")
        for name in ("run", "step", "of", "steps/s", "best return"):
            table.add_column(name, justify="left" if name == "run" else "right")
        for row in rows[: max(3, console.height - 6)]:
            best = "" if row["best"] is None else f"{row['best']:.0f}"
            rate = f"{row['sps']:.1f}" if row["step"] < row["steps"] else "evaluating"
            table.add_row(row["name"], f"{row['step']:,}", f"{row['steps']:,}", rate, best)
        return Group(Text(driver.line(rows)), table)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    live = Live(picture(), console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    for job in driver.jobs:
        if job not in driver.done:
            driver.submit(job)
    with live or contextlib.nullcontext():
        shown = 0.0
        while driver.running and not stopped:
            if live:
                live.update(picture(), refresh=True)
            elif time.time() - shown > 60:
                shown = time.time()
                say(driver.line(driver.progress()))
            driver.poll(say)
    if stopped:
        driver.stop(say)


def check_resources(options: Options, ray) -> None:
    """Raise UserError when no node that is there now could ever take a run."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    wanted = {"CPU": options.cpus_per_run, "GPU": options.gpus_per_run}
    if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
        offered = "; ".join(f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise UserError(f"a run wants {options.cpus_per_run} cores and {options.gpus_per_run:g} GPUs, "
                        f"and no node has them ({offered}).")  # fmt: skip


def run_grid(options: Options, jobs: list[dict]) -> int:
    """Run what is not done yet; returns the exit code."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    # A Ray worker that ends kills its children at once; ours get SIGTERM instead and write their checkpoints.
    local = {"address": "local", "include_dashboard": False, "_system_config": {"kill_child_processes_on_worker_exit": False}}
    wandb = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}  # for workers started elsewhere
    address = {"address": options.address, "runtime_env": {"env_vars": wandb}} if options.address else local
    try:
        ray.init(**address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        failed = f"no Ray cluster answers at {options.address}" if options.address else "Ray does not start on this machine"
        raise UserError(f"{failed}: {(str(error) or repr(error)).splitlines()[0]}") from None
    stopped = []

    def stop(number, frame) -> None:  # an exception could be raised, and lost, in the middle of Ray's code
        if stopped:
            raise KeyboardInterrupt  # the second Ctrl-C waits for nothing
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):  # a cluster's scheduler sends SIGTERM before its time limit
        signal.signal(number, stop)
    try:
        check_resources(options, ray)
        driver = Driver(options, jobs, ray)
        finished = len(driver.done)
        if finished:
            print(f"{finished} of {len(jobs)} runs are finished already")
        show(driver, stopped)
        if stopped:
            raise KeyboardInterrupt
        print(driver.line([]))
        for job in driver.failed:
            print(f"failed: {job['name']}: {job['message']}", file=sys.stderr)
        print(f"report: python benchmark/report.py {options.run_root} --out report")
        return 1 if driver.failed else 0
    finally:
        ray.shutdown()


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = tyro.cli(Options, args=words[:end], description=__doc__)
    try:
        if options.seeds < 1 or options.cpus_per_run < 1 or options.gpus_per_run < 0 or options.retries < 0:
            raise UserError("seeds and cpus_per_run must be at least 1, gpus_per_run and retries must not be negative.")
        if options.total_timesteps is not None and options.total_timesteps < 1:
            raise UserError(f"total_timesteps is {options.total_timesteps}; it must be at least 1.")
        if options.gpus_per_run > 1 and options.gpus_per_run % 1:
            raise UserError(f"gpus_per_run is {options.gpus_per_run}; it must be at most 1 or a whole number.")
        if options.run_root.exists() and not options.run_root.is_dir():
            raise UserError(f"run_root {options.run_root} is not a folder.")
        for_all = flags_for_all(words[end + 1 :])
        jobs = make_jobs(options, for_all)
        for job in jobs:
            too_late = check_existing(job, for_all)
            if not is_done(job):  # a run that was begun for more steps goes on to them
                job["steps"] = max(job["steps"], (read_config(Path(job["run_dir"])) or {}).get("total_timesteps") or 0)
            if too_late:
                print(f"warning: {too_late}", file=sys.stderr)
        if options.dry_run:
            for job in jobs:
                print("# finished" if is_done(job) else shlex.join(training_command(job)))
            return
        code = run_grid(options, jobs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(f"interrupted; the same command again goes on: {shlex.join(['python', *sys.argv])}")
    sys.exit(code)


if __name__ == "__main__":
    main()
