"""Arithmetic and compulsory traffic of decode attention.

Every cached token is read once per kv head, whatever the number of query heads that share it; that is what makes
decode a bandwidth problem: G query heads do 4 G D flops per 2 D values read, 12 flops per byte at G = 6 in bf16.
"ragged" workloads are charged as if every sequence were ctx long: an upper bound, used only for check workloads, whose
lengths are drawn. The lengths of "spread" ones are known without drawing, so what is measured is charged exactly.
"""

from __future__ import annotations

from kernels.common import Cost, Workload

# Bytes per cached value, scales per value included: Q8_0 adds one half per 32 values. fp8's [Hkv] scales come below.
KV_BYTES_PER_VALUE = {"bf16": 2.0, "fp8-kv": 1.0, "fp8-qkv": 1.0, "fp8-kv-unit": 1.0, "q8_0-kv": 1.0 + 2.0 / 32.0}


def lengths(workload: Workload) -> list[int]:
    """Tokens of each sequence, longest first; for "ragged", where they are drawn, the upper bound ctx.

    "spread" goes down from ctx in steps of ctx // batch + 1: with powers of two every remainder of a page occurs, and
    the shortest holds ctx / batch - batch + 1 tokens (225 of 8192 at batch 32). Were it 1 token, its output, sqrt(ctx /
    e) times as large as the longest's, would be all that a relative error over the batch sees.
    """
    batch, ctx = workload["batch"], workload["ctx"]
    step = ctx // batch + 1 if workload["lengths"] == "spread" else 0
    return [max(1, ctx - i * step) for i in range(batch)]


def kv_bytes(workload: Workload, precision: str) -> float:
    """Bytes of K and V, with their scales, that one decode step must read. ValueError on an unknown precision."""
    if precision not in KV_BYTES_PER_VALUE:
        raise ValueError(f"{precision=} is not known to kv; expected one of {sorted(KV_BYTES_PER_VALUE)}")
    values = 2 * sum(lengths(workload)) * workload["Hkv"] * workload["D"]
    scales = 2 * 4 * workload["Hkv"] if precision in ("fp8-kv", "fp8-qkv") else 0
    return values * KV_BYTES_PER_VALUE[precision] + scales


def cost(workload: Workload, precision: str) -> Cost:
    """flops: 2 D for q.k and 2 D for p.v per (query head, token); the softmax itself is not counted.

    bytes: K and V with scales, q and o (2 bytes a value), page ids (int32 per page) and seq_lens (int32). Only
    "fp8-qkv" multiplies fp8 by fp8; the other quantised forms are dequantised first and run on the 16-bit pipe.
    """
    batch, q_heads, dim, page = (workload[a] for a in ("batch", "Hq", "D", "page"))
    flops = 4.0 * sum(lengths(workload)) * q_heads * dim
    activations = 2 * 2 * batch * q_heads * dim
    indices = 4 * sum(-(-n // page) + 1 for n in lengths(workload))
    return Cost(
        flops=flops,
        bytes=kv_bytes(workload, precision) + activations + indices,
        pipe="fp8" if precision == "fp8-qkv" else "bf16",
    )
