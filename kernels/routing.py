"""Which candidate a shape gets: the one with the least expected time, measured there or by the fitted time model.

A router's file is profiles/<device>/routes/<family>.json, which `lab routes FAMILY --write` makes of measured rows: the
places where candidates were timed together (a shape, a value of the one axis that is not in it, the median of each) and
the parameters of the time model of each (kernels/timing.py, lab/study/timefit.py). The times of one place are of one
run; another adds a candidate where an arm of both runs took the same within 5 %, or where it is so far from the others
that runs do not differ by as much (lab/study/routes.py).
`Choice.how` says what the times are:

    measured      every candidate compared was timed at this shape and value of the axis
    fitted        at least one time is the model's, with its 90 % interval
    carried       at least one is that of another device of this compute capability, with the difference of the two
                  devices' floors, where this one has none, or a fit of fewer rows that says less. The interval was
                  shown for an H200 and an H100, which have as many multiprocessors (see CARRIED): others get none
    predicted     nothing was fitted for such a device: the roofline alone; where its bandwidth is unknown no time is
                  told, and the order is that of another device of its compute capability, or the candidates'

Why a model and not a rule of thumb: tiers by memory bandwidth were tried by others, and picked the slower path on the
device that they were made for. Why not the nearest measured place, scaled by the roofline, as it was here: a launch, a
last wave and a fix-up do not scale, and 17 tokens of 14336 x 4096 went to a kernel that took twice what was said.
An environment variable, KILLGATE_ROUTE_<FAMILY>=<candidate>, overrides both: for a user who knows better, and tests.

`route` asks every candidate for its configuration; `plan` does that once for a weight, and then answers by bisection.
"""

from __future__ import annotations

import functools
import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernels.common import Candidate, Cost, Work, Workload
from kernels.timing import Fit, Time, cold, predict

PROFILES = Path(__file__).resolve().parent.parent / "profiles"
SCHEMA = 2
SMS = 132  # multiprocessors where nobody says how many: an H200's
CARRIED = 0.15  # by which a time carried from an H200 to an H100 misses, for nine in ten of the kernels timed on both
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
    """The points of one family on one device; axis: the routed one, e.g. "M"; source: the runs they are from.

    fits: candidate -> its parameters. validation: what was left out in turn ("shape", "model") -> how far the model was
    off there, as lab/study/timefit.py's Score has it.
    """

    device: str
    family: str
    axis: str
    points: tuple[Point, ...]
    source: str
    fits: Mapping[str, Fit] = field(default_factory=dict)
    validation: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)

    @functools.cached_property
    def at(self) -> Mapping[tuple[Shape, int], Mapping[str, float]]:
        """(shape, value of the axis) -> the time of each candidate that was timed there, us."""
        found: dict[tuple[Shape, int], dict[str, float]] = {}
        for p in self.points:
            found.setdefault((p.shape, p.at), {})[p.candidate] = p.median_us
        return found


@dataclass(frozen=True)
class Facts:
    """What a router asks of a device: (0, 0) and 0 where nobody knows it; peaks by pipe ("bf16", "f32", ...)."""

    capability: tuple[int, int]
    read_gb_s: float
    peak_tflop_s: Mapping[str, float]
    sms: int


@dataclass(frozen=True)
class Source:
    """The table of a device of the same compute capability, and its read bandwidth, peaks and multiprocessors."""

    table: Table
    read_gb_s: float
    peak_tflop_s: Mapping[str, float]
    sms: int = SMS


def source(device: str, capability: tuple[int, int], family: str, listed: Mapping[str, Facts]) -> Source | None:
    """What is carried over to a device (its id) without times of its own: the table with most points of its capability.

    listed: the devices that are known, by id. None where no other one of that capability has a table and a bandwidth.
    """
    found = []
    for other, facts in listed.items():
        if other != device and facts.capability == capability and facts.read_gb_s and (known := table(other, family)):
            found.append(Source(known, facts.read_gb_s, facts.peak_tflop_s, facts.sms))
    return max(found, key=lambda one: len(one.table.points), default=None)


@dataclass(frozen=True)
class Choice:
    """The chosen candidate, how it was chosen (see above; or "override"), and the reason in words.

    times_us: what each candidate compared is expected to take, the fastest first.
    left_out: candidates that were not compared, and why.
    fitted: of those whose time is the model's or another device's, the interval and what binds.
    """

    candidate: str
    how: str
    reason: str
    times_us: Mapping[str, float]
    left_out: Mapping[str, str] = field(default_factory=dict)
    fitted: Mapping[str, Time] = field(default_factory=dict)

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
    policies: in words -> (workload, read bandwidth in GB/s) -> (candidate, calls, each with an equal part of the axis):
             rules that were in use elsewhere, kept to say what they cost.
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
    policies: Mapping[str, Callable[[Workload, float], tuple[str, int]]] = field(default_factory=dict)

    def question(self, candidate: Candidate) -> str:
        """Which choice a candidate belongs to: the precision that has to be asked for, "" for the usual one."""
        return candidate.precision if self.stored or candidate.precision in self.opt_in else ""

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
        fits = {
            name: Fit(one["us"], tuple(map(tuple, one["covariance"])), one["spread"], one["rows"])
            for name, one in data["fits"].items()
        }
        head = (data["device"], data["family"], data["axis"], points, data["source"])
        return Table(*head, fits, data["validation"])
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
    """The least time of a cost, us: max(bytes / bandwidth, flops / peak); infinite where one of them is unknown."""
    peak = peak_tflop_s.get(cost.pipe)
    if not (read_gb_s and peak):
        return math.inf
    return max(cost.bytes / (read_gb_s * 1e3), cost.flops / (peak * 1e6))


def carried(us: float, there_us: float, here_us: float) -> float:
    """What takes `us` where its floor is there_us, in us where it is here_us: what is beyond the floor stays."""
    return max(here_us, us - there_us + here_us)


@dataclass(frozen=True)
class Carried:
    """Times of a device's candidates at one place, as they are expected on another; axis: the routed one.

    no_interval: "" or why the times have none.
    """

    device: str
    axis: str
    times: Mapping[str, Time]
    no_interval: str = ""


def floors_us(cost: Cost, source: Source, read_gb_s: float, peak_tflop_s: Mapping[str, float]) -> tuple[float, float]:
    """The floor of a cost on a source's device and at these rates, us; bytes alone where a peak is missing."""
    if cost.pipe not in peak_tflop_s or cost.pipe not in source.peak_tflop_s:
        cost = replace(cost, flops=0.0)
    rates = (source.read_gb_s, source.peak_tflop_s), (read_gb_s, peak_tflop_s)
    there, here = (roofline_us(cost, read, {cost.pipe: math.inf, **peaks}) for read, peaks in rates)
    return there, here


def _times(
    known: Table | None,
    shape: Mapping[str, int],
    at: int,
    candidates: Sequence[str],
    work: Callable[[str], Work | None],
) -> tuple[dict[str, float], dict[str, Time]]:
    """(measured, by the model) of a table at one place: of all candidates, and of those here that were not measured."""
    here = dict(known.at.get((tuple(sorted(shape.items())), at), {})) if known else {}
    fitted: dict[str, Time] = {}
    for name in candidates:
        fit = known.fits.get(name) if known and name not in here else None
        counts = work(name) if fit else None
        if fit and counts and (time := predict(cold(counts) if "cold" in fit.us else counts, fit)):
            fitted[name] = time
    return here, fitted


def _rows(known: Table | None, name: str) -> int:
    """How many rows the fit of a candidate stands on."""
    return known.fits[name].rows if known and name in known.fits else 0


def choose(
    family: str,
    device: str,
    shape: Mapping[str, int],
    at: int,
    candidates: Sequence[str],
    floor: Callable[[str], float],
    work: Callable[[str], Work | None],
    known: Table | None = None,
    refused: Mapping[str, str] | None = None,
    carried: Carried | None = None,
    silent: str = "",
) -> Choice:
    """The candidate for one shape and one value of the routed axis.

    candidates: those that take the shape and can run here, in the order of preference at equal times.
    floor:      candidate -> time in us from the roofline, infinite for a pipe without peak.
    work:       candidate -> the counts of its configuration, None where it states none.
    known:      the table to use; by default the committed one of `device`.
    refused:    candidate -> why it does not take this workload. A table may name it all the same: its rows can be of a
                former kernel. It is passed over, and the reason says so where it would have won.
    carried:    times of another device; one is left aside whose interval is wider than that of this device's fit, or
                that has none beside one.
    silent:     "" or why the roofline says nothing of this device, and which candidate is taken then.
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
    here, fitted = _times(known, shape, at, candidates, work)
    over: dict[str, Time] = {}
    for name, time in carried.times.items() if carried else ():
        own = fitted.get(name)
        if name not in here and (own is None or time.high / time.low < own.high / own.low):
            fitted[name] = over[name] = time
    expected = {n: here[n] if n in here else fitted[n].us for n in candidates if n in here or n in fitted}
    if expected and (axis := known or carried):
        where = " ".join(f"{a}={v}" for a, v in sorted(shape.items())) + f" {axis.axis}={at} on {device}"
        choice = _by_time(where, expected, fitted, candidates, refused, here, carried.no_interval if carried else "")
        if carried and over:
            of = "" if over.keys() == expected.keys() else f": {', '.join(n for n in choice.times_us if n in over)}"
            choice = replace(choice, how="carried", reason=f"{choice.reason}; carried over from {carried.device}{of}")
    else:
        choice = _from_roofline(device, known, {name: floor(name) for name in candidates}, refused, silent)
    if wanted:
        return replace(choice, candidate=wanted, how="override", reason=f"{variable} is set; without it {choice}")
    return choice


def _by_time(
    where: str,
    expected: Mapping[str, float],
    fitted: Mapping[str, Time],
    candidates: Sequence[str],
    refused: Mapping[str, str],
    here: Mapping[str, float],
    no_interval: str,
) -> Choice:
    """The choice by expected times. here: what was measured at this very place, of candidates that refuse it too."""
    ranked = sorted(expected, key=lambda name: (expected[name], candidates.index(name)))
    told = [f"{'~' * (n in fitted)}{expected[n]:.1f}" for n in ranked]
    others = ", ".join(f"{name} {us}" for name, us in zip(ranked[1:], told[1:], strict=True))
    reason = f"{where}: {told[0]} us"
    if ranked[0] in fitted:
        time = fitted[ranked[0]]
        by, bound = (" by the fitted model", f", most of it {time.bound}") if time.bound else ("", "")
        within = f"90 % within {time.low:.1f} and {time.high:.1f}" if time.shown else no_interval
        reason += f"{by} ({within}{bound})"
    reason += f" against {others}" if others else ""
    for name, us in sorted(here.items(), key=lambda item: (item[1], item[0])):
        if name not in candidates and us < expected[ranked[0]]:
            reason += f"; passed over {name}, {us:.1f} in the table: {refused.get(name, ABSENT)}"
    unknown = {n: "neither measured there nor fitted" for n in candidates if n not in expected}
    how = "fitted" if fitted else "measured"
    return Choice(ranked[0], how, reason, {n: expected[n] for n in ranked}, {**refused, **unknown}, fitted)


def _from_roofline(
    device: str, known: Table | None, expected: Mapping[str, float], refused: Mapping[str, str], silent: str = ""
) -> Choice:
    """The choice by the roofline alone: the lowest floor, the first of those that are equal."""
    ranked = sorted(expected, key=lambda name: expected[name])  # stable: the caller's order at equal times
    best, some = ranked[0], {n: expected[n] for n in ranked if expected[n] < math.inf}
    reason = f"nothing measured on {device or 'this device'}; "
    if not some:
        reason += silent or "no peak for the pipe of any candidate, the first is taken"
    else:
        others = ", ".join(f"{name} {us:.1f}" for name, us in some.items() if name != best)
        reason += f"roofline predicts {some[best]:.1f} us" + (f" against {others}" if others else "")
        if list(some.values()).count(some[best]) > 1:
            reason += " (equal ones in the order of preference)"
    for name in sorted({p.candidate for p in known.points} - set(expected)) if known is not None else ():
        reason += f"; passed over {name}, which is in the table: {refused.get(name, ABSENT)}"
    why = "no bandwidth is known" if silent else "no peak for its pipe"
    unknown = {n: why for n in expected if n not in some and n != best}
    return Choice(best, "predicted", reason, some, {**refused, **unknown})


def route(
    router: Router,
    workload: Workload,
    device: str,
    candidates: Sequence[Candidate],
    read_gb_s: float,
    peak_tflop_s: Mapping[str, float],
    known: Table | None = None,
    precisions: Sequence[str] = (),
    sms: int = SMS,
    source: Source | None = None,
) -> Choice:
    """The candidate of a family for a workload on a device (its id in data/devices.toml).

    candidates:  those that can run there; the ones that refuse the workload or do not compete are left out.
    read_gb_s, peak_tflop_s: the device's read bandwidth, 0 where nobody knows it, and its peaks by pipe ("bf16", "f32",
                 ...), for predictions.
    known:       the table to use; by default the committed one of the device.
    precisions:  those asked for by name, see `Router`.
    sms:         the device's multiprocessors; where nobody knows them (0) those of an H200 are taken.
    source:      another device's table, for what this one has no time of.
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
    shape, at = {axis: int(workload[axis]) for axis in router.shape}, int(workload[router.axis])

    def work(name: str, sms: int = sms) -> Work | None:
        counts = takes[name].work
        return counts(workload, sms or SMS) if counts else None

    def floor(name: str) -> float:
        return roofline_us(router.cost(workload, takes[name]), read_gb_s, peak_tflop_s)

    known, over, silent = known or table(device, router.family), None, ""
    if source:
        measured = known.at.get((tuple(sorted(shape.items())), at), {}) if known else {}
        names = tuple(n for n in takes if n not in measured and _rows(known, n) < max(1, _rows(source.table, n)))
        there, fitted = _times(source.table, shape, at, names, lambda name: work(name, source.sms))
        times = {name: Time(us, us, us, "") for name, us in there.items() if name in names} | fitted
        if read_gb_s:
            no_interval = _no_interval(sms, source.sms)
            for name, time in times.items():
                floors = floors_us(router.cost(workload, takes[name]), source, read_gb_s, peak_tflop_s)
                low, us, high = (carried(x, *floors) for x in (time.low, time.us, time.high))
                low, high = (math.nan, math.nan) if no_interval else (low * (1 - CARRIED), high * (1 + CARRIED))
                times[name] = replace(time, low=low, us=us, high=high)
            over = Carried(source.table.device, source.table.axis, times, no_interval)
        else:  # no time can be told of a device without a bandwidth, but which was the fastest elsewhere
            takes = dict(sorted(takes.items(), key=lambda item: times[item[0]].us if item[0] in times else math.inf))
            silent = f"the first by their times on {source.table.device}, of its compute capability, is taken"
    if not read_gb_s:
        silent = (
            f"its bandwidth is unknown, so no time is told; {silent or 'the first in the order of preference is taken'}"
        )
    choice = choose(router.family, device, shape, at, tuple(takes), floor, work, known, refused, over, silent)
    other = ", ".join(f"{axis}={value}" for axis, value in router.fixed.items() if workload[axis] != value)
    if not other or choice.how == "predicted":
        return choice
    how = choice.how if choice.how in ("override", "carried") else "fitted"
    return replace(choice, how=how, reason=f"{choice.reason}; the table is of {other}")


def _no_interval(sms: int, there: int) -> str:
    """ "" or why a time that is carried over to a GPU of so many multiprocessors has no interval."""
    if sms and sms == there:
        return ""
    if sms and there:
        return f"no interval: one was shown for equal numbers of multiprocessors, and here are {sms}, there {there}"
    return "no interval: one was shown for equal numbers of multiprocessors, and this one's is unknown"


@dataclass(frozen=True)
class Plan:
    """The choices for one shape, made once: `plan[M]` is a bisection.

    at: ascending values of the routed axis. A value between two of them gets the choice of the one above, which every
    tile, chunk or page of the kernels is rounded up to as well, and one beyond the last the last.
    """

    at: tuple[int, ...]
    choices: tuple[Choice, ...]

    def __getitem__(self, value: int) -> Choice:
        return self.choices[min(bisect_left(self.at, value), len(self.at) - 1)]


# Each value up to 64, where limits of kernels lie; then eight to the octave, in multiples of 16, to 4096.
VALUES = (*range(1, 65), *sorted({-(-round(2 ** (k / 8)) // 16) * 16 for k in range(49, 97)}))


def plan(choice: Callable[[int], Choice], at: Sequence[int] = VALUES) -> Plan:
    """The choices of `route` for one shape at each value of the routed axis, as `choice` makes them."""
    return Plan(tuple(at), tuple(map(choice, at)))
