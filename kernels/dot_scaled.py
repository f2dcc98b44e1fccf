"""Which instruction does Triton emit for a GEMM of two e2m1 operands? `lab compile --probe` asks the installed release.

`tl.dot_scaled` takes the operands with one scale per group along K: ue8m0 for groups of 32 (OCP MXFP4) or e4m3 for
groups of 16 (NVFP4). Blackwell has a tensor core instruction for each, and whether Triton emits it on GB10 (sm_121) has
changed between releases, so the answers are stored as rows (profiles/aot). The kernel is a loop over K and one tile;
another tile may compile differently. It is no candidate: it is compiled and never launched.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kernels.common import Build, Candidate, has_triton

M, N, K_STEP = 128, 128, 128  # the probe's tile
# format name -> (elements per scale, Triton type of a scale)
FORMATS = {"e2m1 ue8m0/32": (32, "*u8"), "e2m1 e4m3/16": (16, "*fp8e4nv")}

if has_triton():
    import triton
    import triton.language as tl

    @triton.jit
    def dot_scaled_kernel(
        a_ptr,  # [M, K/2] uint8, two e2m1 per byte
        b_ptr,  # [N, K/2] uint8
        a_scale_ptr,  # [M, K/GROUP]
        b_scale_ptr,  # [N, K/GROUP]
        out_ptr,  # [M, N] float32
        K,
        M: tl.constexpr,
        N: tl.constexpr,
        K_STEP: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        rows, cols = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None]
        packed, group = tl.arange(0, K_STEP // 2)[None, :], tl.arange(0, K_STEP // GROUP)[None, :]
        total = tl.zeros((M, N), dtype=tl.float32)
        for k in range(0, K, K_STEP):
            a = tl.load(a_ptr + rows * (K // 2) + k // 2 + packed)
            b = tl.load(b_ptr + cols * (K // 2) + k // 2 + packed)
            a_scale = tl.load(a_scale_ptr + rows * (K // GROUP) + k // GROUP + group)
            b_scale = tl.load(b_scale_ptr + cols * (K // GROUP) + k // GROUP + group)
            total = tl.dot_scaled(a, a_scale, "e2m1", tl.trans(b), b_scale, "e2m1", total)
        tl.store(out_ptr + rows * N + tl.trans(cols), total)


def probe(name: str) -> SimpleNamespace:
    """The probe in the shape of a family, one candidate per format; `name` is the family word its rows carry."""
    found = {label: _probe(label, group, scale) for label, (group, scale) in FORMATS.items()} if has_triton() else {}
    return SimpleNamespace(candidates=found, cuda_sources=(), unavailable={})


def _probe(label: str, group: int, scale: str) -> Candidate:
    pointers = {"a_ptr": "*u8", "b_ptr": "*u8", "a_scale_ptr": scale, "b_scale_ptr": scale, "out_ptr": "*fp32"}
    constexprs = {"M": M, "N": N, "K_STEP": K_STEP, "GROUP": group}
    build = Build(
        label=f"tile {M}x{N}x{K_STEP}",
        kernel=dot_scaled_kernel,
        signature={**pointers, "K": "i32", **dict.fromkeys(constexprs, "constexpr")},
        constexprs=constexprs,
        num_stages=2,
        aligned=(*pointers, "K"),
    )
    return Candidate(name=label, precision=label, run=_never, builds=lambda capability: (build,))


def _never(args: dict[str, Any], out: dict[str, Any]) -> None:
    raise NotImplementedError("dot_scaled_kernel is compiled, never launched; run a family's candidate instead")
