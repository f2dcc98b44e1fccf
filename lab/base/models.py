"""Models and the kernel shapes they give rise to, read from data/models.toml.

A workload that says it is a real model's shape names it ("q36-27b.ffn_up"), and this module resolves the name to axes.
A shape holds no number of its own: each axis points at a fact of the model, so 17,408 stands once, with its source, and
the shape of a projection cannot drift from the model it belongs to. Contradictions between sources are kept in the
facts (lab/base/facts.py); shapes use the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import force_setattr

from lab.base import files
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.base.facts import UNITS, Fact, by_name, claimed, keyed

FILE = REPOSITORY / "data" / "models.toml"


class Shape(Struct, frozen=True):
    """A named problem of a model: axes (axis -> size) and the fact behind each axis."""

    axes: Mapping[str, int]
    facts: Mapping[str, Fact]


class Model(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model: its facts by name, its shapes by name, and other names it goes by in recorded figures."""

    id: str = ""
    name: files.Text
    aliases: tuple[str, ...] = ()
    facts: dict[str, Fact]
    axes: dict[str, dict[str, str]] = field(default_factory=dict, name="shapes")

    def __post_init__(self) -> None:
        if self.id or not self.facts:
            raise ValueError('has a key "id" or no facts; leave the id out, and give each fact with unit and source')
        for shape, axes in self.axes.items():
            for axis, name in axes.items():
                if name not in self.facts:
                    what = f'shapes.{shape}: {axis} = "{name}" is no fact of the model'
                    raise ValueError(f"{what}; {nearest(name, self.facts)}")
                found = self.facts[name]
                if UNITS[found.unit][0] != "count" or found.value != int(found.value):
                    what = f"shapes.{shape}: {axis} = {found.value:g} {found.unit} is not a size"
                    raise ValueError(f"{what}; name a counted fact")

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes with their sizes."""
        facts = {shape: {axis: self.facts[name] for axis, name in axes.items()} for shape, axes in self.axes.items()}
        return {shape: Shape({axis: int(f.value) for axis, f in of.items()}, of) for shape, of in facts.items()}

    def fact(self, name: str) -> Fact:
        """A fact by name; raises BadInput naming the nearest."""
        if name not in self.facts:
            raise BadInput(FILE, f'{self.id} has no fact "{name}"', nearest(name, self.facts))
        return self.facts[name]


def load(path: Path = FILE) -> dict[str, Model]:
    """Every model of a file by id.

    Raises BadInput, naming the file and the key, for malformed TOML, an unknown key, a fact without unit or source, a
    shape whose axis names no counted fact, and a name that two models claim.
    """
    models = files.read(path, dict[str, Model])
    for model_id, model in models.items():
        force_setattr(model, "id", model_id)
        keyed(model_id, model.facts)
    claimed(path, models)
    return models


@cache
def _models() -> Mapping[str, Model]:
    return load()


def get(model_id: str, where: str | Path = "model") -> Model:
    """The model with this id or alias; raises BadInput naming `where` and the nearest id."""
    return by_name("model", model_id, _models(), where)


def shape(source: str, where: str | Path = "model shape") -> Shape:
    """The shape that a workload's `source` names, "<model>.<shape>"; raises BadInput naming `where` and the nearest."""
    model_id, dot, name = source.rpartition(".")
    if not dot:
        raise BadInput(where, f'"{source}" names no shape', 'write "<model>.<shape>", e.g. "q36-27b.ffn_up"')
    model = get(model_id, where)
    if name not in model.shapes:
        raise BadInput(where, f'"{source}" names no shape of {model.id}', nearest(name, model.shapes))
    return model.shapes[name]
