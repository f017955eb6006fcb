"""benchmark/value_bias.py: numbers known by hand, exact restarts, and every script's snapshots."""

import sys

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, every_script
from gymnasium.envs.mujoco.ant_v4 import AntEnv
from gymnasium.envs.mujoco.hopper_v4 import HopperEnv
from gymnasium.envs.mujoco.inverted_pendulum_v4 import InvertedPendulumEnv

pytestmark = pytest.mark.benchmark
GAMMA = 0.99
Q = 10.0
ONE_SNAPSHOT = "--snapshot-frequency 110 --learning-starts 110".split()  # at the end, of networks that have not learned
only_td3 = pytest.mark.parametrize("cli", ["rac_td3.py"], indirect=True)


class Clock(InvertedPendulumEnv):
    """Rewards the number of its steps since the reset, by MuJoCo's own time, and ends after 9 of them."""

    def step(self, action):
        obs, *_ = super().step(action)
        count = round(self.data.time / self.dt)
        return obs, float(count), count == 9, False, {}


@pytest.fixture
def register(monkeypatch):
    """register(entry, **options): an environment for runs in this process; returns its id."""

    def make(entry, max_episode_steps: int = 50, **options) -> str:
        spec = gym.envs.registration.EnvSpec("Toy-v0", entry_point=entry, max_episode_steps=max_episode_steps, kwargs=options)
        monkeypatch.setitem(gym.registry, "Toy-v0", spec)
        return "Toy-v0"

    return make


@pytest.fixture
def measure(monkeypatch):
    """measure(run, arguments): the program in this process; the rows of bias.csv."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import value_bias

    def call(run, arguments="--pairs 6 --chosen 3 --continuations 2 --max-steps 30"):
        monkeypatch.setattr(sys, "argv", ["value_bias.py", str(run), *arguments.split()])
        value_bias.main()
        return pd.read_csv(run / "bias.csv", float_precision="round_trip")

    return call


def set_outputs(run, **outputs) -> None:
    """Make networks of a snapshot say the same everywhere: all parameters 0 but the last one, a bias of the output."""
    path = run / "snapshots/step-110.pt"
    content = torch.load(path, weights_only=True)
    for network, value in outputs.items():
        for tensor in content[network].values():
            tensor.zero_()
        *_, last_bias = content[network].values()
        last_bias.fill_(value)
        if network == "critic":  # members that differ, and whose mean is the value
            last_bias[0] += len(last_bias)
            last_bias -= 1
    torch.save(content, path)


def discounted(rewards) -> float:
    return sum(GAMMA**t * reward for t, reward in enumerate(rewards))


def check(rows, values, returns, **tolerance) -> None:
    """Mean and population standard deviation are those of equation 22."""
    bias = (np.array(values) - returns) / abs(np.mean(returns))
    measured = rows[["eval/bias_mean", "eval/bias_std"]].iloc[-1].tolist()
    assert measured == pytest.approx([bias.mean(), bias.std()], **tolerance)


@only_td3
def test_known_returns(cli, register, measure):
    """Pairs are the steps 1 to 7 of episodes in turn, which a time limit ends; continuations go on to the termination at 9."""
    run = cli.train("run", *ONE_SNAPSHOT, env_id=register(Clock, max_episode_steps=7))
    set_outputs(run, critic=Q)
    rows = measure(run, "--pairs 14 --chosen 14 --continuations 3 --max-steps 30")
    check(rows, Q, [discounted(range(n, 10)) for n in range(1, 8)])


def test_entropy_of_a_soft_q(cli, register, measure):
    """From the second step on a return has -alpha log pi, here of a narrow Gaussian in one dimension around 0."""
    run = cli.train("run", *ONE_SNAPSHOT, "--no-autotune", "--alpha", "0.2", env_id=register(Clock))
    set_outputs(run, critic=Q, actor=-10.0)  # the last bias is that of log std
    rows = measure(run, "--pairs 1 --chosen 1 --continuations 400 --max-steps 30")
    entropy = 0.5 * np.log(2 * np.pi * np.e) - 10
    soft_return = discounted(range(1, 10)) + discounted([0] + [0.2 * entropy] * 8)
    check(rows, Q, [soft_return], rel=0.005)


@only_td3
@pytest.mark.parametrize("entry", [HopperEnv, AntEnv])
def test_exact_restarts(cli, register, measure, entry, network):
    """From one initial state and without noise, a continuation is the rest of the episode."""
    env_id = register(entry, max_episode_steps=20, reset_noise_scale=0.0, terminate_when_unhealthy=False)
    run = cli.train("run", *ONE_SNAPSHOT, "--exploration-noise", "0", "--network", network, env_id=env_id)
    set_outputs(run, critic=Q)
    rows = measure(run, "--pairs 8 --chosen 8 --continuations 1 --max-steps 5")
    import rac_td3

    policy = rac_td3.load_policy(run)
    env = gym.make(env_id).unwrapped
    obs, _ = env.reset(seed=0)
    rewards = []
    for _ in range(12):
        obs, reward, *_ = env.step(policy(obs))
        rewards.append(reward)
    check(rows, Q, [discounted(rewards[n : n + 5]) for n in range(8)], rel=1e-5)


@every_script
def test_rows_of_a_run(cli, measure):
    """One for each snapshot; the same command measures only those that have none."""
    run = cli.train("run", *"--network simba --snapshot-frequency 7".split(), env_id="Hopper-v4")
    rows = measure(run)
    column = f"eval/best_{cli.script.CONDITION}"
    assert list(rows) == ["global_step", column, "eval/bias_mean", "eval/bias_std"]
    evaluations = pd.read_csv(run / "eval.csv", float_precision="round_trip")
    assert rows[["global_step", column]].equals(evaluations[["global_step", column]])
    assert np.isfinite(rows).all(None)
    rows.loc[0, "eval/bias_mean"] = 7.5
    rows[:1].to_csv(run / "bias.csv", index=False)
    assert measure(run)["eval/bias_mean"][0] == 7.5


def test_what_cannot_be_measured(cli, measure):
    run = cli.train("run", *ONE_SNAPSHOT)
    with pytest.raises(SystemExit, match="2"):
        measure(run)
    (run / "snapshots/step-110.pt").unlink()
    with pytest.raises(SystemExit, match="2"):
        measure(run)
    first, second = cli.capsys.readouterr().err.splitlines()[-2:]
    assert first.startswith("error: toy_envs:Point-v0 is not one of MuJoCo's environments")
    assert second.startswith(f"error: {run} has no snapshots")
