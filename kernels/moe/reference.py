"""A mixture's layer in float64, one expert after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.common import Tensors
from kernels.nvfp4.reference import weights


def expert(inputs: Tensors, prefix: str, e: int, x: torch.Tensor) -> torch.Tensor:
    """x [n, H] through one expert, float64. prefix: "" or "shared_"."""

    def matrix(name: str) -> torch.Tensor:
        parts = {f"w_{part}": inputs[f"{prefix}{name}_{part}"][e] for part in ("packed", "scale", "tensor_scale")}
        return weights(parts).double()

    gate, up = (x @ matrix("gate_up").T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ matrix("down").T


def routed(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts [T, top_k], their weights [T, top_k] in float64, which add up to 1)."""
    chosen = logits.double().topk(top_k, dim=-1)
    return chosen.indices, chosen.values.softmax(-1)


def reference(inputs: Tensors) -> Tensors:
    """{"y": [T, H] float64}; inputs as in the package's docstring. top_k is what `inputs["top_k"]` holds."""
    x = inputs["x"].double()
    chosen, weight = routed(inputs["logits"], int(inputs["top_k"]))
    y = torch.zeros_like(x)
    for e in chosen.unique().tolist():
        token, place = torch.nonzero(chosen == e, as_tuple=True)
        y.index_add_(0, token, weight[token, place, None] * expert(inputs, "", e, x[token]))
    if "shared_gate" in inputs:
        share = torch.sigmoid(x @ inputs["shared_gate"].double())
        y = y + share[:, None] * expert(inputs, "shared_", 0, x)
    return {"y": y}
