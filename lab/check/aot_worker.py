"""The child process of `lab compile`: it compiles a family's kernels for one target, a job at a time.

- Triton's registers come from the cubin itself through `cuobjdump --dump-resource-usage`, which Triton carries in
  backends/nvidia/bin in every version from 3.6 to 3.9. Running `ptxas -v` again on the PTX was tried and given up: the
  wheel holds two assemblers, which one is right depends on the version and the target, and the wrong one refuses the
  PTX. Triton's own n_regs and n_spills need a driver. A Triton kernel has no local arrays, so the stack frame that
  cuobjdump reports is spilled registers, the figure the driver would give as local memory.
- CUDA C++ is compiled by nvcc, or by NVRTC through CuPy where there is no nvcc; both print the assembler's own
  registers, spills and static shared memory under `-v`. Dynamic shared memory is a choice of the launch; the source
  says how much.
- A job's error message is in this process's error stream (MLIR writes there from C++), so the stream is a file that
  is truncated before each job.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kernels.common import Build, CudaSource, Needs
from lab.base.errors import BadInput
from lab.check.aot import NO_TRITON, WARP, AotRow, Plan, Refused, matrix_instruction, occupancy, one_line
from lab.check.child import serve
from lab.check.families import version_tuple


def compile_triton(build: Build, target: int) -> dict[str, Any]:
    """The figures of one `Build`, as AotRow fields; whatever Triton raises passes through."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(build.signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    source = ASTSource(build.kernel, dict(build.signature), dict(build.constexprs), attributes)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    options |= {"maxnreg": build.max_registers} if build.max_registers else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, WARP), options=options)
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    registers, spill_bytes = _resource_usage(compiled.asm["cubin"])
    return _figures(
        target,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=metadata.shared,
        threads=_threads(ptx),  # of the PTX: a warp-specialised kernel launches more warps than num_warps says
        tensor_columns=getattr(metadata, "tmem_size", 0) or 0,
        instruction=matrix_instruction(ptx),
    )


def _threads(ptx: str) -> int | None:
    match = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", ptx)
    if not match:
        return None
    x, y, z = (int(n or 1) for n in match.groups())
    return x * y * z


def _resource_usage(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers and stack bytes per thread of a cubin with one kernel; (None, None) where cuobjdump is missing."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(bundled) if bundled.exists() else shutil.which("cuobjdump")
    if not tool:
        return None, None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "--dump-resource-usage", str(path)], capture_output=True, text=True, timeout=120)
    match = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if not match:
        raise RuntimeError(f"error: cuobjdump --dump-resource-usage printed no REG line: {done.stdout + done.stderr!r}")
    return int(match.group(1)), int(match.group(2))


def _figures(target: int, **found: Any) -> dict[str, Any]:
    used = (found["registers"], found["shared_bytes"], found["threads"], found.get("tensor_columns", 0))
    blocks, by, fits = occupancy(target, *used)
    return {"status": "ok", "tensor_columns": 0, **found, "blocks_per_sm": blocks, "limited_by": by, "fits": fits}


def compile_cuda(source: CudaSource, target: int) -> list[dict[str, Any]]:
    """The figures of every kernel of a `CudaSource`; raises RuntimeError with the compiler's words when it fails."""
    from kernels import cuda  # with torch, which takes longest

    if not cuda.compilers():
        raise Skipped("no nvcc on the PATH and no NVRTC through CuPy")
    compiler, made = cuda.compiled(source, divmod(target, 10), prefer="nvcc")
    ptx, log = (made / "kernel.ptx").read_text(), (made / "log").read_text()
    rows = []
    for name in source.kernels:
        used = re.search(rf"Compiling entry function '{name}'.*?Used (\d+) registers([^\n]*)", log, re.S)
        entry = re.search(rf"\.entry\s+{name}\b(.*?)(?=\.entry\s|\Z)", ptx, re.S)
        if not used or not entry:
            row = {"status": "error", "message": f'no kernel extern "C" {name} in {source.path.name}'}
        else:
            spills = re.search(r"(\d+) bytes spill stores", used.group(0))
            static = re.search(r"(\d+) bytes smem", used.group(2))
            shared = int(static.group(1)) if static else 0
            row = _figures(
                target,
                registers=int(used.group(1)),
                spill_bytes=int(spills.group(1)) if spills else None,
                shared_bytes=shared + source.shared_of(name),
                threads=_threads(entry.group(1)),
                instruction=matrix_instruction(entry.group(1)),
            )
        rows.append({"build": name, "compiler": compiler, **row})
    return rows


class Skipped(Exception):
    """A job that this machine has no compiler for; its text becomes the row's message."""


Job = tuple[str, str, str, Callable[[], list[dict[str, Any]]]]


def jobs(family: Any, target: int) -> list[Job]:
    """(candidate, build, compiler, compile) for everything the family has for this target; nothing is compiled yet."""
    found: list[Job] = []
    version = triton_version()
    triton = f"triton {version}" if version else ""
    for candidate in family.candidates.values():
        try:
            builds = candidate.builds(target)
        except Exception as problem:
            found.append((candidate.name, "builds()", triton, partial(_raise, problem)))
            continue
        found += [(candidate.name, b.label, triton, partial(_triton_job, candidate.needs, b, target)) for b in builds]
    for module, reason in family.unavailable.items():
        kind = ImportError if module in getattr(family, "broken", ()) else Skipped
        found.append((module, "", "", partial(_raise, kind(reason))))
    nvcc = "nvcc" if shutil.which("nvcc") else ""
    found += [(s.path.name, "", nvcc, partial(_cuda_job, s, target)) for s in family.cuda_sources]
    return found


def _raise(problem: Exception) -> list[dict[str, Any]]:
    raise problem


def _below(capability: tuple[int, int], target: int) -> str:
    return f"compute capability {capability[0]}.{capability[1]}" if capability > divmod(target, 10) else ""


def _triton_job(needs: Needs, build: Build, target: int) -> list[dict[str, Any]]:
    if missing := _below(needs.capability, target):
        return [{"status": "needs", "message": missing}]
    version = triton_version()
    if not version:
        raise Skipped(NO_TRITON)
    for need in (needs.triton, build.needs_triton):
        if need and version_tuple(version) < version_tuple(need):
            return [{"status": "needs", "message": f"triton {need}, found {version}"}]
    return [compile_triton(build, target)]


def _cuda_job(source: CudaSource, target: int) -> list[dict[str, Any]]:
    missing = _below(source.capability, target)
    if not missing and source.architecture and source.architecture.removesuffix("a") != f"sm_{target}":
        missing = f"{source.architecture}, whose instructions it is written in"
    return [{"status": "needs", "message": missing}] if missing else compile_cuda(source, target)


def triton_version() -> str:
    """The installed Triton's version, "" where there is none."""
    try:
        return importlib.import_module("triton").__version__
    except ImportError:
        return ""


def _error_stream() -> str:
    sys.stderr.flush()
    return os.pread(2, 1 << 20, 0).decode(errors="replace")


def work(descriptor: str, parent: str, provider: str, name: str, target: str) -> None:
    """Answer with the Plan, or Refused, and then to each number of a job with its rows."""
    send, asked = serve(descriptor, parent)
    module, function = provider.split(":")
    try:
        todo = jobs(getattr(importlib.import_module(module), function)(name), int(target))
    except BadInput as refused:
        return send(msgspec.json.encode(Refused(refused.what, refused.where, refused.remedy)))
    except Exception as problem:
        return send(msgspec.json.encode(Refused(one_line(f"loading {name}: {type(problem).__name__}: {problem}"))))
    send(msgspec.json.encode(Plan(tuple((candidate, build) for candidate, build, *_ in todo), triton_version())))
    for line in asked:
        candidate, build, compiler, compiled = todo[int(line)]
        os.ftruncate(2, 0)  # a file that the parent opened for appending
        try:
            found = compiled()
        except Skipped as reason:
            found = [{"status": "skipped", "message": str(reason)}]
        except Exception as problem:
            found = [{"status": "error", "message": one_line(f"{_error_stream()}\n{_words(problem)}")}]
        same = {"family": name, "candidate": candidate, "build": build, "target": int(target), "compiler": compiler}
        send(msgspec.json.encode([AotRow(**{**same, **row}) for row in found]))


def _words(problem: Exception) -> str:
    """An exception as the line that matters: a compiler's log as it is, Triton's own errors without their source."""
    text = str(problem)
    if type(problem).__name__ == "CompilationError":
        # "at line:column:", the source with a caret, then the reason; a bare caret leaves the reason to the cause.
        place = next((line for line in text.splitlines() if line.startswith("at ")), "")
        reason = [line for line in text.splitlines() if line.strip()][-1].strip()
        cause = "" if problem.__cause__ is None else str(problem.__cause__)
        return f"error: {place} {reason}" + (f" ({cause})" if cause not in reason else "")
    return text if "rror" in text else f"{type(problem).__name__}: {text}"


if __name__ == "__main__":
    work(*sys.argv[1:])
