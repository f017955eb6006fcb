"""Whether memory grows over a long run: train 100 000 steps with tiny networks and record the program's resident memory.

    python benchmark/speed/memory.py

Prints resident memory at nine points of the run, evaluation workers included, and exits with 1 if the last is more than 2 %
above the one at a fifth of the run, when replay, compiled code and workers are all there.
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tyro
from job import last_step
from measure import ROOT, fail


@dataclass
class Options:
    script: str = "rac_sac"  # the script to run
    env_id: str = "Hopper-v4"  # the environment
    steps: int = 100_000  # environment steps


def resident(pid: int) -> int:
    """Resident bytes of a process and its children; Linux only."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if str(pid) in (fields["Pid"].strip(), fields["PPid"].strip()) and "VmRSS" in fields:
            total += int(fields["VmRSS"].split()[0]) * 1024
    return total


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    script = ROOT / f"{options.script}.py"
    if not script.is_file():
        fail(f"there is no script {script.name}; give names such as rac_sac.")
    if options.steps < 10_000:
        fail(f"steps is {options.steps}; it must be at least 10000.")
    points = []
    every = options.steps // 10  # environment steps between two points
    with tempfile.TemporaryDirectory() as root:
        log = Path(root, "log")
        command = [sys.executable, str(script), "--run-root", root, "--run-name", "run"]
        command += f"""--env-id {options.env_id} --total-timesteps {options.steps} --learning-starts 1000 --q-lr-warmup-end 1000
            --buffer-size 5000 --batch-size 32 --hidden-dim 8 --num-critics 2 --utd 1 --eval-frequency 2000 --eval-episodes 2
            --checkpoint-seconds 20""".split()
        with open(log, "wb") as output:
            process = subprocess.Popen(command, stderr=output)
        start = time.time()
        while process.poll() is None:
            time.sleep(0.5)
            step = last_step(Path(root, "run"), "train.csv")
            if (len(points) + 1) * every <= step < options.steps:
                points.append(resident(process.pid))
                print(f"step {step:>7}  {points[-1] / 2**20:7.1f} MiB  {time.time() - start:5.0f} s", flush=True)
        if process.returncode or len(points) < 5:
            said = log.read_text().strip().splitlines() or ["nothing"]
            fail(f"the run ended with exit code {process.returncode} after {len(points)} points; it said: {said[-1]}")
    growth = points[-1] / points[1] - 1
    print(f"growth from a fifth of the run to its end: {100 * growth:+.2f} %")
    return int(growth > 0.02)


if __name__ == "__main__":
    sys.exit(main())
