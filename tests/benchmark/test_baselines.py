"""benchmark/baselines.py as users meet it: command line, run directory, evaluation, resume, signals, report."""

import csv
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_envs
from conftest import ROOT, CommandLine, environment, kill, last_step, messages

sys.path.insert(0, str(ROOT / "benchmark"))
pytest.importorskip("sb3_contrib", reason="benchmark/requirements.txt is not installed")
import baseline_run

pytestmark = [pytest.mark.benchmark, pytest.mark.parametrize("cli", ["benchmark/baselines"], indirect=True)]
TINY = """
--cuda False --total-timesteps 500 --learning-starts 200 --batch-size 32 --hidden-dim 8 --buffer-size 500 --eval-frequency 100
--eval-episodes 2
""".split()


@pytest.fixture(autouse=True)
def tiny(cli):
    cli.tiny = TINY


def rows(path: Path) -> list[dict]:
    with open(path) as file:
        return list(csv.DictReader(file))


def steps(path: Path) -> list[int]:
    return [int(row["global_step"]) for row in rows(path)]


def checkpoint(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


# ------------------------------------------------------------------------------------------------------ what a run leaves
@pytest.mark.parametrize(
    "algorithm, total, utd", [("sac", 500, 1), ("td3", 500, 1), ("tqc", 300, 1), ("tqc20", 210, 20), ("mbpo", 210, 20)]
)
def test_run_directory_and_screen(cli, algorithm, total, utd):
    result = cli.call(*cli.tiny, "--algorithm", algorithm, "--total-timesteps", total)
    (run_dir,) = (cli.folder / "runs").iterdir()
    assert re.fullmatch(rf"Hopper-v4__{algorithm}__1__\d{{10}}", run_dir.name) and messages(result.stderr) == []
    assert {path.name for path in run_dir.iterdir()} == {"config.json", "eval.csv", "train.csv", "checkpoint.pt", ".lock"}
    config = json.loads((run_dir / "config.json").read_text())
    assert config["script"] == "baselines" and config["args"]["exp_name"] == algorithm and config["args"]["utd"] == utd
    assert config["versions"]["stable_baselines3"] == importlib.metadata.version("stable-baselines3")
    assert config["device"] and re.fullmatch("[0-9a-f]{64}", config["script_sha256"])
    evaluations, training = rows(run_dir / "eval.csv"), rows(run_dir / "train.csv")
    assert steps(run_dir / "eval.csv") == [*range(200, total, 100), total]  # from the end of the random start on
    assert all(float(row["eval/best_return"]) > 0 and float(row["eval/best_return_std"]) >= 0 for row in evaluations)
    learned = [row for row in training if int(row["global_step"]) > 200]
    assert learned and all(np.isfinite(float(row["losses/qf_loss"])) and float(row["charts/SPS"]) > 0 for row in learned)
    assert all((float(row["losses/alpha"]) > 0) if algorithm != "td3" else row["losses/alpha"] == "" for row in learned)
    ended = [row for row in training if row["charts/episodic_return"]]
    assert sum(int(row["charts/episodic_length"]) for row in ended) == int(ended[-1]["global_step"])
    assert result.stdout.startswith(f"finished: runs/{run_dir.name}, {total} steps\nlast evaluation: return ")
    assert f"baselines.py --evaluate runs/{run_dir.name}\n" in result.stdout
    saved = checkpoint(run_dir)
    # An update begins after the random start; SAC and TQC count gradient steps, TD3 too.
    assert saved["step"] == total and saved["updates"] == (total - 200) * utd


def test_settings_are_those_of_the_papers(cli):
    import baselines

    def model(algorithm, env_id="Hopper-v4"):
        return baselines.make_model(baselines.check_args(baselines.Args(algorithm, env_id=env_id)), baselines.FlatEnv(env_id))

    def widths(network):
        return [layer.out_features for layer in network if isinstance(layer, torch.nn.Linear)]

    for algorithm in ("sac", "td3", "tqc", "tqc20"):
        made = model(algorithm)
        assert (made.gamma, made.tau, made.batch_size, made.buffer_size) == (0.99, 0.005, 256, 1_000_000)
        assert made.gradient_steps == (20 if algorithm == "tqc20" else 1) and made.learning_starts == 5000
        rates = {group["lr"] for part in (made.actor, made.critic) for group in part.optimizer.param_groups}
        assert rates == {3e-4} and len(made.critic.q_networks) == (5 if "tqc" in algorithm else 2)
        assert all(widths(q) == ([512, 512, 512, 25] if "tqc" in algorithm else [256, 256, 1]) for q in made.critic.q_networks)
    td3 = model("td3")
    noise = (td3.target_policy_noise, td3.target_noise_clip, *set(td3.action_noise._sigma))
    assert noise == (0.2, 0.5, 0.1) and td3.policy_delay == 2
    for env_id, dropped in (("Hopper-v4", 5), ("Walker2d-v5", 2), ("Ant-v4", 2), ("HalfCheetah-v4", 0)):
        assert model("tqc", env_id).top_quantiles_to_drop_per_net == dropped
    assert baselines.check_args(baselines.Args(env_id="Humanoid-v5")).total_timesteps == 1_000_000


def test_an_id_without_a_version_is_the_newest(cli):
    """As with the scripts, so that reports have both in one environment."""
    run_dir = cli.train("run", "--total-timesteps", "205", env_id="InvertedPendulum")
    assert json.loads((run_dir / "config.json").read_text())["args"]["env_id"] == "InvertedPendulum-v5"


def test_replay_is_float32(cli):
    """Where Stable-Baselines3 would keep what the environment gives: float64."""
    assert gym.make("Hopper-v4").observation_space.dtype == np.float64
    run_dir = cli.train("run", "--total-timesteps", "210")
    assert {tensor.dtype for tensor in checkpoint(run_dir)["replay"].values()} == {torch.float32}
    assert checkpoint(run_dir)["replay"]["observations"].shape == (210, 1, 11)  # what is filled of 500


# -------------------------------------------------------------------------------------------------------------- evaluation
def test_same_initial_states_as_the_scripts(cli, monkeypatch, capsys):
    """In an environment that rewards with what its reset has drawn, evaluations are alike if their initial states are."""
    rac = CommandLine(cli.folder, "rac_sac", monkeypatch, capsys)
    found = {}
    for program, name, seed in ((rac, "rac", 1), (cli, "own", 1), (cli, "other", 2)):
        options = ("--seed", seed, "--eval-episodes", "5", "--total-timesteps", "300")
        run_dir = program.train(name, *options, env_id="toy_envs:Start-v0")
        program.call("--evaluate", run_dir)
        names, fresh = ("global_step", "eval/best_return", "eval/best_return_std"), rows(run_dir / "evaluate.csv")[0]
        found[name] = [tuple(row[column] for column in names) for row in rows(run_dir / "eval.csv")]
        found[name].append((fresh["return"], fresh["return_std"]))
    assert found["own"] == found["rac"] and len(found["own"]) == 3
    assert all(own[-2:] != other[-2:] for own, other in zip(found["own"], found["other"], strict=True))
    assert len({row[-2] for row in found["own"]}) == 2  # all evaluations from the same states, --evaluate from fresh ones


def test_evaluate_on_its_own(cli):
    run_dir = cli.train("run", "--total-timesteps", "250")
    out = cli.call("--evaluate", run_dir, "--eval-episodes", "3").stdout
    (row,) = rows(run_dir / "evaluate.csv")
    assert row["global_step"] == "250" and row["best_in_training"] == "1" and "step 250, 3 fresh episodes" in out
    assert out == cli.call("--evaluate", run_dir, "--eval-episodes", "3").stdout
    assert out != cli.call("--evaluate", run_dir, "--eval-episodes", "3", "--seed", "2").stdout


def test_an_evaluation_with_non_finite_numbers(cli, toy):
    """An episode counts as far as it went, but such an evaluation is the best only where there is no other; the run goes on.

    Rewards are 1 in three steps and then -1: 3 - 4 in a whole episode, more in one that is cut short.
    """
    nan = np.full(1, np.nan)
    breaking = []  # the environments of an evaluation's two episodes, behind the one that is looked at and the one that trains

    class Breaks(toy_envs.Counter):
        def reset(self, seed=None, options=None):
            obs, info = super().reset(seed=seed)
            if self.number in (2, 3):
                breaking.append(self.number)
            return (nan if breaking.count(2) == 2 and self.number == 2 else obs), info

    def change(env):
        breaks = env.number == 3 and breaking.count(3) in (1, 3) and env.count == 3
        return {"reward": 1.0 if env.count <= 3 else -1.0, **({"obs": nan} if breaks else {})}

    env_id = toy(Breaks, change=change)
    result = cli.call(*cli.tiny, "--env-id", env_id, "--run-name", "run", "--total-timesteps", "500")
    end = "the environment returned a non-finite observation: [nan]; the episode counts as far as it went"
    cut = (("200", 2), ("300", 1), ("400", 2))
    assert messages(result.stderr) == [f"evaluation of step {step}, episode {episode}: {end}" for step, episode in cut]
    evaluated = rows(cli.folder / "runs/run/eval.csv")
    assert [float(row["eval/best_return"]) for row in evaluated] == [(-1 + 2) / 2, -1 / 2, (-1 + 2) / 2, -1]
    assert "best evaluation: return -1.0 ± 0.0, step 500\n" in result.stdout


def test_an_environment_may_change_the_directory(cli, toy):
    """The run stays where it was asked for, and so does what is told of it."""
    env_id = toy(toy_envs.Moving)
    cli.call(*cli.tiny, "--env-id", env_id, "--run-name", "run", "--total-timesteps", "250")
    result = cli.call("--resume", "runs/run", "--total-timesteps", "300")
    assert steps(cli.folder / "runs/run/eval.csv") == [200, 250, 300]
    play = re.search(r"python (\S+baselines\.py) --evaluate runs/run\n", result.stdout)
    assert (cli.folder / play[1]).resolve() == ROOT / "benchmark/baselines.py"
    cli.call("--evaluate", "runs/run")
    assert steps(cli.folder / "runs/run/evaluate.csv") == [300]
    assert not [path for path in cli.folder.rglob("*.csv") if path.parent != cli.folder / "runs/run"]


# ------------------------------------------------------------------------------------------------------- stop and go on
@pytest.mark.parametrize("seconds, saved", [("300", 0), ("0", 319)])
def test_sigkill_and_resume(cli, seconds, saved):
    """From the last checkpoint, whose later rows come again; a row stands once."""
    with cli.held("cut", "--checkpoint-seconds", seconds, at=320) as (process, cut):
        cli.holding(process)
        err = cli.call("--resume", cut, code=2).stderr
        assert err == f"error: {cut} is in use by another process.\n"
        kill(process)
    before = rows(cut / "eval.csv")
    assert steps(cut / "eval.csv") == [200, 300] and checkpoint(cut)["step"] == saved
    cli.run("--resume", cut)
    after = rows(cut / "eval.csv")
    assert steps(cut / "eval.csv") == [200, 300, 400, 500] and (after[:2] == before if saved else after != before)
    assert steps(cut / "train.csv") == sorted(set(steps(cut / "train.csv"))) and last_step(cut / "train.csv") == 500
    state = checkpoint(cut)
    assert state["step"] == 500 and state["updates"] == 300 and len(state["replay"]["rewards"]) == 500
    assert float(after[-1]["charts/wall_seconds"]) > float(before[-1]["charts/wall_seconds"])


def test_resume_keeps_what_was_learned(cli):
    """Networks, optimisers and replay of a resumed run are those of its checkpoint."""
    for algorithm in ("sac", "td3", "tqc", "mbpo"):
        run_dir = cli.train(algorithm, "--algorithm", algorithm, "--total-timesteps", "250", "--utd", "1")
        before = checkpoint(run_dir)
        cli.call("--resume", run_dir)  # nothing is left to do
        torch.testing.assert_close(checkpoint(run_dir)["parameters"], before["parameters"], rtol=0, atol=0)
        torch.testing.assert_close(checkpoint(run_dir)["replay"], before["replay"], rtol=0, atol=0)
        assert checkpoint(run_dir)["log_ent_coef"] == before["log_ent_coef"] != 0
        result = cli.call("--resume", run_dir, "--total-timesteps", "260", "--seed", "7")
        assert messages(result.stderr) == ["not used: seed; the run keeps what it was saved with"]
        assert steps(run_dir / "eval.csv") == [200, 250, 260]


def test_a_resumed_run_lets_go_of_its_checkpoint(cli):
    """Or else the file that the next one replaces would stay on the disk."""
    import baselines

    run_dir = cli.train("run", "--total-timesteps", "250")
    saved = baselines.load_file(run_dir / "checkpoint.pt", baselines.Args)
    args = baselines.check_args(saved["args"])
    model = baselines.make_model(args, baselines.make_env(args))
    baseline_run.restore(model, saved)
    in_the_file = {tensor.data_ptr() for tensor in tensors_in(saved) if tensor.numel()}
    of_the_model = [*tensors_in(model.get_parameters()), torch.from_numpy(model.replay_buffer.observations)]
    assert len(of_the_model) > 50
    assert not in_the_file & {tensor.data_ptr() for tensor in of_the_model}


def tensors_in(content) -> list[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        return [content]
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP))]
)
def test_signals_write_a_checkpoint(cli, number):
    with cli.held("cut", at=260) as (process, cut):
        cli.holding(process)
        process.send_signal(number)
        cli.release()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    match = re.search(r"stopped at step 260; go on with: python (\S+baselines\.py --resume runs/cut)", err)
    assert match and checkpoint(cut)["step"] == 260 and "Traceback" not in err
    cli.run(*match[1].split()[1:])
    assert steps(cut / "eval.csv") == [200, 300, 400, 500]


# ----------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--env-id", "Unknown-v0"), "cannot make the environment 'Unknown-v0'"),
        (("--env-id", "toy_envs:DiscreteAction-v0"), "only a continuous, bounded Box is supported"),
        (("--total-timesteps", "100"), "total_timesteps is 100; it must be at least learning_starts and batch_size, 200."),
        (("--buffer-size", "199"), "buffer_size is 199; it must be at least"),
        (("--seed", "-1"), "seed is -1; it must be greater than or equal to 0"),
        (("--eval-frequency", "0"), "eval_frequency is 0; it must be greater than 0"),
        (("--run-name", "../run"), "run_name is '../run'; it must be a plain folder name"),
        (("--cuda", "True"), "cuda was asked for, but PyTorch finds no CUDA device here"),
        (("--resume", "nothing"), "nothing/checkpoint.pt does not exist; give the directory of a run"),
        (("--evaluate", "nothing"), "nothing/checkpoint.pt does not exist; give the directory of a run"),
        (("--evaluate", "a", "--resume", "b"), "choose one of them"),
    ],
)
def test_wrong_arguments(cli, monkeypatch, arguments, sentence):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = cli.call(*cli.tiny, *arguments, code=2)
    assert result.stdout == "" and result.stderr.startswith("error: ") and sentence in result.stderr
    assert result.stderr.count("\n") == 1 and list(cli.folder.iterdir()) == []


def test_wrong_command_line(cli):
    result = cli.run("--algorithm", "ppo", code=2)
    assert "sac" in result.stdout + result.stderr and "Traceback" not in result.stderr


def test_directories_of_others(cli, monkeypatch, capsys):
    own = cli.train("own", "--total-timesteps", "200")
    assert "own exists already; go on with --resume runs/own" in cli.call(*cli.tiny, "--run-name", "own", code=2).stderr
    other = CommandLine(cli.folder, "rac_sac", monkeypatch, capsys).train("other", "--total-timesteps", "200")
    sentence = "checkpoint.pt is a file of rac_sac.py; baselines.py goes on with its own runs only.\n"
    assert cli.call("--resume", other, code=2).stderr == f"error: {other}/{sentence}"
    theirs = CommandLine(cli.folder, "rac_sac", monkeypatch, capsys).call("--resume", own, code=2).stderr
    assert "was written by baselines.py; use that script instead of rac_sac.py" in theirs
    assert "does not exist; give the directory of a run" in cli.call("--evaluate", own / "checkpoint.pt", code=2).stderr
    sentence = "checkpoint.pt is damaged or not a file of baselines.py.\n"
    whole = (own / "checkpoint.pt").read_bytes()
    rewards = checkpoint(own)["replay"]["rewards"].numpy().tobytes()
    assert whole.count(rewards) == 1
    for damaged in (whole[:1000], whole.replace(rewards, bytes(reversed(rewards)))):
        (own / "checkpoint.pt").write_bytes(damaged)
        assert cli.call("--evaluate", own, code=2).stderr == f"error: {own}/{sentence}"


def test_training_that_cannot_go_on(cli):
    result = cli.call(*cli.tiny, "--env-id", "toy_envs:InfLoss-v0", "--run-name", "run", code=1)
    (line,) = messages(result.stderr)
    stopped = r"error: stopped at step \d+: losses/\w+ became non-finite; "
    assert re.fullmatch(stopped + r"the last checkpoint is of step 0; go on with: python \S+ --resume runs/run", line)


def test_an_environment_that_raises(cli):
    """With its traceback, and the line that goes on from the last checkpoint."""
    with cli.held("run", "--checkpoint-seconds", "0", at=220) as (process, run_dir):
        cli.holding(process)
    cli.env.update(FAIL_AT="20")
    result = cli.run("--resume", run_dir, code=1)
    assert "the simulator is unstable" in result.stderr
    match = re.search(
        r"stopped at step (\d+) by the error below; the last checkpoint is of step (\d+); go on with: (.*)", result.stderr
    )
    assert int(match[1]) - int(match[2]) <= 1
    assert match[3].endswith("runs/run")
    del cli.env["FAIL_AT"]
    cli.run("--resume", run_dir)
    assert last_step(run_dir / "train.csv") == 500


def test_what_mbpo_writes(cli):
    """The model's error, rollout length and seconds; one sentence where nobody knows when an episode of the model ends."""
    run_dir = cli.train("run", "--algorithm", "mbpo", "--total-timesteps", "210", "--utd", "1", env_id="InvertedPendulum-v4")
    last = rows(run_dir / "train.csv")[-1]
    assert 0 < float(last["model/holdout_error"]) < 1
    assert last["model/rollout_length"] == "1"
    assert float(last["model/train_seconds"]) > 0
    assert "ensemble_optimizer" in checkpoint(run_dir)["parameters"]
    result = cli.call(*cli.tiny, "--algorithm", "mbpo", "--env-id", "Pendulum-v1", code=2)
    assert "termination is Pendulum; mbpo must know when an episode ends: give one of Hopper, " in result.stderr
    cli.call(*cli.tiny, "--algorithm", "mbpo", "--env-id", "Pendulum-v1", "--termination", "never", "--total-timesteps", "200")
    result = cli.call(*cli.tiny, "--algorithm", "mbpo", "--env-id", "toy_envs:Hopper-v0", code=2)
    assert "termination is toy_envs:Hopper-v0; mbpo must know when an episode ends: " in result.stderr
    result = cli.call(*cli.tiny, "--algorithm", "mbpo", "--learning-starts", "4", code=2)
    assert "learning_starts is 4; for mbpo it must be at least 5." in result.stderr


def test_the_code_that_is_tracked_is_its_own(cli, monkeypatch):
    kept = []

    class Wandb:
        Settings = dict
        url = None

        def login(self, **options):
            return True

        def init(self, **options):
            return self

        def define_metric(self, *arguments, **options):
            pass

        def log_code(self, root):
            kept.extend(path.name for path in Path(root).iterdir())

        def log(self, row):
            pass

        def finish(self, exit_code):
            pass

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    monkeypatch.setenv("WANDB_MODE", "online")
    cli.call(*cli.tiny, "--total-timesteps", "200", "--run-name", "run", "--track")
    assert sorted(kept) == ["baseline_run.py", "baselines.py", "mbpo.py"]


def test_offline_tracking(cli):
    err = cli.run(*cli.tiny, "--total-timesteps", "210", "--run-name", "run", "--track").stderr
    (line,) = messages(err)
    assert "offline (no API key)" in line and "wandb sync" in line
    (path,) = (cli.folder / "runs/run/wandb").glob("offline-run-*/*.wandb")
    assert b"eval/best_return" in path.read_bytes() and b"losses/qf_loss" in path.read_bytes()


# ------------------------------------------------------------------------------------------------------ grid and report
def test_report_has_a_column(cli, monkeypatch, capsys):
    """A baseline stands beside the scripts and in place of the paper's value alone."""
    cli.train("Hopper-v4__sac__1", "--total-timesteps", "300")
    CommandLine(cli.folder, "rac_sac", monkeypatch, capsys).train("Hopper-v4__rac_sac__1", "--total-timesteps", "300")
    command = [sys.executable, str(ROOT / "benchmark/report.py"), "runs", "--out", "out", "--bootstrap", "50"]
    result = subprocess.run(command, cwd=cli.folder, env=environment(HOME=str(cli.folder)), capture_output=True, text=True)
    assert result.returncode == 0 and "mixed up" not in result.stderr, result.stderr
    text = (cli.folder / "out/report.md").read_text()
    value = float(rows(cli.folder / "runs/Hopper-v4__sac__1/eval.csv")[-1]["eval/best_return"])
    shown = f"{value:,.{0 if abs(value) >= 10 else 1}f}"
    assert re.search(rf"\| Hopper-v4 +\| SAC .*\| +1 \| +300 \| +{shown} \| +2,815 ± 585 † \|", text)
    assert "SAC (paper only)" not in text.replace("RAC-SAC", "") and "TD3 (paper only)" in text


@pytest.mark.slow
def test_the_grid_runs_all_baselines(cli):
    pytest.importorskip("ray", reason="benchmark/requirements.txt is not installed")
    names = ("smoke_sac", "smoke_td3", "smoke_tqc", "smoke_tqc20")
    command = [
        sys.executable,
        str(ROOT / "benchmark/run.py"),
        "--experiment",
        "smoke",
        "--env-ids",
        "InvertedPendulum-v4",
        "--seeds",
        "1",
        "--variants",
        *names,
        "--total-timesteps",
        "300",
        "--",
        "--capture-video",
    ]
    for said in ("done 4", "4 of 4 runs are finished already"):  # what says how a run is done is for the scripts that have it
        result = subprocess.run(command, cwd=cli.folder, env=environment(HOME=str(cli.folder)), capture_output=True, text=True)
        assert result.returncode == 0 and said in result.stdout, result.stdout + result.stderr
    for name in names:
        run_dir = cli.folder / f"runs/InvertedPendulum-v4__{name}__1"
        assert steps(run_dir / "eval.csv") == [200, 300] and steps(run_dir / "evaluate.csv") == [300]
