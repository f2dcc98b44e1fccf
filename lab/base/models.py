"""Models and the kernel shapes they give rise to, read from data/models.toml.

A workload that says it is a real model's shape names it ("q36-27b.ffn_up"), and this module resolves the name to axes.
A shape holds no number of its own: each axis points at a fact of the model, so 17,408 stands once, with its source, and
the shape of a projection cannot drift from the model it belongs to. Contradictions between sources are kept in the
facts (lab/base/facts.py); shapes use the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.base import vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.base.facts import UNITS, Fact, fact, only, text, texts

FILE = REPOSITORY / "data" / "models.toml"


@dataclass(frozen=True)
class Shape:
    """A named problem of a model: id ("q36-27b.ffn_up"), axes (axis -> size) and the fact behind each axis."""

    id: str
    axes: Mapping[str, int]
    facts: Mapping[str, Fact]


@dataclass(frozen=True)
class Model:
    """One model: its facts by name, its shapes by name, and other names it goes by in recorded figures."""

    id: str
    name: str
    aliases: tuple[str, ...]
    facts: Mapping[str, Fact]
    shapes: Mapping[str, Shape]

    def fact(self, name: str) -> Fact:
        """A fact by name; raises BadInput naming the nearest."""
        if name not in self.facts:
            raise BadInput(FILE, f'{self.id} has no fact "{name}"', nearest(name, self.facts))
        return self.facts[name]

    def shape(self, name: str) -> Shape:
        """A shape by name; raises BadInput naming the nearest."""
        if name not in self.shapes:
            raise BadInput(FILE, f'{self.id} has no shape "{name}"', nearest(name, self.shapes))
        return self.shapes[name]


def _shape(model_id: str, name: str, table: object, facts: Mapping[str, Fact], path: Path) -> Shape:
    key = f"{model_id}.shapes.{name}"
    if not isinstance(table, dict) or not table:
        raise BadInput(path, f"{key} = {table!r} is not a table of axes", "write { axis = fact, ... }")
    used: dict[str, Fact] = {}
    for axis, fact_name in table.items():
        if not isinstance(fact_name, str) or fact_name not in facts:
            what = f'{key}: {axis} = "{fact_name}" is no fact of the model'
            raise BadInput(path, what, nearest(str(fact_name), facts))
        found = facts[fact_name]
        if UNITS[found.unit][0] != "count" or found.value != int(found.value):
            raise BadInput(path, f"{key}: {axis} = {found.value:g} {found.unit} is not a size", "name a counted fact")
        used[axis] = found
    return Shape(f"{model_id}.{name}", {axis: int(f.value) for axis, f in used.items()}, used)


def _model(model_id: str, table: object, path: Path) -> Model:
    if not isinstance(table, dict):
        raise BadInput(path, f"{model_id} = {table!r} is not a table", f"write [{model_id}] above its keys")
    only(table, ("name", "aliases", "facts", "shapes"), path, model_id)
    for name in ("facts", "shapes"):
        if not isinstance(table.get(name, {}), dict):
            raise BadInput(path, f"{model_id}.{name} = {table[name]!r} is not a table", f"write [{model_id}.{name}]")
    if not table.get("facts"):
        raise BadInput(path, f"{model_id}: facts is missing", f"add [{model_id}.facts] with unit and source for each")
    facts = {name: fact(entry, path, f"{model_id}.{name}") for name, entry in table["facts"].items()}
    shapes = {name: _shape(model_id, name, entry, facts, path) for name, entry in table.get("shapes", {}).items()}
    title = text(table, "name", path, model_id)
    return Model(model_id, title, texts(table, "aliases", path, model_id), facts, shapes)


def load(path: Path = FILE) -> dict[str, Model]:
    """Every model of a file by id.

    Raises BadInput, naming the file and the key, for malformed TOML, an unknown key, a fact without unit or source, a
    shape whose axis names no counted fact, and a name that two models claim.
    """
    models = {key: _model(key, table, path) for key, table in vocabulary.read_toml(path).items()}
    claimed: dict[str, str] = {}
    for model in models.values():
        for word in {model.id, *model.aliases}:
            if word in claimed:
                raise BadInput(path, f'"{word}" names {claimed[word]} and {model.id}', "give it to one of them")
            claimed[word] = model.id
    return models


@cache
def _models() -> Mapping[str, Model]:
    return load()


def get(model_id: str, where: str | Path = "model") -> Model:
    """The model with this id or alias; raises BadInput naming `where` and the nearest id."""
    models = _models()
    if model_id in models:
        return models[model_id]
    for model in models.values():
        if model_id in model.aliases:
            return model
    known = [*models, *(a for m in models.values() for a in m.aliases)]
    raise BadInput(where, f'model "{model_id}" is unknown', nearest(model_id, known))


def shape(source: str, where: str | Path = "model shape") -> Shape:
    """The shape that a workload's `source` names, "<model>.<shape>"; raises BadInput naming `where` and the nearest."""
    model_id, dot, name = source.rpartition(".")
    if not dot:
        raise BadInput(where, f'"{source}" names no shape', 'write "<model>.<shape>", e.g. "q36-27b.ffn_up"')
    model = get(model_id, where)
    if name not in model.shapes:
        raise BadInput(where, f'"{source}" names no shape of {model.id}', nearest(name, model.shapes))
    return model.shapes[name]
