"""The library's product on weights that are expanded once at load: 2 bytes of memory a weight, the control."""

from __future__ import annotations

import torch

from kernels.common import Candidate, Tensors, Workload
from kernels.q8 import format as fmt


def prepare(inputs: Tensors) -> Tensors:
    """x as it is and w in x's dtype [N, K], rounded once."""
    return {"x": inputs["x"], "w": fmt.dequantise(inputs["w_q"], inputs["w_d"], inputs["x"].dtype)}


def run(args: Tensors, out: Tensors) -> None:
    torch.matmul(args["x"], args["w"].T, out=out["y"])


def _refuses(workload: Workload) -> str:
    return "" if workload["dtype"] == "bf16" else f"dtype={workload['dtype']}: this control is bf16 throughout"


CANDIDATES = (Candidate(name="torch_cached", precision="bf16", run=run, prepare=prepare, refuses=_refuses),)
