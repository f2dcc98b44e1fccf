"""Measured rows as evidence for a gate: which rows pair up, and what they say. Arithmetic on rows that are given.

A reading is formed within one run: the newest run that holds both arms of a workload, never one arm from each. What a
gate compares across workloads is read from one run too, where one holds it all. Intervals are over placements
(lab/base/interval.py); a row of schema 1 has one placement, and its interval is a bootstrap over the blocks of it,
wider by PLACED. Of later rows only those decide that `unsettled` has nothing against, and of all those whose arms are
not `apart`. Where a power cap held the clock down, intervals are wider by what that can have cost at most (`slowed`),
block by block where each one's clock was read. A row that is not ok gives its status instead of a number. A row with a
cold L2 whose compulsory bytes or flops per microsecond exceed the datasheet's peak makes the phase INVALID.
"""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from lab.base import devices, interval
from lab.bench import sampling
from lab.card import phases
from lab.card.gate import Reading, arrival_of, of_output
from lab.check import families
from lab.place import roofline
from lab.row.records import JUDGED, Earlier, Measurement

Pair = tuple[Measurement | None, Measurement | None]
"""The control's and the candidate's row of one workload in one run."""
# Metrics that `readings` forms of rows.
READ = "kernel_us", "sequence_us", "host_us", "engagements", "relative_error", "nmse", "roofline_fraction"
PROCESSES = 2  # over which placements are spread at least
ALIKE = ("device", "gpu", "gpu_id", "driver", "commit", "timer", "l2", "rest")  # what arms of a comparison agree on
MESSAGE = 140  # characters of a row's own message that a verdict repeats
CLOCK_PCT = 5.0  # by which the harness's clock may differ from an arm's own times
# By which one placement may miss: two standard deviations, which 19 in 20 of an H200's comparisons stay below where no
# cap held the clock. Under a cap it is more; what a row of schema 1 was throttled by is its remark.
PLACED = 1.02
# By which a ratio may differ between two GPUs of one model: 19 in 20 do by less (lab/study/repeats.py), and an interval
# is of the GPU that was measured.
GPUS = 1.009


def asked(rows: Iterable[Measurement], card: phases.Card) -> list[Measurement]:
    """The rows of the card's two arms that were taken as it pins, and checked as a card's are."""
    arms = (card.control, card.candidate)
    return [row for row in rows if row.name in arms and not row.brief and not card.measure.other(*row.protocol)]


def other_protocols(rows: Iterable[Measurement], together: Iterable[Iterable[str]] = ()) -> list[str]:
    """One phrase for each protocol by which both arms were timed somewhere that `pairs` chose none of its runs."""
    rows = [row for row in rows if row.own_us is not None]
    chosen, runs = pairs(rows, together), by_run(rows)
    left: dict[tuple[str, str, float], int] = {}
    for workload, pair in chosen.items():
        ours = {row.protocol for row in pair if row}
        for way in {a.protocol for a, b in runs[workload].values() if a and b} - ours:
            left[way] = left.get(way, 0) + 1
    return [
        f"not judged: runs by {timer}, {l2} L2, rest {rest:g}, of {count} workload{'s' * (count > 1)}"
        for (timer, l2, rest), count in sorted(left.items())
    ]


def apart(control: Measurement | None, candidate: Measurement | None) -> str:
    """ "" or in what two arms differ that were timed together if this is a comparison."""
    if control is None or candidate is None or control.own_us is None or candidate.own_us is None:
        return ""
    sides = {key: (getattr(control, key), getattr(candidate, key)) for key in ALIKE}
    said = [f"{key} ({ours}, {theirs})" for key, (ours, theirs) in sides.items() if ours != theirs]
    return f"its arms differ in {', '.join(said)}" if said else ""


def by_run(rows: Iterable[Measurement]) -> dict[str, dict[str, Pair]]:
    """workload id -> run -> (control row, candidate row) of what is judged, oldest run first."""
    found: dict[str, dict[str, dict[str, Measurement]]] = {}
    for row in rows:
        if row.arm in ("control", "candidate") and not row.beside:
            found.setdefault(row.workload_id, {}).setdefault(row.run, {})[row.arm] = row
    return {
        workload: {run: (arms.get("control"), arms.get("candidate")) for run, arms in sorted(runs.items())}
        for workload, runs in found.items()
    }


def pairs(rows: Iterable[Measurement], together: Iterable[Iterable[str]] = ()) -> dict[str, Pair]:
    """workload id -> (control row, candidate row) of the newest run that judged both, else that has both, else any.

    A run in which an arm was found incorrect judged it; one in which it ran out of memory, or was not timed, did not.
    together: groups of workloads that a gate compares with each other. Each group is read from the newest run that
        judged all of it, by the launches that the newest rows of its workloads state, where there is such a run. Not
        where one of these rows found an arm incorrect: no older run takes that back.
    """
    runs = by_run(rows)
    chosen = {}
    for workload, newest in runs.items():
        both = [run for run in newest if all(newest[run])]
        judged = [run for run in both if _judged(newest[run])]
        chosen[workload] = newest[(judged or both or list(newest))[-1]]
    for group in together:
        members = [workload for workload in group if workload in runs]
        if any(row and row.status == "incorrect" for workload in members for row in chosen[workload]):
            continue
        newest_launches = [launches(chosen[workload]) for workload in members]
        shared = set.intersection(*(set(runs[workload]) for workload in members)) if members else set()
        for run in sorted(shared, reverse=True):
            found = {workload: runs[workload][run] for workload in members}
            if all(map(_judged, found.values())) and list(map(launches, found.values())) == newest_launches:
                chosen |= found
                break
    return chosen


def absent(chosen: Mapping[str, Pair], workloads: Iterable[str]) -> dict[str, str]:
    """workload -> why it has no figures, to stand behind a metric's name: an arm's own status, or that it has no row.

    chosen: of `pairs`. A workload whose arms are both ok is left out.
    """
    newest = max((row.run for pair in chosen.values() for row in pair if row), default="")
    found = {}
    for workload in workloads:
        said = []
        for arm, row in zip(("control", "candidate"), chosen.get(workload, ()), strict=False):
            if row is None:
                said.append(f"has no row of the {arm}")
            elif row.own_us is None:
                words = textwrap.shorten(row.message, MESSAGE, placeholder=" ...")
                said.append(f"has no {arm}: {row.name} is {row.status} in run {row.run}" + f" ({words})" * bool(words))
        if workload not in chosen:
            said.append("was not measured" + f" (newest run {newest})" * bool(newest))
        if said:
            found[workload] = ", and ".join(said)
    return found


def _judged(pair: Pair) -> bool:
    return all(row and row.status in JUDGED for row in pair)


def launches(pair: Pair) -> list[str | None]:
    """What two arms launched, to be compared between runs: a config names the kernels of its own family alone."""
    made = (row.code if row and families.composes(row.family) else "" for row in pair)
    return [f"{row.config} {code}" if row else None for row, code in zip(pair, made, strict=True)]


def readings(
    rows: Iterable[Measurement], device: devices.Device, together: Iterable[Iterable[str]] = ()
) -> dict[tuple[str, str], Reading]:
    """Evidence from rows by workload: times (kernel_us, sequence_us or host_us), errors, the rest; see `pairs`."""
    found: dict[tuple[str, str], Reading] = {}
    for workload, (control, candidate) in pairs(rows, together).items():
        arms = [row for row in (control, candidate) if row]
        ids = tuple(row.id for row in arms)
        placed = candidate.placements if candidate and candidate.own_us is not None else 0
        cap = slowed(device, *arms)
        by_block = _widened(control, candidate, cap)
        open_ = unsettled(control, candidate, cap)
        elsewhere = PLACED if placed == 1 else 1.0
        own = _interval(candidate, cap)
        arrival = arrival_of(str(row.workload.get("arrival", "")) for row in arms)
        metric = arms[0].metric
        found[metric, workload] = Reading(
            unit="us",
            control=control.own_us if control else None,
            candidate=candidate.own_us if candidate else None,
            # Over placements the interval has both arms' noise, and without what they share.
            control_sd_pct=control.sd_pct if control and placed < 2 else None,
            noise_pct=aa_pct(control, candidate) if placed < 2 else None,
            ids=ids,
            impossible=next(filter(None, (roofline.beyond(device, row) for row in arms)), ""),
            change_pct=None if by_block is None else by_block[0],
            interval_pct=by_block and _beyond(by_block[1:], elsewhere),
            interval=own and (own[0] / elsewhere, own[1] * elsewhere),
            repeats=placed if placed > 1 else len(candidate.blocks_us or ()) if candidate else 0,
            placements=placed,
            unsettled=open_,
            slowed=cap.says if cap else "",
            slowed_by=cap.usual if cap else 1.0,
            profiled=any(row.profiled for row in arms),
            machine=f"{arms[-1].gpu} {arms[-1].gpu_id}, driver {arms[-1].driver}" if placed > 1 else "",
            arrival=arrival,
        )
        if metric == "kernel_us" and (batch := arms[0].workload.get("batch")):
            us = found[metric, workload]
            shares = [None if arm is None else arm / float(batch) for arm in (us.control, us.candidate)]
            own = us.interval and (us.interval[0] / float(batch), us.interval[1] / float(batch))
            found["sequence_us", workload] = replace(us, control=shares[0], candidate=shares[1], interval=own)
        if candidate is None:
            continue
        if candidate.own_us is not None:  # what ran out of memory was launched who knows how often
            launched = float((candidate.n or 0) * (1 if candidate.calls is None else candidate.calls))
            found["engagements", workload] = Reading("launches", candidate=launched, ids=ids)
        if candidate.status == "incorrect":  # before its error, which is NaN, and so absent, for an output with NaN
            text = f"{candidate.name} is incorrect: {candidate.message}"
            found["relative_error", workload] = Reading("ratio", ids=ids, impossible=text)
        else:
            theirs = errors(control) if control else {}
            for output, error in errors(candidate).items():
                base = theirs.get(output)
                found[of_output("relative_error", output), workload] = Reading("ratio", base, error, ids=ids)
                square = None if base is None else base**2
                found[of_output("nmse", output), workload] = Reading("nmse", square, error**2, ids=ids)
        if control is not None and candidate.time_us is not None:
            control_share, share = (roofline.fraction_of(device, row) for row in (control, candidate))
            if share is None:
                continue  # nobody knows the peak
            slow = cap.says if cap else ""
            read = Reading("ratio", control_share, share, ids=ids, arrival=arrival, unsettled=open_, slowed=slow)
            if placed > 1 and share and (own := _interval(candidate, cap)):
                low, high = (share * candidate.time_us / us for us in reversed(own))
                read = replace(read, interval=(low, high), repeats=placed, placements=placed)
            found["roofline_fraction", workload] = read
    return found


def errors(row: Measurement) -> dict[str, float]:
    """Relative error by output, the largest under ""; nothing for an arm that was found incorrect or gave none."""
    stated = {"": row.relative_error, **row.errors}
    return {output: e for output, e in stated.items() if e is not None and row.status != "incorrect"}


def change_pct(control: Measurement | None, candidate: Measurement | None) -> tuple[float, float, float] | None:
    """(change, low, high) in %, over placements, or over the blocks of a single one; None without paired blocks.

    The control of a block is the mean of its A/A pair where the row has both: the two differ by where their buffers
    lie, which moved a ratio of medians by 1.5 % between two runs on an H200.
    """
    if control is None or candidate is None or control.own_us is None or candidate.own_us is None:
        return None
    if max(control.placements, candidate.placements) > 1:
        found = _over_placements(control, candidate)
        return found.change_pct if found else None
    base, blocks = control.blocks_us or (), candidate.blocks_us or ()
    again = control.again_blocks_us or base
    if not len(base) == len(again) == len(blocks) or not blocks:
        return None
    middle, low, high = sampling.ratio_interval([(a + b) / 2 for a, b in zip(base, again, strict=True)], blocks)
    return 100.0 * (middle - 1.0), 100.0 * (low - 1.0), 100.0 * (high - 1.0)


def change_alone(control: Measurement | None, candidate: Measurement | None) -> float | None:
    """The change in % by blocks in pairs, or by medians between the rows of two workloads; None without both times."""
    if control is None or candidate is None or control.workload_id == candidate.workload_id:
        found = change_pct(control, candidate)
        return found[0] if found else None
    if control.own_us is None or candidate.own_us is None:
        return None
    return 100.0 * (candidate.own_us / control.own_us - 1.0)


def _over_placements(
    control: Measurement, candidate: Measurement, cap: Cap | None = None, side: int = 1
) -> interval.Interval | None:
    """The interval of a comparison; None where its blocks are no pairs.

    cap, side: the ratio of each block longer (1) or shorter (-1) by what the cap can have cost.
    """
    blocks = candidate.blocks if cap is None else cap.scaled(candidate.blocks, side)
    try:
        return interval.over_placements(control.blocks, control.again_blocks or None, blocks)
    except ValueError:
        return None


def _beyond(ends: tuple[float, float], factor: float) -> tuple[float, float]:
    """The ends of a change in %, each a factor further out."""
    low, high = (1.0 + end / 100.0 for end in ends)
    return 100.0 * (low / factor - 1.0), 100.0 * (high * factor - 1.0)


class Cap(NamedTuple):
    """A clock that was held down, and the same in words.

    factors: by which it made the time of each block longer at most, in the order of blocks; or one for all of them.
    """

    factors: tuple[float, ...]
    says: str

    @property
    def usual(self) -> float:
        """Their geometric mean."""
        return statistics.geometric_mean(self.factors)

    def scaled(self, times: Sequence[Sequence[float]], side: int) -> list[list[float]]:
        """Block times by placement, each longer (1) or shorter (-1) by its factor."""
        known = len(self.factors) == sum(map(len, times))
        factors = iter(self.factors if known else itertools.repeat(self.usual))
        return [[us * next(factors) ** side for us in blocks] for blocks in times]


def slowed(device: devices.Device, *rows: Measurement) -> Cap | None:
    """What a cap on the GPU's clock can have cost these arms at most; None where none was seen, or where nobody knows.

    At a constant clock of the memory no kernel slows down by more than its multiprocessors' clock. So a time t lies
    within [t / factor, t] of what it is without the cap, and a ratio within a factor either way, as either arm may be
    the one that was slowed. The factor of a block is of the lowest clock that was read around its visits; in rows
    without these, that of all blocks is of the lowest clock of all: it was read behind the warm-up of each placement,
    where arms ran without a rest and the clock is as low as it gets, and at its end. What was timed by the host is not
    concerned.
    """
    capped = [row for row in rows if row.throttled and row.metric == "kernel_us" and not isinstance(row, Earlier)]
    read = [clock for row in rows for clock in row.clocks]
    if not capped or not read or device.sm_clock is None or len({clock.memory_mhz for clock in read}) > 1:
        return None
    highest, by_block = device.sm_clock.base / 1e6, next((row.block_mhz for row in rows if row.block_mhz), ())
    lowest = min(by_block, default=min(clock.sm_mhz for clock in read))
    if lowest <= 0:
        return None
    factors = tuple(max(1.0, highest / mhz) for mhz in by_block or (lowest,))
    at = f"{lowest} to {max(by_block)} of {highest:g} MHz by block" if by_block else f"{lowest} of {highest:g} MHz"
    usual = statistics.geometric_mean(factors)
    return Cap(factors, f"{100 * (usual - 1):.1f} % wider for a {capped[0].throttled} (multiprocessors at {at})")


def _widened(
    control: Measurement | None, candidate: Measurement | None, cap: Cap | None
) -> tuple[float, float, float] | None:
    """`change_pct` with its ends as far out as a cap can have moved them, either arm being the one that it slowed."""
    found = change_pct(control, candidate)
    if found is None or cap is None or control is None or candidate is None:
        return found
    if max(control.placements, candidate.placements) == 1:
        low, high = ((1.0 + end / 100.0) * cap.usual**side for end, side in zip(found[1:], (-1, 1), strict=True))
        return found[0], 100.0 * (low - 1.0), 100.0 * (high - 1.0)
    shorter, longer = (_over_placements(control, candidate, cap, side) for side in (-1, 1))
    assert shorter, "its blocks were pairs"
    assert longer, "its blocks were pairs"
    return found[0], shorter.change_pct[1], longer.change_pct[2]


def unsettled(control: Measurement | None, candidate: Measurement | None, cap: Cap | None = None) -> str:
    """ "" or why this comparison decides nothing: arms apart, too few placements, drift, throttling, other clocks.

    cap: of `slowed`; a throttled arm decides only where what that can have cost is known.

    Whether it converged is said by its placements (`Interval.converged`); a row's own `converged` is of the sampling
    within one. Rows of schema 1, of before there were placements, keep their remarks instead.
    """
    if said := apart(control, candidate):
        return said
    arms = [row for row in (control, candidate) if row and row.own_us is not None and not isinstance(row, Earlier)]
    if not arms:
        return ""
    placements, processes = min(row.placements for row in arms), min(row.processes for row in arms)
    if placements < interval.PLACEMENTS or processes < PROCESSES:
        return f"placements {placements} of {interval.PLACEMENTS}, processes {processes} of {PROCESSES}"
    for row in arms:
        if row.throttled and row.metric == "kernel_us" and cap is None:  # the host does not wait for the GPU's clock
            return f"the {row.arm} was throttled ({row.throttled}), nobody knows from which clock"
        if (row.clock_pct or 0.0) > CLOCK_PCT:
            return f"the {row.arm}'s times and the harness's clock differ by {row.clock_pct:.1f} %"
    found = _over_placements(arms[0], arms[-1])
    if found is None:
        return "the blocks of its arms are no pairs"
    return "" if found.converged else "its placements drift, measure it again or with more of them"


def aa_pct(control: Measurement | None, candidate: Measurement | None) -> float | None:
    """The A/A noise floor of a comparison, %: a row of schema 1 has it in every arm, later ones in the control's."""
    return next((row.aa_pct for row in (candidate, control) if row and row.aa_pct is not None), None)


def _interval(row: Measurement | None, cap: Cap | None = None) -> tuple[float, float] | None:
    """The interval of an arm's own time, us, over placements or blocks; None without a time or with a single one.

    cap: what may have made it longer.
    """
    if row is None or row.own_us is None or len(row.blocks_us or ()) < 2:
        return None
    usual = cap.usual if cap else 1.0
    if row.placements > 1:
        found = interval.of_arm(row.blocks)
        low, high = interval.of_arm(cap.scaled(row.blocks, -1)).low if cap else found.low, found.high
    else:
        blocks = row.blocks_us or ()
        _, low, high = sampling.ratio_interval([1.0] * len(blocks), blocks)
        low /= usual
    return min(low, row.own_us / usual), max(high, row.own_us)  # the median is over samples, the interval is not


def between_runs(rows: Iterable[Measurement]) -> dict[str, tuple[int, float]]:
    """workload id -> (runs, standard deviation in % of candidate / control over runs), where two runs or more exist.

    Ratios are formed within each run; only their spread is looked at across runs, and only across runs of what the
    newest one launched: that a former kernel had another time is no noise.
    """
    spread = {}
    for workload, runs in by_run(row for row in rows if row.own_us is not None).items():
        both = [(control, candidate) for control, candidate in runs.values() if control and candidate]
        alike = [pair for pair in both if launches(pair) == launches(both[-1])]
        ratios = [(candidate.own_us or 0.0) / (control.own_us or math.inf) for control, candidate in alike]
        if len(ratios) > 1:
            spread[workload] = len(ratios), 100.0 * statistics.stdev(ratios) / statistics.fmean(ratios)
    return spread
