"""The decode staircase: throughput before and after each step of a patch series, as shares of a peer.

Read from data/staircase.toml, which names recorded figures and nothing else. A step's control was taken again when the
step was measured, so between two steps there is a gap that no step explains; it is kept and drawn dotted instead of
being given to one of them. `total` is last over first, `explained` the product of the steps, and what lies between the
two belongs to nobody: other builds, other settings, other days.

The same steps measured (`measured`) are arms of cards, each pair from one run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from lab.base import devices, files, vocabulary
from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases, recorded
from lab.judge import evidence
from lab.row import store

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

FILE = REPOSITORY / "data" / "staircase.toml"
UNIT = "tok/s"


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One patch: what it does, the card that judges it, and the figures of its two arms, throughput in tok/s.

    share: the figures in which the source itself states the shares before and after, None where it prints none.
    """

    patch: str
    card: str
    mechanism: str
    control: str
    candidate: str
    share: tuple[str, str] | None = None

    @property
    def before(self) -> float:
        """Throughput of the control, tok/s."""
        return float(recorded.figure(self.control).value)

    @property
    def after(self) -> float:
        """Throughput of the candidate, tok/s."""
        return float(recorded.figure(self.candidate).value)

    @property
    def gain(self) -> float:
        """Candidate over control."""
        return self.after / self.before

    @property
    def stated(self) -> tuple[recorded.Figure, ...]:
        """The shares of the peer before and after in %, as the source prints them."""
        return tuple(map(recorded.figure, self.share or ()))


class Staircase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The steps of one model on one device over `npl` sequences, in order, and the figure of the peer."""

    name: str
    title: str
    npl: int
    peer: str
    steps: Annotated[tuple[Step, ...], Meta(min_length=1)] = msgspec.field(name="step")

    @property
    def peer_tps(self) -> float:
        """Throughput of the peer, tok/s."""
        return float(recorded.figure(self.peer).value)

    def share_pct(self, tps: float) -> float:
        """A throughput as a share of the peer's, in %."""
        return 100.0 * tps / self.peer_tps

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
            for s, gap in zip(self.steps, (None, *self.between_pct), strict=True)
        ]


class Arms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step measured: two arms of a card at one workload. patch: of the recorded step, "" for none, or "graphs"."""

    patch: str
    mechanism: str
    card: str
    workload: str
    control: str
    candidate: str

    def times_us(self, device: str) -> tuple[float, float]:
        """Of the control and of the candidate, in the run that the card is judged by; BadInput where one is not ok."""
        card = phases.card(self.card)
        rows = store.rows(device, card.id)
        judged = evidence.pairs(evidence.asked(rows, card), card.compared).get(self.workload, (None, None))
        runs = {row.run for row in judged if row}
        found = {r.name: r.time_us for r in rows if r.run in runs and r.workload_id == self.workload and r.time_us}
        if missing := sorted({self.control, self.candidate} - found.keys()):
            what = f"{', '.join(missing)} without a time at {self.workload}"
            raise BadInput(f"profiles/{device}/{card.id}", what, f"lab measure {card.id}")
        return found[self.control], found[self.candidate]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The steps on a device of ours, in order."""

    name: str
    title: str
    device: str
    steps: Annotated[tuple[Arms, ...], Meta(min_length=1)] = msgspec.field(name="step")

    def gain(self, patch: str) -> float | None:
        """What a step brings, candidate's steps a second over the control's; None where the series has it not."""
        step = next((s for s in self.steps if s.patch == patch), None)
        if step is None:
            return None
        before_us, after_us = step.times_us(self.device)
        return before_us / after_us


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """data/staircase.toml."""

    staircase: tuple[Staircase, ...]
    measured: tuple[Measured, ...]


@cache
def staircases() -> Mapping[str, Staircase]:
    """Every staircase of data/staircase.toml by name."""
    return {s.name: s for s in load(FILE)}


def staircase(name: str) -> Staircase:
    """The staircase with this name; raises BadInput naming the nearest."""
    return files.called(name, staircases(), "staircase", FILE)


@cache
def measured(path: Path = FILE) -> tuple[Measured, ...]:
    """The steps as a file names our arms of them; BadInput for a card, a workload or an arm that is none."""
    found = files.read(path, File).measured
    for step in (step for series in found for step in series.steps):
        card = files.called(step.card, phases.cards(), "card", path)
        files.called(step.workload, dict.fromkeys(card.workloads), f"workload of {card.id}", path)
        for arm in (step.control, step.candidate):
            files.called(arm, dict.fromkeys((card.control, card.candidate, *card.beside)), f"arm of {card.id}", path)
    return found


def beside() -> list[dict[str, Any]]:
    """One line a step: what it brought on the recorded device, and what it brings on ours, as gains in %."""
    recorded_gains = {s.name: {step.patch: step.gain for step in s.steps} for s in staircases().values()}
    steps = {step.patch: step.mechanism for series in measured() for step in series.steps}
    pct = lambda gain: None if gain is None else 100.0 * (gain - 1.0)  # noqa: E731
    return [
        {"step": (f"patch {patch}, " if patch.isdigit() else "") + " ".join(mechanism.split())}
        | {f"GB10 {name} %": pct(gains.get(patch)) for name, gains in recorded_gains.items()}
        | {f"{devices.get(s.device).id.upper()} {s.name} %": pct(s.gain(patch)) for s in measured()}
        for patch, mechanism in steps.items()
    ]


def load(path: Path) -> tuple[Staircase, ...]:
    """Read and check a file of staircases.

    Raises BadInput for an unknown or missing key, a card that does not exist, a figure that is unknown, withdrawn, in
    another unit, of the wrong arm, or of another device, model or number of sequences than its staircase.
    """
    found = files.read(path, File).staircase
    for stairs in found:
        figures = [_throughput(path, stairs, stairs.peer, "peer-")]
        for step in stairs.steps:
            files.called(step.card, phases.cards(), "card", path)
            figures += [_throughput(path, stairs, getattr(step, arm), arm) for arm in ("control", "candidate")]
            for share in step.share or ():
                recorded.number(path, share, stands=True)
        for field in ("device", "model"):
            if len(words := sorted({getattr(f, field) for f in figures})) > 1:
                what = f"{stairs.name} mixes {field}s: {', '.join(words)}"
                raise BadInput(path, what, f"one staircase is of one {field}")
    return found


def _throughput(path: Path, stairs: Staircase, figure_id: str, arm: str) -> recorded.Figure:
    figure = recorded.number(path, figure_id, stands=True)
    if vocabulary.unit(figure.unit) != UNIT or not float(figure.value) > 0:
        raise BadInput(path, f"{figure_id} is {figure.value} {figure.unit}", f"bind a throughput in {UNIT}")
    if not figure.arm.startswith(arm):
        raise BadInput(path, f"{figure_id} is the {figure.arm} arm", f'it cannot stand as "{arm}"')
    if (npl := figure.params.get("npl")) != stairs.npl:
        raise BadInput(path, f"{figure_id} is at npl {npl}", f"this staircase is at npl {stairs.npl}")
    return figure


def picture(chosen: Sequence[Staircase]) -> Picture:
    """Panels one above the other, a staircase each: levels in tok/s and % of vLLM, mechanism under each step."""
    from lab.draw import staircase as drawn

    panels = []
    for s in chosen:
        steps = [(f"patch {step.patch}\n{step.mechanism}", step.before, step.after) for step in s.steps]
        panels.append(drawn.Stairs(s.title, f"decode, {UNIT} at npl {s.npl}", UNIT, s.peer_tps, steps))
    return drawn.staircase(panels)


def picture_measured(chosen: Sequence[Measured]) -> Picture:
    """The same of measured series: the steps of each one's first card, which stand on each other, in steps a second."""
    from lab.draw import staircase as drawn

    panels = []
    for series in chosen:
        steps = []
        for step in (step for step in series.steps if step.card == series.steps[0].card):
            before, after = (1e6 / us for us in step.times_us(series.device))
            patch = f"patch {step.patch}\n" if step.patch else ""
            steps.append((patch + step.mechanism, before, after))
        top = max(after for _, _, after in steps)
        panels.append(drawn.Stairs(series.title, "decode, steps/s", "steps/s", top, steps, "all of them"))
    return drawn.staircase(panels)
