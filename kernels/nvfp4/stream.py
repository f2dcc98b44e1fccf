"""cuda_gemm's kernel for 9 to 24 tokens of long K: wgmma_stream.cu's configuration and launch.

The weights are the decode kernel's (tiles.py), of which a stream-K iteration, 256 rows x 128 k, is a box of a tensor
map. CTAs share the iterations of all blocks evenly. What they leave each other belongs to the prepared operands, as
cuda_gemm's does: one pair of these must not run twice at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import CudaSource, Tensors
from kernels.nvfp4 import hopper, tiles
from kernels.nvfp4.hopper import SMS

SOURCE = Path(__file__).with_name("wgmma_stream.cu")
TOKENS = (16, 24)  # of a compiled kernel; at 32 line.py is 2 to 3 % faster (card one-layout-gemm on an H200)
ROWS, ROW_TILES, K_BLOCKS = 256, 16, 2  # rows and row tiles of a block, k blocks of an iteration
ITERATION_BYTES = K_BLOCKS * ROW_TILES * tiles.TILE_BYTES
STAGES = 4
ITERATIONS_MIN = 12  # of a multiprocessor, below which prologue and epilogue count too much (a trial: 7 lost, 21 won)


@dataclass(frozen=True)
class StreamConfig:
    """A compiled kernel (dtype, tokens, stages, gated) and its launch (workers).

    tokens: that the products have. stages: of the pipeline, an iteration (256 rows x 128 k, its x) each. workers: CTAs.
    gated: SiLU(gate) * up of rows that alternate in eights (gated.py).
    """

    dtype: str
    tokens: int
    stages: int
    workers: int = 1
    gated: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's name, which tells its macros."""
        return f"nvfp4_stream_{self.dtype}_t{self.tokens}_s{self.stages}_boxes{'_gated' * self.gated}"

    @property
    def threads(self) -> int:
        return 32 * (ROW_TILES + self.tokens // 8)

    @property
    def shared_bytes(self) -> int:
        """Stages and their barriers, as wgmma_stream.cu lays them out."""
        return self.stages * (ITERATION_BYTES + K_BLOCKS * 128 * self.tokens + 16) + 2 * self.part_floats

    @property
    def part_floats(self) -> int:
        """Sums of one block in global memory."""
        return ROWS * self.tokens

    def __str__(self) -> str:
        return f"{self.kernel} workers={self.workers}"


def depth_of(k: int) -> int:
    """Iterations (of 128 k) along K."""
    return -(-k // (K_BLOCKS * tiles.COLS))


def iterations_of(n: int, k: int) -> int:
    """Stream-K iterations of n weight rows and k values."""
    return -(-n // ROWS) * depth_of(k)


def pays(n: int, k: int, sms: int) -> bool:
    """Whether a multiprocessor has enough iterations."""
    return iterations_of(n, k) >= ITERATIONS_MIN * sms


def choose_config(m: int, n: int, k: int, dtype: str, sms: int = SMS, **fixed: Any) -> StreamConfig:
    """The configuration for m tokens, n weight rows, k values, dtype "bf16" or "fp16"; `fixed` overrides fields.

    sms: as many CTAs, where there are so many iterations.
    Raises ValueError when k is no multiple of 16, m is out of range or `stages` are no power of two from 4 on.
    """
    if k % 16 or not 1 <= m <= max(TOKENS):
        raise ValueError(f"m={m}, k={k}: takes 1 to {max(TOKENS)} tokens and k a multiple of 16; pad k with zeros")
    stages = fixed.get("stages", STAGES)
    if stages < 4 or stages & (stages - 1):
        raise ValueError(f"stages={stages}: wgmma_stream.cu counts them modulo a power of two from 4 on; leave it out")
    tokens = next(t for t in TOKENS if t >= m)
    return replace(StreamConfig(dtype, tokens, STAGES, min(sms, iterations_of(n, k))), **fixed)


def source(config: StreamConfig) -> CudaSource:
    """What `config` compiles to; the launch's part of it does not count."""
    macros = {"X_BF16": int(config.dtype == "bf16"), "BLOCK_M": config.tokens, "STAGES": config.stages}
    macros |= {"GATED": 1} if config.gated else {}
    return hopper.source(SOURCE, config.kernel, config.shared_bytes, macros)


def workspace(config: StreamConfig, device: torch.device) -> Tensors:
    """Where the CTAs of a launch leave sums to each other: words of all ones (ABSENT), which each launch puts back."""
    return {"parts": torch.full((2 * config.workers * config.part_floats,), -1, dtype=torch.int32, device=device)}


def numbers(m: int, n: int, k: int, config: StreamConfig) -> tuple[int, ...]:
    """What the kernel is told of y [m, n]: m, n, k, iterations of a block, and the stream-K partition."""
    return m, n, k, depth_of(k), *divmod(iterations_of(n * (1 + config.gated), k), config.workers)


def launch(args: Tensors, y: torch.Tensor, config: StreamConfig, programmatic: bool = False) -> None:
    """y[M, N] = x[M, K] @ w^T with `config`, one launch on torch's current stream. ValueError on a mismatch.

    y is [M, N / 2] where `config` is gated. programmatic: it may start, and fetch weights, while the kernel ahead of
    it ends.
    """
    x, w, parts = args["x"], args["w"], args["parts"]
    (m, k), n = x.shape, y.shape[1]
    rows = tiles.ROWS // (1 + config.gated)
    if hopper.check(x, w, y, rows, -(-k // tiles.COLS)) != config.dtype or m > config.tokens:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; {config} takes {config.dtype} of at most {config.tokens}")
    if parts.numel() < 2 * config.workers * config.part_floats:
        raise ValueError(f"{parts.numel()} partial sums are too few for {config}; pass its workspace()")
    device = x.device.index or 0
    kernel = cuda.load(source(config), config.kernel, device, config.shared_bytes)
    w_map = tiles.boxes(w, ROW_TILES, K_BLOCKS)
    arguments = (x, w_map, args["w_tensor_scale"], y, parts, *(cuda.i32(v) for v in numbers(m, n, k, config)))
    cuda.launch(kernel, (config.workers,), config.threads, arguments, config.shared_bytes, programmatic)
