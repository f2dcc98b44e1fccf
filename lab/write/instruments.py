"""The three instruments: widgets above, and below them what the rooms say about what the widgets name.

`phase()` asks a card, `profile()` a profile of one's own, `kernel()` a kernel at any shape. Each is a `Panel`: its
controls by name, and one HTML widget that is written anew whenever a control changes. So what a reader sees is a
function of the controls alone, which a test can call without a browser. The HTML of the first state is the cell's
output too: the committed notebook, and a page without a running kernel, show it as it was.

Nothing here computes: a word is the judge's, a time a row's, a floor the roofline's. What is missing is said in words.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ipywidgets
from msgspec.structs import replace

from lab import draw
from lab.base import devices, own
from lab.base.errors import REPOSITORY, BadInput
from lab.card import phases
from lab.card.phases import Card
from lab.check import families
from lab.draw import inline
from lab.judge import verdicts
from lab.judge.verdicts import Judgement
from lab.row import store
from lab.trace import amdahl, categories, exposed, files, steady, summary, windows
from lab.trace.amdahl import Interval
from lab.trace.model import Trace
from lab.write import figures, objects, shapes
from lab.write.objects import html_table

STYLE = (
    "<style>.widget-html td, .widget-html th { padding: .1em 1em .1em 0; text-align: left; line-height: 1.4 }</style>"
)
NOT_MEASURED, REFUSED = "not measured", "refused"
RECORDED, MEASURED = "recorded", "measured"
ANY = "any device"  # of a card of one's own that names none
COLOURS = {"GO": draw.GREEN, "CONDITIONAL-GO": draw.GREEN, "NO-GO": draw.VERMILLION, "INVALID": draw.VERMILLION}


@dataclasses.dataclass(frozen=True)
class Panel:
    """Controls by name, and what they show as HTML."""

    controls: Mapping[str, Any]
    shown: Any

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        rows = [ipywidgets.HBox([*self.controls.values()], layout=ipywidgets.Layout(flex_flow="row wrap")), self.shown]
        live = ipywidgets.VBox(rows)._repr_mimebundle_()
        told = (f"{name}: {getattr(widget, 'value', widget.description)}" for name, widget in self.controls.items())
        return {**live, "text/html": self.shown.value.removeprefix(STYLE), "text/plain": ", ".join(told)}

    @property
    def html(self) -> str:
        """What it shows now."""
        return str(self.shown.value)


def _panel(
    controls: Mapping[str, Any],
    render: Callable[[], Iterable[str]],
    settle: Callable[[Any], None] = lambda changed: None,
) -> Panel:
    """Write `shown` anew when a control changes; settle: sets the controls that depend on the one that changed."""
    shown, settling = ipywidgets.HTML(), [False]

    def follow(change: Any) -> None:
        if settling[0]:
            return
        settling[0] = True
        try:
            settle(change["owner"])
            shown.value = "".join([STYLE, *render()])
        except BadInput as refused:
            shown.value = _note(str(refused))
        finally:
            settling[0] = False

    for widget in controls.values():
        if not isinstance(widget, ipywidgets.Button | ipywidgets.HTML):
            widget.observe(follow, names="value")
    follow({"owner": None})
    return Panel(controls, shown)


def _note(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _head(text: str) -> str:
    return f"<h4>{html.escape(text)}</h4>"


def _image(make: Callable[[], figures.Picture]) -> str:
    """A picture as HTML, or in a line why there is none."""
    try:
        picture = make()
    except BadInput as refused:
        return _note(f"{NOT_MEASURED}: {refused}" if "no measured rows" in str(refused) else str(refused))
    alt = html.escape(picture.alt, quote=True)
    return f'<img style="max-width:100%" alt="{alt}" src="{inline.uri(draw.svg(picture.figure))}">'


# A card ---------------------------------------------------------------------------------------------------------------


def judged(card: Card, device: str, kind: str, line: float | None = None, which: int = 0) -> Judgement:
    """The verdict on a device's rows, or on the recorded figures, with the line of one required condition moved.

    line: the threshold of required condition number `which`, None for the card's own. Raises BadInput without evidence.
    """
    moved = card
    if line is not None:
        require = list(card.gate.require)
        require[which] = replace(require[which], threshold=line)
        moved = replace(card, gate=replace(card.gate, require=tuple(require)))
    if kind == RECORDED:
        if not card.recorded:
            raise BadInput(card.id, "has no recorded figures", f"choose {MEASURED}")
        return verdicts.judge_recorded([moved])[-1]
    store.refuse_unmeasured(card.id, device)
    found = verdicts.judge_measured(moved, device)
    return found if line is None else dataclasses.replace(found, note="the line was moved by hand")


def phase(card: str, device: str | None = None) -> Panel:
    """A card's question, arms, roofline, kernels and verdict; a slider moves a line of its gate and the word follows.

    device: default the one with rows of the card. Without rows the verdict is told as not measured. `measure` runs the
    comparison on this GPU, and says why not where there is none.
    """
    families.interpret_on_cpu()
    own.bring(card)
    asked = phases.card(card)
    named = card if card.endswith(".toml") else asked.id
    choose = ipywidgets.Combobox(value=named, options=[*phases.cards()], description="card", continuous_update=False)
    place = devices.get(device).id if device else _place(asked)
    where = ipywidgets.Dropdown(
        description="device", options=[(ANY, ""), *((name, name) for name in devices.ids())], value=place
    )
    kind = ipywidgets.Dropdown(description="evidence", options=[MEASURED, RECORDED], value=_kind(asked))
    which = ipywidgets.Dropdown(description="condition", options=_conditions(asked))
    line = ipywidgets.FloatSlider(description="line", readout_format=".4g", continuous_update=False)
    measure = ipywidgets.Button(description="measure on this GPU")
    said = ipywidgets.HTML()

    def settle(changed: Any) -> None:
        now = phases.card(choose.value)
        if changed is choose:
            where.value, kind.value, which.options = _place(now), _kind(now), _conditions(now)
        if changed is not line and which.value is not None:
            own = now.gate.require[which.value].threshold
            low, high = _range(now, where.value, kind.value, which.value)
            line.min, line.max = min(low, line.min), max(high, line.max)  # never min > max on the way
            line.value, line.step = own, (high - low) / 200
            line.min, line.max = low, high

    def render() -> Iterable[str]:
        return _phase_page(phases.card(choose.value), where.value, kind.value, line.value, which.value)

    def run(_: Any) -> None:
        said.value = _note(f"measuring {choose.value} ...")
        done = objects.Phase(phases.card(choose.value)).measure()
        said.value = done._repr_html_() if hasattr(done, "_repr_html_") else f"<p>{done.bundle['text/markdown']}</p>"
        if hasattr(done, "_repr_html_"):
            panel.shown.value = "".join([STYLE, *render()])

    controls = {"card": choose, "device": where, "evidence": kind, "condition": which, "line": line,
                "measure": measure, "said": said}  # fmt: skip
    panel = _panel(controls, render, settle)
    measure.on_click(run)
    return panel


def _range(card: Card, device: str, kind: str, which: int) -> tuple[float, float]:
    """The slider's range: the card's line and the figure, with room on both sides."""
    values = [card.gate.require[which].threshold]
    try:
        found = judged(card, device, kind).verdict.findings
        values += [f.seen.value for f in found if f.condition == card.gate.require[which] and f.seen]
    except BadInput:
        pass
    room = max(max(values) - min(values), 0.25 * max(map(abs, values)), 1e-3)
    return min(values) - room, max(values) + room


def _place(card: Card) -> str:
    return [card.device, *store.measured_devices(card.id)][-1]


def _kind(card: Card) -> str:
    return MEASURED if store.measured_devices(card.id) or not card.recorded else RECORDED


def _conditions(card: Card) -> list[tuple[str, int]]:
    return [(str(c), i) for i, c in enumerate(card.gate.require) if not c.than]


def _phase_page(card: Card, device: str, kind: str, at: float, which: int | None) -> Iterable[str]:
    line = None if which is None or at == card.gate.require[which].threshold else at
    yield f"<p><b>{html.escape(card.title)}</b> ({html.escape(card.id)})</p>"
    yield html_table(("", ""), [("question", card.question), ("if it fails", card.null),
                                ("control", card.control), ("candidate", card.candidate)])  # fmt: skip
    try:
        found = judged(card, device, kind, line, which or 0)
    except BadInput as refused:
        if card.own and kind == MEASURED:
            yield _word(verdicts.waiting(card, device))
            return
        yield _head(NOT_MEASURED)
        yield _note(str(refused))
        return
    yield _word(found)
    if line is not None:
        yield _note(f"With the card's own line: {judged(card, device, kind).verdict.word}.")
    yield objects.conditions_html(found.verdict.findings)
    if kind == RECORDED:
        figures_used = dict.fromkeys(i for f in found.verdict.findings for i in f.ids)
        yield _note("Recorded figures: " + ", ".join(figures_used))
        return
    yield _image(lambda: figures.arms(card, device))
    yield _image(lambda: figures.roofline(card, device))
    yield _image(lambda: figures.breakdown(card, device))


def _word(found: Judgement) -> str:
    word, colour = found.verdict.word, COLOURS.get(found.verdict.word, draw.INK)
    chip = f'<b style="color:{colour};border:2px solid {colour};padding:0 .4em">{html.escape(word)}</b>'
    note = f" {html.escape(found.note)}." if found.note else ""
    return f"<p>{chip} {html.escape(found.verdict.reason)}.{note}</p>"


# A profile ------------------------------------------------------------------------------------------------------------

WHOLE, STEADY = "whole capture", "steady decode steps"


def default_profile() -> Path:
    """The newest committed trace of a card of attention; raises BadInput where there is none."""
    found = sorted(store.found("*/p6-kernel/*/trace.parquet"), key=lambda p: p.parent.name)
    if not found:
        raise BadInput(store.FOLDER, "no trace of p6-kernel is committed", "give the path of a profile of your own")
    return found[-1]


def windowed(timeline: Trace, window: str) -> Trace:
    """The whole capture, its steady decode steps, or what was launched in the NVTX ranges of a glob."""
    if window in ("", WHOLE):
        return timeline
    return steady.steady_decode(timeline) if window == STEADY else windows.by_nvtx(timeline, window)


def profile(file: str | Path | None = None) -> Panel:
    """Any profile that `lab trace` reads: where the time went, exposed time, idle time, and what a faster part gives.

    file: a path, default p6-kernel's newest committed trace. window: "steady decode steps" or a glob of NVTX ranges.
    """
    given = Path(file) if file else default_profile()
    start = given.relative_to(REPOSITORY) if given.is_absolute() and given.is_relative_to(REPOSITORY) else given
    path = ipywidgets.Text(value=str(start), description="profile", continuous_update=False)
    window = ipywidgets.Combobox(value=WHOLE, options=[WHOLE, STEADY], description="window", continuous_update=False)
    part = ipywidgets.Dropdown(description="part")
    faster = ipywidgets.FloatLogSlider(value=2.0, min=0, max=2, step=0.05, description="times faster",
                                       continuous_update=False)  # fmt: skip
    read: dict[Path, Trace] = {}

    def timeline() -> Trace:
        place = Path(path.value).expanduser()
        place = place if place.is_absolute() or place.exists() else REPOSITORY / place
        if place not in read:
            read[place] = files.read(place)
        return windowed(read[place], window.value)

    def settle(changed: Any) -> None:
        if changed in (None, path, window):
            names = [c.name for c in summary.summarise(timeline(), categories.default()).categories]
            before = part.value
            part.options = names
            part.value = before if before in names else next(iter(names), None)

    def render() -> Iterable[str]:
        return _profile_page(timeline(), part.value, faster.value)

    return _panel({"path": path, "window": window, "part": part, "faster": faster}, render, settle)


def _profile_page(timeline: Trace, part: str | None, faster: float) -> Iterable[str]:
    found = summary.summarise(timeline, categories.default())
    span = found.span_us
    yield _head(f"{found.source}, {found.window}, {found.tool}")
    if span:
        busy = found.busy_union_us or 0.0
        said = f"{span:,.1f} us, of which the GPU was busy {busy:,.1f} ({busy / span:.1%})"
        yield _note(f"{said} and idle {found.idle_us:,.1f}. Summed times exceed the span by what ran side by side.")
    for warning in (*found.refused, *found.warnings):
        yield _note(warning)
    columns = ("category", "launches", "sum us", "exposed us", "hidden behind", "of busy")
    yield html_table(columns, [
        (c.name, c.count, c.sum_us, _known(c.exposed_us), next(iter(c.behind), ""),
         NOT_MEASURED if c.share_of_busy is None else f"{c.share_of_busy:.1%}")
        for c in found.categories
    ])  # fmt: skip
    if span:
        causes = [(d.device, cause, us) for d in found.per_device for cause, us in d.idle_by.items()]
        yield _head("Idle time by cause")
        yield html_table(("GPU", "cause", "us"), causes)
        yield _image(lambda: figures.Picture(draw.timeline(timeline), "Kernels, copies and idle time over the window."))
    chosen = next((c for c in found.categories if c.name == part), None)
    if chosen and span and chosen.kind != "wait" and not found.refused:
        yield _head(f"What if {part} were {faster:.3g} times as fast?")
        asked = exposed.what_if(timeline, category=[chosen.name])
        promised = amdahl.project(asked.share, Interval.of(faster), assumed=exposed.ASSUMED)
        gain, most = promised.gain_pct, promised.ceiling_pct
        yield _note(
            f"Exposed {asked.share.mid:.1%} of the span: {gain.mid:+.1f} % throughput ({gain.low:+.1f} to "
            f"{gain.high:+.1f}), at most {most.high:+.1f} % with the part removed; {promised.assumed}."
        )
        yield _head("The longest gaps")
        gaps = [(g.start_us, g.us, g.after, g.before, g.cause) for g in found.gaps]
        yield html_table(("at us", "idle us", "after", "before", "mostly"), gaps)
    yield _head("Kernels")
    yield html_table(("kernel", "category", "launches", "sum us"),
                     [(k.short_name, k.category, k.count, k.sum_us) for k in found.top_kernels])  # fmt: skip


def _known(value: Any) -> Any:
    return NOT_MEASURED if value is None else value


# A kernel -------------------------------------------------------------------------------------------------------------


def kernel(family: str, candidate: str, shape: str = "", device: str | None = None, axis: str = "", values: str = "",
           beside: str = "") -> Panel:  # fmt: skip
    """A candidate at any shape: config, floor, what its rows predict, rows beside it, and a sweep over an axis.

    shape: "M=48 N=17408 K=5120". device: default the one with most rows. axis, values: "M", "1,8,64". beside: other
    candidates of the sweep, by default all that have rows. `check` holds it against the reference here, `compile` says
    registers and shared memory, `time` times the sweep on this GPU, rivals too where they are installed, and appends no
    row.
    """
    families.interpret_on_cpu()
    kind = ipywidgets.Dropdown(description="family", options=families.names(), value=family)
    name = ipywidgets.Dropdown(description="candidate", options=[*families.load(family).candidates], value=candidate)
    typed = ipywidgets.Text(description="shape", value=shape, continuous_update=False)
    where = ipywidgets.Dropdown(description="device", options=devices.ids(), value=device or objects.device().id)
    along = ipywidgets.Text(description="sweep", value=axis, continuous_update=False)
    over = ipywidgets.Text(description="values", value=values, continuous_update=False)
    rivals = ipywidgets.Text(description="beside", value=beside, continuous_update=False)
    buttons = {word: ipywidgets.Button(description=word) for word in ("check", "compile", "time")}
    said = ipywidgets.HTML()

    def at() -> shapes.Shape:
        parts = families.load(kind.value)
        chosen = parts.candidate(name.value)
        return shapes.Shape(parts, chosen, shapes.shaped(parts, chosen, shapes.parse(typed.value)))

    def swept(now: bool = False) -> shapes.Sweep | None:
        if not along.value.strip():
            return None
        numbers = [int(n) for n in over.value.replace(",", " ").split() if n.isdigit()]
        names = rivals.value.replace(",", " ").split()

        def tell(line: str) -> None:
            said.value = _note(line)

        return shapes.sweep(at(), where.value, along.value.strip(), numbers, names, now, tell)

    def settle(changed: Any) -> None:
        if changed is kind:
            name.options = [*families.load(kind.value).candidates]
            typed.value = along.value = ""

    def click(word: str) -> Callable[[Any], None]:
        def run(_: Any) -> None:
            said.value = _note(f"{word} ...")
            try:
                said.value = "".join(ASK[word](at(), where.value, swept))
            except BadInput as refused:
                said.value = _note(str(refused))

        return run

    controls = {"family": kind, "candidate": name, "shape": typed, "device": where, "sweep": along, "values": over,
                "beside": rivals, **buttons, "said": said}  # fmt: skip
    panel = _panel(controls, lambda: _kernel_page(at(), where.value, swept()), settle)
    for word, button in buttons.items():
        button.on_click(click(word))
    return panel


def _kernel_page(at: shapes.Shape, device: str, swept: shapes.Sweep | None) -> Iterable[str]:
    c, floor = at.candidate, at.floor(device)
    yield _head(f"{at.family.name}/{c.name} at {at.workload.id}")
    expected, rows, counted = at.expected(device), at.rows(device), at.counters(device)
    newest = {r.name: r for r in rows}
    resources = "compile it ahead of time (the button), or `lab counters` on a GPU"
    if counted:
        resources = f"{counted.registers:g} a thread, {counted.shared_bytes:g} bytes a block (counters)"
    ours = newest.get(c.name)
    lines = [
        ("precision", c.precision), ("needs here", families.unmet(c, families.gpu_capability()) or "nothing more"),
        ("launches", at.config(device) or "does not say"),
        ("floor", f"{floor.floor_us:.4g} us, bound by {floor.bound} ({floor.intensity:.4g} operations a byte)"),
        ("expected by the router", "{:.4g} us ({})".format(*expected) if expected else "does not compare it"),
        ("measured", f"{ours.median_us:.4g} us ({ours.phase}, run {ours.run})" if ours else NOT_MEASURED),
        ("registers, shared memory", resources),
    ]  # fmt: skip
    yield html_table(("", ""), lines)
    if newest:
        times = sorted((r.median_us or 0.0, n, r) for n, r in newest.items())
        table = [(n, us, r.iqr_us, f"{floor.floor_us / us:.0%}", r.phase, r.run) for us, n, r in times]
        yield html_table(("at this shape", "median us", "IQR us", "floor over it", "card", "run"), table)
    if swept:
        yield from _sweep_page(swept, device)


def _sweep_page(swept: shapes.Sweep, device: str) -> Iterable[str]:
    yield _head(f"Sweep over {swept.axis}")
    curves = {**swept.measured, **{f"{name}, now": points for name, points in swept.live.items()}}
    if not curves:
        yield _note(f"{NOT_MEASURED}: no row from {device} lies on this line of shapes; below is the floor alone.")
    names = sorted(curves, key=lambda n: min(us for _, us in curves[n]))
    kept, dropped = names[:7], names[7:]
    if swept.floor:
        yield _image(lambda: figures.Picture(
            draw.times({n: curves[n] for n in kept}, f"{swept.fixed}, {device}", swept.axis, "us", floor=swept.floor),
            f"Times of {', '.join(kept) or 'nobody'} over {swept.axis}, and the floor."))  # fmt: skip
    if dropped:
        yield _note(f"Not drawn: {', '.join(dropped)}; name what you want beside it.")
    at = sorted({value for points in (*curves.values(), swept.floor) for value, _ in points} | set(swept.refused))
    columns = {**{n: dict(curves[n]) for n in kept}, "floor": dict(swept.floor)}
    absent = {v: REFUSED if v in swept.refused else NOT_MEASURED for v in at}
    yield html_table((swept.axis, *columns), [(v, *(c.get(v, absent[v]) for c in columns.values())) for v in at])
    for value, why in swept.refused.items():
        yield _note(f"{swept.axis}={value}: {why}")


def _check(at: shapes.Shape, device: str, swept: Any) -> Iterable[str]:
    done = at.check()
    yield html_table(("check", "output", "relative error", "limit"),
                     [(done.status, e.output, e.relative_error, e.relative_limit) for e in done.errors]
                     or [(done.status, done.message, "", "")])  # fmt: skip


def _compile(at: shapes.Shape, device: str, swept: Any) -> Iterable[str]:
    rows, config = at.compiled(device), at.config(device)
    head = ("kernel", "launched here", "registers", "shared bytes", "spill bytes", "blocks an SM", "instruction")
    yield html_table(head, [
        (r.build or r.message, "yes" if r.build and r.build in config else "", _known(r.registers),
         _known(r.shared_bytes), _known(r.spill_bytes), _known(r.blocks_per_sm), r.instruction) for r in rows
    ])  # fmt: skip


def _time(at: shapes.Shape, device: str, swept: Callable[[bool], shapes.Sweep | None]) -> Iterable[str]:
    done = swept(True)
    if done is None:
        times = at.time()
        yield html_table(("kernel", "us"), [*times.items()])
    else:
        yield from _sweep_page(done, device)


ASK: Mapping[str, Callable[..., Iterable[str]]] = {"check": _check, "compile": _compile, "time": _time}
