"""A trace as one Parquet file: what `lab profile` commits, and `read` takes like any other profile.

A profiler's own file says too much and weighs too much: nsys keeps the environment, the output and the command line of
the process it watched, Kineto every CPU operator. Stored is only what the normalised trace holds, by an allow-list of
columns, with times counted from the first row and with processes and threads numbered from 0, so nothing in the file
says who ran it or where. Arrow writes it because Parquet's dictionaries and zstd bring a kernel row to about ten bytes
and every dataframe library reads it back; a format of ours would need a reader in each.

All kinds of row lie in one long table with a column `kind`; a column that a kind does not have is null. Given up:
Nsight Compute's metrics, which have no timeline and stay in their CSV.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from lab.base.errors import BadInput
from lab.trace.model import NONE, Calls, Columns, Copies, Fills, GraphLaunches, Kernels, Ranges, Trace

SCHEMA = 1
MAGIC = b"PAR1"
KINDS: Mapping[str, type[Columns]] = {
    "kernels": Kernels,
    "memcpy": Copies,
    "memset": Fills,
    "graphs": GraphLaunches,
    "ranges": Ranges,
    "calls": Calls,
}
# The column of each kind that indexes a table of texts, and that table.
TEXTS = {"kernels": ("name", "names"), "ranges": ("label", "labels"), "calls": ("name", "call_names")}
KEPT = (
    *("tool", "tool_version", "schema_version", "graph_mode", "graph_setting", "warnings", "timeline", "window_label"),
    "steps",
)
NUMBERED = ("process", "thread")


def save(trace: Trace, path: Path, about: Mapping[str, Any] | None = None) -> Path:
    """Write a trace; `about` is a small mapping for people (phase, run, device), stored beside it as JSON.

    Raises BadInput when the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    origin = _origin(trace)
    numbers: dict[str, dict[int, int]] = {name: {NONE: NONE} for name in NUMBERED}
    tables = [_table(trace, kind, origin, numbers, pa) for kind in KINDS]
    table = pa.concat_tables([t for t in tables if t.num_rows] or tables, promote_options="default")
    meta = {key: getattr(trace, key) for key in KEPT} | {
        "schema": SCHEMA,
        "source": trace.source,
        "gpus": {str(k): v for k, v in trace.gpus.items()},
        "windows_ns": [[a - origin, b - origin] for a, b in trace.windows_ns] if trace.windows_ns is not None else None,
        "about": dict(about or {}),
    }
    table = table.replace_schema_metadata({"killgate": json.dumps(meta)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, compression="zstd", compression_level=12)
    except OSError as error:
        raise BadInput(path, f"cannot be written ({error.strerror or error})", "choose another place") from None
    return path


def _origin(trace: Trace) -> int:
    """The earliest start, ns; 0 for an empty trace."""
    starts = [int(getattr(trace, kind).start_ns[0]) for kind in KINDS if len(getattr(trace, kind))]
    return min(starts, default=0) if trace.timeline else 0


def _table(trace: Trace, kind: str, origin: int, numbers: dict[str, dict[int, int]], pa: Any) -> Any:
    rows: Columns = getattr(trace, kind)
    columns: dict[str, Any] = {"kind": pa.array(np.zeros(len(rows), np.int8)).cast(pa.int32())}
    columns["kind"] = pa.DictionaryArray.from_arrays(columns["kind"], pa.array([kind])).cast(pa.string())
    for field in fields(rows):
        values = getattr(rows, field.name)
        if values is None:
            continue
        if kind in TEXTS and field.name == TEXTS[kind][0]:
            texts = getattr(trace, TEXTS[kind][1])
            columns["text"] = pa.array([texts[i] for i in values.tolist()], pa.string())
        elif field.name in ("start_ns", "end_ns"):
            columns[field.name] = pa.array(values - origin)
        elif field.name in NUMBERED:
            known = numbers[field.name]
            own = [known.setdefault(v, len(known) - 1) for v in values.tolist()]
            columns[field.name] = pa.array(own, pa.int64())
        else:
            # `kind` of a copy is its direction; the table's own `kind` says what sort of row it is.
            columns["direction" if field.name == "kind" else field.name] = pa.array(np.ascontiguousarray(values))
    return pa.table(columns)


def is_stored(path: Path) -> bool:
    """True for a Parquet file, by its first bytes; False for anything else, also for what cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def load(path: Path) -> Trace:
    """A stored trace; raises BadInput, one line, for a damaged file or Parquet of something else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        meta = json.loads((table.schema.metadata or {}).get(b"killgate", b"null"))
    except (OSError, ValueError, pa.ArrowException) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(path, f"is no readable Parquet file ({first})", "restore it from version control") from None
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        raise BadInput(path, "Parquet, but no trace stored by `lab profile`", "give a profile; see `lab trace --help`")
    texts: dict[str, list[str]] = {name: [] for _, name in TEXTS.values()}
    kinds = table.column("kind").to_pylist()
    built: dict[str, Columns] = {}
    for kind, of in KINDS.items():
        mask = np.fromiter((k == kind for k in kinds), bool, len(kinds))
        built[kind] = _rows(table.filter(pa.array(mask)), kind, of, texts)
    trace = Trace(
        source=path.name,
        gpus={int(k): v for k, v in meta["gpus"].items()},
        windows_ns=tuple((a, b) for a, b in meta["windows_ns"]) if meta["windows_ns"] is not None else None,
        **{key: meta[key] for key in KEPT if key != "warnings"},
        **built,  # type: ignore[arg-type]
        **texts,  # type: ignore[arg-type]
    )
    return trace.but(warn=meta["warnings"])


def _rows(table: Any, kind: str, of: type[Columns], texts: dict[str, list[str]]) -> Columns:
    if not table.num_rows:
        return of.empty()
    columns: dict[str, Any] = {}
    for field in fields(of):
        if kind in TEXTS and field.name == TEXTS[kind][0]:
            known = {text: i for i, text in enumerate(texts[TEXTS[kind][1]])}
            codes = [known.setdefault(text, len(known)) for text in table.column("text").to_pylist()]
            texts[TEXTS[kind][1]] = list(known)
            columns[field.name] = codes
            continue
        name = "direction" if field.name == "kind" else field.name
        if name in table.column_names and table.column(name).null_count == 0:
            columns[field.name] = table.column(name).to_numpy()
    return of.of(**columns)


def about(path: Path) -> dict[str, Any]:
    """What `save` was told about a stored trace: phase, run, device, arms; raises BadInput for another file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        meta = json.loads((pq.read_schema(path).metadata or {}).get(b"killgate", b"null"))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadInput(path, f"is no readable Parquet file ({type(error).__name__})", "restore it") from None
    if not isinstance(meta, dict) or "about" not in meta:
        raise BadInput(path, "Parquet, but no trace stored by `lab profile`", "give another file")
    return dict(meta["about"])
