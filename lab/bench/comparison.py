"""One comparison, in the process that owns its tensors: check every arm, time the correct ones together, check again.

On a GPU each arm runs in a process of its own (lab/bench/apart.py) and this one, the harness, never imports a
candidate: inputs, outputs, reference, clock and judgement are out of a candidate's reach. In tests the arms may run
here.

What is timed is what is checked. Before every visit the activations are drawn anew and states are set back, and which
timed visits are looked at is drawn once they are over: inputs and outputs of one set are held against the reference. At
a drawn moment among the blocks the very graph runs on outputs full of junk, and every set is compared.

A candidate that fails any of this (lab/bench/recheck.py) is wrong, and its row has no number.

`execute` announces each step, and during the timing each change of arm, so that the parent (lab/bench/worker.py) knows
which arm to blame when this process dies or hangs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import random
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import structs

from lab.base.errors import BadInput, reason
from lab.bench import sampling
from lab.bench.apart import Hand, Hands, Nursery, RemoteTimer
from lab.bench.backend import Backend
from lab.bench.recheck import FIRST_PCT, Look, Wanted, looked_at, recheck, remembers, repeats_less
from lab.bench.sets import Bench, armed, stir
from lab.check import accuracy, families
from lab.row.records import Role, Status

MEMORY_SHARE = 0.45  # of the GPU's memory, for all arms: the reference works in float64 beside them
# What a CUDA context does not survive, as torch, Triton, CuPy and the driver say it; one too many costs a restart.
FATAL = (
    *("CUDA error", "AcceleratorError", "CUDA_ERROR", "cudaError", "illegal memory access", "misaligned address"),
    *("unspecified launch failure", "illegal instruction", "device-side assert"),
)
GPU_BACKEND = "lab.bench.backend:gpu"
LOOKS, LOOKS_S = 6, 2.0  # of a placement's visits, how many are looked at; in all, for so long an arm
LOOK_BYTES = 1 << 31  # a look that keeps more is a placement's only one, and waits on the host where the GPU is full
BRIEF_LOOKS, BRIEF_LOOKS_S = 1, 0.3  # the same of a brief comparison, for so long all arms together


class Job(msgspec.Struct, frozen=True):
    """What to compare. arms: (role, candidate name), the control first; backend: "module:function" giving a Backend.

    brief: as a calibration measures, many places for a time each. The arms' processes are those of the brief comparison
    before it, what a set is given is drawn once and copied for every arm, arms prepare side by side (so that nobody
    knows what each took), and fewer timed calls and sets are held against the reference. For no card.
    first: placements of this comparison that other processes take before these. seed: the same in all of them.
    room: share of the memory that sets may take by themselves, which a comparison that ran out of it has less of.
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
    first: int = 0
    blocks: int = 0
    brief: bool = False
    room: float = 1.0

    @property
    def own_seed(self) -> int:
        """That of the inputs, which no two processes share."""
        return self.seed + 10_000_000 * self.first

    def __post_init__(self) -> None:
        names = [name for _, name in self.arms]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            what = f'"{twice[0]}" is an arm twice'
            raise BadInput(f"comparison of {self.family} {self.workload}", what, "name each arm once in the card")


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
    """The last message. fatal: the arm without which the comparison is to be done again in a new process, or "".

    seconds: that each stage took. spare: an arm had more sets than it needs.
    """

    arms: list[Outcome]
    comparison: sampling.Comparison | None = None
    fatal: str = ""
    seconds: dict[str, float] = {}
    spare: bool = False

    @property
    def crowded(self) -> bool:
        """Whether a sound arm ran out of memory that fewer sets would leave it."""
        return self.spare and any(arm.status == "oom" and arm.relative_error is not None for arm in self.arms)


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
    error = families.mistake(error) or error
    line = str(error) if isinstance(error, BadInput) else reason(error)  # of the family: it names its own file
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
    seconds: dict[str, float] = {}
    at, since = "start", time.perf_counter()

    def entered(stage: str) -> None:
        nonlocal at, since
        now = time.perf_counter()
        seconds[at] = seconds.get(at, 0.0) + now - since
        at, since = stage, now

    def told(message: Stage) -> None:
        entered(message.stage)
        tell(message)

    compared, fatal = None, ""
    spare: list[bool] = []
    with contextlib.closing(_compared(job, states, told, seconds, spare)) as stages:
        try:
            while True:
                stage = next(stages)
                entered(stage.stage)
                yield stage
        except StopIteration as done:
            compared = done.value and structs.replace(done.value, arms={}, l2=job.l2)
        except Lost as lost:
            fatal = str(lost)
    entered("")
    yield Done(states, compared, fatal, seconds, any(spare))


def _compared(
    job: Job, states: list[Outcome], tell: Callable[[Stage], None], seconds: dict[str, float], spare: list[bool]
) -> Generator[Stage, None, sampling.Comparison | None]:
    """The stages of `execute`; `states`, `seconds` and `spare` are updated in place. None where no arm is correct."""
    module, _, function = job.backend.partition(":")
    backend: Backend = getattr(importlib.import_module(module), function)()
    with contextlib.ExitStack() as stack:
        if backend.apart:
            greeting: dict[str, Any] = {
                key: getattr(job, key) for key in ("backend", "family", "workload", "timer", "l2")
            }
            greeting["l2_bytes"] = backend.l2_bytes
            kept = _spare() if job.brief else None
            hands = stack.enter_context(Hands(nursery(), [s.name for s in states], greeting, kept, job.first > 0))
            family = backend.bare(job.family)
            clock = backend.clock if backend.clock_pct is not None else None
            timer: sampling.Timer = RemoteTimer(job.timer, hands, clock, False if job.brief else None)
        else:
            hands, family = None, backend.load(job.family)
            timer = backend.timer(job.timer, job.l2, backend.l2_bytes)
        bench = Bench(job, backend, family, family.workload(job.workload), hands)
        return (yield from _timed(bench, timer, states, tell, seconds, spare))


@functools.cache
def _spare() -> dict[tuple[str, str], list[Hand]]:
    """Processes of brief comparisons; they end with this one."""
    return {}


@functools.cache
def _nurseries() -> list[Nursery]:
    return [Nursery()]


def nursery() -> Nursery:
    """That of this process, or a new one where an arm ended it."""
    kept = _nurseries()
    if kept[0].process.poll() is not None:
        kept[0] = Nursery()
    return kept[0]


def _timed(
    bench: Bench,
    timer: sampling.Timer,
    states: list[Outcome],
    tell: Callable[[Stage], None],
    seconds: dict[str, float],
    spare: list[bool],
) -> Generator[Stage, None, sampling.Comparison | None]:
    job, backend, family = bench.job, bench.backend, bench.family
    candidates: dict[str, Any] = {}
    if bench.hands and len(states) > 1:
        yield from _compiled(bench, bench.hands, [s.name for s in states])
    for state in states:
        yield Stage("check", state.name)
        if state.name in family.unavailable:
            state.fail("skipped", f"cannot be imported: {family.unavailable[state.name]}")
            continue
        with _blamed(state):  # what a candidate left behind on the GPU can throw out of the check itself
            candidate = bench.hands.candidate(state.name) if bench.hands else family.candidate(state.name)
            given = bench.inputs(job.own_seed) if hasattr(family.cases, "held") else None
            found = accuracy.check(
                family, candidate, bench.workload, job.own_seed, backend.device, given, bench.held, backend.apart
            )
            if found.status == "ok" and (wrong := bench.changed()):
                found = replace(found, status="incorrect", message=wrong)
            del given
            state.relative_error = found.relative_error
            state.errors = {e.output: e.relative_error for e in found.errors}
            status, fatal = classified(found.message) if found.status == "error" else (found.status, False)
            if status != "ok":
                state.fail(status, found.message)
            if fatal and not bench.hands:
                raise Lost(state.name)
            candidates[state.name] = candidate

    accuracy.forget()
    backend.free()  # what checks and the reference took: arms are about to allocate in processes of their own
    sound = [s for s in states if s.status == "ok"]
    by_name = {s.name: s for s in states}
    room_bytes = job.room * MEMORY_SHARE * backend.memory_bytes / (1 + len(sound) + job.brief)
    arms: list[sampling.Arm] = bench.hands.lent if bench.hands else []
    waiting: list[tuple[sampling.Arm, Callable[[], object]]] = []

    def turns() -> Iterator[list[str]]:
        """In which orders those that are left allocate, placement by placement; drawn for this comparison alone."""
        names = [s.name for s in sound if s.status == "ok"]
        names.insert(1, sampling.AGAIN)
        draw = random.Random(" ".join((str(job.seed), job.family, job.workload, *names)))
        return itertools.islice(sampling.orders(names, draw), job.first, None)

    def allocate(arm: sampling.Arm, number: int) -> Callable[[], object]:
        """Sets with the placement's own values, the same for every arm; the second control has others.

        Returns what waits until the arm is ready, which it is but in a brief comparison.
        """
        state = by_name[arm.name]
        seed = job.own_seed + 1 + 100_000 * number + 1000 * (arm.name == sampling.AGAIN) * (not job.brief)
        spare.append(armed(bench, candidates[state.name], arm, room_bytes, seed))
        if job.brief and isinstance(timer, RemoteTimer):
            return timer.begun(arm)
        timer.prepare(arm)
        if arm.name != sampling.AGAIN:
            state.prepare_us = min(x for x in (state.prepare_us, arm.prepare_us, math.inf) if x is not None)
            state.prepared_bytes = arm.prepared_bytes
        return lambda: None

    def begin(name: str) -> Iterator[Stage]:
        """Allocate for the first time; not where of a control and its second self the other one has failed."""
        state = by_name[name]
        if state.status != "ok":
            return
        yield Stage("prepare", state.name)
        with _blamed(state, broken=lambda: getattr(timer, "broken", False)):
            if name == sampling.AGAIN and bench.hands:
                bench.hands.second(state.name)
            candidate = candidates[state.name]
            arm = sampling.Arm(name, candidate.run, [], eager=getattr(candidate, "eager", None))
            waiting.append((arm, allocate(arm, 0)))
            arms.append(arm)

    def ready() -> Iterator[Stage]:
        for arm, wait in waiting if job.brief else ():
            yield Stage("prepare", by_name[arm.name].name)
            with _blamed(by_name[arm.name], broken=lambda: getattr(timer, "broken", False)):
                wait()
                continue
            arms.remove(arm)
        waiting.clear()

    if not sound:
        return None
    by_name[sampling.AGAIN] = sound[0]
    order = turns()
    for name in next(order):
        yield from begin(name)
    yield from ready()
    if sound[0].status != "ok":  # the next one is the control
        for arm in [arm for arm in arms if by_name[arm.name].status != "ok"]:
            timer.release(arm)
            arms.remove(arm)
        if not arms:
            return None
        by_name[sampling.AGAIN] = next(s for s in sound if s.status == "ok")
        order = turns()
        yield from begin(sampling.AGAIN)
        yield from ready()
    turn = by_name[sampling.AGAIN]
    rank = [turn.name, sampling.AGAIN, *(s.name for s in sound if s is not turn)]
    arms.sort(key=lambda arm: rank.index(arm.name))
    if [arm.name for arm in arms[:2]] != [turn.name, sampling.AGAIN]:
        raise Lost(turn.name)

    yield Stage("time", turn.name)

    def visiting(arm: sampling.Arm) -> None:
        nonlocal turn
        if by_name[arm.name] is not turn:
            turn = by_name[arm.name]
            tell(Stage("time", turn.name))

    looks_most, looks_s = (BRIEF_LOOKS, BRIEF_LOOKS_S) if job.brief else (LOOKS, LOOKS_S)
    looks: dict[str, list[Look]] = {}
    seen: dict[str, int] = {}
    spent_s: dict[str, float] = {}

    def look(arm: sampling.Arm, ran: list[int], last: int) -> None:
        """Keep what a visit left in a set drawn now; of a placement's visits so many, each as likely as any other.

        Every other time it is the last set: work that is still under way when a visit ends is missing there.
        """
        number = last if secrets.randbelow(2) else secrets.randbelow(len(ran))
        if arm.name == sampling.AGAIN or not ran[number]:
            return
        seen[arm.name] = seen.get(arm.name, 0) + 1
        mine = looks.setdefault(arm.name, [])
        large = sum(tensor.nbytes for tensor in arm.outputs[number].values()) > LOOK_BYTES
        most = 1 if large else looks_most
        place = len(mine) if len(mine) < most else secrets.randbelow(seen[arm.name])
        if place < most:
            outputs = {
                n: accuracy.out_of_reach(t, backend.apart) if large else t.clone()
                for n, t in arm.outputs[number].items()
            }
            mine[place : place + 1] = [Look(number, ran[number], arm.made + number, arm.stirred + number, outputs)]

    def judge_looks() -> None:
        """Set by set in drawn order, so that the inputs of one are made once for all arms."""
        started = time.perf_counter()
        every = [(name, taken) for name, mine in looks.items() for taken in mine]
        every = random.Random(secrets.randbits(32)).sample(every, len(every))
        rank = {made: number for number, made in enumerate({taken.made: "" for _, taken in every})}
        given: dict[str, Any] = {}
        made = -1
        for name, taken in sorted(every, key=lambda it: rank[it[1].made]):
            state = by_name[name]
            spent = sum(spent_s.values()) if job.brief else spent_s.get(name, 0.0)
            if state.status != "ok" or spent > looks_s:
                continue
            began = time.perf_counter()
            if taken.made != made:
                given, made = bench.of_set(taken.made), taken.made
            if wrong := looked_at(bench, candidates[name].precision, given, taken):
                state.fail("incorrect", f"in a timed visit, on set {taken.number + 1}: {bench.changed() or wrong}")
            spent_s[name] = spent_s.get(name, 0.0) + time.perf_counter() - began
        looks.clear()
        seen.clear()
        given.clear()
        took = time.perf_counter() - started
        seconds["look"], seconds["time"] = seconds.get("look", 0.0) + took, seconds.get("time", 0.0) - took

    def place(number: int) -> None:
        judge_looks()
        bench.made.clear()
        for arm in arms:
            visiting(arm)
            timer.release(arm)
            arm.sets, arm.inputs, arm.outputs = [], [], []
        if bench.hands:
            bench.hands.shelf.clear(bench.held.values())
        backend.free()
        there = {arm.name: arm for arm in arms}
        for arm in (there[name] for name in next(order) if name in there):
            visiting(arm)
            allocate(arm, number)()

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
                look(arm, [1] * len(arm.sets), len(arm.sets) - 1)
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
        clocks=backend.clocks, clocks_at_once=backend.clocks_at_once, visiting=visiting,
        stir=lambda arm: stir(bench, arm), place=place, between=between,
        visited=lambda arm: look(
            arm, sampling.runs_of_sets(arm, sampling.VISIT, arm.turn - sampling.VISIT), sampling.last_set(arm)
        ),
    )  # fmt: skip
    try:
        compared = sampling.compare(arms, timer, job.seconds, job.own_seed, job.rest, hooks, job.placements, job.blocks)
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
        if state.status == "ok" and bench.hands and job.timer != "host" and remembers(arms[:2], arm):
            said = f"{FIRST_PCT:g} % slower than the samples behind it, against the control's"
            state.fail("incorrect", f"the first sample on inputs that it has not seen is {said}: it remembers answers")
        if state.status == "ok" and (state.clock_pct or 0.0) > (backend.clock_pct or math.inf):
            state.fail("error", f"its own times and the harness's clock differ by {state.clock_pct:.1f} %")
        if state.status == "ok" and isinstance(timer, RemoteTimer) and (said := repeats_less(timer, arms[:2], arm)):
            state.fail("error", said)
        if state.status == "ok":
            state.timing = compared.arms[arm.name]
    return compared


def _compiled(bench: Bench, hands: Hands, names: Sequence[str]) -> Iterator[Stage]:
    """Have every arm do one call, all of them at once, so that their compilers share the host's cores.

    What goes wrong here the check meets again and says.
    """
    seed, waiting = bench.job.own_seed + 99_999, {}  # no other inputs' seed
    inputs = bench.inputs(seed)
    for name in names:
        with contextlib.suppress(accuracy.Elsewhere):
            candidate = hands.candidate(name)
            if not candidate.refuses(bench.workload):
                out = accuracy.outputs(bench.family, candidate, bench.workload, inputs, seed)
                waiting[name] = hands.called(name, inputs, out)
    for name, answer in waiting.items():
        yield Stage("check", name)
        with contextlib.suppress(accuracy.Elsewhere):
            answer()
