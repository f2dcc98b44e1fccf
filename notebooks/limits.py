# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # How far from the limit?
#
# NVFP4 products, Gated DeltaNet and decode attention have kernels written for Hopper. Their cards set a limit before
# anything was measured: a bare read of the same bytes, the rate of the matrix unit, or a library's time. Here each
# stands between the floor, its target and the fastest rival of the same run. Cold L2, CUDA-graph timing, arms
# interleaved. Misses are named.
#
# **For a kernel of your own:** write a card that ends in `-limit` with its target in us; it is then in the tables.

# %%
import pandas as pd

from lab import device, draw, judgements, phase, phases, picture, rows, show, text
from lab.bench import counters
from lab.card import phases as cards
from lab.check import families
from lab.study import limits, routes
from lab.study.audit import run as audit
from lab.write import figures, notebook

DEVICE = device().id  # the one with most measured rows
LIMITS = [p.card for p in phases() if p.id.endswith("-limit") or p.id == "w4a16-decode"]

# %%
shown = [(title.title, "", [f.times_as_fast for f in found if f.times_as_fast])
         for title in limits.lines() if (found := limits.limits(cards.card(title.card), DEVICE))]  # fmt: skip
picture(
    lambda: draw.rivals([line for line in shown if line[2]], f"{DEVICE}: against the fastest rival"),
    "A line a question, a point a workload: the fastest rival's time over ours, one upright line where they are equal.",
)

# %%
judgements(*(c.id for c in LIMITS), device=DEVICE)

# %% [markdown]
# `floor` is the larger of compulsory bytes over the datasheet's bandwidth and flops over its peak: nothing runs faster.
# `throttled` is what the driver reported during the window: large products run into the power cap. `kernel` compares
# the launch that a row recorded with the one that the present code would choose.


# %%
def table(card_id: str) -> object:
    """Each workload of a card: ours, the fastest rival, the target if its gate has one, the floor."""
    card, lines = cards.card(card_id), []
    target = {c.workload: str(c).split(" at ")[0] for c in card.gate.require}
    for f in limits.limits(card, DEVICE):
        lines.append((f.workload, f.ours_us, f.rival.name if f.rival else "", f.rival_us, f.times_as_fast,
                      target.get(f.workload, ""), f.floor_us, f"{f.of_floor:.0%}", f.ours.throttled,
                      families.former(f.ours) or "same launch"))  # fmt: skip
    names = ["workload", "ours us", "best rival", "rival us", "rival / ours", "target", "floor us", "of floor",
             "throttled", "kernel"]  # fmt: skip
    return (
        show(pd.DataFrame(lines, columns=names).round(2), code=["workload", "best rival", "target"])
        if lines
        else phase(card_id)
    )


table("w4a16-decode")

# %%
table("w4a16-prefill-limit")

# %%
table("w4a8-prefill-limit")

# %%
ours = [f.ours for c in LIMITS for f in limits.limits(c, DEVICE)]
text(notebook.origin(ours))

# %% [markdown]
# W4A8 buys time with accuracy, so each time stands beside its error against the float64 product. `promoted` adds the
# tensor cores' short sums to float32 every 512 values of K, `fast` only at the end of a tile. On normals the two err
# alike; the `positive` workloads have sums of one sign, where `fast` loses what its sums cut off.

# %%
ARMS = {"W4A16": "cuda_gemm", "fast": "cuda_w4a8", "promoted": "cuda_w4a8_promoted"}
priced = [{"workload": w, **{f"{k} us": arms[n].median_us for k, n in ARMS.items() if n in arms},
           **{f"{k} error %": 100 * arms[n].relative_error for k, n in ARMS.items() if n in arms}}
          for w, arms in figures.judged_rows(phase("w4a8-prefill-limit").card, DEVICE).items()]  # fmt: skip
show(pd.DataFrame(priced), code=["workload"])

# %%
table("gdn-prefill-limit")

# %%
table("gdn-decode-limit")

# %%
table("kv-fp8-limit")

# %%
table("kv-q8-limit")

# %%
table("kv-bf16-limit")

# %% [markdown]
# ## What stands in the way
#
# For each target that was missed: what the hardware counters name as its bound (`lab counters`, by Nsight Compute). The
# unit nearest to its peak is the bound when it is at 60 % of it or more; below that every unit waits, and the most
# frequent reason is named. Times under that profiler are perturbed and not compared with any above.

# %%
seen, lines = counters.newest(DEVICE), []
for judged in judgements(*(c.id for c in LIMITS), device=DEVICE):
    candidate = cards.card(judged.phase).candidate
    for workload in [f.condition.workload for f in judged.verdict.findings
                     if f.role == "require" and f.state in ("fails", "noise")]:  # fmt: skip
        for row in seen.get((candidate, workload), []):
            kernel = row.kernel.split("(")[0].removeprefix("void ")
            moved = (row.dram_read_bytes + row.dram_write_bytes) / 1e6
            lines.append((judged.phase, workload, kernel, counters.bound(row), moved, row.bytes / 1e6))
        if (candidate, workload) not in seen:
            lines.append((judged.phase, workload, candidate, "no counters yet", None, None))
show(pd.DataFrame(lines, columns=["card", "workload", "kernel", "bound by the counters", "DRAM MB", "compulsory MB"]),
     code=["card", "workload", "kernel"])  # fmt: skip

# %% [markdown]
# ## Which kernel where
#
# The router's tables, from the same rows: the fastest of what competes at each shape, and what the worst choice would
# cost. `lab routes FAMILY` prints them and answers for one shape.

# %%
lines, routed = [], [n for n in ("nvfp4", "gdn", "q8") if rows(family=n, device=DEVICE)]
for name in routed:
    for entry in routes.crossovers(routes.competing(routes.table(name, DEVICE), ())):
        where = " ".join(f"{a}={v}" for a, v in entry.shape.items())
        lines.append((name, where, f"{entry.axis}={entry.at}", entry.best, entry.times_us[entry.best], entry.worst,
                      f"{entry.cost_of_worst:.2f}x"))  # fmt: skip
show(pd.DataFrame(lines, columns=["family", "shape", "at", "fastest", "us", "worst", "costs"]), code=["fastest"])

# %%
PANELS: dict[str, dict[str, list[tuple[float, float]]]] = {}
for p in routes.table("nvfp4", DEVICE).points if "nvfp4" in routed else ():
    if p.candidate in ("cuda_decode", "cuda_gemm", "torch_bf16", "triton_gemv", "triton_gemm", "cuda_w4a8_promoted"):
        panel = PANELS.setdefault(" ".join(f"{a}={v}" for a, v in p.shape), {})
        panel.setdefault(p.candidate, []).append((p.at, p.median_us))
CURVED = {shape: panel for shape, panel in PANELS.items() if max(map(len, panel.values())) > 2}
picture(
    lambda: draw.lines(
        CURVED, f"NVFP4 on {DEVICE}: time over tokens; W4A8 competes only where asked for", "M, tokens", "us"
    ),
    "A panel a weight shape that was measured at three numbers of tokens or more: the median time of six kernels over "
    "1 to 4096 tokens on logarithmic axes. The decode kernel is lowest for few tokens, the tile kernel or torch above.",
)

# %% [markdown]
# ## What these rows cannot decide
#
# A gate whose line lies inside the spread of the control against itself decides nothing.

# %%
found = [f for f in audit.audit("measured").findings if any(c.id in f.subject for c in LIMITS)]
show(pd.DataFrame([(f.check, f.subject, f.sentence) for f in found], columns=["check", "subject", "finding"]))
