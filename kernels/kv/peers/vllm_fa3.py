"""FlashAttention-3 as vLLM builds it: paged decode over a bf16 cache, and over an fp8 cache with q in fp8 as well.

    pip install vllm

The operator torch.ops._vllm_fa3_C.fwd is called directly, by the argument names of its schema, so neither vLLM's
Python nor its engine takes part. The library is looked for by `kernels.common.load_operators`; in a bundle cut down to
vLLM's operators, root/shim and root/libs, root/shim on PYTHONPATH is all it needs. It writes into a given output and
is safe in a CUDA graph; its scheduler metadata is computed once, in `prepare`, as an engine computes it once a step for
all layers.

The cache is copied to its own order, [pages, page, Hkv, D], in `prepare`. Page ids past a sequence's end become 0.

The fp8 mode is a precision of its own, "fp8-qkv": the kernel multiplies e4m3 by e4m3, so q is converted too and so are
the probabilities, inside. Converting q is work on an activation, so it is part of `run`, one small kernel before the
attention; K and V keep this family's scale per head, or the workload's one for the tensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.common import Candidate, Needs, Tensors, Workload, library_version, load_operators
from kernels.kv import format as kv_format
from kernels.kv.peers import measured_only

LIBRARY = "_vllm_fa3_C"


def _by_token(cache: torch.Tensor) -> torch.Tensor:
    """[pages, page, Hkv, D] from [pages, Hkv, page, D]."""
    return cache.transpose(1, 2).contiguous()


def arguments(inputs: Tensors) -> dict[str, Any]:
    """The operator's arguments that do not depend on the cache's form; everything else it takes stays None."""
    batch, _, dim = inputs["q"].shape
    device = inputs["seq_lens"].device
    return {
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=device),
        "seqused_k": inputs["seq_lens"],
        "max_seqlen_q": 1,
        "max_seqlen_k": int(inputs["seq_lens"].max()),
        "page_table": inputs["page_table"].clamp_min(0),
        "softmax_scale": dim**-0.5,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 0,  # as many as its heuristic finds
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }


def _filled(operator: Any, given: dict[str, Any]) -> dict[str, Any]:
    """`given` and None for every other argument of the operator's schema."""
    return {argument.name: given.get(argument.name) for argument in operator.default._schema.arguments}


def _metadata(inputs: Tensors, given: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    batch, heads, dim = inputs["q"].shape
    _, kv_heads, page, _ = inputs["k_cache"].shape
    operator = torch.ops._vllm_fa3_C.get_scheduler_metadata
    shape = {
        "batch_size": batch, "num_heads": heads, "num_heads_k": kv_heads, "headdim": dim, "headdim_v": dim,
        "qkv_dtype": dtype, "page_size": page, "max_seqlen_k_new": 0, "has_softcap": False,
    }  # fmt: skip
    return operator(**_filled(operator, given | shape))


def prepare(inputs: Tensors, fp8: bool) -> dict[str, Any]:
    """q, the cache in the operator's order and form, and its other arguments. fp8 adds room for q in e4m3."""
    load_operators("vllm", LIBRARY)
    given = arguments(inputs)
    args: dict[str, Any] = {"q": inputs["q"]}
    if fp8:
        q, kv_heads, device = inputs["q"], inputs["k_cache"].shape[1], inputs["k_cache"].device
        batch = q.shape[0]
        for name in ("k", "v"):
            data, scale = kv_format.quantise_fp8(inputs[f"{name}_cache"], scale=inputs.get(f"{name}_scale"))
            args[name] = _by_token(data).view(torch.float8_e4m3fn)
            given[f"{name}_descale"] = scale.expand(batch, kv_heads).contiguous()
        given["q_descale"] = torch.ones(batch, kv_heads, dtype=torch.float32, device=device)
        args["q8"] = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=device)
    else:
        args |= {"k": _by_token(inputs["k_cache"]), "v": _by_token(inputs["v_cache"])}
    given["scheduler_metadata"] = _metadata(inputs, given, args["k"].dtype)
    operator = torch.ops._vllm_fa3_C.fwd
    taken = ("q", "k", "v", "out")
    args["constant"] = {name: value for name, value in _filled(operator, given).items() if name not in taken}
    return args


def run(args: dict[str, Any], out: Tensors) -> None:
    q = args["q"]
    if "q8" in args:
        q = args["q8"].copy_(q)
    torch.ops._vllm_fa3_C.fwd(q=q, k=args["k"], v=args["v"], out=out["o"], **args["constant"])


def _config(workload: Workload, text: str) -> str:
    return f"vllm {library_version('vllm')} FA3 {text}, pages of {workload['page']} tokens, splits by its heuristic"


_NEEDS = Needs(capability=(9, 0), packages=("vllm",), architecture="sm_90a")

CANDIDATES = (
    Candidate(
        name="vllm_fa3",
        precision="bf16",
        run=run,
        needs=_NEEDS,
        prepare=partial(prepare, fp8=False),
        refuses=measured_only,
        config=partial(_config, text="bf16"),
    ),
    Candidate(
        name="vllm_fa3_fp8",
        precision="fp8-qkv",
        run=run,
        needs=_NEEDS,
        prepare=partial(prepare, fp8=True),
        refuses=measured_only,
        config=partial(_config, text="e4m3 q, K, V (q converted in the call)"),
    ),
)
