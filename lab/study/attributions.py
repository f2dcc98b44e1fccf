"""What the sources said about where the time goes, computed again from their own tables.

data/attributions.toml names a formula below and, for its arguments, recorded breakdowns (by trace id), categories and
recorded figures; the claim is a recorded figure or a value with its source. Inputs are intervals of their printed
digits, and a claim agrees when its own interval meets the result's: the sources print two or three digits, and 119 of
184 is 64.7 % or, at those digits, anything from 63.8 to 65.6 %. A claim declares whether it expects to agree, so one
that does not follow from its own tables is a finding on record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from lab.base import files
from lab.base.errors import REPOSITORY, BadInput, refuse_unknown, shown
from lab.base.files import Text
from lab.card import recorded
from lab.study.reproduction import Asked, callable_with
from lab.trace import amdahl, breakdowns, diff
from lab.trace.amdahl import Interval
from lab.trace.breakdowns import digit_error

FILE = REPOSITORY / "data" / "attributions.toml"


class Attribution(Asked, frozen=True, kw_only=True):
    """One claim, computed again: recorded and ours in `unit`, with the bounds that printed digits leave."""

    unit: str
    recorded: Interval
    ours: Interval
    agrees: bool
    note: str
    source: str


# Formulas: trace ids, categories and Intervals in, an Interval out --------------------------------------------------


def _sum(table: breakdowns.Breakdown, categories: Sequence[str]) -> Interval:
    known = table.by_category() | {p.category: p for p in table.nested if p.category not in table.by_category()}
    for name in categories:
        refuse_unknown(FILE, f"category of {table.id}", name, known)
    return Interval.of(sum(known[n].value for n in categories), sum(known[n].error for n in categories))


def _divided(a: Interval, b: Interval, scale: float = 1.0) -> Interval:
    corners = [x / y * scale for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(corners), a.mid / b.mid * scale, max(corners))


def share(trace: str, categories: Sequence[str]) -> Interval:
    """Categories of one table as a share of its stated whole, in %."""
    table = breakdowns.from_recorded(trace)
    return _divided(_sum(table, categories), Interval.of(table.whole, table.total_error), 100)


def part(trace: str, categories: Sequence[str], unit: str) -> Interval:
    """The time of categories in one table."""
    return _sum(breakdowns.from_recorded(trace, unit), categories)


def parts_sum(trace: str, unit: str) -> Interval:
    """The sum of a table's parts."""
    table = breakdowns.from_recorded(trace, unit)
    return Interval.of(table.sum, sum(p.error for p in table.parts))


def left_over(trace: str, unit: str) -> Interval:
    """What a table's parts leave of its stated total."""
    table = breakdowns.from_recorded(trace, unit)
    return Interval.of(table.not_attributed, table.total_error + sum(p.error for p in table.parts))


def gap(a: str, b: str, unit: str) -> Interval:
    """Total of a minus total of b."""
    found = _difference(a, b, unit)
    return Interval.of(found.gap, found.gap_error)


def delta(a: str, b: str, unit: str, categories: Sequence[str]) -> Interval:
    """Time of categories in a minus that in b."""
    line = _difference(a, b, unit).line(*categories)
    return Interval.of(line.delta, line.error)


def gap_share(a: str, b: str, unit: str, categories: Sequence[str]) -> Interval:
    """The share of the gap between a and b that categories own, in %."""
    line = _difference(a, b, unit).line(*categories)
    if line.share is None or line.share_low is None or line.share_high is None:
        raise BadInput(FILE, f"{a} and {b} have no gap", "a share of nothing does not exist")
    return Interval(line.share_low * 100, line.share * 100, line.share_high * 100)


def _difference(a: str, b: str, unit: str) -> diff.Difference:
    return diff.difference(breakdowns.from_recorded(a, unit), breakdowns.from_recorded(b, unit))


def with_copies(kernels_only: Interval, copies: Interval, window: Interval) -> Interval:
    """Busy share of a window in %, from kernels alone (in %) and the time of copies beside them."""
    added = _divided(copies, window, 100)
    return Interval(kernels_only.low + added.low, kernels_only.mid + added.mid, kernels_only.high + added.high)


def share_of_busy(busy: Interval, kernels_only: Interval) -> Interval:
    """What is not kernels, as a share of busy time in %, from the two busy shares of one window."""
    difference = Interval(busy.low - kernels_only.high, busy.mid - kernels_only.mid, busy.high - kernels_only.low)
    return _divided(difference, busy, 100)


def removed(base: Interval, trace: str, categories: Sequence[str]) -> Interval:
    """Throughput with categories of one table, the whole of the wall time, removed (lab/trace/amdahl.py)."""
    fraction = _divided(share(trace, categories), Interval.of(100))
    found = amdahl.project(fraction, Interval.of(math.inf), base).ceiling_rate
    assert found is not None
    return found


FORMULAS: Mapping[str, Callable[..., Interval]] = {
    f.__name__: f
    for f in (share, part, parts_sum, left_over, gap, delta, gap_share, with_copies, share_of_busy, removed)
}


class Number(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number by the id of its recorded figure, or as its source prints it, with unit and source."""

    figure: Text | None = None
    value: Text | None = None
    unit: Text | None = None
    source: Text | None = None

    def __post_init__(self) -> None:
        form = {name for name in self.__struct_fields__ if getattr(self, name) is not None}
        if form not in ({"figure"}, {"value", "unit", "source"}):
            raise ValueError('is no number; write { figure = "id" } or { value = "1.0", unit = , source = }')
        float(self.value or 0)

    def read(self, where: str) -> tuple[Interval, str, str]:
        """(an interval of its printed digits, its unit, its source); raises BadInput for a figure that is no number."""
        if self.figure is None:
            printed = self.value or ""
            return Interval.of(float(printed), digit_error(printed)), self.unit or "", self.source or ""
        found = recorded.number(where, self.figure)
        return Interval.of(float(found.value), digit_error(f"{found.value:g}")), found.unit, found.id


class Claim(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim of data/attributions.toml: what the source says, and the formula that computes it again."""

    recorded: Number
    note: Text
    arguments: dict[str, Number | Text | list[Text]] = msgspec.field(default_factory=dict)


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """data/attributions.toml."""

    claim: tuple[Claim, ...] = ()


def reproduce(path: Path = FILE) -> list[Attribution]:
    """Every claim of the file, computed again; raises BadInput for an unknown key, formula, figure or category."""
    found = []
    for c in files.read(path, File).claim:
        where = f"{shown(path)}: {c.id}"
        formula = callable_with(FORMULAS, c.formula, c.arguments, where)
        numbers = {k: v.read(f"{where}.{k}")[0] for k, v in c.arguments.items() if isinstance(v, Number)}
        claimed, unit, source = c.recorded.read(f"{where}.recorded")
        ours = formula(**{**c.arguments, **numbers})
        told = {"unit": unit, "recorded": claimed, "ours": ours, "agrees": ours.meets(claimed)}
        found.append(Attribution(**c.about(), **told, note=c.note, source=source))
    return found


def render(claims: Sequence[Attribution]) -> str:
    """The claims as text."""
    lines = [f"{'attribution':58}{'recorded':>10}{'ours':>10}  {'bounds':17}{'unit':10}agrees"]
    for c in claims:
        bounds = f"{c.ours.low:.4g} to {c.ours.high:.4g}"
        word = "yes" if c.agrees else "NO"
        lines.append(f"{c.name[:57]:58}{c.recorded.mid:10.5g}{c.ours.mid:10.5g}  {bounds:17}{c.unit[:9]:10}{word}")
        if not c.agrees or c.expected == "differs":
            lines.append(f"    {c.note}")
    return "\n".join(lines)
