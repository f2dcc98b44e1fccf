"""Pictures of sweeps: a metric against its axis by arm, with the ratio of two arms underneath.

The same light card, colours and rules as lab.plots (an SVG with its text as text; colour never alone: each curve has
its own marker and dash, and its name stands at its end or in the legend).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from lab.base.errors import BadInput
from lab.card.sweeps import METRICS, Series
from lab.draw import plots

COLOURS = (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.PURPLE, plots.ORANGE, plots.INK)
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
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH_IN, 0.7 + 2.3 * len(every)), facecolor=plots.CARD, layout="constrained")
        FigureCanvasAgg(figure)
        grid: Any = figure.subplots(len(every), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(grid, every, strict=True):
            is_ratio = bool(ratios) and panel is every[-1]
            _panel(axes, panel, is_ratio, zero)
            if is_ratio and line is not None:
                axes.axhline(line, color=plots.VERMILLION, lw=1.0, ls=":", label=f"gate {line:g}")
            axes.legend(frameon=False, fontsize=8.5, loc="best")
        if log:
            grid[-1].set_xscale("log", base=2)
        grid[-1].xaxis.set_major_formatter(FuncFormatter(plots.plain))
        grid[-1].set_xlabel(AXES.get(every[0][0].axis, every[0][0].axis))
        grid[0].set_title(title, loc="left", fontsize=10, color=plots.INK)
    return figure


def batch_curves(curves: Mapping[str, Sequence[tuple[int, float]]], title: str, marks: Sequence[int] = ()) -> Figure:
    """Time per sequence in us against the sequences of a batch, a curve an arm, both axes logarithmic.

    curves: arm -> (sequences, us per sequence) in any order. marks: batches after which a step would be a wave.
    Raises BadInput for no curve, an empty one, more than six, and a value that is not positive.
    """
    if not curves or len(curves) > len(COLOURS) or not all(curves.values()):
        raise BadInput("batch plot", f"{len(curves)} curves, or one without a point", "give one to six curves")
    if any(n < 1 or not us > 0 for points in curves.values() for n, us in points):
        raise BadInput("batch plot", "a batch below 1 or a time that is not positive", "pass rows that are ok")
    with matplotlib.rc_context(plots.STYLE):
        figure, axes = plots.blank(3.6)
        for i, (name, points) in enumerate(curves.items()):
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(
                xs, ys, color=COLOURS[i], marker=MARKERS[i], ls=DASHES[i], ms=4, lw=1.3, mfc=plots.CARD, label=name
            )
        for mark in marks:
            axes.axvline(mark, color=plots.SOFT, lw=0.8, ls=":")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        every = [us for points in curves.values() for _, us in points]
        axes.set_yticks([t for t in STEPS_US if min(every) / 1.3 < t < 1.3 * max(every)])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(plots.plain))
        axes.minorticks_off()
        axes.set(xlabel="sequences", ylabel="us a sequence")
        axes.set_title(title, loc="left", fontsize=10, color=plots.INK)
        axes.legend(frameon=False, fontsize=8.5, loc="best")
    return figure


def _panel(axes: Axes, panel: Sequence[Series], is_ratio: bool, zero: bool) -> None:
    axes.set_facecolor(plots.CARD)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#e8e8e8", linewidth=0.6)
    for i, s in enumerate(panel):
        axes.plot(
            s.xs, s.ys, color=COLOURS[i], marker=MARKERS[i], ls=DASHES[i], ms=4, lw=1.3, mfc=plots.CARD, label=s.label
        )  # fmt: skip
    if is_ratio:
        axes.axhline(1.0, color=plots.SOFT, lw=0.8)
        axes.set_ylabel("ratio")
        return
    names = {WORDS.get(s.metric, s.metric) for s in panel}
    axes.set_ylabel(f"{' / '.join(sorted(names))}, {METRICS[panel[0].metric][0]}", fontsize=8.5)
    if zero:
        axes.set_ylim(0, 1.06 * max(y for s in panel for y in s.ys))
