"""Pages from templates/: one jinja2 environment, and the few filters that turn a finding into a number and a picture.

HTML is escaped unless a filter here says that it is markup; what says so escapes what it is given itself.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from lab.draw import inline
from lab.judge.rules import Finding, Seen

AGAINST = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
TEMPLATES = Path(__file__).parent / "templates"
# A second lock behind the escaping: whatever of a card, a row or an output should ever reach a page as markup, the only
# script that runs is board.js, by its hash, and no other host is asked. `file:` is 'self' where a page is a file.
POLICY = "default-src 'none'; style-src 'self' file: 'unsafe-inline'; img-src 'self' file: data:; base-uri 'none'; "


@cache
def environment() -> Environment:
    """The templates with their filters; an unknown name in one is an error."""
    made = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=select_autoescape(["html"]),
                       undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    made.filters |= {"interval": interval, "value": value, "beside": beside, "markdown": markdown, "page": page_of}
    made.filters |= {"number": inline.number, "markup": Markup, "cell": cell, "ticked": ticked, "said": said}
    made.filters |= {"us": known(lambda us: f"{us:,.0f}" if us >= 1000 else f"{us:.4g}")}
    made.filters |= {"change": known(lambda pct: inline.amount(pct, "%", True))}
    made.filters |= {"share": known("{:.0%}".format), "error": known("{:.1e}".format)}
    board = (TEMPLATES / "board.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(board.encode()).digest()).decode()
    made.globals |= {"board": board, "policy": f"{POLICY}form-action 'none'; script-src 'sha256-{digest}'"}
    return made


def render(template: str, path: str = "", **values: Any) -> str:
    """A template's text; path: of the page below the site's root, to which its links are relative."""
    root = "../" * path.count("/")
    return environment().get_template(template).render(root=root, path=path, **values)


def interval(found: Finding) -> Markup:
    """A finding as a strip: its figure, its interval, its line."""
    seen = found.seen
    if seen is None:
        return Markup("")
    op = found.condition.op
    wanted = AGAINST.get(op, op) if found.role == "kill" else op  # a kill condition is to be missed
    changes = found.condition.compare == "change"
    return Markup(inline.interval(seen.value, seen.line, seen.unit, wanted, seen.interval, changes, seen.over))


def value(seen: Seen) -> str:
    """The figure with its unit, a change with its sign."""
    return inline.amount(seen.value, seen.unit, seen.unit == "%")


def beside(found: Finding) -> str:
    """The arms behind a change, else the line."""
    seen = found.seen
    if seen is None:
        return ""
    if seen.unit == "%" and seen.control is not None and seen.candidate is not None:
        return f"{inline.number(seen.control)} to {inline.amount(seen.candidate, seen.arms_unit)}"
    return f"gate {found.condition.op} {inline.amount(seen.line, seen.unit, seen.unit == '%')}"


def known(show: Callable[[float], str]) -> Callable[[float | None], str]:
    """`show`, of None empty."""
    return lambda number: "" if number is None else show(number)


def cell(text: object) -> str:
    """Text inside a cell of a Markdown table: no markup, no bar, one line."""
    return said(text).replace("*", "\\*").replace("`", "\\`")


def said(text: object) -> str:
    """A card's prose in a Markdown page: its backticks stay, HTML and bars do not."""
    return " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def ticked(text: str) -> Markup:
    """A card's prose: what stands in backticks as code, all else as it is."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def page_of(file: Path) -> str:
    """Where the site shows a source file of the repository."""
    return f"source/{file.as_posix()}.html"


@cache
def _mistune() -> Any:
    import mistune

    class Text(mistune.HTMLRenderer):
        """Text whose entities are resolved before it is escaped: a notebook writes < as one."""

        def text(self, text: str) -> str:
            return mistune.escape(html.unescape(text))

    return mistune.create_markdown(renderer=Text(escape=True), plugins=["table", "strikethrough"])


COMMENT = re.compile(r"^<!--[^\n]*-->\n", re.MULTILINE)  # marks for what is written between them


def markdown(text: str) -> Markup:
    """Markdown as HTML; HTML in it shows as text, but for comments of a line; what is wide scrolls by itself."""
    return wide(str(_mistune()(COMMENT.sub("", text))))


def wide(html: str) -> Markup:
    """Clean HTML whose tables and listings are regions that scroll and take the focus."""
    region = '<div class="wide" role="region" tabindex="0" aria-label="table"><table>'
    html = html.replace("<table>", region).replace("</table>", "</table></div>")
    return Markup(html.replace("<pre>", '<pre tabindex="0" role="region" aria-label="listing">'))
