"""The claims of notebooks/p5_p6_h200.py: what its text says of committed figures and rows, held here."""

import numpy as np
import pandas as pd
import pytest

from kernels.gdn import cost as gdn_cost
from lab import value
from lab.base import devices, models
from lab.card import phases
from lab.check import families
from lab.judge import verdicts
from lab.place import roofline
from lab.row import store
from lab.trace import model, stored, windows
from lab.write import figures


def test_claims():
    # P5 and P6, asked again with kernels at their limit
    families.interpret_on_cpu()  # before the kernels are imported: without a GPU they run in Triton's interpreter
    gdn = families.load("gdn")
    gb10, h200 = devices.get("gb10"), devices.get("h200")
    P5 = [phases.card(i) for i in ("p5-cuda", "p5-35b", "p5-chunk-length", "gdn-nmse")]
    P6 = [phases.card(i) for i in ("p6-cuda", "kv-q8-limit", "kv-page64", "kv-batch-sawtooth")]

    def uncovered(card: phases.Card) -> str:
        """The workloads of a card without rows of both its arms."""
        found = figures.judged_rows(card, h200.id)
        missing = [w for w in card.workloads if not {card.control, card.candidate} <= found.get(w, {}).keys()]
        return f" Without rows: {', '.join(f'`{w}`' for w in missing)}." if missing else ""

    # 2. P5 on the H200
    found = {
        w: rows
        for w, rows in figures.judged_rows(P5[0], h200.id).items()
        if {"cuda_scan", "split_pipeline"} <= rows.keys()
    }
    if found:
        pair = [100 * (r["split_pipeline"].median_us / r["fused_chunk"].median_us - 1) for r in found.values()]
        longer = [r["split_pipeline"].median_us / r["cuda_scan"].median_us for r in found.values()]
        assert max(pair) < -10 < 1 < min(longer)
    PROFILE = max((store.FOLDER / h200.id / "p5-kernel").glob("*/trace.parquet"))
    ran = windows.by_nvtx(stored.load(PROFILE), "p5-kernel/candidate/t2048_hk16_hv48_d128")
    totals = model.totals_by_name(ran)
    assert {t.name for t in totals} == {f"{n}_kernel" for n in ("cumsum", "kkt", "inverse", "wu", "scan", "output")}
    # 3. The chain as a term of the cost model
    SCANS = {"fused_chunk_c16": 16, "fused_chunk_c32": 32, "fused_chunk": 64, "split_pipeline": 64}  # tokens a chunk
    COLUMNS, HELD = 64, 2  # of v that a program carries; programs an SM holds

    def bytes_us(problem, form: str) -> float:
        """Bytes of an algorithm in bf16 at the H200's peak bandwidth, in us."""
        cost = gdn_cost.algorithm_cost(problem, SCANS[form], 2, form == "split_pipeline")
        assert roofline.place(h200, cost.flops, cost.bytes, cost.pipe).bound == "memory"
        return cost.bytes / h200.bandwidth.base * 1e6

    def steps_of(problem, form: str, sms: int) -> int:
        """Dependent steps."""
        return gdn_cost.chain_steps(problem, SCANS[form], COLUMNS, sms * HELD)

    runs = figures.judged_rows(P5[2], h200.id)
    SMS = int(h200.fact("sms").value)
    single = [gdn.workload(w) for w in runs if gdn.workload(w)["batch"] == 1]
    fits, lines = {}, []
    for form in SCANS:
        x = np.array([steps_of(p, form, SMS) for p in single])
        us = np.array([runs[p.id][form].median_us for p in single])
        rest = np.array([bytes_us(p, form) for p in single])
        fits[form] = tuple(float(f) for f in np.polyfit(x, us - rest, 1))
        worst = np.abs((rest + np.polyval(fits[form], x)) / us - 1).max()
        lines.append((form, SCANS[form], *fits[form], 100 * worst))
    lines = []
    for workload, arms in runs.items():
        problem = gdn.workload(workload)
        for form in (f for f in SCANS if f in arms and problem["batch"] > 1):
            step_us, fixed_us = fits[form]
            parts = bytes_us(problem, form), steps_of(problem, form, SMS) * step_us
            us = arms[form].median_us
            lines.append(
                {
                    "workload": workload,
                    "form": form,
                    "bytes, us": parts[0],
                    "chain, us": parts[1],
                    "decides": "bytes" if parts[0] > parts[1] else "chain",
                    "predicted us": sum(parts) + fixed_us,
                    "measured us": us,
                    "error %": 100 * ((sum(parts) + fixed_us) / us - 1),
                    "error of bytes alone %": 100 * (parts[0] / us - 1),
                }
            )
    held = pd.DataFrame(lines)
    whole, split = (held[held["form"] == f].set_index("workload") for f in ("fused_chunk", "split_pipeline"))
    order = {c: split[c] / whole[c] for c in ("bytes, us", "predicted us", "measured us")}
    assert (order["bytes, us"] > 4).all()
    assert (order["predicted us"] < 1).all()
    assert (order["measured us"] < 1).all()
    fused_forms = held[held["form"].str.startswith("fused")]
    assert (set(fused_forms["decides"]), set(split["decides"])) == ({"chain"}, {"bytes"})
    off = dict(iter(held.groupby("form", sort=False)["error %"]))
    assert (held["error %"] < 0).all()
    assert off["fused_chunk_c16"].min() > off["fused_chunk_c32"].max() > off["fused_chunk"].max()
    apart = off["fused_chunk"].max() - off["fused_chunk"].min()
    assert apart < off["fused_chunk_c32"].min() - off["fused_chunk"].max()  # far less than chunk lengths differ
    # The same processors with less bandwidth
    h100, flipped = devices.get("h100"), P5[1]
    ours, theirs = (figures.judged_rows(flipped, d.id) for d in (h200, h100))
    assert [*ours] == [*theirs] == [*flipped.workloads]
    for workload, arms in ours.items():
        moved_us = {form: bytes_us(gdn.workload(workload), form) for form in (flipped.control, flipped.candidate)}
        assert 4 < moved_us[flipped.candidate] / moved_us[flipped.control] < 5.1
        for form, us in moved_us.items():
            foretold = arms[form].median_us + us * (h200.bandwidth.base / h100.bandwidth.base - 1)
            assert foretold == pytest.approx(theirs[workload][form].median_us, rel=0.07)
    assert [verdicts.judge_measured(flipped, d.id).verdict.word for d in (h200, h100)] == ["BLOCKED", "NO-GO"]
    assert h100.fact("sms").value == h200.fact("sms").value
    assert h100.fact("sm_clock").value == h200.fact("sm_clock").value
    layers = int(models.get("q36-35b-a3b").facts["gdn_layers"].value)
    ghz = {d.id: d.peak("f32").base / (d.fact("sms").value * 256) / 1e9 for d in (gb10, h200)}
    ITEMS = {"control": "itemm5", "candidate": "itemfla"}
    lines = []
    for npp, problem in ((n, gdn.workload(f"b32_t{n}_hk16_hv32_d128")) for n in (512, 2048)):
        a_token = layers / (problem["batch"] * npp)
        for name, arm, form, chunk in (
            ("M5, fused", "control", "fused_chunk_c16", 16),
            ("FLA, six kernels", "candidate", "split_pipeline", 64),
        ):
            at_2048 = f"lp.p5.gb10.gdn-us-per-tok.{arm}.npp2048.{ITEMS[arm]}"
            us = value(at_2048 if npp == 2048 else f"lp.gate.p5.gdn-npp512.{arm}")
            step_us, fixed_us = fits[form]
            moved = (
                gdn_cost.algorithm_cost(problem, chunk, 4, form == "split_pipeline").bytes / gb10.bandwidth.base * 1e6
            )
            chain = gdn_cost.chain_steps(problem, chunk, problem["D"], int(gb10.fact("sms").value))
            parts = moved, chain * step_us * ghz["h200"] / ghz["gb10"], fixed_us
            lines.append(
                {
                    "npp": npp,
                    "form": name,
                    "bytes, us": parts[0] * a_token,
                    "chain, us": parts[1] * a_token,
                    "predicted us": sum(parts) * a_token,
                    "recorded us": us,
                    "error %": 100 * (sum(parts) * a_token / us - 1),
                    "error of bytes alone %": 100 * (moved * a_token / us - 1),
                }
            )
    there = pd.DataFrame(lines)
    M5, FLA = (there[there["form"] == name].set_index("npp") for name in ("M5, fused", "FLA, six kernels"))
    ratio = {c: FLA[c] / M5[c] for c in ("bytes, us", "predicted us", "recorded us")}
    assert (M5["chain, us"] / M5["predicted us"]).between(0.4, 0.6).all()
    assert (FLA["bytes, us"] > 10 * FLA["chain, us"]).all()
    assert (ratio["predicted us"] / ratio["recorded us"]).between(0.8, 1.2).all()
    assert (there["error %"] < -70).all()
    found = {
        w: r for w, r in figures.judged_rows(P5[2], h200.id).items() if {"fused_chunk_c16", "fused_chunk"} <= r.keys()
    }
    slower = [r["fused_chunk_c16"].median_us / r["fused_chunk"].median_us for r in found.values()]
    assert min(slower, default=2) > 1  # the words below
    # 4. P6 on the H200
    found = figures.judged_rows(P6[0], h200.id)
    us = {w: {arm: row.median_us for arm, row in rows.items()} for w, rows in found.items()}
    if len(us) == len(P6[0].workloads):
        {w: 100 * (1 - arms["cuda_fp8"] / arms["cuda_bf16"]) for w, arms in us.items()}
        short, long = (us[f"ctx{ctx}_b1_hq24_hkv4_d256"] for ctx in (8192, 32768))
        fixed = [short[arm] - (long[arm] - short[arm]) / 3 for arm in ("cuda_bf16", "cuda_fp8")]  # 32768 is 4 x 8192
        assert 0.9 < fixed[0] / fixed[1] < 1.1  # the part that half the bytes do not touch
