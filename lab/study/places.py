"""`lab routes FAMILY --survey`: by the time model, where public models lose most time, and what other rules would cost.

At every place of the calibration's pool (lab/study/calibrate.py) the router chooses by what was measured there or by
the fitted model. Lost is what its choice takes over the roofline of that choice; a place is listed where the best is
FAR from its floor, so that the list is where a better kernel would gain, not where a better choice would. A policy of
the family's route.py (the operand that was not collapsed, tiers by bandwidth) is charged what its own choice takes at
the same places over the router's. All of it is modelled: a place that matters is worth a card. `charged` is the same
at the places that were measured, place by place, which no card can hold: its gate compares two arms, not two rules.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from lab.base import devices
from lab.base.console import print_json
from lab.base.errors import BadInput
from lab.study import calibrate, choices

if TYPE_CHECKING:
    from kernels.routing import Router, Table

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
class Charged:
    """What the router chooses at a place and its time, and by rule (candidate, calls, us); us is inf without a kernel.

    floor_us: the roofline of the router's choice; how: Choice.how.
    """

    axes: Mapping[str, int]
    candidate: str
    us: float
    floor_us: float
    how: str
    rules: Mapping[str, tuple[str, int, float]]


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
    models = {place.axes: place.models for place in calibrate.pool(asks)}
    found: list[Lost] = []
    costs: dict[str, list[tuple[float, str]]] = {rule: [] for rule in asks.policies}
    for one in _charged(asks, device, map(dict, models), precisions):
        own = models[tuple(sorted(one.axes.items()))]
        if one.how != "predicted" and one.us > FAR * one.floor_us:
            found.append(Lost(one.axes, own, one.candidate, one.us, one.floor_us, one.how))
        for rule, (_, _, us) in one.rules.items():
            costs[rule].append((us / one.us, " ".join(f"{axis}={value}" for axis, value in one.axes.items())))
    return sorted(found, key=lambda one: -one.lost_us), [_policy(rule, ratios) for rule, ratios in costs.items()]


def charged(asks: Router, device: devices.Device) -> list[Charged]:
    """The router's choice and every rule's at each place of the device's table; BadInput without one."""
    places = [{**dict(shape), asks.axis: at} for shape, at in sorted(_known(asks, device).at)]
    return list(_charged(asks, device, places))


def _known(asks: Router, device: devices.Device) -> Table:
    from kernels import routing

    if known := routing.table(device.id, asks.family):
        return known
    what = f"nothing of {asks.family} was measured on {device.id}"
    raise BadInput("--survey", what, f"measure there first: lab routes {asks.family} --calibrate")


def _charged(
    asks: Router, device: devices.Device, at: Iterable[Mapping[str, int]], precisions: Sequence[str] = ()
) -> Iterator[Charged]:
    from kernels import routing

    _known(asks, device)
    peaks = {pipe: fact.base / 1e12 for pipe, fact in device.peaks.items()}
    read_gb_s = device.bandwidth.base / 1e9
    by_name = {c.name: c for c in choices.able(asks.family, device)}
    for axes in at:
        workload, _ = asks.asked({axis: str(value) for axis, value in axes.items()})
        try:
            choice = choices.choose(asks, workload, device, precisions)
        except ValueError:  # no candidate takes it
            continue
        floor = routing.roofline_us(asks.cost(workload, by_name[choice.candidate]), read_gb_s, peaks)
        rules = {}
        for rule, policy in asks.policies.items():
            name, calls = policy(workload, read_gb_s)
            times = choice.times_us
            if calls > 1:
                part = replace(workload, axes={**workload.axes, asks.axis: workload[asks.axis] // calls})
                times = choices.choose(asks, part, device, precisions).times_us
            taken = calls * times.get(name, math.inf)
            rules[rule] = name, calls, taken
        us = choice.times_us.get(choice.candidate, math.inf)
        yield Charged(axes, choice.candidate, us, floor, choice.how, rules)


def _policy(rule: str, ratios: Sequence[tuple[float, str]]) -> Policy:
    known = [(ratio, where) for ratio, where in ratios if ratio < math.inf]
    mean = math.exp(sum(math.log(ratio) for ratio, _ in known) / len(known)) if known else math.nan
    worst = max(known, default=(math.nan, ""))
    return Policy(rule, len(known), len(ratios) - len(known), mean, *worst)


def run(asks: Router, device: devices.Device, arguments: Namespace) -> int:
    """Print both lists."""
    lost, rules = survey(asks, device, arguments.precision)
    if arguments.json:
        told = [{**asdict(one), "lost_us": one.lost_us} for one in lost]
        print_json({"lost": told, "policies": list(map(asdict, rules))})
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
