"""Flops and compulsory bytes of y = x @ w^T with NVFP4 weights.

2 M N K flops. Bytes: each packed weight (half a byte) and its sixteenth of a scale byte once, x and y once in their
16-bit dtype. "bf16" precision reads two bytes per weight instead: it is the control that keeps weights unpacked.
The pipe is where the products run: W4A16 multiplies in the dtype of x, so its ceiling is the bf16 one; only W4A4 can
reach the fp4 pipe.
"""

from __future__ import annotations

from kernels.common import Cost, Workload

WEIGHT_BYTES = {
    "nvfp4-w4a16": 0.5 + 1 / 16,
    "nvfp4-w4a16-rounded": 0.5 + 1 / 16,
    "nvfp4-w4a4": 0.5 + 1 / 16,
    "bf16": 2.0,
}
ACTIVATION_BYTES = 2  # bf16 and fp16 alike
TENSOR_SCALE_BYTES = {"nvfp4-w4a16": 4, "nvfp4-w4a16-rounded": 4, "nvfp4-w4a4": 4, "bf16": 0}


def cost(workload: Workload, precision: str) -> Cost:
    """Cost of `workload` at `precision`; raises ValueError naming the known precisions otherwise."""
    if precision not in WEIGHT_BYTES:
        raise ValueError(f"precision={precision!r} is not one of {sorted(WEIGHT_BYTES)}; use one of them")
    m, n, k = workload["M"], workload["N"], workload["K"]
    moved = n * k * WEIGHT_BYTES[precision] + ACTIVATION_BYTES * (m * k + m * n) + TENSOR_SCALE_BYTES[precision]
    return Cost(flops=2.0 * m * n * k, bytes=moved, pipe="fp4" if precision == "nvfp4-w4a4" else "bf16")
