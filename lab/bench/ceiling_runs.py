"""Measure the ceilings of the GPU that is here (lab/place/ceilings.py says what each means) and append them as rows.

Each program does one thing and returns its samples in the unit of its ceiling. Where a ceiling is the best of several
launch shapes or sizes, the samples are those of the one with the highest median. Imported only on a GPU.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from msgspec import structs

from kernels import issue
from lab.base import devices
from lab.bench import machine, sampling, timers
from lab.row import store
from lab.row.records import CEILINGS, REST, UPDATE_MIB, Ceiling

Samples = list[float]
Call = Callable[[], Any]
GIB = 2**28  # elements of float32 in one


def measure(device: devices.Device, names: tuple[str, ...] = tuple(CEILINGS)) -> Iterator[Ceiling]:
    """Measure ceilings on the GPU that is here, append each as a row and yield it."""
    run, folder = store.new_run(device.id, "ceilings")
    made = machine.provenance()
    hopper = torch.cuda.get_device_capability() == issue.SOURCE.capability
    for name in (name for name in names if hopper or not name.startswith("issue_")):
        unit, method = CEILINGS[name]
        before, started = machine.clocks(), machine.now()
        samples = MEASURES[name]()
        row = Ceiling(
            **structs.asdict(made),
            device=device.id,
            name=name,
            value=min(samples) if unit == "us" else max(samples),
            unit=unit,
            method=method,
            samples=tuple(round(s, 4) for s in samples),
            clocks=tuple(c for c in (before, machine.clocks()) if c),
            run=run,
            started=started,
        )
        store.append(folder, row)
        yield row


# Kernels that do nothing but move bytes ------------------------------------------------------------------------------


@triton.jit
def read_kernel(x, out, BLOCK: tl.constexpr, TRIPS: tl.constexpr):
    """Each program reads TRIPS blocks of float32 in a row and stores one sum, so that no load can be dropped."""
    first = tl.program_id(0).to(tl.int64) * BLOCK * TRIPS
    total = tl.zeros([BLOCK], tl.float32)
    for trip in range(TRIPS):
        total += tl.load(x + first + trip * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def update_kernel(x, BLOCK: tl.constexpr):
    """Each program negates one block of float32 in place: bytes in and out, and nothing that could hide them."""
    at = x + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, -tl.load(at))


@triton.jit
def reread_kernel(x, out, blocks, PASSES: tl.constexpr, BLOCK: tl.constexpr):
    """Every program walks the whole of a small buffer PASSES times from its own place: reads that the L2 serves."""
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(PASSES):
        at = (tl.program_id(0) * 7 + step) % blocks
        total += tl.load(x + at * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def null_kernel(x):
    """The least a launch can be."""
    tl.store(x, 0.0)


# Programs ------------------------------------------------------------------------------------------------------------


def _eager(call: Call, rest: float = 0.0, repeats: int = 20, warm: int = 5) -> Samples:
    """Seconds of each of `repeats` eager calls; idles `rest` times its duration after each."""
    taken = []
    for _ in range(warm + repeats):
        taken.append(1e-6 * timers.elapsed_us(call))
        if rest:
            time.sleep(rest * taken[-1])
    return taken[warm:]


def _graphed(call: Call, nodes: int = 1) -> Samples:
    """Seconds of a call captured `nodes` times in a graph, per node, over replays."""
    call()

    def work() -> None:
        for _ in range(nodes):
            call()

    return [t / nodes for t in _eager(timers.captured(work).replay)]


def _rates(amount: float, seconds: Samples) -> Samples:
    """GB/s of bytes, TFLOP/s of thousands of operations."""
    return [amount / t * 1e-9 for t in seconds]


def _best(trials: Iterable[Samples]) -> Samples:
    return max(trials, key=statistics.median)


def _floats(count: int) -> Any:
    return torch.randn(count, device="cuda")


def _copy_kernel() -> Samples:
    a, b = _floats(4 * GIB), _floats(4 * GIB)
    # An elementwise kernel and not cudaMemcpy, which copy_ would be between contiguous tensors of one dtype.
    return _rates(2 * a.nbytes, _eager(lambda: torch.mul(a, 1.0, out=b)))


def _copy_graph() -> Samples:
    a, b = _floats(4 * GIB), _floats(4 * GIB)
    return _rates(2 * a.nbytes, _graphed(lambda: b.copy_(a)))


def _read() -> Samples:
    x = _floats(4 * GIB)

    def trial(block: int, trips: int, warps: int) -> Samples:
        out = torch.empty(x.numel() // (block * trips), device="cuda")
        kernel = read_kernel[(out.numel(),)]
        return _rates(x.nbytes, _eager(lambda: kernel(x, out, BLOCK=block, TRIPS=trips, num_warps=warps)))

    return _best(trial(*shape) for shape in ((4096, 16, 8), (8192, 8, 8), (4096, 64, 8), (2048, 64, 4)))


def _write() -> Samples:
    x = _floats(4 * GIB)
    return _rates(x.nbytes, _eager(lambda: x.fill_(1.5)))


def _update(mib: int) -> Samples:
    x = _floats(2 * GIB)
    count = mib * 2**18
    stretches = x[: min(64, x.numel() // count) * count].split(count)

    def trial(block: int, warps: int) -> Samples:
        turn = itertools.cycle(stretches)
        # Short work: as many calls a graph as a sample of a row holds.
        nodes = max(len(stretches), 768 // mib)
        kernel = update_kernel[(count // block,)]
        return _rates(2 * 4 * count, _graphed(lambda: kernel(next(turn), BLOCK=block, num_warps=warps), nodes))

    return _best(trial(*shape) for shape in ((1024, 2), (2048, 4), (4096, 8), (8192, 8)))


def _l2_read() -> Samples:
    block, passes = 4096, 256
    x = _floats(2**22)  # 16 MiB
    programs = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs, device="cuda")
    kernel, blocks = reread_kernel[(programs,)], x.numel() // block
    taken = _eager(lambda: kernel(x, out, blocks, PASSES=passes, BLOCK=block, num_warps=8))
    return _rates(programs * passes * block * 4, taken)


def _bf16(a: Any, b: Any) -> Call:
    return lambda: a @ b


def _fp8(a: Any, b: Any) -> Call:
    one = torch.ones((), device="cuda")
    options: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return lambda: torch._scaled_mm(a, b, **options)


def _int8(a: Any, b: Any) -> Call:
    return lambda: torch._int_mm(a, b)


SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 16384))  # M, N, K
PRODUCTS: dict[str, tuple[torch.dtype, Callable[[Any, Any], Call], tuple[tuple[int, int, int], ...]]] = {
    "bf16": (torch.bfloat16, _bf16, (*SHAPES, (4096, 8192, 8192))),
    "fp8": (torch.float8_e4m3fn, _fp8, SHAPES),
    "int8": (torch.int8, _int8, SHAPES),
}
WAYS = {"": (0.0, False), "_rested": (REST, False), "_quiet": (REST, True)}  # rest, whether the operands are zeros


def _product(pipe: str, rest: float, quiet: bool) -> Samples:
    dtype, ready, shapes = PRODUCTS[pipe]

    def operand(rows: int, k: int) -> Any:
        if quiet:
            return torch.zeros(rows, k, device="cuda").to(dtype)
        if dtype == torch.int8:
            return torch.randint(-127, 128, (rows, k), device="cuda", dtype=dtype)
        return torch.randn(rows, k, device="cuda").to(dtype)

    def trial(m: int, n: int, k: int) -> Samples:
        return _rates(2e-3 * m * n * k, _eager(ready(operand(m, k), operand(n, k).t()), rest))

    return _best(trial(*shape) for shape in shapes)


def _issue(name: str) -> Samples:
    call, operations, held = issue.ready(name)
    seconds = _eager(call)
    return _rates(held, seconds) if name == "decode" else _rates(1e-3 * operations, seconds)


def _launch() -> Samples:
    x = torch.empty(1, device="cuda")

    def many() -> None:
        for _ in range(200):
            null_kernel[(1,)](x, num_warps=1)

    return [1e6 * t / 200 for t in _eager(many)]


def _graph_gap() -> Samples:
    x = torch.empty(1, device="cuda")
    arm = sampling.Arm("null", lambda args, out: null_kernel[(1,)](x, num_warps=1), [(None, None)])
    timer, kineto = timers.GraphTimer(), timers.CuptiTimer()
    timer.prepare(arm)
    # An idle GPU takes a while to reach its clocks, and this is short work.
    sampling.warm_up(timer, arm)
    _eager(lambda: torch.cuda._sleep(10_000_000))
    own_us = statistics.median(kineto.visit(arm, 5))
    return [sample - own_us for sample in timer.visit(arm, 20)]


MEASURES: dict[str, Callable[[], Samples]] = {
    "copy_kernel": _copy_kernel,
    "copy_graph": _copy_graph,
    "read": _read,
    "write": _write,
    **{f"update_{mib}_mib": functools.partial(_update, mib) for mib in UPDATE_MIB},
    "l2_read": _l2_read,
    **{pipe + way: functools.partial(_product, pipe, *how) for way, how in WAYS.items() for pipe in PRODUCTS},
    **{name: functools.partial(_issue, name.removeprefix("issue_")) for name in CEILINGS if name.startswith("issue_")},
    "launch": _launch,
    "graph_gap": _graph_gap,
}
