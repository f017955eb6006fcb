"""The paper's baselines SAC, TD3, TQC, TQC20 and MBPO by Stable-Baselines3, evaluated as the scripts evaluate theirs.

    python benchmark/baselines.py --algorithm tqc --env-id Hopper-v4
    python benchmark/baselines.py --resume runs/RUN --total-timesteps 400000
    python benchmark/baselines.py --evaluate runs/RUN

The command line and the files of a run directory are those of rac_sac.py, as far as they apply: there is one policy and no beta,
and only the last policy is kept, in checkpoint.pt. benchmark/README.md has the hyperparameters and their sources. Resuming goes
on from networks, optimisers and replay with a new episode and new random numbers; it is not exact.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads OpenMP, as the scripts do

import gymnasium as gym
import numpy as np
import pandas as pd
import tyro
from mbpo import MBPO, mbpo_settings
from sb3_contrib import TQC
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.noise import NormalActionNoise
from tqdm import tqdm

QUANTILES_TO_DROP = {"Hopper": 5, "HalfCheetah": 0}  # of each of TQC's critics, by its paper; others 2
REPLAY_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
EVALUATION, FRESH_EPISODES, TRAINING = 0, 1, 3  # what environment seeds are for, as in the scripts
METRICS = {  # column of train.csv -> Stable-Baselines3's name; values of the last environment step
    "losses/qf_loss": "train/critic_loss",
    "losses/actor_loss": "train/actor_loss",
    "losses/alpha": "train/ent_coef",
    "model/holdout_error": "model/holdout_error",
    "model/rollout_length": "model/rollout_length",
}


@dataclasses.dataclass
class Args:
    algorithm: Literal["sac", "td3", "tqc", "tqc20", "mbpo"] = "sac"  # the baseline; tqc20 is TQC with 20 gradient steps a step
    exp_name: str | None = None  # the name of this experiment; by default the algorithm's
    seed: int = 1  # networks, noise, environments and evaluation all follow from it
    cuda: bool | None = None  # whether to train on the GPU; by default, when one is present
    track: bool = False  # log to Weights & Biases; its own WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE say where
    run_root: str = "runs"  # the folder in which run directories are made
    run_name: str | None = None  # the run directory's name; by default <env_id>__<exp_name>__<seed>__<time>
    checkpoint_seconds: float = 300.0  # seconds between two checkpoints
    resume: str | None = None  # a run directory to go on with; total_timesteps may grow
    evaluate: str | None = None  # a run directory whose policy is played on fresh episodes
    env_id: str = "Hopper-v4"  # the id of the Gymnasium environment
    total_timesteps: int | None = None  # environment steps of the run; by default 1e6 for Humanoid, 3e5 for others
    learning_starts: int = 5000  # environment steps with uniformly random actions before learning starts
    buffer_size: int = 1_000_000  # replay capacity
    batch_size: int = 256  # the batch size sampled from the replay
    utd: int | None = None  # gradient steps per environment step; default 1; tqc20 20, mbpo 20 (HalfCheetah 40)
    hidden_dim: int = 256  # width of the hidden layers; TQC's critics are twice as wide
    eval_frequency: int = 1000  # environment steps between evaluations
    eval_episodes: int = 10  # episodes per evaluation, from the same initial states for all


def read_arguments() -> Args:
    """The command line with all defaults filled in; ValueError for a mistake."""
    args = tyro.cli(Args, description=__doc__)
    existing = args.resume or args.evaluate
    if existing:  # read it again, with the arguments of that run as defaults
        config = json.loads(Path(existing, "config.json").expanduser().read_text())
        if config.get("script") != "baselines":
            raise ValueError(f"{existing} is no run of baselines.py.")
        args = tyro.cli(Args, default=Args(**config["args"]))
    environment = environment_name(args)
    if not args.utd:
        args.utd = 1
        if args.algorithm in ("tqc20", "mbpo"):
            args.utd = 20
        if args.algorithm == "mbpo" and environment == "HalfCheetah":
            args.utd = 40
    if not args.exp_name:
        args.exp_name = args.algorithm
    if not args.total_timesteps:
        args.total_timesteps = 1_000_000 if environment == "Humanoid" else 300_000
    return args


def environment_name(args: Args) -> str:
    """Hopper for Hopper-v4."""
    return args.env_id.rsplit("-v", 1)[0]


def first_seed(args: Args, purpose: int) -> int:
    """Below 2^30; episode i has the seed i after it."""
    return int(np.random.SeedSequence([args.seed, purpose]).generate_state(1)[0] >> 2)


def make_envs(args: Args, count: int):
    """Environments with flat observations, in float32: Stable-Baselines3's replay would keep float64. MBPO may see a part."""
    obs_dim = None  # all
    if args.algorithm == "mbpo":
        obs_dim = mbpo_settings(args.env_id).obs_dim

    def seen(obs: np.ndarray) -> np.ndarray:
        return obs[:obs_dim].astype(np.float32)

    def wrapped(env: gym.Env) -> gym.Env:
        env = gym.wrappers.FlattenObservation(env)
        shape = env.observation_space.shape if obs_dim is None else (obs_dim,)
        return gym.wrappers.TransformObservation(env, seen, gym.spaces.Box(-np.inf, np.inf, shape))

    return make_vec_env(args.env_id, count, wrapper_class=wrapped)


def make_model(args: Args):
    """The algorithm of Stable-Baselines3 with the settings of benchmark/README.md."""
    envs = make_envs(args, 1)
    algorithm = {"sac": SAC, "td3": TD3, "tqc": TQC, "tqc20": TQC, "mbpo": MBPO}[args.algorithm]
    widths = [args.hidden_dim, args.hidden_dim]
    networks = {"net_arch": widths}
    own = {}  # arguments of this algorithm alone
    if algorithm is TD3:
        shape = envs.action_space.shape
        own["action_noise"] = NormalActionNoise(np.zeros(shape), np.full(shape, 0.1))
    elif algorithm is TQC:
        networks = {"net_arch": {"pi": widths, "qf": [2 * args.hidden_dim] * 3}, "n_critics": 5, "n_quantiles": 25}
        own["top_quantiles_to_drop_per_net"] = QUANTILES_TO_DROP.get(environment_name(args), 2)
    elif algorithm is MBPO:
        own["env_id"] = args.env_id
    device = "auto"
    if args.cuda is not None:
        device = "cuda" if args.cuda else "cpu"
    return algorithm(
        "MlpPolicy",
        envs,
        learning_rate=3e-4,
        gamma=0.99,
        tau=0.005,
        batch_size=args.batch_size,
        buffer_size=args.buffer_size,
        learning_starts=args.learning_starts,
        gradient_steps=args.utd,
        seed=first_seed(args, TRAINING),
        device=device,
        policy_kwargs=networks,
        **own,
    )


def load(path: Path, new):
    """The model of a checkpoint with its replay. new: one of the same arguments, whose environment and device it takes."""
    model = type(new).load(path, new.env, device=new.device)
    buffer = model.replay_buffer
    with zipfile.ZipFile(path) as archive:
        for name in REPLAY_ARRAYS:
            with archive.open(f"{name}.npy") as file:
                rows = np.load(file)
            getattr(buffer, name)[: len(rows)] = rows
    buffer.pos = model.num_timesteps % buffer.buffer_size
    buffer.full = model.num_timesteps >= buffer.buffer_size
    return model


def play(model, envs, seed: int) -> np.ndarray:
    """Returns (E,) of a deterministic episode in each environment, from the initial states of consecutive seeds."""
    envs.seed(seed)
    returns, _ = evaluate_policy(model, envs, envs.num_envs, return_episode_rewards=True)
    return np.array(returns)


def write_whole(path: Path, text: str) -> None:
    """Write, then rename: the file is whole at every moment."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


class Protocol(BaseCallback):
    """What is due between two environment steps: evaluations, rows, checkpoints, the end by a signal."""

    def __init__(self, args: Args, run_dir: Path, model, tracker):
        super().__init__()
        self.args = args
        self.run_dir = run_dir
        self.model = model
        self.envs = make_envs(args, args.eval_episodes)
        self.first_step = model.num_timesteps
        now = time.monotonic()
        self.start_of_process = now
        self.start_of_run = now - getattr(model, "wall_seconds", 0)  # save() has set it
        self.last_save = now
        self.stopped_by = 0
        self.tracker = tracker
        pause = 0.5 if sys.stderr.isatty() else 30  # a file need not see every step
        self.bar = tqdm(total=args.total_timesteps, initial=model.num_timesteps, unit="step", mininterval=pause)
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU"):
            if hasattr(signal, name):  # Windows has not all of them
                number = getattr(signal, name)
                if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                    signal.signal(number, self.stop)

    def stop(self, number: int, frame) -> None:
        self.stopped_by = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends the run at once

    def _on_rollout_start(self) -> None:
        self.between_steps()  # the updates of the step before are done here; in _on_step() they are still to come

    def _on_training_end(self) -> None:
        self.between_steps()

    def _on_step(self) -> bool:
        return True

    def between_steps(self) -> None:
        step = self.model.num_timesteps
        steps_learned = step - self.args.learning_starts
        is_last = step >= self.args.total_timesteps
        is_due = is_last or (steps_learned >= 0 and steps_learned % self.args.eval_frequency == 0)
        if is_due and step > self.first_step:  # the step of a checkpoint has been evaluated before it was written
            returns = play(self.model, self.envs, first_seed(self.args, EVALUATION))
            self.log("eval.csv", {"eval/best_return": returns.mean(), "eval/best_return_std": returns.std()})
            self.bar.set_postfix_str(f"return {returns.mean():.1f} at step {step}", refresh=False)
        for episode in self.model.ep_info_buffer:
            speed = (step - self.first_step) / (time.monotonic() - self.start_of_process)
            row = {"charts/SPS": round(speed, 2)}
            for column, name in METRICS.items():
                row[column] = self.logger.name_to_value.get(name)
            row["charts/episodic_return"] = episode["r"]
            row["charts/episodic_length"] = episode["l"]
            self.log("train.csv", row)
        self.model.ep_info_buffer.clear()
        if is_last or self.stopped_by or time.monotonic() - self.last_save >= self.args.checkpoint_seconds:
            self.save()
        if self.stopped_by:
            command = shlex.join(["python", sys.argv[0], "--resume", str(self.run_dir)])
            try:
                print(f"stopped at step {step}; go on with: {command}", flush=True)
            except BrokenPipeError:  # Ctrl-C has ended the program that reads it, too
                sys.stdout = None  # or else it would fail again when the process ends
            sys.exit(128 + self.stopped_by)
        self.bar.update(step - self.bar.n)  # at the end, for it fails where Ctrl-C has ended the program that reads it

    def log(self, name: str, values: dict) -> None:
        """Append a row to a CSV file, with the header where it is new, and to Weights & Biases."""
        path = self.run_dir / name
        row = {"global_step": self.model.num_timesteps, "charts/wall_seconds": round(self.wall_seconds(), 1), **values}
        pd.DataFrame([row]).to_csv(path, mode="a", header=not path.exists(), index=False)
        if self.tracker:
            try:
                self.tracker.log({key: value for key, value in row.items() if value is not None})
            except Exception as error:
                self.tracker = None
                tqdm.write(f"Weights & Biases fails, and the run goes on without it: {error!r}", sys.stderr)

    def wall_seconds(self) -> float:
        """Of the run, without the pauses between its processes."""
        return time.monotonic() - self.start_of_run

    def save(self) -> None:
        """The checkpoint: Stable-Baselines3's zip file, with the filled rows of the replay in it."""
        self.model.wall_seconds = self.wall_seconds()  # saved with the model, as all its attributes are
        temporary = self.run_dir / "checkpoint.tmp"
        self.model.save(temporary)
        buffer = self.model.replay_buffer
        with zipfile.ZipFile(temporary, "a") as archive:
            for name in REPLAY_ARRAYS:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.save(file, getattr(buffer, name)[: buffer.size()])
        os.replace(temporary, self.run_dir / "checkpoint.pt")
        self.last_save = time.monotonic()


def start_tracking(args: Args, run_dir: Path, model):
    """The Weights & Biases run, or None where a run that goes on is refused; ValueError where a new one is."""
    os.environ.setdefault("WANDB_PROJECT", "realistic-actor-critic")
    if not hasattr(model, "wandb_id"):
        model.wandb_id = os.urandom(8).hex()  # saved with the model, so that a resumed run goes on with it
    try:
        import wandb  # slow to import

        tracker = wandb.init(name=run_dir.name, id=model.wandb_id, resume="allow", dir=run_dir, config=vars(args))
        tracker.define_metric("*", step_metric="global_step")
        return tracker
    except Exception as error:
        sentence = f"Weights & Biases cannot track this run: {error!r:.300}"
        if not args.resume:
            shutil.rmtree(run_dir)
            raise ValueError(sentence) from None
        print(sentence, file=sys.stderr)  # an outage must not end a run that has begun
        return None


def drop_rows(path: Path, last_step: int) -> None:
    """Of a CSV file: those after this step, which come again."""
    if path.exists():
        rows = pd.read_csv(path, dtype=str)
        kept = rows[rows["global_step"].astype(int) <= last_step]
        write_whole(path, kept.to_csv(index=False))


def train(args: Args, run_dir: Path, model, tracker) -> None:
    """Train to the end, or until a signal ends the process with a checkpoint."""
    step = model.num_timesteps
    protocol = Protocol(args, run_dir, model, tracker)
    commit = subprocess.getoutput(f"git -C '{Path(__file__).parent}' describe --always --dirty")
    config = {"script": "baselines", "args": {**vars(args), "resume": None}, "git_commit": commit}
    write_whole(run_dir / "config.json", json.dumps(config, indent=2))
    drop_rows(run_dir / "eval.csv", step)
    drop_rows(run_dir / "train.csv", step)
    protocol.save()
    model.set_random_seed(first_seed(args, TRAINING) + step)
    model.set_logger(Logger(None, []))
    with closing(protocol.envs):
        try:
            model.learn(args.total_timesteps - step, protocol, log_interval=None, reset_num_timesteps=False)
        except SystemExit as error:
            if protocol.stopped_by:
                raise
            ended = f"the environment ended the program, by sys.exit({error.code!r})"
            sys.exit(f"error: {ended}; go on from the last checkpoint with: {shlex.join(['--resume', str(run_dir)])}")
    protocol.bar.close()


def evaluate(args: Args, run_dir: Path, model) -> None:
    """Play the policy on fresh episodes; write evaluate.csv."""
    with closing(make_envs(args, args.eval_episodes)) as envs:
        returns = play(model, envs, first_seed(args, FRESH_EPISODES))
    row = f"{model.num_timesteps},{returns.mean()},{returns.std()},1"
    write_whole(run_dir / "evaluate.csv", f"global_step,return,return_std,best_in_training\n{row}\n")
    result = f"return {returns.mean():.1f} +- {returns.std():.1f}"
    print(f"step {model.num_timesteps}, {len(returns)} fresh episodes: {result}")


def main() -> None:
    gym.logger.min_level = gym.logger.ERROR  # no warnings that -v4 is not the newest
    try:
        args = read_arguments()
        existing = args.resume or args.evaluate
        if existing:
            run_dir = Path(existing).expanduser().absolute()
        else:
            name = re.sub("[/:]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
            run_dir = Path(args.run_root, args.run_name or name).expanduser().absolute()
            if run_dir.exists():
                raise ValueError(f"{run_dir} exists already; go on with --resume {run_dir}, or choose another run_name.")
        model = make_model(args)
        if existing:
            model = load(run_dir / "checkpoint.pt", model)
        run_dir.mkdir(parents=True, exist_ok=True)
        tracker = None
        if args.track and not args.evaluate:
            tracker = start_tracking(args, run_dir, model)
    except (gym.error.Error, ImportError, OSError, ValueError, AssertionError) as error:  # the last is Stable-Baselines3's
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    with closing(model.env):
        if args.evaluate:
            evaluate(args, run_dir, model)
        else:
            train(args, run_dir, model, tracker)


if __name__ == "__main__":
    main()
