"""One trace over time: a strip of device time (one decode step), and the division of its span.

A strip joins neighbours that lie closer than half a pixel, or one step of a serving engine would be a megabyte of SVG:
joined blocks keep the colour of the longest, and shorter gaps are not drawn, though the busy share below counts them.
Kernels that only wait are drawn where they ran and are not busy time.

The division shows the span without counting anything twice, and beside it the summed durations: where these are longer,
things ran at the same time. Given up: interaction (a profiler's own viewer has it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from lab.base.errors import BadInput
from lab.draw import style
from lab.trace import categories, intervals
from lab.trace.categories import MEMCPY, MEMSET, OPAQUE, Rules
from lab.trace.intervals import Spans, merged, union
from lab.trace.model import Int64, Trace

PIXELS = 900  # half pixels of a timeline's width
COPY: style.Look = (style.VERMILLION, "////")
GRAPH: style.Look = ("#dddddd", "xxxx")
LOOKS: Mapping[str, style.Look] = {MEMCPY: COPY, MEMSET: (style.VERMILLION, "...."), OPAQUE: GRAPH}
DIVIDED: Mapping[str, style.Look] = {
    "kernels": (style.BLUE, ""),
    "kernels with copies": (style.BLUE, "////"),
    "copies and fills": COPY,
    "opaque graph": GRAPH,
    "waiting": (style.YELLOW, ""),
    "idle": style.IDLE_LOOK,
}
Lane = tuple[str, list[tuple[str, Spans]]]


@style.styled
def timeline(trace: Trace, rules: Rules | None = None, title: str = "", most: int = 8) -> Figure:
    """A strip of device time: kernels by stream, copies and fills, opaque graphs, idle; x is us from the first row.

    most: how many categories get their own look, by time; the rest are grey. Raises BadInput without a timeline or
    without any device activity.
    """
    trace.require_timeline("timeline strip")
    rules = rules or categories.default()
    active = [a for a in trace.activities if len(a)]
    if not active:
        raise BadInput(trace.source, "has no device activity", "choose another window")
    begin = min(int(a.start_ns[0]) for a in active)
    end = max(int(a.end_ns.max()) for a in active)
    if trace.windows_ns:
        begin, end = min(begin, trace.windows_ns[0][0]), max(end, trace.windows_ns[-1][1])
    looks, named = _looks(trace, rules, most)
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
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.tick_params(axis="y", length=0)
    span = (end - begin) / 1e3
    axes.set_xlabel(f"us; busy {style.number(busy.ns / 1e3)} of {style.number(span)} us ({busy.ns / 1e3 / span:.1%})")
    style.plain_ticks(axes.xaxis)
    style.title(axes, title or f"{trace.source} {trace.window_label}".strip())
    style.legend_below(figure, looks, 4)
    return figure


def _looks(trace: Trace, rules: Rules, most: int) -> tuple[dict[str, style.Look], list[str]]:
    """The look of each category in the picture, the largest first; and the category of each kernel name."""
    found = rules.assign(trace.names)
    time: dict[str, int] = {}
    for i, ns in zip(trace.kernels.name.tolist(), trace.kernels.duration_ns.tolist(), strict=True):
        time[found[i]] = time.get(found[i], 0) + ns
    largest = sorted(time, key=lambda c: (-time[c], c))
    looks = {c: style.look(i) for i, c in enumerate(largest[:most])}
    if len(largest) > most:
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
    for device, stream in sorted(set(zip(kernels.device.tolist(), kernels.stream.tolist(), strict=True))):
        own = kernels.take((kernels.device == device) & (kernels.stream == stream))
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


@style.styled
def occupancy(trace: Trace, rules: Rules | None = None, title: str = "") -> Figure:
    """Two bars for each device: its time span divided without overlap (kernels, copies beside them, copies alone,
    opaque graphs alone, idle), and the summed durations, which may exceed it.

    Raises BadInput without a timeline or without any device activity.
    """
    found = divided(trace, rules)
    rows = [(f"GPU {device} {what}", parts) for device, both in found.items() for what, parts in both.items()]
    figure, axes = style.blank(1.45 + 0.42 * len(rows))
    reach = max(sum(parts.values()) for _, parts in rows)
    span = max(sum(both["time"].values()) for both in found.values())
    axes.set_xlim(0, reach * 1.02)
    figure.draw_without_rendering()
    used: dict[str, style.Look] = {}
    for y, (_, parts) in enumerate(rows):
        left = 0.0
        for name, us in parts.items():
            if us <= 0:
                continue
            used[name] = colour, hatch = DIVIDED[name]
            style.block(axes, y, left, us, used[name], height=0.64, line=0.4)
            if us > 0.16 * reach and not hatch:
                style.inside(axes, f"{style.number(us)} ({us / span:.1%})", (left + us / 2, y), colour, 8)
            left += us
    axes.axvline(span, color=style.INK, lw=0.8, ls="--")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    style.plain_ticks(axes.xaxis)
    axes.set_xlabel(f"us; 100 % = span, {style.number(span)} us (dashed); sums beyond it ran at the same time")
    style.title(axes, title or f"{trace.source} {trace.window_label}".strip())
    style.legend_below(figure, used, min(len(used), 5))
    return figure


def divided(trace: Trace, rules: Rules | None = None) -> dict[int, dict[str, dict[str, float]]]:
    """Device -> {"time": a division of the span, "summed": durations added up}, in us.

    The division is exact: its parts sum to the span. Raises BadInput without a timeline or device activity.
    """
    trace.require_timeline("division of the span")
    rules = rules or categories.default()
    waits = rules.waits(trace.names)
    devices = intervals.devices(trace, intervals.streams(trace, waits))
    over = intervals.window(trace, intervals.together(list(devices.values())))
    if not over.ns:
        raise BadInput(trace.source, "has no device activity", "choose another window")
    found = {}
    for gpu in devices:
        own = [a.take(a.device == gpu) for a in trace.activities]
        kernels, copies, opaque = own[0], own[1:3], own[3]
        waiting = waits[kernels.name]  # type: ignore[attr-defined]
        work, wait = (merged(k.start_ns, k.end_ns) for k in (kernels.take(~waiting), kernels.take(waiting)))
        copy = union([merged(a.start_ns, a.end_ns) for a in copies])
        graph = merged(opaque.start_ns, opaque.end_ns)
        both, busy = union([work, copy]), union([work, copy, graph])
        time = {
            "kernels": (work.ns - work.overlap_ns(copy)) / 1e3,
            "kernels with copies": work.overlap_ns(copy) / 1e3,
            "copies and fills": (both.ns - work.ns) / 1e3,
            "opaque graph": (busy.ns - both.ns) / 1e3,
            "waiting": (union([busy, wait]).ns - busy.ns) / 1e3,
        }
        time["idle"] = over.ns / 1e3 - sum(time.values())
        summed = {
            "kernels": int(kernels.duration_ns[~waiting].sum()) / 1e3,
            "copies and fills": sum(int(a.duration_ns.sum()) for a in copies) / 1e3,
            "opaque graph": int(opaque.duration_ns.sum()) / 1e3,
            "waiting": int(kernels.duration_ns[waiting].sum()) / 1e3,
        }
        found[gpu] = {"time": time, "summed": summed}
    return found
