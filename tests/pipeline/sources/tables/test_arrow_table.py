"""Arrow: every row of a file, stream or Feather file comes out once, and a damaged file keeps its whole batches."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pytest

from pipeline.engine.stage import Drop, Split
from pipeline.sources import provenance
from pipeline.sources import rows as rows_module
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import open_split, refetch
from pipeline.sources.splits import HashedStream, find_splits, open_stream
from pipeline.sources.tables import arrow_table
from pipeline.sources.tables.arrow_table import FILE_START

TEXTS = [f"text {number}" if number % 3 else None for number in range(100)]
TABLE = pa.table({"text": TEXTS, "url": [f"http://h{number}.com/" for number in range(100)], "n": range(100)})


def stored(table: pa.Table = TABLE, kind: str = "file", **options: Any) -> bytes:
    """A file with batches of 30 rows."""
    sink = io.BytesIO()
    if kind == "feather":
        feather.write_feather(table, sink, chunksize=30)
        return sink.getvalue()
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=30)
    return sink.getvalue()


def read(data: bytes, **settings: Any) -> list[tuple[dict[str, Any], Drop | None]]:
    """The rows of a file, after checking that they follow each other without a hole."""
    config = SourceConfig.model_validate({"paths": "x", **settings})
    rows = list(open_split(Split(0, "f", "f", len(data), "", "s", "arrow"), HashedStream(io.BytesIO(data)), config))
    position = 0
    for row, _ in rows:
        assert row["offset"] == position
        position += row["length"]
    return rows


@pytest.mark.parametrize(
    ("kind", "options"), [("file", {}), ("stream", {}), ("feather", {}), ("file", {"compression": "zstd"})]
)
def test_rows_have_their_numbers(kind: str, options: Any) -> None:
    rows = read(stored(kind=kind, **options))
    assert [row["text"] for row, _ in rows] == TEXTS
    assert [row["offset"] for row, _ in rows] == list(range(100))
    assert [drop for _, drop in rows] == [None if text else Drop("no_text_field") for text in TEXTS]
    assert (rows[5][0]["url"], rows[5][0]["meta"]) == ("http://h5.com/", '{"n":5}')


def test_texts_that_are_stored_as_bytes() -> None:
    table = pa.table({name: pa.array([value.encode(), b"\xff"]) for name, value in (("text", "é"), ("url", "u"))})
    for settings in ({}, {"text": ["text"]}):
        rows = [(row["text"], row.get("url"), drop) for row, drop in read(stored(table), **settings)]
        assert rows == [("é", "u", None), (None, None, Drop("no_text_field"))]


def test_columns_of_other_types() -> None:
    nested = pa.table({"doc": [{"body": "a", "by": ["x", "y"]}], "k": pa.array(["t"]).dictionary_encode()})
    ((row, drop),) = read(stored(nested), text="k + ': ' + doc.body", meta_fields=["doc.by"])
    assert (row["text"], row["meta"], drop) == ("t: a", '{"doc.by":["x","y"]}', None)


def test_a_damaged_file_keeps_its_whole_batches() -> None:
    data = stored(compression="zstd")
    cut = read(data[: len(data) // 2])
    whole = [row["text"] for row, drop in cut if row["record_type"] == "row"]
    assert whole == TEXTS[: len(whole)]
    assert len(whole) in (30, 60)
    assert (cut[-1][0]["record_type"], cut[-1][1].rule, cut[-1][0]["length"]) == ("gap", "unreadable_gap", 0)
    for junk in (b"no arrow at all", b"ARROW1\0\0", b"\xff" * 40, b"\xff\xff\xff\xff\xff\xff\xff\x7f"):
        ((row, drop),) = read(junk)
        assert (row["record_type"], drop) == ("gap", Drop("unreadable_gap", float(len(junk))))
    assert [drop.rule for _, drop in read(b"") if drop] == ["empty_file"]
    assert [drop.rule for _, drop in read(stored(TABLE.slice(0, 0))) if drop] == ["empty_file"]


def test_all_streams_of_a_file_are_read(tmp_path: Path) -> None:
    other = pa.table({"text": ["one", "two"], "more": [1, 2]})
    data = stored(kind="stream") + stored(other, kind="stream") + stored(kind="stream") + stored(other, kind="file")
    rows = read(data)
    assert [row["text"] for row, _ in rows] == [*TEXTS, "one", "two", *TEXTS, "one", "two"]
    assert rows[101][0]["meta"] == '{"more":2}'
    assert len([*arrow_table.read_batches(HashedStream(io.BytesIO(data)))]) == 10
    (tmp_path / "a.arrows").write_bytes(data)
    config = SourceConfig(paths=(f"{tmp_path}/*",))
    (split,) = find_splits(config)
    assert refetch(split, rows[101][0], config).changes == ()


def test_bytes_that_are_no_stream_are_a_gap() -> None:
    for kind in ("stream", "file"):
        for rest in (
            b"junk",
            b"\0" * 200,
            FILE_START,
            stored(kind=kind)[:-200],
            *([stored()] if kind == "file" else []),
        ):
            rows = read(stored(kind=kind) + rest)
            assert [row["text"] for row, _ in rows[:100]] == TEXTS
            assert (rows[-1][0]["record_type"], rows[-1][1].rule) == ("gap", "unreadable_gap"), (kind, rest)
    assert read(stored(kind="stream") + b"junk")[-1][1] == Drop("unreadable_gap", 4.0)


def test_invalid_utf8_costs_no_row() -> None:
    text = pa.array([b"ok", b"\xff!", None]).view(pa.string())
    assert [row["text"] for row, _ in read(stored(pa.table({"text": text})))] == ["ok", "\ufffd!", None]


def test_no_damage_raises() -> None:
    data = stored(compression="lz4")
    for position in range(0, len(data), 11):
        rows = read(data[:position] + b"\xff" * 8 + data[position + 8 :])
        assert sum(row["record_type"] == "row" for row, _ in rows) <= 100


def test_a_batch_that_is_too_large_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_table, "MAX_BATCH_BYTES", 1000)
    rows = read(stored())
    assert [drop.rule for _, drop in rows if drop] == ["unreadable_gap"]


@pytest.mark.parametrize("name", ["a.arrow", "a.feather", "a.arrows"])
def test_a_row_is_read_again(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(stored(kind="stream" if name.endswith("s") else "file"))
    config = SourceConfig(paths=(f"{tmp_path}/*",))
    (split,) = find_splits(config)
    rows = [row for row, _ in open_split(split, open_stream(split), config)]
    assert refetch(split, rows[71], config).changes == ()
    assert refetch(split, rows[71] | {"url": "x"}, config).changes == ("url: expected x, got http://h71.com/",)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_small_message_that_decompresses_to_much_is_not_read(compression, kind, monkeypatch) -> None:
    """Arrow allocates what the buffers declare; the declared sizes are compared with the maximum before."""
    monkeypatch.setattr(arrow_table, "MAX_BATCH_BYTES", 1 << 20)
    table = pa.table({"text": ["short", "a" * (2 << 20)]})
    data = stored(table, kind, compression=compression)
    assert len(data) < 1 << 17
    before = pa.total_allocated_bytes()
    ((row, drop),) = read(data)
    assert (row["record_type"], drop.rule) == ("gap", "unreadable_gap")
    assert pa.total_allocated_bytes() <= before
    assert [row["text"] for row, _ in read(stored(table.slice(0, 1), kind, compression=compression))] == ["short"]


def test_rows_without_bytes_are_limited(monkeypatch) -> None:
    monkeypatch.setattr(arrow_table, "FREE_ROWS", 1000)
    for rows, expected in ((900, 900), (5000, 1)):
        assert len(read(_one_batch(pa.table({"text": pa.nulls(rows)})))) == expected


@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_share_one_text_are_limited_by_its_length(monkeypatch, nested: bool) -> None:
    monkeypatch.setattr(rows_module, "FREE_BYTES", 100_000)
    monkeypatch.setattr(rows_module, "BYTES_A_BYTE", 1)
    text = "a shared text " * 1000
    shared: Any = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array([text]))
    texts = pa.array(["short"] * 1000)
    shared = pa.ListArray.from_arrays(pa.array(range(1001), pa.int32()), shared) if nested else shared
    data = _one_batch(pa.table({"text": texts, "more": shared}))
    rows = read(data)
    assert (rows[-1][0]["record_type"], rows[-1][1]) == ("gap", Drop("too_many_rows", 1000.0, float(len(rows) - 1)))
    assert 0 < (len(rows) - 1) * len(text) <= 100_000 + len(data)


def test_rows_of_all_batches_are_limited(monkeypatch) -> None:
    """Each further batch of nulls takes 130 bytes."""
    monkeypatch.setattr(provenance, "FREE_ROWS", 1000)
    sink, batch = io.BytesIO(), pa.record_batch([pa.nulls(30_000)], names=["x"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(3):
            writer.write_batch(batch)
    most = 1000 + 10 * len(sink.getvalue())
    rows = read(sink.getvalue())
    assert len(rows) == most + 1 < 30_000
    assert (rows[-1][0]["length"], rows[-1][1]) == (0, Drop("too_many_rows", 30_000.0, float(most)))
    assert len(read(_one_batch(pa.table({"x": pa.nulls(1000)})))) == 1000


def test_metadata_that_leads_out_of_its_message_is_a_gap() -> None:
    data = bytearray(stored(kind="stream"))
    begin = data.index(b"\xff\xff\xff\xff", 8)  # the first record batch
    data[begin + 8 : begin + 12] = b"\xff\xff\xff\x7f"
    ((_, drop),) = read(bytes(data))
    assert drop.rule == "unreadable_gap"


def _one_batch(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
