"""Phase cards (data/phases/<system>/*.toml): one falsifiable question each, its gate declared before anyone measured.

A card says what is asked, what is expected if the idea fails, the gate, and which recorded figures or measured rows
the gate reads. Everything in it is data and is checked on loading: an unknown key, metric, unit, row or id is refused
in one line that names the file, the key and the nearest valid word.

The recorded verdict's word is never typed into a card; a card names the verdict's id and the word is looked up. Where
our judge differs from the source, the card must carry one sentence saying why, and where it agrees it must not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lab.base import vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.card import recorded
from lab.card.gate import COMPARISONS, ERRORS, OPERATORS, ROLES, Condition, Evidence, Gate, Noise, Reading, arrival_of

FOLDER = REPOSITORY / "data" / "phases"
NOT_STATED = "criterion not stated in the source"
DECLARED_HERE = "declared in this card"

CARD_KEYS = {"id", "row", "system", "device", "title", "question", "hypothesis", "null", "family", "control"}
CARD_KEYS |= {"candidate", "workloads", "gate", "claim", "expected", "recorded", "limits", "beside"}
REQUIRED_KEYS = CARD_KEYS - {"family", "claim", "recorded", "beside"}
GATE_KEYS = {"source", "noise", "modelled", "arrival", *ROLES}
CLAIM_KEYS = {"name", "noise", "arrival", *ROLES}
CONDITION_KEYS = {"metric", "op", "threshold", "unit", "compare", "workload", "than", "from", "arrival", "share"}
CONDITION_KEYS |= {"against", "output"}
WEIGHED = ("kill", "require")  # the roles that the arrivals of a gate apply to; the others ask what ran, not how fast
RECORDED_KEYS = {"verdict", "figure", "differs"}
# The figures of a reading, in the order in which its ids stand: a set's order would differ from process to process.
FIGURES = ("value", "change", "control", "control_sd", "control_launches", "noise", "candidate", "candidate_launches")
FIGURE_KEYS = {"metric", "workload", *FIGURES}
EXPECTED_KEYS = {"recovery", "arithmetic"}
# What a key's value must be, where it is not text.
NUMBER = int | float
TYPES: dict[str, Any] = {"gate": dict, "expected": dict, "modelled": bool, "workloads": list, "claim": list}
TYPES["beside"] = list
TYPES |= {"recorded": list, "figure": list, "threshold": NUMBER, "share": NUMBER, "floor_pct": NUMBER, "sigmas": NUMBER}
TYPES |= dict.fromkeys(ROLES, list)
TYPE_NAMES = {str: "text", dict: "a table", list: "a list", bool: "true or false", NUMBER: "a finite number"}
KINDS = ("threshold", "floor", "ceiling", "predicted", "modelled", "measured")  # weakest first


@dataclass(frozen=True)
class Claim:
    """A further statement of the source, judged by itself beside the phase's verdict (P1's prefill gain, P2's KL)."""

    name: str
    gate: Gate


@dataclass(frozen=True)
class RecordedCase:
    """One recorded verdict of a phase: its id, the figures it stood on, and why ours differs ("" where it agrees)."""

    verdict: recorded.RecordedVerdict
    evidence: Evidence
    figures: tuple[str, ...]
    differs: str


@dataclass(frozen=True)
class Card:
    """A phase card. `family` is "" for a question that can only be replayed so far.

    beside: further candidates of the family, timed in the same comparison and judged by nobody (for a router's table).
    """

    id: str
    row: str
    system: str
    device: str
    title: str
    question: str
    hypothesis: str
    null: str
    family: str
    control: str
    candidate: str
    workloads: tuple[str, ...]
    gate: Gate
    gate_source: str
    claims: tuple[Claim, ...]
    expected: Mapping[str, str]
    recorded: tuple[RecordedCase, ...]
    limits: str
    path: Path
    beside: tuple[str, ...] = ()

    @property
    def card_hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the card file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:12]

    @property
    def gate_hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the gate and the claims alone, however the file is laid out."""
        return gate_hash(vocabulary.read_toml(self.path))


def gate_hash(card: Mapping[str, Any]) -> str:
    """Hash of what is judged in a parsed card (gate, claims, workloads, arms), independent of prose and layout."""
    judged = {key: card.get(key) for key in ("gate", "claim", "workloads")}
    if card.get("family"):  # then the arms are names of code, elsewhere they are prose
        judged |= {key: card.get(key) for key in ("family", "control", "candidate")}
    return hashlib.sha256(json.dumps(judged, sort_keys=True).encode()).hexdigest()[:12]


@cache
def cards() -> Mapping[str, Card]:
    """Every card by id, in the order of the rows."""
    loaded = [load(path) for path in sorted(FOLDER.rglob("*.toml"), key=lambda path: path.name)]
    order = list(vocabulary.row_ids())
    loaded.sort(key=lambda card: (order.index(card.row), card.id))
    return {card.id: card for card in loaded}


def card(card_id: str) -> Card:
    """The card with this id; raises BadInput naming the nearest."""
    if card_id not in cards():
        raise BadInput(FOLDER, f'no card has the id "{card_id}"', nearest(card_id, cards()))
    return cards()[card_id]


def load(path: Path) -> Card:
    """Read and check one card; raises BadInput in one line for anything that is not as a card must be."""
    raw = vocabulary.read_toml(path)
    _keys(path, "", raw, CARD_KEYS, REQUIRED_KEYS)
    if raw["id"] != path.stem:
        raise BadInput(path, f'id = "{raw["id"]}" differs from the file name', f'write id = "{path.stem}"')
    for key, known in (("row", vocabulary.row_ids()), ("system", vocabulary.systems())):
        if raw[key] not in known:
            raise BadInput(path, f'{key} = "{raw[key]}" is unknown', nearest(raw[key], known))
    workloads = _names(path, raw, "workloads")
    _keys(path, "gate", raw["gate"], GATE_KEYS, {"source", "require"})
    _keys(path, "expected", raw["expected"], EXPECTED_KEYS, EXPECTED_KEYS)
    source = raw["gate"]["source"]
    if source not in (NOT_STATED, DECLARED_HERE):
        recorded.verdict(source, path)
    claims = []
    for entry in raw.get("claim", ()):
        _keys(path, "claim", entry, CLAIM_KEYS, {"name", "require"})
        claims.append(Claim(entry["name"], _gate(path, f"claim {entry['name']}", entry, workloads)))
    return Card(
        **{k: raw.get(k, "") for k in ("id", "row", "system", "device", "title", "question", "hypothesis", "null")},
        **{k: raw.get(k, "") for k in ("family", "control", "candidate", "limits")},
        workloads=workloads,
        gate=_gate(path, "gate", raw["gate"], workloads),
        gate_source=source,
        claims=tuple(claims),
        expected=raw["expected"],
        recorded=tuple(_recorded(path, entry, workloads) for entry in raw.get("recorded", ())),
        path=path,
        beside=_names(path, raw, "beside"),
    )


def _names(path: Path, raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    words = tuple(raw.get(key, ()))
    for word in words:
        if not isinstance(word, str) or not word:
            raise BadInput(path, f"{key} has {word!r}, which is no name", "put it in quotes")
    if len(set(words)) != len(words):
        raise BadInput(path, f"{key} has the same word twice", "name each once")
    return words


def _keys(path: Path, where: str, table: Any, allowed: set[str], required: Iterable[str]) -> None:
    prefix = f"[{where}] " if where else ""
    if not isinstance(table, dict):
        raise BadInput(path, f"{prefix}is not a table", "write it as [table] or [[table]]")
    for key in table:
        if key not in allowed:
            raise BadInput(path, f'{prefix}unknown key "{key}" = {table[key]!r:.60}', nearest(key, allowed))
        kind = dict if key == "noise" and "figure" not in where else TYPES.get(key, str)
        # bool is an int to Python, never a number to a card.
        if not isinstance(table[key], kind) or (isinstance(table[key], bool) and kind is not bool):
            raise BadInput(path, f"{prefix}{key} = {table[key]!r:.60} is not {TYPE_NAMES[kind]}", "write it as one")
    for key in sorted(required):
        if key not in table:
            raise BadInput(path, f'{prefix}key "{key}" is missing', "a card without it cannot be judged")


def _metric(path: Path, where: str, name: Any) -> vocabulary.Metric:
    if name not in vocabulary.metrics():
        raise BadInput(path, f'[{where}] metric = "{name}" is unknown', nearest(str(name), vocabulary.metrics()))
    return vocabulary.metrics()[name]


def _workload(
    path: Path, where: str, table: Mapping[str, Any], workloads: tuple[str, ...], key: str = "workload"
) -> str:
    name = table.get(key, "")
    if name and name not in workloads:
        raise BadInput(path, f'[{where}] {key} = "{name}" is not in workloads', nearest(name, workloads))
    return str(name)


def _gate(path: Path, where: str, table: Mapping[str, Any], workloads: tuple[str, ...]) -> Gate:
    lists = {}
    arrival = _arrival(path, where, table)
    for role in ROLES:
        asked = arrival if role in WEIGHED else ""
        conditions = [_condition(path, f"{where}.{role}", entry, workloads, asked) for entry in table.get(role, ())]
        lists[role] = tuple(conditions)
    if not lists["require"]:
        raise BadInput(path, f"[{where}] require is empty", "declare at least one required condition")
    noise = table.get("noise", {})
    _keys(path, f"{where}.noise", noise, {"floor_pct", "sigmas"}, ())
    for key, number in noise.items():
        if not math.isfinite(number) or number < 0:
            raise BadInput(path, f"[{where}.noise] {key} = {number} is not finite and positive", "write a number")
    return Gate(**lists, noise=Noise(**noise), modelled=bool(table.get("modelled", False)))


def _arrival(path: Path, where: str, table: Mapping[str, Any]) -> str:
    word = table.get("arrival", "")
    if word and word not in vocabulary.arrivals():
        raise BadInput(path, f'[{where}] arrival = "{word}" is unknown', nearest(word, vocabulary.arrivals()))
    return str(word)


def _condition(path: Path, where: str, entry: Any, workloads: tuple[str, ...], arrival: str = "") -> Condition:
    _keys(path, where, entry, CONDITION_KEYS, {"metric", "op", "unit"})
    metric = _metric(path, where, entry["metric"])
    compare = entry.get("compare", "value")
    if compare not in COMPARISONS:
        raise BadInput(path, f'[{where}] compare = "{compare}" is unknown', nearest(compare, COMPARISONS))
    if entry["op"] not in OPERATORS:
        raise BadInput(path, f'[{where}] op = "{entry["op"]}" is unknown', "valid: " + " ".join(OPERATORS))
    if compare == "change" and entry["op"] == "==":
        raise BadInput(path, f'[{where}] op = "==" for the change of {metric.name}', "a change needs a direction")
    unit = vocabulary.known_unit(entry["unit"], path)
    wanted = "%" if compare == "change" else metric.unit
    if unit != wanted:
        raise BadInput(
            path, f'[{where}] unit = "{unit}" for the {compare} of {metric.name}', f'write unit = "{wanted}"'
        )
    if ("threshold" in entry) == ("than" in entry):
        raise BadInput(path, f"[{where}] {metric.name} needs threshold or than", "give exactly one of them")
    if "than" in entry:
        _metric(path, where, entry["than"])
    threshold = entry.get("threshold", math.nan)
    if "threshold" in entry and not math.isfinite(threshold):
        raise BadInput(path, f"[{where}] threshold = {threshold!r} is not a finite number", "write a number")
    share = entry.get("share", 1.0)
    if not 0 < share <= 1 or ("share" in entry and compare != "change"):
        what = f"[{where}] share = {share} for the {compare} of {metric.name}"
        raise BadInput(path, what, "give a share of the timed region above 0 and up to 1, with a change")
    against = _workload(path, where, entry, workloads, "against")
    if against and (compare != "change" or against == entry.get("workload", "")):
        what = f'[{where}] against = "{against}" for the {compare} of {metric.name} at "{entry.get("workload", "")}"'
        raise BadInput(path, what, "name another workload, with a change")
    if entry.get("output") and metric.name not in ERRORS:
        what = f'[{where}] output = "{entry["output"]}" for {metric.name}'
        raise BadInput(path, what, f"only an error has outputs: {', '.join(ERRORS)}")
    if "from" in entry:
        stated = recorded.figure(entry["from"], path)
        if stated.withdrawn:
            raise BadInput(path, f"[{where}] {stated.id} was withdrawn ({stated.withdrawn})", "aim at one that stands")
        # A source writes "drops by more than 20 %"; the card writes the same line as a change below -20 %.
        if not isinstance(stated.value, float) or abs(stated.value) != abs(threshold):
            raise BadInput(
                path, f"[{where}] threshold = {threshold} but {stated.id} states {stated.value}", "make them equal"
            )
    return Condition(
        metric=metric.name,
        op=entry["op"],
        unit=unit,
        threshold=float(threshold),
        compare=compare,
        workload=_workload(path, where, entry, workloads),
        than=entry.get("than", ""),
        stated_by=entry.get("from", ""),
        arrival=_arrival(path, where, entry) or arrival,
        share=float(share),
        against=against,
        output=entry.get("output", ""),
    )


def _recorded(path: Path, entry: Any, workloads: tuple[str, ...]) -> RecordedCase:
    _keys(path, "recorded", entry, RECORDED_KEYS, {"verdict"})
    verdict = recorded.verdict(entry["verdict"], path)
    evidence: dict[tuple[str, str], Reading] = {}
    used: list[str] = []
    for table in entry.get("figure", ()):
        _keys(path, "recorded.figure", table, FIGURE_KEYS, {"metric"})
        metric = _metric(path, "recorded.figure", table["metric"])
        key = (metric.name, _workload(path, "recorded.figure", table, workloads))
        if key in evidence:
            raise BadInput(path, f"[recorded.figure] {metric.name} is given twice for one workload", "keep one")
        evidence[key] = _reading(path, metric, table)
        used += evidence[key].ids
    return RecordedCase(verdict, evidence, tuple(used), entry.get("differs", ""))


def _reading(path: Path, metric: vocabulary.Metric, table: Mapping[str, Any]) -> Reading:
    """The figures that one [[recorded.figure]] names, as a Reading; the arm of each figure must be the arm named."""
    ids = {key: table[key] for key in FIGURES if key in table}
    if not ids.keys() & {"control", "candidate", "change", "value"}:
        raise BadInput(
            path, f"[recorded.figure] {metric.name} names no figure", "give control and candidate, or change"
        )
    found = {key: recorded.figure(figure_id, path) for key, figure_id in ids.items()}
    for key, figure in found.items():
        if key.endswith("_launches"):
            if vocabulary.unit(figure.unit) != "launches":
                raise BadInput(path, f"{figure.id} is in {figure.unit}", f"{key} needs a count of launches")
            continue
        if key in ("control_sd", "noise"):
            own = vocabulary.unit(found["control"].unit) if "control" in found and key == "noise" else "%"
            if vocabulary.unit(figure.unit) not in ("%", own):
                raise BadInput(path, f"{figure.id} is in {figure.unit}", f"{key} needs a figure in %")
            continue
        if figure.metric != metric.name and figure.metric not in metric.recorded:
            raise BadInput(
                path,
                f"{figure.id} is a {figure.metric}, not a {metric.name}",
                f"bind another figure, or list that name under {metric.name} in data/vocabulary.toml",
            )
        arms = {"control": ("control", "reference", "peer-"), "candidate": ("candidate",)}.get(key, ("",))
        if not figure.arm.startswith(arms):
            raise BadInput(path, f"{figure.id} is the {figure.arm} arm", f'it cannot stand as "{key}"')
        if not isinstance(figure.value, float):
            raise BadInput(path, f'{figure.id} = "{figure.value}" is not a number', "bind another figure")
    main = [figure for key, figure in found.items() if key in ("control", "candidate", "change", "value")]
    units = sorted({vocabulary.unit(f.unit) for f in main})

    def value(key: str) -> float | None:
        return float(found[key].value) if key in found else None

    candidate, noise = value("candidate"), value("noise")
    if noise is not None and vocabulary.unit(found["noise"].unit) != "%":
        noise = 100 * noise / float(found["control"].value)  # stated in the figure's own unit, e.g. three requests
    return Reading(
        unit=units[0] if len(units) == 1 else " and ".join(units),
        control=value("control"),
        candidate=value("value") if candidate is None else candidate,
        change_pct=value("change"),
        control_sd_pct=value("control_sd"),
        noise_pct=noise,
        control_launches=value("control_launches"),
        candidate_launches=value("candidate_launches"),
        kind=min((f.kind for f in main), key=lambda k: KINDS.index(k) if k in KINDS else 0),
        ids=tuple(f.id for f in found.values()),
        withdrawn=next((f.withdrawn for f in main if f.withdrawn), ""),
        arrival=arrival_of(f.arrival for f in main),
        profiled=any(f.params.get("profiled") is True for f in main),
    )
