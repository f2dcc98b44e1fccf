"""Checks on what two arms show: did the candidate run, are the arms whole, and is the effect larger than the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from lab.base import vocabulary
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


@check("zero-engagement", "void", "engaged", "result")
def zero_engagement(subject: Subject) -> Answer | None:
    """A candidate that never ran where it was judged has shown nothing, not even that it does no harm.

    `engaged` = 0: whatever was found beside it (`result`) is a property of the control.
    """
    engaged, result = subject["engaged"], subject.get("result")
    if engaged.value > 0:
        return None
    told = f", so the {result.facts.metric or 'result'} of {result} says nothing about it" if result else ""
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
        sigmas = line.facts.sigmas if line else SIGMAS
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
    under = [q for q in subject.every("profiled") if _throughput(q) and q.facts.profiled]
    free = [q.value for q in subject.every("unprofiled") if _throughput(q) and not q.facts.profiled]
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
