"""What measuring a card would cost, and how small an effect its intervals would show.

By the spread of a family's ratios over placements in the committed rows, where there are any. A change is seen when its
distance from the line exceeds the interval's reach by what nine in ten measurements stay within. With --all or
--missing: what a sweep costs, a line a card; `lab measure` with the same words does it.
"""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from lab.base import devices, interval
from lab.base.console import show, table
from lab.base.errors import BadInput
from lab.bench import measure
from lab.card import phases
from lab.card.gate import Condition
from lab.check import families
from lab.judge import evidence
from lab.row import store
from lab.study.own import verdict

MOST = 1000  # observations; who needs more asks for less than the noise allows
PLACEMENT_S, PROCESS_S = 0.35, 4.0  # that one arm's sets take to make, and a process to start, on an H200
ASSUMED_PCT = 1.0
PLACED = ("kernel_us", "sequence_us", "host_us", "roofline_fraction")  # metrics that a placement changes


def run(arguments: Namespace) -> int:
    """`lab plan`: the plans of the cards that were named; with --rows, the repetitions that files of one's own need."""
    if bool(arguments.phase) == arguments.all:
        raise BadInput("lab plan", "needs card ids, or --all alone", "see `lab phases`")
    if arguments.rows:
        return _own(arguments)
    if arguments.device and not (arguments.all or arguments.missing):
        raise BadInput("--device", "stands without --all or --missing", "a card's own plan is the same on every device")
    if arguments.all or arguments.missing:
        costs = sweep(arguments)
        show(arguments.json, lambda: msgspec.to_builtins(costs), lambda: rendered(costs, arguments.missing))
        return 0
    found = [plan(phases.card(name), arguments.placements, arguments.peers) for name in arguments.phase]
    show(arguments.json, lambda: msgspec.to_builtins(found), lambda: "\n".join(map(render, found)))
    return 0


class Seen(msgspec.Struct, frozen=True):
    """What one line of a gate could be told from. go_from: the figure beyond which nine in ten measurements decide.

    needed: placements by which nine in ten tell an effect as large as the line from none, 0 for a line of no change.
    """

    condition: str
    go_from: float
    unit: str
    needed: int = 0


class Plan(msgspec.Struct, frozen=True):
    """What measuring a card costs, and what it would show.

    sets: times that sets are allocated in a placement, one for each arm and the control's second self.
    spread_pct: standard deviation of a placement's ratio; compared: comparisons that it was seen in, 0 when assumed.
    effect_pct: the smallest change from a line that nine in ten measurements see.
    """

    card: str
    comparisons: int
    sets: int
    placements: int
    processes: int
    seconds: float
    spread_pct: float
    compared: int
    effect_pct: float
    lines: tuple[Seen, ...]


def plan(card: phases.Card, placements: int = interval.PLACEMENTS, peers: bool = False, device_id: str = "") -> Plan:
    """The plan of a card, on its own device or on that of `device_id`.

    Raises BadInput for one that can only be replayed or cannot run there, and for fewer than two placements.
    """
    if placements < 2:
        raise BadInput("--placements", f"{placements} have no spread", f"take {interval.PLACEMENTS} or more")
    items = measure.plan(card, peers=peers)
    if device_id or card.device:
        _refuse_unable(items, devices.get(device_id or card.device, card.path))
    arms = max(len(item.arms) for item in items)
    spread_pct, compared = spread(card.family)
    # The interval's reach, and beyond it what nine in ten measurements stay within.
    steps = [interval.quantile(level, placements - 1) for level in (interval.PLACEMENT_LEVEL, 0.8)]
    spread_log, floor = math.log1p(spread_pct / 100.0), math.log1p(card.gate.noise.floor_pct / 100.0)
    step = spread_log / math.sqrt(placements)
    lines = [
        replace(line, needed=_needed(c, floor, lambda n: spread_log / math.sqrt(n), interval.PLACEMENT_LEVEL))
        for _, gate in card.gates
        for c in gate.require
        if (line := _seen(c, step, steps, floor))
    ]
    seconds = sum(seconds_of(card, items, placements, device_id or card.device).values())
    return Plan(card.id, len(items), arms + 1, placements, evidence.PROCESSES * arms, seconds,
                spread_pct, compared, 100.0 * math.expm1(sum(steps) * step), tuple(lines))  # fmt: skip


def seconds_of(card: phases.Card, items: Sequence[measure.Item], placements: int, device: str) -> dict[str, float]:
    """Workload -> what its comparison takes, s: as it took before, on this device if it can be.

    Else as another card's took at the workload, by number of arms, or this card's at others; where no row says it, by
    what allocating sets and starting processes takes.
    """
    arms = max(len(item.arms) for item in items)
    guess = PLACEMENT_S * placements * (arms + 1) + PROCESS_S * evidence.PROCESSES * arms + measure.Settings().seconds
    rows = [row for row in store.rows(family=card.family) if row.took_s and row.placements == placements]
    of_run = Counter((row.run, row.workload_id) for row in rows)
    seen, elsewhere = dict[str, float](), dict[str, float]()
    for row in sorted(rows, key=lambda r: (r.device == device, r.started)):
        if row.phase == card.id:
            seen[row.workload_id] = row.took_s or 0.0
        else:
            elsewhere[row.workload_id] = (row.took_s or 0.0) / of_run[row.run, row.workload_id]
    mean = statistics.fmean(seen.values()) if seen else guess

    def took(item: measure.Item) -> float:
        at = item.workload.id
        return seen.get(at) or elsewhere.get(at, 0.0) * len(item.arms) or mean

    return {item.workload.id: took(item) for item in items}


def _refuse_unable(items: Sequence[measure.Item], device: devices.Device) -> None:
    """Raise BadInput for an arm that is judged and cannot run on a device, or not at one of its workloads."""
    from kernels.common import described_for

    for item in items:
        card, at = item.card, f"{item.workload.id} on {device.id}"
        for role, name in (("control", card.control), ("candidate", card.candidate)):
            arm = families.load(card.family).candidate(name)
            with described_for(device.capability):
                why = families.unfit(arm, device.capability) or arm.refuses(item.workload)
            if why:
                raise BadInput(card.path, f"the {role} {name} cannot run {at}: {why}", "name another arm, or device")
        if device.vram and item.bytes > device.vram.base:
            what = f"{at} moves {item.bytes / 1e9:.3g} GB, and its memory has {device.vram.base / 1e9:.3g} GB"
            raise BadInput(card.path, what, "name a smaller workload, or another device")


class Cost(msgspec.Struct, frozen=True):
    """What a card costs in a sweep. workloads: ids of those to measure, of so many; seconds: of one GPU."""

    card: str
    device: str
    workloads: tuple[str, ...]
    of: int
    seconds: float


def sweep(arguments: Namespace) -> list[Cost]:
    """The cards of a sweep that have something to measure, on their own devices or on --device.

    Those of --all that can only be replayed, whose arms are not all here, or that cannot run there, are left out.
    """
    found = []
    settings = measure.Settings(placements=arguments.placements)
    for card in phases.cards().values() if arguments.all else map(phases.card, arguments.phase):
        device = devices.get(arguments.device, "--device").id if arguments.device else card.device
        try:
            items = measure.plan(card, peers=arguments.peers)
            _refuse_unable(items, devices.get(device, card.path))
        except BadInput:
            if not arguments.all:
                raise
            continue
        todo = measure.missing(items, device, settings) if arguments.missing else items
        if todo:
            ids = tuple(item.workload.id for group in measure.groups(todo) for item in group)
            took = seconds_of(card, items, arguments.placements, device)
            found.append(Cost(card.id, device, ids, len(items), sum(took[each] for each in ids)))
    return found


def rendered(costs: Sequence[Cost], missing: bool) -> str:
    """A sweep as text."""
    if not costs:
        return "nothing is missing"
    rows = [
        (c.card, c.device, f"{len(c.workloads)} of {c.of}", f"{c.seconds:.0f} s", " ".join(c.workloads[:2])
         + (f" + {len(c.workloads) - 2}" if len(c.workloads) > 2 else "")) for c in costs
    ]  # fmt: skip
    what = "missing" if missing else "comparisons"
    total = sum(len(c.workloads) for c in costs), sum(c.seconds for c in costs) / 3600
    head = ("card", "device", what, "about", "workloads, those that decide first")
    return table(head, rows, (20, 8, 11, 7, 46)) + f"\n{total[0]} comparisons, about {total[1]:.1f} hours of one GPU"


def _seen(c: Condition, step: float, steps: Sequence[float], floor: float) -> Seen | None:
    """One required line; None where it is of no time that a placement changes."""
    if c.metric not in PLACED or c.compare == "difference" or c.than:
        return None
    sign = 1.0 if c.op in (">", ">=") else -1.0
    if c.compare == "value":
        return Seen(str(c), c.threshold * math.exp(sign * sum(steps) * step), c.unit)
    line, beyond = math.log1p(c.share * c.threshold / 100.0), sum(steps) * step
    from_line = line + sign * beyond
    if 0 <= sign * line <= floor:  # within the floor the figure has to lie beyond that too
        from_line = sign * max(sign * from_line, floor + steps[1] * step)
    return Seen(str(c), 100.0 * math.expm1(from_line), c.unit)


def _needed(c: Condition, floor: float, error: Callable[[int], float], level: float, arms: int = 1) -> int:
    """The fewest observations whose interval tells an effect as large as the line, or the floor, from none."""
    if c.compare != "change":
        return 0
    size = max(abs(math.log1p(c.share * c.threshold / 100.0)), floor)
    for n in range(interval.PLACEMENTS if arms == 1 else 2, MOST):
        if sum(interval.quantile(p, arms * (n - 1)) for p in (level, 0.8)) * error(n) <= size:
            return n
    return MOST


def _own(arguments: Namespace) -> int:
    """Repetitions an arm that show each change that a gate requires, by the spread of the control's own files."""
    card = phases.card(*arguments.phase[:1])
    for c, workload, sd_pct, count in verdict.spreads(card, arguments.rows, arguments.map, arguments.metric):
        sd, floor = math.log1p(sd_pct / 100.0), math.log1p(card.gate.noise.floor_pct / 100.0)
        n = _needed(c, floor, lambda n, sd=sd: sd * math.sqrt(2.0 / n), interval.LEVEL, arms=2)  # type: ignore[misc]
        over = f"at {sd_pct:.2g} % over the control's {count}"
        print(f"{workload or card.id}: {c}: {n} repetitions an arm show it, {over}")
    return 0


def spread(family: str) -> tuple[float, int]:
    """(median standard deviation in %, comparisons) of a family's ratios over placements; ASSUMED_PCT without."""
    found = []
    for card in phases.cards().values():
        for device in store.measured_devices(card.id) if card.family == family else ():
            for control, candidate in evidence.pairs(store.rows(device=device, phase=card.id)).values():
                change = evidence.change_pct(control, candidate)
                if change and candidate and candidate.placements >= interval.PLACEMENTS:
                    low, high = (math.log1p(end / 100.0) for end in change[1:])
                    n = candidate.placements
                    reach = interval.quantile(interval.PLACEMENT_LEVEL, n - 1)
                    found.append(100.0 * (high - low) / 2 / reach * math.sqrt(n))
    return (statistics.median(found), len(found)) if found else (ASSUMED_PCT, 0)


def render(found: Plan) -> str:
    """A plan as text."""
    of = f"in {found.compared} comparisons of its family" if found.compared else "assumed, its family has no such row"
    lines = [
        f"{found.card}: {found.comparisons} comparisons of {found.placements} placements, about {found.seconds:.0f} s",
        f"a placement's ratio varies by {found.spread_pct:.2g} % ({of}); {found.effect_pct:.2g} % from a line is seen",
    ]
    for x in found.lines:
        needed = f"; {x.needed} placements show an effect as large as the line" if x.needed else ""
        lines.append(f"  {x.condition}: decided from {x.go_from:.4g} {x.unit}{needed}")
    return "\n".join(lines)
