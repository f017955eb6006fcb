"""Time one environment step of training, with the script's own functions, beside this machine's matrix floor.

    python benchmark/throughput.py

Transitions are random numbers in the replay, so no simulator is in the measurement. The floor is the step's matrix
products at the best exact float32 rate that a batched 256 x 256 x 256 product reaches here.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rac_sac


@dataclass
class Options:
    env_id: str = "Ant-v4"
    """whose observation and action sizes are used"""
    utd: int = 20
    """critic updates per environment step"""
    num_critics: int = 10
    """ensemble size"""
    batch_size: int = 256
    """minibatch"""
    compile: bool = True
    """torch.compile"""
    cudagraphs: bool = True
    """one CUDA graph per environment step, on a GPU"""
    cuda: bool | None = None
    """whether to use the GPU; by default, when one is present"""
    repeats: int = 5
    """medians over this many blocks of ten steps"""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_update(learner, repeats: int) -> tuple[float, list[float]]:
    """Seconds until the first update is done (compilation), and seconds per environment step, one for each block."""
    learner.replay.normal_()
    learner.replay[:, learner.obs_dim + learner.action_dim + 1] = 0  # nothing terminates
    learner.state["size"].fill_(len(learner.replay))
    start = time.perf_counter()
    learner.update(20_000)
    synchronize(learner.device)
    first = time.perf_counter() - start
    blocks = []
    for block in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(10):
            learner.update(20_000)
        synchronize(learner.device)
        if block:  # the first block is burn-in
            blocks.append((time.perf_counter() - start) / 10)
    return first, blocks


def matrix_rate(device: torch.device) -> float:
    """FLOP per second of the fastest exact float32 batched product (10 x 256 x 256 x 256) at any precision setting."""
    a, b = torch.randn(2, 10, 256, 256, device=device)
    exact, best = a.double() @ b.double(), 0.0
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        if float((torch.bmm(a, b) - exact).norm() / exact.norm()) < 1e-6:
            for _ in range(10):
                synchronize(device)
                start = time.perf_counter()
                for _ in range(50):
                    torch.bmm(a, b)
                synchronize(device)
                best = max(best, 50 * 2 * 10 * 256**3 / (time.perf_counter() - start))
    torch.set_float32_matmul_precision(before)
    return best


def step_flop(args, obs_dim: int, action_dim: int) -> float:
    """FLOP of the matrix products of one environment step's updates: G critic updates, one actor update, the targets."""
    hidden, inputs = args.hidden_dim, obs_dim + action_dim + 1
    forward = inputs * hidden + hidden * hidden + hidden  # multiply-adds of one member for one sample
    critic = 2 * forward + forward + hidden * hidden + hidden  # target, online, weight gradients, hidden input gradients
    actor = (obs_dim + 1) * hidden + hidden * hidden + 2 * hidden * action_dim
    samples = args.batch_size * (args.utd * (args.num_critics * critic + actor) + 2 * args.num_critics * forward + 4 * actor)
    return 2 * samples


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    device = torch.device("cuda" if options.cuda is not False and torch.cuda.is_available() else "cpu")
    env = rac_sac.FlatEnv(options.env_id)
    args = rac_sac.Args(env_id=options.env_id, utd=options.utd, num_critics=options.num_critics, batch_size=options.batch_size,
                        compile=options.compile, cudagraphs=options.cudagraphs, buffer_size=20_000,
                        target_entropy=-float(env.action_dim))  # fmt: skip
    rac_sac.set_up_torch(args, device)
    learner = rac_sac.Learner(args, env.obs_dim, env.action_dim, device)
    first, blocks = time_update(learner, options.repeats)
    floor = step_flop(args, env.obs_dim, env.action_dim) / matrix_rate(device)
    median = statistics.median(blocks)
    print(f"{options.env_id}, UTD {options.utd}, N {options.num_critics}, batch {options.batch_size}, {device.type}, "
          f"{'compiled' if options.compile else 'eager'}, {torch.get_num_threads()} threads")  # fmt: skip
    print(f"first update {first:.1f} s")
    print(f"ms per environment step: median {1e3 * median:.1f} (min {1e3 * min(blocks):.1f}, max {1e3 * max(blocks):.1f})")
    print(f"matrix floor {1e3 * floor:.1f} ms, ratio {median / floor:.2f}")


if __name__ == "__main__":
    main()
