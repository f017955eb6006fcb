"""What --resume goes on with, exactly as if the run had not been stopped, and what it says of what it does not use."""

import contextlib
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    assert_same_networks,
    assert_same_run,
    checkpoint_of,
    files_in,
    kill,
    last_step,
    messages,
    read_rows,
    rows_of,
    sentence_of,
    slow_but,
    wait_until,
    without_wall_clock,
)
from toy_envs import Counter, Start, since

import rac_sac


def grow(cli, *arguments: str):
    """Resumes the brief run with ten steps more."""
    return cli.call("--resume", cli.run_dir, "--total-timesteps", "70", *arguments)


def put(run_dir, **parts) -> None:
    """Writes other parts into a checkpoint."""
    torch.save({**checkpoint_of(run_dir), **parts}, run_dir / "checkpoint.pt")


# ---------------------------------------------------------------------------------------------------------------- exactly
@slow_but("rac_sac")
def test_sigkill_and_resume_is_exact(cli, whole):
    """Killed in the random start, between checkpoints and while evaluations pend: the same run in the end."""
    arguments = ("--checkpoint-seconds", "0.05", "--eval-workers", "1")
    for at in (30, 220, 150):  # in steps of the process, which repeats the episode that was cut
        with cli.held("cut", *arguments, at=at) as (process, cut):
            cli.holding(process)
            kill(process)
        assert checkpoint_of(cut)["state"]["step"] < 500  # a checkpoint is whole at every moment
        arguments = ("--resume", cut)
    assert checkpoint_of(cut)["state"]["step"] > 200
    cli.call("--resume", cut, "--eval-workers", "0")
    assert_same_run(whole[0], cut)


@pytest.mark.slow
def test_killed_before_the_first_timed_checkpoint(cli, whole):
    """It starts again from step 0."""
    with cli.held("cut", "--checkpoint-seconds", "1000", at=260) as (process, cut):
        cli.holding(process)
        assert rows_of(cut / "eval.csv") == 1
        assert last_step(cut / "train.csv") > 0
        kill(process)
    assert checkpoint_of(cut)["state"]["step"] == 0
    cli.call("--resume", cut)
    assert_same_run(whole[0], cut)


def stop_at(step: int):
    """A signal in the middle of a run in this process, at a step of its training environment."""

    def stop(env):
        if env.number == 0 and env.total == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


@pytest.mark.parametrize("step", [1, 40, 41, 45, 59])
def test_stopped_anywhere(cli, toy, step):
    """In the random start, at its last step, while learning and before the last step, in the middle of an episode."""
    cli.call("--env-id", toy(length=11), *cli.brief, "--run-name", "whole")
    env_id = toy(length=11, change=stop_at(step))
    cli.call("--env-id", env_id, *cli.brief, code=128 + signal.SIGTERM)
    assert checkpoint_of(cli.run_dir)["state"]["step"] == step
    cli.call("--resume", cli.run_dir)
    assert_same_run(cli.folder / "runs/whole", cli.run_dir)


def test_a_replay_that_has_been_filled_again(cli, toy):
    """Its oldest rows are overwritten: those of a stopped run too."""
    small = ("--buffer-size", "45")
    cli.call("--env-id", toy(Start), *cli.brief, *small, "--run-name", "whole")
    cli.call("--env-id", toy(Start, change=stop_at(55)), *cli.brief, *small, code=128 + signal.SIGTERM)
    cli.call("--resume", cli.run_dir)
    assert_same_run(cli.folder / "runs/whole", cli.run_dir)


def test_more_steps(cli, toy):
    """A run that is prolonged is as one that was longer from the start, but for one row more at what was its last step."""
    env_id = toy(Start)
    cli.call("--env-id", env_id, *cli.brief, "--buffer-size", "70", "--total-timesteps", "70", "--run-name", "whole")
    cli.call("--env-id", env_id, *cli.brief, "--buffer-size", "70")
    grow(cli)
    assert_same_networks(cli.folder / "runs/whole", cli.run_dir)
    assert without_wall_clock(cli.run_dir / "eval.csv") == without_wall_clock(cli.folder / "runs/whole/eval.csv")
    assert json.loads((cli.run_dir / "config.json").read_text())["args"]["total_timesteps"] == 70


def test_threads_are_those_of_the_checkpoint(cli, toy):
    """Another number would change the last bits."""
    cli.call("--env-id", toy(), *cli.brief)
    other = torch.get_num_threads() + 1
    put(cli.run_dir, threads=other)
    grow(cli)
    assert torch.get_num_threads() == other
    assert checkpoint_of(cli.run_dir)["threads"] == other


def test_fewer_steps(cli, toy):
    cli.call("--env-id", toy(), *cli.brief)
    line = sentence_of(cli.call("--resume", cli.run_dir, "--total-timesteps", "50", code=2))
    assert "total_timesteps is 50" in line
    assert "60" in line


# ------------------------------------------------------------------------------------------------------- a finished run
def test_a_finished_run_is_left_as_it_is(cli, toy):
    env_id = toy()
    first = cli.call("--env-id", env_id, *cli.brief)
    before = files_in(cli.run_dir)
    again = cli.call("--resume", "runs/run")
    after = files_in(cli.run_dir)
    assert again.stdout == first.stdout
    assert messages(again.stderr) == []
    del before["checkpoint.pt"], after["checkpoint.pt"]  # its time is another
    assert before == after


def test_rows_of_a_finished_run_are_mended(cli, toy):
    """A row of an evaluation that still pends was written just before a kill: it is there once in the end."""
    cli.call("--env-id", toy(), *cli.brief)
    policy = torch.load(cli.run_dir / "policy.pt", weights_only=True)
    alphas = [0.1, 0.2, 0.3]
    put(cli.run_dir, pending=[(60, 1.0, alphas, policy["actor"])])
    cli.call("--resume", cli.run_dir)
    rows = read_rows(cli.run_dir / "eval.csv")
    assert [row["global_step"] for row in rows] == ["40", "50", "60"]
    assert [float(rows[-1][name]) for name in rows[-1] if "alpha" in name] == alphas
    assert checkpoint_of(cli.run_dir)["pending"] == []


def test_what_pends_is_played_on_any_machine(cli, whole):
    """--max-pending-evaluations: training does not wait; once its steps are done, no device or compiler is asked for."""
    with cli.held("cut", "--eval-workers", "1", "--max-pending-evaluations", "9") as (process, cut):
        cli.holding(process)
        wait_until(lambda: last_step(cut / "train.csv") == 500)
        kill(process, signal.SIGINT)
    checkpoint = checkpoint_of(cut)
    assert [step for step, *_ in checkpoint["pending"]] == [200, 300, 400, 500]
    assert not (cut / "eval.csv").exists()
    args = {**checkpoint["args"], "cuda": True, "compile": True}
    trained_on = {"device": "cuda", "generator": torch.arange(16, dtype=torch.uint8), "threads": 3, "args": args}
    put(cut, **trained_on)
    config = (cut / "config.json").read_text()

    cli.call("--resume", cut, "--eval-workers", "0")
    assert without_wall_clock(cut / "eval.csv") == without_wall_clock(whole[0] / "eval.csv")
    after = checkpoint_of(cut)
    assert after["pending"] == []
    assert torch.equal(after["generator"], trained_on["generator"])
    assert {**after["args"], "eval_workers": 1} == args
    assert (after["device"], after["threads"]) == ("cuda", 3)
    assert torch.equal(after["replay"], checkpoint["replay"])
    assert all(torch.equal(value, checkpoint["tensors"][name]) for name, value in after["tensors"].items())
    assert (cut / "config.json").read_text() == config


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize("cuda", [None, True])
def test_a_run_of_a_gpu_where_there_is_none(cli, toy, cuda):
    """Training goes on on the kind of device that it began on."""
    cli.call("--env-id", toy(), *cli.brief)
    put(cli.run_dir, device="cuda", args={**checkpoint_of(cli.run_dir)["args"], "cuda": cuda})
    before = files_in(cli.run_dir)
    assert "CUDA" in sentence_of(grow_and_fail(cli))
    assert files_in(cli.run_dir) == before


def grow_and_fail(cli):
    return cli.call("--resume", cli.run_dir, "--total-timesteps", "70", code=2)


# -------------------------------------------------------------------------------------------------------- the directory
def test_evaluations_that_are_lost_are_named(cli, toy):
    cli.call("--env-id", toy(), *cli.brief)
    (cli.run_dir / "eval.csv").unlink()
    (line,) = messages(grow(cli).stderr)
    assert line.endswith("runs/run/eval.csv is not there any more: it begins anew")
    assert [row["global_step"] for row in read_rows(cli.run_dir / "eval.csv")] == ["70"]


def test_rows_without_a_checkpoint_are_not_thrown_away(cli, toy):
    cli.call("--env-id", toy(), *cli.brief)
    (cli.run_dir / "checkpoint.pt").unlink()
    before = files_in(cli.run_dir)
    assert "checkpoint.pt does not exist" in sentence_of(cli.call("--resume", cli.run_dir, code=2))
    assert "exists already" in sentence_of(cli.call("--env-id", toy(), *cli.brief, code=2))
    assert files_in(cli.run_dir) == before


def test_killed_in_its_first_moments(cli, toy):
    """Before there is a checkpoint or a row, the same command begins anew."""
    cli.run_dir.mkdir(parents=True)
    (cli.run_dir / "checkpoint.pt.tmp").touch()
    (cli.run_dir / "config.json").write_text("{")
    cli.call("--env-id", toy(), *cli.brief)
    assert json.loads((cli.run_dir / "config.json").read_text())["script"] == "rac_sac"
    assert not (cli.run_dir / "checkpoint.pt.tmp").exists()


def test_the_script_of_a_start_that_failed(cli, toy):
    """The script has been mended since: the copy beside the run is the one that trained it."""
    cli.script = cli.folder / "fork" / "my_rac.py"
    cli.script.parent.mkdir()
    text = (ROOT / "rac_sac.py").read_text()
    cli.script.write_text(text)
    fails = [True]

    class Broken(Counter):
        def reset(self, seed=None, options=None):
            if fails:
                raise ValueError("no simulator")
            return super().reset(seed=seed)

    env_id = toy(Broken)
    cli.call("--env-id", env_id, *cli.brief, code=1)
    assert (cli.run_dir / "my_rac.py").read_text() == text
    fails.clear()
    cli.script.write_text(text + "# mended\n")
    cli.call("--env-id", env_id, *cli.brief)
    assert (cli.run_dir / "my_rac.py").read_text() == text + "# mended\n"


def test_a_file_of_the_script_s_name_in_a_folder_that_is_no_run(cli, toy):
    """It is the user's, and stays."""
    cli.run_dir.mkdir(parents=True)
    (cli.run_dir / "rac_sac.py").write_text("# mine")
    cli.call("--env-id", toy(), *cli.brief)
    assert (cli.run_dir / "rac_sac.py").read_text() == "# mine"


def test_two_processes_cannot_share_a_run_directory(cli):
    with cli.held("run", at=100) as (process, run_dir):
        cli.holding(process)
        line = sentence_of(cli.call("--resume", run_dir, code=2))
        assert f"{run_dir} is in use" in line
        assert "exists already" in sentence_of(cli.call("--run-name", "run", *cli.tiny, code=2))
        assert process.poll() is None


# ----------------------------------------------------------------------------------------------------------------- rows
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r\r\n"], ids=repr)
@pytest.mark.parametrize("name", ["eval.csv", "train.csv"])
def test_rows_after_the_checkpoint_are_dropped_by_their_step(cli, toy, name, line_end):
    """Whatever an editor, or an older version, did to line ends; a row that a kill has cut goes, comments stay."""
    env_id = toy(Start)
    cli.call("--env-id", env_id, *cli.brief, "--run-name", "other", "--buffer-size", "70", "--total-timesteps", "70")
    cli.call("--env-id", env_id, *cli.brief, "--buffer-size", "70")
    path = cli.run_dir / name
    header, *rows = path.read_text().splitlines()
    later = "65" + rows[-1][2:]
    path.write_bytes(line_end.join([header, "# a comment", *rows, later, "66,1"]).encode())
    grow(cli)
    lines = path.read_bytes().decode().split("\n")
    assert lines[:2] == [header, "# a comment"]
    assert lines[2 : 2 + len(rows)] == rows
    assert "\r" not in "".join(lines)
    steps = [int(line.split(",")[0]) for line in lines[2:-1]]
    assert steps == sorted({*steps})
    assert steps[-1] == 70
    if name == "eval.csv":
        del lines[1]
        path.write_text("\n".join(lines))
        assert without_wall_clock(path) == without_wall_clock(cli.folder / "runs/other/eval.csv")


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"fifty"], ids=repr)
def test_rows_that_cannot_be_read(cli, toy, damage):
    """They are refused and left as they are."""
    cli.call("--env-id", toy(), *cli.brief)
    path = cli.run_dir / "eval.csv"
    path.write_bytes(path.read_bytes().replace(b"\n50,", b"\n" + damage + b","))
    before = files_in(cli.run_dir)
    assert "eval.csv" in sentence_of(grow_and_fail(cli))
    assert files_in(cli.run_dir) == before


def test_a_row_that_cannot_be_written_is_not_lost(cli, toy):
    """A file with other columns is not written into; the evaluation is played again."""
    cli.call("--env-id", toy(), *cli.brief, "--buffer-size", "70")
    path = cli.run_dir / "eval.csv"
    text = path.read_text()
    path.write_text("".join(line.rsplit(",", 1)[0] + "\n" for line in text.splitlines()))
    result = cli.call("--resume", cli.run_dir, "--total-timesteps", "70", code=1)
    assert "stopped at step 70" in sentence_of(result)
    assert "other columns" in result.stderr
    assert rows_of(path) == 3
    path.write_text(text)
    cli.call("--resume", cli.run_dir)
    assert last_step(path) == 70
    assert rows_of(path) == 4


# ------------------------------------------------------------------------------------------------------------- arguments
def test_arguments_of_the_run_win(cli, toy):
    cli.call("--env-id", toy(), *cli.brief)
    (line,) = messages(grow(cli, "--seed", "9", "--batch-size", "32").stderr)
    assert line.startswith("not used")
    assert line.startswith("not used: seed;")  # batch_size is 32 already
    assert checkpoint_of(cli.run_dir)["args"]["seed"] == 1


def test_an_argument_that_equals_the_default_is_not_used_either(cli, toy):
    """The run has another value, and the user is told."""
    cli.call("--env-id", toy(), *cli.brief, "--seed", "2")
    (line,) = messages(grow(cli, "--seed", "1", "--gamma", "0.99").stderr)
    assert line.startswith("not used: seed;")


def test_resuming_from_python(cli, toy):
    """The fields that are not at their defaults count as asked for."""
    cli.call("--env-id", toy(), *cli.brief, "--seed", "2")
    cli.capsys.readouterr()
    with contextlib.chdir(cli.folder):
        summary = rac_sac.train(rac_sac.Args(resume="runs/run", total_timesteps=70, seed=3))
    assert (summary["completed"], summary["global_step"]) == (True, 70)
    (line,) = messages(cli.capsys.readouterr().err)
    assert line.startswith("not used: seed;")


def test_a_changed_script_goes_on_with_its_older_runs(cli, toy):
    """An argument that a fork has gained takes its default, and is named; the script that began the run stays beside it."""
    cli.script = cli.folder / "fork" / "my_rac.py"
    cli.script.parent.mkdir()
    original = (ROOT / "rac_sac.py").read_text()
    cli.script.write_text(original)
    cli.call("--env-id", toy(), *cli.brief)
    del sys.modules["my_rac"]
    gained = "    noise_scale: NonNegativeFloat = 0.5  # of a fork\n    utd: PositiveInt"
    fork = original.replace("    utd: PositiveInt", gained, 1)
    cli.script.write_text(fork)
    result = grow(cli)
    defaults, changed = messages(result.stderr)
    assert "noise_scale" in defaults
    assert str(cli.run_dir / "my_rac.py") in changed
    assert (cli.run_dir / "my_rac.py").read_text() == original
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in (original, fork)]
    config = json.loads((cli.run_dir / "config.json").read_text())
    assert config["script_sha256"] == "+".join(hashes)
    assert config["args"]["noise_scale"] == 0.5
    assert messages(cli.call("--evaluate", cli.run_dir).stderr) == []


def test_arguments_of_a_fork_of_other_types(cli, toy):
    """Files hold plain Python only; an enum, a path and a tuple come back as what they were."""
    cli.script = cli.folder / "my_rac.py"
    gained = """    mode: Mode = Mode.FAST
    data: Path = Path("data")
    sizes: tuple[int, ...] = (1, 2)
    utd: PositiveInt"""
    fork = (ROOT / "rac_sac.py").read_text().replace("    utd: PositiveInt", gained, 1)
    kinds = "import enum\n\n\nclass Mode(str, enum.Enum):\n    FAST = 'fast'\n    SLOW = 'slow'\n\n\n"
    cli.script.write_text(fork.replace("@dataclasses.dataclass", f"{kinds}@dataclasses.dataclass", 1))
    cli.call("--env-id", toy(), *cli.brief, "--mode", "SLOW", "--data", "elsewhere", "--sizes", "3", "4")
    fork = sys.modules["my_rac"]
    assert messages(grow(cli).stderr) == []
    assert messages(cli.call("--evaluate", cli.run_dir).stderr) == []
    args = fork.load_policy_file(cli.run_dir).args
    assert (args.mode, args.data, args.sizes) == (fork.Mode.SLOW, Path("elsewhere"), (3, 4))


def test_an_argument_that_a_script_does_not_have(cli, toy):
    """A run of a fork is not taken for one without."""
    cli.call("--env-id", toy(), *cli.brief)
    put(cli.run_dir, args={**checkpoint_of(cli.run_dir)["args"], "noise_scale": 1.0})
    assert "noise_scale" in sentence_of(grow_and_fail(cli))


# ----------------------------------------------------------------------------------------------------- another environment
CHANGED = {
    "bounds": {"high": (3.0,)},
    "lower bounds": {"low": (-1.0,)},
    "shape of actions": {"low": (-2.0, -2.0), "high": (4.0, 4.0)},
}


@pytest.mark.parametrize("what", CHANGED)
@pytest.mark.parametrize("more", ["60", "70"])
def test_an_environment_that_has_changed(cli, toy, what, more):
    """Its id is the same, but what a run has learned is not what it means now."""
    options = {}
    env_id = toy(lambda: Counter(**options))
    cli.call("--env-id", env_id, *cli.brief)
    options.update(CHANGED[what])
    before = files_in(cli.run_dir)
    for arguments in (("--resume", cli.run_dir, "--total-timesteps", more), ("--evaluate", cli.run_dir)):
        assert env_id in sentence_of(cli.call(*arguments, code=2))
    assert files_in(cli.run_dir) == before


def test_an_environment_with_more_observations(cli, toy):
    observes = {"shape": (1,)}

    class Wide(Counter):
        def __init__(self):
            super().__init__(change=lambda env: {"obs": np.zeros(observes["shape"], np.float32)})
            self.observation_space = rac_sac.gym.spaces.Box(-np.inf, np.inf, observes["shape"])

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(observes["shape"], np.float32), {}

    cli.call("--env-id", toy(Wide), *cli.brief)
    observes["shape"] = (2,)
    assert sentence_of(grow_and_fail(cli)).endswith(" of observation size 1; here it has 2.")
    assert "1 observations" in sentence_of(cli.call("--evaluate", cli.run_dir, code=2))


@pytest.mark.parametrize("device,used", [("cuda", True), ("cpu", False)])
def test_cuda_graphs_are_tried_again_where_there_can_be_some(capsys, device, used):
    """As the message says where they have failed: --resume with --cudagraphs."""
    saved = rac_sac.check_args(rac_sac.Args(cudagraphs=False))
    asked = rac_sac.dataclasses.replace(saved, resume="run", cudagraphs=True)
    assert rac_sac.resumed(asked, saved, saved, device).cudagraphs is used
    assert ("not used: cudagraphs" in capsys.readouterr().err) is not used


def test_an_environment_of_another_version(cli):
    """Saved with -v4, which a checkpoint that was edited by hand no longer says."""
    cli.call("--env-id", "Hopper-v4", *cli.brief, "--eval-episodes", "1", "--num-eval-policies", "1")
    put(cli.run_dir, args={**checkpoint_of(cli.run_dir)["args"], "env_id": "Walker2d-v4"})
    assert "Walker2d-v4" in sentence_of(grow_and_fail(cli))


def test_an_environment_that_is_gone(cli, toy):
    env_id = toy()
    cli.call("--env-id", env_id, *cli.brief)
    entry = rac_sac.gym.registry.pop(env_id)
    try:
        assert env_id in sentence_of(cli.call("--resume", cli.run_dir, code=2))
        assert env_id in sentence_of(cli.call("--evaluate", cli.run_dir, code=2))
    finally:
        rac_sac.gym.registry[env_id] = entry


# -------------------------------------------------------------------------------------------------------------- timed ones
def test_timed_checkpoints_are_whole_and_rows_after_them_come_again(cli, toy):
    """A failure goes back to the last timed checkpoint, not to the step of the failure."""
    now = [0.0]
    cli.monkeypatch.setattr(rac_sac.time, "time", lambda: now[0])

    def clock(env):
        now[0] += env.number == 0
        if env.total == 57 and env.number == 0 and not mended:
            raise RuntimeError("the simulator is unstable")

    mended = []
    cli.call("--env-id", toy(length=5, change=clock), *cli.brief, "--checkpoint-seconds", "25", code=1)
    assert checkpoint_of(cli.run_dir)["state"]["step"] in (50, 51)
    mended.append(True)
    cli.call("--resume", cli.run_dir)
    cli.call("--env-id", toy(length=5, change=since(1000)), *cli.brief, "--run-name", "whole")
    assert_same_run(cli.folder / "runs/whole", cli.run_dir)
