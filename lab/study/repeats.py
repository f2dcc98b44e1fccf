"""How well a comparison repeats: its noise floor, the same ratio in another run of the same code, on another GPU."""

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


@dataclass(frozen=True)
class Elsewhere:
    """One comparison of the same launches on two GPUs of a device, over placements on each.

    ratios: candidate over control; low, high: ends of the change's interval in %. The GPU where it is less is first.
    """

    card: str
    workload: str
    ratios: tuple[float, float]
    low: tuple[float, float]
    high: tuple[float, float]

    @property
    def difference_pct(self) -> float:
        """How far the two ratios lie apart."""
        return 100 * (max(self.ratios) / min(self.ratios) - 1)

    @property
    def apart(self) -> bool:
        """Whether the two intervals have nothing in common."""
        return self.high[0] < self.low[1]


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


def on_two_gpus(device: str) -> list[Elsewhere]:
    """Comparisons of the same launches on GPUs of a device, the newest on each and over placements, no cap seen.

    Of more than two GPUs the two that differ most.
    """
    found = []
    for card in phases.cards().values():
        rows = [row for row in store.rows(device, card.id) if row.metric == "kernel_us" and not row.throttled]
        for workload, runs in evidence.by_run(row for row in rows if row.placements > 1).items():
            on: dict[tuple[str | None, ...], dict[str | None, tuple[float, float, float]]] = {}  # by launches and GPU
            for a, b in (pair for _, pair in sorted(runs.items())):
                if a and b and (change := evidence.change_pct(a, b)) and not evidence.unsettled(a, b):
                    on.setdefault(tuple(evidence.launches((a, b))), {})[a.gpu_id] = change
            for gpus in on.values():
                one, two = min(gpus.values()), max(gpus.values())
                if len(gpus) > 1:
                    ratios = 1 + one[0] / 100, 1 + two[0] / 100
                    found.append(Elsewhere(card.id, workload, ratios, (one[1], two[1]), (one[2], two[2])))
    return found
