"""`cuda_experts` with one thing changed.

Scratch (row IM4): experts_fresh_scratch allocates what its two kernels leave each other in every call, where the
candidate keeps it. In a captured graph the allocator has no part in a replay, so only the ticket's memset is left.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.common import Candidate, Needs, Tensors
from kernels.moe import cuda_experts
from kernels.moe.cuda_experts import PRECISION, SCRATCH

NEEDS = Needs(capability=(9, 0), packages=("cupy",))
WHY = "shows what one change does to cuda_experts"


def run_fresh(args: dict[str, Any], out: Tensors) -> None:
    """cuda_experts.run on scratch of this call."""
    made = {name: torch.empty_like(args[name]) for name in SCRATCH if name != "state"}
    cuda_experts.run(args | made, out)


CANDIDATES = (
    Candidate(
        "experts_fresh_scratch", PRECISION, run_fresh, NEEDS, prepare=cuda_experts.prepare,
        refuses=lambda w: cuda_experts.CANDIDATES[0].refuses(w), config=lambda w: cuda_experts.CANDIDATES[0].config(w),
        no_route=WHY,
    ),
)  # fmt: skip
