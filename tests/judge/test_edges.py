"""Where a verdict turns: figures exactly on a line, noise of one side alone, and which row a figure is taken from.

Each test is one that a mistake once got past; the mistakes themselves are in tests/mistakes.toml.
"""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lab.card import phases
from lab.card.gate import Condition, Gate, Reading
from lab.check import families
from lab.judge import evidence, verdicts
from lab.judge.rules import judge
from tests.judge import test_evidence
from tests.judge.test_evidence import H200, row
from tests.judge.test_rules import FULL, change, contexts, with_
from tests.loops import numbered, over

checkout = test_evidence.checkout  # the fixture

# On the noise floor, which is 2 % unless said otherwise --------------------------------------------------------------


@over(
    numbered(
        [
            (">", 0, 2.0, "NEUTRAL"),  # an effect of exactly the floor lies inside it
            (">", 0, -2.0, "NEUTRAL"),
            (">", 2, 2.5, "GO"),  # a line on the floor asks for an effect beyond it
            (">", 2, 2.0, "NEUTRAL"),  # and not for its own figure, as a line outside the floor would
            (">=", 2, 2.0, "NEUTRAL"),
            (">=", -1, -2.0, "NEUTRAL"),
            (">=", -2, -2.0, "GO"),
            ("<", 0, -2.0, "NEUTRAL"),
            ("<", 0, 2.0, "NEUTRAL"),
            ("<=", 2, 2.0, "GO"),
            ("<=", 1, 2.0, "NEUTRAL"),
            (">", 5, 5.0, "NO-GO"),  # outside the floor a line is met or missed
            (">=", 5, 5.0, "GO"),
            ("<", -5, -5.0, "NO-GO"),
        ]
    )
)
def test_an_effect_on_the_floor(op: str, threshold: float, percent: float, word: str) -> None:
    gate = Gate(require=(change("decode_tps", op, threshold),))
    assert judge(gate, {("decode_tps", ""): Reading("%", change_pct=percent)}).word == word


def test_a_kill_on_the_floor_does_not_count() -> None:
    def word(percent: float, noise: float = 0.0) -> str:
        return judge(FULL, with_(aggregate_tps=Reading("%", change_pct=percent, noise_pct=noise))).word

    assert word(-2.0) == "GO"
    assert word(-2.25) == "NO-GO"
    assert word(-4.0, noise=4.0) == "NEUTRAL"  # exactly what the measured noise reaches: nobody can tell
    assert word(-4.25, noise=4.0) == "NO-GO"


def test_a_share_that_shows_no_more_than_the_floor_is_blind() -> None:
    """Half of the region, a line of 4 %: at most the 2 % of the floor would show."""
    condition = replace(change("kernel_us", "<", -4), share=0.5)
    reading = {("kernel_us", ""): Reading("%", change_pct=-30.0)}
    assert judge(Gate(require=(condition,)), reading).word == "BLOCKED"
    assert judge(Gate(require=(replace(condition, threshold=-4.25),)), reading).word == "GO"


# Noise of one side ----------------------------------------------------------------------------------------------------


@over(numbered([(side, both) for side in ["short", "long"] for both in [True, False]]))
def test_either_side_of_a_comparison_across_workloads_brings_its_noise(side: str, both: bool) -> None:
    gate = Gate(require=(replace(change("kernel_us", ">", 0, "long"), against="short"),))
    noise = {"short": 1.0 if both else None, "long": 1.0 if both else None, side: 20.0}
    found = contexts(*(Reading("us", 1, us, noise_pct=noise[w]) for w, us in (("short", 100), ("long", 110))))
    assert judge(gate, found).word == "NEUTRAL"
    quiet = contexts(*(Reading("us", 1, us, noise_pct=1.0) for us in (100, 110)))
    assert judge(gate, quiet).word == "GO"


def test_the_deviation_is_the_controls() -> None:
    """Three sigma of the control make the floor; the candidate's own spread is in the A/A figure or nowhere."""
    rows = [row("control", 1000.0, sd_pct=0.3, aa_pct=9.0), row("candidate", 980.0, sd_pct=5.0, aa_pct=0.5)]
    reading = evidence.readings(rows, H200)["kernel_us", "a"]
    assert (reading.control_sd_pct, reading.noise_pct) == (0.3, 0.5)


# Which row ------------------------------------------------------------------------------------------------------------


def test_a_gate_is_stale_by_the_oldest_sample_it_is_judged_on(checkout: Path) -> None:
    """One workload was measured before the gate's last commit, the other after it."""
    text = test_evidence.CARD.replace("threshold = -5", "threshold = -4")
    (checkout / "toy.toml").write_text(text.replace('workloads = ["a"]', 'workloads = ["a", "b"]'))
    test_evidence.commit(checkout, "11:00")
    card = phases.load(checkout / "toy.toml")

    def note(a: str, b: str) -> str:
        times = {"a": f"2026-11-20T{a}:00+00:00", "b": f"2026-11-20T{b}:00+00:00"}
        rows = [
            row(arm, 1000.0, workload_id=w, started=at, gate_hash=card.gate_hash)
            for w, at in times.items()
            for arm in ("control", "candidate")
        ]
        return verdicts.staleness(card, rows)

    assert "is younger than the samples" in note("10:00", "12:00")
    assert "is younger than the samples" in note("12:00", "10:00")
    assert note("12:00", "13:00") == ""


def test_a_former_kernel_is_judged_with_a_word_about_it(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def former(given: Any) -> str:
        name = given["name"] if isinstance(given, dict) else given.name
        return "former kernel: tile 64 is 128 now" if name == "candidate_kernel" else ""

    monkeypatch.setattr(families, "former", former)
    note = test_evidence.measured_at(checkout, "10:00")
    assert "candidate_kernel is a former kernel: tile 64 is 128 now at a" in note
    assert "control_kernel" not in note


def test_a_card_whose_arms_went_says_so_once() -> None:
    note = verdicts.judge_measured(phases.card("moe-one-few"), "h200").note
    assert "an arm's code went afterwards" in note
    assert "former kernel" not in note


def test_the_newest_run_is_read_whatever_the_order_of_the_file() -> None:
    rows = [
        row(arm, us, run=run)
        for run, us in (("r1", 1000.0), ("r3", 500.0), ("r2", 800.0))
        for arm in ("control", "candidate")
    ]
    for order in (rows, rows[::-1]):
        assert evidence.readings(order, H200)["kernel_us", "a"].candidate == 500.0


@over(numbered([(count,) for count in [1, 2, 3]]))
def test_engagements_are_samples_times_the_calls_in_each(count: int) -> None:
    rows = [row("control", 1000.0), row("candidate", 900.0, n=7, calls=count)]
    assert evidence.readings(rows, H200)["engagements", "a"].candidate == 7 * count


def test_a_threshold_of_another_metric_is_taken_from_its_candidate() -> None:
    gate = Gate(require=(Condition("gather_cost", "<", "us/tok (unit not stated)", than="tax_removed"),))
    unit = "us/tok (unit not stated)"
    found = {
        ("gather_cost", ""): Reading(unit, candidate=100.0),
        ("tax_removed", ""): Reading(unit, control=50.0, candidate=200.0),
    }
    assert judge(gate, found).word == "GO"
