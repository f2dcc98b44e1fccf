"""A family for tests/check/test_compile.py with one candidate for each thing that can happen to a compilation.

It is imported by name in the child process of `lab compile`, never by a test: its kernels are compiled, not run.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from kernels.common import Build, Candidate, CudaSource, Needs


@triton.jit
def product(a_ptr, b_ptr, out_ptr, K, M: tl.constexpr, N: tl.constexpr, K_STEP: tl.constexpr):
    rows, cols, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K_STEP)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, K, K_STEP):
        a = tl.load(a_ptr + rows * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * N + cols)
        total = tl.dot(a, b, total)
    tl.store(out_ptr + rows * N + cols, total)


@triton.jit
def broken(out_ptr, M: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, M), tl.arange(0, M) + tl.arange(0, 2 * M))


def tile(label, m, n, k, stages=2, **more):
    sizes = {"M": m, "N": n, "K_STEP": k}
    runtime = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32", "K": "i32"}
    signature, aligned = {**runtime, **dict.fromkeys(sizes, "constexpr")}, tuple(runtime)
    return Build(label, product, signature, sizes, num_warps=4, num_stages=stages, aligned=aligned, **more)


class Abort:
    """A signature that takes the process with it when it is read, as a compiler's failed assertion does."""

    def __iter__(self):
        os.write(2, b"toy.cpp:7: Assertion `false' failed.\n")
        os.abort()


def never(args, out):
    raise NotImplementedError


def refuse(capability):
    # Words in the error stream before any job: they must not turn up in a later job's message.
    os.write(2, b"Assertion `stale' failed\n")
    raise ValueError("tile 7 is not a power of two")


def stub(name, *builds, **more):
    return Candidate(name, "bf16", run=never, builds=lambda capability: builds, **more)


def load(name):
    broken_build = Build("bad shapes", broken, {"out_ptr": "*i32", "M": "constexpr"}, {"M": 16})
    deadly: Any = Abort()
    candidates = (
        stub("plain", tile("small", 64, 64, 64)),
        stub("large", tile("deep", 128, 128, 64, stages=5)),
        stub("aborts", Build("first", broken, deadly), tile("second", 64, 64, 32)),
        stub("broken", broken_build),
        stub("newer", tile("tomorrow", 64, 64, 64, needs_triton="99.1")),
        stub("blackwell", tile("only", 64, 64, 64), needs=Needs(capability=(10, 0))),
        Candidate("refusing", "bf16", run=never, builds=refuse),
    )
    here = Path(__file__).parent
    sources = (
        CudaSource(here / "toy.cu", ("crowded", "absent")),
        CudaSource(here / "wrong.cu", ("wrong",)),
        CudaSource(here / "toy.cu", ("crowded",), capability=(10, 0)),
    )
    unavailable = {"peers/toy": "No module named toylib", "triton_mine": "SyntaxError: invalid syntax"}
    parts = {"cuda_sources": sources, "unavailable": unavailable, "broken": ["triton_mine"]}
    return SimpleNamespace(candidates={c.name: c for c in candidates}, **parts)
