"""Is the timer right? Our median against Kineto's kernel time, and ncu's gpu__time_duration where ncu is installed.

A graph replay includes the gaps between its nodes, Kineto's durations do not. The gap is measured in the same process
(an empty kernel in a graph, less its own duration) and subtracted once per kernel; both figures are in the row. The
kernel times that remain must agree within 3 % for 20 us and more, within 8 % below.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from msgspec import structs

from lab.base import devices
from lab.base.errors import BadInput, reason
from lab.bench import backend, comparison, counters, machine, sampling, sets
from lab.bench import measure as measure_plan
from lab.check import families
from lab.row import store
from lab.row.records import CrossCheck

LONG_US, LONG_LIMIT_PCT, SHORT_LIMIT_PCT = 20.0, 3.0, 8.0


class Target(NamedTuple):
    """One candidate on one workload."""

    family: str
    candidate: str
    workload: str


def render(rows: Iterable[CrossCheck]) -> str:
    """A table for a terminal, one line a target."""
    numbers = "{:>9} {:>8} {:>9} {:>9} {:>7} {:>9}"
    lines = [f"{'candidate':24} {'workload':32} " + numbers.format("graph", "kernels", "ours", "Kineto", "diff", "ncu")]
    for r in rows:
        text = f"{r.status}: {r.message}"
        if r.status == "ok":
            figures = (f"{us or 0:.2f}" for us in (r.graph_us, r.kernels_per_call, r.kernel_us, r.kineto_us))
            ncu = f"{r.ncu_us:.2f}" if r.ncu_us else "-"
            text = numbers.format(*figures, f"{r.difference_pct or 0:+.2f}%", ncu) + ("" if r.within else "  outside")
        lines.append(f"{r.name:24} {r.workload_id:32} {text}")
    return "\n".join(lines)


def limit_pct(kernel_us: float) -> float:
    """How far apart the two clocks may be, in %, for a kernel of this length."""
    return LONG_LIMIT_PCT if kernel_us >= LONG_US else SHORT_LIMIT_PCT


def parse(text: str) -> Target:
    """A target written FAMILY/CANDIDATE@WORKLOAD; raises BadInput naming the nearest word for what does not exist."""
    family, slash, rest = text.partition("/")
    candidate, at, workload = rest.partition("@")
    if not (slash and at):
        raise BadInput("--cross-check", f'"{text}" is no target', "write a card's id or FAMILY/CANDIDATE@WORKLOAD")
    found = families.load(family)
    return Target(family, found.candidate(candidate).name, found.workload(workload).id)


def targets(items: Iterable[measure_plan.Item]) -> list[Target]:
    """Every arm of the planned comparisons, each once."""
    return list(dict.fromkeys(Target(i.card.family, name, i.workload.id) for i in items for _, name in i.arms))


def verdict(graph_us: float, gap_us: float, kernels: float, kineto_us: float) -> dict[str, Any]:
    """Our kernel time (graph replay less the gaps), its difference from Kineto's in %, and whether that is allowed."""
    ours = graph_us - gap_us * kernels
    difference = 100.0 * (ours / kineto_us - 1.0)
    return {"kernel_us": ours, "difference_pct": difference, "within": abs(difference) <= limit_pct(kineto_us)}


def measure(device: devices.Device, targets: Iterable[Target], seconds: float = 1.0) -> Iterator[CrossCheck]:
    """Time each target by graph replay, by Kineto and by ncu, append a row each and yield it."""
    import torch

    from lab.bench.ceiling_runs import MEASURES

    run, folder = store.new_run(device.id, "crosscheck")
    made = machine.provenance()
    gap_us = statistics.median(MEASURES["graph_gap"]())
    for target in targets:
        row = CrossCheck(
            **structs.asdict(made),
            device=device.id,
            family=target.family,
            name=target.candidate,
            workload_id=target.workload,
            status="ok",
            run=run,
            started=machine.now(),
            gap_us=gap_us,
        )
        try:
            row = _compared(row, target, gap_us, seconds)
        except Exception as error:  # a candidate that cannot be captured is a row, not our end
            row = structs.replace(row, status="error", message=reason(error))
        torch.cuda.empty_cache()
        if row.status == "ok":
            row = structs.replace(row, ncu_us=ncu_us(target))
        store.append(folder, row)
        yield row


def _compared(row: CrossCheck, target: Target, gap_us: float, seconds: float) -> CrossCheck:
    from lab.bench.timers import GraphTimer, kernel_durations_us

    family = families.load(target.family)
    workload, candidate = family.workload(target.workload), family.candidate(target.candidate)
    if unmet := families.unmet(candidate, families.gpu_capability()) or candidate.refuses(workload):
        return structs.replace(row, status="skipped", message=unmet)
    here = backend.gpu()
    job = comparison.Job(target.family, target.workload, (("control", target.candidate),))
    arm = sampling.Arm(target.candidate, candidate.run, [])
    room_bytes = comparison.MEMORY_SHARE * here.memory_bytes
    sets.armed(sets.Bench(job, here, family, workload), candidate, arm, room_bytes, job.seed)
    timer = GraphTimer()
    timer.prepare(arm)
    before = machine.clocks()
    compared = sampling.compare([arm], timer, seconds)
    profiled = [kernel_durations_us(arm) for _ in range(5)]
    after = machine.clocks()
    calls = arm.calls * len(arm.state)
    kineto_us = statistics.median(sum(durations) / calls for durations in profiled)
    kernels = len(profiled[0]) / calls
    own = compared.arms[candidate.name]
    return structs.replace(
        row,
        precision=candidate.precision,
        workload=dict(workload.axes),
        graph_us=own.median_us,
        iqr_us=own.iqr_us,
        n=own.n,
        converged=own.converged,
        kineto_us=kineto_us,
        kernels_per_call=kernels,
        clocks=tuple(c for c in (before, after) if c),
        **verdict(own.median_us, gap_us, kernels, kineto_us),
    )


def ncu_us(target: Target) -> float | None:
    """ncu's gpu__time_duration summed over one call of the target, us; None where ncu is absent or gives nothing.

    ncu flushes the caches before each kernel and leaves the clocks alone (lab/bench/counters.py).
    """
    wanted = counters.uncounted(target.family, target.candidate, families.load(target.family).workload(target.workload))
    try:
        rows = counters.collect([wanted])
    except BadInput:
        return None
    return math.fsum(row.duration_us or 0.0 for row in rows) or None


def latest(device_id: str) -> list[CrossCheck]:
    """The rows of the newest cross-check of a device, [] when there is none."""
    runs = store.kept(CrossCheck, device_id, "crosscheck")
    return runs[-1] if runs else []
