"""FlashInfer's chunked prefill for Hopper: one fused kernel in the CuTe DSL, or four for few heads.

    pip install flashinfer-python nvidia-cutlass-dsl

Tokens are packed, [tokens, heads, D], with cu_seqlens; grouped heads follow our rule. What differs:

    gate    it takes the decay itself, exp(g), our `decay`, and its logarithm inside.
    states  [sequences, Hv, D (v), D (k)], the transpose of ours: the initial state is transposed in `prepare`, as it
            would lie in an engine that uses this kernel, and out["final_state"] is laid out so.
    few     below half as many heads times sequences as SMs it splits a sequence over blocks and joins the pieces
            (its "context parallelism"); that choice is left to it, and it is told the longest sequence.

It writes into the given o and is safe in a CUDA graph after its first call, which compiles.
Norms of q and k run in a kernel of their own in front.

With unpacked copies instead of installed packages: both site folders on PYTHONPATH, the DSL's
site/nvidia_cutlass_dsl/dsl_packages too, and FLASHINFER_DISABLE_VERSION_CHECK=1; CUTE_DSL_ARCH=sm_90a says the
architecture where the DSL cannot find it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kernels.common import Candidate, Layout, Needs, Tensors, Workload, library_version
from kernels.gdn.launch import checked, sequence_bounds


def prepare(inputs: Tensors) -> dict[str, Any]:
    """States in FlashInfer's layout, and where sequences end."""
    checked(inputs, ("q", "k", "v", "beta", "decay", "initial_state"))
    bounds = sequence_bounds(inputs)
    args: dict[str, Any] = {
        "initial_state": inputs["initial_state"].transpose(-1, -2).contiguous(),
        "cu_seqlens": bounds,
        "longest": max(last - first for first, last in pairwise(bounds.tolist())),
    }
    return args | ({"raw_qk": inputs["raw_qk"]} if "raw_qk" in inputs else {})


def run(args: dict[str, Any], out: Tensors) -> None:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k, v, decay, beta = (args[name].flatten(0, 1) for name in ("q", "k", "v", "decay", "beta"))
    chunk_gated_delta_rule(
        q, k, v, g=decay, beta=beta, scale=q.shape[-1] ** -0.5,
        initial_state=args["initial_state"], output_final_state=True, cu_seqlens=args["cu_seqlens"],
        use_qk_l2norm_in_kernel="raw_qk" in args, output=out["o"].flatten(0, 1),
        output_state=out["final_state"].transpose(-1, -2), max_seqlen=args["longest"],
    )  # fmt: skip


def _refuses(workload: Workload) -> str:
    if workload["op"] != "prefill":
        return f"op = {workload['op']}: this adapter is for FlashInfer's prefill"
    if "out_dtype" in workload.axes:
        return f"out_dtype = {workload['out_dtype']}: FlashInfer returns the activations' type"
    if workload["dtype"] == "f32":
        return "dtype = f32: FlashInfer's prefill is for 16-bit q, k and v"
    if workload["D"] != 128:
        return f"D = {workload['D']}: FlashInfer's Hopper kernel is for D = 128"
    return ""


CANDIDATES = (
    Candidate(
        name="flashinfer_chunk",
        precision="bf16",
        run=run,
        needs=Needs(capability=(9, 0), packages=("flashinfer", "cutlass")),
        prepare=prepare,
        refuses=_refuses,
        layouts={"final_state": Layout((0, 1, 3, 2))},
        config=lambda workload: (
            f"flashinfer-python {library_version('flashinfer-python')} chunk_gated_delta_rule, chunks of 64, "
            f"states in its own layout (v before k), its choice of context parallelism"
        ),
    ),
)
