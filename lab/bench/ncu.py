"""Nsight Compute's CSV (`ncu --csv`, details or raw page): the kernel launches in it with their metrics.

The table follows lines of ncu's own ("==PROF== ..."). The details page has a row per metric, the raw page a column per
metric with the units in its second line.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput

HEAD = {"ID", "Kernel Name"}
LONGEST_CELL = 1 << 20  # characters; csv's own limit is less than names of generated kernels take
GROUPED = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d*)?")
DECIMAL_COMMA = re.compile(r"-?[\d.]*\d,\d+")


@dataclass(frozen=True)
class Launch:
    """A profiled launch. metrics: name -> (number or text, unit).

    device, capability: the GPU's number and compute capability as printed, "" where the table has none.
    """

    kernel: str
    device: str
    metrics: dict[str, tuple[Any, str]] = field(default_factory=dict)
    capability: str = ""


def is_table(text: str) -> bool:
    """True when the text holds a table of ncu."""
    return any(set(cells) >= HEAD for _, cells in _lines(text))


@contextlib.contextmanager
def whole_csv(path: Path, text: str) -> Iterator[None]:
    """Raises BadInput for a quoted cell without its end, one longer than any name, and a file without its last line's.

    The last is looked at when what is inside has read the text and known it.
    """
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        yield
    except csv.Error as error:
        raise BadInput(path, f"not a whole CSV ({error})", "export the report again") from None
    finally:
        csv.field_size_limit(before)
    if not text.endswith("\n"):
        raise BadInput(path, "its last line does not end, so it may be cut off", "export again, or add a newline")


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    for cells in reader:
        yield reader.line_num, [cell.strip() for cell in cells]


def launches(path: Path, text: str) -> list[Launch]:
    """The launches in the order of the file; raises BadInput for a row that is cut off and a table without rows."""
    header: list[str] = []
    units: dict[str, str] = {}
    found: dict[tuple[int, str], Launch] = {}
    table = 0  # files put together restart their ids
    for line, cells in _lines(text):
        if set(cells) >= HEAD:
            header, table = cells, table + 1
            continue
        if not header or not any(cells) or cells[0].startswith("=="):
            continue
        # The details page leaves the trailing rule columns out of some rows.
        if len(cells) < len(header) and "Metric Value" not in header[: len(cells)]:
            what = f"line {line} has {len(cells)} of {len(header)} cells"
            raise BadInput(path, what, "the file is cut off; export again")
        row = dict(zip(header, cells, strict=False))
        if not row["ID"]:
            units = row
            continue
        one = Launch(row["Kernel Name"], row.get("Device", ""), capability=row.get("CC", ""))
        launch = found.setdefault((table, row["ID"]), one)
        if launch.kernel != row["Kernel Name"]:
            raise BadInput(path, f"line {line}: ID {row['ID']} is of two kernels", "give one report at a time")
        if "Metric Name" not in row:
            measured = ((name, v) for name, v in row.items() if "__" in name)
            launch.metrics.update({name: (number(path, line, v), units.get(name, "")) for name, v in measured})
        elif row["Metric Name"]:
            value = number(path, line, row.get("Metric Value", ""))
            launch.metrics[row["Metric Name"]] = (value, row.get("Metric Unit", ""))
    if not (found or units):
        raise BadInput(path, "the table has a header and no rows", "was anything captured?")
    return list(found.values())


def number(path: Path, line: int, text: str) -> float | str:
    """A finite number with or without thousands separators, else the text (`n/a`, a list).

    Raises BadInput for one with a decimal comma: without it, 6,75 would be 675.
    """
    if DECIMAL_COMMA.fullmatch(text) and not GROUPED.fullmatch(text):
        raise BadInput(path, f"line {line}: {text:.40} has a decimal comma", "export it again with LC_ALL=C")
    try:
        found = float(text.replace(",", ""))
    except ValueError:
        return text
    return found if math.isfinite(found) else text
