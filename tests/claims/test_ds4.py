"""The claims of notebooks/ds4.py: what its text says of committed figures and rows, held here."""

import pandas as pd

from lab.base import devices, facts
from lab.card import phases, recorded, sweeps
from lab.judge import verdicts
from lab.write import figures
from tests.claims.timed import judged_here


def test_claims():
    # ds4: paths, pages, graphs and frontiers
    PRO, GB10 = "rtx-pro-6000", "gb10"
    NAMES = {PRO: "PRO 6000", GB10: "GB10"}

    def value(figure: str) -> float:
        """A recorded figure's number; a figure that its source withdrew is refused."""
        return float(recorded.target(f"ds4.{figure}").value)

    def judged(*cards: str) -> dict[str, verdicts.Judgement]:
        """The replayed verdict of each card, by card."""
        return {j.phase: j for j in verdicts.judge_recorded([phases.card(c) for c in cards])}

    # 1. Which path multiplies Q8_0 weights
    PATHS = {"mmq": "candidate", "cublas": "peer-cublas", "warp8": "peer-warp8"}
    speeds = {
        (table, device): {path: value(f"{table}.{device}.prefill.{arm}") for path, arm in PATHS.items()}
        for table in ("q8-strategy-tiers", "q8-mmq-default")
        for device in (PRO, GB10)
    }
    upper, lower = (
        value(f"q8-strategy-tiers.any.tier-{t}.candidate") for t in ("mmq-min-bandwidth", "warp8-max-bandwidth")
    )

    def picked(gb_per_s: float) -> str:
        """The path that the tier table picks at a memory bandwidth in GB/s."""
        return "mmq" if gb_per_s > upper else "warp8" if gb_per_s <= lower else "cublas"

    rows = []
    for (table, device), paths in speeds.items():
        stated = devices.get(device).bandwidth
        picks = {picked(v.value * (1000 if stated.unit == "TB/s" else 1)) for v in stated.values}
        assert len(picks) == 1  # every bandwidth that anybody states falls into one tier
        pick, fastest = picks.pop(), max(paths, key=lambda p: paths[p])
        rows.append(
            {
                "figures of": "the tier table" if table == "q8-strategy-tiers" else "the default",
                "device": NAMES[device],
                **{f"{path} tok/s": v for path, v in paths.items()},
                "tiers pick": pick,
                "fastest": fastest,
                "right": "yes" if pick == fastest else "no",
            }
        )
    policy = pd.DataFrame(rows)
    assert list(policy.right) == ["yes", "yes", "yes", "no"]
    before, after = speeds["q8-strategy-tiers", GB10]["mmq"], speeds["q8-mmq-default", GB10]["mmq"]
    without = value("q8-mmq-default.gb10.prefill.control.buildno-cublas-init")
    restored = value("q8-mmq-default.gb10.prefill.candidate.buildcublas-restored")
    assert (without, restored) == (before, after)
    assert restored / without > 4 > speeds["q8-mmq-default", PRO]["mmq"] / speeds["q8-strategy-tiers", PRO]["mmq"]
    OURS = {"mmq": "triton_mmq", "cublas": "torch_cached", "warp8": "triton_warp_row"}
    h200, q8 = devices.get("h200"), phases.card("q8-paths")
    (pick,) = {picked(v.value * (1000 if h200.bandwidth.unit == "TB/s" else 1)) for v in h200.bandwidth.values}
    rows = []
    for arms in figures.judged_rows(q8, h200.id).values():
        times = {path: arms[name].median_us for path, name in OURS.items() if name in arms}
        fastest = min(times, key=lambda p: times[p])
        rows.append(
            {
                "M": arms[q8.candidate].workload["M"],
                **{f"{path} us": round(times[path], 1) if path in times else None for path in OURS},
                "tiers pick": pick,
                "costs": f"{times[pick] / times[fastest]:.2f}x",
                "fastest": fastest,
                "control against itself %": round(arms[q8.control].aa_pct, 1),
                "run": arms[q8.candidate].run,
            }
        )
    hopper = pd.DataFrame(rows)
    assert pick == "mmq"
    assert list(hopper["fastest"])[1:] == ["cublas"] * 5
    assert rows[0]["fastest"] != "cublas"
    assert 1 / 1.02 < rows[0]["mmq us"] / rows[0]["warp8 us"] < 1.02
    verdict = judged_here(q8.id, h200.id).verdict
    assert verdict.word == "NO-GO"
    # 2. Where the weights lie
    rows = []
    for context in ("ctx2048", "ctx32768"):
        packed, arena = (value(f"vmm-arena.rtx-pro-6000.prefill.{arm}.{context}") for arm in ("control", "candidate"))
        stated = value(f"vmm-arena.rtx-pro-6000.prefill-speedup.candidate.{context}")
        assert round(arena / packed, 2) == stated
        rows.append({"PRO 6000 at": context, "packed tok/s": packed, "arena tok/s": arena, "speed-up": stated})
    chunk, size = (value(f"vmm-bisect.rtx-pro-6000.{name}.candidate") for name in ("prefill", "chunk-size"))
    rows.append(
        {
            "PRO 6000 at": f"one chunk of {size:g} MiB",
            "packed tok/s": rows[0]["packed tok/s"],
            "arena tok/s": chunk,
            "speed-up": chunk / rows[0]["packed tok/s"],
        }
    )
    gb10 = value("vmm-arena.gb10.prefill-delta.candidate.ctx2048-16384")
    assert abs(rows[2]["speed-up"] - 1) < 0.01 > abs(gb10) / 100
    mmq, vmm, both = (
        value(f"{phase}.rtx-pro-6000.prefill-speedup.candidate.item{item}")
        for phase, item in (("mmq", "mmq"), ("vmm-arena", "vmm"), ("headline", "combined"))
    )
    assert (mmq, vmm, both) == (2.93, 2.04, 5.88)
    assert abs(mmq * vmm / both - 1) < 0.02 < 0.05
    usage, cached = (
        value("vmm-chunk-size.rtx-pro-6000.vmm-usage.control"),
        value("vmm-chunk-size.rtx-pro-6000.cached.candidate"),
    )
    allocated, memory = (
        value("vmm-chunk-size.rtx-pro-6000.allocated.candidate"),
        value("vmm-chunk-size.rtx-pro-6000.vram.n-a"),
    )
    assert allocated - cached < 0.02 < memory - allocated < memory < usage
    failures, arena_own, older = (
        value(f"logprob-vectors.n-a.{name}")
        for name in ("failures.candidate", "failures-vmm-arena.candidate", "failures-preexisting.control")
    )
    assert failures == arena_own + older
    # 3. Captured graphs
    rows = []
    for device in (PRO, GB10):
        for context in ("ctx2048", "ctx4096"):
            off = value(f"cuda-graphs.{device}.gen.control.{context}.graphsoff")
            on = value(f"cuda-graphs.{device}.gen.candidate.{context}.graphson")
            stated = recorded.figure(f"ds4.cuda-graphs.{device}.gen.candidate.{context}.graphson").delta_pct
            change = 100 * (on / off - 1)
            assert stated is not None
            assert abs(change - stated) < 0.06
            rows.append(
                {"device": NAMES[device], "context": context, "off tok/s": off, "on tok/s": on, "change %": change}
            )
    graphs = pd.DataFrame(rows)
    floor = phases.card("ds8-graphs").gate.noise.floor_pct
    racing = value("cuda-graphs.unspecified.gen-delta.candidate.itempre-revert-racy")
    assert floor < graphs["change %"].min() < graphs["change %"].max() < racing
    # 4. Frontiers
    ARMS = {PRO: "pro6000_blackwell", GB10: "gb10_spark"}
    table = {device: sweeps.select(system="ds4", arm=arm) for device, arm in ARMS.items()}
    curve = {
        (device, metric): sweeps.series(found, "context", metric, label=NAMES[device])
        for device, found in table.items()
        for metric in ("prefill_tps", "decode_tps", "decode_steady_tps")
    }
    rows = []
    for device in (PRO, GB10):
        for metric, name, places in (("prefill_tps", "prefill", 0), ("decode_steady_tps", "gen", 1)):
            c = curve[device, metric]
            first, last = (value(f"frontier-sweep.{device}.{name}.candidate.ctx{end}") for end in ("2k", "65k"))
            # The source's text cuts its own table's digits off; nothing is off by more than the last place.
            assert abs(c.ys[0] - first) < 10**-places
            assert abs(c.ys[-1] - last) < 10**-places
            steps = [100 * (b / a - 1) for a, b in zip(c.ys, c.ys[1:], strict=False)]
            worst = min(range(len(steps)), key=lambda i: steps[i])
            rows.append(
                {
                    "device": NAMES[device],
                    "figure": metric,
                    "at 2048": c.ys[0],
                    "at 65536": c.ys[-1],
                    "kept %": 100 * c.ys[-1] / c.ys[0],
                    "largest step down %": steps[worst],
                    "from": int(c.xs[worst]),
                }
            )
    frontiers = pd.DataFrame(rows)
    assert all(len(c.xs) == 32 for c in curve.values())
    shares = {m: sweeps.ratio(curve[GB10, m], curve[PRO, m]).ys for m in ("prefill_tps", "decode_steady_tps")}
    slow, fast = devices.get(GB10).bandwidth, devices.get(PRO).bandwidth
    ratios = {v.value: facts.to_base(v.value, slow.unit) / fast.base for v in slow.values}
    low, high = sorted(ratios)
    share = shares["decode_steady_tps"]
    assert ratios[low] < ratios[high] < min(share)
    early = min(v.value for v in fast.values)  # what the source wrote first for the PRO 6000
    crossed = facts.to_base(high, slow.unit) / facts.to_base(early, fast.unit)
    assert min(share) < crossed
    differs = max(
        abs(a / b - 1)
        for d in (PRO, GB10)
        for a, b in zip(curve[d, "decode_tps"].ys, curve[d, "decode_steady_tps"].ys, strict=True)
    )
    assert differs < 0.005
    dips = frontiers[frontiers.figure == "decode_steady_tps"]
    assert (dips["largest step down %"] < -2).all()
    assert frontiers["from"][frontiers["largest step down %"].idxmin()] == 2048
    # 5. Exact speculation
    assert judged("ds7-mtp")["ds7-mtp"].verdict.word == "NEUTRAL"
    # 7. The board
    mine = [c for c in phases.cards().values() if c.system == "ds4"]
    board = verdicts.judge_recorded(mine)
    assert len(board) == sum(v.system == "ds4" for v in recorded.verdicts().values())
    differing = [j for j in board if not j.agrees]
    assert all(j.differs for j in differing)
