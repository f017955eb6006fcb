"""What the four scripts have to do with each other: identities between their targets, defaults, shared text."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, load_script
from conftest import SCRIPTS as NAMES

SCRIPTS = {name: load_script(ROOT / f"{name}.py") for name in NAMES}


# ----------------------------------------------------------------------------------------------------------- identities
def random_target(members=5, batch=64):
    rng = np.random.default_rng(1)
    q = torch.from_numpy(rng.normal(size=(members, batch)))
    reward, bonus = torch.from_numpy(rng.normal(size=(2, batch)))
    return q, reward, torch.from_numpy((rng.random(batch) < 0.3) * 1.0), bonus


def test_identities():
    sac, td3, vanilla, itm = (SCRIPTS[name] for name in NAMES)
    q, reward, terminated, bonus = random_target()
    average = reward + 0.99 * (1 - terminated) * (q.mean(0) + bonus)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(vanilla.upq_target(q, 0.0, reward, terminated, 0.99, bonus), average, **close)
    pinned = torch.full_like(reward, 0.3)
    torch.testing.assert_close(sac.upq_target(q, pinned, reward, terminated, 0.99, bonus),
                               vanilla.upq_target(q, 0.3, reward, terminated, 0.99, bonus), **close)  # fmt: skip
    torch.testing.assert_close(td3.upq_target(q, pinned, reward, terminated, 0.99),
                               sac.upq_target(q, pinned, reward, terminated, 0.99, 0 * bonus), **close)  # fmt: skip
    keys = torch.rand(q.shape, generator=torch.Generator().manual_seed(0))
    whole = itm.in_target_min(q, torch.full_like(reward, 5), keys, reward, terminated, 0.99, bonus)
    torch.testing.assert_close(whole, reward + 0.99 * (1 - terminated) * (q.amin(0) + bonus), **close)
    orders = np.array(list(itertools.permutations(range(5)))).T  # k = 1: its expectation over all key orders is the average
    ones = torch.ones(orders.shape[1])
    for b in range(3):
        drawn = itm.min_over_random_subset(q[:, b : b + 1].expand(-1, len(ones)), ones, torch.from_numpy(orders))
        assert drawn.mean().item() == pytest.approx(q[:, b].mean().item(), abs=1e-12)


def test_evaluated_conditions():
    td3, vanilla, itm = (SCRIPTS[name] for name in NAMES[1:])
    np.testing.assert_allclose(td3.eval_conditions(td3.check_args(td3.Args())), 0.8 * np.arange(1, 13) / 12)
    np.testing.assert_allclose(itm.eval_conditions(itm.check_args(itm.Args())), 1 + np.arange(1, 13) / 12)
    for env_id, beta in (("Humanoid-v4", 0.2), ("Walker2d-v5", 0.3), ("Ant-v4", 0.2), ("Hopper-v5", 0.2), ("Swimmer-v4", 0.3)):
        args = vanilla.check_args(vanilla.Args(env_id=env_id))
        assert vanilla.eval_conditions(args) == [beta] and args.buffer_size == 1_000_000
    assert vanilla.check_args(vanilla.Args(env_id="Ant-v4", beta=0.6)).beta == 0.6


# ---------------------------------------------------------------------------------------------------------- shared text
MARKER = "# Training: from here on the same in all four scripts"


def test_from_the_marker_on_the_text_is_the_same():
    parts = {name: (ROOT / f"{name}.py").read_text().split(MARKER) for name in NAMES}
    assert all(len(found) == 2 for found in parts.values())
    for name in NAMES[1:]:
        assert parts[name][1] == parts["rac_sac"][1], f"{name}.py differs from rac_sac.py behind its marker"


def test_the_method_stands_on_the_first_screens():
    """What a fork changes comes first: the target, then the rest of the algorithm, then what all scripts share."""
    lines = (ROOT / "rac_sac.py").read_text().splitlines()
    assert lines.index("def upq_target(q_next, beta, reward, terminated, gamma, entropy_bonus):") + 1 < 150
    assert next(number for number, line in enumerate(lines, 1) if line.startswith(MARKER)) < 540


def test_nothing_is_imported_between_scripts():
    for name in NAMES:
        text = Path(SCRIPTS[name].__file__).read_text()
        assert not re.search(rf"^\s*(import|from) ({'|'.join(NAMES)}|tests|benchmark)\b", text, re.M)
