"""Rows are inserted in batches that are limited by their number and by their size."""

from pipeline.sources.forums import temporary_rows
from pipeline.sources.forums.temporary_rows import BATCH_ROWS, RowBatch, temporary_database


def test_a_batch_is_limited_by_rows_and_by_bytes() -> None:
    with temporary_database() as database:
        database.execute("CREATE TABLE row (number INTEGER)")
        batch = RowBatch(database, "INSERT INTO row VALUES (?)")

        def stored() -> int:
            return int(database.execute("SELECT count(*) FROM row").fetchone()[0])

        for number in range(BATCH_ROWS - 1):
            batch.add((number,), 1)
        assert stored() == 0
        batch.add((0,), 1)
        assert stored() == BATCH_ROWS
        batch.add((0,), temporary_rows.BATCH_BYTES - 1)
        assert stored() == BATCH_ROWS
        batch.add((0,), 1)
        assert stored() == BATCH_ROWS + 2
        batch.add((0,), 1)
        batch.flush()
        assert stored() == BATCH_ROWS + 3
