"""Prints the returns of two_details.md, the mean best return from step 10,000 on by seed and variant, and their differences."""

from pathlib import Path

import pandas as pd

RUNS = Path(__file__).parent.parent / "two_details"
NEITHER, BIASES, BOUND, BOTH = "rac_sac", "actor_default_biases", "bounded_log_prob", "both_details"

scores: dict[str, dict[int, float]] = {}
for path in sorted(RUNS.glob("*/eval.csv")):
    _, variant, seed = path.parent.name.split("__")
    returns = pd.read_csv(path, index_col="global_step")["eval/best_return"]
    scores.setdefault(variant, {})[int(seed)] = returns.loc[10_000:].mean()

table = pd.DataFrame({variant: scores[variant] for variant in (NEITHER, BIASES, BOUND, BOTH) if variant in scores})
summary = pd.DataFrame({"mean": table.mean(), "std": table.std(), "seeds": table.count()}).T
print(pd.concat([table.sort_index(), summary]).to_markdown(floatfmt=".0f"))


def show(what: str, weights: dict[str, float]) -> None:
    """A weighted sum of the variants' means, its standard error, and their ratio."""
    difference = sum(weight * table[variant].mean() for variant, weight in weights.items())
    error = sum(weight**2 * table[variant].var() / table[variant].count() for variant, weight in weights.items()) ** 0.5
    print(f"{what}: {difference:.0f}, standard error {error:.0f}, ratio {difference / error:.1f}")


print()
for variant in table.columns.drop(NEITHER):
    show(f"{variant} - {NEITHER}", {variant: 1, NEITHER: -1})
if BOTH in table:
    show("biases, with and without the bound", {BIASES: 0.5, BOTH: 0.5, NEITHER: -0.5, BOUND: -0.5})
    show("the bound, with and without the biases", {BOUND: 0.5, BOTH: 0.5, NEITHER: -0.5, BIASES: -0.5})
