"""Whose word a recorded verdict is: every citation sealed, every line inside its document, every word accounted for."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from lab.card import recorded
from lab.judge.rules import WORDS
from tests.card import walk_sources
from tests.loops import over

VERDICTS = {verdict.id: (verdict,) for verdict in recorded.verdicts().values()}
TEXT = ["a heading", "", "It gained 12.5 % at npl 8: NO-GO.", "more prose"]
ONE = replace(recorded.verdict("lp.v.p5"), lines="3", word="NO-GO", word_lines="3", observed="+12.5 % at npl 8")


@over(VERDICTS)
def test_the_citation_is_the_one_that_was_walked(verdict: recorded.RecordedVerdict) -> None:
    """Where this fails, walk the documents again: python -m tests.card.walk_sources FOLDER --write."""
    assert verdict.checked == walk_sources.seal(verdict)
    last = recorded.sources()[verdict.source].lines
    assert max(walk_sources.numbered(verdict.lines)) <= last
    assert recorded.sources()[verdict.source].system == verdict.system


@over(VERDICTS)
def test_a_word_has_its_line_and_a_meaning(verdict: recorded.RecordedVerdict) -> None:
    assert bool(verdict.word) == bool(verdict.word_means)
    assert {word for word in verdict.word_means.split(" or ") if word} <= {*WORDS, "LANDED"}
    assert verdict.said.startswith("the source wrote" if verdict.word else "we read the source as")
    assert verdict.cited.startswith(recorded.sources()[verdict.source].document)


def test_a_changed_citation_breaks_its_seal() -> None:
    verdict = recorded.verdict("lp.v.p5")
    for changed in ({"lines": "1"}, {"word": "GO"}, {"word_lines": "2"}, {"observed": "nothing"}):
        assert walk_sources.seal(replace(verdict, **changed)) != verdict.checked


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"observed": "+13.5 %"}, "13.5"),
        ({"lines": "4"}, "12.5"),
        ({"lines": "3-9"}, "has 4 lines"),
        ({"word": "PASS"}, "'PASS'"),
        ({"word_lines": "4"}, "'NO-GO'"),
        ({"lines": "three"}, "no line numbers"),
    ],
)
def test_the_walk_finds_what_is_not_there(changed: dict[str, str], said: str) -> None:
    found = "\n".join(walk_sources.missing(replace(ONE, **changed), TEXT))
    assert said in found
    assert bool(found) == bool(said)


def test_what_a_source_took_back_names_its_lines_and_a_verdict() -> None:
    assert recorded.taints()
    for taint in recorded.taints().values():
        assert taint.id in recorded.verdicts()
        assert max(walk_sources.numbered(taint.lines)) <= recorded.sources()[taint.source].lines, taint.id
        assert recorded.verdict(taint.id).source == taint.source


def test_stated_figures_name_their_line() -> None:
    """A figure of kind `stated` counts or flags something: a speed that nobody printed is no figure."""
    stated = [f for f in recorded.figures().values() if f.kind == "stated"]
    assert len(stated) > 50
    assert {f.unit for f in stated} <= {"cases", "tokens", "flag", "launches", "slots", "GB", "%", "runs", "issues"}


def test_a_citation_reads_as_one() -> None:
    known = "000_fc825bac7c039ed1.txt"
    assert recorded.citation(known, "123") == "LocalAI paged notes, line 123"
    assert recorded.citation(known, "12-13") == "LocalAI paged notes, lines 12-13"
    assert recorded.citation(known, "1;12-13;50") == "LocalAI paged notes, lines 1, 12-13 and 50"
    assert recorded.citation("other.txt", "5") == "other.txt"


@pytest.mark.skipif("KILLGATE_SOURCES" not in os.environ, reason="KILLGATE_SOURCES names no folder with the documents")
def test_the_documents_hold_what_is_cited() -> None:
    assert walk_sources.walk(Path(os.environ["KILLGATE_SOURCES"])) == []
