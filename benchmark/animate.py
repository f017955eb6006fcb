"""Members of one family side by side: the same episode with a small, a medium and a large beta, as an animated WebP.

    python benchmark/animate.py policies/Walker2d-v4.pt
    MUJOCO_GL=egl python benchmark/animate.py runs/NAME --conditions 0.07 0.8 --out family.webp

Takes a policy file or a run directory, of one of MuJoCo's environments. Each member stands still once its episode has ended. A
still picture, of the middle frame, is written beside the animation (.png). MUJOCO_GL=egl is needed where there is no display.
"""

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

FRAMES_PER_SECOND = 12  # at most; a frame shows a whole number of steps


@dataclass
class Options:
    policy: tyro.conf.Positional[Path]  # a policy file, or a run directory
    out: Path = Path("family.webp")  # the animation
    conditions: tuple[float, ...] = ()  # betas (or k); by default the smallest, the middle and the largest of those evaluated
    seconds: float = 8.0  # of the episode, from its beginning


def play(env: gym.Env, act, title: str, options: Options, stride: int) -> list[np.ndarray]:
    """Labelled frames (H, W, 3), one every `stride` steps; act: from an observation to an action."""
    frames = []
    total = 0.0
    end = ""
    obs, _ = env.reset(seed=1)
    for _ in range(round(options.seconds / (env.unwrapped.dt * stride))):
        picture = Image.fromarray(env.render())
        ImageDraw.Draw(picture).text((8, 3), f"{title}\nreturn {total:,.0f}{end}", font_size=14)
        frames.append(np.asarray(picture))
        for _ in range(stride):
            if not end:
                obs, reward, terminated, truncated, _ = env.step(act(obs))
                total += reward
                if terminated:
                    end = ", terminated"
                elif truncated:
                    end = ", time limit"
    return frames


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    gym.logger.min_level = gym.logger.ERROR  # no warnings that -v4 is not the newest
    file = options.policy / "policy.pt" if options.policy.is_dir() else options.policy
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        script = importlib.import_module(content["script"])
        policy = script.load_policy(file)
    except Exception:
        sys.exit(f"error: {file} holds no policy of one of the scripts; give a policy file or a run directory.")
    # The camera "track" follows the body; the default one is left behind.
    env = gym.make(content["args"]["env_id"], render_mode="rgb_array", camera_name="track", width=280, height=210)
    stride = max(1, round(1 / (env.unwrapped.dt * FRAMES_PER_SECOND)))
    conditions = options.conditions
    if not conditions:
        family = script.eval_conditions(policy.args)
        conditions = sorted({family[0], family[len(family) // 2], family[-1]})  # a set, for there may be only one
    films = []
    for value in conditions:
        act = partial(policy, **{script.CONDITION: value})
        films.append(play(env, act, f"{script.CONDITION} {value:.2g}", options, stride))
    pictures = [Image.fromarray(np.hstack(frames)) for frames in zip(*films, strict=True)]  # the members side by side
    duration = round(1000 * stride * env.unwrapped.dt)  # of a frame, in ms
    pictures[0].save(options.out, save_all=True, append_images=pictures[1:], duration=duration, loop=0, quality=25, method=6)
    pictures[len(pictures) // 2].save(options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
