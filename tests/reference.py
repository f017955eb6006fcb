"""The method in float64 numpy, straight from the equations and written without looking at the scripts."""

import numpy as np


def upq_target(q_next, beta, reward, terminated, gamma, entropy_bonus):
    """Equation 18, one transition at a time: q_next (N, B), the rest (B,) -> (B,)."""
    members, batch = q_next.shape
    y = np.zeros(batch)
    for b in range(batch):
        mean = sum(float(q) for q in q_next[:, b]) / members
        variance = sum((float(q) - mean) ** 2 for q in q_next[:, b]) / (members - 1)
        future = mean - float(beta[b]) * np.sqrt(variance) + float(entropy_bonus[b])
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
    return np.minimum(1, np.maximum(-1, action + np.minimum(noise_clip, np.maximum(-noise_clip, noise))))


def relu_network(layers, x):
    """A multilayer perceptron, layers [(weight (in, out), bias (out,))] -> outputs of every layer before its ReLU."""
    outputs = []
    for i, (weight, bias) in enumerate(layers):
        x = (np.maximum(x, 0) if i else x) @ weight + bias
        outputs.append(x)
    return outputs


def backward(layers, x, outputs, grad):
    """Gradients [(weight, bias)] and the input's gradient, given the gradient (B, out) of the last output."""
    grads = []
    for i in reversed(range(len(layers))):
        inputs = np.maximum(outputs[i - 1], 0) if i else x
        grads.append((inputs.T @ grad, grad.sum(0)))
        grad = grad @ layers[i][0].T
        if i:
            grad = grad * (outputs[i - 1] > 0)
    return grads[::-1], grad


def squashed_log_prob(u, mean, std):
    """log-density of tanh(u), u ~ N(mean, std), in the textbook form, summed over actions: (B, A) -> (B,)."""
    normal = -((u - mean) ** 2) / (2 * std**2) - np.log(std) - 0.5 * np.log(2 * np.pi)
    return (normal - np.log1p(-(np.tanh(u) ** 2))).sum(-1)


def adam(params, grads, lr, steps_done=0, first=0.0, second=0.0):
    """Adam's equations as printed by Kingma and Ba, for a list of gradients one after the other."""
    for t, g in enumerate(grads, steps_done + 1):
        first = 0.9 * first + 0.1 * g
        second = 0.999 * second + 0.001 * g * g
        params = params - lr * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
    return params


def relative_error(a, b):
    """||a - b|| / ||b|| in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)
