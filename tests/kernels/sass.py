"""Which loads from shared memory are in flight where a compiled kernel says that others may overwrite what they read.

An instruction of compute capability 9.0 names in its encoding the scoreboard that its result will clear and those that
it waits for itself. An arrival at a barrier in shared memory waits for no load that its operands do not need, and the
hardware does not keep the two in order; so a kernel must make its arrivals need them (once_loaded, kernels/sm90).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels import cuda
from kernels.common import CudaSource

NO_SCOREBOARD = 7


@dataclass(frozen=True)
class Instruction:
    """address in bytes; text without its predicate; sets: the scoreboard of its result, or 7; waits: a bit for each."""

    address: int
    predicate: str
    text: str
    sets: int
    waits: int

    @property
    def loads(self) -> bool:
        return self.text.startswith(("LDS", "LDSM")) and self.sets != NO_SCOREBOARD

    @property
    def releases(self) -> bool:
        """An arrival of one, without bytes to expect."""
        return self.text.startswith("SYNCS.ARRIVE") and ".A1T0" in self.text


def disassembler() -> str:
    """cuobjdump of Triton's wheel, else of the toolkit; "" where there is neither."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(bundled) if bundled.exists() else shutil.which("cuobjdump") or ""


def compiled(source: CudaSource) -> Path:
    """The source's cubin for an sm_90a device; skips the test where no compiler or no disassembler is installed."""
    if not disassembler():
        pytest.skip("no cuobjdump")
    try:
        return cuda.cubin(source, (9, 0))
    except RuntimeError as problem:
        if "neither NVRTC" in str(problem):
            pytest.skip(str(problem))
        raise


def kernels(cubin: Path) -> dict[str, list[Instruction]]:
    """The instructions of every kernel of a cubin, in order."""
    done = subprocess.run(
        [disassembler(), "-sass", str(cubin)], capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, list[Instruction]] = {}
    for part in re.split(r"\n\s*Function : ", done.stdout)[1:]:
        lines = re.findall(
            r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+ )?\s*([^;]*?)\s*;\s+/\*.*\n\s*/\* 0x([0-9a-f]{16}) \*/", part
        )
        found[part.split()[0]] = [
            Instruction(int(at, 16), predicate.strip(), text, int(high, 16) >> 46 & 7, int(high, 16) >> 52 & 63)
            for at, predicate, text, high in lines
        ]
    return found


def _next(code: list[Instruction]) -> list[list[int]]:
    """Where each instruction may go on."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    meets: dict[str, list[tuple[int, int]]] = {}  # of a barrier's name: where it is set, and where all go on
    for instruction in code:
        if match := re.match(r"BSSY\S* (B\d+), 0x([0-9a-f]+)", instruction.text):
            meets.setdefault(match.group(1), []).append((instruction.address, int(match.group(2), 16)))
    ways = []
    for i, instruction in enumerate(code):
        word, _, rest = instruction.text.partition(" ")
        jump, falls = word.split(".")[0], [i + 1] * (i + 1 < len(code))
        if jump in ("BRA", "CALL"):
            target = [index[int(at, 16)] for at in re.findall(r"0x([0-9a-f]+)$", rest)]
            always = jump == "BRA" and not instruction.predicate and rest.startswith("0x") and word == "BRA"
            ways.append(target if always else target + falls)
        elif jump == "BSYNC":
            named = meets[rest.split()[0]]  # roles share names: those around this one, where there are such
            around = [end for start, end in named if start < instruction.address < end] or [end for _, end in named]
            ways.append([index[end] for end in around] + (falls if instruction.predicate else []))
        elif jump in ("EXIT", "RET"):
            ways.append(falls if instruction.predicate else [])
        else:
            ways.append(falls)
    return ways


def unfinished_at_releases(code: list[Instruction]) -> list[str]:
    """Each arrival that a load from shared memory may still be in flight at, with the load; on any way through."""
    ways = _next(code)
    under_way: list[set[int] | None] = [None] * len(code)
    under_way[0] = set()
    todo = [0]
    while todo:
        i = todo.pop()
        after = {load for load in under_way[i] or () if not code[i].waits >> code[load].sets & 1}
        after |= {i} if code[i].loads else set()
        for way in ways[i]:
            known = under_way[way]
            if known is None or after - known:
                under_way[way] = after | (known or set())
                todo.append(way)
    return [
        f"{instruction.address:#x} {instruction.text} while {code[load].address:#x} {code[load].text}"
        for instruction, loads in zip(code, under_way, strict=True)
        if instruction.releases
        for load in sorted(loads or ())
        if not instruction.waits >> code[load].sets & 1
    ]
