"""What an environment may be, and what becomes of what it returns: episodes, ends, bounds, spaces, odd numbers."""

import os
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import checkpoint_of, files_in, messages, read_rows, rows_of, sentence_of
from toy_envs import Counter, Lottery, Moving, NoActionSpace, OldInterface, Spaces, Start

import rac_sac


def replay_of(cli, env_id: str) -> np.ndarray:
    cli.call("--env-id", env_id, *cli.brief)
    return checkpoint_of(cli.run_dir)["replay"].numpy()


# --------------------------------------------------------------------------------------------------------------- episodes
@pytest.mark.parametrize("ends,terminated_at_end", [("truncation", 0.0), ("termination", 1.0)])
def test_the_last_row_of_an_episode(cli, toy, ends, terminated_at_end):
    """It holds the episode's own last observation, 7, not the next one's first; only termination stops the bootstrap.

    Actions are stored as the networks give them, in [-1, 1], and played within the environment's bounds, -2 and 4.
    """
    played = []
    env_id = toy(ends=ends, change=lambda env: played.append(float(env.action[0])) if env.number == 0 else None)
    obs, action, reward, terminated, next_obs = replay_of(cli, env_id).T
    np.testing.assert_allclose(1 + 3 * action, played, atol=1e-5)
    assert len(np.unique(action)) == 60
    steps = np.arange(60)
    np.testing.assert_array_equal(obs, steps % 7)
    np.testing.assert_array_equal(next_obs, steps % 7 + 1)
    np.testing.assert_array_equal(terminated, np.where(steps % 7 == 6, terminated_at_end, 0.0))
    np.testing.assert_array_equal(reward, 1.0)


def test_an_environment_is_never_stepped_past_its_end(cli, toy):
    """It asserts so itself, in training and in evaluations of episodes of different lengths."""

    def of_random_length(env):
        env.over = env.count >= 1 + env.total % 5
        return {"truncated": env.over}

    cli.call("--env-id", toy(change=of_random_length, ends="never"), *cli.brief)
    assert checkpoint_of(cli.run_dir)["state"]["step"] == 60


def test_an_observation_that_is_used_again(cli, toy):
    """One array for all observations, which every step changes: a row holds two different ones all the same."""

    class Reusing(Counter):
        array = np.zeros(1, np.float32)

        def reset(self, seed=None, options=None):
            self.array[:], info = super().reset(seed)
            return self.array, info

        def step(self, action):
            self.array[:], *rest = super().step(action)
            return self.array, *rest

    obs, _, _, _, next_obs = replay_of(cli, toy(Reusing)).T
    np.testing.assert_array_equal(obs, np.arange(60) % 7)
    np.testing.assert_array_equal(next_obs, np.arange(60) % 7 + 1)


def test_every_episode_has_a_start_of_its_own(cli, toy):
    """Its reward is drawn from the seed of its reset."""
    rewards = replay_of(cli, toy(Start))[:, 2]
    assert len(np.unique(rewards)) == 60


@pytest.mark.parametrize("value", [1, True, np.array([True]), np.float64(1.0)], ids=repr)
def test_terminated_in_another_type(cli, toy, value):
    """What equals True is True, also as a number or an array."""
    terminated = replay_of(cli, toy(length=3, ends="never", change=last_step_of_three(terminated=value)))[:, 3]
    np.testing.assert_array_equal(terminated, np.arange(60) % 3 == 2)


def last_step_of_three(**change):
    def last_step(env):
        env.over = env.count == 3
        return change if env.over else {}

    return last_step


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize("value", [2, 0.3, None, "no", np.array([True, False])], ids=repr)
def test_an_end_that_is_neither_true_nor_false(cli, toy, name, value):
    """Refused before it is stored; names the value."""
    line = sentence_of(cli.call("--env-id", toy(change=last_step_of_three(**{name: value})), *cli.brief, code=1))
    assert f"{name} = {value!r}" in line
    assert "stopped at step 2" in line


@pytest.mark.parametrize("value", [2, np.float64(2), np.array(2), np.array([2.0]), np.array([[2.0]]), [2.0]], ids=repr)
def test_a_reward_in_another_type(toy, value):
    """What holds one number is that number."""
    env = rac_sac.FlatEnv(toy(change=lambda env: {"reward": value}))
    env.reset(seed=0)
    reward = env.step(np.zeros(1, np.float32))[1]
    assert type(reward) is float
    assert reward == 2


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), [], {"a": 1}, "much"], ids=repr)
@pytest.mark.filterwarnings("ignore:.*The reward returned by")  # Gymnasium's
def test_a_reward_that_is_not_one_number(cli, toy, value):
    line = sentence_of(cli.call("--env-id", toy(change=lambda env: {"reward": value}), *cli.brief, code=1))
    assert f"reward = {value!r}; it must be a number" in line


@pytest.mark.parametrize("env_id", ["Hopper-v4", "Ant-v4", "Humanoid-v4", "Walker2d-v5", "Pendulum-v1"])
def test_replay_of_an_episode_is_exact(env_id):
    """An episode's seed and actions give its observations, whatever the environment has played before."""
    fresh = rac_sac.FlatEnv(env_id)
    used = rac_sac.FlatEnv(env_id)
    used.reset(seed=5)
    used.step(np.ones(used.action_dim, np.float32))
    observations = []
    for env in (fresh, used):
        rng = np.random.default_rng(1)
        observations.append([env.reset(seed=7)[0]])
        for _ in range(30):
            observations[-1].append(env.step(rng.uniform(-1, 1, env.action_dim).astype(np.float32))[0])
    np.testing.assert_array_equal(*observations)


OF_EARLIER_EPISODES = {"change": lambda env: {"reward": env.total}}


@pytest.mark.parametrize(
    "entry,options,exact",
    [(Counter, {}, True), (Lottery, {}, False), (Counter, OF_EARLIER_EPISODES, False)],
    ids=["deterministic", "noise", "rewards that know of earlier episodes"],
)
def test_resume_says_when_it_cannot_be_exact(cli, toy, entry, options, exact):
    cli.call("--env-id", toy(entry, **options), *cli.brief)
    assert checkpoint_of(cli.run_dir)["actions"].shape[0] == 60 % 7
    lines = messages(cli.call("--resume", cli.run_dir, "--total-timesteps", "70").stderr)
    assert ["does not repeat its episode" in line for line in lines] == ([] if exact else [True])


def test_resume_between_two_episodes_says_when_it_cannot_be_exact(cli, toy):
    """Their first observation knows of earlier episodes; resumed once more in the same episode, nothing is new."""

    class Statistics(Counter):
        def reset(self, seed=None, options=None):
            obs, info = super().reset(seed=seed)
            return obs + self.total, info

    cli.call("--env-id", toy(Statistics), *cli.brief, "--total-timesteps", "63", "--buffer-size", "80")
    assert checkpoint_of(cli.run_dir)["actions"].shape[0] == 0
    (line,) = messages(cli.call("--resume", cli.run_dir, "--total-timesteps", "65").stderr)
    assert "does not repeat its episode" in line
    assert messages(cli.call("--resume", cli.run_dir, "--total-timesteps", "66").stderr) == []


def test_a_repeated_episode_that_ends_earlier(cli, toy):
    """It is not stepped past that end, which Counter would refuse: the next episode begins."""
    length = {"length": 7}
    env_id = toy(lambda: Counter(**length))
    cli.call("--env-id", env_id, *cli.brief, "--total-timesteps", "61", "--buffer-size", "80")
    length["length"] = 3
    (line,) = messages(cli.call("--resume", cli.run_dir, "--total-timesteps", "70").stderr)
    assert "does not repeat its episode" in line
    obs = checkpoint_of(cli.run_dir)["replay"].numpy()[:, 0]
    np.testing.assert_array_equal(obs[61:], np.arange(9) % 3)


# ----------------------------------------------------------------------------------------------------------------- bounds
BOUNDS = [(-1, 0.2), (0.1, 0.4), (-0.0175, 3.7525), (-1e6, 1e6), (0.3, 0.3), (-2, 4)]
LARGEST = np.finfo(np.float64).max


@pytest.mark.parametrize("low,high", BOUNDS)
def test_actions_stay_within_bounds(cli, toy, low, high):
    """The environment asserts action_space.contains in every step; a component without a choice is its only value."""
    cli.call("--env-id", toy(low=(low, -1), high=(high, 1)), *cli.brief)
    assert rows_of(cli.run_dir / "eval.csv") == 3


@pytest.mark.parametrize("low,high", BOUNDS)
def test_actions_reach_their_bounds(toy, low, high):
    """-1, 0 and 1 are the lower bound, the middle and the upper bound."""
    seen = []
    env = rac_sac.FlatEnv(toy(low=(low,), high=(high,), change=lambda env: seen.append(env.action)))
    env.reset(seed=0)
    for action in (-1.0, 0.0, 1.0):
        env.step(np.array([action], np.float32))
    np.testing.assert_allclose(np.concatenate(seen), [low, (low + high) / 2, high], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_does_not_leave_the_bounds(dtype):
    """All bounds with one decimal from -3 to 3, at -1, 1 and random actions."""
    values = np.arange(-30, 31) / 10
    low, high = (part.ravel().astype(dtype) for part in np.meshgrid(values, values))
    low, high = low[low <= high], high[low <= high]
    random = np.random.default_rng(0).uniform(-1, 1, (20, len(low)))
    for action in (-np.ones(len(low)), np.ones(len(low)), *random):
        own = rac_sac.to_bounds(action.astype(np.float32), low, high)
        assert own.dtype == dtype
        assert (low <= own).all()
        assert (own <= high).all()


@pytest.mark.filterwarnings("error")
def test_the_widest_bounds():
    """The distance between them is beyond float64."""
    low, high = np.array([-LARGEST]), np.array([LARGEST])
    for action, wanted in ((-1.0, -LARGEST), (0.0, 0.0), (0.5, LARGEST / 2), (1.0, LARGEST)):
        np.testing.assert_array_equal(rac_sac.to_bounds(np.array([action]), low, high), [wanted])


# ----------------------------------------------------------------------------------------------------------------- spaces
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Ant-v4", "Humanoid-v5"])
def test_environments_of_gymnasium(cli, env_id):
    cli.call("--env-id", env_id, *cli.brief, "--eval-frequency", "30", "--eval-episodes", "1", "--num-eval-policies", "1")
    assert rows_of(cli.run_dir / "eval.csv") == 2


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = rac_sac.FlatEnv("Ant-v4")
        obs, _ = env.reset(seed=0)
        env.step(np.zeros(8, np.float32))
    assert env.obs_dim == 27
    assert obs.dtype == np.float32
    assert obs.shape == (27,)


def test_dict_observations_are_flattened(cli, toy):
    assert replay_of(cli, toy(Spaces, obs="dict")).shape == (60, 2 * 3 + 1 + 2)


BOX = gym.spaces.Box(-9, 9, (2,))
DICT = gym.spaces.Dict({"b": BOX, "a": gym.spaces.Discrete(3)})  # which sorts its keys
FLAT = {  # space, an observation, the same flat
    "dict": (DICT, {"a": 1, "b": [5, 6]}, [0, 1, 0, 5, 6]),
    "tuple": (gym.spaces.Tuple([BOX, gym.spaces.MultiBinary(2)]), ([0.5, -2], [1, 0]), [0.5, -2, 1, 0]),
    "integers in a dict": (gym.spaces.Dict({"a": gym.spaces.Box(0, 9, (2,), np.int64)}), {"a": [1.7, 2.2]}, [1, 2]),
    "discrete": (gym.spaces.Discrete(4, start=2), 4, [0, 0, 1, 0]),
    "text": (gym.spaces.Text(4, charset="abc"), "ca", [2, 0, 3, 3]),
    "matrix": (gym.spaces.Box(-9, 9, (2, 2)), [[1, 2], [3, 4]], [1, 2, 3, 4]),
}


@pytest.mark.parametrize("kind", FLAT)
def test_how_observations_are_flattened(toy, kind):
    space, value, expected = FLAT[kind]

    class Observes(Counter):
        def __init__(self):
            super().__init__()
            self.observation_space = space

    env = rac_sac.FlatEnv(toy(Observes))
    flat = env.flat_observation(value)
    assert (flat.dtype, env.obs_dim) == (np.float32, len(expected))
    np.testing.assert_allclose(flat, expected)


def test_floats_of_a_box_of_integers(toy):
    """They are not cut to integers."""

    class Scaled(Counter):
        def __init__(self):
            super().__init__(change=lambda env: {"obs": np.array([0.7])})
            self.observation_space = gym.spaces.Box(0, 255, (1,), np.uint8)

    env = rac_sac.FlatEnv(toy(Scaled))
    env.reset(seed=0)
    obs = env.step(np.zeros(1, np.float32))[0]
    assert obs.dtype == np.float32
    np.testing.assert_array_equal(obs, np.float32([0.7]))


def test_images_are_learned_flat_and_said_to_be(cli, toy):
    result = cli.call("--env-id", toy(Spaces, obs="image"), *cli.brief)
    assert [line for line in messages(result.stderr) if "flat vector of 12 numbers" in line]


def test_a_matrix_of_actions(cli, toy):
    """It is learned flat; the environment and the policy's caller get the matrix."""
    assert replay_of(cli, toy(Spaces, action="matrix")).shape == (60, 2 * 2 + 6 + 2)
    policy = rac_sac.load_policy(cli.run_dir)
    assert policy(np.zeros(2)).shape == (2, 3)
    assert policy(np.zeros((5, 2))).shape == (5, 2, 3)
    cli.call("--evaluate", cli.run_dir)


@pytest.mark.parametrize(
    "entry,options,quantity",
    [
        (Spaces, {"action": "discrete"}, "Discrete(3)"),
        (Spaces, {"action": "unbounded"}, "bounded Box"),
        (Spaces, {"action": "empty"}, "2 observations and 0 actions"),
        (Spaces, {"obs": "empty"}, "0 observations and 1 actions"),
        (Spaces, {"obs": "text"}, "cannot be flattened"),
        (NoActionSpace, {}, ""),
    ],
)
def test_spaces_that_cannot_be_learned(cli, toy, entry, options, quantity):
    env_id = toy(entry, **options)
    line = sentence_of(cli.call("--env-id", env_id, *cli.brief, code=2))
    assert env_id in line
    assert quantity in line
    assert list(cli.folder.iterdir()) == []


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_an_observation_of_another_shape(cli, toy, shape):
    """Both shapes are named."""
    env_id = toy(change=lambda env: {"obs": np.zeros(shape, np.float32)} if env.total == 9 else {})
    result = cli.call("--env-id", env_id, *cli.brief, code=1)
    assert str(shape) in result.stderr
    assert "(1,)" in result.stderr


def test_an_environment_of_the_old_interface(cli, toy):
    """Gymnasium's warning says what is wrong, and the traceback where."""
    with pytest.warns(DeprecationWarning, match="step API"):
        result = cli.call("--env-id", toy(OldInterface), *cli.brief, code=1)
    assert result.stderr.strip().endswith("(expected 5, got 4)")


# --------------------------------------------------------------------------------------------------------------- its name
@pytest.mark.parametrize("asked,full", [("Hopper", "Hopper-v5"), ("toy_envs:Truncating", "toy_envs:Truncating-v0")])
def test_the_full_id_is_said_and_saved(cli, asked, full):
    result = cli.call("--env-id", asked, *cli.brief)
    (line,) = messages(result.stderr)
    assert full in line
    assert checkpoint_of(cli.run_dir)["args"]["env_id"] == full
    assert f'"env_id": "{full}"' in (cli.run_dir / "config.json").read_text()
    assert cli.call("--evaluate", cli.run_dir).stdout.startswith(full)


def test_the_id_of_an_environment_made_of_another(cli, toy):
    """It is its own, also where a wrapper has asked the inner one for its spec: evaluation plays what is trained."""

    class Half(gym.RewardWrapper):
        def __init__(self):
            super().__init__(gym.make("Pendulum-v1"))
            self.limit = self.env.spec.max_episode_steps

        def reward(self, reward):
            return 0.5

    env_id = toy(Half)
    assert messages(cli.call("--env-id", env_id, *cli.brief).stderr) == []
    assert checkpoint_of(cli.run_dir)["args"]["env_id"] == env_id
    assert {float(row["eval/best_return"]) for row in read_rows(cli.run_dir / "eval.csv")} == {0.5 * 200}


def test_the_checks_that_an_environment_is_registered_without(cli, toy):
    """Gymnasium's checker, which training has on, would not let this info pass."""

    class NoInfo(Counter):
        def reset(self, seed=None, options=None):
            return super().reset(seed=seed)[0], None

    env_id = toy(NoInfo)
    gym.registry[env_id].disable_env_checker = True
    cli.call("--env-id", env_id, *cli.brief)
    gym.registry[env_id].disable_env_checker = False
    assert "NoneType" in cli.call("--env-id", env_id, *cli.brief, "--run-name", "checked", code=1).stderr


# ------------------------------------------------------------------------------------------------------------ odd numbers
@pytest.mark.parametrize("name,value", [("obs", np.array([np.nan], np.float32)), ("reward", np.inf), ("reward", 1e39)])
def test_a_non_finite_number_stops_training(cli, toy, name, value):
    """Before it is stored: the checkpoint is good."""
    env_id = toy(change=lambda env: {name: value} if env.total == 55 else {})
    line = sentence_of(cli.call("--env-id", env_id, *cli.brief, "--checkpoint-seconds", "0", code=1))
    assert "non-finite" in line
    assert "stopped at step 54" in line
    checkpoint = checkpoint_of(cli.run_dir)
    assert checkpoint["state"]["step"] == 54
    assert np.isfinite(checkpoint["replay"].numpy()).all()


def test_a_non_finite_number_ends_an_evaluated_episode(cli, toy):
    """Which counts as far as it went; step, beta and episode are named, and the run goes on."""

    def second_episode(env):
        return {"obs": np.array([np.nan], np.float32)} if env.number == 2 and env.count == 3 else {}

    result = cli.call("--env-id", toy(change=second_episode), *cli.brief)
    (line,) = [line for line in messages(result.stderr) if "step 50, beta 0.5333" in line]
    assert "episode 2" in line
    rows = read_rows(cli.run_dir / "eval.csv")
    assert [float(row["eval/return_0.533333"]) for row in rows] == [(7 + 2) / 2] * 3
    assert len(messages(result.stderr)) == 9  # three evaluations of three policies


class CountsEpisodes(Counter):
    episodes = 0

    def reset(self, seed=None, options=None):
        self.episodes += 1
        return super().reset(seed=seed)


def test_a_policy_whose_episode_was_cut_short_is_not_the_best(cli, toy):
    """Each step costs 1, so that the middle one of three policies, whose episodes end in step 3, has the highest return."""

    def costs(env):
        return {"reward": np.nan if env.number and env.episodes % 3 == 2 and env.count == 3 else -1.0}

    cli.call("--env-id", toy(CountsEpisodes, change=costs), *cli.brief)
    for row in read_rows(cli.run_dir / "eval.csv"):
        assert float(row["eval/return_0.533333"]) == -2
        assert float(row["eval/best_return"]) == -7
        assert float(row["eval/best_beta"]) != pytest.approx(0.5333, abs=0.001)


@pytest.mark.parametrize("spared", [40, 50, 60])
def test_an_evaluation_that_was_cut_short_is_not_the_best(cli, toy, spared):
    """Each step costs 1, and in the evaluation of one step all episodes end in step 3: whole ones are better all the same."""

    def costs(env):
        evaluation = (env.episodes - 1) // 3  # of three policies
        broken = env.number and 40 + 10 * evaluation == spared and env.count == 3
        return {"reward": np.nan if broken else -1.0}

    result = cli.call("--env-id", toy(CountsEpisodes, change=costs), *cli.brief)
    returns = {int(row["global_step"]): float(row["eval/best_return"]) for row in read_rows(cli.run_dir / "eval.csv")}
    assert returns == {step: -2 if step == spared else -7 for step in (40, 50, 60)}
    best = 50 if spared == 60 else 60  # the last of equals
    assert torch.load(cli.run_dir / "best_policy.pt", weights_only=True)["evaluation"]["step"] == best
    assert f"best evaluation: return -7.0 ± 0.0 at beta 0.2667, step {best}" in result.stdout


def test_where_all_evaluations_were_cut_short(cli, toy):
    """The best of them is the best, and it is still known to be one of them after resuming."""
    costs = {"reward": -1.0}
    env_id = toy(change=lambda env: {"reward": np.nan if env.number and env.count == 3 and costs else -1.0})
    cli.call("--env-id", env_id, *cli.brief)
    assert checkpoint_of(cli.run_dir)["state"]["best_evaluation"]["cut_short"]
    costs.clear()
    cli.call("--resume", cli.run_dir, "--total-timesteps", "70")
    best = torch.load(cli.run_dir / "best_policy.pt", weights_only=True)["evaluation"]
    assert (best["step"], best["best_return"]) == (70, -7)


def test_a_non_finite_number_at_the_first_observation_of_an_evaluation(cli, toy):
    class Broken(Counter):
        def reset(self, seed=None, options=None):
            obs, info = super().reset(seed=seed)
            return (obs * np.nan if self.number else obs), info

    result = cli.call("--env-id", toy(Broken), *cli.brief)
    assert "beta 0.5333, episode 1" in result.stderr
    assert float(read_rows(cli.run_dir / "eval.csv")[0]["eval/best_return"]) == 0


def test_a_long_first_episode_is_named_once(cli, toy):
    """Its length says that an evaluation may never end."""
    cli.monkeypatch.setattr(rac_sac, "LONG_EPISODE", 7)
    (line,) = messages(cli.call("--env-id", toy(), *cli.brief).stderr)
    assert line.startswith("the first episode has lasted 7 steps")
    cli.monkeypatch.setattr(rac_sac, "LONG_EPISODE", 8)  # longer than any
    assert messages(cli.call("--env-id", toy(), *cli.brief, "--run-name", "another").stderr) == []


def test_warnings_of_mujoco_are_said_once_and_counted(cli, toy):
    """Ten in training, and one in each of the 18 evaluated episodes."""

    def warn(env):
        if (env.number == 0 and env.total <= 10) or (env.number and env.count == 1):
            rac_sac.note_mujoco_warning("Nan, Inf or huge value in QACC at DOF 0.")

    result = cli.call("--env-id", toy(change=warn), *cli.brief)
    first, last = messages(result.stderr)
    assert "QACC" in first
    assert "28 times" in last


def test_a_real_warning_of_mujoco(cli, toy):
    """It goes to the screen as a sentence, not to a file in the current folder."""

    class Unstable(gym.Wrapper):
        def step(self, action):
            if self.unwrapped.number == 0:
                self.unwrapped.data.qvel[:] = 1e12
            return super().step(action)

    result = cli.call("--env-id", toy(lambda: Unstable(gym.make("Hopper-v4"))), *cli.brief)
    assert "QACC" in result.stderr or "QVEL" in result.stderr
    assert len([line for line in messages(result.stderr) if line.startswith("MuJoCo warns")]) == 1
    assert [path.name for path in cli.folder.iterdir()] == ["runs"]


def test_an_environment_may_change_the_directory(cli, toy):
    """Run directories stay where they were asked for, here relative to where the command was given."""
    cli.call("--env-id", toy(Moving), *cli.brief)
    assert {"checkpoint.pt", "policy.pt", "eval.csv", "train.csv"} <= files_in(cli.run_dir).keys()
    assert not list(Path(cli.folder, "elsewhere").rglob("*.pt"))
    cli.call("--resume", os.path.relpath(cli.run_dir, cli.folder), "--total-timesteps", "70")
    assert checkpoint_of(cli.run_dir)["state"]["step"] == 70
