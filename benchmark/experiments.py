"""The experiments of the paper as plain data: what is run, under which names. `run.py` runs them, `report.py` labels them.

A variant is a script with flags under an experiment name (`--exp-name`), which is what runs are grouped by, as in CleanRL.
The same experiment name always means the same settings, so runs are shared: `--num-critics 10` of the sweep over N is the
default, and is the run of `main`.
"""

import ast
import contextlib
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAPER_ENVS = ("Humanoid-v4", "Ant-v4", "Walker2d-v4", "Hopper-v4")
ABLATION_ENVS = ("Walker2d-v4", "Humanoid-v4")  # the paper does not name the environments of its ablations
STEPS = {"Humanoid": 1_000_000, "": 300_000}  # environment steps of a run; "": all others, here and below
REDQ_TARGET_ENTROPY = {"Hopper": -1, "Walker2d": -3, "HalfCheetah": -3, "Ant": -4, "Humanoid": -2}  # of its authors
REDQ_ENTROPY_FLAG = "{--target-entropy of REDQ}"  # stands for the flag with that value; for none in other environments
SMOKE = "smoke_"  # before a variant's name: the same with tiny networks, never to be mixed up with the real one

# Experiment name: (label, script, flags).
VARIANTS = {
    "rac_sac": ("RAC-SAC", "rac_sac.py", ""),
    "rac_td3": ("RAC-TD3", "rac_td3.py", ""),
    "vanilla_rac": ("Vanilla RAC", "vanilla_rac.py", ""),
    "rac_itm": ("RAC-ITM", "rac_itm.py", ""),
    "redq": (
        "REDQ",
        "vanilla_rac.py",
        f"--target-rule in-target-min --min-size 2 --q-lr-init 3e-4 --initial-log-alpha 0 {REDQ_ENTROPY_FLAG}",
    ),
    # Compared with REDQ, at the same target entropy.
    "vanilla_rac-redq_entropy": ("Vanilla RAC, target entropy of REDQ", "vanilla_rac.py", REDQ_ENTROPY_FLAG),
    "sac": ("SAC", "benchmark/baselines.py", "--algorithm sac"),
    "td3": ("TD3", "benchmark/baselines.py", "--algorithm td3"),
    "tqc": ("TQC", "benchmark/baselines.py", "--algorithm tqc"),
    "tqc20": ("TQC20", "benchmark/baselines.py", "--algorithm tqc20"),
}
BASELINES = ("sac", "td3", "tqc", "tqc20")

# Sweep: (base variant, argument, symbol, values, its default, which is the base variant itself; by environment where it differs).
CAPACITY = {"Humanoid": 300_000, "Walker2d": 100_000, "Ant": 200_000, "": 1_000_000}
VANILLA_BETA = {"Humanoid": 0.2, "Ant": 0.2, "Hopper": 0.2, "": 0.3}
SWEEPS = {
    "utd": ("rac_sac", "utd", "G", (1, 5, 10, 20), 20),
    "ensemble": ("rac_sac", "num_critics", "N", (2, 3, 5, 8, 10), 10),
    "training": ("rac_sac", "train_beta_max", "a", (0.4, 0.6, 0.8, 1.0, 1.2), 0.8),
    "exploration": ("rac_sac", "explore_beta_max", "b", (0.2, 0.3, 0.4, 0.6, 0.8), 0.3),
    "capacity": ("rac_sac", "buffer_size", "capacity", (50_000, 100_000, 200_000, 300_000, 1_000_000), CAPACITY),
    "temperature": ("rac_sac", "initial_log_alpha", "xi", (-5, -2, 0), -5),
    "temperature_network": ("rac_sac", "temperature_network", "temperature network", (True, False), True),
    "warmup": ("rac_sac", "q_lr_init", "initial learning rate (3e-4: no warm-up)", (3e-5, 3e-4), 3e-5),
    "vanilla_beta": ("vanilla_rac", "beta", "beta", (0.2, 0.3, 0.4, 0.6, 0.8), VANILLA_BETA),
    "itm_training": ("rac_itm", "train_k_max", "a", (2, 2.5, 3, 4), 2),
    "itm_exploration": ("rac_itm", "explore_k_max", "b", (1.25, 1.5, 1.75, 2), 1.5),
}
VARIANTS |= {
    f"{base}-{argument}_{value}": (
        f"{VARIANTS[base][0]}, {symbol} = {value}",
        VARIANTS[base][1],
        f"--{argument.replace('_', '-')} {value}",
    )
    for base, argument, symbol, values, _ in SWEEPS.values()
    for value in values
}

# Experiment: (what it redraws, variants or the name of a sweep, environments, flags of all its runs whose script has them).
BIAS = "--snapshot-frequency 10000"  # of which job.py has the value bias measured
TINY = (
    "--no-compile --total-timesteps 500 --learning-starts 200 --q-lr-warmup-end 300 --batch-size 32 --hidden-dim 8 --utd 1 "
    "--num-critics 3 --buffer-size 500 --eval-frequency 100 --eval-episodes 2 --snapshot-frequency 300"
)
EXPERIMENTS = {
    "main": (
        "tables 1 and 2; learning curves, value bias, return per beta, best beta, temperatures",
        ("rac_sac", "rac_td3", "vanilla_rac-redq_entropy", "rac_itm", "redq", *BASELINES),
        PAPER_ENVS,
        BIAS,
    ),
    "variants": ("RAC-SAC against its variants", ("rac_sac", "vanilla_rac", "rac_itm"), PAPER_ENVS, BIAS),
    **{
        name: (f"ablation: {symbol} of {VARIANTS[base][0]}", name, ABLATION_ENVS, BIAS)
        for name, (base, _, symbol, *_) in SWEEPS.items()
    },
    "smoke": (
        "nothing: tiny networks, seconds",
        tuple(SMOKE + name for name in ("rac_sac", "rac_td3", "vanilla_rac", "rac_itm", "redq", *BASELINES)),
        ("Hopper-v4", "InvertedPendulum-v4"),
        TINY,
    ),
}

# Arguments that change how a run is done, not what it learns.
HARMLESS = (
    "track",
    "wandb_project_name",
    "wandb_entity",
    "capture_video",
    "checkpoint_seconds",
    "compile",
    "cudagraphs",
    "cuda",
    "torch_deterministic",
    "eval_workers",
    "max_pending_evaluations",
    "snapshot_frequency",
    "bias_frequency",  # of earlier versions of the scripts
)
HOUSEKEEPING = (*HARMLESS, "seed", "env_id", "exp_name", "run_root", "run_name", "resume", "evaluate", "total_timesteps")
ACTION_DIM = {"Humanoid": 17, "Ant": 8, "Walker2d": 6, "HalfCheetah": 6, "Hopper": 3}


def short_name(env_id: str) -> str:
    """Hopper of Hopper-v4 and of namespace/Hopper-v5."""
    return env_id.split("/")[-1].split(":")[-1].rsplit("-v", 1)[0]


def of_environment(value, env_id: str):
    """A default that may be a dict by environment, with "" for all others."""
    return value.get(short_name(env_id), value[""]) if isinstance(value, dict) else value


def variant(name: str, env_id: str) -> tuple[str, str]:
    """(script, flags) of a variant, by experiment name; raises KeyError for another name."""
    _, script, flags = VARIANTS[name.removeprefix(SMOKE)]
    entropy = REDQ_TARGET_ENTROPY.get(short_name(env_id))
    return script, flags.replace(REDQ_ENTROPY_FLAG, "" if entropy is None else f"--target-entropy {entropy}").strip()


def members(experiment: str, env_id: str) -> list[tuple[str, str, str]]:
    """(experiment name, script, flags) of every variant of an experiment in an environment."""
    names = EXPERIMENTS[experiment][1]
    if isinstance(names, str):
        base, argument, _, values, default = SWEEPS[names]
        default = of_environment(default, env_id)
        names = [base if value == default else f"{base}-{argument}_{value}" for value in values]
    return [(name, *variant(name, env_id)) for name in names]


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


def differs(saved, wanted) -> bool:
    """Whether a value of config.json is another one than a default or a command line's word."""
    try:
        return float(saved) != float(wanted)
    except (TypeError, ValueError):
        return str(saved) != str(wanted)


@functools.cache
def script_defaults(script: str) -> dict:
    """The defaults in a script's class Args, {} without one, from its source: importing it would import torch."""
    tree = ast.parse((ROOT / script).read_text())
    fields = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"), [])
    found = {}
    for node in fields:
        with contextlib.suppress(ValueError):  # exp_name
            if isinstance(node, ast.AnnAssign):
                found[node.target.id] = ast.literal_eval(node.value)
    return found


def parts_of(exp_name: str) -> tuple[str, list[tuple[str, str]]]:
    """The variant's name without smoke_ before it, and (flag, value) of every +flag_value after it.

    A + within a number (1e+0) is none of them; the flag of one without _ is empty.
    """
    name, *extra = re.split(r"\+(?=[A-Za-z_])", exp_name.removeprefix(SMOKE))
    return name, [item.rpartition("_")[::2] for item in extra]


def expected(exp_name: str, env_id: str) -> dict | None:
    """The settings that an experiment name stands for, as far as they are known; None for a name that is not from here.

    The defaults of the script, those that it fills in by environment, and the flags of the variant and of its +flag_value.
    """
    name, changed = parts_of(exp_name)
    if name not in VARIANTS:
        return None
    script, flags = variant(name, env_id)
    settings = {**script_defaults(script), "script": Path(script).stem}
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
        "utd": 20 if settings.get("algorithm") == "tqc20" else 1,
        "target_entropy": -ACTION_DIM[short_name(env_id)] if short_name(env_id) in ACTION_DIM else None,
    }
    settings.update({key: value for key, value in filled.items() if key in settings and settings[key] is None})
    return {key: value for key, value in settings.items() if key not in HOUSEKEEPING and value is not None}


def deviations(args: dict, script: str, exp_name: str, env_id: str) -> dict:
    """The settings in a run's config.json that are not those that an experiment name stands for; {} for an unknown name."""
    wanted, saved = expected(exp_name, env_id) or {}, {**args, "script": script}
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
    text = VARIANTS[name][0] if name in VARIANTS else name
    return f"{text} ({', '.join(details)})" if details else text
