"""One run of a grid: what its run directory says of it, and how a Ray worker brings it to its end."""

import contextlib
import csv
import dataclasses
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from experiments import ROOT

# Of one measurement of the value bias, by the paper: state-action pairs that are collected; those of them that it is continued
# from; continuations from each; their steps.
BIAS_SIZES = {"pairs": 100, "chosen": 20, "continuations": 20, "max_steps": 1500}


class UserError(Exception):
    """A mistake of the user: shown as one sentence, exit code 2."""


@dataclasses.dataclass
class Job:
    """One run of a grid."""

    name: str
    run_dir: str  # absolute
    script: str  # absolute
    arguments: list[str]  # of a fresh start
    settings: dict[str, str]  # the same by field name
    steps: int  # environment steps
    cpus: int  # cores, and training threads
    sha256: str = ""  # of the script when the grid was made
    own: bool = False  # whether the script is somebody's own
    value_bias: str = ""  # the program that measures the value bias
    stop_file: str | None = None  # once there is such a file, programs are stopped

    @property
    def is_stopped(self) -> bool:
        return self.stop_file is not None and Path(self.stop_file).exists()

    @property
    def log(self) -> Path:
        return Path(f"{self.run_dir}.log")


def last_row(run_dir: str, name: str) -> dict[str, str]:
    """The last whole row of a run's CSV file, which may be growing; {} before there is one."""
    path = Path(run_dir) / name
    try:
        with open(path, "rb") as file:
            header = file.readline().decode().strip().split(",")
            file.seek(max(file.tell(), os.path.getsize(path) - 65536))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is not whole
        return dict(zip(header, lines[-1].decode().strip().split(","), strict=True))
    except (OSError, ValueError, IndexError):
        return {}


def number(row: dict[str, str], name: str, otherwise: float | None = 0.0) -> float | None:
    """A cell of a CSV file that may be empty or missing."""
    try:
        return float(row.get(name, ""))
    except ValueError:
        return otherwise


def last_step(run_dir: str, name: str) -> int:
    """The step in the last whole row of a run's CSV file, 0 before there is one."""
    return int(number(last_row(run_dir, name), "global_step"))


def read_config(run_dir: str) -> dict | None:
    """The arguments in a run's config.json, with script, script_sha256 and device; None where there is no readable one."""
    try:
        config = json.loads((Path(run_dir) / "config.json").read_text())
        found = {name: str(config.get(name) or "") for name in ("script_sha256", "device")}
        return {**config["args"], "script": config["script"], **found}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def snapshots_of(run_dir: str | Path) -> dict[int, Path]:
    """The snapshots of a run by their steps, in order."""
    found = {int(path.stem.removeprefix("step-")): path for path in Path(run_dir, "snapshots").glob("step-*.pt")}
    return dict(sorted(found.items()))


def measured_bias(run_dir: str | Path, sizes: dict[str, int]) -> list[dict[str, str]]:
    """The whole rows of a run's bias.csv that were measured with these sizes."""
    wanted = {name: str(value) for name, value in sizes.items()}
    try:
        with open(Path(run_dir) / "bias.csv", newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row.values() and wanted.items() <= row.items()]
    except OSError:
        return []


def unmeasured(run_dir: str | Path) -> set[int]:
    """The steps of a run's snapshots of which bias.csv has no row with the paper's sizes."""
    return snapshots_of(run_dir).keys() - {int(row["global_step"]) for row in measured_bias(run_dir, BIAS_SIZES)}


def what_is_missing(job: Job) -> str:
    """What a run lacks to be trained as far as the grid asks, evaluated on fresh episodes, and its value bias measured; or ""."""
    for name in ("eval.csv", "evaluate.csv"):
        step = last_step(job.run_dir, name)
        if step < job.steps:
            return f"its {name} ends at step {step} of {job.steps}"
    missing = unmeasured(job.run_dir)
    return f"its bias.csv has no row of step {min(missing)}" if missing else ""


def is_done(job: Job) -> bool:
    return not what_is_missing(job)


def training_command(job: Job, python: str = "python") -> list[str]:
    """A fresh start, or going on from the checkpoint where there is one."""
    saved = read_config(job.run_dir)
    if saved is None or not (Path(job.run_dir) / "checkpoint.pt").exists():
        return [python, job.script, *job.arguments]
    steps = max(job.steps, saved.get("total_timesteps") or 0)
    return [python, job.script, "--resume", job.run_dir, "--total-timesteps", str(steps)]


def run_job(job: Job) -> str:
    """In a Ray worker: train (or go on), evaluate, measure the bias; returns "" when done, or what is wrong and would stay wrong.

    Raises RuntimeError for what another attempt may mend. What the programs say goes into the run's log.
    """
    import filelock

    log = job.log
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        file.write(f"\n--- on {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        began = file.tell()
    run_dir = Path(job.run_dir)
    if run_dir.exists():  # its process of before may still be writing its checkpoint
        try:
            with filelock.FileLock(run_dir / ".lock", timeout=120):
                pass
        except filelock.Timeout:
            raise RuntimeError("the run directory is in use by another process") from None
    if hashlib.sha256(Path(job.script).read_bytes()).hexdigest() != job.sha256:
        return f"{job.script} has changed since this grid was started, and its runs would not be of one script"
    fresh = not (run_dir / "checkpoint.pt").exists()
    code = run_programs(job)
    if job.is_stopped:
        return "stopped"
    if code == 0 and is_done(job):
        return ""
    if code <= 0:
        unfinished = f"exit code 0, but the run is not finished: {what_is_missing(job)}"
        raise RuntimeError(f"killed by signal {-code}" if code else unfinished)
    message = f"exit code {code}: {last_words(log, began)}"
    # Arguments stay wrong, but a directory that a dying process of this run has made or holds is fit for the next attempt.
    if code == 2 and not (fresh and (run_dir / "checkpoint.pt").exists()) and "in use by another process" not in message:
        return message
    raise RuntimeError(message)


def run_programs(job: Job) -> int:
    """Training, evaluation, and the value bias where it is not measured; returns the exit code of the last one."""
    # A run that was trained to its end is resumed too: it ends at once, with the checkpoint that is then evaluated.
    code = run_process(training_command(job, sys.executable), job)
    if code == 0:
        workers = ["--eval-workers", str(job.cpus)] if "eval_workers" in job.settings else []
        code = run_process([sys.executable, job.script, "--evaluate", job.run_dir, *workers], job)
    if code == 0 and unmeasured(job.run_dir):
        code = run_process([sys.executable, job.value_bias, job.run_dir, "--workers", str(job.cpus)], job)
    return code


def last_words(log: Path, began: int) -> str:
    """What a log says of a failure, from the position `began` on."""
    lines = [line.strip("│ ") for line in log.read_bytes()[began:].decode(errors="replace").splitlines()]
    lines = [line for line in lines if any(c.isalnum() for c in line)] or ["it said nothing"]
    said = [line for line in lines if line.startswith(("error:", "Unrecognized", "Error parsing"))] or lines
    return said[-1]


def python_path(job: Job) -> str:
    """Where all programs of a run look for modules: beside its script first, and last in the project's folder."""
    return os.pathsep.join(filter(None, (str(Path(job.script).parent), os.environ.get("PYTHONPATH"), str(ROOT))))


def run_process(command: list[str], job: Job) -> int:
    """Run a command with its output appended to the job's log; returns its exit code, minus the signal's number if killed.

    It gets SIGTERM, on which a script writes its checkpoint, when this worker dies or stop_file appears: a file on the shared
    storage reaches every node, and unlike an exception that is raised in the middle of other code it cannot be lost.
    """
    if shutil.which("setpriv"):  # of util-linux, on every Linux
        command = ["setpriv", "--pdeathsig", "TERM", *command]
    with open(job.log, "ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(job.cpus), "PYTHONPATH": python_path(job)},
        )
    try:
        while process.poll() is None and not job.is_stopped:
            time.sleep(0.3)
    finally:  # Ray may also end a task by an exception
        process.terminate()  # does nothing to one that has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=120)
        process.kill()
    return process.wait()
