"""Why a device did nothing: every idle nanosecond to one cause, the longest gaps, and the host's calls.

A gap ends with a row. Up to the end of the call that launched it the host was late: in that time the launching thread
synchronised, copied, or did something else (launch-bound). From there on, a row whose launch was on time waited for
a copy, for another stream, or came next in its queue; a row launched during the gap took the launch delay to start.
Kernels that only wait are idle time of a cause of their own. Without API calls nothing of this is known, and said so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lab.trace.exposed import minus
from lab.trace.intervals import Spans, merged
from lab.trace.model import NONE, Int32, Int64, Trace, callers, labels, named, short_name
from lab.trace.windows import on_host

SYNCHRONIZE = re.compile(r"(?:cu|cuda|hip)(?:Stream|Device|Event|Ctx)Synchronize")
COPYING = re.compile(r"(?:cu|cuda|hip)Mem(?:cpy|set)")
MOST = 10  # gaps that are listed
CHUNK = 1 << 16  # gaps looked at together: their columns stay in the cache
SUFFIX = re.compile(r"_v\d+$")
HOST, SYNCHRONISE, COPY, DELAY, OTHER_STREAM, QUEUED, WAIT, FIRST, LAST, UNKNOWN = CAUSES = (
    *("launch-bound", "synchronisation", "copy", "launch delay", "dependency on another stream"),
    *("between queued kernels", "waiting kernel", "before first", "after last", "not known (no API row)"),
)


class Gap(Struct, frozen=True):
    """A stretch in which a device did nothing: its begin, as --time takes it, the rows around it, its main cause."""

    start_us: float
    us: float
    device: int
    after: str
    before: str
    cause: str


class CallTime(Struct, frozen=True):
    """Host calls of one name."""

    name: str
    count: int
    sum_us: float
    median_us: float
    max_us: float


@dataclass(frozen=True)
class Order:
    """A device's rows by start and by end: the times, and where the trace's columns have each row; at last -1, none."""

    start: Int64
    by_start: Int32
    end: Int64
    by_end: Int32

    def around(self, free: Spans) -> tuple[Int32, Int32]:
        """For each gap the row that ended last before it and the first that begins at or after its end."""
        ended, begins = _sought(self.end, free.start, "right") - 1, _sought(self.start, free.end, "left")
        return self.by_end[ended], self.by_start[begins]


def attribute(
    trace: Trace, waiting: NDArray[np.bool_], idle: Mapping[int, tuple[Spans, Spans]]
) -> tuple[dict[int, dict[str, int]], list[Gap]]:
    """Device -> cause -> ns, and the longest gaps.

    waiting: per kernel name, True when it only waits. idle: each device's idle time, and when such kernels ran.
    """
    found, gaps, (texts, codes) = dict[int, dict[str, int]](), list[Gap](), labels(trace)
    others = np.concatenate(codes[1:])
    columns = {name: trace.column(name) for name in ("process", "context", "stream", "correlation")}
    hosts = [(_host_spans(trace, names), cause) for names, cause in ((COPYING, COPY), (SYNCHRONIZE, SYNCHRONISE))]
    calls_of = callers(trace)
    origin = (trace.whole or trace).extent_ns[0]
    for device, (spans, spun) in idle.items():
        order = _order(trace, device, waiting)
        sums = dict.fromkeys(CAUSES, 0)
        for at in range(0, len(spans), CHUNK):
            some = Spans(spans.start[at : at + CHUNK], spans.end[at : at + CHUNK])
            for cause, each in _causes(trace, columns, order, some, spun, hosts, calls_of).items():
                sums[cause] += int(each.sum())
        found[device] = {cause: ns for cause, ns in sums.items() if ns}
        length, top = spans.end - spans.start, list[int]()
        while len(top) < min(MOST, len(spans)):  # of equal ones the first
            top.append(int(length.argmax()))
            length[top[-1]] = -1
        top.sort()
        longest = Spans(spans.start[top], spans.end[top])
        parts = _causes(trace, columns, order, longest, spun, hosts, calls_of)
        names = [[_named(trace, texts, others, row) for row in side.tolist()] for side in order.around(longest)]
        for i, (after, before) in enumerate(zip(*names, strict=True)):
            at, ns = int(longest.start[i]) - origin, int(longest.end[i] - longest.start[i])
            cause = max(CAUSES, key=lambda c: parts[c][i])
            gaps.append(Gap(at / 1e3, ns / 1e3, device, after or "the begin", before or "the end", cause))
    return found, sorted(gaps, key=lambda g: -g.us)[:MOST]


def _named(trace: Trace, texts: Sequence[str], others: Int64, row: int) -> str:
    """What a row is called. others: the label's index of each row that is no kernel."""
    at = row - len(trace.kernels)
    return "" if row < 0 else texts[others[at]] if at >= 0 else short_name(texts[trace.kernels.name[row]])


def _order(trace: Trace, device: int, waiting: NDArray[np.bool_]) -> Order:
    mine = trace.column("device") == device
    if waiting.any():
        mine[: len(trace.kernels)] &= ~waiting[trace.kernels.name]
    index, found = np.flatnonzero(mine).astype(np.int32), list[NDArray[Any]]()
    for name in ("start_ns", "end_ns"):
        times = trace.column(name)[index]
        order = np.argsort(times, kind="stable").astype(np.int32)
        found += [times[order], np.append(index[order], np.int32(-1))]
    return Order(*found)


def _sought(among: Int64, times: Int64, side: Literal["left", "right"]) -> Int64:
    """np.searchsorted for sorted times that lie close together: among those between the first and the last."""
    if not len(times):
        return np.zeros(0, np.int64)
    low, high = np.searchsorted(among, times[[0, -1]], side=side)
    return np.searchsorted(among[low:high], times, side=side) + low


def _causes(
    trace: Trace,
    columns: Mapping[str, Int64],
    order: Order,
    spans: Spans,
    spun: Spans,
    hosts: Sequence[tuple[dict[int, Spans], str]],
    calls_of: Callable[[Int64], Int64],
) -> dict[str, Int64]:
    """How much of each gap each cause took, ns; over the causes they sum to the gaps. spun: kernels that only wait."""
    free = minus(spans, spun) if len(spun) else spans
    before, after = order.around(free)
    inner = (before >= 0) & (after >= 0)
    launch = (columns["process"][after].astype(np.int64) << 32) + columns["correlation"][after]
    call = np.where(inner, calls_of(launch), -1)
    known, calls = call >= 0, trace.calls
    none = np.zeros(len(free), np.int64)
    launched = calls.end_ns[np.maximum(call, 0)] if len(calls) else none
    thread = calls.thread[np.maximum(call, 0)] if len(calls) else none
    upto = np.where(known, np.clip(launched, free.start, free.end), free.start)
    waited = upto > free.start
    parts = {cause: none.copy() for cause in CAUSES}
    for on, cause in hosts:
        for one, when in on.items():
            at = np.flatnonzero(waited & (thread == one))
            parts[cause][at] = when.measure_before(upto[at]) - when.measure_before(free.start[at])
    parts[SYNCHRONISE] = np.minimum(parts[SYNCHRONISE], upto - free.start - parts[COPY])  # where one calls the other
    parts[HOST] = upto - free.start - parts[SYNCHRONISE] - parts[COPY]
    late, same = launched > free.start, np.ones(len(free), bool)
    for column in ("process", "context", "stream"):
        same &= columns[column][before] == columns[column][after]
    moves = np.arange(len(trace.kernels), len(trace.kernels) + len(trace.memcpy) + len(trace.memset))
    copies = np.isin(before, moves) | np.isin(after, moves)
    for cause, where in (
        (FIRST, before < 0),
        (LAST, (before >= 0) & (after < 0)),
        (UNKNOWN, inner & ~known),
        (DELAY, known & late),
        (COPY, known & ~late & copies),
        (OTHER_STREAM, known & ~late & ~copies & ~same),
        (QUEUED, known & ~late & ~copies & same),
    ):
        parts[cause] += np.where(where, free.end - upto, 0)
    if free is spans:
        return parts
    of = np.searchsorted(spans.start, free.start, side="right") - 1  # the gap that a free piece lies in
    parts = {cause: np.bincount(of, ns, len(spans)).astype(np.int64) for cause, ns in parts.items()}
    parts[WAIT] = spans.end - spans.start - np.sum(list(parts.values()), axis=0)
    return parts


def _host_spans(trace: Trace, names: re.Pattern[str]) -> dict[int, Spans]:
    """Thread -> when it was in a call of such a name."""
    mine = trace.calls.take(named(names.match, trace.call_names, trace.calls.name))
    own = {int(t): mine.take(mine.thread == t) for t in np.unique(mine.thread)}
    return {t: merged(rows.start_ns, rows.end_ns) for t, rows in own.items()}


def api(trace: Trace, most: int) -> list[CallTime]:
    """The host's calls by name without its version, the longest first; of a window the part inside."""
    texts = [SUFFIX.sub("", n) for n in trace.call_names]
    known = {n: i for i, n in enumerate(dict.fromkeys(texts))}
    mine, ns = on_host(trace, trace.calls)
    code = np.array([known[n] for n in texts] or [0])[trace.calls.name[mine]]
    us = ns / 1e3
    order = np.argsort(code, kind="stable")
    parts = np.split(us[order], np.cumsum(np.bincount(code, minlength=len(known)))[:-1]) if known else []
    found = [
        CallTime(name, len(part), float(part.sum()), float(np.median(part)), float(part.max()))
        for name, part in zip(known, parts, strict=True)
        if len(part)
    ]
    return sorted(found, key=lambda c: (-c.sum_us, c.name))[:most]


def launch_delay_us(trace: Trace, call: Int64) -> dict[str, float] | None:
    """Median, 95th percentile and largest time from a kernel's call, by index, to its start; None without calls."""
    eager = (call >= 0) & (trace.kernels.graph_node == NONE) & (trace.kernels.graph == NONE)
    if not eager.any():
        return None
    us = np.maximum(trace.kernels.start_ns[eager] - trace.calls.end_ns[call[eager]], 0) / 1e3
    return {"median": float(np.median(us)), "p95": float(np.percentile(us, 95)), "max": float(us.max())}
