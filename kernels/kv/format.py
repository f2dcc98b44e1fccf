"""The two quantised forms of a KV cache: fp8-e4m3 with float32 scales, and Q8_0.

fp8-e4m3: x ~ scale[h] * e4m3(x / scale[h]), one float32 scale per kv head (or one per tensor, repeated per head, so
that kernels know a single convention). Dynamic scales are amax / 448, 448 being the largest e4m3 value; a caller may
pass its own scale, as engines do that serve with calibrated or unit scales, and values beyond 448 * scale saturate.

Q8_0 as ggml defines it (ggml-quants.c, quantize_row_q8_0_ref): blocks of 32 values along D, d = amax / 127 computed
in float32 and stored as fp16, q = round_half_away(x / d) with the *unrounded* d. ggml interleaves them in 34-byte
blocks; here the int8 values and the half scales are two planes, because 34-byte blocks break 16-byte alignment.

Both work on a cache in slices of pages, so that the float32 copies stay near 256 MB however large the cache is. Both
refuse NaN and infinity: an e4m3 NaN or a NaN amax would spread over a block and be found far from its cause.

`dequantise_*` are for round-trip tests and notebooks. The reference does not use them: it decodes the bytes by its own
code from the definition of the formats, so a mistake here shows as a difference there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

KV_OF_PRECISION = {"bf16": "16bit", "fp8-kv": "fp8", "q8_0-kv": "q8_0"}  # what our kernels call the forms
E4M3_MAX = 448.0
Q8_0_BLOCK = 32
HALF_MAX = 65504.0
_SLICE_VALUES = 1 << 26


def _slices(cache: torch.Tensor) -> Iterator[slice]:
    pages = max(1, _SLICE_VALUES // max(1, cache[0].numel()))
    for begin in range(0, cache.shape[0], pages):
        yield slice(begin, begin + pages)


def _check(cache: torch.Tensor, what: str) -> None:
    if cache.dim() != 4 or not cache.dtype.is_floating_point or cache.numel() == 0:
        raise ValueError(
            f"{what}: expected a floating-point cache [pages, Hkv, page, D] with at least one page, "
            f"got {cache.dtype} {tuple(cache.shape)}; reshape it"
        )


def _amax_per_head(cache: torch.Tensor, what: str) -> torch.Tensor:
    """Largest magnitude per kv head, [Hkv] float32. ValueError on NaN or infinity."""
    amax = torch.zeros(cache.shape[1], dtype=torch.float32, device=cache.device)
    for pages in _slices(cache):
        amax = torch.maximum(amax, cache[pages].float().abs().amax(dim=(0, 2, 3)))  # maximum propagates NaN
    if not bool(torch.isfinite(amax).all()):
        heads = (~torch.isfinite(amax)).nonzero().flatten().tolist()
        raise ValueError(f"{what}: NaN or infinity in kv heads {heads}; find where it was produced before quantising")
    return amax


def scale_fp8(cache: torch.Tensor, per: str = "head") -> torch.Tensor:
    """amax / 448 of a cache [pages, Hkv, page, D], [Hkv] float32: per "head", or per "tensor" and repeated.

    ValueError: NaN or infinity in the cache, an unknown `per`.
    """
    _check(cache, "fp8-e4m3")
    if per not in ("head", "tensor"):
        raise ValueError(f"fp8-e4m3: {per=} must be 'head' or 'tensor'")
    amax = _amax_per_head(cache, "fp8-e4m3")
    if per == "tensor":
        amax = amax.max().repeat(cache.shape[1])
    # An empty (all-zero) head gets scale 1: its bytes are zero whatever the scale.
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
    # amax / 448 may underflow float32; the smallest normal keeps the division finite, the values saturate nowhere.
    return scale.clamp_min(torch.finfo(torch.float32).tiny)


def quantise_fp8(
    cache: torch.Tensor, per: str = "head", scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8-e4m3 bytes of a cache, and its scales.

    cache: [pages, Hkv, page, D], any float dtype.
    per:   "head" (one scale per kv head) or "tensor" (one for all, returned once per head all the same).
    scale: [Hkv] float32 to use in place of amax / 448; values beyond 448 * scale saturate.
    Returns (uint8 bytes of the cache's shape, scale [Hkv] float32, a copy); value = scale[h] * e4m3(byte).
    ValueError: NaN or infinity in the cache, an unknown `per`, a scale that is not [Hkv] or not positive and finite.
    """
    own = scale_fp8(cache, per)  # refuses NaN and infinity under a given scale too
    scale, heads = own if scale is None else scale, cache.shape[1]
    if tuple(scale.shape) != (heads,):
        raise ValueError(f"fp8-e4m3: scale has shape {tuple(scale.shape)}, needs ({heads},): one value per kv head")
    scale = scale.to(device=cache.device, dtype=torch.float32, copy=True).contiguous()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(f"fp8-e4m3: scales must be positive and finite, got {scale.tolist()}")
    out = torch.empty(cache.shape, dtype=torch.uint8, device=cache.device)
    for pages in _slices(cache):
        scaled = cache[pages].float() / scale[None, :, None, None]
        # Saturate here rather than rely on the conversion: e4m3fn has no infinity, and whether values from 464 up
        # become 448 or NaN is the library's choice (torch 2.13 on the CPU gives 448).
        out[pages] = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return out, scale


def dequantise_fp8(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of fp8-e4m3 bytes: data [pages, Hkv, page, D] uint8, scale [Hkv] float32."""
    return data.view(torch.float8_e4m3fn).float() * scale[None, :, None, None]


def quantise_q8_0(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q8_0 planes of a cache.

    cache: [pages, Hkv, page, D], any float dtype; D a multiple of 32, magnitudes up to 65504.
    Returns (int8 of the cache's shape, fp16 scales [pages, Hkv, page, D / 32]); value = scale * int8.
    Error per block: at most amax / 254 from rounding, plus 127 times the rounding of the scale to fp16.
    ValueError: D not a multiple of 32, NaN or infinity, a magnitude above 65504 (the kernels multiply in half).
    """
    _check(cache, "Q8_0")
    dim = cache.shape[-1]
    if dim % Q8_0_BLOCK:
        raise ValueError(f"Q8_0: D={dim} must be a multiple of {Q8_0_BLOCK}; pad the head dimension with zeros")
    amax_all = float(_amax_per_head(cache, "Q8_0").max())
    if amax_all > HALF_MAX:
        raise ValueError(f"Q8_0: amax={amax_all:g} exceeds {HALF_MAX:g}, the largest half; scale the cache down first")
    data = torch.empty(cache.shape, dtype=torch.int8, device=cache.device)
    scale = torch.empty((*cache.shape[:-1], dim // Q8_0_BLOCK), dtype=torch.float16, device=cache.device)
    for pages in _slices(cache):
        blocks = cache[pages].float().unflatten(-1, (-1, Q8_0_BLOCK))
        d = blocks.abs().amax(dim=-1, keepdim=True) / 127.0
        inverse = torch.where(d > 0, 1.0 / d, torch.zeros_like(d))
        # 1 / d overflows for d below 2^-128; such a block is zero in fp16 anyway.
        scaled = torch.where(torch.isfinite(inverse), blocks * inverse, torch.zeros_like(blocks))
        # C's roundf: halves go away from zero, unlike torch.round.
        rounded = torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)
        data[pages] = rounded.clamp_(-127, 127).to(torch.int8).flatten(-2)
        scale[pages] = d.squeeze(-1).to(torch.float16)
    return data, scale


def dequantise_q8_0(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of Q8_0 planes: data [..., D] int8, scale [..., D / 32] fp16."""
    blocks = data.float().unflatten(-1, (-1, Q8_0_BLOCK))
    return (blocks * scale.float().unsqueeze(-1)).flatten(-2)
