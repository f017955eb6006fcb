"""It learns: from the command line to an evaluated return, on a real MuJoCo environment."""

import csv


def test_inverted_pendulum(cli):
    arguments = """
    --env-id InvertedPendulum-v4 --run-name run --no-compile --total-timesteps 5000 --learning-starts 500
    --q-lr-warmup-end 1000 --batch-size 128 --hidden-dim 64 --num-critics 5 --utd 5 --eval-frequency 500
    --num-eval-policies 4 --eval-episodes 5""".split()
    cli.run(*arguments)
    with open(cli.folder / "runs/run/eval.csv") as file:
        returns = [float(row["best_return"]) for row in csv.DictReader(file)]
    assert returns[0] < 200  # the untrained policy falls
    assert max(returns) >= 950
