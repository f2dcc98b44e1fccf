# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # imp on an RTX 5090: baselines, and a gate for CUDA graphs
#
# The rows IM1 to IM6 are less about kernels than about guarding them: a stored baseline, a script that reads it, a line
# that a commit must not cross, and a table of published figures. Each went wrong once. All figures are recorded ones.
#
# **For a baseline of your own:** `lab verify --write` stores one with its units, `lab verify` holds a run to it.

# %%
import pandas as pd
from msgspec import structs

from lab import draw, judgements, phase, picture, show, value
from lab.base import devices, models
from lab.card import gate, phases, recorded, sweeps
from lab.judge import rules
from lab.trace import breakdowns
from lab.write import notebook

board = judgements(*(c.id for c in phases.cards().values() if c.system == "imp"))
board

# %%
show(pd.DataFrame([(j.phase, j.verdict.word, j.source_said, j.differs) for j in board if j.agrees is False],
                  columns=["card", "here", "the source", "why they differ"]), code=["card"])  # fmt: skip

# %% [markdown]
# ## IM1. A baseline of milliseconds
#
# The script counted fields of the bench line from the left. The line's format changed, the field was now a time, and it
# was stored as throughput, hundreds of times too small: no later run could be held against it. Here a unit is part of a
# figure, and the same mistake gets a word:

# %%
asked = gate.Gate(require=(gate.Condition("prefill_tps", ">", "tok/s", 0.0),))
stored, printed = (value(f"imp.parser-fix.rtx-5090.parsed-field-{w}") for w in ("wrong.control", "right.candidate"))
right = gate.Reading("tok/s", candidate=printed)
slips = {"as printed": right, "milliseconds": structs.replace(right, candidate=stored, unit="ms"),
         "no unit": structs.replace(right, unit="")}  # fmt: skip
told = {name: rules.judge(asked, {("prefill_tps", ""): reading}) for name, reading in slips.items()}
show(pd.DataFrame([(name, v.word, v.reason) for name, v in told.items()], columns=["figure", "verdict", "because"]))

# %% [markdown]
# ## IM2. A line inside the healthy band
#
# The pin was taken on a fast day, which put its line inside the range that healthy runs have.

# %%
PEAK = "imp.gate.baseline-on-peak-day"
pin, low, high = (value(f"{PEAK}.{part}") for part in ("decode.ntg128.control", "healthy.lo", "healthy.hi"))
allowed = value("imp.verify-fast.rtx-5090.tg128-tolerance.candidate")
line = pin * (1 - allowed / 100)
named = {"the pin": pin, "its line": line, "lowest healthy run": low, "highest healthy run": high,
         "highest pin whose line clears the band": low / (1 - allowed / 100)}  # fmt: skip
show(pd.DataFrame(named.items(), columns=["decode, tg128", "tok/s"]))

# %% [markdown]
# Another pin was taken with a prefix cache on: repeated prompts hit it, and part of what was timed was no prefill.
# Above the dotted line the honest figure reads as a regression; the build had not changed.

# %%
pinned = sweeps.select(source="files/imp/perf_baseline_north_star.json", metric="prefill_tps")
clean = sweeps.series([r for r in pinned if not r.status], "n_prompt", "prefill_tps", "cache off")
cached = sweeps.series(
    [r for r in pinned if r.status.startswith("contaminated")], "n_prompt", "prefill_tps", "cache on"
)
most = round(1 / (1 - value("imp.verify-fast.rtx-5090.pp512-tolerance.candidate") / 100), 3)
picture(
    draw.curves([[clean, cached]], "Qwen3-14B Q6_K: prefill by prompt length",
                [sweeps.ratio(cached, clean, "cache on / cache off")], log=True, line=most),
    "Prefill throughput over prompt length, prefix cache off and on; the pin with the cache is higher throughout.",
)  # fmt: skip

# %% [markdown]
# ## IM3. One ratio for every model
#
# CUDA graphs that silently fall back cost a run its speed and nothing else, so decode is compared with graphs on and
# off. The line went from the old to the new so as not to reject a healthy model, and that model lies below both: a line
# for each model is what the table asks for.

# %%
RATIO = "imp.graphs-gate.rtx-5090.graphs-on-off-ratio.candidate"
ratios = {recorded.figure(RATIO + s).model: value(RATIO + s) for s in ("", "--2", "--3", "--4")}
gates = {name: value(f"imp.graphs-gate.rtx-5090.{i}") for name, i in (
    ("old line", "graphs-ratio-gate.control"), ("new line", "graphs-ratio-gate.candidate"),
    ("fallback", "fallback-ratio.control"))}  # fmt: skip
rows = sorted([*ratios.items(), *gates.items()], key=lambda item: -item[1])
picture(
    draw.levels([(name, v, f"{v:g}") for name, v in rows], "decode with graphs over without", "ratio",
                gates["new line"]),
    "Ratios of four models with the two lines and the fallback: the largest model is below both lines.",
)  # fmt: skip

# %% [markdown]
# ## The roofline behind the baselines
#
# A decoded token reads the weights once: tokens per second times bytes of weights is a bandwidth. A figure above the
# card's means that a step does not read what the weights take up in Q8_0, or that the figure is wrong. The record does
# not say which.

# %%
weights = min(v.value for v in models.get("qwen3-8b").fact("weight_bytes").values) * 2**20
peak = devices.get("rtx-5090").bandwidth.base
CLAIMS = {
    "baseline before the refresh": "imp.baseline-refresh.rtx-5090.tg128.control",
    "baseline after the refresh": "imp.baseline-refresh.rtx-5090.tg128.candidate",
    "published row, later replaced": "imp.readme-refresh.rtx-5090.decode.control--2",
    "the same row measured again": "imp.readme-refresh.rtx-5090.decode.candidate--2",
    "pin of the current gate": "imp.gate.ci-gate.decode.ntg128.control",
}
lines = [(n, value(i), value(i) * weights / 1e9, f"{value(i) * weights / peak:.0%}") for n, i in CLAIMS.items()]
show(pd.DataFrame(lines, columns=["figure", "tok/s", "GB/s if all weights are read", "of the card"]))

# %% [markdown]
# ## IM4. What an API profile promises and what a step gives
#
# The time inside allocation calls under a profiler is more than the whole step takes without one: the profiler slows
# each call, and the calls overlap the GPU's work.

# %%
FP32 = "imp.fp32-down-buf.rtx-5090"
api_s, steps = value(f"{FP32}.cudamalloc-api-time.control.graphsoff"), value(f"{FP32}.run-steps.control")
before, after = (value(f"{FP32}.tg128.{arm}.itemcommit.graphsoff") for arm in ("control", "candidate"))
lines = {"promised, ms a step": 1e3 * api_s / steps, "the whole step, ms": 1e3 / before,
         "came of it, ms a step": 1e3 / before - 1e3 / after}  # fmt: skip
show(pd.DataFrame([lines]))

# %% [markdown]
# ## IM5. Fusing small projections
#
# A decode profile of a GDN model of this engine, without graphs. The projections are a few per cent of kernel time, so
# no fusion of them can give more; on the Q8_0 model a filter kept the fusion off, so its two runs are the same code.

# %%
picture(
    draw.breakdown(breakdowns.from_recorded("imp_qwen35_4b_gdn_W2_ng_before"), "Qwen3.5-4B-GDN Q8_0, without graphs"),
    "Bars of a decode profile by category: matrix-vector products take most of the kernel time.",
)

# %% [markdown]
# ## IM6. Published figures, measured again
#
# Two rows fell, and the headline that stood on one of them was withdrawn. A row without its build and settings cannot
# be told from another row.

# %%
lines = [(workload, metric, r.control, r.candidate, 100 * (r.candidate / r.control - 1))
         for (metric, workload), r in phase("im6-refresh").card.recorded[0].evidence.items()]  # fmt: skip
show(pd.DataFrame(lines, columns=["model", "metric", "published", "again", "change %"]), code=["metric"])

# %% [markdown]
# ## What would change these verdicts

# %%
notebook.would_change(phase(j.phase).card for j in board)
