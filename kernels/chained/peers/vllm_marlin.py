"""The sequence by vLLM's Marlin operator (kernels/nvfp4/peers/vllm_marlin.py), whose launches wait."""

from __future__ import annotations

from typing import Any

from kernels.chained.cost import products
from kernels.common import Candidate, Needs, Tensors, Workload, library_version
from kernels.nvfp4.peers import vllm_marlin


def prepare(inputs: Tensors) -> dict[str, Any]:
    """x as it is; each product's operands in Marlin's form, and room for its result."""
    made: dict[str, Any] = {"x": inputs["x"]}
    number = 0
    while f"w{number}_packed" in inputs:
        weight = {f"w_{part}": inputs[f"w{number}_{part}"] for part in ("packed", "scale", "tensor_scale")}
        own = vllm_marlin.prepare({"x": inputs["x"], **weight})
        made |= {f"{name}{number}": t for name, t in own.items() if name != "x"}
        made[f"y{number}"] = own["w_tensor_scale"].new_empty(
            len(inputs["x"]), len(weight["w_packed"]), dtype=inputs["x"].dtype
        )
        number += 1
    return made


def run(args: Any, out: Tensors) -> None:
    x, number = args["x"], 0
    while f"w{number}" in args:
        y = args[f"y{number}"] if f"w{number + 1}" in args else out["y"]
        given = {name: args[f"{name}{number}"] for name in ("w", "w_scale", "w_tensor_scale", "workspace")}
        vllm_marlin.run({"x": x, **given}, {"y": y})
        x, number = y, number + 1


def _refuses(workload: Workload) -> str:
    return next(filter(None, map(vllm_marlin._refuses, products(workload))), "")


CANDIDATES = (
    Candidate(
        name="vllm_marlin",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(capability=(8, 0), packages=("vllm",)),
        prepare=prepare,
        refuses=_refuses,
        config=lambda workload: f"vllm {library_version('vllm')} marlin_gemm, launches that wait",
    ),
)
