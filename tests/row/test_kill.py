"""The killer test: `kill -9` at random moments, two processes in one folder, a full disk, a read-only folder.

A long measure runs in processes of its own with the backend that does without torch, so that a kill may fall on the
start, on a worker's start, on a comparison or on a write, and a run of 16 comparisons lasts under a second. 8 kills,
200 with KILLS=200 in the environment (`make bench`). A process prints a workload once its rows are safe; after each
kill every workload ever printed must be there, whole, once.
"""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.base import devices
from lab.base.errors import REPOSITORY
from lab.bench import machine, measure
from lab.card import phases
from lab.cli import main
from lab.row import store
from lab.row.records import Measurement, Provenance
from tests.bench import fake_bench
from tests.refused import held, refused

KILLS = int(os.environ.get("KILLS", "8"))
COUNT = 16
MARK = "KILLGATE_TEST_MARK"
H200 = devices.get("h200")


def start(folder: Path, mark: str = "", candidate: str = "faster") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bench.fake_bench", str(folder), str(COUNT), candidate]
    environment = {**os.environ, MARK: mark}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)


def marked(mark: str) -> list[int]:
    """The processes that carry the mark: the one that was started and every worker of it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parts[2]))
        except OSError:
            continue
    return found


def whole(folder: Path) -> list[str]:
    """The workloads of a folder in order; fails unless each has both its rows, next to each other, once."""
    target = folder / "rows.jsonl"
    if not target.exists():
        return []
    assert target.read_bytes().endswith(b"\n")
    rows = store.read(target, Measurement)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    for control, candidate in pairs:
        assert control.workload_id == candidate.workload_id
        assert (control.arm, candidate.arm) == ("control", "candidate")
        assert (control.status, candidate.status) == ("ok", "ok")
        assert control.order == candidate.order  # of one comparison, not of two
    done = [control.workload_id for control, _ in pairs]
    assert len(set(done)) == len(done)
    return done


@pytest.mark.skipif(sys.platform != "linux", reason="looks for surviving workers in /proc")
@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    chosen = random.Random(int(os.environ.get("KILL_SEED", "20261121")))
    span_s = run_to_end(tmp_path / "rehearsal" / "run")
    number, folder, bytes_before = 0, tmp_path / "0" / "run", b""
    safe: list[str] = []
    cut_short, finished = 0, 0
    for kill in range(4 * KILLS):
        if kill >= KILLS and cut_short >= KILLS // 4:  # a machine that was busy at the rehearsal takes more
            break
        process = start(folder, mark=f"{os.getpid()}-{kill}")
        time.sleep(chosen.uniform(0.0, 1.1 * span_s))
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
        until = time.monotonic() + 3.0
        while marked(f"{os.getpid()}-{kill}") and time.monotonic() < until:
            time.sleep(0.01)
        assert marked(f"{os.getpid()}-{kill}") == [], "a worker outlived its parent"
        done = whole(folder)
        # Nothing that was ever said to be safe is lost, nothing is repeated, and what was there was not touched.
        assert done[: len(safe)] == safe
        assert done[len(safe) : len(safe) + len(said.split())] == said.split()
        assert len(done) <= len(safe) + len(said.split()) + 1  # the one that was safe and not yet said
        content = (folder / "rows.jsonl").read_bytes() if done else b""
        assert content.startswith(bytes_before)
        cut_short += process.returncode == -signal.SIGKILL and 0 < len(done) < COUNT
        safe, bytes_before = done, content
        if len(done) == COUNT:
            finished += 1
            number, folder, safe, bytes_before = number + 1, tmp_path / str(number + 1) / "run", [], b""
    assert cut_short >= KILLS // 4, "the kills missed the measuring"
    run_to_end(folder)
    assert sorted(whole(folder)) == [f"w{i:02}" for i in range(COUNT)]
    assert (folder / "rows.jsonl").read_bytes().startswith(bytes_before)
    for run in tmp_path.glob("*/run"):  # and no leftovers of half writes, once somebody has written again
        assert {p.name for p in run.iterdir()} <= {".lock", "rows.jsonl"} or len(whole(run)) < COUNT


def run_to_end(folder: Path) -> float:
    """Seconds that a run without a kill takes."""
    began = time.monotonic()
    with start(folder) as process:
        assert process.wait(timeout=60) == 0
    return time.monotonic() - began


def test_rows_that_a_killed_writer_left_half_are_swept_away(tmp_path: Path) -> None:
    """What `kill -9` leaves between the temporary file and its renaming."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".dead.part").write_text('{"schema": 1, "dev')
    item = measure_toy(tmp_path, folder, 1)
    assert item == ["w00"]
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "rows.jsonl"]


@pytest.mark.slow
def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    """Both write whole comparisons; what one finished before the other came to it is not repeated."""
    folder = tmp_path / "run"
    processes = [start(folder) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    rows = store.read(folder / "rows.jsonl", Measurement)
    assert len(rows) == 2 * sum(map(len, said))
    for control, candidate in zip(rows[::2], rows[1::2], strict=True):
        assert (control.workload_id, control.order) == (candidate.workload_id, candidate.order)
        assert (control.arm, candidate.arm) == ("control", "candidate")
    assert {row.workload_id for row in rows} == {f"w{i:02}" for i in range(COUNT)}
    run_to_end(folder)
    assert len(store.read(folder / "rows.jsonl", Measurement)) == len(rows)


# The disk ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bench.use(monkeypatch)
    monkeypatch.setattr(machine, "provenance", lambda: Provenance(commit="0"))


def measure_toy(tmp_path: Path, folder: Path, count: int) -> list[str]:
    """Measure the first `count` workloads in this process; those whose rows were reported safe."""
    with pytest.MonkeyPatch.context() as patch:
        fake_bench.use(patch)
        patch.setattr(machine, "provenance", lambda: Provenance(commit="0"))
        card = fake_bench.card(tmp_path, tuple(f"w{i:02}" for i in range(COUNT)))
        settings = measure.Settings(seconds=0.0, placements=1, processes=1, backend="tests.bench.fake_bench:quick")
        return [rows[0].workload_id for rows in measure.measure(measure.plan(card)[:count], settings, folder, H200)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB, which holds about eight comparisons and their copy; needs root on Linux."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small tmpfs here, which needs root on Linux ({error})")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, capture_output=True)


@pytest.mark.usefixtures("toy")
@pytest.mark.slow
def test_full_disk(tmp_path: Path, small_disk: Path) -> None:
    with refused("", "No space left on device", remedy="free space"):
        measure_toy(tmp_path, small_disk / "run", COUNT)
    done = whole(small_disk / "run")
    assert 2 < len(done) < COUNT
    assert {p.name for p in (small_disk / "run").iterdir()} == {".lock", "rows.jsonl"}
    remount(small_disk, "size=16m")
    assert done + measure_toy(tmp_path, small_disk / "run", COUNT) == [f"w{i:02}" for i in range(COUNT)]
    assert len(whole(small_disk / "run")) == COUNT


@pytest.mark.usefixtures("toy")
def test_read_only_disk(tmp_path: Path, small_disk: Path) -> None:
    assert measure_toy(tmp_path, small_disk / "run", 2) == ["w00", "w01"]
    before = (small_disk / "run" / "rows.jsonl").read_bytes()
    remount(small_disk, "ro")
    for folder in (small_disk / "run", small_disk / "new"):
        with refused(folder.name, "Read-only file system", remedy="permissions"):
            measure_toy(tmp_path, folder, 3)
    remount(small_disk, "rw")
    assert (small_disk / "run" / "rows.jsonl").read_bytes() == before
    assert measure_toy(tmp_path, small_disk / "run", 3) == ["w02"]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_disk_that_fails_is_noticed_before_anything_is_measured(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no file system can be mounted: the call that fails is replaced. One line, exit 2, nothing started."""
    card = fake_bench.card(tmp_path, ("w00",))

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(phases, "card", lambda name: card)
    monkeypatch.setattr(measure, "require_gpu", lambda: H200)
    monkeypatch.setattr(store, "FOLDER", tmp_path / "profiles")
    monkeypatch.setattr(measure, "compare", lambda *_: pytest.fail("GPU time was spent on rows that cannot be kept"))
    monkeypatch.setattr(store.tempfile, "NamedTemporaryFile", fail)
    assert main.main(["measure", "toy"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    held(captured.err, "", os.strerror(code))


@pytest.mark.usefixtures("toy")
def test_write_that_fails_after_measuring_loses_nothing_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_toy(tmp_path, tmp_path / "run", 2) == ["w00", "w01"]
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()

    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "replace", fail)
        with refused("rows.jsonl", "No space left on device"):
            measure_toy(tmp_path, tmp_path / "run", 4)
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before
    assert measure_toy(tmp_path, tmp_path / "run", 4) == ["w02", "w03"]
