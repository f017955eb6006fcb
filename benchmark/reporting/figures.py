"""The report's figures."""

import math
import textwrap

import matplotlib
import numpy as np

from .groups import Group, by_label
from .scores import curve, family_frame

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Paul Tol's muted scheme, which those see apart who see few colours, and black: as many as `main` has algorithms
COLOURS = ("#332288", "#CC6677", "#117733", "#DDCC77", "#88CCEE", "#882255", "#44AA99", "#999933", "#AA4499", "#000000")
GREY = "#999999"
LINES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)))  # dotted lines have a meaning of their own
STYLE = {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "report",
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.08,
}
WIDTH = 30  # letters of a label before it is broken
LINES_OF_A_LABEL = 5  # before it is cut; tables have the whole name


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, max_lines=LINES_OF_A_LABEL, placeholder=" …")


def in_legend(label: str) -> str:
    """With a space before a _, without which matplotlib leaves it out of the legend."""
    return f" {label}" if label.startswith("_") else label


def seeds_of(groups: list[Group]) -> dict[str, str]:
    """Label -> "1 seed", "5 seeds", or "3 to 5 seeds" where environments differ."""
    words = {}
    for label, same in by_label(groups).items():
        counts = [len(group.runs) for group in same]
        fewest, most = min(counts), max(counts)
        words[label] = f"{fewest} to {most} seeds" if fewest < most else f"{most} seed{'' if most == 1 else 's'}"
    return words


def panels(env_ids: list[str], ylabel: str):
    """Axes, one per environment, titled, two or three in a row; what they show is said at the left edge alone."""
    columns = min(len(env_ids), 2 if len(env_ids) <= 4 else 3)
    rows = math.ceil(len(env_ids) / columns)
    figure = plt.figure(figsize=(max(3.6 * columns + 0.6, 5.5), 2.6 * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1, title=env_id) for i, env_id in enumerate(env_ids)]
    for ax in axes:
        ax.set_xlabel("environment steps")
        ax.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    for ax in axes[::columns]:
        ax.set_ylabel(ylabel)
    return figure, axes


def legend(figure, axes) -> None:
    """One legend below the panels, each entry once."""
    entries = {name: line for ax in axes for line, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    if entries:
        columns = max(1, min(len(entries), int(figure.get_figwidth() / 2.2)))
        names = [wrapped(name) for name in entries]
        lines = max(name.count("\n") + 1 for name in names) * math.ceil(len(entries) / columns)
        figure.set_figheight(figure.get_figheight() + 0.17 * lines)  # what the legend takes from the panels
        figure.legend(entries.values(), names, loc="outside lower center", ncols=columns)


def draw_curves(groups: list[Group], column: str, ylabel: str, order=None, published=None, marks=(), ends=None):
    """mean ± std over seeds in a panel for each environment; dotted, where not all have come yet, every seed. None without data.

    order: labels whose places give the colours, so that figures agree; published: (environment, algorithm) -> curve, thin
    lines; marks: (group, step, mean, std), stars in the group's colour; ends: the last step shown, by environment.
    """
    with_data = [group for group in groups if len(curve(group, column))]
    if not with_data:
        return None
    env_ids = list(dict.fromkeys(group.env_id for group in with_data))
    seeds = seeds_of(with_data)
    order = order or list(dict.fromkeys(group.label for group in with_data))
    figure, axes = panels(env_ids, ylabel)
    for group in with_data:
        ax, i = axes[env_ids.index(group.env_id)], order.index(group.label)
        look = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[(i // len(COLOURS) + i) % len(LINES)]}  # 40 looks
        stats = curve(group, column)
        whole = stats[stats["seeds"] == len(group.runs)]
        ax.plot(
            whole.index,
            whole["mean"],
            label=in_legend(f"{group.label} ({seeds[group.label]})"),
            marker="o" if len(whole) == 1 else None,
            markersize=3,
            **look,
        )
        low, high = whole["mean"] - whole["std"], whole["mean"] + whole["std"]  # nothing where there is one seed
        ax.fill_between(whole.index, low, high, color=look["color"], alpha=0.18, lw=0)
        begin = whole.index[-1] if len(whole) else 0
        for run in group.runs:
            alone = run.eval[column].dropna().loc[begin:] if column in run.eval else ()
            if len(alone) > 1:
                ax.plot(alone.index, alone, color=look["color"], linestyle=(0, (1, 2)), linewidth=1)
            elif len(alone) and not len(whole):
                ax.plot(alone.index, alone, ".", color=look["color"], markersize=4)
        for marked, step, mean, std in marks:
            if marked is group:
                ax.errorbar(step, mean, yerr=std, fmt="*", markersize=9, capsize=2, color=look["color"], clip_on=False)
    if marks:
        axes[0].plot([], [], "*", markersize=9, color="grey", label="the paper's final return, in the algorithm's colour")
    algorithms = list(dict.fromkeys(name for _, name in published or {}))
    for (env_id, name), lines in (published or {}).items():
        shown = lines[lines.index <= ends.get(env_id, -1)]
        if env_id in env_ids and len(shown):
            i = algorithms.index(name)
            shade = plt.get_cmap("Greys")(0.9 - 0.4 * i / max(1, len(algorithms) - 1))
            look = {"color": shade, "linestyle": LINES[i % len(LINES)], "linewidth": 0.8, "zorder": 1.5}
            ax, mean, std = axes[env_ids.index(env_id)], shown["mean_return"], shown["std_return"]
            ax.plot(shown.index, mean, label=f"{name}, published", marker="." if len(shown) == 1 else None, **look)
            ax.fill_between(shown.index, mean - std, mean + std, color=shade, alpha=0.08, lw=0)
    for env_id, ax in zip(env_ids, axes, strict=True):
        if ends:
            ax.set_xlim(0, ends[env_id] * 1.01)
    legend(figure, axes)
    return figure


def draw_heat_map(groups: list[Group]):
    """Return of every policy of the family over time; the brightest of a column is the best one."""
    figure, axes = panels([group.env_id for group in groups], groups[0].condition)
    for group, ax in zip(groups, axes, strict=True):
        frame = family_frame(group, "return")
        image = ax.pcolormesh(frame.index, frame.columns, frame.to_numpy().T, cmap="viridis", shading="nearest", rasterized=True)
        ax.grid(False)
        figure.colorbar(image, ax=ax, label="average return")
    return figure


def draw_best_condition(groups: list[Group]):
    """The best policy's condition over time: every seed thin, their mean thick. None where eval.csv does not tell it."""
    column = f"eval/best_{groups[0].condition}"
    groups = [group for group in groups if all(column in run.eval for run in group.runs)]
    if not groups:
        return None
    figure, axes = panels([group.env_id for group in groups], f"best {groups[0].condition}")
    for group, ax in zip(groups, axes, strict=True):
        for run in group.runs:
            ax.plot(run.eval.index, run.eval[column], color=GREY, linewidth=0.8, label="one seed")
        stats = curve(group, column)
        stats = stats[stats["seeds"] == len(group.runs)]
        ax.plot(stats.index, stats["mean"], color=COLOURS[0], label="mean over seeds")
        low, high = min(family_frame(group, "return").columns), max(family_frame(group, "return").columns)
        ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    legend(figure, axes)
    return figure


def draw_temperature(groups: list[Group]):
    """Temperature against the condition at up to five times of training, mean over seeds. None where it is not known."""
    groups = [group for group in groups if family_frame(group, "alpha").shape[1]]
    if not groups:
        return None
    figure, axes = panels([group.env_id for group in groups], "temperature alpha")
    for group, ax in zip(groups, axes, strict=True):
        frame = family_frame(group, "alpha")
        chosen = sorted({round(i) for i in np.linspace(0, len(frame) - 1, min(5, len(frame)))})
        for i, row in enumerate(chosen):
            ax.plot(
                frame.columns,
                frame.iloc[row],
                color=plt.get_cmap("viridis")(i / max(1, len(chosen) - 1) * 0.9),
                marker="o",
                markersize=2.5,
                label=f"step {frame.index[row]:,}",
            )
        ax.set_yscale("log")
        ax.set_xlabel(group.condition)
        ax.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_intervals(estimates: dict[str, tuple[float, float, float]], xlabel: str, probability: bool = False):
    """Point estimates with their intervals, one line each; probabilities on an axis from 0 to 1."""
    labels = [wrapped(name) for name in estimates]
    height = 0.25 * sum(label.count("\n") + 2 for label in labels) + 0.8
    figure, ax = plt.subplots(figsize=(6, height), layout="constrained")
    points, low, high = zip(*estimates.values(), strict=True)
    ax.hlines(range(len(points)), low, high, color=COLOURS[0], linewidth=6, alpha=0.35, capstyle="butt")
    ax.plot(points, range(len(points)), "|", color=COLOURS[0], markersize=14, markeredgewidth=2.5, clip_on=False)
    if probability:
        ax.axvline(0.5, color="black", linestyle=":", linewidth=1)
        ax.set_xlim(0, 1)
    ax.set_yticks(range(len(estimates)), labels)
    ax.set_ylim(len(estimates) - 0.5, -0.5)
    ax.set_xlabel(xlabel)
    return figure
