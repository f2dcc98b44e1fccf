"""A breakdown as horizontal bars with its denominator."""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.figure import Figure

from lab.base.errors import BadInput
from lab.draw import style
from lab.trace.breakdowns import NO_PART, NOT_ATTRIBUTED, Breakdown


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
    figure, axes = style.blank(0.9 + 0.34 * len(rows))
    for i, (name, value) in enumerate(rows):
        own = name != NOT_ATTRIBUTED
        axes.barh(i, value, height=0.66, color=style.BLUE if own else style.CARD, hatch="" if own else "////",
                  edgecolor=style.BLUE if own else style.SOFT, linewidth=0.8)  # fmt: skip
        style.beside(axes, f"{value:,.4g} {unit} ({value / whole:.1%})", (value, i), 5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, max(value for _, value in rows) * 1.32)
    axes.set_xlabel(f"{unit}; 100 % = {denominator}, {whole:,.5g} {unit}")
    style.title(axes, title or denominator)
    return figure
