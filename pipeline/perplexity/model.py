"""A compiled n-gram language model: log10 probabilities of sentences, many look-ups at a time.

The file is mapped, so the workers of a machine share its pages. Probabilities are those of back-off models in ARPA
form: of the longest n-gram that the model has, times the back-off weights of the contexts it does not continue.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.perplexity.table import EVEN, Keys, Table, factor, word_codes
from pipeline.perplexity.text import load_pieces, normalise, words
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
ALIGNMENT = 64
MAGIC = b"penstock n-gram model 1\n".ljust(ALIGNMENT)
TAIL = 8
"""Bytes at the end of the file: the size of the JSON before them."""
GROUP_CHARS = 1 << 18
"""Text that is looked up at once: a longer one only takes more memory."""
REMEMBERED = 1 << 18
"""Words whose number is remembered."""


class Header(BaseModel):
    """What a model file says of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    language: str
    """Language of the training text."""
    normalisation: Literal["ccnet", "none"]
    """What is done to text before it is cut into pieces."""
    counts: tuple[int, ...]
    """Number of n-grams of each order, from 1 on."""
    homes: tuple[int, ...]
    """Places of the table of each order, from 2 on."""
    closed: tuple[bool, ...]
    """For each order from 2 on: whether the model has both shorter n-grams of each of its n-grams."""
    percentiles: dict[str, float]
    """Perplexities of a sample, by name."""
    arrays: dict[str, tuple[str, int, int]]
    """Type, length and offset [bytes] of each array of the file."""

    def to_bytes(self) -> bytes:
        """The end of a model file."""
        text = canonical_json(self.model_dump(mode="json"))
        return text + len(text).to_bytes(TAIL, "little")


@dataclass(frozen=True)
class Scores:
    """What a model says of sentences."""

    log10: Floats
    """(sentences,) log10 probability, the sentence end included."""
    tokens: Ints
    """(sentences,) number of tokens, the sentence end included; 0 for a line without words, which is not scored."""


class _Numbers(dict[str, int]):
    """Word → its number in the model; words of a text that look like markers are unknown ones."""

    def __init__(self, codes: Keys):
        self._codes = codes
        self.begin, self.end, self.unknown = np.searchsorted(codes, word_codes((BEGIN, END, UNKNOWN))).tolist()

    def __missing__(self, word: str) -> int:
        if len(self) > REMEMBERED:
            self.clear()
        code = word_codes((word,))[0]
        number = int(np.searchsorted(self._codes, code))
        known = number < len(self._codes) and self._codes[number] == code and number not in (self.begin, self.end)
        self[word] = number if known else self.unknown
        return self[word]


class LanguageModel:
    """An open model file."""

    def __init__(self, path: str):
        self.header, arrays = _read(path)
        self._words: Keys = arrays["words"]
        self._unigrams: Keys = arrays["unigrams"]
        self._tables = [
            Table(homes, arrays[f"order {order}"]) for order, homes in enumerate(self.header.homes, start=2)
        ]
        self._numbers = _Numbers(self._words)
        model = arrays["pieces"].tobytes()
        self._cut = load_pieces(model, path) if model else words

    def score_text(self, text: str) -> Scores:
        """The scores of each line of a text; a line without words is not scored."""
        if self.header.normalisation == "ccnet":
            text = normalise(text)
        else:
            text = text.encode("utf-8", "replace").decode()  # halves of surrogate pairs have no UTF-8
        return score_lines(self, text.split("\n"))

    def cut(self, lines: Sequence[str]) -> list[list[str]]:
        """The words that the model knows lines by."""
        return self._cut(lines)

    def score(self, sentences: Sequence[Sequence[str]]) -> Scores:
        """The scores of sentences given as words."""
        tokens = np.fromiter(map(len, sentences), np.int64, len(sentences)) + 1
        if not len(tokens):
            return Scores(np.zeros(0), tokens)
        ends = np.cumsum(tokens + 1) - 1
        starts = ends - tokens
        numbers = np.empty(int(ends[-1]) + 1, np.int64)
        inside = np.ones(len(numbers), bool)
        inside[starts] = inside[ends] = False
        numbers[starts], numbers[ends] = self._numbers.begin, self._numbers.end
        numbers[inside] = np.fromiter(
            map(self._numbers.__getitem__, chain.from_iterable(sentences)), np.int64, int(tokens.sum()) - len(tokens)
        )
        scores = self._positions(numbers, starts)
        scores[starts] = 0
        return Scores(np.add.reduceat(scores, starts), tokens)

    def _positions(self, numbers: Ints, starts: Ints) -> Floats:
        """The log10 probability of each word after those before it; what stands at the starts means nothing.

        Order by order, a word's score is that of the longer n-gram if the model has it, else that of the shorter one
        and the back-off weight of the context. A word has a longer n-gram only where both shorter ones were found.
        """
        values = self._unigrams[numbers].view(np.float32).reshape(-1, 2)
        scores, backoffs = values[:, 0].astype(np.float64), values[:, 1].astype(np.float64)
        codes = self._words[numbers]
        keys = codes.copy()
        depth = np.arange(len(numbers)) - np.repeat(starts, np.diff(starts, append=len(numbers)))
        found = depth > 0
        for distance, (table, closed) in enumerate(zip(self._tables, self.header.closed), start=1):
            scores[1:] += backoffs[:-1]
            keys[distance:] += codes[:-distance] * factor(distance)
            where = depth >= distance
            if closed and distance > 1:
                where &= found
                where[1:] &= found[:-1]
            at = np.flatnonzero(where)
            hits, values = table.find(keys[at] & EVEN)
            at = at[hits]
            scores[at] = values[:, 0]
            backoffs = np.zeros(len(numbers))
            backoffs[at] = values[:, 1]
            found = np.zeros(len(numbers), bool)
            found[at] = True
        return scores


def score_lines(model: Any, lines: Sequence[str]) -> Scores:
    """The scores of lines by a model that has `cut` and `score`, a bounded piece of the text at a time."""
    parts = []
    for group in _groups(lines):
        sentences = model.cut(group)
        scores = model.score([pieces for pieces in sentences if pieces])
        has = np.fromiter(map(len, sentences), np.int64, len(sentences)) > 0
        log10, tokens = np.zeros(len(group)), np.zeros(len(group), np.int64)
        log10[has], tokens[has] = scores.log10, scores.tokens
        parts.append(Scores(log10, tokens))
    return Scores(np.concatenate([part.log10 for part in parts]), np.concatenate([part.tokens for part in parts]))


def _groups(lines: Sequence[str]) -> list[Sequence[str]]:
    """The lines in groups of about GROUP_CHARS characters, at least one."""
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths + 1) // GROUP_CHARS)) + 1
    return [lines[start:end] for start, end in pairwise([0, *cuts.tolist(), len(lines)])]


def _read(path: str) -> tuple[Header, dict[str, Any]]:
    with Path(path).open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ConfigError(
                f"{path}: promised a compiled language model, found another file; compile an ARPA file with "
                "`penstock train-lm`"
            )
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        size = int.from_bytes(mapped[-TAIL:], "little")
        header = Header.model_validate_json(mapped[len(mapped) - TAIL - size : -TAIL])
        arrays = {
            name: np.frombuffer(mapped, np.dtype(kind), count, offset)
            for name, (kind, count, offset) in header.arrays.items()
        }
    except (ValidationError, ValueError) as error:
        raise ContractError(f"{path}: promised a whole language model, found a damaged file; copy it again") from error
    return header, arrays
