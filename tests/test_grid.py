"""benchmark/run.py as users meet it: real Ray, real scripts, real kills."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, last_step, wait_until, without_wall_clock

sys.path.insert(0, str(ROOT / "benchmark"))
import experiments

needs_ray = pytest.mark.usefixtures("ray_is_installed")
ONE = "--experiment smoke --env-ids InvertedPendulum-v4 --variants smoke_rac_sac".split()
NAME = "InvertedPendulum-v4__smoke_rac_sac__{}"
LONG = "--total-timesteps 4000 -- --checkpoint-seconds 0.5".split()


@pytest.fixture
def ray_is_installed():
    pytest.importorskip("ray", reason="benchmark/requirements.txt is not installed")


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in ("WANDB_API_KEY", "RAY_ADDRESS", "OMP_NUM_THREADS")}
    env.update(PYTHONPATH=str(ROOT / "tests"), HOME=str(folder))
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, str(ROOT / "benchmark/run.py"), *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, text=True, start_new_session=True, **pipes)


def run(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=500)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def processes(*words: str) -> list[int]:
    """Living processes that have all words in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text().replace("\0", " ")
            if all(word in command for word in words) and ") Z " not in path.with_name("stat").read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def scripts_of(folder: Path, seed: int) -> list[int]:
    return processes("rac_sac.py", str(folder / "runs" / NAME.format(seed)))


def reference(folder: Path, *arguments: str) -> Path:
    """The run of the first line of --dry-run's output, in a folder of its own and never disturbed."""
    end = arguments.index("--")
    out, _ = run(folder, *arguments[:end], "--dry-run", "--run-root", "undisturbed", *arguments[end:])
    python, *command = shlex.split(out.splitlines()[0])
    assert python == "python"
    subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True
    )
    return folder / "undisturbed" / NAME.format(1)


def test_every_experiment_names_its_runs(tmp_path):
    """Each experiment of the paper can be listed; every value of its sweeps is there once, defaults shared with the main runs."""
    everything = {}
    for experiment in experiments.EXPERIMENTS:
        out, _ = run(tmp_path, "--experiment", experiment, "--seeds", "2", "--dry-run")
        for line in out.splitlines():
            words = shlex.split(line)
            name = words[words.index("--run-name") + 1]
            assert everything.setdefault(name, line) == line, "one name, two commands"
            assert words[words.index("--seed") + 1] == name[-1] and (ROOT / words[1]).exists()
    assert not list(tmp_path.iterdir())
    assert len(experiments.members("capacity", "Humanoid-v4")) == 5
    assert ("rac_sac", "rac_sac.py", "") in experiments.members("capacity", "Humanoid-v4")
    (redq,) = [line for name, line in everything.items() if name == "Ant-v4__redq__1"]
    for part in ("vanilla_rac.py", "--target-rule in-target-min", "--min-size 2", "--q-lr-init 3e-4", "--initial-log-alpha 0",
                 "--target-entropy -4", "--total-timesteps 300000"):  # fmt: skip
        assert part in redq
    assert "--target-entropy -4" in everything["Ant-v4__vanilla_rac-redq_entropy__1"]  # compared at the same target entropy
    assert "--total-timesteps 1000000" in everything["Humanoid-v4__rac_sac-utd_5__1"]


@pytest.mark.parametrize("arguments, sentence", [
    (("--variants", "sac"), "smoke has none of the variants sac; it has smoke_rac_itm"),
    (("--cpus-per-run", "0"), "must be at least 1"),
    (("--run-root", "other"), "was made with utd 7, and this grid wants 1"),
    (("--run-root", "broken"), "has no readable config.json"),
])  # fmt: skip
def test_wrong_arguments(tmp_path, arguments, sentence):
    for root, content in (("other", json.dumps({"args": {"utd": 7, "num_critics": 3}})), ("broken", "")):
        (tmp_path / root / NAME.format(1)).mkdir(parents=True)
        (tmp_path / root / NAME.format(1) / "config.json").write_text(content)
    out, err = run(tmp_path, *ONE, "--seeds", "1", *arguments, code=2)
    assert out == "" and err.startswith("error: ") and sentence in err and err.count("\n") == 1


@needs_ray
def test_impossible_resources(tmp_path):
    _, err = run(tmp_path, *ONE, "--seeds", "1", "--cpus-per-run", "4000", code=2)
    assert err.startswith("error: a run wants 4000 cores and 0 GPUs, and no node has them") and err.count("\n") == 1


@needs_ray
def test_killed_script_and_killed_ray_worker_are_retried(tmp_path):
    """Both go on from their checkpoints, to the same numbers as an undisturbed run; the script dies with its worker."""
    process = start(tmp_path, *ONE, "--seeds", "2", *LONG)
    scripts = {seed: wait_until(lambda s=seed: last_step(tmp_path / "runs" / NAME.format(s) / "train.csv") > 500
                                and scripts_of(tmp_path, s)) for seed in (1, 2)}  # fmt: skip
    os.kill(scripts[1][0], signal.SIGKILL)
    os.kill(parent(scripts[2][0]), signal.SIGKILL)  # the Ray worker
    wait_until(lambda: not Path(f"/proc/{scripts[2][0]}").exists(), 60)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert re.search(rf"retry 1 of 3: {NAME.format(1)}: killed by signal 9", out)
    assert re.search(rf"retry 1 of 3: {NAME.format(2)}: .*Ray worker or node died", out)
    assert out.count("done: ") == 2 and "done 2 · running 0 · waiting 0 · failed 0 of 2 · 100.0%" in out
    undisturbed = reference(tmp_path, *ONE, "--seeds", "2", *LONG)
    for file in ("eval.csv", "train.csv"):
        assert without_wall_clock(tmp_path / "runs" / NAME.format(1) / file) == without_wall_clock(undisturbed / file)
    assert not processes(str(tmp_path))


@needs_ray
def test_stopped_and_killed_driver_goes_on(tmp_path):
    """Ctrl-C and SIGKILL of the driver leave no process; the same command goes on, and does nothing when all is done."""
    command, run_dir = [*ONE, "--seeds", "1", *LONG], tmp_path / "runs" / NAME.format(1)
    process = start(tmp_path, *command)
    wait_until(lambda: last_step(run_dir / "train.csv") > 500)
    ray_processes = [pid for pid in processes("raylet") if os.getsid(pid) == process.pid or parent(pid) == process.pid]
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1 and "stopping; every run writes its checkpoint" in out
    assert "interrupted; the same command again goes on" in err and "Traceback" not in err
    assert not processes(str(tmp_path)) and not any(Path(f"/proc/{pid}").exists() for pid in ray_processes)
    log = Path(f"{run_dir}.log").read_text()
    stopped = int(re.search(r"stopped at step (\d+); go on with", log)[1])  # the script's own last words

    process = start(tmp_path, *command)
    wait_until(lambda: last_step(run_dir / "train.csv") > stopped)
    process.kill()
    process.communicate()
    wait_until(lambda: not processes(str(tmp_path)), 60)
    assert len(re.findall(r"stopped at step \d+; go on with", Path(f"{run_dir}.log").read_text())) == 2

    out, _ = run(tmp_path, *command)
    assert f"done: {NAME.format(1)}" in out
    before = {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    out, _ = run(tmp_path, *command)
    assert "1 of 1 runs are finished already" in out and "done: " not in out
    assert before == {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    assert (run_dir / "evaluate.csv").read_text().startswith("step,beta,return,return_std,best_in_training\n4000,")
    undisturbed = reference(tmp_path, *command)
    assert without_wall_clock(run_dir / "eval.csv") == without_wall_clock(undisturbed / "eval.csv")


@needs_ray
def test_a_run_that_keeps_dying_is_given_up_and_the_others_go_on(tmp_path):
    out, err = run(tmp_path, "--experiment", "smoke", "--variants", "smoke_vanilla_rac", "--env-ids", "toy_envs:Deadly-v0",
                   "Pendulum-v1", "toy_envs:Unknown-v0", "--seeds", "1", "--retries", "1", code=1)  # fmt: skip
    assert "done: Pendulum-v1__smoke_vanilla_rac__1" in out and "failed 2 of 3" in out
    assert out.count("retry 1 of 1: toy_envs_Deadly-v0") == 1 and "retry 1 of 1: toy_envs_Unknown" not in out  # it stays wrong
    assert "failed: toy_envs_Deadly-v0__smoke_vanilla_rac__1: killed by signal 9" in err
    assert re.search(r"failed: toy_envs_Unknown-v0__smoke_vanilla_rac__1: error: .*Unknown", err)


@needs_ray
def test_existing_cluster(tmp_path):
    """--address reaches a cluster that was started before, and leaves it running."""
    ray, port = str(Path(sys.executable).with_name("ray")), 20_000 + os.getpid() % 10_000
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}  # Ray keeps its token in the home folder
    head = subprocess.Popen([ray, "start", "--head", "--block", f"--port={port}", "--ray-client-server-port", str(port + 1),
                             "--include-dashboard=false", "--num-cpus=2"], env=env, start_new_session=True, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        deadline = time.time() + 120
        while True:
            process = start(tmp_path, *ONE, "--seeds", "1", "--address", f"127.0.0.1:{port}")
            out, err = process.communicate(timeout=300)
            if process.returncode == 0 or time.time() > deadline:
                break
            assert "no Ray cluster answers" in err and "Traceback" not in err  # not started yet
        assert process.returncode == 0 and f"done: {NAME.format(1)}" in out, out + err
        out, err = run(tmp_path, *ONE, "--seeds", "1", "--address", f"ray://127.0.0.1:{port + 1}", "--total-timesteps", "600")
        assert f"done: {NAME.format(1)}" in out and head.poll() is None
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)
