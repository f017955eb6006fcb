"""What the four scripts have to do with each other: identities between their targets, defaults, shared text."""

import ast
import itertools

import numpy as np
import pytest
import torch
from conftest import ROOT, load_script
from conftest import SCRIPTS as NAMES

SCRIPTS = {name: load_script(ROOT / f"{name}.py") for name in NAMES}
SAC, TD3, VANILLA, ITM = SCRIPTS.values()
GAMMA = 0.99


# ----------------------------------------------------------------------------------------------------------- identities
class Case:
    """Five members and 64 transitions, about a third of them terminated; float64."""

    def __init__(self):
        rng = np.random.default_rng(1)
        self.q = torch.from_numpy(rng.normal(size=(5, 64)))
        self.reward = torch.from_numpy(rng.normal(size=64))
        self.bonus = torch.from_numpy(rng.normal(size=64))
        self.terminated = torch.from_numpy((rng.random(64) < 0.3) * 1.0)
        self.rest = (self.reward, self.terminated, GAMMA)

    def target(self, value):
        """What is bootstrapped from a value of the next state."""
        return self.reward + GAMMA * (1 - self.terminated) * (value + self.bonus)


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_pessimism_upq_is_the_average():
    case = Case()
    assert_equal(VANILLA.upq_target(case.q, 0.0, *case.rest, case.bonus), case.target(case.q.mean(0)))


def test_rac_sac_at_one_beta_is_vanilla_rac():
    case = Case()
    betas = torch.full_like(case.reward, 0.3)
    assert_equal(SAC.upq_target(case.q, betas, *case.rest, case.bonus), VANILLA.upq_target(case.q, 0.3, *case.rest, case.bonus))


def test_rac_sac_without_entropy_is_rac_td3():
    case = Case()
    betas = torch.linspace(0, 0.8, 64, dtype=torch.float64)
    assert_equal(SAC.upq_target(case.q, betas, *case.rest, 0 * case.bonus), TD3.upq_target(case.q, betas, *case.rest))


def test_in_target_minimisation_over_all_members_is_their_minimum():
    case = Case()
    keys = torch.rand(case.q.shape, generator=torch.Generator().manual_seed(0))
    whole = ITM.in_target_min(case.q, torch.full_like(case.reward, 5), keys, *case.rest, case.bonus)
    assert_equal(whole, case.target(case.q.amin(0)))


def test_in_target_minimisation_over_one_member_is_on_average_the_average():
    """Over all orders of the keys."""
    orders = torch.from_numpy(np.array(list(itertools.permutations(range(5)))).T)  # (N, N!)
    ones = torch.ones(orders.shape[1])
    q = Case().q[:, :1]
    drawn = ITM.min_over_random_subset(q.expand(-1, len(ones)), ones, orders)
    assert_equal(drawn.mean(), q.mean())


def test_redq_is_rac_itm_at_k_2():
    """With the same keys for all samples."""
    case = Case()
    keys = torch.rand(5, 1, generator=torch.Generator().manual_seed(0))
    redq = VANILLA.in_target_min(case.q, torch.tensor([2.0]), keys, *case.rest, case.bonus)
    itm = ITM.in_target_min(case.q, torch.full((64,), 2.0), keys.expand(-1, 64), *case.rest, case.bonus)
    assert_equal(redq, itm)


# ------------------------------------------------------------------------------------------------------------- defaults
COMMON = {
    "gamma": 0.99,
    "tau": 0.005,
    "batch_size": 256,
    "utd": 20,
    "num_critics": 10,
    "hidden_dim": 256,
    "policy_lr": 3e-4,
    "q_lr": 3e-4,
    "q_lr_init": 3e-5,
    "q_lr_warmup_end": 10_000,
    "learning_starts": 5000,
    "eval_frequency": 1000,
    "eval_episodes": 10,
}
ENTROPY = {"autotune": True, "alpha_lr": 3e-4, "target_entropy": None}
BETAS = {"beta_min": 1e-7, "train_beta_max": 0.8, "explore_beta_max": 0.3, "eval_beta_max": 0.8, "num_eval_policies": 12}
OWN = {
    "rac_sac": {**ENTROPY, **BETAS, "temperature_network": True, "initial_log_alpha": -5},
    "rac_td3": {**BETAS, "exploration_noise": 0.1, "policy_noise": 0.2, "noise_clip": 0.5},
    "vanilla_rac": {**ENTROPY, "initial_log_alpha": -3, "target_rule": "upq", "min_size": 2},
    "rac_itm": {
        **ENTROPY,
        "temperature_network": True,
        "initial_log_alpha": -5,
        "train_k_max": 2,
        "explore_k_max": 1.5,
        "eval_k_max": 2,
        "num_eval_policies": 12,
    },
}
FAMILY_CAPACITY = {"Humanoid-v4": 300_000, "Walker2d-v5": 100_000, "Ant-v4": 200_000, "Hopper-v5": 1_000_000}


@pytest.mark.parametrize("name", NAMES)
def test_defaults(name):
    """The paper's hyperparameters."""
    args = SCRIPTS[name].check_args(SCRIPTS[name].Args())
    expected = {**COMMON, **OWN[name]}
    assert {field: getattr(args, field) for field in expected} == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("env_id", ["Humanoid-v4", "Walker2d-v5", "Ant-v4", "Hopper-v5", "Swimmer-v4"])
def test_defaults_of_an_environment(name, env_id):
    """By its name, whatever its version; what is given wins."""
    script = SCRIPTS[name]
    args = script.check_args(script.Args(env_id=env_id))
    family_capacity = FAMILY_CAPACITY.get(env_id, 1_000_000)
    assert args.buffer_size == (1_000_000 if name == "vanilla_rac" else family_capacity)
    assert args.total_timesteps == (1_000_000 if env_id == "Humanoid-v4" else 300_000)
    given = script.check_args(script.Args(env_id=env_id, buffer_size=70_000, total_timesteps=60_000))
    assert (given.buffer_size, given.total_timesteps) == (70_000, 60_000)


@pytest.mark.parametrize("name", ["rac_sac", "rac_itm"])
def test_default_target_entropy_is_minus_the_action_dimension(name):
    args = SCRIPTS[name].check_args(SCRIPTS[name].Args(), action_dim=6)
    assert args.target_entropy == -6


@pytest.mark.parametrize(
    "env_id,beta", [("Humanoid-v4", 0.2), ("Walker2d-v5", 0.3), ("Ant-v4", 0.2), ("Hopper-v5", 0.2), ("Swimmer-v4", 0.3)]
)
def test_beta_of_vanilla_rac(env_id, beta):
    args = VANILLA.check_args(VANILLA.Args(env_id=env_id))
    assert VANILLA.eval_conditions(args) == [args.beta] == [beta]
    assert VANILLA.check_args(VANILLA.Args(env_id=env_id, beta=0.6)).beta == 0.6


@pytest.mark.parametrize("name", ["rac_sac", "rac_td3"])
def test_evaluated_betas(name):
    """eval_beta_max / H * i (equation 20)."""
    script = SCRIPTS[name]
    args = script.check_args(script.Args())
    np.testing.assert_allclose(script.eval_conditions(args), 0.8 * np.arange(1, 13) / 12)
    args = script.check_args(script.Args(eval_beta_max=0.3, num_eval_policies=3))
    np.testing.assert_allclose(script.eval_conditions(args), [0.1, 0.2, 0.3])


def test_evaluated_ks():
    """1 + (eval_k_max - 1) / H * i."""
    np.testing.assert_allclose(ITM.eval_conditions(ITM.check_args(ITM.Args())), 1 + np.arange(1, 13) / 12)
    args = ITM.check_args(ITM.Args(eval_k_max=4, num_eval_policies=3))
    np.testing.assert_allclose(ITM.eval_conditions(args), [2, 3, 4])


# ---------------------------------------------------------------------------------------------------------- shared text
MARKER = "# Training: from here on the same in all four scripts"


@pytest.mark.parametrize("name", NAMES)
def test_from_the_marker_on_the_text_is_the_same(name):
    _, shared = (ROOT / "rac_sac.py").read_text().split(MARKER)
    _, text = (ROOT / f"{name}.py").read_text().split(MARKER)
    assert text == shared, f"{name}.py differs from rac_sac.py behind its marker"


@pytest.mark.parametrize("name", NAMES)
def test_a_script_needs_no_other_file(name):
    """No file of the project is imported: a copy runs anywhere."""
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {path.stem for path in ROOT.glob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not {module.split(".")[0] for module in imported} & own
