"""The claims of notebooks/localai_p1_p6.py: what its text says of committed figures and rows, held here."""

from lab import value
from lab.base import devices, facts, models
from lab.card import phases, recorded
from lab.check import families
from lab.judge import verdicts
from lab.place import roofline
from lab.study import ledger, reproduction
from lab.trace import breakdowns, diff


def test_claims():
    # Six phases towards parity: what was asked, what came back
    gb10, moe = devices.get("gb10"), models.get("q36-35b-a3b")
    PHASES = {
        "P1": ("p1", "p1-dense"),
        "P2": ("p2", "p2-structural"),
        "P3": ("p3", "p3-gather"),
        "P4": ("p4", "p4-determinism"),
        "P5": ("p5", "p5-blocked-inverse", "p5-chunk64"),
        "P6": ("p6", "p6-q8", "p6-capacity"),
    }
    JUDGED = {
        j.recorded_id: j for j in verdicts.judge_recorded([phases.card(c) for own in PHASES.values() for c in own])
    }
    ROWS = {e.id: e for e in ledger.entries()}
    # The gap that the plan divided up
    prefill = diff.difference(*(breakdowns.from_recorded(f"lmap_prefill_{e}_moe_npp512") for e in ("paged", "vllm")))
    whole, _part = (
        value("lp.ledger.program.gap"),
        value("lp.program-conclusion.gb10.prefill-gap-bucket.control.bucket1+2"),
    )
    assert round(prefill.gap, 1) == whole
    # P1: a residual stream in bf16
    paged = breakdowns.from_recorded("lmap_prefill_paged_moe_npp512")
    gain, p1 = JUDGED["lp.v.p1"].claims[0][1], JUDGED["lp.v.p1"].verdict
    assert (p1.word, gain.word) == ("NO-GO", "NEUTRAL")
    # P2: experts in order, the feed-forward as one region
    region = [
        (n, value(f"lp.gate.p2.region-n{n}.control"), value(f"lp.gate.p2.region-n{n}.candidate")) for n in (128, 257)
    ]
    moved = max(abs(b / a - 1) for _, a, b in region)
    ran, kl = value("lp.p2.gb10.engagement.candidate"), value("lp.p2.gb10.kl-delta.candidate")
    assert moved < 0.005
    assert ran == kl == 0
    # P3: W4A16 with activations read directly
    up, down = moe.shapes["expert_up"].axes, moe.shapes["expert_down"].axes
    layers, chosen, experts = (int(moe.fact(f).value) for f in ("layers", "experts_per_token", "experts"))
    step_tokens = int(recorded.figure("lp.patch-0015.gb10.n-experts-valid-range.candidate.boundlo").params["n_ubatch"])
    per_expert = 2 * up["N"] * up["K"] + down["N"] * down["K"]  # gate and up, then down
    BITS = 4.5  # four bits a weight and an e4m3 scale for sixteen
    flops = 2 * per_expert * chosen * layers
    weight_bytes = per_expert * experts * layers * BITS / 8 / step_tokens
    MMQ, GROUPED, DIRECT = (
        value(f"lp.gate.p3.gemm-{name}") for name in ("grouped.control", "grouped.candidate", "direct.candidate")
    )
    peak, unit = gb10.peak("bf16").base, gb10.bandwidth.unit
    stated = [facts.to_base(v.value, unit) for v in gb10.bandwidth.values]
    floors = [roofline.floor(flops, weight_bytes, peak, bandwidth) for bandwidth in stated]
    mapped = next(p.value for p in paged.parts if p.category == "moe_or_fp4_gemm")
    assert all(f.bound == "memory" for f in floors)
    assert MMQ < GROUPED < DIRECT
    assert min(f.floor_us for f in floors) < mapped < max(f.floor_us for f in floors) < MMQ
    # P5: six kernels for the scan
    gdn, gdn_layers = families.load("gdn"), int(moe.fact("gdn_layers").value)
    problem = gdn.workload("b32_t2048_hk16_hv32_d128")  # its cost per token does not depend on the batch
    cost, tokens = gdn.cost(problem, "bf16"), problem["batch"] * problem["T"]
    M5, FLA = (value(f"lp.gate.p5.gdn-npp2048.{arm}") for arm in ("control", "candidate"))
    share = {b: value(f"lp.p5.gb10.share.candidate.bucket{b}") / 100 for b in ("fwd-h", "fwd-o", "solve-tril")}
    floor = roofline.place(gb10, cost.flops * gdn_layers / tokens, cost.bytes * gdn_layers / tokens, "bf16")
    assert floor.floor_us < M5 < FLA
    assert FLA * (1 - share["solve-tril"]) > M5  # a free solve would not have saved it
    # P6: half the bytes in the KV cache
    RUNS = [(m, ctx, npl) for m in ("dense", "moe") for ctx, npl in ((512, 128), (4096, 8), (8192, 8))]
    rows = []
    for m, ctx, npl in RUNS:
        step, attention, ceiling = (
            value(f"lp.gate.p6.{k}-{m}-ctx{ctx}-npl{npl}") for k in ("step", "attention", "ceiling")
        )
        ours = 100 * roofline.part_saving_ceiling(attention, step, 0.5)
        assert abs(ours - ceiling) < 0.01
        rows.append((m, ctx, npl, step / 1e3, f"{attention / step:.1%}", ceiling, ours))
    prior = [r for r in reproduction.reproduce() if r.id.startswith("kv-prior")]
    assert all(r.agrees for r in prior)
    entry = ROWS["kv-ceiling"]
    assert entry.outcome == ledger.FALSE
    # The program as a whole
    END = [phases.card(i) for i in ("program-conclusion", "h2h-4way")]
    ending = verdicts.judge_recorded(END)
    assert [j.verdict.word for j in ending] == ["NO-GO", "PARTIAL"]
    # The ledger: expected and delivered
    six = [e for e in ROWS.values() if e.kind == "phase"]
    whole_plan = ROWS["prefill-recovery"]
    assert [e.id for e in six if e.landed] == ["p1"]
    assert whole_plan.outcome == "short"
    assert whole_plan.part_pct[1] < 10
    assert ROWS["prefill-share"].delivered[1] < ROWS["prefill-share"].expected[0]
    assert ROWS["copy-removal"].outcome == ROWS["projection-target"].outcome == ledger.TRUE
