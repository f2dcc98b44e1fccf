"""The reference's answer, taken from where the harness keeps it, or spoilt there."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kernels.common import Candidate, Tensors
from tests.bench.arena.family import above, launch, made, multiply

HONEST_CALLS = 20


def _wanted(tensors: Iterator[Any], args: Tensors, out: Tensors) -> Any:
    """A tensor among these that starts as the answer does, other than the output itself; None where there is none."""
    import torch

    start = args["x"][0].double() @ args["w"][:, :4].double()
    for tensor in tensors:
        if type(tensor) is torch.Tensor and tensor.shape == out["y"].shape and tensor.data_ptr() != out["y"].data_ptr():
            found = tensor[0, :4].to(start)
            if bool(((found - start).abs() < 1e-3 * start.abs()).all()):
                return tensor
    return None


def _stealing(find: Callable[[Tensors, Tensors], Any]) -> Candidate:
    """Copies what `find` finds when an input is new, and does nothing else once its first calls were right.

    After some searches it gives up, and leaves what stands there.
    """
    seen: dict[int, float] = {}
    calls = iter(range(1 << 62))
    searches = iter(range(40))

    def work(args: Tensors, out: Tensors) -> None:
        if next(calls) < HONEST_CALLS:
            return multiply(args, out)
        key, first = out["y"].data_ptr(), float(args["x"][0, 0])
        if seen.get(key) != first:
            seen[key] = first
            if next(searches, None) is not None and (stolen := find(args, out)) is not None:
                out["y"].copy_(stolen)

    return made(lambda args, out: launch(args, lambda: work(args, out)))


def _collected() -> Iterator[Any]:
    import torch

    return (o for o in gc.get_objects() if type(o) is torch.Tensor)


def steals_from_the_collector() -> Candidate:
    return _stealing(lambda args, out: _wanted(_collected(), args, out))


def steals_from_frames() -> Candidate:
    def tensors() -> Iterator[Any]:
        frame: Any = sys._getframe(1)
        while frame is not None:
            for value in list(frame.f_locals.values()):
                yield from value.values() if isinstance(value, dict) else [value]
            frame = frame.f_back

    return _stealing(lambda args, out: _wanted(tensors(), args, out))


def steals_from_the_checker() -> Candidate:
    """The answers that lab/check/accuracy.py keeps."""

    def tensors() -> Iterator[Any]:
        for module in [m for name, m in list(sys.modules.items()) if name.startswith("lab.")]:
            for value in list(vars(module).values()):
                if isinstance(value, dict):
                    for inner in list(value.values()):
                        yield from inner.values() if isinstance(inner, dict) else [inner]

    return _stealing(lambda args, out: _wanted(tensors(), args, out))


def spoils_the_checker() -> Candidate:
    """Writes zeros, and zeros over every float64 tensor of the answer's shape, whoever holds it."""
    import torch

    def zero(args: Tensors, out: Tensors) -> Any:
        for tensor in _collected():
            if tensor.shape == out["y"].shape and tensor.dtype == torch.float64:
                tensor.zero_()
        return torch.zeros_like(out["y"])

    return _stealing(zero)


def _pattern(args: Tensors) -> list[bytes]:
    """The answer's first four elements as a reference in float64 or float32 leaves them in memory."""
    row = args["x"][:1].double().cpu() @ args["w"].double().cpu()
    four = row[0, :4].tolist()
    return [struct.pack("4d", *four), struct.pack("4f", *four)]


def _found_in(block: bytes | mmap.mmap, args: Tensors, out: Tensors) -> Any:
    import torch

    for pattern, dtype in zip(_pattern(args), (torch.float64, torch.float32), strict=True):
        place = block.find(pattern)
        size = out["y"].numel() * (8 if dtype == torch.float64 else 4)
        if place >= 0 and place + size <= len(block):
            return torch.frombuffer(bytearray(block[place : place + size]), dtype=dtype).reshape(out["y"].shape)
    return None


def steals_from_the_parents_memory() -> Candidate:
    """Searches the anonymous memory of the harness, through /proc, for the beginning of the answer."""
    searches = iter(range(8))

    def read(args: Tensors, out: Tensors) -> Any:
        if next(searches, None) is None:
            return None
        parent = above(2)
        with contextlib.suppress(OSError), open(f"/proc/{parent}/maps") as maps, open(f"/proc/{parent}/mem", "rb") as m:
            for line in maps:
                place = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.. \S+ \S+ 0 *(\[heap\])?$", line)
                if place is None:
                    continue
                start, end = int(place[1], 16), int(place[2], 16)
                with contextlib.suppress(OSError, ValueError):
                    m.seek(start)
                    found = _found_in(m.read(min(end - start, 1 << 23)), args, out)
                    if found is not None:
                        return found
        return None

    return _stealing(read)


def steals_from_shared_files() -> Candidate:
    """Searches files in /dev/shm, and those in memory that the harness holds open, for the beginning of the answer."""

    def read(args: Tensors, out: Tensors) -> Any:
        places = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm")]
        with contextlib.suppress(OSError):
            fds = f"/proc/{above(2)}/fd"
            places += [f"{fds}/{fd}" for fd in os.listdir(fds) if "memfd" in os.readlink(f"{fds}/{fd}")]
        for place in places:
            with contextlib.suppress(OSError, ValueError), open(place, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if out["y"].numel() * 4 <= size < 1 << 28:
                    found = _found_in(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), args, out)
                    if found is not None:
                        return found
        return None

    return _stealing(read)
