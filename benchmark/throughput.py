"""Time one environment step of training with the scripts' own functions, beside this machine's matrix floor and a peer.

    python benchmark/throughput.py
    python benchmark/throughput.py --scripts rac_sac --peer sbx --peer-python PATH
    python benchmark/throughput.py --sweep --plot cost.png

Timed is `Learner.update`: sampling, the G critic updates, one actor and one temperature update, on a replay of random
numbers. All programs and the matrix floor take turns, block by block, so that a machine whose speed drifts does not favour
one of them; ratios are medians over blocks that stood side by side. The floor is the step's matrix products (FLOP from the
shapes of the weights) at the best exact float32 rate of a batched product; a peer's ratio is to the first script's floor.
Burn-in and compilation are not counted.
"""

import dataclasses
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the scripts do when they are the program

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SWEEP = {"utd": (1, 5, 10, 20), "num_critics": (2, 5, 10, 20), "batch_size": (256, 512, 1024)}
STEP = 20_000  # a step after the warm-up of the learning rate


@dataclass
class Options:
    scripts: tuple[str, ...] = ("rac_sac",)
    """the scripts to time"""
    env_id: str = "Ant-v4"
    """the environment whose observation and action sizes are used, and which is the simulator of the split"""
    utd: int = 20
    """critic updates per environment step"""
    num_critics: int = 10
    """ensemble size"""
    batch_size: int = 256
    """minibatch"""
    hidden_dim: int = 256
    """width of the hidden layers"""
    compile: bool = True
    """torch.compile"""
    cudagraphs: bool = True
    """one CUDA graph per environment step, on a GPU"""
    cuda: bool | None = None
    """whether to use the GPU; by default, when one is present"""
    repeats: int = 5
    """blocks of at least a second, of which the median is taken"""
    split: bool = True
    """also show where the time of a whole environment step goes"""
    sweep: bool = False
    """instead, the cost against UTD, ensemble size and batch size, one at a time"""
    peer: Literal["none", "sbx"] = "none"
    """also time SBX (JAX) SAC on the same work, in the same run; see requirements-peer.txt"""
    peer_python: str = sys.executable
    """the Python interpreter that has the peer's packages"""
    json: Path | None = None
    """also write everything measured to this file"""
    plot: Path | None = None
    """with --sweep, also draw it into this PNG file"""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def use_cuda(options: Options) -> bool:
    """Whether the GPU is used: asked for or present, and not declined."""
    return options.cuda is not False and torch.cuda.is_available()


def make_learner(script: str, options: Options):
    """The module of a script, and its learner with a full replay of random numbers."""
    module = importlib.import_module(script)
    env = module.FlatEnv(options.env_id)
    names = ("env_id", "utd", "num_critics", "batch_size", "hidden_dim", "compile", "cudagraphs", "cuda")
    args = module.Args(**{name: getattr(options, name) for name in names}, total_timesteps=20_000, buffer_size=20_000)
    args = module.check_args(args, env.action_dim)
    device = torch.device("cuda" if use_cuda(options) else "cpu")
    module.set_up_torch(args, device)
    learner = module.Learner(args, env.obs_dim, env.action_dim, device)
    learner.replay.normal_(generator=torch.Generator(device).manual_seed(0))
    learner.replay[:, env.obs_dim + env.action_dim + 1] = 0  # nothing terminates
    learner.filled.fill_(len(learner.replay))
    return module, env, learner


def first_update(learner) -> float:
    """Seconds of the first update, compilation included."""
    start = time.perf_counter()
    learner.update(STEP)
    synchronize(learner.device)
    return time.perf_counter() - start


def time_block(learner, steps: int) -> float:
    """Seconds per environment step over a block of steps."""
    start = time.perf_counter()
    for _ in range(steps):
        learner.update(STEP)
    synchronize(learner.device)
    return (time.perf_counter() - start) / steps


def matrix_rate(device: torch.device) -> float:
    """FLOP per second of the fastest exact float32 batched product at any precision setting.

    Ten products of 256 x 256 x 256, the work's own, on a CPU; of 2048 x 2048 x 2048 on a GPU, where smaller ones would
    measure the launch.
    """
    size = 2048 if device.type == "cuda" else 256
    a, b = torch.randn(2, 10, size, size, device=device)
    exact, best = a.double() @ b.double(), 0.0
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        if float((torch.bmm(a, b) - exact).norm() / exact.norm()) < 1e-6:
            for _ in range(5):
                synchronize(device)
                start = time.perf_counter()
                for _ in range(20):
                    torch.bmm(a, b)
                synchronize(device)
                best = max(best, 20 * 2 * 10 * size**3 / (time.perf_counter() - start))
    torch.set_float32_matmul_precision(before)
    return best


def step_flop(learner) -> float:
    """FLOP of the matrix products of one environment step's updates, two for each multiply-add."""

    def multiply_adds(name: str) -> tuple[int, int]:
        """Of one sample: through all weights, and through those of the first layer."""
        sizes = [weight.numel() for key, weight in getattr(learner, name).named_parameters() if key.endswith("weight")]
        return sum(sizes), sizes[0]

    critic, critic_first = multiply_adds("critic")
    actor, actor_first = multiply_adds("actor")
    critic_update = 4 * critic - critic_first  # target, online, weight gradients, gradients of the hidden layers' inputs
    actor_update = 2 * critic + 3 * actor - actor_first  # the critics' input gradients too, but not their weights'
    fresh_actions = actor if hasattr(learner, "temperature") else 0  # of the temperature update
    utd, batch = learner.args.utd, learner.args.batch_size
    return 2 * batch * (utd * (critic_update + actor) + actor_update + fresh_actions)


class Peer:
    """SBX in a process of its own, which waits while others are timed."""

    def __init__(self, options: Options):
        command = [options.peer_python, str(Path(__file__).with_name("peer_sbx.py")), "--env-id", options.env_id]
        for name in ("utd", "num_critics", "batch_size", "hidden_dim"):
            command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self.time_block(1)

    def time_block(self, steps: int) -> float:
        """Seconds per environment step."""
        print(steps, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("error: the peer does not run; give --peer-python an interpreter with benchmark/requirements-peer.txt.")
        return float(answer)


def split_step(module, env, learner, steps: int) -> dict[str, float]:
    """Seconds per environment step in each part of a whole one, simulator included, measured without a CUDA graph."""
    spent = dict.fromkeys(("acting", "simulator", "storing", "sampling and hoisted pass", "critic updates",
                           "actor and temperature", "other host work"), 0.0)  # fmt: skip
    begun = [0.0]

    def clocked(part: str, function, since_begin: bool = False):
        def call(*arguments):
            start = begun[0] if since_begin else time.perf_counter()
            result = function(*arguments)
            synchronize(learner.device)
            spent[part] += time.perf_counter() - start
            return result

        return call

    saved = {name: getattr(learner, name, None) for name in ("act_graph", "update_graph", "prepare_targets", "update_critics",
             "update_actor", "update_temperature")}  # fmt: skip
    cudagraphs, learner.args.cudagraphs, learner.act_graph, learner.update_graph = learner.args.cudagraphs, False, None, None
    learner.prepare_targets = clocked("sampling and hoisted pass", saved["prepare_targets"], since_begin=True)
    learner.update_critics = clocked("critic updates", saved["update_critics"])
    for name in ("update_actor", "update_temperature"):
        if saved[name]:
            setattr(learner, name, clocked("actor and temperature", saved[name]))
    act, step_env = clocked("acting", learner.act), clocked("simulator", env.step)
    store, total = clocked("storing", learner.store), 0.0
    obs, _ = env.reset(seed=0)
    for step in range(steps + 2):
        if step == 2:  # the first two are burn-in
            spent.update(dict.fromkeys(spent, 0.0))
            total = time.perf_counter()
        action = act(obs)
        next_obs, reward, terminated, truncated, _ = step_env(action)
        store(step, obs, action, reward, terminated, next_obs)
        learner.filled.fill_(len(learner.replay))
        begun[0] = time.perf_counter()
        learner.update(STEP)
        synchronize(learner.device)
        obs = env.reset()[0] if terminated or truncated else next_obs
    total = time.perf_counter() - total
    spent["other host work"] = total - sum(spent.values())
    learner.args.cudagraphs = cudagraphs
    for name, value in saved.items():
        setattr(learner, name, value)
    return {part: seconds / steps for part, seconds in spent.items()}


def host_seconds(script: str, options: Options) -> float:
    """Seconds per environment step of the same calls on the smallest tensors: what Python and dispatch cost."""
    tiny = dataclasses.replace(options, num_critics=2, batch_size=8, hidden_dim=8, cudagraphs=False)
    _, _, learner = make_learner(script, tiny)
    first_update(learner)
    return statistics.median(time_block(learner, 20) for _ in range(5))


def table(header: tuple[str, ...], rows: list[tuple]) -> str:
    """Rows of strings and numbers as aligned text."""
    cells = [header, *(tuple(f"{x:.1f}" if isinstance(x, float) else str(x) for x in row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    aligned = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in cells]
    return "\n".join("  ".join(row) for row in aligned)


def milliseconds(blocks: list[float]) -> tuple[float, str]:
    """Median, and smallest to largest."""
    return 1e3 * statistics.median(blocks), f"{1e3 * min(blocks):.1f} to {1e3 * max(blocks):.1f}"


def compare(options: Options) -> dict:
    """Time the scripts, the floor and the peer in turn; print and return what was measured."""
    learners = {script: make_learner(script, options) for script in options.scripts}
    device = next(iter(learners.values()))[2].device
    programs, first = {}, {}
    for script, (_, _, learner) in learners.items():
        first[script] = first_update(learner)
        steps = math.ceil(1 / time_block(learner, 2))
        programs[script] = lambda learner=learner, steps=steps: time_block(learner, steps)
    if options.peer != "none":
        peer = Peer(options)
        first[options.peer] = peer.first
        steps = math.ceil(1 / peer.time_block(2))
        programs[options.peer] = lambda: peer.time_block(steps)
    blocks, rates = {name: [] for name in programs}, []
    for repeat in range(options.repeats + 1):
        turn = {"rate": matrix_rate(device)} | {name: program() for name, program in programs.items()}
        if repeat:  # the first round is burn-in
            rates.append(turn.pop("rate"))
            for name, seconds in turn.items():
                blocks[name].append(seconds)
    flops = {name: step_flop(learner) for name, (_, _, learner) in learners.items()}
    flop = flops[options.scripts[0]]
    floors = [flop / rate for rate in rates]
    rows, results = [], {}
    for name, seconds in blocks.items():
        floors_of = [flops.get(name, flop) / rate for rate in rates]
        over_floor = statistics.median(s / f for s, f in zip(seconds, floors_of, strict=True))
        rows.append((name, *milliseconds(seconds), f"{over_floor:.2f}", first[name]))
        results[name] = {"seconds": seconds, "over_floor": over_floor, "first_update_seconds": first[name]}
    rows.append(("matrix floor", *milliseconds(floors), "1.00", "-"))
    print(table(("program", "ms per environment step", "min to max", "x floor", "first update, s"), rows))
    print(f"matrix floor: {flop / 1e9:.1f} GFLOP at {max(rates) / 1e9:.0f} GFLOP/s at best")
    reference = options.scripts[0]
    for name in list(blocks)[1:]:
        pairs = [other / own for other, own in zip(blocks[name], blocks[reference], strict=True)]
        results[name]["times_of_first"] = statistics.median(pairs)
        print(f"{name} takes {statistics.median(pairs):.2f} times as long as {reference} "
              f"({min(pairs):.2f} to {max(pairs):.2f}, pair by pair)")  # fmt: skip
    if options.peer != "none":
        peer.process.kill()
    if options.split:
        for script, (module, env, learner) in learners.items():
            parts = split_step(module, env, learner, 30)
            host = host_seconds(script, options)
            results[script].update(split_seconds=parts, host_seconds=host)
            whole = sum(parts.values())
            how = " (without CUDA graph, waiting for the GPU after each part)" if device.type == "cuda" else ""
            print(f"\nwhere an environment step of {script} spends its time{how}")
            shares = [(part, f"{1e3 * s:.2f}", f"{100 * s / whole:.1f} %") for part, s in parts.items()]
            print(table(("part", "ms", "share"), [*shares, ("whole step", f"{1e3 * whole:.2f}", "100.0 %")]))
            print(f"host overhead within it (the same calls on the smallest tensors): {1e3 * host:.2f} ms")
    return {"blocks": results, "floor_seconds": floors, "matrix_flop_per_second": rates}


def sweep(options: Options) -> dict:
    """Cost against each of SWEEP, the others as in `options`; print and return what was measured."""
    results, seen, script = [], {}, options.scripts[0]

    def measure(sizes: Options) -> dict:
        key = (sizes.utd, sizes.num_critics, sizes.batch_size)
        if key not in seen:
            _, _, learner = make_learner(script, sizes)
            first_update(learner)
            steps, pairs = math.ceil(1 / time_block(learner, 2)), []
            for _ in range(options.repeats):
                floor = step_flop(learner) / matrix_rate(learner.device)
                pairs.append((time_block(learner, steps), floor))
            seen[key] = {"seconds": statistics.median(s for s, _ in pairs), "gflop": step_flop(learner) / 1e9,
                         "over_floor": statistics.median(s / f for s, f in pairs)}  # fmt: skip
        return seen[key]

    base = measure(options)["seconds"]
    for name, values in SWEEP.items():
        for value in values:
            results.append({"varied": name, "value": value, **measure(dataclasses.replace(options, **{name: value}))})
    print(table(("varied", "value", "ms per environment step", "x the given sizes", "GFLOP", "x floor"),
                [(r["varied"], r["value"], 1e3 * r["seconds"], f"{r['seconds'] / base:.2f}", r["gflop"],
                  f"{r['over_floor']:.2f}") for r in results]))  # fmt: skip
    if options.plot:
        draw(results, options, script, torch.device("cuda" if use_cuda(options) else "cpu"))
    return {"sweep": results}


def draw(results: list[dict], options: Options, script: str, device: torch.device) -> None:
    """The sweep as three panels with logarithmic axes; the dashed line is proportional growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {"utd": "critic updates per environment step", "num_critics": "ensemble size N", "batch_size": "batch size"}
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        rows = [r for r in results if r["varied"] == name]
        x, y = [r["value"] for r in rows], [1e3 * r["seconds"] for r in rows]
        axis.loglog(x, [y[-1] * v / x[-1] for v in x], "--", color="#999999", label="proportional")
        axis.loglog(x, y, "o-", color="#0072B2", label=script)
        axis.set(xlabel=label, xticks=x, xticklabels=x)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms per environment step")
    axes[0].legend(frameon=False)
    figure.suptitle(f"{options.env_id} sizes, {processor(device)}", fontsize=10)
    figure.savefig(options.plot, dpi=150)


def processor(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    return f"{name}, {torch.get_num_threads()} threads"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    _, env, learner = make_learner(options.scripts[0], dataclasses.replace(options, compile=False, cudagraphs=False))
    device, graph = processor(learner.device), options.cudagraphs and use_cuda(options)
    mode = ("compiled" if options.compile else "eager") + (", CUDA graph" if graph else "")
    print(f"{options.env_id} ({env.obs_dim} observations, {env.action_dim} actions), UTD {options.utd}, N {options.num_critics}, "
          f"batch {options.batch_size}, hidden {options.hidden_dim}, {mode}\n{device}, PyTorch {torch.__version__}, "
          f"precision {torch.get_float32_matmul_precision()}, {time.strftime('%Y-%m-%d %H:%M')}\n", flush=True)  # fmt: skip
    results = sweep(options) if options.sweep else compare(options)
    if options.json:
        about = {"options": {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()},
                 "processor": device, "torch": torch.__version__, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}  # fmt: skip
        temporary = options.json.with_name(options.json.name + ".tmp")
        temporary.write_text(json.dumps({**about, **results}, indent=2))
        temporary.replace(options.json)


if __name__ == "__main__":
    main()
