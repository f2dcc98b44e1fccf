"""The choice for one shape, as a family's router makes it for a device: what it takes, what else it had, and why.

What a family routes by, and who may compete, its kernels/<family>/route.py says (ROUTER). Some precisions compete only
where they are asked for by name (`--precision`). What a device has no time of, or only one that says less, is carried
over from one of its compute capability by the difference of the two floors; where there is none either the roofline
answers. Both say so.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.base import devices, files
from lab.base.errors import BadInput, nearest
from lab.check import families
from lab.row import store
from lab.row.records import Measurement

if TYPE_CHECKING:  # kernels/ is imported late, so that a package that shadows it is told in one line
    from kernels.common import Candidate
    from kernels.routing import Choice, Facts, Router, Table

OWN = {"cupy", "triton"}  # a rival library's arm is timed beside ours and never routed to; torch is always there
Errors = dict[str, tuple[float, float]]  # inputs in words -> (lowest, highest) relative error


def router(family: str) -> Router:
    """What the family's route.py says of its question; BadInput where there is no such family or no such file."""
    files.called(family, dict.fromkeys(families.names()), "family", "lab routes")
    families.load(family)
    try:
        found: Router = importlib.import_module(f"kernels.{family}.route").ROUTER
        return found
    except ModuleNotFoundError:
        what = f"{family} has no router: nothing there chooses between kernels by shape"
        raise BadInput("lab routes", what, f"write kernels/{family}/route.py with a ROUTER") from None


def ours(family: str) -> dict[str, Candidate]:
    """Our candidates of a family, and torch's, by name."""
    return {name: c for name, c in families.load(family).candidates.items() if set(c.needs.packages) <= OWN}


def able(family: str, device: devices.Device) -> tuple[Candidate, ...]:
    """Those of them that could run on a device: by its capability, and by what their sources are for."""
    return tuple(c for c in ours(family).values() if not families.unfit(c, device.capability))


def check_precisions(family: str, precisions: Sequence[str]) -> list[str]:
    """The precisions that the family takes by name; BadInput when one of `precisions` is none of them."""
    asks = router(family)
    named = {c.precision for c in ours(family).values() if not c.no_route} if asks.stored else ()
    known = sorted({*asks.opt_in, *named})
    for word in precisions:
        if word not in known:
            remedy = nearest(word, known) if known else "leave it out: all compete"
            raise BadInput("--precision", f'"{word}" is none that {family} takes by name', remedy)
    return known


def choose(
    asks: Router, workload: Any, device: devices.Device, precisions: Sequence[str] = (), known: Table | None = None
) -> Choice:
    """What the family's router takes for a workload on a device; ValueError where it takes nothing.

    known: another table than the stored one; then all candidates of it compete, and nothing is carried over.
    """
    from kernels import routing
    from kernels.common import described_for

    here, source = facts(device), None
    candidates = able(asks.family, device)
    if known is not None:
        timed_ = {p.candidate for p in known.points}
        candidates = tuple(c for c in candidates if c.name in timed_)
        precisions = [*asks.opt_in, *{c.precision for c in candidates if asks.stored}]
    else:
        every = {name: facts(other) for name, other in devices.every().items()}
        source = routing.source(device.id, device.capability, asks.family, every)
    rates = here.read_gb_s, here.peak_tflop_s
    with described_for(device.capability):
        return routing.route(asks, workload, device.id, candidates, *rates, known, precisions, here.sms, source)


def facts(device: devices.Device) -> Facts:
    """What a router asks of a device, by what the data and one's own files say."""
    from kernels.routing import Facts

    peaks = {pipe: fact.base / 1e12 for pipe, fact in device.peaks.items()}
    capability = device.capability if device.compute_capability else (0, 0)
    read_gb_s = device.bandwidth.base / 1e9 if device.memory_bandwidth else 0.0
    return Facts(capability, read_gb_s, peaks, int(device.sms.base) if device.sms else 0)


def errors(names: Iterable[str], rows: Iterable[Measurement]) -> dict[str, Errors]:
    """candidate -> inputs in words -> (lowest, highest) relative error of the sound rows."""
    found: dict[str, Errors] = {name: {} for name in names}
    for row in rows:
        if row.name in found and row.ok and row.relative_error is not None:
            by, error = found[row.name], row.relative_error
            low, high = by.get(row.inputs, (error, error))
            by[row.inputs] = min(low, error), max(high, error)
    return {name: by for name, by in found.items() if by}


def answer(
    family: str, device: devices.Device, words: Mapping[str, str], precisions: Sequence[str] = ()
) -> dict[str, Any]:
    """The choice for the shape that AXIS=VALUE words give, from the stored table, as `--json` prints it.

    us: expected time, None where nothing is known; interval_us: of 90 %, where it is the fitted model's and one was
    shown; cost_of_*: another's time over it. collapsed: what of the words was. left_out: candidates that were not
    compared, and why; never: those of them that no router takes. override: the environment variable that forced the
    choice. errors: candidate -> relative errors of its sound rows.

    Raises BadInput for words that are no shape of the family, where no candidate takes it, and where there is neither a
    time nor a bandwidth to compare by.
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
    if choice.how == "predicted":
        _ = device.bandwidth  # refused without one: nothing was compared
    times, own, fit = choice.times_us, choice.times_us.get(choice.candidate), choice.fitted.get(choice.candidate)
    others = [name for name in times if name != choice.candidate]
    runner_up, worst = next(iter(others), None), max(others, key=times.__getitem__, default=None)
    every = families.load(family).candidates
    unfit = {name: why for name, c in ours(family).items() if (why := families.unfit(c, device.capability))}
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
        "interval_us": [round(x, 3) for x in (fit.low, fit.high)] if fit and fit.shown else None,
        "reason": choice.reason,
        "runner_up": runner_up,
        "cost_of_runner_up": times[runner_up] / own if runner_up and own else None,
        "worst": worst,
        "cost_of_worst": times[worst] / own if worst and own else None,
        "times_us": dict(times),
        "left_out": {**choice.left_out, **unfit},
        "never": [name for name in choice.left_out if every[name].no_route],
        "override": variable(family) if os.environ.get(variable(family)) else None,
        "errors": errors(dict.fromkeys([choice.candidate, *times, *optional]), store.rows(family=family)),
    }


def variable(family: str) -> str:
    """The environment variable that overrides a family's router."""
    return f"KILLGATE_ROUTE_{family.upper()}"


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


def rendered(found: Mapping[str, Any]) -> str:
    """An `answer` as text."""
    shape = " ".join(f"{axis}={value}" for axis, value in found["asked"].items())
    time = f", {found['us']:.1f} us" if found["us"] is not None else ""
    time += " ({:.1f} to {:.1f})".format(*found["interval_us"]) if found["interval_us"] else ""
    lines = [f"{found['family']} on {found['device']}: {shape}"]
    lines += [f"  collapsed   {found['collapsed']}"] if found["collapsed"] else []
    lines += [f"  candidate   {found['candidate']} ({found['precision']}){time} ({found['how']})"]
    lines += [f"  reason      {found['reason']}"]
    if found["runner_up"] and found["us"] is not None:
        price = f"runner-up {found['runner_up']} {found['cost_of_runner_up']:.2f}x"
        lines += [f"  otherwise   {price}, worst {found['worst']} {found['cost_of_worst']:.2f}x"]
    for name, by in sorted(found["errors"].items()):
        seen = "; ".join(f"{_percent(*pair)} on {words.split(':')[0]}" for words, pair in sorted(by.items()))
        lines += [f"  error       {name}: {seen} (relative, in the rows)"]
    left_out, never = found["left_out"], found["never"]
    for why in dict.fromkeys(why for name, why in left_out.items() if name not in never):
        lines += [f"  left out    {', '.join(n for n, w in left_out.items() if w == why)}: {why}"]
    if never:
        lines += [f"  never       {', '.join(never)}: arms of a question, not kernels to choose between"]
    forced = "is set, see the reason" if found["override"] else "is not set; a candidate's name in it overrides"
    return "\n".join([*lines, f"  override    {variable(found['family'])} {forced}"])


def _percent(low: float, high: float) -> str:
    ends = [f"{100 * value:.2g}" for value in (low, high)]
    return (ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}") + " %"


# A family's table from its rows ---------------------------------------------------------------------------------------
