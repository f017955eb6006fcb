"""The experiments of the paper as plain data: what is run, under which names. `run.py` runs them, `identity.py` reads names.

A variant is a script with flags under an experiment name (`--exp-name`), which is what runs are grouped by, as in CleanRL.
The same experiment name always means the same settings, so runs are shared: `--num-critics 10` of the sweep over N is the
default, and is the run of `main`.
"""

from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAPER_ENVS = ("Humanoid-v4", "Ant-v4", "Walker2d-v4", "Hopper-v4")
ABLATION_ENVS = ("Walker2d-v4", "Humanoid-v4")  # the paper does not name the environments of its ablations
STEPS = {"Humanoid": 1_000_000, "": 300_000}  # environment steps of a run; "": all others, here and below
REDQ_TARGET_ENTROPY = {"Hopper": -1, "Walker2d": -3, "HalfCheetah": -3, "Ant": -4, "Humanoid": -2}  # of its authors
REDQ_ENTROPY_FLAG = "{--target-entropy of REDQ}"  # stands for the flag with that value; for none in other environments
SMOKE = "smoke_"  # before a variant's name: the same with tiny networks, never to be mixed up with the real one


class Variant(NamedTuple):
    """A script with flags, under an experiment name."""

    label: str  # in reports
    script: str
    flags: str = ""


class Sweep(NamedTuple):
    """One argument of a variant over several values."""

    base: str  # the variant's experiment name
    argument: str
    symbol: str  # in reports
    values: tuple
    default: Any  # the value that is the base variant itself; by environment where it differs


class Experiment(NamedTuple):
    """What is run together."""

    redraws: str  # of the paper
    variants: tuple[str, ...]  # experiment names; none where a sweep of the experiment's name has them
    env_ids: tuple[str, ...]
    flags: str  # of all its runs whose script has them


VARIANTS = {
    "rac_sac": Variant("RAC-SAC", "rac_sac.py"),
    "rac_td3": Variant("RAC-TD3", "rac_td3.py"),
    "vanilla_rac": Variant("Vanilla RAC", "vanilla_rac.py"),
    "rac_itm": Variant("RAC-ITM", "rac_itm.py"),
    "redq": Variant(
        "REDQ",
        "vanilla_rac.py",
        f"--target-rule in-target-min --min-size 2 --q-lr-init 3e-4 --initial-log-alpha 0 {REDQ_ENTROPY_FLAG}",
    ),
    # Compared with REDQ, at the same target entropy.
    "vanilla_rac-redq_entropy": Variant("Vanilla RAC, target entropy of REDQ", "vanilla_rac.py", REDQ_ENTROPY_FLAG),
    "sac": Variant("SAC", "benchmark/baselines.py", "--algorithm sac"),
    "td3": Variant("TD3", "benchmark/baselines.py", "--algorithm td3"),
    "tqc": Variant("TQC", "benchmark/baselines.py", "--algorithm tqc"),
    "tqc20": Variant("TQC20", "benchmark/baselines.py", "--algorithm tqc20"),
    "mbpo": Variant("MBPO", "benchmark/baselines.py", "--algorithm mbpo"),
}
BASELINES = ("sac", "td3", "tqc", "tqc20", "mbpo")

CAPACITY = {"Humanoid": 300_000, "Walker2d": 100_000, "Ant": 200_000, "": 1_000_000}
VANILLA_BETA = {"Humanoid": 0.2, "Ant": 0.2, "Hopper": 0.2, "": 0.3}
SWEEPS = {
    "utd": Sweep("rac_sac", "utd", "G", (1, 5, 10, 20), default=20),
    "ensemble": Sweep("rac_sac", "num_critics", "N", (2, 3, 5, 8, 10), default=10),
    "training": Sweep("rac_sac", "train_beta_max", "a", (0.4, 0.6, 0.8, 1.0, 1.2), default=0.8),
    "exploration": Sweep("rac_sac", "explore_beta_max", "b", (0.2, 0.3, 0.4, 0.6, 0.8), default=0.3),
    "capacity": Sweep("rac_sac", "buffer_size", "capacity", (50_000, 100_000, 200_000, 300_000, 1_000_000), default=CAPACITY),
    "temperature": Sweep("rac_sac", "initial_log_alpha", "xi", (-5, -2, 0), default=-5),
    "temperature_network": Sweep("rac_sac", "temperature_network", "temperature network", (True, False), default=True),
    "warmup": Sweep("rac_sac", "q_lr_init", "initial learning rate (3e-4: no warm-up)", (3e-5, 3e-4), default=3e-5),
    "vanilla_beta": Sweep("vanilla_rac", "beta", "beta", (0.2, 0.3, 0.4, 0.6, 0.8), default=VANILLA_BETA),
    "itm_training": Sweep("rac_itm", "train_k_max", "a", (2, 2.5, 3, 4), default=2),
    "itm_exploration": Sweep("rac_itm", "explore_k_max", "b", (1.25, 1.5, 1.75, 2), default=1.5),
}
VARIANTS |= {
    f"{sweep.base}-{sweep.argument}_{value}": Variant(
        label=f"{VARIANTS[sweep.base].label}, {sweep.symbol} = {value}",
        script=VARIANTS[sweep.base].script,
        flags=f"--{sweep.argument.replace('_', '-')} {value}",
    )
    for sweep in SWEEPS.values()
    for value in sweep.values
}

BIAS = "--snapshot-frequency 10000"  # of which job.py has the value bias measured
TINY = (
    "--no-compile --total-timesteps 500 --learning-starts 200 --q-lr-warmup-end 300 --batch-size 32 --hidden-dim 8 --utd 1 "
    "--num-critics 3 --buffer-size 500 --eval-frequency 100 --eval-episodes 2 --snapshot-frequency 300"
)
TINY_VARIANTS = {"tqc20": "--utd 2"}  # what tells a tiny one apart from another's
EXPERIMENTS = {
    "main": Experiment(
        "tables 1 and 2; learning curves, value bias, return per beta, best beta, temperatures",
        ("rac_sac", "rac_td3", "vanilla_rac-redq_entropy", "rac_itm", "redq", *BASELINES),
        PAPER_ENVS,
        BIAS,
    ),
    "variants": Experiment("RAC-SAC against its variants", ("rac_sac", "vanilla_rac", "rac_itm"), PAPER_ENVS, BIAS),
    **{
        name: Experiment(f"ablation: {sweep.symbol} of {VARIANTS[sweep.base].label}", (), ABLATION_ENVS, BIAS)
        for name, sweep in SWEEPS.items()
    },
    "smoke": Experiment(
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
UTD = {"tqc20": 20, "mbpo": {"HalfCheetah": 40, "": 20}}  # gradient steps of baselines.py per environment step; others 1
ACTION_DIM = {"Humanoid": 17, "Ant": 8, "Walker2d": 6, "HalfCheetah": 6, "Hopper": 3}


class Member(NamedTuple):
    """A variant of an experiment in one environment."""

    exp_name: str
    script: str
    flags: str


def short_name(env_id: str) -> str:
    """Hopper of Hopper-v4 and of namespace/Hopper-v5."""
    return env_id.split("/")[-1].split(":")[-1].rsplit("-v", 1)[0]


def name_in_gymnasium(env_id: str) -> str | None:
    """Hopper of Hopper-v4 and Hopper-v5; None of an id with a module or namespace, whose Hopper is another one."""
    return None if {":", "/"} & set(env_id) else short_name(env_id)


def of_environment(value, env_id: str):
    """A default that may be a dict by environment, with "" for all others."""
    return value.get(short_name(env_id), value[""]) if isinstance(value, dict) else value


def of_gymnasium(value, env_id: str):
    """As of_environment(), but an environment with a module or namespace is one of the others, whatever its name."""
    return value.get(name_in_gymnasium(env_id), value[""]) if isinstance(value, dict) else value


def variant(name: str, env_id: str) -> tuple[str, str]:
    """(script, flags) of a variant, by experiment name; raises KeyError for another name."""
    base = name.removeprefix(SMOKE)
    script = VARIANTS[base].script
    flags = VARIANTS[base].flags
    if base != name and base in TINY_VARIANTS:
        flags += f" {TINY_VARIANTS[base]}"
    entropy = REDQ_TARGET_ENTROPY.get(short_name(env_id))
    return script, flags.replace(REDQ_ENTROPY_FLAG, "" if entropy is None else f"--target-entropy {entropy}").strip()


def members(experiment: str, env_id: str) -> list[Member]:
    """The variants of an experiment in an environment."""
    names = EXPERIMENTS[experiment].variants
    if experiment in SWEEPS:
        sweep = SWEEPS[experiment]
        default = of_environment(sweep.default, env_id)
        names = [sweep.base if value == default else f"{sweep.base}-{sweep.argument}_{value}" for value in sweep.values]
    return [Member(name, *variant(name, env_id)) for name in names]
