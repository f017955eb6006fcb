"""SBX (JAX) SAC on the work of an environment step here: G updates of N critics, one of actor and temperature.

speed.py --peer-python PYTHON starts it, with the Python of a virtual environment of its own:

    pip install sbx-rl==0.28.0 stable_baselines3==2.9.2 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 optax==0.2.8 \\
        tfp-nightly==0.26.0.dev20261027 torch==2.13.0 "gymnasium[mujoco]==1.4.0" mujoco==4.0.0 numpy==2.4.6

Arguments: environment, G, N, batch size, width, and mlp or simba: MlpPolicy with two hidden layers, or SimbaPolicy with one block
in actor and critics. SimbaPolicy has scale and shift in its layer normalisation, and does not normalise observations. For each
line with a number of seconds on standard input, it trains that long and answers with the seconds of one step.
"""

import sys
import time

import gymnasium as gym
import numpy as np
from sbx import SAC
from stable_baselines3.common.logger import configure

env = gym.make(sys.argv[1])
utd, num_critics, batch_size, hidden_dim = (int(word) for word in sys.argv[2:6])
if sys.argv[6] == "simba":
    policy = "SimbaPolicy"
    widths = [hidden_dim]
else:
    policy = "MlpPolicy"
    widths = [hidden_dim, hidden_dim]
model = SAC(
    policy,
    env,
    learning_starts=0,
    batch_size=batch_size,
    gradient_steps=utd,
    policy_delay=utd,
    buffer_size=20_000,
    policy_kwargs={"n_critics": num_critics, "net_arch": widths},
)
model.set_logger(configure(None, []))
for _ in range(5_000):
    obs, next_obs = np.random.normal(size=(2, 1, *env.observation_space.shape))
    model.replay_buffer.add(obs, next_obs, env.action_space.sample()[None], np.random.normal(size=1), np.zeros(1), [{}])
print("ready", flush=True)

for line in sys.stdin:
    times = [time.perf_counter()]
    while times[-1] < times[0] + float(line):
        model.train(utd, batch_size)
        times.append(time.perf_counter())
    print(np.diff(times).mean(), flush=True)
