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
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from lab.base.errors import BadInput
from lab.trace.model import COPY_KINDS, NONE, Calls, Copies, Fills, Kernels, Ranges, Trace

KERNEL, COPY, FILL = ("kernel", "gpu_kernel"), ("gpu_memcpy", "memcpy"), ("gpu_memset", "memset")
CALL = ("cuda_runtime", "cuda_driver", "runtime", "driver")
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
    by: dict[str, list[dict[str, Any]]] = {}
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


def _trace(path: Path, meta: Mapping[str, Any], by: dict[str, list[dict[str, Any]]], warnings: list[str]) -> Trace:
    calls = _of(by, CALL)
    processes = {e.get("pid") for e in calls}
    process = processes.pop() if len(processes) == 1 else NONE
    process = process if isinstance(process, int) else NONE
    if not calls:
        warnings.append("no CUDA API calls in the file: kernels cannot be joined to their launches")
    elif process == NONE:
        warnings.append("several processes in one file: kernels cannot be told apart by process")
    names, labels, call_names = dict[str, int](), dict[str, int](), dict[str, int]()
    launches = {_int(_args(e), "correlation") for e in calls if GRAPH_LAUNCH.match(str(e.get("name")))} - {NONE}
    kernels, copies, fills = _of(by, KERNEL), _of(by, COPY), _of(by, FILL)
    total = len(kernels) + len(copies) + len(fills)
    found = [_activity(part, process, launches) for part in (kernels, copies, fills)]
    nodes = sum(int((np.asarray(c["graph"]) != NONE).sum()) for c in found if c)
    if launches and not nodes:
        warnings.append(f"{len(launches)} graph launches in the API calls, but no graph work in the file")
    devices = sorted({int(d) for c in found for d in c.get("device", ())})
    known = {d.get("id"): str(d.get("name", "")) for d in meta.get("deviceProperties", []) if isinstance(d, dict)}
    mode = "node" if nodes else "unknown" if launches or not calls else "none"
    if not total:
        warnings.append("no device activity in the file: was the CUDA activity recorded?")
    ranges = _of(by, ("user_annotation",))
    return Trace(
        tool="kineto",
        source=path.name,
        schema_version=str(meta.get("schemaVersion", "")),
        graph_mode=mode,
        gpus={d: known.get(d, "") for d in devices},
        kernels=Kernels.of(**found[0], **({"name": _codes(kernels, names)} if kernels else {})),
        memcpy=Copies.of(
            **found[1], **({"bytes": _bytes(copies), "kind": [_kind(e) for e in copies]} if copies else {})
        ),
        memset=Fills.of(**found[2], **({"bytes": _bytes(fills)} if fills else {})),
        ranges=Ranges.of(**_host_columns(ranges), label=_codes(ranges, labels)) if ranges else Ranges.empty(),
        calls=Calls.of(
            **_host_columns(calls),
            name=_codes(calls, call_names),
            correlation=[_int(_args(e), "correlation") for e in calls],
        )
        if calls
        else Calls.empty(),
        names=list(names),
        labels=list(labels),
        call_names=list(call_names),
        warnings=tuple(warnings),
        host=_host(by),
    )


def _of(by: Mapping[str, list[dict[str, Any]]], categories: Iterable[str]) -> list[dict[str, Any]]:
    return [e for c in categories for e in by.get(c, [])]


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, Mapping) else {}


def _int(values: Mapping[str, Any], *keys: str) -> int:
    """The first key with a whole number, NONE without one."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, str) and value.lstrip("-").isdigit():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return NONE


def _ns(us: Any) -> int:
    """Microseconds to whole nanoseconds."""
    return round(us * 1000)


def _times(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Start and end; the end is the start plus the rounded duration, so that durations stay exact."""
    start = [_ns(e["ts"]) for e in events]
    return {"start_ns": start, "end_ns": [s + _ns(e.get("dur", 0)) for s, e in zip(start, events, strict=True)]}


def _activity(events: list[dict[str, Any]], process: int, launches: set[int]) -> dict[str, Any]:
    """Columns of device events; an event launched by a graph launch belongs to a graph, number 0 when not named."""
    if not events:
        return {}
    args = [_args(e) for e in events]
    correlation = [_int(a, "correlation", "correlation id") for a in args]
    graph = [_int(a, "graph id", "graph_id", "graphId") for a in args]
    node = [_int(a, "graph node id", "graph_node_id", "graphNodeId") for a in args]
    graph = [
        (g if g > 0 else 0) if c in launches or g > 0 or n > 0 else NONE
        for g, n, c in zip(graph, node, correlation, strict=True)
    ]
    device = [_int(a, "device") if "device" in a else _int(e, "pid") for a, e in zip(args, events, strict=True)]
    stream = [_int(a, "stream") if "stream" in a else _int(e, "tid") for a, e in zip(args, events, strict=True)]
    return _times(events) | {
        "device": device,
        "stream": stream,
        "context": [_int(a, "context") for a in args],
        "process": [process] * len(events),
        "correlation": correlation,
        "graph": graph,
        "graph_node": [n if n > 0 else NONE for n in node],
    }


def _host_columns(events: list[dict[str, Any]]) -> dict[str, Any]:
    threads = [_int(e, "tid") for e in events]
    return _times(events) | {"process": [_int(e, "pid") for e in events], "thread": threads}


def _codes(events: list[dict[str, Any]], table: dict[str, int]) -> list[int]:
    return [table.setdefault(str(e.get("name", "")), len(table)) for e in events]


def _bytes(events: list[dict[str, Any]]) -> list[int]:
    return [max(_int(_args(e), "bytes"), 0) for e in events]


def _kind(event: Mapping[str, Any]) -> int:
    """The direction in a name such as `Memcpy HtoD (Pinned -> Device)`."""
    found = DIRECTION.search(str(event.get("name", "")))
    return COPY_KINDS.index(found[1]) if found else 0


def _host(by: Mapping[str, list[dict[str, Any]]]) -> dict[str, tuple[int, int]]:
    """Host waits and profiler overhead, counted and kept apart from busy time."""
    found = {}
    for label, events in (("synchronization", _of(by, SYNC)), ("profiler overhead", _of(by, ("overhead",)))):
        if events:
            found[label] = (len(events), sum(_ns(e.get("dur", 0)) for e in events))
    return found
