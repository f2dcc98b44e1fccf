"""The decode staircase: throughput before and after each step of a patch series, as shares of a peer.

Read from data/staircase.toml, which names recorded figures and nothing else. A step's control was taken again when the
step was measured, so between two steps there is a gap that no step explains; it is kept and drawn dotted instead of
being given to one of them. `total` is last over first, `explained` the product of the steps, and what lies between the
two belongs to nobody: other builds, other settings, other days.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One patch: what it does, the card that judges it, and its two arms in tok/s over `npl` sequences.

    share: the figures in which the source itself states the shares before and after, None where it prints none.
    """

    patch: str
    card: str
    mechanism: str
    control_id: str = msgspec.field(name="control")
    candidate_id: str = msgspec.field(name="candidate")
    share: tuple[str, str] | None = None

    @property
    def control(self) -> recorded.Figure:
        """The control's figure."""
        return recorded.target(self.control_id)

    @property
    def candidate(self) -> recorded.Figure:
        """The candidate's figure."""
        return recorded.target(self.candidate_id)

    @property
    def stated(self) -> tuple[recorded.Figure, ...]:
        """The shares of the peer before and after in %, as the source prints them."""
        return tuple(map(recorded.target, self.share or ()))

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


class Staircase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The steps of one model on one device, in order, with the peer that the shares are of."""

    name: str
    title: str
    npl: int
    peer_id: str = msgspec.field(name="peer")
    steps: Annotated[tuple[Step, ...], Meta(min_length=1)] = msgspec.field(name="step")

    @property
    def peer(self) -> recorded.Figure:
        """The peer's figure."""
        return recorded.target(self.peer_id)

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


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """data/staircase.toml."""

    staircase: tuple[Staircase, ...]


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
    found = files.read(path, File).staircase
    for stairs in found:
        bound = [(stairs.peer_id, "peer-")]
        for step in stairs.steps:
            if step.card not in phases.cards():
                raise BadInput(path, f'card = "{step.card}" is unknown', nearest(step.card, phases.cards()))
            bound += [(step.control_id, "control"), (step.candidate_id, "candidate")]
            for share in step.share or ():
                recorded.target(share)
        figures = [_throughput(path, figure_id, stairs.npl, arm) for figure_id, arm in bound]
        for field in ("device", "model"):
            words = sorted({getattr(f, field) for f in figures})
            if len(words) > 1:
                what = f"{stairs.name} mixes {field}s: {', '.join(words)}"
                raise BadInput(path, what, f"one staircase is of one {field}")
    return list(found)


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
