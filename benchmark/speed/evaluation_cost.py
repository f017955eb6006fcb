"""What evaluation costs: its core-seconds and its share of a run.

    python benchmark/speed/evaluation_cost.py

For each environment: the core-seconds of one evaluation of the full protocol (H policies, 10 episodes each) whose episodes all
last 1000 steps, so an upper bound, and their share of all core-seconds of a run that evaluates every eval_frequency steps. All
on the CPU; a training step is `Learner.update`, without acting and simulator. throughput.py times training beside evaluations.
"""

import statistics
import time
from dataclasses import dataclass
from unittest import mock

from measure import Sizes, about, fail, make_learner, table, time_block, words

import torch  # isort: skip (measure sets OpenMP up before)
import tyro  # isort: skip


@dataclass
class Options:
    script: str = "rac_sac"  # the script to measure
    env_ids: tuple[str, ...] = ("Ant-v4", "Humanoid-v4", "Walker2d-v4", "Hopper-v4")  # MuJoCo's, that can be told not to end
    rounds: int = 5  # evaluations of one policy, of which the median is taken


def core_seconds(module, env_id: str, rounds: int) -> tuple[float, float]:
    """CPU time of one policy's 10 episodes of 1000 steps each, and of the part of it that MuJoCo itself takes; medians."""
    import mujoco

    args = module.check_args(module.Args(env_id=env_id))
    try:
        envs = [module.FlatEnv(env_id, terminate_when_unhealthy=False) for _ in range(args.eval_episodes)]
    except module.UserError as error:
        fail(str(error))
    actor = module.make_network("actor", args, envs[0].obs_dim, envs[0].action_dim)
    whole = []
    physics = []
    mj_step = mujoco.mj_step

    def clocked(*arguments, **options):
        start = time.process_time()
        mj_step(*arguments, **options)
        physics[-1] += time.process_time() - start

    with mock.patch.object(mujoco, "mj_step", clocked):
        for _ in range(rounds):
            physics.append(0.0)
            start = time.process_time()
            module.play_episodes(envs, actor, module.eval_conditions(args)[0], list(range(args.eval_episodes)))
            whole.append(time.process_time() - start)
    return statistics.median(whole), statistics.median(physics)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.rounds < 1:
        fail(f"rounds is {options.rounds}; it must be at least 1.")
    rows = []
    print(words(about(torch.device("cpu"))) + "\n", flush=True)
    for env_id in options.env_ids:
        try:
            module, _, learner = make_learner(options.script, Sizes(env_id, cuda=False))
        except ValueError as error:  # of the user
            fail(str(error))
        args, cores = learner.args, torch.get_num_threads()
        time_block(learner, 1)
        step = statistics.median(time_block(learner, 5) for _ in range(5))
        torch.set_num_threads(1)
        one, physics = core_seconds(module, env_id, options.rounds)
        torch.set_num_threads(cores)
        evaluation = one * len(module.eval_conditions(args))
        share = evaluation / (evaluation + args.eval_frequency * step * cores)
        rows.append(
            {
                "environment": env_id,
                "us per simulated step": 1e6 * one / 1000 / args.eval_episodes,
                "MuJoCo's part": f"{100 * physics / one:.0f} %",
                "core-s per evaluation": evaluation,
                "ms per training step": 1e3 * step,
                "evaluation's share of a run": f"{100 * share:.1f} %",
            }
        )
    print(table(rows))


if __name__ == "__main__":
    main()
