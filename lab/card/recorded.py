"""Figures and verdicts transcribed from the five sources: data/recorded/*.csv, by id.

A figure is a number that somebody published, with its unit, its arm and its source file; a verdict is the word the
source reached. Both are facts about a source, so nothing here is ever rewritten by a measurement. `figure()` refuses
nothing; `target()` refuses a figure that its source withdrew, because a withdrawn figure must not become a goal again
(withdrawn by id, not by value: 471 ms/step is an artefact in one place and a sound control in another).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from lab.base import files, vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest

FOLDER = REPOSITORY / "data" / "recorded"
FIGURE_FILES: tuple[str, ...] = ("measurements.csv", "gates.csv", "program.csv", "patches.csv", "phases.csv")
FIGURE_FILES += ("stated_ds4.csv", "stated_ik_llama.csv", "stated_imp.csv", "stated_lucebox.csv")


class Figure(Struct, frozen=True):
    """One recorded number.

    params:    the conditions (npl, M, ctx, ...); `status` among them when the source took the figure back.
    value:     as printed by the source, in `unit`; text where the source gives a word.
    delta_pct: change against the control in %, only where the source states it, else None.
    kind:      measured, predicted, ceiling, floor or threshold.
    """

    id: str
    system: str
    phase: str
    device: str
    model: str
    arm: str
    metric: str
    unit: str
    params: dict[str, Any]
    value: float | str
    delta_pct: float | None
    kind: str
    source: str

    def __post_init__(self) -> None:
        for key in ("arrival", "traffic"):
            word = self.params.get(key, "")
            if word and word not in vocabulary.arrivals():
                raise ValueError(f'{key} = "{word}" is unknown; {nearest(str(word), vocabulary.arrivals())}')
        for column in ("value", "delta_pct"):
            number = getattr(self, column)
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{column} = {number} is not finite; leave the figure out instead")
        if isinstance(self.value, float) and self.value < 0 and vocabulary.is_time(self.unit):
            raise ValueError(f"{self.value} {self.unit} is a negative time; check the sign and the unit")

    @property
    def arrival(self) -> str:
        """How the requests of the load arrived ("burst", "staggered"), "" when the source does not say."""
        return str(self.params.get("arrival", self.params.get("traffic", "")))

    @property
    def withdrawn(self) -> str:
        """The source's word for taking the figure back, "" when it stands."""
        status = str(self.params.get("status", ""))
        return status if vocabulary.is_withdrawn(status) else ""


class RecordedVerdict(Struct, frozen=True):
    """The word a source wrote down, with its stated gate and reason in our words."""

    id: str
    system: str
    phase: str
    title: str
    hypothesis: str
    gate: str
    observed: str
    verdict: str
    why: str
    source: str


def read_figures(path: Path) -> dict[str, Figure]:
    """Figures of one CSV by id.

    Raises BadInput for a missing column, a duplicate id, a value that is NaN or infinite, a negative time, or params
    that are not a JSON object or name unknown arrivals; each names the file and the id.
    """

    return files.table(path, Figure.__struct_fields__, Figure, _typed)


def _typed(row: dict[str, Any]) -> dict[str, Any]:
    delta = files.number(row["delta_pct"])
    return row | {"value": files.number(row["value"]), "delta_pct": None if isinstance(delta, str) else delta}


@cache
def figures() -> Mapping[str, Figure]:
    """Every recorded figure by id, from all figure files."""
    merged: dict[str, Figure] = {}
    for path in (FOLDER / name for name in FIGURE_FILES):
        found = read_figures(path)
        for figure_id in sorted(found.keys() & merged.keys())[:1]:
            raise BadInput(path, f'id "{figure_id}" is in another file too', "give the second one its own id")
        merged.update(found)
    return merged


def figure(figure_id: str, where: str | Path = "recorded") -> Figure:
    """The figure with this id; raises BadInput naming `where` and the nearest id."""
    return files.called(figure_id, figures(), "recorded figure", where)


def target(figure_id: str) -> Figure:
    """The figure with this id as a goal to reach; raises BadInput when its source withdrew it."""
    found = figure(figure_id)
    if found.withdrawn:
        raise BadInput(figure_id, f'withdrawn by its source ("{found.withdrawn}")', "aim at a figure that stands")
    return found


@cache
def verdicts() -> Mapping[str, RecordedVerdict]:
    """Every recorded verdict by id."""
    return files.table(FOLDER / "verdicts.csv", RecordedVerdict.__struct_fields__, RecordedVerdict)


def verdict(verdict_id: str, where: str | Path = "recorded") -> RecordedVerdict:
    """The recorded verdict with this id; raises BadInput naming `where` and the nearest id."""
    return files.called(verdict_id, verdicts(), "recorded verdict", where)
