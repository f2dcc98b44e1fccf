"""The roofline of a device, log-log, with points on it; the legend names every roof and every series of points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from lab.base.devices import Device
from lab.base.errors import BadInput, refuse_unknown
from lab.base.facts import Fact, to_base
from lab.draw import style

MARKERS = (*style.MARKERS, "X")
PIPE_COLOURS = {"bf16": style.BLUE, "fp8": style.GREEN, "int8": style.PURPLE, "fp4": style.VERMILLION}
PIPE_COLOURS |= {"f32": style.SOFT}
KINDS = ("measured", "recorded", "peer", "modelled")


@dataclass(frozen=True)
class Point:
    """A problem placed on a roofline.

    intensity:    operations per byte of compulsory traffic.
    rate_tflop_s: what was reached, in TFLOP/s.
    kind:         "measured", "recorded", "peer" or "modelled".
    series:       what the legend calls it, one entry for all points of a candidate; "" for its label.
    pipe:         the peak that its operations run on, "" for one that has none.
    """

    label: str
    intensity: float
    rate_tflop_s: float
    kind: str = "measured"
    series: str = ""
    pipe: str = ""


def point(
    label: str, flops: float, bytes_moved: float, us: float, kind: str = "measured", series: str = "", pipe: str = ""
) -> Point:
    """A point from operations, compulsory bytes and a time in us; raises BadInput unless all are positive."""
    if min(flops, bytes_moved, us) <= 0:
        raise BadInput("roofline plot", f"{label}: {flops=:g}, {bytes_moved=:g}, {us=:g}", "all must be above zero")
    return Point(label, flops / bytes_moved, flops / us * 1e6 / 1e12, kind, series, pipe)


def _lines(fact: Fact, name: str, seen: Fact | None) -> list[tuple[float, str, object]]:
    """(base value, legend, dash) of every value of a fact: the default solid, others dashed, what was seen dotted."""
    own, *others = (fact.values[fact.use], *fact.others)
    lines: list[tuple[float, str, object]] = [(fact.base, f"{name} {own.value:g} {fact.unit}", "-")]
    lines += [
        (to_base(v.value, fact.unit), f"{name} {v.value:g} {fact.unit}, also stated", (0, (5, 3))) for v in others
    ]
    return lines + ([(seen.base, f"{name} {seen.value:g} {seen.unit} seen", ":")] if seen else [])


@style.styled
def roofline(
    device: Device,
    points: Iterable[Point] = (),
    pipes: Sequence[str] = (),
    title: str = "",
    issue: Sequence[tuple[float, float]] = (),
) -> Figure:
    """The roofline of a device with points on it, a colour and marker for each series, filled where it was measured.

    pipes: whose dense peaks to draw, one to four; default those that the points name, bf16 where none does. A
           contradicting value of a peak or of the bandwidth is drawn too, dashed and marked "also stated"; solid is
           the default of data/devices.toml. Dotted are the read ceiling and the pipes' that it was seen to reach.
    issue: (intensity, TFLOP/s) that products reach beside the decoding of their weights, by tokens: a second roof. With
           fewer tokens than a point has, its products take as long.
    Raises BadInput for a pipe without a peak, an unknown kind of point, and a point that is not positive and finite.
    """
    points = tuple(points)
    for p in points:
        refuse_unknown(f"roofline plot, {p.label}", "kind", p.kind, KINDS)
        if not (0 < p.intensity < math.inf and 0 < p.rate_tflop_s < math.inf):
            what = f"{p.label}: intensity {p.intensity:g}, {p.rate_tflop_s:g} TFLOP/s"
            raise BadInput("roofline plot", what, "both must be positive and finite")
    pipes = pipes or [*dict.fromkeys(p.pipe for p in points if p.pipe)] or ["bf16"]
    if not 1 <= len(pipes) <= 4:
        raise BadInput("roofline plot", f"{len(pipes)} pipes", "draw one to four of them")
    memory = _lines(device.bandwidth, "memory", device.ceilings.get("read"))
    peaks = {pipe: _lines(device.peak(pipe), pipe, device.ceilings.get(pipe)) for pipe in pipes}
    highest, slowest = max(v for lines in peaks.values() for v, *_ in lines), min(v for v, *_ in memory)
    left = min([0.3, *(p.intensity / 3 for p in points)])
    right = max([6 * highest / slowest, *(p.intensity * 3 for p in points)])
    lowest = min([slowest * left, *(p.rate_tflop_s * 1e12 / 2.5 for p in points)])
    series = {p.series or p.label: p.kind for p in sorted(points, key=lambda p: p.kind)}
    rows = math.ceil((len(series) + bool(issue) + len(memory) + sum(map(len, peaks.values()))) / 3)
    figure, axes = style.blank(
        style.HEIGHT_IN + 0.17 * rows,
        title or f"{device.name}: roofline",
        "arithmetic intensity: operations per byte of compulsory traffic",
        "TFLOP/s (TOP/s for int8)" if "int8" in pipes else "TFLOP/s",
    )
    style.logarithmic(axes)
    axes.set(xlim=(left, right), ylim=(lowest / 1e12, highest / 1e12 * 3))
    axes.grid(True, color=style.GRID, linewidth=0.6)
    fastest = max(v for v, *_ in memory)
    for rate, words, dash in memory:
        xs = [max(left, lowest / rate), highest / rate]
        axes.plot(xs, [rate * x / 1e12 for x in xs], color=style.INK, lw=1.3, ls=dash, label=words)
    for pipe, lines in peaks.items():
        for peak, words, dash in lines:
            ends = [peak / fastest, right]
            axes.plot(ends, [peak / 1e12] * 2, color=PIPE_COLOURS[pipe], lw=1.5, ls=dash, label=words)
    if issue:
        steps = [left * (right / left) ** (i / 400) for i in range(401)]
        own = [max((rate * min(1.0, x / at) for at, rate in issue)) for x in steps]
        shown = [(x, rate) for x, rate in zip(steps, own, strict=True) if rate * 1e12 >= lowest]
        axes.plot(
            *zip(*shown, strict=True), color=style.INK, lw=1.3, ls="-.", label="issue: products beside NVFP4 decode"
        )
    for i, (name, kind) in enumerate(series.items()):
        mine, colour = [p for p in points if (p.series or p.label) == name], style.CYCLE[i % len(style.CYCLE)]
        words = name if kind == "measured" else f"{name} ({kind})"
        marker = MARKERS[(i + i // len(style.CYCLE)) % len(MARKERS)]
        axes.plot([p.intensity for p in mine], [p.rate_tflop_s for p in mine], ls="", marker=marker, ms=5.5, mec=colour,
                  mew=1.3, mfc=colour if kind == "measured" else style.CARD, label=words, zorder=3)  # fmt: skip
    handles, names = axes.get_legend_handles_labels()
    style.legend(figure, dict(zip(names, handles, strict=True)), 3, handletextpad=0.4)
    return figure
