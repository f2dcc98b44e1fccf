"""Which candidate a shape gets: from a table of measured times, else from a prediction that says it is one.

A table is profiles/<device>/routes/<family>.json, written by `lab routes FAMILY --write` from measured rows: for each
shape (every axis but one) and each value of that one axis, the median time of every candidate that was measured there
in one run. Between two measured values of the axis each candidate's time is interpolated (both axes logarithmic), and
the fastest wins; beyond them the nearest measured value decides. Another shape takes the table of the nearest one.

Why a table and not a rule of thumb: tiers by memory bandwidth were tried by others, and picked the slower path on the
device that they were made for. Where nothing was measured, the caller's prediction is used, and the reason says so.
An environment variable, KILLGATE_ROUTE_<FAMILY>=<candidate>, overrides both: for a user who knows better, and tests.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROFILES = Path(__file__).resolve().parent.parent / "profiles"
SCHEMA = 1


@dataclass(frozen=True)
class Point:
    """One measured time: `candidate` on `shape` (axis name, value) at one value of the routed axis, median in us."""

    candidate: str
    shape: tuple[tuple[str, int], ...]
    at: int
    median_us: float


@dataclass(frozen=True)
class Table:
    """The points of one family on one device; axis: the routed one, e.g. "M"; source: the runs they are from."""

    device: str
    family: str
    axis: str
    points: tuple[Point, ...]
    source: str


@dataclass(frozen=True)
class Choice:
    """The chosen candidate, how it was chosen ("override", "measured" or "predicted"), and the reason in words.

    times_us: what each candidate is expected to take, empty for an override.
    """

    candidate: str
    how: str
    reason: str
    times_us: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.candidate} ({self.how}): {self.reason}"


def read(path: Path) -> Table:
    """A table from its file; ValueError naming the file and the fault where it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, this program reads {SCHEMA}")
        points = tuple(
            Point(
                p["candidate"], tuple(sorted((a, int(v)) for a, v in p["shape"].items())), int(p["at"]), p["median_us"]
            )
            for p in data["points"]
        )
        if not points or any(not p.median_us > 0 or not math.isfinite(p.median_us) or p.at < 1 for p in points):
            raise ValueError("a time or an axis value that is not positive, or no point at all")
        return Table(data["device"], data["family"], data["axis"], points, data["source"])
    except OSError as problem:
        raise ValueError(f"{path.name}: cannot be read ({problem.strerror}); write it again with lab routes") from None
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise ValueError(f"{path.name}: {problem}; write it again with lab routes --write") from None


@functools.cache
def table(device: str, family: str) -> Table | None:
    """The committed table of a device's id, None where there is none."""
    path = PROFILES / device / "routes" / f"{family}.json"
    return read(path) if path.exists() else None


def _nearest_shape(points: Sequence[Point], shape: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    wanted = dict(shape)

    def distance(known: tuple[tuple[str, int], ...]) -> float:
        axes = dict(known)
        if axes.keys() != wanted.keys():
            return math.inf
        return sum(abs(math.log(axes[a] / wanted[a])) for a in wanted)

    return min({p.shape for p in points}, key=lambda known: (distance(known), known))


def times(points: Sequence[Point], at: int) -> dict[str, float]:
    """Expected time of each candidate at one value of the axis, us, from the points of one shape.

    Only candidates measured on both sides of `at` (or exactly there) are compared; beyond the measured range, those
    measured at its end, at the times that they took there.
    """
    known = sorted({p.at for p in points})
    below = max((k for k in known if k <= at), default=known[0])
    above = min((k for k in known if k >= at), default=known[-1])
    if at < known[0] or at > known[-1]:
        below = above = known[0] if at < known[0] else known[-1]
    at_end = {k: {p.candidate: p.median_us for p in points if p.at == k} for k in (below, above)}
    share = 0.0 if above == below else math.log(at / below) / math.log(above / below)
    return {
        name: math.exp((1 - share) * math.log(low) + share * math.log(at_end[above][name]))
        for name, low in at_end[below].items()
        if name in at_end[above]
    }


def choose(
    family: str,
    device: str,
    shape: Mapping[str, int],
    at: int,
    candidates: Sequence[str],
    predict: Callable[[str], float],
    known: Table | None = None,
    refused: Mapping[str, str] | None = None,
) -> Choice:
    """The candidate for one shape and one value of the routed axis.

    candidates: those that take the shape and can run here, in the order of preference at equal times.
    predict:    candidate -> time in us from the roofline, for a device without a table.
    known:      the table to use; by default the committed one of `device`.
    refused:    candidate -> why it does not take this workload. A table may name it all the same: its rows can be of a
                former kernel. It is passed over, and the reason says so where it would have won.
    Raises ValueError when there is no candidate, or the override names none of them.
    """
    if not candidates:
        raise ValueError(f"{family}: no candidate takes {dict(shape)} at {at} here")
    variable = f"KILLGATE_ROUTE_{family.upper()}"
    if wanted := os.environ.get(variable):
        if wanted not in candidates:
            raise ValueError(f"{variable}={wanted}: not one of {', '.join(candidates)}; unset it or name one of them")
        return Choice(wanted, "override", f"{variable} is set", {})
    known = known if known is not None else table(device, family)
    usable = [p for p in known.points if p.candidate in candidates] if known is not None else []
    absent = "not among the candidates here"
    if usable and known is not None:
        nearest = _nearest_shape(usable, shape)
        expected = times([p for p in usable if p.shape == nearest], at)
        if expected:
            best = min(expected, key=lambda name: (expected[name], candidates.index(name)))
            shown = " ".join(f"{a}={v}" for a, v in nearest)
            exact = "" if dict(nearest) == dict(shape) else "nearest measured shape "
            others = ", ".join(f"{n} {t:.1f}" for n, t in sorted(expected.items(), key=lambda i: i[1]) if n != best)
            reason = f"{exact}{shown} {known.axis}={at} on {known.device}: {expected[best]:.1f} us"
            reason += f" against {others}" if others else ""
            named = times([p for p in known.points if p.shape == nearest], at)
            for name in sorted(named, key=lambda name: (named[name], name)):
                if name not in candidates and named[name] < expected[best]:
                    why = (refused or {}).get(name, absent)
                    reason += f"; passed over {name}, {named[name]:.1f} in the table: {why}"
            return Choice(best, "measured", reason, expected)
    expected = {name: predict(name) for name in candidates}
    best = min(expected, key=lambda name: (expected[name], candidates.index(name)))
    reason = f"nothing measured on {device or 'this device'}; roofline predicts {expected[best]:.1f} us"
    for name in sorted({p.candidate for p in known.points} - set(candidates)) if known is not None else ():
        reason += f"; passed over {name}, which is in the table: {(refused or {}).get(name, absent)}"
    return Choice(best, "predicted", reason, expected)
