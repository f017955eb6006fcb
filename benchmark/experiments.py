"""The experiments of the paper as plain data: what is run, under which names. `run.py` runs them, `report.py` labels them.

A variant is a script with flags under an experiment name (`--exp-name`), which is what runs are grouped by, as in CleanRL.
The same experiment name always means the same settings, so runs are shared: `--num-critics 10` of the sweep over N is the
default, and is the run of `main`.
"""

PAPER_ENVS = ("Humanoid-v4", "Ant-v4", "Walker2d-v4", "Hopper-v4")
ABLATION_ENVS = ("Walker2d-v4", "Humanoid-v4")  # the paper does not name the environments of its ablations
STEPS = {"Humanoid": 1_000_000}  # environment steps of a run; others 300 000
REDQ_TARGET_ENTROPY = {"Hopper": -1, "Walker2d": -3, "HalfCheetah": -3, "Ant": -4, "Humanoid": -2}  # of its authors

# Experiment name: (label, script, flags). {redq_target_entropy} is that of the environment.
VARIANTS = {
    "rac_sac": ("RAC-SAC", "rac_sac.py", ""),
    "rac_td3": ("RAC-TD3", "rac_td3.py", ""),
    "vanilla_rac": ("Vanilla RAC", "vanilla_rac.py", ""),
    "rac_itm": ("RAC-ITM", "rac_itm.py", ""),
    "redq": ("REDQ", "vanilla_rac.py", "--target-rule in-target-min --min-size 2 --q-lr-init 3e-4 --initial-log-alpha 0 "
             "--target-entropy {redq_target_entropy}"),
    # Compared with REDQ, at the same target entropy.
    "vanilla_rac-redq_entropy": ("Vanilla RAC, target entropy of REDQ", "vanilla_rac.py",
                                 "--target-entropy {redq_target_entropy}"),
    "rac_sac-independent_temperature": ("RAC-SAC, independent temperature", "rac_sac.py", "--no-temperature-network"),
    "rac_sac-no_warmup": ("RAC-SAC, no warm-up", "rac_sac.py", "--q-lr-init 3e-4"),
}  # fmt: skip

# Sweep: (base variant, argument, symbol, values, its default, which is the base variant itself; by environment where it differs).
SWEEPS = {
    "utd": ("rac_sac", "utd", "G", (1, 5, 10, 20), 20),
    "ensemble": ("rac_sac", "num_critics", "N", (2, 3, 5, 8, 10), 10),
    "training": ("rac_sac", "train_beta_max", "a", (0.4, 0.6, 0.8, 1.0, 1.2), 0.8),
    "exploration": ("rac_sac", "explore_beta_max", "b", (0.2, 0.3, 0.4, 0.6, 0.8), 0.3),
    "capacity": ("rac_sac", "buffer_size", "capacity", (50_000, 100_000, 200_000, 300_000, 1_000_000),
                 {"Humanoid": 300_000, "Walker2d": 100_000, "Ant": 200_000, "": 1_000_000}),
    "temperature": ("rac_sac", "initial_log_alpha", "xi", (-5, -2, 0), -5),
    "vanilla_beta": ("vanilla_rac", "beta", "beta", (0.2, 0.3, 0.4, 0.6, 0.8),
                     {"Humanoid": 0.2, "Ant": 0.2, "Hopper": 0.2, "": 0.3}),
    "itm_training": ("rac_itm", "train_k_max", "a", (2, 2.5, 3, 4), 2),
    "itm_exploration": ("rac_itm", "explore_k_max", "b", (1.25, 1.5, 1.75, 2), 1.5),
}  # fmt: skip

# Experiment: (what it redraws, variants or the name of a sweep, environments, flags of all its runs).
BIAS = "--bias-frequency 10000"
TINY = ("--no-compile --total-timesteps 500 --learning-starts 200 --q-lr-warmup-end 300 --batch-size 32 --hidden-dim 8 --utd 1 "
        "--num-critics 3 --buffer-size 500 --eval-frequency 100 --eval-episodes 2 --bias-frequency 300")  # fmt: skip
EXPERIMENTS = {
    "main": ("tables 1 and 2; learning curves, value bias, return per beta, best beta, temperatures",
             ("rac_sac", "rac_td3", "vanilla_rac-redq_entropy", "rac_itm", "redq"), PAPER_ENVS, BIAS),
    "variants": ("RAC-SAC against its variants", ("rac_sac", "vanilla_rac", "rac_itm"), PAPER_ENVS, BIAS),
    **{name: (f"ablation: {symbol} of {base}", name, ABLATION_ENVS, BIAS) for name, (base, _, symbol, *_) in SWEEPS.items()},
    "temperature_network": ("ablation: temperature network on and off",
                            ("rac_sac", "rac_sac-independent_temperature"), ABLATION_ENVS, BIAS),
    "warmup": ("ablation: learning-rate warm-up on and off", ("rac_sac", "rac_sac-no_warmup"), ABLATION_ENVS, BIAS),
    "smoke": ("nothing: tiny networks, seconds",
              ("smoke_rac_sac", "smoke_rac_td3", "smoke_vanilla_rac", "smoke_rac_itm", "smoke_redq"),
              ("Hopper-v4", "InvertedPendulum-v4"), TINY),
}  # fmt: skip
# Arguments that change how a run is done, not what it learns.
HARMLESS = ("track", "wandb_project_name", "wandb_entity", "capture_video", "checkpoint_seconds", "compile", "cudagraphs", "cuda",
            "torch_deterministic", "matmul_precision", "eval_workers", "bias_frequency")  # fmt: skip
SMOKE = "smoke_"  # before a variant's name: the same with tiny networks, never to be mixed up with the real one


def short_name(env_id: str) -> str:
    """Hopper of Hopper-v4 and of namespace/Hopper-v5."""
    return env_id.split("/")[-1].split(":")[-1].rsplit("-v", 1)[0]


def of_environment(value, env_id: str):
    """A default that may be a dict by environment, with "" for all others."""
    return value.get(short_name(env_id), value[""]) if isinstance(value, dict) else value


def members(experiment: str, env_id: str) -> list[tuple[str, str, str]]:
    """(experiment name, script, flags) of every variant of an experiment in an environment."""
    chosen = EXPERIMENTS[experiment][1]
    found = []
    if isinstance(chosen, str):
        base, argument, _, values, default = SWEEPS[chosen]
        _, script, flags = VARIANTS[base]
        for value in values:
            if value == of_environment(default, env_id):
                found.append((base, script, flags))
            else:
                found.append((f"{base}-{argument}_{value}", script, f"{flags} --{argument.replace('_', '-')} {value}".strip()))
    else:
        for name in chosen:
            _, script, flags = VARIANTS[name.removeprefix(SMOKE)]
            entropy = REDQ_TARGET_ENTROPY.get(short_name(env_id), -1)
            found.append((name, script, flags.format(redq_target_entropy=entropy)))
    return found


def base_of(exp_name: str) -> str:
    """The variant's name without smoke_ before it and without +flag_value after it."""
    return exp_name.removeprefix(SMOKE).split("+")[0]


def sweep_value(exp_name: str, sweep: str, env_id: str):
    """The value that a run has in a sweep: a member's, or the default of its base variant; None if it is not of the sweep."""
    base, argument, _, values, default = SWEEPS[sweep]
    if exp_name == base:
        return of_environment(default, env_id)
    return next((value for value in values if exp_name == f"{base}-{argument}_{value}"), None)


def is_ablation(exp_name: str) -> bool:
    """Whether runs of this name are a member of an ablation only, and no algorithm of the main comparison."""
    name = base_of(exp_name)
    known = any(name == f"{base}-{argument}_{value}" for base, argument, _, values, _ in SWEEPS.values() for value in values)
    return known or name in ("rac_sac-independent_temperature", "rac_sac-no_warmup")


def label(exp_name: str) -> str:
    """How a report calls the runs of an experiment name; a name that is not in this file stands for itself."""
    plain, *extra = exp_name.removeprefix(SMOKE).split("+")
    text = VARIANTS[plain][0] if plain in VARIANTS else plain
    for base, argument, symbol, values, _ in SWEEPS.values():
        for value in values:
            if plain == f"{base}-{argument}_{value}":
                text = f"{VARIANTS[base][0]}, {symbol} = {value:g}"
    details = (["tiny"] if exp_name.startswith(SMOKE) else []) + [item.replace("_", " ") for item in extra]
    return f"{text} ({', '.join(details)})" if details else text
