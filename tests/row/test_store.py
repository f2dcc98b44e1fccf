"""Measured rows on the disk: whole or not there, whatever fails and whoever dies while writing.

Failures are made: the system calls that `append` relies on are replaced by ones that raise (a full disk, a read-only
folder), and real processes append side by side or are killed. Permissions are not used, because root ignores them.
"""

import base64
import contextlib
import errno
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import replace

from lab.base import files, own
from lab.base.errors import REPOSITORY, BadInput
from lab.bench import machine
from lab.row import samples, store
from lab.row.records import PERFORMANCE, Ceiling, Counter, CrossCheck, Earlier, Measurement, Record, Status
from tests.refused import held, refused
from tests.row import made
from tests.row.made import changed, measurement

ROW = measurement(phase="p5", median_us=12.25, samples_us=[12.0, 12.25, 12.5])
FAILED = changed(ROW, **dict.fromkeys(PERFORMANCE), status="error", message="out of it")
PLAIN: dict[str, Any] = msgspec.to_builtins(ROW)


def rows_of(folder: Path) -> list[Measurement]:
    return store.read(folder / "rows.jsonl", Measurement)


def test_append_keeps_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "h200" / "p5" / "run"
    first = store.append(folder, ROW).read_bytes()
    assert store.append(folder, FAILED).read_bytes().startswith(first)
    assert rows_of(folder) == [ROW, FAILED]
    assert content(folder).startswith(b'{"schema":1,')
    assert (folder / "rows.jsonl").stat().st_mode & 0o777 == 0o644
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "rows.jsonl"]


def test_rows_of_one_call_are_one_step(tmp_path: Path) -> None:
    """All or none: a bad row among good ones, wherever it stands, leaves the file as it was."""
    store.append_all(tmp_path, [ROW, FAILED])
    before = (tmp_path / "rows.jsonl").read_bytes()
    bad, nan = replace(ROW, status="fine"), replace(ROW, samples_us=(float("nan"),))
    for rows in ([bad, ROW], [ROW, bad], [ROW, nan, ROW]):
        with pytest.raises(BadInput):
            store.append_all(tmp_path, rows)
        assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert len(rows_of(tmp_path)) == 2
    assert store.append_all(tmp_path, iter([ROW] * 3)).read_bytes().count(b"\n") == 5


def test_another_kind_has_another_file_and_another_type(tmp_path: Path) -> None:
    ceiling = Ceiling(
        device="h200", name="read", value=4000.0, unit="GB/s", method="m", run="r", started="s", samples=(1.0,)
    )
    path = store.append(tmp_path, ceiling)
    assert (path.name, store.read(path, Ceiling)) == ("ceilings.jsonl", [ceiling])
    with refused("ceilings.jsonl line 1", "unknown key"):
        store.read(path, Measurement)


def test_a_row_of_the_first_schema_stands_beside_new_ones(tmp_path: Path) -> None:
    """Its summary is what it states; that of a later row is computed, to the last bit, from its samples."""
    chosen = random.Random(7)
    times = [chosen.gauss(100.0, 1.0) for _ in range(2 * 3 * 4)]
    new = measurement(
        samples=samples.encode(times), again_samples=samples.encode(times[::-1]), shape=(2, 3, 4), placements=2
    )
    for row in (ROW, new):
        store.append(tmp_path, row)
    old, read = rows_of(tmp_path)
    assert (type(old), old.median_us, old.placements) == (Earlier, 12.25, 1)
    assert (read, read.samples_us, read.again_samples_us) == (new, tuple(times), tuple(times[::-1]))
    block = (statistics.median(times[8:10]) + statistics.median(times[10:12])) / 2
    assert ([len(placement) for placement in read.blocks], read.blocks[0][2]) == ([3, 3], block)
    assert (read.n, read.median_us, read.min_us) == (24, statistics.median(times), min(times))
    assert read.stdev_us == pytest.approx(statistics.stdev(times), rel=1e-12)
    assert read.sd_pct == pytest.approx(
        100 * statistics.stdev(read.blocks_us or ()) / statistics.median(times), rel=1e-12
    )
    assert read.aa_pct == samples.aa_floor_pct(read.blocks_us or (), read.again_blocks_us or ())
    printed = read.to_json()
    assert (printed["samples_us"], printed["blocks_us"], "samples" in printed) == (tuple(times), read.blocks_us, False)
    assert set(printed) == set(old.to_json())
    with refused("here", "schema 3", "2, 1"):
        store.decode(b'{"schema": 3}', Measurement, "here")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"samples": samples.encode([1.0, -1.0])}, "positive"),
        ({"samples": samples.encode([1.0, 0.0])}, "positive"),
        ({"samples": samples.encode([1.0, float("nan")])}, "positive"),
        ({"samples": samples.encode([1.0, float("inf")])}, "positive"),
        ({"again_samples": samples.encode([1.0, -1.0])}, "again_samples"),
        ({"again_samples": samples.encode([1.0])}, "again_samples"),
        ({"samples": samples.encode([1.0])}, "1 samples"),
        ({"samples": samples.encode([])}, "0 samples"),
        ({"samples": "AAAA"}, "base64 of zlib"),
        ({"samples": "\u00e9"}, "base64 of zlib"),
        ({"samples": samples.encode([1.0] * 2)[:-8]}, "samples"),
        ({"samples": base64.b64encode(zlib.compress(b"1234567")).decode()}, "not whole"),
        ({"samples": base64.b64encode(zlib.compress(bytes(samples.MOST_BYTES + 8), 1)).decode()}, "not whole"),
        ({"samples": None}, "shape"),
        ({"shape": None}, "shape"),
        ({"shape": (1, 2, 1)}, "two visits"),
        ({"block_mhz": (1980, 1965)}, "2 clocks and the shape"),
        ({"block_top_mhz": (1980,)}, "1 highest clocks of 0 blocks"),
        ({"block_mhz": (1965,), "block_top_mhz": (1950,)}, "highest clock is below its lowest"),
        ({"placements": 2}, "placements"),
        ({"shape": (1, 0, 2)}, "shape"),
        ({"status": "error"}, '"median_us"'),
    ],
)
def test_samples_that_cannot_be(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    sound = measurement(samples=samples.encode([1.0, 2.0]), shape=(1, 1, 2))
    assert store.append(tmp_path, sound)
    with refused("", word):
        store.append(tmp_path, replace(sound, **change))


def test_a_file_is_read_once_until_somebody_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.append(tmp_path, ROW)
    decoded: list[Any] = []
    decode = store.decode

    def spy(*given: Any) -> Any:
        decoded.append(decode(*given))
        return decoded[-1]

    monkeypatch.setattr(store, "decode", spy)
    assert rows_of(tmp_path) == rows_of(tmp_path) == [ROW]
    assert decoded == [ROW]
    rows_of(tmp_path).clear()  # a list of one's own
    store.append(tmp_path, FAILED)
    assert rows_of(tmp_path) == [ROW, FAILED]
    path.write_bytes(b"")
    assert rows_of(tmp_path) == []


def test_every_committed_record_is_of_its_type_and_loses_nothing() -> None:
    for kind in (Measurement, Ceiling, Counter, CrossCheck):
        paths = sorted(store.FOLDER.glob(f"*/*/*/{kind.FILE}*"))
        assert paths
        for path in paths:
            for line, record in zip(files.read_packed(path).splitlines(), store.read(path, kind), strict=True):
                held, now = json.loads(line), json.loads(json.dumps(Record.to_json(record)))
                held.pop("hash", None)
                assert {key: now[key] for key in held} == held, path


def test_what_a_killed_writer_left_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / ".dead.part").write_text('{"schema": 1, "dev')
    store.append(tmp_path, ROW)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "rows.jsonl"]


def test_folder_is_tried_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.refuse_unwritable(tmp_path / "new" / "run")
    assert [p.name for p in (tmp_path / "new" / "run").iterdir()] == [".lock"]
    (tmp_path / "file").write_text("")
    with refused("file", "File exists", remedy="permissions"):
        store.refuse_unwritable(tmp_path / "file")
    monkeypatch.setattr(store.os, "fsync", fail_with(errno.ENOSPC))
    with refused("run", "No space left on device", remedy="free space"):
        store.refuse_unwritable(tmp_path / "new" / "run")
    assert [p.name for p in (tmp_path / "new" / "run").iterdir()] == [".lock"]


# A row that is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", list(made.ROW))
def test_missing_key(key: str) -> None:
    line = json.dumps({k: v for k, v in PLAIN.items() if k != key}).encode()
    with refused("here", f'"{key}"', remedy=key):
        store.decode(line, Measurement, "here")


def test_bad_row(tmp_path: Path) -> None:
    """Neither written to a new file nor to one that has rows."""
    nan, infinity = float("nan"), float("inf")
    failed = [({"status": s}, s) for s in get_args(Status) if s not in ("ok", "suspect")]
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"status": "fine"}, '"fine"'),
        ({"arm": "rival"}, '"rival"'),
        *[({"median_us": bad}, "median_us") for bad in (nan, infinity, -1.0, 0.0, "12")],
        ({"relative_error": nan}, "relative_error"),
        ({"samples_us": (1.0, nan)}, "samples_us"),
        ({"errors": {"deep": -infinity}}, "errors"),
        *failed,
    )
    for change, word in changes:
        unwritten(tmp_path, replace(ROW, **change), word)
    for field in PERFORMANCE:
        value = (3.0,) if field.endswith("s_us") else 3
        unwritten(tmp_path, replace(FAILED, **{field: value}), f'"{field}"')


def unwritten(folder: Path, row: Measurement, word: str) -> None:
    """Refused with this word, first by a new file and then by one with a row."""
    (folder / "rows.jsonl").unlink(missing_ok=True)
    for _ in range(2):
        before = sorted(p.name for p in folder.iterdir()), content(folder)
        with refused("", word):
            store.append(folder, row)
        assert (sorted(p.name for p in folder.iterdir()), content(folder)) == before
        store.append(folder, ROW)


def content(folder: Path) -> bytes:
    target = folder / "rows.jsonl"
    return target.read_bytes() if target.exists() else b""


# Writing that fails ---------------------------------------------------------------------------------------------------


def fail_with(code: int) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["os.replace", "os.fsync", "os.fdopen", "tempfile.mkstemp", "os.chmod"])
def test_failed_write_leaves_the_old_file(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(tmp_path, ROW)
    before = content(tmp_path)
    module, name = call.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(store, module), name, fail_with(code))
        with refused("rows.jsonl", os.strerror(code), remedy="free space or fix permissions"):
            store.append(tmp_path, FAILED)
    assert content(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "rows.jsonl"]
    store.append(tmp_path, FAILED)
    assert len(rows_of(tmp_path)) == 2


def test_disk_full_in_the_middle_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file object accepts half of the bytes and then the disk is full."""
    store.append(tmp_path, ROW)
    before = content(tmp_path)
    real = os.fdopen

    def half(handle: int, mode: str, **_: Any) -> Any:
        file = real(handle, "wb", buffering=0)
        file_write = file.write

        class Half:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: Any) -> None:
                file.close()

            def write(self, data: str) -> int:
                file_write(data[: len(data) // 2].encode())
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return Half()

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fdopen", half)
        with refused("rows.jsonl", "No space left on device"):
            store.append(tmp_path, ROW)
    assert content(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "rows.jsonl"]


def test_read_only_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", fail_with(errno.EROFS))
    with refused("rows.jsonl", "Read-only file system"):
        store.append(tmp_path / "new", ROW)


def test_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("rows.jsonl", "not written"):
        store.append(tmp_path / "file", ROW)


# Processes ------------------------------------------------------------------------------------------------------------

APPENDER = """
import sys
from pathlib import Path
from msgspec.structs import replace
from lab.row import store
from tests.row.made import measurement
ROW = measurement(phase="p5", median_us=12.25, samples_us=[12.0, 12.25, 12.5])
folder, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
for number in range(count):
    store.append(folder, replace(ROW, name=name, seed=number))
"""


def appender(folder: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", APPENDER, str(folder), name, str(count)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def test_two_processes_lose_no_row(tmp_path: Path) -> None:
    processes = [appender(tmp_path, name, 50) for name in ("one", "two")]
    assert [p.wait(timeout=60) for p in processes] == [0, 0]
    for p in processes:
        assert p.stdout
        p.stdout.close()
    rows = rows_of(tmp_path)
    assert len(rows) == 100
    for name in ("one", "two"):
        assert [r.seed for r in rows if r.name == name] == list(range(50))


@pytest.mark.slow
def test_killed_process_leaves_whole_rows(tmp_path: Path) -> None:
    chosen = random.Random(20261120)
    seen = 0
    for attempt in range(5):
        with appender(tmp_path, f"run{attempt}", 10**6) as process:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            time.sleep(chosen.uniform(0.001, 0.08))
            process.send_signal(signal.SIGKILL)
        rows = rows_of(tmp_path) if content(tmp_path) else []
        assert len(rows) >= seen
        assert [r.seed for r in rows if r.name == f"run{attempt}"] == list(range(len(rows) - seen))
        seen = len(rows)
    assert seen > 4, "nothing was being written when the processes were killed"


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_truncated_last_line(cut: int, tmp_path: Path) -> None:
    for row in (ROW, FAILED):
        path = store.append(tmp_path, row)
    path.write_bytes(path.read_bytes()[: -cut - 1])
    with refused("rows.jsonl line 2", "JSON", remedy="restore"):
        store.read(path, Measurement)
    before = path.read_bytes()
    with refused("rows.jsonl", "last line"):
        store.append(tmp_path, ROW)
    assert path.read_bytes() == before


def test_line_that_cannot_be_read(tmp_path: Path) -> None:
    for line, words in (
        ("[1, 2]", ["object"]),
        ("", ["JSON"]),
        (json.dumps({**PLAIN, "median_us": float("nan")}), ["JSON"]),
        (json.dumps({**PLAIN, "samples_us": [float("inf")]}), ["JSON"]),
        (json.dumps({**PLAIN, "schema": 0}), ["schema 0", "1"]),
        (json.dumps({**PLAIN, "schema": 2}), ['"median_us"']),
        (json.dumps({**PLAIN, "median_su": 1.0}), ['"median_su"']),
        (json.dumps({**PLAIN, "median_us": "12"}), ["median_us = '12'"]),
        (json.dumps({**PLAIN, "status": "eror"}), ['status = "eror"']),
        (json.dumps({"schema": 1, "status": "ok"}), ['"device"']),
        (json.dumps({**msgspec.to_builtins(FAILED), "median_us": 1.0}), ["error", '"median_us"']),
    ):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join((json.dumps(PLAIN), line, json.dumps(PLAIN), "")))
        with refused("rows.jsonl line 2", *words):
            store.read(path, Measurement)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 1, "workload": ' + '{"a": ' * 100_000])
def test_a_line_nested_without_end(text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{text}\n")
    with refused("rows.jsonl line 1", remedy="remove"):
        store.read(tmp_path / "rows.jsonl", Measurement)


def test_rows_are_filtered_and_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    for device, phase, run, started in (
        ("h200", "p5", "d", "2026-11-18"),
        ("h200", "p5", "c", "2026-11-20"),
        ("gb10", "p5", "b", "2026-11-19"),
        ("h200", "p6", "a", "2026-11-21"),
    ):
        made_then = replace(ROW, device=device, run=run, started=started)
        store.append(tmp_path / device / phase / run, made_then)
    assert [r.run for r in store.rows(device="h200", phase="p5")] == ["c", "d"]
    assert [r.run for r in store.rows()] == ["a", "b", "c", "d"]  # whatever a clock that was set back says of them
    assert len(store.rows(phase="p5")) == 3
    assert store.rows(family="kv") == []


def test_provenance_says_nothing_of_person_or_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    facts = msgspec.json.encode(machine.provenance()).decode()
    assert "hunter2" not in facts
    assert str(REPOSITORY) not in facts
    assert '"CUDA_VISIBLE_DEVICES":"0"' in facts


def test_rows_of_one_card_can_be_told_without_its_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, L2_cache_size=1 << 26)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    found = []
    for uuid in ("GPU-5e01-a", "GPU-5e01-a", "GPU-5e01-b", None):
        monkeypatch.setattr(machine, "smi", lambda field, uuid=uuid: uuid if field == "uuid" else "580.95")
        found.append(machine.provenance())
    assert found[0].gpu_id == found[1].gpu_id != found[2].gpu_id
    assert len(found[0].gpu_id or "") == 8
    assert b"5e01" not in msgspec.json.encode(found)
    assert found[3].gpu_id is None


def test_run_names_sort_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime

    monkeypatch.setattr(store, "FOLDER", tmp_path)
    times = [datetime(2026, 9, 30, 23, 59, 59, tzinfo=UTC), datetime(2026, 11, 2, 0, 0, 1, tzinfo=UTC)]
    names = [store.new_run("h200", "p5", t)[0] for t in times]
    assert names == sorted(names) == ["2026-09-30T235959Z", "2026-11-02T000001Z"]


def test_a_run_is_newer_than_every_run_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the clock was set back, and within one second; what is newest is judged."""
    from datetime import UTC, datetime

    monkeypatch.setattr(store, "FOLDER", tmp_path)
    (tmp_path / "h200" / "routes").mkdir(parents=True)
    (tmp_path / "h200" / "routes" / "zz.json").touch()
    names = []
    for year in (2026, 2026, 2020):
        name, folder = store.new_run("h200", "p5", datetime(year, 12, 31, 23, 59, 59, tzinfo=UTC))
        store.append(folder, replace(ROW, run=name, started=f"{year}"))
        names.append(name)
    assert names == ["2026-12-31T235959Z", "2027-01-01T000000Z", "2027-01-01T000001Z"]
    assert [r.run for r in store.rows()] == names
    assert store.new_run("gb10", "p5", datetime(2020, 1, 1, tzinfo=UTC))[0].startswith("2020")


def test_who_waits_for_a_lock_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, with the file and the process that holds it; then it goes on waiting, and Ctrl-C ends it."""
    monkeypatch.setattr(store, "SILENT_S", 0.0)
    sleeps: list[float] = []
    release = contextlib.ExitStack()

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            release.close()

    monkeypatch.setattr(store.time, "sleep", sleep)
    with release:
        release.enter_context(store._locked(tmp_path))
        store.append(tmp_path, ROW)
    assert (len(sleeps), rows_of(tmp_path)) == (3, [ROW])
    said = capsys.readouterr().err
    held(said, ".lock", f"process {os.getpid()}")

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.time, "sleep", interrupted)
    with store._locked(tmp_path), pytest.raises(KeyboardInterrupt):
        store.append(tmp_path, ROW)
    assert rows_of(tmp_path) == [ROW]


def test_a_copy_may_state_the_commit_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy's own git may be behind what was copied; what is stated stands beside it and replaces nothing."""
    monkeypatch.setenv("KILLGATE_COMMIT", "abc1234")
    monkeypatch.setattr(machine, "commit", lambda: ("0123456789ab", True))
    found = machine.provenance()
    assert (found.commit, found.dirty, found.stated_commit) == ("0123456789ab", True, "abc1234")
    monkeypatch.delenv("KILLGATE_COMMIT")
    assert machine.provenance().stated_commit == ""


def test_rows_of_ones_own_lie_beside_its_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path / "house")
    store.append(store.folder() / "h200" / "p" / "2026-01-02T000000Z", measurement(phase="p", run="2026-01-02T000000Z"))
    monkeypatch.setenv(own.VARIABLE, str(tmp_path))
    run, folder = store.new_run("h200", "mine", datetime(2026, 1, 1, tzinfo=UTC))
    assert folder == tmp_path / "profiles" / "h200" / "mine" / "2026-01-02T000001Z"  # newer than the house's
    store.append(folder, measurement(phase="mine", run=run))
    assert [row.phase for row in store.rows()] == ["p", "mine"]
    assert store.measured_devices("mine") == ["h200"]
    monkeypatch.delenv(own.VARIABLE)
    assert store.measured_devices("mine") == []
