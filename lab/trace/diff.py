"""The difference of two breakdowns: how much of the gap each category owns.

Aligned by category, and by kernel where both sides have a name. The gap is the difference of the totals, and what the
categories do not explain is a line of its own ("not attributed"). A category in which A is faster counts negatively, so
others can own more than 100 %. Figures printed with few digits are intervals, and so are their differences and shares.
Refused: different units, a share without a total, a table that its source called invalid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lab.base.errors import BadInput
from lab.trace import breakdowns, categories
from lab.trace.breakdowns import NOT_ATTRIBUTED, Breakdown, Part
from lab.trace.model import short_name


@dataclass(frozen=True)
class Line:
    """One category (or kernel) of a difference: a, b and delta = a - b in the common unit.

    error: of the delta, from the printed digits. share: delta over the gap, None without a gap; share_low, share_high:
    the share's bounds for inputs within their printed digits. labels: the sources' words for it, where they differ.
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
    warnings: tuple[str, ...] = field(default=())

    def line(self, *names: str) -> Line:
        """The line of a category, or of several taken together; raises BadInput when there is none."""
        known = {line.name: line for line in self.lines}
        for name in names:
            if name not in known:
                raise BadInput(f"{self.a.id} - {self.b.id}", f'no category "{name}"', f"it has {', '.join(known)}")
        chosen = [known[name] for name in names]
        total_a, total_b = sum(c.a for c in chosen), sum(c.b for c in chosen)
        error = sum(c.error for c in chosen)
        return _shared(Line(" + ".join(names), total_a, total_b, total_a - total_b, error), self.gap, self.gap_error)


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
        p, q = own.get(name, Part(name, 0.0)), other.get(name, Part(name, 0.0))
        labels = (p.label, q.label)
        lines.append(_shared(Line(name, p.value, q.value, p.value - q.value, p.error + q.error, labels=labels),
                             gap, gap_error))  # fmt: skip
    lines.sort(key=lambda line: (-abs(line.delta), line.name))
    explained = sum(line.delta for line in lines)
    return Difference(
        a, b, a.unit, gap, gap_error, explained, gap - explained, tuple(lines), *_by_kernel(a, b, gap),
        warnings=_warnings(a, b, gap, explained, lines),
    )  # fmt: skip


def in_time(shares: Breakdown, total: float, unit: str) -> Breakdown:
    """A breakdown in % of a total that is known from elsewhere (a step time), in that unit."""
    if shares.unit != "%" or total <= 0:
        raise BadInput(shares.id, f"in {shares.unit}, total {total:g}", "give shares in % and a total above 0")
    parts = tuple(replace(p, value=p.value / 100 * total, error=p.error / 100 * total) for p in shares.parts)
    nested = tuple(replace(p, value=p.value / 100 * total, error=p.error / 100 * total) for p in shares.nested)
    return replace(shares, unit=unit, parts=parts, nested=nested, total=total)


def _canonical(side: Breakdown) -> Breakdown:
    rules = categories.default()
    return replace(side, parts=tuple(replace(p, category=rules.canonical(p.category)) for p in side.parts))


def _shared(line: Line, gap: float, gap_error: float) -> Line:
    if abs(gap) <= max(gap_error, 1e-9):
        return line
    corners = [(line.delta + sign * line.error) / (gap + way * gap_error) for sign in (-1, 1) for way in (-1, 1)]
    return replace(line, share=line.delta / gap, share_low=min(corners), share_high=max(corners))


Kernels = tuple[tuple[Line, ...], tuple[tuple[str, float], ...], tuple[tuple[str, float], ...]]


def _by_kernel(a: Breakdown, b: Breakdown, gap: float) -> Kernels:
    """Kernels with the same full name on both sides, and what one side alone has."""
    if not a.kernels or not b.kernels:
        return (), (), ()
    both = [
        _shared(Line(n, v, b.kernels[n], v - b.kernels[n]), gap, 0.0) for n, v in a.kernels.items() if n in b.kernels
    ]
    alone = [
        tuple(sorted(((n, v) for n, v in x.kernels.items() if n not in y.kernels), key=lambda i: (-i[1], i[0])))
        for x, y in ((a, b), (b, a))
    ]
    return tuple(sorted(both, key=lambda line: (-abs(line.delta), line.name))), alone[0], alone[1]


def _warnings(a: Breakdown, b: Breakdown, gap: float, explained: float, lines: Sequence[Line]) -> tuple[str, ...]:
    found = [f"{side.id}: {w}" for side in (a, b) for w in side.warnings]
    for side in (a, b):
        if side.evidence == "estimate":
            found.append(f"{side.id} is an estimate, not a measurement")
        if side.whole and abs(side.not_attributed) > categories.OTHER_LIMIT * side.whole:
            found.append(
                f"{side.id}: parts sum to {side.sum:,.5g} of {side.whole:,.5g} {side.unit}; "
                f"{side.not_attributed / side.whole:.1%} is not attributed"
            )
    if 1e-9 < abs(gap) < 0.1 * sum(abs(line.delta) for line in lines):
        found.append("the differences largely cancel: shares of so small a gap are large and say little")
    if not a.evidence == b.evidence == "recorded" and a.unit == "us":
        found.append("no steps or tokens were given: the two captures may hold different amounts of work")
    if math.copysign(1, gap) != math.copysign(1, explained) and abs(gap) > 1e-9 and explained:
        found.append("the categories differ the other way than the totals: the gap is not in these parts")
    opaque = [side.id for side in (a, b) if any(p.category == categories.OPAQUE for p in side.parts)]
    if len(opaque) == 1:
        found.append(f"only {opaque[0]} has opaque graphs: its categories miss what the graphs did, so no category of "
                     "the other side can be compared with it")  # fmt: skip
    return tuple(found)


def render(d: Difference, limit: int = 12) -> str:
    """The difference as text: the gap, the categories with their shares of it, kernels, and what is not attributed."""
    head = f"A: {d.a.id} ({d.a.title})\nB: {d.b.id} ({d.b.title})"
    denominator = d.a.denominator if d.a.denominator == d.b.denominator else f"{d.a.denominator} | {d.b.denominator}"
    rows = [f"{'category':28}{'A':>11}{'B':>11}{'A - B':>11}{'of the gap':>12}"]
    for line in d.lines:
        words = f"  {line.labels[0]}" if line.labels[0] and line.labels[0] == line.labels[1] else ""
        rows.append(
            f"{line.name:28}{line.a:11,.2f}{line.b:11,.2f}{line.delta:+11,.2f}{_percent(line.share):>12}{words}"
        )
    rest = _shared(Line(NOT_ATTRIBUTED, d.a.not_attributed, d.b.not_attributed, d.rest), d.gap, d.gap_error)
    rows.append(f"{rest.name:28}{rest.a:11,.2f}{rest.b:11,.2f}{rest.delta:+11,.2f}{_percent(rest.share):>12}")
    every = _percent(None if rest.share is None else 1.0)
    rows.append(f"{'total':28}{d.a.whole:11,.2f}{d.b.whole:11,.2f}{d.gap:+11,.2f}{every:>12}")
    text = [head, f"unit: {d.unit}; totals: {denominator}", *rows]
    text.append(f"gap {d.gap:,.4g} {d.unit}; categories explain {d.explained:,.4g}, {d.rest:,.4g} is not attributed")
    drifted = [line for line in d.lines if all(line.labels) and line.labels[0] != line.labels[1]]
    text += [f'labels: {line.name} is "{line.labels[0]}" in A and "{line.labels[1]}" in B' for line in drifted]
    if d.kernels:
        text.append("kernels on both sides:")
        for k in d.kernels[:limit]:
            name = f"{short_name(k.name)[:38]} ({categories.default().category(k.name)})"
            text.append(f"  {name:60}{k.a:11,.2f}{k.b:11,.2f}{k.delta:+11,.2f}")
    for side, alone in (("A", d.only_a), ("B", d.only_b)):
        if alone:
            names = ", ".join(f"{short_name(n)[:40]} {v:,.4g}" for n, v in alone[:5])
            text.append(f"only in {side}: {len(alone)} kernels, {sum(v for _, v in alone):,.4g} {d.unit}: {names}")
    return "\n".join([*text, *(f"warning: {w}" for w in d.warnings)])


def render_one(b: Breakdown) -> str:
    """One breakdown as text: each part with its share of the stated total."""
    rows = [f"{b.id} ({b.title})", f"unit: {b.unit}; 100 % = {b.denominator}, {b.whole:,.5g} {b.unit}"]
    for p in sorted(b.parts, key=lambda p: -p.value):
        words = f" ({p.label})" if p.label else ""
        rows.append(f"  {p.category:26}{p.value:11,.2f}{_share(p.value, b)}{words}")
    if b.parts:
        rows.append(f"  {NOT_ATTRIBUTED:26}{b.not_attributed:11,.2f}{_share(b.not_attributed, b)}")
    for p in b.nested:
        rows.append(f"    inside: {p.category:18}{p.value:11,.2f}{_share(p.value, b)} ({p.label})")
    if b.parts and b.not_attributed > categories.OTHER_LIMIT * b.whole:
        rows.append(
            f"warning: {b.not_attributed / b.whole:.1%} is in no named part (limit {categories.OTHER_LIMIT:.0%})"
        )
    if b.invalid:
        rows.append(f"warning: its source marked it invalid ({b.invalid})")
    return "\n".join([*rows, *(f"warning: {w}" for w in b.warnings)])


def _share(value: float, b: Breakdown) -> str:
    return f"{value / b.whole:9.1%}" if b.whole else f"{'-':>9}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}".replace("%", " %")


def side(text: str, unit: str | None, total: float | None = None) -> Breakdown | None:
    """A recorded breakdown named on the command line, with a total for its shares; None when there is none so named."""
    if text not in breakdowns.recorded_ids():
        return None
    found = breakdowns.from_recorded(text, "%" if total is not None else unit)
    return found if total is None else in_time(found, total, unit if unit and unit.startswith("us") else "us")


def common_unit(ids: Sequence[str]) -> str | None:
    """The first unit that all of these recorded breakdowns are printed in; None when there is none."""
    return next((u for u in breakdowns.UNITS if all(u in breakdowns.units(i) for i in ids)), None)
