"""The library's grouped product on bf16 weights, tokens sorted by expert: what an engine has without a kernel.

Nothing is asked of the host: order and offsets are tensors, so it can be captured. On the CPU, where torch has no
grouped product, the groups are a loop.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from kernels.common import Candidate, Needs, Tensors, Work, Workload
from kernels.moe.cost import block_sizes, cost
from kernels.nvfp4 import format as nvfp4


def _matrices(inputs: Tensors, name: str) -> torch.Tensor:
    """[E, N, K] in bf16."""
    packed, scale, tensor_scale = (inputs[f"{name}_{part}"] for part in ("packed", "scale", "tensor_scale"))
    each = (nvfp4.Nvfp4(packed[e], scale[e], tensor_scale[e : e + 1]) for e in range(len(packed)))
    return torch.stack([nvfp4.dequantise(q).bfloat16() for q in each])


def prepare(inputs: Tensors) -> dict[str, Any]:
    """Weights in bf16."""
    names = ["gate_up", "down"] + ["shared_gate_up", "shared_down"] * ("shared_gate" in inputs)
    kept: dict[str, Any] = {name: _matrices(inputs, name) for name in names}
    if "shared_gate" in inputs:
        kept["shared_gate"] = inputs["shared_gate"]
    return kept | {"k": int(inputs["top_k"])}


def sorted_by_expert(
    logits: torch.Tensor, top_k: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(chosen [T, top_k], token [rows], weight [rows] float32, ends int32 [E], back [rows]), rows = T top_k by expert.

    ends: one behind each expert's last row; back: where a token's rows lie, in its own order, so that they are added
    up in one way on every run.
    """
    chosen = logits.topk(top_k, dim=-1)
    order = chosen.indices.flatten().sort(stable=True)
    ends = torch.searchsorted(order.values, torch.arange(experts, device=logits.device), right=True).int()
    weight = chosen.values.softmax(-1).flatten()[order.indices]
    rows = torch.arange(len(weight), device=logits.device)
    back = torch.empty_like(order.indices).scatter_(0, order.indices, rows)
    return chosen.indices, order.indices // top_k, weight, ends, back


def grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows ends[e - 1] to ends[e] of x [rows, K] times w[e] [N, K] transposed."""
    if x.is_cuda:
        return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
    bounds = [0, *ends.tolist()]
    return torch.cat([F.linear(x[a:b], w[e]) for e, (a, b) in enumerate(pairwise(bounds))])


def shared(args: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """float32 [T, H]: what the shared expert gives, times its gate."""
    gate, up = F.linear(x.bfloat16(), args["shared_gate_up"][0]).chunk(2, dim=-1)
    share = torch.sigmoid(x.float() @ args["shared_gate"].float())
    return share[:, None] * F.linear(F.silu(gate) * up, args["shared_down"][0]).float()


def run(args: dict[str, Any], out: Tensors) -> None:
    """Route, sort, two grouped products, weighted sum, shared expert."""
    x, kind = args["x"], args["x"].dtype
    chosen, token, weight, ends, back = sorted_by_expert(args["logits"], args["k"], len(args["down"]))
    gate, up = grouped(x[token].bfloat16(), args["gate_up"], ends).chunk(2, dim=-1)
    y = grouped(F.silu(gate) * up, args["down"], ends)
    total = (y.float() * weight[:, None])[back].view(*chosen.shape, -1).sum(1)
    if "shared_gate" in args:
        total += shared(args, x)
    out["y"].copy_(total.to(kind))


def work(workload: Workload, sms: int) -> Work:
    """Tiles of 128 by 128 of the library's products, whose tiles nobody tells us; its sort takes a dozen launches."""
    blocks = sum(count for _, count in block_sizes(workload, 128))
    clocks = sum(
        math.ceil(blocks * -(-n // 128) / sms) * 128 * 128 * k / 4096
        for n, k in ((2 * workload["F"], workload["H"]), (workload["H"], workload["F"]))
    )
    rows = workload["T"] * (workload["top_k"] + (workload["shared"] > 0))
    moved = cost(workload, "bf16").bytes + rows * (12.0 * workload["F"] + 12.0 * workload["H"])
    return Work({"bytes": moved, "products": clocks}, {"launches": 25.0})


CANDIDATES = (
    Candidate(
        "torch_grouped", "bf16", run, Needs(), prepare=prepare, work=work,
        refuses=lambda w: "" if w["dtype"] == "bf16" else f"dtype={w['dtype']}: its products are in bf16",
    ),
)  # fmt: skip
