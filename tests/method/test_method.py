"""The mathematics against independent float64: of all four scripts, or of a copy of one (pytest tests/method --script my_rac.py).

`method` is the script's algorithm as access.py describes it; reference.py has the equations.
"""

import copy
import gc
import itertools
import math

import access
import numpy as np
import pytest
import reference
import torch
from access import ACT, BATCH, MEMBERS, OBS
from conftest import needs_gpu
from reference import relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
on_cuda = pytest.mark.parametrize("device", DEVICES[1:])
sac_family = pytest.mark.kinds("sac", "vanilla", "itm")
upq_family = pytest.mark.kinds("sac", "td3", "vanilla")
conditioned = pytest.mark.kinds("sac", "td3", "itm")
with_subsets = pytest.mark.kinds("vanilla", "itm")


@pytest.fixture
def method(script):
    return access.method_of(script)


def test_networks_are_known(method):
    """What a fork has changed in its networks: all other tests that need the parameters are skipped until access.py knows it."""
    unknown = method.unknown_parameters(method.learner())
    if unknown:
        pytest.fail("\n".join([*unknown, "say so in shapes() of tests/method/access.py and in reference.py"]), pytrace=False)


# ------------------------------------------------------------------------------------------------------------ the target
@upq_family
@pytest.mark.parametrize("members", [2, 3, 10])
@pytest.mark.parametrize("beta", ["zero", "random"])
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e15])
def test_upq_target(method, members, beta, scale):
    """Equation 18 in float64 and float32, however large the values are."""
    rng = np.random.default_rng(members)
    q = rng.normal(size=(members, 64)) * scale
    reward = rng.normal(size=64)
    bonus = rng.normal(size=64) * method.has_entropy
    terminated = (rng.uniform(size=64) < 0.3).astype(float)
    betas = np.zeros(64) if beta == "zero" else rng.uniform(0, 0.8, 64)
    expected = reference.upq_target(q, betas, reward, terminated, 0.97, bonus)
    q, betas, rewards, terminations, bonus = (torch.tensor(x) for x in (q, betas, reward, terminated, bonus))
    double = method.upq_target(q, betas, rewards, terminations, 0.97, bonus)
    assert relative_error(double, expected) < 1e-12
    single = method.upq_target(q.float(), betas.float(), rewards.float(), terminations.float(), 0.97, bonus.float())
    assert single.dtype == torch.float32
    assert relative_error(single, expected) < 1e-5
    np.testing.assert_allclose(single.numpy()[terminated == 1], reward[terminated == 1], rtol=1e-6)


@upq_family
def test_upq_target_of_two_members_is_known(method):
    """q = 1 and 3: mean 2, sample standard deviation sqrt(2)."""
    one = torch.ones(1)
    bonus = -0.25 * method.has_entropy
    y = method.upq_target(torch.tensor([[1.0], [3.0]]), 0.5 * one, 10 * one, 0 * one, 0.9, bonus * one)
    assert y.item() == pytest.approx(10 + 0.9 * (2 - 0.5 * np.sqrt(2) + bonus))


@pytest.mark.kinds("td3")
def test_smoothed_action(script):
    """Both clips, that of the noise and that of the sum."""
    action = torch.tensor([[0.0, 0.9, -0.9, 0.2, 0.3]])
    noise = torch.tensor([[0.3, 0.4, -3.0, 3.0, -3.0]])
    expected = torch.tensor([[0.3, 1.0, -1.0, 0.7, -0.2]])
    torch.testing.assert_close(script.smoothed_action(action, noise, 0.5), expected)
    torch.testing.assert_close(reference.smoothed_action(action, noise, 0.5), expected)


# ------------------------------------------------------------------------------------------------- the squashed Gaussian
@sac_family
def test_log_prob_against_torch_distributions(script):
    from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = (torch.randn(200, ACT, generator=generator, dtype=torch.float64) for _ in range(3))
    action, log_prob = script.squashed_gaussian(mean, log_std, noise)
    base = Independent(TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1)), 1)
    u = mean + log_std.exp() * noise
    assert torch.equal(action, u.tanh())
    base.base_dist.transforms[0]._cached_x_y = (u, action)  # atanh(action) would lose the digits that are tested here
    torch.testing.assert_close(log_prob, base.log_prob(action), rtol=1e-10, atol=1e-10)
    near = u.abs().amax(1) < 5  # further out the textbook form loses digits even in float64
    expected = reference.squashed_log_prob(u[near], mean[near], log_std[near].exp())
    torch.testing.assert_close(log_prob[near], expected, rtol=1e-7, atol=0)


@sac_family
def test_log_prob_integrates_to_one(script):
    """The density over the action interval, by quadrature in the action, not in u."""
    for mean, log_std in ((0.0, -1.0), (0.7, -0.5), (-0.4, 0.0)):
        edges = np.linspace(-1, 1, 400_001)
        action = (edges[1:] + edges[:-1]) / 2
        noise = (np.arctanh(action) - mean) / np.exp(log_std)
        means = torch.full((len(action), 1), mean).double()
        log_stds = torch.full((len(action), 1), log_std).double()
        _, log_prob = script.squashed_gaussian(means, log_stds, torch.tensor(noise)[:, None])
        assert float(log_prob.exp().sum() * (edges[1] - edges[0])) == pytest.approx(1, abs=1e-3)


@sac_family
def test_log_prob_is_finite_and_right_far_out(script):
    noise = torch.tensor([[40.0], [-40.0]])
    _, log_prob = script.squashed_gaussian(torch.zeros(2, 1), torch.zeros(2, 1), noise)
    # for large |u|: log(1 - tanh(u)^2) = log 4 - 2 |u|
    expected = -0.5 * 40**2 - 0.5 * np.log(2 * np.pi) - (np.log(4) - 80)
    np.testing.assert_allclose(log_prob.numpy(), [expected, expected], rtol=1e-6)


# --------------------------------------------------------------------------------------------- one step of each network
LR = 1e-3


def check_step(method, learner, before, network, loss, moved):
    """A network's first update: the gradient is that of `loss`, the parameters went Adam's way, only networks in `moved` moved.

    Adam's first step is +-LR wherever the gradient is not tiny: the steps are compared, not the parameters.
    """
    parameters = getattr(before, network)
    expected = reference.gradient(loss, parameters)
    after = getattr(method.exact(learner), network)
    got = access.gradient(learner, network)
    assert got.keys() == expected.keys()
    for name, old in parameters.items():
        assert relative_error(got[name], expected[name]) < 1e-5, f"gradient of {name}"
        assert relative_error(after[name] - old, reference.adam(old, [got[name]], LR) - old) < 1e-3, f"step of {name}"
    assert method.moved(before, learner) == moved


def check_critic_step(method, **options):
    """A whole critic update: targets from next states and noise, loss, gradient, Adam's first step and Polyak's."""
    learner = method.learner(**options)
    access.shake_target(learner)
    batch = method.minibatch(learner)
    assert 0 < batch.parts.terminated.mean() < 1
    before = method.exact(learner)
    next_action, bonus, loss, y = exact_critic_step(method, before, batch.double())
    got_action, got_bonus, got_q, got_y = method.critic_step(learner, batch, LR)
    assert relative_error(got_action, next_action) < 1e-5
    assert not method.has_entropy or relative_error(got_bonus, bonus) < 1e-5
    assert relative_error(got_y, y) < 1e-5
    assert method.script.critic_loss(got_q, got_y).item() == pytest.approx(loss.item(), rel=1e-5)
    check_step(method, learner, before, "critic", loss, {"critic", "target"})
    after = method.exact(learner)
    for name, target in after.target.items():
        polyak = (1 - learner.args.tau) * before.target[name] + learner.args.tau * after.critic[name]
        assert relative_error(target, polyak) < 1e-6, f"Polyak step of {name}"


def exact_critic_step(method, exact, batch):
    """-> next action, entropy bonus, loss, target."""
    data = batch.parts
    next_action, bonus = method.exact_next_action(exact, batch)
    q_next = method.exact_q(exact.target, data.next_obs, next_action, batch.condition)
    y = torch.from_numpy(method.exact_target(q_next.detach(), batch, exact.args, bonus.detach()))  # no gradient flows through it
    q = method.exact_q(exact.critic, data.obs, data.action, batch.condition)
    return next_action, bonus, reference.critic_loss(q, y), y


def test_critic_update(method):
    check_critic_step(method)


@pytest.mark.kinds("vanilla")
def test_critic_update_of_redq(method):
    check_critic_step(method, target_rule="in-target-min", min_size=2.0)


def test_constants_of_the_critic_update(method):
    """Discount and Polyak weight are those of the arguments."""
    check_critic_step(method, gamma=0.7, tau=0.1)


def test_actor_update(method):
    """The gradient through the ensemble's mean and, in the SAC family, the entropy; and the metrics."""
    learner = method.learner()
    batch = method.minibatch(learner)
    before = method.exact(learner)
    loss, expected = method.exact_actor_loss(before, batch.double())
    metrics = method.update_actor(learner, batch, LR)
    check_step(method, learner, before, "actor", loss, {"actor"})
    assert metrics._asdict() == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-4)


def check_temperature_step(method, **options):
    learner = method.learner(**options)
    batch = method.minibatch(learner)
    before = method.exact(learner)
    loss = method.exact_temperature_loss(before, batch.double(), -2.0)
    metrics = method.update_temperature(learner, batch, LR, target_entropy=-2.0)
    assert metrics.alpha_loss.item() == pytest.approx(loss.item(), rel=1e-4)
    check_step(method, learner, before, "temperature", loss, {"temperature"})


@sac_family
def test_temperature_update(method):
    check_temperature_step(method)


@sac_family
def test_scalar_temperature(method):
    """One learned temperature for all conditions."""
    options, initial = method.scalar_temperature
    check_temperature_step(method, **options)
    learner = method.learner(**options)
    conditions = [0.1, 0.4, 0.8]
    np.testing.assert_allclose(method.script.alphas(learner, conditions), initial, rtol=1e-6)
    learner.update(50)
    alphas = method.script.alphas(learner, conditions)
    assert len(set(alphas)) == 1
    assert alphas[0] != pytest.approx(initial, rel=1e-6)


@sac_family
def test_fixed_temperature(method):
    """Without autotune the temperature stays at alpha, and there is no loss of it."""
    learner = method.learner(autotune=False, alpha=0.37)
    learner.update(50)
    np.testing.assert_allclose(method.script.alphas(learner, [0.1, 0.8]), 0.37, rtol=1e-6)
    metrics = learner.read_metrics(1)
    assert metrics["losses/alpha"] == pytest.approx(0.37)
    assert metrics["losses/alpha_loss"] == 0


@sac_family
def test_alphas_of_the_evaluated_conditions(method):
    learner = method.learner()
    conditions = method.script.eval_conditions(learner.args)
    expected = method.exact_alpha(method.exact(learner), torch.tensor(conditions, dtype=torch.float64))
    np.testing.assert_allclose(method.script.alphas(learner, conditions), expected.detach().numpy(), rtol=1e-5)


# ---------------------------------------------------------------------------------------------- one environment step
def test_an_environment_step(method):
    """The targets' inputs, G critic updates, then one update of the actor and one of the temperature on the same states."""
    learner = method.learner(gamma=0.9, tau=0.01)
    calls = access.record_calls(method, learner)
    learner.update(50)
    sampled, *calls, _ = [call for call in calls if call.name != "adam_scales"]
    order = ["prepare_critics", *["update_critics"] * 3, *(f"update_{name}" for name in method.learned[1:])]
    assert [call.name for call in calls] == order
    prepared, critics, others = calls[0], calls[1:4], calls[4:]
    assert sampled.inputs["position"].dtype == torch.float64  # float32 cannot tell a million rows apart evenly

    # every critic update has its own part of what was prepared
    for field, expected in prepared.result._asdict().items():
        assert torch.equal(torch.cat([getattr(call.inputs["batch"], field) for call in critics]), expected), field

    # the actor has states of its own, and the temperature those of the actor
    batches = [call.inputs["batch"] for call in others]
    rows = sampled.result if torch.is_tensor(sampled.result) else sampled.result[0]
    assert torch.equal(torch.cat([prepared.inputs["rows"][:, :OBS], batches[0].obs]), rows[:, :OBS])
    all_obs = [*(call.inputs["batch"].inputs[:, :OBS] for call in critics), batches[0].obs]
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(all_obs, 2))
    for field in {*batches[0]._fields} - {"noise"}:
        assert all(torch.equal(getattr(batch, field), getattr(batches[0], field)) for batch in batches)

    # every random number is used once
    noise = [prepared.inputs["noise"], *(batch.noise for batch in batches if "noise" in batch._fields)]
    assert len(torch.cat(noise).unique()) > 0.99 * torch.cat(noise).numel()
    if method.condition in prepared.inputs:
        conditions = torch.cat([prepared.inputs[method.condition], getattr(batches[0], method.condition)])
        assert torch.equal(conditions, sampled.result[1])  # all of them from U1
        assert len(conditions.unique()) > 0.99 * len(conditions)

    for call in calls:
        constants = {name: value for name, value in call.inputs.items() if isinstance(value, (float, str))}
        assert constants == {name: getattr(learner.args, name) for name in constants}, call.name


def test_each_update_has_its_own_networks(method):
    """The actor learns from the online critics; every network has moments of its own."""
    learner = method.learner()
    calls = access.record_calls(method, learner)
    learner.update(50)
    networks = {name: getattr(learner, name) for name in method.learned}
    networks["target_critic"] = learner.target
    moments = {"update_critics": "critic", "update_actor": "actor", "update_temperature": "temperature"}
    for call in calls:
        for name in networks.keys() & call.inputs.keys():
            assert call.inputs[name] is networks[name], f"{name} of {call.name}"
        if call.name in moments:
            assert call.inputs["moments"] is learner.moments[moments[call.name]], call.name


def test_each_network_has_its_own_learning_rate(method):
    """The scales of two environment steps, of three critic updates each, are those of Adam's t-th update."""
    options = {"policy_lr": 1e-3, "q_lr": 2e-3, **({"alpha_lr": 4e-3} if method.has_entropy else {})}
    learner = method.learner(**options)
    calls = access.record_calls(method, learner)
    for step in (50, 51):
        learner.update(step)
    lrs = {"update_actor": 1e-3, "update_critics": 2e-3, "update_temperature": 4e-3}
    for name in {call.name for call in calls} & lrs.keys():
        for t, scales in enumerate(access.inputs_of(calls, name, "scales"), 1):
            expected = [lrs[name] / (1 - 0.9**t), np.sqrt(1 - 0.999**t)]
            np.testing.assert_allclose(scales[:2], expected, rtol=1e-6, err_msg=f"{name}, update {t}")
    counts = {"critic": 6, "actor": 2, "temperature": 2}
    assert {name: count.item() for name, count in learner.counts.items()} == {name: counts[name] for name in method.learned}


def test_noise_of_an_environment_step(method):
    """N(0, 1), of TD3's targets N(0, policy_noise)."""
    sizes = {"utd": 2, "batch_size": 1000, "buffer_size": 1000, "total_timesteps": 1000}
    learner = method.learner(**sizes, **({} if method.has_entropy else {"policy_noise": 0.3}))
    calls = access.record_calls(method, learner)
    learner.update(50)
    (noise,) = access.inputs_of(calls, "prepare_critics", "noise")
    assert noise.shape == (2000, ACT)
    check_normal(noise, 1.0 if method.has_entropy else 0.3)
    batches = [batch for name in method.learned[1:] for batch in access.inputs_of(calls, f"update_{name}", "batch")]
    drawn = [batch.noise for batch in batches if "noise" in batch._fields]
    assert len(drawn) == (2 if method.has_entropy else 0)
    for noise in drawn:
        assert noise.shape == (1000, ACT)
        check_normal(noise, 1.0)


def check_normal(drawn, std):
    """Random numbers with the moments and the tails of N(0, std); of 3000 of them 137 are beyond two std."""
    assert drawn.mean().item() == pytest.approx(0, abs=0.06 * std)
    assert drawn.std().item() == pytest.approx(std, rel=0.04)
    assert (drawn.abs() > 2 * std).double().mean().item() == pytest.approx(0.0455, abs=0.013)


# ---------------------------------------------------------------------------------------------------- networks, ensemble
def test_ensemble_equals_separate_networks(method):
    """The batched product against one member after the other; the same of critics that were loaded."""
    learner = method.learner()
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(33, OBS + ACT + method.seen_dim, generator=generator)
    expected = reference.critics(method.exact(learner).critic, inputs.double())
    loaded = method.script.load_network(learner.args, "critic", learner.copy_of("critic"), OBS, ACT)
    assert expected.shape == (MEMBERS, 33)
    assert relative_error(learner.critic(inputs), expected) < 1e-5
    assert torch.equal(learner.critic(inputs), loaded(inputs))


def test_members_are_independent(method):
    """A change to one member's loss moves that member's gradient alone."""
    learner = method.learner()
    method.exact(learner)  # or there is no telling which parameters are whose
    critic = learner.critic.requires_grad_(True)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(8, OBS + ACT + method.seen_dim, generator=generator)
    grads = []
    for weights in ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 5.0, 1.0]):
        loss = (critic(inputs) * torch.tensor(weights)[:, None]).square().mean(1).sum()
        grads.append(torch.autograd.grad(loss, list(critic.parameters())))
    for one, other in zip(*grads, strict=True):
        assert [not torch.equal(one[m], other[m]) for m in range(MEMBERS)] == [False, False, True, False]


def test_initialisation(method):
    """U(+-1/sqrt(fan-in)) with the fan-in of one member, members apart; biases: the actor's as its weights, the critics' zero.

    Targets begin as the critics.
    """
    learner = method.learner(hidden_dim=256, num_critics=6)
    exact = method.exact(learner)
    for name, weight in exact.critic.items():
        if "bias" in name:
            assert not weight.any(), name
            continue
        bound = 1 / np.sqrt(weight.shape[1])
        assert 0.98 * bound < weight.abs().max() <= bound, name
        assert weight.std().item() == pytest.approx(bound / np.sqrt(3), rel=0.05), name
        assert len({member.sum().item() for member in weight}) == 6, name
    for name, weight in exact.actor.items():
        bound = 1 / np.sqrt(exact.actor[name.replace("bias", "weight")].shape[1])
        spread = 0.98 if weight.numel() >= 256 else 0.1  # few draws may all be small
        assert spread * bound < weight.abs().max() <= bound, name
        assert len(weight.unique()) > 0.9 * weight.numel(), name
    assert all(torch.equal(weight, exact.target[name]) for name, weight in exact.critic.items())


@pytest.mark.kinds("sac", "itm")
def test_initial_biases_of_the_temperature_network(method):
    """As PyTorch's linear layers begin: with zeros half of the units would never be active."""
    biases = method.exact(method.learner()).temperature["network.0.bias"]
    assert len(biases.unique()) == 64
    assert biases.abs().max() <= 1


@sac_family
def test_log_std_is_clamped(method):
    learner = method.learner()
    inputs = method.inputs(torch.zeros(1, OBS), torch.zeros(1, 1))
    for bias, expected in ((100.0, 2.0), (-100.0, -10.0)):
        torch.nn.init.constant_(learner.actor.log_std.bias, bias)
        _, log_std = learner.actor(*inputs)
        assert set(log_std[0].tolist()) == {expected}


def test_policy_that_is_evaluated(method):
    """The deterministic action of one condition, and of one for each row."""
    learner = method.learner()
    script = method.script
    exact = method.exact(learner)
    obs = np.random.default_rng(0).normal(size=(10, OBS)).astype(np.float32)
    actor = script.load_network(learner.args, "actor", learner.copy_of("actor"), OBS, ACT)
    low, high = method.exact_range
    for condition in (high / 2, np.linspace(low, high, 10)):
        conditions = torch.from_numpy(np.broadcast_to(condition, 10).astype(np.float64))
        expected = method.exact_deterministic(exact, torch.from_numpy(obs).double(), conditions).detach().numpy()
        action = script.deterministic_action(actor, obs, condition)
        assert action.dtype == np.float32
        np.testing.assert_allclose(action, expected, atol=1e-6)
        inputs = torch.cat(script.network_inputs(obs, condition), 1)
        assert inputs.dtype == torch.float32
        expected_inputs = torch.cat([torch.from_numpy(obs), method.seen(conditions).float()], 1)
        torch.testing.assert_close(inputs, expected_inputs)


# ------------------------------------------------------------------------------------------------ optimiser and schedule
def test_adam_against_torch(script):
    """50 steps of all parameters of a small network, five at a time, against torch.optim.Adam and float64."""
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Linear(30, 20).requires_grad_(False)
    theirs = copy.deepcopy(ours).requires_grad_(True)
    before = access.flat(ours.parameters())
    moments = [copy.deepcopy(ours), copy.deepcopy(ours)]
    for parameter in (p for moment in moments for p in moment.parameters()):
        parameter.zero_()
    count = torch.zeros((), dtype=torch.float64)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=3e-4)
    grads = []
    for _ in range(10):
        for scales in script.adam_scales(count, 3e-4, 5):
            grad = {name: torch.randn(p.shape, generator=generator) for name, p in ours.named_parameters()}
            script.adam_step(ours, grad, moments, scales)
            for name, parameter in theirs.named_parameters():
                parameter.grad = grad[name]
            optimizer.step()
            grads.append(access.flat(grad.values()))
    assert count.item() == 50
    moved = access.flat(ours.parameters()) - before
    assert relative_error(moved, access.flat(theirs.parameters()) - before) < 1e-4
    assert relative_error(moved, reference.adam(before, grads, 3e-4) - before) < 1e-4


def test_critic_learning_rate(method):
    """Linear from q_lr_init at learning_starts to q_lr at q_lr_warmup_end (equation 23), in what the updates are given."""
    learner = method.learner(learning_starts=50, q_lr_warmup_end=100, batch_size=8, utd=1)
    calls = access.record_calls(method, learner)
    expected = {40: 3e-5, 50: 3e-5, 60: 8.4e-5, 75: 1.65e-4, 100: 3e-4, 150: 3e-4}
    for step in expected:
        learner.update(step)
    found = [float(scales[0]) * (1 - 0.9**t) for t, scales in enumerate(access.inputs_of(calls, "update_critics", "scales"), 1)]
    assert found == pytest.approx([*expected.values()], rel=1e-5)


@pytest.mark.parametrize("options", [{"q_lr_warmup_end": 50}, {"q_lr_warmup_end": 40, "q_lr_init": 3e-4}])
def test_critic_learning_rate_without_warm_up(method, options):
    """Where its end is not later than its beginning; an end before it has no meaning."""
    learner = method.learner(learning_starts=50, batch_size=8, utd=1, **options)
    learner.update(51)
    assert learner.q_lr.item() == pytest.approx(3e-4)


def test_whole_numbers_for_floats(method):
    """A program may give integers where floats are due."""
    learner = method.learner(q_lr=1, q_lr_init=0)
    learner.update(30)
    assert learner.q_lr.item() == 0.5
    assert learner.q_lr.dtype == torch.float32


# --------------------------------------------------------------------------------------------------------------- metrics
def test_metrics(method):
    """Averages since they were last read: two environment steps of three critic updates each."""
    learner = method.learner()
    calls = access.record_calls(method, learner)
    for step in (21, 22):
        learner.update(step)
    metrics = learner.read_metrics(2)
    assert list(metrics) == [f"losses/{name}" for name in method.script.METRICS]

    made = [call.result for call in calls if call.name == "update_critics"]
    q, target = (np.stack([parts[i].double().numpy() for parts in made]) for i in (0, 1))
    assert q.shape == (6, MEMBERS, BATCH)
    expected = {
        "losses/qf_loss": ((q - target[:, None]) ** 2).mean(),
        "losses/qf_values": q.mean(),
        "losses/qf_std": q.std(1, ddof=1).mean(),
    }
    for call in calls:
        if call.name in ("update_actor", "update_temperature"):
            for name, value in call.result._asdict().items():
                expected[f"losses/{name}"] = expected.get(f"losses/{name}", 0) + value.item() / 2
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)

    assert learner.metrics.tolist() == [0.0] * len(method.script.METRICS)
    assert set(learner.read_metrics(0).values()) == {None}


# ---------------------------------------------------------------------------------------------------------------- replay
@pytest.mark.parametrize("device", DEVICES)
def test_replay_wraps_around_and_samples_only_what_is_filled(method, device):
    learner = method.learner(device, buffer_size=20, utd=20, batch_size=20)
    learner.replay.fill_(torch.nan)
    calls = access.record_calls(method, learner)
    learner.warm_up()
    for step in range(45):
        learner.store(step, np.full(OBS, step), np.zeros(ACT), step + 0.5, False, np.full(OBS, step + 1))
        if step in (4, 19, 29, 44):
            learner.update(step)
            rows = access.inputs_of(calls, "prepare_critics", "rows")[-1].cpu()  # the newest, or what a captured graph fills anew
            assert set(rows[:, 0].tolist()) == set(range(max(0, step - 19), step + 1))
            torch.testing.assert_close(rows[:, OBS + ACT], rows[:, 0] + 0.5)
            torch.testing.assert_close(rows[:, -1], rows[:, 0] + 1)


def test_rows_are_drawn_uniformly(method):
    learner = method.learner(utd=20, batch_size=100)
    calls = access.record_calls(method, learner)
    learner.update(50)
    (position,) = access.inputs_of(calls, "sample", "position")
    assert position.shape == (2100,)
    check_uniform(position, 0, 1)


# ------------------------------------------------------------------------------------------------------------ randomness
def check_uniform(drawn, low, high):
    """Random numbers that are spread evenly over an interval, and hardly any of them twice."""
    slack = 1e-5 * high
    width = high - low
    assert low - slack <= drawn.min() < low + 0.01 * width
    assert high - 0.01 * width < drawn.max() <= high + slack
    shares = ((drawn.double() - low) / width).sort()[0]  # as in a test of Kolmogorov and Smirnov
    assert (shares - torch.linspace(0, 1, len(drawn), dtype=torch.float64)).abs().max() < 2 / math.sqrt(len(drawn))
    assert len(drawn.unique()) > 0.99 * len(drawn)


def trained_conditions(method, **options):
    """Those of the critic updates of an environment step."""
    learner = method.learner(utd=20, batch_size=200, **options)
    calls = access.record_calls(method, learner)
    learner.update(50)
    (condition,) = access.inputs_of(calls, "prepare_critics", method.condition)
    return condition


def explored_conditions(method, **options):
    """Those that the actor saw in 1000 environment steps."""
    learner = method.learner(**options)
    seen = []
    learner.actor.register_forward_hook(lambda module, inputs, output: seen.append(inputs[-1].exp().item()))
    for _ in range(1000):
        learner.act(np.zeros(OBS, np.float32))
    return torch.tensor(seen)


@conditioned
def test_training_draws_from_u1(method):
    """A condition of its own for every sample."""
    check_uniform(trained_conditions(method), *method.training_range)


@conditioned
def test_exploration_draws_from_u2(method):
    """A fresh condition in every environment step."""
    check_uniform(explored_conditions(method), *method.exploration_range)


@pytest.mark.kinds("sac", "td3")
def test_beta_min(method):
    """The lower end of U1 and U2, at most the upper end of U2."""
    check_uniform(trained_conditions(method, beta_min=0.2), 0.2, 0.8)
    check_uniform(explored_conditions(method, beta_min=0.2), 0.2, 0.3)
    method.learner(beta_min=0.3)
    with pytest.raises(method.script.UserError, match=r"beta_min is 0\.31"):
        method.learner(beta_min=0.31)


def acted(learner, count) -> np.ndarray:
    """The actions (count, A) for as many observations, each of which its actor has seen."""
    all_obs = np.random.default_rng(0).normal(size=(count, OBS)).astype(np.float32)
    seen = []
    hook = learner.actor.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].clone()))
    actions = np.stack([learner.act(obs) for obs in all_obs])
    hook.remove()
    np.testing.assert_array_equal(torch.cat(seen).numpy(), all_obs)
    return actions


@sac_family
def test_exploration_is_stochastic(method):
    """tanh(mean + std * N(0, 1)), from the mean and the deviation that the actor gave."""
    learner = method.learner()
    outputs = []
    learner.actor.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    actions = acted(learner, 2000)
    mean, log_std = (torch.cat(part).numpy() for part in zip(*outputs, strict=True))
    noise = (np.arctanh(actions) - mean) / np.exp(log_std)
    assert actions.shape == (2000, ACT)
    np.testing.assert_allclose(noise.mean(0), 0, atol=0.1)
    np.testing.assert_allclose(np.cov(noise.T), np.eye(ACT), atol=0.1)


@pytest.mark.kinds("td3")
def test_exploration_of_td3(method):
    """The policy's action plus N(0, exploration_noise), clipped."""
    learner = method.learner(exploration_noise=0.1)
    outputs = []
    learner.actor.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    actions = acted(learner, 2000)
    noise = actions - torch.cat(outputs).numpy()
    np.testing.assert_allclose(noise.mean(0), 0, atol=0.01)
    np.testing.assert_allclose(np.cov(noise.T), 0.01 * np.eye(ACT), atol=0.001)
    learner.args.exploration_noise = 50.0
    assert np.abs(np.stack([learner.act(np.zeros(OBS, np.float32)) for _ in range(50)])).max() == 1


def test_random_actions(method):
    """Uniform in [-1, 1], and from another generator than the weights."""
    learner = method.learner()
    actions = np.stack([learner.random_action() for _ in range(2000)])
    assert actions.shape == (2000, ACT)
    check_uniform(torch.from_numpy(actions.ravel()), -1, 1)
    drawn = actions.ravel()[:300]
    weights = [p.detach().flatten().numpy()[:300] for name in method.learned for p in getattr(learner, name).parameters()]
    weights = [weight for weight in weights if len(weight) >= 50 and weight.any()]
    assert len(weights) >= 5
    assert all(abs(np.corrcoef(weight, drawn[: len(weight)])[0, 1]) < 0.6 for weight in weights)


@pytest.mark.parametrize("device", DEVICES)
def test_two_learners(method, device):
    """Learners side by side: each ends, to the bit, where it ends alone; another seed ends elsewhere."""

    def trained(*seeds):
        learners = [method.learner(device, seed=seed) for seed in seeds]
        for learner in learners:
            learner.warm_up()
        actions = [[] for _ in learners]
        for step in range(50, 53):
            for learner, acted in zip(learners, actions, strict=True):
                acted.append(learner.act(np.ones(OBS, np.float32)))
                learner.update(step)
        states = [access.state(learner) for learner in learners]
        return [{**state, "actions": torch.tensor(np.stack(acted))} for state, acted in zip(states, actions, strict=True)]

    together = trained(1, 2)
    for state, (alone,) in zip(together, (trained(1), trained(2)), strict=True):
        assert access.differences(state, alone) == []
    assert access.differences(*together)


# --------------------------------------------------------------------------------------------- the random subset's minimum
@with_subsets
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5])
def test_min_over_random_subset_exactly(script, members):
    """Over all orders of the keys, every subset of a size is drawn equally often and gives its own minimum."""
    orders = np.array(list(itertools.permutations(range(members)))).T  # (N, N!)
    keys = torch.from_numpy((orders + 0.5) / members)
    q = torch.from_numpy(np.random.default_rng(0).normal(size=members))
    for size in range(1, members + 1):
        sizes = torch.full((orders.shape[1],), size)
        got = script.min_over_random_subset(q[:, None].expand(-1, orders.shape[1]), sizes, keys)
        subsets = list(itertools.combinations(q.tolist(), size))
        expected = np.sort(np.repeat([min(subset) for subset in subsets], orders.shape[1] // len(subsets)))
        np.testing.assert_array_equal(np.sort(got.numpy()), expected)


@with_subsets
def test_min_over_random_subset_with_equal_keys(script):
    """Equal keys are ranked by position: a subset never has more or fewer members than its size."""
    q = torch.tensor([[3.0, 3.0, 3.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    got = script.min_over_random_subset(q, torch.tensor([1, 2, 3]), torch.full((3, 3), 0.5))
    assert got.tolist() == [3, 1, 1]


@pytest.mark.kinds("itm")
def test_sizes_are_of_each_sample(script):
    keys = torch.tensor([[0.1, 0.1], [0.9, 0.9]])
    q = torch.tensor([[5.0, 5.0], [-1.0, -1.0]])
    assert script.min_over_random_subset(q, torch.tensor([2.0, 1.0]), keys).tolist() == [-1, 5]


@pytest.mark.kinds("itm")
def test_subset_sizes_of_itm(method):
    """size is floor(k) or floor(k) + 1, the latter with probability k - floor(k); subsets and sizes are of each sample."""
    learner = method.learner(train_k_max=3.0, utd=20, batch_size=100)
    calls = access.record_calls(method, learner)
    learner.update(50)
    k = access.inputs_of(calls, "prepare_critics", "k")[0].numpy()
    size = torch.cat([batch.size for batch in access.inputs_of(calls, "update_critics", "batch")]).numpy()
    check_uniform(torch.from_numpy(k), 1, 3)
    larger = size - np.floor(k)
    assert set(larger.tolist()) == {0, 1}
    for part in range(4):  # of those whose k ends in this quarter: about 500
        ends_here = np.floor(4 * (k % 1)) == part
        assert larger[ends_here].mean() == pytest.approx((k % 1)[ends_here].mean(), abs=0.08)
    keys = torch.stack(access.inputs_of(calls, "update_critics", "keys"))
    assert keys.shape == (20, MEMBERS, 100)
    check_uniform(keys.flatten(), 0, 1)


@pytest.mark.kinds("vanilla")
@pytest.mark.parametrize("min_size,sizes", [(2.0, {2.0}), (1.5, {1.0, 2.0}), (1.0, {1.0})])
def test_subset_sizes_of_redq(method, min_size, sizes):
    """One size and one subset for each minibatch."""
    learner = method.learner(target_rule="in-target-min", min_size=min_size, utd=200, batch_size=8)
    calls = access.record_calls(method, learner)
    learner.update(50)
    subsets = access.inputs_of(calls, "update_critics", "subset")
    drawn = torch.cat([subset.size for subset in subsets])
    assert len(drawn) == 200
    assert set(drawn.tolist()) == sizes
    assert drawn.mean() == pytest.approx(min_size, abs=0.15)
    keys = torch.stack([subset.keys for subset in subsets])
    assert keys.shape == (200, MEMBERS, 1)
    check_uniform(keys.flatten(), 0, 1)


# ----------------------------------------------------------------------------------------------------- compiled functions
WAYS = [  # device, compile, cudagraphs
    ("cpu", True, False),
    pytest.param("cuda", True, False, marks=needs_gpu),
    pytest.param("cuda", False, True, marks=needs_gpu),
    pytest.param("cuda", True, True, marks=needs_gpu),
]


@pytest.mark.slow
@pytest.mark.parametrize("device,compile,cudagraphs", WAYS)
def test_fast_ways_equal_eager(method, device, compile, cudagraphs):
    """warm_up() leaves no trace, and from then on both ways are the same on the same transitions and noise.

    Gradients and metrics of the first step to 1e-5, the parameters after 50 steps to 1e-3.
    """
    sizes = {"hidden_dim": 32, "utd": 2, "q_lr_warmup_end": 90}  # a learning rate that a graph or compiled code must see change
    eager = method.learner(device, compile=False, cudagraphs=False, **sizes)
    fast = method.learner(device, compile=compile, cudagraphs=cudagraphs, **sizes)
    fast.warm_up()
    assert access.differences(access.state(fast), access.state(eager)) == []
    assert bool(fast.update_graph) == bool(fast.act_graph) == cudagraphs

    for learner in (eager, fast):
        learner.update(50)
    for network in method.learned:
        wanted, got = (access.flat(access.gradient(learner, network).values()) for learner in (eager, fast))
        assert relative_error(got, wanted) < 1e-5, network
    assert fast.read_metrics(1) == pytest.approx(eager.read_metrics(1), rel=1e-5, abs=1e-6)

    for learner in (eager, fast):
        for step in range(51, 100):
            learner.update(step)
    for network in (*method.learned, "target"):
        wanted, got = (access.flat(getattr(learner, network).parameters()) for learner in (eager, fast))
        assert relative_error(got, wanted) < 1e-3, network
    assert fast.counts["critic"].item() == eager.counts["critic"].item() == 100


@pytest.mark.slow
def test_gradient_at_full_size(method):
    """A compiled critic gradient at Ant-v4's and the default sizes, with the settings of a run, against float64."""
    script = method.script
    args = script.check_args(script.Args(env_id="Ant-v4", buffer_size=5000, total_timesteps=5000), action_dim=8)
    script.set_up_torch(args, torch.device("cpu"))
    learner = script.Learner(args, 27, 8, torch.device("cpu"))
    rows = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    rows[:, 36] = (rows[:, 36] > 1).float()
    batch = method.minibatch(learner, rows, seed=0)
    exact = method.exact(learner)
    next_action, _, loss, y = exact_critic_step(method, exact, batch.double())
    got_action, _, _, got_y = method.critic_step(learner, batch, LR)
    assert relative_error(got_action, next_action) < 1e-5
    assert relative_error(got_y, y) < 1e-5
    expected = reference.gradient(loss, exact.critic)
    assert relative_error(access.flat(access.gradient(learner, "critic").values()), access.flat(expected.values())) < 1e-5


@pytest.mark.parametrize("failing", [None, "update_critics", "update_actor"])
def test_warm_up_leaves_no_trace(method, monkeypatch, failing):
    """Whether the compiler works or fails half-way: here one that returns what it was given, or a function that raises."""
    ran = []

    def fake_compile(function, **options):
        def compiled(*inputs):
            ran.append(function.__name__)
            if function.__name__ == failing:
                raise RuntimeError("no compiler")
            return function(*inputs)

        return compiled

    monkeypatch.setattr(torch, "compile", fake_compile)
    learner = method.learner(compile=True)
    before = access.state(learner)
    if failing:
        with pytest.raises(method.script.DoesNotWork, match="no compiler"):
            learner.warm_up()
        assert ran[-1] == failing
    else:
        learner.warm_up()
        assert set(ran) == {function.__name__ for function in method.script.COMPILED}
    assert access.differences(before, access.state(learner)) == []


@on_cuda
def test_captured_acting_equals_eager(method, device):
    """To the bit, over observations that change and updates in between, of the same transitions and noise."""
    eager = method.learner(device, cudagraphs=False)
    captured = method.learner(device, cudagraphs=True)
    captured.warm_up()
    assert captured.act_graph
    assert access.differences(access.state(eager), access.state(captured)) == []
    rng = np.random.default_rng(0)
    for _ in range(50):
        obs = rng.normal(size=OBS).astype(np.float32)
        np.testing.assert_array_equal(captured.act(obs), eager.act(obs))
        np.testing.assert_array_equal(captured.random_action(), eager.random_action())
    captured.update(50)
    eager.load_state_dict(captured.state_dict())
    eager.generator.set_state(captured.generator.get_state())
    for _ in range(50):
        obs = rng.normal(size=OBS).astype(np.float32)
        np.testing.assert_array_equal(captured.act(obs), eager.act(obs))


@on_cuda
def test_a_learner_outlives_another(method, device):
    """What the graphs of the first one held is freed and overwritten; the second one's go on as eager does.

    cuBLAS frees a stream's workspace with the first graph captured there; PyTorch deals out 32 streams in turn.
    """
    eager = method.learner(device, cudagraphs=False)
    first, second = (method.learner(device, cudagraphs=True) for _ in range(2))
    first.warm_up()
    second.warm_up()
    assert first.stream.cuda_stream != second.stream.cuda_stream
    del first
    gc.collect()
    torch.cuda.empty_cache()
    overwritten = torch.full((1 << 28,), torch.nan, device=device)
    for step in range(50, 60):
        eager.update(step)
        second.update(step)
    assert overwritten.isnan().all()
    for network in (*method.learned, "target"):
        wanted, got = (access.flat(getattr(learner, network).parameters()) for learner in (eager, second))
        assert relative_error(got, wanted) < 1e-3, network
