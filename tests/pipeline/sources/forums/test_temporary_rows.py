"""The database of readers: a killed process leaves nothing of it, and it holds more than its memory."""

import tempfile
from pathlib import Path

import pytest

from pipeline.sources.forums.temporary_rows import CACHE_KIB, temporary_database


def test_its_rows_have_no_name_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = "x" * 100_000
    rows = 2 * CACHE_KIB * 1024 // len(text)
    with temporary_database() as database:
        database.execute("CREATE TABLE row (id INTEGER PRIMARY KEY, text TEXT)")
        database.executemany("INSERT INTO row VALUES (?, ?)", ((number, text) for number in range(rows)))
        assert [*tmp_path.iterdir()] == []
        assert database.execute("SELECT count(*), sum(length(text)) FROM row").fetchone() == (rows, rows * len(text))
        assert database.execute("SELECT id FROM row ORDER BY text, id DESC LIMIT 1").fetchone() == (rows - 1,)
    assert [*tmp_path.iterdir()] == []
