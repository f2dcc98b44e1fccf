"""What ahead-of-time compilation says about a kernel: the row, an SM's limits, and the reading of PTX.

No GPU and no compiler is needed here; `lab.check.aot_worker` compiles and `lab.check.compile` makes the table.

PTX names the matrix instruction: it is the last text that Triton and nvcc both emit, and it tells wgmma, mma.sync and
tcgen05 apart together with their `kind::`, which a SASS opcode does less plainly. Occupancy follows the rules of the
CUDA toolkit's occupancy calculator with the figures of data/aot_limits.toml. It is an upper bound on resident blocks
and says nothing about speed; the split of an SM between shared memory and L1 is taken as the largest shared memory.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from lab.base import files
from lab.base.errors import REPOSITORY, BadInput
from lab.row import store
from lab.row.records import Record

LIMITS = REPOSITORY / "data" / "aot_limits.toml"
WARP = 32
MESSAGE_CHARACTERS = 160
NO_TRITON = "Triton is not installed (it is made for Linux only)"


class Plan(Struct, frozen=True, tag=True):
    """What a child will compile for a target: (candidate, build) each, with this Triton ("" where there is none)."""

    jobs: tuple[tuple[str, str], ...]
    triton: str


class Refused(Struct, frozen=True, tag=True):
    """A family that the child could not take: the BadInput to raise, or with `what` alone an error of its code."""

    what: str
    where: str = ""
    remedy: str = ""


class AotRow(Record, frozen=True, tag=1):
    """What one kernel of one candidate compiles to for one target.

    target:         compute capability, e.g. 121.
    compiler:       name and version that made the row, e.g. "triton 3.9.0".
    status:         "ok", "error" (message says why), "needs" (message names the version or capability), "skipped".
    registers:      per thread; spill_bytes: per thread.
    shared_bytes:   per block, the static part for CUDA C++; threads: per block.
    tensor_columns: tensor memory columns per block (tcgen05 targets), of 512.
    blocks_per_sm:  most blocks resident on one SM; limited_by: what stops one more.
    fits:           whether a block can be launched at all; None where nothing was compiled.
    date:           the day it was made, ISO, of a row that is kept.
    """

    FILE: ClassVar[str] = "dot_scaled_by_triton.jsonl"  # of the probe's; no other row is kept
    WORD: ClassVar[str] = "row"

    family: str
    candidate: str
    build: str
    target: int
    compiler: str
    status: str
    message: str = ""
    registers: int | None = None
    shared_bytes: int | None = None
    spill_bytes: int | None = None
    threads: int | None = None
    tensor_columns: int | None = None
    blocks_per_sm: int | None = None
    limited_by: str = ""
    instruction: str = ""
    fits: bool | None = None
    date: str = ""


PROBED = REPOSITORY / "profiles" / "aot" / AotRow.FILE


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """What an SM and a block of one compute capability may hold; keys and sources as in data/aot_limits.toml."""

    threads_per_sm: int
    blocks_per_sm: int
    shared_per_sm_bytes: int
    shared_per_block_bytes: int
    tensor_memory_columns: int
    registers_per_sm: int
    registers_per_thread: int
    register_granularity_per_warp: int
    sub_partitions_per_sm: int
    threads_per_block: int
    shared_granularity_bytes: int
    shared_reserved_per_block_bytes: int


@cache
def _table() -> dict[int, Limits]:
    rows = files.read(LIMITS, dict[str, dict[str, int]])
    common = rows.pop("common")
    return {int(n.removeprefix("sm_")): files.convert(common | row, Limits, LIMITS, n) for n, row in rows.items()}


def limits(target: int) -> Limits:
    """Limits of a compute capability such as 121; raises BadInput for one the table does not hold."""
    table = _table()
    if target not in table:
        known = ", ".join(str(t) for t in sorted(table))
        raise BadInput("target", f"compute capability {target} has no row in data/aot_limits.toml", f"valid: {known}")
    return table[target]


def occupancy(
    target: int, registers: int | None, shared_bytes: int, threads: int | None, tensor_columns: int = 0
) -> tuple[int | None, str, bool]:
    """Blocks per SM, what limits them, and whether one block fits.

    Rules as in the occupancy calculator of the CUDA toolkit (cuda_occupancy.h): registers are given to whole warps in
    units of 256 inside each of four sub-partitions, shared memory in units of 128 bytes on top of the 1 KB that the
    system keeps per block. Blocks are None where threads or registers are unknown (a CUDA kernel without launch bounds,
    no cuobjdump) and nothing is known to be too large.
    """
    lim = limits(target)
    if shared_bytes > lim.shared_per_block_bytes:
        return 0, "smem", False
    if threads is not None and threads > lim.threads_per_block:
        return 0, "threads", False
    if threads is None or registers is None:
        return None, "", True
    warps = -(-threads // WARP)
    caps = {"threads": lim.threads_per_sm // (warps * WARP), "blocks": lim.blocks_per_sm}
    per_warp = _up(registers * WARP, lim.register_granularity_per_warp)
    per_partition = lim.registers_per_sm // lim.sub_partitions_per_sm // per_warp
    caps["registers"] = per_partition * lim.sub_partitions_per_sm // warps
    shared = _up(shared_bytes + lim.shared_reserved_per_block_bytes, lim.shared_granularity_bytes)
    caps["smem"] = lim.shared_per_sm_bytes // shared
    if tensor_columns and lim.tensor_memory_columns:
        caps["tmem"] = lim.tensor_memory_columns // tensor_columns
    by = min(caps, key=lambda name: caps[name])
    return caps[by], by, caps[by] > 0


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


_MATRIX = re.compile(r"(?<![\w.])(wgmma\.mma_async|tcgen05\.mma|wmma\.mma|mma)((?:\.[\w:]+)+)")
_ELEMENT = re.compile(r"(?:e[2345]m[123]|bf16x?2?|tf32|f16|f32|f64|[su](?:4|8|32)|b1)")


def matrix_instruction(ptx: str) -> str:
    """The matrix instructions of a PTX text in words, the most frequent first; "none" where there is none.

    wgmma and mma.sync show their tile and operand type, block-scaled forms their `kind::` and scale vector, e.g.
    "mma.sync m16n8k64 kind::mxf4nvf4 4X". "none (dp4a)" marks integer dot products outside the tensor cores.
    """
    code = re.sub(r"//[^\n]*", "", ptx)
    seen = Counter(_describe(*match.groups()) for match in _MATRIX.finditer(code))
    if not seen:
        return "none (dp4a)" if re.search(r"\bdp4a\.", code) else "none"
    names = [name for name, _ in seen.most_common()]
    return " + ".join(names[:2]) + (f" + {len(names) - 2} more" if len(names) > 2 else "")


def _describe(name: str, suffix: str) -> str:
    parts = suffix.strip(".").split(".")
    kind = next((p for p in parts if p.startswith("kind::")), "")
    shape = next((p for p in parts if re.fullmatch(r"m\d+n\d+k\d+", p)), "")
    scale = next((p.split("::")[-1] for p in parts if p.startswith(("scale_vec::", "block16", "block32"))), "")
    elements = [p for p in parts if _ELEMENT.fullmatch(p)]
    # Type order: wgmma D.A.B, mma.sync D.A.B.C (then the scale type); wmma leaves f16 operands out (D.C).
    a, b = ("f16", "f16") if name == "wmma.mma" and len(elements) == 2 else [*elements, "", "", ""][1:3]
    operands = a if a == b or not b else f"{a} x {b}"
    short = {"wgmma.mma_async": "wgmma", "wmma.mma": "wmma"}.get(name, name)
    if name == "mma":
        short = "mma.sp" if "sp" in parts else "mma.sync"
    return " ".join(word for word in (short, shape, kind or operands, scale) if word)


def one_line(text: str) -> str:
    """The line of a compiler's output that says what went wrong, without paths, at most 160 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    where = next((m.group(1) for line in lines if (m := re.search(r"while executing \[`(\w+)`", line))), "")
    patterns = (r"Assertion .*failed", r"LLVM ERROR", r"\b(?:error|fatal)\b", r"Error\b")
    hit = next((line for p in patterns for line in lines if re.search(p, line)), lines[-1] if lines else "no message")
    if assertion := re.search(r"Assertion .*failed", hit):
        hit = assertion.group(0)
    hit = re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/", "", " ".join(hit.split()))
    hit = hit.removeprefix("error: ")
    hit = f"{where}: {hit}" if where else hit
    return hit if len(hit) <= MESSAGE_CHARACTERS else hit[: MESSAGE_CHARACTERS - 3] + "..."


def kept(path: Path = PROBED) -> list[AotRow]:
    """The newest row of the probe for each Triton version, target and format; raises BadInput naming a bad line."""
    return list({(row.compiler, row.target, row.candidate): row for row in store.read(path, AotRow)}.values())
