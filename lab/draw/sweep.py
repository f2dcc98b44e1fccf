"""Sweeps: a metric against its axis by arm, with the ratio of two arms underneath; and times over a shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from lab.base.errors import BadInput
from lab.card.sweeps import METRICS, Series
from lab.draw import style

COLOURS = (style.BLUE, style.VERMILLION, style.GREEN, style.PURPLE, style.ORANGE, style.INK)
AXES = {
    "context": "tokens in the cache",
    "depth": "tokens in the cache before the prompt",
    "n_kv": "tokens in the cache before the prompt",
    "allocated": "allocated context, tokens",
    "npl": "sequences at once",
    "draft_max": "tokens drafted per step at most",
}
WORDS = {
    "prefill_tps": "prefill",
    "decode_tps": "generation",
    "decode_steady_tps": "generation after the first token",
    "aggregate_tps": "served tokens, all kinds",
    "accept_len": "accepted length",
}


@style.styled
def curves(
    panels: Sequence[Sequence[Series]],
    title: str,
    ratios: Sequence[Series] = (),
    log: bool = False,
    zero: bool = True,
    line: float | None = None,
) -> Figure:
    """Panels above each other that share the axis; curves of a panel share their unit.

    ratios: curves of a last panel, drawn against 1. line: a level line in that panel (a gate), e.g. 0.97.
    log: a logarithmic axis (base 2). zero: let the panels begin at zero, so that heights compare.
    Raises BadInput for no panel, an empty panel, more than six curves in one, and units or axes that differ.
    """
    every = [*panels, *([ratios] if ratios else [])]
    if not panels or not all(panels):
        raise BadInput("sweep plot", f"{len(panels)} panels, or one without a curve", "give each panel a curve")
    if max(len(panel) for panel in every) > len(COLOURS):
        raise BadInput("sweep plot", "more than six curves in a panel", "split it")
    if len({s.axis for panel in every for s in panel}) > 1:
        raise BadInput("sweep plot", "curves over different axes", "draw them apart")
    for panel in panels:
        if len({METRICS[s.metric] for s in panel}) > 1:
            raise BadInput("sweep plot", f"units differ: {', '.join(s.metric for s in panel)}", "draw them apart")
    figure = style.sheet(0.7 + 2.3 * len(every))
    grid: Any = figure.subplots(len(every), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(grid, every, strict=True):
        style.clean(axes, grid="both")
        for i, s in enumerate(panel):
            look: Any = {"color": COLOURS[i], "marker": style.MARKERS[i], "ls": style.DASHES[i]}
            axes.plot(s.xs, s.ys, **look, ms=4, lw=1.3, mfc=style.CARD, label=s.label)
        if ratios and panel is every[-1]:
            axes.axhline(1.0, color=style.SOFT, lw=0.8)
            axes.set_ylabel("ratio")
            if line is not None:
                axes.axhline(line, color=style.VERMILLION, lw=1.0, ls=":", label=f"gate {line:g}")
        else:
            names = {WORDS.get(s.metric, s.metric) for s in panel}
            axes.set_ylabel(f"{' / '.join(sorted(names))}, {METRICS[panel[0].metric]}", fontsize=8.5)
            if zero:
                axes.set_ylim(0, 1.06 * max(y for s in panel for y in s.ys))
        axes.legend(frameon=False, fontsize=8.5, loc="best")
    if log:
        grid[-1].set_xscale("log", base=2)
    style.plain_ticks(grid[-1].xaxis)
    grid[-1].set_xlabel(AXES.get(every[0][0].axis, every[0][0].axis))
    style.title(grid[0], title)
    return figure


@style.styled
def times(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    title: str,
    axis: str = "sequences",
    label: str = "us a sequence",
    marks: Sequence[int] = (),
    floor: Sequence[tuple[int, float]] = (),
) -> Figure:
    """Time against an axis of shapes, a curve a kernel, both axes logarithmic; the floor is dashed.

    curves: kernel -> (value, us) in any order. marks: values after which a step would be a wave.
    Raises BadInput for nothing to draw, an empty curve, more than seven of them, and a value that is not positive.
    """
    every = [*curves.values(), *([floor] if floor else [])]
    if not every or len(curves) > len(style.CYCLE) or not all(every):
        raise BadInput("times plot", f"{len(curves)} curves, or one without a point", "give one to seven curves")
    if any(n < 1 or not us > 0 for points in every for n, us in points):
        raise BadInput("times plot", "a value below 1 or a time that is not positive", "pass rows that are ok")
    figure, axes = style.blank(3.6 + 0.18 * math.ceil(len(every) / 3), title, axis, label)
    for i, (name, points) in enumerate(curves.items()):
        style.curve(axes, i, points, name)
    if floor:
        axes.plot(*zip(*sorted(floor), strict=True), color=style.INK, lw=1.0, ls=(0, (6, 3)), label="floor")
    for mark in marks:
        axes.axvline(mark, color=style.SOFT, lw=0.8, ls=":")
    style.logarithmic(axes, base=2)
    axes.grid(True, color=style.GRID, linewidth=0.6)
    handles, names = axes.get_legend_handles_labels()
    style.legend(figure, dict(zip(names, handles, strict=True)), 3)
    return figure
