"""The claims of notebooks/nvfp4.py: what its text says of committed figures and rows, held here."""

import dataclasses
from argparse import Namespace

import pandas as pd
import torch

from kernels.nvfp4 import route
from lab import value
from lab.base import devices
from lab.base.errors import REPOSITORY
from lab.card import phases
from lab.check import accuracy, aot, families
from lab.judge import evidence, verdicts
from lab.place import roofline
from lab.row import store
from lab.study.own import verdict as imported
from tests.claims.timed import judged_here
from tests.ran import run_once


def test_claims():
    # NVFP4 products: one GEMM or one GEMV per sequence
    families.interpret_on_cpu()  # before the family's Triton modules are imported
    DEVICE = "h200"
    family = families.load("nvfp4")
    gb10, h200 = devices.get("gb10"), devices.get(DEVICE)
    LP11 = "lp.lever1-ssm-out-2d.gb10"
    # 1. The question
    card = phases.card("lp11")
    LEVERS = ("lp6-minblocks-kernel", "lp6-mmq-x-kernel", "lp6-mmq-y-kernel")
    INVERSIONS = ("p3-kernel", "p3-cast-kernel")
    kernel_cards = [
        phases.card(i) for i in ("lp11-kernel", "lp11-mxfp4-kernel", "w4a16-gemv", "w4a16-gemm", *LEVERS, *INVERSIONS)
    ]
    # 2. The mechanism
    projection = family.workload("m128_n5120_k6144")
    M, N, K = (projection[a] for a in "MNK")
    weight_bytes = family.cost(projection, "nvfp4-w4a16").bytes - 2 * (M * K + M * N)
    assert abs(weight_bytes / (N * K * 4.5 / 8) - 1) < 1e-6  # 4.5 bits a weight and one float32
    trap, collapsed = route.choose_uncollapsed((K, 1, M)), route.choose((K, M))
    assert (trap.calls, trap.candidate, collapsed.calls, collapsed.candidate) == (M, "triton_gemv", 1, "triton_gemm")
    # 3. Reference against candidates
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
    given = family.cases.inputs(workload, 1, where)
    per_sequence, at_once = (
        run_once(family, family.candidate(name), workload, given)["y"].double()
        for name in (card.control, card.candidate)
    )
    apart = ((per_sequence - at_once).norm() / at_once.norm()).item()
    assert apart <= 2 * checks[0].errors[0].relative_limit
    # 4. Roofline: the floors, and where the recorded kernel stood
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
    # Few rows wait for their bytes on both devices, and 4.5 bits against 16 bounds what NVFP4 can save there.
    few = floors[floors.workload.str.startswith(("m1_", "m8_"))]
    assert (few[["gb10 bound", "h200 bound"]] == "memory").all().all()
    by = floors.pivot(index="workload", columns="weights", values="MB")
    saving = (1 - by["nvfp4-w4a16"] / by["bf16"]).loc["m1_n17408_k5120"]
    assert abs(saving - (1 - 4.5 / 16)) < 0.01
    cost = family.cost(projection, "nvfp4-w4a16")
    control_us, _candidate_us = (value(f"{LP11}.o-proj-cost.{arm}") * 1e3 for arm in ("control", "candidate"))
    floor = roofline.place(gb10, cost.flops, cost.bytes, "bf16")
    walked_gb_s = M * weight_bytes / control_us / 1e3
    stated = [v.value for v in gb10.bandwidth.values]
    assert floor.bound == "memory"
    assert walked_gb_s > max(stated)
    # 5. The recorded breakdown, and what it predicts
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
    gemv_ms, instances, before_ms, after_ms, before_tps, after_tps, sequences = (value(i) for i in USED)
    step_ms = sequences / before_tps * 1e3
    share = gemv_ms / step_ms
    saved_ms = instances * (before_ms - after_ms)
    predicted_tps = sequences / (step_ms - saved_ms) * 1e3
    assert abs(instances * before_ms - gemv_ms) < 0.5  # the projections make up the whole GEMV bucket
    assert abs(share * 100 - value(SHARES["mul_mat_vec_q"])) < 1
    assert abs(predicted_tps / after_tps - 1) < 0.02
    # 7. The verdicts
    (replayed,) = verdicts.judge_recorded([card])
    assert replayed.verdict.word == "GO"
    assert replayed.agrees
    assert "decode_share_of_vllm 85.9 %" in replayed.verdict.reason, replayed.verdict.reason
    measured = {c.id: judged_here(c.id, DEVICE) for c in kernel_cards}
    for c in kernel_cards:
        pairs = evidence.pairs(store.rows(device=DEVICE, phase=c.id))
        wanted = {k.workload: k for k in c.gate.require}
        arms = [pairs.get(w, (None, None)) for w in wanted]
        if not measured[c.id] or not all(a and b and a.status == b.status == "ok" for a, b in arms):
            continue
        met = []
        for (control, candidate), condition in zip(arms, wanted.values(), strict=True):
            change = 100 * (candidate.median_us - control.median_us) / control.median_us
            noise = max(2.0, 3 * control.sd_pct, evidence.aa_pct(control, candidate))
            met.append(change <= condition.threshold if abs(condition.threshold) > noise else change < -noise)
        word = measured[c.id].verdict.word
        assert word == "INVALID" or (word in ("GO", "CONDITIONAL-GO")) == all(met), (c.id, word, met)
    file = str(REPOSITORY / "data/imported/ggml-d99724f2-h200.sql")
    sides = ["control:n=1,nr=[128,1]", "candidate:n=128,nr=[1,1]"]
    which = [f"{name}:type_a={name},m={N},k={K}" for name in ("nvfp4", "mxfp4", "q8_0")]
    ggml = imported.run(
        Namespace(phase=["lp11-ggml"], all=False, device=None, rows=[file], arm=sides, map=which, metric=[])
    )
    times = {m.workload: [arm[0].values[0] for arm in (m.control, m.candidate)] for m in ggml.matches}
    assert [once < 0.5 * passes for passes, once in times.values()] == [True] * 3
    assert (ggml.judgement.verdict.word, ggml.judgement.evidence) == ("GO", "imported")
    # Which GPUs get FP4 tensor cores from Triton
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
    native = {(r.target, r.candidate, r.compiler.split()[-1]) for r in compiled if "mxf4" in r.instruction}
    sm121 = found[(found.target == 121) & (found.operands == "e2m1 e4m3/16")].set_index("compiler").emits
    assert set(sm121[["3.6.0", "3.7.1"]]) == {"compiler fails"}
    assert sm121[["3.8.0", "3.9.0"]].str.contains("mxf4nvf4").all()
    assert {v for t, c, v in native if t == 121} == {"3.8.0", "3.9.0"}  # MXFP4 too: a bf16 product before that
    assert not any(t == 90 for t, _, _ in native)
