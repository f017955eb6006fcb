"""It learns: from the command line to an evaluated return."""

import pytest
from conftest import every_script, read_rows, wait_until


@pytest.mark.slow
@every_script
def test_inverted_pendulum(cli):
    """Balanced for the whole episode, however many of the steps it takes, which the seed decides."""
    arguments = """--env-id InvertedPendulum-v4 --run-name run --total-timesteps 6000 --learning-starts 1000 --batch-size 128
    --hidden-dim 64 --num-critics 5 --utd 10 --policy-lr 1e-3 --q-lr 1e-3 --q-lr-init 1e-3 --eval-frequency 500
    --eval-episodes 5""".split()
    arguments += cli.policies(4)
    if hasattr(cli.script.Args, "alpha_lr"):
        arguments += ["--alpha-lr", "1e-3", "--initial-log-alpha", "-2"]
    process = cli.start(*arguments)
    path = cli.folder / "runs/run/eval.csv"

    def returns() -> list[float]:
        """All best returns; a row that is being written has its first columns already."""
        return [float(row["eval/best_return"] or 0) for row in read_rows(path)] if path.exists() else []

    wait_until(lambda: process.poll() is not None or max(returns(), default=0) >= 950, 900)
    process.terminate()
    _, err = process.communicate(timeout=100)
    assert returns()[0] < 200, err  # the untrained policy falls
    assert max(returns()) >= 950, err
