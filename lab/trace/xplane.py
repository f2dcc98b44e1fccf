"""JAX's and TensorFlow's profile (`*.xplane.pb`, XSpace) as a trace: GPU streams, CUDA calls, host annotations.

The file is a protocol buffer whose schema is small, so its wire format is read here: planes (a device, or a kind of
host activity), in them lines (a stream, a thread), in them events with an offset in picoseconds from the line's begin.
Lines that the profiler's viewer derives (steps, modules, ops by name) repeat what the streams hold and are left out; of
a device without streams (a TPU) the line "XLA Ops" is taken. Source: xplane.proto and the names of XLA's GPU tracer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.base.errors import BadInput
from lab.trace.model import KINDS, NONE, Trace, build, direction

DEVICE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
CALLS, HOST = "/host:CUPTI", "/host:CPU"
CALL = re.compile(r"(?:cuda|cu|hip)[A-Z]")
FILL = re.compile("Memset", re.IGNORECASE)
COPY = re.compile(r"Memcpy[HDP]2[HDP]|Copy(?:Host|Device)To(?:Host|Device)", re.IGNORECASE)
SIZE = re.compile(r"\b(?:size|num_bytes):(\d+)")
Message = dict[int, list[Any]]  # field number -> values in order: int, or bytes


def is_space(content: bytes) -> bool:
    """True for what begins as an XSpace does and names a plane."""
    return content.startswith(b"\n") and (b"/device:" in content or b"/host:" in content) and b"\0" in content


def read(path: Path, content: bytes) -> Trace:
    """The trace in an XSpace; raises BadInput, one line, for a file that is cut off or is none."""
    try:
        planes = [_message(plane) for plane in _message(content).get(1, ())]
        return _trace(path, planes)
    except (IndexError, KeyError, TypeError, ValueError, UnicodeDecodeError, AttributeError):
        raise BadInput(path, "no whole XSpace (xplane.pb)", "record or copy it again") from None


def _trace(path: Path, planes: list[Message]) -> Trace:
    rows, gpus = {kind: defaultdict[str, list[Any]](list) for kind in KINDS}, dict[int, str]()

    def add(to: str, **values: Any) -> None:
        for key, value in values.items():
            rows[to][key].append(value)

    for plane in planes:
        name, lines = _text(plane, 2), [_message(line) for line in plane.get(3, ())]
        events, stats = (
            {_int(m, 1): _text(_message(m[2][0]), 2) for m in map(_message, plane.get(n, ()))} for n in (4, 5)
        )
        device = DEVICE.match(name)
        if device:
            number = int(device[1])
            about = _stats(plane.get(6, ()), stats)
            streams = [line for line in lines if _text(line, 2).startswith("Stream")]
            for line in streams or [line for line in lines if _text(line, 2) == "XLA Ops"]:
                for what, at, found in _events(line, events, stats):
                    gpus[number] = str(about.get("device_type_string", ""))
                    to = "memset" if FILL.match(what) else "memcpy" if COPY.match(what) else "kernels"
                    size = SIZE.search(str(found.get("memcpy_details", found.get("memset_details", ""))))
                    moved = {"kind": direction(what), "bytes": int(size[1]) if size else 0}
                    add(to, name=what, device=number, stream=_int(line, 1), correlation=_number(found), **at, **moved)
        elif name in (CALLS, HOST):
            for line in lines:
                for what, at, found in _events(line, events, stats):
                    if name == CALLS or CALL.match(what):
                        add("calls", name=what, thread=_int(line, 1), correlation=_number(found), **at)
                    elif not what.startswith("$"):  # a Python frame
                        add("ranges", label=what, thread=_int(line, 1), **at)
    return build("xplane", path, rows, "CUDA API", gpus=gpus)


def _events(
    line: Message, names: dict[int, str], stats: dict[int, str]
) -> Iterator[tuple[str, dict[str, int], dict[str, Any]]]:
    """Name, times and statistics of each event of a line; those that are counts have no time."""
    begin = _int(line, 3) * 1000
    for event in map(_message, line.get(4, ())):
        if 5 not in event:
            start = begin + _int(event, 2)
            at = {"start_ns": start // 1000, "end_ns": (start + _int(event, 3)) // 1000}
            yield names[_int(event, 1)], at | {"process": 0}, _stats(event.get(4, ()), stats)


def _stats(found: Any, names: dict[int, str]) -> dict[str, Any]:
    """Statistics by name; a reference is the name that it refers to."""
    values: dict[str, Any] = {}
    for stat in map(_message, found):
        key = names.get(_int(stat, 1), "")
        if 7 in stat:
            values[key] = names.get(stat[7][0], "")
        else:
            values[key] = next((_text(stat, 5) if n == 5 else v[0] for n, v in stat.items() if n > 1), None)
    return values


def _number(stats: dict[str, Any]) -> int:
    found = stats.get("correlation_id", NONE)
    return found if isinstance(found, int) else NONE


def _int(message: Message, number: int) -> int:
    value = int(message.get(number, (0,))[-1])
    return value - (1 << 64) if value >> 63 else value


def _text(message: Message, number: int) -> str:
    return bytes(message.get(number, (b"",))[-1]).decode("utf-8", "replace")


def _message(data: bytes) -> Message:
    """A message's fields; raises ValueError or IndexError where it is cut off."""
    found: Message = {}
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        value: Any
        if kind == 0:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = data[at : at + size], at + size
            if at > end:
                raise ValueError("cut off")
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of up to ten bytes of seven bits, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("no number")
