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
# # Gated DeltaNet: one fused scan or six kernels, and who moves the state
#
# Two stories about one layer. In prefill, should the chunked scan be one kernel that keeps the state on chip, or a
# pipeline that writes a state per chunk to memory so that the rest runs in parallel? In decode, how often does the
# state travel? Every number below is computed from a card, a recorded figure, a shape or a measured row, and every
# claim is asserted, so executing this notebook tests it.

# %%
from __future__ import annotations

from dataclasses import replace

import pandas as pd
import torch

from lab import draw, value
from lab.base import devices, models
from lab.card import phases, recorded
from lab.check import accuracy, families
from lab.judge import verdicts
from lab.place import roofline
from lab.study import reproduction
from lab.write import diagrams, notebook

families.interpret_on_cpu()  # before the kernels are imported: without a GPU they run in Triton's interpreter

from kernels.gdn import triton_fused, triton_split

gdn = families.load("gdn")
gb10, h200 = devices.get("gb10"), devices.get("h200")
GPU = "cuda" if families.gpu_capability() else "cpu"
ASKED = [phases.card(i) for i in ("p5", "p5-blocked-inverse", "p5-chunk64", "p5-kernel", "lp9-kernel")]

# %% [markdown]
# ## 1. The questions

# %%
notebook.question(phases.card("p5"))

# %%
notebook.questions(ASKED[1:])

# %% [markdown]
# ## 2. The mechanism
#
# Per v head a state S (D x D) is carried along the sequence: it decays, its guess for the key is compared with the
# value, and the scaled error is written back. Chunks of C tokens turn this into matrix products and one triangular
# solve of size C, but the chunks stay sequential through S. `fused_chunk` walks them inside one kernel.
# `split_pipeline` prepares all chunks at once, lets one kernel (`scan`; `fwd_h` in the record) carry S and store it per
# chunk as h, and reads h back in `output` (`fwd_o`).

# %%
notebook.picture(
    diagrams.fused_or_split_scan(),
    "Above, one kernel passes the state S from chunk to chunk on chip; below, six kernels exchange tensors through "
    "memory, among them one state per chunk, written by the scan and read by the output kernel.",
)

# %% [markdown]
# In decode there is one token per sequence and the work is the state's own traffic. What the arithmetic needs is one
# read and one write. Gathering the batch's states into a buffer and copying them back makes it six passes.

# %%
notebook.picture(
    diagrams.passes_over_the_state(),
    "Left, a gather kernel, the update and a copy each read and write the batch's states: six passes. Right, the "
    "update reads and writes the rows where they stand: two passes.",
)

# %% [markdown]
# ## 3. Reference against candidates, live
#
# The reference is the recurrence, token by token, in float64. The workloads are small and awkward: a last chunk that is
# not full, ragged sequences, near-parallel keys (which make the triangular system's inverse alternate in sign), and
# empty slots in decode. Outputs arrive full of NaN, so a partial write fails. Without a GPU the kernels run in Triton's
# interpreter, which says something about numbers and nothing about speed.


# %%
def small(**axes):
    """The first check workload with these axes."""
    checked = (w for w in gdn.cases.WORKLOADS if w.role == "check")
    return next(w for w in checked if all(w[axis] == size for axis, size in axes.items()))


CHECKED = [
    (small(T=75, D=128), ("torch_chunk", "fused_chunk", "split_pipeline")),
    (small(regime="similar"), ("fused_chunk", "fused_chunk_fp16", "split_pipeline")),
    (next(w for w in gdn.cases.WORKLOADS if w["lengths"]), ("torch_chunk", "fused_chunk")),
    (small(op="decode", pad=2), ("recurrent_decode",)),
]
checks = [accuracy.check(gdn, gdn.candidate(name), w, device=GPU) for w, names in CHECKED for name in names]
assert all(c.status == "ok" for c in checks), [c.message for c in checks]
notebook.show(notebook.errors(checks).drop(columns="precision"), code=["candidate", "workload"])

# %% [markdown]
# `torch_chunk` is the chunked form in plain float32: the two ways to compute the layer agree. A check that cannot fail
# proves nothing, so here is the fused candidate with its learning rate off by five in a hundred:

# %%
fused = gdn.candidate("fused_chunk")
wrong = replace(fused, run=lambda args, out: fused.run(args | {"beta": args["beta"] * 1.05}, out))
refused = accuracy.check(gdn, wrong, small(regime="beta1"), device=GPU)
assert refused.status == "incorrect", refused
notebook.text(f"`{refused.status}`: {refused.message}.")

# %% [markdown]
# ## 4. Floors and rooflines
#
# Compulsory traffic of prefill is q, k, v, gates in and o out, with the state once each way per sequence; arithmetic
# depends on the algorithm, and the convention here is chunks of 64. Decode is the state's traffic. No kernel below may
# beat its floor.

# %%
SHAPES = ("t2048_hk16_hv48_d128", "b32_t2048_hk16_hv32_d128", "decode_b32_hk16_hv48_d128", "decode_b128_hk16_hv48_d128")
costs = {name: gdn.cost(gdn.workload(name), "bf16") for name in SHAPES}
placed = [(n, d, c, roofline.place(d, c.flops, c.bytes, c.pipe)) for n, c in costs.items() for d in (gb10, h200)]
assert all(floor.bound == "memory" for name, _, _, floor in placed if name.startswith("decode"))
notebook.show(
    pd.DataFrame(
        [(n, d.id, c.flops / 1e9, c.bytes / 1e6, f.memory_us, f.compute_us, f.bound) for n, d, c, f in placed],
        columns=["workload", "device", "GFLOP", "MB", "memory us", "compute us", "bound by"],
    ),
    code=["workload"],
)

# %% [markdown]
# The recorded prefill times are microseconds per token, summed over the GDN layers of Qwen3.6-35B-A3B. Two recorded
# figures from elsewhere hold that reading up: the throughput lost end to end must be the time added.

# %%
layers = int(models.get("q36-35b-a3b").facts["gdn_layers"].value)
M5, FLA = (value(f"lp.p5.gb10.gdn-us-per-tok.{arm}") for arm in ("control.npp2048.itemm5", "candidate.npp2048.itemfla"))
m5_512, fla_512 = (value(f"lp.gate.p5.gdn-npp512.{arm}") for arm in ("control", "candidate"))
token_us = 1e6 / value("lp.gate.p1.prefill.control")  # whole model, the same npp and model, another phase
lost = -100 * (fla_512 - m5_512) / (token_us + fla_512 - m5_512)
stated = value("lp.gate.p5.prefill-npp512.delta")
assert abs(lost - stated) < 0.3
notebook.text(
    f"At npp 512 the pipeline adds {fla_512 - m5_512:.2f} us to a token of {token_us:.0f} us: {lost:.2f} % of "
    f"throughput by this arithmetic, {stated} % recorded. So the figures are sums over all {layers} GDN layers."
)

# %%
problem = gdn.workload("b32_t2048_hk16_hv32_d128")  # its cost per token does not depend on the batch
per_token = layers / (problem["batch"] * problem["T"])
cost = gdn.cost(problem, "bf16")
flops, compulsory = cost.flops * per_token, cost.bytes * per_token
floor = roofline.place(gb10, flops, compulsory, "bf16")
assert floor.floor_us < M5 < FLA
points = [
    draw.point(f"{name}, {us:g} us/token", flops, compulsory, us, "recorded")
    for name, us in (("M5, fused", M5), ("six kernels", FLA))
]
notebook.picture(
    draw.roofline(gb10, points, title=f"{gb10.name}: GDN prefill, npp 2048, all layers, per token"),
    "Roofline of GB10 with the two recorded GDN prefill times, both far below the bandwidth line.",
)

# %%
reached = {us: roofline.roofline_fraction(floor.floor_us, us) for us in (M5, FLA)}
assert reached[FLA] < reached[M5] < 0.1
notebook.text(
    f"The floor is {floor.floor_us:.2f} us per token ({compulsory / 1e6:.2f} MB at {gb10.bandwidth.value:g} "
    f"{gb10.bandwidth.unit}, 16-bit activations; float32 ones would double it at most). The fused scan reaches "
    f"{reached[M5]:.0%} of it, the pipeline {reached[FLA]:.0%}: neither stands near the bandwidth."
)

# %%
points = [p for phase in ("p5-kernel", "lp9-kernel") for p in notebook.points(phase, "h200")]
notebook.picture(
    draw.roofline(h200, points, ("bf16", "f32"), title=f"{h200.name}: GDN, {'measured' if points else 'no rows yet'}"),
    "Roofline of the H200 with " + ("the measured kernels." if points else "no points: no rows are committed yet."),
)

# %% [markdown]
# ## 5. Where the pipeline's time went on GB10

# %%
BUCKETS = {"fwd_h: carries the state": "fwd-h", "fwd_o: output": "fwd-o", "solve_tril": "solve-tril"}
share = {b: value(f"lp.p5.gb10.share.candidate.bucket{b}") / 100 for b in BUCKETS.values()}
notebook.picture(
    draw.bars(
        {name: share[bucket] * FLA for name, bucket in BUCKETS.items()},
        "GDN time per prefill token, six kernels, npp 2048",
        "us",
        total=FLA,
        title="Recorded on GB10: the solve was the suspect, not the time",
    ),
    "Bars of the recorded shares of the six-kernel pipeline: fwd_h and fwd_o are most of it, the solve a sliver.",
)

# %%
denominators = [value(f"lp.p5.gb10.kernel-ms.candidate.bucket{b}") / share[b] for b in share]
tokens = [ms * 1e3 / FLA for ms in denominators]
assert max(denominators) / min(denominators) < 1.02  # three shares, one denominator
solved = FLA * (1 - share["solve-tril"])
assert solved > M5  # a free solve would not have saved the pipeline
assert abs(share["fwd-h"] * FLA / M5 - 1) < 0.05
notebook.text(
    f"Milliseconds over shares give one denominator, {min(denominators):,.0f} to {max(denominators):,.0f} ms, which is "
    f"{min(tokens):,.0f} to {max(tokens):,.0f} tokens at {FLA} us: the shares are of the pipeline alone. A solve that "
    f"cost nothing would leave {solved:.1f} us against {M5}. The kernel that carries the state takes "
    f"{share['fwd-h'] * FLA:.1f} us, as much as the whole fused scan."
)

# %% [markdown]
# **What the materialised state costs, from shapes.** The record blames the state that the pipeline writes per chunk.
# That can be counted: h is Hv x D x D per chunk and layer, written once and read once; the other intermediates follow
# from the same shapes. The chunk size of the recorded pipeline is not stated, so three are shown; its operands were
# TF32, so four bytes each. Each tensor is counted once each way: tiles that read again add to it, caches take from it.
# The last column is the share of the bandwidth below which these bytes alone would explain the missed gate.

# %%
shape = models.shape("q36-35b-a3b.gdn").axes
budget = 0.9 * M5  # more than ten percent faster than the control
rows, per_us = [], gb10.bandwidth.base / 1e6
for chunk in (16, 32, 64):
    span = triton_split.workspace_shapes(chunk, 1, shape["Hv"], shape["D"], chunk, torch.float32)  # of one chunk
    sizes = {n: torch.Size(s).numel() * dtype.itemsize * layers / chunk for n, (s, dtype) in span.items()}
    q, v = (4 * shape[h] * shape["D"] * layers for h in ("Hk", "Hv"))  # k has q's size and o has v's
    carried = sizes["h"] + sizes["v_new"] + sizes["running"]
    moved = {"fwd-h": carried + sizes["w"] + sizes["u"] + q, "fwd-o": carried + 2 * q + v}
    h_us, all_us = 2 * sizes["h"] / per_us, 2 * sum(sizes.values()) / per_us
    line = {"chunk": chunk, "h, MB/token": 2 * sizes["h"] / 1e6, "h, us": h_us, "all, us": all_us}
    line |= {f"{k} of bandwidth": b / per_us / (share[k] * FLA) for k, b in moved.items()}
    rows.append(line | {"explains P5 below": all_us / (FLA - budget)})
state = pd.DataFrame(rows)
explicit = 2 * shape["Hv"] * shape["D"] ** 2 * 4 * layers / 64 / 1e6
assert abs(state["h, MB/token"].iloc[-1] - explicit) < 1e-9  # the workspace's shapes and the formula agree
notebook.show(state)

# %%
extra, low, high = FLA - M5, state.iloc[-1], state.iloc[0]  # chunks of 64 and of 16
call = next(c for c in reproduction.checks() if c.id == "gdn-call-control")
assert high["all, us"] < extra
assert high["explains P5 below"] * 100 < call.share_pct
notebook.text(
    f"The pipeline took {extra:.2f} us more per token than the fused scan. At {gb10.bandwidth.value:g} "
    f"{gb10.bandwidth.unit} the state accounts for {low['h, us']:.1f} us of it with chunks of {low['chunk']:.0f} and "
    f"{high['h, us']:.1f} with chunks of {high['chunk']:.0f}; everything that passes between the kernels accounts for "
    f"{low['all, us']:.1f} to {high['all, us']:.1f} us. For memory alone to explain the missed gate ({budget:.1f} us), "
    f"those bytes would have to have moved at {low['explains P5 below']:.0%} to {high['explains P5 below']:.0%} of the "
    f"bandwidth or less; GDN decode on the same part was recorded at {call.share_pct:.0f} %. The traffic that we can "
    f"count takes fwd_h and fwd_o to at most {high[['fwd-h of bandwidth', 'fwd-o of bandwidth']].max():.0%} of the "
    "bandwidth. So materialised state is a part of the explanation, and the shapes do not make it the whole."
)

# %%
cap, used = value("lp.p5.gb10.smem-cap.candidate"), value("lp.p5.gb10.smem-max.candidate")
on_chip = shape["D"] ** 2 * 4 / 1024
optin = gb10.fact("smem_optin_bytes_per_block")
assert used < cap == optin.base / 1024
notebook.text(
    f"**Shared memory.** A float32 state of one head is {on_chip:.0f} KB of the {cap:g} KB that a block may have on "
    f"GB10 ({h200.fact('smem_optin_bytes_per_block').base / 1024:.0f} KB on the H200). The recorded pipeline's largest "
    f"kernel used {used:g} KB, so the condition on shared memory holds and decided nothing."
)

# %% [markdown]
# ## 6. The gates, as declared

# %%
notebook.gates(ASKED)

# %% [markdown]
# ## 7. The verdicts: replayed from the record, and measured here

# %%
replayed = {j.phase: j for j in verdicts.judge_recorded(ASKED)}
p5 = replayed["p5"].verdict
assert all(j.agrees and j.verdict.word == "NO-GO" for j in replayed.values())
assert [f.state for f in p5.findings] == ["fails", "holds", "holds"]
assert "gdn_us_per_token +112" in p5.reason
notebook.show(notebook.verdicts(replayed.values()), code=["phase"])

# %%
KERNEL_CARDS = [c for c in ASKED if c.device == "h200"]
measured = {c.id: j for c in KERNEL_CARDS if (j := notebook.measured(c.id, "h200"))}
tables = {phase: notebook.timings(phase, "h200") for phase in measured}
changes = {phase: list(t["change %"].dropna()) if "change %" in t else [] for phase, t in tables.items()}
for phase, judgement in measured.items():  # the word must follow from the medians and from nothing else
    timed = tables[phase][tables[phase]["status"] == "ok"]
    assert timed.empty or (timed["floor us"] < timed["median us"]).all()
    limit = phases.card(phase).gate.require[0].threshold
    if judgement.verdict.word in ("GO", "NO-GO"):
        assert (judgement.verdict.word == "GO") == all(change <= limit for change in changes[phase])
notebook.show(notebook.verdicts(measured.values()), code=["phase"]) if measured else None

# %%
SILENT = notebook.unmeasured(", ".join(c.id for c in KERNEL_CARDS), "h200")
notebook.show(pd.concat(tables.values()), code=["workload", "arm"]) if tables else SILENT

# %%
one = gdn.workload(phases.card("p5-kernel").workloads[0])
choice, split = triton_fused.config_for((9, 0), one["D"]), triton_split.config_for((9, 0), one["D"], "bf16")
notebook.text(
    f"What the H200's question rests on. At one sequence of {one['T']:,} tokens and {one['Hv']} v heads the fused "
    f"kernel has {one['Hv'] * one['D'] // choice.v_tile} programs for {h200.fact('sms').value:g} SMs, each "
    f"{one['T'] // choice.chunk} chunks long with the preparation on that sequential path; the pipeline prepares "
    f"{one['Hv'] * one['T'] // split.chunk:,} pairs of chunk and head at once. The row compares "
    f"parallelism as well as memory traffic. GB10's trace covers {min(tokens) / 2048:.1f} prompts of 2,048 tokens on "
    f"{gb10.fact('sms').value:g} SMs. The two verdicts answer different questions; neither overturns the other."
)

# %% [markdown]
# ## 8. The state in decode: the copy and the gather
#
# Two patches landed on GB10. One writes the state where it stands instead of copying it back; the next reads it by
# sequence id instead of gathering it. `lp9-kernel` asks the same of one layer alone.

# %%
levers = []
for name, patch in (("0018: no copy back", "patch-0018"), ("0019: no gather", "patch-0019")):
    rates = [recorded.figure(f"lp.{patch}.gb10.decode-agg.{arm}.npl128.npp128") for arm in ("control", "candidate")]
    gain = 100 * (float(rates[1].value) / float(rates[0].value) - 1)
    assert round(gain, 1) == rates[1].delta_pct  # the printed gain follows from the printed rates
    levers.append((name, rates[0].value, rates[1].value, gain, rates[1].id))
gains = pd.DataFrame(levers, columns=["patch", "before tok/s", "after tok/s", "gain %", "figure"])
notebook.show(gains, code=["figure"])

# %%
copied, gathered = (
    value(f"lp.a2-phase2-decompose.gb10.share.control.bucket{b}.npl128") / 100 for b in ("d2d-state-copy", "get-rows")
)
ceilings = [100 * roofline.saving_ceiling(copied, 1), 100 * roofline.saving_ceiling(gathered / (1 - copied), 1)]
assert all(abs(ceiling - gain) < 1 for ceiling, gain in zip(ceilings, gains["gain %"], strict=True))
notebook.text(
    f"Both gains were there to be computed. The copy was {copied:.1%} of the step; without it throughput can gain "
    f"{ceilings[0]:.1f} %, and {gains['gain %'][0]:.1f} % came. The gather was {gathered:.1%} of the same step, so "
    f"{gathered / (1 - copied):.1%} of the one without the copy, which allows {ceilings[1]:.1f} %: "
    f"{gains['gain %'][1]:.1f} % came. A share of the second patch's own control is recorded too, "
    f"{value('lp.patch-0019.gb10.share.control.bucketget-rows-gather')} %; it does not give that ceiling, so its "
    "denominator is another."
)

# %%
state_bytes = {b: b * one["Hv"] * one["D"] ** 2 * 4 for b in (32, 128)}
decode = costs["decode_b128_hk16_hv48_d128"].bytes
assert 2 * state_bytes[128] < decode < 2 * state_bytes[128] * 1.02  # decode is its state's traffic
passes = [(d, n, n * state_bytes[128]) for d in (gb10, h200) for n in (2, 4, 6)]
columns = ["device", "passes over the state", "MB", "us at peak bandwidth"]
notebook.show(pd.DataFrame([(d.id, n, b / 1e6, b / d.bandwidth.base * 1e6) for d, n, b in passes], columns=columns))

# %%
l2 = h200.fact("l2_bytes").base
assert state_bytes[32] > l2
found = ", ".join(f"{change:+.1f} %" for change in changes.get("lp9-kernel", ()))
notebook.text(
    "Two passes instead of six take two thirds off the time if all six go to memory. The null is that the copies hit "
    f"the L2 cache: the smaller workload's states are {state_bytes[32] / 1e6:.0f} MB and the H200's L2 is "
    f"{l2 / 1e6:.0f} MB, so most cannot. " + (f"Measured: {found}." if found else "There are no rows yet.")
)

# %% [markdown]
# ## 9. What would change the verdicts, and where our arithmetic differs

# %%
notebook.would_change(ASKED)

# %%
GDN_ROWS = ("ceiling-without-copy", "ceiling-without-copy-and-gather", "state-copy-mean", "state-copy-shape")
ours = {r.id: r for r in reproduction.reproduce() if r.id in GDN_ROWS}
assert all(r.agrees == (r.expected == "agrees") for r in ours.values())
assert not ours["state-copy-shape"].agrees
notebook.show(notebook.reproduced(ours.values()), code=["figure"])

# %%
notebook.text(
    f"**P5 stays NO-GO on GB10**: {p5.observed}. The record explains it by slow memory for the "
    f"materialised state. The shapes support that for {low['h, us']:.0f} to {high['h, us']:.0f} of {extra:.0f} us per "
    "token, depending on the chunk size, which is not recorded. To flip it, `fwd_h` and `fwd_o` have to become faster: "
    "more bandwidth does that only as far as they wait for memory, and no recorded figure shows how far that is. A "
    "trace of those two kernels with the bytes they moved would settle it. `p5_p6_h200` asks an H200, and shows how "
    "far its rows predict the recorded times with the chain of chunk steps as a term."
)
