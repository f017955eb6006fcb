"""benchmark/report.py by its command line, on run directories with known numbers."""

import base64
import csv
import functools
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro
from conftest import ROOT, environment

pytest.importorskip("rliable", reason="benchmark/requirements.txt is not installed")
sys.path.insert(0, str(ROOT / "benchmark"))
import experiments
import identity
import publish
import report as program
from reporting import figures, references, runs
from reporting import groups as grouping

pytestmark = pytest.mark.benchmark
BETAS = tuple(f"{0.8 * i / 12:.6g}" for i in range(1, 13))
CONDITION = {"rac_itm": "k"}


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@functools.cache
def arguments_of(script: str, exp_name: str, env_id: str) -> dict:
    """All arguments that a run of this experiment name has in its config.json; the defaults for an unknown name."""
    try:
        flags = experiments.variant(identity.parts_of(exp_name)[0], env_id)[1].split()
    except KeyError:
        flags = []
    known = any((folder / f"{script}.py").exists() for folder in (ROOT, ROOT / "benchmark"))
    module = importlib.import_module(script if known else "rac_sac")
    args = module.check_args(tyro.cli(module.Args, args=["--env-id", env_id, *flags]))
    if getattr(args, "target_entropy", 0.0) is None:
        args.target_entropy = -float({"Humanoid": 17, "Ant": 8, "Walker2d": 6, "Hopper": 3}[experiments.short_name(env_id)])
    return vars(args)


def make_run(
    root: Path,
    exp_name: str,
    env_id: str,
    seed: int,
    returns: dict[int, float],
    script="rac_sac",
    bias=False,
    total=None,
    tracked=False,
    fresh=None,
    sha256="a",
    **arguments,
) -> Path:
    """A run directory whose best return at each step is given; the other policies get half of it."""
    name = f"{env_id}__{exp_name}__{seed}".replace("/", "_")
    path, condition = root / name, CONDITION.get(script, "beta")
    path.mkdir(parents=True)
    args = {
        **arguments_of(script, exp_name, env_id),
        "exp_name": exp_name,
        "env_id": env_id,
        "seed": seed,
        "total_timesteps": total or max(returns),
        "wandb_project_name": "project",
        "wandb_entity": "team",
    }
    for name, value in arguments.items():
        args.update({name: value, **({f"eval_{condition}_max": value} if name == f"train_{condition}_max" else {})})
    largest = args["beta"] if script == "vanilla_rac" else args.get(f"eval_{condition}_max", 0.8)
    betas = [f"{largest:.6g}"] if script == "vanilla_rac" else [f"{largest * i / 12:.6g}" for i in range(1, 13)]
    config = {
        "script": script,
        "script_sha256": sha256,
        "args": args,
        "git_commit": "0123456789abcdef-dirty",
        "device": "a machine",
    }
    (path / "config.json").write_text(json.dumps(config))
    rows = []
    for step, best in returns.items():
        row = {"best_return": best, "best_return_std": 1, f"best_{condition}": betas[-1]}
        row |= {f"return_{b}": best if b == betas[-1] else best / 2 for b in betas}
        row |= {} if script == "rac_td3" else {f"alpha_{b}": 1 / step for b in betas}
        rows.append({"global_step": step, "charts/wall_seconds": step / 10, **{f"eval/{k}": v for k, v in row.items()}})
    write_csv(path / "eval.csv", rows)
    if bias:
        measured = {"eval/bias_mean": seed, "eval/bias_std": 2 * seed}
        write_csv(path / "bias.csv", [{"global_step": step, **measured} for step in returns])
    row = {"charts/SPS": 5, "losses/qf_loss": ""}
    write_csv(path / "train.csv", [{"global_step": step + 7000, "charts/wall_seconds": step, **row} for step in returns])
    if fresh is not None:
        values = [{"global_step": max(returns), condition: b, "return": fresh, "return_std": 1} for b in betas]
        write_csv(
            path / "evaluate.csv", [v | {"best_in_training": int(b == betas[-1])} for v, b in zip(values, betas, strict=True)]
        )
    if tracked:
        (path / "wandb_id").write_text("0123abcd")
    return path


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """report(*arguments) runs report.py in an empty folder and returns stdout, stderr and report.md."""

    def run(*arguments, code: int = 0) -> tuple[str, str, str]:
        monkeypatch.chdir(tmp_path)
        command = ["report.py", *map(str, arguments), "--out", "out", "--bootstrap", "50"]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        ended = 0
        try:
            program.main()
        except SystemExit as error:
            ended = error.code
        out, err = capsys.readouterr()
        assert ended == code, out + err
        path = tmp_path / "out/report.md"
        return out, err, path.read_text() if path.exists() else ""

    return run


def start(folder: Path, name: str, *arguments, code: int = 0, **changes: str) -> tuple[str, str]:
    """stdout and stderr of a program of benchmark/ in a process of its own, without key for Weights & Biases."""
    command = [sys.executable, str(ROOT / "benchmark" / name), *map(str, arguments)]
    env = environment(HOME=str(folder), **changes)
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout, result.stderr


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a Markdown file, each a list of rows."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        cells = [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in block.splitlines()]
        found.append([dict(zip(cells[0], row, strict=True)) for row in cells[2:]])
    return found


def test_numbers(tmp_path, report):
    root, seeds = tmp_path / "runs", (1, 2, 3, 4)
    ours = {"Ant-v4": [900, 1000, 1300, 1400], "Walker2d-v4": [10, 20, 30, 40]}  # at the last step, by seed
    redq = {"Ant-v4": [1350, 800, 700, 600], "Walker2d-v4": [25, 15, 5, 1]}
    for env_id in ours:
        for seed in seeds:
            last, first = ours[env_id][seed - 1], 1100 if seed < 3 else 100  # the mean crosses 1000 only at 3000
            make_run(root, "rac_sac", env_id, seed, {1000: 0, 2000: first, 3000: last}, fresh=last - 50)
            make_run(root, "redq", env_id, seed, {1000: 0, 2000: 0, 3000: redq[env_id][seed - 1]}, script="vanilla_rac")
    out, err, text = report("runs")
    assert "16 runs, 0 warnings" in out and err == ""
    found = tables(text)

    row = next(r for r in found[0] if r["environment"] == "Ant-v4" and r["algorithm"] == "RAC-SAC")
    mean, std = np.mean(ours["Ant-v4"]), np.std(ours["Ant-v4"], ddof=1)
    assert row["return"] == f"{mean:,.0f} ± {std:,.0f}" and (row["seeds"], row["steps"]) == ("4", "3,000")
    assert (row["paper"], row["paper's steps"], row["difference"]) == ("6,283 ± 549", "300,000", "—")  # at another step
    only = [r["algorithm"] for r in found[0] if r["environment"] == "Ant-v4"][2:]
    assert only == [f"{name} (paper only)" for name in ("RAC-TD3", "MBPO", "TQC20", "TD3", "SAC", "TQC")]

    ant = {r["return"]: r for r in found[1] if r["environment"] == "Ant-v4"}
    assert ant["1,000"]["RAC-SAC"] == "3,000 (paper 21,000)" and ant["1,000"]["REDQ"] == "not by 3,000 (paper 28,000)"
    assert ant["6,000"]["RAC-SAC"] == "not by 3,000 (paper 248,000)" and ant["6,000"]["REDQ"] == "not by 3,000"
    assert ant["1,000"]["TQC (paper only)"] == "185,000"
    walker = next(r for r in found[1] if r["environment"] == "Walker2d-v4" and r["return"] == "3,000")
    assert walker["TQC (paper only)"] == "270,000 ‡" and "‡ as printed in the paper" in text

    def normalised(returns):
        return np.array([returns["Ant-v4"], returns["Walker2d-v4"]]) / np.array([[6283], [5860]])

    iqm = {r["algorithm"]: r for r in next(t for t in found if "IQM" in t[0])}
    for name, returns in (("RAC-SAC", ours), ("REDQ", redq)):
        middle = np.sort(normalised(returns).ravel())[2:6].mean()  # 8 scores: without the two lowest and the two highest
        assert iqm[name]["IQM"] == f"{middle:.3f}" and iqm[name]["seeds"] == "4"
        assert float(iqm[name]["low"]) < middle < float(iqm[name]["high"])
    wins = [np.mean([(a > b) + 0.5 * (a == b) for a in ours[env_id] for b in redq[env_id]]) for env_id in ours]
    (pair,) = next(t for t in found if "probability of improvement" in t[0])
    assert (pair["probability of improvement"], pair["P"]) == ("RAC-SAC over REDQ", f"{np.mean(wins):.3f}")
    assert "(Ant-v4 at step 3,000, Walker2d-v4 at step 3,000)" in text and report("runs")[2] == text

    fresh = next(t for t in found if "beta*'s return on fresh episodes" in t[0])
    assert fresh[0]["difference"] == "-50" and fresh[0]["beta*'s return on fresh episodes"].startswith(f"{mean - 50:,.0f}")
    assert {r["commit"] for r in next(t for t in found if "commit" in t[0])} == {"0123456789ab-dirty"}
    speed = next(t for t in found if "steps per second while learning" in t[0])
    assert speed[0]["steps per second while learning"] == "5.0" and speed[0]["device"] == "a machine"


def published_rows(env_id: str, algorithm: str) -> dict[int, tuple[float, float]]:
    """step -> (mean, std) of benchmark/published."""
    with open(ROOT / "benchmark/published/gym_v4_curves.csv") as file:
        return {
            int(row["env_steps"]): (float(row["mean_return"]), float(row["std_return"]))
            for row in csv.DictReader(file)
            if (row["env_id"], row["algorithm"]) == (env_id, algorithm)
        }


def test_seeds_without_a_common_step(tmp_path, report):
    """Somebody's own script may evaluate when it likes."""
    for seed, steps in ((1, (100, 300)), (2, (200, 400))):
        make_run(tmp_path / "runs", "mine", "Hopper-v4", seed, {step: 7 for step in steps}, fresh=5 + seed)
    _, _, text = report("runs")
    assert "2 runs of 1 algorithm" in text
    fresh = next(t for t in tables(text) if "beta*'s return on fresh episodes" in t[0])
    assert [(row["step"], row["seeds"], row["beta*'s return on fresh episodes"]) for row in fresh] == [
        ("300", "1", "6.0"),
        ("400", "1", "7.0"),
    ]


def test_seeds_that_end_at_different_steps(tmp_path, report):
    """The return is that of the last step that all have, and its cell says where the others end."""
    for seed, end in ((1, 300), (2, 500), (3, 500)):
        make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", seed, {step: step for step in range(100, end + 1, 100)})
    row = tables(report("runs")[2])[0][0]
    assert (row["return"], row["steps"]) == ("300 ± 0", "300 (seeds end at 300, 500)")


def test_beside_published_results(tmp_path, report):
    root, redq = tmp_path / "runs", published_rows("Hopper-v4", "REDQ (UTD 20)")
    for seed in (1, 2):
        curve = {step: step / 10 + seed for step in range(5000, 50_001, 1000)}
        make_run(root, "rac_sac", "Hopper-v4", seed, curve, fresh=4000 + seed)
        make_run(root, "rac_sac+tau_0.1", "Hopper-v4", seed, {16_666: 7, 20_000: 7}, tau=0.1)
        make_run(root, "mine", "Hopper-v4", seed, {16_000: 8, 16_100: 9, **({17_000: 9} if seed == 1 else {})})
    make_run(root, "rac_sac", "Hopper-v5", 1, {16_000: 8})
    _, _, text = report("runs", "--published", "REDQ", "XQC")
    returns, ratios = (t for t in tables(text) if "16,666" in t[0])
    rows = {(r["algorithm"], r["policy"]): r for r in returns}
    assert {r["environment"] for r in returns} == {"Hopper-v4"} and len(rows) == 6
    steps = ("16,666", "33,332", "50,000", "100,000", "300,000")
    ours, fresh = rows["RAC-SAC", "best"], rows["RAC-SAC", "beta* on fresh episodes"]
    spread = np.std([1, 2], ddof=1)  # evaluations at 16 000, 33 000 and 50 000; none at 100 000, after the end
    assert [ours[step] for step in steps] == [*(f"{v + 1.5:,.0f} ± {spread:.0f}" for v in (1600, 3300, 5000)), "—", "—"]
    assert [fresh[step] for step in steps] == ["—", "—", f"4,002 ± {spread:.0f}", "—", "—"]
    assert [rows["RAC-SAC (tau 0.1)", "best"][step] for step in steps[:2]] == ["7.0 ± 0.0", "—"]
    assert rows["mine", "best"]["16,666"] == "9.0 (1 of 2)"  # 16 100 is five intervals back for the seed that ends there
    theirs = rows["REDQ (UTD 20), published", "its one policy"]
    used = (16_666, 33_332, 49_998, 99_996, 299_988)
    assert [theirs[step] for step in steps] == [f"{redq[step][0]:,.0f} ± {redq[step][1]:,.0f}" for step in used]
    xqc = published_rows("Hopper-v4", "XQC")
    assert rows["XQC, published", "its one policy"]["33,332"] == "—"  # its first evaluation is at 50 000
    assert rows["XQC, published", "its one policy"]["50,000"] == f"{xqc[50_000][0]:,.0f} ± {xqc[50_000][1]:,.0f}"
    assert "RAC-SAC: 16,000 for 16,666, 33,000 for 33,332; " in text and "49,998 for 50,000" in text

    ratio = {(r["algorithm"], r["policy"]): r for r in ratios}
    expected = [f"{mean / redq[step][0]:.2f}" for mean, step in ((1601.5, 16_666), (3301.5, 33_332), (5001.5, 49_998))]
    assert [ratio["RAC-SAC", "best"][step] for step in steps] == [*expected, "—", "—"]
    assert ratio["RAC-SAC", "beta* on fresh episodes"]["50,000"] == f"{4001.5 / redq[49_998][0]:.2f}"
    assert ratio["XQC, published", "its one policy"]["300,000"] == f"{xqc[300_000][0] / redq[299_988][0]:.2f}"
    assert ratio["REDQ (UTD 20), published", "its one policy"]["16,666"] == "1.00"
    assert ("RAC-SAC (tau 0.1)", "best") not in ratio  # other settings than those compared with

    _, _, text = report("runs", "--published")
    assert not any("published" in r["algorithm"] for t in tables(text) if "algorithm" in t[0] for r in t)


def test_a_difference_only_at_the_papers_step_and_settings(tmp_path, report):
    root = tmp_path / "runs"
    make_run(root, "rac_sac", "Ant-v4", 1, {5000: 1, 300_000: 6000})
    make_run(root, "rac_td3", "Ant-v4", 1, {5000: 1, 300_000: 6000}, script="rac_td3", tau=0.1)
    make_run(root, "rac_sac", "Ant-v5", 1, {5000: 1, 300_000: 6000})
    rows = tables(report("runs")[2])[0]
    assert [r["difference"] for r in rows if r["return"] == "6,000"] == [f"{6000 - 6283:+}", "—", "—"]


def test_lines_and_marks_in_the_learning_curves(tmp_path):
    make_run(tmp_path, "rac_sac", "Hopper-v4", 1, {5000: 10, 300_000: 20})
    make_run(tmp_path, "sac", "Hopper-v4", 1, {5000: 10, 6000: 20}, script="baselines")
    groups = grouping.group_runs(runs.find_runs([tmp_path], said := runs.Warnings()), said)
    marks, beyond = references.paper_marks(groups, references.paper_tables()[0])
    assert [(group.exp_name, *mark) for group, *mark in marks] == [("rac_sac", 300_000, 3421, 483)]
    assert beyond == ["SAC on Hopper-v4 at 3,000,000"]
    published = references.published_curves(("SAC", "REDQ"))
    ends = {"Hopper-v4": references.last_step(groups, "Hopper-v4")}
    figure = figures.draw_curves(groups, "eval/best_return", "return", published=published, marks=marks, ends=ends)
    (ax,) = figure.axes
    lines = {line.get_label(): line for line in ax.lines}
    redq = {step: mean for step, (mean, _) in published_rows("Hopper-v4", "REDQ (UTD 20)").items() if step <= 300_000}
    assert [tuple(xy) for xy in lines["REDQ (UTD 20), published"].get_xydata()] == list(redq.items())
    assert "SAC, published" in lines
    assert lines["REDQ (UTD 20), published"].get_linewidth() < lines["RAC-SAC (1 seed)"].get_linewidth()
    (star,) = [line for line in ax.lines if line.get_marker() == "*" and len(line.get_xdata())]
    assert star.get_xydata().tolist() == [[300_000, 3421]] and star.get_color() == lines["RAC-SAC (1 seed)"].get_color()
    assert ax.get_xlim() == (0, 303_000)
    figures.plt.close(figure)


def test_young_runs_fill_the_axis(tmp_path):
    """And the legend names only what is drawn."""
    make_run(tmp_path, "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20}, total=300_000)
    groups = grouping.group_runs(runs.find_runs([tmp_path], said := runs.Warnings()), said)
    ends = {"Hopper-v4": references.last_step(groups, "Hopper-v4")}
    published = references.published_curves(("REDQ", "XQC"))
    figure = figures.draw_curves(groups, "eval/best_return", "return", published=published, ends=ends)
    (ax,) = figure.axes
    assert ax.get_xlim() == (0, 6060)
    named = {line.get_label() for line in ax.lines}
    assert "XQC, published" not in named  # it begins at 50 000
    assert references.paper_marks(groups, references.paper_tables()[0]) == ([], ["RAC-SAC on Hopper-v4 at 300,000"])
    figures.plt.close(figure)


def test_where_not_all_seeds_have_come_each_is_drawn_by_itself(tmp_path):
    make_run(tmp_path, "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20})
    make_run(tmp_path, "rac_sac", "Hopper-v4", 2, {5000: 30, 6000: 40, 6500: 70, 7000: 80})
    make_run(tmp_path, "rac_sac", "Hopper-v4", 3, {5000: 50, 6000: 60, 7000: 100})
    groups = grouping.group_runs(runs.find_runs([tmp_path], said := runs.Warnings()), said)
    figure = figures.draw_curves(groups, "eval/best_return", "return")
    mean, *alone = [line.get_xydata().tolist() for line in figure.axes[0].lines]
    assert mean == [[5000, 30], [6000, 40]]
    assert alone == [[[6000, 40], [6500, 70], [7000, 80]], [[6000, 60], [7000, 100]]]
    figures.plt.close(figure)


def test_algorithms_of_main_look_different(tmp_path):
    for name in experiments.EXPERIMENTS["main"].variants:
        script = experiments.VARIANTS[name].script.split("/")[-1].removesuffix(".py")
        make_run(tmp_path, name, "Hopper-v4", 1, {5000: 10, 6000: 20}, script=script)
    groups = grouping.group_runs(runs.find_runs([tmp_path], said := runs.Warnings()), said)
    figure = figures.draw_curves(groups, "eval/best_return", "return")
    (ax,) = figure.axes
    colours = [line.get_color() for line in ax.lines]
    assert len(colours) == len(set(colours)) == 10
    figures.plt.close(figure)


def test_a_long_name_leaves_room_for_the_curves(tmp_path):
    """It is cut in the legend; the figure is about as tall as without it."""
    heights = []
    for name in ("mine", 36 * "long-"):
        make_run(tmp_path / name[:4], name, "Hopper-v4", 1, {5000: 10, 6000: 20})
        groups = grouping.group_runs(runs.find_runs([tmp_path / name[:4]], said := runs.Warnings()), said)
        figure = figures.draw_curves(groups, "eval/best_return", "return")
        heights.append(figure.get_figheight())
        assert figure.get_figwidth() == 5.5
        figures.plt.close(figure)
    assert heights[1] < heights[0] + 1


def test_a_hidden_run_and_a_script_under_no_commit(tmp_path, report):
    path = make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "git_commit": None, "script_sha256": "0123456789abcdef"}))
    path.rename(path.with_name(".hid"))
    out, _, text = report("runs")
    assert "1 run, 0 warnings" in out
    assert "commits none (script 0123456789ab)" in text


def test_defaults_are_those_of_the_script_that_a_run_has_kept(tmp_path, report):
    """A default that has changed since does not give an old run another name."""
    path = make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20}, tau=0.1)
    make_run(tmp_path / "runs", "rac_td3", "Hopper-v4", 1, {5000: 10, 6000: 20}, script="rac_td3")
    assert "RAC-SAC [tau 0.1]" in report("runs")[2]
    source = (ROOT / "rac_sac.py").read_text()
    (path / "rac_sac.py").write_text(source.replace("    tau: Share = 0.005", "    tau: Share = 0.1"))
    _, _, text = report("runs")
    assert "[tau 0.1]" not in text
    assert "| RAC-SAC " in text


def test_an_edited_default_is_named_and_compared_with_nobody(tmp_path, report):
    """It keeps the name of the script that it was edited in."""
    path = make_run(tmp_path / "runs", "rac_sac", "Ant-v4", 1, {5000: 10, 16_666: 20, 300_000: 6000}, tau=0.1)
    source = (ROOT / "rac_sac.py").read_text()
    (path / "rac_sac.py").write_text(source.replace("    tau: Share = 0.005", "    tau: Share = 0.1"))
    _, err, text = report("runs")
    assert f"the rac_sac.py of {path.relative_to(tmp_path)} has other defaults than today's (tau 0.1): no difference" in err
    final, *_ = tables(text)
    assert (final[0]["algorithm"], final[0]["return"], final[0]["difference"]) == ("RAC-SAC", "6,000", "—")
    assert "RAC-SAC" not in with_a_ratio(text)
    make_run(tmp_path / "runs", "rac_sac", "Ant-v4", 2, {5000: 10, 16_666: 20})
    assert "RAC-SAC" in with_a_ratio(report("runs")[2])  # beside it those of today's have one


def with_a_ratio(text: str) -> set[str]:
    """The algorithms that a report gives a ratio to published REDQ at 16,666 steps."""
    _, ratios = (table for table in tables(text) if "16,666" in table[0])
    return {row["algorithm"] for row in ratios}


def test_another_environment_of_the_same_name_is_not_the_papers(tmp_path, report):
    """A module or namespace tells them apart."""
    for env_id in ("Hopper-v4", "my_module:Hopper-v0", "lab/Hopper-v4"):
        for name in ("mine", "other"):
            make_run(tmp_path / "runs", name, env_id, 1, {1000: 5})
        make_run(tmp_path / "runs", "rac_sac", env_id, 1, {1000: 5, 300_000: 6})
    groups = grouping.group_runs(runs.find_runs([tmp_path], said := runs.Warnings()), said)
    marks, _ = references.paper_marks(groups, references.paper_tables()[0])
    assert [(group.env_id, group.label) for group, *_ in marks] == [("Hopper-v4", "RAC-SAC")]
    _, _, text = report("runs")
    final, samples, *_ = tables(text)
    assert {row["environment"] for row in final} == {"Hopper-v4", "my_module:Hopper-v0", "lab/Hopper-v4"}
    assert {row["environment"] for row in final if row["paper"] != "—"} == {"Hopper-v4"}
    assert {row["environment"] for row in samples} == {"Hopper-v4"}
    assert "at the last step that all runs have (Hopper-v4 at step 1,000);" in text


def test_versions_of_a_script_with_a_seed_in_common_are_shown_apart(tmp_path, report):
    """In all environments, and each with its own seeds; a run is of the version that began it."""
    for version, value in (("aaa", 100), ("bbb", 900)):
        for seed in (1, 2):
            make_run(tmp_path / version, "my_rac", "Hopper-v4", seed, {1000: value, 2000 + seed: value}, sha256=version)
    make_run(tmp_path / "bbb", "my_rac", "Ant-v4", 1, {1000: 7}, sha256="bbb")
    _, err, text = report("aaa", "bbb")
    assert "runs of my_rac on Hopper-v4 differ in script_sha256 and are shown apart" in err
    assert [(r["environment"], r["algorithm"], r["seeds"], r["return"]) for r in tables(text)[0] if r["seeds"] != "—"] == [
        ("Ant-v4", "my_rac [script_sha256 bbb]", "1", "7.0"),
        ("Hopper-v4", "my_rac [script_sha256 aaa]", "2", "100 ± 0"),
        ("Hopper-v4", "my_rac [script_sha256 bbb]", "2", "900 ± 0"),
    ]
    for path in (tmp_path / "aaa").glob("*/config.json"):  # begun by one, and resumed by the other
        change(path, '"aaa"', '"aaa+bbb"')
    assert "my_rac [script_sha256 bbb]" in report("aaa", "bbb")[2]
    for path in (tmp_path / "bbb").glob("*/config.json"):
        change(path, '"bbb"', '"aaa"')
    _, err, text = report("aaa", "bbb")
    assert err.count("are the same run") == 2
    assert "shown apart" not in err


def test_versions_keep_their_ratio_beside_other_settings(tmp_path, report):
    make_run(tmp_path / "a", "rac_sac", "Hopper-v4", 1, {16_666: 5}, sha256="aaa")
    make_run(tmp_path / "b", "rac_sac", "Hopper-v4", 1, {16_666: 6}, sha256="bbb")
    make_run(tmp_path / "c", "rac_sac", "Hopper-v4", 1, {16_666: 7}, sha256="aaa", utd=3)
    for version in ("aaa", "bbb"):
        make_run(tmp_path / version[0], "mine", "Hopper-v4", 1, {16_666: 5}, sha256=version)
    _, _, text = report("a", "b", "c", "--published")
    assert with_a_ratio(text) == {f"{name} [script_sha256 {digest}]" for name in ("RAC-SAC", "mine") for digest in ("aaa", "bbb")}
    assert "RAC-SAC [utd 3, script_sha256 aaa]" in text


def test_hours_are_a_median(tmp_path, report):
    for seed, hours in ((1, 1), (2, 2), (3, 9)):
        path = make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", seed, {1000: 5})
        change(path / "eval.csv", ",100.0,", f",{hours * 3600},")
    _, _, text = report("runs")
    (row,) = next(table for table in tables(text) if "hours" in table[0])
    assert row["hours"] == "2.00"
    assert "Hours: median over seeds" in text


def test_a_row_without_a_value_bias_is_left_out_by_itself(tmp_path, report):
    path = make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20, 7000: 30}, bias=True)
    change(path / "bias.csv", "5000,1,2", "5000,nan,nan")
    said = runs.Warnings()
    (run,) = runs.find_runs([tmp_path], said)
    assert said.texts == [f"{path / 'bias.csv'} has no finite value bias at step 5,000: left out there."]
    assert run.eval["eval/bias_mean"].dropna().to_dict() == {6000: 1, 7000: 1}
    change(path / "bias.csv", "eval/bias_std", "bias_std")
    (run,) = runs.find_runs([tmp_path], said)
    assert "it has no column eval/bias_std: left out" in said.texts[-1]
    assert "eval/bias_mean" not in run.eval


def test_letters_with_a_meaning_to_figures_and_tables(tmp_path, report):
    """A label keeps them, so that names which differ in them do; a curve whose name begins with _ is in the legend too."""
    for name in ("a$b", "ab", "a|b", "_mine"):
        make_run(tmp_path / "runs", name, "Hopper-v4", 1, {1000: 5, 2000: 6})
    labels = ["_mine", r"a\$b", "ab", "a¦b"]
    final, *_ = tables(text := report("runs")[2])
    assert [row["algorithm"] for row in final if row["seeds"] != "—"] == labels
    scores = next(table for table in tables(text) if "IQM" in table[0])
    assert [row["algorithm"] for row in scores] == labels
    groups = grouping.group_runs(runs.find_runs([tmp_path], said := runs.Warnings()), said)
    figure = figures.draw_curves(groups, "eval/best_return", "return")
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == [f"{label} (1 seed)" for label in labels]
    figures.plt.close(figure)


def test_one_damaged_run_does_not_end_the_report(tmp_path, report):
    """A kept script that is cut off, a bias.csv with a step twice: a warning each."""
    path = make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20}, bias=True)
    make_run(tmp_path / "runs", "rac_td3", "Hopper-v4", 1, {5000: 10, 6000: 20}, script="rac_td3")
    (path / "rac_sac.py").write_text((ROOT / "rac_sac.py").read_text().split("class Args:")[0] + "class Args")
    (path / "bias.csv").write_text((path / "bias.csv").read_text() + "6000,1,2\n")
    out, err, text = report("runs")
    assert "2 runs, 2 warnings" in out, err
    assert "rac_sac.py is damaged: the defaults of today's script count for its run" in err
    assert "bias.csv is mixed up, it has a step twice: left out" in err
    assert "| RAC-SAC " in text


def test_value_biases_of_different_sizes_are_named(tmp_path, report):
    for seed, chosen in ((1, 20), (2, 20), (3, 2)):
        path = make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", seed, {5000: 10, 6000: 20})
        sizes = {"pairs": 100, "chosen": chosen, "continuations": 20, "max_steps": 1500}
        write_csv(path / "bias.csv", [{"global_step": 6000, "eval/bias_mean": 1, "eval/bias_std": 2, **sizes}])
    _, err, _ = report("runs")
    assert err.count("warning") == 1
    assert "Hopper-v4__rac_sac__2 and" in err
    assert "Hopper-v4__rac_sac__3 were measured at different sizes" in err


def test_a_published_report_does_not_mix_settings_of_one_name(tmp_path):
    """Each of its sets of runs is found by the settings in which it differs, that of the default too."""
    make_run(tmp_path / "a", "rac_sac", "Hopper-v4", 1, {5000: 10})
    make_run(tmp_path / "b", "rac_sac", "Hopper-v4", 1, {5000: 30}, batch_size=64)
    groups = grouping.group_runs(runs.find_runs([tmp_path], said := runs.Warnings()), said)
    assert {group.label: group.told_apart_by for group in groups} == {
        "RAC-SAC": {"batch_size": 256},
        "RAC-SAC [batch_size 64]": {"batch_size": 64},
    }


def test_an_argument_that_baselines_have_gained_does_not_part_runs(tmp_path, report):
    make_run(tmp_path / "runs", "sac", "Hopper-v4", 1, {5000: 10, 6000: 20}, script="baselines")
    path = make_run(tmp_path / "runs", "sac", "Hopper-v4", 2, {5000: 10, 6000: 30}, script="baselines")
    config = json.loads((path / "config.json").read_text())
    del config["args"]["hidden_dim"]
    (path / "config.json").write_text(json.dumps(config))
    _, err, text = report("runs")
    assert "2 runs of 1 algorithm" in text
    assert err == ""


def test_other_settings_do_not_rename_the_default(tmp_path, report):
    """A name's own settings keep its label and its place beside published results; the others say in what they differ."""
    root = tmp_path / "runs"
    make_run(root / "a", "rac_sac", "Hopper-v4", 1, {5000: 10, 16_666: 20})
    make_run(root / "b", "rac_sac", "Hopper-v4", 1, {5000: 10, 16_666: 30}, batch_size=64)
    _, err, text = report("runs")
    assert "differ in batch_size and are shown apart" in err
    found = tables(text)
    assert {row["algorithm"] for row in found[0]} >= {"RAC-SAC", "RAC-SAC [batch_size 64]"}
    ratios = [table for table in found if "16,666" in table[0]][1]
    assert "RAC-SAC" in {row["algorithm"] for row in ratios}
    assert "RAC-SAC [batch_size 64]" not in {row["algorithm"] for row in ratios}


def test_the_current_folder_is_no_place_for_a_report(tmp_path, report):
    make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20})
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmark/report.py"), "runs", "--out", ""], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: out is the current folder")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_probabilities_and_long_labels(tmp_path):
    long = "RAC-SAC (batch size 64, hidden dim 64, num critics 5, eval episodes 3, my own trick with a long name)"
    figure = figures.draw_intervals({long: (0.9, 0.8, 1.0), "b": (0.1, 0.1, 0.2)}, "probability", True)
    (ax,) = figure.axes
    label, short = [tick.get_text() for tick in ax.get_yticklabels()]
    assert ax.get_xlim() == (0, 1) and label.replace("\n", " ") == long and short == "b"
    assert max(map(len, label.split("\n"))) <= figures.WIDTH < len(long)
    figure.draw_without_rendering()
    boxes = [tick.get_window_extent() for tick in ax.get_yticklabels()]
    assert boxes[0].width < figure.bbox.width / 2 and not boxes[0].overlaps(boxes[1])  # room for the axes; lines apart
    figures.plt.close(figure)


def test_settings_that_all_runs_share_stand_once(tmp_path, report):
    root, shared = tmp_path / "runs", {"utd": 5, "batch_size": 64}
    for name, script, extra in (
        ("rac_sac+batch_size_64+utd_5", "rac_sac", {}),
        ("redq+batch_size_64+utd_5", "vanilla_rac", {}),
        ("rac_sac+batch_size_64+tau_0.1+utd_5", "rac_sac", {"tau": 0.1}),
    ):
        make_run(root, name, "Hopper-v4", 1, {5000: 1, 6000: 2}, script=script, **shared, **extra)
    _, err, text = report("runs")
    ours = [r["algorithm"] for r in tables(text)[0] if "paper only" not in r["algorithm"]]
    assert err == "" and ours == ["RAC-SAC", "RAC-SAC (tau 0.1)", "REDQ"]
    assert text.count("batch_size 64, utd 5") == 1
    assert all(r["difference"] == "—" for r in tables(text)[0])
    make_run(root, "mine", "Hopper-v4", 1, {5000: 1, 6000: 2}, utd=20, batch_size=64)
    _, _, text = report("runs")
    ours = [r["algorithm"] for r in tables(text)[0] if "paper only" not in r["algorithm"]]
    assert ours == ["RAC-SAC (tau 0.1, utd 5)", "RAC-SAC (utd 5)", "REDQ (utd 5)", "mine"] and "batch_size 64." in text


def test_an_algorithm_without_a_family(tmp_path, report):
    """Its eval.csv has no beta; it stands beside the scripts and the paper's values of its name."""
    make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20})
    path = make_run(tmp_path / "runs", "sac", "Hopper-v4", 1, {5000: 10, 6000: 30}, script="baselines")
    config = json.loads((path / "config.json").read_text())
    config["args"] = {name: config["args"][name] for name in ("env_id", "exp_name", "seed", "total_timesteps")}
    (path / "config.json").write_text(json.dumps(config))
    rows = [
        {"global_step": step, "charts/wall_seconds": 1, "eval/best_return": 5 * step / 1000, "eval/best_return_std": 1}
        for step in (5000, 6000)
    ]
    write_csv(path / "eval.csv", rows)
    _, err, text = report("runs")
    found = tables(text)
    (row,) = [r for r in found[0] if r["return"] == "30"]
    name = row["algorithm"]
    assert err == "" and name.lower() == "sac" and (row["paper"], row["paper's steps"]) == ("2,815 ± 585", "3,000,000")
    assert {r["algorithm"] for r in next(t for t in found if "IQM" in t[0])} == {"RAC-SAC", name}
    assert f"![{name}: best" not in text and "SAC (paper only)" not in text and "RAC-SAC: best beta over time." in text


def test_all_figures_and_one_html_file(tmp_path, report):
    root = tmp_path / "runs"
    for seed in (1, 2):
        for exp_name, script, extra in (
            ("rac_sac", "rac_sac", {}),
            ("rac_td3", "rac_td3", {}),
            ("rac_itm", "rac_itm", {}),
            ("redq", "vanilla_rac", {}),
            ("rac_sac-utd_5", "rac_sac", {"utd": 5}),
            ("rac_sac-q_lr_init_0.0003", "rac_sac", {"q_lr_init": 3e-4}),
            ("mine", "rac_sac", {"tau": 1}),
        ):
            returns = {1000: 10 * seed, 2000: 50, 3000: 70}
            make_run(root, exp_name, "Humanoid-v4", seed, returns, script=script, bias=True, **extra)
    out, err, text = report("runs")
    assert err == "" and "14 runs" in out
    names = re.findall(r"!\[.*\]\((.*)\)", text)
    wanted = {
        "learning_curves",
        "variants",
        "bias_mean",
        "bias_std",
        "iqm",
        "probability_of_improvement",
        "ablation_utd",
        "ablation_warmup",
        *(f"{kind}_rac_{a}" for kind in ("return_per_beta", "best_beta") for a in ("sac", "td3")),
        "temperature_rac_sac",
        "return_per_k_rac_itm",
        "best_k_rac_itm",
        "temperature_rac_itm",
    }
    assert wanted <= {name.removesuffix(".png") for name in names}
    for name in names:
        path = tmp_path / "out" / name
        assert path.read_bytes().startswith(b"\x89PNG") and path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    page = (tmp_path / "out/report.html").read_text()
    drawn = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page)
    assert len(drawn) == len(names) == page.count("src=") and all(b"<svg" in base64.b64decode(text) for text in drawn)
    assert set(re.findall(r'href="([^"]*)"', page)) == {  # nothing else outside the file
        "https://arxiv.org/abs/2110.09712",
        "https://doi.org/10.3389/fnbot.2022.1081242",
    }
    assert page.count("<table>") == len(tables(text))
    assert '<td style="text-align:right">70 ± 0</td>' in page and '<td style="text-align:left">RAC-SAC</td>' in page
    curves = next(t for t in tables(text) if "return" in t[0] and "paper" in t[0])
    assert "mine" in [r["algorithm"] for r in curves]  # another experiment's name stands for itself
    assert "RAC-SAC, G = 5" not in [r["algorithm"] for r in curves]  # an ablation is in its panel only

    (tmp_path / "out/own.png").touch()
    _, _, text = report("runs/Humanoid-v4__rac_sac__1")
    left = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert {path.with_suffix(".png").name for path in (tmp_path / "out").glob("*.pdf")} == left - {"own.png"}
    assert left == {"own.png", *re.findall(r"!\[.*\]\((.*)\)", text)} and left < {"own.png", *names}  # no figure of before


def test_settings_decide_and_not_names_alone(tmp_path, report):
    """Nothing of other settings passes for the paper's, no run is left out silently, and tiny runs disturb no others."""
    root = tmp_path / "runs"
    make_run(root, "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20, 7000: 30})
    make_run(root / "by_hand", "rac_sac", "Hopper-v4", 2, {5000: 11, 6000: 12}, utd=5)
    make_run(root, "rac_sac", "Hopper-v5", 1, {5000: 13})
    make_run(root, "smoke_rac_sac", "Hopper-v4", 1, {200: 1, 500: 2}, utd=1)
    make_run(root, "rac_sac-utd_1+gamma_0.98", "Hopper-v4", 1, {5000: 14, 6000: 15}, utd=1, gamma=0.98)
    make_run(root, "rac_sac-num_critics_5", "Hopper-v4", 1, {5000: 16, 6000: 17}, num_critics=5)
    (root / "Hopper-v4__rac_sac-num_critics_5__1/config.json").write_text(
        (root / "Hopper-v4__rac_sac-num_critics_5__1/config.json").read_text().replace('"rac_sac"', '"my_rac"', 1)
    )  # a copy of the script under another name
    _, err, text = report("runs")
    found = tables(text)
    rows = {(r["environment"], r["algorithm"]): r for r in found[0] if "paper only" not in r["algorithm"]}
    assert rows["Hopper-v4", "RAC-SAC"]["return"] == "30"
    assert rows["Hopper-v5", "RAC-SAC"]["difference"] == "—"
    assert rows["Hopper-v4", "RAC-SAC, G = 1 (gamma 0.98)"]["return"] == "15"
    assert rows["Hopper-v4", "RAC-SAC, N = 5 [script my_rac]"]["return"] == "17"
    assert ("Hopper-v4", "RAC-SAC [utd 5]") not in rows  # in the panel, as what it is
    panel = next(t for t in found if "RAC-SAC, varied: G" in t[0])
    assert [(r["RAC-SAC, varied: G"], r["return"]) for r in panel] == [("G = 5", "12"), ("G = 20", "30")]
    assert "differ in utd and are shown apart" in err
    scored = next(t for t in found if "IQM" in t[0])
    assert all("tiny" not in r["algorithm"] for r in scored)


def test_an_argument_that_a_run_did_not_have_yet(tmp_path, report):
    """It counts as today's default, and not as a setting of its own."""
    for seed in (1, 2, 3):
        path = make_run(
            tmp_path / "runs", "rac_sac", "Hopper-v4", seed, {5000: 10, 6000: 20}, beta_min=1e-2 if seed == 3 else 1e-7
        )
        if seed == 1:
            config = json.loads((path / "config.json").read_text())
            del config["args"]["beta_min"]
            (path / "config.json").write_text(json.dumps(config))
    rows = tables(report("runs")[2])[0]
    assert {r["algorithm"]: r["seeds"] for r in rows if "paper only" not in r["algorithm"]} == {
        "RAC-SAC": "2",
        "RAC-SAC [beta_min 0.01]": "1",
    }


def test_ablations_of_what_the_evaluation_follows(tmp_path, report):
    """eval_beta_max and eval_k_max are saved filled in; what is varied is train_beta_max and train_k_max alone."""
    root = tmp_path / "runs"
    for seed in (1, 2):
        for exp_name, script in (("rac_sac", "rac_sac"), ("rac_itm", "rac_itm")):
            make_run(root, exp_name, "Humanoid-v4", seed, {5000: 1, 6000: 2}, script=script)
        make_run(root, "rac_sac-train_beta_max_0.4", "Humanoid-v4", seed, {5000: 3, 6000: 4})
        make_run(root, "rac_itm-train_k_max_3", "Humanoid-v4", seed, {5000: 5, 6000: 6}, script="rac_itm")
    _, err, text = report("runs")
    found = tables(text)
    assert err == "" and [r["algorithm"] for r in found[0] if "paper only" not in r["algorithm"]] == ["RAC-SAC", "RAC-ITM"]
    for caption, rows in (
        ("RAC-SAC, varied: a", [("a = 0.4", "4.0 ± 0.0"), ("a = 0.8", "2.0 ± 0.0")]),
        ("RAC-ITM, varied: a", [("a = 2", "2.0 ± 0.0"), ("a = 3", "6.0 ± 0.0")]),
    ):
        panel = next(t for t in found if caption in t[0])
        assert [(r[caption], r["return"]) for r in panel] == rows


def test_an_ablation_that_another_algorithm_shares_is_compared_with_it(tmp_path, report):
    """At UTD 1, which only my_rac has too; what is left to the ablations is named."""
    for exp_name in ("rac_sac", "rac_sac+utd_1", "rac_sac+num_critics_5", "my_rac+utd_1"):
        settings = {name: int(value) for name, value in identity.parts_of(exp_name)[1]}
        script = identity.parts_of(exp_name)[0]
        make_run(tmp_path / "runs", exp_name, "Hopper-v4", 1, {5000: 100, 6000: 200}, script=script, **settings)
    settings = ["RAC-SAC", "RAC-SAC (utd 1)", "my_rac (utd 1)"]
    _, _, text = report("runs")
    assert [row["algorithm"] for row in tables(text)[0] if row["seeds"] != "—"] == settings
    assert "Only below, as ablations: RAC-SAC (num critics 5)." in text


@pytest.mark.parametrize(
    "mean,std,text",
    [(0.5, 0.1, "0.50 ± 0.10"), (0.9, 0.05, "0.90 ± 0.05"), (-3.42, 0.5, "-3.4 ± 0.5"), (42.4, 3.6, "42 ± 4"), (0, 0, "0 ± 0")]
    + [(0.004, np.nan, "0.0040"), (1234.5, np.nan, "1,234")],
)
def test_small_returns_keep_their_digits(mean, std, text):
    assert program.tables.plus_minus(mean, std) == text


def test_evaluations_that_are_not_at_the_common_step_are_named(tmp_path, report):
    """The aggregate score of an algorithm that is evaluated more rarely is of an earlier step than the others'."""
    make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {step: step / 10 for step in range(1000, 20_000, 1000)})
    make_run(tmp_path / "runs", "ppo", "Hopper-v4", 1, {10_000: 1000, 20_000: 2000})
    _, err, text = report("runs")
    assert "ppo has no evaluation at step 19,000 of Hopper-v4: its aggregate score is of step 10,000." in err
    assert "95 % intervals; Hopper-v4 at step 19,000." in text


def test_own_settings_that_differ_between_environments_are_named(tmp_path, report):
    make_run(tmp_path / "runs", "my_rac", "Hopper-v4", 1, {5000: 100}, utd=20, buffer_size=5)
    make_run(tmp_path / "runs", "my_rac", "Ant-v4", 1, {5000: 100}, utd=1, sha256="b")
    make_run(tmp_path / "runs", "rac_sac", "Ant-v4", 1, {5000: 100})
    make_run(tmp_path / "runs", "rac_sac", "Humanoid-v4", 1, {5000: 100})
    _, err, _ = report("runs")
    assert "my_rac has other settings in one environment than in another (Ant-v4: utd 1; Hopper-v4: utd 20)." in err
    assert err.count("other settings in one environment") == 1
    assert re.search(r"Ant-v4__my_rac__1 and \S+Hopper-v4__my_rac__1 .* different versions of rac_sac\.py", err)


def test_a_run_of_two_versions_is_named(tmp_path, report):
    make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {5000: 100}, sha256="a+b")
    assert re.search(r"Hopper-v4__rac_sac__1 went on with another version of rac_sac\.py", report("runs")[1])


def test_one_value_of_one_seed_is_drawn(tmp_path):
    """As a dot: the value bias of one seed of two, at one step."""
    make_run(tmp_path, "rac_sac", "Hopper-v4", 1, {5000: 10}, bias=True)
    make_run(tmp_path, "rac_sac", "Hopper-v4", 2, {5000: 10})
    groups = grouping.group_runs(runs.find_runs([tmp_path], said := runs.Warnings()), said)
    (ax,) = figures.draw_curves(groups, "eval/bias_mean", "mean of bias").axes
    drawn = [(line.get_xydata().tolist(), line.get_marker()) for line in ax.lines if len(line.get_xdata())]
    assert drawn == [([[5000, 1]], ".")]
    figures.plt.close("all")


def test_one_more_run_narrows_nothing(tmp_path, report):
    root, curve = tmp_path / "runs", {5000: 100, 6000: 200}
    for env_id in ("Ant-v4", "Walker2d-v4", "Hopper-v4"):
        make_run(root, "rac_sac", env_id, 1, curve)
        make_run(root, "redq", env_id, 1, curve, script="vanilla_rac")
    make_run(root, "vanilla_rac", "Walker2d-v4", 1, curve, script="vanilla_rac")
    make_run(root, "rac_sac+my_trick", "Hopper-v4", 1, curve)
    make_run(root, "RAC-SAC", "Ant-v4", 1, curve, gamma=0.5)  # another name, the same label
    _, err, text = report("runs")
    found = tables(text)
    scored = next(t for t in found if "IQM" in t[0])
    assert [r["algorithm"] for r in scored] == ["RAC-SAC [exp_name rac_sac]", "REDQ"]
    assert "(Ant-v4 at step 6,000, Walker2d-v4 at step 6,000, Hopper-v4 at step 6,000)" in text
    for name in ("Vanilla RAC", "RAC-SAC (my trick)", "RAC-SAC [exp_name RAC-SAC]"):
        assert f"{name} has no run on " in err
    _, _, text = report("runs/Ant-v4__rac_sac__1", "runs/Hopper-v4__redq__1")
    assert tables(text)[1][0]["REDQ (paper only)"] == "28,000"  # REDQ has run, but not where the paper has such values

    alone = [*root.glob("*__rac_sac__1"), make_run(tmp_path / "few", "rac_td3", "Hopper-v4", 1, curve, script="rac_td3")]
    scored = next(t for t in tables(report(*alone)[2]) if "IQM" in t[0])
    assert [r["algorithm"] for r in scored] == ["RAC-SAC", "RAC-TD3"]  # not the one with most environments by itself


def change(path: Path, old: str, new: str, count: int = -1) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


def cut_off(root: Path) -> None:
    path = make_run(root, "cut", "Hopper-v4", 1, {1000: 5, 2000: 6}, script="vanilla_rac") / "eval.csv"
    path.write_text(path.read_text()[:-4])


def rotten(root: Path) -> None:
    path = make_run(root, "rotten", "Hopper-v4", 1, {1000: 5, 2000: 6, 3000: 7})
    change(path / "eval.csv", "2000,200.0,6", "2000,200.0,six")


def mixed_up(root: Path) -> None:
    path = make_run(root, "mixed", "Hopper-v4", 1, {1000: 5}, script="rac_itm")
    (path / "eval.csv").write_bytes((root / "Hopper-v4__rac_sac__1/eval.csv").read_bytes())


def other_betas(root: Path) -> None:
    path = make_run(root, "apart", "Hopper-v4", 1, {1000: 5})
    change(path / "config.json", '"eval_beta_max": 0.8', '"eval_beta_max": 0.4')


def named_twice(root: Path) -> None:
    path = make_run(root, "twice", "Hopper-v4", 1, {1000: 5})
    change(path / "eval.csv", "eval/best_return_std", "global_step", 1)


def without(name: str):
    def damage(root: Path) -> None:
        (make_run(root, "without", "Hopper-v4", 1, {1000: 5}) / name).unlink()

    return damage


def written(name: str, content: bytes):
    def damage(root: Path) -> None:
        (make_run(root, "written", "Hopper-v4", 1, {1000: 5}) / name).write_bytes(content)

    return damage


def copied_to(name: str):
    def damage(root: Path) -> None:
        path = make_run(root, f"copied {name}", "Hopper-v4", 1, {1000: 5})
        (path / name).write_bytes((path / "eval.csv").read_bytes())

    return damage


def fresh_at_another_step(root: Path) -> None:
    path = make_run(root, "early", "Hopper-v4", 1, {1000: 5}, fresh=4)
    change(path / "evaluate.csv", "1000,", "700,")


def runs_of(name: str, *all_returns: dict, changes=({}, {}), **common):
    """Runs of one name with seeds 1, 2, ...; what changes is of the first and of the second."""

    def damage(root: Path) -> None:
        for seed, (returns, own) in enumerate(zip(all_returns, changes, strict=False), 1):
            make_run(root, name, "Hopper-v4", seed, returns, **common, **own)

    return damage


def called_alike(root: Path) -> None:
    make_run(root, "a (b 1)", "Hopper-v4", 1, {1000: 5})
    make_run(root, "a+b_1", "Hopper-v4", 1, {1000: 5})


def the_same_run(root: Path) -> None:
    make_run(root / "deep" / "deeper", "rac_sac", "Hopper-v4", 1, {1000: 7})


def an_empty_folder(root: Path) -> None:
    (root / "empty").mkdir()


def notes(root: Path) -> None:
    (root / "notes").mkdir()
    (root / "notes/todo.txt").write_text("")


# What is wrong beside a sound run; whose name the one warning has, what it says; which runs are used all the same
DAMAGES = {
    "cut off": (cut_off, "cut__1/eval.csv", "ends in the middle of a row", ["cut__1"]),
    "not a number": (rotten, "rotten__1/eval.csv", "is damaged in line 3", ["rotten__1"]),
    "another script's": (mixed_up, "mixed__1", "is mixed up: its eval.csv is not one of rac_itm.py", []),
    "other betas": (other_betas, "apart__1", "is mixed up: its eval.csv is not one of rac_sac.py", []),
    "backwards": (runs_of("back", {2000: 5, 1000: 6}), "back__1", "the steps in its eval.csv do not grow", []),
    "too long": (runs_of("beyond", {1000: 5, 2000: 6}, total=1500), "beyond__1", "goes beyond the 1500 steps", []),
    "too young": (without("eval.csv"), "without__1", "has no evaluation yet", []),
    "no config.json": (without("config.json"), "without__1", "has no config.json", []),
    "a foreign config.json": (written("config.json", b'{"script": "ppo"}'), "written__1", "one that is not of this project", []),
    "not text": (written("eval.csv", b"\xff\xfe\x00"), "written__1/eval.csv", "cannot be read", []),
    "a column twice": (named_twice, "twice__1/eval.csv", "names a column twice", []),
    "no common step": (
        runs_of("far", {1000: 5, 2000: 6}, {3000: 5, 4000: 6}),
        "far__2",
        "has no evaluation by step 2,000, the last of another seed: left out",
        ["far__1"],
    ),
    "train.csv": (copied_to("train.csv"), "train.csv__1/train.csv", "has no column charts/SPS", ["copied train.csv__1"]),
    "evaluate.csv": (copied_to("evaluate.csv"), "evaluate.csv__1/evaluate.csv", "no column return", ["copied evaluate.csv__1"]),
    "fresh at another step": (
        fresh_at_another_step,
        "early__1/evaluate.csv",
        "is of step 700, at which eval.csv has no evaluation",
        ["early__1"],
    ),
    "names that look alike": (called_alike, "a (b 1) and of a+b_1", "are called alike", ["a (b 1)__1", "a+b_1__1"]),
    "other settings": (
        runs_of("other", {1000: 5}, {1000: 5}, changes=({"utd": 3}, {"utd": 4})),
        "other__1",
        "differ in utd and are shown apart",
        ["other__1", "other__2"],
    ),
    "another version of the script": (
        runs_of("edited", {1000: 5}, {1000: 5}, changes=({}, {"sha256": "b"})),
        "Hopper-v4__edited__2",
        "different versions of rac_sac.py made them",
        ["edited__1", "edited__2"],
    ),
    "the same run": (the_same_run, "deeper/Hopper-v4__rac_sac__1", "are the same run (seed 1); the second is used", []),
    "an empty folder": (an_empty_folder, "runs/empty", "is not a run directory", []),
    "another folder": (notes, "runs/notes", "is not a run directory", []),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_cannot_be_used_is_named(tmp_path, kind):
    """In one warning, behind which may stand that nothing is left to read; the sound run beside it is used."""
    damage, name, sentence, used = DAMAGES[kind]
    root = tmp_path / "runs"
    make_run(root, "rac_sac", "Hopper-v4", 1, {1000: 5, 2000: 6})
    damage(root)
    said = runs.Warnings()
    groups = grouping.group_runs(runs.find_runs([root], said), said)
    warning, *more = said.texts
    assert all("has no evaluation yet, or none that can be read: left out." in text for text in more)
    assert name in warning
    assert sentence in warning
    found = sorted(Path(run.path).name for group in groups for run in group.runs)
    assert found == sorted(f"Hopper-v4__{name}" for name in ["rac_sac__1", *used])


def test_warnings_on_the_screen_and_in_the_report(tmp_path, report):
    root = tmp_path / "runs"
    make_run(root, "rac_sac", "Hopper-v4", 1, {1000: 5, 2000: 6})
    make_run(root, "rac_sac", "Hopper-v4", 2, {1000: 5}, total=9000)  # unfinished: used
    make_run(root, "odd", "Hopper-v4", 1, {1000: 5}, utd=[1], learning_starts=None, num_critics="10")  # used as it is
    make_run(root, "other", "Hopper-v4", 1, {1000: 5}, utd=3)
    make_run(root, "other", "Hopper-v4", 2, {1000: 5}, utd=4)
    cut_off(root)
    notes(root)
    _, err, text = report("runs")
    lines = err.splitlines()
    for sentence in ("differ in utd and are shown apart", "ends in the middle of a row", "is not a run directory"):
        (line,) = (line for line in lines if sentence in line)
        assert line.startswith("warning: ")
        assert line.removeprefix("warning: ") in text
    assert all(line.startswith("warning: ") for line in lines)
    used = next(table for table in tables(text) if "run directory" in table[0])
    assert len(used) == 6
    assert "1,000 of 9,000, unfinished" in text
    assert "other [utd 3]" in text
    assert "other [utd 4]" in text


def test_links_are_followed_and_copies_within_runs_are_not(tmp_path, report):
    first = make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {1000: 5})
    second = make_run(tmp_path / "elsewhere", "rac_sac", "Hopper-v4", 2, {1000: 7})
    (tmp_path / "runs/linked").symlink_to(second.parent)
    make_run(tmp_path / "runs/.trash", "rac_sac", "Hopper-v4", 3, {1000: 9})
    make_run(first / "backup", "rac_sac", "Hopper-v4", 1, {1000: 11, 2000: 12})
    own = make_run(tmp_path / "runs", "mine", "Hopper-v4", 1, {1000: 5}, script="mine") / "eval.csv"
    own.write_text("global_step,charts/wall_seconds,eval/best_return,eval/return_e,eval/return_1-5\n1000,1,5,1,1\n")
    _, err, text = report("runs")
    used = [Path(row["run directory"]) for row in next(t for t in tables(text) if "run directory" in t[0])]
    assert used == [Path("runs") / first.name, Path("runs/linked") / second.name, Path("runs") / own.parent.name] and err == ""


def test_nothing_to_report(tmp_path, report):
    (tmp_path / "runs").mkdir()
    _, err, _ = report("runs", code=2)
    assert err.splitlines()[-1] == "error: there is no run that can be reported on; give run directories with an eval.csv."
    _, err, _ = report("nowhere", code=2)
    assert err.startswith("error: nowhere is not a directory")
    run_dir = make_run(tmp_path / "runs", "rac_sac", "Hopper-v4", 1, {1000: 5})
    _, err, _ = report("runs", "--published", "PPO", code=2)
    assert err.startswith("error: there is no published curve of PPO; there are those of SAC, REDQ, ")
    log = run_dir.with_suffix(".log")  # as the grid writes it beside a run
    log.touch()
    other = log.with_name("other.log")
    other.touch()
    _, err, _ = report(log, other, run_dir)
    assert err == f"warning: {log} and {other} are files, not run directories: left out.\n"


@pytest.mark.filterwarnings("ignore:Pydantic V1 style")
def test_published_specification(tmp_path, whole):
    """Built without login or network; whose runs, which curves and which tables it shows."""
    root, path = tmp_path / "runs", tmp_path / "out/wandb_report.json"
    for seed in (1, 2):
        make_run(root, "rac_sac", "Ant-v4", seed, {1000: 5, 2000: 1500}, tracked=True)
        make_run(root, "redq", "Ant-v4", seed, {1000: 5, 2000: 7}, script="vanilla_rac", tracked=True)
        make_run(root, "rac_itm", "Hopper-v4", seed, {1000: 5, 2000: 7}, script="rac_itm", tracked=seed == 1)
    plain = make_run(root, "sac", "Hopper-v4", 1, {1000: 5}, script="baselines", tracked=True) / "eval.csv"
    plain.write_text("global_step,charts/wall_seconds,eval/best_return,eval/best_return_std\n1000,1,5,1\n")
    _, err = start(tmp_path, "report.py", "runs", "--out", "out", "--bootstrap", "50", "--publish")
    text = (tmp_path / "out/report.md").read_text()
    assert "1 run was not tracked" in err and "not published (no API key" in err and "out/wandb_report.json" in err
    written = json.loads(path.read_text())
    assert written["project"] == {"name": "project", "entityName": "team"}
    grids = [block["metadata"] for block in written["spec"]["blocks"] if block["type"] == "panel-grid"]
    shown = []
    for grid in grids:
        for run_set in grid["runSets"]:
            values = {f["key"]["name"]: f["value"] for f in run_set["filters"]["filters"]}
            assert [g["name"] for g in run_set["grouping"]] == ["exp_name.value"] and "project" not in run_set
            shown.append((run_set["name"], values["exp_name"], values["env_id"]))
    assert shown == [
        ("RAC-SAC", "rac_sac", "Ant-v4"),
        ("REDQ", "redq", "Ant-v4"),
        ("RAC-SAC", "rac_sac", "Ant-v4"),
        ("RAC-ITM", "rac_itm", "Hopper-v4"),
        ("SAC", "sac", "Hopper-v4"),
        ("RAC-ITM", "rac_itm", "Hopper-v4"),
    ]
    panels = [{p["config"]["chartTitle"]: p["config"] for p in grid["panelBankSectionConfig"]["panels"]} for grid in grids]
    best = panels[0]["return of the best policy"]
    assert best["metrics"] == ["eval/best_return"] and best["xAxis"] == "global_step"
    assert (best["groupAgg"], best["groupArea"]) == ("mean", "stddev")
    assert panels[1]["return per beta"]["metrics"] == [f"eval/return_{b}" for b in BETAS]
    assert panels[1]["temperature per beta"]["metrics"] == [f"eval/alpha_{b}" for b in BETAS]
    assert panels[3]["best k"]["metrics"] == ["eval/best_k"]
    markdown = [block["content"] for block in written["spec"]["blocks"] if block["type"] == "markdown-block"]
    assert len(markdown) == len(tables(text)) and all(table in text for table in markdown)
    # The names of the panels are those that the scripts log.
    logged = {column for name in ("eval.csv", "train.csv") for column in (whole[0] / name).read_text().split("\n")[0].split(",")}
    metrics = {m for p in (panels[0],) for config in p.values() for m in config["metrics"]}
    assert metrics <= logged and "eval/return_0.8" in logged

    assert written["description"].startswith("Up to 2 seeds per algorithm and environment")

    again = "later: python benchmark/publish.py out/wandb_report.json"
    out, err = start(tmp_path, "publish.py", "out/wandb_report.json", code=1)
    assert err.endswith(f"{again}\n") and "not published (no API key" in err and out == ""
    _, err = start(tmp_path, "publish.py", "out/wandb_report.json", code=1, WANDB_MODE="offline")
    assert "not published (WANDB_MODE is offline)" in err
    report = publish.load(path)
    assert publish.specification(report) == written  # what would be sent later is what was built
    (tmp_path / "without.json").write_text(json.dumps({**written, "project": None}))
    wrongs = (("nowhere.json", "No such file"), ("out/report.md", "it is no specification"))
    for wrong, reason in (*wrongs, ("without.json", "it is no specification")):
        _, err = start(tmp_path, "publish.py", wrong, code=2)
        assert err.startswith(f"error: {wrong} cannot be read ({reason}") and err.count("\n") == 1


def test_untracked_runs_are_not_published(tmp_path, report):
    make_run(tmp_path / "runs", "rac_sac", "Ant-v4", 1, {1000: 5})
    _, err, _ = report("runs", "--publish")
    assert err == "not published: none of these runs was tracked; train with --track\n"


def test_a_name_that_cannot_be_published(tmp_path, report):
    """wandb-workspaces writes filters as Python, in which a quote ends a name."""
    make_run(tmp_path / "runs", "plain", "Ant-v4", 1, {1000: 5}, tracked=True)
    make_run(tmp_path / "runs", "tom's", "Ant-v4", 1, {1000: 5}, tracked=True)
    _, err, text = report("runs", "--publish")
    assert err == "not published: \"tom's\", a name or setting of a run, has a ' or \\ in it\n"
    assert "tom's" in text


def test_versions_that_weights_and_biases_does_not_tell_apart(tmp_path):
    """Their panels are found by what is logged of a run, and a warning says what they may mix."""
    for version in ("aaa", "bbb"):
        make_run(tmp_path / version, "mine", "Ant-v4", 1, {1000: 5}, sha256=version, tracked=True)
    _, err = start(tmp_path, "report.py", "aaa", "bbb", "--out", "out", "--bootstrap", "50", "--publish")
    assert "panels may mix versions of a script" in err
    blocks = json.loads((tmp_path / "out/wandb_report.json").read_text())["spec"]["blocks"]
    run_sets = [run_set for block in blocks if block["type"] == "panel-grid" for run_set in block["metadata"]["runSets"]]
    assert {run_set["name"] for run_set in run_sets} == {"mine [script_sha256 aaa]", "mine [script_sha256 bbb]"}
    filters = [{f["key"]["name"] for f in run_set["filters"]["filters"]} for run_set in run_sets]
    assert all(names == {"exp_name", "env_id"} for names in filters)
