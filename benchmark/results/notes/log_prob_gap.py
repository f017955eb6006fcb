"""How far the two log-probabilities of two_details.md are apart where finished runs of rac_sac.py learn.

    python benchmark/results/notes/log_prob_gap.py runs/NAME ...

For 20,000 next states of a run's replay, each with a beta as in training and an action tanh(u) of the last policy: the gap
|exact - bounded|, the gap times the temperature, which is what enters targets, and |u|.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[3]))
import rac_sac

STATES = 20_000

print("| run | mean gap | times temperature: mean | largest | share of abs(u) > 6 |\n|---|---|---|---|---|")
for run in map(Path, sys.argv[1:]):
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    args, replay, obs_dim = rac_sac.Args(**checkpoint["args"]), checkpoint["replay"], checkpoint["obs_dim"]
    networks = {
        "actor": rac_sac.Actor(obs_dim, math.prod(checkpoint["action_shape"]), args.hidden_dim),
        "temperature": rac_sac.Temperature(args),
    }
    for name, network in networks.items():
        network.load_state_dict({key: checkpoint["tensors"][f"{name}.{key}"] for key in network.state_dict()})

    generator = torch.Generator().manual_seed(0)
    next_obs = replay[torch.randint(len(replay), (STATES,), generator=generator), -obs_dim:]
    beta = args.beta_min + (args.train_beta_max - args.beta_min) * torch.rand(STATES, 1, generator=generator)
    with torch.inference_mode():
        mean, log_std = networks["actor"](next_obs, beta.log())
        alpha = networks["temperature"](beta.log()).exp()
    u = mean + log_std.exp() * torch.randn(mean.shape, generator=generator)
    gap = ((1 - u.tanh().square() + 1e-7).log() - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(1).abs()
    seen = f"{gap.mean():.0e} | {(alpha * gap).mean():.0e} | {(alpha * gap).max():.1g} | {(u.abs() > 6).float().mean():.2%}"
    print(f"| {run.name} | {seen} |")
