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
# # An fp8 KV cache: what a whole decode step can gain, and what fits
#
# P6 said no on GB10. Half the bytes of the cache are half of attention's time at best, and attention is one part of a
# step beside the weights and the recurrent state. This notebook works the ceiling out before any kernel is tried, first
# from bytes alone, then from measured kernels summed at the models' shapes, and asks for room as a verdict of its own.
# A step that was summed and not run is modelled evidence, and every word below says so.

# %%
from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lab import draw, value
from lab.base import devices, models
from lab.card import phases, recorded
from lab.card.gate import Reading
from lab.judge import decode_step, verdicts
from lab.row import store
from lab.write import notebook

MODELS = {"dense": models.get("q36-27b"), "moe": models.get("q36-35b-a3b")}
DEVICES = {"gb10": (devices.get("gb10"), "fp4"), "h200": (devices.get("h200"), "bf16")}  # the pipe weights run on
H200 = DEVICES["h200"][0]
CONTEXTS, SEQUENCES = (256, 512, 1024, 4096, 8192, 32768), (1, 8, 32, 128)
BYTES = {"bf16": 2.0, "fp8": 1.0, "Q8_0": 34 / 32}
SAVED = {name: 1 - b / BYTES["bf16"] for name, b in BYTES.items()}
STEP, ROOM = (phases.card(i) for i in ("p6-step", "p6-room"))
PAGED = [phases.card(i) for i in ("lp1-kernel", "lp1-cuda-kernel", "kv-page64")]
GATE = recorded.figure("lp.gate.p6.threshold.decode").value


notebook.question(STEP)

# %% [markdown]
# ## 1. The ceiling from bytes alone
#
# Each part at its roofline: the cache, the recurrent state read and written, and the weights that a step touches (all
# of a dense model; of a mixture the experts that the batch's tokens choose). fp8 saves half of the cache.

# %%
model_rows = []
for m in MODELS.values():
    layers, attention = (m.fact(n).value for n in ("layers", "attention_layers"))
    model_rows.append(
        {
            "model": m.name,
            "layers with a cache": f"{attention:.0f} of {layers:.0f}",
            "cache a token, KiB": decode_step.cached_bytes(m) / 1024,
            "state a sequence, MB": decode_step.state_bytes(m) / 1e6,
            **{f"weights at {n}, GB": decode_step.read_weight_bytes(m, n) / 1e9 for n in (1, 8, 128)},
        }
    )
assert decode_step.cached_bytes(MODELS["dense"]) == MODELS["dense"].fact("kv_bytes_per_token").base
notebook.show(pd.DataFrame(model_rows))


# %%
def by_floors(device: str, model: str, sequences: int, context: int, saved: float = SAVED["fp8"]) -> float:
    """The ceiling in % by floors."""
    where, pipe = DEVICES[device]
    of = decode_step.parts(MODELS[model], sequences, context, pipe=pipe)
    return decode_step.ceiling_pct(decode_step.floors(where, of), saved)


table = pd.DataFrame(
    [
        {"device": d, "model": m, "sequences": n, **{f"ctx {c:,}": by_floors(d, m, n, c) for c in CONTEXTS}}
        for d in DEVICES
        for m in MODELS
        for n in SEQUENCES
    ]
)
notebook.show(table)

# %%
both = table.set_index(["device", "model", "sequences"])
apart = (both.loc["h200"] / both.loc["gb10"] - 1).abs().max(axis=1)
assert apart.drop(("dense", 128)).max() < 1e-9  # every part waits for memory on both: bandwidth cancels
assert apart["dense", 128] > 0.05
assert not both.loc["h200"].loc[(slice(None), slice(None)), ["ctx 256", "ctx 512"]].gt(GATE).any().any()
longest = {d: both.loc[(d, "dense", 128), "ctx 8,192"] for d in DEVICES}
q8, fp8 = (by_floors("h200", "dense", 32, 8192, SAVED[n]) for n in ("Q8_0", "fp8"))
notebook.text(
    "Where all three parts wait for memory, the ceiling does not depend on the device: both tables agree except for "
    f"{max(SEQUENCES)} sequences on the dense model, where the H200's 16-bit products, which stand in for FP4, take "
    f"longer than reading the weights ({longest['h200']:.0f} against {longest['gb10']:.0f} % at 8,192). Up to 512 "
    f"tokens no batch passes {GATE:g} % on the H200. Q8_0 saves {SAVED['Q8_0']:.1%} of the bytes and not half: its "
    f"ceiling at 8,192 x 32 is {q8:.1f} instead of {fp8:.1f} %."
)

# %% [markdown]
# ## 2. Beside what was recorded on GB10
#
# The source measured attention and the step at six points, and before that worked out a ceiling by hand. Ours takes
# nothing from either: only the models' shapes, the bytes of their weights and the bandwidth.

# %%
POINTS = [(m, ctx, npl) for ctx, npl in ((512, 128), (4096, 8), (8192, 8)) for m in MODELS]
lines = []
for m, ctx, npl in POINTS:
    times = decode_step.floors(DEVICES["gb10"][0], decode_step.parts(MODELS[m], npl, ctx, pipe="fp4"))
    key = f"{m}-ctx{ctx}-npl{npl}"
    step_ms = value(f"lp.gate.p6.step-{key}") / 1e3
    lines.append(
        {"model": m, "context": ctx, "sequences": npl, "step, recorded ms": step_ms,
         "step, floor ms": decode_step.total_us(times) / 1e3, "ceiling, recorded %": value(f"lp.gate.p6.ceiling-{key}"),
         "ceiling, by floors %": decode_step.ceiling_pct(times, 0.5)}
    )  # fmt: skip
against = pd.DataFrame(lines)
ratio = against["ceiling, by floors %"] / against["ceiling, recorded %"]
assert ratio.between(0.75, 1.25).all(), ratio
assert (against["step, floor ms"] < against["step, recorded ms"]).all()
notebook.show(against)

# %%
prior = pd.DataFrame(
    [
        {"context": c, "by hand %": value(f"lp.p6-analytical.gb10.decode-saving-max.candidate.ctx{c}"),
         **{f"by floors, {n} sequences %": by_floors("gb10", "moe", n, c) for n in (8, 32, 128)}}
        for c in (256, 1024, 2048, 4096, 8192)
    ]
)  # fmt: skip
assert (prior["by hand %"] > prior["by floors, 8 sequences %"]).all()
assert (prior["by hand %"] < prior["by floors, 128 sequences %"]).all()
notebook.show(prior)

# %%
proxy = {
    "dense": value("lp.p6.gb10.decode-delta.candidate.ctx8192.kvq8-0"),
    "moe": value("lp.p6.gb10.decode-delta.candidate.ctx8192.kvq8-0--2"),
}
promised = {m: by_floors("gb10", m, 8, 8192, SAVED["Q8_0"]) for m in MODELS}
assert all(proxy[m] < promised[m] / 10 for m in MODELS)
notebook.text(
    f"From bytes alone the ceilings come within {100 * (ratio - 1).abs().max():.0f} % of those from measured times, so "
    "the model may be asked about another device. The ceiling by hand belongs to a batch between 8 and 128 sequences. "
    f"At 8,192 x 8 Q8_0 could have gained {promised['dense']:.1f} % (dense) and {promised['moe']:.1f} % (MoE); the "
    f"proxy gained {proxy['dense']:+.2f} and {proxy['moe']:+.2f} %."
)

# %% [markdown]
# ## 3. A step summed from measured kernels, H200
#
# Attention, state and weights each from the measured row nearest in batch and context, ours or a library's, whichever
# is closest to its roofline there; where the cell itself was not measured, scaled by the ratio of the two floors. Both
# forms of the cache lie in pages of 16 tokens. NVFP4 products of the dense model stand for the mixture's expert
# products.

# %%
rows = store.rows(device="h200")


def newest(chosen: list[dict]) -> list[dict]:
    """Of each kernel and workload the row of the newest run."""
    return list({(r.name, r.workload_id): r for r in sorted(chosen, key=lambda r: r.run)}.values())


def kernels(*precisions: str) -> list[dict]:
    """Rows that are ok and whose precision is one of these, without those of a prefill."""
    good = [r for r in rows if r.status == "ok" and r.precision in precisions]
    return newest([r for r in good if r.workload.get("op", "decode") == "decode"])


FORMS = {"bf16": ("bf16",), "fp8": ("fp8-kv", "fp8-kv-unit")}
UNPAGED = {"torch_sdpa", "contiguous_bf16", "in_order_bf16", "cuda_contiguous_bf16"}
cached = {form: [r for r in kernels(*precisions) if r.workload.get("page") == 16 and r.name not in UNPAGED]
          for form, precisions in FORMS.items()}  # fmt: skip
recurrent = [r for r in kernels("f32") if "batch" in r.workload and "ctx" not in r.workload]
products = [r for r in kernels("nvfp4-w4a16", "nvfp4-w4a16-rounded") if "M" in r.workload]


def summed(model: str, sequences: int, context: int, form: str) -> tuple[decode_step.Time, ...]:
    """The parts of a step on the H200 with the cache in `form`."""
    of = decode_step.parts(MODELS[model], sequences, context, BYTES[form])
    return decode_step.from_rows(H200, of, {"attention": cached[form], "state": recurrent, "weights": products})


cells = [tuple(w.replace("x", "-").split("-")) for w in STEP.workloads]
lines, readings = [], {}
for workload, (m, ctx, npl) in zip(STEP.workloads, cells, strict=True):
    before, after = (summed(m, int(npl), int(ctx), form) for form in ("bf16", "fp8"))
    ceiling = decode_step.ceiling_pct(before, SAVED["fp8"])
    rates = [1e6 * int(npl) / decode_step.total_us(t) for t in (before, after)]
    gain = 100 * (rates[1] / rates[0] - 1)
    readings["decode_saving_max", workload] = Reading("%", candidate=ceiling, kind="modelled")
    readings["decode_tps", workload] = Reading("tok/s", control=rates[0], candidate=rates[1], kind="modelled")
    parts_ms = {f"{t.part} ms": t.us / 1e3 for t in before}
    lines.append(
        {"workload": workload, **parts_ms, "share %": 100 * decode_step.share(before), "ceiling %": ceiling,
         "ceiling by floors %": by_floors("h200", m, int(npl), int(ctx)), "fp8 attention ms": after[0].us / 1e3,
         "gain %": gain, "attention from": before[0].basis.split("_hq")[0], "fp8 from": after[0].basis.split("_hq")[0]}
    )  # fmt: skip
steps = pd.DataFrame(lines)
floor_steps = {w: decode_step.total_us(decode_step.floors(H200, decode_step.parts(MODELS[m], int(npl), int(ctx))))
               for w, (m, ctx, npl) in zip(STEP.workloads, cells, strict=True)}  # fmt: skip
total = steps["attention ms"] + steps["state ms"] + steps["weights ms"]
assert (1e3 * total > list(floor_steps.values())).all()  # no sum of kernels beats the sum of their floors
notebook.show(steps, code=["workload", "attention from", "fp8 from"])

# %%
judged = verdicts.judgement(STEP, readings, "modelled", "h200", None)
gains = steps.set_index("workload")["gain %"]
passed = [w for w in STEP.workloads if gains[w] > GATE and readings["decode_saving_max", w].candidate > GATE]
assert judged.verdict.word == ("CONDITIONAL-GO" if len(passed) == len(gains) else "PARTIAL" if passed else "NO-GO")
assert judged.verdict.word != "GO"  # a sum of kernels is no measured step
assert not set(passed) & {"dense-256x128", "moe-256x128"}
notebook.show(notebook.verdicts([judged]), code=["phase"])

# %%
eaten = steps.set_index("workload")
taken = {w: eaten.loc[w, "gain %"] / eaten.loc[w, "ceiling %"] for w in passed}
sentence = f"`{judged.verdict.word}` on modelled evidence. "
if passed:
    sentence += (
        f"Above {GATE:g} %, ceiling and kernels alike: "
        + ", ".join(f"`{w}` ({gains[w]:+.1f} of {eaten.loc[w, 'ceiling %']:.1f} %)" for w in passed)
        + f". The measured fp8 kernels realise {min(taken.values()):.0%} to {max(taken.values()):.0%} of the ceiling, "
        "where Q8_0 on GB10 realised next to nothing."
    )
borrowed = [w for w in STEP.workloads if not eaten.loc[w, "fp8 from"].startswith(("cuda_", "splitkv_"))]
assert set(gains[gains < 0].index) <= set(borrowed)  # no kernel of ours makes a step longer
if borrowed:
    names = ", ".join(f"`{w}`" for w in borrowed)
    sentence += f" At {names} a library's fp8 kernel was taken, so what is gained or lost there is not our kernel's."
notebook.text(sentence)


# %%
def draw_ceilings() -> Figure:
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "killgate", "font.size": 9}):
        figure = Figure(figsize=(draw.WIDTH_IN, 3.4), facecolor=draw.CARD, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, m in zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True):
            axes.set_facecolor(draw.CARD)
            axes.spines[["top", "right"]].set_visible(False)
            for n, colour in zip(SEQUENCES, (draw.SOFT, draw.BLUE, draw.ORANGE, draw.PURPLE), strict=True):
                axes.plot(CONTEXTS, [by_floors("h200", m, n, c) for c in CONTEXTS], "o-", ms=3, color=colour,
                          label=f"{n} sequences")  # fmt: skip
                own = [(int(c), gains[w]) for w, (o, c, k) in zip(STEP.workloads, cells, strict=True)
                       if o == m and int(k) == n]  # fmt: skip
                axes.plot([x for x, _ in own], [y for _, y in own], "x", ms=6, mew=1.6, color=colour)
            axes.axhline(GATE, color=draw.VERMILLION, lw=1.2, ls=(0, (5, 3)))
            axes.set_xscale("log", base=2)
            axes.set_xticks(CONTEXTS, [f"{c:,}" for c in CONTEXTS], fontsize=7.5)
            axes.minorticks_off()
            axes.set(xlabel="context, tokens", title=m)
        figure.axes[0].set_ylabel("decode throughput, %")
        figure.axes[0].legend(frameon=False, fontsize=8.5)
    return figure


notebook.picture(
    draw_ceilings(),
    "Two panels, dense and mixture: ceilings by floors on the H200 rise with context and batch, crosses mark what "
    "measured fp8 kernels give in the summed step, and a dashed line is the gate.",
)

# %% [markdown]
# ## 4. Room
#
# The cache's other use needs no speed. Nine tenths of the card's memory less the model's file is shared by caches and
# recurrent states, and only the caches shrink.

# %%
notebook.question(ROOM)

# %%
MEMORY = 0.9 * H200.fact("vram").base
lines, fits = [], {}
for workload in ROOM.workloads:
    m, ctx = workload.split("-ctx")
    found = {n: decode_step.room(MODELS[m], MEMORY, 32, int(ctx), b) for n, b in BYTES.items()}
    fits["sequences_fit", workload] = Reading(
        "requests", control=found["bf16"].sequences, candidate=found["fp8"].sequences, kind="modelled"
    )
    lines.append(
        {"workload": workload, **{f"sequences, {n}": r.sequences for n, r in found.items()},
         "more with fp8 %": 100 * (found["fp8"].sequences / found["bf16"].sequences - 1),
         **{f"M tokens beside 32, {n}": r.tokens / 1e6 for n, r in found.items()}}
    )  # fmt: skip
fitting = pd.DataFrame(lines)
doubled = fitting["M tokens beside 32, fp8"] / fitting["M tokens beside 32, bf16"]
assert doubled.between(1.999, 2.001).all()  # tokens double; sequences do not, because each brings its state
assert (fitting["more with fp8 %"] < 101).all()
assert fitting["more with fp8 %"].groupby(fitting.workload.str.split("-").str[0]).apply(
    lambda x: x.is_monotonic_increasing).all()  # fmt: skip
notebook.show(fitting, code=["workload"])

# %%
room = verdicts.judgement(ROOM, fits, "modelled", "h200", None)
source = next(iter(verdicts.judge_recorded([phases.card("p6-capacity")])))
assert room.verdict.word == "PARTIAL"
even = {m: decode_step.state_bytes(x) / decode_step.cached_bytes(x) for m, x in MODELS.items()}
notebook.show(notebook.verdicts([room, source]), code=["phase"])

# %%
notebook.text(
    "A sequence's state is as large as "
    + " and ".join(f"{tokens:,.0f} tokens of the 16-bit cache ({m})" for m, tokens in even.items())
    + ": below that the format hardly matters, far above it fp8 holds nearly twice as many. The recorded verdict was "
    "left open without a gate; this one declares half of the promise."
)

# %% [markdown]
# ## 5. Paged against contiguous
#
# LP1 found paging free on GB10 within the noise, after a batch-8 anomaly that was a mixed load. Our question is the
# kernel's: the same kernel with one page per sequence (a table of one entry, one run of memory) against pages anywhere,
# once for the Triton kernel and once for the CUDA one. A third card asks for a page of 64 tokens instead of 16.

# %%
notebook.question(PAGED[1])

# %%
notebook.show(notebook.verdicts(verdicts.judge_recorded([phases.card("lp1")])), code=["phase"])

# %%
judged = [j for j in (notebook.measured(c.id, "h200") for c in PAGED) if j]
notebook.show(notebook.verdicts(judged), code=["phase"])

# %%
*LAYOUTS, PAGE64 = PAGED
found = {card.id: notebook.arms(card, "h200") for card in PAGED}
names = ["kernel", "workload", "contiguous us", "paged us", "paging costs %", "run"]
lines = []
for card in LAYOUTS:
    for workload, arms in found[card.id].items():
        apart, whole = arms[card.candidate], arms[card.control].median_us
        lines.append((card.candidate, workload, whole, apart.median_us, 100 * (apart.median_us / whole - 1),
                      apart.run))  # fmt: skip
costs = pd.DataFrame(lines, columns=names)
notebook.show(costs, code=["kernel", "workload", "run"])

# %%
names = ["arm", "workload", "page 16 us", "page 64 us", "change %", "run of page 16", "run of page 64"]
lines = []
for workload, small in found[PAGE64.id].items():
    large = found[PAGE64.id].get(f"{workload}_p64", {})
    for arm in sorted(small.keys() & large.keys()):
        us = [rows[arm].median_us for rows in (small, large)]
        lines.append((arm, workload, *us, 100 * (us[1] / us[0] - 1), small[arm].run, large[arm].run))
sizes = pd.DataFrame(lines, columns=names)
notebook.show(sizes, code=["arm", "workload", *names[-2:]])

# %%
lost = costs.groupby("kernel")["paging costs %"].agg(["min", "max"])
changed = sizes[sizes["arm"] == PAGE64.candidate]["change %"]
notebook.text(
    "Pages anywhere against one run of memory, the same bytes, by the medians: "
    + ", ".join(f"`{kernel}` {low:+.1f} to {high:+.1f} %" for kernel, low, high in lost.itertuples())
    + f". Pages of 64 tokens change `{PAGE64.candidate}` by {changed.min():+.1f} to {changed.max():+.1f} %. A larger "
    "page means fewer ids and longer runs of memory at once, so these rows do not say which of the two pays. "
    + notebook.origin(arms[name] for c in LAYOUTS for arms in found[c.id].values() for name in (c.control, c.candidate))
)

# %% [markdown]
# ## 6. What would change the verdicts

# %%
asked = [STEP, ROOM, *PAGED]
notebook.would_change(asked)
