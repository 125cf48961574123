"""Ranges of keys contain every key once, and buckets merged by file are those of all rows at once."""

import hashlib
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.dedup.index import is_key, write_file
from pipeline.dedup.keep_order import EARLIER
from pipeline.dedup.key_ranges import (
    IndexRange,
    KeyRange,
    first_key,
    key_ranges,
    merge_buckets,
    number_leaders,
    range_of,
    range_sql,
)
from pipeline.dedup.keys import KEYS
from schemas.storage import CheckedPath, Store

LEAST, END = -(1 << 63), 1 << 63
WIDTH = 6


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000, 90_001])
def test_ranges_contain_every_key_once(count: int) -> None:
    bounds = [first_key(number, count) for number in range(count + 1)]
    assert (bounds[0], bounds[-1]) == (LEAST, END)
    assert bounds == sorted(set(bounds))
    for number in {0, 1, count // 2, count - 1} & set(range(count)):
        assert range_of(bounds[number], count) == number
        assert range_of(bounds[number + 1] - 1, count) == number


@pytest.mark.spark
def test_spark_cuts_the_same_ranges(spark) -> None:
    chance = random.Random(1)
    keys = [LEAST, -1, 0, 1, END - 1, *(chance.randrange(LEAST, END) for _ in range(200))]
    keys += [first_key(number, 7) + step for number in range(1, 7) for step in (-1, 0)]
    frame = spark.createDataFrame([(key,) for key in keys], "key long")
    for count in (1, 7, 4096, 1_000_003):
        found = frame.selectExpr("key", f"{range_sql('key', count)} as part").collect()
        assert [row.part for row in found] == [range_of(row.key, count) for row in found]


def order_of(snapshot: int, number: int, part: int) -> bytes:
    """A keep order of WIDTH bytes: the snapshot, a number, and the part."""
    return bytes([snapshot, number]) + part.to_bytes(4, "big")


def write_index(folder: Path, rows: list[tuple[int, bytes]], files: int, first: int, statistics: bool) -> IndexRange:
    """Write the files of buckets of an index. Without statistics, they are as a takedown writes them again."""
    store, paths = Store(str(folder)), []
    for number in range(files):
        own = sorted(row for row in rows if range_of(row[0], files) == number)
        columns = [[key for key, _ in own], [order for _, order in own]]
        table = pa.Table.from_arrays([pa.array(each, field.type) for each, field in zip(columns, KEYS)], schema=KEYS)
        if statistics:
            written = write_file(iter(table.to_batches(13)), store, f"bands/0/{number:05d}", KEYS)
            path = CheckedPath(written.path, written.bytes, written.sha256)
        else:
            target = folder / f"bands/0/{number:05d}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            with pq.ParquetWriter(target, KEYS, write_statistics=False) as writer:
                for begin in range(0, max(len(own), 1), 9):
                    writer.write_table(table.slice(begin, 9))
                writer.write_table(table.slice(0, 0))
            data = target.read_bytes()
            path = CheckedPath(f"bands/0/{number:05d}.parquet", len(data), hashlib.sha256(data).hexdigest())
        paths.append((store, path))
    return IndexRange(tuple(paths), first)


def as_batches(rows: list[tuple[int, bytes]], chance: random.Random) -> list[pa.RecordBatch]:
    batches = []
    while rows:
        size = chance.randint(0, 7)
        own, rows = rows[:size], rows[size:]
        columns = [pa.array([key for key, _ in own], pa.int64()), pa.array([order for _, order in own], pa.binary())]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=KEYS))
    return batches


@pytest.mark.parametrize("seed", range(12))
def test_merged_buckets_are_those_of_all_rows(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    near = [chance.randrange(LEAST, END) for _ in range(chance.choice([3, 40]))]
    pick = [*near, LEAST, END - 1, *(chance.randrange(LEAST, END) for _ in range(60))]
    indexes, earlier, first = [], [], 0
    for snapshot in range(chance.randint(1, 4)):
        rows = [
            (key, order_of(snapshot, chance.randrange(4), chance.randrange(3))) for key in set(chance.sample(pick, 30))
        ]
        files = chance.randint(1, 5)
        indexes.append(write_index(tmp_path / str(snapshot), rows, files, first, chance.random() < 0.5))
        earlier += [(key, order[:2] + (EARLIER + first + order[-1]).to_bytes(4, "big")) for key, order in rows]
        first += 3
    own = sorted((chance.choice(pick), order_of(9, chance.randrange(9), number)) for number in range(200))
    counts = Counter(key for key, _ in earlier + own)
    expected = sorted([row for row in earlier if counts[row[0]] > 1] + own)
    ranges = key_ranges(chance.randint(1, 9), indexes)
    found = []
    for task in ranges:
        mine = [row for row in own if task.low <= row[0] < task.high]
        for batch in merge_buckets(task, iter(as_batches(mine, chance)), WIDTH):
            assert batch.num_rows
            found += zip(batch.column("key").to_pylist(), batch.column("order").to_pylist())
    assert found == expected


def test_a_range_opens_only_the_files_of_its_keys() -> None:
    paths = [(Store("/nowhere"), CheckedPath(f"{number}", 1, "")) for number in range(8)]
    ranges = key_ranges(3, [IndexRange(tuple(paths), 0), IndexRange(tuple(paths[:2]), 8), IndexRange((), 10)])
    assert [(task.low, task.high) for task in ranges] == [
        (first_key(number, 8), first_key(number + 1, 8)) for number in range(8)
    ]
    assert [[[path for _, path in own.files] for own in task.indexes] for task in ranges] == [
        [[f"{number}"], [f"{number // 4}"]] for number in range(8)
    ]
    assert key_ranges(2, []) == [KeyRange(LEAST, 0, ()), KeyRange(0, END, ())]


def test_files_of_keys_alone_have_statistics(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    schema = pa.schema([pa.field("doc_id", pa.binary())])
    for kind, columns in ((KEYS, [[-5, 9], [b"a", b"b"]]), (schema, [[b"a", b"b"]])):
        batch = pa.RecordBatch.from_arrays([pa.array(each, own.type) for each, own in zip(columns, kind)], schema=kind)
        written = write_file(iter([batch]), store, f"x/{len(kind)}", kind)
        found = pq.ParquetFile(tmp_path / written.path).metadata.row_group(0).column(0).statistics
        assert ((found.min, found.max) == (-5, 9)) if is_key(kind) else found is None


def test_the_part_in_an_order_becomes_the_number_of_its_file() -> None:
    orders = np.frombuffer(b"ab\0\0\0\3digest" + b"cd\0\0\1\0digest", np.uint8).reshape(2, -1)
    numbered = number_leaders(orders, 5, 6)
    assert [row.tobytes() for row in numbered] == [b"ab\x80\0\0\x08digest", b"cd\x80\0\1\5digest"]
    assert number_leaders(orders[:, :6], 5).tobytes() == b"ab\x80\0\0\x08cd\x80\0\1\5"
    assert orders[0].tobytes() == b"ab\0\0\0\3digest"
