"""The timers: three ways to learn how long a call takes on the GPU, one for how long it keeps the host.

A row stores the name of the one that was used.

graph   The default. Every arm becomes a CUDA graph of many calls that walk over its sets; a sample is one replay
        between two events, divided by the calls, and the samples of a visit follow each other without a pause. Python
        is out of the measurement; the gaps between a candidate's kernels and between its calls are in it
        (`lab.place.ceilings` measures them), as they are in a captured decode step. A call that takes ALONE_US is a
        graph and a sample by itself, on one set after the other, as a server replays a step; so are then those of all
        arms, whatever they take. Work that a candidate does outside
        the captured stream is not replayed, and the check among the blocks sees it.
events  One call between two events, the L2 flushed before it when cold. For what cannot be captured. The host must
        stay ahead of the GPU: a candidate of many small launches is charged for its launches.
cupti   The durations of the kernels themselves, from Kineto (torch.profiler), summed over the replay of the graph and
        divided by the calls. No gaps at all; slow to take. Used for the cross-check, and for very short kernels.
host    The calling thread's time for an eager call (`Candidate.eager`) in inference mode, by the host's clock: calls
        that walk over the sets, the GPU idle before the first. They are too few to fill the launch queue, one on each
        set where a call keeps the GPU for HOST_LONG_US, so the GPU's own time is not in it. Its rows have `host_us` and
        no time of a kernel; a process tells its own time, as under `events`.

None falls back to another: a candidate that cannot be captured is an error under `graph`. Imported only where torch is
needed anyway.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lab.base.errors import BadInput, nearest
from lab.bench.sampling import Arm, Timer

NAMES = ("graph", "events", "cupti", "host")
GRAPH_TARGET_US = 3000.0  # long, so that what a replay costs by itself is a small part of a sample
ALONE_US = 5000.0  # of a step of 2 ms one call a sample tripled the blocks' deviation and saved nothing
GUESSES = 3  # replays of one call on each set that say how many calls take so long
HEAD_START_CYCLES = 400_000  # about 200 us in which the host queues what is to be timed
FLUSH_FACTOR = 2
HOST_CALLS = 100  # of a sample; a queue of launches holds a thousand
HOST_LONG_US = 500.0  # of a step or a long prompt, which may be a thousand launches by itself


def named(name: str, l2: str, l2_bytes: int) -> Timer:
    """The timer of this name for an L2 state ("cold" or "warm"); raises BadInput for another name."""
    if name == "events":
        return EventsTimer(l2_bytes if l2 == "cold" else 0)
    if name not in NAMES:
        raise BadInput("--timer", f'"{name}" is no timer', nearest(name, NAMES))
    if name == "host":
        return HostTimer()
    return GraphTimer() if name == "graph" else CuptiTimer()


def elapsed_us(work: Callable[[], Any]) -> float:
    """Time between an event before and one after what `work` launches on the current stream, us."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return 1000.0 * start.elapsed_time(stop)


def captured(work: Callable[[], Any], stream: Any = None, pool: Any = None) -> Any:
    """A CUDA graph of what `work` launches, with memory of its own or of `pool`; raises what the capture raises."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        work()
    torch.cuda.synchronize()
    return graph


def _walk(arm: Arm, rounds: int = 1) -> None:
    for _ in range(rounds):
        for args, out in arm.sets:
            arm.run(args, out)


class GraphTimer:
    """See the module: replay of a captured graph."""

    name = "graph"
    broken = False  # a capture that fails leaves torch's random generators unusable in this process

    def prepare(self, arm: Arm) -> None:
        """Run every set once, choose how many calls a graph holds, capture it. Raises what the candidate raises.

        How many is what a graph of one call on each set says: launched one by one, short kernels wait for the host.
        `arm.alone` says beforehand whether a call is a sample by itself, or is set here.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _walk(arm)
        self.broken = True
        arm.once = captured(lambda: _walk(arm), stream)
        arm.once.replay()
        pass_us = elapsed_us(lambda: [arm.once.replay() for _ in range(GUESSES)]) / GUESSES
        rounds = max(1, math.ceil(GRAPH_TARGET_US / max(pass_us, 0.1 * len(arm.sets))))
        arm.alone = pass_us >= ALONE_US * len(arm.sets) if arm.alone is None else arm.alone
        if arm.alone:
            pool = arm.once.pool()  # no two of them run at once
            arm.calls = 1
            arm.state = [captured(functools.partial(arm.run, *pair), stream, pool) for pair in arm.sets]
        else:
            arm.calls = rounds * len(arm.sets)
            arm.state = [arm.once if rounds == 1 else captured(lambda: _walk(arm, rounds), stream)]
        self.broken = False

    def visit(self, arm: Arm, samples: int) -> list[float]:
        """Replays, us per call; returns when this stream, and no other, is done. Of no samples it is only that."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
        if arm.alone:  # else the first sample would wait for a long graph's launch
            torch.cuda._sleep(HEAD_START_CYCLES)
        marks[0].record()
        for mark in marks[1:]:
            arm.state[arm.turn % len(arm.state)].replay()
            arm.turn += 1
            mark.record()
        marks[-1].synchronize()
        return [1000.0 * before.elapsed_time(after) / arm.calls for before, after in itertools.pairwise(marks)]

    def one_pass(self, arm: Arm) -> None:
        """One call on each set, as a graph of its own; returns when this stream is done."""
        arm.once.replay()
        torch.cuda.current_stream().synchronize()

    def release(self, arm: Arm) -> None:
        """Forget the graphs."""
        arm.state = arm.once = None


class EventsTimer:
    """See the module: one call between two events; `l2_bytes` of cache are overwritten before each call, 0 for warm."""

    name = "events"

    def __init__(self, l2_bytes: int) -> None:
        self.flush_bytes = FLUSH_FACTOR * l2_bytes
        self.scratch: Any = None

    def prepare(self, arm: Arm) -> None:
        """Run every set once and allocate what overwrites the cache."""
        _walk(arm)
        torch.cuda.synchronize()
        if self.flush_bytes and self.scratch is None:
            self.scratch = torch.empty(self.flush_bytes, dtype=torch.uint8, device="cuda")

    def visit(self, arm: Arm, samples: int) -> list[float]:
        """Calls on one set after the other, us; returns when this stream, and no other, is done."""
        return [self._call_us(arm) for _ in range(samples)]

    def _call_us(self, arm: Arm) -> float:
        """A spinning kernel before the call gives the host its head start."""
        args, out = arm.sets[arm.turn % len(arm.sets)]
        arm.turn += 1
        if self.scratch is not None:
            self.scratch.fill_(arm.turn % 255)
        torch.cuda._sleep(HEAD_START_CYCLES)
        return elapsed_us(lambda: arm.run(args, out))

    def release(self, arm: Arm) -> None:
        """Nothing is kept."""


class HostTimer:
    """See the module: the host's clock around eager calls."""

    name = "host"

    def prepare(self, arm: Arm) -> None:
        """Call each set twice, so that nothing is left to compile, and say how many calls a sample holds."""
        with torch.inference_mode():
            for _ in range(2):
                began = time.perf_counter()
                self._calls(arm, len(arm.sets))
                took_us = 1e6 * (time.perf_counter() - began)  # until the GPU was done
        rounds = 1 if took_us >= HOST_LONG_US * len(arm.sets) else max(1, HOST_CALLS // len(arm.sets))
        arm.calls = rounds * len(arm.sets)

    def visit(self, arm: Arm, samples: int) -> list[float]:
        """Rounds of calls over all sets, us a call; what the last call on each gave ends in its outputs."""
        with torch.inference_mode():
            taken = [self._calls(arm, arm.calls) for _ in range(samples)]
        arm.turn += samples
        return taken

    def _calls(self, arm: Arm, calls: int) -> float:
        given: list[Any] = [None] * len(arm.sets)
        _wait()
        began = time.perf_counter_ns()
        if arm.eager is None:
            _walk(arm, calls // len(arm.sets))
        else:
            for _ in range(calls // len(arm.sets)):
                for number, (args, out) in enumerate(arm.sets):
                    given[number] = arm.eager(args, out)
        taken = (time.perf_counter_ns() - began) / 1e3 / calls
        for made, (_, out) in zip(given, arm.sets, strict=True):
            for name, tensor in (made or {}).items():
                out[name].copy_(tensor)
        _wait()
        return taken

    def release(self, arm: Arm) -> None:
        """Nothing is kept."""


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class CuptiTimer(GraphTimer):
    """See the module: the sum of kernel durations in one profiled replay, us per call."""

    name = "cupti"

    def visit(self, arm: Arm, samples: int) -> list[float]:
        """Profiled replays; raises RuntimeError as `kernel_durations_us` does."""
        arm.turn += samples
        calls = arm.calls * len(arm.state)
        return [math.fsum(kernel_durations_us(arm)) / calls for _ in range(samples)]


def kernel_durations_us(arm: Arm) -> list[float]:
    """Kineto's duration of each kernel, copy and fill in one replay of an arm's graphs, us.

    Raises RuntimeError where it lists none.
    """
    for graph in arm.state:
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as kineto:
        for graph in arm.state:
            graph.replay()
        torch.cuda.synchronize()
    found = [e for e in kineto.events() if e.device_type == DeviceType.CUDA]
    if not found:
        raise RuntimeError("Kineto lists no GPU activity; another profiler may hold CUPTI in this process")
    return [e.time_range.elapsed_us() for e in found]
