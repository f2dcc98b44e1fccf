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
# # imp on an RTX 5090: baselines, and a gate for CUDA graphs
#
# The rows IM1 to IM6 are less about kernels than about guarding them: a stored baseline, a script that reads it, a line
# that a commit must not cross, and a table of published figures. Each of these went wrong once. The figures below are
# recorded ones, by id; nothing was measured here.

# %%
import pandas as pd
from msgspec import structs

from lab import draw, value
from lab.base import devices, models
from lab.card import phases, recorded, sweeps
from lab.judge import rules, verdicts
from lab.place import roofline
from lab.trace import breakdowns
from lab.write import notebook

DEVICE = devices.get("rtx-5090")
CARDS = [card for card in phases.cards().values() if card.system == "imp"]
JUDGED = {j.recorded_id: j for j in verdicts.judge_recorded(CARDS)}

# %% [markdown]
# ## The verdicts

# %%
assert len(JUDGED) == sum(v.system == "imp" for v in recorded.verdicts().values())
notebook.show(notebook.board(JUDGED.values()))

# %%
differ = [j for j in JUDGED.values() if not j.agrees]
assert {j.recorded_id for j in differ} == {"imp.v.graphs-gate", "imp.v.alpha-beta-fusion-q8"}
notebook.show(
    pd.DataFrame(
        [{"card": j.phase, "ours": j.verdict.word, "source": j.recorded_verdict, "why": j.differs} for j in differ]
    ),
    code=["card"],
)

# %% [markdown]
# ## IM1. A baseline of milliseconds
#
# The script counted fields of the bench line from the left. The line's format changed, the field was now a time, and
# the time was stored as throughput.

# %%
parser = phases.card("im1-parser")
notebook.question(parser)

# %%
stored_ms = recorded.figure("imp.parser-fix.rtx-5090.parsed-field-wrong.control")
printed = recorded.figure("imp.parser-fix.rtx-5090.parsed-field-right.candidate")
tokens = int(printed.params["pp"])
from_time = tokens / (float(stored_ms.value) / 1e3)
assert stored_ms.unit == "ms"
assert abs(from_time / float(printed.value) - 1) < 0.005 / float(stored_ms.value)  # within the printed digits
factor = float(printed.value) / float(stored_ms.value)
assert 400 < factor < 500
notebook.text(
    f"{tokens} tokens in {stored_ms.value} ms are {from_time:,.1f} tok/s; the line prints {printed.value:,} tok/s. So "
    f"the two fields agree, and the stored number was {factor:.0f} times too small: no later "
    "run could be held against it. Here a unit is part of a figure, and the same mistake gets a word:"
)

# %%
evidence = dict(parser.recorded[0].evidence)
right = evidence["parsed_tps", ""]
slipped = rules.judge(
    parser.gate, {**evidence, ("parsed_tps", ""): structs.replace(right, candidate=stored_ms.value, unit="ms")}
)
unlabelled = rules.judge(parser.gate, {**evidence, ("parsed_tps", ""): structs.replace(right, unit="")})
assert (slipped.word, unlabelled.word) == ("INVALID", "BLOCKED")
notebook.text(f"- milliseconds: **{slipped.word}**, {slipped.reason}\n- no unit: **{unlabelled.word}**")

# %% [markdown]
# ## IM2. A line inside the healthy band
#
# The refreshed baseline is a real gain, and each figure clears the noise floor. What a single refresh cannot show is
# how far a healthy build moves from day to day. This source found out later: a pin that was taken on a fast day put
# its line inside the range that healthy runs have.

# %%
notebook.show(notebook.verdicts([JUDGED["imp.v.baseline-refresh"], JUDGED["imp.v.verify-fast"]]))

# %%
PEAK = "imp.gate.baseline-on-peak-day"
pin, low, high = (value(f"{PEAK}.{part}") for part in ("decode.ntg128.control", "healthy.lo", "healthy.hi"))
allowed = value("imp.verify-fast.rtx-5090.tg128-tolerance.candidate")
line = pin * (1 - allowed / 100)
highest_pin = low / (1 - allowed / 100)
assert low < line < high
assert highest_pin < pin

figure, axes = notebook.canvas(1.7, height=30)


def at(tps: float) -> float:
    """Where a throughput stands on the drawing."""
    return 4 + 92 * (tps - 262) / (290 - 262)


notebook.box(axes, at(low), 10, at(high) - at(low), 8, "healthy runs", colour=draw.BLUE, fill=True)
for tps, words, colour, height in (
    (line, "the line", draw.VERMILLION, 25),
    (pin, "the pin", draw.INK, 25),
    (highest_pin, "highest pin whose line clears the band", draw.GREEN, 2.2),
):
    axes.plot([at(tps)] * 2, [8, 22], color=colour, lw=1.6)
    axes.text(at(tps), height, f"{words}, {tps:.1f}", ha="center", va="center", fontsize=9, color=colour)
for tps in (low, high):
    axes.text(at(tps), 5.8, f"{tps:g}", ha="center", va="center", fontsize=8.5, color=draw.SOFT)
notebook.picture(figure, "A band of healthy decode rates; the regression line of the pinned baseline lies inside it.")

# %%
notebook.text(
    f"A pin of {pin} tok/s and an allowance of {allowed:g} % make a line at {line:.1f}, and healthy runs span {low:g} "
    f"to {high:g}: {(line - low) / (high - low):.0%} of the band would be called a regression. A line clears the band "
    f"only from a pin of {highest_pin:.1f} or less, or with an allowance of {100 * (1 - low / pin):.1f} % at this pin."
)

# %% [markdown]
# Another pin was taken with a prefix cache on. Repeated prompts hit the cache, and part of what was timed was no
# prefill at all. The sweep over prompt lengths shows by how much, on the model that was pinned at most lengths:

# %%
PINS = "files/imp/perf_baseline_north_star.json"
pinned = sweeps.select(source=PINS, metric="prefill_tps")
clean = sweeps.series([r for r in pinned if not r.status], "n_prompt", "prefill_tps", "cache off")
with_cache = [r for r in pinned if r.status.startswith("contaminated")]
cached = sweeps.series(with_cache, "n_prompt", "prefill_tps", "cache on")
over = sweeps.ratio(cached, clean, "cache on / cache off")
gate = round(1 / (1 - value("imp.verify-fast.rtx-5090.pp512-tolerance.candidate") / 100), 3)
assert min(over.ys) > gate  # at each length the honest figure would have failed against the contaminated pin
notebook.picture(
    draw.curves([[clean, cached]], "Qwen3-14B Q6_K: prefill by prompt length", [over], log=True, line=gate),
    "Prefill throughput over prompt length, prefix cache off and on; the pin with the cache is higher throughout.",
)

# %%
notebook.text(
    f"With the cache the pin is {100 * (min(over.ys) - 1):.0f} to {100 * (max(over.ys) - 1):.0f} % higher. The honest "
    f"figure then reads as a regression at all {len(over.xs)} lengths: above the dotted line the loss exceeds what the "
    "gate allows. The build had not changed."
)

# %% [markdown]
# ## IM3. One ratio for every model
#
# CUDA graphs that silently fall back cost a run its speed and nothing else, so the project compares decode with graphs
# on and off. The question is whether one line fits all models.

# %%
ratio = "imp.graphs-gate.rtx-5090.graphs-on-off-ratio.candidate"
WIDER = "imp.wider-bench.rtx-5090.tg128.candidate.graphson"
SUFFIXES = {"": "", "--2": "--3", "--3": "--4", "--4": "--2"}  # the two tables list the models in another order
old, new, fallback = (
    value(f"imp.graphs-gate.rtx-5090.{i}")
    for i in ("graphs-ratio-gate.control", "graphs-ratio-gate.candidate", "fallback-ratio.control")
)
rows = []
for suffix, wider in SUFFIXES.items():
    of, on = recorded.figure(ratio + suffix), recorded.figure(WIDER + wider)
    assert of.model == on.model
    hidden_ms = 1e3 * (float(of.value) - 1) / float(on.value)
    rows.append([of.model, of.value, float(of.value) >= old, float(of.value) >= new, on.value, hidden_ms])
names = ["model", "on / off", f"passes {old}", f"passes {new}", "tok/s, graphs on", "host ms a token that graphs hide"]
table = pd.DataFrame(rows, columns=names).sort_values("on / off", ascending=False)
assert list(table["model"][~table[f"passes {new}"]]) == ["Qwen3-8B-Q8_0"]
notebook.show(table.replace({True: "yes", False: "no"}))

# %%
figure, axes = notebook.canvas(2.3, height=30)


def across(times: float) -> float:
    """Where a ratio stands on the drawing."""
    return 22 + 74 * (times - 0.9) / (2.5 - 0.9)


for i, row in enumerate(table.itertuples(index=False)):
    y = 25 - 5.5 * i
    axes.text(20, y, row[0], ha="right", va="center", fontsize=9, color=draw.INK)
    axes.plot([across(fallback), across(row[1])], [y, y], color=draw.BLUE, lw=5, solid_capstyle="butt")
    axes.text(across(row[1]) + 0.8, y, f"{row[1]:g}", va="center", fontsize=9, color=draw.INK)
for times, words in ((fallback, "fallback"), (new, "new line"), (old, "old line")):
    axes.plot([across(times)] * 2, [4.5, 28], color=draw.VERMILLION, lw=1, ls=":")
    axes.text(across(times), 2, f"{words}\n{times:g}", ha="center", va="center", fontsize=8, color=draw.VERMILLION)
notebook.picture(figure, "Ratios of four models with the two lines: the largest model is left of both.")

# %%
old_verdict, new_verdict = JUDGED["imp.v.graphs-gate-1.5"], JUDGED["imp.v.graphs-gate"]
assert old_verdict.verdict.word == new_verdict.verdict.word == "NO-GO"
assert "at qwen3-8b: fired" in new_verdict.verdict.reason
lone = value("imp.verify-fast.rtx-5090.graphs-on-off-ratio.candidate")
lowest = table["on / off"].min()
notebook.text(
    f"The line went from {old} to {new} so as not to reject a healthy model, and that model's own entry is {lowest}. "
    f"What speaks for the new line is one reading of {lone} whose model is not named. Between the fallback "
    f"({fallback:g}) and the lowest healthy ratio ({lowest}) only a line below {lowest} separates, and then by little: "
    "a line for each model is what the table asks for.\n\nThe last column is arithmetic on two tables of different "
    "lengths, so it is only a hint: graphs hide a few milliseconds of host time a token on the small models and about "
    f"{table['host ms a token that graphs hide'].min():.1f} ms on the large one, which fits kernels long enough to "
    "cover their own launches."
)

# %% [markdown]
# ## The roofline behind the baselines
#
# A decoded token reads the weights once. So tokens per second times bytes of weights is a bandwidth, and no figure can
# ask for more than the card has.

# %%
weights = models.get("qwen3-8b").fact("weight_bytes")
smallest = min(weights.values, key=lambda v: v.value)
weight_bytes = smallest.value * 2**20
peak = DEVICE.bandwidth.base
most = 1e6 / roofline.place(DEVICE, 1.0, weight_bytes, "bf16").floor_us
CLAIMS = {
    "baseline before the refresh": "imp.baseline-refresh.rtx-5090.tg128.control",
    "baseline after the refresh": "imp.baseline-refresh.rtx-5090.tg128.candidate",
    "published row, later replaced": "imp.readme-refresh.rtx-5090.decode.control--2",
    "the same row measured again": "imp.readme-refresh.rtx-5090.decode.candidate--2",
    "pin of the current gate": "imp.gate.ci-gate.decode.ntg128.control",
}
reads = pd.DataFrame(
    [
        {"figure": words, "tok/s": value(i), "GB/s if all weights are read": value(i) * weight_bytes / 1e9,
         "of the card": f"{value(i) * weight_bytes / peak:.0%}"}
        for words, i in CLAIMS.items()
    ]
)  # fmt: skip
notebook.show(reads)

# %%
above = reads[reads["tok/s"] > most]
nvfp4 = [r for r in breakdowns.rows("imp_qwen35_4b_gdn_W2_ng_before") if "nvfp4" in r.kernel_name]
assert set(above.figure) == {"published row, later replaced", "pin of the current gate"}
assert nvfp4
notebook.text(
    f"{smallest.value:,.0f} MiB at {peak / 1e9:,.0f} GB/s allow {most:.0f} tok/s. {len(above)} of these figures are "
    f"above that and ask for up to {reads['GB/s if all weights are read'].max():,.0f} GB/s. So on those builds a step "
    "does not read what the weights take up in Q8_0, or the figure is wrong. The record does not say which; a profile "
    f"of another Q8_0 model of this engine has a kernel for four-bit weights ({nvfp4[0].kernel_name}), which "
    "points to the first. A table that mixes both kinds of build compares two quantisations."
)

# %%
BOARD = "imp.scoreboard.{}.gemma-3-12b.tg128"
absurd, later = (recorded.figure(BOARD.format(day)) for day in ("2026-05-28", "2026-07-12"))
size = recorded.figure("imp.scoreboard.gemma-3-12b.weights")
asked = float(absurd.value) * float(size.value) / 1e3
assert asked > 5 * peak / 1e12
assert float(later.value) * float(size.value) * 1e9 < peak
marked = sweeps.select(source="files/imp/scoreboard.tsv", where=lambda r: r.status == "impossible")
assert [r["decode_tps"] for r in marked] == [absurd.value]
notebook.text(
    f'The same check finds a row that its source marked "{absurd.params["source_word"]}": {absurd.value:,} tok/s of a '
    f"model of about {size.value:g} GB (an estimate from its class) is {asked:.1f} TB/s on a card of "
    f"{peak / 1e12:.2f}. The row of {later.params['day']} reads {later.value}."
)

# %% [markdown]
# ## IM4. What an API profile promises and what a step gives
#
# The profile without graphs counted the allocation calls of the expert feed-forward and the time they took.

# %%
FP32 = "imp.fp32-down-buf.rtx-5090"
calls_k, api_s, steps = (
    value(f"{FP32}.{i}")
    for i in ("cudamalloc-calls.control.graphsoff", "cudamalloc-api-time.control.graphsoff", "run-steps.control")
)
before, after = (value(f"{FP32}.tg128.{arm}.itemcommit.graphsoff") for arm in ("control", "candidate"))
step_ms, gained_ms, promised_ms = 1e3 / before, 1e3 / before - 1e3 / after, 1e3 * api_s / steps
assert promised_ms > step_ms > gained_ms
notebook.text(
    f"{calls_k:g} thousand calls in {api_s} s over {steps:.0f} steps are {promised_ms:.1f} ms a step, more than the "
    f"whole step takes without the profiler ({step_ms:.1f} ms at {before} tok/s). What came of removing them is "
    f"{gained_ms:.2f} ms ({before} to {after} tok/s). Time inside an API call under a profiler is not time that a step "
    "would be shorter by: the profiler slows each call, and the calls overlap the GPU's work."
)

# %%
notebook.show(notebook.verdicts([JUDGED["imp.v.fp32-down-buf"], JUDGED["imp.v.fp32-down-buf-graphs-on"]]))

# %% [markdown]
# ## IM5. Fusing small projections
#
# A decode profile of a GDN model of this engine, without graphs. The category of matrix-vector products is named after
# its four-bit kernels; here most of them read eight-bit weights.

# %%
profile = breakdowns.from_recorded("imp_qwen35_4b_gdn_W2_ng_before")
notebook.picture(
    draw.breakdown(profile, "Qwen3.5-4B-GDN Q8_0, decode without CUDA graphs"),
    "Bars of a decode profile by category: matrix-vector products take most of the kernel time.",
)

# %%
share = value("imp.alpha-beta-fusion.rtx-5090.share.control.bucketgdn-fp16-projections") / 100
part = 1 / value("imp.alpha-beta-fusion.rtx-5090.launches-recovered-denominator.candidate")
arms = [value(f"imp.alpha-beta-fusion.rtx-5090.decode.{arm}") for arm in ("control", "candidate")]
gain = arms[1] / arms[0] - 1
ceiling = 1 / (1 - share) - 1
packed = JUDGED["imp.v.alpha-beta-fusion"]
assert 0 < gain < ceiling * part
assert [v.word for _, v in packed.claims] == ["NEUTRAL"]
notebook.text(
    f"The projections are {share:.1%} of decode kernel time on the NVFP4 model, so no fusion of them can give more "
    f"than {ceiling:.1%}, and that only if they became free. The pair saves {part:.0%} of their launches, and decode "
    f"moved by {gain:+.1%}: no regression, which is what the source asks, and inside the noise floor as a gain. On the "
    "Q8_0 model the filter kept the fusion off, so its two runs are the same code."
)

# %%
FUSIONS = ["imp.v.alpha-beta-fusion", "imp.v.alpha-beta-fusion-q8", "imp.v.gdn-gemv-fusion", "imp.v.four-way-fusion"]
assert [JUDGED[i].verdict.word for i in FUSIONS] == ["GO", "VACUOUS", "BLOCKED", "BLOCKED"]
notebook.show(notebook.verdicts(JUDGED[i] for i in FUSIONS))

# %% [markdown]
# ## IM6. Published figures, measured again

# %%
refreshed = phases.card("im6-refresh")
lines = {c.workload: c.threshold for c in refreshed.gate.require}
rows = []
for (metric, workload), reading in refreshed.recorded[0].evidence.items():
    change = 100 * (reading.candidate / reading.control - 1)
    stands = "yes" if change >= lines[workload] else "no"
    rows.append([workload, metric, reading.control, reading.candidate, change, stands])
again = pd.DataFrame(rows, columns=["model", "metric", "published", "again", "change %", "stands"])
fell = again[again.stands == "no"]
assert len(fell) == 2
assert JUDGED["imp.v.readme-refresh"].verdict.word == "PARTIAL"
notebook.show(again, code=["metric"])

# %%
headline = recorded.figure("imp.readme-refresh.rtx-5090.speedup-vs-llama-cpp.control")
row = again[again.model == "qwen3-8b"].iloc[0]
assert headline.withdrawn
gated = value(CLAIMS["pin of the current gate"])
assert gated > row["published"]
notebook.text(
    f"{len(fell)} of {len(again)} rows fell, by {-fell['change %'].max():.0f} to {-fell['change %'].min():.0f} %. The "
    f"headline that stood on one of them ({headline.value:g} times llama.cpp) is recorded as "
    f'"{headline.withdrawn}": it can be shown, and no card may aim at it. Of the same model, the old row has '
    f"{row['published']:g} tok/s, the new one {row['again']:g}, and the pin of the current gate {gated}. A row "
    "without its build and settings cannot be told from another row."
)

# %% [markdown]
# ## What would change these verdicts

# %%
notebook.show(pd.DataFrame([{"card": c.id, "would change it": c.limits} for c in CARDS]), code=["card"])
