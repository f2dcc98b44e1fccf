"""kernels/gdn/segments.cu, behind the preparation of scan.cu, on a CPU: maps, composition and scans of segments.

Every read of what an earlier launch wrote is held to a wait for it. Not shown: rounding inside the tensor core, speed.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import pytest
import torch

from kernels.common import Tensors, Workload
from kernels.gdn import cases, cuda_scan, cuda_segments, segments
from kernels.gdn.reference import reference
from lab.check.accuracy import compare
from tests.kernels.gdn import test_gdn_scan_cpu as two
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, built, needs_compiler, unless_stopped

pytestmark = needs_compiler

ENTRY = """
struct Range { const void* begin; long bytes; };
static Range of_preparation;
static void not_too_early(const void* from, u32) {
    const Range& x = of_preparation;
    if (!cpu.now->waited && from >= x.begin && from < (const char*)x.begin + x.bytes) stop("read too early");
}
extern "C" void segments_on_cpu(int kernel, int x, int hv, int count, int threads, const TensorMap* maps, const u16* q,
                                const u16* k, const u16* v, const char* workspace, const void* initial,
                                void* final_state, u16* o, const int4* rows, float* starts, float* transitions, int hk,
                                int state_type, long workspace_bytes) {
    of_preparation = {workspace, workspace_bytes};
    on_async_read = not_too_early;
    const auto run = [&](auto launched) {
        launch_on_cpu({.grid = {x, hv, count}, .threads = threads, .copies = AT_WAIT}, [=] {
            launched(maps[0], maps[1], maps[2], maps[3], q, k, v, workspace, initial, final_state, o, rows, starts,
                     transitions, hk, hv, state_type);
        });
    };
    if (kernel == 0) run(gdn_segment_maps_d128_TYPE);
    else if (kernel == 1) run(gdn_segment_scan_d128_TYPE_g1);
    else run(gdn_segment_scan_d128_TYPE_g2);
}
extern "C" void compose_on_cpu(int x, int hv, int count, int threads, float* starts, const float* transitions,
                               const int* firsts) {
    on_async_read = nullptr;
    launch_on_cpu({.grid = {x, hv, count}, .threads = threads, .copies = AT_WAIT},
                  [=] { gdn_segment_compose_d128(starts, transitions, firsts, hv); });
}
extern "C" void sizes_on_cpu(int* to) {
    const int found[] = {SCAN_STAGES, MAP_STAGES * MapStage<128>::BYTES + 2 * 8 * MAP_STAGES,
                         COLUMNS, 4 * (128 * COLUMNS + PARTS * 128 * SUM_STRIDE)};
    for (int n : found) *to++ = n;
}
"""


def launches(dtype: str = "bf16", change: Change = UNCHANGED) -> StandIn:
    keep = lambda line: f"(128, {dtype}," in line or not line.startswith(("MAPS(128", "SCANS(128"))  # noqa: E731
    return built(cuda_segments.SOURCE.path, ENTRY.replace("TYPE(", f"{dtype}(").replace("_TYPE", f"_{dtype}"), change,
                 keep=keep)  # fmt: skip


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    """Of a type: the preparation's library, and that of the launches behind it."""
    return functools.cache(lambda dtype: (two.two_launches(cuda_scan.ScanVariant(128, dtype, 1)), launches(dtype)))


def run(libraries: tuple[Any, Any], inputs: Tensors, out: Tensors, plan: segments.Plan) -> dict[str, Any]:
    preparation, own = libraries
    args = cuda_segments.prepare(inputs, plan)
    args["workspace"].fill_(0x7F)
    for name in ("starts", "transitions"):
        args[name].fill_(float("nan"))
    q, k, v = (args[n] for n in "qkv")
    heads_k, (heads_v, dim), pointer = k.shape[-2], v.shape[-2:], two.pointer
    given = [args[n] for n in ("q", "k", "g", "beta", "chunks", "workspace")]
    preparation.prepare_on_cpu(
        args["chunks"].shape[0], heads_k, *map(pointer, given), ctypes.c_float(dim**-0.5), heads_v,
        int("raw_qk" in args), None, None,
    )  # fmt: skip
    maps = two.tensor_maps(k, q, v, out["o"])

    def launch(kernel: int, rows: torch.Tensor, halves: int, threads: int) -> None:
        given = [maps, q, k, v, args["workspace"], args["initial_state"], out["final_state"], out["o"], rows]
        own.segments_on_cpu(
            kernel, 2 // halves, heads_v, rows.shape[0], threads, *map(pointer, given), pointer(args["starts"]),
            pointer(args["transitions"]), heads_k, 0 if args["initial_state"].dtype == torch.bfloat16 else 2,
            ctypes.c_long(args["workspace"].numel()),
        )  # fmt: skip

    launch(0, args["mapped"], 1, 384)
    if args["scanned"].numel():
        own.compose_on_cpu(
            8, heads_v, args["firsts"].numel() - 1, cuda_segments.COMPOSE_THREADS,
            *(pointer(args[n]) for n in ("starts", "transitions", "firsts")),
        )  # fmt: skip
        launch(args["groups"], args["scanned"], args["groups"], 128 * (args["groups"] + 1))
    return args


def split(chunks: int, groups: int) -> segments.Plan:
    return segments.Plan(chunks, groups, 0.0, 0)


SHAPE: dict[str, Any] = {"D": 128, "dtype": "bf16"}
PROBLEMS = (  # the problem, chunks a segment, halves of a head per block of the last scan
    (cases._prefill(330, (1, 2), **SHAPE), 1, 1),
    (cases._prefill(330, (1, 2), **SHAPE), 2, 2),
    (cases._prefill(524, (1, 3), lengths="64-1-330-129", qk_l2norm=1, **SHAPE), 1, 2),
    (cases._prefill(524, (2, 4), lengths="320-75-1-128", **SHAPE), 2, 1),
    (cases._prefill(330, (1, 1), D=128, dtype="fp16"), 1, 1),
    *((cases._prefill(520, (1, 1), regime=r, **SHAPE), 2, 2) for r in ("keep", "similar", "beta0", "beta1", "forget")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "chunks", "groups"), PROBLEMS, ids=lambda x: getattr(x, "id", str(x)))
def test_on_cpu(on_cpu: Any, problem: Workload, chunks: int, groups: int) -> None:
    inputs = cases.inputs(problem, 1, "cpu")
    out = cases.outputs(problem, inputs)
    run(on_cpu(problem["dtype"]), inputs, out, split(chunks, groups))
    two.assert_within(problem, inputs, out, str(problem["dtype"]))


@pytest.mark.slow
def test_two_segments_have_the_bits_of_the_whole_scan(on_cpu: Any) -> None:
    problem = cases._prefill(256, (1, 2), **SHAPE)
    inputs = cases.inputs(problem, 1, "cpu")
    out, whole = cases.outputs(problem, inputs), cases.outputs(problem, inputs)
    run(on_cpu("bf16"), inputs, out, split(2, 1))
    variant = cuda_scan.ScanVariant(128, "bf16", 1)
    two.run(on_cpu("bf16")[0], variant, inputs, whole)
    # The first ends where the second starts, and nothing is composed.
    assert torch.equal(out["o"], whole["o"])
    assert torch.equal(out["final_state"], whole["final_state"])


@pytest.mark.slow
def test_the_sizes_of_host_and_kernels_agree(on_cpu: Any) -> None:
    found = (ctypes.c_int * 4)()
    on_cpu("bf16")[1].sizes_on_cpu(found)
    stages, map_bytes, columns, compose_bytes = found
    assert stages == cuda_scan.STAGES
    assert map_bytes <= cuda_segments.MAP_SHARED
    assert (columns, compose_bytes) == (cuda_segments.COLUMNS, cuda_segments.COMPOSE_SHARED)


BROKEN: dict[str, Change] = {
    "a map from zero": ("? 1.0f : 0.0f;", "? 0.0f : 0.0f;"),
    "a map that is not transposed": ("to + (long)column * D + k) = float2{t[i], t[i + 1]}",
                                     "to + (long)(k + 1) * D + column / 2 * 2) = float2{t[i], t[i + 1]}"),
    "values in A": ("u32 v[4][4] = {};\n        if (VALUES)\n", "u32 v[4][4] = {};\n"),
    "S in the place of B": ("float4 s = *reinterpret_cast<const float4*>(own + (i + 1) * segment)",
                            "float4 s = *reinterpret_cast<const float4*>(own + i * segment)"),
    "a quarter of the inputs left out": ("for (int p = 0; p < PARTS; p++)", "for (int p = 1; p < PARTS; p++)"),
    "the last segment's state kept back": ("if (x.ends) {", "if (x.ends && LEADS) {"),
    "the workspace read before its preparation": ("if (at == 0) wait_on_dependent_grids();", ""),
    "one stage for all": ("mbarrier_wait(empty + at_stage, phase);\n        mbarrier_arrive_expect_tx(bar, At::X",
                          "mbarrier_arrive_expect_tx(bar, At::X"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", BROKEN.values(), ids=[*BROKEN])
def test_a_broken_segment_is_seen(on_cpu: Any, change: Change) -> None:
    problem = cases._prefill(1700, (1, 1), **SHAPE)
    inputs = cases.inputs(problem, 1, "cpu")
    out = cases.outputs(problem, inputs)
    libraries = on_cpu("bf16")[0], launches("bf16", change)

    def sound() -> bool:
        run(libraries, inputs, out, split(6, 1))
        wanted = reference(inputs)
        limits = cases.tolerance(problem, "bf16")
        return all(compare(name, out[name], wanted[name], limit).ok for name, limit in limits.items())

    assert not unless_stopped(sound)
