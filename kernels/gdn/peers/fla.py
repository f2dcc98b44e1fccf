"""flash-linear-attention (fla): chunked prefill and recurrent decode of the gated delta rule, in Triton.

    pip install fla-core einops

Its tensors are ours: q, k [B, T, Hk, D], v [B, T, Hv, D], g (log decay) and beta [B, T, Hv], states [N, Hv, D, D] with
the k dimension first, grouped heads by the same rule, l2norm with the same epsilon. What differs is who owns memory:

    fla_chunk            returns a new o and a new final state (no output arguments), which are copied into ours: so
                         its time contains reading and writing both once more. cu_seqlens become int64.
    fla_fused_recurrent  knows no pool: it takes the states of the batch in order and returns new ones. Serving from a
                         pool therefore gathers before the call and scatters after it, and both are in the timing, as
                         in recurrent_decode_copied. The call alone moves a third of those bytes; figures that others
                         quote for it are of the call alone.

Where FlashQLA is installed fla hands a prompt to it; its own kernels are meant here, so it is told not to.

Both are safe in a CUDA graph once autotuned, which the first call does. Ragged lengths make fla build chunk indices on
the host and remember them for the same cu_seqlens tensor.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from kernels.common import Candidate, Needs, Tensors, Workload, library_version


def _prepare_chunk(inputs: Tensors) -> Tensors:
    bounds = {"cu_seqlens": inputs["cu_seqlens"].long()} if "cu_seqlens" in inputs else {}
    return inputs | bounds


def _run_chunk(args: Tensors, out: Tensors) -> None:
    os.environ["FLA_FLASH_QLA"] = "0"  # read at the first call
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    with torch.no_grad():
        o, final_state = chunk_gated_delta_rule(
            args["q"], args["k"], args["v"], g=args["g"], beta=args["beta"], scale=args["q"].shape[-1] ** -0.5,
            initial_state=args["initial_state"], output_final_state=True, cu_seqlens=args.get("cu_seqlens"),
            use_qk_l2norm_in_kernel="raw_qk" in args,
        )  # fmt: skip
    out["o"].copy_(o)
    out["final_state"].copy_(final_state)


def _prepare_recurrent(inputs: Tensors) -> Tensors:
    """The pool's rows as an index."""
    return {"rows": inputs["state_rows"].long()} | ({"raw_qk": inputs["raw_qk"]} if "raw_qk" in inputs else {})


def _run_recurrent(args: Tensors, out: Tensors) -> None:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    pool, rows = out["state"], args["rows"]
    q, k, v, g, beta = (args[name].unsqueeze(1) for name in ("q", "k", "v", "g", "beta"))  # a time axis of length one
    with torch.no_grad():
        o, states = fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, scale=q.shape[-1] ** -0.5,
            initial_state=pool.index_select(0, rows), output_final_state=True,
            use_qk_l2norm_in_kernel="raw_qk" in args,
        )  # fmt: skip
    out["o"].copy_(o.squeeze(1))
    pool.index_copy_(0, rows, states)


def _refuses_chunk(workload: Workload) -> str:
    if workload["op"] != "prefill":
        return f"op = {workload['op']}: fla_chunk does prefill; decode is fla_fused_recurrent's"
    if "out_dtype" in workload.axes:
        return f"out_dtype = {workload['out_dtype']}: fla returns the activations' type"
    if workload["dtype"] == "f32":
        return "dtype = f32: fla's chunked form is for 16-bit q, k and v"
    return ""


def _refuses_recurrent(workload: Workload) -> str:
    if workload["op"] != "decode":
        return f"op = {workload['op']}: fla_fused_recurrent is taken for decode; prefill is fla_chunk's"
    if workload["pad"]:
        return f"pad = {workload['pad']}: fla has no empty slots, and -1 is no row to gather"
    if workload["state_dtype"] != "f32":
        return f"state_dtype = {workload['state_dtype']}: fla returns float32 states whatever it was given"
    return ""


def _version() -> str:
    return f"fla-core {library_version('fla-core')}"


_PACKAGES = ("fla", "einops")

_CANDIDATES: tuple[dict[str, Any], ...] = (
    {
        "name": "fla_chunk",
        "precision": "bf16",
        "run": _run_chunk,
        "prepare": _prepare_chunk,
        "refuses": _refuses_chunk,
        "config": lambda workload: f"{_version()} chunk_gated_delta_rule, chunks of 64, outputs copied from its own",
    },
    {
        "name": "fla_fused_recurrent",
        "precision": "f32",
        "run": _run_recurrent,
        "prepare": _prepare_recurrent,
        "refuses": _refuses_recurrent,
        "config": lambda workload: f"{_version()} fused_recurrent_gated_delta_rule between a gather and a scatter",
    },
)
CANDIDATES = tuple(Candidate(needs=Needs((8, 0), triton="3.6", packages=_PACKAGES), **c) for c in _CANDIDATES)
