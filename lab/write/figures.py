"""The figures of a card: arms, roofline, kernels. Each is a `Picture`: a figure and what it shows in words.

The notebooks, the site's pages and the writeups show the same ones. What is not there is refused in one line
(`BadInput`): no rows from a device, no committed trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from lab import draw
from lab.base import devices
from lab.base.errors import BadInput
from lab.card.phases import Card
from lab.judge import evidence
from lab.place import ceilings
from lab.place import roofline as floors
from lab.row import store
from lab.row.records import Measurement
from lab.study import composed, routes
from lab.trace import breakdowns, diff, stored, windows
from lab.trace.model import NONE, short_name

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.routing import Table

APART = 0.2  # by which a traced step may differ from the timed one before its caption says so
WEIGHTS_ALONE = "-w4a16"  # of a precision whose kernels decode weights of four bits for products of 16


@dataclass(frozen=True)
class Picture:
    """A figure, and in a sentence what it shows."""

    figure: Figure
    alt: str


def judged_runs(card: Card, device: str) -> dict[str, list[Measurement]]:
    """workload -> every row of the run that the card is judged by there, failed ones too; {} without rows.

    So figures beside each other, which a gate compares across workloads, are of one run wherever one holds them all.
    """
    rows = store.rows(device, card.id)
    pairs = evidence.pairs(evidence.asked(rows, card), card.compared)
    runs = {workload: {r.run for r in pair if r} for workload, pair in pairs.items()}
    found = {w: [r for r in rows if r.workload_id == w and r.run in runs.get(w, ())] for w in card.workloads}
    return {workload: own for workload, own in found.items() if own}


def judged_rows(card: Card, device: str) -> dict[str, dict[str, Measurement]]:
    """The same as workload -> arm's name -> row that is ok, where the candidate's is."""
    found = {w: {r.name: r for r in own if r.status == "ok"} for w, own in judged_runs(card, device).items()}
    return {workload: rows for workload, rows in found.items() if card.candidate in rows}


def _measured(card: Card, device: str) -> dict[str, dict[str, Measurement]]:
    found = judged_rows(card, device)
    if not found:
        store.refuse_unmeasured(card.id, device)
        raise BadInput(f"profiles/{device}/{card.id}", "no row of the candidate is ok", "see `lab rows`")
    return found


def model(known: Table) -> Picture:
    """A time model: predicted over measured, each shape by a fit without it; BadInput where too few were measured."""
    points = dict(list(routes.left_out(routes.competing(known)).items())[: len(draw.MARKERS)])
    times = [us for of in points.values() for us, _ in of]
    level = [[(us, 1.0) for us in (min(times), max(times))]] if times else []
    title = f"{known.family} on {known.device}: shapes left out of the fit"
    figure = draw.scatter(points, title, "measured us", "predicted over measured", level)
    alt = "Predicted over measured time of each kernel at each shape, by a fit that had not seen the shape, over the "
    return Picture(figure, alt + "measured time; the dashed line is 1")


def arms(card: Card, device: str) -> Picture:
    """Control, candidate and rivals at each workload of the card; one without rows says "not measured"."""
    place, found, groups = devices.get(device), _measured(card, device), []
    roles = {card.control: "control", card.candidate: "candidate"}
    for workload in card.workloads:
        rows = found.get(workload, {})
        sides = [draw.Side(name, roles.get(name, "peer"), row.median_us or 0.0, row.iqr_us or 0.0)
                 for name, row in rows.items() if row.own_us]  # fmt: skip
        ours = rows.get(card.candidate)
        bound = ours is not None and ours.metric == "kernel_us" and ours.bytes is not None and place.knows(ours.pipe)
        groups.append(draw.Group(workload, sides, floors.of_row(place, ours).floor_us if ours and bound else None))
    pairs = {w: evidence.change_pct(r.get(card.control), r.get(card.candidate)) for w, r in found.items()}
    changes = [f"{change[0]:+.3g} % at {w}" for w, change in pairs.items() if change]
    said = ", ".join(changes) or "no pair of rows"
    alt = f"Times of {card.candidate} against {card.control} on {place.name}: {said}."
    what = "host time of a call" if card.measure.timer == "host" else "median times"
    return Picture(draw.arms(groups, f"{card.id} on {place.name}: {what}"), alt)


def _of_gpu(card: Card) -> None:
    if card.measure.timer == "host":
        raise BadInput(card.path, "its rows are of the host's time", "ask for its arms")


def roofline(card: Card, device: str) -> Picture:
    """The rows that the card is judged by on the device's roofline, a roof for each pipe that they use."""
    _of_gpu(card)
    rows = [row for rows in _measured(card, device).values() for row in rows.values()]
    return roofline_of(rows, device, card.id)


def roofline_of(rows: Sequence[Measurement], device: str, title: str) -> Picture:
    """Rows that are ok on their device's roofline, rivals marked."""
    place = devices.get(device)
    points = [
        draw.point(f"{r.name} {r.workload_id}", r.flops, r.bytes, r.time_us, "peer" if r.arm == "peer" else "measured",
                   r.name, r.pipe if r.pipe in place.peaks else "")
        for r in rows
        if r.time_us and r.flops and r.bytes and r.pipe
    ]  # fmt: skip
    states = " and ".join(sorted({r.l2 for r in rows if r.l2}))
    issue = ceilings.issue_roof(place.id) if any(r.precision.endswith(WEIGHTS_ALONE) for r in rows) else ()
    title_ = f"{place.name}: {title}" + (f", L2 {states}" if states else "")
    figure = draw.roofline(place, points, title=title_, issue=issue)
    return Picture(figure, f"Roofline of {place.name} with {len(points)} measured points of {title}.")


def sides(card: Card, device: str) -> tuple[breakdowns.Breakdown, breakdowns.Breakdown, str]:
    """(candidate's, control's) kernels or parts of one step, us, and the workload, of the newest trace; or BadInput."""
    found, workload, _, _ = _traced(card, device)
    return found["candidate"], found["control"], workload


def _traced(card: Card, device: str) -> tuple[dict[str, breakdowns.Breakdown], str, set[str], str]:
    """The same by arm, the workload, the arms whose kernels the host launched (the others ran as a graph), the tool."""
    place = devices.get(device).id
    every = store.found(f"{place}/{card.id}/*/trace.parquet")
    if not every:
        traced = sorted({p.parent.parent.name for p in store.found("*/*/*/trace.parquet")})
        raise BadInput(card.id, f"no trace from {place} is committed", f"traced are {', '.join(traced) or 'none'}")
    present = {"control": card.control, "candidate": card.candidate}  # what was renamed since leaves traces behind
    files = [path for path in every if present | stored.about(path) == stored.about(path) | present]
    if not files:
        raise BadInput(every[-1], "is of other arms than the card's", f"take one with `lab profile {card.id}`")
    timeline, found, launched = stored.load(files[-1]), dict[tuple[str, str], breakdowns.Breakdown](), set[str]()
    for workload in card.workloads:
        launched.clear()
        for arm in ("candidate", "control"):
            try:
                window = windows.by_nvtx(timeline, steps := f"{card.id}/{arm}/{workload}/step *")
            except BadInput:  # the trace was taken on one of the workloads
                continue
            if not (window.kernels.graph != NONE).any():
                launched.add(arm)
            if parts := composed.by_part(timeline, steps, card.family, workload):
                found[workload, arm] = parts
                continue
            whole = breakdowns.from_trace(window, count=window.steps or 1.0, per="step")
            found[workload, arm] = _by_kernel(whole)
        if (workload, "candidate") in found and (workload, "control") in found:
            both = {arm: found[workload, arm] for arm in ("candidate", "control")}
            return both, workload, launched, str(stored.about(files[-1]).get("tool", "a profiler"))
    raise BadInput(files[-1], "holds no workload of the card with both arms", "take it again with `lab profile`")


def _by_kernel(whole: breakdowns.Breakdown) -> breakdowns.Breakdown:
    """The same with a part for each kernel: the kernels of two arms are mostly of one category."""
    rest = tuple(p for p in whole.parts if p.category in breakdowns.NO_PART)
    named: dict[str, float] = {}
    for name, value in whole.kernels.items():
        named[short_name(name)] = named.get(short_name(name), 0.0) + value
    return replace(whole, parts=(*(breakdowns.Part(n, v) for n, v in named.items()), *rest)) if named else whole


def breakdown(card: Card, device: str) -> Picture:
    """The kernels of candidate and control from the newest committed trace, and the waterfall between them."""
    _of_gpu(card)
    traced, workload, launched, tool = _traced(card, device)
    ours, theirs = traced["candidate"], traced["control"]
    between = diff.difference(theirs, ours)
    title = f"{card.id} at {workload}: where a step's time goes, {between.unit}"
    figure = draw.gap(between, (card.control, card.candidate), title)
    spans = f"{card.control}, {theirs.whole:.4g} {between.unit}, and {card.candidate}, {ours.whole:.4g}"
    alt = f"Kernels of a step of {spans}, and the waterfall between them."
    return Picture(
        figure, alt + _unlike_timed(card, judged_rows(card, device).get(workload, {}), traced, launched, tool)
    )


def _unlike_timed(
    card: Card,
    rows: Mapping[str, Measurement],
    traced: Mapping[str, breakdowns.Breakdown],
    launched: set[str],
    tool: str,
) -> str:
    """ "" or in what traced steps differ from the timed ones, which are the card's evidence and of another length."""
    names = {"control": card.control, "candidate": card.candidate}
    timed = {arm: row for arm, name in names.items() if (row := rows.get(name)) and row.own_us}
    off = [arm for arm, row in timed.items() if abs(traced[arm].whole / (row.own_us or 1.0) - 1) > APART]
    if not off:
        return ""
    times = " and ".join(f"{timed[arm].own_us:,.4g} us of {names[arm]}" for arm in off)
    how = " and ".join(dict.fromkeys(f"{timed[arm].timer} timing, {timed[arm].l2} L2" for arm in off))
    parts = (sum(p.value for p in traced[arm].parts if p.category not in breakdowns.NO_PART) for arm in off)
    busy = " and ".join(f"{us:,.4g}" for us in parts)
    launching = "the host launched each kernel" if launched & {*off} else "each step was a graph's replay"
    return (
        f" By the rows a step takes {times} ({how}), where the kernels here add up to {busy} us and the rest is idle: "
        f"under {tool} {launching} and waited for each step."
    )
