"""Exposed time by hand, as identities on random traces, and the what-if's bounds against replayed timelines."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.trace import amdahl, exposed
from lab.trace.amdahl import Interval
from lab.trace.categories import Rule, Rules
from lab.trace.model import Calls, Copies, Kernels, Trace
from tests.draw.test_pictures import sample

GEMM, ATTENTION, COLLECTIVE, WAIT = (
    "nvjet_tst_64x64",
    "splitkv_kernel",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "at::cuda::spin_kernel(long)",
)
NAMES = [GEMM, ATTENTION, COLLECTIVE, WAIT]


def test_exposed_is_what_no_other_category_covers() -> None:
    """Attention 0-30 and 95-100, a GEMM 25-50, copies 45-55 and 60-65, a wait 70-80."""
    assert exposed.exposed_us(sample()) == {
        "attention": 30.0,
        "dense_gemm": 15.0,
        "memcpy DtoD": 5.0,
        "memcpy HtoD": 5.0,
    }
    found = exposed.by_device(sample())[0]
    assert found.overlapped_ns == 10_000
    assert dict(found.parts["dense_gemm"].behind) == {"attention": 5_000, "memcpy DtoD": 5_000}
    assert exposed.by_kernel(sample())["splitkv_kernel"] == (30_000, "nvjet_tst_64x64")


def test_communication_hidden_and_exposed_by_device() -> None:
    """On each of two GPUs a collective of 50 us; on the first a product covers 40 of it, on the second nothing."""
    kernels = Kernels.of(
        start_ns=[0, 0, 0], end_ns=[40_000, 50_000, 50_000], name=[0, 2, 2], stream=[1, 2, 2], device=[0, 0, 1]
    )
    t = Trace(tool="t", source="two", names=NAMES, kernels=kernels)
    found = exposed.by_device(t)
    assert [found[d].parts["collective"].exposed_ns for d in (0, 1)] == [10_000, 50_000]
    assert found[0].parts["collective"].behind == {"dense_gemm": 40_000}
    assert exposed.by_kernel(t)[COLLECTIVE] == (60_000, GEMM)


ROW = st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, 3), st.integers(0, 2), st.integers(0, 1))


@settings(max_examples=150)
@given(st.lists(ROW, min_size=1, max_size=14), st.lists(ROW, max_size=4))
def test_exposed_overlapped_and_idle_are_the_span(
    rows: list[tuple[int, int, int, int, int]], moved: list[tuple[int, int, int, int, int]]
) -> None:
    """Against a brute force over every nanosecond: the parts of each device, and each kernel's own."""
    start, length, name, stream, device = (np.array(c) for c in zip(*rows, strict=True))
    kernels = Kernels.of(start_ns=start, end_ns=start + length, name=name, stream=stream, device=device)
    columns = [np.array(c) for c in zip(*moved, strict=True)] or [np.zeros(0, int)] * 5
    copies = Copies.of(start_ns=columns[0], end_ns=columns[0] + columns[1], kind=columns[2], device=columns[4])
    t = Trace(tool="t", source="s", names=NAMES, kernels=kernels, memcpy=copies)
    per_kernel = dict.fromkeys(NAMES, 0)
    for gpu, found in exposed.by_device(t).items():
        moments: list[set[str]] = [set() for _ in range(100)]
        running: list[set[str]] = [set() for _ in range(100)]
        for s, n, i, _, d in rows:
            for at in range(s, s + n) if d == gpu and i < 3 else ():
                moments[at].add(("dense_gemm", "attention", "collective")[i])
                running[at].add(NAMES[i])
        for s, n, i, _, d in moved:
            for at in range(s, s + n) if d == gpu else ():
                moments[at].add(f"memcpy {('unknown', 'HtoD', 'DtoH', 'HtoA')[i]}")
                running[at].add(f"copy {i}")
        assert found.overlapped_ns == sum(len(m) > 1 for m in moments)
        for category, part in found.parts.items():
            assert part.exposed_ns == sum(m == {category} for m in moments)
            assert part.union_ns == sum(category in m for m in moments)
            assert all(ns == sum({category, b} <= m for m in moments) for b, ns in part.behind.items())
        idle = sum(not m for m in moments)
        assert sum(p.exposed_ns for p in found.parts.values()) + found.overlapped_ns + idle == 100
        for kernel in per_kernel:
            per_kernel[kernel] += sum(r == {kernel} for r in running)
    assert {n: ns for n, (ns, _) in exposed.by_kernel(t).items()} == per_kernel


def test_more_categories_than_bits_of_an_integer() -> None:
    """90, which only rules of a user's own can make, each with its own microsecond beside the next."""
    start, names = 10 * np.arange(90), [f"k{i}_" for i in range(90)]
    rules = Rules(tuple(Rule(name, f"^{name}") for name in names), {})
    kernels = Kernels.of(start_ns=start, end_ns=start + 11, name=range(90), device=[0] * 90)
    found = exposed.by_device(Trace(tool="t", source="s", names=names, kernels=kernels), rules)[0]
    assert sum(p.exposed_ns for p in found.parts.values()) + found.overlapped_ns == 901
    assert (found.overlapped_ns, found.parts["k1_"].behind) == (89, {"k0_": 1, "k2_": 1})


# What a faster part gives ---------------------------------------------------------------------------------------------


class Simulated:
    """A random program: a host that launches, synchronises and computes, streams in order, events between them.

    A kernel starts when its stream's last one, the kernels that it waits for and its launch are done; the host waits
    for a stream where it synchronises. `run` gives every start and end for given durations.
    """

    def __init__(self, rng: random.Random, calls: bool) -> None:
        self.calls, self.latency = calls, rng.choice([0, 2, 5])
        self.threads = rng.choice([1, 1, 2]) if calls else 1
        streams = rng.choice([1, 2, 3])
        self.program: list[tuple[str, int, int]] = []  # op, thread, value
        self.kernels: list[tuple[int, int, list[int]]] = []  # stream, category, waits for
        self.device = [rng.randrange(2) for _ in range(streams)]
        for _ in range(rng.randrange(3, 30)):
            thread, kind = rng.randrange(self.threads), rng.random()
            if calls and kind < 0.15:
                self.program.append(("sync", thread, rng.randrange(streams)))
            elif calls and kind < 0.3:
                self.program.append(("compute", thread, rng.randrange(40)))
            else:
                known = range(len(self.kernels))
                waits = rng.sample(known, min(len(known), rng.choice([0, 0, 1, 2])))
                self.program.append(("launch", thread, len(self.kernels)))
                self.kernels.append((rng.randrange(streams), rng.randrange(3), waits))
        if not self.kernels:
            self.program.append(("launch", 0, 0))
            self.kernels.append((0, 0, []))
        self.length = [rng.choice([1, 5, 20, 60]) + rng.randrange(5) for _ in self.kernels]
        self.cost = rng.choice([1, 3, 15])

    def run(self, length: list[float]) -> tuple[list[float], list[float], list[tuple[str, int, float, float, int]]]:
        clock = [0.0] * self.threads
        last: dict[int, float] = {}
        start, end = [0.0] * len(length), [0.0] * len(length)
        made: list[tuple[str, int, float, float, int]] = []
        for op, thread, value in self.program:
            begin = clock[thread]
            if op == "compute":
                clock[thread] += value
            elif op == "sync":
                clock[thread] = max(begin + 1, last.get(value, 0.0))
                made.append(("cudaStreamSynchronize_v3020", thread, begin, clock[thread], 0))
            else:
                stream, _, waits = self.kernels[value]
                clock[thread] += self.cost if self.calls else 0
                ready = max([clock[thread] + self.latency, last.get(stream, 0.0), *(end[w] for w in waits)])
                start[value], end[value] = ready, ready + length[value]
                last[stream] = end[value]
                made.append(("cudaLaunchKernel_v7000", thread, begin, clock[thread], value + 1))
        return start, end, made

    def trace(self) -> Trace:
        start, end, made = self.run([float(n) for n in self.length])
        stream, category, _ = zip(*self.kernels, strict=True)
        n = len(start)
        kernels = Kernels.of(
            start_ns=np.array(start, int), end_ns=np.array(end, int), name=category, stream=stream,
            device=[self.device[s] for s in stream], process=[1] * n, correlation=range(1, n + 1),
        )  # fmt: skip
        names = ["cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020"]
        calls = Calls.of(
            start_ns=[int(c[2]) for c in made], end_ns=[int(c[3]) for c in made], process=[1] * len(made),
            thread=[c[1] for c in made], correlation=[c[4] for c in made], name=[names.index(c[0]) for c in made],
        )  # fmt: skip
        t = Trace(tool="t", source="simulated", names=NAMES[:3], kernels=kernels, call_names=names)
        return t.but(calls=calls) if self.calls else t


@pytest.mark.parametrize("calls", [True, False], ids=["host", "no-calls"])
def test_the_true_gain_lies_in_the_interval(calls: bool) -> None:
    """1,000 random timelines: some kernels are made faster (or slower) and the program runs again.

    Without calls in the trace the host is assumed never to be late, and is not.
    """
    rng = random.Random(f"what if {calls}")
    outside, narrow, above, tried = [], 0, 0, 0
    while tried < 500:
        made = Simulated(rng, calls)
        t = made.trace()
        wanted = rng.randrange(3)
        if wanted not in t.kernels.name:
            continue
        tried += 1
        k = rng.choice([1.25, 2.0, 10.0, math.inf, 0.5])
        found = exposed.what_if(t, kernel="^" + NAMES[wanted].partition("(")[0])
        gain = amdahl.project(found.share, Interval.of(k)).gain_pct
        faster = [n / k if c == wanted else n for n, (_, c, _) in zip(made.length, made.kernels, strict=True)]
        spans = []
        for length in ([float(n) for n in made.length], faster):
            _, end, _ = made.run(length)
            # The span of the program: from the first launch, which no kernel moves, to the last end.
            spans.append(max(end) - int(t.kernels.start_ns[0]))
        true = (spans[0] / spans[1] - 1) * 100 if spans[1] > 0 else math.inf
        if not gain.low - 1e-6 <= true <= gain.high + 1e-6:
            outside.append((tried, k, true, gain))
        narrow += gain.high - gain.low < 1e-6
        above += abs(true) > 1e-6 and min(abs(gain.low), abs(gain.high)) > 1e-6
    assert outside == []
    assert narrow > 20, "the bounds meet where nothing overlaps and no host is late"
    assert above > 60, "the nearer bound says something"
