"""What the speed tools share: a script's learner ready to be timed, this machine's matrix rate, tables, results as files."""

import csv
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the scripts do when they are the program

import torch
from torch.utils.benchmark import Timer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
# Of Inductor: a third fewer kernels on CUDA, by the code that is generated. They join COMPILER_OPTIONS["cuda"] in the scripts
# once a GPU has timed them.
FEWER_KERNELS = {"combo_kernels": True, "split_reductions": False, "force_pointwise_cat": True}
STEP = 20_000  # a step after the warm-up of the learning rate


@dataclass
class Sizes:
    env_id: str = "Ant-v4"  # the environment whose observation and action sizes are used, and whose simulator
    utd: int = 20  # critic updates per environment step
    num_critics: int = 10  # ensemble size
    batch_size: int = 256  # minibatch
    hidden_dim: int = 256  # width of the hidden layers
    cuda: bool | None = None  # whether to use the GPU; by default, when one is present

    def device(self) -> torch.device:
        return torch.device("cuda" if self.cuda is not False and torch.cuda.is_available() else "cpu")


def fail(sentence: str) -> None:
    """End with the sentence of a user's mistake."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def make_learner(script: str, sizes: Sizes, mode: str = "compile+graph", precision: str = "auto"):
    """A script's module, an environment, and a learner with a full replay of random numbers; sets torch's precision.

    mode: "eager", or "compile", "graph" or both, joined by +; behind them names of FEWER_KERNELS, or "fewer": all.
    ValueError where the script refuses its arguments, RuntimeError where the mode does not work here.
    """
    if not (ROOT / f"{script}.py").is_file():
        fail(f"there is no script {script}.py; give names such as rac_sac.")
    module = importlib.import_module(script)
    env = module.FlatEnv(sizes.env_id)
    args = module.Args(
        **{name: getattr(sizes, name) for name in Sizes.__dataclass_fields__},
        compile="compile" in mode,
        cudagraphs="graph" in mode,
        matmul_precision=precision,
        total_timesteps=20_000,
        buffer_size=20_000,
    )
    args = module.check_args(args, env.action_dim)
    device = module.choose_device(args, None)
    module.set_up_torch(args, device)
    fewer = {name: value for name, value in FEWER_KERNELS.items() if "fewer" in mode or name in mode}
    with mock.patch.dict(module.COMPILER_OPTIONS, cuda={**module.COMPILER_OPTIONS["cuda"], **fewer}):
        learner = module.Learner(args, env.obs_dim, env.action_dim, device)
    learner.replay.normal_(generator=torch.Generator(device).manual_seed(0))
    learner.replay[:, env.obs_dim + env.action_dim + 1] = 0  # nothing terminates
    learner.filled.fill_(len(learner.replay))
    if device.type == "cuda":
        learner.warm_up()  # captures the graphs
    return module, env, learner


def time_block(learner, steps: int) -> float:
    """Seconds per environment step of the updates alone; the first one compiles."""
    start = time.perf_counter()
    for _ in range(steps):
        learner.update(STEP)
    torch.get_device_module(learner.device).synchronize()
    return (time.perf_counter() - start) / steps


def matrix_rate(device: torch.device) -> float:
    """FLOP per second of the fastest exact float32 batched product at any precision setting.

    Ten products of 256 x 256 x 256, the work's own, on a CPU; of 2048 x 2048 x 2048 on a GPU, where smaller ones would
    measure the launch.
    """
    size = 2048 if device.type == "cuda" else 256
    a, b = torch.randn(2, 10, size, size, device=device)
    exact, seconds, before = a.double() @ b.double(), [], torch.get_float32_matmul_precision()
    timer = Timer("torch.bmm(a, b)", globals={"torch": torch, "a": a, "b": b}, num_threads=torch.get_num_threads())
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        if float((torch.bmm(a, b) - exact).norm() / exact.norm()) < 1e-6:
            seconds += [timer.timeit(20).mean for _ in range(5)]
    torch.set_float32_matmul_precision(before)
    return 2 * 10 * size**3 / min(seconds)


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


def words(machine: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def table(rows: list[dict]) -> str:
    """Rows of strings and numbers as aligned text, under the names of the first one's columns; a row may lack some."""
    cells = [list(rows[0]), *([row.get(name, "") for name in rows[0]] for row in rows)]
    cells = [[f"{x:.1f}" if isinstance(x, float) else str(x) for x in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)


def about(device: torch.device) -> dict[str, str]:
    """What a measurement depends on: processor, versions, commit, time."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    if device.type == "cpu" and os.path.exists("/proc/cpuinfo"):
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "numpy", "gymnasium", "mujoco")}
    return {
        "processor": name,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **versions,
        "commit": commit or "unknown",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def write(folder: Path, name: str, machine: dict, options, rows: list[dict], **more) -> None:
    """Everything measured as <name>.json, and `rows`, each with the machine, as <name>.csv, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}.tmp" for ending in ("json", "csv")]
    content = {"machine": machine, "options": asdict(options), "rows": rows, **more}
    paths[0].write_text(json.dumps(content, indent=2, default=str) + "\n")
    with open(paths[1], "w", newline="") as file:
        columns = [key for key, value in rows[0].items() if not isinstance(value, dict | list)] + list(machine)
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, **machine} for row in rows)
    for path in paths:
        path.replace(path.with_suffix(""))
