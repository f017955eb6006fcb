"""Small environments with one property each, used as `--env-id toy_envs:Name-v0`."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np


class Counter(gym.Env):
    """Observation: the steps since the reset. Ends by termination or truncation after `length` steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Box(-2.0, 4.0, (1,))

    def __init__(self, length=7, ends="truncation", bad=None, bad_at=250):
        self.length, self.ends, self.bad, self.bad_at, self.total = length, ends, bad, bad_at, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([0.0]), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.count += 1
        self.total += 1
        obs, reward, bad = np.array([float(self.count)]), 1.0, self.total >= self.bad_at
        if bad and self.bad == "observation":
            obs[0] = np.nan
        if bad and self.bad == "reward":
            reward = np.inf
        if bad and self.bad == "loss":
            reward = 1e30  # finite itself, but its square is not in float32
        if bad and self.bad == "death" and multiprocessing.parent_process() is None:  # of training, not of a worker
            os.kill(os.getpid(), signal.SIGKILL)
        over = self.count == self.length
        return obs, reward, over and self.ends == "termination", over and self.ends == "truncation", {}


class Spaces(Counter):
    """An environment with the spaces it is told, which observes something at random."""

    def __init__(self, obs="box", action="narrow"):
        super().__init__()
        box, image = gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.Box(0, 255, (2, 2, 3), np.uint8)
        unbounded, narrow = gym.spaces.Box(-np.inf, np.inf, (2,)), gym.spaces.Box(-2.0, 4.0, (1,))
        mixed = gym.spaces.Dict({"a": box, "b": gym.spaces.Box(-1.0, 1.0, (1,))})
        choices = {"box": box, "unbounded": unbounded, "dict": mixed, "image": image, "discrete": gym.spaces.Discrete(3)}
        self.observation_space, self.action_space = choices[obs], {**choices, "narrow": narrow}[action]

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), *super().step(action)[1:]


class Start(Counter):
    """Episodes of one step, which is rewarded with what the reset has drawn from its seed."""

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.start = self.np_random.random()
        return obs, info

    def step(self, action):
        obs, _, _, truncated, info = super().step(action)
        return obs, self.start, True, truncated, info


class OldInterface(Counter):
    """Four results of step, as before Gym 0.26."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


class Lottery(Counter):
    """Not deterministic: its noise does not come from its seed."""

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + np.random.default_rng().normal(), *rest


class Held(gym.Wrapper):
    """Hopper-v4 that waits for a test to act: in training at its step HOLD_AT, in workers at their first if HOLD_WORKERS is 1.

    It says so by a file held.<process>, and goes on when there is a file `release`. It raises at step FAIL_AT of training;
    with FAIL=socket at step 320, an error of the system, with FAIL=reset at the first reset after that.
    """

    def __init__(self):
        super().__init__(gym.make("Hopper-v4", disable_env_checker=True))
        self.steps, self.in_training = 0, multiprocessing.parent_process() is None
        self.hold_at = int(os.environ.get("HOLD_AT" if self.in_training else "HOLD_WORKERS", 0))

    def reset(self, **options):
        if self.steps > 320 and self.in_training and os.environ.get("FAIL") == "reset":
            raise RuntimeError("the simulator is unstable")
        return super().reset(**options)

    def step(self, action):
        self.steps += 1
        if self.steps == int(os.environ.get("FAIL_AT", -1)):
            raise RuntimeError("the simulator is unstable")
        if self.steps == 320 and self.in_training and os.environ.get("FAIL") == "socket":
            raise BrokenPipeError("the simulator is gone")
        if self.steps == self.hold_at and not Path("release").exists():
            Path(f"held.{os.getpid()}").touch()
            while not Path("release").exists():
                time.sleep(0.01)
        return super().step(action)


for name, entry, kwargs in (
    ("Hopper-v0", Held, {}),
    ("Truncating-v0", Counter, {}),
    ("Terminating-v0", Counter, {"ends": "termination"}),
    ("NanObservation-v0", Counter, {"bad": "observation"}),
    ("InfReward-v0", Counter, {"bad": "reward"}),
    ("InfLoss-v0", Counter, {"bad": "loss"}),
    ("Deadly-v0", Counter, {"bad": "death"}),
    ("Lottery-v0", Lottery, {}),
    ("Start-v0", Start, {}),
    ("DictObs-v0", Spaces, {"obs": "dict"}),
    ("Image-v0", Spaces, {"obs": "image"}),
    ("OldInterface-v0", OldInterface, {}),
    ("DiscreteAction-v0", Spaces, {"obs": "box", "action": "discrete"}),
    ("UnboundedAction-v0", Spaces, {"obs": "box", "action": "unbounded"}),
):
    gym.register(name, entry, kwargs=kwargs)
