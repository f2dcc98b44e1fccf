"""PyTorch's profiler (Kineto) JSON as a trace.

A Chrome trace: events with a category, a start and a duration in microseconds. Kernels, memcpys and memsets occupy the
device (their category names differ in case between releases); the rest is host time, or a copy of host ranges drawn
over the device (gpu_user_annotation). Absolute times have 16 digits before the point, where a double is 250 ns coarse:
they are read as decimals and rounded to nanoseconds once.

CUPTI lists a CUDA graph's kernels one by one with the correlation id of the cudaGraphLaunch; the graph is known where
the event says "graph id". The whole file is parsed in memory: captures of gigabytes belong in nsys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from lab.base.errors import BadInput
from lab.trace.model import (
    COPY_KINDS,
    GRAPH_LAUNCH,
    NONE,
    Calls,
    Copies,
    Fills,
    Kernels,
    Ranges,
    Trace,
    interned,
    whole,
)
from lab.trace.windows import told_apart

KERNEL, COPY, FILL = ("kernel", "gpu_kernel"), ("gpu_memcpy", "memcpy"), ("gpu_memset", "memset")
CALL, RANGE = ("cuda_runtime", "cuda_driver", "runtime", "driver"), ("user_annotation",)
OPERATOR, FUNCTION, MODULE = ("cpu_op",), ("python_function",), "nn.Module: "
DOMAINS = {1: "operator", 2: "module"}  # beside user annotations, which have none
HOST = {"synchronization": ("cuda_sync", "synchronization"), "profiler overhead": ("overhead",)}
DIRECTION = re.compile(r"\b(" + "|".join(sorted(COPY_KINDS, key=len, reverse=True)) + r")\b")
LATEST_US = 4 * 10**15  # year 2096


class Arguments(Struct, frozen=True, omit_defaults=True):
    """What is read of an event's arguments: whole numbers, some of them as text."""

    correlation: Any = None
    device: Any = None
    context: Any = None
    stream: Any = None
    bytes: Any = None
    graph: Any = msgspec.field(name="graph id", default=None)
    graph_node: Any = msgspec.field(name="graph node id", default=None)


class Event(Struct, frozen=True, omit_defaults=True):
    """What is read of an event; ts, dur in us."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Decimal | None = None
    dur: Decimal | None = Decimal(0)
    pid: Any = None
    tid: Any = None
    args: Arguments | None = None

    def arg(self, name: str) -> int:
        """An argument as a whole number, NONE where it is none."""
        return _whole(getattr(self.args, name, None))

    @property
    def bytes(self) -> int:
        """Moved by a copy or a fill."""
        return max(self.arg("bytes"), 0)


class Gpu(Struct, frozen=True):
    """What is read of an entry of deviceProperties."""

    id: int | None = None
    name: str | None = None


class File(Struct, frozen=True):
    """What is read of a file, and what `lab profile` keeps of it, with what the profile is about."""

    schema: Any = msgspec.field(name="schemaVersion", default="")
    gpus: list[Gpu] = msgspec.field(name="deviceProperties", default_factory=list)
    events: list[Event] | None = msgspec.field(name="traceEvents", default=None)
    killgate: dict[str, Any] | None = None


def decode(path: Path, text: str) -> File:
    """A Kineto file's text; raises BadInput, one line, when it is cut off, not JSON, or JSON of something else."""
    try:
        try:
            found = msgspec.json.decode(text, type=File | list[Event])
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # Python's json writes and reads NaN, which is no JSON
            found = msgspec.convert(json.loads(text, parse_float=Decimal), File | list[Event], strict=False)
    except msgspec.ValidationError as error:
        raise BadInput(path, f"JSON of another form ({error})", "export the trace again") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(path, f"not complete JSON ({error})", "export the trace again") from None
    file = found if isinstance(found, File) else File(events=found)
    if file.events is None:
        raise BadInput(path, "JSON without traceEvents", "give a trace of torch.profiler's export_chrome_trace")
    return file


def read(path: Path, text: str) -> Trace:
    """The trace in a Kineto file's text; raises BadInput as `decode` does, and for a trace of another program."""
    file, by, odd, warnings = decode(path, text), dict[str, list[Event]](), 0, list[str]()
    for e in file.events or ():
        if e.ph == "X" and e.ts is not None and e.dur is not None and _is_time(path, e, e.ts) and e.dur >= 0:
            by.setdefault(e.cat.lower(), []).append(e)
        else:
            odd += e.ph == "X"
    if odd:
        warnings.append(f"{odd} events without a usable time were dropped")
    if not file.schema and not any(c in by for c in (*KERNEL, *COPY, *CALL, "cpu_op")):
        raise BadInput(path, "a Chrome trace without any event of PyTorch's profiler", "see README.md for what is read")

    def of(kind: Sequence[str]) -> list[Event]:
        return [e for category in kind for e in by.get(category, [])]

    kernels, copies, fills, calls, user, operators = map(of, (KERNEL, COPY, FILL, CALL, RANGE, OPERATOR))
    modules = [e for e in of(FUNCTION) if e.name.startswith(MODULE)]
    ranges, domain = [*user, *operators, *modules], np.repeat([0, 1, 2], list(map(len, (user, operators, modules))))
    processes = {_whole(e.pid) for e in calls}
    process = processes.pop() if len(processes) == 1 else NONE
    if not calls:
        warnings.append("no CUDA API calls in the file: kernels cannot be joined to their launches")
    elif process == NONE:
        warnings.append("several processes in one file: kernels cannot be told apart by process")
    launches = {e.arg("correlation") for e in calls if GRAPH_LAUNCH.match(e.name)} - {NONE}
    device = [e for part in (kernels, copies, fills) for e in part]
    nodes = any(_graph(e, launches) != NONE for e in device)
    if launches and not nodes:
        warnings.append(f"{len(launches)} graph launches in the API calls, but no graph work in the file")
    if not device:
        warnings.append("no device activity in the file: was the CUDA activity recorded?")
    (name, names), (label, labels), (call, call_names) = (interned(e.name for e in x) for x in (kernels, ranges, calls))
    known = {gpu.id: gpu.name or "" for gpu in file.gpus}
    correlation = [e.arg("correlation") for e in calls]
    found = Trace(
        tool="kineto",
        source=path.name,
        schema_version=str(file.schema),
        graph_mode="node" if nodes else "unknown" if launches or not calls else "none",
        gpus={d: known.get(d, "") for d in sorted({_place(e, "device", e.pid) for e in device})},
        kernels=Kernels.of(**_activity(kernels, process, launches), name=name),
        memcpy=Copies.of(
            **_activity(copies, process, launches), bytes=[e.bytes for e in copies], kind=[_kind(e) for e in copies]
        ),
        memset=Fills.of(**_activity(fills, process, launches), bytes=[e.bytes for e in fills]),
        ranges=Ranges.of(**_host(ranges), label=label, domain=domain),
        domains=DOMAINS,
        calls=Calls.of(**_host(calls), name=call, correlation=correlation),
        names=names,
        labels=labels,
        call_names=call_names,
        warnings=tuple(warnings),
        host={key: (len(x), sum(_ns(e.dur) for e in x)) for key, kind in HOST.items() if (x := of(kind))},
    )
    return told_apart(found) if nodes else found


def _whole(value: Any) -> int:
    """A whole number, also as text; NONE for anything else."""
    if isinstance(value, str):
        return whole(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else NONE


def _place(event: Event, name: str, otherwise: Any) -> int:
    """The device or stream: the argument where there is one, else the row that the event is drawn in."""
    own = getattr(event.args, name, None)
    return _whole(otherwise if own is None else own)


def _graph(event: Event, launches: set[int]) -> int:
    """The graph of a device event, 0 for one that is not named but was launched by a graph launch."""
    graph, node = event.arg("graph"), event.arg("graph_node")
    return max(graph, 0) if event.arg("correlation") in launches or graph > 0 or node > 0 else NONE


def _is_time(path: Path, event: Event, ts: Decimal) -> bool:
    """True; raises BadInput for a time that is NaN, infinite or beyond every clock, whose nanoseconds are no number."""
    for us in (ts, event.dur or ts):
        if not us.is_finite() or not -LATEST_US < us < LATEST_US:
            what = f'event "{event.name[:80]}" has ts = {event.ts:.40}, dur = {event.dur:.40}'
            raise BadInput(path, what, "export the trace again; times are in us")
    return True


def _ns(us: Decimal | None) -> int:
    return round((us or 0) * 1000)


def _times(events: list[Event]) -> dict[str, Any]:
    """Start and end; the end is the start plus the rounded duration, so that durations stay exact."""
    start = [_ns(e.ts) for e in events]
    return {"start_ns": start, "end_ns": [s + _ns(e.dur) for s, e in zip(start, events, strict=True)]}


def _activity(events: list[Event], process: int, launches: set[int]) -> dict[str, Any]:
    """Columns of device events."""
    return _times(events) | {
        "device": [_place(e, "device", e.pid) for e in events],
        "stream": [_place(e, "stream", e.tid) for e in events],
        "context": [e.arg("context") for e in events],
        "process": [process] * len(events),
        "correlation": [e.arg("correlation") for e in events],
        "graph": [_graph(e, launches) for e in events],
        "graph_node": [node if (node := e.arg("graph_node")) > 0 else NONE for e in events],
    }


def _host(events: list[Event]) -> dict[str, Any]:
    return _times(events) | {"process": [_whole(e.pid) for e in events], "thread": [_whole(e.tid) for e in events]}


def _kind(event: Event) -> int:
    """The direction in a name such as `Memcpy HtoD (Pinned -> Device)`."""
    found = DIRECTION.search(event.name)
    return COPY_KINDS.index(found[1]) if found else 0
