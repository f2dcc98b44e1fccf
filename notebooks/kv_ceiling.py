# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # An fp8 KV cache: what a whole decode step can gain, and what fits
#
# Half the bytes of the cache are half of attention's time at best, and attention is one part of a step beside the
# weights and the recurrent state. The ceiling is worked out before any kernel is tried: from bytes alone, then from
# measured kernels summed at the models' shapes. A step that was summed and not run is modelled evidence.
#
# **For a model of your own:** add it to `data/models.toml` and to `MODELS`.

# %%
import pandas as pd

from lab import device, draw, judgements, phase, picture, show, value
from lab.base import devices, models
from lab.card.gate import Reading
from lab.judge import decode_step, verdicts
from lab.row import store
from lab.write import notebook, objects

MODELS = {"dense": models.get("q36-27b"), "moe": models.get("q36-35b-a3b")}
DEVICE = device().id  # the one with most measured rows
PLACES = {"gb10": "fp4", DEVICE: "bf16"}  # device -> the pipe that weights run on
CONTEXTS, SEQUENCES = (256, 512, 1024, 4096, 8192, 32768), (1, 8, 32, 128)
BYTES = {"bf16": 2.0, "fp8": 1.0, "Q8_0": 34 / 32}
STEP, ROOM = phase("p6-step").card, phase("p6-room").card
GATE = value("lp.gate.p6.threshold.decode")
notebook.questions([STEP, ROOM])

# %% [markdown]
# ## The ceiling from bytes alone
#
# Each part at its roofline: the cache, the state read and written, and the weights that a step touches (of a mixture
# the experts that the batch's tokens choose). Where all three wait for memory the ceiling does not depend on the
# device.


# %%
def ceiling(place: str, model: str, sequences: int, context: int) -> float:
    """The most that half of the cache's bytes can gain, in %, every part at its floor."""
    of = decode_step.parts(MODELS[model], sequences, context, pipe=PLACES[place])
    return decode_step.ceiling_pct(decode_step.floors(devices.get(place), of), 0.5)


lines = [{"device": p, "model": m, "sequences": n, **{f"ctx {c:,}": ceiling(p, m, n, c) for c in CONTEXTS}}
         for p in PLACES for m in MODELS for n in SEQUENCES]  # fmt: skip
show(pd.DataFrame(lines))

# %% [markdown]
# Beside what was recorded on GB10: the source measured attention and the step at six points. Ours takes nothing from
# them, only shapes, bytes and the bandwidth, and comes within a quarter of each.

# %%
POINTS = [(m, ctx, npl) for ctx, npl in ((512, 128), (4096, 8), (8192, 8)) for m in MODELS]
lines = [(m, c, n, value(f"lp.gate.p6.ceiling-{m}-ctx{c}-npl{n}"), ceiling("gb10", m, n, c)) for m, c, n in POINTS]
show(pd.DataFrame(lines, columns=["model", "context", "sequences", "ceiling, recorded %", "by floors %"]))

# %% [markdown]
# ## A step summed from measured kernels
#
# Attention, state and weights each from the measured row nearest in batch and context, ours or a library's, scaled by
# the ratio of the floors where the cell itself was not measured. Both forms of the cache lie in pages of 16 tokens.

# %%
UNPAGED = {"torch_sdpa", "contiguous_bf16", "in_order_bf16", "cuda_contiguous_bf16"}
ordered = sorted((r for r in store.rows(DEVICE) if r.ok), key=lambda r: r.run)
newest = [r for r in {(r.name, r.workload_id): r for r in ordered}.values()
          if r.workload.get("op", "decode") == "decode" and r.name not in UNPAGED]  # fmt: skip
FORMS = {"bf16": ("bf16",), "fp8": ("fp8-kv", "fp8-kv-unit")}
cached = {f: [r for r in newest if r.precision in p and r.workload.get("page") == 16] for f, p in FORMS.items()}
recurrent = [r for r in newest if r.precision == "f32" and "batch" in r.workload and "ctx" not in r.workload]
products = [r for r in newest if r.precision in ("nvfp4-w4a16", "nvfp4-w4a16-rounded") and "M" in r.workload]

lines, readings = [], {}
for workload in STEP.workloads if recurrent else ():  # without rows the verdict is BLOCKED
    m, ctx, npl = workload.replace("x", "-").split("-")
    step = {f: decode_step.from_rows(devices.get(DEVICE), decode_step.parts(MODELS[m], int(npl), int(ctx), BYTES[f]),
                                     {"attention": cached[f], "state": recurrent, "weights": products})
            for f in FORMS}  # fmt: skip
    most = decode_step.ceiling_pct(step["bf16"], 0.5)
    rates = [1e6 * int(npl) / decode_step.total_us(step[f]) for f in FORMS]
    readings["decode_saving_max", workload] = Reading("%", candidate=most, kind="modelled")
    readings["decode_tps", workload] = Reading("tok/s", rates[0], rates[1], kind="modelled")
    basis = {f: step[f][0].basis.split("_hq")[0] for f in FORMS}
    gain = 100 * (rates[1] / rates[0] - 1)
    lines.append((m, int(ctx), int(npl), *(t.us / 1e3 for t in step["bf16"]), most, gain, *basis.values()))
COLUMNS = ["model", "context", "sequences", "attention ms", "state ms", "weights ms", "ceiling %", "gain %",
           "attention from", "fp8 from"]  # fmt: skip
show(pd.DataFrame(lines, columns=COLUMNS), code=COLUMNS[-2:])

# %%
objects.PhaseVerdict(verdicts.judgement(STEP, readings, "modelled", DEVICE, None))

# %%
panels = {m: {**{f"ceiling, {n} sequences": [(c, ceiling(DEVICE, m, n, c)) for c in CONTEXTS] for n in (8, 128)},
              **{f"kernels, {n} sequences": [(c, g) for o, c, k, *_, g, _, _ in lines if (o, k) == (m, n) and g > 0]
                 for n in (8, 128)}} for m in MODELS}  # fmt: skip
panels = {m: {name: points for name, points in panel.items() if points} for m, panel in panels.items()}
picture(
    draw.lines(panels, f"{DEVICE}: what fp8 can gain, and gains in the summed step (gate {GATE:g} %)",
               "context, tokens", "decode throughput, %"),
    "Two panels, dense and mixture: ceilings by floors rise with context and batch; below them what measured fp8 "
    "kernels give in the summed step.",
)  # fmt: skip

# %% [markdown]
# ## Room
#
# The cache's other use needs no speed. Nine tenths of the memory less the model's file is shared by caches and
# recurrent states, and only the caches shrink: where the state is larger than the cache the format hardly matters, far
# above it fp8 holds nearly twice as many.

# %%
MEMORY, lines, fits = 0.9 * devices.get(DEVICE).fact("vram").base, [], {}
for workload in ROOM.workloads:
    m, ctx = workload.split("-ctx")
    n = {name: decode_step.room(MODELS[m], MEMORY, 32, int(ctx), b).sequences for name, b in BYTES.items()}
    fits["sequences_fit", workload] = Reading("requests", n["bf16"], n["fp8"], kind="modelled")
    lines.append({"workload": workload, **n, "more with fp8 %": 100 * (n["fp8"] / n["bf16"] - 1)})
show(pd.DataFrame(lines), code=["workload"])

# %%
objects.PhaseVerdict(verdicts.judgement(ROOM, fits, "modelled", DEVICE, None))

# %% [markdown]
# ## Paged against contiguous
#
# LP1 found paging free on GB10 within the noise. Our question is the kernel's: one page per sequence against pages
# anywhere, for the Triton kernel and for the CUDA one; a third card asks for pages of 64 tokens instead of 16.

# %%
judgements("lp1-kernel", "lp1-cuda-kernel", "kv-page64", device=DEVICE)

# %%
phase("lp1-cuda-kernel").arms(DEVICE)

# %%
phase("kv-page64").at_the_line(DEVICE)

# %% [markdown]
# ## What would change it

# %%
notebook.would_change([STEP, ROOM])
