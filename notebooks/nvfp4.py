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
# # NVFP4 products: one GEMM or one GEMV per sequence
#
# The main question (row LP11) is about routing: during decode the gated-delta-net output reaches its projection as
# `[K, 1, n_seqs]`, the dispatcher looks at one dimension, and an FP4 weight matrix is multiplied once per sequence.
# Further questions are about the kernels themselves on a GPU without FP4 tensor cores: whether they beat the bf16
# product, what the occupancy levers of row LP6 do here, and whether the inversions of row LP16 hold on Hopper.
#
# Numbers come from recorded figures and measured rows. Kernels run in Triton's interpreter where there is no GPU.

# %%
import dataclasses

import pandas as pd
import torch

from lab import draw, value
from lab.base import devices
from lab.base.errors import REPOSITORY
from lab.card import phases
from lab.check import accuracy, families
from lab.judge import evidence, verdicts
from lab.place import roofline
from lab.row import store
from lab.write import diagrams, notebook

families.interpret_on_cpu()  # before the family's Triton modules are imported
torch.set_num_threads(2)
DEVICE = "h200"
family = families.load("nvfp4")
gb10, h200 = devices.get("gb10"), devices.get(DEVICE)
LP11 = "lp.lever1-ssm-out-2d.gb10"

# %% [markdown]
# ## 1. The question

# %%
card = phases.card("lp11")
notebook.question(card)

# %%
LEVERS = ("lp6-minblocks-kernel", "lp6-mmq-x-kernel", "lp6-mmq-y-kernel")
INVERSIONS = ("p3-kernel", "p3-cast-kernel")
kernel_cards = [
    phases.card(i) for i in ("lp11-kernel", "lp11-mxfp4-kernel", "w4a16-gemv", "w4a16-gemm", *LEVERS, *INVERSIONS)
]
notebook.show(
    pd.DataFrame([{"card": c.id, "question": c.question, "if it fails": c.null} for c in kernel_cards]), code=["card"]
)

# %% [markdown]
# ## 2. The mechanism
#
# A weight is four bits (e2m1); sixteen of them share an e4m3 scale and a tensor has one float32 scale, which makes 4.5
# bits a weight. `ne` is written fastest dimension first, as llama.cpp does. The trap asks only for `ne[1]`; a 2-D view
# of the same memory has `ne[1] = n_seqs`. Both routes below come from `kernels/nvfp4/route.py`.

# %%
from kernels.nvfp4 import route

projection = family.workload("m128_n5120_k6144")
M, N, K = (projection[a] for a in "MNK")
weight_bytes = family.cost(projection, "nvfp4-w4a16").bytes - 2 * (M * K + M * N)
assert abs(weight_bytes / (N * K * 4.5 / 8) - 1) < 1e-6  # 4.5 bits a weight and one float32
trap, collapsed = route.choose_uncollapsed((K, 1, M)), route.choose((K, M))
assert (trap.calls, trap.candidate, collapsed.calls, collapsed.candidate) == (M, "triton_gemv", 1, "triton_gemm")

notebook.picture(
    diagrams.walks_of_the_weights(M, N, K, weight_bytes, trap.calls, collapsed.calls),
    f"Left: {M} GEMV passes walk the weights {M} times. Right: a 2-D view, one GEMM, walks once.",
)

# %%
notebook.text(f"- the trap: `{trap}`\n- collapsed: `{collapsed}`")

# %% [markdown]
# ## 3. Reference against candidates
#
# The reference is float64 on the decoded weights. Outputs arrive as NaN, so a partial write fails. The same small
# problem goes through both routes, and each kernel through an odd shape of its own.

# %%
CASES = [
    (card.control, "m16_n75_k256_bf16_seqs16"),
    (card.candidate, "m16_n75_k256_bf16_seqs16"),
    ("triton_gemv", "m3_n75_k256_fp16"),
    ("triton_gemm", "m63_n75_k1040_bf16"),
    ("torch_bf16", "m63_n75_k1040_bf16"),
]
where = "cuda" if torch.cuda.is_available() else "cpu"
checks = [accuracy.check(family, family.candidate(c), family.workload(w), device=where) for c, w in CASES]
assert all(c.status == "ok" for c in checks), [c.message for c in checks]
notebook.show(notebook.errors(checks), code=["candidate", "workload"])

# %% [markdown]
# A check that cannot fail says nothing. One wrong element among the outputs, a sign and a column left unwritten:

# %%
workload = family.workload("m16_n75_k256_bf16_seqs16")
sound = family.candidate(card.candidate)


def spoilt(name: str, how) -> accuracy.Check:
    def run(args, out):
        sound.run(args, out)
        how(out["y"])

    return accuracy.check(family, dataclasses.replace(sound, name=name, run=run), workload, device=where)


broken = [
    spoilt("one element doubled", lambda y: y.view(-1)[7].mul_(2)),
    spoilt("sign flipped", lambda y: y.neg_()),
    spoilt("a column not written", lambda y: y[:, -1].fill_(float("nan"))),
]
assert all(c.status == "incorrect" for c in broken)
notebook.show(pd.DataFrame([{"spoilt": c.candidate, "status": c.status, "message": c.message} for c in broken]))

# %%
given = family.cases.inputs(workload, 1, where)
per_sequence, at_once = (
    accuracy.run_once(family, family.candidate(name), workload, given)["y"].double()
    for name in (card.control, card.candidate)
)
apart = ((per_sequence - at_once).norm() / at_once.norm()).item()
allowed = 2 * family.cases.tolerance(workload, "nvfp4-w4a16")["y"].relative_error
assert apart <= allowed
notebook.text(
    f"The two routes differ by {apart:.1e} relative to each other; each may be {allowed / 2:.1e} from the reference."
)

# %% [markdown]
# ## 4. Roofline: the floors, and where the recorded kernel stood
#
# Compulsory bytes only: each input read once, the output written once. W4A16 multiplies in bf16, so its peak is bf16's.

# %%
sizes = [w for w in family.cases.WORKLOADS if w.role == "measure"]
rows = []
for w in sizes:
    for precision in ("nvfp4-w4a16", "bf16"):
        cost = family.cost(w, precision)
        row = {"workload": w.id, "weights": precision, "MB": cost.bytes / 1e6, "GFLOP": cost.flops / 1e9}
        for device in (gb10, h200):
            floor = roofline.place(device, cost.flops, cost.bytes, cost.pipe)
            row |= {f"{device.id} floor us": floor.floor_us, f"{device.id} bound": floor.bound}
        rows.append(row)
floors = pd.DataFrame(rows)
notebook.show(floors, code=["workload"])

# %%
# Few rows wait for their bytes on both devices, and 4.5 bits against 16 bounds what NVFP4 can save there.
few = floors[floors.workload.str.startswith(("m1_", "m8_"))]
assert (few[["gb10 bound", "h200 bound"]] == "memory").all().all()
by = floors.pivot(index="workload", columns="weights", values="MB")
saving = (1 - by["nvfp4-w4a16"] / by["bf16"]).loc["m1_n17408_k5120"]
assert abs(saving - (1 - 4.5 / 16)) < 0.01
notebook.text(f"At one row NVFP4 moves {saving:.1%} fewer bytes than bf16: the most that its time can fall by.")

# %%
cost = family.cost(projection, "nvfp4-w4a16")
control_us, candidate_us = (value(f"{LP11}.o-proj-cost.{arm}") * 1e3 for arm in ("control", "candidate"))
points = [
    draw.point(f"{M} GEMV passes", cost.flops, cost.bytes, control_us, "recorded"),
    draw.point("one GEMM", cost.flops, cost.bytes, candidate_us, "recorded"),
]
notebook.picture(
    draw.roofline(gb10, points, ("fp4", "bf16"), "GB10: the output projection at 128 sequences, as recorded"),
    "Roofline of GB10 with the recorded projection: the GEMVs far below the GEMM, both left of the ridge.",
)

# %%
floor = roofline.place(gb10, cost.flops, cost.bytes, "bf16")
shares = [roofline.roofline_fraction(floor.floor_us, us) for us in (candidate_us, control_us)]
walked_gb_s = M * weight_bytes / control_us / 1e3
stated = [v.value for v in gb10.bandwidth.values]
layers = value(f"{LP11}.mul-mat-vec-q-instances.control")
assert floor.bound == "memory"
assert walked_gb_s > max(stated)
notebook.text(
    f"The recorded GEMM ({candidate_us:.0f} us) is at {shares[0]:.0%} of its floor of {floor.floor_us:.0f} us, the "
    f"GEMV passes ({control_us:,.0f} us) at {shares[1]:.1%}.\n\n"
    f"**Where our arithmetic differs.** The source says that the weights are read once for each sequence. {M} reads in "
    f"{control_us:,.0f} us are {walked_gb_s:.0f} GB/s, and GB10 has {' or '.join(f'{v:g}' for v in stated)} GB/s (both "
    f"are stated). So at least {1 - max(stated) / walked_gb_s:.0%} of these reads did not come from DRAM. What "
    f"explains it is reuse in a cache: the profile shows {layers:.0f} launches a step, one a layer, so the sequences "
    "lie in the grid of one launch and neighbours meet the same weights. The walk is real; its bytes are not all "
    "memory traffic. "
    f"That is why the control here is `{card.control}`."
)

# %%
points, states = [], set()
for c in kernel_cards:
    for pair in evidence.pairs(store.rows(device=DEVICE, phase=c.id)).values():
        ok = [r for r in filter(None, pair) if r.status == "ok"]
        states |= {r.l2 for r in ok}
        points += [draw.point(f"{r.name}, M = {r.workload['M']}", r.flops, r.bytes, r.median_us) for r in ok]
notebook.picture(
    draw.roofline(h200, points, ("bf16",), f"H200: measured rows of this family, L2 {' and '.join(sorted(states))}"),
    "Roofline of the H200 with every measured control and candidate of this family.",
) if points else notebook.unmeasured(", ".join(c.id for c in kernel_cards), DEVICE)

# %% [markdown]
# ## 5. The recorded breakdown, and what it predicts
#
# Before the change, by the source's own trace of a decode step at 128 sequences on the dense model:

# %%
SHARES = {
    "mul_mat_vec_q": "lp.decode-parity-explore.gb10.share.control.bucketmul-mat-vec-q.npl128",
    "mul_mat_q": "lp.decode-parity-explore.gb10.share.control.bucketmmq",
}
USED = [
    f"{LP11}.mul-mat-vec-q.control",
    f"{LP11}.mul-mat-vec-q-instances.control",
    f"{LP11}.o-proj-cost.control",
    f"{LP11}.o-proj-cost.candidate",
    f"{LP11}.decode-agg.control.npl128.npp128",
    f"{LP11}.decode-agg.candidate.npl128.npp128",
    f"{LP11}.sequences.control",
]
notebook.show(notebook.figures([*SHARES.values(), *USED]).drop(columns="source"), code=["figure"])

# %%
gemv_ms, instances, before_ms, after_ms, before_tps, after_tps, sequences = (value(i) for i in USED)
step_ms = sequences / before_tps * 1e3
parts = {
    "FP4 GEMV (mul_mat_vec_q)": gemv_ms,
    f"FP4 GEMM (mul_mat_q, {value(SHARES['mul_mat_q']):g} %)": value(SHARES["mul_mat_q"]) / 100 * step_ms,
}
notebook.picture(
    draw.bars(parts, "one decode step", "ms", step_ms, f"GB10, dense model, {sequences:.0f} sequences, recorded"),
    "Bars: the FP4 GEMV takes more of the step than the FP4 GEMM; most of the step is in neither.",
)

# %%
share = gemv_ms / step_ms
saved_ms = instances * (before_ms - after_ms)
predicted_tps = sequences / (step_ms - saved_ms) * 1e3
assert abs(instances * before_ms - gemv_ms) < 0.5  # the projections make up the whole GEMV bucket
assert abs(share * 100 - value(SHARES["mul_mat_vec_q"])) < 1
assert abs(predicted_tps / after_tps - 1) < 0.02
notebook.text(
    f"{instances:.0f} projections of {before_ms} ms are {instances * before_ms:.1f} ms, the whole bucket of {gemv_ms} "
    f"ms, which is {share:.1%} of a step of {step_ms:.0f} ms ({sequences:.0f} tokens at {before_tps} tok/s). At "
    f"{after_ms} ms each, the step is {saved_ms:.0f} ms shorter, which makes {predicted_tps:.1f} tok/s; the source "
    f"measured {after_tps}. The kernel figure and the end-to-end figure support each other."
)

# %% [markdown]
# ## 6. The gates, as declared

# %%
notebook.show(notebook.gate(card), code=["condition"])

# %%
gates = [notebook.gate(c).assign(part=c.id) for c in kernel_cards]
notebook.show(pd.concat(gates).rename(columns={"part": "card"}), code=["card", "condition"])

# %% [markdown]
# ## 7. The verdicts
#
# Recorded, replayed from the source's figures:

# %%
(replayed,) = verdicts.judge_recorded([card])
assert replayed.verdict.word == "GO"
assert replayed.agrees
assert "decode_share_of_vllm 85.9 %" in replayed.verdict.reason, replayed.verdict.reason
notebook.show(notebook.verdicts([replayed]))

# %% [markdown]
# Measured on the H200, the kernels alone. Each measured word is compared with its own medians in the cell: a card
# whose rows are all sound must be GO exactly when every change meets its line.

# %%
measured = {c.id: notebook.measured(c.id, DEVICE) for c in kernel_cards}
shown = [j for j in measured.values() if j]
for c in kernel_cards:
    pairs = evidence.pairs(store.rows(device=DEVICE, phase=c.id))
    wanted = {k.workload: k for k in c.gate.require}
    arms = [pairs.get(w, (None, None)) for w in wanted]
    if not measured[c.id] or not all(a and b and a.status == b.status == "ok" for a, b in arms):
        continue
    met = []
    for (control, candidate), condition in zip(arms, wanted.values(), strict=True):
        change = 100 * (candidate.median_us - control.median_us) / control.median_us
        noise = max(2.0, 3 * control.sd_pct, candidate.aa_pct)
        met.append(change <= condition.threshold if abs(condition.threshold) > noise else change < -noise)
    word = measured[c.id].verdict.word
    assert word == "INVALID" or (word in ("GO", "CONDITIONAL-GO")) == all(met), (c.id, word, met)
notebook.show(notebook.verdicts(shown)) if shown else None

# %%
missing = [c.id for c in kernel_cards if not measured[c.id]]
notebook.text(f"Not measured on the {DEVICE} yet: {', '.join(missing)}.") if missing else None

# %%
rows = []
for c in kernel_cards:
    for w, pair in evidence.pairs(store.rows(device=DEVICE, phase=c.id)).items():
        for r in filter(None, pair):
            row = {"card": c.id, "workload": w, "arm": r.name, "status": r.status}
            if r.status == "ok":
                floor = roofline.place(h200, r.flops, r.bytes, r.pipe)
                reached = roofline.roofline_fraction(floor.floor_us, r.median_us)
                row |= {"median us": r.median_us, "IQR us": r.iqr_us, "floor us": floor.floor_us,
                        "of roofline": f"{reached:.1%}", "rel. error": r.relative_error,
                        "timer, L2": f"{r.timer}, {r.l2}", "run": r.run}  # fmt: skip
            rows.append(row)
notebook.show(pd.DataFrame(rows), code=["card", "workload"]) if rows else None

# %% [markdown]
# Whose kernels these are, by the launch that each row (of a workload that its card still asks) recorded and the one
# that the code would choose. A source changed under the same launch is not seen so: `kernels/nvfp4/NOTES.md` has them.

# %%
limits = [phases.card(i) for i in ("w4a16-decode", "w4a16-prefill-limit", "w4a8-prefill-limit")]
asked = {c.id: c.workloads for c in (*kernel_cards, *limits)}
of = {i: [r for r in store.rows(device=DEVICE, phase=i) if r.workload_id in w] for i, w in asked.items()}
notebook.text("\n".join(f"- `{name}`: {notebook.origin(rows) or 'no rows yet.'}" for name, rows in of.items()))

# %% [markdown]
# Whether the control's passes over the weights could have come from DRAM:

# %%
control, _ = evidence.pairs(store.rows(device=DEVICE, phase="lp11-kernel")).get(projection.id, (None, None))
if control and control.status == "ok":
    each_us = control.median_us / M
    walked_tb_s = M * weight_bytes / control.median_us / 1e6
    have_tb_s, l2_mb = h200.bandwidth.base / 1e12, control.l2_bytes / 1e6
    cold_us = weight_bytes / h200.bandwidth.base * 1e6
    than = "more than" if walked_tb_s > have_tb_s else f"{walked_tb_s / have_tb_s:.0%} of"
    fit = "fit" if weight_bytes / 1e6 < l2_mb else "do not fit"
    meaning = (
        "so L2 served the passes and the null's premise holds"
        if each_us < cold_us
        else "so a pass costs more than a cold read, and the bandwidth of DRAM is not what bounds it"
    )
    shown_text = notebook.text(
        f"`{control.name}`: {M} passes in {control.median_us:,.0f} us are {each_us:.1f} us each, a walk at "
        f"{walked_tb_s:.2f} TB/s, {than} the {have_tb_s:g} TB/s of DRAM. The weights ({weight_bytes / 1e6:.1f} MB) "
        f"{fit} into the L2 of {l2_mb:.1f} MB. One cold read takes {cold_us:.1f} us, {meaning}."
    )
else:
    shown_text = notebook.unmeasured("lp11-kernel", DEVICE)
shown_text

# %% [markdown]
# The defect is one of dispatch, so the format of the weights should not matter. Upstream ggml's own kernels on the same
# card, in three formats: `test-backend-ops perf` as others ran it, transcribed and judged as imported evidence.

# %%
from argparse import Namespace

from lab.study.own import verdict as imported

file = str(REPOSITORY / "data/imported/ggml-d99724f2-h200.sql")
sides = ["control:n=1,nr=[128,1]", "candidate:n=128,nr=[1,1]"]
which = [f"{name}:type_a={name},m={N},k={K}" for name in ("nvfp4", "mxfp4", "q8_0")]
ggml = imported.run(Namespace(phase=["lp11-ggml"], all=False, device=None, rows=[file], arm=sides, map=which))
times = {m.workload: [arm[0].values[0] for arm in (m.control, m.candidate)] for m in ggml.matches}
assert [once < 0.5 * passes for passes, once in times.values()] == [True] * 3
assert (ggml.judgement.verdict.word, ggml.judgement.evidence) == ("GO", "imported")
frame = pd.DataFrame(times, index=["128 sequences us", "2-D us"]).T.rename_axis("weights").reset_index()
notebook.show(frame.assign(change=[f"{100 * (once / passes - 1):+.1f} %" for passes, once in times.values()]))

# %% [markdown]
# ## 8. What would change it

# %%
notebook.show(
    pd.DataFrame([{"card": c.id, "would change the verdict": c.limits, "expected beforehand": c.expected.recovery,
                   "its arithmetic": c.expected.arithmetic} for c in (card, *kernel_cards)]),
    code=["card"],
)  # fmt: skip

# %% [markdown]
# ## Which GPUs get FP4 tensor cores from Triton
#
# Neither a GEMM nor a GEMV above uses FP4 arithmetic: the H200 has none. GB10 has it, and whether Triton emits it is a
# question that ahead-of-time compilation answers without the device. The rows below were compiled with each Triton
# release: `tl.dot_scaled` on two e2m1 operands, with MXFP4 scales (ue8m0, 32 values each) and NVFP4 scales (e4m3, 16).

# %%
from lab.check import aot

compiled = aot.kept()
found = pd.DataFrame(
    [
        {
            "target": r.target,
            "operands": r.candidate,
            "compiler": r.compiler.removeprefix("triton "),
            "emits": r.instruction if r.status == "ok" else "compiler fails" if r.status == "error" else r.status,
        }
        for r in compiled
    ]
)
table = found.pivot(index=["operands", "target"], columns="compiler", values="emits").reset_index()
notebook.show(table.assign(target="sm_" + table.target.astype(str)))

# %%
native = {(r.target, r.candidate, r.compiler.split()[-1]) for r in compiled if "mxf4" in r.instruction}
sm121 = found[(found.target == 121) & (found.operands == "e2m1 e4m3/16")].set_index("compiler").emits
assert set(sm121[["3.6.0", "3.7.1"]]) == {"compiler fails"}
assert sm121[["3.8.0", "3.9.0"]].str.contains("mxf4nvf4").all()
assert {v for t, c, v in native if t == 121} == {"3.8.0", "3.9.0"}  # MXFP4 too: a bf16 product before that
assert not any(t == 90 for t, _, _ in native)
first = min(v for t, _, v in native if t == 121)
notebook.text(
    f"On GB10 (sm_121) Triton emits a native FP4 product from {first} on; before, NVFP4 made the compiler fail and "
    "MXFP4 became a bf16 product. On the H200 (sm_90) a release widens to bf16 or fails. Modelled evidence: it says "
    "that the instruction is there (on sm_120 all along), not that it is fast."
)
