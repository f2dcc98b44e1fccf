"""Flops and compulsory bytes of y = x @ w^T with NVFP4 weights.

2 M N K flops. Bytes: each packed weight (half a byte) and its sixteenth of a scale byte (MXFP4: its 32nd) once, x and y
once in their dtype. "bf16" precision reads two bytes per weight instead: it is the control that keeps weights unpacked.
The pipe is where the products run: W4A16 multiplies in the dtype of x, so its ceiling is the bf16 one; W4A8 has
the fp8 pipe and only W4A4 the fp4 one. x counts as it comes in, 16 bits, though W4A8 and W4A4 write and read it again.
"""

from __future__ import annotations

from kernels.common import Cost, Workload

WEIGHT_BYTES = {
    "nvfp4-w4a16": 0.5 + 1 / 16,
    "nvfp4-w4a16-rounded": 0.5 + 1 / 16,
    "nvfp4-w4a16-cast": 0.5 + 1 / 16,
    "mxfp4-w4a16": 0.5 + 1 / 32,
    "nvfp4-w4a4": 0.5 + 1 / 16,
    "nvfp4-w4a8": 0.5 + 1 / 16,
    "nvfp4-w4a8-fast": 0.5 + 1 / 16,
    "bf16": 2.0,
}
ACTIVATION_BYTES = {"bf16": 2, "fp16": 2, "f32": 4}
TENSOR_SCALE_BYTES = {
    "nvfp4-w4a16": 4,
    "nvfp4-w4a16-rounded": 4,
    "nvfp4-w4a16-cast": 4,
    "mxfp4-w4a16": 0,
    "nvfp4-w4a4": 4,
    "nvfp4-w4a8": 4,
    "nvfp4-w4a8-fast": 4,
    "bf16": 0,
}
PIPES = {"nvfp4-w4a4": "fp4", "nvfp4-w4a8": "fp8", "nvfp4-w4a8-fast": "fp8"}


def cost(workload: Workload, precision: str) -> Cost:
    """Cost of `workload` at `precision`; raises ValueError naming the known precisions otherwise."""
    if precision not in WEIGHT_BYTES:
        raise ValueError(f"precision={precision!r} is not one of {sorted(WEIGHT_BYTES)}; use one of them")
    m, n, k = workload["M"], workload["N"], workload["K"]
    activations = ACTIVATION_BYTES[workload["dtype"]] * (m * k + m * n)
    moved = n * k * WEIGHT_BYTES[precision] + activations + TENSOR_SCALE_BYTES[precision]
    return Cost(flops=2.0 * m * n * k, bytes=moved, pipe=PIPES.get(precision, "bf16"))
