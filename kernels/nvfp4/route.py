"""Which kernel a shape gets, after collapsing the leading dimensions, and the dispatch defect that makes this matter.

Shapes here are written fastest dimension first, ne = (K, columns, sequences, ...), because the defect lives in that
notation. In llama.cpp the gated-DeltaNet output reached its projection as [K, 1, n_seqs]. The dispatcher asked only
whether ne[1] <= 8, saw 1, and ran the FP4 GEMV once per sequence: 128 reads of one weight matrix where a view as
[K, n_seqs] makes one tensor-core product. `choose` collapses first; `choose_uncollapsed` is the trap, kept so that it
can be tested and measured (`controls/triton_routed.py`).

The limit of 8 columns is the figure lp.lever1-ssm-out-2d.gb10.mmvq-dispatch-max-ne1.control: the largest ne[1] for
which upstream picks its vector kernel. It is a recorded threshold, not a crossover measured here; `choose` keeps it,
because the arms of the routing question are built on it. What a user should ask is ROUTER, by `routing.route` or from
the command line by `lab routes nvfp4 --shape ne=K,COLUMNS,... N=ROWS`: it collapses, then asks the device's table of
measured times (profiles/<device>/routes/nvfp4.json), says why, and falls back to the roofline with those words where
nothing was measured. KILLGATE_ROUTE_NVFP4=<candidate> overrides. Of the precisions in ROUNDED "nvfp4-w4a8" is the one
whose error does not grow with the length of the sum, "nvfp4-w4a8-fast" the faster one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod

from kernels import routing
from kernels.common import Candidate, Cost, Workload
from kernels.nvfp4.cost import cost

FAMILY = "nvfp4"
GEMV, GEMM, GEMV_MAX_COLUMNS = "triton_gemv", "triton_gemm", 8
# Columns that share one pass over the weights where products are on CUDA cores; None where all do, on tensor cores.
PASS_COLUMNS = {"triton_gemv": 8, "cuda_gemv": 8}
# Kernels that round x compete only where the caller names their precision: they are faster wherever products bind.
ROUNDED = {
    "nvfp4-w4a8": "rounds the activations to e4m3 and adds up in float32 every 512 values of K",
    "nvfp4-w4a8-fast": "rounds the activations to e4m3 and adds up in the tensor cores' own sums, which lose much "
    "where all products have one sign",
    "nvfp4-w4a4": "rounds the activations to e2m1",
}


@dataclass(frozen=True)
class Route:
    """What runs for a shape: `candidate` is launched `calls` times with `columns_per_call` columns of x each."""

    candidate: str
    calls: int
    columns_per_call: int
    reason: str

    def __str__(self) -> str:
        return f"{self.candidate} x {self.calls} ({self.columns_per_call} columns each): {self.reason}"


def choose(ne: tuple[int, ...]) -> Route:
    """The route for an operand of shape `ne` (fastest first) after collapsing every dimension above K into columns."""
    _, columns = routing.collapse(ne)
    if columns <= GEMV_MAX_COLUMNS:
        return Route(GEMV, 1, columns, f"{columns} columns <= {GEMV_MAX_COLUMNS}")
    return Route(GEMM, 1, columns, f"{columns} columns > {GEMV_MAX_COLUMNS}")


def choose_uncollapsed(ne: tuple[int, ...]) -> Route:
    """The trap: looks at ne[1] alone and repeats the kernel over the dimensions above it."""
    routing.collapse(ne)
    columns, calls = ne[1], prod(ne[2:])
    name, sign = (GEMV, "<=") if columns <= GEMV_MAX_COLUMNS else (GEMM, ">")
    return Route(name, calls, columns, f"ne[1]={columns} {sign} {GEMV_MAX_COLUMNS}, ne[2:]={ne[2:]} not looked at")


def _cost(workload: Workload, candidate: Candidate) -> Cost:
    need, shared = cost(workload, candidate.precision), PASS_COLUMNS.get(candidate.name)
    if shared is None:
        return need
    return replace(need, bytes=need.bytes * ceil(workload["M"] / shared), pipe="f32")


def _policy(route: Route) -> tuple[str, int]:
    return route.candidate, route.calls


POLICIES = {
    "the 3-D operand [K, 1, sequences], not collapsed": lambda w, _: _policy(choose_uncollapsed((w["K"], 1, w["M"]))),
    "collapsed, the vector kernel up to 8 columns": lambda w, _: _policy(choose((w["K"], w["M"]))),
}
ROUTER = replace(routing.linear_router(FAMILY, _cost, block=16, opt_in=ROUNDED), policies=POLICIES)
