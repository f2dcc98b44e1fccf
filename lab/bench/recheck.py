"""Whether timed calls gave right answers and did all of their work: what is timed is what is checked.

`looked_at` holds what a drawn visit left in one set against the reference. `recheck` runs the very graph on new inputs
and on outputs full of junk, and compares every set. An arm that remembers its answers works in the first call on a set
and not in the others: the first sample of its visits is slower (`remembers`), and so is, by the harness's clock, a pass
of one call on each set against what its samples say of so many (`repeats_less`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.bench import sampling
from lab.bench.apart import RemoteTimer
from lab.bench.sets import Bench, drawn
from lab.check import accuracy

HOLD_CYCLES = 20_000_000  # of the GPU's clock, about 10 ms
RECHECK_S = 3.0  # of the reference's time; a delta rule of 2048 tokens in float64 takes seconds
BRIEF_S, BRIEF_SETS = 0.2, 4  # the same of a brief comparison, and the most sets
PASS_PCT, PASS_US = 25.0, 20.0  # by which a pass may take longer than its samples say, beyond what the control's does
FIRST_PCT = 5.0  # so much slower than the samples behind it, against the control's, is an arm that had to compute


@dataclass(frozen=True)
class Look:
    """What a visit left in one set after so many calls on it. made, stirred: seeds of its inputs and activations."""

    number: int
    calls: int
    made: int
    stirred: int
    outputs: dict[str, Any]


def looked_at(bench: Bench, precision: str, given: dict[str, Any], look: Look) -> str:
    """ "" or what is wrong with a look. given: the set's inputs made anew: an arm gains nothing by changing its own."""
    given = given | drawn(bench, look.stirred)
    calls = look.calls if any(name in given for name in bench.family.cases.IN_PLACE) else 1
    wanted = _wanted(bench, given, precision, calls)
    seen = {name: tensor.to(bench.backend.device) for name, tensor in look.outputs.items()}
    return accuracy.judged(bench.family, bench.workload, precision, {}, given, seen, wanted, calls)[1]


Wanted = dict[tuple[int, str, int], tuple[dict[str, Any], float]]


def seen_as(bench: Bench, precision: str) -> str:
    """The precision where the reference's inputs depend on it, else ""."""
    return precision if hasattr(bench.family.cases, "reference_inputs") else ""


def recheck(
    bench: Bench, candidate: Any, arm: sampling.Arm, timer: sampling.Timer, seed: int, wanted: Wanted | None = None
) -> tuple[str, float | None]:
    """("" or what is wrong, largest relative error) of the timed work of every set, on inputs and outputs set anew.

    What is wanted is computed from a copy of the inputs that the candidate does not see. Outputs are filled before the
    visit, and a state that is updated in place is what the reference makes of it in as many calls as the visit holds.
    Where the reference takes long, sets are compared in drawn order until RECHECK_S are spent, two of them at least;
    in a brief comparison until BRIEF_S are, one of them at least and BRIEF_SETS at most.
    wanted: the reference's outputs by set, what it sees of the inputs and calls, for the arms that are checked with the
    same seed.
    Raises what the candidate raises.
    """
    family, workload, cases = bench.family, bench.workload, bench.family.cases
    wanted = {} if wanted is None else wanted
    visits = 1 if arm.calls >= len(arm.sets) else -(-len(arm.sets) // sampling.VISIT)
    calls = sampling.runs_of_sets(arm, visits * sampling.VISIT)
    states: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    marks: list[dict[str, int]] = []  # of inputs that are updated in place: their values are not used, and large
    for number, (inputs, own) in enumerate(zip(arm.inputs, arm.outputs, strict=True)):
        in_place = [name for name in cases.IN_PLACE if name in own]
        fresh = bench.inputs(seed + number) if in_place else drawn(bench, seed + number)  # weights stay: none are made
        changed = _renew(inputs, fresh, cases.ACTIVATIONS)
        states.append({name: fresh[name] for name in in_place})
        del fresh
        marks.append({name: accuracy.fingerprint(inputs[name], bench.secret) for name in in_place})
        changed |= any(not accuracy.same_bits(inputs[name], state) for name, state in states[-1].items())
        if not changed:
            return "no input differs with another seed, so nothing could be changed", None
        own = {name: t for name, t in inputs.items() if name not in bench.held and name not in in_place}
        kept.append(accuracy.copied(own))
    # Before the visit, and where no candidate can reach it.
    asked: list[tuple[int, str, int]] = []
    spent_s = 0.0
    brief = bench.job.brief
    least, most, most_s = (1, BRIEF_SETS, BRIEF_S) if brief else (2, len(kept), RECHECK_S)
    for number in random.Random(seed).sample(range(len(kept)), len(kept)):
        if len(asked) >= least and (len(asked) >= most or spent_s > most_s):
            break
        key = (number, seen_as(bench, candidate.precision), calls[number])
        if key not in wanted:
            began = time.perf_counter()
            given = bench.held | kept[number] | states[number]
            wanted[key] = _wanted(bench, given, candidate.precision, calls[number]), time.perf_counter() - began
        asked.append(key)
        spent_s += wanted[key][1]
    bench.backend.free()
    worst, first = 0.0, arm.turn
    for round_, how in enumerate(accuracy.FILLS):
        while arm.calls < len(arm.sets) and (arm.turn - first) % len(arm.sets):  # until the same set is the first again
            timer.visit(arm, sampling.VISIT)
        if bench.backend.device == "cuda":
            import torch

            # The filling waits behind this: it falls on what a stream that does not wait for ours has written.
            torch.cuda._sleep(HOLD_CYCLES)
        for number, (inputs, own) in enumerate(zip(arm.inputs, arm.outputs, strict=True)):
            accuracy.fill(family, inputs | states[number], own, seed + 1000 * round_ + number, how)
        for _ in range(visits):
            timer.visit(arm, sampling.VISIT)
        seen = {key[0]: accuracy.copied(arm.outputs[key[0]]) for key in asked}
        for key in asked:
            number = key[0]
            if wrong := accuracy.misused(arm.outputs[number], arm.sets[number][1], arm.inputs[number]):
                return f"set {number + 1} of {len(kept)}: {wrong}", None
            errors, wrong = accuracy.judged(
                family, workload, candidate.precision, kept[number], arm.inputs[number], seen[number], wanted[key][0],
                calls[number] if cases.IN_PLACE else 1,
            )  # fmt: skip
            if wrong:
                return f"set {number + 1} of {len(kept)}: {bench.changed() or wrong}", None
            worst = max(worst, *(e.relative_error for e in errors))
    for number, of_set in enumerate(marks):
        for name, mark in of_set.items():
            if accuracy.fingerprint(arm.inputs[number][name], bench.secret) != mark:
                return f'set {number + 1} of {len(kept)}: the candidate changed its input "{name}"', None
    if wrong := bench.changed():
        return wrong, None
    for inputs, own in zip(arm.inputs, arm.outputs, strict=True):  # no answer is left for the next arm to find
        accuracy.fill(family, inputs, own, seed, "finite")
    return "", worst


def _wanted(bench: Bench, inputs: dict[str, Any], precision: str, calls: int) -> dict[str, Any]:
    """The reference's outputs after so many calls, a state updated in place kept in its own type between them."""
    cases = bench.family.cases
    of = getattr(cases, "reference_inputs", lambda _, given, __: given)
    wanted: dict[str, Any] = {}
    calls = calls if any(name in inputs for name in cases.IN_PLACE) else 1
    if bench.family.repeated and calls > 1:
        wanted, calls = bench.family.repeated(of(bench.workload, inputs, precision), calls), 0
    for _ in range(calls):
        inputs = inputs | {name: wanted[name].to(inputs[name]) for name in cases.IN_PLACE if name in wanted}
        wanted = {}  # a state of gigabytes in float64 once, not twice
        wanted = bench.family.reference(of(bench.workload, inputs, precision))
    return {name: accuracy.out_of_reach(tensor, bench.backend.apart) for name, tensor in wanted.items()}


def _renew(inputs: dict[str, Any], fresh: dict[str, Any], activations: Sequence[str]) -> bool:
    """Overwrite the floating-point activations in place; False when nothing changed.

    Weights, caches, sizes and tables stay, because a candidate was prepared, and a launch captured, for them.
    """
    changed = False
    for name, tensor in inputs.items():
        if name in activations and tensor.is_floating_point() and tensor.shape == fresh[name].shape:
            changed |= not accuracy.same_bits(tensor, fresh[name])
            tensor.copy_(fresh[name])
    return changed


def remembers(controls: Sequence[sampling.Arm], arm: sampling.Arm) -> bool:
    """Whether nine of ten visits began slower, against the samples behind, than both of the control's in the block did.

    Where nothing is remembered it is about every third.
    """
    theirs = map(max, *(control.firsts for control in controls))
    slower = [here > (1 + FIRST_PCT / 100.0) * there for here, there in zip(arm.firsts, theirs, strict=True)]
    return sum(slower) >= 0.9 * len(slower)


def repeats_less(timer: RemoteTimer, controls: Sequence[sampling.Arm], arm: sampling.Arm) -> str:
    """ "" or by how much one call on each set takes longer than an arm's samples say that so many calls do.

    What a pass costs by itself (its launch, caches that others used) is what it costs the control or its second self.
    """
    over_us = {}
    for one in (*controls, arm):
        pass_us, called_us = timer.pass_us(one), len(one.sets) * statistics.median(one.blocks_us)
        if pass_us is None:
            return ""
        over_us[one.name] = pass_us - called_us
    itself_us = max(0.0, *(over_us[one.name] for one in controls))
    if over_us[arm.name] <= 1.5 * itself_us + PASS_US + PASS_PCT / 100.0 * called_us:
        return ""
    said = f"one call on each set takes {pass_us:.0f} us, where its samples say {called_us:.0f}"
    return f"{said}: it leaves out what it did before"
