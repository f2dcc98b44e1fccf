"""kernels/gdn/scan.cu, the two launches, on a CPU: on_cpu/sm90.cuh stands in for the PTX, g++ does the rest.

That holds every index, fragment layout, descriptor, ring and barrier to the reference; what it cannot show is rounding
inside the tensor core, the asynchronous proxy and speed.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import pytest
import torch

from kernels.common import Tensors, Workload
from kernels.gdn import cases, cuda_scan
from kernels.gdn.reference import reference
from lab.check.accuracy import compare
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, Stopped, built, needs_compiler

pytestmark = needs_compiler

ENTRY = """
struct Range { const void* begin; long bytes; };
static std::vector<Range> of_earlier_grid;  // no thread reads it before it has waited for that grid
static void not_too_early(const void* from, u32) {
    for (const Range& x : of_earlier_grid)
        if (!cpu.now->waited && from >= x.begin && from < (const char*)x.begin + x.bytes) stop("read too early");
}
extern "C" void prepare_on_cpu(int chunks, int hk, const u16* q, const u16* k, const float* g, const float* beta,
                               const int* table, char* workspace, float scale, int hv, int normalise, u16* q_fp16,
                               u16* k_fp16) {
    on_async_read = nullptr;
    launch_on_cpu({.grid = {chunks, hk, 1}, .threads = 128, .copies = AT_WAIT}, [=] {
        PREPARE_NAME(q, k, g, beta, table, workspace, scale, hk, hv, normalise, q_fp16, k_fp16);
    });
}
extern "C" void scan_on_cpu(int x, int hv, int sequences, int threads, const TensorMap* maps, const u16* q,
                            const u16* k, const u16* v, const char* workspace, const void* initial, void* final_state,
                            u16* o, const int* bounds, const int* offsets, int hk, int state_type,
                            float scale, long workspace_bytes, long converted_bytes) {
    of_earlier_grid = {{workspace, workspace_bytes}, {q, converted_bytes}, {k, converted_bytes}};
    on_async_read = not_too_early;
    launch_on_cpu({.grid = {x, hv, sequences}, .threads = threads, .copies = AT_WAIT}, [=] {
        SCAN_NAME(maps[0], maps[1], maps[2], maps[3], q, k, v, workspace, initial, final_state, o, bounds, offsets, hk,
                  hv, state_type, scale);
    });
}
extern "C" void sizes_on_cpu(int* to) {
    const int found[] = {Preparation<DIM, false, RECOMPUTE>::BYTES,
                         STAGES * Stage<DIM, GROUPS, RECOMPUTE>::BYTES + GROUPS * TILE, BLOCK, RECOMPUTE_BLOCK,
                         TRIANGLE, triangle_step(0), triangle_step(1), triangle_step(2), triangle_step(3)};
    for (int n : found) *to++ = n;
}
"""


def two_launches(variant: cuda_scan.ScanVariant, change: Change = UNCHANGED) -> StandIn:
    """A library with a scan and its preparation as functions of the host."""
    names = [name.partition("_d")[2].partition("_") for name in (variant.preparation, variant.kernel)]
    kept = tuple(f"{x}({dim}, {name}," for x, (dim, _, name) in zip(("PREPARE", "SCAN"), names, strict=True))
    entry = ENTRY.replace("PREPARE_NAME", variant.preparation).replace("SCAN_NAME", variant.kernel)
    values = {"DIM": variant.dim, "GROUPS": variant.groups, "STAGES": cuda_scan.STAGES}
    for name, value in values.items():
        entry = entry.replace(name, str(value))
    entry = entry.replace(" RECOMPUTE>", f" {str(variant.recompute).lower()}>")
    keep = lambda line: line.startswith(kept) or not line.startswith(("PREPARE(", "SCAN("))  # noqa: E731
    return built(cuda_scan.SOURCE.path, entry, change, keep=keep)


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    """A scan -> a library with it and its preparation as functions of the host."""
    return functools.cache(two_launches)


def pointer(x: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def tensor_map(x: torch.Tensor) -> bytes:
    columns = x.shape[-2] * x.shape[-1]
    return struct.pack("<qqqq", x.data_ptr(), x.numel() // columns, columns, 64).ljust(128, b"\0")


def tensor_maps(*tensors: torch.Tensor) -> torch.Tensor:
    """Their maps, on 64 bytes."""
    room = torch.zeros(128 * len(tensors) + 64, dtype=torch.uint8)
    aligned = room[-room.data_ptr() % 64 :][: 128 * len(tensors)]
    aligned.copy_(torch.frombuffer(bytearray(b"".join(map(tensor_map, tensors))), dtype=torch.uint8))
    return aligned


def run(library: Any, variant: cuda_scan.ScanVariant, inputs: Tensors, out: Tensors) -> Tensors:
    wide = variant.dtype == cuda_scan.WIDE
    args = (cuda_scan._prepare_wide if wide else cuda_scan._prepare)(inputs)
    args["workspace"] = cuda_scan.workspace(args, variant).fill_(0x7F)
    q, k, v = args.get("q_fp16", args["q"]), args.get("k_fp16", args["k"]), args["v"]
    heads_k, (heads_v, dim) = k.shape[-2], v.shape[-2:]
    maps = tensor_maps(k, q, v, out["o"])
    named = [args[n] for n in ("q", "k", "g", "beta", "chunks", "workspace")]
    converted = [pointer(args.get(n)) for n in ("q_fp16", "k_fp16")]
    library.prepare_on_cpu(
        args["chunks"].shape[0], heads_k, *map(pointer, named), ctypes.c_float(dim**-0.5), heads_v,
        int("raw_qk" in args), *converted,
    )  # fmt: skip
    named = [q, k, v, args["workspace"], args["initial_state"], out["final_state"], out["o"]]
    named += [args["cu_seqlens"], args["chunk_offsets"]]
    library.scan_on_cpu(
        dim // (64 * variant.groups), heads_v, args["chunk_offsets"].numel(), variant.threads,
        pointer(maps), *map(pointer, named), heads_k,
        0 if args["initial_state"].dtype == torch.bfloat16 else 2, ctypes.c_float(dim**-0.5),
        ctypes.c_long(args["workspace"].numel()), ctypes.c_long(2 * k.numel() if wide else 0),
    )  # fmt: skip
    return args


def problems(variant: cuda_scan.ScanVariant) -> tuple[Workload, ...]:
    """A ragged batch (raw where scores are not recomputed), with half a head per CTA similar keys over six chunks; D =
    64 in every regime and with four v heads to each of two k heads; one token, one whole chunk, and 8,193 tokens."""
    wide = variant.dtype == cuda_scan.WIDE
    shape: dict[str, Any] = {"D": variant.dim, "dtype": "bf16" if wide else variant.dtype}
    shape["out_dtype"] = "f32" if wide else ""
    ragged = cases._prefill(140, (1, 3), lengths="64-1-75", qk_l2norm=int(not variant.recompute), **shape)
    found = [ragged, cases._prefill(330, (1, 1), regime="similar", **shape)][: 3 - variant.groups]
    if variant.dim == 64 and variant.dtype == "bf16":
        found += [cases._prefill(70, (1, 1), regime=r, **shape) for r in ("keep", "forget", "beta0", "beta1")]
        found += [cases._prefill(65, (2, 8), **shape)]
    if variant.dim == 128 and variant.groups == 1 and variant.dtype != "fp16":
        found += [cases._prefill(T, (1, 1), **shape) for T in (1, 64, 8193)]
    return tuple(found)


PROBLEMS = tuple((variant, problem) for variant in cuda_scan.VARIANTS for problem in problems(variant))


def assert_within(problem: Workload, inputs: Tensors, out: Tensors, precision: str) -> None:
    wanted = reference(inputs)
    for name, limit in cases.tolerance(problem, precision).items():
        error = compare(name, out[name], wanted[name], limit)
        assert error.ok, (problem.id, error)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "problem"), PROBLEMS, ids=lambda x: getattr(x, "kernel", None) or x.id)
def test_on_cpu(on_cpu: Any, variant: cuda_scan.ScanVariant, problem: Workload) -> None:
    inputs = cases.inputs(problem, 1, "cpu")
    out = cases.outputs(problem, inputs)
    run(on_cpu(variant), variant, inputs, out)
    assert_within(problem, inputs, out, "fp16" if variant.dtype == cuda_scan.WIDE else variant.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("variant", cuda_scan.VARIANTS, ids=lambda v: v.kernel)
def test_the_sizes_of_host_and_kernels_agree(on_cpu: Any, variant: cuda_scan.ScanVariant) -> None:
    """As the source computes them: shared memory, the block of a chunk, and where the steps of a triangle lie."""
    found = (ctypes.c_int * 9)()
    on_cpu(variant).sizes_on_cpu(found)
    prepare_bytes, scan_bytes, block_bytes, recompute_bytes, triangle_bytes, *steps = found
    assert prepare_bytes == cuda_scan.PREPARATIONS[variant.preparation]
    barriers = 8 * ((2 + variant.recompute) * cuda_scan.STAGES + 2 * variant.groups)
    assert scan_bytes + barriers <= variant.shared_bytes < scan_bytes + barriers + 128
    assert block_bytes == cuda_scan.BLOCK_BYTES == 2 * triangle_bytes + 1024
    assert recompute_bytes == cuda_scan.RECOMPUTE_BLOCK_BYTES == triangle_bytes + 256
    assert block_bytes % 1024 == recompute_bytes % 128 == 0
    ends = [step + (64 - 16 * s) * 32 for s, step in enumerate(steps)]  # rows 16 s and on, of 32 bytes
    assert ends == [*steps[1:], triangle_bytes]


@pytest.mark.slow
def test_raw_rows_of_any_size_become_fp16(on_cpu: Any) -> None:
    """Rows from 2^-40 to 2^40, and one of zeros: far outside fp16, exact once scaled by a power of two."""
    variant = next(v for v in cuda_scan.VARIANTS if v.dtype == cuda_scan.WIDE)
    problem = cases._prefill(70, (1, 1), D=128, dtype="bf16", out_dtype="f32", qk_l2norm=1)
    inputs = cases.inputs(problem, 1, "cpu")
    for name in ("q", "k"):
        power = torch.randint(-40, 41, (1, 70, 1, 1), generator=torch.Generator().manual_seed(3))
        inputs[name] = torch.ldexp(inputs[name].float(), power).to(torch.bfloat16)
        inputs[name][:, 7] = 0
    out = cases.outputs(problem, inputs)
    run(on_cpu(variant), variant, inputs, out)
    assert_within(problem, inputs, out, "fp16")


def _of(inputs: Tensors, spans: list[slice], sequences: list[int], dense: bool) -> Tensors:
    """Some sequences of a ragged batch, as a ragged or (of equal lengths) a dense one."""
    own = ("q", "k", "v", "g", "beta")
    found = {n: torch.cat([inputs[n][:, span] for span in spans], dim=0 if dense else 1).contiguous() for n in own}
    found["initial_state"] = inputs["initial_state"][sequences].contiguous()
    if not dense:
        bounds = [0, *torch.tensor([span.stop - span.start for span in spans]).cumsum(0).tolist()]
        found["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", cuda_scan.WIDE])
def test_heads_per_CTA_and_company_give_the_same_bits(on_cpu: Any, dtype: str) -> None:
    """One sequence, half a head and a head per CTA, recomputed scores too; alone, in a dense batch, in ragged ones."""
    wide = dtype == cuda_scan.WIDE
    axes: dict[str, Any] = {"D": 128, "dtype": "bf16", "out_dtype": "f32" if wide else ""}
    problem = cases._prefill(217, (1, 1), lengths="71-75-71", **axes)
    inputs = cases.inputs(problem, 1, "cpu")
    first, middle, last = slice(0, 71), slice(71, 146), slice(146, 217)
    batches = {  # where the sequence of `last` stands: row of o, first token, number of its state
        "alone": (_of(inputs, [last], [2], True), (0, 0, 0)),
        "dense": (_of(inputs, [first, last], [0, 2], True), (1, 0, 1)),
        "ragged": (_of(inputs, [first, middle, last], [0, 1, 2], False), (0, 146, 2)),
        "first of a ragged batch": (_of(inputs, [last, middle], [2, 1], False), (0, 0, 0)),
    }
    found: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}
    for variant in [v for v in cuda_scan.VARIANTS if (v.dim, v.dtype) == (128, dtype)]:
        for name, (own, (row, at, state)) in batches.items():
            out = cases.outputs(problem, own)
            run(on_cpu(variant), variant, own, out)
            found[name, variant.kernel] = out["o"][row, at : at + 71], out["final_state"][state]
    wanted = found["alone", f"gdn_scan_d128_{dtype}_g1"]
    assert len(found) == 4 * (2 if wide else 3)
    assert all(x.isfinite().all() for x in wanted)
    for key, got in found.items():
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True)), key


@pytest.mark.slow
@pytest.mark.parametrize(("largest", "fits"), [(6e4, True), (7e4, False)])
def test_the_range_of_v_is_fp16s(on_cpu: Any, largest: float, fits: bool) -> None:
    """bf16 activations too: the corrected values are packed in fp16, and beyond 65,504 they overflow, not saturate."""
    variant = cuda_scan.ScanVariant(64, "bf16", 1)
    problem = cases._prefill(70, (1, 1), dtype="bf16")
    inputs = cases.inputs(problem, 1, "cpu")
    inputs["v"] = (inputs["v"].float() * (largest / inputs["v"].float().abs().max())).to(torch.bfloat16)
    out = cases.outputs(problem, inputs)
    run(on_cpu(variant), variant, inputs, out)
    if fits:
        assert_within(problem, inputs, out, "bf16")
    else:
        assert not out["final_state"].isfinite().all()


FENCES = {  # the variant's groups, whether it recomputes scores; what is changed
    "k and q of a preparation": (
        1,
        False,
        ("    fence_proxy_async_shared();\n    meet_all<TEAM>(ahead.team);", "    meet_all<TEAM>(ahead.team);"),
    ),
    "results of a preparation": (
        1,
        False,
        ("        fence_proxy_async_shared();\n        if (thread == 0) tma", "        if (thread == 0) tma"),
    ),
    "the zeros of X and P": (
        1,
        False,
        ("    fence_proxy_async_shared();\n    mbarrier_init_fence();", "    mbarrier_init_fence();"),
    ),
    "a short last chunk": (
        1,
        False,
        ("            fence_proxy_async_shared();\n            __syncwarp();", "            __syncwarp();"),
    ),
    "outputs": (
        1,
        False,
        (
            "        fence_proxy_async_shared();\n        __syncwarp();\n        if (lane == 0)",
            "        __syncwarp();\n        if (lane == 0)",
        ),
    ),
    "recomputed scores": (
        2,
        True,
        (
            "        fence_proxy_async_shared();\n        __syncwarp();\n        if ((thread",
            "        __syncwarp();\n        if ((thread",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FENCES)
def test_a_missing_proxy_fence_stops_the_launch(name: str) -> None:
    """A whole chunk and a short one."""
    groups, recompute, change = FENCES[name]
    variant = cuda_scan.ScanVariant(128, "bf16", groups, recompute=recompute)
    inputs = cases.inputs(cases._prefill(70, (1, 1), D=128, dtype="bf16"), 1, "cpu")
    with pytest.raises(Stopped, match="no proxy fence"):
        run(
            two_launches(variant, change),
            variant,
            inputs,
            cases.outputs(cases._prefill(70, (1, 1), D=128, dtype="bf16"), inputs),
        )


EARLY = "        if ((thread & 31) == 0) mbarrier_arrive(scores.full(place.stage));\n"
BROKEN = {
    "vectors and P read before they are made": ("        if (RECOMPUTE) scores.consumer_wait(place);\n", ""),
    "arrived ahead of the stores": (
        "        char* to = stage + At::P;\n",
        EARLY + "        char* to = stage + At::P;\n",
    ),
    "one row of the scores lower": ("to += WARP * 512 + quad * 32", "to += WARP * 512 + (quad ^ 1) * 32"),
    "a value above the diagonal": ("quad < 2 * pair + 1) high", "quad < 2 * pair) high"),
    "decays of the chunk's first token": ("last = sum[C - 1], decay", "last = sum[0], decay"),
    "the scores of the wrong stage": ("At::Q);\n        float qk", "At::Q + 16);\n        float qk"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", BROKEN.values(), ids=[*BROKEN])
def test_a_broken_recompute_of_scores_is_seen(on_cpu: Any, change: Change) -> None:
    """Beside the right one, with threads that make the scores only when all others wait for them."""
    variant = cuda_scan.ScanVariant(128, "bf16", 2, recompute=True)
    problem = cases._prefill(330, (1, 1), D=128, dtype="bf16")
    inputs = cases.inputs(problem, 1, "cpu")

    def attempt(library: Any) -> None:
        out = cases.outputs(problem, inputs)
        library.slow_on_cpu(384)
        run(library, variant, inputs, out)
        assert_within(problem, inputs, out, "bf16")

    attempt(on_cpu(variant))
    broken = two_launches(variant, change)
    with pytest.raises(AssertionError):
        attempt(broken)
