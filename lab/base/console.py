"""JSON for programs, as every command with --json prints it."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """Print `value`; NaN and infinity, which are no JSON, as null. What JSON does not know goes through str."""
    print(json.dumps(_finite(value), indent=1, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def table(header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    """A plain-text table whose cells wrap at the given widths."""
    lines = []
    for row in [header, *rows]:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [(c[number] if number < len(c) else "").ljust(w) for c, w in zip(cells, widths, strict=True)]
            lines.append("  ".join(parts).rstrip())
        if row is header:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join(lines)
