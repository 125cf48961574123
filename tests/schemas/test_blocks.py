"""Files in blocks: what is read is what was written, and any other byte is refused by the number of its batch."""

from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

from schemas.blocks import BlockFile, BlockSums, parse_blocks
from schemas.errors import ContractError
from tests.support.tiny_dataset import write_blocks

SCHEMA = pa.schema([pa.field("a", pa.int16()), pa.field("b", pa.string())])
BATCHES = [[{"a": 1, "b": "x"}, {"a": 2, "b": None}], [], [{"a": 3, "b": "y" * 40}]]
FIX = "Build it again."


def opened(data: bytes, blocks: str) -> BlockFile:
    return BlockFile(pa.BufferReader(data), blocks, "f.arrow", FIX)


@pytest.fixture
def file(tmp_path: Path) -> tuple[bytes, str]:
    blocks = write_blocks(str(tmp_path / "f.arrow"), SCHEMA, BATCHES)
    return (tmp_path / "f.arrow").read_bytes(), blocks


def test_the_batches_of_a_file_are_read(file: tuple[bytes, str]) -> None:
    read = opened(*file)
    assert read.schema == SCHEMA
    assert [read.batch(number).to_pylist() for number in range(read.num_batches)] == BATCHES
    assert [read.unchecked_batch(number).num_rows for number in range(3)] == [2, 0, 1]
    assert sum(size for size, _ in parse_blocks(file[1], "")) == len(file[0])


def test_a_file_without_batches_has_a_schema(tmp_path: Path) -> None:
    blocks = write_blocks(str(tmp_path / "f.arrow"), SCHEMA, [])
    read = opened((tmp_path / "f.arrow").read_bytes(), blocks)
    assert (read.num_batches, read.schema) == (0, SCHEMA)


def test_every_changed_bit_of_a_batch_is_refused(file: tuple[bytes, str]) -> None:
    """The end of the file has a copy of the schema and the places of the batches; it is not read."""
    data, blocks = file
    ends = [size for size, _ in parse_blocks(blocks, "")]
    first, second, third = ends[0], sum(ends[:2]), sum(ends[:3])
    for position in range(third):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        number = 0 if position < first else 1 if position < second else 2
        with pytest.raises(ContractError, match=rf"^f.arrow: expected checksum \w{{8}} of record batch {number}, got "):
            [opened(bytes(damaged), blocks).batch(at) for at in range(3)]


def test_a_batch_is_compared_once_and_only_when_it_is_read(file: tuple[bytes, str]) -> None:
    data, blocks = file
    damaged = bytearray(data)
    damaged[sum(size for size, _ in parse_blocks(blocks, "")[:3]) - 30] ^= 1
    read = opened(bytes(damaged), blocks)
    assert read.batch(0).to_pylist() == BATCHES[0]
    with pytest.raises(ContractError, match=r"record batch 2, got \w{8}\. Build it again\."):
        read.batch(2)
    known = BlockFile(pa.BufferReader(bytes(damaged)), blocks, "f.arrow", FIX, {0, 1, 2})
    assert known.batch(2).num_rows == 1


def test_a_file_of_another_size_is_refused(file: tuple[bytes, str]) -> None:
    data, blocks = file
    with pytest.raises(ContractError, match=f"expected a file of {len(data)} bytes, got {len(data) - 1}"):
        opened(data[:-1], blocks)


@pytest.mark.parametrize("text", ["", "x", "1:2:3", "12", "-8:00000000", "é:1"])
def test_a_damaged_list_of_blocks_is_named(text: str) -> None:
    with pytest.raises(ContractError, match=r"^f: expected a list of blocks such as 1f8:9a0b1c2d, got "):
        parse_blocks(text, "f")


def test_the_text_of_blocks_by_hand() -> None:
    sums = BlockSums()
    for data in (b"12345", b"6789"):
        sums.add(memoryview(data))
    sums.end_block()
    sums.end_block()
    digests = [xxhash.xxh3_64_hexdigest(data) for data in (b"123456789", b"")]
    assert digests[1] == "2d06800538d394c2"  # of no bytes, in the test vectors of xxHash
    assert sums.text == f"9:{digests[0][8:]} 0:38d394c2"
    assert parse_blocks(sums.text, "") == [(9, int(digests[0][8:], 16)), (0, 0x38D394C2)]
