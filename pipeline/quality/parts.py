"""The parts of one text that its signals are taken from: lines, pieces between whitespace, words; each found once."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.text.words import Ints, Reader, Vocabulary, Words


class Parts:
    """A text and what it falls into, as far as somebody asks."""

    def __init__(self, text: str, vocabulary: Vocabulary):
        self.text = text
        self.vocabulary = vocabulary
        self._read: dict[Reader, list[npt.NDArray[Any]]] = {}

    @cached_property
    def lines(self) -> list[str]:
        """The lines with their ends, as `splitlines` finds them."""
        return self.text.splitlines(keepends=True)

    @cached_property
    def _pieces(self) -> tuple[list[int], Ints]:
        pieces = [line.split() for line in self.lines]
        return list(map(len, pieces)), self.vocabulary.numbers(list(chain.from_iterable(pieces)))

    @property
    def counts(self) -> list[int]:
        """Number of pieces on each line."""
        return self._pieces[0]

    @property
    def numbers(self) -> Ints:
        """The vocabulary's number of each piece."""
        return self._pieces[1]

    @cached_property
    def words(self) -> Words:
        """The words of the language."""
        return self.vocabulary.words(self.numbers)

    @cached_property
    def lowered(self) -> str:
        """The text in lower case."""
        return self.text.lower()

    def read(self, reader: Reader) -> list[npt.NDArray[Any]]:
        """What a reader says of the pieces, asked once."""
        found = self._read.get(reader)
        if found is None:
            found = self._read[reader] = self.vocabulary.look_up(reader, self.numbers)[1]
        return found

    def only(self, lines: Sequence[int], text: str) -> "Parts":
        """The parts of `text`, which holds these lines and no others, pieces and all."""
        rest = Parts(text, self.vocabulary)
        counts = [self.counts[line] for line in lines]
        if sum(counts) == len(self.numbers):
            rest.__dict__ |= {"_pieces": (counts, self.numbers), "words": self.words}
            return rest
        keep = np.zeros(len(self.counts), bool)
        keep[lines] = True
        rest.__dict__["_pieces"] = counts, self.numbers[np.repeat(keep, self.counts)]
        return rest
