"""SBX (JAX) SAC on the work of one environment step here: G updates of N critics, one actor and temperature update.

Started by throughput.py --peer sbx. For each line with a number of environment steps on standard input, it trains that many
and answers with the seconds of one.
"""

import argparse
import sys
import time

import gymnasium as gym
import numpy as np
from sbx import SAC
from stable_baselines3.common.logger import configure

parser = argparse.ArgumentParser(description=__doc__)
for name, default in (("--env-id", "Ant-v4"), ("--utd", 20), ("--num-critics", 10), ("--batch-size", 256), ("--hidden-dim", 256)):
    parser.add_argument(name, type=type(default), default=default)
args = parser.parse_args()

env = gym.make(args.env_id)
obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
model = SAC(
    "MlpPolicy",
    env,
    learning_starts=0,
    batch_size=args.batch_size,
    gradient_steps=args.utd,
    policy_delay=args.utd,
    buffer_size=20_000,
    policy_kwargs={"n_critics": args.num_critics, "net_arch": [args.hidden_dim] * 2},
)
model.set_logger(configure(None, []))
rng = np.random.default_rng(0)
for _ in range(5_000):
    obs, next_obs = rng.normal(size=(2, 1, obs_dim))
    model.replay_buffer.add(obs, next_obs, rng.uniform(-1, 1, (1, action_dim)), rng.normal(size=1), np.zeros(1), [{}])
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line)):
        model.train(args.utd, args.batch_size)
    print((time.perf_counter() - start) / int(line), flush=True)
