"""NVFP4 linear on fp8 tensor cores (W4A8): x rounded to e4m3 per token, weights formed as e4m3 in registers.

Two launches: quantise_e4m3.cu writes x as e4m3 with one float32 scale per token (amax / 448), w4a8_gemm.cu multiplies.
The second is programmatic: its blocks start, and fetch weights, which the quantiser does not write, while the first
still runs. The first is an ordinary launch, since x may come from the kernel ahead of it.

What it costs in accuracy: about 3.4 % rms of y against W4A16's 0.17 % (cases.py and NOTES.md derive both): 2.1 % for
code times block scale in e4m3's four bits (w4a8_tiles.py says how), 2.7 % for x. Weights in memory stay 4.5 bits.

Sums on fp8 tensor cores keep about 14 bits, which sums of either sign hardly show and sums of one sign do: an error
that grows with the length of a sum. `cuda_w4a8` adds them to float32 every 512 k in tiles of 32 and 64 tokens, every
1024 k in tiles of 128, and never in tiles of 256, whose sums leave no registers for a second set (M <= 128 never gets
one); cuBLAS's fast accumulation never does. `cuda_w4a8_promoted` adds them every 512 k at every M, in tiles of up to
128 tokens. The workloads `_positive` hold the errors of both (cases.py derives their limits).

Partial sums of stream-K tiles, and the flags that say they are there, belong to the prepared operands (up to
17 MB on 132 multiprocessors): one pair of prepared operands must not run twice at once, two pairs may.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels import cuda, cuda_driver
from kernels.common import Candidate, CudaSource, Needs, Tensors, Work, Workload
from kernels.nvfp4 import hopper, w4a8_tiles
from kernels.nvfp4.hopper import SHARED_BYTES, SMS

SOURCE = Path(__file__).with_name("w4a8_gemm.cu")
QUANTISER = Path(__file__).with_name("quantise_e4m3.cu")
M_MIN = 17
ALIGN_BYTES = 1024
TOKEN_TILES = (32, 64, 128, 256)
ITERATION_K_BLOCKS = 2  # k blocks of 128 in a stream-K iteration
# K blocks of 128 between additions to float32 sums by tokens of a tile, 0 for none; and of the promoted candidate.
PROMOTE = {32: 4, 48: 4, 64: 4, 128: 8, 256: 0}
PROMOTED = 4
# Clocks of one CTA for 128 k of 128 rows by so many tokens; of a stream-K tile: the fix-up, and adding one
# worker's sums; and what it costs that workers stand at different k. Fitted to one trial of 18 shapes with none held
# out: to order the choices and not to predict.
K_BLOCK_CLOCKS = {32: 600, 48: 680, 64: 760, 128: 1075, 256: 1660}
FIXUP_CLOCKS, PEER_CLOCKS, PEER_TOKEN_CLOCKS = 4300, 100, 11.3
# What stream-K tiles cost against data-parallel ones: little, unless x is so large that L2 cannot hold what workers at
# different k read of it. The second factor rests on one shape.
STREAM_K_FACTOR, STREAM_K_FACTOR_LARGE = 1.015, 1.26
LARGE_X_BYTES = 25e6  # of e4m3: half of an H200's L2
# Of 128 k. More were slower at 32 and 128 tokens, and no more fit at 256 (NOTES.md).
STAGES = {32: 6, 48: 6, 64: 6, 128: 5, 256: 5}
WIDE_TOKENS, WIDE_GROUPS = (48, 64), 3  # cuda_w4a8_wide: twelve warps that decode, for 33 to 64 tokens
QUANTISER_GROUPS = 512  # of 16 values, the most that a block takes at once


@dataclass(frozen=True)
class W4a8Config:
    """A compiled kernel (dtype .. promote) and its launch (grid, waves).

    tokens: of a tile, by 64 weight rows a warpgroup. promote: k blocks of 128 between additions to float32 sums, 0 for
    none. waves: of data-parallel tiles, before the stream-K partition of the tiles left. groups: warpgroups.
    """

    dtype: str
    tokens: int
    stages: int
    promote: int
    grid: int = SMS
    waves: int = 0
    groups: int = 2

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        wide = f"_g{self.groups}" if self.groups != 2 else ""
        return f"nvfp4_w4a8_{self.dtype}_t{self.tokens}_s{self.stages}_p{self.promote}{wide}"

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return 64 * self.groups

    @property
    def stage_bytes(self) -> int:
        return 128 * self.tokens + self.groups * w4a8_tiles.K_BLOCK_BYTES // 2

    @property
    def part_floats(self) -> int:
        """Partial sums of one CTA."""
        return self.rows * self.tokens

    @property
    def shared_bytes(self) -> int:
        """Stages, two warpgroups' results, barriers and room to align: as w4a8_gemm.cu lays them out."""
        return _fixed_bytes(self.tokens, self.groups) + self.stages * (self.stage_bytes + 16)

    def __str__(self) -> str:
        return f"{self.kernel} grid={self.grid} waves={self.waves}"


def _fixed_bytes(tokens: int, groups: int = 2) -> int:
    return groups * min(64, tokens) * (128 + 16) + ALIGN_BYTES


def _clocks(m: int, tokens: int, k_blocks: int, tiles: int, workers: int, waves: int) -> float:
    """Estimate for `tiles` tiles of `k_blocks` k blocks: `waves` whole ones per worker, the rest by stream-K."""
    left = max(0, tiles - waves * workers)
    factor = STREAM_K_FACTOR_LARGE if m * k_blocks * w4a8_tiles.COLS > LARGE_X_BYTES else STREAM_K_FACTOR
    multiply = (waves + factor * left / workers) * k_blocks * K_BLOCK_CLOCKS[tokens]
    others = -(-workers // left) if left else 0
    return multiply + (FIXUP_CLOCKS + others * (PEER_CLOCKS + PEER_TOKEN_CLOCKS * tokens) if left else 0)


def choose_config(
    m: int, n: int, k: int, dtype: str, sms: int = SMS, promoted: bool = False, **fixed: Any
) -> W4a8Config:
    """The configuration for m tokens, n weight rows, k values, dtype "bf16" or "fp16" of y; `fixed` overrides fields.

    promoted: sums added to float32 every PROMOTED k blocks, and no tile of 256 tokens, where both sets do not fit.
    Raises ValueError when k is no multiple of 16 or the tile does not fit.
    """
    if k % 16 or m < 1:
        raise ValueError(f"m={m}, k={k}: takes at least one token and k a multiple of 16; pad k with zeros")
    k_blocks = w4a8_tiles.k_blocks_of(k)
    choices = []
    for tokens in (fixed["tokens"],) if "tokens" in fixed else TOKEN_TILES:
        too_many = (tokens >= 2 * m and tokens > min(TOKEN_TILES)) or (promoted and tokens > 128)
        if too_many and "tokens" not in fixed:
            continue
        config = replace(W4a8Config(dtype, tokens, 1, PROMOTED if promoted else PROMOTE[tokens]), **fixed)
        room = (SHARED_BYTES - _fixed_bytes(tokens, config.groups)) // (config.stage_bytes + 16)
        config = replace(config, stages=min(room, fixed.get("stages", STAGES[tokens])))
        tiles = -(-n // config.rows) * -(-m // tokens)
        whole = tiles // sms
        for waves in {fixed["waves"]} if "waves" in fixed else {0, max(0, whole - 1), whole, -(-tiles // sms)}:
            iterations = tiles if waves * sms >= tiles else tiles * (k_blocks // ITERATION_K_BLOCKS)
            clocks = _clocks(m, tokens, k_blocks, tiles, sms, waves)
            choices.append((clocks, -tokens, waves, replace(config, grid=min(sms, iterations), waves=waves)))
    config = min(choices, key=lambda choice: choice[:3])[-1]
    if config.stages < 2:
        raise ValueError(f"{config}: shared memory holds one stage of {config.stage_bytes} bytes; use a smaller tile")
    return config


@functools.cache
def _source(kernel: W4a8Config) -> CudaSource:
    macros = {
        "OUT_BF16": int(kernel.dtype == "bf16"),
        "BLOCK_M": kernel.tokens,
        "STAGES": kernel.stages,
        "PROMOTE": kernel.promote,
    } | ({"CONSUMERS": kernel.groups} if kernel.groups != 2 else {})
    return hopper.source(SOURCE, kernel.kernel, kernel.shared_bytes, macros)


def source(config: W4a8Config) -> CudaSource:
    """What `config` compiles to; the launch's part of it does not count."""
    return _source(replace(config, grid=0, waves=0))


def quantiser_shape(k: int) -> tuple[int, int]:
    """(groups of 16 values per thread, threads) of a block of the quantiser, which takes one token."""
    groups = w4a8_tiles.k_blocks_of(k) * w4a8_tiles.COLS // 16
    items = -(-groups // QUANTISER_GROUPS)
    return items, -(-groups // (32 * items)) * 32


@functools.cache
def quantiser_source(dtype: str, items: int) -> CudaSource:
    """The quantiser for x of dtype "bf16" or "fp16" with `items` groups per thread."""
    name = f"nvfp4_quantise_e4m3_{dtype}_i{items}"
    return hopper.source(QUANTISER, name, 0, {"X_BF16": int(dtype == "bf16"), "ITEMS": items})


def workspace(config: W4a8Config, device: torch.device) -> Tensors:
    """What the CTAs of one launch leave to each other: sums, and flags that every launch puts back to zero."""
    return {
        "parts": torch.empty(config.grid * config.part_floats, device=device),
        "flags": torch.zeros(config.groups * config.grid, dtype=torch.int32, device=device),
    }


def choose_wide(m: int, n: int, k: int, dtype: str, sms: int = SMS) -> W4a8Config:
    """For 33 to 64 tokens: tiles of 192 rows by 48 or 64 tokens. Raises ValueError for other numbers of tokens."""
    if not 32 < m <= max(WIDE_TOKENS):
        raise ValueError(f"m={m}: tiles of 192 rows take 33 to {max(WIDE_TOKENS)} tokens; use cuda_w4a8")
    tokens = next(t for t in WIDE_TOKENS if t >= m)
    return choose_config(m, n, k, dtype, sms, tokens=tokens, groups=WIDE_GROUPS)


def _config_of(x: torch.Tensor, n: int, device: torch.device, promoted: bool, wide: bool = False) -> W4a8Config:
    """The configuration for x [M, K] and n weight rows on a device, y of x's dtype."""
    (m, k), sms = x.shape, hopper.multiprocessors(device.index or 0) if device.type == "cuda" else SMS
    dtype = hopper.ELEMENTS.get(x.dtype, "")
    return choose_wide(m, n, k, dtype, sms) if wide else choose_config(m, n, k, dtype, sms, promoted)


def prepare(inputs: Tensors, promoted: bool = False, wide: bool = False) -> Tensors:
    """x as it is, weights as tiles with a scale per row (w4a8_tiles.py), room for x as e4m3, and the workspace."""
    x, scale = inputs["x"], inputs["w_tensor_scale"]
    config = _config_of(x, inputs["w_packed"].shape[0], scale.device, promoted, wide)
    tiles, powers = w4a8_tiles.tile_weights(inputs["w_packed"], inputs["w_scale"])
    padded = w4a8_tiles.k_blocks_of(x.shape[1]) * w4a8_tiles.COLS
    return {
        "x": x,
        "w": tiles,
        "w_row_scale": powers * scale,
        "x_e4m3": torch.empty(x.shape[0], padded, dtype=torch.uint8, device=scale.device),
        # A tile reads the scales of all its tokens, there or not.
        "x_scale": torch.ones(-(-x.shape[0] // 256) * 256, dtype=torch.float32, device=scale.device),
        **workspace(config, scale.device),
    }


def quantise(args: Tensors) -> None:
    """x_e4m3 and x_scale from x, on torch's current stream. ValueError when x is not contiguous 16-bit values."""
    x, out = args["x"], args["x_e4m3"]
    dtype = hopper.ELEMENTS.get(x.dtype, "")
    if not dtype or not x.is_contiguous() or x.data_ptr() % 16 or x.shape[0] != out.shape[0]:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; pass contiguous bf16 or fp16 [M, K] that "
            f"starts on 16 bytes, with M={out.shape[0]} as prepared"
        )
    items, threads = quantiser_shape(x.shape[1])
    source = quantiser_source(dtype, items)
    kernel = cuda.load(source, source.kernels[0], x.device.index or 0)
    arguments = (x, out, args["x_scale"], cuda.i32(x.shape[1]), cuda.i32(out.shape[1]))
    cuda.launch(kernel, (x.shape[0],), threads, arguments)


def multiply(args: Tensors, y: torch.Tensor, config: W4a8Config, programmatic: bool = True) -> None:
    """y[M, N] from x_e4m3, x_scale and the tiles, after `quantise` on the same stream. ValueError on a mismatch."""
    x, w = args["x_e4m3"], args["w"]
    (m, padded), n = x.shape, y.shape[1]
    k_blocks = padded // w4a8_tiles.COLS
    hopper.check(args["x"], w, y, w4a8_tiles.ROWS, k_blocks)
    if hopper.ELEMENTS.get(y.dtype, "") != config.dtype:
        raise ValueError(f"y is {y.dtype} and {config} writes {config.dtype}; pass y of that type")
    parts, flags = args["parts"], args["flags"]
    if parts.numel() < config.grid * config.part_floats or flags.numel() < config.groups * config.grid:
        raise ValueError(f"{parts.numel()} partial sums are too few for {config}; pass its workspace()")
    device = x.device.index or 0
    kernel = cuda.load(source(config), config.kernel, device, config.shared_bytes)
    numbers = (m, n, k_blocks // ITERATION_K_BLOCKS, -(-n // config.rows), -(-m // config.tokens), config.waves)
    # To the copy engine a row of bytes is a row of half as many 16-bit elements.
    x_map = cuda_driver.tensor_map(x.data_ptr(), "bf16", m, padded // 2, config.tokens)
    arguments = (x_map, args["x_scale"], w, args["w_row_scale"], y, parts, flags, *map(cuda.i32, numbers))
    cuda.launch(kernel, (config.grid,), config.threads, arguments, config.shared_bytes, programmatic)


def run(args: Tensors, out: Tensors, promoted: bool = False, wide: bool = False) -> None:
    """y[M, N] = x[M, K] @ w^T in two launches, the quantisation of x included."""
    y = out["y"]
    quantise(args)
    multiply(args, y, _config_of(args["x"], y.shape[1], y.device, promoted, wide))


def _refuses(workload: Workload) -> str:
    m, dtype, weights = workload["M"], workload["dtype"], workload.axes.get("weights", "nvfp4")
    if dtype not in ("bf16", "fp16") or weights != "nvfp4":
        return f"dtype={dtype}, weights={weights}: takes NVFP4 weights and x in bf16 or fp16"
    return "" if m >= M_MIN else f"M={m} < {M_MIN}: bound by reading the weights, where e4m3 gains nothing"


def _config(workload: Workload, promoted: bool = False) -> str:
    m, n, k, dtype = (workload.axes[axis] for axis in ("M", "N", "K", "dtype"))
    return str(choose_config(int(m), int(n), int(k), str(dtype), promoted=promoted))


def _refuses_wide(workload: Workload) -> str:
    m = workload["M"]
    return _refuses(workload) or ("" if 32 < m <= max(WIDE_TOKENS) else f"M={m}: for 33 to 64 tokens; use cuda_w4a8")


def _config_wide(workload: Workload) -> str:
    return str(choose_wide(workload["M"], workload["N"], workload["K"], workload["dtype"]))


def work(workload: Workload, sms: int, promoted: bool = False) -> Work:
    """The quantiser, then tiles and their fix-up."""
    m, n, k = (int(workload[axis]) for axis in "MNK")
    config = choose_config(m, n, k, workload["dtype"], sms, promoted)
    k_blocks, tiles = w4a8_tiles.k_blocks_of(k), -(-n // w4a8_tiles.ROWS) * -(-m // config.tokens)
    left = max(0, tiles - config.waves * config.grid)
    blocks = (config.waves + STREAM_K_FACTOR * left / config.grid) * k_blocks
    at_once = {
        "bytes": n * k * w4a8_tiles.ROW_TILE_BYTES / (16 * w4a8_tiles.COLS) + 2.0 * m * n,
        "tiles": blocks * K_BLOCK_CLOCKS[config.tokens],
    }
    fixup = FIXUP_CLOCKS + -(-config.grid // left) * (PEER_CLOCKS + PEER_TOKEN_CLOCKS * config.tokens) if left else 0.0
    return Work(at_once, {"launches": 2.0, "quantise": m * k / sms / 4, "fixup": fixup})


CUDA_SOURCES = (
    *dict.fromkeys(
        source(choose_config(m, 17408, 5120, dtype))
        for m, dtype in ((32, "bf16"), (64, "bf16"), (128, "bf16"), (512, "bf16"), (64, "fp16"), (512, "fp16"))
    ),
    source(choose_config(128, 17408, 5120, "bf16", promoted=True)),
    source(choose_wide(33, 17408, 5120, "bf16")),
    source(choose_wide(64, 17408, 5120, "bf16")),
    quantiser_source("bf16", 1),
    quantiser_source("fp16", 3),
)

CANDIDATES = (
    *(
        Candidate(
            name=name,
            precision=precision,
            run=functools.partial(run, promoted=promoted),
            needs=Needs(capability=(9, 0), packages=("cupy",)),
            prepare=functools.partial(prepare, promoted=promoted),
            refuses=_refuses,
            config=functools.partial(_config, promoted=promoted),
            work=functools.partial(work, promoted=promoted),
        )
        for name, precision, promoted in (
            ("cuda_w4a8", "nvfp4-w4a8-fast", False),
            ("cuda_w4a8_promoted", "nvfp4-w4a8", True),
        )
    ),
    Candidate(
        name="cuda_w4a8_wide",
        precision="nvfp4-w4a8",
        run=functools.partial(run, wide=True),
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=functools.partial(prepare, wide=True),
        refuses=_refuses_wide,
        config=_config_wide,
        no_route="slower than cuda_w4a8 on an H100 (card w4a8-33-tokens), and an H200 has not timed it",
    ),
)
