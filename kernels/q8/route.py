"""Which of the three paths a shape gets, from the measured table of the device (see kernels/routing.py).

What this must not become is in the record: tiers by memory bandwidth, 800 GB/s and up mmq, 200 to 800 cuBLAS, below
that a warp per row. On GB10, whose 273 or 546 GB/s (both are in the record) fall into the middle tier, mmq was the
fastest path (458 against 401 tok/s). Without a table the roofline decides, and says that it did.
KILLGATE_ROUTE_Q8=<candidate> overrides.
"""

from __future__ import annotations

from dataclasses import replace

from kernels import routing
from kernels.common import Candidate, Cost, Workload
from kernels.q8.cost import cost

FAMILY = "q8"
EXPANDED_BYTES = 2 * 2  # of a weight that a call writes in 16 bits and reads again


def _cost(workload: Workload, candidate: Candidate) -> Cost:
    need = cost(workload, candidate.precision)
    if candidate.precision != "q8_0-expanded":
        return need
    return replace(need, bytes=need.bytes + EXPANDED_BYTES * workload["N"] * workload["K"])


def _tier(read_gb_s: float) -> str:
    return "triton_mmq" if read_gb_s > 800 else "torch_cached" if read_gb_s > 200 else "triton_warp_row"


POLICIES = {"tiers by memory bandwidth": lambda workload, read_gb_s: (_tier(read_gb_s), 1)}
ROUTER = replace(routing.linear_router(FAMILY, _cost, block=32), policies=POLICIES)
