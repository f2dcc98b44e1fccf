"""The author's prose beside a card (data/phases/<system>/<id>.md), held against the card's own figures.

The rule is short, so that a reader can follow it. A number with a unit in the prose must be, rounded as it is printed,
a figure of this card in that unit: an arm's time, a change or an end of its interval, a line of the gate, a share of a
roofline, a recorded figure. A sign counts only where the prose writes one. A unit in which the card has no figure is
not checked, and neither is what stands in backticks: there is the place for numbers from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lab.base import vocabulary
from lab.write.pages import CardPage, of_ceiling, of_roofline

NUMBER = re.compile(r"(?<![\w.,])([+-]?)(\d[\d,]*(?:\.\d+)?) ?(%|[A-Za-z]+(?:/[a-z]+)?)")
Figures = Mapping[str, Mapping[float, str]]


def figures(shown: CardPage) -> Figures:
    """unit -> value -> which figure of the card it is."""
    found: dict[str, dict[float, str]] = {}

    def add(value: float | str | None, unit: str, name: str) -> None:
        if isinstance(value, float | int):
            found.setdefault(vocabulary.unit(unit), {}).setdefault(float(value), name)

    for view in shown.views:
        for f in view.judgement.verdict.findings:
            if seen := f.seen:
                where = f"{f.condition.of} {f.condition.workload}".strip()
                add(seen.value, seen.unit, where)
                add(seen.line, seen.unit, f"the line of {where}")
                for end in seen.interval or ():
                    add(end, seen.unit, f"the interval of {where}")
                add(seen.control, seen.arms_unit, f"{where}, control")
                add(seen.candidate, seen.arms_unit, f"{where}, candidate")
    for row in shown.rows:
        add(row.own_us, "us", row.id)
        add(row.iqr_us, "us", f"the IQR of {row.id}")
        shares = {"roofline": of_roofline(row), "ceilings": of_ceiling(row), "error": row.relative_error}
        for name, share in shares.items():
            add(None if share is None else 100 * share, "%", f"{name}, {row.id}")
    for change in shown.changes.values():
        for name, pct in change.items():
            add(pct, "%", f"the change of {name}")
    for figure in shown.figures:
        add(figure.value, figure.unit, figure.id)
    return found


def flagged(text: str, known: Figures) -> list[str]:
    """One line for each number of the prose that no figure of the card is: which, and the nearest figure."""
    found = []
    for place, line in enumerate(text.splitlines(), 1):
        for sign, digits, word in NUMBER.findall(re.sub(r"`[^`]*`", "", line)):
            unit = vocabulary.unit(word)
            if unit not in known:
                continue
            number = float(digits.replace(",", ""))
            places = len(digits.partition(".")[2])

            def off(value: float, sign: str = sign, number: float = number) -> float:
                return abs(value - (-number if sign == "-" else number)) if sign else abs(abs(value) - number)

            nearest = min(known[unit], key=off)
            if off(nearest) > 0.5 * 10**-places + 1e-9:
                said = f"{sign}{digits} {word} is no figure of this card"
                found.append(f"line {place}: {said}; the nearest is {nearest:.6g} {unit} ({known[unit][nearest]})")
    return found
