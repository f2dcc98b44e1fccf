"""`lab compile FAMILY`: what a family's kernels compile to on GPUs that are not here.

Every Triton build that a candidate declares and every CUDA C++ source of the family is compiled ahead of time for each
target; a row says registers, shared memory, spills, occupancy bound, the matrix instruction emitted, and whether a
block fits at all (GB10, sm_121, gives a block 99 KB). This is modelled evidence: it decides "does it fit" and "is the
native instruction there", never "is it fast".

Compilation happens in a child process per target (`lab.check.aot_worker`), with TRITON_INTERPRET removed from its
environment: a compiler that aborts costs one row and not this process, and tests that run kernels in Triton's
interpreter can still ask for a table. One child compiles one job after another; when it dies, the job it was at
becomes an `error` row with the signal and the compiler's message, and a new child continues after it. The children
share Triton's own cache, so a second table is quick.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections.abc import Iterable, Sequence

import msgspec

from lab.base.errors import BadInput
from lab.check.aot import NO_TRITON, AotRow, Plan, Refused, limits, one_line
from lab.check.child import Child

TARGETS = (80, 90, 100, 120, 121)
FAMILIES = "lab.check.families:load"
PROBE = "kernels.dot_scaled:probe"
JOB_LIMIT_S = 1800.0
WIDTH = 120


def compile_family(name: str, targets: Sequence[int] = TARGETS, provider: str = FAMILIES) -> list[AotRow]:
    """Rows of every build and CUDA kernel of a family, target by target.

    targets:  compute capabilities such as 90 or 121; one that data/aot_limits.toml does not hold raises BadInput.
    provider: "module:function" whose function(name) gives an object with `candidates`, `cuda_sources` and
              `unavailable` as `lab.check.families.Family` has them; the default looks in kernels/.
    """
    for target in targets:
        limits(target)
    return [row for target in targets for row in _compile_target(provider, name, target)]


def probe_rows(targets: Sequence[int] = (90, 100, 120, 121)) -> list[AotRow]:
    """What the installed Triton makes of `tl.dot_scaled` on two e2m1 operands (kernels/dot_scaled.py), live."""
    return compile_family("dot_scaled", targets, PROBE)


def _compile_target(provider: str, name: str, target: int) -> list[AotRow]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    rows: list[AotRow] = []
    plan: Plan | None = None
    at, compiler = 0, ""

    def failed(candidate: str, build: str, message: str, status: str = "error") -> AotRow:
        return AotRow(name, candidate, build, target, compiler, status, message)

    with tempfile.TemporaryFile("a+b") as errors:
        while plan is None or at < len(plan.jobs):
            child = Child("lab.check.aot_worker", provider, name, str(target), environment=environment, errors=errors)
            try:
                told = msgspec.json.decode(child.answer(JOB_LIMIT_S), type=Plan | Refused)
                if isinstance(told, Refused):
                    if told.where:
                        raise BadInput(told.where, told.what, told.remedy)
                    return [failed("(family)", "", told.what)]
                plan, compiler = told, f"triton {told.triton}" if told.triton else ""
                while at < len(plan.jobs):
                    child.ask(str(at).encode())
                    rows += msgspec.json.decode(child.answer(JOB_LIMIT_S), type=list[AotRow])
                    at += 1
            except (TimeoutError, EOFError, BrokenPipeError) as gone:
                slow = isinstance(gone, TimeoutError)
                death = f"no result within {JOB_LIMIT_S:.0f} s" if slow else f"compiler died of {child.death()}"
                errors.seek(0)
                words = errors.read().decode(errors="replace").strip()
                job = plan.jobs[at] if plan else ("(family)", "")
                rows.append(failed(*job, f"{death}: {one_line(words)}" if words else death))
                if plan is None:
                    return rows
                at += 1
            finally:
                child.stop()
    return rows if plan.triton else [*rows, failed("(triton)", "", NO_TRITON, "skipped")]


COLUMNS = ("target", "regs", "spill B", "smem B", "threads", "blk/SM", "limit", "matrix instruction", "fits")


def render(rows: Iterable[AotRow]) -> str:
    """The rows as a plain text table of at most 120 columns: a block per compiler and candidate, its builds below.

    regs and spill B are per thread, smem B and threads per block; blk/SM is the most blocks an SM can hold and limit
    what stops one more (regs, smem, tmem, threads, or the SM's number of blocks).
    """
    blocks: dict[tuple[str, str, str], list[AotRow]] = {}
    for row in rows:
        blocks.setdefault((row.family, row.candidate, row.compiler), []).append(row)
    out = []
    for (family, candidate, compiler), members in blocks.items():
        out.append(_clip(" ".join(word for word in (family, candidate, f"({compiler})" if compiler else "") if word)))
        compiled = [row for row in members if row.status == "ok"]
        widths = [max(map(len, column)) for column in zip(COLUMNS, *map(_cells, compiled), strict=True)]
        if compiled:
            out.append(_line(COLUMNS, widths))
        for build in dict.fromkeys(row.build for row in members):
            out += [_clip(f"  {build}")] if build else []
            said: set[str] = set()
            for row in (row for row in members if row.build == build):
                if row.status == "ok":
                    out.append(_line(_cells(row), widths))
                    out += [f"            does not fit: {_misfit(row)}"] if row.fits is False else []
                elif (text := f"    sm_{row.target:<4} {row.status}: {row.message}") not in said:
                    said.add(text)  # one source compiled for several shapes says why it cannot be only once a target
                    out += textwrap.wrap(text, WIDTH, subsequent_indent=" " * 12, drop_whitespace=True)
        out.append("")
    return "\n".join(out)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _clip("    " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _clip(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "~"


def _cells(row: AotRow) -> tuple[str, ...]:
    by = {"registers": "regs"}.get(row.limited_by, row.limited_by)
    figures = (row.registers, row.spill_bytes, row.shared_bytes, row.threads, row.blocks_per_sm, by, row.instruction)
    texts = ("-" if figure is None or figure == "" else str(figure) for figure in figures)
    return (f"sm_{row.target}", *texts, "yes" if row.fits else "NO")


def _misfit(row: AotRow) -> str:
    lim = limits(row.target)
    reason = {
        "smem": f"{row.shared_bytes} bytes of shared memory, a block may have {lim.shared_per_block_bytes}",
        "threads": f"{row.threads} threads, a block may have {lim.threads_per_block}",
        "registers": f"{row.threads} threads x {row.registers} registers, an SM has {lim.registers_per_sm}",
        "tmem": f"{row.tensor_columns} tensor memory columns, an SM has {lim.tensor_memory_columns}",
    }
    return reason[row.limited_by]


def parse_target(text: str) -> int:
    """121 from "121", "sm_121" or "12.1"; raises BadInput for anything else."""
    digits = text.strip().lower().removeprefix("sm_").replace(".", "")
    if not digits.isdecimal():
        raise BadInput("--targets", f'"{text}" is not a compute capability', "write 121, sm_121 or 12.1")
    return int(digits)
