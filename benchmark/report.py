"""Redraw the paper's tables and figures from run directories: report.md with figures as PNG and PDF, and one report.html.

    python benchmark/report.py runs/ --out report/
    python benchmark/report.py runs/ --out report/ --publish --entity TEAM --project PROJECT

Reads any number of run directories, unfinished ones too. What cannot be used is named in a warning, on the screen and in the
report. The paper's values are in benchmark/paper/, published curves in benchmark/published/; the report's parts in
benchmark/reporting/.
"""

import datetime
import re
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro
from experiments import SMOKE, SWEEPS, VARIANTS
from identity import parts_of
from job import UserError
from publish import publish
from reporting import figures, tables
from reporting.document import Document
from reporting.groups import Group, env_order, group_runs, shared_settings, sweep_groups
from reporting.references import last_step, paper_marks, paper_tables, published_curves
from reporting.runs import Warnings, find_runs
from reporting.scores import RETURN, at, family_frame, intervals, score_matrices

TITLE = "Realistic Actor-Critic: report"
REFERENCE = """The method and the paper's values are of Sicen Li, Gang Wang, Qinyun Tang and Liquan Wang, "Balancing Value
Underestimation and Overestimation with Realistic Actor-Critic", 2021, [arXiv:2110.09712](https://arxiv.org/abs/2110.09712); a
later version is "Realistic Actor-Critic: A framework for balance between value overestimation and underestimation", Frontiers in
Neurorobotics, [doi 10.3389/fnbot.2022.1081242](https://doi.org/10.3389/fnbot.2022.1081242)."""
WORDS = """Words: beta weighs the standard deviation of the ensemble of critics in the target, from optimistic (small) to
pessimistic (large), and tells the policies of a family apart; beta* is the one that was best in training. UTD is the
update-to-data ratio, critic updates per environment step. IQM is the interquartile mean, that of the middle half of all
runs' scores."""


@dataclass
class Options:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run directories, or folders that hold them at any depth
    out: Path = Path("report")  # the folder that the report is written into
    bootstrap: int = 2000  # bootstrap repetitions of the intervals
    published: tuple[str, ...] = ("SAC", "REDQ")  # algorithms of benchmark/published beside these runs; without a name: none
    note: str = ""  # a sentence to stand at the report's head
    publish: bool = False  # also make a Weights & Biases report of the tracked runs; its specification: wandb_report.json
    entity: str | None = None  # the Weights & Biases entity (team); by default that of the runs, else your own
    project: str | None = None  # the Weights & Biases project; by default that of the runs


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def build(options: Options, groups: list[Group], said: Warnings) -> Document:
    """The whole report; figures are written on the way."""
    document = Document(TITLE, options.out)
    sweeps = {sweep: found for sweep in SWEEPS if (found := sweep_groups(groups, sweep))}
    # Values of a sweep other than the default are in its panel only, unless another algorithm has the same value; whatever is in
    # no panel is in the main comparison.
    in_panels = {group.key for sweep, members in sweeps.items() for group in members if group.deviations(SWEEPS[sweep].base)}
    changed = {group.key: parts_of(group.exp_name)[1] for group in groups}
    compared = [changed[group.key] for group in groups if group.key not in in_panels]
    in_panels = {key for key in in_panels if not changed[key] or changed[key] not in compared}
    main = [group for group in groups if group.key not in in_panels]
    table1, table2 = paper_tables()
    scores, score_steps = score_matrices(main, table1, said)
    head(document, groups, options.note)
    if said.texts:
        document.heading("Warnings")
        document.text("\n".join(f"- {text}" for text in said.texts))
    document.heading("Final return (table 1 of the paper)")
    document.table(tables.final_return(main, table1))
    if in_panels:
        labels = dict.fromkeys(group.label for group in groups if group.key in in_panels)
        document.text(f"Only below, as ablations: {', '.join(labels)}.")
    document.heading("Samples to reach a return (table 2 of the paper)")
    document.table(tables.samples_to_return(main, table2), "The paper has no such values for these environments.")
    document.heading("Return beside published results")
    returns, ratios = tables.beside_published(main, options.published)
    document.table(returns, "There are no published curves of these environments in benchmark/published.")
    document.heading("Ratio to published REDQ")
    document.table(ratios, "No ratio to published REDQ: no run has come to one of these steps with the settings of its name.")
    document.heading("Aggregate scores")
    aggregate(document, options, scores, score_steps)
    document.heading("Learning curves")
    learning_curves(document, main, table1, options.published)
    document.heading("Normalised value bias")
    for column, text in (("mean", "mean"), ("std", "standard deviation")):
        document.figure(
            figures.draw_curves(main, f"eval/bias_{column}", f"{column} of bias"),
            f"bias_{column}",
            f"Normalised value bias (Q - return) / |mean return|, {text} over state-action pairs: mean ± std over seeds; "
            "dotted, where not all have it, every seed by itself.",
        )
    document.heading("The family of policies")
    families(document, main)
    document.heading("Ablations")
    ablations(document, sweeps)
    document.heading("The best policy on fresh episodes")
    document.table(
        tables.fresh_return(groups),
        "No run has an evaluate.csv of a step of its eval.csv; the former is what `python rac_sac.py --evaluate RUN` writes.",
    )
    document.heading("Speed")
    document.table(tables.speed(groups))
    document.heading("Runs")
    document.table(tables.all_runs(groups))
    return document


def head(document: Document, groups: list[Group], note: str) -> None:
    """What this is, of which runs and commits, with what settings, in which words."""
    runs = [run for group in groups for run in group.runs]
    labels, env_ids = (dict.fromkeys(getattr(group, name) for group in groups) for name in ("label", "env_id"))
    unfinished = sum(not run.finished for run in runs)
    commits = ", ".join(sorted({run.short_commit for run in runs}))
    document.text(
        f"{datetime.date.today()}: {count(len(runs), 'run')} of {count(len(labels), 'algorithm')} on "
        f"{', '.join(env_ids)}, {unfinished} unfinished; commits {commits}."
    )
    if note:
        document.text(note)
    shared = ", ".join(f"{name} {value}" for name, value in shared_settings(runs).items())
    if shared:
        document.text(f"Settings of all runs beside those of their algorithms: {shared}. They are in no label below.")
    if any(run.exp_name.startswith(SMOKE) for run in runs):
        document.text(
            "Runs called tiny have networks of a few units and some hundred steps: they show that the pipeline works, "
            "not how well an algorithm learns."
        )
    document.text(REFERENCE.replace("\n", " "))
    document.text(WORDS.replace("\n", " "))
    document.text("Each figure is also beside this file, as PNG and as PDF.")


def learning_curves(document: Document, groups: list[Group], paper: pd.DataFrame, names: tuple[str, ...]) -> None:
    """The best policy's return beside the paper's final values and published curves; the same of RAC-SAC's variants."""
    published, (marks, beyond) = published_curves(names), paper_marks(groups, paper)
    ends = {group.env_id: last_step(groups, group.env_id) for group in groups}
    caption = (
        "Average return of the best policy: mean ± sample standard deviation over seeds; dotted, where not all have come "
        "yet, every seed by itself; up to the last evaluation of the longest run."
    )
    if any(key[0] in ends for key in published):
        caption += " Grey: published means ± std over seeds (benchmark/published), one deterministic policy."
    if marks:
        caption += " Stars: the paper's final return ± its standard deviation, at its step, with its settings (environments -v3)."
    if beyond:
        caption += f" Beyond the axis are the paper's final returns of {', '.join(beyond)}."
    figure = figures.draw_curves(groups, RETURN, "average return", published=published, marks=marks, ends=ends)
    document.figure(figure, "learning_curves", caption)
    variants = [group for group in groups if parts_of(group.exp_name)[0] in ("rac_sac", "vanilla_rac", "rac_itm")]
    if len({group.label for group in variants}) > 1 and len(variants) < len(groups):
        order = list(dict.fromkeys(group.label for group in groups))
        figure = figures.draw_curves(variants, RETURN, "average return", order=order)
        document.figure(figure, "variants", "RAC-SAC against its variants.")


def aggregate(document: Document, options: Options, scores: dict, steps: dict[str, int]) -> None:
    """Interquartile mean and probability of improvement, with intervals (rliable)."""
    if not scores:
        document.text("None of these environments is in the paper's table 1.")
        return
    from rliable import metrics

    where = ", ".join(f"{env_id} at step {step:,}" for env_id, step in steps.items())
    document.text(
        f"Returns over the paper's RAC-SAC return, at the last step that all runs have ({where}); 95 % stratified "
        f"bootstrap intervals over seeds ({options.bootstrap} repetitions); one seed has no interval."
    )
    iqm = intervals(scores, metrics.aggregate_iqm, options.bootstrap)
    table = tables.aggregate(iqm, "algorithm", "IQM")
    table.frame.insert(1, "seeds", [len(scores[name]) for name in iqm])
    document.table(table)
    figure = figures.draw_intervals(iqm, "interquartile mean of normalised return")
    document.figure(figure, "iqm", f"Interquartile mean, 95 % intervals; {where}.")
    first = "RAC-SAC" if "RAC-SAC" in scores else next(iter(scores))
    pairs = {f"{first} over {name}": (scores[first], scores[name]) for name in scores if name != first}
    if not pairs:
        return
    better = intervals(pairs, metrics.probability_of_improvement, options.bootstrap)
    document.table(tables.aggregate(better, "probability of improvement", "P"))
    document.figure(
        figures.draw_intervals(better, "probability of improvement", True),
        "probability_of_improvement",
        f"Probability that a run of {first} beats one of another algorithm, 95 % intervals; {where}.",
    )


def families(document: Document, groups: list[Group]) -> None:
    """Return, best condition and temperature of every algorithm that has a family of policies."""
    found = defaultdict(list)
    for group in groups:
        frame = family_frame(group, "return")
        if min(frame.shape) > 1:  # a map needs two columns and two rows
            found[group.label].append(group)
        elif frame.shape[1] > 1:
            document.text(f"Not drawn: {group.label} on {group.env_id}, whose seeds do not have two evaluations in common.")
    if not found:
        document.text("No algorithm has more than one evaluated policy and two evaluations that all its seeds have.")
    for name, members in found.items():
        condition = members[0].condition
        slug = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")[:80]
        drawn = (
            (figures.draw_heat_map, f"return_per_{condition}", f"return per {condition} over time, mean over seeds"),
            (figures.draw_best_condition, f"best_{condition}", f"best {condition} over time"),
            (figures.draw_temperature, "temperature", f"learned temperature against {condition} at some steps"),
        )
        for draw, file, caption in drawn:
            figure = draw(members)
            if figure:
                document.figure(figure, f"{file}_{slug}", f"{name}: {caption}.")


def ablations(document: Document, sweeps: dict[str, list[Group]]) -> None:
    """Returns, and the bias where it was measured, of every ablation with at least two members."""
    for name, members in sweeps.items():
        caption = f"{VARIANTS[SWEEPS[name].base].label}, varied: {SWEEPS[name].symbol}"
        document.figure(figures.draw_curves(members, RETURN, "average return"), f"ablation_{name}", f"{caption}.")
        for column in ("mean", "std"):
            figure = figures.draw_curves(members, f"eval/bias_{column}", f"{column} of bias")
            if figure:
                document.figure(figure, f"ablation_{name}_bias_{column}", f"{caption}: {column} of bias, normalised.")
        rows = [
            {
                "environment": group.env_id,
                caption: group.label,
                "seeds": len(group.runs),
                "steps": tables.number(group.last),
                "return": tables.mean_std(at(group, group.last)),
            }
            for group in sorted(members, key=lambda group: env_order(group.env_id))
        ]
        document.table(tables.Table(pd.DataFrame(rows)))
    if sweeps:
        document.text(
            "The paper does not name the environments of its ablations; those here are the choice of whoever ran them "
            "(default: Walker2d-v4 and Humanoid-v4)."
        )
    else:
        document.text("No ablation has two members here.")


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    said = Warnings()
    try:
        if options.bootstrap < 1:
            raise UserError(f"bootstrap is {options.bootstrap}; it must be at least 1.")
        if str(options.out) in ("", "."):
            raise UserError("out is the current folder; give a folder of its own, which is made where it is not there.")
        groups = group_runs(find_runs(options.runs, said), said)
        if not groups:
            raise UserError("there is no run that can be reported on; give run directories with an eval.csv.")
        options.out.mkdir(parents=True, exist_ok=True)
        with figures.plt.rc_context(figures.STYLE), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            document = build(options, groups, said)
        document.write()
        used = sum(len(group.runs) for group in groups)
        print(f"{options.out / 'report.md'} and report.html: {count(used, 'run')}, {count(len(said.texts), 'warning')}")
        if options.publish:
            publish(document.tables, groups, options.out / "wandb_report.json", options.entity, options.project)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error.filename or options.out} cannot be written: {error.strerror}.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
