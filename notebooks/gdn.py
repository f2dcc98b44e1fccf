# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Gated DeltaNet: one fused scan or six kernels, and how often the state travels
#
# Prefill: the chunks of a sequence depend on each other through a state. One kernel can walk them and keep the state on
# chip, or six kernels can prepare all chunks at once and pass the state through memory (P5). Decode: a step is the
# traffic of the state, so copies of it cost (LP9). Cards ask both, on GB10 from the record and on a device with rows.
#
# **For a scan of your own:** add a candidate to `kernels/gdn/`, name it in a card beside `fused_chunk`, set `CARD`.

# %%
import pandas as pd
import torch

from lab import device, draw, family, judgements, phase, picture, show, value
from lab.base import devices, models
from lab.card import recorded
from lab.place import roofline
from lab.write import figures, notebook

CARD = "p5-kernel"
DEVICE = device().id  # the one with most measured rows
gdn = family("gdn")
from kernels.gdn import triton_split

ASKED = [phase(i).card for i in ("p5", "p5-blocked-inverse", "p5-chunk64", "p5-kernel", "lp9-kernel")]

# %%
notebook.questions(ASKED)

# %% [markdown]
# ## The mechanism
#
# A state S (D x D) per v head decays, its guess for the key is compared with the value, and the scaled error is written
# back. Chunks of C tokens turn this into matrix products and one triangular solve, but stay sequential through S.
#
# ```text
# fused_chunk, one kernel     S -> chunk 1 -> S -> chunk 2 -> S -> ... -> chunk N      S never leaves the chip
#                             memory: q, k, v, gates in; o out
#
# split_pipeline, six         1 cumsum -> 2 kkt -> 3 inverse -> 4 w, u -> 5 scan -> 6 output
# kernels, all chunks at      memory:   G        A           X         W, U       h, V'       o
# once but for the scan       every arrow is a tensor of all tokens; h is one D x D state a chunk, written and read
#
# decode, copied   pool -1-> gather -2-> states of the batch -3-> update -4-> states -5-> copy -6-> pool   six passes
# decode, in place pool -1-> update (state_rows) -2-> pool                                                 two passes
# ```

# %% [markdown]
# ## Checked here
#
# Against the recurrence, token by token, in float64: an odd length, and keys so alike that the triangular system's
# inverse alternates in sign. Without a GPU in Triton's interpreter, which says something about numbers and nothing
# about speed.

# %%
gdn.check("split_pipeline", "t75_hk1_hv2_d128")

# %%
SIMILAR = next(w.id for w in gdn.workloads if w["regime"] == "similar")
gdn.check("fused_chunk", SIMILAR)

# %% [markdown]
# ## As recorded on GB10
#
# Neither form stands near the bandwidth, and the solve, which was the suspect, is a sliver: the kernel that carries the
# state takes as long as the whole fused scan. A solve that cost nothing would not have saved the pipeline.

# %%
FUSED, SPLIT = (
    value(f"lp.p5.gb10.gdn-us-per-tok.{arm}") for arm in ("control.npp2048.itemm5", "candidate.npp2048.itemfla")
)
BUCKETS = {"fwd_h: carries the state": "fwd-h", "fwd_o: output": "fwd-o", "solve_tril": "solve-tril"}
share = {b: value(f"lp.p5.gb10.share.candidate.bucket{b}") / 100 for b in BUCKETS.values()}
picture(
    draw.bars({name: share[b] * SPLIT for name, b in BUCKETS.items()}, "GDN time per prefill token, six kernels", "us",
              SPLIT, f"GB10, recorded: six kernels take {SPLIT:g} us a token, the fused scan {FUSED:g}"),
    "Bars of the recorded shares of the six-kernel pipeline: fwd_h and fwd_o are most of it, the solve a sliver.",
)  # fmt: skip

# %% [markdown]
# **What the materialised state costs, from shapes.** The record blames the state that is written per chunk, which can
# be counted: Hv x D x D per chunk and layer, once each way, and the other intermediates from the same shapes. The chunk
# size is not recorded, so three are shown. It is a part of the difference, and the shapes do not make it the whole.

# %%
shape, layers = models.shape("q36-35b-a3b.gdn").axes, models.get("q36-35b-a3b").facts["gdn_layers"].value
per_us, lines = devices.get("gb10").bandwidth.base / 1e6, []
for chunk in (16, 32, 64):
    span = triton_split.workspace_shapes(chunk, 1, shape["Hv"], shape["D"], chunk, torch.float32)  # of one chunk
    sizes = {n: torch.Size(s).numel() * dtype.itemsize * layers / chunk for n, (s, dtype) in span.items()}
    h_us, all_us = 2 * sizes["h"] / per_us, 2 * sum(sizes.values()) / per_us
    lines.append((chunk, 2 * sizes["h"] / 1e6, h_us, all_us, SPLIT - FUSED))
show(
    pd.DataFrame(lines, columns=["chunk", "state, MB/token", "state, us", "all between kernels, us", "to explain, us"])
)

# %% [markdown]
# ## The verdicts

# %%
judgements(*(c.id for c in ASKED))

# %%
judgements(*(c.id for c in ASKED), device=DEVICE)

# %%
phase(CARD).arms(DEVICE)

# %%
phase(CARD).kernels(DEVICE)

# %%
rows = [r for c in (CARD, "p5-cuda", "lp9-kernel") for a in figures.judged_rows(phase(c).card, DEVICE).values()
        for r in a.values()]  # fmt: skip
shown = figures.roofline_of(rows, DEVICE, "Gated DeltaNet")
picture(shown.figure, shown.alt)

# %% [markdown]
# The two verdicts answer different questions: at one sequence the pipeline's parallelism counts as much as its traffic,
# and GB10's trace covers many prompts on a third of the SMs. `p5_p6_h200` takes that further.
#
# ## The state in decode: the copy and the gather
#
# Two patches landed on GB10: one writes the state where it stands, the next reads it by sequence id. Both gains were
# there to be computed: what disappears was recorded as a share of the step (Amdahl's ceiling).

# %%
ceiling, lines = [], []
copied, gathered = (value(f"lp.a2-phase2-decompose.gb10.share.control.bucket{b}.npl128") / 100
                    for b in ("d2d-state-copy", "get-rows"))  # fmt: skip
for patch, part in (("0018", copied), ("0019", gathered / (1 - copied))):
    rates = [
        recorded.figure(f"lp.patch-{patch}.gb10.decode-agg.{arm}.npl128.npp128") for arm in ("control", "candidate")
    ]
    before, after = (float(r.value) for r in rates)
    lines.append((patch, before, after, 100 * (after / before - 1), 100 * roofline.saving_ceiling(part, 1)))
show(pd.DataFrame(lines, columns=["patch", "before tok/s", "after tok/s", "gain %", "ceiling by its share %"]))

# %%
phase("lp9-kernel").arms(DEVICE)

# %% [markdown]
# ## What would change it

# %%
notebook.would_change(ASKED)
