"""When devices and streams were busy: spans of activity by device and by stream, and where they overlap.

Busy means that a kernel, a copy, a fill or an opaque graph was running. A kernel whose category is declared not busy
(a spin-wait) keeps the device occupied and does nothing, so it is not busy time, and API calls and host waits never
are. Every number is the measure of a union: summed durations appear only where they are called a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lab.trace.intervals import NOTHING, Int64, Spans, concurrent, group, merged, union
from lab.trace.model import Activity, Kernels, Trace

Key = tuple[int, int, int, int]  # device, process, context, stream


@dataclass(frozen=True)
class Stream:
    """One stream: its rows, their summed ns, and when it was busy."""

    key: Key
    count: int
    sum_ns: int
    busy: Spans


@dataclass(frozen=True)
class Device:
    """One device. kernels: when kernels ran; waits: when kernels ran that only wait; busy: when work was done."""

    number: int
    kernel_count: int
    kernel_sum_ns: int
    sum_ns: int
    kernels: Spans
    busy: Spans
    waits: Spans
    first_ns: int
    last_ns: int


@dataclass(frozen=True)
class Piece:
    """The rows of one kind on one stream. kind: "kernel", "wait" (a kernel that only waits) or "other"."""

    key: Key
    kind: str
    count: int
    sum_ns: int
    busy: Spans
    first_ns: int
    last_ns: int


def pieces(trace: Trace, waiting: NDArray[np.bool_]) -> list[Piece]:
    """The activity by stream and kind; both devices and streams are put together from it, so rows are split once.

    waiting: per kernel name, True when it only waits.
    """
    found = []
    for rows in trace.activities:
        names = rows.name if isinstance(rows, Kernels) else None
        for key, start, end, name in _split(rows, names if waiting.any() else None):
            kind = "other" if names is None else "kernel"
            if name is None:
                found.append(_piece(key, kind, start, end))
                continue
            wait = waiting[name]
            for part, mine in ((kind, ~wait), ("wait", wait)):
                if mine.any():
                    found.append(_piece(key, part, start[mine], end[mine]))
    return found


def _piece(key: Key, kind: str, start: Int64, end: Int64) -> Piece:
    total = int((end - start).sum())
    return Piece(key, kind, len(start), total, merged(start, end), int(start[0]), int(end.max()))


def _split(
    rows: Activity, names: NDArray[np.int32] | None
) -> Iterator[tuple[Key, Int64, Int64, NDArray[np.int32] | None]]:
    """(stream, starts, ends, names) of the rows of each stream, still in order of start."""
    if not len(rows):
        return
    keys, codes = group(rows.device, rows.process, rows.context, rows.stream)
    if len(keys) == 1:
        yield as_key(keys[0]), rows.start_ns, rows.end_ns, names
        return
    # NumPy sorts 16-bit integers by radix, which is several times faster here, and keeps order within a part.
    order = np.argsort(codes.astype(np.uint16) if len(keys) < 1 << 16 else codes, kind="stable")
    edges = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(keys)))])
    for key, (a, b) in zip(keys, pairwise(edges.tolist()), strict=True):
        mine = order[a:b]
        yield as_key(key), rows.start_ns[mine], rows.end_ns[mine], None if names is None else names[mine]


def as_key(values: tuple[int, ...]) -> Key:
    """Four numbers as a stream's key."""
    device, process, context, stream = values
    return device, process, context, stream


def devices(trace: Trace, waiting: NDArray[np.bool_], split: Sequence[Piece] | None = None) -> list[Device]:
    """Every device of the trace, by number. waiting: per kernel name, True when it only waits."""
    found = pieces(trace, waiting) if split is None else split
    numbers = {int(d) for d in trace.gpus} | {p.key[0] for p in found}
    return [_device(number, [p for p in found if p.key[0] == number]) for number in sorted(numbers)]


def _device(number: int, mine: Sequence[Piece]) -> Device:
    work, waits, other = (union([p.busy for p in mine if p.kind == k]) for k in ("kernel", "wait", "other"))
    kernels = [p for p in mine if p.kind != "other"]
    return Device(
        number=number,
        kernel_count=sum(p.count for p in kernels),
        kernel_sum_ns=sum(p.sum_ns for p in kernels),
        sum_ns=sum(p.sum_ns for p in mine if p.kind != "wait"),
        kernels=union([work, waits]),
        busy=union([work, other]),
        waits=waits,
        first_ns=min((p.first_ns for p in mine), default=0),
        last_ns=max((p.last_ns for p in mine), default=0),
    )


def streams(split: Sequence[Piece]) -> list[tuple[Stream, int]]:
    """Every stream with the ns during which another stream of its device was active too, by device and stream.

    A stream is (device, process, context, stream): numbers repeat across processes and contexts. Waiting kernels
    count here, because a stream that waits is occupied.
    """
    found = []
    for key in sorted({p.key for p in split}):
        mine = [p for p in split if p.key == key]
        busy = union([p.busy for p in mine])
        found.append(Stream(key, sum(p.count for p in mine), sum(p.sum_ns for p in mine), busy))
    result = []
    for device in sorted({s.key[0] for s in found}):
        here = [s for s in found if s.key[0] == device]
        shared = concurrent([s.busy for s in here])
        # Of two streams, whatever is shared is shared by both.
        result += [(s, shared.ns if len(here) == 2 else s.busy.overlap_ns(shared)) for s in here]
    return result


def window(trace: Trace, found: Sequence[Device]) -> Spans:
    """What the span is measured over: the trace's windows, else from the first activity to the last."""
    if trace.windows_ns is not None:
        times = np.array(trace.windows_ns, np.int64).reshape(-1, 2)
        return merged(times[:, 0], times[:, 1], is_sorted=False)
    active = [d for d in found if d.last_ns > d.first_ns]
    if not active:
        return NOTHING
    return merged(np.array([min(d.first_ns for d in active)]), np.array([max(d.last_ns for d in active)]))


def idle(busy: Spans, over: Spans) -> Spans:
    """What of `over` has no activity: found as gaps, not as a difference, so that busy + idle = span checks both."""
    if not len(over):
        return NOTHING
    low, high = int(over.start[0]), int(over.end[-1])
    return union([busy, over.gaps(low, high)]).gaps(low, high)
