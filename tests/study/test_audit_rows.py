"""The audit on what this workbench measures: each check on committed rows, which are clean, and on altered ones.

Also the one check that a card can declare itself: the share of the timed region that its candidate changes.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from lab.card import phases
from lab.card.gate import Condition, Gate, Noise, Reading
from lab.judge import evidence, verdicts
from lab.judge.rules import judge
from lab.row import store
from lab.row.records import PERFORMANCE, Measurement
from lab.study.audit import bindings, find, run
from lab.study.audit.subject import Quantity, Subject
from tests.loops import numbered, over
from tests.refused import refused
from tests.row.made import changed

CARD, PLACE = "p5-kernel", "h200"


def newest() -> list[Measurement]:
    """The committed control and candidate rows that the card is judged on, as they stand."""
    card = phases.card(CARD)
    judged = [r for r in store.rows(PLACE, CARD) if r.name in (card.control, card.candidate)]
    return [row for pair in evidence.pairs(judged).values() for row in pair if row]


def fired(body: find.Body) -> set[str]:
    asked = [(name, s) for name, finder in find.FINDERS.items() for s in finder(body)]
    found = [run.ask(run.CHECKS[name], subject) for name, subject in asked]
    assert {s.evidence for _, s in asked} == {"measured"}
    return {f.check for f in found if f is not None}


def older(rows: list[Measurement], **more: Any) -> list[Measurement]:
    return [changed(r, run="2026-01-01T000000Z", **more) for r in rows]


ROWS: list[tuple[str, Callable[[Measurement, Measurement], list[Measurement]]]] = [
    ("zero-engagement", lambda a, b: [a, changed(b, n=0)]),
    ("incomplete-arms", lambda a, b: [a]),
    ("incomplete-arms", lambda a, b: [a, changed(b, status="oom", **dict.fromkeys(PERFORMANCE))]),
    ("kernel-from-wall", lambda a, b: [a, changed(b, timer="events")]),
    ("label-drift", lambda a, b: [*older([a], bytes=2 * (a.bytes or 0)), a, b]),
    ("impossible-speed", lambda a, b: [a, changed(b, median_us=0.5)]),
    ("denominator-changed", lambda a, b: [a, changed(b, gate_hash="0" * 12)]),
    ("identical-path-spread", lambda a, b: [a, changed(b, aa_pct=60.0)]),
    ("threshold-inside-band", lambda a, b: [a, changed(b, aa_pct=15.0)]),
    ("withdrawn-reused", lambda a, b: [a, changed(b, status="suspect")]),
    ("gate-fails-control", lambda a, b: [changed(a, relative_error=0.5), b]),
    ("between-session-noise", lambda a, b: [a, b, *older([a], median_us=9 * (a.median_us or 0)), *older([b])]),
]  # fmt: skip


def test_committed_rows_are_clean() -> None:
    assert fired(find.measured(phases.card(CARD), PLACE, newest())) == set()


def test_fires_on_measured_rows() -> None:
    @over(numbered(ROWS))
    def each(check: str, alter: Callable[..., list[Measurement]]) -> None:
        control, candidate = newest()
        body = find.measured(phases.card(CARD), PLACE, alter(control, candidate))
        if check in ("identical-path-spread", "between-session-noise"):  # a verdict that rests on the change being real
            parts = tuple((n, g, dataclasses.replace(v, word="GO")) for n, g, v in body.parts)
            body = dataclasses.replace(body, parts=parts)
        assert check in fired(body)

    each()


READING = Reading(
    "us", control=100.0, candidate=95.9, ids=("profiles/h200/toy/r#control@a", "profiles/h200/toy/r#candidate@a")
)
LINE = Condition("kernel_us", "<", "%", 0, "change", "a")


def toy(reading: Reading, condition: Condition = LINE, word: str = "") -> find.Body:
    """A measured body of one reading; `word` is put in the place of our judge's, to claim what it would not."""
    gate = Gate(require=(condition,))
    read = {(condition.metric, condition.workload): reading}
    verdict = judge(gate, read)
    verdict = dataclasses.replace(verdict, word=word or verdict.word)
    return find.Body("toy@h200", phases.card(CARD), "measured", verdict.word, read, (("", gate, verdict),))


FIRES_ON_MEASURED_READINGS_CASES: list[tuple[str, find.Body, find.Body]] = [
    (
        "launch-drift",
        toy(structs.replace(READING, control_launches=598, candidate_launches=570)),
        toy(structs.replace(READING, control_launches=598, candidate_launches=598)),
    ),
    (
        "claim-inside-noise",
        toy(structs.replace(READING, candidate=98.5), word="GO"),
        toy(structs.replace(READING, candidate=90.0), word="GO"),
    ),
    (
        "profiled-throughput",
        toy(Reading("tok/s", 100.0, 120.0, profiled=True), Condition("decode_tps", ">", "%", 0, "change")),
        toy(structs.replace(READING, profiled=True)),  # a kernel's time survives a profiler
    ),
    (
        "blind-sentinel",
        toy(READING, structs.replace(LINE, threshold=-5.0, share=0.001)),
        toy(READING, structs.replace(LINE, threshold=-5.0, share=0.9)),
    ),
]


def test_fires_on_measured_readings() -> None:
    @over(numbered(FIRES_ON_MEASURED_READINGS_CASES))
    def each(check: str, body: find.Body, quiet: find.Body) -> None:
        assert check in fired(body)
        assert check not in fired(quiet)

    each()


def test_policy_on_measured_rows(tmp_path: Path) -> None:
    """A route derived from a row that a later run of the same arm contradicts."""
    runs = {}
    for row in store.rows(PLACE, CARD):
        if row.arm == "control" and row.status == "ok":
            runs[row.run] = row
    first, last = runs[min(runs)], runs[max(runs)]
    line = 'policy = "ds4.q8-strategy-tiers.any.tier-mmq-min-bandwidth.candidate"'
    case = f'[[case]]\ncheck = "policy-on-artefact"\ntitle = "route"\n{line}\n'
    ids = [f'basis = "{first.id}"\n', f'later = "{last.id}"\n']
    (tmp_path / "audit.toml").write_text(case + "".join(ids))
    ((check, subject),) = bindings.read(run.CHECKS, tmp_path / "audit.toml")
    assert first is not last
    assert run.ask(check, subject) is None, "two runs of one control agree"
    roles = dict(subject.roles)
    roles["later"] = tuple(structs.replace(q, value=4 * q.value) for q in roles["later"])
    found = run.ask(check, dataclasses.replace(subject, roles=roles))
    assert found is not None
    assert "(4.0 times)" in found.sentence or "(3.9 times)" in found.sentence


# The share of the timed region in a gate -----------------------------------------------------------------------------


A_GATE_THAT_CANNOT_SEE_BLOCKS_CASES: list[tuple[float, float, str]] = [
    (1.0, 90.0, "GO"),
    (1.0, 99.0, "NO-GO"),
    (0.001, 99.995, "BLOCKED"),  # met in the part, and nobody could see it
    (0.001, 90.0, "BLOCKED"),
    (0.39, 90.0, "BLOCKED"),  # 0.39 x 5 % = 1.95 %, under the floor of 2 %
    (0.5, 97.0, "GO"),  # 0.5 x 5 % = 2.5 %
    (0.5, 98.0, "NO-GO"),
]


def test_a_gate_that_cannot_see_blocks() -> None:
    @over(numbered(A_GATE_THAT_CANNOT_SEE_BLOCKS_CASES))
    def each(share: float, candidate: float, word: str) -> None:
        gate = Gate(require=(structs.replace(LINE, op="<=", threshold=-5.0, share=share),), noise=Noise())
        verdict = judge(gate, {("kernel_us", "a"): structs.replace(READING, candidate=candidate)})
        assert verdict.word == word, verdict.reason
        assert ("cannot see it" in verdict.reason) == (word == "BLOCKED")

    each()


def test_a_share_is_a_share(tmp_path: Path) -> None:
    text = phases.card("p5").path.read_text()
    assert 'compare = "change"\n' in text
    card = tmp_path / "p5.toml"
    for share in (0.0, -0.1, 1.5, float("nan")):
        card.write_text(text.replace('compare = "change"\n', f'compare = "change"\nshare = {share}\n', 1))
        with refused("p5.toml", "share"):
            phases.load(card)
    card.write_text(text.replace('compare = "change"\n', 'compare = "change"\nshare = 0.25\n', 1))
    assert 0.25 in {c.share for _, c in phases.load(card).gate.conditions()}


def test_quantities_are_compared_in_one_unit() -> None:
    subject = Subject("t", "recorded", {"control": (Quantity(100, "us"),), "candidate": (Quantity(99, "ms"),)})
    assert run.ask(run.CHECKS["claim-inside-noise"], subject) is None
    same = Subject("t", "recorded", {"control": (Quantity(100, "us"),), "candidate": (Quantity(99, "us"),)})
    assert run.ask(run.CHECKS["claim-inside-noise"], same) is not None


NOISE_FLOOR_IS_THE_LARGEST_CASES: list[tuple[dict[str, float], str | None]] = [
    ({}, None),  # +4 % is beyond 2 %
    ({"control_sd": 1.2}, None),  # 3.6 %
    ({"control_sd": 1.5}, "3 sigma of the control, 3 x 1.5 % is 4.5 %"),
    ({"noise": 4.1}, "the measured noise is 4.1 %"),
    ({"floor": 5.0}, "the floor is 5 %"),
]


def test_noise_floor_is_the_largest() -> None:
    @over(numbered(NOISE_FLOOR_IS_THE_LARGEST_CASES))
    def each(roles: dict[str, float], floor: str | None) -> None:
        given = {role: (Quantity(number, "%"),) for role, number in roles.items()}
        arms = {"control": (Quantity(100, "us"),), "candidate": (Quantity(104, "us"),)}
        found = run.ask(run.CHECKS["claim-inside-noise"], Subject("t", "measured", {**arms, **given}))
        assert (found is None) if floor is None else (found is not None and floor in found.sentence)

    each()


def test_launches_turn_a_verdict_only_where_its_effect_goes() -> None:
    def severity(candidate: float, launches: float) -> str | None:
        roles = {"control": 100.0, "candidate": candidate}
        counts = {"control_launches": 600.0, "candidate_launches": launches}
        quantities = {r: (Quantity(v, "ms"),) for r, v in roles.items()}
        quantities |= {r: (Quantity(v, "launches"),) for r, v in counts.items()}
        found = run.ask(run.CHECKS["launch-drift"], Subject("t", "measured", quantities))
        return found.severity if found else None

    assert severity(95.0, 570) == "overturned"  # -5 % is 0 per launch
    assert severity(100.0, 630) == "overturned"  # 0 % hid a gain of 4.8 %
    assert severity(100.0, 570) == "unsound"  # 0 % hid a loss, and nobody claimed a gain
    assert severity(90.0, 630) == "unsound"  # a gain either way
    assert severity(95.0, 600) is None
    assert severity(95.0, 598) is None  # 0.3 % of launches changes nothing


@pytest.fixture(scope="module")
def record() -> list[tuple[str, Subject]]:
    """(check, subject) of everything that is asked of the record."""
    return list(run.audit("recorded").asked)


def test_the_record_is_asked_alone(record: list[tuple[str, Subject]]) -> None:
    assert {s.evidence for _, s in record} == {"recorded"}


def test_only_a_claim_can_lie_inside_the_noise(record: list[tuple[str, Subject]]) -> None:
    small = structs.replace(READING, candidate=98.5)
    assert "claim-inside-noise" not in fired(toy(small, word="NO-GO"))
    not_worse = structs.replace(LINE, threshold=2.0)  # "not slower by 2 %" claims no effect
    assert "claim-inside-noise" not in fired(toy(small, not_worse, word="GO"))
    assert {s.word for name, s in record if name == "claim-inside-noise"} <= set(find.CLAIMS)


def test_a_source_that_said_blocked_is_no_accident(record: list[tuple[str, Subject]]) -> None:
    words = {s.word for name, s in record if name == "incomplete-arms"}
    assert words
    assert "BLOCKED" not in words


def test_a_profiled_throughput_decides_no_recorded_case(tmp_path: Path) -> None:
    text = phases.card("lp11").path.read_text()
    for arm in ("control", "candidate"):
        bound = f"lp.lever1-ssm-out-2d.gb10.decode-agg.{arm}.npl128.npp128"
        assert f'{arm} = "{bound}"' in text
        text = text.replace(f'{arm} = "{bound}"', f'{arm} = "lp.gate.phase-138.decode-agg.{arm}"')
    (tmp_path / "lp11.toml").write_text(text)
    (judged,) = verdicts.judge_recorded([phases.load(tmp_path / "lp11.toml")])
    assert judged.verdict.word == "INVALID"
    assert "under a profiler" in judged.verdict.reason


def test_a_card_may_declare_its_own_sigmas() -> None:
    condition = structs.replace(LINE, threshold=0.0)
    reading = structs.replace(READING, candidate=95.5, control_sd_pct=1.0)
    body = toy(reading, condition, word="GO")
    assert "claim-inside-noise" not in fired(body)  # 4.5 % against 3 %
    gate = structs.replace(body.parts[0][1], noise=Noise(sigmas=5.0))
    wider = dataclasses.replace(body, parts=(("", gate, body.parts[0][2]),))
    assert "claim-inside-noise" in fired(wider)


def test_of_two_lines_on_one_change_the_nearer_is_told() -> None:
    card = phases.card("ik4-null")  # a change within 0.5 % either way
    rows = [r for r in store.rows(PLACE, card.id) if r.name in (card.control, card.candidate) and r.placements == 1]
    body = find.measured(card, PLACE, rows)
    (subject,) = find.FINDERS["threshold-inside-band"](body)
    nearer = [(n, structs.replace(g, require=(g.require[0], structs.replace(g.require[1], threshold=-0.2))), v)
              for n, g, v in body.parts]  # fmt: skip
    (other,) = find.FINDERS["threshold-inside-band"](dataclasses.replace(body, parts=tuple(nearer)))
    assert [s.roles["line"][0].value for s in (subject, other)] == [0.5, -0.2]
