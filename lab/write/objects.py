"""The small lab: `from lab import phase, family, device, rows, trace, ...`, objects that show themselves in a notebook.

Each is a thin coat over a room: its fields are the room's typed values, its methods one call of a room each, and what a
method returns shows itself too: a `Table`, a picture, a text. Whatever comes from a card, a row or a file is escaped
before it is shown. Nothing here needs a GPU; `measure()` says in a line why it cannot run where there is none.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.base import devices as device_facts
from lab.base.errors import BadInput, nearest
from lab.card import phases as cards
from lab.card import recorded as recorded_figures
from lab.check import accuracy, families
from lab.judge import verdicts
from lab.judge.verdicts import Judgement
from lab.place import roofline
from lab.row import store
from lab.write import listing, writeup

if TYPE_CHECKING:
    import pandas as pd

    from lab.card.phases import Card
    from lab.row.records import Measurement
    from lab.trace.model import Trace as Timeline
    from lab.write.notebook import Shown

SHOWN_ROWS = 40


def shown(value: Any) -> str:
    """A cell's text: floats with four digits, None empty."""
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def html_table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """An HTML table of escaped cells."""
    head = "".join(f"<th>{html.escape(word)}</th>" for word in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(shown(v))}</td>" for v in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Table(Sequence[Any]):
    """Typed rows and how to show them. items: the rows; columns: name -> what is shown of one; title: above them."""

    items: tuple[Any, ...]
    columns: Mapping[str, Callable[[Any], Any]]
    title: str = ""

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: Any) -> Any:
        return self.items[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def _lines(self) -> list[list[Any]]:
        return [[read(item) for read in self.columns.values()] for item in self.items]

    def frame(self) -> pd.DataFrame:
        """The columns as a pandas frame."""
        import pandas as pd

        return pd.DataFrame(self._lines(), columns=[*self.columns])

    def __repr__(self) -> str:
        lines = [[shown(v) for v in line] for line in self._lines()]
        wide = [min(40, max(map(len, column))) for column in zip([*self.columns], *lines, strict=True)]
        table = ["  ".join(f"{v[:w]:{w}}" for v, w in zip(line, wide, strict=True)).rstrip() for line in
                 ([*self.columns], *lines)]  # fmt: skip
        return "\n".join(([self.title] if self.title else []) + table)

    def _repr_html_(self) -> str:
        title = f"<p><b>{html.escape(self.title)}</b></p>" if self.title else ""
        more = f"<p>{len(self) - SHOWN_ROWS} more rows: .frame()</p>" if len(self) > SHOWN_ROWS else ""
        return title + html_table([*self.columns], self._lines()[:SHOWN_ROWS]) + more


def _attributes(*names: str) -> dict[str, Callable[[Any], Any]]:
    def reader(name: str) -> Callable[[Any], Any]:
        return lambda item: getattr(item, name)

    return {name.replace("_", " "): reader(name) for name in names}


CHECK = {**_attributes("candidate", "workload", "status", "relative_error", "message")}
ROW = {**_attributes("device", "phase", "arm", "name", "workload_id", "status", "median_us", "iqr_us"),
       **_attributes("relative_error", "timer", "l2", "run")}  # fmt: skip


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
        return head + self.conditions._repr_html_()


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
        name = self._needs_kernels()
        gpu = "cuda" if families.gpu_capability() else "cpu"
        arms = dict.fromkeys((self.card.control, self.card.candidate))
        found = [c for arm in arms for c in accuracy.check_family(name, arm, workload, device=gpu)]
        return Table(tuple(found), CHECK, f"{self.card.id}: checked on {gpu}")

    def verdict(self, device: str | None = None) -> PhaseVerdict:
        """The verdict on a device: measured rows where there are some, else the recorded figures, newest case."""
        known = self.devices
        if device is None and not known:
            raise BadInput(self.card.id, "has no evidence yet", "measure it, or see lab.phases()")
        place = known[-1] if device is None else device_facts.get(device).id
        if place in store.measured_devices(self.card.id):
            return PhaseVerdict(verdicts.judge_measured(self.card, place))
        if place == self.card.device and self.card.recorded:
            return PhaseVerdict(verdicts.judge_recorded([self.card])[-1])
        raise BadInput(self.card.id, f'no evidence of "{place}"', nearest(place, known))

    def rows(self, device: str | None = None) -> Table:
        """Its measured rows."""
        return rows(phase=self.card.id, device=device)

    def roofline(self, device: str) -> Shown:
        """The arms and rivals of its newest runs on a device's roofline, a roof for each pipe in use."""
        from lab import draw
        from lab.write import notebook

        place = device_facts.get(device)
        newest = {(r.name, r.workload_id): r for r in self._measured(place.id) if r.ok}
        peers = {r.name for r in newest.values() if r.arm == "peer"}
        points = [
            draw.point(f"{r.name} {r.workload_id}", r.flops or 0.0, r.bytes or 0.0, r.time_us or 0.0,
                       "peer" if r.name in peers else "measured")
            for r in newest.values()
        ]  # fmt: skip
        pipes = sorted({r.pipe for r in newest.values() if r.pipe in place.peaks})
        figure = draw.roofline(place, points, pipes or ("bf16",), f"{place.name}: {self.card.id}")
        return notebook.picture(
            figure, f"Roofline of {place.name} with {len(points)} measured points of {self.card.id}."
        )

    def _measured(self, device: str) -> list[Measurement]:
        found = store.rows(device, self.card.id)
        if not found:
            store.refuse_unmeasured(self.card.id, device)
        return found

    def breakdown(self, device: str) -> Table:
        """Each arm's kernels in the newest committed trace of a device, us of one step and its share."""
        from lab.trace import breakdowns, stored, windows

        place = device_facts.get(device).id
        files = sorted(store.FOLDER.glob(f"{place}/{self.card.id}/*/trace.parquet"))
        if not files:
            traced = sorted({p.parent.parent.name for p in store.FOLDER.glob("*/*/*/trace.parquet")})
            raise BadInput(self.card.id, f"no trace from {place} is committed", f"traced are {', '.join(traced)}")
        timeline, found = stored.load(files[-1]), []
        for arm in ("control", "candidate"):
            for workload in self.card.workloads:
                try:
                    window = windows.by_nvtx(timeline, f"{self.card.id}/{arm}/{workload}/step *")
                except BadInput:  # the trace was taken on one of the workloads
                    continue
                whole = breakdowns.from_trace(window, count=window.steps or 1.0, per="step")
                found += [(arm, workload, part, part.value / whole.whole, whole.unit) for part in whole.parts]
        columns = {"arm": lambda f: f[0], "workload": lambda f: f[1], "category": lambda f: f[2].category,
                   "us a step": lambda f: f[2].value, "share": lambda f: f[3]}  # fmt: skip
        return Table(tuple(found), columns, f"{self.card.id} on {place}: kernels of each arm, {files[-1].parent.name}")

    def writeup(self) -> Shown:
        """The note of the phase."""
        from lab.write import notebook

        return notebook.text(writeup.write(self.card))

    def measure(self, **settings: Any) -> Table | Shown:
        """On a GPU: check and time its arms, append rows, return them. Elsewhere: one line that says why not."""
        from lab.write import notebook

        try:
            self._needs_kernels()
            from lab.bench import measure

            device = measure.require_gpu()
        except BadInput as refused:
            return notebook.text(html.escape(str(refused), quote=False))
        made = measure.measure(measure.plan(self.card), measure.Settings(**settings), None, device, lambda line: None)
        return Table(tuple(row for several in made for row in several), ROW, f"{self.card.id}: measured now")

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

    def check(self, workload: str | None = None) -> Table:
        """Against the reference, on the small workloads or on one."""
        return self.family.check(self.name, workload)

    def rows(self, device: str | None = None) -> Table:
        """Its measured rows."""
        found = rows(family=self.family.name, device=device)
        return Table(tuple(r for r in found if r.name == self.name), ROW, f"{self.name}: measured rows")

    def __repr__(self) -> str:
        c = self.candidate
        missing = families.unmet(c, families.gpu_capability())
        return f"{self.family.name}/{c.name}, {c.precision}: {missing or 'runs here'}"

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
        return Table(tuple(self.parts.cases.WORKLOADS), columns, f"{self.name}: workloads")

    def __getitem__(self, name: str) -> Kernel:
        return Kernel(self, self.parts.candidate(name))

    def check(self, candidate: str | None = None, workload: str | None = None) -> Table:
        """Candidates against the reference on this machine."""
        gpu = "cuda" if families.gpu_capability() else "cpu"
        found = accuracy.check_family(self.name, candidate, workload, device=gpu)
        return Table(tuple(found), CHECK, f"{self.name}: checked on {gpu}")

    def roofline(self, device: str) -> Table:
        """The floor of each measure workload and precision on a device."""
        place, found = device_facts.get(device), []
        for w in self.parts.cases.WORKLOADS:
            for precision in sorted({c.precision for c in self.parts.candidates.values() if not c.refuses(w)}):
                cost = self.parts.cost(w, precision)
                if w.role == "measure" and cost.pipe in place.peaks:
                    floor = roofline.place(place, cost.flops, cost.bytes, cost.pipe)
                    found.append((w.id, precision, cost.bytes / 1e6, cost.flops / 1e9, floor.floor_us, floor.bound))
        names = ("workload", "precision", "MB", "GFLOP", "floor us", "bound")
        columns = {n: (lambda place: lambda line: line[place])(i) for i, n in enumerate(names)}
        return Table(tuple(found), columns, f"{self.name} on {place.name}: floors")

    def rows(self, device: str | None = None) -> Table:
        """Its measured rows."""
        return rows(family=self.name, device=device)

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
        return Table(tuple(every.items()), columns, f"{f.name} ({f.id})")

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

    def summary(self) -> Any:
        """Span, busy, idle, categories, kernels, warnings: the typed answer of `lab trace`."""
        from lab.trace import categories, summary

        return summary.summarise(self.timeline, categories.load(None))

    def breakdown(self) -> Table:
        """Categories with their share of the GPU's time."""
        columns = {"category": lambda c: c.name, "sum us": lambda c: c.sum_us, "launches": lambda c: c.count}
        return Table(tuple(self.summary().categories), columns, f"{self.path.name}: by category")

    def steady(self) -> Trace:
        """The repeating decode steps only; a refusal where there are none."""
        from lab.trace import steady

        return Trace(steady.steady_decode(self.timeline), self.path)

    def nvtx(self, glob: str) -> Trace:
        """What was launched inside these NVTX ranges."""
        from lab.trace import windows

        return Trace(windows.by_nvtx(self.timeline, glob), self.path)

    def __repr__(self) -> str:
        from lab.trace import report

        return report.render(self.summary())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def phase(phase_id: str) -> Phase:
    """A card by its id; an unknown one is refused with the nearest."""
    return Phase(cards.card(phase_id))


def phases(system: str | None = None) -> Table:
    """Every card, or a system's."""
    every = tuple(Phase(c) for c in cards.cards().values())
    systems = sorted({p.system for p in every})
    if system is not None and system not in systems:
        raise BadInput("phases", f'no system is named "{system}"', nearest(system, systems))
    columns = {"row": lambda p: p.row, "id": lambda p: p.id, "system": lambda p: p.system, "title": lambda p: p.title}
    return Table(tuple(p for p in every if system in (None, p.system)), columns, "cards")


def family(name: str) -> Family:
    """A folder of kernels/ by its word; kernels run in Triton's interpreter where there is no GPU."""
    families.interpret_on_cpu()
    return Family(families.load(name))


def device(name: str) -> Device:
    """A device by its id or the name that the driver reports."""
    return Device(device_facts.get(name))


def devices() -> Table:
    """Every device with its bandwidth."""
    columns = {"id": lambda d: d.id, "name": lambda d: d.name, "bandwidth": lambda d: d.bandwidth.shown()}
    return Table(tuple(device(i) for i in device_facts.ids()), columns, "devices")


def rows(family: str | None = None, phase: str | None = None, device: str | None = None) -> Table:
    """The measured rows of profiles/ that pass the filters, oldest run first."""
    return Table(tuple(listing.measured(family, phase, device)), ROW, "measured rows")


def trace(file: str | Path) -> Trace:
    """A profile of any tool that `lab trace` reads, or a stored trace."""
    from lab.trace import files

    return Trace(files.read(Path(file)), Path(file))


def recorded(figure_id: str) -> recorded_figures.Figure:
    """A figure that a source published, by its id."""
    return recorded_figures.figure(figure_id)


def value(figure_id: str, withdrawn: bool = True) -> float:
    """The number of a recorded figure; with withdrawn=False one that its source took back is refused."""
    return float((recorded_figures.figure if withdrawn else recorded_figures.target)(figure_id).value)


def judgements(*phase_ids: str, device: str | None = None) -> Table:
    """Verdicts of these cards, of all without ids: the recorded ones, or those on a device's measured rows."""
    chosen = [cards.card(i) for i in phase_ids] or [*cards.cards().values()]
    if device is None:
        found = verdicts.judge_recorded(chosen)
    else:
        place = device_facts.get(device).id
        found = [verdicts.judge_measured(c, place) for c in chosen if place in store.measured_devices(c.id)]
    columns = {"phase": lambda j: j.phase, "device": lambda j: j.device, "verdict": lambda j: j.verdict.word,
               "source": lambda j: j.recorded_verdict, "because": lambda j: j.verdict.reason}  # fmt: skip
    return Table(tuple(found), columns, "verdicts")
