"""The timers: three ways to learn how long a call takes on the GPU. A row stores the name of the one that was used.

graph   The default. Every arm becomes a CUDA graph of many calls that walk over its sets; a sample is one replay
        between two events, divided by the calls. Python is out of the measurement; the gaps between a candidate's
        kernels and between its calls are in it (`lab.place.ceilings` measures them), as they are in a captured decode
        step. Work that a candidate does outside the captured stream is not replayed, and the check after the timing
        sees it.
events  One call between two events, the L2 flushed before it when cold. For what cannot be captured. The host must
        stay ahead of the GPU: a candidate of many small launches is charged for its launches.
cupti   The durations of the kernels themselves, from Kineto (torch.profiler), summed over the replay of the graph and
        divided by the calls. No gaps at all; slow to take. Used for the cross-check, and for very short kernels.

None falls back to another: a candidate that cannot be captured is an error under `graph`.
"""

from __future__ import annotations

import math
from typing import Any

from lab.base.errors import BadInput, nearest
from lab.bench.sampling import Arm

NAMES = ("graph", "events", "cupti")
GRAPH_TARGET_US = 3000.0  # long, so that what a replay costs by itself is a small part of a sample
HEAD_START_CYCLES = 400_000  # about 200 us in which the host queues what is to be timed
FLUSH_FACTOR = 2


def named(name: str, l2: str, l2_bytes: int) -> Any:
    """The timer of this name for an L2 state ("cold" or "warm"); raises BadInput for another name."""
    if name == "graph":
        return GraphTimer()
    if name == "events":
        return EventsTimer(l2_bytes if l2 == "cold" else 0)
    if name == "cupti":
        return CuptiTimer()
    raise BadInput("--timer", f'"{name}" is no timer', nearest(name, NAMES))


class GraphTimer:
    """See the module: replay of a captured graph."""

    name = "graph"

    def __init__(self) -> None:
        self.broken = False  # a capture that fails leaves torch's random generators unusable in this process

    def prepare(self, arm: Arm) -> None:
        """Run every set once, choose how many calls a graph holds, capture it. Raises what the candidate raises."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for args, out in arm.sets:
                arm.run(args, out)
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            for args, out in arm.sets:
                arm.run(args, out)
            stop.record(stream)
            stop.synchronize()
        each_us = 1000.0 * start.elapsed_time(stop) / len(arm.sets)
        rounds = max(1, math.ceil(GRAPH_TARGET_US / max(each_us, 0.1) / len(arm.sets)))
        torch.cuda.synchronize()
        graph, once = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.broken = True
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for args, out in arm.sets:
                    arm.run(args, out)
        torch.cuda.synchronize()
        # The check after the timing replays one call on the first set: what is not captured is not done.
        with torch.cuda.graph(once, stream=stream):
            arm.run(*arm.sets[0])
        torch.cuda.synchronize()
        self.broken = False
        arm.calls = rounds * len(arm.sets)
        arm.state = graph, once

    def sample(self, arm: Arm) -> float:
        """One replay, us per call."""
        import torch

        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        arm.state[0].replay()
        stop.record()
        stop.synchronize()
        return 1000.0 * start.elapsed_time(stop) / arm.calls

    def once(self, arm: Arm) -> None:
        """One call on the first set as it was captured; returns when this stream, and no other, is done."""
        import torch

        arm.state[1].replay()
        torch.cuda.current_stream().synchronize()


class EventsTimer:
    """See the module: one call between two events; `flush_bytes` of L2 are overwritten before each call, 0 for warm."""

    name = "events"

    def __init__(self, flush_bytes: int) -> None:
        self.flush_bytes = FLUSH_FACTOR * flush_bytes
        self.scratch: Any = None
        self.turn = 0

    def prepare(self, arm: Arm) -> None:
        """Run every set once and allocate what overwrites the cache."""
        import torch

        for args, out in arm.sets:
            arm.run(args, out)
        torch.cuda.synchronize()
        if self.flush_bytes and self.scratch is None:
            self.scratch = torch.empty(self.flush_bytes, dtype=torch.uint8, device="cuda")

    def sample(self, arm: Arm) -> float:
        """One call, us. A spinning kernel before it gives the host its head start."""
        import torch

        args, out = arm.sets[self.turn % len(arm.sets)]
        self.turn += 1
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.scratch is not None:
            self.scratch.fill_(self.turn % 255)
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        arm.run(args, out)
        stop.record()
        stop.synchronize()
        return 1000.0 * start.elapsed_time(stop)

    def once(self, arm: Arm) -> None:
        """One call on the first set; returns when this stream, and no other, is done."""
        import torch

        arm.run(*arm.sets[0])
        torch.cuda.current_stream().synchronize()


class CuptiTimer(GraphTimer):
    """See the module: the sum of kernel durations in one profiled replay, us per call."""

    name = "cupti"

    def sample(self, arm: Arm) -> float:
        """One profiled replay. Raises RuntimeError when Kineto lists no kernel, rather than report 0."""
        return kernel_time_us(arm)


def kernel_time_us(arm: Arm) -> float:
    """Kineto's kernel, memcpy and memset durations in one replay of a captured arm, us per call."""
    return math.fsum(kernel_durations_us(arm)) / arm.calls


def kernel_durations_us(arm: Arm) -> list[float]:
    """The duration of each GPU activity in one profiled replay of a captured arm, us.

    Raises RuntimeError when Kineto lists none, rather than let a caller add up to 0.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    arm.state[0].replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as captured:
        arm.state[0].replay()
        torch.cuda.synchronize()
    found = [e for e in captured.events() if e.device_type == DeviceType.CUDA]
    if not found:
        raise RuntimeError("Kineto lists no GPU activity; another profiler may hold CUPTI in this process")
    return [e.time_range.elapsed_us() for e in found]
