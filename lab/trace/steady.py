"""Steady decode: the part of a capture in which the same step repeats, found from the launches alone.

A decode step launches the same kernels in the same order, so the sequence of names on the busiest stream is periodic
while decoding and not during start-up, graph capture, prefill or a change of batch. Candidates for the period are the
distances at which short sequences of launches return. Layers repeat within a step and give short periods, which end
with the step; the step is the shortest period whose unbroken repetition covers (nearly) the most launches.

A prefill between two steps breaks the repetition. One on another stream lengthens a step instead: steps with far more
device time than the median, or followed by a far longer pause, are left out and counted. A step that only grows with
the context stays.

A step begins where the stream usually waits longest and lasts to the next step's begin, so the wait between steps (host
time) belongs to it, and the last step of a stretch is dropped. An opaque graph counts as one name.
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
LONGEST = 16  # launches in the sequences whose return gives a candidate
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
    spans = merged(found.start, found.end)
    part = clip(trace, spans, f"steady decode, {len(found.start)} steps of {found.launches} launches", len(found.start))
    if found.excluded:
        total = found.excluded + len(found.start)
        what = "held other work (a prefill?) or were followed by a long pause, and are left out"
        part = part.but(warn=[f"{found.excluded} of {total} repeating steps {what}"])
    return part


def find_steps(trace: Trace) -> Steps:
    """The steps of the longest repetition, and of every other stretch that repeats the same sequence."""
    extent(trace, "steady decode")
    start, end, codes = _busiest_stream(trace)
    period = _period(codes)
    if not period:
        what = f"no sequence of launches repeats {REPEATS} times in a row on the busiest stream"
        raise BadInput(trace.source, what, "choose a window by NVTX range, time or replay")
    stretches = _stretches(codes, period)
    offset = _phase(start, end, stretches[0], period)
    begins, ends = [], []
    for low, high in stretches:
        # The same point of the cycle in every stretch, whatever launch the stretch happens to begin with.
        marks = np.arange(low + _align(codes, stretches[0][0] + offset, low, period), high, period)
        begins.append(start[marks[:-1]])
        ends.append(start[marks[1:]])
    return _without_intruders(trace, np.concatenate(begins), np.concatenate(ends), period)


def _busiest_stream(trace: Trace) -> tuple[Int64, Int64, NDArray[np.int64]]:
    """Starts, ends and codes of the launches on the stream with the most kernel and opaque graph time, in order."""
    rows = (trace.kernels, trace.graphs)
    start, end = (np.concatenate([getattr(r, c) for r in rows]) for c in ("start_ns", "end_ns"))
    code = np.concatenate([trace.kernels.name.astype(np.int64), len(trace.names) + trace.graphs.graph.astype(np.int64)])
    if not len(start):
        raise BadInput(trace.source, "has no kernels", "nothing to find steps in")
    columns = [np.concatenate([getattr(r, c) for r in rows]) for c in ("device", "process", "context", "stream")]
    _, which = group(*columns)
    busiest = int(np.argmax(np.bincount(which, weights=end - start)))
    mine = np.flatnonzero(which == busiest)
    mine = mine[np.argsort(start[mine], kind="stable")]
    return start[mine], end[mine], code[mine]


def _period(codes: NDArray[np.int64]) -> int:
    """The shortest period whose unbroken repetition covers (nearly) the most launches, 0 when none repeats enough."""
    reach = {}
    for period in _candidates(codes):
        runs = _runs(codes, period)
        length = int((runs[:, 1] - runs[:, 0]).max()) if len(runs) else 0
        if length >= REPEATS * period:
            reach[period] = length
    best = max(reach.values(), default=0)
    return next((period for period in sorted(reach) if reach[period] >= 0.95 * best), 0)


def _candidates(codes: NDArray[np.int64]) -> list[int]:
    """Distances at which short sequences (1, 2, 4, 8 and 16 launches) come again, the most covering first.

    A name that occurs often within a step never comes again after exactly one step; a sequence across the end of the
    step does. Long captures are searched in SAMPLES pieces, and the period is then held against all of it.
    """
    n = len(codes)
    piece = min(n, PIECE)
    lows = [0] if n <= PIECE * SAMPLES else [(n - piece) * i // (SAMPLES - 1) for i in range(SAMPLES)]
    covered: Counter[int] = Counter()
    for low in lows:
        part = codes[low:] if len(lows) == 1 else codes[low : low + piece]
        gram: NDArray[Any] = part
        length = 1
        while True:
            _, gram = compact(gram)
            order = np.argsort(gram, kind="stable")
            again = gram[order][1:] == gram[order][:-1]
            pair, count = np.unique(
                (gram[order][1:][again].astype(np.int64) << 32) | np.diff(order)[again], return_counts=True
            )
            for key, times in zip((pair & 0xFFFFFFFF).tolist(), count.tolist(), strict=True):
                if times >= REPEATS - 1:
                    covered[key] = max(covered[key], key * times)
            if length == LONGEST or len(gram) <= 2 * length:
                break
            gram = (gram[:-length].astype(np.int64) << 32) | gram[length:]
            length *= 2
    return [period for period, _ in covered.most_common(CANDIDATES)]


def _runs(codes: NDArray[np.int64], period: int) -> NDArray[np.int64]:
    """[low, high) of every maximal stretch of launches that repeats with this period, one row each."""
    equal = codes[period:] == codes[:-period]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]])))
    runs = edges.reshape(-1, 2)
    runs = runs + np.array([0, period])
    return runs[runs[:, 1] - runs[:, 0] >= 2 * period]


def _stretches(codes: NDArray[np.int64], period: int) -> list[tuple[int, int]]:
    """The longest stretch first, then the others that repeat the same cycle at least REPEATS times."""
    runs = _runs(codes, period)
    runs = runs[np.argsort(runs[:, 0] - runs[:, 1], kind="stable")]
    low = int(runs[0, 0])
    cycle = np.sort(codes[low : low + period])
    fine = [
        (int(a), int(b))
        for a, b in runs
        if b - a >= REPEATS * period and np.array_equal(np.sort(codes[a : a + period]), cycle)
    ]
    return [s for s in fine if _align(codes, low, s[0], period) < period]


def _align(codes: NDArray[np.int64], anchor: int, low: int, period: int) -> int:
    """How far after `low` the cycle that begins at `anchor` begins; `period` when the two are different cycles."""
    cycle = codes[anchor : anchor + period]
    if len(cycle) < period:  # the anchor lies in the stretch's last cycle: the one before it is the same
        cycle = codes[anchor - period : anchor]
    twice = np.concatenate([codes[low : low + period]] * 2)
    for shift in np.flatnonzero(twice[:period] == cycle[0]):
        if np.array_equal(twice[shift : shift + period], cycle):
            return int(shift)
    return period


def _phase(start: Int64, end: Int64, stretch: tuple[int, int], period: int) -> int:
    """The place in the cycle before which the stream waits longest, by the median over the cycles."""
    low, high = stretch
    low_of = np.arange(low + 1, high)
    wait = start[low_of] - np.maximum.accumulate(end[low:high])[:-1]
    cycles = len(wait) // period
    usual = np.median(wait[: cycles * period].reshape(cycles, period), axis=0)
    return (int(np.argmax(usual)) + 1) % period


def _without_intruders(trace: Trace, begin: Int64, end: Int64, period: int) -> Steps:
    """The steps less those with far more device time, or far longer, than the median step."""
    rows = trace.activities
    start = np.concatenate([r.start_ns for r in rows])
    length = np.concatenate([r.duration_ns for r in rows])
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    at = np.searchsorted(begin, start, side="right") - 1
    inside = (at >= 0) & (start < end[np.maximum(at, 0)])
    busy = np.bincount(at[inside], weights=length[inside], minlength=len(begin))
    usual, long = np.median(busy), np.median(end - begin)
    keep = (busy <= BUSIER * usual) & (end - begin <= LONGER * long)
    launches = int(np.median(np.bincount(at[inside], minlength=len(begin))))
    return Steps(begin[keep], end[keep], launches, int((~keep).sum()))
