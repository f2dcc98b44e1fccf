"""`killgate::kv_decode` on an fp8 cache as an arm: what an eager server calls for a layer, by ops.Batch."""

from __future__ import annotations

from typing import Any

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.kv import format as fmt
from kernels.kv import ops


def prepare(inputs: Tensors) -> dict[str, Any]:
    """The cache in fp8, a batch for its sizes, and q, page_table and seq_lens as they are."""
    q, table, heads = inputs["q"], inputs["page_table"], inputs["k_cache"].shape
    k, k_scale = fmt.quantise_fp8(inputs["k_cache"])
    v, v_scale = fmt.quantise_fp8(inputs["v_cache"])
    sizes = (len(q), table.shape[1] * heads[2], q.shape[1], heads[1], heads[3], heads[2])
    batch = ops.batch(*sizes, k.dtype, q.dtype, k.device)
    return {"q": q, "call": batch, "kept": (k, v, table, inputs["seq_lens"], k_scale, v_scale)}


def run(args: Any, out: Tensors) -> None:
    out["o"].copy_(args["call"](args["q"], *args["kept"]))


def eager(args: Any, out: Tensors) -> Tensors:
    return {"o": args["call"](args["q"], *args["kept"])}


def _refuses(workload: Workload) -> str:
    return "" if workload.role == "measure" else "its host time is asked for at a model's shape"


CANDIDATES = (
    Candidate(
        name="operator_fp8",
        precision="fp8-kv",
        run=run,
        prepare=prepare,
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        refuses=_refuses,
        config=lambda workload: "ops.Batch, eager; the kernel is the router's",
        no_route="calls what the router took",
        eager=eager,
    ),
)
