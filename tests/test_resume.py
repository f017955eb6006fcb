"""What stops a run, and how it goes on: the same, to the bit, as if it had not been stopped."""

import json
import os
import random
import re
import resource
import shlex
import signal
import time
from pathlib import Path

import pytest
import torch
import toy_envs
import tyro
from conftest import STOP_SIGNALS, every_script, last_step, read_rows, signal_handlers_put_back, wait_until, with_network
from tiny_runs import assert_same_run, checkpoint_of, cut_run, held_run, stopped_run, whole_run
from toy_envs import Point


# Signals ---
def test_signals_write_a_checkpoint_and_say_how_to_go_on(cli):
    """In the random start, at its last step, before the run's last step, and in two more episodes.

    The run directory has a space in its name.
    """
    undisturbed = whole_run(cli)
    for step, number in zip((1, 96, 109, 57, 101), STOP_SIGNALS, strict=True):
        run_dir, out = stopped_run(cli, f"cut {step}", step, number=number)
        python, script, *arguments = shlex.split(re.search(rf"stopped at step {step}; go on with: (.*)", out)[1])
        assert (python, script) == ("python", str(cli.path))
        cli.call(*arguments)
        assert_same_run(undisturbed, run_dir)


@every_script
def test_in_the_middle_of_an_episode_with_a_wrapped_replay(cli, network):
    """All scripts, for each has noise and networks of its own."""
    run_dir = cut_run(cli, *with_network(network))
    cli.call("--resume", run_dir)
    assert_same_run(whole_run(cli, *with_network(network)), run_dir)


def test_a_run_of_an_earlier_version(cli):
    """Which lacks arguments that have come since: it goes on with their defaults."""
    run_dir = cut_run(cli)
    content = checkpoint_of(run_dir)
    for name in ("network", "weight_decay"):
        content["args"].pop(name, None)
    torch.save(content, run_dir / "checkpoint.pt")
    cli.call("--resume", run_dir)
    assert_same_run(whole_run(cli), run_dir)


def test_layers_that_draw(cli):
    """A fork with dropout, in the actor too, which is evaluated without, in this process and in a worker."""
    fork = cli.fork("nn.ReLU()", "nn.Sequential(nn.ReLU(), nn.Dropout(0.1))")
    run_dir, _ = stopped_run(fork, "cut", 101)
    fork.call("--resume", run_dir, "--eval-workers", "1")
    assert_same_run(fork.train("whole"), run_dir)
    assert not fork.script.load_policy(run_dir).actor.training


@pytest.mark.slow
def test_ctrl_c_ends_the_reader_too(cli):
    """As in `2>&1 | tee log`; nobody reads any more, and the run ends as ever."""
    with held_run(cli, "cut") as (process, run_dir):
        process.stdout.close()
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        (cli.folder / "go").touch()
        assert process.wait(60) == 128 + signal.SIGINT
        process.stdout, process.stderr = None, None
    assert checkpoint_of(run_dir)["progress"]["step"] == 103


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(cli):
    """The first one waits for the step to end; the checkpoint before it is whole."""
    with held_run(cli, "cut") as (process, run_dir):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    assert checkpoint_of(run_dir)["progress"]["step"] == 0


def test_nohup(cli):
    """A hang-up that the shell has had ignored does not stop a run."""
    cli.monkeypatch.setattr(Point, "events", {105: lambda: os.kill(os.getpid(), signal.SIGHUP)})
    with signal_handlers_put_back():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        cli.train("run", "--learning-starts", "110")


# Kills ---
def check_files(run_dir: Path) -> None:
    """All of them can be read."""
    json.loads((run_dir / "config.json").read_text())
    for path in run_dir.glob("*.pt"):
        torch.load(path, weights_only=True)
    for path in run_dir.glob("*.csv"):
        for row in read_rows(path)[:-1]:  # the last one may be cut
            assert None not in row.values(), path  # which stands for what a row lacks


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

    arguments = ["--total-timesteps", "600", *with_network(network)]
    kill(*cli.tiny_run("cut", *arguments, "--eval-workers", "1", "--checkpoint-seconds", "0"))
    for _ in range(3):
        kill("--resume", run_dir)
    cli.call("--resume", run_dir, "--eval-workers", "0")
    assert_same_run(cli.train("whole", *arguments), run_dir)


def test_rows_after_the_checkpoint_are_dropped(cli):
    """Also one that a kill has cut in the middle of a number: 110 became 11."""
    run_dir = cut_run(cli)
    for name in ("train.csv", "eval.csv"):
        columns = len(read_rows(run_dir / name)[0])
        row = ",".join(["108", *["1"] * (columns - 1)])
        with open(run_dir / name, "a") as file:
            file.write(f"{row}\n11")
    cli.call("--resume", run_dir)
    assert_same_run(whole_run(cli), run_dir)


def test_a_full_disk(cli):
    """One sentence; the checkpoint before it stays, and with more space the run goes on."""
    large = "--hidden-dim 100 --total-timesteps 60 --learning-starts 50".split()  # larger than the script, which is kept too
    undisturbed = cli.train("whole", *large)
    too_small = (undisturbed / "checkpoint.pt").stat().st_size - 300
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (too_small, hard))
    try:
        _, err = cli.call(*cli.tiny_run("cut", *large, "--checkpoint-seconds", "0"), code=1)
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

    def forget_the_peak() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # it is now what is resident

    def note_the_peak() -> None:
        kilobytes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
        peaks.append(int(kilobytes) / 1000)

    cli.monkeypatch.setattr(Point, "events", {1000: forget_the_peak, 1001: note_the_peak})
    options = "--total-timesteps 1002 --learning-starts 1002 --buffer-size 1002".split()
    run_dir = cli.train("run", *options, *cli.policies(1), env_id="toy_envs:Wide-v0")
    note_the_peak()
    assert checkpoint_of(run_dir)["replay"].nbytes > 48e6
    assert peaks[1] - peaks[0] < 24


# Episodes ---
@pytest.mark.parametrize("change", ["ends early", "is refused"])
def test_an_episode_that_does_not_follow_from_its_seed(cli, change):
    """Where repeating its actions ends early or is refused, one line says so, and the run goes on with the next episode."""
    run_dir = cut_run(cli)
    if change == "ends early":
        cli.monkeypatch.setattr(toy_envs, "EPISODE_LENGTH", 2)
    else:
        cli.monkeypatch.setattr(Point, "events", {100: toy_envs.fail})
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "112")
    assert err.count("an episode does not follow from its seed and actions; ") == 1
    ends = {int(row["global_step"]): row["charts/episodic_length"] for row in read_rows(run_dir / "train.csv")}
    assert ends.get(102 + toy_envs.EPISODE_LENGTH) == str(toy_envs.EPISODE_LENGTH)
    assert max(ends) == 112


# What resuming takes ---
def test_from_python(cli):
    """The fields that are not at their defaults count as given.

    A run that is prolonged is one that was longer from the start, but for one row more in train.csv at its old end.
    """
    short = cli.train("short", "--total-timesteps", "103")
    Args, train = cli.script.Args, cli.script.train
    with pytest.raises(cli.script.UserError, match="utd cannot change"):
        train(Args(resume=str(short), utd=5))
    assert train(Args(resume=str(short), total_timesteps=110))["step"] == 110
    assert_same_run(whole_run(cli), short, ("eval.csv",))


def test_stopped_before_the_first_step(cli):
    """By a signal that comes while a run is set up."""
    cli.monkeypatch.chdir(cli.folder)
    args = tyro.cli(cli.script.Args, args=cli.tiny_run("cut"))
    summary = cli.script.train(args, [signal.SIGTERM])
    assert summary["step"] == 0
    cli.call("--resume", summary["run_dir"])
    assert_same_run(whole_run(cli), Path(summary["run_dir"]))


def test_ctrl_c_in_a_program(cli):
    """That calls train(), and so has the exception; it is told how to go on."""
    cli.monkeypatch.setattr(Point, "events", {105: lambda: signal.raise_signal(signal.SIGINT)})
    cli.monkeypatch.chdir(cli.folder)
    small = {"compile": False, "eval_workers": 0, "learning_starts": 200, "utd": 1, "num_critics": 2, "hidden_dim": 8}
    args = cli.script.Args(env_id="toy_envs:Point-v0", run_name="a b", **small)
    with pytest.raises(KeyboardInterrupt):
        cli.script.train(args)
    assert f"go on from it with: --resume '{cli.folder}/runs/a b'\n" in cli.capsys.readouterr().err


def test_another_script(cli):
    """Than the one that the run began with and keeps: it is said, and the run goes on. Of the same one nothing is said."""
    run_dir = cli.train("run", "--total-timesteps", "1")
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "2")
    assert "a script that is not the one it began with" not in err
    with open(run_dir / cli.path.name, "a") as file:
        file.write("# changed")
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "3")
    assert err.count("a script that is not the one it began with") == 1


@pytest.mark.parametrize("arguments", ["--utd 20", "--seed 2 --total-timesteps 300", "--buffer-size 500", "--env-id Hopper-v4"])
def test_what_cannot_change(cli, arguments):
    """Though it is the default: the run has another value. The run stays as it is."""
    run_dir = cli.train("run", "--total-timesteps", "1")
    before = (run_dir / "checkpoint.pt").read_bytes()
    _, err = cli.call("--resume", run_dir, *arguments.split(), code=2)
    name = arguments.split()[0][2:].replace("-", "_")
    assert re.fullmatch(rf"error: {name} cannot change any more; only total_timesteps, .* can be given.\n", err)
    assert (run_dir / "checkpoint.pt").read_bytes() == before


def test_threads_are_those_of_the_checkpoint(cli):
    """Another number of them would change the last bits."""
    run_dir = cli.train("run", "--total-timesteps", "1")
    number = torch.get_num_threads()
    torch.set_num_threads(number + 1)
    cli.call("--resume", run_dir, "--total-timesteps", "2")
    assert torch.get_num_threads() == checkpoint_of(run_dir)["threads"] == number


def in_container(cli, cgroup: str, files: dict[str, str]) -> None:
    """The script sees this /proc/self/cgroup, and these files of /sys/fs/cgroup."""
    host = cli.folder.parent / "host"
    for name, content in {"proc/self/cgroup": cgroup, **files}.items():
        path = host / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def path_on_host(*parts):
        path = os.path.join(*parts)
        return Path(re.sub("^/(?=proc/self/cgroup|sys/fs/cgroup)", f"{host}/", path))

    cli.monkeypatch.setattr(cli.script, "Path", path_on_host)


def v1_files(folder: str, microseconds: int) -> dict[str, str]:
    """Files of a group of version 1 with this quota of 100 ms."""
    place = f"sys/fs/cgroup/cpu{folder}"
    return {f"{place}/cpu.cfs_quota_us": str(microseconds), f"{place}/cpu.cfs_period_us": "100000"}


QUOTAS = (
    ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
    ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "110000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 2),
    ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 4),
    ("5:memory:/b\n1:cpu,cpuacct:/a\n0::/\n", v1_files("/a", -1) | v1_files("/b", 100000), 4),
    ("1:cpu,cpuacct:/a/b\n", v1_files("/a", 50000), 1),
    ("1:cpu,cpuacct:/docker/x\n", v1_files("", 200000), 2),
)


@pytest.mark.parametrize("cgroup, files, threads", QUOTAS)
def test_the_cores_of_a_container(cli, cgroup, files, threads):
    """There are as many threads as its quota allows; a run that began with more goes on with those, and says so."""
    cli.monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    torch.set_num_threads(4)
    in_container(cli, "", {})
    run_dir = cli.train("host", "--total-timesteps", "1")
    assert checkpoint_of(run_dir)["threads"] == 4
    in_container(cli, cgroup, files)
    container = cli.train("container", "--total-timesteps", "1")
    assert checkpoint_of(container)["threads"] == threads
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "2")
    assert ("began with 4 threads and goes on with" in err) == (threads < 4)
    assert checkpoint_of(run_dir)["threads"] == threads


def test_other_versions(cli):
    """Of what decides the numbers are kept, and it is said what differs."""
    run_dir = cli.train("run", "--total-timesteps", "1")
    path = run_dir / "config.json"
    config = json.loads(path.read_text())
    assert {"torch", "gymnasium", "numpy"} <= config.keys()
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "2")
    assert "other versions" not in err
    path.write_text(json.dumps(config | {"numpy": "1.0"}))
    _, err = cli.call("--resume", run_dir, "--total-timesteps", "3")
    assert re.search(rf"other versions, .*: numpy 1.0, now {config['numpy']}\n", err)
    path.unlink()
    cli.call("--resume", run_dir, "--total-timesteps", "4")


def test_nothing_was_evaluated(cli):
    """A run that was stopped before, and is over."""
    run_dir, _ = stopped_run(cli, "cut", 57)
    out, _ = cli.call("--resume", run_dir, "--total-timesteps", "57", "--capture-video")
    assert out == "nothing was evaluated\n"
