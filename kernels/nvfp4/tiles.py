"""The weight layout of the CUDA decode kernel (ring_decode.cu): tiles of 16 rows x 64 k, 576 bytes each.

    tiles: uint8 [ceil(N / 16), ceil(K / 64), 576] = 32 lanes x 16 bytes of codes, then 32 lanes x 2 bytes of scales

so a row tile of 16 rows is one contiguous run along K, any range of tiles of it is one bulk copy, and codes and scales
come in the same stream. Lane 4 g + t owns k = 16 t .. 16 t + 15 of rows g and g + 8: a whole scale group of each row.
The order of the bits within its two words per row is what makes `decode16` of operand.cuh short; it is found here by
sending single bits through the same operations, so it cannot drift from a table.

Scale bytes are re-encoded: five exponent bits and three of mantissa, 2^(e - 22) (1 + m / 8), instead of e4m3's four and
three. The unused sign bit pays for it, e4m3's subnormals become normal numbers, and the kernel places bits without a
special case. A group whose scale is zero gets zero codes (signs kept). Byte 0x7F (e4m3's NaN) would read as 480.
Padding rows and k are zeros. The repack is a permutation plus a table, done once at load; 4.5 bits per weight stay 4.5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kernels import cuda_driver
from kernels.nvfp4 import format as fmt

ROWS, COLS = 16, 64
CODE_BYTES, TILE_BYTES = 512, 576
WORDS = TILE_BYTES // 8
SCALE_BIAS = 22
WORD = 0xFFFFFFFF
BF16_MASK, FP16_SIGN, FP16_REST = 0x81C081C0, 0x80008000, 0x0E000E00
LEFT_FROM_FIRST = 0x60306030


def _rotate_right(w: Any, by: int) -> Any:
    return (w >> by | w << (32 - by)) & WORD


def decode16_bf16(w0: Any, w1: Any) -> tuple[Any, ...]:
    """operand.cuh's decode16<true> on ints or int64 tensors: eight pairs of bf16, value * 2^-126, before the scale."""
    left = (w0 & LEFT_FROM_FIRST) | (w1 >> 2 & ~LEFT_FROM_FIRST & WORD)
    first = (w0, _rotate_right(w0, 4), w0 << 6)
    second = (w1, _rotate_right(w1, 4), w1 << 6)
    return tuple(pair & BF16_MASK for pair in (*first, *second, _rotate_right(left, 6), left << 4))


def decode16_fp16(w0: Any, w1: Any) -> tuple[Any, ...]:
    """operand.cuh's decode16<false> on ints or int64 tensors: eight pairs of fp16, value * 2^-14, before the scale."""
    tops = [w << (12 - 4 * i) & WORD for w in (w0, w1) for i in range(4)]
    return tuple((top & FP16_SIGN) | (top >> 3 & FP16_REST) for top in tops)


def bit_order(decode: Callable[[Any, Any], tuple[Any, ...]], lowest: int) -> list[list[tuple[int, int]]]:
    """[word][bit] -> (which of the lane's 16 codes, which bit of it), by decoding words with one bit set.

    `lowest`: where the decoded value keeps the code's bit 0 (6 in bf16, 9 in fp16); bits 1 and 2 follow, bit 3 is the
    sign at 15.
    """
    order = []
    for word in range(2):
        row = []
        for bit in range(32):
            pairs = decode(*(1 << bit if word == i else 0 for i in range(2)))
            [(pair, value)] = [(i, value) for i, value in enumerate(pairs) if value]
            at = value.bit_length() - 1
            row.append((2 * pair + at // 16, 3 if at % 16 == 15 else at % 16 - lowest))
        order.append(row)
    return order


@functools.cache
def word_bits(bf16: bool) -> torch.Tensor:
    """int32 [word, 16 * which code + its value] -> the bits of that word that the code's value sets."""
    order = bit_order(decode16_bf16, 6) if bf16 else bit_order(decode16_fp16, 9)
    bits = torch.zeros(2, 16, 16, dtype=torch.int64)
    for word, row in enumerate(order):
        for bit, (code, part) in enumerate(row):
            bits[word, code] |= (torch.arange(16) >> part & 1) << bit
    return bits.flatten(1).to(torch.int32)


def scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    """uint8, the kernel's scale bytes of e4m3 bytes (sign bit clear); zero for zero."""
    value = fmt.decode_ue4m3(torch.arange(fmt.E4M3_NAN, device=scale.device, dtype=torch.uint8))
    mantissa, exponent = torch.frexp(value)  # value = mantissa * 2^exponent with 0.5 <= mantissa < 1
    table = (exponent - 1 + SCALE_BIAS) * 8 + (mantissa * 16 - 8).to(torch.int32)
    table = torch.cat((torch.where(value > 0, table, 0), table.new_tensor([(8 + SCALE_BIAS) * 8 + 7])))
    return table.to(torch.uint8)[scale.to(torch.int64)]


def boxes(w: torch.Tensor, row_tiles: int, k_tiles: int) -> cuda_driver.TensorMap:
    """The tensor map of tiles `w` [row tiles, k tiles, 576], in boxes of `row_tiles` by `k_tiles` of them."""
    return cuda_driver.word_map(w.data_ptr(), w.shape[0], w.shape[1] * WORDS, row_tiles, k_tiles * WORDS)


def on_gpu(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, layout: str) -> torch.Tensor | None:
    """The tiles of a layout by repack.py, one launch, where the weights lie on a GPU; None elsewhere."""
    if not packed.is_cuda:
        return None
    from kernels.nvfp4 import repack  # imports this module, and Triton

    return repack.from_modelopt(packed, scale, dtype, layout)


def tile_weights(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [row tiles, k tiles, 576] from uint8 [N, K / 2] and [N, K / 16], for x of `dtype` (bf16 or fp16)."""
    if (made := on_gpu(packed, scale, dtype, "tiles")) is not None:
        return made
    codes = fmt.unpack(packed)
    codes = torch.where((scale == 0).repeat_interleave(fmt.BLOCK, dim=1), codes & 8, codes)
    n, k = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -k % COLS, 0, -n % ROWS))
    scales = torch.nn.functional.pad(scale_bytes(scale), (0, -scale.shape[1] % (COLS // fmt.BLOCK), 0, -n % ROWS))
    row_tiles, k_tiles = codes.shape[0] // ROWS, codes.shape[1] // COLS
    # [row tile, row half, g, k tile, t, 16 codes] -> [row tile, k tile, g, t, row half, 16 codes]
    lanes = codes.view(row_tiles, 2, 8, k_tiles, 4, fmt.BLOCK).permute(0, 3, 2, 4, 1, 5)
    bf16 = dtype == torch.bfloat16
    entries = lanes.to(torch.int32) + torch.arange(0, 256, 16, dtype=torch.int32, device=packed.device)
    bits = word_bits(bf16).to(packed.device)[:, entries.flatten()].view(2, *lanes.shape)
    words = bits.sum(-1, dtype=torch.int32).movedim(0, -1).contiguous()  # no two codes share a bit
    tiles = torch.empty(row_tiles, k_tiles, TILE_BYTES, dtype=torch.uint8, device=packed.device)
    tiles[..., :CODE_BYTES] = words.reshape(row_tiles, k_tiles, -1).view(torch.uint8)
    tiles[..., CODE_BYTES:] = (
        scales.view(row_tiles, 2, 8, k_tiles, 4).permute(0, 3, 2, 4, 1).reshape(row_tiles, k_tiles, -1)
    )
    return tiles
