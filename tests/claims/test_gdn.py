"""The claims of notebooks/gdn.py: what its text says of committed figures and rows, held here."""

from dataclasses import replace

import pandas as pd
import torch

from kernels.gdn import triton_split
from lab import value
from lab.base import devices, models
from lab.card import phases, recorded
from lab.check import accuracy, families
from lab.judge import verdicts
from lab.place import roofline
from lab.study import reproduction
from tests.claims.timed import judged_here, timed_as_judged


def test_claims():
    # Gated DeltaNet: one fused scan or six kernels, and who moves the state
    families.interpret_on_cpu()  # before the kernels are imported: without a GPU they run in Triton's interpreter
    gdn = families.load("gdn")
    gb10, h200 = devices.get("gb10"), devices.get("h200")
    GPU = "cuda" if families.gpu_capability() else "cpu"
    ASKED = [phases.card(i) for i in ("p5", "p5-blocked-inverse", "p5-chunk64", "p5-kernel", "lp9-kernel")]

    # 3. Reference against candidates, live
    def small(**axes):
        """The first check workload with these axes."""
        checked = (w for w in gdn.cases.WORKLOADS if w.role == "check")
        return next(w for w in checked if all(w[axis] == size for axis, size in axes.items()))

    CHECKED = [
        (small(T=75, D=128), ("torch_chunk", "fused_chunk", "split_pipeline")),
        (small(regime="similar"), ("fused_chunk", "fused_chunk_fp16", "split_pipeline")),
        (next(w for w in gdn.cases.WORKLOADS if w["lengths"]), ("torch_chunk", "fused_chunk")),
        (small(op="decode", pad=2), ("recurrent_decode",)),
    ]
    checks = [accuracy.check(gdn, gdn.candidate(name), w, device=GPU) for w, names in CHECKED for name in names]
    assert all(c.status == "ok" for c in checks), [c.message for c in checks]
    fused = gdn.candidate("fused_chunk")
    wrong = replace(fused, run=lambda args, out: fused.run(args | {"beta": args["beta"] * 1.05}, out))
    refused = accuracy.check(gdn, wrong, small(regime="beta1"), device=GPU)
    assert refused.status == "incorrect", refused
    # 4. Floors and rooflines
    SHAPES = (
        "t2048_hk16_hv48_d128",
        "b32_t2048_hk16_hv32_d128",
        "decode_b32_hk16_hv48_d128",
        "decode_b128_hk16_hv48_d128",
    )
    costs = {name: gdn.cost(gdn.workload(name), "bf16") for name in SHAPES}
    placed = [(n, d, c, roofline.place(d, c.flops, c.bytes, c.pipe)) for n, c in costs.items() for d in (gb10, h200)]
    assert all(floor.bound == "memory" for name, _, _, floor in placed if name.startswith("decode"))
    layers = int(models.get("q36-35b-a3b").facts["gdn_layers"].value)
    M5, FLA = (
        value(f"lp.p5.gb10.gdn-us-per-tok.{arm}") for arm in ("control.npp2048.itemm5", "candidate.npp2048.itemfla")
    )
    m5_512, fla_512 = (value(f"lp.gate.p5.gdn-npp512.{arm}") for arm in ("control", "candidate"))
    token_us = 1e6 / value("lp.gate.p1.prefill.control")  # whole model, the same npp and model, another phase
    lost = -100 * (fla_512 - m5_512) / (token_us + fla_512 - m5_512)
    stated = value("lp.gate.p5.prefill-npp512.delta")
    assert abs(lost - stated) < 0.3
    problem = gdn.workload("b32_t2048_hk16_hv32_d128")  # its cost per token does not depend on the batch
    per_token = layers / (problem["batch"] * problem["T"])
    cost = gdn.cost(problem, "bf16")
    flops, compulsory = cost.flops * per_token, cost.bytes * per_token
    floor = roofline.place(gb10, flops, compulsory, "bf16")
    assert floor.floor_us < M5 < FLA
    reached = {us: roofline.roofline_fraction(floor.floor_us, us) for us in (M5, FLA)}
    assert reached[FLA] < reached[M5] < 0.1
    # 5. Where the pipeline's time went on GB10
    BUCKETS = {"fwd_h: carries the state": "fwd-h", "fwd_o: output": "fwd-o", "solve_tril": "solve-tril"}
    share = {b: value(f"lp.p5.gb10.share.candidate.bucket{b}") / 100 for b in BUCKETS.values()}
    denominators = [value(f"lp.p5.gb10.kernel-ms.candidate.bucket{b}") / share[b] for b in share]
    assert max(denominators) / min(denominators) < 1.02  # three shares, one denominator
    solved = FLA * (1 - share["solve-tril"])
    assert solved > M5  # a free solve would not have saved the pipeline
    assert abs(share["fwd-h"] * FLA / M5 - 1) < 0.05
    shape = models.shape("q36-35b-a3b.gdn").axes
    budget = 0.9 * M5  # more than ten percent faster than the control
    rows, per_us = [], gb10.bandwidth.base / 1e6
    for chunk in (16, 32, 64):
        span = triton_split.workspace_shapes(chunk, 1, shape["Hv"], shape["D"], chunk, torch.float32)  # of one chunk
        sizes = {n: torch.Size(s).numel() * dtype.itemsize * layers / chunk for n, (s, dtype) in span.items()}
        q, v = (4 * shape[h] * shape["D"] * layers for h in ("Hk", "Hv"))  # k has q's size and o has v's
        carried = sizes["h"] + sizes["v_new"] + sizes["running"]
        moved = {"fwd-h": carried + sizes["w"] + sizes["u"] + q, "fwd-o": carried + 2 * q + v}
        h_us, all_us = 2 * sizes["h"] / per_us, 2 * sum(sizes.values()) / per_us
        line = {"chunk": chunk, "h, MB/token": 2 * sizes["h"] / 1e6, "h, us": h_us, "all, us": all_us}
        line |= {f"{k} of bandwidth": b / per_us / (share[k] * FLA) for k, b in moved.items()}
        rows.append(line | {"explains P5 below": all_us / (FLA - budget)})
    state = pd.DataFrame(rows)
    explicit = 2 * shape["Hv"] * shape["D"] ** 2 * 4 * layers / 64 / 1e6
    assert abs(state["h, MB/token"].iloc[-1] - explicit) < 1e-9  # the workspace's shapes and the formula agree
    extra, _low, high = FLA - M5, state.iloc[-1], state.iloc[0]  # chunks of 64 and of 16
    call = next(r for r in reproduction.reproduce() if r.id == "gdn-call-control")
    assert high["all, us"] < extra
    assert high["explains P5 below"] * 100 < call.ours
    cap, used = value("lp.p5.gb10.smem-cap.candidate"), value("lp.p5.gb10.smem-max.candidate")
    optin = gb10.fact("smem_optin_bytes_per_block")
    assert used < cap == optin.base / 1024
    # 7. The verdicts: replayed from the record, and measured here
    replayed = {j.phase: j for j in verdicts.judge_recorded(ASKED)}
    p5 = replayed["p5"].verdict
    assert all(j.agrees and j.verdict.word == "NO-GO" for j in replayed.values())
    assert [f.state for f in p5.findings] == ["fails", "holds", "holds"]
    assert "gdn_us_per_token +112" in p5.reason
    KERNEL_CARDS = [c for c in ASKED if c.device == "h200"]
    measured = {c.id: j for c in KERNEL_CARDS if (j := judged_here(c.id, "h200"))}
    for phase, judgement in measured.items():
        timed_as_judged(phase, judgement)
    one = gdn.workload(phases.card("p5-kernel").workloads[0])
    # 8. The state in decode: the copy and the gather
    levers = []
    for name, patch in (("0018: no copy back", "patch-0018"), ("0019: no gather", "patch-0019")):
        rates = [recorded.figure(f"lp.{patch}.gb10.decode-agg.{arm}.npl128.npp128") for arm in ("control", "candidate")]
        gain = 100 * (float(rates[1].value) / float(rates[0].value) - 1)
        assert round(gain, 1) == rates[1].delta_pct  # the printed gain follows from the printed rates
        levers.append((name, rates[0].value, rates[1].value, gain, rates[1].id))
    gains = pd.DataFrame(levers, columns=["patch", "before tok/s", "after tok/s", "gain %", "figure"])
    copied, gathered = (
        value(f"lp.a2-phase2-decompose.gb10.share.control.bucket{b}.npl128") / 100
        for b in ("d2d-state-copy", "get-rows")
    )
    ceilings = [100 * roofline.saving_ceiling(copied, 1), 100 * roofline.saving_ceiling(gathered / (1 - copied), 1)]
    assert all(abs(ceiling - gain) < 1 for ceiling, gain in zip(ceilings, gains["gain %"], strict=True))
    state_bytes = {b: b * one["Hv"] * one["D"] ** 2 * 4 for b in (32, 128)}
    decode = costs["decode_b128_hk16_hv48_d128"].bytes
    assert 2 * state_bytes[128] < decode < 2 * state_bytes[128] * 1.02  # decode is its state's traffic
    l2 = h200.fact("l2_bytes").base
    assert state_bytes[32] > l2
    # 9. What would change the verdicts, and where our arithmetic differs
    GDN_ROWS = ("ceiling-without-copy", "ceiling-without-copy-and-gather", "state-copy-mean", "state-copy-shape")
    ours = {r.id: r for r in reproduction.reproduce() if r.id in GDN_ROWS}
    assert all(r.agrees == (r.expected == "agrees") for r in ours.values())
    assert not ours["state-copy-shape"].agrees
