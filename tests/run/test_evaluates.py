"""The policies that a run hands on: --evaluate, load_policy, files of the version before, videos, export."""

import dataclasses
import itertools
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    CONDITIONS,
    ROOT,
    checkpoint_of,
    every_script,
    files_in,
    load_script,
    messages,
    read_rows,
    sentence_of,
    slow_but,
)
from toy_envs import Counter, Start

import rac_sac

FORMAT_3 = Path(__file__).parent / "data" / "policy_of_format_3.pt"


def table(stdout: str) -> dict[str, tuple[float, float]]:
    """Condition -> return, std as they are printed."""
    lines = [line.split() for line in stdout.splitlines()]
    return {line[0]: (float(line[1]), float(line[2])) for line in lines if line and re.fullmatch(r"[012]\.\d{4}", line[0])}


# -------------------------------------------------------------------------------------------------------------- --evaluate
@every_script
def test_evaluate(cli, toy):
    """Prints and writes return and std of every condition on fresh episodes; the one that was best in training is marked."""
    cli.call("--env-id", toy(Start), *cli.brief)
    before = files_in(cli.run_dir)
    result = cli.call("--evaluate", cli.run_dir)
    assert messages(result.stderr) == []
    after = files_in(cli.run_dir)
    assert after.keys() - before.keys() == {"evaluate.csv"}
    assert {name: after[name] for name in before} == before

    rows = read_rows(cli.run_dir / "evaluate.csv")
    assert b"\r" not in after["evaluate.csv"]
    condition = CONDITIONS[cli.name]
    conditions = [float(row[condition]) for row in rows]
    evaluated = load_script(ROOT / f"{cli.name}.py").load_policy(cli.run_dir)
    np.testing.assert_allclose(conditions, getattr(evaluated, f"{condition}s"), rtol=1e-5)
    printed = {f"{float(r[condition]):.4f}": (round(float(r["return"]), 1), round(float(r["return_std"]), 1)) for r in rows}
    assert table(result.stdout) == printed
    assert {row["global_step"] for row in rows} == {"60"}
    best = [float(row[condition]) for row in rows if row["best_in_training"] == "1"]
    assert best == pytest.approx([evaluated.best], rel=1e-5)
    assert result.stdout.count("best in training") == 1


def returns_of(cli, *options: str) -> list[float]:
    cli.call("--evaluate", cli.run_dir, *options)
    return [float(row["return"]) for row in read_rows(cli.run_dir / "evaluate.csv")]


def test_episodes_are_fresh_and_follow_from_the_seed(cli, toy):
    """The environment's reward is drawn from the seed of its reset."""
    cli.call("--env-id", toy(Start), *cli.brief)
    first = returns_of(cli)
    assert returns_of(cli) == first
    assert returns_of(cli, "--seed", "5") != first
    assert returns_of(cli, "--eval-episodes", "7") != first
    in_training = float(read_rows(cli.run_dir / "eval.csv")[-1]["eval/best_return"])
    assert in_training not in first


def test_arguments_of_an_evaluation(cli, toy):
    """Episodes, seed, workers and video may be given, also at the script's default; others are named as not used."""
    cli.call("--env-id", toy(Start), *cli.brief)
    assert ", fresh episodes per beta: 2" in cli.call("--evaluate", cli.run_dir).stdout
    assert ", fresh episodes per beta: 10" in cli.call("--evaluate", cli.run_dir, "--eval-episodes", "10").stdout
    (line,) = messages(cli.call("--evaluate", cli.run_dir, "--utd", "20", "--gamma", "0.99").stderr)
    assert line.startswith("not used: utd;")


def test_workers_do_not_matter_in_an_evaluation(cli):
    cli.call("--env-id", "toy_envs:Start-v0", *cli.brief)
    alone = cli.call("--evaluate", cli.run_dir)
    assert cli.run("--evaluate", cli.run_dir, "--eval-workers", "2").stdout == alone.stdout


def test_workers_of_an_evaluation(cli, toy):
    """As many as fit this machine, not the one that trained; none where that had none."""
    cli.call("--env-id", toy(), *cli.brief)
    seen = []

    class Recording(rac_sac.Evaluator):
        def __init__(self, args, seeds):
            seen.append(args.eval_workers)
            super().__init__(dataclasses.replace(args, eval_workers=0), seeds)

    cli.monkeypatch.setattr(rac_sac, "Evaluator", Recording)
    cli.call("--evaluate", cli.run_dir)
    policy = torch.load(cli.run_dir / "policy.pt", weights_only=True)
    usual = rac_sac.check_args(rac_sac.Args()).eval_workers
    torch.save({**policy, "args": {**policy["args"], "eval_workers": usual + 1}}, cli.run_dir / "policy.pt")
    cli.call("--evaluate", cli.run_dir)
    cli.call("--evaluate", cli.run_dir, "--eval-workers", str(usual + 2))
    assert seen == [0, usual, usual + 2]


def test_a_policy_file_is_evaluated(cli, toy):
    """Any file, which need not lie in a run directory; nothing is written beside it."""
    cli.call("--env-id", toy(Start), *cli.brief)
    whole = cli.call("--evaluate", cli.run_dir)
    (cli.run_dir / "evaluate.csv").unlink()
    shutil.copy(cli.run_dir / "policy.pt", cli.folder / "handed_on.pt")
    shutil.rmtree(cli.run_dir)
    assert cli.call("--evaluate", "handed_on.pt").stdout == whole.stdout
    assert {path.name for path in cli.folder.rglob("*")} == {"runs", "handed_on.pt"}


def test_the_best_policy_is_evaluated(cli, toy):
    """That of the step that was the best; a run's last two lines have the commands that play the last policy and this one."""
    reward = itertools.count(0, -1)

    def falling(env):
        return {"reward": float(next(reward))}

    last, best = cli.call("--env-id", toy(change=falling), *cli.brief).stdout.splitlines()[-2:]
    for line, policy, step in ((last, "the last policy", 60), (best, "the best", 40)):
        assert policy in line
        assert f"step {step}" in cli.call("--evaluate", *shlex.split(line.split("--evaluate ")[1])).stdout
    assert "step 60" in cli.call("--evaluate", cli.run_dir / "policy.pt").stdout
    (cli.run_dir / "evaluate.csv").unlink()
    cli.call("--evaluate", cli.run_dir / "best_policy.pt")
    assert not (cli.run_dir / "evaluate.csv").exists()


def test_a_run_directory_without_a_policy(cli, toy):
    """No evaluation has ended yet."""
    cli.call("--env-id", toy(), *cli.brief)
    (cli.run_dir / "policy.pt").unlink()
    assert "has no policy yet; its first evaluation writes one" in sentence_of(cli.call("--evaluate", cli.run_dir, code=2))


def test_non_finite_numbers_in_an_evaluation(cli, toy):
    """Named with beta and episode; the table is printed all the same."""
    broken = []
    env_id = toy(change=lambda env: {"reward": np.nan} if broken and env.count == 5 else {})
    cli.call("--env-id", env_id, *cli.brief)
    broken.append(True)
    result = cli.call("--evaluate", cli.run_dir)
    assert "beta 0.8, episode 2" in messages(result.stderr)[-1]
    assert {mean for mean, _ in table(result.stdout).values()} == {4.0}


def test_an_evaluation_that_cannot_be_written(cli, toy):
    """The table is printed, and a line says so."""
    cli.call("--env-id", toy(), *cli.brief)
    (cli.run_dir / "evaluate.csv").mkdir()
    result = cli.call("--evaluate", cli.run_dir)
    assert len(table(result.stdout)) == 3
    (line,) = messages(result.stderr)
    assert "evaluate.csv" in line


# ------------------------------------------------------------------------------------------------------------ load_policy
@every_script
def test_policies_play_what_was_evaluated(cli, toy):
    """policy.pt is of the last evaluation, best_policy.pt of the best one; both know their family."""
    module = load_script(ROOT / f"{cli.name}.py")
    condition = CONDITIONS[cli.name]
    cli.call("--env-id", toy(low=(-1,), high=(1,), change=lambda env: {"reward": float(env.action[0])}), *cli.brief)
    run_dir = cli.run_dir
    rows = read_rows(run_dir / "eval.csv")
    best = max(rows, key=lambda row: float(row["eval/best_return"]))
    obs = np.array([[0.0], [7.0]])
    for path, row in ((run_dir, rows[-1]), (run_dir / "policy.pt", rows[-1]), (run_dir / "best_policy.pt", best)):
        policy = module.load_policy(path)
        assert getattr(policy, f"best_{condition}") == pytest.approx(float(row[f"eval/best_{condition}"]))
        args = module.Args(**checkpoint_of(run_dir)["args"])
        assert getattr(policy, f"{condition}s") == module.eval_conditions(args)
        for value in getattr(policy, f"{condition}s"):
            expected = module.deterministic_action(policy.actor, obs.astype(np.float32), value)
            np.testing.assert_allclose(policy(obs, **{condition: value}), expected, atol=1e-6)
    last = {name.removeprefix("actor."): value for name, value in checkpoint_of(run_dir)["tensors"].items()}
    for name, value in module.load_policy(run_dir).actor.state_dict().items():
        assert torch.equal(value, last[name])


def make_policy(cli, toy, *arguments, entry=Counter, module=rac_sac, **options):
    cli.call("--env-id", toy(entry, **options), *cli.brief, *arguments)
    return module.load_policy(cli.run_dir)


@every_script
def test_shapes_of_actions(cli, toy):
    """One observation, a batch, an empty batch."""
    module = load_script(ROOT / f"{cli.name}.py")
    policy = make_policy(cli, toy, module=module, low=(-1, -2), high=(1, 2))
    assert policy(np.zeros(1)).shape == (2,)
    assert policy(np.zeros((5, 1))).shape == (5, 2)
    assert policy(np.zeros((0, 1))).shape == (0, 2)
    assert policy([0]).dtype == np.float32
    np.testing.assert_array_equal(policy(np.ones((3, 1)))[1], policy(np.ones((3, 1)))[2])


@pytest.mark.parametrize("low,high", [(-1, 0.2), (0.1, 0.4), (-1e6, 1e6), (0.3, 0.3)])
def test_actions_are_within_bounds(cli, toy, low, high):
    policy = make_policy(cli, toy, low=(low,), high=(high,))
    space = rac_sac.gym.spaces.Box(np.float32([low]), np.float32([high]))
    for obs in (-1e6, -1.0, 0.0, 1.0, 1e6):
        assert space.contains(policy(np.array([obs])))


@slow_but("rac_sac", "rac_itm")
def test_one_condition_for_each_row(cli, toy):
    module = load_script(ROOT / f"{cli.name}.py")
    policy = make_policy(cli, toy, module=module)
    conditions = np.array(policy.betas if hasattr(policy, "betas") else policy.ks)
    obs = np.linspace(-3, 3, len(conditions))[:, None]
    rows = [policy(o, condition) for o, condition in zip(obs, conditions, strict=True)]
    np.testing.assert_allclose(policy(obs, conditions), rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(policy(obs, **{CONDITIONS[cli.name]: conditions}), rows, rtol=1e-5, atol=1e-6)


ODD_CONDITIONS = [9.0, -1.0, 0.0, np.nan, "0.5", "odd", [0.1, 0.2, 0.3], np.ones((2, 2)), {}]


@pytest.mark.parametrize("value", ODD_CONDITIONS, ids=repr)
def test_a_condition_that_no_policy_was_trained_for(value):
    """0.1 is one; a text, three values for two rows, or what is outside of the trained range, is not."""
    policy = rac_sac.load_policy(FORMAT_3)
    obs = np.zeros((2, 3))
    assert policy(obs, 0.1).shape == policy(obs, beta=1e-7).shape == (2, 1)
    for give in ({"condition": value}, {"beta": value}):
        with pytest.raises(rac_sac.UserError, match="beta"):
            policy(obs, **give)


RANGES = {"rac_sac": (1e-7, 0.8), "rac_td3": (1e-7, 0.8), "vanilla_rac": (0.3, 0.3), "rac_itm": (1.0, 2.0)}


@every_script
def test_the_range_of_conditions(cli, toy):
    """From the smallest to the largest that was trained."""
    module = load_script(ROOT / f"{cli.name}.py")
    policy = make_policy(cli, toy, module=module)
    low, high = RANGES[cli.name]
    assert policy(np.zeros(1), low).shape == policy(np.zeros(1), high).shape == (1,)
    for outside in (low * 0.99, high * 1.01):
        with pytest.raises(module.UserError, match=f"from {low} to {high}"):
            policy(np.zeros(1), outside)


@pytest.mark.parametrize("named", [{"gamma": 0.1}, {"beta": 0.1, "gamma": 0.1}, {"k": 1.0}], ids=repr)
def test_a_condition_of_another_name(named):
    policy = rac_sac.load_policy(FORMAT_3)
    with pytest.raises(rac_sac.UserError, match="beta"):
        policy(np.zeros(3), **named)


def test_a_condition_given_twice():
    policy = rac_sac.load_policy(FORMAT_3)
    with pytest.raises(rac_sac.UserError, match="one condition"):
        policy(np.zeros(3), 0.1, beta=0.2)


@pytest.mark.parametrize(
    "obs", [np.zeros(2), np.zeros((1, 1, 3)), np.array([0, 0, np.nan]), np.array([0, np.inf, 0]), 1.0, [], "odd"], ids=repr
)
def test_an_observation_of_another_shape(obs):
    policy = rac_sac.load_policy(FORMAT_3)
    assert policy(np.zeros(3)).shape == (1,)
    with pytest.raises(rac_sac.UserError, match="obs"):
        policy(obs)


def test_the_smallest_beta_is_in_the_range(cli, toy):
    """A policy never refuses its own best beta."""
    policy = make_policy(cli, toy, "--eval-beta-max", "1e-9")
    assert policy.best_beta <= 1e-9
    assert policy(np.zeros(1)).shape == (1,)
    np.testing.assert_array_equal(policy(np.zeros(1)), policy(np.zeros(1), policy.best_beta))
    cli.call("--evaluate", cli.run_dir)


@pytest.mark.parametrize("harm", ["overwritten", "cut", "removed"])
def test_a_policy_is_independent_of_its_file(cli, toy, harm):
    policy = make_policy(cli, toy)
    path = cli.run_dir / "policy.pt"
    obs = np.linspace(-2, 2, 5)[:, None]
    before = policy(obs)
    if harm == "overwritten":
        size = path.stat().st_size
        with open(path, "r+b") as file:
            file.write(b"\xff" * size)
    elif harm == "cut":
        with open(path, "r+b") as file:
            file.truncate(10)
    else:
        path.unlink()
    np.testing.assert_array_equal(policy(obs), before)


# -------------------------------------------------------------------------------------------- files of the version before
def test_a_policy_of_format_3_plays(cli):
    """The actions are those of the version that wrote it."""
    policy = rac_sac.load_policy(FORMAT_3)
    assert policy.betas == pytest.approx([0.8 / 3, 1.6 / 3, 0.8])
    assert policy.best_beta == pytest.approx(0.8 / 3)
    obs = np.array([[1.0, 0.0, 0.5], [-0.6, 0.8, -3.0]])
    np.testing.assert_allclose(policy(obs), [[0.00471139], [0.04366088]], rtol=1e-4)
    np.testing.assert_allclose(policy(obs, beta=0.1), [[0.01468706], [-0.00921321]], rtol=1e-4)


def test_a_policy_of_format_3_is_evaluated(cli):
    shutil.copy(FORMAT_3, cli.folder / "old.pt")
    result = cli.call("--evaluate", "old.pt")
    assert messages(result.stderr) == []
    assert result.stdout.startswith("Pendulum-v1, step 100, fresh episodes per beta: 1")
    assert table(result.stdout).keys() == {"0.2667", "0.5333", "0.8000"}
    assert all(mean < -100 for mean, _ in table(result.stdout).values())


# ------------------------------------------------------------------------------------------------------- export and video
@pytest.mark.slow
def test_the_actor_can_be_exported(cli, toy, monkeypatch):
    """As docs/details.md shows it, in an environment whose actions are from -2 to 4, and for any number of rows."""
    cli.call("--env-id", toy(), *cli.brief)
    monkeypatch.chdir(cli.folder)
    program = code_of_the_documents("torch.export.export(").replace("runs/NAME", "runs/run")
    names = {}
    exec(program, names)
    policy = names["policy"]
    low, high = policy.low, policy.high
    assert (low, high) == (-2, 4)
    actor = torch.export.load("actor.pt2").module()
    for rows in (1, 2, 5):
        obs = torch.randn(rows, 1)
        mean, _ = actor(obs, torch.full((rows, 1), policy.best_beta).log())
        action = (low + high) / 2 + (high - low) / 2 * np.tanh(mean.numpy())
        np.testing.assert_allclose(action, policy(obs.numpy()), rtol=1e-5, atol=1e-6)
    assert "(low + high) / 2 + (high - low) / 2 * np.tanh(mean.numpy())" in (ROOT / "docs/details.md").read_text()


def code_of_the_documents(part: str) -> str:
    """The program in docs/details.md that has `part` in it."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs/details.md").read_text(), re.S)
    (program,) = [text for text in programs if part in text]
    return program


def test_the_environment_of_the_documents(cli, monkeypatch):
    """It is found by its module, whose name its runs have too."""
    (cli.folder / "my_module.py").write_text(code_of_the_documents("class MyEnv"))
    monkeypatch.syspath_prepend(cli.folder)
    cli.call("--env-id", "my_module:MyEnv-v0", *cli.tiny, "--total-timesteps", "210")
    (run_dir,) = (cli.folder / "runs").iterdir()
    assert run_dir.name.startswith("my_module_MyEnv-v0__rac_sac__1__")
    result = cli.call("--evaluate", run_dir)
    assert result.stdout.startswith("my_module:MyEnv-v0, step 210")
    assert len(table(result.stdout)) == 3


def test_a_video_without_a_renderer(cli, toy):
    """A run ends well and says what is missing; an evaluation prints its table before."""
    env_id = toy()
    result = cli.call("--env-id", env_id, *cli.brief, "--capture-video")
    (line,) = messages(result.stderr)
    assert "no video" in line
    assert env_id in line
    assert result.stdout.startswith("finished")
    result = cli.call("--evaluate", cli.run_dir, "--capture-video", code=2)
    assert len(table(result.stdout)) == 3
    assert "no video" in result.stderr


@pytest.mark.slow
@every_script
def test_videos(cli):
    """One episode of the best policy at the end of training, and one with --evaluate."""
    cli.run("--env-id", "Hopper-v4", *cli.brief, "--capture-video")
    (video,) = (cli.run_dir / "videos").glob(f"step-60-{CONDITIONS[cli.name]}-*.mp4")
    assert video.stat().st_size > 1000
    assert b"ftyp" in video.read_bytes()[:16]
    result = cli.run("--evaluate", cli.run_dir, "--capture-video", "--eval-workers", "1")
    assert table(result.stdout)
    assert result.stdout.endswith(f" in {cli.run_dir}/videos\n")
    assert messages(result.stderr) == []
    assert list((cli.run_dir / "videos").glob(f"evaluate-step-60-{CONDITIONS[cli.name]}-*.mp4"))


@pytest.mark.slow
def test_a_video_follows_the_body(monkeypatch):
    """50 m from where the episode began a picture shows it: without its body it is another one."""
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", "egl"))
    env = rac_sac.FlatEnv("Ant-v4", render_mode="rgb_array")
    rac_sac.follow_the_body(env)
    env.reset(seed=1)
    model, data = env.unwrapped.model, env.unwrapped.data
    env.unwrapped.set_state(data.qpos + 50 * (np.arange(model.nq) == 0), data.qvel)
    with_body = env.render()
    model.geom_rgba[model.geom_bodyid > 0] = 0
    without = env.render()
    env.close()
    assert (with_body != without).any(-1).mean() > 0.01
