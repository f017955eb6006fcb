"""What an experiment name stands for: its settings, how a run differs from them, and how a report calls it."""

import re
from pathlib import Path

from experiments import (
    ACTION_DIM,
    CAPACITY,
    HOUSEKEEPING,
    SMOKE,
    TINY,
    UTD,
    VANILLA_BETA,
    VARIANTS,
    of_environment,
    of_gymnasium,
    short_name,
    variant,
)
from flags import differs, given, script_defaults


def parts_of(exp_name: str) -> tuple[str, list[tuple[str, str]]]:
    """The variant's name without smoke_ before it, and (flag, value) of every +flag_value after it.

    A + within a number (1e+0) is none of them; the flag of one without _ is empty.
    """
    name, *extra = re.split(r"\+(?=[A-Za-z_])", exp_name.removeprefix(SMOKE))
    return name, [item.rpartition("_")[::2] for item in extra]


def expected(exp_name: str, env_id: str, kept: Path | None = None) -> dict | None:
    """The settings that an experiment name stands for, as far as they are known; None for a name that is not from here.

    The defaults of the script, those that it fills in by environment, and the flags of the variant and of its +flag_value.
    kept: a copy of the script that a run has kept, whose defaults count in place of today's.
    """
    name, changed = parts_of(exp_name)
    if name not in VARIANTS:
        return None
    script, flags = variant(SMOKE + name if exp_name.startswith(SMOKE) else name, env_id)
    source = kept if kept and kept.name == Path(script).name else script
    settings = {**script_defaults(str(source)), "script": Path(script).stem}
    if exp_name.startswith(SMOKE):
        settings.update({key: value for key, value in given(TINY).items() if key in settings})
    settings.update(given(flags))
    if not dict(changed).keys() <= settings.keys():  # somebody's own name
        return None
    settings.update(changed)
    filled = {
        "buffer_size": 1_000_000 if script == "vanilla_rac.py" else of_environment(CAPACITY, env_id),
        "beta": of_environment(VANILLA_BETA, env_id),
        "eval_beta_max": settings.get("train_beta_max"),
        "eval_k_max": settings.get("train_k_max"),
        "utd": of_gymnasium(UTD.get(settings.get("algorithm"), 1), env_id),
        "target_entropy": -ACTION_DIM[short_name(env_id)] if short_name(env_id) in ACTION_DIM else None,
    }
    settings.update({key: value for key, value in filled.items() if key in settings and settings[key] is None})
    return {key: value for key, value in settings.items() if key not in HOUSEKEEPING and value is not None}


def deviations(args: dict, script: str, exp_name: str, env_id: str, kept: Path | None = None) -> dict:
    """The settings in a run's config.json that are not those that an experiment name stands for; {} for an unknown name.

    kept: see expected().
    """
    wanted = expected(exp_name, env_id, kept) or {}
    saved = {**args, "script": script}
    for name in ("beta", "k"):  # evaluated up to where it is trained, unless the experiment name says otherwise
        evaluated, trained = f"eval_{name}_max", f"train_{name}_max"
        if evaluated in wanted and trained in saved and not differs(wanted[evaluated], wanted.get(trained)):
            wanted[evaluated] = saved[trained]
    return {key: saved[key] for key, value in wanted.items() if key in saved and differs(saved[key], value)}


def label(exp_name: str, shared=()) -> str:
    """How a report calls the runs of an experiment name; a name that is not in this file stands for itself.

    shared: flags that it leaves out.
    """
    name, changed = parts_of(exp_name)
    details = ["tiny"] if exp_name.startswith(SMOKE) else []
    details += [f"{flag} {value}".replace("_", " ").strip() for flag, value in changed if flag not in shared]
    text = VARIANTS[name].label if name in VARIANTS else name
    return f"{text} ({', '.join(details)})" if details else text
