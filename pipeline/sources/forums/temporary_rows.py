"""A temporary database on the disk of a worker, in which readers group rows that do not fit into memory."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

CACHE_KIB = 64 << 10
BATCH_ROWS = 1000
"""Number of rows to insert at a time."""


@contextmanager
def temporary_database() -> Iterator[sqlite3.Connection]:
    """Yield an empty SQLite database in the folder for temporary files; it is deleted afterwards.

    It uses CACHE_KIB of memory. Nothing is written for recovery.
    """
    with TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as folder:
        database = sqlite3.connect(f"{folder}/rows.sqlite", isolation_level=None, check_same_thread=False)
        try:
            for setting in (
                "journal_mode = OFF",
                "synchronous = OFF",
                f"cache_size = -{CACHE_KIB}",
                "temp_store = FILE",
            ):
                database.execute(f"PRAGMA {setting}")
            database.execute("BEGIN")
            yield database
        finally:
            database.close()
