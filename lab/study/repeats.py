"""How well a comparison repeats: its noise floor, and the same ratio in another run of the same code."""

from __future__ import annotations

from dataclasses import dataclass

from lab.card import phases
from lab.judge import evidence
from lab.row import store


@dataclass(frozen=True)
class Floor:
    """One comparison that is judged. us: the shorter arm's median; aa_pct: the control against itself."""

    card: str
    workload: str
    us: float
    aa_pct: float


@dataclass(frozen=True)
class Repeated:
    """One ratio in several runs of the same code. difference_pct: between the largest and the smallest.

    throttled: what the driver reported in any of them; two arms at a power cap are slowed differently from run to run.
    """

    card: str
    workload: str
    runs: int
    us: float
    low: float
    high: float
    throttled: str

    @property
    def difference_pct(self) -> float:
        """How far the runs lie apart."""
        return 100 * (self.high / self.low - 1)


def floors(device: str) -> list[Floor]:
    """Every comparison of a device with blocks in pairs, in the order of the cards."""
    return [
        Floor(card.id, workload, min(a.own_us or 0.0, b.own_us or 0.0), evidence.aa_pct(a, b) or 0.0)
        for card in phases.cards().values()
        for workload, (a, b) in evidence.pairs(store.rows(device, card.id)).items()
        if a and b and evidence.change_pct(a, b)
    ]


def repeated(device: str) -> list[Repeated]:
    """Comparisons that were measured in more than one run of the same code, alone and not among rival libraries."""
    found = []
    for card in phases.cards().values():
        every = store.rows(device, card.id)
        crowded = {row.run for row in every if row.arm == "peer"}
        alone = [row for row in every if row.run not in crowded]
        same = [row for row in alone if row.code == alone[-1].code]
        for workload, runs in evidence.by_run(same).items():
            both = [(1 + change[0] / 100, a, b) for a, b in runs.values() if (change := evidence.change_pct(a, b))]
            if len(both) > 1:
                ratios = [ratio for ratio, _, _ in both]
                us = min(row.median_us or 0.0 for row in both[-1][1:] if row)
                capped = next((row.throttled for _, *arms in both for row in arms if row and row.throttled), "")
                found.append(Repeated(card.id, workload, len(both), us, min(ratios), max(ratios), capped))
    return found
