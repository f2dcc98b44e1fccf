"""Measured ceilings of a device, as a dated artefact: profiles/<device>/ceilings/<run>/ceilings.jsonl.

A datasheet says what nothing can exceed; a ceiling says what a program that does one thing well reached on this card,
on that day. It depends on how it is taken (a copy captured in a graph is a memcpy node and much slower than the copy
kernel), so each one is named for its method and both are kept. A row that is faster than the highest ceiling ever
measured on its device by more than 3 % is suspect, whatever made it so.

Products reach the power cap, and what they draw depends on their operands: random ones toggle more bits than codes of
few significant bits do. What is possible must not depend on that, so products are taken three ways: on random data
back to back (these are the ceilings that shares are shown of), the same rested, and rested on zeros, which toggle
nothing ("quiet"). A row is suspect only when it beats the fastest of the three.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab import clocks, devices, records
from lab.errors import BadInput

# Bytes of what a kernel reads, changes and writes where it lies; its rate depends on how much of it there is.
UPDATE_MIB = (3, 12, 24, 48, 96, 192, 384, 768)
_UPDATE = "{} MiB of float32 negated where they lie, read plus write, in a CUDA graph over distinct stretches of 2 GiB"

PRODUCTS: Mapping[str, tuple[str, str]] = {
    "bf16": ("TFLOP/s", "bf16 products on {}, best of four shapes"),
    "fp8": ("TFLOP/s", "e4m3 products with float32 scales and fast accumulation on {}, best of three shapes"),
    "int8": ("TOP/s", "int8 products on {}, best of three shapes"),
}
REST = 4.0  # a rested product idles so many times its own duration before the next one
_RESTED = f"each followed by {REST:g} times its duration of idleness, as rows with rest are taken"
_PLAIN, _QUIET = "random data", "zeros, operands that toggle no bit and so draw least"
NAMES: Mapping[str, tuple[str, str]] = {
    # name -> (unit, method)
    "copy_kernel": ("GB/s", "device copy of 4 GiB by the framework's copy kernel, read plus write"),
    "copy_graph": ("GB/s", "the same copy captured in a CUDA graph, a memcpy node, read plus write"),
    "read": ("GB/s", "4 GiB of float32 read and summed, best of four launch shapes"),
    "write": ("GB/s", "4 GiB filled"),
    **{f"update_{mib}_mib": ("GB/s", _UPDATE.format(mib) + ", best of four launch shapes") for mib in UPDATE_MIB},
    "l2_read": ("GB/s", "a 16 MiB buffer read over and over past the L1"),
    **{pipe: (unit, method.format(_PLAIN)) for pipe, (unit, method) in PRODUCTS.items()},
    **{f"{p}_rested": (unit, f"{method.format(_PLAIN)}, {_RESTED}") for p, (unit, method) in PRODUCTS.items()},
    **{f"{p}_quiet": (unit, f"{method.format(_QUIET)}, {_RESTED}") for p, (unit, method) in PRODUCTS.items()},
    "launch": ("us", "an empty kernel launched eagerly, back to back"),
    "graph_gap": ("us", "an empty kernel as one of hundreds of nodes of a graph, less its own duration by Kineto"),
}
FOR_L2: Mapping[str, tuple[str, ...]] = {"cold": ("read", "write", "copy_kernel"), "warm": ("l2_read",)}
POSSIBLE = ("", "_rested", "_quiet")  # what a pipe's ceilings end in that together say which speed is possible
TOLERANCE = 1.03
FILE = "ceilings.jsonl"
NEEDED = ("schema", "device", "name", "value", "unit", "method", "run", "started", "samples")


@dataclass(frozen=True)
class Ceiling:
    """The highest value (for times: the lowest) measured for one name on one device, and the run it is from."""

    name: str
    value: float
    unit: str
    method: str
    run: str


def validated(row: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """The row with its schema version; raises BadInput naming the key that is missing or wrong."""
    full = {"schema": records.SCHEMA, **row}
    for key in NEEDED:
        if key not in full:
            raise BadInput(where, f'ceiling lacks "{key}"', "measure the ceilings again")
    if full["name"] not in NAMES or full["unit"] != NAMES[full["name"]][0]:
        raise BadInput(where, f'ceiling "{full["name"]}" in {full["unit"]}', "valid: " + ", ".join(NAMES))
    if not isinstance(full["value"], int | float) or not full["value"] > 0:
        raise BadInput(where, f"{full['name']} = {full['value']!r}", "a ceiling is positive")
    return full


def measure(device: devices.Device, names: tuple[str, ...] = tuple(NAMES)) -> Iterator[dict[str, Any]]:
    """Measure ceilings on the GPU that is here, append each as a row and yield it."""
    run, _ = records.new_run(device.id, "ceilings")
    folder = records.FOLDER / device.id / "ceilings" / run
    made = records.provenance()
    for name in names:
        unit, method = NAMES[name]
        before = clocks.sample()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        samples = MEASURES[name]()
        after = clocks.sample()
        value = min(samples) if unit == "us" else max(samples)
        row = {
            "device": device.id,
            "name": name,
            "value": value,
            "unit": unit,
            "method": method,
            "samples": [round(s, 4) for s in samples],
            "clocks": [c.to_json() for c in (before, after) if c],
            "run": run,
            "started": started,
            **made,
        }
        records.append_all(folder, [row], FILE, validated)
        yield row


def latest(device_id: str) -> dict[str, Ceiling]:
    """The best value over all runs of each ceiling of a device; empty when none was measured."""
    best: dict[str, Ceiling] = {}
    for path in sorted((records.FOLDER / device_id / "ceilings").glob(f"*/{FILE}")):
        for row in records.read(path, validated):
            found = Ceiling(row["name"], row["value"], row["unit"], row["method"], row["run"])
            known = best.get(found.name)
            better = known is None or (found.value < known.value) == (found.unit == "us")
            best[found.name] = found if known is None or better else known
    return best


def floor_us(
    device_id: str, flops: float, bytes_moved: float, pipe: str, l2: str = "cold", ways: tuple[str, ...] = ("",)
) -> float | None:
    """Time that the work takes at the measured ceilings, us; None when a ceiling it needs was not measured.

    The memory term of a cold row stands on the best of read, write and copy; of a warm one on the L2 read. ways: the
    endings of the pipe's ceilings, the fastest of which counts; POSSIBLE for whether a time can be true.
    """
    known = latest(device_id)
    memory = [known[n].value for n in FOR_L2[l2] if n in known]
    rates = [known[n].value for n in (pipe + way for way in ways) if n in known]
    if not memory or not rates:
        return None
    return max(bytes_moved / max(memory) * 1e-3, flops / max(rates) * 1e-6)


def floor_of(row: Mapping[str, Any]) -> float | None:
    """`floor_us` of a measured row, for its share: products on random data, rested too where the row's arms rested."""
    return _floor_of(row, ("", "_rested") if row.get("rest") else ("",))


def _floor_of(row: Mapping[str, Any], ways: tuple[str, ...]) -> float | None:
    return floor_us(row["device"], row["flops"], row["bytes"], row["pipe"], row.get("l2", "cold"), ways)


def suspect(row: Mapping[str, Any]) -> str:
    """ "" or one sentence: the row beats the fastest measured ceilings of its device by more than 3 %."""
    if row.get("median_us") is None or row.get("bytes") is None:
        return ""
    floor = _floor_of(row, POSSIBLE)
    if floor is None or row["median_us"] * TOLERANCE >= floor:
        return ""
    return f"{row['median_us']:.2f} us beats the measured ceilings, which allow {floor:.2f} us"


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

    from lab.ceilings_kernels import read_kernel

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

    from lab.ceilings_kernels import update_kernel

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

    from lab.ceilings_kernels import reread_kernel

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

    from lab.ceilings_kernels import null_kernel

    x = torch.empty(1, device="cuda")

    def many() -> None:
        for _ in range(200):
            null_kernel[(1,)](x, num_warps=1)

    return [1e6 * t / 200 for t in _eager(many)]


def _graph_gap() -> list[float]:
    import torch

    from lab import timing
    from lab.ceilings_kernels import null_kernel
    from lab.timers import GraphTimer, kernel_time_us

    x = torch.empty(1, device="cuda")
    arm = timing.Arm("null", lambda args, out: null_kernel[(1,)](x, num_warps=1), [(None, None)])
    timer = GraphTimer()
    timer.prepare(arm)
    # An idle GPU takes a while to reach its clocks, and this is short work.
    timing.warm_up(timer, arm)
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
