"""Phase cards (data/phases/<system>/*.toml): one falsifiable question each, its gate declared before anyone measured.

A card says what is asked, what is expected if the idea fails, the gate, and which recorded figures or measured rows
the gate reads. Everything in it is data and is checked on loading: an unknown key, metric, unit, row or id is refused
in one line that names the file, the key and the nearest valid word.

A card of one's own may lie anywhere (lab/base/own.py): its row and system are free words, its device may be left open,
and it declares the metrics that data/vocabulary.toml lacks.

The recorded verdict's word is never typed into a card; a card names the verdict's id and the word is looked up. Where
our judge differs from the source, the card must carry one sentence saying why, and where it agrees it must not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import force_setattr

from lab.base import devices, files, own, vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest, shown
from lab.card import recorded
from lab.card.gate import ERRORS, Condition, Evidence, Gate, Reading, arrival_of

FOLDER = REPOSITORY / "data" / "phases"
NOT_STATED = "criterion not stated in the source"
DECLARED_HERE = "declared in this card"


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


class Protocol(Struct, frozen=True, forbid_unknown_fields=True):
    """How rows must have been taken to be judged by a card; what it does not say is that of the newest run.

    rest: idle time after each visit, as a multiple of the visit. No part of the gate's hash.
    """

    timer: Literal["graph", "events", "cupti", "host"] | None = None
    l2: Literal["cold", "warm"] | None = None
    rest: files.NotNegative | None = None

    def other(self, timer: str, l2: str, rest: float) -> str:
        """ "" or the first thing in which a way of measuring is another, as the card states it."""
        given = {"timer": timer, "l2": l2, "rest": rest}
        return next((f"{k} = {getattr(self, k)}" for k, v in given.items() if getattr(self, k) not in (None, v)), "")


class _File(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A phase card as its file holds it.

    row, system, device: "" for a card of one's own that leaves them open.
    workloads: ids, or with a family also axes ("M=8 N=5120 K=6144").
    metric:  what the gate asks for and data/vocabulary.toml does not have.
    family:  "" for a question that can only be replayed so far.
    beside:  further candidates of the family, timed in the same comparison and judged by nobody (a router's table).
    adopted: what was done after the verdict, where the code of an arm went: its rows are judged, none is measured.
    """

    id: files.Id
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
    row: str = ""
    system: str = ""
    device: str = ""
    metric: dict[files.Id, vocabulary.Metric] = {}
    family: str = ""
    claims: tuple[Claim, ...] = field(default=(), name="claim")
    recorded: tuple[RecordedCase, ...] = ()
    beside: tuple[files.Text, ...] = ()
    adopted: str = ""
    measure: Protocol = Protocol()


class Card(_File, frozen=True, kw_only=True):
    """A phase card: what its file holds, and which file.

    card_hash: first 12 hex digits of the SHA-256 of the file; gate_hash: of what is judged, however it is laid out.
    """

    path: Path
    card_hash: str
    gate_hash: str

    @property
    def own(self) -> bool:
        """Whether it is somebody's own, and not one of data/phases."""
        return not _house(self.path)

    @property
    def word(self) -> str:
        """What a command calls it: its id, or the path of one's own, which works wherever its folder is not in use."""
        return shown(self.path) if self.own else self.id

    @property
    def gates(self) -> tuple[tuple[str, Gate], ...]:
        """The gate, named "", and each claim with its name."""
        return ("", self.gate), *((claim.name, claim) for claim in self.claims)

    @property
    def compared(self) -> list[list[str]]:
        """Groups of workloads that the gate, or a claim, compares with each other: measured on one GPU, in one run."""
        groups: list[set[str]] = []
        for condition in (c for _, gate in self.gates for _, c in gate.conditions() if c.against):
            both = {condition.workload, condition.against}
            touching = [group for group in groups if group & both]
            groups = [group for group in groups if not group & both] + [both.union(*touching)]
        return [sorted(group) for group in groups]


def gate_hash(card: Mapping[str, Any]) -> str:
    """Hash of what is judged in a parsed card (gate, claims, workloads, arms), independent of prose and layout."""
    gate, claims = card.get("gate"), card.get("claim")
    judged: dict[str, Any] = {"gate": _bare(gate), "claim": claims and [_bare(c) for c in claims]}
    judged["workloads"] = card.get("workloads")
    judged |= {"metric": card["metric"]} if card.get("metric") else {}
    if card.get("family"):  # then the arms are names of code, elsewhere they are prose
        judged |= {key: card.get(key) for key in ("family", "control", "candidate")}
    return _hash(json.dumps(judged, sort_keys=True).encode())


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]


def _bare(gate: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A gate as the judge reads it, without the prose that says why its lines lie where they do."""
    return gate and {key: value for key, value in gate.items() if key != "reason"}


def cards() -> Mapping[str, Card]:
    """Every card by id: the repository's in the order of the rows, then those of the card directory in use.

    A copy of one of the repository's stands in its place, and is judged by the same rows.
    """
    return {**_cards(FOLDER), **own_cards()}


@cache
def _cards(folder: Path) -> Mapping[str, Card]:
    loaded = [load(path) for path in folder.rglob("*.toml")]
    order = list(vocabulary.words().row)
    loaded.sort(key=lambda card: (order.index(card.row), card.id))
    return {card.id: card for card in loaded}


def own_cards() -> Mapping[str, Card]:
    """Those of the card directory in use, {} without one: its .toml files but the devices', and what has no gate."""
    place = own.folder()
    paths = [path for path in sorted(place.glob("*.toml")) if path.name != own.DEVICES] if place else []
    loaded = [load(path) for path in paths if {"gate", "question"} & files.read_toml(path).keys()]
    return {card.id: card for card in loaded}


def card(word: str) -> Card:
    """The card with this id, or at this path (*.toml); raises BadInput naming the nearest."""
    return load(Path(word)) if word.endswith(".toml") else files.called(word, cards(), "card", own.folder() or FOLDER)


def ungated(name: str, family: str, control: str, candidate: str, workloads: tuple[str, ...], path: Path) -> Card:
    """What stands in the place of a card where arms are timed and nothing is judged: no gate, and its name for text."""
    prose = dict.fromkeys(("title", "question", "hypothesis", "null", "limits", "card_hash", "gate_hash"), name)
    arms = {"family": family, "control": control, "candidate": candidate, "workloads": workloads}
    return Card(id=name, **prose, **arms, gate=Gate(), expected=Expected("", ""), path=path)  # type: ignore[arg-type]


def _house(path: Path) -> bool:
    return path.absolute().is_relative_to(FOLDER)


def load(path: Path) -> Card:
    """Read and check one card; raises BadInput in one line for anything that is not as a card must be."""
    text = files.read_bytes(path)
    raw = files.parse_toml(text, path)
    held = files.convert(raw, _File, path)
    try:
        for gate in (held.gate, *held.claims):
            force_setattr(gate, "metric", held.metric | gate.metric)
        _check(held, path.stem, _house(path))
        for case in held.recorded:
            _ = case.verdict, case.evidence
    except BadInput as refused:  # which knows the key, and not the file that it stands in
        raise BadInput(path, refused.what, refused.remedy) from None
    fields = {name: getattr(held, name) for name in _File.__struct_fields__}
    return Card(**fields, path=path, card_hash=_hash(text), gate_hash=gate_hash(raw))


def _refuse(mistaken: bool, what: str, remedy: str) -> None:
    if mistaken:
        raise BadInput("card", what, remedy)


def _known(key: str, word: str, known: Iterable[str]) -> None:
    if word and word not in known:
        raise BadInput("card", f'{key} = "{word}" is unknown', nearest(word, known))


def _check(card: _File, stem: str, house: bool) -> None:
    """What types cannot say of a card; raises BadInput for its first mistake."""
    _refuse(card.id != stem, f'id = "{card.id}" differs from the file name', f'write id = "{stem}"')
    if house:
        for key in ("row", "system", "device"):
            _refuse(not getattr(card, key), f'key "{key}" is missing', f"give {key}")
        _known("row", card.row, vocabulary.words().row)
        _known("system", card.system, vocabulary.words().system)
    else:
        _known("device", card.device, devices.ids())
    asked = {c.metric for gate in (card.gate, *card.claims) for _, c in gate.conditions()}
    host = card.measure.timer == "host"
    if card.family and (host or "host_us" in asked):
        wrong = sorted(asked & {"kernel_us", "sequence_us", "roofline_fraction"}) if host else ["host_us"]
        what = f'asks for {", ".join(wrong)} with measure.timer = "{card.measure.timer or "graph"}"'
        _refuse(bool(wrong), what, 'host_us stands on rows of timer = "host", and they hold no other time')
    for name in card.metric:
        _refuse(
            name in vocabulary.words().metric, f"metric.{name} is declared already", "leave it out, or rename yours"
        )
    both = card.control == card.candidate
    _refuse(both, f'control and candidate are both "{card.control}"', "name two arms: an arm is no change to itself")
    for key, names in (("workloads", card.workloads), ("beside", card.beside)):
        _refuse(len(set(names)) != len(names), f"{key} has the same word twice", "name each once")
    source = card.gate.source
    own_words = (NOT_STATED, DECLARED_HERE, *([] if house else [""]))
    if source not in own_words and source not in (ids := recorded.verdicts()):
        remedy, close = f'write source = "{DECLARED_HERE}" where the criterion is your own', nearest(source, ids)
        remedy += f"; {close}" if close.startswith("did you mean") else ""
        _refuse(True, f'gate.source = "{source}" is the id of no recorded verdict', remedy)
    for claim in card.claims:
        remedy = "the gate alone names its criterion's source"
        _refuse(bool(claim.source), f'claim {claim.name}: unknown key "source"', remedy)
    for where, gate in (("gate", card.gate), *((f"claim {claim.name}", claim) for claim in card.claims)):
        # Whether it ran, or finished, may be the whole question; beside other conditions a requirement was forgotten.
        ran = (gate.complete or gate.engaged) and not (gate.kill or gate.correctness)
        nothing = not gate.require and not ran
        _refuse(nothing, f"{where}.require is missing or empty", "declare at least one required condition")
        for role, condition in gate.conditions():
            _check_condition(f"{where}.{role}", condition, card.workloads, gate.metrics)
    for bound in (bound for case in card.recorded for bound in case.bound):
        _known("recorded.figure: workload", bound.workload, card.workloads)


def _check_condition(at: str, c: Condition, workloads: Iterable[str], metrics: Mapping[str, vocabulary.Metric]) -> None:
    """A condition, which stands in the card's list `at`, against the words that it may use; raises BadInput."""
    _known(f"{at}: metric", c.metric, metrics)
    _known(f"{at}: metric than", c.than, metrics)
    _known(f"{at}: workload", c.workload, workloads)
    _known(f"{at}: against", c.against, workloads)
    _known(f"{at}: arrival", c.arrival, vocabulary.words().arrival)
    changes, asked = c.compare == "change", f"the {c.compare} of {c.metric}"
    unit = "%" if changes else metrics[c.metric].unit
    _refuse(c.unit != unit, f'{at}: unit = "{c.unit}" for {asked}', f'write unit = "{unit}"')
    _refuse(changes and c.op == "==", f'{at}: op = "==" for {asked}', "a change needs a direction")
    what, remedy = f"{at}: threshold = {c.threshold} for {asked}", "give threshold or than, a finite number or a metric"
    _refuse(math.isfinite(c.threshold) == bool(c.than), what, remedy)
    _refuse(c.share != 1 and not changes, f"{at}: share = {c.share} for {asked}", "a share goes with a change")
    what, itself = f'{at}: against = "{c.against}" for {asked} at "{c.workload}"', c.against == c.workload
    _refuse(bool(c.against) and (not changes or itself), what, "name another workload, with a change")
    what, remedy = f'{at}: output = "{c.output}" for {c.metric}', f"only an error has outputs: {', '.join(ERRORS)}"
    _refuse(bool(c.output) and c.metric not in ERRORS, what, remedy)
    if c.stated_by:
        stated = recorded.target(c.stated_by).value
        # A source writes "drops by more than 20 %"; the card writes the same line as a change below -20 %.
        same = isinstance(stated, float) and abs(stated) == abs(c.threshold)
        _refuse(not same, f"{at}: threshold = {c.threshold} but {c.stated_by} states {stated}", "make them equal")


@cache
def _evidence(figures: tuple[Bound, ...]) -> Evidence:
    evidence: dict[tuple[str, str], Reading] = {}
    for bound in figures:
        key = bound.metric, bound.workload
        _refuse(key in evidence, f"recorded.figure: {bound.metric} is given twice for one workload", "keep one")
        evidence[key] = _reading(bound)
    return evidence


def _reading(bound: Bound) -> Reading:
    """The figures of a metric as a reading; raises BadInput for one that cannot stand where it is named."""
    _known("recorded.figure: metric", bound.metric, vocabulary.words().metric)
    ids = {key: getattr(bound, key) for key in Bound.__struct_fields__ if key not in ("metric", "workload")}
    found = {key: recorded.figure(figure_id) for key, figure_id in ids.items() if figure_id}
    main = [figure for key, figure in found.items() if key in ("control", "candidate", "change", "value")]
    _refuse(not main, f"recorded.figure: {bound.metric} names no figure", "give control and candidate, or change")
    for key, figure in found.items():
        _check_place(key, figure, bound.metric, found)
    units = sorted({vocabulary.unit(figure.unit) for figure in main})
    numbers = {key: float(figure.value) for key, figure in found.items()}
    if "noise" in found and vocabulary.unit(found["noise"].unit) != "%":
        numbers["noise"] *= 100 / numbers["control"]  # stated in the figure's own unit, e.g. three requests
    return Reading(
        unit=" and ".join(units),
        control=numbers.get("control"),
        candidate=numbers.get("candidate", numbers.get("value")),
        change_pct=numbers.get("change"),
        control_sd_pct=numbers.get("control_sd"),
        noise_pct=numbers.get("noise"),
        control_launches=numbers.get("control_launches"),
        candidate_launches=numbers.get("candidate_launches"),
        kind=min((figure.kind for figure in main), key=recorded.KINDS.index),
        ids=tuple(figure.id for figure in found.values()),
        withdrawn=next((figure.withdrawn for figure in main if figure.withdrawn), ""),
        arrival=arrival_of(figure.arrival for figure in main),
        profiled=any(figure.params.get("profiled") is True for figure in main),
    )


def _check_place(key: str, figure: recorded.Figure, metric: str, found: Mapping[str, recorded.Figure]) -> None:
    """Raise BadInput where a figure cannot stand as `key` of a metric: its unit, its metric or its arm is another."""
    unit, inside = vocabulary.unit(figure.unit), f"{figure.id} is in {figure.unit}"
    number = isinstance(figure.value, float)
    _refuse(not number, f'{figure.id} = "{figure.value}" is not a number', "bind another figure")
    if key.endswith("_launches"):
        _refuse(unit != "launches", inside, f"{key} needs a count of launches")
    elif key in ("control_sd", "noise"):
        own = vocabulary.unit(found["control"].unit) if "control" in found and key == "noise" else "%"
        _refuse(unit not in ("%", own), inside, f"{key} needs a figure in %")
    else:
        remedy = f"bind another figure, or list that name under {metric} in data/vocabulary.toml"
        fits = figure.metric in (metric, *vocabulary.words().metric[metric].recorded)
        _refuse(not fits, f"{figure.id} is a {figure.metric}, not a {metric}", remedy)
        arms = {"control": ("control", "reference", "peer-"), "candidate": ("candidate",)}.get(key, ("",))
        fits = figure.arm.startswith(arms)
        _refuse(not fits, f"{figure.id} is the {figure.arm} arm", f'it cannot stand as "{key}"')
