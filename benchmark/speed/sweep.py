"""How the cost of a training step grows with UTD, ensemble size and batch size, one at a time, the others at the given sizes.

python benchmark/speed/sweep.py --out FOLDER --plot cost.png
"""

import dataclasses
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import tyro
from measure import Sizes, about, make_learner, matrix_rate, step_flop, table, time_block, words, write

SWEEP = {"utd": (1, 5, 10, 20), "num_critics": (2, 5, 10, 20), "batch_size": (256, 512, 1024)}


@dataclass
class Options(Sizes):
    script: str = "rac_sac"  # the script to time
    compile: bool = True  # torch.compile
    repeats: int = 5  # blocks of at least a second, of which the median is taken
    out: Path | None = None  # also write sweep.json and sweep.csv into this folder
    plot: Path | None = None  # also draw it into this PNG file


def measure(options: Options) -> dict[str, float]:
    """Milliseconds of the updates of a step, their FLOP and the ratio to the matrix floor."""
    _, _, learner = make_learner(options.script, options, options.compile)
    time_block(learner, 1)
    steps, flop = math.ceil(1 / time_block(learner, 2)), step_flop(learner)
    pairs = [(time_block(learner, steps), flop / matrix_rate(learner.device)) for _ in range(options.repeats)]
    return {"ms": 1e3 * statistics.median(s for s, _ in pairs), "gflop": flop / 1e9,
            "over_floor": statistics.median(s / floor for s, floor in pairs)}  # fmt: skip


def draw(rows: list[dict], options: Options, processor: str) -> None:
    """Three panels with logarithmic axes; the dashed line is proportional growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {"utd": "critic updates per environment step", "num_critics": "ensemble size N", "batch_size": "batch size"}
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        x, y = zip(*((row["value"], row["ms"]) for row in rows if row["varied"] == name), strict=True)
        axis.loglog(x, [y[-1] * value / x[-1] for value in x], "--", color="#999999", label="proportional")
        axis.loglog(x, y, "o-", color="#0072B2", label=options.script)
        axis.set(xlabel=label, xticks=x, xticklabels=x)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms per environment step")
    axes[0].legend(frameon=False)
    figure.suptitle(f"{options.env_id} sizes, {processor}", fontsize=10)
    figure.savefig(options.plot, dpi=150)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    machine, seen, rows = about(options.device()), {}, []
    for name, values in SWEEP.items():
        for value in values:
            sizes = dataclasses.replace(options, **{name: value})
            key = (sizes.utd, sizes.num_critics, sizes.batch_size)
            seen[key] = seen.get(key) or measure(sizes)
            rows.append({"varied": name, "value": value, **seen[key]})
    print(words(machine) + "\n")
    print(table(("varied", "value", "ms per environment step", "GFLOP", "x floor"),
                [(*list(row.values())[:4], f"{row['over_floor']:.2f}") for row in rows]))  # fmt: skip
    if options.out:
        write(options.out, "sweep", machine, options, rows)
    if options.plot:
        draw(rows, options, machine["processor"])


if __name__ == "__main__":
    main()
