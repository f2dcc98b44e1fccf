"""`lab measure` without a GPU: which rows come of which checks. The check and the clock are canned, the disk is real.

That a check runs on the GPU and that the clock is right is for the tests marked gpu in test_timing.py.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.common import Candidate, Cost, Workload
from lab import accuracy, devices, evidence, families, gates, measure, phases, records, timing
from lab.errors import BadInput

TIMED = timing.Timing(80.0, 1.0, 79.0, 20, 3, 3, True, 0.1, 0.0, (79.0, 80.0), (80.0,))
OUTCOME = timing.Comparison(TIMED, TIMED, "ABBA BAAB", 0.2, "graph", "cold", "1980, 2619", "1980, 2619")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A toy family on a machine that says it is an H200; the dict holds each arm's check and what timing does."""
    card = phases.card("p5")
    arms = {name: Candidate(name, "bf16", lambda args, out: None) for name in (card.control, card.candidate)}
    workloads = [Workload("a", {"T": 63}), Workload("b", {"T": 500})]
    told: dict[str, Any] = {"control": ("ok", 1e-3), "candidate": ("ok", 1e-3), "time": OUTCOME, "timed": []}

    def check(family: Any, candidate: Any, workload: Any, seed: int, device: str) -> accuracy.Check:
        assert device == "cuda"
        status, error = told["control" if candidate.name == card.control else "candidate"]
        errors = () if error is None else (accuracy.Error("y", error, 1e-2, 0.0, 1.0),)
        return accuracy.Check("toy", candidate.name, workload.id, "bf16", status, f"m {status}", errors)

    def time(family: Any, given: Any, workload: Any, seconds: float, l2: str) -> timing.Comparison:
        told["timed"].append(workload.id)
        if isinstance(told["time"], Exception):
            raise told["time"]
        return told["time"]

    toy = SimpleNamespace(name="toy", candidate=arms.__getitem__, cost=lambda workload, precision: Cost(1e6, 1e6))
    monkeypatch.setattr(measure, "require_gpu", lambda: devices.get("h200"))
    monkeypatch.setattr(measure, "plan", lambda card, only=None: (toy, workloads))
    monkeypatch.setattr(measure, "_time", time)
    monkeypatch.setattr(accuracy, "check", check)
    monkeypatch.setattr(records, "provenance", lambda: {"commit": "0"})
    return told


def measured(folder: Path) -> list[dict[str, Any]]:
    """The rows that are yielded, which must be those on the disk at that moment."""
    rows = []
    for row in measure.measure(phases.card("p5"), folder=folder):
        rows.append(row)
        assert len(records.read(folder / "rows.jsonl")) == len(rows)
    assert [(r["workload_id"], r["arm"]) for r in rows] == [
        (workload, arm) for workload in "ab" for arm in ("control", "candidate")
    ]
    return records.read(folder / "rows.jsonl")


def test_rows_of_a_sound_comparison(bench: dict[str, Any], tmp_path: Path) -> None:
    rows = measured(tmp_path)
    assert {r["status"] for r in rows} == {"ok"}
    first = rows[0]
    assert (first["median_us"], first["samples_us"], first["aa_pct"], first["l2"]) == (80.0, [79.0, 80.0], 0.2, "cold")
    assert first["name"] == phases.card("p5").control
    assert (first["gate_hash"], first["seed"]) == (phases.card("p5").gate_hash, measure.SEED)
    assert first["workload"] == {"T": 63}


@pytest.mark.parametrize("wrong", ["control", "candidate"])
@pytest.mark.parametrize("error", [0.7, math.nan, math.inf, None], ids=str)
def test_no_number_before_the_check_is_green(
    wrong: str, error: float | None, bench: dict[str, Any], tmp_path: Path
) -> None:
    bench[wrong] = ("incorrect", error)
    rows = measured(tmp_path)
    assert bench["timed"] == []
    assert not any(key in row for row in rows for key in records.PERFORMANCE)
    for row in rows:
        right = row["arm"] != wrong
        assert row["status"] == ("skipped" if right else "incorrect")
        assert row["message"] == ("not timed: the other arm failed its check" if right else "m incorrect")
        assert row["relative_error"] == (1e-3 if right else 0.7 if error == 0.7 else None)
    gate = gates.Gate(
        correctness=(gates.Condition("relative_error", "<=", "ratio", 1e-2, workload="a"),),
        require=(gates.Condition("kernel_us", "<", "%", 0, "change", "a"),),
    )
    word = gates.judge(gate, evidence.readings(rows, devices.get("h200"))).word
    assert word == ("INVALID" if wrong == "candidate" else "BLOCKED")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("cannot be captured\nmore"), "error"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), "oom"),
    ],
    ids=["error", "oom"],
)
def test_failed_timing_is_a_status(error: Exception, status: str, bench: dict[str, Any], tmp_path: Path) -> None:
    bench["time"] = error
    rows = measured(tmp_path)
    assert {r["status"] for r in rows} == {status}
    assert {r["message"] for r in rows} == {f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    assert bench["timed"] == ["a", "b"]  # the next workload is tried all the same


def test_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"p4\.toml: has no family, so there is nothing to run; replay it"):
        measure.plan(phases.card("p4"))
    card = next(c for c in phases.cards().values() if c.family and c.system == "killgate")
    family, workloads = measure.plan(card)
    assert family is families.load(card.family)
    assert {w.id for w in workloads} <= set(card.workloads)
    assert [w.id for w in measure.plan(card, workloads[-1].id)[1]] == [workloads[-1].id]
    with pytest.raises(BadInput, match=r"none of its workloads \(nosuch\) is a workload of"):
        measure.plan(card, "nosuch")
