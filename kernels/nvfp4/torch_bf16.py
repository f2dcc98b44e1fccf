"""The control: weights dequantised to bf16 ahead of time, then torch's own matrix product.

What a user has without an NVFP4 kernel: four times the weight bytes at the library's full speed. Dequantising is part
of `prepare`, outside every timing, so this candidate is the bound that a W4A16 kernel must beat at few rows (fewer
bytes) and may at best approach at many (the same products plus the unpacking).
"""

from __future__ import annotations

import torch

from kernels.common import Candidate, Tensors, Work, Workload
from kernels.nvfp4 import format as fmt
from kernels.timing import library_product


def prepare(inputs: Tensors) -> Tensors:
    """x as it is and w as bf16 [N, K], rounded once from the float32 value."""
    q = fmt.Nvfp4(inputs["w_packed"], inputs["w_scale"], inputs["w_tensor_scale"])
    return {"x": inputs["x"], "w": fmt.dequantise(q, torch.bfloat16)}


def run(args: Tensors, out: Tensors) -> None:
    torch.matmul(args["x"], args["w"].T, out=out["y"])


def eager(args: Tensors, out: Tensors) -> Tensors:
    """As a layer of a model calls it."""
    return {"y": torch.nn.functional.linear(args["x"], args["w"])}


def _refuses(workload: Workload) -> str:
    return "" if workload["dtype"] == "bf16" else f"dtype={workload['dtype']}: this control is bf16 throughout"


def work(workload: Workload, sms: int) -> Work:
    """Two bytes a weight, and the library's product."""
    return library_product(workload["M"], workload["N"], workload["K"], sms)


CANDIDATES = (Candidate("torch_bf16", "bf16", run, prepare=prepare, refuses=_refuses, work=work, eager=eager),)
