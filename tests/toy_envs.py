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

LENGTH = 7  # of an episode
FIRST_SEED = int(np.random.SeedSequence([1, 3]).generate_state(1)[0] >> 2)  # of the training episodes of a run with seed 1


def in_a_worker() -> bool:
    """Whether this process only evaluates."""
    return multiprocessing.parent_process() is not None


class Point(gym.Env):
    """A point on a line, which starts somewhere, and is rewarded near 1; actions move it, episodes have LENGTH steps.

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
        self.episode = (seed or 0) - FIRST_SEED
        self.count = 0
        self.position = self.np_random.random()
        return self.observe(), {}

    def observe(self):
        return np.array([self.position, self.count], np.float32)

    def step(self, action):
        assert self.action_space.contains(action)
        assert self.count < LENGTH
        self.count += 1
        self.step_of_run = self.episode * LENGTH + self.count if self.episode in range(1000) else 0
        if self.step_of_run:
            self.actions.append(action)
            self.events.pop(self.step_of_run, int)()
        self.position = 0.9 * self.position + 0.1 * float(np.sum(action))
        over = self.count == LENGTH
        return self.observe(), -abs(self.position - 1), over and self.terminates, over and not self.terminates, {}


class Start(Point):
    """The return is where the episode has started, whatever the actions."""

    def step(self, action):
        start = self.position
        obs, _, *rest = super().step(action)
        return obs, start if self.count == 1 else 0.0, *rest


class Returns(Point):
    """From step 30 of the run on a result of step(), by its place, is `value`."""

    def __init__(self, place, value):
        super().__init__()
        self.place, self.value = place, value

    def step(self, action):
        results = [*super().step(action)]
        if self.step_of_run >= 30:
            results[self.place] = self.value
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
        vars(self).update(spaces)


class InWorkers(Point):
    """Does something in a worker: when it is made, reset, or makes a step."""

    def __init__(self, does, where="step"):
        super().__init__()
        self.does, self.where = does, where
        self.do("init")

    def do(self, where):
        if in_a_worker() and where == self.where:
            self.does()

    def reset(self, **options):
        self.do("reset")
        return super().reset(**options)

    def step(self, action):
        self.do("step")
        return super().step(action)


class Held(InWorkers):
    """Waits: in workers for ever, in training at step 110 for a file `go`."""

    def step(self, action):
        result = super().step(action)
        while self.step_of_run == 110 and not Path("go").exists():
            self.does()
        return result


def wait() -> None:
    """For ever in workers, else for a moment; it is said by a file held.<process>."""
    Path(f"held.{os.getpid()}").touch()
    time.sleep(1000 if in_a_worker() else 0.01)


def die(times: int) -> None:
    """Kill this process, unless as many have died."""
    if len(list(Path().glob("died.*"))) < times:
        Path(f"died.{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError("the simulator is unstable")


class OfTwo(BaseException):
    """Cannot be unpickled, and is no Exception."""

    def __init__(self, joint, angle):
        super().__init__(f"joint {joint} at {angle}")


def fail_badly() -> None:
    raise OfTwo(3, 90)


class Simulator(Point):
    """Has a process of its own, which close() ends; its id is kept in the folder pids."""

    def __init__(self, start, then=None, then_here=None, action_space=None):
        super().__init__()
        self.then_here = then_here
        self.action_space = action_space or self.action_space
        self.process, self.then = start(), then
        Path("pids").mkdir(exist_ok=True)
        Path("pids", str(self.process.pid)).touch()

    def close(self):
        self.process.terminate()
        (self.process.wait if hasattr(self.process, "wait") else self.process.join)()
        if self.then and in_a_worker():
            self.then()
        if self.then_here:
            self.then_here()


def start_program() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])


def start_fork() -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    process.start()
    return process


class LateFork(Simulator):
    """Has its process from its first reset on, when training's workers run already; in a worker it dies `times` times."""

    def __init__(self, times):
        Point.__init__(self)
        self.times, self.process = times, None

    def reset(self, **options):
        if not self.process:
            super().__init__(start_fork)
        return super().reset(**options)

    def step(self, action):
        if in_a_worker():
            die(self.times)
        return super().step(action)

    def close(self):
        if self.process:
            super().close()


class Consuming(Start):
    """Takes a keyword argument out of the dictionary that it is given: the return is 100."""

    def __init__(self, config):
        super().__init__()
        self.start = config.pop("start", -1.0)

    def reset(self, **options):
        super().reset(**options)
        self.position = self.start
        return self.observe(), {}


def wrapped() -> gym.Env:
    """Recorded arguments that cannot be compared with those of a copy."""
    bounds = np.array([-0.5], np.float32), np.array([0.5], np.float32)
    return gym.wrappers.RescaleAction(gym.wrappers.TransformReward(Point(), lambda reward: 2 * reward), *bounds)


class Random(Point):
    """Draws from the generators that belong to nobody, when it is made, reset, and moves."""

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


class Moving(Point):
    """Goes to the folder above, in which it then is."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.move("init")

    def move(self, where):
        if where == self.where:
            os.chdir("..")

    def reset(self, **options):
        self.move("reset")
        return super().reset(**options)

    def step(self, action):
        self.move("step")
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
    ("Start", Start, {}),
    ("RewardArray", RewardArray, {}),
    ("Wide", Wide, {}),
    ("SameArray", SameArray, {}),
    ("Nested", Nested, {}),
    ("Held", Held, {"does": wait}),
    ("DiesOnce", InWorkers, {"does": partial(die, 1)}),
    ("Dies", InWorkers, {"does": partial(die, 100)}),
    ("Unstable", InWorkers, {"does": fail_badly}),
    ("UnstableInit", InWorkers, {"does": fail_badly, "where": "init"}),
    ("Exits", InWorkers, {"does": sys.exit, "where": "reset"}),
    ("Program", Simulator, {"start": start_program}),
    ("Fork", Simulator, {"start": start_fork}),
    ("HangingClose", Simulator, {"start": start_program, "then": partial(time.sleep, 1000)}),
    ("FailingClose", Simulator, {"start": start_program, "then": fail}),
    ("UnfitProgram", Simulator, {"start": start_program, "action_space": gym.spaces.Discrete(3)}),
    ("Random", Random, {}),
    ("Forks", LateFork, {"times": 1}),
    ("LateFork", LateFork, {"times": 0}),
    ("Consuming", Consuming, {"config": {"start": 100.0}}),
    ("Wrapped", wrapped, {}),
    ("FailingCloseHere", Simulator, {"start": start_program, "then_here": fail}),
    ("MovingInit", Moving, {"where": "init"}),
    ("MovingReset", Moving, {"where": "reset"}),
    ("MovingStep", Moving, {"where": "step"}),
    ("OddObs", Returns, {"place": 0, "value": np.zeros(3, np.float32)}),
    ("HugeReward", Returns, {"place": 1, "value": 1e30}),  # finite itself, but its square is not in float32
    ("NanReward", Returns, {"place": 1, "value": np.nan}),
    ("NanObs", Returns, {"place": 0, "value": np.array([np.nan, 1], np.float32)}),
    ("Terminated2", Returns, {"place": 2, "value": 2}),
    ("DiscreteAction", Unsupported, {"action_space": gym.spaces.Discrete(3)}),
    ("Unbounded", Unsupported, {"action_space": gym.spaces.Box(-np.inf, np.inf, (2,))}),
    ("Graph", Unsupported, {"observation_space": gym.spaces.Graph(gym.spaces.Discrete(3), None)}),
):
    gym.register(f"{name}-v0", entry, max_episode_steps=50, kwargs=options)
gym.register("Endless-v0", Point)
