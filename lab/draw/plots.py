"""Plain kinds: lines in panels, points against a time, levels and breakdowns as bars, ratios to rivals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from lab.base.errors import BadInput
from lab.draw import style
from lab.trace.breakdowns import NO_PART, NOT_ATTRIBUTED, Breakdown

Points = Sequence[tuple[float, float]]
RATIOS = (0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8)
SAME = 0.02  # a point within 2 % of its rival's time is neither a win nor a miss


@style.styled
def lines(
    panels: Mapping[str, Mapping[str, Points]], title: str, xlabel: str, ylabel: str, markers: bool = True
) -> Figure:
    """Small panels beside each other, two axes shared, both logarithmic: panel -> line -> points.

    A line of the same name looks the same in every panel. Raises BadInput for no panel or a value that is not positive.
    """
    every = [value for panel in panels.values() for points in panel.values() for point in points for value in point]
    if not every or min(every) <= 0:
        raise BadInput("lines plot", f"{len(panels)} panels", "give points above zero")
    columns = min(len(panels), 3) if len(panels) != 4 else 2
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    rows = math.ceil(len(panels) / columns)
    figure = style.sheet(0.7 + (5.2 / columns) * rows + 0.17 * math.ceil(len(names) / 3))
    drawn = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, (heading, panel) in zip(drawn.flat, panels.items(), strict=False):
        style.clean(axes, grid="both")
        for name, points in panel.items():
            handles[name] = style.curve(axes, names.index(name), points, name, markers, ms=3.5)
        style.logarithmic(axes)
        axes.set_title(heading, loc="left", fontsize=9, color=style.INK)
    for axes in drawn.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in drawn.flat[len(panels) - columns : len(panels)]:
        axes.set_xlabel(xlabel)
    for axes in drawn[:, 0]:
        axes.set_ylabel(ylabel)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=style.INK)
    style.legend(figure, handles, 3)
    return figure


@style.styled
def scatter(
    series: Mapping[str, Points], title: str, xlabel: str, ylabel: str, limits: Sequence[Points] = (), log: str = "x"
) -> Figure:
    """Points; limits: dashed lines; log: the logarithmic axes, of "x" and "y". Raises BadInput without a point."""
    if not any(series.values()):
        raise BadInput("scatter plot", "no point", "pass rows that are ok")
    figure, axes = style.blank(3.4, title, xlabel, ylabel)
    for i, (name, points) in enumerate(series.items()):
        if points:
            look: Any = {"ls": "", "marker": style.MARKERS[i], "ms": 4.5, "color": style.CYCLE[i], "alpha": 0.75}
            axes.plot(*zip(*points, strict=True), **look, label=f"{name} ({len(points)})")
    for line in limits:
        axes.plot(*zip(*line, strict=True), color=style.VERMILLION, lw=1.0, ls=(0, (5, 3)))
    style.logarithmic(axes, log)
    axes.grid(True, color=style.GRID, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8.5, loc="best")
    return figure


@style.styled
def levels(rows: Sequence[tuple[str, float, str]], title: str, xlabel: str, line: float | None = None) -> Figure:
    """(label, value, words beside it) as bars from zero; line: an upright one, 100 % say. Raises BadInput for none."""
    if not rows:
        raise BadInput("levels plot", "nothing to draw", "pass at least one row")
    figure, axes = style.blank(0.9 + 0.27 * len(rows), title, xlabel)
    for y, (_, value, words) in enumerate(rows):
        axes.barh(y, value, height=0.62, color=style.BLUE)
        style.outside(axes, words, y, 8)
    if line is not None:
        axes.axvline(line, color=style.INK, lw=1.0, ls="--")
    style.rows(axes, [label for label, _, _ in rows], 8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * max([*(value for _, value, _ in rows), line or 0.0]))
    return figure


@style.styled
def intervals(rows: Sequence[tuple[str, tuple[float, float, float], float | None]], title: str, xlabel: str) -> Figure:
    """(label, (low, expected, high), measured or None), one a row, beside an upright line at zero.

    A measured value is a dot, a hollow square where it lies outside. Raises BadInput for no row.
    """
    if not rows:
        raise BadInput("intervals plot", "nothing to draw", "pass at least one row")
    figure, axes = style.blank(0.9 + 0.2 * len(rows), title, xlabel)
    for y, (_, (low, expected, high), measured) in enumerate(rows):
        axes.barh(y, high - low, left=low, height=0.5, color=style.SKY)
        axes.plot([expected, expected], [y - 0.3, y + 0.3], color=style.BLUE, lw=1.4)
        if measured is not None:
            outside = not low <= measured <= high
            face, marker = (style.CARD, "s") if outside else (style.INK, "o")
            axes.plot(measured, y, marker, ms=4.5, color=style.VERMILLION if outside else style.INK, mfc=face)
    axes.axvline(0, color=style.INK, lw=0.8)
    style.rows(axes, [label for label, _, _ in rows], 7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    return figure


def breakdown(b: Breakdown, title: str = "") -> Figure:
    """A breakdown's categories; overlap and idle time are left to `timeline.occupancy`."""
    parts: dict[str, float] = {}
    for p in b.parts:
        if p.value > 0 and p.category not in NO_PART:
            parts[p.category] = parts.get(p.category, 0.0) + p.value
    idle = any(p.category in NO_PART for p in b.parts)
    words = "time added up, without idle" if idle else b.denominator
    return bars(parts, words, b.unit, None if idle else max(b.whole, sum(parts.values())), title or b.title)


@style.styled
def bars(
    parts: Mapping[str, float], denominator: str, unit: str, total: float | None = None, title: str = ""
) -> Figure:
    """Parts as bars, largest first, each with its value and its share of the denominator.

    denominator: what 100 % is, in words ("GPU time of one decode step"); it stands in the axis label with its value.
    total:       the denominator in `unit`, None for the sum of the parts. What the parts leave of it is drawn hatched,
                 "not attributed", because a breakdown that hides its rest reads as complete.
    Raises BadInput for no parts, a negative or non-finite part, no denominator, and parts that exceed the total by more
    than 0.5 %.
    """
    if not parts or not denominator.strip() or not unit.strip():
        raise BadInput("bars", f"{len(parts)} parts of {denominator!r} in {unit!r}", "give parts, denominator and unit")
    for name, value in parts.items():
        if not (0 <= value < math.inf):
            raise BadInput("bars", f"{name} = {value:g} {unit}", "a part is zero or more")
    whole = sum(parts.values()) if total is None else total
    if whole <= 0 or sum(parts.values()) > whole * 1.005:
        raise BadInput("bars", f"parts sum to {sum(parts.values()):g} of {whole:g} {unit}", "check for nested parts")
    rows = sorted(parts.items(), key=lambda item: -item[1])
    rest = whole - sum(parts.values())
    if rest > 0.005 * whole:
        rows.append((NOT_ATTRIBUTED, rest))
    said = f"{unit}; 100 % = {denominator}, {whole:,.5g} {unit}"
    figure, axes = style.blank(0.9 + 0.34 * len(rows), title or denominator, said)
    for i, (name, value) in enumerate(rows):
        own = name != NOT_ATTRIBUTED
        axes.barh(i, value, height=0.66, color=style.BLUE if own else style.CARD, hatch="" if own else "////",
                  edgecolor=style.BLUE if own else style.SOFT, linewidth=0.8)  # fmt: skip
        style.beside(axes, f"{style.number(value)} {unit} ({value / whole:.1%})", (value, i), 5)
    style.rows(axes, [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, max(value for _, value in rows) * 1.32)
    return figure


@style.styled
def rivals(lines: Sequence[tuple[str, str, Sequence[float]]], title: str) -> Figure:
    """(label, names of the rivals, the rival's time over ours by workload), top to bottom; the axis is logarithmic.

    Raises BadInput without a point.
    """
    if not any(ratios for _, _, ratios in lines):
        raise BadInput("rivals", "no workload has a row of ours and one of a rival", "measure with `--peers`")
    picture, axes = style.blank(1.0 + 0.5 * len(lines))
    axes.axvspan(1 - SAME, 1 + SAME, color=style.SOFT, alpha=0.18, linewidth=0)
    axes.axvline(1, color=style.SOFT, linewidth=0.8)
    kinds = (
        ("faster", style.BLUE, "o", lambda r: r > 1 + SAME),
        ("within 2 %", style.SOFT, "s", lambda r: abs(r - 1) <= SAME),
        ("slower", style.VERMILLION, "D", lambda r: r < 1 - SAME),
    )
    for label, colour, marker, belongs in kinds:
        # Neighbours at three heights, so that points of one ratio are seen one by one.
        spread = ((r, y + 0.17 * (i % 3 - 1)) for y, (_, _, rs) in enumerate(lines) for i, r in enumerate(sorted(rs)))
        at = [(ratio, y) for ratio, y in spread if belongs(ratio)]
        name = f"{label} ({len(at)})"
        look: Any = {"ls": "", "marker": marker, "color": colour, "ms": 5, "alpha": 0.8, "label": name}
        axes.plot([x for x, _ in at], [y for _, y in at], **look)
    axes.set_xscale("log")
    every = [ratio for _, _, ratios in lines for ratio in ratios]
    axes.set_xlim(min(0.9, min(every)) / 1.05, max(1, *every) * 1.12)
    low, high = axes.get_xlim()
    style.ratios(axes, [t for t in RATIOS if low < t < high], "{:g}x".format)
    style.rows(axes, [f"{label}\n{names}" for label, names, _ in lines], 8.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    style.clean(axes, grid="x")
    axes.set_xlabel("fastest rival's time over ours", fontsize=8.5)
    picture.legend(*axes.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False, fontsize=8.5)
    picture.suptitle(title, x=0.01, ha="left", fontsize=10, color=style.INK)
    return picture
