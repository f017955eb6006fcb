"""A Weights & Biases report of tracked runs: curves by algorithm and environment, the family of policies, report.md's tables.

    python benchmark/publish.py --entity TEAM
    python benchmark/publish.py --entity TEAM --env-ids Hopper-v4 Ant-v4 --report report/report.md --draft

The runs of the project are found by their env_id and grouped by their exp_name. Only those that were trained with --track are
there; those that were tracked offline come with `wandb sync RUN/wandb/offline-run-*`. It needs a key, which `wandb login` stores.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
import wandb_workspaces.reports.v2 as wr

PANELS = {
    "return of the best policy": {"y": ["eval/best_return"]},
    "ensemble mean of Q": {"y": ["losses/qf_values"]},
    "ensemble standard deviation of Q": {"y": ["losses/qf_std"]},
    "steps per second": {"y": ["charts/SPS"]},
}
FAMILY = {
    "return of each policy": {"metric_regex": "eval/return_.*"},
    "best beta, or k": {"metric_regex": "eval/best_(beta|k)"},
    "temperature of each policy": {"metric_regex": "eval/alpha_.*"},
}


@dataclass
class Options:
    entity: str  # the Weights & Biases entity (team)
    project: str = "realistic-actor-critic"  # the project of the runs, and of the report
    env_ids: tuple[str, ...] = ("Humanoid-v4", "Ant-v4", "Walker2d-v4", "Hopper-v4")  # a section each
    report: Path | None = None  # the report.md of report.py, whose tables are shown too
    draft: bool = False  # save it as a draft


def grid(env_id: str, panels: dict[str, dict]) -> wr.PanelGrid:
    """Line plots of an environment's runs, three in a row: mean and standard deviation over the seeds of each exp_name.

    panels: title -> arguments of wr.LinePlot that say which metrics it shows.
    """
    plots = []
    for title, metrics in panels.items():
        row, column = divmod(len(plots), 3)
        plot = wr.LinePlot(
            title=title,
            layout=wr.Layout(x=8 * column, y=6 * row, w=8, h=6),
            x="global_step",
            smoothing_factor=0,
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
            **metrics,
        )
        plots.append(plot)
    # Without a project it is the report's own, and nothing has to be asked of the server.
    runs = wr.Runset(name=env_id, filters=f"Config('env_id') == '{env_id}'", groupby=["config.exp_name"])
    return wr.PanelGrid(runsets=[runs], panels=plots)


def tables(markdown: str) -> list:
    """Blocks of those sections of a report.md that have a table, without their figures."""
    blocks = []
    for section in markdown.split("\n## ")[1:]:
        if "\n|" in section:
            title, *lines = section.splitlines()
            text = "\n".join(line for line in lines if not line.startswith("!["))
            blocks += [wr.H2(title), wr.MarkdownBlock(text)]
    return blocks


def build(options: Options) -> wr.Report:
    """The report, not saved yet; needs no network."""
    blocks = [wr.TableOfContents()]
    for env_id in options.env_ids:
        blocks += [wr.H1(env_id), grid(env_id, PANELS), wr.H2("The family of policies"), grid(env_id, FAMILY)]
    if options.report:
        blocks += [wr.H1("Tables"), *tables(options.report.read_text(encoding="utf-8"))]
    return wr.Report(options.project, options.entity, title="Realistic Actor-Critic", width="fluid", blocks=blocks)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.report and not options.report.is_file():
        sys.exit(f"error: {options.report} does not exist; give the report.md that report.py wrote.")
    report = build(options)
    try:
        report.save(draft=options.draft)
    except Exception as error:  # whatever the server, the network or the login says
        sys.exit(f"error: not published: {error}; `wandb login` stores a key, and the same command tries again.")
    print(f"published: {report.url}")


if __name__ == "__main__":
    main()
