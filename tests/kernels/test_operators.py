"""The torch operators: schema, fake, torch.compile and CUDA graphs; and the launch plans that repeat a call."""

import copy
import ctypes
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import cuda, cuda_driver, operators, routing
from kernels.common import Candidate, Tensors, Workload
from kernels.gdn import cases as gdn_cases
from kernels.gdn import ops as gdn_ops
from kernels.gdn import segments
from kernels.gdn.reference import reference as gdn_reference
from kernels.kv import cases as kv_cases
from kernels.kv import format as kv_format
from kernels.kv import ops as kv_ops
from kernels.kv.reference import reference as kv_reference
from kernels.moe import cases as moe_cases
from kernels.moe import cuda_experts
from kernels.moe import ops as moe_ops
from kernels.moe.reference import reference as moe_reference
from kernels.nvfp4 import cases as nvfp4_cases
from kernels.nvfp4 import cuda_decode, cuda_gemm, hopper
from kernels.nvfp4 import ops as nvfp4_ops
from kernels.nvfp4.reference import reference as nvfp4_reference
from lab.base import devices
from lab.check import accuracy
from tests.kernels.stub_driver import CONTEXT, OTHER, Driver, stubbed

WEIGHT = ("w_packed", "w_scale", "w_tensor_scale")
STEP = ("q", "k", "v", "g", "beta", "state", "state_rows")
SCAN = ("q", "k", "v", "g", "beta", "initial_state")
OP = torch.ops.killgate


LINEAR = nvfp4_cases.WORKLOADS[0]
DECODE = next(w for w in gdn_cases.WORKLOADS if w["op"] == "decode" and w["pad"])
PREFILL = next(w for w in gdn_cases.WORKLOADS if w["lengths"] and w["dtype"] == "bf16")
DENSE = next(w for w in gdn_cases.WORKLOADS if w["op"] == "prefill" and w["batch"] == 2)
MIXTURE = next(w for w in moe_cases.WORKLOADS if w["shared"] and w["H"] % 128 == 0)
PAGED = next(w for w in kv_cases.WORKLOADS if w["batch"] > 1 and w.role == "check")


def scan_batch(workload: Workload, device: str) -> gdn_ops.Batch:
    lengths = [int(n) for n in str(workload["lengths"]).split("-") if n] or [workload["T"]] * workload["batch"]
    dtype = gdn_cases.DTYPES[workload["dtype"]]
    heads = (workload["Hk"], workload["Hv"], workload["D"])
    return gdn_ops.batch(lengths, *heads, dtype, device, bool(workload["qk_l2norm"]))


def mixture(inputs: Tensors, tokens: tuple[int, int] = (1, 64)) -> moe_ops.Layer:
    weights = {name: t for name, t in inputs.items() if name not in (*moe_cases.ACTIVATIONS, "top_k")}
    return moe_ops.Layer(weights, top_k=MIXTURE["top_k"], tokens=tokens)


def cache(inputs: Tensors, kind: str) -> Any:
    if kind == "16bit":
        return [inputs["k_cache"], inputs["v_cache"]]
    quantise = {"fp8": kv_format.quantise_fp8, "q8_0": kv_format.quantise_q8_0}[kind]
    (k, k_scale), (v, v_scale) = (quantise(inputs[name]) for name in ("k_cache", "v_cache"))
    return [k, v, k_scale, v_scale]


def paged_batch(workload: Workload, kept: list[torch.Tensor], dtype: torch.dtype, device: str) -> kv_ops.Batch:
    axes = [workload[axis] for axis in ("batch", "ctx", "Hq", "Hkv", "D", "page")]
    given: Any = [*axes, kept[0].dtype, dtype, device]
    return kv_ops.batch(*given)


def calls(device: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each operator with the arguments of a small problem."""
    drawn = (
        nvfp4_cases.inputs(LINEAR, 0, "cpu"),  # a GPU would draw others
        gdn_cases.inputs(DECODE, 0, "cpu"),
        gdn_cases.inputs(PREFILL, 0, "cpu"),
        kv_cases.inputs(PAGED, 0, "cpu"),
        moe_cases.inputs(MIXTURE, 0, "cpu"),
    )
    inputs, step, scan, paged, mixed = ({name: t.to(device) for name, t in given.items()} for given in drawn)
    _, route, operands, scratch = nvfp4_ops.Linear(*(inputs[n] for n in WEIGHT), tokens=(1, 64)).parts[0]
    batch = scan_batch(PREFILL, device)
    kept = cache(paged, "fp8")
    pages = paged_batch(PAGED, kept, paged["q"].dtype, device)
    table = (paged["page_table"], paged["seq_lens"])
    _, of_experts, experts, between = mixture(mixed).parts[0]
    return {
        "moe": (OP.moe, (mixed["x"], mixed["logits"], experts, between, of_experts)),
        "nvfp4_linear": (OP.nvfp4_linear, (inputs["x"], operands, scratch, route, LINEAR["N"])),
        "gdn_decode": (OP.gdn_decode, (*(step[n] for n in STEP), "raw_qk" in step)),
        "gdn_prefill": (OP.gdn_prefill, (*(scan[n] for n in SCAN), batch.tables, batch.scratch, batch.route)),
        "kv_decode": (OP.kv_decode, (paged["q"], kept, *table, pages.scratch, pages.route)),
    }


NAMES = ("moe", "nvfp4_linear", "gdn_decode", "gdn_prefill", "kv_decode")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_what_its_schema_and_its_fake_say(name: str) -> None:
    operator, arguments = calls("cpu")[name]
    found = torch.library.opcheck(operator.default, arguments)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.slow
def test_a_wrong_fake_or_an_undeclared_write_does_not_pass() -> None:
    """The check of the test above sees both."""
    library = torch.library.Library("killgate_wrong", "FRAGMENT")
    library.define("fake(Tensor x) -> Tensor")
    library.define("write(Tensor x) -> Tensor")
    library.impl("fake", lambda x: x.new_empty(x.shape), "CPU")
    library.impl("write", lambda x: x.add_(1).clone(), "CPU")
    for name, shape in (("fake", (3,)), ("write", (2,))):
        torch.library.register_fake(f"killgate_wrong::{name}", lambda x, shape=shape: x.new_empty(shape), lib=library)
        operator = getattr(torch.ops.killgate_wrong, name).default
        with pytest.raises(Exception, match=r"\w"):
            torch.library.opcheck(operator, (torch.ones(2),), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_linear_compiles_into_one_graph_for_any_number_of_tokens(backend: str) -> None:
    inputs = nvfp4_cases.inputs(LINEAR, 0)
    linear = nvfp4_ops.Linear(*(inputs[n] for n in WEIGHT), tokens=(1, 64))
    graphs = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, backend=count, dynamic=True)
    for rows in (2, 3, 17, 64):
        x = torch.randn(rows, 1, LINEAR["K"]).to(torch.bfloat16)
        wanted = nvfp4_reference({"x": x[:, 0], **{n: inputs[n] for n in WEIGHT}})["y"].to(torch.bfloat16)
        torch.testing.assert_close(compiled(x)[:, 0], wanted, rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_decode_step_compiles_and_updates_the_pool_in_place() -> None:
    inputs = gdn_cases.inputs(DECODE, 0, "cpu")
    wanted = gdn_reference(inputs)

    def layer(*given: torch.Tensor) -> torch.Tensor:
        return torch.ops.killgate.gdn_decode(*given, "raw_qk" in inputs) + 0

    torch._dynamo.reset()
    o = torch.compile(layer, fullgraph=True, backend="aot_eager")(*(inputs[n] for n in STEP))
    torch.testing.assert_close(o, wanted["o"].to(o.dtype), rtol=0, atol=0)
    torch.testing.assert_close(inputs["state"], wanted["state"].to(inputs["state"].dtype), rtol=0, atol=0)


@pytest.mark.parametrize("workload", [PREFILL, DENSE], ids=lambda w: w.id)
def test_prefill_is_the_reference(workload: Workload) -> None:
    inputs = gdn_cases.inputs(workload, 0, "cpu")
    o, final_state = scan_batch(workload, "cpu")(*(inputs[n] for n in SCAN))
    wanted = gdn_reference(inputs)
    torch.testing.assert_close(o, wanted["o"].to(o.dtype), rtol=0, atol=0)
    torch.testing.assert_close(final_state, wanted["final_state"].to(final_state.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["16bit", "fp8", "q8_0"])
def test_attention_is_the_reference_in_each_format(kind: str) -> None:
    inputs = kv_cases.inputs(PAGED, 0, "cpu")
    kept = cache(inputs, kind)
    batch = paged_batch(PAGED, kept, inputs["q"].dtype, "cpu")
    given: Any = [inputs["q"], *kept[:2], inputs["page_table"], inputs["seq_lens"], *kept[2:]]
    o = batch(*given)
    words = dict(zip(("k_cache", "v_cache", "k_scale", "v_scale"), kept, strict=False))
    wanted = kv_reference({**{n: inputs[n] for n in ("q", "page_table", "seq_lens")}, **words})["o"]
    torch.testing.assert_close(o, wanted.to(o.dtype), rtol=0, atol=0)


@pytest.mark.slow
def test_a_mixture_is_the_reference_and_compiles_into_one_graph() -> None:
    inputs = moe_cases.inputs(MIXTURE, 0, "cpu")
    layer, graphs = mixture(inputs), []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    for tokens in (2, 5, 17):
        given = inputs | {name: inputs[name][:tokens] for name in moe_cases.ACTIVATIONS}
        wanted = moe_reference(given)["y"].to(torch.bfloat16)
        for call in (layer, compiled):
            torch.testing.assert_close(call(given["x"], given["logits"]), wanted, rtol=0, atol=0)
    assert len(graphs) == 1


def test_a_mixture_takes_the_kernel_for_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ladder's choices are joined where neighbours agree; a kernel's last number of tokens is a place of it."""

    def choose(router: Any, device: torch.device, precision: str, kept: str, **axes: Any) -> Any:
        return SimpleNamespace(name="cuda_experts" if axes["T"] <= 128 else "triton_experts")

    monkeypatch.setattr(operators, "choose", choose)
    moe_ops.segments.cache_clear()
    shape = (256, 8, 2048, 512, 512, torch.bfloat16, torch.device("cuda", 0))
    assert moe_ops.segments(*shape, (1, 1000)) == ((128, "cuda_experts"), (1000, "triton_experts"))
    assert moe_ops.segments(*shape, (200, 300)) == ((300, "triton_experts"),)
    moe_ops.segments.cache_clear()


def test_a_kernel_is_kept_where_another_is_hardly_faster() -> None:
    """A measured time within the model's of another: each change of kernels is one more copy of the weights."""
    near = routing.Choice("many", "carried", "", {"many": 99.5, "few": 100.5, "slow": 500.0})
    assert operators.kept_beside(near, "few")
    assert not operators.kept_beside(near, "slow")
    assert not operators.kept_beside(near, "absent")
    assert not operators.kept_beside(replace(near, how="override"), "few")


def test_a_mixture_is_packed_once_for_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []

    def pack(weights: Any, name: str, x: torch.Tensor, *_: Any) -> Any:
        packed.append((name, len(x)))
        return name, [], []

    monkeypatch.setattr(moe_ops, "segments", lambda *_: ((1, "a"), (2, "b"), (9, "a")))
    monkeypatch.setattr(moe_ops, "_packed", pack)
    layer = moe_ops.Layer(moe_cases.inputs(MIXTURE, 0, "cpu"), top_k=2, tokens=(1, 9))
    assert packed == [("a", 9), ("b", 2)]
    assert [(last, route) for last, route, *_ in layer.parts] == [(1, "a"), (2, "b"), (9, "a")]


def test_both_kernels_of_a_mixture_share_a_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 to 4096 tokens one copy does. Scratch stays apart: what must be zero of it differs."""
    monkeypatch.setattr(moe_ops, "segments", lambda *_: ((128, "cuda_experts"), (4096, "cuda_experts_many")))
    layer = moe_ops.Layer(moe_cases.inputs(MIXTURE, 0, "cpu"), top_k=2, workspace=nvfp4_ops.Workspace())
    found = []
    for _, route, operands, scratch in layer.parts:
        names = route.split()[1:]
        found.append({n: t.data_ptr() for n, t in zip(names, (*operands, *scratch), strict=True) if t.numel()})
    few, many = found
    for name in few.keys() & many.keys():
        assert (few[name] == many[name]) == (name in cuda_experts.WEIGHTS), name
    assert few.keys() & many.keys() > {"up", "down", "up_scale", "down_scale", "shared_gate", "state", "h"}


def test_wrong_experts_and_logits_are_refused() -> None:
    inputs = moe_cases.inputs(MIXTURE, 0, "cpu")
    layer, x, logits = mixture(inputs, (1, 4)), inputs["x"][:4], inputs["logits"][:4]
    for wrong, said in (
        ((x.half(), logits), "packed for"),
        ((x, logits[:3]), "logits are"),
        ((x, logits.double()), "float32"),
        ((inputs["x"], inputs["logits"]), "at most 4"),
    ):
        with pytest.raises(ValueError, match=said):
            layer(*wrong)
    with pytest.raises(ValueError, match="gate_up"):
        mixture(inputs | {"gate_up_packed": inputs["gate_up_packed"][:, 2:]})


def test_wrong_tensors_are_refused() -> None:
    inputs = nvfp4_cases.inputs(LINEAR, 0)
    weight = [inputs[n] for n in WEIGHT]
    linear = nvfp4_ops.Linear(*weight, tokens=(1, 4))
    x = inputs["x"]
    for wrong, said in ((x.half(), "packed for"), (x.expand(5, -1), "at most 4"), (x[:, 1:], "K=")):
        with pytest.raises(ValueError, match=said):
            linear(wrong)
    with pytest.raises(ValueError, match="K / 16"):
        nvfp4_ops.Linear(weight[0], weight[1][:, 1:], weight[2])
    with pytest.raises(ValueError, match="names 3 tensors, 2 came"):
        OP.nvfp4_linear(inputs["x"], weight[:2], [], "reference w_packed w_scale w_tensor_scale", 75)
    kv = kv_cases.inputs(PAGED, 0, "cpu")
    kept = cache(kv, "fp8")
    without_scales: Any = [kv["q"], *kept[:2], kv["page_table"], kv["seq_lens"]]
    with pytest.raises(ValueError, match="takes k_scale and v_scale"):
        paged_batch(PAGED, kept, kv["q"].dtype, "cpu")(*without_scales)
    with pytest.raises(ValueError, match="one positive length"):
        gdn_ops.batch([3, 0], 1, 1, 64, torch.bfloat16, "cpu")


def test_a_weight_is_packed_once_for_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ladder's choices are joined where neighbours agree; the last holds to the end of the range."""

    def choose(router: Any, device: torch.device, precision: str, **axes: Any) -> Any:
        return SimpleNamespace(name="cuda_decode" if axes["M"] <= 12 else "triton_gemm")

    monkeypatch.setattr(operators, "choose", choose)
    nvfp4_ops.segments.cache_clear()
    found = nvfp4_ops.segments(75, 64, torch.bfloat16, torch.device("cuda", 0), (1, 1000))
    assert found == ((12, "cuda_decode", "tiles"), (1000, "triton_gemm", ""))
    assert nvfp4_ops.segments(75, 64, torch.bfloat16, torch.device("cuda", 0), (3, 3)) == ((3, "cuda_decode", "tiles"),)
    monkeypatch.setattr(operators, "choose", lambda *asked, **axes: SimpleNamespace(name="cuda_gemm"))
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    found = nvfp4_ops.segments(17408, 5120, torch.bfloat16, torch.device("cuda", 0), (9, 4096))
    assert found == ((24, "cuda_gemm", "tiles"), (4096, "cuda_gemm", "row_tiles"))  # three kernels from 25 tokens on
    nvfp4_ops.segments.cache_clear()


def test_kernels_of_one_layout_share_a_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 to 4096 tokens two copies do: what decodes and what takes a few dozen tokens read the same one."""
    chosen = ((8, "cuda_decode", "tiles"), (24, "cuda_gemm", "tiles"), (4096, "cuda_gemm", "row_tiles"))
    monkeypatch.setattr(nvfp4_ops, "segments", lambda *_: chosen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    ours = {kernel.name: kernel for kernel in (*cuda_decode.CANDIDATES, *cuda_gemm.CANDIDATES)}
    monkeypatch.setattr(operators, "candidates", lambda family, capability: ours)
    problem = nvfp4_cases._check(1, 32, 5120, "bf16")
    weight = [nvfp4_cases.inputs(problem, 0)[name] for name in WEIGHT]
    linear = nvfp4_ops.Linear(*weight, tokens=(1, 4096), workspace=nvfp4_ops.Workspace())
    kept = [operands[route.split()[1:].index("w")] for _, route, operands, _ in linear.parts]
    few, dozens, many = (w.data_ptr() for w in kept)
    assert few == dozens != many
    assert [route.split()[0] for _, route, *_ in linear.parts] == ["cuda_decode", "cuda_gemm", "cuda_gemm"]


def test_scratch_is_shared_and_grows() -> None:
    kept = nvfp4_ops.Workspace()
    small, large = torch.zeros(4), torch.zeros(9)
    assert kept.at_least("a", {"parts": small})["parts"] is small
    assert kept.at_least("a", {"parts": large})["parts"] is large
    assert kept.at_least("a", {"parts": small})["parts"] is large
    assert kept.at_least("b", {"parts": small})["parts"] is small


def test_an_unlisted_device_has_no_facts_and_a_listed_one_its_peaks() -> None:
    assert operators.device_facts("a GPU of nobody") == ("a-gpu-of-nobody", 0.0, {})
    assert "[a-gpu-of-nobody]" in devices.reported("a GPU of nobody", {})  # what `lab` calls it when it is measured
    device, bandwidth, peaks = operators.device_facts("NVIDIA H200")
    assert (device, bandwidth, peaks["bf16"]) == ("h200", pytest.approx(4800, rel=0.1), pytest.approx(989, rel=0.01))


def test_an_unlisted_gpu_gets_what_is_fastest_on_another_of_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is told of it, and the candidates' own order, by name, is not what decides."""
    properties = SimpleNamespace(multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H20")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    able = {name: Candidate(name=name, precision=nvfp4_ops.EXACT, run=print) for name in ("a_first", "triton_gemm")}
    monkeypatch.setattr(operators, "candidates", lambda family, capability: able)
    known = routing.table("h200", "nvfp4")
    assert known
    (shape, at), _ = next((place, us) for place, us in known.at.items() if "triton_gemm" in us)
    axes: dict[str, int | str] = {**dict(shape), "M": at, "dtype": "bf16"}
    chosen = operators.choose(nvfp4_ops.ROUTER, torch.device("cuda", 0), nvfp4_ops.EXACT, **axes)
    assert chosen.name == "triton_gemm"


# Plans ----------------------------------------------------------------------------------------------------------------


def candidate(run: Callable[[Tensors, Tensors], None]) -> dict[str, Candidate]:
    return {"toy": Candidate(name="toy", precision="nvfp4-w4a16", run=run)}


def launching(*more: Any) -> Callable[[Tensors, Tensors], None]:
    """A candidate that launches x, w, y and a number, and `more` of the tensors."""
    ran: list[int] = []

    def run(args: Tensors, out: Tensors) -> None:
        ran.append(1)
        x, y = args["x"], out["y"]
        given = [make(x, args["w"], y) for make in more]
        cuda.launch(cuda.load(None, "toy", 0), (2,), 32, [x, args["w"], y, cuda.i32(x.shape[0]), *given])

    run.ran = ran  # type: ignore[attr-defined]
    return run


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = OP.nvfp4_linear(x, [w], [], "toy w", 4)
    return y


def test_a_second_call_repeats_the_launch_at_its_own_addresses() -> None:
    run, driver = launching(), Driver([8, 8, 8, 4])
    x, w = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(5)
    with torch.no_grad(), stubbed(driver, candidate(run)):
        for given in (x, torch.ones_like(x), x):
            y = linear(given, w)
            assert driver.launches[-1] == (5, [given.data_ptr(), w.data_ptr(), y.data_ptr(), 3])
        assert len(run.ran) == 1  # type: ignore[attr-defined]
        for other in (x[:2], x.half()):  # another shape, another type
            linear(other, w)
        linear(x, torch.zeros(5))  # another weight
        assert len(run.ran) == 4  # type: ignore[attr-defined]
        shifted = torch.zeros(49, dtype=torch.bfloat16)[1:].view(3, 16)  # its alignment may choose another kernel
        linear(shifted, w)
        assert len(run.ran) == 5  # type: ignore[attr-defined]


def toy_module(w: torch.Tensor) -> nvfp4_ops.Linear:
    """A module for x [.., 16] of at most 64 rows, whose kernel takes one tensor."""
    module = nvfp4_ops.Linear(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 1), torch.ones(1), tokens=(1, 64))
    module.parts = [(64, "toy w", [w], [])]
    return module


def test_a_modules_second_call_repeats_the_launch_without_the_operator() -> None:
    run, driver, w = launching(), Driver([8, 8, 8, 4]), torch.zeros(5)
    module, x = toy_module(w), torch.zeros(3, 16, dtype=torch.bfloat16)
    with torch.no_grad(), stubbed(driver, candidate(run)):
        for given in (x, torch.ones_like(x), x):
            y = module(given)
            assert driver.launches[-1] == (5, [given.data_ptr(), w.data_ptr(), y.data_ptr(), 3])
        assert len(run.ran) == 1  # type: ignore[attr-defined]
        shifted = torch.zeros(49, dtype=torch.bfloat16)[1:].view(3, 16)
        for number, other in enumerate((x[:2], shifted, x.view(1, 3, 16))):
            assert module(other).shape == (*other.shape[:-1], 4)
            assert len(run.ran) == 2 + number  # type: ignore[attr-defined]
        rows = torch.zeros(3, 32, dtype=torch.bfloat16)[:, :16]  # a copy of it is launched, so nothing of it is kept
        for _ in range(2):
            module(rows)
            assert driver.launches[-1][1][0] != rows.data_ptr()
        assert copy.deepcopy(module).plans == {} != module.plans
        with pytest.raises(ValueError, match="packed for"):
            module(x.half())


def of_a_toy(found: Any) -> Any:
    """A batch or layer whose route is the toy's."""
    if isinstance(found, moe_ops.Layer):
        found.parts = [(last, route.replace("reference", "toy"), a, b) for last, route, a, b in found.parts]
        return found
    return replace(found, route=found.route.replace("reference", "toy"))


@pytest.mark.parametrize("name", ["moe", "gdn_decode", "gdn_prefill", "kv_decode"])
def test_what_keeps_its_operands_repeats_its_launch_at_the_addresses_of_a_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gdn_ops, "_decoder", lambda device: "toy")
    given = calls("cpu")[name][1]
    call, moving, fixed = {
        "moe": lambda: (of_a_toy(mixture(moe_cases.inputs(MIXTURE, 0, "cpu"))), given[:2], ()),
        "gdn_decode": lambda: (gdn_ops.decode, given[:5], given[5:]),
        "gdn_prefill": lambda: (of_a_toy(scan_batch(PREFILL, "cpu")), given[:6], ()),
        "kv_decode": lambda: (
            of_a_toy(paged_batch(PAGED, given[1], given[0].dtype, "cpu")),
            given[:1],
            (*given[1][:2], *given[2:4], *given[1][2:]),
        ),
    }[name]()
    ran: list[int] = []
    seen: list[set[int]] = []

    def run(args: Tensors, out: Tensors) -> None:
        ran.append(1)
        known = [t for t in (*args.values(), *out.values()) if t.numel()]
        cuda.launch(cuda.load(None, "toy", 0), (2,), 32, list({t.data_ptr(): t for t in known}.values()))

    driver = Driver([])

    def launch(config: Any, function: Any, pointers: Any, extra: Any) -> int:
        seen.append({ctypes.c_uint64.from_address(at).value for at in pointers})
        return 0

    driver.cuLaunchKernelEx = launch  # type: ignore[method-assign]
    with torch.no_grad(), stubbed(driver, candidate(run)):
        for _ in range(3):
            moved = [t.clone() for t in moving]
            made = call(*moved, *fixed)
            outputs = made if isinstance(made, tuple) else (made,)
            assert {t.data_ptr() for t in (*moved, *outputs)} <= seen[-1]
        assert len(ran) == 1
        if name == "gdn_decode":  # another pool
            call(*moved, fixed[0].clone(), *fixed[1:])
            assert len(ran) == 2


def test_a_module_with_scratch_of_its_own_in_every_call_repeats_nothing() -> None:
    served = pytest.importorskip("kernels.step.triton_served")
    run, driver, scratch = launching(), Driver([8, 8, 8, 4]), torch.ones(5)
    module, x = toy_module(scratch), torch.zeros(3, 16, dtype=torch.bfloat16)
    module.parts = [(64, "toy w", [], [scratch])]
    with torch.no_grad(), stubbed(driver, candidate(run)):
        module(x)
        kept = driver.launches[-1][1][1]
        for _ in range(2):
            served.anew(module)(x)
            assert driver.launches[-1][1][1] != kept == scratch.data_ptr()
        module(x)
        assert driver.launches[-1][1][1] == kept
        assert len(run.ran) == 3  # type: ignore[attr-defined]


def test_a_plan_with_another_stream_launches_there(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, module, x = Driver([8, 8, 8, 4]), toy_module(torch.zeros(5)), torch.zeros(3, 16, dtype=torch.bfloat16)
    with torch.no_grad(), stubbed(driver, candidate(launching())):
        for stream in (5, 5, 9, None, 5):
            monkeypatch.setattr(cuda, "stream_of", lambda device, stream=stream: stream)
            module(x)
            assert driver.launches[-1][0] == stream


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class WatchingFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_call_that_something_watches_goes_through_the_dispatcher() -> None:
    x = torch.ones(2)
    with torch.no_grad():
        assert operators.direct(x, x)
        assert not operators.direct(x, torch.nn.Parameter(x))
        for watched in (Watching, WatchingFunctions, torch.enable_grad, torch.profiler.profile):
            with watched():
                assert not operators.direct(x), watched
        seen: list[bool] = []

        def note(t: torch.Tensor) -> torch.Tensor:
            seen.append(operators.direct(t))
            return t + 0

        torch.func.vmap(note)(x)
        torch.jit.trace(note, x, check_trace=False)
        torch.fx.experimental.proxy_tensor.make_fx(note)(x)
        assert seen == [False] * 3
    with torch.inference_mode():
        assert operators.direct(x)


def test_tensor_maps_are_made_once_for_an_address() -> None:
    def over(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> bytes:
        return cuda_driver.tensor_map(x.data_ptr(), "bf16", 3, 16, 3)

    driver = Driver([8, 8, 8, 4, 128])
    x, other = torch.zeros(3, 16, dtype=torch.bfloat16), torch.ones(3, 16, dtype=torch.bfloat16)
    with torch.no_grad(), stubbed(driver, candidate(run := launching(over))):
        for given in (x, other, x, other):
            linear(given, torch_weight)
            assert driver.launches[-1][1][4] == given.data_ptr()
        assert (driver.maps, len(run.ran)) == (2, 1)  # type: ignore[attr-defined]


torch_weight = torch.zeros(5)
UNKNOWN = torch.zeros(3)


@pytest.mark.parametrize(
    ("extra", "size"),
    [
        (lambda x, w, y: UNKNOWN, 8),
        (lambda x, w, y: x.view(-1)[4:], 8),
        (lambda x, w, y: cuda.i64(UNKNOWN.data_ptr()), 8),
        (lambda x, w, y: bytes(16), 16),
        (lambda x, w, y: cuda.i32(int(x.sum())), 4),
    ],
    ids=["a tensor of its own", "part of x", "an address as a number", "bytes", "a number from the values"],
)
def test_what_a_plan_cannot_know_is_never_repeated(extra: Any, size: int) -> None:
    run, driver = launching(extra), Driver([8, 8, 8, 4, size])
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    with torch.no_grad(), stubbed(driver, candidate(run)):
        for _ in range(3):
            linear(x, torch_weight)
    assert len(run.ran) == len(driver.launches) == 3  # type: ignore[attr-defined]


def counted(run: Any) -> tuple[Any, Any, list[int], list[int]]:
    """(a kernel's run, a driver whose launches do nothing, one entry for each call of run, one for each launch)."""
    ran, launched = list[int](), list[int]()
    driver = SimpleNamespace(**{name: getattr(Driver([]), name) for name in dir(Driver) if name.startswith("cu")})

    def launch(*_: Any) -> int:
        launched.append(1)
        return 0

    def running(args: Tensors, out: Tensors) -> None:
        ran.append(1)
        run(args, out)

    driver.cuLaunchKernelEx = launch
    return running, driver, ran, launched


def test_a_mixtures_launches_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of few tokens, else two. Its Python runs once: no torch operator in it, and every pointer is known, that of
    no shared expert too.
    """
    monkeypatch.setattr(cuda_experts.hopper, "multiprocessors", lambda device: 132)
    run, driver, ran, launched = counted(cuda_experts.run)
    able = candidate(run)
    few = [moe_cases._workload(1, 8, 2, 64, 64), moe_cases._workload(2, 8, 2, 64, 128, shared=64)]
    for workload, launches in zip((*few, MIXTURE), (1, 1, 2), strict=True):
        inputs = moe_cases.inputs(workload, 0)
        kept = cuda_experts.prepare(inputs)
        between = {name: kept.pop(name) for name in cuda_experts.SCRATCH}
        given = [*kept.values()], [*between.values()], " ".join(("toy", *kept, *between))
        with torch.no_grad(), stubbed(driver, able):
            for calls in (1, 2, 3):
                OP.moe(inputs["x"].clone(), inputs["logits"].clone(), *given)
                assert len(launched) == calls * launches
        assert len(ran) == 1
        ran.clear()
        launched.clear()


@pytest.mark.parametrize("raw", [0, 1])
@pytest.mark.parametrize("name", ["cuda_segments", "cuda_segments_in_scan"])
def test_a_split_scan_is_planned_with_all_its_launches(name: str, raw: int) -> None:
    """So a later call asks torch for nothing, and nothing waits for the device."""
    kernel = pytest.importorskip(f"kernels.gdn.{name}")
    problem = gdn_cases._prefill(330, (1, 2), D=128, dtype="bf16", qk_l2norm=raw)
    inputs, (run, driver, ran, launched) = gdn_cases.inputs(problem, 0, "cpu"), counted(kernel.run)
    made, mark = kernel.prepare(inputs, segments.Plan(2, 1, 0.0, 3)), " !raw_qk" * raw
    route, tables, scratch = gdn_ops.routed("toy", inputs, made, mark)
    with torch.no_grad(), stubbed(driver, candidate(run)):
        for calls in (1, 2, 3):
            given = [inputs[n].clone() for n in SCAN]
            OP.gdn_prefill(*given, tables, scratch, route)
            assert len(launched) == calls * (4 if name == "cuda_segments" else 3)
    assert len(ran) == 1


def test_one_tensor_given_twice_is_not_planned() -> None:
    driver, x = Driver([8, 8, 8, 4]), torch.zeros(3, 16, dtype=torch.bfloat16)
    run = launching()
    with torch.no_grad(), stubbed(driver, candidate(run)):
        linear(x, x)
        linear(x, x)
    assert len(run.ran) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("current", [OTHER, 0])
def test_a_launch_finds_its_context_and_leaves_the_callers(current: int) -> None:
    driver = Driver([8, 8, 8, 4], current=current)
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    with torch.no_grad(), stubbed(driver, candidate(launching())):
        linear(x, torch_weight)
        linear(x, torch_weight)
    assert driver.contexts == [CONTEXT, CONTEXT]
    assert (driver.current or 0) == current


def test_a_failed_launch_says_the_drivers_code() -> None:
    driver, x = Driver([8, 8, 8, 4]), torch.zeros(3, 16, dtype=torch.bfloat16)
    with torch.no_grad(), stubbed(driver, candidate(launching())):
        linear(x, torch_weight)
        driver.code = 700
        with pytest.raises(RuntimeError, match="CUresult 700"):
            linear(x, torch_weight)


# On a GPU -------------------------------------------------------------------------------------------------------------


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a call, and what it writes."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 24, 130])
def test_a_linear_on_the_gpu_eager_planned_captured_and_compiled(tokens: int) -> None:
    workload = nvfp4_cases._measure(tokens, 5120, 6144, "")
    inputs = nvfp4_cases.inputs(workload, 0, "cuda")
    module = nvfp4_ops.Linear(*(inputs[n] for n in WEIGHT), tokens=(tokens, tokens))
    limits, wanted = nvfp4_cases.tolerance(workload, nvfp4_ops.EXACT), nvfp4_reference(inputs)
    x = inputs["x"].clone()
    first = module(x)
    with torch.no_grad():  # without the dispatcher
        module(x)
        planned, elsewhere = module(x), module(x.clone())
        graph, replayed = captured(lambda: module(x))
    x.mul_(2)
    graph.replay()
    x.div_(2)
    compiled = torch.compile(module, fullgraph=True)(x)
    for y in (first, planned, elsewhere, replayed / 2, compiled):
        assert accuracy.compare("y", y, wanted["y"], limits["y"]).ok


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 257])
def test_a_mixture_on_the_gpu_eager_planned_captured_and_compiled(tokens: int) -> None:
    workload = next(w for w in moe_cases.WORKLOADS if (w["T"], w["experts"], w["routing"]) == (tokens, 256, "uniform"))
    inputs = moe_cases.inputs(workload, 0, "cuda")
    weights = {name: t for name, t in inputs.items() if name not in (*moe_cases.ACTIVATIONS, "top_k")}
    module, given = moe_ops.Layer(weights, top_k=8, tokens=(1, 512)), (inputs["x"], inputs["logits"])
    limit, wanted = moe_cases.tolerance(workload, moe_ops.EXACT)["y"], moe_reference(inputs)["y"]
    first = module(*given)
    with torch.no_grad():  # without the dispatcher
        module(*given)
        planned, elsewhere = module(*given), module(*(t.clone() for t in given))
        graph, replayed = captured(lambda: module(*given))
    graph.replay()
    compiled = torch.compile(module, fullgraph=True)(*given)
    for y in (first, planned, elsewhere, replayed, compiled):
        assert accuracy.compare("y", y, wanted, limit).ok


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_an_operator_on_the_gpu_is_what_its_schema_says(name: str) -> None:
    operator, arguments = calls("cuda")[name]
    found = torch.library.opcheck(operator.default, arguments, test_utils=("test_faketensor", "test_schema"))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_or_compiled_operator_is_the_eager_one(name: str) -> None:
    operator, arguments = calls("cuda")[name]
    states = [t for t in arguments if isinstance(t, torch.Tensor) and name == "gdn_decode"][5:6]
    kept = [t.clone() for t in states]
    eager = [t.clone() for t in torch.utils._pytree.tree_leaves(operator(*arguments))]
    for state, before in zip(states, kept, strict=True):
        state.copy_(before)
    compiled = torch.utils._pytree.tree_leaves(torch.compile(operator.default, fullgraph=True)(*arguments))
    for got, wanted in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    graph, out = captured(lambda: operator(*arguments))
    for state, before in zip(states, kept, strict=True):
        state.copy_(before)
    graph.replay()
    for got, wanted in zip(torch.utils._pytree.tree_leaves(out), eager, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    fresh: dict[str, Any] = calls("cpu")
    on_cpu = torch.utils._pytree.tree_leaves(fresh[name][0](*fresh[name][1]))
    for got, wanted in zip(eager, on_cpu, strict=True):
        assert float((got.cpu().float() - wanted.float()).norm() / wanted.float().norm()) < 0.02


@pytest.mark.gpu
def test_a_thread_that_has_not_touched_the_gpu_may_launch() -> None:
    import threading

    operator, arguments = calls("cuda")["nvfp4_linear"]
    wanted, seen = operator(*arguments), []
    operator(*arguments)
    thread = threading.Thread(target=lambda: seen.append(operator(*arguments)))
    thread.start()
    thread.join()
    torch.testing.assert_close(seen[0], wanted, rtol=0, atol=0)
