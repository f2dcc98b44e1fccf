"""A staircase: what each step of a series brought, towards a peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.draw import style

LOW = 0.07  # of the peer's level
FLAT = 0.34  # half a landing: a step runs from its control, left, to its candidate, right


@dataclass(frozen=True)
class Stairs:
    """A panel: steps as (label, before, after) in `unit`, and the peer's level, which is 100 %."""

    title: str
    axis: str
    unit: str
    peer: float
    steps: Sequence[tuple[str, float, float]]
    peer_name: str = "vLLM"


@style.styled
def staircase(panels: Sequence[Stairs]) -> Figure:
    """Panels one above the other: each level in the unit and in % of the peer, what a step is under it."""
    picture = style.sheet(0.2 + 3.5 * len(panels))
    drawn: Any = picture.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, stairs in zip(drawn, panels, strict=True):
        _stairs(axes, stairs)
    return picture


def _stairs(axes: Axes, stairs: Stairs) -> None:
    top = stairs.peer
    style.clean(axes)
    axes.axhline(top, color=style.ORANGE, lw=1.4, ls="--")
    words = f"{stairs.peer_name} {top:.6g} {stairs.unit}, 100 %"
    axes.annotate(words, (-0.5, top), xytext=(4, 4), textcoords="offset points", fontsize=8.5)
    for x, (_, before, after) in enumerate(stairs.steps):
        axes.fill_between([x, x + FLAT], before, after, color=style.BLUE, alpha=0.14, linewidth=0)
        path = [x - FLAT, x, x, x + FLAT], [before, before, after, after]
        axes.plot(*path, color=style.BLUE, lw=2.0, solid_joinstyle="miter")
        for at, level, side, dy in ((x - FLAT, before, "left", -4), (x + FLAT, after, "right", 4)):
            words = f"{level:.2f}, {100 * level / top:.1f} %"
            ground = {"facecolor": style.CARD, "edgecolor": "none", "pad": 0.4}  # lines end at a number
            place: Any = {"ha": side, "va": "bottom" if dy > 0 else "top", "fontsize": 8.5, "bbox": ground}
            axes.annotate(words, (at, level), xytext=(0, dy), textcoords="offset points", **place)
        gain = f"+{100 * (after / before - 1):.1f} %"
        low = after - before < LOW * top  # no room for a line of text: the gain stands under the two levels
        middle = (x, before if low else (before + after) / 2)
        place = {"va": "top" if low else "center", "color": style.BLUE}
        axes.annotate(gain, middle, xytext=(5, -15 * low), textcoords="offset points", **place)
    for x, (earlier, later) in enumerate(zip(stairs.steps, stairs.steps[1:], strict=False)):
        axes.plot([x + FLAT, x + 1 - FLAT], [earlier[2], later[1]], color=style.SOFT, lw=1.0, ls=":")
    axes.set_xticks(range(len(stairs.steps)), [label for label, _, _ in stairs.steps], fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(stairs.steps) - 0.5)
    axes.set_ylim(0, top * 1.12)
    axes.set_ylabel(stairs.axis)
    style.title(axes, stairs.title)
