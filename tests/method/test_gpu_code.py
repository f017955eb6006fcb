"""What a GPU would be given, as far as a machine without one can tell.

The first test runs all that is captured on the device "meta", where tensors have shapes and no numbers. The second one has
Inductor write its GPU code, without compiling it, and counts the kernels; it takes the place of internals of the pinned PyTorch.
"""

import contextlib
import copy
import re
from collections import Counter
from types import SimpleNamespace

import access
import pytest
import torch
from conftest import ROOT, load_script
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OBS, ACT = 27, 8  # of Ant-v4
# They wait for the device, or the size of what they return depends on numbers: no CUDA graph can hold them.
NOT_CAPTURABLE = """
_local_scalar_dense item is_nonzero equal nonzero masked_select unique bincount repeat_interleave.Tensor pin_memory is_pinned
""".split()


class Recorder(TorchDispatchMode):
    """Operations outside of compiled functions and the devices of all tensors; what is inside stands in `graphs`.

    As torch.compile in a script, compile() traces a function for the device of its inputs and runs the graph as it is.
    """

    def __init__(self, receive=lambda name, graph, inputs: None, decompositions=None):
        super().__init__()
        self.receive = receive  # what is called with each graph
        self.decompositions = decompositions  # of operations into simpler ones, before that
        self.graphs = []  # (name of the function, graph), one for each kind of inputs
        self.calls = Counter()  # by position in graphs
        self.operations = []
        self.devices = set()
        self.compiled_now = False
        self.torch_compile = torch.compile

    @classmethod
    def is_infra_mode(cls):
        return True  # or else torch.compile does nothing below it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.devices |= {x.device.type for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)}
        if not self.compiled_now:
            self.operations.append(function)
        return result

    def compile(self, function, *, fullgraph, dynamic, options):
        assert fullgraph
        assert dynamic is False

        def keep(graph, inputs):
            number = len(self.graphs)
            self.graphs.append((function.__name__, graph, inputs))
            self.receive(function.__name__, copy.deepcopy(graph), inputs)

            def run(*arguments):
                self.calls[number] += 1
                return graph.forward(*arguments)

            return run

        backend = aot_autograd(fw_compiler=keep, decompositions=self.decompositions)
        traced = self.torch_compile(function, fullgraph=True, dynamic=False, backend=backend)

        def call(*arguments):
            self.compiled_now = True
            try:
                return traced(*arguments)
            finally:
                self.compiled_now = False

        return call


class Generator(torch.Generator):
    """There is none for meta."""

    def __new__(cls, device=None):
        return super().__new__(cls, "cpu")


def meta_learner(script, monkeypatch, recorder):
    """A learner of the default sizes whose functions are compiled by the recorder."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", recorder.compile)
    monkeypatch.setattr(torch, "Generator", Generator)
    args = script.check_args(script.Args(env_id="Ant-v4", buffer_size=5000, total_timesteps=10000), ACT)
    args.compile = True
    return script.Learner(args, OBS, ACT, torch.device("meta"))


def places(learner) -> dict[str, int]:
    """Where the tensors lie that a captured graph reads or writes, and that live on from step to step."""
    tensors = {**learner.state_dict(), "replay": learner.replay, "obs": learner.obs, "action": learner.action}
    return {name: tensor.untyped_storage()._cdata for name, tensor in tensors.items()}


def operations_of(call, recorder) -> tuple[list, dict]:
    """What a call does: operations outside of compiled functions in their order, and how often each graph is called."""
    already = len(recorder.operations)
    recorder.calls.clear()
    call()
    return recorder.operations[already:], dict(recorder.calls)


def check_all_of_it_can_be_captured(script, monkeypatch):
    recorder = Recorder()
    learner = meta_learner(script, monkeypatch, recorder)
    before = places(learner)
    assert {tensor.device.type for tensor in [*learner.state_dict().values(), learner.replay, learner.obs]} == {"meta"}
    with recorder:
        learner._act()
        learner._update()
        known = [name for name, *_ in recorder.graphs]
        updates = [operations_of(learner._update, recorder) for _ in range(3)]
    assert set(known) == {function.__name__ for function in script.COMPILED}
    assert [name for name, *_ in recorder.graphs] == known, "a later update compiles anew"
    assert updates[0] == updates[1] == updates[2], "updates differ, but a graph repeats the one that was captured"
    assert recorder.devices == {"meta"}, "a tensor on the CPU takes part"
    operations = [str(function) for function in recorder.operations]
    for name, graph, inputs in recorder.graphs:
        assert all(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in inputs), f"{name} is given more than tensors"
        for node in graph.graph.nodes:
            devices = {x.device.type for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)}
            assert devices <= {"meta"}, f"{name}: {node} is on {devices}"
            operations.append(str(node.target))
    assert [x for x in operations if any(re.match(rf"(aten|prims)\.{bad}\b", x) for bad in NOT_CAPTURABLE)] == []
    assert places(learner) == before, "a captured graph writes where its tensors were"


@pytest.mark.kinds("sac", "itm")
def test_all_of_it_can_be_captured(script, monkeypatch):
    """One graph for each kind of inputs; nothing on the CPU, nothing that waits for the device, no buffer in another place."""
    check_all_of_it_can_be_captured(script, monkeypatch)


@pytest.mark.slow
@pytest.mark.kinds("td3", "vanilla")
def test_all_of_the_other_two_can_be_captured(script, monkeypatch):
    """Apart, for each takes many seconds."""
    check_all_of_it_can_be_captured(script, monkeypatch)


# What of rac_sac.py is replaced by what, and what is said then
COUNT = "torch.arange(1, updates + 1, device=count.device)"
SAMPLE = "    return replay[(position * filled).long()], low"
TARGET = "  # (B,), no gradient\n"
METRICS = "        self.add_metrics(self.metrics, all_q"
MASKED = "    rows = replay[(position * filled).long()]\n    return rows[rows[:, 0] > 0], low"
FAULTS = {
    "a tensor on the CPU": (COUNT, "torch.arange(1, updates + 1)", "cpu"),
    "waiting for a number": (METRICS, f"        self.q_lr.item()\n{METRICS}", r"item\(\)"),
    "a constant of the CPU": (TARGET, f"{TARGET}    target = target * torch.tensor(2.0)\n", 'device "cpu"'),
    "a branch by numbers": (TARGET, f"{TARGET}    if target.mean() > 0:\n        target = 2 * target\n", "branching"),
    "a size by numbers": (SAMPLE, MASKED, "nonzero"),
    "a buffer in another place": (METRICS, f"        self.metrics = self.metrics + 0\n{METRICS}", "where its tensors were"),
    "a replay in another place": (METRICS, f"        self.replay = self.replay + 0\n{METRICS}", "where its tensors were"),
    "an action in another place": (METRICS, f"        self.action = self.action + 0\n{METRICS}", "where its tensors were"),
    "only every other time": (
        METRICS,
        f"        self.odd = not getattr(self, 'odd', False)\n        if self.odd:\n            self.metrics.mul_(1)\n{METRICS}",
        "updates differ",
    ),
    "a number that changes": (METRICS, f"        self.args.tau /= 2\n{METRICS}", "compiles anew"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, monkeypatch, fault):
    old, new, said = FAULTS[fault]
    source = (ROOT / "rac_sac.py").read_text()
    assert source.count(old) == 1
    path = tmp_path / "rac_fault.py"
    path.write_text(source.replace(old, new))
    script = load_script(path)
    with pytest.raises(Exception, match=said):
        check_all_of_it_can_be_captured(script, monkeypatch)


# -------------------------------------------------------------------------------------------------------- kernels, counted
H100 = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


@contextlib.contextmanager
def inductor_believes_in_a_gpu():
    from torch._dynamo import device_interface
    from torch._inductor import constant_folding, scheduler
    from torch._inductor.fx_passes import joint_graph, post_grad, reinplace
    from torch._subclasses import fake_tensor

    for passes in (joint_graph, post_grad):
        passes.lazy_init()  # now: they try their patterns on a GPU if they see one
    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device=None: H100,
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
            patch.setattr(device_interface.CudaInterface, name, staticmethod(answer), raising=False)
        patch.setitem(device_interface.caching_worker_device_properties, "cuda", [H100])
        patch.setattr(scheduler, "has_triton", lambda: True)
        patch.setattr(torch.utils._triton, "triton_hash_with_backend", lambda: "none")
        patch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
        patch.setattr(fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True))
        # A build without CUDA cannot index a fake tensor; only the shape is used.
        patch.setattr(reinplace, "_inplace_generalized_scatter", lambda x, source, views: torch.empty_like(x))
        for folder in (constant_folding.ConstantFolder, joint_graph.UniformValueConstantFolder):
            patch.setattr(folder, "_deduce_value", folding_on_the_cpu(folder._deduce_value))
        yield


def folding_on_the_cpu(deduce):
    """Constants are folded by running them, for which there must be numbers."""

    def folded(self, node):
        kwargs = node.kwargs
        if "device" in kwargs:
            node.kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            return deduce(self, node)
        finally:
            node.kwargs = kwargs

    return folded


class Written(Exception):
    """Inductor's code is there; it shall not be compiled."""


def gpu_code(graph, inputs, options) -> str:
    """What Inductor would write for a GPU from a graph that was traced on the device meta."""
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    device = torch.device("cuda", 0)
    code = []

    def stop(lowering):
        code.append(lowering.codegen()[0].value)
        raise Written

    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    with inductor_believes_in_a_gpu(), pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(options):
        patch.setattr(GraphLowering, "_compile_to_module", stop)
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            moved = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in inputs]
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            FakeTensorProp(graph, mode).propagate(*moved)
            graph = compile_fx._recursive_joint_graph_passes(graph)
            compile_fx.view_to_reshape(graph)
            try:
                compile_fx.compile_fx_inner(graph, moved)
            except Exception:
                if not code:
                    raise
    return code[0]


def is_view(operation) -> bool:
    """Whether an operation launches nothing, for what it returns is a part of its input."""
    aliases = [result.alias_info for result in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def count_launches(script, monkeypatch, options):
    """Launches of one critic update and of all updates of an environment step, and what is launched how often."""
    from torch._inductor.decomposition import select_decomp_table

    codes = []
    recorder = Recorder(lambda name, graph, inputs: codes.append(gpu_code(graph, inputs, options)), select_decomp_table())
    learner = meta_learner(script, monkeypatch, recorder)
    with recorder:
        learner._update()
        recorder.calls.clear()
        recorder.operations.clear()
        learner._update()
    launched = {"eager": (1, sum(not is_view(operation) for operation in recorder.operations))}
    for number, (name, *_) in enumerate(recorder.graphs):
        code = codes[number]
        body = code[code.index("def call(") :]
        assert not re.search(r"\.item\(\)|synchronize\(|\.cpu\(\)|empty_strided_cpu\(|aten\.\w+\.default\(", body), name
        kernels = len(re.findall(r"\w+\.run\(", body)) + len(re.findall(r"extern_kernels\.\w+\(", body))
        launched[f"{name} {number}"] = (recorder.calls[number], kernels)
    (critic,) = (kernels for name, (_, kernels) in launched.items() if name.startswith("update_critics"))
    return critic, sum(uses * kernels for uses, kernels in launched.values()), launched


# Launches of one critic update and of all updates of an environment step
LAUNCHES = {
    "sac": (22, 534),
    "td3": (22, 504),
    "vanilla": (22, 521),
    "itm": (23, 556),  # ranks the keys of each sample's subset in a kernel of its own
}


@pytest.mark.slow
def test_kernels(script, monkeypatch):
    """A change of these numbers is no mistake, but shall be seen: time is about proportional to them."""
    critic, step, launched = count_launches(script, monkeypatch, script.COMPILER_OPTIONS["cuda"])
    print(critic, step, launched)
    assert (critic, step) == LAUNCHES[access.kind_of(script)], launched
