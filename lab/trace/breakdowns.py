"""A breakdown: time by category with its denominator, from a recorded table or from a trace, in one shape.

A breakdown is only worth something when its parts add up to a stated whole, so it carries both: what the source calls
the total (or the device's time span, for a trace), and the parts; what is left over is "not attributed" and never
dropped. In a trace nothing is left over by construction: summed durations, minus what ran at the same time (overlap),
plus idle time, equal the span.

Recorded tables (data/recorded/breakdowns.csv) were printed by people with few digits, and some print a share where a
time is wanted. Every recorded part therefore carries half a unit of its last printed digit as its error; a time that
is share times total carries the share's error. Rows of the level "sub" lie inside a "macro" row and are kept apart.

Given up: converting between tokens and steps, which needs the batch; both are read where a table prints both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput, nearest
from lab.card import recorded
from lab.trace import categories, intervals
from lab.trace.categories import IDLE, MEMCPY, MEMSET, OPAQUE, OTHER, Rules
from lab.trace.model import COPY_KINDS, Trace, totals_by_name

FILE = recorded.FOLDER / "breakdowns.csv"
COLUMNS = (
    *("id", "trace_id", "engine", "device", "model", "phase", "params", "category", "level", "kernel_name"),
    *("us_per_token", "ms_per_step", "share_pct", "instances", "window_ms", "avg_us", "profile_mode", "source"),
)
# unit -> the column of a recorded table that is in it. Steps come first: where a table has both, the sources printed
# the step and the time per token was computed from it, with digits that nobody measured.
UNITS = {"ms/step": "ms_per_step", "us/token": "us_per_token", "ms": "window_ms", "%": "share_pct"}
LEVELS = ("macro", "sub", "fine", "total", "meta")
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


@cache
def _table() -> Mapping[str, list[dict[str, str]]]:
    return read_table(FILE)


def read_table(path: Path) -> dict[str, list[dict[str, str]]]:
    """The rows of a table of recorded breakdowns by trace id; raises BadInput for an unknown level or doubled id."""
    found: dict[str, list[dict[str, str]]] = {}
    seen: set[str] = set()
    for row in recorded.read_table(path, COLUMNS):
        if row["level"] not in LEVELS:
            raise BadInput(path, f'{row["id"]}: level = "{row["level"]}"', nearest(row["level"], LEVELS))
        if row["id"] in seen:
            raise BadInput(path, f'id "{row["id"]}" appears twice', "give the second one its own id")
        seen.add(row["id"])
        found.setdefault(row["trace_id"], []).append(row)
    return found


def recorded_ids() -> list[str]:
    """The ids of the recorded breakdowns."""
    return list(_table())


def rows(trace_id: str) -> list[dict[str, str]]:
    """A recorded breakdown's rows as printed; raises BadInput naming the nearest id."""
    if trace_id not in _table():
        raise BadInput(FILE, f'no recorded breakdown has the id "{trace_id}"', nearest(trace_id, _table()))
    return _table()[trace_id]


def units(trace_id: str) -> list[str]:
    """The units in which every part of a recorded breakdown is printed."""
    parts = [r for r in rows(trace_id) if r["level"] == "macro"] or rows(trace_id)
    return [unit for unit, column in UNITS.items() if all(r[column] for r in parts)]


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
    column = UNITS[unit]
    first = own[0]
    params = json.loads(first["params"] or "{}")
    total = _total(own, column)
    whole = float(total[column]) if total else (100.0 if unit == "%" else None)
    of_wall = total is None or "wall" in total["kernel_name"].lower()
    parts: list[Part] = []
    nested: list[Part] = []
    for row in own:
        if row["level"] == "total" or not row[column]:
            continue
        if row["category"] in NO_PART and not of_wall:
            continue  # idle time is no part of a total of kernel time
        part = _part(row, column, whole)
        (parts if row["level"] == "macro" else nested).append(part)
    denominator = total["kernel_name"] if total else ("the source's 100 %" if unit == "%" else "sum of the parts")
    words = [first["engine"], first["model"], first["phase"], *(f"{k} {v}" for k, v in _plain(params))]
    return Breakdown(
        id=trace_id,
        title=", ".join(words),
        unit=unit,
        parts=tuple(parts),
        nested=tuple(nested),
        total=whole,
        total_error=digit_error(total[column]) if total else 0.0,
        denominator=denominator,
        evidence="estimate" if params.get("estimate") else "recorded",
        invalid=str(params.get("invalid", "")),
        source=first["source"],
    )


def _total(own: Iterable[dict[str, str]], column: str) -> dict[str, str] | None:
    """The row that states the whole: the wall-clock one where there are several."""
    totals = [r for r in own if r["level"] == "total" and r[column]]
    wall = [r for r in totals if "wall" in r["kernel_name"].lower()]
    return max(wall or totals, key=lambda r: float(r[column]), default=None)


def _part(row: dict[str, str], column: str, whole: float | None) -> Part:
    value, error = float(row[column]), digit_error(row[column])
    share = row["share_pct"]
    if column != "share_pct" and share and whole and abs(float(share) / 100 * whole - value) <= 2 * error:
        error = max(error, digit_error(share) / 100 * whole)  # the time was computed from the share
    # Overlap is printed as a positive number and shortens the step.
    sign = -1.0 if row["category"] == OVERLAP else 1.0
    count = float(row["instances"]) if row["instances"] else None
    return Part(row["category"], sign * value, error, row["kernel_name"], count)


def _plain(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in params.items() if k in ("npl", "npp", "ntg", "ctx", "arm", "tokens", "clients")]


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
    rest: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for name in totals_by_name(trace):
        category = rules.category(name.name)
        own = sums.setdefault(category, [0.0, 0.0])
        own[0] += name.sum_ns
        own[1] += name.count
        kernels[name.name] = name.sum_ns / scale
        if category == OTHER:
            rest[name.name] = name.sum_ns / scale
    for kind in sorted({int(k) for k in trace.memcpy.kind}):
        chosen = trace.memcpy.take(trace.memcpy.kind == kind)
        sums[f"{MEMCPY} {COPY_KINDS[kind]}"] = [float(chosen.duration_ns.sum()), float(len(chosen))]
    for label, rows_of in ((MEMSET, trace.memset), (OPAQUE, trace.graphs)):
        if len(rows_of):
            sums[label] = [float(rows_of.duration_ns.sum()), float(len(rows_of))]
    parts = [Part(c, ns / scale, count=n / count) for c, (ns, n) in sorted(sums.items(), key=lambda i: -i[1][0])]
    parts, nested = [p for p in parts if rules.busy(p.category)], [p for p in parts if not rules.busy(p.category)]
    found: list[intervals.Device] = []
    sum_ns = sum(ns for category, (ns, _) in sums.items() if rules.busy(category))
    warnings = list(trace.warnings)
    span_ns = sum_ns
    if trace.timeline:
        waiting = rules.waits(trace.names)
        found = intervals.devices(trace, waiting)
        span_ns = len(found) * intervals.window(trace, found).ns
        busy_ns = sum(d.busy.ns for d in found)
        parts += [Part(IDLE, (span_ns - busy_ns) / scale), Part(OVERLAP, (busy_ns - sum_ns) / scale)]
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
        denominator=f"time span of {len(found)} device{'s'[: len(found) != 1]}"
        if trace.timeline
        else "sum of the kernels (no timeline)",
        kernels=kernels,
        source=trace.source,
        warnings=tuple(warnings),
    )
