"""`lab bench FAMILY CANDIDATE --shape M=1..64 N=5120 K=6144`: a candidate beside its rivals, without a card.

The arms are checked, timed together and checked again as for a card (lab/bench/measure.py). Nothing is judged, and rows
are kept only where --out says: a question that matters is worth a card, whose gate was there before the rows.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from lab.base import console, devices, progress
from lab.base.console import show
from lab.base.errors import BadInput
from lab.bench import measure
from lab.card import phases
from lab.check import families
from lab.judge import evidence
from lab.place import ceilings, roofline
from lab.row.records import Measurement, Role

MOST = 64  # shapes
CURVES = 7  # that a plot holds


def run(arguments: Namespace) -> int:
    """Print a table, a line a shape; 1 when the candidate is not timed at one of them."""
    family, told = families.bare(arguments.family), measure.described(arguments.family)
    for name in (arguments.candidate, *arguments.against):
        families.refuse_unknown(family.name, name, told.configs, told.unavailable)
    names = shapes(arguments.shape)
    workloads = [family.workload(name) for name in names]
    rivals = against(told, arguments.candidate, arguments.against)
    axis = next((a for a in workloads[0].axes if len({w[a] for w in workloads}) == len(workloads) > 1), "")
    if arguments.svg and not axis:
        raise BadInput("--svg", "needs one axis with a range", "give one, as in --shape M=1..64")
    device = measure.require_gpu("lab bench")
    settings = measure.Settings(
        seconds=arguments.seconds, placements=arguments.placements, processes=min(2, arguments.placements),
        l2=arguments.l2,
    )  # fmt: skip
    control = (rivals or [arguments.candidate])[0]
    asked = phases.ungated("bench", family.name, control, arguments.candidate, tuple(names), Path("lab bench"))
    arms, precision = _arms(arguments.candidate, rivals), told.precisions[arguments.candidate]
    items = [measure.Item(asked, w, arms, False, family.cost(w, precision).bytes) for w in workloads]
    rows: dict[str, list[Measurement]] = {}
    with tempfile.TemporaryDirectory() as scratch, progress.shown(len(items), quiet=arguments.json) as shown:
        for done in measure.measure(items, settings, arguments.out or Path(scratch) / "bench", device, shown.tell):
            shown.advance()
            rows[done[0].workload_id] = done
    found = [rows[name] for name in names if name in rows]
    every = list(itertools.chain.from_iterable(found))
    show(arguments.json, lambda: list(map(_value, every)), lambda: render(found, arguments.candidate, device, settings))
    if arguments.svg:
        _plot(arguments.svg, found, axis, f"{family.name} on {device.name}", device)
    return int(any(r.status != "ok" for r in every if r.name == arguments.candidate))


def shapes(words: Sequence[str]) -> list[str]:
    """Every shape of axes such as "M=1..64" (doubled from 1 on, and 64) or "M=1,8,33"; raises BadInput."""
    choices = []
    for word in words:
        axis, _, text = word.partition("=")
        values = text.split(",")
        if ".." in text:
            low, high = (int(end) if re.fullmatch(r"[1-9][0-9]{0,8}", end) else 0 for end in text.split("..", 1))
            if not 0 < low < high:
                raise BadInput("--shape", f'"{word}" is no range', "write it as in M=1..64")
            values = [str(low << n) for n in range(32) if low << n < high] + [str(high)]
        if not axis or not all(values) or len(set(values)) != len(values):
            raise BadInput("--shape", f'"{word}" is no AXIS=VALUE', "write it as in N=5120, M=1,8,33 or M=1..64")
        choices.append([f"{axis}={value}" for value in values])
    found = [" ".join(one) for one in itertools.product(*choices)]
    if len(found) > MOST:
        raise BadInput("--shape", f"{len(found)} shapes", f"ask for at most {MOST}")
    return found


def against(told: families.Launches, candidate: str, named: Sequence[str]) -> list[str]:
    """The rivals: those named, else every library of the family, else its other candidates."""
    if candidate in named or len(set(named)) != len(named):
        raise BadInput("--against", f"{', '.join(named)} beside {candidate}", "name each rival once")
    others = [name for name in told.configs if name != candidate]
    return list(named) or [name for name in others if name in told.peers] or others


def _arms(candidate: str, rivals: Sequence[str]) -> tuple[tuple[Role, str], ...]:
    if not rivals:
        return (("control", candidate),)
    return (("control", rivals[0]), ("candidate", candidate), *(("peer", name) for name in rivals[1:]))


def _value(row: Measurement) -> dict[str, object]:
    keys = ("workload_id", "workload", "arm", "name", "status", "message", "time_us", "config", "placements")
    return {key: getattr(row, key) for key in keys}


def render(found: Sequence[Sequence[Measurement]], candidate: str, device: devices.Device, s: measure.Settings) -> str:
    """A line a shape: each arm's time, a rival's with what the candidate's change against it is, and the floor."""
    names = list(dict.fromkeys([candidate, *(row.name for rows in found for row in rows)]))
    lines = []
    for rows in found:
        by = {row.name: row for row in rows}
        mine = by[candidate]
        cells = []
        for name in names:
            row = by.get(name)
            change = evidence.change_pct(row, mine) if row and name != candidate else None
            told = "-" if row is None else row.status if row.time_us is None else f"{row.time_us:.2f}"
            cells.append(told + (f" ({change[0]:+.1f} %)" if change else ""))
        lines.append((mine.workload_id, *cells, _floor(device, mine)))
    head = f"us a call on {device.name}, {s.l2} L2, {s.placements} placements; in brackets {candidate}'s change\n"
    why = {f"{row.name}: {row.status}: {row.message}" for rows in found for row in rows if row.time_us is None}
    last = [*sorted(why), "kept nowhere and judged by nobody: `lab new card` makes a question of it"]
    widths = (max(5, *(len(line[0]) for line in lines)), *(max(18, len(n)) for n in names), 22)
    return head + console.table(("shape", *names, "floor"), lines, widths) + "\n" + "\n".join(last)


def _floor(device: devices.Device, row: Measurement) -> str:
    """The floor of the row's work: of the datasheet, else of the measured ceilings, else that nobody knows it."""
    if row.flops is None or row.bytes is None or row.pipe is None:
        return "-"
    if device.knows(row.pipe):
        return f"{roofline.of_row(device, row).floor_us:.2f}"
    seen = ceilings.floor_of(row)
    return "peaks unknown" if seen is None else f"{seen:.2f} by ceilings"


def _plot(path: Path, found: Sequence[Sequence[Measurement]], axis: str, title: str, device: devices.Device) -> None:
    from lab import draw

    curves: dict[str, list[tuple[int, float]]] = {}
    floor = []
    for row in itertools.chain.from_iterable(found):
        if row.time_us is not None:
            curves.setdefault(row.name, []).append((int(row.workload[axis]), row.time_us))
            if row.arm == "candidate" and device.knows(row.pipe):
                floor.append((int(row.workload[axis]), roofline.of_row(device, row).floor_us))
    fastest = sorted(curves, key=lambda name: min(us for _, us in curves[name]))[:CURVES]
    draw.save(draw.times({n: curves[n] for n in fastest}, title, axis, "us a call", floor=floor), path)
