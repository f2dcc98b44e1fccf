"""`lab predict`: what a step is expected to take, and a lever to change, from the kernels that it launches.

kernels/<family>/calls.py says which kernels of other families an arm launches, how often. Each is timed by the newest
cold row of just that problem, else by the router's time model with its interval; what no family measures, by its floor
at the measured ceilings and its launches (the constants below). What two arms share cancels, so the interval of a
change is that of the calls in which they differ. A row that a cap on the clock slowed may be shorter in a step, by the
ratio of the clocks. An expectation is written before a card is measured and graded by it afterwards.

On a device without rows of a kernel its time is carried over from the one with most: only the floor changes, by the
ceilings of both. What a kernel takes beyond its floor (latency, its instructions, launches) is the same where the
multiprocessors and their clock are, as on an H100 and an H200; elsewhere the interval says too little.
"""

from __future__ import annotations

import contextlib
import importlib
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.base import devices
from lab.base.console import show, table
from lab.base.errors import BadInput
from lab.card import phases
from lab.check import families
from lab.judge import evidence
from lab.place import ceilings, roofline
from lab.row import store
from lab.row.records import Measurement
from lab.study import choices
from lab.trace import breakdowns, windows
from lab.trace.categories import Rules
from lab.trace.model import Trace, interned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROCESS = 0.02  # by which the same kernel differs from process to process on an H200, at most
SLACK = 1.0, 1.15, 1.5  # times the floor that a library product takes: least, expected, most
UNTIMED = 1.0, 1.3, 2.5  # the same of a family's kernel without a row and without a model
MOVED = 0.25, 1.0, 1.5  # the same of what only moves bytes, which may lie in the L2 cache
SMALL_US = 0.3, 1.5, 4.0  # that a launch adds in a captured chain: least (the gap of a graph), expected, most
Counts = dict[str, tuple[Any, float]]
# Of the host for a launch from Python, where a step is not captured: in the eager steps of step-lp7 and step-im3 54 to
# 78 us. A first guess of 4 to 25 us, from before they were measured, missed all of them.
HOST_US = 50.0, 70.0, 80.0
HOST = "waiting for the host"  # the part of a change


@dataclass(frozen=True)
class Time:
    """Expected time in us with the interval that it lies in, and what it comes from."""

    us: float
    low: float
    high: float
    how: str = ""

    def __add__(self, other: Time) -> Time:
        return Time(self.us + other.us, self.low + other.low, self.high + other.high)

    def times(self, count: float) -> Time:
        """So many of them; a negative count takes them away, and turns the interval over."""
        low, high = sorted((count * self.low, count * self.high))
        return Time(count * self.us, low, high, self.how)


@dataclass(frozen=True)
class Line:
    """A change that a card asks about: expected and measured, in % of the control's step; None before it was measured.

    control: the arm, or the workload at which the candidate itself stands for it.
    control_us: the control's expected step. parts: what the change is made of, us by part.
    """

    card: str
    workload: str
    control: str
    candidate: str
    control_us: float
    change_pct: float
    low_pct: float
    high_pct: float
    parts: Mapping[str, float]
    measured_pct: float | None = None

    @property
    def inside(self) -> bool | None:
        """Whether what was measured lies in the interval; None before it was measured."""
        return None if self.measured_pct is None else self.low_pct <= self.measured_pct <= self.high_pct


def calls_of(family: str) -> Any:
    """The module kernels/<family>/calls.py; BadInput for a family that is no composition."""
    if not families.composes(family):
        remedy = "only what is made of others' kernels is predicted"
        raise BadInput(families.FOLDER / family, "calls.py is missing", remedy)
    return importlib.import_module(f"kernels.{family}.calls")


def time_of(call: Any, device: devices.Device) -> Time:
    """One call's time. Raises BadInput where neither a row nor the router knows it, and the call names no cost."""
    if not call.family:
        return _of_floor(call, device, SLACK if call.cost.flops else MOVED)
    rows = _rows(device.id, call.family)
    if row := _nearest(rows, call.name, call.axes):
        return _of_row(row)
    if source := _source(device.id, call.family):
        return _carried_over(call, devices.get(source), device)
    asks = choices.router(call.family)
    try:
        asked, _ = asks.asked({axis: str(value) for axis, value in call.axes.items()})
        choice = choices.choose(asks, asked, device, (call.precision,) if call.precision else ())
    except ValueError as problem:
        if call.cost.bytes:
            return _of_floor(call, device, UNTIMED)
        raise BadInput(f"lab predict: {call.family}", str(problem), "measure that call by itself") from None
    name = call.name if call.name in choice.times_us else choice.candidate
    if row := _nearest(rows, name, call.axes):
        found = _of_row(row)
    elif (fitted := choice.fitted.get(name)) and fitted.shown:
        found = Time(fitted.us, fitted.low, fitted.high, f"{name}, by the time model")
    elif call.cost.bytes:
        return _of_floor(call, device, UNTIMED)
    else:
        what = f"{choice.candidate} was not measured at {dict(call.axes)}"
        raise BadInput(f"profiles/{device.id}", what, f"measure it, or `lab routes {call.family} --calibrate`")
    if call.name not in ("", name):  # a launch form that was not timed there: at best a fifth faster
        found = replace(found, low=0.8 * found.low, how=f"{found.how}, launched otherwise")
    return found


@cache
def _source(device: str, family: str) -> str:
    """The device with most rows of a family, "" where that is this one or this one is calibrated itself."""
    rows = store.rows(family=family)
    if any(row.calibration and row.device == device for row in rows):
        return ""
    most = Counter(row.device for row in rows).most_common(1)
    return most[0][0] if most and most[0][0] != device else ""


def _carried_over(call: Any, source: devices.Device, device: devices.Device) -> Time:
    from kernels.routing import CARRIED

    there, cost, asks = time_of(call, source), call.cost, choices.router(call.family)
    with contextlib.suppress(ValueError):  # no workload of the family: the call's own cost counts
        asked, _ = asks.asked({axis: str(value) for axis, value in call.axes.items()})
        name = call.name or choices.choose(asks, asked, source, (call.precision,) if call.precision else ()).candidate
        cost = families.bare(call.family).cost(asked, families.load(call.family).candidate(name).precision)
    low, us, high = (carried(x, cost, source, device) for x in (there.low, there.us, there.high))
    return Time(us, low * (1 - CARRIED), high * (1 + CARRIED), f"{there.how} on {source.id}")


def carried(us: float, cost: Any, source: devices.Device, device: devices.Device) -> float:
    """What takes `us` on one device, on another, us: the router's rule, with floors at measured ceilings."""
    from kernels import routing

    return routing.carried(us, floor_us(source, cost), floor_us(device, cost))


def _of_floor(call: Any, device: devices.Device, shares: tuple[float, float, float]) -> Time:
    floor = floor_us(device, call.cost)
    low, us, high = (share * floor + call.launches * more for share, more in zip(shares, SMALL_US, strict=True))
    return Time(us, low, high, "floor and launches")


def _of_row(row: Measurement) -> Time:
    """Its time, which a cap on the clock may have made longer than the same is in a step, but not than its floor."""
    from kernels.common import Cost

    us, device = row.time_us or 0.0, devices.get(row.device)
    low = us * (1 - PROCESS)
    if cap := evidence.slowed(device, row):
        floor = floor_us(device, Cost(row.flops or 0.0, row.bytes or 0.0, row.pipe or "bf16"))
        low = max(low / cap.usual, min(low, floor))
    return Time(us, low, us * (1 + PROCESS), f"{row.name} {row.workload_id}")


def floor_us(device: devices.Device, cost: Any) -> float:
    """Of a cost at the device's measured ceilings; a pipe without one counts at the datasheet's peak."""
    us = ceilings.floor_us(device.id, cost.flops, cost.bytes, cost.pipe)
    if us is None:
        moved = ceilings.floor_us(device.id, 0.0, cost.bytes, "bf16")
        if moved is None:
            raise BadInput(f"profiles/{device.id}", "its ceilings were not measured", "`lab measure --ceilings` there")
        us = max(moved, roofline.place(device, cost.flops, cost.bytes, cost.pipe).compute_us)
    return us


@cache
def _rows(device: str, family: str) -> tuple[Measurement, ...]:
    rows = store.rows(device, family=family)
    return tuple(r for r in rows if r.time_us and r.l2 == "cold" and r.timer == "graph")


def _nearest(rows: Iterable[Measurement], name: str, axes: Mapping[str, int | str]) -> Measurement | None:
    """The newest row of a candidate at these axes, a calibration's where no card has one.

    Of several problems that have them, the one with fewest others.
    """
    fit = [r for r in rows if r.name == name and axes.items() <= {**r.workload}.items()]
    newest = sorted(fit, key=lambda r: r.run, reverse=True)
    return min(newest, key=lambda r: (len(r.workload), r.calibration), default=None)


def expected(family: str, workload: str, name: str, device: devices.Device, timer: str = "graph") -> Time:
    """The whole of an arm's step. timer: "events" launches from the host what does not replay itself."""
    total = _sum(_counts(family, workload, name).values(), device)
    return hosted(family, workload, name, total) if timer == "events" else total


def _sum(counts: Iterable[tuple[Any, float]], device: devices.Device) -> Time:
    total = Time(0.0, 0.0, 0.0)
    for call, times in counts:
        total += time_of(call, device).times(times)
    return total


def hosted(family: str, workload: str, name: str, step: Time) -> Time:
    """The step as long as its host takes, where that launches one by one and is the slower of the two."""
    launches = calls_of(family).host_launches(families.bare(family).workload(workload), name)
    low, us, high = (launches * each if launches > 1 else 0.0 for each in HOST_US)
    return Time(max(step.us, us), max(step.low, low), max(step.high, high), step.how)


def _counts(family: str, workload: str, name: str) -> Counts:
    """What a call is, in words -> the call and how often it is made.

    Launches, and bytes that are only moved, are counted one by one, so that those which two arms share cancel.
    """
    try:
        made = calls_of(family).calls(families.bare(family).workload(workload), name)
    except KeyError:
        raise BadInput(family, f'"{name}" is no configuration', "predict a candidate that calls.py knows") from None
    parted = [call for call in made if call.family]
    for call in (call for call in made if not call.family):
        one, byte = replace(call.cost, flops=0.0, bytes=0.0), replace(call.cost, bytes=1.0)
        parted.append(replace(call, part="launches", times=call.times * call.launches, cost=one, launches=1))
        moved = replace(call, times=call.times * call.cost.bytes, cost=byte, launches=0)
        parted.append(replace(call, launches=0) if call.cost.flops else moved)
    found: Counts = {}
    for call in parted:
        one = replace(call, times=0, axes=dict(sorted(call.axes.items())))
        key = str(replace(one, cost=None) if call.family else one)
        found[key] = call, found.get(key, (call, 0.0))[1] + call.times
    return found


def change(
    family: str, control: tuple[str, str], candidate: tuple[str, str], device: devices.Device, timer: str = "graph"
) -> tuple[Time, Time, dict[str, float]]:
    """(the control's step, the candidate's less it, that by part in us) of two (workload, name)."""
    before, after = _counts(family, *control), _counts(family, *candidate)
    difference, parts = Time(0.0, 0.0, 0.0), dict[str, float]()
    for key in {**before, **after}:
        call = (before.get(key) or after[key])[0]
        was, now = (side[key][1] if key in side else 0.0 for side in (before, after))
        if now != was:
            one = time_of(call, device).times(now - was)
            difference += one
            parts[call.part] = parts.get(call.part, 0.0) + one.us
    base = _sum(before.values(), device)
    if timer == "events":
        eager, other = hosted(family, *control, base), hosted(family, *candidate, base + difference)
        waited = other.us - eager.us - difference.us
        if waited:  # one of them is the host's and the other the device's, so that nothing cancels
            difference = Time(other.us - eager.us, other.low - eager.high, other.high - eager.low)
        return eager, difference, {**parts, HOST: waited}
    return base, difference, parts


def lines(card: phases.Card, device_id: str = "") -> list[Line]:
    """The changes of time that a card asks about, on its own device or another; BadInput where one cannot be expected.

    The candidate and the arms beside it against the control, at each workload; or the candidate at one workload against
    another, where the gate compares workloads.
    """
    device, timer = devices.get(device_id or card.device), card.measure.timer or "graph"
    across = [((c.against, card.candidate), (c.workload, card.candidate)) for c in card.gate.require if c.against]
    arms = (*card.beside, card.candidate)
    pairs = across or [((w, card.control), (w, arm)) for w in card.workloads for arm in arms]
    rows = store.rows(device.id, card.id)
    told = evidence.pairs(rows)
    found = []
    for control, candidate in pairs:
        if _refused(card.family, *candidate, device):
            continue
        base, by, parts = change(card.family, control, candidate, device, timer)
        bounds = [100 * part / whole for part in (by.low, by.high) for whole in (base.low, base.high)]
        if parts.get(HOST):  # the waiting that goes away is a part of the control's step
            bounds = [100 * by.low / base.high, 100 * by.high / base.low]
        seen = evidence.change_alone(_judged(told, rows, *control), _judged(told, rows, *candidate))
        against = control[0 if across else 1]
        # What a candidate takes away may seem to be the whole step: it takes what its own calls take at least.
        least = 100 * (expected(card.family, *candidate, device, timer).low / base.high - 1)
        shares = 100 * by.us / base.us, max(min(bounds), least), max(bounds)
        found.append(Line(card.id, candidate[0], against, candidate[1], base.us, *shares, parts, seen))
    return found


def _refused(family: str, workload: str, name: str, device: devices.Device) -> bool:
    from kernels.common import described_for

    loaded = families.load(family)
    with described_for(device.capability):
        return bool(loaded.candidate(name).refuses(loaded.workload(workload)))


def _judged(
    told: Mapping[str, evidence.Pair], every: Iterable[Measurement], workload: str, name: str
) -> Measurement | None:
    """An arm's row in the run that is judged at a workload."""
    both = [r for r in told.get(workload, ()) if r]
    runs = {r.run for r in both}
    return next((r for r in (*both, *every) if (r.workload_id, r.name) == (workload, name) and r.run in runs), None)


def cards() -> list[phases.Card]:
    """Those of a GPU's time whose family is made of other families' kernels, and whose arms are still there."""
    made = [c for c in phases.cards().values() if c.family and families.composes(c.family)]
    return [card for card in made if card.measure.timer != "host" and not card.adopted]


def by_part(trace: Trace, pattern: str, family: str, workload: str) -> breakdowns.Breakdown | None:
    """Where the time of one step went, us: of the ranges that `pattern` names the one of median span, node by node.

    Its parts are those of the family's calls.py, copies and idle time between nodes; they add up to the span. Where
    kernels of a chain are there at once the time is the first one's: the others, launched programmatically, wait for it
    or fetch what no kernel writes. None for a family that is no composition. Raises BadInput for a pattern without a
    range, and for a trace of something else than that family's step.
    """
    if not families.composes(family):
        return None
    count = windows.by_nvtx(trace, pattern).steps or 1
    every = [windows.by_nvtx(trace, pattern, nth + 1) for nth in range(int(count))]
    step = sorted(every, key=lambda one: int(one.kernels.end_ns.max() - one.kernels.start_ns.min()))[len(every) // 2]
    rows = step.kernels
    order = np.argsort(rows.start_ns, kind="stable")
    try:
        names = [step.names[i] for i in rows.name[order]]
        told = calls_of(family).launched(families.bare(family).workload(workload), names)
    except ValueError as problem:
        raise BadInput(trace.source, str(problem), "profile the card again: `lab profile`") from None
    found, names = interned(told)
    codes = np.empty_like(rows.name)
    codes[order] = found
    ends = np.maximum.accumulate(rows.end_ns[order])
    ahead = np.concatenate([ends[:1] * 0, ends[:-1]])
    begins = np.empty_like(rows.start_ns)
    begins[order] = np.minimum(np.maximum(rows.start_ns[order], ahead), rows.end_ns[order])
    parted = replace(step, names=names, kernels=replace(rows, name=codes, start_ns=begins), launched={})
    whole = breakdowns.from_trace(parted, Rules((), {}, {name: name for name in names}), per="step")
    whole = replace(whole, parts=tuple(p for p in whole.parts if p.value or p.category != breakdowns.OVERLAP))
    gaps = rows.start_ns[order][1:] - ends[:-1]
    at = int(gaps.argmax()) if len(gaps) else 0
    widest = f"the widest gap, {gaps[at] / 1e3:.2f} us, is ahead of {step.names[rows.name[order][at + 1]]}"
    return replace(whole, warnings=(*whole.warnings, widest) if len(gaps) else whole.warnings)


def rendered(found: Iterable[Line]) -> str:
    """A table of each card and arm under their names, at most 100 columns wide."""
    header = ("workload", "control ms", "expected %", "within", "measured %")
    groups: dict[str, list[tuple[str, ...]]] = {}
    for line in found:
        seen = "-" if line.measured_pct is None else f"{line.measured_pct:+.1f}" + ("" if line.inside else " outside")
        numbers = f"{line.control_us / 1e3:.2f}", f"{line.change_pct:+.1f}"
        cells = (line.workload, *numbers, f"{line.low_pct:+.1f} to {line.high_pct:+.1f}", seen)
        groups.setdefault(f"{line.card}, {line.candidate}", []).append(cells)
    widths = [max(map(len, column)) for column in zip(header, *chain(*groups.values()), strict=True)]
    lines = table(header, (), widths).splitlines()
    for arm, rows in groups.items():
        lines += [arm, *table(header, rows, widths).splitlines()[2:]]
    return "\n".join(lines)


def picture(found: Iterable[Line]) -> Figure:
    """The lines as intervals, with what was measured."""
    from lab import draw

    rows = [
        (f"{one.card} {one.candidate} {one.workload}", (one.low_pct, one.change_pct, one.high_pct), one.measured_pct)
        for one in found
    ]
    return draw.intervals(rows, "Expected and measured", "change of the step, %; dot: measured, square: outside")


def run(arguments: Namespace) -> int:
    """`lab predict [CARD...]`: expected against measured of the cards named, else of all that can be predicted."""
    named = [phases.card(name) for name in arguments.phase] or cards()
    found = [line for card in named for line in lines(card, arguments.device or "")]
    show(arguments.json, lambda: [{**asdict(x), "inside": x.inside} for x in found], lambda: rendered(found))
    if arguments.out:
        from lab import draw

        draw.save(picture(found), arguments.out)
    return 0
