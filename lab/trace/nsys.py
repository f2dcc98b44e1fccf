"""Nsight Systems' SQLite export (2023.2 to 2026.2) as a trace.

The exporter writes a table only when it has rows, and each release adds columns: tables are looked up, columns are
selected by name, and what is absent becomes NONE. Only the tables named here are read; the environment, the process
output and the host's name lie in the same file. Three properties of the format decide the rest:
- a correlation id is unique within one process only, so the process is read with it, from the serialised ids;
- a CUDA graph captured as a whole is one GRAPH_TRACE row and its kernels are not in the file;
- device numbers are a process's own; TARGET_INFO_CUDA_DEVICE tells apart two processes that use the same number.

Large columns go through ADBC into NumPy: 500,000 rows of ten columns take 0.30 s of processor time (`sqlite3` with
`fetchmany` 0.87 s, decoding alone 0.19 s), without the interpreter's lock, so two connections read half of the rows
each. Small tables go through `sqlite3`, which tells a broken file apart more clearly.

Sources: the comments in the exporter's CREATE TABLE statements, the user guide's schema chapter, CUPTI's documentation.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from lab.base.errors import BadInput
from lab.trace.intervals import compact, group
from lab.trace.model import NONE, WIDE, Activity, Calls, Copies, Fills, GraphLaunches, Kernels, Ranges, Trace

KIND, META = "CUPTI_ACTIVITY_KIND_", ("META_DATA_EXPORT", "EXPORT_META_DATA")
PROCESS = "({} >> 24) & 16777215"  # the process id in a serialised globalPid or globalTid: bits 24 to 47
# Event types where the file has no ENUM table to ask.
PUSH_POP, START_END, DOMAIN = {"NvtxPushPopRange": 59}, {"NvtxStartEndRange": 60}, {"NvtxDomainCreate": 75}
BATCH_ROWS = 65536
SPLIT_ROWS = 200_000  # below, a second connection costs more than it saves
DRIVERS = ("adbc_driver_manager", "adbc_driver_sqlite", "pyarrow")  # whose errors mean a file that cannot be read
LAUNCH = re.compile(r"cu(da)?GraphLaunch")
ABSOLUTE = re.compile(r"(?<![\w/])/(?:[^\s/]+/)+[^\s,;]*")  # a path of the profiled machine
COLUMNS = {
    "start_ns": '"start"',
    "end_ns": '"end"',
    "device": '"deviceId"',
    "context": '"contextId"',
    "stream": '"streamId"',
    "correlation": '"correlationId"',
    "process": PROCESS.format('"globalPid"'),
    "graph_node": '"graphNodeId"',
    "graph": '"graphId"',
}
HOST = {
    "synchronization": f"{KIND}SYNCHRONIZATION",
    "profiler overhead": "PROFILER_OVERHEAD",
    "CUPTI overhead": f"{KIND}OVERHEAD",
}


def read(path: Path) -> Trace:
    """The trace of an nsys SQLite export.

    Raises BadInput, one line, for a file that is truncated, corrupt, or not an nsys export.
    """
    with Database(path) as base:
        if not any(t.startswith(KIND) or t in META for t in base.tables):
            raise BadInput(path, "an SQLite file, but not an nsys export", "make one: nsys export --type sqlite")
        warnings: list[str] = []
        kernels, names, in_node = _kernels(base, warnings)
        copied = _activity(base, "MEMCPY", warnings, bytes='"bytes"', kind='"copyKind"')
        memcpy = Copies.of(**_with_graph(copied, in_node))
        memset = Fills.of(**_with_graph(_activity(base, "MEMSET", warnings, bytes='"bytes"'), in_node))
        graphs = GraphLaunches.of(**_activity(base, "GRAPH_TRACE", warnings, graph_exec='"graphExecId"'))
        calls, call_names = _calls(base)
        ranges, labels, domains = _ranges(base, warnings)
        version, schema, setting = _versions(base, warnings)
        rows, gpus = _gpus(base, (kernels, memcpy, memset, graphs), warnings)
        warnings += _diagnostics(base)
        host = _host(base)
    launches = int(np.isin(calls.name, [i for i, n in enumerate(call_names) if LAUNCH.match(n)]).sum())
    mode = graph_mode(rows, launches, setting or len(calls), warnings)
    return Trace(
        tool="nsys",
        source=path.name,
        tool_version=version,
        schema_version=schema,
        graph_mode=mode,
        graph_setting=setting,
        gpus=gpus,
        names=names,
        labels=labels,
        call_names=call_names,
        **dict(zip(("kernels", "memcpy", "memset", "graphs"), rows, strict=True)),  # type: ignore[arg-type]
        ranges=ranges,
        calls=calls,
        warnings=tuple(warnings),
        domains=domains,
        host=host,
    )


def graph_mode(rows: Collection[Activity], launches: int, told: object, warnings: list[str]) -> str:
    """How graphs appear in this file, from what is in it rather than from what was asked for.

    launches: graph launches among the API calls. told: whether the file says anything about graphs or calls.
    A capture in graph mode that launched no graph is an ordinary eager trace ("none").
    """
    *decomposed, opaque = rows
    nodes = sum(int((r.graph_node > 0).sum()) for r in decomposed)
    if len(opaque) and nodes:
        warnings.append(f"{nodes} rows carry a graph node beside {len(opaque)} opaque graph rows")
    if len(opaque) or nodes:
        return "graph" if len(opaque) else "node"
    if launches:
        what = "graph launches in the API calls, but no graph work in the file: busy time is too low"
        warnings.append(f"{launches} {what}")
    return "none" if told and not launches else "unknown"


def _activity(base: Database, table: str, warnings: list[str], **more: str) -> dict[str, Any]:
    """The common columns of an activity table plus `more`; rows without a usable time are dropped and counted."""
    table = KIND + table
    have = base.columns(table)
    if not have:
        return {}
    for need in ("start", "end"):
        if need not in have:
            raise BadInput(base.path, f"{table} has no column {need}", "export it again")
    found = base.arrays(table, _wanted({**COLUMNS, **more}, have))
    good = (found["end_ns"] >= found["start_ns"]) & (found["end_ns"] > 0)
    if not good.all():
        # CUPTI writes start = end = 0 when it could not collect the times.
        warnings.append(f"{int((~good).sum())} rows of {table} have no usable times and were dropped")
        found = {name: column[good] for name, column in found.items()}
    for name in ("graph_node", "graph"):
        if name in found:
            found[name] = _none_for_zero(found[name])
    return found


def _wanted(columns: Mapping[str, str], have: Collection[str]) -> dict[str, tuple[str, type]]:
    """The expressions whose column the table has, NULL as NONE, with the type to keep."""
    return {
        name: (f"IFNULL({value}, {NONE})", np.int64 if name in WIDE else np.int32)
        for name, value in columns.items()
        if value.split('"')[1] in have
    }


def _none_for_zero(column: NDArray[Any]) -> NDArray[Any]:
    """0 and NULL both mean outside graphs. A column without any graph is stored once, not per row."""
    if not (column > 0).any():
        return np.broadcast_to(np.asarray(NONE, column.dtype), column.shape)
    column[column == 0] = NONE
    return column


def _with_graph(found: dict[str, NDArray[Any]], in_node: bool) -> dict[str, NDArray[Any]]:
    """The columns with the graph taken from the node where only the node is stored (schemas before 3.24, copies)."""
    node = found.get("graph_node")
    if node is None or not in_node or not node.strides[0]:
        return found
    if "graph" not in found:
        return found | {"graph": np.where(node > 0, node >> 32, NONE)}
    bare = (found["graph"] == NONE) & (node > 0)
    return found | {"graph": np.where(bare, node >> 32, found["graph"])} if bare.any() else found


def _kernels(base: Database, warnings: list[str]) -> tuple[Kernels, list[str], bool]:
    """The kernels, their names, and whether a node number's upper half is its graph's number.

    It was so in every file looked at, and is documented nowhere, so rows of this file with both numbers may veto it.
    """
    have = base.columns(KIND + "KERNEL")
    column = next((c for c in ("demangledName", "shortName", "mangledName") if c in have), None)
    if not have:
        return Kernels.empty(), [], True
    if column is None:
        raise BadInput(base.path, f"{KIND}KERNEL has no name column", "export it again")
    found = _activity(base, "KERNEL", warnings, name=f'"{column}"')
    if "process" not in found or "correlation" not in found:
        warnings.append("kernels carry no process or no correlation: they cannot be joined to API calls")
    found["name"], names = _named(base, found["name"])
    in_node = True
    if "graph" in found and "graph_node" in found:
        both = (found["graph"] > 0) & (found["graph_node"] > 0)
        in_node = bool((found["graph_node"][both] >> 32 == found["graph"][both]).all())
    return Kernels.of(**_with_graph(found, in_node)), names, in_node


def _named(base: Database, ids: NDArray[Any]) -> tuple[NDArray[Any], list[str]]:
    """Consecutive codes and their texts, from StringIds numbers."""
    unique, codes = compact(ids)
    texts = base.texts([int(i) for i in unique])
    return codes, [texts.get(int(i)) or f"(unnamed {int(i)})" for i in unique]


def _calls(base: Database) -> tuple[Calls, list[str]]:
    have = base.columns(KIND + "RUNTIME")
    if not {"start", "end", "nameId"} <= have:
        return Calls.empty(), []
    columns = {k: COLUMNS[k] for k in ("start_ns", "end_ns", "correlation")}
    columns |= {"name": '"nameId"', "thread": '"globalTid"', "process": PROCESS.format('"globalTid"')}
    found = base.arrays(KIND + "RUNTIME", _wanted(columns, have))
    found["name"], names = _named(base, found["name"])
    return Calls.of(**found), names


def _ranges(base: Database, warnings: list[str]) -> tuple[Ranges, list[str], dict[int, str]]:
    """Finished push/pop and start/end ranges, their labels, and the names of domains."""
    have = base.columns("NVTX_EVENTS")
    if not {"start", "end", "eventType"} <= have:
        return Ranges.empty(), [], {}
    import pyarrow as pa

    text, join = "n.text" if "text" in have else "NULL", ""
    if "textId" in have and "StringIds" in base.tables:
        text, join = f"COALESCE({text}, s.value)", " LEFT JOIN StringIds s ON s.id = n.textId"
    thread, domain = (f'IFNULL(n."{k}", {NONE})' if k in have else str(NONE) for k in ("globalTid", "domainId"))
    both, across, created = (_types(base, names) for names in (PUSH_POP | START_END, START_END, DOMAIN))
    source = f"FROM NVTX_EVENTS n{join} WHERE n.eventType"
    domains = dict(base.rows(f"SELECT {domain}, IFNULL({text}, '') {source} IN ({created})"))
    unfinished = base.rows(f'SELECT count(*) {source} IN ({both}) AND n."end" IS NULL')[0][0]
    if unfinished:
        warnings.append(f"{unfinished} NVTX ranges never ended and are left out")
    query = (
        f"SELECT n.start, n.\"end\", {thread}, {domain}, n.eventType IN ({across}), IFNULL({text}, '') "
        f'{source} IN ({both}) AND n."end" IS NOT NULL'
    )
    with base.one_line():
        batches = list(base.batches(query))
    if not sum(b.num_rows for b in batches):
        return Ranges.empty(), [], domains
    *numbers, label = pa.Table.from_batches(batches).columns
    start, end, threads, domain_of, scope = (column.to_numpy() for column in numbers)
    encoded = label.combine_chunks().dictionary_encode()
    ranges = Ranges.of(
        start_ns=start,
        end_ns=end,
        label=encoded.indices.to_numpy(),
        process=np.where(threads < 0, NONE, (threads >> 24) & 0xFFFFFF),
        thread=threads,
        domain=domain_of,
        scope=scope,
    )
    return ranges, encoded.dictionary.to_pylist(), domains


def _types(base: Database, names: Mapping[str, int]) -> str:
    """Event type numbers by name from the file, else those of the known schemas, for an SQL list."""
    found: list[Any] = []
    if {"id", "name"} <= base.columns("ENUM_NSYS_EVENT_TYPE"):
        marks = ",".join("?" * len(names))
        found = [n for (n,) in base.rows(f"SELECT id FROM ENUM_NSYS_EVENT_TYPE WHERE name IN ({marks})", *names)]
    return ",".join(str(int(n)) for n in found or names.values())


def _versions(base: Database, warnings: list[str]) -> tuple[str, str, str]:
    """Product version, schema version, and the graph setting of the capture ("node", "graph" or "")."""
    meta: dict[str, str] = {}
    for table in (t for t in META if t in base.tables):
        meta |= dict(base.rows(f"SELECT name, value FROM {table} WHERE name LIKE 'EXPORT_%_VERSION%'"))
    settings: set[str] = set()
    if "META_DATA_CAPTURE" in base.tables:
        like = "%CUDA_GRAPH_TRACE_OPTIONS:MODE"
        found = base.rows("SELECT value FROM META_DATA_CAPTURE WHERE name LIKE ?", like)
        settings = {str(row[0]).lower() for row in found if row[0]}
    if len(settings) > 1:
        warnings.append(f"processes were captured with different graph settings: {', '.join(sorted(settings))}")
    setting = settings.pop() if len(settings) == 1 else ""
    return meta.get("EXPORT_PRODUCT_VERSION", ""), meta.get("EXPORT_SCHEMA_VERSION", ""), setting


def _gpus(
    base: Database, rows: Collection[Activity], warnings: list[str]
) -> tuple[Collection[Activity], dict[int, str]]:
    """The rows with devices told apart across processes, and the names of the devices in use."""
    name_of: dict[int, str] = {}
    by_cuda: dict[int, str] = {}
    have = base.columns("TARGET_INFO_GPU")
    if {"id", "name"} <= have:
        cuda = "cuDevice" if "cuDevice" in have else "id"
        for number, name, device in base.rows(f"SELECT id, name, {cuda} FROM TARGET_INFO_GPU"):
            name_of[number], by_cuda[number if device is None else device] = name or "", name or ""
    real: dict[tuple[int, int], int] = {}
    if {"gpuId", "cudaId", "pid"} <= base.columns("TARGET_INFO_CUDA_DEVICE"):
        found = base.rows("SELECT pid, cudaId, gpuId FROM TARGET_INFO_CUDA_DEVICE WHERE gpuId IS NOT NULL")
        real = {(process_id(pid), device): gpu for pid, device, gpu in found}
    seen: dict[int, set[int]] = {int(d): set() for r in rows for d in compact(r.device)[0]}
    for pid, device in {key for r in rows for key in group(r.process, r.device)[0]} if real else ():
        # A process that the table does not list keeps its numbers.
        seen[device] |= {real[pid, device]} if (pid, device) in real else set()
    if all(len(gpus) <= 1 for gpus in seen.values()):
        return rows, {d: name_of.get(min(g), "") if g else by_cuda.get(d, "") for d, g in sorted(seen.items())}
    warnings.append("processes number their GPUs differently; devices here are the host's GPU numbers")
    moved = []
    for r in rows:
        own = r.device.copy()
        for (pid, number), gpu in real.items():
            own[(r.process == pid) & (r.device == number)] = gpu
        moved.append(replace(r, device=own))
    return moved, {int(d): name_of.get(int(d), "") for r in moved for d in compact(r.device)[0]}


def process_id(number: int) -> int:
    """A process id from either a plain pid or a serialised globalPid; the exporter has written both."""
    return number if number < 1 << 24 else (number >> 24) & 0xFFFFFF


def _diagnostics(base: Database) -> list[str]:
    """The profiler's own warnings and errors, without paths of the machine it ran on."""
    if not {"severity", "text"} <= base.columns("DIAGNOSTIC_EVENT"):
        return []
    texts = [str(row[0]) for row in base.rows("SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity >= 2")]
    return [f"nsys: {ABSOLUTE.sub('(path)', ' '.join(text.split()))}" for text in texts]


def _host(base: Database) -> dict[str, tuple[int, int]]:
    """Count and summed ns of host waits and of the profiler's overhead: reported, and never busy time."""
    found = {}
    for label, table in HOST.items():
        if {"start", "end"} <= base.columns(table):
            count, total = base.rows(f'SELECT count(*), IFNULL(sum("end" - start), 0) FROM "{table}"')[0]
            found[label] = (int(count), int(total))
    return found


class Database:
    """A read-only SQLite file: its tables, their columns, small queries, and large columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._refuse_truncated()
        # immutable: nothing is locked, and no journal appears beside somebody's profile.
        self.uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        with self.one_line():
            self._base = sqlite3.connect(self.uri, uri=True)
            self._base.text_factory = lambda raw: raw.decode("utf-8", "replace")
            self.tables = {row[0] for row in self._base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()

    def _refuse_truncated(self) -> None:
        """SQLite reads a shortened file until it meets a missing page, so ask the header how long it should be."""
        with self.path.open("rb") as file:
            head = file.read(100)
        page = int.from_bytes(head[16:18], "big")
        pages = int.from_bytes(head[28:32], "big")
        wanted = pages * (65536 if page == 1 else page)
        # The page count is only valid when the file was last written by an SQLite that maintains it.
        if head[24:28] == head[92:96] and self.path.stat().st_size < wanted:
            what = f"truncated: {self.path.stat().st_size} of {wanted} bytes"
            raise BadInput(self.path, what, "copy or export it again")

    @contextlib.contextmanager
    def one_line(self) -> Iterator[None]:
        """Whatever a broken file makes SQLite or ADBC raise becomes one line."""
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            if not isinstance(error, sqlite3.Error | OSError) and type(error).__module__.split(".")[0] not in DRIVERS:
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadInput(self.path, f"cannot be read as SQLite ({reason})", "copy or export it again") from None

    def columns(self, table: str) -> set[str]:
        """The table's column names, empty when there is no such table."""
        if table not in self.tables:
            return set()
        with self.one_line():
            return {row[1] for row in self._base.execute(f'PRAGMA table_info("{table}")')}

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of a small query."""
        with self.one_line():
            return self._base.execute(query, values).fetchall()

    def texts(self, ids: Sequence[int]) -> dict[int, str]:
        """StringIds of exactly these ids; the table also holds the environment, which is not read."""
        found: dict[int, str] = {}
        if "StringIds" in self.tables:
            for at in range(0, len(ids), 500):
                part = [int(i) for i in ids[at : at + 500]]
                found |= dict(
                    self.rows(f"SELECT id, value FROM StringIds WHERE id IN ({','.join('?' * len(part))})", *part)
                )
        return found

    def arrays(self, table: str, wanted: Mapping[str, tuple[str, type]]) -> dict[str, NDArray[Any]]:
        """Large columns of one table: result name -> (SQL expression, NumPy type to keep).

        The expression must be a whole number and never NULL (use IFNULL): ADBC takes a column's type from the first
        batch. Raises BadInput when a column holds something else.
        """
        low, high = self.rows(f'SELECT min(rowid), max(rowid) FROM "{table}"')[0]
        if low is None:
            return {name: np.empty(0, kind) for name, (_, kind) in wanted.items()}
        workers = 2 if high - low > SPLIT_ROWS and (os.cpu_count() or 1) > 1 else 1
        edges = [low + (high - low + 1) * i // workers for i in range(workers + 1)]
        # Room for every rowid of the range; what deleted rows leave unused is cut off. Untouched pages cost nothing.
        room = {name: np.empty(high - low + 1, kind) for name, (_, kind) in wanted.items()}
        select = ", ".join(expression for expression, _ in wanted.values())

        def fill(a: int, b: int) -> tuple[int, int]:
            at = a - low
            for batch in self.batches(f'SELECT {select} FROM "{table}" WHERE rowid >= {a} AND rowid < {b}'):
                for column, target in zip(batch.columns, room.values(), strict=True):
                    target[at : at + batch.num_rows] = column.to_numpy(zero_copy_only=False)
                at += batch.num_rows
            return a - low, at

        with self.one_line(), ThreadPoolExecutor(workers) as pool:
            try:
                filled = list(pool.map(fill, edges[:-1], edges[1:]))
            except (ValueError, TypeError) as error:
                raise BadInput(self.path, f"{table} holds text for a number ({error})", "export it again") from None
        rows = sum(b - a for a, b in filled)
        if rows == high - low + 1:
            return room
        return {name: np.concatenate([column[a:b] for a, b in filled]) for name, column in room.items()}

    def batches(self, query: str) -> Iterator[Any]:
        """Arrow record batches of a query, on a connection of their own."""
        import adbc_driver_manager as adbc
        import adbc_driver_sqlite
        import pyarrow as pa

        with (
            adbc_driver_sqlite.connect(self.uri) as database,
            adbc.AdbcConnection(database) as connection,
            adbc.AdbcStatement(connection) as statement,
        ):
            statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            statement.set_sql_query(query)
            handle, _ = statement.execute_query()
            yield from pa.RecordBatchReader.from_stream(handle)
