"""What a step is expected to take, from the kernels that it launches: each lever by the part that it changes."""

from __future__ import annotations

import functools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernels import routing
from kernels.common import Cost
from lab.base import devices
from lab.base.errors import BadInput
from lab.card import phases
from lab.check import families
from lab.cli import main
from lab.judge import evidence
from lab.row import store
from lab.study import composed
from lab.study.composed import Line, Time
from lab.trace import breakdowns, stored
from lab.trace.model import Calls, Kernels, Ranges, Trace
from lab.write import figures
from tests.row.made import measurement

H200 = devices.get("h200")
families.interpret_on_cpu()
CARDS = {card.id: card for card in composed.cards()}
PARTS = {  # of the step that a card's lever changes, in the model
    "step-lp9": {"gdn"}, "step-lp10": {"gdn"}, "step-lp13": {"gdn"}, "step-lp18": {"attention"},
    "step-lp18-q8": {"attention"},
    "step-lp11": {"gdn products", "copies", "launches"}, "step-lp14": {"residual"},
    "step-lp16": {"ffn", "gdn products", "attention products"}, "step-im4": {"scratch", "launches"},
    "step-limit-few": {"ffn", "gdn products", "attention products", "activation", "launches"},
    "step-few": {"ffn", "gdn products", "attention products", "launches"},
    "step-chained": {"ffn", "gdn products", "attention products"}, "step-gate-up": {"ffn"},
    "step-gated": {"activation", "launches"}, "step-few-packed": {"gdn products"},
    "step-few-state": {"ahead", "launches"},
    "step-few-attention": {"ahead", "launches"},
    "step-few-ends": {"head", "launches"},
    "step-few-qkv": {"attention products"},
    "step-fastest": {
        "ffn", "gdn products", "attention products", "activation", "ahead", "gdn", "head", "launches", "copies",
    },
    "step-many": {"ffn", "head", "launches"},
    "step-35b-many": {"head", "launches", "gdn products", "attention products"},
    "step-prompt-conv": {"gdn", "launches"}, "step-prompt-gated": {"ffn", "activation", "launches"},
    "step-prompt-packed": {"gdn products", "attention products", "copies"},
    "step-many-gated": {"activation", "launches"},
    "step-many-chained": {"launches"},
    "step-35b-many-chained": {"launches"},
    "step-limit-prompt-w4a8": {"gdn", "launches"},
    "step-prompt-alone": {
        "ffn", "gdn products", "attention products", "activation", "gdn", "launches", "copies",
    },
    "step-prompt-alone-w4a8": {"gdn", "launches"},
    "step-few-norms": {"launches"}, "step-35b-norms": {"launches"},
    "step-35b-few": {"gdn products", "attention products", "ahead", "head", "launches"},
    "step-im5": {"launches", "copies"}, "step-alpha-beta": {"launches"},
    "step-im5-packed": {"gdn products", "launches", "copies"},
    "step-lb10": {"head"},
    "step-conv-fusion": {"gdn", "launches"}, "step-lp7": {"waiting for the host"}, "step-im3": {"waiting for the host"},
    "step-staircase": {"gdn", "gdn products", "copies", "launches"},
    "step-lp17": {"gdn"}, "step-ds8": {"launches", "waiting for the host"},
    "step-35b-lp7": {"waiting for the host"}, "step-35b-lp9": {"gdn"}, "step-35b-lp10": {"gdn"},
    "step-35b-lp11": {"gdn products", "copies", "launches"}, "step-limit": {"residual"},
    "step-limit-w4a8": {"ffn", "gdn products", "attention products"},
}  # fmt: skip
TIMED = composed.time_of
COUNTED = functools.cache(composed._counts)
KEPT: dict[str, Time] = {}


def timed(call: Any, device: devices.Device) -> Time:
    """`composed.time_of`, each call once: the arms of all cards are made of the same few hundred."""
    key = f"{device.id} {call}"
    if key not in KEPT:
        KEPT[key] = TIMED(call, device)
    return KEPT[key]


@functools.cache
def lines(name: str) -> list[Line]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composed, "time_of", timed)
        patch.setattr(composed, "_counts", COUNTED)
        return composed.lines(CARDS[name])


def test_every_card_is_expected_to_change_the_parts_of_its_lever() -> None:
    assert CARDS.keys() == PARTS.keys()
    for name in CARDS:
        own = [line for line in lines(name) if line.candidate == CARDS[name].candidate]
        assert set().union(*(line.parts for line in own)) == PARTS[name], name
        for line in lines(name):
            assert line.low_pct <= line.change_pct <= line.high_pct, line
            assert line.low_pct > -99, "no step takes no time"
            assert line.control_us > 0


@pytest.mark.parametrize(
    "name", [name for name, parts in PARTS.items() if parts - {"waiting for the host"} == parts != set()]
)
def test_an_expectation_stands_on_the_part_that_the_lever_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the times of that part nothing is expected to change; without those of any other the change stays."""
    at = max(range(len(lines(name))), key=lambda i: len(lines(name)[i].parts))
    line = lines(name)[at]
    whole = line.change_pct / 100 * line.control_us
    monkeypatch.setattr(composed, "_counts", COUNTED)

    def without(part: str) -> float:
        monkeypatch.setattr(composed, "time_of", lambda call, device: timed(call, device).times(call.part != part))
        changed = composed.lines(CARDS[name])[at]
        return changed.change_pct / 100 * changed.control_us

    for part in {"ffn", "attention", "head", "gdn"} | line.parts.keys():
        left = whole - line.parts.get(part, 0.0)
        assert without(part) == pytest.approx(left, abs=1e-6 + 1e-6 * abs(whole)), part
    assert max(map(abs, line.parts.values())) > 0


def newest(name: str, workload: str) -> float:
    rows = [r for r in store.rows("h200", family="gdn") if (r.name, r.workload_id, r.l2) == (name, workload, "cold")]
    return max(rows, key=lambda r: r.run).time_us or 0.0


def test_a_row_under_a_cap_may_be_shorter_in_a_step() -> None:
    """By the ratio of the clocks at most, as the judge has it, and not below the floor."""
    rows = [r for r in store.rows("h200", family="nvfp4") if r.time_us and r.placements > 1 and r.metric == "kernel_us"]
    capped, free = (next(r for r in rows if bool(r.throttled) == wanted) for wanted in (True, False))
    cap, work = evidence.slowed(H200, capped), (capped.flops, capped.bytes, capped.pipe)
    assert cap
    assert cap.usual > 1
    found, floor = composed._of_row(capped), composed.floor_us(H200, Cost(*work))  # type: ignore[arg-type]
    assert found.low == pytest.approx(max(0.98 * found.us / cap.usual, min(0.98 * found.us, floor)))
    assert found.low < 0.97 * found.us
    assert composed._of_row(free).low == pytest.approx(0.98 * composed._of_row(free).us)


def test_a_copied_state_by_hand() -> None:
    """Six GDN layers: recurrent_decode_copied less recurrent_decode_gathered at 128 sequences."""
    where = "decode_b128_hk16_hv48_d128"
    each = newest("recurrent_decode_gathered", where) - newest("recurrent_decode_copied", where)
    line = lines("step-lp9")[-1]
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
        assert 0.95 * floor < found.low < found.us < found.high < 2.2 * floor, workload


def test_an_arm_is_not_expected_to_differ_from_itself() -> None:
    arm = ("decode_q36-27b_l16_npl8_ctx1024", "served_copied")
    base, difference, parts = composed.change("step", arm, arm, H200)
    assert (difference, parts) == (Time(0.0, 0.0, 0.0), {})
    assert base.low < base.us < base.high


def test_a_time_is_carried_to_another_device_by_its_floor_alone() -> None:
    """Half as fast a memory: what a kernel takes beyond its floor stays, and nothing is faster than its floor."""
    cost, h100 = Cost(1e6, 2.0**30), devices.get("h100")
    here, there = (composed.floor_us(device, cost) for device in (H200, h100))
    assert there > 1.3 * here
    assert composed.carried(here + 5.0, cost, H200, h100) == pytest.approx(there + 5.0)
    assert composed.carried(there + 5.0, cost, h100, H200) == pytest.approx(here + 5.0)
    assert composed.carried(0.5 * here, cost, H200, h100) == there


def test_kernels_that_two_devices_timed_were_carried_over_as_it_says() -> None:
    """Of the newest cold rows of one launch on an H200 and an H100."""
    newest: dict[str, dict[tuple[str, str, str], Any]] = {}
    for device in ("h200", "h100"):
        rows = [r for r in store.rows(device) if r.time_us and (r.l2, r.timer) == ("cold", "graph") and r.pipe]
        rows = [r for r in rows if r.family != "step" and not r.calibration]
        newest[device] = {(r.family, r.workload_id, r.name): r for r in sorted(rows, key=lambda r: r.run)}
    off, still, scaled = [], [], []
    h100 = devices.get("h100")
    for key in newest["h200"].keys() & newest["h100"].keys():
        ours, theirs = newest["h200"][key], newest["h100"][key]
        if ours.config == theirs.config:
            cost = Cost(ours.flops, ours.bytes, ours.pipe)
            off.append(abs(composed.carried(ours.time_us, cost, H200, h100) / theirs.time_us - 1))
            still.append(abs(ours.time_us / theirs.time_us - 1))
            floors = composed.floor_us(h100, cost) / composed.floor_us(H200, cost)
            scaled.append(abs(ours.time_us * floors / theirs.time_us - 1))
    assert len(off) > 120
    assert statistics.median(off) < 0.04
    assert 2 * statistics.median(off) < statistics.median(still) < statistics.median(scaled)
    assert statistics.median(scaled) > 0.14
    assert sum(x <= routing.CARRIED for x in off) >= 0.9 * len(off)


def test_a_step_is_expected_on_a_device_without_a_calibration() -> None:
    """Within the interval, and near: what in-place states and rows by id gave on an H100."""
    families.interpret_on_cpu()
    graded = [line for name in ("step-lp9", "step-lp10", "step-lp11") for line in composed.lines(CARDS[name], "h100")]
    seen = [line for line in graded if line.measured_pct is not None]
    assert len(seen) >= 7
    for line in seen:
        assert line.inside, line
        assert line.measured_pct == pytest.approx(line.change_pct, abs=2.0), line
    (here,) = [x for x in lines("step-lp9") if "npl128" in x.workload]
    (there,) = [x for x in graded if x.card == "step-lp9" and "npl128" in x.workload]
    assert there.control_us > 1.2 * here.control_us
    assert there.high_pct - there.low_pct > here.high_pct - here.low_pct


def test_steps_are_expected_from_another_devices_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an H100 nothing but its ceilings: changes of a captured step that were measured there lie inside.

    All but LP14's up to 32 sequences, 0.5 to 0.7 % where less was expected: there only bytes count. A guess: a row of a
    float32 residual stream is one multiprocessor's to move.
    """
    rows = composed._rows
    monkeypatch.setattr(composed, "_rows", lambda device, family: () if device == "h100" else rows(device, family))
    cards = ["step-lp9", "step-lp10", "step-lp11", "step-gate-up", "step-lp14", "step-lb10"]
    seen = [x for name in cards for x in composed.lines(CARDS[name], "h100") if x.measured_pct is not None]
    assert len(seen) >= 15
    few = {("step-lp14", f"decode_q36-27b_l16_npl{n}_ctx1024") for n in (1, 8, 32)}
    assert {(x.card, x.workload) for x in seen if not x.inside} == few
    assert statistics.median(abs(x.change_pct - (x.measured_pct or 0.0)) for x in seen) < 1.5


def test_a_device_without_ceilings_is_told_how_to_get_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["predict", "step-lp9", "--device", "gb10"]) == 2
    assert "lab measure --ceilings" in capsys.readouterr().err


def test_a_calibrated_device_takes_no_time_from_another() -> None:
    assert (composed._source("h200", "gdn"), composed._source("h100", "gdn")) == ("", "h200")


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
    small, large = "decode_q36-27b_l16_npl1_ctx1024", "prefill_q36-27b_l8_npl1_t2048_ctx0"
    for workload, waits in ((small, True), (large, False)):
        step = composed.expected("step", workload, "served", H200)
        eager = composed.expected("step", workload, "served", H200, "events")
        assert (eager.us > step.us, eager.low > step.low) == (waits, waits)
        assert composed.expected("step", workload, "served_replayed", H200, "events") == step


def test_a_launch_from_python_takes_what_the_eager_steps_took() -> None:
    """Of every row of an eager step, on either device."""
    rows = [row for name in ("step-lp7", "step-im3") for row in store.rows(phase=name)]
    eager = [row for row in rows if row.name == "served" and row.time_us and row.timer == "events"]
    asked = composed.calls_of("step").host_launches
    each = [(row.time_us or 0.0) / asked(families.bare("step").workload(row.workload_id), "served") for row in eager]
    assert len(each) >= 8
    low, typical, high = composed.HOST_US
    assert low < min(each) < statistics.median(each) == pytest.approx(typical, rel=0.1)
    assert max(each) < high


def test_measured_is_held_against_the_interval() -> None:
    line = replace(lines("step-lp9")[-1], measured_pct=None)
    assert line.inside is None
    assert replace(line, measured_pct=line.change_pct).inside is True
    assert replace(line, measured_pct=line.high_pct + 0.1).inside is False
    shown = composed.rendered([replace(line, measured_pct=line.high_pct + 0.1), line])
    assert shown.splitlines()[2] == "step-lp9, served_gathered"
    assert "outside" in shown.splitlines()[3]
    assert shown.splitlines()[4].endswith("-")
    everything = [replace(line, measured_pct=-100.0) for name in CARDS for line in lines(name)]
    assert max(map(len, composed.rendered(everything).splitlines())) <= 100
    stairs = [line.change_pct for line in lines("step-staircase") if "npl128" in line.workload]
    arms = ["stock_in_place", "stock_by_id", "stock_2d", "served"]
    assert [line.candidate for line in lines("step-staircase")[:4]] == arms
    assert stairs == sorted(stairs, reverse=True)
    few, many = CARDS["step-lp13"].workloads[:2]
    made = [measurement(name="served", workload_id=w, median_us=us) for w, us in ((few, 10.0), (many, 9.0))]
    rows = {row.workload_id: (None, row) for row in made}

    def change(told: dict[str, Any], control: tuple[str, str], candidate: tuple[str, str]) -> float | None:
        return evidence.change_alone(composed._judged(told, [], *control), composed._judged(told, [], *candidate))

    assert change(rows, (few, "served"), (many, "served")) == pytest.approx(-10.0)
    assert change({}, (few, "served"), (many, "served")) is None
    assert change(rows, (few, "stock"), (few, "served")) is None


def test_what_cannot_be_expected_is_refused() -> None:
    for family, name, said in (("gdn", "cuda_decode", "calls.py"), ("step", "torch_eager", "torch_eager")):
        with pytest.raises(BadInput) as raised:
            composed.expected(family, "decode_q36-27b_l16_npl1_ctx1024", name, H200)
        assert said in str(raised.value)


NORM = "add_norm_kernel"
MIXERS = {
    "gdn": ["nvfp4_gemv", "decode_conv", "gated_norm_kernel", "nvfp4_gemv"],
    "attention": ["nvfp4_gemv", "rotate_kernel", "splitkv", "gate_kernel", "nvfp4_gemv"],
}
STEP = ["vectorized_gather_kernel"]
for kind in ("gdn", "gdn", "gdn", "attention"):
    STEP += [NORM, *MIXERS[kind], NORM, "nvfp4_gemv", "nvfp4_gemv", "activate_kernel", "nvfp4_gemv"]
STEP += ["index_elementwise_kernel", NORM, "nvjet_head", "elementwise_kernel", "reduce_kernel"]


def steps(names: list[str], each_ns: list[int]) -> Trace:
    """Steps of a replayed graph: kernels of that many ns, 500 ns from one to the next, 1500 ahead of the second."""
    known = list(dict.fromkeys(names))
    starts, ends, host, at = [], [], [], 0
    for number, ns in enumerate(each_ns):
        host.append(at)
        at += 20_000
        for i in range(len(names)):
            at += 1_500 if i == 1 else 500
            starts.append(at)
            at += ns + (i == 3) * number  # the fourth takes longer in each step
            ends.append(at)
        at += 90_000
    of = [n for n in range(len(each_ns)) for _ in names]
    both = {"process": [1] * len(host), "thread": [1] * len(host)}
    return Trace(
        tool="kineto", source="made up", names=tuple(known), gpus={0: "x"},
        labels=tuple(f"c/control/w/step {n}" for n in range(len(each_ns))), call_names=("cudaGraphLaunch",),
        kernels=Kernels.of(
            start_ns=starts, end_ns=ends, name=[known.index(n) for n in names] * len(each_ns), device=[0] * len(of),
            stream=[7] * len(of), process=[1] * len(of), correlation=of,
        ),
        ranges=Ranges.of(
            start_ns=host, end_ns=[h + 10_000 for h in host], label=[*range(len(host))], scope=[0] * len(host), **both
        ),
        calls=Calls.of(
            start_ns=[h + 1_000 for h in host], end_ns=[h + 2_000 for h in host], name=[0] * len(host),
            correlation=list(range(len(host))), **both,
        ),
    )  # fmt: skip


def test_a_step_by_its_nodes_adds_up_to_its_span() -> None:
    where = "decode_odd_npl3_ctx17"
    trace = steps(STEP, [2_000, 4_000, 3_000])
    whole = composed.by_part(trace, "c/control/w/step *", "step", where)
    assert whole is not None
    n, parts = len(STEP), {part.category: part for part in whole.parts}
    assert whole.whole == pytest.approx((n * 3_000 + 2 + (n - 1) * 500 + 1_000) / 1e3)  # the step of median span
    assert whole.sum == pytest.approx(whole.whole, rel=1e-9)
    counts = {"gdn": 3 * 3, "attention": 3, "ffn": 4 * 3, "head": 2}
    counts["small"] = n - sum(counts.values())
    assert {name: part.count for name, part in parts.items() if part.count} == counts
    assert parts["gdn"].value == pytest.approx(27.002)
    assert parts[breakdowns.IDLE].value == pytest.approx(((n - 1) * 500 + 1_000) / 1e3)
    assert any("1.50 us" in warning and NORM in warning for warning in whole.warnings)
    assert composed.by_part(trace, "c/control/w/step *", "gdn", where) is None


def test_a_page_shows_a_step_by_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "decode_odd_npl3_ctx17"
    card = msgspec.structs.replace(CARDS["step-lp9"], workloads=(where,))
    both = [f"step-lp9/{arm}/{where}/step 0" for arm in ("control", "candidate")]
    stored.save(replace(steps(STEP, [2_000, 4_000]), labels=both), tmp_path / "h200/step-lp9/r1/trace.parquet")
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    ours, theirs, workload = figures.sides(card, "h200")
    assert workload == where
    assert (ours.by_category()["ffn"].value, theirs.by_category()["ffn"].value) == (48.0, 24.0)


def test_kernels_that_overlap_are_not_counted_twice() -> None:
    """As with programmatic launch: each begins 200 ns ahead of the end of the one before, and counts from there."""
    trace = steps(STEP, [2_000])
    early = trace.kernels.start_ns - 700
    whole = composed.by_part(
        replace(trace, kernels=replace(trace.kernels, start_ns=early)), "c/control/w/step *", "step",
        "decode_odd_npl3_ctx17",
    )  # fmt: skip
    assert whole is not None
    parts = whole.by_category()
    assert breakdowns.OVERLAP not in parts
    assert (parts["gdn"].value, parts["head"].value) == pytest.approx((9 * 2.5, 2 * 2.5))
    assert parts[breakdowns.IDLE].value == pytest.approx(0.8)  # ahead of the second
    assert whole.sum == pytest.approx(whole.whole, rel=1e-9)


def test_what_is_no_step_is_refused() -> None:
    for names in (STEP[:-6], [*STEP, NORM], STEP * 2):
        with pytest.raises(BadInput, match="norms") as raised:
            composed.by_part(steps(names, [2_000]), "c/control/w/step *", "step", "decode_odd_npl3_ctx17")
        assert "lab profile" in str(raised.value)


def test_lab_predict_draws_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["predict", "step-lp9", "--out", str(tmp_path / "lp9.svg")]) == 0
    drawn = (tmp_path / "lp9.svg").read_text(encoding="utf-8")
    assert f"step-lp9 served_gathered {lines('step-lp9')[0].workload}" in drawn
    inside, outside = (
        composed.picture([replace(lines("step-lp9")[0], measured_pct=seen)]).axes[0].lines[1].get_marker()
        for seen in (lines("step-lp9")[0].change_pct, 50.0)
    )
    assert (inside, outside) == ("o", "s")


def test_lab_predict_prints_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["predict", "step-lp9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["workload"] for one in told] == list(phases.card("step-lp9").workloads)
    assert told[0]["inside"] is None
    assert isinstance(lines("step-lp9")[0], Line)
    assert main.main(["predict", "step-lp9"]) == 0
    assert f"{told[0]['change_pct']:+.1f}" in capsys.readouterr().out
