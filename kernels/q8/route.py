"""Which of the three paths a shape gets, from the measured table of the device (see kernels/routing.py).

What this must not become is in the record: tiers by memory bandwidth, 800 GB/s and up mmq, 200 to 800 cuBLAS, below
that a warp per row. On GB10, whose 273 or 546 GB/s (both are in the record) fall into the middle tier, mmq was the
fastest path (458 against 401 tok/s). Without a table the roofline decides, and says that it did.
"""

from __future__ import annotations

from kernels import routing
from kernels.common import Candidate, Workload
from kernels.q8.cost import cost

FAMILY = "q8"


def choose(
    workload: Workload,
    device: str,
    candidates: tuple[Candidate, ...],
    read_gb_s: float,
    peak_tflop_s: dict[str, float],
    known: routing.Table | None = None,
) -> routing.Choice:
    """The path for a workload on a device (its id in data/devices.toml).

    read_gb_s, peak_tflop_s (by pipe): the device's, for the prediction where nothing was measured; a pipe that is not
    in it takes no part. Raises ValueError when no candidate takes the workload.
    """
    refused = {c.name: why for c in candidates if (why := c.refuses(workload))}
    takes = {c.name: c for c in candidates if c.name not in refused}

    def predict(name: str) -> float:
        need = cost(workload, takes[name].precision)
        peak = peak_tflop_s.get(need.pipe)
        compute_us = need.flops / (peak * 1e6) if peak else float("inf")
        return max(need.bytes / (read_gb_s * 1e3), compute_us)

    shape = {"N": workload["N"], "K": workload["K"]}
    return routing.choose(FAMILY, device, shape, workload["M"], tuple(takes), predict, known, refused)
