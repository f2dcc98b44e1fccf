"""Sweeps: a metric against its axis by arm, with the ratio of two arms underneath; and time a sequence by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.base.errors import BadInput
from lab.card.sweeps import METRICS, Series
from lab.draw import style

COLOURS = (style.BLUE, style.VERMILLION, style.GREEN, style.PURPLE, style.ORANGE, style.INK)
MARKERS, DASHES = ("o", "s", "^", "D", "v", "P"), ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
STEPS_US = [step * 10**power for power in range(-1, 5) for step in (1, 1.5, 2, 3, 4, 5, 6, 8)]
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
        if len({METRICS[s.metric][0] for s in panel}) > 1:
            raise BadInput("sweep plot", f"units differ: {', '.join(s.metric for s in panel)}", "draw them apart")
    figure = style.sheet(0.7 + 2.3 * len(every))
    grid: Any = figure.subplots(len(every), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(grid, every, strict=True):
        axes.set_facecolor(style.CARD)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, which="major", color=style.GRID, linewidth=0.6)
        for i, s in enumerate(panel):
            _curve(axes, i, s.xs, s.ys, s.label)
        if ratios and panel is every[-1]:
            axes.axhline(1.0, color=style.SOFT, lw=0.8)
            axes.set_ylabel("ratio")
            if line is not None:
                axes.axhline(line, color=style.VERMILLION, lw=1.0, ls=":", label=f"gate {line:g}")
        else:
            names = {WORDS.get(s.metric, s.metric) for s in panel}
            axes.set_ylabel(f"{' / '.join(sorted(names))}, {METRICS[panel[0].metric][0]}", fontsize=8.5)
            if zero:
                axes.set_ylim(0, 1.06 * max(y for s in panel for y in s.ys))
        axes.legend(frameon=False, fontsize=8.5, loc="best")
    if log:
        grid[-1].set_xscale("log", base=2)
    style.plain_ticks(grid[-1].xaxis)
    grid[-1].set_xlabel(AXES.get(every[0][0].axis, every[0][0].axis))
    style.title(grid[0], title)
    return figure


def _curve(axes: Axes, i: int, xs: Sequence[float], ys: Sequence[float], label: str) -> None:
    axes.plot(xs, ys, color=COLOURS[i], marker=MARKERS[i], ls=DASHES[i], ms=4, lw=1.3, mfc=style.CARD, label=label)


@style.styled
def batch_curves(curves: Mapping[str, Sequence[tuple[int, float]]], title: str, marks: Sequence[int] = ()) -> Figure:
    """Time per sequence in us against the sequences of a batch, a curve an arm, both axes logarithmic.

    curves: arm -> (sequences, us per sequence) in any order. marks: batches after which a step would be a wave.
    Raises BadInput for no curve, an empty one, more than six, and a value that is not positive.
    """
    if not curves or len(curves) > len(COLOURS) or not all(curves.values()):
        raise BadInput("batch plot", f"{len(curves)} curves, or one without a point", "give one to six curves")
    if any(n < 1 or not us > 0 for points in curves.values() for n, us in points):
        raise BadInput("batch plot", "a batch below 1 or a time that is not positive", "pass rows that are ok")
    figure, axes = style.blank(3.6)
    for i, (name, points) in enumerate(curves.items()):
        xs, ys = zip(*sorted(points), strict=True)
        _curve(axes, i, xs, ys, name)
    for mark in marks:
        axes.axvline(mark, color=style.SOFT, lw=0.8, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    every = [us for points in curves.values() for _, us in points]
    axes.set_yticks([t for t in STEPS_US if min(every) / 1.3 < t < 1.3 * max(every)])
    style.plain_ticks(axes.xaxis, axes.yaxis)
    axes.minorticks_off()
    axes.set(xlabel="sequences", ylabel="us a sequence")
    style.title(axes, title)
    axes.legend(frameon=False, fontsize=8.5, loc="best")
    return figure
