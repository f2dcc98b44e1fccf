"""The measured router: what decides, what a device without rows gets, and the recorded lesson of bandwidth tiers."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from kernels import routing
from kernels.nvfp4.route import ROUTER as NVFP4
from kernels.q8.route import ROUTER as Q8_0
from kernels.routing import Point, Table
from lab.card import recorded

SHAPE = {"N": 17408, "K": 5120}
KEY = tuple(sorted(SHAPE.items()))


def table(**times: dict[int, float]) -> Table:
    points = tuple(Point(name, KEY, at, us) for name, by in times.items() for at, us in by.items())
    return Table("h200", "toy", "M", points, "run")


# They cross between 8 and 32: 16 against 64 at 8, 64 against 16 at 32, equal at 16.
CROSSING = table(gemv={8: 16.0, 32: 64.0}, gemm={8: 64.0, 32: 16.0})


def predict(name: str, shape: Mapping[str, int], at: int) -> float:
    """Of gemv twice as long as of gemm; proportional to the weights, whatever the columns."""
    return {"gemv": 2.0, "gemm": 1.0}[name] * shape["N"] * shape["K"] / (17408 * 5120)


def choose(at: int, known: Table | None = CROSSING, names: tuple[str, ...] = ("gemv", "gemm")) -> routing.Choice:
    return routing.choose("toy", "h200", SHAPE, at, names, predict, known)


@pytest.mark.parametrize(
    ("at", "name", "how"),
    [
        (8, "gemv", "measured"),
        (15, "gemv", "interpolated"),
        (17, "gemm", "interpolated"),
        (32, "gemm", "measured"),
        (4, "gemv", "nearest"),
        (64, "gemm", "nearest"),
        (3, "gemv", "predicted"),
        (4096, "gemm", "predicted"),
    ],
)
def test_the_measured_crossover_decides_and_says_how_near_it_is(at: int, name: str, how: str) -> None:
    choice = choose(at)
    assert (choice.candidate, choice.how) == (name, how)
    assert "on h200" in choice.reason


def test_times_are_interpolated_on_logarithms() -> None:
    assert routing.times(CROSSING.points, 16) == pytest.approx({"gemv": 32.0, "gemm": 32.0})
    assert routing.times(CROSSING.points, 1) == {}
    assert "between its own points at 8 and 32" in choose(16).reason


def test_a_candidate_is_interpolated_between_its_own_points() -> None:
    """At 1024 only one was timed; the others stood at 512 and 2048 and must be compared all the same."""
    known = table(gemv={512: 100.0, 1024: 210.0, 2048: 400.0}, gemm={512: 90.0, 2048: 360.0})
    choice = choose(1024, known)
    assert (choice.candidate, choice.how) == ("gemm", "interpolated")
    assert choice.times_us == pytest.approx({"gemm": 180.0, "gemv": 210.0})
    assert "~180.0 us against gemv 210.0" in choice.reason
    assert choose(2048, known).how == "measured"


def test_a_candidate_measured_on_one_side_only_is_not_extrapolated() -> None:
    choice = choose(16, table(gemv={8: 1.0}, gemm={8: 64.0, 32: 16.0}))
    assert choice.candidate == "gemm"
    assert choice.left_out == {"gemv": "no measured time there, nor on both sides"}


def test_points_on_different_sides_are_no_interpolation() -> None:
    choice = choose(16, table(gemv={8: 16.0}, gemm={32: 1.0}))
    assert (choice.candidate, choice.how) == ("gemv", "nearest")  # 8 and 32 are as near; the smaller one is taken


def test_a_candidate_that_cannot_run_here_is_not_chosen() -> None:
    assert choose(8, names=("gemm",)).candidate == "gemm"
    with pytest.raises(ValueError, match="no candidate takes"):
        choose(8, names=())


def test_a_candidate_that_the_table_prefers_but_that_refuses_is_passed_over_and_named() -> None:
    reason = "M=8: not any more; use gemm"
    args = ("toy", "h200", SHAPE, 8, ("gemm",), predict)
    choice = routing.choose(*args, CROSSING, {"gemv": reason})
    assert (choice.candidate, choice.how) == ("gemm", "measured")
    assert f"64.0 us; passed over gemv, 16.0 in the table: {reason}" in str(choice)
    assert "passed over gemv, 16.0 in the table: not among the candidates here" in str(routing.choose(*args, CROSSING))
    only = routing.choose(*args, table(gemv={8: 16.0}), {"gemv": reason})
    assert (only.candidate, only.how) == ("gemm", "predicted")
    assert f"passed over gemv, which is in the table: {reason}" in str(only)
    far = routing.choose("toy", "h200", {"N": 34816, "K": 5120}, 8, ("gemm",), predict, CROSSING, {"gemv": reason})
    assert f"128.0 us; passed over gemv, 16.0 in the table: {reason}" in str(far)
    slower = routing.choose("toy", "h200", SHAPE, 32, ("gemm",), predict, CROSSING, {"gemv": reason})
    assert "passed over" not in str(slower)


def at_shape(n: int, k: int, at: int = 8) -> routing.Choice:
    far = Point("gemm", (("K", 64), ("N", 64)), 8, 0.1)
    known = Table("h200", "toy", "M", (*CROSSING.points, far), "run")
    return routing.choose("toy", "h200", {"N": n, "K": k}, at, ("gemv", "gemm"), predict, known)


def test_the_nearest_shape_is_used_scaled_and_named() -> None:
    near = at_shape(8704, 5120)
    assert (near.candidate, near.how) == ("gemv", "nearest")
    assert "nearest measured place K=5120 N=17408 M=8 on h200, 2.00x away" in near.reason
    assert near.times_us == pytest.approx({"gemv": 8.0, "gemm": 32.0})
    assert "M=16 on h200 (~: between its own points at 8 and 32), 2.00x away" in at_shape(8704, 5120, 16).reason


def test_a_shape_far_from_every_point_is_never_called_measured() -> None:
    """One more row than half, one column less than half: told as a prediction, from the same place."""
    for far in (at_shape(8703, 5120), at_shape(8704, 5120, 7), at_shape(17408, 5120, 3), at_shape(4096, 2048)):
        assert far.how == "predicted"
        assert "no measured place within 2x, the nearest is K=5120 N=17408" in far.reason
    assert at_shape(4096, 2048).times_us == pytest.approx({"gemv": 16.0 / 10.625, "gemm": 64.0 / 10.625})


def test_without_rows_the_prediction_decides_and_says_so() -> None:
    choice = routing.choose("toy", "no-such-device", SHAPE, 8, ("gemv", "gemm"), predict)
    assert (choice.candidate, choice.how) == ("gemm", "predicted")
    assert "nothing measured on no-such-device" in choice.reason
    assert "equal" not in choice.reason
    level = routing.choose("toy", "no-such-device", SHAPE, 8, ("gemv", "gemm"), lambda name, shape, at: 1.0)
    assert level.candidate == "gemv"
    assert "(equal ones in the order of preference)" in level.reason


def test_a_pipe_without_a_peak_is_no_prediction() -> None:
    def only(name: str, shape: Mapping[str, int], at: int) -> float:
        return 5.0 if name == "gemv" else math.inf

    choice = routing.choose("toy", "no-such-device", SHAPE, 8, ("gemm", "gemv"), only)
    assert (choice.candidate, choice.times_us) == ("gemv", {"gemv": 5.0})
    assert choice.left_out == {"gemm": "no peak for its pipe"}
    none = routing.choose("toy", "no-such-device", SHAPE, 8, ("gemm",), only)
    assert (none.candidate, none.times_us) == ("gemm", {})
    assert "no peak for the pipe of any candidate, the first is taken" in none.reason
    unscaled = routing.choose("toy", "h200", SHAPE, 4, ("gemv", "gemm"), only, CROSSING)
    assert unscaled.times_us == {"gemv": 16.0, "gemm": 64.0}
    assert unscaled.reason.startswith("nearest measured place")
    assert "scaled" not in unscaled.reason


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
        json.dumps({"schema": 1, "device": "d", "family": "f", "axis": "M", "source": "s", "points": []}),
        '{"schema": 1, "device": "d", "family": "f", "axis": "M", "source": "s",'
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
    return routing.choose("q8", known.device, SHAPE, 2048, names, lambda *where: 1.0, known)


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
