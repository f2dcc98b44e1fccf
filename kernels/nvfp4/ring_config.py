"""How ring_decode.cu is compiled and launched for a shape: its macros, its grid, its shared memory.

cuda_decode.py decides between this kernel and mma_decode.cu; both take the tiles of tiles.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.common import CudaSource
from kernels.nvfp4 import tiles

SOURCE = Path(__file__).with_name("ring_decode.cu")
M_MAX = 16
SHARED_BYTES = 227 * 1024  # what a block may use on compute capability 9.0
BARRIER_BYTES = 1024
MAX_STAGES = 48  # barriers for them and for 16 slots fit in BARRIER_BYTES
# Tiles of K whose x a warp can keep without spilling, by multiplying warps and tokens: a tile takes 8 registers per 8
# tokens, and with two more warps, 8 leave 168 registers a thread and 16 leave 96.
OPERAND_TILES = {(8, 8): 17, (8, 16): 6, (16, 8): 6, (16, 16): 3}
FLIGHT_BYTES = 112 * 1024  # of weights on their way to an SM: with twice as many the first of them come later


@dataclass(frozen=True)
class RingConfig:
    """A compiled kernel (dtype .. early) and its launch (grid).

    tokens: M rounded up to 8 or 16. chunks: tiles of K per warp. warps: of a team, they share K. teams: they take turns
    with the strips. split: CTAs that share K. piece: tiles per warp and stage. stages: of the CTA. slots: strips whose
    partial sums are kept. missing: tiles that some warp's share may lack of `chunks`. once: weights are first to leave
    L2. early: weights may be read before the kernel ahead has ended.
    """

    dtype: str
    tokens: int
    chunks: int
    warps: int
    teams: int
    split: int
    piece: int
    stages: int
    slots: int
    missing: int
    once: bool
    early: bool
    grid: int

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        sizes = {"t": self.tokens, "c": self.chunks, "w": self.warps, "x": self.teams, "k": self.split}
        sizes |= {"p": self.piece, "st": self.stages, "s": self.slots, "m": self.missing}
        flags = {"once": self.once, "early": self.early}
        parts = (self.dtype, *(f"{name}{size}" for name, size in sizes.items()))
        return "_".join(("nvfp4_ring", *parts, *(name for name, is_set in flags.items() if is_set)))

    @property
    def threads(self) -> int:
        return 32 * (self.warps * self.teams + 2)

    @property
    def stage_bytes(self) -> int:
        return self.piece * self.warps * tiles.TILE_BYTES

    @property
    def shared_bytes(self) -> int:
        """Barriers, the other CTA's sums, slots of partial sums, stages: as ring_decode.cu lays them out."""
        strip = self.tokens // 8 * 512
        fixed = BARRIER_BYTES + (2 * strip if self.split == 2 else 0) + self.slots * self.warps * strip
        return fixed + self.stages * self.stage_bytes

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid} shared={self.shared_bytes}"


def fits(m: int, k: int, split: int, warps: int = 8, teams: int = 1) -> bool:
    """Whether a CTA can keep its share of x in registers, which ring_decode.cu needs."""
    if not 1 <= m <= M_MAX:
        return False
    chunks = math.ceil(math.ceil(k / tiles.COLS / split) / warps)
    return chunks <= OPERAND_TILES.get((warps * teams, 8 if m <= 8 else 16), 0)


def choose_ring(
    m: int,
    n: int,
    k: int,
    dtype: str,
    sms: int,
    *,
    split: int = 2,
    warps: int = 8,
    teams: int = 1,
    piece: int = 0,
    stages: int = 0,
    slots: int = 2,
    once: bool = False,
    early: bool = False,
) -> RingConfig:
    """The configuration for m tokens, n weight rows, k values, dtype "bf16" or "fp16".

    piece 0: a strip's share is one stage. stages 0: FLIGHT_BYTES of them, two strips at least. slots: of each team.
    Raises ValueError when a CTA cannot keep its share of x.
    """
    total = -(-k // tiles.COLS)
    split = min(split, total)
    if k % 16 or not fits(m, k, split, warps, teams):
        raise ValueError(
            f"m={m}, k={k}: {warps * teams} warps of {split} CTAs cannot keep x, or k is no multiple of 16; use"
            " mma_decode.cu's configuration"
        )
    tokens = 8 if m <= 8 else 16
    share = -(-total // split)
    chunks = -(-share // warps)
    fewest = total - (split - 1) * share  # tiles of the last CTA
    piece = min(piece or chunks, chunks)
    pieces = -(-chunks // piece)
    strips = -(-n // tiles.ROWS)
    workers = min(sms // split, strips)
    config = RingConfig(
        dtype=dtype,
        tokens=tokens,
        chunks=chunks,
        warps=warps,
        teams=teams,
        split=split,
        piece=piece,
        stages=1,
        slots=slots * teams,
        missing=chunks - fewest // warps,
        once=once,
        early=early,
        grid=workers * split,
    )
    step = teams * pieces if teams > 1 else 1  # a stage belongs to one team
    room = (SHARED_BYTES - config.shared_bytes) // config.stage_bytes + 1
    stages = min(stages or max(2 * pieces, FLIGHT_BYTES // config.stage_bytes), room, MAX_STAGES)
    stages = min(stages // step, -(-strips // workers) * pieces // step) * step
    return replace(config, stages=max(step, stages))


@functools.cache
def source(config: RingConfig) -> CudaSource:
    """The translation unit of a configuration: ring_decode.cu with its macros."""
    macros = {
        "KERNEL": config.kernel,
        "X_BF16": int(config.dtype == "bf16"),
        "TOKENS": config.tokens,
        "CHUNKS": config.chunks,
        "WARPS": config.warps,
        "TEAMS": config.teams,
        "SPLIT": config.split,
        "PIECE": config.piece,
        "STAGES": config.stages,
        "SLOTS": config.slots,
        "MISSING": config.missing,
        "ONCE": int(config.once),
        "EARLY": int(config.early),
    }
    return CudaSource(
        path=SOURCE,
        kernels=(config.kernel,),
        options=("--std=c++17", *(f"-D{name}={value}" for name, value in macros.items())),
        capability=(9, 0),
        architecture="sm_90a",
        shared_bytes=config.shared_bytes,
    )
