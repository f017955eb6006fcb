"""The runs of a grid as Ray tasks. Ray places them, and retries those that fail or whose worker or node dies.

Written by hand is what Ray does not do: showing how the runs stand, stopping them with checkpoints, and refusing a run that
fits on no node, for which Ray would wait for ever.
"""

import contextlib
import datetime
import os
import re
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

import job as job_module
from job import UserError, is_done, last_row, last_step, number, run_job


class Driver:
    """Submits the jobs and shows how they stand: bars in a terminal, else a line whenever something happens and every minute."""

    def __init__(self, options, jobs: list[dict], ray):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.options, self.jobs, self.ray, self.console = options, jobs, ray, Console()
        name = f"{socket.gethostname()}-{os.getpid()}"
        self.stop_file, self.mark = options.run_root.resolve() / f".stop-{name}", f"--- {name}: "
        self.stop_file.unlink(missing_ok=True)  # of a driver that was killed while it stopped, in a container like this one
        self.done, self.failed, self.running = [job for job in jobs if is_done(job)], [], {}  # running, or waiting: task -> job
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bars = Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal, speed_estimate_period=600
        )
        for job in jobs:
            job["step"] = last_step(job["run_dir"], "train.csv")
        self.all = self.bars.add_task("all runs", total=sum(job["steps"] for job in jobs), completed=self.steps(), note="")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def steps(self) -> int:
        """The steps of all runs so far; those of a failed one count as not done."""
        return sum(min(job["step"], job["steps"]) for job in self.jobs if job not in self.failed)

    def submit(self) -> None:
        """Hand all jobs that are not done to Ray, which starts them as places get free."""
        self.ray.cloudpickle.register_pickle_by_value(job_module)  # the workers of a cluster need not find it
        # Ray counts deaths and exceptions together; a wrong argument, which stays wrong, is no exception of run_job.
        task = self.ray.remote(
            num_cpus=self.options.cpus_per_run,
            num_gpus=self.options.gpus_per_run,
            max_retries=self.options.retries,
            retry_exceptions=True,
        )(run_job)
        for job in self.jobs:
            if job not in self.done:
                log = Path(job["run_dir"] + ".log")
                job |= {
                    "driver": self.mark,
                    "stop_file": str(self.stop_file),
                    "attempts": 0,
                    "bar": None,
                    "log_position": log.stat().st_size if log.exists() else 0,
                }
                self.running[task.options(name=job["name"]).remote(job)] = job

    def follow(self) -> None:
        """Read on in logs and CSV files. An attempt that is not the first is a retry of Ray's."""
        for job in self.running.values():
            with contextlib.suppress(FileNotFoundError), open(job["run_dir"] + ".log", "rb") as file:
                file.seek(job["log_position"])
                text = b"".join(file.read().rpartition(b"\n")[:2])
                job["log_position"] += len(text)
                pattern = rf"^{re.escape(self.mark)}(attempt|failed:) (.*)$"
                for kind, message in re.findall(pattern, text.decode(errors="replace"), re.M):
                    if kind == "attempt" and job["attempts"]:
                        self.say(f"retry {job['attempts']} of {self.options.retries}: {job['name']}: {job['failure']}")
                    job["attempts"] += kind == "attempt"
                    job["failure"] = "its Ray worker or node died" if kind == "attempt" else message
            if job["attempts"]:
                train, evaluation = (last_row(job["run_dir"], name) for name in ("train.csv", "eval.csv"))
                job["step"], best = int(number(train, "global_step")), number(evaluation, "eval/best_return", None)
                if job["bar"] is None:
                    job["bar"] = self.bars.add_task(job["name"], total=job["steps"], completed=job["step"], note="")
                note = f"{number(train, 'charts/SPS'):.1f} steps/s" if job["step"] < job["steps"] else "evaluating"
                self.bars.update(job["bar"], completed=job["step"], note=note + ("" if best is None else f", return {best:.0f}"))
        self.bars.update(self.all, completed=self.steps())

    def line(self) -> str:
        """How the grid stands."""
        running = sum(job["attempts"] > 0 for job in self.running.values())
        left = self.bars.tasks[0].time_remaining if self.running else 0
        return (
            f"done {len(self.done)} · running {running} · waiting {len(self.running) - running} · failed {len(self.failed)} "
            f"of {len(self.jobs)} · {self.steps() / self.bars.tasks[0].total:.1%} of the steps · ETA "
            f"{'?' if left is None else datetime.timedelta(seconds=int(left))}"
        )

    def poll(self) -> None:
        """Wait up to two seconds for a task to end."""
        ended, _ = self.ray.wait(list(self.running), num_returns=1, timeout=2.0)
        self.follow()
        for task in ended:
            job = self.running.pop(task)
            try:
                failure = self.ray.get(task)
            except self.ray.exceptions.RayTaskError as error:
                failure = (str(error.cause or error).strip() or repr(error.cause)).splitlines()[-1]
            except self.ray.exceptions.RayError as error:
                failure = f"its Ray worker or node died ({type(error).__name__})"
            if job["bar"] is not None:
                self.bars.remove_task(job["bar"])
            if failure:
                job["failure"] = failure
                self.failed.append(job)
                self.say(f"failed: {job['name']}: {failure} (log: {job['run_dir']}.log)")
            else:
                self.done.append(job)
                self.say(f"done: {job['name']}")

    def run(self, stopped: list[int]) -> None:
        """Run what is not done until nothing runs any more; KeyboardInterrupt once a signal's number is in `stopped`."""
        if self.done:
            self.say(f"{len(self.done)} of {len(self.jobs)} runs are finished already")
        self.submit()
        with self.bars:
            shown = 0.0
            while self.running and not stopped:
                if not self.console.is_terminal and time.time() - shown > 60:
                    shown = time.time()
                    self.say(self.line())
                self.poll()
        if stopped:
            self.stop()
            raise KeyboardInterrupt
        self.say(self.line())

    def stop(self) -> None:
        """Let every script write its checkpoint and end; take back what still waits."""
        self.say("stopping; every run writes its checkpoint")
        self.stop_file.parent.mkdir(parents=True, exist_ok=True)
        self.stop_file.touch()
        try:
            self.follow()
            for task, job in self.running.items():
                if not job["attempts"]:
                    self.ray.cancel(task)
            if self.running:
                self.ray.wait(list(self.running), num_returns=len(self.running), timeout=150)
        finally:
            self.stop_file.unlink(missing_ok=True)


def check_resources(options, ray) -> None:
    """Raise UserError when no node that is there now could ever take a run."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    wanted = {"CPU": options.cpus_per_run, "GPU": options.gpus_per_run}
    if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
        offered = "; ".join(f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise UserError(
            f"a run wants {options.cpus_per_run} cores and {options.gpus_per_run:g} GPUs, and no node has them ({offered})."
        )


def run_grid(options, jobs: list[dict]) -> int:
    """Run what is not done yet; returns the exit code."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if options.address:  # how often a cluster is asked, each time for 40 seconds; by default 20 times
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "2")
    import ray

    # A Ray worker that ends kills its children at once; ours get SIGTERM instead and write their checkpoints.
    system = {"kill_child_processes_on_worker_exit": False, "task_oom_retries": options.retries}
    local = {"address": "local", "include_dashboard": False, "_system_config": system}
    wandb = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}  # for workers started elsewhere
    address = {"address": options.address, "runtime_env": {"env_vars": wandb}} if options.address else local
    try:
        ray.init(**address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        failed = f"no Ray cluster answers at {options.address}" if options.address else "Ray does not start on this machine"
        lines = (str(error) or repr(error)).strip().splitlines()  # the last one of a traceback says what was wrong
        raise UserError(f"{failed}: {' '.join(dict.fromkeys((lines[0], lines[-1])))}") from None
    stopped = []

    def stop(signal_number, frame) -> None:  # an exception could be raised, and lost, in the middle of Ray's code
        if stopped:
            raise KeyboardInterrupt  # the second Ctrl-C waits for nothing
        stopped.append(signal_number)

    for signal_number in (signal.SIGINT, signal.SIGTERM):  # a cluster's scheduler sends SIGTERM before its time limit
        signal.signal(signal_number, stop)
    try:
        check_resources(options, ray)
        driver = Driver(options, jobs, ray)
        driver.run(stopped)
    finally:
        ray.shutdown()
    for job in driver.failed:
        print(f"failed: {job['name']}: {job['failure']}", file=sys.stderr)
    print(f"report: {shlex.join(['python', 'benchmark/report.py', str(options.run_root), '--out', 'report'])}")
    return 1 if driver.failed else 0
