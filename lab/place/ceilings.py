"""Measured ceilings of a device, as a dated artefact: profiles/<device>/ceilings/<run>/ceilings.jsonl.

A datasheet says what nothing can exceed; a ceiling says what a microbenchmark reached on this card, on that day. It
depends on how it is taken (a copy captured in a graph is a memcpy node and much slower than the copy kernel), so each
one is named for its method and both are kept. A row that is faster than the highest ceiling ever measured on its device
by more than 3 % is suspect, whatever made it so.

A GEMM reaches the power cap, and its power depends on its operands: random ones toggle more bits than codes of few
significant bits do. What is possible must not depend on that, so GEMM ceilings are measured three ways: on random data
back to back (shares are of these), the same with idle time between them ("rested"), and rested on zeros, which toggle
no bit ("quiet"). A row is suspect only when it beats the fastest of the three.

A kernel that decodes its weights has a second roof, "issue": what products reach while the next weights are decoded.
It is drawn where it was measured and makes no row suspect, for another decode may take fewer instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from lab.row import store
from lab.row.records import ISSUE_TOKENS, Ceiling, Measurement

FOR_L2: Mapping[str, tuple[str, ...]] = {"cold": ("read", "write", "copy_kernel"), "warm": ("l2_read",)}
POSSIBLE = ("", "_rested", "_quiet")  # what a pipe's ceilings end in that together say which speed is possible
TOLERANCE = 1.03


def latest(device_id: str) -> dict[str, Ceiling]:
    """The best value over all runs of each ceiling of a device (for times the least); empty when none was measured."""
    best: dict[str, Ceiling] = {}
    for found in chain.from_iterable(store.kept(Ceiling, device_id, "ceilings")):
        known = best.get(found.name)
        if known is None or (found.value < known.value) == (found.unit == "us"):
            best[found.name] = found
    return best


def issue_roof(device_id: str) -> tuple[tuple[float, float], ...]:
    """(operations a byte of weights, TFLOP/s) of products beside NVFP4 decode, by tokens; () where none was measured.

    A weight of 4.5 bits is decoded once for n tokens: 2 n operations for 9/16 of a byte.
    """
    known = latest(device_id)
    rates = {n: known[f"issue_{way}_{n}_beside"].value for way, counts in ISSUE_TOKENS.items() for n in counts
             if f"issue_{way}_{n}_beside" in known}  # fmt: skip
    return tuple((2 * n / (9 / 16), rate) for n, rate in sorted(rates.items()))


def floor_us(
    device_id: str, flops: float, bytes_moved: float, pipe: str, l2: str = "cold", ways: tuple[str, ...] = ("",)
) -> float | None:
    """Time that the work takes at the measured ceilings, us; None when a ceiling it needs was not measured.

    Memory term: the best of read, write and copy for a cold row, the L2 read for a warm one. ways: the suffixes of the
    pipe's ceilings, the fastest of which counts; POSSIBLE for whether a time can be true.
    """
    known = latest(device_id)
    memory = [known[n].value for n in FOR_L2[l2] if n in known]
    rates = [known[n].value for n in (pipe + way for way in ways) if n in known]
    if not memory or not rates:
        return None
    return max(bytes_moved / max(memory) * 1e-3, flops / max(rates) * 1e-6)


def floor_of(row: Measurement, ways: tuple[str, ...] = ()) -> float | None:
    """`floor_us` of a measured row; by default for its share: GEMM on random data, rested too where its arms rested."""
    ways = ways or (("", "_rested") if row.rest else ("",))
    if row.metric != "kernel_us" or row.flops is None or row.bytes is None or row.pipe is None:
        return None
    return floor_us(row.device, row.flops, row.bytes, row.pipe, row.l2 or "cold", ways)


def suspect(row: Measurement) -> str:
    """ "" or one sentence: the row beats the fastest measured ceilings of its device by more than 3 %."""
    floor = None if row.median_us is None else floor_of(row, POSSIBLE)
    if floor is None or row.median_us is None or row.median_us * TOLERANCE >= floor:
        return ""
    return f"{row.median_us:.2f} us beats the measured ceilings, which allow {floor:.2f} us"
