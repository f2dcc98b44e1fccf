"""Figures in one style (`style`), one module for each kind: roofline, plots, waterfall, sweep, timeline, staircase, ...

In: points, breakdowns, differences, sweeps, traces. Out: matplotlib figures that save as SVG or PNG.
Door: `from lab import draw`, then `draw.roofline(device, points)`, `draw.save(figure, path)` and the names below.
"""

from lab.draw.comparison import Group, Side, arms
from lab.draw.plots import bars, breakdown, intervals, levels, lines, rivals, scatter
from lab.draw.roofline import Point, point, roofline
from lab.draw.style import CARD, GREEN, INK, MARKERS, VERMILLION, png, save, svg
from lab.draw.sweep import curves, times
from lab.draw.timeline import timeline
from lab.draw.waterfall import gap

# fmt: off
__all__ = [
    "CARD", "GREEN", "INK", "MARKERS", "VERMILLION", "Group", "Point", "Side", "arms", "bars", "breakdown", "curves",
    "gap", "intervals", "levels", "lines", "png", "point", "rivals", "roofline", "save", "scatter", "svg", "timeline",
    "times",
]
# fmt: on
