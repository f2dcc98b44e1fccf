"""Arms beside each other: a row for each workload, on an axis of times relative to the control's.

So workloads of 5 and of 5000 us stand in one figure; the times themselves are written beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from lab.base.errors import BadInput
from lab.draw import style
from lab.draw.sweep import COLOURS

RATIOS = (0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Side:
    """One arm at one workload: its median and interquartile range, us; role: "control", "candidate" or "peer"."""

    name: str
    role: str
    us: float
    iqr_us: float = 0.0


@dataclass(frozen=True)
class Group:
    """The arms of one workload. floor_us: the roofline's, None where it is unknown."""

    workload: str
    sides: Sequence[Side] = field(default=())
    floor_us: float | None = None


@style.styled
def arms(groups: Sequence[Group], title: str) -> Figure:
    """A row for each workload: candidate, rivals and floor relative to the control's time, with the times in us.

    Whiskers are interquartile ranges. A workload without a control's time says "not measured". Raises BadInput without
    a group.
    """
    if not groups:
        raise BadInput("arms plot", "no workload", "give the workloads of a card")
    rivals = list(dict.fromkeys(s.name for g in groups for s in g.sides if s.role == "peer"))
    height = 1.5 + 0.33 * len(groups) + 0.2 * math.ceil(len(rivals) / 4)
    figure, axes = style.blank(height, title, "time over the control's; left is faster")
    axes.set_xscale("log")
    seen = [1.0]
    for y, group in enumerate(groups):
        control = next((s for s in group.sides if s.role == "control"), None)
        if control is None:
            axes.annotate(NOT_MEASURED, (1.0, y), xytext=(6, 0), textcoords="offset points", va="center",
                          color=style.SOFT, fontsize=8.5)  # fmt: skip
            continue
        if group.floor_us is not None:
            seen.append(group.floor_us / control.us)
            axes.plot([group.floor_us / control.us], [y], "|", ms=13, mew=1.6, color=style.INK,
                      label="floor")  # fmt: skip
        for side in sorted(group.sides, key=lambda s: s.role, reverse=True):
            marker, colour, ground, name = _looks(side, rivals)
            ratio, half = side.us / control.us, side.iqr_us / control.us / 2
            seen += [ratio - half, ratio + half]
            axes.errorbar([ratio], [y], xerr=[[half], [half]], fmt=marker, ms=6, color=colour, mfc=ground, lw=1.0,
                          capsize=2, label=name)  # fmt: skip
        candidate = next((s for s in group.sides if s.role == "candidate"), None)
        words = f"{style.number(control.us)} us" + (
            f" to {style.number(candidate.us)} us" if candidate else f", {NOT_MEASURED}"
        )
        style.outside(axes, words, y, 8.5)
    low, high = min(seen) / 1.15, max(seen) * 1.15
    axes.set_xlim(low, high)
    axes.axvline(1.0, color=style.SOFT, lw=0.8)
    ticks = [t for t in RATIOS if low < t < high]
    style.ratios(axes, ticks if len(ticks) > 1 else [low * 1.1, 1.0, high / 1.1], "{:.3g}".format)
    axes.grid(True, axis="x", color=style.GRID, linewidth=0.6)
    style.rows(axes, [g.workload for g in groups], 8.5)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    drawn = {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}  # each name once
    if drawn:
        style.legend(figure, drawn, 4)
    return figure


def _looks(side: Side, rivals: Sequence[str]) -> tuple[str, str, str, str]:
    if side.role == "control":
        return "D", style.SOFT, style.CARD, f"control: {side.name}"
    if side.role == "candidate":
        return "o", style.BLUE, style.BLUE, f"candidate: {side.name}"
    i = rivals.index(side.name)
    turn, colour = divmod(i, len(COLOURS) - 1)  # the next ones have the same colours in turn, with other markers
    marker = (colour + 2 * turn) % (len(style.MARKERS) - 1) + 1
    return style.MARKERS[marker], COLOURS[colour + 1], style.CARD, side.name
