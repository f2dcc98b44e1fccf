"""How many times as fast as its fastest rival each kernel is: a line a question, a point a workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lab.base.errors import BadInput
from lab.draw import style

TICKS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8)
SAME = 0.02  # a point within 2 % of its rival's time is neither a win nor a miss


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
    axes.set_xlim(min(0.9, min(every)) / 1.05, max(every) * 1.12)
    axes.xaxis.set_major_locator(FixedLocator([t for t in TICKS if axes.get_xlim()[0] < t < axes.get_xlim()[1]]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(lines)), [f"{label}\n{names}" for label, names, _ in lines], fontsize=8.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", color=style.GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("fastest rival's time over ours", fontsize=8.5)
    picture.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False, fontsize=8.5)
    picture.suptitle(title, x=0.01, ha="left", fontsize=10, color=style.INK)
    return picture
