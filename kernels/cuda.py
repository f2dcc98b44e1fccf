"""Compile a CUDA C++ source at first use, keep the cubin, load it through CuPy, launch it on torch's stream.

    kernel = cuda.load(SOURCE, "gdn_scan", device=0, shared_bytes=200_000)
    cuda.launch(kernel, grid=(132,), threads=384, arguments=(q, k, v, cuda.i32(2048)), shared_bytes=200_000)

Why not `cupy.RawModule(code=...)`: CuPy appends its own -arch=sm_90, and wgmma, setmaxnreg and the other instructions
of one architecture need sm_90a (seen in CuPy 14.2). So NVRTC (through CuPy) or nvcc makes a cubin here, and CuPy only
loads it. What it made, with the PTX and the assembler's log, is kept (kernels/build_cache.py) by the version of the
compiler, the options and the text of the source and of every header that it includes.

Load before capturing a CUDA graph: loading a module while capturing is not allowed. A warm-up call is enough.
"""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels import build_cache, cuda_driver
from kernels.common import CudaSource

HEADERS = Path(__file__).resolve().parent
MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

# What `launch` did, while something asks for it (kernels/operators.py): the launch, its device, its arguments.
RECORDED: ContextVar[list[tuple[cuda_driver.Launch, int, tuple[Any, ...]]] | None] = ContextVar(
    "recorded", default=None
)


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


def texts(path: Path, folders: tuple[Path, ...], seen: dict[Path, str] | None = None) -> dict[Path, str]:
    """The text of a source and of every header of ours that it includes, directly or not."""
    seen = {} if seen is None else seen
    if path not in seen:
        seen[path] = path.read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', seen[path], re.M):
            header = next((f / name for f in (path.parent, *folders) if (f / name).exists()), None)
            if header is not None:
                texts(header.resolve(), folders, seen)
    return seen


@functools.cache
def compilers() -> dict[str, str]:
    """The compilers that are here, by name, with their version: "nvrtc" through CuPy, and "nvcc"."""
    found = {}
    try:
        from cupy.cuda import nvrtc

        found["nvrtc"] = "{}.{}".format(*nvrtc.getVersion())
    except Exception:  # CuPy raises its own kinds where NVRTC's library is missing; each means "not here"
        pass
    if shutil.which("nvcc"):
        said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, timeout=60).stdout
        release = re.search(r"release ([\d.]+)", said)
        found["nvcc"] = release.group(1) if release else "?"
    return found


def _by_nvrtc(source: CudaSource, arch: str, folder: Path) -> None:
    from cupy.cuda import get_cuda_path, nvrtc

    # NVRTC before 13.5 takes a generic lambda in device code for a host function, which nvcc does not.
    options = [f"--gpu-architecture={arch}", "--ptxas-options=-v", "--device-as-default-execution-space"]
    options += source.options
    options += [f"-I{path}" for path in include_folders(source)]
    if home := get_cuda_path():
        options.append(f"-I{home}/include")
    program = nvrtc.createProgram(source.path.read_text(encoding="utf-8"), source.path.name, [], [])
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as problem:
        raise RuntimeError(f"{source.path.name} for {arch}:\n{nvrtc.getProgramLog(program)}") from problem
    (folder / "kernel.cubin").write_bytes(_whole(bytes(nvrtc.getCUBIN(program))))
    ptx = nvrtc.getPTX(program)
    (folder / "kernel.ptx").write_text(ptx.decode() if isinstance(ptx, bytes) else ptx)
    (folder / "log").write_text(nvrtc.getProgramLog(program))


def _whole(code: bytes) -> bytes:
    """A cubin to the end of its program headers: CuPy cuts off the last byte, a zero, and cuobjdump refuses that."""
    start, size, count = (*struct.unpack_from("<Q", code, 32), *struct.unpack_from("<HH", code, 54))  # of an ELF header
    return code.ljust(start + size * count, b"\0")


def _by_nvcc(source: CudaSource, arch: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = ["nvcc", "-cubin", *nvcc_architecture(arch), "-Xptxas", "-v", "--keep", "--keep-dir", scratch]
        command += [*source.options, *(f"-I{path}" for path in include_folders(source)), str(source.path)]
        done = subprocess.run(
            [*command, "-o", str(folder / "kernel.cubin")], capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise RuntimeError(f"{source.path.name} for {arch}:\n{done.stderr}{done.stdout}")
        (folder / "kernel.ptx").write_text("\n".join(p.read_text() for p in sorted(Path(scratch).glob("*.ptx"))))
    (folder / "log").write_text(done.stderr + done.stdout)


def compiled(source: CudaSource, capability: tuple[int, int], prefer: str = "nvrtc") -> tuple[str, Path]:
    """The compiler and its version, and the folder of what it made: kernel.cubin, kernel.ptx and the assembler's log.

    prefer: the compiler to take where both are here. Raises RuntimeError with the compiler's words when the source does
    not compile, or when there is neither NVRTC nor nvcc.
    """
    here = compilers()
    if not here:
        raise RuntimeError(
            f"{source.path.name}: neither NVRTC (through CuPy) nor nvcc is here; install the CUDA toolkit"
        )
    name = prefer if prefer in here else next(iter(here))
    arch, compiler = architecture(source, capability), f"{name} {here[name]}"
    read = texts(source.path.resolve(), include_folders(source))
    by = _by_nvrtc if name == "nvrtc" else _by_nvcc
    parts = [compiler, arch, *source.options, *read.values()]
    return compiler, build_cache.kept(f"{source.path.stem}-{arch}", parts, functools.partial(by, source, arch))


def cubin(source: CudaSource, capability: tuple[int, int]) -> Path:
    """The compiled source for a device of this capability, from the cache or made now; raises as `compiled` does."""
    return compiled(source, capability)[1] / "kernel.cubin"


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
    values = [address_bytes(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    made = cuda_driver.Launch(
        kernel.function.ptr,
        grid,
        threads,
        [a if isinstance(a, bytes) else a.tobytes() for a in values],
        shared_bytes,
        programmatic,
    )
    with cuda_driver.in_context(kernel.device):
        made(stream_of(kernel.device))
    if (recorded := RECORDED.get()) is not None:
        recorded.append((made, kernel.device, tuple(arguments)))


def address_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's address as an argument of a launch."""
    return struct.pack("<Q", tensor.data_ptr())


def stream_of(device: int) -> int:
    """The handle of torch's current stream on a device."""
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a tenth of the time of the public object
    return int(quick(device) if quick else torch.cuda.current_stream(device).cuda_stream)
