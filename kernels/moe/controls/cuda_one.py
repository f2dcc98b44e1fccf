"""A mixture's experts from one copy of the weights, 1 to thousands of tokens: cuda_experts and cuda_experts_many on the
layout of kernels/nvfp4/row_tiles.py, of which a row tile is one run along K and a stage of the second's is one box of a
tensor map.

k is in wgmma's order there. experts_teams.cu has h so from the start, and x from router_once.cu; where it routes for
itself ldmatrix gives a lane its words, of x that is copied while it chooses. A lane unpacks eight scales a tile instead
of two. The cards moe-one-few and moe-one-many ask what that costs; a served model has two copies (35B-A3B: 18.2 GB
each, 40 layers of 257 experts of 1.77 MB) until they have answered.
"""

from __future__ import annotations

import functools
from typing import Any

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.moe import cuda_experts, cuda_many
from kernels.moe.cuda_experts import PRECISION, TOKENS_MAX, choose_config
from kernels.moe.cuda_many import FORM, ONE_LAYOUT, Form

FEW = functools.partial(choose_config, one_layout=True)
MANY = Form((*FORM.switches, ONE_LAYOUT), FORM.router_once)
OF_WEIGHTS = "up", "down", "up_scale", "down_scale", "shared_gate", "k"


def prepare(inputs: Tensors) -> dict[str, Any]:
    """The weights in the one layout, and scratch for x by the kernel that its tokens get."""
    if len(inputs["x"]) <= TOKENS_MAX:
        return cuda_experts.prepare(inputs, FEW, one_layout=True)
    return prepare_many(inputs)


def prepare_many(inputs: Tensors) -> dict[str, Any]:
    """The same weights, and scratch for cuda_many.run."""
    x, experts = inputs["x"], inputs["down_packed"].shape[0]
    kept = cuda_experts.prepare(inputs | {"x": x[:1]}, FEW, one_layout=True)
    device, shared, inner = kept["up"].device, "shared_gate" in inputs, 2 * inputs["down_packed"].shape[2]
    scratch = cuda_many.scratch(x.shape, x.dtype, experts, int(inputs["top_k"]), inner, shared, device)
    return {name: kept[name] for name in OF_WEIGHTS if name in kept} | scratch


def run(args: dict[str, Any], out: Tensors) -> None:
    """y by cuda_experts.run up to TOKENS_MAX tokens, by cuda_many.run beyond."""
    if len(args["x"]) <= TOKENS_MAX:
        cuda_experts.run(args, out, choose=FEW)
    else:
        cuda_many.run(args, out, form=MANY)


def _refuses(workload: Workload) -> str:
    if workload["H"] % 64 or workload["F"] % 64:
        return f"H={workload['H']}, F={workload['F']}: both must be multiples of 64, the k of a tile"
    return (cuda_experts.CANDIDATES[0] if workload["T"] <= TOKENS_MAX else cuda_many.CANDIDATES[0]).refuses(workload)


def _config(workload: Workload) -> str:
    if workload["T"] <= TOKENS_MAX:
        return cuda_experts.described(workload, FEW)
    up, down = map(cuda_many.box_rows, (2 * workload["F"], workload["H"]))
    return f"{cuda_many.config(workload, form=MANY)} boxes of {up} and {down} rows"


CUDA_SOURCES = (
    *(cuda_experts.source_of(tokens, 256, 2048, 512, "bf16", FEW) for tokens in (4, 8, 16, 32, 128)),
    *(cuda_experts.source_of(tokens, 128, 2816, 704, "bf16", FEW) for tokens in (8, 128)),
    cuda_experts.source_of(128, 256, 2048, 512, "fp16", FEW),
    cuda_experts.once_source(256, "bf16", 8, deal=True),
    *(each for block in cuda_many.BLOCKS for each in cuda_many.sources_of(block, 2048, 512, "bf16", MANY)),
    *cuda_many.sources_of(96, 2816, 704, "bf16", MANY),
    *cuda_many.sources_of(64, 2048, 512, "fp16", MANY),
)

CANDIDATES = (
    Candidate(
        "experts_one", PRECISION, run, Needs(capability=(9, 0), packages=("cupy",)), prepare=prepare, refuses=_refuses,
        config=_config, no_route="would be one more copy of the weights: moe-one-few and -many ask what one costs",
    ),
)  # fmt: skip
