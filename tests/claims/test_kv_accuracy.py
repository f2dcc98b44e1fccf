"""The claims of notebooks/kv_accuracy.py: what its text says of committed figures and rows, held here."""

import math
import statistics
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch

from kernels.kv import accuracy_study as study
from kernels.kv import distributions
from lab.card import phases
from lab.card.gate import Reading
from lab.judge import verdicts


@pytest.mark.slow
def test_claims():
    # An fp8 KV cache: where it fails, and what mends it
    CARD = phases.card("p6-accuracy")
    DRAWS = 4
    SPREAD = 2.0  # deviation of the logits over tokens
    HEADS = {h.name: h for h in distributions.HEADS}
    NAMES = [s.name for s in study.STORAGES]
    assert tuple(HEADS) == CARD.workloads
    # 1. The heads
    problems = [distributions.draw_all(seed=seed, spread=SPREAD) for seed in range(DRAWS)]
    first = problems[0]
    lines = []
    for i, head in enumerate(HEADS.values()):
        q, k, v = first.q[i], first.k[i], first.v[i]
        logits = q @ k.T * k.shape[1] ** -0.5
        p = torch.softmax(logits, dim=1)
        lines.append(
            {
                "head": head.name,
                "what it is": head.why,
                "largest K / rms": float(k.abs().max() / k.square().mean().sqrt()),
                "largest V / rms": float(v.abs().max() / v.square().mean().sqrt()),
                "first token %": 100 * float(p[:, 0].mean()),
                "tokens that count": float((1 / p.square().sum(dim=1)).mean()),
                "mean logit": float(logits.mean()),
            }
        )
    shapes = pd.DataFrame(lines).set_index("head", drop=False)
    assert shapes["largest K / rms"]["outlier-channels"] > 1.5 * shapes["largest K / rms"]["plain"]
    assert shapes["first token %"]["sink"] > 60 > shapes["first token %"].drop("sink").max()
    assert shapes["largest V / rms"]["heavy-values"] > 5 * shapes["largest V / rms"]["plain"]
    assert shapes["mean logit"]["constant-offset"] > 10 * abs(shapes["mean logit"]["plain"])
    # 3. Error of the attention output, by head and storage
    found = pd.DataFrame(
        [asdict(e) | {"draw": draw} for draw, p in enumerate(problems) for e in study.study(p, NAMES)]
    ).drop(columns="part")
    nmse = found.pivot_table(index="head", columns="storage", values="nmse").loc[list(HEADS), NAMES]
    predicted = (1 + SPREAD**2) * (0.43 * 2.0**-4) ** 2
    line = CARD.gate.require[0].threshold
    assert math.isclose(line, 2 * predicted, rel_tol=0.02)
    assert 0.7 < nmse.loc["plain", "fp8 head"] / predicted < 1.3
    failing = {s: [h for h in HEADS if nmse.loc[h, s] > line] for s in NAMES}
    offsets = ["constant-offset", "turning-offset"]
    scales = ["fp8 unit", "fp8 tensor", "fp8 head", "fp8 channel", "fp8 page", "fp8 token"]
    assert all(set(offsets) <= set(failing[s]) for s in scales)  # no scale helps where the mantissa is short
    assert failing["fp8 K page-centred"] in ([], ["outlier-channels"])
    assert not failing["bf16"]
    assert "quiet-values" in failing["fp8 tensor"]
    assert "quiet-values" not in failing["fp8 head"]
    assert {"sink", "heavy-values", "plain"}.isdisjoint(h for s in scales for h in failing[s])
    assert nmse.loc["outlier-channels", "fp8 token"] < line < nmse.loc["outlier-channels", "fp8 head"]
    # 4. What it does to the next word
    shown = ["bf16", "fp8 tensor", "fp8 head", "fp8 token", "fp8 K centred", "fp8 K page-centred", "q8_0"]
    kl = found.pivot_table(index="head", columns="storage", values="kl").loc[list(HEADS), shown]
    top1 = 100 * found.pivot_table(index="head", columns="storage", values="top1").loc[list(HEADS), shown]
    assert (kl.loc[offsets, "fp8 head"] > 10 * kl.loc["plain", "fp8 head"]).all()
    assert (kl.loc[offsets, "fp8 K page-centred"] < 2 * kl.loc["plain", "fp8 head"]).all()
    assert (top1["bf16"] > 90).all()
    assert (top1.loc[offsets, "fp8 head"] < 60).all()
    assert (top1.loc[offsets, "fp8 K page-centred"] > 80).all()
    # 5. Is it K or V?
    alone = pd.DataFrame([asdict(e) for e in study.study(first, ["fp8 tensor", "fp8 head", "q8_0"], ("K", "V"))])
    alone["stored"] = alone.storage + ", " + alone.part + " only"
    sides = alone.pivot_table(index="head", columns="stored", values="nmse").loc[list(HEADS)]
    assert (sides.loc[offsets, "fp8 head, K only"] > 50 * sides.loc[offsets, "fp8 head, V only"]).all()
    assert sides.loc["quiet-values", "fp8 tensor, V only"] > 10 * sides.loc["quiet-values", "fp8 tensor, K only"]
    # 6. The mechanism
    turning = list(HEADS).index("turning-offset")
    k = first.k[turning]
    channel = int(k.abs().mean(dim=0).argmax())
    kept = {n: study.BY_NAME[n].keys(first.k)[turning, :, channel] for n in ("fp8 head", "fp8 K page-centred", "q8_0")}
    errors = {n: float((x - k[:, channel]).square().mean().sqrt()) for n, x in kept.items()}
    assert errors["fp8 head"] > 5 * errors["fp8 K page-centred"]
    centred, _paged = "fp8 K centred", "fp8 K page-centred"
    assert nmse.loc[offsets[0], centred] < line < nmse.loc[offsets[1], centred]
    # 7. How large an offset is too large?
    rows = []
    for offset in (0.0, 3.0, 10.0, 30.0, 100.0):
        head = replace(HEADS["turning-offset"], offset=offset)
        drawn = [distributions.draw_all(seed=s, heads=(head,), spread=SPREAD) for s in range(2)]
        effects = [e for p in drawn for e in study.study(p, ("bf16", "fp8 head", "fp8 K page-centred", "q8_0"))]
        means = {s: statistics.fmean(e.nmse for e in effects if e.storage == s) for s in {e.storage for e in effects}}
        rows.append({"offset in the logits": offset, **{s: means[s] for s in NAMES if s in means}})
    by_offset = pd.DataFrame(rows)
    assert by_offset["fp8 head"].iloc[0] < line < by_offset["fp8 head"].iloc[-2]
    rows = []
    for ratio in (1.0, 1e2, 1e4, 1e5):
        pair = (HEADS["plain"], replace(HEADS["plain"], name="loud", value_gain=ratio))
        drawn = distributions.draw_all(seed=0, heads=pair, spread=SPREAD)
        quiet = {e.storage: e.nmse for e in study.study(drawn, ("fp8 tensor", "fp8 head"), ("V",)) if e.head == "plain"}
        rows.append({"loud over quiet head": ratio, **quiet})
    by_ratio = pd.DataFrame(rows)
    assert by_ratio["fp8 tensor"].iloc[1] < 1.3 * by_ratio["fp8 head"].iloc[1]  # e4m3 spans four decades and more
    assert by_ratio["fp8 tensor"].iloc[-1] > 10 * by_ratio["fp8 head"].iloc[-1]
    # 8. The same at D = 256
    wide = [distributions.draw_all(seed=seed, dim=256, spread=SPREAD) for seed in range(2)]
    found_wide = pd.DataFrame([asdict(e) for p in wide for e in study.study(p, shown)])
    nmse_wide = found_wide.pivot_table(index="head", columns="storage", values="nmse").loc[list(HEADS), shown]
    failing_wide = {s: [h for h in HEADS if nmse_wide.loc[h, s] > line] for s in shown}
    for s in ("bf16", "fp8 tensor", "fp8 head"):
        assert failing_wide[s] == failing[s], s
    assert set(failing_wide["fp8 K page-centred"]) <= {"outlier-channels"}
    assert (nmse_wide.loc[offsets, "q8_0"] < 0.7 * nmse.loc[offsets, "q8_0"]).all()
    assert 0.5 < nmse_wide.loc["plain", "fp8 head"] / predicted < 1.3
    # 9. The verdict
    readings = {
        ("nmse", head): Reading("nmse", candidate=float(nmse.loc[head, "fp8 head"]), kind="modelled") for head in HEADS
    }
    judged = verdicts.judgement(CARD, readings, "modelled", CARD.device, None)
    assert judged.verdict.word == "PARTIAL", judged.verdict.reason
