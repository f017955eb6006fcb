"""Time an environment step of training: every script, mode and precision in turns, beside the machine's floor and a peer.

    python benchmark/speed.py --modes compile eager
    python benchmark/speed.py --network simba --utd 5 --num-critics 5
    python benchmark/speed.py --scripts rac_sac.py /tmp/before/rac_sac.py --repeats 22
    python benchmark/speed.py --loop-steps 200 --peer-python /tmp/peer/bin/python --out speed.json

`updates` are those of an environment step, on random transitions: sampling, G updates of the critics, one of the actor, one of
the temperature. `loop`, with --loop-steps, is the whole: acting, simulator, storing and updates. Times are in milliseconds.
Compiling is not counted.

All programs take turns, block by block, so that a machine whose speed drifts favours none of them. Ratios are medians over
blocks of the same turn: compare these, not times of different calls. `--scripts rac_sac rac_sac.py` shows how exact they are.
What an option of the compiler brings, a copy of a script with other COMPILER_OPTIONS tells.

The floor has two parts, measured in every turn: the updates' matrix products at the rate of the fastest exact float32 batched
product, of the shape of the critics' largest, and what Adam and Polyak read and write at the rate of a large copy. Ctrl-C ends
with what has been measured by then. Needs pandas.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads OpenMP, as the scripts do

import numpy as np
import pandas as pd
import torch
import tyro
from torch.utils.benchmark import Timer

ROOT = Path(__file__).resolve().parent.parent
ROWS = 20_000  # of the replay, which is full; the timed updates are those of environment step ROWS, after the warm-up of q_lr
WARM_UP = 2  # turns that do not count; in the first one scripts are compiled


@dataclass
class Options:
    scripts: tuple[str, ...] = ("rac_sac",)  # names of the scripts, or paths such as my_rac.py
    modes: tuple[Literal["eager", "compile", "graph", "compile+graph"], ...] = ("compile+graph",)  # graph: only on a GPU
    matmul_precision: tuple[str, ...] = ("auto",)  # as in the scripts: auto, highest, high, medium
    env_id: str = "Ant-v4"  # the environment whose sizes are used, and whose simulator
    utd: int = 20  # critic updates per environment step
    num_critics: int = 10  # ensemble size
    batch_size: int = 256  # minibatch
    network: Literal["mlp", "simba"] | None = None  # by default the scripts'
    hidden_dim: int | None = None  # width of the networks; by default the scripts'
    cuda: bool | None = None  # whether to use the GPU; by default, when one is present
    repeats: int = 5  # turns
    block_seconds: float = 1.0  # how long updates are timed in a turn
    loop_steps: int = 0  # environment steps of the whole loop in a turn
    peer_python: str | None = None  # a Python with the packages of peer_sbx.py; SBX then takes turns too
    out: str | None = None  # also write all that was measured into this JSON file


def make_learner(options: Options, script: str, mode: str, precision: str) -> tuple:
    """A script's environment and its learner with a full replay; sets up torch.

    All that this file knows of a script is here, in time_script() and in step_work().
    """
    path = Path(script) if script.endswith(".py") else ROOT / f"{script}.py"
    if not path.is_file():
        sys.exit(f"error: there is no script {path}; give a name such as rac_sac, or the path of a copy, such as my_rac.py.")
    name = f"timed_{len(sys.modules)}"  # of its own, so that nothing compiled is shared
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    args = module.Args(
        env_id=options.env_id,
        utd=options.utd,
        num_critics=options.num_critics,
        batch_size=options.batch_size,
        cuda=options.cuda,
        compile="compile" in mode,
        cudagraphs="graph" in mode,
        matmul_precision=precision,
        total_timesteps=ROWS,
        buffer_size=ROWS,
    )
    if options.network is not None:
        args.network = options.network
    if options.hidden_dim is not None:
        args.hidden_dim = options.hidden_dim
    try:
        env = module.Env(args.env_id)
        args = module.completed(args, env)
    except module.UserError as error:
        sys.exit(f"error: {error}")
    learner = module.Learner(args, env.obs_dim, env.action_dim, module.set_up_torch(args))
    if learner.device.type == "cuda":
        learner.warm_up()  # captures the graphs; on a CPU the first turn compiles
    for step in range(1, ROWS + 1):
        obs, next_obs = np.random.normal(size=(2, env.obs_dim))
        action = np.random.uniform(-1, 1, env.action_dim)
        learner.store(step, obs, action, np.random.normal(), False, next_obs)
    return env, learner


def weight_sizes(network) -> list[int]:
    """How many weights each layer has."""
    return [parameter.numel() for name, parameter in network.named_parameters() if name.endswith("weight")]


def step_work(agent, options: Options) -> dict:
    """FLOP of the matrix products of an environment step's updates, and bytes that Adam and Polyak move in it.

    A product takes two FLOP for each weight, sample and pass. A critic update makes nine passes over the critics' parameters: it
    reads gradient, parameters, both moments and target, and writes all but the gradient. product: the shape of the critics'
    largest, members, samples, inputs, outputs.
    """
    critic = weight_sizes(agent.critic)
    actor = weight_sizes(agent.actor)
    # Target, online, gradients of the weights, and of the inputs of all layers but the first.
    critic_update = 4 * sum(critic) - critic[0]
    # Actor, critics, gradients of the critics' inputs, of the actor's weights, and of the inputs of its layers but the first.
    actor_update = 2 * sum(critic) + 3 * sum(actor) - actor[0]
    minibatches_of_actions = options.utd  # for the targets
    if hasattr(agent, "temperature"):
        minibatches_of_actions += 1
    passes = options.utd * critic_update + actor_update + minibatches_of_actions * sum(actor)
    bytes_of_parameters = sum(parameter.nbytes for parameter in agent.critic.parameters())
    matrices = [parameter for parameter in agent.critic.parameters() if parameter.ndim > 1]
    *members, inputs, outputs = max(matrices, key=torch.numel).shape
    return {
        "flop": 2 * options.batch_size * passes,
        "bytes": 9 * options.utd * bytes_of_parameters,
        "product": (*members, options.batch_size, inputs, outputs),
    }


def seconds_of(statement: str, **tensors) -> float:
    """Seconds of one call of a statement: the median, which feels what else the machine does as much as the scripts do."""
    timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.2).median


def time_floor(work: dict, device: torch.device) -> dict:
    """Seconds of the products, and of moving what Adam and Polyak move.

    The products' rate is that of work["product"] at the fastest precision setting that is exact float32; on a GPU, where it would
    measure the launch, of a larger one. Bytes move at the rate of a copy of 128 MiB, which reads and writes them.
    """
    shape = work["product"]
    if device.type != "cpu":
        shape = (10, 2048, 2048, 2048)
    *members, samples, inputs, outputs = shape
    a = torch.randn(*members, samples, inputs, device=device)
    b = torch.randn(*members, inputs, outputs, device=device)
    exact = a.double() @ b.double()
    seconds = []
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        if (a @ b - exact).norm() < 1e-6 * exact.norm():
            seconds.append(seconds_of("a @ b", a=a, b=b))
    flop = 2 * a.numel() * outputs
    products = work["flop"] / flop * min(seconds)
    source = torch.ones(2**25, device=device)
    target = torch.ones(2**25, device=device)
    moved = source.nbytes + target.nbytes
    moves = work["bytes"] / moved * seconds_of("target.copy_(source)", source=source, target=target)
    return {"updates": products + moves, "products": products, "Adam, Polyak": moves}


def time_script(env, learner, precision: str, options: Options) -> dict:
    """Seconds per environment step of the updates alone and, with loop_steps, of acting, simulator, storing and updates."""
    torch.set_float32_matmul_precision(precision)
    wait_for_device = torch.get_device_module(learner.device).synchronize
    wait_for_device()
    times = [time.perf_counter()]
    while times[-1] < times[0] + options.block_seconds:
        learner.update(ROWS)
        wait_for_device()
        times.append(time.perf_counter())
    seconds = {"updates": np.diff(times).mean()}
    if options.loop_steps:
        obs, _ = env.reset(seed=0)
        start = time.perf_counter()
        for step in range(ROWS + 1, ROWS + 1 + options.loop_steps):
            action = learner.act(obs)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            row = learner.store(step, obs, action, reward, terminated, next_obs)
            learner.agent.observe(step, row, None, learner.generator)
            learner.update(step)
            obs = next_obs
            if terminated or truncated:
                obs, _ = env.reset()
        wait_for_device()
        seconds["loop"] = (time.perf_counter() - start) / options.loop_steps
    return seconds


def start_peer(options: Options, args):
    """SBX in a process of its own, which waits while others are timed; returns the function that times it.

    args: those of a script, whose defaults it has, too.
    """
    network = getattr(args, "network", "mlp")  # older scripts have no other
    sizes = (args.env_id, args.utd, args.num_critics, args.batch_size, args.hidden_dim, network)
    command = ["env", options.peer_python, ROOT / "benchmark/peer_sbx.py"]  # env prints a sentence where there is no such Python
    command += [str(size) for size in sizes]
    peer = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # it ends when this is closed, as it is when this process ends
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # or else Ctrl-C would end it in the middle of a turn
    )
    if not peer.stdout.readline():
        sys.exit("error: the peer does not start, see above; peer_sbx.py says which packages --peer-python must have.")

    def time_peer() -> dict:
        print(options.block_seconds, file=peer.stdin, flush=True)
        return {"updates": float(peer.stdout.readline())}

    return time_peer


def processor_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return subprocess.getoutput("sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1")


def ratios(turns: list[dict]) -> pd.DataFrame:
    """A row for each program: ms per environment step, and the ratio to the first program and to the floor."""
    frame = pd.DataFrame(turns).set_index(["turn", "program"])
    updates = frame["updates"].unstack(sort=False)
    table = 1e3 * updates.agg(["median", "min", "max"]).T
    table["x first"] = updates.div(updates.iloc[:, 0], axis=0).median()
    table["x floor"] = updates.div(updates["floor"], axis=0).median()
    return table.join(1e3 * frame.drop(columns="updates").groupby("program").median())


def main(arguments=None) -> None:
    """The command line, or a list of its arguments."""
    options = tyro.cli(Options, args=arguments, description=__doc__)
    programs = {}  # title -> function that times it
    for script, mode, precision in itertools.product(options.scripts, options.modes, options.matmul_precision):
        env, learner = make_learner(options, script, mode, precision)
        precision_here = torch.get_float32_matmul_precision()  # that make_learner() has set: for auto one of the others
        programs[f"{script} {mode} {precision}"] = partial(time_script, env, learner, precision_here, options)
    if options.peer_python:
        programs["SBX"] = start_peer(options, learner.args)
    work = step_work(learner.agent, options)  # of the last script
    programs["floor"] = partial(time_floor, work, learner.device)
    conditions = {
        "processor": processor_name(learner.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty"),
        **work,
    }
    print(pd.Series(conditions).to_string(), flush=True)

    turns = []
    try:
        for turn in range(WARM_UP + options.repeats):
            measured = [{"turn": turn, "program": title, **measure()} for title, measure in programs.items()]
            if turn >= WARM_UP:
                turns += measured
    except KeyboardInterrupt:
        pass  # what has been measured counts
    if not turns:
        sys.exit("error: no turn was complete.")
    print(ratios(turns).to_string(float_format="{:.3f}".format, na_rep=""))
    if options.out:
        Path(options.out).write_text(json.dumps({**conditions, "options": vars(options), "turns": turns}, indent=2))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what `timeout` sends is as Ctrl-C
    main()
