"""Checks on what a figure is: its denominator, its label, its clock, the line it is held against, whether it can be."""

from __future__ import annotations

import math

from lab.base.facts import from_base, to_base
from lab.card.gate import OPERATORS
from lab.study.audit.subject import FLOOR_PCT, Answer, Quantity, Subject, about, change_pct, check, short

WRITTEN_ON = "control candidate line of"


@check("denominator-changed", "overturned", f"{WRITTEN_ON} counted | {WRITTEN_ON} counted_control counted_candidate")
def denominator_changed(subject: Subject) -> Answer | None:
    """The gate was written on one quantity and passed on another, after the figures were known.

    control, candidate: the quantity that the gate was written on, whose change misses the `line` (in %).
    counted, of: what was counted instead and meets the line, out of what; or counted_control and counted_candidate:
    what those lost.
    """
    control, candidate, of = subject["control"], subject["candidate"], subject["of"]
    change, drop = change_pct(control, candidate), -abs(subject["line"].value)  # "drops by more than 50 %"
    if whole := subject.get("counted"):
        counted = whole.value
    else:
        counted = subject["counted_control"].value - subject["counted_candidate"].value
    counted_change = -100.0 * counted / of.value if of.value > 0 else math.nan
    if not counted_change <= drop < change:
        return None
    return Answer(
        f"the gate asks for {drop:.3g} % of the whole, which went from {short(control.value)} to {candidate}, "
        f"{change:+.1f} %; the verdict counts {short(counted)} of {short(of.value)} {of.unit}, {counted_change:+.0f} %"
    )


@check("gate-fails-control", "inconclusive", "control line")
def gate_fails_control(subject: Subject) -> Answer | None:
    """The control fails the gate too, so missing it says nothing about the candidate.

    The control does not meet the `line` that the candidate is held against; its standard error is said.
    """
    control, line = subject["control"], subject["line"]
    if control.unit != line.unit or OPERATORS[line.facts.op](control.value, line.value):
        return None
    near = ""
    if error := control.facts.stderr:
        near = f", {abs(control.value - line.value) / error:.2g} standard errors ({short(error)}) from it"
    return Answer(f"the gate asks {line.facts.op} {line}, and the control itself reads {short(control.value)}{near}")


@check("threshold-inside-band", "inconclusive", "band line | band baseline tolerance")
def threshold_inside_band(subject: Subject) -> Answer | None:
    """The line lies where healthy runs lie, so it fails some of them and passes others.

    A `line`, or `baseline` less `tolerance` in %, that lies among the values of a healthy `band`.
    """
    band, line, how = subject.every("band"), subject.get("line"), ""
    if line is None:
        baseline, tolerance_pct = subject["baseline"], abs(subject["tolerance"].value)
        line = Quantity(baseline.value * (1.0 - tolerance_pct / 100.0), baseline.unit)
        how = f" ({short(baseline.value)} less {short(tolerance_pct)} %)"
    low, high = min(q.value for q in band), max(q.value for q in band)
    if len(band) < 2 or {q.unit for q in band} != {line.unit} or not low <= line.value <= high:
        return None
    failed = sum(q.value < line.value for q in band)
    count = f"; of {len(band)} values it fails {failed}" if len(band) > 2 else ""
    return Answer(
        f"the line of {line.value:.4g} {line.unit}{how} lies inside the healthy range of {short(low)} to "
        f"{short(high)} {line.unit}{count}"
    )


@check("kernel-from-wall", "unsound", "whole less", "result")
def kernel_from_wall(subject: Subject) -> Answer | None:
    """Time of one clock is subtracted from time of another: kernels overlap and leave gaps, wall time does not.

    `less`, one figure, or control and candidate of it, is taken from the `whole` of another clock; `result`: what the
    difference was reported as.
    """
    whole, less, result = subject["whole"], subject.every("less"), subject.get("result")
    clocks, own = {q.facts.clock for q in less}, whole.facts.clock
    if not own or "" in clocks or clocks == {own}:
        return None
    taken = less[0].value - less[1].value if len(less) > 1 else less[0].value
    if result is not None and abs(whole.value - taken - result.value) > 0.005 * abs(result.value):
        return None
    how = f" ({short(less[0].value)} -> {short(less[1].value)})" if len(less) > 1 else ""
    told = f", which gives the {short(result.value)} that is reported" if result is not None else ""
    return Answer(
        f"{short(taken)} {less[0].unit} of {'/'.join(sorted(clocks))} time{how} are taken from {whole} of {own} "
        f"time{told}"
    )


@check("label-drift", "unsound", "called same_label", "other_label against")
def label_drift(subject: Subject) -> Answer | None:
    """One label stands for two different quantities, and a comparison pairs one with the other.

    A figure `called` by a label whose own figure (`same_label`) is another; `other_label`: what it equals instead;
    `against`: what it was compared with, whose ratio the drift changes.
    """
    called, own, other, against = (
        subject["called"],
        subject["same_label"],
        *map(subject.get, ("other_label", "against")),
    )
    if not abs(change_pct(own, called)) > FLOOR_PCT:
        return None
    told = f"{called} and {short(own.value)} {own.unit} both go by {called.facts.label or 'one label'}"
    if other is not None and abs(change_pct(other, called)) <= FLOOR_PCT:
        told += f"; the first is the {other.facts.label or 'other'}, {short(other.value)}"
    if against is not None and against.unit == called.unit and against.value > 0:
        told += f", so the ratio to {short(against.value)} is {called.value / against.value:.2f} for the one and "
        told += f"{own.value / against.value:.2f} for the other"
    return Answer(told)


@check("impossible-speed", "void", "rate bytes bandwidth")
def impossible_speed(subject: Subject) -> Answer | None:
    """The figure needs more bandwidth or arithmetic than the device has.

    A `rate` in tok/s times the `bytes` that each token reads, against the device's `bandwidth`.
    """
    rate, read, bandwidth = subject["rate"], subject["bytes"], subject["bandwidth"]
    needed, there = rate.value * to_base(read.value, read.unit), to_base(bandwidth.value, bandwidth.unit)
    if rate.unit != "tok/s" or needed <= there:
        return None
    return Answer(
        f"{rate} at {about(read)}{read} of weights per token needs {from_base(needed, 'TB/s'):.1f} TB/s, "
        f"{needed / there:.1f} times the device's {from_base(there, 'TB/s'):.2f} TB/s"
    )


@check("withdrawn-reused", "void", "figure")
def withdrawn_reused(subject: Subject) -> Answer | None:
    """A figure that its source took back stands as evidence; withdrawn goes by id, not by value."""
    taken = ", ".join(f"{q} ({q.withdrawn})" for q in subject.every("figure") if q.withdrawn)
    return Answer(f"its source took back {taken}") if taken else None


def _same(q: Quantity) -> tuple[str, ...]:
    """What makes a figure the same quantity as another."""
    return q.unit, q.facts.device, q.facts.model, q.facts.metric, q.facts.path


@check("policy-on-artefact", "void", "policy basis", "later")
def policy_on_artefact(subject: Subject) -> Answer | None:
    """A threshold or a route was derived from a figure that was withdrawn, or that the same arm later contradicted.

    A `policy` derived from a `basis` of which a figure is withdrawn, or from which a `later` one of the same device,
    model, metric and path differs by more than the floor.
    """
    against = []
    for basis in subject.every("basis"):
        path = basis.facts.path or basis.facts.metric
        if basis.withdrawn:
            against.append(f"{path} {basis} was withdrawn ({basis.withdrawn})")
        for later in subject.every("later"):
            if _same(basis) == _same(later) and basis.id != later.id and abs(change_pct(basis, later)) > FLOOR_PCT:
                times = later.value / basis.value
                against.append(f"{path} {short(basis.value)} later read {short(later.value)} ({times:.1f} times)")
    if not against:
        return None
    policy, device = " and ".join(map(str, subject.every("policy"))), subject["basis"].facts.device
    return Answer(f"the line at {policy} rests on figures of {device} that do not stand: {', '.join(against)}")
