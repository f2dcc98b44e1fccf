"""Subjects that no one has to name: every recorded case of every card, and every measured comparison in profiles/.

A body is one verdict with everything it was reached on, recorded or measured alike; a finder takes from it what one
check needs. Where a source or our judge claims nothing there is nothing to audit, so finders that ask whether an effect
is real look at verdicts that claim one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from lab.base import devices
from lab.card import phases, recorded
from lab.card.gate import Condition, Evidence, Gate, Reading
from lab.judge import evidence
from lab.judge.rules import Verdict, judge
from lab.judge.verdicts import staleness
from lab.row import store
from lab.row.records import Measurement
from lab.study.audit.bindings import TIMED, from_row
from lab.study.audit.subject import Facts, Quantity, Subject, from_figure

CLAIMS = ("GO", "LANDED", "CONDITIONAL-GO")  # the words that say an effect is there
FIDELITY = ("kld", "nmse")  # units of metrics that hold a candidate to a reference: no one improves on the control
FIDELITY_METRICS = ("same_top_p", "relative_error")


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
        where = f"{self.card.id}{' on ' + self.id.split('@')[1] if self.kind == 'measured' else ''}"
        return Subject(f"{where}: {title}", self.kind, given, self.word, verdicts, (self.card.id,), note)


def bodies(kind: str) -> list[Body]:
    """Every body of one kind of evidence, in the order of the rows."""
    found = []
    for card in phases.cards().values():
        if kind == "recorded":
            for case in card.recorded:
                found.append(
                    Body(case.verdict.id, card, kind, case.verdict.verdict, case.evidence, _parts(card, case.evidence))
                )
            continue
        for place in store.measured_devices(card.id):
            found.append(measured(card, place, store.rows(place, card.id)))
    return found


def measured(card: phases.Card, place: str, rows: Iterable[Measurement]) -> Body:
    """The body of one card's rows on one device; peers' rows are kept for what concerns every row."""
    rows = tuple(rows)
    judged = [r for r in rows if r.name in (card.control, card.candidate)]
    read = evidence.readings(judged, devices.get(place))
    parts = _parts(card, read)
    word = parts[0][2].word
    return Body(f"{card.id}@{place}", card, "measured", word, read, parts, evidence.pairs(judged), rows)


def _parts(card: phases.Card, read: Evidence) -> tuple[tuple[str, Gate, Verdict], ...]:
    return tuple((name, gate, judge(gate, read)) for name, gate in card.gates)


# From a reading to roles ---------------------------------------------------------------------------------------------


def _arm(reading: Reading, arm: str, metric: str) -> Quantity | None:
    """One arm of a reading: the figure it came from where it is recorded, else the row."""
    value = getattr(reading, arm)
    if value is None:
        return None
    figures = recorded.figures()
    same = [figures[i] for i in reading.ids if i in figures and figures[i].value == value]
    own = [f for f in same if (f.arm == "candidate") == (arm == "candidate")] or same
    if own:
        return from_figure(own[0])
    ids = [i for i in reading.ids if f"#{arm}@" in i] or list(reading.ids)
    facts = Facts(metric=metric, profiled=reading.profiled)
    return Quantity(value, reading.unit, ids[0] if ids else "", reading.withdrawn, facts)


def _effect(reading: Reading, metric: str) -> dict[str, Quantity]:
    """change, or control and candidate; and the noise that came with them."""
    control, candidate = _arm(reading, "control", metric), _arm(reading, "candidate", metric)
    roles: dict[str, Quantity] = {}
    if control is not None and candidate is not None:
        roles |= {"control": control, "candidate": candidate}
        if reading.interval_pct and reading.change_pct is not None:  # formed block by block: better than the medians
            roles["change"] = Quantity(reading.change_pct, "%", candidate.id)
    elif reading.change_pct is not None:
        roles["change"] = Quantity(reading.change_pct, "%", reading.ids[0] if reading.ids else "")
    ids = {
        role: _id_of(reading, number) for role, number in (("sd", reading.control_sd_pct), ("noise", reading.noise_pct))
    }
    if reading.control_sd_pct is not None:
        roles["control_sd"] = Quantity(reading.control_sd_pct, "%", ids["sd"])
    if reading.noise_pct is not None:
        roles["noise"] = Quantity(reading.noise_pct, "%", ids["noise"])
    return roles


def _id_of(reading: Reading, number: float | None) -> str:
    return next((i for i in reading.ids if i in recorded.figures() and recorded.figures()[i].value == number), "")


def _line(condition: Condition, share_of: float = 1.0) -> Quantity:
    return Quantity(share_of * condition.threshold, condition.unit, condition.stated_by, "", Facts(op=condition.op))


def _conditions(body: Body, *roles: str) -> Iterator[tuple[str, Gate, Verdict, Condition, Reading]]:
    for part, gate, verdict in body.parts:
        for role, condition in gate.conditions():
            reading = body.readings.get((condition.of, condition.workload))
            if reading is not None and role in roles:
                yield part, gate, verdict, condition, reading


def _floor(gate: Gate) -> Quantity:
    return Quantity(gate.noise.floor_pct, "%", facts=Facts(sigmas=gate.noise.sigmas))


def _title(part: str, condition: Condition) -> str:
    where = f" at {condition.workload}" if condition.workload else ""
    return f"{part}, {condition.of}{where}" if part else f"{condition.of}{where}"


# Finders: body -> subjects -------------------------------------------------------------------------------------------


def _engagements(body: Body) -> Iterator[Subject]:
    for (metric, workload), reading in body.readings.items():
        engaged = _arm(reading, "candidate", metric)
        if metric == "engagements" and engaged is not None:
            yield body.subject(f"engagements {workload}".strip(), {"engaged": engaged})


def _incomplete(body: Body) -> Iterator[Subject]:
    for _, _, _, condition, reading in _conditions(body, "complete"):
        runs = _arm(reading, "candidate", condition.metric)
        if body.word == "BLOCKED":
            continue  # the source said itself that it could not judge
        if runs is not None and condition.op in (">=", ">", "=="):
            yield body.subject(condition.metric, {"runs": runs, "planned": _line(condition)})
    for workload, rows in body.pairs.items():
        bad = [
            f"the {arm} is {'absent' if row is None else row.status}"
            for arm, row in zip(("control", "candidate"), rows, strict=True)
            if row is None or row.status != "ok"
        ]
        yield body.subject(
            workload, {"rows": tuple(from_row(r) for r in rows if r and r.status == "ok")}, "; ".join(bad)
        )


def _asks_for_effect(condition: Condition) -> bool:
    """Whether a condition asks for a change beyond nothing; "not worse than 2 %" does not."""
    wanted = condition.threshold >= 0 if condition.op in (">", ">=") else condition.threshold <= 0
    return condition.compare == "change" and wanted


def _decided(word: str, condition: Condition) -> bool:
    """Whether a verdict rests on this change being real: a claimed effect, or a loss that it was turned down for."""
    lost = word == "NO-GO" and condition.compare == "change" and condition.threshold == 0
    return lost or (word in CLAIMS and _asks_for_effect(condition))


def _claims(body: Body) -> Iterator[Subject]:
    for part, gate, verdict, condition, reading in _conditions(body, "require"):
        word = body.word if body.kind == "recorded" else verdict.word
        roles = _effect(reading, condition.metric)
        if word in CLAIMS and _asks_for_effect(condition) and ("change" in roles or len(roles) > 1):
            yield body.subject(_title(part, condition), {**roles, "floor": _floor(gate)})


def _launches(body: Body) -> Iterator[Subject]:
    for _, gate, _, condition, reading in _conditions(body, "require", "kill"):
        counts = {"control_launches": reading.control_launches, "candidate_launches": reading.candidate_launches}
        roles = {r: Quantity(n, "launches", _id_of(reading, n)) for r, n in counts.items() if n is not None}
        if len(roles) == 2:
            yield body.subject(
                _title("", condition), {**_effect(reading, condition.metric), **roles, "floor": _floor(gate)}
            )


def _sessions(body: Body) -> Iterator[Subject]:
    spread = evidence.between_runs(r for r in body.rows if r.name in (body.card.control, body.card.candidate))
    for part, _, verdict, condition, reading in _conditions(body, "require"):
        if _decided(verdict.word, condition) and condition.workload in spread:
            sd = Quantity(spread[condition.workload][1], "%")
            yield body.subject(_title(part, condition), {**_effect(reading, condition.metric), "session_sd": sd})


def _identical(body: Body) -> Iterator[Subject]:
    """Measured rows carry the control against itself; a recorded figure's own measured noise is the same thing."""
    for part, _, verdict, condition, reading in _conditions(body, "require"):
        word = body.word if body.kind == "recorded" else verdict.word
        if _decided(word, condition) and reading.noise_pct is not None:
            roles = _effect(reading, condition.metric)
            roles["identical"] = roles.pop("noise")
            yield body.subject(_title(part, condition), roles)


def _profiled(body: Body) -> Iterator[Subject]:
    for part, _, _, condition, reading in _conditions(body, "require", "kill"):
        taken = tuple(q for arm in ("control", "candidate") if (q := _arm(reading, arm, condition.metric)) is not None)
        if reading.profiled and taken:
            marked = tuple(replace(q, facts=msgspec.structs.replace(q.facts, profiled=True)) for q in taken)
            yield body.subject(_title(part, condition), {"profiled": marked})


def _sentinels(body: Body) -> Iterator[Subject]:
    for part, gate, _, condition, reading in _conditions(body, "require", "kill"):
        if condition.share < 1:
            noise = {k: q for k, q in _effect(reading, condition.metric).items() if k in ("control_sd", "noise")}
            claim = Quantity(abs(condition.threshold) or 100.0, "%", condition.stated_by)
            share = Quantity(condition.share, "ratio")
            yield body.subject(
                _title(part, condition), {"share": share, "claim": claim, "floor": _floor(gate), **noise}
            )


def _late_gates(body: Body) -> Iterator[Subject]:
    used = [row for pair in body.pairs.values() for row in pair if row]
    if used:
        yield body.subject(
            "the gate",
            {"rows": tuple(from_row(r) for r in used if r.status == "ok")},
            staleness(body.card, used),
        )


def _controls(body: Body) -> Iterator[Subject]:
    for part, _, _, condition, reading in _conditions(body, "correctness", "require"):
        held = reading.unit in FIDELITY or condition.metric in FIDELITY_METRICS
        control = _arm(reading, "control", condition.metric) or _own_error(body, condition)
        if held and condition.compare == "value" and not condition.than and control is not None:
            error = control.facts.stderr
            roles = {"control": control, "line": _line(condition)}
            roles |= {"stderr": Quantity(error, control.unit, control.id)} if error else {}
            yield body.subject(_title(part, condition), roles)


def _own_error(body: Body, condition: Condition) -> Quantity | None:
    row = body.pairs.get(condition.workload, (None, None))[0]
    if row is None or condition.metric != "relative_error" or row.relative_error is None:
        return None
    return Quantity(row.relative_error, "ratio", row.id)


def _bands(body: Body) -> Iterator[Subject]:
    """A line on a change inside what the same arm was measured to vary by; of two lines on one change, the nearer."""
    nearest: dict[str, tuple[float, Subject]] = {}
    for part, _, _, condition, reading in _conditions(body, "require", "kill"):
        spread = max(3.0 * (reading.control_sd_pct or 0.0), reading.noise_pct or 0.0)
        if condition.compare == "change" and condition.threshold and spread:
            names = _id_of(reading, reading.control_sd_pct) or _id_of(reading, reading.noise_pct)
            band = (Quantity(-spread, "%", names), Quantity(spread, "%", names))
            line, title = _line(condition, condition.share), _title(part, condition)
            if title not in nearest or abs(line.value) < nearest[title][0]:
                nearest[title] = abs(line.value), body.subject(title, {"line": line, "band": band})
    yield from (subject for _, subject in nearest.values())


def _clocks(body: Body) -> Iterator[Subject]:
    for workload, rows in body.pairs.items():
        timed = [from_row(r) for r in rows if r is not None and r.status == "ok"]
        if len(timed) == 2:
            yield body.subject(workload, {"whole": timed[0], "less": timed[1]})


def _labels(body: Body) -> Iterator[Subject]:
    """One arm and workload whose compulsory bytes differ from run to run are two things under one name."""
    seen: dict[tuple[str, str], Measurement] = {}
    for row in body.rows:
        if row.status != "ok" or not row.bytes:
            continue
        first = seen.setdefault((row.name, row.workload_id), row)
        if first is not row and first.bytes != row.bytes:
            facts = Facts(label=f"{row.name} at {row.workload_id}")
            called, own = (Quantity(r.bytes or 0.0, "bytes", r.id, "", facts) for r in (first, row))
            yield body.subject(facts.label, {"called": called, "same_label": own})


def _impossible(body: Body) -> Iterator[Subject]:
    for (metric, workload), reading in body.readings.items():
        rows = tuple(q for arm in ("control", "candidate") if (q := _arm(reading, arm, metric)) is not None)
        if metric == "kernel_us" and rows:
            yield body.subject(workload or metric, {"rows": rows}, reading.impossible)


def _withdrawn(body: Body) -> Iterator[Subject]:
    figures = recorded.figures()
    used = tuple(
        from_figure(figures[i])
        for r in body.readings.values()
        for i in r.ids
        if i in figures and isinstance(figures[i].value, float)
    )
    measured = tuple(from_row(r) for pair in body.pairs.values() for r in pair if r is not None and r.status in TIMED)
    if used or measured:
        yield body.subject("its evidence", {"figure": (*used, *measured)})


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
}
