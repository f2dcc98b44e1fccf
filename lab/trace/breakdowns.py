"""A breakdown: time by category with its denominator, from a recorded table or from a trace, in one form.

What the parts leave of the whole (the source's total, or a trace's span) is "not attributed" and never dropped; for a
trace it is zero: durations, less overlap, plus idle time, are the span.

Recorded tables (data/recorded/breakdowns.csv) were printed with few digits, and some print a share where a time is
wanted: every recorded part carries half a unit of its last printed digit as its error, or the error of its share. Rows
of the level "sub" lie inside a "macro" row and are kept apart. Given up: converting between tokens and steps, which
needs the batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from lab.base import files
from lab.base.errors import BadInput
from lab.card import recorded
from lab.trace import categories, intervals
from lab.trace.categories import IDLE, Rules
from lab.trace.model import OPAQUE, Trace, totals

FILE = recorded.FOLDER / "breakdowns.csv"
# unit -> the column of a recorded table that is in it. Steps come first: where a table has both, the sources printed
# the step and the time per token was computed from it, with digits that nobody measured.
UNITS = {"ms/step": "ms_per_step", "us/token": "us_per_token", "ms": "window_ms", "%": "share_pct"}
SHOWN = ("npl", "npp", "ntg", "ctx", "arm", "tokens", "clients")  # params that a title has
Level = Literal["macro", "sub", "fine", "total", "meta"]
OVERLAP = "overlap"
NOT_ATTRIBUTED = "not attributed"
NO_PART = ("gpu_idle", IDLE, OVERLAP)  # no kernel's time; parts of a wall-clock total only


@dataclass(frozen=True)
class Part:
    """One category's time.

    value, error: in the breakdown's unit; error is half a unit of the last printed digit, 0 for measured time.
    label:        the source's words, or "".
    count:        launches behind it, None where unknown.
    """

    category: str
    value: float
    error: float = 0.0
    label: str = ""
    count: float | None = None


@dataclass(frozen=True)
class Breakdown:
    """Time by category.

    unit:        of all values: "us/token", "ms/step", "us/step", "us", "ms" or "%".
    parts:       disjoint; nested: parts inside them.
    total:       the whole that is stated (recorded) or measured (the span); None where the source states none.
    denominator: what the total is, in words.
    kernels:     full kernel name -> time in `unit`; empty where per-kernel time is unknown or refused; launches: how
                 many of each, per the same unit.
    evidence:    "recorded", "estimate" or "measured"; invalid: why the source's own table must not be used, or "".
    """

    id: str
    title: str
    unit: str
    parts: tuple[Part, ...]
    total: float | None
    denominator: str
    total_error: float = 0.0
    nested: tuple[Part, ...] = ()
    kernels: Mapping[str, float] = field(default_factory=dict)
    launches: Mapping[str, float] = field(default_factory=dict)
    evidence: str = "measured"
    invalid: str = ""
    source: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def sum(self) -> float:
        """Sum of the parts; an overlap counts negatively."""
        return sum(part.value for part in self.parts)

    @property
    def whole(self) -> float:
        """The stated total, else the sum of the parts."""
        return self.sum if self.total is None else self.total

    @property
    def not_attributed(self) -> float:
        """What the parts leave of the total; negative when they exceed it."""
        return self.whole - self.sum

    def by_category(self) -> dict[str, Part]:
        """Parts merged by category, in order of first appearance."""
        found: dict[str, Part] = {}
        for p in self.parts:
            if q := found.get(p.category):
                label = ", ".join(filter(None, (q.label, p.label)))
                count = None if q.count is None or p.count is None else q.count + p.count
                p = Part(p.category, q.value + p.value, q.error + p.error, label, count)
            found[p.category] = p
        return found


class Row(msgspec.Struct, frozen=True):
    """A row of a recorded table, figures as printed. params: npl, npp, arm, and why it is an estimate or invalid."""

    id: str
    trace_id: str
    engine: str
    device: str
    model: str
    phase: str
    params: dict[str, Any]
    category: str
    level: Level
    kernel_name: str
    us_per_token: str
    ms_per_step: str
    share_pct: str
    instances: str
    window_ms: str
    source: str

    def printed(self, unit: str) -> str:
        """The figure in a unit of UNITS, "" where the source prints none."""
        return str(getattr(self, UNITS[unit]))


@cache
def table(path: Path) -> Mapping[str, list[Row]]:
    """The rows of a table of recorded breakdowns by trace id; raises BadInput for an unknown level or doubled id."""
    found: dict[str, list[Row]] = {}
    for row in files.table(path, Row).values():
        found.setdefault(row.trace_id, []).append(row)
    return found


def recorded_ids() -> list[str]:
    """The ids of the recorded breakdowns."""
    return list(table(FILE))


def rows(trace_id: str) -> list[Row]:
    """A recorded breakdown's rows as printed; raises BadInput naming the nearest id."""
    return files.called(trace_id, table(FILE), "recorded breakdown", FILE)


def units(trace_id: str) -> list[str]:
    """The units in which every part of a recorded breakdown is printed."""
    parts = [r for r in rows(trace_id) if r.level == "macro"] or rows(trace_id)
    return [unit for unit in UNITS if all(r.printed(unit) for r in parts)]


def digit_error(text: str) -> float:
    """Half a unit of the last printed digit: "18.9" -> 0.05, "236" -> 0.5.

    A trailing ".0" of a number from 100 on is taken for the transcription's: sources print 236 ms and 6.6 ms in one
    column, and a column of numbers makes the first 236.0.
    """
    whole, _, decimals = text.partition(".")
    return 0.5 if decimals == "0" and abs(float(whole)) >= 100 else 0.5 * 10.0 ** -len(decimals)


def from_recorded(trace_id: str, unit: str | None = None) -> Breakdown:
    """A recorded breakdown in `unit`, default the first of UNITS; BadInput where a part is not printed in it."""
    own, offered = rows(trace_id), units(trace_id)
    chosen = unit or next(iter(offered), None)
    if chosen is None or chosen not in offered:
        what = f"{trace_id} is not printed in {unit}" if unit else f"{trace_id} prints no unit for all of its parts"
        raise BadInput(FILE, what, f"it has {', '.join(offered) or 'none'}")
    head, total = own[0], _total(own, chosen)
    whole = float(total.printed(chosen)) if total else (100.0 if chosen == "%" else None)
    of_wall = total is None or "wall" in total.kernel_name.lower()
    parts: list[Part] = []
    nested: list[Part] = []
    for row in own:
        if row.level == "total" or not row.printed(chosen) or (row.category in NO_PART and not of_wall):
            continue  # idle time is no part of a total of kernel time
        (parts if row.level == "macro" else nested).append(_part(row, chosen, whole))
    shown = [f"{k} {v}" for k, v in head.params.items() if k in SHOWN]
    return Breakdown(
        id=trace_id,
        title=", ".join([head.engine, head.model, head.phase, *shown]),
        unit=chosen,
        parts=tuple(parts),
        nested=tuple(nested),
        total=whole,
        total_error=digit_error(total.printed(chosen)) if total else 0.0,
        denominator=total.kernel_name if total else ("the source's 100 %" if chosen == "%" else "sum of the parts"),
        evidence="estimate" if head.params.get("estimate") else "recorded",
        invalid=str(head.params.get("invalid", "")),
        source=head.source,
    )


def _total(own: Iterable[Row], unit: str) -> Row | None:
    """The row that states the whole: the wall-clock one where there are several."""
    totals = [r for r in own if r.level == "total" and r.printed(unit)]
    wall = [r for r in totals if "wall" in r.kernel_name.lower()]
    return max(wall or totals, key=lambda r: float(r.printed(unit)), default=None)


def _part(row: Row, unit: str, whole: float | None) -> Part:
    value, error, share = float(row.printed(unit)), digit_error(row.printed(unit)), row.share_pct
    if unit != "%" and share and whole and abs(float(share) / 100 * whole - value) <= 2 * error:
        error = max(error, digit_error(share) / 100 * whole)  # the time was computed from the share
    # Overlap is printed as a positive number and shortens the step.
    sign = -1.0 if row.category == OVERLAP else 1.0
    return Part(row.category, sign * value, error, row.kernel_name, float(row.instances) if row.instances else None)


def from_trace(trace: Trace, rules: Rules | None = None, count: float = 1.0, per: str = "") -> Breakdown:
    """A trace's breakdown over its span, added up over the devices: kernels by category, copies by direction, fills,
    opaque graphs, idle, and overlap as a negative part, so that the parts sum to the span. Kernels that only wait are
    idle time; they are listed as nested.

    count, per: divide by so many of "step" or "token"; the unit is then us/step or us/token.
    Without a timeline (tools that give totals only) the whole is the sum of the kernels and no idle time exists.
    """
    if count <= 0:
        raise BadInput("--steps/--tokens", f"{count:g}", "give how many steps or tokens the window holds, above 0")
    rules = rules or categories.default()
    scale, unit = 1e3 * count, f"us/{per}" if per else "us"
    single = totals(trace)
    kernels = [t for t in single if t.kind == "kernel" and not len(trace.graphs)]
    every = sorted(categories.sums(rules, single), key=lambda c: -c.sum_ns)
    parts, nested = (
        [Part(c.name, c.sum_ns / scale, count=c.count / count) for c in every if rules.busy(c.name) == busy]
        for busy in (True, False)
    )
    span_ns = sum_ns = sum(c.sum_ns for c in every if rules.busy(c.name))
    denominator = "sum of the kernels (no timeline)"
    if trace.timeline:
        devices = intervals.devices(trace, rules.waits(trace.names))
        span_ns = sum(intervals.window(trace, own, number).ns for number, own in devices.items())
        busy_ns = sum(d.work.spans.ns for d in devices.values())
        parts += [Part(IDLE, (span_ns - busy_ns) / scale), Part(OVERLAP, (busy_ns - sum_ns) / scale)]
        denominator = f"time span of {len(devices)} device{'s'[: len(devices) != 1]}"
    warnings = [*trace.warnings, *categories.other_warning(rules, single, sum_ns, scale, unit)]
    if len(trace.graphs):
        what = f"{OPAQUE} is not split and kernels are not compared"
        warnings.append(f"{len(trace.graphs)} graph launches are opaque: {what}")
    return Breakdown(
        id=trace.source,
        title=f"{trace.tool} {trace.tool_version}".strip() + (f", {trace.window_label}" if trace.window_label else ""),
        unit=unit,
        parts=tuple(parts),
        nested=tuple(nested),
        total=span_ns / scale,
        denominator=denominator,
        kernels={t.name: t.sum_ns / scale for t in kernels},
        launches={t.name: t.count / count for t in kernels},
        source=trace.source,
        warnings=tuple(warnings),
    )
