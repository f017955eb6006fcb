"""How the tests of the mathematics reach into a script: a class for each of the four algorithms, with what is its own.

Each class says how the script's functions are called (prepare_critics, update_critics, update_actor, update_temperature), and
puts the same step together from reference.py (exact_next_action, exact_target, exact_actor_loss, exact_temperature_loss). A fork
that changes a layer, a loss or the arguments of a function changes the same here or there.
"""

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import reference
import torch

OBS, ACT, BATCH, MEMBERS = 5, 3, 32, 4
STORED = 100  # transitions in the replay of a learner of the tests


class Minibatch(NamedTuple):
    """What one update of each network learns from, with all that is random in it."""

    rows: torch.Tensor  # (B, 2*O + A + 2), of the replay
    condition: torch.Tensor  # (B,) beta or k
    noise: torch.Tensor  # (B, A)
    size: torch.Tensor  # (1,) or (B,), of the subsets of in-target minimisation
    keys: torch.Tensor  # (N, 1) or (N, B), of these subsets

    def double(self) -> "Minibatch":
        return Minibatch(*(part.double() for part in self))

    @property
    def parts(self):
        """The columns of the rows: obs (B, O), action (B, A), reward (B,), terminated (B,), next_obs (B, O)."""
        action_dim = self.noise.shape[1]
        obs_dim = (self.rows.shape[1] - action_dim - 2) // 2
        return SimpleNamespace(
            obs=self.rows[:, :obs_dim],
            action=self.rows[:, obs_dim : obs_dim + action_dim],
            reward=self.rows[:, obs_dim + action_dim],
            terminated=self.rows[:, obs_dim + action_dim + 1],
            next_obs=self.rows[:, obs_dim + action_dim + 2 :],
        )


class Call(NamedTuple):
    """One call of a compiled function."""

    name: str
    inputs: dict[str, Any]  # by parameter
    result: Any


def linear(layer: str, inputs: int, outputs: int) -> dict[str, tuple]:
    """The shapes of a torch.nn.Linear."""
    return {f"{layer}.weight": (outputs, inputs), f"{layer}.bias": (outputs,)}


def ensemble(layer: str, members: int, inputs: int, outputs: int) -> dict[str, tuple]:
    """The shapes of an EnsembleLinear."""
    return {f"{layer}.weight": (members, inputs, outputs), f"{layer}.bias": (members, 1, outputs)}


# -------------------------------------------------------------------------------------------------- the four algorithms
class RacSac:
    """RAC-SAC, and what all four have in common."""

    condition = "beta"
    training_range = (1e-7, 0.8)  # U1
    exploration_range = (1e-7, 0.3)  # U2
    exact_range = (0.01, 0.8)  # of the conditions in a Minibatch
    seen_dim = 1  # inputs of the networks that tell the condition
    learned = ("critic", "actor", "temperature")
    has_entropy = True
    options: ClassVar = {"target_entropy": -3.0}
    scalar_temperature = ({"temperature_network": False}, np.exp(-5))  # how to have one, and where it begins

    def __init__(self, script):
        self.script = script

    # What it is given
    def learner(self, device="cpu", **options):
        """A small learner with STORED random transitions in its replay, every fourth of them terminated."""
        options = {
            "utd": 3,
            "num_critics": MEMBERS,
            "hidden_dim": 24,
            "batch_size": BATCH,
            "buffer_size": 200,
            "compile": False,
            "total_timesteps": 200,
            "learning_starts": 20,
            "q_lr_warmup_end": 40,
            **self.options,
            **options,
        }
        learner = self.script.Learner(self.script.check_args(self.script.Args(**options)), OBS, ACT, torch.device(device))
        rng = np.random.default_rng(7)
        for step in range(STORED):
            obs, action, next_obs = rng.normal(size=OBS), rng.uniform(-1, 1, ACT), rng.normal(size=OBS)
            learner.store(step, obs, action, rng.normal(), step % 4 == 3, next_obs)
        return learner

    def minibatch(self, learner, rows=None, seed=4) -> Minibatch:
        """Some rows, by default of the replay, with random numbers.

        With this seed no unit of the critics is so close to zero that float32 and float64 take different sides of its ReLU.
        """
        generator = torch.Generator().manual_seed(seed)
        if rows is None:
            rows = learner.replay[torch.randint(STORED, (BATCH,), generator=generator)]
        low, high = self.exact_range
        condition = low + (high - low) * torch.rand(len(rows), generator=generator)
        noise = torch.randn(len(rows), learner.action_dim, generator=generator)
        size, keys = self.subsets(learner.args.num_critics, len(rows), generator)
        return Minibatch(rows, condition, noise, size, keys)

    def subsets(self, members, samples, generator):
        """Sizes and keys of the subsets: one for all samples."""
        return torch.tensor([2.0]), torch.rand(members, 1, generator=generator)

    def scales(self, learner, network, lr):
        """Those of the network's next Adam update."""
        return self.script.adam_scales(learner.counts[network], lr, 1)[0]

    # The parameters
    def shapes(self, learner) -> dict[str, dict[str, tuple]]:
        """The parameters that the tests know, by network and name."""
        members, hidden = learner.args.num_critics, learner.args.hidden_dim
        inputs = learner.obs_dim + learner.action_dim + self.seen_dim
        critic = {
            **ensemble("0", members, inputs, hidden),
            **ensemble("2", members, hidden, hidden),
            **ensemble("4", members, hidden, 1),
        }
        return {"critic": critic, "target": critic, **self.own_shapes(learner.args, learner.obs_dim, learner.action_dim)}

    def own_shapes(self, args, obs_dim, action_dim):
        """Those of the networks beside the critics."""
        actor = {
            **linear("body.0", obs_dim + self.seen_dim, args.hidden_dim),
            **linear("body.2", args.hidden_dim, args.hidden_dim),
            **linear("mean", args.hidden_dim, action_dim),
            **linear("log_std", args.hidden_dim, action_dim),
        }
        temperature = {}
        if args.autotune:
            temperature = self.temperature_shapes(args)
        return {"actor": actor, "temperature": temperature}

    def temperature_shapes(self, args):
        if args.temperature_network:
            return {**linear("network.0", 1, 64), **linear("network.2", 64, 1)}
        return {"log_alpha": ()}

    def unknown_parameters(self, learner) -> list[str]:
        """A sentence for each network whose parameters are not those of shapes()."""
        sentences = []
        for network, known in self.shapes(learner).items():
            found = {name: tuple(parameter.shape) for name, parameter in getattr(learner, network).named_parameters()}
            strange = [f"{name} {shape}" for name, shape in found.items() if known.get(name) != shape]
            missing = [f"{name} {shape}" for name, shape in known.items() if found.get(name) != shape]
            if strange:
                sentences.append(f"the {network} has parameters that the tests do not know: {', '.join(strange)}")
            if missing:
                sentences.append(f"the {network} lacks parameters that the tests know: {', '.join(missing)}")
        return sentences

    def exact(self, learner):
        """All parameters in float64, by network and name, for torch.autograd; skips where the tests do not know them."""
        if self.unknown_parameters(learner):
            pytest.skip("test_networks_are_known says which parameters are not known here")
        exact = SimpleNamespace(args=learner.args)
        for network in self.shapes(learner):
            parameters = getattr(learner, network).named_parameters()
            setattr(exact, network, {name: p.detach().double().cpu().requires_grad_() for name, p in parameters})
        return exact

    def moved(self, exact, learner) -> set[str]:
        """The networks that are no longer as they were in `exact`."""
        now = self.exact(learner)
        return {network for network in self.shapes(learner) if differences(getattr(exact, network), getattr(now, network))}

    # The script's functions
    def upq_target(self, q_next, beta, reward, terminated, gamma, entropy_bonus):
        return self.script.upq_target(q_next, beta, reward, terminated, gamma, entropy_bonus)

    def prepare_critics(self, learner, batch):
        """-> the script's CriticBatch."""
        return learner.prepare_critics(learner.actor, learner.temperature, batch.rows, batch.condition, batch.noise)

    def critic_step(self, learner, batch, lr):
        """prepare_critics and update_critics -> next action, entropy bonus, q (N, B), target (B,)."""
        with torch.no_grad():
            prepared = self.prepare_critics(learner, batch)
            next_action = prepared.next_inputs[:, learner.obs_dim : learner.obs_dim + learner.action_dim]
            bonus = prepared.entropy_bonus if self.has_entropy else torch.zeros(len(next_action))
            networks = (learner.critic, learner.target, learner.moments["critic"], self.scales(learner, "critic", lr))
            return next_action, bonus, *self.update_critics(learner, networks, batch, prepared)

    def update_critics(self, learner, networks, batch, prepared):
        return learner.update_critics(*networks, prepared, learner.args.gamma, learner.args.tau)

    def actor_batch(self, batch):
        return self.script.ActorBatch(obs=batch.parts.obs, beta=batch.condition, noise=batch.noise)

    @torch.no_grad()
    def update_actor(self, learner, batch, lr):
        networks = (learner.actor, learner.critic, learner.temperature, learner.moments["actor"])
        return learner.update_actor(*networks, self.scales(learner, "actor", lr), self.actor_batch(batch))

    @torch.no_grad()
    def update_temperature(self, learner, batch, lr, target_entropy):
        networks = (learner.actor, learner.temperature, learner.moments["temperature"])
        scales = self.scales(learner, "temperature", lr)
        return learner.update_temperature(*networks, scales, self.actor_batch(batch), target_entropy)

    def inputs(self, *parts):
        """The inputs of the actor, of which the last one tells the condition: all that it sees. The critics see them as one."""
        return parts

    # The same in float64; `exact` as from exact(), `batch` in float64
    def seen(self, condition):
        """How the networks see the condition: (B,) -> (B, 1)."""
        return condition.log()[:, None]

    def exact_alpha(self, exact, condition):
        return reference.alpha(exact.temperature, self.seen(condition), exact.args.initial_log_alpha)

    def exact_gaussian(self, exact, obs, condition):
        """Mean and standard deviation of the policy before tanh."""
        return reference.gaussian_actor(exact.actor, torch.cat([obs, self.seen(condition)], 1))

    def exact_sample(self, exact, obs, batch):
        """An action by the batch's noise, and its log-probability."""
        mean, std = self.exact_gaussian(exact, obs, batch.condition)
        u = mean + std * batch.noise
        return u.tanh(), reference.squashed_log_prob(u, mean, std)

    def exact_deterministic(self, exact, obs, condition):
        """The action that is evaluated."""
        return self.exact_gaussian(exact, obs, condition)[0].tanh()

    def exact_q(self, critic, obs, action, condition):
        return reference.critics(critic, torch.cat([obs, action, self.seen(condition)], 1))

    def exact_next_action(self, exact, batch):
        """-> next action, entropy bonus."""
        action, log_prob = self.exact_sample(exact, batch.parts.next_obs, batch)
        return action, -self.exact_alpha(exact, batch.condition) * log_prob

    def exact_target(self, q_next, batch, args, entropy_bonus):
        data = batch.parts
        return reference.upq_target(q_next, batch.condition, data.reward, data.terminated, args.gamma, entropy_bonus)

    def exact_actor_loss(self, exact, batch):
        """-> the loss, and the metrics of the actor's update."""
        action, log_prob = self.exact_sample(exact, batch.parts.obs, batch)
        alpha = self.exact_alpha(exact, batch.condition)
        loss = reference.actor_loss(self.exact_q(exact.critic, batch.parts.obs, action, batch.condition), alpha, log_prob)
        return loss, {"actor_loss": loss, "alpha": alpha.mean(), "entropy": -log_prob.mean()}

    def exact_temperature_loss(self, exact, batch, target_entropy):
        _, log_prob = self.exact_sample(exact, batch.parts.obs, batch)
        return reference.temperature_loss(self.exact_alpha(exact, batch.condition), log_prob, target_entropy)


class RacTd3(RacSac):
    """A deterministic actor, and smoothed next actions; no entropy and no temperature."""

    learned = ("critic", "actor")
    has_entropy = False
    options: ClassVar = {"noise_clip": 0.95}

    def own_shapes(self, args, obs_dim, action_dim):
        actor = {
            **linear("0", obs_dim + self.seen_dim, args.hidden_dim),
            **linear("2", args.hidden_dim, args.hidden_dim),
            **linear("4", args.hidden_dim, action_dim),
        }
        return {"actor": actor}

    def upq_target(self, q_next, beta, reward, terminated, gamma, entropy_bonus):
        return self.script.upq_target(q_next, beta, reward, terminated, gamma)

    def prepare_critics(self, learner, batch):
        return learner.prepare_critics(learner.actor, batch.rows, batch.condition, batch.noise, learner.args.noise_clip)

    def actor_batch(self, batch):
        return self.script.ActorBatch(obs=batch.parts.obs, beta=batch.condition)

    @torch.no_grad()
    def update_actor(self, learner, batch, lr):
        networks = (learner.actor, learner.critic, learner.moments["actor"])
        return learner.update_actor(*networks, self.scales(learner, "actor", lr), self.actor_batch(batch))

    def exact_deterministic(self, exact, obs, condition):
        return reference.deterministic_actor(exact.actor, torch.cat([obs, self.seen(condition)], 1))

    def exact_next_action(self, exact, batch):
        action = self.exact_deterministic(exact, batch.parts.next_obs, batch.condition)
        return reference.smoothed_action(action, batch.noise, exact.args.noise_clip), torch.zeros_like(batch.condition)

    def exact_actor_loss(self, exact, batch):
        action = self.exact_deterministic(exact, batch.parts.obs, batch.condition)
        loss = reference.actor_loss(self.exact_q(exact.critic, batch.parts.obs, action, batch.condition), 0.0, 0.0)
        return loss, {"actor_loss": loss}


class VanillaRac(RacSac):
    """One constant beta that no network sees, and one scalar temperature; REDQ with target_rule in-target-min."""

    seen_dim = 0
    options: ClassVar = {"target_entropy": -3.0, "beta": 0.7}
    scalar_temperature = ({}, np.exp(-3))  # it never has another

    def temperature_shapes(self, args):
        return {"log_alpha": (1,)}

    def prepare_critics(self, learner, batch):
        return learner.prepare_critics(learner.actor, learner.temperature, batch.rows, batch.noise)

    def update_critics(self, learner, networks, batch, prepared):
        subset = self.script.Subset(size=batch.size, keys=batch.keys)
        args = learner.args
        return learner.update_critics(*networks, prepared, subset, args.target_rule, args.beta, args.gamma, args.tau)

    def actor_batch(self, batch):
        return self.script.ActorBatch(obs=batch.parts.obs, noise=batch.noise)

    def inputs(self, *parts):
        return parts[:-1]

    def seen(self, condition):
        return torch.zeros(len(condition), 0, dtype=condition.dtype)

    def exact_target(self, q_next, batch, args, entropy_bonus):
        data, batch_size = batch.parts, len(batch.rows)
        if args.target_rule == "upq":
            return reference.upq_target(
                q_next, np.full(batch_size, args.beta), data.reward, data.terminated, args.gamma, entropy_bonus
            )
        subsets = (batch.size.expand(batch_size), batch.keys.expand(-1, batch_size))
        return reference.in_target_min(q_next, *subsets, data.reward, data.terminated, args.gamma, entropy_bonus)


class RacItm(RacSac):
    """Conditioned on k, the size of a random subset for each sample, whose minimum the target takes."""

    condition = "k"
    training_range = (1.0, 2.0)
    exploration_range = (1.0, 1.5)
    exact_range = (1.0, 4.0)

    def subsets(self, members, samples, generator):
        """Of each sample's own."""
        size = torch.randint(1, members + 1, (samples,), generator=generator).float()
        return size, torch.rand(members, samples, generator=generator)

    def prepare_critics(self, learner, batch):
        uniform = torch.full_like(batch.condition, 0.5)
        inputs = (batch.rows, batch.condition, batch.noise, uniform)
        return learner.prepare_critics(learner.actor, learner.temperature, *inputs)._replace(size=batch.size)

    def update_critics(self, learner, networks, batch, prepared):
        return learner.update_critics(*networks, prepared, batch.keys, learner.args.gamma, learner.args.tau)

    def actor_batch(self, batch):
        return self.script.ActorBatch(obs=batch.parts.obs, k=batch.condition, noise=batch.noise)

    def exact_target(self, q_next, batch, args, entropy_bonus):
        data = batch.parts
        subsets = (batch.size, batch.keys)
        return reference.in_target_min(q_next, *subsets, data.reward, data.terminated, args.gamma, entropy_bonus)


METHODS = {"sac": RacSac, "td3": RacTd3, "vanilla": VanillaRac, "itm": RacItm}


def kind_of(script) -> str:
    """Which of the four algorithms a script is, or was copied from, by its own arguments."""
    fields = {field.name for field in dataclasses.fields(script.Args)}
    kinds = {"policy_noise": "td3", "min_size": "vanilla", "train_k_max": "itm", "train_beta_max": "sac"}
    for field, kind in kinds.items():
        if field in fields:
            return kind
    wanted = f"none of the arguments {', '.join(kinds)}, by which its algorithm is told"
    raise pytest.UsageError(f"{script.__name__}.py has {wanted}")


def method_of(script) -> RacSac:
    return METHODS[kind_of(script)](script)


# --------------------------------------------------------------------------------------------------- for every algorithm
def gradient(learner, network) -> dict[str, torch.Tensor]:
    """The gradient of a network's first update, by parameter: Adam's first moment is a tenth of it."""
    return {name: 10 * first.double().cpu() for name, first in learner.moments[network][0].named_parameters()}


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors])


def shake_target(learner) -> None:
    """Move the target ensemble away from the online one, where it begins."""
    generator = torch.Generator().manual_seed(1)
    for parameter in learner.target.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def state(learner) -> dict[str, torch.Tensor]:
    """A copy of all that training goes on from: what a checkpoint holds of the learner."""
    tensors = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    return {**tensors, "replay": learner.replay[:STORED].clone(), "generator": learner.generator.get_state()}


def differences(one: dict, other: dict) -> list[str]:
    """The names of tensors that are not equal to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def copied(value):
    """A copy of a tensor, or of the tensors of a tuple; anything else as it is."""
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, tuple):
        parts = [copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def record_calls(method, learner) -> list[Call]:
    """A list to which every call of a compiled function is added from now on; the functions still run."""
    calls = []
    for function in method.script.COMPILED:
        setattr(learner, function.__name__, recorder(calls, function, getattr(learner, function.__name__)))
    return calls


def recorder(calls, function, inner):
    signature = inspect.signature(function)

    def recorded(*arguments):
        inputs = {name: copied(value) for name, value in signature.bind(*arguments).arguments.items()}
        result = inner(*arguments)
        calls.append(Call(function.__name__, inputs, copied(result)))
        return result

    return recorded


def inputs_of(calls, name, parameter) -> list:
    """One input of all calls of a function."""
    return [call.inputs[parameter] for call in calls if call.name == name]
