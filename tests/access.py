"""How the tests of the mathematics reach into a script: its parameters in float64, and one update of each network.

Everything that depends on how a script keeps its parameters is here, so that the tests themselves state mathematics alone.
"""

import dataclasses
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch

OBS, ACT, BATCH, MEMBERS = 5, 3, 32, 4


def kind_of(module) -> str:
    """Which of the four algorithms a script is, or was copied from, by its own arguments."""
    fields = {field.name for field in dataclasses.fields(module.Args)}
    kinds = {"policy_noise": "td3", "min_size": "vanilla", "train_k_max": "itm", "train_beta_max": "sac"}
    found = [kind for field, kind in kinds.items() if field in fields]
    if not found:
        wanted = f"none of the arguments {', '.join(kinds)}, by which its algorithm is told"
        raise pytest.UsageError(f"{module.__name__}.py has {wanted}")
    return found[0]


def make_learner(module, device="cpu", **options):
    """A small learner with 100 random transitions in its replay, every fourth of them terminated."""
    options = {"utd": 3, "num_critics": MEMBERS, "hidden_dim": 24, "batch_size": BATCH, "buffer_size": 200, "compile": False,
               "total_timesteps": 200, "learning_starts": 20, "q_lr_warmup_end": 40, **options}  # fmt: skip
    if kind_of(module) != "td3":
        options.setdefault("target_entropy", -3.0)
    learner = module.Learner(module.check_args(module.Args(**options)), OBS, ACT, torch.device(device))
    rng = np.random.default_rng(7)
    for step in range(100):
        obs, action, next_obs = rng.normal(size=OBS), rng.uniform(-1, 1, ACT), rng.normal(size=OBS)
        learner.store(step, obs, action, rng.normal(), step % 4 == 3, next_obs)
    return learner


def minibatch(kind, learner, seed=4):
    """rows (B, 2*O + A + 2), the condition of each sample (B,) and noise (B, A); the first two also split, in float64.

    With this seed no unit of the critics is so close to zero that float32 and float64 take different sides of its ReLU.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = learner.replay[torch.randint(100, (BATCH,), generator=generator)]
    uniform, noise = torch.rand(BATCH, generator=generator), torch.randn(BATCH, ACT, generator=generator)
    condition = 1 + 3 * uniform if kind == "itm" else 0.01 + 0.79 * uniform
    parts = np.split(rows.double().numpy(), np.cumsum([OBS, ACT, 1, 1]), 1)
    exact = SimpleNamespace(obs=parts[0], action=parts[1], reward=parts[2][:, 0], terminated=parts[3][:, 0], next_obs=parts[4],
                            condition=condition.double().numpy(), noise=noise.double().numpy())  # fmt: skip
    exact.seen = np.zeros((BATCH, 0)) if kind == "vanilla" else np.log(exact.condition)[:, None]
    return rows, condition, noise, exact


def views(learner, network):
    """A network's parameters by name, in float64."""
    return {name: tensor.double().cpu().numpy() for name, tensor in getattr(learner, network).named_parameters()}


def members(learner, which="critic"):
    """The online or target ensemble as N lists of float64 layers (weight (in, out), bias (out,))."""
    found = views(learner, which)
    layers = [(found[f"{i}.weight"], found[f"{i}.bias"]) for i in (0, 2, 4)]
    return [[(w[m], b[m, 0]) for w, b in layers] for m in range(len(layers[0][0]))]


def actor_layers(kind) -> dict[str, str]:
    """Where the actor's layers are in the script, by the names that the tests give them."""
    if kind == "td3":
        return {"layer1": "0", "layer2": "2", "head": "4"}
    return {"layer1": "body.0", "layer2": "body.2", "mean": "mean", "log_std": "log_std"}


def actor_heads(kind, learner):
    """The actor as lists of float64 layers, one for each head: towards the action, or the mean and the log std."""
    found, places = views(learner, "actor"), actor_layers(kind)
    layers = {name: (found[f"{place}.weight"].T, found[f"{place}.bias"]) for name, place in places.items()}
    return [[layers["layer1"], layers["layer2"], layers[name]] for name in list(places)[2:]]


def gaussian(kind, learner, x):
    """Mean and log std of the actor at its inputs x (B, in), in float64."""
    mean, log_std = (reference.relu_network(head, x)[-1] for head in actor_heads(kind, learner))
    return mean, np.clip(log_std, -10, 2)


def temperature_layers(learner):
    found = views(learner, "temperature")
    return [(found[f"network.{i}.weight"].T, found[f"network.{i}.bias"]) for i in (0, 2)]


def alpha(kind, learner, condition):
    """The temperature of each condition (B,), in float64."""
    if kind == "vanilla":
        return np.exp(views(learner, "temperature")["log_alpha"])
    outputs = reference.relu_network(temperature_layers(learner), np.log(condition)[:, None])
    return np.exp(outputs[-1][:, 0] + learner.args.initial_log_alpha)


def first_step(lr, dtype=torch.float32):
    """The optimiser's scales in its first update."""
    return torch.tensor([lr / 0.1, 0.001**0.5], dtype=dtype)


def gradients(learner, name):
    """The gradient of a first update, by parameter: Adam's first moment is a tenth of it."""
    return {key: 10 * first.double().cpu().numpy() for key, first in learner.moments[name][0].named_parameters()}


@torch.no_grad()
def update_critics(module, learner, rows, condition, noise, size, keys, functions=None, noise_clip=0.95):
    """The targets' inputs and one critic and Polyak step; size and keys choose the subset of in-target minimisation.

    functions: the learner, for its compiled functions, or by default the script's own.
    """
    kind, functions, args = kind_of(module), functions or module, learner.args
    next_obs, bonus = rows[:, -learner.sizes[0] :], []
    conditioned = [] if kind == "vanilla" else [condition]
    if kind == "td3":
        next_action = functions.prepare_targets(learner.actor, next_obs, condition, noise, noise_clip)
    else:
        next_action, *bonus = functions.prepare_targets(learner.actor, learner.temperature, next_obs, *conditioned, noise)
    constants = (learner.critic, learner.target, learner.moments["critic"], learner.sizes, 0.99, 0.005)
    own = (args.beta, args.target_rule) if kind == "vanilla" else ()
    subset = (size, keys) if kind in ("vanilla", "itm") else ()
    scales = first_step(3e-4, rows.dtype).to(rows.device)
    q, target = functions.update_critics(*constants, *own, scales, rows, *conditioned, next_action, *bonus, *subset)
    found, loss = gradients(learner, "critic"), module.critic_loss(q, target).item()
    grads = [(found[f"{i}.weight"], found[f"{i}.bias"]) for i in (0, 2, 4)]
    return SimpleNamespace(next_action=next_action, bonus=bonus[0] if bonus else None, loss=loss, grads=grads)


@torch.no_grad()
def update_actor(module, learner, rows, condition, noise, lr=3e-4):
    """One actor step: its metrics, and its gradients by layer as (weight (in, out), bias (out,))."""
    kind = kind_of(module)
    networks = [learner.actor, learner.critic] + ([] if kind == "td3" else [learner.temperature])
    own = {"td3": [condition], "vanilla": [noise]}.get(kind, [condition, noise])
    obs = rows[:, : learner.sizes[0]]
    module.update_actor(*networks, learner.moments["actor"], learner.metrics, first_step(lr), obs, *own)
    metrics = dict(zip(module.METRICS, learner.metrics.tolist(), strict=True))
    found = gradients(learner, "actor")
    layers = {name: (found[f"{place}.weight"].T, found[f"{place}.bias"]) for name, place in actor_layers(kind).items()}
    return metrics, layers


@torch.no_grad()
def update_temperature(module, learner, rows, condition, noise, target_entropy):
    """One temperature step: its loss and its gradients by layer (of vanilla's scalar, a number)."""
    own = [noise] if kind_of(module) == "vanilla" else [condition, noise]
    adam, obs = (learner.moments["temperature"], learner.metrics, first_step(3e-4)), rows[:, : learner.sizes[0]]
    module.update_temperature(learner.actor, learner.temperature, *adam, target_entropy, obs, *own)
    found = gradients(learner, "temperature")
    loss = dict(zip(module.METRICS, learner.metrics.tolist(), strict=True))["alpha_loss"]
    if "log_alpha" in found:
        return loss, float(found["log_alpha"].item())
    return loss, [(found[f"network.{i}.weight"].T, found[f"network.{i}.bias"]) for i in (0, 2)]


def parameters(learner, *names) -> dict[str, torch.Tensor]:
    """A copy of all parameters of the named networks: actor, critic, target, temperature."""
    return {name: torch.nn.utils.parameters_to_vector(getattr(learner, name).parameters()).clone() for name in names}


def weights(learner, kind) -> list[np.ndarray]:
    """Every parameter of the networks that were made from the seed, flat."""
    names = [name for name in all_networks(kind) if name != "target"]
    return [view.ravel() for name in names for view in views(learner, name).values()]


def all_networks(kind) -> tuple[str, ...]:
    return ("actor", "critic", "target") + (() if kind == "td3" else ("temperature",))


def shake_target(learner):
    """Move the target ensemble away from the online one, where it begins."""
    generator = torch.Generator().manual_seed(1)
    for parameter in learner.target.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def critic_at(learner, obs, action, seen):
    """Q of all members (N, B) by the script's own network."""
    return learner.critic(*((obs, action, seen) if seen.shape[1] else (obs, action)))


def bound(module, learner, name):
    """A network as evaluation gets it."""
    return module.load_network(learner.args, name, learner.copy_of(name), OBS, ACT)


def record_calls(module, learner, name):
    """The arguments of all calls of a compiled function from now on, by parameter name; the function itself still runs."""
    calls, inner, signature = [], getattr(learner, name), inspect.signature(getattr(module, name))

    def recorder(*arguments):
        calls.append({k: v.clone() if torch.is_tensor(v) else v for k, v in signature.bind(*arguments).arguments.items()})
        return inner(*arguments)

    setattr(learner, name, recorder)
    return calls
