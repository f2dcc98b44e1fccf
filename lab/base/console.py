"""What commands print and write: JSON for programs, tables, and a part of a file that is made again."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from lab.base.errors import BadInput, plain


class Plain:
    """A stream that passes on what it is given as `errors.plain` writes it; raw: the stream itself, for a bar."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Returns the characters written, escapes included."""
        return self.raw.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def only_text() -> Iterator[None]:
    """Within, no file's name, key or text can drive the terminal that a command prints to."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(Plain, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def print_json(value: Any) -> None:
    """Print `value`; NaN and infinity, which are no JSON, as null. What JSON does not know goes through str."""
    print(json.dumps(_finite(value), indent=1, default=str, allow_nan=False))


def show(as_json: bool, value: Callable[[], Any], text: Callable[[], str]) -> None:
    """Print the JSON for programs or the text for people; only what is printed is computed."""
    if as_json:
        print_json(value())
    else:
        print(text())


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def between(text: str, marks: tuple[str, str], lines: Iterable[str], where: Path) -> str:
    """`text` of the file `where` with other lines between its two marks; BadInput where they are gone."""
    start, end = (text.find(mark) for mark in marks)
    if not 0 <= start < end:
        what = f'"{marks[0]}" and "{marks[1]}" are not there in this order'
        raise BadInput(where, what, "put them around the table")
    return text[: start + len(marks[0])] + "\n" + "\n".join(lines) + "\n" + text[end:]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    """A plain-text table whose cells wrap at the given widths."""
    lines = []
    for row in [header, *rows]:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [(c[number] if number < len(c) else "").ljust(w) for c, w in zip(cells, widths, strict=True)]
            lines.append("  ".join(parts).rstrip())
        if row is header:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join(lines)
