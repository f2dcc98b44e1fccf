"""Benchmarks of kernels that print JSON, as kernel_us: nvbench, flashinfer-trace and pytest-benchmark.

nvbench (`--json`; its docs/benchmarks.md and the reader in its own scripts): the mean GPU time of each state in
seconds, tag nv/cold/time/gpu/mean, with the relative standard deviation of its samples. flashinfer-trace (the Trace
schema of FlashInfer-Bench): one evaluation a line, latency in ms, and only of a solution that passed; one found
incorrect is INVALID. pytest-benchmark (`--benchmark-json`; its page on comparing runs): seconds by the host's clock,
every round with --benchmark-save-data, else their mean and deviation.

The samples of one process share its addresses, so their deviation is taken for that of one figure, never divided by
the root of their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput
from lab.study.own.sample import AS_PRINTED, Imported, Line, Made, Objects, Sample, Word

NVBENCH, FLASHINFER, PYTEST = "nvbench", "flashinfer-trace", "pytest-benchmark"
MEAN, NOISE = "nv/cold/time/gpu/mean", "nv/cold/time/gpu/stdev/relative"
HOST = "pytest-benchmark times by the host's clock, whatever the GPU still does"


def is_one(entry: dict[str, Any]) -> bool:
    """Whether a JSON object is a result of one of the three."""
    return {"definition", "workload"} <= entry.keys() or isinstance(entry.get("benchmarks"), list)


def read_objects(path: Path, entries: Objects, log: list[str]) -> Imported:
    """The times of one file; raises BadInput for another version and for a result without its numbers."""
    first = entries[0][1]
    tool = FLASHINFER if "definition" in first else PYTEST if "machine_info" in first else NVBENCH
    read = {FLASHINFER: _flashinfer, PYTEST: _pytest, NVBENCH: _nvbench}[tool]
    samples: list[Sample] = []
    for at, entry in entries:
        try:
            samples += read(at, entry)
        except (KeyError, TypeError, AttributeError) as error:
            key = f'no "{error.args[0]}"' if isinstance(error, KeyError) else "a value of another kind"
            raise BadInput(str(at), f"has {key} where {tool} writes one", AS_PRINTED) from None
    return Imported(path, tool, tuple(samples), (f"{path.name}: {HOST}",) if tool == PYTEST else ())


def _nvbench(at: Line, entry: dict[str, Any]) -> Iterator[Sample]:
    version = entry["meta"]["version"]["json"]
    if version["major"] != 1:
        raise BadInput(str(at), f"is version {version.get('string')} of nvbench's JSON", "version 1 is read")
    gpus = {gpu["id"]: str(gpu["name"]) for gpu in entry["devices"]}
    for bench in entry["benchmarks"]:
        for state in bench["states"]:
            axes: dict[str, Word] = {"benchmark": str(bench["name"])}
            axes |= {str(axis["name"]): str(axis["value"]) for axis in state["axis_values"] or ()}
            made = Made(gpu_info=gpus.get(state["device"], ""))
            if state["is_skipped"]:
                yield Sample(NVBENCH, at, "kernel_us", axes=axes, made=made, status="unsupported")
                continue
            values = {s["tag"]: d["value"] for s in state["summaries"] for d in s["data"] if d["name"] == "value"}
            us = 1e6 * at.figure(values[MEAN], f"{state['name']} {MEAN}")
            error = us * at.figure(values[NOISE], f"{state['name']} {NOISE}", zero=True)
            yield Sample(NVBENCH, at, "kernel_us", "us", (us,), axes, made=made, error=error)


def _pytest(at: Line, entry: dict[str, Any]) -> Iterator[Sample]:
    cpu = str((entry["machine_info"].get("cpu") or {}).get("brand_raw", ""))
    made = Made(build_commit=str((entry.get("commit_info") or {}).get("id", "")), cpu_info=cpu)
    for bench in entry["benchmarks"]:
        axes: dict[str, Word] = {"test": str(bench["name"]), **{k: str(v) for k, v in (bench["params"] or {}).items()}}
        stats, when = bench["stats"], str(entry.get("datetime", ""))
        values = tuple(1e6 * at.figure(s, "stats.data") for s in stats.get("data") or (stats["mean"],))
        error = 0.0 if len(values) > 1 else 1e6 * at.figure(stats["stddev"], "stats.stddev", zero=True)
        yield Sample(PYTEST, at, "kernel_us", "us", values, axes, made=made, error=error, when=when)


def _flashinfer(at: Line, entry: dict[str, Any]) -> Iterator[Sample]:
    solution, done = entry.get("solution"), entry.get("evaluation")
    if solution is None or done is None:  # a workload alone
        return
    workload = entry["workload"]
    axes: dict[str, Word] = {"definition": str(entry["definition"]), **workload["axes"], "uuid": str(workload["uuid"])}
    how, made = {"solution": str(solution)}, Made(gpu_info=str(done["environment"]["hardware"]))
    status, when = str(done["status"]), str(done["timestamp"])
    if status.startswith("INCORRECT"):
        wrong = f"{at}: {solution} is {status}"
        yield Sample(FLASHINFER, at, "kernel_us", "us", (), axes, how, made, wrong=wrong, when=when)
    elif status != "PASSED":
        yield Sample(FLASHINFER, at, "kernel_us", axes=axes, settings=how, made=made, status="unsupported")
    else:
        us = 1e3 * at.figure(done["performance"]["latency_ms"], "latency_ms")
        yield Sample(FLASHINFER, at, "kernel_us", "us", (us,), axes, how, made, when=when)
