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

import itertools
from pathlib import Path
from typing import Any

import msgspec

from lab.base import files
from lab.base.errors import BadInput
from lab.base.files import NotNegative, Positive
from lab.study.own.sample import Imported, Line, Made, Objects, Sample, Word

NVBENCH, FLASHINFER, PYTEST = "nvbench", "flashinfer-trace", "pytest-benchmark"
MEAN, NOISE = "nv/cold/time/gpu/mean", "nv/cold/time/gpu/stdev/relative"


class State(msgspec.Struct):
    """A measurement of nvbench. summaries: tag, and data as a list of name and value, numbers as text."""

    name: str
    device: int
    axis_values: list[dict[str, Any]] | None = None
    summaries: list[dict[str, Any]] | None = None
    is_skipped: bool = False

    def value(self, at: Line, tag: str) -> Any:
        """The value of one summary; raises BadInput where it is not there."""
        data: list[dict[str, Any]] = next((s.get("data", []) for s in self.summaries or () if s.get("tag") == tag), [])
        for one in data:
            if one.get("name") == "value":
                return one.get("value")
        raise BadInput(str(at), f"{self.name} has no {tag}", "run nvbench again, without hiding GPU times")


class Benchmark(msgspec.Struct):
    """A benchmark of nvbench."""

    name: str
    states: list[State]


class Stats(msgspec.Struct):
    """What pytest-benchmark prints of a test, seconds."""

    mean: Positive
    stddev: NotNegative
    rounds: int
    data: tuple[Positive, ...] = ()


class Test(msgspec.Struct):
    """A test of pytest-benchmark."""

    name: str
    stats: Stats
    params: dict[str, Any] | None = None


class Evaluation(msgspec.Struct):
    """How a solution did."""

    status: str
    environment: dict[str, Any]
    timestamp: str
    performance: dict[str, Any] | None = None


class Evaluated(msgspec.Struct):
    """A line of flashinfer-trace; without solution and evaluation it is a workload alone."""

    definition: str
    workload: dict[str, Any]
    solution: str | None = None
    evaluation: Evaluation | None = None


def is_one(entry: dict[str, Any]) -> bool:
    """Whether a JSON object is a result of one of the three."""
    return {"definition", "workload"} <= entry.keys() or isinstance(entry.get("benchmarks"), list)


def read_objects(path: Path, entries: Objects, log: list[str]) -> Imported:
    """The times of one file; raises BadInput for another version and for a result without its numbers."""
    found: list[list[Sample]] = []
    tool, notes = FLASHINFER, list[str]()
    for at, entry in entries:
        if "definition" in entry:
            found.append(_evaluated(at, files.convert(entry, Evaluated, str(at))))
        elif "machine_info" in entry:
            tool = PYTEST
            notes = [f"{path.name}: pytest-benchmark times by the host's clock, whatever the GPU still does"]
            found += [_test(at, entry, test) for test in files.convert(entry["benchmarks"], list[Test], str(at))]
        else:
            tool = NVBENCH
            found += _nvbench(at, entry)
    return Imported(path, tool, tuple(itertools.chain(*found)), tuple(notes))


def _nvbench(at: Line, entry: dict[str, Any]) -> list[list[Sample]]:
    try:
        version = entry["meta"]["version"]["json"]
        gpus = {gpu["id"]: str(gpu["name"]) for gpu in entry["devices"]}
        major = version["major"]
    except (KeyError, TypeError):
        raise BadInput(str(at), "has no meta.version.json or no devices", "give what `nvbench --json` wrote") from None
    if major != 1:
        raise BadInput(str(at), f"is version {version.get('string', major)} of nvbench's JSON", "version 1 is read")
    benches = files.convert(entry["benchmarks"], list[Benchmark], str(at))
    return [[_state(at, bench.name, state, gpus) for state in bench.states] for bench in benches]


def _state(at: Line, bench: str, state: State, gpus: dict[int, str]) -> Sample:
    axes: dict[str, Word] = {"benchmark": bench, **{str(a["name"]): a["value"] for a in state.axis_values or ()}}
    made = Made(gpu_info=gpus.get(state.device, ""))
    if state.is_skipped:
        return Sample(NVBENCH, at, "kernel_us", axes=axes, made=made, status="unsupported")
    us = 1e6 * at.figure(state.value(at, MEAN), f"{state.name} {MEAN}")
    error = us * at.figure(state.value(at, NOISE), f"{state.name} {NOISE}", zero=True)
    return Sample(NVBENCH, at, "kernel_us", "us", (us,), axes, made=made, error=error)


def _test(at: Line, entry: dict[str, Any], test: Test) -> list[Sample]:
    build, machine = entry.get("commit_info") or {}, entry.get("machine_info") or {}
    cpu = machine.get("cpu") or {}
    made = Made(build_commit=str(build.get("id", "")), cpu_info=str(cpu.get("brand_raw", "")))
    axes: dict[str, Word] = {"test": test.name, **{k: str(v) for k, v in (test.params or {}).items()}}
    values = tuple(1e6 * s for s in test.stats.data or (test.stats.mean,))
    error = 0.0 if test.stats.data else 1e6 * test.stats.stddev
    return [Sample(PYTEST, at, "kernel_us", "us", values, axes, made=made, error=error,
                   when=str(entry.get("datetime", "")))]  # fmt: skip


def _evaluated(at: Line, line: Evaluated) -> list[Sample]:
    if line.evaluation is None or line.solution is None:
        return []
    axes: dict[str, Word] = {"definition": line.definition, **(line.workload.get("axes") or {})}
    axes["uuid"] = str(line.workload.get("uuid", ""))
    how, made = {"solution": line.solution}, Made(gpu_info=str(line.evaluation.environment.get("hardware", "")))
    status, when = line.evaluation.status, line.evaluation.timestamp
    if status.startswith("INCORRECT"):
        wrong = f"{at}: {line.solution} is {status}"
        return [Sample(FLASHINFER, at, "kernel_us", "us", (), axes, how, made, wrong=wrong, when=when)]
    if status != "PASSED":
        return [Sample(FLASHINFER, at, "kernel_us", axes=axes, settings=how, made=made, status="unsupported")]
    us = 1e3 * at.figure((line.evaluation.performance or {}).get("latency_ms"), "latency_ms")
    return [Sample(FLASHINFER, at, "kernel_us", "us", (us,), axes, how, made, when=when)]
