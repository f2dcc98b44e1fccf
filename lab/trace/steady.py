"""Steady decode: the part of a capture in which the same step repeats, found from the launches alone.

A decode step launches the same kernels in the same order, so the sequence of names on the busiest stream is periodic
while decoding and not during start-up, graph capture, prefill or a change of batch. Candidates for the period are the
distances at which short sequences of launches return. Layers repeat within a step and give short periods, which end
with the step; the step is the shortest period whose unbroken repetition covers (nearly) the most launches.

A prefill between two steps breaks the repetition. One on another stream lengthens a step instead: steps with far more
device time than the median, or followed by a far longer pause, are left out and counted. A step begins where the stream
usually waits longest and lasts to the next step's begin, so the wait between steps (host time) belongs to it, and the
last step of a stretch is dropped. An opaque graph counts as one name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.base.errors import BadInput
from lab.trace.intervals import compact, group, merged
from lab.trace.model import Int64, Trace
from lab.trace.windows import clip, extent

REPEATS = 3  # unbroken repetitions that make a decode
CANDIDATES = 32  # periods tried
PIECE, SAMPLES = 200_000, 4  # launches looked at for candidates, in how many places
BUSIER, LONGER = 1.5, 2.0  # times the median: device time, length


@dataclass(frozen=True)
class Steps:
    """Steps on the device's clock: step i is [start[i], end[i]), ns. launches: device rows of the period.

    excluded: steps left out because something else ran in them or after them.
    """

    start: Int64
    end: Int64
    launches: int
    excluded: int


def steady_decode(trace: Trace) -> Trace:
    """The window of the steady steps, with their number; raises BadInput when nothing repeats REPEATS times."""
    found = find_steps(trace)
    n = len(found.start)
    label = f"steady decode, {n} steps of {found.launches} launches"
    part = clip(trace, merged(found.start, found.end), label, n)
    what = "held other work (a prefill?) or were followed by a long pause, and are left out"
    said = f"{found.excluded} of {found.excluded + n} repeating steps {what}"
    return part.but(warn=[said] if found.excluded else [])


def find_steps(trace: Trace) -> Steps:
    """The steps of the longest repetition, and of every other stretch that repeats the same sequence."""
    extent(trace, "steady decode")
    start, end, codes = _busiest_stream(trace)
    period = _period(codes)
    if not period:
        what = f"no sequence of launches repeats {REPEATS} times in a row on the busiest stream"
        raise BadInput(trace.source, what, "choose a window by NVTX range, time or replay")
    runs = _runs(codes, period)
    longest = runs[np.argmax(runs[:, 1] - runs[:, 0])]
    anchor = longest[0] + _phase(start, end, longest, period)
    begins, ends = [], []
    for low, high in runs:
        # The same point of the cycle in every stretch, whatever launch the stretch happens to begin with.
        marks = np.arange(low + _align(codes, anchor, low, period), high, period)
        begins.append(start[marks[:-1]])
        ends.append(start[marks[1:]])
    return _without_intruders(trace, np.concatenate(begins), np.concatenate(ends))


def _busiest_stream(trace: Trace) -> tuple[Int64, Int64, NDArray[np.int64]]:
    """Starts, ends and codes of the launches on the stream with the most kernel and opaque graph time, in order."""
    kernels, graphs = trace.kernels, trace.graphs
    start, end, *stream = (
        np.concatenate([getattr(rows, column) for rows in (kernels, graphs)])
        for column in ("start_ns", "end_ns", "device", "process", "context", "stream")
    )
    code = np.concatenate([kernels.name.astype(np.int64), len(trace.names) + graphs.graph.astype(np.int64)])
    if not len(start):
        raise BadInput(trace.source, "has no kernels", "nothing to find steps in")
    _, which = group(*stream)
    mine = np.flatnonzero(which == np.argmax(np.bincount(which, weights=end - start)))
    mine = mine[np.argsort(start[mine], kind="stable")]
    return start[mine], end[mine], code[mine]


def _period(codes: NDArray[np.int64]) -> int:
    """The shortest period whose unbroken repetition covers (nearly) the most launches, 0 when none repeats enough."""
    reach = {}
    for period in _candidates(codes):
        runs = _runs(codes, period)
        if len(runs):
            reach[period] = int((runs[:, 1] - runs[:, 0]).max())
    return min((period for period, n in reach.items() if n >= 0.95 * max(reach.values())), default=0)


def _candidates(codes: NDArray[np.int64]) -> list[int]:
    """Distances at which short sequences (1, 2, 4, 8 and 16 launches) come again, the most covering first.

    A name that occurs often within a step never comes again after exactly one step; a sequence across the end of the
    step does. Long captures are searched in SAMPLES pieces, and the period is then held against all of it.
    """
    n = len(codes)
    lows = [0] if n <= PIECE * SAMPLES else [(n - PIECE) * i // (SAMPLES - 1) for i in range(SAMPLES)]
    covered: Counter[int] = Counter()
    for low in lows:
        gram: NDArray[Any] = codes if len(lows) == 1 else codes[low : low + PIECE]
        for length in (1, 2, 4, 8, 16):
            if length > 1:
                gram = (gram[: -length // 2].astype(np.int64) << 32) | gram[length // 2 :]
            _, gram = compact(gram)
            order = np.argsort(gram, kind="stable")
            again = gram[order][1:] == gram[order][:-1]
            pair = (gram[order][1:][again].astype(np.int64) << 32) | np.diff(order)[again]
            pair, count = np.unique(pair, return_counts=True)
            for distance, times in zip((pair & 0xFFFFFFFF).tolist(), count.tolist(), strict=True):
                if times >= REPEATS - 1:
                    covered[distance] = max(covered[distance], distance * times)
            if len(gram) <= 2 * length:
                break
    return [period for period, _ in covered.most_common(CANDIDATES)]


def _runs(codes: NDArray[np.int64], period: int) -> NDArray[np.int64]:
    """[low, high) of every maximal stretch of launches that repeats REPEATS times with this period, one row each."""
    equal = codes[period:] == codes[:-period]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]])))
    runs = edges.reshape(-1, 2) + np.array([0, period])
    return runs[runs[:, 1] - runs[:, 0] >= REPEATS * period]


def _align(codes: NDArray[np.int64], anchor: int, low: int, period: int) -> int:
    """How far after `low` the cycle that begins at `anchor` begins; past the end when the two are different cycles."""
    cycle = codes[anchor : anchor + period]
    twice = np.tile(codes[low : low + period], 2)
    shifts = np.flatnonzero(twice[:period] == cycle[0])
    return next((int(s) for s in shifts if np.array_equal(twice[s : s + period], cycle)), len(codes))


def _phase(start: Int64, end: Int64, stretch: NDArray[np.int64], period: int) -> int:
    """The place in the cycle before which the stream waits longest, by the median over the cycles."""
    low, high = stretch
    wait = start[low + 1 : high] - np.maximum.accumulate(end[low : high - 1])
    cycles = len(wait) // period
    usual = np.median(wait[: cycles * period].reshape(cycles, period), axis=0)
    return (int(np.argmax(usual)) + 1) % period


def _without_intruders(trace: Trace, begin: Int64, end: Int64) -> Steps:
    """The steps less those with far more device time, or far longer, than the median step."""
    start, length = (np.concatenate([getattr(r, k) for r in trace.activities]) for k in ("start_ns", "duration_ns"))
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    at = np.searchsorted(begin, start, side="right") - 1
    inside = (at >= 0) & (start < end[np.maximum(at, 0)])
    busy = np.bincount(at[inside], weights=length[inside], minlength=len(begin))
    usual, long = np.median(busy), np.median(end - begin)
    keep = (busy <= BUSIER * usual) & (end - begin <= LONGER * long)
    launches = int(np.median(np.bincount(at[inside], minlength=len(begin))))
    return Steps(begin[keep], end[keep], launches, int((~keep).sum()))
