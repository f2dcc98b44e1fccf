"""Q8_0 as ggml defines it (ggml-quants.c, quantize_row_q8_0_ref), in two planes.

d = amax / 127 of a block of 32, computed in float32 and stored as fp16; code = round half away from zero of x / d with
the unrounded d. The value is code * d.
"""

from __future__ import annotations

import torch

BLOCK = 32


def quantise(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 codes [N, K], fp16 scales [N, K / 32]) of w [N, K]. ValueError: K no multiple of 32, NaN, infinity."""
    if w.dim() != 2 or w.shape[1] % BLOCK:
        raise ValueError(f"w has shape {tuple(w.shape)}; Q8_0 needs [N, K] with K a multiple of {BLOCK}: pad K")
    blocks = w.float().unflatten(1, (-1, BLOCK))
    if not bool(torch.isfinite(blocks).all()):
        raise ValueError("w holds NaN or infinity; find where it was produced before quantising")
    d = blocks.abs().amax(dim=2, keepdim=True) / 127.0
    scaled = torch.where(d > 0, blocks / d, torch.zeros_like(blocks))
    codes = torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)
    return codes.clamp_(-127, 127).to(torch.int8).flatten(1), d.squeeze(2).to(torch.float16)


def dequantise(w_q: torch.Tensor, w_d: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[N, K] in `dtype`, each value rounded once from float32 (code times scale is exact there: 7 + 11 bits)."""
    return (w_q.float().unflatten(1, (-1, BLOCK)) * w_d.float()[:, :, None]).flatten(1).to(dtype)
