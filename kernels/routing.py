"""Which candidate a shape gets: from a table of measured times, else from a prediction that says it is one.

A table is profiles/<device>/routes/<family>.json, written by `lab routes FAMILY --write` from measured rows: for each
shape (every axis but one) and each value of that one axis, the median time of every candidate. The times of one point
are of one run; an older run adds a candidate only where an arm of both runs took the same within 5 %
(lab/study/routes.py). A candidate's time elsewhere on the axis is interpolated between its own points (both axes
logarithmic), never beyond them, and the fastest wins. `Choice.how` says how near the measurement is:

    measured      every candidate compared has a point at this shape and value of the axis
    interpolated  this shape, at least one time from points on both sides
    nearest       the nearest measured place is not farther than NEAR; times from there, scaled by the roofline
    predicted     farther than that, scaled the same way; or no table at all, and the roofline alone

Distance is a factor: the product, over the axes, of the larger value over the smaller.

Why a table and not a rule of thumb: tiers by memory bandwidth were tried by others, and picked the slower path on the
device that they were made for. An environment variable, KILLGATE_ROUTE_<FAMILY>=<candidate>, overrides both: for a user
who knows better, and tests.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernels.common import Candidate, Cost, Workload

PROFILES = Path(__file__).resolve().parent.parent / "profiles"
SCHEMA = 1
NEAR = 2.0  # an octave: how far from a measured place, as a factor, a choice is still called "nearest"
ABSENT = "not among the candidates here"
Shape = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Point:
    """One measured time: `candidate` on `shape` (axis name, value) at one value of the routed axis, median in us."""

    candidate: str
    shape: Shape
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
    """The chosen candidate, how it was chosen (see above; or "override"), and the reason in words.

    times_us: what each candidate compared is expected to take, the fastest first.
    left_out: candidates that were not compared, and why.
    """

    candidate: str
    how: str
    reason: str
    times_us: Mapping[str, float]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.candidate} ({self.how}): {self.reason}"


@dataclass(frozen=True)
class Router:
    """What a family's route.py says of its question, as ROUTER; `lab routes` finds it there.

    axis:    the routed axis; shape: the axes that make a shape.
    fixed:   what other axes must be for a row to answer this question, e.g. {"dtype": "bf16"}.
    cost:    (workload, candidate) -> what the candidate has to move and compute, passes of its own included.
    asked:   AXIS=VALUE words -> (workload, what was collapsed or ""); ValueError says what is wrong with them.
    usage:   those words for a reader, e.g. "T=TOKENS [batch=1]".
    opt_in:  precision -> why its candidates compete only where it is asked for by name.
    stored:  where the precision is the format in which the data lies, the usual one: no other precision competes
             unless it is asked for, and then no other than that.
    """

    family: str
    axis: str
    shape: tuple[str, ...]
    fixed: Mapping[str, int | str]
    cost: Callable[[Workload, Candidate], Cost]
    asked: Callable[[Mapping[str, str]], tuple[Workload, str]]
    usage: str
    opt_in: Mapping[str, str] = field(default_factory=dict)
    stored: str = ""

    def bars(self, candidate: Candidate, precisions: Sequence[str] = ()) -> str:
        """ "" or why a candidate does not compete when these precisions were asked for."""
        if candidate.no_route:
            return candidate.no_route
        if self.stored:
            wanted = precisions or (self.stored,)
            return (
                ""
                if candidate.precision in wanted
                else f"of the format {candidate.precision}, not {' or '.join(wanted)}"
            )
        return "" if candidate.precision in precisions else self.opt_in.get(candidate.precision, "")


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


def axes(words: Mapping[str, str], **defaults: int | tuple[str, ...] | None) -> dict[str, int | str]:
    """AXIS=VALUE words as axes. defaults: a whole number; None for one that must be given; words, the first the usual.

    Raises ValueError for a word that is no axis, an axis that is missing, and a value that is none of its axis.
    """
    for name in words:
        if name not in defaults:
            raise ValueError(f"{name}: no axis of this question; it has {', '.join(defaults)}")
    found: dict[str, int | str] = {}
    for name, default in defaults.items():
        if isinstance(default, tuple):
            found[name] = words.get(name, default[0])
            if found[name] not in default:
                raise ValueError(f"{name}={found[name]}: not one of {', '.join(default)}")
            continue
        value = words.get(name, default)
        if value is None:
            raise ValueError(f"{name} is missing; give {name}=NUMBER")
        if not str(value).isdecimal() or int(value) < 1:
            raise ValueError(f"{name}={value}: not a positive whole number")
        found[name] = int(value)
    return found


def collapse(ne: Sequence[int]) -> tuple[int, int]:
    """(K, columns) of an operand ne = (K, columns, sequences, ...), fastest first: all but K become columns.

    Valid because the weight is the same for every column. Raises ValueError for what is no such shape.
    """
    if len(ne) < 2 or min(ne) < 1:
        raise ValueError(f"ne={tuple(ne)} must be (K, columns, ...) with every entry >= 1; write a vector as (K, 1)")
    return ne[0], math.prod(ne[1:])


def linear(words: Mapping[str, str], block: int) -> tuple[Workload, str]:
    """`Router.asked` of a product y[M, N] = x[M, K] w^T whose weights have a scale per `block` values of K.

    Words: ne=K,COLUMNS,... (or K and M) and N, and dtype.
    """
    words, note = dict(words), ""
    if "ne" in words:
        if {"M", "K"} & set(words):
            raise ValueError("ne gives K and M already; leave one or the other out")
        parts = words.pop("ne").split(",")
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"ne={','.join(parts)}: not whole numbers separated by commas, such as 5120,1,128")
        ne = tuple(int(part) for part in parts)
        k, m = collapse(ne)
        words |= {"K": str(k), "M": str(m)}
        note = f"ne={ne} collapsed to M={m} columns of K={k}"
    found = axes(words, M=None, N=None, K=None, dtype=("bf16", "fp16"))
    if int(found["K"]) % block:
        raise ValueError(f"K={found['K']}: not a multiple of {block}, the values that share a scale")
    return Workload("asked", found), note


def linear_router(
    family: str, cost: Callable[[Workload, Candidate], Cost], block: int, opt_in: Mapping[str, str] | None = None
) -> Router:
    """The Router of such a product, by M; `family`, `cost` and `opt_in` are Router's, `block` is that of `linear`."""
    return Router(
        family=family,
        axis="M",
        shape=("N", "K"),
        fixed={"dtype": "bf16"},
        cost=cost,
        asked=functools.partial(linear, block=block),
        usage="ne=K,COLUMNS,... (or K=VALUES M=COLUMNS) N=WEIGHT_ROWS [dtype=bf16]",
        opt_in=opt_in or {},
    )


def roofline_us(cost: Cost, read_gb_s: float, peak_tflop_s: Mapping[str, float]) -> float:
    """The least time of a cost, us: max(bytes / bandwidth, flops / peak); infinite where its pipe has no peak."""
    peak = peak_tflop_s.get(cost.pipe)
    return max(cost.bytes / (read_gb_s * 1e3), cost.flops / (peak * 1e6) if peak else math.inf)


def _apart(known: Mapping[str, int], wanted: Mapping[str, int]) -> float:
    """How far apart two shapes lie, as a factor; infinite where their axes differ."""
    if known.keys() != wanted.keys():
        return math.inf
    return math.exp(sum(abs(math.log(known[a] / wanted[a])) for a in wanted))


def times(points: Sequence[Point], at: int) -> dict[str, float]:
    """Expected time of each candidate at one value of the axis, us, from the points of one shape.

    Each candidate's between its own points on both sides of `at`, or its point exactly there; others are not in it.
    """
    found = {}
    for name in dict.fromkeys(p.candidate for p in points):
        own = {p.at: p.median_us for p in points if p.candidate == name}
        below, above = max((k for k in own if k <= at), default=0), min((k for k in own if k >= at), default=0)
        if not below or not above:
            continue
        if above == below:
            found[name] = own[at]
            continue
        share = math.log(at / below) / math.log(above / below)
        found[name] = math.exp((1 - share) * math.log(own[below]) + share * math.log(own[above]))
    return found


def place(points: Sequence[Point], shape: Mapping[str, int], at: int) -> tuple[Shape, int, float]:
    """(shape, value of the axis, distance): the nearest place of which `times` knows something, (, 0, inf) if none.

    The distance is 1 exactly where `shape` has a candidate with points on both sides of `at`, or at it.
    """
    best: tuple[float, Shape, int] = (math.inf, (), 0)
    for known in sorted({p.shape for p in points}):
        own = [p for p in points if p.shape == known]
        low, high = min(p.at for p in own), max(p.at for p in own)
        there = min(max(at, low), high)
        if not times(own, there):
            there = min({p.at for p in own}, key=lambda value: abs(math.log(value / at)))
        best = min(best, (_apart(dict(known), shape) * max(there / at, at / there), known, there))
    return best[1], best[2], best[0]


def choose(
    family: str,
    device: str,
    shape: Mapping[str, int],
    at: int,
    candidates: Sequence[str],
    predict: Callable[[str, Mapping[str, int], int], float],
    known: Table | None = None,
    refused: Mapping[str, str] | None = None,
) -> Choice:
    """The candidate for one shape and one value of the routed axis.

    candidates: those that take the shape and can run here, in the order of preference at equal times.
    predict:    (candidate, shape, value of the axis) -> time in us from the roofline, infinite for a pipe without peak.
    known:      the table to use; by default the committed one of `device`.
    refused:    candidate -> why it does not take this workload. A table may name it all the same: its rows can be of a
                former kernel. It is passed over, and the reason says so where it would have won.
    Raises ValueError when there is no candidate, or the override names none of them.
    """
    refused = dict(refused or {})
    if not candidates:
        told = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[:3])
        raise ValueError(f"{family}: no candidate takes {dict(shape)} at {at} here" + (f" ({told})" if told else ""))
    variable = f"KILLGATE_ROUTE_{family.upper()}"
    wanted = os.environ.get(variable)
    if wanted and wanted not in candidates:
        raise ValueError(f"{variable}={wanted}: not one of {', '.join(candidates)}; unset it or name one of them")
    known = known or table(device, family)
    usable = [p for p in known.points if p.candidate in candidates] if known is not None else []
    nearest, there, distance = place(usable, shape, at)
    if known is not None and distance < math.inf:
        floors = {n: (predict(n, shape, at), predict(n, dict(nearest), there)) for n in candidates}
        choice = _from_table(known, nearest, there, distance, candidates, floors, refused)
    else:
        expected = {name: predict(name, shape, at) for name in candidates}
        choice = _from_roofline(device, known, expected, refused)
    if wanted:
        return replace(choice, candidate=wanted, how="override", reason=f"{variable} is set; without it {choice}")
    return choice


def _from_table(
    known: Table,
    nearest: Shape,
    there: int,
    distance: float,
    candidates: Sequence[str],
    floors: Mapping[str, tuple[float, float]],
    refused: Mapping[str, str],
) -> Choice:
    """The choice by the times of one place; floors: candidate -> roofline of the question, and of that place."""
    points = [p for p in known.points if p.shape == nearest]
    own = [p for p in points if p.candidate in candidates]
    there_us, here = times(own, there), {p.candidate for p in own if p.at == there}
    where = " ".join(f"{a}={v}" for a, v in nearest) + f" {known.axis}={there} on {known.device}"
    if not set(there_us) <= here:
        where += f" (~: between its own points at {_between(own, there_us, here, there)})"
    scaled = distance > 1 and max(max(floors[n]) for n in there_us) < math.inf
    expected = {n: us * floors[n][0] / floors[n][1] if scaled else us for n, us in there_us.items()}
    if distance > 1:
        far = f"no measured place within {NEAR:g}x, the nearest is" if distance > NEAR else "nearest measured place"
        where = f"{far} {where}, {distance:.2f}x away; times from there{', scaled by the roofline' * scaled}"
        how = "predicted" if distance > NEAR else "nearest"
    else:
        how = "measured" if set(there_us) <= here else "interpolated"
    ranked = sorted(expected, key=lambda name: (expected[name], candidates.index(name)))
    told = [f"{'' if n in here else '~'}{expected[n]:.1f}" for n in ranked]
    others = ", ".join(f"{name} {us}" for name, us in zip(ranked[1:], told[1:], strict=True))
    reason = f"{where}: {told[0]} us" + (f" against {others}" if others else "")
    for name, us in sorted(times(points, there).items(), key=lambda item: (item[1], item[0])):
        if name not in candidates and us < there_us[ranked[0]]:
            reason += f"; passed over {name}, {us:.1f} in the table: {refused.get(name, ABSENT)}"
    unmeasured = {n: "no measured time there, nor on both sides" for n in candidates if n not in expected}
    return Choice(ranked[0], how, reason, {n: expected[n] for n in ranked}, {**refused, **unmeasured})


def _from_roofline(
    device: str, known: Table | None, expected: Mapping[str, float], refused: Mapping[str, str]
) -> Choice:
    """The choice by the roofline alone: the lowest floor, the first of those that are equal."""
    ranked = sorted(expected, key=lambda name: expected[name])  # stable: the caller's order at equal times
    best, some = ranked[0], {n: expected[n] for n in ranked if expected[n] < math.inf}
    reason = f"nothing measured on {device or 'this device'}; "
    if not some:
        reason += "no peak for the pipe of any candidate, the first is taken"
    else:
        others = ", ".join(f"{name} {us:.1f}" for name, us in some.items() if name != best)
        reason += f"roofline predicts {some[best]:.1f} us" + (f" against {others}" if others else "")
        if list(some.values()).count(some[best]) > 1:
            reason += " (equal ones in the order of preference)"
    for name in sorted({p.candidate for p in known.points} - set(expected)) if known is not None else ():
        reason += f"; passed over {name}, which is in the table: {refused.get(name, ABSENT)}"
    unknown = {n: "no peak for its pipe" for n in expected if n not in some and n != best}
    return Choice(best, "predicted", reason, some, {**refused, **unknown})


def _between(points: Sequence[Point], names: Sequence[str] | Mapping[str, float], here: set[str], at: int) -> str:
    """ "512 and 2048": the points between which the times of those without one at `at` lie, the widest of each side."""
    own = {n: [p.at for p in points if p.candidate == n] for n in names if n not in here}
    low = min(max(k for k in values if k < at) for values in own.values())
    high = max(min(k for k in values if k > at) for values in own.values())
    return f"{low} and {high}"


def route(
    router: Router,
    workload: Workload,
    device: str,
    candidates: Sequence[Candidate],
    read_gb_s: float,
    peak_tflop_s: Mapping[str, float],
    known: Table | None = None,
    precisions: Sequence[str] = (),
) -> Choice:
    """The candidate of a family for a workload on a device (its id in data/devices.toml).

    candidates:  those that can run there; the ones that refuse the workload or do not compete are left out.
    read_gb_s, peak_tflop_s: the device's read bandwidth, and its peaks by pipe ("bf16", "f32", ...), for predictions.
    known:       the table to use; by default the committed one of the device.
    precisions:  those asked for by name, see `Router`.
    Raises ValueError when no candidate takes the workload, the override names none that does, or a precision is none
    that the router takes by name.
    """
    by_name = [*router.opt_in, *(dict.fromkeys(c.precision for c in candidates) if router.stored else ())]
    for name in precisions:
        if name not in by_name:
            raise ValueError(f"precision {name}: not one of {', '.join(by_name)}; others compete anyway")
    barred = {c.name: why for c in candidates if (why := router.bars(c, precisions))}
    refused = {c.name: why for c in candidates if c.name not in barred and (why := c.refuses(workload))} | barred
    takes = {c.name: c for c in candidates if c.name not in refused}

    def predict(name: str, shape: Mapping[str, int], at: int) -> float:
        there = replace(workload, axes={**workload.axes, **shape, router.axis: at})
        return roofline_us(router.cost(there, takes[name]), read_gb_s, peak_tflop_s)

    shape = {axis: int(workload[axis]) for axis in router.shape}
    choice = choose(router.family, device, shape, int(workload[router.axis]), tuple(takes), predict, known, refused)
    other = ", ".join(f"{axis}={value}" for axis, value in router.fixed.items() if workload[axis] != value)
    if not other or choice.how == "predicted":
        return choice
    how = "override" if choice.how == "override" else "nearest"
    return replace(choice, how=how, reason=f"{choice.reason}; the table is of {other}")
