"""Prints the table of two_details.md: mean best return from step 10,000 on, by seed, of three variants of rac_sac.py."""

from pathlib import Path

import pandas as pd

RUNS = Path(__file__).parent.parent / "two_details"
BASE = "rac_sac"

scores: dict[str, dict[int, float]] = {}
for path in sorted(RUNS.glob("*/eval.csv")):
    _, variant, seed = path.parent.name.split("__")
    returns = pd.read_csv(path, index_col="global_step")["eval/best_return"]
    scores.setdefault(variant, {})[int(seed)] = returns.loc[10_000:].mean()

table = pd.DataFrame(scores)[[BASE, *sorted(set(scores) - {BASE})]]  # a row for each seed
summary = pd.DataFrame({"mean": table.mean(), "std": table.std()}).T
print(pd.concat([table, summary]).to_markdown(floatfmt=".0f"))
for variant in table.columns.drop(BASE):
    pair = table[[BASE, variant]].dropna()  # the seeds that both have
    difference = pair[variant].mean() - pair[BASE].mean()
    standard_error = (pair.var() / pair.count()).sum() ** 0.5
    print(f"{variant} - {BASE}: {difference:.0f}, standard error {standard_error:.0f}, {len(pair)} seeds")
