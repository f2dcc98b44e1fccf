"""`lab routes FAMILY`: the router's table, and with --shape the choice for one shape, as a user would get it.

With --calibrate it measures where that tells most (lab/study/calibrate.py) and stores the table.

The table has a line for every shape and value of the routed axis at which at least two candidates were timed. It takes
the newest run that timed two of them, and from other runs the candidates that it did not time, where an arm common to
both took the same within JOIN, or where they are further than AGREE from all that compete, which is more than runs
differ by, so that the order is beyond doubt. A kernel that the code would not launch any more has its successor's time
where a run timed both, by whatever names of one precision, and the former took the same within JOIN. Only rows that
passed their checks and were taken from a cold L2 count. Two runs of one commit in which the same candidate, launched
the same way on the same workload, differs by more than AGREE are refused instead of averaged: one of them is an
artefact, and a policy tuned on an artefact was one of the recorded accidents (a path 4x slower for as long as nobody
had initialised a library). The time model (kernels/timing.py) is fitted to the same times; where a candidate has none,
its own stands in the table with a ~.

Arms that show a defect or a single change never compete; some precisions only where they are asked for by name
(`--precision`). Both are marked, but for an arm that launches what a competing one launches. The choice itself is
lab/study/choices.py's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.base import devices, files, models, progress
from lab.base.console import print_json, show
from lab.base.errors import BadInput, shown
from lab.bench import sampling
from lab.check import families
from lab.row import store
from lab.row.records import Measurement
from lab.study import calibrate, choices, places, timefit

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.routing import Router, Table
    from kernels.timing import Fit

AGREE = 1.15  # runs of one commit of the same thing stayed within 1.02 on an H200; a power cap moves up to 1.1
JOIN = 1.05  # how far an arm of two runs may differ for the older one to add what the newer one did not time
SAME = {"n_seqs"}  # axes that say where the columns came from: a router collapses them
Place = tuple[tuple[tuple[str, int], ...], int]  # shape, value of the routed axis
Groups = dict[Place, dict[str, dict[str, Measurement]]]  # run -> candidate -> row, at each place


@dataclass(frozen=True)
class Crossover:
    """One place of a table: the fastest candidate and the time of each, us.

    shape, axis, at: where it is; fitted: candidates without a point there, by the time model.
    not_competing:   the time of those that do not compete, in their newest run there.
    """

    shape: Mapping[str, int]
    axis: str
    at: int
    best: str
    times_us: Mapping[str, float]
    fitted: tuple[str, ...] = ()
    not_competing: Mapping[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> str:
        """The slowest candidate."""
        return max(self.times_us, key=self.times_us.__getitem__)

    @property
    def cost_of_worst(self) -> float:
        """Its time over the least."""
        return self.times_us[self.worst] / min(self.times_us.values())

    def to_json(self) -> dict[str, Any]:
        """The object that `lab routes FAMILY --json` prints."""
        whole = {"shape": self.shape, self.axis: self.at, "best": self.best, "times_us": self.times_us}
        whole |= {"worst": self.worst, "cost_of_worst": self.cost_of_worst}
        return {**whole, "fitted": self.fitted, "not_competing": self.not_competing, "how": "measured"}

    @property
    def faster(self) -> dict[str, float]:
        """Of those that do not compete the times that are less than the best, the fastest first."""
        found = sorted((us, name) for name, us in self.not_competing.items() if us < self.times_us[self.best])
        return {name: us for us, name in found}


def lines(places: Iterable[Crossover]) -> Iterator[str]:
    """A table's places as text: under each shape what is fastest at a value of the axis, and others as multiples of it.

    The next two and the last; ~: by the model. In brackets, us, those that are faster and that no router takes here.
    """
    places = list(places)
    wide, at = max(len(p.best) for p in places), max(len(f"{p.axis}={p.at}") for p in places)
    for shape, group in itertools.groupby(places, lambda place: place.shape):
        yield " ".join(f"{axis}={value}" for axis, value in shape.items())
        for place in group:
            near = {name: "~" for name in place.fitted}
            best = place.times_us[place.best]
            others = sorted((us, name) for name, us in place.times_us.items() if name != place.best)
            costs = [f"{name} {near.get(name, '')}{us / best:.2f}x" for us, name in others]
            costs = [*costs[:2], f"... {costs[-1]}"] if len(costs) > 3 else costs
            aside = ", ".join(f"{name} {us:.1f}" for name, us in itertools.islice(place.faster.items(), 2))
            told = f"  {f'{place.axis}={place.at}':{at}}  {place.best:{wide}}  "
            told += f"{near.get(place.best, '') + f'{best:.1f}':>8} us  "
            told += "  ".join([", ".join(costs)] * bool(costs) + [f"[{aside}]"] * bool(aside))
            yield from textwrap.wrap(told, 100, subsequent_indent=" " * (at + wide + 19), break_long_words=False)


def table(family: str, device: str, rows: Iterable[Measurement] | None = None) -> Table:
    """The router's table of a family on a device, of the candidates that it may ever route to.

    Raises BadInput when nothing was measured that could be compared, and when two runs contradict each other.
    """
    place = devices.get(device, "--device").id
    known = _made(choices.router(family), place, _groups(choices.router(family), place, rows))
    if known is None:
        raise BadInput(f"profiles/{place}", f"no run timed two candidates of {family} together", "measure a card first")
    return known


def timed(known: Table) -> list[timefit.Timed]:
    """The points of a table with the counts of what the present code would launch there; those it refuses are out.

    A cold measurement rotates over sampling.MOST_SETS sets at most: where so many fit into L2, the counts are those of
    a call that finds its operands there (kernels/timing.py: cold).
    """
    from kernels.common import described_for
    from kernels.timing import cold

    asks, device, found = choices.router(known.family), devices.get(known.device), []
    family = families.load(known.family)
    every, least = family.candidates, device.l2_bytes.base / sampling.MOST_SETS if device.l2_bytes else 0.0
    with described_for(device.capability):
        for p in known.points:
            work = every[p.candidate].work
            workload, _ = asks.asked({axis: str(value) for axis, value in (*p.shape, (asks.axis, p.at))})
            if work is not None and not every[p.candidate].refuses(workload):
                moved = family.cost(workload, every[p.candidate].precision).bytes
                counts = cold(work(workload, timefit.sms(device)), is_cold=moved >= least)
                found.append(timefit.Timed(p.candidate, p.shape, p.at, counts, p.median_us))
    return found


def validated(known: Table) -> Table:
    """The table with what its model is worth: each shape left out in turn, and each model's shapes together."""
    rows, device, asks = timed(known), devices.get(known.device), choices.router(known.family)
    every = families.load(known.family).candidates
    apart: dict[str, Callable[[timefit.Timed], Any]] = {"shape": lambda row: row.shape, "model": _models(asks)}
    ways = {
        way: timefit.validate(rows, device, group, lambda name: asks.question(every[name]))
        for way, group in apart.items()
    }
    return replace(known, validation={way: score.to_json() for way, score in ways.items() if score.predictions})


def worth(known: Table) -> Table:
    """`validated`, which takes a fit for each row, from the stored table where that is of the same rows and counts."""
    from kernels import routing

    if (stored := path(known)).exists() and same(held := routing.read(stored), known):
        return replace(known, validation=held.validation)
    return validated(known)


def left_out(known: Table) -> dict[str, list[tuple[float, float]]]:
    """By candidate (measured us, predicted us over it) of each shape, by the fit of the others."""
    found: dict[str, list[tuple[float, float]]] = {}
    for told in timefit.held_out(timed(known), devices.get(known.device), lambda row: row.shape, intervals=False):
        for row, time in told:
            found.setdefault(row.candidate, []).append((row.us, time.us / row.us))
    return found


def _models(asks: Router) -> Callable[[timefit.Timed], str]:
    """Of a place: the real model that it is of, by its shape; a place of none is a model of its own.

    A shape that several models have goes to the first of them by name, those of data/models.toml before others.
    """
    listed = [(m.id, kind.axes) for m in models.load().values() for kind in m.shapes.values()]
    public: dict[tuple[tuple[str, int], ...], str] = {}
    with contextlib.suppress(BadInput):  # a family whose axes no public model has
        for place in calibrate.pool(asks):
            public.setdefault(tuple(pair for pair in place.axes if pair[0] in asks.shape), min(place.models))

    def of(row: timefit.Timed) -> str:
        named = {name for name, axes in listed if axes.items() <= dict(row.shape).items()}
        return min(named, default=public.get(row.shape, str(row.shape)))

    return of


def _made(asks: Router, place: str, groups: Groups) -> Table | None:
    from kernels.routing import Point, Table

    able = {name for name, candidate in families.load(asks.family).candidates.items() if not candidate.no_route}
    points, runs = [], set()
    for (shape, at), by_run in sorted(groups.items()):
        routed = {run: {n: row for n, row in arms.items() if n in able} for run, arms in by_run.items()}
        joined, sources = _joined(routed)
        joined, more = _renewed(joined, by_run)
        runs |= sources | more
        points += [Point(name, shape, at, round(_us(row), 3)) for name, row in sorted(joined.items())]
    source = "runs " + ", ".join(sorted(runs))
    known = Table(place, asks.family, asks.axis, tuple(points), source)
    return replace(known, fits=timefit.fits(timed(known), devices.get(place))) if points else None


def _groups(asks: Router, place: str, rows: Iterable[Measurement] | None) -> Groups:
    """The rows that answer the router's question.

    Of several kinds (inputs, and every axis but shape and routed one) the one that most rows have is the question.
    Others ask about errors (sums of one sign) or about another product (other weights): their times differ.
    """
    names, axes = choices.ours(asks.family).keys(), (asks.axis, *asks.shape)
    family = families.load(asks.family)
    kernels = [name for name in names if name not in family.peers]

    def renews(row: Measurement) -> bool:
        """Whether an arm that is gone launched what a candidate launches now, or once did: `_renewed` asks its row."""
        gone = row.name not in family.candidates and row.config
        return bool(gone) and (row.config in launched or any(not families.former(row, name) for name in kernels))

    def usable(row: Measurement) -> bool:
        taken = row.status == "ok" and (row.name in names or renews(row)) and row.l2 == "cold" and not row.profiled
        asked = all(row.workload.get(axis) == value for axis, value in asks.fixed.items())
        # A launch that the kernel refuses by now is no route. Other former ones stay: the newest there is.
        return taken and asked and {*axes} <= set(row.workload) and families.former(row) != "former kernel, refused now"

    def kind(row: Measurement) -> tuple[Any, ...]:
        return (row.inputs, *sorted((a, v) for a, v in row.workload.items() if a not in (*axes, *SAME)))

    every = list(store.rows(place, family=asks.family) if rows is None else rows)
    launched = {row.config for row in every if row.name in names}
    families.together(asks.family, devices.get(place).capability, (row.workload_id for row in every))
    timed = [row for row in every if usable(row)]
    contradiction(timed)
    kinds = [kind(row) for row in timed]
    usual = max(dict.fromkeys(kinds), key=kinds.count, default=None)
    found: Groups = {}
    for row in (row for own, row in zip(kinds, timed, strict=True) if own == usual):
        shape = tuple(sorted((axis, int(row.workload[axis])) for axis in asks.shape))
        runs = found.setdefault((shape, int(row.workload[asks.axis])), {})
        runs.setdefault(row.run, {})[row.name] = row
    return found


def _joined(by_run: Mapping[str, Mapping[str, Measurement]]) -> tuple[dict[str, Measurement], set[str]]:
    """(candidate -> row, runs): the newest run that compared, and what older ones timed besides.

    A calibration counts as older than every card's run, since it samples little.
    Another run adds a candidate only where an arm of both took as long as before (JOIN), so that the times compare, or
    where it is so far from all others that no difference between runs puts it on their other side (AGREE, times what
    an arm of both differs by).
    """
    joined: dict[str, Measurement] = {}
    sources = set()
    runs = sorted(by_run, key=lambda run: (not any(r.calibration for r in by_run[run].values()), run), reverse=True)
    for run in runs:
        arms = by_run[run]
        ratios = [_us(arms[name]) / _us(joined[name]) for name in arms if name in joined]
        if len(arms) > 1 and (not joined or any(1 / JOIN <= r <= JOIN for r in ratios)):
            more = {name: row for name, row in arms.items() if name not in joined}
            joined |= more
            sources |= {run} if more else set()
    for run in runs:
        arms = by_run[run]
        moved = max((_apart(arms[name], joined[name]) for name in arms if name in joined), default=1.0)
        for name, row in arms.items():
            if name not in joined and all(_apart(row, other) > AGREE * moved for other in joined.values()):
                joined[name] = row
                sources.add(run)
    return (joined, sources) if len(joined) > 1 else ({}, set())


def _renewed(
    joined: Mapping[str, Measurement], by_run: Mapping[str, Mapping[str, Measurement]]
) -> tuple[dict[str, Measurement], set[str]]:
    """(candidate -> row, runs added): of a former kernel the present one's row, where its run timed the former too.

    By whatever names of the candidate's precision: a card that changes what a candidate launches has the former launch
    as an arm of its own, and one that asks whether it should change has what is served today. Where no run has the
    present kernel, the candidate's own newest one beside the former.
    """
    renewed, sources = dict(joined), set[str]()
    for name, old in joined.items():
        if families.former(old) != "former kernel":
            continue
        beside = [
            sorted(by_run[run].values(), key=lambda row: row.name != name)  # its own name first
            for run in sorted(by_run, reverse=True)
            if any(row.config == old.config and _apart(row, old) <= JOIN for row in by_run[run].values())
        ]
        present = [r for arms in beside for r in arms if r.precision == old.precision and not families.former(r, name)]
        newer = [r for arms in beside for r in arms if r.name == name and r.run > old.run and r.config != old.config]
        if found := present or newer:
            renewed[name] = found[0]
            sources.add(found[0].run)
    return renewed, sources


def _us(row: Measurement) -> float:
    """The time of a row that is ok."""
    return row.time_us or 0.0


def _apart(one: Measurement, other: Measurement) -> float:
    """The longer time over the shorter."""
    return max(_us(one), _us(other)) / min(_us(one), _us(other))


def contradiction(rows: Iterable[Measurement]) -> None:
    """Raise BadInput for the first candidate whose runs of one commit and launch differ by more than AGREE."""
    seen: dict[tuple[Any, ...], list[Measurement]] = {}
    for row in rows:
        if row.code not in ("", "unknown"):
            seen.setdefault((row.name, row.workload_id, row.config, row.code), []).append(row)
    for (name, workload, _, commit), same in seen.items():
        low, high = min(same, key=_us), max(same, key=_us)
        if (ratio := _apart(high, low)) > AGREE:
            times = f"{low.median_us:.1f} us in {low.run} and {high.median_us:.1f} us in {high.run}"
            what = f"{name} on {workload} took {times}, both at commit {commit}: {ratio:.2f}x apart"
            remedy = "find out which one is an artefact and measure again before a route is made of it"
            raise BadInput(f"profiles/{low.device}", what, remedy)


def barred(family: str, precisions: Sequence[str]) -> dict[str, str]:
    """The family's candidates that do not compete when these precisions are asked for, and why."""
    asks = choices.router(family)
    return {name: why for name, c in families.load(family).candidates.items() if (why := asks.bars(c, precisions))}


def competing(known: Table, precisions: Sequence[str] = ()) -> Table:
    """The table without the candidates that do not compete when these precisions are asked for."""
    out = barred(known.family, precisions)
    fits = {name: fit for name, fit in known.fits.items() if name not in out}
    return replace(known, points=tuple(p for p in known.points if p.candidate not in out), fits=fits)


def crossovers(known: Table, aside: Mapping[Place, Mapping[str, float]] | None = None) -> list[Crossover]:
    """By shape and measured value of the axis: the fastest, the time of each, and the cost of the worst choice.

    All candidates of the table compete (see `competing`); aside: place -> times of those that do not. A candidate
    without a point there is there by the time model, as the router does it.
    """
    asks, device = choices.router(known.family), devices.get(known.device)
    found = []
    for shape, at in sorted(known.at):
        workload, _ = asks.asked({axis: str(value) for axis, value in (*shape, (known.axis, at))})
        choice = choices.choose(asks, workload, device, known=known)
        beside = (aside or {}).get((shape, at), {})
        near = tuple(sorted(choice.fitted))
        found.append(Crossover(dict(shape), known.axis, at, choice.candidate, choice.times_us, near, beside))
    return found


def path(known: Table) -> Path:
    """Where `kernels.routing` reads the table."""
    return store.FOLDER / known.device / "routes" / f"{known.family}.json"


def text(known: Table) -> str:
    """A table as its file holds it, times to the nanosecond."""
    from kernels import routing

    points = [
        {"candidate": p.candidate, "shape": dict(p.shape), "at": p.at, "median_us": p.median_us} for p in known.points
    ]
    head = {key: getattr(known, key) for key in ("device", "family", "axis", "source", "validation")}
    lines = [f' "{key}": {json.dumps(value)}' for key, value in {"schema": routing.SCHEMA, **head}.items()]
    fits = [f'  "{name}": {json.dumps(asdict(fit))}' for name, fit in sorted(known.fits.items())]
    lines += [' "fits": {\n' + ",\n".join(fits) + "\n }"]
    lines += [' "points": [\n  ' + ",\n  ".join(map(json.dumps, points)) + "\n ]"]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def same(one: Table, other: Table) -> bool:
    """Whether two tables have the same points, and parameters within 1 %, which another machine's sums keep."""

    def close(a: Fit, b: Fit) -> bool:
        return a.us.keys() == b.us.keys() and all(abs(a.us[n] / b.us[n] - 1) < 0.01 for n in a.us)

    points = [replace(t, fits={}, validation={}) for t in (one, other)]
    return (
        points[0] == points[1]
        and one.fits.keys() == other.fits.keys()
        and all(close(fit, other.fits[name]) for name, fit in one.fits.items())
    )


def _aside(asks: Router, groups: Groups, out: Mapping[str, str]) -> dict[Place, dict[str, float]]:
    """The time of each barred candidate in its newest run at each place, where no other launches the very same."""
    family = families.load(asks.family)
    compete = {name: c.precision for name, c in family.candidates.items() if name not in (*out, *family.peers)}

    def of_its_own(row: Measurement) -> bool:
        return all(families.former(row, name) for name, precision in compete.items() if precision == row.precision)

    found = {}
    for place, by_run in groups.items():
        newest = {n: row for run in sorted(by_run) for n, row in by_run[run].items() if n in out}
        found[place] = {n: _us(row) for n, row in newest.items() if of_its_own(row)}
    return found


# The command ----------------------------------------------------------------------------------------------------------


def run(arguments: Namespace) -> int:
    """Print the table, and store it with --write; with --shape print the choice for that one."""
    asks = choices.router(arguments.family)
    if arguments.calibrate:
        return _calibrate(asks, arguments)
    if arguments.survey:
        return places.run(asks, devices.get(arguments.device, "--device"), arguments)
    device = devices.get(arguments.device, "--device")
    named = choices.check_precisions(asks.family, arguments.precision)
    if not arguments.shape:
        _print_table(asks, device, named, arguments)
        return 0
    if arguments.write:
        raise BadInput("--write", "stores the whole table", "leave the shape out")
    told = choices.answer(asks.family, device, choices.words(arguments.shape), arguments.precision)
    show(arguments.json, lambda: told, lambda: choices.rendered(told))
    return 0


def _calibrate(asks: Router, arguments: Namespace) -> int:
    """Measure, fit and store; 1 where nothing was timed."""
    if arguments.shape or arguments.json:
        raise BadInput("--calibrate", "measures and stores, and answers nothing", "leave --shape and --json out")
    timed = failed = 0
    with progress.shown(calibrate.MOST, quiet=False) as shown_:
        for rows in calibrate.run(asks, arguments.minutes, tell=shown_.tell):
            shown_.advance()
            timed += any(row.status == "ok" for row in rows)
            failed += sum(row.status not in ("ok", "refused") for row in rows)
            place = rows[0].device
    if not timed:
        print("no place was timed")
        return 1
    known = validated(table(asks.family, place))
    where = files.write(path(known), text(known))
    print(f"{timed} places timed, {failed} arms without a time; {len(known.fits)} candidates fitted: {shown(where)}")
    for way, score in known.validation.items():
        print(f"  each {way} left out: {_score(score)}")
    return 0


def _score(score: Mapping[str, float | str]) -> str:
    """A validation in one line."""
    pct = {name: f"{100 * value:.1f} %" for name, value in score.items() if isinstance(value, float)}
    return (
        f"median error {pct['median']}, 95th percentile {pct['p95']}, {pct['coverage']} in their intervals; the choice "
        f"costs {pct['mean_regret']} in the mean, {pct['worst_regret']} at worst"
    )


def _print_table(asks: Router, device: devices.Device, named: Sequence[str], arguments: Namespace) -> None:
    from kernels import routing

    groups = _groups(asks, device.id, None)
    known = _made(asks, device.id, groups)
    out = barred(asks.family, arguments.precision)
    if known is None and arguments.write:
        raise BadInput("--write", f"nothing of {asks.family} was measured on {device.id}", "measure a card first")
    places = crossovers(competing(known, arguments.precision), _aside(asks, groups, out)) if known else []
    runs = known.source.removeprefix("runs ").split(", ") if known else []
    source = (
        f": the fastest in us, others as multiples ({len(runs)} run{'s' * (len(runs) > 1)}, the last {runs[-1]})"
        if known
        else ": nothing measured there; --shape goes by a device of its compute capability, or the roofline"
    )
    if arguments.json:
        print_json([place.to_json() for place in places])
    else:
        print("\n".join([f"{asks.family} on {device.id}{source}", *(lines(places) if places else ())]))
        marked = {name for place in places for name in itertools.islice(place.faster, 2)}
        for why in dict.fromkeys(out[name] for name in out if name in marked):
            told = f"[{', '.join(name for name in out if name in marked and out[name] == why)}] not taken: {why}"
            print("\n".join(textwrap.wrap(told, 100, subsequent_indent="  ", break_on_hyphens=False)))
        if more := {name for place in places for name in place.not_competing} - marked:
            print(f"{len(more)} more are not taken; --json has their times")
        by_name = f" [--precision {'|'.join(named)}]" if named else ""
        print("\n".join(textwrap.wrap(f"one shape: lab routes {asks.family} --shape {asks.usage}{by_name}", 100)))
    if known is None:
        return
    stored = path(known)
    if arguments.write:
        print(f"written: {shown(files.write(stored, text(validated(known))))}")
    elif not arguments.json and not (stored.exists() and same(routing.read(stored), known)):
        print("the stored table, which the router reads, is not this one; --write stores it")
