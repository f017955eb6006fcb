"""A run of baselines.py: its directory, held by one process, with checkpoint, logs, evaluation, progress bar and tracking."""

import contextlib
import copy
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
import time
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from tqdm import tqdm

import rac_sac
from rac_sac import FlatEnv, NonFinite, TrainingError, UserError, append_row, first_line, rank, seeds_for, tell, write_whole

PROGRAM = Path(__file__).resolve().with_name("baselines.py")
SOURCES = (PROGRAM, Path(__file__), Path(__file__).with_name("mbpo.py"))
LOSSES = {"critic_loss": "qf_loss", "actor_loss": "actor_loss", "ent_coef": "alpha", "ent_coef_loss": "alpha_loss"}
REPLAY = ("observations", "actions", "rewards", "dones", "timeouts", "next_observations")


def command(option: str, run_dir: Path, folder: Path) -> str:
    """What a user types in `folder` to resume or evaluate a run."""
    return shlex.join(["python", os.path.relpath(PROGRAM, folder), f"--{option}", str(run_dir)])


def load_file(path: Path, arguments) -> dict:
    """A checkpoint with `args` as that class; UserError if it is missing, damaged or another script's."""
    damaged = UserError(f"{path} is damaged or not a file of {PROGRAM.name}.")
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # torch.load does not look at the checksums
                raise damaged
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if content["script"] == PROGRAM.stem:
            return {**content, "args": arguments(**content["args"])}
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist; give the directory of a run.") from None
    except Exception:
        raise damaged from None
    raise UserError(f"{path} is a file of {content['script']}.py; {PROGRAM.name} goes on with its own runs only.")


def restore(model, content: dict) -> None:
    """Take over networks, optimisers, counters and replay of a checkpoint; UserError if they do not fit."""
    model.num_timesteps = content["step"]
    model._n_updates = content["updates"]
    # A copy, or Adam's moments would stay in the file, which the next checkpoint replaces.
    try:
        model.set_parameters(copy.deepcopy(content["parameters"]), device=model.device)
    except RuntimeError:
        raise UserError(f"the saved networks do not have the shapes that this {PROGRAM.name} gives them.") from None
    if content["log_ent_coef"] is not None:
        model.log_ent_coef.data.copy_(content["log_ent_coef"])
    replay = model.replay_buffer
    size = len(content["replay"]["rewards"])
    for name, rows in content["replay"].items():
        getattr(replay, name)[:size] = rows.numpy()
    replay.pos = content["position"]
    replay.full = size == replay.buffer_size


def play_returns(model, envs: list[FlatEnv], seeds: list[int]) -> tuple[np.ndarray, list[str]]:
    """Undiscounted returns (E,) of one deterministic episode from each seed, all E in step, and what went wrong.

    An episode with a non-finite number ends there.
    """
    obs = np.zeros((len(envs), *envs[0].observation_space.shape), np.float32)
    returns = np.zeros(len(envs))
    running = np.ones(len(envs), bool)
    faults = []

    def cut_short(i: int, fault: NonFinite) -> None:
        running[i] = False
        faults.append(f"episode {i + 1}: {fault}; the episode counts as far as it went")

    for i, seed in enumerate(seeds):
        try:
            obs[i], _ = envs[i].reset(seed=seed)
        except NonFinite as fault:
            cut_short(i, fault)
    while running.any():
        actions, _ = model.predict(obs, deterministic=True)
        for i in np.flatnonzero(running):
            try:
                obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            except NonFinite as fault:
                cut_short(i, fault)
                continue
            returns[i] += reward
            running[i] = not (terminated or truncated)
    return returns, faults


class Stopped(Exception):
    """A signal asks training to end."""


class EachStep(BaseCallback):
    """Calls a function between two environment steps, when the updates of the first one are done."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def _on_rollout_start(self) -> None:
        self.function()

    def _on_step(self) -> bool:
        return True


@dataclasses.dataclass
class State:
    """Where a run stands, beside its model."""

    row_step: int = 0  # where the last row of train.csv was written
    row_seconds: float = 0.0
    last: dict = dataclasses.field(default_factory=dict)  # evaluation
    best: dict = dataclasses.field(default_factory=dict)
    scripts: dict = dataclasses.field(default_factory=dict)  # commit by SHA-256 of all sources that have trained this run


class Run:
    """A run as a context, in a directory that this process holds.

    folder: where the process was started; shown: the run directory, as the user gave it.
    """

    def __init__(self, args, folder: Path, shown: Path, model, envs: list, stopped_by):
        self.args = args
        self.dir = folder / shown
        self.shown = shown
        self.resume_command = command("resume", shown, folder)
        self.evaluate_command = command("evaluate", shown, folder)
        self.model = model
        self.envs = envs  # that are evaluated in
        self.stopped_by = stopped_by
        self.state = State()
        self.losses = defaultdict(list)
        self.start = time.time()
        self.done_step = 0  # the last step that after_step() has seen
        self.saved_step = 0
        self.saved_time = 0.0
        self.tracker = None
        self.bar = None

    def take_over(self, saved: dict) -> None:
        """Go on from a checkpoint."""
        for name in ("train.csv", "eval.csv"):
            rac_sac.drop_rows(self.dir / name, saved["step"])
        restore(self.model, saved)
        self.state = State(**saved["state"])
        self.start -= saved["seconds"]
        self.done_step = self.saved_step = self.step

    def __enter__(self):
        self.write_config()
        self.tracker = rac_sac.start_tracking(self.args, self.dir, SOURCES) if self.args.track else None
        self.bar = tqdm(
            total=self.args.total_timesteps,
            initial=self.step,
            unit="step",
            dynamic_ncols=True,
            smoothing=0.05,
            desc=self.dir.name[:40],
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )
        return self

    @property
    def saved_args(self) -> dict:
        return dataclasses.asdict(dataclasses.replace(self.args, resume=None))

    @property
    def step(self) -> int:
        return self.model.num_timesteps

    @property
    def seconds(self) -> float:
        """Wall seconds of the whole run, over all of its processes."""
        return time.time() - self.start

    def write_config(self) -> None:
        """What made the run: arguments, versions, commit, device."""
        commit = rac_sac.git_commit(PROGRAM)
        packages = ("torch", "gymnasium", "mujoco", "numpy", "stable_baselines3", "sb3_contrib")
        versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
        cpu = f"{platform.processor() or platform.machine()}, threads: {torch.get_num_threads()}"
        device = torch.cuda.get_device_name() if self.model.device.type == "cuda" else cpu
        source = b"".join(path.read_bytes() for path in SOURCES)
        self.state.scripts[hashlib.sha256(source).hexdigest()] = commit
        config = {
            "script": PROGRAM.stem,
            "script_sha256": "+".join(self.state.scripts),
            "args": self.saved_args,
            "git_commit": commit,
            "versions": versions,
            "device": device,
        }
        write_whole(self.dir / "config.json", lambda file: file.write(json.dumps(config, indent=2).encode()))

    def go_on(self) -> None:
        """Train to the end, or until there is a signal."""
        self.save()
        if self.step < self.args.total_timesteps and not self.stopped_by:
            left = self.args.total_timesteps - self.step
            with contextlib.suppress(Stopped):
                self.model.learn(left, EachStep(self.after_step), log_interval=None, reset_num_timesteps=False)
                self.after_step()
        self.save()

    def after_step(self) -> None:
        """What is due when an environment step and its updates are done; TrainingError after a non-finite loss."""
        if self.step == self.done_step:
            return
        self.done_step = self.step
        self.bar.update()
        self.note_losses()
        learned = self.step - self.args.learning_starts
        last = self.step == self.args.total_timesteps
        if last or (learned >= 0 and learned % self.args.eval_frequency == 0):
            self.evaluate()
        if last or self.model.ep_info_buffer or self.step % 1000 == 0:
            self.log_training()
        if time.time() - self.saved_time >= self.args.checkpoint_seconds:
            self.save()
        if self.stopped_by:
            raise Stopped

    def note_losses(self) -> None:
        recorded = self.model.logger.name_to_value
        for key, name in LOSSES.items():
            value = recorded.pop(f"train/{key}", None)
            if value is None:
                continue
            if not math.isfinite(value):
                raise TrainingError(f"losses/{name} became non-finite")
            self.losses[key].append(value)

    def log(self, name: str, row: dict) -> None:
        """Append a row to a CSV file, with the header where the file is new, and to Weights & Biases."""
        append_row(self.dir / name, row)
        try:
            if self.tracker:
                self.tracker.log({key: value for key, value in row.items() if value is not None})
        except Exception as error:  # its service has died
            tell(f"Weights & Biases has failed, and the run goes on without it: {first_line(error)}")
            self.tracker = None

    def log_training(self) -> None:
        """A row of train.csv: averages since the row before, and the episode that has ended, if one has."""
        state = self.state
        seconds = self.seconds
        ended = self.model.ep_info_buffer
        episode = ended.pop() if ended else {"r": None, "l": None}
        row = {
            "global_step": self.step,
            "charts/wall_seconds": round(seconds, 1),
            "charts/SPS": round((self.step - state.row_step) / max(seconds - state.row_seconds, 1e-9), 2),
            **{f"losses/{name}": np.mean(self.losses[key]) if self.losses[key] else None for key, name in LOSSES.items()},
            "charts/episodic_return": episode["r"],
            "charts/episodic_length": episode["l"],
            **getattr(self.model, "model_metrics", {}),  # of MBPO
        }
        self.log("train.csv", row)
        state.row_step = self.step
        state.row_seconds = seconds
        self.losses.clear()

    def evaluate(self) -> None:
        """A row of eval.csv. The std over episodes is the population one."""
        returns, faults = play_returns(self.model, self.envs, seeds_for(self.args.seed, 0, 0, self.args.eval_episodes))
        last = {"step": self.step, "best_return": float(returns.mean()), "best_return_std": float(returns.std())}
        if faults:
            last["cut_short"] = True
        for fault in faults:
            tell(f"evaluation of step {self.step}, {fault}")
        self.state.last = last
        if not self.state.best or rank(last) >= rank(self.state.best):
            self.state.best = last
        values = {f"eval/{name}": last[name] for name in ("best_return", "best_return_std")}
        self.log("eval.csv", {"global_step": self.step, "charts/wall_seconds": round(self.seconds, 1), **values})
        self.bar.set_postfix_str(f"evaluated {last['best_return']:.1f}, step {self.step}", refresh=False)

    def save(self) -> None:
        """Write the checkpoint, tensors and plain Python; TrainingError where that fails, with the one before still there."""
        model = self.model
        buffer = model.replay_buffer
        content = {
            "script": PROGRAM.stem,
            "format": 1,  # by which the scripts know that this is not theirs
            "args": self.saved_args,
            "state": vars(self.state),
            "seconds": self.seconds,
            "step": self.step,
            "updates": model._n_updates,
            "parameters": model.get_parameters(),
            "replay": {name: torch.from_numpy(getattr(buffer, name)[: buffer.size()]) for name in REPLAY},
            "position": buffer.pos,
            "log_ent_coef": getattr(model, "log_ent_coef", None),
        }
        write_whole(self.dir / "checkpoint.pt", lambda file: torch.save(content, file))
        self.saved_step = self.step
        self.saved_time = time.time()

    def __exit__(self, kind, error, traceback) -> None:
        """Close what is open; say what is left of a run that has failed, and how to go on."""
        self.bar.close()
        with contextlib.suppress(Exception):
            if self.tracker:  # 255 is wandb's own exit code of an interrupted run
                self.tracker.finish(exit_code=1 if error else 0 if self.step == self.args.total_timesteps else 255)
        left = f"the last checkpoint is of step {self.saved_step}; go on with: {self.resume_command}"
        if isinstance(error, TrainingError | torch.OutOfMemoryError):
            raise TrainingError(f"stopped at step {self.step}: {first_line(error)}; {left}") from None
        if isinstance(error, Exception):
            tell(f"stopped at step {self.step} by the error below; {left}")
