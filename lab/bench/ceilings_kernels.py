"""Triton kernels that do nothing but move bytes: what a ceiling is measured with. Imported only on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_kernel(x, out, BLOCK: tl.constexpr, TRIPS: tl.constexpr):
    """Each program reads TRIPS blocks of float32 in a row and stores one sum, so that no load can be dropped."""
    first = tl.program_id(0).to(tl.int64) * BLOCK * TRIPS
    total = tl.zeros([BLOCK], tl.float32)
    for trip in range(TRIPS):
        total += tl.load(x + first + trip * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def update_kernel(x, BLOCK: tl.constexpr):
    """Each program negates one block of float32 where it lies: bytes in and out, and nothing that could hide them."""
    at = x + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, -tl.load(at))


@triton.jit
def reread_kernel(x, out, blocks, PASSES: tl.constexpr, BLOCK: tl.constexpr):
    """Every program walks the whole of a small buffer PASSES times from its own place: reads that the L2 serves."""
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(PASSES):
        at = (tl.program_id(0) * 7 + step) % blocks
        total += tl.load(x + at * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def null_kernel(x):
    """The least a launch can be."""
    tl.store(x, 0.0)
