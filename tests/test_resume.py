"""What stops a run, and how it goes on: the same, to the bit, as if it had not been stopped."""

import contextlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import toy_envs
from conftest import STOP_SIGNALS, every_script, last_step, read_rows, wait_until, with_network, without_wall_clock
from toy_envs import Point

# It learns from step 101 on, evaluates at steps 100, 110 and 120, and its replay wraps at step 105.
BRIEF = "--total-timesteps 120 --buffer-size 105 --eval-frequency 10 --utd 1 --policy-lr 0.01".split()


def checkpoint_of(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def assert_same_run(one: Path, other: Path, files: tuple[str, ...] = ("train.csv", "eval.csv")) -> None:
    """Rows but for wall-clock times, networks, Adam's state, noise and replay."""
    for name in files:
        assert without_wall_clock(one / name) == without_wall_clock(other / name)
    for part in ("learner", "replay"):
        torch.testing.assert_close(checkpoint_of(one)[part], checkpoint_of(other)[part], rtol=0, atol=0)


def call(cli, name: str, *arguments, env_id: str = "toy_envs:Point-v0", code: int = 0) -> tuple[str, str]:
    """What a brief run prints: stdout, stderr."""
    return cli.call(*cli.tiny, *BRIEF, "--env-id", env_id, "--run-name", name, *arguments, code=code)


def brief(cli, name: str, *arguments, env_id: str = "toy_envs:Point-v0") -> Path:
    """The directory of a brief run."""
    return cli.train(name, *BRIEF, *arguments, env_id=env_id)


def stop(cli, name: str, step: int, *arguments, number: int = signal.SIGTERM, env_id: str = "toy_envs:Point-v0") -> str:
    """A run that gets a signal in the middle of a step; what it prints."""
    cli.monkeypatch.setattr(Point, "events", {step: lambda: os.kill(os.getpid(), number)})
    out, _ = call(cli, name, *arguments, env_id=env_id, code=128 + number)
    assert checkpoint_of(cli.folder / "runs" / name)["progress"]["step"] == step
    return out


KEPT: dict[tuple, Path] = {}  # run directories as they were made, which nobody changes


def kept(make, cli, name: str, *arguments) -> Path:
    """The directory that make(cli, name, *arguments) leaves: made for the first test that asks, a copy of it for others."""
    run_dir, key = cli.folder / "runs" / name, (make, cli.path, arguments)
    if key in KEPT:
        shutil.copytree(KEPT[key], run_dir)
    else:
        make(cli, name, *arguments)
        KEPT[key] = shutil.copytree(run_dir, cli.folder.parent / f"kept {name}")
    return run_dir


def whole(cli, *arguments) -> Path:
    """runs/whole: a brief run that was not stopped."""
    return kept(brief, cli, "whole", *arguments)


def cut(cli, *arguments) -> Path:
    """runs/cut: one that was stopped at step 116, the fourth of an episode, with a wrapped replay."""
    return kept(stop, cli, "cut", 116, *arguments)


# Signals ---
def test_signals_write_a_checkpoint_and_say_how_to_go_on(cli):
    """In the random start, at its last step, before the last step; the run directory has a space in its name."""
    undisturbed = whole(cli)
    for step, number in zip((1, 100, 119, 57, 115), STOP_SIGNALS, strict=True):
        out = stop(cli, f"cut {step}", step, number=number)
        python, script, *arguments = shlex.split(re.search(rf"stopped at step {step}; go on with: (.*)", out)[1])
        assert (python, script) == ("python", str(cli.path))
        cli.call(*arguments)
        assert_same_run(undisturbed, cli.folder / "runs" / f"cut {step}")


@every_script
def test_in_the_middle_of_an_episode_with_a_wrapped_replay(cli, network):
    """All scripts, for each has noise and networks of its own."""
    run_dir = cut(cli, *with_network(network))
    cli.call("--resume", run_dir)
    assert_same_run(whole(cli, *with_network(network)), run_dir)


def test_a_run_of_an_earlier_version(cli):
    """Which lacks arguments that have come since: it goes on with their defaults."""
    run_dir = cut(cli)
    content = checkpoint_of(run_dir)
    for name in ("network", "weight_decay"):
        content["args"].pop(name, None)
    torch.save(content, run_dir / "checkpoint.pt")
    cli.call("--resume", run_dir)
    assert_same_run(whole(cli), run_dir)


def test_layers_that_draw(cli):
    """A fork with dropout, in the actor too, which is evaluated without, in this process and in a worker."""
    fork = cli.fork("nn.ReLU()", "nn.Sequential(nn.ReLU(), nn.Dropout(0.1))")
    stop(fork, "cut", 115)
    fork.call("--resume", "runs/cut", "--eval-workers", "1")
    assert_same_run(brief(fork, "whole"), fork.folder / "runs/cut")
    assert not fork.script.load_policy(fork.folder / "runs/cut").actor.training


@contextlib.contextmanager
def held(cli, name: str, *arguments):
    """A run in a process of its own that waits in training's step 110; it yields the process and the run directory."""
    process = cli.start(*cli.tiny, *BRIEF, "--env-id", "toy_envs:Held-v0", "--run-name", name, *arguments)
    try:
        wait_until((cli.folder / f"held.{process.pid}").exists)
        yield process, cli.folder / "runs" / name
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_ctrl_c_ends_the_reader_too(cli):
    """As in `2>&1 | tee log`; nobody reads any more, and the run ends as ever."""
    with held(cli, "cut") as (process, run_dir):
        process.stdout.close()
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        (cli.folder / "go").touch()
        assert process.wait(60) == 128 + signal.SIGINT
        process.stdout, process.stderr = None, None
    assert checkpoint_of(run_dir)["progress"]["step"] == 110


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(cli):
    """The first one waits for the step to end; the checkpoint before it is whole."""
    with held(cli, "cut") as (process, run_dir):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    assert checkpoint_of(run_dir)["progress"]["step"] == 0


def test_nohup(cli):
    """A hang-up that the shell has had ignored does not stop a run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    cli.monkeypatch.setattr(Point, "events", {110: lambda: os.kill(os.getpid(), signal.SIGHUP)})
    brief(cli, "run", "--learning-starts", "120")
    signal.signal(signal.SIGHUP, before)


# Kills ---
def check_files(run_dir: Path) -> None:
    """All of them can be read."""
    json.loads((run_dir / "config.json").read_text())
    for path in run_dir.glob("*.pt"):
        torch.load(path, weights_only=True)
    for path in run_dir.glob("*.csv"):
        assert all(None not in row.values() for row in read_rows(path)[:-1])


@pytest.mark.slow
def test_kills_at_random_moments(cli, network):
    """While checkpoints are written all the time, and evaluations pend."""
    run_dir = cli.folder / "runs/cut"

    def kill(*run) -> None:
        process = cli.start(*run)
        reached = last_step(run_dir / "train.csv")
        wait_until(lambda: last_step(run_dir / "train.csv") > reached)
        time.sleep(random.uniform(0, 0.5))
        process.kill()
        process.communicate()
        check_files(run_dir)
        assert 0 < checkpoint_of(run_dir)["progress"]["step"] < 600

    options = "--env-id toy_envs:Point-v0 --run-name cut --total-timesteps 600 --eval-workers 1 --checkpoint-seconds 0"
    kill(*cli.tiny, *BRIEF, *options.split(), *with_network(network))
    for _ in range(3):
        kill("--resume", run_dir)
    cli.call("--resume", run_dir, "--eval-workers", "0")
    assert_same_run(brief(cli, "whole", "--total-timesteps", "600", *with_network(network)), run_dir)


def test_rows_after_the_checkpoint_are_dropped(cli):
    """Also one that a kill has cut in the middle of a number: 120 became 12."""
    run_dir = cut(cli)
    for name in ("train.csv", "eval.csv"):
        columns = len(read_rows(run_dir / name)[0])
        with open(run_dir / name, "a") as file:
            file.write(",".join(["118"] + ["1"] * (columns - 1)) + "\n12")
    cli.call("--resume", run_dir)
    assert_same_run(whole(cli), run_dir)


def test_a_full_disk(cli):
    """One sentence; the checkpoint before it stays, and with more space the run goes on."""
    large = "--hidden-dim 100 --total-timesteps 60 --learning-starts 50".split()  # larger than the script, which is kept too
    undisturbed = brief(cli, "whole", *large)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((undisturbed / "checkpoint.pt").stat().st_size - 300, hard))
    try:
        _, err = call(cli, "cut", *large, "--checkpoint-seconds", "0", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.search(rf"^error: {cli.folder}/runs/cut/checkpoint.pt cannot be written: .+$", err, re.M)
    run_dir = cli.folder / "runs/cut"
    assert 0 < checkpoint_of(run_dir)["progress"]["step"] < 60
    cli.call("--resume", run_dir, "--checkpoint-seconds", "300")
    assert_same_run(undisturbed, run_dir)


def test_memory_at_a_checkpoint(cli):
    """A replay of 48 MB is neither copied nor walked through in memory."""
    peaks = []

    def peak() -> None:
        peaks.append(int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000)

    reset = partial(Path("/proc/self/clear_refs").write_text, "5")  # to what is resident now
    cli.monkeypatch.setattr(Point, "events", {1000: reset, 1001: peak})
    options = "--total-timesteps 1002 --learning-starts 1002 --buffer-size 1002".split()
    run_dir = brief(cli, "run", *options, *cli.one_policy, env_id="toy_envs:Wide-v0")
    peak()
    assert checkpoint_of(run_dir)["replay"].nbytes > 48e6
    assert peaks[1] - peaks[0] < 24


# Episodes ---
@pytest.mark.parametrize("change", [(toy_envs, "LENGTH", 2), (Point, "events", {114: toy_envs.fail})])
def test_an_episode_that_does_not_follow_from_its_seed(cli, change):
    """Where repeating its actions ends early or is refused, one line says so, and the run goes on with the next episode."""
    run_dir = cut(cli)
    cli.monkeypatch.setattr(*change)
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "125")
    assert err.count("an episode does not follow from its seed and actions; ") == 1
    ends = {int(row["global_step"]): row["charts/episodic_length"] for row in read_rows(run_dir / "train.csv")}
    assert ends.get(116 + toy_envs.LENGTH) == str(toy_envs.LENGTH)
    assert max(ends) == 125


# What resuming takes ---
def test_from_python(cli):
    """The fields that are not at their defaults count as given.

    A run that is prolonged is one that was longer from the start, but for one row more in train.csv at its old end.
    """
    short = brief(cli, "short", "--total-timesteps", "110")
    Args, train = cli.script.Args, cli.script.train
    with pytest.raises(cli.script.UserError, match="utd cannot change"):
        train(Args(resume=str(short), utd=5))
    assert train(Args(resume=str(short), total_timesteps=120))["step"] == 120
    assert_same_run(whole(cli), short, ("eval.csv",))


def test_ctrl_c_in_a_program(cli):
    """That calls train(), and so has the exception; it is told how to go on."""
    cli.monkeypatch.setattr(Point, "events", {110: lambda: signal.raise_signal(signal.SIGINT)})
    cli.monkeypatch.chdir(cli.folder)
    small = {"compile": False, "eval_workers": 0, "learning_starts": 200, "utd": 1, "num_critics": 2, "hidden_dim": 8}
    args = cli.script.Args(env_id="toy_envs:Point-v0", run_name="a b", **small)
    with pytest.raises(KeyboardInterrupt):
        cli.script.train(args)
    assert f"go on from it with: --resume '{cli.folder}/runs/a b'\n" in cli.capsys.readouterr().err


def test_another_script(cli):
    """Than the one that the run began with and keeps: it is said, and the run goes on. Of the same one nothing is said."""
    run_dir = brief(cli, "run", "--total-timesteps", "1")
    for step, times in ((2, 0), (3, 1)):
        _, err = cli.call("--resume", run_dir, "--total-timesteps", step)
        assert err.count("a script that is not the one it began with") == times
        with open(run_dir / cli.path.name, "a") as file:
            file.write("# changed")


@pytest.mark.parametrize("arguments", ["--utd 20", "--seed 2 --total-timesteps 300", "--buffer-size 500", "--env-id Hopper-v4"])
def test_what_cannot_change(cli, arguments):
    """Though it is the default: the run has another value. The run stays as it is."""
    run_dir = brief(cli, "run", "--total-timesteps", "1")
    before = (run_dir / "checkpoint.pt").read_bytes()
    _, err = cli.call("--resume", run_dir, *arguments.split(), code=2)
    name = arguments.split()[0][2:].replace("-", "_")
    assert re.fullmatch(rf"error: {name} cannot change any more; only total_timesteps, .* can be given.\n", err)
    assert (run_dir / "checkpoint.pt").read_bytes() == before


def test_threads_are_those_of_the_checkpoint(cli):
    """Another number of them would change the last bits."""
    run_dir = brief(cli, "run", "--total-timesteps", "1")
    number = torch.get_num_threads()
    torch.set_num_threads(number + 1)
    cli.call("--resume", run_dir, "--total-timesteps", "2")
    assert torch.get_num_threads() == checkpoint_of(run_dir)["threads"] == number


def quota(cli, cgroup: str, **files: str) -> None:
    """As in a container: what /proc/self/cgroup has, and files of /sys/fs/cgroup."""
    host = cli.folder.parent / "host"
    for name, content in {"proc/self/cgroup": cgroup, **files}.items():
        path = host / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    system = re.compile("^/(?=proc/self/cgroup|sys/fs/cgroup)")
    cli.monkeypatch.setattr(cli.script, "Path", lambda *parts: Path(system.sub(f"{host}/", os.path.join(*parts))))


def v1(folder: str, quota: int) -> dict:
    """Files of a group of version 1 with this quota of 100 ms."""
    return {f"sys/fs/cgroup/cpu{folder}/cpu.cfs_quota_us": str(quota), f"sys/fs/cgroup/cpu{folder}/cpu.cfs_period_us": "100000"}


QUOTAS = (
    ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
    ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "110000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 2),
    ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 4),
    ("5:memory:/b\n1:cpu,cpuacct:/a\n0::/\n", {**v1("/a", -1), **v1("/b", 100000)}, 4),
    ("1:cpu,cpuacct:/a/b\n", v1("/a", 50000), 1),
    ("1:cpu,cpuacct:/docker/x\n", v1("", 200000), 2),
)


@pytest.mark.parametrize("cgroup, files, threads", QUOTAS)
def test_the_cores_of_a_container(cli, cgroup, files, threads):
    """There are as many threads as its quota allows; a run that began with more goes on with those, and says so."""
    cli.monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    torch.set_num_threads(4)
    quota(cli, "")
    run_dir = brief(cli, "host", "--total-timesteps", "1")
    assert checkpoint_of(run_dir)["threads"] == 4
    quota(cli, cgroup, **files)
    assert checkpoint_of(brief(cli, "container", "--total-timesteps", "1"))["threads"] == threads
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "2")
    assert ("began with 4 threads and goes on with" in err) == (threads < 4)
    assert checkpoint_of(run_dir)["threads"] == threads


def test_other_versions(cli):
    """Of what decides the numbers are kept, and it is said what differs."""
    run_dir = brief(cli, "run", "--total-timesteps", "1")
    path = run_dir / "config.json"
    config = json.loads(path.read_text())
    assert {"torch", "gymnasium", "numpy"} <= config.keys()
    assert "other versions" not in cli.call("--resume", run_dir, "--total-timesteps", "2")[1]
    path.write_text(json.dumps(config | {"numpy": "1.0"}))
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "3")
    assert re.search(rf"other versions, .*: numpy 1.0, now {config['numpy']}\n", err)
    path.unlink()
    cli.call("--resume", run_dir, "--total-timesteps", "4")


def test_nothing_was_evaluated(cli):
    """A run that was stopped before, and is over."""
    stop(cli, "cut", 57)
    out, _ = cli.call("--resume", "runs/cut", "--total-timesteps", "57", "--capture-video")
    assert out == "nothing was evaluated\n"
