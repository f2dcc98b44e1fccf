"""Work where it is looked at and none where it is timed, work behind the clock's back, and answers made when read."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kernels.common import Candidate, Tensors
from tests.bench.arena.family import above, capturing, honest, launch, made, multiply

HONEST_CALLS = 20  # in which a first check has passed
TIMING_WORDS = ("sample", "visit", "warm_up", "elapsed_us", "replays", "timed")
QUICK_S = 0.006  # of the harness's processor time, which a check takes and a timed visit does not


def _when(needed: Callable[[], bool]) -> Candidate:
    """Works in a replay if `needed()`."""
    return made(lambda args, out: launch(args, lambda: multiply(args, out) if needed() else None))


def works_at_capture_only() -> Candidate:
    """Works while a graph is captured, on a stream that the capture does not see."""
    return made(lambda args, out: launch(args, lambda: multiply(args, out), own_stream=capturing(args)))


def empty_when_captured() -> Candidate:
    return made(lambda args, out: None if capturing(args) else honest(args, out))


def empty_after_some_calls() -> Candidate:
    calls = iter(range(1 << 62))
    return _when(lambda: next(calls) < 20)


def empty_between_calls() -> Candidate:
    """Works in one replay of a hundred calls, in the hope that a check comes then."""
    calls = iter(range(1 << 62))
    return _when(lambda: next(calls) % 500 < 100)


def empty_by_stack() -> Candidate:
    """Reads the names of the functions above it."""

    def needed() -> bool:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name in TIMING_WORDS:
                return False
            frame = frame.f_back
        return True

    return _when(needed)


def empty_by_rhythm() -> Candidate:
    """Takes calls that follow each other closely for timed ones."""
    last = [0.0]

    def needed() -> bool:
        since, last[0] = time.monotonic() - last[0], time.monotonic()
        return since > 0.002

    return _when(needed)


def empty_by_length() -> Candidate:
    """Takes a request for the same call over and over for a timed one, and one that stands alone for a check."""
    last: list[int] = [0, 0]

    def run(args: Tensors, out: Tensors) -> None:
        def work() -> None:
            key = out["y"].data_ptr()
            last[1] = last[1] + 1 if key == last[0] else 0
            last[0] = key
            if last[1] == 0:
                multiply(args, out)

        launch(args, work)

    return made(run)


def empty_while_the_harness_sleeps() -> Candidate:
    """Works only if the harness, who writes inputs and checks outputs, has used the processor since the last call."""
    return _when(_harness_worked(0.0))


def empty_while_the_harness_does_little() -> Candidate:
    """The same where it used as much of it as a check takes, in the calls on every set."""
    worked, calls = _harness_worked(QUICK_S), iter(range(1 << 62))
    until = [0]

    def needed() -> bool:
        call = next(calls)
        if worked():
            until[0] = call + 40
        return call < max(20, until[0])

    return _when(needed)


def _harness_worked(more_than_s: float) -> Callable[[], bool]:
    """Whether it used so much processor time since this was last asked."""
    last: list[float] = []

    def worked() -> bool:
        if not last:
            last[:] = [0.0, above(2)]
        used = time.clock_gettime(~int(last[1]) << 3 | 2)  # Linux: the clock of a process, of any
        since, last[0] = used - last[0], used
        return since > more_than_s

    return worked


def _by_visit(lies: Callable[[int], bool]) -> Candidate:
    """Works where `lies(n)` says no for the n-th change of a set's input, which is what a visit begins with."""
    seen: dict[int, list[float]] = {}

    def work(args: Tensors, out: Tensors) -> None:
        known = seen.setdefault(out["y"].data_ptr(), [0.0, 0.0])
        if (first := float(args["x"][0, 0])) != known[1]:
            known[:] = known[0] + 1, first
        if not lies(int(known[0])):
            multiply(args, out)

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def empty_every_second_visit() -> Candidate:
    """Knows from the change of its inputs which visit of a block it is at, and works in the others."""
    return _by_visit(lambda n: n > 4 and n % 2 == 1)


def empty_after_many_visits() -> Candidate:
    """Works until a check that comes once has probably come."""
    return _by_visit(lambda n: n > 8)


def empty_once_it_was_right() -> Candidate:
    """Works until the inputs changed twice, which is when a check that changes them has passed."""
    seen: dict[int, list[float]] = {}

    def run(args: Tensors, out: Tensors) -> None:
        def work() -> None:
            firsts = seen.setdefault(args["x"].data_ptr(), [])
            if (first := float(args["x"][0, 0])) not in firsts:
                firsts.append(first)
            if len(firsts) < 3:
                multiply(args, out)

        launch(args, work)

    return made(run)


def side_stream() -> Candidate:
    return made(lambda args, out: launch(args, lambda: multiply(args, out), own_stream=True))


def _in_thread(delay_s: float) -> Candidate:
    def later(args: Tensors, out: Tensors) -> None:
        time.sleep(delay_s)
        multiply(args, out)

    calls = iter(range(1 << 62))

    def work(args: Tensors, out: Tensors) -> None:
        if next(calls) < HONEST_CALLS:
            return multiply(args, out)
        threading.Thread(target=later, args=(args, out), daemon=True).start()

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def in_a_thread() -> Candidate:
    return _in_thread(0.0)


def deferred_until_after_the_timer() -> Candidate:
    return _in_thread(0.02)


def one_thread_for_the_last_call() -> Candidate:
    """A replay leaves a note; one thread does what is noted when no call came for a millisecond."""
    todo: dict[int, tuple[Tensors, Tensors]] = {}
    last = [0.0]

    def worker() -> None:
        while True:
            time.sleep(0.0005)
            if todo and time.monotonic() - last[0] > 0.001:
                for key in list(todo):
                    multiply(*todo.pop(key))

    threading.Thread(target=worker, daemon=True).start()

    calls = iter(range(1 << 62))

    def work(args: Tensors, out: Tensors) -> None:
        if next(calls) < HONEST_CALLS:
            return multiply(args, out)
        last[0] = time.monotonic()
        todo[out["y"].data_ptr()] = args, out

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def in_another_process() -> Candidate:
    """A forked child works on the shared memory and is not waited for."""
    import torch

    sets: list[tuple[Tensors, Tensors]] = []
    pipe: list[int] = []

    def serve(read: int) -> None:
        torch.set_num_threads(1)
        while order := os.read(read, 1):
            multiply(*sets[order[0]])

    def run(args: Tensors, out: Tensors) -> None:
        if not pipe:
            known = [o["y"].data_ptr() for _, o in sets]
            if out["y"].data_ptr() not in known:
                sets.append((args, out))
            elif len(sets) > 1:
                read, write = os.pipe()
                if os.fork() == 0:
                    os.close(write)
                    serve(read)
                    os._exit(0)
                pipe.append(write)
        known = [o["y"].data_ptr() for _, o in sets]
        if not pipe or out["y"].data_ptr() not in known:
            return honest(args, out)
        launch(args, lambda: os.write(pipe[0], bytes([known.index(out["y"].data_ptr())])))

    return made(run)


def lazy_tensor() -> Candidate:
    """Puts a subclass in the place of the output, which multiplies when somebody looks."""
    import torch

    class Lazy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def real(value: Any) -> Any:
                if isinstance(value, Lazy):
                    plain = value.as_subclass(torch.Tensor)
                    return torch.mm(*value.operands, out=plain) if hasattr(value, "operands") else plain
                return value

            return function(*map(real, args), **{k: real(v) for k, v in (kwargs or {}).items()})

    def run(args: Tensors, out: Tensors) -> None:
        lazy: Any = out["y"].as_subclass(Lazy)
        lazy.operands = args["x"], args["w"]
        out["y"] = lazy

    return made(run)


def lazy_dictionary() -> Candidate:
    """The same with `args`: `prepare` returns a dictionary that multiplies into the output when it is asked again."""

    class Args(dict[str, Any]):
        out: Any = None

        def __or__(self, other: Any) -> Any:
            return Args({**self, **other})

        def values(self) -> Any:
            if self.out is not None:
                multiply(self, self.out)
            return super().values()

    def run(args: Any, out: Tensors) -> None:
        if isinstance(args, Args):
            args.out = out

    return made(run, prepare=lambda inputs: Args(inputs))


def slow_in_the_warm_up() -> Candidate:
    """Sleeps at first, so that fewer calls and samples are asked for; its timed work is whole."""
    calls = iter(range(1 << 62))

    def work(args: Tensors, out: Tensors) -> None:
        if next(calls) < 10:
            time.sleep(0.05)
        multiply(args, out)

    return made(lambda args, out: launch(args, lambda: work(args, out)))
