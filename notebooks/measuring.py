# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Can the clock be trusted?
#
# Every measured verdict stands on `lab measure`. Here is what it was held against: the ceilings of the card as
# measured, our times beside Kineto's and ncu's for the same kernels, and how far a ratio moves when the same comparison
# is taken again. The method itself is the docstring of `lab/bench/sampling.py`.
#
# **For a GPU of your own:** run `lab measure --ceilings` and `lab measure CARD --cross-check` there, and set `DEVICE`.

# %%
import pandas as pd

from lab import device, draw, picture, show
from lab.bench import crosscheck
from lab.place import ceilings
from lab.study import repeats

DEVICE = device().id  # the one with most measured rows

# %% [markdown]
# ## Ceilings
#
# What one program that does one thing well reached on this card; the best over all runs, against the datasheet, which
# nothing may exceed. A row that beats the datasheet is INVALID, one that beats the measured ceiling by more than 3 % is
# suspect. A copy captured in a graph is a memcpy node and much slower than the copy kernel, so both are named. What
# products draw depends on their operands: random data back to back, rested, and zeros, which toggle no bit ("quiet").

# %%
SCALE = {"GB/s": 1e9, "TFLOP/s": 1e12, "TOP/s": 1e12}
place, seen = device(DEVICE), ceilings.latest(DEVICE)
sheet = {n: place.peak(n.split("_")[0]).base if n.split("_")[0] in place.peaks else place.bandwidth.base
         for n, c in seen.items() if c.unit in SCALE and n != "l2_read"}  # fmt: skip
levels = [(n, 100 * seen[n].value * SCALE[seen[n].unit] / peak, f"{seen[n].value:,.4g} {seen[n].unit}")
          for n, peak in sheet.items()]  # fmt: skip
picture(
    lambda: draw.levels(levels, f"{place.name}: measured ceilings", "% of the datasheet", 100),
    "Bars of each measured ceiling in % of the datasheet, none beyond 100.",
)

# %%
show(pd.DataFrame([(c.name, c.value, c.unit, c.method, c.run) for c in seen.values()],
                  columns=["ceiling", "value", "unit", "method", "run"]), code=["ceiling"])  # fmt: skip

# %% [markdown]
# ## The clock against two others
#
# For each kernel: a replay of its graph over rotating buffers, less the measured gap between graph nodes, against
# Kineto's durations in one replay. The dashed limits: 3 % for 20 us and more, 8 % below. ncu serialises and flushes, so
# it is shown and not judged by.

# %%
checked = [row for row in crosscheck.latest(DEVICE) if row.status == "ok"]
LIMITS = [[(1, s * 8), (20, s * 8), (20, s * 3), (1000, s * 3)] for s in (-1, 1)]
picture(
    lambda: draw.scatter({"kernels": [(r.kineto_us, r.difference_pct) for r in checked]},
                 f"{place.name}: our clock and Kineto's", "Kineto's time, us", "ours against it, %", LIMITS),
    "Difference of our clock to Kineto's in % against the kernel's time, with the limits dashed; all points inside.",
)  # fmt: skip

# %%
COLUMNS = ["name", "workload_id", "kernels_per_call", "graph_us", "kernel_us", "kineto_us", "difference_pct", "ncu_us"]
table = pd.DataFrame([row.to_json() for row in checked], columns=COLUMNS).sort_values("kineto_us").round(2)
show(table, code=["name", "workload_id"])

# %% [markdown]
# ## Noise, and the same comparison again
#
# In each comparison the control is there twice, with buffers of its own: what it differs from itself is the noise floor
# that an effect must exceed. A verdict is a ratio, so what must repeat is the ratio: circles are its largest difference
# between runs of the same code, which must stay under 1 % (dashed) for kernels of more than 20 us; triangles are runs
# under the power cap, where two arms are slowed differently from run to run.

# %%
floors, again = repeats.floors(DEVICE), repeats.repeated(DEVICE)
spread = {
    "ratio again": [(r.us, max(r.difference_pct, 0.01)) for r in again if not r.throttled],
    "A/A floor": [(f.us, max(f.aa_pct, 0.01)) for f in floors],
    "ratio again, throttled": [(r.us, max(r.difference_pct, 0.01)) for r in again if r.throttled],
}
picture(
    lambda: draw.scatter(
        spread, f"{place.name}: noise by kernel time", "shorter arm, us", "%", [[(20, 1), (5000, 1)]], log="xy"
    ),
    "Noise floors and run-to-run differences in % against the kernel's time, log-log, with the limit of 1 % dashed.",
)

# %%
show(pd.DataFrame([(r.card, r.workload, r.runs, r.us, r.low, r.high, r.difference_pct, r.throttled) for r in again],
                  columns=["card", "workload", "runs", "us", "lowest ratio", "highest", "difference %", "throttled"])
     .sort_values("difference %").tail(12).round(4), code=["card", "workload"])  # fmt: skip
