"""`lab rows`: what profiles/ holds, one flat object a row, for programs and as a table.

A row on the disk carries every sample and every circumstance; this is the part that a reader compares, under keys that
stay the same whatever a row lacks: a key that a row does not have is null, never absent, and a row that failed has its
status and nulls instead of times. Filters are checked before anything is read, so that a misspelt family is told the
nearest one instead of an empty list; a known word that nobody has measured yet is an empty list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lab.base import console, devices
from lab.base.errors import REPOSITORY, refuse_unknown
from lab.card import phases
from lab.check import families
from lab.row import store
from lab.row.records import Measurement

KEYS: tuple[str, ...] = ("device", "phase", "family", "arm", "name", "precision", "workload_id", "workload", "status")
KEYS += ("message", "timer", "l2", "median_us", "iqr_us", "n", "converged", "relative_error", "run", "commit")


def measured(family: str | None = None, phase: str | None = None, device: str | None = None) -> list[Measurement]:
    """The rows that pass the filters, oldest run first; device: id or driver's name. BadInput for an unknown word."""
    if family is not None:
        refuse_unknown("--family", "family", family, families.names())
    known = {*phases.cards(), *(path.parts[-3] for path in store.measured())}
    if phase is not None:  # a phase whose card is gone keeps its rows
        refuse_unknown("--phase", "phase", phase, known)
    place = None if device is None else devices.get(device, "--device").id
    return store.rows(place, phase, family)


def value(row: Measurement) -> dict[str, Any]:
    """A row with exactly KEYS, as --json prints it. median_us, iqr_us: microseconds; relative_error: a ratio."""
    return {key: getattr(row, key) for key in KEYS} | {"commit": None if row.commit == "unknown" else row.commit}


def render(rows: Iterable[Measurement]) -> str:
    """The rows as a table for a terminal of 150 columns."""
    cells = []
    for row in rows:
        iqr = "" if row.iqr_us is None else f" ({row.iqr_us:.2f})"
        time = row.status if row.median_us is None else f"{row.median_us:.2f}{iqr}"
        error = "-" if row.relative_error is None else f"{row.relative_error:.1e}"
        how = ", ".join(word for word in (row.timer, row.l2) if word) or "-"
        settled = "" if row.converged in (True, None) else " not converged"
        where = f"{row.device} {row.phase}"
        cells.append((where, row.workload_id, f"{row.arm} {row.name}", time, error, how + settled, row.run))
    if not cells:
        return "no measured rows"
    header = ("device, phase", "workload", "arm", "median us (IQR)", "rel. error", "timer, L2", "run")
    return console.table(header, cells, (20, 28, 34, 18, 10, 14, 18))


def elsewhere(card: phases.Card) -> list[str]:
    """The notebooks that name a card without recorded or measured figures: they form them and hold its gate to them."""
    if card.recorded or store.measured_devices(card.id):
        return []
    name, folder = f'"{card.id}"', REPOSITORY / "notebooks"
    return [path.stem for path in sorted(folder.glob("*.py")) if name in path.read_text(encoding="utf-8")]
