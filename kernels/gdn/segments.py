"""Prefill of long sequences on few heads, split along time: which tokens make a segment, and what is joined how.

Over any stretch of tokens the rule is affine in the state, S_out = A S_in + B: B is a scan from zero, and A a scan from
the identity of values that are all zero, without outputs. So segments of a sequence run side by side:

    maps     the first segment scans with its outputs, from the initial state; every other but the last gives A and B
    compose  S_{i+1} = A_i S_i + B_i, one segment after the other, as good as in float32
    scan     every segment but the first scans with its outputs from its own S; it may compose that itself

One v head and chunk takes 2 x 640 tensor clocks for each of A and B and 2 x 1,024 for a scan with outputs (D = 128,
chunks of 64): 2.25 times a scan's products, in a chain of two segments. NOTES.md has the predicted times, and what was
weighed against this form.

Precision (tests/kernels/gdn/test_gdn_segments.py): products of A as any scan's, 16-bit operands and float32 sums;
composing of operands in two bf16 parts each. In one part it would round the whole state once a segment, where a scan
rounds only what it guesses from.

A segment is whole chunks. A sequence of one segment is a scan as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

CHUNK = 64
# us on a Hopper GPU, of a chunk and of what comes once: tests/kernels/gdn/bench_segments.py prints them.
HALF_CHUNK, WHOLE_CHUNK, MAP_CHUNK = 1.19, 1.75, 1.2
L2_BYTES_US = 5.2e6  # from L2 in a us, all multiprocessors together
HALF_BYTES, WHOLE_BYTES = 59e3, 75e3  # of a chunk of half a head, of one: k, q, v, X, P, vectors and o
COMPOSE_US, LAUNCH_US = 2.35, 5.0  # of a segment; a launch, with the first chunk's latency
IN_SCAN_US, PIECE_BYTES = 0.5, 32768  # of a segment that a block of the scan composes; of A, and of 64 columns of B
ROW = 8  # numbers of a segment's row
Row = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """chunks: of a segment at most; groups: halves of a head per block in the last scan, 1 or 2; us: by the estimate
    above, without the preparation. segments: most of a sequence."""

    chunks: int
    groups: int
    us: float
    segments: int

    def __str__(self) -> str:
        return f"{self.segments} segments of up to {self.chunks} chunks, {self.groups} x 64 columns a block"


def chunks_of(bounds: list[int]) -> list[int]:
    """Chunks of each sequence."""
    return [-(-(last - first) // CHUNK) for first, last in pairwise(bounds)]


def make(bounds: list[int], heads_v: int, multiprocessors: int) -> Plan | None:
    """The split of sequences [bounds[i], bounds[i + 1]) that the estimate takes for shortest; None: one segment each.

    Blocks of maps and of the first segments take half a head (its columns of B, and as many of A, beside each other).
    """
    counts = chunks_of(bounds)

    def time(chunks: int, groups: int) -> float:
        pieces = [-(-n // chunks) for n in counts]
        mapped = 2 * heads_v * sum(max(1, p - 1) for p in pieces)
        scanned = 2 // groups * heads_v * sum(p - 1 for p in pieces)
        maps = -(-mapped // multiprocessors) * (chunks * MAP_CHUNK + LAUNCH_US)
        if not scanned:
            return maps * HALF_CHUNK / MAP_CHUNK
        busy, moved = min(scanned, multiprocessors), (HALF_BYTES, WHOLE_BYTES)[groups - 1]
        a_chunk = max((HALF_CHUNK, WHOLE_CHUNK)[groups - 1], busy * moved / L2_BYTES_US)
        scan = -(-scanned // multiprocessors) * (chunks * a_chunk + LAUNCH_US)
        return maps + LAUNCH_US + COMPOSE_US * (max(pieces) - 2) + scan

    longest = max(counts)
    found = [
        Plan(chunks, groups, time(chunks, groups), -(-longest // chunks))
        for chunks in sorted({-(-longest // pieces) for pieces in range(1, multiprocessors + 1)}, reverse=True)
        for groups in (1, 2)
    ]
    best = min(found, key=lambda plan: plan.us)
    return best if best.segments > 2 else None


def in_scan_us(plan: Plan, bounds: list[int], heads_v: int) -> float:
    """`plan.us` where no launch composes: every block of the scan does, one map after another, as fast as L2 gives them
    to all the blocks that still do."""
    behind = [-(-n // plan.chunks) - 1 for n in chunks_of(bounds)]  # segments that scan, the first of which finds its S
    blocks = (
        2 // plan.groups * heads_v * sum(max(0, n - step) for n in behind) for step in range(1, plan.segments - 1)
    )
    a_block = PIECE_BYTES * (1 + plan.groups)
    composing = sum(max(IN_SCAN_US, n * a_block / L2_BYTES_US) for n in blocks)
    return plan.us - LAUNCH_US - COMPOSE_US * (plan.segments - 2) + composing


def rows(bounds: list[int], chunks: int) -> list[Row]:
    """A row for each segment, sequence by sequence: first token, tokens, first chunk, sequence, its own number, whether
    it is its sequence's first, whether the last, 0. The segments of a sequence differ by a chunk at most."""
    found: list[Row] = []
    chunk0 = 0
    for sequence, ((first, last), count) in enumerate(zip(pairwise(bounds), chunks_of(bounds), strict=True)):
        pieces = -(-count // chunks)
        edges = [count * i // pieces for i in range(pieces + 1)]
        for i, (a, b) in enumerate(pairwise(edges)):
            tokens = min(first + b * CHUNK, last) - (first + a * CHUNK)
            found.append((first + a * CHUNK, tokens, chunk0 + a, sequence, len(found), i == 0, i == pieces - 1, 0))
        chunk0 += count
    return [tuple(map(int, row)) for row in found]
