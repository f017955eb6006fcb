"""The paper's baselines SAC, TD3, TQC, TQC20 and MBPO by Stable-Baselines3, as runs beside those of the scripts.

    python benchmark/baselines.py --algorithm tqc --env-id Hopper-v4

Evaluation (the same steps, the same initial states) is that of rac_sac.py; the command line has some of its arguments. There is
one policy and no beta; only the last policy is kept, in the checkpoint. benchmark/README.md has the hyperparameters and sources.
Resuming goes on from networks, optimisers and replay with a new episode and new random numbers: it is not bit for bit what an
uninterrupted run would have been.
"""

import dataclasses
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads OpenMP, as in the scripts
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch
import tyro
from experiments import STEPS, UTD, name_in_gymnasium, of_environment, of_gymnasium
from gymnasium.spaces import Box
from gymnasium.wrappers import TransformObservation
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from rac_sac import FlatEnv, TrainingError, UserError, catch_signals, hold, leave, merged, resumed, seeds_for, tell, write_whole

try:
    import mbpo
    from baseline_run import Run, load_file, play_returns
    from sb3_contrib import TQC
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.noise import NormalActionNoise
except ImportError as error:
    print(f"error: {error.name} is not installed: pip install -r benchmark/requirements.txt", file=sys.stderr)
    sys.exit(2)

SCRIPT = Path(__file__).stem
QUANTILES_TO_DROP = {"Hopper": 5, "HalfCheetah": 0, "": 2}  # of each of TQC's critics, by its paper


@dataclasses.dataclass
class Args:
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    algorithm: Literal["sac", "td3", "tqc", "tqc20", "mbpo"] = "sac"  # the baseline; tqc20 is TQC with 20 gradient steps a step
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
    utd: PositiveInt | None = None  # gradient steps per environment step; default 1; tqc20 20, mbpo 20 (HalfCheetah 40)
    hidden_dim: PositiveInt = 256  # width of the hidden layers; TQC's critics are twice as wide
    termination: str | None = None  # mbpo: when episodes of its model end, by an environment of its table, or never
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
    args.utd = args.utd or of_gymnasium(UTD.get(args.algorithm, 1), args.env_id)
    args.exp_name = args.exp_name or args.algorithm
    smallest = max(args.learning_starts, args.batch_size)
    for name in ("buffer_size", "total_timesteps"):
        if getattr(args, name) < smallest:
            raise UserError(f"{name} is {getattr(args, name)}; it must be at least learning_starts and batch_size, {smallest}.")
    if args.run_name is not None and not (Path(args.run_name).name == args.run_name != ".." and len(args.run_name) <= 200):
        raise UserError(f"run_name is {args.run_name!r}; it must be a plain folder name of at most 200 characters.")
    if args.algorithm == "mbpo":
        if args.learning_starts < mbpo.FEWEST:
            raise UserError(f"learning_starts is {args.learning_starts}; for mbpo it must be at least {mbpo.FEWEST}.")
        args.termination = args.termination or name_in_gymnasium(args.env_id) or args.env_id
        if args.termination not in mbpo.TERMINATIONS:
            known = ", ".join(mbpo.TERMINATIONS)
            raise UserError(f"termination is {args.termination}; mbpo must know when an episode ends: give one of {known}.")
    if args.cuda and not torch.cuda.is_available():
        raise UserError("cuda was asked for, but PyTorch finds no CUDA device here.")
    return args


def make_env(args: Args):
    """The environment with the observations that the algorithm sees: MBPO's model has the first 45 of Humanoid, 27 of Ant."""
    env = FlatEnv(args.env_id)
    seen = of_gymnasium(mbpo.SETTINGS, args.env_id).obs_dim
    if args.algorithm == "mbpo" and seen:
        env = TransformObservation(env, lambda obs: obs[:seen], Box(-np.inf, np.inf, (seen,), np.float32))
    return env


def make_model(args: Args, env, step: int = 0):
    """The algorithm of Stable-Baselines3 with the settings of benchmark/README.md.

    Its random numbers are those of a process that begins at environment step `step`.
    """
    networks = {"net_arch": [args.hidden_dim] * 2}
    algorithm = SAC
    own = {}
    if args.algorithm == "td3":
        algorithm = TD3
        action_dim = env.action_space.shape[0]
        own = {"action_noise": NormalActionNoise(np.zeros(action_dim), np.full(action_dim, 0.1))}
    elif args.algorithm in ("tqc", "tqc20"):
        algorithm = TQC
        widths = {"pi": [args.hidden_dim] * 2, "qf": [2 * args.hidden_dim] * 3}
        networks = {"net_arch": widths, "n_critics": 5, "n_quantiles": 25}
        own = {"top_quantiles_to_drop_per_net": of_gymnasium(QUANTILES_TO_DROP, args.env_id)}
    elif args.algorithm == "mbpo":
        algorithm = mbpo.MBPO
        own = {"settings": of_gymnasium(mbpo.SETTINGS, args.env_id), "terminated": mbpo.TERMINATIONS[args.termination]}
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


def train(args: Args, stopped_by: list[int] | tuple = ()) -> Run:
    """Train, or go on with args.resume, to the end or until `stopped_by` holds a signal's number; returns the run.

    Raises UserError for arguments or files that cannot be used, TrainingError when training cannot go on.
    """
    saved = {}
    folder = Path.cwd()  # an environment may change the current one
    shown = Path(args.resume or "")
    if args.resume is None:
        args = check_args(args)
        env = FlatEnv(args.env_id)  # a missing environment leaves no folder behind
        args.env_id = env.full_id
        env.close()
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_").replace(":", "_")
        shown = Path(args.run_root, args.run_name or name)
    else:
        load_file(shown / "checkpoint.pt", Args)  # what is no run is said before it is held
    with hold(folder / shown, new=args.resume is None, shown=str(shown)):
        if args.resume is not None:
            saved = load_file(shown / "checkpoint.pt", Args)
            args = check_args(resumed(args, saved["args"], Args()))
        model = make_model(args, make_env(args), saved.get("step", 0))
        envs = [make_env(args) for _ in range(args.eval_episodes)]
        run = Run(args, folder, shown, model, envs, stopped_by)
        if saved:
            run.take_over(saved)
        saved.clear()  # lets go of the file, which the next checkpoint replaces
        with run:
            run.go_on()
    return run


def evaluate_run(args: Args, saved: dict) -> None:
    """Print return +- std of a run's policy on fresh episodes, and write it into evaluate.csv."""
    run_dir = Path(args.evaluate).absolute()  # an environment may change the current directory
    args = check_args(dataclasses.replace(args, cuda=False))  # a small policy: a GPU is left to those that train
    envs = [make_env(args) for _ in range(args.eval_episodes)]
    model = make_model(args, envs[0])
    model.set_parameters(saved["parameters"], device=model.device)
    returns, faults = play_returns(model, envs, seeds_for(args.seed, 1, 0, args.eval_episodes))
    for fault in faults:
        tell(fault)
    step, mean, std = saved["step"], returns.mean(), returns.std()
    text = f"global_step,return,return_std,best_in_training\n{step},{mean},{std},1\n"
    write_whole(run_dir / "evaluate.csv", lambda file: file.write(text.encode()))
    print(f"{args.env_id}, step {step}, {args.eval_episodes} fresh episodes: return {mean:.1f} ± {std:.1f}")


def run_command_line() -> int:
    """Do what the command line asks for; returns the exit code."""
    args = tyro.cli(Args, description=__doc__)
    if args.evaluate is not None and args.resume is not None:
        raise UserError("evaluate and resume were both given; choose one of them.")
    if args.evaluate is not None:  # read once more, from what the run was saved with
        saved = load_file(Path(args.evaluate, "checkpoint.pt"), Args)
        asked = tyro.cli(Args, default=dataclasses.replace(saved["args"], evaluate=args.evaluate))
        evaluate_run(merged(asked, saved["args"], saved["args"], ("eval_episodes", "seed")), saved)
        return 0
    stopped_by = catch_signals()
    run = train(args, stopped_by)
    if run.step < run.args.total_timesteps:
        tell(f"stopped at step {run.step}; go on with: {run.resume_command}")
        return 128 + stopped_by[0]
    print(f"finished: {run.shown}, {run.step} steps")
    for title, result in (("last", run.state.last), ("best", run.state.best)):
        print(f"{title} evaluation: return {result['best_return']:.1f} ± {result['best_return_std']:.1f}, step {result['step']}")
    print(f"evaluate it on fresh episodes: {run.evaluate_command}")
    return 0


def main() -> int:
    """The command line: errors of the user are one sentence and exit code 2, failures of training exit code 1."""
    try:
        return run_command_line()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (UserError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except Exception:  # the environment's
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    leave(main())
