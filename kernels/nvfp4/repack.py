"""From a file's order of NVFP4 weights to a packed layout in one launch, on the GPU: modelopt's bytes or ggml's blocks.

The host's repacks (tiles.py, gemm_tiles.py and what stands on them) are the reference, bit for bit. They take dozens of
passes over expanded codes; this reads 4.5 bits a weight and writes as many. A lane's sixteen codes of a row become two
words by the inverse of `decode16` of operand.cuh; its sixteen codes are what differs between layouts:

    LANE   k = 16 t .. 16 t + 15 of the tile's 64 (tiles.py)
    WGMMA  k = 16 j + 2 t + {0, 1, 8, 9}, j = 0 .. 3 (gemm_tiles.py)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.nvfp4 import gemm_tiles, tiles

K_TILES = 4  # of 64 k, in a program, with 16 rows


@dataclass(frozen=True)
class Layout:
    """wgmma: the order of k in a tile. side: row tiles side by side. k_multiple: tiles of k that are padded to."""

    wgmma: bool
    side: int = 1
    k_multiple: int = 1


LAYOUTS = {
    "tiles": Layout(False),
    "gemm_tiles": Layout(True, gemm_tiles.ROW_TILES, gemm_tiles.K_BLOCK_MULTIPLE),
    "row_tiles": Layout(True),
}
GGML_BLOCK, GGML_SCALES = 36, 4  # bytes of 64 columns, and those of them that are scales


@triton.jit
def _scale_byte(s):
    """Five exponent bits and three of mantissa of an e4m3 byte, as tiles.scale_bytes has them."""
    subnormal = tl.where(s >= 4, 112 + 2 * s, tl.where(s == 3, 116, 96 + 8 * s))
    return tl.where(s >= 8, s + 120, tl.where(s == 0, 0, subnormal))


@triton.jit
def _rotate_left(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def repack_kernel(
    codes_ptr,  # uint8: packed [N, K / 2], or blocks [N, K / 64 * 36]
    scale_ptr,  # uint8 [N, K / 16]; not looked at with ggml's blocks
    words_ptr,  # int32 view of the layout
    bytes_ptr,  # uint8 view of it
    N,
    K,
    TILES_OF_K,  # of the layout
    GGML: tl.constexpr,
    WGMMA: tl.constexpr,
    BF16: tl.constexpr,
    SIDE: tl.constexpr,
    KT: tl.constexpr,
):
    row_tile = tl.program_id(0)
    item = tl.arange(0, KT * 64)  # tile of k, row of 16, t
    t, r, tile = item % 4, item // 4 % 16, tl.program_id(1) * KT + item // 64
    row = (row_tile * 16 + r).to(tl.int64)
    here = tile < TILES_OF_K
    inside = here & (row < N)
    # A byte of codes, and where its scale is.
    codes_at = codes_ptr + row * (K // 64 * 36 if GGML else K // 2) + tile * (36 if GGML else 32) + (4 if GGML else 0)
    scale_at = codes_at - 4 if GGML else scale_ptr + row * (K // 16) + tile * 4
    place = (row_tile // SIDE * TILES_OF_K + tile).to(tl.int64) * SIDE + row_tile % SIDE
    zero = (item * 0).to(tl.uint32)
    w0, w1, left, scales = zero, zero, zero, zero
    for p in tl.static_range(8):  # pairs of codes
        group = p // 2 if WGMMA else t  # of 16 k
        live = inside & (64 * tile + 16 * group < K)
        scale = tl.load(scale_at + group, mask=live, other=0).to(tl.uint32) & 0x7F
        if GGML:
            # Column c of a group: nibble c / 8 of byte c % 8.
            first = 8 * group + (2 * t if WGMMA else 2 * p % 8)
            low = tl.load(codes_at + first, mask=live, other=0).to(tl.uint32)
            high = tl.load(codes_at + first + 1, mask=live, other=0).to(tl.uint32)
            low, high = low >> (4 * (p % 2 if WGMMA else p // 4)) & 15, high >> (4 * (p % 2 if WGMMA else p // 4)) & 15
        else:
            both = tl.load(codes_at + (4 * p + t if WGMMA else 8 * t + p), mask=live, other=0).to(tl.uint32)
            low, high = both & 15, both >> 4
        kept = tl.where(scale == 0, 8, 15).to(tl.uint32)  # nothing but the sign, where the group is zero
        low, high = low & kept, high & kept
        if BF16:
            pair = (low & 8) << 12 | (low & 7) << 6 | (high & 8) << 28 | (high & 7) << 22
            if p == 0:
                w0 = pair
            elif p == 1:
                w0 |= _rotate_left(pair, 4)
            elif p == 2:
                w0 |= pair >> 6
            elif p == 3:
                w1 = pair
            elif p == 4:
                w1 |= _rotate_left(pair, 4)
            elif p == 5:
                w1 |= pair >> 6
            elif p == 6:
                left = _rotate_left(pair, 6)
            else:
                left |= pair >> 4
        elif p < 4:
            w0 |= low << 4 * p | high << 16 + 4 * p
        else:
            w1 |= low << 4 * (p - 4) | high << 4 * p
        if WGMMA:
            if p % 2 == 0:  # bytes of scales 0, 2, 1, 3
                scales |= _scale_byte(scale) << 8 * (p // 4 + 2 * (p // 2 % 2))
        elif p == 0:
            scales = _scale_byte(scale)
    if BF16:
        w0 |= left & 0x60306030
        w1 |= (left & 0x180C180C) << 2
    lane, half = r % 8 * 4 + t, r // 8
    words_at = words_ptr + place * 144
    tl.store(words_at + lane * 4 + half * 2, w0.to(tl.int32, bitcast=True), mask=here)
    tl.store(words_at + lane * 4 + half * 2 + 1, w1.to(tl.int32, bitcast=True), mask=here)
    if WGMMA:
        turned = _rotate_left(scales, 4 if BF16 else 7)
        tl.store(words_at + 128 + r % 8 * 2 + half, turned.to(tl.int32, bitcast=True), mask=here & (t == 0))
    else:
        tl.store(bytes_ptr + place * 576 + 512 + 2 * lane + half, scales.to(tl.uint8), mask=here)


def _launch(codes: torch.Tensor, scale: torch.Tensor, n: int, k: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    layout = LAYOUTS[name]
    k_tiles = -(-k // (tiles.COLS * layout.k_multiple)) * layout.k_multiple
    blocks = -(-n // (tiles.ROWS * layout.side))
    out = torch.empty(blocks, k_tiles, layout.side, tiles.TILE_BYTES, dtype=torch.uint8, device=codes.device)
    grid = (blocks * layout.side, -(-k_tiles // K_TILES))
    repack_kernel[grid](
        codes,
        scale,
        out.view(torch.int32),
        out,
        n,
        k,
        k_tiles,
        GGML=codes is scale,
        WGMMA=layout.wgmma,
        BF16=dtype == torch.bfloat16,
        SIDE=layout.side,
        KT=K_TILES,
        num_warps=4,
    )
    return out if layout.side > 1 else out[:, :, 0]


def from_modelopt(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """The tiles of a layout, for x of `dtype` (bf16 or fp16), from uint8 [N, K / 2] and [N, K / 16] of format.py.

    Raises ValueError for shapes that do not belong together and for an unknown layout.
    """
    n, k = packed.shape[0], 2 * packed.shape[1]
    if scale.shape != (n, k // 16) or k % 16 or layout not in LAYOUTS:
        raise ValueError(
            f"packed {tuple(packed.shape)}, scale {tuple(scale.shape)}, {layout=}: pass [N, K / 2] and [N, K / 16], "
            f"and one of {', '.join(LAYOUTS)}"
        )
    return _launch(packed.contiguous(), scale.contiguous(), n, k, dtype, layout)


def from_ggml(blocks: torch.Tensor, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """The same from rows of block_nvfp4, uint8 [N, K / 64 * 36] (checkpoints.py; the tensor scale stands beside them).

    Scales are taken as they are: checkpoints.from_ggml is what refuses NaN. Raises ValueError for rows that are no
    whole blocks and for an unknown layout.
    """
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] % GGML_BLOCK or layout not in LAYOUTS:
        raise ValueError(
            f"{blocks.dtype} {tuple(blocks.shape)}, {layout=}: pass uint8 [rows, blocks * {GGML_BLOCK}] and one of "
            f"{', '.join(LAYOUTS)}"
        )
    whole = blocks.contiguous()
    return _launch(whole, whole, blocks.shape[0], blocks.shape[1] // GGML_BLOCK * 64, dtype, layout)
