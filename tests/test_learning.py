"""It learns: from the command line to an evaluated return, on a real MuJoCo environment."""

import csv

from conftest import every_script


@every_script
def test_inverted_pendulum(cli):
    arguments = """
    --env-id InvertedPendulum-v4 --run-name run --total-timesteps 3000 --learning-starts 500 --batch-size 128
    --hidden-dim 64 --num-critics 5 --utd 10 --policy-lr 1e-3 --q-lr 1e-3 --q-lr-init 1e-3
    --eval-frequency 500 --eval-episodes 5""".split()
    arguments += [] if cli.name == "vanilla_rac" else ["--num-eval-policies", "4"]
    arguments += [] if cli.name == "rac_td3" else ["--alpha-lr", "1e-3"]
    cli.run(*arguments)
    with open(cli.folder / "runs/run/eval.csv") as file:
        returns = [float(row["best_return"]) for row in csv.DictReader(file)]
    assert returns[0] < 200  # the untrained policy falls
    assert max(returns) >= 950
