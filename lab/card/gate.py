"""A gate: the conditions that decide a phase, as data, and a reading: what the evidence says about one of them.

A gate is five lists of conditions in one grammar (metric, comparison, threshold, unit, workload); a list is named for
what happens when one of its conditions does not hold:

    correctness -> INVALID    complete -> BLOCKED    engaged -> VACUOUS    kill (when it holds) -> NO-GO
    require     -> NO-GO, NEUTRAL inside the noise, PARTIAL where workloads disagree

in that order of precedence; lab/judge/rules.py says how one is held against a reading.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr, replace

from lab.base import vocabulary

ROLES = ("correctness", "complete", "engaged", "kill", "require")
WEIGHED = ("kill", "require")  # the roles that the arrivals of a gate apply to; the others ask what ran, not how fast
ERRORS = ("relative_error", "nmse")  # metrics that exist of each output, and of the worst
OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}

Level = Annotated[float, Meta(ge=0, le=1e6)]


class Condition(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a gate.

    op:        between what is observed and the threshold.
    unit:      "%" for a change, else the metric's unit.
    threshold: a number in `unit`; or, when `than` names a metric, that metric's value on the same workload.
    compare:   "value" (the candidate's figure), "change" (candidate over control minus 1, in %) or
               "difference" (candidate minus control, in the metric's unit).
    workload:  the workload it is asked of, "" when the whole phase has one figure for it.
    stated_by: id of the recorded figure that states the threshold (`from` in a card), "" when the card declares it.
    arrival:   the arrival pattern of the load that it asks about ("staggered"), "" when any will do.
    share:     share of the timed region that the candidate changes; the threshold of a change is asked of it.
    against:   another workload, from whose candidate figure a change is then formed; "" for the control's.
    output:    the output that an error is asked of ("final_state"), "" for the largest over all outputs.
    """

    metric: str
    op: Literal["<", "<=", ">", ">=", "=="]
    unit: str
    threshold: float = math.nan
    compare: Literal["value", "change", "difference"] = "value"
    workload: str = ""
    than: str = ""
    stated_by: str = field(default="", name="from")
    arrival: str = ""
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    against: str = ""
    output: str = ""

    @property
    def of(self) -> str:
        """The metric as evidence names it."""
        return of_output(self.metric, self.output)

    def __str__(self) -> str:
        line = self.than or f"{short(self.threshold)} {self.unit}"
        where = f" at {self.workload}" if self.workload else ""
        where += f" against {self.against}" if self.against else ""
        where += f" under {self.arrival} arrivals" if self.arrival else ""
        where += f" of the {short(100 * self.share)} % of the region that it changes" if self.share < 1 else ""
        kind = "" if self.compare == "value" else f" {self.compare}"
        return f"{self.of}{kind} {self.op} {line}{where}"


class Noise(Struct, frozen=True, forbid_unknown_fields=True):
    """The noise rule of a gate: floor = max(floor_pct, sigmas * standard deviation of the control in %)."""

    floor_pct: Level = 2.0
    sigmas: Level = 3.0


class Gate(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Conditions by consequence, and the noise rule.

    arrival:  in a card only: that of every condition in WEIGHED which names none itself, and goes to them.
    modelled: marks an end-to-end gate judged from kernel rows.
    source:   the recorded verdict that states the criterion, or that nobody does; "" where the gate is no card's.
    reason:   why the lines lie where they do, for those that no source states; prose, and no part of the gate's hash.
    metric:   those that the vocabulary does not have; a card declares them for its gate and claims together.
    """

    correctness: tuple[Condition, ...] = ()
    complete: tuple[Condition, ...] = ()
    engaged: tuple[Condition, ...] = ()
    kill: tuple[Condition, ...] = ()
    require: tuple[Condition, ...] = ()
    noise: Noise = Noise()
    arrival: str = ""
    modelled: bool = False
    source: str = ""
    reason: str = ""
    metric: dict[str, vocabulary.Metric] = {}

    @property
    def metrics(self) -> Mapping[str, vocabulary.Metric]:
        """Every metric that its conditions may name."""
        return {**vocabulary.words().metric, **self.metric}

    def __post_init__(self) -> None:
        if self.arrival:
            for role in WEIGHED:
                asked = (c if c.arrival else replace(c, arrival=self.arrival) for c in getattr(self, role))
                force_setattr(self, role, tuple(asked))
            force_setattr(self, "arrival", "")

    def conditions(self) -> tuple[tuple[str, Condition], ...]:
        """Every condition with its role, in order of precedence."""
        return tuple((role, c) for role in ROLES for c in getattr(self, role))


class Reading(Struct, frozen=True):
    """What the evidence says about one metric on one workload.

    control, candidate: in `unit`; None when that arm is absent.
    change_pct:         candidate over control minus 1 in %, where the source printed only that, or, beside an
                        interval, formed block by block.
    control_sd_pct:     standard deviation of the control's repetitions in % of its mean, None when unknown.
    noise_pct:          a noise floor that the source measured for this very figure, in %.
    kind:               measured, stated, predicted, ceiling, floor, threshold or modelled; weakest of the figures used.
    ids:                the figures or rows it came from.
    control_launches, candidate_launches: kernel launches behind each arm's figure, None when unknown; where they
                        differ, a change is formed per launch, and says so.
    interval_pct:       confidence interval of the change, low and high in %, None when nothing was repeated.
    interval:           the same of the candidate's figure, in `unit`; difference: of candidate minus control.
    repeats:            placements, or blocks of the one, or repetitions behind the intervals, 0 when unknown.
    placements:         how many the intervals are over; 1: over the blocks of one, 0: the figure comes of no placement.
    unsettled:          why a figure over placements decides nothing yet (too few of them), "" when it may.
    slowed:             what held the GPU's clock down meanwhile and by how much the intervals are wider for it, "" when
                        nothing did; slowed_by: the factor by which that made a time longer at most.
    profiled:           taken under a profiler; such a throughput decides nothing.
    withdrawn:          why the source took a figure back, "" when all stand.
    impossible:         why the figure cannot be true (faster than the device's peak), "" when it can.
    machine:            the GPU and its driver, "" when nobody says.
    arrival:            arrival pattern of the load it was taken under, "" when not every arm says; "burst and
                        staggered" when they differ.
    """

    unit: str
    control: float | None = None
    candidate: float | None = None
    change_pct: float | None = None
    control_sd_pct: float | None = None
    noise_pct: float | None = None
    kind: str = "measured"
    ids: tuple[str, ...] = ()
    withdrawn: str = ""
    impossible: str = ""
    control_launches: float | None = None
    candidate_launches: float | None = None
    interval_pct: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None
    difference: tuple[float, float] | None = None
    repeats: int = 0
    placements: int = 0
    unsettled: str = ""
    slowed: str = ""
    slowed_by: float = 1.0
    profiled: bool = False
    machine: str = ""
    arrival: str = ""


Evidence = Mapping[tuple[str, str], Reading]
"""(metric, workload) -> Reading; the metric of one output is named by `of_output`."""


def of_output(metric: str, output: str) -> str:
    """The key of a metric in evidence: the metric, or "metric of output"."""
    return f"{metric} of {output}" if output else metric


def arrival_of(words: Iterable[str]) -> str:
    """The arrivals of a reading from those of its figures: "" where one does not say, joined where they differ."""
    stated = set(words)
    different = sorted(stated - {""})
    return " and ".join(different) if len(different) > 1 or "" not in stated else ""


def short(number: float) -> str:
    """A number as sentences print it: six digits, no trailing zeros."""
    return f"{number:.6g}"


def gate_text(gate: Gate) -> str:
    """A gate in one line: what is required, then what kills it."""
    parts = [str(c) for c in gate.require]
    parts += [f"not ({c})" for c in gate.kill]
    return "; ".join(dict.fromkeys(parts))
