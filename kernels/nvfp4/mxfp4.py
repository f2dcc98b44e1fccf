"""MXFP4 (OCP Microscaling Formats 1.0, section 5.2): e2m1 codes with one e8m0 scale, a power of two, per 32 values.

The scale is 2^(floor(log2(amax)) - 2): e2m1's largest power of two is 4 = 2^2. Values above 6 times the scale, which a
block's largest may be by a third, saturate at 6. Codes are packed and rounded as in format.py. 4.25 bits a weight.
"""

from __future__ import annotations

import torch

from kernels.nvfp4 import format as fmt

BLOCK = 32
BIAS = 127


def quantise(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed uint8 [rows, cols / 2], e8m0 bytes uint8 [rows, cols / 32]); a block of zeros has byte 0.

    Raises ValueError when cols is not a multiple of 32, or a value is NaN or infinite.
    """
    if value.ndim != 2 or value.shape[1] % BLOCK:
        raise ValueError(f"shape={tuple(value.shape)} must be [rows, cols] with cols a multiple of {BLOCK}; pad with 0")
    blocks = value.to(torch.float32).unflatten(1, (-1, BLOCK))
    if not bool(torch.isfinite(blocks).all()):
        raise ValueError("a value is NaN or infinite and e2m1 has neither; clean them first")
    amax = blocks.abs().amax(-1)
    _, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent with the mantissa in [0.5, 1)
    byte = torch.where(amax > 0, exponent - 1 - 2 + BIAS, 0).clamp(0, 254)
    scaled = torch.ldexp(blocks, (BIAS - byte).unsqueeze(-1))
    return fmt.pack(fmt.round_e2m1(scaled.clamp(-6.0, 6.0)).flatten(1)), byte.to(torch.uint8)


def relative(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes so that the largest is 127, float32 [1] factor that they lost); bytes below the range become 0.

    A power of two taken out of every scale: exact. Byte 255 is NaN in e8m0 and raises ValueError.
    """
    largest = int(scale.max()) if scale.numel() else BIAS
    if largest == 255:
        raise ValueError("a scale is 255, which is NaN in e8m0; find where it was produced")
    moved = (scale.to(torch.int16) + (BIAS - largest)).clamp(0, 254).to(torch.uint8)
    factor = torch.ldexp(torch.ones(1, dtype=torch.float32), torch.tensor(largest - BIAS))
    return moved, factor.to(scale.device)


def as_nvfp4(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 scale bytes uint8 [rows, cols / 16], float32 [1] tensor scale) of the same values; codes stay as they are.

    e4m3 has the powers of two from 2^-9 to 2^8. Raises ValueError where the scales span more; of a block of zeros the
    scale is zero.
    """
    moved, factor = relative(scale)
    power = moved.to(torch.float32) - BIAS + 8
    if bool(((power < -9) & (scale > 0)).any()):
        raise ValueError("block scales span more than the 17 powers of two that e4m3 has; keep them in MXFP4")
    e4m3 = torch.where(scale > 0, torch.exp2(power), 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return e4m3.repeat_interleave(BLOCK // fmt.BLOCK, dim=1), factor * 2.0**-8


def of_nvfp4(scale: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes [rows, cols / 32] of what `as_nvfp4` made.

    Raises ValueError where a scale is no power of two, or the two groups of a block differ.
    """
    value = scale.view(torch.float8_e4m3fn).float() * tensor_scale
    mantissa, exponent = torch.frexp(value)
    first, second = value.unflatten(1, (-1, BLOCK // fmt.BLOCK)).unbind(-1)
    if bool(((mantissa != 0.5) & (value != 0)).any()) or not torch.equal(first, second):
        raise ValueError("scales are not one power of two for 32 values; this is NVFP4, not MXFP4")
    byte = torch.where(value != 0, exponent - 1 + BIAS, 0)[:, :: BLOCK // fmt.BLOCK]
    return byte.to(torch.uint8).contiguous()


def dequantise(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, cols] of the values; exact in float32 but for scales under 2^-125."""
    value = fmt.decode_e2m1(fmt.unpack(packed)).unflatten(1, (-1, BLOCK))
    return torch.ldexp(value, scale.to(torch.int32).unsqueeze(-1) - BIAS).flatten(1).to(dtype)
