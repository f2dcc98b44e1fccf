# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # An fp8 KV cache: where it fails, and what mends it
#
# e4m3 keeps four significant bits of whatever it is given. That is enough for most of what a cache holds, and a scale
# is seldom what is missing. Here eight kinds of head that were seen in trained models are stored in ten ways, attention
# is computed in float64 on what comes back, and every number is computed when this notebook runs. No kernel and no GPU
# is involved.
#
# **For a head or a storage of your own:** add it to `kernels/kv/distributions.py` or `kernels/kv/accuracy_study.py`.

# %%
from dataclasses import asdict, replace

import pandas as pd

from lab import draw, phase, picture, show
from lab.card.gate import Reading
from lab.judge import verdicts
from lab.write import notebook, objects

CARD, DRAWS, SPREAD = phase("p6-accuracy").card, 4, 2.0  # SPREAD: deviation of the logits over tokens
from kernels.kv import accuracy_study as study
from kernels.kv import distributions

HEADS = {h.name: h for h in distributions.HEADS}
NAMES = [s.name for s in study.STORAGES]
phase(CARD.id)

# %% [markdown]
# ## The heads, and ten ways to store them
#
# Each head has one feature, so that a failure has one cause. The scale of e4m3 may belong to the whole tensor, a head,
# a channel, a page of 16 tokens or a token; "unit" is none at all. "K centred" takes the mean key off before rounding,
# over all tokens or page by page. Q8_0 is int8 with a half scale per 32 values.

# %%
show(pd.DataFrame([(h.name, h.why) for h in HEADS.values()], columns=["head", "what it is"]), code=["head"])

# %%
show(pd.DataFrame([(s.name, s.bits, s.cost) for s in study.STORAGES],
                  columns=["storage", "bits a value", "what decoding pays"]), code=["storage"])  # fmt: skip

# %% [markdown]
# ## Error of the attention output
#
# NMSE, mean of the draws, beside the card's line (twice what rounding predicts for e4m3). Sinks and heavy tails do not
# hurt fp8: a float keeps its relative error. A scale per head is enough for sizes. An offset that the softmax should
# cancel is where fp8 fails, and no scale mends it; keys centred by page do.

# %%
problems = [distributions.draw_all(seed=seed, spread=SPREAD) for seed in range(DRAWS)]
found = pd.DataFrame([asdict(e) for p in problems for e in study.study(p, NAMES)]).drop(columns="part")
nmse = found.pivot_table(index="head", columns="storage", values="nmse").loc[list(HEADS), NAMES]
line = CARD.gate.require[0].threshold
show(nmse.map(lambda v: f"{v:.1e}{' above the line' if v > line else ''}").reset_index(), code=["head"])

# %% [markdown]
# ## What it does to the next word, and whether it is K or V
#
# The outputs go through one fixed random matrix to a few thousand words: a proxy that ranks storages and is no model's
# KL.

# %%
SHOWN = ["bf16", "fp8 tensor", "fp8 head", "fp8 token", "fp8 K centred", "fp8 K page-centred", "q8_0"]
same = 100 * found.pivot_table(index="head", columns="storage", values="top1").loc[list(HEADS), SHOWN]
show(same.add_prefix("same word %, ").reset_index(), code=["head"])

# %%
first = problems[0]
alone = pd.DataFrame([asdict(e) for e in study.study(first, ["fp8 tensor", "fp8 head", "q8_0"], ("K", "V"))])
alone["stored"] = alone.storage + ", " + alone.part + " only"
show(alone.pivot_table(index="head", columns="stored", values="nmse").loc[list(HEADS)].reset_index(), code=["head"])

# %% [markdown]
# ## The mechanism
#
# A key bias in a slowly turning rotary pair gives every token a large, nearly equal value in two channels. The softmax
# cancels what is common to all tokens. Rounding is not common: it makes steps. The largest channel of the head whose
# offset turns, one token of each page:

# %%
turning = list(HEADS).index("turning-offset")
k = first.k[turning]
channel = int(k.abs().mean(dim=0).argmax())
STORED = {"fp8, scale per head": "fp8 head", "fp8, centred per page": "fp8 K page-centred"}
kept = {words: study.BY_NAME[n].keys(first.k)[turning, :, channel] for words, n in STORED.items()}
points = {words: [(t + 1, float(v[t])) for t in range(0, k.shape[0], 16)]
          for words, v in {"float32": k[:, channel], **kept}.items()}  # fmt: skip
picture(
    draw.scatter(points, f"channel {channel} of K", "token", "value", log=""),
    "One key channel against the token: the float32 values follow a slow curve, fp8 with a scale per head takes a few "
    "levels only, and fp8 after taking the page's mean off follows the curve.",
)

# %% [markdown]
# ## How large an offset is too large?

# %%
lines = []
for offset in (0.0, 3.0, 10.0, 30.0, 100.0):
    head = replace(HEADS["turning-offset"], offset=offset)
    drawn = [distributions.draw_all(seed=s, heads=(head,), spread=SPREAD) for s in range(2)]
    effects = pd.DataFrame([asdict(e) for p in drawn for e in study.study(p, SHOWN)])
    lines.append({"offset in the logits": offset, **effects.groupby("storage").nmse.mean()[SHOWN]})
show(pd.DataFrame(lines))

# %% [markdown]
# ## The verdict
#
# For models that norm their keys and have no bias a scale per head serves, outlier channels with a loss. For models
# with a key bias fp8 needs centred keys. The same holds at D = 256 (`tests/claims/test_kv_accuracy.py`). Both are
# predictions until somebody looks at a real cache.

# %%
read = {h: float(f"{nmse.loc[h, 'fp8 head']:.3g}") for h in HEADS}  # further digits are this CPU's
readings = {("nmse", h): Reading("nmse", candidate=value, kind="modelled") for h, value in read.items()}
objects.PhaseVerdict(verdicts.judgement(CARD, readings, "modelled", CARD.device, None))

# %%
notebook.would_change([CARD])
