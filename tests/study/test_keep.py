"""`lab judge --rows --keep`: readings of somebody's own files stay in profiles/, and are judged from there."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.base.errors import BadInput
from lab.card import phases
from lab.cli import main
from lab.judge import verdicts
from lab.row import store, verify
from lab.row.records import Kept
from lab.study.own import verdict
from lab.write import pages, writeup

CARD = "lp13-logits"
HEAD = "metric,value,unit,workload,lever,model,gpu,build\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path / "profiles")


def tables(folder: Path, kl: float, gpu: str = "NVIDIA H200") -> list[str]:
    """The `--rows` of two arms, the candidate's divergence being kl of the control's."""
    given = []
    for arm, times in (("control", 1.0), ("candidate", kl)):
        lines = [f"kl,{0.002 * times},kld,text", "answers_right,100,%,code", "answers_right,93.75,%,gap128"]
        made = folder / f"{arm}.csv"
        made.write_text(HEAD + "".join(f"{line},{arm},tiny.npz,{gpu},torch 2\n" for line in lines))
        given.append(f"{arm}={made}")
    return given


def keep(given: list[str], *more: str) -> int:
    return main.main(["judge", CARD, "--rows", given[0], "--rows", given[1], "--keep", *more])


def test_what_is_kept_is_judged_as_it_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (kl, word) in enumerate(((1.1, "GO"), (1.6, "PARTIAL")), start=1):
        given = tables(tmp_path, kl)
        assert keep(given) == 0
        assert "readings.jsonl" in capsys.readouterr().err
        read = verdict.judge(phases.card(CARD), given).judgement
        kept = verdicts.judge_measured(phases.card(CARD), "h200")  # the newest run
        assert kept.verdict.word == read.verdict.word == word
        assert (kept.verdict.reason, kept.evidence, kept.device) == (read.verdict.reason, "imported", "h200")
        assert "control.csv, candidate.csv (NVIDIA H200, tiny.npz, torch 2)" in kept.note
        assert kept.note.count("do not show how runs vary") == 1, "one note for all workloads"
        assert "text, code, gap128: 1 repetition" in kept.note
        assert len(store.kept(Kept, "h200", CARD)) == number
    assert store.measured_devices(CARD) == ["h200"]
    report = verify.verify(tmp_path / "profiles")
    assert (report.wrong, report.files) == ((), 2)


def test_the_board_and_the_page_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["judge", CARD]) == 0
    assert "no recorded evidence" in capsys.readouterr().out
    keep(tables(tmp_path, 1.1))
    capsys.readouterr()
    assert main.main(["judge", CARD, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["evidence"], told["device"]) == ("GO", "imported", "h200")
    judged = pages.judged([phases.card(CARD)])
    text, flagged = writeup.made(pages.page_of(phases.card(CARD), judged), "md", None)
    assert flagged == []
    assert f"lab judge {CARD} --evidence measured" in str(text)
    assert "imported on h200" in writeup.counts(judged)


def test_a_gate_that_moved_since_is_said(tmp_path: Path) -> None:
    keep(tables(tmp_path, 1.1))
    card = phases.card(CARD)
    (condition, *rest) = card.gate.require
    moved = msgspec.structs.replace(condition, threshold=5.0)
    gate = msgspec.structs.replace(card.gate, require=(moved, *rest))
    changed = msgspec.structs.replace(card, gate=gate, gate_hash="0" * 12)
    assert verdicts.judge_measured(card, "h200").verdict.word == "GO"
    found = verdicts.judge_measured(changed, "h200")
    assert found.verdict.word != "GO"
    assert "gate changed since" in found.note


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no GPU": ({"gpu": ""}, ("name no GPU", "--device")),
    "another GPU": ({"gpu": "NVIDIA H2000"}, ("H2000",)),
}


@pytest.mark.parametrize(("given", "held"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], held: tuple[str, ...]
) -> None:
    assert keep(tables(tmp_path, 1.1, **given)) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in held), said
    assert not list((tmp_path / "profiles").rglob("*.jsonl"))


def test_a_card_of_a_family_is_measured_instead(tmp_path: Path) -> None:
    outcome = verdict.judge(phases.card("w4a16-decode"), tables(tmp_path, 1.1))
    with pytest.raises(BadInput, match="lab measure w4a16-decode"):
        verdict.keep(outcome)


def test_a_reading_without_a_figure_is_no_record(tmp_path: Path) -> None:
    keep(tables(tmp_path, 1.1))
    (kept, *_), *_ = store.kept(Kept, "h200", CARD)
    for wrong in ({"control": None, "candidate": None}, {"unit": ""}):
        bad = msgspec.structs.replace(kept, reading=msgspec.structs.replace(kept.reading, **wrong))
        with pytest.raises(BadInput, match="lab judge --rows"):
            store.append_all(tmp_path / "profiles/h200" / CARD / "2026-01-01T000000Z", [bad])
