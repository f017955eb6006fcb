"""A machine with a GPU in three commands. Each takes at most --minutes and leaves one file in --out, to be sent back.

    python benchmark/gpu.py check
    python benchmark/gpu.py speed
    python benchmark/gpu.py train --env-ids Walker2d-v4 Hopper-v4 --seeds 4

check runs the tests that need a GPU, then all others as far as the time goes. speed times all modes and precisions at each
environment's sizes. train lets several runs share the GPU, evaluations deferred; the same command again goes on with all of them,
with the same scripts and on the same kind of device. When a run has been trained to its end,
`python rac_sac.py --resume runs/NAME` plays what is pending, on any machine. What follows a lone -- goes to pytest, to
throughput.py, or to the scripts. Without a GPU they do the same on the CPU. What an earlier call has left in --out is renamed.
"""

import contextlib
import csv
import datetime
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent / "speed"))
import run
import torch
import tyro
from job import Job, UserError, last_row, number, read_config, training_command
from measure import ROOT, about, fail, table, words

GRACE = 45.0  # seconds that are left to what is stopped, to end by itself
# Precision, modes and --loop-steps of a process each, the most telling first: what is done when the time is up is kept. Others
# are compared to the first mode of each; eager takes a tenth of a second a step.
SPEEDS = (
    ("auto", ("compile+graph", "compile+graph+fewer"), 500),
    ("high", ("compile+graph", "compile+graph+fewer"), 500),
    ("auto", ("compile+graph", "compile", "graph", "eager"), 50),
)
SPEEDS_WITHOUT_A_GPU = (("auto", ("compile", "eager"), 20), ("medium", ("compile",), 20))

GOES_ON = (0, 128 + signal.SIGTERM, -signal.SIGTERM)  # exit codes of a run that has ended or goes on; the last: not yet begun
SET_HERE = {"eval_workers", "max_pending_evaluations"}
STOPPED_BY: list[int] = []  # the signal after which nothing more is begun, if there was one


@dataclass
class Options:
    command: Annotated[Literal["check", "speed", "train"], tyro.conf.Positional]  # what to do
    out: Path = Path("results")  # the folder of the results
    minutes: float = 9.0  # after which nothing runs any more
    env_ids: tuple[str, ...] = ("Ant-v4",)  # speed: whose sizes; train: the environments
    scripts: tuple[str, ...] = ("rac_sac",)  # speed, train: the scripts
    seeds: int = 2  # train: runs of each script in each environment, with seeds 1, 2, ...
    total_timesteps: int | None = None  # train: environment steps of each run instead of the script's own
    run_root: Path = Path("runs")  # train: the folder of the run directories
    more: tyro.conf.Suppress[tuple[str, ...]] = ()  # what follows a lone --


def run_all(commands: list[list[str]], logs: list[Path], end: float, stop=signal.SIGTERM, **environment: str) -> list[int]:
    """Run commands side by side, their output in `logs`; returns their exit codes.

    They get the signal `stop` shortly before `end`, a time of time.monotonic(), or on Ctrl-C or SIGTERM, and are killed when that
    has not ended them, with all that they have started and left behind.
    """
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with open(log, "ab") as output:
            how = {"stdout": output, "stderr": output, "start_new_session": True}
            processes.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, **how))
    left = end - time.monotonic()
    try:
        wait_for(processes, end - min(GRACE, left / 2))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for process in processes:
            process.send_signal(stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            wait_for(processes, min(end, time.monotonic() + GRACE))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of its group
                os.killpg(process.pid, signal.SIGKILL)
    return [process.wait() for process in processes]


def note_signal(number: int, frame) -> None:
    """Ends what runs, see run_all(); what there is is written. A second one ends this program at once."""
    STOPPED_BY.append(number)
    raise KeyboardInterrupt


def wait_for(processes: list[subprocess.Popen], deadline: float) -> None:
    """subprocess.TimeoutExpired when not all of them have ended by then."""
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))


def check(options: Options, end: float) -> tuple[list[dict], list[Path], bool]:
    """A row for each test: its name, outcome and seconds."""
    rows, logs, well = [], [], True
    for name, selection in (("gpu", "cuda"), ("others", "not cuda and not benchmark")):
        if STOPPED_BY:
            break
        found = options.out / f"{name}.xml"
        found.unlink(missing_ok=True)
        logs.append(options.out / f"check-{name}.log")
        put_aside(logs[-1])
        command = [sys.executable, "-m", "pytest", "-m", selection, f"--junitxml={found.resolve()}", *options.more]
        (code,) = run_all([command], logs[-1:], end, signal.SIGINT)  # on which it writes what it has
        cases = list(ElementTree.parse(found).iter("testcase")) if found.exists() else []
        for case in cases:
            outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            rows.append(
                {"test": f"{case.get('classname')}::{case.get('name')}", "outcome": outcome, "seconds": float(case.get("time"))}
            )
        counted = {"tests": name, "passed": 0, "failure": 0, "error": 0, "skipped": 0}
        print(table([{**counted, **Counter(row["outcome"] for row in rows[len(rows) - len(cases) :])}]))
        if code not in (0, 5):  # 5: none was selected
            print(f"pytest ended with exit code {code}{', stopped before all tests were run' if code == 2 else ''}")
            well = False
    if not rows and not STOPPED_BY:
        fail(f"no test was run; {logs[0]} says why.")
    return rows, logs, well


def speed(options: Options, end: float) -> tuple[list[dict], list[Path], bool]:
    """A row for each script, mode, precision and environment, as throughput.py has it."""
    cuda = torch.cuda.is_available()
    rows, logs, well = [], [], True
    speeds = SPEEDS if cuda else SPEEDS_WITHOUT_A_GPU
    for (precision, modes, loop_steps), env_id in itertools.product(speeds, options.env_ids):
        if STOPPED_BY:
            break
        name = f"speed-{'-'.join(options.scripts)}-{env_id}-{precision}-{len(modes)}".replace("/", "_").replace(":", "_")
        folder = options.out / name
        put_aside(folder)
        folder.mkdir()
        command = [sys.executable, "benchmark/speed/throughput.py", "--env-id", env_id, "--out", str(folder.resolve())]
        command += ["--matmul-precision", precision, "--modes", *modes, "--scripts", *options.scripts, "--repeats", "3"]
        command += ["--loop-steps", str(loop_steps)]
        logs.append(folder / "speed.log")
        (code,) = run_all([[*command, *options.more]], logs[-1:], end)
        print(logs[-1].read_text(), flush=True)
        found = folder / "throughput.json"
        if code == 0 and found.exists():
            measured = json.loads(found.read_text())
            rows += [{"env_id": env_id, **row} for row in measured["rows"]]
            well = well and not measured["left_out"]
        else:
            print(f"throughput.py ended with exit code {code}; {logs[-1]} says why, if the time was not up", file=sys.stderr)
            well = False
    return rows, logs, well


def jobs_of(options: Options) -> tuple[int, list[Job]]:
    """Cores of each run of train, and the runs; UserError where they cannot be begun or gone on with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // (options.seeds * len(options.env_ids) * len(options.scripts)))
    grid = run.Options(
        scripts=tuple(ROOT / f"{script}.py" for script in options.scripts),
        env_ids=options.env_ids,
        seeds=options.seeds,
        total_timesteps=options.total_timesteps,
        run_root=options.run_root,
        cpus_per_run=share,
        gpus_per_run=float(torch.cuda.is_available()),
    )
    run.check_options(grid)
    run.check_environments(options.env_ids)
    more = run.flags_for_all(list(options.more))
    for name in SET_HERE & more.keys():
        raise UserError(f"{name} after -- is not accepted, because it follows from the machine's cores.")
    jobs = run.make_jobs(grid, more)
    for job in jobs:
        run.check_existing(job, more)
    return share, jobs


def train(options: Options, end: float) -> tuple[list[dict], list[Path], bool]:
    """A row for each run: its step, its steps per second in this call, the last evaluation played."""
    share, jobs = jobs_of(options)
    deferred = ["--eval-workers", str(max(1, share - 1)), "--max-pending-evaluations", "1000000"]  # also of a run that goes on
    commands = [[*training_command(job, sys.executable), *deferred] for job in jobs]
    logs = [job.log for job in jobs]
    before = [last_row(job.run_dir, "train.csv") for job in jobs]
    codes = run_all(commands, logs, end, OMP_NUM_THREADS=str(share))
    rows = []
    for job, old, code in zip(jobs, before, codes, strict=True):
        evaluated = last_row(job.run_dir, "eval.csv")
        rows.append(
            {
                "run": job.name,
                "exit_code": code,
                "global_step": int(number(last_row(job.run_dir, "train.csv"), "global_step")),
                "steps_per_second": learning_speed(job, int(number(old, "global_step"))) if code in GOES_ON else 0.0,
                "evaluated_step": evaluated.get("global_step", ""),
                "best_return": evaluated.get("eval/best_return", ""),
            }
        )
    print(table(rows))
    print(f"together {sum(row['steps_per_second'] for row in rows):.1f} steps per second while learning, without compiling")
    ended_by = f"exit code {128 + signal.SIGTERM}: stopped with a checkpoint, the same command goes on"
    print(f"logs: {options.run_root.resolve()}/*.log; {ended_by}")
    files = [Path(job.run_dir, file) for job in jobs for file in ("eval.csv", "train.csv", "config.json")]
    return rows, [*logs, *files], all(code in GOES_ON for code in codes)


def learning_speed(job: Job, begun_at: int) -> float:
    """Median steps per second of the rows of train.csv that learn, since the step `begun_at`; 0 where there is none.

    The first of them, in which the updates may have been compiled, does not count.
    """
    start = number(job.settings, "learning_starts", number(read_config(job.run_dir) or {}, "learning_starts"))
    with contextlib.suppress(OSError), open(Path(job.run_dir, "train.csv"), newline="") as file:
        rows = [row for row in csv.DictReader(file) if number(row, "global_step") > max(start, begun_at)]
        return round(statistics.median([number(row, "charts/SPS") for row in rows[1:]] or [0.0]), 2)
    return 0.0


def put_aside(path: Path) -> None:
    """Rename what an earlier call has left, so that it is not lost."""
    if path.exists():
        changed = datetime.datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d-%H-%M-%S-%f")
        path.replace(path.with_name(f"{path.stem}-of-{changed}{path.suffix}"))


def write(options: Options, machine: dict, rows: list[dict], files: list[Path]) -> Path:
    """All that was found, and the text of the files beside it, as one file."""
    texts = {str(path): path.read_text(errors="replace")[-1_000_000:] for path in files if path.exists()}
    path = options.out / f"{options.command}.json"
    temporary = path.with_suffix(".tmp")
    content = {"machine": machine, "options": asdict(options), "rows": rows, "files": texts}
    temporary.write_text(json.dumps(content, indent=2, default=str) + "\n")
    put_aside(path)
    temporary.replace(path)
    return path


def check_options(options: Options) -> None:
    """Ends with one sentence, or raises UserError, where the options make no sense."""
    if not 0 < options.minutes < math.inf or options.seeds < 1 or not all((options.env_ids, options.scripts)):
        fail("minutes must be above 0, seeds at least 1, and env_ids and scripts must name something.")
    if options.command == "check":
        return
    for script in options.scripts:
        if not (ROOT / f"{script}.py").is_file():
            fail(f"there is no script {script}.py; give names such as rac_sac.")
    if options.command == "train":
        jobs_of(options)


def run_command(options: Options) -> int:
    """Do what the command line asks for; returns the exit code."""
    end = time.monotonic() + 60 * options.minutes
    check_options(options)
    try:
        for folder in (options.out, options.run_root) if options.command == "train" else (options.out,):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{folder} cannot be made: {error.strerror}.")
    for stops in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored, which tests would inherit
        signal.signal(stops, note_signal)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored: by nohup
        signal.signal(signal.SIGHUP, note_signal)
    machine = about(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(words(machine), flush=True)
    try:
        rows, files, well = {"check": check, "speed": speed, "train": train}[options.command](options, end)
        print(f"to send back: {write(options, machine, rows, files)}")
    except KeyboardInterrupt:
        well = False
    if STOPPED_BY:
        return 128 + STOPPED_BY[0]
    return 0 if well else 1


def main() -> None:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = tyro.cli(Options, args=arguments[:split], description=__doc__)
    options.more = tuple(arguments[split + 1 :])
    try:
        sys.exit(run_command(options))
    except UserError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
