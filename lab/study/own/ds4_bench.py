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

from lab.base.errors import BadInput
from lab.study.own.sample import Imported, Line, Sample, lines

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
    start, head = next((at, line) for at, line in lines(path, text) if is_header(line))
    header = [cell.strip() for cell in head.split(",")]
    for column in ALWAYS:
        if column not in header:
            raise BadInput(str(start), f'has no column "{column}"', "give the CSV as ds4-bench wrote it")
    steady = next((c for c in STEADY if c in header), "")
    first = next((c for c in FIRST if c in header), "") if steady else ""
    samples: list[Sample] = []
    for at, line in lines(path, text, start.number + 1):
        if line.strip() and not is_header(line):
            samples += _frontier(at, at.columns(header, next(csv.reader([line]))), steady, first)
    without = "" if steady else ", the total rate: this build printed no steady one"
    notes = [f"{path.name}: generation read from {steady or 'gen_tps'}{without}"]
    if unknown := [c for c in header if c not in (*ALWAYS, *STEADY, *FIRST, *OTHER)]:
        notes.append(f"{path.name}: columns not read: {', '.join(unknown)}")
    return Imported(path, TOOL, tuple(samples), tuple(notes))


def _frontier(at: Line, row: dict[str, str], steady: str, first: str) -> list[Sample]:
    context, step, generated = (at.count(row[c], c) for c in ("ctx_tokens", "prefill_tokens", "gen_tokens"))
    axes = {"ctx": context, "npl": 1}
    samples = []
    if step:
        speed = at.figure(row["prefill_tps"], "prefill_tps")
        samples.append(Sample(TOOL, at, "prefill_tps", UNIT, (speed,), {**axes, "npp": step}))
    if generated:
        total = at.figure(row["gen_tps"], "gen_tps")
        speed = at.figure(row[steady], steady) if steady else total
        wrong = ""
        if first:  # the total rate is all tokens over the first token's time plus the rest at the steady rate
            seconds = at.figure(row[first], first) * FIRST[first] + (generated - 1) / speed
            wrong = at.contradiction("gen_tps", total, generated / seconds, TOLERANCE, "its steady rate")
        # The kind of rate is part of the shape: arms that differ in it have nothing in common to compare.
        own = {**axes, "ntg": generated, "rate": "steady" if steady else "total"}
        samples.append(Sample(TOOL, at, "decode_tps", UNIT, (speed,), own, wrong=wrong))
    return samples
