"""A profile as evidence: what `--metric METRIC:category=NAME` or `kernel=EXPRESSION` asks of it, through lab/trace.

The metric's unit says what is formed: "launches" how often it ran (engagements), "%" its share of the kernels' time
(`of=busy` or `of=span` for those), "us/tok" its time over `tokens=N`, "us/step" and "ms/step" over `steps=N` or the
steps of the window, "us/launch" over its own launches, a plain time over `calls=N`. With `speedup=N` a "%" is what
throughput gains at most when that part runs N times as fast (inf: not at all), by Amdahl's law, and a ceiling of the
control. Launches that are no multiple of `calls` are refused: a part of the calls is not in the file. `nvtx`, `time`,
`replay`, `step` and `steady=1` choose a window as `lab trace` does; `rules=FILE` adds categories. Several categories
are joined by +.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput, nearest, refuse_unknown
from lab.study.own.sample import Asked, Imported, Line, Made, Sample
from lab.trace import breakdowns, categories, exposed, files, report
from lab.trace.breakdowns import IDLE, Breakdown
from lab.trace.model import Trace

WINDOW = ("nvtx", "time", "replay", "step", "steady")
KEYS = ("category", "kernel", "of", "tokens", "steps", "calls", "speedup", "rules", *WINDOW)
COUNTS = {"tok": "tokens", "token": "tokens", "step": "steps", "": "calls", "call": "calls"}
US = {"us": 1.0, "ms": 1e-3, "s": 1e-6}


def read(path: Path, asked: Asked) -> Imported:
    """The figures that are asked of one profile; raises BadInput where none is, and for what cannot be formed."""
    trace, wanted = files.read(path), asked.of("category") | asked.of("kernel")
    if not wanted:
        remedy = "say what to read of it: --metric METRIC:category=NAME or --metric METRIC:kernel=EXPRESSION"
        raise BadInput(path, f"is a profile of {trace.tool}, and no metric is asked of it", remedy)
    notes: list[str] = []
    samples = [_figure(path, trace, metric, asked.units.get(metric, ""), how, notes) for metric, how in wanted.items()]
    return Imported(path, trace.tool, tuple(samples), tuple(dict.fromkeys(notes)))


def _figure(path: Path, trace: Trace, metric: str, unit: str, how: Mapping[str, str], notes: list[str]) -> Sample:
    flag = f"--metric {metric}"
    for key in how:
        refuse_unknown(flag, "key for a profile", key, KEYS)
    replay = how.get("replay")
    window: dict[str, Any] = {key: how.get(key) for key in ("device", "stream", "process", "nth", "graph", *WINDOW)}
    window["replay"] = None if replay is None else int(_count(flag, "replay", replay, least=-(2.0**31)))
    trace = report.windowed(trace, Namespace(**window))
    rules = categories.load(how.get("rules"))
    notes += [f"{path.name}: {warning}" for warning in trace.warnings]
    names = tuple(filter(None, how.get("category", "").split("+")))
    made = Made(
        gpu_info=", ".join(dict.fromkeys(filter(None, trace.gpus.values()))), compute_capability=trace.capability
    )
    sample = Sample(trace.tool, Line(path, 1), metric, unit, made=made)
    if "speedup" in how:
        by = _count(flag, "speedup", how["speedup"])
        share = exposed.what_if(trace, rules, names, how.get("kernel", "")).share.high
        left = 1.0 - share * (1.0 - 1.0 / by)
        if unit != "%" or left <= 0:
            what = f"a gain of {share:.0%} sped up {by:g} times is no figure in {unit}"
            raise BadInput(flag, what, "leave speedup out")
        return replace(sample, values=(100.0 * (1.0 / left - 1.0),), kind="ceiling")
    whole = breakdowns.from_trace(trace, rules)
    if len(trace.graphs):
        what = f"{len(trace.graphs)} opaque graphs may hold more of {metric} than the file names"
        raise BadInput(path, what, "capture with --cuda-graph-trace=node")
    if not trace.timeline and (timeless := int((trace.kernels.duration_ns == 0).sum())) and unit != "launches":
        raise BadInput(path, f"{timeless} of its kernels have no time", "export them with gpu__time_duration.sum")
    us, launches = _part(flag, whole, rules, names, how.get("kernel", ""))
    if unit == "launches":
        return replace(sample, values=(launches,))
    if unit == "%":
        return replace(sample, values=(100.0 * us / _whole(flag, whole, rules, how.get("of", "kernels")),))
    time, _, per = unit.partition("/")
    if time not in US or not (per == "launch" or per in COUNTS):
        raise BadInput(flag, f'is in "{unit}", which no profile gives', "launches, %, us/tok, us/step, us/launch or us")
    if not launches:  # a share or a count may be zero, but a time of nothing would be the fastest there is
        said = ", ".join(f"{key} {how[key]}" for key in ("category", "kernel") if key in how)
        raise BadInput(path, f"holds nothing of {metric} ({said})", "see `lab trace` for its names")
    over = launches
    if per != "launch":
        key = COUNTS[per]
        stated = how.get(key) or (str(trace.steps) if key == "steps" and trace.steps else "")
        if not stated:
            raise BadInput(flag, f"is in {unit}, and nothing says over how many {key}", f"add {key}=N")
        over = _count(flag, key, stated)
        if key == "calls" and launches % over:
            what = f"{launches:g} launches of {metric} are no multiple of calls = {over:g}"
            raise BadInput(path, what, "give calls=N as the file holds them, or capture all of them")
    load = {} if per == "launch" else {"launches": launches}
    return replace(sample, values=(us * US[time] / over,), load=load)


def _count(flag: str, key: str, text: str, least: float = 0.0) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value > least:
        raise BadInput(flag, f"{key} = {text} is no count", f"give {key}=N above zero")
    return value


def _part(
    flag: str, whole: Breakdown, rules: categories.Rules, names: tuple[str, ...], kernel: str
) -> tuple[float, float]:
    """(us, launches) of these categories and of the kernels that the expression finds outside them."""
    parts = [*whole.parts, *whole.nested]
    known = {*rules.categories, *(part.category for part in parts)}
    for name in names:
        refuse_unknown(flag, "category", name, known)
    pattern = exposed.expression(kernel, flag) if kernel else None
    found = [(part.value, part.count or 0.0) for part in parts if part.category in names]
    found += [
        (us, whole.launches[name])
        for name, us in whole.kernels.items()
        if pattern and pattern.search(name) and rules.category(name) not in names
    ]
    return sum(us for us, _ in found), sum(count for _, count in found)


def _whole(flag: str, whole: Breakdown, rules: categories.Rules, of: str) -> float:
    idle = next((part.value for part in whole.parts if part.category == IDLE), None)
    kernels = sum(us for name, us in whole.kernels.items() if rules.busy(rules.category(name)))
    found = {"kernels": kernels}
    if idle is not None and whole.total:
        found |= {"busy": whole.total - idle, "span": whole.total}
    if not found.get(of):
        raise BadInput(flag, f'of = "{of}" is no time of this profile', nearest(of, found))
    return found[of]
