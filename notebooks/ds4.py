# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # ds4: paths, pages, graphs and frontiers
#
# ds4 serves one large mixture-of-experts model on a discrete and on an integrated Blackwell part. Its record is about
# which kernel multiplies Q8_0 weights, where the weights lie in memory, whether decode kernels are captured in graphs,
# and what all that gives from a short to a long context. It holds no kernel breakdown and no matrix shapes, so there is
# no roofline: all but one statement is end to end.
#
# **For an engine of your own:** `lab judge CARD --rows control=... --rows candidate=...` holds the same cards to it.

# %%
import pandas as pd

from lab import device, draw, judgements, phase, picture, show
from lab.base import devices
from lab.card import phases, recorded, sweeps

PRO, GB10 = "rtx-pro-6000", "gb10"
NAMES = {PRO: "PRO 6000", GB10: "GB10"}
DEVICE = device().id  # the one with most measured rows, for the one question asked of kernels of our own

# %% [markdown]
# ## Which path multiplies Q8_0 weights
#
# Quantised blocks multiplied directly (mmq), weights expanded to half precision for cuBLAS, or one warp per group of
# rows (warp8). A first policy picked by memory bandwidth. It rests on mmq in a binary that never initialised cuBLAS; in
# one that does, the same kernel on GB10 reads four times as much. The policy was tuned on the difference between two
# binaries, and nobody found the cause. Figures that a source withdrew are refused here.

# %%
PATHS = {"mmq": "candidate", "cublas": "peer-cublas", "warp8": "peer-warp8"}
lines = [(words, NAMES[d], *(recorded.target(f"ds4.{table}.{d}.prefill.{arm}").value for arm in PATHS.values()))
         for words, table in (("the tier table", "q8-strategy-tiers"), ("the default", "q8-mmq-default"))
         for d in (PRO, GB10)]  # fmt: skip
show(pd.DataFrame(lines, columns=["figures of", "device", *(f"{p} tok/s" for p in PATHS)]))

# %%
judgements("ds1-mmq", "ds2-tiers", "ds2-cublas-init", "ds2-mmq-default")

# %% [markdown]
# The same three paths as kernels of our own (`kernels/q8`), for one projection. By its bandwidth the tier table picks
# mmq at every M; a scale on every 32 products is work for the CUDA cores, of which a bandwidth says nothing. So
# `kernels/q8/route.py` reads measured times instead.

# %%
phase("q8-paths").arms(DEVICE)

# %%
judgements("q8-paths", device=DEVICE)

# %% [markdown]
# ## Where the weights lie
#
# The same kernels on the same bytes, each tensor at an aligned base of its own. One large chunk has the same pages and
# gains nothing: the bases and not the pages are the cause. The price: sums reach the accumulator in another order, and
# one of the official log-probability vectors changes.

# %%
lines = [(c, *(recorded.target(f"ds4.vmm-arena.{PRO}.prefill.{arm}.{c}").value for arm in ("control", "candidate")))
         for c in ("ctx2048", "ctx32768")]  # fmt: skip
one_chunk = recorded.target(f"ds4.vmm-bisect.{PRO}.prefill.candidate").value
frame = pd.DataFrame([*lines, ("one chunk", lines[0][1], one_chunk)], columns=["at", "packed tok/s", "arena tok/s"])
show(frame.assign(speedup=frame["arena tok/s"] / frame["packed tok/s"]))

# %%
judgements("ds3-arena", "ds3-arena-gb10", "ds3-one-chunk", "ds3-chunk-size", "ds4-drift", "ds4-logprob", "ds6-harness")

# %% [markdown]
# ## Captured graphs
#
# Replaying captured kernels on a side stream raced with the default stream. Waiting only after the launch left the text
# garbled; waiting on both sides gives the tokens of the uncaptured path, bit for bit, and keeps a small gain.

# %%
lines = []
for d in (PRO, GB10):
    for c in ("ctx2048", "ctx4096"):
        off, on = (float(recorded.target(f"ds4.cuda-graphs.{d}.gen.{arm}.{c}.graphs{state}").value)
                   for arm, state in (("control", "off"), ("candidate", "on")))  # fmt: skip
        lines.append((NAMES[d], c, off, on, 100 * (on / off - 1)))
show(pd.DataFrame(lines, columns=["device", "context", "off tok/s", "on tok/s", "change %"]))

# %%
judgements("ds8-post-only", "ds8-graphs")

# %% [markdown]
# ## Frontiers
#
# The context grows in steps, each is prefilled, then tokens are generated. GB10 has a smaller share of the bandwidth
# than of the generation rate: it uses a larger part of what it has.

# %%
ARMS = {PRO: "pro6000_blackwell", GB10: "gb10_spark"}
METRICS = ("prefill_tps", "decode_steady_tps")
curve = {(d, m): sweeps.series(sweeps.select(system="ds4", arm=arm), "context", m, label=NAMES[d])
         for d, arm in ARMS.items() for m in METRICS}  # fmt: skip
picture(
    draw.curves([[curve[d, m] for d in ARMS] for m in METRICS], "ds4 frontiers: prefill above, generation below"),
    "Prefill and generation in tokens per second over the context, 2048 to 65536 tokens, for both devices.",
)

# %%
share = {m: sweeps.ratio(curve[GB10, m], curve[PRO, m]).ys for m in METRICS}
lines = [(m, min(ys), max(ys)) for m, ys in share.items()]
bandwidth = [devices.get(d).bandwidth.base for d in (GB10, PRO)]
lines.append(("memory bandwidth", bandwidth[0] / bandwidth[1], bandwidth[0] / bandwidth[1]))
show(pd.DataFrame(lines, columns=["GB10 over PRO 6000", "lowest", "highest"]))

# %%
judgements("ds9-frontiers", "ds9-gb10-gen")

# %% [markdown]
# ## Exact speculation
#
# The verdict stands on one pair of figures. A table of frontiers of the same device exists beside it, and its ratio
# lies on both sides of one.

# %%
pair = [sweeps.series(sweeps.select(system="ds4", arm=f"mtp_compare_gb10_{arm}"), "context", "decode_tps", label=label)
        for arm, label in (("nomtp", "no drafting"), ("exact_mtp", "exact drafting"))]  # fmt: skip
picture(
    draw.curves([pair], "Exact speculation on GB10", [sweeps.ratio(pair[1], pair[0])], zero=False),
    "Generation on GB10 with and without exact drafting over the context, and their ratio.",
)

# %% [markdown]
# ## Every verdict of ds4, and where it differs

# %%
board = judgements(*(c.id for c in phases.cards().values() if c.system == "ds4"))
board

# %%
show(pd.DataFrame([(j.phase, j.verdict.word, j.source_said, j.differs) for j in board if j.agrees is False],
                  columns=["card", "here", "the source", "why they differ"]), code=["card"])  # fmt: skip
