"""What the four scripts are as files and command lines: defaults, common text, help, ablations."""

import re

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, every_script, known_arguments, of_the_four, read_rows

# The paper's hyperparameters.
COMMON = {
    "gamma": 0.99,
    "tau": 0.005,
    "batch_size": 256,
    "utd": 20,
    "num_critics": 10,
    "learning_starts": 5000,
    "policy_lr": 3e-4,
    "q_lr": 3e-4,
    "q_lr_warmup_end": 10_000,
    "eval_frequency": 1000,
    "eval_episodes": 10,
    "network": "mlp",
}
CONDITIONS = {"rac_sac": "beta", "rac_td3": "beta", "vanilla_rac": "beta", "rac_itm": "k"}
BETAS = {"beta_min": 1e-7, "train_beta_max": 0.8, "explore_beta_max": 0.3, "num_eval_policies": 12}
TEMPERATURE = {"autotune": True, "alpha_lr": 3e-4, "initial_log_alpha": -5, "temperature_network": True}
OWN = {
    "rac_sac": {**BETAS, **TEMPERATURE},
    "rac_td3": {**BETAS, "exploration_noise": 0.1, "policy_noise": 0.2, "noise_clip": 0.5},
    "vanilla_rac": {"autotune": True, "alpha_lr": 3e-4, "initial_log_alpha": -3, "target_rule": "upq", "min_size": 2},
    "rac_itm": {**TEMPERATURE, "train_k_max": 2, "explore_k_max": 1.5, "num_eval_policies": 12},
}
# Network: width, learning rate of the critics at first, weight decay.
BY_NETWORK = {"mlp": (256, 3e-5, 0), "simba": (128, 3e-4, 0.01)}
# Environment: steps, replay capacity, beta of Vanilla RAC, target entropy.
BY_ENVIRONMENT = {
    "Humanoid-v4": (1_000_000, 300_000, 0.2, -17),
    "Walker2d-v5": (300_000, 100_000, 0.3, -6),
    "Ant-v4": (300_000, 200_000, 0.2, -8),
    "Hopper-v5": (300_000, 1_000_000, 0.2, -3),
    "HalfCheetah-v4": (300_000, 1_000_000, 0.3, -6),
}


@of_the_four
@every_script
def test_defaults(cli):
    """Those of the paper."""
    args = vars(cli.script.Args())
    expected = COMMON | OWN[cli.name]
    assert {name: args[name] for name in expected} == expected
    assert CONDITIONS[cli.name] == cli.script.CONDITION


@of_the_four
@every_script
def test_defaults_of_a_network(cli):
    """They give way to what is asked for."""
    env = cli.script.Env("Hopper-v4")
    for network, expected in BY_NETWORK.items():
        args = cli.script.completed(cli.script.Args(network=network), env)
        assert (args.hidden_dim, args.q_lr_init, args.weight_decay) == expected
    args = cli.script.completed(cli.script.Args(network="simba", q_lr=1e-3, hidden_dim=8), env)
    assert (args.hidden_dim, args.q_lr_init) == (8, 1e-3)


@of_the_four
@every_script
@pytest.mark.parametrize("env_id", BY_ENVIRONMENT)
def test_defaults_of_an_environment(cli, env_id):
    steps, capacity, beta, target_entropy = BY_ENVIRONMENT[env_id]
    expected = {"total_timesteps": steps, "buffer_size": 1_000_000 if cli.name == "vanilla_rac" else capacity}
    of_some = {"beta": beta, "target_entropy": target_entropy, "eval_beta_max": 0.8, "eval_k_max": 2}
    expected |= known_arguments(cli.script, of_some)
    args = vars(cli.script.completed(cli.script.Args(env_id=env_id), cli.script.Env(env_id)))
    assert {name: args[name] for name in expected} == expected


def test_common_text():
    """What follows the method is the same in all four scripts."""
    marker = re.compile(r"^# -+ from here on the same in all four scripts -+\n", re.M)
    methods, rests = set(), set()
    for name in SCRIPTS:
        method, rest = marker.split((ROOT / f"{name}.py").read_text())
        methods.add(method)
        rests.add(rest)
    assert len(methods) == 4
    assert len(rests) == 1
    assert "def main" in rests.pop()


@every_script
def test_help(cli):
    """It explains every argument, and begins with what the script is."""
    cli.monkeypatch.setenv("COLUMNS", "400")
    out, _ = cli.call("--help")
    text = " ".join(out.split())
    assert cli.script.__doc__.split("\n")[0] in text
    arguments = re.findall(r"^    (\w+): .* = .*?  # (.*)$", cli.path.read_text().split("@dataclass")[1], re.M)
    assert {name for name, _ in arguments} == vars(cli.script.Args()).keys()
    assert all(" ".join(comment.split()) in text for _, comment in arguments)


ABLATIONS = (
    ("rac_sac.py", "--no-temperature-network --initial-log-alpha -2 --alpha-lr 0", 0.135335),
    ("rac_sac.py", "--no-autotune --alpha 0.1", 0.1),
    ("vanilla_rac.py", "--target-rule in-target-min --min-size 2 --initial-log-alpha 0 --alpha-lr 0 --target-entropy -1", 1),
)


@of_the_four
@pytest.mark.parametrize("cli, arguments, alpha", ABLATIONS, indirect=["cli"])
def test_ablations_and_redq(cli, arguments, alpha):
    """Each trains, with the temperature that was asked for."""
    run_dir = cli.train("run", *arguments.split())
    row = read_rows(run_dir / "eval.csv")[-1]
    alphas = [float(value) for name, value in row.items() if name.startswith("eval/alpha")]
    assert alphas
    np.testing.assert_allclose(alphas, alpha, rtol=1e-5)
