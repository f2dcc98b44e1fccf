"""A number with its unit and its source: what data/devices.toml and data/models.toml are made of.

Sources disagree (one document gives GB10 273 GB/s, a later one 546), and a workbench that silently picked one would
turn a transcription into a claim. So a fact holds every value that was found, each with where it was found, plus the
index of the one used by default and the reason. Arithmetic runs on base units (bytes, seconds, operations) through
`base`; conversion happens here and nowhere else, because a unit read wrongly once cost one of the sources a factor of
400. Given up: uncertainties and dates as fields of their own; where one matters the note says it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput, nearest

KINDS = ("datasheet", "recorded", "measured", "estimate")

# unit -> (what it measures, factor to the base unit). KB is 1024 bytes, as CUDA counts shared memory; the others with
# a decimal letter are powers of ten, as the vendors print them.
UNITS: Mapping[str, tuple[str, float]] = {
    "B/s": ("bandwidth", 1.0),
    "GB/s": ("bandwidth", 1e9),
    "TB/s": ("bandwidth", 1e12),
    "TFLOP/s": ("rate", 1e12),
    "TOP/s": ("rate", 1e12),
    "bytes": ("bytes", 1.0),
    "KB": ("bytes", 1024.0),
    "MB": ("bytes", 1e6),
    "GB": ("bytes", 1e9),
    "KiB": ("bytes", 2.0**10),
    "MiB": ("bytes", 2.0**20),
    "GiB": ("bytes", 2.0**30),
    "s": ("time", 1.0),
    "ms": ("time", 1e-3),
    "us": ("time", 1e-6),
    "ms/step": ("time", 1e-3),
    "ms/call": ("time", 1e-3),
    "us/tok": ("time", 1e-6),
    "tok/s": ("tokens per time", 1.0),
    "t/s": ("tokens per time", 1.0),
    "%": ("ratio", 1e-2),
    "x": ("ratio", 1.0),
    "ratio": ("ratio", 1.0),
    "params": ("count", 1.0),
    "B params": ("count", 1e9),
    "capability": ("capability", 1.0),
    **{
        u: ("count", 1.0)
        for u in ("SMs", "layers", "heads", "elements", "experts", "tokens", "sequences", "copies/run")
    },
}


@dataclass(frozen=True)
class Value:
    """One statement of a fact.

    source: the id of a recorded figure, or words that say where it stands.
    kind:   "datasheet", "recorded", "measured" or "estimate".
    """

    value: float
    source: str
    kind: str


@dataclass(frozen=True)
class Fact:
    """Every statement found of one quantity, in one unit, and which is used by default.

    key:  where it stands, e.g. "gb10.memory_bandwidth".
    use:  index of the default in `values`; `note` says why when there are several.
    """

    key: str
    unit: str
    values: tuple[Value, ...]
    use: int = 0
    note: str = ""

    @property
    def value(self) -> float:
        """The default value, in `unit`."""
        return self.values[self.use].value

    @property
    def source(self) -> str:
        """Where the default value stands."""
        return self.values[self.use].source

    @property
    def kind(self) -> str:
        """The kind of the default value."""
        return self.values[self.use].kind

    @property
    def base(self) -> float:
        """The default value in base units (bytes, bytes/s, operations/s, s)."""
        return to_base(self.value, self.unit)

    @property
    def others(self) -> tuple[Value, ...]:
        """The values that are not the default."""
        return tuple(v for i, v in enumerate(self.values) if i != self.use)

    def shown(self) -> str:
        """The fact in words, every value with its source."""
        parts = [f"{v.value:g} {self.unit} ({v.kind}: {v.source})" for v in (self.values[self.use], *self.others)]
        return " or ".join(parts) + (f"; {self.note}" if self.note else "")


def to_base(value: float, unit: str, where: str | Path = "unit") -> float:
    """`value` in base units; raises BadInput for a unit that has no factor."""
    if unit not in UNITS:
        raise BadInput(where, f'unit = "{unit}" has no conversion', nearest(unit, UNITS))
    return value * UNITS[unit][1]


def from_base(value: float, unit: str, where: str | Path = "unit") -> float:
    """`value`, given in base units, in `unit`; raises BadInput for a unit that has no factor."""
    return value / to_base(1.0, unit, where)


def only(table: Mapping[str, Any], known: tuple[str, ...], where: Path, key: str) -> None:
    """Raises BadInput for the first key of `table` that is not in `known`, naming the nearest."""
    for name in table:
        if name not in known:
            raise BadInput(where, f'{key}: unknown key "{name}"', nearest(name, known))


def text(table: Mapping[str, Any], name: str, where: Path, key: str) -> str:
    """A required non-empty string; raises BadInput when it is missing, empty or something else."""
    value = table.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadInput(
            where, f"{key}: {name} is {'missing' if value is None else repr(value)}", f"give {name} in words"
        )
    return value


def texts(table: Mapping[str, Any], name: str, where: Path, key: str) -> tuple[str, ...]:
    """An optional list of strings; raises BadInput when it is anything else."""
    value = table.get(name, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise BadInput(where, f"{key}: {name} = {value!r} is not a list of strings", 'write it as ["...", "..."]')
    return tuple(value)


def _value(entry: Any, where: Path, key: str) -> Value:
    if not isinstance(entry, dict):
        raise BadInput(where, f"{key}: {entry!r} is not a table", "write { value = ..., source = ..., kind = ... }")
    only(entry, ("value", "source", "kind"), where, key)
    number = entry.get("value")
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number <= 0:
        raise BadInput(
            where, f"{key}: value = {number!r} is not a positive number", "give the number, without its unit"
        )
    kind = text(entry, "kind", where, key)
    if kind not in KINDS:
        raise BadInput(where, f'{key}: kind = "{kind}" is unknown', nearest(kind, KINDS))
    return Value(float(number), text(entry, "source", where, key), kind)


def fact(table: Any, where: Path, key: str, dimension: str | None = None) -> Fact:
    """A fact from its TOML table, in the long form (`values = [...]`) or with one value inline.

    dimension: what its unit has to measure ("bandwidth", "rate", "bytes", "count", ...); None takes any known unit.
    Raises BadInput for an unknown key, a missing unit or source, a unit of another dimension, a value that is not a
    positive number, an index out of range, and several values without a note that says which is used and why.
    """
    if not isinstance(table, dict):
        raise BadInput(where, f"{key} = {table!r} is not a table", "give it a unit, a value and a source")
    only(table, ("unit", "values", "use", "note", "value", "source", "kind"), where, key)
    unit = text(table, "unit", where, key)
    if unit not in UNITS:
        raise BadInput(where, f'{key}: unit = "{unit}" is unknown', nearest(unit, UNITS))
    if dimension is not None and UNITS[unit][0] != dimension:
        fitting = ", ".join(u for u, (d, _) in UNITS.items() if d == dimension)
        raise BadInput(where, f"{key}: unit = {unit} measures {UNITS[unit][0]}, not {dimension}", f"valid: {fitting}")
    entries = table.get("values")
    if entries is None:
        entries = [{k: v for k, v in table.items() if k in ("value", "source", "kind")}]
    elif "value" in table or not isinstance(entries, list) or not entries:
        raise BadInput(where, f"{key}: values = {entries!r}", "give either one value inline or a list of values")
    values = tuple(_value(entry, where, key) for entry in entries)
    use = table.get("use", 0)
    if isinstance(use, bool) or not isinstance(use, int) or not 0 <= use < len(values):
        raise BadInput(where, f"{key}: use = {use!r} is no index of {len(values)} values", "count from 0")
    note = text(table, "note", where, key) if len(values) > 1 or "note" in table else ""
    return Fact(key, unit, values, use, note)
