"""Tables of anybody: CSV or JSON lines with declared columns, Triton's perf_report CSV and tritonbench's.

A table with the columns metric, value and unit has a figure a row; `workload`, `arrival`, `gpu`, `model`, `build` and
`error` (a standard deviation) may stand beside them. In any other, `--metric METRIC:column=NAME,unit=U` says which
column is what, NAME with * and ?, and the column is then a field to tell arms apart by. Two tools' tables need no word:
perf_report writes "NAME (ms)" (triton.testing's documentation), tritonbench "NAME-latency" between semicolons (its
triton_op.py), in ms as its metrics' page says, with "(±x%)" behind a figure and a row of averages at the end. Of the
other columns numbers are the shape and words are settings.
"""

from __future__ import annotations

import csv
import fnmatch
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lab.base import vocabulary
from lab.base.errors import BadInput
from lab.study.own.sample import Asked, Imported, Line, Made, Objects, Sample, Word, lines

TOOL = "table"
COLUMN = re.compile(r"(?P<name>.+?)(?:\s*\((?P<unit>[^()]*)\)|-(?P<what>latency|speedup|accuracy|tflops|gbps))?\s*")
TIMES = {"ms": "ms", "us": "us", "s": "s", "milliseconds": "ms", "microseconds": "us", "seconds": "s"}
SPREAD = re.compile(r"(.+?)\s*\(±\s*([\d.]+)\s*%\)")
MADE = {"gpu": "gpu_info", "model": "model_filename", "build": "build_commit"}
OWN = ("metric", "value", "unit", "error", *MADE)
SHAPE = ("workload", "arrival")  # words that are no setting
ABSENT = ("", "oom", "cuda oom")  # of a provider that did not run: no figure, and no broken file


def columns(line: str) -> list[str]:
    """The cells of a header, [] for a line that cannot be one."""
    delimiter = max(",;\t", key=line.count)
    cells = [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    return cells if len(cells) > 1 and all(cells) and len(set(cells)) == len(cells) else []


def figures(names: Iterable[str], asked: Asked) -> dict[str, tuple[str, str, str]]:
    """column -> (metric, unit as stated, name without that) for what is declared, or else known of two tools."""
    found, known = {}, {}
    for name in names:
        parts = COLUMN.fullmatch(name)
        unit = ((parts["unit"] or "") if parts else "").strip()
        own = parts["name"] if parts else name
        for metric, how in asked.of("column").items():
            if any(fnmatch.fnmatchcase(word, how["column"]) for word in (name, own)):
                found[name] = (metric, how.get("unit", unit), own)
        if unit in TIMES or (parts and parts["what"] == "latency"):
            known[name] = ("kernel_us", TIMES.get(unit, "ms"), own)
    return found or known


def is_one(entry: Mapping[str, Any], asked: Asked) -> bool:
    """Whether a row by column is one that can be read."""
    return {"metric", "value"} <= entry.keys() or bool(figures(entry, asked))


def read(path: Path, text: str, asked: Asked) -> Imported | None:
    """A CSV's figures, None for a text that is no such table; raises BadInput for a row that is cut off."""
    start, head = next(((at, line) for at, line in lines(path, text) if line.strip()), (Line(path, 1), ""))
    header = columns(head)
    if not header or not is_one(dict.fromkeys(header), asked):
        return None
    delimiter = max(",;\t", key=head.count)
    found = []
    for at, line in lines(path, text, start.number + 1):
        if line.strip():
            cells = [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]
            found.append((at, dict(at.columns(header, cells))))
    if any(name.endswith("-latency") for name in header):  # tritonbench's last row is over all of its shapes
        found = [(at, row) for at, row in found if row[header[0]] != "average"]
    if not text.endswith("\n"):
        raise BadInput(path, "its last line does not end, so it may be cut off", "write it again, or add a newline")
    return read_rows(path, found, asked)


def read_rows(path: Path, rows: Objects, asked: Asked) -> Imported:
    """The figures of rows by column."""
    return Imported(path, TOOL, tuple(s for at, row in rows for s in _row(at, row, asked)))


def _row(at: Line, row: Mapping[str, Any], asked: Asked) -> list[Sample]:
    if {"metric", "value"} <= row.keys():
        wanted = {"value": (str(row["metric"]), str(row.get("unit") or ""), "")}
    else:
        wanted = figures(row, asked)
    others = {k: v for k, v in row.items() if k not in wanted and k not in OWN and not _figure(k)}
    axes: dict[str, Word] = {k: v for k, v in others.items() if v not in (None, "") and (k in SHAPE or _number(v))}
    settings: dict[str, Word] = {k: str(v) for k, v in others.items() if k not in axes}
    made = Made(**{MADE[k]: str(row[k]) for k in MADE if row.get(k)})
    found = []
    for column, (metric, unit, name) in wanted.items():
        own = {**settings, **({"column": name} if name else {})}
        text = str(row[column]).strip()
        if name and text.lower() in ABSENT:
            found.append(Sample(TOOL, at, metric, axes=axes, settings=own, made=made, status="unsupported"))
            continue
        spread = SPREAD.fullmatch(text)
        known = vocabulary.words().metric.get(metric)  # a card's own may be a time that is lost, and be none
        timed = known is not None and vocabulary.measures(known.unit).quantity == "time"
        value = at.figure(spread[1] if spread else text, column if name else metric, zero=not timed)
        error = value * float(spread[2]) / 100 if spread else at.figure(row.get("error") or 0.0, "error", zero=True)
        value, brought = asked.brought(at, metric, value, unit)
        error, _ = asked.brought(at, metric, error, unit)
        found.append(Sample(TOOL, at, metric, brought, (value,), axes, own, made, error=error))
    return found


def _figure(name: str) -> bool:
    """Whether a column's title says that it holds a figure, and no shape."""
    parts = COLUMN.fullmatch(name)
    return parts is not None and bool(parts["unit"] or parts["what"])


def _number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
