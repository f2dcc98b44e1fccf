"""Compile a CUDA C++ source at first use, keep the cubin, load it through CuPy and launch it on torch's stream.

    kernel = cuda.load(SOURCE, "gdn_scan", device=0, shared_bytes=200_000)
    cuda.launch(kernel, grid=(132,), threads=384, arguments=(q, k, v, cuda.i32(2048)), shared_bytes=200_000)

Why not `cupy.RawModule(code=...)`: CuPy appends its own -arch=sm_90, and wgmma, setmaxnreg and the other instructions
of one architecture need sm_90a (seen in CuPy 14.2). So NVRTC (through CuPy) or nvcc makes a cubin here, and CuPy only
loads it. The cubin is kept under $KILLGATE_CACHE, else in the user's cache folder, by the hash of everything that went
into it; it is written to a temporary file and renamed, so two processes that compile at once do not see half a file.

Load before capturing a CUDA graph: loading a module while capturing is not allowed. A warm-up call is enough.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels import cuda_driver
from kernels.common import CudaSource

HEADERS = Path(__file__).resolve().parent
MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: its name, the device it is loaded on, and CuPy's function."""

    name: str
    device: int
    function: Any


def i32(value: int) -> Any:
    """A 32-bit integer argument of a launch."""
    import numpy

    return numpy.int32(value)


def i64(value: int) -> Any:
    """A 64-bit integer argument of a launch."""
    import numpy

    return numpy.int64(value)


def f32(value: float) -> Any:
    """A float argument of a launch."""
    import numpy

    return numpy.float32(value)


def architecture(source: CudaSource, capability: tuple[int, int]) -> str:
    """What to compile for: "sm_90a" for a source that says so, else the device's own, e.g. "sm_121"."""
    return source.architecture or "sm_{}{}".format(*capability)


def include_folders(source: CudaSource) -> tuple[Path, ...]:
    """Folders whose .cuh files a source may include: its own family's and kernels/."""
    return source.path.resolve().parent, HEADERS


def nvcc_architecture(name: str) -> tuple[str, ...]:
    """nvcc's options for one architecture, in the long form: some versions refuse sm_90a instructions in the short."""
    return ("-gencode", f"arch=compute_{name.removeprefix('sm_')},code={name}")


def _key(source: CudaSource, arch: str, compiler: str) -> str:
    parts = [compiler, arch, *source.options, source.path.read_text(encoding="utf-8")]
    for folder in include_folders(source):
        parts += [header.read_text(encoding="utf-8") for header in sorted(folder.glob("*.cuh"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cache() -> Path:
    chosen = os.environ.get("KILLGATE_CACHE")
    if chosen:
        return Path(chosen) / "cubin"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "killgate" / "cubin"


def _nvrtc_version() -> str:
    try:
        from cupy.cuda import nvrtc

        return "nvrtc {}.{}".format(*nvrtc.getVersion())
    except Exception:  # CuPy raises its own kinds where NVRTC's library is missing; each means "not here"
        return ""


def _by_nvrtc(source: CudaSource, arch: str) -> bytes:
    from cupy.cuda import get_cuda_path, nvrtc

    options = [f"--gpu-architecture={arch}", *source.options]
    options += [f"-I{folder}" for folder in include_folders(source)]
    if home := get_cuda_path():
        options.append(f"-I{home}/include")
    program = nvrtc.createProgram(source.path.read_text(encoding="utf-8"), source.path.name, [], [])
    try:
        nvrtc.compileProgram(program, options)
        return _whole(bytes(nvrtc.getCUBIN(program)))
    except nvrtc.NVRTCError as problem:
        raise RuntimeError(f"{source.path.name} for {arch}: {nvrtc.getProgramLog(program)}") from problem


def _whole(code: bytes) -> bytes:
    """A cubin to the end of its program headers: CuPy cuts off the last byte, a zero, and cuobjdump refuses that."""
    start, size, count = (*struct.unpack_from("<Q", code, 32), *struct.unpack_from("<HH", code, 54))  # of an ELF header
    return code.ljust(start + size * count, b"\0")


def _by_nvcc(source: CudaSource, arch: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernel.cubin"
        includes = [f"-I{path}" for path in include_folders(source)]
        command = ["nvcc", "-cubin", *nvcc_architecture(arch), *source.options, *includes, str(source.path)]
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{source.path.name} for {arch}: {done.stderr}{done.stdout}")
        return made.read_bytes()


def cubin(source: CudaSource, capability: tuple[int, int]) -> Path:
    """The compiled source for a device of this capability, from the cache or made now.

    Raises RuntimeError with the compiler's words when it does not compile, or when there is neither NVRTC nor nvcc.
    """
    arch = architecture(source, capability)
    compiler = _nvrtc_version() or ("nvcc" if shutil.which("nvcc") else "")
    if not compiler:
        raise RuntimeError(
            f"{source.path.name}: neither NVRTC (through CuPy) nor nvcc is here; install the CUDA toolkit"
        )
    path = _cache() / f"{source.path.stem}-{arch}-{_key(source, arch, compiler)}.cubin"
    if not path.exists():
        code = _by_nvrtc(source, arch) if compiler.startswith("nvrtc") else _by_nvcc(source, arch)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    return path


@functools.cache
def _module(path: Path, device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        module = cupy.cuda.function.Module()
        module.load_file(str(path))
    return module


@functools.cache
def load(source: CudaSource, name: str, device: int, shared_bytes: int = 0) -> Kernel:
    """One kernel of a source on one device; `shared_bytes`: the most dynamic shared memory of its launches."""
    import cupy

    path = cubin(source, torch.cuda.get_device_capability(device))
    with cupy.cuda.Device(device):
        function = _module(path, device).get_function(name)
        # The limit is the function's, and configurations that differ in their launch share it: it is never lowered.
        if shared_bytes > cupy.cuda.driver.funcGetAttribute(MAX_DYNAMIC_SHARED_BYTES, function.ptr):
            cupy.cuda.driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
    return Kernel(name, device, function)


def launch(
    kernel: Kernel,
    grid: Sequence[int],
    threads: int,
    arguments: Sequence[Any],
    shared_bytes: int = 0,
    programmatic: bool = False,
) -> None:
    """Launch on torch's current stream; tensors go in as their address, numbers as i32, i64 or f32 made them.

    programmatic: the kernel may start before the one ahead of it has ended (kernels/cuda_driver.py). An argument of
    type bytes goes in by value, as a tensor map does.
    """
    import cupy
    import numpy

    passed = [numpy.uintp(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    stream = torch.cuda.current_stream(kernel.device).cuda_stream
    if programmatic or any(isinstance(a, bytes) for a in passed):
        values = [a if isinstance(a, bytes) else a.tobytes() for a in passed]
        with cupy.cuda.Device(kernel.device):
            cuda_driver.launch(kernel.function.ptr, grid, threads, values, stream, shared_bytes, programmatic)
        return
    blocks = (*grid, 1, 1)[:3]
    with cupy.cuda.ExternalStream(stream, kernel.device):
        kernel.function(blocks, (threads, 1, 1), tuple(passed), shared_mem=shared_bytes)
