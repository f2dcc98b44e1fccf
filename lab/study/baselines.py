"""Baselines of `lab verify`: what is pinned, where its line lies, and what such a file must not hold.

A baseline is a JSON file of metrics, each with its unit, its direction and its line: a share below (or above) the
pinned value, or a plain gate. A baseline pinned on a good day has its line inside the range of healthy days, and then
it cries wolf: where the file states that range, or holds repeated runs, a line inside it is bad input, and the numbers
are said.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.base import vocabulary
from lab.base.errors import BadInput, nearest

SCHEMA = 1
KEYS = {"metric", "shape", "unit", "better", "value", "limit_pct", "gate", "healthy", "runs"}
FILE_KEYS = {"schema", "tool", "made", "provenance", "metrics"}


@dataclass(frozen=True)
class Pin:
    """One metric of a baseline.

    shape:     the workload as the tool names it ("tg128", "ctx2048 npp2048").
    unit, better: as in data/vocabulary.toml.
    value:     pinned, in `unit`.
    limit_pct: how far on the wrong side of `value` the line lies, None with a gate; gate: the line itself, else None.
    healthy:   lowest and highest of healthy runs, stated or from `runs`; None when unknown.
    """

    metric: str
    shape: str
    unit: str
    better: str
    value: float
    limit_pct: float | None = None
    gate: float | None = None
    healthy: tuple[float, float] | None = None
    runs: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Metric and shape."""
        return f"{self.metric} {self.shape}".strip()

    @property
    def line(self) -> float:
        """The value from which on a run passes, in `unit`."""
        if self.gate is not None:
            return self.gate
        sign = -1 if self.better == "higher" else 1
        return self.value * (1 + sign * (self.limit_pct or 0.0) / 100)

    def passes(self, value: float) -> bool:
        """Whether a figure is at the line or on its good side."""
        return value >= self.line if self.better == "higher" else value <= self.line


@dataclass(frozen=True)
class Baseline:
    """A stored baseline. made: model, GPU and build as the tool gave them; provenance: when, of which files."""

    tool: str
    made: Mapping[str, Any]
    provenance: Mapping[str, Any]
    pins: tuple[Pin, ...]


# Baselines ------------------------------------------------------------------------------------------------------------


def load(path: Path) -> Baseline:
    """A baseline file; raises BadInput naming the file, the metric and the numbers for anything it must not hold."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        raise BadInput(path, "no such file", "write one with `lab verify --write`") from None
    except (OSError, ValueError) as error:
        raise BadInput(path, f"is no baseline ({error})", "write it again with `lab verify --write`") from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA or not isinstance(raw.get("metrics"), list):
        raise BadInput(path, f"is no baseline of schema {SCHEMA}", "write one with `lab verify --write`")
    for key in raw:
        if key not in FILE_KEYS:
            raise BadInput(path, f'unknown key "{key}"', nearest(key, FILE_KEYS))
    pins = tuple(_pin(path, entry) for entry in raw["metrics"])
    if not pins:
        raise BadInput(path, "pins no metric", "write it again with `lab verify --write`")
    names = [p.name for p in pins]
    for name in sorted({n for n in names if names.count(n) > 1})[:1]:
        raise BadInput(path, f"pins {name} twice", "keep one")
    return Baseline(str(raw.get("tool", "")), raw.get("made", {}), raw.get("provenance", {}), pins)


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _pin(path: Path, entry: Any) -> Pin:
    if not isinstance(entry, dict):
        raise BadInput(path, f"metrics holds {entry!r:.40}", "each is an object")
    for key in entry:
        if key not in KEYS:
            raise BadInput(path, f'unknown key "{key}" of a metric', nearest(key, KEYS))
    for key in ("metric", "unit", "better", "value"):
        if entry.get(key) in (None, ""):
            raise BadInput(path, f'a metric has no "{key}" ({json.dumps(entry)[:60]})', "a figure needs all of them")
    runs = tuple(_number(path, "runs", n) for n in _list(path, "runs", entry.get("runs", [])))
    band = tuple(_number(path, "healthy", n) for n in _list(path, "healthy", entry.get("healthy", [])))
    if len(band) not in (0, 2):
        raise BadInput(path, f"healthy = {list(band)} is no range", "write [lowest, highest]")
    pin = Pin(
        metric=str(entry["metric"]),
        shape=str(entry.get("shape", "")),
        unit=str(entry["unit"]),
        better=str(entry["better"]),
        value=_number(path, "value", entry["value"]),
        limit_pct=_number(path, "limit_pct", entry["limit_pct"]) if "limit_pct" in entry else None,
        gate=_number(path, "gate", entry["gate"]) if "gate" in entry else None,
        healthy=(band[0], band[1]) if band else span(runs),
        runs=runs,
    )
    return checked(path, pin)


def _list(path: Path, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise BadInput(path, f"{key} = {value!r:.40} is no list", "write numbers in brackets")
    return value


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise BadInput(path, f"{key} = {value!r:.40} is no figure", "write a finite number above zero")
    return float(value)


def span(runs: Sequence[float]) -> tuple[float, float] | None:
    """Lowest and highest of repeated runs, None for a single one."""
    return (min(runs), max(runs)) if len(runs) > 1 else None


def checked(path: Path, pin: Pin) -> Pin:
    """The pin; raises BadInput for a wrong unit or direction, no line, and a line inside the healthy range."""
    known = vocabulary.metrics()
    if pin.metric not in known:
        raise BadInput(path, f'metric = "{pin.metric}" is unknown', nearest(pin.metric, known))
    metric = known[pin.metric]
    if vocabulary.unit(pin.unit) != metric.unit:
        raise BadInput(path, f"{pin.name} is in {pin.unit}", f"{pin.metric} is in {metric.unit}")
    if pin.better != metric.better:
        raise BadInput(path, f'{pin.name} has better = "{pin.better}"', f"{pin.metric} is better {metric.better}")
    if (pin.limit_pct is None) == (pin.gate is None):
        raise BadInput(path, f"{pin.name} needs limit_pct or gate", "give exactly one of them")
    if pin.limit_pct is not None and pin.limit_pct >= 100:
        raise BadInput(path, f"{pin.name} has limit_pct = {pin.limit_pct:g}", "write a share below 100")
    if pin.healthy is None:
        return pin
    low, high = pin.healthy
    if low > high:
        raise BadInput(path, f"{pin.name}: healthy = [{low:g}, {high:g}] runs backwards", "write the lower one first")
    wrong_side = pin.line > low if pin.better == "higher" else pin.line < high
    if wrong_side:
        raise BadInput(path, f"{_line(pin)} lies inside the healthy range {low:g} to {high:g}", _remedy(pin, low, high))
    return pin


def _line(pin: Pin) -> str:
    if pin.gate is not None:
        return f"{pin.name}: the gate {pin.gate:g} {pin.unit}"
    sign = "-" if pin.better == "higher" else "+"
    return f"{pin.name}: the line {pin.line:.4g} {pin.unit} ({pin.value:g} {sign} {pin.limit_pct:g} %)"


def _remedy(pin: Pin, low: float, high: float) -> str:
    if pin.gate is not None:
        return f"a healthy run would fail; set the gate to {low if pin.better == 'higher' else high:g}, or find out why"
    share = (pin.limit_pct or 0.0) / 100
    best = low / (1 - share) if pin.better == "higher" else high / (1 + share)
    most = "at most" if pin.better == "higher" else "at least"
    return f"a healthy run would fail; pin a typical run ({most} {best:.4g}) or allow more than {pin.limit_pct:g} %"


def store(path: Path, baseline: Baseline) -> None:
    """Write the file in one step; raises BadInput when it cannot be, and then the old one is still there."""
    metrics = [{k: v for k, v in asdict(p).items() if v not in (None, (), "")} for p in baseline.pins]
    whole = {"schema": SCHEMA, "tool": baseline.tool, "made": baseline.made, "provenance": baseline.provenance}
    _replace(path, json.dumps({**whole, "metrics": metrics}, indent=1, allow_nan=False) + "\n")


def _replace(path: Path, text: str) -> None:
    """The whole file or the old one, whenever the process dies."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".verify-", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise BadInput(path, f"not written ({error.strerror})", "free space or fix permissions") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
