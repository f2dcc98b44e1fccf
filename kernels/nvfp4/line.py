"""wgmma_stream.cu on the one layout (row_tiles.py), for 9 to 128 tokens: its configuration and launch.

Weights are decoded once for all tokens of a launch, whatever their number; both operands come by tensor maps. The CTAs,
or pairs of CTAs that share x, share the iterations (a block of rows by 128 k) of all blocks evenly, and reduce in
slices: whose walk ends in a block adds its part of the 8-token tiles (wgmma_stream.cu). So few blocks with long K cost
no more than many: no CTA adds up the sums of all others.

What they leave each other (`sums`: all ones between launches, so no memory of wgmma_gemm.cu's `parts`) belongs to the
prepared operands: one pair of these must not run twice at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels import cuda, cuda_driver
from kernels.common import CudaSource, Tensors
from kernels.nvfp4 import hopper, stream, tiles
from kernels.nvfp4.hopper import SHARED_BYTES, SMS

TOKENS = (16, 32, 48, 64, 80, 96, 112, 128)  # of a compiled kernel
STAGES = 4
K_BLOCKS = 2  # of 64 k, in an iteration
# Clocks of a CTA for 128 k: of 64 rows' decoding, of their products with one token, and of the rest. By the rule that
# products and other instructions of a multiprocessor add up (NOTES.md); of one block's sums, by token; of a launch.
DECODE_CLOCKS, TOKEN_CLOCKS, ITERATION_CLOCKS, SUM_CLOCKS, PAIR_CLOCKS = 170, 4, 60, 16, 800
TWO_GROUPS_FACTOR = 1.2  # eight warps hide less of their latencies, and x is read for half the rows
PAIR_TOKENS, PAIR_ITERATIONS = 48, 12  # from here on x is read so often that two CTAs share it


@dataclass(frozen=True)
class LineConfig:
    """A compiled kernel (dtype .. stages, gated) and its launch (workers).

    tokens: that the products have. groups: warpgroups of 64 rows each. cluster: CTAs that share x. stages: of the
    pipeline, an iteration (64 rows a group x 128 k, its x) each. workers: CTAs, or clusters. gated: as of StreamConfig.
    """

    dtype: str
    tokens: int
    groups: int = 4
    cluster: int = 1
    stages: int = STAGES
    workers: int = 1
    gated: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        gated = "_gated" * self.gated
        return f"nvfp4_line_{self.dtype}_t{self.tokens}_g{self.groups}_x{self.cluster}_s{self.stages}{gated}"

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def rows(self) -> int:
        """Weight rows of a worker's block."""
        return 64 * self.groups * self.cluster

    @property
    def stage_bytes(self) -> int:
        return K_BLOCKS * (4 * self.groups * tiles.TILE_BYTES + 128 * self.tokens)

    @property
    def shared_bytes(self) -> int:
        """Stages, rows of y and barriers, as wgmma_stream.cu lays them out."""
        return self.stages * (self.stage_bytes + 16) + 2 * 64 * self.groups * self.tokens

    @property
    def part_floats(self) -> int:
        """Sums of one block in global memory."""
        return self.rows * self.tokens

    def __str__(self) -> str:
        return f"{self.kernel} workers={self.workers}"


def depth_of(k: int) -> int:
    """Iterations (of 128 k) along K."""
    return -(-k // (K_BLOCKS * tiles.COLS))


def iterations_of(n: int, k: int, rows: int) -> int:
    """Stream-K iterations of n weight rows, in blocks of `rows`, and k values."""
    return -(-n // rows) * depth_of(k)


def clocks(config: LineConfig, n: int, k: int) -> tuple[float, float]:
    """Estimates for n weight rows and k values: of the longest walk, and of the sums that a worker adds up after it."""
    each = -(-iterations_of(n, k, config.rows) // config.workers)
    factor = TWO_GROUPS_FACTOR if config.groups == 2 else 1.0
    iteration = factor * (config.groups * (DECODE_CLOCKS + TOKEN_CLOCKS * config.tokens) + ITERATION_CLOCKS)
    return each * iteration, SUM_CLOCKS * config.groups * config.tokens + PAIR_CLOCKS * (config.cluster - 1)


def choose_config(m: int, n: int, k: int, dtype: str, sms: int = SMS, **fixed: Any) -> LineConfig:
    """The configuration for m tokens, n weight rows, k values, dtype "bf16" or "fp16"; `fixed` overrides fields.

    Warpgroups (4 where shared memory and registers hold their tokens, else 2) are those of the least estimated time;
    two CTAs share x where each has PAIR_ITERATIONS of more than PAIR_TOKENS tokens. Raises ValueError when k is no
    multiple of 16, m is out of range or the stages do not fit.
    """
    if k % 16 or not 1 <= m <= max(TOKENS):
        raise ValueError(f"m={m}, k={k}: takes 1 to {max(TOKENS)} tokens and k a multiple of 16; pad k with zeros")
    tokens = next(t for t in TOKENS if t >= m)
    choices = []
    for groups in (fixed["groups"],) if "groups" in fixed else (4, 2) if tokens <= 96 else (2,):
        rows = 64 * groups
        pays = m > PAIR_TOKENS and iterations_of(n, k, rows) >= PAIR_ITERATIONS * sms
        config = replace(LineConfig(dtype, tokens, groups, 2 if pays else 1), **fixed)
        workers = min(sms // config.cluster, iterations_of(n, k, config.rows))
        config = replace(config, workers=fixed.get("workers", workers))
        choices.append((sum(clocks(config, n, k)), -groups, config))
    config = min(choices, key=lambda choice: choice[:2])[-1]
    if config.shared_bytes > SHARED_BYTES or config.stages < 4 or config.stages & (config.stages - 1):
        raise ValueError(f"{config}: stages are a power of two from 4 on that fits {SHARED_BYTES} bytes; leave it out")
    return config


def source(config: LineConfig) -> CudaSource:
    """What `config` compiles to; the launch's part of it does not count."""
    macros = {
        "X_BF16": int(config.dtype == "bf16"),
        "BLOCK_M": config.tokens,
        "STAGES": config.stages,
        "NATURAL": 1,
        "CONSUMERS": config.groups,
        "CLUSTER": config.cluster,
    } | ({"GATED": 1} if config.gated else {})
    return hopper.source(stream.SOURCE, config.kernel, config.shared_bytes, macros)


def workspace(config: LineConfig, device: torch.device) -> Tensors:
    """Where the CTAs of a launch leave sums to each other: words of all ones (ABSENT), which each launch puts back."""
    return {"sums": torch.full((2 * config.workers * config.part_floats,), -1, dtype=torch.int32, device=device)}


def numbers(m: int, n: int, k: int, config: LineConfig) -> tuple[int, ...]:
    """What the kernel is told of y [m, n]: m, n, iterations of a block, and the stream-K partition."""
    return m, n, depth_of(k), *divmod(iterations_of(n * (1 + config.gated), k, config.rows), config.workers)


def launch(args: Tensors, y: torch.Tensor, config: LineConfig, programmatic: bool = False) -> None:
    """y[M, N] = x[M, K] @ w^T with `config`, one launch on torch's current stream. ValueError on a mismatch.

    y is [M, N / 2] where `config` is gated. programmatic: it may start, and fetch weights, while the kernel ahead of
    it ends.
    """
    x, w, sums = args["x"], args["w"], args["sums"]
    (m, k), n = x.shape, y.shape[1]
    rows = tiles.ROWS // (1 + config.gated)
    if hopper.check(x, w, y, rows, -(-k // tiles.COLS)) != config.dtype or m > config.tokens:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; {config} takes {config.dtype} of at most {config.tokens}")
    if sums.numel() < 2 * config.workers * config.part_floats:
        raise ValueError(f"{sums.numel()} partial sums are too few for {config}; pass its workspace()")
    device = x.device.index or 0
    kernel = cuda.load(source(config), config.kernel, device, config.shared_bytes)
    x_map = cuda_driver.tensor_map(x.data_ptr(), config.dtype, m, k, config.tokens // config.cluster)
    w_map = tiles.boxes(w, 4 * config.groups, K_BLOCKS)
    arguments = (x_map, w_map, args["w_tensor_scale"], y, sums, *(cuda.i32(v) for v in numbers(m, n, k, config)))
    blocks = config.workers * config.cluster
    cuda.launch(kernel, (blocks,), config.threads, arguments, config.shared_bytes, programmatic)
