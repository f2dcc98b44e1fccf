"""The README's table: what the judge says, a price in accuracy beside the time; the rest of the file is left alone."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from lab.card import phases
from lab.check import families
from lab.cli import main
from lab.judge import verdicts
from lab.row import store
from lab.study import flips
from lab.write import inserts, notes, readme
from tests.refused import refused
from tests.study.test_flips import a_flip

MARKS = "\n".join(readme.MARKS)
families.interpret_on_cpu()


@pytest.fixture(scope="module")
def committed() -> list[flips.Flip]:
    return flips.flips()


def line(flip: flips.Flip) -> str:
    """The line of one pair, "" where it has none."""
    text = readme.written(MARKS, [flip])
    return "".join(text[text.index("|---|") :].splitlines()[1:-1])


def test_it_says_what_the_judge_says(committed: list[flips.Flip]) -> None:
    """Each word and each figure; `lab write --readme` makes it again after a measurement."""
    text = readme.FILE.read_text(encoding="utf-8")
    assert readme.written(text, committed, flips.flips("h100")) == text
    shown = text[text.index(readme.MARKS[0]) : text.index(readme.MARKS[1])]
    for flip in (flip for flip in committed if flip.front and flip.word_here):
        measured = verdicts.judge_measured(phases.card(flip.card), "h200").verdict.word
        assert f"| {measured} (h200" in next(line for line in shown.splitlines() if f"`{flip.card}` |" in line)


def test_a_whole_step_stands_beside_llama_cpps(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [f"decode_q36-27b_npl{n}_ctx1024" for n in (1, 8)]
    rows = {w: min((r for r in store.rows("h200", family="step") if r.workload_id == w and r.time_us),
                   key=lambda r: r.time_us or 0.0) for w in at}  # fmt: skip
    found = [notes.Beside(w, ms, rows[w]) for w, ms in zip(at, (12.26, 27.04), strict=True)]
    said = readme.whole_step()
    assert all(f"{(row.time_us or 0.0) / 1e3:.2f} " in said for row in rows.values())
    assert "12.3 and 27.0" in said
    for some in (found[:1], [found[0], found[1]._replace(ours=None)]):
        monkeypatch.setattr(notes, "beside_llama_cpp", lambda family, device, some=some: some)
        assert readme.whole_step() == ""
    monkeypatch.setattr(notes, "beside_llama_cpp", lambda family, device: found)
    assert readme.whole_step() == said


def test_the_count_of_adversaries_is_of_those_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """README and page count alike: rows stand at more than one commit, and an honest control is no adversary."""
    table = {a["name"] for a in tomllib.loads(inserts.ADVERSARIES.read_text(encoding="utf-8"))["adversary"]}
    rows = [t for t in inserts.trials() if t.name in table]
    assert f"What {len({t.name for t in rows})} adversaries got" in readme.FILE.read_text(encoding="utf-8")
    page = inserts.arena()
    for device, where in (("cpu", "simulated device"), ("cuda", "NVIDIA H200")):
        of = [t for t in rows if t.device == device]
        assert f"{where}: {len(of)} of {len(table)} adversaries, " in page
        for commit, count in Counter(t.commit for t in of).items():
            assert f"{count} at commit {commit}" in page
    monkeypatch.setattr(inserts, "trials", lambda: rows[:1])
    assert readme.written(f"What 7 adversaries got\n{MARKS}", []).startswith("What 1 adversaries got\n")


def test_a_word_of_another_question_and_a_change_of_no_standing_are_left_out() -> None:
    shown = a_flip("GO", "NO-GO", front=True, measured_pct=12.4)
    assert line(shown) == "| LP1 | q | GO (gb10) | NO-GO (h200) | +12 % at `w` | `c` |"
    other = replace(shown, word_here="INVALID", asks_otherwise="there end to end")
    assert line(other) == "| LP1 | q (there end to end) |  | INVALID (h200) |  | `c` |"
    assert line(replace(shown, word_here="", measured_pct=None)).endswith("| not measured yet |  | `c` |")
    assert line(replace(shown, front=False)) == ""
    theirs = [replace(shown, here="h100", word_here=word, measured_pct=-3.0) for word in ("GO", "BLOCKED", "")]
    theirs.insert(1, replace(theirs[0], here="gb10", measured_pct=None))
    cells = ["NO-GO (h200), GO (h100, gb10), BLOCKED (h100)", "+12 % (h200), -3 % (h100) at `w`"]
    assert " +12 %, -3 % at `w` " in readme.written(MARKS, [shown], theirs[:1])
    assert " | ".join(cells) in readme.written(MARKS, [shown], [replace(theirs[0], card="other"), *theirs])
    with refused("README.md", readme.MARKS[0]):
        readme.written("no marks", [])


def test_a_price_in_accuracy_stands_beside_the_time(committed: list[flips.Flip]) -> None:
    flip = next(f for f in committed if f.front and f.card == "q8-paths")
    assert flip.errors[1] > 2 * flip.errors[0]
    assert ", error 0.17 % instead of 3.4 % |" in line(replace(flip, errors=(0.034, 0.0017)))
    for level in ((0.0019, 0.0017), ()):
        assert "error" not in line(replace(flip, errors=level))


def test_the_command_changes_the_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], committed: list[flips.Flip]
) -> None:
    stale = tmp_path / "README.md"
    stale.write_text(f"before\n{readme.MARKS[0]}\nold\n{readme.MARKS[1]}\nafter\n")
    monkeypatch.setattr(readme, "FILE", stale)
    monkeypatch.setattr(readme, "FIGURE", tmp_path / "rivals.svg")
    monkeypatch.setattr(flips, "flips", lambda here="h200": committed if here == "h200" else [])
    assert main.main(["write", "--readme"]) == 0
    text = stale.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "`lp11-kernel`" in text
    assert "old" not in text
    assert readme.FIGURE.exists()
    assert main.main(["write"]) == main.main(["write", "p5", "--readme"]) == 2
    assert "--readme" in capsys.readouterr().err
