# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Six phases towards parity: what was asked, what came back
#
# LocalAI's paged llama.cpp set out to reach vLLM's throughput on GB10 in six phases, P1 to P6, each with a kill gate
# written before the work. Every gate is judged again from the recorded figures, beside the source's word.
# The last part is the ledger: what the plan promised against what arrived.
#
# **For a plan of your own:** write its phases as cards, its promises into `data/ledger.toml`.

# %%
import pandas as pd

from lab import draw, family, judgements, phase, picture, show, value
from lab.base import devices, models
from lab.place import roofline
from lab.study import ledger
from lab.trace import breakdowns, diff
from lab.write import notebook

gb10, moe = devices.get("gb10"), models.get("q36-35b-a3b")
ids = ("p1", "p1-dense", "p2", "p2-structural", "p3", "p3-gather", "p4", "p4-determinism", "p5", "p5-blocked-inverse",
       "p5-chunk64", "p6", "p6-q8", "p6-capacity")  # fmt: skip

# %%
notebook.questions(phase(i).card for i in ids)

# %%
judgements(*ids)

# %% [markdown]
# Where our word is not the source's, the card says why:

# %%
differing = [j for j in judgements(*ids) if j.agrees is False]
show(pd.DataFrame([(j.phase, j.verdict.word, j.source_said, j.differs) for j in differing],
                  columns=["card", "here", "the source", "why they differ"]), code=["card"])  # fmt: skip

# %% [markdown]
# ## The gap that the plan divided up
#
# Prefill of the MoE model, 512 tokens in each of 32 sequences, kernel time per token in both engines.

# %%
prefill = diff.difference(*(breakdowns.from_recorded(f"lmap_prefill_{e}_moe_npp512") for e in ("paged", "vllm")))
picture(
    draw.gap(prefill, ("llama-paged", "vLLM"), "Prefill, mixture of experts, 512 tokens x 32 sequences"),
    "Stacked bars of both engines' prefill time per token and the waterfall of the gap by category.",
)

# %% [markdown]
# ## P1: a residual stream in bf16
#
# The gate is on the share of the whole convert bucket; the kernels that were removed are a part of it. The landed gain
# is judged as a claim by itself.

# %%
paged = breakdowns.from_recorded("lmap_prefill_paged_moe_npp512")
copies = {p.label: p.value for p in paged.nested if p.category == "layout_or_convert"}
picture(
    draw.bars(copies, "kernel time of a prefill token", "us", total=paged.whole, title="What the gate of P1 is on"),
    "Bars of the conversion and concatenation kernels in a prefill token, the rest hatched.",
)

# %% [markdown]
# ## P2: experts in order, the feed-forward as one region
#
# On the real model the region ran zero times: a KL difference of zero at zero engagements says nothing.

# %%
region = [(n, value(f"lp.gate.p2.region-n{n}.control"), value(f"lp.gate.p2.region-n{n}.candidate")) for n in (128, 257)]
show(pd.DataFrame(region, columns=["tokens", "grouped MMQ, us", "region, us"]))

# %% [markdown]
# ## P3: W4A16 with activations read directly
#
# A step of the recorded ubatch meets nearly all experts and reads all their weights, which W4A16 has as many of. It was
# slower than the FP4 product instead of at its floor.

# %%
up, down = moe.shapes["expert_up"].axes, moe.shapes["expert_down"].axes
layers, chosen, experts = (int(moe.fact(f).value) for f in ("layers", "experts_per_token", "experts"))
per_expert = 2 * up["N"] * up["K"] + down["N"] * down["K"]  # gate and up, then down
flops, weight_bytes = 2 * per_expert * chosen * layers, per_expert * experts * layers * 4.5 / 8 / 512
NAMES = {"FP4 MMQ": "grouped.control", "W4A16 grouped": "grouped.candidate", "W4A16 direct A": "direct.candidate"}
points = [draw.point(words, flops, weight_bytes, value(f"lp.gate.p3.gemm-{name}"), "recorded")
          for words, name in NAMES.items()]  # fmt: skip
picture(
    draw.roofline(gb10, points, ("fp4", "bf16"), "GB10: expert GEMMs of a prefill token, all layers"),
    "Roofline of GB10 with the three recorded expert GEMMs at one intensity, the FP4 one highest.",
)

# %% [markdown]
# ## P5: six kernels for the scan
#
# The solve that the phase was about is a sliver of the six kernels; `gdn` asks the same of our own.

# %%
gdn, gdn_layers = family("gdn").parts, moe.fact("gdn_layers").value
problem = gdn.workload("b32_t2048_hk16_hv32_d128")  # its cost per token does not depend on the batch
cost, tokens = gdn.cost(problem, "bf16"), problem["batch"] * problem["T"]
scan = [draw.point(words, cost.flops * gdn_layers / tokens, cost.bytes * gdn_layers / tokens,
                   value(f"lp.gate.p5.gdn-npp2048.{arm}"), "recorded")
        for words, arm in (("fused", "control"), ("six kernels", "candidate"))]  # fmt: skip
picture(
    draw.roofline(gb10, scan, title="GB10: GDN prefill, all layers, per token"),
    "Roofline of GB10 with the fused scan and the six-kernel one, both far below the bandwidth line.",
)

# %% [markdown]
# ## P6: half the bytes in the KV cache
#
# Half of attention's share is the most that half the bytes can give; ours is that arithmetic. `kv` has the whole story.

# %%
lines = []
for m, ctx, npl in [(m, ctx, npl) for m in ("dense", "moe") for ctx, npl in ((512, 128), (4096, 8), (8192, 8))]:
    step, attention, ceiling = (
        value(f"lp.gate.p6.{k}-{m}-ctx{ctx}-npl{npl}") for k in ("step", "attention", "ceiling")
    )
    lines.append((m, ctx, npl, step / 1e3, ceiling, 100 * roofline.part_saving_ceiling(attention, step, 0.5)))
show(pd.DataFrame(lines, columns=["model", "context", "sequences", "step ms", "ceiling %", "ours %"]))

# %% [markdown]
# ## The program as a whole, and its ledger

# %%
judgements("program-conclusion", "h2h-4way")

# %%
bounds = [(e.title, f"{e.expected[0]:g} to {e.expected[-1]:g}", ", ".join(f"{d:.4g}" for d in e.delivered), e.unit,
           e.outcome, e.source_word, e.our_word, e.caveat) for e in ledger.entries()]  # fmt: skip
show(pd.DataFrame(bounds, columns=["entry", "expected", "delivered", "unit", "outcome", "source", "judge", "caveat"]))
