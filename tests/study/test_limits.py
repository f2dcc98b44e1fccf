"""Our kernels beside rivals: the rows that are paired, and what is left out."""

from dataclasses import replace

import pytest
from msgspec import structs

from lab.card import phases
from lab.check import families
from lab.row import store
from lab.study import limits
from tests.refused import refused

CARD = "kv-bf16-limit"


def found(card: str = CARD) -> dict[str, limits.Limit]:
    return {limit.workload: limit for limit in limits.limits(phases.card(card), "h200")}


def test_every_line_of_the_figure_has_points_with_a_rival_above_the_floor():
    for line in limits.lines():
        points = found(line.card)
        assert points, line.card
        for workload, point in points.items():
            assert 0 < point.of_floor < 1, f"{line.card} {workload} is faster than the floor"
            assert point.rival is not None, f"{line.card} {workload} has no rival"
            assert point.rival.run == point.ours.run
            assert point.rival.name in families.load(point.ours.family).peers


def test_every_declared_workload_is_a_point_the_slower_ones_that_no_gate_requires_too():
    card = phases.card("w4a8-prefill-limit")
    assert list(found(card.id)) == list(card.workloads)
    slower = {w for w, point in found(card.id).items() if point.times_as_fast and point.times_as_fast < 1}
    assert slower - {c.workload for c in card.gate.require}


def test_the_fastest_rival_of_the_newest_run_with_a_correct_row_of_ours_counts(monkeypatch):
    workload, point = next(iter(found().items()))
    rows = store.rows("h200", CARD)
    assert point.rival is not None
    assert point.rival_us is not None
    assert point.times_as_fast is not None
    beside = [r for r in rows if r.run == point.ours.run and r.workload_id == workload]
    faster = structs.replace(point.rival, median_us=point.rival_us / 2)
    alone = [structs.replace(r, run="9998") for r in beside if r.name == point.ours.name]
    newer = [structs.replace(r, run="9999") for r in beside]
    wrong = [structs.replace(r, status="incorrect") if r.name == point.ours.name else r for r in newer]
    monkeypatch.setattr(store, "rows", lambda *_: [*rows, *wrong])
    assert found()[workload].ours.run == point.ours.run  # the newer run's row of ours is wrong
    monkeypatch.setattr(store, "rows", lambda *_: [*rows, *newer])
    assert found()[workload].ours.run == "9999"
    monkeypatch.setattr(store, "rows", lambda *_: [*rows, *alone])
    assert found()[workload].ours.run == point.ours.run  # the newer run has no rival
    other = [structs.replace(r, config="another launch") for r in alone]
    monkeypatch.setattr(store, "rows", lambda *_: [*rows, *other])
    assert (found()[workload].ours.run, found()[workload].rival) == ("9998", None)
    monkeypatch.setattr(store, "rows", lambda *_: [*rows, faster])
    assert found()[workload].times_as_fast == pytest.approx(point.times_as_fast / 2)


def test_a_newer_run_with_a_slower_rival_alone_hides_no_faster_one(monkeypatch):
    workload, point = next(iter(found().items()))
    rows = store.rows("h200", CARD)
    assert point.rival is not None
    assert point.rival_us is not None
    other = next(name for name in families.load(point.ours.family).peers if name != point.rival.name)
    slow = structs.replace(point.rival, name=other, run="9999", median_us=2 * point.rival_us)
    monkeypatch.setattr(store, "rows", lambda *_: [*rows, structs.replace(point.ours, run="9999"), slow])
    assert found()[workload] == point


def test_an_eight_bit_rival_is_none_of_a_sixteen_bit_kernel(monkeypatch):
    workload, point = next(iter(found().items()))
    rows = store.rows("h200", CARD)
    others = [structs.replace(r, precision="fp8") if r.name != point.ours.name else r for r in rows]
    monkeypatch.setattr(store, "rows", lambda *_: others)
    assert found()[workload].rival is None
    assert found()[workload].times_as_fast is None


def test_no_rows_no_points():
    assert limits.limits(phases.card("p5"), "h200") == []


def test_a_line_without_a_card_is_refused(tmp_path):
    path = tmp_path / "rivals.toml"
    path.write_text('[[line]]\ntitle = "x"\n')
    with refused("rivals.toml", "card"):
        limits.lines(path)


def test_ratio():
    point = next(iter(found().values()))
    assert point.rival_us is not None
    assert point.times_as_fast == point.rival_us / point.ours_us
    assert replace(point, rival=None, rival_us=None).times_as_fast is None
