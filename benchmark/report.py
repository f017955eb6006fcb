"""Redraw the paper's tables and figures from run directories: report.md, and its figures as PNG and PDF.

    python benchmark/report.py runs/
    python benchmark/report.py runs/ more_runs/Ant-v4__rac_sac__4 --out report/ --published SAC REDQ CrossQ

Every run directory at or below the given folders is read, unfinished ones too. Runs are pooled by environment and experiment
name, as in CleanRL. A warning names the settings that differ within such a group, and every directory that cannot be read.

A run of another program needs a config.json {"args": {"env_id", "seed", "exp_name", "total_timesteps"}} and an eval.csv with
global_step, charts/wall_seconds and eval/best_return. A last row without its line end was cut by a kill: it is left out.

Ablations are the runs of run.py's sweeps. They are named VARIANT-ARGUMENT_VALUE, and have sections of their own.
"""

import glob
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import pandas as pd
import tyro
from rliable import library, metrics
from run import SWEEPS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE / "published/gym_v4_curves.csv"
ALGORITHMS = tuple(pd.read_csv(PUBLISHED)["algorithm"].str.split(" ").str[0])
STEPS = (16_666, 33_332, 50_000, 66_664, 100_000, 300_000)  # of the table beside published results
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
# Arguments in which the runs of a group may differ: they tell runs apart, or do not change what is computed
OF_A_RUN = """seed run_root run_name resume evaluate total_timesteps cuda compile cudagraphs torch_deterministic track
    capture_video wandb_project_name wandb_entity checkpoint_seconds snapshot_frequency eval_workers""".split()
# Paul Tol's muted colours and black, for those who see few colours
COLOURS = plt.cycler(color="#332288 #CC6677 #117733 #DDAA33 #88CCEE #882255 #44AA99 #999933 #AA4499 #000000".split())
LOOKS = plt.cycler(linestyle=["-", "--"]) * COLOURS
GREY_LOOKS = plt.cycler(color=["grey"] * 3, linestyle=["--", ":", "-."])
plt.rcParams |= {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "lines.markersize": 2,
    "savefig.dpi": 200,
}

HEAD = """Returns are those of the best policy: mean ± sample standard deviation over seeds, and in brackets the number of seeds.
The best of several policies flatters; what it returns on fresh episodes is in the list of runs. The value at a step is that of
the last evaluation at or before it, less than one evaluation interval earlier."""
FINAL = "Table 1 of the paper, whose environments are -v3. Ours at the last step that all seeds have come to."
SAMPLES = "Table 2 of the paper: the first step at which the mean over seeds reaches a return, as far as all seeds have come."
BESIDE = """Published values (benchmark/published) are of one policy, and may be from up to a tenth fewer steps. The best other
is the highest published mean of the algorithms without a column that have a value there."""
INTERVALS = """Estimates have 95 % stratified bootstrap intervals (rliable), which say nothing where there is one seed. They are
of the environments that all algorithms ran in, at the last step that all runs have come to:"""
DRAWN = "Every seed thin, the mean thick where all seeds have come, published curves grey."
FAMILY = "Of every evaluated policy over time, mean over seeds."


@dataclass
class Options:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run directories, or folders that hold them at any depth
    out: Path = Path("report")  # the folder that the report is written into
    published: tuple[Literal[ALGORITHMS], ...] = ("SAC", "REDQ")  # whose published curves have a column and a line
    bootstrap: int = 2000  # repetitions of the bootstrap behind the intervals


# Reading


def read_csv(path: Path) -> pd.DataFrame:
    """A CSV file of numbers, without a last row that a kill has cut."""
    text = path.read_text()
    return pd.read_csv(io.StringIO(text[: text.rfind("\n") + 1]), dtype=float).astype({STEP: int})


def with_std(mean: float, std: float) -> str:
    """mean ± std; the mean alone where there is no std."""
    return f"{mean:,.0f}" if np.isnan(std) else f"{mean:,.0f} ± {std:,.0f}"


def read_run(folder: Path) -> tuple[dict, dict, pd.DataFrame, int]:
    """(its row in the list of runs, its settings, its evaluations, how many evaluations are left out for a return of NaN).

    Any exception means that its files are damaged.
    """
    args = json.loads((folder / "config.json").read_text())["args"]
    key = {"env_id": str(args["env_id"]), "exp_name": str(args["exp_name"]), "run": str(folder)}
    rows = read_csv(folder / "eval.csv")
    evaluations = rows.dropna(subset=[RETURN])
    if evaluations.empty:
        raise ValueError("eval.csv has no evaluation yet")
    last = evaluations.iloc[-1]
    about = {
        **key,
        "seed": args["seed"],
        "last step": int(last[STEP]),
        "of": args["total_timesteps"],
        "return": with_std(last[RETURN], last.get("eval/best_return_std", np.nan)),
        "beta* or k*": last.get("eval/best_beta", last.get("eval/best_k")),
        "hours": last["charts/wall_seconds"] / 3600,
    }
    if (folder / "evaluate.csv").exists():
        best = read_csv(folder / "evaluate.csv").query("best_in_training == 1 and global_step == @last.global_step")
        about["on fresh episodes"] = "".join(best["return"].combine(best["return_std"], with_std))
    interval = args.get("eval_frequency", evaluations[STEP].diff().fillna(1).max())
    if (folder / "bias.csv").exists():
        evaluations = pd.concat([evaluations, read_csv(folder / "bias.csv")])
    return about, args, evaluations.assign(**key, interval=interval), rows[RETURN].isna().sum()


def load(folders: tuple[Path, ...]) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """(runs, evaluations, warnings): a row for each run, and for each evaluation of each run."""
    found, warnings = [], []
    paths = [
        folder / name
        for folder in folders
        for name in glob.glob("**/config.json", root_dir=folder, recursive=True, include_hidden=True)
    ]
    for path in sorted({path.resolve(): path for path in paths}.values()):  # links are followed, a run counts once
        try:
            *run, lost = read_run(path.parent)
            found.append(run)
            if lost:
                warnings.append(f"warning: {path.parent}: {lost} evaluations with a return of NaN are left out\n")
        except Exception as error:  # whatever is wrong with one directory, the others count
            warnings.append(f"warning: {path.parent} is left out: {type(error).__name__}: {error}\n")
    if not found:
        print("error: no run (a folder with config.json and eval.csv) could be read below", *folders, *warnings, file=sys.stderr)
        sys.exit(2)
    runs, settings, evaluations = zip(*found, strict=True)
    for (env_id, name), group in pd.DataFrame(settings).groupby(GROUP):
        for argument in group.columns.difference(OF_A_RUN):
            values = group[argument].dropna().astype(str).unique()
            if len(values) > 1:
                warnings.append(f"warning: runs of {name} on {env_id} differ in {argument}: {', '.join(values)}\n")
        for seed in group["seed"][group["seed"].duplicated()].unique():
            warnings.append(f"warning: {name} on {env_id} has more than one run with seed {seed}, and all count\n")
    return pd.DataFrame(runs).sort_values([*GROUP, "seed"]), pd.concat(evaluations, ignore_index=True), warnings


def paper(table: str, evaluations: pd.DataFrame) -> pd.DataFrame:
    """A table of the paper (benchmark/paper) for these environments, with this project's names; -v4 is the kin of its -v3."""
    theirs = pd.read_csv(HERE / f"paper/{table}.csv").rename(columns={"env_steps": "paper's steps"})
    theirs["exp_name"] = theirs.pop("algorithm").str.lower().str.replace("-", "_")
    theirs["env_id"] = theirs.pop("env") + "-v4"
    return theirs[theirs["env_id"].isin(evaluations["env_id"])]


def published(names: tuple[str, ...]) -> pd.DataFrame:
    """Published curves, each as if it were a run; a point counts for steps up to a tenth later.

    A curve without a number of seeds, which was read from a figure, has no part in the best other.
    """
    curves = pd.read_csv(PUBLISHED).rename(columns={"env_steps": STEP, "mean_return": RETURN})
    shown = curves["algorithm"].str.split(" ").str[0].isin(names)
    name = (curves["algorithm"] + ", published").where(shown, OTHER)
    return curves.assign(exp_name=name, run=curves["algorithm"], interval=curves[STEP] / 9)[shown | curves["seeds"].notna()]


# Values


def values_at(evaluations: pd.DataFrame, column: str, wanted: pd.DataFrame) -> pd.DataFrame:
    """The evaluation of every run at each wanted step: the last at or before it, less than one evaluation interval earlier.

    wanted: a column `steps`, and env_id or GROUP. A run that has no such evaluation has no row.
    """
    known = evaluations.dropna(subset=[column]).sort_values(STEP)
    pairs = known[[*GROUP, "run"]].drop_duplicates().merge(wanted).sort_values("steps")
    found = pd.merge_asof(pairs, known, left_on="steps", right_on=STEP, by=[*GROUP, "run"])
    return found.query("steps < global_step + interval")


def mean_curves(evaluations: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Means of the columns over the runs of each group, at the steps that all of these have come to."""
    known = evaluations.dropna(subset=columns[:1])
    found = values_at(known, columns[0], known[[*GROUP, STEP]].drop_duplicates().rename(columns={STEP: "steps"}))
    counts = found.groupby([*GROUP, "steps"])["run"].transform("count")
    whole = found[counts == found.groupby(GROUP)["run"].transform("nunique")]
    return whole.groupby([*GROUP, "steps"], as_index=False)[columns].mean()


def values_at_common_end(evaluations: pd.DataFrame, group: list[str]) -> pd.DataFrame:
    """The evaluation of every run at the last step that all runs of its group have come to."""
    ends = evaluations.dropna(subset=[RETURN]).groupby([*GROUP, "run"])[STEP].max().groupby(group).min()
    return values_at(evaluations, RETURN, ends.rename("steps").reset_index())


def summary(values: pd.DataFrame) -> pd.DataFrame:
    """(env_id, exp_name, steps) -> mean of returns over seeds, and in words: mean ± std (seeds)."""
    stats = values.groupby([*GROUP, "steps"])[RETURN].agg(["mean", "std", "count"])
    words = stats["mean"].combine(stats["std"], with_std) + " (" + stats["count"].astype(str) + ")"
    return stats.assign(words=words)


# Tables


def final_returns(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return of each group at the last step that all its seeds have."""
    return summary(values_at_common_end(evaluations, GROUP))["words"].rename("return (seeds)").reset_index()


def final_returns_beside_paper(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Table 1 of the paper."""
    theirs = paper("table1_final_return", evaluations)
    theirs["paper"] = theirs.pop("mean_return").combine(theirs.pop("std_return"), with_std)
    return final_returns(evaluations).merge(theirs, how="outer")


def samples_to_return(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Table 2 of the paper: the first step at which the mean over seeds reaches a return."""
    theirs = paper("table2_samples_to_return", evaluations)
    means = mean_curves(evaluations, [RETURN]).merge(theirs[["env_id", "return"]].drop_duplicates())
    means["steps"] = means["steps"].where(means[RETURN] >= means["return"])
    return means.groupby([*GROUP, "return"], as_index=False)["steps"].min().merge(theirs, how="outer")


def beside_published(evaluations: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """Returns at some steps, published ones beside them, the best mean of the other published ones, and the ratio to REDQ's."""
    index = ["env_id", "steps"]
    wanted = evaluations[["env_id"]].drop_duplicates().merge(pd.DataFrame({"steps": STEPS}), how="cross")
    ours = summary(values_at(evaluations, RETURN, wanted))
    theirs = values_at(curves, RETURN, wanted).sort_values(RETURN)
    words = theirs[RETURN].combine(theirs["std_return"], with_std)
    theirs["words"] = words.where(theirs["exp_name"] != OTHER, theirs["algorithm"] + " " + words)
    table = ours["words"].unstack("exp_name").join(theirs.groupby([*index, "exp_name"])["words"].last().unstack())
    redq = theirs.query("algorithm.str.startswith('REDQ')").set_index(index)[RETURN]
    table["rac_sac / REDQ, published"] = ours["mean"].unstack("exp_name").get("rac_sac", np.nan) / redq
    return table.reset_index()


def intervals(scores: dict, statistic, repetitions: int) -> pd.DataFrame:
    """Estimate and 95 % stratified bootstrap interval of a statistic of each entry of scores."""
    np.random.seed(1)  # rliable draws from numpy's global generator
    point, bounds = library.get_interval_estimates(scores, lambda *runs: np.array([statistic(*runs)]), reps=repetitions)
    rows = [(name, point[name][0], *bounds[name][:, 0]) for name in scores]
    return pd.DataFrame(rows, columns=["exp_name", "estimate", "low", "high"])


def scores_at_common_end(evaluations: pd.DataFrame) -> tuple[dict[str, np.ndarray], str]:
    """(exp_name -> runs x environments, their steps): returns over the paper's RAC-SAC return, where all algorithms ran."""
    values = values_at_common_end(evaluations, ["env_id"])
    units = paper("table1_final_return", values).query("exp_name == 'rac_sac'")
    values = values.merge(units[["env_id", "mean_return"]])
    values["score"] = values[RETURN] / values["mean_return"]
    # Which run of one environment stands beside which of another means nothing: the bootstrap draws them apart
    values["number"] = values.groupby(GROUP).cumcount()
    table = values.pivot(index=["exp_name", "number"], columns=["env_id", "steps"], values="score")
    table = table.loc[:, table.groupby("exp_name").count().min() > 0].dropna()
    steps = ", ".join(f"{env_id} at {step:,}" for env_id, step in table)
    return {name: rows.to_numpy() for name, rows in table.groupby("exp_name") if rows.size}, steps


# Figures


def panels(env_ids, ylabel: str):
    """A figure with a panel for each environment, three in a row but four in a square. Returns it and env_id -> axes."""
    columns = 2 if len(env_ids) == 4 else min(len(env_ids), 3)
    rows = -(-len(env_ids) // columns)
    figure = plt.figure(figsize=(max(4.4, 1.4 + 1.5 * columns), 2 * rows), layout="constrained")
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
    label, thin = CURVES[column]
    known = evaluations.dropna(subset=[column])
    means = mean_curves(known, [column])
    figure, panel = panels(known["env_id"].unique(), label)
    lines = {}
    for (env_id, name), group in known.groupby(GROUP):
        for _, run in group.groupby("run"):
            panel[env_id].plot(run[STEP], run[column], thin, linewidth=0.7, alpha=0.5, color=looks[name]["color"])
        mean = means.query("env_id == @env_id and exp_name == @name")
        (lines[name],) = panel[env_id].plot(mean["steps"], mean[column], linewidth=1.5, marker="o", **looks[name])
    figure.set_figheight(figure.get_figheight() + 0.15 + 0.1 * len(lines))
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_family(family: pd.DataFrame, columns: list[str], label: str):
    """A map of every evaluated policy over time, mean over seeds. columns: one for each, named by its beta or k."""
    means = mean_curves(family, columns)
    figure, panel = panels(means["env_id"].unique(), "policy (beta or k)")
    policies = [float(name.rpartition("_")[2]) for name in columns]
    for env_id, here in means.groupby("env_id"):
        values = np.log10(here[columns]) if "log" in label else here[columns]
        colours = panel[env_id].pcolormesh(here["steps"], policies, values.T)
        figure.colorbar(colours, ax=panel[env_id], location="top", label=label)
    return figure


# The report


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    runs, evaluations, warnings = load(options.runs)
    sys.stderr.writelines(warnings)
    options.out.mkdir(parents=True, exist_ok=True)
    report = ["# Realistic Actor-Critic: report", HEAD, *warnings]

    def add(title: str, shown, text: str = "") -> None:
        """A section with a table that has rows, or with a figure that is written beside the report."""
        if isinstance(shown, pd.DataFrame):
            if shown.empty:
                return
            table = shown.convert_dtypes().astype(object)
            words = table.where(table.notna(), None).to_markdown(index=False, intfmt=",", floatfmt=",.2f", missingval="-")
        else:
            name = re.sub(r"\W+", "_", title).lower()
            for suffix in ("png", "pdf"):
                shown.savefig(options.out / f"{name}.{suffix}")
            plt.close(shown)
            words = f"![{title}]({name}.png)"
        report.extend([f"## {title}", words, text])

    def add_curves(title: str, drawn: pd.DataFrame, beside: pd.DataFrame) -> None:
        """Learning curves, and the value bias and best policy where there are any, beside published curves."""
        looks = dict(zip(drawn["exp_name"].unique(), LOOKS(), strict=False))
        looks |= dict(zip(beside["exp_name"].unique(), GREY_LOOKS(), strict=False))
        for column in drawn.dropna(axis=1, how="all").filter(CURVES):
            add(title + CURVES[column][0], draw_curves(pd.concat([drawn, beside]), column, looks), DRAWN)

    swept = tuple(f"{base}-{argument}_" for base, argument, *_ in SWEEPS.values())
    compared = evaluations[~evaluations["exp_name"].str.startswith(swept)]
    curves = published(options.published)
    curves["end"] = curves["env_id"].map(compared.groupby("env_id")[STEP].max())
    beside = curves.query("exp_name != @OTHER and global_step <= end")
    add("Final return", final_returns_beside_paper(compared), FINAL)
    add("Samples to reach a return", samples_to_return(compared), SAMPLES)
    add("Return beside published results", beside_published(compared, curves), BESIDE)
    scores, steps = scores_at_common_end(compared)
    table = intervals(scores, metrics.aggregate_iqm, options.bootstrap)
    add("Interquartile mean", table, f"Of returns over the paper's RAC-SAC return. {INTERVALS} {steps}.")
    ours = scores.pop("rac_sac", None)
    pairs = {f"rac_sac over {name}": (ours, theirs) for name, theirs in scores.items() if ours is not None}
    table = intervals(pairs, metrics.probability_of_improvement, options.bootstrap)
    add("Probability of improvement", table, f"{INTERVALS} {steps}.")
    add_curves("", compared, beside)
    for name, family in compared.groupby("exp_name"):
        for what, label in {"return": "return", "alpha": "log10 of alpha"}.items():
            columns = sorted(family.dropna(axis=1, how="all").filter(regex=rf"eval/{what}_\d"))
            if len(columns) > 1:
                add(f"{name}: {what} of each policy", draw_family(family, columns, label), FAMILY)
    for base, argument, *_ in SWEEPS.values():
        names = evaluations["exp_name"].str.removeprefix(f"{base}-{argument}_").replace(base, "default")
        members = evaluations.assign(exp_name=names)[names.ne(evaluations["exp_name"])]
        members = members[members.groupby("env_id")["exp_name"].transform("nunique") > 1]
        if len(members):
            title = f"Ablation of {base}, {argument}: "
            add(title + "final return", final_returns(members))
            add_curves(title, members, beside[:0])
    add("Runs", runs)
    path = options.out / "report.md"
    path.write_text("\n\n".join(report) + "\n", encoding="utf-8")
    print(f"{path}: {len(runs)} runs")


if __name__ == "__main__":
    main()
