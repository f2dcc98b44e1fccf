"""`lab routes FAMILY`: the router's table, and with --shape the choice for one shape, as a user would get it.

The table has a line for every shape and value of the routed axis at which at least two candidates were timed in one
run. It takes the newest such run, and from older runs the candidates that the newer did not time, where an arm common
to both took the same within JOIN. Only rows that passed their checks and were taken from a cold L2 count. Two runs of
one commit in which the same candidate, launched the same way on the same workload, differs by more than AGREE are
refused instead of averaged: one of them is an artefact, and a policy tuned on an artefact was one of the recorded
accidents (a path 4x slower for as long as nobody had initialised a library).

What a family routes by, and who may compete, its kernels/<family>/route.py says (ROUTER). Arms that show a defect or a
single change never compete; some precisions only where they are asked for by name (`--precision`). Both are marked.
A device without rows gets the roofline's prediction of every measured shape, which says that it is one.
"""

from __future__ import annotations

import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.base import devices
from lab.base.console import print_json
from lab.base.errors import BadInput, shown
from lab.check import families
from lab.row import store
from lab.row.records import Measurement
from lab.study import route_choices
from lab.study.route_choices import OWN, SAME, entry, router

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.routing import Router, Table

AGREE = 1.15  # runs of one commit of the same thing stayed within 1.02 on an H200; a power cap moves up to 1.1
JOIN = 1.05  # how far an arm of two runs may differ for the older one to add what the newer one did not time
Place = tuple[tuple[tuple[str, int], ...], int]  # shape, value of the routed axis
Groups = dict[Place, dict[str, dict[str, Measurement]]]  # run -> candidate -> row, at each place


def table(family: str, device: str, rows: Iterable[Measurement] | None = None) -> Table:
    """The router's table of a family on a device, of the candidates that it may ever route to.

    Raises BadInput when nothing was measured that could be compared, and when two runs contradict each other.
    """
    place = devices.get(device, "--device").id
    known = _made(router(family), place, _groups(router(family), place, rows))
    if known is None:
        raise BadInput(f"profiles/{place}", f"no run timed two candidates of {family} together", "measure a card first")
    return known


def _made(asks: Router, place: str, groups: Groups) -> Table | None:
    from kernels.routing import Point, Table

    every = families.load(asks.family).candidates
    points, runs = [], set()
    for (shape, at), by_run in sorted(groups.items()):
        routed = {run: {n: row for n, row in arms.items() if not every[n].no_route} for run, arms in by_run.items()}
        joined, sources = _joined(routed)
        runs |= sources
        points += [Point(name, shape, at, _us(row)) for name, row in sorted(joined.items())]
    return Table(place, asks.family, asks.axis, tuple(points), "runs " + ", ".join(sorted(runs))) if points else None


def _groups(asks: Router, place: str, rows: Iterable[Measurement] | None) -> Groups:
    """The rows that answer the router's question."""
    candidates = families.load(asks.family).candidates
    names = {name for name, c in candidates.items() if set(c.needs.packages) <= OWN}
    usable = [
        row
        for row in (store.rows(place, family=asks.family) if rows is None else rows)
        if row.status == "ok"
        and row.name in names
        and row.l2 == "cold"
        and not row.profiled
        and all(row.workload.get(axis) == value for axis, value in asks.fixed.items())
        and {asks.axis, *asks.shape} <= set(row.workload)
        # A launch that the kernel refuses by now is no route. Other former ones stay: the newest there is.
        and families.former(row) != "former kernel, refused now"
    ]
    contradiction(usable)
    kinds = [_kind(row, asks) for row in usable]
    usual = max(dict.fromkeys(kinds), key=kinds.count, default=None)
    found: Groups = {}
    for kind, row in zip(kinds, usable, strict=True):
        if kind == usual:
            shape = tuple(sorted((axis, int(row.workload[axis])) for axis in asks.shape))
            runs = found.setdefault((shape, int(row.workload[asks.axis])), {})
            runs.setdefault(row.run, {})[row.name] = row
    return found


def _joined(by_run: Mapping[str, Mapping[str, Measurement]]) -> tuple[dict[str, Measurement], set[str]]:
    """(candidate -> row, runs): the newest run that compared, and what older ones timed besides.

    An older run adds a candidate only where an arm of both took as long as before (JOIN), so that the times compare.
    """
    joined: dict[str, Measurement] = {}
    sources = set()
    for run in sorted(by_run, reverse=True):
        arms = by_run[run]
        ratios = [_us(arms[name]) / _us(joined[name]) for name in arms if name in joined]
        if len(arms) > 1 and (not joined or any(1 / JOIN <= r <= JOIN for r in ratios)):
            more = {name: row for name, row in arms.items() if name not in joined}
            joined |= more
            sources |= {run} if more else set()
    return joined, sources


def _us(row: Measurement) -> float:
    """The time of a row that is ok."""
    return row.time_us or 0.0


def _kind(row: Measurement, asks: Router) -> tuple[Any, ...]:
    """Inputs and every axis but shape and routed one. The kind that most rows have is the router's question.

    Others ask about errors (sums of one sign) or about another product (other weights): their times differ.
    """
    others = {a: v for a, v in row.workload.items() if a not in (asks.axis, *asks.shape, *SAME)}
    return (row.inputs, *sorted(others.items()))


def contradiction(rows: Iterable[Measurement]) -> None:
    """Raise BadInput for the first candidate whose runs of one commit and launch differ by more than AGREE."""
    seen: dict[tuple[Any, ...], list[Measurement]] = {}
    for row in rows:
        commit = row.stated_commit or row.commit
        if commit not in (None, "", "unknown"):
            seen.setdefault((row.name, row.workload_id, row.config, commit), []).append(row)
    for (name, workload, _, commit), same in seen.items():
        low, high = (pick(same, key=_us) for pick in (min, max))
        ratio = _us(high) / _us(low)
        if ratio > AGREE:
            times = f"{low.median_us:.1f} us in {low.run} and {high.median_us:.1f} us in {high.run}"
            raise BadInput(
                f"profiles/{same[0].device}",
                f"{name} on {workload} took {times}, both at commit {commit}: {ratio:.2f}x apart",
                "find out which one is an artefact and measure again before a route is made of it",
            )


def barred(family: str, precisions: Sequence[str] = ()) -> dict[str, str]:
    """The family's candidates that do not compete when these precisions are asked for, and why."""
    asks = router(family)
    return {name: why for name, c in families.load(family).candidates.items() if (why := asks.bars(c, precisions))}


def competing(known: Table, precisions: Sequence[str] = ()) -> Table:
    """The table without the candidates that do not compete when these precisions are asked for."""
    out = barred(known.family, precisions)
    return replace(known, points=tuple(p for p in known.points if p.candidate not in out))


def crossovers(known: Table) -> list[dict[str, Any]]:
    """By shape and measured value of the axis: the fastest, the time of each, and the cost of the worst choice.

    All candidates of the table compete (see `competing`). A candidate without a point there is interpolated as the
    router does it, and named in "interpolated"; one that has points on one side only is not compared.
    """
    from kernels import routing

    found = []
    for shape in dict.fromkeys(p.shape for p in known.points):
        own = [p for p in known.points if p.shape == shape]
        for at in sorted({p.at for p in own}):
            times = routing.times(own, at)
            exact = {p.candidate for p in own if p.at == at}
            found.append(entry(known.axis, dict(shape), at, times) | {"interpolated": sorted(set(times) - exact)})
    return found


def write(known: Table, folder: Path | None = None) -> Path:
    """Write the table where `kernels.routing` reads it; whole or not at all."""
    path = _path(known, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(text(known))
        os.replace(file.name, path)
    except OSError as problem:
        raise BadInput(path, f"cannot be written ({problem.strerror})", "free space or choose another folder") from None
    return path


def _path(known: Table, folder: Path | None = None) -> Path:
    return (folder or store.FOLDER) / known.device / "routes" / f"{known.family}.json"


def text(known: Table) -> str:
    """A table as its file holds it, times to the nanosecond."""
    from kernels import routing

    data = {
        "schema": routing.SCHEMA,
        "device": known.device,
        "family": known.family,
        "axis": known.axis,
        "source": known.source,
        "points": [
            {"candidate": p.candidate, "shape": dict(p.shape), "at": p.at, "median_us": round(p.median_us, 3)}
            for p in known.points
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def _aside(groups: Groups, out: Mapping[str, str]) -> dict[Place, dict[str, float]]:
    """The time of each barred candidate in its newest run at each place."""
    found = {}
    for place, by_run in groups.items():
        newest = {n: _us(row) for run in sorted(by_run) for n, row in by_run[run].items()}
        found[place] = {n: us for n, us in newest.items() if n in out}
    return found


def render(entries: Iterable[Mapping[str, Any]], axis: str, title: str) -> str:
    """A line per point: the fastest first, the others with their cost (~: interpolated); [those not competing]."""
    lines = [title]
    for row in entries:
        shape = " ".join(f"{a}={v}" for a, v in row["shape"].items())
        near = {name: "~" for name in row.get("interpolated", ())}
        best = row["times_us"][row["best"]]
        others = sorted((t, n) for n, t in row["times_us"].items() if n != row["best"])
        costs = ", ".join(f"{n} {near.get(n, '')}{t:.1f} ({t / best:.2f}x)" for t, n in others)
        aside = sorted(row.get("not_competing", {}).items(), key=lambda item: item[1])
        beside = f" [{', '.join(f'{n} {t:.1f}' for n, t in aside)}]" if aside else ""
        line = f"  {shape} {axis}={row[axis]}: {row['best']} {near.get(row['best'], '')}{best:.1f} us"
        lines.append(line + (f"; {costs}" if costs else "") + beside)
    return "\n".join(lines)


def run(arguments: Namespace) -> int:
    """Print the table, and store it with --write; with --shape print the choice for that one."""
    asks, device = router(arguments.family), devices.get(arguments.device, "--device")
    named = route_choices.check_precisions(asks.family, arguments.precision)
    if not arguments.shape:
        return _table(asks, device, named, arguments)
    if arguments.write:
        raise BadInput("--write", "stores the whole table", "leave the shape out")
    told = route_choices.answer(asks.family, device, route_choices.words(arguments.shape), arguments.precision)
    if arguments.json:
        print_json(told)
    else:
        print(route_choices.render(told))
    return 0


def _table(asks: Router, device: devices.Device, named: Sequence[str], arguments: Namespace) -> int:
    groups = _groups(asks, device.id, None)
    known = _made(asks, device.id, groups)
    out = barred(asks.family, arguments.precision)
    if known is None:
        if arguments.write:
            raise BadInput("--write", f"nothing of {asks.family} was measured on {device.id}", "measure a card first")
        entries = route_choices.predictions(asks.family, device, arguments.precision)
        title = f"{asks.family} on {device.id}: nothing measured there; predicted from its bandwidth and peaks alone"
    else:
        entries = crossovers(competing(known, arguments.precision))
        aside = _aside(groups, out)
        for place in entries:
            place["not_competing"] = aside[tuple(sorted(place["shape"].items())), place[asks.axis]]
        title = f"{asks.family} on {device.id}, {known.source}"
    if arguments.json:
        print_json([place | {"how": "predicted" if known is None else "measured"} for place in entries])
    else:
        print(render(entries, asks.axis, title))
        marked = {name for place in entries for name in place.get("not_competing", ())}
        for name in (name for name in out if name in marked):
            print(f"  [{name}]: {out[name]}")
        by_name = f" [--precision {'|'.join(named)}]" if named else ""
        print(f"ask for one shape: lab routes {asks.family} --shape {asks.usage}{by_name}")
    if arguments.write and known is not None:
        print(f"written: {shown(write(known))}")
    elif known is not None and not arguments.json and not _is_stored(known):
        print("the stored table, which the router reads, is not this one; --write stores it")
    return 0


def _is_stored(known: Table) -> bool:
    path = _path(known)
    return path.exists() and path.read_text(encoding="utf-8") == text(known)
