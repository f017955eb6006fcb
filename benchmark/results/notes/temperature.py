"""Draws temperature.png: the temperature learned on Ant-v4, seed 3, against beta, as the update ran away and afterwards."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
STEPS = (8600, 8800, 21000, 33334)

frame = pd.read_csv(HERE.parent / "temperature_by_beta.csv")
frame = frame[frame["run"] == "Ant-v4__rac_sac__3"]
figure, axes = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
for step, style in zip(STEPS, ("-", "--", "-.", ":"), strict=True):
    rows = frame[frame["step"] == step].sort_values("beta")
    axes.loglog(rows["beta"], rows["alpha"], style, label=f"{step:,} steps")
axes.axvspan(0.0667, 0.8, color="0.9", zorder=0, label="betas that are evaluated")
axes.set(xlabel="beta", ylabel="temperature")
axes.legend(frameon=False)
figure.savefig(HERE / "temperature.png", dpi=120)
