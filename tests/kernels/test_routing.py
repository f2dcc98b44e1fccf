"""The measured router: what decides, what a device without rows gets, and the recorded lesson of bandwidth tiers."""

import json
import math
import timeit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels import routing
from kernels.common import Cost, Work, Workload
from kernels.nvfp4.route import ROUTER as NVFP4
from kernels.q8.route import ROUTER as Q8_0
from kernels.routing import Point, Table
from kernels.timing import COLD_CLOCKS, Fit, Time, predict
from lab.card import recorded

SHAPE = {"N": 17408, "K": 5120}
KEY = tuple(sorted(SHAPE.items()))


def table(**times: dict[int, float]) -> Table:
    points = tuple(Point(name, KEY, at, us) for name, by in times.items() for at, us in by.items())
    return Table("h200", "toy", "M", points, "run")


CROSSING = table(gemv={8: 16.0, 32: 64.0}, gemm={8: 64.0, 32: 16.0})
# A launch of 2 us; gemv takes 1 us a token after it, gemm 10 us whatever they are.
FITS = {
    "gemv": Fit({"launches": 2.0, "tokens": 1.0}, ((0.0, 0.0), (0.0, 0.0)), 0.1, 8),
    "gemm": Fit({"launches": 2.0, "bytes": 1.0}, ((0.0, 0.0), (0.0, 0.01)), 0.1, 8),
}


def choose(
    at: int, known: Table | None = CROSSING, names: tuple[str, ...] = ("gemv", "gemm"), device: str = "h200"
) -> routing.Choice:
    """The roofline knows that gemv takes twice as long as gemm."""

    def work(name: str) -> Work:
        return Work({"tokens": float(at)} if name == "gemv" else {"bytes": 10.0})

    return routing.choose("toy", device, SHAPE, at, names, {"gemv": 2.0, "gemm": 1.0}.__getitem__, work, known)


@pytest.mark.parametrize(("at", "name"), [(8, "gemv"), (32, "gemm")])
def test_a_measured_place_decides(at: int, name: str) -> None:
    choice = choose(at, replace(CROSSING, fits=FITS))  # by the model alone gemv would take 10 us at 8, gemm 12 at 32
    assert (choice.candidate, choice.how, choice.fitted) == (name, "measured", {})
    assert f"M={at} on h200: 16.0 us against" in choice.reason
    assert "64.0" in choice.reason


def test_between_and_beyond_measured_places_the_model_decides_with_its_interval() -> None:
    known = replace(CROSSING, fits=FITS)
    few, many = choose(7, known), choose(4096, known)
    assert (few.candidate, few.how) == ("gemv", "fitted")
    assert few.times_us == pytest.approx({"gemv": 9.0, "gemm": 12.0})
    assert "~9.0 us by the fitted model (90 % within 8.1 and 9.9, most of it tokens) against gemm ~12.0" in few.reason
    assert (many.candidate, many.how) == ("gemm", "fitted")
    # The covariance of log "bytes" is (0.1)^2, its share 10 / 12: twice NOISE, so wider by sqrt(1 + (10 / 6)^2).
    assert math.log(many.fitted["gemm"].high / 12.0) == pytest.approx(0.1 * math.hypot(1, 10 / 6))


def test_a_candidate_without_a_time_there_has_the_model_s_beside_measured_ones() -> None:
    choice = choose(8, replace(table(gemv={8: 16.0}), fits=FITS))
    assert (choice.candidate, choice.how) == ("gemm", "fitted")
    assert choice.times_us == pytest.approx({"gemm": 12.0, "gemv": 16.0})
    assert choice.reason.endswith("against gemv 16.0")


def test_what_was_neither_measured_there_nor_fitted_is_not_compared() -> None:
    choice = choose(8, table(gemv={8: 16.0}, gemm={32: 1.0}))
    assert (choice.candidate, choice.how) == ("gemv", "measured")
    assert choice.left_out == {"gemm": "neither measured there nor fitted"}
    assert choose(9).how == "predicted"


def test_a_count_that_was_never_fitted_is_no_basis() -> None:
    fit = FITS["gemm"]
    assert predict(Work({"bytes": 10.0}), fit) is not None
    assert predict(Work({"tile64": 10.0}), fit) is None


def test_a_question_waits_for_a_first_load_where_the_fit_knows_of_it() -> None:
    fit = FITS["gemv"]
    covariance = tuple((*row, 0.0) for row in fit.covariance)
    waits = replace(fit, us={**fit.us, "cold": 1e-3}, covariance=(*covariance, (0.0,) * (len(fit.us) + 1)))
    choice = choose(7, replace(CROSSING, fits=FITS | {"gemv": waits}))
    assert choice.times_us == pytest.approx({"gemv": 9.0 + 1e-3 * COLD_CLOCKS, "gemm": 12.0})


def test_a_plan_answers_what_the_router_answers_at_the_value_above() -> None:
    known = replace(CROSSING, fits=FITS)
    made = routing.plan(lambda at: choose(at, known))
    for at in (1, 8, 9, 10, 11, 32, 64):
        assert made[at] == choose(at, known)
    assert made[65] == made[80] == choose(80, known)
    assert made[10**6] == choose(4096, known)


def test_a_choice_of_a_plan_takes_less_than_20_us() -> None:
    """The fastest of many, which a busy machine leaves alone."""
    made = routing.plan(lambda at: choose(at, replace(CROSSING, fits=FITS)))
    assert min(timeit.repeat(lambda: made[37], number=100, repeat=20)) / 100 < 20e-6


def test_a_candidate_that_cannot_run_here_is_not_chosen() -> None:
    assert choose(8, names=("gemm",)).candidate == "gemm"
    with pytest.raises(ValueError, match="no candidate takes"):
        choose(8, names=())


def test_a_candidate_that_the_table_prefers_but_that_refuses_is_passed_over_and_named() -> None:
    reason = "M=8: not any more; use gemm"
    args = ("toy", "h200", SHAPE, 8, ("gemm",), lambda name: 1.0, lambda name: None)
    choice = routing.choose(*args, CROSSING, {"gemv": reason})
    assert (choice.candidate, choice.how) == ("gemm", "measured")
    assert f"64.0 us; passed over gemv, 16.0 in the table: {reason}" in str(choice)
    assert "passed over gemv, 16.0 in the table: not among the candidates here" in str(routing.choose(*args, CROSSING))
    only = routing.choose(*args, table(gemv={8: 16.0}), {"gemv": reason})
    assert (only.candidate, only.how) == ("gemm", "predicted")
    assert f"passed over gemv, which is in the table: {reason}" in str(only)
    slower = routing.choose("toy", "h200", SHAPE, 32, ("gemm",), *args[5:], CROSSING, {"gemv": reason})
    assert "passed over" not in str(slower)


def test_without_rows_the_prediction_decides_and_says_so() -> None:
    choice = choose(8, None, device="no-such-device")
    assert (choice.candidate, choice.how) == ("gemm", "predicted")
    assert "nothing measured on no-such-device" in choice.reason
    assert "equal" not in choice.reason
    arguments = ("toy", "no-such-device", SHAPE, 8, ("gemv", "gemm"), lambda name: 1.0, lambda name: None)
    level = routing.choose(*arguments)
    assert level.candidate == "gemv"
    assert "(equal ones in the order of preference)" in level.reason


HALF = routing.Source(CROSSING, 2000.0, {"bf16": 100.0})


def test_a_time_is_carried_over_by_its_floor() -> None:
    """What a kernel takes beyond its floor stays; nothing is faster than its floor; no peak, no products."""
    memory, products = Cost(1e6, 2e7, "bf16"), Cost(1e9, 2e6, "bf16")  # 10 us at 2 TB/s and 20 at 1; 10 us and 5
    rates = (1000.0, {"bf16": 200.0})

    def carried(us: float, cost: Cost, *rates: Any) -> float:
        return routing.carried(us, *routing.floors_us(cost, HALF, *rates))

    assert carried(13.0, memory, *rates) == pytest.approx(23.0)
    assert carried(13.0, products, *rates) == pytest.approx(8.0)
    assert carried(1.0, memory, *rates) == pytest.approx(20.0)
    assert carried(13.0, products, 1000.0, {}) == pytest.approx(14.0)
    assert carried(13.0, replace(products, pipe="fp8"), *rates) == pytest.approx(14.0)


def test_a_device_without_a_table_gets_another_ones_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """At half the bandwidth gemv, which reads twice as much, loses what it wins; the interval is wider by CARRIED."""

    def work(name: str) -> Callable[[Workload, int], Work]:
        return lambda workload, sms: Work({"tokens": 8.0} if name == "gemv" else {"bytes": float(sms)})

    candidates: list[Any] = [
        SimpleNamespace(name=name, precision="", no_route="", refuses=lambda workload: "", work=work(name))
        for name in ("gemv", "gemm")
    ]
    router = routing.Router("toy", "M", ("N", "K"), {}, lambda w, c: Cost(0.0, MOVED[c.name], "bf16"), NVFP4.asked, "")
    workload = Workload("x", {**SHAPE, "M": 8})
    known = table(gemv={8: 16.0}, gemm={8: 20.0})

    def asked(
        device: str, source: routing.Source | None, sms: int = routing.SMS, bandwidth: float = 1000.0
    ) -> routing.Choice:
        rates = bandwidth, {"bf16": 100.0}
        return routing.route(router, workload, device, candidates, *rates, sms=sms, source=source)

    here = asked("nowhere", replace(HALF, table=known))
    assert (here.candidate, here.how) == ("gemm", "carried")
    assert here.times_us == pytest.approx({"gemm": 24.0, "gemv": 26.0})
    said = "M=8 on nowhere: ~24.0 us (90 % within 20.4 and 27.6) against gemv ~26.0; carried over from h200"
    assert here.reason.endswith(said)
    assert asked("nowhere", None).how == "predicted"
    fewer = asked("nowhere", replace(HALF, table=known, sms=114))
    assert (fewer.times_us, fewer.fitted["gemm"].shown) == (here.times_us, False)
    assert "~24.0 us (no interval: one was shown for equal numbers of multiprocessors, and here are" in fewer.reason
    unknown = asked("nowhere", replace(HALF, table=known), bandwidth=0.0)
    assert (unknown.candidate, unknown.how, unknown.times_us) == ("gemv", "predicted", {})  # the fastest there
    assert "its bandwidth is unknown, so no time is told; the first by their times on h200" in unknown.reason
    assert asked("nowhere", replace(HALF, table=table(gemm={8: 20.0})), bandwidth=0.0).candidate == "gemm"
    first = asked("nowhere", None, bandwidth=0.0)
    assert (first.candidate, first.left_out) == ("gemv", {"gemm": "no bandwidth is known"})
    assert first.reason.endswith("no time is told; the first in the order of preference is taken")
    monkeypatch.setattr(routing, "table", lambda device, family: known)
    assert (asked("h200", HALF).candidate, asked("h200", HALF).how) == ("gemv", "measured")
    monkeypatch.setattr(routing, "table", lambda device, family: None)
    fitted = asked("nowhere", replace(HALF, table=replace(known, points=known.points[:1], fits=FITS), sms=20), sms=20)
    time, there = fitted.fitted["gemm"], predict(Work({"bytes": 20.0}), FITS["gemm"])
    assert there is not None
    assert time.us == pytest.approx(there.us + 4.0)
    assert time.low == pytest.approx((there.low + 4.0) * (1 - routing.CARRIED))
    assert time.high == pytest.approx((there.high + 4.0) * (1 + routing.CARRIED))

    certain = Fit(FITS["gemm"].us, ((0.0, 0.0), (0.0, 0.0)), 0.001, 9)  # the device's own: 8 rows, 1.5 from end to end
    for rows, how in ((9, "carried"), (8, "fitted")):
        monkeypatch.setattr(routing, "table", lambda device, family: replace(known, points=known.points[:1], fits=FITS))
        more = replace(known, points=(), fits={"gemm": replace(certain, rows=rows)})
        assert asked("h200", replace(HALF, table=more, sms=20), sms=20).how == how
        assert asked("h200", replace(HALF, table=more, sms=20)).how == "fitted"  # no interval says less than any


def test_what_a_device_timed_itself_comes_first() -> None:
    """Then what says more, by its interval: its own fit or another device's time."""

    def chosen(own: Table, **times: Time) -> routing.Choice:
        work = {"gemv": Work({"tokens": 8.0}), "gemm": Work({"bytes": 10.0})}
        over = routing.Carried("h100", "M", times)
        floor = {"gemv": 2.0, "gemm": 1.0}.__getitem__
        return routing.choose("toy", "h200", SHAPE, 8, ("gemv", "gemm"), floor, work.__getitem__, own, None, over)

    gemv, wide, narrow = Time(5.0, 4.0, 6.0, ""), Time(11.0, 8.0, 14.0, ""), Time(11.0, 10.9, 11.1, "bytes")
    measured = chosen(CROSSING, gemv=gemv, gemm=wide)
    assert (measured.how, measured.times_us) == ("measured", {"gemv": 16.0, "gemm": 64.0})
    mixed = chosen(table(gemm={8: 64.0}), gemv=gemv, gemm=wide)
    assert (mixed.how, mixed.times_us) == ("carried", {"gemv": 5.0, "gemm": 64.0})
    assert mixed.reason.endswith("~5.0 us (90 % within 4.0 and 6.0) against gemm 64.0; carried over from h100: gemv")
    fits = replace(table(gemv={8: 16.0}), fits=FITS)  # gemm by its own fit: 12.0, from 10 to 14
    assert chosen(fits, gemm=wide).times_us["gemm"] == pytest.approx(12.0)
    assert chosen(fits, gemm=wide).how == "fitted"
    assert chosen(fits, gemm=narrow).times_us["gemm"] == 11.0
    nothing = replace(fits, points=(), fits={})
    assert chosen(nothing, gemm=wide).left_out == {"gemv": "neither measured there nor fitted"}


MOVED = {"gemv": 2e7, "gemm": 8e6}


def test_a_pipe_without_a_peak_is_no_prediction() -> None:
    def asked(*names: str) -> routing.Choice:
        floors = {"gemv": 5.0, "gemm": math.inf}
        return routing.choose("toy", "no-such-device", SHAPE, 8, names, floors.__getitem__, lambda name: None)

    choice = asked("gemm", "gemv")
    assert (choice.candidate, choice.times_us) == ("gemv", {"gemv": 5.0})
    assert choice.left_out == {"gemm": "no peak for its pipe"}
    none = asked("gemm")
    assert (none.candidate, none.times_us) == ("gemm", {})
    assert "no peak for the pipe of any candidate, the first is taken" in none.reason


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILLGATE_ROUTE_TOY", "gemm")
    choice = choose(8)
    assert (choice.candidate, choice.how) == ("gemm", "override")
    assert "KILLGATE_ROUTE_TOY is set; without it gemv (measured)" in choice.reason
    assert choice.times_us == {"gemv": 16.0, "gemm": 64.0}
    monkeypatch.setenv("KILLGATE_ROUTE_TOY", "gem")
    with pytest.raises(ValueError, match=r"KILLGATE_ROUTE_TOY=gem\b.*gemv, gemm"):
        choose(1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 9}',
        json.dumps(
            {
                "schema": 2,
                "device": "d",
                "family": "f",
                "axis": "M",
                "source": "s",
                "points": [],
                "fits": {},
                "validation": {},
            }
        ),
        '{"schema": 2, "device": "d", "family": "f", "axis": "M", "source": "s",'
        ' "points": [{"candidate": "a", "shape": {"N": 1}, "at": 1, "median_us": NaN}]}',
    ],
)
def test_a_broken_table_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"toy\.json.*lab routes"):
        routing.read(path)


# Words ----------------------------------------------------------------------------------------------------------------


def test_a_product_is_asked_for_by_its_operand_or_by_columns() -> None:
    by_operand, note = routing.linear({"ne": "5120,1,64,2", "N": "6144"}, block=16)
    by_columns, none = routing.linear({"M": "128", "K": "5120", "N": "6144"}, block=16)
    assert by_operand.axes == by_columns.axes == {"M": 128, "N": 6144, "K": 5120, "dtype": "bf16"}
    assert (note, none) == ("ne=(5120, 1, 64, 2) collapsed to M=128 columns of K=5120", "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"ne": "5120", "N": "1"}, r"ne=\(5120,\) must be \(K, columns, ...\)"),
        ({"ne": "5120,0", "N": "1"}, "every entry >= 1"),
        ({"ne": "5120,x", "N": "1"}, "ne=5120,x: not whole numbers"),
        ({"ne": "16,1", "M": "1", "N": "1"}, "ne gives K and M already"),
        ({"ne": "16,1"}, "N is missing"),
        ({"ne": "20,1", "N": "1"}, "K=20: not a multiple of 16"),
        ({"K": "16", "M": "-1", "N": "1"}, "M=-1: not a positive whole number"),
        ({"K": "16", "M": "1", "N": "1", "dtype": "f8"}, "dtype=f8: not one of bf16, fp16"),
        ({"K": "16", "M": "1", "N": "1", "batch": "2"}, "batch: no axis of this question; it has M, N, K, dtype"),
    ],
)
def test_words_that_are_no_product(words: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        routing.linear(words, block=16)


@pytest.mark.parametrize(("router", "block"), [(NVFP4, 16), (Q8_0, 32)])
def test_each_format_has_blocks_of_its_own(router: routing.Router, block: int) -> None:
    own = {"K": str(33 * block), "M": "1", "N": "1"}
    assert router.asked(own)[0]["K"] == 33 * block
    with pytest.raises(ValueError, match=rf"\b{block}\b"):
        router.asked(own | {"K": str(33 * block // 2)})


# ds4's tiers by bandwidth (above 800 GB/s mmq, 200 to 800 cuBLAS, below warp8) and what each path took there ----------


def tier(bandwidth_gb_s: float) -> str:
    return "mmq" if bandwidth_gb_s > 800 else "cublas" if bandwidth_gb_s > 200 else "warp8"


def prefill_table(device: str, arms: dict[str, str]) -> Table:
    """Recorded prefill rates as times of one token, us: a router needs times, and only their order matters here."""
    rates = {name: recorded.target(figure_id) for name, figure_id in arms.items()}
    assert all(f.unit == "tok/s" and f.device == device for f in rates.values())
    points = tuple(Point(name, KEY, 2048, 1e6 / float(f.value)) for name, f in rates.items())
    return Table(device, "q8", "M", points, "recorded")


SOUND = {
    "gb10": {
        "mmq": "ds4.q8-mmq-default.gb10.prefill.candidate",
        "cublas": "ds4.q8-mmq-default.gb10.prefill.peer-cublas",
        "warp8": "ds4.q8-mmq-default.gb10.prefill.peer-warp8",
    },
    "rtx-pro-6000": {
        "mmq": "ds4.q8-mmq-default.rtx-pro-6000.prefill.candidate",
        "cublas": "ds4.q8-mmq-default.rtx-pro-6000.prefill.peer-cublas",
        "warp8": "ds4.q8-mmq-default.rtx-pro-6000.prefill.peer-warp8",
    },
}


def routed(known: Table, names: tuple[str, ...] = ("mmq", "cublas", "warp8")) -> routing.Choice:
    return routing.choose("q8", known.device, SHAPE, 2048, names, lambda name: 1.0, lambda name: None, known)


@pytest.mark.parametrize("bandwidth_gb_s", [273, 546])  # both are in the record
def test_bandwidth_tiers_pick_the_slower_path_on_gb10(bandwidth_gb_s: float) -> None:
    known = prefill_table("gb10", SOUND["gb10"])
    choice = routed(known)
    assert choice.candidate == "mmq"
    assert tier(bandwidth_gb_s) == "cublas"
    cost = choice.times_us["cublas"] / choice.times_us["mmq"]
    assert cost == pytest.approx(458 / 401)


def test_the_same_router_is_right_on_the_other_device() -> None:
    known = prefill_table("rtx-pro-6000", SOUND["rtx-pro-6000"])
    assert routed(known).candidate == tier(1600) == "mmq"


def test_a_table_of_an_artefact_repeats_the_mistake() -> None:
    """114 tok/s was taken before cuBLAS was initialised: no rule of choosing mends a wrong time."""
    artefact = SOUND["gb10"] | {"mmq": "ds4.q8-strategy-tiers.gb10.prefill.candidate"}
    assert routed(prefill_table("gb10", artefact)).candidate == "cublas"
