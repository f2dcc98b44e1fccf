"""The decode staircase: throughput before and after each step of a patch series, as shares of a peer.

Read from data/staircase.toml, which names recorded figures and nothing else. A step's control was taken again when the
step was measured, so between two steps there is a gap that no step explains; it is kept and drawn dotted instead of
being given to one of them. `total` is last over first, `explained` the product of the steps, and what lies between the
two belongs to nobody: other builds, other settings, other days.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from lab.base import files, vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.card import phases, recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

FILE = REPOSITORY / "data" / "staircase.toml"
UNIT = "tok/s"


class BoundStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step of data/staircase.toml: figures by id; share: the source's own shares before and after, if it has them."""

    patch: str
    card: str
    mechanism: str
    control: str
    candidate: str
    share: tuple[str, str] | None = None


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A staircase of data/staircase.toml."""

    name: str
    title: str
    npl: int
    peer: str
    step: Annotated[tuple[BoundStep, ...], Meta(min_length=1)]


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """data/staircase.toml."""

    staircase: tuple[Bound, ...]


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
    for bound in files.read(path, File).staircase:
        steps = []
        for step in bound.step:
            if step.card not in phases.cards():
                raise BadInput(path, f'card = "{step.card}" is unknown', nearest(step.card, phases.cards()))
            before, after = (recorded.target(i) for i in step.share) if step.share else (None, None)
            control = _throughput(path, step.control, bound.npl, "control")
            candidate = _throughput(path, step.candidate, bound.npl, "candidate")
            stated = (before, after) if before and after else None
            steps.append(Step(step.patch, step.card, step.mechanism, control, candidate, stated))
        peer = _throughput(path, bound.peer, bound.npl, "peer-")
        _one_place(path, bound.name, [peer, *(f for s in steps for f in (s.control, s.candidate))])
        found.append(Staircase(bound.name, bound.title, bound.npl, peer, tuple(steps)))
    return found


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


def picture(chosen: Sequence[Staircase]) -> Picture:
    """Panels one above the other, a staircase each: levels in tok/s and % of vLLM, mechanism under each step.

    Raises BadInput for no staircase.
    """
    from lab.draw import outcomes

    if not chosen:
        raise BadInput("staircase", "nothing to draw", "name at least one of data/staircase.toml")
    panels = []
    for s in chosen:
        steps = [(f"patch {step.patch}\n{step.mechanism}", step.before, step.after) for step in s.steps]
        axis = f"decode, {UNIT} at npl {s.npl}"
        panels.append(outcomes.Stairs(s.title, axis, UNIT, float(s.peer.value), steps))
    return outcomes.staircase(panels)
