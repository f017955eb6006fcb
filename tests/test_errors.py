"""A user's mistake is one sentence and exit code 2, and nothing is written; numbers that are not finite never reach a file."""

import re

import pytest
import torch
from conftest import ROOT
from test_resume import brief, call, checkpoint_of, whole

WRONG = (
    ("--env-id Hoper-v4", r"'Hoper-v4'.*Hopper"),
    ("--env-id Ant-v9", r"'Ant-v9'.*v5"),
    ("--env-id no_such_module:Ant-v5", r"no_such_module"),
    ("--env-id toy_envs:DiscreteAction-v0", r"Discrete\(3\); only a continuous, bounded Box"),
    ("--env-id toy_envs:Unbounded-v0", r"only a continuous, bounded Box"),
    ("--env-id toy_envs:Graph-v0", r"'toy_envs:Graph-v0': .*Graph"),
    ("--utd 0", r"utd is 0; it must be at least 1"),
    ("--num-critics 1", r"num_critics is 1; it must be at least 2"),
    ("--gamma 1.5", r"gamma is 1.5; it must be above 0 and at most 1"),
    ("--tau nan", r"tau is nan; "),
    ("--seed -1", r"seed is -1; "),
    ("--weight-decay -1", r"weight_decay is -1.0; it must be at least 0"),
    ("--beta-min 0.5", r"beta_min is 0.5; .*explore_beta_max"),
    ("--explore-beta-max 0.9", r"explore_beta_max is 0.9; .*train_beta_max"),
    ("--num-eval-policies 0", r"num_eval_policies is 0; "),
    ("--buffer-size 10000000000000", r"buffer_size is 10000000000000; .* do not fit on cpu"),
    ("--cuda True", r"cuda is True; .*no CUDA device"),
    ("--eval-workers -1", r"eval_workers is -1; it must be at least 0"),
    ("--run-root /dev/null", r"no run directory can be made: .*Not a directory: .*/dev/null"),
    ("--track --wandb-project-name a/b", r"Weights & Biases cannot track this run: UsageError.*Invalid project name 'a/b'"),
    ("--resume nowhere", r"nowhere/checkpoint.pt cannot be read: .*No such file"),
    (f"--resume {ROOT}/policies/Ant-v4.pt", r"Ant-v4.pt/checkpoint.pt cannot be read"),
    ("--evaluate nowhere", r"nowhere cannot be read: .*No such file"),
)
OF_OTHERS = (
    ("rac_td3.py", "--explore-beta-max 0.9", r"explore_beta_max is 0.9; .*train_beta_max"),
    ("rac_td3.py", f"--evaluate {ROOT}/policies/Hopper-v4.pt", r"Hopper-v4.pt was written by rac_sac.py; use that script"),
    ("vanilla_rac.py", "--beta -0.1", r"beta is -0.1; "),
    ("vanilla_rac.py", "--min-size 4", r"min_size is 4.0; .*num_critics"),
    ("rac_itm.py", "--train-k-max 3.5", r"train_k_max is 3.5; .*num_critics"),
    ("rac_itm.py", "--explore-k-max 2.5", r"explore_k_max is 2.5; .*train_k_max"),
)
CALLS = (*(("rac_sac.py", *wrong) for wrong in WRONG), *OF_OTHERS)


@pytest.mark.parametrize("cli, arguments, sentence", CALLS, indirect=["cli"])
def test_wrong_calls(cli, arguments, sentence):
    cli.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, err = cli.call(*cli.tiny, *arguments.split(), code=2)
    assert re.fullmatch(rf"error: [^\n]*{sentence}[^\n]*\n", err)
    assert list(cli.folder.glob("runs/*")) == []


def test_a_run_that_exists_already(cli):
    path = brief(cli, "run", "--total-timesteps", "1") / "checkpoint.pt"
    before = path.read_bytes()
    _, err = cli.call(*cli.tiny, "--run-name", "run", code=2)
    assert re.fullmatch(rf"error: no run directory can be made: .*File exists: '{cli.folder}/runs/run'\n", err)
    assert path.read_bytes() == before


def test_files_that_cannot_be_read(cli):
    """Empty, of something else, cut, or one in place of the other."""
    run_dir = whole(cli)
    checkpoint, policy = ((run_dir / name).read_bytes() for name in ("checkpoint.pt", "policy.pt"))
    for option, name, good, other in (
        ("--resume", "checkpoint.pt", checkpoint, policy),
        ("--evaluate", "policy.pt", policy, checkpoint),
    ):
        for content in (b"", b"hello", good[: len(good) // 2], other):
            (run_dir / name).write_bytes(content)
            _, err = cli.call(option, run_dir, code=2)
            assert re.fullmatch(f"error: {run_dir / name} cannot be read: [^\n]+\n", err)


UNFIT = {
    "HugeReward": r"not finite any more: .*(qf_loss|critic)",
    "NanReward": r"not finite in float32: the environment's reward, nan, or an observation",
    "NanObs": r"not finite in float32: the environment's reward, [\d.-]+, or an observation",
    "Terminated2": r"the environment returned terminated 2",
    "OddObs": r"the environment returned an observation of 3 numbers; its space has 2",
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("seconds", [0, 300])
def test_what_training_cannot_go_on_with(cli, name, seconds):
    """From step 30 on: one sentence naming it; the checkpoint before it stays, and has finite numbers only."""
    _, err = call(cli, "run", "--learning-starts", "20", "--checkpoint-seconds", seconds, env_id=f"toy_envs:{name}-v0", code=1)
    assert re.search(rf"^error: {UNFIT[name]}", err, re.M)
    saved = checkpoint_of(cli.folder / "runs/run")
    assert saved["progress"]["step"] >= (0 if seconds else 29)
    assert all(tensor.isfinite().all() for tensor in [saved["replay"], *saved["learner"]["agent"].values()])
