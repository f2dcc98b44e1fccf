"""One comparison, in the process that touches the GPU: check every arm, time the correct ones together, recheck them.

The recheck is what makes the check count. After the timing every floating-point input that the candidate still reads is
overwritten in place with fresh values, and the timed work is done again, the captured graph replayed, with nothing
waited for but the timed stream: on outputs as the timing left them, then full of finite junk, then of junk and NaN
(`accuracy.FILLS`). A candidate that remembers an earlier answer, that works outside the timed stream, or that wrote
part of its output only once, is now wrong, and its row has no number.

`execute` announces each step, and during the timing each change of arm, so that the parent (lab/bench/worker.py) knows
which arm to blame when this process dies or hangs.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from lab.base.errors import BadInput, reason
from lab.bench import sampling
from lab.check import accuracy, families
from lab.row.records import Role, Status

MEMORY_SHARE = 0.45  # of the GPU's memory, for all arms: the reference works in float64 beside them
# What a CUDA context does not survive, as torch, Triton, CuPy and the driver say it; one too many costs a restart.
FATAL = (
    *("CUDA error", "AcceleratorError", "CUDA_ERROR", "cudaError", "illegal memory access", "misaligned address"),
    *("unspecified launch failure", "illegal instruction", "device-side assert"),
)
GPU_BACKEND = "lab.bench.comparison:gpu"
HOLD_CYCLES = 20_000_000  # of the GPU's clock, about 10 ms


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

    def __post_init__(self) -> None:
        names = [name for _, name in self.arms]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            what = f'"{twice[0]}" is an arm twice'
            raise BadInput(f"comparison of {self.family} {self.workload}", what, "name each arm once in the card")


@dataclass(frozen=True)
class Backend:
    """Where arms run and what times them; tests give one that needs no GPU."""

    device: str
    l2_bytes: int
    timer: Callable[[str, str, int], sampling.Timer]
    clocks: Callable[[], Any]
    load: Callable[[str], Any] = families.load
    memory_bytes: float = math.inf

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


@dataclass(frozen=True)
class Bench:
    """One workload of a family on a backend, as a job asks for it."""

    job: Job
    backend: Backend
    family: families.Family
    workload: Any


class Outcome(msgspec.Struct):
    """How one arm is doing. status as in a row; `timing` only when it is ok.

    A number that is not finite is None once it went through JSON: what it means the status and the message say.
    errors: relative error of each output in the check before the timing; relative_error is the largest of them.
    prepare_us, prepared_bytes: see `armed` and `added_bytes`; None before `prepare` ran.
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


def gpu() -> Backend:
    """The current CUDA GPU."""
    import torch

    from lab.bench import machine, timers

    card = torch.cuda.get_device_properties(0)
    return Backend("cuda", card.L2_cache_size, timers.named, machine.clocks, memory_bytes=card.total_memory)


def classified(line: str) -> tuple[Status, bool]:
    """(row status, whether the process that met it is lost) for an error as its type and message in one line."""
    if "OutOfMemory" in line or "MemoryError" in line or "out of memory" in line.lower():  # the GPU's or the host's
        return "oom", False
    return "error", any(word in line for word in FATAL)


class Lost(Exception):
    """This process can measure no more; the comparison is to be done again without the arm of this name."""


def _blame(state: Outcome, error: Exception, where: str = "") -> bool:
    """Whatever a candidate throws is its arm's status and not ours; returns whether this process is lost."""
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
    family = backend.load(job.family)
    bench = Bench(job, backend, family, family.workload(job.workload))
    for state in states:
        yield Stage("check", state.name)
        if state.name in family.unavailable:
            state.fail("skipped", f"cannot be imported: {family.unavailable[state.name]}")
            continue
        with _blamed(state):  # what a candidate left behind on the GPU can throw out of the check itself
            found = accuracy.check(family, family.candidate(state.name), bench.workload, job.seed, backend.device)
            state.relative_error = found.relative_error
            state.errors = {e.output: e.relative_error for e in found.errors}
            status, fatal = classified(found.message) if found.status == "error" else (found.status, False)
            if status != "ok":
                state.fail(status, found.message)
            if fatal:
                raise Lost(state.name)

    timer = backend.timer(job.timer, job.l2, backend.l2_bytes)
    room_bytes = MEMORY_SHARE * backend.memory_bytes / (1 + sum(s.status == "ok" for s in states))
    arms: list[sampling.Arm] = []
    for state in [s for s in states if s.status == "ok"]:
        yield Stage("prepare", state.name)
        with _blamed(state, broken=lambda: getattr(timer, "broken", False)):
            candidate = family.candidate(state.name)
            names = [state.name] if arms else [state.name, sampling.AGAIN]
            built = [armed(bench, candidate, name, room_bytes) for name in names]
            state.prepare_us, state.prepared_bytes = built[0].prepare_us, built[0].prepared_bytes
            for arm in built:
                timer.prepare(arm)
            arms += built
    if not arms:
        return None

    yield Stage("time", arms[0].name)
    by_name = {s.name: s for s in states}
    turn = by_name[sampling.AGAIN] = by_name[arms[0].name]

    def visiting(arm: sampling.Arm) -> None:
        nonlocal turn
        if by_name[arm.name] is not turn:
            turn = by_name[arm.name]
            tell(Stage("time", turn.name))

    try:
        compared = sampling.compare(arms, timer, job.seconds, job.seed, backend.clocks, job.rest, visiting=visiting)
    except Exception as error:  # the samples of the others are no whole blocks any more
        _blame(turn, error, "in the timing: ")
        raise Lost(turn.name) from error
    for arm in [arm for arm in arms if arm.name != sampling.AGAIN]:
        state = by_name[arm.name]
        yield Stage("recheck", arm.name)
        with _blamed(state, "after the timing: "):
            wrong, state.relative_error_after = recheck(bench, arm, timer)
            if wrong:
                state.fail("incorrect", f"after the timing: {wrong}")
            else:
                state.timing = compared.arms[arm.name]
    return compared


def armed(bench: Bench, candidate: Any, name: str, room_bytes: float) -> sampling.Arm:
    """A candidate with its sets, as many as the L2 state asks for and `room_bytes` holds.

    prepare_us is the wall clock's, the device idle before and done after, the fastest over the sets: what packing at
    load costs once memory is at hand. Compiling is over by then, since the check has prepared before.
    """
    job, backend, cases = bench.job, bench.backend, bench.family.cases
    moved = bench.family.cost(bench.workload, candidate.precision).bytes
    count = sampling.sets_for(moved, backend.l2_bytes, job.l2)
    count = min(count, max(2 if job.l2 == "cold" else 1, int(min(room_bytes / max(moved, 1.0), count))))
    arm = sampling.Arm(name, candidate.run, [])
    fastest_s = math.inf
    first_seed = job.seed + (1000 if name == sampling.AGAIN else 1)
    for number in range(count):
        inputs = cases.inputs(bench.workload, first_seed + number, backend.device)
        backend.wait()
        began = time.perf_counter()
        args = accuracy.prepared(bench.family, candidate, inputs)
        backend.wait()
        fastest_s = min(fastest_s, time.perf_counter() - began)
        own = accuracy.outputs(bench.family, candidate, bench.workload, inputs, first_seed + number)
        arm.sets.append((args, accuracy.handed(own)))
        arm.inputs, arm.outputs = arm.inputs or inputs, arm.outputs or own
    arm.prepare_us, arm.prepared_bytes = 1e6 * fastest_s, added_bytes(args, inputs)
    return arm


def added_bytes(args: dict[str, Any], inputs: dict[str, Any]) -> int | None:
    """Memory that `prepare` added to the inputs': packed copies and workspace, each storage once.

    None where `args` holds a library's object, whose memory is not seen.
    """
    tensors = [value for value in args.values() if hasattr(value, "untyped_storage")]
    others = [value for value in args.values() if not hasattr(value, "untyped_storage")]
    if not all(isinstance(value, (int, float, str)) for value in others):
        return None
    theirs = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for place, size in storages.items() if place not in theirs)


def recheck(bench: Bench, arm: sampling.Arm, timer: sampling.Timer) -> tuple[str, float | None]:
    """("" or what is wrong, largest relative error) of the timed work on changed inputs, for each filling of outputs.

    What is wanted is computed before the candidate runs, so that a candidate that changes its inputs cannot change it.
    Raises what the candidate raises.
    """
    family, workload, inputs = bench.family, bench.workload, arm.inputs
    args, given = arm.sets[0]
    candidate = family.candidate(arm.name)
    fresh = family.cases.inputs(workload, bench.job.seed + 500_000, bench.backend.device)
    if not _renew(args, inputs, fresh, family.cases.ACTIVATIONS):
        return "no input differs with another seed, so nothing could be changed", None
    del fresh
    wanted = accuracy.expected(family, workload, inputs, candidate.precision)
    kept = accuracy.copied(inputs)
    largest = 0.0
    for number, how in enumerate(accuracy.FILLS):
        if bench.backend.device == "cuda":
            import torch

            # The filling waits behind this: it falls on what a stream that does not wait for ours has written.
            torch.cuda._sleep(HOLD_CYCLES)
        accuracy.fill(family, inputs, arm.outputs, bench.job.seed + 600_000 + 100 * number, how)
        timer.once(arm)
        errors, wrong = accuracy.judged(family, workload, candidate.precision, kept, inputs, arm.outputs, given, wanted)
        if wrong:
            return f"on inputs changed in place: {wrong}", None
        largest = max([largest, *(e.relative_error for e in errors)])
    return "", largest


def _renew(args: dict[str, Any], inputs: dict[str, Any], fresh: dict[str, Any], activations: Sequence[str]) -> bool:
    """Change in place what the candidate reads, and `inputs` with it; False when nothing could be changed.

    The activations are overwritten, and of the other floating-point inputs those whose memory is in `args`; sizes,
    tables and packed weights stay, because a captured launch was chosen for them.
    """
    read = {t.untyped_storage().data_ptr() for t in args.values() if hasattr(t, "untyped_storage")}
    changed = False
    for name, tensor in inputs.items():
        reads = name in activations or tensor.untyped_storage().data_ptr() in read
        if reads and tensor.is_floating_point() and tensor.shape == fresh[name].shape:
            changed |= not accuracy.same_bits(tensor, fresh[name])
            tensor.copy_(fresh[name])
    return changed
