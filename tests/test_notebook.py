"""Rows as notebooks show them: points, timings and reproductions. The other helpers stand with test_notebooks.py."""

import dataclasses
from typing import Any

import pytest

from lab import devices, evidence, notebook, phases, records, reproduction, roofline

RUN = "2026-11-20T120000Z"
BASE: dict[str, Any] = {
    "device": "h200", "phase": "p-test", "family": "any", "precision": "bf16", "workload_id": "t64_hk1_hv2",
    "workload": {}, "run": RUN, "flops": 2e9, "bytes": 48_000_000, "pipe": "bf16",
}  # fmt: skip
OK: dict[str, Any] = {"status": "ok", "iqr_us": 0.5, "relative_error": 1e-3}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Appends rows of the test phase to an otherwise empty profiles folder."""
    monkeypatch.setattr(records, "FOLDER", tmp_path)

    def add(**fields):
        records.append(tmp_path / "h200" / "p-test" / RUN, BASE | fields)

    return add


def test_without_rows_there_is_nothing(rows):
    assert notebook.points("p-test", "h200") == []
    assert notebook.timings("p-test", "h200").empty


def test_timings_give_floor_and_change(rows):
    rows(arm="control", name="old", median_us=40.0, **OK)
    rows(arm="candidate", name="new", median_us=30.0, **OK)
    frame = notebook.timings("p-test", "h200")
    floor = roofline.place(devices.get("h200"), BASE["flops"], BASE["bytes"], "bf16").floor_us
    assert list(frame["arm"]) == ["old", "new"]
    assert list(frame["floor us"]) == [floor, floor]
    assert list(frame["of roofline"]) == [floor / 40, floor / 30]
    assert list(frame["change %"].dropna()) == [pytest.approx(-25)]
    assert frame["change %"].isna()[0], "the control has no change against itself"


def test_points_are_the_rows_that_are_ok(rows):
    rows(arm="control", name="old", status="error", message="out of registers")
    rows(arm="candidate", name="new", median_us=30.0, **OK)
    (point,) = notebook.points("p-test", "h200")
    assert (point.label, point.kind) == ("new t64", "measured")
    assert point.intensity == pytest.approx(BASE["flops"] / BASE["bytes"])
    assert point.rate_tflop_s == pytest.approx(2e9 / 30e-6 / 1e12)
    frame = notebook.timings("p-test", "h200")
    assert list(frame["status"]) == ["error", "ok"]
    assert "change %" not in frame, "there is no change against a control that failed"
    assert frame["median us"].isna()[0]


def test_arms_are_of_one_run(rows):
    """Of the newest run in which the candidate is right: a later one without it is no comparison."""
    card = dataclasses.replace(phases.card("p5-kernel"), id="p-test", candidate="new", workloads=(BASE["workload_id"],))
    assert notebook.arms(card, "h200") == {}
    rows(arm="control", name="old", median_us=40.0, **OK)
    rows(arm="candidate", name="new", median_us=30.0, **OK)
    rows(arm="candidate", name="broken", status="error", message="out of registers")
    later = "2026-11-20T130000Z"
    alone = BASE | OK | {"arm": "control", "name": "old", "median_us": 10.0, "run": later}
    records.append(records.FOLDER / "h200" / "p-test" / later, alone)
    (found,) = notebook.arms(card, "h200").values()
    assert {name: row["median_us"] for name, row in found.items()} == {"old": 40.0, "new": 30.0}


def test_timings_are_of_the_pairs_that_are_judged(rows):
    """A run with both arms is taken before a later run with one, as the judge does."""
    rows(arm="control", name="old", median_us=40.0, **OK)
    rows(arm="candidate", name="new", median_us=30.0, **OK)
    later = "2026-11-20T130000Z"
    records.append(records.FOLDER / "h200" / "p-test" / later, BASE | OK | {
        "arm": "candidate", "name": "new", "median_us": 10.0, "run": later,
    })  # fmt: skip
    ((_, judged),) = evidence.pairs(records.rows(phase="p-test")).values()
    assert judged is not None
    assert list(notebook.timings("p-test", "h200")["median us"]) == [40.0, judged["median_us"]]


def test_reproduced_says_what_agrees():
    first = reproduction.reproduce()[0]
    frame = notebook.reproduced([first, dataclasses.replace(first, agrees=not first.agrees)])
    assert set(frame["agrees"]) == {"yes", "no"}
    assert frame["figure"][0] == first.recorded_id
    assert (frame["recorded"][0], frame["ours"][0]) == (first.recorded, first.ours)
