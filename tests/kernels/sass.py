"""Which loads from shared memory are in flight where a compiled kernel says that others may overwrite what they read.

An instruction of compute capability 9.0 names in its encoding the scoreboard that its result will clear and those that
it waits for itself. An arrival at a barrier in shared memory waits for no load that its operands do not need, and the
hardware does not keep the two in order; so a kernel must make its arrivals need them (once_loaded, kernels/sm90).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels import cuda
from kernels.common import CudaSource
from tests.kernels import cubins

NO_SCOREBOARD = 7
JUMPS = ("BRA", "BSSY", "CALL", "RET", "WARPSYNC.COLLECTIVE")  # with an address at their end


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
    """nvdisasm of Triton's wheel, else of the toolkit; "" where there is neither."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(bundled) if bundled.exists() else shutil.which("nvdisasm") or ""


def compiled(source: CudaSource) -> Path:
    """The source's cubin for an sm_90a device; skips the test where no compiler or no disassembler is installed."""
    if not disassembler():
        pytest.skip("no nvdisasm")
    try:
        return cuda.cubin(source, (9, 0))
    except RuntimeError as problem:
        if "neither NVRTC" in str(problem):
            pytest.skip(str(problem))
        raise


def kernels(*paths: Path) -> dict[str, list[Instruction]]:
    """The instructions of every kernel of these cubins, in order.

    All at once, as bare machine code: nvdisasm takes 0.3 s to start, and longer for symbols than for instructions.
    """
    own = [each for path in paths for each in cubins.code(path.read_bytes())]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(its for _, its, _ in own))
        file.flush()
        command = [disassembler(), "--binary", "SM90a", "-hex", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = re.findall(
        r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+ )?\s*([^;]*?)\s*;\s+/\*.*\n\s*/\* 0x([0-9a-f]{16}) \*/", done.stdout
    )
    found: dict[str, list[Instruction]] = {}
    start = 0
    for name, its, _ in own:
        assert name not in found, f"two cubins have {name}"
        found[name] = []
        for at, predicate, text, high in lines[start // 16 : (start + len(its)) // 16]:
            sets, waits = int(high, 16) >> 46 & 7, int(high, 16) >> 52 & 63
            if text.startswith(JUMPS):  # to an address of the whole
                text = re.sub("0x[0-9a-f]+$", lambda to: hex(int(to[0], 16) - start), text)  # noqa: B023
            found[name].append(Instruction(int(at, 16) - start, predicate.strip(), text, sets, waits))
        assert [i.address for i in found[name]] == list(range(0, len(its), 16)), name
        start += len(its)
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
