"""Flops and compulsory bytes of a step, part by part.

Weights, caches and states once each: what a token needs of a weight is on the chip when the next one needs it. Between
sublayers nothing is compulsory, so activations do not count; of the embedding the tokens' rows do. A floor of the step
is the sum over parts of the longer of bytes and flops: a part cannot hide behind another that needs its result.
"""

from __future__ import annotations

from dataclasses import replace

from kernels.common import Cost, Workload
from kernels.gdn.cost import CHUNK, chunk_flops
from kernels.moe.cost import cost as mixture_cost
from kernels.step.cases import CACHE_BYTES, model_of, new_tokens
from kernels.step.config import W4A8_FROM
from kernels.step.model import CONV_WIDTH

BYTES = {
    "bf16": 2.0,
    "nvfp4-w4a16": 0.5 + 1 / 16,
    "nvfp4-w4a8": 0.5 + 1 / 16,
}  # of a product's weight: e2m1, and an e4m3 scale for 16
STATE_BYTES = {"f32": 4, "bf16": 2}


def parts(workload: Workload, precision: str) -> dict[str, Cost]:
    """Costs of "ffn", "gdn products", "gdn", "attention products", "attention" and "head", over all layers.

    Raises ValueError on a precision whose weights have no known size.
    """
    if precision not in BYTES:
        raise ValueError(f"precision={precision!r} is not one of {sorted(BYTES)}; use one of them")
    model, new, ctx = model_of(workload), new_tokens(workload), workload["ctx"]
    tokens, npl = sum(new), len(new)
    attention = model.kinds.count("attention")
    gdn = model.layers - attention

    def products(*ends: str) -> Cost:
        sizes = [n * k for name, (n, k) in model.linears().items() if name.endswith(ends)]
        narrow = precision == "nvfp4-w4a8" and tokens >= W4A8_FROM
        return Cost(2.0 * tokens * sum(sizes), BYTES[precision] * sum(sizes), "fp8" if narrow else "bf16")

    ffn = products("gate_proj", "up_proj", "down_proj")
    if model.experts:
        one, logits = mixture_cost(mixture_of(workload), precision), 2.0 * model.experts * model.hidden
        # of x, logits and y that layer's cost has the bytes; in a step they are not compulsory
        weights = one.bytes - tokens * (4.0 * model.hidden + 4 * model.experts) + logits
        ffn = Cost(model.layers * (one.flops + tokens * logits), model.layers * weights)
    small = 2 * model.gdn_v_heads * model.hidden  # in_proj_a and in_proj_b, never quantised
    gdn_products = products("in_proj_qkv", "in_proj_z", "out_proj")
    state = model.gdn_v_heads * model.gdn_dim**2
    window = model.channels * CONV_WIDTH
    chunked = sum(chunk_flops(CHUNK, model.gdn_dim, model.gdn_v_heads // model.gdn_k_heads).values())
    by_token, pipe = (chunked * model.gdn_v_heads, "bf16") if max(new) > 1 else (7.0 * state, "f32")
    conv_bytes = 2 * (window + npl * 2 * (CONV_WIDTH - 1) * model.channels)
    seen = sum(count * ctx + count * (count + 1) / 2 for count in new)  # keys that each new token looks at
    row = (
        model.kv_heads * model.head_dim * 2 * CACHE_BYTES[str(workload.axes.get("cache", "bf16"))]
    )  # K and V of a token
    state_bytes = STATE_BYTES[str(workload.axes.get("state_dtype", "f32"))]
    return {
        "ffn": ffn,
        "gdn products": replace(
            gdn_products,
            flops=gdn_products.flops + 2.0 * tokens * gdn * small,
            bytes=gdn_products.bytes + 2.0 * gdn * small,
        ),
        "gdn": Cost(gdn * tokens * (by_token + 2 * window), gdn * (2.0 * npl * state * state_bytes + conv_bytes), pipe),
        "attention products": products("q_proj", "k_proj", "v_proj", "o_proj"),
        "attention": Cost(
            4.0 * attention * model.heads * model.head_dim * seen, float(attention * row * (npl * ctx + 2 * tokens))
        ),
        "head": Cost(
            2.0 * npl * model.vocab * model.hidden,
            2.0 * model.hidden * (model.vocab + tokens) + 4.0 * npl * model.vocab,
        ),
    }


def mixture_of(workload: Workload) -> Workload:
    """The mixture's layer of a step, as a problem of kernels/moe with uniform routing."""
    model = model_of(workload)
    axes: dict[str, int | str] = {"T": sum(new_tokens(workload)), "experts": model.experts, "top_k": model.top_k}
    axes |= {"H": model.hidden, "F": model.expert_ffn, "shared": model.ffn, "routing": "uniform", "dtype": "bf16"}
    return Workload("mixture", axes)


def cost(workload: Workload, precision: str) -> Cost:
    """The sum of the parts, on the fastest pipe that one of them is on: no step is faster than that allows."""
    every = parts(workload, precision).values()
    pipe = "fp8" if any(part.pipe == "fp8" for part in every) else "bf16"
    return Cost(sum(part.flops for part in every), sum(part.bytes for part in every), pipe)
