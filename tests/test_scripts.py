"""All four scripts: their targets and updates against float64 numpy, what they share, and the identities between them."""

import importlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import reference
import torch

NAMES = ("rac_sac", "rac_td3", "vanilla_rac", "rac_itm")
SCRIPTS = {name: importlib.import_module(name) for name in NAMES}
OBS, ACT, BATCH, MEMBERS = 5, 3, 32, 4


def make_learner(name, **options):
    module = SCRIPTS[name]
    options = {"utd": 3, "num_critics": MEMBERS, "hidden_dim": 24, "batch_size": BATCH, "buffer_size": 200, "compile": False,
               "total_timesteps": 200, "learning_starts": 20, "q_lr_warmup_end": 40, **options}  # fmt: skip
    args = module.check_args(module.Args(**options))
    if name != "rac_td3":
        args.target_entropy = -3.0
    learner = module.Learner(args, OBS, ACT, torch.device("cpu"))
    rng = np.random.default_rng(7)
    for step in range(100):
        obs, action, next_obs = rng.normal(size=OBS), rng.uniform(-1, 1, ACT), rng.normal(size=OBS)
        learner.store(step, obs, action, rng.normal(), step % 4 == 3, next_obs)
    return module, learner


def layers(learner, network, flat, names, transpose):
    views = {k: v.double().numpy() for k, v in learner.networks[network].views(learner.state[flat]).items()}
    return [(views[f"{n}.weight"].T if transpose else views[f"{n}.weight"], views[f"{n}.bias"]) for n in names]


def members_of(learner, flat):
    """The ensemble as N lists of float64 (weight, bias)."""
    stacked = layers(learner, "critic", flat, ("layer1", "layer2", "layer3"), False)
    return [[(w[m], b[m, 0]) for w, b in stacked] for m in range(MEMBERS)]


def alpha_of(name, learner, condition):
    """The temperature from its parameters, in float64."""
    if name == "vanilla_rac":
        return np.exp(learner.state["temperature"][0].double().numpy())
    network = layers(learner, "temperature", "temperature", ("network.0", "network.2"), True)
    return np.exp(reference.relu_network(network, np.log(condition)[:, None])[-1][:, 0] - 5)


CASES = [("rac_sac", {}), ("rac_td3", {}), ("vanilla_rac", {"beta": 0.7}), ("rac_itm", {"train_k_max": 4.0}),
         ("vanilla_rac", {"target_rule": "in-target-min", "min_size": 2.0})]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_seed_and_integers(name):
    """Random actions are not the numbers of which the weights are made; a program may give integers where floats are due."""
    options = {} if name == "rac_td3" else {"initial_log_alpha": -5}
    _, learner = make_learner(name, q_lr=1, q_lr_init=0, **options)
    drawn = (np.concatenate([learner.random_action() for _ in range(100)]) + 1) / 2
    networks = [network.views(learner.state[key]) for key, network in learner.networks.items() if key in learner.state]
    weights = [w.flatten()[: len(drawn)].numpy() for views in networks for w in views.values() if w.numel() >= 50 and w.any()]
    assert len(weights) >= 6 and all(abs(np.corrcoef(w, drawn[: len(w)])[0, 1]) < 0.6 for w in weights)
    learner.update(30)
    assert learner.state["q_lr"].item() == 0.5 and learner.state["q_lr"].dtype == torch.float32


@pytest.mark.parametrize("name,options", CASES, ids=["sac", "td3", "vanilla", "itm", "redq"])
def test_critic_update(name, options):
    """A whole critic update: targets from next states and noise, loss, gradient and Polyak step."""
    module, learner = make_learner(name, **options)
    generator, rng = torch.Generator().manual_seed(3), np.random.default_rng(3)
    learner.state["target"] += 0.1 * torch.randn(learner.state["target"].shape, generator=generator)
    before = learner.state["target"].clone()
    rows = learner.replay[torch.randint(100, (BATCH,), generator=generator)]
    noise = torch.randn(BATCH, ACT, generator=generator)
    obs, action, reward, terminated, next_obs = np.split(rows.double().numpy(), np.cumsum([OBS, ACT, 1, 1]), 1)
    reward, terminated = reward[:, 0], terminated[:, 0]
    assert terminated.any() and not terminated.all()
    condition = rng.uniform(1, 4, BATCH) if name == "rac_itm" else rng.uniform(0.01, 0.8, BATCH)
    condition = condition.astype(np.float32).astype(np.float64)  # what the script gets, exactly
    seen = np.zeros((BATCH, 0)) if name == "vanilla_rac" else np.log(condition)[:, None]
    size = rng.integers(1, MEMBERS + 1, BATCH).astype(np.float32) if name == "rac_itm" else np.full(BATCH, 2, np.float32)
    keys = rng.random((MEMBERS, BATCH if name == "rac_itm" else 1), np.float32)
    scales, x = torch.tensor([3e-4 / 0.1, 0.001**0.5]), np.hstack([next_obs, seen])
    tensor = torch.from_numpy(condition).float()

    with torch.no_grad():
        networks, state = learner.networks, learner.state
        if name == "rac_td3":
            next_action = module.prepare_targets(networks, state, rows, tensor, noise, 0.95)
            module.update_critics(networks, state, rows, tensor, next_action, scales, 0.99, 0.005)
        elif name == "vanilla_rac":
            next_action, bonus = module.prepare_targets(networks, state, rows, noise)
            module.update_critics(networks, state, rows, next_action, bonus, torch.tensor([2.0]), torch.from_numpy(keys), scales,
                                  0.99, 0.005, learner.args.beta, learner.args.target_rule)  # fmt: skip
        elif name == "rac_itm":
            next_action, bonus = module.prepare_targets(networks, state, rows, tensor, noise)
            module.update_critics(networks, state, rows, tensor, torch.from_numpy(size), torch.from_numpy(keys), next_action,
                                  bonus, scales, 0.99, 0.005)  # fmt: skip
        else:
            next_action, bonus = module.prepare_targets(networks, state, rows, tensor, noise)
            module.update_critics(networks, state, rows, tensor, next_action, bonus, scales, 0.99, 0.005)

    fresh = make_learner(name, **options)[1]  # the same initial networks
    if name == "rac_td3":
        mean = reference.relu_network(layers(fresh, "actor", "actor", ("layer1", "layer2", "head"), True), x)[-1]
        target_action, target_bonus = reference.smoothed_action(np.tanh(mean), noise.double().numpy(), 0.95), np.zeros(BATCH)
        assert (np.abs(target_action) == 1).any() and (np.abs(noise.numpy()) > 0.95).any()  # both clips are at work
    else:
        mean = reference.relu_network(layers(fresh, "actor", "actor", ("layer1", "layer2", "mean"), True), x)[-1]
        log_std = reference.relu_network(layers(fresh, "actor", "actor", ("layer1", "layer2", "log_std"), True), x)[-1]
        u = mean + np.exp(log_std) * noise.double().numpy()
        target_action = np.tanh(u)
        target_bonus = -alpha_of(name, fresh, condition) * reference.squashed_log_prob(u, mean, np.exp(log_std))
        assert reference.relative_error(bonus, target_bonus) < 1e-5
    assert reference.relative_error(next_action, target_action) < 1e-5
    fresh.state["target"] = before
    next_x = np.hstack([next_obs, target_action, seen])
    q_next = np.stack([reference.relu_network(m, next_x)[-1][:, 0] for m in members_of(fresh, "target")])
    if name == "rac_itm" or options.get("target_rule") == "in-target-min":
        all_keys = np.broadcast_to(keys, (MEMBERS, BATCH))
        y = reference.in_target_min(q_next, size, all_keys, reward, terminated, 0.99, target_bonus)
    else:
        beta = np.full(BATCH, options["beta"]) if "beta" in options else condition
        y = reference.upq_target(q_next, beta, reward, terminated, 0.99, target_bonus)
    x, loss, grads = np.hstack([obs, action, seen]), 0.0, []
    for member in members_of(fresh, "critic"):
        outputs = reference.relu_network(member, x)
        error = outputs[-1][:, 0] - y
        loss += (error**2).mean()
        grads.append(reference.backward(member, x, outputs, (2 * error / BATCH)[:, None])[0])
    assert state["metrics"][0].item() == pytest.approx(loss, rel=1e-5)
    first_moment = networks["critic"].views(state["critic_m"])
    for i in (1, 2, 3):
        assert reference.relative_error(first_moment[f"layer{i}.weight"] * 10, np.stack([g[i - 1][0] for g in grads])) < 1e-5
    assert reference.relative_error(state["target"], 0.995 * before.double() + 0.005 * state["critic"].double()) < 1e-6


def test_actor_update_of_td3():
    """The deterministic policy gradient: dQ/da of the ensemble's mean through tanh."""
    module, learner = make_learner("rac_td3")
    rows = learner.replay[:BATCH]
    beta = torch.rand(BATCH, generator=torch.Generator().manual_seed(0)) * 0.8
    obs, log_beta = rows[:, :OBS].double().numpy(), np.log(beta.double().numpy())[:, None]
    actor, x = layers(learner, "actor", "actor", ("layer1", "layer2", "head"), True), np.hstack([obs, log_beta])
    outputs = reference.relu_network(actor, x)
    action = np.tanh(outputs[-1])
    q_x, q, dq_da = np.hstack([obs, action, log_beta]), [], np.zeros_like(action)
    for member in members_of(learner, "critic"):
        q_outputs = reference.relu_network(member, q_x)
        q.append(q_outputs[-1][:, 0])
        dq_da += reference.backward(member, q_x, q_outputs, np.ones((BATCH, 1)))[1][:, OBS:OBS + ACT] / MEMBERS
    grads = reference.backward(actor, x, outputs, -dq_da * (1 - action**2) / BATCH)[0]
    critic = learner.state["critic"].clone()
    with torch.no_grad():
        module.update_actor(learner.networks, learner.state, rows, beta, torch.tensor([3e-4 / 0.1, 0.001**0.5]))
    assert learner.state["metrics"][4].item() == pytest.approx(-np.mean(q), rel=1e-4)
    first_moment = learner.networks["actor"].views(learner.state["actor_m"])
    for layer, (weight, bias) in zip(("layer1", "layer2", "head"), grads, strict=True):
        assert reference.relative_error(first_moment[f"{layer}.weight"].T * 10, weight) < 1e-5
        assert reference.relative_error(first_moment[f"{layer}.bias"] * 10, bias) < 1e-5
    assert torch.equal(learner.state["critic"], critic)


@pytest.mark.parametrize("name", ["vanilla_rac", "rac_itm"])
def test_actor_and_temperature_losses(name):
    """Both losses of the SAC family, of these scripts' own inputs, in float64."""
    module, learner = make_learner(name)
    rows, generator = learner.replay[:BATCH], torch.Generator().manual_seed(0)
    noise, k = torch.randn(BATCH, ACT, generator=generator), 1 + torch.rand(BATCH, generator=generator)
    obs, scales = rows[:, :OBS].double().numpy(), torch.tensor([0.0, 0.001**0.5])  # a step of 0: the actor stays
    seen = np.zeros((BATCH, 0)) if name == "vanilla_rac" else np.log(k.double().numpy())[:, None]
    conditioned = [] if name == "vanilla_rac" else [k]
    x = np.hstack([obs, seen])
    mean = reference.relu_network(layers(learner, "actor", "actor", ("layer1", "layer2", "mean"), True), x)[-1]
    std = np.exp(reference.relu_network(layers(learner, "actor", "actor", ("layer1", "layer2", "log_std"), True), x)[-1])
    u = mean + std * noise.double().numpy()
    log_prob, alpha = reference.squashed_log_prob(u, mean, std), alpha_of(name, learner, k.double().numpy())
    q_x = np.hstack([obs, np.tanh(u), seen])
    q = np.mean([reference.relu_network(m, q_x)[-1][:, 0] for m in members_of(learner, "critic")], 0)
    with torch.no_grad():
        module.update_actor(learner.networks, learner.state, rows, *conditioned, noise, scales)
        module.update_temperature(learner.networks, learner.state, rows, *conditioned, noise, scales, -3.0)
    metrics = learner.state["metrics"]
    assert metrics[4].item() == pytest.approx((alpha * log_prob - q).mean(), rel=1e-4)
    assert metrics[5].item() == pytest.approx(np.mean(alpha), rel=1e-5)
    assert metrics[6].item() == pytest.approx(-log_prob.mean(), rel=1e-4)
    assert metrics[7].item() == pytest.approx((-alpha * (log_prob - 3)).mean(), rel=1e-4)
    grad = learner.state["temperature_m"].double().numpy() * 10
    if name == "vanilla_rac":  # d loss / d log alpha is the loss itself
        assert grad[0] == pytest.approx((-alpha * (log_prob - 3)).mean(), rel=1e-4) and not grad[1:].any()
    assert np.abs(learner.state["actor_m"].numpy()).max() > 0


# --------------------------------------------------------------------------------------------- the random subset's minimum
@pytest.mark.parametrize("name", ["vanilla_rac", "rac_itm"])
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5])
def test_min_over_random_subset_exactly(name, members):
    """Over all orders of the keys, every subset of a size is drawn equally often and gives its own minimum."""
    orders = np.array(list(itertools.permutations(range(members)))).T  # (N, N!)
    keys = torch.from_numpy((orders + 0.5) / members)
    q = torch.from_numpy(np.random.default_rng(0).normal(size=members))
    for size in range(1, members + 1):
        sizes = torch.full((orders.shape[1],), size)
        got = SCRIPTS[name].min_over_random_subset(q[:, None].expand(-1, orders.shape[1]), sizes, keys)
        subsets = list(itertools.combinations(q.tolist(), size))
        expected = np.sort(np.repeat([min(subset) for subset in subsets], orders.shape[1] // len(subsets)))
        np.testing.assert_array_equal(np.sort(got.numpy()), expected)


@pytest.mark.parametrize("name", ["vanilla_rac", "rac_itm"])
def test_min_over_random_subset_with_equal_keys(name):
    """Equal keys are ranked by position: a subset never has more or fewer members than its size."""
    q = torch.tensor([[3.0, 3.0, 3.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    got = SCRIPTS[name].min_over_random_subset(q, torch.tensor([1, 2, 3]), torch.full((3, 3), 0.5))
    assert got.tolist() == [3, 1, 1]


@pytest.mark.parametrize("size,q", [([2.0, 1.0], [[5.0, 5.0], [-1.0, -1.0]])])
def test_sizes_are_of_each_sample(size, q):
    keys = torch.tensor([[0.1, 0.1], [0.9, 0.9]])
    assert SCRIPTS["rac_itm"].min_over_random_subset(torch.tensor(q), torch.tensor(size), keys).tolist() == [-1, 5]


def seen_by_updates(learner, run):
    """The arguments of all calls of update_critics during run()."""
    calls, inner = [], learner.update_critics
    learner.update_critics = lambda *arguments: (calls.append(arguments), inner(*arguments))
    run()
    return calls


def test_subset_sizes_of_itm():
    """size is floor(k) or floor(k) + 1, the latter with probability k - floor(k); subsets and sizes are of each sample."""
    _, learner = make_learner("rac_itm", train_k_max=3.0, utd=20, batch_size=100)
    calls = seen_by_updates(learner, lambda: learner.update(50))
    k, size = (torch.cat([call[i] for call in calls]).numpy() for i in (3, 4))
    assert 1 <= k.min() < 1.05 and 2.95 < k.max() <= 3 and len(set(k.tolist())) > 1900
    assert ((size == np.floor(k)) | (size == np.floor(k) + 1)).all()
    assert abs((size - np.floor(k)).mean() - (k % 1).mean()) < 0.04  # 2000 draws
    assert abs(np.corrcoef(size - np.floor(k), k % 1)[0, 1]) > 0.4
    keys = torch.stack([call[5] for call in calls])
    assert keys.shape == (20, MEMBERS, 100) and keys.unique().numel() > 0.99 * keys.numel()


@pytest.mark.parametrize("min_size,sizes", [(2.0, {2.0}), (1.5, {1.0, 2.0}), (1.0, {1.0})])
def test_subset_sizes_of_redq(min_size, sizes):
    """One size and one subset for each minibatch."""
    _, learner = make_learner("vanilla_rac", target_rule="in-target-min", min_size=min_size, utd=200, batch_size=8,
                              learning_starts=8)  # fmt: skip
    calls = seen_by_updates(learner, lambda: learner.update(50))
    drawn = torch.cat([call[5] for call in calls]).float()
    assert set(drawn.tolist()) == sizes and drawn.mean() == pytest.approx(min_size, abs=0.15)
    keys = torch.stack([call[6] for call in calls])
    assert keys.shape == (200, MEMBERS, 1) and keys.unique().numel() > 790


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


def test_exploration_of_td3():
    """The policy's action plus N(0, exploration_noise), clipped; without noise only beta moves it."""
    _, learner = make_learner("rac_td3", exploration_noise=0.1)
    obs = np.zeros(OBS, np.float32)
    actions = np.stack([learner.act(obs) for _ in range(2000)])
    learner.args.exploration_noise = 0.0
    quiet = np.stack([learner.act(obs) for _ in range(2000)])
    added = np.sqrt(actions.var(0) - quiet.var(0))
    np.testing.assert_allclose(added, 0.1, rtol=0.1)
    learner.args.exploration_noise = 50.0
    assert np.abs(np.stack([learner.act(obs) for _ in range(50)])).max() == 1


# -------------------------------------------------------------------------------------------------------- shared blocks
def blocks(name):
    text = Path(SCRIPTS[name].__file__).read_text()
    return re.findall(r"# --- shared: ([^\n]*?) ---\n(.*?)# --- end shared ---", text, re.S)


def test_shared_blocks_are_the_same_text():
    first = blocks("rac_sac")
    assert len(first) >= 8
    for name in NAMES[1:]:
        assert [title for title, _ in blocks(name)] == [title for title, _ in first]
        for (title, text), (_, other) in zip(first, blocks(name), strict=True):
            assert other == text, f"{title} of {name}.py differs from rac_sac.py's"


def test_nothing_is_imported_between_scripts():
    for name in NAMES:
        text = Path(SCRIPTS[name].__file__).read_text()
        assert not re.search(rf"^\s*(import|from) ({'|'.join(NAMES)}|tests|benchmark)\b", text, re.M)
