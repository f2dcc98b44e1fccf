"""Nsight Systems' SQLite export (2023.2 to 2026.2) as a trace.

The exporter writes a table only when it has rows, and each release adds columns: tables are looked up, columns are
selected by name, and what is absent becomes NONE. Only the tables named here are read; the environment, the process
output and the host's name lie in the same file. Three properties of the format decide the rest:
- a correlation id is unique within one process only, so the process is read with it, from the serialised ids;
- a CUDA graph captured as a whole is one GRAPH_TRACE row and its kernels are not in the file;
- device numbers are a process's own; TARGET_INFO_CUDA_DEVICE tells apart two processes that use the same number.

Large columns of whole numbers are read from the file's pages by lab/trace/btree.py, 0.1 s of processor time for
500,000 rows of ten columns, and where that refuses by `sqlite3` with `fetchmany` (0.9 s), as small tables are: it tells
a broken file apart more clearly.

Sources: the comments in the exporter's CREATE TABLE statements, the user guide's schema chapter, CUPTI's documentation.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from lab.base.errors import BadInput, anonymous
from lab.trace import btree
from lab.trace.intervals import compact, group
from lab.trace.model import (
    GRAPH_LAUNCH,
    NONE,
    WIDE,
    Activity,
    Calls,
    Copies,
    Fills,
    GraphLaunches,
    Kernels,
    Launch,
    Ranges,
    Trace,
    named,
    whole_numbers,
)

KIND, META = "CUPTI_ACTIVITY_KIND_", ("META_DATA_EXPORT", "EXPORT_META_DATA")
PROCESS = "({} >> 24) & 16777215"  # the process id in a serialised globalPid or globalTid: bits 24 to 47
# Event types where the file has no ENUM table to ask.
PUSH_POP, START_END, DOMAIN = {"NvtxPushPopRange": 59}, {"NvtxStartEndRange": 60}, {"NvtxDomainCreate": 75}
LISTED = "(SELECT value FROM json_each(?))"
FETCHED = 16384  # rows of SQLite that are Python objects at a time
COLUMNS = {
    "start_ns": "start", "end_ns": "end", "device": "deviceId", "context": "contextId", "stream": "streamId",
    "correlation": "correlationId", "process": "globalPid", "graph_node": "graphNodeId", "graph": "graphId",
}  # fmt: skip
LAUNCH = (
    *("registersPerThread", "staticSharedMemory", "dynamicSharedMemory"),
    *("blockX", "blockY", "blockZ", "gridX", "gridY", "gridZ"),
)
LOOKED_AT = 20_000  # rows asked how they were launched, spread over the table: nearly all launch few kernels often
VERSIONS = {"tool_version": "PRODUCT", "schema_version": "SCHEMA"}
HOST = {"synchronization": f"{KIND}SYNCHRONIZATION", "profiler overhead": "PROFILER_OVERHEAD"}
HOST["CUPTI overhead"] = f"{KIND}OVERHEAD"


def read(path: Path) -> Trace:
    """The trace of an nsys SQLite export; BadInput, one line, for a file that is truncated, corrupt or none."""
    with Database(path) as base:
        if not any(t.startswith(KIND) or t in META for t in base.columns):
            raise BadInput(path, "an SQLite file, but not an nsys export", "make one: nsys export --type sqlite")
        warnings: list[str] = []
        kernels, in_node, about = _kernels(base, warnings)
        copied = _activity(base, "MEMCPY", warnings, bytes="bytes", kind="copyKind")
        memcpy = Copies.of(**_with_graph(copied, in_node))
        memset = Fills.of(**_with_graph(_activity(base, "MEMSET", warnings, bytes="bytes"), in_node))
        graphs = GraphLaunches.of(**_activity(base, "GRAPH_TRACE", warnings, graph_exec="graphExecId"))
        about |= _calls(base) | _ranges(base, warnings) | _versions(base, warnings)
        rows, gpus = _gpus(base, (kernels, memcpy, memset, graphs), warnings)
        told = base.rows("DISTINCT text", "DIAGNOSTIC_EVENT", ("severity", "text"), "WHERE severity >= 2")
        warnings += [f"nsys: {anonymous(' '.join(str(text).split()))}" for (text,) in told]  # no paths of that machine
        trace = Trace("nsys", path.name, gpus=gpus, host=_host(base), **about).but(rows)
    launches = int(named(GRAPH_LAUNCH.match, trace.call_names, trace.calls.name).sum())
    mode = graph_mode(rows, launches, trace.graph_setting or len(trace.calls), warnings)
    return trace.but(graph_mode=mode, warn=warnings)


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


def _activity(base: Database, table: str, warnings: list[str], **more: str) -> dict[str, NDArray[Any]]:
    """The common columns of an activity table plus `more`; rows without a usable time are dropped and counted."""
    table = KIND + table
    have = base.columns.get(table, set())
    if not have:
        return {}
    for need in {"start", "end"} - have:
        raise BadInput(base.path, f"{table} has no column {need}", "export it again")
    found = base.arrays(table, {**COLUMNS, **more})
    good = (found["end_ns"] >= found["start_ns"]) & (found["end_ns"] > 0)
    if not good.all():
        # CUPTI writes start = end = 0 when it could not collect the times.
        warnings.append(f"{int((~good).sum())} rows of {table} have no usable times and were dropped")
        found = {name: column[good] for name, column in found.items()}
    for name in {"graph_node", "graph"} & found.keys():
        found[name][found[name] == 0] = NONE  # 0 and NULL both mean outside graphs
        if not (found[name] > 0).any():  # without any graph, the column is stored once, not per row
            found[name] = np.broadcast_to(found[name].dtype.type(NONE), found[name].shape)
    return found


def _with_graph(found: dict[str, NDArray[Any]], in_node: bool) -> dict[str, NDArray[Any]]:
    """The columns with the graph taken from the node where only the node is stored (schemas before 3.24, copies)."""
    node = found.get("graph_node")
    if node is None or not in_node or not node.strides[0]:
        return found
    graph = found.get("graph", np.broadcast_to(np.int32(NONE), node.shape))
    missing = (graph == NONE) & (node > 0)
    return found | {"graph": np.where(missing, node >> 32, graph)} if missing.any() else found


def _kernels(base: Database, warnings: list[str]) -> tuple[Kernels, bool, dict[str, Any]]:
    """The kernels, whether a node number's upper half is its graph's number, names and how they were launched.

    It was so in every file looked at, and is documented nowhere, so rows of this file with both numbers may veto it.
    """
    have = base.columns.get(KIND + "KERNEL", set())
    column = next((c for c in ("demangledName", "shortName", "mangledName") if c in have), None)
    if not have:
        return Kernels.of(), True, {}
    if column is None:
        raise BadInput(base.path, f"{KIND}KERNEL has no name column", "export it again")
    found = _activity(base, "KERNEL", warnings, name=column)
    if not {"process", "correlation"} <= found.keys():
        warnings.append("kernels carry no process or no correlation: they cannot be joined to API calls")
    ids = compact(found["name"])[0].tolist()
    found["name"], names = _named(base, found["name"])
    launched = _launched(base, column, dict(zip(ids, names, strict=True)))
    in_node = True
    if {"graph", "graph_node"} <= found.keys():
        graph, node = found["graph"], found["graph_node"]
        in_node = bool(((node >> 32 == graph) | (graph <= 0) | (node <= 0)).all())
    return Kernels.of(**_with_graph(found, in_node)), in_node, {"names": names, "launched": launched}


def _launched(base: Database, column: str, names: Mapping[int, str]) -> dict[str, Launch]:
    """How the first launch of each name was configured, of LOOKED_AT rows: reading all would take as long again."""
    table = KIND + "KERNEL"
    if not base.columns[table].issuperset(LAUNCH):
        return {}
    low, high = base.edges(table)
    rows = str([*range(low, high + 1, (high - low) // LOOKED_AT + 1)])
    first: dict[str, Launch] = {}
    what = ", ".join(f'"{c}"' for c in (column, *LAUNCH))
    for number, *found in base.rows(what, table, (), f"WHERE rowid IN {LISTED}", rows):
        name = names.get(number)
        if name and name not in first and all(isinstance(v, int) for v in found):
            registers, static, dynamic, *sizes = found
            first[name] = Launch(registers, static + dynamic, tuple(sizes[:3]), tuple(sizes[3:]))
    return first


def _named(base: Database, ids: NDArray[Any]) -> tuple[NDArray[Any], list[str]]:
    """Consecutive codes and their texts, from StringIds numbers; the environment, in the same table, is not read."""
    unique, codes = compact(ids)
    texts = dict(base.rows("id, value", "StringIds", ("id", "value"), f"WHERE id IN {LISTED}", str(unique.tolist())))
    return codes, [texts.get(i) or f"(unnamed {i})" for i in unique.tolist()]


def _calls(base: Database) -> dict[str, Any]:
    if not {"start", "end", "nameId"} <= base.columns.get(KIND + "RUNTIME", set()):
        return {}
    columns = {k: COLUMNS[k] for k in ("start_ns", "end_ns", "correlation")}
    columns |= {"name": "nameId", "thread": "globalTid", "process": "globalTid"}
    found = base.arrays(KIND + "RUNTIME", columns)
    found["name"], names = _named(base, found["name"])
    return {"calls": Calls.of(**found), "call_names": names}


def _ranges(base: Database, warnings: list[str]) -> dict[str, Any]:
    """Finished push/pop and start/end ranges, their labels, and the names of domains."""
    have = base.columns.get("NVTX_EVENTS", set())
    if not {"start", "end", "eventType"} <= have:
        return {}
    text, join = "n.text" if "text" in have else "NULL", ""
    if "textId" in have and "StringIds" in base.columns:
        text, join = f"{text}, s.value", " LEFT JOIN StringIds s ON s.id = n.textId"
    thread, domain = (f'IFNULL(n."{k}", {NONE})' if k in have else str(NONE) for k in ("globalTid", "domainId"))
    both, across, created = (_types(base, names) for names in (PUSH_POP | START_END, START_END, DOMAIN))
    label, of_type = f"COALESCE({text}, '')", f"n{join} WHERE n.eventType IN"
    domains = dict(base.rows(f"{domain}, {label}", "NVTX_EVENTS", (), f"{of_type} ({created})"))
    ((unfinished,),) = base.rows("count(*)", "NVTX_EVENTS", (), f'{of_type} ({both}) AND n."end" IS NULL')
    if unfinished:
        warnings.append(f"{unfinished} NVTX ranges never ended and are left out")
    query = (
        f'SELECT n.start, n."end", {thread}, {domain}, n.eventType IN ({across}), {label} FROM NVTX_EVENTS {of_type} '
        f'({both}) AND n."end" IS NOT NULL'
    )
    known: dict[str, int] = {}
    parts: list[list[NDArray[Any]]] = []
    with base.one_line():
        for *numbers, texts in base.batches(query):
            codes = [known.setdefault(_decoded(text), len(known)) for text in texts]
            parts.append([whole_numbers("start_ns", column) for column in (*numbers, codes)])
    if not parts:
        return {"domains": domains}
    names = ("start_ns", "end_ns", "thread", "domain", "scope", "label")
    columns = dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))
    ranges = Ranges.of(**columns, process=_process(columns["thread"]))
    return {"ranges": ranges, "labels": list(known), "domains": domains}


def _process(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The processes in serialised ids; NONE stays NONE."""
    return np.where(ids == NONE, NONE, ids >> 24 & 0xFFFFFF)


def _decoded(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _types(base: Database, names: Mapping[str, int]) -> str:
    """Event type numbers by name from the file, else those of the known schemas, for an SQL list."""
    found = base.rows("id", "ENUM_NSYS_EVENT_TYPE", ("id", "name"), f"WHERE name IN {LISTED}", json.dumps([*names]))
    return ",".join(str(int(n)) for (n,) in found or zip(names.values(), strict=True))


def _versions(base: Database, warnings: list[str]) -> dict[str, str]:
    """Product version, schema version, and the graph setting of the capture ("node", "graph" or "")."""
    meta: dict[str, str] = {}
    for table in META:
        meta |= dict(base.rows("name, value", table, ("name", "value"), "WHERE name LIKE 'EXPORT_%_VERSION%'"))
    where = "WHERE name LIKE '%CUDA_GRAPH_TRACE_OPTIONS:MODE' AND value <> ''"
    settings = {str(value).lower() for (value,) in base.rows("value", "META_DATA_CAPTURE", ("name", "value"), where)}
    if len(settings) > 1:
        warnings.append(f"processes were captured with different graph settings: {', '.join(sorted(settings))}")
    versions = {key: meta.get(f"EXPORT_{of}_VERSION", "") for key, of in VERSIONS.items()}
    return versions | {"graph_setting": settings.pop() if len(settings) == 1 else ""}


def _gpus(
    base: Database, rows: Collection[Activity], warnings: list[str]
) -> tuple[Collection[Activity], dict[int, str]]:
    """The rows with devices told apart across processes, and the names of the devices in use."""
    cuda = "IFNULL(cuDevice, id)" if "cuDevice" in base.columns.get("TARGET_INFO_GPU", set()) else "id"
    listed = base.rows(f"id, {cuda}, IFNULL(name, '')", "TARGET_INFO_GPU", ("id", "name"))
    by_id, by_cuda = {gpu: name for gpu, _, name in listed}, {device: name for _, device, name in listed}
    # The exporter has written both plain process ids and serialised ones.
    process_id = f"CASE WHEN pid < 1 << 24 THEN pid ELSE {PROCESS.format('pid')} END"
    found = base.rows(f"cudaId, {process_id}, gpuId", "TARGET_INFO_CUDA_DEVICE", ("cudaId", "pid", "gpuId"))
    # (a process's own number, process) -> GPU of the host
    real = {(device, process): gpu for device, process, gpu in found if gpu is not None}
    seen: dict[int, set[int]] = {}
    for key in sorted({(device, process) for r in rows for device, process in group(r.device, r.process)[0]}):
        seen.setdefault(key[0], set()).update({real[key]} if key in real else ())  # else it keeps its numbers
    if all(len(gpus) <= 1 for gpus in seen.values()):
        return rows, {d: by_id.get(min(gpus), "") if gpus else by_cuda.get(d, "") for d, gpus in seen.items()}
    warnings.append("processes number their GPUs differently; devices here are the host's GPU numbers")
    moved = []
    for r in rows:
        own = r.device.copy()
        for (device, process), gpu in real.items():
            own[(r.process == process) & (r.device == device)] = gpu
        moved.append(replace(r, device=own))
    return moved, {int(d): by_id.get(int(d), "") for r in moved for d in compact(r.device)[0]}


def _host(base: Database) -> dict[str, tuple[int, int]]:
    sums = 'count(*), IFNULL(sum("end" - start), 0)'
    return {
        label: (int(count), int(total))
        for label, table in HOST.items()
        for count, total in base.rows(sums, table, ("start", "end"))
    }


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
            tables = "sqlite_master t, pragma_table_info(t.name) c WHERE t.type = 'table'"
            self.columns: dict[str, set[str]] = {}  # of every table
            for table, column in self._base.execute(f"SELECT t.name, c.name FROM {tables}"):
                self.columns.setdefault(table, set()).add(column)

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
        """Whatever a broken file makes SQLite raise becomes one line."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadInput(self.path, f"cannot be read as SQLite ({reason})", "copy or export it again") from None

    def rows(
        self, what: str, table: str, needs: Collection[str], rest: str = "", *values: str
    ) -> list[tuple[Any, ...]]:
        """All rows of a small query; none where the table does not have the columns that it needs."""
        if table not in self.columns or not self.columns[table].issuperset(needs):
            return []
        with self.one_line():
            found = self._base.execute(f'SELECT {what} FROM "{table}" {rest}', values).fetchall()
        return [tuple(map(_decoded, row)) for row in found]

    def edges(self, table: str) -> tuple[int, int]:
        """The first and the last row's number: asked for one by one, since SQLite scans the table for both together."""
        low, high = (self.rows(f"{edge}(rowid)", table, ())[0][0] or 0 for edge in ("min", "max"))
        return low, high

    def arrays(self, table: str, wanted: Mapping[str, str]) -> dict[str, NDArray[Any]]:
        """Large columns of one table: result name -> column, left out where it has no such column.

        NULL becomes NONE, and the serialised id in `process` a process. Raises BadInput when a column holds something
        else than whole numbers.
        """
        wanted = {name: column for name, column in wanted.items() if column in self.columns[table]}
        low, high = self.edges(table)
        rows = high - low + 1
        if rows > self.path.stat().st_size:  # numbers with holes: no row takes less than a byte
            ((rows,),) = self.rows("count(*)", table, ())
        full = {name: np.empty(rows, np.int64 if name in WIDE else np.int32) for name in wanted}
        try:
            at = self._fill(full, self._from_pages(table, wanted), rows)
        except btree.Unusual:
            at = self._fill(full, self._from_rows(table, wanted), rows)
        return {name: column[:at] for name, column in full.items()}

    def _fill(self, full: dict[str, NDArray[Any]], blocks: Iterator[dict[str, NDArray[Any]]], rows: int) -> int:
        """Write blocks where they belong, so that the rows are in memory once, and narrow; returns their number."""
        at = 0
        with self.one_line():
            for block in blocks:
                count = len(next(iter(block.values())))
                if at + count > rows:
                    raise btree.Unusual
                for name, column in block.items():
                    full[name][at : at + count] = whole_numbers(name, _process(column) if name == "process" else column)
                at += count
        return at

    def _from_pages(self, table: str, wanted: Mapping[str, str]) -> Iterator[dict[str, NDArray[Any]]]:
        """Blocks of columns by btree; raises Unusual for what only SQLite reads."""
        query = "SELECT name, cid, pk + hidden FROM pragma_table_xinfo(?)"
        ((root,),) = self._base.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,))
        listed = self._base.execute(query, (table,)).fetchall()
        if any(odd for *_, odd in listed):
            raise btree.Unusual
        place = {name: cid for name, cid, _ in listed}
        with self.path.open("rb", buffering=0) as file:
            for block in btree.columns(file, root, {place[column] for column in wanted.values()}, NONE):
                yield {name: block[place[column]] for name, column in wanted.items()}

    def _from_rows(self, table: str, wanted: Mapping[str, str]) -> Iterator[dict[str, NDArray[Any]]]:
        what = ", ".join(f'"{column}"' for column in wanted.values())
        for columns in self.batches(f'SELECT {what} FROM "{table}"'):
            known = ([NONE if v is None else v for v in column] for column in columns)
            yield {name: whole_numbers("start_ns", column) for name, column in zip(wanted, known, strict=True)}

    def batches(self, query: str) -> Iterator[Iterator[tuple[Any, ...]]]:
        """The columns of a query, FETCHED rows at a time."""
        found = self._base.execute(query)
        while rows := found.fetchmany(FETCHED):
            yield zip(*rows, strict=True)
