"""Which kernel a shape gets: GEMV for few columns, GEMM for many, after collapsing the leading dimensions.

Shapes here are written fastest dimension first, ne = (K, columns, sequences, ...), because the defect this module is
about lives in that notation. In llama.cpp the gated-DeltaNet output reached its projection as [K, 1, n_seqs]. The
dispatcher asked only whether ne[1] <= 8, saw 1, and ran the FP4 GEMV once per sequence: 128 reads of one weight matrix
where a view as [K, n_seqs] makes one tensor-core product. `choose` collapses first; `choose_uncollapsed` is the trap,
kept so that it can be tested and measured (`triton_routed.py`).

The limit of 8 columns is the figure lp.lever1-ssm-out-2d.gb10.mmvq-dispatch-max-ne1.control: the largest ne[1] for
which upstream picks its vector kernel. It is a recorded threshold, not a crossover measured here; `choose` keeps it,
because the arms of the routing question are built on it. What a user should call is `measured`: it collapses, then
asks the device's table of measured times (profiles/<device>/routes/nvfp4.json; kernels/routing.py), says why, and falls
back to the roofline with those words where nothing was measured. KILLGATE_ROUTE_NVFP4=<candidate> overrides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from kernels import routing
from kernels.common import Candidate, Workload
from kernels.nvfp4.cost import cost

FAMILY = "nvfp4"
GEMV_MAX_COLUMNS = 8
# Columns that share one pass over the weights where products are on CUDA cores; None where all do, on tensor cores.
PASS_COLUMNS = {"triton_gemv": 8, "cuda_gemv": 8}
CHAINED = ("cuda_decode_chained",)  # their rows are of a chain of their own kind, so they are never routed to
ROUNDED = ("nvfp4-w4a8", "nvfp4-w4a8-fast", "nvfp4-w4a4")


@dataclass(frozen=True)
class Route:
    """What runs for a shape: `candidate` is launched `calls` times with `columns_per_call` columns of x each."""

    candidate: str
    calls: int
    columns_per_call: int
    reason: str

    def __str__(self) -> str:
        return f"{self.candidate} x {self.calls} ({self.columns_per_call} columns each): {self.reason}"


def _check(ne: tuple[int, ...]) -> None:
    if len(ne) < 2 or min(ne) < 1:
        raise ValueError(f"ne={ne} must be (K, columns, ...) with every entry >= 1; write a vector as (K, 1)")


def choose(
    ne: tuple[int, ...],
    gemv: str = "triton_gemv",
    gemm: str = "triton_gemm",
    gemv_max_columns: int = GEMV_MAX_COLUMNS,
) -> Route:
    """The route for an operand of shape `ne` (fastest first) after collapsing every dimension above K into columns.

    Valid because the weight is the same for every column: the projection does not know tokens from sequences.
    """
    _check(ne)
    columns = prod(ne[1:])
    if columns <= gemv_max_columns:
        return Route(gemv, 1, columns, f"{columns} columns <= {gemv_max_columns}")
    return Route(gemm, 1, columns, f"{columns} columns > {gemv_max_columns}")


def choose_uncollapsed(
    ne: tuple[int, ...],
    gemv: str = "triton_gemv",
    gemm: str = "triton_gemm",
    gemv_max_columns: int = GEMV_MAX_COLUMNS,
) -> Route:
    """The trap: looks at ne[1] alone and repeats the kernel over the dimensions above it."""
    _check(ne)
    columns, calls = ne[1], prod(ne[2:])
    name, sign = (gemv, "<=") if columns <= gemv_max_columns else (gemm, ">")
    return Route(name, calls, columns, f"ne[1]={columns} {sign} {gemv_max_columns}, ne[2:]={ne[2:]} not looked at")


def measured(
    ne: tuple[int, ...],
    n: int,
    device: str,
    candidates: Sequence[Candidate],
    read_gb_s: float,
    peak_tflop_s: Mapping[str, float],
    dtype: str = "bf16",
    known: routing.Table | None = None,
    rounded_activations: bool = False,
) -> routing.Choice:
    """The candidate for an operand of shape `ne` (fastest first) against n weight rows, collapsed first.

    device:      its id in data/devices.toml; its committed table is used unless `known` is given.
    candidates:  those that can run here; the ones that refuse the collapsed shape are left out.
    read_gb_s, peak_tflop_s: the device's read bandwidth and its peaks by pipe ("bf16", "f32", ...), for the prediction;
                 a candidate whose pipe has no peak is predicted to take for ever.
    rounded_activations: let kernels compete that round x to 8 or 4 bits (errors of 3 % and more instead of 0.2 %). They
                 are faster wherever products bind, so only the caller can say that this is what is wanted.
    Raises ValueError when no candidate takes the shape, or the override names none that does.
    """
    _check(ne)
    k, columns = ne[0], prod(ne[1:])
    workload = Workload("routed", {"M": columns, "N": n, "K": k, "dtype": dtype})
    refused = {c.name: why for c in candidates if (why := c.refuses(workload))}
    refused |= {c.name: "timed in a chain of its own kind only" for c in candidates if c.name in CHAINED}
    if not rounded_activations:
        refused |= {c.name: f"{c.precision} rounds the activations" for c in candidates if c.precision in ROUNDED}
    takes = {c.name: c for c in candidates if c.name not in refused}

    def predict(name: str) -> float:
        need, shared = cost(workload, takes[name].precision), PASS_COLUMNS.get(name)
        passes = ceil(columns / shared) if shared else 1
        peak = peak_tflop_s.get("f32" if shared else need.pipe)
        return max(passes * need.bytes / (read_gb_s * 1e3), need.flops / (peak * 1e6) if peak else float("inf"))

    return routing.choose(FAMILY, device, {"N": n, "K": k}, columns, tuple(takes), predict, known, refused)
