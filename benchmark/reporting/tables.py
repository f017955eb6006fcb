"""The report's tables: frames of text and the notes below them."""

import math
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import pandas as pd
from experiments import name_in_gymnasium

from .groups import Group
from .references import RIVAL, comparable_with_rival, paper_name, published_curves, same_setting
from .scores import at, fresh_returns, mean_and_std, published_value_at, speed_of, steps_to, value_at

NONE = "—"  # in a table's cell
OTHER_SETTINGS = "† with other settings than the paper's value: not like with like."
STEPS = (16_666, 33_332, 50_000, 100_000, 300_000)  # at which all is compared with published curves


class Table(NamedTuple):
    frame: pd.DataFrame
    notes: Sequence[str] = ()


def number(value: float | None, digits: int = 0) -> str:
    return NONE if pd.isna(value) else f"{value:z,.{digits}f}"


def digits_of(*values: float) -> int:
    """Behind the point, so that the largest value has two at least: none from 10 on, at most four."""
    size = max((abs(value) for value in values if not pd.isna(value)), default=0.0)
    return min(max(0, 1 - math.floor(math.log10(size))), 4) if size else 0


def plus_minus(mean: float, std: float) -> str:
    """mean ± sample standard deviation, which one seed does not have: NaN."""
    digits = digits_of(mean, std)
    return number(mean, digits) if pd.isna(std) else f"{number(mean, digits)} ± {number(std, digits)}"


def mean_std(values) -> str:
    return plus_minus(*mean_and_std(values))


def by_environment(groups: list[Group]) -> list[tuple[str, list[Group]]]:
    """(environment, its groups), of groups that are sorted by environment."""
    return [(env_id, list(found)) for env_id, found in groupby(groups, attrgetter("env_id"))]


def ends_elsewhere(group: Group) -> str:
    """Where its seeds' evaluations end, unless all end at the same step."""
    ends = sorted({run.last for run in group.runs})
    return f" (seeds end at {', '.join(map(number, ends))})" if ends != [group.last] else ""


def final_return(groups: list[Group], paper: pd.DataFrame) -> Table:
    rows = []
    for env_id, here in by_environment(groups):
        values = paper[paper["env"] == name_in_gymnasium(env_id)].set_index("algorithm")
        theirs = {
            name: {"paper": plus_minus(mean, std), "paper's steps": number(steps)}
            for name, mean, std, steps in values[["mean_return", "std_return", "env_steps"]].itertuples()
        }
        names = [paper_name(group, paper) for group in here]
        for group, name in zip(here, names, strict=True):
            ours = at(group, group.last)
            row = {
                "environment": env_id,
                "algorithm": group.label,
                "seeds": len(group.runs),
                "steps": number(group.last) + ends_elsewhere(group),
                "return": mean_std(ours),
                **theirs.get(name, {}),
            }
            if name in theirs and not same_setting(group):
                row["paper"] += " †"
            if name in theirs and same_setting(group) and group.last == values.loc[name, "env_steps"]:
                row["difference"] = f"{ours.mean() - values.loc[name, 'mean_return']:+,.0f}"
            rows.append(row)
        rows += [
            {"environment": env_id, "algorithm": f"{name} (paper only)", **cells}
            for name, cells in theirs.items()
            if name not in names
        ]
    columns = ("environment", "algorithm", "seeds", "steps", "return", "paper", "paper's steps", "difference")
    notes = [
        "Return at the last evaluation that all seeds have: mean ± sample standard deviation over seeds of the best policy's "
        "average over its episodes (the paper's protocol; the maximum over policies is biased upwards). A difference is given "
        "only at the paper's number of steps and with its settings; its environments are of version -v3."
    ]
    frame = pd.DataFrame(rows, columns=columns, dtype=object).fillna(NONE)
    if frame["paper"].str.endswith("†").any():
        notes.append(OTHER_SETTINGS)
    return Table(frame, notes)


def samples_to_return(groups: list[Group], paper: pd.DataFrame) -> Table:
    ours = {group.label: paper_name(group, paper) for group in groups if name_in_gymnasium(group.env_id) in set(paper["env"])}
    others = [name for name in paper["algorithm"].unique() if name not in ours.values()]
    rows = []
    for env_id, here in by_environment(groups):
        found = {group.label: group for group in here}
        table = paper[paper["env"] == name_in_gymnasium(env_id)].set_index("algorithm")
        for threshold, values in table.groupby("return")["env_steps"]:
            row = {"environment": env_id, "return": number(threshold)}
            for label, name in ours.items():
                group = found.get(label)
                steps = steps_to(group, threshold) if group else None
                row[label] = number(steps) if steps else f"not by {group.last:,}" if group else NONE
                if name in values:
                    row[label] += f" (paper {values[name]:,}{' †' if group and not same_setting(group) else ''})"
            for name in others:
                doubtful = (name_in_gymnasium(env_id), threshold, name) == ("Walker2d", 3000, "TQC")
                row[f"{name} (paper only)"] = number(values.get(name)) + (" ‡" if doubtful else "")
            rows.append(row)
    notes = ["Environment steps at the first evaluation at which the mean over all seeds reaches the return."]
    marks = (
        OTHER_SETTINGS,
        "‡ as printed in the paper; its ratio of 10.75 to RAC-SAC implies about 570,000.",
    )
    return Table(pd.DataFrame(rows), notes + [mark for mark in marks if mark[0] in str(rows)])


def fresh_return(groups: list[Group]) -> Table:
    rows = []
    for group in groups:
        for step, (fresh, best) in fresh_returns(group).items():
            means = np.mean(fresh), np.mean(best)
            rows.append(
                {
                    "environment": group.env_id,
                    "algorithm": group.label,
                    "seeds": len(fresh),
                    "step": number(step),
                    "best return": mean_std(best),
                    "beta*'s return on fresh episodes": mean_std(fresh),
                    "difference": f"{means[0] - means[1]:+,.{digits_of(*means)}f}",
                }
            )
    return Table(
        pd.DataFrame(rows), ["The best of several noisy averages is biased upwards; the same policy on fresh episodes is not."]
    )


def beside_published(groups: list[Group], names: tuple[str, ...]) -> tuple[Table, Table]:
    """Returns at STEPS, ours and published ones of the given algorithms; and their ratios to the published rival's."""
    rivals = {env_id: curve for (env_id, _), curve in published_curves((RIVAL,)).items()}
    returns, ratios, elsewhere = [], [], {}
    for env_id, here in by_environment(groups):
        if env_id not in rivals:
            continue
        sources = []  # (algorithm, policy, seeds), step -> value, whether a ratio is given
        for group in here:
            for policy, fresh in (("best", False), ("beta* on fresh episodes", True)):
                values = {step: value_at(group, step, fresh) for step in STEPS}
                if any(values.values()) or not fresh:
                    sources.append(((group.label, policy, len(group.runs)), values, comparable_with_rival(group)))
        for (where, name), curve in published_curves(names).items():
            if where == env_id:
                values = {step: published_value_at(curve, step) for step in STEPS}
                sources.append(((f"{name}, published", "its one policy", curve["seeds"].iloc[0]), values, True))
        for (name, policy, seeds), values, comparable in sources:
            row = {"environment": env_id, "algorithm": name, "policy": policy, "seeds": seeds}
            shown = {f"{step:,}": NONE for step in STEPS}
            shares = {}
            for step, value in values.items():
                if value is None:
                    continue
                shown[f"{step:,}"] = plus_minus(value.mean, value.std) + value.missing
                ratio = value.ratio_to(published_value_at(rivals[env_id], step), step)
                if comparable and ratio is not None:
                    shares[f"{step:,}"] = f"{ratio:.2f}{value.missing}"
                if value.steps != {step}:
                    used = ", ".join(f"{place:,}" for place in sorted(value.steps))
                    elsewhere.setdefault(name, {})[f"{used} for {step:,}"] = None
            returns.append(row | shown)
            if shares:
                ratios.append(row | {f"{step:,}": NONE for step in STEPS} | shares)
    notes = [
        "Mean ± sample standard deviation over seeds. A value at a step is that of the last evaluation at or before it, less "
        "than one evaluation interval earlier; nothing is interpolated, a cell is empty where there is none, and (1 of 3) says "
        "that only one of three seeds has one. beta* was played on fresh episodes only at the step of a run's evaluate.csv. "
        "Published values are of one deterministic policy, averaged over the given seeds (benchmark/published/README.md)."
    ]
    if elsewhere:
        lines = [f"{name}: {', '.join(places)}" for name, places in elsewhere.items()]
        notes.append(f"Evaluations used where there is none at the step itself. {'; '.join(lines)}.")
    note = (
        f"Mean return over that of published {RIVAL} (UTD 20) at the same step (by the rule above, where the evaluation is "
        "at most 5 % of the steps earlier) and version of the environment; only for algorithms with the settings of their "
        "names, and for others at UTD 20."
    )
    return Table(pd.DataFrame(returns), notes), Table(pd.DataFrame(ratios), [note])


def aggregate(estimates: dict[str, tuple[float, float, float]], what: str, symbol: str) -> Table:
    """Point estimates with their intervals, by algorithm or pair of algorithms."""
    frame = pd.DataFrame.from_dict(estimates, orient="index", columns=[symbol, "low", "high"]).map(number, digits=3)
    return Table(frame.rename_axis(what).reset_index())


def speed(groups: list[Group]) -> Table:
    rows = []
    for group in groups:
        rate, hours = speed_of(group)
        rows.append(
            {
                "environment": group.env_id,
                "algorithm": group.label,
                "steps per second while learning": number(rate, 1),
                "hours": number(hours, 2),
                "up to step": number(group.last),
                "device": ", ".join(sorted({run.device for run in group.runs})),
            }
        )
    return Table(
        pd.DataFrame(rows),
        [
            "Steps per second: median over a run's rows of train.csv, then over seeds. Hours: median over seeds, up to the last "
            "evaluation that all have. Runs that shared a machine slowed each other."
        ],
    )


def all_runs(groups: list[Group]) -> Table:
    rows = [
        {
            "run directory": run.path,
            "algorithm": group.label,
            "environment": run.env_id,
            "seed": run.seed,
            "evaluated up to step": f"{run.last:,} of {run.total:,}{'' if run.finished else ', unfinished'}",
            "commit": run.short_commit,
            "tracked": "yes" if run.tracked else "no",
        }
        for group in groups
        for run in group.runs
    ]
    return Table(pd.DataFrame(rows))
