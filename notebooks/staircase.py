# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The staircase: three patches between a third and most of vLLM's decode
#
# A hybrid model decodes for many sequences at once. Its recurrence is cheap; moving the recurrent state was not. Three
# patches took the movement away, one kind at a time, and each was predicted before it was written. This page sets the
# steps beside each other, asks what was known beforehand, and says what no step explains.
#
# Every number is a recorded figure of LocalAI's paged llama.cpp on GB10, by id, or computed from such figures in a
# cell. Nothing here was measured by this workbench.

# %%
import pandas as pd

from lab import draw, value
from lab.base import devices, facts
from lab.card import phases
from lab.judge import verdicts
from lab.study import staircase
from lab.trace import breakdowns
from lab.write import notebook

dense, moe = staircase.staircase("dense"), staircase.staircase("moe")

# %% [markdown]
# ## 1. The steps
#
# Each level carries its throughput and its share of vLLM. A step runs from its own control to its candidate. The dotted
# lines join a candidate to the next step's control, which was measured again.

# %%
notebook.picture(
    staircase.picture([dense, moe]),
    "Decode throughput at 128 sequences rises in three steps, patches 0018 to 0020, for the dense and the MoE model, "
    "towards a dashed line, vLLM on the same device.",
)

# %%
for stairs in (dense, moe):
    assert [s.patch for s in stairs.steps] == ["0018", "0019", "0020"]
    assert all(step.gain > 1.02 for step in stairs.steps), "each step clears the noise floor of 2 %"
for step in dense.steps:  # the shares that the source prints, to its digits
    for stated, tps in zip(step.stated, (step.before, step.after), strict=True):
        assert abs(dense.share_pct(tps) - float(stated.value)) < 0.5, stated.id
        assert f"{float(stated.value):.1f}" == f"{dense.share_pct(tps):.1f}" or float(stated.value).is_integer()
frame = pd.DataFrame([{"model": s.name, **row} for s in (dense, moe) for row in s.rows()])
for column in ("before tok/s", "after tok/s"):
    frame[column] = frame[column].map("{:.2f}".format)  # as the source prints them
notebook.show(frame, code=["card"])

# %% [markdown]
# ## 2. Where the time was: the step before the first patch
#
# Copies and gathers of the state are buckets of their own here. A trace that counts device-to-device copies as compute
# shows a busy GPU and no reason to look at them.

# %%
before = breakdowns.from_recorded("a2_dense_npl128_eager")
notebook.picture(
    draw.breakdown(before, "Decode step, dense, 128 sequences, before patch 0018"),
    "The decode step by bucket: recurrence, gathers and copies of the state lead, FP4 products follow.",
)

# %%
A2 = "lp.a2-phase2-decompose.gb10"
copies, gathers = (value(f"{A2}.share.control.bucket{b}.npl128") for b in ("d2d-state-copy", "get-rows"))
base = value(f"{A2}.decode-agg.control.npl128.itemceiling-base")
ceilings = {
    "without copies": (base / (1 - copies / 100), f"{A2}.decode-agg.candidate.npl128.item-copy"),
    "without copies and gathers": (
        base / (1 - (copies + gathers) / 100),
        f"{A2}.decode-agg.candidate.npl128.item-copy-and-gather",
    ),
}
for name, (ours, figure) in ceilings.items():
    assert abs(ours - value(figure)) <= 1, f"{name}: {ours:.1f} against {value(figure)}"
delivered = [dense.steps[0].after, dense.steps[1].after]
pairs = zip(delivered, ceilings.values(), strict=True)
assert all(1 <= got / value(figure) < 1.05 for got, (_, figure) in pairs)
target = [
    value(f"lp.lever1-ssm-out-2d.gb10.decode-share-of-vllm-target.candidate.npl128.bound{b}") for b in ("lo", "hi")
]
reached = dense.share_pct(dense.steps[2].after)
assert reached > target[1] > target[0]
lines = [
    {"step": s.patch, "predicted": f"{value(figure):g} tok/s {name}", "computed here": ours, "delivered": s.after}
    for s, (name, (ours, figure)) in zip(dense.steps, ceilings.items(), strict=False)
]
lines.append(
    {
        "step": "0020",
        "predicted": f"{target[0]:g} to {target[1]:g} % of vLLM",
        "computed here": None,
        "delivered": reached,
    }
)
notebook.show(pd.DataFrame(lines))

# %%
notebook.text(
    f"A ceiling is arithmetic on the shares: {base:g} tok/s without the {copies:g} % of copies is "
    f"{ceilings['without copies'][0]:.0f}, and without the {gathers:g} % of gathers too "
    f"{ceilings['without copies and gathers'][0]:.0f}. Two predictions came true within a few per cent, and the third, "
    f"a target of {target[0]:g} to {target[1]:g} % of vLLM, was passed at {reached:.1f} %. The second step exceeds its "
    f"ceiling by {100 * (delivered[1] / ceilings['without copies and gathers'][0] - 1):.1f} %, and it started from a "
    f"control {dense.between_pct[0]:.1f} % above the first step's candidate: see section 5."
)

# %% [markdown]
# ## 3. The copies on the roofline
#
# A copy reads and writes its bytes once. At the bandwidth of the device that takes a time of its own, which no kernel
# can hide better than the trace shows. GB10's bandwidth is stated twice in the sources, so both are used.

# %%
moved_gb = value("lp.decode-parity-explore.gb10.dtod-bytes-removed.candidate.npl128")
step_ms = 1000 * dense.npl / dense.steps[0].before
bandwidth = devices.get("gb10").bandwidth
floors = []
for stated in bandwidth.values:
    floor_ms = 2 * moved_gb * 1e9 / facts.to_base(stated.value, bandwidth.unit) * 1000
    floors.append(
        {"bandwidth": f"{stated.value:g} {bandwidth.unit}", "floor of the copies, ms": floor_ms,
         "share of the step, %": 100 * floor_ms / step_ms, "share in the trace, %": copies}
    )  # fmt: skip
assert all(f["share of the step, %"] < copies for f in floors), "a copy cannot be faster than the memory"
notebook.show(pd.DataFrame(floors))

# %%
best = max(f["share of the step, %"] for f in floors)
notebook.text(
    f"{moved_gb:g} GB a step, read and written, in a step of {step_ms:.0f} ms. At the lower bandwidth the floor is "
    f"{best:.0f} % of the step where the trace has {copies:g} %: the copies ran at {100 * best / copies:.0f} % of "
    "memory speed, so there was more to gain from removing them than from making them faster."
)

# %% [markdown]
# ## 4. What each patch took away
#
# The bucket that a patch was written against, before and after it, and the verdict on its gate.

# %%
GONE = [
    ("0018", "share of device-to-device copies, %", "lp.patch-0018.gb10.share.{}.bucketd2d-memcpy"),
    ("0019", "share of the state gather, %", "lp.patch-0019.gb10.share.{}.bucketk-get-rows-float"),
    ("0020", "output projection, ms/call", "lp.lever1-ssm-out-2d.gb10.o-proj-cost.{}"),
]
gone = [
    {
        "patch": patch,
        "bucket": what,
        "before": value(figure.format("control")),
        "after": value(figure.format("candidate")),
    }
    for patch, what, figure in GONE
]
assert all(row["after"] < row["before"] / 5 for row in gone)
notebook.show(pd.DataFrame(gone))

# %%
judged = {j.phase: j for j in verdicts.judge_recorded([phases.card(i) for i in ("lp8", "lp9", "lp10", "lp11")])}
assert {judged[i].verdict.word for i in ("lp9", "lp10", "lp11")} == {"GO"}
assert judged["lp8"].verdict.word == "NO-GO"
notebook.show(notebook.verdicts(judged.values()))

# %% [markdown]
# `lp8` is the question that found the lever: its hypothesis, that the FP4 products hold the step, was refuted.
#
# ## 5. What no step explains
#
# The product of the steps is less than last over first. What lies between is in the dotted lines: another build, other
# settings, another day. It belongs to no patch, and the honest total of a staircase is its product.

# %%
table = [
    {"model": s.name, "last over first": s.total, "product of the steps": s.explained,
     "unexplained %": 100 * (s.total / s.explained - 1), "largest gap between two steps %": max(s.between_pct)}
    for s in (dense, moe)
]  # fmt: skip
for stairs in (dense, moe):
    product = 1.0
    for gap in stairs.between_pct:
        product *= 1 + gap / 100
    assert abs(product - stairs.total / stairs.explained) < 1e-9
assert table[1]["unexplained %"] > table[0]["unexplained %"] > 2
notebook.show(pd.DataFrame(table))

# %%
notebook.text(
    f"For the MoE model {table[1]['unexplained %']:.0f} % of throughput comes from no step. Its {moe.total:.2f}x is "
    f"{moe.explained:.2f}x of patches; the dense model's {dense.total:.2f}x is {dense.explained:.2f}x."
)

# %% [markdown]
# ## 6. What is left to vLLM

# %%
left = {s.name: s.share_pct(s.steps[-1].after) for s in (dense, moe)}
assert all(80 < share < 100 for share in left.values())
figure, axes = notebook.canvas(1.5, height=30)
for y, (name, share) in zip((19, 5), left.items(), strict=True):
    notebook.box(axes, 14, y, 80, 7, colour=draw.SOFT)
    notebook.box(axes, 14, y, 0.8 * share, 7, f"{share:.1f} % of vLLM", colour=draw.BLUE, fill=True)
    axes.text(1, y + 3.5, name, va="center", fontsize=9.5, color=draw.INK)
notebook.picture(figure, f"After patch 0020: dense {left['dense']:.1f} %, MoE {left['moe']:.1f} % of vLLM's decode.")

# %% [markdown]
# What would change it: a peer measured in the same session with the same client. The MoE share divides two figures of
# different tools, and the source does not state it itself.
