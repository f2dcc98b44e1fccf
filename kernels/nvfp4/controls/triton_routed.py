"""The routing defect end to end: one GEMV per sequence against one product over all of them.

At decode the operand of the projection is [K, 1, n_seqs] (fastest first): x[s] is one token of sequence s. Both
candidates start from that view and ask `route.py`; they launch the same kernels as `triton_gemv` and `triton_gemm` do.

    gemv_per_sequence   `choose_uncollapsed` sees one column, so the GEMV is launched n_seqs times and the weights are
                        read n_seqs times (from L2 where they fit, as far as L2 reaches)
    gemv_sequence_grid  the same reads in one launch, the sequences along the grid: what upstream does, whose recorded
                        profile shows 48 instances for 48 layers. The fair control, because it pays for one launch
    gemm_collapsed      the 2-D view [K, n_seqs]: one product

The same question for MXFP4 weights, by the same kernels with groups of 32: mxfp4_sequence_grid and mxfp4_collapsed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.nvfp4 import triton_gemm, triton_gemv
from kernels.nvfp4.layout import prepare
from kernels.nvfp4.route import Route, choose, choose_uncollapsed

DEFECT = "shows the routing defect: a vector kernel a sequence"


def _operand(n_seqs: int, k: int) -> tuple[int, int, int]:
    return (k, 1, n_seqs)


def _launch(route: Route, args: Tensors, out: Tensors) -> None:
    """`route.calls` launches, each over the next `route.columns_per_call` rows of x and y."""
    x, y, step = args["x"], out["y"], route.columns_per_call
    for call in range(route.calls):
        rows = slice(call * step, (call + 1) * step)
        if route.candidate == "triton_gemv":
            triton_gemv.launch(args, x[rows], y[rows])
        else:
            triton_gemm.launch(args | {"x": x[rows]}, y[rows])


def run_uncollapsed(args: Tensors, out: Tensors) -> None:
    _launch(choose_uncollapsed(_operand(*args["x"].shape)), args, out)


def run_sequence_grid(args: Tensors, out: Tensors) -> None:
    triton_gemv.launch(args, args["x"], out["y"], rows_per_pass=1)


def run_collapsed(args: Tensors, out: Tensors) -> None:
    _launch(choose(_operand(*args["x"].shape)), args, out)


def _refuses(workload: Workload) -> str:
    if "n_seqs" not in workload.axes:
        return "no n_seqs axis: x is not [K, 1, n_seqs], so there is nothing to collapse"
    if workload["n_seqs"] != workload["M"]:
        return f"n_seqs={workload['n_seqs']} != M={workload['M']}: only one token per sequence is routed here"
    return ""


def _config_uncollapsed(workload: Workload) -> str:
    return (
        f"{choose_uncollapsed(_operand(workload['M'], workload['K']))}; {triton_gemv.choose_config(1, workload['N'])}"
    )


def _config_sequence_grid(workload: Workload) -> str:
    return f"{workload['M']} sequences in the grid; {triton_gemv.choose_config(1, workload['N'])}"


def _config_collapsed(workload: Workload) -> str:
    route = choose(_operand(workload["M"], workload["K"]))
    module = triton_gemv if route.candidate == "triton_gemv" else triton_gemm
    return f"{route}; {module.CANDIDATES[0].config(workload)}"


def _twin(name: str, original: Candidate) -> Candidate:
    """The same launches on MXFP4 weights; layout.py and the kernels tell the formats apart by the scales' shape."""

    def refuses(workload: Workload) -> str:
        mxfp4 = workload.axes.get("weights") == "mxfp4"
        return original.refuses(workload) if mxfp4 else "weights=nvfp4: this arm is the same question for MXFP4"

    return replace(original, name=name, precision="mxfp4-w4a16", refuses=refuses)


def _arm(
    name: str, run: Callable[[Tensors, Tensors], None], config: Callable[[Workload], str], no_route: str
) -> Candidate:
    return Candidate(
        name=name,
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(triton="3.6"),
        prepare=prepare,
        refuses=_refuses,
        config=config,
        no_route=no_route,
    )


PER_SEQUENCE = _arm("gemv_per_sequence", run_uncollapsed, _config_uncollapsed, DEFECT)
SEQUENCE_GRID = _arm("gemv_sequence_grid", run_sequence_grid, _config_sequence_grid, DEFECT)
COLLAPSED = _arm(
    "gemm_collapsed",
    run_collapsed,
    _config_collapsed,
    "triton_gemm under another name, the other arm of the routing defect",
)
CANDIDATES = (
    PER_SEQUENCE,
    SEQUENCE_GRID,
    COLLAPSED,
    _twin("mxfp4_sequence_grid", SEQUENCE_GRID),
    _twin("mxfp4_collapsed", COLLAPSED),
)
