"""A verdict with where it came from: the gate and the claims of a card held against one body of evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lab.base import devices
from lab.card import history
from lab.card.gate import Evidence
from lab.card.phases import Card, RecordedCase
from lab.card.recorded import RecordedVerdict
from lab.check import families
from lab.judge import evidence
from lab.judge.rules import Finding, Seen, Verdict, judge
from lab.row import store
from lab.row.records import Kept, Measurement

TOLD = ("role", "condition", "state", "observed", "ids", "kind")  # what programs are given of a finding


@dataclass(frozen=True)
class Judgement:
    """A verdict with where it came from. `recorded` is None, and nothing agrees or differs, for our own questions."""

    phase: str
    row: str
    system: str
    evidence: str
    device: str
    verdict: Verdict
    claims: tuple[tuple[str, Verdict], ...]
    recorded: RecordedVerdict | None
    differs: str
    card_hash: str
    gate_hash: str
    note: str = ""

    @property
    def recorded_id(self) -> str | None:
        """The id of the recorded verdict, None for our own questions."""
        return self.recorded.id if self.recorded else None

    @property
    def reading(self) -> str:
        """What we read the source's outcome as, "" without a source."""
        return self.recorded.reading if self.recorded else ""

    @property
    def source_word(self) -> str:
        """The source's own word for the outcome, "" where it has none."""
        return self.recorded.word if self.recorded else ""

    @property
    def source_said(self) -> str:
        """The source's own word in quotation marks, or what we read it as; "" without a source."""
        if self.recorded is None:
            return ""
        read = f"read as {self.recorded.reading}"
        if not self.recorded.word:
            return read
        own = f'"{self.recorded.word}"'
        return own if self.recorded.word == self.recorded.reading else f"{own}, {read}"

    @property
    def agrees(self) -> bool | None:
        """Whether our word is our reading of the source; LANDED, a fact about a branch, counts as GO."""
        return None if self.recorded is None else self.verdict.word == _counted(self.recorded.reading)

    @property
    def agrees_with_word(self) -> bool | None:
        """Whether our word is what the source's own word means; None where it has none."""
        if self.recorded is None or not self.recorded.word:
            return None
        return self.verdict.word in {_counted(word) for word in self.recorded.word_means.split(" or ")}

    def to_json(self) -> dict[str, Any]:
        """The object that `lab judge --json` prints."""
        return {
            "phase": self.phase,
            "row": self.row,
            "system": self.system,
            "evidence": self.evidence,
            "device": self.device,
            "verdict": self.verdict.word,
            "reason": self.verdict.reason,
            "observed": self.verdict.observed,
            "recorded_id": self.recorded_id,
            "recorded_verdict": self.reading or None,
            "source_word": self.source_word,
            "reading": self.reading,
            "source": self.recorded.cited if self.recorded else "",
            "source_lines": self.recorded.lines if self.recorded else "",
            "agrees": self.agrees,
            "agrees_with_word": self.agrees_with_word,
            "differs": self.differs,
            "claims": [{"name": n, "verdict": v.word, "reason": v.reason} for n, v in self.claims],
            "figures": sorted({i for f in self.verdict.findings for i in f.ids}),
            "findings": [
                {key: str(f.condition) if key == "condition" else getattr(f, key) for key in TOLD}
                for f in self.verdict.findings
            ],
            "card_hash": self.card_hash,
            "gate_hash": self.gate_hash,
            "note": self.note,
        }


def _counted(word: str) -> str:
    return "GO" if word == "LANDED" else word


def judge_recorded(chosen: Iterable[Card]) -> list[Judgement]:
    """Every recorded verdict of these cards, replayed from the recorded figures."""
    return [judgement(c, case.evidence, "recorded", c.device, case) for c in chosen for case in c.recorded]


def waiting(c: Card, device: str | None = None) -> Judgement:
    """BLOCKED on a card without rows, and what it waits for."""
    note = f"Not measured yet: {_needed(c)}"
    return judgement(c, {}, "measured", device or c.device or "any device", None, note)


def _needed(c: Card) -> str:
    """Which rows, or figures of somebody's own, a card without any waits for."""
    conditions = [condition for _, gate in c.gates for _, condition in gate.conditions()]
    what = f"{c.control} and {c.candidate} at {', '.join(c.workloads) or 'the whole phase'}"
    if not c.family:
        how = f"`lab judge {c.word} --rows control=FILE --rows candidate=FILE`"
        return f"needs {', '.join(dict.fromkeys(x.of for x in conditions))} of {what}, as in {how}"
    asked = (metric for x in conditions for metric in (x.metric, x.than) if metric)
    if never := [metric for metric in dict.fromkeys(asked) if metric not in evidence.READ]:
        return f"no row of a kernel has {', '.join(never)}; ask for {', '.join(evidence.READ)}, or leave the family out"
    return f"`lab measure {c.word}` makes rows of {what}"


def judgement(
    c: Card,
    given: Evidence,
    kind: str,
    device: str,
    case: RecordedCase | None,
    note: str = "",
    absent: Mapping[str, str] | None = None,
) -> Judgement:
    """The gate and the claims of one card held against one body of evidence; absent as in `rules.judge`."""
    lines_of = c.device if kind == "measured" and c.device != device else ""
    return Judgement(
        phase=c.id,
        row=c.row,
        system=c.system,
        evidence=kind,
        device=device,
        verdict=judge(c.gate, given, lines_of, absent),
        claims=tuple((claim.name, judge(claim, given, lines_of, absent)) for claim in c.claims),
        recorded=case.verdict if case else None,
        differs=case.differs if case else "",
        card_hash=c.card_hash,
        gate_hash=c.gate_hash,
        note=note,
    )


def judge_measured(card: Card, device_id: str) -> Judgement:
    """The card's gate held against the committed rows of one device; where it has no family, against kept readings.

    Each room is asked once and in order: the rows, which of them are of former kernels, whether the gate is older than
    they are; then the rows are read as evidence and judged.
    """
    device = devices.get(device_id)
    every = store.rows(device=device.id, phase=card.id)
    if not (every or card.family):
        return _judge_kept(card, device.id)
    rows = evidence.asked(every, card)
    together = card.compared
    chosen = evidence.pairs(rows, together)  # older runs answer to an older gate, workloads that left the card to none
    used = [row for workload in card.workloads for row in chosen.get(workload, ()) if row]
    former = ["an arm's code went afterwards"] if card.adopted else families.former_kernels(used)
    notes = [staleness(card, used), *former]
    notes += [
        f"{workload}: the ratio varies by {sd_pct:.2f} % over {count} runs"
        for workload, (count, sd_pct) in evidence.between_runs(rows).items()
    ]
    notes += evidence.other_protocols(rows, together)
    if used and not device.peaks:
        notes.append(f"peaks unknown: no source gives {device.name}'s, and shares are of measured ceilings alone")
    if left := len({row.run for row in every if card.measure.other(*row.protocol)}):
        notes.append(f"{left} runs by another protocol than the card's are not judged")
    absent = evidence.absent(chosen, card.workloads)
    given = evidence.readings(rows, device, together)
    found = judgement(card, given, "measured", device.id, None, absent=absent)
    if near := _near_their_line(found.verdict.findings):
        percent = 100 * (evidence.GPUS - 1)
        notes.append(f"nearer to its line than ratios differ between GPUs of one model ({percent:.1f} %): {near}")
    return replace(found, note="; ".join(filter(None, notes)))


def _judge_kept(card: Card, device_id: str) -> Judgement:
    """The gate held against what `lab judge --rows --keep` kept last: imported evidence, which nobody here checked."""
    runs = store.kept(Kept, device_id, card.id)
    newest = runs[-1] if runs else []
    given = {(one.metric, one.workload_id): one.reading for one in newest}
    notes = []
    for one in newest[:1]:
        made = f" ({one.made})" if one.made else ""
        notes += [f"kept from {', '.join(one.files)}{made} in run {one.run}", one.note]
    if any(one.gate_hash != card.gate_hash for one in newest):
        notes.append("gate changed since: keep the files again")
    return judgement(card, given, "imported", device_id, None, note="; ".join(filter(None, notes)))


def _near_their_line(findings: Iterable[Finding]) -> str:
    """Workloads whose interval decides by less than another GPU of the model may give, joined by commas.

    Not of a line at zero, which the noise floor keeps further away.
    """

    def near(seen: Seen) -> bool:
        ends = seen.interval or ()
        ratios = [(100.0 + end) / (100.0 + seen.line) if seen.unit == "%" else end / seen.line for end in ends]
        return any(1.0 / evidence.GPUS < ratio < evidence.GPUS for ratio in ratios)

    decided = (f for f in findings if f.state in ("holds", "fails") and f.seen and f.seen.placements > 1)
    return ", ".join(dict.fromkeys(f.condition.workload for f in decided if f.seen and f.seen.line and near(f.seen)))


def staleness(card: Card, rows: Iterable[Measurement]) -> str:
    """ "" or "gate changed after measuring" with what shows it: the rows' gate hash, or the commit's date."""
    rows = [r for r in rows if r.workload_id in card.workloads]  # others answer to an older gate
    if any(row.gate_hash not in (None, card.gate_hash) for row in rows):
        return "gate changed after measuring: the rows carry another gate hash"
    return history.changed_since(card, (row.started for row in rows))
