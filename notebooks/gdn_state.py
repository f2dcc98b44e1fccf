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
# # The state of Gated DeltaNet: its size, its format, its way to the kernel, and whose it is
#
# A recurrent layer carries one matrix per head instead of a cache that grows. Four questions follow, each with a card:
# does its decode time grow with the context (LP12), may the matrix be stored in bf16 (LP13), how often does it travel
# (LP10), and can a batch of several sequences mix their states up, or cost one of them time (IK1, IK2, IK4, IK6)?
# Numbers come from cards, recorded figures, measured rows, or are computed here; claims are asserted.

# %%
from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd

from lab import draw, value
from lab.base import devices, models
from lab.card import phases, recorded, sweeps
from lab.check import families
from lab.judge import decode_step, verdicts
from lab.place import ceilings
from lab.row import store
from lab.write import notebook

families.interpret_on_cpu()

from kernels.gdn import batches, error_growth

gdn, kv = families.load("gdn"), families.load("kv")
gb10, h200 = devices.get("gb10"), devices.get("h200")
JUDGED = ("ik4-kernel", "lp10-kernel", "lp12-kernel", "lp13-kernel")
MEASURED = {name: notebook.measured(name, "h200") for name in JUDGED}

# %%
ASKED = [
    phases.card(i)
    for i in ("lp12", "lp12-kernel", "lp13", "lp13-kernel", "lp10", "lp10-kernel", "ik4-kernel", "ik6-signature")
]
notebook.questions(ASKED)

# %% [markdown]
# ## 1. LP12: what grows with the context
#
# Recorded on GB10: one launch of each kernel in decode, at a context and at four times that context.

# %%
FLAT = "lp.gdn-context-flat.gb10"
short_us, long_us = (value(f"{FLAT}.gdn-us-per-launch.control.npl4.ctx{n}x") for n in (1, 4))
short_attention_us, long_attention_us = (value(f"{FLAT}.full-attn-us-per-launch.control.npl4.ctx{n}x") for n in (1, 4))
assert long_us <= short_us  # flat, and then some
assert abs(long_attention_us / short_attention_us - value(f"{FLAT}.full-attn-growth.control.npl4")) < 0.1
(judged,) = verdicts.judge_recorded([phases.card("lp12")])
assert judged.verdict.word == judged.recorded_verdict == "NO-GO"
notebook.text(
    f"The recurrence went from {short_us} to {long_us} us, attention from {short_attention_us:g} to "
    f"{long_attention_us:g} us ({long_attention_us / short_attention_us:.1f} times, over "
    f"{value(f'{FLAT}.context-ratio.control.npl4'):g} times the context). So the recurrence rescans nothing: "
    f"{judged.verdict.word} for it as the cause of a gap that grows."
)

# %% [markdown]
# That it is flat needs no measurement. A decode step's cost names no context, nor do the kernel's arguments; attention
# reads its cache for every token. The floors, one layer of the 27B model at the H200's peak bandwidth:

# %%
CONTEXTS = (256, 1024, 4096, 8192, 32768)
attention = next(w for w in kv.cases.WORKLOADS if w.source == "q36-27b.attention")
assert not {"ctx", "context", "seq_lens"} & set(gdn.workload("decode_b128_hk16_hv48_d128").axes)
lines = []
for batch in (1, 128):
    step = gdn.cost(gdn.workload(f"decode_b{batch}_hk16_hv48_d128"), "f32").bytes
    for ctx in CONTEXTS:
        cache = kv.cost(replace(attention, axes={**attention.axes, "batch": batch, "ctx": ctx}), "bf16").bytes
        lines.append(
            (batch, ctx, step / 1e6, cache / 1e6, step / h200.bandwidth.base * 1e6, cache / h200.bandwidth.base * 1e6)
        )
floors = pd.DataFrame(
    lines, columns=["sequences", "context", "GDN MB", "attention MB", "GDN floor us", "attention floor us"]
)
grown = floors.groupby("sequences").agg(["min", "max"])
assert (grown["GDN MB"]["min"] == grown["GDN MB"]["max"]).all()
assert (grown["attention MB"]["max"] > 50 * grown["attention MB"]["min"]).all()
notebook.show(floors)

# %%
FACTS = models.get("q36-27b").facts
state_bytes = FACTS["gdn_state_bytes"].value
kv_token_bytes = FACTS["kv_bytes_per_token"].value / FACTS["attention_layers"].value
break_even = 2 * state_bytes / kv_token_bytes
notebook.text(
    f"A GDN layer moves its {state_bytes / 1e6:.2f} MB twice; an attention layer moves {kv_token_bytes:,.0f} bytes per "
    f"token of context. They meet at {break_even:,.0f} tokens: below, the recurrence is the dearer layer."
)

# %% [markdown]
# The card for measured rows holds two contexts at the same batch against each other:

# %%
found = MEASURED["lp12-kernel"]
notebook.show(notebook.verdicts([found])) if found else notebook.unmeasured("lp12-kernel", "h200")

# %%
found = {
    (name, workload): arms[name].median_us
    for card, name in (("lp12-kernel", "splitkv_bf16"), ("p6-cuda", "cuda_bf16"))
    for workload, arms in notebook.arms(phases.card(card), "h200").items()
    if card == "lp12-kernel" or "_b1_" in workload
}
lines = []
for (name, workload), us in found.items():
    moved = kv.cost(kv.workload(workload), "bf16").bytes
    lines.append((name, workload, moved / h200.bandwidth.base * 1e6, us))
notebook.show(pd.DataFrame(lines, columns=["kernel", "workload", "floor us", "median us"]), code=["kernel", "workload"])

# %%
grown, fixed = {}, {}
for name in ("splitkv_bf16", "cuda_bf16"):
    short, long = (found[name, f"ctx{ctx}_b1_hq24_hkv4_d256"] for ctx in (8192, 32768))
    grown[name], fixed[name] = 100 * (long / short - 1), short - (long - short) / 3  # 32768 is four times 8192
many = [found["splitkv_bf16", f"ctx{ctx}_b128_hq24_hkv4_d256"] for ctx in (1024, 8192)]
assert grown["splitkv_bf16"] < 100 < grown["cuda_bf16"]
notebook.text(
    f"At 128 sequences eight times the context takes {many[1] / many[0]:.1f} times as long: the bytes count. At one "
    f"sequence four times the context adds {grown['splitkv_bf16']:.2f} % where the gate asks for 100: hence PARTIAL. A "
    f"line through the two contexts starts at {fixed['splitkv_bf16']:.1f} us; for the faster kernel, `cuda_bf16` (from "
    f"`p6-cuda`), at {fixed['cuda_bf16']:.1f} us: start, pipeline fill and merge, which do not grow "
    f"(`kernels/kv/NOTES.md`, a fixed cost). With that smaller part the time grows by {grown['cuda_bf16']:.0f} %: the "
    "PARTIAL is a kernel's fixed part at one sequence."
)

# %% [markdown]
# ## 2. LP13: the state in bf16
#
# Half the bytes, so about half the time: recorded per launch on GB10, and in decode throughput with the 27B model.

# %%
core = phases.card("lp13").recorded[0].evidence["gdn_core_time", ""]
per_launch = 100 * (core.candidate / core.candidate_launches / (core.control / core.control_launches) - 1)
decode = {s: sweeps.row(f"lp.sweep.gb10.{s}-state.npl128-pp128-tg128").values["decode_tps"] for s in ("f32", "bf16")}
assert -50 < per_launch < -45
notebook.text(
    f"The recurrence took {-per_launch:.1f} % less per launch; decode went from {decode['f32']:g} to "
    f"{decode['bf16']:g} tok/s ({100 * (decode['bf16'] / decode['f32'] - 1):+.0f} %). And yet it was not made "
    f"the default: KL {value('lp.gate.bf16-ssm.kl.candidate')} against a line of "
    f"{value('lp.gate.bf16-ssm.kl.threshold')}, in a first attempt whose gate at "
    f"{value('lp.gate.bf16-ssm.gate-tokens.passed'):g} tokens had passed; from "
    f"{value('lp.gate.bf16-ssm.gate-tokens.failed'):,.0f} tokens on it failed by "
    f"{value('lp.gate.bf16-ssm.drift-excess.low.candidate'):g} to "
    f"{value('lp.gate.bf16-ssm.drift-excess.high.candidate'):g} times. Why the first gate could not see it, and what "
    "there is to see, is computed below."
)

# %%
found = MEASURED["lp13-kernel"]
notebook.show(notebook.verdicts([found])) if found else notebook.unmeasured("lp13-kernel", "h200")

# %% [markdown]
# ### Beside a bare pass over the states
#
# `cuda_decode` has targets of its own (`gdn-decode-limit`), with both formats of the present kernel in one run. Beside
# it is a bare pass: as many bytes read, negated and written where they lie. Its time is the best sample of all runs of
# the ceilings, the step's time a median.

# %%
LIMIT = phases.card("gdn-decode-limit")
passes_seen, lines = ceilings.latest("h200"), []
for name, arms in notebook.arms(LIMIT, "h200").items():
    row = arms["cuda_decode"]
    axes, width = row.workload, 2 if name.endswith("bf16") else 4
    mib = axes["batch"] * axes["Hv"] * axes["D"] ** 2 * width / 2**20
    bare = passes_seen.get(f"update_{mib:g}_mib")  # none of 1.5 MiB
    bare_us = 2 * mib * 2**20 / bare.value / 1e3 if bare else math.nan
    target = next(g.threshold for g in LIMIT.gate.require if g.workload == name)
    lines.append(("bf16" if width == 2 else "f32", axes["batch"], row.median_us, target, bare_us))
step = pd.DataFrame(lines, columns=["state", "sequences", "us", "target us", "bare us"])
step["over target %"], step["over bare %"] = (100 * (step["us"] / step[c] - 1) for c in ("target us", "bare us"))
notebook.show(step) if lines else notebook.unmeasured(LIMIT.id, "h200")

# %%
missed = ", ".join(f"{r.sequences} ({r.state})" for r in step[step["over target %"] > 0].itertuples())
over = {s: list(rows["over bare %"].dropna()) for s, rows in step.groupby("state")}
assert all(found == sorted(found, reverse=True) for found in over.values())  # the card's workloads rise in sequences
notebook.text(
    f"Over its target: {missed or 'none'}. What the step takes beyond the bare pass shrinks with the batch: "
    + ", ".join(f"{found[0]:.1f} to {found[-1]:.1f} % ({s})" for s, found in over.items())
    + ". A step also reads its ids, q, k and v and writes o; the bare pass goes through memory in order."
) if lines else None

# %% [markdown]
# ### Error growth over 4,096 tokens
#
# The recurrence runs in float64 and, beside it, with float32 arithmetic and the state stored four ways: float32; bf16
# rounded to nearest; bf16 rounded stochastically; and bf16 that is read back only after micro-batches of 512 tokens, as
# in evaluating a text. Keys are normalised, gates are drawn by regime as in the checks ("idle": decay near 1 and
# learning rate near 0 together). Errors are relative, of the outputs over the last 64 tokens.

# %%
growth = error_growth.study()
STORED = [s.name for s in growth.storages]
NEAREST, STOCHASTIC, BATCHED = STORED[1:]
marks = growth.checkpoints[1:]
table = pd.DataFrame(
    [
        {"regime": r, "state": s, **{f"{t:,} tokens": f"{growth.drift(s, r, t):.1e}" for t in marks}}
        for r in growth.regimes
        for s in STORED
    ]
)
assert growth.checkpoints[-1] == 4096
notebook.show(table)


# %%
def draw_growth():
    figure, _ = notebook.canvas(3.4)
    colours = dict(zip(STORED, (draw.SOFT, draw.VERMILLION, draw.GREEN, draw.BLUE), strict=True))
    dashes = dict(zip(STORED, ("-", "-", "--", ":"), strict=True))
    tokens = [2**n for n in range(13)]
    for i, regime in enumerate(("forget", "mixed", "idle")):
        axes = figure.add_axes((0.07 + 0.315 * i, 0.25, 0.28, 0.62), facecolor=draw.CARD)
        for name in STORED:
            errors = [growth.drift(name, regime, t) for t in tokens]
            axes.loglog(tokens, errors, color=colours[name], linestyle=dashes[name], linewidth=1.6, label=name)
        axes.set(ylim=(5e-8, 2), xlim=(1, 4096))
        axes.set_title({"idle": "idle: only remembers"}.get(regime, regime), fontsize=9.5, color=draw.INK)
        axes.tick_params(labelsize=8, colors=draw.INK)
        axes.set_xlabel("tokens", fontsize=8.5, color=draw.INK)
        if i:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("relative error of o", fontsize=8.5, color=draw.INK)
            figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=8, frameon=False)
    return figure


notebook.picture(
    draw_growth(),
    "Relative output error against tokens, log-log, in three regimes: with strong forgetting all states agree; in the "
    "mixed regime bf16 settles at about one and a half per cent; in a head that only remembers, rounding to nearest "
    "keeps growing to most of the signal while stochastic rounding stays ten times lower.",
)

# %%
ORDINARY = ("mixed", "keep", "beta1", "similar")
settled = {r: growth.drift(NEAREST, r, 4096) for r in ORDINARY}
assert all(growth.drift(NEAREST, r, 4096) < 1.1 * growth.drift(NEAREST, r, 1024) for r in ORDINARY)
idle = {s: growth.drift(s, "idle", 4096) for s in STORED}
assert idle[NEAREST] > 8 * idle[STOCHASTIC] > 1000 * idle["f32"]
assert idle[NEAREST] > 15 * growth.drift(NEAREST, "idle", 256)
dearer = [growth.drift(STOCHASTIC, r, 4096) / growth.drift(NEAREST, r, 4096) for r in ORDINARY]
assert 1.2 < min(dearer) < max(dearer) < 1.7
notebook.text(
    f"Where new keys overwrite old roundings the error settles ({min(settled.values()):.1%} to "
    f"{max(settled.values()):.1%} at 4,096 tokens, no more than at 1,024). In a head that only remembers it does not: "
    f"a decay of 1e-4 a token is less than half a unit in the last place of bf16 ({2.0**-9:.1e} of an element), so it "
    f"is rounded away at every token, and the error reaches {idle[NEAREST]:.0%}. Stochastic rounding keeps it at "
    f"{idle[STOCHASTIC]:.1%}, and costs the others {min(dearer):.2f} to {max(dearer):.2f} times their error: a remedy "
    "for heads that need it, not a default. Which heads of a trained model are idle is not known here."
)

# %% [markdown]
# ### The gate that could not fail
#
# The recorded gate asks that the drift at 4,096 tokens be at most so many times the drift at 256. Run in one
# micro-batch, 256 tokens never read the stored state back: the outputs are those of the float32 state, to the bit.

# %%
LINE = value("lp.gate.bf16-ssm.drift-ratio.threshold")
SHORT = int(value("lp.gate.bf16-ssm.gate-tokens.passed"))
f32, unread = growth.at("f32"), growth.at(BATCHED)
assert (growth.squared_error[f32, :, :SHORT] == growth.squared_error[unread, :, :SHORT]).all()  # nothing to see
BOTH = ("never read: 4096 / it", "read each token: 4096 / it")
trap = []
for r in growth.regimes:
    ratios = {s: growth.drift(s, r, 4096) / growth.drift(s, r, SHORT) for s in (BATCHED, NEAREST)}
    trap.append((r, growth.drift(BATCHED, r, SHORT), ratios[BATCHED], growth.drift(NEAREST, r, SHORT), ratios[NEAREST]))
trap = pd.DataFrame(
    trap,
    columns=[
        "regime",
        f"never read: drift at {SHORT}",
        BOTH[0],
        f"read each token: drift at {SHORT}",
        BOTH[1],
    ],
)
failed = trap[trap[BOTH[0]] > LINE]
assert set(trap.regime) - set(failed.regime) == {"forget"}
assert (trap[trap.regime.isin(ORDINARY)][BOTH[1]] < 2).all()
notebook.show(trap)

# %%
ordinary = trap[trap.regime.isin(("mixed", "keep", "beta1"))][BOTH[0]]
notebook.text(
    f"So the gate passes at {SHORT} tokens whatever the state is stored in, and over 4,096 tokens the ratio is "
    f"{ordinary.min():.0f} to {ordinary.max():.0f} in ordinary regimes: the record's order of magnitude, though its "
    "drift is of logits and the size of its micro-batch is not stated. But that is no growth: the denominator is "
    "float32's error. With the state read back at every token, as decode does, "
    f"the same regimes keep within {trap[trap.regime.isin(ORDINARY)][BOTH[1]].max():.1f} times, and what fails is "
    "the drift itself, a per cent or two, which a limit on the ratio does not ask about. A gate on a stored state has "
    "to read it back at every token, and to limit the error and its growth."
)

# %% [markdown]
# ## 3. LP10: how often the state travels
#
# Three candidates do the same arithmetic, to the bit (tests): gathered, updated and copied back (six passes over a
# state); gathered and written in place, as after patch 0018 (four); read and written by id, as after 0019 (two). Every
# cell from one run of `lp10-kernel`, in us a layer; ids permuted, or in the pool's order ("identity").

# %%
FORMS = {"recurrent_decode_copied": 6, "recurrent_decode_gathered": 4, "recurrent_decode": 2}
lp10 = notebook.arms(phases.card("lp10-kernel"), "h200")
BATCHES = sorted({arms["recurrent_decode"].workload["batch"] for arms in lp10.values()})
layer = {
    (axes.get("ids", "permuted"), axes["batch"]): {form: arms[form].median_us for form in FORMS}
    for arms in lp10.values()
    for axes in [arms["recurrent_decode"].workload]
}
assert len({row.run for arms in lp10.values() for row in arms.values()}) == 1
cells = [(ids, f) for ids in ("permuted", "identity") for f in FORMS]
pivot = [{"ids": i, "form": f, "passes": FORMS[f], **{f"B = {b}": layer[i, b][f] for b in BATCHES}} for i, f in cells]
notebook.show(pd.DataFrame(pivot), code=["form"])

# %%
found = MEASURED["lp10-kernel"]
notebook.show(notebook.verdicts([found])) if found else notebook.unmeasured("lp10-kernel", "h200")

# %% [markdown]
# **As shares of a decode step** of Qwen3.6-27B on the H200: the recurrence in all GDN layers in one of the three forms,
# and the rest from `lab/judge/decode_step.py`, attention at 256 tokens (the record: 128 and 128) and the NVFP4 weights,
# each from the measured row nearest in batch, scaled by the floors. Norms, convolution, sampling and gaps are left out,
# so shares and gains are upper bounds, but at 8 sequences, whose attention is scaled from one's and too long.

# %%
rows = sorted((r for r in store.rows(device="h200") if r.status == "ok"), key=lambda r: r.run)
timed = list({(r.name, r.workload_id): r for r in rows}.values())  # the newest
REST = {
    "attention": [r for r in timed if r.precision == "bf16" and r.workload.get("page") == 16],
    "weights": [r for r in timed if r.precision.startswith("nvfp4-w4a16") and "M" in r.workload],
}
COPIED, GATHERED, BY_ID = FORMS
lines, gain = [], {}
for (ids, batch), by in sorted(layer.items(), key=lambda cell: (cell[0][0] != "permuted", cell[0][1])):
    needed = [p for p in decode_step.parts(models.get("q36-27b"), batch, 256) if p.name in REST]
    others = decode_step.from_rows(h200, needed, REST)
    state = {form: FACTS["gdn_layers"].value * us for form, us in by.items()}
    total = {form: us + decode_step.total_us(others) for form, us in state.items()}
    gain[ids, batch] = [100 * (total[a] / total[b] - 1) for a, b in ((COPIED, GATHERED), (GATHERED, BY_ID))]
    shares = [100 * (1 - total[b] / total[a]) for a, b in ((COPIED, GATHERED), (GATHERED, BY_ID))]
    lines.append(
        {"ids": ids, "B": batch, **{f"{t.part} ms": t.us / 1e3 for t in others}, "GDN ms, copied": state[COPIED] / 1e3,
         "by id": state[BY_ID] / 1e3, "copy back, % of its step": shares[0], "gather, % of its step": shares[1],
         "0018 gains %": gain[ids, batch][0], "0019 gains %": gain[ids, batch][1]}
    )  # fmt: skip
notebook.show(pd.DataFrame(lines))

# %%
SHARE = "lp.a2-phase2-decompose.gb10.share.control.bucket"
shares = {b: value(f"{SHARE}{b}.npl128") for b in ("d2d-state-copy", "get-rows", "gated-delta-net")}
patches = (f"lp.patch-{n}.gb10.decode-agg.candidate.npl128.npp128" for n in ("0018", "0019"))
recorded_gain = [recorded.figure(i).delta_pct for i in patches]
here = gain["permuted", 128]
ordered = [abs(a - b) for n in BATCHES for a, b in zip(gain["permuted", n], gain["identity", n], strict=True)]
assert all(a > b for a, b in zip(here, recorded_gain, strict=True))
whole = layer["permuted", 128][COPIED] / layer["permuted", 128][BY_ID]
on_gb10 = sum(shares.values()) / shares["gated-delta-net"]
notebook.text(
    f"Recorded on GB10 at 128 sequences: {recorded_gain[0]:+.1f} % (0018) and {recorded_gain[1]:+.1f} % (0019). On the "
    f"H200 at most {here[0]:+.1f} and {here[1]:+.1f} %; at one sequence {gain['permuted', 1][0]:+.1f} and "
    f"{gain['permuted', 1][1]:+.1f} %, where the weights are the step. Both patches together make the layer "
    f"{whole:.2f} times as fast at 128 sequences, on GB10 by its shares {on_gb10:.2f} times; that, and the parts left "
    f"out, make the H200's gains larger. The order of the ids moves a gain by {max(ordered):.1f} points at most."
)

# %% [markdown]
# ## 4. IK1, IK2, IK4, IK6: whose state it is
#
# A flat batch of tokens becomes launches in which each sequence appears once, with a row of its own. One sequence is
# used where it stands; equal lengths side by side are one launch; anything else takes a safe path. Two sequences on one
# row are refused. The tests run any interleaving against the reference and the code words at the record's sizes.

# %%
SLOTS = {0: 2, 1: 0, 2: 1}
EXAMPLES = {
    "one sequence": [0, 0, 0],
    "decode": [1, 0, 2],
    "equal": [0, 0, 1, 1],
    "ragged": [0, 0, 0, 1],
    "interleaved": [0, 1, 0, 0, 2],
}
plans = {name: batches.decompose(order, SLOTS) for name, order in EXAMPLES.items()}
kinds = {name: {x.kind for x in plan} for name, plan in plans.items()}
assert kinds == {
    "one sequence": {"single"},
    "decode": {"batched"},
    "equal": {"batched"},
    "ragged": {"ragged"},
    "interleaved": {"stepwise"},
}
notebook.show(
    pd.DataFrame(
        [
            (name, str(EXAMPLES[name]), x.kind, len(x.sequences), str(x.lengths), str(x.slots))
            for name, plan in plans.items()
            for x in plan
        ],
        columns=["batch", "sequence of each token", "launch", "n_seqs", "tokens", "slots"],
    )
)

# %%
moving = [x for s in (0, 0, 1, 0, 2) for x in batches.decompose([s], SLOTS)]
stale = {"with the slot": batches.stale_reuses(moving), "without it": batches.stale_reuses(moving, lambda x: x.lengths)}
assert stale["with the slot"] == 0 < stale["without it"]
notebook.text(
    f"A captured launch of one sequence holds the address of its state. Over {len(moving)} single steps that move "
    f"between slots, a key with the slot reuses a stale graph {stale['with the slot']} times, a key without it "
    f"{stale['without it']} times. The source gives no figure for this (card `ik6-signature`)."
)

# %% [markdown]
# **IK4: what one sequence pays** for the call that serves any number, against the kernel on its state alone, in a pool
# of eight; `cuda_decode` reads the sequence's id first. `GO` by the median and no more: the interval lies across the
# line of 1 %. Where an arm's copies lie does not make that (`ik4-null`, the same kernel under two names).

# %%
(arms,) = notebook.arms(phases.card("ik4-kernel"), "h200").values()
us = {name: arms[name].median_us for name in ("cuda_decode_alone", "cuda_decode_served", "cuda_decode")}
lines = [{"arm": n, "median us": t, "over alone %": 100 * (t / us["cuda_decode_alone"] - 1)} for n, t in us.items()]
notebook.show(pd.DataFrame(lines), code=["arm"])

# %%
assert "across the line" in MEASURED["ik4-kernel"].verdict.reason
notebook.show(notebook.verdicts([MEASURED["ik4-kernel"]]))
