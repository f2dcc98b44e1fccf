"""Measured rows in other tools' formats: what their readers need is there, and our own readers give the figures back.

FlashInfer-Bench's schema and nvbench's result reader are asked too where they are installed.
"""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.cli import main
from lab.row import store
from lab.row.records import Measurement
from lab.study import own
from lab.write import exports
from tests.refused import held

Capture = pytest.CaptureFixture[str]
ROWS = ["rows", "--phase", "p5-cuda", "--device", "h200"]


def exported(folder: Path, form: str) -> tuple[str, Path]:
    path = folder / f"{form}.json"
    assert main.main([*ROWS, "--export", form, "--out", str(path)]) == 0
    return path.read_text(encoding="utf-8"), path


def newest() -> dict[tuple[str, str], Measurement]:
    rows = {(row.name, row.workload_id): row for row in store.rows("h200", "p5-cuda")}
    assert {row.ok for row in rows.values()} == {True, False}
    return {key: row for key, row in rows.items() if row.ok}


def test_flashinfer_trace(tmp_path: Path) -> None:
    text, path = exported(tmp_path, "flashinfer-trace")
    every = {(t["solution"], t["workload"]["uuid"]): t for t in map(json.loads, text.splitlines())}
    found = {key: t for key, t in every.items() if t["evaluation"]["status"] == "PASSED"}
    assert found.keys() == newest().keys()
    assert not any("performance" in t["evaluation"] for key, t in every.items() if key not in found)
    for key, trace in found.items():
        row, done = newest()[key], trace["evaluation"]
        assert trace["definition"] == row.family
        assert all(isinstance(axis, int) and axis >= 0 for axis in trace["workload"]["axes"].values())
        assert done["performance"]["latency_ms"] == pytest.approx((row.time_us or math.nan) / 1e3)
        assert done["environment"]["hardware"] == row.gpu
        if row.arm == "control":
            assert done["performance"]["speedup_factor"] == 1.0
    samples = [s for s in own.read(path).samples if s.values]
    times = {(str(s.settings["solution"]), str(s.axes["uuid"])): s.values[0] for s in samples}
    assert times == {key: pytest.approx(row.time_us) for key, row in newest().items()}


def test_nvbench(tmp_path: Path) -> None:
    _, path = exported(tmp_path, "nvbench")
    samples = [s for s in own.read(path).samples if s.status == "ok"]
    times = {(str(s.axes["benchmark"]).partition("/")[2], str(s.axes["Workload"])): s for s in samples}
    assert times.keys() == newest().keys()
    for key, sample in times.items():
        row = newest()[key]
        assert sample.values == (pytest.approx(math.fsum(row.samples_us or ()) / len(row.samples_us or (1,))),)
        assert sample.error == pytest.approx(row.stdev_us)
        assert sample.made.gpu_info == row.gpu


def test_nvbench_skips_a_warm_cache(tmp_path: Path) -> None:
    cold, other = list(newest().values())[:2]
    warm = msgspec.structs.replace(other, l2="warm")
    made: dict[str, Any] = json.loads(exports.text([cold, warm], "nvbench"))
    states = [state for bench in made["benchmarks"] for state in bench["states"]]
    assert [(state["is_skipped"], state["summaries"] is None) for state in states] == [(False, False), (True, True)]


def test_github_action_benchmark(tmp_path: Path) -> None:
    """customSmallerIsBetter: name, unit and value in each, range and extra as text; no name twice."""
    found = json.loads(exported(tmp_path, "github-action-benchmark")[0])
    assert len({one["name"] for one in found}) == len(found) == len(newest())
    for one in found:
        assert one.keys() == {"name", "unit", "value", "range", "extra"}
        assert (one["unit"], one["value"] > 0, one["range"][:2]) == ("us", True, "± ")


def test_their_own_readers(tmp_path: Path) -> None:
    data = pytest.importorskip("flashinfer_bench.data", reason="FlashInfer-Bench is not installed")
    text, _ = exported(tmp_path, "flashinfer-trace")
    read = [data.Trace.model_validate_json(line) for line in text.splitlines()]
    assert sum(trace.is_successful() for trace in read) == len(newest())


def test_nvbench_reads_it(tmp_path: Path) -> None:
    results = pytest.importorskip("cuda.bench.results", reason="nvbench's Python package is not installed")
    _, path = exported(tmp_path, "nvbench")
    assert results.BenchmarkResult.from_json(path).keys()


def test_refused(capsys: Capture) -> None:
    assert main.main([*ROWS, "--out", "x"]) == 2
    held(capsys.readouterr().err, "lab rows", "--export")
    assert main.main(["rows", "--phase", "ds1-mmq", "--export", "nvbench"]) == 2
    held(capsys.readouterr().err, "lab rows")
