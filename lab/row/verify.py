"""`lab rows --verify`: whether profiles/ holds what was written, and what could have been measured.

Of every file: each line decodes and stands where it says that it was taken, and its hash follows from it and the line
before. Files from before there were hashes are "not chained": the SHA-256 of their lines stands in
profiles/unchained.sha256, so that an edit of one is seen all the same. Of every row: its summary follows from its
samples. Of every comparison: its arms were timed together on one GPU in one way, and one of them, against which they
were timed, was there twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.base import files
from lab.base.errors import BadInput, shown
from lab.row import samples, store
from lab.row.records import Ceiling, Counter, CrossCheck, Earlier, Kept, Measurement, Record

PINS = "unchained.sha256"
KINDS: dict[str, type[Record]] = {kind.FILE: kind for kind in (Measurement, Ceiling, Counter, CrossCheck, Kept)}
# What the arms of one comparison agree on; clocks are those around the whole comparison.
ALIKE: tuple[str, ...] = ("gpu", "gpu_id", "driver", "cuda", "torch", "triton", "commit", "stated_commit", "dirty")
ALIKE += ("seed", "timer", "l2", "rest", "wanted_timer", "wanted_l2", "order", "clocks", "timed_against")
ALIKE += ("placements", "processes", "shape")
ROUNDED_US = 3e-5  # how far a figure of schema 1 may lie from that of its samples, which were rounded to 1e-5
Tell = Callable[[str], None]
Rows = list[tuple[int, Measurement]]  # with the number of the line


@dataclass(frozen=True)
class Report:
    """What was found wrong, one line each, and what was looked at.

    unchained: files from before there were hashes; doubled: comparisons of schema 1 with an arm in them twice, whose
    block times are those of both and cannot be computed again.
    """

    wrong: tuple[str, ...]
    files: int
    rows: int
    unchained: int
    doubled: int

    def __str__(self) -> str:
        ends = f"{self.files} files, {self.rows} rows: {len(self.wrong) or 'nothing'} wrong; {self.unchained} files not"
        ends += f" chained, pinned in {PINS}; {self.doubled} comparisons with an arm twice"
        return "\n".join((*self.wrong, ends))


def verify(folder: Path | None = None) -> Report:
    """Walk every file of records under `folder`, default profiles/; raises BadInput where one cannot be read."""
    folder = folder or store.folder()
    pinned = {}
    if (path := folder / PINS).exists():
        pinned = {name: digest for digest, name in (line.split("  ", 1) for line in path.read_text().splitlines())}
    wrong: list[str] = []
    rows = unchained = doubled = 0
    paths = sorted((*folder.rglob("*.jsonl"), *folder.rglob("*.jsonl" + store.PACKED)))
    for path in paths:
        lines = files.read_packed(path, store.LARGEST).splitlines()
        rows += len(lines)
        name = path.relative_to(folder).as_posix().removesuffix(store.PACKED)

        def tell(number: int, what: str, path: Path = path) -> None:
            wrong.append(f"{shown(path)} line {number}: {what}")

        loose = _chain(lines, tell)
        pin = hashlib.sha256(b"".join(line + b"\n" for line in lines[:loose])).hexdigest() if loose else ""
        unchained += bool(loose)
        if pin != pinned.pop(name, ""):
            tell(loose or 1, f"the lines to here are not those that {PINS} pins")
        if kind := KINDS.get(Path(name).name):
            doubled += _records(path, lines, kind, tell)
    wrong += [f"{shown(folder / name)} line 1: is gone, and {PINS} pins it" for name in pinned]
    return Report(tuple(wrong), len(paths), rows, unchained, doubled)


def _chain(lines: list[bytes], tell: Callable[[int, str], None]) -> int:
    """How many lines have no hash, which can only be the first ones; tells of each that does not follow."""
    loose, before = 0, b""
    for number, line in enumerate(lines, start=1):
        text, found = store.parted(line)
        if not found and loose == number - 1:
            loose = number
        elif found != store.linked(before, text):
            tell(number, "its hash does not follow from it and the line before")
        before = line
    return loose


def _records(path: Path, lines: list[bytes], kind: type[Record], tell: Callable[[int, str], None]) -> int:
    """Look at the records of one file, and at the comparisons; returns how many of these hold an arm twice."""
    found: Rows = []
    for number, line in enumerate(lines, start=1):
        try:
            record: Any = store.decode(line, kind, f"line {number}")
        except BadInput as refused:
            tell(number, refused.what)
            continue
        device, phase, run = path.parts[-4:-1]
        stands = (device, phase if kind is Measurement else "", run)
        if (record.device, record.phase if kind is Measurement else "", record.run) != stands:
            tell(number, f"says that it is of {record.device}, run {record.run}")
        if isinstance(record, Measurement):
            found.append((number, record))
        elif isinstance(record, Ceiling):
            best = (min if record.unit == "us" else max)(record.samples)
            if abs(best - record.value) > 1e-4 + 1e-6 * best:
                tell(number, f"{record.name} is {record.value:g}, the best of its samples {best:g}")
    comparisons: dict[tuple[str, str], Rows] = {}
    for number, row in found:
        comparisons.setdefault((row.workload_id, row.started), []).append((number, row))
    _work(found, tell)
    return sum(_comparison(rows, tell) for rows in comparisons.values())


def _work(rows: Rows, tell: Callable[[int, str], None]) -> None:
    """Tell of rows of one commit whose work is another than that of an equal workload and precision."""
    known: dict[tuple[str, ...], tuple[Any, ...]] = {}
    for number, row in rows:
        key, work = (row.commit, row.family, row.workload_id, row.precision), (row.flops, row.bytes, row.pipe)
        if row.flops is not None and work != known.setdefault(key, work):
            tell(number, f"its work {work} is another than {known[key]} of the same workload and precision")


def _comparison(rows: Rows, tell: Callable[[int, str], None]) -> bool:
    """Look at the arms that were timed together; whether one of them is there twice."""
    timed = [(number, row) for number, row in rows if row.samples_us]
    names = [row.name for _, row in rows]
    double = len(set(names)) < len(names)
    for number, row in rows:
        if row.ok and not row.samples_us:
            tell(number, "is ok and has no samples")
    if not timed:
        return double
    first = timed[0][1]
    selves = [row for _, row in timed if row.again_blocks]
    own, again = (selves[0].blocks_us or (), selves[0].again_blocks_us or ()) if selves else ((), ())
    floor = samples.aa_floor_pct(own, again) if len(own) == len(again) else 0.0
    for number, row in timed:
        if other := [key for key in ALIKE if getattr(row, key) != getattr(first, key)]:
            tell(number, f"{', '.join(other)} differ from those of {first.name}, which it was timed with")
        if len(row.blocks_us or ()) != len(first.blocks_us or ()) or len(row.order or ()) != len(row.blocks_us or ()):
            tell(number, "has another number of blocks than its order or the arm that it was timed with")
        control = row.name == row.timed_against
        if control != bool(row.again_blocks) or (row.arm == "control") > control:
            tell(number, f"is the {row.arm}, timed against {row.timed_against}: one arm is there twice, the control")
        if isinstance(row, Earlier):
            _summary(number, row, double, tell)
            if row.aa_pct is None or not abs(row.aa_pct - floor) <= 600 * ROUNDED_US / min(own, default=1.0):
                tell(number, f"aa_pct is {row.aa_pct}, and {floor:g} by the control's blocks")
        elif double:
            tell(number, "its comparison has an arm twice")
    untimed = {row.name for _, row in rows if not row.samples_us}  # a wrong control has no number, nor its second self
    if len(selves) != 1 and (selves or first.timed_against not in untimed):
        tell(timed[0][0], f"{len(selves)} arms of its comparison have a second self, and one must")
    return double


def _summary(number: int, row: Earlier, double: bool, tell: Callable[[int, str], None]) -> None:
    if not row.blocks_us or not row.samples_us:
        return tell(number, "has no blocks")
    pairs = [(row.samples_us, row.blocks_us)]
    if row.again_samples_us and row.again_blocks_us:
        pairs.append((row.again_samples_us, row.again_blocks_us))
    for times, blocks in pairs:
        try:
            ours = samples.blocks(times, (1, len(blocks), len(times) // len(blocks)))[0]
        except ValueError as error:
            return tell(number, str(error))
        if not double and any(abs(a - b) > ROUNDED_US for a, b in zip(ours, blocks, strict=True)):
            tell(number, "its blocks are not those of its samples")
    pct = 600 * ROUNDED_US / min(row.samples_us)
    for key, value in samples.summary(row.samples_us, row.blocks_us)._asdict().items():
        stated = getattr(row, key)
        if stated is None or abs(stated - value) > (pct if key.endswith("_pct") else ROUNDED_US):
            tell(number, f"{key} is {stated}, and {value:g} by its samples")
