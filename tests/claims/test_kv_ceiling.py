"""The claims of notebooks/kv_ceiling.py: what its text says of committed figures and rows, held here."""

import pandas as pd

from lab import value
from lab.base import devices, models
from lab.card import phases, recorded
from lab.card.gate import Reading
from lab.judge import decode_step, verdicts
from lab.row import store


def test_claims():
    # An fp8 KV cache: what a whole decode step can gain, and what fits
    MODELS = {"dense": models.get("q36-27b"), "moe": models.get("q36-35b-a3b")}
    DEVICES = {"gb10": (devices.get("gb10"), "fp4"), "h200": (devices.get("h200"), "bf16")}  # the pipe weights run on
    H200 = DEVICES["h200"][0]
    CONTEXTS, SEQUENCES = (256, 512, 1024, 4096, 8192, 32768), (1, 8, 32, 128)
    BYTES = {"bf16": 2.0, "fp8": 1.0, "Q8_0": 34 / 32}
    SAVED = {name: 1 - b / BYTES["bf16"] for name, b in BYTES.items()}
    STEP, ROOM = (phases.card(i) for i in ("p6-step", "p6-room"))
    GATE = recorded.figure("lp.gate.p6.threshold.decode").value
    # 1. The ceiling from bytes alone
    assert decode_step.cached_bytes(MODELS["dense"]) == MODELS["dense"].fact("kv_bytes_per_token").base

    def by_floors(device: str, model: str, sequences: int, context: int, saved: float = SAVED["fp8"]) -> float:
        """The ceiling in % by floors."""
        where, pipe = DEVICES[device]
        of = decode_step.parts(MODELS[model], sequences, context, pipe=pipe)
        return decode_step.ceiling_pct(decode_step.floors(where, of), saved)

    table = pd.DataFrame(
        [
            {"device": d, "model": m, "sequences": n, **{f"ctx {c:,}": by_floors(d, m, n, c) for c in CONTEXTS}}
            for d in DEVICES
            for m in MODELS
            for n in SEQUENCES
        ]
    )
    both = table.set_index(["device", "model", "sequences"])
    apart = (both.loc["h200"] / both.loc["gb10"] - 1).abs().max(axis=1)
    assert apart.drop(("dense", 128)).max() < 1e-9  # every part waits for memory on both: bandwidth cancels
    assert apart["dense", 128] > 0.05
    assert not both.loc["h200"].loc[(slice(None), slice(None)), ["ctx 256", "ctx 512"]].gt(GATE).any().any()
    # 2. Beside what was recorded on GB10
    POINTS = [(m, ctx, npl) for ctx, npl in ((512, 128), (4096, 8), (8192, 8)) for m in MODELS]
    lines = []
    for m, ctx, npl in POINTS:
        times = decode_step.floors(DEVICES["gb10"][0], decode_step.parts(MODELS[m], npl, ctx, pipe="fp4"))
        key = f"{m}-ctx{ctx}-npl{npl}"
        step_ms = value(f"lp.gate.p6.step-{key}") / 1e3
        lines.append(
            {
                "model": m,
                "context": ctx,
                "sequences": npl,
                "step, recorded ms": step_ms,
                "step, floor ms": decode_step.total_us(times) / 1e3,
                "ceiling, recorded %": value(f"lp.gate.p6.ceiling-{key}"),
                "ceiling, by floors %": decode_step.ceiling_pct(times, 0.5),
            }
        )
    against = pd.DataFrame(lines)
    ratio = against["ceiling, by floors %"] / against["ceiling, recorded %"]
    assert ratio.between(0.75, 1.25).all(), ratio
    assert (against["step, floor ms"] < against["step, recorded ms"]).all()
    prior = pd.DataFrame(
        [
            {
                "context": c,
                "by hand %": value(f"lp.p6-analytical.gb10.decode-saving-max.candidate.ctx{c}"),
                **{f"by floors, {n} sequences %": by_floors("gb10", "moe", n, c) for n in (8, 32, 128)},
            }
            for c in (256, 1024, 2048, 4096, 8192)
        ]
    )
    assert (prior["by hand %"] > prior["by floors, 8 sequences %"]).all()
    assert (prior["by hand %"] < prior["by floors, 128 sequences %"]).all()
    proxy = {
        "dense": value("lp.p6.gb10.decode-delta.candidate.ctx8192.kvq8-0"),
        "moe": value("lp.p6.gb10.decode-delta.candidate.ctx8192.kvq8-0--2"),
    }
    promised = {m: by_floors("gb10", m, 8, 8192, SAVED["Q8_0"]) for m in MODELS}
    assert all(proxy[m] < promised[m] / 10 for m in MODELS)
    # 3. A step summed from measured kernels, H200
    rows = store.rows(device="h200")

    def newest(chosen: list[dict]) -> list[dict]:
        """Of each kernel and workload the row of the newest run."""
        return list({(r.name, r.workload_id): r for r in sorted(chosen, key=lambda r: r.run)}.values())

    def kernels(*precisions: str) -> list[dict]:
        """Rows that are ok and whose precision is one of these, without those of a prefill."""
        good = [r for r in rows if r.status == "ok" and r.precision in precisions]
        return newest([r for r in good if r.workload.get("op", "decode") == "decode"])

    FORMS = {"bf16": ("bf16",), "fp8": ("fp8-kv", "fp8-kv-unit")}
    UNPAGED = {"torch_sdpa", "contiguous_bf16", "in_order_bf16", "cuda_contiguous_bf16"}
    cached = {
        form: [r for r in kernels(*precisions) if r.workload.get("page") == 16 and r.name not in UNPAGED]
        for form, precisions in FORMS.items()
    }
    recurrent = [r for r in kernels("f32") if "batch" in r.workload and "ctx" not in r.workload]
    products = [r for r in kernels("nvfp4-w4a16", "nvfp4-w4a16-rounded") if "M" in r.workload]

    def summed(model: str, sequences: int, context: int, form: str) -> tuple[decode_step.Time, ...]:
        """The parts of a step on the H200 with the cache in `form`."""
        of = decode_step.parts(MODELS[model], sequences, context, BYTES[form])
        return decode_step.from_rows(H200, of, {"attention": cached[form], "state": recurrent, "weights": products})

    cells = [tuple(w.replace("x", "-").split("-")) for w in STEP.workloads]
    lines, readings = [], {}
    for workload, (m, ctx, npl) in zip(STEP.workloads, cells, strict=True):
        before, after = (summed(m, int(npl), int(ctx), form) for form in ("bf16", "fp8"))
        ceiling = decode_step.ceiling_pct(before, SAVED["fp8"])
        rates = [1e6 * int(npl) / decode_step.total_us(t) for t in (before, after)]
        gain = 100 * (rates[1] / rates[0] - 1)
        readings["decode_saving_max", workload] = Reading("%", candidate=ceiling, kind="modelled")
        readings["decode_tps", workload] = Reading("tok/s", control=rates[0], candidate=rates[1], kind="modelled")
        parts_ms = {f"{t.part} ms": t.us / 1e3 for t in before}
        lines.append(
            {
                "workload": workload,
                **parts_ms,
                "share %": 100 * decode_step.share(before),
                "ceiling %": ceiling,
                "ceiling by floors %": by_floors("h200", m, int(npl), int(ctx)),
                "fp8 attention ms": after[0].us / 1e3,
                "gain %": gain,
                "attention from": before[0].basis.split("_hq")[0],
                "fp8 from": after[0].basis.split("_hq")[0],
            }
        )
    steps = pd.DataFrame(lines)
    floor_steps = {
        w: decode_step.total_us(decode_step.floors(H200, decode_step.parts(MODELS[m], int(npl), int(ctx))))
        for w, (m, ctx, npl) in zip(STEP.workloads, cells, strict=True)
    }
    total = steps["attention ms"] + steps["state ms"] + steps["weights ms"]
    assert (1e3 * total > list(floor_steps.values())).all()  # no sum of kernels beats the sum of their floors
    judged = verdicts.judgement(STEP, readings, "modelled", "h200", None)
    gains = steps.set_index("workload")["gain %"]
    passed = [w for w in STEP.workloads if gains[w] > GATE and readings["decode_saving_max", w].candidate > GATE]
    assert judged.verdict.word == ("CONDITIONAL-GO" if len(passed) == len(gains) else "PARTIAL" if passed else "NO-GO")
    assert judged.verdict.word != "GO"  # a sum of kernels is no measured step
    assert not set(passed) & {"dense-256x128", "moe-256x128"}
    eaten = steps.set_index("workload")
    borrowed = [w for w in STEP.workloads if not eaten.loc[w, "fp8 from"].startswith(("cuda_", "splitkv_"))]
    assert set(gains[gains < 0].index) <= set(borrowed)  # no kernel of ours makes a step longer
    # 4. Room
    MEMORY = 0.9 * H200.fact("vram").base
    lines, fits = [], {}
    for workload in ROOM.workloads:
        m, ctx = workload.split("-ctx")
        found = {n: decode_step.room(MODELS[m], MEMORY, 32, int(ctx), b) for n, b in BYTES.items()}
        fits["sequences_fit", workload] = Reading(
            "requests", control=found["bf16"].sequences, candidate=found["fp8"].sequences, kind="modelled"
        )
        lines.append(
            {
                "workload": workload,
                **{f"sequences, {n}": r.sequences for n, r in found.items()},
                "more with fp8 %": 100 * (found["fp8"].sequences / found["bf16"].sequences - 1),
                **{f"M tokens beside 32, {n}": r.tokens / 1e6 for n, r in found.items()},
            }
        )
    fitting = pd.DataFrame(lines)
    doubled = fitting["M tokens beside 32, fp8"] / fitting["M tokens beside 32, bf16"]
    assert doubled.between(1.999, 2.001).all()  # tokens double; sequences do not, because each brings its state
    assert (fitting["more with fp8 %"] < 101).all()
    assert (
        fitting["more with fp8 %"]
        .groupby(fitting.workload.str.split("-").str[0])
        .apply(lambda x: x.is_monotonic_increasing)
        .all()
    )
    room = verdicts.judgement(ROOM, fits, "modelled", "h200", None)
    assert room.verdict.word == "PARTIAL"
