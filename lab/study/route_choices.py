"""The choice that a family's router makes for one shape on one device, as a user would get it, and what it rests on.

What a family routes by, and who may compete, its kernels/<family>/route.py says (ROUTER); the device is described by
data/devices.toml, with its datasheet's peaks and bandwidth, and the table is the stored one (lab/study/routes.py writes
it). A candidate is one of ours, or torch's, that the device could run: a kernel whose source is for one architecture
only is none elsewhere.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.base import devices
from lab.base.errors import BadInput, nearest
from lab.check import families
from lab.row import store
from lab.row.records import Measurement

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.common import Candidate
    from kernels.routing import Choice, Router

SAME = {"n_seqs"}  # axes that say where the columns came from: a router collapses them
OWN = {"cupy", "triton"}  # a rival library's arm is timed beside ours and never routed to; torch is always there


def router(family: str) -> Router:
    """What the family's route.py says of its question; BadInput where there is no such family or no such file."""
    if family not in families.names():
        raise BadInput("lab routes", f'no family is named "{family}"', nearest(family, families.names()))
    families.load(family)
    try:
        found: Router = importlib.import_module(f"kernels.{family}.route").ROUTER
        return found
    except ModuleNotFoundError:
        what = f"{family} has no router: nothing there chooses between kernels by shape"
        raise BadInput("lab routes", what, f"write kernels/{family}/route.py with a ROUTER") from None


def able(family: str, device: devices.Device) -> tuple[Candidate, ...]:
    """Our candidates that could run on a device, and torch's: by its capability, and by what their sources are for."""
    here = "sm_{}{}a".format(*device.capability)
    found = []
    for c in families.load(family).candidates.values():
        module = sys.modules[getattr(c.run, "func", c.run).__module__]
        only = {source.architecture for source in getattr(module, "CUDA_SOURCES", ())} - {""}
        if set(c.needs.packages) <= OWN and device.capability >= c.needs.capability and (not only or here in only):
            found.append(c)
    return tuple(found)


def check_precisions(family: str, precisions: Sequence[str]) -> list[str]:
    """The precisions that the family takes by name; BadInput when one of `precisions` is none of them."""
    asks = router(family)
    ours = [c for c in families.load(family).candidates.values() if set(c.needs.packages) <= OWN and not c.no_route]
    named = {c.precision for c in ours} if asks.stored else ()
    known = sorted({*asks.opt_in, *named})
    for word in precisions:
        if word not in known:
            remedy = nearest(word, known) if known else "leave it out: all compete"
            raise BadInput("--precision", f'"{word}" is none that {family} takes by name', remedy)
    return known


def predictions(family: str, device: devices.Device, precisions: Sequence[str] = ()) -> list[dict[str, Any]]:
    """As `crossovers`, for a device without rows: the roofline's times of every shape that is measured elsewhere."""
    from kernels.common import Workload

    asks = router(family)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for w in families.load(family).cases.WORKLOADS:
        if w.role == "measure" and all(w.axes.get(axis) == value for axis, value in asks.fixed.items()):
            plain = Workload(w.id, {a: v for a, v in w.axes.items() if a not in SAME}, w.role, w.inputs, w.source)
            try:
                choice = choose(asks, plain, device, precisions)
            except ValueError:
                continue  # no candidate takes it: other weights
            if not choice.times_us:
                continue
            shape = {axis: int(w[axis]) for axis in sorted(asks.shape)}
            place = entry(asks.axis, shape, int(w[asks.axis]), choice.times_us) | {"best": choice.candidate}
            found[(*shape.values(), int(w[asks.axis]))] = place
    if not found:
        what = f"{device.id} has no peak for what the candidates of {family} run on"
        raise BadInput(devices.FILE, what, f"it has {', '.join(device.peaks) or 'none'}; add one with its source")
    return [found[key] for key in sorted(found)]


def choose(asks: Router, workload: Any, device: devices.Device, precisions: Sequence[str] = ()) -> Choice:
    """What the family's router takes for a workload on a device; ValueError where it takes nothing."""
    from kernels import routing

    peaks = {pipe: fact.base / 1e12 for pipe, fact in device.peaks.items()}
    read_gb_s = device.bandwidth.base / 1e9
    candidates = able(asks.family, device)
    return routing.route(asks, workload, device.id, candidates, read_gb_s, peaks, None, precisions)


def errors(names: Iterable[str], rows: Iterable[Measurement]) -> dict[str, dict[str, tuple[float, float]]]:
    """candidate -> inputs in words -> (lowest, highest) relative error of the sound rows."""
    found: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in names}
    for row in rows:
        if row.name in found and row.ok and row.relative_error is not None:
            by, error = found[row.name], row.relative_error
            low, high = by.get(row.inputs, (error, error))
            by[row.inputs] = min(low, error), max(high, error)
    return {name: by for name, by in found.items() if by}


def answer(
    family: str, device: devices.Device, words: Mapping[str, str], precisions: Sequence[str] = ()
) -> dict[str, Any]:
    """The choice for the shape that AXIS=VALUE words give, from the stored table, as plain data.

    Raises BadInput for words that are no shape of the family and where no candidate takes it.
    """
    asks = router(family)
    try:
        workload, collapsed = asks.asked(words)
    except ValueError as problem:
        raise BadInput("lab routes", str(problem), f"ask as in: lab routes {family} --shape {asks.usage}") from None
    try:
        choice = choose(asks, workload, device, precisions)
    except ValueError as problem:
        raise BadInput("lab routes", str(problem)) from None
    times = choice.times_us
    others = [name for name in times if name != choice.candidate]
    worst = max(others, key=lambda name: times[name], default=None)
    own = times.get(choice.candidate)
    every = families.load(family).candidates
    optional = [name for name, c in every.items() if c.precision in asks.opt_in and not c.no_route]
    return {
        "family": family,
        "device": device.id,
        "asked": {axis: workload[axis] for axis in (asks.axis, *asks.shape)},
        "collapsed": collapsed,
        "candidate": choice.candidate,
        "precision": every[choice.candidate].precision,
        "how": choice.how,
        "us": own,
        "reason": choice.reason,
        "runner_up": others[0] if others else None,
        "cost_of_runner_up": times[others[0]] / own if others and own else None,
        "worst": worst,
        "cost_of_worst": times[worst] / own if worst and own else None,
        "times_us": dict(times),
        "left_out": dict(choice.left_out),
        "never": [name for name in choice.left_out if every[name].no_route],
        "override": variable(family) if os.environ.get(variable(family)) else None,
        "errors": errors((choice.candidate, *times, *optional), store.rows(family=family)),
    }


def variable(family: str) -> str:
    """The environment variable that overrides a family's router."""
    return f"KILLGATE_ROUTE_{family.upper()}"


def render(told: Mapping[str, Any]) -> str:
    """The choice in lines: what was collapsed, what was chosen and why, the price of another, who was left out."""
    shape = " ".join(f"{axis}={value}" for axis, value in told["asked"].items())
    time = f", {told['us']:.1f} us" if told["us"] is not None else ""
    lines = [f"{told['family']} on {told['device']}: {shape}", f"  collapsed   {told['collapsed']}"]
    lines += [f"  candidate   {told['candidate']} ({told['precision']}){time} ({told['how']})"]
    lines += [f"  reason      {told['reason']}"]
    if told["runner_up"] and told["us"] is not None:
        price = f"runner-up {told['runner_up']} {told['cost_of_runner_up']:.2f}x"
        lines += [f"  otherwise   {price}, worst {told['worst']} {told['cost_of_worst']:.2f}x"]
    for name, by in sorted(told["errors"].items()):
        seen = "; ".join(f"{_percent(*pair)} on {words.split(':')[0]}" for words, pair in sorted(by.items()))
        lines += [f"  error       {name}: {seen} (relative, in the rows)"]
    for why in dict.fromkeys(why for name, why in told["left_out"].items() if name not in told["never"]):
        names = ", ".join(name for name, reason in told["left_out"].items() if reason == why)
        lines += [f"  left out    {names}: {why}"]
    lines += [f"  never       {', '.join(told['never'])}: arms of a question, not kernels to choose between"]
    forced = "is set, see the reason" if told["override"] else "is not set; a candidate's name in it overrides"
    lines += [f"  override    {variable(told['family'])} {forced}"]
    empty = [word for word in ("collapsed", "never") if not told[word]]
    return "\n".join(line for line in lines if not line.lstrip().startswith(tuple(empty)))


def _percent(low: float, high: float) -> str:
    ends = [f"{100 * value:.2g}" for value in (low, high)]
    return (ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}") + " %"


def entry(axis: str, shape: Mapping[str, int], at: int, times: Mapping[str, float]) -> dict[str, Any]:
    """One place of a table: the fastest candidate, the time of each, and the cost of the worst choice."""
    best = min(times, key=lambda name: times[name])
    worst = max(times, key=lambda name: times[name])
    return {
        "shape": dict(shape),
        axis: at,
        "best": best,
        "times_us": dict(times),
        "worst": worst,
        "cost_of_worst": times[worst] / times[best],
    }


def words(shape: Sequence[str]) -> dict[str, str]:
    """AXIS=VALUE words as a mapping; BadInput for one that is none, or given twice."""
    found: dict[str, str] = {}
    for word in shape:
        axis, sign, value = word.partition("=")
        if not (axis and sign and value) or axis in found:
            what = f'"{word}" is given twice' if axis in found else f'"{word}" is no AXIS=VALUE'
            raise BadInput("--shape", what, "write a shape as in N=6144")
        found[axis] = value
    return found
