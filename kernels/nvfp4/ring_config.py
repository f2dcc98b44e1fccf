"""How ring_decode.cu is compiled and launched for a shape: its macros, its grid, its shared memory.

A CTA's warps keep its share of x in registers, so there is a longest K for every M (`fits`); `instead` names who
takes the rest.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.common import CudaSource
from kernels.nvfp4 import hopper, tiles
from kernels.nvfp4.hopper import SHARED_BYTES, SMS_HELD

SOURCE = Path(__file__).with_name("ring_decode.cu")
M_MAX = 32
BARRIER_BYTES = 1024
MAX_STAGES = 48  # barriers for them and for 16 slots fit in BARRIER_BYTES
PLACES = 3  # as in ring_decode.cu
LONG_K = 12_288  # more is taken by more warps
# Tiles of K whose x a warp can keep without spilling, by the most warps that multiply, for 8, 16, 24 and 32 tokens: a
# tile takes 8 registers per 8 tokens, and with two more warps, 10 leave 168 registers a thread, 14 leave 128 and 18
# leave 96.
OPERAND_TILES = {10: (17, 7, 5, 3), 14: (12, 5, 3, 2), 18: (6, 3, 1, 1)}
# By setmaxnreg the warps that multiply can have more than the four beside them. By tokens: so many warps, registers a
# thread, and the tiles that they can then keep.
UNEVEN = {16: (12, 152, 6), 24: (8, 224, 6)}
# Bulk copies of weights in flight; 8 tokens of long K read x for longer. More is slower: later loads queue behind them.
FLIGHT_BYTES, LONG_FLIGHT_BYTES = 46 * 1024, 84 * 1024


@dataclass(frozen=True)
class RingConfig:
    """A compiled kernel (dtype .. chained) and its launch (grid).

    tokens: M rounded up to a multiple of 8. chunks: tiles of K per warp. warps: math warps, which share K.
    split: CTAs of a cluster, which share K. piece: tiles per warp and stage. stages: of the CTA. slots: stages
    of partial sums, a row tile each. missing: tiles
    that some warp's share may lack of `chunks`. finishers: reducer warps, which add them. registers: a thread's in
    `warps`, where the other warps have fewer; else 0. once: weights have the evict_first L2 policy. chained: a
    programmatic dependent launch.
    """

    dtype: str
    tokens: int
    chunks: int
    warps: int
    split: int
    piece: int
    stages: int
    slots: int
    missing: int
    finishers: int
    registers: int
    once: bool
    chained: bool
    grid: int

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        sizes = {"t": self.tokens, "c": self.chunks, "w": self.warps, "k": self.split}
        sizes |= {"p": self.piece, "st": self.stages, "s": self.slots, "m": self.missing}
        sizes |= {"f": self.finishers} if self.finishers > 1 else {}
        sizes |= {"r": self.registers} if self.registers else {}
        flags = {"once": self.once, "chained": self.chained}
        parts = (self.dtype, *(f"{name}{size}" for name, size in sizes.items()))
        return "_".join(("nvfp4_ring", *parts, *(name for name, is_set in flags.items() if is_set)))

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (4 if self.registers else 1 + self.finishers))

    @property
    def stage_bytes(self) -> int:
        return -(-self.piece * self.warps * tiles.TILE_BYTES // 128) * 128

    @property
    def shared_bytes(self) -> int:
        """Barriers, sums of the cluster's CTAs, slots of partial sums, stages: as ring_decode.cu lays them out."""
        strip = self.tokens // 8 * 512
        places = PLACES * self.split * strip if self.split > 1 else 0
        fixed = BARRIER_BYTES + places + self.slots * self.warps * strip
        return fixed + self.stages * self.stage_bytes

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid} shared={self.shared_bytes}"


def tokens_of(m: int) -> int:
    """Columns of the products for m tokens."""
    return -(-m // 8) * 8


def registers(m: int, k: int, split: int, warps: int) -> int | None:
    """A thread's registers by setmaxnreg where a warp multiplies; 0: an even part is enough, None: no part is."""
    if not 1 <= m <= M_MAX:
        return None
    tokens = tokens_of(m)
    chunks = math.ceil(math.ceil(k / tiles.COLS / split) / warps)
    room = next((most for warps_, most in OPERAND_TILES.items() if warps <= warps_), (0,) * 4)
    if chunks <= room[tokens // 8 - 1]:
        return 0
    their_warps, more, most = UNEVEN.get(tokens, (0, 0, 0))
    return more if warps == their_warps and chunks <= most else None


def fits(m: int, k: int, split: int, warps: int = 8) -> bool:
    """Whether a CTA can keep its share of x in registers, which ring_decode.cu needs."""
    return registers(m, k, split, warps) is not None


def instead(m: int) -> str:
    """The candidate to name where this one refuses m tokens; cuda_gemm's tiles would be mostly padding up to 8."""
    return "cuda_gemm" if m > 8 else "cuda_gemv"


def choose_split(m: int, k: int) -> int:
    """CTAs that share K: two where K is long enough, four where two cannot keep x, which is slower past 16 tokens."""
    if m <= 16 and not choose_warps(m, k, 2):
        return 4
    return 2 if k >= 4096 or m > 16 else 1


def reads_x_for_long(m: int, k: int) -> bool:
    """Whether two CTAs keep x of long K, so that weights wait for it longer and more of them may be under way."""
    return m <= 8 and k > LONG_K


def choose_piece(m: int, k: int, chunks: int) -> int:
    """Tiles a warp and stage, of `chunks`: half of them, or a third where x takes long, or all of an odd number."""
    if reads_x_for_long(m, k):
        return math.ceil(chunks / 3)
    return chunks if chunks % 2 else chunks // 2


def choose_warps(m: int, k: int, split: int) -> int:
    """Warps that share K in a CTA: 8, or 12 to 14 where each would have many products, or 10; 0 if none keep x.

    For long K the fewest of them, since more warps make larger stages; for 16 tokens those whose tiles come out even.
    """
    share = math.ceil(math.ceil(k / tiles.COLS) / split)
    first = [12, 13, 14] if k > LONG_K else []
    if k <= LONG_K and split == 2 and tokens_of(m) == 16:
        first = sorted((12, 8, 13, 14), key=lambda warps: -share % warps)
    return next((warps for warps in (*first, 8, 10) if fits(m, k, split, warps)), 0)


def choose_finishers(m: int, warps: int) -> int:
    """The most that share the columns evenly and leave a thread its registers (ptxas counts warps in fours)."""
    columns, spare = tokens_of(m) // 8, -(warps + 2) % 4 + 1
    return max(f for f in range(1, columns + 1) if columns % f == 0 and f <= spare)


def choose_ring(
    m: int,
    n: int,
    k: int,
    dtype: str,
    sms: int = 0,
    *,
    split: int = 0,
    warps: int = 0,
    piece: int = 0,
    stages: int = 0,
    slots: int = 2,
    finishers: int = 0,
    once: bool = True,
    chained: bool = False,
) -> RingConfig:
    """The configuration for m tokens, n weight rows, k values, dtype "bf16" or "fp16".

    sms: multiprocessors that clusters can hold; 0: as on an H200. 0 chooses: split, warps and finishers by the
    functions above, piece likewise; FLIGHT_BYTES of stages, two at least, and one that is being read.
    Raises ValueError when a CTA cannot keep its share of x, or k is no multiple of 16.
    """
    if k % 16:
        raise ValueError(f"k={k} is no multiple of 16; pad k with zeros")
    total = -(-k // tiles.COLS)
    split = min(split or choose_split(m, k), total)
    warps = warps or choose_warps(m, k, split)
    if not warps or not fits(m, k, split, warps):
        raise ValueError(f"M={m}, K={k}: {split} x {warps or 14} warps cannot keep x in registers; use {instead(m)}")
    share = -(-total // split)
    chunks = -(-share // warps)
    fewest = max(0, total - (split - 1) * share)  # tiles of the last CTA
    piece = min(piece or choose_piece(m, k, chunks), chunks)
    pieces = -(-chunks // piece)
    strips = -(-n // tiles.ROWS)
    workers = min((sms or SMS_HELD[split]) // split, strips)
    config = RingConfig(
        dtype=dtype,
        tokens=tokens_of(m),
        chunks=chunks,
        warps=warps,
        split=split,
        piece=piece,
        stages=1,
        slots=slots,
        missing=chunks - fewest // warps,
        finishers=finishers or choose_finishers(m, warps),
        registers=registers(m, k, split, warps) or 0,
        once=once,
        chained=chained,
        grid=workers * split,
    )
    room = (SHARED_BYTES - config.shared_bytes) // config.stage_bytes + 1
    flight = (LONG_FLIGHT_BYTES if reads_x_for_long(m, k) else FLIGHT_BYTES) // config.stage_bytes
    stages = min(stages or max(2, flight) + 1, room, MAX_STAGES)
    return replace(config, stages=max(1, min(stages, -(-strips // workers) * pieces)))


@functools.cache
def source(config: RingConfig) -> CudaSource:
    """The translation unit of a configuration: ring_decode.cu with its macros."""
    macros = {
        "X_BF16": int(config.dtype == "bf16"),
        "BLOCK_M": config.tokens,
        "K_TILES": config.chunks,
        "WARPS": config.warps,
        "CLUSTER": config.split,
        "STAGE_TILES": config.piece,
        "STAGES": config.stages,
        "SUM_STAGES": config.slots,
        "RAGGED_TILES": config.missing,
        "REDUCERS": config.finishers,
        "REGISTERS": config.registers,
        "EVICT_FIRST": int(config.once),
        "PDL": int(config.chained),
    }
    return hopper.source(SOURCE, config.kernel, config.shared_bytes, macros)
