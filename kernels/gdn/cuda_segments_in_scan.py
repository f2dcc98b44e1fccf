"""`cuda_segments` without a launch that composes: every block of the scan composes its own S (segments_in_scan.cu).

Long sequences on few heads take this one. A less its decay in fp16 and S in fp16, its rows times powers of two, are one
product a segment (compose.cuh). A state's columns never leave the warpgroup that scans them, so no block waits for
another, and the scan's blocks start while maps still run.

Given up: each segment's maps are multiplied once for every segment behind it; activations other than bf16, which are
cuda_segments'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from kernels.common import Candidate, Needs, Tensors, Work, Workload
from kernels.gdn import cuda_scan, cuda_segments, segments


def _shared_bytes() -> dict[str, int]:
    found = {}
    for lean, mark in ((False, ""), (True, "_lean")):
        scans = {g: cuda_segments.scan_of("bf16", g, lean).shared_bytes + 64 for g in (1, 2)}  # more barriers
        maps = cuda_segments.map_bytes(lean) + 2 * cuda_scan.TILE_BYTES  # half of A on its way out
        found[f"gdn_in_scan_maps_d128_bf16{mark}"] = max(scans[1], maps)
        found |= {f"gdn_in_scan_d128_bf16_g{g}{mark}": size for g, size in scans.items()}
    return found


SHARED = _shared_bytes()
SOURCE = cuda_segments.source("segments_in_scan.cu", SHARED)
CUDA_SOURCES = (SOURCE,)


def prepare(inputs: Tensors, plan: segments.Plan | None = None) -> Tensors:
    """As cuda_segments.prepare, in the same segments; a segment's row ends with its place in its sequence."""
    args = cuda_segments.prepare(inputs, plan)
    for name in ("mapped", "scanned"):
        rows = args[name]
        rows[:, 7] = rows[:, 4] - args["firsts"][rows[:, 3].long()]
    return args


def launches(args: Tensors, out: Tensors) -> dict[str, Callable[[], None]]:
    """What is launched in turn, by name; each programmatic behind the one before it."""
    scan = cuda_segments.variant(args)
    walk = functools.partial(cuda_segments.walk, SOURCE)
    maps, last = (f"gdn_in_scan{name}_d128_{scan.dtype}" for name in ("_maps", ""))
    found: dict[str, Callable[[], None]] = {
        "prepare": lambda: cuda_scan.prepare_chunks(args, scan),
        "maps": lambda: walk(maps, args, out, args["mapped"], 2, 384),
    }
    if not args["scanned"].numel():
        return found
    name, threads = f"{last}_g{scan.groups}", max(scan.threads, 384)
    return found | {"scan": lambda: walk(name, args, out, args["scanned"], 2 // scan.groups, threads)}


def run(args: Tensors, out: Tensors) -> None:
    """Outputs and final states."""
    for launch in launches(args, out).values():
        launch()


def refuses(workload: Workload) -> str:
    """As cuda_segments, bf16 only."""
    if why := cuda_segments.refuses(workload):
        return why
    return "" if workload["dtype"] == "bf16" else f"dtype = {workload['dtype']}: segments_in_scan.cu has bf16 alone"


def _config(workload: Workload) -> str:
    plan = cuda_segments.plan_of(workload)
    return f"chunks of {segments.CHUNK}, {plan}, composed in the scan, A less its decay in fp16"


def work(workload: Workload, sms: int) -> Work:
    """As cuda_segments, with what composing takes here."""
    plan = cuda_segments.plan_of(workload)
    assert plan, refuses(workload)
    us = segments.in_scan_us(plan, cuda_segments.bounds_of(workload), workload["Hv"])
    return cuda_segments.work_in(workload, sms, us)


CANDIDATES = (
    Candidate(
        name="cuda_segments_in_scan",
        precision="bf16",
        run=run,
        needs=Needs((9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=refuses,
        config=_config,
        work=work,
    ),
)
