"""`lab verify BASELINE RUN`: a stored baseline held against a new run, in the spirit of a check before every commit.

A baseline is a JSON file of metrics, each with its unit, its direction and its line: a share below (or above) the
pinned value, 3 % for decode and 5 % for prefill where nothing else is said, or a plain gate as for the ratio of CUDA
graphs on to off. The run is the output of a known tool (lab/interop); nothing is typed over from one to the other.

Two ways of going wrong were paid for by others and are refused here. A line inside the range of healthy runs
(lab/study/baselines.py). And milliseconds read as tokens per second, which make a baseline 400 times off that flags
nothing or everything: a unit must be stated, must be the metric's, must agree with the tool's own times, and a figure
that fits as milliseconds and not as tokens per second is refused.

Exit status: 0 everything holds, 1 a regression, 2 bad input. A metric that the run does not have is bad input, never a
pass. Given up: statistics. The line is a fixed share and the figure a median, so that anybody can check it by hand.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.base import vocabulary
from lab.base.console import print_json
from lab.base.errors import BadInput, nearest
from lab.bench import provenance
from lab.study import own
from lab.study.baselines import Baseline, Pin, checked, load, span, store
from lab.study.own.sample import Imported, Sample

LIMITS_PCT = {"decode_tps": 3.0, "prefill_tps": 5.0}
RATIO = "graphs_ratio"
GRAPHS_GATE = 1.3  # a fallback to launching every step gives about 1.0
# What must be the same for two runs to be a comparison; a difference in anything else is said beside the result.
SAME = ("gpu_info", "model_filename", "model_type", "model_n_params")
TOKENS = {"decode_tps": "ntg", "prefill_tps": "npp"}  # metric -> the axis that holds the tokens behind one figure
FIT = 1.25  # a figure that lies this close to the baseline when read as milliseconds is milliseconds
FAR = 100.0  # and one this far off in its own unit is no regression but another quantity


@dataclass(frozen=True)
class Result:
    """One metric of the run against its pin. status: "pass" or "regression"."""

    name: str
    unit: str
    pinned: float
    line: float
    value: float
    change_pct: float
    status: str


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """One metric and shape of the run files: the median of each run, in `unit`, and the tokens behind a figure."""

    unit: str
    runs: tuple[float, ...]
    tokens: int

    @property
    def value(self) -> float:
        """Median over the runs."""
        return statistics.median(self.runs)


def shape(sample: Sample) -> str:
    """A figure's workload in one short phrase: the tool's own name for it, or its axes."""
    if "test" in sample.axes:
        return str(sample.axes["test"])
    return " ".join(f"{k}={v}" if isinstance(v, str) else f"{k}{v}" for k, v in sorted(sample.axes.items()))


def figures(files: Sequence[Imported]) -> dict[tuple[str, str], Figures]:
    """(metric, shape) -> its figures; raises BadInput for a figure without a unit, one that contradicts its own time,
    and one shape in two configurations."""
    found: dict[tuple[str, str], list[Sample]] = {}
    for sample in (s for f in files for s in f.samples if s.status == "ok"):
        if sample.wrong:
            raise BadInput(sample.file, sample.wrong.partition(": ")[2] or sample.wrong, "repeat that run")
        if not sample.unit:
            what = f"line {sample.line}: nothing confirms the unit of {sample.metric}"
            raise BadInput(sample.file, what, "give a file that holds the times too")
        found.setdefault((sample.metric, shape(sample)), []).append(sample)
    return {key: _one(samples) for key, samples in found.items()}


def _one(samples: Sequence[Sample]) -> Figures:
    first = samples[0]
    for other in samples[1:]:
        differing = sorted(
            k for k in {*first.settings, *other.settings} if first.settings.get(k) != other.settings.get(k)
        )
        if differing:
            what = f"{first.metric} {shape(first)} is there in two configurations ({', '.join(differing[:4])})"
            raise BadInput(other.file, what, "give one configuration a run")
    tokens = first.axes.get(TOKENS.get(first.metric, ""), 0)
    return Figures(first.unit, tuple(statistics.median(s.values) for s in samples), int(tokens))


def made(files: Sequence[Imported]) -> dict[str, Any]:
    """Model, GPU and build of the files; raises BadInput when two files disagree on what must be the same."""
    whole: dict[str, Any] = {}
    for sample in (s for f in files for s in f.samples):
        for key, value in sample.made.items():
            if key in SAME and whole.get(key, value) != value:
                raise BadInput(sample.file, f"{key} is {value} here and {whole[key]} before", "give runs of one setup")
            whole.setdefault(key, value)
    return whole


def ratio(
    on: Mapping[tuple[str, str], Figures], off: Mapping[tuple[str, str], Figures]
) -> dict[tuple[str, str], Figures]:
    """Decode throughput with CUDA graphs over without, for every shape that both have; raises BadInput for none."""
    shared = [key for key in on if key in off and key[0] == "decode_tps"]
    if not shared:
        raise BadInput("--graphs-off", "has no decode figure of a shape that the run has", "give the same test twice")
    return {
        (RATIO, key[1]): Figures(vocabulary.metrics()[RATIO].unit, (on[key].value / off[key].value,), 0)
        for key in shared
    }


def plausible(pin: Pin, figure: Figures, where: str | Path) -> None:
    """Raises BadInput when a figure is in another unit than the pin, or is no such quantity at all."""
    if vocabulary.unit(figure.unit) != vocabulary.unit(pin.unit):
        raise BadInput(where, f"{pin.name} is in {figure.unit}", f"the baseline has it in {pin.unit}")
    apart = max(figure.value / pin.value, pin.value / figure.value)
    # T tokens at x tok/s take 1000 T / x ms, and the reverse: when the two multiply to 1000 T, one of them is a time.
    product = figure.value * pin.value / (1000 * figure.tokens) if figure.tokens else 0.0
    if vocabulary.unit(pin.unit) == "tok/s" and 1 / FIT < product < FIT < apart:
        low, high = sorted((figure.value, pin.value))
        what = (
            f"{pin.name}: {figure.value:g} {pin.unit} in the run, {pin.value:g} in the baseline, and {figure.tokens} "
        )
        what += f"tokens in {low:g} ms are {1000 * figure.tokens / low:.6g} tok/s"
        raise BadInput(where, what, f"one of {low:g} and {high:g} is milliseconds: read that one again")
    if apart > FAR:
        what = f"{pin.name}: {figure.value:g} against {pin.value:g} {pin.unit}, more than {FAR:g} times apart"
        raise BadInput(where, what, "check what was measured, and in which unit")


def hold(baseline: Baseline, found: Mapping[tuple[str, str], Figures], where: str | Path) -> list[Result]:
    """Every pin against the run, in the baseline's order; raises BadInput for one that the run does not have."""
    results = []
    for pin in baseline.pins:
        figure = found.get((pin.metric, pin.shape))
        if figure is None:
            known = ", ".join(" ".join(key).strip() for key in found)
            flag = "; give --graphs-off FILE" if pin.metric == RATIO else ""
            raise BadInput(where, f"has no {pin.name}, which the baseline pins", f"it has {known}{flag}")
        plausible(pin, figure, where)
        value = figure.value
        change = 100 * (value - pin.value) / pin.value
        status = "pass" if pin.passes(value) else "regression"
        results.append(Result(pin.name, pin.unit, pin.value, pin.line, value, change, status))
    return results


def refuse_other_setup(baseline: Baseline, tool: str, setup: Mapping[str, Any], where: str | Path) -> list[str]:
    """What differs in words; raises BadInput when tool, GPU or model are not the baseline's."""
    if baseline.tool and tool != baseline.tool:
        raise BadInput(where, f"is {tool}'s output", f"the baseline is {baseline.tool}'s")
    for key in SAME:
        if key in baseline.made and key in setup and baseline.made[key] != setup[key]:
            raise BadInput(where, f"{key} is {setup[key]}", f"the baseline's is {baseline.made[key]}: pin another one")
    both = sorted((baseline.made.keys() & setup.keys()) - set(SAME))
    return [f"{k}: {baseline.made[k]} -> {setup[k]}" for k in both if baseline.made[k] != setup[k]]


# Writing --------------------------------------------------------------------------------------------------------------


def write(path: Path, found: Mapping[tuple[str, str], Figures], limits: Mapping[str, float], gate: float,
          healthy: Mapping[str, tuple[float, float]], files: Sequence[Imported]) -> Baseline:  # fmt: skip
    """Pin every figure and write the file in one step; the old one stays when anything is refused.

    limits: metric -> %; gate: for the graphs ratio; healthy: name of a pin -> its range, else that of repeated runs.
    """
    pins = []
    for (metric, of), figure in found.items():
        ruled: dict[str, float] = {"gate": gate} if metric == RATIO else {"limit_pct": limits.get(metric, math.nan)}
        if math.isnan(ruled.get("limit_pct", 0.0)):
            raise BadInput("--limit", f"{metric} has no limit", f"give --limit {metric}=PERCENT")
        name = f"{metric} {of}".strip()
        runs = figure.runs if len(figure.runs) > 1 else ()
        better = vocabulary.metrics()[metric].better
        pin = Pin(
            metric, of, figure.unit, better, figure.value, healthy=healthy.get(name, span(runs)), runs=runs, **ruled
        )
        pins.append(checked(path, pin))
    for name in healthy:
        if name not in {p.name for p in pins}:
            raise BadInput("--healthy", f'no figure is called "{name}"', nearest(name, [p.name for p in pins]))
    baseline = Baseline(files[0].tool, made(files), _provenance(files), tuple(pins))
    store(path, baseline)
    return baseline


def _provenance(files: Sequence[Imported]) -> dict[str, Any]:
    head, dirty = provenance.commit()
    names = [{"file": f.path.name, "sha256": hashlib.sha256(f.path.read_bytes()).hexdigest()} for f in files]
    when = [s.when for f in files for s in f.samples if s.when]
    measured = {"measured": [min(when), max(when)]} if when else {}
    written = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"written": written, **measured, "killgate": head, "dirty": dirty, "files": names}


# The command ----------------------------------------------------------------------------------------------------------


def add(command: Callable[..., ArgumentParser]) -> None:
    """Add `lab verify`; `command(name, run, text)` makes a parser."""
    parser = command("verify", run, "a stored baseline against a new run: 0 pass, 1 regression, 2 bad input")
    parser.add_argument("baseline", type=Path)
    parser.add_argument(
        "runs", type=Path, metavar="RUN", nargs="+", help="llama-bench, llama-batched-bench or ds4-bench output"
    )
    parser.add_argument("--graphs-off", type=Path, metavar="FILE", help="the same run with CUDA graphs off")
    parser.add_argument("--write", action="store_true", help="write the baseline from the runs; several give its range")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="METRIC=PCT", help="default decode 3, prefill 5"
    )
    parser.add_argument("--graphs-gate", type=float, default=GRAPHS_GATE, metavar="X", help="with --write (1.3)")
    parser.add_argument(
        "--healthy", action="append", default=[], metavar='"METRIC SHAPE=LOW:HIGH"', help="with --write"
    )


def run(arguments: Namespace) -> int:
    """0 when every pin holds or a baseline was written, 1 on a regression."""
    files = [own.read(path) for path in arguments.runs]
    tools = sorted({f.tool for f in files})
    if len(tools) > 1:
        raise BadInput(arguments.runs[-1], f"mixes {' and '.join(tools)}", "give runs of one tool")
    found, where = figures(files), arguments.runs[0]
    off = [own.read(arguments.graphs_off)] if arguments.graphs_off else []
    if off:
        found |= ratio(found, figures(off))
    setup = made([*files, *off])
    notes = list(dict.fromkeys(n for f in (*files, *off) for n in f.notes))
    if arguments.write:
        limits = {**LIMITS_PCT, **dict(_pair("--limit", w, float) for w in arguments.limit)}
        bands = dict(_pair("--healthy", w, _band) for w in arguments.healthy)
        baseline = write(arguments.baseline, found, limits, arguments.graphs_gate, bands, [*files, *off])
        lines = [f"pinned {p.name}: {p.value:.6g} {p.unit}, line {p.line:.6g}" for p in baseline.pins]
        _print(arguments.json, {"written": str(arguments.baseline), "notes": notes}, [*lines, *notes])
        return 0
    if arguments.limit or arguments.healthy:
        raise BadInput("lab verify", "--limit and --healthy need --write", "a baseline's lines are in its file")
    baseline = load(arguments.baseline)
    notes += refuse_other_setup(baseline, files[0].tool, setup, where)
    results = hold(baseline, found, where)
    word = "regression" if any(r.status == "regression" for r in results) else "pass"
    _print(arguments.json, {"verdict": word, "results": [asdict(r) for r in results], "notes": notes},
           [*(_said(r) for r in results), *notes, f"{word}: {arguments.baseline.name}"])  # fmt: skip
    return int(word == "regression")


def _said(r: Result) -> str:
    against = f"{r.value:.6g} {r.unit} against {r.pinned:.6g} ({r.change_pct:+.2f} %), line {r.line:.6g}"
    return f"{r.status:10} {r.name}: {against}"


def _print(as_json: bool, value: Mapping[str, Any], lines: Iterable[str]) -> None:
    if as_json:
        print_json(value)
    else:
        print("\n".join(lines))


def _pair(flag: str, word: str, read: Callable[[str], Any]) -> tuple[str, Any]:
    name, separator, rest = word.rpartition("=")
    try:
        if not separator or not name:
            raise ValueError(word)
        return name, read(rest)
    except ValueError:
        raise BadInput(f"{flag} {word}", "is not NAME=NUMBER", f"{flag} decode_tps=3, or NAME=266:278") from None


def _band(word: str) -> tuple[float, float]:
    low, high = (float(n) for n in word.split(":"))
    return low, high
