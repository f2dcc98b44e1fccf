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
from typing import Annotated, Any, Literal, TypeVar, get_args

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from lab.base import files, vocabulary
from lab.base.errors import BadInput, nearest
from lab.base.files import Positive

Kind = Literal["datasheet", "recorded", "measured", "estimate"]
KINDS = get_args(Kind)
# Not in files.Text: msgspec 0.22 crashes where it drops a bare list of texts that have a pattern.
Source = Annotated[str, Meta(pattern=r"\S")]
E = TypeVar("E")


class Value(Struct, frozen=True, forbid_unknown_fields=True):
    """One statement of a fact; `source`: the id of a recorded figure, or words that say where it stands."""

    value: Positive
    source: Source
    kind: Kind


class Fact(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every statement found of one quantity, in one unit, and which is used by default.

    In a file either `values`, or the one there is inline. key: where it stands, e.g. "gb10.memory_bandwidth".
    value, source, kind: of the default, which is values[use]; `note` says why when there are several.
    """

    unit: str
    value: Positive = math.nan
    source: Source = ""
    kind: Kind | None = None
    values: tuple[Value, ...] = ()
    use: Annotated[int, Meta(ge=0)] = 0
    note: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if self.key:
            raise ValueError('unknown key "key"; leave it out, it is told by where the fact stands')
        if vocabulary.measures(self.unit).factor is None:
            raise ValueError(f'unit = "{self.unit}" is unknown; {nearest(self.unit, _convertible())}')
        if {not math.isnan(self.value), bool(self.source), self.kind is not None} != {not self.values}:
            raise ValueError("has no value; give value, source and kind, or a list of such values")
        if self.kind is not None:
            force_setattr(self, "values", (Value(self.value, self.source, self.kind),))
        if self.use >= len(self.values):
            raise ValueError(f"use = {self.use} is no index of {len(self.values)} values; count from 0")
        if len(self.values) > 1 and not self.note.strip():
            raise ValueError("note is missing; say which value is used and why")
        for name in Value.__struct_fields__:
            force_setattr(self, name, getattr(self.values[self.use], name))

    def measured_in(self, quantity: str, name: str) -> None:
        """Raise ValueError where the unit does not measure this ("bandwidth", "rate", "bytes", "count", ...)."""
        if (measures := vocabulary.measures(self.unit).quantity) != quantity:
            fitting = ", ".join(unit for unit in _convertible() if vocabulary.measures(unit).quantity == quantity)
            raise ValueError(f"{name}: unit = {self.unit} measures {measures}, not {quantity}; valid: {fitting}")

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


def _convertible() -> list[str]:
    return [word for word, unit in vocabulary.words().unit.items() if unit.factor is not None]


def to_base(value: float, unit: str, where: str | Path = "unit") -> float:
    """`value` in base units; raises BadInput for a unit that has no factor."""
    if (factor := vocabulary.measures(unit).factor) is None:
        raise BadInput(where, f'unit = "{unit}" has no conversion', nearest(unit, _convertible()))
    return value * factor


def from_base(value: float, unit: str, where: str | Path = "unit") -> float:
    """`value`, given in base units, in `unit`; raises BadInput for a unit that has no factor."""
    return value / to_base(1.0, unit, where)


def read(path: Path, kind: type[E]) -> dict[str, E]:
    """The devices or models of a file by id; each is given its `id`, and each fact in its `named` a `key`.

    Raises BadInput, naming the file and the key, for malformed TOML, an unknown or missing key, what `kind` refuses,
    and a name that two entries claim.
    """
    entries: dict[str, Any] = files.read(path, dict[files.Id, kind])  # type: ignore[valid-type]
    claims: dict[str, str] = {}
    for entry_id, entry in entries.items():
        force_setattr(entry, "id", entry_id)
        for name, fact in entry.named.items():
            force_setattr(fact, "key", f"{entry_id}.{name}")
        for word in {entry_id, entry.name, *entry.aliases}:
            if word in claims:
                raise BadInput(path, f'"{word}" names {claims[word]} and {entry_id}', "give it to one of them")
            claims[word] = entry_id
    return entries


def by_name(what: str, word: str, entries: Mapping[str, Any], where: str | Path) -> Any:
    """The device or model with this id or alias; raises BadInput naming `where` and the nearest id."""
    known = {alias: entry for entry in entries.values() for alias in (entry.name, *entry.aliases)}
    return files.called(word, {**known, **entries}, what, where)
