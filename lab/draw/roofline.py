"""The roofline of a device, log-log, with points on it; each label goes to the first place where it covers nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from lab.base.devices import Device
from lab.base.errors import BadInput, nearest
from lab.base.facts import Fact, to_base
from lab.draw import style

LABELLED = 4  # points; the labels of more lie on each other
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
CLOSE = 1.6  # lines nearer than this factor share a label: at this height less than a line of text lies between them
PIPE_COLOURS = {"bf16": style.BLUE, "fp8": style.GREEN, "int8": style.PURPLE, "fp4": style.VERMILLION}
PIPE_COLOURS |= {"f32": style.SOFT}
# kind of point -> (marker, colour, filled)
KINDS = {
    "measured": ("o", style.BLUE, True),
    "recorded": ("D", style.VERMILLION, False),
    "peer": ("s", style.ORANGE, True),
    "modelled": ("^", style.SOFT, False),
}
Place = tuple[float, float, str, str]  # offset in points, horizontal and vertical alignment
# Beside a point, above and below it, then further away.
AROUND: list[Place] = [(7.0, 0.0, "left", "center"), (-7.0, 0.0, "right", "center")] + [
    (dx * far, dy * far, ha, va)
    for far in (7, 16, 27, 40, 55)
    for dy, va in ((-1.0, "top"), (1.0, "bottom"))
    for dx, ha in ((0.6, "left"), (0.0, "center"), (-0.6, "right"))
]
# Above or below a level line, from its right end leftwards.
BESIDE: list[Place] = [
    (-back, dy, "right", va) for back in (2, 70, 140, 210) for dy, va in ((2, "bottom"), (-2, "top"))
]


@dataclass(frozen=True)
class Point:
    """A problem placed on a roofline.

    intensity:    operations per byte of compulsory traffic.
    rate_tflop_s: what was reached, in TFLOP/s.
    kind:         "measured", "recorded", "peer" or "modelled".
    series:       what it belongs to (a candidate's name); where labels would pile up, the legend names series instead.
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
    return Point(label, flops / bytes_moved, flops / us * 1e6 / 1e12, kind, series or label, pipe)


def _roofs(fact: Fact) -> list[tuple[float, str]]:
    """(base value, label) of every value of a fact, the default first."""
    return [(to_base(v.value, fact.unit), f"{v.value:g} {fact.unit}") for v in (fact.values[fact.use], *fact.others)]


@dataclass
class _Placer:
    """Puts labels where they cover nothing: boxes are pixels, `lines` are sampled pixels of what was drawn."""

    axes: Axes
    boxes: list[Bbox] = field(default_factory=list)
    lines: list[tuple[float, float]] = field(default_factory=list)

    def line(self, xs: Sequence[float], ys: Sequence[float], **style: object) -> None:
        """Draw a straight line (on log axes) and remember where it runs."""
        self.axes.plot(xs, ys, **style)  # type: ignore[arg-type]
        (x0, y0), (x1, y1) = self.axes.transData.transform(list(zip(xs, ys, strict=True)))
        self.lines += [(x0 + (x1 - x0) * i / 150, y0 + (y1 - y0) * i / 150) for i in range(151)]

    def _cost(self, box: Bbox) -> float:
        around, frame = box.padded(1.5), self.axes.get_window_extent()
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        covered = sum(100 for other in self.boxes if around.overlaps(other))
        return (0.0 if inside else 500) + covered + sum(around.contains(x, y) for x, y in self.lines)

    def put(self, x: float, y: float, label: str, colour: str, places: Iterable[Place], leader: bool = True) -> None:
        """A label near (x, y) in data units, at the cheapest of `places`; near ones win ties.

        leader: draw a thin line from the point to a label that ended up far from it.
        """
        best: tuple[float, object, Bbox, float] | None = None
        for rank, (dx, dy, ha, va) in enumerate(places):
            text = self.axes.annotate(
                label, (x, y), xytext=(dx, dy), textcoords="offset points", ha=ha, va=va, color=colour, fontsize=8.5
            )
            box = text.get_window_extent()
            cost = self._cost(box) + rank * 0.2
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()  # type: ignore[attr-defined]
                best = (cost, text, box, math.hypot(dx, dy))
            else:
                text.remove()
        assert best is not None
        self.boxes.append(best[2])
        if leader and best[3] > 30:
            x0, y0 = self.axes.transData.transform((x, y))
            near = (min(max(x0, best[2].x0), best[2].x1), min(max(y0, best[2].y0), best[2].y1))
            ends = self.axes.transData.inverted().transform([(x0, y0), near])
            self.axes.plot(ends[:, 0], ends[:, 1], color=style.SOFT, lw=0.6, zorder=1.5)

    def along(self, x: float, y: float, slope_to: tuple[float, float], label: str, colour: str) -> None:
        """A label just above a line, turned along it, starting at (x, y)."""
        (x0, y0), (x1, y1) = self.axes.transData.transform([(x, y), slope_to])
        angle = math.atan2(y1 - y0, x1 - x0)
        text = self.axes.annotate(
            label, (x, y), xytext=(-3 * math.sin(angle), 3 * math.cos(angle)), textcoords="offset points", ha="left",
            va="bottom", rotation=math.degrees(angle), rotation_mode="anchor", color=colour, fontsize=8.5,
        )  # fmt: skip
        box = text.get_window_extent()
        length = math.hypot(box.width, box.height)
        for i in range(12):
            cx, cy = x0 + math.cos(angle) * length * i / 12, y0 + math.sin(angle) * length * i / 12
            self.boxes.append(Bbox.from_bounds(cx - 8, cy, 16, 14))


@style.styled
def roofline(
    device: Device, points: Iterable[Point] = (), pipes: Sequence[str] = (), title: str = "", seen: bool = True
) -> Figure:
    """The roofline of a device with points on it.

    Up to LABELLED points have their label beside them; more are told apart by series, colour and marker, in a legend.
    pipes: whose dense peaks to draw, one to four; default those that the points name, bf16 where none does. A
           contradicting value of a peak or of the bandwidth is drawn too, dashed and marked "also stated"; solid is
           the default of data/devices.toml.
    seen:  also draw, dotted, the read ceiling and the pipes' ceilings that the device was seen to reach.
    Raises BadInput for a pipe without a peak, an unknown kind of point, and a point that is not positive and finite.
    """
    points = tuple(points)
    for p in points:
        if p.kind not in KINDS:
            raise BadInput("roofline plot", f'{p.label}: kind = "{p.kind}" is unknown', nearest(p.kind, KINDS))
        if not (0 < p.intensity < math.inf and 0 < p.rate_tflop_s < math.inf):
            what = f"{p.label}: intensity {p.intensity:g}, {p.rate_tflop_s:g} TFLOP/s"
            raise BadInput("roofline plot", what, "both must be positive and finite")
    pipes = pipes or [*dict.fromkeys(p.pipe for p in points if p.pipe)] or ["bf16"]
    if not 1 <= len(pipes) <= 4:
        raise BadInput("roofline plot", f"{len(pipes)} pipes", "draw one to four of them")
    peaks = {pipe: _roofs(device.peak(pipe)) for pipe in pipes}
    bandwidths = _roofs(device.bandwidth)
    highest, slowest = max(v for roofs in peaks.values() for v, _ in roofs), min(v for v, _ in bandwidths)
    left = min([0.3, *(p.intensity / 3 for p in points)])
    right = max([6 * highest / slowest, *(p.intensity * 3 for p in points)])
    lowest = min([slowest * left / 1e12, *(p.rate_tflop_s / 2.5 for p in points)])
    figure, axes = style.blank(style.HEIGHT_IN)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(lowest, highest / 1e12 * 3))
    axes.set_xlabel("arithmetic intensity: operations per byte of compulsory traffic")
    axes.set_ylabel("TFLOP/s (TOP/s for int8)" if "int8" in pipes else "TFLOP/s")
    style.title(axes, title or f"{device.name}: roofline")
    axes.grid(True, which="major", color=style.GRID, linewidth=0.6)
    axes.minorticks_off()
    style.plain_ticks(axes.xaxis, axes.yaxis)
    crowded = len(points) > LABELLED
    looks = _by_series(points) if crowded else {kind: (kind, *look) for kind, look in KINDS.items()}
    for key, (words, marker, colour, filled) in looks.items():
        mine = [p for p in points if key == (p.series if crowded else p.kind)]
        axes.plot([p.intensity for p in mine], [p.rate_tflop_s for p in mine], ls="", marker=marker, ms=5.5, mec=colour,
                  mew=1.3, mfc=colour if filled else style.CARD, label=words if mine else "_", zorder=3)  # fmt: skip
    if crowded:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8, handletextpad=0.2)
        figure.set_figheight(style.HEIGHT_IN + 0.17 * math.ceil(len(looks) / 3))
    elif points:
        axes.legend(loc="lower right", frameon=False, fontsize=8.5, handletextpad=0.2)
    figure.draw_without_rendering()  # fixes the layout, so that pixels mean something from here on
    figure.set_layout_engine("none")
    placer = _Placer(axes, [legend.get_window_extent()] if (legend := axes.get_legend()) else [])
    for p in points:
        x, y = axes.transData.transform((p.intensity, p.rate_tflop_s))
        placer.boxes.append(Bbox.from_bounds(x - 4, y - 4, 8, 8))
    _draw_roofs(placer, device, peaks, bandwidths, seen)
    for p in () if crowded else sorted(points, key=lambda p: -p.rate_tflop_s):
        placer.put(p.intensity, p.rate_tflop_s, p.label, style.INK, AROUND)
    return figure


def _by_series(points: Sequence[Point]) -> dict[str, tuple[str, str, str, bool]]:
    """series -> (words, marker, colour, filled): ours filled, others hollow."""
    kinds = {p.series: p.kind for p in points}
    return {
        name: (name if kind == "measured" else f"{name} ({kind})", MARKERS[(i + i // len(style.CYCLE)) % len(MARKERS)],
               style.CYCLE[i % len(style.CYCLE)], kind == "measured")
        for i, (name, kind) in enumerate(sorted(kinds.items(), key=lambda item: item[1]))
    }  # fmt: skip


def _draw_roofs(
    placer: _Placer,
    device: Device,
    peaks: Mapping[str, list[tuple[float, str]]],
    bandwidths: list[tuple[float, str]],
    seen: bool,
) -> None:
    """The lines of a roofline with their labels: bandwidths, peaks, and dotted what was seen."""
    left, right = placer.axes.get_xlim()
    lowest = placer.axes.get_ylim()[0] * 1e12
    highest, fastest = max(v for roofs in peaks.values() for v, _ in roofs), max(v for v, _ in bandwidths)
    reads = [("read ", device.ceilings["read"])] if seen and "read" in device.ceilings else []
    for rate, words, lines in _groups(bandwidths, [(f.base, f"{name}{f.value:g} seen") for name, f in reads]):
        for bandwidth, dash in lines:
            xs = [max(left, lowest / bandwidth), highest / bandwidth]
            ys = [bandwidth * x / 1e12 for x in xs]
            placer.line(xs, ys, color=style.SOFT if dash == ":" else style.INK, lw=1.5 if dash == "-" else 1.2, ls=dash)
        start, end = max(left, lowest / rate), highest / rate
        x = start * (end / start) ** 0.12
        placer.along(x, rate * x / 1e12, (end, highest / 1e12), words, style.INK)
    level = []
    for pipe, roofs in peaks.items():
        ceiling = [device.ceilings[pipe]] if seen and pipe in device.ceilings else []
        colour = PIPE_COLOURS[pipe]
        for rate, words, lines in _groups(roofs, [(f.base, f"{f.value:g} seen") for f in ceiling]):
            for peak, dash in lines:
                xs, ys = [peak / fastest, right], [peak / 1e12] * 2
                placer.line(xs, ys, color=colour, lw=1.8 if dash == "-" else 1.2, ls=dash)
            level.append((rate / 1e12, f"{pipe} {words}", colour))
    for y, words, colour in sorted(level, reverse=True):
        placer.put(right, y, words, colour, BESIDE, leader=False)


def _groups(
    stated: list[tuple[float, str]], seen: list[tuple[float, str]]
) -> list[tuple[float, str, list[tuple[float, object]]]]:
    """Lines that lie too close for a label each share one: (highest value, words, [(value, dash), ...]) per group.

    The default value is solid and comes last, on top; other stated values are dashed, seen ones dotted.
    """
    groups: list[list[tuple[float, str, object]]] = [[(*stated[0], "-")]]
    others = [(v, f"{label}, also stated", (0, (5, 3))) for v, label in stated[1:]]
    for line in [*others, *((v, words, ":") for v, words in seen)]:
        near = [g for g in groups if max(g[0][0], line[0]) / min(g[0][0], line[0]) < CLOSE]
        if near:
            near[0].append(line)
        else:
            groups.append([line])
    return [
        (max(v for v, *_ in g), "; ".join(words for _, words, _ in g), [(v, dash) for v, _, dash in reversed(g)])
        for g in groups
    ]
