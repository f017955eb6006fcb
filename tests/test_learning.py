"""It learns: from the command line to an evaluated return, on a real MuJoCo environment."""

import csv
import time

from conftest import every_script


@every_script
def test_inverted_pendulum(cli):
    """Balanced for the whole episode, however many of the steps it takes, which the seed decides."""
    arguments = """
    --env-id InvertedPendulum-v4 --run-name run --total-timesteps 6000 --learning-starts 1000 --batch-size 128
    --hidden-dim 64 --num-critics 5 --utd 10 --policy-lr 1e-3 --q-lr 1e-3 --q-lr-init 1e-3
    --eval-frequency 500 --eval-episodes 5""".split()
    arguments += [] if cli.name == "vanilla_rac" else ["--num-eval-policies", "4"]
    arguments += [] if cli.name == "rac_td3" else ["--alpha-lr", "1e-3", "--initial-log-alpha", "-2"]
    process, path, returns = cli.start(*arguments), cli.folder / "runs/run/eval.csv", []
    while process.poll() is None and max(returns, default=0) < 950:
        time.sleep(0.5)
        if path.exists():
            with open(path) as file:
                returns = [float(row["best_return"]) for row in csv.DictReader(file) if row["bias_std"] is not None]
    process.terminate()
    _, err = process.communicate(timeout=100)
    assert len(returns) > 1 and returns[0] < 200, err  # the untrained policy falls
    assert max(returns) >= 950, (returns, err)
