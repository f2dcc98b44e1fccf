"""The claims of notebooks/imp.py: what its text says of committed figures and rows, held here."""

import pandas as pd
from msgspec import structs

from lab import value
from lab.base import devices, models
from lab.card import gate, phases, recorded, sweeps
from lab.judge import rules, verdicts
from lab.place import roofline
from lab.trace import breakdowns


def test_claims():
    # imp on an RTX 5090: baselines, and a gate for CUDA graphs
    DEVICE = devices.get("rtx-5090")
    CARDS = [card for card in phases.cards().values() if card.system == "imp"]
    JUDGED = {j.recorded_id: j for j in verdicts.judge_recorded(CARDS)}
    # The verdicts
    assert len(JUDGED) == sum(v.system == "imp" for v in recorded.verdicts().values())
    differ = [j for j in JUDGED.values() if not j.agrees]
    assert {j.recorded_id for j in differ} == {"imp.v.graphs-gate"}
    # IM1. A baseline of milliseconds
    stored_ms = recorded.figure("imp.parser-fix.rtx-5090.parsed-field-wrong.control")
    printed = recorded.figure("imp.parser-fix.rtx-5090.parsed-field-right.candidate")
    tokens = int(printed.params["pp"])
    from_time = tokens / (float(stored_ms.value) / 1e3)
    assert stored_ms.unit == "ms"
    assert abs(from_time / float(printed.value) - 1) < 0.005 / float(stored_ms.value)  # within the printed digits
    factor = float(printed.value) / float(stored_ms.value)
    assert 400 < factor < 500
    asked = gate.Gate(require=(gate.Condition("prefill_tps", ">", "tok/s", 0.0),))
    right = gate.Reading("tok/s", candidate=float(printed.value))
    slips = (structs.replace(right, candidate=float(stored_ms.value), unit="ms"), structs.replace(right, unit=""))
    slipped, unlabelled = (rules.judge(asked, {("prefill_tps", ""): reading}) for reading in slips)
    assert (slipped.word, unlabelled.word) == ("INVALID", "BLOCKED")
    # IM2. A line inside the healthy band
    PEAK = "imp.gate.baseline-on-peak-day"
    pin, low, high = (value(f"{PEAK}.{part}") for part in ("decode.ntg128.control", "healthy.lo", "healthy.hi"))
    allowed = value("imp.verify-fast.rtx-5090.tg128-tolerance.candidate")
    line = pin * (1 - allowed / 100)
    highest_pin = low / (1 - allowed / 100)
    assert low < line < high
    assert highest_pin < pin
    PINS = "files/imp/perf_baseline_north_star.json"
    pinned = sweeps.select(source=PINS, metric="prefill_tps")
    clean = sweeps.series([r for r in pinned if not r.status], "n_prompt", "prefill_tps", "cache off")
    with_cache = [r for r in pinned if r.status.startswith("contaminated")]
    cached = sweeps.series(with_cache, "n_prompt", "prefill_tps", "cache on")
    over = sweeps.ratio(cached, clean, "cache on / cache off")
    most = round(1 / (1 - value("imp.verify-fast.rtx-5090.pp512-tolerance.candidate") / 100), 3)
    assert min(over.ys) > most  # at each length the honest figure would have failed against the contaminated pin
    # IM3. One ratio for every model
    ratio = "imp.graphs-gate.rtx-5090.graphs-on-off-ratio.candidate"
    WIDER = "imp.wider-bench.rtx-5090.tg128.candidate.graphson"
    SUFFIXES = {"": "", "--2": "--3", "--3": "--4", "--4": "--2"}  # the two tables list the models in another order
    old, new, _fallback = (
        value(f"imp.graphs-gate.rtx-5090.{i}")
        for i in ("graphs-ratio-gate.control", "graphs-ratio-gate.candidate", "fallback-ratio.control")
    )
    rows = []
    for suffix, wider in SUFFIXES.items():
        of, on = recorded.figure(ratio + suffix), recorded.figure(WIDER + wider)
        assert of.model == on.model
        hidden_ms = 1e3 * (float(of.value) - 1) / float(on.value)
        rows.append([of.model, of.value, float(of.value) >= old, float(of.value) >= new, on.value, hidden_ms])
    names = [
        "model",
        "on / off",
        f"passes {old}",
        f"passes {new}",
        "tok/s, graphs on",
        "host ms a token that graphs hide",
    ]
    table = pd.DataFrame(rows, columns=names).sort_values("on / off", ascending=False)
    assert list(table["model"][~table[f"passes {new}"]]) == ["Qwen3-8B-Q8_0"]
    old_verdict, new_verdict = JUDGED["imp.v.graphs-gate-1.5"], JUDGED["imp.v.graphs-gate"]
    assert old_verdict.verdict.word == new_verdict.verdict.word == "NO-GO"
    assert "at qwen3-8b: fired" in new_verdict.verdict.reason
    # The roofline behind the baselines
    weights = models.get("qwen3-8b").fact("weight_bytes")
    smallest = min(weights.values, key=lambda v: v.value)
    weight_bytes = smallest.value * 2**20
    peak = DEVICE.bandwidth.base
    most = 1e6 / roofline.place(DEVICE, 1.0, weight_bytes, "bf16").floor_us
    CLAIMS = {
        "baseline before the refresh": "imp.baseline-refresh.rtx-5090.tg128.control",
        "baseline after the refresh": "imp.baseline-refresh.rtx-5090.tg128.candidate",
        "published row, later replaced": "imp.readme-refresh.rtx-5090.decode.control--2",
        "the same row measured again": "imp.readme-refresh.rtx-5090.decode.candidate--2",
        "pin of the current gate": "imp.gate.ci-gate.decode.ntg128.control",
    }
    reads = pd.DataFrame(
        [
            {
                "figure": words,
                "tok/s": value(i),
                "GB/s if all weights are read": value(i) * weight_bytes / 1e9,
                "of the card": f"{value(i) * weight_bytes / peak:.0%}",
            }
            for words, i in CLAIMS.items()
        ]
    )
    above = reads[reads["tok/s"] > most]
    nvfp4 = [r for r in breakdowns.rows("imp_qwen35_4b_gdn_W2_ng_before") if "nvfp4" in r.kernel_name]
    assert set(above.figure) == {"published row, later replaced", "pin of the current gate"}
    assert nvfp4
    BOARD = "imp.scoreboard.{}.gemma-3-12b.tg128"
    absurd, later = (recorded.figure(BOARD.format(day)) for day in ("2026-05-28", "2026-07-12"))
    size = recorded.figure("imp.scoreboard.gemma-3-12b.weights")
    asked = float(absurd.value) * float(size.value) / 1e3
    assert asked > 5 * peak / 1e12
    assert float(later.value) * float(size.value) * 1e9 < peak
    marked = sweeps.select(source="files/imp/scoreboard.tsv", where=lambda r: r.status == "impossible")
    assert [r["decode_tps"] for r in marked] == [absurd.value]
    # IM4. What an API profile promises and what a step gives
    FP32 = "imp.fp32-down-buf.rtx-5090"
    _calls_k, api_s, steps = (
        value(f"{FP32}.{i}")
        for i in ("cudamalloc-calls.control.graphsoff", "cudamalloc-api-time.control.graphsoff", "run-steps.control")
    )
    before, after = (value(f"{FP32}.tg128.{arm}.itemcommit.graphsoff") for arm in ("control", "candidate"))
    step_ms, gained_ms, promised_ms = 1e3 / before, 1e3 / before - 1e3 / after, 1e3 * api_s / steps
    assert promised_ms > step_ms > gained_ms
    # IM5. Fusing small projections
    share = value("imp.alpha-beta-fusion.rtx-5090.share.control.bucketgdn-fp16-projections") / 100
    part = 1 / value("imp.alpha-beta-fusion.rtx-5090.launches-recovered-denominator.candidate")
    arms = [value(f"imp.alpha-beta-fusion.rtx-5090.decode.{arm}") for arm in ("control", "candidate")]
    gain = arms[1] / arms[0] - 1
    ceiling = 1 / (1 - share) - 1
    packed = JUDGED["imp.v.alpha-beta-fusion"]
    assert 0 < gain < ceiling * part
    assert [v.word for _, v in packed.claims] == ["NEUTRAL"]
    FUSIONS = [
        "imp.v.alpha-beta-fusion",
        "imp.v.alpha-beta-fusion-q8",
        "imp.v.gdn-gemv-fusion",
        "imp.v.four-way-fusion",
    ]
    assert [JUDGED[i].verdict.word for i in FUSIONS] == ["GO", "VACUOUS", "BLOCKED", "BLOCKED"]
    # IM6. Published figures, measured again
    refreshed = phases.card("im6-refresh")
    lines = {c.workload: c.threshold for c in refreshed.gate.require}
    rows = []
    for (metric, workload), reading in refreshed.recorded[0].evidence.items():
        change = 100 * (reading.candidate / reading.control - 1)
        stands = "yes" if change >= lines[workload] else "no"
        rows.append([workload, metric, reading.control, reading.candidate, change, stands])
    again = pd.DataFrame(rows, columns=["model", "metric", "published", "again", "change %", "stands"])
    fell = again[again.stands == "no"]
    assert len(fell) == 2
    assert JUDGED["imp.v.readme-refresh"].verdict.word == "PARTIAL"
    headline = recorded.figure("imp.readme-refresh.rtx-5090.speedup-vs-llama-cpp.control")
    row = again[again.model == "qwen3-8b"].iloc[0]
    assert headline.withdrawn
    gated = value(CLAIMS["pin of the current gate"])
    assert gated > row["published"]
