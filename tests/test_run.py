"""A run as users meet it: command line, run directory, evaluation, resume, signals, tracking."""

import csv
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    CONDITIONS,
    ROOT,
    children,
    every_script,
    kill,
    last_step,
    load_script,
    messages,
    rows_of,
    slow_but,
    wait_until,
    without_wall_clock,
)

import rac_sac


def final_state(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def assert_same_run(a: Path, b: Path, files=("eval.csv", "train.csv")) -> None:
    for name in files:
        assert without_wall_clock(a / name) == without_wall_clock(b / name)
    first, second = final_state(a), final_state(b)
    assert first["tensors"].keys() == second["tensors"].keys()
    assert all(torch.equal(first["tensors"][k], second["tensors"][k]) for k in first["tensors"] if k != "metrics")
    assert torch.equal(first["replay"], second["replay"]) and torch.equal(first["obs"], second["obs"])


# ------------------------------------------------------------------------------------------------------ what a run leaves
@every_script
def test_run_directory_and_screen(cli, whole):
    module, condition = importlib.import_module(cli.name), CONDITIONS[cli.name]
    run_dir, stdout, stderr = whole
    assert re.fullmatch(rf"Hopper-v4__{cli.name}__1__\d{{10}}", run_dir.name)
    files = {"config.json", "eval.csv", "train.csv", "checkpoint.pt", "policy.pt", "best_policy.pt", f"{cli.name}.py"}
    assert {p.name for p in run_dir.iterdir()} - {".lock"} == files and messages(stderr) == []
    bar = stderr.replace("\r", "\n").strip().splitlines()[-1]
    assert "500/500" in bar and "step/s" in bar and "evaluated" in bar and "<" in bar  # steps, SPS, evaluation, ETA
    random_start = re.findall(r"\b(?:\d|1?\d\d)/500 \[[^\]]*", stderr)
    assert random_start and not any("<" in part for part in random_start)  # random steps say nothing of the time left

    config = json.loads((run_dir / "config.json").read_text())
    assert config["args"]["env_id"] == "Hopper-v4" and config["args"].get("target_entropy", -3) == -3
    assert config["versions"]["torch"] == torch.__version__ and config["script"] == cli.name and config["device"]
    kept = (run_dir / f"{cli.name}.py").read_bytes()
    assert kept == (ROOT / f"{cli.name}.py").read_bytes() and config["script_sha256"] == hashlib.sha256(kept).hexdigest()
    assert set(config["args"]) == {f.name for f in module.dataclasses.fields(module.Args)}

    with open(run_dir / "eval.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["global_step"]) for r in rows] == [200, 300, 400, 500]  # from the end of the random start on
    conditions = {"rac_itm": ("1.33333", "1.66667", "2"), "vanilla_rac": ("0.2",)}.get(cli.name, ("0.266667", "0.533333", "0.8"))
    for row in rows:
        returns = {c: float(row[f"eval/return_{c}"]) for c in conditions}
        best = max(returns, key=returns.get)  # the max strategy
        assert float(row["eval/best_return"]) == returns[best] and float(row["eval/best_return_std"]) >= 0
        assert float(row[f"eval/best_{condition}"]) == pytest.approx(float(best), rel=1e-5)
        assert len([name for name in row if name.startswith("eval/return_")]) == len(conditions)
        assert cli.name == "rac_td3" or all(float(row[f"eval/alpha_{c}"]) > 0 for c in conditions)
        assert row["eval/bias_mean"] == "" and float(row["charts/wall_seconds"]) >= 0
    last, best = rows[-1], max(rows, key=lambda row: float(row["eval/best_return"]))
    assert stdout.startswith(f"finished: {Path('runs', run_dir.name)}, 500 steps\n")
    for title, row in (("last", last), ("best", best)):
        mean, std = float(row["eval/best_return"]), float(row["eval/best_return_std"])
        line = f"{title} evaluation: return {mean:.1f} ± {std:.1f} at {condition} {float(row[f'eval/best_{condition}']):.4g}"
        assert f"{line}, step {row['global_step']}\n" in stdout
    assert re.search(rf"evaluate it on fresh episodes: python \S*{cli.name}.py --evaluate runs/{run_dir.name}\n", stdout)
    with open(run_dir / "train.csv") as file:
        rows = list(csv.DictReader(file))
    assert int(rows[-1]["global_step"]) == 500
    learned = [r for r in rows if int(r["global_step"]) > 200]
    names = ("charts/SPS", *(f"losses/{name}" for name in module.METRICS))
    assert learned and all(np.isfinite(float(r[name])) for r in learned for name in names)
    assert any(r["charts/episodic_return"] for r in rows)


def test_defaults_depend_on_the_environment_whatever_its_version():
    for env_id, steps, capacity in (("Humanoid-v5", 1_000_000, 300_000), ("Walker2d-v4", 300_000, 100_000),
                                    ("Ant-v5", 300_000, 200_000), ("Hopper-v4", 300_000, 1_000_000),
                                    ("Pendulum-v1", 300_000, 1_000_000)):  # fmt: skip
        args = rac_sac.check_args(rac_sac.Args(env_id=env_id))
        assert (args.total_timesteps, args.buffer_size) == (steps, capacity)
        args = rac_sac.check_args(rac_sac.Args(env_id=env_id, total_timesteps=7000, buffer_size=6000))
        assert (args.total_timesteps, args.buffer_size) == (7000, 6000)
    assert rac_sac.eval_conditions(rac_sac.check_args(rac_sac.Args())) == pytest.approx([0.8 / 12 * i for i in range(1, 13)])


def test_help_from_the_command_line(cli):
    result = cli.run("--help")
    assert result.stdout.startswith("usage: ") and "--utd" in result.stdout and result.stderr == ""


@every_script
def test_help_explains_every_argument(cli):
    cli.monkeypatch.setenv("COLUMNS", "120")
    text, module = cli.call("--help").stdout, importlib.import_module(cli.name)
    for field in module.dataclasses.fields(module.Args):
        assert f"--{field.name.replace('_', '-')}" in text
    source = (ROOT / f"{cli.name}.py").read_text()
    comments = re.findall(r"^    \w+: .+  # (.+)$", source[source.index("class Args") : source.index("# The method")], re.M)
    assert len(comments) == len(module.dataclasses.fields(module.Args))
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    assert all(" ".join(comment.split()) in shown for comment in comments)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Ant-v5", "Ant-v4", "Humanoid-v4"])
def test_other_environments(cli, env_id):
    run_dir = cli.train("run", "--total-timesteps", "250", env_id=env_id)
    assert rows_of(run_dir / "eval.csv") == 2


def test_train_is_a_function_for_other_programs(cli):
    code = ("import rac_sac, sys\n"
            "if __name__ == '__main__':\n"
            "    args = rac_sac.tyro.cli(rac_sac.Args)\n"
            "    summary = rac_sac.train(args)\n"
            "    policy = rac_sac.load_policy(summary['run_dir'])\n"
            "    import numpy as np\n"
            "    print(summary['completed'], summary['global_step'], summary['last']['best_beta'] > 0)\n"
            "    one, many = policy(np.ones(3) * 9), policy(np.zeros((5, 3)), beta=0.2)\n"
            "    print(one.shape, many.shape, abs(one) <= 2)\n")  # fmt: skip
    (cli.folder / "program.py").write_text(code)
    env = {**cli.env, "PYTHONPATH": f"{ROOT}:{cli.env['PYTHONPATH']}"}
    command = [sys.executable, "program.py", "--env-id", "Pendulum-v1", *cli.tiny, "--eval-workers", "1"]
    result = subprocess.run(command, cwd=cli.folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["True 500 True", "(1,) (5, 1) [ True]"]
    silent = subprocess.run([sys.executable, "-c", "import rac_sac"], cwd=cli.folder, env=env, capture_output=True, text=True)
    assert silent.returncode == 0 and silent.stdout == silent.stderr == ""


# ------------------------------------------------------------------------------------------------------------ determinism
@slow_but("rac_sac")
def test_workers_do_not_matter(cli):
    """The same seed gives the same run, value bias included, whatever the number of workers, none included."""
    options = ("--bias-frequency", "200", "--total-timesteps", "300")
    none = cli.train("none", *options)
    cli.env["TQDM_DISABLE"] = "1"  # nor does the bar
    cli.run("--env-id", "Hopper-v4", "--run-name", "two", *cli.tiny, *options, "--eval-workers", "2")
    assert_same_run(none, cli.folder / "runs/two")


@slow_but("rac_sac")
def test_seeds_and_value_bias(cli):
    """The same seed gives the same run, another seed another; the value bias is measured when it is due."""
    options = ("--bias-frequency", "200", "--total-timesteps", "300")
    one, same, other = cli.train("one", *options), cli.train("same", *options), cli.train("other", *options, "--seed", "2")
    assert_same_run(one, same)
    assert without_wall_clock(one / "eval.csv")[1:] != without_wall_clock(other / "eval.csv")[1:]
    with open(one / "eval.csv") as file:
        bias = {row["global_step"]: (row["eval/bias_mean"], row["eval/bias_std"]) for row in csv.DictReader(file)}
    assert all(np.isfinite(float(x)) for x in bias["200"]) and bias["300"] == ("", "")


def test_evaluation_in_this_process_starts_no_other(cli, whole):
    """--eval-workers 0 is for debuggers and for machines where processes are unwelcome; one worker gives the same run."""
    cli.monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda self: pytest.fail("a process was started"))
    assert_same_run(whole[0], cli.train("run"))


@slow_but("rac_sac")
def test_sigkill_and_resume_is_exact(cli, whole):
    """Killed in the random start, between checkpoints and while evaluations pend: the same run in the end."""
    arguments = ("--checkpoint-seconds", "0.05", "--eval-workers", "1")
    for at in (30, 220, 150):  # in steps of the process, which repeats the episode that was cut
        with cli.held("cut", *arguments, at=at) as (process, cut):
            cli.holding(process)
            kill(process)
        assert final_state(cut)["state"]["step"] < 500  # a checkpoint is whole at every moment
        arguments = ("--resume", cut)
    assert final_state(cut)["state"]["step"] > 200
    cli.run("--resume", cut)
    assert_same_run(whole[0], cut)


SLOW_SIGNALS = (pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP))


@pytest.mark.parametrize("number", [signal.SIGINT, *SLOW_SIGNALS])
def test_signals_write_a_checkpoint(cli, whole, number):
    with cli.held("cut", "--eval-workers", "1", at=260) as (process, cut):
        cli.holding(process)
        workers = children(process.pid)
        process.send_signal(number)
        cli.release()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    match = re.search(r"stopped at step (\d+); go on with: python (\S+\.py --resume runs/cut)", err)
    assert match and final_state(cut)["state"]["step"] == int(match[1]) == 260
    assert workers and not any(Path(f"/proc/{pid}").exists() for pid in workers)
    cli.run(*match[2].split()[1:])
    assert_same_run(whole[0], cut)


def test_workers_die_with_a_killed_run(cli):
    """In the middle of their work: they wait in an environment's step."""
    with cli.held("cut", "--eval-workers", "2") as (process, _):
        workers = cli.holding(process, 2)
        assert sorted(children(process.pid)) == sorted(workers)
        kill(process)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_dead_worker_is_named_and_its_evaluation_repeated(cli, whole):
    with cli.held("cut", "--eval-workers", "1") as (process, cut):
        (worker,) = cli.holding(process)
        assert children(process.pid) == [worker]
        os.kill(worker, signal.SIGKILL)
        cli.release()
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "an evaluation worker died; what it had not finished is evaluated again" in err
    assert_same_run(whole[0], cut)


def test_a_dead_worker_in_an_evaluation_on_its_own(cli):
    run_dir = cli.train("run", "--total-timesteps", "250", env_id="toy_envs:Hopper-v0")
    with cli.held("run", "--evaluate", run_dir, "--eval-workers", "1") as (process, _):
        (worker,) = cli.holding(process)
        os.kill(worker, signal.SIGKILL)
        cli.release()
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "an evaluation worker died" in err, err
    assert out == cli.call("--evaluate", run_dir).stdout


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_evaluation_on_its_own_can_be_stopped(cli, number):
    run_dir = cli.train("run", "--total-timesteps", "250", env_id="toy_envs:Hopper-v0")
    with cli.held("run", "--evaluate", run_dir, "--eval-workers", "1") as (process, _):
        (worker,) = cli.holding(process)
        out, err = kill(process, number)
        assert process.returncode in (130, -number) and out == "" and "Traceback" not in err
        wait_until(lambda: not Path(f"/proc/{worker}").exists())


def test_a_row_that_cannot_be_written_is_not_lost(cli, whole):
    """A file with other columns is not written into; the evaluation stays pending in a checkpoint of the step itself."""
    run_dir = cli.train("run", "--total-timesteps", "400")
    text = (run_dir / "eval.csv").read_text()
    (run_dir / "eval.csv").write_text("".join(line.rsplit(",", 1)[0] + "\n" for line in text.splitlines()))
    err = cli.call("--resume", run_dir, "--total-timesteps", "500", code=1).stderr
    assert re.search(r"stopped at step 500: .*eval.csv has other columns than rac_sac.py writes.*checkpoint is of step 500", err)
    (run_dir / "eval.csv").write_text(text)
    cli.call("--resume", run_dir)
    assert_same_run(whole[0], run_dir, files=["eval.csv"])


def test_more_steps_on_resume(cli, whole):
    grown = cli.train("grown", "--total-timesteps", "400")
    result = cli.call("--resume", grown, "--env-id", "Hopper-v4", "--total-timesteps", "500", "--seed", "9")
    assert messages(result.stderr) == ["not used, because the arguments that the run was saved with win: seed"]
    assert_same_run(whole[0], grown, files=["eval.csv"])  # its train.csv has one row more, at what was its last step
    assert json.loads((grown / "config.json").read_text())["args"]["total_timesteps"] == 500
    error = cli.call("--resume", grown, "--total-timesteps", "450", code=2).stderr
    assert "total_timesteps is 450; on resuming it may only grow, from 500." in error
    before = (grown / "eval.csv").read_text()
    again = cli.call("--resume", grown)  # a finished run is left as it is
    assert (grown / "eval.csv").read_text() == before and again.stdout == result.stdout


def test_evaluations_are_played_elsewhere(cli, whole):
    """--max-pending-evaluations: training does not wait; what pends at its end is played on a machine with another device."""
    with cli.held("cut", "--eval-workers", "1", "--max-pending-evaluations", "9") as (process, cut):
        cli.holding(process)
        wait_until(lambda: last_step(cut / "train.csv") == 500)
        kill(process, signal.SIGINT)
    checkpoint = torch.load(cut / "checkpoint.pt", weights_only=True)
    assert [step for step, *_ in checkpoint["pending"]] == [200, 300, 400, 500] and not (cut / "eval.csv").exists()
    trained_on = {"device": "cuda", "generator": torch.zeros(16, dtype=torch.uint8), "threads": 3}
    args = {**checkpoint["args"], "cuda": True, "compile": True}
    torch.save({**checkpoint, **trained_on, "args": args}, cut / "checkpoint.pt")
    before = (cut / "config.json").read_text()
    cli.env.update(CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=str(cli.folder.parent / "empty"))
    cli.run("--resume", cut, "--eval-workers", "0")
    assert without_wall_clock(cut / "eval.csv") == without_wall_clock(whole[0] / "eval.csv")
    after = torch.load(cut / "checkpoint.pt", weights_only=True)
    assert after["pending"] == [] and after["device"] == "cuda" and after["threads"] == 3 and after["args"] == args
    assert (cut / "config.json").read_text() == before
    assert torch.equal(after["generator"], trained_on["generator"])
    assert "finds no CUDA device here" in cli.call("--resume", cut, "--total-timesteps", "600", code=2).stderr


def test_killed_before_the_first_timed_checkpoint(cli, whole):
    """It starts again from step 0; but a run with rows whose checkpoint is lost is not thrown away."""
    with cli.held("cut", "--checkpoint-seconds", "1000", at=260) as (process, cut):
        cli.holding(process)
        assert rows_of(cut / "eval.csv") == 1 and last_step(cut / "train.csv") > 0
        kill(process)
    assert final_state(cut)["state"]["step"] == 0
    cli.call("--resume", cut)
    assert_same_run(whole[0], cut)
    (cut / "checkpoint.pt").unlink()
    before = (cut / "eval.csv").read_text()
    assert "checkpoint.pt does not exist" in cli.call("--resume", cut, code=2).stderr
    assert (cut / "eval.csv").read_text() == before
    assert "exists already" in cli.call("--env-id", "Hopper-v4", "--run-name", "cut", *cli.tiny, code=2).stderr
    for path in cut.iterdir():
        path.unlink()
    (cut / "checkpoint.pt.tmp").touch()  # as after a kill in the first moments: the same command begins anew
    cli.train("cut")
    assert_same_run(whole[0], cut)


def test_two_processes_cannot_share_a_run_directory(cli):
    with cli.held("run", at=100) as (process, run_dir):
        cli.holding(process)
        assert f"{run_dir} is in use by another process." in cli.call("--resume", run_dir, code=2).stderr
        assert "exists already" in cli.call("--run-name", "run", *cli.tiny, code=2).stderr
        assert process.poll() is None


def test_rows_after_the_checkpoint_are_dropped_by_their_step(cli, whole):
    """Whatever an editor did to line ends, comments stay; a file that cannot be read is refused and left as it is."""
    grown = cli.train("grown", "--total-timesteps", "400")
    for name in ("eval.csv", "train.csv"):
        header, *rows = (grown / name).read_text().splitlines()
        later = ["450" + rows[-1][3:], "460,1"] if name == "eval.csv" else []  # a later row, and one that a kill has cut
        (grown / name).write_bytes("\r\n".join([header, "# a comment", *rows, *later]).encode())
    cli.call("--resume", grown, "--total-timesteps", "500")
    for name in ("eval.csv", "train.csv"):
        assert (grown / name).read_bytes().split(b"\r\n")[1] == b"# a comment"
        text = (grown / name).read_bytes().replace(b"\r\n", b"\n").replace(b"# a comment\n", b"")
        (grown / name).write_bytes(text)
    assert_same_run(whole[0], grown, files=["eval.csv"])
    damaged = (grown / "eval.csv").read_bytes().replace(b"\n300,", b"\nthree hundred,")
    (grown / "eval.csv").write_bytes(damaged)
    before = {path.name: path.read_bytes() for path in grown.iterdir()}
    error = cli.call("--resume", grown, "--total-timesteps", "600", code=2).stderr
    assert "eval.csv cannot be read as the rows of a run; mend it, or move it away." in error
    assert before == {path.name: path.read_bytes() for path in grown.iterdir()}


def test_a_changed_script_goes_on_with_its_older_runs(cli):
    """An argument that a fork has gained takes its default, and is named; the script that began the run stays beside it."""
    run_dir = cli.train("grown", "--total-timesteps", "400")
    original = cli.script.read_text()
    gained = "    noise_scale: NonNegativeFloat = 0.5  # of a fork\n    utd: PositiveInt"
    fork = original.replace("    utd: PositiveInt", gained, 1)
    cli.script = cli.folder / "rac_sac.py"
    cli.script.write_text(fork)
    result = cli.run("--resume", run_dir, "--total-timesteps", "500")
    said = messages(result.stderr)
    assert said[0].endswith("checkpoint.pt was written without noise_scale: the defaults are taken") and len(said) == 2
    assert said[1].startswith("rac_sac.py has changed since it began this run, as ")
    assert (run_dir / "rac_sac.py").read_text() == original
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in (original, fork)]
    config = json.loads((run_dir / "config.json").read_text())
    assert config["script_sha256"] == "+".join(hashes) and config["args"]["noise_scale"] == 0.5
    assert messages(cli.run("--evaluate", run_dir).stderr) == []
    cli.script = ROOT / "rac_sac.py"  # and back: it does not know the argument
    assert "has arguments that this rac_sac.py does not have: noise_scale" in cli.call("--resume", run_dir, code=2).stderr


@every_script
def test_policies_to_hand_on(cli, whole):
    """policy.pt is of the last evaluation, best_policy.pt of the best one; both know their family and refuse what is odd."""
    module, condition, run_dir = load_script(ROOT / f"{cli.name}.py"), CONDITIONS[cli.name], whole[0]
    with open(run_dir / "eval.csv") as file:
        rows = list(csv.DictReader(file))
    best = max(rows, key=lambda row: float(row["eval/best_return"]))
    checkpoint, obs = module.load_file(run_dir / "checkpoint.pt"), np.linspace(-1, 1, 22).reshape(2, 11)
    for path, row in ((run_dir, rows[-1]), (run_dir / "policy.pt", rows[-1]), (run_dir / "best_policy.pt", best)):
        policy = module.load_policy(path)
        assert getattr(policy, f"best_{condition}") == pytest.approx(float(row[f"eval/best_{condition}"]))
        assert getattr(policy, f"{condition}s") == module.eval_conditions(checkpoint["args"])
        for value in getattr(policy, f"{condition}s"):
            many = policy(obs, **{condition: value})
            expected, _ = module.policy(policy.actor, obs.astype(np.float32), value)
            np.testing.assert_allclose(many, expected, atol=1e-6)  # Hopper's bounds are -1 and 1
            np.testing.assert_allclose(policy(obs[1], value), many[1], atol=1e-6)
        assert policy(obs[0]).shape == (3,) and (np.abs(policy(obs * 1e3)) <= 1).all()
        for wrong, sentence in ((obs[:, 1:], "obs has shape"), (obs * np.nan, "obs has shape"), (obs[None], "obs has shape")):
            with pytest.raises(module.UserError, match=sentence):
                policy(wrong)
        for wrong in ({condition: 9.0}, {condition: -1.0}, {condition: np.nan}, {"gamma": 1.0}):
            with pytest.raises(module.UserError, match=f"{condition} must be from"):
                policy(obs, **wrong)
    last = {key.removeprefix("actor."): value for key, value in checkpoint["tensors"].items() if key.startswith("actor.")}
    assert all(torch.equal(value, last[key]) for key, value in module.load_policy(run_dir).actor.state_dict().items())
    with pytest.raises(module.UserError, match=r"policy\.pt does not exist"):
        module.load_policy(cli.folder)


def test_the_actor_can_be_exported(whole):
    """As the README shows it."""
    policy = rac_sac.load_policy(whole[0])
    inputs = (torch.zeros(1, 11), torch.tensor([[policy.best_beta]]).log())
    exported = torch.export.export(policy.actor, inputs).module()
    torch.testing.assert_close(exported(*inputs)[0].tanh().numpy()[0], policy(np.zeros(11)))


def test_resume_says_when_it_cannot_be_exact(cli):
    run_dir = cli.train("run", "--total-timesteps", "205", env_id="toy_envs:Lottery-v0")
    result = cli.call("--resume", run_dir, "--total-timesteps", "300")
    assert "Lottery-v0 is not deterministic" in result.stderr


# ----------------------------------------------------------------------------------------------------- evaluate and video
def table(stdout: str) -> dict[str, tuple[float, float]]:
    lines = [line.split() for line in stdout.splitlines()]
    return {line[0]: (float(line[1]), float(line[2])) for line in lines if line and re.fullmatch(r"[012]\.\d{4}", line[0])}


@slow_but("rac_sac")
def test_evaluate(cli, whole):
    run_dir = cli.folder / "run"
    shutil.copytree(whole[0], run_dir)
    before = {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}
    result = cli.call("--evaluate", run_dir)
    values = table(result.stdout)
    assert len(values) == (1 if cli.name == "vanilla_rac" else 3) and all(v > 0 for v, _ in values.values())
    assert cli.name != "rac_sac" or list(values) == ["0.2667", "0.5333", "0.8000"]
    assert result.stdout.count("best in training") == 1 and messages(result.stderr) == []
    after = {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}
    with open(run_dir / "evaluate.csv") as file:
        rows = list(csv.DictReader(file))
    numbers = {float(r[CONDITIONS[cli.name]]): (float(r["return"]), float(r["return_std"])) for r in rows}
    written = {f"{condition:.4f}": (round(mean, 1), round(std, 1)) for condition, (mean, std) in numbers.items()}
    assert written == values and {r["global_step"] for r in rows} == {"500"}
    assert [r["best_in_training"] for r in rows].count("1") == 1
    assert before == {name: content for name, content in after.items() if name != "evaluate.csv"}
    same = cli.call("--evaluate", run_dir, "--eval-workers", "1", "--utd", "7")
    assert same.stdout == result.stdout and messages(same.stderr)[0].endswith("win: utd")
    ten = cli.call("--evaluate", run_dir, "--eval-episodes", "10").stdout  # the scripts' default, but not this run's
    assert ten.startswith("Hopper-v4, step 500, 10 fresh episodes")
    more = cli.call("--evaluate", run_dir, "--eval-episodes", "3", "--seed", "5")
    assert more.stdout.startswith("Hopper-v4, step 500, 3 fresh episodes") and table(more.stdout) != values
    assert cli.call("--evaluate", run_dir, "--seed", "5").stdout.splitlines()[1:] != result.stdout.splitlines()[1:]


@pytest.mark.slow
@every_script
def test_evaluate_and_video(cli):
    cli.run("--env-id", "Hopper-v4", "--run-name", "run", *cli.tiny, "--total-timesteps", "300", "--capture-video")
    run_dir, condition = cli.folder / "runs/run", CONDITIONS[cli.name]
    (video,) = (run_dir / "videos").glob(f"step-300-{condition}-*.mp4")
    assert video.stat().st_size > 1000 and b"ftyp" in video.read_bytes()[:16]
    before = {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}
    result = cli.run("--evaluate", run_dir, "--capture-video", "--eval-workers", "1")
    assert result.stdout.count("best in training") == 1 and table(result.stdout)
    assert messages(result.stderr) == []
    assert list((run_dir / "videos").glob(f"evaluate-step-300-{condition}-*.mp4"))
    after = {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}
    assert before == {name: content for name, content in after.items() if name != "evaluate.csv"}


# --------------------------------------------------------------------------------------------------------------- tracking
def wandb_records(path: Path):
    """The records of an offline Weights & Biases file: LevelDB's log format around protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, part = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # no record header straddles a block
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield Record.FromString(part)
            part = b""


@pytest.mark.slow
def test_tracking_without_network(cli):
    """A key, but no way to the server: one line, and offline."""
    cli.env.update(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    result = cli.run("--env-id", "Pendulum-v1", "--run-name", "run", *cli.tiny, "--total-timesteps", "210", "--track")
    (line,) = messages(result.stderr)
    assert line.startswith("Weights & Biases is offline (")
    assert list((cli.folder / "runs/run/wandb").glob("offline-run-*/*.wandb"))


@slow_but("rac_sac")
def test_offline_tracking_holds_the_history(cli):
    result = cli.run("--env-id", "Hopper-v4", "--run-name", "run", *cli.tiny, "--total-timesteps", "300", "--track")
    run_dir = cli.folder / "runs" / "run"
    lines = [line for line in messages(result.stderr) if "Weights & Biases" in line]
    assert len(lines) == 1 and "offline (no API key)" in lines[0] and "wandb sync" in lines[0]
    assert messages(result.stderr) == lines
    assert [p.name for p in cli.folder.iterdir()] == ["runs"]
    cli.run("--resume", run_dir, "--total-timesteps", "400")
    files = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime)
    assert len(files) == 2 and len({p.name for p in files}) == 1  # the same run, twice
    history, metrics, config, code, ends = [], set(), {}, False, []
    for path in files:
        for record in wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                history.append(items)
            elif kind == "metric":
                metrics.add(record.metric.name or record.metric.glob_name)
            elif kind == "run":
                config.update({u.key: json.loads(u.value_json) for u in record.run.config.update})
            elif kind == "exit":
                ends.append(record.exit.exit_code)
            code |= kind == "artifact" and record.artifact.type == "code"
    assert {"global_step", "*"} <= metrics and code and ends == [0, 0]
    assert config["env_id"] == "Hopper-v4" and config["utd"] == 1
    evaluated = {h["global_step"]: h["eval/best_return"] for h in history if "eval/best_return" in h}
    with open(run_dir / "eval.csv") as file:
        rows = list(csv.DictReader(file))
    assert evaluated == {int(r["global_step"]): float(r["eval/best_return"]) for r in rows} and len(rows) == 3
    names = set().union(*history)
    assert {"charts/SPS", "charts/episodic_return", "charts/episodic_length", "losses/qf_loss", "losses/qf_values",
            "losses/actor_loss", f"eval/best_{CONDITIONS[cli.name]}"} <= names  # fmt: skip
    if cli.name == "rac_sac":
        assert {"losses/alpha", "losses/alpha_loss", "eval/return_0.8", "eval/alpha_0.8"} <= names


@pytest.mark.slow
def test_a_tracked_run_outlives_the_service(cli, whole):
    with cli.held("run", "--track", at=260) as (process, run_dir):
        cli.holding(process)
        services = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if is_service_of(p, process.pid)]
        assert services
        for service in services:
            os.kill(service, signal.SIGKILL)
        cli.release()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "Weights & Biases has failed, and the run goes on without it" in err
    assert_same_run(whole[0], run_dir)


def is_service_of(cmdline: Path, pid: int) -> bool:
    try:
        words = cmdline.read_text().split("\0")
    except OSError:
        return False
    return "wandb-core" in words[0] and str(pid) in words


@pytest.mark.slow
def test_tracked_runs_end_as_what_they_are(cli):
    """Exit code 1 where training fails, 255 (killed) where it is stopped: neither is finished."""
    failed = cli.run("--env-id", "toy_envs:InfReward-v0", "--run-name", "failed", *cli.tiny, "--track", code=1)
    assert "non-finite reward" in failed.stderr
    with cli.held("stopped", "--track", at=260) as (process, _):
        cli.holding(process)
        process.send_signal(signal.SIGTERM)
        cli.release()
        process.communicate(timeout=240)
    for name, code in (("failed", 1), ("stopped", 255)):
        (path,) = (cli.folder / "runs" / name / "wandb").glob("offline-run-*/*.wandb")
        assert [r.exit.exit_code for r in wandb_records(path) if r.WhichOneof("record_type") == "exit"] == [code]


# ------------------------------------------------------------------------------------------------------------ compilation
@pytest.mark.slow
def test_no_compiler_falls_back_to_eager(cli):
    cli.env.update(CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=str(cli.folder.parent / "empty"))
    arguments = [a for a in cli.tiny if a != "--no-compile"]
    result = cli.run("--env-id", "Pendulum-v1", "--run-name", "run", *arguments, "--total-timesteps", "250")
    assert "torch.compile does not work here" in result.stderr and "Traceback" not in result.stderr
    assert json.loads((cli.folder / "runs/run/config.json").read_text())["args"]["compile"] is False


@pytest.mark.slow
def test_interrupted_while_compiling(cli):
    """Ctrl-C in a terminal goes to the compiler too."""
    cli.env.update(TORCHINDUCTOR_CACHE_DIR=str(cli.folder.parent / "empty"))
    arguments = [a for a in cli.tiny if a != "--no-compile"]
    process = cli.start("--env-id", "Pendulum-v1", "--run-name", "run", *arguments, start_new_session=True)

    def compiling():
        commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/comm")]
        return last_step(cli.folder / "runs/run/train.csv") >= 200 and b"cc1plus\n" in commands

    wait_until(compiling)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (1, 128 + signal.SIGINT) and "Traceback" not in err
    assert "the last good checkpoint is of step 0 in runs/run" in err or "go on with: python" in err
    assert final_state(cli.folder / "runs/run")["state"]["step"] >= 0


@pytest.mark.slow
@every_script
def test_compiled_run_resumes_exactly(cli):
    """Compiled, with the default deterministic settings, across processes."""
    arguments = [a for a in cli.tiny if a != "--no-compile"]
    cli.run("--env-id", "Pendulum-v1", "--run-name", "whole", *arguments, "--total-timesteps", "260")
    cli.run("--env-id", "Pendulum-v1", "--run-name", "grown", *arguments, "--total-timesteps", "230")
    result = cli.run("--resume", "runs/grown", "--total-timesteps", "260")
    whole, grown = final_state(cli.folder / "runs/whole"), final_state(cli.folder / "runs/grown")
    assert all(torch.equal(whole["tensors"][k], grown["tensors"][k]) for k in whole["tensors"] if k != "metrics")
    assert "compiling the update" in result.stderr and "compiling" not in result.stderr.replace("\r", "\n").splitlines()[-1]
    shutil.rmtree(cli.folder / "runs")
