"""Steady decode: the part of a capture in which the same step repeats, found from the launches.

A decode step launches the same kernels in the same order, so the sequence of names on the busiest stream is periodic
while decoding and not during start-up, graph capture, prefill or a change of batch. A graph replay counts as one name,
opaque or not, so what repeats within it is never taken for a step. Candidates for the period are the distances at which
short sequences of launches return; the unit is the shortest period whose unbroken repetition covers (nearly) the most
launches. Layers repeat too, so a unit is called a step only where something says so, in this order: nearly all of its
time is one graph replay within which layers repeat; it holds a sampling or LM-head kernel; else NVTX ranges named after
steps, or the sampling kernels themselves, are where steps begin. What was used is said, and what nothing speaks for is
a "repeating unit".

Of several devices the busiest one's launches mark the steps, and a step holds what every device did in it.

A prefill between two steps breaks the repetition. One on another stream lengthens a step instead: steps with far more
device time than the median, or followed by a far longer pause, are left out and counted. A step begins where the stream
usually waits longest and lasts to the next step's begin, so the wait between steps (host time) belongs to it, and the
last step of a stretch is dropped.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.base.errors import BadInput
from lab.trace.exposed import expression
from lab.trace.intervals import compact, group, merged
from lab.trace.model import NONE, Copies, Fills, Int64, Trace, launches, named, short_name
from lab.trace.windows import begins, by_label, clip, extent, only, replays

REPEATS = 3  # unbroken repetitions that make a decode
CANDIDATES = 32  # periods tried
PIECE, SAMPLES = 200_000, 4  # launches looked at for candidates, in how many places
BUSIER, LONGER = 1.5, 2.0  # times the median: device time, length
GRAPH = "graph "  # what a replay is called
# Kernels that end a decode step, and what people call its ranges.
LAST_OF_STEP = re.compile(r"(?i)sampl(?!e_?rate)|argmax|lm_head|multinomial|topk_?topp|top_k_top_p")
STEP_RANGE = re.compile(r"(?i)\b(?:decode|step|iteration|generate|execute_model|ProfilerStep)")
ONE_GRAPH = 0.9  # of a unit's device time


@dataclass(frozen=True)
class Steps:
    """Steps on the device's clock: step i is [start[i], end[i]), ns. launches: device rows of a step.

    how: what says that these are steps, "" for a repeating unit of which nothing does; inside: what repeats within it.
    excluded: steps left out because something else ran in them or after them.
    """

    start: Int64
    end: Int64
    launches: int
    excluded: int
    how: str = ""
    inside: str = ""


def steady_decode(trace: Trace, step: str | None = None) -> Trace:
    """The window of the steady steps, with their number; raises BadInput when nothing repeats REPEATS times.

    step: the user's word for where steps begin: "graph" or "graph:ID", "nvtx:GLOB", "kernel:REGEX".
    """
    found = find_steps(trace, step)
    n = len(found.start)
    kind, unit = ("steady decode", "step") if found.how else ("repeating unit", "unit")
    label = f"{n} {unit}s of {found.launches} launches" + (f" ({found.how})" if found.how else "")
    label = label if step else f"{kind}, {label}"
    part = clip(trace, merged(found.start, found.end), label, n).but(unit=unit)
    said = []
    if not found.how:
        what = f"nothing says that this unit is a decode step{found.inside}: a layer repeats too"
        said.append(f"{what}; --step takes your word (graph, nvtx:GLOB, kernel:REGEX)")
    if found.excluded:
        what = "held other work (a prefill?) or were followed by a long pause, and are left out"
        said.append(f"{found.excluded} of {found.excluded + n} repeating {unit}s {what}")
    return part.but(warn=said)


def find_steps(trace: Trace, step: str | None = None) -> Steps:
    """The steps of the longest repetition, and of every other stretch that repeats the same sequence."""
    extent(trace, "steady decode")
    one = _busiest_device(trace)
    if step:
        return _marked(trace, _begins(one, step), f"--step {step}")
    start, end, codes, texts = _busiest_stream(trace)
    period = _period(codes)
    unit = None
    if period:
        runs = _runs(codes, period)
        longest = runs[np.argmax(runs[:, 1] - runs[:, 0])]
        anchor = longest[0] + _phase(start, end, longest, period)
        cycle = slice(anchor, anchor + period)
        unit = _unit(start, end, codes, runs, anchor, period)
        found = _without_intruders(trace, *unit)
        found = replace(found, how=_evidence(trace, codes[cycle], (end - start)[cycle], texts))
        if found.how:
            return found
    for mark, how in ((_ranges(one), "NVTX ranges"), (_sampling(one), "sampling kernels")):
        if len(mark) > REPEATS:
            steps = _marked(trace, mark, how)
            if len(steps.start) >= max(REPEATS, steps.excluded):
                return steps
    if unit is None:
        what = f"no sequence of launches repeats {REPEATS} times in a row on the busiest stream"
        raise BadInput(trace.source, what, "choose a window by NVTX range, time or replay")
    inner = _period(codes[cycle])
    return replace(found, inside=f" (within it {inner} launches repeat)" if inner else "")


def _unit(
    start: Int64, end: Int64, codes: NDArray[np.int64], runs: NDArray[np.int64], anchor: int, period: int
) -> tuple[Int64, Int64]:
    """Begins and ends of every repetition of the cycle that begins at `anchor`."""
    begins, ends = [], []
    for low, high in runs:
        # The same point of the cycle in every stretch, whatever launch the stretch happens to begin with.
        marks = np.arange(low + _align(codes, anchor, low, period), high, period)
        begins.append(start[marks[:-1]])
        ends.append(start[marks[1:]])
    return np.concatenate(begins), np.concatenate(ends)


def _evidence(trace: Trace, cycle: NDArray[np.int64], length: Int64, texts: Mapping[int, str]) -> str:
    """What says that a cycle of launches is a step, "" when nothing does. texts: what each code stands for."""
    for code, ns in zip(cycle.tolist(), length.tolist(), strict=True):
        if texts[code].startswith(GRAPH) and ns >= ONE_GRAPH * int(length.sum()):
            rows = trace.kernels.take(trace.kernels.graph == code - len(trace.names) - 1)
            names = rows.name[launches(rows) == launches(rows)[0]].astype(np.int64) if len(rows) else np.zeros(0, int)
            if any(LAST_OF_STEP.search(trace.names[i]) for i in np.unique(names)) or _period(names):
                return f"each one replay of {texts[code]}"
    last = next((texts[code] for code in cycle.tolist() if LAST_OF_STEP.search(texts[code])), None)
    return f"each with {short_name(last)}" if last else ""


def _marked(trace: Trace, begins: Int64, how: str) -> Steps:
    begins = np.unique(begins)
    if len(begins) <= REPEATS:
        what = f"{how} marks {len(begins)} places, and steps need {REPEATS + 1}"
        raise BadInput(trace.source, what, "choose another mark, or a window")
    return replace(_without_intruders(trace, begins[:-1], begins[1:]), how=f"by {how}")


def _begins(trace: Trace, step: str) -> Int64:
    """Where steps begin by the user's word."""
    kind, _, what = step.partition(":")
    if kind == "graph":
        found = replays(trace)
        graph = what or str(int(found.graph[np.argmax(found.duration_ns)]) if len(found) else "")
        return found.start_ns[found.graph.astype(str) == graph]
    if kind == "nvtx" and what:
        return begins(trace, what)
    if kind == "kernel" and what:  # of several in a row the first
        hit = named(expression(what, "--step").search, trace.names, trace.kernels.name)
        return trace.kernels.start_ns[hit & np.diff(hit, prepend=False)]
    raise BadInput("--step", f'"{step}"', "give graph, graph:ID, nvtx:GLOB or kernel:REGEX")


def _sampling(trace: Trace) -> Int64:
    """Where a step ends: the first row after each sampling kernel."""
    hit = named(LAST_OF_STEP.search, trace.names, trace.kernels.name)
    return trace.kernels.start_ns[1:][hit[:-1] & ~hit[1:]]


def _ranges(trace: Trace) -> Int64:
    """Where the device work of NVTX ranges named after steps begins, of the name with the most host time."""
    keys, code = by_label(trace)
    time: Counter[str] = Counter()
    for (name, _), ns in zip(keys, np.bincount(code, trace.ranges.duration_ns, len(keys)).tolist(), strict=True):
        if STEP_RANGE.search(name):
            time[re.sub(r"\d+", "*", name)] += ns
    for pattern, _ in time.most_common(3):
        with contextlib.suppress(BadInput):
            return begins(trace, pattern)
    return np.zeros(0, np.int64)


def _busiest_device(trace: Trace) -> Trace:
    """What ran on the device with most of it: where a step begins is a mark of one device, not of each in turn."""
    device, ns = trace.column("device"), trace.column("duration_ns")
    numbers, code = compact(device)
    if len(numbers) < 2:
        return trace
    return only(trace, device=[int(numbers[np.argmax(np.bincount(code, ns))])])


def _busiest_stream(trace: Trace) -> tuple[Int64, Int64, NDArray[np.int64], dict[int, str]]:
    """Starts, ends and codes of the launches on the stream with the most kernel and graph time, in order; the texts.

    All rows of a graph's replay are one launch, from its first start to its last end.
    """
    work = trace.but([trace.kernels, Copies.of(), Fills.of()])
    start, end, graph, node = map(work.column, ("start_ns", "end_ns", "graph", "graph_node"))
    if not len(start):
        raise BadInput(trace.source, "has no kernels", "nothing to find steps in")
    launch = np.concatenate([launches(rows) for rows in work.activities])
    inside = (graph != NONE) | (node != NONE)
    code: NDArray[np.int64] = np.append(trace.kernels.name, np.zeros(len(trace.graphs), np.int64))
    code = np.where(inside, len(trace.names) + 1 + graph, code)
    _, which = group(*map(work.column, ("device", "process", "context", "stream")))
    mine = np.flatnonzero(which == np.argmax(np.bincount(which, weights=end - start)))
    mine = mine[np.argsort(start[mine], kind="stable")]
    start, end, code, launch, inside = start[mine], end[mine], code[mine], launch[mine], inside[mine]
    # A replay's rows follow one another on a stream; a row begins a launch of its own unless it goes on with one.
    new = np.ones(len(mine), bool)
    new[1:] = ~(inside[1:] & inside[:-1] & (launch[1:] == launch[:-1]))
    first = np.flatnonzero(new)
    texts = {int(c): GRAPH + str(c - len(trace.names) - 1) for c in np.unique(code) if c >= len(trace.names)}
    texts |= dict(enumerate(trace.names))
    return start[first], np.maximum.reduceat(end, first), code[first], texts


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
    start, length = trace.column("start_ns"), trace.column("duration_ns")
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    at = np.searchsorted(begin, start, side="right") - 1
    inside = (at >= 0) & (start < end[np.maximum(at, 0)])
    busy = np.bincount(at[inside], weights=length[inside], minlength=len(begin))
    usual, long = np.median(busy), np.median(end - begin)
    keep = (busy <= BUSIER * usual) & (end - begin <= LONGER * long)
    launches = int(np.median(np.bincount(at[inside], minlength=len(begin))))
    return Steps(begin[keep], end[keep], launches, int((~keep).sum()))
