"""What the tests share: the scripts as modules, their command lines, waiting for files, and a fork in place of the scripts."""

import contextlib
import csv
import importlib.util
import os
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: several processes test at once, and networks are tiny
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs, and so would all runs here
ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("rac_sac", "rac_td3", "vanilla_rac", "rac_itm")
# It learns from step 97 on, evaluates at steps 96, 103 and 110, and its replay wraps at step 95.
TINY = """--cuda False --no-compile --total-timesteps 110 --learning-starts 96 --buffer-size 95 --eval-frequency 7
--eval-episodes 2 --eval-workers 0 --batch-size 16 --hidden-dim 8 --utd 1 --num-critics 3 --policy-lr 0.01
--q-lr-warmup-end 200""".split()
if not importlib.util.find_spec("rliable"):  # of benchmark/requirements.txt
    collect_ignore_glob = ["benchmark/*"]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
every_script = pytest.mark.every_script  # a test of the command line, for each script in turn
of_the_four = pytest.mark.of_the_four  # a test that knows values, flags or functions of these scripts


# A fork in place of the scripts ---
def can_take_a_fork(item) -> bool:
    """Whether a test has a script, and any script can be it."""
    if not {"cli", "script"} & {*item.fixturenames}:
        return False
    return not {"of_the_four", "benchmark"} & {*item.keywords}


def pytest_collection_modifyitems(config, items):
    """With --script only tests that any script can take."""
    if config.getoption("--script"):
        taken = [item for item in items if can_take_a_fork(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = taken


def script_paths(config) -> list[Path]:
    given = config.getoption("--script")
    return [given.resolve()] if given else [ROOT / f"{name}.py" for name in SCRIPTS]


def with_network(network: str | None) -> list[str]:
    """Arguments of a run with these networks."""
    return ["--network", network] if network else []


def networks_of(script) -> list:
    """Each value that the argument `network` can have, or None where a fork has no such argument."""
    hints = typing.get_type_hints(script.Args)
    return [*typing.get_args(hints.get("network"))] or [None]


def known_arguments(script, wanted: dict) -> dict:
    """Those of them that a script has."""
    return {name: value for name, value in wanted.items() if hasattr(script.Args, name)}


def load_script(path: Path):
    """A script as a module, by its file."""
    name = path.stem
    if name not in sys.modules or Path(sys.modules[name].__file__) != path:
        sys.path.insert(0, str(path.parent))  # for evaluation workers
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_generate_tests(metafunc):
    """The argument `script` of a test: each of the four scripts as a module, or that of --script.

    `cli`, where a test is marked with every_script: the command line of each.
    `network`: each of networks_of() of the first.
    """
    paths = script_paths(metafunc.config)
    if "network" in metafunc.fixturenames:
        metafunc.parametrize("network", networks_of(load_script(paths[0])))
    names = [path.stem for path in paths]
    if "script" in metafunc.fixturenames:
        metafunc.parametrize("script", [load_script(path) for path in paths], ids=names)
    if metafunc.definition.get_closest_marker("every_script"):
        metafunc.parametrize("cli", paths, indirect=True, ids=names)


@pytest.fixture(autouse=True)
def settings_of_torch():
    """What a run sets for its whole process is put back after each test."""
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


# Command lines ---
def child_environ(**changes: str) -> dict[str, str]:
    """Variables of a child process: no GPU, no display, no Weights & Biases; toy environments can be imported."""
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "DISPLAY", "MUJOCO_GL", "RAY_ADDRESS", "GOMP_SPINCOUNT")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120", **changes}


@contextlib.contextmanager
def signal_handlers_put_back():
    """Those that a program sets in this process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class CommandLine:
    """A script as users call it, in an empty folder: by its main() in this process, or in a process of its own."""

    def __init__(self, path: Path, folder: Path, monkeypatch, capsys):
        self.path, self.folder, self.monkeypatch, self.capsys = path, folder, monkeypatch, capsys
        self.name = path.stem
        self.script = load_script(path)
        self.tiny = [*TINY, *self.policies(2)]

    def policies(self, number: int) -> list[str]:
        """Arguments of a run that evaluates as many policies, where the script has more than one."""
        return ["--num-eval-policies", str(number)] if hasattr(self.script.Args, "num_eval_policies") else []

    def fork(self, old: str, new: str) -> "CommandLine":
        """That of a copy with another text in place of `old`."""
        source = self.path.read_text()
        if old not in source and self.name not in SCRIPTS:
            pytest.skip(f"{self.name} has no {old}")
        assert old in source
        path = self.folder.parent / "fork.py"
        path.write_text(source.replace(old, new))
        return CommandLine(path, self.folder, self.monkeypatch, self.capsys)

    def call(self, *arguments, code: int = 0) -> tuple[str, str]:
        """By main() in this process, for another one would import torch for seconds. Returns stdout, stderr."""
        self.capsys.readouterr()
        with self.monkeypatch.context() as patch, signal_handlers_put_back():
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", [str(self.path), *map(str, arguments)])
            try:
                exit_code = self.script.main()
            except SystemExit as error:  # of the parser of the command line
                exit_code = error.code
        out, err = self.capsys.readouterr()
        assert exit_code == code, f"exit code {exit_code}\n{out}\n{err}"
        return out, err

    def tiny_run(self, name: str, *arguments, env_id: str = "toy_envs:Point-v0") -> list:
        """The arguments of a tiny run, for call() or start()."""
        return [*self.tiny, "--env-id", env_id, "--run-name", name, *arguments]

    def train(self, name: str, *arguments, env_id: str = "toy_envs:Point-v0") -> Path:
        """The directory of a tiny run in this process."""
        self.call(*self.tiny_run(name, *arguments, env_id=env_id))
        return self.folder / "runs" / name

    def start(self, *arguments, program: Path | None = None, **options) -> subprocess.Popen:
        """The script, or a program, in a process of its own."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": child_environ(), **options}
        command = [sys.executable, str(program or self.path), *map(str, arguments)]
        return subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, **options)

    def call_process(self, *arguments, code: int = 0, **options) -> tuple[str, str]:
        """As start(), to its end. Returns stdout, stderr."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, err
        return out, err

    def call_program(self, text: str, code: int = 0) -> tuple[str, str]:
        """A program of this text, which can import the script and the toy environments. Returns stdout, stderr."""
        program = self.folder / "program.py"
        program.write_text(text)
        path = os.pathsep.join([str(self.path.parent), str(ROOT / "tests")])
        return self.call_process(program=program, env=child_environ(PYTHONPATH=path), code=code)


@pytest.fixture
def cli(request, tmp_path, monkeypatch, capsys) -> CommandLine:
    """The command line of rac_sac.py or of --script, of each script in turn where a test is marked with every_script.

    Weights & Biases is offline.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "work"
    folder.mkdir()
    path = getattr(request, "param", script_paths(request.config)[0])
    return CommandLine(ROOT / path, folder, monkeypatch, capsys)  # where a path is absolute, that is all of it


# Files, processes and waiting ---
def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def last_step(path: Path) -> int:
    """The step of the last whole row of a train.csv or eval.csv, 0 before there is one."""
    if not path.exists():
        return 0
    lines = path.read_text().split("\n")[1:-1]
    return int(lines[-1].split(",")[0]) if lines else 0


def without_wall_clock(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file without the columns that hold times."""
    return [{k: v for k, v in row.items() if k not in ("charts/wall_seconds", "charts/SPS")} for row in read_rows(path)]


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def processes_made(folder: Path) -> list[int]:
    """The processes that a test's environments have made."""
    return [int(path.name) for path in Path(folder, "pids").iterdir()]


def processes_running(folder: Path) -> list[int]:
    """Those of them that still run."""
    return [pid for pid in processes_made(folder) if is_running(pid)]


def wait_until(condition, seconds: float = 240.0):
    """The first true value of condition(); fails after a time that no machine should need."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("waited in vain")
