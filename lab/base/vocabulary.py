"""The words that cards and figures may use: units, metrics, rows, systems, withdrawal (data/vocabulary.toml).

One of the five sources lost a baseline to milliseconds read as tokens per second, so a unit is part of a figure and is
compared as a word: nothing is converted, a different unit is a disagreement, a missing one is missing evidence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lab.base.errors import REPOSITORY, BadInput, nearest

FILE = REPOSITORY / "data" / "vocabulary.toml"


@dataclass(frozen=True)
class Metric:
    """A named quantity a gate may stand on.

    unit:     its canonical unit; better: "higher", "lower" or "none".
    recorded: the names the sources' tables use for it.
    """

    name: str
    unit: str
    better: str
    meaning: str
    recorded: tuple[str, ...] = ()


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file; raises BadInput naming the file when it is missing or malformed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(path, "no such file", "restore it from version control") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(path, f"not valid TOML ({error})", "mend that line") from None


@cache
def _file() -> dict[str, Any]:
    return read_toml(FILE)


@cache
def metrics() -> Mapping[str, Metric]:
    """Every metric by name."""
    return {
        name: Metric(name, m["unit"], m["better"], m["meaning"], tuple(m.get("recorded", ())))
        for name, m in _file()["metric"].items()
    }


@cache
def _units() -> Mapping[str, str]:
    spelled: dict[str, str] = {}
    for unit, entry in _file()["unit"].items():
        for word in (unit, *entry.get("also", ())):
            spelled[word] = unit
    return spelled


def unit(word: str) -> str:
    """The canonical spelling of a unit ("t/s" is "tok/s"); a word that is not in the table comes back unchanged."""
    return _units().get(word, word)


def known_unit(word: str, where: str | Path) -> str:
    """The canonical spelling of a unit; raises BadInput naming the nearest one when it is unknown."""
    if word not in _units():
        raise BadInput(where, f'unit = "{word}" is unknown', nearest(word, _units()))
    return _units()[word]


def is_time(word: str) -> bool:
    """True for units that measure a duration, which is never negative."""
    entry = _file()["unit"].get(unit(word))
    return bool(entry and entry.get("quantity") == "time")


def is_withdrawn(status: str) -> bool:
    """True when a recorded status word says that the source took the figure back."""
    return any(status.startswith(word) for word in _file()["withdrawn"]["words"]) if status else False


@cache
def arrivals() -> Mapping[str, str]:
    """The arrival patterns of a served load: word -> what it means."""
    return dict(_file()["arrival"])


@cache
def row_ids() -> Mapping[str, str]:
    """The workbench's rows: id -> what it compares."""
    return dict(_file()["row"])


@cache
def systems() -> Mapping[str, str]:
    """The systems whose verdicts are replayed, and our own: id -> what it is."""
    return dict(_file()["system"])
