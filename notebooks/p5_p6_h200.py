# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # P5 and P6, asked again with kernels at their limit
#
# GB10's record says NO-GO twice: a six-kernel Gated DeltaNet pipeline instead of one fused kernel (P5), and a KV cache
# of half the bytes (P6). Here the same lines are asked with kernels written for a Hopper GPU, at the record's shapes.
#
# **For kernels of your own:** name them `beside` in `p5-cuda` or `p6-cuda`, measure, and read the same figures.

# %%
import numpy as np
import pandas as pd

from lab import device, draw, family, judgements, phase, picture, show, value
from lab.base import devices, models
from lab.judge import evidence
from lab.write import figures, notebook

DEVICE = device().id  # the one with most measured rows
gdn = family("gdn")
from kernels.gdn import cost as gdn_cost

gb10, here = devices.get("gb10"), devices.get(DEVICE)
P5, P6 = ("p5-35b", "p5-cuda", "p5-chunk-length", "gdn-nmse"), ("p6-cuda", "kv-q8-limit", "kv-batch-sawtooth")
notebook.questions(phase(i).card for i in (*P5, *P6))

# %%
judgements(*P5, *P6, device=DEVICE)

# %% [markdown]
# ## P5
#
# `p5-35b`: does the pipeline win? `p5-cuda` asks the other way round, by the same line: does a fused form at its limit
# win against the pipeline? So the two ask for opposite things. For the Triton pair the pipeline takes 18 and 12 % less,
# against a fused control that spills, the second of which a power cap leaves undecided beside the line of 10; for the
# question it does not flip: with the fused form at its limit the answer is GB10's.

# %%
phase("p5-35b").at_the_line(DEVICE)

# %%
phase("p5-cuda").arms(DEVICE)

# %% [markdown]
# Where the pipeline's time goes, from the committed trace of one sequence of 2,048 tokens:

# %%
phase("p5-kernel").kernels(DEVICE)

# %% [markdown]
# ### The chain as a term of the cost model
#
# By bytes and flops alone the pipeline, which writes and reads what its kernels hand to each other, could only lose. A
# scan's programs each walk one sequence's chunks in order, so a third term stands beside those two: the chunk steps of
# one program times the waves of programs, times the time of a step. Step and fixed part are least squares over one
# sequence; 8 and 32 sequences are held out. The chain decides for the fused kernel, the bytes for the pipeline; all
# errors have one sign.

# %%
SCANS = {"fused_chunk_c16": 16, "fused_chunk_c32": 32, "fused_chunk": 64, "split_pipeline": 64}  # tokens a chunk
COLUMNS, HELD = 64, 2  # of v that a program carries; programs an SM holds, by 214 to 255 registers a thread
SMS = int(here.fact("sms").value)


def bytes_us(problem, form: str) -> float:
    """Bytes of an algorithm in bf16 at the peak bandwidth, in us."""
    cost = gdn_cost.algorithm_cost(problem, SCANS[form], 2, form == "split_pipeline")
    return cost.bytes / here.bandwidth.base * 1e6


def steps_of(problem, form: str) -> int:
    """Dependent chunk steps of the whole launch."""
    return gdn_cost.chain_steps(problem, SCANS[form], COLUMNS, SMS * HELD)


runs = figures.judged_rows(phase("p5-chunk-length").card, DEVICE)
single = [p for w in runs if (p := gdn.parts.workload(w))["batch"] == 1]
fits, lines = {}, []
for form in SCANS if single else ():
    x, rest = ([f(p, form) for p in single] for f in (steps_of, bytes_us))
    us = np.array([runs[p.id][form].median_us for p in single]) - rest
    fits[form] = tuple(float(f) for f in np.polyfit(x, us, 1))
for workload, arms in runs.items():
    problem = gdn.parts.workload(workload)
    for form in (f for f in SCANS if f in arms and problem["batch"] > 1):
        parts, us = (bytes_us(problem, form), steps_of(problem, form) * fits[form][0]), arms[form].median_us
        predicted = sum(parts) + fits[form][1]
        lines.append((workload, form, *parts, predicted, us, 100 * (predicted / us - 1), 100 * (parts[0] / us - 1)))
NAMES = ["workload", "form", "bytes us", "chain us", "predicted us", "measured us", "error %", "bytes alone, error %"]
show(pd.DataFrame(lines, columns=NAMES), code=["workload", "form"])

# %% [markdown]
# ### The same processors with less bandwidth
#
# An H100 has an H200's multiprocessors and clock, and 3.35 instead of 4.8 TB/s: of the three terms only the bytes'
# grows. That added to each time here predicts the time there within 7 %, and with it that the pipeline, which moves
# four to five times the bytes of the fused kernel, loses there: 12 % more for 12 % less, between two devices of one
# generation.

# %%
OTHER = devices.get("h100")
pair = phase("p5-35b").card
there, lines = figures.judged_rows(pair, OTHER.id), []
for workload, arms in figures.judged_rows(pair, DEVICE).items():
    both = [form for form in (pair.control, pair.candidate) if form in arms and form in there.get(workload, {})]
    for form in both:
        bytes_here, us = bytes_us(gdn.parts.workload(workload), form), arms[form].median_us
        more = bytes_here * (here.bandwidth.base / OTHER.bandwidth.base - 1)
        seen = there[workload][form].median_us
        lines.append((workload, form, us, more, us + more, seen, 100 * ((us + more) / seen - 1)))
show(pd.DataFrame(lines, columns=["workload", "form", f"{DEVICE} us", "bytes, more us", f"{OTHER.id} predicted us",
                                  "measured us", "error %"]), code=["workload", "form"])  # fmt: skip

# %%
phase("p5-35b").at_the_line(OTHER.id)

# %% [markdown]
# **GB10 from these steps**, assuming that a step takes as many clocks on either device (clocks from float32 peaks over
# SMs and 256 flops). us per prefill token over the GDN layers of Qwen3.6-35B-A3B. Bandwidth shortens no chain: that is
# why the Triton pair changes places. The order comes out right, the size is missed by a factor that both forms share.

# %%
layers = models.get("q36-35b-a3b").facts["gdn_layers"].value
clock = [d.peak("f32").base / (d.fact("sms").value * 256) for d in (here, gb10)]
FORMS = (("fused", "control.npp2048.itemm5", "fused_chunk_c16", 16),
         ("six kernels", "candidate.npp2048.itemfla", "split_pipeline", 64))  # fmt: skip
lines, problem = [], gdn.parts.workload("b32_t2048_hk16_hv32_d128")
token = layers / (problem["batch"] * problem["T"])
for name, figure, form, chunk in FORMS if fits else ():
    moved = gdn_cost.algorithm_cost(problem, chunk, 4, form == "split_pipeline").bytes / gb10.bandwidth.base * 1e6
    steps = gdn_cost.chain_steps(problem, chunk, problem["D"], int(gb10.fact("sms").value))
    parts = [us * token for us in (moved, steps * fits[form][0] * clock[0] / clock[1])]
    lines.append((name, *parts, sum(parts) + fits[form][1] * token, value(f"lp.p5.gb10.gdn-us-per-tok.{figure}")))
show(pd.DataFrame(lines, columns=["form on GB10", "bytes us", "chain us", "predicted us", "recorded us"]))

# %% [markdown]
# ### Chunk length, and the error beside fla-core's
#
# In the one Triton kernel that takes all three, fewer dependent steps outweigh what the larger chunk spills; GB10's
# source found no gain in 64. NMSE of each output on the same inputs, against the recurrence in float64:

# %%
found = figures.judged_rows(phase("gdn-nmse").card, DEVICE)
lines = [{"workload": w, "arm": n, **{f"NMSE of {o}": e**2 for o, e in evidence.errors(row).items() if o}}
         for w, rows in found.items() for n, row in rows.items()]  # fmt: skip
show(pd.DataFrame(lines), code=["workload", "arm"])

# %% [markdown]
# ## P6
#
# The kernel alone, with the fastest of each format and FlashAttention-3 beside it. A fixed part (start, fill, merge) is
# the same for both formats, so one sequence gains least. What it is worth in a step: `kv_ceiling`.

# %%
phase("p6-cuda").arms(DEVICE)

# %% [markdown]
# ### One sequence more
#
# A kernel that gives whole heads to whole SMs is level until they are all taken and jumps at the next sequence.

# %%
saw = phase("kv-batch-sawtooth").card
curves: dict[str, list[tuple[int, float]]] = {}
for rows in figures.judged_rows(saw, DEVICE).values():
    for name in (saw.control, saw.candidate, *saw.beside):
        if row := rows.get(name):
            curves.setdefault(name, []).append((row.workload["batch"], row.median_us / row.workload["batch"]))
picture(
    lambda: draw.times(curves, f"{here.name}: decode attention at 8,192 tokens, D = 256", marks=(32, 64)),
    "Time per sequence against the batch for each kernel, with lines at 32 and 64 sequences.",
)

# %% [markdown]
# ## What would change it

# %%
notebook.would_change(phase(i).card for i in (*P5, *P6))
