"""The arena as a page: each adversary, where it is known from, what has to catch it, and what became of it.

In: data/arena.toml and data/arena.jsonl, the rows that `python -m tests.bench.arena.run --out data/arena.jsonl` wrote.
Out: Markdown, which lab/write/docs/arena.md holds a place for.
"""

from __future__ import annotations

import tomllib
from typing import Literal

import msgspec

from lab.base import files
from lab.base.errors import REPOSITORY

TABLE = REPOSITORY / "data/arena.toml"
ROWS = REPOSITORY / "data/arena.jsonl"
PLACE = "{arena}"
NOT_RUN = "GPU: not run yet. What holds there has been read and not shown, and its column is empty.\n"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adversary on one device. ratio: its time over the honest control's, None without a number."""

    name: str
    device: Literal["cpu", "cuda"]
    status: str
    message: str
    ratio: float | None
    gets: Literal["no number", "its honest time", "a false number"]
    seconds: float
    gpu: str
    driver: str | None
    torch: str
    commit: str


def rows() -> list[Row]:
    """The committed rows; raises BadInput for a line that is no row."""
    return files.read_lines(ROWS, Row, "write it with `python -m tests.bench.arena.run --out`")


def markdown() -> str:
    """A sentence for each device, and the table."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    found = {(r.name, r.device): r for r in rows()}
    lines = []
    for device in sorted({r.device for r in found.values()}):
        of = [r for r in found.values() if r.device == device and r.name in {a["name"] for a in table["adversary"]}]
        where = ", ".join(sorted({r.gpu or "simulated device" for r in of}))
        false = sum(r.gets == "a false number" for r in of)
        lines.append(f"{where}: {len(of)} adversaries at commit {of[0].commit}, {false} get a false number.\n")
    lines += [] if any(device == "cuda" for _, device in found) else [NOT_RUN]
    lines += ["| adversary | known from | caught by | simulated device | GPU |", "|---|---|---|---|---|"]
    for a in table["adversary"]:
        told = [_told(found.get((a["name"], device))) for device in ("cpu", "cuda")]
        cells = (f"`{a['name']}` {a['does']}", a["known_from"], table["defences"][a["caught_by"]], *told)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def _told(row: Row | None) -> str:
    return "" if row is None else f"{row.gets} ({row.status})"
