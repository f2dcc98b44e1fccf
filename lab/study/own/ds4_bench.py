"""ds4-bench's CSV: prefill and generation at each frontier of a growing context, whatever columns the build printed.

One line a frontier: ctx_tokens, prefill_tokens (the increment prefilled since the last frontier, not the whole
context), prefill_tps, gen_tokens, gen_tps and kvcache_bytes are in every build. Newer ones add the rate without the
first token, which carries set-up work: `gen_steady_tps` (with gen_first_ms and gen_steady_tokens) or, in another
branch, `gen_tps_ss` (with first_token_sec). The steady rate is preferred, the note says which column was read, and
arms that differ in it are of different shapes.

The unit is in the column's name (tps), and the file has no time of its own to confirm it except the first token's:
where both rates are there, the total one is computed again from them. Given up: the CSV names neither device, model
nor build, and one run has one value a frontier; several runs in one file are its repetitions.
"""

from __future__ import annotations

import csv
from pathlib import Path

from lab.base.errors import BadInput, shown
from lab.study.own.sample import CUT_OFF, Imported, Sample, count, disagrees, number

TOOL = "ds4-bench"
UNIT = "tok/s"
ALWAYS = ("ctx_tokens", "prefill_tokens", "prefill_tps", "gen_tokens", "gen_tps")
STEADY = ("gen_steady_tps", "gen_tps_ss")
FIRST = {"gen_first_ms": 1e-3, "first_token_sec": 1.0}
OTHER = ("gen_steady_tokens", "kvcache_bytes")
# Rates are printed to 0.01 and the first token to 0.1 ms; over 16 tokens and more that is well under a per cent.
TOLERANCE = 0.02


def is_header(line: str) -> bool:
    """Whether a line is the header of its CSV."""
    cells = line.strip().split(",")
    return "ctx_tokens" in cells and any(c in cells for c in ("prefill_tps", "gen_tps", *STEADY))


def read(path: Path, text: str) -> Imported:
    """The frontiers of one file; raises BadInput for a missing column, a cut line and a value that is no number."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if is_header(line))
    header = [cell.strip() for cell in lines[start].split(",")]
    for column in ALWAYS:
        if column not in header:
            what = f'has no column "{column}"'
            raise BadInput(f"{shown(path)} line {start + 1}", what, "give the CSV as ds4-bench wrote it")
    steady = next((c for c in STEADY if c in header), "")
    first = next((c for c in FIRST if c in header), "")
    unknown = [c for c in header if c not in (*ALWAYS, *STEADY, *FIRST, *OTHER)]
    samples: list[Sample] = []
    for n, line in enumerate(lines[start + 1 :], start=start + 2):
        if not line.strip() or is_header(line):
            continue
        where = f"{shown(path)} line {n}"
        (cells,) = csv.reader([line])
        if len(cells) != len(header):
            raise BadInput(where, f"has {len(cells)} of {len(header)} columns", CUT_OFF)
        row = dict(zip(header, cells, strict=True))
        samples += _row(path, n, where, row, steady, first)
    read_from = steady or "gen_tps"
    without = "" if steady else ", the total rate: this build printed no steady one"
    notes = [f"{path.name}: generation read from {read_from}{without}"]
    if unknown:
        notes.append(f"{path.name}: columns not read: {', '.join(unknown)}")
    return Imported(path, TOOL, tuple(samples), tuple(notes))


def _row(path: Path, n: int, where: str, row: dict[str, str], steady: str, first: str) -> list[Sample]:
    context, step, generated = (count(row[c], where, c) for c in ("ctx_tokens", "prefill_tokens", "gen_tokens"))
    axes = {"ctx": context, "npl": 1}
    samples = []
    if step:
        speed = number(row["prefill_tps"], where, "prefill_tps")
        samples.append(Sample(TOOL, path, n, "prefill_tps", UNIT, (speed,), {**axes, "npp": step}))
    if generated:
        total = number(row["gen_tps"], where, "gen_tps")
        speed = number(row[steady], where, steady) if steady else total
        wrong = _contradiction(where, generated, total, speed, row[first], first) if steady and first else ""
        # The kind of rate is part of the shape: arms that differ in it have nothing in common to compare.
        own = {**axes, "ntg": generated, "rate": "steady" if steady else "total"}
        samples.append(Sample(TOOL, path, n, "decode_tps", UNIT, (speed,), own, wrong=wrong))
    return samples


def _contradiction(where: str, generated: int, total: float, steady: float, word: str, first: str) -> str:
    """The total rate is all tokens over the first token's time plus the rest at the steady rate."""
    seconds = number(word, where, first) * FIRST[first] + (generated - 1) / steady
    if not disagrees(total, generated / seconds, TOLERANCE):
        return ""
    return f"{where}: gen_tps {total:.6g} is not the {generated / seconds:.6g} tok/s that its steady rate implies"
