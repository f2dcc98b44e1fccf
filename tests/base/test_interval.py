"""Student's quantile against tables, intervals against their formulas and by simulation, and refusals."""

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


# Over placements ------------------------------------------------------------------------------------------------------

SPREAD = (0.01, -0.02, 0.005, -0.01, 0.015, 0.0, -0.005, 0.02)  # logarithms of a candidate's placements


def placed(logs: tuple[float, ...], blocks: int = 3, scale: float = 100.0) -> list[list[float]]:
    """Block times of placements; the middle block is the placement's own, the others lie about it."""
    return [[scale * math.exp(x + wobble) for wobble in (-0.001, 0.0, 0.001)[:blocks]] for x in logs]


def test_a_placement_is_one_observation() -> None:
    control = placed((0.0,) * 8)
    found = interval.over_placements(control, None, placed(tuple(math.log(0.9) + x for x in SPREAD)))
    mean = sum(SPREAD) / 8
    sd = math.sqrt(sum((x - mean) ** 2 for x in SPREAD) / 7)
    reach = interval.quantile(0.96, 7) * sd / math.sqrt(8)
    assert (found.placements, found.level, found.converged) == (8, 0.96, True)
    expected = [0.9 * math.exp(mean + side * reach) for side in (0, -1, 1)]
    assert [found.ratio, found.low, found.high] == pytest.approx(expected)
    assert found.change_pct == pytest.approx([100 * (x - 1) for x in expected])
    many = [one * 50 for one in control], [one * 50 for one in placed(SPREAD)]
    assert interval.over_placements(many[0], None, many[1]).change_pct == pytest.approx(
        interval.over_placements(control, None, placed(SPREAD)).change_pct
    )  # fifty times the blocks say nothing more


def test_drift_that_the_arms_share_is_removed_and_the_second_control_counts() -> None:
    drift = [math.exp(0.1 * math.sin(i)) for i in range(8)]
    arms = [[[x * d for x in blocks] for blocks, d in zip(placed((0.0,) * 8), drift, strict=True)] for _ in range(2)]
    slower = [[0.9 * x for x in blocks] for blocks in arms[0]]
    found = interval.over_placements(arms[0], arms[1], slower)
    assert (found.low, found.high) == pytest.approx((0.9, 0.9))
    doubled = [[1.2 * x for x in blocks] for blocks in arms[1]]
    assert interval.over_placements(arms[0], doubled, slower).ratio == pytest.approx(0.9 / 1.1)


@pytest.mark.parametrize("noisy", ["control", "again", "candidate"])
def test_whose_noise_it_is_does_not_matter(noisy: str) -> None:
    arms = {arm: placed(SPREAD if arm == noisy else (0.0,) * 8) for arm in ("control", "again", "candidate")}
    found = interval.over_placements(arms["control"], arms["again"], arms["candidate"])
    one_of_two = 2.0 if noisy != "candidate" else 1.0  # the mean of both controls has half of one's noise
    assert one_of_two * math.log(found.high / found.low) == pytest.approx(
        math.log(interval.of_arm(placed(SPREAD)).high / interval.of_arm(placed(SPREAD)).low), rel=0.02
    )


def test_placements_that_drift_are_fewer_than_they_seem() -> None:
    steady = interval.of_arm(placed(SPREAD))
    rising = interval.of_arm(placed(tuple(sorted(SPREAD))))
    assert rising.ratio == pytest.approx(steady.ratio)
    assert rising.high / rising.low > 1.5 * (steady.high / steady.low - 1) + 1
    assert (steady.converged, rising.converged) == (True, False)
    assert not interval.of_arm(placed(SPREAD[:7])).converged


def test_coverage_over_placements_and_one_side() -> None:
    draw, above, below, alike = random.Random(7), 0, 0, 0
    control = [[100.0]] * 8
    for _ in range(4000):
        found = interval.over_placements(control, None, [[97 * math.exp(draw.gauss(0, 0.01))] for _ in range(8)])
        above, below = above + (found.low > 0.97), below + (found.high < 0.97)
        alike += found.alike > interval.ALIKE
    assert 0.012 < above / 4000 < 0.025
    assert 0.012 < below / 4000 < 0.025
    assert 0.04 < alike / 4000 < 0.06


@pytest.mark.parametrize(
    ("control", "again", "candidate"),
    [
        ([[1.0]], None, [[1.0]]),
        ([[1.0], []], None, [[1.0], []]),
        ([[1.0], [1.0]], None, [[1.0], [1.0, 1.0]]),
        ([[1.0], [1.0]], [[1.0]], [[1.0], [1.0]]),
        ([[1.0], [1.0]], None, [[1.0], [0.0]]),
        ([[1.0], [1.0]], [[math.nan], [1.0]], [[1.0], [1.0]]),
        ([[1.0], [math.inf]], None, [[1.0], [1.0]]),
    ],
)
def test_no_interval_over_what_is_no_pair_of_times(
    control: list[list[float]], again: list[list[float]] | None, candidate: list[list[float]]
) -> None:
    with pytest.raises(ValueError, match=r"placement|positive"):
        interval.over_placements(control, again, candidate)
