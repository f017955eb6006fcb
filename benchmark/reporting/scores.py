"""All that is computed from returns: means over seeds, values at a step, normalised scores and their intervals, speed."""

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pandas as pd
from experiments import SMOKE, name_in_gymnasium

from .groups import Group, env_order
from .runs import Warnings, of_policies

RETURN = "eval/best_return"


def curve(group: Group, column: str) -> pd.DataFrame:
    """mean, sample std and number of seeds of a column of eval.csv at every step; empty if nothing was measured."""
    series = [run.eval[column] for run in group.runs if column in run.eval] or [pd.Series(dtype=float)]
    return pd.concat(series).dropna().groupby(level=0).agg(mean="mean", std="std", seeds="count")


def mean_and_std(values) -> tuple[float, float]:
    """Mean and sample standard deviation, which one value does not have: NaN."""
    return float(np.mean(values)), float(pd.Series(values).std())


def at(group: Group, step: int) -> np.ndarray:
    """The seeds' returns at the last evaluation up to a step; NaN where there is none."""
    return np.array([run.eval[RETURN].asof(step) for run in group.runs])


def steps_to(group: Group, threshold: float) -> int | None:
    """The first evaluation at which the mean over all seeds reaches a return; None if it does not."""
    stats = curve(group, RETURN)
    reached = stats[(stats["mean"] >= threshold) & (stats["seeds"] == len(group.runs))]
    return int(reached.index[0]) if len(reached) else None


def last_before(steps: pd.Index, step: int) -> int | None:
    """The last evaluation at or before a step; None if it is as far back as one evaluation interval there, or further."""
    before = steps[: steps.searchsorted(step, side="right")]
    if not len(before):
        return None
    interval = max(np.diff(steps[max(0, len(before) - 2) : len(before) + 1]), default=1)
    return int(before[-1]) if step - before[-1] < interval else None


class Value(NamedTuple):
    """Returns at a step."""

    mean: float
    std: float
    steps: set[int]  # the evaluations that it is of, see last_before()
    missing: str = ""  # how many of the seeds have one, if not all

    def ratio_to(self, rival: "Value | None", step: int) -> float | None:
        """None where the rival has no value above 0, or an evaluation of either is more than 5 % of the steps earlier."""
        if rival is None or rival.mean <= 0 or min(self.steps | rival.steps) < 0.95 * step:
            return None
        return self.mean / rival.mean


def value_at(group: Group, step: int, fresh: bool) -> Value | None:
    """Of the seeds that have a return there; None if none has. fresh: of beta* on fresh episodes in place of the best policy."""
    values, used = [], set()
    for run in group.runs:
        place = last_before(run.eval.index, step)
        returns = run.fresh if fresh else run.eval[RETURN]
        if place in returns:
            values.append(returns[place])
            used.add(place)
    if not values:
        return None
    missing = "" if len(values) == len(group.runs) else f" ({len(values)} of {len(group.runs)})"
    return Value(*mean_and_std(values), used, missing)


def published_value_at(curve: pd.DataFrame, step: int) -> Value | None:
    """The same of a published curve."""
    place = last_before(curve.index, step)
    return None if place is None else Value(*curve.loc[place, ["mean_return", "std_return"]], {place})


def fresh_returns(group: Group) -> dict[int, tuple[list[float], list[float]]]:
    """Step -> returns of beta* on fresh episodes, and those of the evaluation that chose it, of the seeds that have both."""
    found = {}
    for step in sorted({step for run in group.runs for step in run.fresh.index}):
        runs = [run for run in group.runs if step in run.fresh]
        found[step] = [run.fresh[step] for run in runs], [run.eval[RETURN][step] for run in runs]
    return found


def speed_of(group: Group) -> tuple[float, float]:
    """Steps per second while learning, by train.csv, and hours to the last common evaluation: medians over seeds."""
    rates = []
    for run in group.runs:
        start = run.args.get("learning_starts")
        learning = run.train.index > (start if isinstance(start, int) else 5000) + 1000
        rates.append(run.train["charts/SPS"][learning].median())
    hours = [run.eval["charts/wall_seconds"].asof(group.last) / 3600 for run in group.runs]
    return pd.Series(rates).median(), np.median(hours)


def family_frame(group: Group, what: str) -> pd.DataFrame:
    """Mean over seeds of the columns eval/what_CONDITION: index step, columns conditions; steps that all seeds have."""
    frames = [of_policies(run.eval, what) for run in group.runs]
    return (sum(frames) / len(frames)).dropna()  # NaN where a seed is missing


def score_matrices(groups: list[Group], paper: pd.DataFrame, warnings: Warnings) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Algorithm -> returns (seeds, environments) over the paper's RAC-SAC return; environment -> the step they are taken at.

    That is the last step that all of these runs have. Every algorithm has all of these environments, and as many seeds as in
    its poorest; so that one more algorithm or environment does not narrow the comparison, what is compared is the choice of
    two algorithms or more with most pairs of algorithm and environment. Tiny runs count only where there are no others.
    """
    paper = paper[paper["algorithm"] == "RAC-SAC"].set_index("env")["mean_return"]
    usable = [group for group in groups if name_in_gymnasium(group.env_id) in paper.index]
    usable = [group for group in usable if not group.exp_name.startswith(SMOKE)] or usable
    if not usable:
        return {}, {}
    ran_on = defaultdict(dict)  # algorithm -> environment -> group
    for group in usable:
        ran_on[group.label][group.env_id] = group
    choices = {frozenset(a.keys() & b.keys()) for a in ran_on.values() for b in ran_on.values()} - {frozenset()}
    many = {choice: sum(choice <= mine.keys() for mine in ran_on.values()) for choice in choices}
    best = max(choices, key=lambda choice: (many[choice] > 1, many[choice] * len(choice), len(choice), sorted(choice)))
    env_ids = sorted(best, key=env_order)
    complete = {name: mine for name, mine in ran_on.items() if mine.keys() >= best}
    for name in [name for name in ran_on if name not in complete]:
        missing = ", ".join(env_id for env_id in env_ids if env_id not in ran_on[name])
        warnings.add(f"{name} has no run on {missing}: left out of the aggregate scores.")
    left = sorted({group.env_id for group in usable} - best, key=env_order)
    if left:
        warnings.add(f"not all compared algorithms ran on {', '.join(left)}: left out of the aggregate scores.")
    steps = {env_id: min(mine[env_id].last for mine in complete.values()) for env_id in env_ids}
    scores = {}
    for name, mine in complete.items():
        seeds = min(len(group.runs) for group in mine.values())
        if any(len(group.runs) > seeds for group in mine.values()):
            warnings.add(f"{name} does not have the same number of seeds everywhere: the aggregate scores use its first {seeds}.")
        columns = [at(mine[env_id], steps[env_id])[:seeds] / paper[name_in_gymnasium(env_id)] for env_id in env_ids]
        for env_id, step in steps.items():
            used = {int(place) for run in mine[env_id].runs[:seeds] if (place := run.eval.index.asof(step)) < step}
            if used:
                places = ", ".join(f"{place:,}" for place in sorted(used))
                warnings.add(f"{name} has no evaluation at step {step:,} of {env_id}: its aggregate score is of step {places}.")
        scores[name] = np.stack(columns, axis=1)
        if late := [env_id for env_id, column in zip(env_ids, columns, strict=True) if np.isnan(column).any()]:
            where = ", ".join(late)
            warnings.add(f"{name} has no evaluation on {where} by the last step of the others: left out of the aggregate scores.")
            del scores[name]
    return scores, steps


def intervals(scores: dict, statistic, repetitions: int) -> dict[str, tuple[float, float, float]]:
    """rliable's point estimate and stratified bootstrap interval (95 %); without an interval where there is one seed."""
    from rliable import library

    np.random.seed(0)  # rliable draws its environments' samples from numpy's global generator
    estimates, bounds = library.get_interval_estimates(
        scores, lambda *x: np.array([statistic(*x)]), reps=repetitions, random_state=np.random.RandomState(0)
    )
    found = {}
    for name, estimate in estimates.items():
        matrices = scores[name] if isinstance(scores[name], tuple) else (scores[name],)
        low, high = bounds[name][:, 0] if min(len(matrix) for matrix in matrices) > 1 else (math.nan, math.nan)
        found[name] = (float(estimate[0]), float(low), float(high))
    return found
