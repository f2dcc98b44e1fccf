"""The judge: a gate declared beforehand and what the evidence reads, to one verdict word and the sentence behind it.

A gate's lists of conditions, and what each decides in which order, stand in lab/card/gate.py. INVALID for a withdrawn
figure or a unit that disagrees comes before them; BLOCKED for a figure that is not there comes with `complete`. The
judge is pure: no files, no clock, no GPU, so every rule is property-tested on the CPU.

Noise. The floor of a change is max(2 %, 3 sigma of the control) unless the card says otherwise. A threshold outside
the floor is a plain line: met or missed. A threshold inside it (zero, or "not worse than 1 %") asks for an effect
beyond the floor, and what lies within is NEUTRAL; "not worse" is met by its figure, and the finding says that its line
lies inside the floor. A kill condition must be exceeded by the declared floor to count at
all; when the measured noise reaches over it, nobody can tell whether it fired, and the verdict is at most NEUTRAL.
So more noise can turn GO or NO-GO into NEUTRAL and never NO-GO into GO.

Undecided. A condition is decided by its whole interval, where the evidence has one: a required line that lies inside it
makes neither GO nor NO-GO. The verdict is then BLOCKED and says about how many more blocks would decide, unless another
condition already fails clearly. It is so for recorded, imported and measured evidence.

Placements. The interval of a comparison over placements holds the noise of both arms, so the floor is what the card
declares and nothing measured is added to it. What lies within the floor is NEUTRAL where the interval is no wider than
the floor, else undecided. A kill condition has fired where the whole interval lies beyond its line, and has not where
none of it does, or none beyond the floor; else nobody can tell. Rows that did not converge, or were timed by a clock
that disagrees, decide nothing (BLOCKED). Where a power cap held the GPU's clock down, the interval is wider by what
that can have cost either arm at most, and where nobody knows that, it decides nothing. Rows of one placement keep the
rules above, with intervals that are wider by what a placement may move (lab/judge/evidence.py).

Direction. A gate may ask for what nobody wants (a divergence that has to show), and a slip of a sign looks the same:
a GO that rests on a required change for the worse says so, unless the gate bounds that change from both sides.

Stated. A source may say that a result is identical, or that nothing crashed, and print no figure. Such evidence may
stand in a GO, which then says what is stated and not shown.

Arrivals. A scheduler that protects running requests from new ones shows nothing when all requests come at once. A
condition may name the arrivals it asks about; a figure taken under others, or one that does not say, is no evidence for
it (BLOCKED), and arms taken under different arrivals are no comparison for any gate.

Devices. A line in us or GB/s belongs to the device that its card declares. On another one's rows it is BLOCKED, where
a change, a share of the roofline or an error is held as it is.

Share. By Amdahl's law a benchmark that times much more than the candidate changes cannot see it. A condition may say
which share of the timed region the candidate changes; its threshold is then asked of that share, and BLOCKED is
returned where meeting it would move the region by less than the noise floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from lab.base import interval, vocabulary
from lab.card.gate import OPERATORS, ROLES, WEIGHED, Condition, Evidence, Gate, Noise, Reading, arrival_of, short

WORDS = ("INVALID", "BLOCKED", "VACUOUS", "GO", "CONDITIONAL-GO", "NO-GO", "NEUTRAL", "PARTIAL")
THROUGHPUT = ("tok/s", "k tok/s")
SPEED = ("time", "bandwidth", "rate", "tokens per time")  # quantities that a device decides
MOST = {"block": 10_000, "placement": 200}  # that anybody takes: a placement costs seconds, and its cards take 8 to 32
# state of a finding -> what a sentence says of it; the other states are said as they are
SAID = {"fails": "missed", "noise": "within noise", "missing": "no figure", "arrival": "another load"}
SAID |= {"blind": "cannot see it", "undecided": "undecided", "unsettled": "not settled"}
SAID_OF_A_KILL = {"holds": "fired", "fails": "did not fire"}


@dataclass(frozen=True)
class Seen:
    """The numbers of a finding: what was observed and the line that it was held to, both in `unit`.

    interval: of the value, low and high, None where there are no blocks. control, candidate: the arms behind a change
    or a difference, in `arms_unit`; None where the evidence states only the change. placements, slowed: of the
    reading.
    """

    value: float
    line: float
    unit: str
    interval: tuple[float, float] | None = None
    control: float | None = None
    candidate: float | None = None
    arms_unit: str = ""
    placements: int = 0
    slowed: str = ""

    @property
    def over(self) -> str:
        """What the interval is over, "" where it is over no placements."""
        words = {0: "", 1: "one placement"}
        return words.get(self.placements, f"{self.placements} placements") if self.interval else ""


@dataclass(frozen=True)
class Finding:
    """One condition held against the evidence.

    state: holds, fails, undecided (its line lies inside the interval), noise (cannot be told from no effect), missing,
           arrival (another load than the one asked about), blind (the region cannot show it), unsettled (its rows
           may not decide), withdrawn, unit, broken (NaN, zero control).
    seen:  the numbers, None where none could be formed.
    """

    role: str
    condition: Condition
    state: str
    observed: str
    ids: tuple[str, ...] = ()
    kind: str = "measured"
    seen: Seen | None = None

    def __str__(self) -> str:
        said = SAID | SAID_OF_A_KILL if self.role == "kill" else SAID
        return f"{self.observed}, gate {self.condition}: {said.get(self.state, self.state)}"


@dataclass(frozen=True)
class Held:
    """A finding without what it is about."""

    state: str
    observed: str
    seen: Seen | None = None


@dataclass(frozen=True)
class Verdict:
    """A verdict word, the sentence that decided it, every finding, and those that decided."""

    word: str
    reason: str
    findings: tuple[Finding, ...] = ()
    decisive: tuple[Finding, ...] = ()

    @property
    def observed(self) -> str:
        """The decisive figures in one short phrase, and of those that are not there the workloads."""
        said: dict[str, list[str]] = {}
        for f in self.decisive:
            said.setdefault(f.observed, []).extend([f.condition.workload] * (f.state == "missing"))
        first = list(dict.fromkeys(f.observed for f in self.decisive[:2]))
        return "; ".join(what + _at(said[what]) for what in first)


def _at(workloads: Iterable[str]) -> str:
    """ " at" the first of these workloads and how many more, or ""."""
    first, *rest = dict.fromkeys(workloads) or [""]
    return (f" at {first}" + (f" and {len(rest)} more" if rest else "")) if first else ""


def judge(gate: Gate, evidence: Evidence, lines_of: str = "", absent: Mapping[str, str] | None = None) -> Verdict:
    """Hold every condition of `gate` against `evidence`; see the module docstring for the rules.

    lines_of: the device that its lines were declared for, where the evidence is of another. absent: workload -> why it
    has no figures, which is said of a figure that is not there and decides nothing.
    """
    held = (hold(role, condition, gate, evidence, lines_of) for role, condition in gate.conditions())
    findings = tuple(_because(finding, absent or {}) for finding in held)

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
    if bad := [*those("fails", roles=("complete",)), *those("missing", "arrival", "blind", "unsettled")]:
        return verdict("BLOCKED", bad, "evidence incomplete: ")
    if bad := those("fails", roles=("engaged",)):
        return verdict("VACUOUS", bad, "the candidate did not engage: ")
    if bad := those("holds", roles=("kill",)):
        return verdict("NO-GO", [*those("fails", roles=("require",)), *bad])
    return _weigh(gate, findings, verdict)


def _weigh(gate: Gate, findings: tuple[Finding, ...], verdict: Callable[..., Verdict]) -> Verdict:
    required = [f for f in findings if f.role == "require"]
    unsure = [f for f in findings if f.role == "kill" and f.state == "noise"]
    overall = [f for f in required if not f.condition.workload]
    failed, noisy, open_ = ([f for f in required if f.state == state] for state in ("fails", "noise", "undecided"))
    if any(f.state == "fails" for f in overall):
        return verdict("NO-GO", failed)
    by_workload: dict[str, set[str]] = {}
    for f in required:
        if f.condition.workload:
            by_workload.setdefault(f.condition.workload, set()).add(f.state)
    states = [next(w for w in ("fails", "undecided", "noise", "holds") if w in s) for s in by_workload.values()]
    if "fails" in states and "holds" not in states:
        return verdict("NO-GO", failed)
    if open_ and not failed:
        return verdict("BLOCKED", open_, "undecided: ")
    if any(f.state == "noise" for f in overall):
        return verdict("NEUTRAL", [f for f in overall if f.state == "noise"])
    if "holds" in states and len(set(states)) > 1:
        held = [f for f in required if f.state == "holds"]
        return verdict("PARTIAL", [*failed, *open_, *noisy, *held], "workloads disagree: ")
    if "noise" in states:
        return verdict("NEUTRAL", noisy)
    if unsure:
        return verdict("NEUTRAL", unsure, "a kill condition cannot be told from noise: ")
    weak = {f.kind for f in required if f.kind not in ("measured", "stated")}
    weak |= {"modelled"} if gate.modelled else set()
    because = required or [f for f in findings if f.role == "engaged"]
    lead = f"on {' and '.join(sorted(weak))} evidence: " if weak else ""
    if gate.modelled and weak == {"modelled"} and not any(f.kind == "modelled" for f in required):
        why = f" ({gate.reason.rstrip('.')})" if gate.reason else ""
        lead = f"on measured rows of a part that stands for the whole which the gate is about{why}: "
    found = verdict("CONDITIONAL-GO" if weak else "GO", because, lead)
    stated = ", ".join(dict.fromkeys(f.condition.of for f in findings if f.kind == "stated"))
    reason = found.reason + (f"; stated, not shown: {stated}" if stated else "")
    return replace(found, reason="; mind: ".join([reason, *_for_the_worse(gate)]))


def _for_the_worse(gate: Gate) -> list[str]:
    """What a gate requires to get worse than the control's, where nothing else it requires bounds that."""
    changes = [c for c in gate.require if c.compare != "value" and not (c.than or c.against or c.op == "==")]
    metrics = gate.metrics
    worse = {(c.of, c.workload): c.metric for c in changes if metrics[c.metric].for_the_worse(c.op)}
    for c in changes:
        if not metrics[c.metric].for_the_worse(c.op):  # bounded from both sides: it asks for no change at all
            worse.pop((c.of, c.workload), None)
    return [f"the gate asks for the worse, {of} is better {metrics[m].better}" for (of, _), m in worse.items()][:1]


def _because(found: Finding, absent: Mapping[str, str]) -> Finding:
    """The finding, or, of a figure that is not there, with the reason."""
    at = found.condition
    why = next((absent[w] for w in (at.workload, at.against) if w in absent), "")
    return replace(found, observed=f"{at.of} {why}") if why and found.state == "missing" else found


def hold(role: str, condition: Condition, gate: Gate, evidence: Evidence, lines_of: str = "") -> Finding:
    """One condition of a gate against the evidence; lines_of as in `judge`."""
    reading = evidence.get((condition.of, condition.workload))
    if condition.against:
        reading = _between(evidence.get((condition.of, condition.against)), reading)
    other = evidence.get((condition.than, condition.workload)) if condition.than else None
    used = [r for r in (reading, other) if r is not None]
    if reading is None:
        held = Held("missing", f"{condition.of} is not in the evidence")
    elif unusable := _unusable(condition, reading, other, gate.metrics[condition.metric].unit):
        held = unusable
    elif condition.compare == "change":
        held = _change(role, condition, gate.noise, reading)
    else:
        held = _value(condition, reading, other)
        if lines_of and held.seen and not condition.than and vocabulary.measures(reading.unit).quantity in SPEED:
            held = Held("unsettled", f"{held.observed}, and its line was declared for {lines_of}", held.seen)
    if role == "require" and held.state in ("holds", "fails") and held.seen and reading:
        held = _open(held, held.seen, reading.repeats)
    ids = tuple(i for r in used for i in r.ids)
    return Finding(role, condition, held.state, held.observed, ids, _weakest(used), held.seen)


def _open(held: Held, seen: Seen, repeats: int) -> Held:
    """The finding, or, where its line lies inside its interval, that nobody can tell yet and what would."""
    if seen.interval is None or not seen.interval[0] <= seen.line <= seen.interval[1]:
        return held
    reach = abs(seen.interval[seen.line > seen.value] - seen.value)
    return _undecided(held.observed, seen, reach, abs(seen.line - seen.value), repeats)


def _undecided(observed: str, seen: Seen, reach: float, wanted: float, repeats: int) -> Held:
    """An undecided finding that says what would bring the reach of its interval down to the wanted one."""
    # An interval narrows with the square root of what it stands on.
    endless = float(max(MOST.values()))
    wider = min(reach / wanted, endless) if wanted else endless
    more = max(1, math.ceil(repeats * (wider**2 - 1)))
    if seen.placements == 1:
        return Held("undecided", f"{observed}; measured over placements it may be decided", seen)
    if seen.slowed and repeats:
        return Held("undecided", f"{observed}, without that cap (a longer --rest) it may be decided", seen)
    what = "placement" if seen.placements > 1 else "block"
    asked = f"about {more} more {what}{'s' * (more != 1)} would decide it"
    asked = asked if more <= MOST[what] else f"no number of {what}s that anybody takes would decide it"
    return Held("undecided", f"{observed}, {asked if repeats else 'repetitions would decide it'}", seen)


def _interval(seen: Seen) -> str:
    """The interval of a finding in words, after a comma; "" without one."""
    if seen.interval is None:
        return ""
    form = "{:+.2f}" if seen.unit == "%" else "{:.6g}"
    low, high = (form.format(end) for end in seen.interval)
    slowed = f", {seen.slowed}" if seen.slowed else ""
    if seen.placements == 1:
        return f", {low} to {high} {seen.unit} for one placement{slowed}"
    level = interval.PLACEMENT_LEVEL if seen.placements > 1 else interval.LEVEL
    over = f" over {seen.over}" if seen.over else ""
    return f", {100 * level:.0f} % interval {low} to {high} {seen.unit}{over}{slowed}"


def _weakest(readings: Iterable[Reading]) -> str:
    return next((r.kind for r in readings if r.kind != "measured"), "measured")


def _between(there: Reading | None, here: Reading | None) -> Reading | None:
    """The candidate's figures of two workloads as one reading, the first as its control; None without both."""
    if there is None or here is None:
        return None
    both = (there, here)
    units = list(dict.fromkeys(r.unit for r in both))  # two of them disagree, which is no unit that a metric has
    placed = min(r.placements for r in both)
    change = _apart(there, here) if placed else None
    spread = [r.noise_pct for r in both if r.noise_pct is not None]
    machines = list(dict.fromkeys(r.machine for r in both if r.machine))
    elsewhere = f"its two workloads were measured on {' and on '.join(machines)}" if len(machines) > 1 else ""
    return Reading(
        unit=" and ".join(units) if all(units) else "",
        control=there.candidate,
        candidate=here.candidate,
        control_sd_pct=there.control_sd_pct,
        noise_pct=max(spread, default=None),
        change_pct=change[0] if change else None,
        interval_pct=change[1:] if change else None,
        repeats=placed if change else 0,
        placements=placed if change else 0,
        unsettled=there.unsettled or here.unsettled or elsewhere,
        slowed=here.slowed or there.slowed,
        slowed_by=max(there.slowed_by, here.slowed_by),
        kind=_weakest(both),
        ids=(*there.ids, *here.ids),
        withdrawn=there.withdrawn or here.withdrawn,
        impossible=there.impossible or here.impossible,
        control_launches=there.candidate_launches,
        candidate_launches=here.candidate_launches,
        profiled=there.profiled or here.profiled,
        arrival=arrival_of(r.arrival for r in both),
    )


def _apart(there: Reading, here: Reading) -> tuple[float, float, float] | None:
    """(change, low, high) in % between figures with an interval each, measured apart; None without both intervals.

    The distances from a figure to the ends of its interval add in quadrature, on logarithms (Zou and Donner 2008).
    """
    figures = [(r.candidate, *(r.interval or ())) for r in (there, here)]
    if any(len(figure) < 3 or not all(x and x > 0 for x in figure) for figure in figures):
        return None
    (was, was_low, was_high), (now, low, high) = ([math.log(x or 1.0) for x in figure] for figure in figures)
    change = now - was
    ends = change, change - math.hypot(now - low, was_high - was), change + math.hypot(high - now, was - was_low)
    here_, low, high = (100.0 * math.expm1(end) for end in ends)
    return here_, low, high


def _unusable(condition: Condition, reading: Reading, other: Reading | None, unit: str) -> Held | None:
    """Why figures are no evidence for a condition of a metric in `unit`, whatever their size; None when they are."""
    named = [(condition.metric, reading)] + ([] if other is None else [(condition.than, other)])
    for metric, r in named:
        if r.withdrawn:
            return Held("withdrawn", f"{metric} was withdrawn by its source ({r.withdrawn})")
        if r.impossible:
            return Held("broken", r.impossible)
        if r.unsettled:
            return Held("unsettled", f"{condition.of}: {r.unsettled}")
        if r.profiled and vocabulary.unit(r.unit) in THROUGHPUT:
            return Held("broken", f"{condition.of} was taken under a profiler, which slows what it counts")
    if not reading.unit:
        return Held("missing", f"{condition.of} has no unit")
    change_alone = reading.change_pct is not None and reading.candidate is None
    if vocabulary.unit(reading.unit) not in ({unit, "%"} if change_alone else {unit}):
        return Held("unit", f"{condition.of} is in {reading.unit}, not {unit}")
    numbers = [reading.control, reading.candidate, reading.change_pct, reading.control_sd_pct, reading.noise_pct]
    numbers += [reading.control_launches, reading.candidate_launches]
    numbers += [*(reading.interval_pct or ()), *(reading.interval or ())]
    if any(n is not None and not math.isfinite(n) for n in (*numbers, other.candidate if other else None)):
        return Held("broken", f"{condition.of} is not a number")
    for metric, r in named:
        if text := _other_arrival(metric, r.arrival, condition.arrival):
            return Held("arrival", text)
    return None


def _other_arrival(metric: str, taken: str, asked: str) -> str:
    """ "" or why a figure taken under these arrivals says nothing about the load that is asked about."""
    if " and " in taken:
        return f"the arms of {metric} were taken under {taken} arrivals, which is no comparison"
    if not asked or taken == asked:
        return ""
    if not taken:
        return f"{metric} does not say under which arrivals it was taken; the gate asks {asked}"
    return f"{metric} was taken under {taken} arrivals; the gate asks {asked}"


def _value(condition: Condition, reading: Reading, other: Reading | None) -> Held:
    control, value, threshold = reading.control, reading.candidate, condition.threshold
    if value is None:
        return Held("missing", f"{condition.of} has no candidate arm")
    text = f"{condition.of} {short(value)} {reading.unit}"
    if condition.compare == "difference":
        if control is None:
            return Held("missing", f"{condition.of} has no control arm")
        text = f"{condition.of} {short(control)} -> {short(value)} {reading.unit}"
        value -= control
    if condition.than:
        if other is None or other.candidate is None or not other.unit:
            return Held("missing", f"{condition.than} is not in the evidence with its unit")
        if vocabulary.unit(other.unit) != vocabulary.unit(reading.unit):
            return Held("unit", f"{condition.than} is in {other.unit}, {condition.of} in {reading.unit}")
        threshold = other.candidate
        text += f" against {condition.than} {short(threshold)}"
    ends = reading.interval if condition.compare == "value" else reading.difference
    arms, of = (control, reading.candidate, reading.unit), (reading.placements, reading.slowed)
    seen = Seen(value, threshold, reading.unit, ends, *arms, *of)
    text += _interval(seen)
    meets = OPERATORS[condition.op]
    if meets(value, threshold):
        return Held("holds", text, seen)
    if condition.compare == "value" and control is not None and not meets(control, threshold):
        text += f" (the control, {short(control)}, misses it too)"
    return Held("fails", text, seen)


def _without_cap(change: float, most: float) -> float:
    """What is left of a change in % where a cap may have slowed either arm by this factor: less, or nothing."""
    ratio = 1.0 + change / 100.0
    least = min(1.0, ratio * most) if ratio < 1.0 else max(1.0, ratio / most)
    return change if most == 1.0 else 100.0 * (least - 1.0)


def _change(role: str, condition: Condition, noise: Noise, reading: Reading) -> Held:
    control, candidate, change, arms = reading.control, reading.candidate, reading.change_pct, ""
    if control is not None and candidate is not None:
        if control <= 0:
            return Held("broken", f"{condition.of} of the control is {short(control)}, no change can be formed")
        # Not candidate / control - 1, which makes 1000 -> 900 a change of -9.999999999999998 %.
        by_block = change if reading.interval_pct else None
        change = 100.0 * (candidate - control) / control if by_block is None else by_block
        by = "" if by_block is None or condition.against else ", by pairs"
        arms = f" ({short(control)} -> {short(candidate)} {reading.unit}{by})"
    if change is None:
        return Held("missing", f"{condition.of} has no {'control' if control is None else 'candidate'} arm")
    launches = (reading.control_launches, reading.candidate_launches)
    if launches[0] and launches[1] and launches[0] != launches[1]:
        per_launch = (1.0 + change / 100.0) * launches[0] / launches[1]
        arms += f", {change:+.2f} % before dividing by {short(launches[0])} and {short(launches[1])} launches"
        change = 100.0 * (per_launch - 1.0)
    placed = reading.placements > 1 and reading.interval_pct is not None
    sigma_pct = noise.sigmas * (reading.control_sd_pct or 0.0)
    floor = noise.floor_pct if placed else max(noise.floor_pct, sigma_pct, reading.noise_pct or 0.0)
    # `effect` and `line` grow in the direction the condition asks for.
    sign = 1.0 if condition.op in (">", ">=") else -1.0
    threshold = condition.share * condition.threshold  # asked of the part, seen in the whole
    effect, line = sign * _without_cap(change, reading.slowed_by), sign * threshold
    arms_unit = "" if candidate is None else reading.unit
    ends = reading.interval_pct
    numbers = Seen(change, threshold, "%", ends, control, candidate, arms_unit, reading.placements, reading.slowed)
    text, noise_floor = f"{condition.of} {change:+.2f} %{arms}{_interval(numbers)}", f"noise floor {short(floor)} %"
    if ends and ends[0] <= threshold <= ends[1]:
        text += ", across the line"
    met = OPERATORS[condition.op](change, threshold)
    if condition.share < 1:
        seen = condition.share * (abs(condition.threshold) or 100.0)  # more than nothing: at most the part itself
        if seen <= floor:
            return Held("blind", f"{text}; at most {short(seen)} % would show, {noise_floor}", numbers)
    if role not in WEIGHED:  # more noise must never make a result correct, complete or engaged
        return Held("holds" if met else "fails", text, numbers)
    if role == "kill":
        if placed and ends:
            least, most = sorted(sign * end for end in ends)
            fired = met and effect > floor and least > line
            state = "holds" if fired else "fails" if most <= max(line, floor) else "noise"
            return Held(state, f"{text}, {noise_floor}", numbers)
        if not met or effect <= noise.floor_pct:
            return Held("fails", text, numbers)
        return Held("holds" if effect > floor else "noise", f"{text}, {noise_floor}", numbers)
    if abs(line) > floor:
        return Held("holds" if met else "fails", text, numbers)
    if line < 0:  # "not worse than": met is enough, missed within the floor cannot be told
        state = "holds" if met else "noise" if effect >= -floor else "fails"
    elif effect > floor and met:
        state = "holds"
    else:
        state = "fails" if effect < -floor else "noise"
    text += f", the line lies inside the noise floor of {short(floor)} %" if line else f", {noise_floor}"
    if state == "noise" and placed and ends and (reach := (ends[1] - ends[0]) / 2) > floor:
        return _undecided(f"{text}, the interval is wider than that", numbers, reach, floor, reading.repeats)
    return Held(state, text, numbers)
