"""The one way Killgate refuses input: a single line that names the file, the key, the value and the remedy.

Everything a user can get wrong (a card, a CSV, a row file, a flag, a missing GPU) raises `BadInput`; the command
line prints its one line and exits with 2. Anything else that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class BadInput(Exception):
    """Input that cannot be used.

    where:  the file (shown relative to the repository when it lies in it) or the flag.
    what:   the key and the value, and what is wrong with it.
    remedy: what to do, an imperative.
    """

    def __init__(self, where: str | Path, what: str, remedy: str = "") -> None:
        self.where, self.what, self.remedy = shown(where), what, remedy
        line = f"{self.where}: {what}" + (f"; {remedy}" if remedy else "")
        super().__init__(" ".join(line.split()))


def shown(where: str | Path) -> str:
    """A path relative to the repository when it lies inside it, so that messages hold no path of a machine."""
    if isinstance(where, Path) and (path := where.resolve()).is_relative_to(REPOSITORY):
        return str(path.relative_to(REPOSITORY))
    return str(where)


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy clause naming the nearest valid word, e.g. `did you mean "metric"?`, or the whole short list."""
    options = sorted({str(k) for k in known})
    close = difflib.get_close_matches(str(word), options, n=1, cutoff=0.5)
    if close:
        return f'did you mean "{close[0]}"?'
    return "valid: " + ", ".join(options[:12]) + (", ..." if len(options) > 12 else "")
