"""Columns out of an SQLite file, through ADBC into NumPy.

An nsys export is row-oriented and without indexes, so every question is a full scan, and what costs is turning cells
into Python objects. Tried on 500,000 kernel rows of ten columns: `sqlite3` with `fetchmany` into NumPy took 0.87 s of
processor time, ADBC's SQLite driver 0.30 s, and SQLite alone needs 0.19 s to decode those cells. ADBC hands over Arrow
batches without a Python object per cell and without the interpreter's lock, so two connections that read half of the
rows each use both cores. DuckDB's SQLite scanner is an extension fetched from the network at first use and Polars reads
SQLite through ADBC, so neither adds anything here.

Each batch is written into its place in the final columns, of 32 bits where they suffice, so the peak is those columns
and not the Arrow table beside them. Small tables (metadata, strings) go through `sqlite3`, which tells a broken
file apart more clearly.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from lab.base.errors import BadInput

BATCH_ROWS = 65536
SPLIT_ROWS = 200_000  # below, a second connection costs more than it saves
DRIVERS = ("adbc_driver_manager", "adbc_driver_sqlite", "pyarrow")  # whose errors mean a file that cannot be read
PROCESS = "({} >> 24) & 16777215"  # the process id in nsys's serialised globalPid or globalTid: bits 24 to 47


class Database:
    """A read-only SQLite file: its tables, their columns, small queries, and large columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._refuse_truncated()
        # immutable: nothing is locked, and no journal appears beside somebody's profile.
        self.uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        with self.one_line():
            self._base = sqlite3.connect(self.uri, uri=True)
            self._base.text_factory = lambda raw: raw.decode("utf-8", "replace")
            self.tables = {row[0] for row in self._base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()

    def _refuse_truncated(self) -> None:
        """SQLite reads a shortened file until it meets a missing page, so ask the header how long it should be."""
        with self.path.open("rb") as file:
            head = file.read(100)
        page = int.from_bytes(head[16:18], "big")
        pages = int.from_bytes(head[28:32], "big")
        wanted = pages * (65536 if page == 1 else page)
        # The page count is only valid when the file was last written by an SQLite that maintains it.
        if head[24:28] == head[92:96] and self.path.stat().st_size < wanted:
            what = f"truncated: {self.path.stat().st_size} of {wanted} bytes"
            raise BadInput(self.path, what, "copy or export it again")

    @contextlib.contextmanager
    def one_line(self) -> Iterator[None]:
        """Whatever a broken file makes SQLite or ADBC raise becomes one line."""
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            if not isinstance(error, sqlite3.Error | OSError) and type(error).__module__.split(".")[0] not in DRIVERS:
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadInput(self.path, f"cannot be read as SQLite ({reason})", "copy or export it again") from None

    def columns(self, table: str) -> set[str]:
        """The table's column names, empty when there is no such table."""
        if table not in self.tables:
            return set()
        with self.one_line():
            return {row[1] for row in self._base.execute(f'PRAGMA table_info("{table}")')}

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of a small query."""
        with self.one_line():
            return self._base.execute(query, values).fetchall()

    def texts(self, ids: Sequence[int]) -> dict[int, str]:
        """StringIds of exactly these ids; the table also holds the environment, which is not read."""
        found: dict[int, str] = {}
        if "StringIds" in self.tables:
            for at in range(0, len(ids), 500):
                part = [int(i) for i in ids[at : at + 500]]
                found |= dict(
                    self.rows(f"SELECT id, value FROM StringIds WHERE id IN ({','.join('?' * len(part))})", *part)
                )
        return found

    def arrays(self, table: str, wanted: Mapping[str, tuple[str, type]]) -> dict[str, NDArray[Any]]:
        """Large columns of one table: result name -> (SQL expression, NumPy type to keep).

        The expression must be a whole number and never NULL (use IFNULL): ADBC takes a column's type from the first
        batch. Raises BadInput when a column holds something else.
        """
        low, high = self.rows(f'SELECT min(rowid), max(rowid) FROM "{table}"')[0]
        if low is None:
            return {name: np.empty(0, kind) for name, (_, kind) in wanted.items()}
        workers = 2 if high - low > SPLIT_ROWS and (os.cpu_count() or 1) > 1 else 1
        edges = [low + (high - low + 1) * i // workers for i in range(workers + 1)]
        # Room for every rowid of the range; what deleted rows leave unused is cut off. Untouched pages cost nothing.
        room = {name: np.empty(high - low + 1, kind) for name, (_, kind) in wanted.items()}
        select = ", ".join(expression for expression, _ in wanted.values())

        def fill(a: int, b: int) -> tuple[int, int]:
            at = a - low
            for batch in self.batches(f'SELECT {select} FROM "{table}" WHERE rowid >= {a} AND rowid < {b}'):
                for column, target in zip(batch.columns, room.values(), strict=True):
                    target[at : at + batch.num_rows] = column.to_numpy(zero_copy_only=False)
                at += batch.num_rows
            return a - low, at

        with self.one_line(), ThreadPoolExecutor(workers) as pool:
            try:
                filled = list(pool.map(fill, edges[:-1], edges[1:]))
            except (ValueError, TypeError) as error:
                raise BadInput(self.path, f"{table} holds text for a number ({error})", "export it again") from None
        rows = sum(b - a for a, b in filled)
        if rows == high - low + 1:
            return room
        return {name: np.concatenate([column[a:b] for a, b in filled]) for name, column in room.items()}

    def batches(self, query: str) -> Iterator[Any]:
        """Arrow record batches of a query, on a connection of their own."""
        import adbc_driver_manager as adbc
        import adbc_driver_sqlite
        import pyarrow as pa

        with (
            adbc_driver_sqlite.connect(self.uri) as database,
            adbc.AdbcConnection(database) as connection,
            adbc.AdbcStatement(connection) as statement,
        ):
            statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            statement.set_sql_query(query)
            handle, _ = statement.execute_query()
            yield from pa.RecordBatchReader.from_stream(handle)
