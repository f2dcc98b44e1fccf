"""Walks the sources: every cited line exists, and holds the word and the figures that are cited from it.

    python -m tests.card.walk_sources FOLDER [--write]

FOLDER holds the documents of data/recorded/sources.csv under their ids; they are not part of this repository. What the
walk found is sealed in the column `checked` of verdicts.csv: a hash over the document's SHA-256 and everything cited.
So a machine without the documents still sees that a citation changed after it was walked.
"""

from __future__ import annotations

import csv
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lab.card import recorded
from lab.card.recorded import RecordedVerdict


def numbered(lines: str) -> list[int]:
    """ "12-14;50" as line numbers; raises ValueError for anything else."""
    found: list[int] = []
    for part in lines.split(";"):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def seal(verdict: RecordedVerdict) -> str:
    """First 12 hex digits of a hash over the document and what is cited from it."""
    document = recorded.sources()[verdict.source].sha256
    cited = (document, verdict.lines, verdict.word, verdict.word_lines, verdict.observed)
    return hashlib.sha256("\n".join(cited).encode()).hexdigest()[:12]


def numbers(text: str) -> set[float]:
    """The numbers in a text; "13 277.98" is 13 and 277.98, so that no spacing matters."""
    return {float(found) for found in re.findall(r"\d+(?:\.\d+)?", text)}


def missing(verdict: RecordedVerdict, text: list[str]) -> Iterator[str]:
    """What a document does not hold of a citation."""
    try:
        cited, word = numbered(verdict.lines), numbered(verdict.word_lines) if verdict.word else []
    except ValueError:
        yield f"lines = {verdict.lines!r} or word_lines = {verdict.word_lines!r} are no line numbers"
        return
    outside = [n for n in (*cited, *word) if not 1 <= n <= len(text)]
    if outside:
        yield f"the document has {len(text)} lines, cited are {outside}"
        return
    if absent := numbers(verdict.observed) - numbers("\n".join(text[n - 1] for n in cited)):
        yield f"lines {verdict.lines} lack {sorted(absent)}"
    if word and not any(verdict.word in text[n - 1] for n in word):
        yield f"{verdict.word!r} is not on lines {verdict.word_lines}"


def walk(folder: Path) -> list[str]:
    """What is wrong, a line each, over all documents and verdicts."""
    wrong, texts = [], {}
    for source in recorded.sources().values():
        held = (folder / source.id).read_bytes()
        texts[source.id] = held.decode().splitlines()
        if hashlib.sha256(held).hexdigest() != source.sha256:
            wrong.append(f"{source.id} is another document than the one that was read")
        if len(texts[source.id]) != source.lines:
            wrong.append(f"{source.id} has {len(texts[source.id])} lines, not {source.lines}")
    for verdict in recorded.verdicts().values():
        wrong += [f"{verdict.id}: {text}" for text in missing(verdict, texts[verdict.source])]
    return wrong


def main(arguments: list[str]) -> int:
    """1 when something cited is not there; with --write the seals are stored when nothing is missing."""
    wrong = walk(Path(arguments[0]))
    print("\n".join(wrong) or f"{len(recorded.verdicts())} citations hold")
    if not wrong and "--write" in arguments:
        path = recorded.FOLDER / "verdicts.csv"
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            row["checked"] = seal(recorded.verdict(row["id"]))
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
