"""benchmark/baselines.py as users meet it: runs of each algorithm, kill and resume, evaluation, settings, mistakes."""

import itertools
import re
import signal
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, last_step, processes_made, processes_running, signal_handlers_put_back, wait_until
from toy_envs import EVALUATION, FRESH_EPISODES, Point, first_seed

sys.path.insert(0, str(ROOT / "benchmark"))
import baselines

pytestmark = pytest.mark.benchmark
TINY = """
--env-id InvertedPendulum-v4 --run-name run --cuda False --total-timesteps 210 --learning-starts 200 --batch-size 32
--hidden-dim 8 --buffer-size 205 --eval-frequency 10 --eval-episodes 2
""".split()
RUN = Path("runs/run")
BEGINNINGS = {
    "config.json": '{\n  "script": "baselines",\n  "args": {\n    "algorithm": "',
    "eval.csv": "global_step,charts/wall_seconds,eval/best_return,eval/best_return_std\n200,",
    "train.csv": "global_step,charts/wall_seconds,charts/SPS,losses/qf_loss,losses/actor_loss,losses/alpha,"
    "model/holdout_error,model/rollout_length,charts/episodic_return,charts/episodic_length\n",
    "evaluate.csv": "global_step,return,return_std,best_in_training\n215,",
}


@pytest.fixture
def run_baselines(tmp_path, monkeypatch):
    """The command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["baselines.py", *map(str, words)])
        baselines.main()

    with signal_handlers_put_back():
        yield run


def column(file, name="global_step"):
    return pd.read_csv(RUN / file)[name].tolist()


def checkpoint(algorithm):
    return baselines.load(RUN / "checkpoint.pt", baselines.make_model(baselines.Args(algorithm, env_id="InvertedPendulum-v4")))


@pytest.mark.parametrize(
    "algorithm, utd, empty_columns", [("sac", 1, 2), ("td3", 1, 3), ("tqc", 1, 2), ("tqc20", 20, 2), ("mbpo", 20, 0)]
)
def test_run(run_baselines, monkeypatch, algorithm, utd, empty_columns):
    """A run, more steps, fresh episodes: the files, the number of updates, the replay, where it has wrapped round as well."""
    monkeypatch.setattr("mbpo.PATIENCE", 0)  # epochs of the model without improvement; test_mbpo.py trains it to the end
    monkeypatch.setattr("mbpo.ROLLOUTS", 1000)
    run_baselines(*TINY, "--algorithm", algorithm)
    first = checkpoint(algorithm)
    run_baselines("--resume", RUN, "--total-timesteps", 215)
    run_baselines("--evaluate", RUN)
    for name, beginning in BEGINNINGS.items():
        assert (RUN / name).read_text().startswith(beginning)
    assert column("eval.csv") == [200, 210, 215]
    assert pd.read_csv(RUN / "train.csv").isna().all().sum() == empty_columns  # an algorithm has no temperature, or no model
    last = checkpoint(algorithm)
    assert last._n_updates == 15 * utd
    changed = (first.replay_buffer.observations != last.replay_buffer.observations).any((1, 2))
    assert np.flatnonzero(changed).tolist() == [5, 6, 7, 8, 9]


def test_no_bar_and_the_clock_set_back(run_baselines, monkeypatch):
    """Seconds, speed and checkpoints do not depend on either."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    clock = itertools.count(2e9, -100)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    run_baselines(*TINY, "--checkpoint-seconds", 0)
    assert min(column("train.csv", "charts/wall_seconds")) >= 0
    assert min(column("train.csv", "charts/SPS")) > 0
    assert checkpoint("sac").num_timesteps == 210


def test_weights_and_biases(run_baselines, capsys, monkeypatch):
    """Two runs of one name are two; resuming finds its own; what is refused is one sentence, and leaves no directory."""
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run_baselines(*TINY, "--track")
    run_baselines("--resume", RUN, "--total-timesteps", 215)
    run_baselines(*TINY, "--track", "--run-root", "other")
    first, second, other = (init_call.kwargs["id"] for init_call in wandb.init.call_args_list)
    assert first == second != other
    wandb.init.side_effect = RuntimeError("no key")
    with pytest.raises(SystemExit, match="2"):
        run_baselines(*TINY, "--track", "--run-root", "third")
    assert "error: Weights & Biases cannot track this run: RuntimeError('no key')\n" in capsys.readouterr().err
    assert list(Path("third").iterdir()) == []


def test_initial_states(run_baselines):
    """Episodes of one step, which is rewarded with what the reset has drawn from its seed."""
    run_baselines(*TINY, "--env-id", "toy_envs:ReturnsItsStart-v0", "--seed", 3)
    run_baselines("--evaluate", RUN)
    for purpose, file, name in (
        (EVALUATION, "eval.csv", "eval/best_return"),
        (FRESH_EPISODES, "evaluate.csv", "return"),
    ):
        seed = first_seed(purpose, 3)
        drawn = [np.random.default_rng(seed + episode).random() for episode in range(2)]
        assert np.array(column(file, name)) == pytest.approx(np.mean(drawn), rel=1e-5)


def test_an_environment_that_ends_the_program(run_baselines, monkeypatch):
    """Is an error; however a run ends, its environments are closed."""
    monkeypatch.setattr(Point, "events", {3: sys.exit})
    with pytest.raises(SystemExit, match=r"^error: the environment ended the program, by sys.exit\(None\);.*--resume /.*/run$"):
        run_baselines(*TINY, "--env-id", "toy_envs:Program-v0")
    run_baselines("--resume", RUN)
    run_baselines("--evaluate", RUN)
    assert len(processes_made(Path())) == 3 * (1 + 2)  # the run, resumed, --evaluate: one trains, two evaluate
    assert processes_running(Path()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, seconds, saves", [(signal.SIGKILL, "0", 1), (signal.SIGKILL, "300", 0), (signal.SIGTERM, "300", 1)]
)
def test_killed_and_resumed(run_baselines, number, seconds, saves):
    """From the last checkpoint, which may be that before the first step. Each row stands once."""
    options = (*TINY, "--total-timesteps", "100000", "--checkpoint-seconds", seconds)
    process = subprocess.Popen([sys.executable, ROOT / "benchmark/baselines.py", *options])
    wait_until(lambda: last_step(RUN / "eval.csv") >= 220)
    process.send_signal(number)
    assert process.wait() in (-9, 143)
    assert (checkpoint("sac").num_timesteps > 0) == saves
    last = column("eval.csv")[-1] + 25
    run_baselines("--resume", RUN, "--total-timesteps", last)
    run_baselines("--evaluate", RUN)
    assert column("eval.csv") == [*range(200, last, 10), last]
    assert column("evaluate.csv") == [last]


@pytest.mark.parametrize(
    "algorithm, env_id, name, printed",
    [
        ("sac", "Hopper-v4", "policy.net_arch", "[256, 256]"),
        ("sac", "Hopper-v4", "target_entropy", "-3.0"),
        ("td3", "Hopper-v4", "action_noise", "NormalActionNoise(mu=[0. 0. 0.], sigma=[0.1 0.1 0.1])"),
        ("tqc", "Hopper-v4", "policy.net_arch", "{'pi': [256, 256], 'qf': [512, 512, 512]}"),
        ("tqc", "Hopper-v4", "critic.quantiles_total", "125"),
        ("tqc", "Hopper-v4", "top_quantiles_to_drop_per_net", "5"),
        ("tqc", "HalfCheetah-v4", "top_quantiles_to_drop_per_net", "0"),
        ("tqc", "Walker2d-v4", "top_quantiles_to_drop_per_net", "2"),
        ("mbpo", "Ant-v5", "observation_space.shape", "(27,)"),
        ("mbpo", "Humanoid-v4", "observation_space.shape", "(45,)"),
    ],
)
def test_settings_are_those_of_the_papers(algorithm, env_id, name, printed):
    model = baselines.make_model(baselines.Args(algorithm, env_id=env_id))
    assert str(attrgetter(name)(model)) == printed


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--env-id Unknown-v0", "Environment `Unknown` doesn't exist."),
        ("--env-id toy_envs:DiscreteAction-v0", "Discrete.3. was provided"),
        ("--algorithm mbpo --env-id Pendulum-v1", "mbpo does not know when an episode of Pendulum-v1 ends, only that of Hopper,"),
        ("--run-root . --run-name other", "/other exists already; go on with --resume /.*/other"),
        ("--resume other", "other is no run of baselines.py"),
        ("--resume nothing", "nothing/config.json"),
    ],
)
def test_mistakes(run_baselines, capsys, words, sentence):
    Path("other").mkdir()
    Path("other/config.json").write_text('{"script": "rac_sac"}')
    with pytest.raises(SystemExit, match="2"):
        run_baselines(*TINY, *words.split())
    assert re.fullmatch(f"error: .*{sentence}.*\n", capsys.readouterr().err)
    assert not RUN.exists()
