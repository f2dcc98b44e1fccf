"""PyTorch's profiler (Kineto) JSON as a trace.

The file is a Chrome trace: events with a category, a start and a duration in microseconds. Kernels, memcpys and memsets
occupy the device (their category names differ in case between releases); the rest is host time, or a copy of host
ranges drawn over the device (gpu_user_annotation). Absolute times have 16 digits before the point, where a double is
250 ns coarse: long numbers are read as decimals and rounded to nanoseconds once.

CUPTI lists a CUDA graph's kernels one by one with the correlation id of the cudaGraphLaunch; the graph is known where
the event says "graph id". The whole file is parsed in memory, about ten times its size: captures of gigabytes belong in
nsys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput
from lab.trace.model import COPY_KINDS, NONE, Calls, Copies, Fills, Kernels, Ranges, Trace

Event = dict[str, Any]
KERNEL, COPY, FILL = ("kernel", "gpu_kernel"), ("gpu_memcpy", "memcpy"), ("gpu_memset", "memset")
CALL = ("cuda_runtime", "cuda_driver", "runtime", "driver")
RANGE = ("user_annotation",)
SYNC = ("cuda_sync", "synchronization")
DIRECTION = re.compile(r"\b(" + "|".join(sorted(COPY_KINDS, key=len, reverse=True)) + r")\b")
GRAPH_LAUNCH = re.compile(r"cu(da)?GraphLaunch")


def read(path: Path, text: str) -> Trace:
    """The trace in a Kineto file's text.

    Raises BadInput, one line, when it is cut off, not JSON, or JSON of something else.
    """
    try:
        content = json.loads(text, parse_float=_number)
    except (ValueError, RecursionError) as error:
        where = f"at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise BadInput(path, f"not complete JSON, {where} of {len(text)}", "export the trace again") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise BadInput(path, "JSON without traceEvents", "give a trace of torch.profiler's export_chrome_trace")
    meta = content if isinstance(content, dict) else {}
    warnings: list[str] = []
    by: dict[str, list[Event]] = {}
    odd = 0
    for e in events:
        if e.get("ph") == "X" and isinstance(e.get("ts"), int | float | Decimal):
            duration = e.get("dur", 0)
            if isinstance(duration, int | float | Decimal) and duration >= 0:
                by.setdefault(str(e.get("cat", "")).lower(), []).append(e)
                continue
        odd += e.get("ph") == "X"
    if odd:
        warnings.append(f"{odd} events without a usable time were dropped")
    if not meta.get("schemaVersion") and not any(c in by for c in (*KERNEL, *COPY, *CALL, "cpu_op")):
        raise BadInput(path, "a Chrome trace without any event of PyTorch's profiler", "see README.md for what is read")
    return _trace(path, meta, by, warnings)


def _number(text: str) -> float | Decimal:
    """A double keeps 15 digits; beyond, keep them all."""
    return float(text) if len(text) <= 16 else Decimal(text)


def _trace(path: Path, meta: Mapping[str, Any], by: Mapping[str, list[Event]], warnings: list[str]) -> Trace:
    kernels, copies, fills, calls, ranges = (
        [e for category in kind for e in by.get(category, [])] for kind in (KERNEL, COPY, FILL, CALL, RANGE)
    )
    processes = {e.get("pid") for e in calls}
    only = processes.pop() if len(processes) == 1 else NONE
    process = only if isinstance(only, int) else NONE
    if not calls:
        warnings.append("no CUDA API calls in the file: kernels cannot be joined to their launches")
    elif process == NONE:
        warnings.append("several processes in one file: kernels cannot be told apart by process")
    launches = {_arg(e, "correlation") for e in calls if GRAPH_LAUNCH.match(str(e.get("name")))} - {NONE}
    found = [_activity(part, process, launches) for part in (kernels, copies, fills)]
    nodes = sum(graph != NONE for columns in found for graph in columns.get("graph", ()))
    if launches and not nodes:
        warnings.append(f"{len(launches)} graph launches in the API calls, but no graph work in the file")
    if not (kernels or copies or fills):
        warnings.append("no device activity in the file: was the CUDA activity recorded?")
    names, labels, call_names = dict[str, int](), dict[str, int](), dict[str, int]()
    if kernels:
        found[0]["name"] = _codes(kernels, names)
    if copies:
        found[1]["kind"] = [_kind(e) for e in copies]
    for columns, events in zip(found[1:], (copies, fills), strict=True):
        if events:
            columns["bytes"] = [max(_arg(e, "bytes"), 0) for e in events]
    known = {d.get("id"): str(d.get("name", "")) for d in meta.get("deviceProperties", []) if isinstance(d, dict)}
    return Trace(
        tool="kineto",
        source=path.name,
        schema_version=str(meta.get("schemaVersion", "")),
        graph_mode="node" if nodes else "unknown" if launches or not calls else "none",
        gpus={d: known.get(d, "") for d in sorted({d for columns in found for d in columns.get("device", ())})},
        kernels=Kernels.of(**found[0]),
        memcpy=Copies.of(**found[1]),
        memset=Fills.of(**found[2]),
        ranges=Ranges.of(**_host(ranges), label=_codes(ranges, labels)) if ranges else Ranges.empty(),
        calls=Calls.of(
            **_host(calls), name=_codes(calls, call_names), correlation=[_arg(e, "correlation") for e in calls]
        )
        if calls
        else Calls.empty(),
        names=list(names),
        labels=list(labels),
        call_names=list(call_names),
        warnings=tuple(warnings),
        host={
            label: (len(events), sum(_ns(e.get("dur", 0)) for e in events))
            for label, kind in (("synchronization", SYNC), ("profiler overhead", ("overhead",)))
            if (events := [e for category in kind for e in by.get(category, [])])
        },
    )


def _int(values: Mapping[str, Any], *keys: str) -> int:
    """The first key with a whole number, NONE without one."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, str) and value.lstrip("-").isdigit():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return NONE


def _arg(event: Event, *keys: str) -> int:
    """The same of an event's arguments."""
    args = event.get("args")
    return _int(args, *keys) if isinstance(args, Mapping) else NONE


def _ns(us: Any) -> int:
    """Microseconds to whole nanoseconds."""
    return round(us * 1000)


def _times(events: list[Event]) -> dict[str, Any]:
    """Start and end; the end is the start plus the rounded duration, so that durations stay exact."""
    start = [_ns(e["ts"]) for e in events]
    return {"start_ns": start, "end_ns": [s + _ns(e.get("dur", 0)) for s, e in zip(start, events, strict=True)]}


def _activity(events: list[Event], process: int, launches: set[int]) -> dict[str, Any]:
    """Columns of device events; an event launched by a graph launch belongs to a graph, number 0 when not named."""
    if not events:
        return {}
    correlation = [_arg(e, "correlation", "correlation id") for e in events]
    graph = [_arg(e, "graph id", "graph_id", "graphId") for e in events]
    node = [_arg(e, "graph node id", "graph_node_id", "graphNodeId") for e in events]
    both = zip(graph, node, correlation, strict=True)
    place = {
        column: [_arg(e, column) if column in (e.get("args") or ()) else _int(e, own) for e in events]
        for column, own in (("device", "pid"), ("stream", "tid"))
    }
    return (
        _times(events)
        | place
        | {
            "context": [_arg(e, "context") for e in events],
            "process": [process] * len(events),
            "correlation": correlation,
            "graph": [max(g, 0) if c in launches or g > 0 or n > 0 else NONE for g, n, c in both],
            "graph_node": [n if n > 0 else NONE for n in node],
        }
    )


def _host(events: list[Event]) -> dict[str, Any]:
    return _times(events) | {c: [_int(e, key) for e in events] for c, key in (("process", "pid"), ("thread", "tid"))}


def _codes(events: list[Event], table: dict[str, int]) -> list[int]:
    return [table.setdefault(str(e.get("name", "")), len(table)) for e in events]


def _kind(event: Event) -> int:
    """The direction in a name such as `Memcpy HtoD (Pinned -> Device)`."""
    found = DIRECTION.search(str(event.get("name", "")))
    return COPY_KINDS.index(found[1]) if found else 0
