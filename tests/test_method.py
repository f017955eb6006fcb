"""The mathematics of all four scripts against float64, or of a fork: pytest --script my_rac.py

A script draws all that is random in the updates of an environment step in one place, agent.draw(), and agent.learn() is a
function of that. So the same step can be done by torch.autograd and torch.optim.Adam, and where every parameter went compared.
"""

import copy
import itertools
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import reference
import torch
from conftest import ROOT, SCRIPTS, known_arguments, load_script, of_the_four
from torch.distributions import Normal, TanhTransform, TransformedDistribution, Uniform

OBS, ACT, CAPACITY = 3, 2, 50
RANGES = {
    "beta": {"U1": (0.1, 0.8), "U2": (0.1, 0.3)},
    "k": {"U1": (1, 2.7), "U2": (1, 1.5)},
}  # what small_learner's arguments make of them


def small_learner(script, transitions=40, **options):
    """A small learner that has stored and observed the rows of `stored()`; options that a script does not have are left out."""
    sizes = {"num_critics": 3, "hidden_dim": 16, "batch_size": 8, "utd": 2, "buffer_size": CAPACITY, "compile": False}
    rates = {"q_lr": 3e-3, "q_lr_init": 1e-3, "policy_lr": 2e-3, "alpha_lr": 5e-3, "learning_starts": 100, "q_lr_warmup_end": 200}
    others = {"beta_min": 0.1, "train_k_max": 2.7, "initial_log_alpha": -1.0, "target_entropy": -1.5}
    smoothing = {"policy_noise": 0.8, "noise_clip": 0.9}  # both clips happen
    args = script.Args(**known_arguments(script, sizes | rates | others | smoothing | options))
    script.fill_own_defaults(args, "Toy", ACT)
    learner = script.Learner(args, OBS, ACT, torch.device("cpu"))
    for step, row in enumerate(stored(transitions).numpy(), 1):
        kept = learner.store(step, *parts(row))
        learner.agent.observe(step, kept, None, learner.generator)
    return learner


def stored(transitions):
    """Rows of obs, action, reward, terminated, next_obs, a third of them terminated: (transitions, 2*OBS + ACT + 2)."""
    rows = torch.randn(transitions, 2 * OBS + ACT + 2, generator=torch.Generator().manual_seed(0))
    rows[:, 6] = torch.arange(transitions) % 3 == 0
    return rows


def parts(rows):
    """Their obs, action, reward, terminated, next_obs."""
    return rows[..., :3], rows[..., 3:5], rows[..., 5], rows[..., 6], rows[..., 7:]


def drawn_by(learner, step=150):
    """What an update draws, and the critics' learning rate."""
    with mock.patch.object(learner.agent, "learn") as learn:
        learner.update(step)
    drawn, q_lr = learn.call_args.args
    return drawn, float(q_lr)


def function_of(script, name):
    if not hasattr(script, name):
        pytest.skip(f"{script.__name__} has no {name}")
    return getattr(script, name)


def assert_distributed(values, distribution):
    """Kolmogorov's test; values that are right fail it once in a thousand times."""
    values = values.double().flatten().sort().values
    ranks = (torch.arange(len(values)) + 0.5) / len(values)
    assert (distribution.cdf(values) - ranks).abs().max() < 1.95 / math.sqrt(len(values))
    assert len(values.unique()) > 0.99 * len(values)


def assert_uniform(values, low, high):
    assert low - 1e-6 <= values.min() and values.max() <= high + 1e-6
    assert_distributed(values, Uniform(low, high, validate_args=False))


# Targets ---
members_and_scales = pytest.mark.parametrize("members, scale", [(2, 1.0), (3, 1.0), (10, 1.0), (2, 1e6), (3, 1e6), (10, 1e6)])


def transitions_with_values(members, scale):
    """Of 64 transitions in float64: target critics' values (N, 64), reward, terminated, entropy bonus."""
    torch.manual_seed(members)
    q = torch.randn(members, 64, dtype=torch.float64) * scale
    reward, bonus = torch.randn(2, 64, dtype=torch.float64)
    terminated = (torch.arange(64) % 3 == 0).double()
    return q, reward, terminated, bonus


@members_and_scales
def test_upq_target(script, members, scale):
    upq_target = function_of(script, "upq_target")
    q, reward, terminated, bonus = transitions_with_values(members, scale)
    beta = torch.linspace(0, 0.8, 64, dtype=torch.float64)
    values = map(reference.upq_value, q.T.tolist(), beta.tolist())
    if hasattr(script, "Temperature"):
        got = upq_target(q, beta, reward, terminated, 0.97, bonus)
    else:
        bonus = torch.zeros(64)
        got = upq_target(q, beta, reward, terminated, 0.97)
    y = reference.target(values, reward, terminated, 0.97, bonus)
    torch.testing.assert_close(got, y, msg=lambda difference: f"{difference}\n{reference.HINT}")


@members_and_scales
def test_in_target_minimum(script, members, scale):
    in_target_min = function_of(script, "in_target_min")
    q, reward, terminated, bonus = transitions_with_values(members, scale)
    keys = torch.randn_like(q)
    size = torch.randint(1, members + 1, (64,))
    values = map(reference.in_target_min_value, q.T.tolist(), size, keys.T.tolist())
    y = reference.target(values, reward, terminated, 0.97, bonus)
    torch.testing.assert_close(in_target_min(q, size, keys, reward, terminated, 0.97, bonus), y)


def test_targets_by_hand():
    """q = 1 and 3: mean 2, sample standard deviation sqrt(2), minimum 1. r = 10, gamma = 0.9, beta = 0.5, entropy bonus -0.25."""
    sac, td3, vanilla, itm = (load_script(ROOT / f"{name}.py") for name in SCRIPTS)
    q = torch.tensor([[1.0], [3.0]])
    reward, terminated, gamma, bonus = torch.tensor([10.0]), torch.tensor([0.0]), 0.9, torch.tensor([-0.25])
    upq = 10 + 0.9 * (2 - 0.5 * math.sqrt(2))
    assert td3.upq_target(q, 0.5, reward, terminated, gamma).item() == pytest.approx(upq)
    for script in (sac, vanilla):
        y = script.upq_target(q, 0.5, reward, terminated, gamma, bonus)
        assert y.item() == pytest.approx(upq - 0.9 * 0.25)
    y = itm.in_target_min(q, torch.tensor([2.0]), q, reward, terminated, gamma, bonus)  # q as keys, too
    assert y.item() == pytest.approx(10 + 0.9 * 0.75)


@pytest.mark.parametrize("members", [1, 2, 5])
def test_minimum_over_a_random_subset(script, members):
    """Over all orders of the keys, every subset of a size comes equally often; of equal keys the earlier member is taken."""
    minimum = function_of(script, "min_over_random_subset")
    keys = torch.tensor(list(itertools.permutations(range(members)))).T  # (N, N!)
    values = [3.0, -1.0, 4.0, 1.5, -9.0][:members]
    q = torch.tensor(values)[:, None].expand_as(keys)
    for size in range(1, members + 1):
        subsets = list(itertools.combinations(values, size))
        times = keys.shape[1] // len(subsets)
        expected = sorted(map(min, subsets * times))
        sizes = torch.full(keys.shape[1:], size)
        assert sorted(minimum(q, sizes, keys).tolist()) == expected
        assert minimum(q, sizes, 0 * keys)[0] == min(values[:size])


# Networks ---
def test_log_probability(script):
    """Against torch.distributions, and far out, where log(1 - tanh(u)^2) is log 4 - 2 |u|."""
    squashed_gaussian = function_of(script, "squashed_gaussian")
    mean, log_std, noise = 0.5 * torch.randn(3, 200, ACT, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    action, log_prob = squashed_gaussian(mean, log_std, noise)
    known = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform()).log_prob(action).sum(1)
    torch.testing.assert_close(log_prob, known, rtol=1e-9, atol=1e-9)
    _, log_prob = squashed_gaussian(*torch.zeros(2, 2, 1), torch.tensor([[40.0], [-40.0]]))
    assert log_prob.tolist() == pytest.approx([-720 - 0.5 * math.log(2 * math.pi) - math.log(4)] * 2)


def test_log_std_is_clamped(script, network):
    function_of(script, "squashed_gaussian")
    actor = small_learner(script, network=network).agent.actor
    for parameter in actor.parameters():
        parameter *= 1000
    _, log_std = actor(torch.randn(99, OBS), torch.ones(99, script.CONDITION_DIM))
    assert (log_std.min(), log_std.max()) == (-10, 2)


def test_the_ensemble_is_separate_networks(script, network):
    """The parameters of a member, the first dimension's entries in layers of any kind, move its values and no others."""
    critic = small_learner(script, network=network).agent.critic.eval()
    inputs = torch.randn(20, OBS + ACT + script.CONDITION_DIM)
    for name, parameter in critic.named_parameters():
        for member in range(3):
            before = critic(inputs)
            parameter[member] += torch.randn_like(parameter[member])
            moved = (critic(inputs) != before).any(1).nonzero()
            assert moved.tolist() == [[member]], f"{name} of member {member} moves others, or not its own"


@pytest.mark.parametrize("width", [1, 5])
def test_a_layer_of_the_ensemble(script, width):
    """A product and a bias for each member, of an input that they share, or one each."""
    layer = script.EnsembleLinear(3, 4, width)
    torch.nn.init.normal_(layer.bias)  # it is zero at first
    for x in (torch.randn(6, 4), torch.randn(3, 6, 4)):
        torch.testing.assert_close(layer(x), torch.matmul(x, layer.weight) + layer.bias)


@of_the_four
def test_simba(script):
    """Its equations: normalised observations, a residual block and layer normalisation before the last layers."""
    agent = small_learner(script, network="simba").agent.double()
    seen = stored(40)[:, :OBS].double().numpy()
    mean, variance = torch.from_numpy(seen.mean(0)), torch.from_numpy(seen.var(0))
    torch.manual_seed(0)
    for parameter in agent.parameters():
        parameter.normal_()
    obs = 20 * torch.randn(30, OBS, dtype=torch.float64)  # some of which are clipped
    action = torch.rand(30, ACT, dtype=torch.float64)
    condition = 1 + torch.rand(30, script.CONDITION_DIM, dtype=torch.float64)

    def layers(parameters):
        parameters = list(parameters)
        return list(zip(parameters[::2], parameters[1::2], strict=True))

    q = agent.critic(script.critic_inputs(obs, action, condition))
    for member in range(3):
        *hidden, (weight, bias) = layers(parameter[member] for parameter in agent.critic.parameters())
        x = reference.simba_features(obs, torch.cat([action, condition.log()], 1), mean, variance, hidden)
        torch.testing.assert_close(q[member], (x @ weight + bias)[:, 0])

    all_layers = [(weight.T, bias) for weight, bias in layers(agent.actor.parameters())]
    x = reference.simba_features(obs, condition.log(), mean, variance, all_layers[:3])
    outputs = [x @ weight + bias for weight, bias in all_layers[3:]]
    if len(outputs) == 2:
        mean, log_std = outputs
        expected = (mean, log_std.clip(-10, 2))
    else:  # RAC-TD3
        expected = outputs[0].tanh()
    torch.testing.assert_close(agent.actor(obs, condition), expected)


@of_the_four
def test_statistics(script):
    """Those of NumPy in float64, of observations far from 0 and a constant one; all networks have them."""
    agent = small_learner(script, transitions=0, network="simba").agent
    rows = 1e4 + torch.randn(2_000, 2 * OBS + ACT + 2, generator=torch.Generator().manual_seed(0)) * 10 ** torch.arange(10.0)
    rows[:, 0] = 7.1
    before = list(agent.buffers())
    for step, row in enumerate(rows):
        agent.observe(step + 1, row, None, None)
    seen = rows[:, :OBS].double().numpy()
    np.testing.assert_allclose(agent.obs_norm.mean, seen.mean(0), rtol=1e-9)
    np.testing.assert_allclose(agent.obs_norm.var, seen.var(0), rtol=1e-9)
    assert all(buffer is same for buffer, same in zip(agent.buffers(), before, strict=True))  # in place, which CUDA graphs see
    inputs = rows[:20, : OBS + ACT + script.CONDITION_DIM]
    torch.testing.assert_close(agent.target(inputs), agent.critic(inputs))
    # the same tensors, which a set compares by identity
    assert {*agent.actor.buffers()} == {*agent.critic.buffers()} == {*agent.obs_norm.buffers()}


def test_initial_weights(script, network):
    """U(+-1/sqrt(fan-in)) of one member, different in all; biases likewise, but zero in the critics."""
    agent = small_learner(script, transitions=0, hidden_dim=64, network=network).agent
    networks = [getattr(agent, name) for name in agent.adam]
    for layer in itertools.chain.from_iterable(network.modules() for network in networks):
        if isinstance(layer, (torch.nn.Linear, script.EnsembleLinear)):
            bound = layer.weight.shape[1] ** -0.5  # (out, in), or (N, in, out)
            assert_uniform(layer.weight, -bound, bound)
            if isinstance(layer, script.EnsembleLinear):
                assert not layer.bias.any()
            else:
                assert_uniform(layer.bias, -bound, bound)
    if hasattr(agent, "target"):
        assert all(map(torch.equal, agent.target.parameters(), agent.critic.parameters()))


# One environment step ---
VARIANTS = (
    {},
    {"gamma": 0.7, "tau": 0.1, "utd": 3, "weight_decay": 0.3},
    {"temperature_network": False},
    {"autotune": False, "alpha": 0.3},
    {"target_rule": "in-target-min", "min_size": 1.5},
)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_an_environment_step(script, network, options):
    """Where parameters and Adam's moments go in G critic and Polyak steps, then one of the actor, then one of the temperature."""
    if known_arguments(script, options) != options:
        pytest.skip(f"{script.__name__} has not all of {list(options)}")
    learner = small_learner(script, network=network, **options)
    for step in range(101, 104):
        learner.update(step)  # targets and moments of their own
    drawn, q_lr = drawn_by(learner)
    drawn = drawn._make(in_double(tensor) for tensor in drawn)
    agent = copy.deepcopy(learner.agent).double().eval()
    before = copy.deepcopy(agent.state_dict())
    exact = exact_step(script, copy.deepcopy(agent), drawn, q_lr).state_dict()
    agent.learn(drawn, q_lr)
    for name, got in agent.state_dict().items():
        if name == "metrics":
            continue
        moved = (exact[name] - before[name]).double().norm()
        error = (exact[name] - got).double().norm()
        assert error <= 1e-6 * moved, f"{name} is off by {error / moved:.1e} of a step; {reference.HINT}"


def in_double(tensor):
    """But counts stay integers."""
    return tensor.double() if tensor.is_floating_point() else tensor


def exact_step(script, agent, drawn, q_lr):
    """The agent after an environment step."""
    args, rule = agent.args, reference.rule_of(script)(script, agent.requires_grad_(True))
    *critic_batches, last_batch = minibatches(args, drawn)
    for batch in critic_batches:
        with torch.no_grad():
            next_action, bonus = rule.next_action(batch)
            values = rule.values(rule.next_q(next_action, batch), batch)
        y = reference.target(values, batch.reward, batch.terminated, args.gamma, bonus)
        q = rule.q(agent.critic, batch.obs, batch.action, batch)
        optimizer_step(agent, "critic", reference.critic_loss(q, y), q_lr)
        rule.after_an_update()
    optimizer_step(agent, "actor", rule.actor_loss(last_batch), args.policy_lr)
    if getattr(args, "autotune", False):
        optimizer_step(agent, "temperature", rule.temperature_loss(last_batch), args.alpha_lr)
    return agent


def minibatches(args, drawn):
    """G minibatches for the critics and one for actor and temperature, with the noise of each."""
    for update in range(args.utd + 1):
        part = slice(update * args.batch_size, (update + 1) * args.batch_size)
        batch = SimpleNamespace(condition=drawn.rows[part, :0])  # where a script has none
        for name, tensor in drawn._asdict().items():
            of_updates = name in ("size", "keys")  # of each critic update; others of each sample
            setattr(batch, name, tensor[update % args.utd] if of_updates else tensor[part])
        batch.obs, batch.action, batch.reward, batch.terminated, batch.next_obs = parts(batch.rows)
        batch.temperature_noise = drawn.noise[-args.batch_size :]
        yield batch


def optimizer_step(agent, name, loss, lr):
    """One step of PyTorch's optimiser, which goes on from the agent's moments and changes them."""
    parameters, state = list(getattr(agent, name).parameters()), agent.adam[name]
    optimizer = reference.optimizer(name, parameters, lr, agent.args)
    moments = zip(state.first.parameters(), state.second.parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient, (first, second) in zip(parameters, gradients, moments, strict=True):
        parameter.grad = gradient
        optimizer.state[parameter] = {"step": state.count[0].clone(), "exp_avg": first.data, "exp_avg_sq": second.data}
    optimizer.step()
    state.count += 1


def test_columns_of_adam_scales(script):
    """Beside the scales the learning rate, which weight decay needs, and which update it is."""
    scales = script.adam_scales(torch.ones(1, dtype=torch.float64), torch.tensor(0.5), 2)
    assert scales[:, 2:].tolist() == [[0.5, 2], [0.5, 3]]


def test_learning_rate_of_the_critics(script):
    """Equation 23 before, at, within and after the warm-up, and without one."""
    learner = small_learner(script, learning_starts=5000, q_lr_warmup_end=10_000, q_lr_init=3e-5, q_lr=3e-4)
    for step in (1, 5000, 7500, 10_000, 20_000):
        _, q_lr = drawn_by(learner, step)
        assert q_lr == pytest.approx(reference.learning_rate(step, learner.args))
    _, q_lr = drawn_by(learner, 7500)
    assert q_lr == pytest.approx(1.65e-4)
    _, q_lr = drawn_by(small_learner(script, q_lr_warmup_end=100), 101)
    assert q_lr == pytest.approx(3e-3)


# What is random ---
@pytest.mark.parametrize("transitions", [20, CAPACITY, 120])
def test_rows_are_drawn_uniformly(script, transitions):
    """Of the transitions stored last, whole, as many as the replay holds."""
    learner = small_learner(script, transitions, utd=20, batch_size=100)
    assert learner.stored == transitions  # by which a fork knows their age
    drawn, _ = drawn_by(learner)
    matches = (drawn.rows[:, None] == stored(transitions)).all(2)  # (S + B, transitions)
    assert matches.any(1).all()
    index = matches.int().argmax(1)
    assert_uniform(index + torch.rand(len(index)), max(0, transitions - CAPACITY), transitions)


def test_what_an_environment_step_draws(script):
    """Noise N(0, 1) (TD3: policy_noise) and conditions from U1, each sample's own; all of it is new in the next step."""
    learner = small_learner(script, utd=100, batch_size=20, min_size=1.5)
    drawn, _ = drawn_by(learner)
    later, _ = drawn_by(learner)
    assert_distributed(drawn.noise, Normal(0, getattr(learner.args, "policy_noise", 1.0)))
    if script.CONDITION_DIM:
        assert drawn.condition.shape == (2020, script.CONDITION_DIM)
        assert_uniform(drawn.condition[:, 0], *RANGES[script.CONDITION]["U1"])
    for name in {"rounding", "keys"} & {*drawn._fields}:
        assert_uniform(getattr(drawn, name), 0, 1)
    if hasattr(drawn, "size"):  # of REDQ, one for each minibatch
        assert drawn.size.unique().tolist() == [1, 2]
        assert drawn.size.mean().item() == pytest.approx(1.5, abs=0.15)
        assert not any(one.data_ptr() % 16 for one in (*drawn.size, *drawn.keys))  # or else a GPU copies each
    assert not any(map(torch.equal, drawn, later))


def test_the_warm_up(script):
    """It learns from one transition, of zeros, and leaves nothing."""
    learner = small_learner(script, transitions=0)
    learner.replay.fill_(torch.nan)
    before, seen = learner.state(), []

    def learn(drawn, q_lr):
        seen.append((drawn.rows, int(learner.stored)))

    with mock.patch.object(learner.agent, "learn", learn):
        learner.warm_up()
    rows, stored_then = seen[0]
    assert not rows.any()
    assert stored_then == 1
    assert learner.stored == 0
    assert not learner.replay[0].any()
    torch.testing.assert_close(learner.state(), before, rtol=0, atol=0)


def test_exploring(script):
    """The condition is from U2, new in each step. In the SAC family an action is a sample, in TD3 it has noise and is clipped."""
    learner = small_learner(script, exploration_noise=0.2)
    seen = []

    def note(actor, inputs, output):
        seen.append((inputs[1], output))

    learner.agent.actor.register_forward_hook(note)
    actions = torch.from_numpy(np.stack([learner.act(np.ones(OBS)) for _ in range(500)]))
    conditions, outputs = zip(*seen, strict=True)
    if script.CONDITION_DIM:
        assert_uniform(torch.cat(conditions)[:, 0], *RANGES[script.CONDITION]["U2"])
    if hasattr(script, "squashed_gaussian"):
        mean, log_std = map(torch.cat, zip(*outputs, strict=True))
        assert_distributed((actions.atanh() - mean) / log_std.exp(), Normal(0, 1))
    else:
        assert_distributed(actions - torch.cat(outputs), Normal(0, 0.2))
        learner.args.exploration_noise = 5.0
        assert {learner.act(np.ones(OBS))[0] for _ in range(100)} > {-1, 1}


# Evaluation ---
def evaluated_family(script):
    """beta_i = eval_max / H * i (equation 20), k_i = 1 + (eval_max - 1) * i / H, or the one beta of Vanilla RAC."""
    if not script.CONDITION_DIM:
        return [0.3]
    return {"beta": [0.2, 0.4, 0.6], "k": [1.5, 2.0, 2.5]}[script.CONDITION]


def evaluated_agent(script):
    options = {"num_eval_policies": 3, "eval_beta_max": 0.6, "eval_k_max": 2.5, "temperature_network": False}
    return small_learner(script, **options).agent.eval()


def test_the_evaluated_family(script):
    assert script.eval_conditions(evaluated_agent(script).args) == pytest.approx(evaluated_family(script))


def test_columns_of_temperatures(script):
    """One for each policy, where there is entropy."""
    agent, family = evaluated_agent(script), evaluated_family(script)
    names = [f"eval/alpha_{condition:.6g}" for condition in family] if hasattr(agent, "temperature") else []
    assert agent.extra_columns(family) == pytest.approx(dict.fromkeys(names, math.exp(-1)))


def test_the_evaluated_action(script):
    """It has no noise; networks see the condition's logarithm."""
    agent, family = evaluated_agent(script), evaluated_family(script)
    obs = torch.randn(len(family), OBS)
    played = script.played_condition(family, len(family))
    if script.CONDITION_DIM:
        torch.testing.assert_close(script.features(played)[:, 0], torch.tensor(family).log())
    output = agent.actor(obs, played)
    best = output[0].tanh() if isinstance(output, tuple) else output
    action = script.deterministic_action(agent.actor, obs.numpy(), family)
    torch.testing.assert_close(torch.from_numpy(action), best)
