"""The profilers' CSV output into the normalised trace: `nsys stats` and Nsight Compute (`ncu --csv`).

Both tools print a table after lines of their own ("Generating SQLite file ...", "==PROF== ..."), and `nsys stats`
prints several reports one below the other, so tables are found by their header and end at the next header or at a blank
line. Units stand in the header or in a column and are read, never assumed. Kernel names hold commas and are quoted.

What the tables do not hold is not made up: cuda_gpu_kern_sum and Nsight Compute give times and no timeline, so a trace
from them has no span, no idle time and no overlap; cuda_gpu_trace has a timeline and no graphs, NVTX or API calls.
Sizes in cuda_gpu_trace are rounded to the printed digits (MB taken as 1e6 bytes).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput
from lab.bench import ncu
from lab.trace.model import COPY_KINDS, NONE, Copies, Fills, Kernels, Trace

UNIT_NS = {"ns": 1.0, "nsec": 1.0, "nsecond": 1.0, "us": 1e3, "usec": 1e3, "usecond": 1e3, "ms": 1e6, "msec": 1e6}
UNIT_NS |= {"msecond": 1e6, "s": 1e9, "sec": 1e9, "second": 1e9}
UNIT_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}
SPELLED = {"Host": "H", "Device": "D", "Array": "A", "Peer": "P"}
DEVICE = re.compile(r"^(?P<name>.*?)\s*\((?P<number>\d+)\)$")
REPORT_LINE = re.compile(r"^\s*(Generating|Processing|Exporting|NOTICE|WARNING|SKIPPED|==\w+==|\*\*)")

Row = dict[str, str]


def kind(text: str) -> str:
    """Which table the text holds: "kern_sum", "gpu_trace", "ncu", or "" for none of them."""
    kinds = {found for found, _, _ in _tables(text)}
    return "ncu" if ncu.is_table(text) else next((k for k in ("gpu_trace", "kern_sum") if k in kinds), "")


def read(path: Path, text: str) -> Trace:
    """The trace in a CSV's text; where a file holds a timeline and totals, the timeline is taken.

    Raises BadInput, one line with the line number, for a row that is cut off or not a number.
    """
    wanted = kind(text)
    if not wanted:
        raise BadInput(path, "CSV of no known report", "give cuda_gpu_kern_sum, cuda_gpu_trace or ncu --csv output")
    if wanted == "ncu":
        return _ncu(path, ncu.launches(path, text))
    found = [(header, rows) for k, header, rows in _tables(text) if k == wanted]
    rows = [_row(path, header, number, cells) for header, lines in found for number, cells in lines]
    if not rows:
        raise BadInput(path, "the table has a header and no rows", "was anything captured?")
    return {"kern_sum": _kern_sum, "gpu_trace": _gpu_trace}[wanted](path, rows)


def _tables(text: str) -> Iterator[tuple[str, list[str], list[tuple[int, list[str]]]]]:
    """(kind, header, [(line number, cells)]) of every known table, in order."""
    reader = csv.reader(io.StringIO(text, newline=""))
    current: tuple[str, list[str], list[tuple[int, list[str]]]] | None = None
    for cells in reader:
        cells = [c.strip() for c in cells]
        which = _header_kind(cells)
        if which is not None:
            if current:
                yield current
            current = (which, cells, []) if which else None
        elif not any(cells) or (len(cells) == 1 and REPORT_LINE.match(cells[0])):
            if current and current[2]:
                yield current
                current = None
        elif current:
            current[2].append((reader.line_num, cells))
    if current:
        yield current


def _header_kind(cells: Sequence[str]) -> str | None:
    """A known table's kind, "" for another report's header, None for a line that is no header."""
    have = {_plain(c) for c in cells}
    if {"Start", "Duration", "Name"} <= have and len(have & {"Strm", "Device", "CorrId", "Stream"}) >= 2:
        return "gpu_trace"
    if {"Total Time", "Instances", "Name"} <= have:
        return "kern_sum"
    return "" if cells and cells[0].startswith(("Time (%)", "Time(%)", "Start (")) else None


def _plain(title: str) -> str:
    """`Total Time (ns)` without its unit."""
    return re.sub(r"\s*\([^)]*\)$", "", title)


def _row(path: Path, header: Sequence[str], number: int, cells: Sequence[str]) -> Row:
    """Cells by full header title, each also under its title without the unit; refuses a row that is too short."""
    if len(cells) < len(header):
        raise BadInput(
            path, f"line {number} has {len(cells)} of {len(header)} cells", "the file is cut off; export again"
        )
    row = dict(zip(header, cells, strict=False))
    row["line"] = str(number)
    return row


def _number(path: Path, row: Row, text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise BadInput(path, f"line {row['line']}: {text!r} is no number", "export the report again") from None


def _cell(path: Path, row: Row, title: str, units: dict[str, float]) -> float | None:
    """A number in base units, whose unit stands in its column's title; None where there is none (an empty cell)."""
    for full, text in row.items():
        if _plain(full) == title:
            if text in ("", "-"):
                return None
            unit = full[len(title) :].strip(" ()")
            if unit and unit not in units:
                raise BadInput(path, f'unit "{unit}" of column "{full}"', "known: " + ", ".join(units))
            return _number(path, row, text) * (units[unit] if unit else 1.0)
    return None


def _need(path: Path, row: Row, title: str, units: dict[str, float]) -> float:
    value = _cell(path, row, title, units)
    if value is None:
        raise BadInput(path, f'line {row["line"]} has no "{title}"', "the file is cut off; export again")
    return value


def _kern_sum(path: Path, rows: list[Row]) -> Trace:
    names: dict[str, int] = {}
    codes, totals, counts, shares = [], [], [], []
    for row in rows:
        codes.append(names.setdefault(row["Name"], len(names)))
        totals.append(round(_need(path, row, "Total Time", UNIT_NS)))
        counts.append(round(_need(path, row, "Instances", {})))
        shares.append(_number(path, row, row.get("Time (%)", row.get("Time(%)", "nan"))))
    warnings = ["totals only: no timeline, so no span, idle time or overlap, and no copies"]
    missing = 100 - sum(shares)
    # Each printed share is rounded to 0.1, so n rows may be 0.05 n off.
    if missing > 0.05 * len(rows) + 0.1:
        warnings.append(f"the rows' shares sum to {100 - missing:.1f} %: rows are missing from the file")
    kernels = Kernels.of(start_ns=[0] * len(codes), end_ns=totals, name=codes, instances=counts)
    return Trace("nsys stats", path.name, kernels=kernels, names=list(names), warnings=tuple(warnings), timeline=False)


def _gpu_trace(path: Path, rows: list[Row]) -> Trace:
    """Kernels, `[CUDA memcpy ...]` and `[CUDA memset]` rows of cuda_gpu_trace."""
    names: dict[str, int] = {}
    gpus: dict[int, str] = {}
    parts: dict[str, list[dict[str, Any]]] = {"kernel": [], "memcpy": [], "memset": []}
    for row in rows:
        start = round(_need(path, row, "Start", UNIT_NS))
        device, context, stream = (
            _whole(row, *titles) for titles in (("Device",), ("Ctx", "Context"), ("Strm", "Stream"))
        )
        found = DEVICE.match(row.get("Device", ""))
        if found:
            device = int(found["number"])
            gpus[device] = found["name"]
        one: dict[str, Any] = {"start_ns": start, "end_ns": start + round(_need(path, row, "Duration", UNIT_NS))}
        one |= {"device": device, "context": context, "stream": stream, "correlation": _whole(row, "CorrId")}
        name = row["Name"]
        if name.startswith("[CUDA mem") or name.lower().startswith(("[memcpy", "[memset")):
            one["bytes"] = round(_cell(path, row, "Bytes", UNIT_BYTES) or 0)
            which = "memset" if "memset" in name.lower() else "memcpy"
            if which == "memcpy":
                one["kind"] = copy_kind(name)
            parts[which].append(one)
        else:
            parts["kernel"].append(one | {"name": names.setdefault(name, len(names))})
    columns = {k: {c: [r[c] for r in v] for c in v[0]} for k, v in parts.items() if v}
    used = {int(d) for c in columns.values() for d in c["device"]}
    return Trace(
        "nsys stats",
        path.name,
        kernels=Kernels.of(**columns.get("kernel", {})),
        memcpy=Copies.of(**columns.get("memcpy", {})),
        memset=Fills.of(**columns.get("memset", {})),
        names=list(names),
        gpus={d: gpus.get(d, "") for d in sorted(used)},
        warnings=("the report names no graphs: opaque graph launches, if there were any, are missing from busy time",),
    )


def _whole(row: Row, *titles: str) -> int:
    text = next((row[t] for t in titles if row.get(t, "").strip()), "")
    return int(text) if text.isdigit() else NONE


def copy_kind(name: str) -> int:
    """COPY_KINDS' index from `[CUDA memcpy Host-to-Device]` or `[CUDA memcpy HtoD]`; 0 when neither."""
    found = re.search(r"(Host|Device|Array|Peer)-to-(Host|Device|Array|Peer)", name)
    short = f"{SPELLED[found[1]]}to{SPELLED[found[2]]}" if found else name.strip("[] ").split(" ")[-1]
    return COPY_KINDS.index(short) if short in COPY_KINDS else 0


def _ncu(path: Path, launches: Sequence[ncu.Launch]) -> Trace:
    names: dict[str, int] = {}
    lengths, unknown = [], 0
    for launch in launches:
        value, unit = launch.metrics.get("gpu__time_duration.sum") or launch.metrics.get("Duration") or (None, "")
        length = value * UNIT_NS[unit] if isinstance(value, float) and unit in UNIT_NS else None
        lengths.append(round(length or 0))
        unknown += length is None
    codes = [names.setdefault(launch.kernel, len(names)) for launch in launches]
    devices = [int(launch.device) if launch.device.isdigit() else NONE for launch in launches]
    warnings = ["Nsight Compute replays kernels one by one, by default at locked clocks: times are no shares of a run"]
    if unknown:
        warnings.append(f"{unknown} of {len(codes)} kernels have no duration metric (gpu__time_duration.sum)")
    kernels = Kernels.of(start_ns=[0] * len(codes), end_ns=lengths, name=codes, device=devices)
    gpus = dict.fromkeys(sorted(set(devices) - {NONE}), "")
    trace = Trace("ncu", path.name, kernels=kernels, names=list(names), gpus=gpus, warnings=tuple(warnings))
    return trace.but(timeline=False)
