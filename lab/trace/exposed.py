"""Exposed time: where a faster part would help, and the least and the most that it can give.

Exposed is the time in which a category (or a kernel) ran and no other did on its device; the rest of its time is
hidden, and making it faster gains nothing there. By device, exposed over all categories + overlapped + idle = span.
Kernels that wait cover nothing and have none.

`what_if` bounds the time that a faster part saves. At most its union, over all devices: a critical path is no longer
than what it crosses. At least the time in which it alone ran anywhere and all else waited for it. Of that time nothing
counts before a start that no end brought about (another stream waited for something the trace does not show), and not
more is saved up to a kernel's start than that kernel had waited since its launch, less what synchronising host threads
gain too. Tasks that start when what they wait for has ended never finish later for a shorter task, so truth lies
between (tests/trace/test_exposed.py replays random timelines). Assumed: the rest takes as long as before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.base import files
from lab.base.errors import BadInput
from lab.trace import categories, intervals
from lab.trace.amdahl import Interval
from lab.trace.categories import Rules
from lab.trace.intervals import NOTHING, Spans, concurrent, merged
from lab.trace.model import NONE, OPAQUE, Int64, Trace, callers, labels, launches, named

ASSUMED = "nothing else changes: at least what all else surely waits for, about the exposed time, at most the union"
SYNC = re.compile(r"(?:cu|cuda|hip)(?:Stream|Device|Event|Ctx)Synchronize|(?:cuda|hip)Memcpy(?!.*Async)")


@dataclass(frozen=True)
class Part:
    """One category's or kernel's time on one device, ns. behind: what else ran while it was hidden -> for how long."""

    union_ns: int
    exposed_ns: int
    behind: Mapping[str, int]


@dataclass(frozen=True)
class Device:
    """Parts by category; at_once: every set of several that ran at once, and for how long exactly these did, ns."""

    parts: Mapping[str, Part]
    at_once: Mapping[tuple[str, ...], int]

    @property
    def overlapped_ns(self) -> int:
        """Time in which several categories ran."""
        return sum(self.at_once.values())


@dataclass(frozen=True)
class WhatIf:
    """What a faster part can save, of the denominator; us: summed, count: launches.

    share: low what all else surely waits for, mid the exposed time, high the union.
    """

    what: str
    share: Interval
    us: float
    count: int
    denominator: str
    warnings: tuple[str, ...] = ()


def grouped(trace: Trace, rules: Rules) -> tuple[list[str], NDArray[np.int64]]:
    """The busy categories of a trace, and for every label the index of its category; -1 for kernels that wait."""
    found, _ = labels(trace)
    own = [*rules.assign(trace.names), *found[len(trace.names) :]]
    known: dict[str, int] = {}
    codes = [known.setdefault(c, len(known)) if rules.busy(c) else -1 for c in own]
    return list(known), np.array(codes)


def by_device(trace: Trace, rules: Rules | None = None) -> dict[int, Device]:
    """Exposed and hidden time of every busy category on every device. Raises BadInput without a timeline."""
    return _by_device(trace, *grouped(trace, rules or categories.default()))


def by_kernel(trace: Trace, rules: Rules | None = None) -> dict[str, tuple[int, str]]:
    """Kernel name -> ns in which no other kernel, copy, fill or graph ran on its device, and what it hides behind most.

    Kernels that wait cover nothing and have no time; of three at once none is said to hide another.
    """
    names, waits = labels(trace)[0], (rules or categories.default()).waits(trace.names)
    each = np.arange(len(names))
    each[: len(waits)][waits] = -1
    alone, behind = Counter[str](), {name: Counter[str]() for name in names}
    for device in _by_device(trace, names, each).values():
        alone.update({name: part.exposed_ns for name, part in device.parts.items()})
        for both, ns in device.at_once.items():
            if len(both) == 2:
                behind[both[0]][both[1]] += ns
                behind[both[1]][both[0]] += ns
    place = {name: i for i, name in enumerate(names)}  # of two with equal time the later
    most = {a: max(found, key=lambda b: (found[b], place[b]), default="") for a, found in behind.items()}
    return {name: (alone[name], most[name]) for name in trace.names}


def _by_device(trace: Trace, names: Sequence[str], of: NDArray[np.int64]) -> dict[int, Device]:
    """Exposed and hidden time by name. of: for every label of the trace the index of its name, -1 to leave it out.

    Rows that overlap nothing, nearly all of them, are added up; only of the others it is asked which run at once.
    """
    trace.require_timeline("exposed time")
    codes, found = labels(trace)[1], dict[int, Device]()
    for gpu in sorted({int(d) for rows in trace.activities for d in intervals.compact(rows.device)[0]}):
        parts, own = [], []
        for rows, code in zip(trace.activities, codes, strict=True):
            mine: Any = (of[code] >= 0) & (rows.device == gpu)
            mine = slice(None) if mine.all() else mine  # which copies nothing
            parts.append(Spans(rows.start_ns[mine], rows.end_ns[mine]))
            own.append(of[code[mine]])
        spans = {names[i]: NOTHING for code in own for i in intervals.compact(code)[0]}
        beside = _sharing(parts, concurrent(parts))
        start, end, code = (
            np.concatenate([column[some] for column, some in zip(columns, beside, strict=True)])
            for columns in ([p.start for p in parts], [p.end for p in parts], own)
        )
        every = [np.bincount(code, part.end - part.start, len(names)) for part, code in zip(parts, own, strict=True)]
        single = np.sum(every, axis=0) - np.bincount(code, end - start, len(names))
        shared, which = intervals.compact(code)
        for i, rows in zip(shared, intervals.rows_of(which, len(shared)), strict=True):
            spans[names[i]] = merged(start[rows], end[rows], is_sorted=False)
        found[gpu] = _device(spans, dict(zip(names, single.astype(np.int64).tolist(), strict=True)))
    return found


def _device(spans: Mapping[str, Spans], single: Mapping[str, int]) -> Device:
    """The device's time from where each part runs beside others, and for how long (single) beside none."""
    union_ns = {name: single[name] + ran.ns for name, ran in spans.items()}
    alone, behind = dict(union_ns), {name: Counter[str]() for name in spans}
    sets = at_once(spans)
    for inside, ns in sets.items():
        for a in inside:
            alone[a] -= ns
            behind[a].update({b: ns for b in inside if b != a})
    return Device({n: Part(union_ns[n], alone[n], dict(behind[n].most_common())) for n in spans}, sets)


def at_once(spans: Mapping[str, Spans]) -> dict[tuple[str, ...], int]:
    """For every set of several parts that ever run at once, the time in which exactly these run, ns.

    Each part has a random number, so that at any time the sum of those that run says which they are.
    """
    names, parts = list(spans), list(spans.values())
    weight = np.random.default_rng(0).integers(1 << 62, size=len(parts))
    size = [len(p) for p in parts]
    time = np.concatenate([*(p.start for p in parts), *(p.end for p in parts), np.zeros(0, np.int64)])
    order = np.argsort(time, kind="stable")
    time = time[order]
    count, which = (
        np.cumsum(np.concatenate([one, -one])[order])[:-1] for one in (np.ones(sum(size), int), np.repeat(weight, size))
    )
    keep = (count > 1) & (np.diff(time) > 0)
    _, first, code = np.unique(which[keep], return_index=True, return_inverse=True)
    at = time[:-1][keep][first]  # a time of each set
    running = np.array([p.cover(at) for p in parts]).T
    ns = np.bincount(code, np.diff(time)[keep]).astype(np.int64).tolist()
    return {tuple(names[i] for i in np.flatnonzero(some)): n for some, n in zip(running, ns, strict=True)}


def _sharing(parts: Collection[Spans], shared: Spans) -> list[NDArray[np.bool_]]:
    """Of each part's intervals, which overlap those that are shared."""
    found = []
    for p in parts:
        # The first shared interval that ends after the start: as many as end before it. There are few of them.
        ended = np.bincount(np.searchsorted(p.start, shared.end), minlength=len(p) + 1)
        at = np.cumsum(ended[: len(p)])
        found.append(np.append(shared.start, np.iinfo(np.int64).max)[at] < p.end)
    return found


def what_if(
    trace: Trace,
    rules: Rules | None = None,
    category: Collection[str] = (),
    kernel: str = "",
    wall_us: float | None = None,
) -> WhatIf:
    """The share of the span, or of `wall_us`, that vanishes with these categories and the kernels that `kernel` finds.

    Raises BadInput for a category that is not there, an expression that finds nothing, a window with opaque graphs
    (they may hold the part), and totals without a wall time.
    """
    rules = rules or categories.default()
    names, of = grouped(trace, rules)
    codes = labels(trace)[1]
    present = {int(c) for rows in codes for c in np.unique(rows)}
    known = {c: i for i, c in enumerate(names) if (of[list(present)] == i).any()}
    wanted = [files.called(c, known, "busy category", trace.source) for c in category]
    chosen = np.isin(of, wanted)
    if kernel:
        hit = np.array([bool(expression(kernel).search(name)) for name in trace.names] or [False])
        chosen[: len(hit)] |= hit[: len(trace.names)]
        if not any(hit[i] for i in present if i < len(trace.names)):
            raise BadInput("--kernel", f'"{kernel}" finds no kernel of {trace.source}', "see `lab trace` for the names")
    if len(trace.graphs) and set(category) != {OPAQUE}:
        what = f"{len(trace.graphs)} opaque graphs may hold more of it than the file names"
        raise BadInput(trace.source, what, "capture with --cuda-graph-trace=node")
    picked = [rows.take(chosen[code]) for rows, code in zip(trace.activities, codes, strict=True)]
    us = sum(int(r.duration_ns.sum()) for r in picked) / 1e3
    count = sum(len(r) for r in picked[1:]) + picked[0].count  # type: ignore[attr-defined]
    what = " + ".join([*category, *([f"kernels {kernel}"] if kernel else [])])
    if not trace.timeline:
        if not wall_us:
            remedy = "give the wall time of the same work: --wall US"
            raise BadInput(trace.source, f"{trace.tool} totals say nothing of the wall time", remedy)
        if us > wall_us:
            what = f"{wall_us:,.1f} us are less than the {us:,.1f} us that {what} took"
            raise BadInput("--wall", what, "give the wall time of the same work, in us")
        of_wall = us / wall_us
        said = f"{wall_us:,.1f} us of wall time, as given; no timeline: all of it may be hidden"
        return WhatIf(what, Interval(0.0, of_wall, of_wall), us, count, said, trace.warnings)
    low, alone, most, span = saved(trace, chosen, codes)
    whole = wall_us * 1e3 if wall_us else span
    if most > whole:
        what = f"{wall_us:,.1f} us are less than the {most / 1e3:,.1f} us in which {what} ran"
        raise BadInput("--wall", what, "give the wall time of the same work, in us")
    said = f"{whole / 1e3:,.1f} us, " + ("the wall time as given" if wall_us else "the span of " + (
        trace.window_label or "the whole capture"))  # fmt: skip
    if not trace.calls:
        said += "; no API calls in the file: the host is assumed never to be late"
    share = Interval(*(ns / whole for ns in (low, alone, most)))
    return WhatIf(what, share, us, count, said, trace.warnings)


def expression(text: str, flag: str = "--kernel") -> re.Pattern[str]:
    """A user's regular expression; raises BadInput naming the flag."""
    try:
        return re.compile(text)
    except re.error as error:
        raise BadInput(flag, f'"{text}" is no regular expression ({error})', "mend it") from None


def saved(trace: Trace, chosen: NDArray[np.bool_], codes: Sequence[NDArray[np.int64]]) -> tuple[int, int, int, int]:
    """(least, exposed, union, span) ns for the labels that `chosen` marks, over all devices at once; see above."""
    start, end, mine = trace.column("start_ns"), trace.column("end_ns"), chosen[np.concatenate(codes)]
    picked, others = (merged(start[mine == own], end[mine == own], is_sorted=False) for own in (True, False))
    over = intervals.window(trace)
    alone = minus(picked, others)
    return _least(trace, alone, over), concurrent([alone, over]).ns, concurrent([picked, over]).ns, over.ns


def minus(a: Spans, b: Spans) -> Spans:
    """What of `a` lies outside `b`."""
    return concurrent([a, b.gaps(int(a.start[0]), int(a.end[-1]))]) if len(a) else NOTHING


def _least(trace: Trace, alone: Spans, over: Spans) -> int:
    """The part of `alone` that surely lies on the critical path, ns."""
    start, end, *stream = map(trace.column, ("start_ns", "end_ns", "device", "process", "context", "stream"))
    launch = np.concatenate([launches(r) for r in trace.activities])
    order = np.argsort(start, kind="stable")
    start, end, launch = start[order], end[order], launch[order]
    _, which = intervals.group(*(s[order] for s in stream))
    ends = np.sort(end, kind="stable")
    at = np.searchsorted(ends, start, side="right")
    since = np.where(at > 0, ends[np.maximum(at, 1) - 1], start[0] if len(start) else 0)
    chained = np.zeros(len(start), bool)  # began while its own stream's last row ran: a programmatic launch
    by_stream = np.argsort(which, kind="stable")
    next_, last = by_stream[1:], by_stream[:-1]
    chained[next_] = (which[next_] == which[last]) & (end[last] > start[next_])
    odd = (since < start) & ~chained
    unexplained = merged(since[odd], start[odd], is_sorted=False)
    alone = minus(concurrent([alone, over]), unexplained)
    if not len(trace.calls) or not len(alone):
        return alone.ns
    return _with_host(trace, alone, start, launch)


def _with_host(trace: Trace, alone: Spans, start: Int64, launch: Int64) -> int:
    """`alone` less what kernels that the host launched just in time take back: see the head of this file."""
    calls, call = trace.calls, callers(trace)(launch)
    known = call >= 0
    wait = start - calls.end_ns[call]
    known &= wait >= 0
    if not known.any():
        return alone.ns
    slack = wait - int(wait[known].min())
    # Only the first row of a launch can be late, and only one that waited less than all there is to save.
    first = np.zeros(len(start), bool)
    first[np.unique(np.where(known, launch, NONE), return_index=True)[1]] = True
    late = np.flatnonzero(known & first & (slack < alone.ns))
    sync = np.flatnonzero(named(SYNC.match, trace.call_names, calls.name))
    overhead = int(calls.duration_ns[sync].min(initial=np.iinfo(np.int64).max))  # of a call that need not wait
    gained: dict[tuple[int, int], int] = {}
    saved = before = 0
    events = [(int(start[i]), 1, int(i)) for i in late] + [(int(calls.end_ns[i]), 0, int(i)) for i in sync]
    shift_at_launch: dict[int, int] = {}
    events += [(int(calls.start_ns[call[i]]), 2, int(call[i])) for i in late]
    events.sort()
    upto = alone.measure_before(np.array([t for t, _, _ in events], np.int64)).tolist()
    for (_, kind, i), reached in zip(events, upto, strict=True):
        saved, before = saved + reached - before, reached
        if kind == 1:
            saved = min(saved, int(slack[i]) + shift_at_launch.get(int(call[i]), 0))
            continue
        thread = (int(calls.process[i]), int(calls.thread[i]))
        if kind == 2:
            shift_at_launch[i] = gained.get(thread, 0)
        else:
            blocked = int(calls.duration_ns[i]) - overhead
            gained[thread] = min(gained.get(thread, 0) + blocked, saved)
    return saved + alone.ns - before


def exposed_us(trace: Trace) -> dict[str, float]:
    """Category -> us in which it ran and no other did, summed over the devices. Raises BadInput without a timeline."""
    found: dict[str, float] = {}
    for device in by_device(trace).values():
        for name, part in device.parts.items():
            found[name] = found.get(name, 0.0) + part.exposed_ns / 1e3
    return found
