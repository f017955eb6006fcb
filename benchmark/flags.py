"""Arguments as words of a command line, in config.json and in a script's source."""

import ast
import contextlib
import functools
import math
from pathlib import Path

from experiments import ROOT


def split_words(words: list[str] | tuple[str, ...]) -> list[str]:
    """--utd=5 as two words."""
    return [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]


def given(flags: str | list[str]) -> dict[str, str]:
    """The arguments in command-line flags (a line, or its words) by field name; --no-compile is compile: False."""
    found, words = {}, flags.split() if isinstance(flags, str) else list(flags)
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        if words and not words[0].startswith("--"):
            found[name] = words.pop(0)
        else:
            found[name.removeprefix("no_")] = str(not name.startswith("no_"))
    return found


def canonical(value: str, default) -> str:
    """A number as Python writes one of its argument's type, so that 3e-4 and 0.0003, or 1 and 1.0, are one setting.

    Words of arguments that are no numbers by their default stay as they are.
    """
    if isinstance(default, bool | str):
        return value
    with contextlib.suppress(ValueError, SyntaxError):
        number = ast.literal_eval(value)
        if type(number) in (int, float) and math.isfinite(number):
            return str(float(number) if isinstance(default, float) else number)
    return value


def differs(saved, wanted) -> bool:
    """Whether a value of config.json is another one than a default or a command line's word."""
    try:
        return float(saved) != float(wanted)
    except (TypeError, ValueError):
        return str(saved) != str(wanted)


@functools.cache
def script_arguments(script: str) -> dict[str, ast.expr | None]:
    """The arguments in a script's class Args, {} without one, and their defaults, from its source: importing it takes torch.

    script: a path, or one below the project's folder.
    """
    tree = ast.parse(Path(ROOT, script).read_text())
    fields = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"), [])
    return {node.target.id: node.value for node in fields if isinstance(node, ast.AnnAssign)}


@functools.cache
def script_defaults(script: str) -> dict:
    """Those of a script's defaults that are plain values; an expression, such as exp_name's, is none."""
    found = {}
    for name, value in script_arguments(script).items():
        with contextlib.suppress(ValueError):
            found[name] = ast.literal_eval(value)
    return found
