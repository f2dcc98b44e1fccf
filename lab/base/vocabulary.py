"""The words that cards, figures and facts may use: units, metrics, rows, systems (data/vocabulary.toml).

One of the five sources lost a baseline to milliseconds read as tokens per second, so a unit is part of a figure and is
compared as a word: a different unit is a disagreement, a missing one is missing evidence. Only the facts of devices and
models are converted, by a unit's `factor` (lab/base/facts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

from msgspec import Struct

from lab.base import files
from lab.base.errors import REPOSITORY

FILE = REPOSITORY / "data" / "vocabulary.toml"


class Metric(Struct, frozen=True, forbid_unknown_fields=True):
    """A named quantity a gate may stand on: its canonical unit, and the names that the sources' tables use for it."""

    unit: str
    better: Literal["higher", "lower", "none"]
    meaning: str
    recorded: tuple[str, ...] = ()

    def for_the_worse(self, op: str) -> bool:
        """Whether a change "beyond" (or "at least") a threshold is one that nobody wants: "<" of a throughput."""
        return op in {"higher": ("<", "<="), "lower": (">", ">=")}.get(self.better, ())


class Unit(Struct, frozen=True, forbid_unknown_fields=True):
    """A unit: other spellings found in the sources, what it measures ("time"), its factor to that's base unit."""

    also: tuple[str, ...] = ()
    quantity: str = ""
    factor: files.Positive | None = None
    note: str = ""


class Vocabulary(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file: word -> what it means. withdrawn: how the status of a figure begins that its source took back."""

    withdrawn: tuple[str, ...]
    system: dict[str, str]
    arrival: dict[str, str]
    unit: dict[str, Unit]
    metric: dict[str, Metric]
    row: dict[str, str]


@cache
def words() -> Vocabulary:
    """The vocabulary, read once."""
    return files.read(FILE, Vocabulary)


@cache
def _spellings() -> Mapping[str, str]:
    return {word: unit for unit, entry in words().unit.items() for word in (unit, *entry.also)}


def unit(word: str) -> str:
    """The canonical spelling of a unit ("t/s" is "tok/s"); a word that is not in the table comes back unchanged."""
    return _spellings().get(word, word)


def measures(word: str) -> Unit:
    """What a unit measures; an empty `Unit` for a word that is not in the table."""
    return words().unit.get(unit(word), Unit())
