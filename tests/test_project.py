"""What holds the project's files together."""

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT, SCRIPTS


def pins(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if "==" in line}


@pytest.mark.parametrize("name", SCRIPTS)
def test_inline_metadata_equals_requirements(name):
    """Each file, copied anywhere, runs with `uv run` on the same versions; pytest and its plugin are for the tests alone."""
    source = (ROOT / f"{name}.py").read_text()
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", source)[1]
    metadata = set(tomllib.loads(re.sub(r"^# ?", "", block, flags=re.M))["dependencies"])
    required = pins((ROOT / "requirements.txt").read_text())
    assert metadata == {line for line in required if not line.startswith("pytest")}
    assert all(re.fullmatch(r"[\w\[\]-]+==[\d.]+", line) for line in required)


def test_readme_has_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert "pip install -r requirements.txt && python rac_sac.py --env-id Ant-v4 --utd 20" in readme
    assert "pip install -r requirements.txt && pytest" in readme


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_argument_is_used(name):
    """By its name as an attribute of arguments (args, asked or saved ones)."""
    module, tree = importlib.import_module(name), ast.parse((ROOT / f"{name}.py").read_text())
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value).split(".")[-1] in ("args", "asked", "saved")}
    assert {f.name for f in module.dataclasses.fields(module.Args)} - used == set()


def test_benchmark_readme_is_up_to_date(monkeypatch):
    """Its table of costs is what cost.py prints, every experiment is in it, and every flag named is one."""
    readme = (ROOT / "benchmark/README.md").read_text()
    command = [sys.executable, str(ROOT / "benchmark/speed/cost.py")]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.count("\n") > 10 and table in readme
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    from experiments import EXPERIMENTS
    from run import Options

    names = EXPERIMENTS.keys() - {"smoke"}
    assert len(names) == 13 and all(f"| `{name}` |" in table for name in names)
    known = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Options)}
    commands = re.findall(r"benchmark/run.py ([^`\n]*)", readme)
    used = {flag for command in commands for flag in re.findall(r"--[a-z][\w-]*", command.split(" -- ")[0])}
    assert used and used <= known
    assert {line for line in pins((ROOT / "benchmark/requirements.txt").read_text())} >= {"pandas==2.3.3", "rliable==1.2.0"}
