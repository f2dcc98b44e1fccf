"""Chunked prefill split along time, in CUDA C++ for Hopper: long sequences on few heads (segments.py, segments.cu).

`cuda_scan`'s preparation, then three launches, each programmatic behind the one before: maps of segments side by side,
their composition, and the scan of cuda_scan from every segment's own state. Outputs in the activations' type, D = 128.
The scan's roundings are cuda_scan's; a state that a segment starts from is composed in float32.

Given up: one launch; recomputed scores; shapes that segments.make does not split, which stay cuda_scan's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kernels import cuda
from kernels.common import Candidate, CudaSource, Needs, Tensors, Workload, device_of
from kernels.gdn import cuda_scan, segments

DIM, COMPOSE_THREADS, COLUMNS, MAP_STAGES = 128, 512, 16, 4
NAMES = tuple(cuda_scan.TYPES.values())


def scan_shared_bytes(groups: int) -> int:
    """Dynamic shared memory of a scan by `groups` halves of a head: cuda_scan's."""
    return cuda_scan.ScanVariant(DIM, "bf16", groups).shared_bytes


# A block scans half a head or makes maps: stages of k, 64 columns of v, X and vectors, and the barriers.
MAP_SHARED = max(scan_shared_bytes(1), MAP_STAGES * (4 * cuda_scan.TILE_BYTES + 1024) + 128)
COMPOSE_SHARED = 4 * (DIM * COLUMNS + 4 * DIM * (COLUMNS + 4))  # a tile of the state, and the sums of four quarters
SHARED = (
    {f"gdn_segment_maps_d128_{name}": MAP_SHARED for name in NAMES}
    | {f"gdn_segment_scan_d128_{name}_g{groups}": scan_shared_bytes(groups) for name in NAMES for groups in (1, 2)}
    | {"gdn_segment_compose_d128": COMPOSE_SHARED}
)
SOURCE = CudaSource(
    path=Path(__file__).with_name("segments.cu"),
    kernels=tuple(SHARED),
    capability=(9, 0),
    architecture="sm_90a",
    shared_bytes=tuple(SHARED.values()),
)
CUDA_SOURCES = (SOURCE,)


def prepare(inputs: Tensors, plan: segments.Plan | None = None) -> dict[str, Any]:
    """Tables, workspace and room for maps. Raises ValueError where nothing is to be split and no plan is given."""
    args: dict[str, Any] = cuda_scan._pack(inputs)
    bounds, device, heads_v = args["cu_seqlens"].tolist(), device_of(inputs), inputs["v"].shape[-2]
    plan = plan or segments.make(bounds, heads_v, cuda_scan.SMS)
    if plan is None:
        raise ValueError(f"sequences {bounds} of {heads_v} heads are not worth splitting: use cuda_scan")
    rows = segments.rows(bounds, plan.chunks)

    def table(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    state = (len(rows), heads_v, DIM, DIM)
    return args | {
        "workspace": cuda_scan.workspace(args, variant(args)),
        "groups": plan.groups,
        "mapped": table([row for row in rows if row[5] or not row[6]]),
        "scanned": table([row for row in rows if not row[5]]).view(-1, segments.ROW),
        "firsts": table([*(row[4] for row in rows if row[5]), len(rows)]),
        "starts": torch.empty(state, dtype=torch.float32, device=device),
        "transitions": torch.empty(state, dtype=torch.float32, device=device),
    }


def variant(args: Tensors) -> cuda_scan.ScanVariant:
    """The scan of cuda_scan whose preparation this is."""
    return cuda_scan.ScanVariant(DIM, cuda_scan.TYPES[args["v"].dtype], 1)


def run(args: dict[str, Any], out: Tensors) -> None:
    """Outputs and final states in four launches."""
    q, k, v, initial, o = (args[n] if n != "o" else out[n] for n in ("q", "k", "v", "initial_state", "o"))
    heads_v, name, groups, device = v.shape[-2], cuda_scan.TYPES[v.dtype], args["groups"], v.device.index or 0
    cuda_scan.prepare_chunks(args, variant(args))

    def launch(kernel: str, rows: torch.Tensor, halves: int, threads: int) -> None:
        tensors = (
            q,
            k,
            v,
            args["workspace"],
            initial,
            out["final_state"],
            o,
            rows,
            args["starts"],
            args["transitions"],
        )
        numbers = (k.shape[-2], heads_v, 0 if initial.dtype == torch.bfloat16 else 2)
        arguments: list[Any] = [*map(cuda_scan._map, (k, q, v, o)), *tensors, *map(cuda.i32, numbers)]
        loaded = cuda.load(SOURCE, kernel, device, SHARED[kernel])
        cuda.launch(loaded, (2 // halves, heads_v, rows.shape[0]), threads, arguments, SHARED[kernel], True)

    launch(f"gdn_segment_maps_d128_{name}", args["mapped"], 1, 384)
    if not args["scanned"].numel():
        return
    compose = cuda.load(SOURCE, "gdn_segment_compose_d128", device, COMPOSE_SHARED)
    arguments = [args["starts"], args["transitions"], args["firsts"], cuda.i32(heads_v)]
    grid = (DIM // COLUMNS, heads_v, args["firsts"].numel() - 1)
    cuda.launch(compose, grid, COMPOSE_THREADS, arguments, COMPOSE_SHARED, True)
    launch(f"gdn_segment_scan_d128_{name}_g{groups}", args["scanned"], groups, 128 * (groups + 1))


def _plan(workload: Workload) -> segments.Plan | None:
    lengths = [int(n) for n in str(workload["lengths"]).split("-") if n] or [workload["T"]] * workload["batch"]
    return segments.make([0, *torch.tensor(lengths).cumsum(0).tolist()], workload["Hv"], cuda_scan.SMS)


def refuses(workload: Workload) -> str:
    """As cuda_scan, D = 128 only, and sequences that are worth splitting."""
    if why := cuda_scan.refuses(workload):
        return why
    if workload["D"] != DIM:
        return f"D = {workload['D']}: segments.cu is instantiated for D = 128"
    if not _plan(workload):
        return f"T = {workload['T']}, Hv = {workload['Hv']}: not worth splitting along time, cuda_scan's"
    return ""


CANDIDATES = (
    Candidate(
        name="cuda_segments",
        precision="bf16",
        run=run,
        needs=Needs((9, 0), packages=("cupy",)),
        prepare=prepare,
        refuses=refuses,
        config=lambda workload: f"chunks of {segments.CHUNK}, {_plan(workload)}",
        no_route="not measured on any device yet",
    ),
)
