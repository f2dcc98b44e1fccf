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

from kernels.common import Tensors, Workload
from kernels.moe import cases, cuda_experts
from kernels.moe.reference import reference, routed
from lab.check.accuracy import compare
from tests.kernels.on_cpu.stand_in import UNCHANGED, Change, StandIn, built

BY_ID = {w.id: w for w in cases.WORKLOADS}
ONE = cases._workload(1, 8, 2, 64, 64)
TWO = cases._workload(2, 8, 2, 64, 128, shared=64)
ZIPF = cases._workload(8, 16, 4, 64, 64, "zipf", dtype="fp16")
SEVERAL = BY_ID["t17_e8_k2_h128_f64_one_s64_bf16"]
FP16 = BY_ID["t63_e5_k3_h192_f128_fp16"]
MANY = cases._workload(75, 32, 8, 64, 64, "zipf")
ROUTER_ENTRY = """
extern "C" void simulated(const float* logits, const unsigned char* x, const unsigned char* gate, uint2* pairs,
                          u32* masks, uint2* rows, uint2* blocks, u32* state, int tokens, int width, int top_k,
                          int counters, u32* turns, unsigned char* dealt, int routers, int grid, int threads,
                          int bytes, int seed) {
  static std::function<void()> call;
  call = [=] {
    KERNEL(logits, x, gate, pairs, masks, rows, blocks, state, tokens, width, top_k, counters, turns, dealt, routers);
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


@functools.cache
def on_cpu(source: Any, change: Change = UNCHANGED) -> StandIn:
    entry = ROUTED_ENTRY if "-DROUTED=1" in source.options else EXPERTS_ENTRY
    entry = ROUTER_ENTRY if source.path == cuda_experts.ONCE_SOURCE else entry
    return built(source.path, entry, change, options=source.options)


class Simulated:
    """cuda_experts.run on the stand-in: `launch` and `load` of kernels.cuda, each of its sources with a change.

    levers: of the configuration, by default one team with two stages of h and a router's launch ahead of it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sms: int, **levers: Any) -> None:
        self.seed = 0
        self.changes: dict[Path, Change] = {}
        plain = {"teams": 1, "routed": False, "h_stages": 2, "h_rows": 0, "prefetch": 0, "most_tokens": 8, "x_rows": 0}
        if levers.get("routed"):
            levers = {"x_rows": levers.get("most_tokens", 8)} | levers

        def config_of(tokens: int, width: int, inner: int, dtype: str, device: Any) -> Any:
            chosen = cuda_experts.choose_config(tokens, width, inner, dtype, sms)
            return replace(chosen, **plain | {"round_items": 24} | levers)

        monkeypatch.setattr(cuda_experts, "configured", config_of)
        monkeypatch.setattr(cuda_experts.cuda, "load", self.load)
        monkeypatch.setattr(cuda_experts.cuda, "launch", self.launch)
        for name in ("i32", "i64"):
            monkeypatch.setattr(cuda_experts.cuda, name, int)

    def load(self, source: Any, *_: Any) -> StandIn:
        return on_cpu(source, self.changes.get(source.path, UNCHANGED))

    def launch(self, kernel: StandIn, grid: Any, threads: int, arguments: Any, shared: int, programmatic=False) -> None:
        arguments = tuple(arguments)
        gate = 6 if len(arguments) == 16 else 2  # of experts.cu that routes, and of router_once.cu
        given = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_void_p() if i == gate else a
            for i, a in enumerate(arguments)
        ]
        kernel.simulated(*given, *map(ctypes.c_int, (*grid, threads, shared, self.seed)))


def sorted_choice(
    given: Tensors, gate: torch.Tensor, top_k: int, block: int
) -> tuple[list[tuple[int, int, float]], list[list[int]]]:
    """(expert, token, weight) of the reference's choice, the shared expert's last; and blocks of so many rows of it.

    A block is (expert | rows << 16, first row), as the routers write it.
    """
    (tokens, experts), (chosen, weight) = given["logits"].shape, routed(given["logits"], top_k)
    share = torch.sigmoid(given["x"].double() @ gate.double())
    rows = sorted((e, t, float(weight[t, j])) for t in range(tokens) for j, e in enumerate(chosen[t].tolist()))
    rows += [(experts, t, float(share[t])) for t in range(tokens)]
    blocks = []
    for e in range(experts + 1):
        its = [i for i, (of, *_) in enumerate(rows) if of == e]
        blocks += [[e | len(its[i : i + block]) << 16, its[i]] for i in range(0, len(its), block)]
    return rows, blocks


def right(simulated: Simulated, workload: Workload, seeds: int = 2) -> bool:
    """Whether y is within tolerance and the same to the bit for every order of threads and in a second call."""
    given = cases.inputs(workload, 1)
    for name in given:
        if name.endswith("_scale") and given[name].dtype == torch.uint8:
            given[name].view(-1)[::5] = 0
    wanted, limit = reference(given)["y"], cases.tolerance(workload, cuda_experts.PRECISION)["y"]
    kept = cuda_experts.prepare(given)
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
