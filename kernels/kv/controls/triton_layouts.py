"""The Triton split-KV kernel on caches laid out contiguously and with their pages in order; see layouts.py.

Controls of a question about paging (LP1), not candidates for speed: the kernel is `splitkv_bf16`'s own, only what its
`prepare` is given differs. The copies that make the layout happen there, outside the timing.
"""

from __future__ import annotations

from functools import partial

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.kv import triton_splitkv as splitkv
from kernels.kv.controls import layouts

FORM = splitkv.KV_OF_PRECISION["bf16"]


def prepare_contiguous(inputs: Tensors) -> Tensors:
    """`splitkv.prepare` of one page per sequence."""
    return splitkv.prepare(layouts.contiguous(inputs), FORM)


def prepare_in_order(inputs: Tensors) -> Tensors:
    """`splitkv.prepare` of a pool in which each sequence's pages follow each other."""
    return splitkv.prepare(layouts.in_order(inputs), FORM)


def _refuses(workload: Workload) -> str:
    return splitkv.refusal(workload["Hq"], workload["Hkv"], workload["D"], workload["page"])


CANDIDATES = tuple(
    Candidate(
        name=name,
        precision="bf16",
        run=partial(splitkv.run, kv=FORM),
        needs=Needs(triton="3.6"),
        prepare=prepare,
        refuses=_refuses,
        no_route="reads a copy of the cache in another layout, made outside the timing",
    )
    for name, prepare in (("contiguous_bf16", prepare_contiguous), ("in_order_bf16", prepare_in_order))
)
