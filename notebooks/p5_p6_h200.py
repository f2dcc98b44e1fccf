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
# # P5 and P6, asked again with kernels at their limit
#
# GB10's record says NO-GO twice: a six-kernel Gated DeltaNet pipeline instead of one fused kernel (P5), and a KV cache
# of half the bytes (P6). The notebooks `gdn` and `kv` replay those verdicts. Here the same lines are asked of an H200,
# with kernels written for it, at the record's shapes; what does not come from a card, a shape, a recorded figure or a
# measured row is not said.

# %%
from __future__ import annotations

import pandas as pd

from lab import devices, evidence, families, models, notebook, phases, recorded, roofline, sweep_plots

families.interpret_on_cpu()  # before the kernels are imported: without a GPU they run in Triton's interpreter

from kernels.gdn import cost as gdn_cost

gdn = families.load("gdn")
gb10, h200 = devices.get("gb10"), devices.get("h200")
P5 = [phases.card(i) for i in ("p5-cuda", "p5-35b", "p5-chunk-length", "gdn-nmse")]
P6 = [phases.card(i) for i in ("p6-cuda", "kv-q8-limit", "kv-page64", "kv-batch-sawtooth")]


def value(figure_id: str) -> float:
    """A recorded figure's number."""
    return float(recorded.figure(figure_id).value)


def judged(card: phases.Card) -> object:
    """The verdict on the committed rows in its own words, or that there are none."""
    verdict = notebook.measured(card.id, h200.id)
    return notebook.show(notebook.verdicts([verdict]), code=["phase"]) if verdict else unmeasured(card)


def unmeasured(card: phases.Card) -> object:
    """The sentence that stands where rows are missing."""
    return notebook.unmeasured(card.id, h200.id)


def times(card: phases.Card) -> object:
    """Every arm of every workload in us, each of one run."""
    found = notebook.arms(card, h200.id)
    lines = [{"workload": w, **{n: rows[n]["median_us"] for n in sorted(rows)}} for w, rows in found.items()]
    return notebook.show(pd.DataFrame(lines), code=["workload"]) if found else unmeasured(card)


def uncovered(card: phases.Card) -> str:
    """The workloads of a card without rows of both its arms."""
    found = notebook.arms(card, h200.id)
    missing = [w for w in card.workloads if not {card.control, card.candidate} <= found.get(w, {}).keys()]
    return f" Without rows: {', '.join(f'`{w}`' for w in missing)}." if missing else ""


# %% [markdown]
# ## 1. The questions

# %%
asked = [{"phase": c.id, "question": c.question, "if it fails": c.null} for c in (*P5, *P6)]
notebook.show(pd.DataFrame(asked), code=["phase"])

# %% [markdown]
# ## 2. P5 on GB10: what bytes and flops alone predict
#
# Both recorded times are microseconds per prefill token over the GDN layers of Qwen3.6-35B-A3B. Each algorithm has two
# terms: the bytes that it moves over the bandwidth, and the flops of its products over a peak. The fused kernel moves
# the activations and keeps the state; the pipeline also writes and reads what its six kernels hand to each other. Both
# were float32 in memory and TF32 in the products; GB10's TF32 peak is not stated, so the flops term is shown at the
# bf16 peak, which is above it, and at the float32 peak of the vector units, which is below.

# %%
layers = int(models.get("q36-35b-a3b").facts["gdn_layers"].value)
shape = gdn.workload("b32_t2048_hk16_hv32_d128")  # npl 32, npp 2048: the recorded run
per_token = layers / (shape["batch"] * shape["T"])
RECORDED = {
    "M5, fused": value("lp.p5.gb10.gdn-us-per-tok.control.npp2048.itemm5"),
    "FLA, six kernels": value("lp.p5.gb10.gdn-us-per-tok.candidate.npp2048.itemfla"),
}
FORMS = [("M5, fused", 16, False), *(("FLA, six kernels", chunk, True) for chunk in (16, 32, 64))]
lines = []
for name, chunk, through_memory in FORMS:
    cost = gdn_cost.algorithm_cost(shape, chunk, 4, through_memory)
    terms = {pipe: roofline.place(gb10, cost.flops, cost.bytes, pipe) for pipe in ("bf16", "f32")}
    predicted = [max(t.memory_us, t.compute_us) * per_token for t in terms.values()]
    lines.append(
        {
            "form": name,
            "chunk": chunk,
            "MB/token": cost.bytes * per_token / 1e6,
            "bytes, us": terms["bf16"].memory_us * per_token,
            "flops at bf16's peak, us": terms["bf16"].compute_us * per_token,
            "flops at f32's peak, us": terms["f32"].compute_us * per_token,
            "decided by": " or ".join(dict.fromkeys(t.bound for t in terms.values())),
            "predicted us": max(predicted),
            "recorded us": RECORDED[name],
            "error %": 100 * (max(predicted) / RECORDED[name] - 1),
        }
    )
terms = pd.DataFrame(lines)
assert (terms["predicted us"] < terms["recorded us"]).all()
notebook.show(terms)

# %%
fused, pipeline = terms.iloc[0], terms.iloc[1:]
assert set(terms["decided by"]) == {"memory"}  # at either peak: bytes decide on GB10
assert (terms["error %"] < -45).all()
unexplained = fused["recorded us"] - fused["predicted us"]
extra = RECORDED["FLA, six kernels"] - RECORDED["M5, fused"]
ratios = pipeline["predicted us"] / fused["predicted us"]
notebook.text(
    f"**The bytes decide, and they are not enough.** At {gb10.bandwidth.value:g} {gb10.bandwidth.unit} the fused form "
    f"needs {fused['predicted us']:.1f} us a token and took {fused['recorded us']:.1f} ({fused['error %']:.0f} %); the "
    f"pipeline needs {pipeline['predicted us'].min():.1f} to {pipeline['predicted us'].max():.1f}, depending on its "
    f"chunk, and took {RECORDED['FLA, six kernels']:.1f}. The model gets the order right and its size wrong: "
    f"{ratios.min():.1f} to {ratios.max():.1f} times as long is predicted, "
    f"{RECORDED['FLA, six kernels'] / RECORDED['M5, fused']:.1f} was recorded. It misses {unexplained:.0f} us of the "
    "fused kernel, which neither bytes nor flops hold: what is left is latency, each chunk waiting for the one "
    f"before, and traffic on the chip, with a state of {shape['D'] ** 2 * 4 / 1024:.0f} KB a head in shared memory; "
    "no recorded figure divides the two. "
    f"Of the {extra:.0f} us by which the pipeline was "
    f"slower its bytes explain {(pipeline['predicted us'] - fused['predicted us']).min():.0f} to "
    f"{(pipeline['predicted us'] - fused['predicted us']).max():.0f}."
)

# %%
chunk, sms = int(fused["chunk"]), gb10.fact("sms").value
steps = shape["batch"] * shape["Hv"] * shape["T"] / chunk / sms  # of one SM and layer
step_us = fused["recorded us"] / per_token / steps
products_us = step_us * fused["flops at bf16's peak, us"] / fused["recorded us"]
assert products_us < step_us / 10
notebook.text(
    f"Seen as a chain: {shape['batch']} sequences of {shape['Hv']} heads in chunks of {chunk} are {steps:,.0f} chunk "
    f"steps for each of {sms:g} SMs and layer, so the recorded time is {step_us:.1f} us of an SM for one chunk of one "
    f"head. Its share of the bf16 peak would do that step's products in {products_us:.2f} us."
)

# %% [markdown]
# ## 3. P5 on the H200
#
# `p5-35b` is P5's own question at the record's shape; `p5-cuda` puts a third form beside both, a parallel preparation
# and a scan whose state never leaves the registers.

# %%
judged(P5[0])

# %%
times(P5[0])

# %%
found = {w: rows for w, rows in notebook.arms(P5[0], h200.id).items() if {"cuda_scan", "split_pipeline"} <= rows.keys()}
gains = [
    f"{100 * (1 - r['cuda_scan']['median_us'] / r['split_pipeline']['median_us']):.0f} % (`{w}`)"
    for w, r in found.items()
]
notebook.text(f"The third form takes {', '.join(gains)} off the pipeline's time.{uncovered(P5[0])}") if found else None

# %%
judged(P5[1])

# %% [markdown]
# The two terms of section 2 for this device, with bf16 in memory and in the products and chunks of 64, beside the rows
# of that card. `cuda_scan` stands beside the terms of a form that keeps everything on the chip, which it does not: its
# preparation hands over blocks through memory.

# %%
lines = []
for w, rows in notebook.arms(P5[1], h200.id).items():
    for name, through_memory in (("fused_chunk", False), ("split_pipeline", True), ("cuda_scan", False)):
        cost = gdn_cost.algorithm_cost(gdn.workload(w), gdn_cost.CHUNK, 2, through_memory)
        term = roofline.place(h200, cost.flops, cost.bytes, cost.pipe)
        us = rows[name]["median_us"]
        line = {"workload": w, "form": name, "bytes, us": term.memory_us, "flops, us": term.compute_us}
        line |= {"decided by": term.bound, "predicted us": term.floor_us, "measured us": us}
        lines.append(line | {"error %": 100 * (term.floor_us / us - 1)})
here = pd.DataFrame(lines)
notebook.show(here, code=["workload", "form"]) if lines else unmeasured(P5[1])

# %%
said = "Nothing is said about the terms on the H200 until rows are committed."
if lines:
    by = here.set_index(["form", "workload"])
    whole, split = by.loc["fused_chunk"], by.loc["split_pipeline"]
    predicted, measured = (split[c] / whole[c] for c in ("predicted us", "measured us"))
    assert set(here["decided by"]) == {"memory"}
    assert (predicted > 4).all()
    assert (measured < 1).all()  # the order turns round
    off = {form: by.loc[form]["error %"] for form in ("fused_chunk", "split_pipeline", "cuda_scan")}
    said = (
        f"**The bytes decide by arithmetic here too, and the rows turn the order round.** The pipeline should take "
        f"{predicted.min():.1f} to {predicted.max():.1f} times as long as the fused kernel and takes "
        f"{measured.min():.2f} to {measured.max():.2f} times as long. Its errors: "
        + ", ".join(f"{e.min():.1f} to {e.max():.1f} % (`{form}`)" for form, e in off.items())
        + ". It errs most where it erred most on GB10, in the fused kernel, whose chain of dependent steps holds the "
        "preparation, once for every tile of columns: 32 sequences do not hide it. `p5-cuda` bears that out: with the "
        "preparation off the chain and the state still on the chip, a form with fewer bytes than the pipeline wins."
    )
notebook.text(said)

# %% [markdown]
# **Chunks of 16, 32 and 64** in the one Triton kernel that takes all three. GB10's source found no gain in 64; its
# shared memory holds 99 KB a block. The rows feed the router's table (`lab routes gdn`).

# %%
judged(P5[2])

# %%
times(P5[2])

# %%
found = {w: r for w, r in notebook.arms(P5[2], h200.id).items() if {"fused_chunk_c16", "fused_chunk"} <= r.keys()}
slower = [r["fused_chunk_c16"]["median_us"] / r["fused_chunk"]["median_us"] for r in found.values()]
assert min(slower, default=2) > 1  # the words below
said = f"Chunks of 16 take {min(slower):.2f} to {max(slower):.2f} times as long as chunks of 64" if slower else ""
notebook.text(
    f"{said} in {len(found)} of {len(P5[2].workloads)} cells. GB10's source found no "
    f"gain; here fewer dependent steps outweigh what the larger chunk spills.{uncovered(P5[2])}"
) if slower else None

# %% [markdown]
# **The error beside fla-core's**, each output by itself: NMSE on the same inputs against the recurrence in float64. The
# tolerance of this family's bf16 precision is on the relative error, the root of it.

# %%
judged(P5[3])

# %%
found = notebook.arms(P5[3], h200.id)
lines = [
    {"workload": w, "arm": name, **{f"NMSE of {o}": e**2 for o, e in evidence.errors(row).items() if o}}
    for w, rows in found.items()
    for name, row in rows.items()
]
smaller = [
    w
    for w, rows in found.items()
    if {"cuda_scan", "fla_chunk"} <= rows.keys()
    and all(e <= evidence.errors(rows["fla_chunk"])[o] for o, e in evidence.errors(rows["cuda_scan"]).items())
]
notebook.show(pd.DataFrame(lines), code=["workload", "arm"]) if found else unmeasured(P5[3])

# %%
notebook.text(
    f"`cuda_scan` has the smaller NMSE, of o and of the final state, in {len(smaller)} of {len(found)} cells with "
    f"rows.{uncovered(P5[3])}"
) if found else None

# %%
stated = {o: value(f"lp.p5.gb10.nmse.candidate.item{o}") for o in ("o", "final-state")}
notebook.text(
    "The recorded pipeline, with TF32 products and float32 outputs, had an NMSE of "
    + " and ".join(f"{e:.1e} ({o})" for o, e in stated.items())
    + f". A bf16 output alone is {gdn.cases.ROUNDING['bf16'] ** 2:.1e}: only outputs kept in float32 compare."
)

# %% [markdown]
# `gdn-f32-output` keeps them: fp16 operands, float32 out. The inputs are this project's, not the record's.

# %%
KEPT = phases.card("gdn-f32-output")
kept = notebook.arms(KEPT, h200.id)
lines = [
    {
        "workload": w,
        "arm": name,
        "median us": row["median_us"],
        **{f"NMSE of {o}": e**2 for o, e in evidence.errors(row).items() if o},
    }
    for w, rows in kept.items()
    for name, row in rows.items()
]
notebook.show(pd.DataFrame(lines), code=["workload", "arm"]) if kept else unmeasured(KEPT)

# %%
judged(KEPT)

# %% [markdown]
# ## 4. P6 on the H200
#
# The kernel alone, with the fastest kernel of each format and FlashAttention-3 beside them. What it is worth in a step
# is `p6-step`'s question (notebook `kv_ceiling`).

# %%
judged(P6[0])

# %%
times(P6[0])

# %%
found = notebook.arms(P6[0], h200.id)
us = {w: {arm: row["median_us"] for arm, row in rows.items()} for w, rows in found.items()}
said = "Nothing is said about P6 on the H200 until rows are committed."
if len(us) == len(P6[0].workloads):
    saved = {w: 100 * (1 - arms["cuda_fp8"] / arms["cuda_bf16"]) for w, arms in us.items()}
    least, most = min(saved, key=saved.__getitem__), max(saved, key=saved.__getitem__)
    short, long = (us[f"ctx{ctx}_b1_hq24_hkv4_d256"] for ctx in (8192, 32768))
    fixed = [short[arm] - (long[arm] - short[arm]) / 3 for arm in ("cuda_bf16", "cuda_fp8")]  # 32768 is 4 x 8192
    slope = (long["cuda_fp8"] - short["cuda_fp8"]) / (long["cuda_bf16"] - short["cuda_bf16"])
    assert 0.9 < fixed[0] / fixed[1] < 1.1  # the part that half the bytes do not touch
    said = (
        f"Half the bytes take {saved[least]:.0f} % (`{least}`) to {saved[most]:.0f} % (`{most}`) off the kernel. "
        f"A line through the two workloads of one sequence starts at {fixed[0]:.1f} us (bf16) and {fixed[1]:.1f} us "
        f"(fp8), a part that the format does not touch; what the tokens add shrinks to {slope:.2f} of bf16's."
    )
notebook.text(said)

# %%
judged(P6[1])

# %%
times(P6[1])

# %%
judged(P6[2])

# %%
times(P6[2])

# %% [markdown]
# ## 5. One sequence more
#
# A kernel that gives whole heads to whole SMs is level until they are all taken and jumps at the next sequence. Four kv
# heads of 33 sequences are 132 pieces for 132 SMs: there the jump would come at 34 and, a wave later, at 67.

# %%
judged(P6[3])

# %%
found = notebook.arms(P6[3], h200.id)
curves: dict[str, list[tuple[int, float]]] = {}
for rows in found.values():
    for name, row in rows.items():
        curves.setdefault(name, []).append((row["workload"]["batch"], row["median_us"] / row["workload"]["batch"]))
title = f"{h200.name}: decode attention at 8,192 tokens, D = 256, cold L2"
notebook.picture(
    sweep_plots.batch_curves(curves, title, marks=(32, 64)),
    "Time per sequence against the batch for each kernel, with lines at 32 and 64 sequences.",
) if curves else unmeasured(P6[3])

# %%
jumps = []
for name, points in sorted(curves.items()):
    at = dict(points)
    pairs = [(n, base) for base, after in ((32, (33, 34)), (64, (65, 66, 67))) for n in after if {n, base} <= at.keys()]
    jumps.append({"arm": name, **{f"{n} after {base}, %": 100 * (at[n] / at[base] - 1) for n, base in pairs}})
notebook.show(pd.DataFrame(jumps), code=["arm"]) if jumps else None

# %% [markdown]
# ## 6. What would change the verdicts

# %%
notebook.show(pd.DataFrame([{"phase": c.id, "what would change it": c.limits} for c in (*P5, *P6)]), code=["phase"])
