"""The style that every figure shares: a light card, Okabe and Ito's colours, SVG with its text as text.

White ground and dark ink rather than a transparent ground, because grey ink on a transparent one is poor in both light
and dark pages. Colour is never alone: each kind of point has its own marker, each curve its own dash, and a category
beyond the seven colours a hatch. Figures are built without pyplot, so nothing is registered globally and nothing has to
be closed. Given up: interactivity, and themes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lab.base.errors import BadInput

FITS, LINE_IN = 0.95, 0.18  # of the width, since a page's font may be wider than ours; a line of the legend
WIDTH_IN, HEIGHT_IN = 7.0, 4.2  # fits a notebook column; text is 8.5 to 10 pt at that size
INK, SOFT, CARD, GRID = "#222222", "#767676", "#ffffff", "#e8e8e8"
BLUE, ORANGE, GREEN, VERMILLION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
SKY, YELLOW = "#56B4E9", "#F0E442"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW)
MARKERS, DASHES = ("o", "s", "^", "D", "v", "P"), ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
HATCHES = ("", "////", "....", "xxxx")
Look = tuple[str, str]  # colour, hatch
IDLE_LOOK: Look = ("#eeeeee", "")
# Any: the key type that matplotlib asks for differs between its releases.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "killgate",
    "text.parse_math": False,  # a name from a row may hold a dollar sign
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "path.simplify": True,
}
P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function in this style."""

    @wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return inside


class Sheet(Figure):
    """A figure whose draft is its layout alone.

    To fix the layout, matplotlib draws everything once with a renderer that does nothing: a fifth of a picture's time.
    """

    def draw(self, renderer: Any) -> None:
        """As matplotlib calls it, for the draft too."""
        engine = self.get_layout_engine()
        if engine is not None and not hasattr(renderer.open_group, "__self__"):  # no method: it is put in its place
            engine.execute(self)
        else:
            super().draw(renderer)


def sheet(height_in: float) -> Figure:
    """An empty figure, WIDTH_IN wide."""
    figure = Sheet(figsize=(WIDTH_IN, height_in), facecolor=CARD, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def clean(axes: Axes, *, left: bool = True, grid: str = "") -> Axes:
    """The axes without a frame, on the card's ground; left: keep the line of y; grid: "x", "y" or "both"."""
    axes.set_facecolor(CARD)
    axes.spines[["top", "right", *([] if left else ["left"])]].set_visible(False)
    if grid:
        axes.grid(True, axis=grid, color=GRID, linewidth=0.6)  # type: ignore[arg-type]
        axes.set_axisbelow(True)
    return axes


def blank(height_in: float, heading: str = "", xlabel: str = "", ylabel: str = "") -> tuple[Figure, Axes]:
    """An empty figure and its axes; call it inside a `styled` function."""
    figure = sheet(height_in)
    axes = clean(figure.add_subplot())
    axes.set(xlabel=xlabel, ylabel=ylabel)
    title(axes, heading)
    return figure, axes


def legend(figure: Figure, drawn: Mapping[str, Any], most: int, **look: Any) -> None:
    """The legend below the figure, in at most so many columns and in fewer where the names are long.

    drawn: name -> handle. Beyond the lines that `most` columns take the figure grows, so that its axes do not shrink.
    """
    for columns in range(min(most, len(drawn)), 0, -1):
        made = figure.legend(
            drawn.values(), drawn, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, **look
        )
        if columns == 1 or made.get_window_extent().width <= FITS * figure.bbox.width:
            more = math.ceil(len(drawn) / columns) - math.ceil(len(drawn) / most)
            figure.set_figheight(figure.get_figheight() + LINE_IN * more)
            return
        made.remove()


def title(axes: Axes, text: str) -> None:
    """The title, over the left end."""
    axes.set_title(text, loc="left", fontsize=10, color=INK)


def rows(axes: Axes, labels: Sequence[str], size: float = 9) -> None:
    """A row for each label."""
    axes.set_yticks(range(len(labels)), labels, fontsize=size)
    axes.tick_params(axis="y", length=0)


def curve(
    axes: Axes, i: int, points: Iterable[tuple[float, float]], name: str, marker: bool = True, ms: float = 4
) -> Any:
    """The i-th curve of a figure, by x, with a colour, a marker and a dash of its own; returns its handle."""
    look: Any = {"color": CYCLE[i % len(CYCLE)], "marker": MARKERS[i % len(MARKERS)] if marker else ""}
    xs, ys = zip(*sorted(points), strict=True)
    (drawn,) = axes.plot(xs, ys, **look, ls=DASHES[i % len(DASHES)], ms=ms, lw=1.3, mfc=CARD, label=name)
    return drawn


def logarithmic(axes: Axes, names: str = "xy", base: float = 10) -> None:
    """Make these of the axes "x" and "y" logarithmic, with plain numbers."""
    for name in names:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log", base=base)
        plain_ticks(getattr(axes, f"{name}axis"))
    axes.minorticks_off()


def ratios(axes: Axes, ticks: Sequence[float], label: Callable[[float], str]) -> None:
    """Ticks of a logarithmic x axis of ratios."""
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))


def beside(axes: Axes, words: str, at: tuple[float, float], far_pt: float = 4, size: float = 8.5) -> None:
    """Words to the right of a point."""
    axes.annotate(words, at, xytext=(far_pt, 0), textcoords="offset points", va="center", fontsize=size, color=INK)


def outside(axes: Axes, words: str, y: float, size: float) -> None:
    """Words to the right of the axes, at this height."""
    place: Any = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
    axes.annotate(words, (1.01, y), va="center", fontsize=size, **place)


def plain(value: float, _position: int = 0) -> str:
    """A tick's label, for FuncFormatter: 1,024 and 0.25, no powers of ten."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def plain_ticks(*axes: Any) -> None:
    """Plain numbers on these axes (`axes.xaxis`, `axes.yaxis`)."""
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(plain))


def number(value: float, sign: str = "") -> str:
    """Four digits, or all of a number from 1,000 on."""
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"


def look(i: int) -> Look:
    """Colour and hatch of the i-th category: seven colours, then again with a hatch."""
    return CYCLE[i % len(CYCLE)], HATCHES[i // len(CYCLE) % len(HATCHES)]


@styled
def svg(figure: Figure) -> str:
    """The figure as SVG text, the same bytes each time (no date, fixed ids), coordinates to two decimals."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", facecolor=CARD, metadata={"Date": None, "Creator": None})
    # Numbers inside tags are coordinates; a number between tags is a label's and stays as it is.
    return re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag.group()), buffer.getvalue())


def png(figure: Figure) -> bytes:
    """The figure as a small PNG (96 dpi, at most 64 colours), the same bytes each time: for a page without trust."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=96, facecolor=CARD, metadata={"Software": None})
    flat = Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    flat.save(small, format="png", optimize=True)
    return small.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as SVG, or as PNG when the path ends so; raises BadInput for another ending."""
    if path.suffix == ".svg":
        path.write_text(svg(figure), encoding="utf-8")
    elif path.suffix == ".png":
        figure.savefig(path, dpi=150, facecolor=CARD)
    else:
        raise BadInput(path, f'"{path.suffix}" is not a picture format here', "end the name in .svg or .png")
    return path
