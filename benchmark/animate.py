"""Members of one family side by side: the same episode played with a small, a middle and a large beta, as an animated WebP.

    python benchmark/animate.py policies/Ant-v4.pt --out family.webp

A policy file of rac_sac.py. Next to the animation a still picture is written, of its middle frame (.png).
"""

import math
import os
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

if sys.platform == "linux" and not os.environ.get("DISPLAY"):
    os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium as gym
import numpy as np
import tyro
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rac_sac import UserError, first_line, follow_the_body, load_policy, load_policy_file

GREY_OF_ONE_THAT_FELL = 0.45  # the brightness of its last picture


@dataclass
class Options:
    policy: Annotated[Path, tyro.conf.Positional]  # a policy file, or a run directory
    out: Path = Path("family.webp")  # the animation, .webp; the still picture gets the suffix .png
    betas: tuple[float, ...] = ()  # default: the smallest, the middle and the largest of those evaluated
    seed: int = 1  # of the initial state, which is the same for all
    seconds: float = 8.0  # of the episode, from its beginning
    frames_per_second: int = 20
    width: int = 300  # of each picture, in pixels
    height: int = 240
    quality: int = 60  # of WebP, 0 to 100


class Episode(NamedTuple):
    """What one beta has played."""

    frames: list[np.ndarray]  # at `frames_per_second`
    returns: list[float]  # so far, at each of them
    terminated: bool
    truncated: bool


def play(env: gym.Env, policy, beta: float, options: Options) -> Episode:
    """The episode from its beginning, at most `seconds` of it."""
    obs, _ = env.reset(seed=options.seed)
    frames, returns = [env.render()], [0.0]
    total, steps, terminated, truncated = 0.0, 0, False, False
    wanted = math.ceil(options.seconds * options.frames_per_second)
    while len(frames) < wanted and not (terminated or truncated):
        obs, reward, terminated, truncated, _ = env.step(policy(obs, beta=beta))
        total += float(reward)
        steps += 1
        due = 1 + int(steps * env.unwrapped.dt * options.frames_per_second + 1e-9)  # by now, with that of the initial state
        missing = min(due, wanted) - len(frames)
        for _ in range(max(missing, int(terminated or truncated))):  # the last picture shows the end
            frames.append(env.render())
            returns.append(total)
    return Episode(frames, returns, terminated, truncated)


def labelled(frame: np.ndarray, lines: tuple[str, str], brightness: float) -> Image.Image:
    picture = Image.fromarray((frame * brightness).astype(np.uint8))
    draw = ImageDraw.Draw(picture, "RGBA")
    draw.rectangle((0, 0, picture.width, 38), fill=(0, 0, 0, 120))
    for row, line in enumerate(lines):
        draw.text((8, 3 + 17 * row), line, fill="white", font=ImageFont.load_default(14))
    return picture


def animation(episodes: list[Episode], betas: list[float]) -> list[Image.Image]:
    """The episodes beside each other, each standing still once it has ended, in grey if it fell."""
    count = max(len(episode.frames) for episode in episodes)
    pictures = []
    for number in range(count):
        beside = []
        for beta, episode in zip(betas, episodes, strict=True):
            place = min(number, len(episode.frames) - 1)
            over = place == len(episode.frames) - 1
            fell = over and episode.terminated
            said = ", fell" if fell else ", time limit" if over and episode.truncated else ""
            lines = (f"beta {beta:.2g}", f"return {episode.returns[place]:,.0f}{said}")
            beside.append(np.asarray(labelled(episode.frames[place], lines, GREY_OF_ONE_THAT_FELL if fell else 1.0)))
        pictures.append(Image.fromarray(np.concatenate(beside, 1)))
    return pictures


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    for name in ("seconds", "frames_per_second", "width", "height"):
        if not 0 < getattr(options, name) < math.inf:
            raise UserError(f"{name} is {getattr(options, name)}; it must be above 0.")
    if options.frames_per_second > 500:
        raise UserError(f"frames_per_second is {options.frames_per_second}; it must be at most 500.")
    if not 0 <= options.quality <= 100:
        raise UserError(f"quality is {options.quality}; it must be from 0 to 100.")
    if options.out.suffix != ".webp":
        raise UserError(f"out is {options.out}; it must end in .webp.")
    gym.logger.min_level = gym.logger.ERROR  # that -v4 is not the newest
    policy = load_policy(options.policy)
    betas = list(options.betas) or [policy.betas[0], policy.betas[len(policy.betas) // 2], policy.betas[-1]]
    env_id = load_policy_file(options.policy).args.env_id
    try:
        env = gym.make(env_id, render_mode="rgb_array", width=options.width, height=options.height)
        follow_the_body(env)
        episodes = [play(env, policy, beta, options) for beta in betas]
        env.close()
    except (gym.error.Error, TypeError, AttributeError, ImportError) as error:
        raise UserError(f"{env_id} cannot be rendered here: {first_line(error)}; MuJoCo's environments can.") from None
    pictures = animation(episodes, betas)
    begins = [round(1000 * number / options.frames_per_second) for number in range(len(pictures) + 1)]  # in ms
    durations = [end - begin for begin, end in pairwise(begins)]
    how = {"save_all": True, "append_images": pictures[1:], "duration": durations, "loop": 0}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(options.out, quality=options.quality, method=6, **how)
    still = options.out.with_suffix(".png")
    pictures[len(pictures) // 2].save(still, optimize=True)
    print(f"wrote {options.out} ({options.out.stat().st_size / 1e6:.2f} MB, {len(pictures)} frames) and {still}")
    for beta, episode in zip(betas, episodes, strict=True):
        ended = "terminated" if episode.terminated else "time limit" if episode.truncated else "shown"
        seconds = len(episode.frames) / options.frames_per_second
        print(f"beta {beta:.3g}: return {episode.returns[-1]:.0f}, {ended} after {seconds:.1f} s")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
