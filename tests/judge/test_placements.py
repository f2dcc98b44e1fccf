"""What an interval over placements decides: the judge on readings of several placements, beside those of one."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lab.base import devices, interval
from lab.card import phases
from lab.card.gate import Condition, Gate, Reading
from lab.judge import evidence, verdicts
from lab.judge.rules import Verdict, judge
from lab.row import samples, store
from lab.row.records import Clocks, Measurement
from lab.study import repeats
from tests.judge import test_evidence
from tests.judge.test_evidence import H200
from tests.judge.test_rules import FULL, change, with_
from tests.loops import numbered, over
from tests.row.made import measurement

ZERO, FIVE = (Gate(require=(change("kernel_us", op, line),)) for op, line in (("<", 0), ("<=", -5)))


def reading(low: float, high: float, **more: Any) -> Reading:
    """Eight placements whose change lies in the middle of its interval, from a control of 1000 us."""
    middle = (low + high) / 2
    numbers = {"change_pct": middle, "interval_pct": (low, high), "repeats": 8, "placements": 8}
    return Reading("us", control=1000, candidate=1000 + 10 * middle, **numbers | more)  # type: ignore[arg-type]


def held(gate: Gate, found: Reading) -> Verdict:
    return judge(gate, {("kernel_us", ""): found})


@over(
    numbered(
        [
            (FIVE, -6.5, -5.1, "GO"),
            (FIVE, -6.5, -4.9, "BLOCKED"),
            (FIVE, -5.1, -3.5, "BLOCKED"),
            (FIVE, -4.9, -3.5, "NO-GO"),
            (ZERO, -3.5, -1.5, "GO"),
            (ZERO, -2.5, -1.4, "NEUTRAL"),  # within the declared floor, whatever the interval says
            (ZERO, -1.9, 1.9, "NEUTRAL"),
            (ZERO, -2.1, 2.0, "BLOCKED"),  # too wide to tell whether the effect lies within the floor
            (ZERO, -4.5, 0.1, "BLOCKED"),
            (ZERO, 2.1, 3.5, "NO-GO"),
        ]
    )
)
def test_the_interval_decides(gate: Gate, low: float, high: float, word: str) -> None:
    assert held(gate, reading(low, high)).word == word


@given(st.floats(-30, 30), st.floats(0, 10), st.sampled_from(["<", "<=", ">", ">="]), st.floats(-20, 20))
def test_neither_word_without_the_whole_interval(middle: float, reach: float, op: Any, line: float) -> None:
    low, high = middle - reach, middle + reach
    word = held(Gate(require=(change("kernel_us", op, line),)), reading(low, high)).word
    if op in (">", ">="):
        low, high, line = -high, -low, -line
    assert word != "GO" or high < line
    assert word != "NO-GO" or low > line


def test_what_is_in_the_interval_is_not_asked_for_twice() -> None:
    """The control's deviation and the A/A floor are of blocks of one placement; pairs remove what they share."""
    noisy = {"control_sd_pct": 5.0, "noise_pct": 15.0}
    assert held(ZERO, reading(-3.5, -2.9, **noisy)).word == "GO"
    assert held(ZERO, reading(-3.5, -2.9, **noisy, placements=1)).word == "NEUTRAL"


def test_a_reading_says_what_its_interval_is_over() -> None:
    assert "96 % interval -3.50 to -1.50 % over 8 placements" in held(ZERO, reading(-3.5, -1.5)).reason
    one = held(ZERO, reading(-3.5, -1.5, placements=1))
    assert "-3.50 to -1.50 % for one placement" in one.reason
    imported = held(ZERO, reading(-3.5, -1.5, placements=0))
    assert "placement" not in imported.reason
    overs = [v.findings[0].seen.over for v in (held(ZERO, reading(-3, -2)), one, imported) if v.findings[0].seen]
    assert overs == ["8 placements", "one placement", ""]


def test_undecided_says_how_many_placements_would_decide() -> None:
    # The interval reaches 1 and the line is 0.5 away: four times the placements halve it.
    assert "about 24 more placements would decide it" in held(FIVE, reading(-6.5, -4.5)).reason
    assert "measured over placements it may be decided" in held(FIVE, reading(-6.5, -4.5, placements=1)).reason
    assert "about 24 more placements would decide it" in held(ZERO, reading(-4.5, 3.5)).reason
    # 0.15 away takes 348 more: nobody takes so many placements, and blocks are cheap.
    never = "no number of placements that anybody takes would decide it"
    assert never in held(FIVE, reading(-6.15, -4.15)).reason
    assert "about 348 more blocks would decide it" in held(FIVE, reading(-6.15, -4.15, placements=0)).reason


@over(
    numbered(
        [
            (-4.0, -3.0, "NO-GO"),  # fired
            (-4.5, 0.5, "NEUTRAL"),  # nobody can tell
            (-6.5, 0.5, "NEUTRAL"),  # beyond the floor in the middle, across the line at one end
            (-2.5, 0.5, "NEUTRAL"),
            (-1.9, 1.5, "GO"),  # within the declared floor it does not count
            (1.0, 3.0, "GO"),
        ]
    )
)
def test_a_kill_is_held_by_its_interval(low: float, high: float, word: str) -> None:
    kill = Reading("%", change_pct=(low + high) / 2, interval_pct=(low, high), repeats=8, placements=8)
    assert judge(FULL, with_(aggregate_tps=kill)).word == word


def test_rows_that_are_not_settled_decide_nothing() -> None:
    found = held(FIVE, reading(-30, -29, unsettled="the candidate was throttled (power)"))
    assert (found.word, found.findings[0].state) == ("BLOCKED", "unsettled")
    assert "the candidate was throttled (power)" in found.reason


def test_workloads_against_each_other_bring_both_intervals() -> None:
    gate = Gate(require=(replace(change("kernel_us", "<", 0, "long"), against="short"),))

    def word(short_us: tuple[float, float], long_us: tuple[float, float], **more: Any) -> Verdict:
        pair = {
            ("kernel_us", w): Reading(
                "us", 1, math.sqrt(us[0] * us[1]), interval=us, repeats=8, **{"placements": 8, **more}
            )
            for w, us in (("short", short_us), ("long", long_us))
        }
        return judge(gate, pair)

    quiet, noisy = (99.9, 100.1), (95.0, 105.3)
    assert word(quiet, (96.4, 96.6)).word == "GO"
    assert word(noisy, (96.4, 96.6)).word == word(quiet, (92.0, 101.2)).word == "BLOCKED"
    found = word((98.0, 100 / 0.98), (96.0, 96.0 / 0.96)).findings[0].seen
    assert found
    # sqrt(96 x 100) = 97.98 against 100: the distances of the ends add in quadrature on logarithms.
    reach = math.hypot(math.log(0.98), math.log(0.96) / 2)
    assert found.interval == pytest.approx([100 * (0.97980 * math.exp(side * reach) - 1) for side in (-1, 1)], abs=1e-3)
    assert word(quiet, (96.4, 96.6), placements=1).findings[0].seen.interval  # type: ignore[union-attr]
    assert word(quiet, (96.4, 96.6), placements=0).findings[0].seen.interval is None  # type: ignore[union-attr]


def test_a_time_over_placements() -> None:
    gate = Gate(require=(Condition("kernel_us", "<=", "us", 16),))
    near = Reading("us", candidate=15.9, interval=(15.7, 16.1), repeats=8, placements=8)
    found = judge(gate, {("kernel_us", ""): near})
    assert found.word == "BLOCKED"
    assert "96 % interval 15.7 to 16.1 us over 8 placements" in found.reason
    assert "placement" in found.reason


# From rows ------------------------------------------------------------------------------------------------------------

SPREAD = (0.0, 0.01, -0.01, 0.005, -0.005, 0.02, -0.02, 0.0)
BLOCKS = 3


def placed(arm: str, us: float, spread: Sequence[float] = SPREAD, **more: Any) -> Measurement:
    """A row over placements that differ by `spread`, the control with a second self that has none."""
    taken = [us * math.exp(x) for x in spread for _ in range(2 * BLOCKS)]
    again = {"again_samples": samples.encode([us] * len(taken))} if arm == "control" else {}
    shape = {"placements": len(spread), "processes": 2, "shape": (len(spread), BLOCKS, 2)}
    base = {"workload_id": "a", "relative_error": 1e-3, "flops": 1e6, "bytes": 2**20, "pipe": "bf16", "l2": "cold"}
    return measurement(**base | {"arm": arm, "samples": samples.encode(taken)} | again | shape | more)


def test_two_workloads_that_a_gate_compares_were_measured_on_one_gpu() -> None:
    gate = Gate(require=(replace(change("kernel_us", "<", 0, "b"), against="a"),))

    def said(**more: Any) -> Verdict:
        rows = [
            placed(arm, us, workload_id=workload, **(more if workload == "b" else {}))
            for workload, us in (("a", 10.0), ("b", 9.0))
            for arm in ("control", "candidate")
        ]
        return judge(gate, evidence.readings(rows, H200))

    assert said().word == "GO"
    found = said(gpu_id="another")
    assert found.word == "BLOCKED"
    assert "its two workloads were measured on" in found.reason
    assert "another" in found.reason


STILL = (0.0,) * 8
FASTER = Gate(require=(Condition("kernel_us", "<", "%", 0, "change", "a"),))


def read(*rows: Measurement) -> Reading:
    return evidence.readings(rows, H200)["kernel_us", "a"]


def test_rows_over_placements_are_read_with_their_interval() -> None:
    found = read(placed("control", 1000.0, STILL), placed("candidate", 900.0))
    expected = interval.of_arm([[900 * math.exp(x)] for x in SPREAD])
    assert (found.placements, found.repeats, found.unsettled) == (8, 8, "")
    assert (found.control_sd_pct, found.noise_pct) == (None, None)
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert found.interval_pct == pytest.approx((expected.low / 10 - 100, expected.high / 10 - 100))
    assert found.change_pct == pytest.approx(-10)


@over(numbered([(arm,) for arm in ("control", "candidate")]))
def test_the_noise_of_either_arm_widens_the_interval(arm: str) -> None:
    quiet = read(placed("control", 1000.0, STILL), placed("candidate", 900.0, STILL)).interval_pct
    noisy = (placed(a, us, SPREAD if a == arm else STILL) for a, us in (("control", 1000.0), ("candidate", 900.0)))
    low, high = read(*noisy).interval_pct or (0, 0)
    assert quiet == pytest.approx((-10, -10))
    assert high - low > 0.5


def test_a_share_of_the_roofline_has_the_interval_of_its_time() -> None:
    rows = [placed("control", 1000.0, STILL), placed("candidate", 900.0)]
    share, us = evidence.readings(rows, H200)["roofline_fraction", "a"], read(*rows).interval
    assert share.candidate
    assert us
    assert share.interval == pytest.approx((share.candidate * 900 / us[1], share.candidate * 900 / us[0]))
    assert share.placements == 8


@over(
    numbered(
        [
            ({"throttled": "software power cap"}, "software power cap"),
            ({"clock_pct": 5.5}, "5.5 %"),
            ({"processes": 1}, "processes 1 of 2"),
            ({"spread": SPREAD[:7]}, "placements 7 of 8"),
            ({"spread": [0.05 * i for i in range(8)]}, "drift"),
            ({"spread": (*SPREAD, 0.0)}, "no pairs"),
        ]
    )
)
def test_what_is_not_settled_is_blocked_in_either_arm(more: dict[str, Any], said: str) -> None:
    for bad in ("control", "candidate"):
        rows = [
            placed(arm, us, **more if arm == bad else {}) for arm, us in (("control", 1000.0), ("candidate", 800.0))
        ]
        found = judge(FASTER, evidence.readings(rows, H200))
        assert (found.word, found.findings[0].state) == ("BLOCKED", "unsettled")
        assert said in found.reason
    sound: dict[str, Any] = {"clock_pct": 5.0, "converged": False}  # of the sampling within a placement
    rows = [placed(arm, us, **sound) for arm, us in (("control", 1000.0), ("candidate", 800.0))]
    assert judge(FASTER, evidence.readings(rows, H200)).word == "GO"


def test_a_clock_of_the_gpu_that_is_held_down_settles_nothing_of_the_gpu_and_leaves_the_hosts_time_alone() -> None:
    for timer, said in (("graph", "software power cap"), ("host", "")):
        arms = [placed(arm, 20.0, throttled="software power cap", timer=timer) for arm in ("control", "candidate")]
        found = evidence.unsettled(arms[0], arms[1])
        assert said in found
        assert bool(found) == bool(said)


CAP = "software power cap"


def capped(lowest_mhz: int, **more: Any) -> dict[str, Any]:
    """What a row holds that was taken under a power cap; an H200's highest clock is 1,980 MHz."""
    clocks = tuple(Clocks("nvml", mhz, 3201, CAP * (mhz < 1980)) for mhz in (1980, lowest_mhz))
    return {"throttled": CAP, "clocks": clocks} | more


def test_under_a_power_cap_an_interval_is_wider_by_what_the_cap_can_have_cost() -> None:
    """1,800 of 1,980 MHz: either arm took 10 % longer at most, and its own time may be that much less."""
    for arms in (("control", "candidate"), ("control",), ("candidate",)):
        rows = [placed(arm, us, STILL, **capped(1800) if arm in arms else {})
                for arm, us in (("control", 1000.0), ("candidate", 800.0))]  # fmt: skip
        found = read(*rows)
        assert found.change_pct == pytest.approx(-20)
        assert found.interval_pct == pytest.approx((100 * (0.8 / 1.1 - 1), 100 * (0.8 * 1.1 - 1)))
        assert found.interval == pytest.approx((800 / 1.1, 800))
        assert (found.unsettled, "10.0 % wider for a software power cap" in found.slowed) == ("", True)
        share = evidence.readings(rows, H200)["roofline_fraction", "a"]
        assert share.interval == pytest.approx((share.candidate, 1.1 * (share.candidate or 0)))
    rested = read(*(placed(arm, us, STILL) for arm, us in (("control", 1000.0), ("candidate", 800.0))))
    assert rested.interval_pct == pytest.approx((-20, -20))
    assert rested.slowed == ""


def test_a_cap_costs_each_block_what_its_own_clock_says() -> None:
    """One placement of eight at 1,800 MHz, the others free: by block the interval is as wide as that one makes it."""
    held = [1800 if placement == 3 else 1980 for placement in range(8) for _ in range(BLOCKS)]
    rows = [
        placed(arm, us, STILL, **capped(1800), block_mhz=tuple(held))
        for arm, us in (("control", 1000.0), ("candidate", 800.0))
    ]
    found, each = read(*rows), [math.log(1.1) * (placement == 3) for placement in range(8)]
    middle = statistics.fmean(each)
    reach = interval.quantile(interval.PLACEMENT_LEVEL, 7) * statistics.stdev(each) / math.sqrt(8)
    longest = 100 * (0.8 * math.exp(middle + reach) - 1)
    assert found.change_pct == pytest.approx(-20)
    assert found.interval_pct == pytest.approx((100 * (0.8 * math.exp(-middle - reach) - 1), longest))
    assert found.interval == pytest.approx((800 * math.exp(-middle - reach), 800))
    assert longest < 100 * (0.8 * 1.1 - 1)
    assert "1.2 % wider for a software power cap (multiprocessors at 1800 to 1980 of 1980 MHz by block)" in found.slowed
    unread = [replace(row, block_mhz=()) for row in rows]
    assert read(*unread).interval_pct == pytest.approx((100 * (0.8 / 1.1 - 1), 100 * (0.8 * 1.1 - 1)))


@over(numbered([(-15.0, "BLOCKED"), (-11.0, "GO"), (-30.0, "NO-GO")]))
def test_a_power_cap_decides_where_its_cost_cannot(line: float, word: str) -> None:
    """At 1,800 MHz a change of -20 % is anything from -27 to -12 %."""
    gate = Gate(require=(Condition("kernel_us", "<", "%", line, "change", "a"),))
    rows = [placed(arm, us, STILL, **capped(1800)) for arm, us in (("control", 1000.0), ("candidate", 800.0))]
    found = judge(gate, evidence.readings(rows, H200))
    assert found.word == word
    assert "10.0 % wider for a software power cap (multiprocessors at 1800 of 1980 MHz)" in found.reason
    assert ("a longer --rest" in found.reason) == (word == "BLOCKED")


def test_a_cap_whose_cost_nobody_knows_decides_nothing() -> None:
    def said(device: devices.Device = H200, **more: Any) -> str:
        rows = [
            placed(arm, us, STILL, **capped(1800) | more) for arm, us in (("control", 1000.0), ("candidate", 800.0))
        ]
        return evidence.readings(rows, device)["kernel_us", "a"].unsettled

    assert said() == ""
    for found in (
        said(clocks=()),
        said(clocks=(Clocks("nvml", 1800, 3201, CAP), Clocks("nvml", 1800, 2619, CAP))),  # the memory's fell too
        said(clocks=(Clocks("nvml", 0, 3201, CAP),)),
        said(replace(H200, id="", file="", sm_clock=None)),
    ):
        assert "nobody knows from which clock" in found


def test_rows_of_one_placement_keep_their_remarks() -> None:
    """Of schema 1: throttled and not converged, judged as they were, and marked."""
    rows = [
        test_evidence.row(arm, us, blocks_us=[us, us * 1.001, us * 0.999], throttled="power cap", converged=False)
        for arm, us in (("control", 1000.0), ("candidate", 800.0))
    ]
    found = judge(FASTER, evidence.readings(rows, H200))
    assert found.word == "GO"
    assert "one placement" in found.reason


@pytest.mark.parametrize(("us", "word"), [(970.0, "GO"), (985.0, "BLOCKED"), (1050.0, "NO-GO")])
def test_one_placement_decides_no_nearer_than_placements_vary(us: float, word: str) -> None:
    """Blocks of it agree to 0.1 %; the line of 1,000 us is 3 % away, 1.5 %, and 5 % on the other side."""
    rows = [test_evidence.row(arm, us, blocks_us=[us, us * 1.001, us * 0.999]) for arm in ("control", "candidate")]
    gate = Gate(require=(Condition("kernel_us", "<=", "us", 1000, "value", "a"),))
    found = judge(gate, evidence.readings(rows, H200))
    assert found.word == word
    assert ("measured over placements" in found.reason) == (word == "BLOCKED")


def test_how_far_a_placement_may_miss_is_what_the_rows_show() -> None:
    """Standard deviation of the ratio over placements, of an H200's comparisons: 19 in 20 are below half.

    Of those that no cap held: its clock is another in each placement, which `slowed` answers for. And of no eager step,
    which takes as long as the host does.
    """
    found = []
    for card in phases.cards().values():
        for pair in evidence.pairs(store.rows(device="h200", phase=card.id)).values():
            if all(row and row.metric == "kernel_us" and row.own_us and row.placements >= 8 for row in pair):
                control, candidate = (row.blocks for row in pair if row)
                ratios = [
                    statistics.fmean(math.log(y / x) for x, y in zip(a, b, strict=True))
                    for a, b in zip(control, candidate, strict=True)
                ]
                eager = [row.name for row in pair if row] == ["served", "served_replayed"]
                if not eager and not any(row.throttled for row in pair if row):
                    found.append(statistics.stdev(ratios))
    assert len(found) > 100
    assert 0.8 < 2 * sorted(found)[int(0.95 * len(found))] / math.log(evidence.PLACED) <= 1.1


def test_how_far_two_gpus_of_a_model_lie_apart_is_what_the_rows_show() -> None:
    every = [
        pair
        for device in ("h200", "h100")
        for pair in repeats.on_two_gpus(device)
        if all(high - low <= 2 for low, high in zip(pair.low, pair.high, strict=True))
    ]
    apart = sorted(pair.difference_pct for pair in every)
    assert len(apart) > 30
    assert 0.7 < apart[int(0.95 * len(apart))] / (100 * (evidence.GPUS - 1)) <= 1
    assert any(pair.apart for pair in every)  # an interval is of one GPU


@over(numbered([(795.0, -20.0, True), (780.0, -20.0, False), (805.0, -20.0, True), (830.0, -20.0, False)]))
def test_a_verdict_says_where_another_gpu_may_decide_otherwise(us: float, line: float, near: bool) -> None:
    """A change of -20 % is asked of 1,000 us; two GPUs differ by 0.9 %."""
    gate = Gate(require=(Condition("kernel_us", "<=", "%", line, "change", "a"),))
    rows = [placed("control", 1000.0, STILL), placed("candidate", us, STILL)]
    found = judge(gate, evidence.readings(rows, H200))
    assert found.word in ("GO", "NO-GO")
    assert verdicts._near_their_line(found.findings) == ("a" if near else "")
    value = Gate(require=(Condition("kernel_us", "<=", "us", 800.0, "value", "a"),))
    assert verdicts._near_their_line(judge(value, evidence.readings(rows, H200)).findings) == ("a" if near else "")
