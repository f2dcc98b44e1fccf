"""Four plain kinds: lines in panels, points against a time, levels as bars, and a grid of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab.base.errors import BadInput
from lab.draw import style
from lab.draw.sweep import DASHES, MARKERS

Points = Sequence[tuple[float, float]]


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
            i = names.index(name)
            marker = MARKERS[i % len(MARKERS)] if markers else ""
            (handles[name],) = axes.plot(
                *zip(*sorted(points), strict=True), color=style.CYCLE[i % len(style.CYCLE)], lw=1.3, mfc=style.CARD,
                ls=DASHES[i % len(DASHES)], marker=marker, ms=3.5,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log")
        style.plain_ticks(axes.xaxis, axes.yaxis)
        axes.minorticks_off()
        axes.set_title(heading, loc="left", fontsize=9, color=style.INK)
    for axes in drawn.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in drawn.flat[len(panels) - columns : len(panels)]:
        axes.set_xlabel(xlabel)
    for axes in drawn[:, 0]:
        axes.set_ylabel(ylabel)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=style.INK)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


@style.styled
def scatter(
    series: Mapping[str, Points], title: str, xlabel: str, ylabel: str, limits: Sequence[Points] = (), log: str = "x"
) -> Figure:
    """Points; limits: dashed lines; log: the axes that are logarithmic, of "x" and "y".

    Raises BadInput without a point.
    """
    if not any(series.values()):
        raise BadInput("scatter plot", "no point", "pass rows that are ok")
    figure, axes = style.blank(3.4)
    for i, (name, points) in enumerate(series.items()):
        if points:
            axes.plot(*zip(*points, strict=True), ls="", marker=MARKERS[i], ms=4.5, color=style.CYCLE[i], alpha=0.75,
                      label=f"{name} ({len(points)})")  # fmt: skip
    for line in limits:
        axes.plot(*zip(*line, strict=True), color=style.VERMILLION, lw=1.0, ls=(0, (5, 3)))
    for name in log:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        style.plain_ticks(axes.xaxis if name == "x" else axes.yaxis)
    axes.minorticks_off()
    axes.grid(True, color=style.GRID, linewidth=0.6)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    style.title(axes, title)
    axes.legend(frameon=False, fontsize=8.5, loc="best")
    return figure


@style.styled
def levels(rows: Sequence[tuple[str, float, str]], title: str, xlabel: str, line: float | None = None) -> Figure:
    """(label, value, words beside it) as bars from zero; line: an upright one, 100 % say. Raises BadInput for none."""
    if not rows:
        raise BadInput("levels plot", "nothing to draw", "pass at least one row")
    figure, axes = style.blank(0.9 + 0.27 * len(rows))
    for y, (_, value, words) in enumerate(rows):
        axes.barh(y, value, height=0.62, color=style.BLUE)
        axes.annotate(words, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8,
                      annotation_clip=False)  # fmt: skip
    if line is not None:
        axes.axvline(line, color=style.INK, lw=1.0, ls="--")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8.5)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.05 * max([*(value for _, value, _ in rows), line or 0.0]))
    axes.set_xlabel(xlabel)
    style.title(axes, title)
    return figure


@style.styled
def grid(
    cells: Mapping[str, Mapping[str, float]], title: str, colour: Callable[[float], str], shown: str = ".1e"
) -> Figure:
    """Numbers in rows and columns, each on a tint of its colour: row -> column -> value. Raises BadInput when empty.

    Heads of columns are broken at every space, so that neighbours do not run into each other.
    """
    heads = list(dict.fromkeys(column for row in cells.values() for column in row))
    if not heads:
        raise BadInput("grid plot", "no cell", "pass rows of numbers")
    figure, axes = style.blank(1.1 + 0.34 * len(cells))
    for y, row in enumerate(cells.values()):
        for x, head in enumerate(heads):
            if head in row:
                axes.add_patch(Rectangle((x, y), 0.94, 0.9, facecolor=(colour(row[head]), 0.28), lw=0))
                axes.text(x + 0.47, y + 0.45, format(row[head], shown), ha="center", va="center", fontsize=7.5)
    axes.spines[:].set_visible(False)
    axes.set(xlim=(0, len(heads)), ylim=(len(cells), 0))
    axes.set_xticks([x + 0.47 for x in range(len(heads))], [h.replace(" ", "\n") for h in heads], fontsize=7.5)
    axes.set_yticks([y + 0.45 for y in range(len(cells))], list(cells), fontsize=8.5)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=style.INK)
    return figure
