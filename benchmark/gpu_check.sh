#!/usr/bin/env bash
# What only a machine with a GPU can tell, in one log to send back: its tests, runs, its speed. At most ten minutes.
#
#     bash benchmark/gpu_check.sh [PYTHON]
#
# PYTHON has requirements.txt and pandas. The log lies in the folder $OUT, by default the repository's. The most telling come first;
# a command that hangs is ended after 150 seconds.
SECONDS=0 # bash counts them
out=${OUT:-$(dirname "$0")/..}
mkdir -p "$out" || exit
log=$(realpath "$out")/gpu_check-$(date +%Y-%m-%d-%H-%M-%S).log
cd "$(dirname "$0")/.." || exit
folder=$(mktemp -d)
export python=${1:-python} folder PYTHONUNBUFFERED=1 TORCHINDUCTOR_COMPILE_THREADS=4
trap 'rm -rf "$folder"' EXIT

check() { # COMMAND...: its output in one piece, under a line that says how it ended
    local output code ended start=$SECONDS limit=$((570 - SECONDS))
    if ((limit <= 20)); then
        echo "== left out, for there is no time: $*"
        return
    fi
    if ((limit > 150)); then limit=150; fi
    output=$(mktemp -p "$folder" XXXXXX.txt)
    timeout --kill-after 10 $limit "$@" >"$output" 2>&1 &
    trap "kill $! 2>/dev/null" TERM
    wait $!
    code=$?
    ended=passed
    if ((code)); then ended="failed, exit code $code,"; fi
    # The lock, for which any file serves, lets those that run beside each other write one after the other.
    flock "$folder" cat <(printf '\n== %s after %s s: %s\n' "$ended" $((SECONDS - start)) "$*") "$output"
}
beside() { # the same in the background, once fewer than about half as many as there are cores run there
    while (($(jobs -rp | wc -l) > $(nproc) / 2)); do wait -n; done
    check "$@" &
}
killed() { # SIGKILL in the middle of a run, which then goes on; its rows beside those of a run that is left alone
    local whole cut
    local flags=(--cuda True --env-id Hopper-v4 --total-timesteps 3000 --learning-starts 1000 --eval-frequency 1000
        --checkpoint-seconds 1 --eval-workers 2 --run-root "$folder")
    "$python" rac_sac.py "${flags[@]}" --run-name whole &
    whole=$!
    "$python" rac_sac.py "${flags[@]}" --run-name cut &
    cut=$!
    until awk -F, '$1 > 2000 && NR > 1 { found = 1 } END { exit !found }' "$folder/cut/train.csv" 2>/dev/null; do # a step after 2000
        kill -0 $cut || exit # it has ended by itself
        sleep 0.1
    done
    kill -9 $cut && echo "killed after $(tail -n 1 "$folder/cut/train.csv" | cut -d, -f1-3)"
    "$python" rac_sac.py --resume "$folder/cut" && wait $whole || exit
    compare train.csv 4
    compare eval.csv 3
    true # also where they differ: on a GPU the last bits may
}
compare() { # FILE COLUMN: the steps and what stands from this column on, behind the columns of times
    cmp <(cut -d, -f "1,$2-" "$folder/whole/$1") <(cut -d, -f "1,$2-" "$folder/cut/$1") && echo "$1: as if it had not been killed"
}
export -f killed compare # for the bash that runs killed below

{
    trap 'kill $(jobs -rp) 2>/dev/null; exit 130' INT TERM
    beside nvidia-smi
    beside "$python" -m torch.utils.collect_env
    for tested in rac_sac rac_td3 vanilla_rac rac_itm fails; do # apart, for a capture that fails spoils later ones of its process
        beside "$python" -m pytest -v -n 0 -m cuda -r fEs -k $tested tests/test_cuda.py
    done
    beside bash -c killed
    wait
    check "$python" rac_sac.py --cuda True --env-id Hopper-v4 --total-timesteps 10000 --eval-frequency 2500 --run-root "$folder" --run-name run
    check tail -n 4 "$folder"/run/eval.csv "$folder"/run/train.csv
    speed=("$python" benchmark/speed.py --cuda True --repeats 3 --block-seconds 0.5)
    for env in Hopper Ant; do
        check "${speed[@]}" --env-id $env-v4 --loop-steps 300 --modes compile+graph --matmul-precision auto high
    done
    check "${speed[@]}" --env-id Ant-v4 --loop-steps 300 --network simba --utd 5 --num-critics 5
    # compile last: what it compiled would be compiled again after another
    check "${speed[@]}" --env-id Hopper-v4 --loop-steps 30 --modes compile+graph graph eager compile
} 2>&1 | tee "$log"
echo "to send back: $log ($(grep -c '^== failed' "$log") commands failed, $(grep -c 'do not work here, and' "$log") lines tell of what does not work)"
[ -s "$log" ] && ! grep -q '^== failed' "$log"
