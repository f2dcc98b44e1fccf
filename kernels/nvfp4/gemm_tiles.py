"""The weight layout of a mixture's kernel for many tokens (kernels/moe/cuda_many.py); row_tiles.py has its tiles too.

128 rows x 64 k in 4608 bytes, in the order that wgmma takes:

    tiles: uint8 [ceil(N / 128), k blocks, 8 row tiles, 576] = 32 lanes x 16 bytes of codes, then 8 x 8 of scales

of 16 rows each, with K / 64 k blocks rounded up to a multiple of 4 (zeros), so 128 rows x any run of k blocks is one
bulk copy. Lane 4 g + t holds of rows g and g + 8 what the four k16 products take from it: k = 16 j + 2 t + {0, 1, 8,
9}, j = 0 .. 3, in the bit order of tiles.py, whose scale bytes these are too: row g's four in a word, then row g + 8's
four, at 8 g. In a word they stand in the order of SCALE_ORDER from the low byte on, rotated left by SCALE_TURN: so a
mask, or a turn by a byte and a mask, leaves two scales in its halves where the format has exponent and mantissa.

Why not tiles.py's own order, in which a lane owns whole scale groups and unpacks two scales instead of eight (0.4
operations a weight fewer)? It permutes k inside 64 in units of 4 bytes, x would have to follow, and neither the tensor
map nor wgmma's layouts move less than 16 bytes. A copy of x in that order costs a launch and 2 M K more bytes.
"""

from __future__ import annotations

import torch

from kernels.nvfp4 import format as fmt
from kernels.nvfp4 import tiles

ROWS, COLS, ROW_TILES = 128, 64, 8
K_BLOCK_MULTIPLE = 4
SCALE_ORDER, SCALE_TURN = (0, 2, 1, 3), {torch.bfloat16: 4, torch.float16: 7}
K_BLOCK_BYTES = ROW_TILES * tiles.TILE_BYTES


def k_blocks_of(k: int) -> int:
    """Tiles along K, the padding included."""
    return -(-k // (COLS * K_BLOCK_MULTIPLE)) * K_BLOCK_MULTIPLE


def tile_weights(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [row blocks, k blocks, 8, 576] from uint8 [N, K / 2] and [N, K / 16], for x of `dtype` (bf16 or fp16)."""
    if (made := tiles.on_gpu(packed, scale, dtype, "gemm_tiles")) is not None:
        return made
    codes = fmt.unpack(packed)
    codes = torch.where((scale == 0).repeat_interleave(fmt.BLOCK, dim=1), codes & 8, codes)
    n, k = codes.shape
    row_blocks, k_blocks = -(-n // ROWS), k_blocks_of(k)
    more_rows, more_k = row_blocks * ROWS - n, k_blocks * COLS - k
    codes = torch.nn.functional.pad(codes, (0, more_k, 0, more_rows))
    scales = torch.nn.functional.pad(tiles.scale_bytes(scale), (0, more_k // fmt.BLOCK, 0, more_rows))
    # [row block, row tile, half, g, k block, j, part, t, pair] -> [.., k block, row tile, g, t, half, (j, part, pair)]
    lanes = codes.view(row_blocks, ROW_TILES, 2, 8, k_blocks, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 2, 5, 6, 8).flatten(-3)
    bf16 = dtype == torch.bfloat16
    order = tiles.bit_order(tiles.decode16_bf16, 6) if bf16 else tiles.bit_order(tiles.decode16_fp16, 9)
    words = torch.zeros(*lanes.shape[:-1], 2, dtype=torch.int32, device=packed.device)
    for word, bits in enumerate(order):
        for bit, (code, part) in enumerate(bits):
            words[..., word] |= (lanes[..., code] >> part & 1).to(torch.int32) << bit
    out = torch.empty(row_blocks, k_blocks, ROW_TILES, tiles.TILE_BYTES, dtype=torch.uint8, device=packed.device)
    out[..., : tiles.CODE_BYTES] = words.flatten(3).contiguous().view(torch.uint8)
    # [row block, row tile, half, g, k block, j] -> [row block, k block, row tile, g, half, j]
    ordered = (
        scales.view(row_blocks, ROW_TILES, 2, 8, k_blocks, 4)[..., SCALE_ORDER].permute(0, 4, 1, 3, 2, 5).contiguous()
    )
    words64, turn = ordered.view(torch.int32).to(torch.int64) & tiles.WORD, SCALE_TURN[dtype]
    turned = ((words64 << turn | words64 >> (32 - turn)) & tiles.WORD).to(torch.int32)
    out[..., tiles.CODE_BYTES :] = turned.view(torch.uint8).flatten(3)
    return out
