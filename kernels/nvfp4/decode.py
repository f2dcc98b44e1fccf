"""Bit tricks that turn e2m1 and e4m3 into fp16 or bf16 operands without a table: Triton functions.

Put an e2m1 code's exponent and mantissa where a wider format keeps its own and the result is the value times a power
of two; the wider format's subnormals make the 0.5 come out right without a special case:

    fp16: (c & 7) << 9 is value * 2^-14        bf16: (c & 7) << 6 is value * 2^-126
    fp16: byte << 7    is scale * 2^-8         bf16: byte << 4    is scale * 2^-120

So one multiplication per element (by the scale) can also undo most of the bias, if the scale carries it. The scale is
raised as far as its format allows (448 * 2^7 < 65504 in fp16, 448 * 2^118 < 2^127 in bf16), and what is left, the
OPERAND_SHIFT below, goes into the epilogue with the tensor scale. e2m1 times e4m3 has at most six significant bits, so
every product is exact in both formats (the smallest, 0.5 * 2^-9 * 2^-7 = 2^-17, is an fp16 subnormal but still exact).

MXFP4 has an e8m0 byte per 32 instead, a power of two. `layout.prepare` takes the tensor's largest out of the bytes into
the tensor scale, so that a byte is at most 127 and stands for 2^(byte - 127). Its operand carries the code's bias, and
nothing is left for the epilogue. Products below the format's smallest number become zero: 2^-125 (bf16) or 2^-23 (fp16)
of the largest scale, which a sum next to that scale does not see.

All work is integer or IEEE multiplication that keeps subnormals: a flush-to-zero multiply would silently turn every
0.5 into 0, which the check workloads would show.
"""

from __future__ import annotations

import triton
import triton.language as tl

# log2(value / operand): what the epilogue has to give back.
FP16_SHIFT = 7
BF16_SHIFT = 8


@triton.jit
def e2m1_to_fp16(code):
    """Codes 0..15 (any integer dtype, higher bits ignored) -> float16 of value * 2^-14."""
    wide = code.to(tl.uint16)
    return (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True)


@triton.jit
def ue4m3_to_fp16(byte):
    """Low byte of any integer, a non-negative e4m3 -> float16 of scale * 2^-8; 0x7F gives 480 * 2^-8, not NaN."""
    return ((byte.to(tl.uint16) & 0xFF) << 7).to(tl.float16, bitcast=True)


@triton.jit
def ue4m3_to_float32(byte):
    """Non-negative e4m3 bytes -> float32 of the scale itself: byte << 20 is scale * 2^-120."""
    return (byte.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def decode_tile_float32(packed, byte, ROWS: tl.constexpr, COLS: tl.constexpr):
    """float32 [ROWS, COLS] from packed bytes [ROWS, COLS / 2] (low nibble = even) and scales [ROWS, COLS / 16].

    Interleaves, so it is for the interpreter: on a GPU it would go through shared memory.
    """
    code = tl.reshape(tl.join(packed & 15, packed >> 4), (ROWS, COLS))
    value = tl.reshape(e2m1_to_fp16(code).to(tl.float32) * 16384.0, (ROWS, COLS // 16, 16))  # 2^14
    return tl.reshape(value * ue4m3_to_float32(byte)[:, :, None], (ROWS, COLS))


@triton.jit
def e2m1_operand(code, BF16: tl.constexpr):
    """Codes -> bf16 of value * 2^-126 or fp16 of value * 2^-14."""
    if BF16:
        wide = code.to(tl.uint16)
        return (((wide & 7) << 6) | ((wide & 8) << 12)).to(tl.bfloat16, bitcast=True)
    else:
        return e2m1_to_fp16(code)


@triton.jit
def scale_operand(byte, BF16: tl.constexpr):
    """Low bytes -> bf16 of scale * 2^118 or fp16 of scale * 2^7, so that code operand * this = value * 2^-shift."""
    if BF16:
        # 2^238 is beyond bf16, so the bias is undone first and the headroom added after: two exact multiplications.
        return (ue4m3_to_float32(byte) * 3.3230699894622897e35).to(tl.bfloat16)  # 2^118
    else:
        return (ue4m3_to_float32(byte) * 128.0).to(tl.float16)  # 2^7


@triton.jit
def e8m0_operand(byte, BF16: tl.constexpr):
    """Bytes 0..127 of e8m0 -> bf16 of 2^(byte - 1) or fp16 of 2^(byte - 113), so that codes times this are values."""
    if BF16:
        return ((byte.to(tl.uint16) + 126) << 7).to(tl.bfloat16, bitcast=True)
    else:
        wide = byte.to(tl.uint16)
        return tl.where(wide > 98, (wide - 98) << 10, 0).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def dequantise_tile(code, byte, BF16: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """[ROWS, COLS] operand tile from codes and scale bytes [ROWS, COLS / GROUP]: e4m3 in 16s, e8m0 in 32s."""
    value = tl.reshape(e2m1_operand(code, BF16), (ROWS, COLS // GROUP, GROUP))
    scale = scale_operand(byte, BF16) if GROUP == 16 else e8m0_operand(byte, BF16)
    return tl.reshape(value * scale[:, :, None], (ROWS, COLS))
