"""Reading run directories, whoever made them: what cannot be used is named in a warning."""

import contextlib
import csv
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from flags import script_defaults
from identity import deviations
from job import BIAS_SIZES, UserError

CONDITIONS = {"rac_sac": "beta", "rac_td3": "beta", "vanilla_rac": "beta", "rac_itm": "k"}


class Warnings:
    """What a reader should know of the runs: each text once, shown on the screen and in the report."""

    def __init__(self):
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        if text not in self.texts:
            self.texts.append(text)
            print(f"warning: {text}", file=sys.stderr)


class Unusable(Exception):
    """A run directory that cannot be shown, and why."""


@dataclass
class Run:
    path: Path
    script: str
    condition: str  # what its policies differ by; "policy" where eval.csv does not say it
    args: dict
    commit: str
    script_sha256: str  # of all versions that have trained it, joined by +; or "unknown"
    device: str
    eval: pd.DataFrame  # index: step
    train: pd.DataFrame  # index: step, may be empty
    fresh: pd.Series  # return of the policy that was best in training on fresh episodes (evaluate.csv), by step; may be empty
    bias_sizes: set[tuple[int, ...]]  # that its value bias was measured with; none where bias.csv does not say it
    kept_script: Path | None  # that made it; None where there is none that can be read

    env_id = property(lambda self: self.args["env_id"])
    seed = property(lambda self: self.args["seed"])
    exp_name = property(lambda self: self.args["exp_name"])
    total = property(lambda self: self.args["total_timesteps"])
    last = property(lambda self: int(self.eval.index[-1]))
    finished = property(lambda self: self.last >= self.total)
    tracked = property(lambda self: (self.path / "wandb_id").exists())

    @property
    def version(self) -> str:
        """The SHA-256 of the script that began it; others may have resumed it."""
        return self.script_sha256.split("+")[0]

    @property
    def short_commit(self) -> str:
        """The commit of the script, or that it is under none."""
        if self.commit == "unknown":
            return f"none (script {self.script_sha256[:12]})"
        return self.commit[:12] + ("-dirty" if self.commit.endswith("-dirty") else "")

    def deviations(self, exp_name: str) -> dict:
        """The settings that are not those of an experiment name, by the script that the run has kept."""
        return deviations(self.args, self.script, exp_name, self.env_id, self.kept_script)


def read_csv(path: Path, warnings: Warnings, *required: str) -> pd.DataFrame:
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
        warnings.add(f"{path} cannot be read ({error}): left out.")
        return nothing
    if rest:
        warnings.add(f"{path} ends in the middle of a row: that row is left out.")
    if len(rows) < 2:
        return nothing
    header, values = rows[0], []
    missing = [name for name in required if name not in header]
    if missing or len(set(header)) < len(header):
        fault = f"has no column {missing[0]}" if missing else "names a column twice"
        warnings.add(f"{path} is mixed up or damaged, it {fault}: left out.")
        return nothing
    with contextlib.suppress(ValueError):
        for row in rows[1:]:
            values.append([float(cell or "nan") for cell, _ in zip(row, header, strict=True)])
    frame = pd.DataFrame(values, columns=header, dtype=float)
    frame = frame[np.isfinite(frame[list(required)]).all(axis=1).cummin()]
    if len(frame) < len(rows) - 1:
        warnings.add(f"{path} is damaged in line {len(frame) + 2}: left out from there on.")
    return frame.set_index(frame["global_step"].astype(int))


def columns_of_policies(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """The columns eval/what_CONDITION of an eval.csv; return_std of somebody's own script is none of them."""
    return frame.filter(regex=rf"^eval/{what}_-?\d+(\.\d+)?(e-?\d+)?$")


def of_policies(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """The same by their conditions."""
    return columns_of_policies(frame, what).rename(columns=lambda name: float(name.removeprefix(f"eval/{what}_")))


def load_run(path: Path, warnings: Warnings) -> Run:
    """The run in a directory; Unusable if there is none that can be shown."""
    try:
        config = json.loads((path / "config.json").read_text())
        script, args = config["script"], config["args"]
        wanted = {"env_id": str, "seed": int, "exp_name": str, "total_timesteps": int}
        if not isinstance(script, str) or not all(isinstance(args[name], kind) for name, kind in wanted.items()):
            raise TypeError
    except FileNotFoundError:
        raise Unusable(f"{path} has no config.json") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Unusable(f"{path} has a damaged config.json, or one that is not of this project") from None
    evaluations = read_csv(path / "eval.csv", warnings, "global_step", "eval/best_return", "charts/wall_seconds")
    if evaluations.empty:
        raise Unusable(f"{path} has no evaluation yet, or none that can be read")
    policies = of_policies(evaluations, "return").columns
    conditions = [name.removeprefix("eval/best_") for name in evaluations if re.match("eval/best_(?!return)", name)]
    told = CONDITIONS.get(script, next(iter(conditions), "policy"))  # another script's policies differ by what its eval.csv says
    largest = args.get(f"eval_{told}_max", args.get(told))  # the last of the evaluated policies
    others = isinstance(largest, int | float) and not math.isclose(max(policies, default=0.0), largest, rel_tol=1e-4)
    mixed = script in CONDITIONS and (conditions != [told] or others or len(policies) != args.get("num_eval_policies", 1))
    if mixed or len(policies) not in (0, args.get("num_eval_policies", len(policies))):
        raise Unusable(f"{path} is mixed up: its eval.csv is not one of {script}.py with the arguments in config.json")
    if not evaluations.index.is_monotonic_increasing or not evaluations.index.is_unique:
        raise Unusable(f"{path} is mixed up: the steps in its eval.csv do not grow")
    if evaluations.index[-1] > args["total_timesteps"]:
        raise Unusable(f"{path} is mixed up: its eval.csv goes beyond the {args['total_timesteps']} steps of config.json")
    bias = read_bias(path / "bias.csv", warnings)
    if not bias.index.is_unique:
        warnings.add(f"{path / 'bias.csv'} is mixed up, it has a step twice: left out.")
        bias = bias[:0]
    for column in ("eval/bias_mean", "eval/bias_std"):  # an eval.csv of an earlier version has them itself
        if not bias.empty:
            evaluations[column] = bias[column].reindex(evaluations.index)
    train = read_csv(path / "train.csv", warnings, "global_step", "charts/SPS")
    fresh = read_csv(path / "evaluate.csv", warnings, "global_step", "return", "best_in_training")
    fresh = fresh["return"][fresh["best_in_training"] == 1][:1]
    if not fresh.index.isin(evaluations.index).all():
        warnings.add(f"{path / 'evaluate.csv'} is of step {fresh.index[0]:,}, at which eval.csv has no evaluation: left out.")
        fresh = fresh[:0]
    return Run(
        path=path,
        script=script,
        condition=told,
        args=args,
        commit=str(config.get("git_commit") or "unknown"),
        script_sha256=str(config.get("script_sha256") or "unknown"),
        device=str(config.get("device") or "unknown"),
        eval=evaluations,
        train=train,
        fresh=fresh,
        bias_sizes=bias_sizes(bias),
        kept_script=readable_script(path.resolve() / f"{script}.py", warnings),
    )


def read_bias(path: Path, warnings: Warnings) -> pd.DataFrame:
    """The value biases of a run; a row without a finite one is left out by itself, which is no damage (see value_bias.py)."""
    bias = read_csv(path, warnings, "global_step")
    columns = ["eval/bias_mean", "eval/bias_std"]
    missing = [name for name in columns if name not in bias]
    if missing and not bias.empty:
        warnings.add(f"{path} is mixed up or damaged, it has no column {missing[0]}: left out.")
        return bias[:0]
    measured = np.isfinite(bias.reindex(columns=columns)).all(axis=1)
    if not measured.all():
        steps = ", ".join(f"{step:,}" for step in bias.index[~measured])
        warnings.add(f"{path} has no finite value bias at step {steps}: left out there.")
    return bias[measured]


def bias_sizes(bias: pd.DataFrame) -> set[tuple[int, ...]]:
    """The sizes that the rows of a bias.csv were measured with; none where it does not say them."""
    sizes = bias.filter(list(BIAS_SIZES)).dropna().astype(int)
    return set(sizes.itertuples(index=False, name=None)) if len(sizes.columns) else set()


def readable_script(path: Path, warnings: Warnings) -> Path | None:
    """A script that a run has kept, or None where there is none whose defaults can be read."""
    try:
        script_defaults(str(path))
    except FileNotFoundError:
        return None
    except (OSError, SyntaxError, ValueError):
        warnings.add(f"{path} is damaged: the defaults of today's script count for its run.")
        return None
    return path


def is_shown(folder: Path) -> bool:
    """Whether a folder may hold runs: a hidden one only if it is one itself."""
    return not folder.name.startswith(".") or (folder / "config.json").exists()


def find_runs(paths, warnings: Warnings) -> list[Run]:
    """All runs in and below the given directories; folders without a run anywhere in them are named in a warning."""

    def folders(folder: Path) -> list[Path]:
        try:
            return [child for child in sorted(folder.iterdir()) if child.is_dir() and is_shown(child)]
        except OSError as error:
            warnings.add(f"{folder} cannot be read ({error.strerror}): left out.")
            return []

    def search(folder: Path) -> list[Run] | None:
        """The usable runs at or below a folder; None if there is no run directory, usable or not."""
        if any((folder / name).exists() for name in ("config.json", "eval.csv", "train.csv", "checkpoint.pt")):
            try:
                return [load_run(folder, warnings)]
            except Unusable as reason:
                warnings.add(f"{reason}: left out.")
            # A stray file in a folder of runs: those below it count. Its other folders (videos) need no mention.
            return [run for runs in map(search, folders(folder)) for run in runs or []]
        found = {child: search(child) for child in folders(folder)}
        if all(runs is None for runs in found.values()):
            return None
        for child, runs in found.items():
            if runs is None:
                warnings.add(f"{child} is not a run directory: left out.")
        return [run for runs in found.values() for run in runs or []]

    files = [path for path in paths if path.is_file()]  # of runs/*, which has the grid's logs too
    if files:
        warnings.add(f"{' and '.join(map(str, files))} are files, not run directories: left out.")
    everything = []
    for path in paths:
        if path in files:
            continue
        if not path.is_dir():
            raise UserError(f"{path} is not a directory; give run directories, or folders that hold them.")
        runs = search(path)
        if runs is None:
            warnings.add(f"{path} holds no run directory.")
        everything += runs or []
    unique = {run.path.resolve(): run for run in everything}
    return list(unique.values())
