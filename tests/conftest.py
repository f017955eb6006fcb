import contextlib
import csv
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: networks are tiny, and tests run side by side

import filelock
import pytest

# Under nohup, or behind the & of a shell's script, they are ignored, and would be in all that the tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).resolve().parent.parent
TINY = """
--no-compile --cuda False --total-timesteps 500 --learning-starts 200 --q-lr-warmup-end 300 --batch-size 32 --hidden-dim 8
--utd 1 --num-critics 3 --buffer-size 500 --eval-frequency 100 --eval-episodes 2 --eval-workers 0
""".split()
BRIEF = """
--run-name run --total-timesteps 60 --learning-starts 40 --q-lr-warmup-end 50 --buffer-size 60 --eval-frequency 10
""".split()
SCRIPTS = ("rac_sac", "rac_td3", "vanilla_rac", "rac_itm")
CONDITIONS = {"rac_sac": "beta", "rac_td3": "beta", "vanilla_rac": "beta", "rac_itm": "k"}
needs_gpu = (pytest.mark.cuda, pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a GPU"))
every_script = pytest.mark.parametrize("cli", SCRIPTS, indirect=True)


def slow_but(*fast: str):
    """All four scripts, those that are not named with the slow tests: for what is the same text in all of them."""
    params = [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS]
    return pytest.mark.parametrize("cli", params, indirect=True)


# ------------------------------------------------------------------------------------------------------ tests of a script
def pytest_addoption(parser):
    parser.addoption("--script", help="a copy of one of the scripts; test_method.py tests its mathematics in place of theirs")


def script_to_test(config) -> Path | None:
    given = config.getoption("--script")
    return (config.invocation_params.dir / given).resolve() if given else None


def pytest_configure(config):
    path = script_to_test(config)
    if path and not path.is_file():
        raise pytest.UsageError(f"--script: there is no file {path}")


def load_script(path: Path):
    """A script as a module, by the path of its file."""
    name = path.stem
    if name not in sys.modules or Path(sys.modules[name].__file__) != path:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_generate_tests(metafunc):
    """The argument `script` of a test: each of the four scripts, or that of --script, where they are of its `kinds`."""
    if "script" not in metafunc.fixturenames:
        return
    import access

    given, marker = script_to_test(metafunc.config), metafunc.definition.get_closest_marker("kinds")
    modules = [load_script(path) for path in ([given] if given else [ROOT / f"{name}.py" for name in SCRIPTS])]
    metafunc.parametrize(
        "script", [m for m in modules if marker is None or access.kind_of(m) in marker.args], ids=lambda module: module.__name__
    )


@pytest.fixture(autouse=True)
def settings_of_torch():
    """What a run sets for its whole process is put back after each test that runs one in this process."""
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


# ----------------------------------------------------------------------------------------------------- tests of a program
class CommandLine:
    """Runs a script as a user would, in an empty folder, without a GPU or network for Weights & Biases.

    tiny: arguments of a run of 500 steps that takes seconds; brief: of one of 60 steps, 20 of them with updates, named `run`.
    """

    def __init__(self, folder: Path, name: str, monkeypatch, capsys):
        self.folder = folder
        self.name = name
        self.script = ROOT / f"{name}.py"
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.tiny = TINY if name == "vanilla_rac" else [*TINY, "--num-eval-policies", "3"]  # vanilla has one policy
        self.brief = [*self.tiny, *BRIEF]
        self.env = environment(HOME=str(folder.parent))

    @property
    def run_dir(self) -> Path:
        """The directory of a run with the arguments `brief`."""
        return self.folder / "runs" / "run"

    def start(self, *arguments: str, **options) -> subprocess.Popen:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen(
            [sys.executable, str(self.script), *map(str, arguments)],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            **options,
        )

    def run(self, *arguments: str, code: int = 0, **options) -> subprocess.CompletedProcess:
        """The script with these arguments, in a process of its own."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=500)
        assert process.returncode == code, f"exit code {process.returncode}, wanted {code}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def call(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess:
        """The same by its main(), in this process: saves the seconds in which a process starts and imports torch."""
        self.capsys.readouterr()  # what was printed before
        with self.monkeypatch.context() as patch, handlers_of_signals():
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", [str(self.script), *map(str, arguments)])
            patch.setattr(os, "_exit", exits_at_once)
            try:
                ended = load_script(self.script).main() or 0
            except SystemExit as error:  # of the command line's parser
                ended = error.code or 0
        out, err = self.capsys.readouterr()
        assert code in (ended, None), f"exit code {ended}, wanted {code}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, code, out, err)

    def train(self, name: str, *arguments: str, env_id: str = "Hopper-v4") -> Path:
        """A tiny run in this process."""
        self.call("--env-id", env_id, "--run-name", name, *self.tiny, *arguments)
        return self.folder / "runs" / name

    @contextlib.contextmanager
    def held(self, name: str, *arguments: str, at: int | None = None, **options):
        """A tiny run on Hopper-v4 in a process of its own, which waits at step `at` of its environment, or whose
        evaluation workers wait in their first one, until release() is called; killed in the end if it still runs."""
        for path in self.folder.glob("held.*"):
            path.unlink()
        (self.folder / "release").unlink(missing_ok=True)
        self.env.update({"HOLD_AT": str(at or 0), "HOLD_WORKERS": str(int(at is None))})
        if not arguments or arguments[0] not in ("--resume", "--evaluate"):
            arguments = ("--env-id", "toy_envs:Hopper-v0", "--run-name", name, *self.tiny, *arguments)
        process = self.start(*arguments, **options)
        try:
            yield process, self.folder / "runs" / name
        finally:
            process.kill()
            process.wait()
            self.release()

    def holding(self, process: subprocess.Popen, count: int = 1) -> list[int]:
        """Waits until `count` processes of a held run wait; returns their numbers."""
        wait_until(lambda: process.poll() is not None or len(list(self.folder.glob("held.*"))) >= count)
        assert process.poll() is None, process.communicate()
        return [int(path.suffix[1:]) for path in self.folder.glob("held.*")]

    def release(self) -> None:
        (self.folder / "release").touch()


def exits_at_once(code: int):
    """In place of os._exit(), which would end the tests."""
    raise AssertionError(f"os._exit({code}) beside {threading.enumerate()}")


@contextlib.contextmanager
def handlers_of_signals():
    """What a script sets in this process is put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child process: no GPU, no display, no Weights & Biases; toy environments can be imported."""
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "DISPLAY", "MUJOCO_GL", "RAY_ADDRESS")
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    return {
        **{k: v for k, v in os.environ.items() if k not in hidden},
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "120",
        **changes,
    }


@pytest.fixture
def cli(request, tmp_path, monkeypatch, capsys):
    """The command line of rac_sac.py, or of each script in turn where a test is marked with every_script or slow_but."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    return CommandLine(folder, getattr(request, "param", "rac_sac"), monkeypatch, capsys)


@pytest.fixture
def toy():
    """Registers an environment for runs in this process, toy(Counter, length=3), and returns its id.

    Of the environments made under the id, `number` counts from 0; with --eval-workers 0 the first one trains.
    """
    import gymnasium
    import toy_envs

    ids = (f"Toy{i}-v0" for i in itertools.count())
    registered = []

    def register(entry=toy_envs.Counter, **options) -> str:
        numbers = itertools.count()

        def make(**more):
            env = entry(**options, **more)
            env.unwrapped.number = next(numbers)
            return env

        registered.append(next(ids))
        gymnasium.register(registered[-1], make)
        return registered[-1]

    yield register
    for env_id in registered:
        del gymnasium.registry[env_id]


@pytest.fixture
def whole(cli, tmp_path_factory):
    """(run directory, stdout, stderr) of an undisturbed tiny run on Hopper-v4, made once for all tests: not to be changed."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"whole_{cli.name}"  # one for all processes
    with filelock.FileLock(f"{folder}.lock"):
        if not (folder / "stderr").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what is left where it has failed for another test
            folder.mkdir()
            process = CommandLine(folder, cli.name, None, None).run("--env-id", "Hopper-v4", *cli.tiny, "--eval-workers", "1")
            assert [p.name for p in folder.iterdir()] == ["runs"]  # no MUJOCO_LOG.TXT, nothing else
            (folder / "stdout").write_text(process.stdout)
            (folder / "stderr").write_text(process.stderr)
    (run_dir,) = (folder / "runs").iterdir()
    return run_dir, (folder / "stdout").read_text(), (folder / "stderr").read_text()


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


def wait_until(condition, seconds: float = 240.0):
    """The first true value of condition(); fails after `seconds`, which no machine should need."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def sentence_of(result: subprocess.CompletedProcess) -> str:
    """The one sentence with which a mistake is answered."""
    (line,) = messages(result.stderr)
    assert line.startswith("error: "), line
    assert result.stdout == ""
    return line


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of a run directory; its lock may come and go."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def checkpoint_of(run_dir: Path) -> dict:
    """The content of a run's checkpoint."""
    import torch

    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def assert_same_networks(a: Path, b: Path) -> None:
    """All that learning has changed is the same, bit for bit."""
    import torch

    first = checkpoint_of(a)["tensors"]
    second = checkpoint_of(b)["tensors"]
    assert first.keys() == second.keys()
    for name in first.keys() - {"metrics"}:  # sums since the last row of train.csv, of which a longer run has others
        assert torch.equal(first[name], second[name]), name


def assert_same_run(a: Path, b: Path, files=("eval.csv", "train.csv")) -> None:
    """Two runs were the same, bit for bit, but for the time they took."""
    import torch

    for name in files:
        assert without_wall_clock(a / name) == without_wall_clock(b / name)
    for name in ("policy.pt", "best_policy.pt"):
        policies = [torch.load(run_dir / name, weights_only=True) for run_dir in (a, b)]
        first, second = (policy["actor"] for policy in policies)
        assert policies[0]["evaluation"] == policies[1]["evaluation"]
        assert first.keys() == second.keys()
        assert all(torch.equal(first[parameter], second[parameter]) for parameter in first)
    assert_same_networks(a, b)
    first = checkpoint_of(a)
    second = checkpoint_of(b)
    for name in ("replay", "obs", "actions", "generator"):
        assert torch.equal(first[name], second[name]), name


def rows_of(path: Path) -> int:
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def without_wall_clock(path: Path) -> list[str]:
    """The lines of a CSV file without the columns that hold times."""
    lines = [line.split(",") for line in path.read_text().splitlines()]
    keep = [i for i, name in enumerate(lines[0]) if name not in ("charts/wall_seconds", "charts/SPS")]
    return [",".join(line[i] for i in keep) for line in lines]


def messages(stderr: str) -> list[str]:
    """What was written to stderr beside what every run writes: its directory, the bar, on some processors a hint at precision."""
    usual = re.compile(r"\d+%\||^--matmul-precision medium|^run directory: ")
    lines = [line for part in stderr.split("\n") for line in part.split("\r")]
    return [line.strip() for line in lines if line.strip() and not usual.search(line)]


def last_step(path: Path) -> int:
    """The step of the last whole row of a train.csv or eval.csv, 0 before there is one."""
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return int(lines[-1].split(",")[0]) if lines else 0


def kill(process: subprocess.Popen, number: int = signal.SIGKILL) -> tuple[str, str]:
    process.send_signal(number)
    return process.communicate(timeout=240)
