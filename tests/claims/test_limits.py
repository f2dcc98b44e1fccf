"""The claims of notebooks/limits.py: what its text says of committed figures and rows, held here."""

import pandas as pd

from kernels.nvfp4 import route
from lab.base import devices
from lab.bench import counters
from lab.card import phases
from lab.check import families
from lab.place import roofline
from lab.row import store
from lab.row.records import Measurement
from lab.study import routes
from lab.write import figures, notebook
from tests.claims.timed import judged_here


def test_claims():
    # How far from the limit?
    DEVICE = devices.get("h200")
    LIMITS = [card for card in phases.cards().values() if card.id.endswith("-limit") or card.id == "w4a16-decode"]
    assert len(LIMITS) >= 5

    def newest(card: phases.Card) -> dict[str, list[Measurement]]:
        """workload -> rows of the newest run in which the candidate is ok."""
        found: dict[str, dict[str, list[Measurement]]] = {}
        for row in store.rows(DEVICE.id, card.id):
            found.setdefault(row.workload_id, {}).setdefault(row.run, []).append(row)
        kept = {}
        for workload, runs in found.items():
            good = [r for r, rows in runs.items() if any(x.name == card.candidate and x.status == "ok" for x in rows)]
            if good:
                kept[workload] = runs[max(good)]
        return kept

    def line(card: phases.Card, workload: str, rows: list[Measurement]) -> dict:
        """One workload: ours, the fastest other arm, the target of the gate, the floor."""
        ok = {r.name: r for r in rows if r.status == "ok"}
        ours = ok[card.candidate]
        own = set(families.load(card.family).candidates) - set(families.load(card.family).peers) - {"torch_bf16"}
        # What a user could run instead: libraries' arms, beside a 16-bit cache those of 16 bits alone.
        same = {"bf16"} if ours.precision == "bf16" else {r.precision for r in rows}
        rivals = {n: r.median_us for n, r in ok.items() if n not in own and r.precision in same}
        best = min(rivals, key=lambda n: rivals[n]) if rivals else ""
        floor = roofline.place(DEVICE, ours.flops, ours.bytes, ours.pipe)
        asked = [c for c in card.gate.require if c.workload == workload]
        target = ""
        for c in asked:
            target = f"{c.threshold:g} us" if c.unit == "us" else f"{c.threshold:+g} % of {card.control}"
        return {
            "workload": workload,
            "ours us": round(ours.median_us, 2),
            "best rival": best,
            "rival us": round(rivals[best], 2) if best else None,
            "rival / ours": round(rivals[best] / ours.median_us, 2) if best else None,
            "target": target,
            "floor us": round(floor.floor_us, 2),
            "of floor": f"{roofline.roofline_fraction(floor.floor_us, ours.median_us):.0%}",
            "throttled": ours.throttled,
            "kernel": notebook.former(ours) or "same launch",
            "commit": (ours.stated_commit or ours.commit)[:7],
        }

    tables = {card.id: pd.DataFrame([line(card, w, r) for w, r in newest(card).items()]) for card in LIMITS}
    judged = {card.id: judged_here(card.id, DEVICE.id) for card in LIMITS}
    assert all((table["ours us"] > table["floor us"]).all() for table in tables.values() if len(table))
    decode = tables["w4a16-decode"].set_index("workload")["ours us"]
    lines = phases.card("w4a16-decode").gate.require
    assert {c.unit for c in lines} == {"us"}
    assert len(lines) == 8
    assert all(decode[c.workload] <= c.threshold for c in lines)
    ARMS = {"W4A16": "cuda_gemm", "fast": "cuda_w4a8", "promoted": "cuda_w4a8_promoted"}
    priced = []
    for workload, arms in figures.judged_rows(phases.card("w4a8-prefill-limit"), DEVICE.id).items():
        held = {
            title: value
            for label, name in ARMS.items()
            for title, value in (
                (f"{label} us", round(arms[name].median_us, 1)),
                (f"{label} error %", round(100 * arms[name].relative_error, 2)),
            )
        }
        priced.append({"workload": workload, **held, "run": arms["cuda_w4a8"].run})
    pairs = pd.DataFrame(priced)
    positive = pairs["workload"].str.endswith("positive")
    assert (pairs["promoted error %"][positive] < 1).all()
    assert (pairs["fast error %"][positive & pairs["workload"].str.startswith("m512")] > 5).all()
    assert (abs(pairs["fast error %"] / pairs["promoted error %"] - 1)[~positive] < 0.02).all()

    # What stands in the way
    def missed(card: phases.Card) -> list[str]:
        """The workloads whose gate condition does not hold on the rows shown above."""
        findings = judged[card.id].verdict.findings if judged[card.id] else ()
        return [f.condition.workload for f in findings if f.role == "require" and f.state in ("fails", "noise")]

    seen = counters.newest(DEVICE.id)
    lines = []
    for card in LIMITS:
        for workload in missed(card):
            for row in seen.get((card.candidate, workload), []):
                lines.append(
                    {
                        "card": card.id,
                        "workload": workload,
                        "kernel": row.kernel.split("(")[0].removeprefix("void "),
                        "bound by the counters": counters.bound(row),
                        "DRAM MB": round((row.dram_read_bytes + row.dram_write_bytes) / 1e6, 1),
                        "compulsory MB": round(row.bytes / 1e6, 1),
                        "SM clock MHz": round(row.sm_clock_hz / 1e6),
                    }
                )
    assert all(line["DRAM MB"] > 0 for line in lines)
    # Which kernel where
    rows = []
    known: dict[tuple[str, bool], routes.Table] = {}
    chosen: dict[tuple[str, str, int], str] = {}  # family, shape and place on the axis -> what the router takes unasked
    for family, rounded in (("nvfp4", False), ("nvfp4", True), ("gdn", False), ("q8", False)):
        table = routes.competing(routes.table(family, DEVICE.id), tuple(route.ROUNDED) if rounded else ())
        known[family, rounded] = table
        last = ("", "")
        for entry in routes.crossovers(table):
            shape = " ".join(f"{a}={v}" for a, v in entry.shape.items())
            place, best = (family, shape, entry.at), entry.best
            turned = last[0] == shape and last[1] != best
            last = (shape, best)
            if rounded and chosen[place] == best:
                continue
            if not rounded:
                chosen[place] = best
            rows.append(
                {
                    "family": f"{family}, rounded" if rounded else family,
                    "shape": shape,
                    "at": f"{table.axis}={entry.at}",
                    "fastest": best,
                    "crossover": "here" if turned else "",
                    "us": ("~" if best in entry.fitted else "") + f"{entry.times_us[best]:.1f}",
                    "worst": entry.worst,
                    "costs": f"{entry.cost_of_worst:.2f}x",
                }
            )
    # From 9 tokens on cuda_gemm streams both operands where SMs have enough of them, which 5120 x 6144 lacks.
    assert [chosen["nvfp4", "K=17408 N=5120", m] for m in (8, 9, 16, 32)] == ["cuda_decode", *3 * ["cuda_gemm"]]
    assert [chosen["nvfp4", "K=5120 N=17408", m] for m in (8, 16, 24, 32)] == ["cuda_decode", *3 * ["cuda_gemm"]]
    assert [chosen["nvfp4", "K=6144 N=5120", m] for m in (8, 16, 24, 32)] == [*3 * ["cuda_decode"], "cuda_gemm"]
    assert len({chosen["nvfp4", "K=2048 N=4096", m] for m in (8, 2048)}) == 2  # there is something to see
