"""Dequantise in every call, then the library's product: 8.5 bits of memory a weight, at the price of the traffic.

The expansion reads 1.0625 bytes a weight, writes 2 and the product reads them again; what fits in L2 of that is little
at a real model's shapes. Its first form here was two torch operators, which took 430 us (rows of q8-paths, candidate
torch_expand) where 451 MB are 102 at the read rate: broadcasting int8 by a scale is no case that torch has a fast
kernel for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.common import Build, Candidate, Needs, Tensors, Work, Workload, device_of, interpreted
from kernels.rounding import round_output
from kernels.timing import library_product

BLOCKS = 64  # scale groups a program: 2,048 values


@triton.jit
def expand_kernel(
    q_ptr,  # int8 [groups, 32]: w_q flattened, K a multiple of 32
    d_ptr,  # fp16 [groups]
    w_ptr,  # bf16 or fp16 [groups, 32]
    groups,
    BLOCKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    held = group < groups
    codes = tl.load(q_ptr + at, mask=held[:, None], other=0).to(tl.float32)
    scales = tl.load(d_ptr + group, mask=held, other=0.0).to(tl.float32)
    w = round_output(codes * scales[:, None], w_ptr.dtype.element_ty, INTERPRETED)
    tl.store(w_ptr + at, w, mask=held[:, None])


def prepare(inputs: Tensors) -> Tensors:
    """The planes, and room for the expanded weights."""
    return inputs | {"w": torch.empty(inputs["w_q"].shape, dtype=inputs["x"].dtype, device=device_of(inputs))}


def run(args: Tensors, out: Tensors) -> None:
    """Expand, then multiply: two launches."""
    groups = args["w_d"].numel()
    expand_kernel[(triton.cdiv(groups, BLOCKS),)](
        args["w_q"], args["w_d"], args["w"], groups, BLOCKS=BLOCKS, INTERPRETED=interpreted(), num_warps=4
    )
    torch.matmul(args["x"], args["w"].T, out=out["y"])


def _builds(capability: int) -> tuple[Build, ...]:
    signature = {"q_ptr": "*i8", "d_ptr": "*fp16", "w_ptr": "*bf16", "groups": "i32"}
    signature |= {"BLOCKS": "constexpr", "INTERPRETED": "constexpr"}
    constexprs = {"BLOCKS": BLOCKS, "INTERPRETED": False}
    aligned = ("q_ptr", "d_ptr", "w_ptr")
    return (Build("expand", expand_kernel, signature, constexprs, num_warps=4, aligned=aligned),)


def work(workload: Workload, sms: int) -> Work:
    """The expansion reads 1.0625 bytes a weight and writes 2, then the library's product reads them."""
    m, n, k = (int(workload[axis]) for axis in "MNK")
    product = library_product(m, n, k, sms)
    return Work(product.at_once, {"launches": 2.0, "expansion": n * k * 3.0625 / sms / 16})


def _refuses(workload: Workload) -> str:
    """The library's product in fp16 sums in float32 only by a setting; bf16 always does."""
    return "" if workload["dtype"] == "bf16" else f"dtype={workload['dtype']}: the product here is bf16"


CANDIDATES = (
    Candidate(
        name="triton_expand",
        precision="q8_0-expanded",
        run=run,
        needs=Needs(triton="3.6"),
        prepare=prepare,
        refuses=_refuses,
        builds=_builds,
        work=work,
    ),
)
