"""`lab routes FAMILY`: the router's table, made from measured rows, the crossovers in it and what a wrong choice costs.

For every shape and value of the routed axis the table takes one run, the newest in which at least two candidates were
timed there: times of different runs are never compared. Only rows that passed their checks and were taken from a cold
L2 count. Two runs of one commit in which the same candidate, launched the same way on the same workload, differs by
more than AGREE are refused instead of averaged: one of them is an artefact, and a policy tuned on an artefact was one
of the recorded accidents (a path 4x slower for as long as nobody had initialised a library).
"""

from __future__ import annotations

import json
import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import devices, families, records
from lab.errors import BadInput, shown
from lab.printing import print_json

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.routing import Table

AGREE = 1.15  # runs of one commit of the same thing stayed within 1.02 on an H200; a power cap moves up to 1.1
JOIN = 1.05  # how far an arm of two runs may differ for the older one to add what the newer one did not time
SAME = {"n_seqs"}  # axes that say where the columns came from: a router collapses them
AXES = {"M": ("N", "K"), "T": ("batch", "Hk", "Hv", "D")}  # routed axis -> the axes that make the shape


def table(family: str, device: str, rows: Iterable[Mapping[str, Any]] | None = None) -> Table:
    """The router's table of a family on a device.

    Raises BadInput when nothing was measured that could be compared, and when two runs contradict each other.
    """
    from kernels.routing import Point, Table

    place = devices.get(device, "--device").id
    own = {"cupy", "triton"}  # a rival library's arm is timed beside ours and never routed to; torch is always there
    names = {name for name, c in families.load(family).candidates.items() if set(c.needs.packages) <= own}
    usable = [
        row
        for row in (records.rows(place, family=family) if rows is None else rows)
        if row["status"] == "ok"
        and row["name"] in names
        and row.get("l2") == "cold"
        and not row.get("profiled")
        # A launch that the kernel refuses by now is no route. Other former ones stay: the newest there is.
        and families.former(row) != "former kernel, refused now"
    ]
    contradiction(usable)
    routed = [(axis, row) for row in usable if (axis := _axis(row))]
    kinds = [_kind(row, axis) for axis, row in routed]
    usual = max(dict.fromkeys(kinds), key=kinds.count, default=None)
    groups: dict[tuple[str, tuple[tuple[str, int], ...], int], dict[str, dict[str, Mapping[str, Any]]]] = {}
    for kind, (axis, row) in zip(kinds, routed, strict=True):
        if kind == usual:
            key = (axis, _shape(row, axis), int(row["workload"][axis]))
            groups.setdefault(key, {}).setdefault(row["run"], {})[row["name"]] = row
    points, runs = [], set()
    for (_, shape, at), by_run in sorted(groups.items()):
        joined, sources = _joined(by_run)
        runs |= sources
        points += [Point(name, shape, at, row["median_us"]) for name, row in sorted(joined.items())]
    if not points:
        raise BadInput(f"profiles/{place}", f"no run timed two candidates of {family} together", "measure a card first")
    return Table(place, family, next(iter(groups))[0], tuple(points), "runs " + ", ".join(sorted(runs)))


def _joined(by_run: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """(candidate -> row, runs): the newest run that compared, and what older ones timed besides.

    An older run adds a candidate only where an arm of both took as long as before (JOIN), so that the times compare.
    """
    joined: dict[str, Mapping[str, Any]] = {}
    sources = set()
    for run in sorted(by_run, reverse=True):
        arms = by_run[run]
        ratios = [arms[name]["median_us"] / joined[name]["median_us"] for name in arms if name in joined]
        if len(arms) > 1 and (not joined or any(1 / JOIN <= r <= JOIN for r in ratios)):
            more = {name: row for name, row in arms.items() if name not in joined}
            joined |= more
            sources |= {run} if more else set()
    return joined, sources


def _axis(row: Mapping[str, Any]) -> str:
    """The axis that a row is a point of, "" for a row that no route is made of."""
    axes = row["workload"]
    return next((a for a in AXES if isinstance(axes.get(a), int) and _shape(row, a) and axes.get("op") != "decode"), "")


def _kind(row: Mapping[str, Any], axis: str) -> tuple[Any, ...]:
    """Inputs and every axis but shape and routed one. The kind that most rows have is the router's question.

    Others ask about errors (sums of one sign) or about another product (activations in float32): their times differ.
    """
    others = {a: v for a, v in row["workload"].items() if a != axis and a not in (*AXES[axis], *SAME)}
    return (row.get("inputs", ""), *sorted(others.items()))


def _shape(row: Mapping[str, Any], axis: str) -> tuple[tuple[str, int], ...]:
    axes = row["workload"]
    return tuple(sorted((a, int(axes[a])) for a in AXES[axis] if a in axes))


def contradiction(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise BadInput for the first candidate whose runs of one commit and launch differ by more than AGREE."""
    seen: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        commit = row.get("stated_commit") or row.get("commit")
        if commit not in (None, "", "unknown"):
            seen.setdefault((row["name"], row["workload_id"], row.get("config"), commit), []).append(row)
    for (name, workload, _, commit), same in seen.items():
        low, high = (pick(same, key=lambda r: float(r["median_us"])) for pick in (min, max))
        ratio = high["median_us"] / low["median_us"]
        if ratio > AGREE:
            times = f"{low['median_us']:.1f} us in {low['run']} and {high['median_us']:.1f} us in {high['run']}"
            raise BadInput(
                f"profiles/{same[0]['device']}",
                f"{name} on {workload} took {times}, both at commit {commit}: {ratio:.2f}x apart",
                "find out which one is an artefact and measure again before a route is made of it",
            )


def crossovers(known: Table) -> list[dict[str, Any]]:
    """By shape and measured value of the axis: the fastest, the time of each, and the cost of the worst choice."""
    found = []
    for shape in dict.fromkeys(p.shape for p in known.points):
        for at in sorted({p.at for p in known.points if p.shape == shape}):
            times = {p.candidate: p.median_us for p in known.points if (p.shape, p.at) == (shape, at)}
            best = min(times, key=lambda name: times[name])
            wrong = max(times, key=lambda name: times[name])
            found.append(
                {
                    "shape": dict(shape),
                    known.axis: at,
                    "best": best,
                    "times_us": times,
                    "worst": wrong,
                    "cost_of_worst": times[wrong] / times[best],
                }
            )
    return found


def write(known: Table, folder: Path | None = None) -> Path:
    """Write the table where `kernels.routing` reads it; whole or not at all."""
    from kernels import routing

    path = (folder or records.FOLDER) / known.device / "routes" / f"{known.family}.json"
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        os.replace(file.name, path)
    except OSError as problem:
        raise BadInput(path, f"cannot be written ({problem.strerror})", "free space or choose another folder") from None
    return path


def render(known: Table) -> str:
    """A line per measured point: the fastest first, the others with their cost."""
    lines = [f"{known.family} on {known.device}, {known.source}"]
    for row in crossovers(known):
        shape = " ".join(f"{a}={v}" for a, v in row["shape"].items())
        best = row["times_us"][row["best"]]
        others = sorted((t, n) for n, t in row["times_us"].items() if n != row["best"])
        costs = ", ".join(f"{n} {t:.1f} ({t / best:.2f}x)" for t, n in others)
        lines.append(f"  {shape} {known.axis}={row[known.axis]}: {row['best']} {best:.1f} us; {costs}")
    return "\n".join(lines)


def add(command: Callable[..., ArgumentParser]) -> None:
    """Add `lab routes`; `command(name, run, text)` makes a parser."""
    parser = command("routes", run, "which candidate is fastest where, from measured rows, and what a wrong one costs")
    parser.add_argument("family")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--write", action="store_true", help="store the table that the family's route.py reads")


def run(arguments: Namespace) -> int:
    """Print the table, and store it with --write."""
    if arguments.family not in families.names():
        known: Sequence[str] = families.names()
        raise BadInput("lab routes", f'no family is named "{arguments.family}"', f"one of {', '.join(known)}")
    made = table(arguments.family, arguments.device)
    if arguments.json:
        print_json(crossovers(made))
    else:
        print(render(made))
    if arguments.write:
        print(f"written: {shown(write(made))}")
    return 0
