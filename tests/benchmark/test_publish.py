"""benchmark/publish.py: the report as wandb-workspaces would send it, without a network."""

import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import publish
import pydantic
import wandb_workspaces.reports.v2 as wr

pytestmark = pytest.mark.benchmark
REPORT = """# Report

## Final return

| env_id | return |
|---|---|
| Hopper-v4 | 2,540 |

![curves](curves.png)

## Learning curves

![more](more.png)
"""


def built(**options) -> list[dict]:
    """The blocks of a report, as data."""
    report = publish.build(publish.Options(entity="team", **options))
    content = json.loads(pydantic.TypeAdapter(wr.Report).dump_json(report))
    assert (content["entity"], content["project"]) == ("team", "realistic-actor-critic")
    return content["blocks"]


def test_curves_and_family_of_each_environment():
    grids = [block for block in built(env_ids=("Hopper-v4", "Ant-v4")) if "panels" in block]
    runs = [grid["runsets"][0] for grid in grids]
    assert [run["groupby"] for run in runs] == [["config.exp_name"]] * 4
    assert ["Hopper-v4" in run["filters"] for run in runs] == [True, True, False, False]
    panels = grids[0]["panels"] + grids[1]["panels"]
    metrics = [*panels[0]["y"], *(panel["metric_regex"] for panel in panels[-3:])]
    assert metrics == ["eval/best_return", "eval/return_.*", "eval/best_(beta|k)", "eval/alpha_.*"]


def test_tables_of_a_report(tmp_path):
    """Sections without a table are left out, and so are figures, which are files beside the report."""
    (tmp_path / "report.md").write_text(REPORT)
    blocks = built(env_ids=("Hopper-v4",), report=tmp_path / "report.md")
    assert [block["text"] for block in blocks[-3:-1]] == ["Tables", "Final return"]
    assert blocks[-1]["text"].strip() == "| env_id | return |\n|---|---|\n| Hopper-v4 | 2,540 |"


def test_without_a_login(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(sys, "argv", ["publish.py", "--entity", "team"])
    with pytest.raises(SystemExit, match=r"error: not published: .*`wandb login` stores a key, and the same command tries again"):
        publish.main()
