"""PyTorch's profiler (Kineto) JSON as a trace.

A Chrome trace: events with a category, a start and a duration in microseconds. Kernels, memcpys and memsets occupy the
device (their category names differ in case between releases); the rest is host time, or a copy of host ranges drawn
over the device (gpu_user_annotation). Times are read as doubles where these tell the file's nanoseconds apart, and else
as decimals: absolute times have 16 digits before the point, where a double is 250 ns coarse.

CUPTI lists a CUDA graph's kernels one by one with the correlation id of the cudaGraphLaunch; the graph is known where
the event says "graph id". The whole file is parsed in memory: captures of gigabytes belong in nsys.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from lab.base.errors import BadInput
from lab.trace import roofline
from lab.trace.model import GRAPH_LAUNCH, NONE, Int64, Launch, Trace, Work, build, direction, whole, whole_numbers
from lab.trace.windows import told_apart

KERNEL, COPY, FILL, CALL, RANGE, OPERATOR, FUNCTION = (
    *("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "user_annotation", "cpu_op", "python_function"),
)
HOST = ("synchronization", "profiler overhead")
KINDS = {  # a category as some release writes it, in small letters -> what it is here
    **{name: name for name in (KERNEL, COPY, FILL, CALL, RANGE, OPERATOR, FUNCTION, HOST[0])},
    **{"gpu_kernel": KERNEL, "memcpy": COPY, "memset": FILL, "cuda_driver": CALL, "runtime": CALL, "driver": CALL},
    **{"cuda_sync": HOST[0], "overhead": HOST[1]},
}
MODULE = "nn.Module: "
DOMAINS = {1: "operator", 2: "module"}  # beside user annotations, which have none
LATEST_US = 4 * 10**15  # year 2096
DOUBLES_US = 2**42  # below, doubles lie less than half a nanosecond apart
N = TypeVar("N", float, Decimal)


class Arguments(Struct, frozen=True, gc=False):
    """What is read of an event's arguments: whole numbers, some of them as text."""

    correlation: Any = None
    device: Any = None
    context: Any = None
    stream: Any = None
    bytes: Any = None
    graph: Any = msgspec.field(name="graph id", default=None)
    graph_node: Any = msgspec.field(name="graph node id", default=None)
    external: Any = msgspec.field(name="External id", default=None)
    registers: Any = msgspec.field(name="registers per thread", default=None)
    shared: Any = msgspec.field(name="shared memory", default=None)
    block: Any = None
    grid: Any = None
    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    given: Any = msgspec.field(name="Concrete Inputs", default=None)


NO_ARGUMENTS = Arguments()


class Event(Struct, Generic[N], frozen=True, gc=False):
    """What is read of an event; ts, dur in us."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: N | None = None
    dur: N | None = None
    pid: Any = None
    tid: Any = None
    args: Arguments | None = NO_ARGUMENTS


class Gpu(Struct, frozen=True):
    """What is read of an entry of deviceProperties."""

    id: int | None = None
    name: str | None = None


class Run(Struct, frozen=True):
    """What is read of distributedInfo."""

    rank: int | None = None


@dataclass(frozen=True)
class Timed:
    """Events of one kind that have a usable time, ns."""

    events: list[Event[Any]]
    start: Int64
    duration: Int64

    def __len__(self) -> int:
        return len(self.events)

    def __add__(self, other: Timed) -> Timed:
        start, duration = (np.concatenate([getattr(s, k) for s in (self, other)]) for k in ("start", "duration"))
        return Timed(self.events + other.events, start, duration)


class File(Struct, Generic[N], frozen=True):
    """What is read of a file."""

    schema: Any = msgspec.field(name="schemaVersion", default="")
    gpus: list[Gpu] = msgspec.field(name="deviceProperties", default_factory=list)
    run: Run = msgspec.field(name="distributedInfo", default_factory=Run)
    events: list[Event[N]] | None = msgspec.field(name="traceEvents", default=None)


def decode(path: Path, text: str | bytes) -> File[Any]:
    """A Kineto file's text; raises BadInput, one line, when it is cut off, not JSON, or JSON of something else."""
    try:
        try:
            found = _in_doubles(text) or msgspec.json.decode(text, type=File[Decimal] | list[Event[Decimal]])
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # Python's json writes and reads NaN, which is no JSON
            content = json.loads(text, parse_float=Decimal)
            found = msgspec.convert(content, File[Decimal] | list[Event[Decimal]], strict=False)
    except msgspec.ValidationError as error:
        raise BadInput(path, f"JSON of another form ({error})", "export the trace again") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(path, f"not complete JSON ({error})", "export the trace again") from None
    file = found if isinstance(found, File) else File(events=found)
    if file.events is None:
        raise BadInput(path, "JSON without traceEvents", "give a trace of torch.profiler's export_chrome_trace")
    return file


def _in_doubles(text: str | bytes) -> File[Any] | list[Event[Any]] | None:
    """The file where each time is the double of a whole number of ns and so small that no other number of ns has it."""
    try:
        found = msgspec.json.decode(text, type=File[float] | list[Event[float]])
    except msgspec.DecodeError:
        return None
    events = (found.events if isinstance(found, File) else found) or []
    for name in ("ts", "dur"):
        us = np.array([getattr(e, name) or 0.0 for e in events])
        if not (np.abs(us) < DOUBLES_US).all() or (np.rint(us * 1e3) / 1e3 != us).any():
            return None
    return found


def read(path: Path, text: bytes) -> Trace:
    """The trace in a Kineto file's text; raises BadInput as `decode` does, and for a trace of another program."""
    file, found = decode(path, text), {kind: list[Event[Any]]() for kind in dict.fromkeys(KINDS.values())}
    del text
    for e in file.events or ():
        kind = KINDS.get(e.cat) or KINDS.get(e.cat.lower()) if e.ph == "X" else None
        if kind and (kind != FUNCTION or e.name.startswith(MODULE)):
            found[kind].append(e)
    schema, rank, known = file.schema, file.run.rank, {gpu.id: gpu.name or "" for gpu in file.gpus}
    del file  # most of a file's events are of no use here
    if not schema and not any(found[kind] for kind in (KERNEL, COPY, CALL, OPERATOR)):
        raise BadInput(path, "a Chrome trace without any event of PyTorch's profiler", "see README.md for what is read")
    before = sum(map(len, found.values()))
    by = {kind: _timed(path, events) for kind, events in found.items()}
    odd = before - sum(map(len, by.values()))
    warnings = [f"{odd} events without a usable time were dropped"] if odd else []
    kernels, copies, fills, calls, user, operators, modules = (
        by[kind] for kind in (KERNEL, COPY, FILL, CALL, RANGE, OPERATOR, FUNCTION)
    )
    ranges, domain = user + operators + modules, np.repeat([0, 1, 2], list(map(len, (user, operators, modules))))
    correlation = _of_arguments(calls.events, "correlation")
    names, labels, called = ([e.name for e in rows.events] for rows in (kernels, ranges, calls))
    processes = set(_numbers([e.pid for e in calls.events]))
    process = processes.pop() if len(processes) == 1 else NONE
    if not calls:
        warnings.append("no CUDA API calls in the file: kernels cannot be joined to their launches")
    elif process == NONE:
        warnings.append("several processes in one file: kernels cannot be told apart by process")
    replaying = {name for name in set(called) if GRAPH_LAUNCH.match(name)}
    launches = {c for c, name in zip(correlation, called, strict=True) if name in replaying} - {NONE}
    rows = [_activity(timed, process, launches) for timed in (kernels, copies, fills)]
    nodes = any((columns["graph"] != NONE).any() for columns in rows)
    if launches and not nodes:
        warnings.append(f"{len(launches)} graph launches in the API calls, but no graph work in the file")
    if not (kernels or copies or fills):
        warnings.append("no device activity in the file: was the CUDA activity recorded?")
    sizes = [np.maximum(_of_arguments(moved.events, "bytes"), 0) for moved in (copies, fills)]
    trace = build(
        "kineto",
        path,
        {
            "kernels": rows[0] | {"name": names},
            "memcpy": rows[1] | {"bytes": sizes[0], "kind": [direction(e.name) for e in copies.events]},
            "memset": rows[2] | {"bytes": sizes[1]},
            "ranges": _host(ranges) | {"label": labels, "domain": domain},
            "calls": _host(calls) | {"name": called, "correlation": correlation},
        },
        schema_version=str(schema),
        graph_mode="node" if nodes else "unknown" if launches or not calls else "none",
        gpus={d: known.get(d, "") for d in sorted({d for columns in rows for d in columns["device"]})},
        domains=DOMAINS,
        warnings=tuple(warnings),
        launched=_launched(kernels),
        work=_work(kernels, operators),
        rank=rank,
        host={kind: (len(by[kind]), int(by[kind].duration.sum())) for kind in HOST if by[kind]},
    )
    return told_apart(trace) if nodes else trace


def _whole(value: Any) -> int:
    if isinstance(value, str):
        return whole(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else NONE


def _numbers(values: list[Any]) -> list[int]:
    """Whole numbers of what a file holds, nearly always whole numbers."""
    types = set(map(type, values))
    if types == {type(None)}:  # no event has it
        return [NONE] * len(values)
    return values if types <= {int} else [_whole(value) for value in values]


def _of_arguments(events: list[Event[Any]], name: str) -> list[int]:
    return _numbers([getattr(e.args, name, None) for e in events])


def _places(events: list[Event[Any]], name: str, otherwise: str) -> list[int]:
    """The devices or streams: the argument where there is one, else the row that the event is drawn in."""
    own = [getattr(e.args, name, None) for e in events]
    if None in own:
        own = [getattr(e, otherwise) if v is None else v for v, e in zip(own, events, strict=True)]
    return _numbers(own)


def _timed(path: Path, events: list[Event[Any]]) -> Timed:
    """The events with a usable time; raises BadInput for a time that is NaN, infinite or beyond every clock, whose
    nanoseconds are no number. The end of an event is its start plus its rounded duration, so that durations stay exact.
    """
    timed: list[Any] = [e for e in events if e.ts is not None and e.dur is not None]
    times = [e.ts for e in timed], [e.dur for e in timed]
    for values in times:
        if values and not (all(map(math.isfinite, values)) and -LATEST_US < min(values) <= max(values) < LATEST_US):
            at = next(i for i, v in enumerate(values) if not (math.isfinite(v) and -LATEST_US < v < LATEST_US))
            what = f'event "{timed[at].name[:80]}" has ts = {timed[at].ts:.40}, dur = {timed[at].dur:.40}'
            raise BadInput(path, what, "export the trace again; times are in us")
    if timed and min(times[1]) < 0:
        return _timed(path, [e for e in timed if not e.dur < 0])
    return Timed(timed, *map(_ns, times))


def _ns(us: list[Any]) -> Int64:
    """Nanoseconds of times that are all doubles (see _in_doubles) or all decimals."""
    if not all(isinstance(v, float) for v in us[:1]):
        return np.array([round(v * 1000) for v in us], np.int64)
    return np.rint(np.array(us) * 1e3).astype(np.int64)


def _activity(rows: Timed, process: int, launches: set[int]) -> dict[str, Any]:
    """Columns of device events. The graph is 0 for one that is not named but was launched by a graph launch."""
    events = rows.events
    correlation, graph, node = (
        whole_numbers(name, _of_arguments(events, name)) for name in ("correlation", "graph", "graph_node")
    )
    in_graph = np.isin(correlation, list(launches)) | (graph > 0) | (node > 0)
    return {
        "start_ns": rows.start,
        "end_ns": rows.start + rows.duration,
        "device": _places(events, "device", "pid"),
        "stream": _places(events, "stream", "tid"),
        "context": _of_arguments(events, "context"),
        "process": np.full(len(events), process),
        "correlation": correlation,
        "graph": np.where(in_graph, np.maximum(graph, 0), NONE),
        "graph_node": np.where(node > 0, node, NONE),
    }


def _host(rows: Timed) -> dict[str, Any]:
    process, thread = (_numbers([getattr(e, name) for e in rows.events]) for name in ("pid", "tid"))
    times = {"start_ns": rows.start, "end_ns": rows.start + rows.duration}
    return times | {"process": process, "thread": thread}


def _launched(kernels: Timed) -> dict[str, Launch]:
    first: dict[str, Launch] = {}
    for e in kernels.events:
        a = e.args
        if e.name not in first and a and a.grid and a.block:
            block, grid = (tuple(map(_whole, v)) if isinstance(v, list) else (NONE,) for v in (a.block, a.grid))
            found = Launch(_whole(a.registers), _whole(a.shared), block[:3], grid[:3])
            if NONE not in (found.registers, found.shared_bytes, *block, *grid):
                first[e.name] = found
    return first


def _work(kernels: Timed, operators: Timed) -> tuple[Work, ...]:
    """What the operators that have shapes ask of their kernels."""
    stated = {
        _whole(e.args.external): (e.name, e.args.dims, e.args.types, e.args.given)
        for e in operators.events
        if e.name in roofline.OPERATORS and e.args and e.args.dims and _whole(e.args.external) != NONE
    }
    if not stated:
        return ()
    asked = ((_whole(e.args.external) if e.args else NONE, e.name) for e in kernels.events)
    times = zip(asked, kernels.duration.tolist(), strict=True)
    return roofline.of_operators(((operator, name, ns) for (operator, name), ns in times), stated)
