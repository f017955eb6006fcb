"""What holds the project's files together."""

import ast
import importlib
import re
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
    assert vars(module.Args()).keys() - used == set()


def test_every_experiment_is_in_the_readme(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    from run import EXPERIMENTS

    readme = (ROOT / "benchmark/README.md").read_text()
    assert len(EXPERIMENTS) == 14
    assert all(f"| `{name}` |" in readme for name in EXPERIMENTS.keys() - {"smoke"})
