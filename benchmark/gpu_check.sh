#!/usr/bin/env bash
# What only a machine with a GPU can tell, in one log to send back: its tests, its speed, a short run. About 10 minutes.
#
#     bash benchmark/gpu_check.sh [PYTHON]
#
# PYTHON has requirements.txt and pandas. Every command takes at most ten minutes; the most telling come first.
cd "$(dirname "$0")/.." || exit 1
python=${1:-python}
log=gpu_check-$(date +%Y-%m-%d-%H-%M-%S).log
folder=$(mktemp -d)
failed=0
check() {
    echo "== $*"
    timeout --kill-after 30 570 "$@" || { echo "== failed, exit code $?: $*" && failed=1; }
}
{
    check nvidia-smi
    check "$python" -m torch.utils.collect_env
    check "$python" -m pytest -n 0 -m cuda -r fEs
    check "$python" benchmark/speed.py --cuda True --loop-steps 50 --modes compile+graph compile graph eager
    check "$python" rac_sac.py --cuda True --env-id Hopper-v4 --total-timesteps 20000 --eval-frequency 5000 --run-root "$folder"
    check tail -n 4 "$folder"/*/eval.csv "$folder"/*/train.csv
    check "$python" benchmark/speed.py --cuda True --loop-steps 500 --env-id Walker2d-v4 --matmul-precision auto high
    rm -r "$folder"
    exit $failed
} 2>&1 | tee "$log"
failed=${PIPESTATUS[0]}
echo "to send back: $PWD/$log ($(grep -c '^== failed' "$log") commands failed)"
exit "$failed"
