"""kernels/gdn/segments_in_scan.cu, behind the preparation of scan.cu, on a CPU: maps, and scans that compose S."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import pytest
import torch

from kernels.common import Tensors, Workload
from kernels.gdn import cases, cuda_scan, segments
from kernels.gdn import cuda_segments_in_scan as in_scan
from kernels.gdn.reference import reference
from lab.check.accuracy import compare
from tests.kernels.gdn import test_gdn_scan_cpu as two
from tests.kernels.gdn import test_gdn_segments_cpu as split
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, built, needs_compiler, unless_stopped

pytestmark = needs_compiler

ENTRY = """
struct Range { const void* begin; long bytes; };
static Range of_preparation, of_maps;
static void not_too_early(const void* from, u32) {
    for (const Range& x : {of_preparation, of_maps})
        if (!cpu.now->waited && from >= x.begin && from < (const char*)x.begin + x.bytes) stop("read too early");
}
static void no_state_too_early(const void*, u32) {
    if (!cpu.now->waited) stop("a map read too early");
}
extern "C" void segments_on_cpu(int kernel, int x, int y, int z, int threads, long workspace_bytes,
                                const TensorMap* maps, const u16* q, const u16* k, const u16* v, const char* workspace,
                                const void* initial, void* final_state, u16* o, const int4* rows, float* starts,
                                float* transitions, int hk, int hv, int state_type, float scale) {
    of_preparation = {workspace, workspace_bytes};
    of_maps = {transitions, kernel ? (rows[2 * z - 1].x + 1L) * hv * 128 * 128 * 4 : 0};
    on_async_read = not_too_early;
    on_state = kernel ? std::function<void(const void*, u32)>(no_state_too_early) : nullptr;
    const auto run = [&](auto launched) {
        launch_on_cpu({.grid = {x, y, z}, .threads = threads, .copies = COPIES}, [=] {
            launched(maps[0], maps[1], maps[2], maps[3], q, k, v, workspace, initial, final_state, o, rows, starts,
                     transitions, hk, hv, state_type, scale);
        });
    };
    if (kernel == 0) run(gdn_in_scan_maps_d128_bf16MARK);
    else if (kernel == 1) run(gdn_in_scan_d128_bf16_g1MARK);
    else run(gdn_in_scan_d128_bf16_g2MARK);
}
template <int GROUPS>
static int scan_bytes() { return PieceMemory<ScanMemory<128, GROUPS, SCAN_STAGES, LEAN>>::EMPTY + 8 * SCAN_STAGES; }
extern "C" void sizes_on_cpu(int* to) {
    const int found[] = {scan_bytes<1>(), scan_bytes<2>(), MapStage<128, LEAN>::ROOM + 2 * TILE};
    for (int n : found) *to++ = n;
}
"""


def launches(lean: bool, change: Change = UNCHANGED, copies: str = "AT_WAIT") -> StandIn:
    """A library of the launches; lean: which recompute scores."""
    keep = lambda line: ("_lean" in line) is lean or not line.startswith(("MAPS(128", "SCANS(128"))  # noqa: E731
    entry = ENTRY.replace("MARK", "_lean" * lean).replace("LEAN", str(lean).lower())
    return built(in_scan.SOURCE.path, entry.replace("COPIES", copies), change, keep=keep)


@functools.cache
def libraries(lean: bool, change: Change = UNCHANGED, copies: str = "AT_WAIT") -> tuple[Any, Any]:
    """The preparation's library, and that of the launches behind it."""
    preparation = two.two_launches(cuda_scan.ScanVariant(128, "bf16", 2, lean))
    return preparation, launches(lean, change, copies)


def run(found: tuple[Any, Any], inputs: Tensors, out: Tensors, plan: segments.Plan) -> None:
    args = in_scan.prepare(inputs, plan)
    split.launched_here(found, args, in_scan.SHARED, lambda: in_scan.run(args, out))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "chunks", "groups"),
    [p for p in split.PROBLEMS if p[0]["dtype"] == "bf16"],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_on_cpu(problem: Workload, chunks: int, groups: int) -> None:
    inputs = cases.inputs(problem, 1, "cpu")
    out, again = cases.outputs(problem, inputs), cases.outputs(problem, inputs)
    lean = not problem["qk_l2norm"]
    for copies, to in (("AT_WAIT", out), ("AT_RANDOM", again)):
        found = libraries(lean, copies=copies)
        found[1].slow_on_cpu(288)
        run(found, inputs, to, split.split(chunks, groups))
    two.assert_within(problem, inputs, out, "bf16")
    assert all(torch.equal(out[name], again[name]) for name in out)  # whenever copies land


@pytest.mark.slow
def test_two_segments_have_the_bits_of_the_whole_scan() -> None:
    """Nothing is composed, and the state between them passes through memory in float32."""
    problem = cases._prefill(256, (1, 2), **split.SHAPE)
    inputs = cases.inputs(problem, 1, "cpu")
    out, whole = cases.outputs(problem, inputs), cases.outputs(problem, inputs)
    run(libraries(True), inputs, out, split.split(2, 1))
    variant = cuda_scan.ScanVariant(128, "bf16", 1)
    two.run(two.two_launches(variant), variant, inputs, whole)
    assert all(torch.equal(out[name], whole[name]) for name in out)


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["keep", "similar", "idle"])
def test_eight_segments_err_as_the_whole_scan_does(regime: str) -> None:
    """idle: decay and rate both slow, so that states outlive segments."""
    problem = cases._prefill(2048, (1, 1), regime=regime.replace("idle", "keep"), role="measure", **split.SHAPE)
    inputs = cases.inputs(problem, 1, "cpu")
    if regime == "idle":
        inputs |= {name: 1e-2 * inputs[name] for name in ("g", "beta")}
    wanted, out, whole = reference(inputs), cases.outputs(problem, inputs), cases.outputs(problem, inputs)
    run(libraries(True), inputs, out, split.split(4, 2))
    variant = cuda_scan.ScanVariant(128, "bf16", 1)
    two.run(two.two_launches(variant), variant, inputs, whole)
    for name, want in wanted.items():
        of_split, of_whole = (float((x[name].double() - want).norm() / want.norm()) for x in (out, whole))
        assert 0 < of_split < 1.1 * of_whole, name


@pytest.mark.slow
@pytest.mark.parametrize("lean", [False, True])
def test_the_sizes_of_host_and_kernels_agree(lean: bool) -> None:
    found = (ctypes.c_int * 3)()
    libraries(lean)[1].sizes_on_cpu(found)
    mark = "_lean" * lean
    for name, size in zip(("_g1", "_g2"), found, strict=False):
        assert size <= in_scan.SHARED[f"gdn_in_scan_d128_bf16{name}{mark}"] < size + 128
    assert found[2] <= in_scan.SHARED[f"gdn_in_scan_maps_d128_bf16{mark}"]


PLACE = "swizzled(row, i / 2 % 8) + 4 * pair"
BROKEN: dict[str, Change] = {
    "a map that is not transposed": (PLACE, "swizzled(column % 64, 2 * warp + i % 2) + 4 * pair"),
    "the segment before's A": ("from + i * segment", "from + (i - 1) * segment"),
    "the segment before's B": ("next[j] = ldg128(own + 512 * j);", "next[j] = ldg128(own - segment + 512 * j);"),
    "the other half's columns of B": ("(column0 + 64 * group) * D;", "(64 - column0 + 64 * group) * D;"),
    "no decay": ("sum[i] = own_c * t[i];", "sum[i] = t[i];"),
    "a map with its decay": ("row0 + row == column + 1) high -= c;", "false) high -= c;"),
    "rows 8 on by the power of row 0": ("t[4 * j + 2] = sum[4 * j + 2] * down[1]",
                                        "t[4 * j + 2] = sum[4 * j + 2] * down[0]"),
    "chunks where pieces still are": ("if (uses > 0) mbarrier_wait(pieces", "if (uses > 9) mbarrier_wait(pieces"),
    "a piece released before its products": ("wgmma_wait<0>(sum);\n            release(place.stage);",
                                             "release(place.stage);\n            for (int i = 0; i < 9; i++) others();"
                                             "\n            wgmma_wait<0>(sum);"),
    "A read before it is made": ("wait_on_dependent_grids();  // the maps", ""),
    "B read before it is made": ("wait_on_dependent_grids();  // composed, or the maps", ""),
    "a state between segments left where B is": ("if (COMPOSES && !x.ends) {", "if (COMPOSES && x.place == 1) {\n"
     "            s.final_state = joint.starts + state_row<D>(s, x.number + 1), s.final_type = FLOAT32;\n"
     "        } else if (COMPOSES && !x.ends) {"),
    "no fence ahead of a map's store": ("fence_proxy_async_shared();\n    named_barrier_sync(barrier, 128);",
                                        "named_barrier_sync(barrier, 128);"),
    "a map stored before all have written": ("named_barrier_sync(barrier, 128);", ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", [UNCHANGED, *BROKEN.values()], ids=["unchanged", *BROKEN])
def test_a_broken_scan_is_seen(change: Change) -> None:
    problem = cases._prefill(1700, (1, 1), regime="keep", **split.SHAPE)
    inputs = cases.inputs(problem, 1, "cpu")
    inputs |= {"g": torch.full_like(inputs["g"], -2e-3), "beta": 0.1 * inputs["beta"]}  # states outlive segments
    out = cases.outputs(problem, inputs)

    def sound() -> bool:
        found = libraries(True, change)
        found[1].slow_on_cpu(288)
        run(found, inputs, out, split.split(5, 1))
        wanted = reference(inputs)
        limits = cases.tolerance(problem, "bf16")
        return all(compare(name, out[name], wanted[name], limit).ok for name, limit in limits.items())

    assert unless_stopped(sound) == (change == UNCHANGED)


def error_of_idle(change: Change) -> float:
    """Of the state behind eight segments whose decay and rate are both slow, relative."""
    problem = cases._prefill(2048, (1, 1), regime="keep", role="measure", **split.SHAPE)
    inputs = cases.inputs(problem, 1, "cpu")
    inputs |= {name: 1e-2 * inputs[name] for name in ("g", "beta")}
    out = cases.outputs(problem, inputs)
    run(libraries(True, change), inputs, out, split.split(4, 2))
    want = reference(inputs)["final_state"]
    return float((out["final_state"].double() - want).norm() / want.norm())


WHOLE = """
        const auto rounded = [&](float x) { return half_to_float(float_to_half(x)); };
        if (row0 + row == column) low = rounded(low + c) - c;
        if (row0 + row == column + 1) high = rounded(high + c) - c;
        ASYNC_SHARED(u32, room"""


@pytest.mark.slow
def test_a_map_rounded_with_its_decay_shows_in_states_that_outlive_segments() -> None:
    assert error_of_idle(("        ASYNC_SHARED(u32, room", WHOLE)) > 1.3 * error_of_idle(UNCHANGED)
