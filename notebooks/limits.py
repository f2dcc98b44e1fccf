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

import dataclasses

import pandas as pd

from kernels.nvfp4 import route
from lab import counters, devices, families, notebook, phases, records, roofline, routes

DEVICE = devices.get("h200")
LIMITS = [card for card in phases.cards().values() if card.id.endswith("-limit") or card.id == "w4a16-decode"]
assert len(LIMITS) >= 5


# %%
def newest(card: phases.Card) -> dict[str, list[dict]]:
    """workload -> rows of the newest run in which the candidate is ok."""
    found: dict[str, dict[str, list[dict]]] = {}
    for row in records.rows(DEVICE.id, card.id):
        found.setdefault(row["workload_id"], {}).setdefault(row["run"], []).append(row)
    kept = {}
    for workload, runs in found.items():
        good = [r for r, rows in runs.items() if any(x["name"] == card.candidate and x["status"] == "ok" for x in rows)]
        if good:
            kept[workload] = runs[max(good)]
    return kept


def line(card: phases.Card, workload: str, rows: list[dict]) -> dict:
    """One workload: ours, the fastest other arm, the target of the gate, the floor."""
    ok = {r["name"]: r for r in rows if r["status"] == "ok"}
    ours = ok[card.candidate]
    own = set(families.load(card.family).candidates) - set(families.load(card.family).peers) - {"torch_bf16"}
    # What a user could run instead: libraries' arms, beside a 16-bit cache those of 16 bits alone.
    same = {"bf16"} if ours["precision"] == "bf16" else {r["precision"] for r in rows}
    rivals = {n: r["median_us"] for n, r in ok.items() if n not in own and r["precision"] in same}
    best = min(rivals, key=lambda n: rivals[n]) if rivals else ""
    floor = roofline.place(DEVICE, ours["flops"], ours["bytes"], ours["pipe"])
    asked = [c for c in card.gate.require if c.workload == workload]
    target = ""
    for c in asked:
        target = f"{c.threshold:g} us" if c.unit == "us" else f"{c.threshold:+g} % of {card.control}"
    return {
        "workload": workload,
        "ours us": round(ours["median_us"], 2),
        "best rival": best,
        "rival us": round(rivals[best], 2) if best else None,
        "rival / ours": round(rivals[best] / ours["median_us"], 2) if best else None,
        "target": target,
        "floor us": round(floor.floor_us, 2),
        "of floor": f"{roofline.roofline_fraction(floor.floor_us, ours['median_us']):.0%}",
        "throttled": ours.get("throttled", ""),
        "kernel": notebook.former(ours) or "same launch",
        "commit": (ours.get("stated_commit") or ours["commit"])[:7],
    }


tables = {card.id: pd.DataFrame([line(card, w, r) for w, r in newest(card).items()]) for card in LIMITS}
judged = {card.id: notebook.measured(card.id, DEVICE.id) for card in LIMITS}
assert all((ours > 0).all() for table in tables.values() if len(table) for ours in [table["ours us"]])

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
        every = [r for r in records.rows(DEVICE.id, card.id) if r["workload_id"] == workload]
        ours = [r for r in every if r["name"] == card.candidate and r["status"] not in ("ok", "skipped")]
        last = max(ours, key=lambda r: r["run"], default=None)
        if last and last["run"] > max(r["run"] for r in rows):
            why = f"is {last['status']}: {last['message']}"
            said.append(f"The newest row of `{workload}` (run {last['run']}) {why}; above stands an older one.")
    return "\n\n" + " ".join(said) if said else ""


def shown(card_id: str) -> object:
    card, verdict = phases.card(card_id), judged[card_id]
    if verdict is None or not len(tables[card_id]):
        return notebook.text(f"**{card.title}** (`{card_id}`): no rows yet.")
    return notebook.text(
        f"### {card.title} (`{card_id}`): {verdict.verdict.word}\n\n{card.question}\n\n"
        + notebook.show(tables[card_id], code=["workload", "best rival"]).bundle["text/markdown"]
        + "\n\n"
        + notebook.origin(r for rows in newest(card).values() for r in rows if r["name"] == card.candidate)
        + left_out(card)
    )


shown("w4a16-decode")

# %%
shown("w4a16-prefill-limit")

# %%
shown("w4a8-prefill-limit")

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
                    "kernel": row["kernel"].split("(")[0].removeprefix("void "),
                    "bound by the counters": counters.bound(row),
                    "DRAM MB": round((row["dram_read_bytes"] + row["dram_write_bytes"]) / 1e6, 1),
                    "compulsory MB": round(row["bytes"] / 1e6, 1),
                    "SM clock MHz": round(row["sm_clock_hz"] / 1e6),
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
# The router's tables, from the same rows: the fastest of what may compete for each shape, where that changes, and what
# the worst choice would cost. `lab routes FAMILY` prints them; `--write` stores what each family's `route.py` reads.
# In NVFP4 a chained launch never competes, as its time is of a chain of its own kind, and W4A8 competes only where the
# caller allows rounded activations; the rows marked so are those where that changes the choice. A table takes one run
# a point, so a kernel that was timed in another run is not in it: `kernels/nvfp4/NOTES.md` names those losses.

# %%
precise = {c.name: c.precision for c in families.load("nvfp4").candidates.values()}


def competing(family: str, rounded: bool) -> routes.Table:
    """The family's table without the candidates that its router bars."""
    known = routes.table(family, DEVICE.id)
    barred = {name for name, p in precise.items() if name in route.CHAINED or (p in route.ROUNDED and not rounded)}
    kept = tuple(p for p in known.points if family != "nvfp4" or p.candidate not in barred)
    return dataclasses.replace(known, points=kept)


rows = []
chosen: dict[tuple[str, str, int], str] = {}  # family, shape and place on the axis -> what the router takes unasked
for family, rounded in (("nvfp4", False), ("nvfp4", True), ("gdn", False), ("q8", False)):
    known = competing(family, rounded)
    last = ("", "")
    for entry in routes.crossovers(known):
        shape = " ".join(f"{a}={v}" for a, v in entry["shape"].items())
        place, best = (family, shape, entry[known.axis]), entry["best"]
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
                "at": f"{known.axis}={entry[known.axis]}",
                "fastest": best,
                "crossover": "here" if turned else "",
                "us": round(entry["times_us"][best], 2),
                "worst": entry["worst"],
                "costs": f"{entry['cost_of_worst']:.2f}x",
            }
        )
choices = pd.DataFrame(rows)
# cuda_decode refuses 9 tokens at the long K; at the wide N it still is the fastest at 16.
assert {chosen["nvfp4", "K=17408 N=5120", m] for m in (9, 16, 32)} == {"cuda_gemm"}
assert chosen["nvfp4", "K=5120 N=17408", 16] == "cuda_decode"
notebook.show(choices, code=["fastest", "worst"])

# %% [markdown]
# ## What these rows cannot decide
#
# A gate whose line lies inside the spread of the control against itself decides nothing, however many digits it has.
# `lab audit --evidence measured` finds such lines in our own cards as it does in the sources':

# %%
from lab.audit import run as audit

found = [f for f in audit.audit("measured").findings if any(c.id in f.subject for c in LIMITS)]
told = pd.DataFrame([{"check": f.check, "subject": f.subject, "finding": f.sentence} for f in found])
notebook.show(told, code=["check"]) if found else notebook.text("Nothing was found.")
