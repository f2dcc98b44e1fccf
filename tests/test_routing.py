"""The measured router: what decides, what a device without rows gets, and the recorded lesson of bandwidth tiers."""

import json
from pathlib import Path

import pytest

from kernels import routing
from kernels.routing import Point, Table
from lab import recorded

SHAPE = {"N": 17408, "K": 5120}
KEY = tuple(sorted(SHAPE.items()))


def table(**times: dict[int, float]) -> Table:
    points = tuple(Point(name, KEY, at, us) for name, by in times.items() for at, us in by.items())
    return Table("h200", "toy", "M", points, "run")


# They cross between 8 and 32: 16 against 64 at 8, 64 against 16 at 32, equal at 16.
CROSSING = table(gemv={8: 16.0, 32: 64.0}, gemm={8: 64.0, 32: 16.0})


def choose(at: int, known: Table | None = CROSSING, names: tuple[str, ...] = ("gemv", "gemm")) -> routing.Choice:
    return routing.choose("toy", "h200", SHAPE, at, names, lambda name: {"gemv": 2.0, "gemm": 1.0}[name], known)


@pytest.mark.parametrize(
    ("at", "name"), [(1, "gemv"), (8, "gemv"), (15, "gemv"), (17, "gemm"), (32, "gemm"), (4096, "gemm")]
)
def test_the_measured_crossover_decides(at: int, name: str) -> None:
    choice = choose(at)
    assert (choice.candidate, choice.how) == (name, "measured")
    assert "on h200" in choice.reason


def test_times_are_interpolated_on_logarithms() -> None:
    assert routing.times(CROSSING.points, 16) == pytest.approx({"gemv": 32.0, "gemm": 32.0})
    assert routing.times(CROSSING.points, 1) == pytest.approx({"gemv": 16.0, "gemm": 64.0})


def test_a_candidate_measured_on_one_side_only_is_not_extrapolated() -> None:
    assert choose(16, table(gemv={8: 16.0}, gemm={8: 64.0, 32: 16.0})).candidate == "gemm"


def test_a_candidate_that_cannot_run_here_is_not_chosen() -> None:
    assert choose(8, names=("gemm",)).candidate == "gemm"
    with pytest.raises(ValueError, match="no candidate takes"):
        choose(8, names=())


def test_a_candidate_that_the_table_prefers_but_that_refuses_is_passed_over_and_named() -> None:
    reason = "M=8: not any more; use gemm"
    args = ("toy", "h200", SHAPE, 8, ("gemm",), lambda name: 1.0)
    choice = routing.choose(*args, CROSSING, {"gemv": reason})
    assert (choice.candidate, choice.how) == ("gemm", "measured")
    assert f"64.0 us; passed over gemv, 16.0 in the table: {reason}" in str(choice)
    assert "passed over gemv, 16.0 in the table: not among the candidates here" in str(routing.choose(*args, CROSSING))
    only = routing.choose(*args, table(gemv={8: 16.0}), {"gemv": reason})
    assert (only.candidate, only.how) == ("gemm", "predicted")
    assert f"passed over gemv, which is in the table: {reason}" in str(only)
    slower = routing.choose("toy", "h200", SHAPE, 32, ("gemm",), lambda name: 1.0, CROSSING, {"gemv": reason})
    assert "passed over" not in str(slower)


def test_the_nearest_shape_is_used_and_named() -> None:
    far = Point("gemm", (("K", 64), ("N", 64)), 8, 0.1)
    known = Table("h200", "toy", "M", (*CROSSING.points, far), "run")
    near = routing.choose("toy", "h200", {"N": 16384, "K": 5120}, 8, ("gemv", "gemm"), lambda n: 1.0, known)
    assert near.candidate == "gemv"
    assert "nearest measured shape K=5120 N=17408" in near.reason


def test_without_rows_the_prediction_decides_and_says_so() -> None:
    choice = routing.choose("toy", "no-such-device", SHAPE, 8, ("gemv", "gemm"), {"gemv": 2.0, "gemm": 1.0}.__getitem__)
    assert (choice.candidate, choice.how) == ("gemm", "predicted")
    assert "nothing measured on no-such-device" in choice.reason


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILLGATE_ROUTE_TOY", "gemm")
    assert (choose(1).candidate, choose(1).how) == ("gemm", "override")
    monkeypatch.setenv("KILLGATE_ROUTE_TOY", "gem")
    with pytest.raises(ValueError, match="KILLGATE_ROUTE_TOY=gem: not one of gemv, gemm"):
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
    with pytest.raises(ValueError, match=r"toy\.json: .*write it again with lab routes"):
        routing.read(path)


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
    return routing.choose("q8", known.device, SHAPE, 2048, names, lambda n: 1.0, known)


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
