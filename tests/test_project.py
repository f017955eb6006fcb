"""What holds the project's files together."""

import re

from conftest import ROOT

import rac_sac


def pins(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if "==" in line}


def test_inline_metadata_equals_requirements():
    """The one file, copied anywhere, runs with `uv run` on the same versions; only pytest is for the tests alone."""
    source = (ROOT / "rac_sac.py").read_text()
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", source)[1]
    metadata = {line.strip('#", ') for line in block.splitlines() if "==" in line}
    required = pins((ROOT / "requirements.txt").read_text())
    assert metadata == {line for line in required if not line.startswith("pytest==")}
    assert all(re.fullmatch(r"[\w\[\]-]+==[\d.]+", line) for line in required)


def test_readme_has_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert "pip install -r requirements.txt && python rac_sac.py --env-id Ant-v4 --utd 20" in readme
    assert "pip install -r requirements.txt && pytest" in readme


def test_readme_names_no_argument_that_does_not_exist():
    readme = (ROOT / "README.md").read_text()
    known = {f"--{f.name.replace('_', '-')}" for f in rac_sac.dataclasses.fields(rac_sac.Args)}
    known |= {"--help"} | {name.replace("--", "--no-", 1) for name in known}
    used = {flag for line in readme.splitlines() if "rac_sac.py" in line for flag in re.findall(r"--[a-z][\w-]*", line)}
    assert used <= known, used - known


def test_importing_has_no_option_to_forget():
    """Every argument is used beyond its definition."""
    source = (ROOT / "rac_sac.py").read_text()
    body = source[source.index("STEPS ="):]
    unused = [f.name for f in rac_sac.dataclasses.fields(rac_sac.Args) if f'{f.name}' not in body]
    assert unused == []
