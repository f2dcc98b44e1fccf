"""How long a candidate takes: one model for every family, from the counts that its own configuration implies.

A candidate's `work` (kernels/common.py: Work) counts, for a workload and a number of multiprocessors, what a launch
makes the device do: some of it at once (bytes through memory, bytes and clocks of the busiest multiprocessor), some in
turn (launches, fix-ups, a prologue). The time, in us, is

    sum of in_turn[i] p[i]  +  (sum of (at_once[j] p[j])^POWER)^(1 / POWER)

a roofline with rounded corners, whose bandwidth grows with size because what is in turn stays. Waves, tiles and
stream-K units are in the counts, so a last wave that is nearly empty costs what it costs. The parameters p, in us per
count and above zero, are a candidate's own on a device; lab/study/timefit.py fits them to measured rows and stores them
in the router's file. Without a fit nothing here answers, and the router goes by the roofline.

The interval holds 90 % of what was measured: the candidate's own residuals, each of a fit that had not seen its shape,
scaled by how far the counts lie from those that were fitted (the covariance of log p).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kernels.common import Work

POWER = 4.0
COLD_CLOCKS = 600.0  # of one load behind which everything waits: about 900 clocks from memory, 300 from L2
NOISE = 0.05  # of log time, in which the covariance is stated: what the model leaves, roughly


@dataclass(frozen=True)
class Fit:
    """The fitted parameters of one candidate on one device.

    us:         us per count, by the count's name; every count of `Work` that the rows have.
    covariance: of log us, rows in the order of `us`, for residuals of NOISE.
    spread:     half width of the 90 % interval of log time, before the covariance is counted; rows: that were fitted.
    """

    us: Mapping[str, float]
    covariance: tuple[tuple[float, ...], ...]
    spread: float
    rows: int


@dataclass(frozen=True)
class Time:
    """A predicted time, us, its 90 % interval (NaN where none was shown), and the count that takes most of it."""

    us: float
    low: float
    high: float
    bound: str

    @property
    def shown(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)


def library_product(m: int, n: int, k: int, sms: int, weight_bytes: float = 2.0) -> Work:
    """y[m, n] of 16-bit operands by a library, whose tiles nobody tells us: 128 by 128, halves of K where they are few.

    Of many tiles it takes wider ones, by 32 more each, where their waves take less. weight_bytes: of a weight through
    memory, more than 2 where it is also written.
    """
    rows, tiles = -(-m // 128), -(-m // 128) * -(-n // 128)
    in_waves = min(-(-rows * -(-n // wide) // sms) * wide / 128 for wide in range(128, 257, 32))
    waves = max(tiles / sms, 0.25) if tiles < 2 * sms else in_waves
    clocks = waves * 128 * min(128, -(-m // 64) * 64) * k / 4096
    moved = weight_bytes * n * k + 2.0 * m * (k + n)
    return Work({"bytes": moved, "products": clocks}, {"launches": 1.0, "prologue": 1500.0 + k / 4})


def cold(work: Work, is_cold: bool = True) -> Work:
    """The counts where operands lie in memory and not in L2, as those of a model do: the first loads wait for them.

    A measured place whose sets together stay in L2 (lab/study/routes.py: timed) has none of it, but has the name: where
    all places are such, the fit takes a device's facts for what it did not see.
    """
    return Work(work.at_once, {**work.in_turn, "cold": COLD_CLOCKS if is_cold else 0.0})


def shares(work: Work, us: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """(time in us, by count the share of it: what the logarithm of the time gains with that of the parameter)."""
    turn = {name: count * us[name] for name, count in work.in_turn.items()}
    once = {name: (count * us[name]) ** POWER for name, count in work.at_once.items()}
    total = sum(once.values())
    overlapped = total ** (1 / POWER)
    time = sum(turn.values()) + overlapped
    found = {name: value / time for name, value in turn.items()}
    for name, value in once.items():
        found[name] = found.get(name, 0.0) + (value / total * overlapped / time if total else 0.0)
    return time, found


def predict(work: Work, fit: Fit) -> Time | None:
    """What a candidate is expected to take for its counts; None where a count was never fitted."""
    if not {*work.at_once, *work.in_turn} <= fit.us.keys():
        return None
    time, share = shares(work, fit.us)
    slopes = [share.get(name, 0.0) for name in fit.us]
    variance = sum(a * b * c for a, row in zip(slopes, fit.covariance, strict=True)
                   for b, c in zip(slopes, row, strict=True))  # fmt: skip
    half = fit.spread * math.sqrt(1 + variance / NOISE**2)
    return Time(time, time * math.exp(-half), time * math.exp(half), max(share, key=share.__getitem__))
