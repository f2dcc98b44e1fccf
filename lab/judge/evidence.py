"""Measured rows as evidence for a gate: which rows pair up, and what they say. Arithmetic on rows that are given.

A reading is formed within one run: the newest run that holds both arms of a workload, never one arm from each. What a
gate compares across workloads is read from one run too, where one holds it all. A row that is not ok gives its status
instead of a number. Nothing may be faster than the device's datasheet allows: a cold
row whose compulsory bytes or flops per microsecond exceed the datasheet peak makes the phase INVALID.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from msgspec.structs import replace

from lab.base import devices
from lab.bench import sampling
from lab.card import phases
from lab.card.gate import Reading, arrival_of, of_output
from lab.place import roofline
from lab.row.records import JUDGED, Measurement


def pairs(
    rows: Iterable[Measurement], together: Iterable[Iterable[str]] = ()
) -> dict[str, tuple[Measurement | None, Measurement | None]]:
    """workload id -> (control row, candidate row) of the newest run that judged both, else that has both, else any.

    A run in which an arm was found incorrect judged it; one in which it ran out of memory, or was not timed, did not.
    together: groups of workloads that a gate compares with each other. Each group is read from the newest run that
        judged all of it, by the launches that the newest rows of its workloads state, where there is such a run.
    """
    runs: dict[str, dict[str, dict[str, Measurement]]] = {}
    for row in rows:
        if row.arm in ("control", "candidate") and not row.beside:
            runs.setdefault(row.workload_id, {}).setdefault(row.run, {})[row.arm] = row
    chosen = {}
    for workload, by_run in runs.items():
        newest = sorted(by_run)
        both = [run for run in newest if len(by_run[run]) == 2]
        judged = [run for run in both if all(row.status in JUDGED for row in by_run[run].values())]
        run = by_run[(judged or both or newest)[-1]]
        chosen[workload] = (run.get("control"), run.get("candidate"))
    for group in together:
        members = [runs[workload] for workload in group if workload in runs]
        newest_launches = [_launches(chosen[workload]) for workload in group if workload in runs]
        shared = set.intersection(*(set(by_run) for by_run in members)) if members else set()
        for name in sorted(shared, reverse=True):
            found = [(by_run[name].get("control"), by_run[name].get("candidate")) for by_run in members]
            judged_both = all(row and row.status in JUDGED for pair in found for row in pair)
            if judged_both and [_launches(pair) for pair in found] == newest_launches:
                chosen.update(zip((workload for workload in group if workload in runs), found, strict=True))
                break
    return chosen


def compared(card: phases.Card) -> list[list[str]]:
    """Groups of workloads that the card's gate, or a claim of it, compares with each other."""
    groups: list[set[str]] = []
    for _, gate in card.gates:
        for _, condition in gate.conditions():
            if condition.against:
                both = {condition.workload, condition.against}
                touching = [group for group in groups if group & both]
                groups = [group for group in groups if not group & both] + [both.union(*touching)]
    return [sorted(group) for group in groups]


def _launches(pair: Iterable[Measurement | None]) -> list[str | None]:
    return [row.config if row else None for row in pair]


def readings(
    rows: Iterable[Measurement], device: devices.Device, together: Iterable[Iterable[str]] = ()
) -> dict[tuple[str, str], Reading]:
    """Evidence from rows, for each workload: kernel_us, sequence_us, errors, engagements and roofline_fraction.

    together: as in `pairs`.
    """
    found: dict[tuple[str, str], Reading] = {}
    for workload, (control, candidate) in pairs(rows, together).items():
        ids = tuple(row.id for row in (control, candidate) if row)
        impossible = next((text for row in (control, candidate) if row and (text := roofline.beyond(device, row))), "")
        by_block = change_pct(control, candidate)
        arrival = arrival_of(str(row.workload.get("arrival", "")) for row in (control, candidate) if row)
        found["kernel_us", workload] = Reading(
            unit="us",
            control=control.time_us if control else None,
            candidate=candidate.time_us if candidate else None,
            control_sd_pct=control.sd_pct if control else None,
            noise_pct=candidate.aa_pct if candidate else None,
            ids=ids,
            impossible=impossible,
            change_pct=None if by_block is None else by_block[0],
            interval_pct=None if by_block is None else by_block[1:],
            profiled=any(row.profiled for row in (control, candidate) if row),
            arrival=arrival,
        )
        if batch := next((row.workload.get("batch") for row in (control, candidate) if row), 0):
            us = found["kernel_us", workload]
            shares = [None if arm is None else arm / float(batch) for arm in (us.control, us.candidate)]
            found["sequence_us", workload] = replace(us, control=shares[0], candidate=shares[1])
        if candidate is None:
            continue
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
            found["roofline_fraction", workload] = Reading("ratio", control_share, share, ids=ids, arrival=arrival)
    return found


def errors(row: Measurement) -> dict[str, float]:
    """Relative error by output, the largest under ""; nothing for an arm that was found incorrect or gave none."""
    stated = {"": row.relative_error, **row.errors}
    return {output: e for output, e in stated.items() if e is not None and row.status != "incorrect"}


def change_pct(control: Measurement | None, candidate: Measurement | None) -> tuple[float, float, float] | None:
    """(change, low, high) in %: median of the block ratios and its bootstrap interval; None without paired blocks.

    The control of a block is the mean of its two selves where the row has both: they differ by where their buffers lie,
    which moved a ratio of medians by 1.5 % between two runs on an H200.
    """
    if control is None or candidate is None or control.time_us is None or candidate.time_us is None:
        return None
    base, blocks = control.blocks_us or (), candidate.blocks_us or ()
    again = control.again_blocks_us or base
    if not len(base) == len(again) == len(blocks) or not blocks:
        return None
    middle, low, high = sampling.ratio_interval([(a + b) / 2 for a, b in zip(base, again, strict=True)], blocks)
    return 100.0 * (middle - 1.0), 100.0 * (low - 1.0), 100.0 * (high - 1.0)


def between_runs(rows: Iterable[Measurement]) -> dict[str, tuple[int, float]]:
    """workload id -> (runs, standard deviation in % of candidate / control over runs), where two runs or more exist.

    Ratios are formed within each run; only their spread is looked at across runs, and only across runs of what the
    newest one launched: that a former kernel had another time is no noise.
    """
    runs: dict[str, dict[str, dict[str, Measurement]]] = {}
    for row in rows:
        if row.arm in ("control", "candidate") and row.time_us is not None:
            runs.setdefault(row.workload_id, {}).setdefault(row.run, {})[row.arm] = row
    spread = {}
    for workload, by_run in runs.items():
        both = [by_run[run] for run in sorted(by_run) if len(by_run[run]) == 2]
        launched = [[arms[name].config for name in ("control", "candidate")] for arms in both]
        both = [arms for arms, what in zip(both, launched, strict=True) if what == launched[-1]]
        ratios = [(arms["candidate"].time_us or 0.0) / (arms["control"].time_us or math.inf) for arms in both]
        if len(ratios) > 1:
            spread[workload] = len(ratios), 100.0 * statistics.stdev(ratios) / statistics.fmean(ratios)
    return spread
