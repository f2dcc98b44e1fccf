"""What a page shows of a card, a family or a device, gathered from cards, rows and verdicts; templates/ lays it out.

Nothing here is phrased that a row could say, and nothing is computed that a room computes: a `View` is one verdict with
what stands beside it, and every list, table and figure of a page is made from views and rows. What is absent is None or
empty, and the page says "not measured".
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from lab import draw
from lab.base import devices, files, vocabulary
from lab.base.errors import REPOSITORY, BadInput
from lab.card import history, phases, recorded
from lab.card.phases import Card
from lab.check import families
from lab.draw import inline
from lab.judge import evidence, rules
from lab.judge.verdicts import Judgement, judge_measured, judge_recorded, judgement
from lab.place import ceilings, roofline
from lab.row import store
from lab.row.records import Measurement
from lab.study import flips, ledger
from lab.study.audit.run import audit
from lab.study.audit.subject import Finding
from lab.write import figures

NOTEBOOKS = REPOSITORY / "notebooks"
SURE = ("GO", "CONDITIONAL-GO")
TICKS = {"holds": "\N{CHECK MARK} holds", "fails": "\N{MULTIPLICATION SIGN} missed", "noise": "~ within noise"}
TICKS |= {
    "missing": "\N{EN DASH} no figure",
    "arrival": "\N{EN DASH} another load",
    "blind": "\N{EN DASH} cannot see it",
}
FIRED = {"holds": "\N{MULTIPLICATION SIGN} fired", "fails": "\N{CHECK MARK} did not fire"}
ROLES = {"correctness": "INVALID if missed", "complete": "BLOCKED if missed", "engaged": "VACUOUS if missed"}
ROLES |= {"kill": "NO-GO if it holds", "require": "a GO requires it"}
LOADED = {".py": "Python", ".cu": "CUDA C++", ".cuh": "CUDA C++", ".md": "notes"}


@dataclass(frozen=True)
class View:
    """One verdict and what stands beside it; see `unmeasured` for a card without any."""

    card: Card
    judgement: Judgement
    audited: tuple[Finding, ...] = ()
    beside: tuple[Judgement, ...] = ()

    @property
    def word(self) -> str:
        """The verdict's."""
        return self.judgement.verdict.word

    @property
    def kind(self) -> str:
        """measured, recorded or unmeasured."""
        return self.judgement.evidence

    @property
    def device(self) -> str:
        """Its id."""
        return self.judgement.device

    @property
    def device_name(self) -> str:
        """Its name, or the id of one that data/devices.toml lacks."""
        return devices.get(self.device).name if self.device in devices.ids() else self.device

    @property
    def anchor(self) -> str:
        """Where the verdict stands on its card's page."""
        return self.judgement.recorded_id or f"{self.kind}-{self.device}"

    @property
    def source(self) -> str:
        """Whose evidence it is: the project of a recorded outcome."""
        if self.judgement.recorded:
            known = recorded.sources().get(self.judgement.recorded.source)
            return known.project if known else self.card.system
        return {"measured": "measured here", "unmeasured": "not measured yet"}.get(self.kind, "imported files")

    @cached_property
    def deciding(self) -> rules.Finding | None:
        """The condition that decided, with its numbers."""
        return deciding(self.judgement.verdict)

    @property
    def margin(self) -> float | None:
        """How far the deciding figure is from its line."""
        return round(_margin(self.deciding), 6) if self.deciding else None

    @property
    def effect(self) -> float | None:
        """The size of a deciding change, in %."""
        seen = self.deciding.seen if self.deciding else None
        return round(abs(seen.value), 3) if seen and seen.unit == "%" else None

    @property
    def why(self) -> str:
        """The decisive figures in a phrase, for a line that has no number to show."""
        return self.judgement.verdict.observed or self.judgement.verdict.reason

    @property
    def flags(self) -> list[str]:
        """What a reader has to know beside the word."""
        said = ["interval across the line"] if any(map(crosses, self.judgement.verdict.decisive)) else []
        if "gate changed after measuring" in self.judgement.note:
            said.append("gate changed after measuring")
        words = dict.fromkeys(f.severity for f in self.audited)
        return [*said, f"audit: {', '.join(words)}"] if words else said

    @property
    def noise_floor(self) -> str:
        """That which its changes were held to; both where it has none, for rows may be of either kind."""
        floor, sigmas = (inline.number(x) for x in (self.card.gate.noise.floor_pct, self.card.gate.noise.sigmas))
        seen = [f.seen for f in self.judgement.verdict.findings if f.seen and f.condition.compare == "change"]
        over = {x.placements > 1 and x.interval is not None for x in seen}
        over = over or {False, self.kind in ("measured", "unmeasured")}
        placed = f"{floor} % over placements, whose interval holds the noise of both arms"
        one = f"max({floor} %, {sigmas} sigma of the control)"
        one += " for rows of one placement" if self.kind in ("measured", "unmeasured") else ""
        return "; ".join([placed] * (True in over) + [one] * (False in over))

    @property
    def elsewhere(self) -> str:
        """The same question's word on other evidence."""
        return "; ".join(f"{j.evidence} on {j.device}: {j.verdict.word}" for j in self.beside)

    @property
    def agreement(self) -> str:
        """Whether a recorded word is ours."""
        if self.judgement.agrees is None:
            return ""
        return f"source: {self.judgement.source_said}" + ("" if self.judgement.agrees else ", differs")

    @property
    def when(self) -> str:
        """The newest run behind it."""
        ids = [i for f in self.judgement.verdict.findings for i in f.ids if i.startswith("profiles/")]
        return max((i.split("/")[3].split("#")[0] for i in ids), default="")


def unmeasured(card: Card) -> View:
    """Of a card that nobody has evidence for: BLOCKED, as design and README promise."""
    waiting = judgement(card, {}, "unmeasured", card.device, None)
    return View(card, replace(waiting, verdict=rules.Verdict("BLOCKED", "not measured")))


def deciding(verdict: rules.Verdict) -> rules.Finding | None:
    """The condition that decided, with its numbers: where all hold the one nearest to its line, else the first."""
    found = [f for f in verdict.decisive if f.seen]
    return min(found, key=_margin) if found and verdict.word in SURE else next(iter(found), None)


def crosses(found: rules.Finding) -> bool:
    """Whether the interval of a condition's figure lies across its line."""
    seen = found.seen
    return bool(seen and seen.interval and seen.interval[0] <= seen.line <= seen.interval[1])


def _margin(found: rules.Finding) -> float:
    seen = found.seen
    if seen is None:
        return float("inf")
    whole = 100.0 if seen.unit == "%" else max(abs(seen.line), abs(seen.value)) or 1.0
    return abs(seen.value - seen.line) / whole


def judged(chosen: Iterable[Card] = ()) -> list[Judgement]:
    """Every verdict that these cards, or all, have evidence for, as `lab judge` gives them.

    The measured first, and of a card's that of the device which it names.
    """
    every = list(chosen) or list(phases.cards().values())
    places = ((c, sorted(store.measured_devices(c.id), key=c.device.__ne__)) for c in every)
    measured = [judge_measured(c, device) for c, there in places for device in there]
    return measured + judge_recorded(every)


def views(judgements: Iterable[Judgement]) -> list[View]:
    """A view of each verdict, and of each card without any, in the order of the judgements."""
    judgements = list(judgements)
    seen = {j.phase for j in judgements}
    bare = [unmeasured(c) for c in phases.cards().values() if c.id not in seen]
    return [_view(phases.card(j.phase), j, judgements) for j in judgements] + bare


def page_of(card: Card, judgements: Sequence[Judgement]) -> CardPage:
    """The page of one card by itself, one of somebody's own too."""
    own = {p.card for p in _pairs() if p.recorded in {j.recorded_id for j in judgements}} - {card.id}
    own |= {c.id for c in phases.cards().values() for p in _pairs() if p.card == card.id
            for case in c.recorded if case.verdict_id == p.recorded}  # fmt: skip
    every = [*judgements, *(judged(phases.cards()[c] for c in sorted(own)) if own else ())]
    return CardPage(card, tuple(_view(card, j, every) for j in judgements) or (unmeasured(card),))


def _view(card: Card, j: Judgement, judgements: Iterable[Judgement]) -> View:
    key = j.recorded_id or j.phase
    own = [f for f in _findings() if f.evidence == j.evidence and f.device in ("", j.device)]
    own = [f for f in own if (j.recorded_id in f.verdicts if f.verdicts else j.phase in f.cards)]
    other = {o for p in _pairs() for o in (p.recorded, p.card) if key in (p.recorded, p.card)} - {key}
    beside = [o for o in judgements if (o.recorded_id or o.phase) in other and o.evidence != j.evidence]
    if j.evidence == "measured":
        measured = (o for o in judgements if o.evidence == j.evidence and o.phase == j.phase)
        beside = [o for o in measured if o.device != j.device] + beside
    return View(card, j, tuple(own), tuple(beside))


@cache
def _findings() -> tuple[Finding, ...]:
    return audit().findings


@cache
def _pairs() -> list[flips.Pair]:
    return [p for p in files.read(flips.FILE, flips.Pairs).flip if not p.asks_otherwise]


def arms(card: Card, device: str) -> dict[str, list[Measurement]]:
    """workload -> every arm of the run that it is judged by: the card's two first, then by time; failed ones too."""
    order = {card.control: 0, card.candidate: 1}
    found = {w: {r.name: r for r in own}.values() for w, own in figures.judged_runs(card, device).items()}
    return {w: sorted(own, key=lambda r: (order.get(r.name, 2), r.own_us or math.inf)) for w, own in found.items()}


def changes(card: Card, own: Iterable[Measurement]) -> dict[str, float]:
    """Arm of one run and workload -> change against the control in %."""
    rows = {r.name: r for r in own if r.own_us}
    control = rows.get(card.control)
    if control is None:
        return {}
    found = {n: 100 * ((r.own_us or 0) / (control.own_us or 1) - 1) for n, r in rows.items() if r is not control}
    paired = evidence.change_pct(control, rows.get(card.candidate))
    return found | ({card.candidate: paired[0]} if paired and card.candidate in found else {})


def of_roofline(row: Measurement) -> float | None:
    """Its share of the datasheet's roofline."""
    return roofline.fraction_of(devices.get(row.device), row)


def of_ceiling(row: Measurement) -> float | None:
    """The floor by the measured ceilings over its time."""
    floor = ceilings.floor_of(row)
    return floor / row.time_us if floor and row.time_us else None


def pictures(card: Card, device: str) -> list[tuple[str, figures.Picture]]:
    """The figures of a card's measured evidence by name: arms and rivals, roofline, kernels of a trace if any."""
    found = []
    for drawn in (figures.arms, figures.roofline, figures.breakdown):
        with contextlib.suppress(BadInput):  # no row is ok, no trace was committed
            found.append((drawn.__name__, drawn(card, device)))
    return found


def versions(rows: Iterable[Measurement]) -> list[tuple[str, str]]:
    """What the rows ran on, each once: GPU, driver, CUDA, torch, Triton, and what the rivals say of themselves."""
    rows = list(rows)
    keys = ("gpu", "driver", "cuda", "torch", "triton", "python")
    found = [(key, ", ".join(sorted({str(v) for r in rows if (v := getattr(r, key))}))) for key in keys]
    found += [("commit", ", ".join(sorted({r.code[:7] for r in rows})))]
    rivals = {r.name: r.config for r in rows if r.arm == "peer" and r.config}
    return [(key, text) for key, text in found if text] + sorted(rivals.items())


@cache
def sources(family: str) -> Mapping[str, tuple[Path, ...]]:
    """Candidate -> the files that hold it: its module and the CUDA sources that the module names."""
    found: dict[str, tuple[Path, ...]] = {}
    for path in families.candidate_files(family):
        text = path.read_text(encoding="utf-8")
        cuda = {families.FOLDER / family / name for name in re.findall(r'"([\w/]+\.cu)"', text)}
        for name in re.findall(r'"(\w+)"', text):
            found.setdefault(name, (path, *sorted(p for p in cuda if p.exists())))
    return found


def kernel_files(card: Card) -> list[Path]:
    """The sources of the card's arms and its family's notes, relative to the repository."""
    if not card.family:
        return []
    held = sources(card.family)
    own = [p for arm in (card.control, card.candidate, *card.beside) for p in held.get(arm, ())]
    notes = families.FOLDER / card.family / "NOTES.md"
    return [p.relative_to(REPOSITORY) for p in dict.fromkeys([*own, notes]) if p.exists()]


def family_files(family: str) -> list[Path]:
    """Every source of a family, relative to the repository."""
    every = sorted(p for p in (families.FOLDER / family).rglob("*") if p.suffix in LOADED)
    return [p.relative_to(REPOSITORY) for p in every]


@cache
def _notebook_words() -> Mapping[str, frozenset[str]]:
    return {p.stem: frozenset(re.findall(r"[\w-]+", p.read_text("utf-8"))) for p in sorted(NOTEBOOKS.glob("*.py"))}


def notebooks(card: Card) -> list[str]:
    """The notebooks that name the card, or are its family's."""
    return [stem for stem, words in _notebook_words().items() if card.id in words or stem == card.family]


def commands(card: Card, kinds: Iterable[str]) -> list[tuple[str, str]]:
    """(command, what it does): what reproduces the page."""
    files = "--evidence measured" if store.measured_devices(card.id) else "--rows control=FILE --rows candidate=FILE"
    how = {"recorded": "--evidence recorded", "measured": "--evidence measured", "imported": files}
    said = [(f"lab judge {card.word} {how[kind]}", "the verdict again") for kind in kinds if kind != "unmeasured"]
    said += [(f"lab write {card.word} --out {card.id}.html", "this page as one file")]
    if card.family:
        arms = dict.fromkeys((card.control, card.candidate))
        said += [(f"lab check {card.family} --candidate {arm}", "against the reference, no GPU needed") for arm in arms]
        said += [(f"lab measure {card.word} --peers", "time it again, on a GPU: rows are appended to profiles/")]
    return said


@dataclass(frozen=True)
class CardPage:
    """Everything that the page of one card shows; `views`: its verdicts, the measured first."""

    card: Card
    views: tuple[View, ...]

    @cached_property
    def arms(self) -> dict[str, dict[str, list[Measurement]]]:
        """device -> workload -> rows of its arms."""
        return {v.device: arms(self.card, v.device) for v in self.views if v.kind == "measured"}

    @cached_property
    def changes(self) -> dict[tuple[str, str], dict[str, float]]:
        """(run, workload) -> arm -> its change against the control in %, the candidate's by pairs as it is judged."""
        return {
            (own[0].run, workload): changes(self.card, own) for by in self.arms.values() for workload, own in by.items()
        }

    @property
    def rows(self) -> list[Measurement]:
        """The rows behind its arms."""
        return [row for by in self.arms.values() for own in by.values() for row in own]

    @property
    def figures(self) -> list[recorded.Figure]:
        """The recorded figures that its verdicts stand on."""
        judged = [v.judgement for v in self.views if v.kind == "recorded"]
        every = [verdict for j in judged for verdict in (j.verdict, *(claim for _, claim in j.claims))]
        ids = sorted({i for verdict in every for f in verdict.findings for i in f.ids})
        return [recorded.figure(i) for i in ids]

    @property
    def entries(self) -> list[ledger.Entry]:
        """The ledger's lines on it."""
        own = {case.verdict.id for case in self.card.recorded}
        return [e for e in ledger.entries() if e.verdict in own]

    @property
    def audited(self) -> list[Finding]:
        """The audit's findings on its verdicts."""
        return list(dict.fromkeys(f for v in self.views for f in v.audited))

    @property
    def committed(self) -> tuple[str, str] | None:
        """(commit, date) of the gate's last change."""
        found = history.gate_commit(self.card)
        return (found[0], f"{found[1]:%Y-%m-%d %H:%M} UTC") if found else None

    @property
    def row_text(self) -> str:
        """What its row of the workbench compares."""
        return vocabulary.words().row.get(self.card.row, "")


def _criterion(source: str) -> str:
    known = recorded.verdicts().get(source)
    return f"{known.cited} ({source})" if known else source


def values(shown: CardPage, keep: Callable[[str, str], str] | None) -> dict[str, Any]:
    """What templates/card_body.html asks for. keep: (name, SVG) -> the figure's address; None draws none."""
    card = shown.card
    plots: dict[str, list[tuple[str, str]]] = {device: [] for device in shown.arms}
    if keep is not None:
        for device, shown_here in plots.items():
            for name, drawn in pictures(card, device):
                shown_here.append((keep(f"{card.id}-{device}-{name}.svg", draw.svg(drawn.figure)), drawn.alt))
    from lab.write import prose

    beside = card.path.with_suffix(".md")
    text = beside.read_text(encoding="utf-8") if beside.exists() else ""
    return {
        "p": shown,
        "known": devices.ids(),
        "deciding": deciding,
        "criterion": _criterion(card.gate.source),
        "cited": lambda f: recorded.citation(f.source, str(f.params.get("lines", ""))),
        "ticks": TICKS,
        "fired": FIRED,
        "roles": ROLES,
        "plots": plots,
        "roles_of": {card.control: "control", card.candidate: "candidate", **dict.fromkeys(card.beside, "beside")},
        "of_roofline": of_roofline,
        "of_ceiling": of_ceiling,
        "versions": versions(shown.rows),
        "commands": commands(card, dict.fromkeys(v.kind for v in shown.views)),
        "files": kernel_files(card),
        "books": notebooks(card),
        "file": card.path.relative_to(REPOSITORY) if card.path.is_relative_to(REPOSITORY) else card.path.name,
        "prose": text,
        "flagged": prose.flagged(text, prose.figures(shown)) if text else [],
    }


def cards_of(found: Sequence[View]) -> dict[str, CardPage]:
    """card id -> its page, in the order of the rows."""
    by: dict[str, list[View]] = {c: [] for c in phases.cards()}
    for view in found:
        by[view.card.id].append(view)
    return {c: CardPage(phases.cards()[c], tuple(own)) for c, own in by.items()}


def counted(found: Iterable[View]) -> list[tuple[str, int]]:
    """(word, how often) in the judge's order of words."""
    count = Counter(v.word for v in found)
    return [(word, count[word]) for word in rules.WORDS if count[word]]
