"""What holds the project's files together."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, of_the_four


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


def test_every_argument_is_used(script):
    """Somewhere, as args.NAME."""
    used = re.findall(r"\bargs\.(\w+)", Path(script.__file__).read_text())
    assert vars(script.Args()).keys() <= {*used}


@pytest.mark.slow
@of_the_four
def test_a_fork_is_tested(cli):
    """By --script: one that cannot train fails every test of resuming."""
    fork = cli.fork("    device = torch.device(", "    raise KeyError('mine')\n    device = torch.device(")
    command = [sys.executable, "-m", "pytest", "-n", "0", "tests/test_resume.py", "--script", fork.path]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert re.search(r"^=+ \d\d failed, \d+ deselected in .*s =+$", out, re.M), out
