"""`lab routes FAMILY --calibrate`: where it measures, and that on a simulated device it makes routes from nothing."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels import routing
from kernels.common import Cost, Work, Workload
from lab.base import devices
from lab.bench import machine, measure
from lab.check import families
from lab.cli import main
from lab.row import store
from lab.row.records import Provenance
from lab.study import calibrate, choices
from tests.bench import fake_bench
from tests.refused import held

# The pool -------------------------------------------------------------------------------------------------------------


def test_the_pool_are_sixty_linear_shapes_from_half_a_billion_to_405_billion_parameters() -> None:
    models = calibrate.public_models()
    shapes = {shape for model in models for shape in calibrate.linear_shapes(model)}
    assert len(shapes) >= 60
    assert (min(shapes), max(shapes)) == ((896, 896), (53248, 16384))
    assert all(model.source.startswith("config.json of ") for model in models)
    assert all(model.heads % model.kv_heads == 0 for model in models)
    # 18,432 x 5120 of Qwen3-14B: (40 + 2 x 8) heads of 128
    assert (7168, 5120) in calibrate.linear_shapes(next(m for m in models if m.id == "Qwen3-14B"))


@pytest.mark.parametrize("family", ["nvfp4", "q8", "kv", "gdn"])
def test_every_place_of_a_pool_answers_its_router_and_is_a_workload(family: str) -> None:
    asks, found = choices.router(family), families.bare(family)
    pool = calibrate.pool(asks)
    assert len(pool) >= calibrate.MOST
    for place in pool[:: len(pool) // 20]:
        workload, _ = asks.asked({axis: str(value) for axis, value in place.axes})
        named = found.workload(calibrate.words(asks, place))
        assert {axis: named.axes.get(axis) for axis in workload.axes} == workload.axes
        assert place.models


# Which of it ----------------------------------------------------------------------------------------------------------


def doubt(known: tuple[int, ...] = (), at: tuple[int, ...] = tuple(range(9))) -> tuple[tuple[int, ...], np.ndarray]:
    """Of a candidate that is a launch whatever the size, 1, 2, 4 ... 256."""
    points = [(float(n),) for n in range(9)]
    seen = tuple((points[n], Work({}, {"launches": 1.0})) for n in known)
    made = calibrate.Doubt(at, (Work({}, {"launches": 1.0}),) * len(at), seen, {"launches": 2.0})
    return at, made.covariance(points, devices.get("h200"))


def test_each_place_is_the_one_that_tells_most_of_what_is_still_in_doubt() -> None:
    order = calibrate.spread([doubt()], [1.0] * 9, 9)
    assert order[0] == 4  # the middle
    assert {order[1] < 3, order[2] < 3} == {True, False}  # then a place on either side
    assert sorted(order) == list(range(9))
    assert calibrate.spread([doubt(known=(0, 1, 2))], [1.0] * 9, 1)[0] > 4
    assert calibrate.spread([], [1.0] * 9, 9) == []


def test_a_place_that_nobody_takes_tells_nothing_and_a_dear_one_less() -> None:
    assert set(calibrate.spread([doubt(at=(0, 1)), doubt(at=(7,))], [1.0] * 9, 9)) == {0, 1, 7}
    assert calibrate.spread([doubt()], [1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0], 1) != [4]


def test_what_is_known_is_in_doubt_no_more_and_near_it_less() -> None:
    sure, open_ = (np.diag(doubt(known)[1]) for known in ((4,), ()))
    assert sure[4] < 0.01 * open_[4]
    assert sure[4] < sure[5] < sure[8] < open_[8]


@pytest.mark.slow
def test_places_without_a_choice_and_those_that_stay_in_l2_are_left_out() -> None:
    """D = 64 is one candidate's of each form; 64 sets of 0.6 MB are less than an H200's cache."""
    chosen = [dict(item.workload.axes) for item in calibrate.items(choices.router("kv"), devices.get("h200"), {})]
    assert len(chosen) == calibrate.MOST
    assert {axes["D"] for axes in chosen} == {128, 256}
    assert min(axes["ctx"] * axes["batch"] * axes["Hkv"] * axes["D"] for axes in chosen) * 2 > 60e6 / 64


# The simulated device -------------------------------------------------------------------------------------------------

QUICK = replace(calibrate.SETTINGS, seconds=0.0, backend="tests.bench.fake_bench:cpu")
SIZES = (64, 128, 256, 512, 1024, 2048)


def toy(name: str) -> families.Family:
    """The toy family with two candidates, whose counts are a launch, and a rival that is not installed."""
    made = fake_bench.load(name)
    named = {n: replace(c, work=lambda w, sms: Work({"bytes": 12.0 * w["N"]})) for n, c in made.candidates.items()}
    return replace(made, candidates={n: named[n] for n in ("plain", "faster")}, unavailable={}, modules={})


def asked(words: Any) -> tuple[Workload, str]:
    return Workload("asked", routing.axes(words, N=None)), ""


ROUTER = routing.Router("toy", "N", (), {}, lambda w, c: Cost(w["N"], 12.0 * w["N"], "f32"), asked, "N=VALUES")


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fake_bench.use(monkeypatch, toy)
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    monkeypatch.setattr(machine, "provenance", lambda: Provenance(commit="0"))
    monkeypatch.setattr(choices, "router", lambda family: ROUTER)
    monkeypatch.setattr(measure, "require_gpu", lambda command: devices.get("h200"))
    monkeypatch.setattr(calibrate, "SETTINGS", QUICK)
    monkeypatch.setattr(calibrate.run, "__defaults__", (2.0, None, QUICK, lambda line: None))

    def sizes(model: calibrate.PublicModel) -> Iterator[dict[str, int]]:
        return ({"N": size} for size in SIZES)

    monkeypatch.setattr(calibrate, "POOLS", (sizes,))
    return tmp_path


@pytest.mark.slow
def test_it_makes_routes_from_nothing(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def choice(n: int) -> routing.Choice:
        stored = simulated / "h200" / "routes" / "toy.json"
        known = routing.read(stored) if stored.exists() else routing.Table("h200", "toy", "N", (), "")
        return choices.choose(ROUTER, asked({"N": str(n)})[0], devices.get("h200"), known=known)

    assert main.main(["routes", "toy", "--calibrate", "--minutes", "2"]) == 0
    out = capsys.readouterr().out
    assert "6 places timed, 0 arms without a time; 2 candidates fitted" in out
    assert "each shape left out" not in out  # one shape, so there is nothing to fit without it
    found = store.rows("h200", family="toy")
    assert {(r.phase, r.name) for r in found} == {("calibration-toy", n) for n in ("plain", "faster")}
    assert {r.workload["N"] for r in found} == set(SIZES)
    assert all(r.brief and r.calibration and r.shape == (1, 3, 10) for r in found)
    measured, fitted = choice(256), choice(300)
    assert (measured.candidate, measured.how) == ("faster", "measured")
    assert (fitted.candidate, fitted.how) == ("faster", "fitted")
    # The made-up clock: 100 us for the control, 80 for the other, whatever the size.
    assert fitted.times_us == pytest.approx({"faster": 80.0, "plain": 100.0}, rel=0.05)
    assert main.main(["routes", "toy", "--calibrate"]) == 1  # nothing is left to learn
    assert "no place was timed" in capsys.readouterr().out


@pytest.mark.slow
def test_no_minute_is_no_place_and_what_was_left_out_is_said(
    simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["routes", "toy", "--calibrate", "--minutes", "0"]) == 1
    assert "left out" in capsys.readouterr().err
    assert not list(simulated.glob("h200/routes/*"))


def test_it_needs_a_gpu_and_answers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["routes", "nvfp4", "--calibrate", "--json"]) == 2
    held(capsys.readouterr().err, "--calibrate", "--json")
    if families.gpu_capability() is None:
        assert main.main(["routes", "nvfp4", "--calibrate"]) == 2
        held(capsys.readouterr().err, "lab routes --calibrate", "GPU")


def test_a_place_that_this_gpu_has_no_room_for_is_left_out(monkeypatch: pytest.MonkeyPatch, simulated: Path) -> None:
    h200 = devices.get("h200")
    every = calibrate.items(ROUTER, h200, {})
    assert [item.bytes for item in every] == list(range(len(SIZES)))  # the turn stands for the order
    monkeypatch.setattr(calibrate, "LARGEST", 12 * 200 / (h200.vram.base if h200.vram else math.nan))
    assert {item.workload["N"] for item in calibrate.items(ROUTER, h200, {})} == {64, 128}
