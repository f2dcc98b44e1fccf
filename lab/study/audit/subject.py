"""What an audit check is given (a subject: quantities by role) and what it answers (a sentence, or nothing).

A quantity is a number with its unit and the id it came from, whether a source printed it or this workbench measured
it; so one check serves both. Ids of measured rows begin with `profiles/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from lab.base import vocabulary
from lab.card.recorded import Figure

SEVERITIES = {
    "void": "the evidence proves nothing",
    "overturned": "the figures say something else than the verdict",
    "inconclusive": "the effect cannot be told from noise, or the line cannot decide",
    "unsound": "the way it was formed is wrong, whatever the result",
}
FLOOR_PCT, SIGMAS = 2.0, 3.0  # the noise rule of the sources and of our judge where a card says nothing else


STATED = ("path", "clock", "label", "profiled", "estimate", "source_word", "stderr", "op")  # by a figure's parameters


class Quantity(msgspec.Struct, frozen=True):
    """A number of a subject, and what else is known of it, "" or 0 where it is not.

    value, unit: as printed or measured; id: a figure's id, a row's id, or "" for a line that a card declares.
    withdrawn:   the source's word for taking it back, "" when it stands.
    device, model, metric, path: what makes a figure the same quantity as another.
    clock, label: whose time it is; what its source calls it. profiled, estimate: taken under a profiler; about so much.
    source_word: the verdict word that stands beside it. stderr: its standard error, in its unit.
    op, sigmas:  of a line, how it is asked; of a floor, how many sigma of the control count.
    """

    value: float
    unit: str
    id: str = ""
    withdrawn: str = ""
    device: str = ""
    model: str = ""
    metric: str = ""
    path: str = ""
    clock: str = ""
    label: str = ""
    profiled: bool = False
    estimate: bool = False
    source_word: str = ""
    stderr: float = 0.0
    op: str = ">="
    sigmas: float = SIGMAS

    def __str__(self) -> str:
        return f"{short(self.value)} {self.unit}"


@dataclass(frozen=True)
class Subject:
    """What one check is asked of.

    title:    what it is about, in a few words. evidence: "recorded" or "measured". word: the verdict that stands on it.
    roles:    quantities by the name the check knows them under. verdicts, cards: ids that a reader can follow.
    note:     a reason found elsewhere (a changed gate hash, a row under its floor), which is then the whole answer.
    device:   that it was measured on, "" where it is recorded.
    """

    title: str
    evidence: str
    roles: Mapping[str, tuple[Quantity, ...]]
    word: str = ""
    verdicts: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()
    note: str = ""
    device: str = ""

    def __getitem__(self, role: str) -> Quantity:
        return self.roles[role][0]

    def get(self, role: str) -> Quantity | None:
        """The first quantity of a role that the check merely understands, None when the subject has none."""
        return next(iter(self.every(role)), None)

    def every(self, role: str) -> tuple[Quantity, ...]:
        """All quantities of a role."""
        return self.roles.get(role, ())

    @property
    def ids(self) -> tuple[str, ...]:
        """Every figure and row behind the subject, once."""
        return tuple(dict.fromkeys(q.id for quantities in self.roles.values() for q in quantities if q.id))


@dataclass(frozen=True)
class Answer:
    """Why a check fires: one sentence, and a severity where it is not the check's own."""

    sentence: str
    severity: str = ""


@dataclass(frozen=True)
class Check:
    """A check by name.

    meaning:  one plain sentence: what is wrong when it fires. severity: a word of SEVERITIES.
    needs:    groups of roles, one of which a subject must have in full; may: further roles that it understands.
    run:      subject -> Answer, or None when nothing is wrong; only asked of a subject that `has` its roles.
    """

    name: str
    severity: str
    meaning: str
    needs: tuple[tuple[str, ...], ...]
    may: tuple[str, ...]
    run: Callable[[Subject], Answer | None]

    def has(self, roles: Collection[str]) -> bool:
        """Whether the roles hold one of the groups that it needs."""
        return any(set(group) <= set(roles) for group in self.needs)


def check(
    name: str, severity: str, needs: str = "", may: str = "", *, effect: bool = False
) -> Callable[[Callable[[Subject], Answer | None]], Check]:
    """Make a function a check; the first line of its docstring is the check's meaning.

    needs: groups of roles, "a b | c". effect: each group also needs the roles of an effect, change or both arms.
    """
    groups = [tuple(group.split()) for group in needs.split("|")]
    if effect:
        groups = [(*arms, *group) for arms in (("change",), ("control", "candidate")) for group in groups]

    def made(run: Callable[[Subject], Answer | None]) -> Check:
        return Check(name, severity, (run.__doc__ or "").splitlines()[0], tuple(groups), tuple(may.split()), run)

    return made


@dataclass(frozen=True)
class Finding:
    """A check that fired on a subject: the sentence, the word that was written on these figures, and the ids."""

    check: str
    severity: str
    subject: str
    evidence: str
    sentence: str
    word: str
    verdicts: tuple[str, ...]
    cards: tuple[str, ...]
    figures: tuple[str, ...]
    device: str = ""


def short(number: float) -> str:
    """A number in six digits at most, without an exponent where that stays readable."""
    return f"{number:,.0f}" if abs(number) >= 1e6 else f"{number:.6g}"


def about(quantity: Quantity) -> str:
    """ "about " in front of a figure that is an estimate, else nothing."""
    return "about " if quantity.estimate else ""


def from_figure(figure: Figure) -> Quantity:
    """A recorded figure as a quantity; the caller has made sure that its value is a number."""
    known = {key: figure.params[key] for key in STATED if figure.params.get(key)}
    known |= {key: getattr(figure, key) for key in ("id", "withdrawn", "device", "model", "metric")}
    return msgspec.convert({**known, "value": figure.value, "unit": vocabulary.unit(figure.unit)}, Quantity)


def change_pct(control: Quantity, candidate: Quantity) -> float:
    """Candidate over control minus 1, in %; NaN where no change can be formed (another unit, control not positive)."""
    if control.unit != candidate.unit or not control.value > 0:
        return math.nan
    return 100.0 * (candidate.value - control.value) / control.value


def effect(subject: Subject) -> tuple[float, str]:
    """(change in %, the words for it) from `change`, or from `control` and `candidate`."""
    if stated := subject.get("change"):
        return stated.value, f"{stated.value:+.2f} %"
    change = change_pct(subject["control"], subject["candidate"])
    return change, f"{change:+.2f} % ({short(subject['control'].value)} -> {subject['candidate']})"
