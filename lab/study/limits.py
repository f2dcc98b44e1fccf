"""Our kernels between the floor and the fastest rival of one run, at the workloads that their cards declare.

A rival is what a user could run instead: a library's arm or a framework's own operator (families.Family.peers), of the
candidate's precision where the candidate is 16 bits wide. Times are medians of one comparison, so both arms met the
same clocks and the same cold L2. data/rivals.toml says which cards the README's figure shows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from lab.base import devices, files
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.base.files import Text
from lab.card import phases
from lab.check import families
from lab.place import roofline
from lab.row import store
from lab.row.records import Measurement

FILE = REPOSITORY / "data" / "rivals.toml"
WIDE = "bf16"


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the figure: a card, and what it is called there."""

    card: Text
    title: Text


class Lines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """data/rivals.toml."""

    line: tuple[Line, ...]


@dataclass(frozen=True)
class Limit:
    """One workload of a card on one device: medians and floor in us.

    rival: of all that were timed beside ours, each in the newest run with both, the fastest relative to ours; and ours
    of that run.
    """

    card: str
    workload: str
    ours: Measurement
    ours_us: float
    rival: Measurement | None
    rival_us: float | None
    floor_us: float

    @property
    def times_as_fast(self) -> float | None:
        """The rival's time over ours, None without a rival."""
        return self.rival_us / self.ours_us if self.rival_us else None

    @property
    def of_floor(self) -> float:
        """The floor over our time, 0 to 1."""
        return roofline.roofline_fraction(self.floor_us, self.ours_us)


def lines(path: Path = FILE) -> tuple[Line, ...]:
    """What the README's figure shows, top to bottom. Raises BadInput."""
    return files.read(path, Lines).line


def limits(card: phases.Card, device: str) -> list[Limit]:
    """The card's workloads, required or not, with correct rows on the device, in its order; [] where there are none."""
    known, found = devices.get(device), []
    peers = families.load(card.family).peers
    rows = [r for r in store.rows(device, card.id) if r.flops is not None and r.bytes is not None and r.pipe]
    timed = [(r, us) for r in rows if (us := r.time_us) is not None]
    for workload in card.workloads:
        own = [(r, us) for r, us in timed if r.workload_id == workload and r.name == card.candidate]
        if not own or not known.knows(own[-1][0].pipe):
            continue
        own.sort(key=lambda pair: pair[0].run)
        pairs: dict[str, tuple[Measurement, float, Measurement, float]] = {}  # by rival, the newest run with both
        for ours, ours_us in own:
            if ours.config != own[-1][0].config:
                continue
            for r, us in timed:
                beside = r.run == ours.run and r.workload_id == workload and r.name in peers
                if beside and (ours.precision != WIDE or r.precision == WIDE):
                    pairs[r.name] = ours, ours_us, r, us
        # A run without a rival, or with a slower one, takes no other run's place.
        hardest = min(pairs.values(), key=lambda pair: pair[3] / pair[1], default=None)
        ours, ours_us, rival, rival_us = hardest or (*own[-1], None, None)
        found.append(Limit(card.id, workload, ours, ours_us, rival, rival_us, roofline.of_row(known, ours).floor_us))
    return found


def floors(family: families.Family, device: devices.Device) -> list[dict[str, Any]]:
    """The floor of each measure workload and precision of a family on a device, with its cost, as flat objects."""
    found = []
    for w in family.cases.WORKLOADS:
        for precision in sorted({c.precision for c in family.candidates.values() if not c.refuses(w)}):
            cost = family.cost(w, precision)
            if cost.pipe not in devices.PIPES:
                what = f'pipe = "{cost.pipe}" of {w.id}, {precision}'
                raise BadInput(f"kernels/{family.name}/cost.py", what, nearest(cost.pipe, devices.PIPES))
            if w.role == "measure" and cost.pipe in device.peaks:
                floor = roofline.place(device, cost.flops, cost.bytes, cost.pipe)
                found.append({"workload": w.id, "precision": precision, **asdict(cost), **asdict(floor)})
    return found
