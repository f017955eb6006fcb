#!/usr/bin/env bash
# A template: starts Ray on all nodes of a SLURM allocation, runs an experiment on it, stops Ray. From the project's folder:
#     sbatch benchmark/slurm.sh --experiment main --seeds 8
# The folder, the Python environment and the runs must be on storage that all nodes share. Five minutes before the time limit
# run.py is told to stop, and every run writes its checkpoint; submit the same line again to go on.
#SBATCH --job-name=rac
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
set -uo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$head" | awk 'NR == 1 { print $1 }'):6379
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
ray get-auth-token --generate > /dev/null # the nodes recognise each other by this token in the home folder, which they share
# Ray's symmetric-run, on every node, starts Ray there; on the first node, where this script runs too, it then runs the command
# after -- and stops Ray on all nodes when that has ended. The command here is none but two files: `ready` says that Ray runs,
# and it waits for `end`. run.py itself runs outside, in this shell, which gets SLURM's signal.
# SIGTERM ends symmetric-run before it has stopped Ray, and not every SLURM finds Ray's processes: hence `ray stop`.
state=$(mktemp -d)
trap 'rm -r "$state"' EXIT
on_every_node='trap "ray stop" TERM; ray symmetric-run "$@"'
on_the_first='touch "$1/ready"; until [ -e "$1/end" ]; do sleep 1; done'
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c "$on_every_node" bash \
    --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus "$SLURM_CPUS_PER_TASK" \
    --num-gpus "${SLURM_GPUS_ON_NODE:-0}" -- bash -c "$on_the_first" bash "$state" &
cluster=$!
until [ -e "$state/ready" ]; do
    kill -0 $cluster 2> /dev/null || exit 1
    sleep 2
done
python benchmark/run.py --address "$address" --run-root "${RUN_ROOT:-runs}" --gpus-per-run "${GPUS_PER_RUN:-0.25}" \
    --cpus-per-run "${CPUS_PER_RUN:-4}" "$@" &
driver=$!
trap 'kill -TERM $driver' TERM
wait $driver
code=$?
if kill -0 $driver 2> /dev/null; then # the signal has only ended the wait
    wait $driver
    code=$?
fi
touch "$state/end"
wait $cluster
exit $code
