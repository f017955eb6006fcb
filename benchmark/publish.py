"""A Weights & Biases report of tracked runs: curves by algorithm and environment, the family of policies, the report's tables.

    python benchmark/publish.py report/wandb_report.json

`report.py --publish` builds the specification without login or network and writes it to disk; publishing it, then or later by
the command above, needs a key (`wandb login`).
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import tyro
from job import UserError
from reporting.document import write_whole
from reporting.groups import VERSION
from reporting.runs import columns_of_policies

TITLE = "Realistic Actor-Critic"
NOT_LOGGED = ("script", VERSION)  # of what tells groups apart, what Weights & Biases does not know of a run
CURVES = {
    "return of the best policy": ["eval/best_return"],
    "ensemble mean of Q": ["losses/qf_values"],
    "ensemble std of Q": ["losses/qf_std"],
    "steps per second": ["charts/SPS"],
}


def logged_of(group) -> dict:
    """By what Weights & Biases finds the runs of a group."""
    wanted = {"exp_name": group.exp_name, "env_id": group.env_id, **group.told_apart_by}
    return {name: value for name, value in wanted.items() if value is not None and name not in NOT_LOGGED}


def build_specification(tables: list, groups: list, entity: str, project: str):
    """The report as an object of wandb-workspaces that is not saved yet.

    tables: (heading, table as Markdown) in order; groups: those with tracked runs.
    """
    import wandb_workspaces.expr as expr
    import wandb_workspaces.reports.v2 as wr

    def run_set(group):
        # A run set that names its project makes wandb-workspaces ask the server for the project's number, which needs a
        # login. One without a project is of the report's own project: the same runs, and nothing to ask.
        filters = [expr.Config(name) == value for name, value in logged_of(group).items()]
        return wr.Runset(name=group.label, filters=filters, groupby=["config.exp_name"])

    def grid(groups: list, curves: dict):
        """A panel for each title and its metrics, three in a row of 24 columns: mean and std over the seeds of a run set."""
        panels = [
            wr.LinePlot(
                title=title,
                x="global_step",
                y=list(metrics),
                smoothing_factor=0,
                title_x="environment steps",
                groupby_aggfunc="mean",
                groupby_rangefunc="stddev",
                layout=wr.Layout(x=8 * (place % 3), y=6 * (place // 3), w=8, h=6),
            )
            for place, (title, metrics) in enumerate(curves.items())
        ]
        return wr.PanelGrid(runsets=[run_set(group) for group in groups], panels=panels)

    blocks = [wr.H1("Learning"), wr.TableOfContents()]
    for env_id, here in groupby(groups, lambda group: group.env_id):
        here = list(here)
        blocks += [wr.H2(env_id), grid(here, CURVES)]
        for group in here:
            columns, condition = group.runs[0].eval, group.condition
            family = {
                f"return per {condition}": columns_of_policies(columns, "return"),
                f"best {condition}": columns.filter([f"eval/best_{condition}"]),
                f"temperature per {condition}": columns_of_policies(columns, "alpha"),
            }
            if family[f"return per {condition}"].shape[1] > 1:
                found = {title: metrics for title, metrics in family.items() if not metrics.empty}
                blocks += [wr.H3(f"{group.label}: the family of policies"), grid([group], found)]
    blocks.append(wr.H1("Tables"))
    for heading, same in groupby(tables, lambda table: table[0]):
        blocks += [wr.H2(heading), *(wr.MarkdownBlock(markdown) for _, markdown in same)]
    commits = ", ".join(sorted({run.short_commit for group in groups for run in group.runs}))
    seeds = max(len(group.runs) for group in groups)
    seeds = "One seed" if seeds == 1 else f"Up to {seeds} seeds"
    description = f"{seeds} per algorithm and environment; commits {commits}."
    return wr.Report(project=project, entity=entity, title=TITLE, description=description, width="fluid", blocks=blocks)


def specification(report) -> dict:
    """What would be sent to Weights & Biases, as plain data."""
    return json.loads(report._to_model().model_dump_json(by_alias=True, exclude_none=True))


def publish(tables: list, groups: list, path: Path, entity: str | None, project: str | None) -> None:
    """Write the specification to `path`; then save the report online, or say why not."""
    tracked = [replace(group, runs=runs) for group in groups if (runs := [run for run in group.runs if run.tracked])]
    left_out = sum(not run.tracked for group in groups for run in group.runs)
    if not tracked:
        print("not published: none of these runs was tracked; train with --track", file=sys.stderr)
        return
    if left_out:
        was = "run was" if left_out == 1 else "runs were"
        print(f"warning: {left_out} {was} not tracked and not in the Weights & Biases report's panels", file=sys.stderr)
    if any(VERSION in group.told_apart_by for group in tracked):
        print("warning: panels may mix versions of a script, which Weights & Biases does not tell apart", file=sys.stderr)
    runs = [run for group in tracked for run in group.runs]
    of_runs = {name: {run.args.get(f"wandb_{name}") for run in runs} - {None, ""} for name in ("entity", "project_name")}
    project = project or min(of_runs["project_name"], default=None)
    if project is None:
        print("not published: these runs do not name their project; give --project", file=sys.stderr)
        return
    entity = entity or min(of_runs["entity"], default="")
    if others := of_runs["project_name"] - {project}:
        print(f"warning: runs of the projects {', '.join(sorted(others))} are not in a report of {project}", file=sys.stderr)
    values = {str(value) for group in tracked for value in logged_of(group).values()}
    if bad := sorted(value for value in values if {"'", "\\", "\n"} & set(value)):
        # wandb-workspaces writes filters as Python, in single quotes
        print(f"not published: {bad[0]!r}, a name or setting of a run, has a ' or \\ in it", file=sys.stderr)
        return
    report = build_specification(tables, tracked, entity, project)
    write_whole(path, json.dumps(specification(report), indent=2))
    upload(report, path)


def load(path: Path):
    """The report of a specification on disk. Raises UserError if it is none."""
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces.reports.v2 import internal

    try:
        saved = json.loads(path.read_text())
        report = wr.Report._from_model(internal.ReportViewspec.model_validate(saved))
        report.width = saved["spec"]["width"]  # which the library forgets
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no specification"
        raise UserError(f"{path} cannot be read ({reason}); give the wandb_report.json that report.py --publish wrote.") from None
    return report


def upload(report, path: Path) -> bool:
    """Save the report online, or say why not; path: where its specification is."""
    os.environ.setdefault("WANDB_HTTP_TIMEOUT", "20")
    import wandb

    try:
        if os.environ.get("WANDB_MODE", "online") != "online":
            raise ConnectionError(f"WANDB_MODE is {os.environ['WANDB_MODE']}")
        if not wandb.login(prompt=False, verify=False):
            raise ConnectionError("no API key; `wandb login` stores one")
        report.entity = report.entity or wandb.Api(timeout=20).default_entity
        report.save()
    except Exception as error:  # whatever the service answers, the specification is on disk
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        again = f"later: python benchmark/publish.py {path}"
        print(f"not published ({reason}); the report's specification is in {path}; {again}", file=sys.stderr)
        return False
    print(f"published: {report.url}")
    return True


@dataclass
class Options:
    specification: tyro.conf.Positional[Path]  # the wandb_report.json of a report
    entity: str | None = None  # another Weights & Biases entity (team) than the one it names
    project: str | None = None  # another Weights & Biases project than the one it names


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    try:
        report = load(options.specification)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    report.entity, report.project = options.entity or report.entity, options.project or report.project
    sys.exit(0 if upload(report, options.specification) else 1)


if __name__ == "__main__":
    main()
