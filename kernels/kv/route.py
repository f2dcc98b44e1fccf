"""Which decode kernel a cache gets, by its length: from the device's table of measured times (kernels/routing.py).

The routed axis is ctx, the tokens of a sequence; the shape is (batch, Hq, Hkv, D, page). The precision is the format in
which the cache lies, so only kernels of one precision compete: those of the 16-bit cache unless another is named.
Without a table the roofline decides, which cannot tell the kernels of one format apart: the first of `candidates` that
takes the workload is taken then, and the reason says so. KILLGATE_ROUTE_KV=<candidate> overrides.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernels import routing
from kernels.common import Candidate, Cost, Workload
from kernels.kv.cost import cost

FAMILY = "kv"


def _cost(workload: Workload, candidate: Candidate) -> Cost:
    return cost(workload, candidate.precision)


def _asked(words: Mapping[str, str]) -> tuple[Workload, str]:
    axes = routing.axes(words, ctx=None, batch=None, Hq=None, Hkv=None, D=None, page=16, dtype=("bf16", "fp16"))
    if int(axes["Hq"]) % int(axes["Hkv"]):
        raise ValueError(f"Hq={axes['Hq']}: not a multiple of Hkv={axes['Hkv']}")
    return Workload("asked", {"lengths": "full", **axes}), ""


ROUTER = routing.Router(
    family=FAMILY,
    axis="ctx",
    shape=("batch", "Hq", "Hkv", "D", "page"),
    fixed={"lengths": "full", "dtype": "bf16"},
    cost=_cost,
    asked=_asked,
    usage="ctx=TOKENS batch=SEQUENCES Hq=HEADS Hkv=HEADS D=DIMENSION [page=16] [dtype=bf16]",
    stored="bf16",
)
