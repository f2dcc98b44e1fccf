"""One trace over time: a strip of device time, such as one decode step.

A strip joins neighbours that lie closer than half a pixel, or one step of a serving engine would be a megabyte of SVG:
joined blocks keep the colour of the longest, and shorter gaps are not drawn, though the busy share below counts them.
Kernels that only wait are drawn where they ran and are not busy time.
Given up: interaction (a profiler's own viewer has it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab.base.errors import BadInput
from lab.draw import style
from lab.trace import categories
from lab.trace.categories import Rules
from lab.trace.intervals import Spans, group, merged, union
from lab.trace.model import MEMCPY, MEMSET, OPAQUE, Int64, Trace, totals_by_name

MOST = 8
PIXELS = 900  # half pixels of a timeline's width
COPY: style.Look = (style.VERMILLION, "////")
GRAPH: style.Look = ("#dddddd", "xxxx")
LOOKS: Mapping[str, style.Look] = {MEMCPY: COPY, MEMSET: (style.VERMILLION, "...."), OPAQUE: GRAPH}
Lane = tuple[str, list[tuple[str, Spans]]]


@style.styled
def timeline(trace: Trace, title: str = "") -> Figure:
    """A strip of device time: kernels by stream, copies and fills, opaque graphs, idle; x is us from the first row.

    MOST categories get their own look, by time; the rest are grey. Raises BadInput without a timeline or without any
    device activity.
    """
    trace.require_timeline("timeline strip")
    rules = categories.default()
    if not any(map(len, trace.activities)):
        raise BadInput(trace.source, "has no device activity", "choose another window")
    begin, end = trace.extent_ns
    if trace.windows_ns:
        begin, end = min(begin, trace.windows_ns[0][0]), max(end, trace.windows_ns[-1][1])
    looks, named = _looks(trace, rules)
    close_ns = (end - begin) / PIXELS
    lanes = _lanes(trace, named, close_ns)
    work = trace.kernels.take(~rules.waits(trace.names)[trace.kernels.name]) if len(trace.kernels) else trace.kernels
    busy = union([merged(a.start_ns, a.end_ns) for a in (work, *trace.activities[1:])])
    free = busy.gaps(begin, end)
    wide = free.end - free.start >= close_ns
    name = "idle" if wide.all() else f"idle, {close_ns / 1e3:.2g} us up"
    lanes.append((name, [("idle", Spans(free.start[wide], free.end[wide]))]))
    looks["idle"] = ("#9a9a9a", "")
    figure, axes = style.blank(1.25 + 0.36 * len(lanes) + 0.2 * math.ceil(len(looks) / 3))
    for y, (_, blocks) in enumerate(lanes):
        for category, spans in blocks:
            colour, hatch = looks.get(category, (style.SOFT, ""))
            # Thin blocks keep half a pixel, or they fade to nothing; idle time is never drawn wider than it was.
            least = 0 if category == "idle" else close_ns / 1e3
            times = zip(spans.start, spans.end, strict=True)
            pairs = [((s - begin) / 1e3, max((e - s) / 1e3, least)) for s, e in times]
            axes.broken_barh(pairs, (y - 0.33, 0.66), facecolors=colour, hatch=hatch, edgecolor=style.INK, linewidth=0)
    span = (end - begin) / 1e3
    style.rows(axes, [name for name, _ in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, span)
    axes.set_xlabel(f"us; busy {style.number(busy.ns / 1e3)} of {style.number(span)} us ({busy.ns / 1e3 / span:.1%})")
    style.plain_ticks(axes.xaxis)
    style.title(axes, title or f"{trace.source} {trace.window_label}".strip())
    boxes = [
        Rectangle((0, 0), 1, 1, facecolor=c, hatch=h, edgecolor=style.INK, linewidth=0.4) for c, h in looks.values()
    ]
    style.legend(figure, dict(zip(looks, boxes, strict=True)), 4)
    return figure


def _looks(trace: Trace, rules: Rules) -> tuple[dict[str, style.Look], list[str]]:
    """The look of each category in the picture, the largest first; and the category of each kernel name."""
    found = rules.assign(trace.names)
    time = sorted(categories.sums(rules, totals_by_name(trace)), key=lambda t: (-t.sum_ns, t.name))
    looks = {t.name: style.look(i) for i, t in enumerate(time[:MOST])}
    if len(time) > MOST:
        looks["other categories"] = (style.SOFT, "")
    for label, rows in zip((MEMCPY, MEMSET, OPAQUE), trace.activities[1:], strict=True):
        if len(rows):
            looks[label] = LOOKS[label]
    return looks, [c if c in looks else "other categories" for c in found]


def _lanes(trace: Trace, named: Sequence[str], close_ns: float) -> list[Lane]:
    """Kernels by (device, stream), then copies, fills and opaque graphs; blocks joined below `close_ns`."""
    lanes: list[Lane] = []
    kernels = trace.kernels
    several = len(set(kernels.device.tolist())) > 1
    keys, codes = group(kernels.device, kernels.stream)
    for i, (device, stream) in enumerate(keys):
        own = kernels.take(codes == i)
        blocks = _blocks(own.start_ns, own.end_ns, [named[i] for i in own.name.tolist()], close_ns)
        lanes.append((f"GPU {device} stream {stream}" if several else f"stream {stream}", blocks))
    for label, rows in zip((MEMCPY, MEMSET, OPAQUE), trace.activities[1:], strict=True):
        if len(rows):
            name = "graph" if label == OPAQUE else label
            lanes.append((name, _blocks(rows.start_ns, rows.end_ns, [label] * len(rows), close_ns)))
    return lanes


def _blocks(start: Int64, end: Int64, label: Sequence[str], close_ns: float) -> list[tuple[str, Spans]]:
    """Runs of rows that lie closer than `close_ns` and are shorter become one block of the longest label."""
    blocks: list[tuple[int, int, dict[str, int]]] = []
    for s, e, name in zip(start.tolist(), end.tolist(), label, strict=True):
        if blocks and s - blocks[-1][1] < close_ns:
            low, high, names = blocks[-1]
            if (name in names and len(names) == 1) or max(e - s, high - low) < 3 * close_ns:
                names[name] = names.get(name, 0) + e - s
                blocks[-1] = (low, max(high, e), names)
                continue
        blocks.append((s, e, {name: e - s}))
    by: dict[str, list[tuple[int, int]]] = {}
    for s, e, names in blocks:
        by.setdefault(max(names, key=lambda n: names[n]), []).append((s, e))
    return [(n, Spans(np.array([s for s, _ in v]), np.array([e for _, e in v]))) for n, v in by.items()]
