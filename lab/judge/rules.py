"""The judge: a gate declared beforehand and what the evidence reads, to one verdict word and the sentence behind it.

A gate is five lists of conditions in one grammar (metric, comparison, threshold, unit, workload); a list is named for
what happens when one of its conditions does not hold:

    correctness -> INVALID    complete -> BLOCKED    engaged -> VACUOUS    kill (when it holds) -> NO-GO
    require     -> NO-GO, NEUTRAL inside the noise, PARTIAL where workloads disagree

in that order of precedence, after INVALID for a withdrawn figure or a unit that disagrees, and BLOCKED for a figure
that is not there. The judge is pure: no files, no clock, no GPU, so every rule is property-tested on the CPU.

Noise. The floor of a change is max(2 %, 3 sigma of the control) unless the card says otherwise. A threshold outside
the floor is a plain line: met or missed. A threshold inside it (zero, or "not worse than 1 %") asks for an effect
beyond the floor, and what lies within is NEUTRAL; "not worse" is met by its figure, and the finding says that its line
lies inside the floor. A kill condition must be exceeded by the declared floor to count at
all; when the measured noise reaches over it, nobody can tell whether it fired, and the verdict is at most NEUTRAL.
So more noise can turn GO or NO-GO into NEUTRAL and never NO-GO into GO.

Arrivals. A scheduler that protects running requests from new ones shows nothing when all requests come at once. A
condition may name the arrivals it asks about; a figure taken under others, or one that does not say, is no evidence for
it (BLOCKED), and arms taken under different arrivals are no comparison for any gate.

Share. A benchmark that times much more than the candidate changes cannot see it. A condition may say which share of the
timed region the candidate changes; its threshold is then asked of that share, and BLOCKED is returned where meeting it
would move the region by less than the noise floor.

Against. A change usually runs from the control to the candidate on one workload. With `against` it runs from another
workload to this one in the candidate's own figures: how something grows with the context, the batch or the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lab.base import vocabulary
from lab.card.gate import (
    OPERATORS,
    ROLES,
    Condition,
    Evidence,
    Gate,
    Noise,
    Reading,
    _short,
    arrival_of,
)

WORDS = ("INVALID", "BLOCKED", "VACUOUS", "GO", "CONDITIONAL-GO", "NO-GO", "NEUTRAL", "PARTIAL")


THROUGHPUT = ("tok/s", "k tok/s")


@dataclass(frozen=True)
class Finding:
    """One condition held against the evidence.

    state: holds, fails, noise (cannot be told from no effect), missing, arrival (another load than the one asked
           about), blind (the region cannot show it), withdrawn, unit, broken (NaN, zero control).
    """

    role: str
    condition: Condition
    state: str
    observed: str
    ids: tuple[str, ...] = ()
    kind: str = "measured"

    def __str__(self) -> str:
        verb = {"holds": "holds", "fails": "missed", "noise": "within noise", "missing": "no figure"}
        verb |= {"arrival": "another load", "blind": "cannot see it"}
        if self.role == "kill":
            verb = {**verb, "holds": "fired", "fails": "did not fire"}
        return f"{self.observed}, gate {self.condition}: {verb.get(self.state, self.state)}"


@dataclass(frozen=True)
class Verdict:
    """A verdict word, the sentence that decided it, every finding, and those that decided."""

    word: str
    reason: str
    findings: tuple[Finding, ...] = ()
    decisive: tuple[Finding, ...] = ()

    @property
    def observed(self) -> str:
        """The decisive figures in one short phrase."""
        return "; ".join(dict.fromkeys(f.observed for f in self.decisive[:2]))


def judge(gate: Gate, evidence: Evidence) -> Verdict:
    """Hold every condition of `gate` against `evidence`; see the module docstring for the rules."""
    findings = tuple(hold(role, condition, gate.noise, evidence) for role, condition in gate.conditions())

    def those(*states: str, roles: tuple[str, ...] = ROLES) -> list[Finding]:
        return [f for f in findings if f.state in states and f.role in roles]

    def verdict(word: str, because: list[Finding], lead: str = "") -> Verdict:
        shown = max(4, sum(f.state == "fails" for f in because))  # no miss goes unsaid
        more = f"; and {len(because) - shown} more" if len(because) > shown else ""
        return Verdict(word, lead + "; ".join(str(f) for f in because[:shown]) + more, findings, tuple(because))

    if bad := those("withdrawn", "unit", "broken"):
        return verdict("INVALID", bad)
    if bad := those("fails", roles=("correctness",)):
        return verdict("INVALID", bad, "not correct: ")
    if bad := [*those("fails", roles=("complete",)), *those("missing", "arrival", "blind")]:
        return verdict("BLOCKED", bad, "evidence incomplete: ")
    if bad := those("fails", roles=("engaged",)):
        return verdict("VACUOUS", bad, "the candidate did not engage: ")
    if bad := those("holds", roles=("kill",)):
        also = those("fails", roles=("require",))
        return verdict("NO-GO", [*also, *bad])
    return _weigh(gate, findings, verdict)


def _weigh(gate: Gate, findings: tuple[Finding, ...], verdict: Callable[..., Verdict]) -> Verdict:
    """The required conditions: global ones first, then workload by workload."""
    required = [f for f in findings if f.role == "require"]
    unsure = [f for f in findings if f.role == "kill" and f.state == "noise"]
    overall = [f for f in required if not f.condition.workload]
    failed = [f for f in required if f.state == "fails"]
    noisy = [f for f in required if f.state == "noise"]
    if any(f.state == "fails" for f in overall):
        return verdict("NO-GO", failed)
    by_workload: dict[str, set[str]] = {}
    for f in required:
        if f.condition.workload:
            by_workload.setdefault(f.condition.workload, set()).add(f.state)
    states = ["fails" if "fails" in s else "noise" if "noise" in s else "holds" for s in by_workload.values()]
    if "fails" in states and "holds" not in states:
        return verdict("NO-GO", failed)
    if any(f.state == "noise" for f in overall):
        return verdict("NEUTRAL", [f for f in overall if f.state == "noise"])
    if "holds" in states and len(set(states)) > 1:
        return verdict(
            "PARTIAL", [*failed, *noisy, *(f for f in required if f.state == "holds")], "workloads disagree: "
        )
    if "noise" in states:
        return verdict("NEUTRAL", noisy)
    if unsure:
        return verdict("NEUTRAL", unsure, "a kill condition cannot be told from noise: ")
    weak = sorted({f.kind for f in required if f.kind != "measured"} | ({"modelled"} if gate.modelled else set()))
    if weak:
        return verdict("CONDITIONAL-GO", required, f"on {' and '.join(weak)} evidence: ")
    return verdict("GO", required or [f for f in findings if f.role == "engaged"])


def hold(role: str, condition: Condition, noise: Noise, evidence: Evidence) -> Finding:
    """One condition against the evidence."""
    reading = evidence.get((condition.of, condition.workload))
    if condition.against:
        reading = _between(evidence.get((condition.of, condition.against)), reading)
    other = evidence.get((condition.than, condition.workload)) if condition.than else None
    used = [r for r in (reading, other) if r is not None]

    def finding(state: str, observed: str) -> Finding:
        ids = tuple(i for r in used for i in r.ids)
        kind = next((r.kind for r in used if r.kind != "measured"), "measured")
        return Finding(role, condition, state, observed, ids, kind)

    if reading is None:
        return finding("missing", f"{condition.of} is not in the evidence")
    for metric, r in zip((condition.metric, condition.than), used, strict=False):
        if r.withdrawn:
            return finding("withdrawn", f"{metric} was withdrawn by its source ({r.withdrawn})")
        if r.impossible:
            return finding("broken", r.impossible)
        if r.profiled and vocabulary.unit(r.unit) in THROUGHPUT:
            return finding("broken", f"{condition.of} was taken under a profiler, which slows what it counts")
    if not reading.unit:
        return finding("missing", f"{condition.of} has no unit")
    metric_unit = vocabulary.metrics()[condition.metric].unit
    accepted = {metric_unit, "%"} if reading.change_pct is not None and reading.candidate is None else {metric_unit}
    if vocabulary.unit(reading.unit) not in accepted:
        return finding("unit", f"{condition.of} is in {reading.unit}, not {metric_unit}")
    numbers = (reading.control, reading.candidate, reading.change_pct, reading.control_sd_pct, reading.noise_pct)
    numbers += (reading.control_launches, reading.candidate_launches, *(reading.interval_pct or ()))
    if any(n is not None and not math.isfinite(n) for n in (*numbers, other.candidate if other else None)):
        return finding("broken", f"{condition.of} is not a number")
    for metric, r in zip((condition.metric, condition.than), used, strict=False):
        if text := _other_arrival(metric, r.arrival, condition.arrival):
            return finding("arrival", text)
    if condition.compare == "change":
        return _hold_change(role, condition, noise, reading, finding)
    return _hold_value(condition, reading, other, finding)


def _between(there: Reading | None, here: Reading | None) -> Reading | None:
    """The candidate's figures of two workloads as one reading, the first as its control; None without both."""
    if there is None or here is None:
        return None
    both = (there, here)
    units = list(dict.fromkeys(r.unit for r in both))  # two of them disagree, which is no unit that a metric has
    spread = [r.noise_pct for r in both if r.noise_pct is not None]
    return Reading(
        unit=" and ".join(units) if all(units) else "",
        control=there.candidate,
        candidate=here.candidate,
        control_sd_pct=there.control_sd_pct,
        noise_pct=max(spread, default=None),
        kind=next((r.kind for r in both if r.kind != "measured"), "measured"),
        ids=(*there.ids, *here.ids),
        withdrawn=there.withdrawn or here.withdrawn,
        impossible=there.impossible or here.impossible,
        control_launches=there.candidate_launches,
        candidate_launches=here.candidate_launches,
        profiled=there.profiled or here.profiled,
        arrival=arrival_of(r.arrival for r in both),
    )


def _other_arrival(metric: str, taken: str, asked: str) -> str:
    """ "" or why a figure taken under these arrivals says nothing about the load that is asked about."""
    if " and " in taken:
        return f"the arms of {metric} were taken under {taken} arrivals, which is no comparison"
    if not asked or taken == asked:
        return ""
    if not taken:
        return f"{metric} does not say under which arrivals it was taken; the gate asks {asked}"
    return f"{metric} was taken under {taken} arrivals; the gate asks {asked}"


def _hold_value(
    condition: Condition, reading: Reading, other: Reading | None, finding: Callable[[str, str], Finding]
) -> Finding:
    if reading.candidate is None:
        return finding("missing", f"{condition.of} has no candidate arm")
    value, threshold = reading.candidate, condition.threshold
    text = f"{condition.of} {_short(value)} {reading.unit}"
    if condition.compare == "difference":
        if reading.control is None:
            return finding("missing", f"{condition.of} has no control arm")
        value = reading.candidate - reading.control
        text = f"{condition.of} {_short(reading.control)} -> {_short(reading.candidate)} {reading.unit}"
    if condition.than:
        if other is None or other.candidate is None or not other.unit:
            return finding("missing", f"{condition.than} is not in the evidence with its unit")
        if vocabulary.unit(other.unit) != vocabulary.unit(reading.unit):
            return finding("unit", f"{condition.than} is in {other.unit}, {condition.of} in {reading.unit}")
        threshold = other.candidate
        text += f" against {condition.than} {_short(threshold)}"
    met = OPERATORS[condition.op](value, threshold)
    by_control = met or condition.compare != "value" or reading.control is None
    if not by_control and not OPERATORS[condition.op](reading.control or 0.0, threshold):
        text += f" (the control, {_short(reading.control or 0.0)}, misses it too)"
    return finding("holds" if met else "fails", text)


def _hold_change(
    role: str, condition: Condition, noise: Noise, reading: Reading, finding: Callable[[str, str], Finding]
) -> Finding:
    arms = ""
    change = reading.change_pct
    if reading.control is not None and reading.candidate is not None:
        if reading.control <= 0:
            text = f"{condition.of} of the control is {_short(reading.control)}, no change can be formed"
            return finding("broken", text)
        # Not candidate / control - 1, which makes 1000 -> 900 a change of -9.999999999999998 %.
        by_block = reading.change_pct if reading.interval_pct else None
        change = 100.0 * (reading.candidate - reading.control) / reading.control if by_block is None else by_block
        paired = "" if by_block is None else ", by pairs"
        arms = f" ({_short(reading.control)} -> {_short(reading.candidate)} {reading.unit}{paired})"
    if change is None:
        absent = "control" if reading.control is None else "candidate"
        return finding("missing", f"{condition.of} has no {absent} arm")
    launches = (reading.control_launches, reading.candidate_launches)
    if launches[0] and launches[1] and launches[0] != launches[1]:
        per_launch = (1.0 + change / 100.0) * launches[0] / launches[1]
        arms += f", {change:+.2f} % before dividing by {_short(launches[0])} and {_short(launches[1])} launches"
        change = 100.0 * (per_launch - 1.0)
    if reading.interval_pct:
        arms += f", 95 % interval {reading.interval_pct[0]:+.2f} to {reading.interval_pct[1]:+.2f} %"
    sigma_pct = noise.sigmas * (reading.control_sd_pct or 0.0)
    floor = max(noise.floor_pct, sigma_pct, reading.noise_pct or 0.0)
    text = f"{condition.of} {change:+.2f} %{arms}"
    if reading.interval_pct and reading.interval_pct[0] <= condition.threshold <= reading.interval_pct[1]:
        text += ", across the line"
    # `effect` and `line` grow in the direction the condition asks for.
    sign = 1.0 if condition.op in (">", ">=") else -1.0
    threshold = condition.share * condition.threshold  # asked of the part, seen in the whole
    effect, line = sign * change, sign * threshold
    met = OPERATORS[condition.op](change, threshold)
    if condition.share < 1:
        seen = condition.share * (abs(condition.threshold) or 100.0)  # more than nothing: at most the part itself
        if seen <= floor:
            return finding("blind", f"{text}; at most {_short(seen)} % would show, noise floor {_short(floor)} %")
    if role not in ("kill", "require"):  # more noise must never make a result correct, complete or engaged
        return finding("holds" if met else "fails", text)
    if role == "kill":
        if not met or effect <= noise.floor_pct:
            return finding("fails", text)
        return finding("holds" if effect > floor else "noise", f"{text}, noise floor {_short(floor)} %")
    if abs(line) > floor:
        return finding("holds" if met else "fails", text)
    text += f", {'the line lies inside the ' if line else ''}noise floor {'of ' if line else ''}{_short(floor)} %"
    if line < 0:  # "not worse than": met is enough, missed within the floor cannot be told
        return finding("holds" if met else "noise" if effect >= -floor else "fails", text)
    if effect > floor and met:
        return finding("holds", text)
    return finding("fails" if effect < -floor else "noise", text)
