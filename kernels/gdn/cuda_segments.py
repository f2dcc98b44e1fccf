"""Chunked prefill split along time, in CUDA C++ for Hopper: long sequences on few heads (segments.py, segments.cu).

`cuda_scan`'s preparation, then three launches, each programmatic behind the one before: maps of segments side by side,
their composition, and the scan of cuda_scan from every segment's own state. Outputs in the activations' type, D = 128.
The scan's roundings are cuda_scan's; a state that a segment starts from is composed to 2^-17. Rows of q and k without
norms recompute the scores, as there: what is prepared of them takes two thirds of the time, the scans a little more.

Given up: one launch; shapes that segments.make does not split, or that no card has measured, which stay cuda_scan's.
cuda_segments_in_scan.py has no third launch: of bf16 activations this is its control, and fp16 ones are this one's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Work, Workload, device_of
from kernels.gdn import cuda_scan, order, segments
from kernels.gdn.cost import cost

DIM, COMPOSE_THREADS, COLUMNS, MAP_STAGES = 128, 256, 16, 4
NAMES = tuple(cuda_scan.TYPES.values())
# Of the longest sequence, and v heads of all: what a card has measured. Others are split by an estimate alone, which
# tests/kernels/gdn/bench_segments.py can hold against times before these are moved.
LEAST_TOKENS, MOST_HEADS = 8192, 12
CLOCKS_US = 1700.0  # in which the time model counts (kernels/timing.py)


def scan_of(name: str, groups: int, lean: bool) -> cuda_scan.ScanVariant:
    """cuda_scan's with its preparation, block and shared memory; lean: it recomputes scores."""
    return cuda_scan.ScanVariant(DIM, name, groups, lean)


def map_bytes(lean: bool) -> int:
    """Shared memory of maps: stages of k, 64 columns of v, X, vectors and sums, the barriers."""
    return MAP_STAGES * (4 * cuda_scan.TILE_BYTES + 1024 * (1 + lean)) + 128


def _shared_bytes() -> dict[str, int]:
    found = {"gdn_segment_compose_d128": 2 * 2 * 2 * COLUMNS * (DIM + 8)}  # two buffers of both bf16 parts of a tile
    for name in NAMES:
        for lean, mark in ((False, ""), (True, "_lean")):
            # A block scans half a head or makes maps.
            found[f"gdn_segment_maps_d128_{name}{mark}"] = max(scan_of(name, 1, lean).shared_bytes, map_bytes(lean))
            for groups in (1, 2):
                found[f"gdn_segment_scan_d128_{name}_g{groups}{mark}"] = scan_of(name, groups, lean).shared_bytes
    return found


def source(file: str, shared: Mapping[str, int]) -> CudaSource:
    """The translation unit of a file here. shared: kernel -> bytes of shared memory."""
    return CudaSource(
        path=Path(__file__).with_name(file),
        kernels=tuple(shared),
        capability=(9, 0),
        architecture="sm_90a",
        shared_bytes=tuple(shared.values()),
    )


SHARED = _shared_bytes()
SOURCE = source("segments.cu", SHARED)
CUDA_SOURCES = (SOURCE,)


def prepare(inputs: Tensors, plan: segments.Plan | None = None) -> Tensors:
    """Tables, workspace and room for maps. Raises ValueError where nothing is to be split and no plan is given."""
    args = cuda_scan._pack(inputs)
    bounds, device, heads_v = args["cu_seqlens"].tolist(), device_of(inputs), inputs["v"].shape[-2]
    plan = plan or segments.make(bounds, heads_v, cuda_scan.SMS)
    if plan is None:
        raise ValueError(f"sequences {bounds} of {heads_v} heads are not worth splitting: use cuda_scan")
    rows = segments.rows(bounds, plan.chunks)

    def table(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    state = (len(rows), heads_v, DIM, DIM)
    args["groups"] = torch.empty(plan.groups, device=device)  # a length, since operators pass tensors alone
    return args | {
        "workspace": cuda_scan.workspace(args, variant(args)),
        "mapped": table([row for row in rows if row[5] or not row[6]]),
        "scanned": table([row for row in rows if not row[5]]).view(-1, segments.ROW),
        "firsts": table([*(row[4] for row in rows if row[5]), len(rows)]),
        "starts": torch.empty(state, dtype=torch.float32, device=device),
        "transitions": torch.empty(state, dtype=torch.float32, device=device),
    }


def variant(args: Tensors) -> cuda_scan.ScanVariant:
    """The scan of cuda_scan whose preparation and threads these are."""
    return scan_of(cuda_scan.TYPES[args["v"].dtype], args["groups"].numel(), "raw_qk" not in args)


def walk(
    source: CudaSource, kernel: str, args: Tensors, out: Tensors, rows: torch.Tensor, blocks: int, threads: int
) -> None:
    """Launch maps or scans of the segments in `rows`, `blocks` to a v head."""
    q, k, v, initial, o = *(args[n] for n in "qkv"), args["initial_state"], out["o"]
    tensors = (q, k, v, args["workspace"], initial, out["final_state"], o, rows, args["starts"], args["transitions"])
    numbers = (k.shape[-2], v.shape[-2], 0 if initial.dtype == torch.bfloat16 else 2)
    maps = map(cuda_scan._map, (k, q, v, o))
    arguments: list[Any] = [*maps, *tensors, *map(cuda.i32, numbers), cuda.f32(DIM**-0.5)]
    kernel += "_lean" * variant(args).recompute
    _launch(source, kernel, v.device.index or 0, (blocks, v.shape[-2], rows.shape[0]), threads, arguments)


def _launch(
    source: CudaSource, kernel: str, device: int, grid: tuple[int, ...], threads: int, arguments: Sequence[Any]
) -> None:
    shared = source.shared_of(kernel)
    cuda.launch(cuda.load(source, kernel, device, shared), grid, threads, arguments, shared, programmatic=True)


def launches(args: Tensors, out: Tensors) -> dict[str, Callable[[], None]]:
    """What is launched in turn, by name; each programmatic behind the one before it."""
    scan, heads_v, device = variant(args), args["v"].shape[-2], args["v"].device.index or 0
    grid = (DIM // COLUMNS, heads_v, args["firsts"].numel() - 1)
    to_compose = (args["starts"], args["transitions"], args["firsts"], cuda.i32(heads_v))
    compose = "gdn_segment_compose_d128"
    found: dict[str, Callable[[], None]] = {
        "prepare": lambda: cuda_scan.prepare_chunks(args, scan),
        "maps": lambda: walk(SOURCE, f"gdn_segment_maps_d128_{scan.dtype}", args, out, args["mapped"], 2, 384),
    }
    if not args["scanned"].numel():
        return found
    last = f"gdn_segment_scan_d128_{scan.dtype}_g{scan.groups}"
    return found | {
        "compose": lambda: _launch(SOURCE, compose, device, grid, COMPOSE_THREADS, to_compose),
        "scan": lambda: walk(SOURCE, last, args, out, args["scanned"], 2 // scan.groups, scan.threads),
    }


def run(args: Tensors, out: Tensors) -> None:
    """Outputs and final states."""
    for launch in launches(args, out).values():
        launch()


def bounds_of(workload: Workload) -> list[int]:
    """Where a workload's sequences start and end."""
    lengths = [int(n) for n in str(workload["lengths"]).split("-") if n] or [workload["T"]] * workload["batch"]
    return [0, *accumulate(lengths)]


def plan_of(workload: Workload) -> segments.Plan | None:
    """The split of a workload's sequences, None where they are not worth it."""
    return segments.make(bounds_of(workload), workload["Hv"], cuda_scan.SMS)


def refuses(workload: Workload) -> str:
    """As cuda_scan, D = 128 only, and sequences that are worth splitting and like those that were measured."""
    if why := cuda_scan.refuses(workload):
        return why
    if workload["D"] != DIM:
        return f"D = {workload['D']}: segments.cu is instantiated for D = 128"
    if not plan_of(workload):
        return f"T = {workload['T']}, Hv = {workload['Hv']}: not worth splitting along time, cuda_scan's"
    bounds = bounds_of(workload)
    longest, heads = max(b - a for a, b in pairwise(bounds)), workload["Hv"] * (len(bounds) - 1)
    if longest < LEAST_TOKENS or heads > MOST_HEADS:
        measured = f"measured from {LEAST_TOKENS} tokens on and up to {MOST_HEADS} v heads at once"
        return f"{longest} tokens, {heads} v heads: {measured}, others are cuda_scan's"
    return ""


def work_in(workload: Workload, sms: int, us: float) -> Work:
    """The preparation, and behind it maps and scans, which by the estimate take `us` with their launches."""
    ratio, bounds = workload["Hv"] // workload["Hk"], bounds_of(workload)
    chunks, a_unit = sum(segments.chunks_of(bounds)), 3000.0 * (1 + ratio)
    prepared = scan_of("bf16", 1, not workload["qk_l2norm"]).block_bytes * chunks * workload["Hv"]
    again = 2 * bounds[-1] * DIM * (workload["Hk"] + workload["Hv"])  # k and v, for maps and scans
    moved = cost(workload, "bf16").bytes + 3.0 * prepared + again
    in_turn = {"launches": 1.0, "preparation": a_unit * chunks * workload["Hk"] / (order.TEAMS * sms)}
    return Work({"bytes": moved, "segments": CLOCKS_US * us}, in_turn)


def work(workload: Workload, sms: int) -> Work:
    """`work_in` of the plan's own estimate."""
    plan = plan_of(workload)
    assert plan, refuses(workload)
    return work_in(workload, sms, plan.us)


CANDIDATES = (
    Candidate(
        name="cuda_segments",
        precision="bf16",
        run=run,
        needs=Needs((9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=refuses,
        config=lambda workload: f"chunks of {segments.CHUNK}, {plan_of(workload)}, composed in bf16 parts",
        work=work,
    ),
)
