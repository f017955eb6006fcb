"""The normalised value bias of a run (equation 22 of the paper), measured from the snapshots that it has written.

    python rac_sac.py --env-id Hopper-v4 --snapshot-frequency 10000
    python benchmark/value_bias.py runs/NAME

Of each snapshot the policy that was best in its evaluation is measured: it collects state-action pairs, some of them are chosen,
and from each Monte-Carlo continuations give the return that Q should have predicted. Rows are added to bias.csv in the run
directory as they are measured. The same command goes on; one of other sizes begins anew and keeps the old file by another name.
The script is the one that the run has kept; modules that it or the environment needs are looked for in the project's folder and
in PYTHONPATH. At the paper's sizes a snapshot takes up to 600,000 environment steps.
"""

import csv
import dataclasses
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the networks are small, and workers run side by side

import numpy as np
import torch
import tyro
from experiments import ROOT
from job import BIAS_SIZES, UserError, measured_bias, snapshots_of
from tqdm import tqdm

sys.path.append(str(ROOT))  # workers have it too


@dataclass
class Sizes:
    pairs: int = BIAS_SIZES["pairs"]  # state-action pairs that are collected
    chosen: int = BIAS_SIZES["chosen"]  # of them, those from which it is continued
    continuations: int = BIAS_SIZES["continuations"]  # from each chosen pair
    max_steps: int = BIAS_SIZES["max_steps"]  # of a continuation


@dataclass
class Options(Sizes):
    run: Annotated[Path, tyro.conf.Positional] = Path()  # a run directory with snapshots
    workers: int = 0  # processes; by default one for each core that this process may use


class Subject:
    """What is measured: the policy of one condition, with its critics and its temperature, of a snapshot.

    module: the script; content: the snapshot; index: of the policy among the evaluated ones.
    """

    def __init__(self, module: ModuleType, content: dict, index: int):
        self.module = module
        self.args = module.Args(**content["args"])
        self.condition = module.eval_conditions(self.args)[index]
        self.alpha = content["alphas"][index] if content["alphas"] else 0.0  # without a temperature Q is not soft
        sizes = (content["obs_dim"], content["bounds"].shape[1])
        self.actor = module.load_network(self.args, "actor", content["actor"], *sizes)
        self.critic = module.load_network(self.args, "critic", content["critic"], *sizes)

    @torch.inference_mode()
    def act(self, obs: np.ndarray, noise: np.ndarray, continuing: bool) -> tuple[np.ndarray, np.ndarray]:
        """obs (B, O), noise (B, A) -> action (B, A), log_prob (B,).

        A stochastic policy is measured as it is; a deterministic one explores while pairs are collected, and is continued
        without noise.
        """
        output = self.actor(*self.module.network_inputs(obs, self.condition))
        if isinstance(output, tuple):
            mean, log_std = output
            action, log_prob = self.module.squashed_gaussian(mean, log_std, torch.from_numpy(noise))
            return action.numpy(), log_prob.numpy()
        action = output.numpy()
        if not continuing:
            action = (action + self.args.exploration_noise * noise).clip(-1, 1).astype(np.float32)
        return action, np.zeros(len(obs))

    @torch.inference_mode()
    def mean_q(self, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
        """The ensemble's mean: obs (B, O), action (B, A) -> (B,)."""
        seen, *condition = self.module.network_inputs(obs, self.condition)
        return self.critic(torch.cat([seen, torch.from_numpy(action), *condition], 1)).mean(0).numpy()


def measure(subject, env, endless_envs: list, sizes: Sizes, seed: int) -> tuple[float, float]:
    """Mean and population std over pairs of the normalised value bias; NaN where the mean return, its divisor, is 0.

    `env` has its time limit, `endless_envs` (one for each continuation) have none.
    """
    rng = np.random.default_rng(seed)
    pairs = []  # (seed of the episode, its actions up to and with the pair's, the pair's observation, Q)
    episode = seed
    over = True
    while len(pairs) < sizes.pairs:
        if over:
            episode += 1
            actions = []
            obs, _ = env.reset(seed=episode)
        noise = rng.standard_normal((1, env.action_dim), np.float32)
        action, _ = subject.act(obs[None], noise, continuing=False)
        actions = [*actions, action[0]]
        pairs.append((episode, actions, obs.copy(), float(subject.mean_q(obs[None], action)[0])))
        obs, _, terminated, truncated, _ = env.step(action[0])
        over = terminated or truncated
    chosen = [pairs[i] for i in rng.choice(sizes.pairs, sizes.chosen, replace=False)]
    returns = [monte_carlo_return(subject, endless_envs, *pair[:3], sizes.max_steps, rng) for pair in chosen]
    bias = (np.array([q for *_, q in chosen]) - returns) / (abs(np.mean(returns)) or np.nan)
    return float(bias.mean()), float(bias.std())


def monte_carlo_return(subject, envs: list, episode: int, actions: list[np.ndarray], reached, max_steps: int, rng) -> float:
    """Mean discounted return of len(envs) continuations of a state-action pair, reached by repeating its episode.

    UserError where that does not lead to the pair's observation, `reached`.

    From the second step on a continuation's return includes -alpha log pi, which is what a soft Q predicts. Nothing is continued
    past a termination, nor past a truncation, which without a time limit is the environment's own.
    """
    returns = np.zeros(len(envs))
    running = np.ones(len(envs), bool)
    for env in envs:
        obs, _ = env.reset(seed=episode)
        for action in actions[:-1]:
            obs, *_ = env.step(action)
        if not np.array_equal(obs, reached):
            raise UserError("its environment does not repeat an episode from the seed and the actions")
    obs = np.zeros((len(envs), envs[0].obs_dim), np.float32)
    batch = [actions[-1]] * len(envs)
    log_prob = np.zeros(len(envs))
    discount = 1.0
    for _ in range(max_steps):
        for i in np.flatnonzero(running):
            obs[i], reward, terminated, truncated, _ = envs[i].step(batch[i])
            returns[i] += discount * (reward - subject.alpha * log_prob[i])
            running[i] = not (terminated or truncated)
        if not running.any():
            break
        discount *= subject.args.gamma
        noise = rng.standard_normal((len(envs), len(actions[0])), np.float32)
        batch, log_prob = subject.act(obs, noise, continuing=True)
    return float(returns.mean())


def start_worker(script: Path, lifeline) -> None:
    """In a worker: it ends with this process, as the script's own evaluation workers do."""
    load_script(script).start_worker(lifeline)


@functools.cache
def load_script(path: Path) -> ModuleType:
    """The script that a run has kept, as a module."""
    name = f"kept_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def measure_snapshot(script: Path, snapshot: Path, best: float, sizes: Sizes) -> dict:
    """In a worker: a row of bias.csv. best: the condition of the policy that was best in the snapshot's evaluation."""
    module = load_script(script)
    content = module.read_file(snapshot, (module.FORMAT,))
    conditions = module.eval_conditions(module.Args(**content["args"]))
    subject = Subject(module, content, int(np.argmin(np.abs(np.array(conditions) - best))))
    env = module.FlatEnv(subject.args.env_id)
    endless_envs = [module.FlatEnv(subject.args.env_id, max_episode_steps=-1) for _ in range(sizes.continuations)]
    seed = module.seeds_for(subject.args.seed, 2, content["step"])[0]
    mean, std = measure(subject, env, endless_envs, sizes, seed)
    for used in (env, *endless_envs):
        used.close()
    row = {"global_step": content["step"], f"eval/best_{module.CONDITION}": subject.condition}
    return {**row, "eval/bias_mean": mean, "eval/bias_std": std, **sizes_of(sizes)}


def measure_or_explain(script: Path, snapshot: Path, best: float, sizes: Sizes) -> tuple[dict | None, str]:
    """(row, ""), or (None, what is wrong): exceptions of the script cannot be raised where it has not been imported."""
    try:
        return measure_snapshot(script, snapshot, best, sizes), ""
    except Exception as error:
        return None, str(error) or repr(error)


def sizes_of(sizes: Sizes) -> dict[str, int]:
    return {field.name: getattr(sizes, field.name) for field in dataclasses.fields(Sizes)}


def read_rows(path: Path) -> list[dict[str, str]]:
    """The whole rows of a CSV file, none where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def best_conditions(run: Path) -> dict[int, float]:
    """The best condition of each evaluation of a run, by step."""
    rows = read_rows(run / "eval.csv")
    names = [name for name in (rows[0] if rows else {}) if name.startswith("eval/best_") and "return" not in name]
    return {int(row["global_step"]): float(row[names[0]]) for row in rows if names}


def warn_of_gamma(gamma: float, max_steps: int) -> None:
    """Say so where more than 1 % of an endless return lies behind the continuations' last step."""
    if gamma**max_steps > 0.01:
        enough = f"; --max-steps {math.ceil(math.log(0.01) / math.log(gamma))} leaves out 1 %" if gamma < 1 else ""
        cut = f"with gamma {gamma:g}, {max_steps} steps leave out {gamma**max_steps:.0%} of an endless return"
        print(f"warning: {cut}, which then counts as bias of Q{enough}", file=sys.stderr)


def script_of(run: Path) -> tuple[Path, float]:
    """The script that a run has kept, which can be loaded, and the run's gamma; UserError where there is none."""
    try:
        config = json.loads((run / "config.json").read_text())
        script, gamma = run / f"{config['script']}.py", config["args"].get("gamma", 0.0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{run} has no readable config.json; give a run directory.") from None
    if not script.is_file():
        raise UserError(f"{script} does not exist; a run keeps the script that made it, and baselines have no value bias.")
    try:
        load_script(script.resolve())  # what is wrong with it, workers could not say
    except Exception as error:
        raise UserError(f"{script} cannot be loaded: {error}.") from None
    return script, gamma


def measure_run(options: Options) -> list[str]:
    """Measure every snapshot that has not been measured with these sizes, and write bias.csv.

    Returns a sentence for each reason why some cannot be measured; the others are measured all the same.
    """
    run = options.run
    script, gamma = script_of(run)
    snapshots = snapshots_of(run)
    if not snapshots:
        raise UserError(f"{run} has no snapshots; --snapshot-frequency of its script writes them.")
    warn_of_gamma(gamma, options.max_steps)
    best = best_conditions(run)
    path = run / "bias.csv"
    sizes = Sizes(**sizes_of(options))
    kept = measured_bias(run, sizes_of(sizes))
    if path.exists() and not kept:  # of other sizes: never lost
        before = run / f"bias-before-{int(time.time())}.csv"
        path.replace(before)
        print(f"{path} was measured at other sizes; it is kept as {before.name}", file=sys.stderr)
    measured = {int(row["global_step"]) for row in kept}
    due = [step for step in snapshots if step not in measured and step in best]
    for step in snapshots.keys() - best.keys():
        print(f"warning: step {step} has no evaluation in eval.csv yet: left out.", file=sys.stderr)
    write_rows(path, kept)
    context = multiprocessing.get_context("spawn")
    reader, lifeline = context.Pipe(duplex=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, min(options.workers or cores, len(due)))
    unmeasurable: dict[str, list[int]] = {}  # steps of snapshots by reason
    with ProcessPoolExecutor(workers, context, start_worker, (script.resolve(), reader)) as pool:
        try:
            tasks = {pool.submit(measure_or_explain, script.resolve(), snapshots[step], best[step], sizes): step for step in due}
            for task in tqdm(as_completed(tasks), "value bias", len(tasks), unit="snapshot", disable=not tasks):
                row, reason = task.result()
                if reason:
                    unmeasurable.setdefault(reason, []).append(tasks[task])
                    continue
                kept.append(row)
                kept.sort(key=lambda row: int(row["global_step"]))
                write_rows(path, kept)
        except BrokenProcessPool:
            raise UserError("a worker has died; the same command goes on, with --workers 1 in less memory.") from None
        finally:
            lifeline.close()  # ends the workers, also in the middle of a snapshot
    sentences = []
    for reason, steps in unmeasurable.items():
        others = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
        sentences.append(f"{snapshots[min(steps)]}{others} cannot be measured: {reason}")
    return sentences


def write_rows(path: Path, rows: list[dict]) -> None:
    """The rows as a CSV file, whole or not at all; none where there are no rows."""
    if not rows:
        return
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    try:
        for name, value in sizes_of(options).items():
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1.")
        if options.workers < 0:
            raise UserError(f"workers is {options.workers}; it must be at least 0.")
        if options.chosen > options.pairs:
            raise UserError(f"chosen is {options.chosen}; it must not exceed pairs, {options.pairs}.")
        problems = measure_run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on: python benchmark/value_bias.py {options.run}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    for row in read_rows(options.run / "bias.csv"):
        mean, std = float(row["eval/bias_mean"]), float(row["eval/bias_std"])
        bias = f"{mean:.3f} ± {std:.3f}" if math.isfinite(mean) else "none: the mean return is 0, or Q is not finite"
        print(f"step {int(row['global_step']):>8}: bias {bias}")
    if problems:
        print(*(f"error: {problem}" for problem in problems), sep="\n", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
