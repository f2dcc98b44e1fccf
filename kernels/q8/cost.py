"""Flops and compulsory bytes of y = x @ w^T with Q8_0 weights.

2 M N K flops. Bytes: a weight's code (1) and its 32nd of an fp16 scale once, x and y once in 16 bits. "bf16" keeps the
weights expanded: 2 bytes each. "q8_0-expanded" expands them in every call: what it writes and reads again on the way is
its own doing, not compulsory. The pipe is where the products run.
"""

from __future__ import annotations

from kernels.common import Cost, Workload

WEIGHT_BYTES = {"q8_0-w8a16": 1.0625, "q8_0-w8a8": 1.0625, "q8_0-expanded": 1.0625, "bf16": 2.0}
PIPE = {"q8_0-w8a16": "f32", "q8_0-w8a8": "int8", "q8_0-expanded": "bf16", "bf16": "bf16"}


def cost(workload: Workload, precision: str) -> Cost:
    """Cost of `workload` at `precision`; raises ValueError naming the known precisions otherwise."""
    if precision not in WEIGHT_BYTES:
        raise ValueError(f"precision={precision!r} is not one of {sorted(WEIGHT_BYTES)}; use one of them")
    m, n, k = workload["M"], workload["N"], workload["K"]
    return Cost(flops=2.0 * m * n * k, bytes=n * k * WEIGHT_BYTES[precision] + 2 * m * (k + n), pipe=PIPE[precision])
