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

from lab.base import facts, files, vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.base.facts import Fact

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
                if vocabulary.measures(found.unit).quantity != "count" or found.value != int(found.value):
                    what = f"shapes.{shape}: {axis} = {found.value:g} {found.unit} is not a size"
                    raise ValueError(f"{what}; name a counted fact")

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes with their sizes."""
        behind = {shape: {axis: self.facts[name] for axis, name in axes.items()} for shape, axes in self.axes.items()}
        return {shape: Shape({axis: int(f.value) for axis, f in of.items()}, of) for shape, of in behind.items()}

    @property
    def named(self) -> Mapping[str, Fact]:
        """The facts, as `facts.read` asks for them."""
        return self.facts

    def fact(self, name: str) -> Fact:
        """A fact by name; raises BadInput naming the nearest."""
        return files.called(name, self.facts, f"fact of {self.id}", FILE)


def load(path: Path = FILE) -> dict[str, Model]:
    """Every model of a file by id; raises BadInput as `facts.read` does, and for an axis that names no counted fact."""
    return facts.read(path, Model)


@cache
def _models() -> Mapping[str, Model]:
    return load()


def get(model_id: str, where: str | Path = "model") -> Model:
    """The model with this id or alias; raises BadInput naming `where` and the nearest id."""
    return facts.by_name("model", model_id, _models(), where)


def shape(source: str, where: str | Path = "model shape") -> Shape:
    """The shape that a workload's `source` names, "<model>.<shape>"; raises BadInput naming `where` and the nearest."""
    model_id, dot, name = source.rpartition(".")
    if not dot:
        raise BadInput(where, f'"{source}" names no shape', 'write "<model>.<shape>", e.g. "q36-27b.ffn_up"')
    model = get(model_id, where)
    return files.called(name, model.shapes, f"shape of {model.id}", where)
