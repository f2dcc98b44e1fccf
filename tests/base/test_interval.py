"""Student's quantile against tables, Welch's interval against its formula and by simulation, and refusals."""

import math
import random

import pytest

from lab.base import interval

# Quantiles of Student's t as every table prints them: two-sided level, degrees of freedom, t.
TABLE = [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 7, 2.365), (0.95, 30, 2.042), (0.99, 7, 3.499), (0.96, 7, 2.517)]


@pytest.mark.parametrize(("level", "degrees", "t"), TABLE)
def test_quantile_is_the_tables(level: float, degrees: int, t: float) -> None:
    assert interval.quantile(level, degrees) == pytest.approx(t, abs=6e-4)


def test_arms_of_one_spread_and_count_have_students_interval() -> None:
    spread, count = 0.01, 5
    arm = [math.exp(spread * z) for z in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    found = interval.change_pct(arm, [0.9 * x for x in arm])
    assert found is not None
    variance = spread**2 * (1 + 0.25 + 0.25 + 1) / (count - 1)
    reach = interval.quantile(0.95, 2 * count - 2) * math.sqrt(2 * variance / count)
    change = math.log(0.9)
    assert found == pytest.approx([100 * math.expm1(change + side * reach) for side in (0, -1, 1)])


def test_coverage_with_a_noisy_candidate_of_few_runs() -> None:
    draw, missed = random.Random(5), 0
    for _ in range(1500):
        control = [draw.gauss(100, 0.3) for _ in range(5)]
        found = interval.change_pct(control, [draw.gauss(97, 2.0) for _ in range(5)])
        assert found is not None
        missed += not found[1] <= -3.0 <= found[2]
    assert 0.03 < missed / 1500 < 0.07


@pytest.mark.parametrize(("control", "candidate"), [([1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0]), ([], [])])
def test_no_interval_without_repetitions_or_for_figures_that_are_not_positive(
    control: list[float], candidate: list[float]
) -> None:
    assert interval.change_pct(control or [1.0], candidate or [1.0]) is None


def test_repetitions_that_agree_to_the_bit_are_a_point() -> None:
    assert interval.change_pct([2.0, 2.0], [1.0, 1.0]) == pytest.approx((-50.0, -50.0, -50.0))


def test_no_such_quantile() -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        interval.quantile(1.5, 3)
    with pytest.raises(ValueError, match="0 degrees"):
        interval.quantile(0.95, 0)
