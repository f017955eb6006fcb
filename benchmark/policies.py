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
from rac_sac import FlatEnv, UserError, load_policy_file, play_episodes, seeds_for

POLICIES = Path(__file__).resolve().parent.parent / "policies"


@dataclass
class Options:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out: Path = POLICIES  # gets <env_id>.pt of each run
    episodes: int = 10  # the same as those of rac_sac.py --evaluate


class Episodes(NamedTuple):
    returns: np.ndarray  # (E,)
    distances: np.ndarray  # (E,) x at the end in m; episodes begin near 0
    seconds: np.ndarray  # (E,) of simulation


def play(path: Path, seeds: list[int]) -> Episodes:
    """Episodes of a family's best member, as rac_sac.py --evaluate plays them."""
    file = load_policy_file(path)
    envs = [FlatEnv(file.args.env_id) for _ in seeds]
    returns, faults = play_episodes(envs, file.actor, file.evaluation["best_beta"], seeds)
    if faults:
        raise UserError(f"{path}: {faults[0]}.")
    ends = np.array([(env.unwrapped.data.qpos[0], env.unwrapped.data.time) for env in envs])
    return Episodes(returns, *ends.T)


def row(run: Path, options: Options) -> str:
    """The row of the table in policies/README.md."""
    path = run / "best_policy.pt"
    args, evaluation = load_policy_file(path).args, load_policy_file(path).evaluation
    played = play(path, seeds_for(args.seed, 1, 0, options.episodes))
    config = json.loads((run / "config.json").read_text())
    shutil.copy(path, options.out / f"{args.env_id}.pt")
    return (
        f"| {args.env_id} | {run.name} | {evaluation['step']:,} | {evaluation['best_beta']:.2f} | "
        f"{played.returns.mean():,.0f} ± {played.returns.std():,.0f} | {played.distances.mean():.1f} | "
        f"{played.seconds.mean():.1f} | {config['git_commit'][:7]} | {config['script_sha256'][:12]} |"
    )


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    for run in options.runs:
        print(row(run, options))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
