"""Interval arithmetic on columns, and from it when streams and devices were busy.

Busy time is the measure of a union, never a sum, and integer nanoseconds keep busy + idle = span exact. Busy means that
a kernel, a copy, a fill or an opaque graph ran. A kernel whose category only waits (a spin-wait) occupies the device
and is not busy time; API calls and host waits never are.

Nothing is sorted that is in order already: rows are by start, so a running maximum of the ends finds the gaps, and
sorted columns put together take NumPy's stable sort, a merge of their runs (14 ms for 5.5 million; the default sort
370 ms). Grouping uses a lookup table over the range of the values, a tenth of the cost of sorting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.trace.model import Int64, Kernels, Trace

TABLE = 50_000_000  # widest range of values that gets a lookup table (about 250 MB); beyond, sort


@dataclass(frozen=True)
class Spans:
    """Disjoint, sorted, non-touching intervals [start, end), ns."""

    start: Int64
    end: Int64

    @cached_property
    def ns(self) -> int:
        """Their total length."""
        return int((self.end - self.start).sum())

    def __len__(self) -> int:
        return len(self.start)

    def cover(self, times: Int64) -> NDArray[np.bool_]:
        """Which of these times lie inside."""
        at = np.searchsorted(self.start, times, side="right") - 1
        return (at >= 0) & (times < np.append(self.end, 0)[at])

    def measure_before(self, times: Int64) -> Int64:
        """How many ns of these spans lie before each time."""
        if not len(self):
            return np.zeros(len(times), np.int64)
        before = self._before
        i = np.searchsorted(self.start, times, side="right")  # spans that begin at or before the time
        cut = np.where(i > 0, np.maximum(self.end[np.maximum(i - 1, 0)] - times, 0), 0)
        return before[i] - cut

    @cached_property
    def _before(self) -> Int64:
        """Of each span, and at last of all: how long those before it are together."""
        return np.concatenate([[0], np.cumsum(self.end - self.start)])

    def overlap_ns(self, other: Spans) -> int:
        """Length of the intersection."""
        return int((self.measure_before(other.end) - self.measure_before(other.start)).sum())

    def gaps(self, low: int, high: int) -> Spans:
        """What [low, high) has outside these spans."""
        start, end = np.empty((2, len(self) + 1), np.int64)
        start[0], end[-1] = low, high
        np.clip(self.end, low, high, out=start[1:])
        np.clip(self.start, low, high, out=end[:-1])
        keep = end > start
        if keep[1:-1].all():  # nearly always: nothing is copied
            inner = slice(not keep[0], len(keep) - (not keep[-1]))
            return Spans(start[inner], end[inner])
        return Spans(start[keep], end[keep])


NOTHING = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


def merged(start: Int64, end: Int64, is_sorted: bool = True) -> Spans:
    """The union of intervals as disjoint spans; zero-length intervals vanish, touching ones are joined.

    A span ends before the i-th start (from 0, in order) exactly when the i intervals that began earlier have all
    ended, and then it ended at the i-th smallest end. So sorting the starts and the ends apart is enough, and where
    the starts are sorted already a running maximum replaces the second sort.
    """
    if not len(start):
        return NOTHING
    if is_sorted:
        end = np.maximum.accumulate(end)
    else:
        start, end = _edges([start]), _edges([end])
    return _joined(start, end)


def _edges(parts: Sequence[Int64]) -> Int64:
    found = np.concatenate(parts)
    found.sort(kind="stable")
    return found


def _joined(start: Int64, end: Int64) -> Spans:
    apart = np.ones(len(start) + 1, bool)  # one span ends before row i, and another begins
    np.greater(start[1:], end[:-1], out=apart[1:-1])
    if not apart.all():
        start, end = start[apart[:-1]], end[apart[1:]]
    keep = end > start
    return Spans(start, end) if keep.all() else Spans(start[keep], end[keep])


def union(parts: Sequence[Spans]) -> Spans:
    """The union of several spans."""
    parts = [p for p in parts if len(p)]
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    return _joined(_edges([p.start for p in parts]), _edges([p.end for p in parts]))


def concurrent(parts: Sequence[Spans]) -> Spans:
    """Where at least two intervals are active at once, of whichever part; touching is not overlapping.

    At least two are active at a time exactly when, of n that have begun, at most n - 2 have ended: when the last of
    the n smallest starts lies before the time, and the smallest end but n - 2 after it.
    """
    parts = [p for p in parts if len(p)]
    if not parts:
        return NOTHING
    start, end = _edges([p.start for p in parts])[1:], _edges([p.end for p in parts])[:-1]
    keep = end > start
    return _joined(start[keep], end[keep]) if keep.any() else NOTHING


def compact(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """The distinct values, ascending, and each row's index among them: np.unique without the sort."""
    if not len(values) or not values.strides[0]:  # one value, stored once for every row
        return values[:1], np.broadcast_to(np.int32(0), values.shape)
    low, high = int(values.min()), int(values.max())
    if high - low > TABLE:
        unique, codes = np.unique(values, return_inverse=True)
        return unique, codes.astype(np.int32)
    offset = values - values.dtype.type(low)
    seen = np.zeros(high - low + 1, bool)
    seen[offset] = True
    at = np.flatnonzero(seen)
    table = np.zeros(len(seen), np.int32)
    table[at] = np.arange(len(at), dtype=np.int32)
    return (at + low).astype(values.dtype), table[offset]


def group(*columns: NDArray[Any]) -> tuple[list[tuple[int, ...]], NDArray[np.int32]]:
    """The distinct tuples of several columns, sorted, and each row's index among them."""
    keys: list[tuple[int, ...]] = [()] if len(columns[0]) else []
    codes: NDArray[np.int32] = np.zeros(len(columns[0]), np.int32)
    for column in columns:
        unique, code = compact(column)
        pairs: NDArray[Any] = np.arange(len(keys))
        if len(unique) > 1 and len(keys) == 1:
            pairs, codes = np.arange(len(unique)), code
        elif len(unique) > 1:
            pairs, codes = compact(codes.astype(np.int64) * len(unique) + code)
        keys = [(*keys[int(p) // len(unique)], int(unique[int(p) % len(unique)])) for p in pairs]
    return keys, codes


def rows_of(codes: NDArray[Any], count: int) -> list[Any]:
    """The indices of the rows of each code from 0 to count, in order: a slice where all rows have one code."""
    if count < 2:
        return [slice(None)] * count
    # NumPy sorts 16-bit integers by radix, which is several times faster here, and keeps order within a part.
    order = np.argsort(codes.astype(np.min_scalar_type(count)), kind="stable").astype(np.int32)
    return np.split(order, np.cumsum(np.bincount(codes, minlength=count))[:-1])


@dataclass(frozen=True)
class Ran:
    """Rows: how many, their summed duration, and when at least one of them ran."""

    count: int = 0
    sum_ns: int = 0
    spans: Spans = NOTHING


@dataclass(frozen=True)
class Usage:
    """What ran on a stream, on a device, or on all devices.

    kernels: all of them. work: what makes a device busy, without the kernels that only wait. waits: those. first_ns,
    last_ns: of any row.
    """

    kernels: Ran
    work: Ran
    waits: Ran
    first_ns: int
    last_ns: int


Stream = tuple[int, ...]  # the values of STREAM: numbers repeat across processes and contexts
STREAM = ("device", "process", "context", "stream")


def together(parts: Sequence[Usage]) -> Usage:
    """The usage of streams as that of their device, or of devices as that of all."""
    if len(parts) == 1:
        return parts[0]
    kernels, work, waits = (
        Ran(sum(r.count for r in rows), sum(r.sum_ns for r in rows), union([r.spans for r in rows]))
        for rows in ([p.kernels for p in parts], [p.work for p in parts], [p.waits for p in parts])
    )
    ran = [p for p in parts if p.work.count or p.waits.count]
    first, last = min((p.first_ns for p in ran), default=0), max((p.last_ns for p in ran), default=0)
    return Usage(kernels, work, waits, first, last)


def used(trace: Trace, waiting: NDArray[np.bool_], *columns: str) -> dict[tuple[int, ...], Usage]:
    """What ran by the values of these columns, in order. waiting: per kernel name, True when it only waits."""
    found: dict[tuple[int, ...], list[Usage]] = {}
    for rows in trace.activities:
        wait: NDArray[Any] = np.broadcast_to(np.int8(0), len(rows))
        if isinstance(rows, Kernels) and waiting.any():
            wait = waiting[rows.name].astype(np.int8)
        keys, codes = group(*(getattr(rows, column) for column in columns), wait)
        for (*key, waits), mine in zip(keys, rows_of(codes, len(keys)), strict=True):
            start, end = rows.start_ns[mine], rows.end_ns[mine]
            ran, none = Ran(len(start), int((end - start).sum()), merged(start, end)), Ran()
            kernel = ran if isinstance(rows, Kernels) else none
            usage = Usage(kernel, none if waits else ran, ran if waits else none, int(start[0]), int(end.max()))
            found.setdefault(tuple(key), []).append(usage)
    return {key: together(found[key]) for key in sorted(found)}


def devices(trace: Trace, waiting: NDArray[np.bool_]) -> dict[int, Usage]:
    """Every device of the trace, also one that ran nothing, by number."""
    found = {number: usage for (number,), usage in used(trace, waiting, "device").items()}
    return {number: found.get(number) or together([]) for number in sorted({*map(int, trace.gpus), *found})}


def concurrent_ns(by_stream: dict[Stream, Usage]) -> dict[Stream, int]:
    """For how long another stream of its device was active too; one that waits is active."""
    active = {stream: union([usage.work.spans, usage.waits.spans]) for stream, usage in by_stream.items()}
    found: dict[Stream, int] = {}
    for device in {stream[0] for stream in active}:
        here = {stream: spans for stream, spans in active.items() if stream[0] == device}
        shared = concurrent(list(here.values()))
        # Of two streams, whatever is shared is shared by both.
        found |= {s: shared.ns if len(here) == 2 else spans.overlap_ns(shared) for s, spans in here.items()}
    return found


def window(trace: Trace, used: Usage | None = None, device: int | None = None) -> Spans:
    """What the span is measured over: the windows, of this device, else from the first activity or what is used on."""
    first_last = (used.first_ns, used.last_ns) if used else trace.extent_ns
    of_all = [first_last] if trace.windows_ns is None else trace.windows_ns
    own = of_all if device is None else trace.device_windows_ns.get(device, of_all)
    start, end = np.array(own, np.int64).reshape(-1, 2).T
    return merged(start, end, is_sorted=False)


def idle(busy: Spans, over: Spans) -> Spans:
    """What of `over` has no activity: found as gaps, not as a difference, so that busy + idle = span checks both."""
    if not len(over):
        return NOTHING
    low, high = int(over.start[0]), int(over.end[-1])
    return union([busy, over.gaps(low, high)]).gaps(low, high)
