"""Measured ceilings of a device, as a dated artefact: profiles/<device>/ceilings/<run>/ceilings.jsonl.

A datasheet says what nothing can exceed; a ceiling says what a program that does one thing well reached on this card,
on that day. It depends on how it is taken (a copy captured in a graph is a memcpy node and much slower than the copy
kernel), so each one is named for its method and both are kept. A row that is faster than the highest ceiling ever
measured on its device by more than 3 % is suspect, whatever made it so.

Products reach the power cap, and what they draw depends on their operands: random ones toggle more bits than codes of
few significant bits do. What is possible must not depend on that, so products are taken three ways: on random data
back to back (these are the ceilings that shares are shown of), the same rested, and rested on zeros, which toggle
nothing ("quiet"). A row is suspect only when it beats the fastest of the three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput
from lab.row import store

# Bytes of what a kernel reads, changes and writes where it lies; its rate depends on how much of it there is.
UPDATE_MIB = (3, 12, 24, 48, 96, 192, 384, 768)
_UPDATE = "{} MiB of float32 negated where they lie, read plus write, in a CUDA graph over distinct stretches of 2 GiB"

PRODUCTS: Mapping[str, tuple[str, str]] = {
    "bf16": ("TFLOP/s", "bf16 products on {}, best of four shapes"),
    "fp8": ("TFLOP/s", "e4m3 products with float32 scales and fast accumulation on {}, best of three shapes"),
    "int8": ("TOP/s", "int8 products on {}, best of three shapes"),
}
REST = 4.0  # a rested product idles so many times its own duration before the next one
_RESTED = f"each followed by {REST:g} times its duration of idleness, as rows with rest are taken"
_PLAIN, _QUIET = "random data", "zeros, operands that toggle no bit and so draw least"
NAMES: Mapping[str, tuple[str, str]] = {
    # name -> (unit, method)
    "copy_kernel": ("GB/s", "device copy of 4 GiB by the framework's copy kernel, read plus write"),
    "copy_graph": ("GB/s", "the same copy captured in a CUDA graph, a memcpy node, read plus write"),
    "read": ("GB/s", "4 GiB of float32 read and summed, best of four launch shapes"),
    "write": ("GB/s", "4 GiB filled"),
    **{f"update_{mib}_mib": ("GB/s", _UPDATE.format(mib) + ", best of four launch shapes") for mib in UPDATE_MIB},
    "l2_read": ("GB/s", "a 16 MiB buffer read over and over past the L1"),
    **{pipe: (unit, method.format(_PLAIN)) for pipe, (unit, method) in PRODUCTS.items()},
    **{f"{p}_rested": (unit, f"{method.format(_PLAIN)}, {_RESTED}") for p, (unit, method) in PRODUCTS.items()},
    **{f"{p}_quiet": (unit, f"{method.format(_QUIET)}, {_RESTED}") for p, (unit, method) in PRODUCTS.items()},
    "launch": ("us", "an empty kernel launched eagerly, back to back"),
    "graph_gap": ("us", "an empty kernel as one of hundreds of nodes of a graph, less its own duration by Kineto"),
}
FOR_L2: Mapping[str, tuple[str, ...]] = {"cold": ("read", "write", "copy_kernel"), "warm": ("l2_read",)}
POSSIBLE = ("", "_rested", "_quiet")  # what a pipe's ceilings end in that together say which speed is possible
TOLERANCE = 1.03
FILE = "ceilings.jsonl"
NEEDED = ("schema", "device", "name", "value", "unit", "method", "run", "started", "samples")


@dataclass(frozen=True)
class Ceiling:
    """The highest value (for times: the lowest) measured for one name on one device, and the run it is from."""

    name: str
    value: float
    unit: str
    method: str
    run: str


def validated(row: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """The row with its schema version; raises BadInput naming the key that is missing or wrong."""
    full = {"schema": store.SCHEMA, **row}
    for key in NEEDED:
        if key not in full:
            raise BadInput(where, f'ceiling lacks "{key}"', "measure the ceilings again")
    if full["name"] not in NAMES or full["unit"] != NAMES[full["name"]][0]:
        raise BadInput(where, f'ceiling "{full["name"]}" in {full["unit"]}', "valid: " + ", ".join(NAMES))
    if not isinstance(full["value"], int | float) or not full["value"] > 0:
        raise BadInput(where, f"{full['name']} = {full['value']!r}", "a ceiling is positive")
    return full


def latest(device_id: str) -> dict[str, Ceiling]:
    """The best value over all runs of each ceiling of a device; empty when none was measured."""
    best: dict[str, Ceiling] = {}
    for path in sorted((store.FOLDER / device_id / "ceilings").glob(f"*/{FILE}")):
        for row in store.read(path, validated):
            found = Ceiling(row["name"], row["value"], row["unit"], row["method"], row["run"])
            known = best.get(found.name)
            better = known is None or (found.value < known.value) == (found.unit == "us")
            best[found.name] = found if known is None or better else known
    return best


def floor_us(
    device_id: str, flops: float, bytes_moved: float, pipe: str, l2: str = "cold", ways: tuple[str, ...] = ("",)
) -> float | None:
    """Time that the work takes at the measured ceilings, us; None when a ceiling it needs was not measured.

    The memory term of a cold row stands on the best of read, write and copy; of a warm one on the L2 read. ways: the
    endings of the pipe's ceilings, the fastest of which counts; POSSIBLE for whether a time can be true.
    """
    known = latest(device_id)
    memory = [known[n].value for n in FOR_L2[l2] if n in known]
    rates = [known[n].value for n in (pipe + way for way in ways) if n in known]
    if not memory or not rates:
        return None
    return max(bytes_moved / max(memory) * 1e-3, flops / max(rates) * 1e-6)


def floor_of(row: Mapping[str, Any]) -> float | None:
    """`floor_us` of a measured row, for its share: products on random data, rested too where the row's arms rested."""
    return _floor_of(row, ("", "_rested") if row.get("rest") else ("",))


def _floor_of(row: Mapping[str, Any], ways: tuple[str, ...]) -> float | None:
    return floor_us(row["device"], row["flops"], row["bytes"], row["pipe"], row.get("l2", "cold"), ways)


def suspect(row: Mapping[str, Any]) -> str:
    """ "" or one sentence: the row beats the fastest measured ceilings of its device by more than 3 %."""
    if row.get("median_us") is None or row.get("bytes") is None:
        return ""
    floor = _floor_of(row, POSSIBLE)
    if floor is None or row["median_us"] * TOLERANCE >= floor:
        return ""
    return f"{row['median_us']:.2f} us beats the measured ceilings, which allow {floor:.2f} us"
