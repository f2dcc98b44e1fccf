"""triton_kernels (the kernels of Triton's own repository): an arm that cannot be formed, and why.

Its matmul_ogs multiplies bf16 by MXFP4: e2m1 with one e8m0 scale, a power of two, per 32 values; the block of 32 is a
constant of its kernels (numerics_details/mxfp_details/_downcast_to_mxfp.py). NVFP4's e4m3 scale per 16 values has no
exact form there: three mantissa bits would be dropped, and the pair of blocks would share one scale. Converting the
weights would compare two different matrices, so every workload is refused with that reason, which `lab check` shows
when a workload is named. The figure of an MXFP4 product of the same shape stands in the recorded peer rows.
"""

from __future__ import annotations

from kernels.common import Candidate, Needs, Tensors, Workload, library_version

REASON = "triton_kernels takes MXFP4 (e8m0 scales per 32 values): NVFP4 weights have no exact form there"


def run(args: Tensors, out: Tensors) -> None:
    raise NotImplementedError(REASON)


def _refuses(workload: Workload) -> str:
    return REASON


CANDIDATES = (
    Candidate(
        name="triton_kernels_w4a16",
        precision="nvfp4-w4a16",
        run=run,
        needs=Needs(packages=("triton_kernels",)),
        refuses=_refuses,
        config=lambda workload: f"triton_kernels {library_version('triton-kernels')}: refused",
    ),
)
