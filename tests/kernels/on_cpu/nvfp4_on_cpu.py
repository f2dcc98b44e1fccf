"""Kernels of kernels/nvfp4 as they are, run on a CPU: what their tests have in common.

A stand-in (tests/*_on_cpu.cuh) replaces the PTX; each test brings the entry that calls its kernel in every thread.
"""

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.nvfp4 import cases
from kernels.nvfp4.reference import reference
from tests.kernels.on_cpu.stand_in import StandIn, Stopped

Change = tuple[str, str]
UNCHANGED: Change = ("", "")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++ to run the kernel on a CPU")


@functools.cache
def library(source: Any, stand_in: str, entry: str, *changes: Change) -> StandIn:
    """A CudaSource as a CPU library: `stand_in` is what it includes first, (old, new) texts are replaced in it.

    Its dynamic shared memory becomes the simulation's. AssertionError where a text to replace is not there, or the
    compiler refuses.
    """
    text = source.path.read_text()
    text = re.sub(r"extern __shared__ .*?(\w+)\[\];", r"unsigned char* \1 = simulated_shared();", text)
    for old, new in changes:
        assert old in text, f"{old!r} is no longer in {source.path.name}"
        text = text.replace(old, new) if old else text
    folder = Path(tempfile.mkdtemp())
    (folder / "kernel.cpp").write_text(f'#include "{stand_in}"\n{text}{entry}')
    includes = (f"-I{Path(__file__).parent}", f"-I{source.path.parent}")
    options = [option for option in source.options if option.startswith("-D")]
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *includes, *options, str(folder / "kernel.cpp")]
    done = subprocess.run([*command, "-o", str(folder / "kernel.so")], timeout=120, capture_output=True, text=True)
    assert not done.returncode, done.stderr[:2000]
    return StandIn(str(folder / "kernel.so"))


def simulated(library: StandIn, tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...]) -> None:
    """One launch; raises Stopped, after a deadlock too."""
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in tensors)
    library.simulated(*pointers, *map(ctypes.c_int, numbers))


def unless_stopped(sound: Callable[[], bool]) -> bool:
    """Whether a changed kernel's answer is `sound`; where the stand-in stops it, it is not."""
    try:
        return sound()
    except Stopped:
        return False


def accurate(y: torch.Tensor, wanted: torch.Tensor, limit: Any) -> bool:
    """Whether y is within a Tolerance of the float64 `wanted`; NaN is not."""
    error = y.double() - wanted
    close = error.norm() <= limit.relative_error * wanted.norm()
    return bool(close and error.abs().max() <= limit.max_error * wanted.square().mean().sqrt())


def within_tolerance(y: torch.Tensor, problem: Any, inputs: dict[str, torch.Tensor], precision: str) -> bool:
    return accurate(y, reference(inputs)["y"], cases.tolerance(problem, precision)["y"])
