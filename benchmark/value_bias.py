"""The normalised value bias of a run (equation 22 of the paper), measured from the snapshots that it has written.

    python rac_sac.py --env-id Hopper-v4 --snapshot-frequency 50000
    python benchmark/value_bias.py runs/NAME

Of each snapshot the policy that was best in its evaluation is measured. It collects state-action pairs. From each of those that
are chosen, continuations give the return that Q should have predicted. Only MuJoCo's environments can be continued from a pair.

Each snapshot adds a row to bias.csv in the run directory. The same command measures those that have no row yet. Delete bias.csv
to measure with other sizes. At the paper's sizes a snapshot takes up to 600,000 environment steps. The script that the run has
kept is used. Modules that it or the environment needs are looked for in the project's folder and in PYTHONPATH.
"""

import copy
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
import pandas as pd
import torch
import tyro
from gymnasium.envs.mujoco import MujocoEnv
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))


@dataclass
class Options:
    run: tyro.conf.Positional[Path]  # a run directory with snapshots
    pairs: int = 100  # state-action pairs that are collected
    chosen: int = 20  # how many of them are continued
    continuations: int = 20  # of each chosen pair
    max_steps: int = 1500  # of a continuation; the return of later steps would count as bias


def fail(sentence: str) -> None:
    """End with the sentence of a user's mistake."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


class Subject:
    """The policy that is measured, with its critics, temperature and environment: all that this program knows of a script.

    script: the module; best: the condition (beta, or k) of the policy. Without a temperature Q is not soft. Observations are
    flat, (O,), and actions in [-1, 1], (A,).
    """

    def __init__(self, script, snapshot: dict, best: float):
        self.script = script
        self.args = script.Args(**snapshot["args"])
        self.env = script.Env(self.args.env_id)
        self.endless_env = script.Env(self.args.env_id, max_episode_steps=-1)
        self.condition = script.played_condition(best, 1)
        self.alpha = snapshot["evaluation"].get(f"eval/alpha_{best:.6g}", 0.0)
        # Scripts that earlier runs have kept make their networks by functions
        make_actor = getattr(script, "make_actor", script.Actor)
        make_critic = getattr(script, "make_critic", script.Critic)
        self.actor = make_actor(self.args, self.env.obs_dim, self.env.action_dim)
        self.actor.load_state_dict(snapshot["actor"])
        self.critic = make_critic(self.args, self.env.obs_dim, self.env.action_dim)
        self.critic.load_state_dict(snapshot["critic"])
        for network in (self.actor, self.critic):
            network.requires_grad_(False).eval()

    def act(self, obs: np.ndarray, explore: bool = False) -> tuple[np.ndarray, float]:
        """obs (O,) -> action (A,) and its log-probability. A deterministic policy gets noise only where it explores."""
        output = self.actor(torch.from_numpy(obs[None]), self.condition)
        if isinstance(output, tuple):  # of the SAC family
            mean, log_std = output
            action, log_prob = self.script.squashed_gaussian(mean, log_std, torch.randn_like(mean))
            return action[0].numpy(), log_prob.item()
        noise = self.args.exploration_noise * torch.randn_like(output)  # always: what is drawn later depends on it
        action = output + noise if explore else output
        return action.clamp(-1, 1)[0].numpy(), 0.0

    def mean_q(self, obs: np.ndarray, action: np.ndarray) -> float:
        """The ensemble's mean for a pair: obs (O,), action (A,)."""
        inputs = self.script.critic_inputs(torch.from_numpy(obs[None]), torch.from_numpy(action[None]), self.condition)
        return self.critic(inputs).mean().item()


def monte_carlo_return(subject: Subject, start: mujoco.MjData, first_action: np.ndarray, options: Options) -> float:
    """Mean discounted return of continuations of a pair: MuJoCo's data `start`, and an action (A,).

    From the second step on it includes -alpha log pi, which is what a soft Q predicts. Nothing is continued past a termination.
    """
    env = subject.endless_env
    total = 0.0
    for _ in range(options.continuations):
        env.reset(seed=0)
        mujoco.mj_copyData(env.unwrapped.data, env.unwrapped.model, start)  # exact, as set_state() is not
        action = first_action
        log_prob = 0.0
        for step in range(options.max_steps):
            obs, reward, terminated, truncated, _ = env.step(action)
            total += subject.args.gamma**step * (reward - subject.alpha * log_prob)
            if terminated or truncated:
                break
            action, log_prob = subject.act(obs)
    return total / options.continuations


def measure(subject: Subject, options: Options, seed: int) -> tuple[float, float]:
    """Mean and population standard deviation over the chosen pairs of (Q - return) / |mean return|."""
    env = subject.env
    if not isinstance(env.unwrapped, MujocoEnv):
        fail(f"{subject.args.env_id} is not one of MuJoCo's environments, which alone can be continued from a pair.")
    torch.manual_seed(seed)
    chosen = torch.randperm(options.pairs)[: options.chosen].tolist()
    values = []
    returns = []
    obs, _ = env.reset(seed=seed)
    for number in tqdm(range(options.pairs), desc="value bias", unit="pair", leave=False):
        action, _ = subject.act(obs, explore=True)
        if number in chosen:
            values.append(subject.mean_q(obs, action))
            returns.append(monte_carlo_return(subject, copy.copy(env.unwrapped.data), action, options))
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            obs, _ = env.reset()
    bias = (np.array(values) - np.array(returns)) / abs(np.mean(returns))
    return bias.mean(), bias.std()


def read_rows(path: Path) -> dict[int, dict]:
    """The rows of a CSV file by step; none where there is no file."""
    if not path.exists():
        return {}
    return pd.read_csv(path, index_col="global_step", float_precision="round_trip").to_dict("index")


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    snapshots = {int(path.stem.removeprefix("step-")): path for path in options.run.glob("snapshots/step-*.pt")}
    if not snapshots:
        fail(f"{options.run} has no snapshots; --snapshot-frequency of its script writes them.")
    torch.set_num_threads(1)  # the networks are small
    sys.path.insert(0, str(options.run.resolve()))  # the script that the run has kept comes before the project's
    evaluations = read_rows(options.run / "eval.csv")
    path = options.run / "bias.csv"
    measured = read_rows(path)
    for step in sorted(snapshots):
        if step in measured or step not in evaluations:
            continue
        snapshot = torch.load(snapshots[step], weights_only=True)
        script = importlib.import_module(snapshot["script"])
        column = f"eval/best_{script.CONDITION}"
        best = evaluations[step][column]
        subject = Subject(script, snapshot, best)
        mean, std = measure(subject, options, seed=subject.args.seed + step)
        print(f"step {step}: bias {mean:.3f} +- {std:.3f}")
        measured[step] = {column: best, "eval/bias_mean": mean, "eval/bias_std": std}
        temporary = path.with_suffix(".tmp")
        pd.DataFrame.from_dict(measured, "index").to_csv(temporary, index_label="global_step")
        temporary.replace(path)


if __name__ == "__main__":
    main()
