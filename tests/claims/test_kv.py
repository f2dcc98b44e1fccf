"""The claims of notebooks/kv.py: what its text says of committed figures and rows, held here."""

from dataclasses import replace

import pandas as pd

from lab import value
from lab.base import devices, files, models
from lab.card import phases
from lab.check import accuracy, families
from lab.judge import verdicts
from lab.place import roofline
from lab.study import reproduction
from tests.claims.timed import judged_here, timed_as_judged


def test_claims():
    # A quantised KV cache: half the bytes, and what they buy
    families.interpret_on_cpu()  # before the kernels are imported: without a GPU they run in Triton's interpreter
    kv = families.load("kv")
    _gb10, h200 = devices.get("gb10"), devices.get("h200")
    GPU = "cuda" if families.gpu_capability() else "cpu"
    ASKED = [phases.card(i) for i in ("p6", "p6-q8", "p6-kernel")]
    MODELS = {"dense": "q36-27b", "moe": "q36-35b-a3b"}
    CODES = {"fp8-kv": "fp8 e4m3", "q8_0-kv": "Q8_0"}
    # 3. Reference against candidates, live
    CHECKED = [w for w in kv.cases.WORKLOADS if w.role == "check" and w["ctx"] in (75, 500) and w["D"] == 128]
    checks = [accuracy.check(kv, candidate, w, device=GPU) for w in CHECKED for candidate in kv.candidates.values()]
    checks = [c for c in checks if c.status != "skipped"]
    assert len({c.candidate for c in checks}) >= 4
    assert all(c.status == "ok" for c in checks), [c.message for c in checks]
    fp8 = kv.candidate("splitkv_fp8")
    late = replace(fp8, prepare=lambda given: fp8.prepare(given | {"v_cache": given["v_cache"].roll(1, dims=2)}))
    refused = accuracy.check(kv, late, CHECKED[-1], device=GPU)
    assert refused.status == "incorrect", refused
    # 4. What quantising costs, by itself
    base = next(w for w in kv.cases.WORKLOADS if w["ctx"] == 500 and w["D"] == 128 and w["batch"] == 2)

    def grown(gain: float) -> dict:
        """The base problem with the first key channel of every head times `gain` and the query's divided by it."""
        given = kv.cases.inputs(base, 0, "cpu")
        given["k_cache"][..., 0] *= gain
        given["q"][..., 0] /= gain
        return given

    rows = [(gain, *(kv.cases.format_error(base, grown(gain), p).o for p in CODES)) for gain in (1, 4, 16, 64)]
    sweep = pd.DataFrame(rows, columns=["gain", *CODES.values()])
    first, last = sweep.iloc[0], sweep.iloc[-1]
    assert first["Q8_0"] < first["fp8 e4m3"] / 3  # Gaussian: eight bits of integer beat three of mantissa
    assert last["Q8_0"] > last["fp8 e4m3"]  # one channel 64 times larger turns it round
    assert 0.7 < last["fp8 e4m3"] / first["fp8 e4m3"] < 1.5

    # 5. How much of a step is attention?
    def recorded_us(what: str, model: str, ctx: int, npl: int) -> float:
        """ "step" or "attention" of a run, in us; "ceiling" in %."""
        return value(f"lp.gate.p6.{what}-{model}-ctx{ctx}-npl{npl}")

    ours = {r.id: r for r in reproduction.reproduce() if r.id.startswith(("kv-prior", "kv-measured"))}
    assert all(r.agrees and r.expected == "agrees" for r in ours.values())
    cases = {c["id"]: c["arguments"] for c in files.read_toml(reproduction.FILE)["case"]}
    prior = {k: cases["kv-prior-ctx8192"][k]["value"] for k in ("attention", "at_ctx", "rest")}
    moe = ("moe", 8192, 8)
    attention_us = recorded_us("attention", *moe) / moe[2]  # per token, as the prior counts
    rest_us = recorded_us("step", *moe) / moe[2] - attention_us
    grown_us = prior["attention"] * moe[1] / prior["at_ctx"]
    table = []
    for name, a, r in (
        ("the prior", grown_us, prior["rest"]),
        ("with the measured rest", grown_us, rest_us),
        ("with the measured attention", attention_us, prior["rest"]),
        ("with both: the measured ceiling", attention_us, rest_us),
    ):
        table.append((name, a, r, 100 * a / (a + r), 100 * roofline.part_saving_ceiling(a, a + r, 0.5)))
    assert round(table[0][-1], 2) == value("lp.p6-analytical.gb10.decode-saving-max.candidate.ctx8192")
    assert round(table[-1][-1], 2) == recorded_us("ceiling", *moe)
    assert table[0][-1] > 2 * table[-1][-1]
    PROXY = {
        "dense": value("lp.p6.gb10.decode-delta.candidate.ctx8192.kvq8-0"),
        "moe": value("lp.p6.gb10.decode-delta.candidate.ctx8192.kvq8-0--2"),
    }
    eaten = []
    for model, change in PROXY.items():
        step, attention = (recorded_us(what, model, 8192, 8) for what in ("step", "attention"))
        promised, got = attention / 2, step - step / (1 + change / 100)
        eaten.append((model, step, promised, got, 100 * (1 - got / promised)))
    eaten = pd.DataFrame(
        eaten, columns=["model", "step us", "half of attention us", "step got shorter by us", "lost %"]
    )
    assert (eaten["lost %"] > 90).all()
    # 6. Floors and rooflines
    measure = [kv.workload(w) for w in phases.card("p6-kernel").workloads]
    floors = []
    for w in measure:
        for precision in ("bf16", *CODES):
            cost = kv.cost(w, precision)
            f = roofline.place(h200, cost.flops, cost.bytes, cost.pipe)
            floors.append((w.id, precision, cost.bytes / 1e6, f.intensity, f.memory_us, f.compute_us, f.bound))
    assert all(f[-1] == "memory" for f in floors)
    # 8. The verdicts: replayed from the record, and measured here
    replayed = {j.recorded_id: j for j in verdicts.judge_recorded(ASKED)}
    assert all(j.agrees for j in replayed.values())
    assert [j.verdict.word for j in replayed.values()] == ["BLOCKED", "NO-GO", "NO-GO"]
    assert "incomplete" in replayed["lp.v.p6-analytical"].verdict.reason
    assert all(f"{change:+.2f} %" in replayed["lp.v.p6"].verdict.reason for change in PROXY.values())
    if judgement := judged_here("p6-kernel", "h200"):
        timed_as_judged("p6-kernel", judgement)
    # 9. What would change the verdicts
    token = {m: models.get(i).facts for m, i in MODELS.items()}
    sizes = [[f[k].value for k in ("attention_layers", "kv_heads", "head_dim")] for f in token.values()]
    per_token = [roofline.kv_bytes_per_token(*size, 2) / 1024 for size in sizes]
    assert per_token[0] * 1024 == token["dense"]["kv_bytes_per_token"].value
