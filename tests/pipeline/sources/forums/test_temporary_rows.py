"""Rows are inserted in batches that are limited by their number and by their size; a full disk is explained."""

import io

import pytest

from pipeline.engine.stage import Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.forums import stackexchange, temporary_rows
from pipeline.sources.forums.temporary_rows import BATCH_ROWS, RowBatch, temporary_database
from pipeline.sources.source import open_split
from pipeline.sources.splits import HashedStream
from schemas.errors import ContractError


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


def test_a_full_disk_is_no_damage_of_the_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's error is no OSError, and the reader of a dump must not make the whole dump a gap."""
    own = stackexchange._collect

    def collect_on_full_disk(database, *arguments) -> None:
        database.execute("PRAGMA max_page_count = 4")
        own(database, *arguments)

    monkeypatch.setattr(stackexchange, "_collect", collect_on_full_disk)
    rows = (f'<row Id="{n}" PostTypeId="{1 + n % 2}" ParentId="1" Score="1" Body="{"a" * 999}" />' for n in range(99))
    dump = "\n".join(["<posts>", *rows, "</posts>"]).encode()
    split = Split(0, "f", "cooking.stackexchange.com/Posts.xml", len(dump), "", "web", "stackexchange")
    with pytest.raises(ContractError, match=r"space for the rows .* database or disk is full\. Free disk space"):
        list(open_split(split, HashedStream(io.BytesIO(dump)), SourceConfig(paths=("x",))))
