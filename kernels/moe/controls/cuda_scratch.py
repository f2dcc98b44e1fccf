"""`cuda_experts` with scratch of each call (row IM4): it allocates what its two kernels leave each other, where the
candidate keeps it. In a captured graph the allocator has no part in a replay, so only the ticket's memset is left.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.common import Candidate, Needs, Tensors
from kernels.moe import cuda_experts
from kernels.moe.cuda_experts import KEPT, PRECISION, SCRATCH


def run_fresh(args: dict[str, Any], out: Tensors) -> None:
    """cuda_experts.run on scratch of this call."""
    made = {name: torch.empty_like(args[name]) for name in SCRATCH if name not in KEPT}
    cuda_experts.run(args | made, out)


CANDIDATES = (
    Candidate(
        "experts_fresh_scratch", PRECISION, run_fresh, Needs(capability=(9, 0), packages=("cupy",)),
        prepare=cuda_experts.prepare, refuses=cuda_experts.CANDIDATES[0].refuses, config=cuda_experts.described,
        no_route="shows what one change does to cuda_experts",
    ),
)  # fmt: skip
