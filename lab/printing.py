"""JSON for programs, as every command with --json prints it."""

from __future__ import annotations

import json
import math
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
