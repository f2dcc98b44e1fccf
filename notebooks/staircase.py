# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # The staircase: three patches between a third and most of vLLM's decode
#
# A hybrid model decodes for many sequences at once. Its recurrence is cheap; moving the recurrent state was not. Three
# patches took the movement away, one kind at a time, and each was predicted before it was written. This page sets the
# steps beside each other, asks what was known beforehand, which of them are steps on an H200, and says what none
# explains. Numbers are recorded figures of LocalAI's paged llama.cpp on GB10, rows of ours, or computed from these.
#
# **For a staircase of your own:** `lab/study/staircase.py` reads the steps from recorded figures, by id.

# %%
import pandas as pd

from lab import draw, judgements, picture, show, value
from lab.base import devices, facts
from lab.study import staircase
from lab.trace import breakdowns

dense, moe = staircase.staircase("dense"), staircase.staircase("moe")

# %% [markdown]
# ## The steps
#
# Each level carries its throughput and its share of vLLM. A step runs from its own control to its candidate. The dotted
# lines join a candidate to the next step's control, which was measured again.

# %%
picture(
    staircase.picture([dense, moe]),
    "Decode throughput at 128 sequences rises in three steps, patches 0018 to 0020, for the dense and the MoE model, "
    "towards a dashed line, vLLM on the same device.",
)

# %%
frame = pd.DataFrame([{"model": s.name, **row} for s in (dense, moe) for row in s.rows()])
for column in ("before tok/s", "after tok/s"):
    frame[column] = frame[column].map("{:.2f}".format)  # as the source prints them
show(frame, code=["card"])

# %% [markdown]
# ## Where the time was: the step before the first patch
#
# Copies and gathers of the state are buckets of their own here. A trace that counts device-to-device copies as compute
# shows a busy GPU and no reason to look at them.

# %%
picture(
    draw.breakdown(breakdowns.from_recorded("a2_dense_npl128_eager"), "Decode step, dense, 128 sequences, before 0018"),
    "The decode step by bucket: recurrence, gathers and copies of the state lead, FP4 products follow.",
)

# %% [markdown]
# A ceiling is arithmetic on the shares. Two predictions came true within a few per cent; the third, a share of vLLM,
# was passed. The second step exceeds its ceiling, and started from a control above the first step's candidate.

# %%
A2 = "lp.a2-phase2-decompose.gb10"
copies, gathers = (value(f"{A2}.share.control.bucket{b}.npl128") for b in ("d2d-state-copy", "get-rows"))
base = value(f"{A2}.decode-agg.control.npl128.itemceiling-base")
PREDICTED = (("0018", "without copies", copies, "item-copy"),
             ("0019", "without copies and gathers", copies + gathers, "item-copy-and-gather"))  # fmt: skip
lines = [(patch, what, value(f"{A2}.decode-agg.candidate.npl128.{item}"), base / (1 - share / 100), step.after)
         for (patch, what, share, item), step in zip(PREDICTED, dense.steps, strict=False)]  # fmt: skip
show(pd.DataFrame(lines, columns=["step", "prediction", "predicted tok/s", "computed here", "delivered"]))

# %% [markdown]
# ## The copies on the roofline
#
# A copy reads and writes its bytes once. GB10's bandwidth is stated twice in the sources, so both are used. There was
# more to gain from removing the copies than from making them faster.

# %%
moved = 1e9 * value("lp.decode-parity-explore.gb10.dtod-bytes-removed.candidate.npl128")
step_ms, bandwidth = 1000 * dense.npl / dense.steps[0].before, devices.get("gb10").bandwidth
floors = [(v.value, 2 * moved / facts.to_base(v.value, bandwidth.unit) * 1000) for v in bandwidth.values]
show(pd.DataFrame([(gb_s, ms, 100 * ms / step_ms, copies) for gb_s, ms in floors],
                  columns=[f"bandwidth, {bandwidth.unit}", "floor of the copies, ms", "share of the step, %",
                           "share in the trace, %"]))  # fmt: skip

# %% [markdown]
# ## What each patch took away
#
# The bucket that a patch was written against, before and after it, and the verdict on its gate. `lp8` is the question
# that found the lever: its hypothesis, that the FP4 products hold the step, was refuted.

# %%
GONE = (("0018", "share of device-to-device copies, %", "lp.patch-0018.gb10.share.{}.bucketd2d-memcpy"),
        ("0019", "share of the state gather, %", "lp.patch-0019.gb10.share.{}.bucketk-get-rows-float"),
        ("0020", "output projection, ms/call", "lp.lever1-ssm-out-2d.gb10.o-proj-cost.{}"))  # fmt: skip
lines = [(patch, what, value(i.format("control")), value(i.format("candidate"))) for patch, what, i in GONE]
show(pd.DataFrame(lines, columns=["patch", "bucket", "before", "after"]))

# %%
judgements("lp8", "lp9", "lp10", "lp11")

# %% [markdown]
# ## The same steps on an H200
#
# Our arms of these steps, each pair timed in one run and captured, but for the last line. On the dense model a step
# stands on those before it; 4 of 64 layers fit beside each other at 128 sequences, 16 at one, and with the whole head
# every step is smaller than in the whole model. On the mixture each is what a step with all others loses without it.

# %%
show(pd.DataFrame(staircase.beside()))

# %%
picture(
    staircase.picture_measured(staircase.measured()[:1]),
    "Decode steps a second of the dense model on an H200 at 128 sequences: each of the three patches is a step, the "
    "output projection the highest.",
)

# %% [markdown]
# At 128 sequences all three are steps here too. The projection is the highest: its passes read the weights again for
# each sequence. At one sequence there is little to move and one pass, so none is a step. Capture is one wherever a
# Python host launches; an engine in C++ launches several times as fast, so this line says nothing about llama.cpp.

# %%
series = staircase.measured()
judgements(*dict.fromkeys(step.card for one in series for step in one.steps), device=series[0].device)

# %% [markdown]
# ## What no step explains
#
# The product of the steps is less than last over first. What lies between is in the dotted lines: another build, other
# settings, another day. It belongs to no patch, and the honest total of a staircase is its product.

# %%
lines = [(s.name, s.total, s.explained, 100 * (s.total / s.explained - 1), s.share_pct(s.steps[-1].after))
         for s in (dense, moe)]  # fmt: skip
show(pd.DataFrame(lines, columns=["model", "last over first", "product of the steps", "unexplained %", "of vLLM %"]))

# %% [markdown]
# What would change it: a peer measured in the same session with the same client. The MoE share divides two figures of
# different tools, and the source does not state it itself.
