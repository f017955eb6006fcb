"""benchmark/report.py: tables with numbers checked by hand, on tiny run directories."""

import json
import re
import sys
import time

import pandas as pd
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import report as program

pytestmark = pytest.mark.benchmark
HEADER = "global_step,charts/wall_seconds,eval/best_return\n"


@pytest.fixture
def make_runs(tmp_path):
    """Writes the run directories of seeds 1, 2 and so on. Returns the last one.

    seeds: for each, step -> return of the best policy. columns: more of eval.csv. settings: more than what every run needs.
    """

    def make(env_id, exp_name, *seeds, columns=None, **settings):
        for seed, returns in enumerate(seeds, 1):
            folder = tmp_path / f"runs/{env_id}__{exp_name}__{seed}__{time.time_ns()}"
            folder.mkdir(parents=True)
            args = {"env_id": env_id, "exp_name": exp_name, "seed": seed, "total_timesteps": 9000} | settings
            (folder / "config.json").write_text(json.dumps({"args": args}))
            rows = {"global_step": returns.keys(), "charts/wall_seconds": 3600, "eval/best_return": returns.values()}
            pd.DataFrame(rows | (columns or {})).to_csv(folder / "eval.csv", index=False)
        return folder

    return make


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Writes the report of these runs. Returns its text, with single spaces."""

    def write(*options):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["report.py", "runs", "--bootstrap", "50", *options])
        program.main()
        text = (tmp_path / "report/report.md").read_text(encoding="utf-8")
        return re.sub(" +", " ", text)

    return write


def test_final_return_is_at_the_last_step_that_all_seeds_have(make_runs, report):
    make_runs("Hopper-v4", "rac_sac", {5000: 0, 6000: 100, 7000: 900}, {5000: 0, 6000: 300})
    text = report()
    # 100 and 300: sample standard deviation 200 / sqrt(2)
    assert "| Hopper-v4 | rac_sac | 6,000 | 200 ± 141 (2) | 300,000 | 3,421 ± 483 |" in text
    assert "| Hopper-v4 | tqc | - | - | 3,000,000 | 3,011 ± 866 |" in text
    assert "| 1 | 7,000 | 9,000 | 900 |" in text  # seed, last step, of, return


def test_a_seed_counts_at_a_step_for_less_than_one_evaluation_interval(make_runs, report):
    # The last seed was evaluated 1,000 steps before 16,666: it does not count
    seeds = [{15_000: 100, 15_667: 200, 17_000: 900}, {16_666: 400}, {15_666: 800}]
    make_runs("Hopper-v4", "rac_sac", *seeds, eval_frequency=1000)
    assert "| Hopper-v4 | 16,666 | 300 ± 141 (2) |" in report()


def test_returns_beside_published_ones(make_runs, report):
    make_runs("Hopper-v4", "rac_sac", {16_666: 457.5, 66_664: 3088})
    make_runs("Hopper-v4", "mine", {16_666: 7})
    text = report()
    # REDQ has 914.6 there, of which 457.5 is half; of the others DroQ's mean is the highest
    assert "| Hopper-v4 | 16,666 | 7 (1) | 458 (1) | 915 ± 750 | 249 ± 95 | DroQ (UTD 20) 794 ± 750 | 0.50 |" in text
    # MBPO has 2,644 there, but of Hopper-v2
    assert "| Hopper-v4 | 66,664 | - | 3,088 (1) | 3,088 ± 682 | 772 ± 438 | CrossQ 2,247 ± 1,189 | 1.00 |" in text
    assert "| Hopper-v4 | 300,000 |" not in text
    text = report("--published", "MBPO")
    assert "| mine | rac_sac | MBPO, published | best other, published |" in text
    assert "| Hopper-v4 | 16,666 | 7 (1) | 458 (1) | 473 | REDQ (UTD 20) 915 ± 750 | 0.50 |" in text


def test_published_curves_are_all_of_an_algorithm_or_one(make_runs, report):
    make_runs("Hopper-v4", "mine", {100_000: 7})
    text = report("--published", "Simba (UTD 8)")
    assert "| mine | Simba (UTD 8), published | best other, published |" in text
    assert "| Hopper-v4 | 100,000 | 7 (1) | 3,116 ± 64 | SimbaV2 (UTD 4) 3,386 ± 141 |" in text
    text = report("--published", "Simba")
    assert "| Simba (UTD 2), published | Simba (UTD 4), published | Simba (UTD 8), published | best other, published |" in text


def test_samples_to_return_are_of_the_mean_over_all_seeds(make_runs, report):
    # means 950 at 2,000 and 1,000 at 3,000
    make_runs("Ant-v4", "rac_sac", {1000: 0, 2000: 1500, 3000: 1500, 4000: 9000}, {1000: 0, 2000: 400, 3000: 500})
    text = report()
    assert "| Ant-v4 | rac_sac | 1,000 | 3,000 | 21,000 |" in text
    assert "| Ant-v4 | rac_sac | 3,000 | - | 56,000 |" in text
    assert "| Ant-v4 | redq | 1,000 | - | 28,000 |" in text


def test_interquartile_mean_and_probability_of_improvement(make_runs, report):
    scores = (0.1, 0.2, 0.4, 9)  # the middle half: 0.2 and 0.4
    make_runs("Hopper-v4", "rac_sac", *({5000: 3421 * score} for score in scores))
    make_runs("Hopper-v4", "worse", {5000: 34.21, 6000: 9000})  # at the common end worse than any of these
    make_runs("Ant-v4", "worse", {5000: 1})  # where rac_sac did not run
    text = report()
    assert "| rac_sac | 0.30 |" in text
    assert "| worse | 0.01 | 0.01 | 0.01 |" in text
    assert "| rac_sac over worse | 1 | 1 | 1 |" in text
    assert "Hopper-v4 at 5,000." in text


def test_what_differs_in_a_group_and_a_seed_that_is_there_twice_are_named(make_runs, report, capsys):
    make_runs("Hopper-v4", "rac_sac", {5000: 1}, utd=20, eval_workers=1, gamma=0.99)  # what a run lacks is no difference
    make_runs("Hopper-v4", "rac_sac", {5000: 3}, {5000: 5}, utd=5, eval_workers=4)
    make_runs("Ant-v4", "rac_sac", {5000: 5}, utd=1)  # another group
    text = report()
    assert capsys.readouterr().err.splitlines() == [
        "warning: runs of rac_sac on Hopper-v4 differ in utd: 20, 5",
        "warning: rac_sac on Hopper-v4 has more than one run with seed 1, and all count",
    ]
    assert "differ in utd: 20, 5" in text
    assert "| Hopper-v4 | rac_sac | 5,000 | 3 ± 2 (3) |" in text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"args": '),
        ("config.json", '{"args": {"env_id": "Ant-v4"}}'),
        ("eval.csv", HEADER),
        ("eval.csv", f"{HEADER}5000,1.0,many\n"),
    ],
)
def test_a_directory_that_cannot_be_read_is_named_and_left_out(make_runs, report, file, content):
    make_runs("Ant-v4", "good", {5000: 1})
    folder = make_runs("Ant-v4", "damaged", {5000: 1})
    (folder / file).write_text(content)
    text = report()
    assert f"{folder.name} is left out: " in text
    assert "| damaged |" not in text
    assert "| Ant-v4 | good | 5,000 | 1 (1) |" in text


def test_returns_that_are_nan_are_left_out_with_a_warning(make_runs, report):
    folder = make_runs("Hopper-v4", "rac_sac", {5000: 1, 6000: float("nan"), 7000: float("nan")})
    text = report()
    assert f"{folder.name}: 2 evaluations with a return of NaN are left out" in text
    assert "| Hopper-v4 | rac_sac | 5,000 | 1 (1) |" in text


def test_links_are_followed_and_a_run_counts_once(make_runs, report, tmp_path):
    folder = make_runs("Hopper-v4", "rac_sac", {5000: 1})
    folder.rename(tmp_path / "elsewhere")
    for name in ("one", "two"):
        (tmp_path / "runs" / name).symlink_to(tmp_path / "elsewhere")
    assert "| Hopper-v4 | rac_sac | 5,000 | 1 (1) |" in report()


def test_a_row_that_a_kill_has_cut_is_left_out(make_runs, report):
    # 12: the beginning of another return
    (make_runs("Hopper-v4", "rac_sac", {}) / "eval.csv").write_text(HEADER + "6000,3600,1234\n7000,3600,12")
    assert "| Hopper-v4 | rac_sac | 6,000 | 1,234 (1) |" in report()


def test_fresh_episodes_are_those_of_the_best_policy_at_the_last_step(make_runs, report):
    columns = {"eval/best_return_std": 20, "eval/best_beta": 0.2}
    folder = make_runs("Hopper-v4", "rac_sac", {5000: 1, 6000: 2000}, columns=columns)
    rows = "5000,0.2,1400,30,1\n6000,0.2,1500,30,1\n6000,0.4,1800,30,0\n"
    (folder / "evaluate.csv").write_text(f"global_step,beta,return,return_std,best_in_training\n{rows}")
    assert "| 2,000 ± 20 | 0.20 | 1 | 1,500 ± 30 |" in report()


def test_families_of_policies_and_value_bias_are_drawn_where_there_are_any(make_runs, report, tmp_path):
    alpha = {"eval/alpha_0.0666667": 0.1, "eval/alpha_0.133333": 0.2}
    beta = {"eval/best_beta": 0.2, "eval/return_0.0666667": 1, "eval/return_0.133333": 2}
    make_runs("Hopper-v4", "rac_sac", {5000: 1, 6000: 2}, columns=beta | alpha)
    k = {"eval/best_k": 1.08333, "eval/return_1.08333": 1, "eval/return_1.25": 3, "eval/return_1.16667": 2}
    make_runs("Hopper-v4", "rac_itm", {5000: 3}, columns=k)
    folder = make_runs("Hopper-v4", "sac", {5000: 1})
    (folder / "bias.csv").write_text("global_step,eval/bias_mean,eval/bias_std\n5000,0.1,0.2\n5500,0.1,0.2\n")
    text = report()
    assert "| 3 | 1.08 |" in text  # return and best k
    titles = ["Average return", "Mean of the value bias", "Std of the value bias", "Best beta", "Best k"]
    titles += ["rac_itm: return of each policy", "rac_sac: return of each policy", "rac_sac: alpha of each policy"]
    figures = dict(re.findall(r"!\[(.*)\]\((.*)\)", text))
    assert list(figures) == titles
    for name in figures.values():
        figure = tmp_path / "report" / name
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert figure.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_runs_of_a_sweep_are_an_ablation_beside_their_variant(make_runs, report):
    make_runs("Walker2d-v4", "rac_sac", {5000: 20})
    make_runs("Walker2d-v4", "rac_sac-utd_5", {5000: 5})
    make_runs("Walker2d-v4", "vanilla_rac-redq_entropy", {5000: 9})  # a variant, not a value of a sweep
    make_runs("Ant-v4", "rac_sac", {5000: 20})  # alone
    main, ablation = report().split("## Ablation of rac_sac, utd: final return\n")
    assert "| Walker2d-v4 | vanilla_rac-redq_entropy | 5,000 | 9 (1) |" in main
    assert "rac_sac-" not in main
    assert "| Walker2d-v4 | 5 | 5,000 | 5 (1) |\n| Walker2d-v4 | default | 5,000 | 20 (1) |" in ablation
    assert "| Ant-v4 | default |" not in ablation
    assert "![Ablation of rac_sac, utd: Average return]" in ablation


def test_runs_of_another_program_in_an_environment_of_its_own(make_runs, report):
    make_runs("Pendulum-v1", "mine", {100: -1500, 300: -200}, {100: -1100, 350: -400})
    text = report()
    assert "| Pendulum-v1 | mine | 300 | -650 ± 636 (2) |" in text  # -200 and, evaluated every 250 steps, -1,100
    assert "warning" not in text
