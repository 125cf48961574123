"""A temporary database on the disk of a worker, in which readers group rows that do not fit into memory."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

CACHE_KIB = 64 << 10
BATCH_ROWS = 1000
"""Number of rows to insert at a time."""


@contextmanager
def temporary_database() -> Iterator[sqlite3.Connection]:
    """Yield an empty SQLite database on the disk for temporary files.

    It uses CACHE_KIB of memory. Nothing is written for recovery. The file loses its name as soon as it is open, so that
    a killed process leaves no rows.
    """
    with ExitStack() as open_database:
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
