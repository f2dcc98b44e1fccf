"""Comparisons on every GPU of a host: each line once, what is cut off comes back, new files are packed."""

import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from lab.base.errors import REPOSITORY
from lab.bench import machine
from lab.row import store
from tests.bench import sweep

FAKE = """
import os, signal, subprocess, sys, time
from pathlib import Path
name, folder = sys.argv[1], Path(sys.argv[2])
if name == "slow": time.sleep(60)
if name == "stuck":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.run(["sleep", "60"])
if name == "refused": sys.exit(2)
if name == "short": print("short w: left out, the budget of 1 s is spent")
folder.mkdir(exist_ok=True)
(folder / ".lock").write_text("")
(folder / f"{name}.jsonl").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
time.sleep(0.3)
"""


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "profiles"
    monkeypatch.setattr(store, "FOLDER", folder)
    monkeypatch.setattr(sweep, "LEAST_S", 0.5)
    monkeypatch.setattr(sweep, "GRACE_S", 0.5)
    monkeypatch.setattr(machine, "gpus", lambda: ["one", "two"])
    monkeypatch.setattr(sweep, "command", lambda line, left_s: [sys.executable, "-c", FAKE, line, str(folder)])
    folder.mkdir()
    (folder / "old.jsonl").write_text("")
    return folder


def test_each_line_is_done_once_on_some_gpu(profiles: Path) -> None:
    assert sweep.sweep(["a", "b", "c", "d"], ["one", "two"], 30) == []
    on = [(profiles / f"{name}.jsonl").read_text() for name in "abcd"]
    assert sorted(set(on)) == ["one", "two"]


def test_what_was_cut_off_comes_back_in_order(
    profiles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked, out = tmp_path / "list", tmp_path / "rows.tar"
    asked.write_text("short\nslow\nrefused\na\nstuck\n\n")
    monkeypatch.setattr(sys, "argv", ["sweep", str(asked), "--seconds", "4", "--out", str(out)])
    began = time.monotonic()
    assert sweep.main() == 1
    assert time.monotonic() - began < 15
    assert asked.read_text() == "short\nslow\nrefused\nstuck\n"
    assert "1 of 5 lines done; 2 new files" in capsys.readouterr().out
    with tarfile.open(out) as tar:
        assert sorted(tar.getnames()) == ["a.jsonl", "short.jsonl"]


def test_a_profiler_that_hangs_does_not_take_the_time_of_what_follows(
    profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "OTHERS", ("slow",))
    monkeypatch.setattr(sweep, "OTHERS_S", 1.0)
    began = time.monotonic()
    assert sweep.sweep(["slow", "a"], ["one"], 30) == ["slow"]
    assert time.monotonic() - began < 15
    assert (profiles / "a.jsonl").exists()


def test_a_list_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.sweep", str(tmp_path / "none"), "--seconds", "1"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (found.returncode, len(found.stderr.splitlines())) == (2, 1)
    assert "none: no such file" in found.stderr


def test_a_line_is_a_command() -> None:
    assert sweep.command("p5 w1 w2", 100.0)[3:] == [
        "measure", "p5", "--workload=w1", "--workload=w2", "--missing", "--budget=75s",
    ]  # fmt: skip
    assert sweep.command("counters p5 w1", 100.0)[3:] == ["counters", "p5", "--workload=w1"]
    assert sweep.command("counters p5 w1 --arm=a", 100.0)[3:] == ["counters", "p5", "--workload=w1", "--arm=a"]


def test_what_has_rows_is_measured_again_with_the_options_of_its_line() -> None:
    asked = sweep.command("again gemm-slices m100_n2048_k7168 --rest=12", 300)
    assert asked[3:] == ["measure", "gemm-slices", "--workload=m100_n2048_k7168", "--rest=12", "--budget=275s"]
    assert "--missing" in sweep.command("gemm-slices m100_n2048_k7168", 300)


def test_what_is_new_is_packed_behind_each_line(
    profiles: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine may go at any time: so far whatever was done is there, and what is under way is asked again."""
    asked, out = tmp_path / "list", tmp_path / "rows.tar"
    asked.write_text("a\nb\nslow\n")
    seen: list[tuple[list[str], str]] = []
    kept = sweep.sweep

    def watched(lines: list[str], gpus: list[str], seconds: float, after: Any) -> list[str]:
        def both(left: list[str]) -> None:
            after(left)
            with tarfile.open(out) as tar:
                seen.append((sorted(tar.getnames()), asked.read_text()))

        return kept(lines, ["one"], seconds, both)

    monkeypatch.setattr(sweep, "sweep", watched)
    monkeypatch.setattr(sys, "argv", ["sweep", str(asked), "--seconds", "4", "--out", str(out)])
    assert sweep.main() == 1
    assert seen[:2] == [(["a.jsonl"], "b\nslow\n"), (["a.jsonl", "b.jsonl"], "slow\n")]
    assert not out.with_suffix(".part").exists()
