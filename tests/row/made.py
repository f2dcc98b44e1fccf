"""Records for tests: a sound one, with what a test asks for changed and checked as a line of a file is."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.row.records import DERIVED, Counter, Earlier, Measurement

ROW: dict[str, Any] = {
    "device": "h200",
    "phase": "toy",
    "family": "gdn",
    "arm": "control",
    "name": "fused",
    "precision": "bf16",
    "workload_id": "t63",
    "workload": {"T": 63},
    "status": "ok",
    "run": "r1",
}


def measurement(**given: Any) -> Measurement:
    """A measured row, one of schema 1 where a summary is given; a key given as None is absent."""
    kind = Earlier if any(key in DERIVED for key in given) else Measurement
    return msgspec.convert({k: v for k, v in {**ROW, **given}.items() if v is not None}, kind)


def changed(row: Measurement, **given: Any) -> Measurement:
    """The same row with other values."""
    return measurement(**{**msgspec.structs.asdict(row), **given})


def counter(**given: Any) -> Counter:
    """A counter row."""
    return msgspec.convert({k: v for k, v in given.items() if v is not None}, Counter)
