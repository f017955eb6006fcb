"""Small environments with one property each, as `--env-id toy_envs:Name-v0`, for this process and for others."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np

EPISODE_LENGTH = 7
EVALUATION, FRESH_EPISODES, TRAINING = 0, 1, 3  # what an environment's seeds are for


def first_seed(purpose: int, seed: int = 1) -> int:
    """The first of the consecutive seeds of a run's episodes."""
    return int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0] >> 2)


def in_a_worker() -> bool:
    """Whether this process only evaluates."""
    return multiprocessing.parent_process() is not None


def in_workers(call, *arguments) -> None:
    """Calls it, but not in training's process."""
    if in_a_worker():
        call(*arguments)


class Point(gym.Env):
    """A point on a line, which starts somewhere, and is rewarded near 1; actions move it, episodes have EPISODE_LENGTH
    steps.

    Refuses actions outside of its bounds, and a step after the end. `step_of_run`: in a run with seed 1, the environment step
    of training, also after resuming; 0 in evaluations. Tests change `events`: step of the run -> what is called there, once;
    and `actions`, to which those of training are appended.
    """

    events: dict = {}  # noqa: RUF012
    actions: list = []  # noqa: RUF012
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))

    def __init__(self, low=(-2.0,), high=(4.0,), dtype=np.float32, terminates=False):
        self.action_space = gym.spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
        self.terminates = terminates

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode = (seed or 0) - first_seed(TRAINING)
        self.count = 0
        self.position = self.np_random.random()
        return self.observe(), {}

    def observe(self):
        return np.array([self.position, self.count], np.float32)

    def step(self, action):
        assert self.action_space.contains(action)
        assert self.count < EPISODE_LENGTH
        self.count += 1
        is_training = 0 <= self.episode < 1000  # the seeds of evaluations are far away
        self.step_of_run = self.episode * EPISODE_LENGTH + self.count if is_training else 0
        if is_training:
            self.actions.append(action)
        event = self.events.pop(self.step_of_run, None)
        if event:
            event()
        self.position = 0.9 * self.position + 0.1 * float(np.sum(action))
        over = self.count == EPISODE_LENGTH
        return self.observe(), -abs(self.position - 1), over and self.terminates, over and not self.terminates, {}


class ReturnsItsStart(Point):
    """The return is where the episode has started, whatever the actions."""

    def step(self, action):
        start = self.position
        obs, _, *rest = super().step(action)
        reward = start if self.count == 1 else 0.0
        return obs, reward, *rest


class WrongResult(Point):
    """From step 15 of the run on the entry `index` of what step() returns is `value`."""

    def __init__(self, index, value):
        super().__init__()
        self.index, self.value = index, value

    def step(self, action):
        results = [*super().step(action)]
        if self.step_of_run >= 15:
            results[self.index] = self.value
        return tuple(results)


class RewardArray(Point):
    """Rewards have the shape (1,)."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


class Wide(Point):
    """Observes 6000 numbers."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (6000,))

    def observe(self):
        return np.full(6000, self.position, np.float32)


class SameArray(Point):
    """One array for all observations."""

    array = np.zeros(2, np.float32)

    def observe(self):
        self.array[:] = super().observe()
        return self.array


class Nested(Point):
    """Observes a dictionary of an integer and a tuple: 8 + 4 + 1 numbers when it is flat."""

    observation_space = gym.spaces.Dict(
        count=gym.spaces.Discrete(8),
        pair=gym.spaces.Tuple((gym.spaces.Box(0, 255, (2, 2), np.uint8), gym.spaces.Box(-1.0, 1.0, (1,)))),
    )

    def observe(self):
        image = np.array([[self.count, 1], [2, 255]], np.uint8)
        return {"count": self.count, "pair": (image, np.full(1, 0.5, np.float32))}


class Unsupported(Point):
    """Has spaces that the scripts cannot learn with."""

    def __init__(self, **spaces):
        super().__init__()
        for name, space in spaces.items():
            setattr(self, name, space)


class CallsAt(Point):
    """Calls something whenever it is made (`at` is "init"), reset, or makes a step."""

    def __init__(self, call, at="step"):
        super().__init__()
        self.call, self.at = call, at
        self.reached("init")

    def reached(self, moment):
        if moment == self.at:
            self.call()

    def reset(self, **options):
        self.reached("reset")
        return super().reset(**options)

    def step(self, action):
        self.reached("step")
        return super().step(action)


class Held(Point):
    """Waits in a step, which a file held.<process> says: in workers for ever, in training at step 103 for a file `go`."""

    def step(self, action):
        result = super().step(action)
        if in_a_worker() or self.step_of_run == 103:
            Path(f"held.{os.getpid()}").touch()
        in_workers(time.sleep, 1000)
        while self.step_of_run == 103 and not Path("go").exists():
            time.sleep(0.01)
        return result


def die_at_most(times: int) -> None:
    """Kill this process, unless `times` processes have been killed so before."""
    if len(list(Path().glob("died.*"))) < times:
        Path(f"died.{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError("the simulator is unstable")


class Unpicklable(BaseException):
    """Takes two arguments, so that it cannot be unpickled; and it is no Exception."""

    def __init__(self, joint, angle):
        super().__init__(f"joint {joint} at {angle}")


def raise_unpicklable() -> None:
    raise Unpicklable(3, 90)


class Simulator(Point):
    """Has a process of its own, which close() ends; its id is kept in the folder pids."""

    def __init__(self, start=None, on_close=None, action_space=None):
        super().__init__()
        self.on_close = on_close
        self.action_space = action_space or self.action_space
        self.process = None
        if start:
            self.start_process(start)

    def start_process(self, start):
        self.process = start()
        Path("pids").mkdir(exist_ok=True)
        Path("pids", str(self.process.pid)).touch()

    def close(self):
        if self.process:
            self.process.terminate()
        if isinstance(self.process, subprocess.Popen):
            self.process.wait()
        elif self.process:
            self.process.join()
        if self.on_close:
            self.on_close()


def start_program() -> subprocess.Popen:
    return subprocess.Popen(["sleep", "1000"])


def start_fork() -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    process.start()
    return process


class LateFork(Simulator):
    """Has its process from its first reset on, when training's workers run already; in workers it dies `times` times."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def reset(self, **options):
        if not self.process:
            self.start_process(start_fork)
        return super().reset(**options)

    def step(self, action):
        in_workers(die_at_most, self.times)
        return super().step(action)


class Consuming(ReturnsItsStart):
    """Takes its start, 100, out of the dictionary that it is given; where another has taken it already, it is -1."""

    def __init__(self, config):
        super().__init__()
        self.start = config.pop("start", -1.0)

    def reset(self, **options):
        super().reset(**options)
        self.position = self.start
        return self.observe(), {}


def wrapped() -> gym.Env:
    """Wrapped in its entry point; the wrappers note arguments (a function, arrays) that never equal those of a copy."""
    bounds = np.array([-0.5], np.float32), np.array([0.5], np.float32)
    return gym.wrappers.RescaleAction(gym.wrappers.TransformReward(Point(), lambda reward: 2 * reward), *bounds)


class DrawsFromGlobals(Point):
    """Draws from the global generators of NumPy and Python, when it is made, reset, and makes a step."""

    def __init__(self):
        super().__init__()
        self.mass = np.random.rand() + random.random()

    def reset(self, **options):
        super().reset(**options)
        self.position = np.random.rand()
        return self.observe(), {}

    def step(self, action):
        self.position += self.mass * (np.random.normal() + random.gauss(0, 1))
        return super().step(action)


for name, entry, options in (
    ("Point", Point, {}),
    ("Terminating", Point, {"terminates": True}),
    ("Far", Point, {"low": (-1000.0, 5.0), "high": (2000.0, 5.5)}),
    (
        "Matrix",
        Point,
        {"low": ((-3.0, 0.1), (-1.0, -0.7), (1.0, 0.3)), "high": ((3.0, 0.3), (2.0, -0.1), (5.0, 0.7)), "dtype": float},
    ),
    ("Scalar", Point, {"low": -2.0, "high": 4.0}),
    ("ReturnsItsStart", ReturnsItsStart, {}),
    ("RewardArray", RewardArray, {}),
    ("Wide", Wide, {}),
    ("SameArray", SameArray, {}),
    ("Nested", Nested, {}),
    ("Held", Held, {}),
    ("DiesOnce", CallsAt, {"call": partial(in_workers, die_at_most, 1)}),
    ("Dies", CallsAt, {"call": partial(in_workers, die_at_most, 100)}),
    ("Unstable", CallsAt, {"call": partial(in_workers, raise_unpicklable)}),
    ("UnstableInit", CallsAt, {"call": partial(in_workers, raise_unpicklable), "at": "init"}),
    ("Exits", CallsAt, {"call": partial(in_workers, sys.exit), "at": "reset"}),
    ("Program", Simulator, {"start": start_program}),
    ("Fork", Simulator, {"start": start_fork}),
    ("HangingClose", Simulator, {"start": start_program, "on_close": partial(in_workers, time.sleep, 1000)}),
    ("FailingClose", Simulator, {"start": start_program, "on_close": partial(in_workers, fail)}),
    ("UnfitProgram", Simulator, {"start": start_program, "action_space": gym.spaces.Discrete(3)}),
    ("DrawsFromGlobals", DrawsFromGlobals, {}),
    ("LateForkDiesOnce", LateFork, {"times": 1}),
    ("LateFork", LateFork, {"times": 0}),
    ("Consuming", Consuming, {"config": {"start": 100.0}}),
    ("Wrapped", wrapped, {}),
    ("FailingCloseHere", Simulator, {"start": start_program, "on_close": fail}),
    ("ChangesFolderInit", CallsAt, {"call": partial(os.chdir, ".."), "at": "init"}),
    ("ChangesFolderReset", CallsAt, {"call": partial(os.chdir, ".."), "at": "reset"}),
    ("ChangesFolderStep", CallsAt, {"call": partial(os.chdir, ".."), "at": "step"}),
    ("OddObs", WrongResult, {"index": 0, "value": np.zeros(3, np.float32)}),
    ("HugeReward", WrongResult, {"index": 1, "value": 1e30}),  # finite itself, but its square is not in float32
    ("NanReward", WrongResult, {"index": 1, "value": np.nan}),
    ("NanObs", WrongResult, {"index": 0, "value": np.array([np.nan, 1], np.float32)}),
    ("Terminated2", WrongResult, {"index": 2, "value": 2}),
    ("DiscreteAction", Unsupported, {"action_space": gym.spaces.Discrete(3)}),
    ("Unbounded", Unsupported, {"action_space": gym.spaces.Box(-np.inf, np.inf, (2,))}),
    ("Graph", Unsupported, {"observation_space": gym.spaces.Graph(gym.spaces.Discrete(3), None)}),
):
    gym.register(f"{name}-v0", entry, max_episode_steps=50, kwargs=options)
gym.register("Endless-v0", Point)
