# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # An fp8 KV cache: half the bytes, and what was left of them
#
# P6 asked whether storing K and V in 8 bits lifts decode throughput. Attention in decode waits for bytes, so half of
# them should be half of its time; on GB10 the step gained next to nothing. The cards ask a step, a proxy with Q8_0, and
# here the kernel alone.
#
# **For a cache of your own:** add a candidate to `kernels/kv/`, name it in a card beside `cuda_bf16`, set `CARD`.

# %%
from dataclasses import replace

import pandas as pd

from lab import device, draw, family, judgements, phase, picture, show, value
from lab.base import devices, models
from lab.study import reproduction
from lab.write import notebook

CARD = "p6-cuda"
DEVICE = device().id  # the one with most measured rows
kv = family("kv")

ASKED = [phase(i).card for i in ("p6", "p6-q8", "p6-kernel", CARD)]
CODES = {"fp8-kv": "fp8 e4m3", "q8_0-kv": "Q8_0"}
notebook.questions(ASKED)

# %% [markdown]
# ## The mechanism
#
# The cache is a pool of pages. A page table says which hold a sequence's tokens. The tokens of a sequence are split:
# each part computes a partial softmax (maximum m, sum l, weighted values acc) and a second kernel merges them. Query
# heads that share a kv head are computed together: the cache is read once for them.
#
# ```text
# page table 3 0 5 2  ->  pool of pages, 16 tokens each: K, V in 16 bits, or in 8 bits with scales
#
# part 0: pages 3, 0  ->  8 bit to 16 bit, q K^T, online softmax, p V  ->  m, l, acc  \
#                                                                                      merge -> o, all query heads
# part 1: pages 5, 2  ->  8 bit to 16 bit, q K^T, online softmax, p V  ->  m, l, acc  /         of a kv head
# ```

# %% [markdown]
# ## Checked here
#
# Against attention in float64 over the cache as it was quantised; lengths are ragged and the page table is permuted.

# %%
kv.check(workload="ctx75_b3_hq6_hkv1_d128_p16_bf16_outliers")

# %% [markdown]
# ## What quantising costs, by itself
#
# A floating-point format keeps its relative error when one key channel grows; an integer block of 32 spends its range
# on the largest channel and loses the 31 beside it. Below one channel is grown and the query shrunk in it, so that the
# logits stay: on Gaussian caches Q8_0 is closer, on a large channel fp8 is. So a proxy run with Q8_0 says something
# about bytes and nothing about fp8's accuracy.

# %%
base = next(w for w in kv.workloads if w["ctx"] == 500 and w["D"] == 128 and w["batch"] == 2)


def grown(gain: float) -> dict:
    """The base problem with the first key channel of every head times `gain` and the query's divided by it."""
    given = kv.parts.cases.inputs(base, 0, "cpu")
    given["k_cache"][..., 0] *= gain
    given["q"][..., 0] /= gain
    return given


lines = [(gain, *(kv.parts.cases.format_error(base, grown(gain), p).o for p in CODES)) for gain in (1, 4, 16, 64)]
show(pd.DataFrame(lines, columns=["gain of one channel", *(f"error of o, {name}" for name in CODES.values())]))

# %% [markdown]
# ## As recorded on GB10
#
# Half of attention's time is the most that half the bytes can save. The analytical prior was twice the ceiling that the
# measured times give: it took the rest of a step from a larger batch, which shares its reads of the weights.

# %%
RUNS = [(m, ctx, npl) for ctx, npl in ((512, 128), (4096, 8), (8192, 8)) for m in ("dense", "moe")]
PROXY = {"dense": "kvq8-0", "moe": "kvq8-0--2"}
lines = []
for model, ctx, npl in RUNS:
    step, attention, ceiling = (value(f"lp.gate.p6.{what}-{model}-ctx{ctx}-npl{npl}")
                                for what in ("step", "attention", "ceiling"))  # fmt: skip
    got = value(f"lp.p6.gb10.decode-delta.candidate.ctx8192.{PROXY[model]}") if ctx == 8192 else None
    lines.append((model, ctx, npl, step / 1e3, attention / 1e3, ceiling, got))
recorded = pd.DataFrame(lines, columns=["model", "context", "sequences", "step ms", "attention ms", "ceiling %",
                                        "Q8_0 gained %"])  # fmt: skip
show(recorded)

# %%
ceilings = {f"{m}, {n} sequences": [(c, y) for o, c, k, _, _, y, _ in lines if (o, k) == (m, n)]
            for m in PROXY for n in (128, 8)}  # fmt: skip
prior = [(c, value(f"lp.p6-analytical.gb10.decode-saving-max.candidate.ctx{c}")) for c in (256, 1024, 2048, 4096, 8192)]
gate = value("lp.gate.p6.threshold.decode")
picture(
    draw.scatter({**ceilings, "analytical prior (moe)": prior}, "Ceilings of a halved cache, GB10; dashed: the gate",
                 "context, tokens", "decode throughput, %", [[(256, gate), (8192, gate)]]),
    "Ceilings of a halved cache against context: the analytical ones rise steeply, measured times give half or less.",
)  # fmt: skip

# %%
ours = [(r.recorded_id, r.recorded, r.ours, r.unit, "yes" if r.agrees else "no", r.assumption)
        for r in reproduction.reproduce() if r.id.startswith(("kv-prior", "kv-measured"))]  # fmt: skip
show(pd.DataFrame(ours, columns=["figure", "recorded", "ours", "unit", "agrees", "assumption"]), code=["figure"])

# %% [markdown]
# On the roofline the recorded attention stands just under the bandwidth line: it does wait for bytes.

# %%
facts, points = models.get("q36-27b").facts, []
for ctx, npl in ((512, 128), (8192, 8)):
    problem = replace(base, axes={**kv.parts.workload("ctx8192_b8_hq24_hkv4_d256").axes, "ctx": ctx, "batch": npl})
    cost, layers = kv.parts.cost(problem, "bf16"), facts["attention_layers"].value
    us = value(f"lp.gate.p6.attention-dense-ctx{ctx}-npl{npl}")
    points.append(draw.point(f"{ctx} x {npl}", layers * cost.flops, layers * cost.bytes, us, "recorded"))
picture(
    draw.roofline(devices.get("gb10"), points, title="GB10: decode attention of the dense model, f16 cache"),
    "Roofline of GB10 with the recorded decode attention times, just under the bandwidth line.",
)

# %% [markdown]
# ## The verdicts
#
# P6 was judged twice by its source. The first time only the analytical ceiling existed, which clears the gate by far; a
# ceiling is not evidence, so the word is BLOCKED and not GO.

# %%
judgements(*(c.id for c in ASKED))

# %%
judgements(*(c.id for c in ASKED), device=DEVICE)

# %%
phase(CARD).arms(DEVICE)

# %%
phase(CARD).roofline(DEVICE)

# %%
phase("p6-kernel").kernels(DEVICE)

# %% [markdown]
# ## What would change it
#
# The throughput gate leaves one use untouched: room. Few layers keep a cache, and half of it is longer contexts or more
# sequences at the same speed: `p6-room`, in the notebook `kv_ceiling`.

# %%
notebook.would_change(ASKED)
