"""What every importer returns: one figure of somebody else's tool, with its unit, where it stands and how it was made.

A figure keeps the unit that the file states. It is never converted and never assumed: a table's unit is read from its
header, and where a format has no unit (JSON keys) the figure is computed again from the time beside it, which only the
right unit survives. A figure whose unit nothing confirms has unit "" and is missing evidence to the judge; one that
contradicts its own time carries the sentence in `wrong` and makes the verdict INVALID.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput

ANSI = re.compile(r"\x1b\[[0-9;]*m")
NOT_A_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:nan|inf(?:inity)?)(?![\w.])", re.IGNORECASE)
CUT_OFF = "the file is cut off: finish or repeat that run, or remove the line"


@dataclass(frozen=True)
class Sample:
    """One figure, or one operator test without a time.

    tool, file, line: where it stands.
    metric:   decode_tps, prefill_tps or kernel_us.
    unit:     as the file states it, "" when nothing confirms it.
    values:   one number per repetition, in `unit`; empty when `status` is not "ok".
    axes:     the shape (test, npp, ntg, npl, depth; or op and its parameters).
    settings: how the tool was configured; made: build, model and hardware.
    status:   "ok" (timed), "passed" (correct, not timed), "incorrect" or "unsupported".
    flop_s:   floating-point operations per second that the tool computed, 0 where it computed none.
    wrong:    why the figure cannot be what it says, "" when it can.
    when:     ISO time of the test, "" when the file has none.
    """

    tool: str
    file: Path
    line: int
    metric: str
    unit: str
    values: tuple[float, ...] = ()
    axes: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)
    status: str = "ok"
    flop_s: float = 0.0
    wrong: str = ""
    when: str = ""

    @property
    def id(self) -> str:
        """Where the figure stands: file name and line."""
        return f"{self.file.name}:{self.line}"

    @property
    def fields(self) -> dict[str, str]:
        """Everything that `--arm` and `--map` can select by, as text."""
        own = {"tool": self.tool, "file": self.file.name}
        return {k: str(v) for k, v in {**self.made, **self.settings, **self.axes, **own}.items()}


@dataclass(frozen=True)
class Imported:
    """One file: its figures, and in words what was left out or could not be confirmed."""

    path: Path
    tool: str
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()


def number(word: Any, where: str, what: str, *, zero: bool = False) -> float:
    """A finite number above zero (zero itself with `zero`); raises BadInput naming the file, the line and the key."""
    try:
        value = math.nan if isinstance(word, bool) else float(word)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise BadInput(where, f"{what} = {word!r:.40} is no figure", "that test failed: repeat it or remove the line")
    return value


def count(word: Any, where: str, what: str) -> int:
    """A whole number from zero up; raises BadInput naming the file, the line and the key."""
    value = number(word, where, what, zero=True)
    if value != int(value):
        raise BadInput(where, f"{what} = {word!r} is no whole number", "repeat that run or remove the line")
    return int(value)


def plain(value: Any) -> Any:
    """A JSON value as it is compared: booleans are 0 and 1, as other versions of the same tool print them."""
    return int(value) if isinstance(value, bool) else value


def base_name(path: str) -> str:
    """The last part of a path of either kind; the rest says where somebody keeps files and nothing about the figure."""
    return re.split(r"[/\\]", path)[-1]


def disagrees(stated: float, implied: float, tolerance: float) -> bool:
    """Whether a figure is further from what its own time implies than rounding explains."""
    return abs(stated - implied) > tolerance * implied


LOG_BUILD = re.compile(r"^(?:\S+: )?build\s*[:=]\s*(\d+) \(([0-9a-f]{6,})\)")
LOG_GPU = re.compile(r"^\s*Device (\d+): (.+?), compute capability")
LOG_MODEL = re.compile(r"loaded meta data .* from (\S+\.gguf)")


def from_log(line: str, made: dict[str, Any]) -> None:
    """Take build, GPU and model from a line of llama.cpp's log, where the user kept it beside the figures."""
    if found := LOG_BUILD.search(line):
        made["build_number"], made["build_commit"] = int(found[1]), found[2]
    elif found := LOG_GPU.search(line):
        known = made.get("gpu_info", "") if found[1] != "0" else ""
        made["gpu_info"] = f"{known}, {found[2]}" if known else found[2]
    elif found := LOG_MODEL.search(line):
        made["model_filename"] = base_name(found[1])
