"""Microbenchmarks of issue.cu: products alone, NVFP4 decode alone, and one in turn with or beside the other.

Their rates are ceilings of a device (lab/bench/ceiling_runs.py): a kernel that decodes weights and multiplies them can
reach the second roof that they make, "issue", and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kernels import cuda
from kernels.common import CudaSource

TOKENS = {"mma": (8, 32), "wgmma": (64, 128, 256)}
FORMS = ("alone", "turn", "beside")
PRODUCTS = tuple(f"{way}_{n}_{form}" for way, counts in TOKENS.items() for n in counts for form in FORMS)
SOURCE = CudaSource(
    path=Path(__file__).with_name("issue.cu"),
    kernels=(*PRODUCTS, "decode"),
    capability=(9, 0),
    architecture="sm_90a",
)
THREADS, TRIPS = 256, 20_000
ROWS, DEPTH, TILE_BYTES = 16, 64, 576  # of the tile that a warp decodes in a trip, its codes and scales


def work(name: str) -> tuple[float, float]:
    """(operations, bytes of codes and scales) of one trip of one warp."""
    if name == "decode":
        return 0.0, TILE_BYTES
    return 2.0 * ROWS * DEPTH * int(name.split("_")[1]), 0.0 if name.endswith("alone") else TILE_BYTES


def ready(name: str, device: int = 0) -> tuple[Callable[[], None], float, float]:
    """(a call that launches it on every multiprocessor, operations, bytes of codes and scales of a call)."""
    way, _, rest = name.partition("_")
    blocks = torch.cuda.get_device_properties(device).multi_processor_count * (1 if way == "wgmma" else 2)
    shared = 128 * int(rest.partition("_")[0]) if way == "wgmma" else 0
    kernel = cuda.load(SOURCE, name, device, shared)
    out = torch.empty(blocks * THREADS, device=f"cuda:{device}")
    trips = blocks * THREADS // 32 * TRIPS
    operations, held = work(name)

    def call() -> None:
        cuda.launch(kernel, (blocks,), THREADS, (out, cuda.i32(TRIPS)), shared)

    return call, operations * trips, held * trips
