"""One comparison, in the process that owns its tensors: check every arm, time the correct ones together, check again.

On a GPU each arm runs in a process of its own (lab/bench/apart.py) and this one, the harness, never imports a
candidate: inputs, outputs, reference, clock and judgement are out of a candidate's reach. In tests and notebooks the
arms may run here.

What is timed is what is checked. Before every visit the activations are drawn anew and states are set back, and which
timed visits are looked at is drawn once they are over: inputs and outputs of one set are held against the reference. At
a drawn moment among the blocks the very graph runs on outputs full of junk, and every set is compared.

An arm that remembers its answers works in the first call on a set and not in the others: the first sample of its visits
is slower, and so is, by the harness's clock, a pass of one call on each set against what its samples say of so many.
A candidate that does any of this is wrong, and its row has no number.

`execute` announces each step, and during the timing each change of arm, so that the parent (lab/bench/worker.py) knows
which arm to blame when this process dies or hangs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import random
import secrets
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import structs

from lab.base.errors import BadInput, reason
from lab.bench import sampling
from lab.bench.apart import Hands, Nursery, RemoteTimer
from lab.bench.backend import Backend, added_bytes
from lab.check import accuracy, families
from lab.row.records import Role, Status

MEMORY_SHARE = 0.45  # of the GPU's memory, for all arms: the reference works in float64 beside them
# What a CUDA context does not survive, as torch, Triton, CuPy and the driver say it; one too many costs a restart.
FATAL = (
    *("CUDA error", "AcceleratorError", "CUDA_ERROR", "cudaError", "illegal memory access", "misaligned address"),
    *("unspecified launch failure", "illegal instruction", "device-side assert"),
)
GPU_BACKEND = "lab.bench.backend:gpu"
HOLD_CYCLES = 20_000_000  # of the GPU's clock, about 10 ms
RECHECK_S = 3.0  # of the reference's time; a delta rule of 2048 tokens in float64 takes seconds
LOOKS, LOOKS_S = 6, 2.0  # of a placement's visits, how many are looked at; in all, for so long an arm
PASS_PCT, PASS_US = 25.0, 20.0  # by which a pass may take longer than its samples say, beyond what the control's does
FIRST_PCT = 5.0  # so much slower than the samples behind it, against the control's, is an arm that had to compute


class Job(msgspec.Struct, frozen=True):
    """What to compare. arms: (role, candidate name), the control first; backend: "module:function" giving a Backend.

    Raises BadInput for a name that is an arm twice: samples, inputs and answers are kept by name, so the second check
    of the one would find its inputs changed by that of the other, and neither would keep its number.
    """

    family: str
    workload: str
    arms: tuple[tuple[Role, str], ...]
    seconds: float = 2.0
    timer: str = "graph"
    l2: str = "cold"
    seed: int = 0
    backend: str = GPU_BACKEND
    rest: float = 0.0
    placements: int = 1
    blocks: int = 0

    def __post_init__(self) -> None:
        names = [name for _, name in self.arms]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            what = f'"{twice[0]}" is an arm twice'
            raise BadInput(f"comparison of {self.family} {self.workload}", what, "name each arm once in the card")


@dataclass(frozen=True)
class Bench:
    """One workload of a family on a backend, as a job asks for it.

    held: what all sets of all arms share, where the family's cases have it (`kernels.common.Cases.held`), made at its
    first use; marks: what `fingerprint` said of it then.
    """

    job: Job
    backend: Backend
    family: families.Family
    workload: Any
    hands: Hands | None = None
    held: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    secret: int = field(default_factory=lambda: secrets.randbits(48))

    def inputs(self, seed: int) -> dict[str, Any]:
        """The workload's inputs of a seed, the shared ones the same tensors each time."""
        cases: Any = self.family.cases
        device = self.backend.device
        if not hasattr(cases, "held"):
            made: dict[str, Any] = cases.inputs(self.workload, seed, device)
            return made
        if not self.held:
            for name, tensor in cases.held(self.workload, device).items():
                self.held[name] = self.hands.shelf.tensor(tensor) if self.hands else tensor
                self.marks[name] = accuracy.fingerprint(self.held[name], self.secret)
        return self.held | cases.own(self.workload, seed, device)

    def changed(self) -> str:
        """ "" or what a candidate did to the shared inputs, which nobody may write."""
        found = [n for n, tensor in self.held.items() if accuracy.fingerprint(tensor, self.secret) != self.marks[n]]
        return f'the candidate changed its input "{found[0]}"' if found else ""


class Outcome(msgspec.Struct):
    """How one arm is doing. status as in a row; `timing` only when it is ok.

    A number that is not finite is None once it went through JSON: what it means the status and the message say.
    errors: relative error of each output in the check before the timing; relative_error is the largest of them.
    prepare_us, prepared_bytes: see `armed` and `added_bytes`; None before `prepare` ran. clock_pct: see RemoteTimer.
    """

    role: Role
    name: str
    status: Status = "ok"
    message: str = ""
    relative_error: float | None = None
    errors: dict[str, float | None] = {}
    relative_error_after: float | None = None
    prepare_us: float | None = None
    prepared_bytes: int | None = None
    clock_pct: float | None = None
    timing: sampling.Timing | None = None

    def fail(self, status: Status, message: str) -> None:
        """Mark the arm; a failed arm has no number."""
        self.status, self.message, self.timing = status, message[:300], None


class Stage(msgspec.Struct, frozen=True, tag=True):
    """What is begun: a stage, and the arm that it is about."""

    stage: str
    arm: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The last message. fatal: the arm without which the comparison is to be done again in a new process, or ""."""

    arms: list[Outcome]
    comparison: sampling.Comparison | None = None
    fatal: str = ""


def classified(line: str) -> tuple[Status, bool]:
    """(row status, whether the process that met it is lost) for an error as its type and message in one line."""
    if "OutOfMemory" in line or "MemoryError" in line or "out of memory" in line.lower():  # the GPU's or the host's
        return "oom", False
    return "error", any(word in line for word in FATAL)


class Lost(Exception):
    """This process can measure no more; the comparison is to be done again without the arm of this name."""


def _blame(state: Outcome, error: Exception, where: str = "") -> bool:
    """Whatever a candidate throws is its arm's status and not ours; returns whether this process is lost."""
    if isinstance(error, accuracy.Elsewhere):  # in the arm's process, so that this one goes on
        state.fail(classified(str(error))[0], where + str(error))
        return False
    line = reason(error)
    status, lost = classified(line)
    state.fail(status, where + line)
    return lost


@contextlib.contextmanager
def _blamed(state: Outcome, where: str = "", broken: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """What is thrown inside is this arm's doing; raises Lost where the process is lost or `broken`."""
    try:
        yield
    except Lost:
        raise
    except Exception as error:
        if _blame(state, error, where) or broken():
            raise Lost(state.name) from error


def execute(job: Job, tell: Callable[[Stage], None] = lambda message: None) -> Iterator[Stage | Done]:
    """Do the job. Yields a Stage before each step, and last Done.

    tell: called with the stage "time" at each change of arm during the timing.
    An arm that fails is left out of what follows. It is `fatal` when its error poisoned the CUDA context, or fell among
    the samples.
    """
    states = [Outcome(role, name) for role, name in job.arms]
    try:
        compared = yield from _compared(job, states, tell)
    except Lost as lost:
        yield Done(states, fatal=str(lost))
    else:
        yield Done(states, compared and structs.replace(compared, arms={}, l2=job.l2))


def _compared(
    job: Job, states: list[Outcome], tell: Callable[[Stage], None]
) -> Generator[Stage, None, sampling.Comparison | None]:
    """The stages of `execute`; `states` are updated in place. None where no arm is correct."""
    module, _, function = job.backend.partition(":")
    backend: Backend = getattr(importlib.import_module(module), function)()
    with contextlib.ExitStack() as stack:
        if backend.apart:
            greeting: dict[str, Any] = {
                key: getattr(job, key) for key in ("backend", "family", "workload", "timer", "l2")
            }
            greeting["l2_bytes"] = backend.l2_bytes
            hands = stack.enter_context(Hands(_nursery(), [s.name for s in states], greeting))
            family = backend.bare(job.family)
            timer: sampling.Timer = RemoteTimer(
                job.timer, hands, backend.clock if backend.clock_pct is not None else None
            )
        else:
            hands, family = None, backend.load(job.family)
            timer = backend.timer(job.timer, job.l2, backend.l2_bytes)
        bench = Bench(job, backend, family, family.workload(job.workload), hands)
        return (yield from _timed(bench, timer, states, tell))


@functools.cache
def _nurseries() -> list[Nursery]:
    return [Nursery()]


def _nursery() -> Nursery:
    """That of this process, or a new one where an arm ended it."""
    kept = _nurseries()
    if kept[0].process.poll() is not None:
        kept[0] = Nursery()
    return kept[0]


def _timed(
    bench: Bench, timer: sampling.Timer, states: list[Outcome], tell: Callable[[Stage], None]
) -> Generator[Stage, None, sampling.Comparison | None]:
    job, backend, family = bench.job, bench.backend, bench.family
    candidates: dict[str, Any] = {}
    for state in states:
        yield Stage("check", state.name)
        if state.name in family.unavailable:
            state.fail("skipped", f"cannot be imported: {family.unavailable[state.name]}")
            continue
        with _blamed(state):  # what a candidate left behind on the GPU can throw out of the check itself
            candidate = bench.hands.candidate(state.name) if bench.hands else family.candidate(state.name)
            found = accuracy.check(family, candidate, bench.workload, job.seed, backend.device)
            state.relative_error = found.relative_error
            state.errors = {e.output: e.relative_error for e in found.errors}
            status, fatal = classified(found.message) if found.status == "error" else (found.status, False)
            if status != "ok":
                state.fail(status, found.message)
            if fatal and not bench.hands:
                raise Lost(state.name)
            candidates[state.name] = candidate

    sound = [s for s in states if s.status == "ok"]
    by_name = {s.name: s for s in states}
    room_bytes = MEMORY_SHARE * backend.memory_bytes / (1 + len(sound))
    arms: list[sampling.Arm] = bench.hands.lent if bench.hands else []

    def allocate(arm: sampling.Arm, number: int) -> None:
        """Sets with the placement's own values, the same for every arm; the second control has others."""
        state = by_name[arms[0].name if arm.name == sampling.AGAIN else arm.name]
        seed = job.seed + 1 + 100_000 * number + 1000 * (arm.name == sampling.AGAIN)
        armed(bench, candidates[state.name], arm, room_bytes, seed)
        timer.prepare(arm)
        if arm.name != sampling.AGAIN:
            state.prepare_us = min(x for x in (state.prepare_us, arm.prepare_us, math.inf) if x is not None)
            state.prepared_bytes = arm.prepared_bytes

    for state in random.Random(job.seed).sample(sound, len(sound)):
        yield Stage("prepare", state.name)
        with _blamed(state, broken=lambda: getattr(timer, "broken", False)):
            arm = sampling.Arm(state.name, candidates[state.name].run, [])
            allocate(arm, 0)
            arms.append(arm)
    if not arms:
        return None
    arms.sort(key=lambda arm: [s.name for s in states].index(arm.name))
    again = sampling.Arm(sampling.AGAIN, arms[0].run, [])
    with _blamed(by_name[arms[0].name]):
        if bench.hands:
            bench.hands.second(arms[0].name)
        allocate(again, 0)
        arms.insert(1, again)
    if len(arms) == 1 or arms[1] is not again:
        raise Lost(arms[0].name)

    yield Stage("time", arms[0].name)
    turn = by_name[sampling.AGAIN] = by_name[arms[0].name]

    def visiting(arm: sampling.Arm) -> None:
        nonlocal turn
        if by_name[arm.name] is not turn:
            turn = by_name[arm.name]
            tell(Stage("time", turn.name))

    looks: dict[str, list[Look]] = {}
    seen: dict[str, int] = {}
    spent_s: dict[str, float] = {}

    def look(arm: sampling.Arm, ran: list[int]) -> None:
        """Keep what a visit left in a set drawn now; of a placement's visits LOOKS, each as likely as any other."""
        number = secrets.randbelow(len(ran))
        if arm.name == sampling.AGAIN or not ran[number]:
            return
        seen[arm.name] = seen.get(arm.name, 0) + 1
        mine = looks.setdefault(arm.name, [])
        place = len(mine) if len(mine) < LOOKS else secrets.randbelow(seen[arm.name])
        if place < LOOKS:
            outputs = accuracy.copied(arm.outputs[number])
            mine[place : place + 1] = [Look(number, ran[number], arm.made + number, arm.stirred + number, outputs)]

    def judge_looks() -> None:
        """Set by set in drawn order, so that the inputs of one are made once for all arms."""
        every = [(name, taken) for name, mine in looks.items() for taken in mine]
        every = random.Random(secrets.randbits(32)).sample(every, len(every))
        rank = {made: number for number, made in enumerate({taken.made: "" for _, taken in every})}
        given: dict[str, Any] = {}
        made = -1
        for name, taken in sorted(every, key=lambda it: rank[it[1].made]):
            state = by_name[name]
            if state.status != "ok" or spent_s.get(name, 0.0) > LOOKS_S:
                continue
            began = time.perf_counter()
            if taken.made != made:
                given, made = bench.inputs(taken.made), taken.made
            if wrong := looked_at(bench, candidates[name].precision, given, taken):
                state.fail("incorrect", f"in a timed visit, on set {taken.number + 1}: {wrong}")
            spent_s[name] = spent_s.get(name, 0.0) + time.perf_counter() - began
        looks.clear()
        seen.clear()

    def place(number: int, order: Sequence[sampling.Arm]) -> None:
        judge_looks()
        for arm in arms:
            visiting(arm)
            timer.release(arm)
            arm.sets, arm.inputs, arm.outputs = [], [], []
        if bench.hands:
            bench.hands.shelf.clear(bench.held.values())
        backend.free()
        for arm in order:
            visiting(arm)
            allocate(arm, number)

    def note_clock(arm: sampling.Arm) -> None:
        read = timer.clock_pct(arm) if isinstance(timer, RemoteTimer) else None
        if read is not None:
            state = by_name[arm.name]
            state.clock_pct = max(abs(read), state.clock_pct or 0.0)  # of the control: its own and its second self's

    # Drawn here and now, where no candidate can know it.
    when = secrets.randbelow(job.placements), secrets.randbelow(sampling.PLACED_BLOCKS)

    def between(number: int, block: int) -> None:
        if isinstance(timer, RemoteTimer) and timer.clock:
            for arm in random.Random(secrets.randbits(32)).sample(arms, len(arms)):
                visiting(arm)
                timer.one_pass(arm, functools.partial(stir, bench, arm))
                look(arm, [1] * len(arm.sets))
        if (number, block) != when:
            return
        seed = secrets.randbelow(1 << 31)
        wanted: Wanted = {}
        for arm in [a for a in arms if a.name != sampling.AGAIN]:
            state = by_name[arm.name]
            tell(Stage("recheck", arm.name))
            with _blamed(state, "in the check among the blocks: "):
                wrong, state.relative_error_after = recheck(bench, candidates[arm.name], arm, timer, seed, wanted)
                if wrong:
                    state.fail("incorrect", f"on inputs changed in place: {wrong}")
        tell(Stage("time", turn.name))

    hooks = sampling.Hooks(
        clocks=backend.clocks, visiting=visiting, stir=lambda arm: stir(bench, arm), place=place, between=between,
        visited=lambda arm: look(arm, sampling.runs_of_sets(arm, sampling.VISIT, arm.turn - sampling.VISIT)),
    )  # fmt: skip
    try:
        compared = sampling.compare(arms, timer, job.seconds, job.seed, job.rest, hooks, job.placements, job.blocks)
        judge_looks()
        for arm in arms:
            note_clock(arm)
    except Lost:
        raise
    except Exception as error:  # the samples of the others are no whole blocks any more
        _blame(turn, error, "in the timing: ")
        raise Lost(turn.name) from error
    for arm in [arm for arm in arms if arm.name != sampling.AGAIN]:
        state = by_name[arm.name]
        if state.status == "ok" and bench.hands and remembers(arms[:2], arm):
            said = f"{FIRST_PCT:g} % slower than the samples behind it, against the control's"
            state.fail("incorrect", f"the first sample on inputs that it has not seen is {said}: it remembers answers")
        if state.status == "ok" and (state.clock_pct or 0.0) > (backend.clock_pct or math.inf):
            state.fail("error", f"its own times and the harness's clock differ by {state.clock_pct:.1f} %")
        if state.status == "ok" and isinstance(timer, RemoteTimer) and (said := repeats_less(timer, arms[:2], arm)):
            state.fail("error", said)
        if state.status == "ok":
            state.timing = compared.arms[arm.name]
    return compared


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


def armed(bench: Bench, candidate: Any, arm: sampling.Arm, room_bytes: float, first_seed: int) -> None:
    """Give an arm its sets, as many as the L2 state asks for and `room_bytes` holds.

    prepare_us is the wall clock's, the device idle before and done after, the fastest over the sets: what packing at
    load costs once memory is at hand. Compiling is over by then, since the check has prepared before. An arm in a
    process of its own prepares there.
    """
    job, backend = bench.job, bench.backend
    moved = bench.family.cost(bench.workload, candidate.precision).bytes
    count = sampling.sets_for(moved, backend.l2_bytes, job.l2)
    count = min(count, max(2 if job.l2 == "cold" else 1, int(min(room_bytes / max(moved, 1.0), count))))
    fastest_s = math.inf
    arm.turn, arm.made = 0, first_seed
    for number in range(count):
        inputs = bench.inputs(first_seed + number)
        own = accuracy.outputs(bench.family, candidate, bench.workload, inputs, first_seed + number)
        if bench.hands:
            inputs, own = (
                {key: value if key in bench.held else bench.hands.shelf.tensor(value) for key, value in t.items()}
                for t in (inputs, own)
            )
            args, out = inputs, own
        else:
            backend.wait()
            began = time.perf_counter()
            args, out = accuracy.prepared(bench.family, candidate, inputs), accuracy.handed(own)
            backend.wait()
            fastest_s = min(fastest_s, time.perf_counter() - began)
            arm.prepare_us, arm.prepared_bytes = 1e6 * fastest_s, added_bytes(args, inputs)
        arm.sets.append((args, out))
        arm.inputs.append(inputs)
        arm.outputs.append(own)


def stir(bench: Bench, arm: sampling.Arm) -> None:
    """Draw every activation anew and set states back, so that no answer of an earlier visit is one of the next.

    Values that are the old ones times a number would not do: of a product an arm could scale its old answer.
    """
    arm.stirred = secrets.randbits(48)
    for number, (inputs, own) in enumerate(zip(arm.inputs, arm.outputs, strict=True)):
        for name, fresh in drawn(bench, arm.stirred + number).items():
            inputs[name].copy_(fresh)
        accuracy.fill(bench.family, inputs, own, 0, "left")


def drawn(bench: Bench, seed: int) -> dict[str, Any]:
    """The floating-point activations of a seed: by the family's `activations` where it has one, which is quicker."""
    cases = bench.family.cases
    made = getattr(cases, "activations", cases.inputs)(bench.workload, seed, bench.backend.device)
    return {name: t for name, t in made.items() if name in cases.ACTIVATIONS and t.is_floating_point()}


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
    return accuracy.judged(bench.family, bench.workload, precision, {}, given, look.outputs, wanted, calls)[1]


Wanted = dict[tuple[int, str, int], tuple[dict[str, Any], float]]


def recheck(
    bench: Bench, candidate: Any, arm: sampling.Arm, timer: sampling.Timer, seed: int, wanted: Wanted | None = None
) -> tuple[str, float | None]:
    """("" or what is wrong, largest relative error) of the timed work of every set, on inputs and outputs set anew.

    What is wanted is computed from a copy of the inputs that the candidate does not see. Outputs are filled before the
    visit, and a state that is updated in place is what the reference makes of it in as many calls as the visit holds.
    Where the reference takes long, sets are compared in drawn order until RECHECK_S are spent, two of them at least.
    wanted: the reference's outputs by set, precision and calls, for the arms that are checked with the same seed.
    Raises what the candidate raises.
    """
    family, workload, cases = bench.family, bench.workload, bench.family.cases
    wanted = {} if wanted is None else wanted
    visits = 1 if arm.calls >= len(arm.sets) else -(-len(arm.sets) // sampling.VISIT)
    calls = sampling.runs_of_sets(arm, visits * sampling.VISIT)
    states: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for number, (inputs, own) in enumerate(zip(arm.inputs, arm.outputs, strict=True)):
        fresh = bench.inputs(seed + number)
        changed = _renew(inputs, fresh, cases.ACTIVATIONS)
        states.append({name: fresh[name] for name in cases.IN_PLACE if name in own})
        changed |= any(not accuracy.same_bits(inputs[name], state) for name, state in states[-1].items())
        if not changed:
            return "no input differs with another seed, so nothing could be changed", None
        kept.append(accuracy.copied({name: t for name, t in inputs.items() if name not in bench.held}))
    # Before the visit, and on the host, where no candidate can reach it.
    asked: list[tuple[int, str, int]] = []
    spent_s = 0.0
    for number in random.Random(seed).sample(range(len(kept)), len(kept)):
        if len(asked) >= 2 and spent_s > RECHECK_S:
            break
        key = (number, candidate.precision, calls[number])
        if key not in wanted:
            began = time.perf_counter()
            given = bench.held | kept[number] | states[number]
            wanted[key] = _wanted(bench, given, *key[1:]), time.perf_counter() - began
        asked.append(key)
        spent_s += wanted[key][1]
    worst = 0.0
    for round_, how in enumerate(accuracy.FILLS):
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
                return f"set {number + 1} of {len(kept)}: {wrong}", None
            worst = max(worst, *(e.relative_error for e in errors))
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
    for _ in range(calls if any(name in inputs for name in cases.IN_PLACE) else 1):
        wanted = bench.family.reference(of(bench.workload, inputs, precision))
        inputs = inputs | {name: wanted[name].to(inputs[name]) for name in cases.IN_PLACE if name in inputs}
    return {name: tensor.cpu() for name, tensor in wanted.items()}


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
