"""What others reported: the paper's tables (benchmark/paper) and published learning curves (benchmark/published)."""

from pathlib import Path

import pandas as pd
from experiments import BASELINES, PAPER_ENVS, VARIANTS, name_in_gymnasium
from identity import parts_of
from job import UserError

from .groups import VERSION, Group

FOLDER = Path(__file__).resolve().parent.parent
RIVAL = "REDQ"  # the paper's main rival: published curves are compared with its


def paper_tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The paper's table 1 (final return) and table 2 (samples to a return)."""
    return tuple(pd.read_csv(FOLDER / "paper" / name) for name in ("table1_final_return.csv", "table2_samples_to_return.csv"))


def published_curves(names: tuple[str, ...]) -> dict[tuple[str, str], pd.DataFrame]:
    """(environment, algorithm) -> mean_return, std_return and seeds by environment step; of the given algorithms only.

    A name may leave out what stands in brackets: REDQ is REDQ (UTD 20). Raises UserError for a name that is not there.
    """
    frame = pd.read_csv(FOLDER / "published/gym_v4_curves.csv")
    short = {name: name.split(" (")[0] for name in frame["algorithm"].unique()}
    for name in names:
        if name not in (*short, *short.values()):
            raise UserError(f"there is no published curve of {name}; there are those of {', '.join(short.values())}.")
    chosen = [name for name in short if name in names or short[name] in names]
    curves = frame[frame["algorithm"].isin(chosen)].groupby(["env_id", "algorithm"], sort=False)
    return {key: rows.set_index("env_steps") for key, rows in curves}


def paper_name(group: Group, paper: pd.DataFrame) -> str | None:
    """What a table of the paper calls a group's algorithm; None if it has not got it."""
    names = {name.lower(): name for name in paper["algorithm"]}
    base = parts_of(group.exp_name)[0]
    return names.get(VARIANTS[base].label.lower() if base in VARIANTS else base)


def same_setting(group: Group) -> bool:
    """Whether a group has the settings that the paper's values were measured with, -v4 being the kin of its -v3."""
    return group.exp_name in VARIANTS and group.has_settings_of_name and group.env_id in PAPER_ENVS


def comparable_with_rival(group: Group) -> bool:
    """Whether a ratio to the published rival compares like with like: a baseline as it is, others at the rival's UTD."""
    beside = parts_of(group.exp_name)[1] or not group.has_settings_of_name
    alone = group.matches_name or not group.told_apart_by.keys() - {VERSION}
    return alone and not beside and (group.exp_name in BASELINES or group.runs[0].args.get("utd") == 20)


def paper_marks(groups: list[Group], paper: pd.DataFrame) -> tuple[list, list[str]]:
    """The paper's final returns to be drawn beside these groups, and in words those beyond the last step of their runs.

    A mark is (group, step, mean, std); each environment and algorithm has one.
    """
    marks, beyond, seen = [], [], set()
    for group in groups:
        key = group.env_id, paper_name(group, paper)
        row = paper[(paper["env"] == name_in_gymnasium(group.env_id)) & (paper["algorithm"] == key[1])]
        if key in seen or row.empty:
            continue
        seen.add(key)
        step, mean, std = (row[name].iloc[0] for name in ("env_steps", "mean_return", "std_return"))
        if step <= last_step(groups, group.env_id):
            marks.append((group, step, mean, std))
        else:
            beyond.append(f"{key[1]} on {group.env_id} at {step:,}")
    return marks, beyond


def last_step(groups: list[Group], env_id: str) -> int:
    """The last step at which a run on an environment has been evaluated."""
    return max(run.last for group in groups if group.env_id == env_id for run in group.runs)
