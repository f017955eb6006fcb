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
from conftest import ROOT, SCRIPTS, load_script
from torch.distributions import Normal, TanhTransform, TransformedDistribution, Uniform

OBS, ACT, CAPACITY = 3, 2, 50
RANGES = {"beta": {"U1": (0.1, 0.8), "U2": (0.1, 0.3)}, "k": {"U1": (1, 2.7), "U2": (1, 1.5)}}  # of make_learner


def make_learner(script, transitions=40, **options):
    """A small learner that has stored and observed the rows of `stored()`; options that a script does not have are left out."""
    sizes = {"num_critics": 3, "hidden_dim": 16, "batch_size": 8, "utd": 2, "buffer_size": CAPACITY, "compile": False}
    rates = {"q_lr": 3e-3, "q_lr_init": 1e-3, "policy_lr": 2e-3, "alpha_lr": 5e-3, "learning_starts": 100, "q_lr_warmup_end": 200}
    others = {"beta_min": 0.1, "train_k_max": 2.7, "initial_log_alpha": -1.0, "target_entropy": -1.5}
    smoothing = {"policy_noise": 0.8, "noise_clip": 0.9}  # both clips happen
    wanted = sizes | rates | others | smoothing | options
    args = script.Args(**{name: value for name, value in wanted.items() if hasattr(script.Args, name)})
    script.fill_own_defaults(args, "Toy", ACT)
    learner = script.Learner(args, OBS, ACT, torch.device("cpu"))
    for step, row in enumerate(stored(transitions).numpy(), 1):
        kept = learner.store(step, row[:3], row[3:5], row[5], row[6], row[7:])
        learner.agent.observe(step, kept, None, learner.generator)
    return learner


def stored(transitions):
    """Rows of obs, action, reward, terminated, next_obs, a third of them terminated: (transitions, 2*OBS + ACT + 2)."""
    rows = torch.randn(transitions, 2 * OBS + ACT + 2, generator=torch.Generator().manual_seed(0))
    rows[:, 6] = torch.arange(transitions) % 3 == 0
    return rows


def drawn_by(learner, step=150):
    """What an update draws, and the critics' learning rate."""
    given = []
    with mock.patch.object(learner.agent, "learn", lambda drawn, q_lr: given.extend((drawn, float(q_lr)))):
        learner.update(step)
    return given


def function_of(script, name):
    return getattr(script, name, None) or pytest.skip(f"{script.__name__} has no {name}")


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
@pytest.mark.parametrize("members", [2, 3, 10])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_target(script, members, scale):
    torch.manual_seed(members)
    q, keys = torch.randn(2, members, 64, dtype=torch.float64) * scale
    reward, bonus = torch.randn(2, 64, dtype=torch.float64)
    beta = torch.linspace(0, 0.8, 64, dtype=torch.float64)
    terminated = (torch.arange(64) % 3 == 0).double()
    size = torch.randint(1, members + 1, (64,))
    if hasattr(script, "upq_target"):
        values = map(reference.upq_value, q.T.tolist(), beta.tolist())
        has_entropy = hasattr(script, "Temperature")
        y = reference.target(values, reward, terminated, 0.97, bonus * has_entropy)
        got = script.upq_target(q, beta, reward, terminated, 0.97, *[bonus] * has_entropy)
        torch.testing.assert_close(got, y, msg=lambda difference: f"{difference}\n{reference.HINT}")
    if hasattr(script, "in_target_min"):
        values = map(reference.in_target_min_value, q.T.tolist(), size, keys.T.tolist())
        y = reference.target(values, reward, terminated, 0.97, bonus)
        torch.testing.assert_close(script.in_target_min(q, size, keys, reward, terminated, 0.97, bonus), y)


def test_targets_by_hand():
    """q = 1 and 3: mean 2, sample standard deviation sqrt(2), minimum 1. r = 10, gamma = 0.9, beta = 0.5, entropy bonus -0.25."""
    sac, td3, vanilla, itm = (load_script(ROOT / f"{name}.py") for name in SCRIPTS)
    q, one = torch.tensor([[1.0], [3.0]]), torch.ones(1)
    rest, bonus = (10 * one, 0 * one, 0.9), -0.25 * one
    upq = 10 + 0.9 * (2 - 0.5 * math.sqrt(2))
    assert td3.upq_target(q, 0.5, *rest).item() == pytest.approx(upq)
    assert sac.upq_target(q, 0.5, *rest, bonus).item() == pytest.approx(upq - 0.9 * 0.25)
    assert vanilla.upq_target(q, 0.5, *rest, bonus).item() == pytest.approx(upq - 0.9 * 0.25)
    assert itm.in_target_min(q, 2 * one, q, *rest, bonus).item() == pytest.approx(10 + 0.9 * 0.75)


@pytest.mark.parametrize("members", [1, 2, 5])
def test_minimum_over_a_random_subset(script, members):
    """Over all orders of the keys, every subset of a size comes equally often; of equal keys the earlier member is taken."""
    minimum = function_of(script, "min_over_random_subset")
    keys = torch.tensor(list(itertools.permutations(range(members)))).T  # (N, N!)
    values = [3.0, -1.0, 4.0, 1.5, -9.0][:members]
    q = torch.tensor(values)[:, None].expand_as(keys)
    for size in range(1, members + 1):
        subsets = list(itertools.combinations(values, size))
        expected = sorted(map(min, subsets * (keys.shape[1] // len(subsets))))
        sizes = torch.full(keys.shape[1:], size)
        assert sorted(minimum(q, sizes, keys).tolist()) == expected
        assert minimum(q, sizes, 0 * keys)[0] == min(values[:size])


# Networks ---
def test_log_probability(script, network):
    """Against torch.distributions, and far out, where log(1 - tanh(u)^2) is log 4 - 2 |u|; log_std is clamped."""
    squashed_gaussian = function_of(script, "squashed_gaussian")
    mean, log_std, noise = 0.5 * torch.randn(3, 200, ACT, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    action, log_prob = squashed_gaussian(mean, log_std, noise)
    known = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform()).log_prob(action).sum(1)
    torch.testing.assert_close(log_prob, known, rtol=1e-9, atol=1e-9)

    _, log_prob = squashed_gaussian(*torch.zeros(2, 2, 1), torch.tensor([[40.0], [-40.0]]))
    assert log_prob.tolist() == pytest.approx([-720 - 0.5 * math.log(2 * math.pi) - math.log(4)] * 2)

    actor = make_learner(script, network=network).agent.actor
    for parameter in actor.parameters():
        parameter *= 1000
    _, log_std = actor(torch.randn(99, OBS), torch.ones(99, script.CONDITION_DIM))
    assert (log_std.min(), log_std.max()) == (-10, 2)


def test_the_ensemble_is_separate_networks(script, network):
    """The parameters of a member, the first dimension's entries in layers of any kind, move its values and no others."""
    critic = make_learner(script, network=network).agent.critic.eval()
    inputs = torch.randn(20, OBS + ACT + script.CONDITION_DIM)
    for member, (name, parameter) in itertools.product(range(3), critic.named_parameters()):
        before = critic(inputs)
        parameter[member] += torch.randn_like(parameter[member])
        moved = (critic(inputs) != before).any(1)
        assert moved.tolist() == [each == member for each in range(3)], f"{name} of member {member} moves others, or not its own"


@pytest.mark.parametrize("width", [1, 5])
def test_a_layer_of_the_ensemble(script, width):
    """A product and a bias for each member, of an input that they share, or one each."""
    layer = script.EnsembleLinear(3, 4, width)
    torch.nn.init.normal_(layer.bias)  # it is zero at first
    for x in (torch.randn(6, 4), torch.randn(3, 6, 4)):
        torch.testing.assert_close(layer(x), torch.matmul(x, layer.weight) + layer.bias)


def test_simba(script):
    """Its equations: normalised observations, a residual block and layer normalisation before the last layers."""
    agent = make_learner(script, network="simba").agent.double()
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
    first, *others = (x @ weight + bias for weight, bias in all_layers[3:])
    expected = (first, others[0].clip(-10, 2)) if others else first.tanh()
    torch.testing.assert_close(agent.actor(obs, condition), expected)


def test_statistics(script):
    """Those of NumPy in float64, of observations far from 0 and a constant one; all networks have them."""
    agent = make_learner(script, transitions=0, network="simba").agent
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
    assert {*agent.actor.buffers()} == {*agent.critic.buffers()} == {*agent.obs_norm.buffers()}


def test_initial_weights(script, network):
    """U(+-1/sqrt(fan-in)) of one member, different in all; biases likewise, but zero in the critics."""
    agent = make_learner(script, transitions=0, hidden_dim=64, network=network).agent
    for layer in itertools.chain(*(getattr(agent, name).modules() for name in agent.adam)):
        if isinstance(layer, (torch.nn.Linear, script.EnsembleLinear)):
            bound = layer.weight.shape[1] ** -0.5
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


def test_an_environment_step(script, network):
    """Where parameters and Adam's moments go in G critic and Polyak steps, then one of the actor, then one of the temperature."""
    for options in VARIANTS:
        if all(hasattr(script.Args, name) for name in options):
            learner = make_learner(script, network=network, **options)
            for step in range(101, 104):
                learner.update(step)  # targets and moments of their own
            drawn, q_lr = drawn_by(learner)
            drawn = drawn._make(tensor.double() if tensor.is_floating_point() else tensor for tensor in drawn)
            before, agent = learner.agent.state_dict(), copy.deepcopy(learner.agent).double().eval()
            exact = exact_step(script, copy.deepcopy(agent), drawn, q_lr).state_dict()
            agent.learn(drawn, q_lr)
            for name, got in agent.state_dict().items():
                if name != "metrics":
                    step, error = ((one.double() - exact[name].double()).norm() for one in (before[name], got))
                    assert error <= 1e-6 * step, f"{name} with {options} is off by {error / step:.1e} of a step; {reference.HINT}"


def exact_step(script, agent, drawn, q_lr):
    """The agent after an environment step."""
    args, rule = agent.args, reference.rule_of(script)(script, agent.requires_grad_(True))
    *critic_batches, last_batch = minibatches(args, drawn)
    for batch in critic_batches:
        with torch.no_grad():
            next_action, bonus = rule.next_action(batch)
            values = rule.values(rule.next_q(next_action, batch), batch)
        y = reference.target(values, batch.reward, batch.terminated, args.gamma, bonus)
        adam_step(agent, "critic", reference.critic_loss(rule.q(agent.critic, batch.obs, batch.action, batch), y), q_lr)
        rule.after_an_update()
    adam_step(agent, "actor", rule.actor_loss(last_batch), args.policy_lr)
    if getattr(args, "autotune", False):
        adam_step(agent, "temperature", rule.temperature_loss(last_batch), args.alpha_lr)
    return agent


def minibatches(args, drawn):
    """G minibatches for the critics and one for actor and temperature, with the noise of each."""
    for update in range(args.utd + 1):
        part = slice(update * args.batch_size, (update + 1) * args.batch_size)
        index = dict.fromkeys(("size", "keys"), update % args.utd)  # of a critic update; others of a sample
        batch = SimpleNamespace(**{name: tensor[index.get(name, part)] for name, tensor in drawn._asdict().items()})
        batch.condition = getattr(drawn, "condition", drawn.rows[:, :0])[part]
        batch.obs, batch.action, batch.next_obs = batch.rows[:, :3], batch.rows[:, 3:5], batch.rows[:, 7:]
        batch.reward, batch.terminated = batch.rows[:, 5], batch.rows[:, 6]
        batch.temperature_noise = drawn.noise[-args.batch_size :]
        yield batch


def adam_step(agent, name, loss, lr):
    """One step of the optimiser, which goes on from the agent's moments and changes them."""
    parameters, state = list(getattr(agent, name).parameters()), agent.adam[name]
    optimizer = reference.optimizer(name, parameters, lr, agent.args)
    moments = zip(state.first.parameters(), state.second.parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient, (first, second) in zip(parameters, gradients, moments, strict=True):
        parameter.grad = gradient
        optimizer.state[parameter] = {"step": state.count[0].clone(), "exp_avg": first.data, "exp_avg_sq": second.data}
    optimizer.step()
    state.count += 1


def test_what_a_step_of_adam_knows(script):
    """Beside its scales the learning rate, which weight decay needs, and which update it is."""
    scales = script.adam_scales(torch.ones(1, dtype=torch.float64), torch.tensor(0.5), 2)
    assert scales[:, 2:].tolist() == [[0.5, 2], [0.5, 3]]


def test_learning_rate_of_the_critics(script):
    """Equation 23 before, at, within and after the warm-up, and without one."""
    learner = make_learner(script, learning_starts=5000, q_lr_warmup_end=10_000, q_lr_init=3e-5, q_lr=3e-4)
    for step in (1, 5000, 7500, 10_000, 20_000):
        assert drawn_by(learner, step)[1] == pytest.approx(reference.learning_rate(step, learner.args))
    assert drawn_by(learner, 7500)[1] == pytest.approx(1.65e-4)
    assert drawn_by(make_learner(script, q_lr_warmup_end=100), 101)[1] == pytest.approx(3e-3)


# What is random ---
@pytest.mark.parametrize("transitions", [20, CAPACITY, 120])
def test_rows_are_drawn_uniformly(script, transitions):
    """Of the transitions stored last, whole, as many as the replay holds."""
    learner = make_learner(script, transitions, utd=20, batch_size=100)
    assert learner.stored == transitions  # by which a fork knows their age
    drawn, _ = drawn_by(learner)
    matches = (drawn.rows[:, None] == stored(transitions)).all(2)  # (S + B, transitions)
    assert matches.any(1).all()
    index = matches.int().argmax(1)
    assert_uniform(index + torch.rand(len(index)), max(0, transitions - CAPACITY), transitions)


def test_what_an_environment_step_draws(script):
    """Noise N(0, 1) (TD3: policy_noise) and conditions from U1, each sample's own; all of it is new in the next step."""
    learner = make_learner(script, utd=100, batch_size=20, min_size=1.5)
    (drawn, _), (later, _) = drawn_by(learner), drawn_by(learner)
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
    learner = make_learner(script, transitions=0)
    learner.replay.fill_(torch.nan)
    before, seen = learner.state(), []
    with mock.patch.object(learner.agent, "learn", lambda drawn, _: seen.extend((drawn.rows.sum(), learner.stored.clone()))):
        learner.warm_up()
    assert seen[0].isfinite() and not learner.replay[0].any()
    assert (seen[1], learner.stored) == (1, 0)
    torch.testing.assert_close(learner.state(), before, rtol=0, atol=0)


def test_exploring(script):
    """The condition is from U2, new in each step. In the SAC family an action is a sample, in TD3 it has noise and is clipped."""
    learner = make_learner(script, exploration_noise=0.2)
    seen = []
    learner.agent.actor.register_forward_hook(lambda actor, inputs, output: seen.append((inputs[1], output)))
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
def test_the_evaluated_family(script):
    """beta_i = eval_max / H * i (equation 20), k_i = 1 + (eval_max - 1) * i / H; their temperatures; actions without noise."""
    agent = make_learner(script, num_eval_policies=3, eval_beta_max=0.6, eval_k_max=2.5, temperature_network=False).agent.eval()
    conditions = script.eval_conditions(agent.args)
    known = {"beta": [0.2, 0.4, 0.6], "k": [1.5, 2.0, 2.5]}[script.CONDITION] if script.CONDITION_DIM else [0.3]
    assert conditions == pytest.approx(known)
    temperatures = [f"eval/alpha_{condition:.6g}" for condition in known if hasattr(agent, "temperature")]
    assert agent.extra_columns(conditions) == pytest.approx(dict.fromkeys(temperatures, math.exp(-1)))
    obs = torch.randn(len(known), OBS)
    played = script.played_condition(known, len(known))
    if script.CONDITION_DIM:
        torch.testing.assert_close(script.features(played)[:, 0], torch.tensor(known).log())
    output = agent.actor(obs, played)
    best = output[0].tanh() if isinstance(output, tuple) else output
    torch.testing.assert_close(torch.from_numpy(script.deterministic_action(agent.actor, obs.numpy(), known)), best)
