"""Reading of the training text of an n-gram model: byte ranges of files, their lines, and chunks of numbered words.

A plain file is split into byte ranges, so that many workers read it; a range holds the lines that start in it. This is
the only step of the training that reads text.
"""

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
"""Size of a byte range of a plain file [bytes]."""
BLOCK_BYTES = 4 << 20
"""Size of the blocks that are read at once [bytes]."""


@dataclass(frozen=True)
class ByteRange:
    """The lines of a file that start in the byte range [start, end). A compressed file is one range with `end` None."""

    uri: str
    name: str
    start: int
    end: int | None


def find_ranges(paths: list[str], setting: str = "input", range_bytes: int = RANGE_BYTES) -> list[ByteRange]:
    """Return the byte ranges of all files that `paths` (paths or patterns) match.

    Raises a ConfigError that lists every path without a file. The message names the setting `train_lm.SETTING`.
    """
    if not paths:
        raise ConfigError(f"train_lm.{setting}: expected text files, got none. Set train_lm.{setting} to their paths.")
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
    """Yield the lines of a byte range as binary arrays, without line ends.

    Raises ContractError if a compressed file is corrupt.
    """
    fs, path = resolve_uri(part.uri)
    if part.end is None:
        try:
            with fs.open_input_stream(path, compression="gzip") as stream:
                yield from _lines(stream, None, block_bytes)
        except OSError as error:
            raise ContractError(
                f"{part.name}: expected a gzip file, got one that cannot be read ({error}). Replace the file by an "
                "intact copy."
            ) from error
        return
    with fs.open_input_file(path) as stream:
        if part.start:
            stream.seek(part.start - 1)
            if not _skip_line(stream, block_bytes, part):
                return
        yield from _lines(stream, part.end - stream.tell(), block_bytes)


def _skip_line(stream: Any, block_bytes: int, part: ByteRange) -> bool:
    """Move past the next newline. Return True if the new position is inside the byte range."""
    offset = stream.tell()
    while block := stream.read(block_bytes):
        newline = block.find(b"\n")
        if newline >= 0:
            stream.seek(offset + newline + 1)
            return bool(offset + newline + 1 < part.end)
        offset += len(block)
    return False


def _lines(stream: Any, remaining: int | None, block_bytes: int) -> Iterator[pa.Array]:
    """Yield the lines that start in the next `remaining` bytes (None = in the rest of the file)."""
    rest: list[bytes] = []
    while remaining is None or remaining > 0:
        block = stream.read(block_bytes if remaining is None else min(block_bytes, remaining))
        if not block:
            break
        remaining = None if remaining is None else remaining - len(block)
        last = block.rfind(b"\n")
        if last < 0:
            rest.append(block)
            continue
        yield _split(b"".join([*rest, block[:last]]))
        rest = [block[last + 1 :]] if last + 1 < len(block) else []
    if not rest:
        return
    while remaining is not None and (block := stream.read(block_bytes)):
        end = block.find(b"\n")
        rest.append(block if end < 0 else block[:end])
        if end >= 0:
            break
    yield _split(b"".join(rest))


def _split(text: bytes) -> pa.Array:
    return pc.split_pattern(pa.array([text], pa.binary()), pattern="\n").flatten()


def sha256_of(uri: str) -> str:
    """Return the SHA-256 (hex) of a file's bytes as stored, without decompression."""
    fs, path = resolve_uri(uri)
    digest = hashlib.sha256()
    with fs.open_input_stream(path, compression=None) as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# Chunks: lines of text as numbered words.
#
# Words are separated by spaces, tabs, carriage returns and null bytes, as in lmplz. A word is any bytes, UTF-8 or not.

RESERVED = (b"<s>", b"</s>", b"<unk>")
SPACES = np.arange(256, dtype=np.uint8)
"""Table from each byte to itself, except that the separators of words become spaces."""
SPACES[[0, 9, 13]] = ord(" ")


@dataclass(frozen=True)
class Chunk:
    """Some sentences as word numbers. Each chunk has its own numbering of words."""

    words: pa.Array
    """The distinct words (binary), numbered from 1."""
    line: npt.NDArray[np.int32]
    """The word numbers of all sentences, one sentence after the other; 0 ends a sentence."""


def make_chunks(lines: Iterable[pa.Array], num_tokens: int, reserved: Literal["refuse", "skip"]) -> Iterator[Chunk]:
    """Yield lines of text as chunks of about `num_tokens` words.

    Lines are binary or string arrays; nulls are skipped. Raises ContractError if `reserved` is "refuse" and the text
    contains a reserved word.
    """
    pending: list[pa.Array] = []
    num_pending = 0
    for batch in lines:
        split = split_words(batch)
        pending.append(split)
        num_pending += len(split.flatten())
        if num_pending >= num_tokens:
            yield _chunk(pending, reserved)
            pending, num_pending = [], 0
    if any(len(split) for split in pending):
        yield _chunk(pending, reserved)


def split_words(lines: pa.Array) -> pa.Array:
    """Return the words of each line as a list array. A value that contains newlines counts as several lines."""
    lines = lines.drop_null().cast(pa.binary())
    if lines.offset:
        lines = pa.concat_arrays([lines])
    _, offsets, data = lines.buffers()
    if data is None or not data.size:
        return pc.split_pattern(lines, pattern=" ")
    spaced = SPACES[np.frombuffer(data, np.uint8)]
    lines = pa.BinaryArray.from_buffers(pa.binary(), len(lines), [None, offsets, pa.py_buffer(spaced)])
    if (spaced == ord("\n")).any():
        lines = pc.split_pattern(lines, pattern="\n").flatten()
    return pc.split_pattern(lines, pattern=" ")


def _chunk(pending: list[pa.Array], reserved: Literal["refuse", "skip"]) -> Chunk:
    """Return a chunk with the words of split lines, except the empty words that adjacent spaces produce."""
    coded = pa.chunked_array([split.flatten() for split in pending], pa.binary()).dictionary_encode().combine_chunks()
    lengths = np.concatenate([pc.list_value_length(split).to_numpy() for split in pending]).astype(np.int64)
    if isinstance(coded, pa.ChunkedArray):  # the array has no chunk
        coded = pa.array([], pa.binary()).dictionary_encode()
    words, tokens = coded.dictionary, coded.indices.to_numpy()
    special = pc.is_in(words, pa.array(RESERVED, pa.binary())).to_numpy(zero_copy_only=False)
    if special.any() and reserved == "refuse":
        raise ContractError(
            f"train_lm: expected text without the reserved words <s>, </s> and <unk>, got "
            f"{words.filter(pa.array(special))[0].as_py().decode()}. Set train_lm.reserved_words = 'skip'."
        )
    left_out = special | pc.equal(words, b"").to_numpy(zero_copy_only=False)
    is_kept = ~left_out[tokens]
    ends = np.concatenate([[0], np.cumsum(is_kept)])[np.cumsum(lengths)]
    numbers = np.cumsum(~left_out)[tokens[is_kept]]
    return Chunk(words.filter(pa.array(~left_out)), np.insert(numbers, ends, 0).astype(np.int32))
