"""FlashQLA: chunked prefill of the gated delta rule for Hopper and Blackwell, in TileLang, by the Qwen team.

    pip install flash-qla

Its tensors are ours and fla's: q, k [B, T, Hk, D], v [B, T, Hv, D], g (log decay) and beta [B, T, Hv], states
[N, Hv, D, D] with the k dimension first, float32. A sequence that leaves multiprocessors without work it splits over
blocks and joins the pieces (its context parallelism inside a card), by its own model of time, which it asks the host
for once and remembers for these lengths. That choice is left to it.

It returns a new o and a new final state, which are copied into ours, so its time contains reading and writing both once
more. Safe in a CUDA graph after its first call, which compiles and plans. Norms of q and k run in a kernel of their
own.
"""

from __future__ import annotations

import torch

from kernels.common import Candidate, Needs, Tensors, Workload, library_version

DIM = 128  # of a head, the only one


def prepare(inputs: Tensors) -> Tensors:
    """The arguments that stay; cu_seqlens as int64."""
    kept = {name: inputs[name] for name in ("initial_state", "raw_qk") if name in inputs}
    return kept | ({"cu_seqlens": inputs["cu_seqlens"].long()} if "cu_seqlens" in inputs else {})


def run(args: Tensors, out: Tensors) -> None:
    """Its public operator, and two copies."""
    from flash_qla import chunk_gated_delta_rule

    with torch.no_grad():
        o, final_state = chunk_gated_delta_rule(
            args["q"], args["k"], args["v"], args["g"], args["beta"], scale=args["q"].shape[-1] ** -0.5,
            initial_state=args["initial_state"], output_final_state=True,
            use_qk_l2norm_in_kernel="raw_qk" in args, cu_seqlens=args.get("cu_seqlens"),
        )  # fmt: skip
    out["o"].copy_(o)
    out["final_state"].copy_(final_state)


def _refuses(workload: Workload) -> str:
    if workload["op"] != "prefill":
        return f"op = {workload['op']}: FlashQLA does prefill"
    if "out_dtype" in workload.axes:
        return f"out_dtype = {workload['out_dtype']}: FlashQLA returns the activations' type"
    if workload["dtype"] == "f32":
        return "dtype = f32: FlashQLA is for 16-bit q, k and v"
    if workload["D"] != DIM:
        return f"D = {workload['D']}: FlashQLA has heads of {DIM}"
    return ""


CANDIDATES = (
    Candidate(
        "flash_qla_chunk", "bf16", run, Needs((9, 0), packages=("flash_qla", "tilelang")), prepare=prepare,
        refuses=_refuses,
        config=lambda workload: f"flash-qla {library_version('flash-qla')} chunk_gated_delta_rule, chunks of 64, split "
        "by itself, outputs copied from its own",
    ),
)  # fmt: skip
