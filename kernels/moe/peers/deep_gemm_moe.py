"""DeepGEMM's grouped products in bf16 on Hopper, contiguous layout: every expert's rows padded to whole tiles.

    pip install deep-gemm

m_grouped_bf16_gemm_nt_contiguous takes rows sorted by expert, each expert's padded to ALIGN, and the expert of every
row (-1 for padding, which it skips). The layout is worked out on the device for as many rows as any routing may need,
so nothing is asked of the host; top-k, sort, SiLU, sum and the shared expert are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernels.common import Candidate, Needs, Tensors, Workload, library_version
from kernels.moe import torch_grouped

ALIGN = 128


def padded(ends: torch.Tensor, rows: int, align: int = ALIGN) -> tuple[torch.Tensor, torch.Tensor]:
    """(place int64 [rows], expert int32 [most]): where a sorted row goes, and whose each padded row is, -1 for none."""
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    begins = ((counts + align - 1) // align * align).cumsum(0)
    most = -(-(rows + min(len(ends), rows) * (align - 1)) // align) * align
    row = torch.arange(rows, device=ends.device)
    e = torch.searchsorted(ends, row.int(), right=True)
    first = begins[e] - (counts[e] + align - 1) // align * align
    place = first + row - (ends.long()[e] - counts[e])
    expert = torch.full((most,), -1, dtype=torch.int32, device=ends.device)
    return place, expert.scatter_(0, place, e.int())


def run(args: dict[str, Any], out: Tensors) -> None:
    """Sort and pad by torch, two grouped products, and torch's operators between them."""
    from deep_gemm import m_grouped_bf16_gemm_nt_contiguous

    x = args["x"]
    chosen, token, weight, ends, back = torch_grouped.sorted_by_expert(args["logits"], args["k"], len(args["down"]))
    place, expert = padded(ends, len(token))
    rows = x.new_zeros(len(expert), x.shape[1]).index_copy_(0, place, x[token])
    wide = x.new_empty(len(expert), args["gate_up"].shape[1])
    m_grouped_bf16_gemm_nt_contiguous(rows, args["gate_up"], wide, expert)
    gate, up = wide.chunk(2, dim=-1)
    each = torch.empty_like(rows)
    m_grouped_bf16_gemm_nt_contiguous(F.silu(gate) * up, args["down"], each, expert)
    total = (each[place].float() * weight[:, None])[back].view(*chosen.shape, -1).sum(1)
    if "shared_gate" in args:
        total += torch_grouped.shared(args, x)
    out["y"].copy_(total)


def _refuses(workload: Workload) -> str:
    if workload["dtype"] != "bf16":
        return f"dtype={workload['dtype']}: its products are in bf16"
    width, inner = workload["H"], workload["F"]
    return f"H={width}, F={inner}: takes widths in 64s" if width % 64 or inner % 64 else ""


CANDIDATES = (
    Candidate(
        "deep_gemm_moe", "bf16", run, Needs(capability=(9, 0), packages=("deep_gemm",)),
        prepare=torch_grouped.prepare, refuses=_refuses,
        config=lambda _: f"deep_gemm {library_version('deep-gemm')}, rows padded to {ALIGN}",
    ),
)  # fmt: skip
