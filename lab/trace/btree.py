"""Whole-number columns straight from the pages of an SQLite table, many rows at a time.

SQLite hands out one value of one row at a time: 4 s of processor time for 5 million kernels of ten columns. Its file
format (sqlite.org/fileformat2.html, 1.6 and 2.1) is fixed and plain enough for NumPy to take a third of that: a table
is a tree of pages; a leaf has the offsets of its rows; a row is its size, its number, a byte for the type of each
column, and then their values, big-endian. Where all rows of a block have one type in a column, as is usual, that column
costs a comparison, and else a table lookup.

Whatever is not the ordinary case raises Unusual, and the caller asks SQLite, which also says best what is broken: rows
that leave their page or are short of columns, values that are no whole numbers, pages of another kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

INTERIOR, LEAF = 5, 13  # kinds of page of a table
LEVELS = 20  # more than any file has
BLOCK = 1 << 21  # bytes of pages looked at together, so that what is known of their rows stays in the cache
BEYOND = 256  # bytes after a block: a row's types and an integer are read in words of 8
ZERO, ONE, NOT = 8, 9, 255  # types of the constants; in SIZE, what no row has or takes more than a byte to say
# Bytes of a value by its type: NULL 0, integers 1 to 6, a double, the constants, texts and blobs in turn.
SIZE = np.full(256, NOT, np.uint8)
SIZE[:10] = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)
SIZE[12:128] = np.arange(116) // 2
IS_WHOLE = np.isin(np.arange(256), (*range(7), ZERO, ONE))


class Unusual(Exception):
    """What only SQLite reads."""


def columns(file: IO[bytes], root: int, wanted: Collection[int], null: int) -> Iterator[dict[int, NDArray[np.int64]]]:
    """The columns of a table at these places, in blocks of rows in the table's order; `null` stands for NULL.

    file: opened without buffering, and nobody writes to it. root: the table's first page, counted from 1. Raises
    Unusual, also after some blocks.
    """
    file.seek(0)
    head = file.read(100)
    size, spare = int.from_bytes(head[16:18], "big"), head[20]
    size = 65536 if size == 1 else size
    pages = np.array([root])
    most = file.seek(0, 2) // size
    for _ in range(LEVELS):
        raw = _pages(file, pages[:1], size)
        if raw[0] == LEAF:
            break
        pages = np.concatenate([_children(_pages(file, pages[i : i + 1], size), size) for i in range(len(pages))])
        if len(pages) > most or (pages < 2).any():  # a page is below itself, or no page of a table
            raise Unusual
    else:
        raise Unusual
    at_once = max(BLOCK // size, 1)
    for i in range(0, len(pages), at_once):
        try:
            yield _block(_pages(file, pages[i : i + at_once], size), size, size - spare - 35, wanted, null)
        except IndexError:
            raise Unusual from None


def _pages(file: IO[bytes], numbers: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """Pages one after the other, those that are neighbours in the file read together, and BEYOND bytes."""
    raw = np.zeros(len(numbers) * size + BEYOND, np.uint8)
    at = 0
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
        file.seek((int(run[0]) - 1) * size)
        if file.readinto(raw[at : at + len(run) * size].data) != len(run) * size:  # type: ignore[attr-defined]
            raise Unusual
        at += len(run) * size
    return raw


def _children(page: NDArray[np.uint8], size: int) -> NDArray[np.int64]:
    if page[0] != INTERIOR:
        raise Unusual
    at = page[12 : 12 + 2 * int(page[3:5].view(">u2")[0])].view(">u2")
    if (at > size - 4).any():
        raise Unusual
    return np.append(_unaligned(page, ">u4")[at], page[8:12].view(">u4")).astype(np.int64)


def _unaligned(raw: NDArray[np.uint8], kind: str) -> NDArray[Any]:
    """An integer from each byte on."""
    width = np.dtype(kind).itemsize
    return np.ndarray((len(raw) - width + 1,), kind, raw.data, strides=(1,))


def _block(
    raw: NDArray[np.uint8], size: int, most: int, wanted: Collection[int], null: int
) -> dict[int, NDArray[np.int64]]:
    """The wanted columns of leaf pages. most: bytes that a row may have without overflowing its page."""
    pages = raw[:-BEYOND].reshape(-1, size)
    counts = pages[:, 3].astype(np.int32) << 8 | pages[:, 4]
    widest = int(counts.max())
    if (pages[:, 0] != LEAF).any() or 8 + 2 * widest > size:
        raise Unusual
    first = np.arange(len(pages), dtype=np.int32) * size
    offsets = np.ascontiguousarray(pages[:, 8 : 8 + 2 * widest]).view(">u2") + first[:, None]
    at = offsets[np.arange(widest) < counts[:, None]].astype(np.int32)
    low, high = raw[at], raw[at + 1]
    long = low >= 128
    if (high[long] >= 128).any():
        raise Unusual
    length = np.where(long, (low.astype(np.int32) & 127) << 7 | high, low)
    at += long
    at += 1
    more = raw[at] >= 128  # the row's number: as many bytes as have this bit, and one
    for _ in range(8):
        if not more.any():
            break
        at += more
        more &= raw[at] >= 128
    at += 1
    end, header = at + length, raw[at]
    last = max(wanted)
    left = np.repeat(first + size, counts)
    if (length > most).any() or (end > left).any() or (header >= 128).any() or (header < last + 2).any() or more.any():
        raise Unusual
    words, values = _unaligned(raw, "<i8"), _unaligned(raw, ">i8")
    value, found = at + header, dict[int, NDArray[np.int64]]()
    at += 1
    for place in range(last + 1):
        if place % 8 == 0:
            types = words[at + place].view(np.uint8).reshape(-1, 8)
        kind: Any = types[:, place % 8]
        if len(kind) and (kind == kind[0]).all():
            kind = kind[0]
        width = SIZE[kind]
        if np.any(width == NOT):
            raise Unusual
        if place in wanted:
            if not np.all(IS_WHOLE[kind]):
                raise Unusual
            one = values[value].astype(np.int64)
            one >>= 64 - 8 * width.astype(np.int64)
            for constant, means in ((0, null), (ZERO, 0), (ONE, 1)):
                if np.ndim(kind) or kind == constant:
                    one[kind == constant] = means
            found[place] = one
        value += width
    if (value > end).any():
        raise Unusual
    return found
