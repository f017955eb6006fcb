"""The mathematics against independent float64 numpy."""

import numpy as np
import pytest
import reference
import torch

import rac_sac

OBS, ACT = 5, 3
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def make_learner(device="cpu", **options):
    options = {"utd": 3, "num_critics": 4, "hidden_dim": 24, "batch_size": 16, "buffer_size": 200, "target_entropy": -3.0,
               "compile": False, "learning_starts": 20, "q_lr_warmup_end": 40, **options}  # fmt: skip
    args = rac_sac.Args(**options)
    learner = rac_sac.Learner(args, OBS, ACT, torch.device(device))
    rng = np.random.default_rng(7)
    for step in range(100):
        obs, action, next_obs = rng.normal(size=OBS), rng.uniform(-1, 1, ACT), rng.normal(size=OBS)
        learner.store(step, obs, action, rng.normal(), step % 10 == 9, next_obs)
    return learner


def numpy_members(learner, name="critic", flat="critic"):
    """The ensemble as N lists of float64 (weight, bias)."""
    views = {k: v.double().numpy() for k, v in learner.networks[name].views(learner.state[flat].cpu()).items()}
    layers = [(views[f"layer{i}.weight"], views[f"layer{i}.bias"]) for i in (1, 2, 3)]
    return [[(w[m], b[m, 0]) for w, b in layers] for m in range(len(layers[0][0]))]


def numpy_actor(learner):
    """The actor as two lists of float64 (weight, bias): towards the mean and towards the log standard deviation."""
    views = {k: v.double().numpy() for k, v in learner.networks["actor"].views(learner.state["actor"].cpu()).items()}
    layers = {k: (views[f"{k}.weight"].T, views[f"{k}.bias"]) for k in ("layer1", "layer2", "mean", "log_std")}
    return [layers["layer1"], layers["layer2"], layers["mean"]], [layers["layer1"], layers["layer2"], layers["log_std"]]


def numpy_alpha(learner, beta):
    views = {k: v.double().numpy() for k, v in learner.networks["temperature"].views(learner.state["temperature"]).items()}
    layers = [(views[f"network.{i}.weight"].T, views[f"network.{i}.bias"]) for i in (0, 2)]
    outputs = reference.relu_network(layers, np.log(beta)[:, None])
    return np.exp(outputs[-1][:, 0] + learner.args.initial_log_alpha), layers, outputs


def minibatch(learner, seed=3):
    generator = torch.Generator().manual_seed(seed)
    rows = learner.replay[torch.randint(100, (16,), generator=generator)]
    return rows, torch.rand(16, generator=generator) * 0.8, torch.randn(16, ACT, generator=generator)


def first_step(lr):
    """What adam_scales gives for a first update: lr / (1 - 0.9) and sqrt(1 - 0.999)."""
    return torch.tensor([lr / 0.1, 0.001**0.5])


def split(rows):
    rows = rows.double().numpy()
    return rows[:, :OBS], rows[:, OBS:OBS + ACT], rows[:, OBS + ACT], rows[:, OBS + ACT + 1], rows[:, OBS + ACT + 2:]


# ---------------------------------------------------------------------------------------------------------- the target
@pytest.mark.parametrize("members", [2, 3, 10])
@pytest.mark.parametrize("beta", ["zero", "random"])
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e15])
def test_upq_target(members, beta, scale):
    rng = np.random.default_rng(members)
    q, reward, bonus = rng.normal(size=(members, 64)) * scale, rng.normal(size=64), rng.normal(size=64)
    terminated = (rng.uniform(size=64) < 0.3).astype(float)
    betas = np.zeros(64) if beta == "zero" else rng.uniform(0, 0.8, 64)
    expected = reference.upq_target(q, betas, reward, terminated, 0.97, bonus)
    inputs = [torch.tensor(x) for x in (q, betas, reward, terminated)]
    assert reference.relative_error(rac_sac.upq_target(*inputs, 0.97, torch.tensor(bonus)), expected) < 1e-12
    inputs = [x.float() for x in inputs]
    single = rac_sac.upq_target(*inputs, 0.97, torch.tensor(bonus).float())
    assert single.dtype == torch.float32 and reference.relative_error(single, expected) < 1e-5
    np.testing.assert_allclose(single.numpy()[terminated == 1], reward[terminated == 1], rtol=1e-6)


def test_upq_target_of_two_members_is_known():
    """q = 1 and 3: mean 2, sample standard deviation sqrt(2)."""
    one = torch.ones(1)
    y = rac_sac.upq_target(torch.tensor([[1.0], [3.0]]), 0.5 * one, 10 * one, 0 * one, 0.9, -0.25 * one)
    assert y.item() == pytest.approx(10 + 0.9 * (2 - 0.5 * np.sqrt(2) - 0.25))


# ------------------------------------------------------------------------------------------------ the squashed Gaussian
def test_log_prob_against_torch_distributions():
    from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = (torch.randn(200, ACT, generator=generator, dtype=torch.float64) for _ in range(3))
    action, log_prob = rac_sac.squashed_gaussian(mean, log_std, noise)
    base = Independent(TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1)), 1)
    u = mean + log_std.exp() * noise
    assert torch.equal(action, u.tanh())
    base.base_dist.transforms[0]._cached_x_y = (u, action)  # atanh(action) would lose the digits that are tested here
    torch.testing.assert_close(log_prob, base.log_prob(action), rtol=1e-10, atol=1e-10)
    near = u.abs().amax(1) < 5  # further out the textbook form loses digits even in float64
    expected = reference.squashed_log_prob(u[near].numpy(), mean[near].numpy(), log_std[near].exp().numpy())
    np.testing.assert_allclose(log_prob[near].numpy(), expected, rtol=1e-7)


def test_log_prob_integrates_to_one():
    """The density over the action interval, by quadrature in the action, not in u."""
    for mean, log_std in ((0.0, -1.0), (0.7, -0.5), (-0.4, 0.0)):
        edges = np.linspace(-1, 1, 400_001)
        a = (edges[1:] + edges[:-1]) / 2
        noise = (np.arctanh(a) - mean) / np.exp(log_std)
        inputs = torch.full((len(a), 1), mean).double(), torch.full((len(a), 1), log_std).double()
        _, log_prob = rac_sac.squashed_gaussian(*inputs, torch.tensor(noise)[:, None])
        assert float(log_prob.exp().sum() * (edges[1] - edges[0])) == pytest.approx(1, abs=1e-3)


def test_log_prob_is_finite_and_right_far_out():
    noise = torch.tensor([[40.0], [-40.0]])
    _, log_prob = rac_sac.squashed_gaussian(torch.zeros(2, 1), torch.zeros(2, 1), noise)
    # for large |u|: log(1 - tanh(u)^2) = log 4 - 2 |u|
    expected = -0.5 * 40**2 - 0.5 * np.log(2 * np.pi) - (np.log(4) - 80)
    np.testing.assert_allclose(log_prob.numpy(), [expected, expected], rtol=1e-6)


# ------------------------------------------------------------------------------------------- one step of each network
def test_critic_step():
    learner = make_learner()
    rows, beta, noise = minibatch(learner)
    step = first_step(3e-4)
    learner.state["target"] += 0.1 * torch.randn(learner.state["target"].shape, generator=torch.Generator().manual_seed(1))
    before = {k: v.clone() for k, v in learner.state.items()}
    obs, action, reward, terminated, next_obs = split(rows)
    betas, log_beta = beta.double().numpy(), np.log(beta.double().numpy())[:, None]
    assert terminated.any() and not terminated.all()

    to_mean, to_log_std = numpy_actor(learner)
    x = np.hstack([next_obs, log_beta])
    mean = reference.relu_network(to_mean, x)[-1]
    std = np.exp(np.clip(reference.relu_network(to_log_std, x)[-1], -10, 2))
    u = mean + std * noise.double().numpy()
    bonus = -numpy_alpha(learner, betas)[0] * reference.squashed_log_prob(u, mean, std)
    next_x = np.hstack([next_obs, np.tanh(u), log_beta])
    q_next = np.stack([reference.relu_network(m, next_x)[-1][:, 0] for m in numpy_members(learner, flat="target")])
    y = reference.upq_target(q_next, betas, reward, terminated, 0.99, bonus)
    x = np.hstack([obs, action, log_beta])
    grads, loss = [], 0.0
    for member in numpy_members(learner):
        outputs = reference.relu_network(member, x)
        error = outputs[-1][:, 0] - y
        loss += (error**2).mean()
        grads.append(reference.backward(member, x, outputs, (2 * error / len(error))[:, None])[0])

    with torch.no_grad():
        next_action, entropy_bonus = rac_sac.prepare_targets(learner.networks, learner.state, rows, beta, noise)
        rac_sac.update_critics(learner.networks, learner.state, rows, beta, next_action, entropy_bonus, step, 0.99, 0.005)
    assert reference.relative_error(entropy_bonus, bonus) < 1e-5
    assert learner.state["metrics"][0].item() == pytest.approx(loss, rel=1e-5)
    critic = learner.networks["critic"]
    first_moment = critic.views(learner.state["critic_m"])
    for i in (1, 2, 3):
        weight, bias = np.stack([g[i - 1][0] for g in grads]), np.stack([g[i - 1][1] for g in grads])[:, None]
        assert reference.relative_error(first_moment[f"layer{i}.weight"] * 10, weight) < 1e-5
        assert reference.relative_error(first_moment[f"layer{i}.bias"] * 10, bias) < 1e-5
    grad = (learner.state["critic_m"] * 10).double().numpy()
    expected = reference.adam(before["critic"].double().numpy(), [grad], 3e-4)
    moved = expected - before["critic"].double().numpy()
    # Adam's first step is +-lr wherever the gradient is not tiny: compare the step, not the parameters
    assert reference.relative_error(learner.state["critic"].double().numpy() - before["critic"].double().numpy(), moved) < 1e-3
    polyak = 0.995 * before["target"].double() + 0.005 * learner.state["critic"].double()
    assert reference.relative_error(learner.state["target"], polyak) < 1e-6
    for name in ("actor", "temperature"):
        assert torch.equal(learner.state[name], before[name])


def test_actor_step():
    learner = make_learner()
    rows, beta, noise = minibatch(learner)
    before = {k: v.clone() for k, v in learner.state.items()}
    obs, betas, eps = split(rows)[0], beta.double().numpy(), noise.double().numpy()
    log_beta = np.log(betas)[:, None]
    alpha = numpy_alpha(learner, betas)[0]
    to_mean, to_log_std = numpy_actor(learner)
    x = np.hstack([obs, log_beta])
    outputs_mean, outputs_std = reference.relu_network(to_mean, x), reference.relu_network(to_log_std, x)
    mean, log_std = outputs_mean[-1], outputs_std[-1]
    assert (np.abs(log_std) < 2).all()  # no clamping here
    u = mean + np.exp(log_std) * eps
    action, members = np.tanh(u), numpy_members(learner)
    q_input, count = np.hstack([obs, action, log_beta]), len(betas)
    q, dq_da = [], np.zeros_like(action)
    for member in members:
        outputs = reference.relu_network(member, q_input)
        q.append(outputs[-1][:, 0])
        dq_da += reference.backward(member, q_input, outputs, np.ones((count, 1)))[1][:, OBS:OBS + ACT] / len(members)
    loss = (alpha * reference.squashed_log_prob(u, mean, np.exp(log_std)) - np.mean(q, 0)).mean()
    # d log_prob / du = 2 tanh(u) at fixed noise, and -1 for each log_std; dQ/du = dQ/da (1 - tanh^2)
    du = (alpha[:, None] * 2 * action - dq_da * (1 - action**2)) / count
    d_mean, d_log_std = du, du * np.exp(log_std) * eps - alpha[:, None] / count
    grads_mean, _ = reference.backward(to_mean, x, outputs_mean, d_mean)
    grads_std, _ = reference.backward(to_log_std, x, outputs_std, d_log_std)
    expected = {"mean": grads_mean[2], "log_std": grads_std[2]}
    for i in (0, 1):
        expected[f"layer{i + 1}"] = [a + b for a, b in zip(grads_mean[i], grads_std[i], strict=True)]

    with torch.no_grad():
        rac_sac.update_actor(learner.networks, learner.state, rows, beta, noise, first_step(3e-4))
    assert learner.state["metrics"][4].item() == pytest.approx(loss, rel=1e-4)
    first_moment = learner.networks["actor"].views(learner.state["actor_m"])
    for name, (weight, bias) in expected.items():
        assert reference.relative_error(first_moment[f"{name}.weight"].T * 10, weight) < 1e-5, name
        assert reference.relative_error(first_moment[f"{name}.bias"] * 10, bias) < 1e-5, name
    assert not torch.equal(learner.state["actor"], before["actor"])
    for name in ("critic", "target", "temperature"):
        assert torch.equal(learner.state[name], before[name])


def test_temperature_step():
    learner = make_learner()
    rows, beta, noise = minibatch(learner)
    before = {k: v.clone() for k, v in learner.state.items()}
    betas, eps = beta.double().numpy(), noise.double().numpy()
    x = np.hstack([split(rows)[0], np.log(betas)[:, None]])
    to_mean, to_log_std = numpy_actor(learner)
    mean, std = reference.relu_network(to_mean, x)[-1], np.exp(reference.relu_network(to_log_std, x)[-1])
    log_prob = reference.squashed_log_prob(mean + std * eps, mean, std)
    alpha, layers, outputs = numpy_alpha(learner, betas)
    loss = (-alpha * (log_prob - 3.0)).mean()  # target entropy -3
    grads, _ = reference.backward(layers, np.log(betas)[:, None], outputs, (-alpha * (log_prob - 3.0) / 16)[:, None])
    with torch.no_grad():
        rac_sac.update_temperature(learner.networks, learner.state, rows, beta, noise, first_step(3e-4), -3.0)
    assert learner.state["metrics"][7].item() == pytest.approx(loss, rel=1e-4)
    first_moment = learner.networks["temperature"].views(learner.state["temperature_m"])
    for i, (weight, bias) in zip((0, 2), grads, strict=True):
        assert reference.relative_error(first_moment[f"network.{i}.weight"].T * 10, weight) < 1e-5
        assert reference.relative_error(first_moment[f"network.{i}.bias"] * 10, bias) < 1e-5
    for name in ("actor", "critic"):
        assert torch.equal(learner.state[name], before[name])


@pytest.mark.parametrize("options,initial", [({"temperature_network": False}, np.exp(-5)),
                                             ({"autotune": False, "alpha": 0.37}, 0.37)])  # fmt: skip
def test_temperature_without_network(options, initial):
    learner = make_learner(**options)
    betas = [0.1, 0.4, 0.8]
    np.testing.assert_allclose(rac_sac.alphas(learner, betas), [initial] * 3, rtol=1e-6)
    for step in range(5):
        learner.update(50 + step)
    after = rac_sac.alphas(learner, betas)
    assert after[0] == after[1] == after[2]
    assert (after[0] == pytest.approx(initial, rel=1e-6)) == (not learner.args.autotune)


# --------------------------------------------------------------------------------------------------- networks, ensemble
def test_ensemble_equals_separate_networks():
    learner = make_learner()
    generator = torch.Generator().manual_seed(2)
    obs, action, log_beta = (torch.randn(33, n, generator=generator) for n in (OBS, ACT, 1))
    q = learner.networks["critic"](learner.networks["critic"].views(learner.state["critic"]), obs, action, log_beta)
    x = torch.cat([obs, action, log_beta], 1).double().numpy()
    expected = np.stack([reference.relu_network(m, x)[-1][:, 0] for m in numpy_members(learner)])
    assert q.shape == (4, 33) and reference.relative_error(q, expected) < 1e-5


def test_members_are_independent():
    """A change to one member's target-loss moves that member alone."""
    learner = make_learner()
    critic = learner.networks["critic"]
    obs, action, log_beta = torch.randn(8, OBS), torch.randn(8, ACT), torch.randn(8, 1)

    def loss(parameters, weights):
        return (critic(parameters, obs, action, log_beta) * weights[:, None]).square().mean(1).sum()

    views = critic.views(learner.state["critic"])
    one = torch.func.grad(loss)(views, torch.ones(4))
    other = torch.func.grad(loss)(views, torch.tensor([1.0, 1.0, 5.0, 1.0]))
    for name in one:
        changed = [not torch.equal(one[name][m], other[name][m]) for m in range(4)]
        assert changed == [False, False, True, False], name


def test_initialisation():
    layer = rac_sac.EnsembleLinear(6, 36, 256)
    assert layer.weight.shape == (6, 36, 256) and not layer.bias.any()
    assert 0.98 / 6 < layer.weight.abs().max() <= 1 / 6  # U(+-1/sqrt(36)): the fan-in of one member
    assert layer.weight.std().item() == pytest.approx(1 / 6 / np.sqrt(3), rel=0.02)
    assert len({layer.weight[m].sum().item() for m in range(6)}) == 6
    actor = rac_sac.Actor(8, 3, 16)
    assert all(not module.bias.any() for module in (actor.layer1, actor.layer2, actor.mean, actor.log_std))
    assert rac_sac.Temperature(True, True, -5.0, 0.2).network[0].bias.any()


def test_log_std_is_clamped():
    actor = rac_sac.Actor(2, 1, 4)
    for bias, expected in ((100.0, 2.0), (-100.0, -10.0)):
        torch.nn.init.constant_(actor.log_std.bias, bias)
        assert actor(torch.zeros(1, 2), torch.zeros(1, 1))[1].item() == expected


def test_policy_of_the_workers_equals_the_networks():
    """Evaluation plays the policy of one beta; here against float64 numpy, deterministic and stochastic."""
    learner, beta = make_learner(), 0.3
    rng = np.random.default_rng(0)
    obs, noise = rng.normal(size=(10, OBS)).astype(np.float32), rng.normal(size=(10, ACT)).astype(np.float32)
    x = np.hstack([obs, np.full((10, 1), np.log(beta))])
    to_mean, to_log_std = numpy_actor(learner)
    mean, std = reference.relu_network(to_mean, x)[-1], np.exp(reference.relu_network(to_log_std, x)[-1])
    actor, critic = (learner.networks[name].bind(learner.copy_of(name)) for name in ("actor", "critic"))
    np.testing.assert_allclose(rac_sac.policy(actor, obs, beta)[0], np.tanh(mean), atol=1e-6)
    action, log_prob = rac_sac.policy(actor, obs, beta, noise)
    u = mean + std * noise
    np.testing.assert_allclose(action, np.tanh(u), atol=1e-6)
    np.testing.assert_allclose(log_prob, reference.squashed_log_prob(u, mean, std), rtol=1e-4, atol=1e-5)
    x = np.hstack([obs, action, np.full((10, 1), np.log(beta))])
    q = np.mean([reference.relu_network(m, x)[-1][:, 0] for m in numpy_members(learner)], 0)
    np.testing.assert_allclose(rac_sac.mean_q(critic, obs, action, beta), q, atol=1e-6)


# ------------------------------------------------------------------------------------------------ optimiser and schedule
def test_adam_against_torch():
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(1000, generator=generator)
    ours, theirs = params.clone(), torch.nn.Parameter(params.clone())
    first, second, count = torch.zeros(1000), torch.zeros(1000), torch.zeros(1, dtype=torch.float64)
    optimizer = torch.optim.Adam([theirs], lr=3e-4)
    grads, scales = [], []
    for _ in range(50):
        grad = torch.randn(1000, generator=generator)
        grads.append(grad.double().numpy())
        if not scales:
            scales = list(rac_sac.adam_scales(count, 3e-4, 5))  # five updates at a time
        rac_sac.adam_(ours, grad, first, second, scales.pop(0))
        theirs.grad = grad
        optimizer.step()
    assert reference.relative_error(ours - params, theirs.detach() - params) < 1e-4
    assert count.item() == 50
    exact = reference.adam(params.double().numpy(), grads, 3e-4) - params.double().numpy()
    assert reference.relative_error(ours.double() - params.double(), exact) < 1e-4


def test_critic_learning_rate():
    args = rac_sac.Args()
    expected = {5000: 3e-5, 6250: 0.75 * 3e-5 + 0.25 * 3e-4, 7500: 1.65e-4, 10000: 3e-4, 300000: 3e-4, 0: 3e-5}
    for step, rate in expected.items():
        assert rac_sac.critic_learning_rate(args, step) == pytest.approx(rate)
    args.q_lr_warmup_end = args.learning_starts
    assert rac_sac.critic_learning_rate(args, 5001) == 3e-4
    constant = rac_sac.check_args(rac_sac.Args(learning_starts=20000, q_lr_init=3e-4))  # no warm-up: its end has no meaning
    assert rac_sac.critic_learning_rate(constant, 20001) == 3e-4


def test_flat_views_are_aligned_and_cover_the_module():
    network = rac_sac.FlatNetwork(rac_sac.Critic(3, 5, 2, 7))
    assert all(offset % 16 == 0 for _, offset, _ in network.layout)
    parameters = dict(network.module.named_parameters())
    views = network.views(network.pack(parameters))
    assert all(torch.equal(views[k], v) for k, v in parameters.items()) and views.keys() == parameters.keys()


# ---------------------------------------------------------------------------------------------------------------- replay
@pytest.mark.parametrize("device", DEVICES)
def test_replay_wraps_around_and_samples_only_what_is_filled(device):
    args = rac_sac.Args(buffer_size=8, utd=50, batch_size=8, num_critics=2, hidden_dim=4, compile=False, target_entropy=-1.0)
    learner = rac_sac.Learner(args, 2, 1, torch.device(device))
    learner.replay.fill_(torch.nan)
    seen = []
    learner.prepare_targets = lambda networks, state, rows, *rest: (seen.append(rows), _zeros(rows))[1]
    learner.update_critics = learner.update_actor = learner.update_temperature = lambda *inputs: None
    for step in range(20):
        learner.store(step, [step, step], [0.0], step + 0.5, False, [step + 1, step + 1])
        learner.update(step)
        rows = seen.pop().cpu()
        assert set(rows[:, 0].tolist()) == set(range(max(0, step - 7), step + 1))
        torch.testing.assert_close(rows[:, 3], rows[:, 0] + 0.5)
        torch.testing.assert_close(rows[:, 5], rows[:, 0] + 1)


def _zeros(rows):
    return torch.zeros(len(rows), 1, device=rows.device), torch.zeros(len(rows), device=rows.device)


def test_noise_has_the_right_ranges():
    """Betas of the update are U1, fresh for each sample; minibatches are fresh for each critic step."""
    learner = make_learner(utd=200)
    seen = []
    learner.update_critics = lambda networks, state, rows, beta, *rest: seen.append((rows.clone(), beta.clone()))
    learner.update(50)
    betas = torch.cat([beta for _, beta in seen])
    assert len(seen) == 200 and betas.min() >= 1e-7 and 0.79 < betas.max() <= 0.8
    assert betas.mean() == pytest.approx(0.4, abs=0.02) and len(betas.unique()) > 0.99 * len(betas)
    assert not torch.equal(seen[0][0], seen[1][0])


def test_exploration_uses_fresh_small_betas():
    learner = make_learner()
    seen = []
    module = learner.networks["actor"].module
    module.register_forward_hook(lambda module, inputs, output: seen.append(inputs[1].exp().item()))
    actions = [learner.act(np.zeros(OBS, np.float32)) for _ in range(300)]
    assert max(seen) <= 0.3 * (1 + 1e-5) and max(seen) > 0.28 and len(set(seen)) == 300
    assert all(a.shape == (ACT,) and (np.abs(a) <= 1).all() for a in actions)


# ----------------------------------------------------------------------------------------------------- compiled functions
WAYS = [("cpu", True, False)]  # device, compile, cudagraphs
if torch.cuda.is_available():
    WAYS += [("cuda", True, False), ("cuda", False, True), ("cuda", True, True)]


@pytest.mark.parametrize("device,compile,cudagraphs", WAYS)
def test_fast_ways_equal_eager(device, compile, cudagraphs):
    """On the same transitions and noise: the gradient to 1e-5, the parameters after 50 steps to 1e-3."""
    learners = [make_learner(device, compile=compile and fast, cudagraphs=cudagraphs and fast, hidden_dim=32, utd=2)
                for fast in (False, True)]  # fmt: skip
    for steps, bounds in ((1, {"critic_m": 1e-5, "actor_m": 1e-5, "temperature_m": 1e-5}),
                          (49, {"critic": 1e-3, "target": 1e-3, "actor": 1e-3, "temperature": 1e-3})):  # fmt: skip
        for learner in learners:
            for i in range(steps):
                learner.update(50 + i)
        eager, fast = (learner.state for learner in learners)
        for name, bound in bounds.items():
            assert reference.relative_error(fast[name].cpu(), eager[name].cpu()) < bound, (steps, name)
    assert eager["critic_count"].item() == fast["critic_count"].item() == 100
    assert (learners[1].update_graph is not None) == cudagraphs


def test_gradient_at_full_size():
    """A compiled critic gradient at Ant-v4's and the default sizes, with the settings of a run, against float64."""
    args = rac_sac.Args(target_entropy=-8.0, buffer_size=5000, total_timesteps=5000)
    rac_sac.set_up_torch(args, torch.device("cpu"))
    learner = rac_sac.Learner(args, 27, 8, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    rows, beta = torch.randn(256, 64, generator=generator), torch.rand(256, generator=generator) * 0.8
    noise = torch.randn(256, 8, generator=generator)
    rows[:, 36] = (rows[:, 36] > 1).float()
    exact = {name: tensor.double() for name, tensor in learner.state.items()}
    for state, functions, arrays in ((exact, rac_sac, [t.double() for t in (rows, beta, noise)]),
                                     (learner.state, learner, [rows, beta, noise])):  # fmt: skip
        rows, beta, noise = arrays
        with torch.no_grad():
            next_action, bonus = functions.prepare_targets(learner.networks, state, rows, beta, noise)
            functions.update_critics(learner.networks, state, rows, beta, next_action, bonus,
                                     first_step(3e-4).to(rows.dtype), 0.99, 0.005)  # fmt: skip
    assert learner.state["critic_m"].dtype == torch.float32 and exact["critic_m"].dtype == torch.float64
    assert reference.relative_error(learner.state["critic_m"], exact["critic_m"]) < 1e-5
    torch.set_float32_matmul_precision("highest")
