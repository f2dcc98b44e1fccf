"""The judge, word by word: what each verdict word means, in exact examples.

All start from one gate with a condition of every role that holds, and change one reading, so that an example shows what
that reading alone decides. What holds for every gate is in test_gates_properties.py.
"""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lab.card.gate import ROLES, Condition, Evidence, Gate, Noise, Reading
from lab.judge.rules import WORDS, judge
from tests.loops import numbered, over

Key = tuple[str, str]


def change(metric: str, op: Any, threshold: float, workload: str = "") -> Condition:
    return Condition(metric, op, "%", threshold, "change", workload)


def tps(control: float, candidate: float, **more: object) -> Reading:
    return Reading("tok/s", control=control, candidate=candidate, **more)  # type: ignore[arg-type]


# A GO and what takes it away ------------------------------------------------------------------------------------------

# One condition of each role, all holding: the place from which the examples start.
FULL = Gate(
    correctness=(Condition("nmse", "<=", "nmse", 1e-3),),
    complete=(Condition("runs_complete", ">=", "runs", 60),),
    engaged=(Condition("engagements", ">", "launches", 0),),
    kill=(change("aggregate_tps", "<", 0),),
    require=(change("decode_tps", ">", 5),),
)

HOLDING: dict[Key, Reading] = {
    ("nmse", ""): Reading("nmse", candidate=1e-6, ids=("n",)),
    ("runs_complete", ""): Reading("runs", candidate=60, ids=("r",)),
    ("engagements", ""): Reading("launches", candidate=12, ids=("e",)),
    ("aggregate_tps", ""): tps(100, 108, ids=("a",)),
    ("decode_tps", ""): tps(100, 110, ids=("d",)),
}


def with_(**readings: Reading) -> Evidence:
    return {**HOLDING, **{(metric, ""): reading for metric, reading in readings.items()}}


def test_go() -> None:
    verdict = judge(FULL, HOLDING)
    assert verdict.word == "GO"
    assert verdict.reason == "decode_tps +10.00 % (100 -> 110 tok/s), gate decode_tps change > 5 %: holds"
    assert verdict.decisive[0].ids == ("d",)
    assert [f.role for f in verdict.findings] == list(ROLES)


WORSE: list[tuple[str, str, Reading]] = [
    ("INVALID", "nmse", Reading("nmse", candidate=1e-2)),
    ("INVALID", "decode_tps", tps(100, 110, withdrawn="stale")),
    ("INVALID", "decode_tps", tps(100, 110, impossible="faster than the datasheet allows")),
    ("INVALID", "decode_tps", Reading("ms", control=100, candidate=110)),
    ("INVALID", "decode_tps", Reading("ms and tok/s", control=100, candidate=110)),
    ("INVALID", "decode_tps", tps(100, math.nan)),
    ("INVALID", "decode_tps", tps(math.inf, 110)),
    ("INVALID", "decode_tps", tps(0, 110)),
    ("INVALID", "decode_tps", tps(-100, 110)),
    ("INVALID", "decode_tps", tps(100, 110, control_sd_pct=math.nan)),
    ("BLOCKED", "runs_complete", Reading("runs", candidate=30)),
    ("BLOCKED", "decode_tps", Reading("", control=100, candidate=110)),
    ("BLOCKED", "decode_tps", Reading("tok/s", candidate=110)),
    ("BLOCKED", "decode_tps", Reading("tok/s", control=100)),
    ("BLOCKED", "engagements", Reading("launches")),
    ("VACUOUS", "engagements", Reading("launches", candidate=0)),
    ("NO-GO", "aggregate_tps", tps(100, 90)),
    ("NO-GO", "decode_tps", tps(100, 104)),
    ("NO-GO", "decode_tps", tps(100, 90)),
    ("NEUTRAL", "decode_tps", tps(100, 110, control_sd_pct=4)),
    ("NEUTRAL", "decode_tps", tps(100, 110, noise_pct=11)),
    ("NEUTRAL", "aggregate_tps", tps(100, 95, noise_pct=20)),
    ("CONDITIONAL-GO", "decode_tps", tps(100, 110, kind="predicted")),
    ("CONDITIONAL-GO", "decode_tps", tps(100, 110, kind="modelled")),
]


@over(numbered(WORSE))
def test_one_reading_decides(word: str, metric: str, reading: Reading) -> None:
    verdict = judge(FULL, with_(**{metric: reading}))
    assert verdict.word == word
    assert metric in verdict.reason or reading.impossible
    assert verdict.decisive


def test_each_word_has_an_example() -> None:
    partial = {"PARTIAL", "GO"}  # test_workloads_decide and test_go
    assert {word for word, _, _ in WORSE} | partial == set(WORDS)


@over(numbered([(role,) for role in ["correctness", "complete", "engaged"]]))
def test_noise_excuses_only_what_is_weighed(role: str) -> None:
    gate = Gate(**{role: (change("kl", "<=", 0),)}, require=FULL.require)  # type: ignore[arg-type]
    worse = with_(kl=Reading("kld", control=0.1, candidate=0.11, noise_pct=50))
    assert judge(gate, worse).word == {"correctness": "INVALID", "complete": "BLOCKED", "engaged": "VACUOUS"}[role]


def test_precedence() -> None:
    """Everything wrong at once; mending the first leaves the next."""
    evidence = dict(
        with_(
            nmse=Reading("nmse", candidate=1),
            runs_complete=Reading("runs", candidate=3),
            engagements=Reading("launches", candidate=0),
            aggregate_tps=tps(100, 50),
            decode_tps=tps(100, 101),
        )
    )
    words = []
    for metric in ("nmse", "runs_complete", "engagements", "aggregate_tps", "decode_tps"):
        verdict = judge(FULL, evidence)
        words.append(verdict.word)
        assert metric in verdict.reason, words
        evidence[metric, ""] = HOLDING[metric, ""]
    assert [*words, judge(FULL, evidence).word] == ["INVALID", "BLOCKED", "VACUOUS", "NO-GO", "NO-GO", "GO"]


# Thresholds and the noise floor ---------------------------------------------------------------------------------------

FLOORS = [
    # op, threshold, change, verdict: the default floor is 2 %
    (">", 5, 5.1, "GO"),
    (">", 5, 4.9, "NO-GO"),
    (">", 0, 2.1, "GO"),
    (">", 0, 1.9, "NEUTRAL"),
    (">", 0, -1.9, "NEUTRAL"),
    (">", 0, -2.1, "NO-GO"),
    (">", 1, 1.5, "NEUTRAL"),
    (">=", -1, -0.5, "GO"),
    (">=", -1, -1.5, "NEUTRAL"),
    (">=", -1, -2.5, "NO-GO"),
    (">=", -5, -4.9, "GO"),
    (">=", -5, -5.1, "NO-GO"),
    ("<", 0, -2.1, "GO"),
    ("<", 0, 1.9, "NEUTRAL"),
    ("<", -10, -9.9, "NO-GO"),
    ("<=", -10, -10, "GO"),
    ("<=", 1, 0.5, "GO"),
    ("<=", 1, 2.5, "NO-GO"),
]


@over(numbered([(*case0, printed) for case0 in FLOORS for printed in [True, False]]))
def test_floor(op: Any, threshold: float, percent: float, word: str, printed: bool) -> None:
    both = tps(1000, 1000 + 10 * percent)
    reading = Reading("%", change_pct=percent) if printed else both
    assert judge(Gate(require=(change("decode_tps", op, threshold),)), {("decode_tps", ""): reading}).word == word


def test_floor_is_the_largest_of_its_three() -> None:
    gate = Gate(require=(change("decode_tps", ">", 0),))

    def word(rule: Noise, **more: float) -> str:
        return judge(replace(gate, noise=rule), {("decode_tps", ""): tps(100, 106, **more)}).word

    usual = Noise()
    assert word(usual) == word(usual, control_sd_pct=1.9) == word(usual, noise_pct=5.9) == word(Noise(5.9)) == "GO"
    assert word(usual, control_sd_pct=2.1) == word(usual, noise_pct=6.1) == word(Noise(6.1)) == "NEUTRAL"
    assert word(Noise(sigmas=2), control_sd_pct=2.1) == "GO"


KILLS = [
    # change of the killed metric, its noise, verdict of a gate that otherwise holds
    (5.0, 0.0, "GO"),
    (-3.3, 0.0, "NO-GO"),
    (-3.3, 21.0, "NEUTRAL"),  # it may have fired: nobody can tell
    (-1.0, 0.0, "GO"),  # inside the declared floor a kill does not count
    (1.0, 21.0, "GO"),
]


@over(numbered(KILLS))
def test_kill(percent: float, noise: float, word: str) -> None:
    assert judge(FULL, with_(aggregate_tps=Reading("%", change_pct=percent, noise_pct=noise))).word == word


@over(
    numbered(
        [
            ((10, 10), "GO"),
            ((10, 0), "PARTIAL"),
            ((10, -10), "PARTIAL"),
            ((0, 0), "NEUTRAL"),
            ((0, -10), "NO-GO"),
            ((-10, -10), "NO-GO"),
        ]
    )
)
def test_workloads_decide(changes: tuple[float, float], word: str) -> None:
    gate = Gate(require=tuple(change("decode_tps", ">", 0, w) for w in "ab"))
    evidence = {("decode_tps", w): Reading("%", change_pct=c) for w, c in zip("ab", changes, strict=True)}
    assert judge(gate, evidence).word == word
    overall = replace(gate, require=(*gate.require, Condition("kl", "<=", "kld", 0.1)))
    assert judge(overall, {**evidence, ("kl", ""): Reading("kld", candidate=0.2)}).word == "NO-GO"


@over(
    numbered(
        [
            (Reading("us/tok (unit not stated)", candidate=200.0), "GO"),
            (Reading("us/tok (unit not stated)", candidate=63.0), "NO-GO"),
            (Reading("us/tok", candidate=200.0), "INVALID"),
            (Reading("", candidate=200.0), "BLOCKED"),
            (Reading("us/tok (unit not stated)"), "BLOCKED"),
            (Reading("us/tok (unit not stated)", candidate=math.nan), "INVALID"),
            (Reading("us/tok (unit not stated)", candidate=200.0, withdrawn="stale"), "INVALID"),
            (Reading("us/tok (unit not stated)", candidate=200.0, kind="predicted"), "CONDITIONAL-GO"),
        ]
    )
)
def test_than(other: Reading, word: str) -> None:
    unit = "us/tok (unit not stated)"
    gate = Gate(require=(Condition("gather_cost", "<", unit, than="tax_removed"),))
    evidence = {("gather_cost", ""): Reading(unit, candidate=128, ids=("cost",)), ("tax_removed", ""): other}
    verdict = judge(gate, {**evidence, ("tax_removed", ""): replace(other, ids=("tax",))})
    assert (verdict.word, verdict.findings[0].ids) == (word, ("cost", "tax"))
    assert judge(gate, {k: r for k, r in evidence.items() if k[0] == "gather_cost"}).word == "BLOCKED"


def test_difference_and_control_that_misses() -> None:
    gate = Gate(require=(Condition("kl", "<", "kld", 0.01, "difference"), Condition("same_top_p", ">=", "%", 84)))
    kl, top = Reading("kld", control=0.136, candidate=0.140), Reading("%", control=83.7, candidate=83.7)
    verdict = judge(gate, {("kl", ""): kl, ("same_top_p", ""): top})
    assert verdict.word == "NO-GO"
    assert "the control, 83.7, misses it too" in verdict.reason
    assert judge(gate, {("kl", ""): replace(kl, control=None), ("same_top_p", ""): top}).word == "BLOCKED"


@given(better=st.floats(0.1, 1e4), worse=st.floats(0.1, 1e4))
def test_modelled_gate_is_conditional(better: float, worse: float) -> None:
    gate = Gate(require=(change("decode_tps", ">", 0),))
    words = [judge(replace(gate, modelled=m), {("decode_tps", ""): tps(worse, better)}).word for m in (False, True)]
    assert words[1] == ("CONDITIONAL-GO" if words[0] == "GO" else words[0])


def test_measured_rows_that_stand_for_something_else_say_so() -> None:
    """The card's reason stands in the sentence, and figures that were measured are not called modelled."""
    gate = Gate(require=(change("decode_tps", ">", 0),), modelled=True, reason="A layer stands for the step.")
    found = {("decode_tps", ""): tps(100, 120)}
    reason = judge(gate, found).reason
    assert reason.startswith("on measured rows of a part that stands for the whole which the gate is about (A layer ")
    assert "(A layer stands for the step): decode_tps +20.00 %" in reason
    assert "gate is about: decode_tps" in judge(replace(gate, reason=""), found).reason
    predicted = {("decode_tps", ""): tps(100, 120, kind="modelled")}
    assert judge(gate, predicted).reason.startswith("on modelled evidence: ")


# Launches, intervals, profilers ---------------------------------------------------------------------------------------

FASTER = Gate(require=(change("kernel_us", "<", -5),))


def us(control: float, candidate: float, **more: object) -> Evidence:
    return {("kernel_us", ""): Reading("us", control=control, candidate=candidate, **more)}  # type: ignore[arg-type]


@over(
    numbered(
        [
            # A capture with half as many launches is half as long and no faster.
            (
                1000,
                500,
                (100, 50),
                "NO-GO",
                "kernel_us +0.00 % (1000 -> 500 us), -50.00 % before dividing by 100 and 50",
            ),
            (
                1000,
                1000,
                (100, 200),
                "GO",
                "kernel_us -50.00 % (1000 -> 1000 us), +0.00 % before dividing by 100 and 200",
            ),
            (1000, 500, (50, 50), "GO", "kernel_us -50.00 % (1000 -> 500 us), gate"),
            (
                1000,
                500,
                (50, None),
                "GO",
                "kernel_us -50.00 % (1000 -> 500 us), gate",
            ),  # unknown: nothing can be divided
            (1000, 500, (None, 50), "GO", "kernel_us -50.00 % (1000 -> 500 us), gate"),
            (1000, 500, (100, math.nan), "INVALID", "kernel_us is not a number"),
        ]
    )
)
def test_change_is_per_launch_where_the_captures_differ(
    control: float, candidate: float, launches: tuple[float | None, float | None], word: str, said: str
) -> None:
    verdict = judge(FASTER, us(control, candidate, control_launches=launches[0], candidate_launches=launches[1]))
    assert verdict.word == word
    assert said in verdict.reason
    assert verdict.reason.count("before dividing") == (launches in ((100, 50), (100, 200)))


def test_change_by_block_decides_and_its_interval_is_shown() -> None:
    """The medians of the whole run say -4 %, the blocks -6 %: the blocks are right, for a drift is not in them."""
    evidence = us(1000, 960, change_pct=-6.0, interval_pct=(-6.4, -5.7))
    verdict = judge(FASTER, evidence)
    assert verdict.word == "GO"
    assert "kernel_us -6.00 % (1000 -> 960 us, by pairs), 95 % interval -6.40 to -5.70 %" in verdict.reason
    assert judge(FASTER, us(1000, 960)).word == "NO-GO"
    # Without an interval a printed change is somebody's rounding, and the two figures are better.
    assert judge(FASTER, us(1000, 960, change_pct=-6.0)).word == "NO-GO"
    assert judge(FASTER, us(1000, 960, change_pct=-6.0, interval_pct=(math.nan, 0.0))).word == "INVALID"


def test_the_sentence_tells_a_result_on_the_line() -> None:
    """A change whose interval reaches over its line is undecided; one whose noise floor holds the line says so."""
    gate = Gate(require=(change("kernel_us", "<=", 3),))
    close = judge(gate, us(1000, 1029, change_pct=2.9, interval_pct=(2.5, 3.1), noise_pct=5.0, repeats=9))
    assert close.word == "BLOCKED"
    # The interval reaches 0.2 above the change and the line is 0.1 away: four times the blocks halve it.
    said = "95 % interval +2.50 to +3.10 %, across the line, the line lies inside the noise floor of 5 %, about 27 more"
    assert said in close.reason
    plain = judge(gate, us(1000, 1010, change_pct=1.0, interval_pct=(0.9, 1.1)))
    assert "line" not in plain.reason
    assert (
        ", noise floor 5 %, gate"
        in judge(Gate(require=(change("kernel_us", "<", 0),)), us(1000, 900, noise_pct=5.0)).reason
    )


def test_every_miss_is_named_and_the_rest_counted() -> None:
    workloads = [f"w{i}" for i in range(8)]
    gate = Gate(require=tuple(change("kernel_us", "<", -5, workload=w) for w in workloads))
    evidence = {("kernel_us", w): Reading("us", 1000, 1000 if i < 6 else 900) for i, w in enumerate(workloads)}
    reason = judge(gate, evidence).reason
    assert reason.count("missed") == 6
    assert reason.endswith("; and 2 more")


@over(numbered([("decode_tps", "tok/s", "INVALID"), ("prefill_tps", "tok/s", "INVALID"), ("kernel_us", "us", "GO")]))
def test_throughput_under_a_profiler_decides_nothing(metric: str, unit: str, word: str) -> None:
    gate = Gate(require=(change(metric, "<", -5),))
    reading = Reading(unit, control=1000, candidate=500, profiled=True)
    verdict = judge(gate, {(metric, ""): reading})
    assert verdict.word == word
    assert ("was taken under a profiler" in verdict.reason) == (word == "INVALID")
    assert judge(gate, {(metric, ""): replace(reading, profiled=False)}).word == "GO"


# One output of several ------------------------------------------------------------------------------------------------


def test_the_error_of_one_output_is_judged_by_itself() -> None:
    """A worst output within its limit, and one of them worse than the control's."""
    readings = {
        ("relative_error", "a"): Reading("ratio", 4e-3, 3e-3),
        ("nmse of o", "a"): Reading("nmse", 16e-6, 9e-6),
        ("nmse of state", "a"): Reading("nmse", 1e-6, 4e-6),
    }
    worst = Condition("relative_error", "<=", "ratio", 4e-3, workload="a")
    of_o, of_state = (Condition("nmse", "<=", "nmse", 0, "difference", "a", output=name) for name in ("o", "state"))
    assert judge(Gate(require=(worst, of_o)), readings).word == "GO"
    verdict = judge(Gate(require=(of_state,)), readings)
    assert verdict.word == "NO-GO"
    assert verdict.reason == "nmse of state 1e-06 -> 4e-06 nmse, gate nmse of state difference <= 0 nmse at a: missed"
    absent = judge(Gate(require=(replace(of_o, output="sum"),)), readings)
    assert (absent.word, "nmse of sum is not in the evidence" in absent.reason) == ("BLOCKED", True)


def test_what_is_not_there_is_said_with_where() -> None:
    gate = Gate(require=tuple(change("kernel_us", "<", 0, workload) for workload in ("a", "b", "c")))
    there = {("kernel_us", "a"): Reading("us", control=10.0, candidate=9.0)}
    assert judge(gate, there).observed == "kernel_us is not in the evidence at b and 1 more"
    only = Gate(require=(change("kernel_us", "<", 0),))
    assert judge(only, {}).observed == "kernel_us is not in the evidence"
    assert " at " not in judge(gate, {("kernel_us", w): there["kernel_us", "a"] for w in "abc"}).observed


# Against another workload ---------------------------------------------------------------------------------------------

GROWS = Gate(require=(replace(change("kernel_us", ">=", 100, "long"), against="short"),))


def contexts(short: Reading, long: Reading) -> Evidence:
    return {("kernel_us", "short"): short, ("kernel_us", "long"): long}


def test_a_change_against_another_workload_is_the_candidates_own() -> None:
    """The control of either workload has no part in it."""
    verdict = judge(GROWS, contexts(Reading("us", 1, 27, ids=("a",)), Reading("us", 1000, 85, ids=("b",))))
    assert verdict.word == "GO"
    said = "kernel_us +214.81 % (27 -> 85 us), gate kernel_us change >= 100 % at long against short: holds"
    assert verdict.reason == said
    assert verdict.decisive[0].ids == ("a", "b")
    assert judge(GROWS, contexts(Reading("us", 1, 10.3), Reading("us", 1000, 8.0))).word == "NO-GO"


@over(
    numbered(
        [
            (Reading("us", 27), Reading("us", candidate=85), "BLOCKED"),  # no candidate there
            (Reading("us", candidate=27), Reading("us", 85), "BLOCKED"),
            (Reading("us", candidate=27), Reading("", candidate=85), "BLOCKED"),
            (Reading("ms", candidate=27), Reading("us", candidate=85), "INVALID"),
            (Reading("ms", candidate=27), Reading("ms", candidate=85), "INVALID"),
            (Reading("us", candidate=27, withdrawn="stale"), Reading("us", candidate=85), "INVALID"),
            (Reading("us", candidate=27), Reading("us", candidate=85, impossible="faster than light"), "INVALID"),
            (Reading("us", candidate=0), Reading("us", candidate=85), "INVALID"),
            (Reading("us", candidate=27, kind="modelled"), Reading("us", candidate=85), "CONDITIONAL-GO"),
            (Reading("us", candidate=27, arrival="burst"), Reading("us", candidate=85, arrival="staggered"), "BLOCKED"),
        ]
    )
)
def test_both_workloads_must_carry_it(short: Reading, long: Reading, word: str) -> None:
    assert judge(GROWS, contexts(short, long)).word == word


def test_against_a_workload_that_was_not_measured() -> None:
    assert judge(GROWS, {("kernel_us", "long"): Reading("us", candidate=85)}).word == "BLOCKED"
    assert judge(GROWS, {("kernel_us", "short"): Reading("us", candidate=27)}).word == "BLOCKED"


# Undecided ------------------------------------------------------------------------------------------------------------


def test_an_interval_across_its_line_is_neither_go_nor_no_go() -> None:
    for change_pct, interval in ((-5.5, (-6.2, -4.8)), (-4.5, (-5.2, -3.9))):
        found = judge(FASTER, us(1000, 950, change_pct=change_pct, interval_pct=interval, repeats=8))
        assert (found.word, found.findings[-1].state) == ("BLOCKED", "undecided")
        assert "more blocks would decide it" in found.reason
    assert judge(FASTER, us(1000, 940, change_pct=-6.0, interval_pct=(-6.5, -5.1))).word == "GO"
    assert judge(FASTER, us(1000, 960, change_pct=-4.0, interval_pct=(-4.9, -3.1))).word == "NO-GO"


def test_what_fails_clearly_elsewhere_decides_all_the_same() -> None:
    gate = Gate(require=tuple(replace(FASTER.require[0], workload=w) for w in ("a", "b", "c")))
    close = us(1000, 950, change_pct=-5.0, interval_pct=(-6.0, -4.0))["kernel_us", ""]
    miss = us(1000, 1100, change_pct=10.0, interval_pct=(9.0, 11.0))["kernel_us", ""]
    win = us(1000, 800, change_pct=-20.0, interval_pct=(-21.0, -19.0))["kernel_us", ""]

    def word(*readings: Reading) -> str:
        return judge(gate, {("kernel_us", w): r for w, r in zip("abc", readings, strict=True)}).word

    assert word(close, miss, miss) == "NO-GO"
    assert word(close, win, win) == "BLOCKED"
    assert word(close, win, miss) == "PARTIAL"
    assert word(close, close, close) == "BLOCKED"


def test_a_time_is_held_with_its_interval_too() -> None:
    gate = Gate(require=(Condition("kernel_us", "<=", "us", 16),))
    near = Reading("us", candidate=15.9, interval=(15.7, 16.1), repeats=5)
    assert judge(gate, {("kernel_us", ""): near}).word == "BLOCKED"
    assert judge(gate, {("kernel_us", ""): replace(near, interval=(15.8, 15.95))}).word == "GO"
    assert judge(gate, {("kernel_us", ""): replace(near, candidate=16.2, interval=(16.1, 16.3))}).word == "NO-GO"
    assert judge(gate, {("kernel_us", ""): replace(near, interval=(15.7, math.nan))}).word == "INVALID"


def test_no_number_of_blocks_decides_what_lies_on_the_line() -> None:
    found = judge(FASTER, us(1000, 950, change_pct=-5.0, interval_pct=(-5.1, -4.9), repeats=8))
    assert "no number of blocks that anybody takes would decide it" in found.reason
    assert "repetitions would decide it" in judge(
        FASTER, us(1000, 950, change_pct=-5.05, interval_pct=(-5.1, -4.9))
    ).reason  # fmt: skip


# Direction ------------------------------------------------------------------------------------------------------------


def test_a_go_on_a_change_for_the_worse_says_so() -> None:
    """A slip of a sign: -45 % of a throughput."""

    def reason(*conditions: Condition) -> str:
        evidence = {("decode_tps", ""): tps(100, 55), ("kernel_us", ""): Reading("us", 100, 190)}
        found = judge(Gate(require=conditions), evidence)
        assert found.word == "GO"
        return found.reason

    assert "; mind: the gate asks for the worse, decode_tps is better higher" in reason(change("decode_tps", "<", 0))
    assert "; mind: the gate asks for the worse, kernel_us is better lower" in reason(change("kernel_us", ">=", 5))
    assert "mind" not in reason(change("decode_tps", ">", -50), change("kernel_us", "<", 100))
    null = change("decode_tps", "<=", 50), change("decode_tps", ">=", -50)
    assert "mind" not in reason(*null)  # bounded from both sides: no change is what it asks for
    assert "mind" not in reason(Condition("kernel_us", ">=", "us", 100))


# Stated ---------------------------------------------------------------------------------------------------------------


def test_a_go_says_what_is_stated_and_not_shown() -> None:
    same = Condition("token_mismatches", "==", "tokens", 0)
    gate = Gate(correctness=(same,), require=(change("kernel_us", "<", -5),))
    evidence = {**us(1000, 900), ("token_mismatches", ""): Reading("tokens", candidate=0, kind="stated")}
    found = judge(gate, evidence)
    assert found.word == "GO"
    assert found.reason.endswith("; stated, not shown: token_mismatches")
    shown = judge(gate, {**evidence, ("token_mismatches", ""): Reading("tokens", candidate=0)})
    assert "stated" not in shown.reason
    assert (
        judge(gate, {**evidence, ("token_mismatches", ""): Reading("tokens", candidate=3, kind="stated")}).word
        == "INVALID"
    )
    assert judge(Gate(require=(same,)), evidence).word == "GO"
    predicted = {("kernel_us", ""): replace(us(1000, 900)["kernel_us", ""], kind="predicted")}
    assert judge(gate, evidence | predicted).reason.endswith("stated, not shown: token_mismatches")


def test_a_line_in_us_belongs_to_the_device_that_it_was_declared_for() -> None:
    us = with_(kernel_us=Reading("us", 20.0, 10.0), roofline_fraction=Reading("ratio", candidate=0.9))
    line = Gate(require=(Condition("kernel_us", "<=", "us", 12),))
    others = Gate(require=(change("kernel_us", "<=", -20), Condition("roofline_fraction", ">=", "ratio", 0.8)))
    assert judge(line, us).word == judge(others, us, "h200").word == "GO"
    for limit in (12, 9):  # met or not
        found = judge(Gate(require=(Condition("kernel_us", "<=", "us", limit),)), us, "h200")
        assert found.word == "BLOCKED"
        assert "its line was declared for h200" in found.reason
