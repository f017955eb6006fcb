"""The paper's equations in float64, written without the scripts: test_method.py compares the scripts with them.

Values and targets are of single transitions, one after the other. Losses are sums of plain tensors, of which torch.autograd takes
the gradient. The class of a script (Sac, Td3, Vanilla, Itm) says what it has of its own. Networks are called and not imitated: a
fork with other layers changes nothing here, if its networks are called as before. For another target, loss or optimiser see HINT.
"""

import math

import torch
from torch.distributions import Normal

HINT = "a fork's own target, loss or optimiser must stand in tests/reference.py too: as an equation, or as a class in rule_of()"


def optimizer(name, parameters, lr, args):
    """Of PyTorch, for the network of this name: Adam, and for actor and critics its decoupled weight decay."""
    decay = 0 if name == "temperature" else getattr(args, "weight_decay", 0)
    return torch.optim.AdamW(parameters, lr, weight_decay=decay)


def upq_value(q, beta):
    """What equations 6, 18 and 26 make of the next state's values q, a list of N numbers."""
    mean = sum(q) / len(q)  # equation 7
    variance = sum((q_i - mean) ** 2 for q_i in q) / (len(q) - 1)  # equation 8, squared
    return mean - beta * math.sqrt(variance)


def in_target_min_value(q, size, keys):
    """What equation 32 makes of them: the minimum over a subset, the `size` members with the smallest keys."""
    ranked = sorted(zip(keys, q, strict=True))
    return min(q_i for _, q_i in ranked[: int(size)])


def target(values, reward, terminated, gamma, entropy_bonus):
    """Equations 6, 18, 26 and 32 (equation 3's minus is a misprint), from the values of all transitions: (B,) each -> (B,)."""
    transitions = zip(values, reward.tolist(), terminated.tolist(), entropy_bonus.tolist(), strict=True)
    return torch.tensor([r + gamma * (1 - end) * (value + bonus) for value, r, end, bonus in transitions], dtype=torch.float64)


def squashed_gaussian(mean, std, noise):
    """Equation 24 and, by the change of variables, the log-density of the action: (B, A) each -> (B, A), (B,)."""
    u = mean + std * noise
    action = u.tanh()
    return action, (Normal(mean, std).log_prob(u) - (1 - action**2).log()).sum(1)


def simba_features(obs, others, mean, variance, parameters):
    """What the last layer of a single network of --network simba sees: obs (B, O), others (B, I - O) -> (B, H).

    parameters: weights (in, out) and biases of its first three linear layers.
    """

    def layer_norm(x):
        centred = x - x.mean(1, keepdim=True)
        return centred / ((centred**2).mean(1, keepdim=True) + 1e-5).sqrt()

    (weight, bias), (weight_up, bias_up), (weight_down, bias_down) = parameters
    z = ((obs - mean) / (variance + 1e-8).sqrt()).clip(-10, 10)
    x = torch.cat([z, others], 1) @ weight + bias
    x = x + (layer_norm(x) @ weight_up + bias_up).clip(0) @ weight_down + bias_down
    return layer_norm(x)


def critic_loss(q, y):
    """Equations 17 and 33, summed over the members: q (N, B), y (B,)."""
    return sum(((q_i - y) ** 2).mean() for q_i in q)


def actor_loss(q, alpha=0, log_prob=0):
    """Equations 19, 30 and 34, and without entropy equation 29: q (N, B), alpha and log_prob (B,)."""
    return (alpha * log_prob - sum(q) / len(q)).mean()


def temperature_loss(alpha, log_prob, target_entropy):
    """Equations 5, 16 and 31: alpha and log_prob (B,)."""
    return (-alpha * log_prob - alpha * target_entropy).mean()


def learning_rate(step, args):
    """Equation 23, of the critics."""
    p = min(max((step - args.learning_starts) / (args.q_lr_warmup_end - args.learning_starts), 0), 1)
    return args.q_lr_init * (1 - p) + p * args.q_lr


class Sac:
    """RAC-SAC: what it learns from a minibatch, whose parts are tensors (obs, next_obs, condition, noise, ...)."""

    def __init__(self, script, agent):
        self.script, self.agent, self.args = script, agent, agent.args

    def q(self, critic, obs, action, batch):
        return critic(self.script.critic_inputs(obs, action, batch.condition))

    def alpha(self, batch):
        """Equation 25, one scalar, or a constant."""
        if not self.args.autotune:
            return torch.full_like(batch.reward, self.args.alpha)
        if getattr(self.args, "temperature_network", False):
            output = self.agent.temperature.network(self.script.features(batch.condition))[:, 0]
            return (output + self.args.initial_log_alpha).exp()
        return self.agent.temperature(batch.condition).exp()

    def policy(self, obs, batch, noise):
        mean, log_std = self.agent.actor(obs, batch.condition)
        return squashed_gaussian(mean, log_std.exp(), noise)

    def next_action(self, batch):
        """The next actions and what entropy adds to their value."""
        action, log_prob = self.policy(batch.next_obs, batch, batch.noise)
        return action, -self.alpha(batch) * log_prob

    def next_q(self, action, batch):
        """What target critics say of the next state: next actions (B, A) -> (N, B)."""
        assert hasattr(self.agent, "target"), f"there is no agent.target; {HINT}, with next_q() and after_an_update()"
        return self.q(self.agent.target, batch.next_obs, action, batch)

    def after_an_update(self):
        """What follows an update of the critics: the Polyak step of the target critics, in place."""
        tau = self.args.tau
        for slow, fast in zip(self.agent.target.parameters(), self.agent.critic.parameters(), strict=True):
            slow.data = (1 - tau) * slow.data + tau * fast.data

    def values(self, q_next, batch):
        """The next state's values by the target critics, of each transition: q_next (N, B) -> B numbers."""
        return map(upq_value, q_next.T.tolist(), batch.condition[:, 0].tolist())

    def actor_loss(self, batch):
        action, log_prob = self.policy(batch.obs, batch, batch.noise)
        return actor_loss(self.q(self.agent.critic, batch.obs, action, batch), self.alpha(batch).detach(), log_prob)

    def temperature_loss(self, batch):
        _, log_prob = self.policy(batch.obs, batch, batch.temperature_noise)
        return temperature_loss(self.alpha(batch), log_prob.detach(), self.args.target_entropy)


class Td3(Sac):
    """RAC-TD3: a smoothed next action (equations 27 and 28), and no entropy."""

    def next_action(self, batch):
        clip = self.args.noise_clip
        action = self.agent.actor(batch.next_obs, batch.condition) + batch.noise.clip(-clip, clip)
        return action.clip(-1, 1), torch.zeros_like(batch.reward)

    def actor_loss(self, batch):
        action = self.agent.actor(batch.obs, batch.condition)
        return actor_loss(self.q(self.agent.critic, batch.obs, action, batch))


class Vanilla(Sac):
    """Vanilla RAC: one beta, or (REDQ) the minimum over one subset for the whole minibatch."""

    def values(self, q_next, batch):
        if self.args.target_rule == "upq":
            return [upq_value(q, self.args.beta) for q in q_next.T.tolist()]
        return [in_target_min_value(q, batch.size, batch.keys[:, 0].tolist()) for q in q_next.T.tolist()]


class Itm(Sac):
    """RAC-ITM: the minimum over a subset of floor(k) + 1 members with probability k - floor(k), else of floor(k)."""

    def values(self, q_next, batch):
        sizes = []
        for k, uniform in zip(batch.condition[:, 0].tolist(), batch.rounding.tolist(), strict=True):
            whole = math.floor(k)
            sizes.append(whole + 1 if uniform < k - whole else whole)
        return map(in_target_min_value, q_next.T.tolist(), sizes, batch.keys.T.tolist())


def rule_of(script) -> type[Sac]:
    """The class of a script or of a fork, by what the module has."""
    if hasattr(script, "smoothed_action"):
        return Td3
    if hasattr(script.Args, "target_rule"):
        return Vanilla
    if script.CONDITION == "k":
        return Itm
    return Sac
