"""The board and a phase's writeup: every verdict is there, with its figures, and a disagreement is never silent."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.base import console
from lab.base.errors import REPOSITORY
from lab.card import phases
from lab.cli import main
from lab.judge import rules, verdicts
from lab.row import store
from lab.row.records import Measurement
from lab.write import pages, render, writeup
from tests.row.made import measurement
from tests.write.crawl import Page

JUDGEMENTS = verdicts.judge_recorded(phases.cards().values())


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
    assert rows["p1", "NO-GO"][3:] == (
        "NO-GO (prefill gain: NEUTRAL) (KL and same-top-p of the build-out: GO)",
        '"landed", read as LANDED',
        "no, explained",
    )
    assert rows["lp2", "GO"][3:] == ("GO", "read as LANDED", "yes")
    assert rows["p5", "NO-GO"][4] == '"FAILED", read as NO-GO'
    assert rows["p4", "BLOCKED"][5] == "no, explained"
    assert "not (aggregate_tps change < 0 % at n32 under staggered arrivals)" in rows["p4", "NO-GO"][1]
    [bare] = writeup.board_rows([replace(j, differs="") for j in JUDGEMENTS if j.recorded_id == "lp.v.p4"])
    assert bare[5] == "NO"
    [own] = writeup.board_rows([replace(JUDGEMENTS[0], recorded=None)])
    here = [replace(JUDGEMENTS[0], evidence="measured", device=device) for device in ("h100", "h200")]
    assert [row[3].partition(" on ")[2].split(" ")[0] for row in writeup.board_rows(here)] == ["h100", "h200"]
    assert own[4:] == ("-", "")


def test_a_page_says_what_the_same_question_came_to_on_another_device() -> None:
    card = phases.card("p5-35b")
    said = {view.device: view.elsewhere for view in pages.page_of(card, pages.judged([card])).views}
    assert said["h100"].startswith("measured on h200: BLOCKED; recorded on gb10: ")
    assert said["h200"].startswith("measured on h100: NO-GO; recorded on gb10: ")


def test_unexplained_catches_both_directions() -> None:
    assert writeup.unexplained(JUDGEMENTS) == []
    by_id = {j.recorded_id: j for j in JUDGEMENTS}
    silent = replace(by_id["lp.v.p1"], differs="")
    needless = replace(by_id["lp.v.p5"], differs="It does not differ.")
    own = replace(by_id["lp.v.p5"], recorded=None)
    assert writeup.unexplained([by_id["lp.v.p1"], silent, needless, by_id["lp.v.p5"], own]) == [silent, needless]


@pytest.mark.parametrize("agreeing", [True, False])
def test_a_changed_verdict_becomes_unexplained(agreeing: bool) -> None:
    """What happens when a gate or a figure moves: the word flips, the sentence does not."""
    j = next(j for j in JUDGEMENTS if j.agrees == agreeing)
    landed = "GO" if j.reading == "LANDED" else j.reading
    flipped = replace(j, verdict=rules.Verdict("INVALID" if agreeing else landed, "changed"))
    assert writeup.unexplained([flipped]) == [flipped]


@pytest.mark.slow
def test_writeup_has_its_parts_and_figures() -> None:
    missing = []
    for card in phases.cards().values():
        text = writeup.write(card)
        parts = [f"# {render.cell(card.title)}\n", card.card_hash, "## Expected and delivered"]
        parts += [render.said(part) for part in (card.question, card.hypothesis, card.null, card.limits)]
        parts += [f"| {render.cell(c)} |" for _, gate in card.gates for _, c in gate.conditions() if card.recorded]
        for j in verdicts.judge_recorded([card]):
            assert j.recorded is not None
            agree = "agrees" if j.agrees else "differs"
            said = render.cell(j.recorded.said[0].upper() + j.recorded.said[1:])
            parts += [f"`{j.recorded_id}`", f"**{j.verdict.word}.** {render.cell(j.verdict.reason)}.", j.differs]
            parts += [f"{said}; our word {agree}."]
            assert ("the source wrote" in j.recorded.said) == bool(j.source_word), card.id
        parts += [f"| {i} |" for case in card.recorded for i in case.figures]
        missing += [(card.id, part) for part in parts if " ".join(part.split()) not in " ".join(text.split())]
    assert missing == []


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
    assert "## Measured on NVIDIA H200" in text
    # 1 GiB at the datasheet's 4.8 TB/s is 223.7 us.
    assert "| npp2048 | fused_chunk | control | 447.4 | 0.5 |  | 50% |  | 1.0e-03 | graph, cold |" in text
    assert "| npp2048 | split_pipeline | candidate | oom: out of memory |" in text
    note = "gate changed after measuring: the rows carry another gate hash; fused_chunk is a former workload"
    assert f"Note: {note}" in text
    assert verdicts.judge_measured(phases.card("p5"), "h200").verdict.word == "BLOCKED"


def test_table_wraps_and_aligns() -> None:
    text = console.table(("a", "b"), [("one two three", "x"), ("", "y")], (7, 3))
    assert text.splitlines() == ["a        b", "-------  ---", "one two  x", "three", "         y"]


def test_overview_is_one_line_a_verdict_in_110_columns() -> None:
    lines = writeup.overview(JUDGEMENTS).splitlines()
    assert max(map(len, lines)) <= 110
    shown = lines[2 : 2 + len(JUDGEMENTS)]
    assert [line.split()[0] for line in shown] == [j.phase for j in JUDGEMENTS]
    for j, line in zip(JUDGEMENTS, shown, strict=True):
        assert f" {j.verdict.word} " in line
        assert ("! " in line) == (j.agrees is False)
        assert ('"' in line) == bool(j.source_word)
    assert lines[-1].startswith("! ")
    own = [verdicts.judge_measured(phases.card("q8-paths"), "h200")]
    assert "the source" not in writeup.overview(own)
    assert "!" not in writeup.overview(own)


# Files ----------------------------------------------------------------------------------------------------------------


def told(*arguments: str) -> int:
    return main.main(["write", *arguments])


@pytest.mark.slow
def test_markdown_names_figures_that_lie_beside_it(tmp_path: Path) -> None:
    assert told("p5-kernel", "--out", str(tmp_path / "note.md")) == 0
    text = (tmp_path / "note.md").read_text(encoding="utf-8")
    drawn = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert drawn == ["note-arms.svg", "note-roofline.svg", "note-breakdown.svg"]
    assert all((tmp_path / name).read_text(encoding="utf-8").lstrip().startswith("<?xml") for name in drawn)
    for part in (
        "| control |",
        "| candidate |",
        "51.4\N{NO-BREAK SPACE}%",
        "- driver: 580.159.04",
        "lab measure p5-kernel",
        "profiles/h200/p5-kernel/",
        "recorded on gb10: NO-GO",
    ):
        assert part in text
    assert "\n\n\n" not in text
    widths = {line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("| ✓")}
    assert widths == {7}


def test_html_holds_everything(tmp_path: Path) -> None:
    assert told("p5-kernel", "--format", "html", "--out", str(tmp_path / "note")) == 0
    page = Page(tmp_path / "note")
    assert [load[:22] for load in page.loads] == ["data:image/svg+xml;bas"] * 3
    assert page.links == []
    assert page.silent == []
    assert page.tags.count("style") == 1


def test_recorded_and_unmeasured_cards_have_a_writeup_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert told("p1", "--format", "md") == 0
    text = capsys.readouterr().out
    assert "which we read as LANDED; our word differs." in text or "We read the source as LANDED" in text
    assert "LocalAI paged notes" in text
    assert all(f"| {i} |" in text for case in phases.card("p1").recorded for i in case.figures)
    assert "![" not in text
    assert told("p6-room", "--format", "md") == 0
    assert "Not measured yet" in capsys.readouterr().out


def test_somebodys_own_rows(tmp_path: Path) -> None:
    folder = REPOSITORY / "tests" / "interop"
    rows = [w for arm in ("control", "candidate") for w in ("--rows", f"{arm}={folder / f'llama_bench_{arm}.jsonl'}")]
    assert told(str(folder / "own_ab.toml"), *rows, "--out", str(tmp_path / "own.md")) == 0
    assert "## Imported on" in (tmp_path / "own.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["p5", "--out", "note.doc"], 'lab: note.doc: "doc" is no format of a writeup; end in .md, .html, .pdf'),
        (["p5", "--format", "pdf"], "lab: --format pdf: a PDF is no text; give --out FILE.pdf"),
        (["p55", "--format", "md"], 'no card has the id "p55"'),
        (["p5", "--out", "/no/such/folder/x.html"], "cannot be written (No such file or directory)"),
    ],
)
def test_refusals_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(*arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_pdf_without_its_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    assert told("p5", "--out", str(tmp_path / "p5.pdf")) == 2
    assert "weasyprint is not installed; pip install -e '.[pdf]'" in capsys.readouterr().err
    assert not (tmp_path / "p5.pdf").exists()


# The author's prose ---------------------------------------------------------------------------------------------------


def own_card(tmp_path: Path, prose_text: str) -> Path:
    """p5-kernel's card elsewhere, with prose beside it; its rows stay where they are."""
    path = tmp_path / "p5-kernel.toml"
    path.write_bytes(phases.card("p5-kernel").path.read_bytes())
    path.with_suffix(".md").write_text(prose_text, encoding="utf-8")
    return path


@pytest.mark.slow
def test_prose_that_contradicts_the_rows_is_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = "It takes 201.4 us instead of 414.5 us, 51.4 % less (-51.4 %, at least `7 %` hoped), at 3 TB/s and npl 128."
    path = own_card(tmp_path, right)
    assert told(str(path), "--out", str(tmp_path / "a.html")) == 0
    assert capsys.readouterr().err == ""
    assert "51.4 % less" in (tmp_path / "a.html").read_text(encoding="utf-8")
    own_card(tmp_path, "First line.\n\nIt takes 201.9 us, +51.4 %, or 41 %. <script>alert(1)</script>\n")
    assert told(str(path), "--out", str(tmp_path / "b.html")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is no figure")[0] for line in lines] == [
        f"lab: p5-kernel.md line 3: {number}" for number in ("201.9 us", "+51.4 %", "41 %")
    ]
    assert "the nearest is 201.408 us" in lines[0]
    page = Page(tmp_path / "b.html")
    assert "script" not in page.tags
    assert "201.9 us is no figure of this card" in page.text
