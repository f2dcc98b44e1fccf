"""float32 to a candidate's output type inside a Triton kernel, the same on a GPU and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_output(value, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 -> DTYPE, nearest even.

    Triton's interpreter truncates float32 to bf16 (seen in 3.9.0), so there the bits are rounded first. Truncation
    doubles the rms error, which a derived tolerance notices.
    """
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        value = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def float32_to_ue4m3(value):
    """float32 in [0, 448] -> e4m3 byte (uint8), nearest even. Below 2^-6 the grid is 2^-9, float32's ulp at 2^14.

    By integers on every device: the interpreter's conversion loses the mantissa's carry.
    """
    bits = value.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (value + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    return tl.where(value < 0.015625, subnormal, normal).to(tl.uint8)
