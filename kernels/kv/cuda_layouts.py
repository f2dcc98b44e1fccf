"""The CUDA kernel on a contiguous cache: LP1's control for `cuda_bf16`, as triton_layouts.py is for the Triton kernel.

The kernel takes pages of a power of two, so a sequence's capacity is rounded up to one; the model shapes are powers of
two already.
"""

from __future__ import annotations

from functools import partial

from kernels.common import Candidate, Needs, Tensors, Workload
from kernels.kv import cuda_decode, layouts

FORM = cuda_decode.KV_OF_PRECISION["bf16"]


def prepare_contiguous(inputs: Tensors) -> Tensors:
    """`cuda_decode.prepare` of one page per sequence."""
    return cuda_decode.prepare(layouts.contiguous(inputs, power_of_two=True), FORM)


def _refuses(workload: Workload) -> str:
    return cuda_decode.refusal(*(workload[axis] for axis in ("batch", "Hq", "Hkv", "D", "page")))


CANDIDATES = (
    Candidate(
        name="cuda_contiguous_bf16",
        precision="bf16",
        run=partial(cuda_decode.run, kv=FORM),
        needs=Needs(capability=(9, 0), packages=("cupy",)),
        prepare=prepare_contiguous,
        refuses=_refuses,
    ),
)
