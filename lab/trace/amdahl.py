"""What a faster kernel gives end to end: Amdahl's law, T' / T = 1 - s + s / k, with intervals.

s is the kernel's share of the WALL time of a step, k its speed-up; a share of busy time comes with the busy fraction
of the wall. Both are intervals (printed digits, quartiles of samples), and so is the projection. k = infinity gives the
ceiling. Of a trace the share runs from what all else surely waits for, over the exposed time, to the union
(lab/trace/exposed.py).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from lab.base.errors import BadInput

ASSUMED = "nothing else changes and the category is always on the critical path"


@dataclass(frozen=True)
class Interval:
    """A value with its bounds."""

    low: float
    mid: float
    high: float

    @classmethod
    def of(cls, mid: float, error: float = 0.0) -> Interval:
        """mid - error to mid + error."""
        return cls(mid - error, mid, mid + error)

    def meets(self, other: Interval) -> bool:
        """True when the two have a point in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Projection:
    """What follows from a share and a speed-up.

    gain_pct:    rise of throughput, in %; negative where the kernel is slower.
    ceiling_pct: the same with the category removed.
    rate:        base throughput times the gain, None without a base.
    """

    share: Interval
    speedup: Interval
    gain_pct: Interval
    ceiling_pct: Interval
    rate: Interval | None = None
    ceiling_rate: Interval | None = None
    assumed: str = ASSUMED


def project(
    share: Interval, speedup: Interval, base: Interval | None = None, of_wall: float = 1.0, assumed: str = ASSUMED
) -> Projection:
    """Project a kernel's speed-up to the whole.

    share:   of the denominator, 0 to 1; of_wall: what the denominator is of the wall time (busy fraction), 0 to 1.
    speedup: time before over time after; infinite removes the category.
    base:    throughput before, for `rate`.
    Raises BadInput for a share outside 0 to 1, a speed-up of zero or less, and a fraction outside 0 to 1.
    """
    if not (0 <= share.low <= share.high <= 1):
        raise BadInput("amdahl", f"share {share.low:g} to {share.high:g}", "give a share between 0 and 1")
    if not 0 < speedup.low <= speedup.high:
        raise BadInput("amdahl", f"speed-up {speedup.low:g} to {speedup.high:g}", "give time before over time after")
    if not 0 < of_wall <= 1:
        what = f"the denominator is {of_wall:g} of the wall time"
        raise BadInput("amdahl", what, "give a fraction above 0, at most 1")
    own = Interval(share.low * of_wall, share.mid * of_wall, share.high * of_wall)
    gain = _gain(own, speedup)
    ceiling = _gain(own, Interval(math.inf, math.inf, math.inf))
    rate, most = (
        base and Interval(*(rate * (1 + pct / 100) for rate, pct in zip(astuple(base), astuple(rise), strict=True)))
        for rise in (gain, ceiling)
    )
    return Projection(own, speedup, gain, ceiling, rate, most, assumed)


def _gain(share: Interval, speedup: Interval) -> Interval:
    def pct(s: float, k: float) -> float:
        left = 1 - s + s / k
        return math.inf if left <= 0 else (1 / left - 1) * 100

    corners = [pct(s, k) for s in (share.low, share.high) for k in (speedup.low, speedup.high)]
    return Interval(min(corners), pct(share.mid, speedup.mid), max(corners))


def speedup_needed(share: float, needed_pct: float) -> float | None:
    """The speed-up of a category of this share of the wall that gives `needed_pct` more throughput; None when even
    its removal does not."""
    left = 1 / (1 + needed_pct / 100) - (1 - share)
    if needed_pct <= 0:
        return 1.0
    return share / left if left > 0 else None


def against(projection: Projection, needed_pct: float) -> tuple[str, str]:
    """(word, sentence): "reaches", "may reach", "misses", or "cannot" when removing the category would not suffice."""
    gain, ceiling = projection.gain_pct, projection.ceiling_pct
    shown = f"{gain.mid:+.1f} % ({gain.low:+.1f} to {gain.high:+.1f})"
    if ceiling.high < needed_pct:
        return "cannot", (
            f"removing the category gives at most {ceiling.high:+.1f} %, the phase needs {needed_pct:+.1f} %: "
            "no speed-up of this kernel is enough"
        )
    needed = speedup_needed(projection.share.mid, needed_pct)
    more = f"; {needed:.2f}x on the kernel would do" if needed is not None else ""
    if gain.low >= needed_pct:
        return "reaches", f"projected {shown}, the phase needs {needed_pct:+.1f} %"
    if gain.high < needed_pct:
        return "misses", f"projected {shown}, the phase needs {needed_pct:+.1f} %{more}"
    return "may reach", f"projected {shown} has the needed {needed_pct:+.1f} % inside{more}"
