"""Copy the best policies of runs into policies/, and print the rows of its table: what each does on fresh episodes.

    python benchmark/policies.py benchmark/results/to_100000/Walker2d-v4__rac_sac__4

A run directory of rac_sac.py with config.json and best_policy.pt, in an environment of MuJoCo whose first coordinate is forward.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rac_sac import FlatEnv, PolicyFile, UserError, load_policy_file, play_episodes, seeds_for

POLICIES = Path(__file__).resolve().parent.parent / "policies"
EPISODES = 10  # those that rac_sac.py --evaluate plays by default


@dataclass
class Options:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out: Path = POLICIES  # gets <env_id>.pt of each run, with _ for / and :


class Episodes(NamedTuple):
    returns: np.ndarray  # (E,)
    distances: np.ndarray  # (E,) x at the end in m; episodes begin near 0
    seconds: np.ndarray  # (E,) of simulation


def play(file: PolicyFile, seeds: list[int]) -> Episodes:
    """An episode for each seed, by a family's best member; UserError where the environment does not play or is not MuJoCo's."""
    envs = [FlatEnv(file.args.env_id) for _ in seeds]
    returns, faults = play_episodes(envs, file.actor, file.evaluation["best_beta"], seeds)
    if faults:
        raise UserError(f"{file.args.env_id}: {faults[0]}.")
    try:
        ends = [(env.unwrapped.data.qpos[0], env.unwrapped.data.time) for env in envs]
    except AttributeError:
        raise UserError(f"{file.args.env_id} is not one of MuJoCo's; its distance is not known here.") from None
    distances, seconds = np.array(ends).T
    return Episodes(returns, distances, seconds)


def origin_of(run: Path) -> tuple[str, str]:
    """The commit and the SHA-256 of each version of the script, shortened; UserError where a run has noted none."""
    try:
        config = json.loads((run / "config.json").read_text())
        commit, *dirty = config["git_commit"].partition("-")
        return commit[:7] + "".join(dirty), "+".join(version[:12] for version in config["script_sha256"].split("+"))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{run} has no config.json that names a commit and a script's SHA-256.") from None


def row(run: Path, file: PolicyFile) -> str:
    """A run's row of the table in policies/README.md."""
    played = play(file, seeds_for(file.args.seed, 1, 0, EPISODES))
    commit, sha256 = origin_of(run)
    cells = (
        file.args.env_id,
        run.name,
        f"{file.evaluation['step']:,}",
        f"{file.evaluation['best_beta']:.2f}",
        f"{played.returns.mean():,.0f} ± {played.returns.std():,.0f}",
        f"{played.distances.mean():.1f}",
        f"{played.seconds.mean():.1f}",
        commit,
        sha256,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if not options.runs:
        raise UserError("runs is empty; give run directories.")
    files = {}  # environment -> run, its policy
    for run in options.runs:
        file = load_policy_file(run / "best_policy.pt")
        if file.args.env_id in files:
            raise UserError(f"{files[file.args.env_id][0]} and {run} are both of {file.args.env_id}; give one run of each.")
        files[file.args.env_id] = run, file
    options.out.mkdir(parents=True, exist_ok=True)
    for env_id, (run, file) in files.items():
        print(row(run, file))
        kept = options.out / f"{env_id.replace('/', '_').replace(':', '_')}.pt"
        shutil.copy(run / "best_policy.pt", kept.with_suffix(".tmp"))
        kept.with_suffix(".tmp").replace(kept)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
