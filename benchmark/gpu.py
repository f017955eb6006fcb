"""A machine with a GPU in three commands, each of at most --minutes; without a GPU they do the same on the CPU.

    python benchmark/gpu.py check --out results/
    python benchmark/gpu.py speed --out results/
    python benchmark/gpu.py train --out results/ --env-ids Walker2d-v4 Hopper-v4 --seeds 4 --run-root runs

check runs the tests, those of CUDA included. speed times all modes and precisions at each environment's sizes. train lets several
runs share the GPU, evaluations deferred; the same command again goes on with all of them, and when a run has been trained to its
end `python rac_sac.py --resume runs/NAME` plays what is pending, on any machine. Each leaves <command>.csv and <command>.json in
--out. What follows a lone -- goes to pytest, to throughput.py, or to the scripts.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent / "speed"))
import torch
import tyro
from experiments import HOUSEKEEPING, given
from job import last_row, number
from measure import ROOT, about, fail, table, words, write


@dataclass
class Options:
    command: Annotated[Literal["check", "speed", "train"], tyro.conf.Positional]  # what to do
    out: Path = Path("results")  # the folder of the results
    minutes: float = 9.0  # after which what is running is stopped
    env_ids: tuple[str, ...] = ("Ant-v4",)  # speed: whose sizes; train: the environments
    scripts: tuple[str, ...] = ("rac_sac",)  # speed, train: the scripts
    seeds: int = 2  # train: runs of each script in each environment, with seeds 1, 2, ...
    run_root: Path = Path("runs")  # train: the folder of the run directories
    more: tyro.conf.Suppress[tuple[str, ...]] = ()  # what follows a lone --


def run_all(commands: list[list[str]], logs: list[Path], seconds: float, stop=signal.SIGTERM, **environment: str) -> list[int]:
    """Run the commands side by side, their output in `logs`; the signal `stop` after `seconds` or on Ctrl-C; exit codes."""
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with open(log, "wb") as output:
            processes.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=output, stderr=output))
    try:
        deadline = time.monotonic() + seconds
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for process in processes:
            process.send_signal(stop)
    return [process.wait() for process in processes]


def check(options: Options, seconds: float) -> tuple[list[dict], bool]:
    """A row for each test: its name, outcome and seconds; whether all passed."""
    found = options.out / "tests.xml"
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "not benchmark", f"--junitxml={found.resolve()}", *options.more]
    (code,) = run_all([command], [options.out / "check.log"], seconds, signal.SIGINT)  # on which it writes what it has
    rows = []
    for case in ElementTree.parse(found).iter("testcase") if found.exists() else ():
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        name = f"{case.get('classname')}::{case.get('name')}"
        rows.append({"test": name, "outcome": outcome, "seconds": float(case.get("time"))})
    if not rows:
        fail(f"the tests ended with exit code {code} and without results; {options.out / 'check.log'} says why.")
    print(table([{"passed": 0, "failure": 0, "error": 0, "skipped": 0, **Counter(row["outcome"] for row in rows)}]))
    print(f"pytest ended with exit code {code}{', stopped before all tests were run' if code == 2 else ''}")
    return rows, code == 0


def speed(options: Options, seconds: float) -> tuple[list[dict], bool]:
    """A row for each script, mode, precision and environment, as throughput.py has it; whether all was measured."""
    cuda, rows, failed = torch.cuda.is_available(), [], False
    modes = ["eager", "compile", "graph", "compile+graph"] if cuda else ["eager", "compile"]
    how = [
        "--matmul-precision",
        "auto",
        "high" if cuda else "medium",
        "--modes",
        *modes,
        "--scripts",
        *options.scripts,
        "--repeats",
        "3",
        "--loop-steps",
        "500" if cuda else "20",
    ]
    for env_id in options.env_ids:
        folder = options.out / f"speed-{env_id}"
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "benchmark/speed/throughput.py", *how, "--env-id", env_id, "--out", str(folder.resolve())]
        (code,) = run_all([[*command, *options.more]], [folder / "speed.log"], seconds / len(options.env_ids))
        print((folder / "speed.log").read_text())
        if code:
            failed = f"throughput.py ended with exit code {code} for {env_id}; {folder / 'speed.log'} says why, if not --minutes"
            print(failed, file=sys.stderr)
        else:
            rows += [{"env_id": env_id, **row} for row in json.loads((folder / "throughput.json").read_text())["rows"]]
    return rows, not failed


def train(options: Options, seconds: float) -> tuple[list[dict], bool]:
    """A row for each run: its step, its steps per second in this call, the last evaluation played; whether none failed."""
    runs = list(itertools.product(range(1, options.seeds + 1), options.env_ids, options.scripts))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // len(runs))
    root, names, commands, rows = options.run_root.resolve(), [], [], []
    more = given([part for word in options.more for part in word.split("=", 1)])
    beside = "".join(f"+{key}_{value}" for key, value in sorted(more.items()) if key not in HOUSEKEEPING)
    for seed, env_id, script in runs:
        names.append(f"{env_id}__{script}{beside}__{seed}".replace("/", "_").replace(":", "_"))
        how = ["--run-root", str(root), "--run-name", names[-1], "--env-id", env_id, "--seed", str(seed)]
        if (root / names[-1] / "checkpoint.pt").exists():
            how = ["--resume", str(root / names[-1])]
        how += ["--eval-workers", str(max(1, share - 1)), "--max-pending-evaluations", "1000000", *options.more]
        commands.append([sys.executable, f"{script}.py", *how])
    before = [last_row(root / name, "train.csv") for name in names]
    codes = run_all(commands, [root / f"{name}.log" for name in names], seconds, OMP_NUM_THREADS=str(share))
    for name, old, code in zip(names, before, codes, strict=True):
        new, evaluated = last_row(root / name, "train.csv"), last_row(root / name, "eval.csv")
        steps, passed = (number(new, key) - number(old, key) for key in ("global_step", "charts/wall_seconds"))
        rows.append(
            {
                "run": name,
                "exit_code": code,
                "global_step": int(number(new, "global_step")),
                "steps_per_second": round(steps / passed, 2) if min(steps, passed) > 0 else 0.0,
                "evaluated_step": evaluated.get("global_step", ""),
                "best_return": evaluated.get("eval/best_return", ""),
            }
        )
    print(table(rows))
    print(f"together {sum(row['steps_per_second'] for row in rows):.1f} steps per second, random steps included")
    print(f"logs: {root}/*.log; exit code {128 + signal.SIGTERM}: stopped with a checkpoint, the same command goes on")
    return rows, all(code in (0, 128 + signal.SIGTERM, -signal.SIGTERM) for code in codes)  # the last: before it had begun


def main() -> None:
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    options = tyro.cli(Options, args=given[:end], description=__doc__)
    options.more = tuple(given[end + 1 :])
    if options.minutes <= 0 or options.seeds < 1 or not options.env_ids or not options.scripts:
        fail("minutes must be above 0, seeds at least 1, and env_ids and scripts must name something.")
    try:
        for folder in (options.out, options.run_root) if options.command == "train" else (options.out,):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{folder} cannot be made: {error.strerror}.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it has started is stopped as by Ctrl-C
    machine = about(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(words(machine), flush=True)
    rows, well = {"check": check, "speed": speed, "train": train}[options.command](options, 60 * options.minutes)
    if rows:
        write(options.out, options.command, machine, options, rows)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
