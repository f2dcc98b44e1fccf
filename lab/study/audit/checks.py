"""The checks: what two arms show, what a figure is, and what the record and a gate can carry.

Each is a function of a subject (subject.py) that answers with one sentence, or None where nothing is wrong; the first
line of its docstring is its meaning, the rest says which roles it takes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from lab.base import vocabulary
from lab.base.facts import from_base, to_base
from lab.card import phases, recorded
from lab.card.gate import ERRORS, OPERATORS, Condition
from lab.judge.rules import THROUGHPUT
from lab.study.audit.subject import (
    FLOOR_PCT,
    SIGMAS,
    Answer,
    Quantity,
    Subject,
    about,
    change_pct,
    check,
    effect,
    short,
)

FLOORS = "control_sd noise floor"
WEIGHTS = {"figure": "void", "verdict": "overturned", "possible": "inconclusive"}


@check("zero-engagement", "void", "engaged", "result")
def zero_engagement(subject: Subject) -> Answer | None:
    """A candidate that never ran where it was judged has shown nothing, not even that it does no harm.

    `engaged` = 0: whatever was found beside it (`result`) is a property of the control.
    """
    engaged, result = subject["engaged"], subject.get("result")
    if engaged.value > 0:
        return None
    told = f", so the {result.metric or 'result'} of {result} says nothing about it" if result else ""
    return Answer(f"the candidate engaged {short(engaged.value)} times where it was judged{told}")


@check("incomplete-arms", "void", "runs planned")
def incomplete_arms(subject: Subject) -> Answer | None:
    """A verdict before all planned runs, or without one of its arms, is a placeholder.

    Fewer `runs` than `planned`; an arm that is not there is said in the note.
    """
    runs, planned = subject["runs"].value, subject["planned"].value
    if runs >= planned:
        return None
    return Answer(f"{short(runs)} of {short(planned)} planned runs were there when it was judged")


def noise_floor(subject: Subject) -> tuple[float, str]:
    """max(floor, sigmas of the control, the noise a source measured for this figure) in %, and what it is made of."""
    line, sd, noise = subject.get("floor"), subject.get("control_sd"), subject.get("noise")
    floors = [(line.value if line else FLOOR_PCT, "the floor")]
    if sd is not None:
        sigmas = line.sigmas if line else SIGMAS
        floors.append((sigmas * sd.value, f"{sigmas:g} sigma of the control, {sigmas:g} x {short(sd.value)} %"))
    if noise is not None:
        floors.append((noise.value, "the measured noise"))
    return max(floors)


@check("claim-inside-noise", "inconclusive", may=FLOORS, effect=True)
def claim_inside_noise(subject: Subject) -> Answer | None:
    """An effect is claimed that is no larger than the noise floor it is judged under."""
    change, words = effect(subject)
    floor, what = noise_floor(subject)
    if math.isnan(change) or abs(change) > floor:
        return None
    return Answer(f"{words} is claimed as an effect, and {what} is {floor:.3g} %")


@check("launch-drift", "overturned", "control_launches candidate_launches", FLOORS, effect=True)
def launch_drift(subject: Subject) -> Answer | None:
    """Summed kernel time of captures with different launch counts compares how long was captured, not how fast.

    Fires where the change per launch differs from that of the sums by more than the floor; "overturned" when the
    effect that the sum shows goes away or turns, or a gain appears that it hid.
    """
    change, words = effect(subject)
    per_launch, (floor, _) = _per_launch(subject), noise_floor(subject)
    if math.isnan(per_launch) or abs(per_launch - change) <= floor:
        return None
    before, after = (short(subject[f"{arm}_launches"].value) for arm in ("control", "candidate"))
    raw, corrected = _direction(change, floor), _direction(per_launch, floor)
    turn = f"{raw} becomes {corrected}" if raw != corrected else f"{corrected} either way"
    sentence = f"{words} over {before} and {after} launches is {per_launch:+.2f} % per launch: {turn}"
    turned = raw != corrected and (raw != "within noise" or corrected == "lower")
    return Answer(f"{sentence} (floor {floor:.3g} %)", "overturned" if turned else "unsound")


def launch_changes(subjects: Iterable[Subject]) -> list[tuple[str, float, float]]:
    """(title, change of the sum, change per launch) in % for each subject that has both arms and both counts."""
    asked = [s for s in subjects if launch_drift.has(s.roles)]
    return [(s.title, effect(s)[0], each) for s in asked if not math.isnan(each := _per_launch(s))]


def _per_launch(subject: Subject) -> float:
    """Change of the time per launch in %, NaN where an arm was launched not once or no change can be formed."""
    before, after = subject["control_launches"].value, subject["candidate_launches"].value
    if min(before, after) <= 0:
        return math.nan
    return 100.0 * ((1.0 + effect(subject)[0] / 100.0) * before / after - 1.0)


def _direction(change: float, floor: float) -> str:
    return "within noise" if abs(change) <= floor else "lower" if change < 0 else "higher"


@check("between-session-noise", "inconclusive", "sessions | session_sd", effect=True)
def between_session_noise(subject: Subject) -> Answer | None:
    """The same arm varies more from session to session than the effect that is claimed.

    An effect no larger than 3 sigma of the same arm over `sessions` (three or more, of one unit), or `session_sd` in %.
    """
    change, words = effect(subject)
    sessions, stated = subject.every("sessions"), subject.get("session_sd")
    if len({q.unit for q in sessions}) > 1:
        return None
    if len(sessions) > 2:
        values = [q.value for q in sessions]
        sd_pct = 100.0 * statistics.stdev(values) / statistics.fmean(values)
        told = f"one setting over {len(values)} sessions: mean {statistics.fmean(values):.1f} {sessions[0].unit}, "
        told += f"{short(min(values))} to {short(max(values))}, CV {sd_pct:.2f} %"
    elif stated is not None:
        sd_pct, told = stated.value, f"the ratio varies by {stated.value:.2f} % from run to run"
    else:
        return None
    if not abs(change) <= SIGMAS * sd_pct:
        return None
    return Answer(f"{words} lies inside {SIGMAS:g} sigma between sessions, {SIGMAS * sd_pct:.1f} % ({told})")


@check("identical-path-spread", "inconclusive", "identical_control identical_candidate | identical", effect=True)
def identical_path_spread(subject: Subject) -> Answer | None:
    """An A/B is decided by less than what two runs of the same code differ by.

    `identical_control`, `identical_candidate`: pairs in which both arms ran the same code; each is a lower bound of the
    spread where it was taken, so the smallest of several is what any effect must exceed. `identical`: that spread in %.
    """
    change, words = effect(subject)
    pairs = zip(subject.every("identical_control"), subject.every("identical_candidate"), strict=False)
    spreads = [abs(change_pct(a, b)) for a, b in pairs] + [abs(q.value) for q in subject.every("identical")]
    spreads = [s for s in spreads if not math.isnan(s)]
    if not spreads or not abs(change) <= min(spreads):
        return None
    listed = ", ".join(f"{s:.2f}" for s in spreads)
    which = f"by {listed} %" if len(spreads) == 1 else f"by {listed} %, the smallest of which is larger"
    return Answer(f"{words} decides, and arms that ran the same code differ {which}")


@check("profiled-throughput", "unsound", "profiled", "unprofiled")
def profiled_throughput(subject: Subject) -> Answer | None:
    """A profiler slows the run: its kernel times hold, its tokens per second are no verdict.

    A throughput taken under a profiler (`profiled`), beside the same workload without one (`unprofiled`).
    """
    under = [q for q in subject.every("profiled") if _throughput(q) and q.profiled]
    free = [q.value for q in subject.every("unprofiled") if _throughput(q) and not q.profiled]
    if not under:
        return None
    taken = " and ".join(short(q.value) for q in under)
    told = f"{taken} {under[0].unit} {'were' if len(under) > 1 else 'was'} taken under a profiler"
    if not free:
        return Answer(f"{told}, which slows what they count")
    mean, slow = statistics.fmean(free), statistics.fmean(q.value for q in under)
    many = f"the mean of {len(free)} runs" if len(free) > 1 else "the figure"
    return Answer(f"{told}; {many} without one is {mean:.1f} {under[0].unit}, {mean / slow:.2f} times as much")


def _throughput(quantity: Quantity) -> bool:
    return vocabulary.unit(quantity.unit) in THROUGHPUT


@check("blind-sentinel", "void", "share claim", FLOORS)
def blind_sentinel(subject: Subject) -> Answer | None:
    """The timed region contains so little of the changed operation that the change asked for cannot show in it.

    The operation's `share` of the timed region times the `claim` on it (in %) stays under the noise of the region.
    """
    share, claim_pct = subject["share"], abs(subject["claim"].value)
    floor, what = noise_floor(subject)
    part = share.value / 100.0 if share.unit == "%" else share.value
    seen = part * claim_pct
    if seen > floor:
        return None
    return Answer(
        f"the change is in {about(share)}{100.0 * part:.3g} % of the timed region, so the {claim_pct:.3g} % asked of "
        f"it would move the region by {seen:.2g} %, and {what} is {floor:.3g} %"
    )


# What a figure is ----------------------------------------------------------------------------------------------------


@check("denominator-changed", "overturned", "control candidate line of counted_control counted_candidate")
def denominator_changed(subject: Subject) -> Answer | None:
    """The gate was written on one quantity and passed on another, after the figures were known.

    control, candidate: the quantity that the gate was written on, whose change misses the `line` (in %).
    counted_control, counted_candidate, of: what was counted instead, whose loss meets the line, out of what.
    """
    control, candidate, of = subject["control"], subject["candidate"], subject["of"]
    change, drop = change_pct(control, candidate), -abs(subject["line"].value)  # "drops by more than 50 %"
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
    if control.unit != line.unit or OPERATORS[line.op](control.value, line.value):
        return None
    near = ""
    if error := control.stderr:
        near = f", {abs(control.value - line.value) / error:.2g} standard errors ({short(error)}) from it"
    return Answer(f"the gate asks {line.op} {line}, and the control itself reads {short(control.value)}{near}")


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
    clocks, own = {q.clock for q in less}, whole.clock
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
    called, own = subject["called"], subject["same_label"]
    other, against = subject.get("other_label"), subject.get("against")
    if not abs(change_pct(own, called)) > FLOOR_PCT:
        return None
    told = f"{called} and {short(own.value)} {own.unit} both go by {called.label or 'one label'}"
    if other is not None and abs(change_pct(other, called)) <= FLOOR_PCT:
        told += f"; the first is the {other.label or 'other'}, {short(other.value)}"
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
    return q.unit, q.device, q.model, q.metric, q.path


@check("policy-on-artefact", "void", "policy basis", "later")
def policy_on_artefact(subject: Subject) -> Answer | None:
    """A threshold or a route was derived from a figure that was withdrawn, or that the same arm later contradicted.

    A `policy` derived from a `basis` of which a figure is withdrawn, or from which a `later` one of the same device,
    model, metric and path differs by more than the floor.
    """
    against = []
    for basis in subject.every("basis"):
        path = basis.path or basis.metric
        if basis.withdrawn:
            against.append(f"{path} {basis} was withdrawn ({basis.withdrawn})")
        for later in subject.every("later"):
            if _same(basis) == _same(later) and basis.id != later.id and abs(change_pct(basis, later)) > FLOOR_PCT:
                times = later.value / basis.value
                against.append(f"{path} {short(basis.value)} later read {short(later.value)} ({times:.1f} times)")
    if not against:
        return None
    policy, device = " and ".join(map(str, subject.every("policy"))), subject["basis"].device
    return Answer(f"the line at {policy} rests on figures of {device} that do not stand: {', '.join(against)}")


# What the record and a gate can carry --------------------------------------------------------------------------------


@check("stated-not-shown", "inconclusive", "stated | shown")
def stated_not_shown(subject: Subject) -> Answer | None:
    """A verdict takes identity, or that nothing failed, on the source's word: no figure is printed.

    stated: the conditions that hold on evidence of kind `stated`; shown: those that hold on figures.
    """
    stated = subject.every("stated")
    if not stated:
        return None
    named = ", ".join(dict.fromkeys(q.metric for q in stated))
    lines = "; ".join(dict.fromkeys(q.label for q in stated if q.label))
    return Answer(f"{named}: said and not shown" + (f" (line {lines})" if lines else ""))


@check("later-defect", "void", "tainted | untouched")
def later_defect(subject: Subject) -> Answer | None:
    """The same source later found a defect in what it had measured, or took the conclusion back.

    tainted: figures that the defect touches, their label what was found and their path how heavily it weighs;
    untouched: the verdict's other figures.
    """
    tainted = subject.get("tainted")
    return Answer(tainted.label, WEIGHTS[tainted.path]) if tainted else None


@check("gate-cannot-decide", "unsound", "line candidate", "control")
def gate_cannot_decide(subject: Subject) -> Answer | None:
    """A condition that its figures could not miss, or whose line neither a source nor a reason gives.

    The line is taken from the very figure that is held against it, or one figure stands for both arms.
    """
    line, candidate, control = subject["line"], subject["candidate"], subject.get("control")
    if candidate.id and candidate.id == line.id:
        return Answer(f"the line of {line} is the figure that is held against it")
    if control is not None and candidate.id and candidate.id == control.id:
        return Answer(f"one figure, {candidate}, stands for both arms")
    return None


def unreasoned(card: phases.Card) -> list[str]:
    """Conditions of a card whose line neither a recorded figure, another metric nor the gate's `reason` gives.

    Zero needs none: any effect, or none at all. Lines on errors are the families' tolerances (kernels/*/cases.py).
    """
    if card.gate.reason:
        return []
    given = [c for _, gate in card.gates for _, c in gate.conditions() if c.threshold and not (c.stated_by or c.than)]
    return [str(c) for c in given if c.metric not in ERRORS]


def asked_twice(card: phases.Card) -> list[str]:
    """Required conditions that stand in `complete` or `engaged` too, which are asked first: they cannot fail."""
    found: list[str] = []
    for _, gate in card.gates:
        first = [_bare(c) for c in (*gate.complete, *gate.engaged)]
        found += [str(c) for c in gate.require if _bare(c) in first]
    return found


def _bare(c: Condition) -> tuple[object, ...]:
    return c.metric, c.op, c.threshold, c.compare, c.workload


def touched(verdict_id: str, figures: tuple[str, ...]) -> Iterator[str]:
    """Those of a verdict's figures that a later finding of its source touches."""
    taint = recorded.taints().get(verdict_id)
    patterns = taint.figures.split() if taint else []
    return (figure for figure in figures if any(fnmatchcase(figure, pattern) for pattern in patterns))
