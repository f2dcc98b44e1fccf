"""Confidence intervals where there are few repetitions: Student's quantile, and Welch's interval of a change.

An A/B of a tool that repeats its run gives a handful of figures an arm, each arm with its own spread. Welch's interval
takes both spreads and the smaller count into account, on logarithms, so that it is one of a ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache

LEVEL = 0.95


def _two_sided(t: float, degrees: int) -> float:
    """P(|T| <= t) of Student's t with this many degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
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
