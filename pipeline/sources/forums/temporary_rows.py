"""A temporary database on the disk of a worker, in which readers group rows that do not fit into memory."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from schemas.errors import ContractError

CACHE_KIB = 64 << 10
BATCH_ROWS, BATCH_BYTES = 1000, 4 << 20
"""Number of rows to insert at a time, and size of their texts from which fewer are."""


class RowBatch:
    """Rows to insert by a statement, some at a time; `flush` after the last."""

    def __init__(self, database: sqlite3.Connection, statement: str):
        self._database, self._statement = database, statement
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0

    def add(self, row: tuple[Any, ...], size: int) -> None:
        """Add a row whose text has about this size [bytes]."""
        self._rows.append(row)
        self._size += size
        if len(self._rows) == BATCH_ROWS or self._size >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Insert the rows that were added."""
        self._database.executemany(self._statement, self._rows)
        self._rows, self._size = [], 0


@contextmanager
def temporary_database() -> Iterator[sqlite3.Connection]:
    """Yield an empty SQLite database on the disk for temporary files.

    It uses CACHE_KIB of memory. Nothing is written for recovery. The file loses its name as soon as it is open, so that
    a killed process leaves no rows. Raises ContractError if the disk has no space for them: otherwise the reader would
    take the error for damage of the file.
    """
    with _explained(), ExitStack() as open_database:
        with TemporaryDirectory(prefix="penstock-") as folder:
            database = sqlite3.connect(f"{folder}/rows.sqlite", isolation_level=None, check_same_thread=False)
            open_database.callback(database.close)
            for setting in (
                "journal_mode = OFF",
                "synchronous = OFF",
                f"cache_size = -{CACHE_KIB}",
                "temp_store = FILE",
            ):
                database.execute(f"PRAGMA {setting}")
            database.execute("BEGIN IMMEDIATE")
        yield database


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise ContractError(
            f"{gettempdir()}: expected space for the rows that a reader groups, got an error: {error}. Free disk space "
            "there, or set TMPDIR to a folder on another disk, then run the same command again."
        ) from error
