"""What the launches of this family's sm_90a kernels share: how a source is compiled, and which tensors it takes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kernels import cuda, cuda_driver
from kernels.common import CudaSource

SHARED_BYTES = 227 * 1024  # what a block may use on compute capability 9.0
SMS = 132  # of an H100 or H200, for choosing without a device
# By clusters of so many blocks that take a multiprocessor each (cuOccupancyMaxActiveClusters).
SMS_HELD = {1: 132, 2: 132, 4: 120, 8: 120}
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def source(path: Path, kernel: str, shared_bytes: int, macros: Mapping[str, int]) -> CudaSource:
    """The translation unit of one kernel: its file, with KERNEL and `macros` defined."""
    defines = {"KERNEL": kernel, **macros}
    return CudaSource(
        path=path,
        kernels=(kernel,),
        options=("--std=c++17", *(f"-D{name}={value}" for name, value in defines.items())),
        capability=(9, 0),
        architecture="sm_90a",
        shared_bytes=shared_bytes,
    )


@functools.cache
def multiprocessors(device: int) -> int:
    """How many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=1024)
def most_clusters(source: CudaSource, config: Any, device: int) -> int:
    """How many clusters of a configuration (its kernel, cluster, threads, shared_bytes) the device runs at once."""
    kernel = cuda.load(source, config.kernel, device, SHARED_BYTES)
    return cuda_driver.most_clusters(kernel.function.ptr, config.cluster, config.threads, config.shared_bytes)


def check(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, rows: int, k_blocks: int) -> str:
    """The element type of x, "bf16" or "fp16", for a launch of y[M, N] = x[M, K] w^T.

    w: tiles [ceil(N / rows), k_blocks, ...] of the weights.
    Raises ValueError when x is of another type, not contiguous or not on 16 bytes, or when the three do not belong
    together.
    """
    element = ELEMENTS.get(x.dtype, "")
    if not element or not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(
            f"x is {x.dtype} with strides {x.stride()}; pass contiguous bf16 or fp16 x that starts on 16 bytes"
        )
    if w.shape[:2] != (-(-y.shape[1] // rows), k_blocks) or y.shape[0] != x.shape[0] or not y.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit tiles {tuple(w.shape)}; prepare this pair"
        )
    return element
