"""Flops and compulsory bytes of a mixture's layer.

6 H F flops for each token and expert, and for the shared one. Bytes: the weights of every expert that is hit, once;
x, logits and y once. How many are hit: for uniform routing the expectation E (1 - (1 - k / E)^T), else the mean over
draws of the case's own logits.
"""

from __future__ import annotations

import functools

from kernels.common import Cost, Workload

FP4_BYTES = 0.5 + 1 / 16
WEIGHT_BYTES = dict.fromkeys(("nvfp4-w4a16", "nvfp4-w4a16-rounded", "nvfp4-w4a8", "nvfp4-w4a4"), FP4_BYTES)
WEIGHT_BYTES |= {"bf16": 2.0, "mxfp4-w4a16-rounded": 0.5 + 1 / 32}
PIPES = {"nvfp4-w4a8": "fp8", "nvfp4-w4a4": "fp4"}  # of activations rounded before each product
DRAWS = 4


@functools.cache
def drawn_rows(T: int, experts: int, top_k: int, routing: str) -> tuple[tuple[int, ...], ...]:
    """Rows of each expert in DRAWS draws of the cases' own logits."""
    from kernels.moe import cases

    axes: dict[str, int | str] = {
        "T": T, "experts": experts, "top_k": top_k, "H": 1, "routing": routing, "dtype": "bf16",
    }  # fmt: skip
    drawn = (cases.activations(Workload("", axes), seed, "cpu")["logits"] for seed in range(DRAWS))
    chosen = (logits.topk(top_k, dim=-1).indices.flatten() for logits in drawn)
    return tuple(tuple(each.bincount(minlength=experts).tolist()) for each in chosen)


def _hit(T: int, experts: int, top_k: int, routing: str) -> float:
    if routing == "uniform":
        return float(experts * (1.0 - (1.0 - top_k / experts) ** T))
    return sum(sum(n > 0 for n in rows) for rows in drawn_rows(T, experts, top_k, routing)) / DRAWS


def experts_hit(workload: Workload) -> float:
    """Experts with at least one token, in the mean."""
    return _hit(*(workload[axis] for axis in ("T", "experts", "top_k", "routing")))


def block_sizes(workload: Workload, block: int) -> tuple[tuple[int, float], ...]:
    """(rows, how many in the mean) of the blocks of at most `block` rows of one expert, the shared one's included."""
    sizes: dict[int, float] = {}
    shared = [workload["T"]] * (workload["shared"] > 0)
    for rows in drawn_rows(*(workload[axis] for axis in ("T", "experts", "top_k", "routing"))):
        for n in (*rows, *shared):
            for size in [block] * (n // block) + [n % block] * (n % block > 0):
                sizes[size] = sizes.get(size, 0.0) + 1 / DRAWS
    return tuple(sorted(sizes.items()))


def cost(workload: Workload, precision: str) -> Cost:
    """Cost of `workload` at `precision`; raises ValueError naming the known precisions otherwise."""
    if precision not in WEIGHT_BYTES:
        raise ValueError(f"precision={precision!r} is not one of {sorted(WEIGHT_BYTES)}; use one of them")
    tokens, width, inner, shared = (workload[axis] for axis in ("T", "H", "F", "shared"))
    flops = 6.0 * tokens * width * (workload["top_k"] * inner + shared)
    weights = 3.0 * width * (experts_hit(workload) * inner + shared)
    moved = tokens * (2 * 2 * width + 4 * workload["experts"])
    return Cost(flops, WEIGHT_BYTES[precision] * weights + moved, PIPES.get(precision, "bf16"))
