"""The words that cards and figures may use: units, metrics, rows, systems, withdrawal (data/vocabulary.toml).

One of the five sources lost a baseline to milliseconds read as tokens per second, so a unit is part of a figure and is
compared as a word: nothing is converted, a different unit is a disagreement, a missing one is missing evidence.
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


class Unit(Struct, frozen=True, forbid_unknown_fields=True):
    """A unit: other spellings found in the sources, and its quantity where that says something ("time")."""

    also: tuple[str, ...] = ()
    quantity: str = ""
    note: str = ""


class Withdrawn(Struct, frozen=True, forbid_unknown_fields=True):
    """How the status of a figure begins that its source took back."""

    words: tuple[str, ...]


class Vocabulary(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file: word -> what it means."""

    system: dict[str, str]
    withdrawn: Withdrawn
    arrival: dict[str, str]
    unit: dict[str, Unit]
    metric: dict[str, Metric]
    row: dict[str, str]


@cache
def words() -> Vocabulary:
    """The vocabulary, read once."""
    return files.read(FILE, Vocabulary)


def metrics() -> Mapping[str, Metric]:
    """Every metric by name."""
    return words().metric


def arrivals() -> Mapping[str, str]:
    """The arrival patterns of a served load."""
    return words().arrival


def row_ids() -> Mapping[str, str]:
    """The workbench's rows: id -> what it compares."""
    return words().row


def systems() -> Mapping[str, str]:
    """The systems whose verdicts are replayed, and our own."""
    return words().system


@cache
def _spellings() -> Mapping[str, str]:
    return {word: unit for unit, entry in words().unit.items() for word in (unit, *entry.also)}


def unit(word: str) -> str:
    """The canonical spelling of a unit ("t/s" is "tok/s"); a word that is not in the table comes back unchanged."""
    return _spellings().get(word, word)


def is_time(word: str) -> bool:
    """True for units that measure a duration, which is never negative."""
    entry = words().unit.get(unit(word))
    return entry is not None and entry.quantity == "time"


def is_withdrawn(status: str) -> bool:
    """True when a recorded status word says that the source took the figure back."""
    return status.startswith(words().withdrawn.words)
