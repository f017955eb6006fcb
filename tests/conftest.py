import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = """
--no-compile --total-timesteps 500 --learning-starts 200 --q-lr-warmup-end 300 --batch-size 32 --hidden-dim 8 --utd 1
--num-critics 3 --buffer-size 500 --eval-frequency 100 --eval-episodes 2 --eval-workers 1
""".split()
SCRIPTS = ("rac_sac", "rac_td3", "vanilla_rac", "rac_itm")
CONDITIONS = {"rac_sac": "beta", "rac_td3": "beta", "vanilla_rac": "beta", "rac_itm": "k"}
every_script = pytest.mark.parametrize("cli", SCRIPTS, indirect=True)
# What is shared text in all scripts, where only a family of policies and a single policy are different cases.
family_and_single = pytest.mark.parametrize("cli", ("rac_sac", "vanilla_rac"), indirect=True)


class CommandLine:
    """Runs a script as a user would, in an empty folder, without a GPU or network for Weights & Biases."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.script = folder, name, ROOT / f"{name}.py"
        self.tiny = TINY if name == "vanilla_rac" else [*TINY, "--num-eval-policies", "3"]  # vanilla has one policy
        hidden = ("WANDB_API_KEY", "WANDB_MODE", "DISPLAY", "MUJOCO_GL")
        self.env = {k: v for k, v in os.environ.items() if k not in hidden}
        self.env.update(PYTHONPATH=str(ROOT / "tests"), HOME=str(folder.parent), OMP_NUM_THREADS="1", COLUMNS="120")

    def start(self, *arguments: str, **options) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, str(self.script), *map(str, arguments)], cwd=self.folder, env=self.env,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                **options)  # fmt: skip

    def run(self, *arguments: str, code: int = 0, **options) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=500)
        assert process.returncode == code, f"exit code {process.returncode}, wanted {code}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def train(self, name: str, *arguments: str, env_id: str = "Hopper-v4", **options) -> Path:
        self.run("--env-id", env_id, "--run-name", name, *self.tiny, *arguments, **options)
        return self.folder / "runs" / name


@pytest.fixture
def cli(request, tmp_path):
    """The command line of rac_sac.py, or of each script in turn where a test is marked with every_script."""
    folder = tmp_path / "work"
    folder.mkdir()
    return CommandLine(folder, getattr(request, "param", "rac_sac"))


def children(pid: int) -> list[int]:
    """The living child processes of a process that are evaluation workers."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
            command = stat.with_name("cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z" and "spawn_main" in command:
            found.append(int(stat.parent.name))
    return found


def wait_until(condition, seconds: float = 120.0):
    """The first true value of condition(); fails after `seconds`."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def rows_of(path: Path) -> int:
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def without_wall_clock(path: Path) -> list[str]:
    """The lines of a CSV file without the columns that hold times."""
    lines = [line.split(",") for line in path.read_text().splitlines()]
    keep = [i for i, name in enumerate(lines[0]) if name not in ("wall_seconds", "sps")]
    return [",".join(line[i] for i in keep) for line in lines]


def messages(stderr: str) -> list[str]:
    """What was written to stderr beside the progress bar."""
    lines = [line for part in stderr.split("\n") for line in part.split("\r")]
    return [line.strip() for line in lines if line.strip() and not re.search(r"\d+%\|", line)]


def last_step(path: Path) -> int:
    """The step of the last whole row of a train.csv or eval.csv, 0 before there is one."""
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return int(lines[-1].split(",")[0]) if lines else 0


def kill(process: subprocess.Popen, number: int = signal.SIGKILL) -> tuple[str, str]:
    process.send_signal(number)
    return process.communicate(timeout=120)
