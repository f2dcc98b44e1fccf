"""The one way Killgate refuses input: a single line that names the file, the key, the value and the remedy.

Everything a user can get wrong (a card, a CSV, a row file, a flag, a missing GPU) raises `BadInput`; the command
line prints its one line and exits with 2. Anything else that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CLOSE = 0.5  # how much of a word its neighbour has, by difflib's ratio
LONGEST = 1000  # characters of what is wrong, for a hostile key or value may have millions
# What drives a terminal or turns its text round: C0 and C1 but newline and tab, bidirectional marks, half surrogates.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
ABSOLUTE = re.compile(r"(?<![\w/.~])/(?:[^\s/:;,'\"()]+/)+([^\s/:;,'\"()]*)")


class BadInput(Exception):
    """Input that cannot be used.

    where:  the file (shown relative to the repository when it lies in it) or the flag.
    what:   the key and the value, and what is wrong with it.
    remedy: what to do, an imperative.
    """

    def __init__(self, where: str | Path, what: str, remedy: str = "") -> None:
        self.where, self.what, self.remedy = shown(where), what, remedy
        cut = what if len(what) <= LONGEST else f"{what[:LONGEST]}..."
        line = f"{self.where}: {cut}" + (f"; {remedy}" if remedy else "")
        super().__init__(plain(" ".join(line.split())))


def shown(where: str | Path) -> str:
    """A path relative to the repository when it lies inside it, so that messages hold no path of a machine."""
    # realpath: resolve() raises on a loop of links, which is for whoever opens the file to say
    if isinstance(where, Path) and (path := Path(os.path.realpath(where))).is_relative_to(REPOSITORY):
        return str(path.relative_to(REPOSITORY))
    return str(where)


def plain(text: str) -> str:
    """Text that a terminal only shows: a control character as its escape (\\x1b), newlines and tabs as they are."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def reason(error: BaseException) -> str:
    """An exception's type and first line as a row may keep it: without control characters and without who or where."""
    line = plain((str(error).splitlines() or [""])[0])[:LONGEST]
    return f"{type(error).__name__}: {anonymous(line)}".rstrip(": ")


def anonymous(text: str) -> str:
    """Text whose absolute paths are relative to the repository, else no more than the file's name."""
    text = text.replace(f"{REPOSITORY}/", "")
    return ABSOLUTE.sub(lambda path: f"(path)/{path[1]}" if "." in path[1] else "(path)", text)


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy clause naming the nearest valid word, e.g. `did you mean "metric"?`, or the whole short list."""
    options = sorted({str(k) for k in known})
    if close := difflib.get_close_matches(str(word), options, n=1, cutoff=CLOSE):
        return f'did you mean "{close[0]}"?'
    return "valid: " + ", ".join(options[:12]) + (", ..." if len(options) > 12 else "")


def refuse_unknown(where: str | Path, what: str, word: str, known: Iterable[str]) -> None:
    """Raise BadInput for a word that is not known, naming the nearest that is. what: which kind of word it is."""
    if word not in (words := list(known)):
        raise BadInput(where, f'no {what} is named "{word}"', nearest(word, words))
