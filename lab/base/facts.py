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
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from lab.base.errors import BadInput, nearest
from lab.base.files import Positive, Text

Kind = Literal["datasheet", "recorded", "measured", "estimate"]
KINDS = get_args(Kind)

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


class Value(Struct, frozen=True, forbid_unknown_fields=True):
    """One statement of a fact; `source`: the id of a recorded figure, or words that say where it stands."""

    value: Positive
    source: Text
    kind: Kind


class Fact(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every statement found of one quantity, in one unit, and which is used by default.

    In a file either `values`, or the one there is inline. key: where it stands, e.g. "gb10.memory_bandwidth".
    value, source, kind: of the default, which is values[use]; `note` says why when there are several.
    """

    unit: str
    value: Positive = math.nan
    source: str = ""
    kind: Kind | None = None
    values: tuple[Value, ...] = ()
    use: int = 0
    note: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if self.key:
            raise ValueError('unknown key "key"; leave it out, it is told by where the fact stands')
        if self.unit not in UNITS:
            raise ValueError(f'unit = "{self.unit}" is unknown; {nearest(self.unit, UNITS)}')
        inline = not math.isnan(self.value) or self.source or self.kind
        if inline == bool(self.values) or (inline and not (self.value > 0 and self.source.strip() and self.kind)):
            raise ValueError("has no value; give value, source and kind, or a list of such values")
        if inline:
            force_setattr(self, "values", (Value(self.value, self.source, self.kind or "estimate"),))
        if not 0 <= self.use < len(self.values):
            raise ValueError(f"use = {self.use} is no index of {len(self.values)} values; count from 0")
        if len(self.values) > 1 and not self.note.strip():
            raise ValueError("note is missing; say which value is used and why")
        if not all(math.isfinite(v.value) and v.source.strip() for v in self.values):
            raise ValueError("a value is infinite or its source blank; mend it")
        for name in ("value", "source", "kind"):
            force_setattr(self, name, getattr(self.values[self.use], name))

    def measured_in(self, dimension: str, name: str) -> None:
        """Raise ValueError where the unit does not measure this ("bandwidth", "rate", "bytes", "count", ...)."""
        if UNITS[self.unit][0] != dimension:
            fitting = ", ".join(unit for unit, (measures, _) in UNITS.items() if measures == dimension)
            measures = UNITS[self.unit][0]
            raise ValueError(f"{name}: unit = {self.unit} measures {measures}, not {dimension}; valid: {fitting}")

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


def keyed(prefix: str, facts: Mapping[str, Fact]) -> None:
    """Tell facts that were read from a file where they stand there."""
    for name, fact in facts.items():
        force_setattr(fact, "key", f"{prefix}.{name}")


def claimed(path: Path, entries: Mapping[str, Any]) -> None:
    """Raise BadInput for a name or an alias that two entries claim."""
    claims: dict[str, str] = {}
    for entry_id, entry in entries.items():
        for word in {entry_id, *entry.aliases}:
            if word in claims:
                raise BadInput(path, f'"{word}" names {claims[word]} and {entry_id}', "give it to one of them")
            claims[word] = entry_id


def by_name(what: str, word: str, entries: Mapping[str, Any], where: str | Path) -> Any:
    """The device or model with this id or alias; raises BadInput naming `where` and the nearest id."""
    known = {alias: entry for entry in entries.values() for alias in entry.aliases} | dict(entries)
    if word not in known:
        raise BadInput(where, f'{what} "{word}" is unknown', nearest(word, known))
    return known[word]
