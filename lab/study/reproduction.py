"""What the sources computed before they measured, computed again from their own inputs.

data/roofline_cases.toml names a formula of lab/place/roofline.py and, for each argument, where its number stands: a
recorded figure, a device, a model, or a value with its source. `reproduce` evaluates them, and the table it returns is
what the notebook, the command line and the tests show; no number of a source stands here. A case declares whether it
expects to agree, so a figure that does not follow from its source's inputs is a finding on record and not a failing
assertion that somebody loosens. Agreement means equal at the digits the source prints: a tolerance in percent would
hide that a figure printed to four digits came from other inputs.

Where a device or model fact has contradicting values, each row also says what the others would have given. `checks`
asks of a recorded time whether it is possible at all: needing more bandwidth than the device has is a finding too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.base import devices, models, vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.base.facts import Fact, from_base, only, text, to_base
from lab.card import recorded
from lab.place import roofline

FILE = REPOSITORY / "data" / "roofline_cases.toml"

# The functions of lab/place/roofline.py that a case may name: numbers in base units in, one number in base units out.
FORMULAS: Mapping[str, Callable[..., float]] = {
    f.__name__: f
    for f in (
        roofline.weight_read_floor,
        roofline.decode_floor,
        roofline.floor_over_peer,
        roofline.crossover_m,
        roofline.efficiency,
        roofline.ratio,
        roofline.part_of,
        roofline.saving_ceiling,
        roofline.part_saving_ceiling,
        roofline.ceiling_rate,
        roofline.attention_share,
        roofline.kv_saving_ceiling,
        roofline.kv_bytes_per_token,
        roofline.kv_read_share,
        roofline.bandwidth_share,
        roofline.decode_bandwidth_share,
        roofline.gdn_state_bytes,
    )
}


@dataclass(frozen=True)
class Alternative:
    """What a row would say with a contradicting value of one input: `label` names it, `value` is in the row's unit."""

    label: str
    value: float


@dataclass(frozen=True)
class Reproduction:
    """One recorded figure, computed again.

    recorded, recorded_high: the source's value, and its upper end where it states a range; ours: the formula's value;
                             all in `unit`.
    difference_pct:          ours against the recorded value (the nearer end of a range, 0 inside it).
    agrees:                  ours rounds to the recorded value at the digits the source prints, or lies in its range.
    expected:                what the case declares, "agrees" or "differs"; a test holds the two together.
    assumption:              what makes it agree, or why it differs; inputs: each argument with its source.
    alternatives:            the result with each contradicting value of an input.
    """

    id: str
    name: str
    recorded_id: str
    recorded: float
    recorded_high: float
    unit: str
    ours: float
    difference_pct: float
    agrees: bool
    expected: str
    assumption: str
    formula: str
    inputs: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class Check:
    """Whether a recorded time is possible: the share of the device's bandwidth it takes, in %.

    above: it takes more than `limit_pct` of it; expected: what the case declares, "above" or "below".
    """

    id: str
    name: str
    share_pct: float
    limit_pct: float
    above: bool
    expected: str
    assumption: str
    inputs: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class _Input:
    """An argument: its value in base units, in words, and what a contradicting source would make of it."""

    base: float
    shown: str
    others: tuple[tuple[str, float], ...] = ()


_FORMS = (
    {"figure"}, {"figure", "param"}, {"device", "fact"}, {"model", "fact"}, {"value", "unit", "source"},
    {"formula", "arguments"},
)  # fmt: skip


def _of_fact(fact: Fact) -> _Input:
    others = tuple((f"{fact.key} = {v.value:g} {fact.unit}", to_base(v.value, fact.unit)) for v in fact.others)
    return _Input(fact.base, f"{fact.key} = {fact.value:g} {fact.unit} ({fact.source})", others)


def _input(ref: Any, where: Path, key: str) -> _Input:
    """One argument from its table; a list is the sum of its parts, a nested formula its value."""
    if isinstance(ref, list) and ref:
        parts = [_input(r, where, key) for r in ref]
        total = sum(p.base for p in parts)
        others = tuple((label, total - p.base + base) for p in parts for label, base in p.others)
        return _Input(total, " + ".join(p.shown for p in parts), others)
    if not isinstance(ref, dict) or set(ref) not in _FORMS:
        forms = "; ".join(" + ".join(sorted(f)) for f in _FORMS)
        raise BadInput(where, f"{key} = {ref!r} names no number", f"give one of: {forms}")
    for word in ref.keys() - {"value", "arguments"}:
        text(ref, word, where, key)
    if "figure" in ref:
        figure = recorded.figure(ref["figure"], where)
        value = figure.params.get(ref["param"]) if "param" in ref else figure.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadInput(where, f'{key}: "{figure.id}" gives {value!r}, no number', "name a figure that has one")
        unit = "ratio" if "param" in ref else figure.unit
        return _Input(to_base(value, unit, where), f"{value:g}{'' if 'param' in ref else ' ' + unit} ({figure.id})")
    if "device" in ref:
        return _of_fact(devices.get(ref["device"], where).fact(ref["fact"]))
    if "model" in ref:
        return _of_fact(models.get(ref["model"], where).fact(ref["fact"]))
    if "formula" in ref:
        base, inputs, changed = _evaluate(ref, where, key)
        return _Input(base, f"{ref['formula']}({', '.join(inputs)})", tuple(changed))
    value = ref["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(where, f"{key}: value = {value!r} is no number", "give the number alone")
    return _Input(to_base(value, ref["unit"], where), f"{value:g} {ref['unit']} ({ref['source']})")


def _evaluate(case: Mapping[str, Any], where: Path, key: str) -> tuple[float, list[str], list[tuple[str, float]]]:
    """A formula's value in base units, its inputs in words, and its value under each contradicting input."""
    name, given = str(case.get("formula")), case.get("arguments", {})
    if name not in FORMULAS:
        raise BadInput(where, f'{key}: formula = "{name}" is unknown', nearest(name, FORMULAS))
    if not isinstance(given, dict):
        raise BadInput(where, f"{key}: arguments = {given!r} is not a table", "write argument = { ... } for each")
    needed = tuple(inspect.signature(FORMULAS[name]).parameters)
    only(given, needed, where, f"{key}.arguments")
    missing = [p for p in needed if p not in given]
    if missing:
        raise BadInput(where, f"{key}: {name} needs {missing[0]}", f"add {missing[0]} to its arguments")
    inputs = {p: _input(given[p], where, f"{key}.{p}") for p in needed}
    values = {p: i.base for p, i in inputs.items()}
    shown = [f"{p} = {i.shown}" for p, i in inputs.items()]
    try:
        changed = [(label, {**values, p: base}) for p, i in inputs.items() for label, base in i.others]
        others = [(label, FORMULAS[name](**given_then)) for label, given_then in changed]
        return FORMULAS[name](**values), shown, others
    except (ZeroDivisionError, OverflowError) as error:
        raise BadInput(where, f"{key}: {name}({', '.join(shown)}) is no number ({error})", "mend its inputs") from None


def _cases(path: Path, table: str, keys: tuple[str, ...], outcomes: tuple[str, str]) -> list[dict[str, Any]]:
    file = vocabulary.read_toml(path)
    only(file, ("case", "check"), path, "file")
    seen: set[str] = set()
    cases = file.get(table, [])
    for number, case in enumerate(cases if isinstance(cases, list) else [cases], start=1):
        key = f"{table} {number}"
        if not isinstance(cases, list) or not isinstance(case, dict):
            raise BadInput(path, f"{key} = {case!r} is not a table", f"write [[{table}]] above its keys")
        only(case, ("id", "name", "formula", "arguments", "assumption", "expected", *keys), path, key)
        for name in ("id", "name", "formula", "assumption", "expected"):
            text(case, name, path, key)
        if case["expected"] not in outcomes:
            raise BadInput(path, f'{case["id"]}: expected = "{case["expected"]}" is unknown', f"valid: {outcomes}")
        if case["id"] in seen:
            raise BadInput(path, f'id "{case["id"]}" appears twice', "give the second one its own id")
        seen.add(case["id"])
    return cases


def reproduce(path: Path = FILE) -> list[Reproduction]:
    """Every recorded figure that the cases compute again, in the order of the file.

    Raises BadInput, naming the file and the case, for an unknown key, formula, argument, figure, device or model.
    """
    rows = []
    for case in _cases(path, "case", ("recorded", "recorded_high", "decimals"), ("agrees", "differs")):
        figure = recorded.figure(text(case, "recorded", path, case["id"]), path)
        high = (
            recorded.figure(text(case, "recorded_high", path, case["id"]), path) if "recorded_high" in case else figure
        )
        if not isinstance(figure.value, float) or not isinstance(high.value, float) or high.unit != figure.unit:
            what = f"{case['id']}: {figure.id} is not a number, or a range of two units"
            raise BadInput(path, what, "name a figure with a number")
        base, inputs, others = _evaluate(case, path, case["id"])
        ours = from_base(base, figure.unit, path)
        decimals = case.get("decimals", 0)
        if isinstance(decimals, bool) or not isinstance(decimals, int):
            raise BadInput(
                path, f"{case['id']}: decimals = {decimals!r} is no whole number", "count the digits printed"
            )
        nearest_end = min(max(ours, figure.value), high.value)
        within = high is not figure and nearest_end == ours
        rows.append(
            Reproduction(
                id=case["id"],
                name=case["name"],
                recorded_id=figure.id,
                recorded=figure.value,
                recorded_high=high.value,
                unit=figure.unit,
                ours=ours,
                difference_pct=(ours / nearest_end - 1) * 100,
                agrees=within or round(ours, decimals) == figure.value,
                expected=case["expected"],
                assumption=case["assumption"],
                formula=case["formula"],
                inputs=tuple(inputs),
                alternatives=tuple(Alternative(label, from_base(v, figure.unit, path)) for label, v in others),
            )
        )
    return rows


def checks(path: Path = FILE) -> list[Check]:
    """Every recorded time asked whether the device's bandwidth allows it, in the order of the file; errors as above."""
    rows = []
    for case in _cases(path, "check", ("limit_pct",), ("above", "below")):
        base, inputs, others = _evaluate(case, path, case["id"])
        limit = case.get("limit_pct", 100)
        if isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0:
            raise BadInput(path, f"{case['id']}: limit_pct = {limit!r} is no share", "give a positive number")
        rows.append(
            Check(
                id=case["id"],
                name=case["name"],
                share_pct=base * 100,
                limit_pct=limit,
                above=base * 100 > limit,
                expected=case["expected"],
                assumption=case["assumption"],
                inputs=tuple(inputs),
                alternatives=tuple(Alternative(label, v * 100) for label, v in others),
            )
        )
    return rows


def render(rows: list[Reproduction], impossible: list[Check] | None = None) -> str:
    """The table as text: recorded, ours, difference, whether it agrees, what explains it; then the checks, if given."""
    lines = [f"{'figure':56} {'recorded':>10} {'ours':>9} {'unit':8} {'diff':>8}"]
    for r in rows:
        stated = f"{r.recorded:g}" + (f" to {r.recorded_high:g}" if r.recorded_high != r.recorded else "")
        word = "" if r.agrees else "  does not follow"
        lines.append(f"{r.name:56} {stated:>10} {r.ours:>9.5g} {r.unit:8} {r.difference_pct:>+7.2f}%{word}")
        lines.append(f"    {r.recorded_id}: {r.assumption}")
        lines += [f"    with {a.label}: {a.value:.4g} {r.unit}" for a in r.alternatives]
    for c in impossible or []:
        word = "  more than there is" if c.above else ""
        lines.append(f"{c.name:76} {c.share_pct:>6.1f} % of the bandwidth{word}")
        lines.append(f"    {c.assumption}")
        lines += [f"    with {a.label}: {a.value:.1f} %" for a in c.alternatives]
    return "\n".join(lines)
