"""The gap between two breakdowns: two stacked bars, and the waterfall of the differences between them.

The waterfall starts at B's total, adds the categories' differences in the order of their size and arrives at A's total;
what no category explains is a hatched row of its own. Its rows are the legend: colour and hatch beside the name.
Categories too small to see are joined, and the row says how many. Where the differences largely cancel, shares of so
small a gap are left out: they would be hundreds of per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab.base.errors import BadInput
from lab.draw import style
from lab.trace.breakdowns import NO_PART, NOT_ATTRIBUTED
from lab.trace.diff import Difference

CANCELS = 0.1  # a gap below this part of the summed differences gets no shares
BESIDE = 1.34  # times the longest bar: room for its total where long names leave the bars little of the width
LONGEST = 41  # letters of a name
SMALL = 0.015  # of the larger total: categories with less, on both sides, are joined
DARK = (style.BLUE, style.GREEN, style.VERMILLION)  # grounds that take white letters
REST: style.Look = (style.CARD, "\\\\\\\\")


@dataclass(frozen=True)
class _Row:
    """A category: the values of A and B, and how it looks."""

    name: str
    a: float
    b: float
    look: style.Look


def _rows(d: Difference) -> list[_Row]:
    """Categories large enough to see, then the joined small ones, idle and overlap, and what is not attributed."""
    larger = max(d.a.whole, d.b.whole)
    parts = [x for x in d.lines if x.name not in NO_PART]
    shown = [x for x in parts if max(abs(x.a), abs(x.b)) >= SMALL * larger]
    small = [x for x in parts if x not in shown]
    shown.sort(key=lambda x: -max(x.a, x.b))
    if len(small) == 1:
        shown, small = [*shown, *small], []
    # The source's own words where both sides use the same, else the category.
    names = [_fit(x.labels[0] if x.labels[0] and x.labels[0] == x.labels[1] else x.name) for x in shown]
    rows = [_Row(name, x.a, x.b, style.look(i)) for i, (name, x) in enumerate(zip(names, shown, strict=True))]
    if small:
        joined = sum(x.a for x in small), sum(x.b for x in small)
        rows.append(_Row(f"{len(small)} smaller ones", *joined, (style.SOFT, "")))
    rows += [_Row(x.name.removeprefix("gpu_"), x.a, x.b, style.IDLE_LOOK) for x in d.lines if x.name in NO_PART]
    rest = d.a.not_attributed, d.b.not_attributed
    return rows + ([_Row(NOT_ATTRIBUTED, *rest, REST)] if max(map(abs, rest)) > 1e-6 * larger else [])


def _fit(name: str) -> str:
    """A name that leaves room for bars: both ends of a longer one, as a template's instance has."""
    half = (LONGEST - 1) // 2
    return name if len(name) <= LONGEST else f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"


@style.styled
def gap(d: Difference, names: tuple[str, str] = ("A", "B"), title: str = "") -> Figure:
    """Two stacked bars, called `names`, and the waterfall of the gap between them; BadInput unless both > 0."""
    if min(d.a.whole, d.b.whole) <= 0:
        raise BadInput("gap picture", f"totals {d.a.whole:g} and {d.b.whole:g} {d.unit}", "both must be above zero")
    rows = _rows(d)
    figure = style.sheet(2.35 + 0.26 * len(rows))
    bars, falls = figure.subplots(2, 1, height_ratios=[1.25, 0.26 * len(rows) + 0.75])
    for axes in (bars, falls):
        style.clean(axes, left=False)
        axes.tick_params(axis="y", length=0)
    sides = ([r.a for r in rows], d.a.whole), ([r.b for r in rows], d.b.whole)
    bars.set_xlim(0, max(max(sum(max(v, 0) for v in values), whole) for values, whole in sides) * BESIDE)
    bars.set_ylim(1.5, -0.5)
    bars.set_yticks([0, 1], list(names))
    style.plain_ticks(bars.xaxis)
    bars.set_xlabel(f"{d.unit}; whole = {d.a.denominator}")
    # Over the figure: above the bars it would begin behind the longest kernel's name, and end outside.
    heading = title or f"{names[0]} against {names[1]}, {d.unit}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=10, color=style.INK)
    _waterfall(falls, d, rows, names)
    figure.draw_without_rendering()  # fixes the layout, so that text can be measured against its part
    figure.set_layout_engine("none")
    for y, (values, whole) in enumerate(sides):
        _stack(bars, y, list(zip(rows, values, strict=True)), whole, d.unit)
    return figure


def _stack(axes: Axes, y: float, parts: Sequence[tuple[_Row, float]], whole: float, unit: str) -> None:
    """One stacked bar with the names that fit inside; negative parts (overlap) shorten nothing and are not drawn."""
    left = 0.0
    for row, value in parts:
        if value <= 0:
            continue
        colour, hatch = row.look
        edge = style.INK if hatch else style.CARD
        axes.barh(y, value, left=left, height=0.62, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.6)
        if not hatch:
            ink = style.CARD if colour in DARK else style.INK
            text = axes.text(left + value / 2, y, row.name, ha="center", va="center", fontsize=7.5, color=ink)
            ends = axes.transData.transform([(left, 0), (left + value, 0)])
            if text.get_window_extent().width > ends[1][0] - ends[0][0] - 6:
                text.remove()
        left += value
    style.beside(axes, f"{style.number(whole)} {unit}", (max(left, whole), y))


def _waterfall(axes: Axes, d: Difference, rows: Sequence[_Row], names: tuple[str, str]) -> None:
    ordered = sorted((r for r in rows if r.name != NOT_ATTRIBUTED), key=lambda r: -abs(r.a - r.b))
    ordered += [r for r in rows if r.name == NOT_ATTRIBUTED]
    edges = [d.b.whole]
    for r in ordered:
        edges.append(edges[-1] + r.a - r.b)
    low, high = min([*edges, d.a.whole]), max([*edges, d.a.whole])
    margin = max(high - low, 0.02 * high) * 0.16
    start = max(low - margin, 0.0)
    axes.set_xlim(start, high + margin * 2)
    telling = abs(d.gap) > CANCELS * sum(abs(r.a - r.b) for r in ordered)
    axes.barh(0, d.b.whole - start, left=start, height=0.6, color=style.SOFT)
    for i, r in enumerate(ordered, start=1):
        delta = r.a - r.b
        axes.barh(i, delta, left=edges[i - 1], height=0.6, color=r.look[0], hatch=r.look[1], edgecolor=style.INK,
                  linewidth=0.5)  # fmt: skip
        axes.plot([edges[i - 1]] * 2, [i - 0.7, i + 0.3], color=style.SOFT, lw=0.7)
        share = f" ({delta / d.gap:.0%})" if telling else ""
        style.beside(axes, f"{style.number(delta, '+')}{share}", (max(edges[i - 1], edges[i]), i), size=8)
        axes.add_patch(Rectangle((-0.022, i - 0.28), 0.014, 0.56, transform=axes.get_yaxis_transform(), clip_on=False,
                                 facecolor=r.look[0], hatch=r.look[1], edgecolor=style.INK, linewidth=0.4))  # fmt: skip
    last = len(ordered) + 1
    axes.barh(last, d.a.whole - start, left=start, height=0.6, color=style.SOFT)
    axes.plot([edges[-1]] * 2, [last - 0.7, last + 0.3], color=style.SOFT, lw=0.7)
    labels = [f"{names[1]} total", *(r.name for r in ordered), f"{names[0]} total"]
    axes.set_yticks(range(last + 1), labels, fontsize=8.5)
    axes.tick_params(axis="y", pad=12)
    axes.set_ylim(last + 0.6, -0.6)
    shares = ", with each share of it" if telling else "; the parts largely cancel"
    cut = f"; axis starts at {style.number(start)}" if start else ""
    style.plain_ticks(axes.xaxis)
    axes.set_xlabel(f"{d.unit}: {names[0]} less {names[1]} = {style.number(d.gap, '+')}{shares}{cut}", loc="right")
