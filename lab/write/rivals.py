"""The README's figure, which `lab write --readme` draws: our kernels beside the fastest rival of the same run."""

from __future__ import annotations

from html import escape
from pathlib import Path

from lab import draw
from lab.base import devices
from lab.base.errors import REPOSITORY
from lab.card import phases
from lab.study import limits

FILE = REPOSITORY / "data" / "rivals.svg"


def svg(device: str = "h200") -> str:
    """The figure of data/rivals.toml on a device, as SVG that describes itself by its rows, for readers and for tests.

    Raises BadInput where no card has rows with a rival.
    """
    drawn, said = [], []
    for line in limits.lines():
        points = [p for p in limits.limits(phases.card(line.card), device) if p.times_as_fast]
        names = ", ".join(sorted({p.rival.name for p in points if p.rival}))
        said += [f"{p.ours.id} {p.ours_us:.2f} us, {p.rival.name} {p.rival_us:.2f} us" for p in points if p.rival]
        drawn.append((line.title, names, [p.times_as_fast for p in points if p.times_as_fast]))
    name = devices.get(device).name
    picture = draw.svg(draw.rivals(drawn, f"{name}: our kernels beside the fastest rival"))
    head, tag, body = picture.partition("<svg")
    return head + tag + body.replace(">", "><desc>" + escape("\n".join(said)) + "</desc>", 1)


def write(path: Path = FILE) -> None:
    """Draw it again. Raises OSError where the file cannot be written."""
    path.write_text(svg(), encoding="utf-8")
