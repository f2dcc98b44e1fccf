"""The decode staircase: throughput before and after each step of a patch series, as shares of a peer.

Read from data/staircase.toml, which names recorded figures and nothing else. A step's control was taken again when the
step was measured, so between two steps there is a gap that no step explains; it is kept and drawn dotted instead of
being given to one of them. `total` is last over first, `explained` the product of the steps, and what lies between the
two belongs to nobody: other builds, other settings, other days.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from lab import draw
from lab.base import vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.card import phases, recorded

FILE = REPOSITORY / "data" / "staircase.toml"
UNIT = "tok/s"
KEYS = {"name", "title", "npl", "peer", "step"}
STEP_KEYS = {"patch", "card", "mechanism", "control", "candidate", "share"}


@dataclass(frozen=True)
class Step:
    """One patch: what it does, the card that judges it, and its two arms in tok/s over `npl` sequences.

    stated: the shares of the peer before and after in % as the source prints them, None where it prints none.
    """

    patch: str
    card: str
    mechanism: str
    control: recorded.Figure
    candidate: recorded.Figure
    stated: tuple[recorded.Figure, recorded.Figure] | None

    @property
    def before(self) -> float:
        """Throughput of the control, tok/s."""
        return float(self.control.value)

    @property
    def after(self) -> float:
        """Throughput of the candidate, tok/s."""
        return float(self.candidate.value)

    @property
    def gain(self) -> float:
        """Candidate over control."""
        return self.after / self.before


@dataclass(frozen=True)
class Staircase:
    """The steps of one model on one device, in order, with the peer that the shares are of."""

    name: str
    title: str
    npl: int
    peer: recorded.Figure
    steps: tuple[Step, ...]

    def share_pct(self, tps: float) -> float:
        """A throughput as a share of the peer's, in %."""
        return 100.0 * tps / float(self.peer.value)

    @property
    def total(self) -> float:
        """Last candidate over first control."""
        return self.steps[-1].after / self.steps[0].before

    @property
    def explained(self) -> float:
        """The product of the steps, each between its own two arms."""
        return math.prod(step.gain for step in self.steps)

    @property
    def between_pct(self) -> tuple[float, ...]:
        """What the next step's control lies above the candidate before it, in %: no step explains it."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return tuple(100.0 * (later.before / earlier.after - 1.0) for earlier, later in pairs)

    def rows(self) -> list[dict[str, Any]]:
        """One line per step, for a table."""
        between = (None, *self.between_pct)
        return [
            {
                "patch": s.patch,
                "card": s.card,
                "mechanism": " ".join(s.mechanism.split()),
                "before tok/s": s.before,
                "after tok/s": s.after,
                "gain %": 100.0 * (s.gain - 1.0),
                "of vLLM before %": self.share_pct(s.before),
                "of vLLM after %": self.share_pct(s.after),
                "control above the step before %": gap,
            }
            for s, gap in zip(self.steps, between, strict=True)
        ]


@cache
def staircases() -> Mapping[str, Staircase]:
    """Every staircase of data/staircase.toml by name."""
    return {s.name: s for s in load(FILE)}


def staircase(name: str) -> Staircase:
    """The staircase with this name; raises BadInput naming the nearest."""
    if name not in staircases():
        raise BadInput(FILE, f'no staircase is called "{name}"', nearest(name, staircases()))
    return staircases()[name]


def load(path: Path) -> list[Staircase]:
    """Read and check a file of staircases.

    Raises BadInput for an unknown or missing key, a card that does not exist, a figure that is unknown, withdrawn, in
    another unit, of the wrong arm, or of another device, model or number of sequences than its staircase.
    """
    found = []
    for entry in vocabulary.read_toml(path).get("staircase", []):
        _keys(path, entry, KEYS)
        steps = []
        for step in entry["step"]:
            _keys(path, step, STEP_KEYS, optional={"share"})
            if step["card"] not in phases.cards():
                raise BadInput(path, f'card = "{step["card"]}" is unknown', nearest(step["card"], phases.cards()))
            stated = [recorded.target(i) for i in step.get("share", ())]
            if len(stated) not in (0, 2):
                raise BadInput(path, f"{step['patch']}: {len(stated)} shares", "name the one before and the one after")
            control, candidate = (_throughput(path, step[a], entry["npl"], a) for a in ("control", "candidate"))
            shares = (stated[0], stated[1]) if stated else None
            steps.append(Step(step["patch"], step["card"], step["mechanism"], control, candidate, shares))
        peer = _throughput(path, entry["peer"], entry["npl"], "peer-")
        if not steps:
            raise BadInput(path, f"{entry['name']} has no step", "name at least one")
        _one_place(path, entry["name"], [peer, *(f for s in steps for f in (s.control, s.candidate))])
        found.append(Staircase(entry["name"], entry["title"], entry["npl"], peer, tuple(steps)))
    return found


def _keys(path: Path, table: Mapping[str, Any], known: set[str], optional: Iterable[str] = ()) -> None:
    for key in table:
        if key not in known:
            raise BadInput(path, f'unknown key "{key}"', nearest(key, known))
    for key in sorted(known - set(optional)):
        if key not in table:
            raise BadInput(path, f'key "{key}" is missing', "a staircase without it cannot be drawn")


def _throughput(path: Path, figure_id: str, npl: int, arm: str) -> recorded.Figure:
    recorded.figure(figure_id, path)
    figure = recorded.target(figure_id)
    if vocabulary.unit(figure.unit) != UNIT or not isinstance(figure.value, float) or figure.value <= 0:
        raise BadInput(path, f"{figure_id} is {figure.value} {figure.unit}", f"bind a throughput in {UNIT}")
    if not figure.arm.startswith(arm):
        raise BadInput(path, f"{figure_id} is the {figure.arm} arm", f'it cannot stand as "{arm}"')
    if figure.params.get("npl") != npl:
        raise BadInput(path, f"{figure_id} is at npl {figure.params.get('npl')}", f"this staircase is at npl {npl}")
    return figure


def _one_place(path: Path, name: str, figures: Sequence[recorded.Figure]) -> None:
    for field in ("device", "model"):
        words = sorted({getattr(f, field) for f in figures})
        if len(words) > 1:
            raise BadInput(path, f"{name} mixes {field}s: {', '.join(words)}", f"one staircase is of one {field}")


# The picture ----------------------------------------------------------------------------------------------------------

FLAT = 0.34  # half a landing: a step runs from its control, left, to its candidate, right


def picture(chosen: Sequence[Staircase]) -> Picture:
    """Panels one above the other, a staircase each: levels in tok/s and % of vLLM, mechanism under each step.

    Raises BadInput for no staircase.
    """
    if not chosen:
        raise BadInput("staircase", "nothing to draw", "name at least one of data/staircase.toml")
    with matplotlib.rc_context(draw.STYLE):
        figure = Picture(figsize=(draw.WIDTH_IN, 0.2 + 3.5 * len(chosen)), facecolor=draw.CARD, layout="constrained")
        FigureCanvasAgg(figure)
        panels: Any = figure.subplots(len(chosen), 1, squeeze=False)[:, 0]
        for axes, stairs in zip(panels, chosen, strict=True):
            _panel(axes, stairs)
    return figure


def _panel(axes: Axes, stairs: Staircase) -> None:
    top = float(stairs.peer.value)
    axes.set_facecolor(draw.CARD)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhline(top, color=draw.ORANGE, lw=1.4, ls="--")
    axes.annotate(f"vLLM {top:g} {UNIT}, 100 %", (-0.5, top), xytext=(4, 4), textcoords="offset points", fontsize=8.5)
    for x, step in enumerate(stairs.steps):
        axes.fill_between([x, x + FLAT], step.before, step.after, color=draw.BLUE, alpha=0.14, linewidth=0)
        path = [x - FLAT, x, x, x + FLAT], [step.before, step.before, step.after, step.after]
        axes.plot(*path, color=draw.BLUE, lw=2.0, solid_joinstyle="miter")
        _level(axes, x - FLAT, step.before, stairs, "left", -4)
        _level(axes, x + FLAT, step.after, stairs, "right", 4)
        gain = f"+{100 * (step.gain - 1):.1f} %"
        middle = (step.before + step.after) / 2
        axes.annotate(gain, (x, middle), xytext=(5, 0), textcoords="offset points", va="center", color=draw.BLUE)
    for x, (earlier, later) in enumerate(zip(stairs.steps, stairs.steps[1:], strict=False)):
        axes.plot([x + FLAT, x + 1 - FLAT], [earlier.after, later.before], color=draw.SOFT, lw=1.0, ls=":")
    labels = [f"patch {s.patch}\n{s.mechanism}" for s in stairs.steps]
    axes.set_xticks(range(len(labels)), labels, fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_ylim(0, top * 1.12)
    axes.set_ylabel(f"decode, {UNIT} at npl {stairs.npl}")
    axes.set_title(stairs.title, loc="left", fontsize=10, color=draw.INK)


def _level(axes: Axes, x: float, tps: float, stairs: Staircase, side: str, dy: float) -> None:
    words = f"{tps:.2f}, {stairs.share_pct(tps):.1f} %"
    axes.annotate(
        words, (x, tps), xytext=(0, dy), textcoords="offset points", ha=side, va="bottom" if dy > 0 else "top",
        fontsize=8.5, color=draw.INK,
    )  # fmt: skip
