"""Nsight Compute's CSV (`ncu --csv`, details or raw page): the kernel launches in it with their metrics.

The table follows lines of ncu's own ("==PROF== ..."). The details page has a row per metric, the raw page a column per
metric with the units in its second line.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput

HEAD = {"ID", "Kernel Name"}


@dataclass(frozen=True)
class Launch:
    """A profiled launch. device: as printed, "" where the table has none. metrics: name -> (number or text, unit)."""

    kernel: str
    device: str
    metrics: dict[str, tuple[Any, str]] = field(default_factory=dict)


def is_table(text: str) -> bool:
    """True when the text holds a table of ncu."""
    return any(set(cells) >= HEAD for _, cells in _lines(text))


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    for cells in reader:
        yield reader.line_num, [cell.strip() for cell in cells]


def launches(path: Path, text: str) -> list[Launch]:
    """The launches in the order of the file; raises BadInput for a row that is cut off and a table without rows."""
    header: list[str] = []
    units: dict[str, str] = {}
    found: dict[str, Launch] = {}
    for number, cells in _lines(text):
        if set(cells) >= HEAD:
            header = cells
            continue
        if not header or not any(cells) or cells[0].startswith("=="):
            continue
        # The details page leaves the trailing rule columns out of some rows.
        if len(cells) < len(header) and "Metric Value" not in header[: len(cells)]:
            what = f"line {number} has {len(cells)} of {len(header)} cells"
            raise BadInput(path, what, "the file is cut off; export again")
        row = dict(zip(header, cells, strict=False))
        if not row["ID"]:
            units = row
            continue
        metrics = found.setdefault(row["ID"], Launch(row["Kernel Name"], row.get("Device", ""))).metrics
        if "Metric Name" not in row:
            metrics |= {name: (_value(v), units.get(name, "")) for name, v in row.items() if "__" in name}
        elif row["Metric Name"]:
            metrics[row["Metric Name"]] = (_value(row.get("Metric Value", "")), row.get("Metric Unit", ""))
    if not (found or units):
        raise BadInput(path, "the table has a header and no rows", "was anything captured?")
    return list(found.values())


def _value(text: str) -> float | str:
    """A number without its thousands separators, else the text (`n/a`, a list)."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text
