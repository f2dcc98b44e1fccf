"""The weight layout of the W4A8 GEMM (w4a8_gemm.cu), and what happens to the block scale there.

    tiles: uint8 [ceil(N / 128), k blocks, 8 row tiles, 1152] = 2 x 32 lanes x 16 bytes of codes, 32 x 4 of scales

of 16 rows each, with K / 128 k blocks rounded up to even (zeros), so 128 rows x any run of k blocks is one bulk copy.
Lane 4 g + t holds, of rows g and g + 8 and of either 64 k of a k block, k = 16 t .. 16 t + 15: whole scale groups. k
products of 32 take from it as they come, since the quantiser (quantise_e4m3.cu) writes x in the same order.

The tensor cores want e4m3 operands, and a code times its block scale has up to six significant bits where e4m3 has
four. The operand is that product rounded once, to nearest even, in units of a power of two per row that brings the
row's largest scale to at most 64: 0.5, 1, 2 and 4 times a scale stay exact, 1.5, 3 and 6 times it are rounded in five
of eight mantissas (NOTES.md: 2.1 % rms of the weights). A power of two because another factor would make the exact ones
inexact, one per row because it costs nothing in the kernel and leaves 11 binades for a row's scales above e4m3's
subnormals. A group further below is coded anew at the smallest scale, 2^-5: off by at most that, 2e-4 of the largest
weight that the row's largest scale can make.

A scale byte is seven bits of the scale's e4m3 (16 to 105), and above them whether 1.5 times it, as e4m3, is 5 bytes on
instead of 4. Still 4.5 bits per weight.
"""

from __future__ import annotations

import torch

from kernels.nvfp4 import format as fmt
from kernels.nvfp4 import tiles

ROWS, COLS, ROW_TILES = 128, 128, 8
K_BLOCK_MULTIPLE = 2
ROW_TILE_BYTES = 1152
K_BLOCK_BYTES = ROW_TILES * ROW_TILE_BYTES
SMALLEST, LARGEST = 16, 106  # bytes: half of the smallest is normal, 6 times the largest (+ 20, or + 21) is finite
EXPONENT = tiles.SCALE_BIAS - 7  # a scale byte n of tiles.py as e4m3 is 2^EXPONENT times its value


def k_blocks_of(k: int) -> int:
    """K blocks of 128 along K, the padding included."""
    return -(-k // (COLS * K_BLOCK_MULTIPLE)) * K_BLOCK_MULTIPLE


def _far(byte: torch.Tensor) -> torch.Tensor:
    """1 where 1.5 times the number of this mantissa (the low three bits) rounds to 5 bytes above it instead of 4."""
    mantissa = byte & 7
    return ((mantissa >= 1) & (mantissa <= 5)).to(byte.dtype)


def operands(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 [N, K], scale bytes uint8 [N, K / 16], exponents int32 [N]) of format.py's packed and scale.

    A weight is e4m3(code * scale) * 2^exponent * tensor_scale, scale the e4m3 value of its byte (no choice bit yet).
    """
    codes = fmt.unpack(packed)
    wide = tiles.scale_bytes(scale).to(torch.int32)  # 2^(e - 22) (1 + m / 8), zero for zero
    largest = wide.amax(dim=1, keepdim=True)
    down = -((LARGEST - largest - _far(largest)) // 8)  # binades to go down so that the largest fits
    byte = wide - 8 * down
    low = (byte < SMALLEST) | (wide == 0)
    ratio = torch.ldexp(1 + (wide & 7) / 8, (wide >> 3) - tiles.SCALE_BIAS + EXPONENT - down + 5)
    ratio = torch.where(wide == 0, 0.0, ratio)
    anew = fmt.round_e2m1(fmt.decode_e2m1(codes).unflatten(1, (-1, fmt.BLOCK)) * ratio.unsqueeze(-1)).flatten(1)
    codes = torch.where(low.repeat_interleave(fmt.BLOCK, dim=1), anew, codes)
    return codes, torch.where(low, SMALLEST, byte).to(torch.uint8), down[:, 0] - EXPONENT


def tile_weights(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 [row blocks, k blocks, 8, 1152], float32 [N] 2^exponent) from uint8 [N, K / 2] and [N, K / 16]."""
    codes, scales, exponents = operands(packed, scale)
    scales |= _far(scales) << 7
    n, k = codes.shape
    row_blocks, k_blocks = -(-n // ROWS), k_blocks_of(k)
    more_rows, more_k = row_blocks * ROWS - n, k_blocks * COLS - k
    codes = torch.nn.functional.pad(codes, (0, more_k, 0, more_rows))
    scales = torch.nn.functional.pad(scales, (0, more_k // fmt.BLOCK, 0, more_rows), value=SMALLEST)
    # [row block, row tile, half, g, k block, part, t, j, 8] -> [row block, k block, row tile, part, g, t, half, j, 8]
    words = codes.view(row_blocks, ROW_TILES, 2, 8, k_blocks, 2, 4, 2, 8).permute(0, 4, 1, 5, 3, 6, 2, 7, 8)
    packed_words = torch.zeros(words.shape[:-1], dtype=torch.int32, device=packed.device)
    for i in range(8):
        code = words[..., i].to(torch.int32)
        packed_words |= (code & 7) << 4 * i | (code >> 3) << (8 * i + 7 if i < 4 else 8 * (i - 4) + 3)
    out = torch.empty(row_blocks, k_blocks, ROW_TILES, ROW_TILE_BYTES, dtype=torch.uint8, device=packed.device)
    out[..., :1024] = packed_words.flatten(3).contiguous().view(torch.uint8)
    # [row block, row tile, half, g, k block, part, t] -> [row block, k block, row tile, g, t, part, half]
    lanes = scales.view(row_blocks, ROW_TILES, 2, 8, k_blocks, 2, 4).permute(0, 4, 1, 3, 6, 5, 2)
    out[..., 1024:] = lanes.flatten(3)
    return out, torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
