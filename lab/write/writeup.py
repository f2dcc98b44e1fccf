"""Text from rows: the board of verdicts as a terminal table, and one phase's writeup in Markdown.

Nothing is phrased by hand here that a row could say: words come from the card, numbers from figures or rows with their
ids, the verdict and its sentence from the judge. A negative result gets the same page as a positive one.
"""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lab.base.console import table
from lab.base.errors import BadInput
from lab.card import phases
from lab.card.gate import gate_text
from lab.card.phases import Card
from lab.judge import rules
from lab.judge.verdicts import Judgement

if TYPE_CHECKING:  # late below: `lab judge`, which prints the board, needs no figure
    from lab.write.pages import CardPage

FORMATS = ("md", "html", "pdf")
COLUMNS = ("phase", "gate", "observed", "verdict here", "the source", "agrees")


def board_rows(judgements: Iterable[Judgement]) -> list[tuple[str, ...]]:
    """One row a verdict, as text, in the columns of COLUMNS."""
    rows: list[tuple[str, ...]] = []
    for j in judgements:
        claims = "".join(f" ({name}: {v.word})" for name, v in j.claims)
        agrees = "" if j.agrees is None else "yes" if j.agrees else "no, explained" if j.differs else "NO"
        gate = gate_text(phases.card(j.phase).gate)
        said = j.source_said or "-"
        on = f" on {j.device}" if j.evidence != "recorded" else ""
        rows.append((j.phase, gate, j.verdict.observed, j.verdict.word + on + claims, said, agrees))
    return rows


def board(judgements: Iterable[Judgement]) -> str:
    """The board for a terminal of 150 columns, and below it one sentence for each disagreement."""
    judgements = list(judgements)
    text = table(COLUMNS, board_rows(judgements), (20, 36, 38, 22, 14, 13))
    why = [f"{j.phase} ({j.recorded_id}): {j.differs}" for j in judgements if j.agrees is False]
    if why:
        text += "\n\nWhere the judge and the source differ:\n" + "\n".join(
            textwrap.fill(line, 148, initial_indent="- ", subsequent_indent="  ") for line in why
        )
    return text


def overview(judgements: Iterable[Judgement]) -> str:
    """One line a verdict for a terminal of 110 columns, and the counts; `board` shows what stands behind a line."""
    judgements = list(judgements)
    sourced = any(j.recorded for j in judgements)
    widths = (20, 12, 14, 32 if sourced else 58, 24 if sourced else 0)
    cells = []
    for j in judgements:
        word = f'"{j.source_word}"' if j.source_word else j.source_said
        row = (j.phase, j.device, j.verdict.word, j.verdict.observed, f"{'! ' if j.agrees is False else ''}{word}")
        cells.append([c if len(c) <= w else f"{c[: w - 3].rstrip()}..." for c, w in zip(row, widths, strict=True)])
    columns = len(widths) if sourced else len(widths) - 1
    header = ("card", "device", "verdict", "decided by", "the source")[:columns]
    lines = [table(header, [row[:columns] for row in cells], widths[:columns]), "", counts(judgements)]
    told = "! our word is another than what we read the source as; why: lab judge CARD"
    return "\n".join([*lines, *([told] if any(j.agrees is False for j in judgements) else [])])


def counts(judgements: Iterable[Judgement]) -> str:
    """How often each word was given, by source and by device, in a few lines of a terminal."""
    groups: dict[str, list[Judgement]] = {}
    for j in judgements:
        groups.setdefault(f"{j.evidence} on {j.device}" if j.evidence != "recorded" else j.system, []).append(j)
    words = [w for w in rules.WORDS if any(j.verdict.word == w for own in groups.values() for j in own)]
    cells = []
    for name, own in groups.items():
        agree = sum(bool(j.agrees) for j in own) if own[0].agrees is not None else ""
        given = [sum(j.verdict.word == w for j in own) or "" for w in words]
        cells.append([name, *map(str, (len(own), agree, *given))])
    return table(("verdicts of", "all", "agree", *words), cells, (20, 4, 6, *(max(4, len(w)) for w in words)))


def unexplained(judgements: Iterable[Judgement]) -> list[Judgement]:
    """Verdicts that differ from the source without a sentence, or carry one although they agree."""
    return [j for j in judgements if j.agrees is not None and j.agrees == bool(j.differs)]


def format_of(word: str | None, out: Path | None) -> str:
    """md, html or pdf: as asked, else by the file's suffix. Raises BadInput for a suffix that is none of them."""
    suffix = (out.suffix.removeprefix(".").lower() if out else "") or "md"
    known = {"markdown": "md", "htm": "html"}.get(suffix, suffix)
    if word is None and known not in FORMATS:
        remedy = f"end in .{', .'.join(FORMATS)}, or give --format"
        raise BadInput(out or "--out", f'"{suffix}" is no format of a writeup', remedy)
    return word or known


def made(shown: CardPage, kind: str, out: Path | None) -> tuple[str | bytes, list[str]]:
    """The writeup of a card in one of FORMATS, and a line for each number of the author's prose that no figure is.

    HTML and PDF hold their figures; Markdown names files, which are written beside `out` and left out without it.
    Raises BadInput where what makes a PDF is not installed.
    """
    from lab.draw import inline
    from lab.write import pages, render

    def beside(name: str, drawn: str) -> str:
        assert out is not None
        file = out.with_name(f"{out.stem}-{name.rpartition('-')[2]}")
        file.write_text(drawn, encoding="utf-8")
        return file.name

    inside = beside if out else None
    values = pages.values(shown, inside if kind == "md" else lambda _, drawn: inline.uri(drawn))
    if kind == "md":
        return re.sub(r"\n{3,}", "\n\n", render.render("writeup.md", **values)), values["flagged"]
    style = (render.TEMPLATES / "site.css").read_text(encoding="utf-8")
    text = render.render("writeup.html", title=shown.card.title, links=False, style=style, **values)
    return (_pdf(text) if kind == "pdf" else text), values["flagged"]


def _pdf(text: str) -> bytes:
    for name in ("weasyprint", "fontTools"):  # what a stylesheet for screens says beyond paper is no warning of ours
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import weasyprint
    except ImportError:
        raise BadInput("--format pdf", "the package weasyprint is not installed", "pip install -e '.[pdf]'") from None
    except OSError:
        libraries = "apt-get install libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0"
        raise BadInput("--format pdf", "weasyprint does not find Pango", libraries) from None
    from lab.draw import inline

    return bytes(weasyprint.HTML(string=re.sub(r"<svg.*?</svg>", lambda m: inline.plain(m[0]), text)).write_pdf())


def write(card: Card) -> str:
    """The writeup of one card as Markdown, without its figures."""
    from lab.write import pages

    return str(made(pages.page_of(card, pages.judged([card])), "md", None)[0])
