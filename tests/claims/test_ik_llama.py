"""The claims of notebooks/ik_llama.py: what its text says of committed figures and rows, held here."""

import pandas as pd

from lab.card import phases, recorded, sweeps
from lab.judge import verdicts


def test_claims():
    # ik_llama: recurrent state that bleeds between sequences
    def value(figure: str) -> float:
        """A recorded figure's number; a figure that its source withdrew is refused."""
        return float(recorded.target(f"ik.{figure}").value)

    # 1. Cross-bleed
    dirty_from = value("cross-bleed.p100.corrupt-min-np.control.itemcliff")
    clean_to = value("cross-bleed.p100.clean-np-max.control")
    stock = {int(value(f"cross-bleed.p100.clean-np.control.np{n}")) for n in (1, 2)}
    batched = {int(value(f"cross-bleed.p100.clean-np.candidate.itemfollow-up.np{n}")) for n in (1, 4, 6, 7)}
    other = int(value("cross-bleed-control.p100.clean-np.control.np4"))
    assert dirty_from == clean_to + 1
    rows = []
    for slots in range(1, 8):
        rows.append(
            {
                "slots": slots,
                "hybrid, unpatched": "clean" if slots in stock else "dirty" if slots >= dirty_from else None,
                "hybrid, batched": "clean" if slots in batched else None,
                "attention only, unpatched": "clean" if slots == other else None,
            }
        )
    bleed = pd.DataFrame(rows)
    assert list(bleed["hybrid, unpatched"]) == ["clean"] * 2 + ["dirty"] * 5
    assert bleed["hybrid, batched"].notna().sum() == 4
    low, high = (value(f"cross-bleed.p100.decode.candidate.np1.{bound}") for bound in ("boundlo", "boundhi"))
    assert low < high
    # 2. Several tokens per sequence
    rows = []
    for device, candidate, reference in (
        ("p100", "batched-multi-seq.p100.ppl.candidate", "batched-multi-seq.p100.ppl.reference--2"),
        ("cpu", "batched-multi-seq.cpu.ppl.candidate", "batched-multi-seq.cpu.ppl.reference"),
    ):
        four, one = value(candidate), value(reference)
        chunks = int(value(f"batched-multi-seq.{device}.ppl-chunks.candidate"))
        # Written out: four digits hide a difference in the last of them.
        rows.append(
            {
                "device": device,
                "chunks": chunks,
                "four sequences": f"{four:.4f}",
                "one": f"{one:.4f}",
                "difference": f"{four - one:+.4f}",
            }
        )
    perplexity = pd.DataFrame(rows)
    assert list(perplexity.difference) == ["+0.0000", "+0.0001"]
    # 3. What one sequence pays
    SWEEP = "ik.sweep-main-vs-pr.2x-rtx-3090"
    METRICS = {"prefill": "prefill_tps", "decode": "decode_tps"}
    ARMS = {"control": "main", "candidate": "batched path"}
    curve = {
        (name, arm): sweeps.from_figures(
            [f for i, f in recorded.figures().items() if i.startswith(f"{SWEEP}.{name}.{arm}.n-kv")],
            "n_kv",
            METRICS[name],
            label,
        )
        for name in METRICS
        for arm, label in ARMS.items()
    }
    over = {n: sweeps.ratio(curve[n, "candidate"], curve[n, "control"], label=f"{n}, batched / main") for n in METRICS}
    assert all(len(c.xs) == 16 for c in (*curve.values(), *over.values()))
    table = pd.DataFrame(
        {
            "depth": [int(x) for x in curve["decode", "control"].xs],
            **{f"{n} {label}": curve[n, arm].ys for n in METRICS for arm, label in ARMS.items()},
            **{f"{n} change %": [100 * (y - 1) for y in over[n].ys] for n in METRICS},
        }
    )
    changes = {n: table[f"{n} change %"] for n in METRICS}
    said = {n: value(f"sweep-main-vs-pr.2x-rtx-3090.{n}-delta.candidate") for n in METRICS}
    assert all((c < 0).all() for c in changes.values())
    assert (changes["decode"] < -2).all()
    assert abs(changes["decode"].mean() - said["decode"]) < 1
    above = int((changes["prefill"] > -2).sum())
    # The same machine's raw file stops early; what it has is what was recorded.
    raw = sweeps.series(
        sweeps.select(system="ik_llama.cpp", tool="llama-sweep-bench"), "depth", "decode_tps", label="raw file"
    )
    assert all(y == curve["decode", "candidate"].at(x) for x, y in zip(raw.xs, raw.ys, strict=True))
    reverse = 100 * (1 / (1 + changes["decode"] / 100)).mean() - 100
    assert above == 0
    assert round(reverse) == -said["decode"]
    rows = []
    for build, arm in (("main", "control"), ("pr-before", "candidate"), ("pr-fast-path", "candidate")):
        row = {"build": build}
        for name in METRICS:
            now = value(f"single-seq-fast-path.cpu.{name}.{arm}.ctx2048.build{build}")
            main = value(f"single-seq-fast-path.cpu.{name}.control.ctx2048.buildmain")
            row |= {f"{name} tok/s": now, f"{name} against main %": 100 * (now / main - 1)}
        rows.append(row)
    cpu = pd.DataFrame(rows)
    before, after = cpu["decode against main %"][1], cpu["decode against main %"][2]
    assert round(-before) == value("single-seq-fast-path.cpu.decode-hit.candidate.buildpr-before")
    assert -2 < after < 0
    left = value("review-open.2x-rtx-3090.decode-delta.candidate")
    assert said["decode"] < left < -2
    # 5. The board
    mine = [c for c in phases.cards().values() if c.system == "ik_llama"]
    board = verdicts.judge_recorded(mine)
    assert len(board) == sum(v.system == "ik_llama" for v in recorded.verdicts().values())
    differing = [j for j in board if not j.agrees]
    assert all(j.differs for j in differing)
