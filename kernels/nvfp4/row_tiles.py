"""One weight layout for 1 to thousands of tokens: row tiles, in the order of k that wgmma takes from a row of x.

    tiles: uint8 [ceil(N / 16), ceil(K / 64), 576], each a tile of gemm_tiles.py: 16 rows x 64 k

so a row tile is one contiguous run along K, which is what the decode kernel streams, and 1 or 2 tiles of k by 8 or 16
row tiles are one box of a tensor map (tiles.boxes), which is what wgmma's kernels take as a stage. What lies past N or
K a box reads as zeros, so nothing is padded.

x needs no order of its own in shared memory: a tensor map brings it. Where it goes to registers (ring_decode.cu) a lane
wants k = 16 j + 2 t + {0, 1, 8, 9} of a row's 64 instead of 16 t .. 16 t + 15.
"""

from __future__ import annotations

import torch

from kernels.nvfp4 import gemm_tiles, tiles


def shape(n: int, k: int) -> tuple[int, int, int]:
    """The tiles' shape for n weight rows and k values."""
    return -(-n // tiles.ROWS), -(-k // tiles.COLS), tiles.TILE_BYTES


def tile_weights(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [row tiles, k tiles, 576] from uint8 [N, K / 2] and [N, K / 16], for x of `dtype` (bf16 or fp16)."""
    if (made := tiles.on_gpu(packed, scale, dtype, "row_tiles")) is not None:
        return made
    row_tiles, k_tiles, _ = shape(packed.shape[0], 2 * packed.shape[1])
    blocks = gemm_tiles.tile_weights(packed, scale, dtype)
    return blocks.transpose(1, 2).flatten(0, 1)[:row_tiles, :k_tiles].contiguous()
