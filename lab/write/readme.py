"""What `lab write --readme` makes: whose words the record has, the `front` pairs of data/flips.toml, and a figure.

The figure is our kernels beside the fastest rival of the same run, by the cards of data/rivals.toml.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

from lab import draw
from lab.base import devices
from lab.base.console import between
from lab.base.errors import REPOSITORY
from lab.card import phases
from lab.judge import verdicts
from lab.study import limits
from lab.study.flips import UNDECIDED, Flip
from lab.write import inserts, notes

FILE, FIGURE = REPOSITORY / "README.md", REPOSITORY / "data" / "rivals.svg"
MARKS = ("<!-- written by lab write --readme -->", "<!-- end -->")
PROJECTS = "LocalAI's paged llama.cpp, ds4, ik_llama.cpp, imp and lucebox"


def record() -> str:
    """Whose word the recorded outcomes have, and with how many of them our judge agrees, in two sentences."""
    found = verdicts.judge_recorded(phases.cards().values())
    own = [j for j in found if j.recorded and j.recorded.word]
    labels = [j for j in own if j.recorded and j.recorded.word_kind == "label"]
    return (
        f"{PROJECTS} published {len(found)} outcomes of such ideas, {len(own)} of them with a word of their own "
        f"({len(labels)} with a verdict word such as NO-GO, landed or PASS); the others say it in prose and are read "
        f"by us. Replayed from their figures under their own gates, our judge agrees with "
        f"{sum(bool(j.agrees_with_word) for j in own)} of those {len(own)} words and with "
        f"{sum(bool(j.agrees) for j in found)} of the {len(found)} readings."
    )


def whole_step(device: str = "h200") -> str:
    """A whole step of the 27B at one and eight sequences beside llama.cpp's, in a sentence; "" where one has no row."""
    every = {beside.workload: beside for beside in notes.beside_llama_cpp("step", device)}
    few = [every[at] for n in (1, 8) if (at := f"decode_q36-27b_npl{n}_ctx1024") in every]
    if len(few) < 2 or any(beside.ours is None for beside in few):
        return ""
    one, eight = few
    return (
        f"A whole step of Qwen3.6-27B in NVFP4 on an H200, all 64 layers: {one.ours_ms:.2f} ms for one sequence and "
        f"{eight.ours_ms:.2f} for eight; stock llama.cpp, in another run and with its host's work, "
        f"{one.theirs_ms:.1f} and {eight.theirs_ms:.1f} (`kernels/step/NOTES.md`)."
    )


def written(text: str, found: Sequence[Flip], elsewhere: Sequence[Flip] = ()) -> str:
    """The README's text with its table and its count of adversaries made again; raises BadInput without its marks.

    elsewhere: the same pairs on other devices, whose word and change stand behind the first's.
    """
    lines = [
        *textwrap.wrap(record(), 118),
        "",
        *textwrap.wrap(whole_step(), 118),
        "",
        "Asked again of our own kernels on an H200 and an H100:",
        "",
    ]
    lines += ["| row | question | recorded | measured kernels | their change | card |", "|---|---|---|---|---|---|"]
    for flip in (f for f in found if f.front):
        question = flip.question + (f" ({flip.asks_otherwise})" if flip.asks_otherwise else "")
        word = "" if flip.asks_otherwise else f"{flip.word_there} ({flip.there})"
        asked = [
            flip,
            *(f for f in elsewhere if (f.phase, f.card, f.workload) == (flip.phase, flip.card, flip.workload)),
        ]
        on: dict[str, list[str]] = {}
        for f in asked:
            on.setdefault(f.word_here, []).append(f.here)
        words = ", ".join(f"{word} ({', '.join(there)})" for word, there in on.items() if word)
        shown = [f for f in asked if f.measured_pct is not None and f.word_here not in ("", *UNDECIDED)]
        whose = len(shown) < sum(bool(f.word_here) for f in asked)
        change = ", ".join(f"{f.measured_pct:+.0f} %" + f" ({f.here})" * whose for f in shown)
        change += f" at `{flip.workload}`" if shown else ""
        if shown and flip.errors and max(flip.errors) > 2 * min(flip.errors):  # a price beside the time
            change += ", error {:.2g} % instead of {:.2g} %".format(*(100 * e for e in reversed(flip.errors)))
        lines.append(f"| {flip.row} | {question} | {word} | {words or 'not measured yet'} | {change} | `{flip.card}` |")
    text = re.sub(r"What \d+ adversaries", f"What {inserts.adversaries()} adversaries", text)
    return between(text, MARKS, lines, FILE)


def figure(device: str = "h200") -> str:
    """The figure of data/rivals.toml on a device, as SVG that tells its rows; BadInput where no row has a rival."""
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


def draw_figure(path: Path = FIGURE) -> None:
    """Draw it again. Raises OSError where the file cannot be written."""
    path.write_text(figure(), encoding="utf-8")
