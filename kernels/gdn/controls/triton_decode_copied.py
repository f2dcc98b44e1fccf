"""Decode on a copy of the states: gathered by row into scratch, updated there, copied back to the pool.

This is what the recorded state-handling levers removed (patches 0018 and 0019: the device-to-device copy and the
get_rows gather), so it is the control that `recurrent_decode` is measured against. The recurrence is the same kernel on
the scratch pool with identity rows; what differs is only that each state is read and written three times instead of
once. The gather and the copy are the framework's own index operations, which run at copy speed.

An empty slot (state_rows = -1) has no state to gather, so such batches are refused: a server that copies keeps its
batch dense.
"""

from __future__ import annotations

import torch

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.gdn import triton_decode
from kernels.gdn.launch import checked


def _prepare(inputs: Tensors) -> Tensors:
    """Scratch for one batch of states, and the rows in the two integer widths that the two users want."""
    checked(inputs, ("q", "k", "v", "g", "beta", "state", "state_rows"))
    rows = inputs["state_rows"]
    scratch = torch.empty((rows.numel(), *inputs["state"].shape[1:]), dtype=inputs["state"].dtype, device=rows.device)
    identity = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
    return inputs | {"scratch": scratch, "pool_rows": rows.long(), "state_rows": identity}


def _run(args: Tensors, out: Tensors) -> None:
    torch.index_select(out["state"], 0, args["pool_rows"], out=args["scratch"])
    triton_decode.launch(args, args["scratch"], out["o"])
    out["state"].index_copy_(0, args["pool_rows"], args["scratch"])


def _refuses(workload: Workload) -> str:
    if workload["op"] == "decode" and workload["pad"]:
        return f"pad = {workload['pad']}: an empty slot has no state to copy"
    return triton_decode.refuses(workload)


CANDIDATES = (
    Candidate(
        name="recurrent_decode_copied",
        precision="f32",
        run=_run,
        needs=Needs(triton="3.6"),
        prepare=_prepare,
        refuses=_refuses,
        config=lambda workload: "gather, " + triton_decode.describe(workload) + ", copy back",
    ),
)
