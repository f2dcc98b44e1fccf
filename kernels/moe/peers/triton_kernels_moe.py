"""triton_kernels' ragged products on MXFP4 weights, W4A16: what vLLM and Transformers run for MXFP4 mixtures.

    the package triton_kernels of Triton's repository (vLLM brings a copy)

As its users string it together: routing (top-k, softmax, sort; kernels of its own), matmul_ogs that gathers a token's
rows, SiLU(gate) * up by torch (the library's SwiGLU is another function), matmul_ogs that weights each row and adds a
token's up. The shared expert is two of its dense products beside it. Nothing is asked of the host.

Its format is MXFP4: workloads whose NVFP4 weights are that too (axis weights = "mxfp4") come over bit for bit, others
are refused. Weights and scales lie as it wants them on the device it runs on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernels.common import Candidate, Needs, Tensors, Workload, library_version
from kernels.nvfp4 import mxfp4

WARPS = 8  # of its kernels, for which scales are laid out


def _matrices(inputs: Tensors, name: str) -> tuple[Any, Any]:
    """Weights [E, K, N] and what a product is told of their scales."""
    from triton_kernels.matmul_ogs import PrecisionConfig
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    packed, *scales = (inputs[f"{name}_{part}"] for part in ("packed", "scale", "tensor_scale"))
    e8m0 = torch.stack([mxfp4.of_nvfp4(s, ts.view(1)) for s, ts in zip(*scales, strict=True)])
    of_values, of_scales = layout.make_default_matmul_mxfp4_w_layout, layout.make_default_matmul_mxfp4_w_scale_layout
    (values, told), (blocks, told_blocks) = of_values(mx_axis=1), of_scales(mx_axis=1, num_warps=WARPS)
    w = convert_layout(wrap_torch_tensor(packed.transpose(-1, -2), dtype=FP4), values, **told)
    scale = convert_layout(wrap_torch_tensor(e8m0.transpose(-1, -2)), blocks, **told_blocks)
    return w, PrecisionConfig(weight_scale=scale)


def prepare(inputs: Tensors) -> dict[str, Any]:
    """Both weights of every expert in the library's layout."""
    from triton_kernels.matmul_ogs_details import opt_flags

    # On Hopper, as vLLM sets it: its products split along K have no sums in a fixed order.
    opt_flags.update_opt_flags_constraints({"split_k": 1})
    kept: dict[str, Any] = {name: _matrices(inputs, name) for name in ("gate_up", "down")}
    if "shared_gate" in inputs:
        kept |= {name: _matrices(inputs, name) for name in ("shared_gate_up", "shared_down")}
        kept["shared_gate"] = inputs["shared_gate"]
    return kept | {"k": int(inputs["top_k"])}


def _product(made: tuple[Any, Any], x: torch.Tensor, **more: Any) -> torch.Tensor:
    from triton_kernels.matmul_ogs import matmul_ogs

    weight, precision = made
    y: torch.Tensor = matmul_ogs(x, weight, None, precision_config=precision, **more)
    return y


def run(args: dict[str, Any], out: Tensors) -> None:
    """Its routing, two ragged products with SiLU between them, and the shared expert."""
    from triton_kernels.routing import routing

    x = args["x"]
    data, gather, scatter = routing(args["logits"], args["k"])
    gate, up = _product(args["gate_up"], x, routing_data=data, gather_indx=gather).chunk(2, dim=-1)
    y = _product(args["down"], F.silu(gate) * up, routing_data=data, scatter_indx=scatter, gammas=data.gate_scal)
    if "shared_gate" in args:
        gate, up = _product(args["shared_gate_up"], x).chunk(2, dim=-1)
        share = torch.sigmoid(x.float() @ args["shared_gate"].float())
        y = y.float() + share[:, None] * _product(args["shared_down"], F.silu(gate) * up).float()
    out["y"].copy_(y)


def _refuses(workload: Workload) -> str:
    if workload.axes.get("weights") != "mxfp4":
        return "weights are not MXFP4's: a workload with weights=mxfp4 has them"
    if workload["dtype"] != "bf16":
        return f"dtype={workload['dtype']}: this adapter is for bf16, the dtype of every measured shape"
    wrong = [f"{axis}={workload[axis]}" for axis in ("H", "F", "shared") if workload[axis] % 64]
    if workload["top_k"] & (workload["top_k"] - 1):
        wrong.append(f"top_k={workload['top_k']}")
    return f"{', '.join(wrong)}: takes widths in 64s and a power of two of experts" if wrong else ""


CANDIDATES = (
    Candidate(
        "triton_kernels_moe", "mxfp4-w4a16-rounded", run, Needs(capability=(9, 0), packages=("triton_kernels",)),
        prepare=prepare, refuses=_refuses, config=lambda _: f"triton_kernels {library_version('triton-kernels')}",
    ),
)  # fmt: skip
