"""A user's mistake is one sentence and exit code 2, and nothing is written; numbers that are not finite never reach a file."""

import re

import pytest
import torch
from conftest import ROOT, of_the_four
from tiny_runs import checkpoint_of, whole_run

WRONG = (
    ("rac_sac.py", "--env-id Hoper-v4", r"'Hoper-v4'.*Hopper"),
    ("rac_sac.py", "--env-id Ant-v9", r"'Ant-v9'.*v5"),
    ("rac_sac.py", "--env-id no_such_module:Ant-v5", r"no_such_module"),
    ("rac_sac.py", "--env-id toy_envs:DiscreteAction-v0", r"Discrete\(3\); only a continuous, bounded Box"),
    ("rac_sac.py", "--env-id toy_envs:Unbounded-v0", r"only a continuous, bounded Box"),
    ("rac_sac.py", "--env-id toy_envs:Graph-v0", r"'toy_envs:Graph-v0': .*Graph"),
    ("rac_sac.py", "--utd 0", r"utd is 0; it must be at least 1"),
    ("rac_sac.py", "--num-critics 1", r"num_critics is 1; it must be at least 2"),
    ("rac_sac.py", "--gamma 1.5", r"gamma is 1.5; it must be above 0 and at most 1"),
    ("rac_sac.py", "--tau nan", r"tau is nan; "),
    ("rac_sac.py", "--seed -1", r"seed is -1; "),
    ("rac_sac.py", "--weight-decay -1", r"weight_decay is -1.0; it must be at least 0"),
    ("rac_sac.py", "--beta-min 0.5", r"beta_min is 0.5; .*explore_beta_max"),
    ("rac_sac.py", "--explore-beta-max 0.9", r"explore_beta_max is 0.9; .*train_beta_max"),
    ("rac_sac.py", "--num-eval-policies 0", r"num_eval_policies is 0; "),
    ("rac_sac.py", "--buffer-size 10000000000000", r"buffer_size is 10000000000000; .* do not fit on cpu"),
    ("rac_sac.py", "--cuda True", r"cuda is True; .*no CUDA device"),
    ("rac_sac.py", "--eval-workers -1", r"eval_workers is -1; it must be at least 0"),
    ("rac_sac.py", "--run-root /dev/null", r"no run directory can be made: .*Not a directory: .*/dev/null"),
    (
        "rac_sac.py",
        "--track --wandb-project-name a/b",
        r"Weights & Biases cannot track this run: UsageError.*Invalid project name 'a/b'",
    ),
    ("rac_sac.py", "--resume nowhere", r"nowhere/checkpoint.pt cannot be read: .*No such file"),
    ("rac_sac.py", f"--resume {ROOT}/policies/Ant-v4.pt", r"Ant-v4.pt/checkpoint.pt cannot be read"),
    ("rac_sac.py", "--evaluate nowhere", r"nowhere cannot be read: .*No such file"),
    ("rac_td3.py", "--explore-beta-max 0.9", r"explore_beta_max is 0.9; .*train_beta_max"),
    ("rac_td3.py", f"--evaluate {ROOT}/policies/Hopper-v4.pt", r"Hopper-v4.pt was written by rac_sac.py; use that script"),
    ("vanilla_rac.py", "--beta -0.1", r"beta is -0.1; "),
    ("vanilla_rac.py", "--min-size 4", r"min_size is 4.0; .*num_critics"),
    ("rac_itm.py", "--train-k-max 3.5", r"train_k_max is 3.5; .*num_critics"),
    ("rac_itm.py", "--explore-k-max 2.5", r"explore_k_max is 2.5; .*train_k_max"),
)


@of_the_four
@pytest.mark.parametrize("cli, arguments, sentence", WRONG, indirect=["cli"])
def test_wrong_calls(cli, arguments, sentence):
    cli.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, err = cli.call(*cli.tiny, *arguments.split(), code=2)
    assert re.fullmatch(rf"error: [^\n]*{sentence}[^\n]*\n", err)
    assert list(cli.folder.glob("runs/*")) == []


def test_a_run_that_exists_already(cli):
    path = cli.train("run", "--total-timesteps", "1") / "checkpoint.pt"
    before = path.read_bytes()
    _, err = cli.call(*cli.tiny, "--run-name", "run", code=2)
    assert re.fullmatch(rf"error: no run directory can be made: .*File exists: '{cli.folder}/runs/run'\n", err)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "option, name, other", [("--resume", "checkpoint.pt", "policy.pt"), ("--evaluate", "policy.pt", "checkpoint.pt")]
)
def test_files_that_cannot_be_read(cli, option, name, other):
    """Empty, of something else, cut, or one in place of the other."""
    run_dir = whole_run(cli)
    path = run_dir / name
    half = path.read_bytes()[: path.stat().st_size // 2]
    for content in (b"", b"hello", half, (run_dir / other).read_bytes()):
        path.write_bytes(content)
        _, err = cli.call(option, run_dir, code=2)
        assert re.fullmatch(f"error: {path} cannot be read: [^\n]+\n", err)


UNFIT = {
    "HugeReward": r"not finite any more: .*(qf_loss|critic)",
    "NanReward": r"not finite in float32: the environment's reward, nan, or an observation",
    "NanObs": r"not finite in float32: the environment's reward, [\d.-]+, or an observation",
    "Terminated2": r"the environment returned terminated 2",
    "OddObs": r"the environment returned an observation of 3 numbers; its space has 2",
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("seconds, saved_at", [("0", range(14, 18)), ("300", [0])])
def test_what_training_cannot_go_on_with(cli, name, seconds, saved_at):
    """From step 15 on: one sentence naming it; the checkpoint before it stays, and has finite numbers only."""
    options = ("--learning-starts", "10", "--checkpoint-seconds", seconds)
    _, err = cli.call(*cli.tiny_run("run", *options, env_id=f"toy_envs:{name}-v0"), code=1)
    assert re.search(rf"^error: {UNFIT[name]}", err, re.M)
    saved = checkpoint_of(cli.folder / "runs/run")
    assert saved["progress"]["step"] in saved_at
    assert all(tensor.isfinite().all() for tensor in [saved["replay"], *saved["learner"]["agent"].values()])
