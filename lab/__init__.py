"""Killgate's workbench: card -> check -> measure -> place -> trace -> judge -> write.

`from lab import phase, family, device, rows, trace, draw` is the small lab (lab/README.md): what a notebook needs.
Importing `lab` imports none of the rooms; a name is looked up in its room when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_OBJECTS = ("phase", "phases", "family", "device", "devices", "rows", "recorded", "value", "judgements")
_SHOWN = ("show", "text", "picture")
__all__ = ["__version__", *_OBJECTS, *_SHOWN, "draw", "instruments", "trace"]


def __getattr__(name: str) -> Any:
    if name in _OBJECTS:
        return getattr(importlib.import_module("lab.write.objects"), name)
    if name in _SHOWN:
        return getattr(importlib.import_module("lab.write.notebook"), name)
    if name == "instruments":
        return importlib.import_module("lab.write.instruments")
    if name in ("draw", "trace"):  # rooms; the second one can be called with a file
        return importlib.import_module(f"lab.{name}")
    raise AttributeError(f"module 'lab' has no attribute {name!r}")


def open_trace(file: Any) -> Any:
    """`trace(FILE)` of the small lab: a profile that shows itself."""
    return importlib.import_module("lab.write.objects").trace(file)
