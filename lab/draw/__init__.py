"""Figures in one style (`style`), one module for each kind: roofline, plots, waterfall, sweep, timeline, staircase, ...

In: points, breakdowns, differences, sweeps, traces. Out: matplotlib figures that save as SVG or PNG.
Door: `from lab import draw`, then `draw.roofline(device, points)`, `draw.save(figure, path)` and the names below.
"""

from lab.draw.comparison import Group, Side, arms
from lab.draw.plots import bars, breakdown, levels, lines, rivals, scatter
from lab.draw.roofline import Point, point, roofline
from lab.draw.style import (
    BLUE,
    CARD,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SOFT,
    STYLE,
    VERMILLION,
    WIDTH_IN,
    plain,
    png,
    save,
    svg,
)
from lab.draw.sweep import COLOURS, DASHES, MARKERS, curves, times
from lab.draw.timeline import timeline
from lab.draw.waterfall import gap

# fmt: off
__all__ = [
    "BLUE", "CARD", "COLOURS", "DASHES", "GREEN", "INK", "MARKERS", "ORANGE", "PURPLE", "SOFT", "STYLE",
    "VERMILLION", "WIDTH_IN", "Group", "Point", "Side", "arms", "bars", "breakdown",
    "curves", "gap", "levels", "lines", "plain", "png", "point",
    "rivals", "roofline", "save", "scatter", "svg", "timeline", "times",
]
# fmt: on
