"""Measured rows: profiles/<device>/<phase>/<run>/rows.jsonl, one JSON object per (arm, workload), append-only.

A row is written by copying the file, adding the line, flushing it to the disk and renaming it over the old one under a
lock, so a process killed at any moment leaves either the old file or the new one, and two processes do not interleave.
A row is never changed or removed. A failure is a row with a status and a message; only a row whose check passed has a
performance field. Nothing is written that says who or where: the environment is an allow-list.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.base.errors import REPOSITORY, BadInput, shown

SCHEMA = 1
FOLDER = REPOSITORY / "profiles"
STATUSES = ("ok", "incorrect", "suspect", "error", "oom", "timeout", "skipped")
ARMS = ("control", "candidate", "peer")
NEEDED = ("schema", "device", "phase", "family", "arm", "name", "precision", "workload_id", "workload", "status", "run")
PERFORMANCE = ("median_us", "iqr_us", "min_us", "samples_us", "blocks_us", "n")


def append(folder: Path, row: Mapping[str, Any]) -> Path:
    """Add one row; see `append_all`."""
    return append_all(folder, [row])


def append_all(
    folder: Path,
    rows: Iterable[Mapping[str, Any]],
    name: str = "rows.jsonl",
    check: Callable[[Mapping[str, Any], str | Path], dict[str, Any]] | None = None,
) -> Path:
    """Add rows to `folder`/`name` in one atomic step and return the file: either all of them are there, or none is.

    check: what a row must be, default `validated`.
    Raises BadInput when a row is not as it must be (missing key, unknown status, a performance field on a row that is
    not ok or suspect, NaN) or when it cannot be written; what was there before stays as it was.
    """
    target = folder / name
    try:
        whole = [(check or validated)(row, folder) for row in rows]
        lines = [json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n" for row in whole]
    except ValueError:
        raise BadInput(target, "row holds NaN or infinity", "give the row a status and a message instead") from None
    temporary: str | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            for left in folder.glob(".rows-*.tmp"):  # of a process that was killed while it held the lock
                left.unlink()
            before = target.read_bytes() if target.exists() else b""
            if before and not before.endswith(b"\n"):
                raise BadInput(target, "the last line is cut off", "restore the file, then append")
            handle, temporary = tempfile.mkstemp(prefix=".rows-", suffix=".tmp", dir=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(before)
                file.write("".join(lines).encode())
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes the file private to its owner; rows are for every reader of the repository.
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
            temporary = None
            _sync_folder(folder)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(
            target, f"row not written ({reason})", "free space or fix permissions; earlier rows are intact"
        ) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return target


def refuse_unwritable(folder: Path) -> None:
    """Raise BadInput when rows could not be written to `folder` (made when absent): read-only, full, or no folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder), tempfile.NamedTemporaryFile(prefix=".rows-", suffix=".tmp", dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(
            folder, f"cannot be written ({reason})", "free space or fix permissions; rows are intact"
        ) from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; it is released by the kernel when the process dies."""
    with open(folder / ".lock", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def validated(row: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """The row with its schema version, checked; raises BadInput naming the key."""
    full = {"schema": SCHEMA, **row}
    for key in NEEDED:
        if key not in full:
            raise BadInput(where, f'row lacks "{key}"', "a row without it cannot be judged")
    if full["schema"] != SCHEMA:
        raise BadInput(
            where, f"row has schema {full['schema']}, this reads {SCHEMA}", "update the code or the row's writer"
        )
    if full["status"] not in STATUSES:
        raise BadInput(where, f'status = "{full["status"]}"', "valid: " + ", ".join(STATUSES))
    if full["arm"] not in ARMS:
        raise BadInput(where, f'arm = "{full["arm"]}"', "valid: " + ", ".join(ARMS))
    has = [key for key in PERFORMANCE if full.get(key) is not None]
    if has and full["status"] not in ("ok", "suspect"):
        raise BadInput(
            where, f'a row with status {full["status"]} carries "{has[0]}"', "no number before the check is green"
        )
    for key in ("median_us", "iqr_us", "min_us", "relative_error"):
        value = full.get(key)
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value) or value < 0):
            raise BadInput(where, f"{key} = {value!r}", "times and errors are finite and not negative")
        if value == 0 and key in ("median_us", "min_us"):
            raise BadInput(where, f"{key} = {value!r}", "nothing takes no time: give the row a status and a message")
    return full


def read(
    path: Path, check: Callable[[Mapping[str, Any], str | Path], dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The rows of one file; raises BadInput naming the file and the line when one is truncated or malformed.

    check: what a row must be, default `validated`.
    """
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(path, f"cannot be read ({error})", "restore it from version control") from None
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line, parse_constant=_no_constant)
        except ValueError as error:
            what = f"line {number} is not JSON ({getattr(error, 'msg', error)})"
            raise BadInput(path, what, "remove that line or restore the file") from None
        if not isinstance(row, dict):
            raise BadInput(path, f"line {number} is not an object", "remove that line or restore the file")
        rows.append((check or validated)(row, f"{shown(path)} line {number}"))
    return rows


def _no_constant(word: str) -> Any:
    """Python's JSON reader takes NaN and Infinity unless told not to."""
    raise ValueError(f"{word} is no number")


def rows(device: str | None = None, phase: str | None = None, family: str | None = None) -> list[dict[str, Any]]:
    """Every committed row, oldest run first, filtered."""
    found = []
    for path in sorted(FOLDER.glob("*/*/*/rows.jsonl")):
        if (device and path.parts[-4] != device) or (phase and path.parts[-3] != phase):
            continue
        found += [row for row in read(path) if family is None or row["family"] == family]
    return sorted(found, key=lambda row: row.get("started", ""))


def new_run(device: str, phase: str, now: datetime | None = None) -> tuple[str, Path]:
    """A fresh run name (UTC time) and its folder profiles/<device>/<phase>/<run>; the folder is made by `append`."""
    run = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H%M%SZ")
    return run, FOLDER / device / phase / run
