"""Windows of a trace: by time, by NVTX range, by CUDA graph replay.

A window is a trace again, with the intervals that it covers, so its summary or breakdown needs nothing special.

A time window cuts: a kernel across its edge counts with the part inside. NVTX and replay windows select by launch: what
a range launched belongs to it whenever it ran, joined by process and correlation id, because a range is host time and
the device runs later. Their intervals are device time, from the first to the last activity that each instance
launched; for device work of others inside them there is a warning, because it is not idle time of the device.

In node mode all kernels and copies of a replay carry the correlation id of its cudaGraphLaunch; in graph mode a replay
is one opaque row. A launch with fewer nodes than the others of its graph was cut off by the capture's start or end or
by a full buffer: its time is a lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lab.base.errors import BadInput, nearest
from lab.trace.intervals import Spans, group, merged, union
from lab.trace.model import NONE, Activity, Int64, Ranges, Trace

Rows = TypeVar("Rows", bound=Activity)
STEADY = 3  # a graph launched this often is being replayed for work, not warmed up


def by_time(trace: Trace, start_us: float, end_us: float) -> Trace:
    """What ran between two times, in us after the trace's first device activity; work across an edge is cut there.

    Raises BadInput for a file without a timeline, an empty interval, or one in which nothing ran.
    """
    origin, last = extent(trace, "time window")
    low, high = origin + round(start_us * 1e3), origin + round(end_us * 1e3)
    if not low < high:
        raise BadInput("--time", f"{start_us:g}:{end_us:g} is empty", "give START:END in us after the first activity")
    if high <= origin or low >= last:
        what = f"{start_us:g}:{end_us:g} us lies outside the capture"
        raise BadInput("--time", what, f"device activity lasts from 0 to {(last - origin) / 1e3:.1f} us")
    return clip(trace, merged(np.array([low]), np.array([high])), f"{start_us:g} to {end_us:g} us")


def extent(trace: Trace, what: str) -> tuple[int, int]:
    """First start and last end of any device activity, ns; raises BadInput when there is none."""
    trace.require_timeline(what)
    rows = [r for r in trace.activities if len(r)]
    if not rows:
        raise BadInput(trace.source, "has no device activity", f"no {what} can be taken")
    return min(int(r.start_ns[0]) for r in rows), max(int(r.end_ns.max()) for r in rows)


def clip(trace: Trace, spans: Spans, label: str, steps: int | None = None) -> Trace:
    """The device activity inside disjoint spans, cut at their edges; a row that lies in two of them becomes two."""
    cut = 0
    parts = []
    for rows in trace.activities:
        part, n = _clipped(rows, spans)
        parts.append(part)
        cut += n
    warn = [f"{cut} rows cross an edge of the window and are counted with the part inside"] if cut else []
    return _part(trace, parts, spans, label, steps, warn)


def _clipped(rows: Rows, spans: Spans) -> tuple[Rows, int]:
    first = np.searchsorted(spans.end, rows.start_ns, side="right")
    last = np.searchsorted(spans.start, rows.end_ns, side="left") - 1
    # A row of no length lies in a span when it starts in it.
    last = np.where(rows.end_ns == rows.start_ns, np.searchsorted(spans.start, rows.start_ns, side="right") - 1, last)
    pieces = np.maximum(last - first + 1, 0)
    index = np.repeat(np.arange(len(rows)), pieces)
    if not len(index):
        return rows.take(index), 0
    nth = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    where = first[index] + nth
    start, end = rows.start_ns[index], rows.end_ns[index]
    inside_start, inside_end = np.maximum(start, spans.start[where]), np.minimum(end, spans.end[where])
    cut = int(((inside_start != start) | (inside_end != end)).sum())
    taken = replace(rows.take(index), start_ns=inside_start, end_ns=inside_end)
    order = np.argsort(inside_start, kind="stable")
    return taken.take(order), cut


def _part(
    trace: Trace, parts: Sequence[Activity], spans: Spans, label: str, steps: int | None, warn: Sequence[str]
) -> Trace:
    kernels, memcpy, memset, opaque = parts
    windows = tuple(zip(spans.start.tolist(), spans.end.tolist(), strict=True))
    label = f"{trace.window_label}, {label}" if trace.window_label else label
    changes: dict[str, Any] = {"kernels": kernels, "memcpy": memcpy, "memset": memset, "graphs": opaque}
    changes |= {"windows_ns": windows, "window_label": label, "steps": steps, "whole": trace.whole or trace}
    return trace.but(**changes, warn=warn)


def _launched(trace: Trace, keys: Sequence[tuple[int, int]], instance: Sequence[int], label: str) -> Trace:
    """What the launches (process, correlation) launched; their instance numbers make the intervals and the steps."""
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    process = np.array([keys[i][0] for i in order], np.int64)
    number = np.array([keys[i][1] for i in order], np.int64)
    of = np.array([instance[i] for i in order], np.int64)
    parts, instances = [], []
    for rows in trace.activities:
        found = _find(rows, process, number)
        mine = found >= 0
        parts.append(rows.take(mine))
        instances.append(of[found[mine]])
    starts = np.concatenate([r.start_ns for r in parts])
    ends = np.concatenate([r.end_ns for r in parts])
    which = np.concatenate(instances)
    if not len(which):
        raise BadInput(trace.source, f"{label} launched nothing that ran on a device", "choose another window")
    first = np.full(int(which.max()) + 1, np.iinfo(np.int64).max)
    last = np.zeros(len(first), np.int64)
    np.minimum.at(first, which, starts)
    np.maximum.at(last, which, ends)
    ran = last > 0
    spans = merged(first[ran], last[ran], is_sorted=False)
    mine_busy = union([merged(r.start_ns, r.end_ns) for r in parts])
    all_busy = union([merged(r.start_ns, r.end_ns) for r in trace.activities])
    foreign = all_busy.overlap_ns(spans) - mine_busy.ns
    warn = []
    if foreign > 0:
        what = "us of the window's idle time the device worked on what others launched"
        warn.append(f"for {foreign / 1e3:,.3f} {what}")
    return _part(trace, parts, spans, label, int(ran.sum()), warn)


def _find(rows: Activity, process: Int64, number: Int64) -> NDArray[np.int64]:
    """For each row, the index of its launch among sorted (process, number) pairs, -1 when it has none."""
    found = np.full(len(rows), -1, np.int64)
    for one in np.unique(process):
        low, high = np.searchsorted(process, [one, one + 1])
        mine = np.flatnonzero(rows.process == one)
        wanted = rows.correlation[mine]
        at = np.minimum(np.searchsorted(number[low:high], wanted), high - low - 1)
        hit = number[low:high][at] == wanted
        found[mine[hit]] = low + at[hit]
    return found


def by_replay(trace: Trace, n: int, graph: int | None = None) -> Trace:
    """The n-th launch of a graph (1 is the first, -1 the last); by default of the graph with the most device time.

    An opaque launch stays opaque. Raises BadInput when no graph launch is in the file, or fewer than n.
    """
    trace.require_timeline("graph replay")
    found = replays(trace)
    if not len(found):
        remedy = "capture with --cuda-graph-trace=node" if trace.graph_mode == "unknown" else "choose another window"
        raise BadInput(trace.source, f"shows no graph launch (graph mode {trace.graph_mode})", remedy)
    if graph is None:
        numbers = np.unique(found.graph)
        length = [int((found.end_ns - found.start_ns)[found.graph == g].sum()) for g in numbers]
        graph = int(numbers[int(np.argmax(length))])
    mine = np.flatnonzero(found.graph == graph)
    if not len(mine):
        raise BadInput("--graph", f"no launch of graph {graph}", nearest(str(graph), map(str, np.unique(found.graph))))
    if n == 0 or abs(n) > len(mine):
        raise BadInput("--replay", f"{n} of {len(mine)} launches of graph {graph}", "1 is the first, -1 the last")
    i = int(mine[n - 1 if n > 0 else n])
    key = (int(found.process[i]), int(found.correlation[i]))
    part = _launched(trace, [key], [0], f"replay {n} of graph {graph}")
    if found.truncated[i]:
        what = f"this replay has {found.nodes[i]} of {found.expected[i]} nodes: its time is a lower bound"
        return part.but(warn=[what])
    return part


def by_nvtx(trace: Trace, pattern: str, nth: int | None = None) -> Trace:
    """What was launched inside NVTX ranges whose label is `pattern` or matches it as a glob; each instance is a step.

    nth: only this instance (1 is the first, -1 the last). A push/pop range holds the calls of its own thread, a
    start/end range those of its process. Nested matches are one instance, the outermost. Raises BadInput when no
    label matches (with the nearest ones), or when nothing that ran was launched inside.
    """
    trace.require_timeline("NVTX window")
    labels = [i for i, label in enumerate(trace.labels) if label == pattern]
    labels = labels or [i for i, label in enumerate(trace.labels) if fnmatchcase(label, pattern)]
    if not labels:
        remedy = nearest(pattern, trace.labels) if len(trace.labels) else "the file has no NVTX ranges"
        raise BadInput("--nvtx", f'no range "{pattern}"', remedy)
    ranges = trace.ranges.take(np.isin(trace.ranges.label, labels))
    if not len(trace.calls):
        raise BadInput(
            trace.source, "has no API calls, so no launch can be placed in a range", "capture --trace=cuda,nvtx"
        )
    calls, instance, count = _calls_within(trace, ranges)
    if not len(calls):
        raise BadInput("--nvtx", f'nothing was launched inside "{pattern}"', "was it launched from another thread?")
    if nth is not None:
        if nth == 0 or abs(nth) > count:
            raise BadInput("--nth", f'{nth} of {count} instances of "{pattern}"', "1 is the first, -1 the last")
        mine = instance == (nth - 1 if nth > 0 else count + nth)
        calls, instance = calls[mine], instance[mine]
    keys = list(zip(trace.calls.process[calls].tolist(), trace.calls.correlation[calls].tolist(), strict=True))
    label = f'NVTX "{pattern}"' + (f" instance {nth}" if nth is not None else "")
    if not len(keys):
        raise BadInput("--nth", f"nothing was launched inside {label}", "choose another instance")
    return _launched(trace, keys, instance.tolist(), label)


def _calls_within(trace: Trace, ranges: Ranges) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Indices of the calls that begin inside the ranges, the instance of each (by start), and how many instances."""
    calls = trace.calls
    pieces: list[tuple[Spans, NDArray[np.int64]]] = []
    for scope, owner in ((0, "thread"), (1, "process")):
        of_scope = ranges.take(ranges.scope == scope)
        for one in np.unique(getattr(of_scope, owner)):
            mine = of_scope.take(getattr(of_scope, owner) == one)
            pieces.append((merged(mine.start_ns, mine.end_ns), np.flatnonzero(getattr(calls, owner) == one)))
    starts = np.concatenate([spans.start for spans, _ in pieces])
    rank = np.empty(len(starts), np.int64)
    rank[np.argsort(starts, kind="stable")] = np.arange(len(starts))
    found, instances, before = [], [], 0
    for spans, candidates in pieces:
        at = np.searchsorted(spans.start, calls.start_ns[candidates], side="right") - 1
        inside = (at >= 0) & (calls.start_ns[candidates] < spans.end[np.maximum(at, 0)])
        found.append(candidates[inside])
        instances.append(rank[before + at[inside]])
        before += len(spans)
    return np.concatenate(found), np.concatenate(instances), len(starts)


@dataclass(frozen=True)
class Replays:
    """Graph launches, one element each, by start: who launched what, when, and with how many nodes.

    expected: the node count of most launches of that graph (ties: the larger). For opaque launches nodes is 0.
    """

    process: NDArray[np.int64]
    correlation: NDArray[np.int64]
    graph: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    nodes: NDArray[np.int64]
    expected: NDArray[np.int64]
    opaque: bool

    def __len__(self) -> int:
        return len(self.graph)

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """Launches with fewer nodes than the other launches of their graph."""
        return self.nodes < self.expected


def replays(trace: Trace) -> Replays:
    """Every graph launch that the trace shows, decomposed or opaque.

    Of a window: the launches with work in it, whole, so that an edge of the window never looks like a truncated launch.
    """
    if trace.whole is None:
        return _replays(trace)
    full, inside = _replays(trace.whole), _replays(trace)
    if full.opaque:
        return inside
    pairs = set(zip(inside.process.tolist(), inside.correlation.tolist(), strict=True))
    launches = zip(full.process.tolist(), full.correlation.tolist(), strict=True)
    mine = np.fromiter((pair in pairs for pair in launches), bool, len(full))
    columns = {f.name: getattr(full, f.name) for f in fields(full)}
    return Replays(**{k: v[mine] if isinstance(v, np.ndarray) else v for k, v in columns.items()})


def _replays(trace: Trace) -> Replays:
    if len(trace.graphs):
        rows = trace.graphs
        none = np.zeros(len(rows), np.int64)
        process, correlation, graph = (c.astype(np.int64) for c in (rows.process, rows.correlation, rows.graph))
        return Replays(process, correlation, graph, rows.start_ns, rows.end_ns, none, none, True)
    parts = [_in_graphs(r) for r in (trace.kernels, trace.memcpy, trace.memset)]
    process, correlation, graph, start, end = (np.concatenate([p[i] for p in parts]) for i in range(5))
    keys, codes = group(process, correlation)
    size = len(keys)
    first, last = np.full(size, np.iinfo(np.int64).max), np.zeros(size, np.int64)
    np.minimum.at(first, codes, start)
    np.maximum.at(last, codes, end)
    of_graph = np.full(size, NONE, np.int64)
    np.maximum.at(of_graph, codes, graph.astype(np.int64))
    nodes = np.bincount(codes, minlength=size)
    usual = {g: _usual(nodes[of_graph == g]) for g in np.unique(of_graph)}
    expected = np.array([usual[g] for g in of_graph], np.int64)
    pair = np.array(keys, np.int64).reshape(size, 2)
    order = np.argsort(first, kind="stable")
    return Replays(
        process=pair[order, 0],
        correlation=pair[order, 1],
        graph=of_graph[order],
        start_ns=first[order],
        end_ns=last[order],
        nodes=nodes[order],
        expected=expected[order],
        opaque=False,
    )


def _in_graphs(rows: Activity) -> tuple[NDArray[np.integer], ...]:
    """process, correlation, graph, start, end of the rows that ran in a graph."""
    if not len(rows) or not (rows.graph.strides[0] or rows.graph_node.strides[0]):
        empty = np.empty(0, np.int64)
        return (empty,) * 5
    mask = (rows.graph != NONE) | (rows.graph_node != NONE)
    columns = (rows.process, rows.correlation, rows.graph, rows.start_ns, rows.end_ns)
    return columns if mask.all() else tuple(c[mask] for c in columns)


def _usual(nodes: NDArray[np.int64]) -> int:
    counts = Counter(nodes.tolist())
    return max(counts, key=lambda n: (counts[n], n))


def truncation_warning(found: Replays) -> str:
    """One sentence on launches that were cut short, "" when there are none."""
    short = int(found.truncated.sum())
    if not short:
        return ""
    by = Counter(found.graph[found.truncated].tolist())
    which = ", ".join(f"{n} of graph {g}" for g, n in by.most_common(5))
    return f"{short} of {len(found)} graph launches are truncated ({which}): their times are lower bounds"


def first_steady_ns(found: Replays) -> int | None:
    """When the first launch of a graph that is launched at least STEADY times began; None without such a graph."""
    if not len(found):
        return None
    counts = Counter(zip(found.process.tolist(), found.graph.tolist(), strict=True))
    steady = {key for key, n in counts.items() if n >= STEADY}
    starts = zip(found.process.tolist(), found.graph.tolist(), found.start_ns.tolist(), strict=True)
    return next((start for process, graph, start in starts if (process, graph) in steady), None)
