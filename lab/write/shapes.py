"""A kernel at any shape: a workload from axes that a user types, what it costs, what is known of it, and sweeps.

A typed shape takes the axes that it does not name from the listed workload that is nearest to it (a real model's shape
where one is), so "M=48" alone is a question. Nothing is timed without a GPU: a sweep then has the floor and the rows
that were measured on the same line of shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lab.base import devices
from lab.base.errors import BadInput, nearest
from lab.bench import comparison
from lab.check import accuracy, aot, families
from lab.place import roofline
from lab.row import store
from lab.row.records import Counter, Measurement, Role
from lab.study import choices

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.common import Candidate, Workload


def parse(text: str) -> dict[str, int | str]:
    """ "M=48 N=17408, dtype=bf16" as axes; raises BadInput for a word that is no AXIS=VALUE."""
    words = choices.words(text.replace(",", " ").split())
    return {axis: int(value) if value.lstrip("-").isdigit() else value for axis, value in words.items()}


def shaped(family: families.Family, candidate: Candidate, axes: Mapping[str, int | str]) -> Workload:
    """The workload of these axes; those left out come from the nearest listed workload that the candidate takes.

    Raises BadInput for an axis that the family does not have, a word it does not use there, a number that is not
    positive, and for a shape that the candidate refuses.
    """
    where = f"kernels/{family.name}"
    listed = family.cases.WORKLOADS
    known = {axis: value for w in listed for axis, value in w.axes.items()}
    for axis, value in axes.items():
        if axis not in known:
            raise BadInput(where, f'no workload has the axis "{axis}"', nearest(axis, known))
        words = {str(w.axes[axis]) for w in listed if axis in w.axes}
        if isinstance(known[axis], str) and str(value) not in words:
            raise BadInput(where, f'{axis} = "{value}" is in no workload', f"known: {', '.join(sorted(words))}")
        if isinstance(known[axis], int) and (not isinstance(value, int) or (value < 1 and str(value) not in words)):
            raise BadInput(where, f"{axis} = {value} is no positive whole number", f"such as {known[axis]}")
    takes = [w for w in listed if not candidate.refuses(w)] or list(listed)
    named = {a: v for a, v in axes.items() if isinstance(v, str)}
    base = max(takes, key=lambda w: (_same(w.axes, named), w.role == "measure", _same(w.axes, axes),
                                     -_apart(w.axes, axes)))  # fmt: skip
    whole = {**base.axes, **axes}
    if same := next((w for w in listed if w.axes == whole), None):
        found = same
    else:
        found = replace(base, id="_".join(f"{a}{v}" for a, v in whole.items() if v not in ("", 0)), axes=whole,
                        role="typed", source="")  # fmt: skip
    if reason := candidate.refuses(found):
        raise BadInput(f"{where}, {candidate.name}", f"refuses {found.id} ({reason})", "type another shape")
    return found


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return sum(one.get(axis) == value for axis, value in other.items())


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """How far two shapes lie from each other: factors of two, added over the axes that both have as numbers."""
    both = [(one[a], v) for a, v in other.items() if isinstance(v, int) and isinstance(one.get(a), int)]
    return sum(abs(math.log2(max(int(a), 1) / max(int(b), 1))) for a, b in both)


def rows_at(family: str, device: str, axes: Mapping[str, int | str], free: str = "") -> list[Measurement]:
    """The ok rows with exactly these axes, any value of `free`; newest last, a calibration's ahead of all others."""
    fixed = {a: v for a, v in axes.items() if a != free}
    found = [
        r for r in store.rows(device, family=family)
        if r.time_us and {a: v for a, v in r.workload.items() if a != free} == fixed
    ]  # fmt: skip
    return sorted(found, key=lambda r: not r.calibration)


@dataclass(frozen=True)
class Shape:
    """One candidate at one shape; `workload` has the axes."""

    family: families.Family
    candidate: Candidate
    workload: Workload

    def floor(self, device: str) -> roofline.Floor:
        """The roofline's floor on a device."""
        cost = self.family.cost(self.workload, self.candidate.precision)
        return roofline.place(devices.get(device), cost.flops, cost.bytes, cost.pipe)

    def config(self, device: str) -> str:
        """What it would launch on a device, "" where the candidate does not say."""
        from kernels.common import described_for

        with described_for(devices.get(device).capability):
            return self.candidate.config(self.workload)

    def rows(self, device: str) -> list[Measurement]:
        """Rows at this very shape that are ok, rivals' too; newest last."""
        return rows_at(self.family.name, device, self.workload.axes)

    def expected(self, device: str) -> tuple[float, str] | None:
        """(us, how it is known) by the family's router; None where that does not compare the candidate."""
        try:
            asks, own = choices.router(self.family.name), self.candidate.precision
            by_name = (own,) if asks.stored or own in asks.opt_in else ()
            choice = choices.choose(asks, self.workload, devices.get(device), by_name)
        except (BadInput, ValueError):
            return None
        us = choice.times_us.get(self.candidate.name)
        return None if us is None else (us, choice.how)

    def counters(self, device: str) -> Counter | None:
        """The newest counters of its longest kernel here (registers and shared memory as launched), or None."""
        found = [
            c
            for folder in sorted((store.FOLDER / device / "counters").glob("*"))
            for c in store.read(folder / Counter.FILE, Counter)
            if (c.name, c.workload_id, c.status) == (self.candidate.name, self.workload.id, "ok")
        ]  # fmt: skip
        return max(found, key=lambda c: (c.run, c.duration_us or 0.0)) if found else None

    def check(self) -> accuracy.Check:
        """Against the reference, on this machine."""
        where = "cuda" if families.gpu_capability() else "cpu"
        return accuracy.check(self.family, self.candidate, self.workload, device=where)

    def compiled(self, device: str) -> list[aot.AotRow]:
        """Its kernels compiled ahead of time for a device: registers, shared memory, spills, matrix instruction."""
        from lab.check import compile

        major, minor = devices.get(device).capability
        name = f"{self.family.name}/{self.candidate.name}"
        return compile.compile_family(name, [10 * major + minor], f"{__name__}:one_candidate")

    def time(self, beside: Sequence[str] = (), seconds: float = 0.5) -> dict[str, float | str]:
        """name -> median us on this GPU, or why there is none; appends no row. Raises BadInput without a GPU."""
        from lab.bench import measure

        measure.require_gpu("timing a shape")
        named = self.workload.id in {w.id for w in self.family.cases.WORKLOADS}
        shape = self.workload.id if named else " ".join(f"{a}={v}" for a, v in self.workload.axes.items())
        peers: tuple[tuple[Role, str], ...] = tuple(("peer", name) for name in beside)
        *_, done = comparison.execute(
            comparison.Job(self.family.name, shape, (("control", self.candidate.name), *peers), seconds)
        )
        assert isinstance(done, comparison.Done)
        return {arm.name: arm.timing.median_us if arm.timing else arm.message or arm.status for arm in done.arms}


def one_candidate(name: str) -> SimpleNamespace:
    """A provider for `compile.compile_family`: "family/candidate" is that candidate with its sources alone."""
    family_name, _, candidate = name.partition("/")
    family = families.load(family_name)
    module = family.modules[candidate]
    place = families.FOLDER / family_name / f"{module}.py"
    text = place.read_text(encoding="utf-8")
    sources = tuple(s for s in family.cuda_sources if s.path.name in text)
    return SimpleNamespace(candidates={candidate: family.candidates[candidate]}, cuda_sources=sources, unavailable={})


@dataclass(frozen=True)
class Sweep:
    """Times over one axis, the others fixed: candidate -> (value, us) from rows, the floor, and what was timed now."""

    axis: str
    fixed: str
    floor: tuple[tuple[int, float], ...]
    measured: Mapping[str, tuple[tuple[int, float], ...]]
    live: Mapping[str, tuple[tuple[int, float], ...]]
    refused: Mapping[int, str]


def sweep(
    shape: Shape, device: str, axis: str, values: Sequence[int], beside: Sequence[str] = (), now: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Sweep:  # fmt: skip
    """One axis varied: the floor, the rows measured along it, and with `now` times of this GPU.

    beside: other candidates and rivals by name; without one, whatever has rows there. tell: hears of each value timed.
    Raises BadInput for an axis that is not a number, no values, and with `now` where there is no GPU.
    """
    if not isinstance(shape.workload.axes.get(axis), int):
        numbers = [a for a, v in shape.workload.axes.items() if isinstance(v, int)]
        raise BadInput("sweep", f'"{axis}" is no axis with numbers', nearest(axis, numbers))
    if not values:
        raise BadInput("sweep", "no values", "give some, such as 1,2,4,8")
    wanted = {shape.candidate.name, *beside}
    measured: dict[str, dict[int, float]] = {}
    for row in rows_at(shape.family.name, device, shape.workload.axes, axis):
        if row.name in wanted or not beside:
            at = int(row.workload[axis])
            if min(values) <= at <= max(values):
                measured.setdefault(row.name, {})[at] = row.time_us or 0.0
    floor: list[tuple[int, float]] = []
    live: dict[str, list[tuple[int, float]]] = {}
    refused: dict[int, str] = {}
    for value in sorted({*values, *(at for points in measured.values() for at in points)}):
        try:
            workload = shaped(shape.family, shape.candidate, {**shape.workload.axes, axis: value})
        except BadInput as no:
            refused[value] = no.what
            continue
        here = replace(shape, workload=workload)
        floor.append((value, here.floor(device).floor_us))
        if now:
            tell(f"{axis}={value}")
            for name, us in here.time(beside).items():
                if isinstance(us, float):
                    live.setdefault(name, []).append((value, us))
                else:
                    refused[value] = f"{name}: {us}"
    fixed = " ".join(f"{a}={v}" for a, v in shape.workload.axes.items() if a != axis and v not in ("", 0))
    lines = {name: tuple(sorted(points.items())) for name, points in measured.items()}
    return Sweep(axis, fixed, tuple(floor), lines, {n: tuple(p) for n, p in live.items()}, refused)
