"""The board and a phase's writeup: every verdict is there, with its figures, and a disagreement is never silent."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.base import console
from lab.card import phases
from lab.judge import rules, verdicts
from lab.row import store
from lab.row.records import Measurement
from lab.write import writeup
from tests.row.made import measurement

JUDGEMENTS = verdicts.judge_recorded(phases.cards().values())
REPLAYED = [card for card in phases.cards().values() if card.recorded]


def flat(text: str) -> str:
    """Text with its line breaks and column gaps closed, for sentences that wrap."""
    return re.sub(r"\s+", " ", text)


def test_board_has_every_phase_and_sentence() -> None:
    text = writeup.board(JUDGEMENTS)
    first_cells = re.findall(r"^([a-z]\S*) ", text, flags=re.MULTILINE)
    assert [cell for cell in first_cells if cell != "phase"] == [j.phase for j in JUDGEMENTS]
    assert max(map(len, text.splitlines())) <= 155
    for j in JUDGEMENTS:
        said = f"- {j.phase} ({j.recorded_id}): {j.differs}" in flat(text)
        assert said == (not j.agrees)


def test_board_row_shows_claims_and_agreement() -> None:
    rows = {(r[0], r[3].split(" ")[0]): r for r in writeup.board_rows(JUDGEMENTS)}
    assert rows["p1", "NO-GO"][3:] == ("NO-GO (prefill gain: NEUTRAL)", "LANDED", "no, explained")
    assert rows["lp11", "GO"][3:] == ("GO", "LANDED", "yes")
    assert rows["p4", "BLOCKED"][5] == "no, explained"
    assert "not (aggregate_tps change < 0 % at n32 under staggered arrivals)" in rows["p4", "NO-GO"][1]
    [bare] = writeup.board_rows([replace(j, differs="") for j in JUDGEMENTS if j.recorded_id == "lp.v.p4"])
    assert bare[5] == "NO"
    [own] = writeup.board_rows([replace(JUDGEMENTS[0], recorded_id=None, recorded_verdict=None)])
    assert own[4:] == ("-", "")


def test_unexplained_catches_both_directions() -> None:
    assert writeup.unexplained(JUDGEMENTS) == []
    by_id = {j.recorded_id: j for j in JUDGEMENTS}
    silent = replace(by_id["lp.v.p1"], differs="")
    needless = replace(by_id["lp.v.p5"], differs="It does not differ.")
    own = replace(by_id["lp.v.p5"], recorded_verdict=None, recorded_id=None)
    assert writeup.unexplained([by_id["lp.v.p1"], silent, needless, by_id["lp.v.p5"], own]) == [silent, needless]


@pytest.mark.parametrize("agreeing", [True, False])
def test_a_changed_verdict_becomes_unexplained(agreeing: bool) -> None:
    """What happens when a gate or a figure moves: the word flips, the sentence does not."""
    j = next(j for j in JUDGEMENTS if j.agrees == agreeing)
    landed = "GO" if j.recorded_verdict == "LANDED" else str(j.recorded_verdict)
    flipped = replace(j, verdict=rules.Verdict("INVALID" if agreeing else landed, "changed"))
    assert writeup.unexplained([flipped]) == [flipped]


@pytest.mark.parametrize("card", REPLAYED, ids=[card.id for card in REPLAYED])
def test_writeup_has_its_parts_and_figures(card: phases.Card) -> None:
    text = writeup.write(card)
    assert text.startswith(f"# {card.title}\n")
    for part in (card.question, card.hypothesis, card.null, card.limits, card.gate.source, card.card_hash):
        assert part in text
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert headings[0] == "The gate, declared beforehand"
    assert headings[-3:] == ["Expected", "What would change the verdict", "Provenance"]
    for _, condition in card.gate.conditions():
        assert f"- `{condition}` (" in text
    for case in card.recorded:
        assert f"## Recorded evidence: `{case.verdict.id}`" in text
        assert all(f"| `{figure_id}` |" in text for figure_id in case.figures)
        assert case.differs in text
    for j in verdicts.judge_recorded([card]):
        assert f"**{j.verdict.word}.** {j.verdict.reason}." in text
        assert f"The source wrote {j.recorded_verdict}; our verdict {'agrees' if j.agrees else 'differs'}." in text


def measured_row(arm: str, median_us: float | None, **more: Any) -> Measurement:
    timed = {"median_us": median_us, "iqr_us": 0.5, "timer": "graph", "l2": "cold", "n": 20, "calls": 3}
    work = {"workload_id": "npp2048", "flops": 1e6, "bytes": 2**30, "pipe": "bf16", "relative_error": 1e-3}
    return measurement(phase="p5", arm=arm, **work, **(timed if median_us is not None else {}), **more)


def test_measured_rows_are_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    store.append(
        tmp_path / "h200" / "p5" / "r1", measured_row("control", 447.4, gate_hash="0" * 12, name="fused_chunk")
    )
    failed = measured_row("candidate", None, status="oom", message="out of memory", name="split_pipeline")
    store.append(tmp_path / "h200" / "p5" / "r1", failed)
    text = writeup.write(phases.card("p5"))
    assert "## Measured on " in text
    # 1 GiB at the datasheet's 4.8 TB/s is 223.7 us.
    assert "| npp2048 | fused_chunk | 447.4 | 0.50 | 223.7 | 50% |  | 1.0e-03 | graph, cold | r1 |" in text
    assert "| npp2048 | split_pipeline | oom: out of memory |" in text
    note = "gate changed after measuring: the rows carry another gate hash; fused_chunk of run r1 is a former workload"
    assert f"Note: {note}" in text
    assert verdicts.judge_measured(phases.card("p5"), "h200").verdict.word == "BLOCKED"


def test_table_wraps_and_aligns() -> None:
    text = console.table(("a", "b"), [("one two three", "x"), ("", "y")], (7, 3))
    assert text.splitlines() == ["a        b", "-------  ---", "one two  x", "three", "         y"]
