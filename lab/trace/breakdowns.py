"""A breakdown: time by category with its denominator, from a recorded table or from a trace, in one form.

It carries the parts and the whole that they must add up to: the source's total, or a trace's span. What is left over is
"not attributed" and never dropped; for a trace it is zero: durations, less overlap, plus idle time, are the span.

Recorded tables (data/recorded/breakdowns.csv) were printed with few digits, and some print a share where a time is
wanted. Every recorded part carries half a unit of its last printed digit as its error, or the error of the share that
it was computed from. Rows of the level "sub" lie inside a "macro" row and are kept apart. Given up: converting between
tokens and steps, which needs the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from lab.base import files
from lab.base.errors import BadInput, nearest
from lab.card import recorded
from lab.trace import categories, intervals
from lab.trace.categories import IDLE, MEMCPY, MEMSET, OPAQUE, OTHER, Rules
from lab.trace.model import COPY_KINDS, Activity, Trace, totals_by_name

FILE = recorded.FOLDER / "breakdowns.csv"
# unit -> the column of a recorded table that is in it. Steps come first: where a table has both, the sources printed
# the step and the time per token was computed from it, with digits that nobody measured.
UNITS = {"ms/step": "ms_per_step", "us/token": "us_per_token", "ms": "window_ms", "%": "share_pct"}
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
    kernels:     full kernel name -> time in `unit`; empty where per-kernel time is unknown or refused.
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
            q = found.get(p.category)
            label = p.label if q is None else ", ".join(filter(None, (q.label, p.label)))
            count = None if p.count is None or (q and q.count is None) else p.count + (q.count or 0 if q else 0)
            value, error = (p.value, p.error) if q is None else (q.value + p.value, q.error + p.error)
            found[p.category] = Part(p.category, value, error, label, count)
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
    avg_us: str
    profile_mode: str
    source: str

    def printed(self, unit: str) -> str:
        """The figure in a unit of UNITS, "" where the source prints none."""
        return str(getattr(self, UNITS[unit]))


@cache
def _table() -> Mapping[str, list[Row]]:
    return read_table(FILE)


def read_table(path: Path) -> dict[str, list[Row]]:
    """The rows of a table of recorded breakdowns by trace id; raises BadInput for an unknown level or doubled id."""
    found: dict[str, list[Row]] = {}
    for row in files.table(path, Row.__struct_fields__, Row).values():
        found.setdefault(row.trace_id, []).append(row)
    return found


def recorded_ids() -> list[str]:
    """The ids of the recorded breakdowns."""
    return list(_table())


def rows(trace_id: str) -> list[Row]:
    """A recorded breakdown's rows as printed; raises BadInput naming the nearest id."""
    if trace_id not in _table():
        raise BadInput(FILE, f'no recorded breakdown has the id "{trace_id}"', nearest(trace_id, _table()))
    return _table()[trace_id]


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
    """A recorded breakdown by its trace id, in `unit` or in the first of UNITS that it is printed in.

    Raises BadInput for an unknown id, and for a unit in which the source does not print every part.
    """
    own, offered = rows(trace_id), units(trace_id)
    if unit is None and offered:
        unit = offered[0]
    if unit not in offered:
        what = f"{trace_id} is not printed in {unit}" if unit else f"{trace_id} prints no unit for all of its parts"
        raise BadInput(FILE, what, f"it has {', '.join(offered) or 'none'}")
    settings = own[0].params
    total = _total(own, unit)
    whole = float(total.printed(unit)) if total else (100.0 if unit == "%" else None)
    of_wall = total is None or "wall" in total.kernel_name.lower()
    parts: list[Part] = []
    nested: list[Part] = []
    for row in own:
        if row.level == "total" or not row.printed(unit) or (row.category in NO_PART and not of_wall):
            continue  # idle time is no part of a total of kernel time
        (parts if row.level == "macro" else nested).append(_part(row, unit, whole))
    shown = ("npl", "npp", "ntg", "ctx", "arm", "tokens", "clients")
    words = [own[0].engine, own[0].model, own[0].phase, *(f"{k} {v}" for k, v in settings.items() if k in shown)]
    return Breakdown(
        id=trace_id,
        title=", ".join(words),
        unit=unit,
        parts=tuple(parts),
        nested=tuple(nested),
        total=whole,
        total_error=digit_error(total.printed(unit)) if total else 0.0,
        denominator=total.kernel_name if total else ("the source's 100 %" if unit == "%" else "sum of the parts"),
        evidence="estimate" if settings.get("estimate") else "recorded",
        invalid=str(settings.get("invalid", "")),
        source=own[0].source,
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
    scale = 1e3 * count
    sums: dict[str, list[float]] = {}
    kernels: dict[str, float] = {}
    for name in totals_by_name(trace):
        own = sums.setdefault(rules.category(name.name), [0.0, 0.0])
        own[0] += name.sum_ns
        own[1] += name.count
        kernels[name.name] = name.sum_ns / scale
    rest = {name: value for name, value in kernels.items() if rules.category(name) == OTHER}
    moved: list[tuple[str, Activity]] = [
        (f"{MEMCPY} {COPY_KINDS[kind]}", trace.memcpy.take(trace.memcpy.kind == kind))
        for kind in sorted({int(k) for k in trace.memcpy.kind})
    ]
    for label, activity in (*moved, (MEMSET, trace.memset), (OPAQUE, trace.graphs)):
        if len(activity):
            sums[label] = [float(activity.duration_ns.sum()), float(len(activity))]
    every = [Part(c, ns / scale, count=n / count) for c, (ns, n) in sorted(sums.items(), key=lambda i: -i[1][0])]
    parts, nested = ([p for p in every if rules.busy(p.category) == busy] for busy in (True, False))
    sum_ns = sum(ns for category, (ns, _) in sums.items() if rules.busy(category))
    warnings, span_ns, denominator = list(trace.warnings), sum_ns, "sum of the kernels (no timeline)"
    if trace.timeline:
        found = intervals.devices(trace, rules.waits(trace.names))
        span_ns = len(found) * intervals.window(trace, found).ns
        busy_ns = sum(d.busy.ns for d in found)
        parts += [Part(IDLE, (span_ns - busy_ns) / scale), Part(OVERLAP, (busy_ns - sum_ns) / scale)]
        denominator = f"time span of {len(found)} device{'s'[: len(found) != 1]}"
    warnings += filter(None, [categories.other_warning(rest, sum_ns / scale, "us" + (f"/{per}" if per else ""))])
    if len(trace.graphs):
        kernels = {}
        warnings.append(
            f"{len(trace.graphs)} graph launches are opaque: {OPAQUE} is not split and kernels are not compared"
        )
    return Breakdown(
        id=trace.source,
        title=f"{trace.tool} {trace.tool_version}".strip() + (f", {trace.window_label}" if trace.window_label else ""),
        unit=f"us/{per}" if per else "us",
        parts=tuple(parts),
        nested=tuple(nested),
        total=span_ns / scale,
        denominator=denominator,
        kernels=kernels,
        source=trace.source,
        warnings=tuple(warnings),
    )
