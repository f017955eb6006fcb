"""benchmark/report.py from the command line, on run directories with known numbers."""

import csv
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import experiments

pytest.importorskip("rliable", reason="benchmark/requirements.txt is not installed")
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
        flags = experiments.variant(exp_name, env_id)[1].split()
    except KeyError:
        flags = []
    module = importlib.import_module(script)
    args = module.check_args(tyro.cli(module.Args, args=["--env-id", env_id, *flags]))
    if getattr(args, "target_entropy", 0.0) is None:
        args.target_entropy = -float({"Humanoid": 17, "Ant": 8, "Walker2d": 6, "Hopper": 3}[env_id.split("-")[0]])
    return vars(args)


def make_run(root: Path, exp_name: str, env_id: str, seed: int, returns: dict[int, float], script="rac_sac", bias=False,
             total=None, tracked=False, fresh=None, sha256="a", **arguments) -> Path:  # fmt: skip
    """A run directory whose best return at each step is given; the other policies get half of it."""
    path, condition = root / f"{env_id}__{exp_name}__{seed}", CONDITION.get(script, "beta")
    path.mkdir(parents=True)
    args = {**arguments_of(script, exp_name, env_id), "exp_name": exp_name, "env_id": env_id, "seed": seed,
            "total_timesteps": total or max(returns), "wandb_project_name": "project", "wandb_entity": "team"}  # fmt: skip
    for name, value in arguments.items():
        args.update({name: value, **({f"eval_{condition}_max": value} if name == f"train_{condition}_max" else {})})
    largest = args["beta"] if script == "vanilla_rac" else args[f"eval_{condition}_max"]
    betas = [f"{largest:.6g}"] if script == "vanilla_rac" else [f"{largest * i / 12:.6g}" for i in range(1, 13)]
    config = {"script": script, "script_sha256": sha256, "args": args, "git_commit": "0123456789abcdef-dirty",
              "device": "a machine"}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    rows = []
    for step, best in returns.items():
        row = {"best_return": best, "best_return_std": 1, f"best_{condition}": betas[-1], "bias_mean": seed if bias else "",
               "bias_std": 2 * seed if bias else ""}  # fmt: skip
        row |= {f"return_{b}": best if b == betas[-1] else best / 2 for b in betas}
        row |= {} if script == "rac_td3" else {f"alpha_{b}": 1 / step for b in betas}
        rows.append({"global_step": step, "charts/wall_seconds": step / 10, **{f"eval/{k}": v for k, v in row.items()}})
    write_csv(path / "eval.csv", rows)
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


def report(folder: Path, *arguments, code: int = 0, **environment) -> tuple[str, str, str]:
    """stdout, stderr and report.md of a run of report.py."""
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "DISPLAY")
    env = {k: v for k, v in os.environ.items() if k not in hidden} | {"HOME": str(folder)} | environment
    command = [sys.executable, str(ROOT / "benchmark/report.py"), *map(str, arguments), "--out", "out", "--bootstrap", "50"]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stdout + result.stderr
    path = folder / "out/report.md"
    return result.stdout, result.stderr, path.read_text() if path.exists() else ""


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a Markdown file, each a list of rows."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        cells = [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in block.splitlines()]
        found.append([dict(zip(cells[0], row, strict=True)) for row in cells[2:]])
    return found


def test_numbers(tmp_path):
    runs, seeds = tmp_path / "runs", (1, 2, 3, 4)
    ours = {"Ant-v4": [900, 1000, 1300, 1400], "Walker2d-v4": [10, 20, 30, 40]}  # at the last step, by seed
    redq = {"Ant-v4": [1350, 800, 700, 600], "Walker2d-v4": [25, 15, 5, 1]}
    for env_id in ours:
        for seed in seeds:
            last, first = ours[env_id][seed - 1], 1100 if seed < 3 else 100  # the mean crosses 1000 only at 3000
            make_run(runs, "rac_sac", env_id, seed, {1000: 0, 2000: first, 3000: last}, fresh=last - 50)
            make_run(runs, "redq", env_id, seed, {1000: 0, 2000: 0, 3000: redq[env_id][seed - 1]}, script="vanilla_rac")
    out, err, text = report(tmp_path, "runs")
    assert "16 runs, 0 warnings" in out and err == ""
    found = tables(text)

    row = next(r for r in found[0] if r["environment"] == "Ant-v4" and r["algorithm"] == "RAC-SAC")
    mean, std = np.mean(ours["Ant-v4"]), np.std(ours["Ant-v4"], ddof=1)
    assert row["return"] == f"{mean:,.0f} ± {std:,.0f}" and (row["seeds"], row["steps"]) == ("4", "3,000")
    assert row["paper"] == "6,283 ± 549" and row["difference"] == f"{mean - 6283:+,.0f} †"  # not at the paper's 300 000 steps
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

    iqm = {r["algorithm"]: r for r in found[2]}
    for name, returns in (("RAC-SAC", ours), ("REDQ", redq)):
        middle = np.sort(normalised(returns).ravel())[2:6].mean()  # 8 scores: without the two lowest and the two highest
        assert iqm[name]["IQM"] == f"{middle:.3f}" and iqm[name]["seeds"] == "4"
        assert float(iqm[name]["low"]) < middle < float(iqm[name]["high"])
    wins = [np.mean([(a > b) + 0.5 * (a == b) for a in ours[env_id] for b in redq[env_id]]) for env_id in ours]
    assert found[3][0] == found[3][0] | {"probability of improvement": "RAC-SAC over REDQ", "P": f"{np.mean(wins):.3f}"}
    assert "(Ant-v4 at step 3,000, Walker2d-v4 at step 3,000)" in text and report(tmp_path, "runs")[2] == text

    fresh = next(t for t in found if "beta*'s return on fresh episodes" in t[0])
    assert fresh[0]["difference"] == "-50" and fresh[0]["beta*'s return on fresh episodes"].startswith(f"{mean - 50:,.0f}")
    assert {r["commit"] for r in next(t for t in found if "commit" in t[0])} == {"0123456789ab-dirty"}
    speed = next(t for t in found if "steps per second while learning" in t[0])
    assert speed[0]["steps per second while learning"] == "5.0" and speed[0]["device"] == "a machine"


def test_all_figures_and_one_html_file(tmp_path):
    runs = tmp_path / "runs"
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
            make_run(runs, exp_name, "Humanoid-v4", seed, returns, script=script, bias=True, **extra)
    out, err, text = report(tmp_path, "runs")
    assert err == "" and "14 runs" in out
    figures = re.findall(r"!\[.*\]\((.*)\)", text)
    wanted = {"learning_curves", "variants", "bias_mean", "bias_std", "iqm", "probability_of_improvement", "ablation_utd",
              "ablation_warmup", *(f"{kind}_rac_{a}" for kind in ("return_per_beta", "best_beta") for a in ("sac", "td3")),
              "temperature_rac_sac", "return_per_k_rac_itm", "best_k_rac_itm", "temperature_rac_itm"}  # fmt: skip
    assert wanted <= {name.removesuffix(".png") for name in figures}
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in figures)
    page = (tmp_path / "out/report.html").read_text()
    assert page.count('src="data:image/png;base64,') == len(figures) == page.count("src=")  # nothing outside the file
    assert "href=" not in page and "http" not in re.sub(r'src="[^"]*"', "", page)
    assert page.count("<table>") == len(tables(text))
    curves = next(t for t in tables(text) if "return" in t[0] and "paper" in t[0])
    assert "mine" in [r["algorithm"] for r in curves]  # another experiment's name stands for itself
    assert "RAC-SAC, G = 5" not in [r["algorithm"] for r in curves]  # an ablation is in its panel only

    (tmp_path / "out/own.png").touch()
    _, _, text = report(tmp_path, "runs/Humanoid-v4__rac_sac__1")
    left = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert left == {"own.png", *re.findall(r"!\[.*\]\((.*)\)", text)} and left < {"own.png", *figures}  # no figure of before


def test_settings_decide_and_not_names_alone(tmp_path):
    """Nothing of other settings passes for the paper's, no run is left out silently, and tiny runs disturb no others."""
    runs = tmp_path / "runs"
    make_run(runs, "rac_sac", "Hopper-v4", 1, {5000: 10, 6000: 20, 7000: 30})
    make_run(runs / "by_hand", "rac_sac", "Hopper-v4", 2, {5000: 11, 6000: 12}, utd=5)
    make_run(runs, "rac_sac", "Hopper-v5", 1, {5000: 13})
    make_run(runs, "smoke_rac_sac", "Hopper-v4", 1, {200: 1, 500: 2}, utd=1)
    make_run(runs, "rac_sac-utd_1+gamma_0.98", "Hopper-v4", 1, {5000: 14, 6000: 15}, utd=1, gamma=0.98)
    make_run(runs, "rac_sac-num_critics_5", "Hopper-v4", 1, {5000: 16, 6000: 17}, num_critics=5)
    (runs / "Hopper-v4__rac_sac-num_critics_5__1/config.json").write_text(
        (runs / "Hopper-v4__rac_sac-num_critics_5__1/config.json").read_text().replace('"rac_sac"', '"my_rac"', 1)
    )  # a copy of the script under another name
    _, err, text = report(tmp_path, "runs")
    found = tables(text)
    rows = {(r["environment"], r["algorithm"]): r for r in found[0] if "paper only" not in r["algorithm"]}
    assert rows["Hopper-v4", "RAC-SAC [utd 20]"]["return"] == "30"
    assert rows["Hopper-v5", "RAC-SAC"]["difference"].endswith("†")
    assert rows["Hopper-v4", "RAC-SAC, G = 1 (gamma 0.98)"]["return"] == "15"
    assert rows["Hopper-v4", "RAC-SAC, N = 5 [script my_rac]"]["return"] == "17"
    assert ("Hopper-v4", "RAC-SAC [utd 5]") not in rows  # in the panel, as what it is
    panel = next(t for t in found if "RAC-SAC, varied: G" in t[0])
    assert [(r["RAC-SAC, varied: G"], r["return"]) for r in panel] == [("G = 5", "12"), ("G = 20", "30")]
    assert "differ in utd and are shown apart" in err
    scored = next(t for t in found if "IQM" in t[0])
    assert all("tiny" not in r["algorithm"] for r in scored)


def test_ablations_of_what_the_evaluation_follows(tmp_path):
    """eval_beta_max and eval_k_max are saved filled in; what is varied is train_beta_max and train_k_max alone."""
    runs = tmp_path / "runs"
    for seed in (1, 2):
        for exp_name, script in (("rac_sac", "rac_sac"), ("rac_itm", "rac_itm")):
            make_run(runs, exp_name, "Humanoid-v4", seed, {5000: 1, 6000: 2}, script=script)
        make_run(runs, "rac_sac-train_beta_max_0.4", "Humanoid-v4", seed, {5000: 3, 6000: 4})
        make_run(runs, "rac_itm-train_k_max_3", "Humanoid-v4", seed, {5000: 5, 6000: 6}, script="rac_itm")
    _, err, text = report(tmp_path, "runs")
    found = tables(text)
    assert err == "" and [r["algorithm"] for r in found[0] if "paper only" not in r["algorithm"]] == ["RAC-SAC", "RAC-ITM"]
    for caption, rows in (("RAC-SAC, varied: a", [("a = 0.4", "4 ± 0"), ("a = 0.8", "2 ± 0")]),
                          ("RAC-ITM, varied: a", [("a = 2", "2 ± 0"), ("a = 3", "6 ± 0")])):  # fmt: skip
        panel = next(t for t in found if caption in t[0])
        assert [(r[caption], r["return"]) for r in panel] == rows


def test_one_more_run_narrows_nothing(tmp_path):
    runs, curve = tmp_path / "runs", {5000: 100, 6000: 200}
    for env_id in ("Ant-v4", "Walker2d-v4", "Hopper-v4"):
        make_run(runs, "rac_sac", env_id, 1, curve)
        make_run(runs, "redq", env_id, 1, curve, script="vanilla_rac")
    make_run(runs, "vanilla_rac", "Walker2d-v4", 1, curve, script="vanilla_rac")
    make_run(runs, "rac_sac+my_trick", "Hopper-v4", 1, curve)
    make_run(runs, "RAC-SAC", "Ant-v4", 1, curve, gamma=0.5)  # another name, the same label
    _, err, text = report(tmp_path, "runs")
    found = tables(text)
    scored = next(t for t in found if "IQM" in t[0])
    assert [r["algorithm"] for r in scored] == ["RAC-SAC [exp_name rac_sac]", "REDQ"]
    assert "(Ant-v4 at step 6,000, Walker2d-v4 at step 6,000, Hopper-v4 at step 6,000)" in text
    for name in ("Vanilla RAC", "RAC-SAC (my trick)", "RAC-SAC [exp_name RAC-SAC]"):
        assert f"{name} has no run on " in err
    _, _, text = report(tmp_path, "runs/Ant-v4__rac_sac__1", "runs/Hopper-v4__redq__1")
    assert tables(text)[1][0]["REDQ (paper only)"] == "28,000"  # REDQ has run, but not where the paper has such values

    alone = [*runs.glob("*__rac_sac__1"), make_run(tmp_path / "few", "rac_td3", "Hopper-v4", 1, curve, script="rac_td3")]
    scored = next(t for t in tables(report(tmp_path, *alone)[2]) if "IQM" in t[0])
    assert [r["algorithm"] for r in scored] == ["RAC-SAC", "RAC-TD3"]  # not the one with most environments by itself


def test_what_cannot_be_used_is_named(tmp_path):
    runs = tmp_path / "runs"
    make_run(runs, "rac_sac", "Hopper-v4", 1, {1000: 5, 2000: 6})
    make_run(runs, "rac_sac", "Hopper-v4", 2, {1000: 5}, total=9000)  # unfinished: used
    make_run(runs / "deep" / "deeper", "rac_sac", "Hopper-v4", 1, {1000: 7})  # the same run again, shorter
    make_run(runs, "other", "Hopper-v4", 1, {1000: 5}, utd=3)
    make_run(runs, "other", "Hopper-v4", 2, {1000: 5}, utd=4)
    cut = make_run(runs, "cut", "Hopper-v4", 1, {1000: 5, 2000: 6}, script="vanilla_rac") / "eval.csv"
    cut.write_text(cut.read_text()[:-4])
    rotten = make_run(runs, "rotten", "Hopper-v4", 1, {1000: 5, 2000: 6, 3000: 7}) / "eval.csv"
    rotten.write_text(rotten.read_text().replace("2000,200.0,6", "2000,200.0,six"))
    mixed = make_run(runs, "mixed", "Hopper-v4", 1, {1000: 5}, script="rac_itm")
    (mixed / "eval.csv").write_bytes((runs / "Hopper-v4__rac_sac__1/eval.csv").read_bytes())
    make_run(runs, "back", "Hopper-v4", 1, {2000: 5, 1000: 6})
    make_run(runs, "beyond", "Hopper-v4", 1, {1000: 5, 2000: 6}, total=1500)
    (make_run(runs, "young", "Hopper-v4", 1, {1000: 5}) / "eval.csv").unlink()
    (make_run(runs, "lost", "Hopper-v4", 1, {1000: 5}) / "config.json").unlink()
    (make_run(runs, "foreign", "Hopper-v4", 1, {1000: 5}) / "config.json").write_text('{"script": "ppo"}')
    (make_run(runs, "binary", "Hopper-v4", 1, {1000: 5}) / "eval.csv").write_bytes(b"\xff\xfe\x00")
    twice = make_run(runs, "twice", "Hopper-v4", 1, {1000: 5}) / "eval.csv"
    twice.write_text(twice.read_text().replace("eval/best_return_std", "global_step", 1))
    make_run(runs, "far", "Hopper-v4", 1, {1000: 5, 2000: 6})
    make_run(runs, "far", "Hopper-v4", 2, {3000: 5, 4000: 6})  # its head is missing
    apart = make_run(runs, "apart", "Hopper-v4", 1, {1000: 5}) / "config.json"
    apart.write_text(apart.read_text().replace('"eval_beta_max": 0.8', '"eval_beta_max": 0.4'))
    for name in ("train.csv", "evaluate.csv"):
        path = make_run(runs, f"copied {name}", "Hopper-v4", 1, {1000: 5}) / name
        path.write_bytes((path.parent / "eval.csv").read_bytes())
    make_run(runs, "odd", "Hopper-v4", 1, {1000: 5}, utd=[1], learning_starts=None, num_critics="10")
    early = make_run(runs, "early", "Hopper-v4", 1, {1000: 5}, fresh=4) / "evaluate.csv"
    early.write_text(early.read_text().replace("1000,", "700,"))
    make_run(runs, "a$_$", "Hopper-v4", 1, {1000: 5})
    make_run(runs, "edited", "Hopper-v4", 1, {1000: 5})
    make_run(runs, "edited", "Hopper-v4", 2, {1000: 5}, sha256="b")
    make_run(runs, "a_", "Hopper-v4", 1, {1000: 5})
    (runs / "empty").mkdir()
    (runs / "notes").mkdir()
    (runs / "notes/todo.txt").write_text("")
    _, err, text = report(tmp_path, "runs")
    lines = err.splitlines()
    for name, sentence in (
        ("deeper/Hopper-v4__rac_sac__1", "are the same run (seed 1); the longer one is used"),
        ("other__1", "differ in utd and are shown apart"),
        ("cut__1/eval.csv", "ends in the middle of a row"),
        ("rotten__1/eval.csv", "is damaged in line 3"),
        ("mixed__1", "is mixed up: its eval.csv is not one of rac_itm.py"),
        ("back__1", "the steps in its eval.csv do not grow"),
        ("beyond__1", "goes beyond the 1500 steps"),
        ("young__1", "has no evaluation yet"),
        ("lost__1", "has no config.json"),
        ("foreign__1", "has a damaged config.json, or one that is not of this project"),
        ("binary__1/eval.csv", "cannot be read"),
        ("twice__1/eval.csv", "names a column twice"),
        ("far__2", "has no evaluation by step 2,000, the last of another seed: left out"),
        ("apart__1", "is mixed up: its eval.csv is not one of rac_sac.py"),
        ("copied train.csv__1/train.csv", "has no column charts/SPS"),
        ("copied evaluate.csv__1/evaluate.csv", "has no column return"),
        ("early__1/evaluate.csv", "is of step 700, at which eval.csv has no evaluation"),
        ("a$_$ and of a_", "are called alike"),
        ("edited__1 and runs/Hopper-v4__edited__2", "different versions of rac_sac.py made them"),
        ("runs/empty", "is not a run directory"),
        ("runs/notes", "is not a run directory"),
    ):
        (line,) = [line for line in lines if name in line and sentence in line]
        assert line.startswith("warning: ") and line.removeprefix("warning: ") in text
    assert all(line.startswith("warning: ") for line in lines) and "Traceback" not in err
    used = [row["run directory"] for row in next(t for t in tables(text) if "run directory" in t[0])]
    names = {Path(name).name for name in used}
    used_names = ("rac_sac__1", "rac_sac__2", "other__1", "other__2", "cut__1", "rotten__1", "far__1", "odd__1",
                  "copied train.csv__1", "copied evaluate.csv__1", "early__1", "a$_$__1", "a___1", "edited__1",
                  "edited__2")  # fmt: skip
    assert names == {f"Hopper-v4__{n}" for n in used_names}
    assert "1,000 of 9,000, unfinished" in text and "other [utd 3]" in text and "other [utd 4]" in text


def test_nothing_to_report(tmp_path):
    (tmp_path / "runs").mkdir()
    _, err, _ = report(tmp_path, "runs", code=2)
    assert err.splitlines()[-1] == "error: there is no run that can be reported on; give run directories with an eval.csv."
    _, err, _ = report(tmp_path, "nowhere", code=2)
    assert err.startswith("error: nowhere is not a directory")


def test_published_specification(tmp_path, whole):
    """Built without login or network; whose runs, which curves and which tables it shows."""
    runs, path = tmp_path / "runs", tmp_path / "out/wandb_report.json"
    for seed in (1, 2):
        make_run(runs, "rac_sac", "Ant-v4", seed, {1000: 5, 2000: 1500}, tracked=True)
        make_run(runs, "redq", "Ant-v4", seed, {1000: 5, 2000: 7}, script="vanilla_rac", tracked=True)
        make_run(runs, "rac_itm", "Hopper-v4", seed, {1000: 5, 2000: 7}, script="rac_itm", tracked=seed == 1)
    _, err, text = report(tmp_path, "runs", "--publish")
    assert "1 runs were not tracked" in err and "not published (no API key" in err and "out/wandb_report.json" in err
    written = json.loads(path.read_text())
    assert written["project"] == {"name": "project", "entityName": "team"}
    grids = [block["metadata"] for block in written["spec"]["blocks"] if block["type"] == "panel-grid"]
    shown = []
    for grid in grids:
        for run_set in grid["runSets"]:
            values = {f["key"]["name"]: f["value"] for f in run_set["filters"]["filters"]}
            assert [g["name"] for g in run_set["grouping"]] == ["exp_name.value"] and "project" not in run_set
            shown.append((run_set["name"], values["exp_name"], values["env_id"]))
    assert shown == [("RAC-SAC", "rac_sac", "Ant-v4"), ("REDQ", "redq", "Ant-v4"), ("RAC-SAC", "rac_sac", "Ant-v4"),
                     ("RAC-ITM", "rac_itm", "Hopper-v4"), ("RAC-ITM", "rac_itm", "Hopper-v4")]  # fmt: skip
    panels = [{p["config"]["chartTitle"]: p["config"] for p in grid["panelBankSectionConfig"]["panels"]} for grid in grids]
    best = panels[0]["return of the best policy"]
    assert best["metrics"] == ["eval/best_return"] and best["xAxis"] == "global_step"
    assert (best["groupAgg"], best["groupArea"]) == ("mean", "stddev")
    assert panels[0]["mean of normalised value bias"]["metrics"] == ["eval/bias_mean"]
    assert panels[1]["return per beta"]["metrics"] == [f"eval/return_{b}" for b in BETAS]
    assert panels[1]["temperature per beta"]["metrics"] == [f"eval/alpha_{b}" for b in BETAS]
    assert panels[3]["best k"]["metrics"] == ["eval/best_k"]
    markdown = [block["content"] for block in written["spec"]["blocks"] if block["type"] == "markdown-block"]
    assert len(markdown) == len(tables(text)) and all(table in text for table in markdown)
    # The names of the panels are those that the scripts log.
    logged = {column for name in ("eval.csv", "train.csv") for column in (whole[0] / name).read_text().split("\n")[0].split(",")}
    metrics = {m for p in (panels[0],) for config in p.values() for m in config["metrics"]}
    assert metrics <= logged and "eval/return_0.8" in logged

    _, err, _ = report(tmp_path, "runs", "--publish", "--project", "mine", "--entity", "me", WANDB_MODE="offline")
    assert "WANDB_MODE is offline" in err and "projects project are not in a report of mine" in err
    assert json.loads(path.read_text())["project"] == {"name": "mine", "entityName": "me"}


def test_untracked_runs_are_not_published(tmp_path):
    make_run(tmp_path / "runs", "rac_sac", "Ant-v4", 1, {1000: 5})
    _, err, _ = report(tmp_path, "runs", "--publish")
    assert err == "not published: none of these runs was tracked; train with --track\n"
