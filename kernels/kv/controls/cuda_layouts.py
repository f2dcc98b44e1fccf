"""The CUDA kernel on a contiguous cache and with pages in order: LP1's controls, as in triton_layouts.py for Triton.

The kernel takes pages of a power of two, so a sequence's capacity is rounded up to one; the model shapes are powers of
two already. In order, a sequence's pages follow each other and are still looked up: what `cuda_bf16` takes more than
that is for where pages lie, what it takes more than contiguous is for that, the table and the size of a copy together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kernels.common import Candidate, Needs, Tensors
from kernels.kv import cuda_decode
from kernels.kv.controls import layouts
from kernels.kv.format import KV_OF_PRECISION

FORM = KV_OF_PRECISION["bf16"]


def prepare_contiguous(inputs: Tensors) -> Tensors:
    """`cuda_decode.prepare` of one page per sequence."""
    return cuda_decode.prepare(layouts.contiguous(inputs, power_of_two=True), FORM)


def prepare_in_order(inputs: Tensors) -> Tensors:
    """`cuda_decode.prepare` of a pool in which each sequence's pages follow each other."""
    return cuda_decode.prepare(layouts.in_order(inputs), FORM)


def _candidate(name: str, prepare: Callable[[Tensors], Tensors]) -> Candidate:
    return Candidate(
        name=name,
        precision="bf16",
        run=partial(cuda_decode.run, kv=FORM),
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=cuda_decode.refuses,
        config=partial(cuda_decode.config_text, kv=FORM),
        no_route="reads a copy of the cache in another layout, made outside the timing",
    )


CANDIDATES = (
    _candidate("cuda_contiguous_bf16", prepare_contiguous),
    _candidate("cuda_in_order_bf16", prepare_in_order),
)
