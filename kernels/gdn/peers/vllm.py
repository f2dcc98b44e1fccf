"""vLLM's packed decode: one token per sequence of the gated delta rule, gates computed inside, states in a pool.

    pip install vllm

A Triton kernel that takes the convolution's output [B, 2 Hk D + Hv D] and the raw gates, and updates the pool in place.
Only its Python file is needed, so a bundle cut down to it works with root/shim on PYTHONPATH.

Its conventions, and how `prepare` and `run` meet them:

    mixed_qkv   q, k and v of a token side by side, as the convolution of a model writes them: our `joined_qkv`.
    gates       it computes g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b). A_log = dt_bias = 0 and our
                `raw_a`, `raw_b` give g and beta back.
    row 0       is the null state: rows shift by one, and our -1 (an empty slot, o zero, no state touched) becomes 0.
    state       [rows, Hv, v dimension, k dimension], the transpose of ours. A transposed copy in every call would
                triple the traffic of a kernel that is nothing but traffic. So out["state"] is asked for in this layout,
                with the null row ahead of it.

It writes into the given o and is safe in a CUDA graph after its first call, which compiles.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kernels.common import Candidate, Layout, Needs, Tensors, Workload, library_version

# Where vLLM keeps its copy of fla's operators: 0.33, and before.
HOMES = (
    "vllm.third_party.flash_linear_attention.ops.fused_recurrent",
    "vllm.model_executor.layers.fla.ops.fused_recurrent",
)
OPERATOR = "fused_recurrent_gated_delta_rule_packed_decode"


@cache
def _operator() -> Callable[..., Any]:
    """The operator from the first home that has it; ImportError naming the homes otherwise."""
    for home in HOMES:
        try:
            return getattr(importlib.import_module(home), OPERATOR)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"this vllm has {OPERATOR} neither in {' nor in '.join(HOMES)}; install vllm 0.33")


def prepare(inputs: Tensors) -> Tensors:
    """The operator's arguments: no gates of its own, and the rows in its count."""
    zeros = torch.zeros(inputs["state"].shape[1], dtype=torch.float32, device=inputs["state"].device)
    args = {
        "A_log": zeros,
        "dt_bias": zeros,
        "state_rows": (inputs["state_rows"] + 1).to(torch.int32),
    }
    return args | ({"raw_qk": inputs["raw_qk"]} if "raw_qk" in inputs else {})


def pool_of(state: torch.Tensor) -> torch.Tensor:
    """vLLM's pool [rows + 1, Hv, D (v), D (k)], whose row 0 is null, around a state that lies as `layouts` asks."""
    rows = state.transpose(-1, -2)
    return rows.as_strided((len(rows) + 1, *rows.shape[1:]), rows.stride(), rows.storage_offset() - rows.stride(0))


def run(args: Tensors, out: Tensors) -> None:
    _operator()(
        args["joined_qkv"], args["raw_a"], args["raw_b"], args["A_log"], args["dt_bias"], out["o"].shape[-1] ** -0.5,
        pool_of(out["state"]), out["o"].unsqueeze(1), args["state_rows"], use_qk_l2norm_in_kernel="raw_qk" in args,
    )  # fmt: skip


def _refuses(workload: Workload) -> str:
    if workload["op"] != "decode":
        return f"op = {workload['op']}: vLLM's packed decode takes one token per sequence"
    return ""


CANDIDATES = (
    Candidate(
        name="vllm_packed_decode",
        precision="f32",
        run=run,
        needs=Needs((8, 0), triton="3.6", packages=("vllm",)),
        prepare=prepare,
        refuses=_refuses,
        layouts={"state": Layout((0, 1, 3, 2), ahead=1)},
        config=lambda workload: (
            f"vllm {library_version('vllm')} packed decode, {workload['state_dtype']} states in its own layout "
            f"(v before k), gates from raw inputs"
        ),
    ),
)
