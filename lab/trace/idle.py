"""Why a device did nothing: every idle nanosecond to one cause, the longest gaps, and the host's calls.

A gap ends with a row. Up to the end of the call that launched it the host was late: in that time the launching thread
synchronised, copied, or did something else (launch-bound). From there on, a row whose launch was on time waited for
a copy, for another stream, or came next in its queue; a row launched during the gap took the launch delay to start.
Kernels that only wait are idle time of a cause of their own. Without API calls nothing of this is known, and said so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lab.trace import intervals
from lab.trace.exposed import labels, minus
from lab.trace.intervals import Spans, merged
from lab.trace.model import NONE, Int64, Trace, call_of, launches, short_name

SYNCHRONIZE = re.compile(r"(?:cu|cuda|hip)(?:Stream|Device|Event|Ctx)Synchronize")
COPYING = re.compile(r"(?:cu|cuda|hip)Mem(?:cpy|set)")
SUFFIX = re.compile(r"_v\d+$")
HOST, SYNCHRONISE, COPY, DELAY, OTHER_STREAM, QUEUED, WAIT, FIRST, LAST, UNKNOWN = CAUSES = (
    *("launch-bound", "synchronisation", "copy", "launch delay", "dependency on another stream"),
    *("between queued kernels", "waiting kernel", "before first", "after last", "not known (no API row)"),
)


class Gap(Struct, frozen=True):
    """A stretch in which a device did nothing: its begin from the window's, the rows around it, its main cause."""

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
class Rows:
    """Device rows of any kind in the order of their starts. name: index into texts; call: index of the launch or -1."""

    start: Int64
    end: Int64
    device: NDArray[np.int32]
    stream: NDArray[np.int32]
    kind: NDArray[np.int8]
    name: Int64
    call: Int64
    texts: list[str]


def rows(trace: Trace) -> Rows:
    """All device rows with the call that launched each."""
    texts, names = labels(trace)
    start, end, device, launch, *stream = (
        np.concatenate(parts) for parts in zip(*(
            (r.start_ns, r.end_ns, r.device, launches(r), r.device, r.process, r.context, r.stream)
            for r in trace.activities
        ), strict=True)
    )  # fmt: skip
    kind = np.repeat(np.arange(4, dtype=np.int8), [len(r) for r in trace.activities])
    order = np.argsort(start, kind="stable")
    name, call = np.concatenate(names)[order], call_of(trace, launch)[order]
    stream_of = intervals.group(*stream)[1][order]
    return Rows(start[order], end[order], device[order], stream_of, kind[order], name, call, texts)


def attribute(
    trace: Trace, waiting: NDArray[np.bool_], idle: Mapping[int, tuple[Spans, Spans]], most: int = 10
) -> tuple[dict[int, dict[str, int]], list[Gap]]:
    """Device -> cause -> ns, and the longest gaps.

    waiting: per kernel name, True when it only waits. idle: each device's idle time, and when such kernels ran.
    """
    every, found, gaps = rows(trace), dict[int, dict[str, int]](), list[Gap]()
    waits = np.concatenate([waiting, np.zeros(len(every.texts) - len(waiting), bool)])[every.name]
    hosts = [(_host_spans(trace, names), cause) for names, cause in ((COPYING, COPY), (SYNCHRONIZE, SYNCHRONISE))]
    origin = trace.windows_ns[0][0] if trace.windows_ns else int(every.start[0]) if len(every.start) else 0
    for device, (spans, spun) in idle.items():
        free = minus(spans, spun)
        mine = np.flatnonzero((every.device == device) & ~waits)
        before, after = _neighbours(every, mine, free)
        of = np.searchsorted(spans.start, free.start, side="right") - 1  # the gap that a free piece lies in
        parts = {
            cause: np.bincount(of, ns, len(spans)).astype(np.int64)
            for cause, ns in _causes(trace, every, free, before, after, hosts).items()
        }
        length = spans.end - spans.start
        parts[WAIT] = length - np.sum(list(parts.values()), axis=0)
        found[device] = {cause: ns for cause in CAUSES if (ns := int(parts[cause].sum()))}
        before, after = _neighbours(every, mine, spans)
        for i in np.argsort(-length, kind="stable")[:most]:
            cause = max(CAUSES, key=lambda c: parts[c][i])
            names = _named(every, int(before[i])) or "the begin", _named(every, int(after[i])) or "the end"
            gaps.append(Gap((int(spans.start[i]) - origin) / 1e3, int(length[i]) / 1e3, device, *names, cause))
    return found, sorted(gaps, key=lambda g: -g.us)[:most]


def _named(every: Rows, row: int) -> str:
    if row < 0:
        return ""
    text = every.texts[every.name[row]]
    return text if every.kind[row] else short_name(text)


def _neighbours(every: Rows, mine: Int64, free: Spans) -> tuple[Int64, Int64]:
    """For each gap the row that ended last before it and the first that begins at or after its end; -1 for none."""
    start, end = every.start[mine], every.end[mine]
    by_end = np.argsort(end, kind="stable")
    last = np.searchsorted(end[by_end], free.start, side="right") - 1
    first = np.searchsorted(start, free.end, side="left")
    before = np.where(last >= 0, mine[by_end[np.maximum(last, 0)]] if len(mine) else -1, -1)
    after = np.where(first < len(mine), mine[np.minimum(first, len(mine) - 1)] if len(mine) else -1, -1)
    return before, after


def _causes(
    trace: Trace, every: Rows, free: Spans, before: Int64, after: Int64,
    hosts: Sequence[tuple[dict[int, Spans], str]],
) -> dict[str, Int64]:  # fmt: skip
    """How much of each gap each cause took, ns; over the causes they sum to the gaps."""
    length = free.end - free.start
    inner = (before >= 0) & (after >= 0)
    call = np.where(inner, every.call[np.maximum(after, 0)], -1) if len(every.call) else np.full(len(free), -1)
    known, calls = call >= 0, trace.calls
    none = np.zeros(len(free), np.int64)
    launched = calls.end_ns[np.maximum(call, 0)] if len(calls) else none
    thread = calls.thread[np.maximum(call, 0)] if len(calls) else none
    upto = np.where(known, np.clip(launched, free.start, free.end), free.start)
    parts = {cause: none.copy() for cause in CAUSES if cause != WAIT}
    for spans, cause in hosts:
        for one in np.unique(thread[known]):
            own = spans.get(int(one))
            if own is not None:
                at = np.flatnonzero(known & (thread == one))
                parts[cause][at] = own.measure_before(upto[at]) - own.measure_before(free.start[at])
    parts[SYNCHRONISE] = np.minimum(parts[SYNCHRONISE], upto - free.start - parts[COPY])  # where one calls the other
    parts[HOST] = upto - free.start - parts[SYNCHRONISE] - parts[COPY]
    rest, late = free.end - upto, launched > free.start
    near = [every.kind[np.maximum(i, 0)] if len(every.kind) else none for i in (before, after)]
    same = every.stream[np.maximum(before, 0)] == every.stream[np.maximum(after, 0)] if len(every.stream) else inner
    copies = np.isin(near[0], (1, 2)) | np.isin(near[1], (1, 2))
    for cause, where in (
        (FIRST, before < 0),
        (LAST, (before >= 0) & (after < 0)),
        (UNKNOWN, inner & ~known),
        (DELAY, known & late),
        (COPY, known & ~late & copies),
        (OTHER_STREAM, known & ~late & ~copies & ~same),
        (QUEUED, known & ~late & ~copies & same),
    ):
        parts[cause] = parts[cause] + np.where(where, np.where(known, rest, length), 0)
    return parts


def _host_spans(trace: Trace, names: re.Pattern[str]) -> dict[int, Spans]:
    """Thread -> when it was in a call of such a name."""
    hit = np.array([bool(names.match(n)) for n in trace.call_names] or [False])
    mine = trace.calls.take(hit[trace.calls.name])
    return {
        int(t): merged(mine.start_ns[mine.thread == t], mine.end_ns[mine.thread == t]) for t in np.unique(mine.thread)
    }


def api(trace: Trace, most: int) -> list[CallTime]:
    """The host's calls by name without its version, the longest first."""
    texts = [SUFFIX.sub("", n) for n in trace.call_names]
    known = {n: i for i, n in enumerate(dict.fromkeys(texts))}
    code = np.array([known[n] for n in texts] or [0])[trace.calls.name]
    us = trace.calls.duration_ns / 1e3
    order = np.argsort(code, kind="stable")
    parts = np.split(us[order], np.cumsum(np.bincount(code, minlength=len(known)))[:-1]) if known else []
    found = [
        CallTime(name, len(part), float(part.sum()), float(np.median(part)), float(part.max()))
        for name, part in zip(known, parts, strict=True)
        if len(part)
    ]
    return sorted(found, key=lambda c: (-c.sum_us, c.name))[:most]


def launch_delay_us(trace: Trace) -> dict[str, float] | None:
    """Median, 95th percentile and largest time from a call's end to its kernel's start; None without calls."""
    call = call_of(trace, launches(trace.kernels))
    eager = (call >= 0) & (trace.kernels.graph_node == NONE) & (trace.kernels.graph == NONE)
    if not eager.any():
        return None
    us = np.maximum(trace.kernels.start_ns[eager] - trace.calls.end_ns[call[eager]], 0) / 1e3
    return {"median": float(np.median(us)), "p95": float(np.percentile(us, 95)), "max": float(us.max())}
