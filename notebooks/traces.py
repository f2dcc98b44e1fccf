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
# # Traces: whose microseconds are they?
#
# A profile answers one question well: where did the time go? It answers it wrongly when copies count as compute, when
# summed durations count as busy time, or when a CUDA graph was captured as one opaque row. This page shows how a trace
# is accounted for here, repeats the sources' own attributions from their tables, and projects what a faster kernel can
# give end to end.
#
# Every number comes from a row, and the cells assert what the text says. No GPU is needed.

# %%
import numpy as np
import pandas as pd

from lab import draw
from lab.card import phases, recorded
from lab.judge import projection
from lab.row import store
from lab.study import attributions
from lab.trace import amdahl, breakdowns, diff, stored, windows
from lab.trace.amdahl import Interval
from lab.trace.model import Copies, Kernels, Trace
from lab.write import notebook

# %% [markdown]
# ## What counts as busy
#
# An invented step of 100 us, small enough to check by eye: two streams that overlap, a copy beside a kernel and one
# alone, and a kernel that only waits.

# %%
NAMES = ("gemm_kernel", "splitkv_kernel", "at::cuda::spin_kernel(long)")
ROWS = [(0, 30, 0, 1), (25, 50, 1, 2), (70, 80, 2, 1), (92, 100, 0, 1)]  # start us, end us, name, stream
start, end, name, stream = (np.array(column) for column in zip(*ROWS, strict=True))
toy = Trace(
    tool="invented", source="one step", names=NAMES, gpus={0: "GPU"},
    kernels=Kernels.of(start_ns=start * 1000, end_ns=end * 1000, name=name, stream=stream, device=start * 0),
    memcpy=Copies.of(start_ns=[45_000, 60_000], end_ns=[55_000, 65_000], device=[0, 0], bytes=[1, 1], kind=[8, 1]),
)  # fmt: skip
notebook.picture(draw.timeline(toy, title="One invented step"), "Two streams, a copy lane and idle time over 100 us.")

# %%
divided = draw.divided(toy)[0]
assert sum(divided["time"].values()) == 100.0
assert (divided["time"]["waiting"], divided["time"]["kernels with copies"]) == (10.0, 5.0)
notebook.picture(draw.occupancy(toy, title="The same step, divided"), "The span divided, and the summed durations.")

# %%
whole = breakdowns.from_trace(toy)
assert abs(whole.not_attributed) < 1e-9
parts = pd.DataFrame(
    [{"category": p.category, "us": p.value, "of the span": f"{p.value / whole.whole:.0%}"} for p in whole.parts]
)
notebook.show(parts)

# %%
together, idle = (whole.by_category()[name].value for name in ("overlap", "idle"))
notebook.text(
    f"The parts sum to the span, {whole.whole:g} us, exactly: durations, less {-together:g} us that ran at the same "
    f"time, "
    f"plus {idle:g} us idle. The waiting kernel is idle time: it occupies the device and does nothing. Nothing is "
    f"left out."
)

# %% [markdown]
# ## The decode step that was 99.4 % busy
#
# LocalAI's paged llama.cpp decoded 128 sequences on a GB10 with the GPU 99.4 % busy, and kernels were only part of it.
# The table is the source's, in shares of kernel plus copy time.

# %%
decode = breakdowns.from_recorded("a2_dense_npl128_eager")
notebook.picture(
    draw.breakdown(decode, "Decode step, dense, 128 sequences, before the state fixes"),
    "Shares of the decode step: recurrence, gather, copy, FP4 GEMV and GEMM, attention, and what is not attributed.",
)

# %%
claims = {c.id: c for c in attributions.reproduce()}
assert all(c.agrees == (c.expected == "agrees") for c in claims.values())
copies, attention = (decode.by_category()[name].value for name in ("memcpy", "attention"))
busy = claims["decode-busy"]
notebook.text(
    f"Device-to-device copies are {copies:g} % of it, which is no compute. From kernels alone and the time of the "
    f"copies "
    f"the busy share comes out as {busy.ours.mid:.1f} %, the source's {busy.recorded.mid:g} %. "
    f"{decode.not_attributed:.1f} % "
    f"of the step is in no named part; full attention, which the paged cache was about, is {attention:g} %."
)

# %% [markdown]
# ## Whose the gap is
#
# After the state fixes both engines were profiled again. The stacked bars are the two steps, the waterfall their
# difference: it starts at vLLM's step and must arrive at llama's.

# %%
step = diff.difference(
    breakdowns.from_recorded("explore_postssm_llama-paged_dense_npl128", "ms/step"),
    breakdowns.from_recorded("explore_postssm_vllm_dense_npl128", "ms/step"),
)
notebook.picture(
    draw.gap(step, ("llama-paged", "vLLM"), "Decode step after the state fixes, dense, 128 sequences"),
    "Stacked bars of both engines' decode step and the waterfall of the gap; the FP4 product path owns most of it.",
)

# %%
path, said = step.lines[0], claims["fp4-path-share-of-gap"]
assert path.share_low <= said.recorded.mid / 100 <= path.share_high
notebook.text(
    f'"{path.labels[0]}" takes {path.a:g} ms in one engine and {path.b:g} ms in the other: {path.delta:g} of the '
    f"{step.gap:g} ms between the steps, {path.share:.1%}. The source prints {said.recorded.mid:g} %, which its digits "
    f"allow: they leave {path.share_low:.1%} to {path.share_high:.1%}. {step.rest:.1f} ms of the gap are in no "
    f"category "
    "of either table."
)

# %%
prefill = diff.difference(
    breakdowns.from_recorded("lmap_prefill_paged_moe_npp512"), breakdowns.from_recorded("lmap_prefill_vllm_moe_npp512")
)
notebook.picture(
    draw.gap(prefill, ("llama-paged", "vLLM"), "Prefill, mixture of experts, 512 tokens x 32 sequences"),
    "Stacked bars of both engines' prefill time per token and the waterfall of the gap by category.",
)

# %%
gap, deltas, left = (claims[f"prefill-{n}"].ours.mid for n in ("gap", "deltas", "left-over"))
assert (round(gap, 1), round(deltas, 1)) == (198.9, 195.4)
notebook.text(
    f"The gap is {gap:.1f} us/token. The source's own list of deltas adds up to {deltas:.1f}, so {left:.1f} us/token "
    f"have "
    "no owner in it."
)

# %% [markdown]
# ## Every attribution, computed again

# %%
notebook.show(
    pd.DataFrame(
        [
            {"attribution": c.name, "recorded": c.recorded.mid, "ours": c.ours.mid,
             "digits leave": f"{c.ours.low:.4g} to {c.ours.high:.4g}",
             "unit": c.unit, "follows": "yes" if c.agrees else "NO", "note": c.note}
            for c in claims.values()
        ]
    )
)  # fmt: skip

# %% [markdown]
# ## Labels that drifted
#
# A bucket can only be compared across documents when its word keeps its meaning. Here it did not.

# %%
(moved,) = attributions.drifts()
assert moved.findings
notebook.show(
    pd.DataFrame(
        [
            {
                "us/token": u.value,
                "filed under": u.category,
                "the source's words": u.label,
                "workload": u.workload,
                "document": u.document,
            }
            for u in moved.uses
        ]
    )
)

# %%
notebook.text("\n".join(f"- {finding}." for finding in moved.findings))

# %% [markdown]
# ## What a faster kernel can give
#
# Amdahl's law with intervals: the share of a category times the speed-up of its kernel. A speed-up of infinity is the
# ceiling, which no kernel beats unless something else changes with it.

# %%
base = Interval.of(146.0, 0.5)
gone = Interval(*[float("inf")] * 3)
LEVERS = [
    ("state copy removed", ["memcpy"], "lp.patch-0018.gb10.decode-agg.candidate.npl128.npp128"),
    ("copy and gather removed", ["memcpy", "get_rows"], "lp.patch-0019.gb10.decode-agg.candidate.npl128.npp128"),
    ("attention removed", ["attention"], ""),
]
rows = []
for what, names, figure in LEVERS:
    found = amdahl.project(projection.share(decode, names), gone, base)
    after = recorded.figure(figure).value if figure else None
    rate = found.ceiling_rate
    rows.append({"lever": what, "share of the step": f"{found.share.mid:.1%}", "ceiling tok/s": rate.mid,
                 "digits leave": f"{rate.low:.1f} to {rate.high:.1f}", "reached tok/s": after})  # fmt: skip
ceilings = pd.DataFrame(rows)
assert [round(v) for v in ceilings["ceiling tok/s"][:2]] == [180, 247]
notebook.show(ceilings)

# %%
copy, both = (recorded.figure(figure).value for _, _, figure in LEVERS[:2])
assert abs(copy / ceilings["ceiling tok/s"][0] - 1) < 0.01
assert both > ceilings["ceiling tok/s"][1] * 1.02
notebook.text(
    f"Removing the copy reached its ceiling, {copy:g} tok/s. With the gather gone as well {both:g} tok/s were "
    f"measured, more "
    f"than the {ceilings['ceiling tok/s'][1]:.0f} that the shares allow. The law assumes that nothing else changes "
    f"with the "
    "category; here something did."
)

# %%
p6 = projection.answer(
    "attention", projection.share(decode, ["attention"]), gone, None, 1.0, projection.needs(phases.card("p6"))
)
assert {word for _, word, _ in p6.against} == {"cannot"}
notebook.text(f"Asked of `p6` (an fp8 KV cache) with this step: {p6.against[0][2]}.")

# %% [markdown]
# ## Our own profiles
#
# `lab profile` runs a phase's arms under nsys (node-level graph tracing) or PyTorch's profiler and keeps the normalised
# trace only: no environment, no process output. Profiled times say where time goes; `lab measure` says how long it
# takes.

# %%
files = sorted(store.FOLDER.glob("*/*/*/trace.parquet"))
newest = {(f.parts[-4], f.parts[-3]): f for f in files}
notebook.text(
    f"{len(newest)} profiles are committed: " + ", ".join(f"`{phase}` on {device}" for device, phase in newest) + "."
    if newest
    else "No profile is committed yet, so nothing is said about our own kernels here."
)


# %%
def arms(file: object) -> dict[str, tuple[str, Trace]]:
    """(workload, the window of its steps) of each arm, at the first workload that both arms have."""
    trace = stored.load(file)
    found = {}
    for label in trace.labels:
        words = label.split("/")
        if len(words) == 3 and words[1] in ("control", "candidate"):
            found.setdefault(words[2], {})[words[1]] = f"{label}/step *"
    both = next((w for w, names in found.items() if len(names) == 2), None)
    return {arm: (both, windows.by_nvtx(trace, glob)) for arm, glob in found.get(both, {}).items()}


summary, own = [], {}
for (device, phase), file in newest.items():
    about = stored.about(file)
    own[device, phase] = arms(file)
    for arm, (workload, window) in own[device, phase].items():
        b = breakdowns.from_trace(window, count=window.steps, per="step")
        assert abs(b.not_attributed) < 1e-6 * b.whole
        shown = {
            "phase": phase,
            "device": device,
            "arm": arm,
            "workload": workload,
            "tool": about["tool"],
            "steps": window.steps,
        }
        largest = max((p for p in b.parts if p.category not in ("idle", "overlap")), key=lambda p: p.value)
        summary.append(
            {**shown, "kernels us/step": sum(b.kernels.values()), "span us/step": b.whole, "largest": largest.category}
        )
notebook.show(pd.DataFrame(summary), code=["phase", "workload"]) if summary else notebook.text("Nothing to show yet.")

# %%
chosen = next(iter(own.items()), None)
if chosen and chosen[1]:
    (device, phase), by_arm = chosen
    workload, window = by_arm["candidate"]
    one = windows.by_nvtx(stored.load(newest[device, phase]), f"{phase}/candidate/{workload}/step *", nth=-1)
    shown = notebook.picture(
        draw.timeline(one, title=f"{phase}, candidate, {workload}: the last profiled step on {device}"),
        f"Kernels, copies and idle time of one step of {phase}'s candidate.",
    )
else:
    shown = notebook.text("No step to draw yet.")
shown

# %% [markdown]
# ## The same at the command line
#
# ```sh
# .venv/bin/lab trace FILE                    # one profile: nsys sqlite or stats, Kineto, ncu, or ours
# .venv/bin/lab diff A B --steps 32,32        # whose the gap is; --svg writes the picture
# .venv/bin/lab diff --recorded               # the table above
# .venv/bin/lab amdahl a2_dense_npl128_eager --category memcpy --speedup inf --base 146
# .venv/bin/lab profile p6-kernel             # on a GPU
# ```
