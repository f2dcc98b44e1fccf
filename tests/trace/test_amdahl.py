"""Amdahl's law with intervals, what a phase needs, and the speed-up from measured rows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.card import phases
from lab.cli import main
from lab.judge import projection
from lab.row.records import Measurement
from lab.trace import amdahl, breakdowns
from lab.trace.amdahl import Interval, project
from tests.loops import numbered, over
from tests.refused import held, refused
from tests.row.made import measurement
from tests.trace.nsys_synthetic import Export

REMOVED = Interval(math.inf, math.inf, math.inf)
SHARES = st.tuples(st.floats(0, 0.95), st.floats(0, 0.04))
SPEEDS = st.tuples(st.floats(0.2, 50), st.floats(0, 0.1))


def around(pair: tuple[float, float]) -> Interval:
    return Interval(pair[0], pair[0] + pair[1] / 2, pair[0] + pair[1])


# The law --------------------------------------------------------------------------------------------------------------


def test_the_recorded_ceilings_follow() -> None:
    """146 tokens/s: 180 without the state copy (18.9 %), 247 without copy and gather (40.8 %)."""
    base = Interval.of(146)
    copy = project(Interval.of(0.189), REMOVED, base).ceiling_rate
    both = project(Interval.of(0.189 + 0.219), REMOVED, base).ceiling_rate
    assert copy is not None
    assert both is not None
    assert (round(copy.mid), round(both.mid)) == (180, 247)


@over(numbered([(0.5, 2.0, 33.333), (0.1, 1.0, 0.0), (0.25, 0.5, -20.0), (0, 9, 0)]))
def test_gain(share: float, speedup: float, gain: float) -> None:
    assert project(Interval.of(share), Interval.of(speedup)).gain_pct.mid == pytest.approx(gain, abs=1e-3)


@given(SHARES, SPEEDS)
def test_gain_lies_in_its_bounds_and_below_the_ceiling(share: tuple[float, float], speed: tuple[float, float]) -> None:
    p = project(around(share), around(speed))
    assert p.gain_pct.low - 1e-9 <= p.gain_pct.mid <= p.gain_pct.high + 1e-9
    assert p.gain_pct.high <= p.ceiling_pct.high + 1e-9


@given(SHARES, SPEEDS, st.floats(0.01, 1))
def test_a_share_of_less_than_the_wall_promises_less(
    share: tuple[float, float], speed: tuple[float, float], of: float
) -> None:
    whole, part = project(around(share), around(speed)), project(around(share), around(speed), of_wall=of)
    assert abs(part.gain_pct.mid) <= abs(whole.gain_pct.mid) + 1e-9


@given(st.floats(0.01, 0.95), st.floats(0.1, 200))
def test_needed_speedup_gives_what_is_needed(share: float, needed: float) -> None:
    k = amdahl.speedup_needed(share, needed)
    ceiling = project(Interval.of(share), REMOVED).gain_pct.mid
    if k is None:
        assert ceiling <= needed + 1e-6
    else:
        assert project(Interval.of(share), Interval.of(k)).gain_pct.mid == pytest.approx(needed, rel=1e-6)


@over(
    numbered(
        [
            (Interval.of(0.004), REMOVED, 3.0, "cannot"),
            (Interval.of(0.5), Interval.of(1.01), 10.0, "misses"),
            (Interval.of(0.5), Interval(1.1, 1.3, 1.5), 10.0, "may reach"),
            (Interval.of(0.5), Interval.of(2.0, 0.1), 10.0, "reaches"),
        ]
    )
)
def test_against_a_need(share: Interval, speed: Interval, needed: float, word: str) -> None:
    assert amdahl.against(project(share, speed), needed)[0] == word


def test_a_miss_names_the_speedup_that_would_do() -> None:
    _, sentence = amdahl.against(project(Interval.of(0.5), Interval.of(1.01)), 10.0)
    assert "1.22x on the kernel would do" in sentence


@over(
    numbered(
        [
            (Interval.of(1.2), Interval.of(2.0), 1.0, "1.2"),
            (Interval.of(0.1, 0.2), Interval.of(2.0), 1.0, "-0.1"),
            (Interval.of(0.1), Interval.of(0.0), 1.0, "0 to 0"),
            (Interval.of(0.1), Interval.of(2.0), 0.0, "0 of"),
        ]
    )
)
def test_refused(share: Interval, speed: Interval, of_wall: float, value: str) -> None:
    with refused("amdahl", value):
        project(share, speed, None, of_wall)


# With rows and cards ------------------------------------------------------------------------------------------------


def row(arm: str, median: float | None, iqr: float | None, **changes: Any) -> Measurement:
    return measurement(**{"phase": "x", "workload_id": "w", "arm": arm, "median_us": median, "iqr_us": iqr, **changes})


def test_speedup_is_bounded_by_the_quartiles() -> None:
    found = projection.speedup(row("control", 100.0, 4.0), row("candidate", 50.0, 2.0))
    assert (found.low, found.mid, found.high) == pytest.approx((98 / 51, 2.0, 102 / 49))
    with refused("x w", "candidate", "incorrect"):
        projection.speedup(row("control", 1.0, 0.0), row("candidate", None, None, status="incorrect"))


def test_measured_speedup_needs_one_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    card = next(c for c in phases.cards().values() if c.family)
    rows = [
        row(a, m, 0.0, workload_id=w, run="r") for w in ("w1", "w2") for a, m in (("control", 2.0), ("candidate", 1.0))
    ]
    monkeypatch.setattr(projection.store, "refuse_unmeasured", lambda *_: None)
    monkeypatch.setattr(projection.store, "rows", lambda **_: rows)
    with refused(f"profiles/h200/{card.id}", "w1", "w2", remedy="--workload"):
        projection.measured(card.id, "h200")
    assert projection.measured(card.id, "h200", "w2") == ("w2", Interval.of(2.0))


def test_needs_are_the_gates_rises_of_throughput() -> None:
    assert {(n.pct, "decode_tps" in n.condition) for n in projection.needs(phases.card("p6"))} == {(3.0, True)}
    kernel_only = [c for c in phases.cards().values() if c.system == "killgate" and c.family]
    assert [n for c in kernel_only for n in projection.needs(c)] == []


def test_fp8_cache_of_p6_was_never_enough() -> None:
    """Full attention was 0.4 % of this decode step: no attention kernel gives 3 %."""
    b = breakdowns.from_recorded("a2_dense_npl128_eager")
    found = projection.answer(
        "x", projection.share(b, ["attention"]), REMOVED, None, 1.0, projection.needs(phases.card("p6"))
    )
    assert {word for _, word, _ in found.against} == {"cannot"}


def test_share_names_an_unknown_category() -> None:
    with refused("a2_dense_npl128_eager", '"atention"', remedy="attention"):
        projection.share(breakdowns.from_recorded("a2_dense_npl128_eager"), ["atention"])


def test_lab_amdahl(capsys: pytest.CaptureFixture[str]) -> None:
    side = ["amdahl", "a2_dense_npl128_eager", "--category", "memcpy", "--category", "get_rows"]
    assert main.main([*side, "--speedup", "inf", "--base", "146", "--needs", "50"]) == 0
    out = capsys.readouterr().out
    assert "ceiling: 246.6 tok/s" in out
    assert "asked (+50 %): reaches" in out
    assert main.main([*side, "--speedup", "inf", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["projection"]["ceiling_pct"]["mid"] == pytest.approx(68.9, abs=0.1)
    assert found["projection"]["speedup"]["mid"] is None, "infinity is no JSON"


REFUSED: tuple[tuple[list[str], str, tuple[str, ...]], ...] = (
    (["--category", "memcpy"], "lab amdahl", ("--speedup", "--measured")),
    (["--category", "memcpy", "--us", "3"], "lab amdahl", ("a2_dense_npl128_eager", "--category")),
    (["--speedup", "3"], "lab amdahl", ("--kernel",)),
    (["--category", "memcpy", "--speedup", "2", "--needs", "p99"], "data/phases", ('"p99"',)),
    (["--category", "memcpy", "--speedup", "2", "--needs", "p6-kernel"], "p6-kernel.toml", ("throughput", "--needs")),
    (["--category", "memcpy", "--speedup", "-1"], "amdahl", ("-1",)),
    (["--category", "x", "--speedup", "2"], "a2_dense_npl128_eager", ('"x"', "memcpy")),
)


def test_lab_amdahl_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, where, words in REFUSED:
        assert main.main(["amdahl", "a2_dense_npl128_eager", *arguments]) == 2, arguments
        held(capsys.readouterr().err, where, *words)


def test_every_bound_is_of_the_wall() -> None:
    """A share of the busy time becomes one of the wall at both of its ends, and so do the gain and the ceiling."""
    share, speed = Interval(0.2, 0.3, 0.5), Interval.of(2.0)
    part = project(share, speed, of_wall=0.5)
    assert (part.share.low, part.share.mid, part.share.high) == pytest.approx((0.1, 0.15, 0.25))
    whole = project(Interval(0.1, 0.15, 0.25), speed)
    assert part.gain_pct.high == pytest.approx(whole.gain_pct.high)
    assert part.ceiling_pct.high == pytest.approx(100 * (1 / 0.75 - 1))


# Of a profile ---------------------------------------------------------------------------------------------------------

GEMM = "nvjet_tst_64x64"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def answered(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> dict[str, Any]:
    assert main.main(["amdahl", str(path), *arguments, "--json"]) == 0, capsys.readouterr().err
    return dict(json.loads(capsys.readouterr().out))


def test_kernels_that_overlap_in_their_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programmatic launches: each begins before the last one ends, so durations sum to more than the span."""
    export = Export()
    for i in range(10):
        export.kernel(GEMM, i * 1000, i * 1000 + 1080)
    path = export.write(tmp_path / "a.sqlite")
    share = answered(capsys, path, "--category", "dense_gemm", "--speedup", "2")["projection"]["share"]
    assert share == {"low": 1.0, "mid": 1.0, "high": 1.0}


def test_hidden_communication_gains_what_was_exposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """94.6 us hidden behind products and 4.2 exposed of 129: at most its union, at least what is exposed."""
    export = Export()
    export.kernel(GEMM, 0, 124_800)
    export.kernel(NCCL, 30_200, 129_000, streamId=9)
    path = export.write(tmp_path / "a.sqlite")
    found = answered(capsys, path, "--category", "collective", "--speedup", "inf")
    share = found["projection"]["share"]
    assert (share["low"], share["mid"], share["high"]) == pytest.approx((4.2 / 129, 4.2 / 129, 98.8 / 129))
    assert found["projection"]["ceiling_pct"]["mid"] == pytest.approx(3.4, abs=0.05)
    assert "no API calls" in found["denominator"]


def test_a_queue_that_waits_for_the_part_gains_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Launched long before: all of a kernel counts. Launched just in time: the host gives nothing back."""
    for late, low in ((0, 0.5), (1, 0.0)):
        export = Export()
        for i, name in enumerate((GEMM, "splitkv_kernel")):
            at = 19_990 if late and i else i * 10
            export.call("cudaLaunchKernel_v7000", at, at + 5, i + 1)
            export.kernel(name, 10_000 * (i + 1), 10_000 * (i + 2), correlationId=i + 1)
        path = export.write(tmp_path / f"{late}.sqlite")
        found = answered(capsys, path, "--kernel", "nvjet", "--us", "5")
        assert found["projection"]["speedup"]["mid"] == 2.0
        assert found["projection"]["share"]["low"] == pytest.approx(low, abs=0.001), late
        assert found["projection"]["share"]["high"] == 0.5


def test_a_profile_that_hides_work_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = Export(mode="Graph")
    export.kernel(GEMM, 0, 1000)
    export.memory("GRAPH_TRACE", 2000, 9000, graphId=4, graphExecId=4)
    totals = tmp_path / "stats.csv"
    totals.write_text('Time (%),Total Time (ns),Instances,Avg (ns),Name\n100.0,6000,2,3000,"nvjet_tst"\n')
    opaque = export.write(tmp_path / "opaque.sqlite")
    part = ["--category", "dense_gemm", "--speedup", "2"]
    for path, words in ((opaque, "--cuda-graph-trace=node"), (totals, "--wall")):
        assert main.main(["amdahl", str(path), *part]) == 2
        held(capsys.readouterr().err, path.name, words)
    found = answered(capsys, totals, *part, "--wall", "12")
    assert found["projection"]["share"] == {"low": 0.0, "mid": 0.5, "high": 0.5}
    assert found["warnings"], "what the reader says of totals is repeated"
    assert main.main(["amdahl", str(totals), *part, "--wall", "5.9"]) == 2  # the part alone took 6
    held(capsys.readouterr().err, "--wall", "5.9", "6.0")
    for wrong in (["--kernel", "zzz"], ["--kernel", "("], ["--category", "norms"]):
        assert main.main(["amdahl", str(totals), *wrong, "--speedup", "2", "--wall", "12"]) == 2
        held(capsys.readouterr().err, "--kernel" if "--kernel" in wrong else totals.name, wrong[1])
