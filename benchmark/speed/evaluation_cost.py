"""What evaluation costs: its core-seconds, its share of a run, and what it takes from training beside it.

    python benchmark/speed/evaluation_cost.py

First, for each environment: the core-seconds of one evaluation of the full protocol (H policies, 10 episodes each) whose
episodes all last 1000 steps, so an upper bound, and their share of all core-seconds of a run that evaluates every
eval_frequency steps. Then, in the first environment, rounds of training steps alone and with an evaluation beside them:
what the evaluation takes from training, in core-seconds, over the processor time that its workers used. 1.00 is an
evaluation that costs exactly its own work. The untrained policy must not fall in that environment (Ant-v4 stands). All on
the CPU; a training step is `Learner.update`, without acting and simulator.
"""

import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from measure import STEP, Sizes, about, make_learner, table, time_block, words

import torch  # isort: skip (measure sets OpenMP up before)
import tyro  # isort: skip


@dataclass
class Options:
    script: str = "rac_sac"  # the script to measure
    env_ids: tuple[str, ...] = ("Ant-v4", "Humanoid-v4", "Walker2d-v4", "Hopper-v4")  # MuJoCo's, that can be told not to end
    rounds: int = 5  # rounds of training alone and with an evaluation beside it
    policies: int = 2  # policies of the evaluation beside training (of scripts that have several)


def core_seconds(module, env_id: str, rounds: int) -> tuple[float, float]:
    """Of one policy's 10 episodes of 1000 steps each; and the part of it that MuJoCo itself takes."""
    import mujoco

    args = module.check_args(module.Args(env_id=env_id))
    envs = [module.FlatEnv(env_id, terminate_when_unhealthy=False) for _ in range(args.eval_episodes)]
    actor = module.make_network("actor", args, envs[0].obs_dim, envs[0].action_dim)
    whole, physics, original = [], [], mujoco.mj_step

    def clocked(*arguments, **options):
        start = time.perf_counter()
        original(*arguments, **options)
        physics[-1] += time.perf_counter() - start

    mujoco.mj_step = clocked
    for _ in range(rounds):
        physics.append(0.0)
        start = time.process_time()
        module.play_returns(envs, actor, module.eval_conditions(args)[0], range(args.eval_episodes))
        whole.append(time.process_time() - start)
    mujoco.mj_step = original
    return statistics.median(whole), statistics.median(physics)


def workers_seconds() -> float:
    """Processor time that the child processes have used."""
    stats = [Path(f"/proc/{child.pid}/stat").read_text() for child in multiprocessing.active_children()]
    ticks = [int(field) for stat in stats for field in stat.rsplit(")", 1)[1].split()[11:13]]  # user and system time
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def beside_training(options: Options) -> None:
    """Print the cost of an evaluation to the training beside it, over its workers' processor time."""
    module, _, learner = make_learner(options.script, Sizes(options.env_ids[0], cuda=False))
    time_block(learner, 1)
    args, cores, ratios, actor = learner.args, torch.get_num_threads(), [], learner.copy_of("actor")
    if hasattr(args, "num_eval_policies"):
        args.num_eval_policies = options.policies
    with module.Evaluator(args, list(range(args.eval_episodes))) as evaluator:
        for repeat in range(options.rounds + 1):
            learner.actor.load_state_dict(actor)  # the untrained policy, which does not fall
            before, used = time_block(learner, 20), workers_seconds()
            evaluator.pending.append([STEP, 0.0, [0.0] * len(module.eval_conditions(args)), actor, None])
            start, steps = time.perf_counter(), 0
            while not list(evaluator.poll()):
                learner.update(STEP)
                steps += 1
            wall, used = time.perf_counter() - start, workers_seconds() - used
            alone = (before + time_block(learner, 20)) / 2
            if repeat:  # in the first round the workers start
                taken = (wall - steps * alone) * cores
                ratios.append(taken / used)
                print(f"alone {1e3 * alone:.0f} ms per step, beside the evaluation {1e3 * wall / steps:.0f} ms; it used "
                      f"{used:.1f} core-s and took {taken:.1f} from training: ratio {ratios[-1]:.2f}", flush=True)  # fmt: skip
    print(f"median ratio {statistics.median(ratios):.2f} ({cores} cores, {args.eval_workers} evaluation workers)")


def main() -> None:
    options, rows = tyro.cli(Options, description=__doc__), []
    print(words(about(torch.device("cpu"))) + "\n", flush=True)
    for env_id in options.env_ids:
        module, _, learner = make_learner(options.script, Sizes(env_id, cuda=False))
        args, cores = learner.args, torch.get_num_threads()
        time_block(learner, 1)
        step = statistics.median(time_block(learner, 5) for _ in range(5))
        torch.set_num_threads(1)
        one, physics = core_seconds(module, env_id, options.rounds)
        torch.set_num_threads(cores)
        evaluation = one * len(module.eval_conditions(args))
        share = evaluation / (evaluation + args.eval_frequency * step * cores)
        rows.append((env_id, 1e6 * one / 1000 / args.eval_episodes, f"{100 * physics / one:.0f} %", evaluation, 1e3 * step,
                     f"{100 * share:.1f} %"))  # fmt: skip
    header = ("environment", "us per simulated step", "MuJoCo's part", "core-s per evaluation", "ms per training step",
              "evaluation's share of a run")  # fmt: skip
    print(table(header, rows) + "\n", flush=True)
    beside_training(options)


if __name__ == "__main__":
    main()
