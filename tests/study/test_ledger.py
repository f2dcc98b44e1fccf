"""The ledger of expectation: its numbers against ones written down here, what it refuses, and what it prints."""

import json
from pathlib import Path

import pytest

from lab.base.errors import BadInput
from lab.card import recorded
from lab.cli import main
from lab.judge import verdicts
from lab.study import ledger
from tests.loops import numbered, over
from tests.refused import refused

ROWS = {e.id: e for e in ledger.entries()}


# The committed ledger -------------------------------------------------------------------------------------------------


ENTRIES: list[tuple[str, tuple[float, float], tuple[float, float], str]] = [
    ("p1", (45, 45), (8.44, 8.44), "short"),
    ("p2", (40, 40), (0, 0), "nothing"),
    ("p3", (40, 50), (0, 0), "nothing"),
    ("p4", (10, 10), (0, 0), "nothing"),
    ("p5", (0, 10), (-63.15, -63.15), "against"),
    ("p6", (3, 3), (-2.63, 0.37), "short"),
    ("prefill-recovery", (91, 101), (8.4, 8.4), "short"),
    ("prefill-share", (55, 65), (50.8, 50.8), "short"),
    ("serving-share", (80, 83), (60.7, 60.7), "short"),
    ("decode-share", (95, 95), (86, 86), "short"),
    ("ttft", (1.5, 2), (3.4, 3.4), "short"),
    ("copy-removal", (180, 180), (180.53, 180.53), "came true"),
    ("copy-and-gather-removal", (247, 247), (256.57, 256.57), "came true"),
    ("projection-target", (82, 85), (85.9, 85.9), "came true"),
    ("conv-state", (12, 14), (11.9, 11.9), "came true"),
    ("kv-ceiling", (17.34, 17.34), (8.81, 8.81), "did not"),
]


def test_every_entry() -> None:
    for entry, expected, delivered, outcome in ENTRIES:
        e = ROWS[entry]
        assert (e.expected, e.outcome) == (expected, outcome), entry
        assert e.delivered == pytest.approx(delivered, abs=1e-9), entry
    assert {entry for entry, *_ in ENTRIES} == set(ROWS)


def test_one_of_six_landed() -> None:
    six = [e for e in ROWS.values() if e.kind == "phase"]
    assert [e.id for e in six] == ["p1", "p2", "p3", "p4", "p5", "p6"]
    assert [e.id for e in six if e.landed] == ["p1"]
    assert {e.our_word for e in six} == {"NO-GO"}  # P1 too: the written gate is on the whole convert share
    assert "1 of 6 phases landed (P1)." in ledger.summary(ledger.entries())


def test_the_programs_gap_and_its_first_saving_agree() -> None:
    """198.9 is printed with and without its unit, and 8.44 is what the two wall times of P1 give."""
    whole = ROWS["prefill-recovery"]
    assert whole.of == recorded.figure("lp.program-conclusion.gb10.prefill-gap-total.control").value == 198.9
    assert whole.part_pct == pytest.approx((100 * 8.4 / 101, 100 * 8.4 / 91))
    assert round(ROWS["p1"].delivered[0], 1) == whole.delivered[0]
    assert recorded.figure("lp.ledger.p1.delivered-npp2048").value == 4.02


def test_predictions_carry_their_distance() -> None:
    errors = {e.id: e.error_pct for e in ROWS.values() if e.kind == "prediction"}
    assert errors["copy-removal"] == pytest.approx(0.2944, abs=1e-3)
    assert errors["projection-target"] == pytest.approx(100 * 0.9 / 85)
    assert errors["conv-state"] == pytest.approx(-100 * 0.1 / 12)
    assert ROWS["kv-ceiling"].withdrawn == "refuted"
    assert all(e.error_pct is None for e in ROWS.values() if e.kind != "prediction")


# Outcomes -------------------------------------------------------------------------------------------------------------


OUTCOME_CASES: list[tuple[tuple[float, float], tuple[float, float], str, str]] = [
    ((10, 20), (10, 10), "higher", "reached"),
    ((10, 20), (9.99, 30), "higher", "short"),
    ((10, 20), (0, 0), "higher", "nothing"),
    ((10, 20), (-1, 0), "higher", "against"),
    ((0, 10), (0, 0), "higher", "reached"),
    ((1.5, 2), (2, 2), "lower", "reached"),
    ((1.5, 2), (1.0, 2.01), "lower", "short"),
]


def test_outcome() -> None:
    @over(numbered(OUTCOME_CASES))
    def each(expected: tuple[float, float], delivered: tuple[float, float], better: str, outcome: str) -> None:
        assert ledger._outcome(expected, delivered, better) == outcome

    each()


# What is refused ------------------------------------------------------------------------------------------------------

GOOD = """tolerance_pct = 5
[[entry]]
id = "a"
kind = "prediction"
title = "a title"
verdict = "lp.v.patch-0018"
expected = ["lp.a2-phase2-decompose.gb10.decode-agg.candidate.npl128.item-copy"]
delivered = ["lp.patch-0018.gb10.decode-agg.candidate.npl128.npp128"]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ledger.toml"
    path.write_text(text)
    return path


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No card is judged: what the ledger asks of the judge is a word beside an entry."""
    monkeypatch.setattr(verdicts, "judge_recorded", lambda cards: [])


@pytest.mark.usefixtures("unjudged")
def test_tolerance_decides(tmp_path: Path) -> None:
    assert [e.outcome for e in ledger.load(write(tmp_path, GOOD))] == ["came true"]
    tight = GOOD.replace("tolerance_pct = 5", "tolerance_pct = 0.29")
    assert [e.outcome for e in ledger.load(write(tmp_path, tight))] == ["did not"]


DELIVERED = "lp.patch-0018.gb10.decode-agg.candidate.npl128.npp128"
EXPECTED = "lp.a2-phase2-decompose.gb10.decode-agg.candidate.npl128.item-copy"
PREDICTED = "lp.lever1-ssm-out-2d.gb10.decode-share-of-vllm-target.candidate.npl128.boundlo"
MEASURED = "lp.patch-0018.gb10.decode-agg.control.npl128.npp128"
ARTEFACT = "lp.a2-cudagraph.gb10.gpu-busy.candidate"
REFUSED_CASES: list[tuple[str, str, tuple[str, ...], str]] = [
    ("tolerance_pct = 5", "tolerance_pct = true", ("tolerance_pct = True",), ""),
    ("tolerance_pct = 5", "", ('"tolerance_pct"',), ""),
    ("title =", "titel =", ('"titel"',), '"title"'),
    ('kind = "prediction"', 'kind = "guess"', ('kind = "guess"',), ""),
    ('kind = "prediction"', 'kind = "phase"\nbetter = "up"', ('better = "up"',), ""),
    ("expected = [", "expected = []\nof = [", ("expected = []",), ""),
    ("delivered = [", "caveat = ''\nbefore = 'a'  # [", ("delivered", "before", "after"), ""),
    (DELIVERED, DELIVERED.replace("agg", "ag"), (DELIVERED.replace("agg", "ag"),), "decode-agg"),
    ("lp.v.patch-0018", "lp.v.patch-18", ("lp.v.patch-18",), "lp.v.patch-0018"),
    # A prediction stands as delivered, a measurement as expected, two units, and a figure taken back.
    (DELIVERED, PREDICTED, (PREDICTED, "is predicted"), "measured"),
    (EXPECTED, MEASURED, (MEASURED, "is measured"), "predicted"),
    (DELIVERED, "lp.patch-0018.gb10.decode-share-of-vllm.candidate.npl128", ("% and tok/s",), "one unit"),
    (DELIVERED, ARTEFACT, (ARTEFACT, "artifact"), ""),
]


@pytest.mark.usefixtures("unjudged")
def test_refused(tmp_path: Path) -> None:
    @over(numbered(REFUSED_CASES))
    def each(old: str, new: str, words: tuple[str, ...], remedy: str) -> None:
        assert old in GOOD
        path = write(tmp_path, GOOD.replace(old, new, 1))
        with pytest.raises(BadInput) as caught:
            ledger.load(path)
        assert "ledger.toml" in caught.value.where
        assert [word for word in words if word not in caught.value.what] == [], str(caught.value)
        assert caught.value.remedy, str(caught.value)
        assert remedy in caught.value.remedy, str(caught.value)

    each()


def test_one_id_once(tmp_path: Path) -> None:
    with refused("ledger.toml", 'entry "a"'):
        ledger.load(write(tmp_path, GOOD + GOOD.partition("\n")[2]))


# What is printed ------------------------------------------------------------------------------------------------------


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["ledger"]) == 0
    text = capsys.readouterr().out
    assert "expected 91 to 101 of 198.9 us/tok, delivered 8.4: short" in text
    assert "delivered 50.8 from 49.8" in text
    assert "[LANDED; here NO-GO]" in text
    assert "4 of 5 predictions came true" in text
    assert main.main(["ledger", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {e["id"] for e in printed["entries"]} == set(ROWS)
    assert printed["entries"][0]["landed"] is True
    assert all(recorded.figure(i) for e in printed["entries"] for i in e["ids"])
