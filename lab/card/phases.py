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
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from lab.base import files, vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest
from lab.card import recorded
from lab.card.gate import ERRORS, Condition, Evidence, Gate, Reading, arrival_of

FOLDER = REPOSITORY / "data" / "phases"
NOT_STATED = "criterion not stated in the source"
DECLARED_HERE = "declared in this card"
KINDS = ("threshold", "floor", "ceiling", "predicted", "modelled", "measured")  # weakest first


class Claim(Gate, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A further statement of the source, judged by itself beside the phase's verdict (P1's prefill gain, P2's KL)."""

    name: files.Text


class Expected(Struct, frozen=True, forbid_unknown_fields=True):
    """What the change should recover, with its arithmetic."""

    recovery: str
    arithmetic: str


class Bound(Struct, frozen=True, forbid_unknown_fields=True):
    """The recorded figures of one metric on one workload, by id; a reading's ids stand in the order of the fields.

    value, change: of the candidate alone, where the source printed only that. noise: a floor, in % or in its unit.
    """

    metric: str
    workload: str = ""
    value: str = ""
    change: str = ""
    control: str = ""
    control_sd: str = ""
    control_launches: str = ""
    noise: str = ""
    candidate: str = ""
    candidate_launches: str = ""


class RecordedCase(Struct, frozen=True, forbid_unknown_fields=True):
    """One recorded verdict of a phase: its id, the figures it stood on, and why ours differs ("" where it agrees)."""

    verdict_id: str = field(name="verdict")
    bound: tuple[Bound, ...] = field(default=(), name="figure")
    differs: str = ""

    @property
    def verdict(self) -> recorded.RecordedVerdict:
        """What the source reached."""
        return recorded.verdict(self.verdict_id)

    @property
    def evidence(self) -> Evidence:
        """The figures as readings; raises BadInput for one that cannot stand where it is named."""
        return _evidence(self.bound)

    @property
    def figures(self) -> tuple[str, ...]:
        """The ids of all figures."""
        return tuple(i for reading in self.evidence.values() for i in reading.ids)


class _File(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A phase card as its file holds it.

    family:  "" for a question that can only be replayed so far.
    beside:  further candidates of the family, timed in the same comparison and judged by nobody (a router's table).
    """

    id: str
    row: str
    system: str
    device: str
    title: str
    question: str
    hypothesis: str
    null: str
    control: str
    candidate: str
    workloads: tuple[files.Text, ...]
    gate: Gate
    expected: Expected
    limits: str
    family: str = ""
    claims: tuple[Claim, ...] = field(default=(), name="claim")
    recorded: tuple[RecordedCase, ...] = ()
    beside: tuple[files.Text, ...] = ()


class Card(_File, frozen=True, kw_only=True):
    """A phase card: what its file holds, and which file.

    card_hash: first 12 hex digits of the SHA-256 of the file; gate_hash: of what is judged, however it is laid out.
    """

    path: Path
    card_hash: str
    gate_hash: str

    @property
    def gates(self) -> tuple[tuple[str, Gate], ...]:
        """The gate, named "", and each claim with its name."""
        return ("", self.gate), *((claim.name, claim) for claim in self.claims)


def gate_hash(card: Mapping[str, Any]) -> str:
    """Hash of what is judged in a parsed card (gate, claims, workloads, arms), independent of prose and layout."""
    judged = {key: card.get(key) for key in ("gate", "claim", "workloads")}
    if card.get("family"):  # then the arms are names of code, elsewhere they are prose
        judged |= {key: card.get(key) for key in ("family", "control", "candidate")}
    return hashlib.sha256(json.dumps(judged, sort_keys=True).encode()).hexdigest()[:12]


@cache
def cards() -> Mapping[str, Card]:
    """Every card by id, in the order of the rows."""
    loaded = [load(path) for path in FOLDER.rglob("*.toml")]
    order = list(vocabulary.row_ids())
    loaded.sort(key=lambda card: (order.index(card.row), card.id))
    return {card.id: card for card in loaded}


def card(card_id: str) -> Card:
    """The card with this id; raises BadInput naming the nearest."""
    return files.called(card_id, cards(), "card", FOLDER)


def load(path: Path) -> Card:
    """Read and check one card; raises BadInput in one line for anything that is not as a card must be."""
    text = files.read_bytes(path)
    raw = files.parse_toml(text, path)
    held = files.convert(raw, _File, path)
    try:
        for what, remedy in _wrong(held, path):
            raise BadInput(path, what, remedy)
        for case in held.recorded:
            _ = case.verdict, case.evidence
    except BadInput as refused:  # a figure or a verdict that this card names
        raise BadInput(path, refused.what, refused.remedy) from None
    fields = {name: getattr(held, name) for name in _File.__struct_fields__}
    return Card(**fields, path=path, card_hash=hashlib.sha256(text).hexdigest()[:12], gate_hash=gate_hash(raw))


Wrong = Iterator[tuple[str, str]]


def _wrong(card: _File, path: Path) -> Wrong:
    """What types cannot say: (what is wrong, the remedy) of each mistake in a card."""
    if card.id != path.stem:
        yield f'id = "{card.id}" differs from the file name', f'write id = "{path.stem}"'
    yield from _unknown("row", card.row, vocabulary.row_ids())
    yield from _unknown("system", card.system, vocabulary.systems())
    for key, names in (("workloads", card.workloads), ("beside", card.beside)):
        if len(set(names)) != len(names):
            yield f"{key} has the same word twice", "name each once"
    if card.gate.source not in (NOT_STATED, DECLARED_HERE):
        recorded.verdict(card.gate.source)
    for claim in card.claims:
        if claim.source:
            yield f'claim {claim.name}: unknown key "source"', "the gate alone names its criterion's source"
    for where, gate in (("gate", card.gate), *((f"claim {claim.name}", claim) for claim in card.claims)):
        if not gate.require:
            yield f"{where}.require is missing or empty", "declare at least one required condition"
        for role, condition in gate.conditions():
            for what, remedy in _wrong_condition(condition, card.workloads):
                yield f"{where}.{role}: {what}", remedy
    for bound in (bound for case in card.recorded for bound in case.bound):
        yield from _unknown("recorded.figure: workload", bound.workload, card.workloads)


def _unknown(key: str, word: str, known: Iterable[str]) -> Wrong:
    if word and word not in known:
        yield f'{key} = "{word}" is unknown', nearest(word, known)


def _wrong_condition(c: Condition, workloads: tuple[str, ...]) -> Wrong:
    metrics = vocabulary.metrics()
    yield from _unknown("metric", c.metric, metrics)
    yield from _unknown("metric than", c.than, metrics)
    yield from _unknown("workload", c.workload, workloads)
    yield from _unknown("against", c.against, workloads)
    yield from _unknown("arrival", c.arrival, vocabulary.arrivals())
    changes, asked = c.compare == "change", f"the {c.compare} of {c.metric}"
    unit = "%" if changes else metrics[c.metric].unit
    if c.unit != unit:
        yield f'unit = "{c.unit}" for {asked}', f'write unit = "{unit}"'
    if changes and c.op == "==":
        yield f'op = "==" for {asked}', "a change needs a direction"
    if math.isfinite(c.threshold) == bool(c.than):
        yield f"threshold = {c.threshold} for {asked}", "give threshold or than, a finite number or a metric"
    if c.share != 1 and not changes:
        yield f"share = {c.share} for {asked}", "a share of the timed region goes with a change"
    if c.against and (not changes or c.against == c.workload):
        yield f'against = "{c.against}" for {asked} at "{c.workload}"', "name another workload, with a change"
    if c.output and c.metric not in ERRORS:
        yield f'output = "{c.output}" for {c.metric}', f"only an error has outputs: {', '.join(ERRORS)}"
    if c.stated_by:
        stated = recorded.figure(c.stated_by)
        if stated.withdrawn:
            yield f"{stated.id} was withdrawn ({stated.withdrawn})", "aim at a figure that stands"
        # A source writes "drops by more than 20 %"; the card writes the same line as a change below -20 %.
        if not isinstance(stated.value, float) or abs(stated.value) != abs(c.threshold):
            yield f"threshold = {c.threshold} but {stated.id} states {stated.value}", "make them equal"


@cache
def _evidence(figures: tuple[Bound, ...]) -> Evidence:
    evidence: dict[tuple[str, str], Reading] = {}
    for bound in figures:
        if (bound.metric, bound.workload) in evidence:
            raise BadInput("card", f"recorded.figure: {bound.metric} is given twice for one workload", "keep one")
        evidence[bound.metric, bound.workload] = _reading(bound)
    return evidence


def _reading(bound: Bound) -> Reading:
    """The figures of a metric as a reading; raises BadInput for one that cannot stand where it is named."""
    for what, remedy in _unknown("recorded.figure: metric", bound.metric, vocabulary.metrics()):
        raise BadInput("card", what, remedy)
    ids = {
        key: figure_id for key, figure_id in asdict(bound).items() if figure_id and key not in ("metric", "workload")
    }
    found = {key: recorded.figure(figure_id) for key, figure_id in ids.items()}
    main = [figure for key, figure in found.items() if key in ("control", "candidate", "change", "value")]
    if not main:
        what = f"recorded.figure: {bound.metric} names no figure"
        raise BadInput("card", what, "give control and candidate, or change")
    for key, figure in found.items():
        for what, remedy in _misplaced(key, figure, bound.metric, found):
            raise BadInput("card", what, remedy)
    units = sorted({vocabulary.unit(figure.unit) for figure in main})
    numbers = {key: float(figure.value) for key, figure in found.items()}
    if "noise" in found and vocabulary.unit(found["noise"].unit) != "%":
        numbers["noise"] *= 100 / numbers["control"]  # stated in the figure's own unit, e.g. three requests
    return Reading(
        unit=units[0] if len(units) == 1 else " and ".join(units),
        control=numbers.get("control"),
        candidate=numbers.get("candidate", numbers.get("value")),
        change_pct=numbers.get("change"),
        control_sd_pct=numbers.get("control_sd"),
        noise_pct=numbers.get("noise"),
        control_launches=numbers.get("control_launches"),
        candidate_launches=numbers.get("candidate_launches"),
        kind=min((f.kind for f in main), key=lambda kind: KINDS.index(kind) if kind in KINDS else 0),
        ids=tuple(f.id for f in found.values()),
        withdrawn=next((f.withdrawn for f in main if f.withdrawn), ""),
        arrival=arrival_of(f.arrival for f in main),
        profiled=any(f.params.get("profiled") is True for f in main),
    )


def _misplaced(key: str, figure: recorded.Figure, metric: str, found: Mapping[str, recorded.Figure]) -> Wrong:
    """Why a figure cannot stand as `key` of a metric: its unit, its metric or its arm is another."""
    unit = vocabulary.unit(figure.unit)
    if not isinstance(figure.value, float):
        yield f'{figure.id} = "{figure.value}" is not a number', "bind another figure"
    if key.endswith("_launches"):
        if unit != "launches":
            yield f"{figure.id} is in {figure.unit}", f"{key} needs a count of launches"
    elif key in ("control_sd", "noise"):
        own = vocabulary.unit(found["control"].unit) if "control" in found and key == "noise" else "%"
        if unit not in ("%", own):
            yield f"{figure.id} is in {figure.unit}", f"{key} needs a figure in %"
    else:
        if figure.metric not in (metric, *vocabulary.metrics()[metric].recorded):
            remedy = f"bind another figure, or list that name under {metric} in data/vocabulary.toml"
            yield f"{figure.id} is a {figure.metric}, not a {metric}", remedy
        arms = {"control": ("control", "reference", "peer-"), "candidate": ("candidate",)}.get(key, ("",))
        if not figure.arm.startswith(arms):
            yield f"{figure.id} is the {figure.arm} arm", f'it cannot stand as "{key}"'
