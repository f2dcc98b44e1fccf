"""`lab measure` as a command: what it prints where, its exit codes, --out, --resume, --budget and --json.

The machine says it is an H200, the family is the toy of tests/bench/fake_bench.py, the workers are real processes.
"""

import functools
import json
import re
import sys
from pathlib import Path

import pytest
from msgspec import structs

from lab.base import devices, progress
from lab.bench import machine, measure
from lab.bench.measure import Settings
from lab.card import phases
from lab.check import families
from lab.cli import main
from lab.row import store
from lab.row.records import Measurement, Provenance
from tests.bench import fake_bench
from tests.refused import held

H200 = devices.get("h200")
QUICK = Settings(seconds=0.0, placements=1, processes=1, backend="tests.bench.fake_bench:quick")
SMALL = ("w00", "w01", "w02", "w03")


def without_times(said: str) -> str:
    """But for what each comparison took."""
    return "".join(line for line in said.splitlines(keepends=True) if ": took " not in line)


def rows_in(folder: Path) -> int:
    return len(store.read(folder / "rows.jsonl", Measurement))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`lab measure toy` on a machine that says it is an H200; the folder that its rows go to by default."""
    fake_bench.use(monkeypatch)
    monkeypatch.setattr(store, "FOLDER", tmp_path / "profiles")
    monkeypatch.setattr(machine, "provenance", lambda: Provenance(commit="0"))
    card = fake_bench.card(tmp_path, SMALL, candidate="faster")
    monkeypatch.setattr(phases, "card", lambda name: card)
    monkeypatch.setattr(measure, "require_gpu", lambda: H200)
    monkeypatch.setattr(measure, "Settings", functools.partial(Settings, backend=QUICK.backend))
    return tmp_path / "profiles" / "h200" / "toy"


def test_command(command: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["measure", "toy", "--seconds", "0"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 8
    assert captured.out.startswith("toy w00 control plain: ")
    assert [re.sub(r" \d.*", "", line) for line in captured.err.splitlines()] == [f"toy {w}: took" for w in SMALL]
    assert re.search(r"took \d+\.\d s: start \d+\.\d, check \d+\.\d, prepare ", captured.err)
    (folder,) = command.iterdir()
    assert rows_in(folder) == 8
    assert main.main(["measure", "toy", "--seconds", "0", "--resume"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("already measured in this run") == 4
    assert main.main(["measure", "toy", "--seconds", "0", "--resume", folder.name, "--timer", "events"]) == 0
    assert rows_in(folder) == 16


def test_what_a_card_pins_is_not_measured_otherwise(
    command: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = structs.replace(phases.card("toy"), measure=phases.Protocol(l2="cold", rest=0.5))
    monkeypatch.setattr(phases, "card", lambda name: pinned)
    assert main.main(["measure", "toy", "--seconds", "0", "--rest", "0"]) == 2
    held(capsys.readouterr().err, "toy.toml", "rest = 0.5", "--rest")
    assert not command.exists()
    for given in ([], ["--rest", "0.5"]):
        assert main.main(["measure", "toy", "--seconds", "0", "--workload", "w00", *given]) == 0
    assert {row.rest for path in command.rglob("rows.jsonl") for row in store.read(path, Measurement)} == {0.5}


def test_all_cards_are_measured_as_each_pins_its_protocol(
    command: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = phases.card("toy")
    pinned = structs.replace(toy, id="pinned", measure=phases.Protocol(l2="warm", rest=0.5))
    every = [toy, pinned, structs.replace(toy, id="told", family=""), structs.replace(toy, id="gone", workloads=("x",))]
    monkeypatch.setattr(phases, "cards", lambda: {card.id: card for card in every})
    assert main.main(["measure", "--all", "--seconds", "0"]) == 0
    held(without_times(capsys.readouterr().err), "gone", "left out", '"x"')
    rows = store.rows()
    assert {(row.phase, row.l2, row.rest) for row in rows} == {("toy", "cold", 0.0), ("pinned", "warm", 0.5)}
    assert len(rows) == 2 * 2 * len(SMALL)
    assert main.main(["measure", "--all", "--seconds", "0", "--workload", "nosuch"]) == 2
    held(capsys.readouterr().err, "--workload", '"nosuch"')


def test_command_out_and_json(command: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "elsewhere"
    arguments = ["measure", "toy", "--seconds", "0", "--out", str(out), "--json"]
    assert main.main([*arguments, "--workload", "w02"]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert [(r["workload_id"], r["arm"], r["run"]) for r in printed] == [
        ("w02", "control", "elsewhere"),
        ("w02", "candidate", "elsewhere"),
    ]
    assert not any(key.endswith("samples_us") for row in printed for key in row)
    assert not command.exists()
    assert main.main(arguments) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 6  # the folder holds one already
    assert without_times(captured.err) == "toy w02: already measured in this run\n"


def test_command_measures_only_what_is_named_or_missing(
    command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["measure", "toy", "--seconds", "0", "--workload", "w00", "--workload", "w02"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["w00", "w00", "w02", "w02"]
    assert main.main(["measure", "toy", "--seconds", "0", "--workload", "w00", "--workload", "w20"]) == 2
    held(capsys.readouterr().err, "--workload", '"w20"', '"w0')
    assert main.main(["measure", "toy", "--seconds", "0", "--missing"]) == 0
    assert {line.split()[1] for line in capsys.readouterr().out.splitlines()} == {"w01", "w03"}
    assert main.main(["measure", "toy", "--seconds", "0", "--missing"]) == 0
    assert capsys.readouterr().out == ""
    assert main.main(["measure", "toy", "--seconds", "0", "--missing", "--rest", "0.5", "--workload", "w01"]) == 0
    assert {line.split()[1] for line in capsys.readouterr().out.splitlines()} == {"w01"}
    # More placements, another gate, or another launch, is another question: everything is missing again.
    present = phases.card("toy")
    for placements, left in ((8, set()), (9, set(SMALL))):
        found = measure.missing(measure.plan(present), "h200", measure.Settings(placements=placements))
        assert {item.workload.id for item in found} == left
    path = tmp_path / "tighter" / "toy.toml"
    path.parent.mkdir()
    path.write_text((tmp_path / "toy.toml").read_text().replace("threshold = 0", "threshold = -7"))
    tighter = phases.load(path)
    assert tighter.gate_hash != present.gate_hash
    for card, launch in ((tighter, ""), (present, "former kernel")):
        monkeypatch.setattr(phases, "card", lambda name, card=card: card)
        monkeypatch.setattr(families, "former", lambda row, launch=launch: launch)
        assert {i.workload.id for i in measure.missing(measure.plan(card), "h200", measure.Settings())} == set(SMALL)


def test_command_passes_rest_on_and_refuses_a_wrong_one(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["measure", "toy", "--seconds", "0", "--workload", "w00", "--rest", "0.5"]) == 0
    (folder,) = command.iterdir()
    assert {r.rest for r in store.read(folder / "rows.jsonl", Measurement)} == {0.5}
    capsys.readouterr()
    for wrong in ("-1", "40", "nan"):
        assert main.main(["measure", "toy", "--rest", wrong]) == 2
        held(capsys.readouterr().err, "--rest", wrong.lstrip("-"))


def test_command_says_what_the_budget_left_out(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["measure", "toy", "--budget", "1s"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [f"toy {w}: left out, the budget of 1 s is spent" for w in SMALL]


def test_command_exits_1_when_an_arm_failed(
    command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = fake_bench.card(tmp_path, SMALL[:1], candidate="exits")
    monkeypatch.setattr(phases, "card", lambda name: card)
    assert main.main(["measure", "toy", "--seconds", "0"]) == 1
    captured = capsys.readouterr()
    assert "toy w00 candidate exits: error: the measuring process died of exit code 3 in check" in captured.out
    assert "toy w00: exits: the measuring process died of exit code 3 in check" in captured.err


def test_command_refuses(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, where, words in (
        (["--budget", "8"], "--budget", ['"8"', "8m"]),
        (["--resume"], "--resume", ["toy", "h200"]),
        (["--resume", "nosuch"], "--resume", ["nosuch", "toy", "h200"]),
        (["--resume", "--out", "x"], "--resume", ["--out"]),
        (["other", "--resume"], "--resume", ["one phase"]),
        (["--workload", "nosuch"], "--workload", ['"nosuch"', "w00"]),
    ):
        assert main.main(["measure", "toy", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("lab: ")
        held(captured.err, where, *words)


# Progress ------------------------------------------------------------------------------------------------------------


def test_log_is_quiet_but_for_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown(2) as shown:
        for line in ("p a: check plain", "p a: time plain", "p a: recheck plain"):
            shown.tell(line)
        shown.tell("p a: x: the measuring process died of SIGKILL in check")
        shown.tell("p a: y: no answer for 60 s in time")
        shown.tell("p b: left out, the budget of 60 s is spent")
        shown.tell("p c: already measured in this run")
        shown.advance()
        shown.result("p a control plain: 1.00 us")
    captured = capsys.readouterr()
    assert captured.out == "p a control plain: 1.00 us\n"
    assert [line[:5] for line in captured.err.splitlines()] == ["p a: ", "p a: ", "p b: ", "p c: "]
    with progress.shown(2, quiet=True) as shown:
        shown.result("p a control plain: 1.00 us")
    assert capsys.readouterr().out == ""


def test_terminal_has_a_bar_with_both_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    with progress.shown(2) as shown:
        shown.tell("p a: check plain")
        shown.advance()
        shown.result("p a control plain: 1.00 us")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "p a control plain: 1.00 us" in captured.err
    assert "p a: check plain" in captured.err
    assert "1/2" in captured.err
    assert len(set(re.findall(r"\d:\d\d:\d\d|-:--:--", captured.err))) >= 1
