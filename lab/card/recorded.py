"""Figures and verdicts transcribed from the five sources: data/recorded/*.csv, by id.

A figure is a number that somebody published, with its unit, its arm and its source file; a verdict is how an outcome
ended: in the source's own word where it used one, and in ours for what it says in prose. Both are facts about a source,
so nothing here is ever rewritten by a measurement. `figure()` refuses nothing; `target()` refuses a figure that its
source withdrew, because a withdrawn figure must not become a goal again (withdrawn by id, not by value: 471 ms/step is
an artefact in one place and a sound control in another).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct

from lab.base import files, vocabulary
from lab.base.errors import REPOSITORY, BadInput, nearest

FOLDER = REPOSITORY / "data" / "recorded"
FIGURE_FILES: tuple[str, ...] = ("measurements.csv", "gates.csv", "program.csv", "patches.csv", "phases.csv")
FIGURE_FILES += ("stated_ds4.csv", "stated_ik_llama.csv", "stated_imp.csv", "stated_lucebox.csv", "stated_localai.csv")

Kind = Literal["threshold", "floor", "ceiling", "predicted", "modelled", "stated", "measured"]
KINDS = get_args(Kind)  # weakest first


class Figure(Struct, frozen=True):
    """One recorded number.

    params:    the conditions (npl, M, ctx, ...); `status` among them when the source took the figure back.
    value:     as printed by the source, in `unit`; text where the source gives a word.
    delta_pct: change against the control in %, only where the source states it, else None.
    """

    id: str
    system: str
    phase: str
    device: str
    model: str
    arm: str
    metric: str
    unit: str
    params: dict[str, Any]
    value: files.Finite | str
    delta_pct: files.Finite | None
    kind: Kind
    source: str

    def __post_init__(self) -> None:
        for key in ("arrival", "traffic"):
            word, known = str(self.params.get(key, "")), vocabulary.words().arrival
            if word and word not in known:
                raise ValueError(f'{key} = "{word}" is unknown; {nearest(word, known)}')
        if isinstance(self.value, float) and self.value < 0 and vocabulary.measures(self.unit).quantity == "time":
            raise ValueError(f"{self.value} {self.unit} is a negative time; check the sign and the unit")

    @property
    def arrival(self) -> str:
        """How the requests of the load arrived ("burst", "staggered"), "" when the source does not say."""
        return str(self.params.get("arrival", self.params.get("traffic", "")))

    @property
    def withdrawn(self) -> str:
        """The source's word for taking the figure back, "" when it stands."""
        status = str(self.params.get("status", ""))
        return status if status.startswith(vocabulary.words().withdrawn) else ""


class Source(Struct, frozen=True):
    """A document that figures and verdicts were taken from: whose it is, what it is, its lines, its SHA-256."""

    id: str
    system: str
    project: str
    document: str
    what: str
    lines: int
    sha256: str


class RecordedVerdict(Struct, frozen=True):
    """How a source's outcome ended, with its stated gate and reason in our words.

    reading:    what we read it as, a word of the judge or LANDED; whose word it is, the next fields say.
    lines:      of the document, "12-13;50", where the outcome and its figures stand.
    word:       the source's own word or phrase for the outcome, "" where it says it in prose or not at all.
    word_lines: its lines. word_kind: "label" (a verdict word: NO-GO, landed, PASS), "phrase" or "effect" (flat), or "".
    word_means: that word in the judge's words, joined by " or " where it leaves two open; "" without a word.
    checked:    seal of the walk that found word and figures on their lines (tests/card/walk_sources.py).
    """

    id: str
    system: str
    phase: str
    title: str
    hypothesis: str
    gate: str
    observed: str
    reading: Literal["GO", "CONDITIONAL-GO", "NO-GO", "NEUTRAL", "PARTIAL", "BLOCKED", "VACUOUS", "INVALID", "LANDED"]
    why: str
    source: str
    lines: str
    word: str
    word_lines: str
    word_kind: Literal["", "label", "phrase", "effect"]
    word_means: str
    checked: str

    def __post_init__(self) -> None:
        if len({bool(x) for x in (self.word, self.word_lines, self.word_kind, self.word_means)}) > 1:
            raise ValueError(f'word = "{self.word}" without its line, kind and meaning; give all four or none')

    @property
    def cited(self) -> str:
        """The document and lines, as a reader can follow them."""
        return citation(self.source, self.lines)

    @property
    def said(self) -> str:
        """Whose word it is, in one phrase with its lines: the source's own, or our reading of what it says."""
        if not self.word:
            return f"we read the source as {self.reading} ({self.cited})"
        read = "" if self.word == self.reading else f", which we read as {self.reading}"
        return f'the source wrote "{self.word}" ({citation(self.source, self.word_lines)}){read}'


class Taint(Struct, frozen=True):
    """What the same source later found wrong with an outcome; id: of the recorded verdict.

    weight:  "figure" (taken with a defect), "verdict" (the conclusion is taken back) or "possible".
    figures: patterns of the ids that it touches, separated by spaces. lines: where the source says so.
    """

    id: str
    weight: Literal["figure", "verdict", "possible"]
    figures: str
    lines: str
    what: str
    source: str


def read_figures(path: Path) -> dict[str, Figure]:
    """Figures of one CSV by id.

    Raises BadInput for a missing column, a duplicate id, a value that is NaN or infinite, a negative time, or params
    that are not a JSON object or name unknown arrivals; each names the file and the id.
    """

    def typed(row: dict[str, Any]) -> dict[str, Any]:
        delta = files.number(row["delta_pct"])
        return row | {"value": files.number(row["value"]), "delta_pct": None if delta == "" else delta}

    return files.table(path, Figure, typed)


@cache
def figures() -> Mapping[str, Figure]:
    """Every recorded figure by id, from all figure files."""
    merged: dict[str, Figure] = {}
    for path in (FOLDER / name for name in FIGURE_FILES):
        found = read_figures(path)
        for figure_id in sorted(found.keys() & merged.keys())[:1]:
            raise BadInput(path, f'id "{figure_id}" is in another file too', "give the second one its own id")
        merged.update(found)
    return merged


def figure(figure_id: str, where: str | Path = "recorded") -> Figure:
    """The figure with this id; raises BadInput naming `where` and the nearest id."""
    return files.called(figure_id, figures(), "recorded figure", where)


def target(figure_id: str) -> Figure:
    """The figure with this id as a goal to reach; raises BadInput when its source withdrew it."""
    found = figure(figure_id)
    if found.withdrawn:
        what = f"{figure_id} was withdrawn by its source ({found.withdrawn})"
        raise BadInput("recorded", what, "aim at a figure that stands")
    return found


def number(where: str | Path, figure_id: str, kinds: Collection[str] = (), *, stands: bool = False) -> Figure:
    """The figure with this id, whose value is a number, for a file of data/ that binds it.

    Raises BadInput naming `where` for one that is none, that is not of one of these kinds, or that its source withdrew
    although it must stand.
    """
    found = figure(figure_id, where)
    if kinds and found.kind not in kinds:
        raise BadInput(where, f"{found.id} is {found.kind}", f"bind a figure that is {' or '.join(kinds)} here")
    if stands and found.withdrawn:
        raise BadInput(where, f"{found.id} was withdrawn ({found.withdrawn})", "bind a figure that stands")
    if not isinstance(found.value, float):
        raise BadInput(where, f'{found.id} = "{found.value}" is not a number', "bind another figure")
    return found


@cache
def sources() -> Mapping[str, Source]:
    """Every document by the name that `source` of a figure or a verdict gives it."""
    return files.table(FOLDER / "sources.csv", Source, lambda row: row | {"lines": int(row["lines"] or 0)})


def citation(source: str, lines: str = "") -> str:
    """ "LocalAI paged notes, lines 12-13 and 50"; the name of a file that is none of the documents as it stands."""
    known = sources().get(source)
    if known is None or not lines:
        return known.document if known else source
    places = lines.split(";")
    told = " and ".join(filter(None, (", ".join(places[:-1]), places[-1])))
    return f"{known.document}, line{'s' if len(places) > 1 or '-' in lines else ''} {told}"


@cache
def taints() -> Mapping[str, Taint]:
    """What sources later found wrong with their own outcomes, by recorded verdict."""
    return files.table(FOLDER / "taint.csv", Taint)


@cache
def verdicts() -> Mapping[str, RecordedVerdict]:
    """Every recorded verdict by id."""
    return files.table(FOLDER / "verdicts.csv", RecordedVerdict)


def verdict(verdict_id: str, where: str | Path = "recorded") -> RecordedVerdict:
    """The recorded verdict with this id; raises BadInput naming `where` and the nearest id."""
    return files.called(verdict_id, verdicts(), "recorded verdict", where)
