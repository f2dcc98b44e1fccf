"""Figures and verdicts transcribed from the five sources: data/recorded/*.csv, by id.

A figure is a number that somebody published, with its unit, its arm and its source file; a verdict is the word the
source reached. Both are facts about a source, so nothing here is ever rewritten by a measurement. `figure()` refuses
nothing; `target()` refuses a figure that its source withdrew, because a withdrawn figure must not become a goal again
(withdrawn by id, not by value: 471 ms/step is an artefact in one place and a sound control in another).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lab.base import vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest

FOLDER = REPOSITORY / "data" / "recorded"
FIGURE_FILES = (
    "measurements.csv",
    "gates.csv",
    "program.csv",
    "patches.csv",
    "phases.csv",
    "stated_ds4.csv",
    "stated_ik_llama.csv",
    "stated_imp.csv",
    "stated_lucebox.csv",
)
FIGURE_COLUMNS = (
    "id",
    "system",
    "phase",
    "device",
    "model",
    "arm",
    "metric",
    "unit",
    "params",
    "value",
    "delta_pct",
    "kind",
    "source",
)
VERDICT_COLUMNS = ("id", "system", "phase", "title", "hypothesis", "gate", "observed", "verdict", "why", "source")


@dataclass(frozen=True)
class Figure:
    """One recorded number.

    value:     as printed by the source, in `unit`; text where the source gives a word.
    delta_pct: change against the control in %, only where the source states it, else None.
    kind:      measured, predicted, ceiling, floor or threshold.
    params:    the conditions (npl, M, ctx, ...); `status` among them when the source took the figure back.
    """

    id: str
    system: str
    phase: str
    device: str
    model: str
    arm: str
    metric: str
    unit: str
    params: Mapping[str, Any]
    value: float | str
    delta_pct: float | None
    kind: str
    source: str

    @property
    def arrival(self) -> str:
        """How the requests of the load arrived ("burst", "staggered"), "" when the source does not say."""
        return str(self.params.get("arrival", self.params.get("traffic", "")))

    @property
    def withdrawn(self) -> str:
        """The source's word for taking the figure back, "" when it stands."""
        status = str(self.params.get("status", ""))
        return status if vocabulary.is_withdrawn(status) else ""


@dataclass(frozen=True)
class RecordedVerdict:
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


def read_table(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a CSV that has at least `columns`.

    Raises BadInput when the file is missing, a column is missing or a row is short.
    """
    try:
        with path.open(newline="", encoding="utf-8") as handle:
            reader = csv.DictReader(handle)
            header, rows = list(reader.fieldnames or []), list(reader)
    except OSError as error:
        raise BadInput(path, f"cannot be read ({error.strerror})", "restore it from version control") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(path, f"not a readable CSV ({error})", "restore it from version control") from None
    missing = [c for c in columns if c not in header]
    if missing:
        raise BadInput(path, f'column "{missing[0]}" is missing', f"it needs {', '.join(columns)}")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise BadInput(path, f"line {number} has a different number of fields than the header", "mend that line")
    return rows


def _number(path: Path, row: dict[str, str], column: str) -> float | str:
    text = row[column]
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        raise BadInput(path, f'{row["id"]}: {column} = "{text}" is not finite', "leave the figure out instead")
    return value


def _known_arrival(path: Path, figure_id: str, params: Mapping[str, Any]) -> None:
    for key in ("arrival", "traffic"):
        word = params.get(key, "")
        if word and word not in vocabulary.arrivals():
            raise BadInput(path, f'{figure_id}: {key} = "{word}"', nearest(str(word), vocabulary.arrivals()))


def read_figures(path: Path) -> dict[str, Figure]:
    """Figures of one CSV by id.

    Raises BadInput for a missing column, a duplicate id, a value that is NaN or infinite, a negative time, or params
    that are not a JSON object or name unknown arrivals; each names the file and the id.
    """
    figures: dict[str, Figure] = {}
    for row in read_table(path, FIGURE_COLUMNS):
        try:
            params = json.loads(row["params"] or "{}")
        except json.JSONDecodeError as error:
            raise BadInput(path, f"{row['id']}: params is not JSON ({error.msg})", "mend that field") from None
        if not isinstance(params, dict):
            raise BadInput(path, f"{row['id']}: params = {params!r:.60} is not a JSON object", "mend that field")
        if row["id"] in figures:
            raise BadInput(path, f'id "{row["id"]}" appears twice', "give the second one its own id")
        _known_arrival(path, row["id"], params)
        value, delta = _number(path, row, "value"), _number(path, row, "delta_pct")
        if isinstance(value, float) and value < 0 and vocabulary.is_time(row["unit"]):
            raise BadInput(
                path, f"{row['id']}: {value} {row['unit']} is a negative time", "check the sign and the unit"
            )
        figures[row["id"]] = Figure(
            **{
                c: row[c]
                for c in ("id", "system", "phase", "device", "model", "arm", "metric", "unit", "kind", "source")
            },
            params=params,
            value=value,
            delta_pct=delta if isinstance(delta, float) else None,
        )
    return figures


@cache
def figures() -> Mapping[str, Figure]:
    """Every recorded figure by id, from all figure files."""
    merged: dict[str, Figure] = {}
    for name in FIGURE_FILES:
        found = read_figures(FOLDER / name)
        for figure_id in sorted(found.keys() & merged.keys())[:1]:
            raise BadInput(FOLDER / name, f'id "{figure_id}" is in another file too', "give the second one its own id")
        merged.update(found)
    return merged


def figure(figure_id: str, where: str | Path = "recorded") -> Figure:
    """The figure with this id; raises BadInput naming `where` and the nearest id."""
    found = figures().get(figure_id)
    if found is None:
        raise BadInput(where, f'no recorded figure has the id "{figure_id}"', nearest(figure_id, figures()))
    return found


def target(figure_id: str) -> Figure:
    """The figure with this id as a goal to reach; raises BadInput when its source withdrew it."""
    found = figure(figure_id)
    if found.withdrawn:
        raise BadInput(figure_id, f'withdrawn by its source ("{found.withdrawn}")', "aim at a figure that stands")
    return found


@cache
def verdicts() -> Mapping[str, RecordedVerdict]:
    """Every recorded verdict by id."""
    rows = read_table(FOLDER / "verdicts.csv", VERDICT_COLUMNS)
    found: dict[str, RecordedVerdict] = {}
    for row in rows:
        if row["id"] in found:
            raise BadInput(FOLDER / "verdicts.csv", f'id "{row["id"]}" appears twice', "give the second one its own id")
        found[row["id"]] = RecordedVerdict(**{c: row[c] for c in VERDICT_COLUMNS})
    return found


def verdict(verdict_id: str, where: str | Path = "recorded") -> RecordedVerdict:
    """The recorded verdict with this id; raises BadInput naming `where` and the nearest id."""
    found = verdicts().get(verdict_id)
    if found is None:
        raise BadInput(where, f'no recorded verdict has the id "{verdict_id}"', nearest(verdict_id, verdicts()))
    return found
