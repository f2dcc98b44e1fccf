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

    The gate's own quantity misses its `line` (a change in %), and what was counted instead meets it.

    control, candidate: the quantity that the gate was written on. counted, of: what was counted instead, or
    counted_control and counted_candidate with of: what those lost, out of it.
    """
    if subject.note:
        return Answer(subject.note)
    control, candidate, line, of = (subject.one(r) for r in ("control", "candidate", "line", "of"))
    if control is None or candidate is None or line is None or of is None or not of.value > 0:
        return None
    change = change_pct(control, candidate)
    drop = -abs(line.value)  # a source writes "drops by more than 50 %"
    counted = _counted(subject)
    counted_change = -100.0 * counted / of.value
    if math.isnan(change) or math.isnan(counted) or change <= drop or counted_change > drop:
        return None
    sentence = (
        f"the gate asks for {drop:.3g} % of the whole, which went from {short(control.value)} to {candidate}, "
        f"{change:+.1f} %; the verdict counts {short(counted)} of {short(of.value)} {of.unit}, {counted_change:+.0f} %"
    )
    return Answer(sentence)


def _counted(subject: Subject) -> float:
    counted, before, after = (subject.one(r) for r in ("counted", "counted_control", "counted_candidate"))
    if counted is not None:
        return counted.value
    return before.value - after.value if before is not None and after is not None else math.nan


@check("gate-fails-control", "inconclusive", "control line", "stderr")
def gate_fails_control(subject: Subject) -> Answer | None:
    """The control fails the gate too, so missing it says nothing about the candidate.

    The control does not meet the `line` that the candidate is held against; `stderr`: the control's own.
    """
    control, line, stderr = subject.one("control"), subject.one("line"), subject.one("stderr")
    if control is None or line is None or control.unit != line.unit:
        return None
    op = line.facts.op
    if OPERATORS[op](control.value, line.value):
        return None
    near = ""
    if stderr is not None and stderr.value > 0:
        away = abs(control.value - line.value) / stderr.value
        near = f", {away:.2g} standard errors ({short(stderr.value)}) from it"
    return Answer(f"the gate asks {op} {line}, and the control itself reads {short(control.value)}{near}")


@check("threshold-inside-band", "inconclusive", "band line | band baseline tolerance")
def threshold_inside_band(subject: Subject) -> Answer | None:
    """The line lies where healthy runs lie, so it fails some of them and passes others.

    A `line`, or `baseline` less `tolerance` in %, that lies among the values of a healthy `band`.
    """
    band = subject.roles.get("band", ())
    line, baseline, tolerance = subject.one("line"), subject.one("baseline"), subject.one("tolerance")
    how = ""
    if line is None and baseline is not None and tolerance is not None:
        value = baseline.value * (1.0 - abs(tolerance.value) / 100.0)
        line = Quantity(value, baseline.unit)
        how = f" ({short(baseline.value)} less {short(abs(tolerance.value))} %)"
    if line is None or len(band) < 2 or {q.unit for q in band} != {line.unit}:
        return None
    low, high = min(q.value for q in band), max(q.value for q in band)
    if not low <= line.value <= high:
        return None
    under = sorted(q.value for q in band if q.value < line.value)
    count = f"; of {len(band)} values it fails {len(under)}" if len(band) > 2 else ""
    sentence = (
        f"the line of {line.value:.4g} {line.unit}{how} lies inside the healthy range of {short(low)} to "
        f"{short(high)} {line.unit}{count}"
    )
    return Answer(sentence)


@check("kernel-from-wall", "unsound", "whole less", "result")
def kernel_from_wall(subject: Subject) -> Answer | None:
    """Time of one clock is subtracted from time of another: kernels overlap and leave gaps, wall time does not.

    A difference whose two sides come from different clocks; `less`: one figure, or control and candidate of it.
    """
    whole, result = subject.one("whole"), subject.one("result")
    less = subject.roles.get("less", ())
    if whole is None or not less:
        return None
    clocks, own = {q.facts.clock for q in less}, whole.facts.clock
    if not own or "" in clocks or clocks == {own}:
        return None
    taken = less[0].value - less[1].value if len(less) > 1 else less[0].value
    how = f" ({short(less[0].value)} -> {short(less[1].value)})" if len(less) > 1 else ""
    told = f", which gives the {short(result.value)} that is reported" if result is not None else ""
    if result is not None and abs(whole.value - taken - result.value) > 0.005 * abs(result.value):
        return None
    sentence = (
        f"{short(taken)} {less[0].unit} of {'/'.join(sorted(clocks))} time{how} are taken from {whole} of {own} "
        f"time{told}"
    )
    return Answer(sentence)


@check("label-drift", "unsound", "called same_label", "other_label against")
def label_drift(subject: Subject) -> Answer | None:
    """One label stands for two different quantities, and a comparison pairs one with the other.

    A figure `called` by a label whose own figure (`same_label`) is another; `other_label`: what it equals instead.

    `against`: what it was compared with, whose ratio the drift changes.
    """
    called, own, other, against = (subject.one(r) for r in ("called", "same_label", "other_label", "against"))
    if called is None or own is None or called.unit != own.unit or not own.value > 0:
        return None
    if abs(change_pct(own, called)) <= FLOOR_PCT:
        return None
    label = called.facts.label or "one label"
    told = f"{called} and {short(own.value)} {own.unit} both go by {label}"
    if other is not None and other.unit == called.unit and abs(change_pct(other, called)) <= FLOOR_PCT:
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
    if subject.note:
        return Answer(subject.note)
    rate, read, bandwidth = subject.one("rate"), subject.one("bytes"), subject.one("bandwidth")
    if rate is None or read is None or bandwidth is None or rate.unit != "tok/s":
        return None
    needed = rate.value * to_base(read.value, read.unit)
    there = to_base(bandwidth.value, bandwidth.unit)
    if needed <= there:
        return None
    sentence = (
        f"{rate} at {about(read)}{read} of weights per token needs {from_base(needed, 'TB/s'):.1f} TB/s, "
        f"{needed / there:.1f} times the device's {from_base(there, 'TB/s'):.2f} TB/s"
    )
    return Answer(sentence)


@check("withdrawn-reused", "void", "figure")
def withdrawn_reused(subject: Subject) -> Answer | None:
    """A figure that its source took back stands as evidence; withdrawn goes by id, not by value.

    A `figure` that stands as evidence though its source took it back: by id, never by value.
    """
    taken = [q for q in subject.roles.get("figure", ()) if q.withdrawn]
    if not taken:
        return None
    listed = ", ".join(f"{q} ({q.withdrawn})" for q in taken)
    return Answer(f"its source took back {listed}")


def _same(q: Quantity) -> tuple[str, ...]:
    """What makes a figure the same quantity as another."""
    return q.unit, q.facts.device, q.facts.model, q.facts.metric, q.facts.path


@check("policy-on-artefact", "void", "policy basis", "later")
def policy_on_artefact(subject: Subject) -> Answer | None:
    """A threshold or a route was derived from a figure that was withdrawn, or that the same arm later contradicted.

    A `policy` derived from a `basis` of which a figure is withdrawn, or contradicted by a `later` one.

    A later figure speaks of a basis when device, model, metric and path are the same; the two contradict each other
    when they differ by more than the floor.
    """
    policy = " and ".join(str(q) for q in subject.roles.get("policy", ()))
    against = []
    for basis in subject.roles.get("basis", ()):
        path = basis.facts.path or basis.facts.metric
        if basis.withdrawn:
            against.append(f"{path} {basis} was withdrawn ({basis.withdrawn})")
        for later in subject.roles.get("later", ()):
            same = _same(basis) == _same(later)
            if same and basis.id != later.id and abs(change_pct(basis, later)) > FLOOR_PCT:
                times = later.value / basis.value
                against.append(f"{path} {short(basis.value)} later read {short(later.value)} ({times:.1f} times)")
    if not against:
        return None
    device = subject.roles["basis"][0].facts.device
    return Answer(f"the line at {policy} rests on figures of {device} that do not stand: {', '.join(against)}")


CHECKS = (
    denominator_changed,
    gate_fails_control,
    threshold_inside_band,
    kernel_from_wall,
    label_drift,
    impossible_speed,
    withdrawn_reused,
    policy_on_artefact,
)
