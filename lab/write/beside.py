"""Kernels beside themselves on a GPU, as a table of the page "How often is a verdict wrong?".

In: data/aa.jsonl, which `python -m tests.bench.bench_aa --out data/aa.jsonl` writes. Out: Markdown.
"""

from __future__ import annotations

import msgspec

from lab.base import files
from lab.base.errors import REPOSITORY

ROWS = REPOSITORY / "data/aa.jsonl"
PLACE = "{beside}"
BANDS_US = (10.0, 50.0, 250.0, float("inf"))


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One comparison of a kernel with its second self. us: the control's time; *_pct: the change and its interval."""

    family: str
    workload: str
    candidate: str
    us: float
    change_pct: float
    low_pct: float
    high_pct: float
    word: str
    gpu: str
    driver: str
    torch: str
    commit: str


def rows() -> list[Row]:
    """The committed rows; raises BadInput for a line that is no row."""
    return files.read_lines(ROWS, Row, "write it with `python -m tests.bench.bench_aa --out`")


def markdown() -> str:
    """A line for each band of times: comparisons, false verdicts, intervals that hold zero, the widest of them."""
    every = rows()
    if not every:
        return "Not run on a GPU yet.\n"
    lines = [
        f"On {', '.join(sorted({row.gpu for row in every}))}:\n",
        "| a call takes | kernels | GO or NO-GO | intervals that hold zero | median half-width | widest |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    low = 0.0
    for high in BANDS_US:
        of = [row for row in every if low <= row.us < high]
        if of:
            called = sum(row.word in ("GO", "NO-GO") for row in of)
            held = sum(row.low_pct <= 0.0 <= row.high_pct for row in of)
            half = sorted((row.high_pct - row.low_pct) / 2 for row in of)
            said = f"{low:g} to {high:g} us" if high < float("inf") else f"{low:g} us and more"
            halves = f"{half[len(half) // 2]:.2f} % | {half[-1]:.2f} %"
            lines.append(f"| {said} | {len(of)} | {called} | {held} of {len(of)} | {halves} |")
        low = high
    return "\n".join(lines) + "\n"
