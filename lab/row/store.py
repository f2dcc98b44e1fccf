"""The one store of all records: profiles/<device>/<phase>/<run>/<file>.jsonl, one JSON object a line, append-only.

A record is written by copying the file, adding the line, flushing it to the disk and renaming it over the old one under
a lock, so a process killed at any moment leaves either the old file or the new one, and two processes do not
interleave. A record is never changed or removed. A failure is a row with a status and a message. Nothing is written
that says who or where: the environment is an allow-list.

The last key of a line is its hash, over the line and the one before (`linked`): a line that was changed, or taken out
of the middle, is seen by `lab rows --verify` (lab/row/verify.py). Files from before there were hashes are pinned there.

Every kind (lab/row/records.py) is decoded by `decode` and by nothing else; what is written is decoded first. A file is
read once a process: as it is renamed into place, one that somebody appended to is another file and is read again.

`pack` makes rows.jsonl.gz of the rows of a run that is over, the same lines in a fifth of the bytes. Every reader takes
both, and who appends unpacks it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import gzip
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union

import msgspec

from lab.base import files, own
from lab.base.errors import REPOSITORY, BadInput, plain, shown
from lab.row.records import Kept, Measurement, Record

FOLDER = Path(os.environ.get("KILLGATE_PROFILES") or REPOSITORY / "profiles")  # another for a cell of a cluster
R = TypeVar("R", bound=Record)
_HASH = re.compile(rb',"hash":"([0-9a-f]{16})"}')
LARGEST = 256 << 20  # bytes of a file of records: ten times what all of profiles/ may take
RUN = "%Y-%m-%dT%H%M%SZ"  # a run's name
PACKED = ".gz"
SILENT_S, POLL_S = 2.0, 0.02  # of a wait for a lock: how long it says nothing, and between two tries


def append(folder: Path, record: Record) -> Path:
    """Add one record; see `append_all`."""
    return append_all(folder, [record])


def append_all(folder: Path, records: Iterable[Record]) -> Path:
    """Add records of one kind to `folder` in one atomic step and return the file: either all are there, or none is.

    Raises BadInput when a record is not as it must be (a value of another type, an unknown status, a performance field
    on a row that is not ok or suspect, NaN) or when it cannot be written; what was there before stays as it was.
    """
    records = list(records)
    target = folder / type(records[0]).FILE
    lines = [line(record, folder) for record in records]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            for left in folder.glob(".*.part"):  # of a process that was killed while it held the lock
                left.unlink()
            packed = target.with_name(target.name + PACKED)
            there = next((path for path in (target, packed) if path.exists()), None)
            before = files.read_packed(there, LARGEST) if there else b""
            if before and not before.endswith(b"\n"):
                raise BadInput(target, "the last line is cut off", "restore the file, then append")
            files.write(target, (before + chained(before, lines)).decode())
            packed.unlink(missing_ok=True)
            _sync_folder(folder)
    except OSError as error:
        raise _unwritable(target, error) from None
    return target


def _unwritable(path: Path, error: OSError) -> BadInput:
    why = error.strerror or type(error).__name__
    return BadInput(path, f"not written ({why})", "free space or fix permissions; what it held is intact")


def refuse_unwritable(folder: Path) -> None:
    """Raise BadInput when rows could not be written to `folder` (made when absent): read-only, full, or no folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder), tempfile.NamedTemporaryFile(prefix=".", suffix=".part", dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(folder, error) from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, in which its holder stands; it is released by the kernel when the process dies.

    Who waits for it longer than SILENT_S says once what for, and goes on waiting; Ctrl-C ends that.
    """
    with open(folder / ".lock", "a+") as handle:
        since = time.monotonic()
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told and time.monotonic() - since > SILENT_S:
                    handle.seek(0)
                    holder = handle.read(20).strip() or "another process"
                    line = f"{shown(folder / '.lock')}: held by {holder}; waiting for it, Ctrl-C ends the wait"
                    print(f"lab: {plain(line)}", file=sys.stderr, flush=True)
                    told = True
                time.sleep(POLL_S)
        with contextlib.suppress(OSError):  # a full disk is for what is written under the lock to say
            os.ftruncate(handle.fileno(), 0)
            os.write(handle.fileno(), f"process {os.getpid()}".encode())
        yield


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def line(record: Record, where: Path) -> bytes:
    """The record as a line of its file, without hash and end, once it could be read back; raises BadInput."""
    kept = msgspec.to_builtins(record)
    for key, value in kept.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            what, remedy = f"{key} holds NaN or infinity", "give the row a status and a message instead"
            raise BadInput(where, what, remedy) from None
    text = json.dumps(kept, separators=(",", ":")).encode()
    decode(text, type(record), where)
    return text


def chained(before: bytes, lines: Iterable[bytes]) -> bytes:
    """Lines to write after `before`, a file's content: each with its hash as the last key, and ended."""
    last, added = (before.splitlines() or [b""])[-1], b""
    for text in lines:
        last = text[:-1] + b',"hash":"' + linked(last, text).encode() + b'"}'
        added += last + b"\n"
    return added


def linked(before: bytes, text: bytes) -> str:
    """The hash of a line: 16 hex digits of the SHA-256 of the line before it (with its hash), a newline, and itself."""
    return hashlib.sha256(before + b"\n" + text).hexdigest()[:16]


def parted(line: bytes) -> tuple[bytes, str]:
    """(the line without its hash, the hash); "" for a line from before there were hashes."""
    found = _HASH.fullmatch(line[-27:])
    return (line[:-27] + b"}", found[1].decode()) if found else (line, "")


@cache
def _decoder(kind: type[R]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(Union[(kind, *kind.__subclasses__())])


def decode(line: bytes, kind: type[R], where: str | Path) -> R:
    """One record from its line, of an older schema too; BadInput that names file, key and remedy for what is none."""
    line, _ = parted(line)
    try:
        try:
            record = _decoder(kind).decode(line)
        except msgspec.ValidationError:
            record = _slowly(msgspec.json.decode(line), kind, where)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(where, f"not JSON ({error})", "remove that line or restore the file") from None
    if wrong := record.wrong():
        raise BadInput(where, *wrong)
    return record


def _slowly(raw: Any, kind: type[R], where: str | Path) -> R:
    """A line that says no schema version, which is then the present one, or that is no such record and refused."""
    if not isinstance(raw, dict):
        raise BadInput(where, f"the {kind.WORD} is no object", "remove that line or restore the file")
    versions = {k.__struct_config__.tag: k for k in (kind, *kind.__subclasses__())}
    if raw.setdefault("schema", kind.__struct_config__.tag) not in list(versions):
        what = f"{kind.WORD} has schema {raw['schema']}, this reads {', '.join(map(str, versions))}"
        raise BadInput(where, what, "update the code or the writer of the row")
    return files.convert(raw, versions[raw["schema"]], where)


_read: dict[tuple[Path, type[Record]], tuple[tuple[int, ...], list[Any]]] = {}


def read(path: Path, kind: type[R]) -> list[R]:
    """The records of one file; raises BadInput naming the file and the line when one is truncated or malformed."""
    try:
        state = path.stat()
        version = (state.st_ino, state.st_mtime_ns, state.st_size)
        known = _read.get((path, kind))
        if known is None or known[0] != version:
            lines = files.read_packed(path, LARGEST).splitlines()
            where = shown(path)
            found = [decode(line, kind, f"{where} line {number}") for number, line in enumerate(lines, start=1)]
            known = _read[path, kind] = version, found
    except OSError as error:
        raise BadInput(path, f"cannot be read ({error})", "restore it from version control") from None
    return list(known[1])


def folder() -> Path:
    """Where records are written: profiles/ of the card directory in use, else of the repository."""
    return own.profiles(FOLDER)[-1]


def found(pattern: str) -> list[Path]:
    """The files and folders of a pattern below profiles/, the repository's and one's own, by their names in it."""
    places = [
        (name.split(os.sep), top / name)
        for top in own.profiles(FOLDER)
        for name in glob.glob(pattern, root_dir=top, include_hidden=True)  # twice as fast as a Path's
    ]
    return [path for _, path in sorted(places)]


def measured(device: str = "*", phase: str = "*", run: str = "*") -> list[Path]:
    """The files of measurements in profiles/, packed or not, by device, phase and run."""
    paths = found(f"{device}/{phase}/{run}/{Measurement.FILE}*")
    plain = {path for path in paths if path.suffix != PACKED}
    return [path for path in paths if path in plain or path.with_suffix("") not in plain]


def pack(path: Path) -> Path:
    """FILE.gz in the place of a run's file of records; raises BadInput when either cannot be read or written.

    The same lines make the same bytes. A process that dies between leaves both files, and the plain one is read.
    """
    with _locked(path.parent):
        lines = files.read_bytes(path, LARGEST)
        made = files.write(path.with_name(path.name + PACKED), gzip.compress(lines, 9, mtime=0))
        if files.read_packed(made, LARGEST) != lines:
            raise BadInput(made, "does not hold what was packed", f"remove it; {path.name} is intact")
        _sync_folder(path.parent)
        path.unlink()
    return made


def rows(device: str | None = None, phase: str | None = None, family: str | None = None) -> list[Measurement]:
    """Every committed measurement, oldest run first, filtered."""
    paths = measured(device or "*", phase or "*")
    every = [row for path in paths for row in read(path, Measurement) if family in (None, row.family)]
    return sorted(every, key=lambda row: row.run)  # within a run as they were written


def kept(kind: type[R], device: str, phase: str) -> list[list[R]]:
    """The records of a kind in each run of a phase on a device, oldest run first."""
    return [read(path, kind) for path in found(f"{device}/{phase}/*/{kind.FILE}")]


def measured_devices(phase: str) -> list[str]:
    """The devices for which profiles/ holds rows of a phase, or readings of somebody's own files."""
    return sorted({path.parts[-4] for path in (*measured(phase=phase), *found(f"*/{phase}/*/{Kept.FILE}"))})


def refuse_unmeasured(phase: str, device: str) -> None:
    """Raise BadInput when a device has no rows of this phase."""
    if device not in measured_devices(phase):
        remedy = f"run `lab measure {phase}` on it, or judge on recorded evidence"
        raise BadInput(f"profiles/{device}/{phase}", "no measured rows", remedy)


def new_run(device: str, phase: str, now: datetime | None = None) -> tuple[str, Path]:
    """A fresh run name (UTC time) and its folder profiles/<device>/<phase>/<run>; the folder is made by `append`.

    Runs are ordered by their names, and the newest is judged: a clock that was set back, or that shows the second of
    the run before, gives the second after the newest run of the device.
    """
    run = (now or datetime.now(UTC)).strftime(RUN)
    for there in sorted((path.name for path in found(f"{device}/*/*")), reverse=True):
        with contextlib.suppress(ValueError, OverflowError):  # a folder that is no run
            run = max(run, (datetime.strptime(there, RUN) + timedelta(seconds=1)).strftime(RUN))
            break
    return run, folder() / device / phase / run
