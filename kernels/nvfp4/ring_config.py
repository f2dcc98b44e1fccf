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
MAX_STAGES = 48  # barriers for them and for 16 stages of sums fit in BARRIER_BYTES
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
PDL_FLIGHT_BYTES = 92 * 1024  # what arrives while the kernel ahead ends, about 2.7 us of memory

FORMS = ("", "cuda_decode_chained")  # a launch that waits, and a programmatic one


@dataclass(frozen=True)
class RingConfig:
    """A compiled kernel (dtype .. pdl) and its launch (grid).

    tokens: M rounded up to a multiple of 8. k_tiles: tiles of K per warp. warps: math warps, which share K.
    cluster: CTAs of a cluster, which split K. stage_tiles: tiles per warp and stage. stages: of the CTA. sum_stages: of
    partial sums, a row tile each. ragged_tiles: tiles that some warp's k slice may lack of `k_tiles`. reducers: reducer
    warps, which add the sums. registers: a thread's in `warps`, where the other warps have fewer; else 0. evict_first:
    the L2 policy of the weights. pdl: a programmatic dependent launch. natural: tiles of row_tiles.py, not tiles.py.
    gated: SiLU(gate) * up of rows that alternate in eights (gated.py).
    """

    dtype: str
    tokens: int
    k_tiles: int
    warps: int
    cluster: int
    stage_tiles: int
    stages: int
    sum_stages: int
    ragged_tiles: int
    reducers: int
    registers: int
    evict_first: bool
    pdl: bool
    grid: int
    natural: bool = False
    gated: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        sizes = {"t": self.tokens, "c": self.k_tiles, "w": self.warps, "k": self.cluster}
        sizes |= {"p": self.stage_tiles, "st": self.stages, "s": self.sum_stages, "m": self.ragged_tiles}
        sizes |= {"f": self.reducers} if self.reducers > 1 else {}
        sizes |= {"r": self.registers} if self.registers else {}
        flags = {"once": self.evict_first, "pdl": self.pdl, "natural": self.natural, "gated": self.gated}
        parts = (self.dtype, *(f"{name}{size}" for name, size in sizes.items()))
        return "_".join(("nvfp4_ring", *parts, *(name for name, is_set in flags.items() if is_set)))

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (4 if self.registers else 1 + self.reducers))

    @property
    def stage_bytes(self) -> int:
        return -(-self.stage_tiles * self.warps * tiles.TILE_BYTES // 128) * 128

    @property
    def shared_bytes(self) -> int:
        """Barriers, sums of the cluster's CTAs, stages of partial sums, stages: as ring_decode.cu lays them out."""
        row_tile_bytes = self.tokens // 8 * 512
        places = PLACES * self.cluster * row_tile_bytes if self.cluster > 1 else 0
        fixed = BARRIER_BYTES + places + self.sum_stages * self.warps * row_tile_bytes
        return fixed + self.stages * self.stage_bytes

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid} shared={self.shared_bytes}"


def tokens_of(m: int) -> int:
    """Columns of the products for m tokens."""
    return -(-m // 8) * 8


def registers(m: int, k: int, cluster: int, warps: int) -> int | None:
    """A thread's registers by setmaxnreg where a warp multiplies; 0: an even part is enough, None: no part is."""
    if not 1 <= m <= M_MAX:
        return None
    tokens = tokens_of(m)
    k_tiles = math.ceil(math.ceil(k / tiles.COLS / cluster) / warps)
    room = next((most for warps_, most in OPERAND_TILES.items() if warps <= warps_), (0,) * 4)
    if k_tiles <= room[tokens // 8 - 1]:
        return 0
    their_warps, more, most = UNEVEN.get(tokens, (0, 0, 0))
    return more if warps == their_warps and k_tiles <= most else None


def fits(m: int, k: int, cluster: int, warps: int = 8) -> bool:
    """Whether a CTA can keep its share of x in registers, which ring_decode.cu needs."""
    return registers(m, k, cluster, warps) is not None


def instead(m: int) -> str:
    """The candidate to name where this one refuses m tokens; cuda_gemm's tiles would be mostly padding up to 8."""
    return "cuda_gemm" if m > 8 else "cuda_gemv"


def choose_cluster(m: int, k: int) -> int:
    """CTAs that share K: two where K is long enough, four where two cannot keep x, which is slower past 16 tokens."""
    if m <= 16 and not choose_warps(m, k, 2):
        return 4
    return 2 if k >= 4096 or m > 16 else 1


def reads_x_for_long(m: int, k: int) -> bool:
    """Whether two CTAs keep x of long K, so that weights wait for it longer and more of them may be under way."""
    return m <= 8 and k > LONG_K


def choose_stage_tiles(m: int, k: int, k_tiles: int) -> int:
    """Tiles a warp and stage, of `k_tiles`: half of them, or a third where x takes long, or all of an odd number."""
    if reads_x_for_long(m, k):
        return math.ceil(k_tiles / 3)
    return k_tiles if k_tiles % 2 else k_tiles // 2


def choose_warps(m: int, k: int, cluster: int) -> int:
    """Warps that share K in a CTA: 8, or 12 to 14 where each would have many products, or 10; 0 if none keep x.

    For long K the fewest of them, since more warps make larger stages; for 16 tokens those whose tiles come out even.
    """
    share = math.ceil(math.ceil(k / tiles.COLS) / cluster)
    first = [12, 13, 14] if k > LONG_K else []
    if k <= LONG_K and cluster == 2 and tokens_of(m) == 16:
        first = sorted((12, 8, 13, 14), key=lambda warps: -share % warps)
    return next((warps for warps in (*first, 8, 10) if fits(m, k, cluster, warps)), 0)


def choose_reducers(m: int, warps: int) -> int:
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
    cluster: int = 0,
    warps: int = 0,
    stage_tiles: int = 0,
    stages: int = 0,
    sum_stages: int = 2,
    reducers: int = 0,
    evict_first: bool = True,
    pdl: bool = False,
    natural: bool = False,
    gated: bool = False,
) -> RingConfig:
    """The configuration for m tokens, n weight rows, k values, dtype "bf16" or "fp16".

    sms: multiprocessors that clusters can hold; 0: as on an H200. 0 chooses: cluster, warps and reducers by the
    functions above, stage_tiles likewise; FLIGHT_BYTES of stages, two at least, and one that is being read.
    Raises ValueError when a CTA cannot keep its share of x, or k is no multiple of 16.
    """
    if k % 16:
        raise ValueError(f"k={k} is no multiple of 16; pad k with zeros")
    total = -(-k // tiles.COLS)
    cluster = min(cluster or choose_cluster(m, k), total)
    warps = warps or choose_warps(m, k, cluster)
    if not warps or not fits(m, k, cluster, warps):
        raise ValueError(f"M={m}, K={k}: {cluster} x {warps or 14} warps cannot keep x in registers; use {instead(m)}")
    share = -(-total // cluster)
    k_tiles = -(-share // warps)
    fewest = max(0, total - (cluster - 1) * share)  # tiles of the last CTA
    stage_tiles = min(stage_tiles or choose_stage_tiles(m, k, k_tiles), k_tiles)
    stages_a_row_tile = -(-k_tiles // stage_tiles)
    row_tiles = -(-n // tiles.ROWS)
    workers = min((sms or SMS_HELD[cluster]) // cluster, row_tiles)
    config = RingConfig(
        dtype=dtype,
        tokens=tokens_of(m),
        k_tiles=k_tiles,
        warps=warps,
        cluster=cluster,
        stage_tiles=stage_tiles,
        stages=1,
        sum_stages=sum_stages,
        ragged_tiles=k_tiles - fewest // warps,
        reducers=reducers or choose_reducers(m, warps),
        registers=registers(m, k, cluster, warps) or 0,
        evict_first=evict_first,
        pdl=pdl,
        grid=workers * cluster,
        natural=natural,
        gated=gated,
    )
    room = (SHARED_BYTES - config.shared_bytes) // config.stage_bytes + 1
    most = PDL_FLIGHT_BYTES if pdl else LONG_FLIGHT_BYTES if reads_x_for_long(m, k) else FLIGHT_BYTES
    flight, copies = most // config.stage_bytes, -(-row_tiles // workers) * stages_a_row_tile
    return replace(config, stages=max(1, min(stages or max(2, flight) + 1, room, MAX_STAGES, copies)))


def in_form(m: int, n: int, k: int, dtype: str, form: str, sms: int = 0, gated: bool = False) -> RingConfig:
    """choose_ring's configuration of a form of FORMS."""
    return choose_ring(m, n, k, dtype, sms, pdl=form != "", gated=gated)


@functools.cache
def source(config: RingConfig) -> CudaSource:
    """The translation unit of a configuration: ring_decode.cu with its macros."""
    macros = {
        "X_BF16": int(config.dtype == "bf16"),
        "BLOCK_M": config.tokens,
        "K_TILES": config.k_tiles,
        "WARPS": config.warps,
        "CLUSTER": config.cluster,
        "STAGE_TILES": config.stage_tiles,
        "STAGES": config.stages,
        "SUM_STAGES": config.sum_stages,
        "RAGGED_TILES": config.ragged_tiles,
        "REDUCERS": config.reducers,
        "REGISTERS": config.registers,
        "EVICT_FIRST": int(config.evict_first),
        "PDL": int(config.pdl),
    }
    macros |= {name: 1 for name, is_set in (("NATURAL", config.natural), ("GATED", config.gated)) if is_set}
    return hopper.source(SOURCE, config.kernel, config.shared_bytes, macros)
