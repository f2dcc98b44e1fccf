"""The claims of notebooks/staircase.py: what its text says of committed figures and rows, held here."""

from lab import value
from lab.base import devices, facts
from lab.card import phases
from lab.judge import verdicts
from lab.study import staircase


def test_claims():
    # The staircase: three patches between a third and most of vLLM's decode
    dense, moe = staircase.staircase("dense"), staircase.staircase("moe")
    # 1. The steps
    for stairs in (dense, moe):
        assert [s.patch for s in stairs.steps] == ["0018", "0019", "0020"]
        assert all(step.gain > 1.02 for step in stairs.steps), "each step clears the noise floor of 2 %"
    for step in dense.steps:  # the shares that the source prints, to its digits
        for stated, tps in zip(step.stated, (step.before, step.after), strict=True):
            assert abs(dense.share_pct(tps) - float(stated.value)) < 0.5, stated.id
            assert f"{float(stated.value):.1f}" == f"{dense.share_pct(tps):.1f}" or float(stated.value).is_integer()
    # 2. Where the time was: the step before the first patch
    A2 = "lp.a2-phase2-decompose.gb10"
    copies, gathers = (value(f"{A2}.share.control.bucket{b}.npl128") for b in ("d2d-state-copy", "get-rows"))
    base = value(f"{A2}.decode-agg.control.npl128.itemceiling-base")
    ceilings = {
        "without copies": (base / (1 - copies / 100), f"{A2}.decode-agg.candidate.npl128.item-copy"),
        "without copies and gathers": (
            base / (1 - (copies + gathers) / 100),
            f"{A2}.decode-agg.candidate.npl128.item-copy-and-gather",
        ),
    }
    for name, (ours, figure) in ceilings.items():
        assert abs(ours - value(figure)) <= 1, f"{name}: {ours:.1f} against {value(figure)}"
    delivered = [dense.steps[0].after, dense.steps[1].after]
    pairs = zip(delivered, ceilings.values(), strict=True)
    assert all(1 <= got / value(figure) < 1.05 for got, (_, figure) in pairs)
    target = [
        value(f"lp.lever1-ssm-out-2d.gb10.decode-share-of-vllm-target.candidate.npl128.bound{b}") for b in ("lo", "hi")
    ]
    reached = dense.share_pct(dense.steps[2].after)
    assert reached > target[1] > target[0]
    # 3. The copies on the roofline
    moved_gb = value("lp.decode-parity-explore.gb10.dtod-bytes-removed.candidate.npl128")
    step_ms = 1000 * dense.npl / dense.steps[0].before
    bandwidth = devices.get("gb10").bandwidth
    floors = []
    for stated in bandwidth.values:
        floor_ms = 2 * moved_gb * 1e9 / facts.to_base(stated.value, bandwidth.unit) * 1000
        floors.append(
            {
                "bandwidth": f"{stated.value:g} {bandwidth.unit}",
                "floor of the copies, ms": floor_ms,
                "share of the step, %": 100 * floor_ms / step_ms,
                "share in the trace, %": copies,
            }
        )
    assert all(f["share of the step, %"] < copies for f in floors), "a copy cannot be faster than the memory"
    # 4. What each patch took away
    GONE = [
        ("0018", "share of device-to-device copies, %", "lp.patch-0018.gb10.share.{}.bucketd2d-memcpy"),
        ("0019", "share of the state gather, %", "lp.patch-0019.gb10.share.{}.bucketk-get-rows-float"),
        ("0020", "output projection, ms/call", "lp.lever1-ssm-out-2d.gb10.o-proj-cost.{}"),
    ]
    gone = [
        {
            "patch": patch,
            "bucket": what,
            "before": value(figure.format("control")),
            "after": value(figure.format("candidate")),
        }
        for patch, what, figure in GONE
    ]
    assert all(row["after"] < row["before"] / 5 for row in gone)
    judged = {j.phase: j for j in verdicts.judge_recorded([phases.card(i) for i in ("lp8", "lp9", "lp10", "lp11")])}
    assert {judged[i].verdict.word for i in ("lp9", "lp10", "lp11")} == {"GO"}
    assert judged["lp8"].verdict.word == "NO-GO"
    # 5. What no step explains
    table = [
        {
            "model": s.name,
            "last over first": s.total,
            "product of the steps": s.explained,
            "unexplained %": 100 * (s.total / s.explained - 1),
            "largest gap between two steps %": max(s.between_pct),
        }
        for s in (dense, moe)
    ]
    for stairs in (dense, moe):
        product = 1.0
        for gap in stairs.between_pct:
            product *= 1 + gap / 100
        assert abs(product - stairs.total / stairs.explained) < 1e-9
    assert table[1]["unexplained %"] > table[0]["unexplained %"] > 2
    # 6. What is left to vLLM
    left = {s.name: s.share_pct(s.steps[-1].after) for s in (dense, moe)}
    assert all(80 < share < 100 for share in left.values())
    # The same steps on an H200
    many, one, mixture = staircase.measured()
    gains = {series.name: [series.gain(patch) for patch in ("0018", "0019", "0020")] for series in (many, one, mixture)}
    assert min(gains[many.name]) > 1.1
    assert min(gains[mixture.name]) > 1.2
    assert max(gains[many.name]) == gains[many.name][2] > 2
    assert max(gains[mixture.name]) == gains[mixture.name][2]
    assert max(gains[one.name]) < 1.03
    assert min(series.gain("graphs") for series in (many, one, mixture)) > 2
