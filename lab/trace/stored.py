"""A trace as one Parquet file: what `lab profile` commits and `files.read` reads.

Stored are the columns of the trace and nothing else; times count from the first row and processes and threads from 0,
so nothing says who ran it or where. A kernel row takes about five bytes. All kinds of row lie in one table with a
column `kind`; a column that a kind does not have is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lab.base.errors import BadInput
from lab.trace.model import KINDS, NONE, TEXTS, Columns, Launch, Trace, build

SCHEMA = 1
MOST_ROWS = 100_000_000  # of a file that says so in a few bytes: a repeated value takes none
NUMBERED = ("process", "thread")
RENAMED = {"kind": "direction"}  # of a copy; the table's own `kind` says what sort of row it is


class Meta(msgspec.Struct, frozen=True):
    """What stands beside the rows, as JSON. about: what `save` was told (phase, run, device, arms). Files of
    earlier releases lack what has a default.
    """

    schema: int
    source: str
    tool: str
    tool_version: str
    schema_version: str
    graph_mode: str
    graph_setting: str
    warnings: tuple[str, ...]
    timeline: bool
    window_label: str
    steps: int | None
    gpus: dict[int, str]
    windows_ns: tuple[tuple[int, int], ...] | None
    about: dict[str, Any] = {}
    domains: dict[int, str] = {}
    launched: dict[str, Launch] = {}


# What the trace calls as the file does.
KEPT = tuple(name for name in Meta.__struct_fields__ if name not in ("schema", "windows_ns", "about"))


def save(trace: Trace, path: Path, about: Mapping[str, Any] | None = None) -> Path:
    """Write a trace and, for people, what it is about; raises BadInput when the file cannot be written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = {kind: getattr(trace, kind) for kind in KINDS if len(getattr(trace, kind))} or {"kernels": trace.kernels}
    origin = min((int(r.start_ns[0]) for r in rows.values() if len(r)), default=0) if trace.timeline else 0
    numbers: dict[str, dict[int, int]] = {name: {NONE: NONE} for name in NUMBERED}
    tables = [_table(trace, kind, origin, numbers) for kind in rows]
    windows = trace.windows_ns and tuple((a - origin, b - origin) for a, b in trace.windows_ns)
    kept = {key: getattr(trace, key) for key in KEPT}
    meta = Meta(schema=SCHEMA, windows_ns=windows, about=dict(about or {}), **kept)
    table = pa.concat_tables(tables, promote_options="default")
    table = table.replace_schema_metadata({"killgate": msgspec.json.encode(meta)})
    # Rows are sorted, so differences take half of what a dictionary of times does.
    whole = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    how = {"use_dictionary": [n for n in table.column_names if n not in whole], "compression": "zstd"}
    packed = dict.fromkeys(whole, "DELTA_BINARY_PACKED")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, compression_level=12, column_encoding=packed, **how)
    except OSError as error:
        raise BadInput(path, f"cannot be written ({error.strerror or error})", "choose another place") from None
    return path


def _table(trace: Trace, kind: str, origin: int, numbers: dict[str, dict[int, int]]) -> Any:
    import pyarrow as pa

    rows: Columns = getattr(trace, kind)
    index, texts = TEXTS.get(kind, ("", ""))
    columns: dict[str, Any] = {"kind": pa.repeat(pa.scalar(kind, pa.string()), len(rows))}
    for name in (field.name for field in fields(rows)):
        values = getattr(rows, name)
        if name == index:
            columns["text"] = pa.array([getattr(trace, texts)[i] for i in values.tolist()], pa.string())
        elif name in NUMBERED:
            known = numbers[name]
            columns[name] = pa.array([known.setdefault(v, len(known) - 1) for v in values.tolist()], pa.int64())
        elif values is not None:
            shifted = values - origin if name in ("start_ns", "end_ns") else np.ascontiguousarray(values)
            columns[RENAMED.get(name, name)] = pa.array(shifted)
    return pa.table(columns)


def load(path: Path) -> Trace:
    """A stored trace; raises BadInput, one line, for a damaged file or Parquet of something else."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    def bounded(path: Path) -> Any:
        with pq.ParquetFile(path) as file:
            if file.metadata.num_rows > MOST_ROWS:
                raise ValueError(f"{file.metadata.num_rows} rows")
            return file.read()

    table, meta = _opened(path, bounded)
    rows = {kind: _rows(table.filter(pc.equal(table["kind"], kind)), kind) for kind in KINDS}
    kept = {key: getattr(meta, key) for key in KEPT if key not in ("tool", "source")}
    return build(meta.tool, path, rows, windows_ns=meta.windows_ns, **kept)


def _rows(table: Any, kind: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in (field.name for field in fields(KINDS[kind]) if table.num_rows):
        stored = RENAMED.get(name, name)
        if name == TEXTS.get(kind, ("",))[0]:
            columns[name] = table.column("text").to_pylist()
        elif stored in table.column_names and table.column(stored).null_count == 0:
            columns[name] = table.column(stored).to_numpy()
    return columns


def about(path: Path) -> dict[str, Any]:
    """What `save` was told about a stored trace: phase, run, device, arms; raises BadInput for another file."""
    import pyarrow.parquet as pq

    return _opened(path, pq.read_schema)[1].about


def _opened(path: Path, read: Callable[[Path], Any]) -> tuple[Any, Meta]:
    import pyarrow as pa

    try:
        found = read(path)
        metadata = getattr(found, "schema", found).metadata or {}
    except (OSError, ValueError, pa.ArrowException) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(path, f"is no readable Parquet file ({first})", "restore it from version control") from None
    try:
        meta = msgspec.json.decode(metadata.get(b"killgate", b""), type=Meta)
        if meta.schema == SCHEMA:
            return found, meta
    except msgspec.DecodeError:
        pass
    raise BadInput(path, "Parquet, but no trace stored by `lab profile`", "give a profile; see `lab trace --help`")
