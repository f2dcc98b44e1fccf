"""Rows of runs that are over, packed: the same lines to every reader, to who appends and to `lab rows --verify`."""

import gzip
from pathlib import Path

import pytest

from lab.bench import measure
from lab.cli import main
from lab.row import store, verify
from lab.row.records import Measurement
from tests.refused import refused
from tests.row.made import changed, measurement

ROW = measurement(phase="p5", run="r1", median_us=12.25, samples_us=[12.0, 12.25, 12.5])
OTHER = changed(ROW, arm="candidate", name="other")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    folder = tmp_path / "h200" / "p5" / "r1"
    store.append_all(folder, [ROW, OTHER])
    return folder


def test_every_reader_takes_packed_rows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "rows.jsonl").read_bytes()
    assert main.main(["rows", "--pack"]) == 0
    assert f"1 files packed: {len(lines):,} bytes now " in capsys.readouterr().out
    assert sorted(p.name for p in run.iterdir()) == [".lock", "rows.jsonl.gz"]
    assert gzip.decompress((run / "rows.jsonl.gz").read_bytes()) == lines
    assert store.rows(phase="p5") == [ROW, OTHER]
    assert store.measured_devices("p5") == ["h200"]
    assert measure.run_to_resume("h200", "p5") == run
    assert len(measure.completed(run)) == 1
    assert main.main(["rows", "--pack"]) == 0
    assert "0 files packed" in capsys.readouterr().out


def test_packing_leaves_rows_of_another_folder_alone(run: Path, tmp_path: Path) -> None:
    cards = tmp_path / "cards"
    store.append_all(cards / "profiles" / "h200" / "own" / "r1", [changed(ROW, phase="own")])
    assert main.main(["rows", "--pack", "--cards", str(cards)]) == 0
    assert (run / "rows.jsonl").exists()
    assert [p.name for p in cards.rglob("rows.jsonl*")] == ["rows.jsonl.gz"]


def test_appending_unpacks(run: Path) -> None:
    lines = (run / "rows.jsonl").read_bytes()
    store.pack(run / "rows.jsonl")
    store.append(run, ROW)
    assert sorted(p.name for p in run.iterdir()) == [".lock", "rows.jsonl"]
    assert (run / "rows.jsonl").read_bytes().startswith(lines)
    assert store.rows() == [ROW, OTHER, ROW]
    assert not any("hash" in line for line in verify.verify().wrong)


def test_rows_that_lie_there_in_both_forms_count_once(run: Path) -> None:
    """As after a process that died while it packed."""
    lines = (run / "rows.jsonl").read_bytes()
    store.pack(run / "rows.jsonl")
    (run / "rows.jsonl").write_bytes(lines)
    assert store.rows() == [ROW, OTHER]
    assert store.measured() == [run / "rows.jsonl"]


def test_a_forged_line_is_seen_in_a_packed_file(run: Path) -> None:
    packed = store.pack(run / "rows.jsonl")
    packed.write_bytes(gzip.compress(gzip.decompress(packed.read_bytes()).replace(b"12.25", b"11.25")))
    assert "rows.jsonl.gz line 1: its hash does not follow" in "\n".join(verify.verify().wrong)


def test_a_packed_file_that_is_cut_off_is_refused(run: Path) -> None:
    packed = store.pack(run / "rows.jsonl")
    packed.write_bytes(packed.read_bytes()[:-9])
    with refused("rows.jsonl.gz", "not complete gzip"):
        store.read(packed, Measurement)


def test_a_packed_file_that_unpacks_to_too_much_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = store.pack(run / "rows.jsonl")
    monkeypatch.setattr(store, "LARGEST", packed.stat().st_size)
    with refused("rows.jsonl.gz", f"more than {packed.stat().st_size} bytes unpacked"):
        store.read(packed, Measurement)
