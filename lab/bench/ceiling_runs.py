"""Measure the ceilings of the GPU that is here (lab/place/ceilings.py says what each means) and append them as rows."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from lab.base import devices
from lab.bench import machine
from lab.row import store
from lab.row.records import CEILINGS, REST, UPDATE_MIB, Ceiling


def measure(device: devices.Device, names: tuple[str, ...] = tuple(CEILINGS)) -> Iterator[Ceiling]:
    """Measure ceilings on the GPU that is here, append each as a row and yield it."""
    run, _ = store.new_run(device.id, "ceilings")
    folder = store.FOLDER / device.id / "ceilings" / run
    made = machine.provenance()
    for name in names:
        unit, method = CEILINGS[name]
        before = machine.clocks()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        samples = MEASURES[name]()
        after = machine.clocks()
        value = min(samples) if unit == "us" else max(samples)
        row = Ceiling(
            **structs.asdict(made),
            device=device.id,
            name=name,
            value=value,
            unit=unit,
            method=method,
            samples=tuple(round(s, 4) for s in samples),
            clocks=tuple(c for c in (before, after) if c),
            run=run,
            started=started,
        )
        store.append(folder, row)
        yield row


def _eager(call: Callable[[], Any], repeats: int = 20, warm: int = 5, rest: float = 0.0) -> list[float]:
    """Seconds of each of `repeats` eager calls between two events; idles `rest` times its duration after each."""
    import torch

    taken = []
    for number in range(warm + repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        seconds = 1e-3 * start.elapsed_time(stop)
        if number >= warm:
            taken.append(seconds)
        if rest:
            time.sleep(rest * seconds)
    return taken


def _graphed(call: Callable[[], Any], nodes: int = 1) -> list[float]:
    """Seconds of a call captured `nodes` times in a graph, per node, over replays."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            call()
    return [t / nodes for t in _eager(graph.replay)]


def _buffers(count: int) -> list[Any]:
    import torch

    return [torch.randn(2**30, device="cuda") for _ in range(count)]  # 4 GiB each


def _copy_kernel() -> list[float]:
    import torch

    a, b = _buffers(2)
    # An elementwise kernel and not cudaMemcpy, which copy_ would be between contiguous tensors of one dtype.
    return [2 * a.nbytes / t * 1e-9 for t in _eager(lambda: torch.mul(a, 1.0, out=b))]


def _copy_graph() -> list[float]:
    a, b = _buffers(2)
    return [2 * a.nbytes / t * 1e-9 for t in _graphed(lambda: b.copy_(a))]


def _read() -> list[float]:
    import torch

    from lab.bench.ceilings_kernels import read_kernel

    (x,) = _buffers(1)
    best: list[float] = []
    for block, trips, warps in ((4096, 16, 8), (8192, 8, 8), (4096, 64, 8), (2048, 64, 4)):
        programs = x.numel() // (block * trips)
        out = torch.empty(programs, device="cuda")

        def call(block: int = block, trips: int = trips, warps: int = warps, out: Any = out) -> None:
            read_kernel[(out.numel(),)](x, out, BLOCK=block, TRIPS=trips, num_warps=warps)

        taken = [x.nbytes / t * 1e-9 for t in _eager(call)]
        best = max(best, taken, key=lambda s: statistics.median(s) if s else 0.0)
    return best


def _write() -> list[float]:
    (x,) = _buffers(1)
    return [x.nbytes / t * 1e-9 for t in _eager(lambda: x.fill_(1.5))]


def _update(mib: int) -> list[float]:
    import torch

    from lab.bench.ceilings_kernels import update_kernel

    x = torch.randn(2**29, device="cuda")  # 2 GiB
    count = mib * 2**18
    stretches = [x[i * count : (i + 1) * count] for i in range(min(64, x.numel() // count))]
    best: list[float] = []
    for block, warps in ((1024, 2), (2048, 4), (4096, 8), (8192, 8)):
        turn = itertools.cycle(stretches)

        def call(block: int = block, warps: int = warps, turn: Iterator[Any] = turn) -> None:
            update_kernel[(count // block,)](next(turn), BLOCK=block, num_warps=warps)

        # Short work: as many calls a graph as a sample of a row holds.
        nodes = max(len(stretches), 768 // mib)
        taken = [2 * 4 * count / t * 1e-9 for t in _graphed(call, nodes)]
        best = max(best, taken, key=lambda s: statistics.median(s) if s else 0.0)
    return best


def _l2_read() -> list[float]:
    import torch

    from lab.bench.ceilings_kernels import reread_kernel

    block, passes = 4096, 256
    x = torch.randn(2**22, device="cuda")  # 16 MiB
    programs = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs, device="cuda")
    moved = programs * passes * block * 4

    def call() -> None:
        reread_kernel[(programs,)](x, out, x.numel() // block, PASSES=passes, BLOCK=block, num_warps=8)

    return [moved / t * 1e-9 for t in _eager(call)]


def _products(
    make: Callable[[int, int, int], Callable[[], Any]], shapes: tuple[tuple[int, int, int], ...], rest: float
) -> list[float]:
    best: list[float] = []
    for m, n, k in shapes:
        taken = [2.0 * m * n * k / t * 1e-12 for t in _eager(make(m, n, k), rest=rest)]
        best = max(best, taken, key=lambda s: statistics.median(s) if s else 0.0)
    return best


def _bf16(rest: float = 0.0, quiet: bool = False) -> list[float]:
    import torch

    def make(m: int, n: int, k: int) -> Callable[[], Any]:
        filled = torch.zeros if quiet else torch.randn
        a, b = (filled(r, k, device="cuda").to(torch.bfloat16) for r in (m, n))
        return lambda: a @ b.t()

    return _products(make, ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 8192, 8192), (8192, 4096, 16384)), rest)


def _fp8(rest: float = 0.0, quiet: bool = False) -> list[float]:
    import torch

    def make(m: int, n: int, k: int) -> Callable[[], Any]:
        filled = torch.zeros if quiet else torch.randn
        a, b = (filled(r, k, device="cuda").to(torch.float8_e4m3fn) for r in (m, n))
        one = torch.ones((), device="cuda")
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, **options)

    return _products(make, ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 16384)), rest)


def _int8(rest: float = 0.0, quiet: bool = False) -> list[float]:
    import torch

    low, high = (0, 1) if quiet else (-127, 128)

    def make(m: int, n: int, k: int) -> Callable[[], Any]:
        a, b = (torch.randint(low, high, (r, k), device="cuda", dtype=torch.int8) for r in (m, n))
        return lambda: torch._int_mm(a, b.t())

    return _products(make, ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 16384)), rest)


def _launch() -> list[float]:
    import torch

    from lab.bench.ceilings_kernels import null_kernel

    x = torch.empty(1, device="cuda")

    def many() -> None:
        for _ in range(200):
            null_kernel[(1,)](x, num_warps=1)

    return [1e6 * t / 200 for t in _eager(many)]


def _graph_gap() -> list[float]:
    import torch

    from lab.bench import sampling
    from lab.bench.ceilings_kernels import null_kernel
    from lab.bench.timers import GraphTimer, kernel_time_us

    x = torch.empty(1, device="cuda")
    arm = sampling.Arm("null", lambda args, out: null_kernel[(1,)](x, num_warps=1), [(None, None)])
    timer = GraphTimer()
    timer.prepare(arm)
    # An idle GPU takes a while to reach its clocks, and this is short work.
    sampling.warm_up(timer, arm)
    _eager(_spin)
    own_us = statistics.median(kernel_time_us(arm) for _ in range(5))
    return [timer.sample(arm) - own_us for _ in range(20)]


def _spin() -> None:
    import torch

    torch.cuda._sleep(10_000_000)


MEASURES: Mapping[str, Callable[[], list[float]]] = {
    "copy_kernel": _copy_kernel,
    "copy_graph": _copy_graph,
    "read": _read,
    "write": _write,
    **{f"update_{mib}_mib": functools.partial(_update, mib) for mib in UPDATE_MIB},
    "l2_read": _l2_read,
    "bf16": _bf16,
    "fp8": _fp8,
    "int8": _int8,
    "bf16_rested": functools.partial(_bf16, REST),
    "fp8_rested": functools.partial(_fp8, REST),
    "int8_rested": functools.partial(_int8, REST),
    "bf16_quiet": functools.partial(_bf16, REST, quiet=True),
    "fp8_quiet": functools.partial(_fp8, REST, quiet=True),
    "int8_quiet": functools.partial(_int8, REST, quiet=True),
    "launch": _launch,
    "graph_gap": _graph_gap,
}
