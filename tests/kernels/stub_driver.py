"""A driver that launches nothing: what a launch takes on the host, and with what it was called, without a GPU."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from kernels import cuda, cuda_driver, operators
from kernels.common import Candidate

CONTEXT, OTHER = 77, 78
C = """
static void *now = (void *) 77;
int cuInit(unsigned f) { return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *) 77; return 0; }
int cuCtxGetCurrent(void **c) { *c = now; return 0; }
int cuCtxSetCurrent(void *c) { now = c; return 0; }
int cuLaunchKernelEx(void *config, void *f, void **p, void *x) { return 0; }
"""


class Driver:
    """Notes each launch: (stream, the first eight bytes of each argument), and the context that it found."""

    def __init__(self, sizes: list[int], current: int = CONTEXT, code: int = 0) -> None:
        self.sizes, self.current, self.code = sizes, current, code
        self.launches: list[tuple[int, list[int]]] = []
        self.contexts: list[int] = []
        self.maps = 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, to: Any, device: int) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, to: Any, device: Any) -> int:
        to._obj.value = CONTEXT
        return 0

    def cuCtxGetCurrent(self, to: Any) -> int:
        to._obj.value = self.current
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current = context.value
        return 0

    def cuTensorMapEncodeTiled(self, to: Any, element: Any, rank: Any, address: Any, *_: Any) -> int:
        self.maps += 1
        ctypes.memmove(to.value, address.value.to_bytes(8, "little"), 8)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:
        passed = [ctypes.string_at(at, min(8, size)) for at, size in zip(pointers, self.sizes, strict=True)]
        self.launches.append((config._obj.stream, [int.from_bytes(value, "little") for value in passed]))
        self.contexts.append(self.current)
        return self.code


def addresses(pointers: Any, at: tuple[int, ...]) -> list[int]:
    """The addresses that these arguments of a launch hold."""
    return [ctypes.c_uint64.from_address(pointers[number]).value for number in at]


def compiled() -> Any:
    """The same in C, for timing; RuntimeError without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler (cc) is here")
    with tempfile.TemporaryDirectory() as scratch:
        source, library = Path(scratch, "driver.c"), Path(scratch, "driver.so")
        source.write_text(C)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))


@contextmanager
def stubbed(driver: Any, able: dict[str, Candidate], stream: int = 5) -> Iterator[None]:
    """Inside, CPU tensors count as those of CUDA device 0, `able` runs there, and launches go to `driver`."""
    kernel = cuda.Kernel("stub", 0, SimpleNamespace(ptr=7))
    cuda_driver._primary.cache_clear()
    operators.PLANS.clear()
    with (
        mock.patch.multiple(cuda_driver, _library=lambda: driver),
        mock.patch.multiple(cuda, load=lambda *_: kernel, stream_of=lambda device: stream),
        mock.patch.multiple(operators, index_of=lambda tensor: 0, candidates=lambda family, capability: able),
        mock.patch.multiple(torch.cuda, get_device_capability=lambda device=None: (9, 0)),
    ):
        try:
            yield
        finally:
            operators.PLANS.clear()
            cuda_driver._primary.cache_clear()
            cuda_driver.tensor_map.cache_clear()
            cuda_driver.line_map.cache_clear()
