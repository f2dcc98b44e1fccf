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
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from lab.base.errors import BadInput
from lab.trace import roofline
from lab.trace.model import (
    COPY_KINDS,
    GRAPH_LAUNCH,
    NONE,
    Calls,
    Copies,
    Fills,
    Kernels,
    Launch,
    Ranges,
    Trace,
    Work,
    interned,
    whole,
)
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
DIRECTION = re.compile(r"\b(" + "|".join(sorted(COPY_KINDS, key=len, reverse=True)) + r")\b")
LATEST_US = 4 * 10**15  # year 2096


class Arguments(Struct, frozen=True, omit_defaults=True, gc=False):
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


class Event(Struct, frozen=True, omit_defaults=True, gc=False):
    """What is read of an event; ts, dur in us."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Decimal | None = None
    dur: Decimal | None = Decimal(0)
    pid: Any = None
    tid: Any = None
    args: Arguments | None = NO_ARGUMENTS


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


def decode(path: Path, text: str | bytes) -> File:
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


def read(path: Path, text: bytes) -> Trace:
    """The trace in a Kineto file's text; raises BadInput as `decode` does, and for a trace of another program."""
    file, by = decode(path, text), {kind: list[Event]() for kind in dict.fromkeys(KINDS.values())}
    del text
    for e in file.events or ():
        kind = KINDS.get(e.cat) or KINDS.get(e.cat.lower()) if e.ph == "X" else None
        if kind and (kind != FUNCTION or e.name.startswith(MODULE)):
            by[kind].append(e)
    schema, known = file.schema, {gpu.id: gpu.name or "" for gpu in file.gpus}
    del file  # most of a file's events are of no use here
    if not schema and not any(by[kind] for kind in (KERNEL, COPY, CALL, OPERATOR)):
        raise BadInput(path, "a Chrome trace without any event of PyTorch's profiler", "see README.md for what is read")
    before = sum(map(len, by.values()))
    by = {kind: _timed(path, events) for kind, events in by.items()}
    odd = before - sum(map(len, by.values()))
    warnings = [f"{odd} events without a usable time were dropped"] if odd else []
    kernels, copies, fills, calls, user, operators, modules = (
        by[kind] for kind in (KERNEL, COPY, FILL, CALL, RANGE, OPERATOR, FUNCTION)
    )
    ranges, domain = [*user, *operators, *modules], np.repeat([0, 1, 2], list(map(len, (user, operators, modules))))
    correlation = _of_arguments(calls, "correlation")
    (name, names), (label, labels), (call, call_names) = (
        interned([e.name for e in events]) for events in (kernels, ranges, calls)
    )
    processes = set(_numbers([e.pid for e in calls]))
    process = processes.pop() if len(processes) == 1 else NONE
    if not calls:
        warnings.append("no CUDA API calls in the file: kernels cannot be joined to their launches")
    elif process == NONE:
        warnings.append("several processes in one file: kernels cannot be told apart by process")
    replaying = {i for i, text in enumerate(call_names) if GRAPH_LAUNCH.match(text)}
    launches = {c for c, i in zip(correlation, call, strict=True) if i in replaying} - {NONE}
    rows = [_activity(events, process, launches) for events in (kernels, copies, fills)]
    nodes = any(g != NONE for columns in rows for g in columns["graph"])
    if launches and not nodes:
        warnings.append(f"{len(launches)} graph launches in the API calls, but no graph work in the file")
    if not (kernels or copies or fills):
        warnings.append("no device activity in the file: was the CUDA activity recorded?")
    found = Trace(
        tool="kineto",
        source=path.name,
        schema_version=str(schema),
        graph_mode="node" if nodes else "unknown" if launches or not calls else "none",
        gpus={d: known.get(d, "") for d in sorted({d for columns in rows for d in columns["device"]})},
        kernels=Kernels.of(**rows[0], name=name),
        memcpy=Copies.of(**rows[1], bytes=_bytes(copies), kind=[_kind(e) for e in copies]),
        memset=Fills.of(**rows[2], bytes=_bytes(fills)),
        ranges=Ranges.of(**_host(ranges), label=label, domain=domain),
        domains=DOMAINS,
        calls=Calls.of(**_host(calls), name=call, correlation=correlation),
        names=names,
        labels=labels,
        call_names=call_names,
        warnings=tuple(warnings),
        launched=_launched(kernels, name),
        work=_work(kernels, name, operators),
        host={kind: (len(by[kind]), sum(_durations(by[kind]))) for kind in HOST if by[kind]},
    )
    return told_apart(found) if nodes else found


def _whole(value: Any) -> int:
    """A whole number, also as text; NONE for anything else."""
    if isinstance(value, str):
        return whole(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else NONE


def _numbers(values: list[Any]) -> list[int]:
    """Whole numbers of what a file holds, nearly always whole numbers."""
    return values if set(map(type, values)) <= {int} else [_whole(value) for value in values]


def _of_arguments(events: list[Event], name: str) -> list[int]:
    return _numbers([getattr(e.args, name, None) for e in events])


def _bytes(events: list[Event]) -> list[int]:
    """Moved by copies or fills."""
    return [max(n, 0) for n in _of_arguments(events, "bytes")]


def _places(events: list[Event], name: str, otherwise: str) -> list[int]:
    """The devices or streams: the argument where there is one, else the row that the event is drawn in."""
    own = [getattr(e.args, name, None) for e in events]
    if None in own:
        own = [getattr(e, otherwise) if v is None else v for v, e in zip(own, events, strict=True)]
    return _numbers(own)


def _timed(path: Path, events: list[Event]) -> list[Event]:
    """The events with a usable time; raises BadInput for a time that is NaN, infinite or beyond every clock, whose
    nanoseconds are no number."""
    timed: list[Any] = [e for e in events if e.ts is not None and e.dur is not None]
    for values in ([e.ts for e in timed], [e.dur for e in timed]):
        if values and not (all(map(Decimal.is_finite, values)) and -LATEST_US < min(values) <= max(values) < LATEST_US):
            at = next(i for i, v in enumerate(values) if not (v.is_finite() and -LATEST_US < v < LATEST_US))
            what = f'event "{timed[at].name[:80]}" has ts = {timed[at].ts:.40}, dur = {timed[at].dur:.40}'
            raise BadInput(path, what, "export the trace again; times are in us")
    return [e for e in timed if not e.dur < 0]


def _durations(events: list[Event]) -> list[int]:
    return [round(e.dur * 1000) for e in events]  # type: ignore[operator]  # the events are timed


def _times(events: list[Event]) -> dict[str, Any]:
    """Start and end; the end is the start plus the rounded duration, so that durations stay exact."""
    start = [round(e.ts * 1000) for e in events]  # type: ignore[operator]
    return {"start_ns": start, "end_ns": [s + d for s, d in zip(start, _durations(events), strict=True)]}


def _activity(events: list[Event], process: int, launches: set[int]) -> dict[str, Any]:
    """Columns of device events. The graph is 0 for one that is not named but was launched by a graph launch."""
    correlation, graph, node = (_of_arguments(events, name) for name in ("correlation", "graph", "graph_node"))
    return _times(events) | {
        "device": _places(events, "device", "pid"),
        "stream": _places(events, "stream", "tid"),
        "context": _of_arguments(events, "context"),
        "process": [process] * len(events),
        "correlation": correlation,
        "graph": [
            max(g, 0) if c in launches or g > 0 or n > 0 else NONE
            for c, g, n in zip(correlation, graph, node, strict=True)
        ],
        "graph_node": [n if n > 0 else NONE for n in node],
    }


def _host(events: list[Event]) -> dict[str, Any]:
    process, thread = ([getattr(e, name) for e in events] for name in ("pid", "tid"))
    return _times(events) | {"process": _numbers(process), "thread": _numbers(thread)}


def _launched(kernels: list[Event], names: list[int]) -> dict[int, Launch]:
    """How the first kernel of each name was launched."""
    first: dict[int, Launch] = {}
    for e, name in zip(kernels, names, strict=True):
        a = e.args
        if name not in first and a and a.grid and a.block:
            block, grid = (tuple(map(_whole, v)) if isinstance(v, list) else (NONE,) for v in (a.block, a.grid))
            found = Launch(_whole(a.registers), _whole(a.shared), block[:3], grid[:3])
            if NONE not in (found.registers, found.shared_bytes, *block, *grid):
                first[name] = found
    return first


def _work(kernels: list[Event], names: list[int], operators: list[Event]) -> tuple[Work, ...]:
    """What the operators that have shapes ask of their kernels."""
    stated = {
        _whole(e.args.external): (e.name, e.args.dims, e.args.types, e.args.given)
        for e in operators
        if e.name in roofline.OPERATORS and e.args and e.args.dims and _whole(e.args.external) != NONE
    }
    ran = zip([_whole(e.args.external) if e.args else NONE for e in kernels], names, _durations(kernels), strict=True)
    return roofline.of_operators(list(ran), stated) if stated else ()


def _kind(event: Event) -> int:
    """The direction in a name such as `Memcpy HtoD (Pinned -> Device)`."""
    found = DIRECTION.search(event.name)
    return COPY_KINDS.index(found[1]) if found else 0
