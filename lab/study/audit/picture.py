"""One picture of the audit: what a change was over whole captures, and what it is per launch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lab import draw
from lab.base.errors import BadInput
from lab.study.audit.subject import FLOOR_PCT, Subject, effect


def launch_changes(subjects: Iterable[Subject]) -> list[tuple[str, float, float]]:
    """(title, change of the sum, change per launch) in % for each subject that has both arms and both counts."""
    rows = []
    for subject in subjects:
        before, after = subject.one("control_launches"), subject.one("candidate_launches")
        change = effect(subject)[0]
        if before is not None and after is not None and after.value > 0 and not math.isnan(change):
            rows.append((subject.title, change, 100.0 * ((1.0 + change / 100.0) * before.value / after.value - 1.0)))
    return rows


def launches(subjects: Iterable[Subject], strip: str = "") -> Figure:
    """Each subject as a line from its summed change to its change per launch, the noise floor shaded.

    strip: words at the start of every title that the picture need not repeat. Raises BadInput without subjects.
    """
    rows = launch_changes(subjects)
    if not rows:
        raise BadInput("launches", "no subject has both arms and both launch counts", "give those of launch-drift")
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(draw.WIDTH_IN, 0.9 + 0.27 * len(rows)), facecolor=draw.CARD)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.36, 0.19, 0.61, 0.68), facecolor=draw.CARD)
        axes.axvspan(-FLOOR_PCT, FLOOR_PCT, color=draw.SOFT, alpha=0.18, linewidth=0)
        axes.axvline(0.0, color=draw.SOFT, linewidth=0.8)
        for y, (_, raw, each) in enumerate(rows):
            axes.plot([raw, each], [y, y], color=draw.SOFT, linewidth=1.0, zorder=1)
        places = range(len(rows))
        raw_style: Any = {"marker": "D", "facecolors": draw.CARD, "edgecolors": draw.VERMILLION, "s": 28, "zorder": 2}
        axes.scatter([r[1] for r in rows], places, label="time of the capture", **raw_style)
        axes.scatter([r[2] for r in rows], places, marker="o", color=draw.BLUE, s=28, zorder=3, label="time per launch")
        axes.set_yticks(list(places), [title.removeprefix(strip) for title, _, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel(f"change against the control in %; shaded: the {FLOOR_PCT:g} % floor")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
    return figure
