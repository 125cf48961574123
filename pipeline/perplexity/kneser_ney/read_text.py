"""Input files as byte ranges, and the lines that begin in each: big plain files are read by many workers."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from schemas.errors import ConfigError, ContractError
from schemas.storage import resolve_uri

RANGE_BYTES = 32 << 20
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class ByteRange:
    """The lines of a file that begin in [start, end); a compressed file is one range."""

    uri: str
    name: str
    start: int
    end: int | None


def find_ranges(paths: list[str], setting: str = "input", range_bytes: int = RANGE_BYTES) -> list[ByteRange]:
    """The ranges of all files that the paths and patterns of a setting stand for.

    Raises ConfigError that names each wrong one.
    """
    if not paths:
        raise ConfigError(f"train_lm.{setting}: expected files of text, got none. Name at least one.")
    try:
        files = find_splits(SourceConfig.model_validate({"name": "text", "paths": paths, "format": "jsonl"}))
    except ConfigError as error:
        raise ConfigError(str(error).replace("source.paths", f"train_lm.{setting}", 1)) from error
    ranges: list[ByteRange] = []
    for file in files:
        if file.name.lower().endswith(".gz"):
            ranges.append(ByteRange(file.uri, file.name, 0, None))
            continue
        for start in range(0, max(1, file.size), range_bytes):
            ranges.append(ByteRange(file.uri, file.name, start, min(start + range_bytes, file.size)))
    return ranges


def read_lines(part: ByteRange, block_bytes: int = BLOCK_BYTES) -> Iterator[pa.Array]:
    """The lines of a range, as arrays of binary without line ends; a last line without one counts as a line.

    Raises ContractError if a compressed file is broken.
    """
    fs, path = resolve_uri(part.uri)
    if part.end is None:
        try:
            with fs.open_input_stream(path, compression="gzip") as stream:
                yield from _lines(stream, None, block_bytes)
        except OSError as error:
            raise ContractError(f"{part.name}: expected gzip, got {error}. Replace the file.") from error
        return
    with fs.open_input_file(path) as stream:
        if part.start:
            stream.seek(part.start - 1)
            if not _skip_line(stream, block_bytes, part):
                return
        yield from _lines(stream, part.end - stream.tell(), block_bytes)


def _skip_line(stream: Any, block_bytes: int, part: ByteRange) -> bool:
    """Move behind the line that the byte before the range belongs to; whether another begins in the range."""
    at = stream.tell()
    while block := stream.read(block_bytes):
        found = block.find(b"\n")
        if found >= 0:
            stream.seek(at + found + 1)
            return bool(at + found + 1 < part.end)
        at += len(block)
    return False


def _lines(stream: Any, left: int | None, block_bytes: int) -> Iterator[pa.Array]:
    """Lines until `left` bytes are read and the line at hand has ended; None: to the end."""
    rest: list[bytes] = []
    while left is None or left > 0:
        block = stream.read(block_bytes if left is None else min(block_bytes, left))
        if not block:
            break
        left = None if left is None else left - len(block)
        last = block.rfind(b"\n")
        if last < 0:
            rest.append(block)
            continue
        yield _split(b"".join([*rest, block[:last]]))
        rest = [block[last + 1 :]] if last + 1 < len(block) else []
    if not rest:
        return
    while left is not None and (block := stream.read(block_bytes)):
        end = block.find(b"\n")
        rest.append(block if end < 0 else block[:end])
        if end >= 0:
            break
    yield _split(b"".join(rest))


def _split(text: bytes) -> pa.Array:
    return pc.split_pattern(pa.array([text], pa.binary()), pattern="\n").flatten()


def sha256_of(uri: str) -> str:
    """The SHA-256 (hex) of a file as it lies there, read in blocks."""
    fs, path = resolve_uri(uri)
    digest = hashlib.sha256()
    with fs.open_input_stream(path, compression=None) as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# Lines of text as chunks of word numbers: the only step that sees text.
#
# Words stand between spaces, tabs, carriage returns and null bytes, as for lmplz; a word is bytes, UTF-8 or not.

RESERVED = (b"<s>", b"</s>", b"<unk>")
SPACES = np.arange(256, dtype=np.uint8)
SPACES[[0, 9, 13]] = ord(" ")


@dataclass(frozen=True)
class Chunk:
    """Some sentences whose words are numbered by themselves."""

    words: pa.Array
    """Each word once (binary); the first has the number 1."""
    line: npt.NDArray[np.int32]
    """The numbers of all words, sentence after sentence; 0 ends a sentence."""


def make_chunks(lines: Iterable[pa.Array], num_tokens: int, reserved: Literal["refuse", "skip"]) -> Iterator[Chunk]:
    """The lines (binary or string arrays; nulls are left out) as chunks of about `num_tokens` words.

    Raises ContractError if reserved words are to be refused and one occurs.
    """
    pending: list[pa.Array] = []
    held = 0
    for batch in lines:
        split = split_words(batch)
        pending.append(split)
        held += len(split.flatten())
        if held >= num_tokens:
            yield _chunk(pending, reserved)
            pending, held = [], 0
    if any(len(split) for split in pending):
        yield _chunk(pending, reserved)


def split_words(lines: pa.Array) -> pa.Array:
    """The words of each line as a list array; a line feed inside a value ends a sentence like any other."""
    lines = lines.drop_null().cast(pa.binary())
    if lines.offset:
        lines = pa.concat_arrays([lines])
    _, offsets, data = lines.buffers()
    if data is None or not data.size:
        return pc.split_pattern(lines, pattern=" ")
    plain = SPACES[np.frombuffer(data, np.uint8)]
    lines = pa.BinaryArray.from_buffers(pa.binary(), len(lines), [None, offsets, pa.py_buffer(plain)])
    if (plain == ord("\n")).any():
        lines = pc.split_pattern(lines, pattern="\n").flatten()
    return pc.split_pattern(lines, pattern=" ")


def _chunk(pending: list[pa.Array], reserved: Literal["refuse", "skip"]) -> Chunk:
    """One chunk of split lines; empty words, which stand between two spaces, are left out."""
    coded = pa.chunked_array([split.flatten() for split in pending], pa.binary()).dictionary_encode().combine_chunks()
    lengths = np.concatenate([pc.list_value_length(split).to_numpy() for split in pending]).astype(np.int64)
    if isinstance(coded, pa.ChunkedArray):  # no chunk at all
        coded = pa.array([], pa.binary()).dictionary_encode()
    words, tokens = coded.dictionary, coded.indices.to_numpy()
    special = pc.is_in(words, pa.array(RESERVED, pa.binary())).to_numpy(zero_copy_only=False)
    if special.any() and reserved == "refuse":
        raise ContractError(
            f"train_lm: expected text without the reserved words <s>, </s> and <unk>, got "
            f"{words.filter(pa.array(special))[0].as_py().decode()}. Remove them or set reserved_words to skip."
        )
    left_out = special | pc.equal(words, b"").to_numpy(zero_copy_only=False)
    stays = ~left_out[tokens]
    ends = np.concatenate([[0], np.cumsum(stays)])[np.cumsum(lengths)]
    numbers = np.cumsum(~left_out)[tokens[stays]]
    return Chunk(words.filter(pa.array(~left_out)), np.insert(numbers, ends, 0).astype(np.int32))
