#!/usr/bin/env bash
# What only a machine with a GPU can tell, in one log to send back: its tests, its speed, a short run. About 20 minutes.
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
    for precision in auto high; do # float32, TF32
        check "$python" rac_sac.py --cuda True --env-id Hopper-v4 --total-timesteps 20000 --eval-frequency 5000 \
            --matmul-precision $precision --run-root "$folder" --run-name $precision
    done
    check tail -n 4 "$folder"/{auto,high}/{eval,train}.csv
    check "$python" - "$folder" <<'END'
import sys, pandas as pd  # qf_std of both, by 2,000 steps

rows = {name: pd.read_csv(f"{sys.argv[1]}/{name}/train.csv").set_index("global_step") for name in ("auto", "high")}
print(pd.DataFrame({name: table["losses/qf_std"].groupby(table.index // 2000 * 2000).mean() for name, table in rows.items()}))
END
    check "$python" benchmark/speed.py --cuda True --loop-steps 500 --env-id Walker2d-v4 --matmul-precision auto high
    # Options of the compiler, in a copy of the project; kernels a step by Inductor's code: 511 without, 420, 399, 350
    copy=$folder/copy
    mkdir "$copy"
    cp -r ./*.py pyproject.toml tests "$copy"
    combo='"combo_kernels": True, "combo_kernels_autotune": 0' # which would choose by timing
    for options in '"split_reductions": False' "$combo" "$combo, \"split_reductions\": False" '"triton.enable_pdl": True'; do
        sed "s/\"cuda\": {/&$options, /" rac_sac.py >"$copy/rac_sac.py"
        check grep "$options" "$copy/rac_sac.py"
        check "$python" -m pytest -n 0 -m cuda "$copy/tests/test_cuda.py" -k "are_eager and compile+cudagraphs and rac_sac"
        check "$python" benchmark/speed.py --cuda True --repeats 3 --env-id Hopper-v4 --scripts rac_sac "$copy/rac_sac.py"
    done
    rm -r "$folder"
    exit $failed
} 2>&1 | tee "$log"
failed=${PIPESTATUS[0]}
echo "to send back: $PWD/$log ($(grep -c '^== failed' "$log") commands failed)"
exit "$failed"
