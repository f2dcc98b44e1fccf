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
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from lab.base import files
from lab.base.errors import BadInput
from lab.base.files import NotNegative, Positive
from lab.study.own.sample import CUT_OFF, Imported, Line, Made, Sample, Word, from_log, lines

TOOL = "test-backend-ops"
TABLE = "test_backend_ops"
Status = Literal["passed", "incorrect", "unsupported"]
OUTCOMES: dict[str, Status] = {"not supported": "unsupported", "NOT SUPPORTED": "unsupported"}
OUTCOMES |= {"FAIL": "incorrect", "OK": "passed"}
LINE = re.compile(r"^\s*([A-Za-z0-9_]+)\((.*)\):\s*(.*?)\s*$")
NUMBER = r"([-+\w.]+)"
PERF = re.compile(rf"^(\d+) runs -\s*{NUMBER} (\S*)/run -\s*{NUMBER} (\S+)/run -\s*{NUMBER} (\S+)$")
SI = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
INSERT = re.compile(rf"^INSERT INTO {TABLE} \(([^)]*)\) VALUES \((.*)\);\s*$")
PARAMETER = re.compile(r",(?=[A-Za-z_]\w*=)")


class Result(msgspec.Struct):
    """One result of the SQL or CSV output; only `--output sql` has times."""

    op_name: str
    op_params: str
    test_mode: str
    supported: str
    passed: str = ""
    error_message: str = ""
    time_us: Positive | None = None
    flops: NotNegative = 0.0
    bandwidth_gb_s: NotNegative | None = None
    memory_kb: NotNegative | None = None
    build_commit: str = ""
    backend_name: str = ""
    backend_reg_name: str = ""
    device_description: str = ""
    test_time: str = ""


def is_text(line: str) -> bool:
    """Whether a line is an operator's result on the console."""
    found = LINE.match(line)
    return found is not None and (" runs -" in line or found[3].endswith(tuple(OUTCOMES)))


def is_sql(line: str) -> bool:
    """Whether a line is a result of `--output sql`."""
    return line.startswith(f"INSERT INTO {TABLE}")


def is_csv(line: str) -> bool:
    """Whether a line is the header of `--output csv`."""
    return "op_name" in line and "op_params" in line and "," in line and "(" not in line


def read_text(path: Path, text: str) -> Imported:
    """A console log; raises BadInput for a line that ends in the middle."""
    made, samples, complete = Made(), list[Sample](), False
    for at, line in lines(path, text):
        made = from_log(line, made)
        if found := re.match(r"^Backend (?:\d+/\d+:|name:)?\s*(\S+)\s*$", line):
            made = msgspec.structs.replace(made, backend_name=found[1], gpu_info="")
        elif found := re.match(r"^\s+Device description:\s*(.+?)\s*$", line):
            made = msgspec.structs.replace(made, gpu_info=found[1])
        complete |= "backends passed" in line
        if not (found := LINE.match(line)):
            continue
        axes, rest = _axes(found[1], found[2]), found[3]
        if " runs" in rest or rest[:1].isdigit():
            samples.append(_timed(at, axes, rest, made))
        elif status := next((state for word, state in OUTCOMES.items() if word in rest), None):
            samples.append(Sample(TOOL, at, "kernel_us", axes=axes, made=made, status=status))
        elif not rest and at.number == len(text.splitlines()):
            raise BadInput(str(at), f"{found[1]} has no result", CUT_OFF)
    unfinished = f'{path.name}: no "backends passed" line at its end, so the run may have been cut short'
    return Imported(path, TOOL, tuple(samples), () if complete else (unfinished,))


def read_sql(path: Path, text: str) -> Imported:
    """The INSERT statements of `--output sql`, one a line; its values are quoted and never escaped."""
    samples: list[Sample] = []
    for at, line in lines(path, text):
        if line.startswith("INSERT"):
            if not (found := INSERT.match(line)):
                raise BadInput(str(at), f"is no whole INSERT into {TABLE}", CUT_OFF)
            names = [name.strip() for name in found[1].split(",")]
            samples += _result(at, names, found[2].strip().removeprefix("'").removesuffix("'").split("', '"))
    return Imported(path, TOOL, tuple(samples))


def read_csv(path: Path, text: str) -> Imported:
    """The lines of `--output csv`: operators that passed, failed or are unsupported, without times."""
    start, head = next((at, line) for at, line in lines(path, text) if "op_name" in line)
    names = next(csv.reader([head]))
    samples: list[Sample] = []
    for at, line in lines(path, text, start.number + 1):
        if line.startswith('"'):
            samples += _result(at, names, next(csv.reader([line])), whole=line.rstrip().endswith('"'))
    timeless = f"{path.name}: this CSV holds no times (use the text output or --output sql for those)"
    return Imported(path, TOOL, tuple(samples), () if "time_us" in names else (timeless,))


def _axes(op: str, parameters: str) -> dict[str, Word]:
    named = dict(part.split("=", 1) for part in PARAMETER.split(parameters) if "=" in part)
    return {"op": op, "params": parameters, **named}


def _result(at: Line, names: Sequence[str], cells: Sequence[str], *, whole: bool = True) -> list[Sample]:
    """The sample of one SQL or CSV line; none for a mode that is neither `perf` nor `test`."""
    read = files.convert(at.columns(names, cells, whole=whole), Result, str(at), words=True)
    made = Made(read.build_commit, "", read.device_description, "", "", read.backend_name, read.backend_reg_name)
    axes = _axes(read.op_name, read.op_params)
    if read.supported != "1" or read.test_mode == "test":
        failed = bool(read.error_message) or read.passed == "0"
        status: Status = "unsupported" if read.supported != "1" else "incorrect" if failed else "passed"
        return [Sample(TOOL, at, "kernel_us", axes=axes, made=made, status=status, when=read.test_time)]
    if read.test_mode != "perf" or read.time_us is None:
        return []
    wrong = ""
    if read.memory_kb is not None and read.bandwidth_gb_s is not None:
        wrong = _bandwidth(at, read.time_us, read.memory_kb, read.bandwidth_gb_s)
    time = (read.time_us,)
    return [Sample(TOOL, at, "kernel_us", "us", time, axes, {}, made, "ok", read.flops, wrong, read.test_time)]


def _timed(at: Line, axes: dict[str, Word], rest: str, made: Made) -> Sample:
    found = PERF.match(rest)
    if not found:
        raise BadInput(str(at), f'"{rest[:60]}" is no whole result', CUT_OFF)
    runs, time, unit, work, work_unit, rate, rate_unit = found.groups()
    at.count(runs, "runs")
    duration = at.figure(time, f"{unit}/run")
    amount, speed = at.figure(work, work_unit, zero=True), at.figure(rate, rate_unit, zero=True)
    flop_s = 0.0
    if work_unit[1:] == "FLOP" and rate_unit[1:] == "FLOPS" and {work_unit[0], rate_unit[0]} <= SI.keys():
        flop_s = speed * SI[rate_unit[0]]
        # Work over time is the rate. Each is printed with two decimals, which is coarse for small ones.
        rounding = sum(0.005 / figure for figure in (duration, amount, speed) if figure)
        wrong = ""
        if flop_s and amount and rounding <= 0.3:
            implied_us = amount * SI[work_unit[0]] / flop_s * 1e6
            wrong = at.contradiction("us/run", duration, implied_us, 0.01 + rounding, "its FLOPS")
    elif (work_unit, rate_unit) == ("kB", "GB/s"):
        wrong = _bandwidth(at, duration, amount, speed)
    else:
        wrong = f"{at}: {work_unit}/run and {rate_unit} are no units of this output"
    if unit != "us":  # the judge refuses or misses the unit itself
        wrong = ""
    return Sample(TOOL, at, "kernel_us", unit, (duration,), axes, {}, made, "ok", flop_s, wrong)


def _bandwidth(at: Line, time_us: float, kilobytes: float, gib_s: float) -> str:
    """The tool counts the operator's own bytes and, in the rate, those of its other nodes; both in powers of 1024."""
    implied = kilobytes * 1024 / time_us * 1e6 / 2**30
    if kilobytes < 16 or gib_s < 0.1 or 0.8 * implied <= gib_s <= 50 * implied:
        return ""
    return f"{at}: {gib_s:g} GB/s cannot be {kilobytes:g} kB in {time_us:g} us"
