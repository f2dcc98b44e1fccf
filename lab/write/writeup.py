"""Text from rows: the board of verdicts as a terminal table, and one phase's writeup in Markdown.

Nothing is phrased by hand here that a row could say: words come from the card, numbers from figures or rows with their
ids, the verdict and its sentence from the judge. A negative result gets the same page as a positive one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from lab.base import devices
from lab.base.console import table
from lab.card import history, phases, recorded
from lab.card.gate import Gate, gate_text
from lab.card.phases import Card
from lab.judge import evidence, rules, verdicts
from lab.judge.rules import Verdict
from lab.judge.verdicts import Judgement
from lab.place import ceilings, roofline
from lab.row import store
from lab.row.records import Measurement

COLUMNS = ("phase", "gate", "observed", "verdict here", "recorded", "agrees")


def board_rows(judgements: Iterable[Judgement]) -> list[tuple[str, ...]]:
    """One row a verdict, as text, in the columns of COLUMNS."""
    rows: list[tuple[str, ...]] = []
    for j in judgements:
        claims = "".join(f" ({name}: {v.word})" for name, v in j.claims)
        agrees = "" if j.agrees is None else "yes" if j.agrees else "no, explained" if j.differs else "NO"
        gate = gate_text(phases.card(j.phase).gate)
        word = j.recorded_verdict or "-"
        rows.append((j.phase, gate, j.verdict.observed, j.verdict.word + claims, word, agrees))
    return rows


def board(judgements: Iterable[Judgement]) -> str:
    """The board for a terminal of 150 columns, and below it one sentence for each disagreement."""
    judgements = list(judgements)
    text = table(COLUMNS, board_rows(judgements), (20, 36, 38, 22, 14, 13))
    why = [f"{j.phase} ({j.recorded_id}): {j.differs}" for j in judgements if j.agrees is False]
    if why:
        text += "\n\nWhere the judge and the source differ:\n" + "\n".join(
            textwrap.fill(line, 148, initial_indent="- ", subsequent_indent="  ") for line in why
        )
    return text


def counts(judgements: Iterable[Judgement], measured: Iterable[Judgement]) -> str:
    """How often each word was given, by source and by device, in a few lines of a terminal."""
    groups: dict[str, list[Judgement]] = {}
    for j in judgements:
        groups.setdefault(j.system, []).append(j)
    for j in measured:
        groups.setdefault(f"measured on {j.device}", []).append(j)
    words = [w for w in rules.WORDS if any(j.verdict.word == w for own in groups.values() for j in own)]
    cells = []
    for name, own in groups.items():
        agree = sum(bool(j.agrees) for j in own) if own[0].agrees is not None else ""
        given = [sum(j.verdict.word == w for j in own) or "" for w in words]
        cells.append([name, *map(str, (len(own), agree, *given))])
    return table(("verdicts of", "all", "agree", *words), cells, (20, 4, 6, *(max(4, len(w)) for w in words)))


def unexplained(judgements: Iterable[Judgement]) -> list[Judgement]:
    """Verdicts that differ from the source without a sentence, or carry one although they agree."""
    return [j for j in judgements if j.agrees is not None and j.agrees == bool(j.differs)]


def write(card: Card) -> str:
    """The writeup of one phase: question, gate, evidence, verdicts, what would change them, provenance."""
    lines = [f"# {card.title}", "", f"Phase `{card.id}`, row {card.row}, {card.system} on {card.device}.", ""]
    lines += [f"**Question.** {card.question}", "", f"**Hypothesis.** {card.hypothesis}", ""]
    lines += [f"**If it fails.** {card.null}", ""]
    lines += [f"Control: {card.control}. Candidate: {card.candidate}.", "", "## The gate, declared beforehand", ""]
    lines += [f"Source of the criterion: `{card.gate.source}`.", ""]
    lines += _gate_lines(card.gate)
    for claim in card.claims:
        lines += ["", f"Claim judged beside it, *{claim.name}*:", "", *_gate_lines(claim)]
    for judgement in verdicts.judge_recorded([card]):
        lines += ["", f"## Recorded evidence: `{judgement.recorded_id}`", ""]
        lines += _verdict_lines(judgement)
        lines += _figure_table(judgement)
    for device in store.measured_devices(card.id):
        judgement = verdicts.judge_measured(card, device)
        lines += ["", f"## Measured on {devices.get(device).name}", ""]
        lines += _verdict_lines(judgement)
        lines += measured_table(card, device)
    lines += ["", "## Expected", "", f"{card.expected.recovery}: {card.expected.arithmetic}.", ""]
    lines += ["## What would change the verdict", "", card.limits, ""]
    lines += ["## Provenance", "", f"Card `{card.card_hash}`, gate `{card.gate_hash}`."]
    if committed := history.gate_commit(card):
        lines += [f"Gate last changed in commit `{committed[0]}` of {committed[1]:%Y-%m-%d %H:%M} UTC."]
    return "\n".join(lines) + "\n"


def _gate_lines(gate: Gate) -> list[str]:
    names = {"correctness": "else INVALID", "complete": "else BLOCKED", "engaged": "else VACUOUS"}
    names |= {"kill": "NO-GO when it holds", "require": "required"}
    lines = [
        f"- `{c}` ({names[role]}{f', stated by `{c.stated_by}`' if c.stated_by else ''})"
        for role, c in gate.conditions()
    ]
    return [*lines, f"- noise floor max({gate.noise.floor_pct:g} %, {gate.noise.sigmas:g} sigma of the control)"]


def _verdict_lines(judgement: Judgement) -> list[str]:
    lines = [f"**{judgement.verdict.word}.** {judgement.verdict.reason}."]
    if judgement.note:
        lines += ["", f"Note: {judgement.note}."]
    for name, verdict in judgement.claims:
        lines += ["", f"Claim *{name}*: **{verdict.word}.** {verdict.reason}."]
    if judgement.recorded_verdict:
        agree = "agrees" if judgement.agrees else "differs"
        lines += [
            "",
            f"The source wrote {judgement.recorded_verdict}; our verdict {agree}. {judgement.differs}".rstrip(),
        ]
    return lines


def _figure_table(judgement: Judgement) -> list[str]:
    used = sorted({i for v in _verdicts(judgement) for f in v.findings for i in f.ids})
    if not used:
        return []
    lines = ["", "| figure | value | kind | source |", "|---|---|---|---|"]
    for figure_id in used:
        f = recorded.figure(figure_id)
        lines.append(f"| `{f.id}` | {f.value} {f.unit} | {f.kind} | {f.source} |")
    return lines


def _verdicts(judgement: Judgement) -> list[Verdict]:
    return [judgement.verdict, *(v for _, v in judgement.claims)]


def _of_ceiling(row: Measurement) -> str:
    floor_us = ceilings.floor_of(row)
    return "" if floor_us is None or not row.time_us else f"{floor_us / row.time_us:.0%}"


def measured_table(card: Card, device_id: str) -> list[str]:
    """The rows behind a measured verdict as a Markdown table: time, floor, shares, error, run.

    of roofline: the datasheet's floor over the time; of ceiling: the same with the device's measured ceilings.
    """
    device = devices.get(device_id)
    header = (
        "| workload | arm | median us | IQR us | floor us | of roofline | of ceiling | rel. error | timer, L2 | run |"
    )
    lines = ["", header]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for pair in evidence.pairs(store.rows(device=device_id, phase=card.id)).values():
        for row in filter(None, pair):
            if row.time_us is None:
                lines.append(f"| {row.workload_id} | {row.name} | {row.status}: {row.message} ||||||||")
                continue
            floor = roofline.of_row(device, row)
            share = roofline.roofline_fraction(floor.floor_us, row.time_us)
            lines.append(
                f"| {row.workload_id} | {row.name} | {row.time_us:.1f} | {row.iqr_us:.2f} "
                f"| {floor.floor_us:.1f} | {share:.0%} | {_of_ceiling(row)} "
                f"| {row.relative_error:.1e} | {row.timer}, {row.l2} | {row.run} |"
            )
    return lines
