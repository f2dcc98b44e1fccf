"""The module of ops.py as an arm: what an eager server calls, with whatever kernel the router took for its tokens."""

from __future__ import annotations

from typing import Any

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.nvfp4 import ops


def prepare(inputs: Tensors) -> dict[str, Any]:
    """x as it is, and a module packed for its number of tokens, bf16 or fp16."""
    x = inputs["x"]
    weight = (inputs["w_packed"], inputs["w_scale"], inputs["w_tensor_scale"])
    return {"x": x, "module": ops.Linear(*weight, dtype=x.dtype, tokens=(len(x), len(x)))}


def run(args: Any, out: Tensors) -> None:
    out["y"].copy_(args["module"](args["x"]))


def eager(args: Any, out: Tensors) -> Tensors:
    return {"y": args["module"](args["x"])}


def _refuses(workload: Workload) -> str:
    n, k = workload["N"], workload["K"]
    return f"{n=}, {k=}: the module is for real layers, multiples of 128" if n % 128 or k % 128 else ""


CANDIDATES = (
    Candidate(
        name="operator",
        precision="nvfp4-w4a16",
        run=run,
        prepare=prepare,
        needs=Needs(capability=(9, 0)),
        refuses=_refuses,
        config=lambda workload: "ops.Linear, eager; the kernel is the router's",
        no_route="calls what the router took",
        eager=eager,
    ),
)
