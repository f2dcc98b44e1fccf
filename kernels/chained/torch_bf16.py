"""The sequence by torch's own product, with weights dequantised to bf16 ahead of time."""

from __future__ import annotations

from typing import Any

import torch

from kernels.common import Candidate, Tensors
from kernels.nvfp4 import format as fmt


def prepare(inputs: Tensors) -> dict[str, Any]:
    """x as it is; weights in bf16 and room for the result of each product."""
    made: dict[str, Any] = {"x": inputs["x"]}
    number = 0
    while f"w{number}_packed" in inputs:
        parts = [inputs[f"w{number}_{part}"] for part in ("packed", "scale", "tensor_scale")]
        made[f"w{number}"] = w = fmt.dequantise(fmt.Nvfp4(*parts), torch.bfloat16)
        made[f"y{number}"] = w.new_empty(len(inputs["x"]), len(w))
        number += 1
    return made


def run(args: Any, out: Tensors) -> None:
    x, number = args["x"], 0
    while f"w{number}" in args:
        y = args[f"y{number}"] if f"w{number + 1}" in args else out["y"]
        torch.matmul(x, args[f"w{number}"].T, out=y)
        x, number = y, number + 1


CANDIDATES = (Candidate("torch_bf16", "bf16", run, prepare=prepare),)
