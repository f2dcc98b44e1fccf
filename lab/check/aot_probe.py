"""Which instruction Triton emits for a product of two e2m1 operands, per Triton version and target.

`tl.dot_scaled` takes 4-bit e2m1 operands with one scale per group along K: ue8m0 for groups of 32 (the OCP
microscaling format) or e4m3 for groups of 16. Blackwell has a tensor core instruction for each, and whether Triton
emits it on GB10 (sm_121) has changed between releases, so the answer is kept as rows: profiles/aot/
dot_scaled_by_triton.jsonl holds what each version answered, `python -m lab compile --probe` asks the installed one.

The kernel is the smallest that keeps the compiler honest: a loop over K, so that it cannot be folded away, and one tile
of 128 x 128. It is a probe of the toolchain and no candidate: it is never launched. What was given up is every tile
shape but one; a different one may take a different path inside the compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kernels.common import Build, Candidate, has_triton
from lab.base import files
from lab.base.errors import REPOSITORY
from lab.check.aot import AotRow
from lab.row import store

ROWS = REPOSITORY / "profiles" / "aot" / "dot_scaled_by_triton.jsonl"
M, N, K_STEP = 128, 128, 128
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


@dataclass(frozen=True)
class Probe:
    """What `lab.check.compile` reads of a family."""

    candidates: Mapping[str, Candidate]
    cuda_sources: tuple[Any, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)


def load(name: str) -> Probe:
    """The probe in the shape of a family, one candidate per format; `name` is the family word its rows carry."""
    if not has_triton():
        return Probe({})
    return Probe({label: _candidate(label, group, scale) for label, (group, scale) in FORMATS.items()})


def _candidate(label: str, group: int, scale: str) -> Candidate:
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


def committed(path: Path = ROWS) -> list[AotRow]:
    """The kept rows, every Triton version and target; raises BadInput naming the line that cannot be read."""
    return store.read(path, AotRow)


def write(rows: Iterable[AotRow], date: str, path: Path = ROWS) -> None:
    """Put the rows of one Triton version into the file, in place of that version's earlier ones; others stay.

    date: the day they were made, ISO, kept in each row.
    """
    fresh = [replace(row, date=date) for row in rows]
    versions = {row.compiler for row in fresh}
    kept = [row for row in committed(path) if row.compiler not in versions] if path.exists() else []
    ordered = sorted(kept + fresh, key=lambda row: (row.compiler, row.target, row.candidate))
    files.write(path, b"".join(store.line(row, path) for row in ordered).decode())
