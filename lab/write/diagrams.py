"""Drawings of mechanisms, the same wherever a notebook tells them: boxes for work and memory, arrows for what moves.

Nothing here is measured; numbers that a drawing shows are arguments.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from lab import draw
from lab.write.notebook import arrow, box, canvas

LINKS = [
    ("card", "question, gate", "card"),
    ("check", "vs reference", "check"),
    ("measure", "A B B A blocks", "bench"),
    ("place", "on the roofline", "place"),
    ("trace", "time by part", "trace"),
    ("judge", "gate to verdict", "judge"),
    ("write", "note, notebook", "write"),
]
ENDS = [
    (1, "INVALID", "wrong, or faster\nthan the device can"),
    (2, "BLOCKED", "evidence missing\nor unfinished"),
    (4, "VACUOUS", "candidate never\nengaged"),
    (5.5, "GO   NO-GO   NEUTRAL\nCONDITIONAL-GO   PARTIAL", "\nby the gate's conditions"),
]
WIDE, STEP = 12.2, 14.35


def chain() -> Figure:
    """The seven links of the chain, the rooms they are, and the words on which it may end early."""
    figure, axes = canvas(2.55, height=36)
    for place, (name, does, module) in enumerate(LINKS):
        x = 0.8 + place * STEP
        box(axes, x, 22, WIDE, 9, colour=draw.BLUE, fill=True)
        axes.text(x + WIDE / 2, 28.2, name, ha="center", va="center", fontsize=10, weight="bold", color=draw.INK)
        axes.text(x + WIDE / 2, 24.4, does, ha="center", va="center", fontsize=7.4, color=draw.INK)
        axes.text(x + WIDE / 2, 32.6, f"lab.{module}", ha="center", fontsize=7.6, color=draw.SOFT, family="monospace")
        if place:
            arrow(axes, (x - STEP + WIDE + 0.2, 26.5), (x - 0.2, 26.5))
    for at, word, why in ENDS:
        x = 0.8 + at * STEP + WIDE / 2
        start = x if at < 5 else 0.8 + 5 * STEP + WIDE / 2
        arrow(axes, (start, 21.6), (start, 14.6), colour=draw.VERMILLION if at < 5 else draw.INK)
        axes.text(x, 13.6, word, ha="center", va="top", fontsize=8.2, weight="bold", color=draw.INK, linespacing=1.3)
        axes.text(x, 10.2, why, ha="center", va="top", fontsize=7.4, color=draw.INK, linespacing=1.3)
    axes.text(0.8, 1, "Each link is a room of lab/; what flows through it is rows.", fontsize=7.6, color=draw.SOFT)
    return figure


def fused_or_split_scan() -> Figure:
    """A chunked scan as one kernel that keeps its state on chip, and as six with tensors in memory between them."""
    figure, axes = canvas(4.3, height=61)
    ink, soft, state, slow = draw.INK, draw.SOFT, draw.GREEN, draw.VERMILLION
    axes.text(1, 58.2, "fused_chunk: one kernel, the state S stays on chip", fontsize=10, color=ink)
    box(axes, 1, 40, 98, 15.5, colour=soft, linestyle=(0, (4, 3)), linewidth=0.9)
    axes.text(2, 47.5, "S in", color=state, va="center", fontsize=9)
    for i, name in enumerate(("chunk 1", "chunk 2", "chunk 3", "chunk N")):
        x = 15.0 + 23 * i
        box(axes, x, 43, 11, 9, name, draw.BLUE, fill=True)
        arrow(axes, (x - 12 if i else 7.5, 47.5), (x, 47.5), state, linewidth=2)
        axes.text(x - 6, 48.7, ("", "S", "S", "S ...")[i], color=state, ha="center", fontsize=9)
        arrow(axes, (x + 3, 36.5), (x + 3, 43), soft)
        arrow(axes, (x + 8, 43), (x + 8, 36.5), soft)
    box(axes, 1, 32, 98, 4.5, "memory: q, k, v, gates in;  o out", soft, fill=True)

    axes.text(1, 27.3, "split_pipeline: six kernels, tensors in memory between them", fontsize=10, color=ink)
    kernels = (("1 cumsum", "G"), ("2 kkt", "A"), ("3 inverse", "X"), ("4 w, u", "W, U"), ("5 scan", "h, V'"))
    for i, (name, tensor) in enumerate((*kernels, ("6 output", "o"))):
        x, scan = 1.0 + 16.6 * i, i == 4
        box(axes, x, 12.5, 13, 12, colour=draw.ORANGE if scan else draw.BLUE, fill=True)
        axes.text(x + 6.5, 22, name, ha="center", va="center", fontsize=9, color=ink)
        how = "chunk after\nchunk" if scan else "all chunks\nat once"
        axes.text(x + 6.5, 16.8, how, ha="center", va="center", fontsize=8, color=ink)
        arrow(axes, (x + 11, 12.5), (x + 11, 5.5), slow if scan else soft, linewidth=3 if scan else 1.2)
        axes.text(x + 10, 9, tensor, ha="right", va="center", fontsize=9, color=slow if scan else ink)
        last = i == 5
        arrow(axes, (x + 2, 5.5), (x + 2, 12.5), slow if last else soft, linewidth=3 if last else 1.2)
    words = "memory: every arrow is a tensor of all tokens; h is one D x D state per chunk"
    box(axes, 1, 1, 98, 4.5, words, soft, fill=True)
    return figure


def passes_over_the_state() -> Figure:
    """A decode step that gathers, updates and copies back its states, and one that updates them in place."""
    figure, axes = canvas(2.4, height=34)
    ink = draw.INK
    axes.text(1, 31, "gathered, updated, copied back: six passes", fontsize=10, color=ink)
    axes.text(66, 31, "by row id: two passes", fontsize=10, color=ink)
    for x in (1, 66):
        for i in range(5):
            box(axes, x, 4 + 4.6 * i, 10, 3.8, colour=draw.GREEN, fill=i in (1, 3))
        axes.text(x + 5, 1.2, "state pool", ha="center", va="center", fontsize=8.5, color=ink)
    for y, name, colour in ((21, "gather", draw.ORANGE), (12.5, "update", draw.BLUE), (4, "copy", draw.ORANGE)):
        box(axes, 19, y, 11, 6, name, colour, fill=True, size=8.5)
    box(axes, 40, 4, 13, 23, "states of\nthe batch,\nin order", draw.SOFT, fill=True, size=8.5)
    box(axes, 86, 11.5, 12, 8, "update", draw.BLUE, fill=True, size=8.5)
    axes.text(92, 21, "state_rows", ha="center", fontsize=8.5, color=ink)
    moves = [((11, 24), (19, 24)), ((30, 24), (40, 24)), ((40, 17), (30, 17)), ((30, 14), (40, 14))]
    moves += [((40, 7), (30, 7)), ((19, 7), (11, 7)), ((76, 17), (86, 17)), ((86, 14), (76, 14))]
    for i, (start, end) in enumerate(moves):
        arrow(axes, start, end, draw.VERMILLION)
        below = i in (3, 7)
        place = ((start[0] + end[0]) / 2, start[1] + (-0.8 if below else 0.8))
        axes.text(*place, str(i % 6 + 1), ha="center", va="top" if below else "bottom", fontsize=8.5, color=ink)
    return figure


def split_attention() -> Figure:
    """Attention over a paged cache, one sequence in two parts, and the merge."""
    figure, axes = canvas(3.5, height=50)
    ink, soft = draw.INK, draw.SOFT
    pages = (3, 0, 5, 2)
    axes.text(1, 46.5, "page table of one sequence", fontsize=9, color=ink)
    for i, page in enumerate(pages):
        box(axes, 1 + 8 * i, 39, 7, 5, str(page), draw.PURPLE, fill=True)
    axes.text(
        1, 4.2, "pool of pages (KV head h), 16 tokens each:\n16-bit, or 8-bit with scales", fontsize=8.5, color=ink
    )
    for i in range(6):
        colour = draw.GREEN if i in pages else soft
        box(axes, 1 + 6.4 * i, 13, 5.6, 9, f"K, V\n{i}", colour, fill=i in pages, size=8)
    for i, page in enumerate(pages):
        arrow(axes, (4.5 + 8 * i, 39), (3.8 + 6.4 * page, 22), draw.PURPLE, linewidth=0.9)
    names = ("part 0: pages 3, 0", "part 1: pages 5, 2")
    for i, name in enumerate(names):
        y = 30 - 22 * i
        box(axes, 47, y, 25, 13, colour=draw.BLUE, fill=True)
        axes.text(59.5, y + 10.3, name, ha="center", va="center", fontsize=8.5, color=ink)
        steps = "8 bit to 16 bit, then q K^T,\nonline softmax, p V"
        axes.text(59.5, y + 5, steps, ha="center", va="center", fontsize=8.5, color=ink)
        arrow(axes, (39.5, 18.5 - 2 * i), (47, y + 6), draw.VERMILLION, linewidth=2.4)
        arrow(axes, (72, y + 6.5), (84, 27 - 4 * i), soft)
        axes.text(78, y + 8.5 if i == 0 else y + 4, "m, l, acc", ha="center", va="center", fontsize=8.5, color=ink)
    axes.text(41.5, 31, "the\nbytes", ha="right", va="center", fontsize=8.5, color=draw.VERMILLION)
    box(axes, 84, 20, 14, 10, "merge", draw.ORANGE, fill=True)
    arrow(axes, (91, 20), (91, 13), soft)
    axes.text(91, 9, "o, all query heads\nof KV head h", ha="center", va="center", fontsize=8.5, color=ink)
    return figure


def walks_of_the_weights(M: int, N: int, K: int, weight_bytes: float, trap: int, collapsed: int) -> Figure:
    """M sequences through one projection: `trap` passes over the weights, or `collapsed` ones over a 2-D view."""
    panels = [
        (1, "3-D operand, dispatched on ne[1] = 1", draw.VERMILLION, f"[{K}, 1, {M}]", 2.6, trap, 15.2),
        (53, "2-D view, ne[1] = n_seqs", draw.BLUE, f"[{K}, {M}]", 1.75, collapsed, 11),
    ]
    figure, axes = canvas(3.3, height=47)
    axes.plot([50, 50], [2, 45], color="#dddddd", lw=1)
    for left, title, colour, operand, pitch, passes, edge in panels:
        axes.text(left + 1, 44.5, title, fontsize=9.5, weight="bold", color=draw.INK, va="center")
        axes.text(left + 1, 40, operand, fontsize=8.5, color=draw.INK)
        for i in range(5):  # columns of K values, one token of one sequence each
            box(axes, left + 1 + i * pitch, 14, 1.7, 24, colour=colour, fill=True)
        axes.text(left + 1, 11, f"... {M} columns of x", fontsize=8, color=draw.INK)
        box(axes, left + 30, 14, 15, 24, f"weights\n{N} x {K}\n{weight_bytes / 1e6:.1f} MB")
        for y in [36.5 - i * 5 for i in range(5)] if passes > 1 else [26]:
            arrow(axes, (left + edge, y), (left + 29.6, y), colour=colour, linewidth=1.2 if passes > 1 else 4)
        middle = (edge + 29.6) / 2 + left
        label, height = ("GEMV passes", 40) if passes > 1 else ("one GEMM", 29)
        axes.text(middle, height, label, ha="center", fontsize=8.5, color=draw.INK)
        walked = f"weights walked {passes} times" if passes > 1 else "weights walked once"
        axes.text(left + 1, 5.5, f"{walked}: {passes * weight_bytes / 1e6:,.1f} MB", fontsize=9, color=draw.INK)
        note = "from DRAM, or from L2 where they fit" if passes > 1 else "every column meets a tile once read"
        axes.text(left + 1, 1.6, note, fontsize=8, color=draw.SOFT)
    return figure
