"""From a kernel's full name to its category, by ordered rules; and time by category.

The rules are data (data/categories/*.toml), because they change with every release of an engine. The first match wins,
so the specific rule stands first: CUTLASS calls attention `device_kernel<...>` like a GEMM. Each rule carries real
names as examples, which a test holds to their category under the whole list.

The demangled name decides, never the short one: `elementwise_kernel` is a copy, a GEMM or a cast, depending on a
functor four templates deep. A name without a rule is "other", which is always shown and warned about above OTHER_LIMIT.
A user's rules stand before ours.
Given up: rules on anything but the name (grid, stream, position in a step), so an LM head stays a dense GEMM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.base import files
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.trace.model import Total, short_name

FOLDER = REPOSITORY / "data" / "categories"
OTHER = "other"
IDLE = "idle"
OTHER_LIMIT, SHOWN = 0.05, 5  # of the total, above which a breakdown warns; how many names the warning has
NO_WORK = ("contamination", "gpu_idle")  # recorded names of time that is no work, beside our own busy = false


class Category(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A category. busy: False for time on the GPU that is no work; also: names that recorded tables use for it."""

    meaning: str = ""
    busy: bool = True
    also: tuple[str, ...] = ()


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names in which `match` is found (re.search, case-sensitive) get `category`. examples: real names that do."""

    category: str
    match: str
    examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"{self.match!r} is not a regular expression ({error}); mend it") from None


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of data/categories."""

    category: dict[str, Category] = {}
    rule: list[Rule] = []


@dataclass(frozen=True)
class Rules:
    """An ordered list of rules with the meaning of their categories."""

    rules: tuple[Rule, ...]
    categories: Mapping[str, Category]
    _known: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def category(self, name: str) -> str:
        """The category of a kernel's full name; "other" when no rule knows it."""
        found = self._known.get(name)
        if found is None:
            found = next((r.category for r in self.rules if re.search(r.match, name)), OTHER)
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


def other_warning(
    rules: Rules, totals: Sequence[Total], whole_ns: int, scale: float = 1e3, unit: str = "us"
) -> list[str]:
    """What "other" holds, when over OTHER_LIMIT of the whole. totals: largest first; scale: ns per printed `unit`."""
    rest = [t for t in totals if t.kind == "kernel" and rules.category(t.name) == OTHER]
    sum_ns = sum(t.sum_ns for t in rest)
    if sum_ns <= OTHER_LIMIT * whole_ns:
        return []
    names = ", ".join(f"{short_name(t.name)[:60]} {t.sum_ns / scale:,.4g} {unit}" for t in rest[:SHOWN])
    more = f" and {len(rest) - SHOWN} more" if len(rest) > SHOWN else ""
    share = f"{sum_ns / whole_ns:.1%} of the total (limit {OTHER_LIMIT:.0%})"
    return [f'"other" is {share}: {names}{more}; add a rule for them']


def sums(rules: Rules, totals: Iterable[Total]) -> list[Total]:
    """Kernels by category; copies by direction, fills and opaque graphs as they are."""
    found: dict[tuple[str, str], Total] = {}
    for t in totals:
        if t.kind == "kernel":
            name = rules.category(t.name)
            t = replace(t, name=name, kind="kernel" if rules.busy(name) else "wait")
        before = found.get((t.kind, t.name))
        found[t.kind, t.name] = before.plus(t) if before else t
    return list(found.values())


@cache
def default() -> Rules:
    """The rules of data/categories, files in the order of their names."""
    return _read(FOLDER, None)


def load(where: str | Path | None = None, only: bool = False) -> Rules:
    """The rules of a folder or a .toml of this format, before ours, or alone with `only`; None for ours.

    Raises BadInput for a missing file, a malformed one, an unknown key, and a category that neither declares.
    """
    if where is None or Path(where) == FOLDER:
        return default()
    path, ours = Path(where), None if only else default()
    if not path.is_dir() and path.suffix != ".toml":
        raise BadInput(path, "is no file of category rules", "give a .toml or a folder of them")
    return _read(path, ours)


def _read(path: Path, ours: Rules | None) -> Rules:
    categories: dict[str, Category] = {}
    rules: list[tuple[Path, int, Rule]] = []
    for part in sorted(path.glob("*.toml")) if path.is_dir() else [path]:
        file = files.read(part, File)
        for name in file.category.keys() & categories.keys():
            raise BadInput(part, f'category "{name}" is declared twice', "keep one of them")
        categories |= file.category
        rules += [(part, i, rule) for i, rule in enumerate(file.rule)]
    if not rules:
        raise BadInput(path, "holds no category rules", "write [[rule]] with category and match")
    known = {**(ours.categories if ours else {}), **categories}
    for part, i, rule in rules if categories else ():
        if rule.category not in known:
            what = f'rule[{i}]: category "{rule.category}" is not declared'
            raise BadInput(part, what, nearest(rule.category, known))
    every = tuple(rule for _, _, rule in rules)
    known = {rule.category: Category() for rule in every} | known
    return Rules(every + (ours.rules if ours else ()), known)
