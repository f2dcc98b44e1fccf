"""From a kernel's full name to its category, by ordered rules.

The rules are data (data/categories/*.toml), because they change with every release of an engine. They are tried in
order and the first match wins, so the specific rule stands first: CUTLASS calls attention `device_kernel<...>` like a
product. Each rule carries real names as examples, which a test holds to their category under the whole list.

The demangled name decides, never the short one: `elementwise_kernel` is a copy, a product or a cast, depending on a
functor four templates deep. A name without a rule is "other", which is always shown and warned about above OTHER_LIMIT.
Copies, fills and opaque graphs have categories of their own.

JSON rule files of vLLM's and SGLang's gputrc2graph.py (engine -> model -> regex -> category) work in place of ours.
Given up: rules on anything but the name (grid, stream, position in a step), so an LM head stays a dense product.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.base import files
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.trace.model import short_name

FOLDER = REPOSITORY / "data" / "categories"
OTHER = "other"
OPAQUE = "CUDA graph (not decomposed)"
MEMCPY = "memcpy"
MEMSET = "memset"
IDLE = "idle"
OTHER_LIMIT = 0.05  # of the total; above it a breakdown warns
NO_WORK = ("contamination", "gpu_idle")  # recorded names of time that is no work, beside our own busy = false


class Category(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A category. busy: False for time on the GPU that is no work; also: names that recorded tables use for it."""

    meaning: str = ""
    busy: bool = True
    also: tuple[str, ...] = ()


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule as a file has it. match: a regular expression; examples: real names that it takes."""

    category: str
    match: str
    examples: tuple[str, ...] = ()


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of data/categories."""

    category: dict[str, Category] = {}
    rule: list[Entry] = []


@dataclass(frozen=True)
class Rule:
    """Names in which `pattern` is found (re.search, case-sensitive) get `category`. examples: real names that do."""

    category: str
    pattern: re.Pattern[str]
    where: str
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rules:
    """An ordered list of rules with the meaning of their categories. source: where they stand, for messages."""

    rules: tuple[Rule, ...]
    categories: Mapping[str, Category]
    source: str
    _known: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def category(self, name: str) -> str:
        """The category of a kernel's full name; "other" when no rule knows it."""
        found = self._known.get(name)
        if found is None:
            found = next((r.category for r in self.rules if r.pattern.search(name)), OTHER)
            self._known[name] = found
        return found

    def assign(self, names: Iterable[str]) -> list[str]:
        """The category of each name, in order."""
        return [self.category(name) for name in names]

    def busy(self, category: str) -> bool:
        """False for categories whose time is no work (spin-waits)."""
        known = self.categories.get(category)
        return known.busy if known else category not in NO_WORK

    def waits(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """Of each kernel name, whether its time is no work."""
        return np.array([not self.busy(c) for c in self.assign(names)], bool)

    def canonical(self, word: str) -> str:
        """Our name for a recorded table's category (`moe_or_fp4_gemm`); a word we have no name for stays itself."""
        return next((name for name, c in self.categories.items() if word in c.also), word)


def other_warning(totals: Mapping[str, float], whole: float, unit: str = "us", shown: int = 5) -> str:
    """ "" or one sentence naming what "other" holds, when it exceeds OTHER_LIMIT of `whole`.

    totals: uncategorised kernel name -> time, in `unit` like `whole`.
    """
    rest = sum(totals.values())
    if whole <= 0 or rest <= OTHER_LIMIT * whole:
        return ""
    largest = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    names = ", ".join(f"{short_name(name)} {value:,.4g} {unit}" for name, value in largest[:shown])
    more = f" and {len(largest) - shown} more" if len(largest) > shown else ""
    return f'"other" is {rest / whole:.1%} of the total (limit {OTHER_LIMIT:.0%}): {names}{more}; add a rule for them'


@cache
def default() -> Rules:
    """The rules of data/categories, files in the order of their names."""
    return read_folder(FOLDER)


def load(where: str | Path | None = None) -> Rules:
    """Rules by name: None for ours, a folder or a .toml of this format, or FILE.json, FILE.json#engine/model.

    Raises BadInput for a missing file, a malformed one, an unknown key, and a JSON file with several models when none
    is chosen.
    """
    if where is None:
        return default()
    path_text, _, chosen = str(where).partition("#")
    path = Path(path_text)
    if path.is_dir():
        return read_folder(path)
    if path.suffix == ".json":
        return read_json(path, chosen)
    if path.suffix == ".toml":
        return _rules([path], path)
    raise BadInput(path, "is no file of category rules", "give a .toml, a folder of them, or a gputrc2graph .json")


def read_folder(folder: Path) -> Rules:
    """Rules of every .toml in a folder, in the order of the file names; raises BadInput when there is none."""
    return _rules(sorted(folder.glob("*.toml")), folder)


def _rules(paths: Sequence[Path], source: Path) -> Rules:
    categories: dict[str, Category] = {}
    entries: list[tuple[Path, int, Entry]] = []
    for path in paths:
        file = files.read(path, File)
        for name in file.category.keys() & categories.keys():
            raise BadInput(path, f'category "{name}" is declared twice', "keep one of them")
        categories |= file.category
        entries += [(path, i, entry) for i, entry in enumerate(file.rule)]
    if not entries:
        raise BadInput(source, "holds no category rules", "write [[rule]] with category and match")
    declared = bool(categories)
    rules = []
    for path, i, entry in entries:
        where = f"rule[{i}]"
        if declared and entry.category not in categories:
            what = f'{where}: category "{entry.category}" is not declared'
            raise BadInput(path, what, nearest(entry.category, categories))
        categories.setdefault(entry.category, Category())
        pattern = _pattern(entry.match, path, where)
        rules.append(Rule(entry.category, pattern, f"{path.name} {where}", entry.examples))
    return Rules(tuple(rules), categories, str(source.name))


def read_json(path: Path, chosen: str = "") -> Rules:
    """Rules of a gputrc2graph.py JSON file: {engine: {model: {regex: category}}}, in the file's order.

    chosen: "engine/model"; may be left out when the file has one. The older form with `layer_anno` and `Substage` is
            read too. A catch-all (`.*`) becomes "other", so that its share is still reported as unattributed.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise BadInput(path, f"cannot be read as JSON ({error})", "give a gputrc2graph rule file") from None
    models = {
        f"{engine}/{model}": rules
        for engine, by_model in (table.items() if isinstance(table, dict) else ())
        if isinstance(by_model, dict)
        for model, rules in by_model.items()
        if isinstance(rules, dict)
    }
    if not models:
        raise BadInput(path, "has no engine -> model -> regex -> category table", "see vLLM's nsys_profile_tools")
    if not chosen and len(models) > 1:
        raise BadInput(path, f"has {len(models)} models ({', '.join(models)})", f"choose one: {path.name}#engine/model")
    key = chosen or next(iter(models))
    if key not in models:
        raise BadInput(path, f'has no "{key}"', nearest(key, models))
    mapping = models[key]
    if "layer_anno" in mapping:
        mapping = mapping["layer_anno"].get("Substage", {})
    rules = []
    for regex, name in mapping.items():
        if not isinstance(name, str):
            raise BadInput(path, f"{key}: {regex!r} maps to {name!r}", "a category is a string")
        category = OTHER if regex == ".*" else name
        rules.append(Rule(category, _pattern(regex, path, key), f"{path.name} {key}"))
    names = dict.fromkeys(rule.category for rule in rules if rule.category != OTHER)
    return Rules(tuple(rules), {name: Category() for name in names}, f"{path.name}#{key}")


def _pattern(text: str, path: Path, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise BadInput(path, f"{where}: {text!r} is not a regular expression ({error})", "mend it") from None
