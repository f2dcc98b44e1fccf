"""The sequence by cuda_decode's kernel (kernels/nvfp4), in launches that wait and in programmatic ones.

The first product of a programmatic sequence waits for what is ahead, as in every other arm; it is of the form that
says when the next may start.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernels.chained.cost import products
from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.nvfp4 import cuda_decode


def prepare(inputs: Tensors) -> dict[str, Any]:
    """x as it is; tiled weights and room for the result of each product."""
    made: dict[str, Any] = {"x": inputs["x"]}
    m, number, x = len(inputs["x"]), 0, inputs["x"]
    while f"w{number}_packed" in inputs:
        weight = {f"w_{part}": inputs[f"w{number}_{part}"] for part in ("packed", "scale", "tensor_scale")}
        own = cuda_decode.prepare({"x": x, **weight})
        made |= {f"w{number}": own["w"], f"w{number}_tensor_scale": own["w_tensor_scale"]}
        made[f"y{number}"] = torch.empty(m, len(weight["w_packed"]), dtype=x.dtype, device=own["w"].device)
        x, number = made[f"y{number}"], number + 1
    return made


def _run(args: Any, out: Tensors, form: str) -> None:
    x, number = args["x"], 0
    while f"w{number}" in args:
        y = args[f"y{number}"] if f"w{number + 1}" in args else out["y"]
        given = {"x": x, "w": args[f"w{number}"], "w_tensor_scale": args[f"w{number}_tensor_scale"]}
        config = cuda_decode.configured(len(x), y.shape[1], x.shape[1], "bf16", x.device.index or 0, form)
        cuda_decode.launch(given, y, config, waits=number == 0)
        x, number = y, number + 1


def _refuses(workload: Workload) -> str:
    return next(filter(None, map(cuda_decode._refuses, products(workload))), "")


def _config(workload: Workload, form: str) -> str:
    if _refuses(workload):
        return ""
    return "; ".join(cuda_decode._config(product, form) for product in products(workload))


CANDIDATES = tuple(
    Candidate(
        name=name,
        precision="nvfp4-w4a16",
        run=functools.partial(_run, form=form),
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=_refuses,
        config=functools.partial(_config, form=form),
    )
    for name, form in (("waiting", ""), ("chained", "cuda_decode_chained"))
)
