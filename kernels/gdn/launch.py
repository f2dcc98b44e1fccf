"""Host-side helpers that every GDN candidate needs: the packed view of a batch, the device's capability.

A dense batch [B, T, ...] and a ragged one are the same thing once packed: tokens [B * T, ...] and cumulative sequence
bounds. The chunked kernels know only the packed form, so there is one code path for both. Building the bounds costs a
small host copy, done in `prepare`, outside the timing; activations are viewed, never copied.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

from kernels.common import Tensors, asked_capability, device_of

INTERPRETER = (0, 0)  # stands for "no GPU": Triton's interpreter


@lru_cache
def _of_gpu(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a device; for the CPU that which a launch is described for, else (0, 0)."""
    return _of_gpu(device) if device.type == "cuda" else asked_capability.get() or INTERPRETER


def current_capability() -> tuple[int, int]:
    """The compute capability that a row's `config` is written for: as asked, else the current device's or (0, 0)."""
    return asked_capability.get() or capability(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def sequence_bounds(inputs: Tensors) -> torch.Tensor:
    """[N + 1] int32 on the inputs' device: the given cu_seqlens, or 0, T, 2T, ... for a dense batch.

    Raises ValueError when the bounds do not start at 0, do not increase, or do not end at the token count.
    """
    batch, tokens = inputs["v"].shape[:2]
    device = device_of(inputs)
    if "cu_seqlens" not in inputs:
        return torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)
    bounds = inputs["cu_seqlens"].tolist()
    if batch != 1:
        raise ValueError(f"cu_seqlens given with batch = {batch}: pack the sequences along T and pass batch = 1")
    if bounds[0] != 0 or bounds[-1] != tokens or any(b <= a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens {bounds} must rise strictly from 0 to T = {tokens}: drop empty sequences")
    return inputs["cu_seqlens"].to(device=device, dtype=torch.int32)


def checked(inputs: Tensors, names: tuple[str, ...]) -> None:
    """Raise ValueError when a named tensor is not contiguous or Hv is not a multiple of Hk."""
    for name in names:
        if not inputs[name].is_contiguous():
            raise ValueError(
                f"{name} has strides {inputs[name].stride()} for shape {tuple(inputs[name].shape)}: "
                f"pass {name}.contiguous()"
            )
    heads_k, heads_v = inputs["k"].shape[-2], inputs["v"].shape[-2]
    if heads_v % heads_k:
        raise ValueError(f"Hv = {heads_v} is not a multiple of Hk = {heads_k}: pass v with Hv = r * Hk heads")
