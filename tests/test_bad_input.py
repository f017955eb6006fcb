"""A mistake is answered by one clear sentence and exit code 2, and nothing is written or lost."""

import re
import resource

import pytest
import torch
from conftest import kill, messages, slow_but, wait_until, without_wall_clock

import rac_sac

WRONG = [
    (["--env-id", "Hoper-v4"], r"cannot make the environment 'Hoper-v4'.*Hopper"),
    (["--env-id", "Ant-v9"], r"cannot make the environment 'Ant-v9'.*v5"),
    (["--env-id", "toy_envs:DiscreteAction-v0"], r"actions of type Discrete\(3\); only a continuous, bounded Box is supported"),
    (["--env-id", "toy_envs:UnboundedAction-v0"], r"actions of type Box.*only a continuous, bounded Box is supported"),
    (["--num-critics", "1"], r"num_critics is 1; it must be greater than or equal to 2"),
    (["--utd", "0"], r"utd is 0; it must be greater than 0"),
    (["--batch-size", "0"], r"batch_size is 0; it must be greater than 0"),
    (["--num-eval-policies", "0"], r"num_eval_policies is 0; it must be greater than 0"),
    (["--eval-episodes", "0"], r"eval_episodes is 0; it must be greater than 0"),
    (["--eval-workers", "-1"], r"eval_workers is -1; it must be greater than or equal to 0"),
    (["--gamma", "1.5"], r"gamma is 1.5; it must be less than or equal to 1"),
    (["--gamma", "nan"], r"gamma is nan; it must be a finite number"),
    (["--tau", "-0.1"], r"tau is -0.1; it must be greater than 0"),
    (["--buffer-size", "150"], r"buffer_size is 150; it must be at least 200"),
    (["--total-timesteps", "150"], r"total_timesteps is 150; it must be at least 200"),
    (["--batch-size", "1000"], r"buffer_size is 500; it must be at least 1000"),
    (["--explore-beta-max", "0.9"], r"explore_beta_max is 0.9; it must not exceed train_beta_max, 0.8"),
    (["--train-beta-max", "-1"], r"train_beta_max is -1.0; it must be greater than or equal to 0.0000001"),
    (["--train-beta-max", "inf"], r"train_beta_max is inf; it must be a finite number"),
    (["--eval-beta-max", "nan"], r"eval_beta_max is nan; it must be a finite number"),
    (["--q-lr-warmup-end", "100"], r"q_lr_warmup_end is 100; it must be at least learning_starts, 200, unless"),
    (["--bias-frequency", "150"], r"bias_frequency is 150; it must be a multiple of eval_frequency, 100"),
    (["--run-root", "/dev/null/runs"], r"/dev/null/runs/\S+ cannot be written: Not a directory"),
    (["--run-name", "a" * 300], r"run_name is 'a+'; it must be a plain folder name of at most 200 characters"),
    (["--seed", "-1"], r"seed is -1; it must be greater than or equal to 0"),
    (["--run-name", "a/b"], r"run_name is 'a/b'; it must be a plain folder name"),
    (["--run-name", ".."], r"run_name is '..'; it must be a plain folder name"),
    (["--buffer-size", "1000000000000"], r"a replay of \d+\.\d GiB \(buffer_size 1000000000000\) does not fit on cpu; choose"),
    (["--resume", "nowhere"], r"nowhere/checkpoint.pt does not exist; give the directory of a run"),
    (["--evaluate", "nowhere"], r"nowhere/checkpoint.pt does not exist"),
    (["--evaluate", ""], r"checkpoint.pt does not exist; give the directory of a run"),
    (["--resume", ""], r"checkpoint.pt does not exist; give the directory of a run"),
    (["--evaluate", "nowhere", "--resume", "nowhere"], r"evaluate and resume were both given; choose one of them"),
    (["--no-autotune", "--alpha", "-1"], r"alpha is -1.0; it must be greater than or equal to 0"),
]  # fmt: skip


def check_wrong_arguments(cli, run, arguments, sentence):
    result = run("--env-id", "Hopper-v4", *cli.tiny, *arguments, code=2)
    (line,) = messages(result.stderr)
    assert re.search(sentence, line) and line.startswith("error: ") and result.stdout == ""
    assert list(cli.folder.iterdir()) == []


@pytest.mark.parametrize("arguments,sentence", WRONG, ids=[" ".join(a)[:40] for a, _ in WRONG])
def test_wrong_arguments(cli, arguments, sentence):
    check_wrong_arguments(cli, cli.call, arguments, sentence)


KINDS = ("--env-id Hoper-v4", "--utd 0", "--explore-beta-max 0.9", "--run-root /dev/null/runs", "--resume nowhere",
         "--evaluate nowhere")  # fmt: skip


@pytest.mark.parametrize("given", KINDS)
def test_wrong_command_lines(cli, given):
    """One wrong call of each kind as a user makes it: the environment, a value, two values, a folder, a run that is not there."""
    (sentence,) = [sentence for arguments, sentence in WRONG if " ".join(arguments) == given]
    check_wrong_arguments(cli, cli.run, given.split(), sentence)


OF_OTHERS = [
    ("rac_td3", ["--policy-noise", "-1"], r"policy_noise is -1.0; it must be greater than or equal to 0"),
    ("rac_td3", ["--noise-clip", "nan"], r"noise_clip is nan; it must be a finite number"),
    ("rac_td3", ["--explore-beta-max", "0.9"], r"explore_beta_max is 0.9; it must not exceed train_beta_max, 0.8"),
    ("vanilla_rac", ["--beta", "-0.1"], r"beta is -0.1; it must be greater than or equal to 0"),
    ("vanilla_rac", ["--target-rule", "in-target-min", "--min-size", "4"], r"min_size is 4.0; it must be between 1 and"),
    ("vanilla_rac", ["--num-critics", "1"], r"num_critics is 1; it must be greater than or equal to 2"),
    ("rac_itm", ["--train-k-max", "3.5"], r"train_k_max is 3.5; it must be between 1 and num_critics, 3"),
    ("rac_itm", ["--explore-k-max", "2.5"], r"explore_k_max is 2.5; it must not exceed train_k_max, 2.0"),
    ("vanilla_rac", ["--min-size", "nan"], r"min_size is nan; it must be a finite number"),
    ("rac_itm", ["--eval-k-max", "1"], r"eval_k_max is 1.0; it must be above 1"),
    ("rac_itm", ["--eval-k-max", "0.5"], r"eval_k_max is 0.5; it must be greater than or equal to 1"),
    ("rac_itm", ["--utd", "0"], r"utd is 0; it must be greater than 0"),
]  # fmt: skip


@pytest.mark.parametrize("cli,arguments,sentence", OF_OTHERS, indirect=["cli"], ids=[" ".join(a) for _, a, _ in OF_OTHERS])
def test_wrong_arguments_of_others(cli, arguments, sentence):
    check_wrong_arguments(cli, cli.call, arguments, sentence)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_where_there_is_none(cli):
    error = cli.call(*cli.tiny, "--cuda", "True", code=2).stderr
    assert error == "error: cuda was asked for, but PyTorch finds no CUDA device here.\n"
    assert list(cli.folder.iterdir()) == []


def test_tyro_answers_what_is_not_an_argument(cli):
    assert "--utdd" in cli.run("--utdd", "3", code=2).stderr


@slow_but("rac_sac")
def test_damaged_and_foreign_checkpoints(cli):
    run_dir = cli.train("run", "--total-timesteps", "250")
    path, config = run_dir / "checkpoint.pt", run_dir / "config.json"
    good, good_config = path.read_bytes(), config.read_text()
    checkpoint = torch.load(path, weights_only=True)

    def refused(sentence, *arguments):
        before = {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}
        for option in arguments or ("--resume", "--evaluate"):
            result = cli.call(option, run_dir, code=2)
            assert re.search(sentence, result.stderr) and "Traceback" not in result.stderr, result.stderr
        assert before == {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}

    path.write_bytes(good[: len(good) // 2])
    refused(f"checkpoint.pt is damaged or not a file of {cli.name}.py")
    path.write_bytes(b"hello")
    refused(f"checkpoint.pt is damaged or not a file of {cli.name}.py", "--resume")
    torch.save({**checkpoint, "script": "rac_other"}, path)
    refused("was written by rac_other.py; use that script", "--evaluate")
    torch.save({**checkpoint, "format": None}, path)
    refused(f"was written by an older version of {cli.name}.py, whose runs this one cannot read")
    torch.save({**checkpoint, "args": {**checkpoint["args"], "noise_scale": 1.0}}, path)
    refused(f"has arguments that this {cli.name}.py does not have: noise_scale")
    torch.save({**checkpoint, "args": {**checkpoint["args"], "env_id": "Ant-v4"}}, path)
    refused("does not have the shapes that its arguments and Ant-v4 give", "--resume")
    torch.save({**checkpoint, "args": {**checkpoint["args"], "hidden_dim": 9}}, path)
    refused("does not have the shapes", "--resume", "--evaluate")
    torch.save({**checkpoint, "tensors": {**checkpoint["tensors"], "critic.0.weight": torch.zeros(3)}}, path)
    refused("does not have the shapes", "--resume")
    torch.save({**checkpoint, "device": "cuda", "state": {**checkpoint["state"], "step": 240}}, path)
    refused("was trained on cuda; it cannot go on exactly on cpu", "--resume")
    path.write_bytes(good)
    config.write_text("{")  # for information only
    cli.call("--resume", run_dir)
    assert config.read_text() == good_config


def test_a_checkpoint_cannot_run_code(cli):
    """Loading allows tensors and plain Python only."""
    import os

    class Evil:
        def __reduce__(self):
            return os.system, ("touch evil",)

    run_dir = cli.train("run", "--total-timesteps", "250")
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    torch.save({**checkpoint, "extra": Evil()}, run_dir / "checkpoint.pt")
    assert "damaged or not a file" in cli.call("--resume", run_dir, code=2).stderr
    assert not (cli.folder / "evil").exists()


@pytest.mark.parametrize("env_id,quantity", [("NanObservation-v0", "non-finite observation"),
                                             ("InfReward-v0", "non-finite reward"),
                                             ("InfLoss-v0", "qf_loss.* became non-finite")])  # fmt: skip
def test_non_finite_numbers_stop_the_run(cli, env_id, quantity):
    """A loss is named in one sentence; what the environment returned comes with its traceback, after a checkpoint."""
    result = cli.run("--env-id", f"toy_envs:{env_id}", "--run-name", "run", *cli.tiny, "--checkpoint-seconds", "0", code=1)
    last = messages(result.stderr)[-1]
    assert re.search(quantity, last) and ("Traceback" in result.stderr) == (env_id != "InfLoss-v0"), result.stderr
    match = re.search(r"stopped at step (\d+).*; the last good checkpoint is of step (\d+)", result.stderr)
    assert match and 248 <= int(match[1]) <= 260 and int(match[2]) <= int(match[1]), result.stderr
    if env_id != "InfLoss-v0":
        assert re.search(r"go on with: python \S*rac_sac.py --resume runs/run", result.stderr) and match[1] == match[2]
    checkpoint = rac_sac.load_file(cli.folder / "runs/run/checkpoint.pt")
    assert checkpoint["state"]["step"] == int(match[2])
    assert all(torch.isfinite(tensor).all() for tensor in [*checkpoint["tensors"].values(), checkpoint["replay"]])


def test_full_disk_keeps_the_last_good_checkpoint(cli):
    """No file may grow beyond a size, as if the disk were full: the replay outgrows it in the middle of the run."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))  # noqa: E731
    arguments = ["--env-id", "Ant-v5", "--run-name", "run", *cli.tiny, "--checkpoint-seconds", "0", "--total-timesteps", "300",
                 "--eval-episodes", "1", "--num-eval-policies", "1"]  # fmt: skip
    result = cli.run(*arguments, code=1, preexec_fn=limit)
    assert "no checkpoint could be written at step" in result.stderr and "Traceback" not in result.stderr
    assert "File too large" in result.stderr
    match = re.search(r"final checkpoint could not be written; the last good checkpoint is of step (\d+)", result.stderr)
    run_dir = cli.folder / "runs/run"
    assert match and rac_sac.load_file(run_dir / "checkpoint.pt")["state"]["step"] == int(match[1]) > 100
    assert not list(run_dir.glob("*.tmp"))
    cli.call("--resume", run_dir)  # with space again, it goes on
    cli.call(*arguments, "--run-name", "whole")
    assert without_wall_clock(run_dir / "eval.csv") == without_wall_clock(cli.folder / "runs/whole/eval.csv")


def test_training_waits_for_evaluations(cli, whole):
    """A worker that does not go on: the bar says that training waits; what is pending is saved, and none is lost."""
    with (open(cli.folder / "stderr", "w") as stderr,
          cli.held("run", "--eval-workers", "1", stderr=stderr) as (process, run_dir)):  # fmt: skip
        wait_until(lambda: "training waits for evaluations" in (cli.folder / "stderr").read_text())
        cli.holding(process)
        kill(process, 2)
        assert process.returncode == 130
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert [step for step, *_ in checkpoint["pending"]] == [200, 300, 400]
    cli.run("--resume", run_dir)
    assert without_wall_clock(run_dir / "eval.csv") == without_wall_clock(whole[0] / "eval.csv")
