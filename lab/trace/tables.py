"""The profilers' tables as a trace: `nsys stats` (cuda_gpu_kern_sum, cuda_gpu_trace), rocprof's CSV, Nsight Compute.

`nsys stats` prints its tables as CSV or in columns under a line of dashes, and several reports one below the other
among lines of its own: a table begins at its header and ends at the next one or at a blank line. Units stand in the
header and are read, never assumed. cuda_gpu_kern_sum and Nsight Compute give totals without a timeline; cuda_gpu_trace
and rocprof's traces have one and no graphs, ranges or API calls, and nsys's sizes are rounded to the printed digits (MB
is 1e6 bytes).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.base.errors import BadInput
from lab.bench import ncu
from lab.trace.model import LIMIT_NS, NONE, Launch, Trace, Work, build, direction, whole

UNIT_NS = {"ns": 1.0, "nsec": 1.0, "nsecond": 1.0, "us": 1e3, "usec": 1e3, "usecond": 1e3, "ms": 1e6, "msec": 1e6}
UNIT_NS |= {"msecond": 1e6, "s": 1e9, "sec": 1e9, "second": 1e9}
UNIT_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}
LAUNCH = ("registers_per_thread", "shared_mem_per_block", "block_size", "grid_size")
MOVED_BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}  # as Nsight Compute has them
TITLE = re.compile(r"^(?P<name>.*?)(?:\s*\((?P<unit>[^)]*)\))?$")
DEVICE = re.compile(r"^(?:(?P<name>.*?)\s*\((?P<number>\d+)\)|Agent (?P<agent>\d+))$")
MOVED = re.compile(r"^\[(?:CUDA )?mem(cpy|set)|^(?:MEMORY_COPY_)?(?:HOST|DEVICE)_TO_", re.IGNORECASE)
RULE = re.compile(r"^\s*-+(?: +-+)+\s*$")  # under the titles of a table in columns
GROUPED = re.compile(r"^\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
CUT = "\u2026"  # stands for what nsys leaves out of a long name in columns
# rocprofv3's and rocprof's titles as nsys has them.
ROCM = {
    **dict.fromkeys(("Kernel_Name", "KernelName", "Direction"), "Name"),
    **dict.fromkeys(("Start_Timestamp", "BeginNs"), "Start (ns)"),
    **dict.fromkeys(("End_Timestamp", "EndNs"), "End (ns)"),
    **dict.fromkeys(("Stream_Id", "Queue_Id", "queue-id"), "Strm"),
    **dict.fromkeys(("Agent_Id", "gpu-id", "Source_Agent_Id"), "Device"),
    **{"TotalDurationNs": "Total Time (ns)", "Calls": "Instances", "Percentage": "Time (%)"},
    "Correlation_Id": "CorrId",
}
REPORT_LINE = re.compile(r"^\s*(Generating|Processing|Exporting|NOTICE|WARNING|SKIPPED|==\w+==|\*\*|\[\d+/\d+\])")


@dataclass(frozen=True)
class Line:
    """One row of a table. cells: title without its unit -> (text, unit)."""

    path: Path
    number: int
    cells: Mapping[str, tuple[str, str]]
    rocm: bool = False

    def text(self, *titles: str) -> str:
        """The first of these cells that is not empty, "" when all are."""
        return next((found for t in titles if (found := self.cells.get(t, ("", ""))[0])), "")

    def whole(self, *titles: str) -> int:
        """The first of these cells that is not empty as a whole number, NONE when it is none."""
        return whole(self.text(*titles))

    def value(self, title: str, units: Mapping[str, float], default: float | None = None) -> float:
        """A number in base units, whose unit stands in its column's title; refuses an empty cell without a default."""
        text, unit = self.cells.get(title, ("", ""))
        if text in ("", "-"):
            if default is None:
                raise BadInput(self.path, f'line {self.number} has no "{title}"', "the file is cut off; export again")
            return default
        if units and unit and unit not in units:
            raise BadInput(self.path, f'unit "{unit}" of column "{title}"', "known: " + ", ".join(units))
        scale = units.get(unit, 1.0)
        # Nanoseconds since 1970 are more than a double holds.
        exact = scale == 1 and text.isascii() and text.isdigit() and len(text) < 20
        found = int(text) if exact else ncu.number(self.path, self.number, text)
        if isinstance(found, str) or not 0 <= found * scale < LIMIT_NS:
            what = f"line {self.number}: {text!r:.40} is no number that can stand there"
            raise BadInput(self.path, what, "export the report again")
        return found if scale == 1 else found * scale


def read(path: Path, text: str) -> Trace | None:
    """The trace in a CSV's text, rather a timeline than totals; None for no known report, BadInput for a broken row."""
    with ncu.whole_csv(path, text):
        return _read(path, text)


def _read(path: Path, text: str) -> Trace | None:
    if ncu.is_table(text):
        return _ncu(path, ncu.launches(path, text))
    found: dict[str, list[Line]] = {}
    header: list[tuple[str, str]] = []
    own: list[Line] | None = None
    rocm = False
    for number, cells in _rows(text):
        titles = [(m["name"], m["unit"] or "") for c in cells if (m := TITLE.match(ROCM.get(c, c)))]
        report = _report(cells, {name for name, _ in titles})
        if report is not None:
            header, own = titles, found.setdefault(report, []) if report else None
            rocm = any(cell in ROCM for cell in cells if cell != "Name")
        elif not any(cells) or (len(cells) == 1 and REPORT_LINE.match(cells[0])):
            own = own if not own else None
        elif own is not None:
            if len(cells) < len(header):
                what = f"line {number} has {len(cells)} of {len(header)} cells"
                raise BadInput(path, what, "the file is cut off; export again")
            named = {name: (cell, unit) for (name, unit), cell in zip(header, cells, strict=False)}
            own.append(Line(path, number, named, rocm))
    for report, convert in (("gpu_trace", _gpu_trace), ("kern_sum", _kern_sum)):
        if report in found:
            if not found[report]:
                raise BadInput(path, "the table has a header and no rows", "was anything captured?")
            return convert(path, found[report])
    return None


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line with its number: of CSV, or of columns as wide as the dashes under their titles."""
    lines = text.splitlines()
    if not any(RULE.match(line) for line in lines):
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        yield from ((reader.line_num, [c.strip() for c in row]) for row in reader)
        return
    columns: list[slice] = []
    for number, line in enumerate(lines, 1):
        if number < len(lines) and RULE.match(lines[number]):
            edges = [m.start() for m in re.finditer("-+", lines[number])]
            columns = [slice(a, b) for a, b in zip(edges, [*edges[1:], None], strict=True)]
        elif not line.strip():
            columns = []
        if not RULE.match(line):
            cells = [line[at].strip() for at in columns] or [line.strip()]
            yield number, [c.replace(",", "") if GROUPED.match(c) else c for c in cells]


def _report(cells: Sequence[str], titles: set[str]) -> str | None:
    """A known table's report, "" for another report's header, None for a line that is no header."""
    known = len(titles & {"Strm", "Device", "CorrId", "Stream"})
    if titles >= {"Start", "Name"} and titles & {"Duration", "End"} and known >= 2:
        return "gpu_trace"
    if titles >= {"Total Time", "Instances", "Name"}:
        return "kern_sum"
    return "" if cells and cells[0].startswith(("Time (%)", "Time(%)", "Start (")) else None


def _kern_sum(path: Path, rows: list[Line]) -> Trace:
    names = [row.text("Name") for row in rows]
    totals = [round(row.value("Total Time", UNIT_NS)) for row in rows]
    counts = [round(row.value("Instances", {})) for row in rows]
    missing = 100 - sum(row.value("Time", {}, float("nan")) for row in rows)
    warnings = ["totals only: no timeline, so no span, idle time or overlap, and no copies"]
    # Each printed share is rounded to 0.1, so n rows may be 0.05 n off.
    if missing > 0.05 * len(rows) + 0.1:
        warnings.append(f"the rows' shares sum to {100 - missing:.1f} %: rows are missing from the file")
    warnings += _cut(names)
    kernels = {"start_ns": [0] * len(rows), "end_ns": totals, "name": names, "instances": counts}
    return build(_tool(rows), path, {"kernels": kernels}, warnings=tuple(warnings), timeline=False)


def _cut(names: Sequence[str]) -> list[str]:
    short = sum(CUT in name for name in set(names))
    return [f"{short} names are cut off in the text, which may hide their category: export --format csv"] * bool(short)


def _tool(rows: Sequence[Line]) -> str:
    return "rocprof" if rows[0].rocm else "nsys stats"


def _gpu_trace(path: Path, rows: list[Line]) -> Trace:
    names = [row.text("Name") for row in rows]
    moved = [MOVED.match(name) for name in names]
    kinds = np.array([f"mem{(found[1] or 'cpy').lower()}" if found else "kernels" for found in moved])
    # Of a copy from the host the destination is the GPU.
    ends = ["Destination_Agent_Id" if "HOST_TO" in name else "Device" for name in names]
    device = [DEVICE.match(row.text(end, "Device")) for row, end in zip(rows, ends, strict=True)]
    numbers = [
        whole(d["number"] or d["agent"]) if d else row.whole("Device") for d, row in zip(device, rows, strict=True)
    ]
    gpus = dict(sorted(zip(numbers, ((d["name"] or "") if d else "" for d in device), strict=True)))
    start = [round(row.value("Start", UNIT_NS)) for row in rows]
    columns = {
        "start_ns": start,
        "end_ns": [
            s + round(row.value("Duration", UNIT_NS)) if "Duration" in row.cells else round(row.value("End", UNIT_NS))
            for s, row in zip(start, rows, strict=True)
        ],
        "device": numbers,
        "context": [row.whole("Ctx", "Context") for row in rows],
        "stream": [row.whole("Strm", "Stream") for row in rows],
        "correlation": [row.whole("CorrId") for row in rows],
        "bytes": [round(row.value("Bytes", UNIT_BYTES, 0.0)) for row in rows],
        "kind": [direction(name) for name in names],
        "name": names,
    }
    by = {kind: {c: np.array(values)[kinds == kind] for c, values in columns.items()} for kind in np.unique(kinds)}
    said = "the report names no graphs: opaque graph launches, if there were any, are missing from busy time"
    cut = _cut([name for name, found in zip(names, moved, strict=True) if not found])
    return build(_tool(rows), path, by, gpus=gpus, warnings=(said, *cut))


def _ncu(path: Path, launches: Sequence[ncu.Launch]) -> Trace:
    lengths, unknown = [], 0
    for launch in launches:
        value, unit = launch.metrics.get("gpu__time_duration.sum") or launch.metrics.get("Duration") or (None, "")
        ns = value * UNIT_NS[unit] if isinstance(value, float) and unit in UNIT_NS else None
        if ns is not None and not 0 <= ns < LIMIT_NS:
            raise BadInput(path, f"a launch of {launch.kernel[:80]} took {value:g} {unit}", "export the report again")
        lengths.append(round(ns or 0))
        unknown += ns is None
    warnings = ["Nsight Compute replays kernels one by one, by default at locked clocks: times are no shares of a run"]
    if unknown:
        warnings.append(f"{unknown} of {len(launches)} kernels have no duration metric (gpu__time_duration.sum)")
    names, devices = [launch.kernel for launch in launches], [whole(launch.device) for launch in launches]
    kernels = {"start_ns": [0] * len(names), "end_ns": lengths, "name": names, "device": devices}
    gpus = dict.fromkeys(sorted({*devices} - {NONE}), "")
    work: dict[str, Work] = {}
    launched: dict[str, Launch] = {}
    for name, length, launch in zip(names, lengths, launches, strict=True):
        how = [launch.metrics.get(f"launch__{n}", (None, ""))[0] for n in LAUNCH]
        if name not in launched and all(isinstance(v, float) for v in how):
            registers, shared, block, grid = map(int, how)
            launched[name] = Launch(registers, shared, (block,), (grid,))
        both = [_bytes(launch.metrics.get(metric)) for metric in MOVED_BYTES]
        if length and None not in both:
            moved, seen = sum(n for n in both if n), work.get(name, Work(name, "", 0, 0, None, 0.0, ""))
            count, mean = seen.launches + 1, (seen.bytes * seen.launches + moved) / (seen.launches + 1)
            work[name] = Work(name, "", count, seen.ns + length, None, mean, "")
    more: dict[str, Any] = {
        "gpus": gpus,
        "capability": ", ".join(sorted({launch.capability for launch in launches} - {""})),
        "warnings": tuple(warnings),
        "work": tuple(work.values()),
        "launched": launched,
    }
    return build("ncu", path, {"kernels": kernels}, timeline=False, **more)


def _bytes(metric: tuple[object, str] | None) -> float | None:
    value, unit = metric or (None, "")
    return value * BYTES[unit] if isinstance(value, float) and value >= 0 and unit in BYTES else None
