# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # NVFP4 products: one dispatch test, and what FP4 weights buy without FP4 tensor cores
#
# In decode llama.cpp chose a vector kernel per sequence for one projection of the GDN layers, because a test looked at
# `ne[1]` of a tensor with a trailing dimension: the weights were walked once for every sequence. A 2-D view of the same
# memory takes one GEMM (LP11). Our cards ask the same of kernels written here, on a GPU without FP4 tensor cores, and
# how close these come to their floor.
#
# **For a product of your own:** add a candidate to `kernels/nvfp4/`, name it in a card, and set `CARD`.

# %%
import pandas as pd

from lab import device, draw, family, judgements, phase, picture, show, value
from lab.base import devices
from lab.check import aot
from lab.write import figures, notebook

CARD = "lp11-kernel"
DEVICE = device().id  # the one with most measured rows
nvfp4 = family("nvfp4")  # before its Triton modules are imported, as it sets Triton's interpreter where no GPU is
from kernels.nvfp4 import route

# %%
asked = phase("lp11")
asked

# %% [markdown]
# ## The mechanism
#
# Four bits a weight, an e4m3 scale for sixteen of them: 4.5 bits. Both routes below are `kernels/nvfp4/route.py`.

# %%
M, N, K = 128, 5120, 6144
trap, collapsed = route.choose_uncollapsed((K, 1, M)), route.choose((K, M))
walked = nvfp4.parts.cost(nvfp4.parts.workload(f"m{M}_n{N}_k{K}"), "nvfp4-w4a16").bytes - 2 * (M * K + M * N)
show(pd.DataFrame(
    [(f"3-D operand [{K}, 1, {M}], dispatched on ne[1] = 1", trap.calls, trap.calls * walked / 1e6, str(trap)),
     (f"2-D view [{K}, {M}], ne[1] = n_seqs", collapsed.calls, collapsed.calls * walked / 1e6, str(collapsed))],
    columns=["operand", "walks of the weights", "MB walked", "route"]), code=["route"])  # fmt: skip

# %% [markdown]
# ## Checked here, before anything is timed
#
# Against float64 on the decoded weights, outputs poisoned with NaN, at an odd shape. What a check must reject (one
# wrong element, a sign, a column left unwritten) is held in `tests/claims/test_nvfp4.py`.

# %%
phase(CARD).check("m16_n75_k256_bf16_seqs16")

# %% [markdown]
# ## As recorded on GB10
#
# The projection was a third of the step. Taking it from 128 passes to one product predicts the decode rate that the
# source then measured within two per cent. One thing does not follow: 128 reads of the weights from DRAM in that time
# would need several times the bandwidth of a GB10, so most of these passes were served by a cache.

# %%
LP11 = "lp.lever1-ssm-out-2d.gb10"
names = ["o-proj-cost.control", "o-proj-cost.candidate", "mul-mat-vec-q-instances.control"]
before_ms, after_ms, instances = (value(f"{LP11}.{n}") for n in names)
rate, after_rate = (value(f"{LP11}.decode-agg.{arm}.npl128.npp128") for arm in ("control", "candidate"))
step_ms = 128 / rate * 1e3
predicted = 128 / (step_ms - instances * (before_ms - after_ms)) * 1e3
figures_ = {"ms a projection before": before_ms, "after": after_ms, "projections a step": instances,
            "step before, ms": step_ms, "predicted tok/s": predicted, "measured tok/s": after_rate,
            "GB/s if all were DRAM": M * walked / before_ms / 1e6}  # fmt: skip
show(pd.DataFrame([figures_]))

# %%
gb10, cost = devices.get("gb10"), nvfp4.parts.cost(nvfp4.parts.workload(f"m{M}_n{N}_k{K}"), "nvfp4-w4a16")
points = [draw.point(words, cost.flops, cost.bytes, ms * 1e3, "recorded")
          for words, ms in ((f"{M} GEMV passes", before_ms), ("one GEMM", after_ms))]  # fmt: skip
picture(
    draw.roofline(gb10, points, ("fp4", "bf16"), "GB10: the output projection at 128 sequences, as recorded"),
    "Roofline of GB10 with the recorded projection: the GEMVs far below the GEMM, both left of the ridge.",
)

# %% [markdown]
# ## On the device with rows
#
# The kernels alone, with gates of their own. LP6 is a lever (occupancy), P3 holds 16-bit activations against quantised
# ones: faster arithmetic on e4m3, at fifteen times the error.

# %%
OWN = ("lp11-kernel", "lp11-mxfp4-kernel", "w4a16-gemv", "w4a16-gemm", "lp6-minblocks-kernel", "lp6-mmq-x-kernel",
       "lp6-mmq-y-kernel", "p3-kernel", "p3-cast-kernel")  # fmt: skip
judgements("lp11", *OWN, device=DEVICE)

# %%
phase(CARD).arms(DEVICE)

# %%
phase(CARD).kernels(DEVICE)

# %% [markdown]
# The family's arms on the roofline, a roof for each pipe that a point uses:

# %%
PLACED = ("lp11-kernel", "w4a16-gemv", "w4a16-gemm", "w4a8-prefill-limit")
arms = [a for c in PLACED for a in figures.judged_rows(phase(c).card, DEVICE).values()]
rows = [r for a in arms for r in a.values()]
shown = figures.roofline_of(rows, DEVICE, "NVFP4 products")
picture(shown.figure, shown.alt)

# %% [markdown]
# ## Which GPUs get FP4 tensor cores from Triton
#
# None of the kernels above uses FP4 arithmetic: Hopper has none. GB10 (sm_121) has it, and whether Triton emits it for
# `tl.dot_scaled` is asked by compiling ahead of time: from 3.8.0 on it does. Modelled evidence: it says that the
# instruction is there, not that it is fast.

# %%
compiled = pd.DataFrame([(f"sm_{r.target}", r.candidate, r.compiler.removeprefix("triton "),
                          r.instruction if r.status == "ok" else f"{r.status}") for r in aot.kept()],
                        columns=["target", "operands", "Triton", "emits"])  # fmt: skip
show(compiled.pivot(index=["operands", "target"], columns="Triton", values="emits").reset_index())

# %% [markdown]
# ## What would change it

# %%
notebook.would_change(phase(c).card for c in ("lp11", *OWN))
