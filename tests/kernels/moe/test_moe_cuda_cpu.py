"""kernels/moe/router.cu and experts.cu as they are, run on a CPU, and compiled ahead of time.

The launches are `cuda_experts.run`'s own; on_cpu/sm90.cuh stands in for their PTX (tests/kernels/on_cpu). CTAs run side
by side, copies land late, shared memory starts as junk. Timing does not show.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.common import Workload
from kernels.moe import cases, cuda_experts, cuda_many
from kernels.moe.controls import cuda_levers, cuda_one
from kernels.moe.reference import reference, routed
from kernels.nvfp4 import hopper
from lab.check import aot_worker
from lab.check.accuracy import compare
from tests.kernels.on_cpu.nvfp4_on_cpu import skip_unless_hopper
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, built, needs_compiler, unless_stopped

BY_ID = {w.id: w for w in cases.WORKLOADS}
FP16 = cases._workload(63, 5, 3, 192, 128, dtype="fp16")
EARLY_WORDS = ("first == 2", "i += 32", "<< i")
EARLY = ("COUNTERS_BESIDE", "PICK_TREE", "SHORT_LINE")  # what the arm experts_early sets
AHEAD = cuda_experts.AHEAD
ROUTER_ENTRY = """
struct Arguments {
  const float* logits; const unsigned char *x, *gate; uint2* pairs; u32* masks; uint2 *rows, *blocks; u32* state;
  int tokens, width, top_k, counters;
} given;
static void entry() {
  KERNEL(given.logits, given.x, given.gate, given.pairs, given.masks, given.rows, given.blocks, given.state,
         given.tokens, given.width, given.top_k, given.counters);
}
extern "C" void simulated(const float* logits, const unsigned char* x, const unsigned char* gate, uint2* pairs,
                          u32* masks, uint2* rows, uint2* blocks, u32* state, int tokens, int width, int top_k,
                          int counters, int grid, int threads, int bytes, int seed) {
  given = {logits, x, gate, pairs, masks, rows, blocks, state, tokens, width, top_k, counters};
  if (threads != THREADS) why_stopped = "other threads than the kernel's";
  else launch_on_cpu({{grid, 1, 1}, THREADS, 1, 1, (u32)bytes, seed}, entry);
}
"""
ONCE_ENTRY = """
#if DEAL
#define DEALS unsigned char *dealt, int routers,
#define DEALT_TO , dealt, routers
#else
#define DEALS
#define DEALT_TO
#endif
extern "C" void simulated(const float* logits, const unsigned char* x, const unsigned char* gate, uint2* pairs,
                          u32* masks, uint2* rows, uint2* blocks, u32* state, int tokens, int width, int top_k,
                          int counters, u32* turns, DEALS int grid, int threads, int bytes, int seed) {
  static std::function<void()> call;
  call = [=] {
    KERNEL(logits, x, gate, pairs, masks, rows, blocks, state, tokens, width, top_k, counters, turns DEALT_TO);
  };
  if (threads != THREADS) why_stopped = "other threads than the kernel's";
  else launch_on_cpu({.grid = {grid, 1, 1}, .threads = THREADS, .at_once = grid, .shared_bytes = (u32)bytes,
                      .seed = seed, .backwards = seed % 3 == 1, .uneven = seed % 2 == 1}, [] { call(); });
}
"""
EXPERTS_ENTRY = """
struct Arguments {
  const unsigned char *x, *up, *down; const float *up_scale, *down_scale; const uint2 *rows, *blocks; u32* state;
  u16* h; float* parts; u16* y; int tokens, n_rows, most_blocks;
} given;
static void entry() {
  KERNEL(given.x, given.up, given.down, given.up_scale, given.down_scale, given.rows, given.blocks, given.state,
         given.h, given.parts, given.y, given.tokens, given.n_rows, given.most_blocks);
}
extern "C" void simulated(const unsigned char* x, const unsigned char* up, const unsigned char* down,
                          const float* up_scale, const float* down_scale, const uint2* rows, const uint2* blocks,
                          u32* state, u16* h, float* parts, u16* y, int tokens, int n_rows, int most_blocks, int grid,
                          int threads, int bytes, int seed) {
  given = {x, up, down, up_scale, down_scale, rows, blocks, state, h, parts, y, tokens, n_rows, most_blocks};
  const int lists = ROW_TILES * tokens * 64 + 8 * (n_rows + most_blocks);
#if defined(PREFETCH) && PREFETCH
  static u32 asked;
  asked = 0;
  on_prefetch = [](const void* from, u32 bytes) {
    const unsigned char* const at = (const unsigned char*)from;
    if (at < given.up || at + bytes > given.up + EXPERTS * UP_ROWS * UP_BYTES) stop("prefetches what is no weight");
    asked += bytes;
  };
#endif
  if (threads != THREADS) why_stopped = "other threads than the kernel's";
  else if (bytes < (int)LISTS + lists) why_stopped = "less shared memory than the kernel takes";
  else launch_on_cpu({.grid = {grid, 1, 1}, .threads = THREADS, .at_once = grid, .shared_bytes = (u32)bytes,
                      .seed = seed, .backwards = seed % 3 == 1, .uneven = seed % 2 == 1}, entry);
#if defined(PREFETCH) && PREFETCH
  if (asked > grid * PREFETCH * UP_BYTES || asked < (grid - 1) * PREFETCH * UP_BYTES) why_stopped = "not its share";
#endif
}
"""

ROUTED_ENTRY = """
struct Arguments {
  const unsigned char *x, *up, *down; const float *up_scale, *down_scale, *logits; const unsigned char* gate;
  u32* state; u16* h; float* parts; u16* y; int tokens, n_rows, most_blocks, top_k, bank;
} given;
static void entry() {
  KERNEL(given.x, given.up, given.down, given.up_scale, given.down_scale, given.logits, given.gate, given.state,
         given.h, given.parts, given.y, given.tokens, given.n_rows, given.most_blocks, given.top_k, given.bank);
}
extern "C" void simulated(const unsigned char* x, const unsigned char* up, const unsigned char* down,
                          const float* up_scale, const float* down_scale, const float* logits,
                          const unsigned char* gate, u32* state, u16* h, float* parts, u16* y, int tokens, int n_rows,
                          int most_blocks, int top_k, int bank, int grid, int threads, int bytes, int seed) {
  given = {x, up, down, up_scale, down_scale, logits, gate, state, h, parts, y, tokens, n_rows, most_blocks, top_k,
           bank};
  const int lists = ROW_TILES * tokens * 64 + 8 * (n_rows + most_blocks);
  if (threads != THREADS) why_stopped = "other threads than the kernel's";
  else if (bytes < (int)LISTS + lists) why_stopped = "less shared memory than the kernel takes";
  else if (bank < most_blocks + GROUPS) why_stopped = "fewer counters than the kernel takes";
  else launch_on_cpu({.grid = {grid, 1, 1}, .threads = THREADS, .at_once = grid, .shared_bytes = (u32)bytes,
                      .seed = seed, .backwards = seed % 3 == 1, .uneven = seed % 2 == 1}, entry);
}
"""


ONE_ROUTED = {"one_layout": True, "routed": True}


@functools.cache
def on_cpu(source: Any, change: Change = UNCHANGED) -> StandIn:
    entry = ROUTER_ENTRY if source.path == cuda_experts.ROUTER_SOURCE else EXPERTS_ENTRY
    entry = ROUTED_ENTRY if "-DROUTED=1" in source.options else entry
    entry = ONCE_ENTRY if source.path == cuda_many.ONCE_SOURCE else entry
    return built(source.path, entry, change, options=source.options)


class Simulated:
    """cuda_experts.run on the stand-in: `launch` and `load` of kernels.cuda, each of its sources with a change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sms: int, **levers: Any) -> None:
        self.seed, self.one_layout = 0, bool(levers.get("one_layout"))
        self.changes: dict[Path, Change] = {}
        choose = cuda_levers.one_team

        def config_of(tokens: int, width: int, inner: int, dtype: str, device: Any, _: Any = None) -> Any:
            return replace(choose(tokens, width, inner, dtype, sms), **levers)

        monkeypatch.setattr(cuda_experts, "configured", config_of)
        monkeypatch.setattr(cuda_experts.cuda, "load", self.load)
        monkeypatch.setattr(cuda_experts.cuda, "launch", self.launch)
        for name in ("i32", "i64"):
            monkeypatch.setattr(cuda_experts.cuda, name, int)

    def load(self, source: Any, *_: Any) -> StandIn:
        return on_cpu(source, self.changes.get(source.path, UNCHANGED))

    def launch(self, kernel: StandIn, grid: Any, threads: int, arguments: Any, shared: int, programmatic=False) -> None:
        arguments = tuple(arguments)
        gate = 6 if len(arguments) == 16 else 2  # of experts_teams.cu that routes, and of router.cu
        given = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_void_p() if i == gate else a
            for i, a in enumerate(arguments)
        ]
        kernel.simulated(*given, *map(ctypes.c_int, (*grid, threads, shared, self.seed)))


def right(simulated: Simulated, workload: Workload, seeds: int = 2) -> bool:
    """Whether y is within tolerance and the same to the bit for every order of threads and in a second call."""
    given = cases.inputs(workload, 1)
    for name in given:
        if name.endswith("_scale") and given[name].dtype == torch.uint8:
            given[name].view(-1)[::5] = 0
    wanted, limit = reference(given)["y"], cases.tolerance(workload, cuda_experts.PRECISION)["y"]
    kept = cuda_experts.prepare(given, one_layout=simulated.one_layout)
    kept |= {name: given[name] for name in cases.ACTIVATIONS}
    first = None
    for seed in range(seeds):
        simulated.seed = seed
        out = cases.outputs(workload, given)
        cuda_experts.run(kept, out)
        first = out["y"] if first is None else first
        if not (compare("y", out["y"], wanted, limit).ok and torch.equal(first, out["y"])):
            return False
    return True


def each_call_is_right(simulated: Simulated, workload: Workload, calls: int) -> bool:
    """Whether y is within tolerance in each of so many calls on one scratch, with x and logits of its own."""
    given = cases.inputs(workload, 1)
    kept, limit = cuda_experts.prepare(given), cases.tolerance(workload, cuda_experts.PRECISION)["y"]
    for seed in range(calls):
        simulated.seed = seed
        own = cases.activations(workload, 10 + seed, "cpu")
        out = cases.outputs(workload, given)
        cuda_experts.run(kept | own, out)
        if not compare("y", out["y"], reference(given | own)["y"], limit).ok:
            return False
    return True


@needs_compiler
@pytest.mark.parametrize(
    ("name", "sms", "levers"),
    [
        ("t1_e8_k2_h64_f32_bf16", 5, {}),
        ("t2_e8_k2_h80_f48_s32_bf16", 5, {}),
        ("t8_e16_k4_h64_f48_zipf_fp16", 4, {"round_items": 2}),
        ("t17_e8_k2_h128_f64_one_s64_bf16", 8, {}),
        ("t63_e5_k3_h64_f80_bf16", 3, {"stages": 2, "round_items": 3, "h_stages": 1}),
        ("t75_e32_k8_h80_f32_zipf_bf16", 6, {}),
        *(
            (name, sms, {"teams": teams, "n_tiles": 1, "round_items": 5, **more})
            for name, sms, teams, more in (
                ("t1_e8_k2_h64_f32_bf16", 5, 2, {}),
                ("t2_e8_k2_h80_f48_s32_bf16", 5, 1, {"stages": 3}),
                ("t8_e16_k4_h64_f48_zipf_fp16", 4, 2, {"h_stages": 2}),
                ("t17_e8_k2_h128_f64_one_s64_bf16", 8, 2, {}),
                ("t63_e5_k3_h64_f80_bf16", 3, 1, {"stages": 2}),
                ("t75_e32_k8_h80_f32_zipf_bf16", 6, 2, {"stages": 6}),
                ("t75_e32_k8_h80_f32_zipf_bf16", 6, 2, {"stages": 6, "prefetch": 4}),
                ("t17_e8_k2_h128_f64_one_s64_bf16", 8, 2, {"prefetch": 2}),
                ("t1_e8_k2_h64_f32_bf16", 5, 2, {"routed": True}),
                ("t2_e8_k2_h80_f48_s32_bf16", 5, 2, {"routed": True}),
                ("t8_e16_k4_h64_f48_zipf_fp16", 4, 2, {"routed": True, "h_stages": 2}),
                ("t1_e8_k2_h64_f32_bf16", 5, 2, {"routed": True, "h_rows": 1, "h_stages": 4, "stages": 8}),
                ("t2_e8_k2_h80_f48_s32_bf16", 5, 2, {"routed": True, "h_rows": 2, "switches": EARLY}),
                ("t8_e16_k4_h64_f48_zipf_fp16", 4, 2, {"routed": True, "row_tiles": 2, "parts": 2, "switches": EARLY}),
                ("t8_e16_k4_h64_f48_zipf_fp16", 4, 2, {"routed": True, "h_stages": 2, "switches": EARLY}),
                ("t17_e8_k2_h128_f64_one_s64_bf16", 8, 2, {"routed": True, "most_tokens": 32, "switches": AHEAD}),
                ("t1_e8_k2_h64_f32_bf16", 5, 2, {"routed": True, "most_tokens": 32}),
                ("t9_e8_k2_h128_f128_s128_bf16", 5, 2, {"one_layout": True}),
                ("t9_e8_k2_h128_f128_s128_bf16", 5, 2, {**ONE_ROUTED, "most_tokens": 16, "x_rows": 16}),
                ("t17_e8_k2_h128_f64_one_s64_bf16", 8, 2, {"one_layout": True, "stages": 4}),
                ("t63_e5_k3_h192_f128_fp16", 3, 1, {"one_layout": True, "stages": 2}),
            )
        ),
    ],
)
def test_the_kernels_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch, name: str, sms: int, levers: dict[str, int]) -> None:
    assert right(Simulated(monkeypatch, sms, **levers), BY_ID.get(name) or FP16)


@needs_compiler
@pytest.mark.parametrize(("tokens", "width", "inner", "sms"), [(12, 528, 144, 9), (9, 1040, 528, 17)])
@pytest.mark.parametrize("levers", [{}, {"teams": 2, "n_tiles": 1}], ids=["one", "teams"])
def test_the_kernels_walk_several_tiles_of_k(monkeypatch, tokens, width, inner, sms, levers):
    """More than one tile a warp in both products, with warps that have one less, and a last tile that is not full."""
    assert right(Simulated(monkeypatch, sms, **levers), cases._workload(tokens, 3, 2, width, inner))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("weights.init(1, WARPS)", "weights.init(1, 1)"),
        ("hidden.init(1, WARPS)", "hidden.init(1, 1)"),
        ("ld_acquire(block_items + index) >= UP_ROWS", "ld_acquire(block_items + index) >= 1"),
        ("__ffs(others) - 1 : 32", "__ffs(others) : 32"),
        ("atomic_add_acq_rel(block_items + index, items)", "atomic_add_acq_rel(block_items + index, 1)"),
        ("if (use > 0) mbarrier_wait", "if (0) mbarrier_wait"),
        ("group_parts + group) < PARTS", "group_parts + group) < 1"),
        ("(8 * b + g) * H_ROW + 2 * k", "(8 * b + g) * H_BYTES + 2 * k"),
        ("line.at / UP_ROWS != loaded_block", "loaded_block < 0"),
        ("OPERAND_TO_VALUE = 128", "OPERAND_TO_VALUE = 127"),
        ("weight = __uint_as_float(row.y) * scale", "weight = scale"),
        ("p < PARTS; p++", "p < PARTS - 1; p++"),
        ("round % 2 ? workers - 1 - worker : worker", "worker / 2"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_experts(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    simulated = Simulated(monkeypatch, 8, stages=2, round_items=3, h_stages=1)
    simulated.changes = {cuda_experts.SOURCE: change}
    assert not unless_stopped(lambda: right(simulated, BY_ID["t17_e8_k2_h128_f64_one_s64_bf16"], 4))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("n % TEAMS != team", "n % TEAMS == 2"),
        ("mbarrier_init(barrier(FREE, i), REDUCERS)", "mbarrier_init(barrier(FREE, i), REDUCERS + 1)"),
        ("(before - up_items) / SUM_STAGES & 1", "1"),
        ("before / SUM_STAGES & 1);\n            }\n            leave", "0);\n            }\n            leave"),
        ("if (line.at / UP_ROWS != told) tell(), told", "if (line.at / UP_ROWS != told) told"),
        ("block_items() + told, items)", "block_items() + told, 1)"),
        ("named_barrier_sync_unaligned(REDUCERS_MEET, 32 * REDUCERS);", ""),
        ("n % REDUCERS != reducer", "n % REDUCERS == reducer"),
        ("row = 2 * reducer + lane / 16 + 8", "row = 2 * reducer + lane / 16 + 4"),
        ("1024 * s + 128 * reducer", "1024 * s + 64 * reducer"),
        ("sum[i * ROW_TILES + r]", "sum[i * ROW_TILES]"),
        ("column = 2 * (lane / 4 % 4)", "column = (lane / 4 % 4)"),
        ("lds32(at + 512)", "lds32(at)"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_teams(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    def sound(sms: int, name: str, **levers: int) -> bool:
        simulated = Simulated(monkeypatch, sms, teams=2, n_tiles=1, round_items=5, h_stages=2, **levers)
        simulated.changes = {cuda_experts.TEAMS_SOURCE: change}
        found = unless_stopped(lambda: right(simulated, BY_ID[name], 4))
        monkeypatch.undo()
        return found

    assert not (
        sound(8, "t17_e8_k2_h128_f64_one_s64_bf16", stages=2, row_tiles=4, parts=1)
        and sound(4, "t8_e16_k4_h64_f48_zipf_fp16")
    )


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        UNCHANGED,
        ("state[1] = which ^ 1;", ""),
        ("THREADS) state[other + i] = 0;", "THREADS) continue;"),
        ("            state[0] = 0;", ""),
        ("make_uint2(EXPERTS, __float_as_uint(share))", "make_uint2(EXPERTS, 0)"),
        ("i == which) keys[i] = 0;", "i == which) keys[i] += 0;"),
        ("logits + static_cast<size_t>(token) * EXPERTS + e", "logits + e"),
        ("weigh(warp - MOST_TOKENS);", "weigh(0 * warp);"),
        ("__float_as_uint(odds / all)", "__float_as_uint(odds)"),
        ("state[1] = first == 2;", ""),
        ("i < bank; i += 32) state[other + i] = 0;", "i < 1; i += 32) state[other + i] = 0;"),
        ("(keys[i] == most) << i", "(keys[i] == most) << 0"),
    ],
)
def test_the_simulation_sees_mistakes_where_the_teams_route(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    def sound(workload: Workload, sms: int) -> bool:
        simulated = Simulated(
            monkeypatch, sms, teams=2, n_tiles=1, round_items=5, h_stages=2, routed=True, switches=switches
        )
        simulated.changes = {cuda_experts.TEAMS_SOURCE: change}
        found = unless_stopped(lambda: each_call_is_right(simulated, workload, 4))
        monkeypatch.undo()
        return found

    # Text of one form alone; the other form's is tried in its own kernel.
    switches = EARLY if any(word in change[0] for word in EARLY_WORDS) else ()
    wide = cases._workload(7, 40, 5, 64, 48, shared=32)
    if change == UNCHANGED:
        assert sound(wide, 5)
        return
    assert not (sound(wide, 5) and sound(BY_ID["t8_e16_k4_h64_f48_zipf_fp16"], 4))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        UNCHANGED,
        ("i += ALL_WARPS) {\n            if (i >= 0) weigh(i);", "i += 99) {\n            if (i >= 0) weigh(i);"),
        ("min(BLOCK_TOKENS, rows_of - begin)", "rows_of - begin"),
        ("(count + BLOCK_TOKENS - 1) / BLOCK_TOKENS;\n    const int own", "count > 0;\n    const int own"),
        ("first + begin);", "first);"),
        ("(tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS);", "1);"),
    ],
)
def test_the_simulation_sees_mistakes_where_the_teams_route_more_tokens(monkeypatch, change: Change) -> None:
    """More than there are warps, and experts of several blocks."""
    routing = {"routed": True, "most_tokens": 32, "switches": AHEAD}
    simulated = Simulated(monkeypatch, 5, teams=2, n_tiles=1, round_items=5, h_stages=2, **routing)
    simulated.changes = {cuda_experts.TEAMS_SOURCE: change}
    workload = cases._workload(27, 6, 3, 64, 48, "zipf", shared=32)
    assert unless_stopped(lambda: each_call_is_right(simulated, workload, 3)) == (change == UNCHANGED)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("+ 16 * t + 4 * j + 2 * upper", "+ 16 * t + 4 * j"),
        ("TILE_CODE_BYTES + 8 * (lane / 4)", "TILE_CODE_BYTES + 8 * (lane / 8)"),
        ("t = k / 2 % 4;", "t = k / 4 % 4;"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_one_layout(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    simulated = Simulated(monkeypatch, 5, teams=2, n_tiles=1, round_items=5, h_stages=2, one_layout=True)
    simulated.changes = {cuda_experts.TEAMS_SOURCE: change}
    assert not unless_stopped(lambda: right(simulated, BY_ID["t9_e8_k2_h128_f128_s128_bf16"]))


X_HERE = {**ONE_ROUTED, "teams": 2, "n_tiles": 1, "round_items": 5}


@needs_compiler
@pytest.mark.parametrize(
    ("tokens", "rows", "switches"),
    [(1, {"h_rows": 4, "x_rows": 4}, AHEAD), (2, {"h_rows": 4, "x_rows": 4}, EARLY), (7, {"x_rows": 8}, ())],
)
def test_x_is_copied_while_a_cta_chooses(
    monkeypatch: pytest.MonkeyPatch, tokens: int, rows: dict[str, int], switches: tuple[str, ...]
) -> None:
    """x of nine tiles of k, one more than a team has warps, with a shared expert."""
    workload = cases._workload(tokens, 5, 3, 576, 128, shared=64)
    assert right(Simulated(monkeypatch, 10, **X_HERE, **rows, switches=switches), workload)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        UNCHANGED,
        (
            "for (int i = 0; i < tokens; i++) tma_load_1d(base + X",
            "for (int i = 1; i < tokens; i++) tma_load_1d(base + X",
        ),
        ("x + i * X_BYTES, X_BYTES, base", "x, X_BYTES, base"),
        ("base + X + token * X_ROW + 16", "base + X + 16"),
        ("+ 16 * (lane / 8);", "+ 16 * (lane / 16);"),
        ("from + 128 * tile + 64);", "from + 128 * tile);"),
        (
            "min(lane % 8, block.count - 1)].x;\n                const u32 from",
            "min(g, block.count - 1)].x;\n                const u32 from",
        ),
        ("mbarrier_wait(base + X_FULL, 0);", ""),
        ("LISTS = X + X_ROWS * X_ROW;", "LISTS = X + X_ROW;"),
    ],
)
def test_the_simulation_sees_mistakes_where_x_is_copied(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Copies take long, so x is not there before it is waited for."""
    simulated = Simulated(monkeypatch, 10, **X_HERE, x_rows=8)
    simulated.changes = {cuda_experts.TEAMS_SOURCE: change}

    def load(*source: Any) -> StandIn:
        kernel = simulated.load(*source)
        kernel.slow_copies()
        return kernel

    monkeypatch.setattr(cuda_experts.cuda, "load", load)
    found = unless_stopped(lambda: right(simulated, cases._workload(4, 5, 3, 576, 128, shared=64)))
    assert found == (change == UNCHANGED)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("blockIdx.x - routers) * THREADS", "blockIdx.x - routers) * 32"),
        ("piece >= tokens * (width / 8)", "piece >= 32"),
        ("to[8] = words.y, to[16] = words.z", "to[16] = words.y, to[8] = words.z"),
        ("dealt_place(8 * (piece % 8)) / 2", "dealt_place(8 * (piece % 8 ^ 1)) / 2"),  # within what is there
    ],
)
def test_the_simulation_sees_mistakes_where_the_router_deals(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    levers = {"one_layout": True, "teams": 1, "n_tiles": 1, "round_items": 5, "stages": 2}
    simulated = Simulated(monkeypatch, 3, **levers)
    simulated.changes = {cuda_experts.ONCE_SOURCE: change}
    assert not unless_stopped(lambda: right(simulated, FP16))


@needs_compiler
@pytest.mark.parametrize("most", [8, 32])
def test_routed_inside_the_bits_are_those_of_two_launches(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Of calls with fewer and more tokens on one scratch too."""
    workload = cases._workload(most, 40, 5, 64, 48, "zipf", shared=32)
    given = cases.inputs(workload, 1)
    found = []
    routing = {"routed": True, "most_tokens": most}
    for levers in ({"routed": False}, routing, routing | {"switches": EARLY}):
        simulated = Simulated(monkeypatch, 5, teams=2, n_tiles=1, round_items=5, h_stages=2, **levers)
        kept = cuda_experts.prepare(given)
        for seed, tokens in enumerate((most, 3, 1, most)):
            simulated.seed = seed
            own = {name: given[name][:tokens] for name in cases.ACTIVATIONS}
            y = torch.empty_like(given["x"][:tokens])
            cuda_experts.run(kept | own, {"y": y})
            found.append(y)
        monkeypatch.undo()
    assert [torch.equal(a, b) for a, b in zip(2 * found[:4], found[4:], strict=True)] == [True] * 8


def _by_router(
    monkeypatch: pytest.MonkeyPatch, experts: int, once: bool, calls: tuple[int, ...], change: Change = UNCHANGED
) -> list[torch.Tensor]:
    """y and the lists of calls of so many tokens on one scratch, by router.cu or by router_once.cu."""
    workload = cases._workload(75, experts, 5, 64, 48, "zipf", shared=32)
    given = cases.inputs(workload, 1)
    simulated = Simulated(monkeypatch, 5, teams=2, n_tiles=1, round_items=5, h_stages=2)
    simulated.changes = {cuda_many.ONCE_SOURCE: change}
    kept = cuda_experts.prepare(given)
    found = []
    for seed, tokens in enumerate(calls):
        simulated.seed = seed
        own = {name: t[:tokens] for name, t in cases.activations(workload, seed, "cpu").items()}
        y = torch.full_like(own["x"], float("nan"))
        cuda_experts.run(kept | own, {"y": y}, once=once)
        found += [y, kept["rows"][: 6 * tokens].clone(), kept["blocks"][: kept["state"][0]].clone()]
    monkeypatch.undo()
    return found


@needs_compiler
@pytest.mark.parametrize("experts", [40, 300])
def test_the_router_of_one_wait_leaves_the_same(monkeypatch: pytest.MonkeyPatch, experts: int) -> None:
    """To the bit, of one block of tokens and of ten."""
    both = [_by_router(monkeypatch, experts, once, (75, 9, 17, 75)) for once in (False, True)]
    assert [torch.equal(a, b) for a, b in zip(*both, strict=True)] == [True] * 12


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("c < counters; c += THREADS", "c < 1; c += THREADS"),
        ("% TOKENS) - 1)", "% 2) - 1)"),
        ("turns[TURN] = 1 - turn;", ""),
        ("FEW ? FEW_TOKENS : 32", "FEW ? 2 * FEW_TOKENS : 32"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_router_of_one_wait(monkeypatch, change: Change) -> None:
    calls = 75, 75, 75  # what an earlier one left is of tokens that are there
    wanted = _by_router(monkeypatch, 40, False, calls)

    def same() -> bool:
        found = _by_router(monkeypatch, 40, True, calls, change)
        return all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))

    assert not unless_stopped(same)


def _routed(simulated: Simulated, tokens: int, experts: int, top_k: int, block_tokens: int, routing: str) -> bool:
    """Whether router.cu's rows and blocks are the reference's choice, sorted by expert and then by token."""
    axes: dict[str, int | str] = {
        "T": tokens, "experts": experts, "top_k": top_k, "H": 64, "routing": routing, "dtype": "bf16",
    }  # fmt: skip
    given = cases.activations(Workload("", axes), 3, "cpu")
    given["logits"] -= 3  # so that some of those chosen are negative
    gate = torch.randn(64).to(torch.bfloat16)
    pairs = tokens * (top_k + 1)
    source = cuda_experts.router_source(experts, "bf16", block_tokens)
    rows, blocks = torch.full((pairs, 2), -1, dtype=torch.int32), torch.full((pairs + 1, 2), -1, dtype=torch.int32)
    state = torch.full((7,), 9, dtype=torch.int32)
    state[1] = 0
    scratch = torch.zeros(pairs, 2, dtype=torch.int32), torch.zeros(tokens, -(-experts // 32), dtype=torch.int32)
    warps = cuda_experts.router_warps(experts)
    arguments = (given["logits"], given["x"], gate, *scratch, rows, blocks, state, tokens, 64, top_k, 5)
    kernel = on_cpu(source, simulated.changes.get(source.path, UNCHANGED))
    addresses = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    bytes_ = cuda_experts.router_shared_bytes(experts)
    kernel.simulated(*addresses, *map(ctypes.c_int, (-(-tokens // warps), 32 * warps, bytes_, simulated.seed)))

    chosen, weight = routed(given["logits"], top_k)
    share = torch.sigmoid(given["x"].double() @ gate.double())
    by_expert = sorted((e, t, float(weight[t, j])) for t in range(tokens) for j, e in enumerate(chosen[t].tolist()))
    by_expert += [(experts, t, float(share[t])) for t in range(tokens)]
    listed = []
    for e in range(experts + 1):
        its = [i for i, (of, *_) in enumerate(by_expert) if of == e]
        cuts = [its[i : i + block_tokens] for i in range(0, len(its), block_tokens)]
        listed += [[e | len(cut) << 16, cut[0]] for cut in cuts]
    odds = torch.tensor([p for *_, p in by_expert])
    return (
        blocks[: state[0]].tolist() == listed
        and not state[1:].any()
        and rows[:, 0].tolist() == [t for _, t, _ in by_expert]
        and bool(((rows[:, 1].view(torch.float32) - odds).abs() <= 1e-5 * odds).all())
    )


ROUTINGS = [(1, 8, 2, 8, "uniform"), (9, 300, 8, 8, "uniform"), (40, 40, 5, 16, "zipf"), (128, 16, 3, 16, "one")]


@needs_compiler
@pytest.mark.parametrize(("tokens", "experts", "top_k", "block_tokens", "routing"), ROUTINGS)
def test_the_router_sorts_the_choice(monkeypatch, tokens, experts, top_k, block_tokens, routing):
    assert _routed(Simulated(monkeypatch, 4), tokens, experts, top_k, block_tokens, routing)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("if (lane == leader && i == which) keys[i] = 0;", ""),
        ("(bits >> 31 ? ALL : 0x80000000u)", "0x80000000u"),
        ("(1u << (t & 31)) - 1", "(2u << (t & 31)) - 1"),
        ("== gridDim.x - 1", "== gridDim.x"),
        ("count - begin) << 16", "count) << 16"),
        ("if (w == warp) upto += total;", ""),
        ("state[1] = 0", "state[1] = 1"),
        ("odds / all", "odds"),
    ],
)
def test_the_simulation_sees_mistakes_in_the_router(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    simulated = Simulated(monkeypatch, 4)
    simulated.changes = {cuda_experts.ROUTER_SOURCE: change}
    assert not unless_stopped(lambda: _routed(simulated, 40, 40, 5, 16, "zipf"))


@needs_compiler
def test_scratch_for_more_tokens_serves_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer keeps it for all its calls, whatever the last one left there."""
    simulated = Simulated(monkeypatch, 8)
    most = BY_ID["t17_e8_k2_h128_f64_one_s64_bf16"]
    kept = cuda_experts.prepare(cases.inputs(most, 1))
    for tokens in (17, 3, 9, 17):
        given = cases.inputs(most, 1)
        given |= {name: given[name][:tokens].contiguous() for name in cases.ACTIVATIONS}
        y = torch.full((tokens, 128), float("nan"), dtype=torch.bfloat16)
        cuda_experts.run(kept | {name: given[name] for name in cases.ACTIVATIONS}, {"y": y})
        limit = cases.tolerance(most, cuda_experts.PRECISION)["y"]
        assert compare("y", y, reference(given)["y"], limit).ok, tokens
        simulated.seed += 1


@needs_compiler
def test_a_negative_zero_and_infinite_logits_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    w = BY_ID["t1_e8_k2_h64_f32_bf16"]
    given = cases.inputs(w, 0)
    given["logits"] = torch.tensor([[-1.0, -0.0, -2.0, float("-inf"), -3.0, 1e-30, -1e-30, -5.0]])
    kept = cuda_experts.prepare(given) | {name: given[name] for name in cases.ACTIVATIONS}
    Simulated(monkeypatch, 5)
    kept = cuda_experts.prepare(given) | {name: given[name] for name in cases.ACTIVATIONS}
    cuda_experts.run(kept, cases.outputs(w, given))
    assert sorted(kept["blocks"][:2, 0].bitwise_and(0xFFFF).tolist()) == [1, 5]


@pytest.mark.parametrize(("axis", "value", "word"), [
    ("T", 129, "triton_experts"), ("H", 88, "16"), ("shared", 600, "linear"), ("experts", 2000, "1024"),
    ("H", 16384, "shared memory"),
])  # fmt: skip
def test_what_the_kernels_cannot_hold_is_refused(axis: str, value: int, word: str) -> None:
    axes: dict[str, int | str] = {
        "T": 128,
        "experts": 256,
        "top_k": 8,
        "H": 2048,
        "F": 512,
        "shared": 512,
        "dtype": "bf16",
    }
    candidate = cuda_experts.CANDIDATES[0]
    assert candidate.refuses(Workload("", axes)) == ""
    assert word in candidate.refuses(Workload("", axes | {axis: value}))


def test_few_tokens_take_one_launch() -> None:
    """As far as a thread an expert goes, and not in the arm that compares."""
    axes = dict(BY_ID["t8_e256_k8_h2048_f512_s512"].axes)

    def launches(name: str, **other: int) -> float:
        candidates = {c.name: c for c in (*cuda_experts.CANDIDATES, *cuda_levers.CANDIDATES)}
        return 2.0 - ("_routed" in candidates[name].config(Workload("", axes | other)))

    for tokens, experts, wanted in ((1, 256, 1), (16, 512, 1), (8, 513, 2), (17, 256, 2)):
        workload = Workload("", axes | {"T": tokens, "experts": experts})
        assert launches("cuda_experts", T=tokens, experts=experts) == wanted
        assert cuda_experts.work(workload, hopper.SMS).in_turn["launches"] == wanted
        assert launches("experts_router_launch", T=tokens, experts=experts) == 2


@pytest.mark.parametrize(("tokens", "experts", "prefetch"), [(63, 256, 0), (64, 256, 8), (64, 257, 0), (9, 8, 0)])
def test_weights_are_prefetched_where_most_experts_have_tokens(tokens: int, experts: int, prefetch: int) -> None:
    """And no choice is waited for in the same launch."""
    axes = dict(BY_ID["t128_e256_k8_h2048_f512_s512"].axes) | {"T": tokens, "experts": experts}
    assert cuda_experts.chosen(Workload("", axes)).prefetch == prefetch


@pytest.mark.parametrize("tokens", [1, 8, 17, 32, 128])
@pytest.mark.parametrize(("width", "inner", "busy"), [(2048, 512, 0.96), (2816, 704, 0.98)])
def test_nine_tenths_of_the_multiprocessors_add_up_y(tokens: int, width: int, inner: int, busy: float) -> None:
    config = cuda_experts.choose_config(tokens, width, inner, "bf16")
    assert config.groups * config.parts / hopper.SMS >= busy
    assert config.groups * config.row_tiles * 16 >= width


OF_ONE_LAYOUT = [s for s in cuda_one.CUDA_SOURCES if s.path == cuda_experts.TEAMS_SOURCE]


@pytest.mark.slow
@pytest.mark.parametrize("source", [*cuda_experts.CUDA_SOURCES, *OF_ONE_LAYOUT], ids=lambda s: s.kernels[0])
def test_sources_compile_without_spills(source: Any) -> None:
    """But for two words that a math warp reads once a turn behind its waits, where it routes and has two row tiles."""
    (row,) = aot_worker.compile_cuda(source, 90)
    allowed = (
        8 if "_routed" in source.kernels[0] and "_r2_" in source.kernels[0] and "_one" not in source.kernels[0] else 0
    )
    assert (row["status"], row["fits"]) == ("ok", True), row
    assert row["spill_bytes"] <= allowed
    if source.path == cuda_experts.TEAMS_SOURCE:
        assert row["instruction"].startswith("mma.sync m16n8k16")
        teams = int(source.kernels[0].partition("teams")[2][0])
        assert row["registers"] <= 65536 // (32 * (cuda_experts.WARPS * teams + 6))


ON_A_GPU = [w for w in cases.WORKLOADS if not cuda_experts.CANDIDATES[0].refuses(w)]


@pytest.mark.gpu
@pytest.mark.parametrize("workload", ON_A_GPU, ids=lambda w: w.id)
@pytest.mark.parametrize("arm", ["", "experts_router_launch", "experts_early"])
def test_on_a_gpu_within_tolerance_and_the_same_bits_captured(workload: Workload, arm: str) -> None:
    skip_unless_hopper()
    if arm and workload["T"] > cuda_experts.ROUTED_MAX:
        pytest.skip("the same there")
    choose = cuda_levers.LEVERS[arm] if arm else cuda_experts.choose_config
    run = functools.partial(cuda_experts.run, choose=choose)
    given = cases.inputs(workload, 1, "cuda")
    kept = cuda_experts.prepare(given, choose) | {name: given[name] for name in cases.ACTIVATIONS}
    wanted, limit = reference(given)["y"], cases.tolerance(workload, cuda_experts.PRECISION)["y"]
    out = cases.outputs(workload, given)
    run(kept, out)
    first = out["y"].clone()
    assert compare("y", first, wanted, limit).ok
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(kept, out)
    for _ in range(20):
        out["y"].fill_(float("nan"))
        graph.replay()
        assert torch.equal(out["y"], first)
    # Another routing in the same graph: nothing of the choice is in it.
    other = cases.activations(workload, 7, "cuda")
    for name, tensor in other.items():
        kept[name].copy_(tensor)
    graph.replay()
    assert compare("y", out["y"], reference(given | other)["y"], limit).ok
