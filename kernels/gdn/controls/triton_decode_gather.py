"""Decode on gathered states that is written back in place: the middle of three ways to handle the state.

    recurrent_decode_copied    gather, update the copy, copy it back     six passes over a state (before patch 0018)
    recurrent_decode_gathered  gather, update, write to its row          four passes (0018: no copy back)
    recurrent_decode           read by id, update, write to its row      two passes (0019: no gather)

The framework's index operation gathers the batch's states into scratch, in the order of the batch; the kernel then
reads scratch and writes each state to its own row of the pool. Recorded on GB10 the first step gave +23.5 % of decode
throughput and the second +37.8 %; this is the control that splits them.

Reading from scratch also takes the question of races away: no program reads what another one writes. That
`recurrent_decode` is as safe rests on rows being distinct, so that every state slice has one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.common import Candidate, Needs, Tensors, Workload, interpreted
from kernels.gdn import triton_decode
from kernels.gdn.launch import capability, checked
from kernels.gdn.tiles import as_format
from kernels.gdn.triton_decode import decode_token


@triton.jit
def gathered_decode_kernel(
    q, k, v, g, beta, scratch, state, state_rows, o, scale,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, V_TILE: tl.constexpr,
    L2_NORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid (D / V_TILE, HV, B). As recurrent_decode_kernel, but a state is read from scratch [B, HV, D, D]."""
    head = tl.program_id(1)
    b = tl.program_id(2)
    dk = tl.arange(0, D)
    dv = tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    state_row = tl.load(state_rows + b)
    at_v = (b * HV + head) * D + dv
    at_state = dk[:, None] * D + dv[None, :]
    at_k = (b * HK + head // (HV // HK)) * D + dk

    s = tl.load(scratch + (b.to(tl.int64) * HV + head) * D * D + at_state).to(tl.float32)  # [D, V_TILE]
    key = tl.load(k + at_k).to(tl.float32)
    query = tl.load(q + at_k).to(tl.float32)
    value = tl.load(v + at_v).to(tl.float32)
    decay = tl.exp(tl.load(g + b * HV + head))
    rate = tl.load(beta + b * HV + head)
    s, read = decode_token(s, key, query, value, decay, rate, scale, L2_NORM)
    state += (state_row.to(tl.int64) * HV + head) * D * D
    tl.store(state + at_state, as_format(s, state.dtype.element_ty, INTERPRETED))
    tl.store(o + at_v, as_format(read, o.dtype.element_ty, INTERPRETED))


def _prepare(inputs: Tensors) -> Tensors:
    """Scratch for one batch of states, and the rows as the 64-bit ids that the gather wants."""
    checked(inputs, ("q", "k", "v", "g", "beta", "state", "state_rows"))
    rows = inputs["state_rows"]
    scratch = torch.empty((rows.numel(), *inputs["state"].shape[1:]), dtype=inputs["state"].dtype, device=rows.device)
    return inputs | {"scratch": scratch, "pool_rows": rows.long()}


def _run(args: Tensors, out: Tensors) -> None:
    q, v, state = args["q"], args["v"], out["state"]
    torch.index_select(state, 0, args["pool_rows"], out=args["scratch"])
    (batch, heads_v, dim), heads_k = v.shape, q.shape[-2]
    config = triton_decode.config_for(capability(v.device), batch, heads_v, dim)
    gathered_decode_kernel[(dim // config.v_tile, heads_v, batch)](
        q, args["k"], v, args["g"], args["beta"], args["scratch"], state, args["state_rows"], out["o"], dim**-0.5,
        HK=heads_k, HV=heads_v, D=dim, V_TILE=config.v_tile, L2_NORM="raw_qk" in args, INTERPRETED=interpreted(),
        num_warps=config.num_warps,
    )  # fmt: skip


def _refuses(workload: Workload) -> str:
    if workload["op"] == "decode" and workload["pad"]:
        return f"pad = {workload['pad']}: an empty slot has no state to gather"
    return triton_decode.refuses(workload)


CANDIDATES = (
    Candidate(
        name="recurrent_decode_gathered",
        precision="f32",
        run=_run,
        needs=Needs(triton="3.6"),
        prepare=_prepare,
        refuses=_refuses,
        config=lambda workload: "gather, " + triton_decode.describe(workload) + ", written by id",
    ),
)
