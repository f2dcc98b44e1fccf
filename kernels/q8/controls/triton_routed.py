"""The routing defect of row LP11 on Q8_0 weights: one vector pass per sequence, or one product over all of them.

At decode the operand of the output projection is [K, 1, n_seqs], fastest first. A dispatcher that looks at one
dimension runs its vector kernel once per sequence; a 2-D view of the same memory is one product. Both arms quantise x
once and start from the same kernels, those of `triton_mmq`:

    q8_sequence_grid   the vector kernel with the sequences along its grid: the weights are walked n_seqs times
    q8_collapsed       the tile on the integer tensor cores
"""

from __future__ import annotations

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.q8 import triton_mmq


def run_sequence_grid(args: Tensors, out: Tensors) -> None:
    """The defect: the vector kernel over one row, with the M sequences along its grid."""
    triton_mmq.launch(args, out, triton_mmq.choose_config(1, args["x"].shape[1]))


def prepare_sequence_grid(inputs: Tensors) -> Tensors:
    """As the vector kernel reads them."""
    return triton_mmq.operands(inputs, triton_mmq.choose_config(1, inputs["x"].shape[1]))


def _refuses(workload: Workload) -> str:
    if "n_seqs" not in workload.axes:
        return "no n_seqs axis: x is not [K, 1, n_seqs], so there is nothing to collapse"
    if workload["n_seqs"] != workload["M"]:
        return f"n_seqs={workload['n_seqs']} != M={workload['M']}: only one token per sequence is routed here"
    return ""


CANDIDATES = (
    Candidate(
        name="q8_sequence_grid",
        precision="q8_0-w8a8",
        run=run_sequence_grid,
        needs=Needs(triton="3.6"),
        prepare=prepare_sequence_grid,
        refuses=_refuses,
        config=lambda workload: f"{workload['M']} sequences in the grid; {triton_mmq.choose_config(1, workload['K'])}",
        no_route="shows the routing defect: a vector kernel a sequence",
    ),
    Candidate(
        name="q8_collapsed",
        precision="q8_0-w8a8",
        run=triton_mmq.run,
        needs=Needs(triton="3.6"),
        prepare=triton_mmq.prepare,
        refuses=_refuses,
        config=triton_mmq.CANDIDATES[0].config,
        no_route="triton_mmq under another name, the other arm of the routing defect",
    ),
)
