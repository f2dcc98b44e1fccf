"""Flops and compulsory bytes of y = x * w: one product an element; x and w read once, y written once."""

from __future__ import annotations

from kernels.common import Cost, Workload

ELEMENT_BYTES = {"bf16": 2, "f32": 4}


def cost(workload: Workload, precision: str) -> Cost:
    """Cost of `workload`, whatever the precision; the products run in float32."""
    m, n, size = workload["M"], workload["N"], ELEMENT_BYTES[workload["dtype"]]
    return Cost(flops=float(m * n), bytes=float(size * (2 * m * n + n)), pipe="f32")
