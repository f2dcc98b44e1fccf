"""kernels/nvfp4/ring_decode.cu as it is, run on a CPU.

Pipelines, clusters and fragments are the kernel's own; on_cpu/sm90.cuh stands in for its PTX. Threads are fibers
in random order, copies and stores into another CTA land late and in any order, shared memory starts as junk: a barrier
that is missing shows as a wrong number or a deadlock. Timing does not show.
"""

from typing import Any

import pytest
import torch

from kernels.nvfp4 import cases, gated, ring_config, tiles
from kernels.nvfp4.reference import reference
from tests.kernels.on_cpu.nvfp4_on_cpu import accurate, library, simulated
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, needs_compiler, unless_stopped

# A programmatic launch reads x, which the kernel ahead may write, behind its wait alone.
ENTRY = """
struct Arguments {
  const unsigned char *x, *w; const float* scale; unsigned short* y; int m, n, k, k_tiles;
} given;
static void entry() {
  KERNEL(given.x, given.w, given.scale, given.y, given.m, given.n, given.k, given.k_tiles);
}
extern "C" void simulated(const void* x, const void* w, const void* scale, void* y, int m, int n, int k, int k_tiles,
                          int blocks, int threads, int bytes, int seed) {
  given = {(const unsigned char*)x, (const unsigned char*)w, (const float*)scale, (unsigned short*)y, m, n, k, k_tiles};
  on_read = [](const void* p, u32) {
    const bool of_x = p >= given.x && p < given.x + 2l * given.m * given.k;
    if (PDL && of_x && !cpu.now->waited) stop("a read of what the kernel ahead may write");
  };
  if (bytes < (int)(RING + STAGES * STAGE_BYTES)) why_stopped = "less shared memory than the ring takes";
  else if (threads != THREADS) why_stopped = "other threads than the kernel's";
  else launch_on_cpu({{blocks, 1, 1}, THREADS, CLUSTER, 1, (u32)bytes, seed}, entry);
}
"""
pytestmark = needs_compiler


def on_cpu(config: ring_config.RingConfig, change: Change = UNCHANGED) -> StandIn:
    return library(ring_config.source(config), ENTRY, change)


def given(problem: Any) -> tuple[Any, ...]:
    """(x, tiles, tensor scale, what y should be, its tolerance) of a problem some of whose scales are zero."""
    inputs = cases.inputs(problem, seed=1)
    inputs["w_scale"].view(-1)[::5] = 0
    w = tiles.tile_weights(inputs["w_packed"], inputs["w_scale"], inputs["x"].dtype)
    limit = cases.tolerance(problem, "nvfp4-w4a16")["y"]
    return inputs["x"], w, inputs["w_tensor_scale"], reference(inputs)["y"], limit


def right(kernel: StandIn, config: ring_config.RingConfig, data: tuple[Any, ...], seeds: int) -> bool:
    """Whether the simulated kernel is within tolerance and gives the same bits for every seed; raises Stopped."""
    x, w, scale, wanted, limit = data
    first = None
    for seed in range(seeds):
        y = torch.full(wanted.shape, float("nan"), dtype=x.dtype)
        numbers = (
            x.shape[0],
            wanted.shape[1],
            x.shape[1],
            w.shape[1],
            config.grid,
            config.threads,
            config.shared_bytes,
            seed,
        )
        simulated(kernel, (x, w, scale, y), numbers)
        first = y if first is None else first
        if not (accurate(y, wanted, limit) and torch.equal(first, y)):
            return False
    return True


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "sms", "variant"),
    [
        (1, 300, 1040, "bf16", 1, {"cluster": 1}),
        (3, 300, 528, "fp16", 4, {"cluster": 2, "warps": 2, "stage_tiles": 2, "stages": 3}),
        (8, 500, 1040, "bf16", 4, {"cluster": 2, "warps": 6, "stage_tiles": 2}),
        (8, 1200, 2064, "bf16", 8, {"cluster": 2, "warps": 3, "stages": 2, "sum_stages": 1}),
        (16, 300, 144, "bf16", 16, {"cluster": 2, "warps": 2}),  # three tiles: some warps have none
        (13, 600, 1040, "fp16", 4, {"cluster": 2, "warps": 2, "stage_tiles": 3}),
        (24, 250, 528, "bf16", 8, {"cluster": 2, "warps": 3}),
        (8, 1200, 1040, "bf16", 8, {"cluster": 4, "warps": 2, "stage_tiles": 2}),
        (15, 700, 2064, "fp16", 4, {"cluster": 4, "warps": 3, "sum_stages": 1}),
        (32, 500, 272, "bf16", 8, {"cluster": 4, "warps": 2}),  # five tiles: the last CTA of a cluster has none
        (29, 250, 528, "bf16", 8, {"cluster": 2, "warps": 3, "pdl": True}),
        (8, 300, 1152, "bf16", 4, {"cluster": 2, "warps": 3}),  # stages of nine tiles, half of 128 bytes between them
        (4, 100, 17408, "bf16", 2, {}),  # as chosen for long K: stages that wrap around within a row tile
        (13, 100, 16400, "bf16", 8, {}),  # as chosen for more than 8: four CTAs, registers by setmaxnreg
        (24, 100, 6144, "fp16", 4, {}),  # and for more than 16 where that is short enough for two
        (8, 300, 1040, "bf16", 2, {"cluster": 2, "stages": 1}),
    ],
)
def test_the_ring_runs_on_a_cpu(m, n, k, dtype, sms, variant):
    config = ring_config.choose_ring(m, n, k, dtype, sms, **variant)
    assert config.stage_bytes % 128 == 0
    kernel = on_cpu(config)
    assert right(kernel, config, given(cases._check(m, n, k, dtype)), 3)
    # x comes behind the first stage of weights; where it waits for the kernel ahead, all stages may be there before.
    assert kernel.copies_before_loads() == (config.stages if config.pdl else 1)
    assert kernel.copies_in_flight() <= max(1, config.stages - 1)


GATED = [
    (1, 152, 1040, "bf16", 1, {"cluster": 1}),
    (5, 256, 528, "fp16", 4, {"cluster": 2, "warps": 2, "stage_tiles": 2, "stages": 3}),
    (8, 304, 1040, "bf16", 8, {"cluster": 4, "warps": 2, "pdl": True}),
    (13, 152, 528, "bf16", 4, {"cluster": 2, "warps": 3}),
]


def gated_is_right(m: int, f: int, k: int, dtype: str, sms: int, variant: Any, change: Change = UNCHANGED) -> bool:
    """Gate is the first f rows of the problem's weights, up the others."""
    inputs = cases.inputs(cases._check(m, 2 * f, k, dtype), seed=1)
    x = inputs["x"]
    packed, scale = (gated.alternating(inputs[name][:f], inputs[name][f:]) for name in ("w_packed", "w_scale"))
    gate, up = reference(inputs)["y"].double().split(f, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    config = ring_config.choose_ring(m, 2 * f, k, dtype, sms, gated=True, **variant)
    w = tiles.tile_weights(packed, scale, x.dtype)
    kernel, found = on_cpu(config, change), []
    for seed in range(3):
        y = torch.full((m, f), float("nan"), dtype=x.dtype)
        numbers = (m, 2 * f, k, w.shape[1], config.grid, config.threads, config.shared_bytes, seed)
        simulated(kernel, (x, w, inputs["w_tensor_scale"], y), numbers)
        found.append(y)
    off = (found[0].double() - wanted).norm() / wanted.norm()
    return bool(off < (2e-3 if dtype == "bf16" else 3e-4)) and all(torch.equal(found[0], y) for y in found)


@pytest.mark.parametrize(("m", "f", "k", "dtype", "sms", "variant"), GATED)
def test_gate_up_and_silu_in_one_launch(m, f, k, dtype, sms, variant):
    assert gated_is_right(m, f, k, dtype, sms, variant)


@pytest.mark.parametrize(
    "change",
    [
        ("at = (row - g) / 2 + g", "at = row / 2"),
        ("silu_times(values[e] * scale, values[e + 2] * scale)", "silu_times(values[e] * scale, values[e + 2])"),
        ("silu_times(values[e] * scale,", "silu_times(values[e + 1] * scale,"),
        ("1.0f + exp2_fast(-1.4426950408889634f * gate)", "1.0f + exp2_fast(-gate)"),
        ("at < n / 2", "at < n / 2 - 8"),
    ],
)
def test_the_simulation_sees_mistakes_behind_the_gate(change):
    assert not unless_stopped(lambda: gated_is_right(*GATED[1], change=change))


def test_the_simulation_sees_x_read_ahead_of_the_wait():
    change = ("if constexpr (PDL) sync_all(), wait_on_dependent_grids();", "if constexpr (PDL) sync_all();")
    assert not unless_stopped(lambda: gated_is_right(*GATED[2], change=change))


@pytest.mark.parametrize(
    ("change", "before_x", "at_once"),
    [
        (UNCHANGED, 1, 3),
        (("if (copy >= IN_FLIGHT) {", "if (false) {"), 1, 4),
        (
            ("        fetch(policy);\n    }\n    const auto", "fetch(policy), fetch(policy);\n    }\n    const auto"),
            2,
            4,
        ),
    ],
)
def test_one_copy_goes_before_x_and_all_stages_but_one_are_in_flight(change, before_x, at_once):
    config = ring_config.choose_ring(8, 1200, 2064, "bf16", 4, cluster=2, warps=3, stage_tiles=2, stages=4)
    kernel = on_cpu(config, change)
    kernel.slow_copies()
    unless_stopped(lambda: right(kernel, config, given(cases._check(8, 1200, 2064, "bf16")), 2))
    assert (kernel.copies_before_loads(), kernel.copies_in_flight()) == (before_x, at_once)


@pytest.mark.parametrize(
    "change",
    [
        ("if (use > 0) mbarrier_wait(partial_sums", "if (0) mbarrier_wait(partial_sums"),
        ("weights.init(1, WARPS)", "weights.init(1, 1)"),
        ("PLACES = 3", "PLACES = 2"),
        ("turn / PLACES & 1", "turn & 1"),
        ("if (copy >= STAGES) {", "if (copy > STAGES) {"),
        ("peer < CLUSTER", "peer < CLUSTER - 1"),
        ("static_cast<unsigned>(m) >> 31", "1"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_ring(change):
    data = given(cases._check(8, 1200, 1040, "bf16"))
    config = ring_config.choose_ring(8, 1200, 1040, "bf16", 4, cluster=2, warps=2, stages=2, sum_stages=2)
    assert not unless_stopped(lambda: right(on_cpu(config, change), config, data, 8))


@pytest.mark.parametrize(
    "change",
    [
        ("partial_sums.init(WARPS, REDUCERS)", "partial_sums.init(WARPS, 1)"),
        ("8 * (place * REDUCERS + own)", "8 * place"),
        ("(CLUSTER - 1) * 512 * OWN", "(CLUSTER - 1) * 512"),
        ("512 * OWN * own + 16 * lane", "512 * own + 16 * lane"),
        ("if (own >= REDUCERS) return;", ""),
    ],
)
def test_the_simulation_sees_mistakes_of_several_reducer_warps(change):
    data = given(cases._check(32, 600, 1040, "bf16"))
    config = ring_config.choose_ring(32, 600, 1040, "bf16", 8, cluster=4, warps=4, reducers=2)
    if "own >=" in change[0]:
        data = given(cases._check(16, 600, 16400, "bf16"))
        config = ring_config.choose_ring(16, 600, 16400, "bf16", 8)
    assert not unless_stopped(lambda: right(on_cpu(config, change), config, data, 4))
