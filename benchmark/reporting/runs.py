"""Reading run directories, whoever made them, and grouping them: what cannot be used is named in a warning."""

import contextlib
import csv
import json
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from experiments import HOUSEKEEPING, PAPER_ENVS, SMOKE, SWEEPS, VARIANTS, short_name
from identity import deviations, label, parts_of
from job import UserError

CONDITIONS = {"rac_sac": "beta", "rac_td3": "beta", "vanilla_rac": "beta", "rac_itm": "k"}


@dataclass
class Run:
    path: Path
    script: str
    condition: str  # what its policies differ by; "policy" where eval.csv does not say it
    args: dict
    commit: str
    script_sha256: str | None
    device: str
    eval: pd.DataFrame  # index: step
    train: pd.DataFrame  # index: step, may be empty
    fresh: pd.Series  # return of the policy that was best in training on fresh episodes (evaluate.csv), by step; may be empty

    env_id = property(lambda self: self.args["env_id"])
    seed = property(lambda self: self.args["seed"])
    exp_name = property(lambda self: self.args["exp_name"])
    total = property(lambda self: self.args["total_timesteps"])
    last = property(lambda self: int(self.eval.index[-1]))
    finished = property(lambda self: self.last >= self.total)
    tracked = property(lambda self: (self.path / "wandb_id").exists())
    kept_script = property(lambda self: self.path.resolve() / f"{self.script}.py")

    @property
    def short_commit(self) -> str:
        """The commit of the script, or that it is under none."""
        if self.commit == "unknown":
            return f"none (script {(self.script_sha256 or 'unknown')[:12]})"
        return self.commit[:12] + ("-dirty" if self.commit.endswith("-dirty") else "")

    def deviations(self, exp_name: str) -> dict:
        """The settings that are not those of an experiment name, by the script that the run has kept."""
        return deviations(self.args, self.script, exp_name, self.env_id, self.kept_script)


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
        return self.runs[0].deviations(exp_name)


def read_csv(path: Path, warn, *required: str) -> pd.DataFrame:
    """A CSV file of numbers by its step; what is cut off or damaged is left out from there on, with a warning.

    required: columns that a file of its kind has, with a finite number in every row.
    """
    nothing = pd.DataFrame(columns=list(required), dtype=float)
    try:
        *lines, rest = path.read_text().split("\n")
        rows = list(csv.reader(lines))
    except FileNotFoundError:
        return nothing
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        warn(f"{path} cannot be read ({error}): left out.")
        return nothing
    if rest:
        warn(f"{path} ends in the middle of a row: that row is left out.")
    if len(rows) < 2:
        return nothing
    header, values = rows[0], []
    missing = [name for name in required if name not in header]
    if missing or len(set(header)) < len(header):
        fault = f"has no column {missing[0]}" if missing else "names a column twice"
        warn(f"{path} is mixed up or damaged, it {fault}: left out.")
        return nothing
    with contextlib.suppress(ValueError):
        for row in rows[1:]:
            values.append([float(cell or "nan") for cell, _ in zip(row, header, strict=True)])
    frame = pd.DataFrame(values, columns=header, dtype=float)
    frame = frame[np.isfinite(frame[list(required)]).all(axis=1).cummin()]
    if len(frame) < len(rows) - 1:
        warn(f"{path} is damaged in line {len(frame) + 2}: left out from there on.")
    return frame.set_index(frame["global_step"].astype(int))


def of_policies(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """The columns eval/what_CONDITION of an eval.csv by their conditions; return_std of somebody's own script is none of them."""
    found = frame.filter(regex=rf"^eval/{what}_-?\d+(\.\d+)?(e-?\d+)?$")
    return found.rename(columns=lambda name: float(name.removeprefix(f"eval/{what}_")))


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
    evaluations = read_csv(path / "eval.csv", warn, "global_step", "eval/best_return", "charts/wall_seconds")
    if evaluations.empty:
        return warn(f"{path} has no evaluation yet, or none that can be read: left out.")
    policies = of_policies(evaluations, "return").columns
    conditions = [name.removeprefix("eval/best_") for name in evaluations if re.match("eval/best_(?!return)", name)]
    told = CONDITIONS.get(script, next(iter(conditions), "policy"))  # another script's policies differ by what its eval.csv says
    largest = args.get(f"eval_{told}_max", args.get(told))  # the last of the evaluated policies
    others = isinstance(largest, int | float) and not math.isclose(max(policies, default=0.0), largest, rel_tol=1e-4)
    mixed = script in CONDITIONS and (conditions != [told] or others or len(policies) != args.get("num_eval_policies", 1))
    if mixed or len(policies) not in (0, args.get("num_eval_policies", len(policies))):
        return warn(f"{path} is mixed up: its eval.csv is not one of {script}.py with the arguments in config.json: left out.")
    if not evaluations.index.is_monotonic_increasing or not evaluations.index.is_unique:
        return warn(f"{path} is mixed up: the steps in its eval.csv do not grow: left out.")
    if evaluations.index[-1] > args["total_timesteps"]:
        return warn(f"{path} is mixed up: its eval.csv goes beyond the {args['total_timesteps']} steps of config.json: left out.")
    bias = read_csv(path / "bias.csv", warn, "global_step", "eval/bias_mean", "eval/bias_std")
    for column in ("eval/bias_mean", "eval/bias_std"):  # an eval.csv of an earlier version has them itself
        if not bias.empty:
            evaluations[column] = bias[column].reindex(evaluations.index)
    commit, device = (str(config.get(name) or "unknown") for name in ("git_commit", "device"))
    train = read_csv(path / "train.csv", warn, "global_step", "charts/SPS")
    fresh = read_csv(path / "evaluate.csv", warn, "global_step", "return", "best_in_training")
    fresh = fresh["return"][fresh["best_in_training"] == 1][:1]
    if not fresh.index.isin(evaluations.index).all():
        warn(f"{path / 'evaluate.csv'} is of step {fresh.index[0]:,}, at which eval.csv has no evaluation: left out.")
        fresh = fresh[:0]
    return Run(path, script, told, args, commit, config.get("script_sha256"), device, evaluations, train, fresh)


def is_shown(folder: Path) -> bool:
    """Whether a folder may hold runs: a hidden one only if it is one itself."""
    return not folder.name.startswith(".") or (folder / "config.json").exists()


def find_runs(paths, warn) -> list[Run]:
    """All runs in and below the given directories; folders without a run anywhere in them are named in a warning."""

    def folders(folder: Path) -> list[Path]:
        try:
            return [child for child in sorted(folder.iterdir()) if child.is_dir() and is_shown(child)]
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
    """In one line, without the $ between which matplotlib would read mathematics, or the | that ends a cell of a table."""
    return " ".join(re.sub("[$|]", "", text).split())


def shared_settings(runs: list[Run]) -> dict:
    """The settings beside those of the variants, in experiment names (+utd_5) or by hand, that all of the runs have."""
    named = set()
    for run in runs:
        named |= dict(parts_of(run.exp_name)[1]).keys() | run.deviations(run.exp_name).keys()
    values = {name: {json.dumps(run.args.get(name)) for run in runs} for name in sorted(named)}
    return {name: json.loads(*found) for name, found in values.items() if len(found) == 1 and found != {"null"}}


def group_runs(runs: list[Run], warn) -> list[Group]:
    """Runs by environment and experiment name, in the paper's order; other settings under one name are told apart.

    Settings that all runs share (see shared_settings) are in no label.
    """
    shared, by_name = shared_settings(runs), defaultdict(dict)  # by_name: environment, experiment name -> settings -> group
    for run in runs:
        settings = {name: value for name, value in run.args.items() if name not in HOUSEKEEPING and value is not None}
        key = json.dumps({**settings, "script": run.script}, sort_keys=True)
        by_name[run.env_id, run.exp_name].setdefault(key, Group(run.env_id, run.exp_name)).runs.append(run)
    groups = [group for same in by_name.values() for group in same.values()]
    for (env_id, name), same in by_name.items():
        settings = [json.loads(key) for key in same]
        keys = sorted(set().union(*settings))
        differing = [key for key in keys if len({json.dumps(args.get(key)) for args in settings}) > 1]
        for group, args in zip(same.values(), settings, strict=True):
            group.told_apart_by = {key: args.get(key) for key in differing}
            # Also where all runs of a name agree with each other, but not with what the name stands for.
            own = {key: value for key, value in group.deviations(name).items() if key not in shared}
            shown = ", ".join(f"{key} {value}" for key, value in {**own, **group.told_apart_by}.items())
            group.label = plain(label(name, shared) + (f" [{shown}]" if shown else ""))
        if len(same) > 1:
            where = "; ".join(str(group.runs[0].path) for group in same.values())
            warn(f"runs of {name} on {env_id} differ in {', '.join(differing)} and are shown apart ({where}).")
    for group in groups:
        alike = [other for other in groups if other.label == group.label]
        if len(names := {other.exp_name for other in alike}) > 1:
            warn(f"runs of {' and of '.join(sorted(names))} are called alike and told apart by their experiment names.")
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
    return sorted(groups, key=lambda g: (env_order(g.env_id), order.get(parts_of(g.exp_name)[0], len(order)), g.label))


def env_order(env_id: str) -> tuple:
    names = [short_name(name) for name in PAPER_ENVS]
    return (names.index(short_name(env_id)) if short_name(env_id) in names else len(names), env_id)


def sweep_groups(groups: list[Group], sweep: str) -> list[Group]:
    """The groups of a sweep by value, and called by it, in environments that have at least two of its values.

    A group is of the sweep if nothing but the sweep's argument differs from the base variant, whatever its name.
    """
    base, argument, symbol, *_ = SWEEPS[sweep]
    found = [(group.runs[0].args.get(argument), group) for group in groups if set(group.deviations(base)) <= {argument}]
    found = [(value, group) for value, group in found if isinstance(value, int | float) and not group.exp_name.startswith(SMOKE)]
    members, values = [], Counter((group.env_id, value) for value, group in found)
    for value, group in sorted(found, key=lambda pair: pair[0]):
        if sum(env_id == group.env_id for env_id, _ in values) > 1:
            shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value:g}"
            twice = values[group.env_id, value] > 1
            members.append(replace(group, label=f"{symbol} = {shown}" + (f" ({group.label})" if twice else "")))
    return members
