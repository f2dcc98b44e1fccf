"""CUDA graph launches: which rows one replay launched, which replays are cut short, and what came before the first.

In node mode every kernel and copy of a replay carries the correlation number of its cudaGraphLaunch, so a replay is the
rows that share (process, correlation). In graph mode a replay is one opaque row. Launches of one graph run the same
nodes; one with fewer than the others was cut off by the capture's start or end or by a full buffer, and its time is a
lower bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lab.trace.intervals import group
from lab.trace.model import NONE, Activity, Trace

STEADY = 3  # a graph launched this often is being replayed for work, not warmed up


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
