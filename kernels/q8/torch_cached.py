"""The library's product on weights that are expanded once at load: 2 bytes of memory a weight, the control."""

from __future__ import annotations

import torch

from kernels.common import Candidate, Tensors, Work, Workload
from kernels.q8 import format as fmt
from kernels.timing import library_product


def prepare(inputs: Tensors) -> Tensors:
    """x as it is and w in x's dtype [N, K], rounded once."""
    return {"x": inputs["x"], "w": fmt.dequantise(inputs["w_q"], inputs["w_d"], inputs["x"].dtype)}


def run(args: Tensors, out: Tensors) -> None:
    torch.matmul(args["x"], args["w"].T, out=out["y"])


def _refuses(workload: Workload) -> str:
    return "" if workload["dtype"] == "bf16" else f"dtype={workload['dtype']}: this control is bf16 throughout"


def work(workload: Workload, sms: int) -> Work:
    """Two bytes a weight, and the library's product."""
    return library_product(workload["M"], workload["N"], workload["K"], sms)


CANDIDATES = (Candidate("torch_cached", "bf16", run, prepare=prepare, refuses=_refuses, work=work),)
