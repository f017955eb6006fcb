"""Redraw the paper's tables and figures from run directories: report.md, and its figures as PNG and PDF.

    python benchmark/report.py runs/
    python benchmark/report.py runs/ more_runs/Ant-v4__rac_sac__4 --out report/ --published SAC REDQ "Simba (UTD 8)"

Every run directory at or below the given folders is read, unfinished ones too. Runs are pooled by environment and exp_name,
as in CleanRL. A warning names the settings that differ within such a group, and every directory that cannot be read.

A run of another program needs a config.json {"args": {"env_id", "seed", "exp_name", "total_timesteps"}} and an eval.csv with
global_step, charts/wall_seconds and eval/best_return. A last row without its line end was cut by a kill: it is left out.

Ablations are the runs of run.py's sweeps. They are named VARIANT-ARGUMENT_VALUE, and have sections of their own.
"""

import glob
import io
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
import tyro
from rliable import library, metrics
from run import HARMLESS, RESERVED, SWEEPS

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def short_names(algorithms: pd.Series) -> pd.Series:
    """DroQ for DroQ (UTD 20)."""
    return algorithms.str.split(" ").str[0]


HERE = Path(__file__).resolve().parent
PUBLISHED = HERE / "published/gym_v4_curves.csv"
CURVE_NAMES = pd.read_csv(PUBLISHED)["algorithm"]
ALGORITHMS = tuple(pd.concat([short_names(CURVE_NAMES), CURVE_NAMES]).unique())
STEPS = (16_666, 25_000, 33_332, 50_000, 66_664, 100_000, 300_000)  # of the table beside published results
GROUP = ["env_id", "exp_name"]
OTHER = "best other, published"
STEP = "global_step"
RETURN = "eval/best_return"
CURVES = {  # columns drawn over time: what they are, and whether single seeds are lines or dots
    RETURN: ("Average return", "-"),
    "eval/bias_mean": ("Mean of the value bias", "-"),
    "eval/bias_std": ("Std of the value bias", "-"),
    "eval/best_beta": ("Best beta", "."),
    "eval/best_k": ("Best k", "."),
}
COLOURS = [  # Paul Tol's muted ones and black, for those who see few colours
    "#332288",
    "#CC6677",
    "#117733",
    "#DDAA33",
    "#88CCEE",
    "#882255",
    "#44AA99",
    "#999933",
    "#AA4499",
    "#000000",
]
# Colour and line style of a line; LOOKS() goes round for ever
LOOKS = plt.cycler(linestyle=["-", "--"]) * plt.cycler(color=COLOURS)  # all colours solid, then all dashed
GREY_LOOKS = plt.cycler(color=["grey", "silver"]) * plt.cycler(linestyle=["--", ":", "-."])
plt.rcParams |= {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "lines.markersize": 2,
    "savefig.dpi": 200,
}

ABOUT_RETURNS = """\
Returns are those of the best policy: mean ± sample standard deviation over seeds, and in brackets the number of seeds.
The best of several policies flatters; what it returns on fresh episodes is in the list of runs. The value at a step is that of
the last evaluation at or before it, less than one evaluation interval earlier."""
ABOUT_PUBLISHED = """\
Published values (benchmark/published) are of one policy, and may be from up to a tenth fewer steps. The best other
is the highest published mean of the curves without a column that have a value there."""
ABOUT_INTERVALS = """\
Estimates have 95 % stratified bootstrap intervals (rliable), which say nothing where there is one seed. They are
of the environments that all algorithms ran in, at the last step that all runs have come to:"""


@dataclass
class Options:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run directories, or folders that hold them at any depth
    out: Path = Path("report")  # the folder that the report is written into
    published: tuple[Literal[ALGORITHMS], ...] = ("SAC", "REDQ")  # whose curves have column and line: Simba, or "Simba (UTD 8)"
    bootstrap: int = 2000  # repetitions of the bootstrap behind the intervals


# Reading


class Run(NamedTuple):
    """What is read of a run directory."""

    about: dict  # its row in the list of runs
    settings: dict
    evaluations: pd.DataFrame  # and, in rows of their own that have no return, the value bias
    lost: int  # evaluations that are left out, for their return is NaN


def with_std(mean: float, std: float) -> str:
    """mean ± std; the mean alone where there is no std."""
    return f"{mean:,.0f}" if np.isnan(std) else f"{mean:,.0f} ± {std:,.0f}"


def with_stds(means: pd.Series, stds: pd.Series) -> pd.Series:
    return means.combine(stds, with_std)


def read_csv(path: Path) -> pd.DataFrame:
    """A CSV file of numbers, without a last row that a kill has cut."""
    text = path.read_text()
    whole_rows = text[: text.rfind("\n") + 1]
    return pd.read_csv(io.StringIO(whole_rows), dtype=float).astype({STEP: int})


def read_run(folder: Path) -> Run:
    """Any exception means that its files are damaged."""
    settings = json.loads((folder / "config.json").read_text())["args"]
    key = {"env_id": str(settings["env_id"]), "exp_name": str(settings["exp_name"]), "run": str(folder)}
    rows = read_csv(folder / "eval.csv")
    evaluations = rows.dropna(subset=[RETURN])
    lost = len(rows) - len(evaluations)
    if evaluations.empty:
        raise ValueError("eval.csv has no evaluation yet")
    last = evaluations.iloc[-1]
    about = {
        **key,
        "seed": settings["seed"],
        "last step": int(last[STEP]),
        "of": settings["total_timesteps"],
        "return": with_std(last[RETURN], last.get("eval/best_return_std", np.nan)),
        "beta* or k*": last.get("eval/best_beta", last.get("eval/best_k")),
        "hours": last["charts/wall_seconds"] / 3600,
    }
    if (folder / "evaluate.csv").exists():
        about["on fresh episodes"] = ""  # the run has gone on since
        fresh = read_csv(folder / "evaluate.csv")
        for _, row in fresh[fresh[STEP] == last[STEP]].iterrows():
            if row["best_in_training"] == 1:
                about["on fresh episodes"] = with_std(row["return"], row["return_std"])
    interval = settings.get("eval_frequency")
    if interval is None:  # a run of another program: the longest that there was
        interval = evaluations[STEP].diff().max()
        if len(evaluations) == 1:
            interval = 1
    if (folder / "bias.csv").exists():
        evaluations = pd.concat([evaluations, read_csv(folder / "bias.csv")])
    return Run(about, settings, evaluations.assign(**key, interval=interval), lost)


def load(folders: tuple[Path, ...]) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """(runs, evaluations, warnings): a row for each run, and for each evaluation of each run."""
    found = []
    warnings = []
    configs = {}  # by the file itself: links are followed, and a run counts once
    for folder in folders:
        for name in glob.glob("**/config.json", root_dir=folder, recursive=True, include_hidden=True):
            path = folder / name
            configs[path.resolve()] = path
    for path in sorted(configs.values()):
        try:
            run = read_run(path.parent)
        except Exception as error:  # whatever is wrong with one directory, the others count
            warnings.append(f"warning: {path.parent} is left out: {type(error).__name__}: {error}\n")
            continue
        found.append(run)
        if run.lost:
            warnings.append(f"warning: {path.parent}: {run.lost} evaluations with a return of NaN are left out\n")
    if not found:
        print("error: no run (a folder with config.json and eval.csv) could be read below", *folders, *warnings, file=sys.stderr)
        sys.exit(2)
    warnings += differences(pd.DataFrame([run.settings for run in found]))
    runs = pd.DataFrame([run.about for run in found]).sort_values([*GROUP, "seed"])
    return runs, pd.concat([run.evaluations for run in found], ignore_index=True), warnings


def may_differ(argument: str) -> bool:
    """Whether it tells the runs of a group apart, or does not change what is computed."""
    return argument in (*RESERVED, "torch_deterministic") or argument.startswith(HARMLESS)


def differences(settings: pd.DataFrame) -> list[str]:
    """Warnings: in what the runs of a group differ, and which seeds are there twice. settings: a row for each run."""
    warnings = []
    for (env_id, name), group in settings.groupby(GROUP):
        for argument in sorted(group.columns):
            if may_differ(argument):
                continue
            values = group[argument].dropna().astype(str).unique()
            if len(values) > 1:
                warnings.append(f"warning: runs of {name} on {env_id} differ in {argument}: {', '.join(values)}\n")
        for seed in group["seed"][group["seed"].duplicated()].unique():
            warnings.append(f"warning: {name} on {env_id} has more than one run with seed {seed}, and all count\n")
    return warnings


def paper(table: str, evaluations: pd.DataFrame) -> pd.DataFrame:
    """A table of the paper (benchmark/paper) for these environments, with this project's names; -v4 is the kin of its -v3."""
    theirs = pd.read_csv(HERE / f"paper/{table}.csv").rename(columns={"env_steps": "paper's steps"})
    theirs["exp_name"] = theirs.pop("algorithm").str.lower().str.replace("-", "_")
    theirs["env_id"] = theirs.pop("env") + "-v4"
    return theirs[theirs["env_id"].isin(evaluations["env_id"])]


def published(names: tuple[str, ...]) -> pd.DataFrame:
    """Published curves, each as if it were a run. A point counts for steps of which it has at least nine tenths.

    A curve without a number of seeds, which was read from a figure, has no part in the best other.
    """
    curves = pd.read_csv(PUBLISHED).rename(columns={"env_steps": STEP, "mean_return": RETURN})
    is_named = curves["algorithm"].isin(names) | short_names(curves["algorithm"]).isin(names)
    curves["exp_name"] = (curves["algorithm"] + ", published").where(is_named, OTHER)
    curves["run"] = curves["algorithm"]
    curves["interval"] = curves[STEP] / 9
    return curves[is_named | curves["seeds"].notna()]


# Values


def values_at(evaluations: pd.DataFrame, column: str, wanted: pd.DataFrame) -> pd.DataFrame:
    """The evaluation of every run at each wanted step: the last at or before it, less than one evaluation interval earlier.

    wanted: a column `steps`, and env_id or GROUP. A run that has no such evaluation has no row.
    """
    known = evaluations.dropna(subset=[column]).sort_values(STEP)
    runs = known[[*GROUP, "run"]].drop_duplicates()
    pairs = runs.merge(wanted).sort_values("steps")  # a run with a step
    found = pd.merge_asof(pairs, known, left_on="steps", right_on=STEP, by=[*GROUP, "run"])
    return found.query("steps < global_step + interval")


def mean_curves(evaluations: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Means of the columns over the runs of each group, at the steps that all of these have come to.

    In the rows where one column has a value, all have.
    """
    known = evaluations.dropna(subset=columns[:1])
    steps = known[[*GROUP, STEP]].drop_duplicates().rename(columns={STEP: "steps"})
    found = values_at(known, columns[0], steps)
    runs_there = found.groupby([*GROUP, "steps"])["run"].transform("count")
    all_runs = found.groupby(GROUP)["run"].transform("nunique")
    common = found[runs_there == all_runs]
    return common.groupby([*GROUP, "steps"], as_index=False)[columns].mean()


def values_at_common_end(evaluations: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The evaluation of every run at the last step that all runs with the same values of the columns `by` have come to."""
    known = evaluations.dropna(subset=[RETURN])
    ends = known.groupby([*GROUP, "run"])[STEP].max()
    common_ends = ends.groupby(by).min()
    return values_at(evaluations, RETURN, common_ends.rename("steps").reset_index())


def means_over_seeds(values: pd.DataFrame) -> pd.DataFrame:
    """(env_id, exp_name, steps) -> mean of the returns, and in words: mean ± std (seeds)."""
    stats = values.groupby([*GROUP, "steps"])[RETURN].agg(["mean", "std", "count"])
    stats["words"] = with_stds(stats["mean"], stats["std"]) + " (" + stats["count"].astype(str) + ")"
    return stats


# Tables


def final_returns(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return of each group at the last step that all its seeds have."""
    means = means_over_seeds(values_at_common_end(evaluations, GROUP))
    return means["words"].rename("return (seeds)").reset_index()


def final_returns_beside_paper(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Table 1 of the paper."""
    theirs = paper("table1_final_return", evaluations)
    theirs["paper"] = with_stds(theirs.pop("mean_return"), theirs.pop("std_return"))
    return final_returns(evaluations).merge(theirs, how="outer")


def samples_to_return(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Table 2 of the paper: the first step at which the mean over seeds reaches a return, which is in the column "return"."""
    theirs = paper("table2_samples_to_return", evaluations)
    returns = theirs[["env_id", "return"]].drop_duplicates()
    means = mean_curves(evaluations, [RETURN]).merge(returns)
    is_reached = means[RETURN] >= means["return"]
    means["steps"] = means["steps"].where(is_reached)
    first = means.groupby([*GROUP, "return"], as_index=False)["steps"].min()
    return first.merge(theirs, how="outer")


def beside_published(evaluations: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """Returns at some steps, published ones beside them, the best mean of the other published ones, and the ratio to REDQ's."""
    index = ["env_id", "steps"]
    wanted = evaluations[["env_id"]].drop_duplicates().merge(pd.DataFrame({"steps": STEPS}), how="cross")
    ours = means_over_seeds(values_at(evaluations, RETURN, wanted))
    theirs = values_at(curves, RETURN, wanted)
    words = with_stds(theirs[RETURN], theirs["std_return"])
    theirs["words"] = words.where(theirs["exp_name"] != OTHER, theirs["algorithm"] + " " + words)
    best = theirs.sort_values(RETURN).groupby([*index, "exp_name"])["words"].last()  # there are several others
    table = ours["words"].unstack("exp_name").join(best.unstack("exp_name"))
    redq = theirs[short_names(theirs["algorithm"]) == "REDQ"].set_index(index)[RETURN]
    means = ours["mean"].unstack("exp_name")
    table["rac_sac / REDQ, published"] = means.get("rac_sac", np.nan) / redq
    return table.reset_index()


def scores_at_common_end(evaluations: pd.DataFrame) -> tuple[dict[str, np.ndarray], str]:
    """(exp_name -> runs x environments, their steps): returns over the paper's RAC-SAC return, where all algorithms ran."""
    values = values_at_common_end(evaluations, ["env_id"])
    units = paper("table1_final_return", values).query("exp_name == 'rac_sac'")
    values = values.merge(units[["env_id", "mean_return"]])
    values["score"] = values[RETURN] / values["mean_return"]
    # Which run of one environment stands beside which of another means nothing: the bootstrap draws them apart
    values["number"] = values.groupby(GROUP).cumcount()
    table = values.pivot(index=["exp_name", "number"], columns=["env_id", "steps"], values="score")
    all_ran = table.groupby("exp_name").count().min() > 0  # by environment
    table = table.loc[:, all_ran].dropna()
    scores = {}
    if len(table.columns):
        for name, rows in table.groupby("exp_name"):
            scores[name] = rows.to_numpy()
    return scores, ", ".join(f"{env_id} at {step:,}" for env_id, step in table)


def estimates(scores: dict, statistic, repetitions: int) -> pd.DataFrame:
    """Estimate and 95 % stratified bootstrap interval of a statistic for each entry of scores: a matrix, or two to compare."""

    def as_array(*matrices: np.ndarray) -> np.ndarray:
        return np.array([statistic(*matrices)])

    np.random.seed(1)  # rliable draws from numpy's global generator
    points, bounds = library.get_interval_estimates(scores, as_array, reps=repetitions)
    rows = []
    for name in scores:
        low, high = bounds[name][:, 0]
        rows.append((name, points[name][0], low, high))
    return pd.DataFrame(rows, columns=["exp_name", "estimate", "low", "high"])


# Figures


def panels(env_ids, ylabel: str):
    """A figure with a panel for each environment, three in a row but four in a square. Returns it and env_id -> axes."""
    columns = 2 if len(env_ids) == 4 else min(len(env_ids), 3)
    rows = math.ceil(len(env_ids) / columns)
    figure = plt.figure(figsize=(max(5, 1.4 + 1.5 * columns), 2 * rows), layout="constrained")
    panel = {}
    for place, env_id in enumerate(sorted(env_ids), 1):
        ax = figure.add_subplot(rows, columns, place, title=env_id, xlabel="environment steps")
        ax.locator_params(nbins=4)
        ax.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        panel[env_id] = ax
    figure.supylabel(ylabel)
    return figure, panel


def draw_curves(evaluations: pd.DataFrame, column: str, looks: dict[str, dict]):
    """Every run thin, the mean of each group thick where all its runs have come. looks: exp_name -> colour and line style."""
    label, style_of_a_run = CURVES[column]
    known = evaluations.dropna(subset=[column])
    means = mean_curves(known, [column])
    figure, panel = panels(known["env_id"].unique(), label)
    lines = {}
    for (env_id, name), group in known.groupby(GROUP):
        look = looks[name]
        for _, run in group.groupby("run"):
            panel[env_id].plot(run[STEP], run[column], style_of_a_run, linewidth=0.7, alpha=0.5, color=look["color"])
        mean = means.query("env_id == @env_id and exp_name == @name")
        drawn = panel[env_id].plot(mean["steps"], mean[column], linewidth=1.5, marker="o", **look)
        lines[name] = drawn[0]
    figure.set_figheight(figure.get_figheight() + 0.15 + 0.1 * len(lines))  # room for the legend
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_family(family: pd.DataFrame, what: Literal["return", "alpha"], columns: list[str]):
    """A map of what every evaluated policy has over time, mean over seeds. columns: one for each, named by its beta or k."""
    means = mean_curves(family, columns)
    figure, panel = panels(means["env_id"].unique(), "policy (beta or k)")
    policies = [float(column.rpartition("_")[2]) for column in columns]
    for env_id, here in means.groupby("env_id"):
        values, label = here[columns], what
        if what == "alpha":
            values, label = np.log10(values), "log10 of alpha"
        colours = panel[env_id].pcolormesh(here["steps"], policies, values.T)
        figure.colorbar(colours, ax=panel[env_id], location="top", label=label)
    return figure


# The report


class Report:
    """report.md, section by section, and the figures beside it."""

    def __init__(self, folder: Path, warnings: list[str]):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.blocks = ["# Realistic Actor-Critic: report", ABOUT_RETURNS, *warnings]

    def add_table(self, title: str, table: pd.DataFrame, text: str = "") -> None:
        """A section, unless the table is empty."""
        if table.empty:
            return
        cells = table.convert_dtypes().astype(object)  # whole numbers whole, though others of their column are missing
        cells = cells.where(cells.notna(), None)
        words = cells.to_markdown(index=False, intfmt=",", floatfmt=",.2f", missingval="-")
        self.blocks += [f"## {title}", words, text]

    def add_figure(self, title: str, figure, text: str) -> None:
        name = re.sub(r"\W+", "_", title).lower()
        for suffix in ("png", "pdf"):
            figure.savefig(self.folder / f"{name}.{suffix}")
        plt.close(figure)
        self.blocks += [f"## {title}", f"![{title}]({name}.png)", text]

    def add_curves(self, title: str, evaluations: pd.DataFrame, beside: pd.DataFrame | None = None) -> None:
        """Learning curves, and the value bias and best policy where there are any, beside published curves."""
        looks = dict(zip(evaluations["exp_name"].unique(), LOOKS(), strict=False))
        drawn = evaluations
        if beside is not None:
            looks |= dict(zip(beside["exp_name"].unique(), GREY_LOOKS(), strict=False))
            drawn = pd.concat([evaluations, beside])
        text = "Every seed thin, the mean thick where all seeds have come, published curves grey."
        for column, (label, _) in CURVES.items():
            if column in evaluations and evaluations[column].notna().any():
                self.add_figure(title + label, draw_curves(drawn, column, looks), text)

    def add_families(self, evaluations: pd.DataFrame) -> None:
        """Return and temperature of every policy, for each algorithm that has more than one."""
        text = "Of every evaluated policy over time, mean over seeds."
        for name, family in evaluations.groupby("exp_name"):
            for what in ("return", "alpha"):
                columns = sorted(family.dropna(axis=1, how="all").filter(regex=rf"eval/{what}_\d"))
                if len(columns) > 1:
                    self.add_figure(f"{name}: {what} of each policy", draw_family(family, what, columns), text)

    def add_ablations(self, evaluations: pd.DataFrame) -> None:
        """A sweep's values beside the default, in the environments where there are at least two of these."""
        for sweep in SWEEPS.values():
            names = evaluations["exp_name"]
            members = evaluations[(names == sweep.variant) | names.str.startswith(sweep.prefix)].copy()
            members["exp_name"] = members["exp_name"].str.removeprefix(sweep.prefix).replace(sweep.variant, "default")
            members = members[members.groupby("env_id")["exp_name"].transform("nunique") > 1]
            if len(members):
                title = f"Ablation of {sweep.variant}, {sweep.argument}: "
                self.add_table(title + "final return", final_returns(members))
                self.add_curves(title, members)

    def write(self) -> Path:
        path = self.folder / "report.md"
        path.write_text("\n\n".join(self.blocks) + "\n", encoding="utf-8")
        return path


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    runs, evaluations, warnings = load(options.runs)
    sys.stderr.writelines(warnings)
    report = Report(options.out, warnings)
    is_swept = evaluations["exp_name"].str.startswith(tuple(sweep.prefix for sweep in SWEEPS.values()))
    compared = evaluations[~is_swept]

    text = "Table 1 of the paper, whose environments are -v3. Ours at the last step that all seeds have come to."
    report.add_table("Final return", final_returns_beside_paper(compared), text)
    text = "Table 2 of the paper: the first step at which the mean over seeds reaches a return, as far as all seeds have come."
    report.add_table("Samples to reach a return", samples_to_return(compared), text)
    curves = published(options.published)
    report.add_table("Return beside published results", beside_published(compared, curves), ABOUT_PUBLISHED)

    scores, steps = scores_at_common_end(compared)
    table = estimates(scores, metrics.aggregate_iqm, options.bootstrap)
    text = f"Of returns over the paper's RAC-SAC return. {ABOUT_INTERVALS} {steps}."
    report.add_table("Interquartile mean", table, text)
    pairs = {}
    if "rac_sac" in scores:
        ours = scores.pop("rac_sac")
        for name, theirs in scores.items():
            pairs[f"rac_sac over {name}"] = (ours, theirs)
    table = estimates(pairs, metrics.probability_of_improvement, options.bootstrap)
    report.add_table("Probability of improvement", table, f"{ABOUT_INTERVALS} {steps}.")

    curves["end"] = curves["env_id"].map(compared.groupby("env_id")[STEP].max())
    report.add_curves("", compared, beside=curves.query("exp_name != @OTHER and global_step <= end"))
    report.add_families(compared)
    report.add_ablations(evaluations)
    report.add_table("Runs", runs)
    print(f"{report.write()}: {len(runs)} runs")


if __name__ == "__main__":
    main()
