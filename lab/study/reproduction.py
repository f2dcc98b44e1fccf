"""What the sources computed before they measured, computed again from their own inputs.

data/roofline_cases.toml names a formula of lab/place/roofline.py and, for each argument, where its number stands: a
recorded figure, a device, a model, or a value with its source. A case declares whether it
expects to agree, so a figure that does not follow from its source's inputs is a finding on record and not a failing
assertion that somebody loosens. Agreement means equal at the digits the source prints: a tolerance in percent would
hide that a figure printed to four digits came from other inputs. A case with a limit asks of a recorded time whether it
is possible at all: needing more bandwidth than the device has is a finding too.

Where a device or model fact has contradicting values, each row also says what the others would have given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from lab.base import devices, files, models
from lab.base.errors import REPOSITORY, BadInput, refuse_unknown, shown
from lab.base.facts import from_base, to_base
from lab.base.files import Positive, Text
from lab.card import recorded
from lab.place import roofline

FILE = REPOSITORY / "data" / "roofline_cases.toml"
FORMS = (
    *({"figure"}, {"figure", "param"}, {"device", "fact"}, {"model", "fact"}, {"value", "unit", "source"}),
    {"formula", "arguments"},
)


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the number of an argument stands, in one of FORMS."""

    figure: Text | None = None
    param: Text | None = None
    device: Text | None = None
    model: Text | None = None
    fact: Text | None = None
    value: float | None = None
    unit: Text | None = None
    source: Text | None = None
    formula: Text | None = None
    arguments: dict[str, Argument | list[Argument]] | None = None

    def __post_init__(self) -> None:
        if {name for name in self.__struct_fields__ if getattr(self, name) is not None} not in FORMS:
            raise ValueError(f"names no number; give one of: {'; '.join(' + '.join(sorted(f)) for f in FORMS)}")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed again, by which formula, and whether that is expected to give what the source printed."""

    id: Text
    name: Text
    formula: Text
    expected: Literal["agrees", "differs"]

    def about(self) -> dict[str, Any]:
        """These fields, for what comes of it."""
        return {key: getattr(self, key) for key in Asked.__struct_fields__}


class Case(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A figure to compute again, or with `limit_pct` a recorded time to ask for the share of the device that it takes.

    arguments: a list is the sum of its parts. decimals: digits after the point that the source prints, negative: before
    it. expected: "differs" where the figure does not follow from its inputs, or the time needs more than the limit.
    """

    assumption: Text
    arguments: dict[str, Argument | list[Argument]] = {}
    recorded: Text | None = None
    recorded_high: Text | None = None
    decimals: int = 0
    limit_pct: Positive | None = None

    def __post_init__(self) -> None:
        if (self.recorded is None) == (self.limit_pct is None):
            raise ValueError("needs recorded or limit_pct; give exactly one of them")


class Cases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """data/roofline_cases.toml."""

    case: tuple[Case, ...] = ()


# The functions of lab/place/roofline.py that a case may name: numbers in base units in, one number in base units out.
FORMULAS: Mapping[str, Callable[..., float]] = {f.__name__: f for f in (
    roofline.weight_read_floor, roofline.decode_floor, roofline.floor_over_peer, roofline.crossover_m,
    roofline.efficiency, roofline.ratio, roofline.part_of, roofline.part_saving_ceiling, roofline.ceiling_rate,
    roofline.kv_saving_ceiling, roofline.kv_read_share, roofline.bandwidth_share, roofline.decode_bandwidth_share,
    roofline.gdn_state_bytes,
)}  # fmt: skip


class Reproduction(Asked, frozen=True, kw_only=True):
    """One recorded figure, computed again; or a recorded time, as a share in % held to a limit.

    recorded_id:   the figure, "" where `recorded` is a limit.
    recorded, recorded_high: the source's value, and its upper end where it states a range; ours: the formula's value;
                   all in `unit`.
    difference_pct: ours against the recorded value (the nearer end of a range, 0 inside it).
    agrees:        ours rounds to the recorded value at the digits the source prints, or lies in its range or limit.
    assumption:    what makes it agree, or why it differs; inputs: each argument with its source.
    alternatives:  the result with each contradicting value of an input: (which, value in `unit`).
    """

    recorded_id: str
    recorded: float
    recorded_high: float
    unit: str
    ours: float
    difference_pct: float
    agrees: bool
    assumption: str
    inputs: tuple[str, ...]
    alternatives: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class _Input:
    """A number in base units, what it is in words, and what it would be with each contradicting value of a fact."""

    base: float
    shown: str
    others: tuple[tuple[str, float], ...] = ()


def _input(ref: Argument | list[Argument], where: str) -> _Input:
    """One argument; a list is the sum of its parts, a nested formula its value."""
    if isinstance(ref, list):
        parts = [_input(r, where) for r in ref]
        total = sum(p.base for p in parts)
        others = tuple((label, total - p.base + base) for p in parts for label, base in p.others)
        return _Input(total, " + ".join(p.shown for p in parts), others)
    if ref.param:
        figure = recorded.figure(ref.figure or "", where)
        value = figure.params.get(ref.param)
        if isinstance(value, bool) or not isinstance(value, int | float):
            what = f'{ref.param} of "{figure.id}" gives {value!r}, no number'
            raise BadInput(where, what, "name a parameter that is one")
        return _Input(value, f"{value:g} ({figure.id})")
    if ref.figure:
        figure = recorded.number(where, ref.figure)
        base = to_base(float(figure.value), figure.unit, where)
        return _Input(base, f"{figure.value:g} {figure.unit} ({figure.id})")
    if ref.fact:
        owner = devices.get(ref.device, where) if ref.device else models.get(ref.model or "", where)
        fact = owner.fact(ref.fact)
        others = tuple((f"{fact.key} = {v.value:g} {fact.unit}", to_base(v.value, fact.unit)) for v in fact.others)
        return _Input(fact.base, f"{fact.key} = {fact.value:g} {fact.unit} ({fact.source})", others)
    if ref.formula:
        base, inputs, others = _evaluate(ref.formula, ref.arguments or {}, where)
        return _Input(base, f"{ref.formula}({', '.join(inputs)})", others)
    value, unit = ref.value or 0.0, ref.unit or ""
    return _Input(to_base(value, unit, where), f"{value:g} {unit} ({ref.source})")


def callable_with(
    formulas: Mapping[str, Callable[..., Any]], name: str, given: Iterable[str], where: str
) -> Callable[..., Any]:
    """The formula of this name, which takes these arguments; raises BadInput for what is unknown or missing."""
    refuse_unknown(where, "formula", name, formulas)
    takes = inspect.signature(formulas[name]).parameters
    for word in given:
        refuse_unknown(where, f"argument of {name}", word, takes)
    for word, parameter in takes.items():
        if word not in given and parameter.default is parameter.empty:
            raise BadInput(where, f"{name} needs {word}", f"add {word} to its arguments")
    return formulas[name]


def _evaluate(
    name: str, given: Mapping[str, Argument | list[Argument]], where: str
) -> tuple[float, tuple[str, ...], tuple[tuple[str, float], ...]]:
    """A formula's value in base units, its inputs in words, and its value under each contradicting input."""
    formula = callable_with(FORMULAS, name, given, where)
    inputs = {p: _input(given[p], f"{where}.{p}") for p in inspect.signature(formula).parameters}
    values = {p: i.base for p, i in inputs.items()}
    shown = tuple(f"{p} = {i.shown}" for p, i in inputs.items())
    try:
        changed = [(label, {**values, p: base}) for p, i in inputs.items() for label, base in i.others]
        return formula(**values), shown, tuple((label, formula(**given_then)) for label, given_then in changed)
    except (ZeroDivisionError, OverflowError) as error:
        raise BadInput(where, f"{name}({', '.join(shown)}) is no number ({error})", "mend its inputs") from None


def reproduce(path: Path = FILE) -> list[Reproduction]:
    """Every figure that the cases compute again, in the file's order; BadInput names the file and the case."""
    cases = files.read(path, Cases).case
    files.once(path, "id", (case.id for case in cases))
    return [_reproduced(case, path) for case in cases]


def _reproduced(case: Case, path: Path) -> Reproduction:
    where = f"{shown(path)}: {case.id}"
    base, inputs, others = _evaluate(case.formula, case.arguments, where)
    if case.recorded is None:
        unit, low, high = "%", 0.0, case.limit_pct or 0.0
    else:
        figure = recorded.number(where, case.recorded)
        unit, low = figure.unit, float(figure.value)
        high = float(recorded.number(where, case.recorded_high).value) if case.recorded_high else low
    ours = from_base(base, unit, path)
    nearest_end = min(max(ours, low), high)
    return Reproduction(
        **case.about(),
        recorded_id=case.recorded or "",
        recorded=low if case.recorded else high,
        recorded_high=high,
        unit=unit,
        ours=ours,
        difference_pct=(ours / (nearest_end or high) - 1) * 100,
        agrees=nearest_end == ours or (case.recorded is not None and round(ours, case.decimals) == low),
        assumption=case.assumption,
        inputs=inputs,
        alternatives=tuple((label, from_base(v, unit, path)) for label, v in others),
    )


def render(rows: list[Reproduction]) -> str:
    """The table as text: recorded, ours, difference, whether it agrees, and what explains it."""
    lines = [f"{'figure':56} {'recorded':>10} {'ours':>9} {'unit':8} {'diff':>8}"]
    for r in rows:
        stated = f"{r.recorded:g}" + (f" to {r.recorded_high:g}" if r.recorded_high != r.recorded else "")
        word = "" if r.agrees else "  does not follow" if r.recorded_id else "  more than there is"
        stated = stated if r.recorded_id else f"limit {stated}"
        lines.append(f"{r.name:56} {stated:>10} {r.ours:>9.5g} {r.unit:8} {r.difference_pct:>+7.2f}%{word}")
        lines.append(f"    {r.recorded_id}: {r.assumption}".replace("    : ", "    "))
        lines += [f"    with {label}: {value:.4g} {r.unit}" for label, value in r.alternatives]
    return "\n".join(lines)
