"""TensorRT-LLM's XQA as FlashInfer brings it: paged decode over an e4m3 cache, its kernel for Hopper.

    pip install flashinfer-python        (compiles for a shape at first use: nvcc and ninja)

Its "HND" layout is this family's own, [pages, Hkv, page, D]. It has one number for the scale of K and V and one for
q's, and multiplies logits by both: so K's scale over V's is given as q's. Scales a head it has none, so it takes
workloads with one for the tensor. On an H100 or H200 it multiplies e4m3 by e4m3: q and the probabilities are rounded
inside, which is the precision "fp8-qkv".

It writes into a given output, counts in semaphores that it leaves at zero, and is safe in a CUDA graph after its first
call. Page ids past a sequence's end become 0. See kernels/kv/peers/flashinfer.py for an unpacked copy of the library.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.common import Candidate, Needs, Tensors, Workload, library_version
from kernels.kv import format as kv_format
from kernels.kv.peers import measured_only
from kernels.kv.peers.flashinfer import WORKSPACE_BYTES

SEMAPHORES = 1 << 16  # more than a sequence's kv heads times sequences
PAGES = 16, 32, 64, 128


def prepare(inputs: Tensors) -> dict[str, Any]:
    """The cache in e4m3 by the tensor's scales, and what else the call takes."""
    made: dict[str, Any] = {}
    scales = {}
    for name in ("k", "v"):
        data, scale = kv_format.quantise_fp8(inputs[f"{name}_cache"], scale=inputs[f"{name}_scale"])
        made[name], scales[name] = data.view(torch.float8_e4m3fn), float(scale[0])
    device = inputs["k_cache"].device
    return made | {
        "page_table": inputs["page_table"].clamp_min(0),
        "seq_lens": inputs["seq_lens"].to(torch.uint32)[:, None],
        "workspace": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "semaphores": torch.zeros(SEMAPHORES, dtype=torch.int32, device=device).view(torch.uint32),
        "q_scale": scales["k"] / scales["v"], "kv_scale": scales["v"],
    }  # fmt: skip


def run(args: dict[str, Any], out: Tensors) -> None:
    """Its operator, on views of ours."""
    from flashinfer.xqa import xqa

    _, kv_heads, page, _ = args["k"].shape
    xqa(
        args["q"][:, None], args["k"], args["v"], args["page_table"], args["seq_lens"], out["o"][:, None],
        args["workspace"], args["semaphores"], kv_heads, page, q_scale=args["q_scale"], kv_scale=args["kv_scale"],
        kv_layout="HND",
    )  # fmt: skip


def _refuses(workload: Workload) -> str:
    if said := measured_only(workload):
        return said
    if workload.axes.get("scales") != "tensor":
        return "a scale a head: XQA has one for the tensor, as workloads with scales = tensor have"
    return f"page = {workload['page']}: XQA has {PAGES}" * (workload["page"] not in PAGES)


CANDIDATES = (
    Candidate(
        "flashinfer_xqa_fp8", "fp8-qkv", run,
        Needs(capability=(9, 0), packages=("flashinfer",), architecture="sm_90a"), prepare=prepare, refuses=_refuses,
        config=lambda _: f"flashinfer-python {library_version('flashinfer-python')} xqa, e4m3 q, K, V (q inside)",
    ),
)  # fmt: skip
