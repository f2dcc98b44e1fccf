"""One comparison, in the process that touches the GPU: check every arm, time the sound ones together, check them again.

The second check is what makes the first one count. After the timing every floating-point input that the candidate
still reads is overwritten in place with fresh values, the outputs are poisoned, and the timed work is done once
more, the captured graph replayed, with nothing waited for but the timed stream. A candidate that remembers an earlier
answer, that works outside the timed stream, or that wrote part of its output only once, is now wrong, and its row has
no number. Given up: an answer that `prepare` computed for a peer that copies its activations there (see `_renew`).

`execute` says what it is doing before it does it, and during the timing whose turn it is, so that the supervisor
(lab/bench/worker.py) knows which arm to blame when this process dies or hangs.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from lab.base.errors import BadInput
from lab.bench import sampling
from lab.check import accuracy, families
from lab.row.records import Role, Status

# What a CUDA context does not survive, as torch, Triton, CuPy and the driver say it; one too many costs a restart.
MEMORY_SHARE = 0.45
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


class Outcome(msgspec.Struct):
    """How one arm is doing. status as in a row; `timing` only when it is ok.

    A number that is not finite is None once it went through JSON: what it means the status and the message say.

    errors: relative error of each output in the check before the timing; relative_error is the largest of them.
    prepare_us, prepared_bytes: see `_arm` and `added_bytes`; None before `prepare` ran.
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


def status_of(error: BaseException) -> tuple[Status, str, bool]:
    """(row status, one line, whether this process can go on) for what a candidate threw."""
    text = (str(error).splitlines() or [""])[0]
    line = f"{type(error).__name__}: {text}".rstrip(": ")
    if out_of_memory(line):
        return "oom", line, False
    return "error", line, any(word in line for word in FATAL)


def out_of_memory(line: str) -> bool:
    """Whether an error, as its type and message in one line, means that memory ran out (the GPU's or the host's)."""
    return "OutOfMemory" in line or "MemoryError" in line or "out of memory" in line.lower()


class _Watched:
    """A timer that says whose turn it is, once a visit, so that an error or a death while timing has a name."""

    def __init__(self, timer: sampling.Timer, control: str, tell: Callable[[Stage], None]) -> None:
        self.timer, self.name, self.tell = timer, timer.name, tell
        self.control = self.visited = control

    def prepare(self, arm: sampling.Arm) -> None:
        """As the timer does."""
        self.timer.prepare(arm)

    def sample(self, arm: sampling.Arm) -> float:
        """As the timer does; the second control's turn is the control's."""
        name = self.control if arm.name == sampling.AGAIN else arm.name
        if name != self.visited:
            self.visited = name
            self.tell(Stage("time", name))
        return self.timer.sample(arm)

    def once(self, arm: sampling.Arm) -> None:
        """As the timer does."""
        self.timer.once(arm)


def execute(job: Job, tell: Callable[[Stage], None] = lambda message: None) -> Iterator[Stage | Done]:
    """Do the job. Yields a Stage before each step, and last Done.

    tell: hears the stage "time" whenever another arm's turn comes during the timing.
    An arm that fails is left out of what follows. It is `fatal` when its error poisoned the CUDA context, or fell among
    the samples.
    """
    module, _, function = job.backend.partition(":")
    backend: Backend = getattr(importlib.import_module(module), function)()
    family = backend.load(job.family)
    workload = family.workload(job.workload)
    states = [Outcome(role, name) for role, name in job.arms]

    for state in states:
        yield Stage("check", state.name)
        if state.name in family.unavailable:
            state.fail("skipped", f"cannot be imported: {family.unavailable[state.name]}")
            continue
        try:
            found = accuracy.check(family, family.candidate(state.name), workload, job.seed, backend.device)
        except Exception as error:  # what a candidate left behind on the GPU can throw out of the check itself
            status, line, fatal = status_of(error)
            state.fail(status, line)
        else:
            state.relative_error = found.relative_error
            state.errors = {e.output: e.relative_error for e in found.errors}
            fatal = found.status == "error" and any(word in found.message for word in FATAL)
            if found.status != "ok":
                ran_out = found.status == "error" and out_of_memory(found.message)
                state.fail("oom" if ran_out else found.status, found.message)
        if fatal:
            yield Done(states, fatal=state.name)
            return
    timer = backend.timer(job.timer, job.l2, backend.l2_bytes)
    # What all arms hold together leaves room for the reference, which works in float64.
    room = MEMORY_SHARE * backend.memory_bytes / (1 + sum(s.status == "ok" for s in states))
    arms: list[sampling.Arm] = []
    kept: dict[str, Any] = {}
    for state in [s for s in states if s.status == "ok"]:
        yield Stage("prepare", state.name)
        candidate = family.candidate(state.name)
        wanted = [state.name] if arms else [state.name, sampling.AGAIN]
        try:
            built = [_arm(name, family, candidate, workload, job, backend, kept, room) for name in wanted]
            _, state.prepare_us, state.prepared_bytes = built[0]
            for arm, *_ in built:
                timer.prepare(arm)
            arms += [arm for arm, *_ in built]
        except Exception as error:  # whatever a candidate throws is its own row's status, not ours
            status, line, fatal = status_of(error)
            state.fail(status, line)
            if fatal or getattr(timer, "broken", False):
                yield Done(states, fatal=state.name)
                return
    if not arms:
        yield Done(states)
        return
    yield Stage("time", arms[0].name)
    watched = _Watched(timer, arms[0].name, tell)
    try:
        compared = sampling.compare(arms, watched, job.seconds, job.seed, backend.clocks, job.rest)
    except Exception as error:  # as above; the samples of the others are no whole blocks any more
        blamed = next(s for s in states if s.name == watched.visited)
        status, line, _ = status_of(error)
        blamed.fail(status, f"in the timing: {line}")
        yield Done(states, fatal=blamed.name)
        return
    for state in [s for s in states if s.name in compared.arms]:
        yield Stage("recheck", state.name)
        arm = next(a for a in arms if a.name == state.name)
        try:
            message, error_after = recheck(family, workload, arm, kept[state.name], timer, job, backend, state.role)
        except Exception as error:  # as above
            status, line, fatal = status_of(error)
            state.fail(status, f"after the timing: {line}")
            if fatal:
                yield Done(states, fatal=state.name)
                return
            continue
        state.relative_error_after = error_after
        if message:
            state.fail("incorrect", f"after the timing: {message}")
        else:
            state.timing = compared.arms[state.name]
    yield Done(states, structs.replace(compared, arms={}, l2=job.l2))


def _arm(
    name: str,
    family: Any,
    candidate: Any,
    workload: Any,
    job: Job,
    backend: Backend,
    kept: dict[str, Any],
    room_bytes: float,
) -> tuple[sampling.Arm, float, int | None]:
    """(arm with its sets, us that `prepare` took, bytes that it added); inputs of set one stay in `kept` for `recheck`.

    The time is the wall clock's, the device idle before and done after, the fastest over the sets: what packing at load
    costs once memory is at hand. Compiling is over by then, since the check has prepared before.
    """
    moved = family.cost(workload, candidate.precision).bytes
    count = sampling.sets_for(moved, backend.l2_bytes, job.l2)
    count = min(count, max(2 if job.l2 == "cold" else 1, int(min(room_bytes / max(moved, 1.0), count))))
    sets: list[tuple[Any, Any]] = []
    fastest_s = math.inf
    first_seed = job.seed + (1000 if name == sampling.AGAIN else 1)
    for number in range(count):
        inputs = family.cases.inputs(workload, first_seed + number, backend.device)
        _wait(backend)
        began = time.perf_counter()
        args = candidate.prepare(inputs)
        _wait(backend)
        fastest_s = min(fastest_s, time.perf_counter() - began)
        sets.append((args, family.cases.outputs(workload, inputs)))
        kept.setdefault(name, inputs)
    return sampling.Arm(name, candidate.run, sets), 1e6 * fastest_s, added_bytes(args, inputs)


def _wait(backend: Backend) -> None:
    """Until the device has done what it was given."""
    if backend.device == "cuda":
        import torch

        torch.cuda.synchronize()


def added_bytes(args: dict[str, Any], inputs: dict[str, Any]) -> int | None:
    """Memory that `prepare` added to the inputs' own: packed copies and workspace, each storage once.

    What it handed on as it came is none of it. None where `args` holds a library's object, whose memory is not seen.
    """
    tensors = [value for value in args.values() if hasattr(value, "untyped_storage")]
    others = [value for value in args.values() if not hasattr(value, "untyped_storage")]
    if not all(isinstance(value, (int, float, str)) for value in others):
        return None
    theirs = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for place, size in storages.items() if place not in theirs)


def recheck(
    family: Any, workload: Any, arm: sampling.Arm, inputs: dict[str, Any], timer: sampling.Timer, job: Job,
    backend: Backend, role: str,
) -> tuple[str, float | None]:  # fmt: skip
    """("" or what is wrong, largest relative error) of the timed work on changed inputs and poisoned outputs.

    What is wanted is computed before the candidate runs, so that a candidate that changes its inputs cannot change it.
    Raises what the candidate raises.
    """
    args, out = arm.sets[0]
    candidate = family.candidate(arm.name)
    fresh = family.cases.inputs(workload, job.seed + 500_000, backend.device)
    if not _renew(args, inputs, fresh, candidate, role):
        return "no activation is read where it lies (`prepare` must not copy them), so nothing could be changed", None
    del fresh
    wanted = accuracy.expected(family, workload, inputs, candidate.precision)
    kept = {name: tensor.clone() for name, tensor in inputs.items()}
    poisoned = family.cases.outputs(workload, inputs)
    if backend.device == "cuda":
        import torch

        # The poison waits behind this, so that it falls on what a stream that does not wait for ours has written.
        torch.cuda._sleep(HOLD_CYCLES)
    for name, tensor in poisoned.items():
        out[name].copy_(tensor)
    timer.once(arm)
    found = {name: tensor.clone() for name, tensor in out.items()}
    for name, tensor in kept.items():
        if not accuracy.same_bits(tensor, inputs[name]):
            return f'the candidate changed its input "{name}"', None
    limits = family.cases.tolerance(workload, candidate.precision)
    errors = [accuracy.compare(name, found[name], wanted[name], limits[name]) for name in limits]
    worst = max(e.relative_error for e in errors)
    bad = [e for e in errors if not e.ok]
    if bad:
        text = f"{bad[0].output} is wrong on inputs changed in place (relative error {bad[0].relative_error:.2e}, "
        return text + f"limit {bad[0].relative_limit:.1e})", None
    return "", worst


def _renew(args: dict[str, Any], inputs: dict[str, Any], fresh: dict[str, Any], candidate: Any, role: str) -> bool:
    """Change what the candidate reads, where it lies, and `inputs` with it; False when nothing could be changed.

    Every floating-point input whose memory is in `args` is overwritten; sizes, tables and packed weights stay, because
    a captured launch was chosen for them. A peer whose library wants its activations packed reads none of them in
    place: it is prepared again from the changed inputs and its tensors are copied over the captured ones.
    """

    def change(names: Iterable[str]) -> bool:
        changed = False
        for name in names:
            changed |= not accuracy.same_bits(inputs[name], fresh[name])
            inputs[name].copy_(fresh[name])
        return changed

    tensors = [t for t in args.values() if hasattr(t, "untyped_storage")]
    read = {t.untyped_storage().data_ptr() for t in tensors}
    floating = [n for n, t in inputs.items() if t.is_floating_point() and t.shape == fresh[n].shape]
    if change(n for n in floating if inputs[n].untyped_storage().data_ptr() in read):
        return True
    if role != "peer" or len(tensors) < len(args) or not change(floating):
        return False
    again = candidate.prepare(inputs)
    for name, tensor in args.items():
        tensor.copy_(again[name])
    return True
