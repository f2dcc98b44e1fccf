"""Windows of a trace: by time, by NVTX range, by CUDA graph replay.

A window is a trace again, with the intervals that it covers. A time window cuts: a kernel across its edge counts with
the part inside. NVTX and replay windows select by launch: what a range launched belongs to it whenever it ran, joined
by process and correlation id, because a range is host time and the device runs later. Their intervals are device time,
from the first to the last activity that each instance launched; for device work of others inside them there is a
warning, because it is not idle time of the device.

In node mode all kernels and copies of a replay carry the correlation id of its cudaGraphLaunch; in graph mode a replay
is one opaque row. A launch with fewer nodes than the others of its graph was cut off by the capture's start or end or
by a full buffer: its time is a lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lab.base.errors import BadInput, nearest
from lab.trace.intervals import Spans, compact, group, merged, union
from lab.trace.model import NONE, NUMBERED, Activity, Calls, Columns, Int64, Ranges, Trace, callers, interned, launches

Rows = TypeVar("Rows", bound=Activity)
NO_LAUNCH: Int64 = np.zeros(0, np.int64)
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
    part = clip(trace, merged(np.array([low]), np.array([high])), f"{start_us:g} to {end_us:g} us")
    if not any(map(len, part.activities)):
        raise BadInput("--time", f"nothing ran on a device from {start_us:g} to {end_us:g} us", "take a wider window")
    return part


def extent(trace: Trace, what: str) -> tuple[int, int]:
    """First start and last end of any device activity, ns; raises BadInput when there is none."""
    trace.require_timeline(what)
    if not any(map(len, trace.activities)):
        raise BadInput(trace.source, "has no device activity", f"no {what} can be taken")
    return trace.extent_ns


def clip(trace: Trace, spans: Spans, label: str, steps: int | None = None) -> Trace:
    """The device activity inside disjoint spans, cut at their edges; a row that lies in two of them becomes two."""
    rows, cut = zip(*(_clipped(rows, spans) for rows in trace.activities), strict=True)
    said = f"{sum(cut)} rows cross an edge of the window and are counted with the part inside"
    return _part(trace, spans, steps).but(rows, label, [said] if any(cut) else [])


def _clipped(rows: Rows, spans: Spans) -> tuple[Rows, int]:
    """The rows inside, and how many of them were cut."""
    first = np.searchsorted(spans.end, rows.start_ns, side="right")
    last = np.searchsorted(spans.start, rows.end_ns, side="left") - 1
    # A row of no length lies in a span when it starts in it.
    last = np.where(rows.end_ns == rows.start_ns, np.searchsorted(spans.start, rows.start_ns, side="right") - 1, last)
    pieces = np.maximum(last - first + 1, 0)
    index = np.repeat(np.arange(len(rows)), pieces)
    where = first[index] + np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    taken = rows.take(index)
    start = np.maximum(taken.start_ns, spans.start[where])
    end = np.minimum(taken.end_ns, spans.end[where])
    cut = int(((start != taken.start_ns) | (end != taken.end_ns)).sum())
    return replace(taken, start_ns=start, end_ns=end).take(np.argsort(start, kind="stable")), cut


def _part(trace: Trace, spans: Spans, steps: int | None, host: Spans | None = None) -> Trace:
    windows, own = (tuple(zip(s.start.tolist(), s.end.tolist(), strict=True)) for s in (spans, host or spans))
    return trace.but(windows_ns=windows, host_windows_ns=own, steps=steps, whole=trace.whole or trace)


def on_host(trace: Trace, rows: Calls | Ranges) -> tuple[NDArray[np.bool_], Int64]:
    """Which calls or ranges reach into the host time of a window, and how long each of these does, ns."""
    if trace.host_windows_ns is None:
        return np.ones(len(rows), bool), rows.duration_ns
    start, end = np.array(trace.host_windows_ns, np.int64).reshape(-1, 2).T
    spans = merged(start, end, is_sorted=False)
    inside = spans.measure_before(rows.end_ns) - spans.measure_before(rows.start_ns)
    mine = (inside > 0) | spans.cover(rows.start_ns)
    return mine, inside[mine]


def _taken(trace: Trace, launch: Int64, instance: Int64) -> tuple[list[Activity], Int64]:
    """What these launches launched, by kind, and the instance of each row."""
    order = np.argsort(launch, kind="stable")
    launch, instance = launch[order], instance[order]
    parts, instances = [], []
    for rows in trace.activities:
        wanted = launches(rows)
        at = np.minimum(np.searchsorted(launch, wanted), len(launch) - 1)
        mine = launch[at] == wanted
        parts.append(rows.take(mine))
        instances.append(instance[at[mine]])
    return parts, np.concatenate(instances)


def _launched(trace: Trace, launch: Int64, instance: Int64, label: str, host: Spans) -> Trace:
    """What these launches launched; the instance of each makes the intervals and the steps. host: when they did."""
    parts, instances = _taken(trace, launch, instance)
    used, code = compact(instances)
    if not len(used):
        raise BadInput(trace.source, f"{label} launched nothing that ran on a device", "choose another window")
    start, end, device = (
        np.concatenate([getattr(r, column) for r in parts]) for column in ("start_ns", "end_ns", "device")
    )
    own, foreign = dict[int, Spans](), 0
    for number in np.unique(device).tolist():  # what one device does is no idle time of another's
        here = device == number
        own[number] = merged(*_extents(compact(code[here])[1], start[here], end[here]), is_sorted=False)
        mine_busy, all_busy = (
            union([merged(r.start_ns[r.device == number], r.end_ns[r.device == number]) for r in rows])
            for rows in (parts, trace.activities)
        )
        foreign += all_busy.overlap_ns(own[number]) - mine_busy.ns
    said = f"for {foreign / 1e3:,.3f} us of the window's idle time the device worked on what others launched"
    part = _part(trace, union(list(own.values())), len(used), host).but(parts, label, [said] if foreign > 0 else [])
    devices = {n: (*zip(spans.start.tolist(), spans.end.tolist(), strict=True),) for n, spans in own.items()}
    return part.but(
        device_windows_ns=devices if len(own) > 1 else {}, gpus={n: g for n, g in part.gpus.items() if n in own}
    )


def _extents(code: NDArray[np.int32], start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """First start and last end of the rows of each code; every code from 0 on occurs."""
    first = np.full(int(code.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    last = np.zeros(len(first), np.int64)
    np.minimum.at(first, code, start)
    np.maximum.at(last, code, end)
    return first, last


def only(trace: Trace, **wanted: list[int] | None) -> Trace:
    """Only the device rows with these numbers, [] or None for any; raises BadInput for a number that no row has."""
    for column, numbers in wanted.items():
        if not numbers:
            continue
        known = sorted({int(n) for rows in trace.activities for n in compact(getattr(rows, column))[0]})
        for number in set(numbers) - set(known):
            raise BadInput(f"--{column}", f"{number} runs nothing", f"there are {', '.join(map(str, known[:20]))}")
        rows = [rows.take(np.isin(getattr(rows, column), numbers)) for rows in trace.activities]
        gpus = {d: name for d, name in trace.gpus.items() if column != "device" or d in numbers}
        trace = trace.but(rows, f"{column} {', '.join(map(str, numbers))}", gpus=gpus)
        if column == "process":
            calls, ranges = (host.take(np.isin(host.process, numbers)) for host in (trace.calls, trace.ranges))
            trace = trace.but(calls=calls, ranges=ranges)
    return trace


def _nth(n: int, of: int, flag: str, what: str) -> int:
    """The index of the n-th of some (1 is the first, -1 the last); raises BadInput when there are fewer."""
    if n == 0 or abs(n) > of:
        raise BadInput(flag, f"{n} of {of} {what}", "1 is the first, -1 the last")
    return n - 1 if n > 0 else of + n


def by_replay(trace: Trace, n: int, graph: int | None = None) -> Trace:
    """The n-th launch of a graph (1 is the first, -1 the last); by default of the graph with the most device time.

    An opaque launch stays opaque. Raises BadInput when no graph launch is in the file, or fewer than n.
    """
    trace.require_timeline("graph replay")
    found = replays(trace)
    if not len(found):
        remedy = "capture with --cuda-graph-trace=node" if trace.graph_mode == "unknown" else "choose another window"
        raise BadInput(trace.source, f"shows no graph launch (graph mode {trace.graph_mode})", remedy)
    numbers, code = compact(found.graph)
    if graph is None:
        graph = int(numbers[np.argmax(np.bincount(code, found.duration_ns))])
    if graph not in numbers:
        raise BadInput("--graph", f"no launch of graph {graph}", nearest(str(graph), map(str, numbers)))
    mine = np.flatnonzero(found.graph == graph)
    one = found.take(mine[[_nth(n, len(mine), "--replay", f"launches of graph {graph}")]])
    called = trace.calls.take(np.isin(launches(trace.calls), one.launch))
    host = merged(called.start_ns, called.end_ns)
    part = _launched(trace, one.launch, np.zeros(1, np.int64), f"replay {n} of graph {graph}", host)
    said = f"this replay has {one.nodes[0]} of {one.expected[0]} nodes: its time is a lower bound"
    if one.edge[0]:
        said = f"this replay of {one.nodes[0]} nodes lies at the edge of the capture and may be cut off: a lower bound"
    return part.but(warn=[said] if one.truncated[0] else [])


def by_nvtx(trace: Trace, pattern: str, nth: int | None = None) -> Trace:
    """What was launched inside NVTX ranges whose label is `pattern` or matches it as a glob; each instance is a step.

    nth: only this instance (1 is the first, -1 the last). A push/pop range holds the calls of its own thread, a
    start/end range those of its process. Nested matches are one instance, the outermost. Raises BadInput when no
    label matches (with the nearest ones), or when nothing that ran was launched inside or ran while one was open.
    """
    chosen, launch, instance, count = _instances(trace, pattern)
    host = merged(chosen.start_ns, chosen.end_ns, is_sorted=False)
    label = f'NVTX "{pattern}"'
    if not len(launch):
        return _while_open(trace, chosen, label, pattern, nth)
    if nth is not None:
        mine = instance == _nth(nth, count, "--nth", f'instances of "{pattern}"')
        launch, instance, label = launch[mine], instance[mine], f"{label} instance {nth}"
        if not len(launch):
            raise BadInput("--nth", f"nothing was launched inside {label}", "choose another instance")
        called = trace.calls.take(np.isin(launches(trace.calls), launch))
        at = np.searchsorted(host.start, called.start_ns, side="right") - 1
        host = Spans(host.start[np.unique(at)], host.end[np.unique(at)])
    return _launched(trace, launch, instance, label, host)


def begins(trace: Trace, pattern: str) -> Int64:
    """When the device began with what each instance of `by_nvtx` launched, ns; instances may overlap there."""
    _, launch, instance, _ = _instances(trace, pattern)
    if not len(launch):
        return np.array([start for start, _ in by_nvtx(trace, pattern).windows_ns or ()], np.int64)
    parts, instances = _taken(trace, launch, instance)
    start = np.concatenate([rows.start_ns for rows in parts])
    order = np.lexsort((start, instances))
    return start[order][np.unique(instances[order], return_index=True)[1]]


def _instances(trace: Trace, pattern: str) -> tuple[Ranges, Int64, Int64, int]:
    """The ranges that `by_nvtx` chooses; the launches inside, their instances, and how many of these there are.

    No launch where nothing that ran is joined to the ranges.
    """
    trace.require_timeline("NVTX window")
    plain = [NUMBERED.sub("", label) for label in trace.labels]
    labels = [i for i, label in enumerate(trace.labels) if pattern in (label, plain[i])]
    labels = labels or [i for i, label in enumerate(trace.labels) if fnmatchcase(label, pattern)]
    if not labels:
        remedy = nearest(pattern, dict.fromkeys(plain)) if len(trace.labels) else "the file has no NVTX ranges"
        raise BadInput("--nvtx", f'no range "{pattern}"', remedy)
    chosen = trace.ranges.take(np.isin(trace.ranges.label, labels))
    launch, instance, count = _launched_within(trace, chosen) if len(trace.calls) else (NO_LAUNCH, NO_LAUNCH, 0)
    if not np.isin(launch, np.concatenate([launches(rows) for rows in trace.activities])).any():
        return chosen, NO_LAUNCH, NO_LAUNCH, count
    return chosen, launch, instance, count


def _while_open(trace: Trace, chosen: Ranges, label: str, pattern: str, nth: int | None) -> Trace:
    """What ran while ranges were open: for those of another process, and where the file does not join launches."""
    spans = merged(chosen.start_ns, chosen.end_ns)
    if nth is not None:
        at = _nth(nth, len(spans), "--nth", f'instances of "{pattern}"')
        spans, label = Spans(spans.start[at : at + 1], spans.end[at : at + 1]), f"{label} instance {nth}"
    if not any(len(_clipped(rows, spans)[0]) for rows in trace.activities):
        where, remedy = (
            (trace.source, "capture --trace=cuda,nvtx") if not len(trace.calls) else ("--nvtx", "see --time")
        )
        why = "has no API calls, so no launch can be placed in a range" if not len(trace.calls) else "nothing launched"
        raise BadInput(where, f'{why}, and nothing ran while "{pattern}" was open', remedy)
    said = "nothing joins its launches to this range (another process, or a graph): taken is what ran while it was open"
    return clip(trace, spans, f"{label} by time", len(spans)).but(warn=[said])


def gpu_time(trace: Trace) -> dict[tuple[str, int], tuple[int, int]]:
    """(label without numbers, domain) -> (total, self) ns of device time launched inside such ranges.

    Total counts a launch once, however often the label is nested; self only where no other range of the domain lies
    between. A launch belongs to the ranges open on its thread (start/end ranges: in its process) when it was called.
    """
    calls, found = trace.calls, dict[tuple[str, int], tuple[int, int]]()
    if not (len(calls) and len(trace.ranges)):
        return found
    spent = np.zeros(len(calls), np.int64)
    calls_of = callers(trace)
    for rows in trace.activities:
        at = calls_of(launches(rows))
        np.add.at(spent, at[at >= 0], rows.duration_ns[at >= 0])
    keys, code = by_label(trace)
    for at, mine in _by_owner(trace.ranges, calls):
        own, which = trace.ranges.take(at), code[at]
        begun, cost = calls.start_ns[mine], np.concatenate([[0], np.cumsum(spent[mine])])
        inner = {d: np.full(len(mine), -1) for d in np.unique(own.domain).tolist()}
        low, high = (np.searchsorted(begun, t, side="left") for t in (own.start_ns, own.end_ns))
        for i in np.lexsort((-own.end_ns, own.start_ns)):  # the innermost last
            inner[int(own.domain[i])][low[i] : high[i]] = which[i]
        for number in np.unique(which):
            spans = merged(own.start_ns[which == number], own.end_ns[which == number])
            a, b = (np.searchsorted(begun, t, side="left") for t in (spans.start, spans.end))
            total, of_own = found.get(keys[number], (0, 0))
            alone = int(spent[mine][inner[keys[number][1]] == number].sum())
            found[keys[number]] = (total + int((cost[b] - cost[a]).sum()), of_own + alone)
    return found


def by_label(trace: Trace) -> tuple[list[tuple[str, int]], NDArray[np.int32]]:
    """The distinct labels, without numbers, each with its domain, and the index of each range among them."""
    code, plain = interned(NUMBERED.sub("", label) for label in trace.labels)
    keys, which = group(np.array(code, np.int64)[trace.ranges.label], trace.ranges.domain)
    return [(plain[label], domain) for label, domain in keys], which


def _by_owner(ranges: Ranges, calls: Calls) -> Iterator[tuple[Int64, Int64]]:
    """The index of each thread's ranges, and of those of a whole process, with the index of its calls."""
    for scope, owner in ((0, "thread"), (1, "process")):
        of_range, of_call = getattr(ranges, owner), getattr(calls, owner)
        for one in np.unique(of_range[ranges.scope == scope]):
            yield np.flatnonzero((ranges.scope == scope) & (of_range == one)), np.flatnonzero(of_call == one)


def _launched_within(trace: Trace, ranges: Ranges) -> tuple[Int64, Int64, int]:
    """The launches that begin inside the ranges, the instance of each (by start), and how many instances."""
    launch, instance, starts = NO_LAUNCH, NO_LAUNCH, NO_LAUNCH
    for mine, calls in _by_owner(ranges, trace.calls):
        spans, own = merged(ranges.start_ns[mine], ranges.end_ns[mine]), trace.calls.take(calls)
        own = own.take(spans.cover(own.start_ns))
        at = np.searchsorted(spans.start, own.start_ns, side="right") - 1
        launch = np.append(launch, launches(own))
        instance = np.append(instance, len(starts) + at)
        starts = np.append(starts, spans.start)
    rank = np.argsort(np.argsort(starts, kind="stable"))
    return launch, rank[instance], len(starts)


@dataclass(frozen=True)
class Replays(Columns):
    """Graph launches: who launched what (`model.launches`), when, and with how many nodes.

    expected: the node count of most launches of that graph (ties: the larger). For opaque launches nodes is 0.
    edge: the only whole launch of its graph, with nothing after it in the capture, or before it the call that made it:
    it may have been cut off there.
    """

    process: Int64
    launch: Int64
    graph: Int64
    nodes: Int64
    expected: Int64
    edge: NDArray[np.bool_]
    opaque: bool

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """Launches with fewer nodes than the other launches of their graph, or at the edge of the capture."""
        return (self.nodes < self.expected) | self.edge


def replays(trace: Trace) -> Replays:
    """Every graph launch that the trace shows, decomposed or opaque, by start.

    Of a window: the launches with work in it, whole, so that an edge of the window never looks like a truncated launch.
    """
    if trace.whole is None:
        return _replays(trace)
    full, inside = _replays(trace.whole), _replays(trace)
    return inside if full.opaque else full.take(np.isin(full.launch, inside.launch))


def _replays(trace: Trace) -> Replays:
    if len(rows := trace.graphs):
        none = np.zeros(len(rows), np.int64)
        process, graph = rows.process.astype(np.int64), rows.graph.astype(np.int64)
        return Replays(rows.start_ns, rows.end_ns, process, launches(rows), graph, none, none, none > 0, True)
    mine = (trace.column("graph") != NONE) | (trace.column("graph_node") != NONE)
    process, correlation, graph, start, end = (
        trace.column(name)[mine] for name in ("process", "correlation", "graph", "start_ns", "end_ns")
    )
    keys, code = group(process, correlation)
    first, last = _extents(code, start, end)
    pair, of_graph = np.array(keys, np.int64).reshape(-1, 2), np.full(len(keys), NONE, np.int64)
    np.maximum.at(of_graph, code, graph.astype(np.int64))
    nodes = np.bincount(code, minlength=len(keys))
    expected = np.zeros(len(keys), np.int64)
    for one in np.unique(of_graph):
        counts, times = np.unique(nodes[of_graph == one], return_counts=True)
        expected[of_graph == one] = counts[::-1][np.argmax(times[::-1])]
    launch = (pair[:, 0] << 32) + pair[:, 1]
    _, which, times = np.unique(of_graph, return_inverse=True, return_counts=True)
    edge = (times[which] == 1) & _at_edge(trace, launch, first, last)
    found = Replays(first, last, pair[:, 0], launch, of_graph, nodes, expected, edge, opaque=False)
    return found.take(np.argsort(first, kind="stable"))


def _at_edge(trace: Trace, launch: Int64, first: Int64, last: Int64) -> NDArray[np.bool_]:
    """Which launches end with the capture, or begin with it without the call that made them; none without calls."""
    if not (len(launch) and len(trace.calls)):
        return np.zeros(len(launch), bool)
    begun, done = trace.extent_ns
    done = max(done, int(trace.calls.end_ns.max()))
    return (last == done) | ((first == begun) & ~np.isin(launch, launches(trace.calls)))


def told_apart(trace: Trace) -> Trace:
    """Graphs that the file does not number (their rows have graph 0), numbered by their signature: which kernels they
    launch, how often each. A launch at the edge of the capture that has a part of one signature is of that graph."""
    kinds = (trace.kernels, trace.memcpy, trace.memset)
    found = _replays(trace)
    edge = set(found.launch[_at_edge(trace, found.launch, found.start_ns, found.end_ns)].tolist())
    content: dict[int, Counter[tuple[int, int]]] = {}
    for kind, rows in enumerate(kinds):
        mine = np.flatnonzero(rows.graph == 0)
        name = getattr(rows, "name", getattr(rows, "kind", np.zeros(len(rows), np.int32)))
        for launch, which in zip(launches(rows)[mine].tolist(), name[mine].tolist(), strict=True):
            content.setdefault(launch, Counter())[kind, which] += 1
    known, of = dict[frozenset[Any], int](), dict[int, int]()
    taken = max(int(r.graph.max(initial=0)) for r in kinds)
    for launch in sorted(content, key=lambda x: x in edge):
        whole = next((k for k in known if content[launch] <= Counter(dict(k))), None) if launch in edge else None
        of[launch] = known.setdefault(whole or frozenset(content[launch].items()), len(known) + taken)
    if len(known) < 2:
        return trace
    changed = []
    for rows in kinds:
        pairs = zip(launches(rows).tolist(), rows.graph.tolist(), strict=True)
        changed.append(replace(rows, graph=np.array([of.get(x, g) if g == 0 else g for x, g in pairs], np.int32)))
    return trace.but(changed)


def truncation_warning(found: Replays) -> list[str]:
    """One sentence on launches that were cut short, where there are any."""
    by = Counter(found.graph[found.truncated].tolist())
    which = ", ".join(f"{n} of graph {g}" for g, n in by.most_common(5))
    what = f"{by.total()} of {len(found)} graph launches are truncated ({which}): their times are lower bounds"
    return [what] if by else []


def first_steady_ns(found: Replays) -> int | None:
    """When the first launch of a graph that is launched at least STEADY times began; None without such a graph."""
    _, code = group(found.process, found.graph)
    steady = np.bincount(code)[code] >= STEADY
    return int(found.start_ns[steady][0]) if steady.any() else None
