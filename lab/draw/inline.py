"""An interval at its line as SVG text, for a page or a table's cell: a value, its 95 % interval, the gate's line.

A page has hundreds of these and follows the reader's light or dark mode, so they are written directly: colours are the
page's CSS variables, text is text. `plain` puts fixed colours in their place, for a printed page.
"""

from __future__ import annotations

import base64
import re
from html import escape

# Name of the CSS variable -> its colour on white paper. templates/site.css has both modes.
PAPER = {"ink": "#1b1f24", "soft": "#59636e", "line": "#d1d9e0", "go": "#0b6e4f"}


def number(value: float) -> str:
    """Three significant digits, all of the integer part: 1,237 and 66.1 and 0.00354."""
    text = f"{value:,.0f}" if 100 <= abs(value) < 1e15 else f"{value:.3g}"
    return text.replace("-", "\N{MINUS SIGN}")


def amount(value: float, unit: str, sign: bool = False) -> str:
    """A number with its unit, a change with its sign."""
    plus = "+" if sign and value > 0 else ""
    return f"{plus}{number(value)}" + (f"\N{NO-BREAK SPACE}{unit}" if unit else "")


def interval(
    value: float,
    line: float,
    unit: str,
    op: str,
    ends: tuple[float, float] | None = None,
    zero: bool = False,
    over: str = "",
) -> str:
    """A value, its interval and the dashed line that it was held to; the side on which the gate is met is tinted.

    ends: low and high of the interval; over: what it is over ("one placement"); zero: keep zero in view, as for a
    change. The colour is the surrounding text's.
    """
    low, high = ends or (value, value)
    points = [low, high, value, line, *([0.0] if zero else [])]
    start, stop = min(points), max(points)
    room = (stop - start or abs(stop) or 1.0) * 0.12
    start, stop = start - room, stop + room
    if start < 0 <= min(points):  # a quantity that cannot be negative is not drawn below zero
        start = 0.0

    def at(v: float) -> float:
        return 6 + 228 * (v - start) / (stop - start)

    x = at(line)
    met = (6.0, x) if op in ("<", "<=") else (x, 234.0) if op in (">", ">=") else (x - 1, x + 1)
    words = amount(line, unit, zero)
    left = x > 150
    said = f"{amount(value, unit, zero)}, gate {op} {words}"
    said += f", interval {number(low)} to {number(high)}{over and f', {over}'}" if ends else ""
    wide = max(met[1] - met[0], 0)
    parts = [
        f'<rect x="{met[0]:.1f}" y="4" width="{wide:.1f}" height="22" fill="var(--go)" opacity=".13"/>',
        '<path d="M6 17H234" stroke="var(--line)"/>',
        f'<path d="M{at(0):.1f} 13V21" stroke="var(--soft)"/>' if zero and start <= 0 <= stop else "",
        f'<path d="M{x:.1f} 3V27" stroke="var(--ink)" stroke-dasharray="3 2" stroke-width="1.4"/>',
        f'<path d="M{at(low):.1f} 17H{max(at(high), at(low) + 2):.1f}" stroke="currentColor" stroke-width="6" '
        'opacity=".5"/>' if ends else "",
        f'<circle cx="{at(value):.1f}" cy="17" r="4" fill="currentColor"/>',
        f'<text x="{x - 4 if left else x + 4:.1f}" y="11" text-anchor="{"end" if left else "start"}" '
        f'fill="var(--soft)" font-size="10">{escape(words)}</text>',
    ]  # fmt: skip
    head = '<svg xmlns="http://www.w3.org/2000/svg" class="strip" viewBox="0 0 240 30" role="img"'
    return f'{head} aria-label="{escape(said)}" font-family="system-ui, sans-serif">{"".join(parts)}</svg>'


def uri(svg: str) -> str:
    """SVG as the address of a picture that a page holds itself."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def plain(svg: str) -> str:
    """The figure with the colours of white paper instead of a page's."""
    return re.sub(r"var\(--(\w+)\)", lambda match: PAPER[match[1]], svg).replace("currentColor", PAPER["ink"])
