# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Traces: whose microseconds are they?
#
# A profile answers one question well: where did the time go? It answers wrongly when copies count as compute, when
# summed durations count as busy time, or when a CUDA graph was captured as one opaque row. Here is how a trace is
# accounted for, the sources' own attributions repeated from their tables, and what a faster kernel can give end to end.
#
# **For a profile of your own:** the notebook `profile` opens any file; `lab profile CARD` takes one on a GPU.

# %%
import math

import numpy as np
import pandas as pd

from lab import draw, phase, picture, show
from lab.card import recorded
from lab.judge import projection
from lab.row import store
from lab.study import attributions
from lab.trace import amdahl, breakdowns, diff
from lab.trace.amdahl import Interval
from lab.trace.model import Copies, Kernels, Trace

# %% [markdown]
# ## What counts as busy
#
# An invented step of 100 us, small enough to check by eye: two streams that overlap, a copy beside a kernel and one
# alone, and a kernel that only waits. It is idle time: it occupies the device and does nothing.

# %%
ROWS = [(0, 30, 0, 1), (25, 50, 1, 2), (70, 80, 2, 1), (92, 100, 0, 1)]  # start us, end us, name, stream
start, end, name, stream = (np.array(column) for column in zip(*ROWS, strict=True))
toy = Trace(
    tool="invented", source="one step", gpus={0: "GPU"},
    names=("gemm_kernel", "splitkv_kernel", "at::cuda::spin_kernel(long)"),
    kernels=Kernels.of(start_ns=start * 1000, end_ns=end * 1000, name=name, stream=stream, device=start * 0),
    memcpy=Copies.of(start_ns=[45_000, 60_000], end_ns=[55_000, 65_000], device=[0, 0], bytes=[1, 1], kind=[8, 1]),
)  # fmt: skip
picture(draw.timeline(toy, title="One invented step"), "Two streams, a copy lane and idle time over 100 us.")

# %% [markdown]
# The parts sum to the span exactly: durations, less what ran at the same time, plus idle time. Nothing is left out.

# %%
whole = breakdowns.from_trace(toy)
show(pd.DataFrame([(p.category, p.value, f"{p.value / whole.whole:.0%}") for p in whole.parts],
                  columns=["category", "us", "of the span"]))  # fmt: skip

# %% [markdown]
# ## The decode step that was 99.4 % busy
#
# LocalAI's paged llama.cpp decoded 128 sequences on a GB10 with the GPU 99.4 % busy, and kernels were only part of it:
# device-to-device copies are no compute. Full attention, which the paged cache was about, is the smallest named part.

# %%
decode = breakdowns.from_recorded("a2_dense_npl128_eager")
picture(
    draw.breakdown(decode, "Decode step, dense, 128 sequences, before the state fixes"),
    "Shares of the decode step: recurrence, gather, copy, FP4 GEMV and GEMM, attention, and what is not attributed.",
)

# %% [markdown]
# ## Whose the gap is
#
# After the state fixes both engines were profiled again. The waterfall starts at vLLM's step and must arrive at
# llama's.

# %%
step = diff.difference(
    breakdowns.from_recorded("explore_postssm_llama-paged_dense_npl128", "ms/step"),
    breakdowns.from_recorded("explore_postssm_vllm_dense_npl128", "ms/step"),
)
picture(
    draw.gap(step, ("llama-paged", "vLLM"), "Decode step after the state fixes, dense, 128 sequences"),
    "Stacked bars of both engines' decode step and the waterfall of the gap; the FP4 product path owns most of it.",
)

# %% [markdown]
# Every attribution that the sources wrote, computed again from their own tables. Printed digits are intervals.

# %%
claims = [(c.name, c.recorded.mid, c.ours.mid, f"{c.ours.low:.4g} to {c.ours.high:.4g}", c.unit,
           "yes" if c.agrees else "NO", c.note) for c in attributions.reproduce()]  # fmt: skip
show(pd.DataFrame(claims, columns=["attribution", "recorded", "ours", "digits leave", "unit", "follows", "note"]))

# %% [markdown]
# ## What a faster kernel can give
#
# Amdahl's law with intervals: the share of a category times the speed-up of its kernel; infinity is the ceiling. The
# copy's removal reached its ceiling. Copy and gather together passed theirs: the law assumes that nothing else changes
# with the category, and here something did.

# %%
base, gone = Interval.of(146.0, 0.5), Interval(*[math.inf] * 3)
LEVERS = [
    ("state copy removed", ["memcpy"], "lp.patch-0018.gb10.decode-agg.candidate.npl128.npp128"),
    ("copy and gather removed", ["memcpy", "get_rows"], "lp.patch-0019.gb10.decode-agg.candidate.npl128.npp128"),
    ("attention removed", ["attention"], ""),
]
rows = []
for what, names, figure in LEVERS:
    found = amdahl.project(projection.share(decode, names), gone, base)
    after = recorded.figure(figure).value if figure else None
    rows.append((what, f"{found.share.mid:.1%}", found.ceiling_rate.low, found.ceiling_rate.high, after))
show(pd.DataFrame(rows, columns=["lever", "share of the step", "ceiling tok/s, low", "high", "reached tok/s"]))

# %% [markdown]
# Asked of a card, as `lab amdahl` does: can an fp8 cache (`p6`) reach its gate by faster attention in this step?

# %%
share = projection.share(decode, ["attention"])
answer = projection.answer("attention", share, gone, None, 1.0, projection.needs(phase("p6").card))
show(pd.DataFrame(answer.against, columns=["asked by", "word", "because"]))

# %% [markdown]
# ## Our own profiles
#
# `lab profile` keeps the normalised trace only: no environment, no process output. Profiled times say where time goes;
# `lab measure` says how long it takes.

# %%
newest = {(f.parts[-4], f.parts[-3]): f for f in sorted(store.FOLDER.glob("*/*/*/trace.parquet"))}
show(pd.DataFrame([(device, card, file.parent.name) for (device, card), file in newest.items()],
                  columns=["device", "card", "run"]), code=["card"])  # fmt: skip

# %%
DEVICE, CARD = next(iter(newest))
phase(CARD).kernels(DEVICE)
