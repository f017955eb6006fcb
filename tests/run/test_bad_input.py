"""A mistake is answered by one clear sentence and exit code 2, and nothing is written or lost."""

import os
import re
import shutil
import zipfile

import pytest
import torch
from conftest import ROOT, checkpoint_of, every_script, files_in, sentence_of

WRONG = [
    (["--env-id", "Hoper-v4"], r"'Hoper-v4'.*Hopper"),
    (["--env-id", "Ant-v9"], r"'Ant-v9'.*v5"),
    (["--env-id", "no_such_module:Ant-v5"], r"No module named .no_such_module.*PYTHONPATH"),
    (["--utd", "0"], r"utd is 0; .*greater than 0"),
    (["--num-critics", "1"], r"num_critics is 1; .*2"),
    (["--gamma", "1.5"], r"gamma is 1.5; .*1"),
    (["--tau", "nan"], r"tau is nan; .*finite"),
    (["--seed", "-1"], r"seed is -1; .*0"),
    (["--beta-min", "0"], r"beta_min is 0.0; "),
    (["--beta-min", "0.5"], r"beta_min is 0.5; .*explore_beta_max, 0.3"),
    (["--explore-beta-max", "0.9"], r"explore_beta_max is 0.9; .*train_beta_max, 0.8"),
    (["--buffer-size", "150"], r"buffer_size is 150; .*200"),
    (["--batch-size", "1000"], r"buffer_size is 500; .*1000"),
    (["--total-timesteps", "150"], r"total_timesteps is 150; .*200"),
    (["--q-lr-warmup-end", "100"], r"q_lr_warmup_end is 100; .*learning_starts, 200"),
    (["--snapshot-frequency", "150"], r"snapshot_frequency is 150; .*eval_frequency, 100"),
    (["--run-root", "/dev/null/runs"], r"/dev/null/runs/\S+ cannot be written"),
    (["--run-name", "a" * 300], r"run_name is 'a+'; .*200"),
    (["--run-name", "a/b"], r"run_name is 'a/b'"),
    (["--run-name", ".."], r"run_name is '..'"),
    # more than the 2^47 bytes that a process can address: of less, the system might promise what it does not have
    (["--buffer-size", "10000000000000"], r"replay of [\d.]+ GiB .*10000000000000.* cpu; choose"),
    (["--hidden-dim", "6000000"], r"3 critics with hidden_dim 6000000 .* cpu; choose"),
    (["--num-critics", "1000000000000"], r"1000000000000 critics with hidden_dim 8 .* cpu; choose"),
    (["--resume", "nowhere"], r"nowhere/checkpoint.pt does not exist"),
    (["--resume", str(ROOT / "policies/Ant-v4.pt")], r"Ant-v4.pt/checkpoint.pt does not exist; .*--evaluate"),
    (["--resume", ""], r"checkpoint.pt does not exist"),
    (["--evaluate", "nowhere"], r"nowhere does not exist"),
    (["--evaluate", "."], r"policy.pt does not exist"),
    (["--evaluate", "nowhere", "--resume", "nowhere"], r"evaluate and resume"),
]


def check(cli, run, arguments, sentence):
    line = sentence_of(run("--env-id", "Hopper-v4", *cli.tiny, *arguments, code=2))
    assert re.search(sentence, line), line
    assert list(cli.folder.iterdir()) == []


@pytest.mark.parametrize("arguments,sentence", WRONG, ids=[" ".join(a)[:40] for a, _ in WRONG])
def test_wrong_arguments(cli, arguments, sentence):
    check(cli, cli.call, arguments, sentence)


def test_an_environment_that_fails_in_the_making(cli, toy):
    """A fault in its own code is told with the place."""

    def fault():
        raise ValueError("the model has no joints")

    line = sentence_of(cli.call("--env-id", toy(fault), *cli.tiny, code=2))
    assert f"the model has no joints ({__file__}, line {fault.__code__.co_firstlineno + 1})" in line


@pytest.mark.parametrize("given", ["--env-id Hoper-v4", pytest.param("--resume nowhere", marks=pytest.mark.slow)])
def test_wrong_command_lines(cli, given):
    """As a user makes them, in a process."""
    (sentence,) = [sentence for arguments, sentence in WRONG if " ".join(arguments) == given]
    check(cli, cli.run, given.split(), sentence)


OF_OTHERS = [
    ("rac_td3", ["--policy-noise", "-1"], r"policy_noise is -1.0; "),
    ("rac_td3", ["--explore-beta-max", "0.9"], r"explore_beta_max is 0.9; .*0.8"),
    ("vanilla_rac", ["--beta", "-0.1"], r"beta is -0.1; "),
    ("vanilla_rac", ["--target-rule", "in-target-min", "--min-size", "4"], r"min_size is 4.0; .*1"),
    ("rac_itm", ["--train-k-max", "3.5"], r"train_k_max is 3.5; .*num_critics, 3"),
    ("rac_itm", ["--explore-k-max", "2.5"], r"explore_k_max is 2.5; .*train_k_max, 2.0"),
    ("rac_itm", ["--eval-k-max", "1"], r"eval_k_max is 1.0; .*1"),
    ("rac_itm", ["--eval-k-max", "3.5"], r"eval_k_max is 3.5; .*num_critics, 3"),
]


@pytest.mark.parametrize("cli,arguments,sentence", OF_OTHERS, indirect=["cli"], ids=[" ".join(a) for _, a, _ in OF_OTHERS])
def test_wrong_arguments_of_others(cli, arguments, sentence):
    check(cli, cli.call, arguments, sentence)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_where_there_is_none(cli):
    check(cli, cli.call, ["--cuda", "True"], "CUDA")


def test_what_is_not_an_argument(cli):
    assert "--utdd" in cli.call("--utdd", "3", code=2).stderr
    assert list(cli.folder.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------- files of a run
@pytest.fixture
def run_dir(cli, toy, tmp_path_factory):
    """A brief run, made once, which is to be resumed or evaluated after it has been damaged."""
    env_id = toy()
    made = tmp_path_factory.getbasetemp() / f"brief_{cli.name}_{env_id}"
    if not made.exists():
        cli.call("--env-id", env_id, *cli.brief)
        cli.run_dir.rename(made)
    shutil.copytree(made, cli.run_dir)
    return cli.run_dir


def refused(cli, *options: str) -> str:
    """What both --resume and --evaluate, or those that are named, say of a damaged run, which they leave as it is."""
    before = files_in(cli.run_dir)
    for option in options:
        more = ("--total-timesteps", "70") if option == "--resume" else ()
        line = sentence_of(cli.call(option, cli.run_dir, *more, code=2))
    assert files_in(cli.run_dir) == before
    return line


def change(path, **parts):
    """Writes a file with other parts; None: without that part."""
    content = {**torch.load(path, weights_only=True), **parts}
    torch.save({name: value for name, value in content.items() if value is not None}, path)


NAMES = {"--resume": "checkpoint.pt", "--evaluate": "policy.pt"}
both = pytest.mark.parametrize("option", NAMES)


@both
@pytest.mark.parametrize("content", [b"", b"hello", 0.1, 0.5, 0.99], ids=str)
def test_files_that_are_cut_or_no_files_of_a_run(cli, run_dir, option, content):
    path = run_dir / NAMES[option]
    good = path.read_bytes()
    path.write_bytes(good[: int(len(good) * content)] if isinstance(content, float) else content)
    assert NAMES[option] in refused(cli, option)


@both
def test_files_that_cannot_be_read(cli, run_dir, option):
    """They are not called damaged: the reason is the system's."""
    path = run_dir / NAMES[option]
    path.unlink()
    path.mkdir()
    line = refused(cli, option)
    assert f"{NAMES[option]} cannot be read: Is a directory" in line


def test_a_zip_file_whose_directory_is_wrong(cli, run_dir):
    """It seems to begin before the file does, of which the system says "invalid argument"."""
    path = run_dir / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    for record, offset, size in ((b"PK\x06\x06", 48, 8), (b"PK\x05\x06", 16, 4)):  # the ends, of 64 and of 32 bits
        field = slice(content.rindex(record) + offset, content.rindex(record) + offset + size)
        content[field] = (int.from_bytes(content[field], "little") + 2**20).to_bytes(size, "little")
    path.write_bytes(content)
    assert "checkpoint.pt is damaged" in refused(cli, "--resume")


@both
@every_script
def test_files_of_another_script(cli, run_dir, option):
    change(run_dir / NAMES[option], script="rac_other")
    assert "rac_other.py" in refused(cli, option)


@both
@pytest.mark.parametrize("version,said", [(2, "by another version"), (99, "by another version"), ("four", "is damaged")])
def test_files_of_another_version(cli, run_dir, option, version, said):
    change(run_dir / NAMES[option], format=version)
    assert said in refused(cli, option)


def test_a_checkpoint_of_the_version_before(cli, run_dir):
    """Policies of format 3 are read, runs are not."""
    change(run_dir / "checkpoint.pt", format=3)
    assert "by another version" in refused(cli, "--resume")


def data_of(path) -> list[tuple[int, int]]:
    """Where the tensors of a file lie: (begin, size), the largest first."""
    with zipfile.ZipFile(path) as archive:
        infos = [info for info in archive.infolist() if "/data/" in info.filename]
    found = []
    with open(path, "rb") as file:
        for info in infos:
            file.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
            found.append((info.header_offset + 30 + name + extra, info.file_size))
    return sorted(found, key=lambda part: -part[1])


@both
@pytest.mark.parametrize("tensor", [0, 1, 5])
@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit(cli, run_dir, option, tensor, where, bit):
    """Anywhere in a tensor."""
    path = run_dir / NAMES[option]
    begin, size = data_of(path)[tensor]
    content = bytearray(path.read_bytes())
    content[begin + int(size * where)] ^= 1 << bit
    path.write_bytes(content)
    assert "damaged" in refused(cli, option)


def test_a_checkpoint_cannot_run_code(cli, run_dir):
    """Loading allows tensors and plain Python only."""

    class Evil:
        def __reduce__(self):
            return os.system, ("touch evil",)

    for name in ("checkpoint.pt", "policy.pt"):
        change(run_dir / name, extra=Evil())
    assert "damaged" in refused(cli, "--resume", "--evaluate")
    assert not (cli.folder / "evil").exists()


PARTS = "args obs_dim action_shape bounds state seconds pending obs actions device threads generator tensors replay".split()


@pytest.mark.parametrize("part", [*PARTS, "script", "format"])
def test_a_checkpoint_without_a_part(cli, run_dir, part):
    change(run_dir / "checkpoint.pt", **{part: None})
    assert str(run_dir) in refused(cli, "--resume")


ODD = {"text": "odd", "number": -0.5, "list": [1, 2], "dict": {"odd": 1}, "tensor": torch.zeros(3, 2, 1)}
TYPES = [(part, kind) for part in PARTS for kind in ODD if (part, kind) != ("seconds", "number")]


@pytest.mark.parametrize("part,kind", TYPES, ids=[f"{part}-{kind}" for part, kind in TYPES])
def test_a_checkpoint_with_a_part_of_another_type(cli, run_dir, part, kind):
    change(run_dir / "checkpoint.pt", **{part: ODD[kind]})
    assert str(run_dir) in refused(cli, "--resume")


@pytest.mark.parametrize(
    "name,value", [("step", -1), ("step", "x"), ("episode", None), ("scripts", 3), ("best_evaluation", {"step": "x"})]
)
def test_a_checkpoint_with_an_odd_state(cli, run_dir, name, value):
    change(run_dir / "checkpoint.pt", state={**checkpoint_of(run_dir)["state"], name: value})
    assert str(run_dir) in refused(cli, "--resume")


@pytest.mark.parametrize("name", ["step", "episode", "logged_step", "scripts", "last_evaluation"])
def test_a_checkpoint_with_half_a_state(cli, run_dir, name):
    state = checkpoint_of(run_dir)["state"]
    del state[name]
    change(run_dir / "checkpoint.pt", state=state)
    assert str(run_dir) in refused(cli, "--resume")


@pytest.mark.parametrize("step", [0, 50, 61, 1000])
def test_a_checkpoint_of_another_step(cli, run_dir, step):
    """Its replay has 60 rows, and the run 60 steps."""
    change(run_dir / "checkpoint.pt", state={**checkpoint_of(run_dir)["state"], "step": step})
    assert str(run_dir) in refused(cli, "--resume")


PENDING = {"number": [1], "short": [(1, 2.0)], "network": [(50, 1.0, [0.1], {"odd": torch.zeros(1)})]}


@pytest.mark.parametrize("kind", PENDING)
def test_a_checkpoint_with_odd_pending_evaluations(cli, run_dir, kind):
    change(run_dir / "checkpoint.pt", pending=PENDING[kind])
    refused(cli, "--resume")


def test_a_checkpoint_with_tensors_of_other_shapes(cli, run_dir):
    """As an older run has for a fork that has changed them: the first one and its shapes are named."""
    tensors = checkpoint_of(run_dir)["tensors"]
    change(run_dir / "checkpoint.pt", tensors={**tensors, "metrics": torch.zeros(3), "q_lr": torch.zeros(5)})
    line = refused(cli, "--resume")
    assert "metrics" in line
    assert "[3]" in line
    assert f"[{len(tensors['metrics'])}]" in line


def test_a_checkpoint_with_a_tensor_of_another_name(cli, run_dir):
    """That which this script has and the file does not is named."""
    tensors = checkpoint_of(run_dir)["tensors"]
    tensors["count"] = tensors.pop("filled")
    change(run_dir / "checkpoint.pt", tensors=tensors)
    assert "filled" in refused(cli, "--resume")


@both
def test_arguments_that_do_not_give_the_networks(cli, run_dir, option):
    args = checkpoint_of(run_dir)["args"]
    change(run_dir / NAMES[option], args={**args, "hidden_dim": 9})
    assert str(run_dir / NAMES[option]) in refused(cli, option)


@both
@pytest.mark.parametrize("name,value", [("hidden_dim", -1), ("gamma", "much"), ("env_id", "Hoper-v4"), ("seed", None)])
def test_saved_arguments_that_are_wrong(cli, run_dir, option, name, value):
    """They are judged like those of a command line."""
    args = checkpoint_of(run_dir)["args"]
    change(run_dir / NAMES[option], args={**args, name: value})
    refused(cli, option)


@pytest.mark.parametrize("part", ["args", "obs_dim", "bounds", "actor", "evaluation", "script", "format"])
@pytest.mark.parametrize("value", [None, "odd", -0.5, torch.zeros(3, 2, 1)], ids=["missing", "text", "number", "tensor"])
def test_a_policy_with_an_odd_part(cli, run_dir, part, value):
    change(run_dir / "policy.pt", **{part: value})
    assert str(run_dir) in refused(cli, "--evaluate")


def test_a_checkpoint_is_no_policy(cli, run_dir):
    assert "checkpoint.pt" in sentence_of(cli.call("--evaluate", run_dir / "checkpoint.pt", code=2))
    shutil.copy(run_dir / "policy.pt", run_dir / "checkpoint.pt")
    assert str(run_dir) in refused(cli, "--resume")


def test_config_is_for_information_only(cli, run_dir):
    (run_dir / "config.json").write_text("{")
    cli.call("--resume", run_dir, "--total-timesteps", "70")
    assert '"total_timesteps": 70' in (run_dir / "config.json").read_text()
