"""Humming's grouped products, NVFP4 W4A16: kernels generated and compiled for the shape.

    pip install humming-kernels

Humming has the two products; what is around them (top-k, sort, SiLU, the weighted sum, the shared expert, which is two
of its dense layers) is torch's here, a dozen small launches that its users have too unless an engine fuses them. So the
row is the layer as it can be run, and a profile's kernel times say what the products alone take. As in
kernels/nvfp4/peers/humming.py a checkpoint's tensors go in as they are, and the configuration is its heuristics'.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F

from kernels.common import Candidate, Needs, Tensors, Workload, library_version
from kernels.moe import torch_grouped

GROUPED = "grouped_contiguous"


def _layer(inputs: Tensors, name: str, rows: int, dense: bool) -> dict[str, Any]:
    """A weight [E, N, K] as Humming's layer, with the launch choice for so many rows."""
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    packed, scale, tensor_scale = (inputs[f"{name}_{part}"] for part in ("packed", "scale", "tensor_scale"))
    experts, n, half = packed.shape
    more = {} if dense else {"num_experts": experts}
    layer = HummingLayer(
        shape_n=n, shape_k=2 * half, weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        torch_dtype=inputs["x"].dtype, **more,
    ).to(packed.device)  # fmt: skip
    weight, weight_scale = (packed[0], scale[0]) if dense else (packed, scale)
    layer.load_from_tensors(
        {"weight": weight, "weight_scale": weight_scale.view(torch.float8_e4m3fn), "weight_scale_2": tensor_scale}
    )
    layer.transform()
    kind = "dense" if dense else GROUPED
    tuning = get_heuristics_config(
        layer.humming_config, shape_m=rows, gemm_type=kind, device=packed.device.index or 0
    )  # fmt: skip
    return {"layer": layer, "compute_config": json.dumps({"gemm_type": kind}), "tuning_config": json.dumps(tuning)}


def prepare(inputs: Tensors) -> dict[str, Any]:
    """Humming's layers, with their launch choices for the tokens of x."""
    tokens, top_k = len(inputs["x"]), int(inputs["top_k"])
    kept: dict[str, Any] = {"k": top_k, "experts": len(inputs["down_packed"])}
    for name in ("gate_up", "down"):
        kept[name] = _layer(inputs, name, tokens * top_k, False)
        if "shared_gate" in inputs:
            kept[f"shared_{name}"] = _layer(inputs, f"shared_{name}", tokens, True)
            kept["shared_gate"] = inputs["shared_gate"]
    return kept


def _product(made: dict[str, Any], x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    named = {name: made[name] for name in ("compute_config", "tuning_config")}
    found: torch.Tensor = made["layer"](x, **named, **more)
    return found


def run(args: dict[str, Any], out: Tensors) -> None:
    """Sort by torch, two grouped products, and torch's operators between them."""
    x = args["x"]
    chosen, token, weight, ends, back = torch_grouped.sorted_by_expert(args["logits"], args["k"], args["experts"])
    layout = F.pad(ends.long(), (1, 0))
    with torch.no_grad():
        gate, up = _product(args["gate_up"], x[token], expert_layout=layout).chunk(2, dim=-1)
        y = _product(args["down"], F.silu(gate) * up, expert_layout=layout)
        total = (y.float() * weight[:, None])[back].view(*chosen.shape, -1).sum(1)
        if "shared_gate" in args:
            gate, up = _product(args["shared_gate_up"], x).chunk(2, dim=-1)
            share = torch.sigmoid(x.float() @ args["shared_gate"].float())
            total += share[:, None] * _product(args["shared_down"], F.silu(gate) * up).float()
    out["y"].copy_(total)


def _refuses(workload: Workload) -> str:
    if workload["dtype"] != "bf16":
        return f"dtype={workload['dtype']}: this adapter is for bf16, the dtype of every measured shape"
    sizes = {axis: workload[axis] for axis in ("H", "F", "shared")}
    wrong = [f"{axis}={size}" for axis, size in sizes.items() if size % (128 if axis == "H" else 64)]
    return f"{', '.join(wrong)}: Humming packs N in 64s and K in 128s" if wrong else ""


CANDIDATES = (
    Candidate(
        "humming_moe", "nvfp4-w4a16-rounded", run, Needs(capability=(8, 0), packages=("humming",)), prepare=prepare,
        refuses=_refuses,
        config=lambda _: f"humming-kernels {library_version('humming-kernels')}, its heuristics for the rows",
    ),
)  # fmt: skip
