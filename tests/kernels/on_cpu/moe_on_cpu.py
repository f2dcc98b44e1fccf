"""cuda_experts.run on the stand-in: its launches are the kernels' own, on_cpu/sm90.cuh in place of their PTX.

CTAs run side by side, copies land late, shared memory starts as junk. Timing does not show.
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
from kernels.moe.controls import cuda_levers
from kernels.moe.reference import reference
from lab.check.accuracy import compare
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, built

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
