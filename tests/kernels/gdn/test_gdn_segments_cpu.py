"""kernels/gdn/segments.cu, behind the preparation of scan.cu, on a CPU: maps, composition and scans of segments.

Every read of what an earlier launch wrote is held to a wait for it. Not shown: rounding inside the tensor core, speed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from kernels import cuda
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
extern "C" void segments_on_cpu(int kernel, int x, int y, int z, int threads, long workspace_bytes,
                                const TensorMap* maps, const u16* q, const u16* k, const u16* v, const char* workspace,
                                const void* initial, void* final_state, u16* o, const int4* rows, float* starts,
                                float* transitions, int hk, int hv, int state_type, float scale) {
    of_preparation = {workspace, workspace_bytes};
    on_async_read = not_too_early;
    const auto run = [&](auto launched) {
        launch_on_cpu({.grid = {x, y, z}, .threads = threads, .copies = AT_WAIT}, [=] {
            launched(maps[0], maps[1], maps[2], maps[3], q, k, v, workspace, initial, final_state, o, rows, starts,
                     transitions, hk, hv, state_type, scale);
        });
    };
    if (kernel == 0) run(gdn_segment_maps_d128_NAME);
    else if (kernel == 1) run(gdn_segment_scan_d128_TYPE_g1_MARK);
    else run(gdn_segment_scan_d128_TYPE_g2_MARK);
}
extern "C" void compose_on_cpu(int x, int y, int z, int threads, float* starts, const float* transitions,
                               const int* firsts, int hv) {
    on_async_read = nullptr;
    launch_on_cpu({.grid = {x, y, z}, .threads = threads, .copies = AT_WAIT},
                  [=] { gdn_segment_compose_d128(starts, transitions, firsts, hv); });
}
extern "C" void sizes_on_cpu(int* to) {
    const int found[] = {SCAN_STAGES, MAP_STAGES * MapStage<128, LEAN>::BYTES + 3 * 8 * MAP_STAGES,
                         COLUMNS, 2 * 2 * 2 * COLUMNS * PART_STRIDE};
    for (int n : found) *to++ = n;
}
"""


def launches(dtype: str = "bf16", lean: bool = True, change: Change = UNCHANGED) -> StandIn:
    """A library of one type's launches; lean: which recompute scores."""
    kept = f"(128, {dtype}"
    keep = lambda line: (kept in line and ("_lean" in line) is lean) or not line.startswith(("MAPS(128", "SCANS(128"))  # noqa: E731
    entry = ENTRY.replace("NAME", f"{dtype}_MARK").replace("_MARK", "_lean" * lean)
    entry = entry.replace("TYPE", dtype).replace("LEAN", str(lean).lower())
    return built(cuda_segments.SOURCE.path, entry, change, keep=keep)


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    """Of a type, and whether scores are recomputed: the preparation's library, and that of the launches behind it."""
    return functools.cache(
        lambda dtype, lean: (two.two_launches(cuda_scan.ScanVariant(128, dtype, 2, lean)), launches(dtype, lean))
    )


def run(libraries: tuple[Any, Any], inputs: Tensors, out: Tensors, plan: segments.Plan) -> None:
    """`cuda_segments.run`, whose launches come here."""
    args = cuda_segments.prepare(inputs, plan)
    launched_here(libraries, args, cuda_segments.SHARED, lambda: cuda_segments.run(args, out))


def launched_here(
    libraries: tuple[Any, Any], args: dict[str, Any], shared_bytes: dict[str, int], running: Callable[[], None]
) -> None:
    """`running`, whose launches come here with the arguments of the kernels; what is left in between is junk first."""
    preparation, own = libraries
    args["workspace"].fill_(0x7F)
    for name in ("starts", "transitions"):
        args[name].fill_(float("nan"))

    def launch(
        kernel: str, grid: tuple[int, ...], threads: int, arguments: list[Any], shared: int, programmatic: bool = False
    ) -> None:
        given = [two.pointer(x) if isinstance(x, torch.Tensor) else x.item() for x in arguments if type(x) is not bytes]
        given = [ctypes.c_float(x) if isinstance(x, float) else x for x in given]
        x, y, z = (*grid, 1)[:3]
        if kernel.startswith("gdn_prepare"):
            tensors, (heads_k, heads_v, raw, *_) = given[:6], given[7:]
            preparation.prepare_on_cpu(x, y, *tensors, ctypes.c_float(arguments[6].item()), heads_v, raw, None, None)
            assert heads_k == y
            return
        assert programmatic
        assert shared == shared_bytes[kernel]
        if "compose" in kernel:
            own.compose_on_cpu(x, y, z, threads, *given)
            return
        maps = torch.zeros(5 * 128, dtype=torch.uint8)
        maps = maps[-maps.data_ptr() % 64 :][: 4 * 128]
        maps.copy_(torch.frombuffer(bytearray(b"".join(arguments[:4])), dtype=torch.uint8))
        number = 0 if "maps" in kernel else args["groups"].numel()
        size = ctypes.c_long(args["workspace"].numel())
        own.segments_on_cpu(number, x, y, z, threads, size, two.pointer(maps), *given)

    with (
        mock.patch.multiple(cuda, load=lambda source, name, device, shared: name, launch=launch),
        mock.patch.multiple(cuda_scan, _map=two.tensor_map),
    ):
        running()


def split(chunks: int, groups: int) -> segments.Plan:
    return segments.Plan(chunks, groups, 0.0, 0)


SHAPE: dict[str, Any] = {"D": 128, "dtype": "bf16"}
PROBLEMS = (  # the problem, chunks a segment, halves of a head per block of the last scan
    (cases._prefill(330, (1, 2), **SHAPE), 1, 1),
    (cases._prefill(330, (1, 2), **SHAPE), 2, 2),
    (cases._prefill(524, (1, 3), lengths="64-1-330-129", qk_l2norm=1, **SHAPE), 1, 2),
    (cases._prefill(524, (2, 4), lengths="320-75-1-128", **SHAPE), 2, 1),
    (cases._prefill(330, (1, 1), D=128, dtype="fp16"), 1, 1),
    (cases._prefill(330, (2, 4), D=128, dtype="fp16", qk_l2norm=1), 2, 1),
    *((cases._prefill(520, (1, 1), regime=r, **SHAPE), 2, 2) for r in ("keep", "similar", "beta0", "beta1", "forget")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "chunks", "groups"), PROBLEMS, ids=lambda x: getattr(x, "id", str(x)))
def test_on_cpu(on_cpu: Any, problem: Workload, chunks: int, groups: int) -> None:
    inputs = cases.inputs(problem, 1, "cpu")
    out = cases.outputs(problem, inputs)
    libraries = on_cpu(problem["dtype"], not problem["qk_l2norm"])
    libraries[1].slow_on_cpu(288)
    run(libraries, inputs, out, split(chunks, groups))
    two.assert_within(problem, inputs, out, str(problem["dtype"]))


@pytest.mark.slow
def test_two_segments_have_the_bits_of_the_whole_scan(on_cpu: Any) -> None:
    problem = cases._prefill(256, (1, 2), **SHAPE)
    inputs = cases.inputs(problem, 1, "cpu")
    out, whole = cases.outputs(problem, inputs), cases.outputs(problem, inputs)
    run(on_cpu("bf16", True), inputs, out, split(2, 1))
    variant = cuda_scan.ScanVariant(128, "bf16", 1)
    two.run(two.two_launches(variant), variant, inputs, whole)
    # The first ends where the second starts, and nothing is composed.
    assert torch.equal(out["o"], whole["o"])
    assert torch.equal(out["final_state"], whole["final_state"])


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["keep", "similar", "idle"])
def test_eight_segments_err_as_the_whole_scan_does(on_cpu: Any, regime: str) -> None:
    """NOTES.md has 65,536 tokens. idle: decay and rate both slow, so that states outlive segments."""
    problem = cases._prefill(2048, (1, 1), regime=regime.replace("idle", "keep"), role="measure", **SHAPE)
    inputs = cases.inputs(problem, 1, "cpu")
    if regime == "idle":
        inputs |= {name: 1e-2 * inputs[name] for name in ("g", "beta")}
    wanted, out, whole = reference(inputs), cases.outputs(problem, inputs), cases.outputs(problem, inputs)
    run(on_cpu("bf16", True), inputs, out, split(4, 2))
    variant = cuda_scan.ScanVariant(128, "bf16", 1)
    two.run(two.two_launches(variant), variant, inputs, whole)
    for name, want in wanted.items():
        of_split, of_whole = (float((x[name].double() - want).norm() / want.norm()) for x in (out, whole))
        assert 0 < of_split < 1.1 * of_whole, name


def composed(library: StandIn, count: int, heads: int) -> float:
    """Relative error of the last state behind `count` segments of two sequences whose maps lose nothing."""
    rng = torch.Generator().manual_seed(count)
    a = torch.linalg.qr(torch.randn(2 * count, heads, 128, 128, generator=rng, dtype=torch.float64)).Q.float()
    starts = torch.randn(2 * count, heads, 128, 128, generator=rng)
    firsts = torch.tensor([0, count, 2 * count], dtype=torch.int32)
    wanted = starts.double()
    for first in (0, count):
        for i in range(first + 1, first + count - 1):
            wanted[i + 1] += a[i].double() @ wanted[i]
    given = a.transpose(-1, -2).contiguous()
    library.compose_on_cpu(
        8, heads, 2, cuda_segments.COMPOSE_THREADS, *map(two.pointer, (starts, given, firsts)), heads
    )
    return float((starts - wanted).norm() / wanted.norm())


@pytest.mark.slow
def test_composing_loses_a_2_to_the_17th_a_segment() -> None:
    """Of maps as they can be at worst, which keep all of a state; rounding A or S to bf16 once would be 2^-9."""
    assert 0 < composed(launches(), 9, 2) < 2**-16
    for product in range(3):
        change = (f"mma_16816<true>(sum[n][{product}],", "(void)(")
        assert composed(launches(change=change), 9, 2) > 2**-12


@pytest.mark.slow
@pytest.mark.parametrize("lean", [False, True])
def test_the_sizes_of_host_and_kernels_agree(on_cpu: Any, lean: bool) -> None:
    found = (ctypes.c_int * 4)()
    on_cpu("bf16", lean)[1].sizes_on_cpu(found)
    stages, map_bytes, columns, compose_bytes = found
    assert stages == cuda_scan.STAGES
    assert map_bytes <= cuda_segments.SHARED["gdn_segment_maps_d128_bf16" + "_lean" * lean]
    assert (columns, compose_bytes) == (cuda_segments.COLUMNS, cuda_segments.SHARED["gdn_segment_compose_d128"])


FACTORS = "        load_factors(factors, vectors);\n        wgmma_wait<0>(y);"
BROKEN: dict[str, Change] = {
    "a map from zero": ("? 1.0f : 0.0f;", "? 0.0f : 0.0f;"),
    "a map that is not transposed": ("to + (long)column * D + k) = float2{t[i], t[i + 1]}",
                                     "to + (long)(k + 1) * D + column / 2 * 2) = float2{t[i], t[i + 1]}"),
    "values in A": ("u32 v[4][4] = {};\n        if (VALUES)\n", "u32 v[4][4] = {};\n"),
    "S in the place of B": ("load_b(i + 1);", "load_b(i);"),
    "an eighth of the inputs left out": ("const auto store = [&](int buffer) {",
                                         "const auto store = [&](int buffer) {\n        if (warp == 5) return;"),
    "the segment before's A": ("if (i + 1 < last) load(i + 1);", ""),
    "the other buffer's S": ("store(buffer ^ 1);", "store(buffer);"),
    "no wait before the next segment": ("store(buffer ^ 1);\n        __syncthreads();", "store(buffer ^ 1);"),
    "a pair of inputs swapped": ("of[part], to[PART_STRIDE] = (u16)(of[part] >> 16);",
                                 "(of[part] >> 16), to[PART_STRIDE] = (u16)of[part];"),
    "the last segment's state kept back": ("if (x.ends) {", "if (x.ends && LEADS) {"),
    "the workspace read before its preparation": ("if (at == 0) wait_on_dependent_grids();", ""),
    "vectors read before they are made": ("if (RECOMPUTE) made.consumer_wait(place);\n" + FACTORS, FACTORS),
    "one stage for all": ("loads.producer_acquire(place);\n        loads.producer_expect(place, At::X",
                          "loads.producer_expect(place, At::X"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", BROKEN.values(), ids=[*BROKEN])
def test_a_broken_segment_is_seen(on_cpu: Any, change: Change) -> None:
    problem = cases._prefill(1700, (1, 1), **SHAPE)
    inputs = cases.inputs(problem, 1, "cpu")
    out = cases.outputs(problem, inputs)
    libraries = on_cpu("bf16", True)[0], launches("bf16", True, change)

    def sound() -> bool:
        libraries[1].slow_on_cpu(288)  # the warp of a map that makes vectors, and those that make scores
        run(libraries, inputs, out, split(6, 1))
        wanted = reference(inputs)
        limits = cases.tolerance(problem, "bf16")
        return all(compare(name, out[name], wanted[name], limit).ok for name, limit in limits.items())

    assert not unless_stopped(sound)
