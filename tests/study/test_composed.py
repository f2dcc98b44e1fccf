"""What a step is expected to take, from the kernels that it launches: each lever by the part that it changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.common import Cost
from lab.base import devices
from lab.base.errors import BadInput
from lab.card import phases
from lab.check import families
from lab.cli import main
from lab.row import store
from lab.study import composed
from lab.study.composed import Line, Time

H200 = devices.get("h200")
families.interpret_on_cpu()
CARDS = {card.id: card for card in composed.cards()}
PARTS = {  # of the step that a card's lever changes, in the model
    "step-lp9": {"gdn"}, "step-lp10": {"gdn"}, "step-lp13": {"gdn"}, "step-lp18": {"attention"},
    "step-lp11": {"gdn products", "copies", "launches"}, "step-lp14": {"residual"},
    "step-lp16": {"ffn", "gdn products", "attention products"}, "step-im4": {"scratch", "launches"},
    "step-chained": {"ffn", "gdn products", "attention products"}, "step-gate-up": {"ffn"},
    "step-im5": {"launches", "copies"}, "step-im5-packed": {"gdn products", "launches", "copies"},
    "step-lb10": {"head"},
    "step-conv-fusion": {"gdn", "launches"}, "step-lp7": {"waiting for the host"}, "step-im3": {"waiting for the host"},
    "step-staircase": {"gdn", "gdn products", "copies", "launches"},
    "step-35b-lp7": {"waiting for the host"}, "step-35b-lp9": {"gdn"}, "step-35b-lp10": {"gdn"},
    "step-35b-lp11": {"gdn products", "copies", "launches"},
}  # fmt: skip
LINES = {name: composed.lines(card) for name, card in CARDS.items()}


def test_every_card_is_expected_to_change_the_parts_of_its_lever() -> None:
    assert CARDS.keys() == PARTS.keys()
    for name, lines in LINES.items():
        own = [line for line in lines if line.candidate == CARDS[name].candidate]
        assert set().union(*(line.parts for line in own)) == PARTS[name], name
        for line in lines:
            assert line.low_pct <= line.change_pct <= line.high_pct, line
            assert line.control_us > 0


@pytest.mark.parametrize("name", [name for name, parts in PARTS.items() if not parts & {"waiting for the host"}])
def test_an_expectation_stands_on_the_part_that_the_lever_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the times of that part nothing is expected to change; without those of any other the change stays."""
    at = max(range(len(LINES[name])), key=lambda i: len(LINES[name][i].parts))
    line = LINES[name][at]
    whole = line.change_pct / 100 * line.control_us
    timed = composed.time_of

    def without(part: str) -> float:
        monkeypatch.setattr(composed, "time_of", lambda call, device: timed(call, device).times(call.part != part))
        changed = composed.lines(CARDS[name])[at]
        monkeypatch.setattr(composed, "time_of", timed)
        return changed.change_pct / 100 * changed.control_us

    for part in {"ffn", "attention", "head", "gdn"} | line.parts.keys():
        left = whole - line.parts.get(part, 0.0)
        assert without(part) == pytest.approx(left, abs=1e-6 + 1e-6 * abs(whole)), part
    assert max(map(abs, line.parts.values())) > 0


def newest(name: str, workload: str) -> float:
    rows = [r for r in store.rows("h200", family="gdn") if (r.name, r.workload_id, r.l2) == (name, workload, "cold")]
    return max(rows, key=lambda r: r.run).time_us or 0.0


def test_a_copied_state_by_hand() -> None:
    """Six GDN layers: recurrent_decode_copied less recurrent_decode_gathered at 128 sequences."""
    where = "decode_b128_hk16_hv48_d128"
    each = newest("recurrent_decode_gathered", where) - newest("recurrent_decode_copied", where)
    line = LINES["step-lp9"][-1]
    assert line.parts["gdn"] == pytest.approx(6 * each)
    base = composed.expected("step", line.workload, "served_copied", H200)
    assert line.control_us == base.us
    assert line.change_pct == pytest.approx(100 * 6 * each / base.us)


def test_a_step_is_expected_between_its_floor_and_twice_that() -> None:
    from kernels.step.cost import parts

    for workload in ("decode_q36-27b_npl1_ctx1024", "decode_q36-27b_npl32_ctx1024", "prefill_q36-27b_npl1_t2048_ctx0"):
        of = parts(families.bare("step").workload(workload), "nvfp4-w4a16").values()
        floor = sum(composed.floor_us(H200, cost) for cost in of)
        found = composed.expected("step", workload, "served", H200)
        assert 0.95 * floor < found.low < found.us < found.high < 2.1 * floor, workload


def test_an_arm_is_not_expected_to_differ_from_itself() -> None:
    arm = ("decode_q36-27b_l16_npl8_ctx1024", "served_copied")
    base, difference, parts = composed.change("step", arm, arm, H200)
    assert (difference, parts) == (Time(0.0, 0.0, 0.0), {})
    assert base.low < base.us < base.high


def test_times_add_and_are_taken_away() -> None:
    time = Time(10.0, 9.0, 12.0)
    assert time.times(2) == Time(20.0, 18.0, 24.0)
    assert time.times(-1) == Time(-10.0, -12.0, -9.0)
    assert time + time.times(-1) == Time(0.0, -3.0, 3.0)


def test_what_no_family_measures_counts_by_floor_and_launches() -> None:
    read = composed.floor_us(H200, Cost(0.0, 1e9))
    call: Any = replace(composed.calls_of("step").Call("small", 1), cost=Cost(0.0, 1e9), launches=2)
    found = composed.time_of(call, H200)
    assert (found.low, found.us, found.high) == pytest.approx((0.25 * read + 0.6, read + 3.0, 1.5 * read + 8.0))
    product = composed.time_of(replace(call, cost=Cost(1e15, 0.0)), H200)
    assert product.low == pytest.approx(composed.floor_us(H200, Cost(1e15, 0.0)) + 0.6)
    assert composed.floor_us(H200, Cost(67e12, 1.0, "f32")) > 0.9e6  # no ceiling of that pipe: the datasheet's


def test_an_eager_step_waits_for_its_host() -> None:
    small, large = "decode_q36-27b_l16_npl1_ctx1024", "decode_q36-27b_l8_npl128_ctx1024"
    for workload, waits in ((small, True), (large, False)):
        step = composed.expected("step", workload, "served", H200)
        eager = composed.expected("step", workload, "served", H200, "events")
        assert (eager.us > step.us, eager.low) == (waits, step.low)
        assert composed.expected("step", workload, "served_replayed", H200, "events") == step


def test_measured_is_held_against_the_interval() -> None:
    line = LINES["step-lp9"][-1]
    assert line.measured_pct is None
    assert line.inside is None
    assert replace(line, measured_pct=line.change_pct).inside is True
    assert replace(line, measured_pct=line.high_pct + 0.1).inside is False
    shown = composed.rendered([replace(line, measured_pct=line.high_pct + 0.1), line])
    assert shown.splitlines()[2] == "step-lp9, served_gathered"
    assert "outside" in shown.splitlines()[3]
    assert shown.splitlines()[4].endswith("-")
    everything = [replace(line, measured_pct=-100.0) for lines in LINES.values() for line in lines]
    assert max(map(len, composed.rendered(everything).splitlines())) <= 100
    stairs = [line.change_pct for line in LINES["step-staircase"] if "npl128" in line.workload]
    arms = ["stock_in_place", "stock_by_id", "stock_2d", "served"]
    assert [line.candidate for line in LINES["step-staircase"][:4]] == arms
    assert stairs == sorted(stairs, reverse=True)
    card = CARDS["step-lp13"]
    few, many = card.workloads[:2]
    rows = {w: (None, SimpleNamespace(name="served", time_us=us, run="r")) for w, us in ((few, 10.0), (many, 9.0))}
    assert composed._measured(rows, (few, "served"), (many, "served"), card) == pytest.approx(-10.0)
    assert composed._measured({}, (few, "served"), (many, "served"), card) is None
    assert composed._measured(rows, (few, "stock"), (few, "served"), card) is None


def test_what_cannot_be_expected_is_refused() -> None:
    for family, name, said in (("gdn", "cuda_decode", "calls.py"), ("step", "torch_eager", "torch_eager")):
        with pytest.raises(BadInput) as raised:
            composed.expected(family, "decode_q36-27b_l16_npl1_ctx1024", name, H200)
        assert said in str(raised.value)


def test_lab_predict_draws_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["predict", "step-lp9", "--out", str(tmp_path / "lp9.svg")]) == 0
    drawn = (tmp_path / "lp9.svg").read_text(encoding="utf-8")
    assert f"step-lp9 served_gathered {LINES['step-lp9'][0].workload}" in drawn
    inside, outside = (
        composed.picture([replace(LINES["step-lp9"][0], measured_pct=seen)]).axes[0].lines[1].get_marker()
        for seen in (LINES["step-lp9"][0].change_pct, 50.0)
    )
    assert (inside, outside) == ("o", "s")


def test_lab_predict_prints_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["predict", "step-lp9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["workload"] for one in told] == list(phases.card("step-lp9").workloads)
    assert told[0]["inside"] is None
    assert isinstance(LINES["step-lp9"][0], Line)
    assert main.main(["predict", "step-lp9"]) == 0
    assert f"{told[0]['change_pct']:+.1f}" in capsys.readouterr().out
