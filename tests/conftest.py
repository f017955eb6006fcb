"""What the tests share: the scripts as modules, their command lines, waiting for files, and a fork in place of the scripts."""

import contextlib
import csv
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: several processes test at once, and networks are tiny
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in what they start in the background
ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("rac_sac", "rac_td3", "vanilla_rac", "rac_itm")
TINY = """--cuda False --no-compile --total-timesteps 300 --learning-starts 100 --q-lr-warmup-end 200 --batch-size 16
--hidden-dim 8 --utd 2 --num-critics 3 --buffer-size 250 --eval-frequency 100 --eval-episodes 2 --eval-workers 0""".split()
if not importlib.util.find_spec("rliable"):  # of benchmark/requirements.txt
    collect_ignore_glob = ["benchmark/*"]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
needs_gpu = (pytest.mark.cuda, pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a GPU"))
every_script = pytest.mark.every_script  # a test of the command line, for each script in turn

# A fork in place of the scripts ---
# They know values, flags or functions of these scripts
OF_THE_FOUR = """test_targets_by_hand test_simba test_statistics test_statistics_in_files test_defaults test_ablations_and_redq
test_wrong_calls test_actions_within_their_bounds test_a_program_without_a_guard test_a_return_that_is_no_number""".split()


def pytest_collection_modifyitems(config, items):
    """With --script only tests that any script can take."""
    if config.getoption("--script"):
        taken = [item for item in items if {"cli", "script"} & {*item.fixturenames} and item.originalname not in OF_THE_FOUR]
        taken = [item for item in taken if "benchmark" not in item.keywords]
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = taken


def scripts(config) -> list[Path]:
    given = config.getoption("--script")
    return [given.resolve()] if given else [ROOT / f"{name}.py" for name in SCRIPTS]


def with_network(network: str | None) -> list[str]:
    """Arguments of a run with these networks."""
    return ["--network", network] if network else []


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
    """The argument `script` of a test: each of the four scripts as a module, or that of --script; `cli` likewise.

    `network`: each value that the argument of this name can have, or None where a fork has no such argument.
    """
    paths = scripts(metafunc.config)
    if "network" in metafunc.fixturenames:
        networks = typing.get_args(typing.get_type_hints(load_script(paths[0]).Args).get("network"))
        metafunc.parametrize("network", networks or [None])
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
def environment(**changes: str) -> dict[str, str]:
    """Variables of a child process: no GPU, no display, no Weights & Biases; toy environments can be imported."""
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "DISPLAY", "MUJOCO_GL", "RAY_ADDRESS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120", **changes}


@contextlib.contextmanager
def handlers_of_signals():
    """What a program sets in this process is put back."""
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
        self.one_policy = ["--num-eval-policies", "1"] if hasattr(self.script.Args, "num_eval_policies") else []
        self.tiny = [*TINY, "--num-eval-policies", "3"] if self.one_policy else TINY

    def fork(self, old: str, new: str) -> "CommandLine":
        """That of a copy with another text in place of `old`."""
        path = self.folder.parent / "fork.py"
        path.write_text(self.path.read_text().replace(old, new))
        return CommandLine(path, self.folder, self.monkeypatch, self.capsys)

    def call(self, *arguments, code: int = 0) -> tuple[str, str]:
        """By main(), in this process, which saves the seconds in which a process imports torch: stdout, stderr."""
        self.capsys.readouterr()
        with self.monkeypatch.context() as patch, handlers_of_signals():
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", [str(self.path), *map(str, arguments)])
            try:
                ended = self.script.main()
            except SystemExit as error:  # of the parser of the command line
                ended = error.code
        out, err = self.capsys.readouterr()
        assert ended == code, f"exit code {ended}\n{out}\n{err}"
        return out, err

    def train(self, name: str, *arguments, env_id: str = "Hopper-v4") -> Path:
        """The directory of a tiny run in this process."""
        self.call(*self.tiny, "--env-id", env_id, "--run-name", name, *arguments)
        return self.folder / "runs" / name

    def start(self, *arguments, **options) -> subprocess.Popen:
        """In a process of its own."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment(), **options}
        command = [sys.executable, str(self.path), *map(str, arguments)]
        return subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, **options)


@pytest.fixture
def cli(request, tmp_path, monkeypatch, capsys) -> CommandLine:
    """The command line of rac_sac.py or of --script, of each script in turn where a test is marked with every_script."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "work"
    folder.mkdir()
    path = getattr(request, "param", scripts(request.config)[0])
    return CommandLine(ROOT / path, folder, monkeypatch, capsys)


NUMBERS = itertools.count()  # no id twice


@pytest.fixture
def toy(monkeypatch):
    """toy(entry, **options): registers an environment for runs in this process and returns its id."""
    import gymnasium

    def register(entry, max_episode_steps: int | None = 50, **options) -> str:
        env_id = f"Toy{next(NUMBERS)}-v0"
        spec = gymnasium.envs.registration.EnvSpec(env_id, entry_point=entry, max_episode_steps=max_episode_steps, kwargs=options)
        monkeypatch.setitem(gymnasium.registry, env_id, spec)
        return env_id

    return register


# Files and waiting ---
def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def last_step(path: Path) -> int:
    """The step of the last whole row of a train.csv or eval.csv, 0 before there is one."""
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return int(lines[-1].split(",")[0]) if lines else 0


def without_wall_clock(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file without the columns that hold times."""
    return [{k: v for k, v in row.items() if k not in ("charts/wall_seconds", "charts/SPS")} for row in read_rows(path)]


def wait_until(condition, seconds: float = 240.0):
    """The first true value of condition(); fails after a time that no machine should need."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("waited in vain")
