"""Objects from JSON or JSON lines that a program printed, possibly among log lines.

The C++ tools write numbers with their own formatter, so a failed test appears as a bare `nan` or `inf`, which is no
JSON; and a run that was stopped leaves half a line. Both are said as what they are instead of as a parser's complaint.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput, shown
from lab.study.own.sample import CUT_OFF, NOT_A_NUMBER

ARRAY = re.compile(r"^\[[ \t]*(?=\{|$)", re.MULTILINE)


def objects(path: Path, text: str) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """((line number, object) in order, the other lines); raises BadInput for NaN and for what is cut off."""
    if found := ARRAY.search(text):
        return _array(path, text, found.start())
    read: list[tuple[int, dict[str, Any]]] = []
    others: list[str] = []
    lines = text.splitlines()
    for n, line in enumerate(lines, start=1):
        if not line.lstrip().startswith("{"):
            others.append(line)
            continue
        try:
            read.append((n, _object(json.loads(line, parse_constant=_refuse))))
        except ValueError:
            raise _bad(path, n, line, last=not any(rest.strip() for rest in lines[n:])) from None
    return read, others


def _array(path: Path, text: str, start: int) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """The elements of a printed array one by one, so that each keeps its line."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    at = start + 1
    read: list[tuple[int, dict[str, Any]]] = []
    while True:
        at = _skip(text, at)
        if text.startswith("]", at):
            return read, (text[:start] + text[at + 1 :]).splitlines()
        n = text.count("\n", 0, at) + 1
        try:
            value, end = decoder.raw_decode(text, at)
            read.append((n, _object(value)))
        except ValueError as error:
            position = getattr(error, "pos", at)
            line, _, rest = text[text.rfind("\n", 0, position) + 1 :].partition("\n")
            raise _bad(path, text.count("\n", 0, position) + 1, line, last=not rest.strip()) from None
        at = _skip(text, end)
        if text.startswith(",", at):
            at += 1


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _bad(path: Path, n: int, line: str, last: bool) -> BadInput:
    where = f"{shown(path)} line {n}"
    if found := NOT_A_NUMBER.search(line):
        return BadInput(where, f"holds {found[0]}", "that test failed: repeat it or remove the line")
    if last:
        return BadInput(where, "ends in the middle of an object", CUT_OFF)
    return BadInput(where, f"is not JSON ({line.strip():.40})", "give the tool's output as it was printed")
