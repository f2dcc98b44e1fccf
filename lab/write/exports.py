"""Measured rows in other tools' formats: flashinfer-trace, nvbench's JSON, github-action-benchmark's JSON.

Of every arm and workload the newest row. flashinfer-trace: one Trace a line by FlashInfer-Bench's schema; the reference
that its speed-up is over is the control of the same run, and the largest relative error, which is another figure than
ours, is said to be unknown (NaN). nvbench: version 1.0.0 of its JSON, a benchmark for each arm, a state for each
workload; its tag nv/cold/time/gpu is of a cold L2, so that a row with a warm one is a skipped state.
github-action-benchmark: the list that its tool customSmallerIsBetter takes (its README), names as arm and workload.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lab.base.errors import BadInput
from lab.row.records import Measurement

STATUS = {"ok": "PASSED", "incorrect": "INCORRECT_NUMERICAL", "timeout": "TIMEOUT"}
LEFT_OUT = ("suspect", "skipped")  # neither a result nor a failure of the solution
VERSION = {"major": 1, "minor": 0, "patch": 0, "string": "1.0.0"}


def text(rows: Iterable[Measurement], form: str) -> str:
    """The rows in one of FORMATS; raises BadInput where there are none to write."""
    newest = list({(row.device, row.phase, row.name, row.workload_id): row for row in rows}.values())
    if not any(row.ok for row in newest):
        raise BadInput("lab rows", "no row with a time is among these", "choose another --phase, --family or --device")
    return FORMATS[form](newest)


def flashinfer_trace(rows: Sequence[Measurement]) -> str:
    """JSON lines."""
    controls = {(row.phase, row.run, row.workload_id): row.time_us for row in rows if row.arm == "control"}
    lines = []
    for row in (row for row in rows if row.status not in LEFT_OUT):
        libs = {name: str(v) for name in ("torch", "triton", "cuda", "driver") if (v := getattr(row, name))}
        found: dict[str, Any] = {
            "status": STATUS.get(row.status, "RUNTIME_ERROR"),
            "environment": {"hardware": row.gpu or row.device, "libs": libs},
            "timestamp": row.started or row.run,
            "log": row.id + (f": {row.message}" if row.message else ""),
        }
        if row.status in ("ok", "incorrect"):
            extra = {"relative_error": row.relative_error}
            found["correctness"] = {"max_relative_error": "NaN", "max_absolute_error": "NaN", "extra": extra}
        if row.time_us:
            control = controls.get((row.phase, row.run, row.workload_id)) or row.time_us
            times = {"latency_ms": row.time_us / 1e3, "reference_latency_ms": control / 1e3}
            found["performance"] = {**times, "speedup_factor": control / row.time_us}
        axes = {k: v for k, v in row.workload.items() if isinstance(v, int)}
        workload = {"axes": axes, "inputs": {}, "uuid": row.workload_id}
        trace = {"definition": row.family, "workload": workload, "solution": row.name, "evaluation": found}
        lines.append(json.dumps(trace, allow_nan=False) + "\n")
    return "".join(lines)


def nvbench(rows: Sequence[Measurement]) -> str:
    """One document."""
    gpus = list(dict.fromkeys(row.gpu or row.device for row in rows))
    arms: dict[str, list[Measurement]] = {}
    for row in rows:
        arms.setdefault(f"{row.phase}/{row.name}", []).append(row)
    benchmarks = []
    for index, (name, own) in enumerate(arms.items()):
        workloads = list(dict.fromkeys(row.workload_id for row in own))
        values = [{"input_string": w, "description": "", "value": w} for w in workloads]
        axis = {"name": "Workload", "type": "string", "flags": "", "values": values}
        states = [_state(row, gpus.index(row.gpu or row.device)) for row in own]
        used = sorted({state["device"] for state in states})
        benchmarks.append({"name": name, "index": index, "devices": used, "axes": [axis], "states": states})
    meta = {"argv": ["lab", "rows"], "version": {"json": VERSION}}
    devices = [{"id": number, "name": gpu} for number, gpu in enumerate(gpus)]
    return json.dumps({"meta": meta, "devices": devices, "benchmarks": benchmarks}, indent=1, allow_nan=False) + "\n"


def _state(row: Measurement, device: int) -> dict[str, Any]:
    timed = row.time_us is not None and row.l2 == "cold"
    where = [{"name": "Workload", "type": "string", "value": row.workload_id}]
    state: dict[str, Any] = {"name": f"Device={device} Workload={row.workload_id}", "device": device}
    state |= {"type_config_index": 0, "axis_values": where, "summaries": None, "is_skipped": not timed}
    if not timed:
        return state | {"skip_reason": row.message or f"{row.status}, {row.l2 or 'no'} L2"}
    mean = statistics.fmean(row.samples_us or (row.time_us or 0.0,)) / 1e6
    figures = {"mean": mean, "median": (row.time_us or 0.0) / 1e6, "stdev/relative": (row.stdev_us or 0.0) / 1e6 / mean}
    held = [("nv/cold/sample_size", "int64", str(row.n))]
    held += [(f"nv/cold/time/gpu/{key}", "float64", repr(value)) for key, value in figures.items()]
    data = [(tag, [{"name": "value", "type": kind, "value": value}]) for tag, kind, value in held]
    return state | {"summaries": [{"tag": tag, "name": tag, "data": values} for tag, values in data]}


def github_action_benchmark(rows: Sequence[Measurement]) -> str:
    """A list of objects."""
    found = [
        {"name": f"{row.phase}: {row.name} at {row.workload_id} on {row.device}", "unit": "us", "value": row.time_us,
         "range": f"± {(row.sd_pct or 0.0) / 100 * (row.time_us or 0.0):.4g}", "extra": row.id}
        for row in rows if row.time_us is not None
    ]  # fmt: skip
    return json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Sequence[Measurement]], str]] = {
    "flashinfer-trace": flashinfer_trace,
    "nvbench": nvbench,
    "github-action-benchmark": github_action_benchmark,
}
