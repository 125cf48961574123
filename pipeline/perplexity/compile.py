"""ARPA file → model file: one file that holds words, n-grams and pieces, mapped by all workers and loaded by none.

The file is a line that names it, arrays at multiples of 64 bytes, then what they are as JSON. Memory while compiling is
bounded by the vocabulary and one stretch of an order's keys: n-grams go to disk by key first.
"""

import io
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

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

# ARPA files read as columns: a block of lines at a time, so that a file of any size needs little memory.

BLOCK_LINES = 1 << 18
COUNT_LINE = re.compile(rb"ngram (\d+)\s*=\s*(\d+)")
LINE_FORMAT = (
    "log10 probability, tab, words with single spaces between them, and, if there is one, tab, back-off weight"
)


@dataclass(frozen=True)
class ArpaBlock:
    """Some n-grams of one order."""

    words: pa.DictionaryArray
    """(n-grams · order,) one n-gram after the other."""
    probabilities: npt.NDArray[np.float32]
    """log10."""
    backoffs: npt.NDArray[np.float32]
    """log10; 0 where the file has none."""

    def codes(self) -> Keys:
        """(n-grams, order): the code of each word."""
        distinct = word_codes(self.words.dictionary.to_pylist())
        codes: Keys = distinct[self.words.indices.to_numpy()].reshape(len(self.probabilities), -1)
        return codes


class ArpaReader:
    """An open ARPA file, plain or compressed as its name says, read from the front to the end once."""

    def __init__(self, path: str):
        try:
            stream = pa.input_stream(path)
        except OSError as error:
            raise ConfigError(f"{path}: expected an ARPA file, got {error}. Give its path.") from error
        self._path = path
        self._lines = io.BufferedReader(stream, 1 << 20)
        self.counts = self._header()
        """Number of n-grams of each order, from 1 on."""

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def entries(self, order: int) -> Iterator[ArpaBlock]:
        """The n-grams of the order whose section comes next. Raises ContractError if they are not as expected."""
        left = self.counts[order - 1]
        self._expect(f"\\{order}-grams:")
        while left:
            lines = list(islice(self._lines, min(left, BLOCK_LINES)))
            if len(lines) < min(left, BLOCK_LINES):
                raise self._wrong(f"{self.counts[order - 1]} n-grams of order {order}", "the end of the file")
            left -= len(lines)
            yield self._parse(lines, order)
        if order == len(self.counts):
            self._expect("\\end\\")

    def _header(self) -> list[int]:
        self._expect("\\data\\")
        counts: list[int] = []
        while (line := self._lines.readline()).strip():
            found = COUNT_LINE.fullmatch(line.strip())
            if found is None or int(found[1]) != len(counts) + 1:
                raise self._wrong(f"`ngram {len(counts) + 1}=` and a number", line)
            counts.append(int(found[2]))
        if not counts or not counts[0]:
            raise self._wrong("the number of n-grams of each order", f"{counts}")
        return counts

    def _expect(self, expected: str) -> None:
        """The next line that is not blank."""
        while (line := self._lines.readline()) and not line.strip():
            pass
        if line.strip() != expected.encode():
            raise self._wrong(expected, line or "the end of the file")

    def _parse(self, lines: list[bytes], order: int) -> ArpaBlock:
        try:
            text = pa.array(lines, pa.string())
        except pa.ArrowInvalid as error:
            raise self._wrong("UTF-8", str(error)) from error
        fields = pc.split_pattern(pc.utf8_rtrim(text, "\r\n"), "\t")
        sizes = pc.list_value_length(fields).to_numpy()
        starts, flat = fields.offsets.to_numpy()[:-1], fields.values
        self._check((sizes == 2) | (sizes == 3), lines, LINE_FORMAT)
        words = pc.split_pattern(flat.take(pa.array(starts + 1)), " ")
        self._check(pc.list_value_length(words).to_numpy() == order, lines, f"{LINE_FORMAT}, for {order} words")
        backoffs = np.zeros(len(lines), np.float32)
        has = sizes == 3
        backoffs[has] = self._numbers(flat.take(pa.array(starts[has] + 2)))
        probabilities = self._numbers(flat.take(pa.array(starts)))
        good = (probabilities <= 0) & np.isfinite(probabilities) & np.isfinite(backoffs)
        self._check(good, lines, "a log10 probability, finite and at most 0")
        return ArpaBlock(words.values.dictionary_encode(), probabilities, backoffs)

    def _numbers(self, column: pa.StringArray) -> npt.NDArray[np.float32]:
        try:
            numbers: npt.NDArray[np.float32] = pc.cast(column, pa.float32()).to_numpy()
        except pa.ArrowInvalid as error:
            raise self._wrong("numbers", str(error)) from error
        return numbers

    def _check(self, good: npt.NDArray[np.bool_], lines: list[bytes], expected: str) -> None:
        if not good.all():
            raise self._wrong(expected, lines[int(good.argmin())])

    def _wrong(self, expected: str, found: Any) -> ContractError:
        shown = found.decode("utf-8", "replace").rstrip("\n") if isinstance(found, bytes) else found
        return ContractError(f"{self._path}: expected {expected}, got {shown!r}. Write the ARPA file again.")


STRETCH = 1 << 22
"""Entries that are sorted at once: 490 MB at the peak, measured with 6 million n-grams of order 5."""
MISSING_UNKNOWN = -100.0
"""log10 probability of an unknown word where the ARPA file has none: KenLM's."""


def compile_lm(
    arpa: str,
    out: str,
    spm: str | None,
    language: str,
    normalisation: Literal["ccnet", "none"] = "ccnet",
    percentiles: Mapping[str, float] | None = None,
) -> ModelHeader:
    """Write the model file `out` and return what it says of itself; equal n-grams give equal bytes.

    `spm` is the SentencePiece model whose pieces are the words of the ARPA file (None: its words stand between
    spaces), `percentiles` are perplexities of a sample by name, for the reader. Raises ContractError if the ARPA file
    does not hold together, ConfigError if there is none.
    """
    pieces = b"" if spm is None else _read_pieces(spm)
    source = ArpaReader(arpa)
    target = Path(out)
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("w+b") as sink, tempfile.TemporaryDirectory(dir=target.parent) as folder:
            writer = _Writer(sink)
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
                homes=tuple(table.homes for table in tables),
                closed=tuple(closed),
                percentiles=dict(percentiles or {}),
                arrays=writer.arrays,
            )
            writer.finish(header)
        partial.replace(target)
    finally:
        source.close()
        partial.unlink(missing_ok=True)
    return header


def _read_pieces(path: str) -> bytes:
    try:
        model = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: expected a SentencePiece model, got {error}. Give its path.") from error
    load_splitter(model, path)
    return model


class _Writer:
    """A model file that grows by one array after the other."""

    def __init__(self, sink: IO[bytes]):
        self._sink = sink
        self.arrays: dict[str, tuple[str, int, int]] = {}
        sink.write(MAGIC)

    def add(self, name: str, stretches: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Append an array that comes in stretches; returns it, mapped."""
        start = self._sink.tell() + -self._sink.tell() % ALIGNMENT
        self._sink.write(bytes(start - self._sink.tell()))
        kind = np.dtype(np.uint8)
        for stretch in stretches:
            kind = stretch.dtype
            self._sink.write(stretch.data)
        self._sink.flush()
        size = (self._sink.tell() - start) // kind.itemsize
        self.arrays[name] = (kind.str, size, start)
        return np.memmap(self._sink, kind, "r", start, (size,)) if size else np.zeros(0, kind)

    def finish(self, header: ModelHeader) -> None:
        """Append what the arrays are, and make all of it durable."""
        self._sink.write(header.to_bytes())
        self._sink.flush()
        os.fsync(self._sink.fileno())


def _write_words(source: ArpaReader, writer: _Writer, where: str) -> Keys:
    """Write the words, sorted by code, with their values; returns the codes."""
    blocks = [(entries.codes()[:, 0], entries) for entries in source.entries(1)]
    codes = np.concatenate([codes for codes, _ in blocks])
    entries = np.zeros(len(codes), ENTRY)
    entries["key"] = codes
    entries["probability"] = np.concatenate([block.probabilities for _, block in blocks])
    entries["backoff"] = np.concatenate([block.backoffs for _, block in blocks])
    begin, end, unknown = word_codes((BEGIN, END, UNKNOWN)).tolist()
    if absent := [name for name, code in ((BEGIN, begin), (END, end)) if code not in entries["key"]]:
        raise ContractError(f"{where}: expected {BEGIN} and {END}, got no {' and no '.join(absent)}. Train it again.")
    if unknown not in entries["key"]:
        added = np.array([(unknown, MISSING_UNKNOWN, 0.0)], ENTRY)
        entries = np.concatenate([entries, added])
    entries = _sorted(entries, where, 1)
    writer.add("words", [entries["key"].copy()])
    writer.add("unigrams", [np.stack([entries["probability"], entries["backoff"]], axis=1).view(np.uint64).ravel()])
    return entries["key"].copy()


def _write_order(
    source: ArpaReader, writer: _Writer, order: int, known: tuple[Keys, list[NgramTable], Path, str]
) -> tuple[NgramTable, bool]:
    """Write the table of one order; returns it, and whether what its n-grams begin and end with is in the model."""
    words, tables, folder, where = known
    count = source.counts[order - 1]
    parts = -(-count // STRETCH) or 1
    paths = [folder / f"{order}-{part}" for part in range(parts)]
    closed = True
    for block in source.entries(order):
        codes = block.codes()
        _check_words(codes, words, block, where)
        if order > 2 and closed:
            shorter = keys_of(codes[:, :-1]), keys_of(codes[:, 1:])
            closed = all(len(tables[-1].find(keys)[0]) == len(keys) for keys in shorter)
        _spill(keys_of(codes), block, paths)
    homes = max(1, int(HOME_SLOTS_PER_ENTRY * count))
    slots = writer.add(f"order {order}", build_slots(_sorted_parts(paths, where, order), homes))
    return NgramTable(homes, slots), closed


def _check_words(codes: Keys, words: Keys, block: ArpaBlock, where: str) -> None:
    known = words[np.minimum(np.searchsorted(words, codes), len(words) - 1)] == codes
    if not known.all():
        word = block.words[int(known.ravel().argmin())].as_py()
        raise ContractError(f"{where}: expected a 1-gram for every word, got none for {word!r}. Train it again.")


def _spill(keys: Keys, block: ArpaBlock, paths: list[Path]) -> None:
    """Append the n-grams of a block to the files of the stretches they belong to."""
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
    twice = int((entries["key"][1:] == entries["key"][:-1]).sum())
    if twice:
        raise ContractError(
            f"{where}: expected each {order}-gram once, got {twice} more than once (or, by a chance of less than "
            "one in 1,000 up to 100 million n-grams, with equal 64-bit keys). Train it again."
        )
    return entries
