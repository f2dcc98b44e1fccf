"""The small lab: `from lab import phase, family, device, rows, trace, ...`, objects that show themselves in a notebook.

Each is a thin coat over a room: its fields are the room's typed values, its methods one call of a room each, and what a
method returns shows itself too: a `Table`, a picture, a text. Whatever comes from a card, a row or a file is escaped
before it is shown. Nothing here needs a GPU; `measure()` says in a line why it cannot run where there is none.
"""

from __future__ import annotations

import html
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from lab import draw
from lab.base import devices as device_facts
from lab.base import own
from lab.base.errors import BadInput, nearest, refuse_unknown
from lab.bench import measure
from lab.card import phases as cards
from lab.card import recorded as recorded_figures
from lab.card.phases import Card
from lab.check import accuracy, families
from lab.draw import inline
from lab.judge import verdicts
from lab.judge.rules import Finding
from lab.judge.verdicts import Judgement
from lab.row import store
from lab.study import choices, limits, places, routes
from lab.trace import amdahl, categories, exposed, files, report, steady, summary, windows
from lab.trace.amdahl import Projection
from lab.trace.model import Trace as Timeline
from lab.trace.summary import Summary
from lab.write import figures, listing, notebook, render, shapes, writeup
from lab.write.notebook import Shown

SHOWN_ROWS = 40


def shown(value: Any) -> str:
    """A cell's text: floats with four digits, None empty."""
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def html_table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """An HTML table of cells, escaped but for Markup, without a head where every word of it is empty."""
    words = "".join(f"<th>{html.escape(word)}</th>" for word in header)
    head = f"<thead><tr>{words}</tr></thead>" if any(header) else ""
    cells = [[v if isinstance(v, Markup) else html.escape(shown(v)) for v in line] for line in lines]
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in cells)
    return f"<table>{head}<tbody>{body}</tbody></table>"


class Table(tuple[Any, ...]):
    """Typed rows and how to show them. columns: name -> what is shown of a row; title: above them."""

    columns: Mapping[str, Callable[[Any], Any]]
    title: str

    def __new__(cls, rows: Iterable[Any], columns: Mapping[str, Callable[[Any], Any]], title: str = "") -> Table:
        """The rows, in their order."""
        made = super().__new__(cls, rows)
        made.columns, made.title = columns, title
        return made

    def _lines(self) -> list[list[Any]]:
        return [[read(row) for read in self.columns.values()] for row in self]

    def frame(self) -> pd.DataFrame:
        """The columns as a pandas frame."""
        return pd.DataFrame(self._lines(), columns=[*self.columns])

    def __repr__(self) -> str:
        lines = pd.DataFrame([[shown(v) for v in line] for line in self._lines()], columns=[*self.columns])
        return "\n".join(filter(None, (self.title, lines.to_string(index=False, max_colwidth=40))))

    def _repr_html_(self) -> str:
        title = f"<p><b>{html.escape(self.title)}</b></p>" if self.title else ""
        more = f"<p>{len(self) - SHOWN_ROWS} more rows: .frame()</p>" if len(self) > SHOWN_ROWS else ""
        more = more if self else "<p>nothing: not measured</p>"
        return title + html_table([*self.columns], self._lines()[:SHOWN_ROWS]) + more


def _attributes(*names: str) -> dict[str, Callable[[Any], Any]]:
    def reader(name: str) -> Callable[[Any], Any]:
        return lambda item: getattr(item, name)

    return {name.replace("_", " "): reader(name) for name in names}


def _picture(make: Callable[[Card, str], figures.Picture], card: Card, place: str) -> Shown:
    """A card's figure for a device; where rows or a trace are missing, the line that says so."""
    device_id = device_facts.get(place).id
    try:
        found = make(card, device_id)
    except BadInput as refused:
        return notebook.text(f"{card.id}: not measured. {html.escape(str(refused), quote=False)}")
    return notebook.picture(found.figure, found.alt)


CHECK = _attributes("candidate", "workload", "status", "relative_error", "message")
ROW = _attributes("device", "phase", "arm", "name", "workload_id", "status", "median_us", "iqr_us", "relative_error",
                  "timer", "l2", "run")  # fmt: skip


def _checked(family: str, candidates: Sequence[str | None], workload: str | None) -> Table:
    gpu = "cuda" if families.gpu_capability() else "cpu"
    found = [c for name in candidates for c in accuracy.check_family(family, name, workload, device=gpu)]
    found.sort(key=lambda check: check.status == "skipped")  # those that ran come first
    return Table(found, CHECK, f"{family}: checked on {gpu}")


def conditions_html(findings: Sequence[Finding]) -> str:
    """A gate's conditions as an HTML table, each figure drawn with its interval at its line."""

    def strip(found: Finding) -> Markup:
        alt, source = html.escape(found.observed, quote=True), inline.uri(inline.plain(render.interval(found)))
        return Markup(f'<img alt="{alt}" width="240" src="{source}">' if found.seen else "")

    lines = [(f.role, str(f.condition), f.observed, f.state, strip(f)) for f in findings]
    return html_table(("role", "condition", "observed", "state", "at its line"), lines)


@dataclass(frozen=True)
class PhaseVerdict:
    """A verdict on one body of evidence: its word, its sentence, and each condition with its interval at its line."""

    judgement: Judgement

    @property
    def word(self) -> str:
        """GO, NO-GO, BLOCKED, ..."""
        return self.judgement.verdict.word

    @property
    def reason(self) -> str:
        """The sentence that decided it."""
        return self.judgement.verdict.reason

    @property
    def conditions(self) -> Table:
        """Each condition of the gate: what was observed, its interval in it, and whether it holds."""
        columns = {"role": lambda f: f.role, "condition": lambda f: str(f.condition), "observed": lambda f: f.observed,
                   "state": lambda f: f.state}  # fmt: skip
        return Table(self.judgement.verdict.findings, columns)

    def _title(self) -> str:
        j = self.judgement
        return f"{j.phase} on {j.device}, {j.evidence}: {self.word}"

    def __repr__(self) -> str:
        return f"{self._title()}. {self.reason}"

    def _repr_html_(self) -> str:
        note = f"<p>{html.escape(self.judgement.note)}</p>" if self.judgement.note else ""
        head = f"<p><b>{html.escape(self._title())}</b></p><p>{html.escape(self.reason)}.</p>{note}"
        return head + conditions_html(self.judgement.verdict.findings)


@dataclass(frozen=True)
class Phase:
    """One question and what can be asked of it; `card` has every field."""

    card: Card

    def __getattr__(self, name: str) -> Any:
        if name == "card" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.card, name)

    @property
    def devices(self) -> list[str]:
        """Where it has evidence: the recorded device, and those with measured rows."""
        said = [self.card.device] if self.card.recorded else []
        return list(dict.fromkeys([*said, *store.measured_devices(self.card.id)]))

    def _needs_kernels(self) -> str:
        if not self.card.family:
            raise BadInput(self.card.id, "has no kernels here, it is replayed from its source's figures", ".verdict()")
        families.interpret_on_cpu()
        return self.card.family

    def check(self, workload: str | None = None) -> Table:
        """Its control and candidate against the reference, on the family's small workloads or on one."""
        arms = dict.fromkeys((self.card.control, self.card.candidate))
        return _checked(self._needs_kernels(), [*arms], workload)

    def verdict(self, device: str | None = None) -> PhaseVerdict:
        """The verdict on a device: measured rows where there are some, else the recorded figures, newest case.

        Without either it is BLOCKED, and its note names what is missing; a device that recorded figures are not of is
        refused.
        """
        place = None if device is None else device_facts.get(device).id
        if waiting := _waiting(self.card, place):
            return PhaseVerdict(waiting)
        return self._on_evidence(place)

    def _on_evidence(self, device: str | None) -> PhaseVerdict:
        known = self.devices
        place = device or known[-1]
        if place in store.measured_devices(self.card.id):
            families.interpret_on_cpu()  # the judge may load the family, and kernels may be checked here later
            return PhaseVerdict(verdicts.judge_measured(self.card, place))
        if place == self.card.device and self.card.recorded:
            return PhaseVerdict(verdicts.judge_recorded([self.card])[-1])
        raise BadInput(self.card.id, f'no evidence of "{place}"', nearest(place, known))

    def rows(self, device: str | None = None) -> Table:
        """Its measured rows."""
        place = None if device is None else device_facts.get(device).id
        return Table(store.rows(place, self.card.id), ROW, "measured rows")

    def arms(self, device: str) -> Shown:
        """Control, candidate and rivals at each workload, as a figure; where rows are missing it says so."""
        return _picture(figures.arms, self.card, device)

    def at_the_line(self, device: str) -> PhaseVerdict | Shown:
        """The verdict there, each condition with its figure and interval at its line; without evidence it says so."""
        place = device_facts.get(device).id
        if not self.devices and (waiting := _waiting(self.card, place)):
            return notebook.text(f"{self.card.id}: {html.escape(waiting.note, quote=False)}")
        try:
            return self._on_evidence(place)
        except BadInput as refused:
            return notebook.text(f"{self.card.id}: not measured. {html.escape(str(refused), quote=False)}")

    def roofline(self, device: str) -> Shown:
        """The arms and rivals of its newest runs on a device's roofline, a roof for each pipe in use."""
        return _picture(figures.roofline, self.card, device)

    def kernels(self, device: str) -> Shown:
        """The kernels of control and candidate from the newest committed trace, and the waterfall between them."""
        return _picture(figures.breakdown, self.card, device)

    def breakdown(self, device: str) -> Table:
        """The same as a table: us of one step and its share; empty, with the reason as its title, without a trace."""
        place = device_facts.get(device).id
        columns = {"arm": lambda f: f[0], "workload": lambda f: f[1], "kernel": lambda f: f[2].category,
                   "us a step": lambda f: f[2].value, "share": lambda f: f[3]}  # fmt: skip
        try:
            ours, theirs, workload = figures.sides(self.card, place)
        except BadInput as refused:
            return Table((), columns, str(refused))
        arms = (("control", theirs), ("candidate", ours))
        found = [(arm, workload, part, part.value / whole.whole) for arm, whole in arms for part in whole.parts]
        return Table(found, columns, f"{self.card.id} on {place}: kernels of each arm")

    def writeup(self) -> Shown:
        """The note of the phase."""
        return notebook.text(writeup.write(self.card))

    def measure(self, **settings: Any) -> Table | Shown:
        """On a GPU: check and time its arms, append rows, return them. Elsewhere: one line that says why not."""
        try:
            self._needs_kernels()
            device = measure.require_gpu()
        except BadInput as refused:
            return notebook.text(html.escape(str(refused), quote=False))
        made = measure.measure(measure.plan(self.card), measure.Settings(**settings), None, device, lambda line: None)
        return Table(itertools.chain.from_iterable(made), ROW, f"{self.card.id}: measured now")

    def __repr__(self) -> str:
        return f"{self.card.id}: {self.card.question}"

    def _repr_html_(self) -> str:
        c = self.card
        asked = (("question", c.question), ("hypothesis", c.hypothesis), ("if it fails", c.null),
                 ("control", c.control), ("candidate", c.candidate), ("workloads", ", ".join(c.workloads)),
                 ("evidence of", ", ".join(self.devices) or "no device yet"))  # fmt: skip
        gate = [(role, str(condition)) for role, condition in c.gate.conditions()]
        head = f"<p><b>{html.escape(c.title)}</b> (<code>{html.escape(c.id)}</code>)</p>"
        return head + html_table(("", ""), asked) + html_table(("gate", ""), gate)


@dataclass(frozen=True)
class Kernel:
    """One candidate of a family; `candidate` has every field."""

    family: Family
    candidate: Any

    @property
    def name(self) -> str:
        """Its name, as cards and rows have it."""
        return str(self.candidate.name)

    def at(self, **axes: int | str) -> At:
        """It at any shape; the axes not named are those of the nearest listed workload."""
        workload = shapes.shaped(self.family.parts, self.candidate, axes)
        return At(self.family.parts, self.candidate, workload)

    def check(self, workload: str | None = None) -> Table:
        """Against the reference, on the small workloads or on one."""
        return self.family.check(self.name, workload)

    def rows(self, device: str | None = None) -> Table:
        """Its measured rows."""
        found = [row for row in self.family.rows(device) if row.name == self.name]
        return Table(found, ROW, f"{self.name}: measured rows")

    def __repr__(self) -> str:
        c = self.candidate
        missing = families.unmet(c, families.gpu_capability())
        return f"{self.family.name}/{c.name}, {c.precision}: {missing or 'runs here'}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>"


@dataclass(frozen=True)
class At(shapes.Shape):
    """A kernel at one shape: what shapes.Shape answers, and how it shows itself."""

    def sweep(self, axis: str, values: Sequence[int], beside: Sequence[str] = (), place: str | None = None) -> Shown:
        """Its time over one axis from rows, rivals beside it, and the floor: a figure."""
        where = device(place).id
        found = shapes.sweep(self, where, axis, values, beside)
        figure = draw.times(found.measured, f"{found.fixed}, {where}", axis, "us", floor=found.floor)
        return notebook.picture(figure, f"Times of {', '.join(found.measured) or 'nobody'} over {axis}, and the floor.")

    def __repr__(self) -> str:
        where = device().id
        floor, expected = self.floor(where), self.expected(where)
        said = f"{self.candidate.name} at {self.workload.id} on {where}: {self.config(where)}; "
        said += f"floor {floor.floor_us:.4g} us, bound by {floor.bound}; "
        return said + ("expected {:.4g} us ({})".format(*expected) if expected else "not routed to")

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>"


@dataclass(frozen=True)
class Family:
    """Kernels that compute the same thing; `["name"]` is one of them, `parts` what the folder declares."""

    parts: families.Family

    @property
    def name(self) -> str:
        """Its folder's word."""
        return self.parts.name

    @property
    def workloads(self) -> Table:
        """Every workload: its id, axes and whether it is checked or measured."""
        columns = {"id": lambda w: w.id, "role": lambda w: w.role, "axes": lambda w: str(dict(w.axes))}
        return Table(self.parts.cases.WORKLOADS, columns, f"{self.name}: workloads")

    def __getitem__(self, name: str) -> Kernel:
        return Kernel(self, self.parts.candidate(name))

    def check(self, candidate: str | None = None, workload: str | None = None) -> Table:
        """Candidates against the reference on this machine."""
        return _checked(self.name, [candidate], workload)

    def roofline(self, device: str) -> Table:
        """The floor of each measure workload and precision on a device."""
        place = device_facts.get(device)
        columns = {"workload": lambda f: f["workload"], "precision": lambda f: f["precision"],
                   "MB": lambda f: f["bytes"] / 1e6, "GFLOP": lambda f: f["flops"] / 1e9,
                   "floor us": lambda f: f["floor_us"], "bound": lambda f: f["bound"]}  # fmt: skip
        return Table(limits.floors(self.parts, place), columns, f"{self.name} on {place.name}: floors")

    def rows(self, device: str | None = None) -> Table:
        """Its measured rows."""
        return rows(family=self.name, device=device)

    def model(self, device: str) -> Shown:
        """What predicts its kernels' times there is worth at shapes that it has not seen, as a picture."""
        try:
            found = figures.model(routes.table(self.name, device))
        except BadInput as refused:
            return notebook.text(f"{self.name}: not measured. {html.escape(str(refused), quote=False)}")
        return notebook.picture(found.figure, found.alt)

    def validation(self, device: str) -> Table:
        """The same as numbers: each shape, and each model's shapes together, left out in turn."""
        try:
            found = routes.worth(routes.table(self.name, device)).validation
        except BadInput as refused:
            return Table((), {}, f"{self.name}: not measured. {refused}")
        names = ("predictions", "median", "p95", "coverage", "choices", "mean_regret", "worst_regret", "worst")
        lines = [{"left out": way, **score} for way, score in found.items()]
        columns = {name.replace("_", " "): operator.itemgetter(name) for name in ("left out", *names)}
        return Table(lines, columns, f"{self.name} on {device}: the model of its kernels' times")

    def lost(self, device: str) -> Table:
        """Where public models lose most time there because every kernel is far from its floor."""
        try:
            found, _ = places.survey(choices.router(self.name), device_facts.get(device))
        except BadInput as refused:
            return Table((), {}, f"{self.name}: not measured. {refused}")
        columns = {"place": lambda p: " ".join(f"{a}={v}" for a, v in p.axes.items()), "best": lambda p: p.candidate,
                   "us": lambda p: p.us, "floor us": lambda p: p.floor_us, "how": lambda p: p.how,
                   "models": lambda p: ", ".join(p.models)}  # fmt: skip
        return Table(found[: places.SHOWN], columns, f"{self.name} on {device}: most time lost")

    def __repr__(self) -> str:
        return f"{self.name}: {self.parts.title}, {len(self.parts.candidates)} candidates"

    def _repr_html_(self) -> str:
        capability = families.gpu_capability()
        lines = [(c.name, c.precision, families.unmet(c, capability) or "runs here")
                 for c in self.parts.candidates.values()]  # fmt: skip
        return f"<p><b>{html.escape(repr(self))}</b></p>" + html_table(("candidate", "precision", "here"), lines)


@dataclass(frozen=True)
class Device:
    """A GPU's facts, each with its source; `facts` has the typed values."""

    facts: device_facts.Device

    def __getattr__(self, name: str) -> Any:
        if name == "facts" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.facts, name)

    def _table(self) -> Table:
        f = self.facts
        every = {**f.facts, **{f"peak.{k}": v for k, v in f.peaks.items()},
                 **{f"ceiling.{k}": v for k, v in f.ceilings.items()}}  # fmt: skip
        columns = {"fact": lambda i: i[0], "value": lambda i: f"{i[1].value:g} {i[1].unit}",
                   "kind": lambda i: i[1].kind, "source": lambda i: i[1].source}  # fmt: skip
        return Table(every.items(), columns, f"{f.name} ({f.id})")

    def rows(self) -> Table:
        """Every row measured on it."""
        return rows(device=self.facts.id)

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


@dataclass(frozen=True)
class Trace:
    """A profile's timeline; `timeline` has every event."""

    timeline: Timeline
    path: Path

    def summary(self) -> Summary:
        """Span, busy, idle, categories, kernels, warnings: the typed answer of `lab trace`."""
        return summary.summarise(self.timeline, categories.load(None))

    def breakdown(self) -> Table:
        """Categories with their share of the GPU's time."""
        columns = {"category": lambda c: c.name, "sum us": lambda c: c.sum_us, "launches": lambda c: c.count}
        return Table(self.summary().categories, columns, f"{self.path.name}: by category")

    def exposed(self) -> Table:
        """Categories with the time in which nothing else ran: what a faster one can gain at most."""
        columns = {"category": lambda c: c[0], "exposed us": lambda c: c[1]}
        return Table(exposed.exposed_us(self.timeline).items(), columns, f"{self.path.name}: exposed time")

    def gaps(self) -> Table:
        """The longest stretches in which a GPU did nothing, why, and the kernels around them."""
        columns = _attributes("start_us", "us", "cause", "after", "before")
        return Table(self.summary().gaps, columns, f"{self.path.name}: gaps")

    def what_if(self, category: str, speedup: float) -> Projection:
        """What a faster category gives of throughput: `gain_pct` and `ceiling_pct`, from exposed to union time."""
        found = exposed.what_if(self.timeline, category=[category])
        return amdahl.project(found.share, amdahl.Interval.of(speedup), assumed=exposed.ASSUMED)

    def steady(self) -> Trace:
        """The repeating decode steps only; a refusal where there are none."""
        return Trace(steady.steady_decode(self.timeline), self.path)

    def nvtx(self, glob: str) -> Trace:
        """What was launched inside these NVTX ranges."""
        return Trace(windows.by_nvtx(self.timeline, glob), self.path)

    def __repr__(self) -> str:
        return report.render(self.summary())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _waiting(card: Card, device: str | None) -> Judgement | None:
    """BLOCKED, as `lab judge` says it of a card without evidence (on a device).

    None where there are rows, or recorded figures.
    """
    there = store.measured_devices(card.id)
    if card.recorded or (device in there if device else there):
        return None
    if card.own:
        families.refuse_card(card)
    return verdicts.waiting(card, device)


def phase(phase_id: str) -> Phase:
    """A card by its id, or by its path, which brings its folder; an unknown one is refused with the nearest."""
    own.bring(phase_id)
    return Phase(cards.card(phase_id))


def phases(system: str | None = None) -> Table:
    """Every card, or a system's."""
    every = [Phase(c) for c in cards.cards().values()]
    systems = sorted({p.system for p in every})
    if system is not None:
        refuse_unknown("phases", "system", system, systems)
    found = [p for p in every if system in (None, p.system)]
    return Table(found, _attributes("row", "id", "system", "title"), "cards")


def family(name: str) -> Family:
    """A folder of kernels/ by its word; kernels run in Triton's interpreter where there is no GPU."""
    families.interpret_on_cpu()
    return Family(families.load(name))


def device(name: str | None = None) -> Device:
    """A device by its id or the name that the driver reports; without one, that with most measured rows here."""
    if name is None:
        runs = [path.parts[-4] for path in store.measured()]
        if not runs:
            raise BadInput(store.FOLDER, "no device has rows", "name a device; `lab measure` makes rows on a GPU")
        name = max(sorted(set(runs)), key=runs.count)
    return Device(device_facts.get(name))


def devices() -> Table:
    """Every device with its bandwidth."""
    columns = {"id": lambda d: d.id, "name": lambda d: d.name,
               "bandwidth": lambda d: d.memory_bandwidth.shown() if d.memory_bandwidth else "unknown"}  # fmt: skip
    return Table(map(device, device_facts.ids()), columns, "devices")


def rows(family: str | None = None, phase: str | None = None, device: str | None = None) -> Table:
    """The measured rows of profiles/ that pass the filters, oldest run first."""
    return Table(listing.measured(family, phase, device), ROW, "measured rows")


def trace(file: str | Path) -> Trace:
    """A profile of any tool that `lab trace` reads, or a stored trace."""
    return Trace(files.read(Path(file)), Path(file))


def recorded(figure_id: str) -> recorded_figures.Figure:
    """A figure that a source published, by its id."""
    return recorded_figures.figure(figure_id)


def value(figure_id: str, withdrawn: bool = True) -> float:
    """The number of a recorded figure; with withdrawn=False one that its source took back is refused."""
    return float((recorded_figures.figure if withdrawn else recorded_figures.target)(figure_id).value)


def judgements(*phase_ids: str, device: str | None = None) -> Table:
    """Verdicts of these cards, of all without ids: the recorded ones, or those on a device's measured rows.

    One of one's own that is named and has neither is BLOCKED; the repository's are left out.
    """
    named = [phase(i).card for i in phase_ids]
    chosen = named or [*cards.cards().values()]
    place = None if device is None else device_facts.get(device).id
    if place is None:
        found = verdicts.judge_recorded(chosen)
    else:
        found = [verdicts.judge_measured(c, place) for c in chosen if place in store.measured_devices(c.id)]
    found += [waiting for c in named if c.own and (waiting := _waiting(c, place))]
    columns = {"phase": lambda j: j.phase, "device": lambda j: j.device, "verdict": lambda j: j.verdict.word,
               "source": lambda j: j.source_said, "because": lambda j: j.verdict.reason}  # fmt: skip
    return Table(found, columns, "verdicts")
