"""The report's tables: frames of text and the notes below them."""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from experiments import VARIANTS, parts_of, short_name

from .references import RIVAL, last_before, paper_name, published_curves, same_setting
from .runs import Group, Run, env_order
from .scores import RETURN, at, steps_to

NONE = "—"  # in a table's cell
STEPS = (16_666, 33_332, 50_000, 100_000, 300_000)  # at which all is compared with published curves


class Table(NamedTuple):
    frame: pd.DataFrame
    notes: list[str]


def number(value: float | None, digits: int = 0) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def plus_minus(mean: float, std: float, seeds: int) -> str:
    """mean ± sample standard deviation, which one seed does not have."""
    return f"{mean:,.0f} ± {std:,.0f}" if seeds > 1 else f"{mean:,.0f}"


def mean_std(values: np.ndarray) -> str:
    return plus_minus(values.mean(), np.std(values, ddof=1) if len(values) > 1 else 0.0, len(values))


def final_return(groups: list[Group], paper: pd.DataFrame) -> Table:
    rows = []
    for env_id in dict.fromkeys(group.env_id for group in groups):
        values = paper[paper["env"] == short_name(env_id)].set_index("algorithm")
        theirs = {name: {"paper": plus_minus(mean, std, 2), "paper's steps": number(steps)} for name, mean, std, steps in
                  values[["mean_return", "std_return", "env_steps"]].itertuples()}  # fmt: skip
        here = {id(group): paper_name(group, paper) for group in groups if group.env_id == env_id}
        for group in [group for group in groups if group.env_id == env_id]:
            name, ours = here[id(group)], at(group, group.last)
            row = {"environment": env_id, "algorithm": group.label, "seeds": len(group.runs), "steps": number(group.last),
                   "return": mean_std(ours), **theirs.get(name, {})}  # fmt: skip
            if name in values.index and same_setting(group) and group.last == values.loc[name, "env_steps"]:
                row["difference"] = f"{ours.mean() - values.loc[name, 'mean_return']:+,.0f}"
            rows.append(row)
        rows += [{"environment": env_id, "algorithm": f"{name} (paper only)", **cells} for name, cells in theirs.items()
                 if name not in here.values()]  # fmt: skip
    columns = ("environment", "algorithm", "seeds", "steps", "return", "paper", "paper's steps", "difference")
    frame = pd.DataFrame(rows, columns=columns, dtype=object).fillna(NONE)
    notes = [
        "Return at the last evaluation that all seeds have: mean ± sample standard deviation over seeds of the best policy's "
        "average over its episodes (the paper's protocol; the maximum over policies is biased upwards). A difference is given "
        "only at the paper's number of steps and with its settings; its environments are of version -v3."
    ]
    if "MBPO (paper only)" in set(frame["algorithm"]):
        notes.append("MBPO stays with the paper's numbers: no maintained implementation runs today (mbrl 0.2.0 needs gymnasium "
                     "0.26).")  # fmt: skip
    return Table(frame, notes)


def samples_to_return(groups: list[Group], paper: pd.DataFrame) -> Table:
    labels = list(dict.fromkeys(group.label for group in groups if short_name(group.env_id) in set(paper["env"])))
    ours = {group.label: paper_name(group, paper) for group in groups if group.label in labels}
    others = [name for name in dict.fromkeys(paper["algorithm"]) if name not in ours.values()]
    rows, noted, marked = [], False, False
    for env_id in dict.fromkeys(group.env_id for group in groups):
        table = paper[paper["env"] == short_name(env_id)]
        for threshold in dict.fromkeys(table["return"]):
            values = table[table["return"] == threshold].set_index("algorithm")["env_steps"]
            row = {"environment": env_id, "return": number(threshold)}
            for name in labels:
                group = next((group for group in groups if group.env_id == env_id and group.label == name), None)
                steps = steps_to(group, threshold) if group else None
                row[name] = number(steps) if steps else f"not by {group.last:,}" if group else NONE
                if ours[name] in values.index:
                    differs = group is not None and not same_setting(group)
                    marked |= differs
                    row[name] += f" (paper {values[ours[name]]:,}{' †' if differs else ''})"
            for name in others:
                doubtful = (short_name(env_id), threshold, name) == ("Walker2d", 3000, "TQC")
                noted |= doubtful
                row[f"{name} (paper only)"] = number(values.get(name)) + (" ‡" if doubtful else "")
            rows.append(row)
    notes = ["Environment steps at the first evaluation at which the mean over all seeds reaches the return."]
    if marked:
        notes.append("† with other settings than the paper's value: not like with like.")
    if noted:
        notes.append("‡ as printed in the paper; its ratio of 10.75 to RAC-SAC implies about 570,000.")
    return Table(pd.DataFrame(rows), notes)


def best_on_fresh(run: Run) -> pd.Series | None:
    """What --evaluate found of the policy that was best in training, by the name of its step; None if it was not asked."""
    best = run.fresh[run.fresh["best_in_training"] == 1] if len(run.fresh) else run.fresh
    return best.iloc[0] if len(best) else None


def fresh_return(groups: list[Group]) -> Table:
    rows = []
    for group in groups:
        found = [(run, best) for run in group.runs if (best := best_on_fresh(run)) is not None]
        if found:
            headline = np.array([run.eval[RETURN].loc[int(best.name)] for run, best in found])
            fresh = np.array([best["return"] for _, best in found])
            rows.append({"environment": group.env_id, "algorithm": group.label, "seeds": len(found),
                         "best return": mean_std(headline), "beta*'s return on fresh episodes": mean_std(fresh),
                         "difference": f"{(fresh - headline).mean():+,.0f}"})  # fmt: skip
    return Table(
        pd.DataFrame(rows), ["The best of several noisy averages is biased upwards; the same policy on fresh episodes is not."]
    )


def values_at(group: Group, step: int, fresh: bool) -> tuple[float, float, int, set[int]] | None:
    """Mean and std of the seeds' returns at a step, their number, and the evaluations that they are of (see last_before).

    None if a seed has none there. fresh: of beta* on fresh episodes in place of the best policy of the evaluation.
    """
    values, used = [], set()
    for run in group.runs:
        place, best = last_before(run.eval.index, step), best_on_fresh(run)
        if place is None or (fresh and (best is None or best.name != place)):
            return None
        values.append(best["return"] if fresh else run.eval[RETURN].loc[place])
        used.add(place)
    return np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0.0, len(values), used


def published_at(curve: pd.DataFrame, step: int) -> tuple[float, float, int, set[int]] | None:
    """The same of a published curve."""
    place = last_before(curve.index, step)
    return None if place is None else (*curve.loc[place, ["mean_return", "std_return", "seeds"]], {place})


def with_rival(group: Group) -> bool:
    """Whether a ratio to the published rival compares like with like: an algorithm as its name says, at the rival's UTD."""
    beside = parts_of(group.exp_name)[1] or group.deviations(group.exp_name) or group.told_apart_by
    return not beside and (group.exp_name in VARIANTS or group.runs[0].args.get("utd") == 20)


def beside_published(groups: list[Group], names: tuple[str, ...]) -> tuple[Table, Table]:
    """Returns at STEPS, ours and published ones of the given algorithms; and their ratios to the published rival's."""
    rivals = {env_id: curve for (env_id, _), curve in published_curves((RIVAL,)).items()}
    returns, ratios, elsewhere = [], [], {}
    for env_id in sorted(rivals.keys() & {group.env_id for group in groups}, key=env_order):
        rival = {step: published_at(rivals[env_id], step) for step in STEPS}
        sources = []  # (algorithm, policy, seeds), step -> values, whether a ratio is given
        for group in [group for group in groups if group.env_id == env_id]:
            for policy, fresh in (("best", False), ("beta* on fresh episodes", True)):
                cells = {step: values_at(group, step, fresh) for step in STEPS}
                if any(cells.values()) or not fresh:
                    sources.append(((group.label, policy, len(group.runs)), cells, with_rival(group)))
        for name, curve in [(name, curve) for (where, name), curve in published_curves(names).items() if where == env_id]:
            cells = {step: published_at(curve, step) for step in STEPS}
            sources.append(((f"{name}, published", "its one policy", curve["seeds"].iloc[0]), cells, True))
        for (name, policy, seeds), cells, comparable in sources:
            row = {"environment": env_id, "algorithm": name, "policy": policy, "seeds": seeds}
            returns.append(row | {f"{step:,}": plus_minus(*cell[:3]) if cell else NONE for step, cell in cells.items()})
            shares = {step: cell[0] / rival[step][0] for step, cell in cells.items() if comparable and cell and rival[step]
                      and rival[step][0] > 0 and min(cell[3] | rival[step][3]) >= 0.95 * step}  # fmt: skip
            if shares:
                ratios.append(row | {f"{step:,}": f"{shares[step]:.2f}" if step in shares else NONE for step in STEPS})
            for step, cell in cells.items():
                if cell and cell[3] != {step}:
                    used = ", ".join(f"{place:,}" for place in sorted(cell[3]))
                    elsewhere.setdefault(name, set()).add((step, f"{used} for {step:,}"))
    notes = [
        "Mean ± sample standard deviation over seeds. A value at a step is that of the last evaluation at or before it, less "
        "than one evaluation interval earlier; nothing is interpolated, and a cell is empty where there is none or a seed has "
        "not come so far. beta* was played on fresh episodes only at the step of a run's evaluate.csv. Published values are of "
        "one deterministic policy, averaged over the given number of seeds (benchmark/published/README.md)."
    ]
    if elsewhere:
        lines = [f"{name}: {', '.join(text for _, text in sorted(places))}" for name, places in elsewhere.items()]
        notes.append(f"Evaluations used where there is none at the step itself. {'; '.join(lines)}.")
    note = (f"Mean return over that of published {RIVAL} (UTD 20) at the same step (by the rule above, where the evaluation is "
            "at most 5 % of the steps earlier) and version of the environment; only for algorithms with the settings of their "
            "names, and for others at UTD 20.")  # fmt: skip
    return Table(pd.DataFrame(returns), notes), Table(pd.DataFrame(ratios), [note])


def aggregate(estimates: dict[str, tuple[float, float, float]], seeds: dict[str, int] | None, what: str, symbol: str) -> Table:
    """Point estimates with their intervals, by algorithm or pair of algorithms."""
    rows = []
    for name, (point, low, high) in estimates.items():
        row = {what: name} if seeds is None else {what: name, "seeds": seeds[name]}
        rows.append({**row, symbol: number(point, 3), "low": number(low, 3), "high": number(high, 3)})
    return Table(pd.DataFrame(rows), [])


def learning_starts(run: Run) -> int:
    value = run.args.get("learning_starts")
    return value if isinstance(value, int) else 5000


def speed(groups: list[Group]) -> Table:
    rows = []
    for group in groups:
        learning = [run.train["charts/SPS"][run.train.index > learning_starts(run) + 1000]
                    for run in group.runs if "charts/SPS" in run.train]  # fmt: skip
        rates = [sps.dropna().median() for sps in learning if sps.notna().any()]
        hours = [run.eval["charts/wall_seconds"].iloc[-1] / 3600 for run in group.runs]
        rows.append({"environment": group.env_id, "algorithm": group.label,
                     "steps per second while learning": number(np.median(rates) if rates else None, 1),
                     "hours up to the last evaluation": number(np.mean(hours), 2),
                     "device": ", ".join(sorted({run.device for run in group.runs}))})  # fmt: skip
    return Table(pd.DataFrame(rows), [
        "Median over a run's rows of train.csv, then over seeds; runs that shared a machine slowed each other."])  # fmt: skip


def all_runs(groups: list[Group]) -> Table:
    rows = [{"run directory": run.path, "algorithm": group.label, "environment": run.env_id, "seed": run.seed,
             "evaluated up to step": f"{run.last:,} of {run.total:,}{'' if run.finished else ', unfinished'}",
             "commit": run.short_commit, "tracked": "yes" if run.tracked else "no"}
            for group in groups for run in group.runs]  # fmt: skip
    return Table(pd.DataFrame(rows), [])
