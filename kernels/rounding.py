"""float32 to a candidate's output type inside a Triton kernel, the same on a GPU and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_output(value, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 -> DTYPE, nearest even.

    Triton's interpreter truncates float32 to bf16 (seen in 3.9.0), so there the bits are rounded first. Truncation
    doubles the rms error, which a derived tolerance notices. Its e4m3 loses the mantissa's carry. What is too large for
    e4m3 is 448, as a GPU and torch have it; for e5m2 it is infinity as in torch, where a GPU's own conversion gives
    57344, so that one is by integers on every device.
    """
    if DTYPE == tl.float8e5 or (INTERPRETED and DTYPE == tl.float8e4nv):
        return float32_to_fp8(value, DTYPE).to(DTYPE, bitcast=True)
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        value = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def float32_to_fp8(value, DTYPE: tl.constexpr):
    """float32 -> the byte (uint8) of float8e4nv or float8e5, nearest even, by integers.

    The adder below the normal values is where float32's ulp is the subnormals' step.
    """
    e4m3: tl.constexpr = DTYPE == tl.float8e4nv
    shift: tl.constexpr = 20 if e4m3 else 21  # mantissa bits that go
    bias: tl.constexpr = (120 << 3) if e4m3 else (112 << 2)
    least: tl.constexpr = 2.0**-6 if e4m3 else 2.0**-14
    adder: tl.constexpr = 2.0**14 if e4m3 else 2.0**7
    overflow: tl.constexpr = 0x7E if e4m3 else 0x7C
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + ((1 << (shift - 1)) - 1) + ((size >> shift) & 1)) >> shift) - bias
    subnormal = (tl.abs(value) + adder).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(tl.abs(value) < least, subnormal, tl.minimum(normal, overflow))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float32_to_ue4m3(value):
    """float32 in [0, 448] -> e4m3 byte (uint8), nearest even. Below 2^-6 the grid is 2^-9, float32's ulp at 2^14.

    By integers on every device: the interpreter's conversion loses the mantissa's carry.
    """
    bits = value.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (value + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    return tl.where(value < 0.015625, subnormal, normal).to(tl.uint8)
