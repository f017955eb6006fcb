"""The method in float64, straight from the paper's equations and written without looking at the scripts.

Targets are loops over single transitions. Losses are PyTorch expressions in plain tensors, of which torch.autograd takes the
gradient: no network, loss or backward pass of a script is used. `parameters` are those of one network by their names there.
"""

import math

import numpy as np
import torch


# --------------------------------------------------------------------------------------------------------------- targets
def upq_target(q_next, beta, reward, terminated, gamma, entropy_bonus):
    """Equation 18, one transition at a time: q_next (N, B), the rest (B,) -> (B,)."""
    members, batch = q_next.shape
    y = np.zeros(batch)
    for b in range(batch):
        mean = sum(float(q) for q in q_next[:, b]) / members
        variance = sum((float(q) - mean) ** 2 for q in q_next[:, b]) / (members - 1)
        future = mean - float(beta[b]) * math.sqrt(variance) + float(entropy_bonus[b])
        y[b] = float(reward[b]) + (0.0 if terminated[b] else gamma * future)
    return y


def in_target_min(q_next, size, keys, reward, terminated, gamma, entropy_bonus):
    """The minimum over the members with the smallest keys, one transition at a time: q_next, keys (N, B), the rest (B,)."""
    y = np.zeros(q_next.shape[1])
    for b in range(len(y)):
        members = sorted(range(len(q_next)), key=lambda i: keys[i, b])[: int(size[b])]
        future = min(float(q_next[i, b]) for i in members) + float(entropy_bonus[b])
        y[b] = float(reward[b]) + (0.0 if terminated[b] else gamma * future)
    return y


def smoothed_action(action, noise, noise_clip):
    """The target's action of TD3: the noise is clipped, then the sum."""
    noise = torch.minimum(torch.maximum(noise, torch.full_like(noise, -noise_clip)), torch.full_like(noise, noise_clip))
    return torch.minimum(torch.maximum(action + noise, -torch.ones_like(action)), torch.ones_like(action))


# -------------------------------------------------------------------------------------------------------------- networks
def relu(x):
    return torch.where(x > 0, x, torch.zeros_like(x))


def linear(parameters, layer, x):
    """A layer of torch.nn.Linear: weight (out, in), bias (out,)."""
    return x @ parameters[f"{layer}.weight"].T + parameters[f"{layer}.bias"]


def critics(parameters, x):
    """Q_i of every member, one after the other: weights (N, in, out), biases (N, 1, out); x (B, in) -> (N, B)."""
    values = []
    for member in range(len(parameters["0.weight"])):
        first, second, last = ((parameters[f"{i}.weight"][member], parameters[f"{i}.bias"][member]) for i in (0, 2, 4))
        hidden = relu(x @ first[0] + first[1])
        hidden = relu(hidden @ second[0] + second[1])
        values.append((hidden @ last[0] + last[1])[:, 0])
    return torch.stack(values)


def gaussian_actor(parameters, x):
    """Mean and standard deviation of the policy before tanh (equation 24): x (B, in) -> (B, A), (B, A)."""
    hidden = relu(linear(parameters, "body.2", relu(linear(parameters, "body.0", x))))
    return linear(parameters, "mean", hidden), linear(parameters, "log_std", hidden).clamp(-10, 2).exp()


def deterministic_actor(parameters, x):
    """The policy of TD3: x (B, in) -> (B, A)."""
    hidden = relu(linear(parameters, "2", relu(linear(parameters, "0", x))))
    return linear(parameters, "4", hidden).tanh()


def alpha(parameters, seen, xi):
    """The temperature: exp(T(seen) + xi) (equation 25), seen (B, 1) -> (B,), or the exponential of one learned scalar."""
    if "log_alpha" in parameters:
        return parameters["log_alpha"].exp()
    return (linear(parameters, "network.2", relu(linear(parameters, "network.0", seen)))[:, 0] + xi).exp()


def squashed_log_prob(u, mean, std):
    """log-density of tanh(u), u ~ N(mean, std), in the textbook form, summed over actions: (B, A) -> (B,)."""
    normal = -((u - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return (normal - torch.log1p(-(u.tanh() ** 2))).sum(1)


# ------------------------------------------------------------------------------------------------- losses and optimiser
def critic_loss(q, y):
    """Equation 17, summed over the members: q (N, B), y (B,)."""
    return sum(((q_i - y) ** 2).mean() for q_i in q)


def actor_loss(q, alpha, log_prob):
    """Equation 19: q (N, B), alpha and log_prob (B,)."""
    return (alpha * log_prob - sum(q) / len(q)).mean()


def temperature_loss(alpha, log_prob, target_entropy):
    """Equation 16."""
    return (-alpha * log_prob - alpha * target_entropy).mean()


def gradient(loss, parameters):
    """The gradient of a loss, by the names of the parameters."""
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def adam(parameter, grads, lr):
    """Adam's equations as printed by Kingma and Ba, for a list of gradients one after the other."""
    first = second = 0.0
    for t, grad in enumerate(grads, 1):
        first = 0.9 * first + 0.1 * grad
        second = 0.999 * second + 0.001 * grad**2
        parameter = parameter - lr * (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)) ** 0.5 + 1e-8)
    return parameter


def relative_error(a, b) -> float:
    """||a - b|| / ||b|| in float64."""
    a, b = (torch.as_tensor(x).detach().double().cpu() for x in (a, b))
    assert a.shape == b.shape
    return float((a - b).norm() / b.norm())
