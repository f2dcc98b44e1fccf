"""The difference of two breakdowns: how much of the gap each category owns.

Aligned by category, and by kernel where both sides have a name. What the categories do not explain of the gap is a line
of its own ("not attributed"). A category in which A is faster counts negatively, so others can own more than 100 %.
Figures printed with few digits are intervals, and so are their differences and shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lab.base import files
from lab.base.errors import BadInput
from lab.trace import categories
from lab.trace.breakdowns import NOT_ATTRIBUTED, Breakdown, Part
from lab.trace.model import OPAQUE, short_name
from lab.trace.report import table

NOTHING = 1e-9  # a gap below this is none, and so is a rest below this part of the totals
OTHER_WORK = 0.02  # launches of a category that differ by more mean different work


@dataclass(frozen=True)
class Line:
    """One category (or kernel) of a difference: a, b and delta = a - b in the common unit.

    error: of the delta, from the printed digits. share: delta over the gap, None without a gap; share_low, share_high:
    the share's bounds for inputs within their printed digits. labels: the sources' words for it, where they differ.
    counts: launches behind a and b, None where unknown.
    """

    name: str
    a: float
    b: float
    delta: float
    error: float = 0.0
    share: float | None = None
    share_low: float | None = None
    share_high: float | None = None
    labels: tuple[str, str] = ("", "")
    counts: tuple[float | None, float | None] = (None, None)

    @property
    def split(self) -> tuple[float, float] | None:
        """(by more or fewer launches at B's time each, by the time of each at A's launches), which sum to delta."""
        n, m = self.counts
        return ((n - m) * self.b / m, self.a - n * self.b / m) if n and m else None

    def of(self, gap: float, gap_error: float) -> Line:
        """The same with its share of a gap, where there is one beyond its own digits."""
        if abs(gap) <= max(gap_error, NOTHING):
            return self
        corners = [(self.delta + sign * self.error) / (gap + way * gap_error) for sign in (-1, 1) for way in (-1, 1)]
        return replace(self, share=self.delta / gap, share_low=min(corners), share_high=max(corners))


@dataclass(frozen=True)
class Difference:
    """Two breakdowns, aligned.

    gap:            total of a minus total of b; explained: sum of the categories' deltas; rest: gap - explained.
    lines:          categories, largest absolute delta first. kernels: the same by name, where both sides have names.
    only_a, only_b: kernels that one side alone has, with their time, largest first.
    """

    a: Breakdown
    b: Breakdown
    unit: str
    gap: float
    gap_error: float
    explained: float
    rest: float
    lines: tuple[Line, ...]
    kernels: tuple[Line, ...] = ()
    only_a: tuple[tuple[str, float], ...] = ()
    only_b: tuple[tuple[str, float], ...] = ()
    warnings: tuple[str, ...] = ()

    def line(self, *names: str) -> Line:
        """The line of a category, or of several taken together; raises BadInput when there is none."""
        known = {line.name: line for line in self.lines}
        chosen = [files.called(name, known, "category", f"{self.a.id} - {self.b.id}") for name in names]
        a, b, error = (sum(getattr(line, column) for line in chosen) for column in ("a", "b", "error"))
        return Line(" + ".join(names), a, b, a - b, error).of(self.gap, self.gap_error)


def difference(a: Breakdown, b: Breakdown) -> Difference:
    """Attribute the gap between two breakdowns of the same unit.

    Recorded names of categories are put into ours when the other side is a trace (data/categories, `also`).
    Raises BadInput for different units, a breakdown in % (a share of two different totals has no difference) and a
    table that its source marked invalid.
    """
    for side in (a, b):
        if side.invalid:
            raise BadInput(side.id, f"its source marked it invalid ({side.invalid})", "compare a valid capture")
        if side.unit == "%":
            remedy = "give the total of each side in us: --total A,B"
            raise BadInput(side.id, "is printed in shares of its own total, so a difference has no unit", remedy)
    if a.unit != b.unit:
        raise BadInput("lab diff", f"{a.id} is in {a.unit}, {b.id} in {b.unit}", "choose --per token or --per step")
    if a.evidence != b.evidence and "measured" in (a.evidence, b.evidence):
        a, b = _canonical(a), _canonical(b)
    gap, gap_error = a.whole - b.whole, a.total_error + b.total_error
    own, other = a.by_category(), b.by_category()
    lines = []
    for name in dict.fromkeys([*own, *other]):
        p, q = (side.get(name, Part(name, 0.0)) for side in (own, other))
        labels, counts = (p.label, q.label), (p.count, q.count)
        line = Line(name, p.value, q.value, p.value - q.value, p.error + q.error, labels=labels, counts=counts)
        lines.append(line.of(gap, gap_error))
    lines.sort(key=_largest)
    explained = sum(line.delta for line in lines)
    rest = gap - explained
    if abs(rest) <= NOTHING * max(abs(a.whole), abs(b.whole)):
        rest = 0.0  # the rounding of sums of doubles
    found = Difference(a, b, a.unit, gap, gap_error, explained, rest, tuple(lines))
    if a.kernels and b.kernels:  # by full name
        both = [
            Line(n, v, b.kernels[n], v - b.kernels[n], counts=(a.launches.get(n), b.launches.get(n))).of(gap, 0.0)
            for n, v in a.kernels.items()
            if n in b.kernels
        ]
        only_a, only_b = _alone(a.kernels, b.kernels), _alone(b.kernels, a.kernels)
        found = replace(found, kernels=tuple(sorted(both, key=_largest)), only_a=only_a, only_b=only_b)
    return replace(found, warnings=tuple(_warnings(found)))


def _largest(line: Line) -> tuple[float, str]:
    return -abs(line.delta), line.name


def _alone(own: Mapping[str, float], other: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(((n, v) for n, v in own.items() if n not in other), key=lambda item: (-item[1], item[0])))


def at_launches_of(a: Breakdown, b: Breakdown) -> Breakdown:
    """B as if it launched each category as often as A, which leaves the time of a launch; BadInput without counts."""
    own = a.by_category()
    if not any(p.count for p in a.parts) or not any(p.count for p in b.parts):
        raise BadInput("--per launch", f"{a.id} and {b.id} do not both count launches", "compare profiles")
    factor = {p.category: n / p.count for p in b.parts if p.count and (n := own.get(p.category, p).count)}
    by = [(p, factor.get(p.category, 1.0)) for p in b.parts]
    parts = tuple(replace(p, value=p.value * times, count=(p.count or 0) * times or None) for p, times in by)
    total = b.whole + sum(p.value for p in parts) - b.sum
    title = f"{b.title}, at the launches of A"
    return replace(b, parts=parts, total=total, title=title, kernels={}, launches={})


def in_time(shares: Breakdown, total: float, unit: str) -> Breakdown:
    """A breakdown in % of a total that is known from elsewhere (a step time), in that unit."""
    if shares.unit != "%" or total <= 0:
        raise BadInput(shares.id, f"in {shares.unit}, total {total:g}", "give shares in % and a total above 0")
    parts, nested = (
        tuple(replace(p, value=p.value / 100 * total, error=p.error / 100 * total) for p in side)
        for side in (shares.parts, shares.nested)
    )
    return replace(shares, unit=unit, parts=parts, nested=nested, total=total)


def _canonical(side: Breakdown) -> Breakdown:
    rules = categories.default()
    return replace(side, parts=tuple(replace(p, category=rules.canonical(p.category)) for p in side.parts))


def _warnings(d: Difference) -> list[str]:
    sides = (d.a, d.b)
    found = [f"{side.id}: {w}" for side in sides for w in side.warnings]
    for side in sides:
        if side.evidence == "estimate":
            found.append(f"{side.id} is an estimate, not a measurement")
        if side.whole and abs(side.not_attributed) > categories.OTHER_LIMIT * side.whole:
            found.append(
                f"{side.id}: parts sum to {side.sum:,.5g} of {side.whole:,.5g} {side.unit}; "
                f"{side.not_attributed / side.whole:.1%} is not attributed"
            )
    other = [
        f"{line.name} {line.counts[0]:,.4g} against {line.counts[1]:,.4g}"
        for line in d.lines
        if line.counts[0] and line.counts[1] and abs(line.counts[0] / line.counts[1] - 1) > OTHER_WORK
    ]
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        found.append(f"the sides did different work: launches of {', '.join(other[:3])}{more}; see --per launch")
    if NOTHING < abs(d.gap) < 0.1 * sum(abs(line.delta) for line in d.lines):
        found.append("the differences largely cancel: shares of so small a gap are large and say little")
    if not d.a.evidence == d.b.evidence == "recorded" and d.unit == "us":
        found.append("no steps or tokens were given: the two captures may hold different amounts of work")
    if math.copysign(1, d.gap) != math.copysign(1, d.explained) and abs(d.gap) > NOTHING and d.explained:
        found.append("the categories differ the other way than the totals: the gap is not in these parts")
    opaque = [side.id for side in sides if any(p.category == OPAQUE for p in side.parts)]
    if len(opaque) == 1:
        what = "its categories miss what the graphs did, so no category of the other side can be compared with it"
        found.append(f"only {opaque[0]} has opaque graphs: {what}")
    return found


def render(d: Difference, limit: int = 12) -> str:
    """The difference as text: the gap, the categories with their shares of it, kernels, and what is not attributed."""
    denominator = d.a.denominator if d.a.denominator == d.b.denominator else f"{d.a.denominator} | {d.b.denominator}"
    text = [f"A: {d.a.id} ({d.a.title})", f"B: {d.b.id} ({d.b.title})", f"unit: {d.unit}; totals: {denominator}"]
    rest = Line(NOT_ATTRIBUTED, d.a.not_attributed, d.b.not_attributed, d.rest).of(d.gap, d.gap_error)
    total = Line("total", d.a.whole, d.b.whole, d.gap, share=None if rest.share is None else 1.0)
    rows = []
    for line in (*d.lines, rest, total):
        words = line.labels[0] if line.labels[0] == line.labels[1] else ""
        rows.append((line.name, *_times(line), "-" if line.share is None else f"{100 * line.share:.1f} %", words))
    text += table(["category", "A", "B", "A - B", "of the gap", "<"], rows)
    text.append(f"gap {d.gap:,.4g} {d.unit}; categories explain {d.explained:,.4g}, {d.rest:,.4g} is not attributed")
    drifted = [line for line in d.lines if all(line.labels) and line.labels[0] != line.labels[1]]
    text += [f'labels: {line.name} is "{line.labels[0]}" in A and "{line.labels[1]}" in B' for line in drifted]
    counted = [(line.name, line) for line in d.lines]
    if d.kernels:
        counted += [(f"  {short_name(k.name)} ({categories.default().category(k.name)})", k) for k in d.kernels[:limit]]
    launched = [(name, line) for name, line in counted if line.split]
    if launched:
        head = ["launches", "A", "B", "each A", "each B", "by launches", "by each"]
        text += ["", *table(head, [(name, *_launches(line)) for name, line in launched])]
    elif d.kernels:
        text += ["", *table(["kernels on both sides", "A", "B", "A - B"], [(n, *_times(k)) for n, k in counted])]
    for side, alone in (("A", d.only_a), ("B", d.only_b)):
        if alone:
            names = ", ".join(f"{short_name(n)[:40]} {v:,.4g}" for n, v in alone[:5])
            text.append(f"only in {side}: {len(alone)} kernels, {sum(v for _, v in alone):,.4g} {d.unit}: {names}")
    return "\n".join([*text, *(f"warning: {w}" for w in d.warnings)])


def _times(line: Line) -> tuple[str, str, str]:
    return f"{line.a:,.2f}", f"{line.b:,.2f}", f"{line.delta:+,.2f}"


def _launches(line: Line) -> tuple[str, ...]:
    (n, m), (by_count, by_each) = line.counts, line.split or (0.0, 0.0)
    each = [f"{v / k:,.3f}" if k else "-" for v, k in ((line.a, n), (line.b, m))]
    return f"{n or 0:,.4g}", f"{m or 0:,.4g}", *each, f"{by_count:+,.2f}", f"{by_each:+,.2f}"


def render_one(b: Breakdown) -> str:
    """One breakdown as text: each part with its share of the stated total."""

    def value(v: float) -> str:
        return f"{v:11,.2f}" + (f"{v / b.whole:9.1%}" if b.whole else f"{'-':>9}")

    rows = [f"{b.id} ({b.title})", f"unit: {b.unit}; 100 % = {b.denominator}, {b.whole:,.5g} {b.unit}"]
    for p in sorted(b.parts, key=lambda p: -p.value):
        rows.append(f"  {p.category:26}{value(p.value)}" + (f" ({p.label})" if p.label else ""))
    if b.parts:
        rows.append(f"  {NOT_ATTRIBUTED:26}{value(b.not_attributed)}")
    rows += [f"    inside: {p.category:18}{value(p.value)} ({p.label})" for p in b.nested]
    if b.parts and b.not_attributed > categories.OTHER_LIMIT * b.whole:
        rest, limit = f"{b.not_attributed / b.whole:.1%}", f"{categories.OTHER_LIMIT:.0%}"
        rows.append(f"warning: {rest} is in no named part (limit {limit})")
    if b.invalid:
        rows.append(f"warning: its source marked it invalid ({b.invalid})")
    return "\n".join([*rows, *(f"warning: {w}" for w in b.warnings)])
