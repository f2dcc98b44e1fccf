"""Subjects that no one has to name: every recorded case of every card, and every measured comparison in profiles/.

A body is one verdict with everything it was reached on, recorded or measured alike; a finder takes from it what one
check needs. Where a source or our judge claims nothing there is nothing to audit, so finders that ask whether an effect
is real look at verdicts that claim one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as changed

from lab.base import devices
from lab.card import phases, recorded
from lab.card.gate import Condition, Evidence, Gate, Reading
from lab.judge import evidence
from lab.judge.rules import Verdict, judge
from lab.judge.verdicts import staleness
from lab.row import store
from lab.row.records import Measurement
from lab.study.audit import checks
from lab.study.audit.bindings import TIMED, from_row
from lab.study.audit.subject import Quantity, Subject, from_figure

ARMS = ("control", "candidate")
CLAIMS = ("GO", "LANDED", "CONDITIONAL-GO")  # the words that say an effect is there
FIDELITY = ("kld", "nmse")  # units of metrics that hold a candidate to a reference: no one improves on the control
FIDELITY_METRICS = ("same_top_p", "relative_error")


@dataclass(frozen=True)
class Held:
    """A condition of a body, and the reading that it was held against.

    part: the claim that it belongs to, "" for the gate itself. word: the source's verdict, or ours on that part.
    """

    part: str
    gate: Gate
    word: str
    condition: Condition
    reading: Reading

    @property
    def title(self) -> str:
        """The part, the metric and the workload."""
        where = f"{self.condition.of} at {self.condition.workload}" if self.condition.workload else self.condition.of
        return f"{self.part}, {where}" if self.part else where

    @property
    def floor(self) -> Quantity:
        """The noise floor that the gate declares, in %."""
        return Quantity(self.gate.noise.floor_pct, "%", sigmas=self.gate.noise.sigmas)

    def line(self, share_of: float = 1.0) -> Quantity:
        """The threshold, or what of it shows in the whole timed region."""
        c = self.condition
        return Quantity(share_of * c.threshold, c.unit, c.stated_by, op=c.op)

    def arms(self) -> dict[str, Quantity]:
        """The arms that the reading has, by name."""
        return _arms(self.reading, self.condition.metric)

    def effect(self) -> dict[str, Quantity]:
        """Roles: change, or control and candidate; and the noise that came with them."""
        reading, roles = self.reading, self.arms()
        if len(roles) == 2:
            if reading.interval_pct and reading.change_pct is not None:  # block by block: better than the medians
                roles["change"] = Quantity(reading.change_pct, "%", roles["candidate"].id)
        else:
            changed = reading.change_pct
            roles = {} if changed is None else {"change": Quantity(changed, "%", next(iter(reading.ids), ""))}
        for role, number in (("control_sd", reading.control_sd_pct), ("noise", reading.noise_pct)):
            if number is not None:
                roles[role] = Quantity(number, "%", _id_of(reading, number))
        return roles

    def asks_for_effect(self) -> bool:
        """Whether it asks for a change beyond nothing; "not worse than 2 %" does not."""
        c = self.condition
        return c.compare == "change" and (c.threshold >= 0 if c.op in (">", ">=") else c.threshold <= 0)

    def decided(self) -> bool:
        """Whether the verdict rests on the change being real: a claimed effect, or a loss it was turned down for."""
        lost = self.word == "NO-GO" and self.condition.compare == "change" and self.condition.threshold == 0
        return lost or (self.word in CLAIMS and self.asks_for_effect())


@dataclass(frozen=True)
class Body:
    """One verdict and its evidence.

    id:    the recorded verdict's id, or `card@device`. word: the source's verdict, or ours where we measured.
    pairs: workload -> (control row, candidate row), empty for recorded evidence; rows: every row of the comparison.
    parts: the card's gate and claims, each with our verdict on it.
    """

    id: str
    card: phases.Card
    kind: str
    word: str
    readings: Evidence
    parts: tuple[tuple[str, Gate, Verdict], ...]
    pairs: Mapping[str, tuple[Measurement | None, Measurement | None]] = field(default_factory=dict)
    rows: tuple[Measurement, ...] = ()

    def subject(self, title: str, roles: Mapping[str, Quantity | tuple[Quantity, ...]], note: str = "") -> Subject:
        """A subject of this body; `title` says which part of it."""
        given = {r: q if isinstance(q, tuple) else (q,) for r, q in roles.items()}
        verdicts = (self.id,) if self.kind == "recorded" else ()
        device = self.id.split("@")[1] if self.kind == "measured" else ""
        where = f"{self.card.id} on {device}" if device else self.card.id
        return Subject(f"{where}: {title}", self.kind, given, self.word, verdicts, (self.card.id,), note, device)

    def held(self, *roles: str) -> Iterator[Held]:
        """Every condition of these roles that has a reading."""
        for part, gate, verdict in self.parts:
            word = self.word if self.kind == "recorded" else verdict.word
            for role, c in gate.conditions():
                if role in roles and (reading := self.readings.get((c.of, c.workload))) is not None:
                    yield Held(part, gate, word, c, reading)


def bodies(kind: str) -> list[Body]:
    """Every body of one kind of evidence, in the order of the rows."""
    cards = phases.cards().values()
    if kind == "measured":
        return [measured(c, place, store.rows(place, c.id)) for c in cards for place in store.measured_devices(c.id)]
    return [
        Body(case.verdict.id, c, kind, case.verdict.reading, case.evidence, _parts(c, case.evidence))
        for c in cards
        for case in c.recorded
    ]


def measured(card: phases.Card, place: str, rows: Iterable[Measurement]) -> Body:
    """The body of one card's rows on one device; peers' rows are kept for what concerns every row."""
    rows = tuple(rows)
    judged = evidence.asked(rows, card)
    read = evidence.readings(judged, devices.get(place))
    parts = _parts(card, read)
    word = parts[0][2].word
    return Body(f"{card.id}@{place}", card, "measured", word, read, parts, evidence.pairs(judged), rows)


def _parts(card: phases.Card, read: Evidence) -> tuple[tuple[str, Gate, Verdict], ...]:
    return tuple((name, gate, judge(gate, read)) for name, gate in card.gates)


def _arms(reading: Reading, metric: str) -> dict[str, Quantity]:
    """Each arm of a reading that there is: the figure it came from where it is recorded, else the row."""
    found, figures = {}, _figures(reading)
    for arm, value in (("control", reading.control), ("candidate", reading.candidate)):
        if value is None:
            continue
        same = [f for f in figures if f.value == value]
        if own := [f for f in same if (f.arm == "candidate") == (arm == "candidate")] or same:
            found[arm] = from_figure(own[0])
            continue
        ids = [i for i in reading.ids if f"#{arm}@" in i] or [*reading.ids, ""]
        unit, withdrawn = reading.unit, reading.withdrawn
        found[arm] = Quantity(value, unit, ids[0], withdrawn, metric=metric, profiled=reading.profiled)
    return found


def _figures(reading: Reading) -> list[recorded.Figure]:
    """The recorded figures of a reading that are numbers."""
    found = (recorded.figures().get(i) for i in reading.ids)
    return [f for f in found if f is not None and isinstance(f.value, float)]


def _id_of(reading: Reading, number: float | None) -> str:
    return next((f.id for f in _figures(reading) if f.value == number), "")


def _from_rows(rows: Iterable[Measurement | None], statuses: tuple[str, ...] = ("ok",)) -> tuple[Quantity, ...]:
    return tuple(from_row(r) for r in rows if r is not None and r.status in statuses)


# Finders: body -> subjects -------------------------------------------------------------------------------------------


def _engagements(body: Body) -> Iterator[Subject]:
    for (metric, workload), reading in body.readings.items():
        if metric == "engagements" and (engaged := _arms(reading, metric).get("candidate")):
            yield body.subject(f"engagements {workload}".strip(), {"engaged": engaged})


def _incomplete(body: Body) -> Iterator[Subject]:
    if body.word != "BLOCKED":  # else the source said itself that it could not judge
        for held in body.held("complete"):
            if held.condition.op in (">=", ">", "==") and (runs := held.arms().get("candidate")):
                yield body.subject(held.condition.metric, {"runs": runs, "planned": held.line()})
    for workload, rows in body.pairs.items():
        states = [(arm, "absent" if row is None else row.status) for arm, row in zip(ARMS, rows, strict=True)]
        bad = "; ".join(f"the {arm} is {state}" for arm, state in states if state != "ok")
        yield body.subject(workload, {"rows": _from_rows(rows)}, bad)


def _claims(body: Body) -> Iterator[Subject]:
    for held in body.held("require"):
        roles = held.effect()
        if held.word in CLAIMS and held.asks_for_effect() and ("change" in roles or len(roles) > 1):
            yield body.subject(held.title, {**roles, "floor": held.floor})


def _launches(body: Body) -> Iterator[Subject]:
    for held in body.held("require", "kill"):
        counts = {f"{arm}_launches": getattr(held.reading, f"{arm}_launches") for arm in ARMS}
        if None not in counts.values():
            roles = {r: Quantity(n, "launches", _id_of(held.reading, n)) for r, n in counts.items()}
            title = replace(held, part="").title
            yield body.subject(title, {**held.effect(), **roles, "floor": held.floor})


def _sessions(body: Body) -> Iterator[Subject]:
    spread = evidence.between_runs(r for r in body.rows if r.name in (body.card.control, body.card.candidate))
    for held in body.held("require"):
        if held.decided() and held.condition.workload in spread:
            sd = Quantity(spread[held.condition.workload][1], "%")
            yield body.subject(held.title, {**held.effect(), "session_sd": sd})


def _identical(body: Body) -> Iterator[Subject]:
    """Measured rows carry the control against itself; a recorded figure's own measured noise is the same thing."""
    for held in body.held("require"):
        roles = held.effect()
        if held.decided() and "noise" in roles:
            roles["identical"] = roles.pop("noise")
            yield body.subject(held.title, roles)


def _profiled(body: Body) -> Iterator[Subject]:
    for held in body.held("require", "kill"):
        if held.reading.profiled and (taken := held.arms().values()):
            yield body.subject(held.title, {"profiled": tuple(changed(q, profiled=True) for q in taken)})


def _sentinels(body: Body) -> Iterator[Subject]:
    for held in body.held("require", "kill"):
        c = held.condition
        if c.share < 1:
            noise = {k: q for k, q in held.effect().items() if k in ("control_sd", "noise")}
            claim, share = Quantity(abs(c.threshold) or 100.0, "%", c.stated_by), Quantity(c.share, "ratio")
            yield body.subject(held.title, {"share": share, "claim": claim, "floor": held.floor, **noise})


def _late_gates(body: Body) -> Iterator[Subject]:
    if used := [row for pair in body.pairs.values() for row in pair if row]:
        yield body.subject("the gate", {"rows": _from_rows(used)}, staleness(body.card, used))


def _controls(body: Body) -> Iterator[Subject]:
    for held in body.held("correctness", "require"):
        c = held.condition
        control = held.arms().get("control")
        fidelity = held.reading.unit in FIDELITY or c.metric in FIDELITY_METRICS
        if fidelity and c.compare == "value" and not c.than and control is not None:
            yield body.subject(held.title, {"control": control, "line": held.line()})


def _bands(body: Body) -> Iterator[Subject]:
    """A line on a change inside what the same arm was measured to vary by; of two lines on one change, the nearer."""
    nearest: dict[str, tuple[float, Subject]] = {}
    for held in body.held("require", "kill"):
        c, reading = held.condition, held.reading
        spread = max(3.0 * (reading.control_sd_pct or 0.0), reading.noise_pct or 0.0)
        if c.compare == "change" and c.threshold and spread:
            figure = _id_of(reading, reading.control_sd_pct) or _id_of(reading, reading.noise_pct)
            band, line = tuple(Quantity(end, "%", figure) for end in (-spread, spread)), held.line(c.share)
            if held.title not in nearest or abs(line.value) < nearest[held.title][0]:
                nearest[held.title] = abs(line.value), body.subject(held.title, {"line": line, "band": band})
    yield from (subject for _, subject in nearest.values())


def _clocks(body: Body) -> Iterator[Subject]:
    for workload, rows in body.pairs.items():
        timed = _from_rows(rows)
        if len(timed) == 2:
            yield body.subject(workload, {"whole": timed[0], "less": timed[1]})


def _labels(body: Body) -> Iterator[Subject]:
    """One arm and workload whose compulsory bytes differ from run to run are two things under one name."""
    seen: dict[tuple[str, str], Measurement] = {}
    for row in body.rows:
        if row.status == "ok" and row.bytes:
            first = seen.setdefault((row.name, row.workload_id), row)
            if first.bytes != row.bytes:
                label = f"{row.name} at {row.workload_id}"
                called, own = (Quantity(r.bytes or 0.0, "bytes", r.id, label=label) for r in (first, row))
                yield body.subject(label, {"called": called, "same_label": own})


def _impossible(body: Body) -> Iterator[Subject]:
    for (metric, workload), reading in body.readings.items():
        if metric == "kernel_us" and (arms := _arms(reading, metric)):
            yield body.subject(workload or metric, {"rows": tuple(arms.values())}, reading.impossible)


def _withdrawn(body: Body) -> Iterator[Subject]:
    used = tuple(from_figure(f) for r in body.readings.values() for f in _figures(r))
    rows = _from_rows((r for pair in body.pairs.values() for r in pair), TIMED)
    if used or rows:
        yield body.subject("its evidence", {"figure": (*used, *rows)})


def _stated(body: Body) -> Iterator[Subject]:
    """What a GO takes on the source's word, beside what it was shown."""
    held = [(h, f) for h in body.held("correctness", "complete", "engaged", "require") if (f := _figures(h.reading))]
    if body.parts[0][2].word == "GO" and held:
        roles: dict[str, tuple[Quantity, ...]] = {}
        for one, figures in held:
            for figure in figures:
                lines = str(figure.params.get("lines", ""))
                quantity = changed(from_figure(figure), metric=one.condition.of, label=lines)
                role = "stated" if figure.kind == "stated" else "shown"
                roles[role] = (*roles.get(role, ()), quantity)
        yield body.subject("its evidence", roles)


def _tainted(body: Body) -> Iterator[Subject]:
    """Figures that a defect touches which the same source found later; the others of the same verdict are quiet."""
    if taint := recorded.taints().get(body.id):
        figures = {f.id: f for r in body.readings.values() for f in _figures(r)}
        hit = set(checks.touched(body.id, tuple(figures)))
        label = f"{taint.what} ({recorded.citation(taint.source, taint.lines)})"
        roles: dict[str, tuple[Quantity, ...]] = {}
        for figure in figures.values():
            role = "tainted" if figure.id in hit else "untouched"
            roles[role] = (*roles.get(role, ()), changed(from_figure(figure), label=label, path=taint.weight))
        yield body.subject("its evidence", roles)


def _undecidable(body: Body) -> Iterator[Subject]:
    for held in body.held("correctness", "complete", "engaged", "require"):
        arms = held.arms()
        if not held.condition.than and "candidate" in arms:
            control = {"control": arms["control"]} if "control" in arms else {}
            yield body.subject(held.title, {"line": held.line(), "candidate": arms["candidate"], **control})
    for text in checks.asked_twice(body.card):
        yield body.subject(text, {}, "it is asked first under `complete` or `engaged`, so it cannot fail here")
    if lines := checks.unreasoned(body.card):
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        yield body.subject(f"{lines[0]}{more}", {}, "neither a source nor a reason in the card gives the line")


FINDERS: Mapping[str, Callable[[Body], Iterable[Subject]]] = {
    "zero-engagement": _engagements,
    "incomplete-arms": _incomplete,
    "claim-inside-noise": _claims,
    "launch-drift": _launches,
    "between-session-noise": _sessions,
    "identical-path-spread": _identical,
    "profiled-throughput": _profiled,
    "blind-sentinel": _sentinels,
    "denominator-changed": _late_gates,
    "gate-fails-control": _controls,
    "threshold-inside-band": _bands,
    "kernel-from-wall": _clocks,
    "label-drift": _labels,
    "impossible-speed": _impossible,
    "withdrawn-reused": _withdrawn,
    "stated-not-shown": _stated,
    "later-defect": _tainted,
    "gate-cannot-decide": _undecidable,
}
