"""The measurements of benchmark/speed/ run from the command line and say what they measured."""

import csv
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, SCRIPTS, environment, handlers_of_signals, wait_until

import rac_sac

SIZES = "--env-id Hopper-v4 --hidden-dim 8 --num-critics 2 --batch-size 8 --utd 2 --repeats 1".split()


def run(program, *arguments, folder, code=0):
    command = [sys.executable, str(ROOT / "benchmark/speed" / program), *arguments]
    result = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500)
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


def results(path, name):
    """The JSON file, after a look at the CSV file beside it: the same rows, each with the machine."""
    result = json.loads((path / f"{name}.json").read_text())
    with open(path / f"{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result["rows"]) and not list(path.glob("*.tmp"))
    for row, wanted in zip(rows, result["rows"], strict=True):
        assert result["machine"].items() <= row.items() and {"commit", "torch", "processor", "time"} <= row.keys()
        assert all(str(wanted[key]) == value for key, value in row.items() if key in wanted)
    return result


@pytest.mark.slow
def test_throughput_of_all_scripts(tmp_path):
    flags = ("--modes", "eager", "--matmul-precision", "auto", "highest", "--loop-steps", "20")
    out = run("throughput.py", *SIZES, *flags, "--scripts", *SCRIPTS, "--out", "out", folder=tmp_path)
    result = results(tmp_path / "out", "throughput")
    programs = [(row["script"], row["matmul_precision"]) for row in result["rows"]]
    assert programs == list(itertools.product(SCRIPTS, ("auto", "highest"))) and "matrix floor" in out
    for row in result["rows"]:
        parts = row["parts_seconds"]
        assert f"{row['script']} eager {row['matmul_precision']}" in out
        assert row["over_floor"] > 1 and len(row["update_seconds"]) == len(row["loop_seconds"]) == 1
        assert row["precision_used"] == "highest" or row["matmul_precision"] == "auto"
        assert row["update_ms"] == pytest.approx(1e3 * row["update_seconds"][0]) and row["loop_ms"] > 0
        assert all(seconds > 0 for seconds in parts.values()) and parts["updates"] > parts["storing"]
    # 2 * batch * (utd * (4 * critic - first layer + actor) + actor update + fresh actions), by hand for Hopper and RAC-SAC
    critic, actor = 2 * (15 * 8 + 8 * 8 + 8), 12 * 8 + 8 * 8 + 2 * 8 * 3
    flop = 2 * 8 * (2 * (4 * critic - 2 * 15 * 8 + actor) + 2 * critic + 3 * actor - 12 * 8 + actor)
    first = result["rows"][0]
    assert first["update_seconds"][0] / first["over_floor"] * result["matrix_flop_per_second"][0] == pytest.approx(flop)


@pytest.fixture
def throughput(monkeypatch):
    """throughput.py as a module, whose main() takes the arguments given to it; the floor costs no time."""
    monkeypatch.syspath_prepend(ROOT / "benchmark/speed")
    import throughput

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["throughput.py", *SIZES, *arguments])
        with handlers_of_signals():
            throughput.main()

    monkeypatch.setattr(throughput, "matrix_rate", lambda device: 1e9)
    return SimpleNamespace(module=throughput, main=main)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--scripts", "rac_sad"), "there is no script rac_sad.py"),
        (("--cuda", "True"), "no CUDA device"),
        (("--modes", "compile+graph"), "graphs need a GPU"),
    ],
)
def test_throughput_refuses_what_is_not_there(throughput, monkeypatch, capsys, flags, sentence):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        throughput.main(*flags)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1


@pytest.mark.slow
def test_throughput_compiled(tmp_path):
    """Eager and compiled in one process, at each precision: nothing is compiled too often."""
    flags = "--modes eager compile --matmul-precision auto highest high medium --loop-steps 0 --out out".split()
    run("throughput.py", *SIZES, *flags, folder=tmp_path)
    rows = results(tmp_path / "out", "throughput")["rows"]
    assert len(rows) == 8 and all(row["loop_ms"] == "" and row["update_ms"] > 0 for row in rows)


@pytest.mark.slow
def test_evaluation_cost(tmp_path):
    out = run("evaluation_cost.py", "--env-ids", "Hopper-v4", "--rounds", "1", folder=tmp_path)
    assert "core-s per evaluation" in out and float(out.splitlines()[-1].split()[-2]) > 0  # the share, in percent


# ------------------------------------------------------------------------------------------------- a machine with a GPU
TRAIN = (
    "--no-compile --learning-starts 200 --q-lr-warmup-end 300 --batch-size 32 --hidden-dim 8 "
    " --utd 1 --num-critics 3 --buffer-size 500 --eval-frequency 100 --eval-episodes 2"
).split()


@pytest.fixture
def gpu(tmp_path):
    """gpu.py in an empty folder: gpu(command, *arguments) -> what it leaves to be sent back."""

    def call(command, *arguments, code=0):
        out = run("../gpu.py", command, "--out", "out", *arguments, folder=tmp_path, code=code)
        if code == 2:
            return out
        if code == 0:
            assert out.splitlines()[-1] == f"to send back: out/{command}.json"
        return json.loads((tmp_path / f"out/{command}.json").read_text())

    return call


@pytest.mark.slow
def test_check_of_a_gpu(gpu):
    result = gpu("check", "--", "tests/test_project.py", "-n", "0", "-k", "readme")
    rows = result["rows"]
    assert len(rows) == 2
    assert {row["outcome"] for row in rows} == {"passed"}
    assert {"commit", "torch", "processor", "time"} <= result["machine"].keys()
    assert "2 passed" in result["files"]["out/check-others.log"]
    error = gpu("check", "--", "tests/no_such_file.py", "-n", "0", code=2)
    assert "no test was run; out/check-gpu.log says why" in error


@pytest.mark.slow
def test_speed_of_a_gpu(gpu):
    """On the CPU: what was measured before the time was up is kept."""
    result = gpu("speed", "--env-ids", "Hopper-v4", "--", *SIZES[2:], "--modes", "eager", "--loop-steps", "0")
    assert [(row["env_id"], row["mode"], row["matmul_precision"]) for row in result["rows"]] == [
        ("Hopper-v4", "eager", "auto"),
        ("Hopper-v4", "eager", "medium"),
    ]


@pytest.mark.slow
def test_training_on_a_gpu(gpu, tmp_path):
    """On the CPU: runs side by side, with which the same command goes on."""
    train = ("train", "--env-ids", "Hopper-v4", "--seeds", "2", "--total-timesteps", "500")
    gpu(*train, "--minutes", "0.002", "--", *TRAIN)  # nothing comes of it but run directories, at most
    result = gpu(*train, "--", *TRAIN)
    rows = result["rows"]
    assert [(row["exit_code"], row["global_step"], row["evaluated_step"]) for row in rows] == 2 * [(0, 500, "500")]
    assert [(row["run"].split("+")[0], row["run"][-3:]) for row in rows] == [("Hopper-v4__rac_sac", f"__{s}") for s in (1, 2)]
    assert "+utd_1" in rows[0]["run"]  # settings tell runs apart
    assert "total_timesteps" not in rows[0]["run"]  # more steps do not
    assert all(row["steps_per_second"] > 0 and float(row["best_return"]) for row in rows)
    for row in rows:
        assert result["files"][str(tmp_path / "runs" / row["run"] / "eval.csv")].count("\n") == 5
    config = json.loads((tmp_path / "runs" / rows[0]["run"] / "config.json").read_text())
    assert rows[0]["run"] == f"Hopper-v4__{config['args']['exp_name']}__1"  # as run.py calls it, which may go on with it
    gpu("train", "--seeds", "1", "--run-root", "other", "--", "--utd", "0", code=1)
    assert "utd is 0; it must be greater than 0" in (tmp_path / "other/Ant-v4__rac_sac+utd_0__1.log").read_text()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("train", "--seeds", "1", "--", "--seed", "4"), "seed after -- is not accepted, because each run has its own"),
        (("train", "--seeds", "1", "--", "stray"), "'stray' after -- belongs to no argument"),
        (("train", "--", "--eval-workers", "3"), "eval_workers after -- is not accepted"),
        (("train", "--total-timesteps", "0"), "total_timesteps is 0; it must be at least 1"),
        (("train", "--env-ids", "Hoper-v4"), "there is no environment 'Hoper-v4'"),
        (("train", "--scripts", "rac_sad"), "there is no script rac_sad.py"),
        (("check", "--minutes", "nan"), "minutes must be above 0"),
    ],
)
def test_gpu_refuses(monkeypatch, capsys, tmp_path, arguments, sentence):
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import gpu

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu.py", arguments[0], "--out", "out", *arguments[1:]])
    with handlers_of_signals(), pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert list(tmp_path.iterdir()) == []


def test_time_limits_are_real(monkeypatch, tmp_path):
    """What does not end by itself on a signal is killed, with all that it has started."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import gpu

    stubborn = "trap '' TERM; echo began; sleep 100 & wait; sleep 100"
    start = time.monotonic()
    codes = gpu.run_all([["bash", "-c", stubborn], ["true"]], [tmp_path / "one", tmp_path / "other"], start + 5)
    assert codes == [-signal.SIGKILL, 0]
    assert time.monotonic() - start < 15
    assert (tmp_path / "one").read_text() == "began\n"


def test_nothing_is_left_behind(monkeypatch, tmp_path):
    """A process that its leader has started and left is ended too."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import gpu

    leaves = "sleep 100 & echo $!"
    assert gpu.run_all([["bash", "-c", leaves]], [tmp_path / "log"], time.monotonic() + 60) == [0]
    left = Path("/proc", (tmp_path / "log").read_text().strip(), "stat")
    wait_until(lambda: not left.exists() or ") Z " in left.read_text(), 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_stops_all_of_it(tmp_path, number):
    """Also where SIGINT is ignored, as in the background of a shell: what there is is written, and nothing more is begun.

    Not where SIGHUP is ignored, as by nohup.
    """
    began = tmp_path / "began"
    test = f"import time\n\ndef test_waits():\n    open({str(began)!r}, 'w')\n    time.sleep(100)\n"
    (tmp_path / "test_waits.py").write_text(test)
    command = [sys.executable, str(ROOT / "benchmark/gpu.py"), "check", "--out", "out", "--", "--rootdir", str(tmp_path)]
    command += [str(tmp_path / "test_waits.py"), "-n", "0", "-m", "not cuda", "-p", "no:cacheprovider"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    before = signal.SIG_DFL if number == signal.SIGHUP else signal.SIG_IGN
    ignore = f"import os, signal; signal.signal({number}, signal.{before.name}); os.execv({command[0]!r}, {command!r})"
    process = subprocess.Popen([sys.executable, "-c", ignore], cwd=tmp_path, env=environment(), **pipes)
    wait_until(lambda: began.exists() or process.poll() is not None)
    process.send_signal(number)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + number, out
    assert out.splitlines()[-1] == "to send back: out/check.json"
    result = json.loads((tmp_path / "out/check.json").read_text())
    assert list(result["files"]) == ["out/check-gpu.log"]


def test_what_an_earlier_call_has_left_is_renamed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import gpu

    (tmp_path / "speed.json").write_text("first")
    gpu.put_aside(tmp_path / "speed.json")
    gpu.put_aside(tmp_path / "train.json")  # which is not there
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("speed-of-20")
    assert left.read_text() == "first"


def test_speed_of_a_run_is_that_of_learning(monkeypatch, tmp_path):
    """The median, without rows of before, of random steps, and that in which the updates were compiled."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import gpu

    speeds = {100: 900, 300: 8, 400: 2, 500: 10, 600: 30, 700: 20}
    rows = [f"{step},{speed}" for step, speed in speeds.items()]
    (tmp_path / "train.csv").write_text("\n".join(["global_step,charts/SPS", *rows, ""]))
    job = gpu.Job("run", str(tmp_path), "", [], {"learning_starts": "200"}, 1, 1)
    assert gpu.learning_speed(job, begun_at=0) == 15
    assert gpu.learning_speed(job, begun_at=500) == 20
    assert gpu.learning_speed(job, begun_at=700) == 0


def test_an_interrupted_measurement_is_reported(throughput, monkeypatch, tmp_path, capsys):
    """Of the rounds that were measured whole; without one nothing is."""

    def interrupted(learner, steps, time_block=throughput.module.time_block):
        calls.append(steps)
        if len(calls) > most:
            throughput.module.interrupt(signal.SIGTERM, None)
        return time_block(learner, steps)

    monkeypatch.setattr(throughput.module, "time_block", interrupted)
    arguments = ["--repeats", "3", "--loop-steps", "0", "--modes", "eager", "--out", str(tmp_path)]
    calls, most = [], 4  # the first update, two more for the size of a block, burn-in, and one round
    throughput.main(*arguments)
    (row,) = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    assert len(row["update_seconds"]) == 1
    assert "stopped after 1 of 3 blocks" in capsys.readouterr().out
    calls, most = [], 3
    with pytest.raises(SystemExit) as ended:
        throughput.main(*arguments)
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_mode_that_does_not_work_is_left_out(throughput, monkeypatch, tmp_path):
    """Its reason stands in throughput.json; any other error is shown."""

    def make_learner(script, options, mode, precision, make=throughput.module.make_learner):
        if mode == "compile":
            raise failure
        return make(script, options, mode, precision)

    monkeypatch.setattr(throughput.module, "make_learner", make_learner)
    arguments = ["--loop-steps", "0", "--modes", "compile", "eager", "--out", str(tmp_path)]
    failure = rac_sac.DoesNotWork("compile", RuntimeError("no compiler"))
    throughput.main(*arguments)
    result = json.loads((tmp_path / "throughput.json").read_text())
    assert [row["mode"] for row in result["rows"]] == ["eager"]
    (left_out,) = result["left_out"]
    assert (left_out["mode"], left_out["reason"]) == ("compile", str(failure))
    failure = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        throughput.main(*arguments)


def test_cost_is_capped_by_evaluation():
    """Two cores evaluate 39 steps of Ant-v4 a second, whatever the GPU's rate. Baselines are not counted on a GPU."""

    def hours(*arguments, name="variants", column=5):
        command = [sys.executable, str(ROOT / "benchmark/speed/cost.py"), *arguments]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (row,) = [line for line in out.splitlines() if line.startswith(f"| `{name}`")]
        return int(row.split("|")[column].replace(",", ""))

    learned = 3 * 295_000 + 995_000
    assert hours("--seeds", "1", "--gpu-steps-per-second", "100") == round(3 * learned / 100 / 3600)
    assert hours("--seeds", "1", "--gpu-steps-per-second", "100", name="main") == round(5 * learned / 100 / 3600)
    # Three families and two single policies, and the value bias of all five
    evaluated = 995 * 85.7 + 295 * (51.3 + 36.9 + 26.0)
    bias = 60 * (995_000 * 714e-6 + 295_000 * (427.6e-6 + 307.4e-6 + 217e-6))
    beside = (3 * evaluated + 2 * evaluated / 12 + 5 * bias) / 3600
    assert hours("--seeds", "1", name="main", column=6) == round(beside)
    capped = hours("--seeds", "1", "--eval-cores", "2", "--gpu-steps-per-second", "1000")
    families = 2 * (995_000 / 23.337 + 295_000 / 38.986 + 295_000 * 36.9e-3 / 2 + 295_000 * 26e-3 / 2)
    assert capped > families / 3600  # bias is evaluated too, and Vanilla RAC has one policy
