"""Pictures of breakdowns: where two engines differ, with the waterfall of the gap, and one breakdown's bars.

Same card as lab/draw/plots.py: fixed white ground, text as text, Okabe and Ito's colours. A breakdown has more
categories than there are colours that the colour-blind keep apart, so a colour comes back with a hatch, every part that
is wide enough carries its name, and the waterfall's rows are the legend: colour and hatch beside the name.

The waterfall starts at B's total, walks the categories' differences in the order of their size and must arrive at A's
total; what no category explains is a row of its own, hatched. Categories too small to see are joined, and the row says
how many. Where the differences largely cancel, shares of so small a gap are left out: they would be hundreds of per
cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from lab.base.errors import BadInput
from lab.draw import plots
from lab.draw.plots import BLUE, CARD, GREEN, INK, ORANGE, PURPLE, SOFT, VERMILLION
from lab.trace.breakdowns import NO_PART, Breakdown
from lab.trace.diff import NOT_ATTRIBUTED, Difference, Line

SKY, YELLOW = "#56B4E9", "#F0E442"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW)
HATCHES = ("", "////", "....", "xxxx")
CANCELS = 0.1  # a gap below this part of the summed differences gets no shares: they would be hundreds of per cent
SMALL = 0.015  # of the larger total: categories with less, on both sides, are joined
Look = tuple[str, str]  # colour, hatch
REST: Look = (CARD, "\\\\\\\\")
IDLE_LOOK: Look = ("#eeeeee", "")
DARK = (BLUE, GREEN, VERMILLION)  # grounds that take white letters


@dataclass(frozen=True)
class _Row:
    """A category of a two-sided picture: the values of A and B, and how it looks."""

    name: str
    a: float
    b: float
    look: Look


def _rows(d: Difference) -> list[_Row]:
    """Categories large enough to see, then the joined small ones, idle and overlap, and what is not attributed."""
    limit = SMALL * max(d.a.whole, d.b.whole)
    shown = [x for x in d.lines if max(abs(x.a), abs(x.b)) >= limit and x.name not in NO_PART]
    small = [x for x in d.lines if x not in shown and x.name not in NO_PART]
    shown.sort(key=lambda x: -max(x.a, x.b))
    if len(small) == 1:
        shown, small = [*shown, *small], []
    rows = [_Row(_name(x), x.a, x.b, look(i)) for i, x in enumerate(shown)]
    if small:
        rows.append(_Row(f"{len(small)} smaller ones", sum(x.a for x in small), sum(x.b for x in small), (SOFT, "")))
    for line in d.lines:
        if line.name in NO_PART:
            rows.append(_Row(line.name.removeprefix("gpu_"), line.a, line.b, IDLE_LOOK))
    rest = d.a.not_attributed, d.b.not_attributed
    if max(map(abs, rest)) > 1e-6 * max(d.a.whole, d.b.whole):
        rows.append(_Row(NOT_ATTRIBUTED, *rest, REST))
    return rows


def _name(line: Line) -> str:
    """The source's own words where both sides use the same, else the category."""
    return line.labels[0] if line.labels[0] and line.labels[0] == line.labels[1] else line.name


def number(value: float, sign: str = "") -> str:
    """Four digits, or all of a number from 1,000 on."""
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"


def look(i: int) -> Look:
    """Colour and hatch of the i-th category: seven colours, then again with a hatch."""
    return CYCLE[i % len(CYCLE)], HATCHES[i // len(CYCLE) % len(HATCHES)]


def gap(d: Difference, names: tuple[str, str] = ("A", "B"), title: str = "") -> Figure:
    """Two stacked bars side by side and the waterfall of the gap between them.

    names: what the reader calls the two sides. Raises BadInput when a total is not positive.
    """
    if min(d.a.whole, d.b.whole) <= 0:
        raise BadInput("gap picture", f"totals {d.a.whole:g} and {d.b.whole:g} {d.unit}", "both must be above zero")
    rows = _rows(d)
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH_IN, 2.35 + 0.26 * len(rows)), facecolor=CARD, layout="constrained")
        FigureCanvasAgg(figure)
        bars, falls = figure.subplots(2, 1, height_ratios=[1.25, 0.26 * len(rows) + 0.75])
        reach = max(max(sum(max(r.a, 0) for r in rows), d.a.whole), max(sum(max(r.b, 0) for r in rows), d.b.whole))
        for axes in (bars, falls):
            axes.set_facecolor(CARD)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
        bars.set_xlim(0, reach * 1.24)
        bars.set_ylim(1.5, -0.5)
        bars.set_yticks([0, 1], list(names))
        bars.xaxis.set_major_formatter(FuncFormatter(plots.plain))
        bars.set_xlabel(f"{d.unit}; whole = {d.a.denominator}")
        bars.set_title(title or f"{names[0]} against {names[1]}, {d.unit}", loc="left", fontsize=10, color=INK)
        _waterfall(falls, d, rows, names)
        figure.draw_without_rendering()  # fixes the layout, so that text can be measured against its part
        figure.set_layout_engine("none")
        for y, values, whole in ((0, [r.a for r in rows], d.a.whole), (1, [r.b for r in rows], d.b.whole)):
            _stack(bars, y, [(r, v) for r, v in zip(rows, values, strict=True)], whole, d.unit)
    return figure


def _stack(axes: Axes, y: float, parts: Sequence[tuple[_Row, float]], whole: float, unit: str) -> None:
    """One stacked bar with the names that fit inside; negative parts (overlap) shorten nothing and are not drawn."""
    left = 0.0
    for row, value in parts:
        if value <= 0:
            continue
        colour, hatch = row.look
        axes.barh(y, value, left=left, height=0.62, color=colour, hatch=hatch, edgecolor=CARD if not hatch else INK,
                  linewidth=0.6)  # fmt: skip
        _inside(axes, left, value, y, row)
        left += value
    words, where = f"{number(whole)} {unit}", (max(left, whole), y)
    axes.annotate(words, where, xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)


def _inside(axes: Axes, left: float, width: float, y: float, row: _Row) -> None:
    """The part's name in its middle, where it fits and the ground is plain."""
    if row.look[1]:
        return
    text = axes.text(left + width / 2, y, row.name, ha="center", va="center", fontsize=7.5,
                     color="#ffffff" if row.look[0] in DARK else INK)  # fmt: skip
    box = text.get_window_extent()
    ends = axes.transData.transform([(left, 0), (left + width, 0)])
    if box.width > ends[1][0] - ends[0][0] - 6:
        text.remove()


def _waterfall(axes: Axes, d: Difference, rows: Sequence[_Row], names: tuple[str, str]) -> None:
    ordered = sorted((r for r in rows if r.name != NOT_ATTRIBUTED), key=lambda r: -abs(r.a - r.b))
    ordered += [r for r in rows if r.name == NOT_ATTRIBUTED]
    labels = [f"{names[1]} total", *(r.name for r in ordered), f"{names[0]} total"]
    edges = [d.b.whole]
    for r in ordered:
        edges.append(edges[-1] + r.a - r.b)
    low, high = min([*edges, d.a.whole]), max([*edges, d.a.whole])
    margin = max(high - low, 0.02 * high) * 0.16
    start = max(low - margin, 0.0)
    axes.set_xlim(start, high + margin * 1.6)
    telling = abs(d.gap) > CANCELS * sum(abs(r.a - r.b) for r in ordered)
    axes.barh(0, d.b.whole - start, left=start, height=0.6, color=SOFT)
    for i, r in enumerate(ordered, start=1):
        delta = r.a - r.b
        colour, hatch = r.look
        axes.barh(i, delta, left=edges[i - 1], height=0.6, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.5)
        axes.plot([edges[i - 1]] * 2, [i - 0.7, i + 0.3], color=SOFT, lw=0.7)
        share = f" ({delta / d.gap:.0%})" if telling else ""
        axes.annotate(f"{number(delta, '+')}{share}", (max(edges[i - 1], edges[i]), i), xytext=(4, 0), va="center",
                      textcoords="offset points", fontsize=8, color=INK)  # fmt: skip
        axes.add_patch(Rectangle((-0.022, i - 0.28), 0.014, 0.56, transform=axes.get_yaxis_transform(), clip_on=False,
                                 facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.4))  # fmt: skip
    last = len(ordered) + 1
    axes.barh(last, d.a.whole - start, left=start, height=0.6, color=SOFT)
    axes.plot([edges[-1]] * 2, [last - 0.7, last + 0.3], color=SOFT, lw=0.7)
    axes.set_yticks(range(last + 1), labels, fontsize=8.5)
    axes.tick_params(axis="y", pad=12)
    axes.set_ylim(last + 0.6, -0.6)
    shares = ", with each share of it" if telling else "; the parts largely cancel"
    cut = f"; axis starts at {number(start)}" if start else ""
    axes.xaxis.set_major_formatter(FuncFormatter(plots.plain))
    axes.set_xlabel(f"{d.unit}: {names[0]} less {names[1]} = {number(d.gap, '+')}{shares}{cut}", loc="right")


def breakdown(b: Breakdown, title: str = "") -> Figure:
    """One breakdown as bars with its denominator (lab.plots.bars), overlap and idle left to `occupancy`."""
    parts: dict[str, float] = {}
    for p in b.parts:
        if p.value > 0 and p.category not in NO_PART:
            parts[p.category] = parts.get(p.category, 0.0) + p.value
    kernels_only = sum(parts.values())
    idle = any(p.category in NO_PART for p in b.parts)
    total = None if idle else max(b.whole, kernels_only)
    words = "time added up, without idle" if idle else b.denominator
    return plots.bars(parts, words, b.unit, total, title or b.title)
