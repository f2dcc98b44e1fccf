"""From a kernel's measured speed-up to a phase's end-to-end need: lab/trace/amdahl.py with rows and cards.

The speed-up comes from the newest measured pair of a phase, with the quartiles of both arms as its bounds; the need is
what the card's gate asks of throughput. A projection is modelled evidence and never a verdict: it says beforehand
whether a kernel can be enough, and by how much it would have to be faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.base import files
from lab.base.errors import BadInput
from lab.card import phases
from lab.judge import evidence
from lab.row import store
from lab.row.records import Measurement
from lab.trace import amdahl
from lab.trace.amdahl import Interval, Projection
from lab.trace.breakdowns import Breakdown


@dataclass(frozen=True)
class Need:
    """A rise of throughput, in %, that a card's gate requires. condition: the gate's words."""

    phase: str
    pct: float
    condition: str


@dataclass(frozen=True)
class Answer:
    """A projection with what it is of, and how it stands against each need: (need, word, sentence).

    denominator: what the share is of, in words.
    """

    what: str
    projection: Projection
    against: tuple[tuple[Need, str, str], ...]
    denominator: str
    warnings: tuple[str, ...] = ()


def speedup(control: Measurement, candidate: Measurement) -> Interval:
    """The control's time over the candidate's, bounded by half of both quartile distances; BadInput without a time."""
    bounds = []
    for row in (control, candidate):
        if not row.time_us:
            raise BadInput(f"{row.phase} {row.workload_id}", f"{row.arm} has status {row.status}", "measure it")
        half = (row.iqr_us or 0.0) / 2
        bounds.append((row.time_us - half, row.time_us, row.time_us + half))
    (low, c, high), (fastest, k, slowest) = bounds
    return Interval(low / slowest, c / k, high / max(fastest, 1e-12))


def measured(phase: str, device: str, workload: str | None = None) -> tuple[str, Interval]:
    """(workload, speed-up) of a phase's newest measured pair; raises BadInput without one, or with several."""
    card = phases.card(phase)
    store.refuse_unmeasured(card.id, device)
    pairs = evidence.pairs(store.rows(device=device, phase=card.id))
    full = {w: (a, b) for w, (a, b) in pairs.items() if a and b and workload in (None, w)}
    if len(full) != 1:
        what = f"{len(full)} workloads with both arms ({', '.join(full) or 'none'})"
        remedy = "name one with --workload" if full else "measure both arms"
        raise BadInput(f"profiles/{device}/{card.id}", what, remedy)
    ((name, arms),) = full.items()
    return name, speedup(*arms)


def needs(card: phases.Card) -> list[Need]:
    """What a card's gate, and its claims, require of throughput as a change in %."""
    found = []
    for _, gate in card.gates:
        for condition in gate.require:
            rises = condition.compare == "change" and condition.op in (">", ">=") and math.isfinite(condition.threshold)
            if rises and gate.metrics[condition.metric].unit.endswith("tok/s"):
                found.append(Need(card.id, condition.threshold, str(condition)))
    return found


def share(b: Breakdown, names: list[str]) -> Interval:
    """Categories' share of a breakdown's whole, 0 to 1, by its printed digits; BadInput for one that it lacks."""
    known = b.by_category()
    parts = [files.called(name, known, "category", b.id) for name in names]
    value, error = sum(p.value for p in parts), sum(p.error for p in parts)
    return Interval(max(value - error, 0) / b.whole, value / b.whole, min((value + error) / b.whole, 1.0))


def answer(
    what: str, of: Interval, by: Interval, base: Interval | None, of_wall: float, asked: list[Need],
    denominator: str = "the wall time", warnings: tuple[str, ...] = (), assumed: str = amdahl.ASSUMED,
) -> Answer:  # fmt: skip
    """Project and hold against the needs."""
    found = amdahl.project(of, by, base, of_wall, assumed)
    held = tuple((need, *amdahl.against(found, need.pct)) for need in asked)
    return Answer(what, found, held, denominator, warnings)


def render(a: Answer) -> str:
    """An answer as text."""
    p = a.projection

    def shown(i: Interval, unit: str) -> str:
        return "removed" if math.isinf(i.low) else f"{i.mid:,.4g} {unit} ({i.low:,.4g} to {i.high:,.4g})"

    lines = [
        f"{a.what}: {p.share.mid:.1%} ({p.share.low:.1%} to {p.share.high:.1%}) of {a.denominator}",
        f"speed-up of it: {shown(p.speedup, 'x')}",
        f"projected gain: {shown(p.gain_pct, '%')}; with the category removed: {shown(p.ceiling_pct, '%')}",
    ]
    if p.rate and p.ceiling_rate:
        lines.append(f"projected rate: {shown(p.rate, 'tok/s')}; ceiling: {shown(p.ceiling_rate, 'tok/s')}")
    lines += [f"{need.phase} ({need.condition}): {word}: {sentence}" for need, word, sentence in a.against]
    lines += [f"warning: {text}" for text in a.warnings]
    return "\n".join([*lines, f"modelled, not measured; assumes that {p.assumed}"])
