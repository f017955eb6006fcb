"""What a run stores is what happened: read from the replay in checkpoint.pt."""

import gymnasium as gym
import numpy as np
import torch


class Diary(gym.Env):
    """Observes its episode, the steps in it and the last action, always in the same array.

    Episodes last five steps; they end in turn by termination and by truncation.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Box(-2.0, 4.0, (1,))
    episode = -1

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.seen = np.array([self.episode, 0, 0], np.float32)
        return self.seen, {}

    def step(self, action):
        self.seen[1] += 1
        self.seen[2] = action[0]
        over = self.seen[1] == 5
        return self.seen, 10.0 * self.seen[1], over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}


def test_the_replay_holds_what_happened(cli, toy):
    """300 steps in 250 rows: the last ones stand where the first ones stood."""
    run_dir = cli.train("run", "--buffer-size", 250, "--learning-starts", 200, env_id=toy(Diary))
    replay = torch.load(run_dir / "checkpoint.pt", weights_only=True)["replay"].numpy()
    assert replay.shape == (250, 3 + 1 + 2 + 3)
    steps = np.arange(50, 300)
    obs, action, reward, terminated, next_obs = np.split(replay[steps % 250], [3, 4, 5, 6], 1)
    episode, step = steps // 5, steps % 5
    np.testing.assert_array_equal(obs[:, :2], np.stack([episode, step], 1))
    np.testing.assert_array_equal(next_obs[:, :2], np.stack([episode, step + 1], 1))
    np.testing.assert_array_equal(reward[:, 0], 10 * (step + 1))
    np.testing.assert_array_equal(terminated[:, 0], (step == 4) & (episode % 2 == 0))  # a truncation is none
    goes_on = step[1:] > 0
    np.testing.assert_array_equal(obs[1:][goes_on], next_obs[:-1][goes_on])
    assert np.abs(action).max() <= 1
    random = np.sort(action[:150, 0])  # of the steps before learning, uniform: Kolmogorov's test
    np.testing.assert_allclose(random, np.linspace(-1, 1, 150), atol=2 * 1.95 / np.sqrt(150))
    np.testing.assert_allclose(next_obs[:, 2], 1 + 3 * action[:, 0], atol=1e-6)  # what the environment got, within its bounds
