"""The committed cards: what they must decide on the recorded figures, and what no change of those figures may leave.

The expected words are written down here by recorded id, independently of the cards and of data/recorded, so that a gate
or a figure cannot drift without a test saying so. Cards that are not as they must be are in test_phases_refused.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lab.base import files, vocabulary
from lab.bench import measure
from lab.card import phases, recorded
from lab.card.gate import Condition, Gate, Reading
from lab.check import families
from lab.judge import verdicts
from lab.judge.rules import WORDS, Finding, Verdict, judge
from tests.loops import over
from tests.refused import refused

CASES = [(card, case) for card in phases.cards().values() for case in card.recorded]
EVERY_CASE = {f"{card.id} {case.verdict.id}": (card, case) for card, case in CASES}
JUDGED = {j.recorded_id: j for j in verdicts.judge_recorded(phases.cards().values())}

EXPECTED = {
    recorded_id: expected
    for path in sorted((Path(__file__).parent / "expected").glob("*.toml"))
    for recorded_id, expected in files.read_toml(path).items()
}


@over({recorded_id: (recorded_id,) for recorded_id in EXPECTED})
def test_expected_verdict(recorded_id: str) -> None:
    expected = EXPECTED[recorded_id]
    assert expected.keys() <= {"word", "source", "claims", "either_way", "no_change", "withdrawn"}
    word, source, claims = expected["word"], expected["source"], expected.get("claims", {})
    judged = JUDGED[recorded_id]
    assert (judged.verdict.word, judged.reading) == (word, source)
    assert {name: verdict.word for name, verdict in judged.claims} == claims
    assert judged.agrees == (word == source or (word, source) == ("GO", "LANDED"))


def test_words_are_counted_apart() -> None:
    """Agreement with what a source wrote is one number, with what we read it as another."""
    worded = [j for j in JUDGED.values() if j.source_word]
    assert all((j.agrees_with_word is None) == (not j.source_word) for j in JUDGED.values())
    apart = {j.recorded_id: (j.agrees, j.agrees_with_word) for j in worded if j.agrees != j.agrees_with_word}
    # The source says that its gate is met; at zero engagements that is VACUOUS, and so we read it.
    assert apart["lb.v.mtp-byte-identical"] == (True, False)
    assert (len(JUDGED), len(worded)) == (130, 65)


def test_every_recorded_case_is_expected() -> None:
    """A new card brings its expectation along; until then its verdict is nobody's claim."""
    assert set(EXPECTED) == {case.verdict.id for _, case in CASES}
    assert len({case.verdict.id for _, case in CASES}) == len(CASES)


@over(EVERY_CASE)
def test_sentence_exactly_where_we_differ(card: phases.Card, case: phases.RecordedCase) -> None:
    judged = JUDGED[case.verdict.id]
    assert bool(judged.differs) == (not judged.agrees)
    if judged.differs:
        assert judged.differs.endswith(".")
        assert len(judged.differs.split()) > 8


# Figures --------------------------------------------------------------------------------------------------------------


@over(EVERY_CASE)
def test_figures_exist_and_stand(card: phases.Card, case: phases.RecordedCase) -> None:
    for figure_id in case.figures:
        # Only a verdict about withdrawn figures may name them, and gets no other word for it.
        withdrawn = EXPECTED[case.verdict.id].get("withdrawn", False)
        figure = recorded.figure(figure_id) if withdrawn else recorded.target(figure_id)
        assert not withdrawn or JUDGED[case.verdict.id].verdict.word == "INVALID"
        assert figure.device in (card.device, "n/a")
        assert figure.system == card.system
    stated = [c.stated_by for _, c in card.gate.conditions() if c.stated_by]
    assert all(recorded.target(figure_id).kind == "threshold" for figure_id in stated if ".threshold." in figure_id)


def test_counts_stated_in_words_say_so_and_are_used() -> None:
    """A count that a source gives in words ("identical", "all pass") is marked so, and a gate reads it."""
    bound = {figure_id for _, case in CASES for figure_id in case.figures}
    for path in recorded.FOLDER.glob("stated_*.csv"):
        assert path.name in recorded.FIGURE_FILES
        for figure in recorded.read_figures(path).values():
            assert ".stated." in figure.id
            assert figure.params["stated"]
            assert figure.id in bound or figure.params["stated"] != "in words", "no card needs it"


def numbers(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?(?!\w)", text))


def derived(finding: Finding, gate: Gate, reading: Reading) -> set[str]:
    """Every number that a sentence on these figures may hold: as printed, the change between them, the floor."""
    figures = {i: recorded.figure(i) for i in finding.ids}
    allowed = {f"{f.value:.6g}" for f in figures.values()}
    # Another engine, or a reference, may stand as the control.
    arm = {i: "candidate" if f.arm == "candidate" else "control" for i, f in figures.items()}
    of = {arm[i]: float(f.value) for i, f in figures.items() if f.metric not in ("noise_floor", "sd", "launches")}
    counts = {arm[i]: float(f.value) for i, f in figures.items() if f.metric == "launches"}
    if {"control", "candidate"} <= of.keys() & counts.keys():
        each = {name: of[name] / counts[name] for name in counts}
        allowed.add(f"{100 * (each['candidate'] - each['control']) / each['control']:+.2f}")
    if of.get("control") and "candidate" in of:
        allowed.add(f"{100 * (of['candidate'] - of['control']) / of['control']:+.2f}")
    printed = {f.value for f in figures.values()}
    if reading.control and {reading.control, reading.candidate} <= printed:  # one arm in two conditions
        allowed.add(f"{100 * (float(reading.candidate or 0) - reading.control) / reading.control:+.2f}")
    allowed |= {f"{float(f.value):+.2f}" for f in figures.values() if f.unit == "%"}
    noise = [float(f.value) * (gate.noise.sigmas if f.metric == "sd" else 1) for f in figures.values()]
    if reading.control:  # a floor in the figure's own unit
        noise += [100 * float(f.value) / reading.control for f in figures.values() if f.metric == "noise_floor"]
    return allowed | {f"{n:.6g}" for n in (gate.noise.floor_pct, *noise)}


def untraced(verdict: Verdict, gate: Gate, evidence: Mapping[tuple[str, str], Reading]) -> list[str]:
    """Numbers in the findings of a verdict that no figure of theirs gives."""
    found = []
    for finding in verdict.findings:
        if finding.state == "missing":
            continue
        key = (finding.condition.metric, finding.condition.workload)
        found += sorted(numbers(finding.observed) - derived(finding, gate, evidence[key]))
        found += [] if finding.ids else [f"{finding.observed} has no id"]
    return found


@over(EVERY_CASE)
def test_every_number_traces_to_figures(card: phases.Card, case: phases.RecordedCase) -> None:
    judged = JUDGED[case.verdict.id]
    gates = [(judged.verdict, card.gate)]
    gates += [(v, c) for (_, v), c in zip(judged.claims, card.claims, strict=True)]
    for verdict, gate in gates:
        assert untraced(verdict, gate, case.evidence) == []
        assert {i for f in verdict.findings for i in f.ids} <= set(case.figures)


def test_untraced_number_is_found() -> None:
    card, case = next((card, case) for card, case in CASES if case.verdict.id == "lp.v.p5")
    key = ("gdn_us_per_token", "npp2048")
    other = {**case.evidence, key: replace(case.evidence[key], candidate=57.0)}
    assert untraced(judge(card.gate, other), card.gate, other) == ["+1.23", "57"]


@over({card.id: (card,) for card in phases.cards().values()})
def test_verdict_words_are_not_in_the_card(card: phases.Card) -> None:
    words = {*WORDS, "LANDED"}

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [t for v in value.values() for t in texts(v)]
        return [t for v in value for t in texts(v)] if isinstance(value, list) else [str(value)]

    raw = files.read_toml(card.path)
    assert not words & set(texts(raw))


# What no change of the evidence may leave -----------------------------------------------------------------------------


def directional(card: phases.Card) -> list[Condition]:
    return [c for _, c in card.gate.conditions() if c.compare == "change"]


def swapped(card: phases.Card, case: phases.RecordedCase) -> dict[tuple[str, str], Reading]:
    """The evidence with the arms of every change swapped; a change printed alone gets the other sign."""
    evidence = dict(case.evidence)
    for c in directional(card):
        reading = evidence[c.metric, c.workload]
        if reading.control is None:
            assert reading.change_pct is not None
            evidence[c.metric, c.workload] = replace(reading, change_pct=-reading.change_pct)
        else:
            evidence[c.metric, c.workload] = replace(reading, control=reading.candidate, candidate=reading.control)
    return evidence


EITHER_WAY = {recorded_id for recorded_id, expected in EXPECTED.items() if "either_way" in expected}
SWAPPABLE = [
    (card, case)
    for card, case in CASES
    if directional(card) and JUDGED[case.verdict.id].verdict.word in ("GO", "NO-GO")
]


@over({case.verdict.id: (card, case) for card, case in SWAPPABLE})
def test_swapped_arms_change_the_verdict(card: phases.Card, case: phases.RecordedCase) -> None:
    before, after = JUDGED[case.verdict.id].verdict.word, judge(card.gate, swapped(card, case)).word
    assert (after == before) == (case.verdict.id in EITHER_WAY), (before, after)
    assert after not in ("INVALID", "BLOCKED")


def test_swappable_cards() -> None:
    """The test above would be empty without them; one without a change condition is left out by name."""
    decided = [(card, case) for card, case in CASES if JUDGED[case.verdict.id].verdict.word in ("GO", "NO-GO")]
    left = {case.verdict.id for card, case in decided if not directional(card)}
    assert left == {recorded_id for recorded_id, expected in EXPECTED.items() if expected.get("no_change")}
    assert len(SWAPPABLE) + len(left) == len(decided)
    assert set(EITHER_WAY) < {case.verdict.id for _, case in SWAPPABLE}


@over(EVERY_CASE)
def test_without_units_every_card_is_blocked(card: phases.Card, case: phases.RecordedCase) -> None:
    bare = {key: replace(reading, unit="") for key, reading in case.evidence.items()}
    word = "INVALID" if EXPECTED[case.verdict.id].get("withdrawn") else "BLOCKED"
    assert {judge(g, bare).word for _, g in card.gates} == {word}
    assert judge(card.gate, {}).word == "BLOCKED"


@over(EVERY_CASE)
def test_another_unit_or_a_withdrawn_figure_is_invalid(card: phases.Card, case: phases.RecordedCase) -> None:
    asked = {(c.metric, c.workload) for _, c in card.gate.conditions()}
    for key in asked & case.evidence.keys():
        reading = case.evidence[key]
        other = "samples" if reading.unit == "GiB" else "GiB"
        assert judge(card.gate, {**case.evidence, key: replace(reading, unit=other)}).word == "INVALID"
        assert judge(card.gate, {**case.evidence, key: replace(reading, withdrawn="stale")}).word == "INVALID"


@over(EVERY_CASE)
def test_zero_engagements_never_pass(card: phases.Card, case: phases.RecordedCase) -> None:
    asked = {(c.metric, c.workload) for c in card.gate.engaged}
    zero = {**case.evidence, **{key: Reading(vocabulary.words().metric[key[0]].unit, candidate=0) for key in asked}}
    if asked:
        assert judge(card.gate, zero).word == "VACUOUS"
    else:
        asking = replace(card.gate, engaged=(Condition("engagements", ">", "launches", 0),))
        invalid = JUDGED[case.verdict.id].verdict.word == "INVALID"
        assert judge(asking, zero).word == ("INVALID" if invalid else "BLOCKED")


# The hash of a gate ---------------------------------------------------------------------------------------------------


def test_gate_hash_ignores_prose_and_layout(tmp_path: Path) -> None:
    text = phases.card("p4").path.read_text()
    path = tmp_path / "p4.toml"
    path.write_text("# another comment\n" + text.replace("fair-share", "fair share").replace("\n\n", "\n\n\n"))
    other = phases.load(path)
    assert other.gate_hash == phases.card("p4").gate_hash
    assert other.card_hash != phases.card("p4").card_hash


def test_gate_hash_changes_with_the_arms_of_a_family(tmp_path: Path) -> None:
    card = phases.card("p5-kernel")
    path = tmp_path / "p5-kernel.toml"
    path.write_text(card.path.read_text().replace(f'"{card.candidate}"', '"another_candidate"'))
    assert phases.load(path).gate_hash != card.gate_hash


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("threshold = 0\n", "threshold = 1\n"),
        ('op = "<"\nthreshold = 0\n', 'op = "<="\nthreshold = 0\n'),
        ('unit = "runs"', 'unit = "runs"\nworkload = "n32"'),
        ('workloads = ["n32", "n128"]', 'workloads = ["n32", "n128", "n256"]'),
        ("[[gate.kill]]", "[[gate.require]]"),
        ("[gate]", "[gate]\nnoise = { floor_pct = 3 }"),
        ("[gate]", "[gate]\nmodelled = true"),
        ('arrival = "staggered"\n', ""),
        ('compare = "change"\nop = "<"\nthreshold = 0\nunit = "%"', 'op = "<"\nthreshold = 0\nunit = "tok/s"'),
    ],
)
def test_gate_hash_changes_with_what_is_judged(old: str, new: str, tmp_path: Path) -> None:
    text = phases.card("p4").path.read_text()
    assert old in text
    path = tmp_path / "p4.toml"
    path.write_text(text.replace(old, new, 1))
    assert phases.load(path).gate_hash != phases.card("p4").gate_hash


def test_claims_are_part_of_the_gate_hash(tmp_path: Path) -> None:
    path = tmp_path / "p1.toml"
    path.write_text(
        phases.card("p1")
        .path.read_text()
        .replace('op = ">"\nthreshold = 0\nunit = "%"', 'op = ">"\nthreshold = 9\nunit = "%"')
    )
    assert phases.load(path).gate_hash != phases.card("p1").gate_hash


def test_launch_counts_are_bound_by_id(tmp_path: Path) -> None:
    text = phases.card("p1").path.read_text()
    bound = 'candidate = "lp.gate.p1.convert-share.candidate"\n'
    counts = 'control_launches = "lp.gate.p1.convert-instances.control"\n'
    counts += 'candidate_launches = "lp.gate.p1.convert-instances.candidate"\n'
    path = tmp_path / "p1.toml"
    path.write_text(text.replace(bound, bound + counts))
    reading = phases.load(path).recorded[0].evidence["convert_share", ""]
    assert (reading.control_launches, reading.candidate_launches) == (6840, 5880)
    path.write_text(text.replace(bound, bound + 'control_launches = "lp.gate.p1.convert-time.control"\n'))
    with refused("p1.toml", "convert-time.control", "ms", remedy="control_launches"):
        phases.load(path)


# Cards that can be measured -------------------------------------------------------------------------------------------

MEASURABLE = [card for card in phases.cards().values() if card.system == "killgate" and card.family]


@over({card.id: (card,) for card in MEASURABLE})
def test_a_card_of_ours_can_be_measured(card: phases.Card) -> None:
    """Its arms are candidates that take every workload, and an output that it asks about is one that is compared."""
    families.interpret_on_cpu()
    family = families.load(card.family)
    workloads = [family.workload(name) for name in card.workloads]
    for name in {card.control, card.candidate} & family.candidates.keys():
        assert [w.id for w in workloads if family.candidate(name).refuses(w)] == []
    gone = {card.control, card.candidate} - family.candidates.keys()
    assert bool(gone) == bool(card.adopted) or family.unavailable
    precision = family.candidates[card.candidate].precision if card.candidate in family.candidates else "bf16"
    compared = {name for w in workloads for name in family.cases.tolerance(w, precision)}
    assert {c.output for _, c in card.gate.conditions()} <= {"", *compared}


def test_a_card_whose_arm_is_gone_is_judged_and_not_measured() -> None:
    card = phases.card("two-layouts")
    with refused("two-layouts.toml", "code is gone", "cuda_gemm_boxes", remedy="lab judge"):
        measure.plan(card)
    assert verdicts.judge_measured(card, "h200").verdict.word == "GO"
