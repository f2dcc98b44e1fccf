"""lab/trace/btree.py against SQLite reading the same file, and what it leaves to SQLite."""

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.base.errors import BadInput
from lab.trace.btree import Unusual, columns
from lab.trace.nsys import Database

NULL = -77
EDGES: list[int | None] = [
    0,
    1,
    -1,
    *(s * (2**bits + d) for bits in (7, 15, 23, 31, 47) for s in (1, -1) for d in (-1, 0, 1)),
]
EDGES += [2**63 - 1, -(2**63), None]
SHOWN = ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")


def table(path: Path, rows: list[tuple[Any, ...]], page: int = 4096, numbers: list[int] | None = None) -> Path:
    """A file with `other` and then `t`, whose column d may hold text."""
    with sqlite3.connect(path) as base:
        base.execute(f"PRAGMA page_size = {page}")
        base.execute("CREATE TABLE other (x)")
        kinds = ", ".join(f'"{c}" {"TEXT" if c == "d" else "INTEGER"}' for c in SHOWN)
        base.execute(f"CREATE TABLE t ({kinds})")
        marks = ", ".join("?" * (1 + len(SHOWN)))
        for number, row in zip(numbers or range(1, len(rows) + 1), rows, strict=True):
            base.execute(f"INSERT INTO t (rowid, {', '.join(SHOWN)}) VALUES ({marks})", (number, *row))
            base.execute("INSERT INTO other VALUES (?)", (number,))  # so that the pages of t are no neighbours
    base.close()
    return path


def pages(path: Path, *wanted: int, name: str = "t") -> list[list[int]]:
    with sqlite3.connect(path) as base:
        ((root,),) = base.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,))
    base.close()
    with path.open("rb", buffering=0) as file:
        found = list(columns(file, root, wanted, NULL))
    return [np.concatenate([block[place] for block in found]).tolist() for place in wanted]


@pytest.mark.parametrize(("page", "count"), [(512, 40), (1024, 3000), (4096, 2000), (65536, 3000)])
def test_the_same_as_sqlite(tmp_path: Path, page: int, count: int) -> None:
    """Integers of every size and sign, NULL, texts between, numbers with holes, one page and several levels of them."""
    rng = np.random.default_rng(page)
    texts = [None, "", "a", "word " * 11]
    rows = [
        tuple(texts[rng.integers(4)] if c == "d" else EDGES[rng.integers(len(EDGES))] for c in SHOWN)
        for _ in range(count)
    ]
    numbers = np.cumsum(rng.integers(1, 2**40, count)) - 2**20
    path = table(tmp_path / "a.sqlite", rows, page, numbers.tolist())
    found = pages(path, 0, 2, 4, 9)
    for place, column in zip((0, 2, 4, 9), found, strict=True):
        assert column == [NULL if row[place] is None else row[place] for row in rows]
    assert pages(table(tmp_path / "b.sqlite", []), 1) == [[]]


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ((1.5, 0), ()),
        (("text", 0), ()),
        ((b"blob", 0), ()),
        ((1, "long " * 9000), ()),  # beyond its page
        ((1, "x" * 58), ()),  # a type of two bytes
        ((1, 0), ("ALTER TABLE t ADD COLUMN k INTEGER DEFAULT 5",)),  # which no row has
    ],
)
def test_left_to_sqlite(tmp_path: Path, values: tuple[Any, Any], more: tuple[str, ...]) -> None:
    one, text = values
    path = table(tmp_path / "a.sqlite", [(one, 9, 3, text, 5, 6, 7, 8, 9, 10)] * 3)  # 9: also a type
    with sqlite3.connect(path) as base:
        for statement in more:
            base.execute(statement)
    base.close()
    with pytest.raises(Unusual):
        pages(path, 0, 10 if more else 4)
    with Database(path) as read:
        wanted = {"start_ns": "a", "bytes": "k" if more else "e"}
        if isinstance(one, int):
            assert read.arrays("t", wanted)["bytes"].tolist() == [5] * 3
        else:
            with pytest.raises(BadInput, match="no whole number"):
                read.arrays("t", wanted)


def test_a_key_is_no_column(tmp_path: Path) -> None:
    """An INTEGER PRIMARY KEY is stored as the row's number, and its column as NULL."""
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, start INTEGER)")
        base.executemany("INSERT INTO t VALUES (?, ?)", [(7, 70), (9, 90)])
    base.close()
    with Database(path) as read:
        assert {k: v.tolist() for k, v in read.arrays("t", {"thread": "id", "start_ns": "start"}).items()} == {
            "thread": [7, 9],
            "start_ns": [70, 90],
        }


def test_broken_pages(tmp_path: Path) -> None:
    """Any byte of the file changed: the same rows as before, or others, or Unusual, and nothing else."""
    path = table(tmp_path / "a.sqlite", [tuple(range(i, i + 10)) for i in range(60)], 512)
    whole, rng, seen = path.read_bytes(), np.random.default_rng(1), 0
    with sqlite3.connect(path) as base:
        ((root,),) = base.execute("SELECT rootpage FROM sqlite_master WHERE name = 't'")
    base.close()
    for at in [*range((root - 1) * 512, (root - 1) * 512 + 40), *rng.integers(512, len(whole), 400).tolist()]:
        path.write_bytes(whole[:at] + bytes([int(rng.integers(256))]) + whole[at + 1 :])
        try:
            with path.open("rb", buffering=0) as file:
                list(columns(file, root, (0, 9), NULL))
        except Unusual:
            seen += 1
    assert 20 < seen < 400
