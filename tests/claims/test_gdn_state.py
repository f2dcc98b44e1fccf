"""The claims of notebooks/gdn_state.py: what its text says of committed figures and rows, held here."""

import math
from dataclasses import replace

import pandas as pd

from kernels.gdn import batches, error_growth
from lab import value
from lab.base import devices, models
from lab.card import phases, recorded
from lab.check import families
from lab.judge import decode_step, verdicts
from lab.place import ceilings
from lab.row import store
from lab.write import figures
from tests.claims.timed import judged_here


def test_claims():
    # The state of Gated DeltaNet: its size, its format, its way to the kernel, and whose it is
    families.interpret_on_cpu()
    gdn, kv = families.load("gdn"), families.load("kv")
    _gb10, h200 = devices.get("gb10"), devices.get("h200")
    JUDGED = ("ik4-kernel", "lp10-kernel", "lp12-kernel", "lp13-kernel")
    MEASURED = {name: judged_here(name, "h200") for name in JUDGED}
    # 1. LP12: what grows with the context
    FLAT = "lp.gdn-context-flat.gb10"
    short_us, long_us = (value(f"{FLAT}.gdn-us-per-launch.control.npl4.ctx{n}x") for n in (1, 4))
    short_attention_us, long_attention_us = (
        value(f"{FLAT}.full-attn-us-per-launch.control.npl4.ctx{n}x") for n in (1, 4)
    )
    assert long_us <= short_us  # flat, and then some
    assert abs(long_attention_us / short_attention_us - value(f"{FLAT}.full-attn-growth.control.npl4")) < 0.1
    (judged,) = verdicts.judge_recorded([phases.card("lp12")])
    assert judged.verdict.word == judged.reading == "NO-GO"
    CONTEXTS = (256, 1024, 4096, 8192, 32768)
    attention = next(w for w in kv.cases.WORKLOADS if w.source == "q36-27b.attention")
    assert not {"ctx", "context", "seq_lens"} & set(gdn.workload("decode_b128_hk16_hv48_d128").axes)
    lines = []
    for batch in (1, 128):
        step = gdn.cost(gdn.workload(f"decode_b{batch}_hk16_hv48_d128"), "f32").bytes
        for ctx in CONTEXTS:
            cache = kv.cost(replace(attention, axes={**attention.axes, "batch": batch, "ctx": ctx}), "bf16").bytes
            lines.append(
                (
                    batch,
                    ctx,
                    step / 1e6,
                    cache / 1e6,
                    step / h200.bandwidth.base * 1e6,
                    cache / h200.bandwidth.base * 1e6,
                )
            )
    floors = pd.DataFrame(
        lines, columns=["sequences", "context", "GDN MB", "attention MB", "GDN floor us", "attention floor us"]
    )
    grown = floors.groupby("sequences").agg(["min", "max"])
    assert (grown["GDN MB"]["min"] == grown["GDN MB"]["max"]).all()
    assert (grown["attention MB"]["max"] > 50 * grown["attention MB"]["min"]).all()
    FACTS = models.get("q36-27b").facts
    found = {
        (name, workload): arms[name].median_us
        for card, name in (("lp12-kernel", "splitkv_bf16"), ("p6-cuda", "cuda_bf16"))
        for workload, arms in figures.judged_rows(phases.card(card), "h200").items()
        if card == "lp12-kernel" or "_b1_" in workload
    }
    grown, fixed = {}, {}
    for name in ("splitkv_bf16", "cuda_bf16"):
        short, long = (found[name, f"ctx{ctx}_b1_hq24_hkv4_d256"] for ctx in (8192, 32768))
        grown[name], fixed[name] = 100 * (long / short - 1), short - (long - short) / 3  # 32768 is four times 8192
    assert grown["splitkv_bf16"] < 100 < grown["cuda_bf16"]
    # 2. LP13: the state in bf16
    core = phases.card("lp13").recorded[0].evidence["gdn_core_time", ""]
    per_launch = 100 * (core.candidate / core.candidate_launches / (core.control / core.control_launches) - 1)
    assert -50 < per_launch < -45
    # Beside a bare pass over the states
    LIMIT = phases.card("gdn-decode-limit")
    passes_seen, lines = ceilings.latest("h200"), []
    for name, arms in figures.judged_rows(LIMIT, "h200").items():
        row = arms["cuda_decode"]
        axes, width = row.workload, 2 if name.endswith("bf16") else 4
        mib = axes["batch"] * axes["Hv"] * axes["D"] ** 2 * width / 2**20
        bare = passes_seen.get(f"update_{mib:g}_mib")  # none of 1.5 MiB
        bare_us = 2 * mib * 2**20 / bare.value / 1e3 if bare else math.nan
        target = next(g.threshold for g in LIMIT.gate.require if g.workload == name)
        lines.append(("bf16" if width == 2 else "f32", axes["batch"], row.median_us, target, bare_us))
    step = pd.DataFrame(lines, columns=["state", "sequences", "us", "target us", "bare us"])
    step["over target %"], step["over bare %"] = (100 * (step["us"] / step[c] - 1) for c in ("target us", "bare us"))
    over = {s: list(rows["over bare %"].dropna()) for s, rows in step.groupby("state")}
    assert over["f32"] == sorted(over["f32"], reverse=True)  # the card's workloads rise in sequences
    assert over["bf16"][0] == max(over["bf16"])
    # Error growth over 4,096 tokens
    growth = error_growth.study()
    STORED = [s.name for s in growth.storages]
    NEAREST, STOCHASTIC, BATCHED = STORED[1:]
    assert growth.checkpoints[-1] == 4096
    ORDINARY = ("mixed", "keep", "beta1", "similar")
    assert all(growth.drift(NEAREST, r, 4096) < 1.1 * growth.drift(NEAREST, r, 1024) for r in ORDINARY)
    idle = {s: growth.drift(s, "idle", 4096) for s in STORED}
    assert idle[NEAREST] > 8 * idle[STOCHASTIC] > 1000 * idle["f32"]
    assert idle[NEAREST] > 15 * growth.drift(NEAREST, "idle", 256)
    dearer = [growth.drift(STOCHASTIC, r, 4096) / growth.drift(NEAREST, r, 4096) for r in ORDINARY]
    assert 1.2 < min(dearer) < max(dearer) < 1.7
    # The gate that could not fail
    LINE = value("lp.gate.bf16-ssm.drift-ratio.threshold")
    SHORT = int(value("lp.gate.bf16-ssm.gate-tokens.passed"))
    f32, unread = growth.at("f32"), growth.at(BATCHED)
    assert (growth.squared_error[f32, :, :SHORT] == growth.squared_error[unread, :, :SHORT]).all()  # nothing to see
    BOTH = ("never read: 4096 / it", "read each token: 4096 / it")
    trap = []
    for r in growth.regimes:
        ratios = {s: growth.drift(s, r, 4096) / growth.drift(s, r, SHORT) for s in (BATCHED, NEAREST)}
        trap.append(
            (r, growth.drift(BATCHED, r, SHORT), ratios[BATCHED], growth.drift(NEAREST, r, SHORT), ratios[NEAREST])
        )
    trap = pd.DataFrame(
        trap,
        columns=[
            "regime",
            f"never read: drift at {SHORT}",
            BOTH[0],
            f"read each token: drift at {SHORT}",
            BOTH[1],
        ],
    )
    failed = trap[trap[BOTH[0]] > LINE]
    assert set(trap.regime) - set(failed.regime) == {"forget"}
    assert (trap[trap.regime.isin(ORDINARY)][BOTH[1]] < 2).all()
    # 3. LP10: how often the state travels
    FORMS = {"recurrent_decode_copied": 6, "recurrent_decode_gathered": 4, "recurrent_decode": 2}
    lp10 = figures.judged_rows(phases.card("lp10-kernel"), "h200")
    layer = {
        (axes.get("ids", "permuted"), axes["batch"]): {form: arms[form].median_us for form in FORMS}
        for arms in lp10.values()
        for axes in [arms["recurrent_decode"].workload]
    }
    assert len({row.run for arms in lp10.values() for row in arms.values()}) == 1
    rows = sorted((r for r in store.rows(device="h200") if r.status == "ok"), key=lambda r: r.run)
    timed = list({(r.name, r.workload_id): r for r in rows}.values())  # the newest
    REST = {
        "attention": [r for r in timed if r.precision == "bf16" and r.workload.get("page") == 16],
        "weights": [r for r in timed if r.precision.startswith("nvfp4-w4a16") and "M" in r.workload],
    }
    COPIED, GATHERED, BY_ID = FORMS
    lines, gain = [], {}
    for (ids, batch), by in sorted(layer.items(), key=lambda cell: (cell[0][0] != "permuted", cell[0][1])):
        needed = [p for p in decode_step.parts(models.get("q36-27b"), batch, 256) if p.name in REST]
        others = decode_step.from_rows(h200, needed, REST)
        state = {form: FACTS["gdn_layers"].value * us for form, us in by.items()}
        total = {form: us + decode_step.total_us(others) for form, us in state.items()}
        gain[ids, batch] = [100 * (total[a] / total[b] - 1) for a, b in ((COPIED, GATHERED), (GATHERED, BY_ID))]
        shares = [100 * (1 - total[b] / total[a]) for a, b in ((COPIED, GATHERED), (GATHERED, BY_ID))]
        lines.append(
            {
                "ids": ids,
                "B": batch,
                **{f"{t.part} ms": t.us / 1e3 for t in others},
                "GDN ms, copied": state[COPIED] / 1e3,
                "by id": state[BY_ID] / 1e3,
                "copy back, % of its step": shares[0],
                "gather, % of its step": shares[1],
                "0018 gains %": gain[ids, batch][0],
                "0019 gains %": gain[ids, batch][1],
            }
        )
    patches = (f"lp.patch-{n}.gb10.decode-agg.candidate.npl128.npp128" for n in ("0018", "0019"))
    recorded_gain = [recorded.figure(i).delta_pct for i in patches]
    here = gain["permuted", 128]
    assert all(a > b for a, b in zip(here, recorded_gain, strict=True))
    # 4. IK1, IK2, IK4, IK6: whose state it is
    SLOTS = {0: 2, 1: 0, 2: 1}
    EXAMPLES = {
        "one sequence": [0, 0, 0],
        "decode": [1, 0, 2],
        "equal": [0, 0, 1, 1],
        "ragged": [0, 0, 0, 1],
        "interleaved": [0, 1, 0, 0, 2],
    }
    plans = {name: batches.decompose(order, SLOTS) for name, order in EXAMPLES.items()}
    kinds = {name: {x.kind for x in plan} for name, plan in plans.items()}
    assert kinds == {
        "one sequence": {"single"},
        "decode": {"batched"},
        "equal": {"batched"},
        "ragged": {"ragged"},
        "interleaved": {"stepwise"},
    }
    moving = [x for s in (0, 0, 1, 0, 2) for x in batches.decompose([s], SLOTS)]
    stale = {
        "with the slot": batches.stale_reuses(moving),
        "without it": batches.stale_reuses(moving, lambda x: x.lengths),
    }
    assert stale["with the slot"] == 0 < stale["without it"]
    (paid,) = (f.seen for f in MEASURED["ik4-kernel"].verdict.findings if f.role == "require")
    assert -0.2 < paid.interval[0] < paid.interval[1] < 0.2 < paid.line == 1
