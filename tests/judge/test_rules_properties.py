"""The judge on generated gates and evidence: what no evidence may do, whatever the gate.

An arm, a unit or a figure taken away never leaves a GO, more noise never makes one, and swapping the arms undoes one.
Gates are generated with every role, both directions and thresholds on both sides of the noise floor.
"""

import math
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lab.card.gate import Condition, Gate, Noise, Reading
from lab.judge.rules import judge

# Fewer examples than the 100 of the rules that hold of every case.
QUICK = settings(max_examples=50)
PASSING = ("GO", "CONDITIONAL-GO")
Key = tuple[str, str]
Evidence = dict[Key, Reading]
Case = tuple[Gate, Evidence]


def change(metric: str, op: Any, threshold: float, workload: str = "") -> Condition:
    return Condition(metric, op, "%", threshold, "change", workload)


CORRECTNESS = (Condition("nmse", "<=", "nmse", 1e-3),)
COMPLETE = (Condition("runs_complete", ">=", "runs", 60),)
ENGAGED = (Condition("engagements", ">", "launches", 0),)
KILL = (change("aggregate_tps", "<", 0),)

UNITS = {"decode_tps": "tok/s", "prefill_tps": "tok/s", "region_us": "us", "kernel_us": "us", "aggregate_tps": "tok/s"}
LINES = (-20, -5, -1, 0, 1, 5, 20)
STEPS = (1e-4, 1e-4, 1e-4, 0, -1e-4)


def sign(op: Any) -> int:
    """The direction that a comparison asks for."""
    return 1 if op.startswith(">") else -1


@st.composite
def cases(draw: st.DrawFn, kills: bool = True, gains: bool = False) -> Case:
    """A gate with random roles and requirements, and sound evidence for all of them (any verdict but BLOCKED).

    gains: the gate asks for gains only ("by more than 5 %", never "not worse than"), and the evidence mostly has them.
    """
    metrics = st.tuples(st.sampled_from(sorted(UNITS)[1:]), st.sampled_from(["", "a", "b"]))
    conditions = []
    for metric, workload in draw(st.lists(metrics, min_size=1, max_size=4)):
        op, threshold = draw(st.sampled_from(["<", "<=", ">", ">="])), draw(st.sampled_from(LINES))
        conditions.append(change(metric, op, sign(op) * abs(threshold) if gains else threshold, workload))
    gate = Gate(
        correctness=CORRECTNESS * draw(st.integers(0, 1)),
        complete=COMPLETE * draw(st.integers(0, 1)),
        engaged=ENGAGED * draw(st.integers(0, 1)),
        kill=KILL * draw(st.integers(0, int(kills))),
        require=tuple(conditions),
        noise=Noise(draw(st.sampled_from([0.5, 2.0, 4.0]))),
    )
    noises = st.one_of(st.none(), st.floats(0, 6))
    evidence: Evidence = {}
    for role, c in gate.conditions():
        if c.compare == "change":
            percent = draw(st.one_of(st.floats(-40, 40), st.sampled_from(LINES)))
            if gains:
                percent = (abs(percent) + 5) * (1 if role == "kill" else sign(c.op))
            if draw(st.booleans()):
                reading = Reading("%", change_pct=percent, noise_pct=draw(noises))
            else:
                control = draw(st.floats(1, 1e6))
                reading = Reading(UNITS[c.metric], control, control * (1 + percent / 100), control_sd_pct=draw(noises))
        else:
            towards = 1 if c.op.startswith(">") else -1
            reading = Reading(
                c.unit, candidate=c.threshold + towards * draw(st.sampled_from([1e-4] if gains else STEPS))
            )
        evidence[c.metric, c.workload] = reading
    return gate, evidence


def above(word: str, base: str) -> bool:
    """Whether `base` takes precedence over `word`."""
    ladder = ("INVALID", "BLOCKED", "VACUOUS")
    return base in ladder and (word not in ladder or ladder.index(base) < ladder.index(word))


def missing_evidence_blocks(gate: Gate, evidence: Evidence, data: st.DataObject) -> None:
    c = data.draw(st.sampled_from(gate.require))
    key, reading = (c.metric, c.workload), evidence[c.metric, c.workload]
    without = [
        {k: r for k, r in evidence.items() if k != key},
        {**evidence, key: replace(reading, unit="")},
        {**evidence, key: replace(reading, candidate=None, change_pct=None)},
        {**evidence, key: replace(reading, control=None, change_pct=None)},
    ]
    expected = "INVALID" if judge(gate, evidence).word == "INVALID" else "BLOCKED"
    # A change printed in % whose number is gone is still in %, which is no unit of the metric: a disagreement.
    assert [judge(gate, e).word for e in without] == [
        expected,
        expected,
        *(["INVALID"] * 2 if reading.unit == "%" else [expected] * 2),
    ]
    assert judge(gate, {k: replace(r, unit="") for k, r in evidence.items()}).word == "BLOCKED"


def unsound_evidence_is_invalid(gate: Gate, evidence: Evidence, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(evidence)))
    spoilt: dict[str, Any] = data.draw(
        st.sampled_from(
            [
                {"unit": "GiB"},
                {"withdrawn": "artifact"},
                {"impossible": "faster than light"},
                {"control": math.nan},
                {"candidate": math.inf},
                {"change_pct": math.nan},
                {"control_sd_pct": math.nan},
                {"noise_pct": math.inf},
            ]
        )
    )
    assert judge(gate, {**evidence, key: replace(evidence[key], **spoilt)}).word == "INVALID"


def zero_engagements_are_vacuous(gate: Gate, evidence: Evidence, data: st.DataObject) -> None:
    gate = replace(gate, engaged=ENGAGED)
    zero = {**evidence, ("engagements", ""): Reading("launches", candidate=0)}
    engaged = {**evidence, ("engagements", ""): Reading("launches", candidate=1)}
    base = judge(gate, engaged).word
    assert judge(gate, zero).word == (base if above("VACUOUS", base) else "VACUOUS")


def kill_outweighs_requirements(gate: Gate, evidence: Evidence, data: st.DataObject) -> None:
    fired = {**evidence, ("aggregate_tps", ""): Reading("%", change_pct=data.draw(st.floats(-90, -7)))}
    base = judge(replace(gate, kill=()), fired).word
    assert judge(replace(gate, kill=KILL), fired).word == (base if above("NO-GO", base) else "NO-GO")


def more_measured_noise_never_helps(gate: Gate, evidence: Evidence, data: st.DataObject) -> None:
    sd, noise = data.draw(st.floats(0, 60)), data.draw(st.floats(0, 60))
    noisier = {
        key: replace(r, control_sd_pct=(r.control_sd_pct or 0) + sd, noise_pct=(r.noise_pct or 0) + noise)
        for key, r in evidence.items()
    }
    before, after = judge(gate, evidence).word, judge(gate, noisier).word
    assert after not in PASSING or before in PASSING, (before, after)


def weak_evidence_only_makes_a_go_conditional(gate: Gate, evidence: Evidence, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["predicted", "modelled", "ceiling"]))
    c = data.draw(st.sampled_from(gate.require))
    weak = {**evidence, (c.metric, c.workload): replace(evidence[c.metric, c.workload], kind=kind)}
    base = judge(gate, evidence).word
    assert judge(gate, weak).word == ("CONDITIONAL-GO" if base == "GO" else base)


RULES = (
    missing_evidence_blocks,
    unsound_evidence_is_invalid,
    zero_engagements_are_vacuous,
    kill_outweighs_requirements,
    more_measured_noise_never_helps,
    weak_evidence_only_makes_a_go_conditional,
)


@given(cases(), st.data())
def test_rules_of_every_case(case: Case, data: st.DataObject) -> None:
    """Each of RULES on the same cases: to draw one costs more than to judge it."""
    for rule in RULES:
        rule(*case, data)


@QUICK
@given(cases(kills=False), st.floats(0, 60), st.floats(0, 20))
def test_higher_floor_never_helps(case: Case, floor: float, sigmas: float) -> None:
    """Without kill conditions: those count beyond the declared floor only, which is the gate's own line for them."""
    gate, evidence = case
    higher = replace(gate, noise=Noise(gate.noise.floor_pct + floor, gate.noise.sigmas + sigmas))
    before, after = judge(gate, evidence).word, judge(higher, evidence).word
    assert after not in PASSING or before in PASSING, (before, after)


def swapped(reading: Reading) -> Reading:
    if reading.change_pct is not None:
        return replace(reading, change_pct=100 * (1 / (1 + reading.change_pct / 100) - 1))
    return replace(reading, control=reading.candidate, candidate=reading.control)


@QUICK
@given(cases(kills=False, gains=True))
def test_swapped_arms_undo_a_go(case: Case) -> None:
    """For gates that ask for a gain; "not worse than 5 %" may well hold both ways."""
    gate, evidence = case
    assume(judge(gate, evidence).word == "GO")
    keys = {(c.metric, c.workload) for c in gate.require}
    assert judge(gate, {k: swapped(r) if k in keys else r for k, r in evidence.items()}).word not in PASSING


@QUICK
@given(cases(gains=True), st.data())
def test_flipped_sign_of_a_decisive_change_undoes_a_go(case: Case, data: st.DataObject) -> None:
    gate, evidence = case
    verdict = judge(gate, evidence)
    assume(verdict.word == "GO")
    c = data.draw(st.sampled_from(verdict.decisive)).condition
    reading = evidence[c.metric, c.workload]
    percent = reading.change_pct
    if percent is None:
        assert reading.control
        assert reading.candidate
        percent = 100 * (reading.candidate / reading.control - 1)
    flipped = replace(reading, unit="%", control=None, candidate=None, change_pct=-percent)
    assert judge(gate, {**evidence, (c.metric, c.workload): flipped}).word not in PASSING


@QUICK
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([-40, -1, 0, 1, 40])), min_size=2, max_size=4, unique=True
    )
)
def test_partial_only_where_workloads_disagree(changes: list[tuple[str, float]]) -> None:
    metrics = sorted(UNITS)[: len(changes)]
    conditions = [change(m, ">", 0, w) for m, (w, _) in zip(metrics, changes, strict=True)]
    evidence = {
        (c.metric, c.workload): Reading("%", change_pct=p) for c, (_, p) in zip(conditions, changes, strict=True)
    }
    alone = {
        w: judge(Gate(require=tuple(c for c in conditions if c.workload == w)), evidence).word
        for w in {c.workload for c in conditions}
    }
    disagree = "GO" in alone.values() and len(set(alone.values())) > 1
    assert (judge(Gate(require=tuple(conditions)), evidence).word == "PARTIAL") == disagree
