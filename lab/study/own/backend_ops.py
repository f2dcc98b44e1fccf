"""`test-backend-ops`: `perf` mode as kernel_us, `test` mode as correct or not, in its text, SQL and CSV outputs.

Text lines read "OP(parameters): N runs - X us/run - Y MFLOP/run - Z TFLOPS", or "... kB/run - ... GB/s"; the unit is
the word before "/run". The SQL columns carry theirs in the name (time_us, bandwidth_gb_s, memory_kb). Either time is
held against the throughput printed beside it, so milliseconds under a microsecond's name are found out. The CSV output
has no time column at all: it says which operators work, never how fast.

What the figure is: the host's clock around a graph that repeats the operator on one set of buffers, averaged over all
runs. So it is one number without a spread, with a warm L2, and includes the gaps between launches; and `perf` does not
check the result, only `test` does. Field and column names as in llama.cpp's tests/test-backend-ops.cpp.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput, shown
from lab.study.own.sample import CUT_OFF, Imported, Sample, count, disagrees, from_log, number

TOOL = "test-backend-ops"
TABLE = "test_backend_ops"
LINE = re.compile(r"^\s*([A-Za-z0-9_]+)\((.*)\):\s*(.*?)\s*$")
NUMBER = r"([-+\w.]+)"
PERF = re.compile(rf"^(\d+) runs -\s*{NUMBER} (\S*)/run -\s*{NUMBER} (\S+)/run -\s*{NUMBER} (\S+)$")
OUTCOMES = (("not supported", "unsupported"), ("NOT SUPPORTED", "unsupported"), ("FAIL", "incorrect"), ("OK", "passed"))
SI = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
INSERT = re.compile(rf"^INSERT INTO {TABLE} \(([^)]*)\) VALUES \((.*)\);\s*$")
PARAMETER = re.compile(r",(?=[A-Za-z_]\w*=)")


def is_text(line: str) -> bool:
    """Whether a line is an operator's result."""
    found = LINE.match(line)
    return found is not None and (" runs -" in line or any(found[3].endswith(word) for word, _ in OUTCOMES))


def read_text(path: Path, text: str) -> Imported:
    """A console log; raises BadInput for a line that ends in the middle."""
    made: dict[str, Any] = {}
    samples: list[Sample] = []
    complete = False
    for n, line in enumerate(text.splitlines(), start=1):
        from_log(line, made)
        if found := re.match(r"^Backend (?:\d+/\d+:|name:)?\s*(\S+)\s*$", line):
            made = {**made, "backend_name": found[1], "gpu_info": ""}
        elif found := re.match(r"^\s+Device description:\s*(.+?)\s*$", line):
            made = {**made, "gpu_info": found[1]}
        complete |= "backends passed" in line
        if not (found := LINE.match(line)):
            continue
        where, op, parameters, rest = f"{shown(path)} line {n}", found[1], found[2], found[3]
        status = next((state for word, state in OUTCOMES if word in rest), "")
        if " runs" in rest or (rest and rest[0].isdigit()):
            samples.append(_timed(path, n, where, op, parameters, rest, made))
        elif status:
            samples.append(_sample(path, n, op, parameters, made, status=status))
        elif not rest and n == len(text.splitlines()):
            raise BadInput(where, f"{op} has no result", CUT_OFF)
    unfinished = f'{path.name}: no "backends passed" line at its end, so the run may have been cut short'
    return Imported(path, TOOL, tuple(samples), () if complete else (unfinished,))


def read_sql(path: Path, text: str) -> Imported:
    """The INSERT statements of `--output sql`, one a line; its values are quoted and never escaped."""
    samples: list[Sample] = []
    for n, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("INSERT"):
            continue
        where = f"{shown(path)} line {n}"
        found = INSERT.match(line)
        if not found:
            raise BadInput(where, f"is no whole INSERT into {TABLE}", CUT_OFF)
        names = [name.strip() for name in found[1].split(",")]
        values = found[2].strip().removeprefix("'").removesuffix("'").split("', '")
        if len(values) != len(names):
            raise BadInput(where, f"has {len(values)} values for {len(names)} columns", CUT_OFF)
        samples += _record(path, n, where, dict(zip(names, values, strict=True)))
    return Imported(path, TOOL, tuple(samples))


def read_csv(path: Path, text: str) -> Imported:
    """The lines of `--output csv`: operators that passed, failed or are unsupported, without times."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "op_name" in line)
    names = next(csv.reader([lines[start]]))
    samples: list[Sample] = []
    for n, line in enumerate(lines[start + 1 :], start=start + 2):
        if not line.startswith('"'):
            continue
        values = next(csv.reader([line]))
        where = f"{shown(path)} line {n}"
        if len(values) != len(names) or not line.rstrip().endswith('"'):
            raise BadInput(where, f"has {len(values)} of {len(names)} columns", CUT_OFF)
        samples += _record(path, n, where, dict(zip(names, values, strict=True)))
    timeless = f"{path.name}: this CSV holds no times (use the text output or --output sql for those)"
    return Imported(path, TOOL, tuple(samples), () if "time_us" in names else (timeless,))


def _record(path: Path, n: int, where: str, entry: Mapping[str, str]) -> Iterable[Sample]:
    """One result of the SQL or CSV output."""
    for key in ("op_name", "op_params", "test_mode", "supported"):
        if key not in entry:
            raise BadInput(where, f'has no "{key}"', "give the tool's output as it was printed")
    made = {key: entry[key] for key in ("build_commit", "backend_name", "backend_reg_name") if entry.get(key)}
    made["gpu_info"] = entry.get("device_description", "")
    op, parameters, when = entry["op_name"], entry["op_params"], entry.get("test_time", "")
    if entry["supported"] != "1":
        yield _sample(path, n, op, parameters, made, status="unsupported", when=when)
    elif entry["test_mode"] == "test":
        failed = bool(entry.get("error_message")) or entry.get("passed") == "0"
        yield _sample(path, n, op, parameters, made, status="incorrect" if failed else "passed", when=when)
    elif entry["test_mode"] == "perf" and "time_us" in entry:
        time_us = number(entry["time_us"], where, "time_us")
        wrong = ""
        if "memory_kb" in entry and "bandwidth_gb_s" in entry:
            kilobytes, rate = (number(entry[k], where, k, zero=True) for k in ("memory_kb", "bandwidth_gb_s"))
            wrong = _bandwidth(where, time_us, kilobytes, rate)
        flop_s = number(entry.get("flops", 0), where, "flops", zero=True)
        timed = {"unit": "us", "values": (time_us,), "wrong": wrong, "flop_s": flop_s}
        yield _sample(path, n, op, parameters, made, when=when, **timed)


def _timed(path: Path, n: int, where: str, op: str, parameters: str, rest: str, made: Mapping[str, Any]) -> Sample:
    found = PERF.match(rest)
    if not found:
        raise BadInput(where, f'"{rest[:60]}" is no whole result', CUT_OFF)
    runs, time, unit, work, work_unit, rate, rate_unit = found.groups()
    count(runs, where, "runs")
    duration, amount, speed = (
        number(time, where, f"{unit}/run"),
        *(number(word, where, what, zero=True) for word, what in ((work, work_unit), (rate, rate_unit))),
    )
    flop_s = 0.0
    if work_unit[1:] == "FLOP" and rate_unit[1:] == "FLOPS" and {work_unit[0], rate_unit[0]} <= SI.keys():
        flop_s = speed * SI[rate_unit[0]]
        wrong = _flops(where, duration, amount, SI[work_unit[0]], speed, SI[rate_unit[0]])
    elif (work_unit, rate_unit) == ("kB", "GB/s"):
        wrong = _bandwidth(where, duration, amount, speed)
    else:
        wrong = f"{where}: {work_unit}/run and {rate_unit} are no units of this output"
    if unit != "us":  # the judge refuses or misses the unit itself
        wrong = ""
    return _sample(path, n, op, parameters, made, unit=unit, values=(duration,), wrong=wrong, flop_s=flop_s)


def _flops(where: str, time_us: float, work: float, work_si: float, rate: float, rate_si: float) -> str:
    """Work over time is the rate. Each is printed with two decimals, which is coarse for small ones."""
    rounding = sum(0.005 / figure for figure in (time_us, work, rate) if figure)
    if not work or not rate or rounding > 0.3:
        return ""
    implied_us = work * work_si / (rate * rate_si) * 1e6
    if not disagrees(time_us, implied_us, 0.01 + rounding):
        return ""
    return f"{where}: {time_us:g} us/run is not the {implied_us:.6g} us that its FLOP and FLOPS imply"


def _bandwidth(where: str, time_us: float, kilobytes: float, gib_s: float) -> str:
    """The tool counts the operator's own bytes and, in the rate, those of its other nodes; both in powers of 1024."""
    implied = kilobytes * 1024 / time_us * 1e6 / 2**30
    if kilobytes < 16 or gib_s < 0.1 or 0.8 * implied <= gib_s <= 50 * implied:
        return ""
    return f"{where}: {gib_s:g} GB/s cannot be {kilobytes:g} kB in {time_us:g} us"


def _sample(path: Path, n: int, op: str, parameters: str, made: Mapping[str, Any], **more: Any) -> Sample:
    axes = {"op": op, "params": parameters}
    axes |= dict(part.split("=", 1) for part in PARAMETER.split(parameters) if "=" in part)
    return Sample(TOOL, path, n, "kernel_us", more.pop("unit", ""), axes=axes, made=dict(made), **more)
