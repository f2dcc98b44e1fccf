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
# # How far from the limit?
#
# Three families have kernels written for Hopper: NVFP4 products, Gated DeltaNet, decode attention over a paged cache.
# Their cards set a limit before anything was measured: a bare read of the same bytes, the rate of the matrix unit, or a
# library's time. This page puts each kernel between the floor, its target and the fastest rival of the same run. Every
# number is from rows of `profiles/h200`, cold L2, CUDA-graph timing, arms interleaved.

# %%
from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kernels.nvfp4 import route
from lab import draw
from lab.base import devices
from lab.bench import counters
from lab.card import phases
from lab.check import families
from lab.place import roofline
from lab.row import store
from lab.row.records import Measurement
from lab.study import routes
from lab.write import notebook

DEVICE = devices.get("h200")
LIMITS = [card for card in phases.cards().values() if card.id.endswith("-limit") or card.id == "w4a16-decode"]
assert len(LIMITS) >= 5


# %%
def newest(card: phases.Card) -> dict[str, list[Measurement]]:
    """workload -> rows of the newest run in which the candidate is ok."""
    found: dict[str, dict[str, list[Measurement]]] = {}
    for row in store.rows(DEVICE.id, card.id):
        found.setdefault(row.workload_id, {}).setdefault(row.run, []).append(row)
    kept = {}
    for workload, runs in found.items():
        good = [r for r, rows in runs.items() if any(x.name == card.candidate and x.status == "ok" for x in rows)]
        if good:
            kept[workload] = runs[max(good)]
    return kept


def line(card: phases.Card, workload: str, rows: list[Measurement]) -> dict:
    """One workload: ours, the fastest other arm, the target of the gate, the floor."""
    ok = {r.name: r for r in rows if r.status == "ok"}
    ours = ok[card.candidate]
    own = set(families.load(card.family).candidates) - set(families.load(card.family).peers) - {"torch_bf16"}
    # What a user could run instead: libraries' arms, beside a 16-bit cache those of 16 bits alone.
    same = {"bf16"} if ours.precision == "bf16" else {r.precision for r in rows}
    rivals = {n: r.median_us for n, r in ok.items() if n not in own and r.precision in same}
    best = min(rivals, key=lambda n: rivals[n]) if rivals else ""
    floor = roofline.place(DEVICE, ours.flops, ours.bytes, ours.pipe)
    asked = [c for c in card.gate.require if c.workload == workload]
    target = ""
    for c in asked:
        target = f"{c.threshold:g} us" if c.unit == "us" else f"{c.threshold:+g} % of {card.control}"
    return {
        "workload": workload,
        "ours us": round(ours.median_us, 2),
        "best rival": best,
        "rival us": round(rivals[best], 2) if best else None,
        "rival / ours": round(rivals[best] / ours.median_us, 2) if best else None,
        "target": target,
        "floor us": round(floor.floor_us, 2),
        "of floor": f"{roofline.roofline_fraction(floor.floor_us, ours.median_us):.0%}",
        "throttled": ours.throttled,
        "kernel": notebook.former(ours) or "same launch",
        "commit": (ours.stated_commit or ours.commit)[:7],
    }


tables = {card.id: pd.DataFrame([line(card, w, r) for w, r in newest(card).items()]) for card in LIMITS}
judged = {card.id: notebook.measured(card.id, DEVICE.id) for card in LIMITS}
assert all((table["ours us"] > table["floor us"]).all() for table in tables.values() if len(table))
decode = tables["w4a16-decode"].set_index("workload")["ours us"]
lines = phases.card("w4a16-decode").gate.require
assert {c.unit for c in lines} == {"us"}
assert len(lines) == 8
assert all(decode[c.workload] <= c.threshold for c in lines)

# %% [markdown]
# `floor` is the larger of compulsory bytes over the datasheet's bandwidth and flops over its peak: nothing runs faster.
# `best rival` is the fastest correct library arm of the same comparison, torch's bf16 product among them. `throttled`
# names what the driver reported during the window: at large products the card runs into its power cap, and the A/A
# spread grows with it (see the audit of our own rows below). `kernel` compares the launch that a row recorded with the
# one that the present code would choose: `former kernel` means that the kernel has changed since and has no row there.
# `same launch` is weaker: a source can change under it, so `commit` says what the row was measured on top of.


# %%
def left_out(card: phases.Card) -> str:
    """A sentence for each workload whose newest row of the candidate is not the one shown: wrong, or too fast."""
    said = []
    for workload, rows in newest(card).items():
        every = [r for r in store.rows(DEVICE.id, card.id) if r.workload_id == workload]
        ours = [r for r in every if r.name == card.candidate and r.status not in ("ok", "skipped")]
        last = max(ours, key=lambda r: r.run, default=None)
        if last and last.run > max(r.run for r in rows):
            why = f"is {last.status}: {last.message}"
            said.append(f"The newest row of `{workload}` (run {last.run}) {why}; above stands an older one.")
    return "\n\n" + " ".join(said) if said else ""


def shown(card_id: str) -> object:
    card, verdict = phases.card(card_id), judged[card_id]
    if verdict is None or not len(tables[card_id]):
        return notebook.text(f"**{card.title}** (`{card_id}`): no rows yet.")
    return notebook.text(
        f"### {card.title} (`{card_id}`): {verdict.verdict.word}\n\n{card.question}\n\n"
        + notebook.show(tables[card_id], code=["workload", "best rival"]).bundle["text/markdown"]
        + "\n\n"
        + notebook.origin(r for rows in newest(card).values() for r in rows if r.name == card.candidate)
        + left_out(card)
    )


shown("w4a16-decode")

# %%
shown("w4a16-prefill-limit")

# %%
shown("w4a8-prefill-limit")

# %% [markdown]
# W4A8 buys time with accuracy, so each time stands beside its error against the float64 product of the weights and
# activations as given. `promoted` adds the tensor cores' short sums to float32 every 512 values of K, `fast` only at
# the end of a tile of 256 tokens (from 512 tokens on). On normals the two err alike, by what rounding to e4m3 costs;
# the `positive` workloads have sums of one sign, where `fast` loses what its sums cut off.

# %%
ARMS = {"W4A16": "cuda_gemm", "fast": "cuda_w4a8", "promoted": "cuda_w4a8_promoted"}
priced = []
for workload, arms in notebook.arms(phases.card("w4a8-prefill-limit"), DEVICE.id).items():
    figures = {
        title: value
        for label, name in ARMS.items()
        for title, value in (
            (f"{label} us", round(arms[name].median_us, 1)),
            (f"{label} error %", round(100 * arms[name].relative_error, 2)),
        )
    }
    priced.append({"workload": workload, **figures, "run": arms["cuda_w4a8"].run})
pairs = pd.DataFrame(priced)
positive = pairs["workload"].str.endswith("positive")
assert (pairs["promoted error %"][positive] < 1).all()
assert (pairs["fast error %"][positive & pairs["workload"].str.startswith("m512")] > 5).all()
assert (abs(pairs["fast error %"] / pairs["promoted error %"] - 1)[~positive] < 0.02).all()
notebook.show(pairs, code=["workload"])

# %%
shown("gdn-prefill-limit")

# %%
shown("gdn-decode-limit")

# %%
shown("kv-fp8-limit")

# %%
shown("kv-q8-limit")

# %%
shown("kv-bf16-limit")

# %% [markdown]
# ## What stands in the way
#
# For each target that was missed: what the hardware counters of the same kernel name as its bound (`lab counters`, by
# Nsight Compute). The unit nearest to its peak is the bound when it is at 60 % of it or more; below that every unit
# waits, and the most frequent reason is named. Times under that profiler are perturbed and are not compared with any
# of the times above.


# %%
def missed(card: phases.Card) -> list[str]:
    """The workloads whose gate condition does not hold on the rows shown above."""
    findings = judged[card.id].verdict.findings if judged[card.id] else ()
    return [f.condition.workload for f in findings if f.role == "require" and f.state in ("fails", "noise")]


seen = counters.newest(DEVICE.id)
lines = []
for card in LIMITS:
    for workload in missed(card):
        for row in seen.get((card.candidate, workload), []):
            lines.append(
                {
                    "card": card.id,
                    "workload": workload,
                    "kernel": row.kernel.split("(")[0].removeprefix("void "),
                    "bound by the counters": counters.bound(row),
                    "DRAM MB": round((row.dram_read_bytes + row.dram_write_bytes) / 1e6, 1),
                    "compulsory MB": round(row.bytes / 1e6, 1),
                    "SM clock MHz": round(row.sm_clock_hz / 1e6),
                }
            )
without = sorted({(c.id, w) for c in LIMITS for w in missed(c) if (c.candidate, w) not in seen})
assert all(line["DRAM MB"] > 0 for line in lines)
notebook.show(pd.DataFrame(lines), code=["card", "workload", "kernel"]) if lines else None

# %%
notebook.text(
    f"Missed without counters yet: {', '.join(f'`{w}` of `{c}`' for c, w in without)}." if without else
    "Every missed target has its counters."
)  # fmt: skip

# %% [markdown]
# ## Which kernel where
#
# The router's tables, from the same rows: the fastest of what competes for each shape, where that changes, and what
# the worst choice would cost. `lab routes FAMILY` prints them and answers for one shape; `--write` stores what each
# family's `route.py` reads. Arms that show a defect or run in a chain of their own never compete, W4A8 only where the
# caller names its precision: the rows marked so are those where that changes the choice. `~` marks a time between a
# candidate's own points, where its run had none.

# %%
rows = []
known: dict[tuple[str, bool], routes.Table] = {}
chosen: dict[tuple[str, str, int], str] = {}  # family, shape and place on the axis -> what the router takes unasked
for family, rounded in (("nvfp4", False), ("nvfp4", True), ("gdn", False), ("q8", False)):
    table = routes.competing(routes.table(family, DEVICE.id), tuple(route.ROUNDED) if rounded else ())
    known[family, rounded] = table
    last = ("", "")
    for entry in routes.crossovers(table):
        shape = " ".join(f"{a}={v}" for a, v in entry.shape.items())
        place, best = (family, shape, entry.at), entry.best
        turned = last[0] == shape and last[1] != best
        last = (shape, best)
        if rounded and chosen[place] == best:
            continue
        if not rounded:
            chosen[place] = best
        rows.append(
            {
                "family": f"{family}, rounded" if rounded else family,
                "shape": shape,
                "at": f"{table.axis}={entry.at}",
                "fastest": best,
                "crossover": "here" if turned else "",
                "us": ("~" if best in entry.interpolated else "") + f"{entry.times_us[best]:.1f}",
                "worst": entry.worst,
                "costs": f"{entry.cost_of_worst:.2f}x",
            }
        )
choices = pd.DataFrame(rows)
# From 9 tokens on cuda_gemm streams both operands where multiprocessors have enough of them, which 5120 x 6144 lacks.
assert [chosen["nvfp4", "K=17408 N=5120", m] for m in (8, 9, 16, 32)] == ["cuda_decode", *3 * ["cuda_gemm"]]
assert [chosen["nvfp4", "K=5120 N=17408", m] for m in (8, 16, 24, 32)] == ["cuda_decode", *3 * ["cuda_gemm"]]
assert [chosen["nvfp4", "K=6144 N=5120", m] for m in (8, 16, 24, 32)] == [*3 * ["cuda_decode"], "cuda_gemm"]
notebook.show(choices, code=["fastest", "worst"])

# %% [markdown]
# The curves behind the NVFP4 rows: each candidate's own points, a panel a shape, and a ring around what the router
# takes unasked. Where two curves cross between two rings is not measured, only that they do.

# %%
CURVES = ("cuda_decode", "cuda_gemm", "torch_bf16", "triton_gemv", "triton_gemm", "cuda_w4a8_promoted")
TICKS_US = (5, 10, 20, 50, 100, 200, 500, 1000)


def crossing(title: str) -> Figure:
    """A panel a shape: the median time of each of CURVES over M, both axes logarithmic, the router's choices ringed."""
    points = known["nvfp4", True].points
    shapes = sorted({p.shape for p in points}, key=lambda shape: (-dict(shape)["N"] * dict(shape)["K"], shape))
    with matplotlib.rc_context(draw.STYLE):
        figure = Figure(figsize=(draw.WIDTH_IN, 6.4), facecolor=draw.CARD, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, shape in zip(figure.subplots(2, 2).flat, shapes, strict=True):
            words, own = " ".join(f"{a}={v}" for a, v in shape), [p for p in points if p.shape == shape]
            for i, name in enumerate(CURVES):
                line = sorted((p.at, p.median_us) for p in own if p.candidate == name)
                style = {"color": draw.COLOURS[i], "marker": draw.MARKERS[i], "ls": draw.DASHES[i]}
                axes.plot(*zip(*line, strict=True), **style, ms=3.5, lw=1.2, mfc=draw.CARD, label=name)
            taken = [(p.at, p.median_us) for p in own if chosen.get(("nvfp4", words, p.at)) == p.candidate]
            ring = {"marker": "o", "ms": 10, "mfc": "none", "mec": draw.INK, "mew": 0.9}
            axes.plot(*zip(*sorted(taken), strict=True), ls="", **ring, label="the router's choice")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(sorted({p.at for p in own} - {9, 16, 1024}))
            axes.set_yticks([t for t in TICKS_US if t < 1.2 * max(p.median_us for p in own)])
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(FuncFormatter(draw.plain))
                axis.set_minor_locator(NullLocator())
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(True, which="major", color="#e8e8e8", linewidth=0.6)
            axes.set_title(words, loc="left", fontsize=9, color=draw.INK)
            axes.set(xlabel="M, tokens", ylabel="us")
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=draw.INK)
    return figure


assert len({chosen["nvfp4", "K=2048 N=4096", m] for m in (8, 2048)}) == 2  # there is something to see
notebook.picture(
    crossing("NVFP4 on an H200: time over tokens, from rows; W4A8 competes only where asked for"),
    "Four panels, one a weight shape: the median time of six kernels over 1 to 2048 tokens on logarithmic axes. The "
    "decode kernel is lowest for few tokens, the tile kernel or torch above, and rings mark the router's choices.",
)

# %% [markdown]
# ## What these rows cannot decide
#
# A gate whose line lies inside the spread of the control against itself decides nothing, however many digits it has.
# `lab audit --evidence measured` finds such lines in our own cards as it does in the sources':

# %%
from lab.study.audit import run as audit

found = [f for f in audit.audit("measured").findings if any(c.id in f.subject for c in LIMITS)]
told = pd.DataFrame([{"check": f.check, "subject": f.subject, "finding": f.sentence} for f in found])
notebook.show(told, code=["check"]) if found else notebook.text("Nothing was found.")
