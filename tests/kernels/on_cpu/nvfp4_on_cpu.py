"""What the tests of kernels/nvfp4's CUDA kernels share. On a CPU each brings the entry that calls its kernel."""

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from kernels.nvfp4 import cases
from kernels.nvfp4.reference import reference
from lab.check.accuracy import compare
from tests.kernels.on_cpu.stand_in import Change, StandIn, built


@functools.cache
def library(source: Any, entry: str, *changes: Change) -> StandIn:
    """A CudaSource as a CPU library; (old, new) texts are replaced in it and in what it includes."""
    return built(source.path, entry, *changes, options=source.options)


def simulated(library: StandIn, tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...]) -> None:
    """One launch; raises Stopped, after a deadlock too."""
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in tensors)
    library.simulated(*pointers, *map(ctypes.c_int, numbers))


def accurate(y: torch.Tensor, wanted: torch.Tensor, limit: Any) -> bool:
    """Whether y is within a Tolerance of the float64 `wanted`; NaN is not."""
    return compare("y", y, wanted, limit).ok


def within_tolerance(y: torch.Tensor, problem: Any, inputs: dict[str, torch.Tensor], precision: str) -> bool:
    return accurate(y, reference(inputs)["y"], cases.tolerance(problem, precision)["y"])


def right_every_time(runs: Iterable[torch.Tensor], problem: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Each y within the tolerance of 16-bit activations, and all of them the same to the bit."""
    first = None
    for y in runs:
        assert within_tolerance(y, problem, inputs, "nvfp4-w4a16")
        first = y.clone() if first is None else first
        assert torch.equal(first, y)
    assert first is not None


def skip_unless_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
