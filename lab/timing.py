"""How a comparison is timed. One method:

1. Each arm is captured once as a CUDA graph of `calls` calls that walk over several distinct sets of inputs and
   outputs whose bytes exceed twice the L2 cache (`l2 = "cold"`), or over one set (`l2 = "warm"`); a sample is one
   replay between two CUDA events, divided by `calls` (timer "graph"). Multi-kernel candidates are charged for the gaps
   between their kernels, never for Python. There is no fallback: an arm that cannot be captured is its own error.
2. Warm-up of at least 10 replays and 25 ms an arm. Then blocks in the order A B B A, with B A A B every second block,
   so that drift and order hit both arms alike; the order is stored.
3. The spread between the two visits to the control within a block is the A/A noise: the same code against itself.
4. Sampling stops when the relative standard error of both arms is below 0.1 % or the time is up; `converged` says
   which. Every sample is kept, with the SM and memory clocks before and after.

Given up for now: isolation in a process of its own, throttle reasons, and the cross-check against Kineto.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.records import smi

L2_FACTOR = 2.0
WARM_UP_REPLAYS = 10
WARM_UP_S = 0.025
GRAPH_TARGET_US = 300.0
STANDARD_ERROR = 0.001
MIN_BLOCKS = 10


@dataclass
class Arm:
    """One side of a comparison: `sets` are (args, out) pairs, `run` launches one call on one of them."""

    name: str
    run: Callable[[Any, Any], None]
    sets: Sequence[tuple[Any, Any]]
    calls: int = 0
    graph: Any = None
    samples_us: list[float] = field(default_factory=list)
    blocks_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Timing:
    """The samples of one arm, us per call. sd_pct: standard deviation of the block medians in % of the median."""

    median_us: float
    iqr_us: float
    min_us: float
    n: int
    calls: int
    sets: int
    converged: bool
    sd_pct: float
    drift_pct: float
    samples_us: tuple[float, ...]
    blocks_us: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Two arms timed together. aa_pct: median absolute spread of the control against itself within a block, in %."""

    control: Timing
    candidate: Timing
    order: str
    aa_pct: float
    timer: str
    l2: str
    clocks_before: str | None
    clocks_after: str | None


def sets_for(bytes_per_call: float, l2_bytes: int, l2: str = "cold", most: int = 64) -> int:
    """How many distinct input sets a cold measurement rotates over: their bytes exceed L2_FACTOR times the cache."""
    if l2 == "warm":
        return 1
    return max(2, min(most, math.ceil(L2_FACTOR * l2_bytes / max(bytes_per_call, 1.0)) + 1))


def summarise(arm: Arm, converged: bool) -> Timing:
    """Median, interquartile range, minimum and drift (second half against first, %) of an arm's samples."""
    samples = arm.samples_us
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    half = len(samples) // 2 or 1
    first, second = statistics.median(samples[:half]), statistics.median(samples[half:] or samples)
    blocks = arm.blocks_us or samples
    middle = statistics.median(samples)
    return Timing(
        median_us=middle,
        iqr_us=quartiles[2] - quartiles[0],
        min_us=min(samples),
        n=len(samples),
        calls=arm.calls,
        sets=len(arm.sets),
        converged=converged,
        sd_pct=100.0 * statistics.stdev(blocks) / middle if len(blocks) > 1 else 0.0,
        drift_pct=100.0 * (second / first - 1.0),
        samples_us=tuple(round(s, 4) for s in samples),
        blocks_us=tuple(round(b, 4) for b in arm.blocks_us),
    )


def standard_error(samples: Sequence[float]) -> float:
    """Standard error of the mean over the mean; infinite for fewer than two samples."""
    if len(samples) < 2:
        return math.inf
    return statistics.stdev(samples) / math.sqrt(len(samples)) / statistics.fmean(samples)


def capture(arm: Arm) -> None:
    """Warm an arm up on every set, choose how many calls one graph holds, and capture it."""
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
        arm.calls = rounds * len(arm.sets)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    arm.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(arm.graph, stream=stream):
        for _ in range(rounds):
            for args, out in arm.sets:
                arm.run(args, out)
    torch.cuda.synchronize()


def sample(arm: Arm) -> float:
    """One replay, in microseconds per call."""
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    arm.graph.replay()
    stop.record()
    stop.synchronize()
    return 1000.0 * start.elapsed_time(stop) / arm.calls


def compare(control: Arm, candidate: Arm, l2: str = "cold", seconds: float = 2.0, visits: int = 5) -> Comparison:
    """Time two captured arms in A B B A blocks until both settle or `seconds` are up, `visits` samples a visit."""
    for arm in (control, candidate):
        until = time.perf_counter() + WARM_UP_S
        replays = 0
        while replays < WARM_UP_REPLAYS or time.perf_counter() < until:
            sample(arm)
            replays += 1
    clocks = ("clocks.sm", "clocks.mem")
    before = smi(*clocks)
    order: list[str] = []
    spreads: list[float] = []
    settled = False
    deadline = time.perf_counter() + seconds
    while not settled and (time.perf_counter() < deadline or len(order) < MIN_BLOCKS):
        first, second = (control, candidate) if len(order) % 2 == 0 else (candidate, control)
        order.append("ABBA" if first is control else "BAAB")
        medians: dict[str, list[float]] = {control.name: [], candidate.name: []}
        for arm in (first, second, second, first):
            taken = [sample(arm) for _ in range(visits)]
            arm.samples_us += taken
            medians[arm.name].append(statistics.median(taken))
        for arm in (control, candidate):
            arm.blocks_us.append(statistics.fmean(medians[arm.name]))
        one, two = medians[control.name]
        spreads.append(100.0 * abs(two / one - 1.0))
        enough = len(order) >= MIN_BLOCKS
        settled = enough and all(standard_error(a.samples_us) < STANDARD_ERROR for a in (control, candidate))
    return Comparison(
        control=summarise(control, standard_error(control.samples_us) < STANDARD_ERROR),
        candidate=summarise(candidate, standard_error(candidate.samples_us) < STANDARD_ERROR),
        order=" ".join(order),
        aa_pct=statistics.median(spreads),
        timer="graph",
        l2=l2,
        clocks_before=before,
        clocks_after=smi(*clocks),
    )
