"""`lab rows --verify`: what profiles/ holds is sound, and each forgery of it is seen."""

import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lab.base import files
from lab.cli import main
from lab.row import samples, store, verify
from lab.row.records import Clocks, Measurement
from tests.row.made import measurement

SHAPE = (8, 5, 10)
CLOCKS = (Clocks("nvml", 1980, 3201, ""),)
MADE = {
    "gpu": "NVIDIA H200",
    "gpu_id": "0a1b2c3d",
    "driver": "580.159",
    "commit": "abc",
    "timer": "graph",
    "l2": "cold",
}


def arm(role: str, name: str, us: float) -> Measurement:
    chosen = random.Random(name)
    times = [samples.encode([chosen.gauss(us, us / 100) for _ in range(8 * 5 * 10)]) for _ in range(2)]
    return measurement(
        **MADE, arm=role, name=name, flops=1e9, bytes=1e6, pipe="bf16", rest=0.0, calls=9, started="2026-11-23",
        timed_against="fused", order=["fused tensor_core_kernel library_kernel control again"] * 40, clocks=CLOCKS,
        placements=8, shape=SHAPE, samples=times[0], again_samples=times[1] if role == "control" else None,
    )  # fmt: skip


ARMS = [
    arm("control", "fused", 100.0),
    arm("candidate", "tensor_core_kernel", 80.0),
    arm("peer", "library_kernel", 90.0),
]


def written(folder: Path, rows: list[Measurement]) -> Path:
    return store.append_all(folder / "h200" / "toy" / "r1", rows)


def wrong(folder: Path) -> str:
    return "\n".join(verify.verify(folder).wrong)


def test_everything_committed_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main.main(["rows", "--verify", "--json"]) == 0
    assert time.process_time() - began < 5
    report = json.loads(capsys.readouterr().out)
    assert (report["wrong"], report["rows"] > 4000, report["files"] > 250) == ([], True, True)
    # `lab rows --pack` makes room.
    assert sum(path.stat().st_size for path in store.FOLDER.rglob("*") if path.is_file()) < 25e6


def test_a_sound_comparison_is_small(tmp_path: Path) -> None:
    path = written(tmp_path, ARMS)
    assert path.stat().st_size < 40_000
    written(tmp_path, [replace(row, workload_id="t64") for row in ARMS])
    report = verify.verify(tmp_path)
    assert (report.wrong, report.files, report.rows, report.unchained) == ((), 1, 6, 0)


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    **{key: ({key: "other"}, key) for key in ("gpu_id", "driver", "commit", "timer", "l2", "gpu", "timed_against")},
    "device": ({"device": "gb10"}, "gb10"),
    "run": ({"run": "r2"}, "r2"),
    "rest": ({"rest": 4.0}, "rest"),
    "clocks": ({"clocks": ()}, "clocks"),
    "flops": ({"flops": 1.0}, "work"),
    "order": ({"order": ("fused",)}, "order"),
    "alone": ({"started": "2026-11-24"}, "second self"),
    "no samples": ({"samples": None, "shape": None, "placements": 1}, "no samples"),
    "fewer": ({"samples": samples.encode([80.0] * 10), "shape": (1, 1, 10), "placements": 1}, "blocks"),
    "twice": ({"name": "library_kernel"}, "twice"),
    "swapped": ({"arm": "control"}, "control"),
}


@pytest.mark.parametrize("name", FORGED)
def test_an_arm_of_another_comparison_is_seen(name: str, tmp_path: Path) -> None:
    """Though its hash was made anew."""
    change, word = FORGED[name]
    written(tmp_path, [ARMS[0], replace(ARMS[1], **change), ARMS[2]])
    assert word in wrong(tmp_path)


def test_a_control_without_its_second_self_is_seen(tmp_path: Path) -> None:
    written(tmp_path, [replace(ARMS[0], again_samples=None), *ARMS[1:]])
    assert "second self" in wrong(tmp_path)


def test_beside_a_wrong_control_the_other_arms_are_sound(tmp_path: Path) -> None:
    """It keeps no number, and its second self's goes with it."""
    untimed = {"samples": None, "again_samples": None, "shape": None, "placements": 1, "order": (), "clocks": ()}
    control = replace(ARMS[0], status="incorrect", message="y: relative error 1", timed_against="", **untimed)
    written(tmp_path, [control, *ARMS[1:]])
    assert wrong(tmp_path) == ""


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_line_that_was_changed_or_taken_out_is_seen(line: int, tmp_path: Path) -> None:
    path = written(tmp_path, ARMS)
    lines = path.read_text().splitlines()
    text = lines[line - 1].replace('"seed":', '"seed" :').replace("abc", "abd")
    path.write_text("\n".join((*lines[: line - 1], text, *lines[line:], "")))
    assert f"rows.jsonl line {line}: its hash" in wrong(tmp_path)
    path.write_text("\n".join((*lines[: line - 1], lines[line - 1][:-27] + "}", *lines[line:], "")))
    assert f"rows.jsonl line {line}: " in wrong(tmp_path)
    path.write_text("\n".join((*lines[: line - 1], *lines[line:], "")))
    assert ("its hash" in wrong(tmp_path)) == (line < 3)  # version control knows that the last one is gone


OLD = "h200/lp11-kernel/2026-11-21T010306Z/rows.jsonl"


def first(key: str, make: Callable[[Any], Any]) -> Callable[[list[Any]], None]:
    def edit(rows: list[Any]) -> None:
        rows[0][key] = make(rows[0][key])

    return edit


def swap(rows: list[Any]) -> None:
    rows[0]["arm"], rows[1]["arm"] = rows[1]["arm"], rows[0]["arm"]


EDITS: dict[str, tuple[Callable[[list[Any]], None], str]] = {
    "halved blocks": (first("blocks_us", lambda held: [b / 2 for b in held]), "blocks are not"),
    "halved second self": (first("again_blocks_us", lambda held: [b / 2 for b in held]), "blocks are not"),
    "halved median": (first("median_us", lambda held: held / 2), "median_us"),
    "no drift": (first("drift_pct", lambda held: held + 1), "drift_pct"),
    "no blocks": (first("blocks_us", lambda held: None), "no blocks"),
    "one block": (first("blocks_us", lambda held: held[:1]), "blocks"),
    "a negative block": (first("blocks_us", lambda held: [-held[0], *held[1:]]), "blocks_us"),
    "a zero sample": (first("samples_us", lambda held: [0.0, *held[1:]]), "samples_us"),
    "no noise": (first("aa_pct", lambda held: 0.0), "aa_pct"),
    "no aa": (first("aa_pct", lambda held: None), "aa_pct"),
    "zero flops": (first("flops", lambda held: 0.0), "flops"),
    "swapped": (swap, "control"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_an_old_row_is_seen_twice(name: str, tmp_path: Path) -> None:
    """By the digest of its file, and, where that is made anew, by what the row says beside its samples."""
    edit, word = EDITS[name]
    path = tmp_path / OLD
    path.parent.mkdir(parents=True)
    path.write_bytes(files.read_packed(store.FOLDER / (OLD + store.PACKED)))

    def pin() -> None:
        (tmp_path / verify.PINS).write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {OLD}\n")

    pin()
    assert (wrong(tmp_path), verify.verify(tmp_path).unchained) == ("", 1)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    edit(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verify.PINS in wrong(tmp_path)
    pin()
    assert word in wrong(tmp_path)


def test_a_file_that_nobody_pinned_or_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, ARMS)
    text = "".join(store.parted(line)[0].decode() + "\n" for line in path.read_bytes().splitlines())
    path.write_text(text)
    assert "unchained" in wrong(tmp_path)
    (tmp_path / verify.PINS).write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  h200/toy/r1/rows.jsonl\n")
    assert wrong(tmp_path) == ""
    written(tmp_path, [replace(row, workload_id="t64") for row in ARMS])  # a run that is resumed is chained from there
    assert wrong(tmp_path) == ""
    path.write_text(path.read_text().replace('"commit":"abc"', '"commit":"abd"', 1))
    assert "unchained" in wrong(tmp_path)
    path.unlink()
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    assert main.main(["rows", "--verify"]) == 1
    assert "r1/rows.jsonl line 1: is gone" in capsys.readouterr().out
