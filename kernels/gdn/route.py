"""Which prefill kernel a scan gets, by its length: from the device's table of measured times (kernels/routing.py).

The routed axis is T, the tokens of a sequence; the shape is (batch, Hk, Hv, D). Without a table the roofline decides,
which cannot tell the candidates of one precision apart: the first of `candidates` that takes the workload is taken
then, and the reason says that nothing was measured. KILLGATE_ROUTE_GDN=<candidate> overrides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels import routing
from kernels.common import Candidate, Workload
from kernels.gdn.cost import cost

FAMILY = "gdn"


def choose(
    workload: Workload,
    device: str,
    candidates: Sequence[Candidate],
    read_gb_s: float,
    peak_tflop_s: Mapping[str, float],
    known: routing.Table | None = None,
) -> routing.Choice:
    """The prefill candidate for a workload on a device (its id in data/devices.toml).

    read_gb_s, peak_tflop_s (by pipe): the device's, for the prediction. Raises ValueError for a decode workload and
    when no candidate takes it.
    """
    if workload["op"] != "prefill":
        raise ValueError(f"op = {workload['op']}: only prefill has kernels to choose between by length")
    takes = {c.name: c for c in candidates if not c.refuses(workload)}

    def predict(name: str) -> float:
        need = cost(workload, takes[name].precision)
        peak = peak_tflop_s.get(need.pipe)
        return max(need.bytes / (read_gb_s * 1e3), need.flops / (peak * 1e6) if peak else float("inf"))

    shape = {axis: int(workload[axis]) for axis in ("batch", "Hk", "Hv", "D")}
    return routing.choose(FAMILY, device, shape, int(workload["T"]), tuple(takes), predict, known)
