"""ARPA files read as columns: a block of lines at a time, so that a file of any size needs little memory."""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.perplexity.table import Keys, word_codes
from schemas.errors import ConfigError, ContractError

BLOCK_LINES = 1 << 18
COUNT = re.compile(rb"ngram (\d+)\s*=\s*(\d+)")
FORM = "log10 probability, tab, words with single spaces between them, and, if there is one, tab, back-off weight"


@dataclass(frozen=True)
class Entries:
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


class Arpa:
    """An open ARPA file, plain or compressed as its name says, read from the front to the end once."""

    def __init__(self, path: str):
        try:
            stream = pa.input_stream(path)
        except OSError as error:
            raise ConfigError(f"{path}: promised an ARPA file, found {error}; give its path") from error
        self._path = path
        self._lines = io.BufferedReader(stream, 1 << 20)
        self.counts = self._header()
        """Number of n-grams of each order, from 1 on."""

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def entries(self, order: int) -> Iterator[Entries]:
        """The n-grams of the order whose section comes next. Raises ContractError if they are not as promised."""
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
            found = COUNT.fullmatch(line.strip())
            if found is None or int(found[1]) != len(counts) + 1:
                raise self._wrong(f"`ngram {len(counts) + 1}=` and a number", line)
            counts.append(int(found[2]))
        if not counts or not counts[0]:
            raise self._wrong("the number of n-grams of each order", f"{counts}")
        return counts

    def _expect(self, promised: str) -> None:
        """The next line that is not blank."""
        while (line := self._lines.readline()) and not line.strip():
            pass
        if line.strip() != promised.encode():
            raise self._wrong(promised, line or "the end of the file")

    def _parse(self, lines: list[bytes], order: int) -> Entries:
        try:
            text = pa.array(lines, pa.string())
        except pa.ArrowInvalid as error:
            raise self._wrong("UTF-8", str(error)) from error
        fields = pc.split_pattern(pc.utf8_rtrim(text, "\r\n"), "\t")
        sizes = pc.list_value_length(fields).to_numpy()
        starts, flat = fields.offsets.to_numpy()[:-1], fields.values
        self._check((sizes == 2) | (sizes == 3), lines, FORM)
        words = pc.split_pattern(flat.take(pa.array(starts + 1)), " ")
        self._check(pc.list_value_length(words).to_numpy() == order, lines, f"{FORM}, for {order} words")
        backoffs = np.zeros(len(lines), np.float32)
        has = sizes == 3
        backoffs[has] = self._numbers(flat.take(pa.array(starts[has] + 2)))
        probabilities = self._numbers(flat.take(pa.array(starts)))
        good = (probabilities <= 0) & np.isfinite(probabilities) & np.isfinite(backoffs)
        self._check(good, lines, "a log10 probability, finite and at most 0")
        return Entries(words.values.dictionary_encode(), probabilities, backoffs)

    def _numbers(self, column: pa.StringArray) -> npt.NDArray[np.float32]:
        try:
            numbers: npt.NDArray[np.float32] = pc.cast(column, pa.float32()).to_numpy()
        except pa.ArrowInvalid as error:
            raise self._wrong("numbers", str(error)) from error
        return numbers

    def _check(self, good: npt.NDArray[np.bool_], lines: list[bytes], promised: str) -> None:
        if not good.all():
            raise self._wrong(promised, lines[int(good.argmin())])

    def _wrong(self, promised: str, found: Any) -> ContractError:
        shown = found.decode("utf-8", "replace").rstrip("\n") if isinstance(found, bytes) else found
        return ContractError(f"{self._path}: promised {promised}, found {shown!r}; write the ARPA file again")
