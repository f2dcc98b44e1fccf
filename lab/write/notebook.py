"""What a notebook shows, from cards, rows and figures: tables, prose with numbers in it, and pictures.

A notebook cell ends with one of these calls. Tables are pandas frames, so that a reader can go on with them, and
`show` turns a frame into a Markdown table: it reads well in JupyterLab, on a code host, in a terminal and in a diff,
which an HTML table does not. A picture is shown as its SVG with a sentence for readers who cannot see it. Nothing here
needs IPython: what is returned carries its own MIME bundle.

Given up: sorting and styling in the page.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lab import draw
from lab.base.errors import BadInput
from lab.card import phases
from lab.check.families import former
from lab.row.records import Measurement

PLAIN_WIDTH = 300  # characters


@dataclass(frozen=True)
class Shown:
    """An output of a cell: MIME type -> text. alt: of a picture, what it shows in a sentence."""

    bundle: Mapping[str, str]
    alt: str = ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        pictures = (kind for kind in self.bundle if kind.startswith("image/"))
        return dict(self.bundle), {kind: {"alt": self.alt} for kind in pictures}

    def __repr__(self) -> str:
        return self.bundle["text/plain"]


def text(markdown: str) -> Shown:
    """Prose as Markdown; write it as an f-string, so that its numbers come from rows."""
    return Shown({"text/markdown": markdown, "text/plain": markdown})


def picture(figure: Figure | Callable[[], Figure], alt: str) -> Shown:
    """A figure as SVG, and as PNG for a page that is not trusted; `alt` says in a sentence what it shows.

    Of a function that draws rows and is refused (there are none), the refusal is shown, as not measured. Raises
    BadInput without `alt`.
    """
    if not alt.strip():
        raise BadInput("picture", "alt is empty", "say in a sentence what the picture shows")
    if not isinstance(figure, Figure):
        try:
            figure = figure()
        except BadInput as refused:
            return text(f"Not measured. {html.escape(str(refused), quote=False)}")
    svg = re.sub(r">\s+<", "><", draw.svg(figure))
    head, rest = svg[svg.index("<svg") :].split(">", 1)
    described = f'{head} role="img" aria-label="{html.escape(alt)}">{rest}'
    small = base64.b64encode(draw.png(figure)).decode()
    return Shown({"image/svg+xml": described, "image/png": small, "text/plain": alt}, alt)


def _cell(value: Any, code: bool) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    words = " ".join(str(value).split()).replace("|", "\\|")
    if code:
        quote = "`" * (1 + max(map(len, re.findall("`+", words)), default=0))  # longer than any that would end it
        inside = f" {words} " if words.startswith("`") or words.endswith("`") else words
        return f"{quote}{inside}{quote}" if words else ""
    return words.replace("*", "\\*").replace("<", "&lt;").replace("$", "\\$")


def show(frame: pd.DataFrame, code: Sequence[str] = ()) -> Shown:
    """A frame as a Markdown table without its index: numbers to the right, None and NaN empty, `code` columns as code.

    Floats keep four digits, integers all of them. As plain text columns are aligned, but for a frame wider than
    PLAIN_WIDTH characters, which would be padding for the most part: that stays the Markdown. An empty frame says that
    nothing was measured. Raises BadInput for a code column that the frame does not have.
    """
    if frame.empty:
        return text("Nothing to show: not measured.")
    for name in code:
        if name not in frame.columns:
            raise BadInput("show", f'no column "{name}"', f"it has {', '.join(map(str, frame.columns))}")
    right = [pd.api.types.is_numeric_dtype(frame[c]) and not pd.api.types.is_bool_dtype(frame[c]) for c in frame]
    lines = ["| " + " | ".join(_cell(name, False) for name in frame.columns) + " |"]
    lines.append("|" + "|".join("--:" if r else ":--" for r in right) + "|")
    for row in frame.itertuples(index=False):
        cells = [_cell(value, name in code) for name, value in zip(frame.columns, row, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    markdown, plain = "\n".join(lines), frame.to_string(index=False)
    wide = plain.find("\n") > PLAIN_WIDTH
    return Shown({"text/markdown": markdown, "text/plain": markdown if wide else plain})


def questions(cards: Iterable[phases.Card]) -> Shown:
    """What several cards ask, and what is expected if they fail."""
    rows = [{"phase": c.id, "on": c.device, "question": c.question, "if it fails": c.null} for c in cards]
    return show(pd.DataFrame(rows), code=["phase"])


def would_change(cards: Iterable[phases.Card]) -> Shown:
    """What would change the verdict of several cards."""
    return show(pd.DataFrame([{"phase": c.id, "what would change it": c.limits} for c in cards]), code=["phase"])


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
