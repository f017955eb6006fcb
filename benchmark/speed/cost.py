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
from experiments import EXPERIMENTS, STEPS, Member, members, of_environment, short_name
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
BASELINE_STEP = {"sac": 0.0127, "td3": 0.0083, "tqc": 0.1707, "tqc20": 20 * 0.1707, "mbpo": 0.37}
RANDOM_STEPS = 5000
EVAL_FREQUENCY = 1000
BIAS_FREQUENCY = 10_000
BIAS_STEPS = 600_000  # at most, of one measurement of the value bias
POLICIES = 12  # of a family, that are evaluated


@dataclass
class Options:
    seeds: int = 8  # runs of each variant in each environment
    gpu_steps_per_second: float = 290.0  # of training on a GPU, one run alone; the same for any UTD and N
    eval_cores: float = math.inf  # cores that evaluate a run beside its training on a GPU, which waits where they are too few


def run_cost(env_id: str, member: Member) -> tuple[float, float, float, float]:
    """Learned steps on a GPU, and core-seconds of training on a CPU, of evaluation and of the value bias, of one run.

    A baseline learns on a CPU alone: no speed of theirs on a GPU has been measured.
    """
    step, evaluation, simulated = MEASURED[short_name(env_id)]
    settings = given(member.flags)
    for argument, points in RELATIVE.items():
        if argument in settings:
            step *= np.interp(float(settings[argument]), list(points), list(points.values()))
    learned = of_environment(STEPS, env_id) - RANDOM_STEPS
    algorithm = settings.get("algorithm")
    policies = 1 if member.script == "vanilla_rac.py" or algorithm else POLICIES
    evaluations = learned / EVAL_FREQUENCY * evaluation * policies / POLICIES
    if algorithm:  # a baseline, which measures no value bias
        return 0.0, learned * BASELINE_STEP[algorithm], evaluations, 0.0
    bias = learned / BIAS_FREQUENCY * BIAS_STEPS * simulated
    return learned, learned * step * CORES, evaluations, bias


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    rate = options.gpu_steps_per_second
    if options.seeds < 1 or not rate > 0 or not options.eval_cores > 0:
        print("error: seeds must be at least 1, gpu_steps_per_second and eval_cores above 0.", file=sys.stderr)
        sys.exit(2)
    gpu = f"GPU: GPU-hours at {rate:g} steps/s"
    print(f"| experiment | redraws | runs | CPU: core-hours | {gpu} | and core-hours of evaluation |")
    print("|---|---|---|---|---|---|")
    for name, experiment in EXPERIMENTS.items():
        if name == "smoke":
            continue
        costs = [run_cost(env_id, member) for env_id in experiment.env_ids for member in members(name, env_id)]
        cpu_seconds = sum(training + evaluation + bias for _, training, evaluation, bias in costs)
        gpu_seconds = 0.0
        beside_gpu = 0.0  # core-seconds
        for learned, _, evaluation, bias in costs:
            if not learned:  # a baseline
                continue
            gpu_seconds += max(learned / rate, evaluation / options.eval_cores)
            gpu_seconds += bias / options.eval_cores  # measured when a run is trained
            beside_gpu += evaluation + bias
        seconds = (cpu_seconds, gpu_seconds, beside_gpu)
        hours = " | ".join(f"{options.seeds * value / 3600:,.0f}" for value in seconds)
        print(f"| `{name}` | {experiment.redraws} | {len(costs) * options.seeds} | {hours} |")


if __name__ == "__main__":
    main()
