"""Dequantise, then the library's product: `torch_cached` expands once at load, `torch_expand` in every call.

`torch_cached` costs 2 bytes of memory a weight for as long as the model runs and is the control at many rows.
`torch_expand` keeps 8.5 bits and pays a write and a read of the expanded weights each call; what it buys is memory.
"""

from __future__ import annotations

import torch

from kernels.common import Candidate, Tensors, Workload
from kernels.q8 import format as fmt


def prepare_cached(inputs: Tensors) -> Tensors:
    """x as it is and w in x's dtype [N, K], rounded once."""
    return {"x": inputs["x"], "w": fmt.dequantise(inputs["w_q"], inputs["w_d"], inputs["x"].dtype)}


def run_cached(args: Tensors, out: Tensors) -> None:
    torch.matmul(args["x"], args["w"].T, out=out["y"])


def prepare_expand(inputs: Tensors) -> Tensors:
    """The planes, and room for the expanded weights."""
    x, (n, k) = inputs["x"], inputs["w_q"].shape
    return inputs | {"w": torch.empty(n, k, dtype=x.dtype, device=x.device)}


def run_expand(args: Tensors, out: Tensors) -> None:
    codes, room = args["w_q"].unflatten(1, (-1, fmt.BLOCK)), args["w"].unflatten(1, (-1, fmt.BLOCK))
    # One kernel: int8 times fp16 is promoted to fp16, which a code times a scale may not fit; so by float32 scales.
    torch.mul(codes, args["w_d"].float()[:, :, None], out=room)
    torch.matmul(args["x"], args["w"].T, out=out["y"])


def _refuses(workload: Workload) -> str:
    return "" if workload["dtype"] == "bf16" else f"dtype={workload['dtype']}: this control is bf16 throughout"


CANDIDATES = (
    Candidate(name="torch_cached", precision="bf16", run=run_cached, prepare=prepare_cached, refuses=_refuses),
    Candidate(name="torch_expand", precision="q8_0-expanded", run=run_expand, prepare=prepare_expand),
)
