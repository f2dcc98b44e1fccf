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
# # Can the clock be trusted?
#
# Every measured verdict stands on `lab measure`. This page shows what it was held against on the H200: the ceilings of
# the card as measured, our times beside Kineto's and ncu's for the same kernels, and how far a ratio moves when the
# same comparison is taken again. The method itself is the docstring of `lab/bench/sampling.py`.

# %%
from __future__ import annotations

import pandas as pd

from lab.base import devices
from lab.bench import crosscheck
from lab.card import phases
from lab.judge import evidence
from lab.place import ceilings, roofline
from lab.row import store
from lab.row.records import Measurement
from lab.write import notebook

DEVICE = devices.get("h200")

# %% [markdown]
# ## Ceilings
#
# What one program that does one thing well reached on this card; the best over all runs. Beside them the datasheet,
# which nothing may exceed: a row that beats it is INVALID, a row that beats the measured ceiling by more than 3 % is
# suspect. A copy captured in a graph is a memcpy node and much slower than the copy kernel, so both are named.
#
# Products run into the power cap, and what they draw depends on their operands. So they are taken on random data back
# to back, on random data with rests, and with rests on zeros, which toggle no bit ("quiet"). Shares are of random data;
# whether a speed is possible is asked of the fastest of the three.

# %%
known = ceilings.latest(DEVICE.id)
sheet = {"copy_kernel": "memory_bandwidth", "read": "memory_bandwidth", "write": "memory_bandwidth"}
sheet |= {pipe: f"peak.{pipe}" for pipe in ("bf16", "fp8", "int8")}
UNIT = {"GB/s": 1e9, "TFLOP/s": 1e12, "TOP/s": 1e12}
rows = []
for name, found in known.items():
    share = found.value * UNIT[found.unit] / DEVICE.fact(sheet[name]).base if name in sheet else None
    rows.append([name, round(found.value, 2), found.unit, share and round(100 * share, 1), found.method, found.run])
notebook.show(
    pd.DataFrame(rows, columns=["ceiling", "value", "unit", "% of datasheet", "method", "run"]),
    code=["ceiling", "run"],
) if rows else notebook.text("No ceilings are measured yet: `lab measure --ceilings`.")

# %%
for name, found in known.items():
    if name in sheet:
        assert found.value * UNIT[found.unit] <= DEVICE.fact(sheet[name]).base, f"{name} beats the datasheet"
if {"copy_kernel", "copy_graph", "read", "write"} <= known.keys():
    assert known["copy_graph"].value < known["copy_kernel"].value < known["read"].value

# %% [markdown]
# ## The clock against two others
#
# For each kernel: a replay of its graph over rotating buffers, per call; the same less the measured gap between graph
# nodes, which is what the kernels themselves took; Kineto's kernel durations in one replay; ncu's `gpu__time_duration`
# of one call with flushed caches. ncu serialises and flushes, so it is shown and not judged by. The limits: within 3 %
# of Kineto for 20 us and more, within 8 % below.

# %%
checked = crosscheck.latest(DEVICE.id)
timed = [row for row in checked if row.status == "ok"]
columns = ["name", "workload_id", "kernels_per_call", "graph_us", "kernel_us", "kineto_us", "difference_pct", "ncu_us"]
table = pd.DataFrame([row.to_json() for row in timed], columns=columns).sort_values("kineto_us").round(2)
notebook.show(table, code=["name", "workload_id"]) if timed else notebook.text("No cross-check is measured yet.")

# %%
for row in timed:
    again = crosscheck.verdict(row.graph_us, row.gap_us, row.kernels_per_call, row.kineto_us)
    assert again["within"] == row.within
outside = [row for row in timed if not row.within]
lengths = sorted(row.kineto_us for row in timed)
notebook.text(
    f"{len(timed)} kernels from {lengths[0]:.1f} us to {lengths[-1]:.0f} us; {len(outside)} outside the limits"
    + "".join(f"; {r.name} at {r.workload_id}: {r.difference_pct:+.1f} %" for r in outside)
    + "."
    if timed
    else "Nothing to compare."
)

# %% [markdown]
# ## The same comparison again
#
# A verdict is a ratio, so what must repeat is the ratio. For every comparison that was measured in more than one run
# of the same code, alone and not among rival libraries: the ratio of each run as the judge forms it, block by block,
# and the largest difference between two runs. It must stay under 1 % for kernels of more than 20 us.


# %%
def code(row: Measurement) -> str:
    """The commit that the row's code was, as stated where it ran, else the one it lay on top of."""
    return row.stated_commit or row.commit


repeats = []
for card in phases.cards().values():
    every = store.rows(device=DEVICE.id, phase=card.id)
    crowded = {row.run for row in every if row.arm == "peer"}
    alone = [row for row in every if row.run not in crowded]
    same_code = [row for row in alone if code(row) == code(alone[-1])]
    ratios: dict[str, list[float]] = {}
    shortest: dict[str, float] = {}
    capped: dict[str, str] = {}
    for run in sorted({row.run for row in same_code}):
        for workload, pair in evidence.pairs(row for row in same_code if row.run == run).items():
            change = evidence.change_pct(*pair)
            if change and pair[0] and pair[1]:
                ratios.setdefault(workload, []).append(1 + change[0] / 100)
                shortest[workload] = min(pair[0].median_us, pair[1].median_us)
                capped[workload] = capped.get(workload, "") or pair[0].throttled or pair[1].throttled
    for workload, found in ratios.items():
        if len(found) > 1:
            spread = 100 * (max(found) / min(found) - 1)
            line = [card.id, workload, len(found), shortest[workload], min(found), max(found), spread]
            repeats.append([*line, capped[workload]])
frame = pd.DataFrame(
    repeats,
    columns=["phase", "workload", "runs", "shortest us", "lowest ratio", "highest ratio", "difference %", "throttled"],
)
# Under the power cap two arms of different appetite are slowed differently from run to run: shown, not asserted.
assert (frame["difference %"][(frame["shortest us"] > 20) & (frame["throttled"] == "")] < 1).all()
notebook.show(frame.round(4), code=["phase", "workload"]) if repeats else notebook.text("Nothing was measured twice.")

# %% [markdown]
# ## Noise floors
#
# In each comparison the control is there twice, with buffers of its own. What it differs from itself is the noise that
# an effect must exceed; beside it the interval of the ratio and how far the candidate is from its floor.

# %%
floors = []
for card in phases.cards().values():
    for workload, (control, candidate) in evidence.pairs(store.rows(device=DEVICE.id, phase=card.id)).items():
        change = evidence.change_pct(control, candidate)
        if control and candidate and change:
            place = roofline.place(DEVICE, candidate.flops, candidate.bytes, candidate.pipe)
            share = roofline.roofline_fraction(place.floor_us, candidate.median_us)
            interval = f"{change[1]:+.2f} to {change[2]:+.2f}"
            floors.append([card.id, workload, candidate.aa_pct, change[0], interval, 100 * share])
            assert change[1] <= change[0] <= change[2]
frame = pd.DataFrame(floors, columns=["phase", "workload", "A/A floor %", "change %", "95 % interval", "% of roofline"])
notebook.show(frame.round(2), code=["phase", "workload"]) if floors else notebook.text("No rows yet.")
