"""It learns: from the command line to an evaluated return, on a real MuJoCo environment."""

import csv

import pytest
from conftest import every_script, wait_until


def returns_of(path) -> list[float]:
    """Best returns of all evaluations in an eval.csv that may end in the middle of a row."""
    if not path.exists():
        return []
    with open(path) as file:
        return [float(row["eval/best_return"]) for row in csv.DictReader(file) if None not in row.values()]


@pytest.mark.slow
@every_script
def test_inverted_pendulum(cli):
    """Balanced for the whole episode, however many of the steps it takes, which the seed decides."""
    arguments = """
    --env-id InvertedPendulum-v4 --run-name run --total-timesteps 6000 --learning-starts 1000 --batch-size 128
    --hidden-dim 64 --num-critics 5 --utd 10 --policy-lr 1e-3 --q-lr 1e-3 --q-lr-init 1e-3
    --eval-frequency 500 --eval-episodes 5""".split()
    arguments += [] if cli.name == "vanilla_rac" else ["--num-eval-policies", "4"]
    arguments += [] if cli.name == "rac_td3" else ["--alpha-lr", "1e-3", "--initial-log-alpha", "-2"]
    path = cli.run_dir / "eval.csv"
    process = cli.start(*arguments)
    wait_until(lambda: process.poll() is not None or max(returns_of(path), default=0) >= 950, 900)
    process.terminate()
    _, err = process.communicate(timeout=100)
    returns = returns_of(path)
    assert len(returns) > 1, err
    assert returns[0] < 200, err  # the untrained policy falls
    assert max(returns) >= 950, (returns, err)
