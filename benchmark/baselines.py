"""The paper's baselines SAC, TD3, TQC and TQC20 by Stable-Baselines3, as runs beside those of the scripts.

    python benchmark/baselines.py --algorithm tqc --env-id Hopper-v4

Run directory, evaluation (the same steps, the same initial states) and command line are those of rac_sac.py; there is one policy
and no beta. benchmark/README.md has the hyperparameters and their sources. Resuming goes on from networks, optimisers and replay
with a new episode and new random numbers: it is not bit for bit what an uninterrupted run would have been.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch
import tyro
from experiments import STEPS, of_environment
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from tqdm import tqdm

import rac_sac
from rac_sac import FlatEnv, TrainingError, UserError, append_row, first_line, hold, merged, resumed, seeds_for, tell, write_whole

SCRIPT = Path(__file__).stem
QUANTILES_TO_DROP = {"Hopper": 5, "HalfCheetah": 0, "": 2}  # of each of TQC's critics, by its paper
LOSSES = {"critic_loss": "qf_loss", "actor_loss": "actor_loss", "ent_coef": "alpha", "ent_coef_loss": "alpha_loss"}
REPLAY = ("observations", "actions", "rewards", "dones", "timeouts", "next_observations")


@dataclasses.dataclass
class Args:
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    algorithm: Literal["sac", "td3", "tqc", "tqc20"] = "sac"  # the baseline; tqc20 is TQC with 20 gradient steps a step
    exp_name: str | None = None  # the name of this experiment; by default the algorithm's
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1  # networks, noise, environments and evaluation all follow from it
    cuda: bool | None = None  # whether to train on the GPU; by default, when one is present
    track: bool = False  # log to Weights & Biases (goes on offline when there is no key or no network)
    wandb_project_name: str = "realistic-actor-critic"  # the Weights & Biases project
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases project
    run_root: str = "runs"  # the folder in which run directories are made
    run_name: str | None = None  # the run directory's name; by default <env_id>__<exp_name>__<seed>__<time>
    checkpoint_seconds: NonNegativeFloat = 300.0  # seconds between two checkpoints
    resume: str | None = None  # a run directory to go on with, not bit for bit; its arguments win, total_timesteps may grow
    evaluate: str | None = None  # a run directory to evaluate; its arguments win, eval_episodes and seed aside
    env_id: str = "Hopper-v4"  # the id of the Gymnasium environment
    total_timesteps: PositiveInt | None = None  # environment steps of the run; by default 1e6 for Humanoid, 3e5 for others
    learning_starts: NonNegativeInt = 5000  # environment steps with uniformly random actions before learning starts
    buffer_size: PositiveInt = 1_000_000  # replay capacity
    batch_size: PositiveInt = 256  # the batch size sampled from the replay
    utd: PositiveInt | None = None  # gradient steps per environment step; by default 20 for tqc20, 1 for others
    hidden_dim: PositiveInt = 256  # width of the hidden layers; TQC's critics are twice as wide
    eval_frequency: PositiveInt = 1000  # environment steps between evaluations
    eval_episodes: PositiveInt = 10  # episodes per evaluation, from the same initial states for all


def check_args(args: Args) -> Args:
    """`args` with the defaults of environment and algorithm filled in; UserError for values that make no sense."""
    try:
        args = TypeAdapter(Args).validate_python(dataclasses.asdict(args))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{first['loc'][0]} is {first['input']}; {first['msg'].replace('Input should', 'it must')}.") from None
    args.total_timesteps = args.total_timesteps or of_environment(STEPS, args.env_id)
    args.utd = args.utd or (20 if args.algorithm == "tqc20" else 1)
    args.exp_name = args.exp_name or args.algorithm
    smallest = max(args.learning_starts, args.batch_size)
    for name in ("buffer_size", "total_timesteps"):
        if getattr(args, name) < smallest:
            raise UserError(f"{name} is {getattr(args, name)}; it must be at least learning_starts and batch_size, {smallest}.")
    if args.run_name is not None and not (Path(args.run_name).name == args.run_name != ".." and len(args.run_name) <= 200):
        raise UserError(f"run_name is {args.run_name!r}; it must be a plain folder name of at most 200 characters.")
    if args.cuda and not torch.cuda.is_available():
        raise UserError("cuda was asked for, but PyTorch finds no CUDA device here.")
    return args


def make_model(args: Args, env: FlatEnv, step: int = 0):
    """The algorithm of Stable-Baselines3 with the settings of benchmark/README.md.

    Its random numbers are those of a process that begins at environment step `step`. UserError if the packages are missing.
    """
    try:
        from sb3_contrib import TQC
        from stable_baselines3 import SAC, TD3
        from stable_baselines3.common.logger import Logger
        from stable_baselines3.common.noise import NormalActionNoise
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install -r benchmark/requirements.txt") from None
    actor = [args.hidden_dim] * 2
    algorithm, networks, own = SAC, {"net_arch": actor}, {}
    if args.algorithm == "td3":
        algorithm = TD3
        own = {"action_noise": NormalActionNoise(np.zeros(env.action_dim), np.full(env.action_dim, 0.1))}
    elif args.algorithm in ("tqc", "tqc20"):
        algorithm = TQC
        networks = {"net_arch": {"pi": actor, "qf": [2 * args.hidden_dim] * 3}, "n_critics": 5, "n_quantiles": 25}
        own = {"top_quantiles_to_drop_per_net": of_environment(QUANTILES_TO_DROP, args.env_id)}
    device = "cuda" if args.cuda is not False and torch.cuda.is_available() else "cpu"
    model = algorithm(
        "MlpPolicy",
        env,
        learning_rate=3e-4,
        gamma=0.99,
        tau=0.005,
        batch_size=args.batch_size,
        buffer_size=args.buffer_size,
        learning_starts=args.learning_starts,
        gradient_steps=args.utd,
        seed=seeds_for(args.seed, 3, step)[0],
        device=device,
        policy_kwargs=networks,
        **own,
    )
    model.set_logger(Logger(None, []))
    return model


def restore(model, content: dict) -> None:
    """Take over networks, optimisers, counters and replay of a checkpoint."""
    model.num_timesteps, model._n_updates = content["step"], content["updates"]
    model.set_parameters(content["parameters"], device=model.device)
    if content["log_ent_coef"] is not None:
        model.log_ent_coef.data.copy_(content["log_ent_coef"])
    replay, size = model.replay_buffer, len(content["replay"]["rewards"])
    for name, rows in content["replay"].items():
        getattr(replay, name)[:size] = rows.numpy()
    replay.pos, replay.full = content["position"], size == replay.buffer_size


def load_file(path: Path) -> dict:
    """A checkpoint with `args` as Args; UserError if it is missing, damaged or another script's."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if content["script"] != SCRIPT:
            raise ValueError
        return {**content, "args": Args(**content["args"])}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the directory of a run.") from None
    except Exception:
        raise UserError(f"{path} is damaged or not a file of {SCRIPT}.py.") from None


def play_returns(model, envs: list[FlatEnv], seeds: list[int]) -> np.ndarray:
    """Undiscounted returns (E,) of one deterministic episode from each seed, all E in step."""
    obs = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
    returns, running = np.zeros(len(envs)), np.ones(len(envs), bool)
    while running.any():
        actions, _ = model.predict(obs, deterministic=True)
        for i in np.flatnonzero(running):
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += reward
            running[i] = not (terminated or truncated)
    return returns


def command(option: str, run_dir: Path) -> str:
    """What a user types to resume or evaluate a run."""
    return shlex.join(["python", os.path.relpath(__file__), f"--{option}", str(run_dir)])


class Run:
    """A run directory, held by this process: its checkpoint, logs, evaluation, progress bar and tracking."""

    def __init__(self, args: Args, run_dir: Path, saved: dict):
        self.args, self.dir, self.saved_args = args, run_dir, dataclasses.asdict(dataclasses.replace(args, resume=None))
        self.model = make_model(args, FlatEnv(args.env_id), saved.get("step", 0))
        self.row_step, self.row_seconds, self.last, self.best, self.scripts = 0, 0.0, {}, {}, {}
        self.start, self.saved_step, self.losses = time.time(), 0, defaultdict(list)
        if saved:
            for name in ("train.csv", "eval.csv"):
                rac_sac.drop_rows(run_dir / name, saved["step"])
            restore(self.model, saved)
            vars(self).update(saved["state"])
            self.start = time.time() - saved["seconds"]
        self.write_config()
        self.envs = [FlatEnv(args.env_id) for _ in range(args.eval_episodes)]
        self.tracker = rac_sac.start_tracking(args, run_dir) if args.track else None
        self.bar = tqdm(
            total=args.total_timesteps,
            initial=self.step,
            unit="step",
            dynamic_ncols=True,
            smoothing=0.05,
            desc=run_dir.name[:40],
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )

    step = property(lambda self: self.model.num_timesteps)
    seconds = property(lambda self: time.time() - self.start)  # of the whole run, over all of its processes

    def write_config(self) -> None:
        """What made the run: arguments, versions, commit, device."""
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else None
        packages = ("torch", "gymnasium", "mujoco", "numpy", "stable_baselines3", "sb3_contrib")
        versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
        cpu = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        device = torch.cuda.get_device_name() if self.model.device.type == "cuda" else cpu
        self.scripts[hashlib.sha256(Path(__file__).read_bytes()).hexdigest()] = commit or None  # all that have trained this run
        config = {
            "script": SCRIPT,
            "script_sha256": "+".join(self.scripts),
            "args": self.saved_args,
            "git_commit": commit or None,
            "versions": versions,
            "device": device,
        }
        write_whole(self.dir / "config.json", lambda file: file.write(json.dumps(config, indent=2).encode()))

    def advance(self) -> None:
        """One environment step and its gradient steps; TrainingError after a non-finite loss."""
        self.model.learn(1, log_interval=None, reset_num_timesteps=False)
        recorded = self.model.logger.name_to_value
        for key in [key for key in LOSSES if f"train/{key}" in recorded]:
            self.losses[key].append(recorded.pop(f"train/{key}"))
            if not math.isfinite(self.losses[key][-1]):
                raise TrainingError(f"losses/{LOSSES[key]} became non-finite")
        self.bar.update()

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
        seconds, ended = self.seconds, self.model.ep_info_buffer
        episode = ended.pop() if ended else {"r": None, "l": None}
        speed = round((self.step - self.row_step) / max(seconds - self.row_seconds, 1e-9), 2)
        row = {"global_step": self.step, "charts/wall_seconds": round(seconds, 1), "charts/SPS": speed}
        row |= {f"losses/{name}": np.mean(self.losses[key]) if self.losses[key] else None for key, name in LOSSES.items()}
        self.log("train.csv", row | {"charts/episodic_return": episode["r"], "charts/episodic_length": episode["l"]})
        self.row_step, self.row_seconds, self.losses = self.step, seconds, defaultdict(list)

    def evaluate(self) -> None:
        """A row of eval.csv. The std over episodes is the population one."""
        returns = play_returns(self.model, self.envs, seeds_for(self.args.seed, 0, 0, self.args.eval_episodes))
        self.last = {"step": self.step, "best_return": float(returns.mean()), "best_return_std": float(returns.std())}
        self.best = self.last if self.last["best_return"] >= self.best.get("best_return", -math.inf) else self.best
        values = {f"eval/{name}": self.last[name] for name in ("best_return", "best_return_std")}
        self.log("eval.csv", {"global_step": self.step, "charts/wall_seconds": round(self.seconds, 1), **values})
        self.bar.set_postfix_str(f"evaluated {self.last['best_return']:.1f}, step {self.step}", refresh=False)

    def save(self) -> None:
        """Write the checkpoint, tensors and plain Python; TrainingError where that fails, with the one before still there."""
        model, buffer = self.model, self.model.replay_buffer
        state = {name: getattr(self, name) for name in ("row_step", "row_seconds", "last", "best", "scripts")}
        replay = {name: torch.from_numpy(getattr(buffer, name)[: buffer.size()]) for name in REPLAY}
        content = {
            "script": SCRIPT,
            "args": self.saved_args,
            "state": state,
            "seconds": self.seconds,
            "step": self.step,
            "updates": model._n_updates,
            "parameters": model.get_parameters(),
            "replay": replay,
            "position": buffer.pos,
            "log_ent_coef": getattr(model, "log_ent_coef", None),
        }
        write_whole(self.dir / "checkpoint.pt", lambda file: torch.save(content, file))
        self.saved_step, self.saved_time = self.step, time.time()

    def go_on(self, stopped_by) -> None:
        """Train to the end, or until `stopped_by` holds a signal's number."""
        self.save()
        while self.step < self.args.total_timesteps and not stopped_by:
            self.advance()
            learned, last = self.step - self.args.learning_starts, self.step == self.args.total_timesteps
            if (learned >= 0 and learned % self.args.eval_frequency == 0) or last:
                self.evaluate()
            if self.model.ep_info_buffer or self.step % 1000 == 0 or last:
                self.log_training()
            if time.time() - self.saved_time >= self.args.checkpoint_seconds:
                self.save()
        self.save()

    def close(self, kind, error, traceback) -> None:
        """Close what is open; say what is left of a run that has failed."""
        self.bar.close()
        with contextlib.suppress(Exception):
            if self.tracker:  # 255 is wandb's own exit code of an interrupted run
                self.tracker.finish(exit_code=1 if error else 0 if self.step == self.args.total_timesteps else 255)
        what = f"stopped at step {self.step}: {{}}; the last checkpoint is of step {self.saved_step} in {self.dir}."
        if isinstance(error, TrainingError | torch.OutOfMemoryError):
            raise TrainingError(what.format(first_line(error))) from None
        if isinstance(error, Exception):  # the environment's, which is shown in full
            tell(what.format("the environment or Stable-Baselines3 has failed"))


def train(args: Args, stopped_by: list[int] | tuple = ()) -> Run:
    """Train, or go on with args.resume, to the end or until `stopped_by` holds a signal's number; returns the run.

    Raises UserError for arguments or files that cannot be used, TrainingError when training cannot go on.
    """
    saved, run_dir = {}, Path(args.resume or "")
    if args.resume is None:
        args = check_args(args)
        FlatEnv(args.env_id).close()  # a missing environment leaves no folder behind
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_").replace(":", "_")
        run_dir = Path(args.run_root, args.run_name or name)
    else:
        load_file(run_dir / "checkpoint.pt")  # what is no run is said before it is held
    with hold(run_dir, new=args.resume is None), contextlib.ExitStack() as stack:
        if args.resume is not None:
            saved = load_file(run_dir / "checkpoint.pt")
            args = check_args(resumed(args, saved["args"], Args()))
        run = Run(args, run_dir, saved)
        saved.clear()  # lets go of the file, which the next checkpoint replaces
        stack.push(run.close)
        run.go_on(stopped_by)
    return run


def evaluate_run(args: Args, saved: dict) -> None:
    """Print return +- std of a run's policy on fresh episodes, and write it into evaluate.csv."""
    args, run_dir = check_args(dataclasses.replace(args, cuda=None)), Path(args.evaluate)
    envs = [FlatEnv(args.env_id) for _ in range(args.eval_episodes)]
    model = make_model(args, envs[0])
    model.set_parameters(saved["parameters"], device=model.device)
    returns = play_returns(model, envs, seeds_for(args.seed, 1, 0, args.eval_episodes))
    step, mean, std = saved["step"], returns.mean(), returns.std()
    text = f"global_step,return,return_std,best_in_training\n{step},{mean},{std},1\n"
    write_whole(run_dir / "evaluate.csv", lambda file: file.write(text.encode()))
    print(f"{args.env_id}, step {step}, {args.eval_episodes} fresh episodes: return {mean:.1f} ± {std:.1f}")


def main() -> None:
    """The command line: errors of the user are one sentence and exit code 2, failures of training exit code 1."""
    args, stopped_by = tyro.cli(Args, description=__doc__), []
    try:
        if args.evaluate is not None and args.resume is not None:
            raise UserError("evaluate and resume were both given; choose one of them.")
        if args.evaluate is not None:  # read once more, from what the run was saved with
            saved = load_file(Path(args.evaluate, "checkpoint.pt"))
            asked = tyro.cli(Args, default=dataclasses.replace(saved["args"], evaluate=args.evaluate))
            return evaluate_run(merged(asked, saved["args"], saved["args"], ("eval_episodes", "seed")), saved)
        for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:
            if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(getattr(signal, name), lambda number, frame: stopped_by.append(number))
        run = train(args, stopped_by)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    if run.step < run.args.total_timesteps:
        tell(f"stopped at step {run.step}; go on with: {command('resume', run.dir)}")
        sys.exit(128 + stopped_by[0])
    print(f"finished: {run.dir}, {run.step} steps")
    for title, result in (("last", run.last), ("best", run.best)):
        print(f"{title} evaluation: return {result['best_return']:.1f} ± {result['best_return_std']:.1f}, step {result['step']}")
    print(f"evaluate it on fresh episodes: {command('evaluate', run.dir)}")


if __name__ == "__main__":
    main()
