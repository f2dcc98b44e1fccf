"""The time model's fit: parameters that were put in come out, intervals cover, and what the stored tables say of it."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from kernels import routing
from kernels.common import Work
from kernels.timing import cold, predict, shares
from lab.base import devices
from lab.check import families
from lab.study import calibrate, choices, routes, timefit
from lab.study.timefit import Timed
from tests.loops import over

H200 = devices.get("h200")
PUT_IN = {"launches": 3.0, "bytes": 2.2e-7, "clocks": 6e-4}


def places(count: int, noise: float = 0.0, seed: int = 1) -> list[Timed]:
    """Made-up places of one candidate: two launches, up to 300 MB, up to a million clocks."""
    draw = random.Random(seed)
    made = []
    for n in range(count):
        counts = {"bytes": 3 * 10 ** draw.uniform(5, 8), "clocks": 10 ** draw.uniform(2, 6)}
        work = Work(counts, {"launches": 2.0})
        us = shares(work, PUT_IN)[0] * math.exp(draw.gauss(0, noise))
        made.append(Timed("made", (("N", n),), 1, work, us))
    return made


def test_the_parameters_that_were_put_in_come_out() -> None:
    found = timefit.fit(places(30), H200)
    assert found is not None
    assert found.us == pytest.approx(PUT_IN, rel=0.03)
    assert found.rows == 30


def test_one_wrong_time_in_thirty_moves_no_parameter_far() -> None:
    rows = places(30)
    found = timefit.fit([*rows[:-1], Timed("made", (("N", 99),), 1, rows[-1].work, 20 * rows[-1].us)], H200)
    assert found is not None
    assert found.us == pytest.approx(PUT_IN, rel=0.06)


def test_too_few_places_are_no_fit() -> None:
    assert timefit.fits(places(timefit.LEAST_ROWS - 1), H200) == {}
    assert set(timefit.fits(places(timefit.LEAST_ROWS), H200)) == {"made"}


def test_intervals_cover_new_places_about_as_often_as_they_say() -> None:
    found = timefit.fit(places(40, noise=0.1), H200)
    assert found is not None
    inside = 0
    for row in places(400, noise=0.1, seed=2):
        time = predict(row.work, found)
        assert time is not None
        assert time.low < time.us < time.high
        inside += time.low <= row.us <= time.high
    assert 0.8 <= inside / 400 <= 0.99


def test_a_shape_counts_once_in_an_interval_however_many_rows_it_has() -> None:
    """Four shapes, each 20 % off in a direction of its own: twenty rows of the first one say no more than one."""
    off = (1.2, 1 / 1.2, 1.2, 1 / 1.2)
    made = [(f, Work({"bytes": 3e6 * 4**n}, {"launches": 2.0})) for n, f in enumerate(off)]
    rows = [Timed("made", (("N", n),), 1, work, shares(work, PUT_IN)[0] * f) for n, (f, work) in enumerate(made)]
    few, many = (timefit.fit([*rows[:1] * count, *rows], H200) for count in (1, 20))
    assert few is not None
    assert many is not None
    assert many.spread > 0.8 * few.spread > 0.8 * math.log(1.2)


def test_fits_that_leave_rows_out_are_those_of_the_other_rows() -> None:
    rows = places(12, noise=0.2)
    whole = timefit._Counts.of(rows, H200)
    found, covariance = whole.solved_without(np.eye(len(rows), dtype=bool), whole.solved()[0])
    for n in range(len(rows)):
        alone = timefit._Counts.of(rows[:n] + rows[n + 1 :], H200).solved()
        assert found[n] == pytest.approx(alone[0], abs=2e-3)
        assert covariance[n] == pytest.approx(alone[1], rel=0.02, abs=1e-6)


def test_the_count_that_takes_most_is_named_and_shares_add_up_where_they_are_in_turn() -> None:
    known = timefit.fits(places(30), H200)["made"]
    long, short = Work({"bytes": 1e9, "clocks": 1.0}, {"launches": 1.0}), Work({"bytes": 1.0}, {"launches": 1.0})
    assert [predict(work, known).bound for work in (long, short)] == ["bytes", "launches"]  # type: ignore[union-attr]
    us, share = shares(long, known.us)
    assert sum(share.values()) == pytest.approx(1.0)
    assert us > 1e9 * known.us["bytes"]


def test_a_validation_knows_nothing_of_what_it_left_out() -> None:
    """Two shapes whose launches differ: each is predicted with the other's."""
    rows = [
        Timed(name, (("N", n),), at, Work({"bytes": 1e4 * at}, {"launches": 1.0}), us * (1 + at / 100))
        for name, n, us in (("a", 1, 2.0), ("b", 1, 4.0), ("a", 2, 4.0), ("b", 2, 2.0))
        for at in (1, 2, 3, 4)
    ]
    score = timefit.validate(rows, H200, lambda row: row.shape)
    assert (score.predictions, score.choices) == (16, 8)
    assert score.median > 0.5
    assert score.mean_regret == pytest.approx(1.0)  # each time the slower one, which takes twice as long
    apart = timefit.validate(rows, H200, lambda row: row.shape, compete=lambda name: name)
    assert apart.choices == 0


def test_a_place_whose_sets_stay_in_l2_lacks_the_load_that_every_question_waits_for() -> None:
    """64 sets of 896 x 896 codes are 51 MB of an L2 of 63."""
    points = [
        routing.Point("triton_warp_row", (("K", k), ("N", 896)), 2, us)
        for k, us in ((896, 2.5), (1792, 3.5), (3584, 5.5), (7168, 9.5))
    ]
    known = routing.Table("h200", "q8", "M", tuple(points), "made up")
    rows = routes.timed(known)
    assert [row.work.in_turn["cold"] > 0 for row in rows] == [False, True, True, True]
    fits = timefit.fits(rows, H200)
    known = routing.Table("h200", "q8", "M", tuple(points), "made up", fits)
    workload, _ = choices.router("q8").asked({"M": "3", "N": "896", "K": "896"})
    found = choices.choose(choices.router("q8"), workload, H200, known=known).times_us["triton_warp_row"]
    counts = families.load("q8").candidates["triton_warp_row"].work
    assert counts is not None
    bare = predict(counts(workload, 132), fits["triton_warp_row"])
    assert bare is not None
    assert 0.2 < found - bare.us < 0.6


@pytest.mark.slow
def test_every_candidate_that_is_fitted_has_a_time_at_every_place_of_public_models() -> None:
    """A kernel whose other instantiation was never measured would be left out where it is the best."""

    @over({str(x): (x,) for x in ("nvfp4", "q8", "kv", "gdn")})
    def each(family: str) -> None:
        asks, every, known = choices.router(family), families.load(family).candidates, routing.table("h200", family)
        assert known is not None
        for place in calibrate.pool(asks)[::7]:
            workload, _ = asks.asked({axis: str(value) for axis, value in place.axes})
            for name, fit in known.fits.items():
                work = every[name].work
                if work is not None and not every[name].refuses(workload):
                    assert predict(cold(work(workload, 132)), fit) is not None, (name, place)

    each()


def test_a_stored_validation_is_shown_of_the_same_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known = routes.table("gdn", "h200")
    stored = routing.table("h200", "gdn")
    assert stored
    monkeypatch.setattr(timefit, "validate", lambda *_: timefit.Score(7, 0.0, 0.0, 0.0, 0, 0.0, 0.0))
    assert routes.worth(known).validation == stored.validation
    slower = (replace(known.points[0], median_us=2 * known.points[0].median_us), *known.points[1:])
    found = routes.worth(replace(known, points=slower)).validation
    assert {score["predictions"] for score in found.values()} == {7}


@pytest.mark.slow
def test_the_stored_validation_is_that_of_the_rows_and_the_choice_keeps_its_targets() -> None:
    """A place of a shape, or of a model, that was left out: what the fit of the others says of it.

    The targets: a median error of 8 %, 20 % at the 95th percentile, 90 % of the intervals, regret of 3 % in the mean
    and 15 % at worst. MISSED names what today's rows, of a handful of shapes each, do not reach.
    """
    missed = {}

    @over({str(x): (x,) for x in families.names() if routing.table("h200", x)})
    def each(family: str) -> None:
        stored = routing.table("h200", family)
        assert stored
        made = routes.validated(routes.table(family, "h200")).validation
        assert made.keys() == stored.validation.keys()
        for way, score in made.items():
            for name, value in score.items():
                assert stored.validation[way][name] == (
                    value if isinstance(value, str) else pytest.approx(value, abs=0.01)
                )
            missed[family, way] = {
                name
                for name, line in (("median", 0.08), ("p95", 0.2), ("mean_regret", 0.03), ("worst_regret", 0.15))
                if float(score[name]) > line
            } | ({"coverage"} if float(score["coverage"]) < 0.9 else set())

    each()
    assert {key: names for key, names in missed.items() if names} == MISSED


# 20.8 and 21.3 %. With the model left out that has most of its shapes, Triton and cuda_gemv are known from few; with a
# shape, line.py from four points of three.
MISSED: dict[tuple[str, str], set[str]] = {("nvfp4", "shape"): {"p95"}, ("nvfp4", "model"): {"p95"}}
