"""Time an environment step of training with the scripts' own functions, beside this machine's matrix floor and a peer.

    python benchmark/speed/throughput.py
    python benchmark/speed/throughput.py --peer sbx --peer-python PATH
    python benchmark/speed/throughput.py --scripts rac_sac rac_td3 vanilla_rac rac_itm \\
        --matmul-precision auto highest high medium --out FOLDER
    python benchmark/speed/throughput.py --cuda True --modes eager compile graph compile+graph --loop-steps 2000 --out FOLDER

Timed are the updates alone (`Learner.update` on a replay of random numbers: sampling, the G critic updates, one actor and one
temperature update), the whole loop (acting, simulator, storing, updates), and the loop's parts alone. On a CPU the evaluations
that fall into a loop's steps are played in worker processes beside it, until both are done. A GPU is through with a block before
the first episodes of an evaluation are, so there the loop is timed without; evaluation_cost.py says what evaluations need.

All programs and the matrix floor take turns, block by block, so that a machine whose speed drifts does not favour one of them;
ratios are medians over blocks that stood side by side. The floor is the updates' matrix products (FLOP from the shapes of the
weights) at the best exact float32 rate of a batched product; a peer's ratio is to the first script's floor. Burn-in and
compilation are not counted. SIGTERM and Ctrl-C end it with what has been measured by then.
"""

import itertools
import math
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from measure import STEP, Sizes, about, fail, make_learner, matrix_rate, step_flop, table, time_block, words, write

import torch  # isort: skip (measure sets OpenMP up before)
import tyro  # isort: skip

Mode = Literal[
    "eager",
    "compile",
    "graph",
    "compile+graph",
    "compile+graph+fewer",
    "compile+graph+combo_kernels",
    "compile+graph+split_reductions",
    "compile+graph+force_pointwise_cat",
]
PARTS = ("acting", "simulator", "storing", "updates")


@dataclass
class Options(Sizes):
    scripts: tuple[str, ...] = ("rac_sac",)  # the scripts to time
    modes: tuple[Mode, ...] = ()  # default: compile, on a GPU compile+graph; +...: with all FEWER_KERNELS, or with one of them
    matmul_precision: tuple[Literal["auto", "highest", "high", "medium"], ...] = ("auto",)  # the scripts' --matmul-precision
    repeats: int = 5  # blocks of at least a second, of which the median is taken
    loop_steps: int = 100  # environment steps of a block of the whole loop; 0: no whole loop
    peer: Literal["none", "sbx"] = "none"  # also time SBX (JAX) SAC on the same work, in turn; see requirements-peer.txt
    peer_python: str = sys.executable  # the Python interpreter that has the peer's packages
    out: Path | None = None  # also write throughput.json, all that was measured, and throughput.csv into this folder


class Program:
    """A script in one mode at one precision."""

    def __init__(self, script: str, mode: str, precision: str, options: Options):
        self.module, self.env, self.learner = make_learner(script, options, mode, precision)
        self.precision = torch.get_float32_matmul_precision()
        self.flop = step_flop(self.learner)
        self.name = {"script": script, "mode": mode, "matmul_precision": precision, "precision_used": self.precision}
        self.title = f"{script} {mode} {precision}"
        self.actor = {name: tensor.numpy() for name, tensor in self.learner.copy_of("actor").items()}
        self.blocks = {"update": [], "loop": []}
        self.measured = {}

    def time_updates(self, steps: int) -> float:
        """Seconds per environment step of the updates alone."""
        torch.set_float32_matmul_precision(self.precision)
        return time_block(self.learner, steps)

    def time_loop(self, steps: int, pool=None, wrap=lambda part, function: function) -> float:
        """Seconds per environment step of acting, simulator, storing and updates; the evaluations that fall into so many steps
        are played beside them in a pool, by the policy before training, and are waited for."""
        torch.set_float32_matmul_precision(self.precision)
        learner, args = self.learner, self.learner.args
        obs, _ = self.env.reset(seed=0)
        tasks = []
        act, step_env, store, update = map(wrap, PARTS, (learner.act, self.env.step, learner.store, learner.update))
        start = time.perf_counter()
        if pool:
            conditions = self.module.eval_conditions(args)
            episodes = max(1, round(len(conditions) * args.eval_episodes * steps / args.eval_frequency))
            for i in range(0, episodes, args.eval_episodes):
                seeds = list(range(min(args.eval_episodes, episodes - i)))
                condition = conditions[i // args.eval_episodes % len(conditions)]
                tasks.append(pool.submit(self.module.play_policy, args, seeds, self.actor, condition))
        for step in range(steps):
            action = act(obs)
            next_obs, reward, terminated, truncated, _ = step_env(action)
            store(step, obs, action, reward, terminated, next_obs)
            learner.filled.fill_(len(learner.replay))
            update(STEP)
            obs = self.env.reset()[0] if terminated or truncated else next_obs
        torch.get_device_module(learner.device).synchronize()
        for task in tasks:
            task.result()
        return (time.perf_counter() - start) / steps

    def time_parts(self, steps: int) -> dict[str, float]:
        """Seconds per environment step of each of PARTS, without evaluation, waiting for a GPU after each."""
        spent = dict.fromkeys(PARTS, 0.0)

        def clocked(part: str, function):
            def call(*arguments):
                start = time.perf_counter()
                result = function(*arguments)
                torch.get_device_module(self.learner.device).synchronize()
                spent[part] += (time.perf_counter() - start) / steps
                return result

            return call

        self.time_loop(steps, wrap=clocked)
        return spent


class Peer:
    """SBX in a process of its own, which waits while others are timed."""

    def __init__(self, options: Options):
        self.title = "sbx"
        self.name = {"script": "sbx", "mode": "jax", "matmul_precision": "", "precision_used": ""}
        command = [options.peer_python, str(Path(__file__).with_name("peer_sbx.py")), "--env-id", options.env_id]
        for name in ("utd", "num_critics", "batch_size", "hidden_dim"):
            command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)
        self.blocks = {"update": [], "loop": []}
        self.measured = {}

    def time_updates(self, steps: int) -> float:
        """Seconds per environment step."""
        try:
            print(steps, file=self.process.stdin, flush=True)
            return float(self.process.stdout.readline())
        except (ValueError, BrokenPipeError):
            fail(f"the peer does not run; `{shlex.join(self.process.args[:2])}` says why; it needs requirements-peer.txt.")


def time_in_turn(options: Options, programs: list, rates: list[float], pool) -> None:
    """Time all programs in turn, round by round, into their `blocks`; the matrix rate of each round into `rates`."""
    steps = []
    for program in programs:
        program.measured["first_update_seconds"] = program.time_updates(1)
        steps.append(math.ceil(1 / program.time_updates(2)))
    for repeat in range(options.repeats + 1):
        rate = matrix_rate(options.device())
        turns = [(program, "update", program.time_updates(count)) for program, count in zip(programs, steps, strict=True)]
        if options.loop_steps:
            turns += [(p, "loop", p.time_loop(options.loop_steps, pool)) for p in programs if isinstance(p, Program)]
        if repeat:  # the first round is burn-in
            for program, what, seconds in turns:
                program.blocks[what].append(seconds)
            rates.append(rate)  # last: where this is interrupted, the round does not count


def milliseconds(blocks: list[float]) -> str:
    """Median (smallest to largest), in ms."""
    return f"{1e3 * statistics.median(blocks):.1f} ({1e3 * min(blocks):.1f} to {1e3 * max(blocks):.1f})" if blocks else "-"


def report(programs: list, rates: list[float]) -> list[dict]:
    """Print what was measured; returns a row for each program."""
    rows, lines = [], []
    first = programs[0]
    for p in programs:
        updates, loops = p.blocks["update"], p.blocks["loop"]
        flop = getattr(p, "flop", first.flop)
        pairs = [own / other for own, other in zip(updates, first.blocks["update"], strict=True)]
        p.measured |= {
            "over_floor": statistics.median(s * rate / flop for s, rate in zip(updates, rates, strict=True)),
            "times_of_first": statistics.median(pairs),
        }
        rows.append(
            {
                **p.name,
                "update_ms": 1e3 * statistics.median(updates),
                "update_ms_min": 1e3 * min(updates),
                "update_ms_max": 1e3 * max(updates),
                "loop_ms": 1e3 * statistics.median(loops) if loops else "",
                "loop_steps_per_second": 1 / statistics.median(loops) if loops else "",
                **p.measured,
                **{f"{what}_seconds": blocks for what, blocks in p.blocks.items()},
            }
        )
        lines.append(
            {
                "program": p.title,
                "updates, ms per step": milliseconds(updates),
                "x floor": f"{p.measured['over_floor']:.2f}",
                "x the first": f"{p.measured['times_of_first']:.2f} ({min(pairs):.2f} to {max(pairs):.2f})",
                "whole loop, ms per step": milliseconds(loops),
                "steps/s": rows[-1]["loop_steps_per_second"],
                "first update, s": p.measured["first_update_seconds"],
            }
        )
    floor = milliseconds([first.flop / rate for rate in rates])
    print(table([*lines, {"program": "matrix floor", "updates, ms per step": floor, "x floor": "1.00"}]))
    print(f"matrix floor: {first.flop / 1e9:.1f} GFLOP at {max(rates) / 1e9:.0f} GFLOP/s at best", flush=True)
    return rows


def interrupt(number: int, frame) -> None:
    raise KeyboardInterrupt(number)


def measure_all(options: Options, programs: list, scripts: list[Program], rates: list[float]) -> bool:
    """time_in_turn() and the loop's parts; False where a signal has ended it, after which only whole rounds are left.

    Ends the program where there is no whole round.
    """
    module, args = scripts[0].module, scripts[0].learner.args
    try:
        if options.loop_steps and options.device().type == "cpu":
            with module.Evaluator(args, list(range(args.eval_episodes))) as evaluator:
                time_in_turn(options, programs, rates, evaluator.pool)
        else:
            time_in_turn(options, programs, rates, pool=None)
        if options.loop_steps:
            for program in scripts:
                program.measured["parts_seconds"] = program.time_parts(options.loop_steps)
    except KeyboardInterrupt as stop:
        if not rates:
            sys.exit(128 + (stop.args or (signal.SIGINT,))[0])
        for program in programs:
            program.blocks = {what: blocks[: len(rates)] for what, blocks in program.blocks.items()}
        print(f"stopped after {len(rates)} of {options.repeats} blocks", flush=True)
        return False
    return True


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    signal.signal(signal.SIGTERM, interrupt)
    device = options.device()
    rates = []
    modes = options.modes or (("compile+graph",) if device.type == "cuda" else ("compile",))
    if options.repeats < 1 or options.loop_steps < 0 or (device.type == "cpu" and any("graph" in mode for mode in modes)):
        fail("repeats must be at least 1, loop_steps not negative, and graphs need a GPU.")
    scripts, left_out = [], []
    for script, mode, precision in itertools.product(options.scripts, modes, options.matmul_precision):
        try:
            scripts.append(Program(script, mode, precision, options))
        except ValueError as error:  # the script's own sentence
            fail(str(error))
        except RuntimeError as error:
            if not isinstance(error, sys.modules[script].DoesNotWork):
                raise
            print(f"{script} {mode} {precision} is left out: {error}", flush=True)
            left_out.append({"script": script, "mode": mode, "matmul_precision": precision, "reason": str(error)})
    if not scripts:
        fail("no mode works here.")
    machine = about(device)
    env, args = scripts[0].env, scripts[0].learner.args
    evaluation = f"{args.eval_workers} evaluation workers" if device.type == "cpu" else "without evaluation"
    print(
        f"{options.env_id} ({env.obs_dim} observations, {env.action_dim} actions), UTD {options.utd}, N {options.num_critics}, "
        f"batch {options.batch_size}, hidden {options.hidden_dim}, {evaluation}\n"
        f"{words(machine)}\n",
        flush=True,
    )
    programs = [*scripts, Peer(options)] if options.peer == "sbx" else scripts
    whole = measure_all(options, programs, scripts, rates)
    rows = report(programs, rates)
    if options.loop_steps and whole:
        print("\nwhere a step of the loop spends its time, ms, without evaluation")
        print(
            table(
                [
                    {"program": p.title, **{part: f"{1e3 * s:.2f}" for part, s in p.measured["parts_seconds"].items()}}
                    for p in scripts
                ]
            )
        )
    if options.out:
        write(options.out, "throughput", machine, options, rows, matrix_flop_per_second=rates, left_out=left_out)


if __name__ == "__main__":
    main()
