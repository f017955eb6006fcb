"""Links, figures and commands in the documents; not their prose."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

TRACKED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
DOCUMENTS = sorted({"README.md", "benchmark/README.md", *TRACKED})  # the two where there is no git, too
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def text_of(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """Those that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_figures_exist(name):
    path = ROOT / name
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text_of(path))
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text_of(path)), *pictures]:
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), target


def commands(path: Path) -> list[str]:
    """What is run with `python`, in a line of its own or in the text."""
    text = text_of(path).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    spans = re.findall(r"`([^`]+)`", text)
    found = []
    for line in [*lines, *spans]:
        if match := re.search(r"(?:^|&& |\s)python (\S+\.py\b.*)", line):
            found.append(re.sub(r"\s+#\s.*", "", match[1]))
    return found


def options_of(program: Path) -> set[str]:
    """The fields of a program's class of arguments as flags."""
    fields = re.search(r"^class (?:Args|Options):.*?\n\n\n", program.read_text(), re.M | re.S)
    names = re.findall(r"^    (\w+): ", fields[0], re.M)
    options = {"--help"}
    for name in names:
        flag = name.replace("_", "-")
        options |= {f"--{flag}", f"--no-{flag}"}
    return options


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_can_be_run(name):
    """Their files exist and have the flags; what follows a lone -- goes to the scripts."""
    for command in commands(ROOT / name):
        program, *words = shlex.split(command.replace("…", ""))
        if program.startswith(("my_", "runs/")):
            continue
        assert (ROOT / program).is_file(), command
        split = words.index("--") if "--" in words else len(words)
        assert flags(words[:split]) <= options_of(ROOT / program), command
        assert flags(words[split:]) <= options_of(ROOT / "rac_sac.py"), command


def flags(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if re.match(r"--\w", word)}


def test_commands_are_found():
    """Or else, if they were written in another way, test_commands_can_be_run would check nothing."""
    assert len(commands(ROOT / "README.md")) > 8
    assert {"--cuda", "--no-cuda", "--repeats"} <= options_of(ROOT / "benchmark/speed.py")
    assert "--reward" not in options_of(ROOT / "rac_sac.py")  # a field of another class
