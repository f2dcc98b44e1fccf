"""Confidence intervals where there are few repetitions: Student's quantile, and intervals of a ratio.

`change_pct`: an A/B of a tool that repeats its run gives a handful of figures an arm, each arm with its own spread.
Welch's interval takes both spreads and the smaller count into account, on logarithms, so that it is one of a ratio.

`over_placements`: a comparison is repeated over placements, each with newly allocated sets. Blocks of one placement
share its addresses and repeat each other within 0.3 % on an H200 where placements differ by up to 3 %, so a placement
is one observation, whatever its blocks say: the median over its blocks of log(candidate / control), paired within the
block, which removes all drift that the arms share. Student's t over those covers with eight of them; resampling them
does not (data/false_go.csv has both). What no method can see in eight placements: a mode that none of them met.
Placements that resemble their neighbours (a drift of one arm that outlives a placement) are fewer observations than
they seem. Von Neumann's ratio shows it, weakly for eight; the interval is then widened, and `converged` is false where
chance alone would do so once in a hundred.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

LEVEL = 0.95
# Over placements: an error of 2 % a side, half a percent below the 2.5 % that a verdict at its line may be wrong, for
# spreads that are not normal (two modes) make it 2.4 %.
PLACEMENT_LEVEL = 0.96
# The fewest that decide: six have an interval a quarter wider, and miss a mode of one in five in 26 % and not 17 %.
PLACEMENTS = 8
ALIKE, DRIFTING = 1.645, 2.326  # one-sided 5 % and 1 % of a standard normal variable


@dataclass(frozen=True)
class Interval:
    """The ratio candidate / control over placements, and its confidence interval from `low` to `high` at `level`.

    alike: how far the placements resemble their neighbours, in standard deviations of what chance does.
    """

    ratio: float
    low: float
    high: float
    placements: int
    level: float
    alike: float = 0.0

    @property
    def change_pct(self) -> tuple[float, float, float]:
        """(change, low, high) in %."""
        here, low, high = (100.0 * (x - 1.0) for x in (self.ratio, self.low, self.high))
        return here, low, high

    @property
    def converged(self) -> bool:
        """Whether there are enough placements, and they do not drift."""
        return self.placements >= PLACEMENTS and self.alike <= DRIFTING


def _two_sided(t: float, degrees: int) -> float:
    """P(|T| <= t) of Student's t with this many degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).

    SciPy's would cost each command that judges or writes a fifth of a second at its import.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine, odd = math.cos(angle), degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    # Even degrees: the series begins with 1 and its last term belongs to degrees - 2.
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


@cache
def quantile(level: float, degrees: int) -> float:
    """t with P(|T| <= t) = level. Raises ValueError for a level outside 0 to 1 or no degree of freedom."""
    if not 0 < level < 1 or degrees < 1:
        raise ValueError(f"no quantile at {level} with {degrees} degrees of freedom")
    low, high = 0.0, 1.0
    while _two_sided(high, degrees) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided(middle, degrees) < level else (low, middle)
    return high


def change_pct(
    control: Sequence[float], candidate: Sequence[float], level: float = LEVEL
) -> tuple[float, float, float] | None:
    """(change, low, high) from control to candidate in %, by Welch; None with fewer than two figures an arm.

    The figures are positive and in one unit; those of an arm are repetitions of one run. None too where one is not.
    """
    if min(len(control), len(candidate)) < 2 or min(*control, *candidate) <= 0:
        return None
    logs = [[math.log(x) for x in arm] for arm in (control, candidate)]
    middle = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    parts = [statistics.variance(arm) / len(arm) for arm in logs]
    if not any(parts):
        return (100 * math.expm1(middle),) * 3
    # Welch and Satterthwaite's degrees of freedom, rounded down: a wider interval.
    degrees = sum(parts) ** 2 / sum(part**2 / (len(arm) - 1) for part, arm in zip(parts, logs, strict=True))
    reach = quantile(level, max(1, math.floor(degrees))) * math.sqrt(sum(parts))
    low, here, high = (100 * math.expm1(middle + side * reach) for side in (-1, 0, 1))
    return here, low, high


def over_placements(
    control: Sequence[Sequence[float]],
    again: Sequence[Sequence[float]] | None,
    candidate: Sequence[Sequence[float]],
) -> Interval:
    """The interval of candidate / control over placements, each a sequence of block times in us, paired by index.

    again: the control's second self; a block's control is then the mean of both. Raises ValueError for fewer than two
    placements, arms whose placements or blocks are no pairs, and a time that is not positive and finite.
    """
    second = control if again is None else again
    shapes = [[len(blocks) for blocks in arm] for arm in (control, second, candidate)]
    if len(shapes[0]) < 2 or 0 in shapes[0] or not shapes[0] == shapes[1] == shapes[2]:
        raise ValueError(f"blocks by placement {shapes}: two placements or more, the arms paired block by block")
    times = [x for arm in (control, second, candidate) for blocks in arm for x in blocks]
    if not all(0 < x < math.inf for x in times):
        raise ValueError("a block's time is not positive and finite")
    logs = [
        statistics.median(math.log(2.0 * c / (a + b)) for a, b, c in zip(*blocks, strict=True))
        for blocks in zip(control, second, candidate, strict=True)
    ]
    return _student(logs, PLACEMENT_LEVEL)


def of_arm(arm: Sequence[Sequence[float]]) -> Interval:
    """The interval of one arm's own time in us, as the ratio to 1 us. Raises as `over_placements` does."""
    return over_placements([[1.0] * len(blocks) for blocks in arm], None, arm)


def _student(logs: Sequence[float], level: float) -> Interval:
    """Student's interval of the mean of logarithms, widened where neighbours are alike (one placement after another).

    Young (1941): C = 1 - (successive differences squared) / (2 x squared deviations) has mean 0 and variance
    (n - 2) / (n^2 - 1) for independent figures. Where C is beyond 5 % of chance, it estimates their correlation r, and
    the variance of the mean grows by (1 + r) / (1 - r), as for a first-order autoregression.
    """
    n, middle = len(logs), statistics.fmean(logs)
    squares = math.fsum((x - middle) ** 2 for x in logs)
    reach = quantile(level, n - 1) * math.sqrt(squares / (n - 1) / n)
    alike = 0.0
    if squares > 0 and n > 2:
        c = 1.0 - math.fsum((b - a) ** 2 for a, b in pairwise(logs)) / (2.0 * squares)
        alike = c / math.sqrt((n - 2) / (n * n - 1))
        if alike > ALIKE:
            r = min(c + 1.0 / n, 0.95)  # C lies 1 / n low where it estimates a correlation
            reach *= math.sqrt((1.0 + r) / (1.0 - r))
    low, here, high = (math.exp(middle + side * reach) for side in (-1, 0, 1))
    return Interval(here, low, high, n, level, alike)
