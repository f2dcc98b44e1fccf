"""y = x @ w^T in float64, with the weights decoded from the definition of Q8_0 and not by format.py."""

from __future__ import annotations

import torch

from kernels.common import Tensors


def reference(inputs: Tensors) -> Tensors:
    """{"y": float64 [M, N]} from x [M, K], w_q int8 [N, K], w_d fp16 [N, K / 32]."""
    scale = inputs["w_d"].double().repeat_interleave(32, dim=1)
    y: torch.Tensor = inputs["x"].double() @ (inputs["w_q"].double() * scale).T
    return {"y": y}
