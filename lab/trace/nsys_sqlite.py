"""Nsight Systems' SQLite export (2023.2 to 2026.2) into the normalised trace.

The exporter creates a table only when it has rows, and each release adds columns, so nothing is assumed: tables are
looked up, columns are selected by name, and what is absent becomes NONE. Only the tables read here are read: the
environment, the process output and the host's name lie in the same file.

Three things of the format decide the design. A correlation number is unique within one process only, so the process is
read with it from the serialised ids. A CUDA graph captured as a whole is one GRAPH_TRACE row and its kernels are not in
the file, so those rows stay a kind of their own. And device numbers are a process's own: where two processes use the
same number for different GPUs, TARGET_INFO_CUDA_DEVICE tells them apart.

Sources: the comments that the exporter writes into its CREATE TABLE statements, the schema chapter of NVIDIA's user
guide, and CUPTI's documentation for graph records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.base.errors import BadInput
from lab.trace.intervals import compact, group
from lab.trace.model import NONE, WIDE, Activity, Calls, Copies, Fills, GraphLaunches, Kernels, Ranges, Trace
from lab.trace.sqlite_columns import PROCESS, Database

KIND = "CUPTI_ACTIVITY_KIND_"
RANGES = {"NvtxPushPopRange": 59, "NvtxStartEndRange": 60}  # event types where the file has no ENUM table to ask
DOMAIN_CREATED = {"NvtxDomainCreate": 75}
LAUNCH = re.compile(r"cu(da)?GraphLaunch")
ABSOLUTE = re.compile(r"(?<![\w/])/(?:[^\s/]+/)+[^\s,;]*")  # a path of the profiled machine
COMMON = (
    *(("start_ns", "start"), ("end_ns", "end"), ("device", "deviceId"), ("context", "contextId")),
    *(("stream", "streamId"), ("correlation", "correlationId"), ("process", "globalPid")),
    *(("graph_node", "graphNodeId"), ("graph", "graphId")),
)


def read(path: Path) -> Trace:
    """The trace of an nsys SQLite export.

    Raises BadInput, one line, for a file that is truncated, corrupt, or not an nsys export.
    """
    with Database(path) as base:
        if not any(t.startswith(KIND) or t in ("META_DATA_EXPORT", "EXPORT_META_DATA") for t in base.tables):
            raise BadInput(path, "an SQLite file, but not an nsys export", "make one: nsys export --type sqlite")
        warnings: list[str] = []
        kernels, names, in_node = _kernels(base, warnings)
        copied = _activity(base, "MEMCPY", warnings, bytes="bytes", kind="copyKind")
        memcpy = Copies.of(**_with_graph(copied, in_node))
        memset = Fills.of(**_with_graph(_activity(base, "MEMSET", warnings, bytes="bytes"), in_node))
        graphs = GraphLaunches.of(**_activity(base, "GRAPH_TRACE", warnings, graph_exec="graphExecId"))
        calls, call_names = _calls(base)
        ranges, labels, domains = _ranges(base, warnings)
        version, schema, setting = _versions(base, warnings)
        activities: list[Activity] = [kernels, memcpy, memset, graphs]
        activities, gpus = _gpus(base, activities, warnings)
        warnings += _diagnostics(base)
        host = _host(base)
    kernels, memcpy, memset, graphs = activities  # type: ignore[assignment]
    launches = int(np.isin(calls.name, [i for i, n in enumerate(call_names) if LAUNCH.match(n)]).sum())
    mode, note = graph_mode((kernels, memcpy, memset), len(graphs), launches, setting, bool(len(calls)))
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
        kernels=kernels,
        memcpy=memcpy,
        memset=memset,
        graphs=graphs,
        ranges=ranges,
        calls=calls,
        warnings=tuple(warnings + note),
        domains=domains,
        host=host,
    )


def graph_mode(
    rows: tuple[Activity, ...], opaque: int, launches: int, setting: str, has_calls: bool
) -> tuple[str, list[str]]:
    """How graphs appear in this file, from what is in it rather than from what was asked for; and a warning or none.

    A capture in graph mode that launched no graph is an ordinary eager trace ("none").
    """
    nodes = sum(int((r.graph_node > 0).sum()) for r in rows)
    if opaque:
        both = [f"{nodes} rows carry a graph node beside {opaque} opaque graph rows"] if nodes else []
        return "graph", both
    if nodes:
        return "node", []
    if launches:
        what = f"{launches} graph launches in the API calls, but no graph work in the file: busy time is too low"
        return "unknown", [what]
    return ("none" if setting or has_calls else "unknown"), []


def _activity(base: Database, table: str, warnings: list[str], **more: str) -> dict[str, Any]:
    """The common columns of an activity table plus `more`; rows without a usable time are dropped and counted."""
    table = KIND + table
    have = base.columns(table)
    if not have:
        return {}
    for need in ("start", "end"):
        if need not in have:
            raise BadInput(base.path, f"{table} has no column {need}", "export it again")
    wanted = {}
    for name, column in (*COMMON, *more.items()):
        if column in have:
            value = PROCESS.format(f'"{column}"') if name == "process" else f'"{column}"'
            wanted[name] = (f"IFNULL({value}, {NONE})", np.int64 if name in WIDE else np.int32)
    found = base.arrays(table, wanted)
    good = (found["end_ns"] >= found["start_ns"]) & (found["end_ns"] > 0)
    if not good.all():
        # CUPTI writes start = end = 0 when it could not collect the times.
        warnings.append(f"{int((~good).sum())} rows of {table} have no usable times and were dropped")
        found = {name: column[good] for name, column in found.items()}
    for name in ("graph_node", "graph"):
        if name in found:
            found[name] = _none_for_zero(found[name])
    return found


def _none_for_zero(column: NDArray[Any]) -> NDArray[Any]:
    """0 and NULL both mean outside graphs. A column without any graph is stored once, not per row."""
    if not (column > 0).any():
        return np.broadcast_to(np.asarray(NONE, column.dtype), column.shape)
    column[column == 0] = NONE
    return column


def _graph_is_in_node(found: Mapping[str, NDArray[Any]]) -> bool:
    """Whether a node number's upper half is its graph's number, as far as this file's own rows can tell.

    It was so in every file looked at, and is documented nowhere, so rows with both numbers may veto it.
    """
    if "graph" not in found or "graph_node" not in found:
        return True
    both = (found["graph"] > 0) & (found["graph_node"] > 0)
    return bool((found["graph_node"][both] >> 32 == found["graph"][both]).all())


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
    """The kernels, their names, and whether a node's number tells its graph."""
    have = base.columns(KIND + "KERNEL")
    column = next((c for c in ("demangledName", "shortName", "mangledName") if c in have), None)
    if not have:
        return Kernels.empty(), [], True
    if column is None:
        raise BadInput(base.path, f"{KIND}KERNEL has no name column", "export it again")
    found = _activity(base, "KERNEL", warnings, name=column)
    if "process" not in found or "correlation" not in found:
        warnings.append("kernels carry no process or no correlation: they cannot be joined to API calls")
    found["name"], names = _named(base, found["name"])
    in_node = _graph_is_in_node(found)
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
    columns = {"start_ns": "start", "end_ns": '"end"', "name": "nameId"}
    if "globalTid" in have:
        columns |= {"thread": "globalTid", "process": PROCESS.format("globalTid")}
    if "correlationId" in have:
        columns["correlation"] = "correlationId"
    kinds = {name: np.int64 if name in WIDE else np.int32 for name in columns}
    wanted = {name: (f"IFNULL({column}, {NONE})", kinds[name]) for name, column in columns.items()}
    found = base.arrays(KIND + "RUNTIME", wanted)
    found["name"], names = _named(base, found["name"])
    return Calls.of(**found), names


def _ranges(base: Database, warnings: list[str]) -> tuple[Ranges, list[str], dict[int, str]]:
    """Finished push/pop and start/end ranges, their labels, and the names of domains."""
    have = base.columns("NVTX_EVENTS")
    if not {"start", "end", "eventType"} <= have:
        return Ranges.empty(), [], {}
    import pyarrow as pa

    text = "n.text" if "text" in have else "NULL"
    join = ""
    if "textId" in have and "StringIds" in base.tables:
        text, join = f"COALESCE({text}, s.value)", " LEFT JOIN StringIds s ON s.id = n.textId"
    process_wide = ",".join(str(i) for i in _event_types(base, {"NvtxStartEndRange": RANGES["NvtxStartEndRange"]}))
    number = {k: f'IFNULL(n."{k}", {NONE})' if k in have else str(NONE) for k in ("globalTid", "domainId")}
    kinds = ",".join(str(i) for i in _event_types(base, RANGES))
    domain_kinds = ",".join(str(i) for i in _event_types(base, DOMAIN_CREATED))
    source = f"FROM NVTX_EVENTS n{join} WHERE n.eventType"
    domains = dict(base.rows(f"SELECT {number['domainId']}, IFNULL({text}, '') {source} IN ({domain_kinds})"))
    unfinished = base.rows(f'SELECT count(*) {source} IN ({kinds}) AND n."end" IS NULL')[0][0]
    if unfinished:
        warnings.append(f"{unfinished} NVTX ranges never ended and are left out")
    query = (
        f'SELECT n.start, n."end", {number["globalTid"]}, {number["domainId"]}, '
        f"n.eventType IN ({process_wide}), IFNULL({text}, '') "
        f'{source} IN ({kinds}) AND n."end" IS NOT NULL'
    )
    with base.one_line():
        batches = list(base.batches(query))
    if not sum(b.num_rows for b in batches):
        return Ranges.empty(), [], domains
    start, end, thread, domain, scope, label = pa.Table.from_batches(batches).columns
    encoded = label.combine_chunks().dictionary_encode()
    threads = thread.to_numpy()
    ranges = Ranges.of(
        start_ns=start.to_numpy(),
        end_ns=end.to_numpy(),
        label=encoded.indices.to_numpy(),
        process=np.where(threads < 0, NONE, (threads >> 24) & 0xFFFFFF),
        thread=threads,
        domain=domain.to_numpy(),
        scope=scope.to_numpy(),
    )
    return ranges, encoded.dictionary.to_pylist(), domains


def _event_types(base: Database, names: Mapping[str, int]) -> list[int]:
    """Event type numbers by name from the file, else those of the known schemas."""
    if {"id", "name"} <= base.columns("ENUM_NSYS_EVENT_TYPE"):
        marks = ",".join("?" * len(names))
        found = base.rows(f"SELECT id FROM ENUM_NSYS_EVENT_TYPE WHERE name IN ({marks})", *names)
        if found:
            return [int(row[0]) for row in found]
    return list(names.values())


def _versions(base: Database, warnings: list[str]) -> tuple[str, str, str]:
    """Product version, schema version, and the graph setting of the capture ("node", "graph" or "")."""
    meta: dict[str, str] = {}
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        if table in base.tables:
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


def _gpus(base: Database, rows: list[Activity], warnings: list[str]) -> tuple[list[Activity], dict[int, str]]:
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
    if any(len(gpus) > 1 for gpus in seen.values()):
        warnings.append("processes number their GPUs differently; devices here are the host's GPU numbers")
        moved = []
        for r in rows:
            device = r.device.copy()
            for (pid, number), gpu in real.items():
                device[(r.process == pid) & (r.device == number)] = gpu
            moved.append(replace(r, device=device))
        return moved, {int(d): name_of.get(int(d), "") for r in moved for d in compact(r.device)[0]}
    return rows, {d: name_of.get(min(g), "") if g else by_cuda.get(d, "") for d, g in sorted(seen.items())}


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
    for label, table in (
        ("synchronization", KIND + "SYNCHRONIZATION"),
        ("profiler overhead", "PROFILER_OVERHEAD"),
        ("CUPTI overhead", KIND + "OVERHEAD"),
    ):
        if {"start", "end"} <= base.columns(table):
            count, total = base.rows(f'SELECT count(*), IFNULL(sum("end" - start), 0) FROM "{table}"')[0]
            found[label] = (int(count), int(total))
    return found
