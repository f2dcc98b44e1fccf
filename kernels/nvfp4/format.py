"""The NVFP4 number format in plain torch: quantise, pack, unpack, dequantise.

Source of the format: OCP Microscaling Formats v1.0 for e2m1 (one sign, two exponent bits with bias 1, one mantissa
bit; no infinity and no NaN) and NVIDIA's NVFP4 for the scales (one e4m3 value per 16 elements, one float32 value per
tensor). A weight is e2m1 * block scale * tensor scale.

The quantiser is the usual two-level one: the tensor scale puts the largest block scale at 448, the largest e4m3
value; each block scale is amax(block) / 6 rounded to nearest even; each element is divided by the *rounded* scales and
rounded to nearest even on the e2m1 grid, saturating at 6. Because the scale was rounded by at most 1/16, the largest
element of a block lands between 5.6 and 6.4 and so becomes 6 (as long as the scale is a normal e4m3 number).
Given up: a search over scales that would lower the mean square error. The family compares kernels, not quantisers.

Decoding here is arithmetic on the bits; `reference.py` decodes from tables written out by hand, so that a slip in
either shows as a disagreement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 16  # values that share one e4m3 scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN = 0x7F  # the only non-finite non-negative e4m3fn byte


@dataclass(frozen=True)
class Nvfp4:
    """A quantised matrix of `rows` x `cols`.

    packed: uint8 [rows, cols / 2], low nibble = even column.
    scale:  uint8 [rows, cols / 16], e4m3fn bytes with the sign bit clear.
    tensor_scale: float32 [1].
    """

    packed: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor


def round_e2m1(value: torch.Tensor) -> torch.Tensor:
    """e2m1 codes 0..15 (uint8) of `value`: nearest, ties to the even code, saturating at +-6; the sign of zero is kept.

    The magnitude code is how many of the seven midpoints the magnitude has passed. A midpoint above an even code keeps
    it on a tie (strict comparison), one above an odd code moves on (tie to the next, even, code).
    """
    magnitude = value.abs()
    code = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += magnitude >= midpoint
    return code | (torch.signbit(value).to(torch.uint8) << 3)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """float32 values of e2m1 codes: exponent e = bits 2:1, mantissa m = bit 0: 2^(e-1) (1 + m/2), or m/2 when e = 0."""
    return _looked_up(E2M1_VALUES, code & 15) if code.device.type == "cpu" else _computed_e2m1(code)


def _computed_e2m1(code: torch.Tensor) -> torch.Tensor:
    exponent = ((code >> 1) & 3).to(torch.int32)
    mantissa = (code & 1).to(torch.float32)
    normal = torch.ldexp(1 + mantissa / 2, exponent - 1)
    magnitude = torch.where(exponent == 0, mantissa / 2, normal)
    return torch.where((code & 8) != 0, -magnitude, magnitude)


def decode_ue4m3(scale: torch.Tensor) -> torch.Tensor:
    """float32 values of non-negative e4m3fn bytes: 2^(e-7) (1 + m/8), or 2^-6 m/8 when e = 0. Byte 0x7F is NaN."""
    table = scale.device.type == "cpu" and scale.dtype == torch.uint8
    return _looked_up(UE4M3_VALUES, scale) if table else _computed_ue4m3(scale)


def _computed_ue4m3(scale: torch.Tensor) -> torch.Tensor:
    exponent = ((scale >> 3) & 15).to(torch.int32)
    mantissa = (scale & 7).to(torch.float32)
    value = torch.where(exponent == 0, mantissa / 512, torch.ldexp(1 + mantissa / 8, exponent - 7))
    return torch.where(scale == E4M3_NAN, torch.full_like(value, float("nan")), value)


# What the two compute of each code, for CPUs, where ldexp of a tensor takes twenty times as long as a look-up.
E2M1_VALUES = _computed_e2m1(torch.arange(16, dtype=torch.uint8))
UE4M3_VALUES = _computed_ue4m3(torch.arange(256, dtype=torch.int32).to(torch.uint8))


def _looked_up(values: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    return values.index_select(0, code.to(torch.int32).flatten()).view(code.shape)


def encode_ue4m3(value: torch.Tensor) -> torch.Tensor:
    """e4m3fn bytes (uint8) of non-negative float32 `value`, nearest even, saturating at 448."""
    return value.clamp(0, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, cols / 2] from codes uint8 [rows, cols]; the even column goes to the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"cols={codes.shape[-1]} must be even to pack two codes per byte; pad with code 0")
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, cols] from uint8 [rows, cols / 2]: the inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantise(value: torch.Tensor, tensor_scale: torch.Tensor | None = None) -> Nvfp4:
    """Quantise a floating-point matrix [rows, cols] to NVFP4.

    `tensor_scale` (float32 [1]) is taken as given when passed, else amax / (6 * 448), or 1 for a tensor of zeros.
    All arithmetic is float32 and each step is one IEEE operation, so a kernel can reproduce it bit for bit. (Divisors
    are tensors because torch's CUDA division by a Python number multiplies by a rounded reciprocal.)
    Raises ValueError when cols is not a multiple of 16, when a value is NaN or infinite, or on a tensor scale <= 0.
    """
    if value.ndim != 2 or value.shape[1] % BLOCK:
        raise ValueError(f"shape={tuple(value.shape)} must be [rows, cols] with cols a multiple of {BLOCK}; pad with 0")
    value = value.to(torch.float32)
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise ValueError(f"{bad} of {value.numel()} values are NaN or infinite and NVFP4 has neither; clean them first")
    if tensor_scale is None:
        # amax() of an empty tensor is an error; a denormal quotient would flush blocks, so zero means "scale 1".
        amax = value.abs().amax() if value.numel() else value.new_zeros(())
        tensor_scale = (amax / torch.full_like(amax, E2M1_MAX * E4M3_MAX)).reshape(1)
        tensor_scale = torch.where(tensor_scale > 0, tensor_scale, torch.ones_like(tensor_scale))
    elif not (tensor_scale.numel() == 1 and 0 < float(tensor_scale) < float("inf")):
        raise ValueError(
            f"tensor_scale={tensor_scale.tolist()} must be one positive finite number; pass None to derive it"
        )
    tensor_scale = tensor_scale.to(torch.float32).reshape(1)

    blocks = value.unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    scale = encode_ue4m3(amax / torch.full_like(amax, E2M1_MAX) / tensor_scale)
    step = (decode_ue4m3(scale) * tensor_scale).unsqueeze(-1)
    # A block whose scale underflowed to 0 has nothing to divide by: its elements become zeros of their sign.
    scaled = torch.where(step > 0, blocks / step, torch.zeros_like(blocks).copysign(blocks))
    return Nvfp4(pack(round_e2m1(scaled).flatten(1)), scale, tensor_scale)


def dequantise(q: Nvfp4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of `q` as [rows, cols]. e2m1 * e4m3 is exact in float32; the tensor scale rounds (float64: exact)."""
    value = decode_e2m1(unpack(q.packed)).unflatten(1, (-1, BLOCK)) * decode_ue4m3(q.scale).unsqueeze(-1)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    return (value.flatten(1).to(work) * q.tensor_scale.to(work)).to(dtype)
