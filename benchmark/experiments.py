"""The experiments of the paper as plain data: what is run, under which names. `run.py` runs them, `identity.py` reads names.

A variant is a script with flags under an experiment name (`--exp-name`), which is what runs are grouped by, as in CleanRL.
The same experiment name always means the same settings, so runs are shared: `--num-critics 10` of the sweep over N is the
default, and is the run of `main`.
"""

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
    "mbpo": ("MBPO", "benchmark/baselines.py", "--algorithm mbpo"),
}
BASELINES = ("sac", "td3", "tqc", "tqc20", "mbpo")

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
TINY_VARIANTS = {"tqc20": "--utd 2"}  # what tells a tiny one apart from another's
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
UTD = {"tqc20": 20, "mbpo": {"HalfCheetah": 40, "": 20}}  # gradient steps of baselines.py per environment step; others 1
ACTION_DIM = {"Humanoid": 17, "Ant": 8, "Walker2d": 6, "HalfCheetah": 6, "Hopper": 3}


def short_name(env_id: str) -> str:
    """Hopper of Hopper-v4 and of namespace/Hopper-v5."""
    return env_id.split("/")[-1].split(":")[-1].rsplit("-v", 1)[0]


def of_environment(value, env_id: str):
    """A default that may be a dict by environment, with "" for all others."""
    return value.get(short_name(env_id), value[""]) if isinstance(value, dict) else value


def variant(name: str, env_id: str) -> tuple[str, str]:
    """(script, flags) of a variant, by experiment name; raises KeyError for another name."""
    base = name.removeprefix(SMOKE)
    _, script, flags = VARIANTS[base]
    if base != name and base in TINY_VARIANTS:
        flags += f" {TINY_VARIANTS[base]}"
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
