"""The runs of a grid as Ray tasks, which Ray places.

Written by hand is what Ray does not do: handing in again what has failed, from its checkpoint and with a word; showing how the
runs stand; stopping them with checkpoints; refusing a run that fits on no node, for which Ray would wait for ever.
"""

import dataclasses
import datetime
import os
import shlex
import signal
import socket
import sys
import time

import job as job_module
from job import Job, UserError, is_done, last_row, last_step, number, run_job


@dataclasses.dataclass
class Standing:
    """How a job stands, as its driver sees it."""

    job: Job
    step: int  # environment steps trained
    attempts: int = 0  # handed to Ray
    log_size: int = 0  # bytes of the log when it was handed in the last time; what has grown has started
    bar: int | None = None
    failure: str = ""

    @property
    def started(self) -> bool:
        return log_size(self.job) > self.log_size


def log_size(job: Job) -> int:
    return job.log.stat().st_size if job.log.exists() else 0


class Driver:
    """Hands jobs to Ray, again when they fail, and shows how they stand: bars in a terminal, else a line whenever something
    happens and every minute."""

    def __init__(self, options, jobs: list[Job], ray):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.options = options
        self.ray = ray
        self.console = Console()
        self.stop_file = options.run_root.resolve() / f".stop-{socket.gethostname()}-{os.getpid()}"
        self.stop_file.unlink(missing_ok=True)  # of a driver that was killed while it stopped, in a container like this one
        self.standings = [Standing(job, last_step(job.run_dir, "train.csv")) for job in jobs]
        self.done = [standing for standing in self.standings if is_done(standing.job)]
        self.failed: list[Standing] = []
        self.running: dict = {}  # or waiting for a place: Ray's task -> standing
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
        self.all = self.bars.add_task("all runs", total=sum(job.steps for job in jobs), completed=self.steps(), note="")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def steps(self) -> int:
        """The steps of all runs so far; those of a failed one count as not done."""
        return sum(min(standing.step, standing.job.steps) for standing in self.standings if standing not in self.failed)

    def submit(self, standing: Standing) -> None:
        """Hand a job to Ray, which starts it as soon as there is a place."""
        job = standing.job
        job.stop_file = str(self.stop_file)
        standing.attempts += 1
        standing.log_size = log_size(job)
        options = self.options
        # Ray would count an exception and the death of a node alike, and tell nobody.
        task = self.ray.remote(num_cpus=options.cpus_per_run, num_gpus=options.gpus_per_run, max_retries=0)(run_job)
        self.running[task.options(name=job.name).remote(job)] = standing

    def follow(self) -> None:
        """Read in CSV files how the jobs go on."""
        for standing in self.running.values():
            if not standing.started:
                continue
            job = standing.job
            train = last_row(job.run_dir, "train.csv")
            best = number(last_row(job.run_dir, "eval.csv"), "eval/best_return", None)
            standing.step = int(number(train, "global_step"))
            if standing.bar is None:
                standing.bar = self.bars.add_task(job.name, total=job.steps, completed=standing.step, note="")
            note = f"{number(train, 'charts/SPS'):.1f} steps/s" if standing.step < job.steps else "evaluating"
            if best is not None:
                note += f", return {best:.0f}"
            self.bars.update(standing.bar, completed=standing.step, note=note)
        self.bars.update(self.all, completed=self.steps())

    def line(self) -> str:
        """How the grid stands."""
        running = sum(standing.started for standing in self.running.values())
        left = self.bars.tasks[0].time_remaining if self.running else 0
        return (
            f"done {len(self.done)} · running {running} · waiting {len(self.running) - running} · failed {len(self.failed)} "
            f"of {len(self.standings)} · {self.steps() / self.bars.tasks[0].total:.1%} of the steps · ETA "
            f"{'?' if left is None else datetime.timedelta(seconds=int(left))}"
        )

    def poll(self) -> None:
        """Wait up to two seconds for a task to end."""
        ended, _ = self.ray.wait(list(self.running), num_returns=1, timeout=2.0)
        self.follow()
        for task in ended:
            standing = self.running.pop(task)
            failure, may_pass = self.result_of(task)
            if not failure:
                self.done.append(standing)
                self.say(f"done: {standing.job.name}")
            elif may_pass and standing.attempts <= self.options.retries:
                self.say(f"retry {standing.attempts} of {self.options.retries}: {standing.job.name}: {failure}")
                self.submit(standing)
                continue
            else:
                standing.failure = failure
                self.failed.append(standing)
                self.say(f"failed: {standing.job.name}: {failure} (log: {standing.job.log})")
            if standing.bar is not None:
                self.bars.remove_task(standing.bar)

    def result_of(self, task) -> tuple[str, bool]:
        """What is wrong with a task that has ended, "" for nothing, and whether another attempt may mend it."""
        try:
            return self.ray.get(task), False
        except self.ray.exceptions.RayTaskError as error:
            return (str(error.cause or error).strip() or repr(error.cause)).splitlines()[-1], True
        except self.ray.exceptions.RayError as error:
            return f"its Ray worker or node died ({type(error).__name__})", True

    def run(self, stopped: list[int]) -> None:
        """Run what is not done until nothing runs any more; KeyboardInterrupt once a signal's number is in `stopped`."""
        if self.done:
            self.say(f"{len(self.done)} of {len(self.standings)} runs are finished already")
        self.ray.cloudpickle.register_pickle_by_value(job_module)  # the workers of a cluster need not find it
        for standing in self.standings:
            if standing not in self.done:
                self.submit(standing)
        with self.bars:
            shown = 0.0
            while self.running and not stopped:
                if not self.console.is_terminal and time.time() - shown > 60:
                    shown = time.time()
                    self.say(self.line())
                self.poll()
        if stopped:
            self.stop()
            raise KeyboardInterrupt(stopped[0])
        self.say(self.line())

    def stop(self) -> None:
        """Let every script write its checkpoint and end; take back what still waits."""
        self.say("stopping; every run writes its checkpoint")
        self.stop_file.parent.mkdir(parents=True, exist_ok=True)
        self.stop_file.touch()
        try:
            for task, standing in self.running.items():
                if not standing.started:
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


def run_grid(options, jobs: list[Job]) -> int:
    """Run what is not done yet; returns the exit code."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if options.address:  # how often a cluster is asked, each time for 40 seconds; by default 20 times
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "2")
    import ray

    # A Ray worker that ends kills its children at once; ours get SIGTERM instead and write their checkpoints.
    system = {"kill_child_processes_on_worker_exit": False, "task_oom_retries": 0}
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
    for standing in driver.failed:
        print(f"failed: {standing.job.name}: {standing.failure}", file=sys.stderr)
    print(f"report: {shlex.join(['python', 'benchmark/report.py', str(options.run_root), '--out', 'report'])}")
    return 1 if driver.failed else 0
