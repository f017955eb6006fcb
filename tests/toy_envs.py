"""Small environments with one property each: those that other processes need, as `--env-id toy_envs:Name-v0`.

Tests in their own process make more of them from Counter, with the fixture `toy`.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np


def in_training() -> bool:
    """Whether this is the training process, not a worker of an evaluation."""
    return multiprocessing.parent_process() is None


class Counter(gym.Env):
    """Observes the steps since the reset, has a reward of 1, and ends by termination or truncation after `length` steps.

    Actions outside of low and high are refused, and so is a step after the end of an episode. `change` is called with the
    environment in every step, after counting it; what it returns (obs, reward, terminated, truncated by name) is returned
    in place of the environment's own. total: steps over all episodes; action: the last one.
    """

    number = 0  # of the environments that a test has made, this one's; the first one trains

    def __init__(self, length=7, ends="truncation", low=(-2.0,), high=(4.0,), change=None):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
        self.action_space = gym.spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
        self.length = length
        self.ends = ends
        self.change = change or (lambda env: {})
        self.total = 0
        self.over = True

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.over = False
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        assert not self.over, "a step after the end of the episode"
        self.action = action
        self.count += 1
        self.total += 1
        self.over = self.count == self.length
        result = {
            "obs": np.array([self.count], np.float32),
            "reward": 1.0,
            "terminated": self.over and self.ends == "termination",
            "truncated": self.over and self.ends == "truncation",
        }
        result.update(self.change(self) or {})
        return *result.values(), {}


def since(step, **change):
    """From an environment's step `step` on, the change."""
    return lambda env: change if env.total >= step else {}


def does(action, step=1, where=lambda: True):
    """At an environment's step `step`, action()."""
    return lambda env: action() if env.total == step and where() else None


def raises(error):
    raise error


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


class TwoArguments(Exception):
    """An exception that pickle cannot make again: it wants two arguments, and keeps one."""

    def __init__(self, what, where):
        super().__init__(f"{what} in {where}")


class Spaces(Counter):
    """An environment with the spaces it is told, which observes something at random."""

    def __init__(self, obs="box", action="narrow"):
        super().__init__()
        box = gym.spaces.Box(-1.0, 1.0, (2,))
        choices = {
            "box": box,
            "narrow": self.action_space,
            "unbounded": gym.spaces.Box(-np.inf, np.inf, (2,)),
            "dict": gym.spaces.Dict({"a": box, "b": gym.spaces.Box(-1.0, 1.0, (1,))}),
            "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "discrete": gym.spaces.Discrete(3),
            "wide": gym.spaces.Box(-1.0, 1.0, (200,)),
            "empty": gym.spaces.Box(-1.0, 1.0, (0,)),
            "matrix": gym.spaces.Box(-3.0, 3.0, (2, 3)),
            "text": gym.spaces.Graph(box, None),
        }
        self.observation_space = choices[obs]
        self.action_space = choices[action]

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), *super().step(action)[1:]


class NoActionSpace(gym.Env):
    """Its author has forgotten the action space."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))


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


class Threaded(Counter):
    """Has a thread for which Python waits at its end; close() stops it if `stops`."""

    def __init__(self, stops=True):
        super().__init__()
        self.stops = stops
        self.closed = threading.Event()
        threading.Thread(target=self.closed.wait).start()

    def close(self):
        if self.stops:
            self.closed.set()


class Simulator(Counter):
    """Says by a file closed.<process>.<number> that it has been closed; with `stuck` it does not come back from that."""

    made = 0

    def __init__(self, stuck=False):
        super().__init__()
        self.stuck = stuck
        self.own = Simulator.made
        Simulator.made += 1

    def close(self):
        Path(f"closed.{os.getpid()}.{self.own}").touch()
        if self.stuck and in_a_worker():
            time.sleep(1000)


class Moving(Counter):
    """Changes the current directory in every reset."""

    def reset(self, seed=None, options=None):
        Path("elsewhere").mkdir(exist_ok=True)
        os.chdir("elsewhere")
        return super().reset(seed=seed)


class Endless(Counter):
    """Episodes do not end. The file `endless` says that an evaluation has begun, whose environment is not the first one."""

    made = 0

    def __init__(self):
        super().__init__(length=-1, ends="never")
        Endless.made += 1
        self.evaluates = Endless.made > 1

    def step(self, action):
        if self.evaluates:
            Path("endless").touch()
            time.sleep(0.001)
        return super().step(action)


class Held(gym.Wrapper):
    """Hopper-v4 that waits for a test to act: in training at its step HOLD_AT, in workers at their first if HOLD_WORKERS is 1.

    It says so by a file held.<process>, and goes on when there is a file `release`. It raises at step FAIL_AT of training.
    """

    def __init__(self):
        super().__init__(gym.make("Hopper-v4", disable_env_checker=True))
        self.steps = 0
        self.hold_at = int(os.environ.get("HOLD_AT" if in_training() else "HOLD_WORKERS", 0))

    def step(self, action):
        self.steps += 1
        if self.steps == int(os.environ.get("FAIL_AT", -1)):
            raise RuntimeError("the simulator is unstable")
        if self.steps == self.hold_at and not Path("release").exists():
            Path(f"held.{os.getpid()}").touch()
            while not Path("release").exists():
                time.sleep(0.01)
        return super().step(action)


def in_a_worker() -> bool:
    return not in_training()


for name, entry, kwargs in (
    ("Hopper-v0", Held, {}),
    ("Truncating-v0", Counter, {}),
    ("Exits-v0", Counter, {"change": does(lambda: sys.exit(3), where=in_a_worker)}),
    ("Interrupts-v0", Counter, {"change": does(lambda: raises(KeyboardInterrupt()), where=in_a_worker)}),
    ("TwoArguments-v0", Counter, {"change": does(lambda: raises(TwoArguments("a fault", "the simulator")), where=in_a_worker)}),
    ("InfLoss-v0", Counter, {"change": since(250, reward=1e30)}),  # finite itself, but its square is not in float32
    ("Deadly-v0", Counter, {"change": does(kill_self, step=250, where=in_training)}),
    ("Start-v0", Start, {}),
    ("Wide-v0", Spaces, {"obs": "wide"}),
    ("DiscreteAction-v0", Spaces, {"action": "discrete"}),
    ("Closing-v0", Threaded, {}),
    ("LeftBehind-v0", Threaded, {"stops": False}),
    ("Endless-v0", Endless, {}),
    ("Simulator-v0", Simulator, {}),
    ("StuckSimulator-v0", Simulator, {"stuck": True}),
):
    gym.register(name, entry, kwargs=kwargs)
