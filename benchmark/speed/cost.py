"""What each experiment costs, computed from measured speed; prints the table of benchmark/README.md.

python benchmark/speed/cost.py --seeds 8
python benchmark/speed/cost.py --seeds 8 --gpu-steps-per-second 100
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import tyro
from experiments import EXPERIMENTS, STEPS, members, of_environment, short_name
from flags import given

# Measured on 2 cores of an AMD EPYC with AVX2, 2026-11-21, by evaluation_cost.py: seconds per step of training (UTD 20, N 10)
# on both cores, core-seconds of an evaluation of 12 policies with no episode ending early, seconds per simulated step.
CORES = 2
MEASURED = {
    "Humanoid": (0.4489, 85.7, 714.0e-6),
    "Ant": (0.2378, 51.3, 427.6e-6),
    "Walker2d": (0.2676, 36.9, 307.4e-6),
    "Hopper": (0.2804, 26.0, 217.0e-6),
}
# Relative cost of a step, of the same day (RESULTS.md); between the measured values along a straight line.
RELATIVE = {"utd": {1: 0.09, 5: 0.27, 10: 0.54, 20: 1.0}, "num_critics": {2: 0.24, 5: 0.58, 10: 1.0}}
# Core-seconds of a step of the baselines: CPU time of 40 steps (TQC: 8) of Stable-Baselines3 on Hopper-v4, median of 5, one
# thread on an AMD EPYC with AVX-512 that other processes used too. TQC20: 20 times TQC's.
# MBPO: CPU time of the first 8000 learned steps on Hopper-v4, on an Intel Xeon; its model learns from ever more transitions.
BASELINES = {"sac": 0.0127, "td3": 0.0083, "tqc": 0.1707, "tqc20": 20 * 0.1707, "mbpo": 0.37}
RANDOM_STEPS, EVAL_FREQUENCY, BIAS_FREQUENCY, BIAS_STEPS, POLICIES = 5000, 1000, 10_000, 600_000, 12


@dataclass
class Options:
    seeds: int = 8  # runs of each variant in each environment
    gpu_steps_per_second: float = 100.0  # of training on a GPU, measured by throughput.py; the same for any UTD and N
    eval_cores: float = math.inf  # cores that evaluate a run beside its training on a GPU, which waits where they are too few


def run_cost(env_id: str, script: str, flags: str) -> tuple[float, float, float]:
    """Learned steps, core-seconds of training on a CPU, and core-seconds of evaluation and value bias of one run."""
    step, evaluation, simulated = MEASURED[short_name(env_id)]
    settings = given(flags)
    for argument, points in RELATIVE.items():
        if argument in settings:
            step *= np.interp(float(settings[argument]), list(points), list(points.values()))
    learned, algorithm = of_environment(STEPS, env_id) - RANDOM_STEPS, settings.get("algorithm")
    policies = 1 if script == "vanilla_rac.py" or algorithm else POLICIES
    evaluations = learned / EVAL_FREQUENCY * evaluation * policies / POLICIES
    if algorithm:  # a baseline, which measures no value bias
        return learned, learned * BASELINES[algorithm], evaluations
    bias = learned / BIAS_FREQUENCY * BIAS_STEPS * simulated
    return learned, learned * step * CORES, evaluations + bias


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    rate = options.gpu_steps_per_second
    gpu = f"GPU: GPU-hours at {rate:g} steps/s"
    print(f"| experiment | redraws | runs | CPU: core-hours | {gpu} | and core-hours of evaluation |")
    print("|---|---|---|---|---|---|")
    for experiment, (what, _, env_ids, _) in EXPERIMENTS.items():
        if experiment == "smoke":
            continue
        costs = [run_cost(env_id, script, flags) for env_id in env_ids for _, script, flags in members(experiment, env_id)]
        gpu_seconds = sum(max(learned / rate, evaluation / options.eval_cores) for learned, _, evaluation in costs)
        _, training, evaluation = (sum(column) for column in zip(*costs, strict=True))
        seconds = (training + evaluation, gpu_seconds, evaluation)
        hours = " | ".join(f"{options.seeds * value / 3600:,.0f}" for value in seconds)
        print(f"| `{experiment}` | {what} | {len(costs) * options.seeds} | {hours} |")


if __name__ == "__main__":
    main()
