"""Which block of the one-launch prefill (fused.cu) prepares or scans what: two tables, made on the host.

Scans with half a head per CTA take a multiprocessor each, so where all of them fit, some multiprocessors are left.
Blocks there only prepare, until everything is. The others prepare first: so much that the scans, which then take their
place, do not use up what is prepared faster than the rest of it comes. Units go out in the order of their chunks,
longest sequence first among equals, each to the team that is free first; a team is a warpgroup of a preparing block.

A preparing block waits for nobody and stands before every scan, so the tables cannot stall however few blocks run at
once (`Order.checked` says so of any tables). Given up: scans among more blocks than multiprocessors, where two launches
are as fast: a scan that waits holds a multiprocessor that could prepare.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

CHUNK = 64
TEAMS = 3  # TEAMS in prepare.cuh
# A team prepares a unit in about the time that a scan takes for this many chunks. It sets how much is prepared ahead.
CHUNKS_A_UNIT = 9
Row = tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """blocks: rows of eight, {0, first unit, units, ...} or {1, sequence, v head, first column, first token, tokens,
    first chunk, 0}; units: rows of {first token, tokens, chunk, k head}, all 0 where a team has none in its turn.
    preparing: blocks that prepare to the end. ahead: units a team of the others, `teams` of them, prepares at most.
    """

    blocks: tuple[Row, ...]
    units: tuple[Row, ...]
    preparing: int
    ahead: int
    teams: int

    def __str__(self) -> str:
        return f"{self.preparing} blocks prepare, {self.ahead} x {self.teams} units before a scan"

    @property
    def scans(self) -> int:
        """How many blocks scan."""
        return sum(row[0] for row in self.blocks)

    def checked(self, bounds: list[int], heads_k: int, heads_v: int) -> Order:
        """Itself. Raises ValueError unless every unit and scan is there once, each scan behind all that it needs."""
        seen: set[Row] = set()
        scans: set[Row] = set()
        for kind, *row in self.blocks:
            if kind == 0:
                mine = [unit for unit in self.units[row[0] : row[0] + row[1]] if unit[1]]
                if len(seen | {*mine}) != len(seen) + len(mine):
                    raise ValueError(f"units {mine} are prepared twice")
                seen.update(mine)
                continue
            _, head, _, first, tokens, chunk0, _ = row
            needed = {
                (at, min(CHUNK, first + tokens - at), chunk0 + i, head * heads_k // heads_v)
                for i, at in enumerate(range(first, first + tokens, CHUNK))
            }
            if not needed <= seen:
                raise ValueError(f"the scan {row} stands before the preparation of {sorted(needed - seen)}")
            scans.add(tuple(row[:3]))
        chunks = sum(-(-(last - first) // CHUNK) for first, last in pairwise(bounds))
        if (len(seen), len(scans), self.scans) != (chunks * heads_k, *[2 * (len(bounds) - 1) * heads_v] * 2):
            raise ValueError(f"{len(seen)} units and {len(scans)} scans of {chunks} chunks, {heads_k}, {heads_v} heads")
        return self


def shares(units: int, longest: int, others: int, multiprocessors: int) -> tuple[int, int, int]:
    """(teams, ahead, preparing) of `Order`, of so many units and scans, the longest of so many chunks."""
    preparing = multiprocessors - others
    # Each of the others, once: what the blocks that prepare to the end do not manage while the longest scan runs.
    late = max(1, units - preparing * TEAMS * longest // CHUNKS_A_UNIT)
    a_block = -(-late // others)
    teams = min(TEAMS, a_block)
    return teams, -(-a_block // teams), preparing


def make(bounds: list[int], heads_k: int, heads_v: int, multiprocessors: int) -> Order:
    """The tables of one launch over sequences [bounds[i], bounds[i + 1]), D = 128.

    Raises ValueError when the scans leave no multiprocessor to prepare on.
    """
    others = 2 * (len(bounds) - 1) * heads_v
    preparing = multiprocessors - others
    if preparing < 1:
        raise ValueError(f"{others} scans leave none of {multiprocessors} multiprocessors: use the two launches")
    found, chunk0 = [], 0
    for n, (first, last) in enumerate(pairwise(bounds)):
        found.append((n, first, last - first, chunk0))
        chunk0 += -(-(last - first) // CHUNK)
    found.sort(key=lambda sequence: -sequence[2])
    longest = -(-found[0][2] // CHUNK)
    units = [
        (first + i * CHUNK, min(CHUNK, tokens - i * CHUNK), chunk + i, head)
        for i in range(longest)
        for _, first, tokens, chunk in found
        if i * CHUNK < tokens
        for head in range(heads_k)
    ]
    teams, ahead, _ = shares(len(units), longest, others, multiprocessors)

    # Who is free first; the first chunks go to those who are through with them at once.
    slots = [(team, block < preparing, block) for team in range(TEAMS) for block in range(multiprocessors)]
    free = [(0, *slot) for slot in sorted(slots) if slot[1] or slot[0] < teams]
    mine: dict[tuple[int, int], list[Row]] = {}
    for unit in units:
        rounds, team, stays, block = heapq.heappop(free)
        mine.setdefault((block, team), []).append(unit)
        if stays or rounds + 1 < ahead:
            heapq.heappush(free, (rounds + 1, team, stays, block))

    blocks: list[Row] = []
    listed: list[Row] = []
    for block in range(multiprocessors):
        own = [mine.get((block, team), []) for team in range(TEAMS)]
        if not own[0]:
            continue
        rows = [row[i] if i < len(row) else (0, 0, 0, 0) for i in range(len(own[0])) for row in own]
        blocks.append((0, len(listed), len(rows), 0, 0, 0, 0, 0))
        listed += rows
    blocks += [
        (1, n, head, column, first, tokens, chunk, 0)
        for n, first, tokens, chunk in found
        for head in range(heads_v)
        for column in (0, 64)
    ]
    return Order(tuple(blocks), tuple(listed), preparing, ahead, teams).checked(bounds, heads_k, heads_v)
