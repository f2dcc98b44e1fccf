"""The judge: a gate declared beforehand and what the evidence reads, to one verdict word and the sentence behind it.

A gate is five lists of conditions in one grammar (metric, comparison, threshold, unit, workload); a list is named for
what happens when one of its conditions does not hold:

    correctness -> INVALID    complete -> BLOCKED    engaged -> VACUOUS    kill (when it holds) -> NO-GO
    require     -> NO-GO, NEUTRAL inside the noise, PARTIAL where workloads disagree

in that order of precedence, after INVALID for a withdrawn figure or a unit that disagrees, and BLOCKED for a figure
that is not there. The judge is pure: no files, no clock, no GPU, so every rule is property-tested on the CPU.

Noise. The floor of a change is max(2 %, 3 sigma of the control) unless the card says otherwise. A threshold outside
the floor is a plain line: met or missed. A threshold inside it (zero, or "not worse than 1 %") asks for an effect
beyond the floor, and what lies within is NEUTRAL; "not worse" is met by its figure, and the finding says that its line
lies inside the floor. A kill condition must be exceeded by the declared floor to count at
all; when the measured noise reaches over it, nobody can tell whether it fired, and the verdict is at most NEUTRAL.
So more noise can turn GO or NO-GO into NEUTRAL and never NO-GO into GO.

Arrivals. A scheduler that protects running requests from new ones shows nothing when all requests come at once. A
condition may name the arrivals it asks about; a figure taken under others, or one that does not say, is no evidence for
it (BLOCKED), and arms taken under different arrivals are no comparison for any gate.

Share. A benchmark that times much more than the candidate changes cannot see it. A condition may say which share of the
timed region the candidate changes; its threshold is then asked of that share, and BLOCKED is returned where meeting it
would move the region by less than the noise floor.

Against. A change usually runs from the control to the candidate on one workload. With `against` it runs from another
workload to this one in the candidate's own figures: how something grows with the context, the batch or the chunk.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

ROLES = ("correctness", "complete", "engaged", "kill", "require")
COMPARISONS = ("value", "change", "difference")
ERRORS = ("relative_error", "nmse")  # metrics that exist of each output, and of the worst
OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True)
class Condition:
    """One line of a gate.

    compare:   "value" (the candidate's figure), "change" (candidate over control minus 1, in %) or
               "difference" (candidate minus control, in the metric's unit).
    op:        one of OPERATORS, between what is observed and the threshold.
    threshold: a number in `unit`; or, when `than` names a metric, that metric's value on the same workload.
    unit:      "%" for a change, else the metric's unit.
    workload:  the workload it is asked of, "" when the whole phase has one figure for it.
    stated_by: id of the recorded figure that states the threshold, "" when the card declares it.
    arrival:   the arrival pattern of the load that it asks about ("staggered"), "" when any will do.
    share:     share of the timed region that the candidate changes, 0 to 1; the threshold of a change is asked of it.
    against:   another workload, from whose candidate figure a change is then formed; "" for the control's.
    output:    the output that an error is asked of ("final_state"), "" for the largest over all outputs.
    """

    metric: str
    op: str
    unit: str
    threshold: float = math.nan
    compare: str = "value"
    workload: str = ""
    than: str = ""
    stated_by: str = ""
    arrival: str = ""
    share: float = 1.0
    against: str = ""
    output: str = ""

    @property
    def of(self) -> str:
        """The metric as evidence names it."""
        return of_output(self.metric, self.output)

    def __str__(self) -> str:
        line = self.than or f"{_short(self.threshold)} {self.unit}"
        where = f" at {self.workload}" if self.workload else ""
        where += f" against {self.against}" if self.against else ""
        where += f" under {self.arrival} arrivals" if self.arrival else ""
        where += f" of the {_short(100 * self.share)} % of the region that it changes" if self.share < 1 else ""
        kind = "" if self.compare == "value" else f" {self.compare}"
        return f"{self.of}{kind} {self.op} {line}{where}"


@dataclass(frozen=True)
class Noise:
    """The noise rule of a gate: floor = max(floor_pct, sigmas * standard deviation of the control in %)."""

    floor_pct: float = 2.0
    sigmas: float = 3.0


@dataclass(frozen=True)
class Gate:
    """Conditions by consequence, and the noise rule. `modelled` marks an end-to-end gate judged from kernel rows."""

    correctness: tuple[Condition, ...] = ()
    complete: tuple[Condition, ...] = ()
    engaged: tuple[Condition, ...] = ()
    kill: tuple[Condition, ...] = ()
    require: tuple[Condition, ...] = ()
    noise: Noise = field(default_factory=Noise)
    modelled: bool = False

    def conditions(self) -> tuple[tuple[str, Condition], ...]:
        """Every condition with its role, in order of precedence."""
        return tuple((role, c) for role in ROLES for c in getattr(self, role))


@dataclass(frozen=True)
class Reading:
    """What the evidence says about one metric on one workload.

    control, candidate: in `unit`; None when that arm is absent.
    change_pct:         candidate over control minus 1 in %, where the source printed only that, or, beside an
                        interval, formed block by block.
    control_sd_pct:     standard deviation of the control's repetitions in % of its mean, None when unknown.
    noise_pct:          a noise floor that the source measured for this very figure, in %.
    kind:               measured, predicted, ceiling, floor, threshold or modelled; weakest of the figures used.
    ids:                the figures or rows it came from.
    control_launches, candidate_launches: kernel launches behind each arm's figure, None when unknown; where they
                        differ, a change is formed per launch, and says so.
    interval_pct:       bootstrap confidence interval of the change, low and high in %, None when there are no blocks.
    profiled:           taken under a profiler; such a throughput decides nothing.
    withdrawn:          why the source took a figure back, "" when all stand.
    impossible:         why the figure cannot be true (faster than the device's peak), "" when it can.
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
    profiled: bool = False
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


def _short(number: float) -> str:
    return f"{number:.6g}"


def gate_text(gate: Gate) -> str:
    """A gate in one line: what is required, then what kills it."""
    parts = [str(c) for c in gate.require]
    parts += [f"not ({c})" for c in gate.kill]
    return "; ".join(dict.fromkeys(parts))
