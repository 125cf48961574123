"""Ranges of files: their rows together are those of the whole file, whatever it holds and wherever it is divided."""

import bz2
import gzip
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import lz4.frame
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.engine.stage import Drop, RangeStart, Row, Split
from pipeline.sources import compression, decoders, provenance
from pipeline.sources.config import SourceConfig
from pipeline.sources.ranges import find_starts, ranges_of, with_starts
from pipeline.sources.source import open_split
from pipeline.sources.splits import HashedStream
from schemas.errors import ContractError
from tests.support.paths import SHARED
from tests.support.tiny_archive import page, record

CONFIG = SourceConfig(paths=("x",))
SMALL = SourceConfig(paths=("x",), max_record_bytes=2000)
Rows = list[tuple[Row, Drop | None]]


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def stored(data: bytes) -> bytes:
    return gzip.compress(data, 0)


def plain(data: bytes) -> bytes:
    return data


PACKS: dict[str, Callable[[bytes], bytes]] = {
    "plain": plain,
    "gzip": gzip.compress,
    "stored": stored,
    "zstd": zstd,
    "bz2": bz2.compress,
    "lz4": lz4.frame.compress,
}


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders get and give few bytes at a time, so that ranges of small files begin at many places."""
    for module in (decoders, compression):
        monkeypatch.setattr(module, "DECODED_BYTES", 512)
        monkeypatch.setattr(module, "SLICE_BYTES", 64)
    monkeypatch.setattr(compression, "RESTARTS", {})
    monkeypatch.setattr(compression, "MAX_RESTARTS", 10_000)


def unguarded(starts: Iterable[RangeStart], stream: HashedStream) -> Iterator[RangeStart]:
    return iter(starts)


def whole(data: bytes, kind: str, config: SourceConfig = CONFIG) -> Rows:
    split = Split(0, "file", "file", len(data), "", "web", kind, key="file")
    return list(open_split(split, HashedStream(io.BytesIO(data)), config))


def ranges(data: bytes, kind: str, number: int, config: SourceConfig = CONFIG) -> list[Split]:
    split = Split(3, "file", "file", len(data), "", "web", kind, key="file", num_ranges=number)
    stream = HashedStream(io.BytesIO(data))
    return with_starts(ranges_of(split), find_starts(split, stream, config, unguarded, False))


def divided(data: bytes, kind: str, number: int, config: SourceConfig = CONFIG) -> list[Rows]:
    """The rows of each range of a file."""
    found = []
    for split in ranges(data, kind, number, config):
        assert split.span is not None
        stream = HashedStream(io.BytesIO(data), split.span.begin, split.span.end)
        found.append(list(open_split(split, stream, config)))
        digest, size = stream.finish()
        assert digest == HashedStream(io.BytesIO(data[split.span.begin : split.span.end])).finish()[0]
        assert size == split.span.end - split.span.begin
    return found


def check(data: bytes, kind: str, numbers: Sequence[int], config: SourceConfig = CONFIG) -> int:
    """Compare the rows of ranges with those of the file. Return the largest number of ranges that have rows."""
    expected = whole(data, kind, config)
    most = 0
    for number in numbers:
        found = divided(data, kind, number, config)
        assert [*chain.from_iterable(found)] == expected, number
        most = max(most, sum(bool(rows) for rows in found))
    return most


def line(rng: random.Random) -> bytes:
    kind = rng.randrange(12)
    if kind == 0:
        return b" " * rng.randrange(4) + b"\n" * rng.randrange(1, 4)
    if kind == 1:
        return b"no JSON\n"
    if kind == 2:
        return b"\xef\xbb\xbf\r\n"
    size = 5000 if kind == 3 else rng.randrange(300)
    return json.dumps({"text": rng.randbytes(size).hex(), "url": f"u{rng.random()}"}).encode() + b"\n"


def lines(rng: random.Random, number: int) -> bytes:
    data = b"".join(line(rng) for _ in range(number))
    return data if rng.random() < 0.5 else data.removesuffix(b"\n")


def hostile_page(rng: random.Random) -> bytes:
    """A page that holds forged records: as text, and in frames that decode."""
    forged = page(rng.randrange(9))
    inner = rng.choice([plain, gzip.compress, stored, zstd])(forged)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>\r\n\r\n"
    return record(head + inner * 3 + rng.randbytes(99))


def page_in_gzip(rng: random.Random) -> bytes:
    """A page with a coding of its own, which the frame of a record may repeat."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n"
    return record(head + gzip.compress(b"<p>" + b"word " * rng.choice([1, 100, 30_000]), mtime=0))


def some_record(rng: random.Random) -> bytes:
    kind = rng.randrange(11)
    if kind == 10:
        return page_in_gzip(rng) * rng.randrange(1, 6)
    if kind == 0:
        return hostile_page(rng)
    if kind == 1:
        return record(rng.randbytes(6000), "resource")
    if kind == 2:
        return record(b"x", "warcinfo", end=rng.choice([b"", b"\n", b"\r\n" * 5]))
    if kind == 3:
        return page(1, length=rng.randrange(5000))
    return page(rng.randrange(99) + 1) if kind > 6 else record(rng.randbytes(rng.randrange(900)), "metadata")


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some of them changed, removed, doubled or cut off."""
    changed = bytearray(data)
    for _ in range(rng.randrange(4)):
        place, size = rng.randrange(len(changed) + 1), rng.randrange(1, 60)
        kind = rng.randrange(4)
        if kind == 0:
            changed[place : place + size] = rng.randbytes(min(size, len(changed) - place))
        elif kind == 1:
            del changed[place : place + size]
        elif kind == 2:
            changed[place:place] = changed[place : place + 700]
        else:
            del changed[place + len(changed) // 2 :]
    return bytes(changed)


NUMBERS = (2, 3, 7, 40)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("seed", range(6))
def test_lines_in_one_frame(pack: str, seed: int, fine: None) -> None:
    rng = random.Random(seed)
    data = PACKS[pack](lines(rng, 120))
    most = check(data, "jsonl", NUMBERS, rng.choice([CONFIG, SMALL]))
    assert most > 5 or pack in ("zstd", "bz2", "lz4")  # their blocks are larger than this file


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("seed", range(6))
def test_lines_in_many_frames(pack: str, seed: int, fine: None) -> None:
    rng = random.Random(seed)
    data = lines(rng, 150)
    places = sorted(rng.randrange(len(data)) for _ in range(20))
    frames = [PACKS[pack](data[begin:end]) for begin, end in zip([0, *places], [*places, len(data)])]
    assert check(b"".join(frames), "jsonl", NUMBERS) > 5


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("seed", range(40))
def test_damaged_lines(pack: str, seed: int, fine: None) -> None:
    rng = random.Random(seed)
    frames = [PACKS[pack](lines(rng, rng.randrange(1, 40))) for _ in range(rng.randrange(1, 12))]
    check(damaged(b"".join(frames), rng), "jsonl", NUMBERS, rng.choice([CONFIG, SMALL]))


@settings(max_examples=300)
@given(st.lists(st.sampled_from([b"\n", b" ", b"{}\n", b'{"text": "a"}', b"\xef\xbb\xbf", b"\r"])), st.integers(2, 9))
def test_lines_of_few_bytes(parts: list[bytes], number: int) -> None:
    check(b"".join(parts), "jsonl", (number,))


@pytest.mark.parametrize("pack", ["plain", "gzip", "stored", "zstd"])
@pytest.mark.parametrize("seed", range(8))
def test_a_frame_for_each_record(pack: str, seed: int) -> None:
    rng = random.Random(seed)
    data = b"".join(PACKS[pack](some_record(rng)) for _ in range(150))
    assert check(data, "warc", NUMBERS, rng.choice([CONFIG, SMALL])) > 20


@pytest.mark.parametrize("pack", ["gzip", "stored", "zstd"])
@pytest.mark.parametrize("seed", range(8))
def test_several_records_in_a_frame(pack: str, seed: int, fine: None) -> None:
    rng = random.Random(seed)
    members = [b"".join(some_record(rng) for _ in range(rng.randrange(1, 30))) for _ in range(rng.randrange(1, 6))]
    check(b"".join(PACKS[pack](member) for member in members), "warc", NUMBERS, rng.choice([CONFIG, SMALL]))


@pytest.mark.parametrize("pack", PACKS)
def test_pages_in_gzip_that_a_frame_repeats(pack: str, fine: None) -> None:
    rng = random.Random(3)
    parts = [page_in_gzip(rng) * rng.randrange(9) for _ in range(40)]
    data = PACKS[pack](b"".join(parts)) + b"".join(map(PACKS[pack], parts))
    check(data, "warc", NUMBERS)
    rules = {drop.rule for _, drop in whole(data, "warc") if drop is not None}
    assert rules == ({"decoded_too_large"} if pack not in ("plain", "stored") else set())


def test_records_of_one_frame_are_divided(fine: None) -> None:
    rng = random.Random(1)
    data = gzip.compress(b"".join(record(rng.randbytes(900), "resource") for _ in range(100)))
    assert check(data, "warc", (20,)) == 20


@pytest.mark.parametrize("seed", range(8))
def test_records_over_several_frames(seed: int, fine: None) -> None:
    rng = random.Random(seed)
    data = b"".join(some_record(rng) for _ in range(60))
    places = sorted(rng.randrange(len(data)) for _ in range(40))
    frames = [gzip.compress(data[begin:end]) for begin, end in zip([0, *places], [*places, len(data)])]
    check(b"".join(frames), "warc", NUMBERS)


@pytest.mark.parametrize("pack", ["plain", "gzip", "stored", "zstd", "mixed"])
@pytest.mark.parametrize("seed", range(60))
def test_damaged_archives(pack: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    for module in (decoders, compression) if seed % 2 else ():
        monkeypatch.setattr(module, "DECODED_BYTES", 512)
        monkeypatch.setattr(module, "SLICE_BYTES", 64)
    packs = [plain, gzip.compress, stored, zstd] if pack == "mixed" else [PACKS[pack]]
    data = b"".join(rng.choice(packs)(some_record(rng)) for _ in range(rng.randrange(1, 80)))
    check(damaged(data, rng), "warc", NUMBERS, rng.choice([CONFIG, SMALL]))


@pytest.mark.parametrize("pack", ["plain", "stored"])
@pytest.mark.parametrize("seed", range(3))
def test_damage_in_archives_of_several_blocks(pack: str, seed: int) -> None:
    """Where a decoder notices damage depends on the blocks in which the file is read."""
    rng = random.Random(seed)
    parts = [some_record(rng) if rng.random() < 0.7 else record(rng.randbytes(120_000), "resource") for _ in range(120)]
    data = bytearray(b"".join(PACKS[pack](part) for part in parts))
    for _ in range(12):
        place = rng.randrange(len(data))
        data[place : place + 20] = rng.randbytes(20)
    assert len(data) > 3 << 20
    check(bytes(data), "warc", (2, 3, 9, 31))


@pytest.mark.parametrize("size", [60_000, 70_000, 200_000])
def test_a_header_that_is_longer_than_its_limit_or_almost(size: int) -> None:
    """A header is looked for in the bytes that are buffered, which are the same in a range."""
    rng = random.Random(size)
    records = [page(1, X="y" * size) if rng.random() < 0.2 else page(rng.randrange(9)) for _ in range(80)]
    check(b"".join(records), "warc", (2, 9, 33))
    check(b"".join(map(gzip.compress, records)), "warc", (2, 9, 33))


def test_a_forged_record_is_in_no_range() -> None:
    """A page of half of the file that holds whole gzip members with records; every range would begin with one."""
    forged = gzip.compress(page(7)) + b"\r\n\r\n" + page(8)
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>" + forged * 200
    for pack in (plain, stored):
        data = pack(page(1)) + pack(record(block)) + pack(page(2))
        found = divided(data, "warc", 30)
        assert [len(rows) for rows in found if rows] == [2, 1]
        assert sum(map(len, found)) == 3
        check(data, "warc", NUMBERS)


@pytest.mark.parametrize("path", sorted((SHARED / "warc/broken").glob("*")), ids=lambda path: path.name)
def test_broken_archives(path: Path) -> None:
    check(path.read_bytes(), "warc", NUMBERS)


def table(groups: Sequence[int], **options: Any) -> bytes:
    sink = io.BytesIO()
    schema = pa.schema([("text", pa.string()), ("id", pa.int64())])
    with pq.ParquetWriter(sink, schema, **options) as writer:
        for number, rows in enumerate(groups):
            texts = [f"group {number} row {row} " * (number + 1) for row in range(rows)]
            writer.write_table(pa.table({"text": texts, "id": range(rows)}, schema), row_group_size=max(1, rows))
    return sink.getvalue()


@pytest.mark.parametrize("seed", range(6))
def test_row_groups(seed: int) -> None:
    rng = random.Random(seed)
    data = table([rng.choice([0, 1, 5, 40, 300]) for _ in range(30)])
    assert check(data, "parquet", (2, 3, 7, 40, 200)) > 5


@pytest.mark.parametrize("seed", range(20))
def test_damaged_row_groups(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(table([30] * 12, compression="none"))
    for _ in range(5):
        data[rng.randrange(len(data) * (2 if seed % 3 else 1) // 2)] ^= 0x55
    check(bytes(data), "parquet", (2, 5, 12))


def test_a_table_without_rows_and_one_with_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    check(table([0, 0]), "parquet", (3,))
    monkeypatch.setattr("pipeline.sources.tables.jsonl_parquet.most_rows", lambda size: 100)
    for groups in ([40, 40, 40, 40], [50, 50, 10], [50, 50], [100, 0, 0], [100, 0, 1]):
        check(table(groups), "parquet", (2, 3, 4, 9))


@pytest.mark.parametrize("kind", ["jsonl", "warc"])
@pytest.mark.parametrize("pack", ["zstd", "bz2", "lz4", "gzip"])
def test_a_file_that_decodes_to_too_much(pack: str, kind: str, fine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "DECODED_FREE", 20_000)
    monkeypatch.setattr(compression, "DECODED_A_BYTE", 2)
    rng = random.Random(5)
    parts = [lines(rng, 30) if kind == "jsonl" else page(number) for number in range(9)]
    again, number = (b'{"text": "again"}\n', 40_000) if kind == "jsonl" else (page(1), 4_000)
    bomb = again * number
    data = b"".join(map(PACKS[pack], [*parts, bomb, *parts]))
    check(data, kind, NUMBERS)
    rows = whole(data, kind)
    assert rows[-1][1] is not None
    assert rows[-1][1].rule == "decoded_too_large"
    assert sum(drop is None for _, drop in rows) < number
    assert not any(
        drop and drop.rule == "decoded_too_large" for _, drop in whole(b"".join(map(PACKS[pack], parts)), kind)
    )


@pytest.mark.parametrize("pack", PACKS)
def test_an_archive_with_too_many_records(pack: str, fine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "FREE_ROWS", 200)
    monkeypatch.setattr(provenance, "ROWS_A_BYTE", 1 if pack == "plain" else 0)
    parts = [b"".join(map(page, range(90))), b"\x1f\x8b\x08 damaged" * 9, b"WARC/1\nContent-Length:0\n\n" * 400]
    data = PACKS[pack](parts[0]) + parts[1] + stored(page(0)) + PACKS[pack](page(1) + parts[2])
    check(data, "warc", NUMBERS)
    rows = whole(data, "warc")
    drops = [drop for _, drop in rows if drop and drop.rule == "too_many_rows"]
    assert drops == ([] if pack == "plain" else [Drop("too_many_rows", 200.0, 200.0)])
    assert sum(row["length"] for row, _ in rows) == len(data)
    assert len(rows) == 201 if drops else len(rows) > 480


@pytest.mark.parametrize("pack", PACKS)
def test_a_file_with_too_many_lines(pack: str, fine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "FREE_ROWS", 200)
    monkeypatch.setattr(provenance, "ROWS_A_BYTE", 1 if pack == "plain" else 0)
    data = PACKS[pack](lines(random.Random(8), 400) + b'\n\n{"text": "a"}\n' * 300)
    check(data, "jsonl", NUMBERS)
    rows = whole(data, "jsonl")
    drops = [drop for _, drop in rows if drop and drop.rule == "too_many_rows"]
    assert drops == ([] if pack == "plain" else [Drop("too_many_rows", 200.0, 200.0)])
    assert all(row["length"] > 0 for row, _ in rows)


def test_the_numbers_of_starts_inside_a_frame_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "DECODED_BYTES", 512)
    monkeypatch.setattr(decoders, "SLICE_BYTES", 64)
    data = gzip.compress(lines(random.Random(3), 500))
    found = divided(data, "jsonl", 100)
    sizes = [sum(row["length"] for row, _ in rows) for rows in found if rows]
    assert len(sizes) == compression.RESTARTS[decoders.GZIP] + 1
    assert max(sizes) < 3 * min(sizes)
    assert [*chain.from_iterable(found)] == whole(data, "jsonl")


def test_a_reader_that_fails_makes_the_rest_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.sources.crawl import warc

    data = b"".join(gzip.compress(page(number)) for number in range(40))
    read = warc.starts_with_record
    monkeypatch.setattr(warc, "starts_with_record", lambda head: read(head) and (b"page 25" not in head or 1 / 0))
    found = divided(data, "warc", 10)
    assert [(row["offset"], drop) for row, drop in chain.from_iterable(found)] == [
        (row["offset"], drop) for row, drop in whole(data, "warc")
    ]
    assert [bool(rows) for rows in found] == [True] * 6 + [False] * 4


def test_a_file_that_changed_after_it_was_divided() -> None:
    data = b"".join(gzip.compress(page(number)) for number in range(40))
    later = data[:300] + data[500:]
    for split in ranges(data, "warc", 4)[:-1]:
        with pytest.raises(ContractError, match="where one was when the file was divided into ranges"):
            list(open_split(split, HashedStream(io.BytesIO(later)), CONFIG))
    rows = b"".join(line(random.Random(number)) for number in range(90))
    with pytest.raises(ContractError, match="where one was"):
        list(open_split(ranges(rows, "jsonl", 4)[0], HashedStream(io.BytesIO(rows[:50] + rows[51:])), CONFIG))


def test_a_row_is_numbered_in_its_range(fine: None) -> None:
    """Records of one member have one offset, and their ids include their number in the member."""
    data = gzip.compress(b"".join(record(random.Random(number).randbytes(500), "resource") for number in range(50)))
    spans = [split.span for split in ranges(data, "warc", 5)]
    numbers = [span.first.number for span in spans if span is not None and span.first is not None]
    assert numbers == sorted({*numbers})
    assert len(numbers) == 5
    rows = [row for row, _ in chain.from_iterable(divided(data, "warc", 5))]
    assert {row["offset"] for row in rows} == {0}
    assert [row["length"] for row in rows] == [0] * 49 + [len(data)]
    assert len({row["doc_id"] for row in rows}) == 50


def test_a_file_of_one_range_is_the_file() -> None:
    split = Split(3, "file", "file", 100, "", "web", "warc")
    assert ranges_of(split) == [split]
    spans = [each.span for each in ranges_of(replace(split, num_ranges=3))]
    assert [(span.begin, span.end) for span in spans if span] == [(0, 33), (33, 66), (66, 100)]
    assert [each.ordinal for each in ranges_of(replace(split, num_ranges=3))] == [3, 4, 5]
