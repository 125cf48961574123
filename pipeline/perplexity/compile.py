"""Compilation of an ARPA file to a memory-mappable model file of words, n-grams and a SentencePiece model.

The file is a magic line, arrays at multiples of 64 bytes, then a JSON header that describes the arrays. Memory is
bounded by the vocabulary and one block of an order's n-grams, which are first divided by ranges of keys on disk.
"""

import io
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.perplexity.model import (
    ALIGNMENT,
    BEGIN,
    END,
    ENTRY,
    HOME_SLOTS_PER_ENTRY,
    MAGIC,
    UNKNOWN,
    Keys,
    ModelHeader,
    NgramTable,
    build_slots,
    key_range,
    keys_of,
    load_splitter,
    word_codes,
)
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store

# Reading of ARPA files as columns, a block of lines at a time, so that a file of any size needs little memory.

TRAIN_AGAIN = "Train the model again with `penstock train-lm`."
SET_PIECES = "Set lm.pieces to the file of a SentencePiece model."
BLOCK_LINES = 1 << 18
"""Number of lines of an ARPA file that are parsed at once."""
COUNT_LINE = re.compile(rb"ngram (\d+)\s*=\s*(\d+)")
LINE_FORMAT = (
    "log10 probability, tab, words with single spaces between them, and, if there is one, tab, back-off weight"
)


@dataclass(frozen=True)
class ArpaBlock:
    """Some n-grams of one order, read from consecutive lines of an ARPA file."""

    words: pa.DictionaryArray
    """The words of all n-grams, one n-gram after the other, (n-grams · order,)."""
    probabilities: npt.NDArray[np.float32]
    """log10 probability of each n-gram."""
    backoffs: npt.NDArray[np.float32]
    """log10 back-off weight of each n-gram; 0 where the file has none."""

    def codes(self) -> Keys:
        """Return the xxh64 hash code of each word, as an array (n-grams, order)."""
        distinct = word_codes(self.words.dictionary.to_pylist())
        codes: Keys = distinct[self.words.indices.to_numpy()].reshape(len(self.probabilities), -1)
        return codes


class ArpaReader:
    """Reads an ARPA file once, from start to end; a suffix of the path such as `.gz` selects the decompression."""

    def __init__(self, path: str):
        try:
            stream = pa.input_stream(path)
        except OSError as error:
            raise ConfigError(
                f"{path}: expected an ARPA file, got one that cannot be read ({error}). {TRAIN_AGAIN}"
            ) from error
        self._path = path
        self._lines = io.BufferedReader(stream, 1 << 20)
        self.counts = self._header()
        """Number of n-grams of each order, from 1 on."""

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def entries(self, order: int) -> Iterator[ArpaBlock]:
        """Yield the n-grams of one order in blocks. The orders must be read one after the other, from 1 on.

        Raises ContractError if the section of this order is missing or malformed.
        """
        num_remaining = self.counts[order - 1]
        self._expect(f"\\{order}-grams:")
        while num_remaining:
            lines = list(islice(self._lines, min(num_remaining, BLOCK_LINES)))
            if len(lines) < min(num_remaining, BLOCK_LINES):
                raise self._error(f"{self.counts[order - 1]} n-grams of order {order}", "the end of the file")
            num_remaining -= len(lines)
            yield self._parse(lines, order)
        if order == len(self.counts):
            self._expect("\\end\\")

    def _header(self) -> list[int]:
        self._expect("\\data\\")
        counts: list[int] = []
        while (line := self._lines.readline()).strip():
            match = COUNT_LINE.fullmatch(line.strip())
            if match is None or int(match[1]) != len(counts) + 1:
                raise self._error(f"`ngram {len(counts) + 1}=` and a number", line)
            counts.append(int(match[2]))
        if not counts or not counts[0]:
            raise self._error("the number of n-grams of each order", f"{counts}")
        return counts

    def _expect(self, expected: str) -> None:
        while (line := self._lines.readline()) and not line.strip():
            pass
        if line.strip() != expected.encode():
            raise self._error(expected, line or "the end of the file")

    def _parse(self, lines: list[bytes], order: int) -> ArpaBlock:
        try:
            text = pa.array(lines, pa.string())
        except pa.ArrowInvalid as error:
            raise self._error("UTF-8", str(error)) from error
        fields = pc.split_pattern(pc.utf8_rtrim(text, "\r\n"), "\t")
        sizes = pc.list_value_length(fields).to_numpy()
        starts, flat = fields.offsets.to_numpy()[:-1], fields.values
        self._check((sizes == 2) | (sizes == 3), lines, LINE_FORMAT)
        words = pc.split_pattern(flat.take(pa.array(starts + 1)), " ")
        self._check(pc.list_value_length(words).to_numpy() == order, lines, f"{LINE_FORMAT}, for {order} words")
        backoffs = np.zeros(len(lines), np.float32)
        has_backoff = sizes == 3
        backoffs[has_backoff] = self._numbers(flat.take(pa.array(starts[has_backoff] + 2)))
        probabilities = self._numbers(flat.take(pa.array(starts)))
        is_valid = (probabilities <= 0) & np.isfinite(probabilities) & np.isfinite(backoffs)
        self._check(is_valid, lines, "a log10 probability, finite and at most 0")
        return ArpaBlock(words.values.dictionary_encode(), probabilities, backoffs)

    def _numbers(self, column: pa.StringArray) -> npt.NDArray[np.float32]:
        try:
            numbers: npt.NDArray[np.float32] = pc.cast(column, pa.float32()).to_numpy()
        except pa.ArrowInvalid as error:
            raise self._error("numbers", str(error)) from error
        return numbers

    def _check(self, is_valid: npt.NDArray[np.bool_], lines: list[bytes], expected: str) -> None:
        if not is_valid.all():
            raise self._error(expected, lines[int(is_valid.argmin())])

    def _error(self, expected: str, value: Any) -> ContractError:
        text = value.decode("utf-8", "replace").rstrip("\n") if isinstance(value, bytes) else value
        return ContractError(f"{self._path}: expected {expected}, got {text!r}. {TRAIN_AGAIN}")


# Writing of the model file.

ENTRIES_AT_ONCE = 1 << 22
"""Number of n-grams that are sorted at once: 490 MB at the peak, measured with 6 million n-grams of order 5."""
MISSING_UNKNOWN = -100.0
"""log10 probability of an unknown word if the ARPA file has none, as in KenLM."""


def compile_lm(
    arpa: str,
    out: str,
    spm: str | None,
    language: str,
    normalisation: Literal["ccnet", "none"] = "ccnet",
    percentiles: Mapping[str, float] | None = None,
) -> ModelHeader:
    """Compile an ARPA file to the model file `out`, and return the header of the model file.

    `spm` is the path of the SentencePiece model whose pieces are the words of the ARPA file. None = the words were
    separated by spaces. `percentiles` has percentiles of perplexities by name; the header stores them. Raises
    ContractError if the ARPA file is malformed, ConfigError if it does not exist.
    """
    pieces = b"" if spm is None else _read_pieces(spm)
    target = Path(out)
    with (
        closing(ArpaReader(arpa)) as source,
        _ModelWriter(target) as writer,
        tempfile.TemporaryDirectory(dir=target.parent) as folder,
    ):
        words = _write_words(source, writer, arpa)
        tables: list[NgramTable] = []
        closed = []
        for order in range(2, len(source.counts) + 1):
            table, is_closed = _write_order(source, writer, order, (words, tables, Path(folder), arpa))
            tables.append(table)
            closed.append(is_closed)
        writer.add("pieces", [np.frombuffer(pieces, np.uint8)])
        header = ModelHeader(
            language=language,
            normalisation=normalisation,
            counts=tuple(source.counts),
            homes=tuple(table.num_home_slots for table in tables),
            closed=tuple(closed),
            percentiles=dict(percentiles or {}),
            arrays=writer.arrays,
        )
        writer.finish(header)
    return header


def _read_pieces(path: str) -> bytes:
    try:
        model = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a SentencePiece model, got a file that cannot be read ({error}). {SET_PIECES}"
        ) from error
    load_splitter(model, path, SET_PIECES)
    return model


class _ModelWriter:
    """A context manager that writes a model file, array by array. An exception removes the unfinished file."""

    def __init__(self, target: Path):
        self._target = target
        self._partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.partial")
        self._sink = self._partial.open("w+b")
        self._sink.write(MAGIC)
        self.arrays: dict[str, tuple[str, int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._sink.close()
        if kind is None:
            Store(str(self._target.parent)).move(self._partial.name, self._target.name)
        self._partial.unlink(missing_ok=True)

    def add(self, name: str, blocks: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Append an array to the file, block by block. Return the array, memory-mapped from the file."""
        start = self._sink.tell() + -self._sink.tell() % ALIGNMENT
        self._sink.write(bytes(start - self._sink.tell()))
        kind = np.dtype(np.uint8)
        for block in blocks:
            kind = block.dtype
            self._sink.write(block.data)
        self._sink.flush()
        size = (self._sink.tell() - start) // kind.itemsize
        self.arrays[name] = (kind.str, size, start)
        return np.memmap(self._sink, kind, "r", start, (size,)) if size else np.zeros(0, kind)

    def finish(self, header: ModelHeader) -> None:
        """Append the header and sync the file."""
        self._sink.write(header.to_bytes())
        self._sink.flush()
        os.fsync(self._sink.fileno())


def _write_words(source: ArpaReader, writer: _ModelWriter, where: str) -> Keys:
    """Write all words with their probabilities and back-off weights; return their hash codes, sorted."""
    blocks = [(entries.codes()[:, 0], entries) for entries in source.entries(1)]
    codes = np.concatenate([codes for codes, _ in blocks])
    entries = np.zeros(len(codes), ENTRY)
    entries["key"] = codes
    entries["probability"] = np.concatenate([block.probabilities for _, block in blocks])
    entries["backoff"] = np.concatenate([block.backoffs for _, block in blocks])
    begin, end, unknown = word_codes((BEGIN, END, UNKNOWN)).tolist()
    if absent := [name for name, code in ((BEGIN, begin), (END, end)) if code not in entries["key"]]:
        raise ContractError(f"{where}: expected {BEGIN} and {END}, got no {' and no '.join(absent)}. {TRAIN_AGAIN}")
    if unknown not in entries["key"]:
        added = np.array([(unknown, MISSING_UNKNOWN, 0.0)], ENTRY)
        entries = np.concatenate([entries, added])
    entries = _sorted(entries, where, 1)
    writer.add("words", [entries["key"].copy()])
    writer.add("unigrams", [np.stack([entries["probability"], entries["backoff"]], axis=1).view(np.uint64).ravel()])
    return entries["key"].copy()


def _write_order(
    source: ArpaReader, writer: _ModelWriter, order: int, context: tuple[Keys, list[NgramTable], Path, str]
) -> tuple[NgramTable, bool]:
    """Write the hash table of the n-grams of one order. Return the table, and True if the order is closed.

    An order is closed if the model contains the prefix and the suffix of each of its n-grams. `context` has the hash
    codes of all words, the tables of lower orders, a scratch folder and the path of the ARPA file.
    """
    words, tables, folder, where = context
    count = source.counts[order - 1]
    parts = -(-count // ENTRIES_AT_ONCE) or 1
    paths = [folder / f"{order}-{part}" for part in range(parts)]
    closed = True
    for block in source.entries(order):
        codes = block.codes()
        _check_words(codes, words, block, where)
        if order > 2 and closed:
            shorter = keys_of(codes[:, :-1]), keys_of(codes[:, 1:])
            closed = all(len(tables[-1].find(keys)[0]) == len(keys) for keys in shorter)
        _spill(keys_of(codes), block, paths)
    num_home_slots = max(1, int(HOME_SLOTS_PER_ENTRY * count))
    slots = writer.add(f"order {order}", build_slots(_sorted_parts(paths, where, order), num_home_slots))
    return NgramTable(num_home_slots, slots), closed


def _check_words(codes: Keys, words: Keys, block: ArpaBlock, where: str) -> None:
    is_known = words[np.minimum(np.searchsorted(words, codes), len(words) - 1)] == codes
    if not is_known.all():
        word = block.words[int(is_known.ravel().argmin())].as_py()
        raise ContractError(f"{where}: expected a 1-gram for every word, got none for {word!r}. {TRAIN_AGAIN}")


def _spill(keys: Keys, block: ArpaBlock, paths: list[Path]) -> None:
    """Append the n-grams of a block to scratch files. Each file holds the n-grams of one range of keys."""
    entries = np.zeros(len(keys), ENTRY)
    entries["key"], entries["probability"], entries["backoff"] = keys, block.probabilities, block.backoffs
    numbers = key_range(keys, len(paths))
    entries, numbers = entries[order := np.argsort(numbers, kind="stable")], numbers[order]
    bounds = np.searchsorted(numbers, np.arange(len(paths) + 1))
    for path, start, end in zip(paths, bounds, bounds[1:]):
        with path.open("ab") as stream:
            stream.write(entries[start:end].tobytes())


def _sorted_parts(paths: list[Path], where: str, order: int) -> Iterator[npt.NDArray[np.void]]:
    for path in paths:
        if path.exists():
            yield _sorted(np.fromfile(path, ENTRY), where, order)
            path.unlink()


def _sorted(entries: npt.NDArray[np.void], where: str, order: int) -> npt.NDArray[np.void]:
    entries = entries[np.argsort(entries["key"])]
    num_repeated = int((entries["key"][1:] == entries["key"][:-1]).sum())
    if num_repeated:
        # Different n-grams can have equal 64-bit keys: probability below 0.001 for up to 100 million n-grams.
        raise ContractError(
            f"{where}: expected each {order}-gram once, got {num_repeated} repeated {order}-grams. {TRAIN_AGAIN}"
        )
    return entries
