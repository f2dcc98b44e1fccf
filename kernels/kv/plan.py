"""How many splits each sequence has, and the tile a program works on: plain arithmetic, no Triton.

Decode at batch 1 offers only Hkv independent items, far fewer than a GPU's SMs, so a sequence is split along its tokens
and the splits are merged by a second kernel. Their number is fixed by shapes known on the host (batch, Hkv and
the capacity of the page table), never by seq_lens: reading those would synchronise, and a captured graph could not
follow them. Each program finds its own token range from seq_lens on the device, so short sequences simply leave
their last splits empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

LOG2_E = math.log2(math.e)  # every kernel's softmax is in base 2: logits are scaled by this and exp2 follows

# Splits beyond this only lengthen the merge: 128 x 4 kv heads already fill 132 SMs nearly four times.
MAX_SPLITS = 128

# What one more split costs, in tiles: its prologue, and its row of float32 partials written and read again.
# An estimate from bytes (6 x 256 float32 are 6 KB each way, mostly in L2; a tile of fp8 K and V is 16 KB), to be tuned.
SPLIT_OVERHEAD_TILES = 1


@dataclass(frozen=True)
class SplitPlan:
    """The launch choice of one problem; `str()` of it is what a result row stores.

    splits:      per (sequence, kv head); 1 writes the output directly, without the merge.
    block_t:     tokens per step of the loop.
    num_warps, num_stages: Triton's launch options.
    native_fp8:  convert e4m3 by the cvt instruction (compute capability 8.9 and later) instead of by bit operations.
    """

    splits: int
    block_t: int
    num_warps: int
    num_stages: int
    native_fp8: bool

    def __str__(self) -> str:
        fp8 = "cvt" if self.native_fp8 else "bits"
        return f"splits={self.splits} block_t={self.block_t} warps={self.num_warps} stages={self.num_stages} e4m3={fp8}"


@dataclass(frozen=True)
class Tile:
    """block_t tokens per step, Triton's num_warps and num_stages, and how many such blocks should share an SM."""

    block_t: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int


def tile(dim: int, kv: str) -> Tile:
    """The tile for a head dimension and a cache form ("16bit", "fp8", "q8_0"). ValueError on another form.

    32 tokens of D = 256, 64 of D <= 128: 8192 values of K and as many of V, 32 KB in 16 bit and 16 KB in 8 bit. With
    num_stages 3 two such tiles are in flight per block, and two or three blocks share an SM: blocks_per_sm follows from
    registers and shared memory as compiled for sm_90 (table in NOTES.md). At 73 KB the largest also fits the 99 KB per
    block of sm_120 and sm_121, so there is no case by architecture.
    """
    if kv not in ("16bit", "fp8", "q8_0"):
        raise ValueError(f"{kv=} is not a cache form; expected '16bit', 'fp8' or 'q8_0'")
    return Tile(block_t=32 if dim > 128 else 64, num_warps=4, num_stages=3, blocks_per_sm=2 if kv == "q8_0" else 3)


@cache
def split_plan(
    batch: int, kv_heads: int, ctx: int, dim: int, kv: str, capability: int = 90, sms: int = 132
) -> SplitPlan:  # fmt: skip
    """Choose the splits so that the slowest slot has the least to do.

    batch, kv_heads: independent items; ctx: capacity of a page-table row in tokens; dim: head dimension;
    kv: "16bit", "fp8" or "q8_0"; capability: e.g. 90; sms: 132 on an H200.
    With S splits there are batch * kv_heads * S programs in waves of sms * blocks_per_sm (from `tile`); a program walks
    ceil(tiles / S) tiles and pays SPLIT_OVERHEAD_TILES if S > 1. The S with the smallest waves * tiles wins, the
    smaller S on a tie. ValueError when an axis is not positive.
    """
    if min(batch, kv_heads, ctx, dim, sms) < 1:
        raise ValueError(f"split_plan: {batch=} {kv_heads=} {ctx=} {dim=} {sms=} must all be positive")
    shape = tile(dim, kv)
    tiles = -(-ctx // shape.block_t)
    slots = sms * shape.blocks_per_sm

    def slowest(splits: int) -> int:
        waves = -(-batch * kv_heads * splits // slots)
        return waves * (-(-tiles // splits) + (SPLIT_OVERHEAD_TILES if splits > 1 else 0))

    splits = min(range(1, min(tiles, MAX_SPLITS) + 1), key=lambda s: (slowest(s), s))
    return SplitPlan(splits, shape.block_t, shape.num_warps, shape.num_stages, native_fp8=capability >= 89)
