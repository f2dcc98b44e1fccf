"""`cuda_segments` without a launch that composes: every block of the scan composes its own S (segments_in_scan.cu).

    cuda_segments_in_scan        A less its decay in fp16, S in fp16, its rows times powers of two: one product
    cuda_segments_in_scan_parts  both in two bf16 parts, as cuda_segments composes: three products

A state's columns never leave the warpgroup that scans them, so no block waits for another. Given up: each segment's
maps are multiplied once for every segment behind it; activations other than bf16, until a card says it is worth it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels.common import Candidate, CudaSource, Needs, Tensors, Workload
from kernels.gdn import cuda_scan, cuda_segments, segments

WHY = "one change to cuda_segments: measure gdn-compose"
PARTS = {"fp16": 1, "parts": 2}  # of A, 16 bits each
PIECE_BYTES = 2 * cuda_scan.TILE_BYTES  # of a part of half of A


def _shared_bytes() -> dict[str, int]:
    found = {}
    for form, parts in PARTS.items():
        for lean, mark in ((False, ""), (True, "_lean")):
            scans = {g: cuda_segments.scan_of("bf16", g, lean).shared_bytes + 64 for g in (1, 2)}  # more barriers
            maps = cuda_segments.map_bytes(lean) + parts * PIECE_BYTES
            found[f"gdn_in_scan_maps_d128_bf16_{form}{mark}"] = max(scans[1], maps)
            found |= {f"gdn_in_scan_d128_bf16_{form}_g{g}{mark}": size for g, size in scans.items()}
    return found


SHARED = _shared_bytes()
SOURCE = CudaSource(
    path=Path(cuda_segments.__file__).with_name("segments_in_scan.cu"),
    kernels=tuple(SHARED),
    capability=(9, 0),
    architecture="sm_90a",
    shared_bytes=tuple(SHARED.values()),
)
CUDA_SOURCES = (SOURCE,)


def prepare(inputs: Tensors, plan: segments.Plan | None = None) -> dict[str, Any]:
    """As cuda_segments.prepare, in the same segments; a segment's row ends with its place in its sequence."""
    args = cuda_segments.prepare(inputs, plan)
    for name in ("mapped", "scanned"):
        rows = args[name]
        rows[:, 7] = rows[:, 4] - args["firsts"][rows[:, 3].long()]
    return args


def launches(args: dict[str, Any], out: Tensors, form: str) -> dict[str, Callable[[], None]]:
    """What is launched in turn, by name; each programmatic behind the one before it."""
    scan = cuda_segments.variant(args)
    walk = functools.partial(cuda_segments.walk, SOURCE)
    maps, last = (f"gdn_in_scan{name}_d128_{scan.dtype}_{form}" for name in ("_maps", ""))
    found: dict[str, Callable[[], None]] = {
        "prepare": lambda: cuda_scan.prepare_chunks(args, scan),
        "maps": lambda: walk(maps, args, out, args["mapped"], 2, 384),
    }
    if not args["scanned"].numel():
        return found
    name, threads = f"{last}_g{scan.groups}", max(scan.threads, 384)
    return found | {"scan": lambda: walk(name, args, out, args["scanned"], 2 // scan.groups, threads)}


def run(args: dict[str, Any], out: Tensors, form: str) -> None:
    """Outputs and final states."""
    for launch in launches(args, out, form).values():
        launch()


def _refuses(workload: Workload) -> str:
    if why := cuda_segments.refuses(workload):
        return why
    return "" if workload["dtype"] == "bf16" else f"dtype = {workload['dtype']}: segments_in_scan.cu has bf16 alone"


def _config(workload: Workload, form: str) -> str:
    rounded = {"fp16": "A less its decay in fp16", "parts": "A in bf16 parts"}[form]
    return f"chunks of {segments.CHUNK}, {cuda_segments.plan_of(workload)}, composed in the scan, {rounded}"


CANDIDATES = tuple(
    Candidate(
        name="cuda_segments_in_scan" + "_parts" * (form == "parts"),
        precision="bf16",
        run=functools.partial(run, form=form),
        needs=Needs((9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=_refuses,
        config=functools.partial(_config, form=form),
        no_route=WHY,
    )
    for form in PARTS
)
