"""`lab verify BASELINE RUN`: a stored baseline held against a new run, in the spirit of a check before every commit.

A baseline is a JSON file of metrics, each with its unit and how far from the pinned value its line lies: 3 % for decode
and 5 % for prefill where nothing else is said. The run is the output of a known tool (lab/study/own); nothing is typed
over from one to the other. Milliseconds read as tokens per second make a baseline 400 times off: a unit must be stated,
must be the metric's and agree with the tool's own times, and a figure that fits as milliseconds and not as tokens per
second is refused. A metric that the run does not have is bad input too, never a pass.

Given up: statistics. The line is a fixed share and the figure a median, so that anybody can check it by hand.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lab.base import files, vocabulary
from lab.base.console import show
from lab.base.errors import BadInput, nearest
from lab.base.files import Positive
from lab.study import own
from lab.study.own.sample import Imported, Made, Sample, Word

LIMITS_PCT = {"decode_tps": 3.0, "prefill_tps": 5.0}
# What must be the same for two runs to be a comparison; a difference in anything else is said beside the result.
SAME = ("gpu_info", "model_filename", "model_type", "model_n_params")
TOKENS = {"decode_tps": "ntg", "prefill_tps": "npp"}  # metric -> the axis that holds the tokens behind one figure
FIT = 1.25  # a figure that lies this close to the baseline when read as milliseconds is milliseconds
FAR = 100.0  # and one this far off in its own unit is no regression but another quantity
AGAIN = "write it again with `lab verify --write`"


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of a baseline.

    shape:     the workload as the tool names it ("tg128", "ctx2048 npp2048"). unit: as in data/vocabulary.toml.
    value:     pinned, in `unit`; limit_pct: how far on its wrong side the line lies.
    """

    metric: str
    shape: str = ""
    unit: str
    value: Positive
    limit_pct: Annotated[float, Meta(gt=0, lt=100)]

    def __post_init__(self) -> None:
        known = vocabulary.words().metric
        if self.metric not in known:
            raise ValueError(f'metric = "{self.metric}" is unknown; {nearest(self.metric, known)}')
        if vocabulary.unit(self.unit) != known[self.metric].unit:
            raise ValueError(f'{self.name} has unit = "{self.unit}"; {self.metric} is in {known[self.metric].unit}')

    @property
    def name(self) -> str:
        """Metric and shape."""
        return f"{self.metric} {self.shape}".strip()

    @property
    def falls(self) -> bool:
        """Whether less is worse."""
        return vocabulary.words().metric[self.metric].better == "higher"

    @property
    def line(self) -> float:
        """The value from which on a run passes, in `unit`."""
        return self.value * (1 + (-1 if self.falls else 1) * self.limit_pct / 100)

    def passes(self, value: float) -> bool:
        """Whether a figure is at the line or on its good side."""
        return value >= self.line if self.falls else value <= self.line


class Baseline(msgspec.Struct, frozen=True):
    """A stored baseline: its pins, and model, GPU and build as the tool gave them."""

    schema: Literal[1]
    metrics: tuple[Pin, ...]
    tool: str = ""
    made: Made = Made()

    def __post_init__(self) -> None:
        names = [pin.name for pin in self.metrics]
        if not names:
            raise ValueError(f"pins no metric; {AGAIN}")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"pins {twice[0]} twice; keep one")


def load(path: Path) -> Baseline:
    """A baseline file; raises BadInput naming the file, the metric and the numbers for anything it must not hold."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise BadInput(path, f"is no baseline ({error})", AGAIN) from None
    return files.convert(raw, Baseline, path)


Key = tuple[str, str]  # metric, shape


@dataclass(frozen=True)
class Figure:
    """The median over the runs of one metric and shape, in `unit`, and the tokens behind it."""

    unit: str
    value: float
    tokens: int


def shape(sample: Sample) -> str:
    """A figure's workload in one short phrase: the tool's own name for it, or its axes."""
    if "test" in sample.axes:
        return str(sample.axes["test"])
    return " ".join(f"{k}={v}" if isinstance(v, str) else f"{k}{v}" for k, v in sorted(sample.axes.items()))


def figures(imported: Sequence[Imported]) -> dict[Key, Figure]:
    """(metric, shape) -> its figure; raises BadInput for a figure without a unit, one that contradicts its own time,
    and one shape in two configurations."""
    groups: dict[Key, list[Sample]] = {}
    for sample in (s for f in imported for s in f.samples if s.status == "ok"):
        if sample.wrong:
            raise BadInput(sample.at.path, sample.wrong.partition(": ")[2] or sample.wrong, "repeat that run")
        if not sample.unit:
            what = f"nothing confirms the unit of {sample.metric}"
            raise BadInput(str(sample.at), what, "give a file that holds the times too")
        same = groups.setdefault((sample.metric, shape(sample)), [])
        same.append(sample)
        here, before = sample.settings, same[0].settings
        if differing := sorted(k for k in {*here, *before} if here.get(k) != before.get(k)):
            what = f"{sample.metric} {shape(sample)} is there in two configurations ({', '.join(differing[:4])})"
            raise BadInput(sample.at.path, what, "give one configuration a run")
    return {
        (metric, of): Figure(
            same[0].unit,
            statistics.median(statistics.median(s.values) for s in same),
            int(same[0].axes.get(TOKENS.get(metric, ""), 0)),
        )
        for (metric, of), same in groups.items()
    }


def made(found: Sequence[Imported]) -> dict[str, Word]:
    """Model, GPU and build of the files; raises BadInput when two files disagree on what must be the same."""
    whole: dict[str, Word] = {}
    for sample in (s for f in found for s in f.samples):
        for key, value in sample.made.stated().items():
            if key in SAME and whole.get(key, value) != value:
                what = f"{key} is {value} here and {whole[key]} before"
                raise BadInput(sample.at.path, what, "give runs of one setup")
            whole.setdefault(key, value)
    return whole


@dataclass(frozen=True)
class Result:
    """One metric of the run against its pin."""

    name: str
    unit: str
    pinned: float
    line: float
    value: float
    change_pct: float
    status: Literal["pass", "regression"]

    def __str__(self) -> str:
        against = f"{self.value:.6g} {self.unit} against {self.pinned:.6g} ({self.change_pct:+.2f} %)"
        return f"{self.status:10} {self.name}: {against}, line {self.line:.6g}"


def plausible(pin: Pin, figure: Figure, where: str | Path) -> None:
    """Raises BadInput when a figure is in another unit than the pin, or is no such quantity at all."""
    if vocabulary.unit(figure.unit) != vocabulary.unit(pin.unit):
        raise BadInput(where, f"{pin.name} is in {figure.unit}", f"the baseline has it in {pin.unit}")
    low, high = sorted((figure.value, pin.value))
    # T tokens at x tok/s take 1000 T / x ms, and the reverse: when the two multiply to 1000 T, one of them is a time.
    product = low * high / (1000 * figure.tokens) if figure.tokens else 0.0
    if vocabulary.unit(pin.unit) == "tok/s" and 1 / FIT < product < FIT < high / low:
        what = f"{pin.name}: {figure.value:g} {pin.unit} in the run, {pin.value:g} in the baseline, and "
        what += f"{figure.tokens} tokens in {low:g} ms are {1000 * figure.tokens / low:.6g} tok/s"
        raise BadInput(where, what, f"one of {low:g} and {high:g} is milliseconds: read that one again")
    if high / low > FAR:
        what = f"{pin.name}: {figure.value:g} against {pin.value:g} {pin.unit}, more than {FAR:g} times apart"
        raise BadInput(where, what, "check what was measured, and in which unit")


def hold(baseline: Baseline, found: Mapping[Key, Figure], where: str | Path) -> list[Result]:
    """Every pin against the run, in the baseline's order; raises BadInput for one that the run does not have."""
    results = []
    for pin in baseline.metrics:
        figure = found.get((pin.metric, pin.shape))
        if figure is None:
            known = ", ".join(" ".join(key).strip() for key in found)
            raise BadInput(where, f"has no {pin.name}, which the baseline pins", f"it has {known}")
        plausible(pin, figure, where)
        change = 100 * (figure.value - pin.value) / pin.value
        status: Literal["pass", "regression"] = "pass" if pin.passes(figure.value) else "regression"
        results.append(Result(pin.name, pin.unit, pin.value, pin.line, figure.value, change, status))
    return results


def other_setup(baseline: Baseline, tool: str, setup: Mapping[str, Word], where: str | Path) -> list[str]:
    """What differs in words; raises BadInput when tool, GPU or model are not the baseline's."""
    if baseline.tool and tool != baseline.tool:
        raise BadInput(where, f"is {tool}'s output", f"the baseline is {baseline.tool}'s")
    before = baseline.made.stated()
    changed = [key for key in sorted(before.keys() & setup.keys()) if before[key] != setup[key]]
    for key in SAME:
        if key in changed:
            raise BadInput(where, f"{key} is {setup[key]}", f"the baseline's is {before[key]}: pin another one")
    return [f"{key}: {before[key]} -> {setup[key]}" for key in changed]


def run(arguments: Namespace) -> int:
    """0 when every pin holds or a baseline was written, 1 on a regression."""
    read = [own.read(path) for path in arguments.runs]
    tools = sorted({f.tool for f in read})
    if len(tools) > 1:
        raise BadInput(arguments.runs[-1], f"mixes {' and '.join(tools)}", "give runs of one tool")
    found, where = figures(read), arguments.runs[0]
    notes, failed = list(dict.fromkeys(note for f in read for note in f.notes)), False
    if arguments.write:
        baseline = Baseline(1, _pins(arguments.limit, found), tools[0], msgspec.convert(made(read), Made))
        text = msgspec.json.format(msgspec.json.encode(baseline), indent=1).decode()
        files.write(arguments.baseline, text + "\n")
        lines = [f"pinned {p.name}: {p.value:.6g} {p.unit}, line {p.line:.6g}" for p in baseline.metrics]
        said: dict[str, Any] = {"written": str(arguments.baseline), "notes": notes}
    else:
        if arguments.limit:
            raise BadInput("lab verify", "--limit needs --write", "a baseline's lines are in its file")
        baseline = load(arguments.baseline)
        notes += other_setup(baseline, tools[0], made(read), where)
        results = hold(baseline, found, where)
        failed = any(r.status == "regression" for r in results)
        word = "regression" if failed else "pass"
        said = {"verdict": word, "results": [asdict(r) for r in results], "notes": notes}
        lines, notes = list(map(str, results)), [*notes, f"{word}: {arguments.baseline.name}"]
    show(arguments.json, lambda: said, lambda: "\n".join([*lines, *notes]))
    return int(failed)


def _pins(limits: Sequence[str], found: Mapping[Key, Figure]) -> tuple[Pin, ...]:
    """Every figure as a pin; limits: METRIC=PCT words. Raises BadInput for a metric that has no limit."""
    asked = dict(LIMITS_PCT)
    for word in limits:
        metric, _, pct = word.partition("=")
        try:
            asked[metric] = float(pct)
        except ValueError:
            raise BadInput(f"--limit {word}", "is not METRIC=PCT", "--limit decode_tps=3") from None
    if unlimited := [metric for metric, _ in found if metric not in asked]:
        raise BadInput("--limit", f"{unlimited[0]} has no limit", f"give --limit {unlimited[0]}=PERCENT")
    pins = [
        {"metric": metric, "shape": of, "unit": figure.unit, "value": figure.value, "limit_pct": asked[metric]}
        for (metric, of), figure in found.items()
    ]
    return tuple(files.convert(pin, Pin, "--limit") for pin in pins)
