"""Checks on the record itself: what is stated and not shown, what its source took back, what a gate cannot decide."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from lab.card import phases, recorded
from lab.card.gate import ERRORS, Condition
from lab.study.audit.subject import Answer, Subject, check

WEIGHTS = {"figure": "void", "verdict": "overturned", "possible": "inconclusive"}


@check("stated-not-shown", "inconclusive", "stated | shown")
def stated_not_shown(subject: Subject) -> Answer | None:
    """A verdict takes identity, or that nothing failed, on the source's word: no figure is printed.

    stated: the conditions that hold on evidence of kind `stated`; shown: those that hold on figures.
    """
    stated = subject.every("stated")
    if not stated:
        return None
    named = ", ".join(dict.fromkeys(q.facts.metric for q in stated))
    lines = "; ".join(dict.fromkeys(q.facts.label for q in stated if q.facts.label))
    return Answer(f"{named}: said and not shown" + (f" (line {lines})" if lines else ""))


@check("later-defect", "void", "tainted | untouched")
def later_defect(subject: Subject) -> Answer | None:
    """The same source later found a defect in what it had measured, or took the conclusion back.

    tainted: figures that the defect touches, their label what was found and their path how heavily it weighs;
    untouched: the verdict's other figures.
    """
    tainted = subject.every("tainted")
    if not tainted:
        return None
    return Answer(tainted[0].facts.label, WEIGHTS[tainted[0].facts.path])


@check("gate-cannot-decide", "unsound", "line candidate", "control")
def gate_cannot_decide(subject: Subject) -> Answer | None:
    """A condition that its figures could not miss, or whose line neither a source nor a reason gives.

    The line is taken from the very figure that is held against it, or one figure stands for both arms.
    """
    line, candidate, control = subject["line"], subject["candidate"], subject.get("control")
    if candidate.id and candidate.id == line.id:
        return Answer(f"the line of {line} is the figure that is held against it")
    if control is not None and candidate.id and candidate.id == control.id:
        return Answer(f"one figure, {candidate}, stands for both arms")
    return None


def unreasoned(card: phases.Card) -> list[str]:
    """Conditions of a card whose line neither a recorded figure, another metric nor the gate's `reason` gives.

    Zero needs none: any effect, or none at all. Lines on errors are the families' tolerances (kernels/*/cases.py).
    """
    if card.gate.reason:
        return []
    given = [c for _, gate in card.gates for _, c in gate.conditions() if c.threshold and not (c.stated_by or c.than)]
    return [str(c) for c in given if c.metric not in ERRORS]


def asked_twice(card: phases.Card) -> list[str]:
    """Required conditions that stand in `complete` or `engaged` too, which are asked first: they cannot fail."""
    found: list[str] = []
    for _, gate in card.gates:
        first = [_bare(c) for c in (*gate.complete, *gate.engaged)]
        found += [str(c) for c in gate.require if _bare(c) in first]
    return found


def _bare(c: Condition) -> tuple[object, ...]:
    return c.metric, c.op, c.threshold, c.compare, c.workload


def touched(verdict_id: str, figures: tuple[str, ...]) -> Iterator[str]:
    """Those of a verdict's figures that a later finding of its source touches."""
    taint = recorded.taints().get(verdict_id)
    patterns = taint.figures.split() if taint else []
    return (figure for figure in figures if any(fnmatchcase(figure, pattern) for pattern in patterns))
