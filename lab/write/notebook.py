"""What a notebook shows, from cards, rows and figures: tables, prose with numbers in it, pictures, and simple drawings.

A notebook cell ends with one of these calls. Tables are pandas frames, so that a reader can go on with them, and
`show` turns a frame into a Markdown table: it reads well in JupyterLab, on a code host, in a terminal and in a diff,
which an HTML table does not. A picture is shown as its SVG with a sentence for readers who cannot see it. Nothing here
needs IPython: what is returned carries its own MIME bundle.

Given up: sorting and styling in the page.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from lab import draw
from lab.base import devices
from lab.base.errors import BadInput
from lab.card import phases, recorded
from lab.card.gate import ROLES
from lab.check import accuracy
from lab.check.families import former
from lab.judge import evidence
from lab.judge.rules import Verdict
from lab.judge.verdicts import Judgement, judge_measured
from lab.place import roofline
from lab.row import store
from lab.row.records import Measurement
from lab.study import reproduction
from lab.write import writeup

CONSEQUENCE = dict(
    zip(ROLES, ("else INVALID", "else BLOCKED", "else VACUOUS", "NO-GO when it holds", "required"), strict=True)
)

PLAIN_WIDTH = 300  # characters


@dataclass(frozen=True)
class Shown:
    """An output of a cell: MIME type -> text."""

    bundle: Mapping[str, str]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return dict(self.bundle)

    def __repr__(self) -> str:
        return self.bundle["text/plain"]


def text(markdown: str) -> Shown:
    """Prose as Markdown; write it as an f-string, so that its numbers come from rows."""
    return Shown({"text/markdown": markdown, "text/plain": markdown})


def picture(figure: Figure, alt: str) -> Shown:
    """A figure as SVG; `alt` says in a sentence what it shows. Raises BadInput without one."""
    if not alt.strip():
        raise BadInput("picture", "alt is empty", "say in a sentence what the picture shows")
    svg = draw.svg(figure)
    head, rest = svg[svg.index("<svg") :].split(">", 1)
    return Shown({"image/svg+xml": f'{head} role="img" aria-label="{html.escape(alt)}">{rest}', "text/plain": alt})


def _cell(value: Any, code: bool) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    words = " ".join(str(value).split()).replace("|", "\\|")
    if code:
        quote = "``" if "`" in words else "`"
        return f"{quote}{words}{quote}" if words else ""
    return words.replace("*", "\\*").replace("<", "&lt;").replace("$", "\\$")


def show(frame: pd.DataFrame, code: Sequence[str] = ()) -> Shown:
    """A frame as a Markdown table without its index: numbers to the right, None and NaN empty, `code` columns as code.

    Floats keep four digits, integers all of them. As plain text columns are aligned, but for a frame wider than
    PLAIN_WIDTH characters, which would be padding for the most part: that stays the Markdown. Raises BadInput for a
    code column that the frame does not have.
    """
    for name in code:
        if name not in frame.columns:
            raise BadInput("show", f'no column "{name}"', f"it has {', '.join(map(str, frame.columns))}")
    right = [pd.api.types.is_numeric_dtype(frame[c]) and not pd.api.types.is_bool_dtype(frame[c]) for c in frame]
    lines = ["| " + " | ".join(map(str, frame.columns)) + " |"]
    lines.append("|" + "|".join("--:" if r else ":--" for r in right) + "|")
    for row in frame.itertuples(index=False):
        cells = [_cell(value, name in code) for name, value in zip(frame.columns, row, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    markdown, plain = "\n".join(lines), frame.to_string(index=False)
    wide = plain.find("\n") > PLAIN_WIDTH
    return Shown({"text/markdown": markdown, "text/plain": markdown if wide else plain})


def question(card: phases.Card) -> Shown:
    """A card's question, hypothesis, null and arms."""
    lines = [f"**{card.title}** (`{card.id}`, row {card.row}, {card.system} on {card.device})", ""]
    lines += [f"*Question.* {card.question}", "", f"*Hypothesis.* {card.hypothesis}", "", f"*If it fails.* {card.null}"]
    lines += ["", f"*Control:* {card.control}. *Candidate:* {card.candidate}."]
    return text("\n".join(lines))


def gate(card: phases.Card) -> pd.DataFrame:
    """A card's gate and claims: what is asked, what follows, and the recorded figure that states the threshold."""
    gates = [(f"claim: {name}" if name else "gate", gate) for name, gate in card.gates]
    return pd.DataFrame(
        [
            {
                "part": part,
                "condition": str(c),
                "consequence": CONSEQUENCE[role],
                "stated by": c.stated_by or "the card",
            }
            for part, g in gates
            for role, c in g.conditions()
        ]
    )


def questions(cards: Iterable[phases.Card]) -> Shown:
    """What several cards ask, and what is expected if they fail."""
    rows = [{"phase": c.id, "on": c.device, "question": c.question, "if it fails": c.null} for c in cards]
    return show(pd.DataFrame(rows), code=["phase"])


def gates(cards: Iterable[phases.Card]) -> Shown:
    """Every condition of several cards' gates and claims."""
    frame = pd.concat([gate(c).assign(phase=c.id) for c in cards])
    return show(frame[["phase", "condition", "consequence", "stated by"]], code=["phase", "condition", "stated by"])


def would_change(cards: Iterable[phases.Card]) -> Shown:
    """What would change the verdict of several cards."""
    return show(pd.DataFrame([{"phase": c.id, "what would change it": c.limits} for c in cards]), code=["phase"])


def board(judgements: Iterable[Judgement]) -> pd.DataFrame:
    """The board of verdicts in the columns of lab.writeup."""
    return pd.DataFrame(writeup.board_rows(judgements), columns=list(writeup.COLUMNS))


def verdicts(judgements: Iterable[Judgement]) -> pd.DataFrame:
    """Each verdict and claim in words: where, on what evidence, and the sentence that decided it."""
    rows = []
    for j in judgements:
        parts: list[tuple[str, Verdict]] = [("", j.verdict), *j.claims]
        for name, v in parts:
            phase = f"{j.phase}: {name}" if name else j.phase
            note = "" if name else j.note
            word = "" if name else j.recorded_verdict or ""
            rows.append(
                {"phase": phase, "device": j.device, "evidence": j.evidence, "verdict": v.word, "because": v.reason,
                 "source wrote": word, "note": note}
            )  # fmt: skip
    return pd.DataFrame(rows).replace("", None).dropna(axis="columns", how="all")


def measured(phase: str, device: str) -> Judgement | None:
    """The verdict on a device's committed rows, None while profiles/ has none; `unmeasured` says so."""
    if device not in store.measured_devices(phase):
        return None
    return judge_measured(phases.card(phase), device)


def unmeasured(phase: str, device: str) -> Shown:
    """The sentence that stands where rows are missing."""
    return text(f"No rows of `{phase}` from {device} are committed yet, so nothing is said about it here.")


def points(phase: str, device: str) -> list[draw.Point]:
    """Measured points for a roofline, each arm of the rows that are ok: its median time at its compulsory cost.

    A label is the arm's name and the workload's id up to its head counts, which the title can say once.
    """
    pairs = evidence.pairs(store.rows(device=device, phase=phase)).values()
    return [
        draw.point(f"{r.name} {r.workload_id.split('_h')[0]}", r.flops or 0.0, r.bytes or 0.0, r.time_us)
        for pair in pairs
        for r in pair
        if r is not None and r.time_us is not None
    ]


def timings(phase: str, device: str) -> pd.DataFrame:
    """Measured rows of a phase by workload and arm: time, floor and error, and the candidate's change in %.

    A row that is not ok shows its status and no time. Empty without rows.
    """
    lines = []
    for control, candidate in evidence.pairs(store.rows(device=device, phase=phase)).values():
        for row in (control, candidate):
            if row is None:
                continue
            line: dict[str, Any] = {"phase": phase, "workload": row.workload_id, "arm": row.name, "status": row.status}
            if row.time_us is not None:
                floor = roofline.of_row(devices.get(device), row)
                line |= {"median us": row.time_us, "IQR us": row.iqr_us, "floor us": floor.floor_us}
                line |= {"of roofline": floor.floor_us / row.time_us, "rel. error": row.relative_error}
                if row is candidate and control is not None and control.time_us is not None:
                    line["change %"] = 100 * (row.time_us / control.time_us - 1)
            lines.append(line)
    return pd.DataFrame(lines)


def arms(card: phases.Card, device: str) -> dict[str, dict[str, Measurement]]:
    """workload -> arm's name -> row that is ok, of the run that the card is judged by; {} without rows.

    So figures beside each other, which a gate compares across workloads, are of one run wherever one holds them all.
    """
    rows = list(store.rows(device=device, phase=card.id))
    read = [r for r in rows if r.name in (card.control, card.candidate)]
    judged = evidence.pairs(read, evidence.compared(card))
    found = {}
    for workload in card.workloads:
        _, candidate = judged.get(workload, (None, None))
        if candidate and candidate.status == "ok":
            of_run = (r for r in rows if (r.workload_id, r.run) == (workload, candidate.run))
            found[workload] = {r.name: r for r in of_run if r.status == "ok"}
    return found


def origin(rows: Iterable[Measurement]) -> str:
    """A sentence for below a table: the runs and commits of its rows, and which candidates have changed since."""
    rows = [r for r in rows if r.status == "ok"]
    if not rows:
        return ""
    runs = {r.run: _code(r) for r in rows}
    said = "Rows of " + ", ".join(f"run {run} ({commit})" for run, commit in sorted(runs.items())) + "."
    places: dict[str, dict[str, str]] = {}
    for r in sorted(rows, key=lambda r: str(r.run)):
        places.setdefault(r.name, {})[r.workload_id] = former(r)
    changed = [f"`{n}` on {sum(map(bool, at.values()))} of {len(at)}" for n, at in places.items() if any(at.values())]
    if not changed:
        return said
    return (
        f"{said} **Former kernel:** {', '.join(changed)} workloads; the present code launches another configuration "
        "there, or refuses, and has no row yet. Those times and the verdict on them are of the kernel before."
    )


def _code(row: Measurement) -> str:
    """The commit whose code a row timed: the stated one of a copy whose own git is behind, else its checkout's."""
    if row.stated_commit:
        return f"commit {row.stated_commit[:7]}, as stated"
    return f"commit {row.commit[:7]}{' and changes on top of it' if row.dirty else ''}"


def reproduced(rows: Iterable[reproduction.Reproduction]) -> pd.DataFrame:
    """Recorded figures beside the same computed again from their source's inputs, and the assumption behind ours."""
    return pd.DataFrame(
        [
            {"figure": r.recorded_id, "recorded": r.recorded, "ours": r.ours, "unit": r.unit,
             "agrees": "yes" if r.agrees else "no", "assumption": r.assumption}
            for r in rows
        ]
    )  # fmt: skip


def figures(ids: Iterable[str]) -> pd.DataFrame:
    """Recorded figures by id, as printed, with their source."""
    found = [recorded.figure(i) for i in ids]
    return pd.DataFrame(
        [{"figure": f.id, "value": f.value, "unit": f.unit, "kind": f.kind, "source": f.source} for f in found]
    )


def errors(checks: Iterable[accuracy.Check]) -> pd.DataFrame:
    """Checks against the reference: each output's two errors and their limits, or why a candidate was not run."""
    rows = []
    for c in checks:
        own = {"candidate": c.candidate, "workload": c.workload, "precision": c.precision, "status": c.status}
        rows += [
            {**own, "output": e.output, "relative error": e.relative_error, "limit": e.relative_limit,
             "largest / rms": e.max_error, "limit of it": e.max_limit}
            for e in c.errors
        ]  # fmt: skip
        rows += [] if c.errors else [{**own, "output": c.message}]
    return pd.DataFrame(rows)


def canvas(height_in: float, width: float = 100.0, height: float = 50.0) -> tuple[Figure, Axes]:
    """An empty light card for a drawing, notebook-wide; coordinates run from 0 to `width` and 0 to `height`, y up."""
    figure = Figure(figsize=(draw.WIDTH_IN, height_in), facecolor=draw.CARD)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98), facecolor=draw.CARD)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, w: float, h: float, label: str = "", colour: str = draw.INK, fill: bool = False,
    size: float = 9, **style: Any,
) -> None:  # fmt: skip
    """A rounded box with its lower left corner at (x, y) and a centred label; `fill` tints it with its colour."""
    options = {"facecolor": (colour, 0.16) if fill else draw.CARD, "edgecolor": colour, "linewidth": 1.2, **style}
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.8", **options))
    if label:
        axes.text(x + w / 2, y + h / 2, label, ha="center", va="center", color=draw.INK, fontsize=size)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = draw.INK, **style: Any
) -> None:
    """An arrow from start to end."""
    options = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, **style}
    axes.annotate("", xy=end, xytext=start, arrowprops=options)
