"""The reference: products in float64 one after the other, nothing rounded between."""

from __future__ import annotations

import torch

from kernels.nvfp4.reference import weights


def reference(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{"y": float64 [M, N]} of x and the weights w0, w1, ... as this package's docstring has them."""
    y, number = inputs["x"].to(torch.float64), 0
    while f"w{number}_packed" in inputs:
        y = y @ weights({f"w_{part}": inputs[f"w{number}_{part}"] for part in ("packed", "scale", "tensor_scale")}).T
        number += 1
    return {"y": y}
