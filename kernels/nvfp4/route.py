"""Which kernel a shape gets: GEMV for few columns, GEMM for many, after collapsing the leading dimensions.

Shapes here are written fastest dimension first, ne = (K, columns, sequences, ...), because the defect this module is
about lives in that notation. In llama.cpp the gated-DeltaNet output reached its projection as [K, 1, n_seqs]. The
dispatcher asked only whether ne[1] <= 8, saw 1, and ran the FP4 GEMV once per sequence: 128 reads of one weight matrix
where a view as [K, n_seqs] makes one tensor-core product. `choose` collapses first; `choose_uncollapsed` is the trap,
kept so that it can be tested and measured (`triton_routed.py`).

The limit of 8 columns is the figure lp.lever1-ssm-out-2d.gb10.mmvq-dispatch-max-ne1.control: the largest ne[1] for
which upstream picks its vector kernel. It is a recorded threshold, not a crossover measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

GEMV_MAX_COLUMNS = 8


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
