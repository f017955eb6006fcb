"""Redraw the paper's tables and figures from run directories: report.md with PNG figures, and a self-contained report.html.

    python benchmark/report.py runs/ --out report/
    python benchmark/report.py runs/ --out report/ --publish --entity TEAM --project PROJECT

Reads any number of run directories, unfinished ones too. What cannot be used is named in a warning, on the screen and in the
report. The paper's values are in benchmark/paper/.
"""

import base64
import contextlib
import csv
import html
import json
import math
import re
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import tyro
from experiments import (
    HOUSEKEEPING,
    PAPER_ENVS,
    SMOKE,
    SWEEPS,
    VARIANTS,
    base_of,
    deviations,
    label,
    short_name,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAPER = Path(__file__).resolve().parent / "paper"
CONDITIONS = {"rac_sac": "beta", "rac_td3": "beta", "vanilla_rac": "beta", "rac_itm": "k"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")  # Okabe and Ito's
LINES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)))  # dotted lines have a meaning of their own
STYLE = {"figure.dpi": 110, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
         "axes.spines.right": False, "legend.frameon": False, "savefig.bbox": "tight"}  # fmt: skip
TITLE = "Realistic Actor-Critic: report"
REFERENCE = """The method and the paper's values are of Sicen Li, Gang Wang, Qinyun Tang and Liquan Wang, Balancing Value
Underestimation and Overestimation with Realistic Actor-Critic, 2021, arXiv:2110.09712; a later version is in Frontiers in
Neurorobotics, doi 10.3389/fnbot.2022.1081242."""
HTML_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px }
td, th { border-bottom: 1px solid #ddd; padding: .3rem .7rem; text-align: left }
div { overflow-x: auto }
img { max-width: 100% }
figure { margin: 1.5rem 0 }
figcaption { color: #555; font-size: 13px }
"""
RETURN = "average undiscounted return"
NONE = "—"  # in a table's cell


class UserError(Exception):
    """A mistake of the user: shown as one sentence, exit code 2."""


@dataclass
class Options:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """run directories, or folders that hold them at any depth"""
    out: Path = Path("report")
    """the folder that the report is written into"""
    bootstrap: int = 2000
    """bootstrap repetitions of the intervals"""
    publish: bool = False
    """also make a Weights & Biases report of the tracked runs; its specification is written to wandb_report.json"""
    entity: str | None = None
    """the Weights & Biases entity (team); by default that of the runs, else your own"""
    project: str | None = None
    """the Weights & Biases project; by default that of the runs"""


@dataclass
class Run:
    path: Path
    script: str
    condition: str | None  # what its policies differ by; None where there is one policy, as of the baselines
    args: dict
    commit: str
    script_sha256: str | None
    device: str
    eval: pd.DataFrame  # index: step
    train: pd.DataFrame  # index: step, may be empty
    fresh: pd.DataFrame  # evaluate.csv, may be empty

    env_id = property(lambda self: self.args["env_id"])
    seed = property(lambda self: self.args["seed"])
    exp_name = property(lambda self: self.args["exp_name"])
    total = property(lambda self: self.args["total_timesteps"])
    last = property(lambda self: int(self.eval.index[-1]))
    finished = property(lambda self: self.last >= self.total)
    tracked = property(lambda self: (self.path / "wandb_id").exists())
    short_commit = property(lambda self: self.commit[:12] + ("-dirty" if self.commit.endswith("-dirty") else ""))


@dataclass
class Group:
    """The runs of one experiment name with one setting in one environment: one per seed."""

    env_id: str
    exp_name: str
    runs: list[Run] = field(default_factory=list)
    label: str = ""
    told_apart_by: dict = field(default_factory=dict)  # the settings in which it differs from others of its name

    condition = property(lambda self: self.runs[0].condition)

    @property
    def last(self) -> int:
        """The last step at which all seeds were evaluated; where there is none, the earliest end of a seed."""
        common = set.intersection(*(set(run.eval.index) for run in self.runs))
        return int(max(common, default=min(run.last for run in self.runs)))

    def deviations(self, exp_name: str) -> dict:
        """The settings that are not those of an experiment name."""
        run = self.runs[0]
        return deviations(run.args, run.script, exp_name, run.env_id)


# ------------------------------------------------------------------------------------------------------------ reading runs
def read_csv(path: Path, warn, required: tuple[str, ...] = ("global_step",)) -> pd.DataFrame:
    """A CSV file of numbers by its step; what is cut off or damaged is left out from there on, with a warning.

    required: columns that a file of its kind has, with a finite number in every row.
    """
    try:
        text = path.read_text()
        rows = list(csv.reader(text.split("\n")[:-1]))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        if path.exists():
            warn(f"{path} cannot be read ({error}): left out.")
        return pd.DataFrame()
    if text and not text.endswith("\n"):
        warn(f"{path} ends in the middle of a row: that row is left out.")
    if len(rows) < 2:
        return pd.DataFrame()
    header, values = rows[0], []
    missing = [name for name in required if name not in header]
    if missing or len(set(header)) < len(header):
        fault = f"has no column {missing[0]}" if missing else "names a column twice"
        warn(f"{path} is mixed up or damaged, it {fault}: left out.")
        return pd.DataFrame()
    for number, row in enumerate(rows[1:], 2):
        try:
            if len(row) != len(header):
                raise ValueError
            values.append([float(cell) if cell else math.nan for cell in row])
            if not all(math.isfinite(value) for name, value in zip(header, values[-1], strict=True) if name in required):
                values.pop()
                raise ValueError
        except ValueError:
            warn(f"{path} is damaged in line {number}: left out from there on.")
            break
    frame = pd.DataFrame(values, columns=header)
    return frame.set_index(frame["global_step"].astype(int)) if len(frame) else pd.DataFrame()


def of_policies(frame: pd.DataFrame, what: str) -> dict[str, float]:
    """The columns eval/what_CONDITION of an eval.csv and their conditions."""
    found = {}
    for name in frame:
        with contextlib.suppress(ValueError):  # return_std of somebody's own script is none of them
            if name.startswith(f"eval/{what}_"):
                found[name] = float(name.removeprefix(f"eval/{what}_"))
    return found


def load_run(path: Path, warn) -> Run | None:
    """The run in a directory; None, with a warning, if it cannot be used."""
    try:
        config = json.loads((path / "config.json").read_text())
        script, args = config["script"], config["args"]
        wanted = {"env_id": str, "seed": int, "exp_name": str, "total_timesteps": int}
        if not isinstance(script, str) or not all(isinstance(args[name], kind) for name, kind in wanted.items()):
            raise TypeError
    except FileNotFoundError:
        return warn(f"{path} has no config.json: left out.")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return warn(f"{path} has a damaged config.json, or one that is not of this project: left out.")
    evaluations = read_csv(path / "eval.csv", warn, ("global_step", "eval/best_return", "charts/wall_seconds"))
    if evaluations.empty:
        return warn(f"{path} has no evaluation yet, or none that can be read: left out.")
    policies = of_policies(evaluations, "return")
    best = [name.removeprefix("eval/best_") for name in evaluations if name.startswith("eval/best_")]
    conditions = [name for name in best if name not in ("return", "return_std")]
    told = CONDITIONS.get(script, conditions[0] if conditions else None)  # another script's differ by what its eval.csv says
    expected = args.get("num_eval_policies", 1 if script in CONDITIONS else len(policies))
    largest = args.get(f"eval_{told}_max", args.get(told))  # the last of the evaluated policies
    others = isinstance(largest, int | float) and not math.isclose(max(policies.values(), default=0.0), largest, rel_tol=1e-4)
    if conditions != ([told] if told else []) or len(policies) != expected or (script in CONDITIONS and others):
        return warn(f"{path} is mixed up: its eval.csv is not one of {script}.py with the arguments in config.json: left out.")
    if not evaluations.index.is_monotonic_increasing or not evaluations.index.is_unique:
        return warn(f"{path} is mixed up: the steps in its eval.csv do not grow: left out.")
    if evaluations.index[-1] > args["total_timesteps"]:
        return warn(f"{path} is mixed up: its eval.csv goes beyond the {args['total_timesteps']} steps of config.json: left out.")
    commit, device = (str(config.get(name) or "unknown") for name in ("git_commit", "device"))
    train = read_csv(path / "train.csv", warn, ("global_step", "charts/SPS"))
    fresh = read_csv(path / "evaluate.csv", warn, ("global_step", "return", "best_in_training"))
    if len(fresh) and fresh.index[0] not in evaluations.index:
        warn(f"{path / 'evaluate.csv'} is of step {fresh.index[0]:,}, at which eval.csv has no evaluation: left out.")
        fresh = pd.DataFrame()
    return Run(path, script, told, args, commit, config.get("script_sha256"), device, evaluations, train, fresh)


def find_runs(paths, warn) -> list[Run]:
    """All runs in and below the given directories; folders without a run anywhere in them are named in a warning."""

    def folders(folder: Path) -> list[Path]:
        try:
            return [child for child in sorted(folder.iterdir()) if child.is_dir() and not child.name.startswith(".")]
        except OSError as error:
            warn(f"{folder} cannot be read ({error.strerror}): left out.")
            return []

    def search(folder: Path) -> list[Run] | None:
        """The usable runs at or below a folder; None if there is no run directory, usable or not."""
        if any((folder / name).exists() for name in ("config.json", "eval.csv", "train.csv", "checkpoint.pt")):
            run = load_run(folder, warn)
            if run:
                return [run]
            # A stray file in a folder of runs: those below it count. Its other folders (videos) need no mention.
            return [run for runs in map(search, folders(folder)) for run in runs or []]
        found = {child: search(child) for child in folders(folder)}
        if all(runs is None for runs in found.values()):
            return None
        for child, runs in found.items():
            if runs is None:
                warn(f"{child} is not a run directory: left out.")
        return [run for runs in found.values() for run in runs or []]

    everything = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a directory; give run directories, or folders that hold them.")
        runs = search(path)
        if runs is None:
            warn(f"{path} holds no run directory.")
        everything += runs or []
    unique = {run.path.resolve(): run for run in everything}
    return list(unique.values())


def plain(text: str) -> str:
    """In one line, and without the $ between which matplotlib would read mathematics."""
    return " ".join(text.replace("$", "").split())


def group_runs(runs: list[Run], warn) -> list[Group]:
    """Runs by environment and experiment name, in the paper's order; other settings under one name are told apart."""
    groups = {}
    for run in runs:
        settings = {name: value for name, value in run.args.items() if name not in HOUSEKEEPING and value is not None}
        key = (run.env_id, run.exp_name, run.script, json.dumps(settings, sort_keys=True))
        groups.setdefault(key, Group(run.env_id, run.exp_name)).runs.append(run)
    by_name = defaultdict(list)
    for group in groups.values():
        by_name[group.env_id, group.exp_name].append(group)
    for (env_id, name), same in by_name.items():
        settings = [{**group.runs[0].args, "script": group.runs[0].script} for group in same]
        keys = sorted({key for args in settings for key in args} - set(HOUSEKEEPING))
        differing = [key for key in keys if len({json.dumps(args.get(key)) for args in settings}) > 1]
        for group, args in zip(same, settings, strict=True):
            group.told_apart_by = {key: args.get(key) for key in differing}
            # Also where all runs of a name agree with each other, but not with what the name stands for.
            shown = {**group.deviations(name), **group.told_apart_by}
            text = label(name) + (f" [{', '.join(f'{key} {value}' for key, value in shown.items())}]" if shown else "")
            group.label = plain(text)
        if len(same) > 1:
            where = "; ".join(str(group.runs[0].path) for group in same)
            warn(f"runs of {name} on {env_id} differ in {', '.join(differing)} and are shown apart ({where}).")
    for group in groups.values():
        names = {other.exp_name for other in groups.values() if other.label == group.label}
        if len(names) > 1:
            warn(f"runs of {' and of '.join(sorted(names))} are called alike and told apart by their experiment names.")
            alike = [other for other in groups.values() if other.label == group.label]
            for other in alike:
                other.label += f" [exp_name {plain(other.exp_name)}]"
        seeds = {}
        for run in sorted(group.runs, key=lambda run: (run.last, str(run.path))):
            if run.seed in seeds:
                warn(f"{seeds[run.seed].path} and {run.path} are the same run (seed {run.seed}); the longer one is used.")
            seeds[run.seed] = run
        group.runs = [seeds[seed] for seed in sorted(seeds)]
        late = [run for run in group.runs if run.eval.index[0] > group.last]
        for run in late:
            warn(f"{run.path} has no evaluation by step {group.last:,}, the last of another seed: left out.")
        group.runs = [run for run in group.runs if run not in late]
        by_text = {run.script_sha256: run for run in group.runs}
        if len(by_text) > 1:
            where = " and ".join(str(run.path) for run in by_text.values())
            warn(f"{where} are seeds of one algorithm by their name, but different versions of {run.script}.py made them.")
    order = {name: i for i, name in enumerate(VARIANTS)}
    return sorted(groups.values(), key=lambda g: (env_order(g.env_id), order.get(base_of(g.exp_name), len(order)), g.label))


def env_order(env_id: str) -> tuple:
    names = [short_name(name) for name in PAPER_ENVS]
    return (names.index(short_name(env_id)) if short_name(env_id) in names else len(names), env_id)


# -------------------------------------------------------------------------------------------------------------- statistics
def curve(group: Group, column: str) -> pd.DataFrame:
    """mean, sample std and number of seeds of a column of eval.csv at every step; empty if nothing was measured."""
    series = [run.eval[column].dropna() for run in group.runs if column in run.eval]
    frame = pd.concat(series, axis=1) if series else pd.DataFrame()
    stats = pd.DataFrame({"mean": frame.mean(axis=1), "std": frame.std(axis=1, ddof=1), "seeds": frame.notna().sum(axis=1)})
    return stats.sort_index()


def at(group: Group, step: int, column: str = "eval/best_return") -> np.ndarray:
    """The seeds' values at the last evaluation up to a step."""
    return np.array([run.eval[column].loc[:step].iloc[-1] for run in group.runs])


def steps_to(group: Group, threshold: float) -> int | None:
    """The first evaluation at which the mean over all seeds reaches a return; None if it does not."""
    stats = curve(group, "eval/best_return")
    reached = stats[(stats["mean"] >= threshold) & (stats["seeds"] == len(group.runs))]
    return int(reached.index[0]) if len(reached) else None


def score_matrices(groups: list[Group], paper: pd.DataFrame, warn) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Algorithm -> returns (seeds, environments) over the paper's RAC-SAC return; environment -> the step they are taken at.

    That is the last step that all of these runs have. Every algorithm has all of these environments, and as many seeds as in
    its poorest; so that one more algorithm or environment does not narrow the comparison, what is compared is the choice of
    two algorithms or more with most pairs of algorithm and environment. Tiny runs count only where there are no others.
    """
    paper = paper[paper["algorithm"] == "RAC-SAC"].set_index("env")["mean_return"]
    usable = [group for group in groups if short_name(group.env_id) in paper.index]
    real = [group for group in usable if not group.exp_name.startswith(SMOKE)]
    usable = real or usable
    ran_on = {}
    for group in usable:
        ran_on.setdefault(group.label, {})[group.env_id] = group
    choices = {frozenset(a.keys() & b.keys()) for a in ran_on.values() for b in ran_on.values()} or {frozenset()}
    many = {choice: sum(choice <= mine.keys() for mine in ran_on.values()) if choice else 0 for choice in choices}
    best = max(choices, key=lambda choice: (many[choice] > 1, many[choice] * len(choice), len(choice), sorted(choice)))
    env_ids = sorted(best, key=env_order)
    complete = {name: mine for name, mine in ran_on.items() if mine.keys() >= set(env_ids)} if env_ids else {}
    for name in [name for name in ran_on if name not in complete]:
        missing = ", ".join(env_id for env_id in env_ids if env_id not in ran_on[name])
        warn(f"{name} has no run on {missing}: left out of the aggregate scores.")
    left = sorted({group.env_id for group in usable} - set(env_ids), key=env_order)
    if left:
        warn(f"not all compared algorithms ran on {', '.join(left)}: left out of the aggregate scores.")
    steps = {env_id: min(mine[env_id].last for mine in complete.values()) for env_id in env_ids} if complete else {}
    scores = {}
    for name, mine in complete.items():
        late = [env_id for env_id in env_ids if any(run.eval.index[0] > steps[env_id] for run in mine[env_id].runs)]
        if late:
            warn(
                f"{name} has no evaluation on {', '.join(late)} by the last step of the others: left out of the aggregate scores."
            )
            continue
        seeds = min(len(group.runs) for group in mine.values())
        if any(len(group.runs) > seeds for group in mine.values()):
            warn(f"{name} does not have the same number of seeds everywhere: the aggregate scores use its first {seeds}.")
        columns = [at(mine[env_id], steps[env_id])[:seeds] / paper[short_name(env_id)] for env_id in env_ids]
        scores[name] = np.stack(columns, axis=1)
    return scores, steps


def intervals(scores: dict, statistic, repetitions: int) -> dict[str, tuple[float, float, float]]:
    """rliable's point estimate and stratified bootstrap interval (95 %); without an interval where there is one seed."""
    from rliable import library

    np.random.seed(0)  # rliable draws its environments' samples from numpy's global generator
    estimates, bounds = library.get_interval_estimates(scores, lambda *x: np.array([statistic(*x)]), reps=repetitions,
                                                       random_state=np.random.RandomState(0))  # fmt: skip
    found = {}
    for name, estimate in estimates.items():
        matrices = scores[name] if isinstance(scores[name], tuple) else (scores[name],)
        low, high = bounds[name][:, 0] if min(len(matrix) for matrix in matrices) > 1 else (math.nan, math.nan)
        found[name] = (float(estimate[0]), float(low), float(high))
    return found


# ------------------------------------------------------------------------------------------------------------------ tables
def number(value: float | None, digits: int = 0) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def mean_std(values: np.ndarray, digits: int = 0) -> str:
    """mean ± sample standard deviation, which one seed does not have."""
    spread = f" ± {np.std(values, ddof=1):,.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():,.{digits}f}{spread}"


def paper_name(group: Group) -> str:
    return VARIANTS[base_of(group.exp_name)][0] if base_of(group.exp_name) in VARIANTS else ""


def same_setting(group: Group) -> bool:
    """Whether a group has the settings that the paper's values were measured with, -v4 being the kin of its -v3."""
    return group.exp_name in VARIANTS and not group.deviations(group.exp_name) and group.env_id in PAPER_ENVS


def final_return_table(groups: list[Group], paper: pd.DataFrame):
    header = ("environment", "algorithm", "seeds", "steps", "return", "paper", "difference")
    rows, marked = [], False
    for env_id in dict.fromkeys(group.env_id for group in groups):
        values = paper[paper["env"] == short_name(env_id)].set_index("algorithm")
        mine = [group for group in groups if group.env_id == env_id]
        for group in mine:
            row = [
                env_id,
                group.label,
                len(group.runs),
                number(group.last),
                mean_std(at(group, group.last)),
                NONE,
                NONE,
            ]
            if paper_name(group) in values.index:
                reference = values.loc[paper_name(group)]
                differs = not same_setting(group) or group.last != reference["env_steps"]
                marked |= differs
                row[5] = f"{reference['mean_return']:,} ± {reference['std_return']:,}"
                row[6] = f"{at(group, group.last).mean() - reference['mean_return']:+,.0f}{' †' if differs else ''}"
            rows.append(row)
        for name, reference in values.iterrows():
            if name not in [paper_name(group) for group in mine]:
                value = f"{reference['mean_return']:,} ± {reference['std_return']:,}"
                rows.append([env_id, f"{name} (paper only)", NONE, number(reference["env_steps"]), NONE, value, NONE])
    notes = [
        "Return at the last evaluation that all seeds have: mean ± sample standard deviation over seeds of the best policy's "
        "average over its episodes (the paper's protocol; the maximum over policies is biased upwards)."
    ]
    if marked:
        notes.append("† at another number of steps or with other settings than the paper's value: not like with like.")
    return header, rows, notes


def samples_table(groups: list[Group], paper: pd.DataFrame):
    labels = list(dict.fromkeys(group.label for group in groups if short_name(group.env_id) in set(paper["env"])))
    ours = {group.label: paper_name(group) for group in groups if group.label in labels}
    others = [name for name in dict.fromkeys(paper["algorithm"]) if name not in ours.values()]
    header = ("environment", "return", *labels, *(f"{name} (paper only)" for name in others))
    rows, noted, marked = [], False, False
    for env_id in dict.fromkeys(group.env_id for group in groups):
        table = paper[paper["env"] == short_name(env_id)]
        for threshold in dict.fromkeys(table["return"]):
            values = table[table["return"] == threshold].set_index("algorithm")["env_steps"]
            row = [env_id, number(threshold)]
            for name in labels:
                group = next((group for group in groups if group.env_id == env_id and group.label == name), None)
                steps = steps_to(group, threshold) if group else None
                cell = number(steps) if steps else f"not by {group.last:,}" if group else NONE
                if ours[name] in values.index:
                    differs = group is not None and not same_setting(group)
                    marked |= differs
                    cell += f" (paper {values[ours[name]]:,}{' †' if differs else ''})"
                row.append(cell)
            for name in others:
                doubtful = (short_name(env_id), threshold, name) == ("Walker2d", 3000, "TQC")
                noted |= doubtful
                row.append((f"{values[name]:,}" if name in values.index else NONE) + (" ‡" if doubtful else ""))
            rows.append(row)
    notes = ["Environment steps at the first evaluation at which the mean over all seeds reaches the return."]
    if marked:
        notes.append("† with other settings than the paper's value: not like with like.")
    if noted:
        notes.append("‡ as printed in the paper; its ratio of 10.75 to RAC-SAC implies about 570,000.")
    return header, rows, notes


def fresh_table(groups: list[Group]):
    rows = []
    for group in groups:
        pairs = []
        for run in group.runs:
            best = run.fresh[run.fresh["best_in_training"] == 1] if len(run.fresh) else run.fresh
            if len(best):
                pairs.append((run.eval["eval/best_return"].loc[int(best.index[0])], best["return"].iloc[0]))
        if pairs:
            headline, fresh = np.array(pairs).T
            rows.append(
                [group.env_id, group.label, len(pairs), mean_std(headline), mean_std(fresh), f"{(fresh - headline).mean():+,.0f}"]
            )
    return ("environment", "algorithm", "seeds", "best return", "beta*'s return on fresh episodes", "difference"), rows, [
        "The best of several noisy averages is biased upwards; the same policy on fresh episodes is not."]  # fmt: skip


def learning_starts(run: Run) -> int:
    value = run.args.get("learning_starts")
    return value if isinstance(value, int) else 5000


def speed_table(groups: list[Group]):
    rows = []
    for group in groups:
        learning = [run.train["charts/SPS"][run.train.index > learning_starts(run) + 1000]
                    for run in group.runs if "charts/SPS" in run.train]  # fmt: skip
        rates = np.array([sps.dropna().median() for sps in learning if sps.notna().any()])
        hours = [run.eval["charts/wall_seconds"].iloc[-1] / 3600 for run in group.runs]
        devices = ", ".join(sorted({run.device for run in group.runs}))
        rows.append(
            [
                group.env_id,
                group.label,
                number(np.median(rates), 1) if len(rates) else NONE,
                number(np.mean(hours), 2),
                devices,
            ]
        )
    return ("environment", "algorithm", "steps per second while learning", "hours up to the last evaluation", "device"), rows, [
        "Median over a run's rows of train.csv, then over seeds; runs that shared a machine slowed each other."]  # fmt: skip


def runs_table(groups: list[Group]):
    rows = []
    for group in groups:
        for run in group.runs:
            steps = f"{run.last:,} of {run.total:,}{'' if run.finished else ', unfinished'}"
            tracked = "yes" if run.tracked else "no"
            rows.append([str(run.path), group.label, run.env_id, run.seed, steps, run.short_commit, tracked])
    return ("run directory", "algorithm", "environment", "seed", "evaluated up to step", "commit", "tracked"), rows, []


# ----------------------------------------------------------------------------------------------------------------- figures
def panels(env_ids: list[str], width: float = 3.4, height: float = 2.6):
    """A row of axes, one per environment, titled; two rows from four on."""
    columns = min(len(env_ids), 4 if len(env_ids) <= 4 else 3)
    rows = math.ceil(len(env_ids) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns + 0.6, height * rows), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(env_ids) :]:
        ax.set_visible(False)
    for env_id, ax in zip(env_ids, axes.flat, strict=False):
        ax.set_title(env_id)
        ax.set_xlabel("environment steps")
        ax.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    return figure, list(axes.flat[: len(env_ids)])


def legend(figure, axes) -> None:
    """One legend below the panels, each entry once."""
    entries = {name: line for ax in axes for line, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(4, len(entries)))


def draw_curves(groups: list[Group], column: str, ylabel: str, names: dict[int, str] | None = None, order=None):
    """mean ± std over seeds in a panel for each environment; dotted where not all seeds have come yet. None without data.

    names: what to call a group, by its id; order: names whose places give the colours, so that figures agree.
    """
    with_data = [group for group in groups if len(curve(group, column))]
    if not with_data:
        return None
    env_ids = list(dict.fromkeys(group.env_id for group in with_data))
    names = {id(group): group.label if names is None else names[id(group)] for group in with_data}
    order = order or list(dict.fromkeys(names.values()))
    figure, axes = panels(env_ids)
    for group in with_data:
        ax, i = axes[env_ids.index(group.env_id)], order.index(names[id(group)])
        look = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[(i // len(COLOURS) + i) % len(LINES)]}
        stats = curve(group, column)
        whole = stats[stats["seeds"] == len(group.runs)]
        ax.plot(whole.index, whole["mean"], label=names[id(group)], marker="o" if len(whole) == 1 else None, markersize=3, **look)
        ax.fill_between(
            whole.index, whole["mean"] - whole["std"], whole["mean"] + whole["std"], color=look["color"], alpha=0.18, lw=0
        )
        rest = stats[stats.index >= whole.index[-1]] if len(whole) else stats
        if len(rest) > 1 or not len(whole):
            name = None if len(whole) else names[id(group)]
            ax.plot(rest.index, rest["mean"], label=name, color=look["color"], linestyle=(0, (1, 3)), linewidth=1)
    for ax in axes:
        ax.set_ylabel(ylabel)
    legend(figure, axes)
    return figure


def family_frame(group: Group, what: str) -> pd.DataFrame:
    """Mean over seeds of the columns eval/what_CONDITION: index step, columns conditions; steps that all seeds have."""
    frames = []
    for run in group.runs:
        columns = of_policies(run.eval, what)
        frames.append(run.eval[list(columns)].rename(columns=columns).dropna())
    frame = sum(frames[1:], frames[0]) / len(frames)  # NaN where a seed is missing
    return frame.dropna()


def draw_heat_map(groups: list[Group]):
    """Return of every policy of the family over time; the brightest of a column is the best one."""
    figure, axes = panels([group.env_id for group in groups])
    for group, ax in zip(groups, axes, strict=True):
        frame = family_frame(group, "return")
        image = ax.pcolormesh(frame.index, frame.columns, frame.to_numpy().T, cmap="viridis", shading="nearest")
        ax.set_ylabel(group.condition)
        ax.grid(False)
        figure.colorbar(image, ax=ax, label=RETURN)
    return figure


def draw_best_condition(groups: list[Group]):
    """The best policy's condition over time: every seed thin, their mean thick."""
    figure, axes = panels([group.env_id for group in groups])
    for group, ax in zip(groups, axes, strict=True):
        column = f"eval/best_{group.condition}"
        for run in group.runs:
            ax.plot(run.eval.index, run.eval[column], color=COLOURS[7], linewidth=0.8, label="one seed")
        stats = curve(group, column)
        stats = stats[stats["seeds"] == len(group.runs)]
        ax.plot(stats.index, stats["mean"], color=COLOURS[0], label="mean over seeds")
        ax.set_ylabel(f"best {group.condition}")
        low, high = min(family_frame(group, "return").columns), max(family_frame(group, "return").columns)
        ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    legend(figure, axes)
    return figure


def draw_temperature(groups: list[Group]):
    """Temperature against the condition at up to five times of training, mean over seeds."""
    figure, axes = panels([group.env_id for group in groups])
    for group, ax in zip(groups, axes, strict=True):
        frame = family_frame(group, "alpha")
        chosen = sorted({round(i) for i in np.linspace(0, len(frame) - 1, min(5, len(frame)))})
        for i, row in enumerate(chosen):
            ax.plot(frame.columns, frame.iloc[row], color=plt.get_cmap("viridis")(i / max(1, len(chosen) - 1) * 0.9), marker="o",
                    markersize=2.5, label=f"step {frame.index[row]:,}")  # fmt: skip
        ax.set_yscale("log")
        ax.set_xlabel(group.condition)
        ax.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        ax.set_ylabel("temperature alpha")
        ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_intervals(estimates: dict[str, tuple[float, float, float]], xlabel: str, middle: float | None = None):
    """Point estimates with their intervals, one line each."""
    figure, ax = plt.subplots(figsize=(6, 0.45 * len(estimates) + 1), layout="constrained")
    for i, (point, low, high) in enumerate(estimates.values()):
        if math.isfinite(low):
            ax.plot([low, high], [i, i], color=COLOURS[0], linewidth=6, alpha=0.35, solid_capstyle="butt")
        ax.plot(point, i, "|", color=COLOURS[0], markersize=14, markeredgewidth=2.5)
    if middle is not None:
        ax.axvline(middle, color=COLOURS[6], linestyle=":", linewidth=1)
    ax.set_yticks(range(len(estimates)), list(estimates))
    ax.set_ylim(len(estimates) - 0.5, -0.5)
    ax.set_xlabel(xlabel)
    return figure


def sweep_groups(groups: list[Group], sweep: str) -> tuple[list[Group], dict[int, str]]:
    """The groups of a sweep by value, in environments that have at least two of its values; and what to call them.

    A group is of the sweep if nothing but the sweep's argument differs from the base variant, whatever its name.
    """
    base, argument, symbol, *_ = SWEEPS[sweep]
    found = [(group.runs[0].args.get(argument), group) for group in groups if set(group.deviations(base)) <= {argument}]
    found = [(value, group) for value, group in found if isinstance(value, int | float) and not group.exp_name.startswith(SMOKE)]
    found.sort(key=lambda pair: pair[0])
    values = defaultdict(list)
    for value, group in found:
        values[group.env_id].append(value)
    names = {}
    for value, group in found:
        if len(set(values[group.env_id])) > 1:
            shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value:g}"
            twice = values[group.env_id].count(value) > 1
            names[id(group)] = f"{symbol} = {shown}" + (f" ({group.label})" if twice else "")
    return [group for _, group in found if id(group) in names], names


# ------------------------------------------------------------------------------------------------------------------ report
class Report:
    """The parts of a report in order, written as Markdown and as HTML: headings, paragraphs, lists, tables, figures."""

    def __init__(self, out: Path):
        self.out, self.parts = out, []

    def heading(self, text: str) -> None:
        self.parts.append(("heading", text))

    def text(self, text: str) -> None:
        self.parts.append(("text", text))

    def list(self, items: list[str]) -> None:
        self.parts.append(("list", items))

    def table(self, table) -> None:
        header, rows, notes = table
        self.parts.append(("table", header, [[str(cell) for cell in row] for row in rows]))
        for note in notes:
            self.text(note)

    def figure(self, figure, name: str, caption: str) -> None:
        """Keep a figure as NAME.png; None is said to be missing."""
        if figure is None:
            self.text(f"Not drawn, because no run has the numbers: {caption}")
            return
        while any(part[:2] == ("figure", f"{name}.png") for part in self.parts):
            name += "_2"  # two labels that differ in punctuation alone
        figure.savefig(self.out / f"{name}.png")
        plt.close(figure)
        self.parts.append(("figure", f"{name}.png", caption))

    def markdown(self) -> str:
        blocks = []
        for kind, *content in self.parts:
            if kind == "heading":
                blocks.append(f"## {content[0]}")
            elif kind == "text":
                blocks.append(content[0])
            elif kind == "list":
                blocks.append("\n".join(f"- {item}" for item in content[0]))
            elif kind == "figure":
                blocks.append(f"![{content[1]}]({content[0]})\n\n{content[1]}")
            else:
                blocks.append(markdown_table(*content))
        return f"# {TITLE}\n\n" + "\n\n".join(blocks) + "\n"

    def html(self) -> str:
        blocks = []
        for kind, *content in self.parts:
            if kind == "heading":
                blocks.append(f"<h2>{html.escape(content[0])}</h2>")
            elif kind == "text":
                blocks.append(f"<p>{html.escape(content[0])}</p>")
            elif kind == "list":
                blocks.append("<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in content[0]) + "</ul>")
            elif kind == "figure":
                data = base64.b64encode((self.out / content[0]).read_bytes()).decode()
                caption = html.escape(content[1])
                blocks.append(
                    f'<figure><img src="data:image/png;base64,{data}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
                )
            else:
                header, rows = content
                lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in header)]
                lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
                blocks.append("<div><table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>")
        head = f'<meta charset="utf-8"><title>{TITLE}</title><style>{HTML_STYLE}</style>'
        body = f"<h1>{TITLE}</h1>\n" + "\n".join(blocks)
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}\n</body></html>\n'

    def write(self) -> None:
        """Write report.md and report.html, and remove the figures of the report before that are not in this one."""
        shown = {content[0] for kind, *content in self.parts if kind == "figure"}
        old = self.out / "report.md"
        before = old.read_text(encoding="utf-8", errors="replace") if old.exists() else ""
        for name, text in (("report.md", self.markdown()), ("report.html", self.html())):
            temporary = self.out / f"{name}.tmp"
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            temporary.replace(self.out / name)
        if before.startswith(f"# {TITLE}\n"):
            for name in set(re.findall(r"^!\[.*\]\(([\w.+-]+\.png)\)$", before, re.MULTILINE)) - shown:
                (self.out / name).unlink(missing_ok=True)


def markdown_table(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def file_name(text: str) -> str:
    """A label as part of a figure's file name."""
    return re.sub("[^a-z0-9]+", "_", text.lower()).strip("_")[:80]


def build(options: Options, groups: list[Group], warned: list[str], warn) -> Report:
    """The whole report; figures are written on the way."""
    report = Report(options.out)
    report.text(REFERENCE)
    sweeps = {sweep: sweep_groups(groups, sweep) for sweep in SWEEPS}
    sweeps = {sweep: found for sweep, found in sweeps.items() if found[0]}
    # Values of a sweep other than the default are in its panel only; whatever is in no panel is in the main comparison.
    in_panels = {id(group) for sweep, (members, _) in sweeps.items() for group in members if group.deviations(SWEEPS[sweep][0])}
    main = [group for group in groups if id(group) not in in_panels]
    table1, table2 = pd.read_csv(PAPER / "table1_final_return.csv"), pd.read_csv(PAPER / "table2_samples_to_return.csv")
    scores, score_steps = score_matrices(main, table1, warn)
    runs = [run for group in groups for run in group.runs]
    labels, env_ids = ({getattr(group, name) for group in groups} for name in ("label", "env_id"))
    unfinished = sum(not run.finished for run in runs)
    where = ", ".join(sorted(env_ids, key=env_order))
    report.text(f"{len(runs)} runs of {len(labels)} algorithms on {where}; {unfinished} unfinished.")
    if any(run.exp_name.startswith(SMOKE) for run in runs):
        report.text("Runs called tiny have networks of a few units and some hundred steps: they show that the pipeline works, "
                    "not how well an algorithm learns.")  # fmt: skip
    if warned:
        report.heading("Warnings")
        report.list(warned)
    report.heading("Final return (table 1 of the paper)")
    report.table(final_return_table(main, table1))
    report.heading("Samples to reach a return (table 2 of the paper)")
    table = samples_table(main, table2)
    if table[1]:
        report.table(table)
    else:
        report.text("The paper has no such values for these environments.")
    report.heading("Aggregate scores")
    aggregate(report, options, scores, score_steps)
    report.heading("Learning curves")
    caption = "Return of the best policy: mean ± sample standard deviation over seeds; dotted where not all have come yet."
    report.figure(draw_curves(main, "eval/best_return", RETURN), "learning_curves", caption)
    variants = [group for group in main if base_of(group.exp_name) in ("rac_sac", "vanilla_rac", "rac_itm")]
    if len({group.label for group in variants}) > 1 and len(variants) < len(main):
        order = list(dict.fromkeys(group.label for group in main))
        figure = draw_curves(variants, "eval/best_return", RETURN, order=order)
        report.figure(figure, "variants", "RAC-SAC against its variants.")
    report.heading("Normalised value bias")
    report.figure(draw_curves(main, "eval/bias_mean", "mean of normalised bias"), "bias_mean",
                  "Mean over state-action pairs of the normalised value bias, mean ± std over seeds.")  # fmt: skip
    report.figure(draw_curves(main, "eval/bias_std", "std of normalised bias"), "bias_std",
                  "Standard deviation over state-action pairs of the normalised value bias, mean ± std over seeds.")  # fmt: skip
    report.heading("The family of policies")
    families = defaultdict(list)
    for group in main:
        frame = family_frame(group, "return")
        if min(frame.shape) > 1:  # a map needs two columns and two rows
            families[group.label].append(group)
        elif frame.shape[1] > 1:
            report.text(f"Not drawn: {group.label} on {group.env_id}, whose seeds do not have two evaluations in common.")
    if not families:
        report.text("No algorithm has more than one evaluated policy and two evaluations that all its seeds have.")
    for name, members in families.items():
        condition, slug = members[0].condition, file_name(name)
        report.figure(
            draw_heat_map(members),
            f"return_per_{condition}_{slug}",
            f"{name}: return per {condition} over time, mean over seeds.",
        )
        report.figure(draw_best_condition(members), f"best_{condition}_{slug}", f"{name}: best {condition} over time.")
        with_alpha = [group for group in members if family_frame(group, "alpha").shape[1]]
        if with_alpha:
            report.figure(
                draw_temperature(with_alpha),
                f"temperature_{slug}",
                f"{name}: learned temperature against {condition} at some steps.",
            )
    report.heading("Ablations")
    ablations(report, sweeps)
    report.heading("The best policy on fresh episodes")
    table = fresh_table(groups)
    if table[1]:
        report.table(table)
    else:
        report.text(
            "No run has an evaluate.csv of a step of its eval.csv; the former is what `python rac_sac.py --evaluate RUN` writes."
        )
    report.heading("Speed")
    report.table(speed_table(groups))
    report.heading("Runs")
    report.table(runs_table(groups))
    return report


def aggregate(report: Report, options: Options, scores: dict[str, np.ndarray], steps: dict[str, int]) -> None:
    """Interquartile mean and probability of improvement, with intervals (rliable)."""
    if not scores:
        report.text("No algorithm has run on all of the paper's environments that are here.")
        return
    from rliable import metrics

    where = ", ".join(f"{env_id} at step {step:,}" for env_id, step in steps.items())
    report.text(f"Returns over the paper's RAC-SAC return, at the last step that all runs have ({where}); 95 % stratified "
                f"bootstrap intervals over seeds ({options.bootstrap} repetitions); one seed has no interval.")  # fmt: skip
    iqm = intervals(scores, metrics.aggregate_iqm, options.bootstrap)
    rows = [
        [name, len(scores[name]), number(point, 3), number(low, 3), number(high, 3)] for name, (point, low, high) in iqm.items()
    ]
    report.table((("algorithm", "seeds", "IQM", "low", "high"), rows, []))
    report.figure(draw_intervals(iqm, "interquartile mean of normalised return"), "iqm", "Interquartile mean, 95 % intervals.")
    first = next((name for name in scores if name == "RAC-SAC"), next(iter(scores)))
    pairs = {f"{first},{name}": (scores[first], scores[name]) for name in scores if name != first}
    if not pairs:
        return
    better = intervals(pairs, metrics.probability_of_improvement, options.bootstrap)
    better = {
        f"{first} over {list(scores)[i]}": value
        for i, value in zip([k for k, n in enumerate(scores) if n != first], better.values(), strict=True)
    }
    rows = [[name, number(point, 3), number(low, 3), number(high, 3)] for name, (point, low, high) in better.items()]
    report.table((("probability of improvement", "P", "low", "high"), rows, []))
    report.figure(draw_intervals(better, "probability of improvement", 0.5), "probability_of_improvement",
                  f"Probability that a run of {first} beats one of another algorithm; 95 % intervals.")  # fmt: skip


def ablations(report: Report, sweeps: dict[str, tuple[list[Group], dict[int, str]]]) -> None:
    """Returns, and the bias where it was measured, of every ablation with at least two members."""
    for name, (members, names) in sweeps.items():
        base, _, symbol, *_ = SWEEPS[name]
        caption = f"{VARIANTS[base][0]}, varied: {symbol}"
        report.figure(draw_curves(members, "eval/best_return", RETURN, names), f"ablation_{name}", f"{caption}.")
        for column, text in (("eval/bias_mean", "mean of normalised bias"), ("eval/bias_std", "std of normalised bias")):
            figure = draw_curves(members, column, text, names)
            if figure:
                report.figure(figure, f"ablation_{name}_{column.removeprefix('eval/')}", f"{caption}: {text}.")
        rows = [
            [group.env_id, names[id(group)], len(group.runs), number(group.last), mean_std(at(group, group.last))]
            for group in sorted(members, key=lambda group: env_order(group.env_id))
        ]
        report.table((("environment", caption, "seeds", "steps", "return"), rows, []))
    if sweeps:
        report.text("The paper does not name the environments of its ablations; those here are the choice of whoever ran them "
                    "(default: Walker2d-v4 and Humanoid-v4).")  # fmt: skip
    else:
        report.text("No ablation has two members here.")


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    warned = []

    def warn(text: str) -> None:
        if text not in warned:
            warned.append(text)
            print(f"warning: {text}", file=sys.stderr)

    try:
        if options.bootstrap < 1:
            raise UserError(f"bootstrap is {options.bootstrap}; it must be at least 1.")
        groups = group_runs(find_runs(options.runs, warn), warn)
        if not groups:
            raise UserError("there is no run that can be reported on; give run directories with an eval.csv.")
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {options.out} cannot be made: {error.strerror}.") from None
        with plt.rc_context(STYLE), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = build(options, groups, warned, warn)
        report.write()
        used = sum(len(group.runs) for group in groups)
        print(f"{options.out / 'report.md'} and report.html: {used} runs, {len(warned)} warnings")
        if options.publish:
            from publish import publish

            tables = [(part[0], part[1:]) for part in report.parts if part[0] in ("heading", "table")]
            publish(tables, groups, options.out / "wandb_report.json", options.entity, options.project)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
