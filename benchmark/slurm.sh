#!/usr/bin/env bash
# A template: starts Ray on all nodes of a SLURM allocation, runs an experiment on it, stops Ray. From the project's folder:
#     sbatch benchmark/slurm.sh --experiment main --seeds 8
# The folder, the Python environment and --run-root must be on storage that all nodes share. Five minutes before the time limit
# run.py is told to stop, and every run writes its checkpoint; submit the same line again to go on.
#SBATCH --job-name=rac
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
set -euo pipefail
RUN_ROOT=${RUN_ROOT:-$PWD/runs}
GPUS_PER_RUN=${GPUS_PER_RUN:-0.25}
CPUS_PER_RUN=${CPUS_PER_RUN:-4}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$head" | awk 'NR == 1 { print $1 }'):6379
export RAY_USAGE_STATS_ENABLED=0
ray get-auth-token --generate > /dev/null # the nodes recognise each other by this token in the home folder, which they share
# The driver runs on the first node, as does this script; nothing else may get the signal, or Ray would end before the runs.
trap 'pkill -TERM -u "$USER" -f "^python benchmark/run.py" || true' TERM
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" -- \
    python benchmark/run.py --address auto --run-root "$RUN_ROOT" --gpus-per-run "$GPUS_PER_RUN" \
    --cpus-per-run "$CPUS_PER_RUN" "$@" &
wait $! || wait $! # once more when the signal ended the first wait
