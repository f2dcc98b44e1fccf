"""Calls of the CUDA driver through ctypes: launches, tensor maps, how many clusters run at once.

Every launch goes this way. It takes the stream's handle and makes the device's primary context (torch's, CuPy's and the
CUDA runtime's) current for the call where another or none is, as in a thread that has not touched the GPU yet.

An extended launch may be programmatic: the kernel's blocks may start while the kernel before it on the stream still
runs, once all blocks of that one have said griddepcontrol.launch_dependents (or ended); griddepcontrol.wait then holds
them until it has ended and its writes are visible. CUDA graphs record it as such an edge. A kernel that says neither is
simply ordered as usual. Arguments by value may be of any size, so a tensor map goes in as its 128 bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_...
TENSOR_MAP_BYTES = 128
ELEMENT_CODES, BYTES, WORDS = {"fp16": 6, "bf16": 9}, 0, 4  # CU_TENSOR_MAP_DATA_TYPE_..., of bytes and of 8
SWIZZLES = {64: 2, 128: 3}  # bytes -> CU_TENSOR_MAP_SWIZZLE_...B
PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # bytes -> CU_TENSOR_MAP_L2_PROMOTION_...
ROW_BYTES = 128  # of a box: as wide as the swizzle


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _checked(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name} failed with CUresult {code} (see cuda.h)")


@functools.cache
def _primary(device: int) -> int:
    """The primary context of a device, kept for the life of the process."""
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _checked("cuInit", _library().cuInit(0))
    _checked("cuDeviceGet", _library().cuDeviceGet(ctypes.byref(ordinal), device))
    _checked("cuDevicePrimaryCtxRetain", _library().cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    return context.value or 0


class Current:
    """Asks whether a device's primary context is current on the calling thread; for one thread at a time."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._wanted = _primary(device)
        self._now = ctypes.c_void_p()
        self._at = ctypes.byref(self._now)
        self._ask = _library().cuCtxGetCurrent

    def now(self) -> bool:
        """Whether it is."""
        if code := self._ask(self._at):
            _checked("cuCtxGetCurrent", code)
        return self._now.value == self._wanted

    @property
    def before(self) -> int | None:
        """The context that was current when it was last asked."""
        return self._now.value


@contextlib.contextmanager
def _switched(context: int, before: int | None) -> Iterator[None]:
    _checked("cuCtxSetCurrent", _library().cuCtxSetCurrent(ctypes.c_void_p(context)))
    try:
        yield
    finally:
        _checked("cuCtxSetCurrent", _library().cuCtxSetCurrent(ctypes.c_void_p(before)))


def in_context(device: int) -> contextlib.AbstractContextManager[None]:
    """Inside, the device's primary context is current on this thread; nothing is done where it is already."""
    here = Current(device)
    return contextlib.nullcontext() if here.now() else _switched(_primary(device), here.before)


class Launch:
    """A launch of a CUfunction whose arguments are laid out once and may be set again.

    values: the bytes of each argument. A launch is not safe to use from two threads at once: a plan has a lock.
    """

    def __init__(
        self, function: int, grid: Sequence[int], threads: int, values: Sequence[bytes], shared_bytes: int, early: bool
    ) -> None:
        self.values = [ctypes.create_string_buffer(a, len(a)) for a in values]
        self._function = ctypes.c_void_p(function)
        self._pointers = (ctypes.c_void_p * len(self.values))(*(ctypes.addressof(v) for v in self.values))
        attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        self._config = _Config(
            grid=(ctypes.c_uint * 3)(*(*grid, 1, 1)[:3]),
            block=(ctypes.c_uint * 3)(threads, 1, 1),
            shared_bytes=shared_bytes,
            attributes=ctypes.pointer(attribute),
            count=int(early),
        )
        self._at = ctypes.byref(self._config)
        self._launch = _library().cuLaunchKernelEx
        self._stream = -1

    def point(self, number: int, address: int) -> None:
        """Take an argument from this address, whose memory the caller keeps, from now on."""
        self._pointers[number] = address

    def __call__(self, stream: int) -> None:
        """Launch on a stream; raises RuntimeError with the driver's code."""
        if stream != self._stream:
            self._config.stream = self._stream = stream
        if code := self._launch(self._at, self._function, self._pointers, None):
            _checked("cuLaunchKernelEx", code)


def most_clusters(function: int, size: int, threads: int, shared_bytes: int) -> int:
    """How many clusters of `size` blocks of a CUfunction the device runs at once. Raises RuntimeError when none."""
    attribute = _Attribute(id=CLUSTER_DIMENSION)
    attribute.value[:3] = size, 1, 1
    config = _Config(
        grid=(ctypes.c_uint * 3)(size, 1, 1),
        block=(ctypes.c_uint * 3)(threads, 1, 1),
        shared_bytes=shared_bytes,
        attributes=ctypes.pointer(attribute),
        count=1,
    )
    found = ctypes.c_int()
    code = _library().cuOccupancyMaxActiveClusters(ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(config))
    _checked("cuOccupancyMaxActiveClusters", code)
    if found.value < 1:
        raise RuntimeError(f"no cluster of {size} blocks of {threads} threads, {shared_bytes} bytes fits the device")
    return found.value


class TensorMap(bytes):
    """The 128 bytes of a CUtensorMap; `address`: of its matrix; `at(address)`: the same map of another address."""

    address: int
    at: Callable[[int], TensorMap]


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int, element: str, rows: int, columns: int, box_rows: int, *, promotion_bytes: int = 256,
    box_bytes: int = ROW_BYTES,
) -> TensorMap:  # fmt: skip
    """A CUtensorMap of a contiguous matrix [rows, columns] of 16-bit elements, in boxes of `box_bytes` by `box_rows`.

    element: "bf16" or "fp16". box_bytes: 64 or 128; a box lies in shared memory with the swizzle of that width, and
    what lies outside reads as zero. promotion_bytes: 0, 64, 128 or 256, what L2 asks memory for at once; 256 is wider
    than a row of a box. Raises ValueError for another promotion or width.
    Raises RuntimeError where the driver refuses (an address not on 16 bytes, a row not a multiple of 16 bytes).
    """
    if promotion_bytes not in PROMOTIONS:
        raise ValueError(f"promotion_bytes={promotion_bytes}: pass one of {', '.join(map(str, PROMOTIONS))}")
    if box_bytes not in SWIZZLES:
        raise ValueError(f"box_bytes={box_bytes}: pass one of {', '.join(map(str, SWIZZLES))}")
    dims, strides, box = (columns, rows), (columns * 2,), (box_bytes // 2, box_rows)
    made = _encoded(address, ELEMENT_CODES[element], dims, strides, box, promotion_bytes, SWIZZLES[box_bytes])
    # As its callers write it: the cache takes an argument left out for another than its default.
    given = {} if promotion_bytes == 256 else {"promotion_bytes": promotion_bytes}
    given |= {} if box_bytes == ROW_BYTES else {"box_bytes": box_bytes}
    made.at = lambda to: tensor_map(to, element, rows, columns, box_rows, **given)
    return made


@functools.lru_cache(maxsize=4096)
def line_map(address: int, rows: int, row_bytes: int, box_rows: int) -> TensorMap:
    """A CUtensorMap of contiguous rows of bytes, in boxes of `box_rows` whole rows.

    Coordinates are (0, row, 0): a box lands as the first 128 bytes of each row, then their next 128 bytes, with the
    128-byte swizzle. Promotion is off: the box takes all that memory has there. Raises RuntimeError as `tensor_map`
    does; rows must be a multiple of 128 bytes.
    """
    lines = row_bytes // ROW_BYTES
    dims, strides, box = (ROW_BYTES, rows, lines), (row_bytes, ROW_BYTES), (ROW_BYTES, box_rows, lines)
    made = _encoded(address, BYTES, dims, strides, box, 0)
    made.at = lambda to: line_map(to, rows, row_bytes, box_rows)
    return made


@functools.lru_cache(maxsize=4096)
def word_map(address: int, rows: int, words: int, box_rows: int, box_words: int) -> TensorMap:
    """A CUtensorMap of a contiguous matrix [rows, words] of 8 bytes, in boxes of `box_words` by `box_rows`, no swizzle.

    What lies outside reads as zero. Raises RuntimeError as `tensor_map` does: `words` and `box_words` are even.
    """
    made = _encoded(address, WORDS, (words, rows), (8 * words,), (box_words, box_rows), 128, swizzle=0)
    made.at = lambda to: word_map(to, rows, words, box_rows, box_words)
    return made


def _encoded(
    address: int,
    element: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    promotion_bytes: int,
    swizzle: int = SWIZZLES[ROW_BYTES],
) -> TensorMap:
    room = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
    start = (ctypes.addressof(room) + 63) // 64 * 64  # the driver wants 64-byte alignment
    n = len(dims)
    code = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start),
        ctypes.c_int(element),
        ctypes.c_uint32(n),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * n)(*dims),
        (ctypes.c_uint64 * (n - 1))(*strides),
        (ctypes.c_uint32 * n)(*box),
        (ctypes.c_uint32 * n)(*(1,) * n),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(swizzle),
        ctypes.c_int(PROMOTIONS[promotion_bytes]),
        ctypes.c_int(0),  # outside reads as zero
    )
    _checked("cuTensorMapEncodeTiled", code)
    made = TensorMap(ctypes.string_at(start, TENSOR_MAP_BYTES))
    made.address = address
    return made
