"""Where a faster part would help: the time in which a category ran alone, and the gaps in which nothing ran.

Exposed is what of a category's own time no other busy category of the same device covers: the copy behind a kernel is
hidden, and making it faster gains nothing. Kernels that wait cover nothing and have none. Over several devices it is
the sum of each one's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.trace import categories, intervals
from lab.trace.categories import MEMCPY, MEMSET, OPAQUE, Rules
from lab.trace.intervals import Spans, merged, union
from lab.trace.model import Trace, by_direction, short_name


@dataclass(frozen=True)
class Gap:
    """A stretch without any activity: its begin from the window's, its length, the kernels before and after it."""

    start_us: float
    us: float
    after: str
    before: str


def exposed_us(trace: Trace, rules: Rules | None = None) -> dict[str, float]:
    """Category -> us in which it ran and no other did; categories that wait are left out.

    Raises BadInput without a timeline.
    """
    trace.require_timeline("exposed time")
    rules = rules or categories.default()
    found: dict[str, float] = {}
    for gpu in sorted({int(d) for rows in trace.activities for d in rows.device}):
        own = _own(trace, rules, gpu)
        for name, spans in own.items():
            others = union([other for label, other in own.items() if label != name])
            found[name] = found.get(name, 0.0) + (spans.ns - spans.overlap_ns(others)) / 1e3
    return found


def _own(trace: Trace, rules: Rules, gpu: int) -> dict[str, Spans]:
    """Busy category -> where it ran on one device."""
    kernels = trace.kernels.take(trace.kernels.device == gpu)
    named = np.array([rules.category(name) for name in trace.names] or [""])
    category = named[kernels.name]
    found = {}
    for name in dict.fromkeys(category.tolist()):
        if rules.busy(name):
            rows = kernels.take(category == name)
            found[name] = merged(rows.start_ns, rows.end_ns)
    here = trace.memcpy.take(trace.memcpy.device == gpu)
    moved = [(f"{MEMCPY} {label}", rows) for label, rows in by_direction(here).items()]
    fills, graphs = (every.take(every.device == gpu) for every in (trace.memset, trace.graphs))
    for label, rest in (*moved, (MEMSET, fills), (OPAQUE, graphs)):
        if len(rest):
            found[label] = merged(rest.start_ns, rest.end_ns)
    return found


def gaps(trace: Trace, rules: Rules | None = None, most: int = 10) -> list[Gap]:
    """The longest stretches in which no device did anything, longest first; [] where there is none.

    Raises BadInput without a timeline.
    """
    trace.require_timeline("gaps")
    rules = rules or categories.default()
    devices = intervals.devices(trace, intervals.streams(trace, rules.waits(trace.names)))
    used = intervals.together(list(devices.values()))
    over = intervals.window(trace, used)
    free = intervals.idle(used.work.spans, over)
    kernels = trace.kernels
    by_end = np.argsort(kernels.end_ns, kind="stable")
    found = []
    for i in np.argsort(free.start - free.end, kind="stable")[:most]:
        start, end = int(free.start[i]), int(free.end[i])
        last = int(np.searchsorted(kernels.end_ns[by_end], start, side="right")) - 1
        first = int(np.searchsorted(kernels.start_ns, end, side="left"))
        after = short_name(trace.names[kernels.name[by_end[last]]]) if last >= 0 else "the begin"
        before = short_name(trace.names[kernels.name[first]]) if first < len(kernels) else "the end"
        found.append(Gap((start - int(over.start[0])) / 1e3, (end - start) / 1e3, after, before))
    return found
