"""A mixture's layer in float64, one expert after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.common import Tensors
from kernels.nvfp4.reference import weights

TOGETHER = 16  # experts whose weights are decoded at once: one by one 256 are thousands of launches


def matrices(inputs: Tensors, name: str, experts: torch.Tensor) -> torch.Tensor:
    """float64 [n, N, K]: the weights `name` of n experts (int64 [n])."""
    packed, scale, whole = (inputs[f"{name}_{part}"][experts] for part in ("packed", "scale", "tensor_scale"))
    rows = packed.shape[1]
    parts = {"w_packed": packed.flatten(0, 1), "w_scale": scale.flatten(0, 1)}
    return weights(parts | {"w_tensor_scale": whole.repeat_interleave(rows)[:, None]}).unflatten(0, (-1, rows))


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [n, H] through one expert's matrices [2 F, H] and [H, F]."""
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


def expert(inputs: Tensors, prefix: str, e: int, x: torch.Tensor) -> torch.Tensor:
    """x [n, H] through one expert, float64. prefix: "" or "shared_"."""
    only = torch.tensor([e], device=x.device)
    return swiglu(x, *(matrices(inputs, f"{prefix}{name}", only)[0] for name in ("gate_up", "down")))


def routed(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts [T, top_k], their weights [T, top_k] in float64, which add up to 1)."""
    chosen = logits.double().topk(top_k, dim=-1)
    return chosen.indices, chosen.values.softmax(-1)


def reference(inputs: Tensors) -> Tensors:
    """{"y": [T, H] float64}; inputs as in the package's docstring. top_k is what `inputs["top_k"]` holds."""
    x = inputs["x"].double()
    chosen, weight = routed(inputs["logits"], int(inputs["top_k"]))
    y = torch.zeros_like(x)
    for some in chosen.unique().split(TOGETHER):
        of_some = zip(some.tolist(), *(matrices(inputs, name, some) for name in ("gate_up", "down")), strict=True)
        for e, gate_up, down in of_some:
            token, place = torch.nonzero(chosen == e, as_tuple=True)
            y.index_add_(0, token, weight[token, place, None] * swiglu(x[token], gate_up, down))
    if "shared_gate" in inputs:
        share = torch.sigmoid(x @ inputs["shared_gate"].double())
        y = y + share[:, None] * expert(inputs, "shared_", 0, x)
    return {"y": y}
