"""`lab routes FAMILY --survey`: by the time model, where public models lose most time, and what other rules would cost.

At every place of the calibration's pool (lab/study/calibrate.py) the router chooses by what was measured there or by
the fitted model. Lost is what its choice takes over the roofline of that choice; a place is listed where the best is
FAR from its floor, so that the list is where a better kernel would gain, not where a better choice would. A policy of
the family's route.py (the operand that was not collapsed, tiers by bandwidth) is charged what its own choice takes at
the same places over the router's. All of it is modelled: a place that matters is worth a card.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lab.base import devices
from lab.base.console import print_json
from lab.base.errors import BadInput
from lab.study import calibrate

if TYPE_CHECKING:
    from kernels.routing import Choice, Router

FAR = 1.5
SHOWN = 15


@dataclass(frozen=True)
class Lost:
    """A place whose best candidate takes `us`, `floor_us` being the roofline of it; how: Choice.how."""

    axes: Mapping[str, int]
    models: tuple[str, ...]
    candidate: str
    us: float
    floor_us: float
    how: str

    @property
    def lost_us(self) -> float:
        """What each call takes beyond the floor, times the models that make it."""
        return (self.us - self.floor_us) * len(self.models)


@dataclass(frozen=True)
class Policy:
    """What a rule costs over the router at `places`; it had no kernel at `refused` more."""

    rule: str
    places: int
    refused: int
    mean: float
    worst: float
    where: str


def survey(asks: Router, device: devices.Device, precisions: Sequence[str] = ()) -> tuple[list[Lost], list[Policy]]:
    """(places far from their floor, the most lost first; the rules); BadInput for a device without a table."""
    from kernels import routing
    from lab.study import routes

    known = routing.table(device.id, asks.family)
    if known is None:
        what = f"nothing of {asks.family} was measured on {device.id}"
        raise BadInput("--survey", what, f"measure there first: lab routes {asks.family} --calibrate")
    peaks = {pipe: fact.base / 1e12 for pipe, fact in device.peaks.items()}
    read_gb_s = device.bandwidth.base / 1e9
    by_name = {c.name: c for c in routes.able(asks.family, device)}
    found: list[Lost] = []
    costs: dict[str, list[tuple[float, str]]] = {rule: [] for rule in asks.policies}
    for place in calibrate.pool(asks):
        workload, _ = asks.asked({axis: str(value) for axis, value in place.axes})
        try:
            choice = routes.choose(asks, workload, device, precisions)
        except ValueError:  # no candidate takes it
            continue
        us = choice.times_us.get(choice.candidate, math.inf)
        floor = routing.roofline_us(asks.cost(workload, by_name[choice.candidate]), read_gb_s, peaks)
        if choice.how != "predicted" and us > FAR * floor:
            found.append(Lost(dict(place.axes), place.models, choice.candidate, us, floor, choice.how))
        for rule, policy in asks.policies.items():
            name, calls = policy(workload, read_gb_s)
            taken = calls * _time(asks, workload, device, name, calls, choice, precisions)
            costs[rule].append((taken / us, calibrate.words(asks, place)))
    return sorted(found, key=lambda one: -one.lost_us), [_policy(rule, ratios) for rule, ratios in costs.items()]


def _time(
    asks: Router,
    workload: Any,
    device: devices.Device,
    name: str,
    calls: int,
    choice: Choice,
    precisions: Sequence[str],
) -> float:
    """Expected time of one of so many calls of a candidate, infinite where it takes none or nothing is known of it."""
    from lab.study import routes

    if calls == 1:
        return choice.times_us.get(name, math.inf)
    part = replace(workload, axes={**workload.axes, asks.axis: workload[asks.axis] // calls})
    return routes.choose(asks, part, device, precisions).times_us.get(name, math.inf)


def _policy(rule: str, ratios: Sequence[tuple[float, str]]) -> Policy:
    known = [(ratio, where) for ratio, where in ratios if ratio < math.inf]
    mean = math.exp(sum(math.log(ratio) for ratio, _ in known) / len(known)) if known else math.nan
    worst = max(known, default=(math.nan, ""))
    return Policy(rule, len(known), len(ratios) - len(known), mean, *worst)


def run(asks: Router, device: devices.Device, arguments: Namespace) -> int:
    """Print both lists."""
    lost, rules = survey(asks, device, arguments.precision)
    if arguments.json:
        print_json(
            {"lost": [{**asdict(one), "lost_us": one.lost_us} for one in lost], "policies": list(map(asdict, rules))}
        )
        return 0
    print(f"{asks.family} on {device.id}: {len(lost)} places of public models are over {FAR:g} times their floor")
    for one in lost[:SHOWN]:
        axes = " ".join(f"{axis}={value}" for axis, value in one.axes.items())
        print(
            f"  {axes}: {one.candidate} {one.us:.1f} us ({one.how}), floor {one.floor_us:.1f}, "
            f"{one.us / one.floor_us:.1f}x; {', '.join(one.models)}"
        )
    for rule in rules:
        print(
            f"  rule: {rule.rule}: {rule.mean:.2f}x the router's time in the (geometric) mean of {rule.places} places, "
            f"{rule.worst:.1f}x at {rule.where}" + (f"; no kernel at {rule.refused}" if rule.refused else "")
        )
    return 0
